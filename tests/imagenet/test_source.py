"""ImageSource in a DALI pipeline of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monai_gds.errors import BackendUnavailable
from monai_gds.imagenet import ImageSource
from tests.imagenet.conftest import samples_of_dali

dali = pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")
fn = pytest.importorskip("nvidia.dali.fn")


def pipeline(source: ImageSource, *, no_copy: bool, decode: bool) -> Any:
    @dali.pipeline_def(batch_size=4, num_threads=2, device_id=None)
    def definition():  # type: ignore[no-untyped-def]
        images, labels = fn.external_source(source, num_outputs=2, cycle="raise", no_copy=no_copy)
        return (fn.decoders.image(images) if decode else images), labels

    return definition()


def epoch(pipe: Any) -> list[tuple[bytes, int]]:
    found = []
    while True:
        try:
            images, labels = pipe.run()
        except StopIteration:
            pipe.reset()
            return found
        found += [(bytes(np.asarray(i)), int(np.asarray(n)[0])) for i, n in zip(images, labels, strict=True)]


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("no_copy", [False, True])
@pytest.mark.parametrize("reader", ["posix", "packed"])
def test_the_same_as_dalis_reader(folder: Path, packed: Path, reader: str, no_copy: bool, decode: bool) -> None:
    expected = [(data, label) for data, _, label in samples_of_dali(folder, decode=decode)]
    source = ImageSource(packed if reader == "packed" else folder, 4, reader)
    assert len(source) == 6
    ours = pipeline(source, no_copy=no_copy, decode=decode)
    for _ in range(3):
        assert epoch(ours) == expected
    source.close()


def test_what_it_yields(folder: Path) -> None:
    for images, labels in ImageSource(folder, 4, last_batch="fill"):
        assert labels.dtype == np.int32
        assert labels.shape == (4, 1)
        assert all(isinstance(i, np.ndarray) and i.dtype == np.uint8 and i.ndim == 1 for i in images)


def test_buffers_are_not_reused_while_dali_reads_them(folder: Path) -> None:
    """Batches that were handed out keep their bytes for as long as the source says, and for ever once held."""
    source = ImageSource(folder, 1)
    held = [images[0] for images, _ in source]
    again = [images[0].copy() for images, _ in source]
    assert all(np.array_equal(a, b) for a, b in zip(held, again, strict=True))


def test_it_needs_a_reader_that_works(folder: Path) -> None:
    with pytest.raises(ValueError, match="reader='dali' is not known"):
        ImageSource(folder, 4, "dali")
    with pytest.raises(BackendUnavailable, match="kvikio"):
        ImageSource(folder, 4, "kvikio")
