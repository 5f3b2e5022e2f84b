"""A competitor that returns other bytes or another number of batches is found out."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.data import Dataset
from monai.transforms import Compose, Lambda, RandomizableTransform, Transform

from monai_gds import BackendUnavailable, StorageError
from monai_gds.bench.comparison import (
    MONAIS_DATASETS,
    NO_CACHE,
    OURS,
    OURS_LOADER,
    REFERENCE,
    Comparison,
    Competitor,
    compare,
)
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.loader import GDSDataLoader
from monai_gds.storage.plain.posix import PosixBackend

ALL = {
    **MONAIS_DATASETS,
    NO_CACHE: Competitor(lambda items, transform, *_: Dataset(items, transform)),
    OURS: Competitor(GDSDataset),
    OURS_LOADER: Competitor(GDSDataset, GDSDataLoader),
}


def make_tensor(item: dict[str, Any]) -> dict[str, Any]:
    return {"image": torch.arange(15.0).reshape(3, 5) * item["image"]}


def comparison(folder: Path, theirs: Competitor = ALL[REFERENCE], **changes: Any) -> Comparison:
    settings: dict[str, Any] = {
        "title": "t", "items": [{"image": n + 1} for n in range(4)], "transform": Compose([make_tensor]),
        "keys": ["image"], "device": torch.device("cpu"), "folder": folder,
        "competitors": {OURS: ALL[OURS], REFERENCE: theirs}, "repeats": 1, **changes,
    }  # fmt: skip
    return Comparison(**settings)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda item: {"image": item["image"] + 1}, "gave other bytes in batch 0"),
        (lambda item: {"image": item["image"].flip(0)}, "gave other bytes in batch 0"),
    ],
)
def test_a_competitor_that_gives_other_bytes_is_found_out(tmp_path: Path, spoil: Any, message: str) -> None:
    def make(items: Any, transform: Any, folder: Path, device: torch.device) -> Dataset:
        return Dataset(items, Compose([*transform.transforms, Lambda(spoil)]))

    with pytest.raises(StorageError, match=f"{REFERENCE} {message}"):
        compare(comparison(tmp_path, Competitor(make)))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_competitor_that_gives_another_number_of_batches_is_found_out(tmp_path: Path, change: int) -> None:
    def make(items: Any, transform: Any, folder: Path, device: torch.device) -> Dataset:
        return Dataset(([*items, *items])[: len(items) + change], transform)

    with pytest.raises(StorageError, match=f"{REFERENCE} gave {4 + change} batches instead of 4"):
        compare(comparison(tmp_path, Competitor(make)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # in MONAI's ThreadBuffer
def test_a_competitor_that_cannot_serve_the_items_says_why(tmp_path: Path) -> None:
    def refuse(item: Any) -> Any:
        raise TypeError("no such items")

    report = compare(comparison(tmp_path, Competitor(lambda items, *_: Dataset(items, refuse))))
    mine, others = (row.reason for row in report.rows)
    assert mine == "" and f"TypeError: no such items, at {__file__}:" in others


def test_a_competitor_that_cannot_run_says_why(tmp_path: Path) -> None:
    def make(*_: object) -> Dataset:
        raise BackendUnavailable("needs a miracle")

    report = compare(comparison(tmp_path, Competitor(make)))
    assert [row.reason for row in report.rows] == ["", "needs a miracle"]


class Slow(Transform):  # type: ignore[misc]
    """Takes as long as real transforms, so that something is under way when Ctrl-C strikes."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.04)
        return {"image": torch.full((40_000,), float(item["image"]))}


@pytest.mark.parametrize("name", [OURS, OURS_LOADER, REFERENCE, NO_CACHE])
@pytest.mark.parametrize("at", [1, 2])
def test_after_ctrl_c_nothing_runs_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    """Where the consumer is interrupted, loaders' threads work on, and after them what is saved."""
    before = set(threading.enumerate())
    writes: list[str] = []
    write = PosixBackend.write
    consumed = 0

    def slowly(self: PosixBackend, path: str, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.15)
        writes.append(path)
        write(self, path, *args, **kwargs)

    total = torch.Tensor.sum

    def interrupted(self: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal consumed
        if threading.current_thread() is not threading.main_thread():  # a checksum, say
            return total(self, *args)
        consumed += 1
        if consumed == at:
            raise KeyboardInterrupt
        return total(self, *args)

    monkeypatch.setattr(PosixBackend, "write", slowly)
    monkeypatch.setattr(torch.Tensor, "sum", interrupted)
    folder = tmp_path / "bench"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt) as caught:
        compare(comparison(folder, competitors={name: ALL[name]}, transform=Compose([Slow()])))
    assert caught.value.__traceback__ is not None, "which keeps every frame alive, as that of the command does"
    stay = ("monai-gds-writer", "monai-gds-leases", "monai-gds-openmp")
    assert {thread for thread in set(threading.enumerate()) - before if thread.name not in stay} == set()
    shutil.rmtree(folder)
    written = len(writes)
    time.sleep(0.3)
    assert (len(writes), folder.exists()) == (written, False)


class Draw(RandomizableTransform):
    """Adds random numbers, of its own generator and of torch's."""

    def __call__(self, item: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": item["x"] + self.R.random() + torch.rand(())}


def test_in_a_turn_all_datasets_draw_the_same_numbers(tmp_path: Path) -> None:
    items = [{"x": torch.zeros(1)} for _ in range(4)]
    seen: list[float] = []

    class Watched(Comparison):
        def consume(self, tensors: Iterable[torch.Tensor]) -> None:
            seen.extend(tensor.item() for tensor in tensors)

    comparison = Watched("t", items, Compose([Draw()]), ["x"], torch.device("cpu"), tmp_path, MONAIS_DATASETS, 2)
    compare(comparison)
    seen = seen[3 * len(items) :]  # without the first epochs
    turns = [seen[start : start + 4] for start in range(0, len(seen), 4)]
    assert turns[0] == turns[1] == turns[2]
    assert turns[3] == turns[4] == turns[5] != turns[0]
