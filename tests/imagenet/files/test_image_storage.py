"""Memory of batches: nobody's is overwritten, and what nobody holds is used again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from monai_gds import limits
from monai_gds.bench.made_up import write_image_folder
from monai_gds.imagenet import open_images, pack_folder
from monai_gds.imagenet.files.image_storage import ImageStorage
from monai_gds.imagenet.source import open_reader


@pytest.fixture
def buffers() -> Iterator[ImageStorage]:
    storage = ImageStorage("posix", torch.device("cpu"))
    yield storage
    storage.close()


def test_memory_comes_back_when_the_last_slice_of_it_is_gone(buffers: ImageStorage) -> None:
    first = buffers.take(1000)
    place = first.data_ptr()
    array, part = first.numpy()[5:], first[10:20]
    del first
    assert buffers.take(1000).data_ptr() != place
    del array
    assert all(b.data_ptr() != place for b in [buffers.take(1000) for _ in range(5)])
    del part
    assert place in {b.data_ptr() for b in [buffers.take(1000) for _ in range(limits.IMAGE_BUFFERS)]}


def test_what_is_too_small_is_not_given(buffers: ImageStorage) -> None:
    for nbytes in (10, 1000, 10_000, 100):
        assert buffers.take(nbytes).numel() >= nbytes


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_that_is_kept_keeps_its_bytes(tmp_path: Path, packed: bool) -> None:
    folder = write_image_folder(tmp_path / "images", 40)
    images = open_images(folder)
    content = [Path(images.path(i)).read_bytes() for i in range(40)]  # type: ignore[union-attr]
    if packed:
        images = pack_folder(images, tmp_path / "packed", file_bytes=600_000)  # type: ignore[arg-type]
    reader = open_reader("packed" if packed else "posix", images, torch.device("cpu"))
    batches = np.array_split(np.random.default_rng(0).permutation(40), 10)
    kept = [batch for _ in range(4) for batch in list(reader.read(batches))[::2]]
    for batch in kept:
        for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
            assert image.numpy().tobytes() == content[index]
    reader.close()
