"""A competitor that returns other bytes or another number of batches is found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from monai.data import Dataset
from monai.transforms import Compose, Lambda, RandSpatialCropd

from monai_gds import BackendUnavailable, StorageError
from monai_gds.bench.comparison import Comparison, checksums, compare, enter
from monai_gds.bench.competitors import COMPETITORS, NO_CACHE, OURS, REFERENCE, Competitor, competitors_for
from monai_gds.bench.workloads import MakeVolumes


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
