"""``python -m tools.bench dataset --only first`` and ``--only populate``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from monai_gds.bench.comparison import NO_CACHE, OURS, OURS_LOADER, REFERENCE
from tests.tools.bench.commands import bench_dataset, rows
from tools.bench import first_epoch
from tools.bench.workloads import Workload


def test_the_first_epoch_beside_one_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_epoch, "_PREPROCESSING", 0.01)
    monkeypatch.setattr(first_epoch, "_MEDIUM", (20_000, 50_000, 100_000))
    monkeypatch.setattr(first_epoch, "_LARGE", 1_000_000)
    medium, large = bench_dataset("--only", "first", "--loader", "--repeats", "1", "--cache-dir", tmp_path)
    for report in (medium, large):
        assert list(rows(report))[:4] == [NO_CACHE, OURS, OURS_LOADER, REFERENCE]
        assert report["reference"] == NO_CACHE
        notes = rows(report)[OURS]["notes"]
        assert notes["epoch"].endswith("of no cache's")
        assert notes["flush after it"].endswith(" s")
        assert notes["saving adds"].endswith(" s")
        assert rows(report)[REFERENCE]["notes"]["flush after it"] == "0.00 s", "it saves in its epoch"
    assert list(tmp_path.iterdir()) == []


def test_what_is_still_to_be_saved_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from monai_gds.folder.directory import CacheDirectory

    save = CacheDirectory.save

    def slow(*arguments: Any) -> None:
        time.sleep(0.1)
        save(*arguments)

    monkeypatch.setattr(CacheDirectory, "save", slow)
    monkeypatch.setattr(first_epoch, "_LARGE", 1_000_000)
    report = first_epoch.large_items(Workload(tmp_path, torch.device("cpu"), repeats=1))
    ours = next(row for row in report.rows if row.name == OURS)
    assert 6 / ours.samples[0] > 0.6, "six items were saved, one after the other"
    assert float(ours.notes["saving adds"].split()[0]) > 0.4


def test_filling_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_epoch, "_PREPROCESSING", 0.01)
    (report,) = bench_dataset("--only", "populate", "--repeats", "1")
    assert {"in this process", "1 worker", "2 workers"} <= set(rows(report))
    assert report["reference"] == "1 worker"
