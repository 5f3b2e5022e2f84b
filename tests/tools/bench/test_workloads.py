"""``python -m tools.bench dataset``: every workload runs, and its titles and notes are true."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from monai_gds.bench.comparison import OURS, OURS_LOADER, REFERENCE
from tests.machines import mounted_tmpfs
from tests.tools.bench.commands import SMALL, bench_dataset, rows, run
from tools.bench.competitors import OURS_DIRECT, OURS_WORKERS, REFERENCE_WORKERS, WORKERS, competitors_for
from tools.bench.workloads import Burn


def measured(report: dict[str, Any]) -> list[str]:
    """The ceilings that have figures."""
    return [row["name"] for row in report["ceilings"] if row["samples"]]


def test_epochs_with_our_loader_beside_the_peers_and_the_ceilings(tmp_path: Path) -> None:
    volumes, crops = bench_dataset(
        "--only", "volumes", "--only", "crops", "--loader", "--batch-size", "2", "--cache-dir", tmp_path
    )
    for report in (volumes, crops):
        assert list(rows(report)) == competitors_for(torch.device("cpu"), loader=True)
        assert report["reference"] == REFERENCE
        assert report["unit"] == "GB/s"
        for row in report["rows"]:
            assert row["reason"] or len(row["samples"]) == 2
        for row in report["ceilings"]:
            assert len(row["samples"]) == 2
            assert row["median"] > 0
    assert OURS_LOADER in rows(volumes)
    assert "batch 2, page cache warm" in volumes["title"]
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_without_the_loader_there_is_no_row_for_it() -> None:
    (report,) = bench_dataset("--only", "volumes", "--repeats", "1")
    assert OURS in rows(report)
    assert OURS_LOADER not in rows(report)


def test_hits() -> None:
    for report in bench_dataset("--only", "hits", "--repeats", "1"):
        assert report["unit"] == "items/s"
        assert float(rows(report)[OURS]["notes"]["µs per item"]) > 0
        assert report["ceilings"] == []


def test_each_loader_over_each_dataset_with_metadata_and_without() -> None:
    reports = bench_dataset("--only", "loaders")
    for report, what, persistent in zip(
        reports, ("MetaTensors", "plain tensors"), ("PersistentDataset + meta", REFERENCE), strict=True
    ):
        assert report["title"] == f"3 whole volumes of 24 x 24 x 12 voxels to cpu, {what}, batch 1"
        datasets = (OURS, "CacheDataset", persistent)
        through = {f"{name}, {loader}" for name in datasets for loader in ("ThreadDataLoader", "2 workers")}
        assert set(rows(report)) == {OURS_LOADER, *through}
        for row in report["rows"]:
            assert float(row["notes"]["least ms"]) == pytest.approx(1e3 / row["highest"], abs=0.01)


def test_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))  # which takes a minute to show
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args: started.append(popen(*args)) or started[-1])
    (report,) = bench_dataset("--only", "busy", "--repeats", "1")
    assert {OURS, OURS_LOADER, REFERENCE} <= set(rows(report))
    assert len(started) == 2 * (os.cpu_count() or 1)
    assert all(process.returncode is not None for process in started), "they have ended"


def test_small_records_keep_their_metadata_on_both_sides() -> None:
    plain, nifti = bench_dataset("--only", "small", "--loader", "--repeats", "1")
    assert plain["reference"] == REFERENCE
    assert nifti["reference"] == "PersistentDataset + meta"
    for report in (plain, nifti):
        assert {OURS, OURS_LOADER, report["reference"]} <= set(rows(report))
        assert "80 records" in report["title"]
        assert "batch 256" in report["title"]


def test_cold_says_what_was_cold(tmp_path: Path) -> None:
    (report,) = bench_dataset("--only", "volumes", "--cold", "--loader", "--cache-dir", tmp_path)
    before = {name: row["notes"]["page cache before"] for name, row in rows(report).items() if row["samples"]}
    assert before[OURS] == before[OURS_DIRECT] == before[REFERENCE] == "cold"
    assert before["CacheDataset"] == "has no files"
    assert "page cache dropped" in report["title"]


def test_cold_says_when_dropping_did_not_work(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "memory", 256 << 20) as folder:
        (report,) = bench_dataset("--only", "volumes", "--cold", "--cache-dir", folder, "--repeats", "1")
        before = {name: row["notes"]["page cache before"] for name, row in rows(report).items() if row["samples"]}
        assert before[OURS] == before[REFERENCE] == "warm"
        disks = [row for row in report["ceilings"] if row["name"].startswith("disk")]
        assert len(disks) == 2
        assert all("there is no disk to read" in row["reason"] for row in disks)
        assert len(measured(report)) == 2


@pytest.mark.long
def test_augmentation_beside_as_many_workers_and_what_the_transforms_take() -> None:
    reports = bench_dataset("--only", "augment", "--repeats", "1")
    assert len(reports) == 3
    for report, ideal in zip(reports, (10, 100, 100), strict=True):
        assert list(rows(report)) == [OURS_WORKERS, OURS_LOADER, REFERENCE_WORKERS]
        assert report["reference"] == REFERENCE_WORKERS
        assert report["ceilings"][0]["median"] == pytest.approx(ideal * WORKERS)
        assert all(row["median"] < ideal * WORKERS for row in report["rows"])


def test_burning_takes_processor_time() -> None:
    start = time.thread_time()
    assert Burn(0.05)("item") == "item"
    assert 0.05 <= time.thread_time() - start < 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "volume"], "'volume' is not one of"), (["--batch-size", "0"], "--batch-size")],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    assert message in run("dataset", *arguments, code=2)


@pytest.mark.gpu
def test_on_a_gpu_every_competitor_and_ceiling_is_measured(tmp_path: Path) -> None:
    done = run("dataset", *SMALL[2:], "--json", "--loader", "--only", "volumes", "--cache-dir", tmp_path)
    (report,) = json.loads(done)["reports"]
    assert {"monai GDSDataset", "monai GDSDataset, 16 thr."} <= set(rows(report))
    assert "pinned copy to the GPU" in measured(report)
