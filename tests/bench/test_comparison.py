"""A competitor that returns other bytes or another number of batches is found out."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.data import Dataset
from monai.transforms import Compose, Lambda, RandSpatialCropd, Transform

from monai_gds import BackendUnavailable, StorageError
from monai_gds.bench.comparison import Comparison, checksums, compare, enter
from monai_gds.bench.competitors import COMPETITORS, NO_CACHE, OURS, OURS_LOADER, REFERENCE, Competitor, competitors_for
from monai_gds.bench.workloads import MakeVolumes
from monai_gds.storage.plain.posix import PosixBackend


def comparison(folder: Path, **changes: Any) -> Comparison:
    settings: dict[str, Any] = {
        "title": "t", "items": [{"image": n} for n in range(4)], "transform": Compose([MakeVolumes((3, 5))]),
        "keys": ["image"], "nbytes": 240, "device": torch.device("cpu"), "folder": folder, "names": [OURS, REFERENCE],
        "repeats": 1, **changes,
    }  # fmt: skip
    return Comparison(**settings)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda item: {"image": item["image"] + 1}, "gave other bytes in batch 0"),
        (lambda item: {"image": item["image"].flip(0)}, "gave other bytes in batch 0"),
    ],
)
def test_a_competitor_that_gives_other_bytes_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str
) -> None:
    def make(items: Any, transform: Any, folder: Path, device: torch.device) -> Dataset:
        return Dataset(items, Compose([*transform.transforms, Lambda(spoil)]))

    monkeypatch.setitem(COMPETITORS, REFERENCE, Competitor(make))
    with pytest.raises(StorageError, match=f"{REFERENCE} {message}"):
        compare(comparison(tmp_path))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_competitor_that_gives_another_number_of_batches_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    def make(items: Any, transform: Any, folder: Path, device: torch.device) -> Dataset:
        return Dataset(([*items, *items])[: len(items) + change], transform)

    monkeypatch.setitem(COMPETITORS, REFERENCE, Competitor(make))
    with pytest.raises(StorageError, match=f"{REFERENCE} gave {4 + change} batches instead of 4"):
        compare(comparison(tmp_path))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # in MONAI's ThreadBuffer
def test_a_competitor_that_cannot_serve_the_items_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(item: Any) -> Any:
        raise TypeError("no such items")

    monkeypatch.setitem(COMPETITORS, REFERENCE, Competitor(lambda items, *_: Dataset(items, refuse)))
    report = compare(comparison(tmp_path))
    mine, others = (row.reason for row in report.rows)
    assert mine == "" and others.endswith("TypeError: no such items")


def test_a_competitor_that_cannot_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        COMPETITORS, REFERENCE, Competitor(COMPETITORS[REFERENCE].make, missing=lambda: "needs a miracle")
    )
    report = compare(comparison(tmp_path))
    assert [row.reason for row in report.rows] == ["", "needs a miracle"]


@pytest.mark.parametrize("name", competitors_for(torch.device("cpu"), loader=True))
def test_random_crops_are_compared_too(tmp_path: Path, name: str) -> None:
    crop = Compose([MakeVolumes((1, 9, 9, 9)), RandSpatialCropd("image", (4, 4, 4), random_size=False)])
    work = comparison(tmp_path, transform=crop, batch_size=2)
    expected = checksums(enter(work, NO_CACHE), work)
    try:
        entrant = enter(work, name)
    except BackendUnavailable as e:
        pytest.skip(str(e))
    for _ in range(2):
        assert checksums(entrant, work) == expected


class Slow(Transform):  # type: ignore[misc]
    """Takes as long as real transforms, so that something is under way when Ctrl-C strikes."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.1)
        return {"image": torch.full((40_000,), float(item["image"]))}


@pytest.mark.parametrize("names", [[OURS], [OURS_LOADER], [REFERENCE], [NO_CACHE]])
@pytest.mark.parametrize("at", [1, 2])
def test_after_ctrl_c_nothing_runs_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], at: int
) -> None:
    """Where the consumer is interrupted, loaders' threads work on, and behind them what is saved."""
    before = set(threading.enumerate())
    writes: list[str] = []
    write = PosixBackend.write
    consumed = 0

    def slowly(self: PosixBackend, path: str, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
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
        compare(comparison(folder, names=names, transform=Compose([Slow()])))
    assert caught.value.__traceback__ is not None, "which keeps every frame alive, as that of the command does"
    saving = {t for t in threading.enumerate() if t.name in ("monai-gds-writer", "monai-gds-leases")}
    assert set(threading.enumerate()) - before - saving == set()
    shutil.rmtree(folder)
    written = len(writes)
    time.sleep(0.5)
    assert (len(writes), folder.exists()) == (written, False)
