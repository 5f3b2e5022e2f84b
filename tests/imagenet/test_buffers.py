"""Memory is used again only once nothing reads from it, however far ahead DALI works: every image carries its index."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds import limits
from monai_gds.imagenet import ImageNetDataset, dali_iterator, open_images, pack_folder
from monai_gds.imagenet.files.image_storage import ImageStorage

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")

COUNT = 96

how_dali_runs = [
    pytest.mark.parametrize("depth", [1, 2, 5]),
    pytest.mark.parametrize("dynamic", [True, False, None]),
]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images whose pixels all are their index, of different sizes."""
    module = pytest.importorskip("PIL.Image", reason="Pillow is not installed on this machine")
    root = tmp_path_factory.mktemp("numbered") / "images"
    root.mkdir()
    for index in range(COUNT):
        grey = module.new("L", (400 - index % 5, 300 + index % 7), index)  # takes DALI longer to decode than us to read
        grey.save(root / f"{index:03d}.jpg", quality=100)
    return root


@pytest.fixture(scope="module")
def packed(numbered: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "images"
    pack_folder(open_images(numbered), out, file_bytes=20_000)  # type: ignore[arg-type]
    return out


@pytest.fixture
def overwritten_when_given_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Fills each buffer with other images' bytes as soon as the storage hands it out again."""
    taken: list[int] = []
    take = ImageStorage.take

    def taking(self: ImageStorage, nbytes: int) -> torch.Tensor:
        buffer = take(self, nbytes)
        taken.append(buffer.data_ptr())
        buffer.fill_(255)
        return buffer

    monkeypatch.setattr(ImageStorage, "take", taking)
    yield taken
    assert len(set(taken)) < len(taken)  # some were used again


def all_of(image: torch.Tensor) -> int:
    """The one value of all pixels."""
    pixels = image.numpy()
    assert (pixels == pixels.flat[0]).all()
    return int(pixels.flat[0])


def with_marks(marks: list[pytest.MarkDecorator]) -> Any:
    def decorate(function: Any) -> Any:
        for mark in marks:
            function = mark(function)
        return function

    return decorate


@with_marks(how_dali_runs)
@pytest.mark.parametrize("reader", ["posix", "packed"])
def test_each_image_is_what_its_label_says(
    numbered: Path, packed: Path, overwritten_when_given_back: list[int], reader: str, depth: int, dynamic: bool | None
) -> None:
    """When it comes, and when the epoch is over, of a consumer that is slower and of one that is faster than DALI."""
    dataset = ImageNetDataset(
        packed if reader == "packed" else numbered, 8, reader, "cpu", shuffle=True, num_threads=1, window=1,
        prefetch_queue_depth=depth, exec_dynamic=dynamic,
    )  # fmt: skip
    for pause in (0.002, 0.0):
        kept = []
        for batch in dataset:
            assert [all_of(image) for image in batch["image"]] == batch["label"].tolist()
            kept.append(batch)
            time.sleep(pause)
        assert sorted(label for batch in kept for label in batch["label"].tolist()) == list(range(COUNT))
        for batch in kept:
            assert [all_of(image) for image in batch["image"]] == batch["label"].tolist()
    dataset.close()


@with_marks(how_dali_runs)
def test_each_sample_of_an_iterable_is_whole(depth: int, dynamic: bool | None) -> None:
    """Its arrays are written to again at once, as by a source with one buffer."""
    buffer = np.empty((4, 50), np.uint8)

    def source() -> Iterator[dict[str, Any]]:
        for number in range(20):
            buffer[:] = number
            yield {"x": buffer}

    loader = dali_iterator(
        source, 4, device="cpu", already_batched=True, prefetch_queue_depth=depth, exec_dynamic=dynamic, num_threads=2
    )
    for _ in range(2):
        kept = [batch["x"] for batch in loader]
        assert [all_of(batch) for batch in kept] == list(range(20))


@with_marks(how_dali_runs)
def test_leaving_an_epoch_and_failing_in_one_leave_the_dataset_usable(
    numbered: Path, depth: int, dynamic: bool | None
) -> None:
    dataset = ImageNetDataset(numbered, 4, "posix", "cpu", prefetch_queue_depth=depth, exec_dynamic=dynamic)
    for leave_after in (0, 1, 7):
        for number, batch in enumerate(dataset):
            assert batch["label"][0] == 4 * number
            if number == leave_after:
                break
    assert [int(batch["label"][0]) for batch in dataset] == list(range(0, COUNT, 4))
    dataset.close()


@pytest.mark.parametrize("depth", [None, 1, 2, 5])
def test_dali_works_so_many_batches_ahead(depth: int | None) -> None:
    taken: list[int] = []

    def source() -> Iterator[dict[str, int]]:
        for number in range(20):
            taken.append(number)
            yield {"x": number}

    ahead = limits.DALI_PREFETCH_BATCHES if depth is None else depth
    for number, _ in enumerate(dali_iterator(source, 1, device="cpu", prefetch_queue_depth=depth)):
        assert len(taken) == min(20, number + 1 + ahead)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefetch_queue_depth": 0}, "prefetch_queue_depth=0: it must be at least 1"),
        ({"prefetch_queue_depth": {"cpu_size": 2}}, "prefetch_queue_depth must be an int"),
        ({"num_threads": 0}, "num_threads=0: it must be at least 1"),
        ({"num_threads": 1.5}, "num_threads must be an int"),
        ({"num_threads": 1, "threads": 1}, "give one of them"),
    ],
)
def test_what_dali_would_not_take(numbered: Path, arguments: dict[str, Any], message: str) -> None:
    for make in (
        lambda: ImageNetDataset(numbered, device="cpu", **arguments),
        lambda: dali_iterator([], 1, **arguments),
    ):
        with pytest.raises(ValueError, match=message):
            make()
