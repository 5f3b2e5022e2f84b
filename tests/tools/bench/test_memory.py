"""``python -m tools.bench dataset --only memory``."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from monai_gds import MonaiGdsError
from tools.bench import memory
from tools.bench.workloads import Workload


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process whose memory is measured has imported everything."""
    monkeypatch.setattr(memory, "get_context", lambda _: multiprocessing.get_context("fork"))


def test_memory_by_epoch_beside_the_bound(tmp_path: Path, forked: None) -> None:
    work = Workload(tmp_path, torch.device("cpu"), items=3, side=32)
    (report,) = memory.memory(work, epochs=3)
    assert [row.name for row in report.rows] == ["epoch 1", "epoch 2", "epoch 3"]
    assert report.unit == "MB"
    (bound,) = report.ceilings
    record = next(tmp_path.rglob("*.safetensors")).stat().st_size
    assert bound.samples == ((4 * record + (64 << 20)) / 1e6,)
    assert all(max(row.samples) < bound.samples[0] for row in report.rows)


def test_memory_that_grows_is_seen(tmp_path: Path) -> None:
    work = Workload(tmp_path, torch.device("cpu"), items=2, side=16)
    memory._dataset(work, work.device).populate(progress=False)
    kept = []

    class Loader(memory.GDSDataLoader):
        def __iter__(self) -> Any:
            kept.append(torch.ones(200 << 20, dtype=torch.uint8))
            return super().__iter__()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "GDSDataLoader", Loader)
        found = memory._measure(work, 3)
    peaks = [max(values) for values in found["host"]]
    assert peaks[0] > 100 << 20  # less what earlier tests left, which may go meanwhile
    assert peaks[2] - peaks[1] > 100 << 20


def dies(*_: object) -> None:
    os._exit(3)


def fails(*_: object) -> None:
    raise RuntimeError("there were 2 batches")


@pytest.mark.parametrize(
    ("measure", "error", "message"),
    [(dies, MonaiGdsError, "whose memory was measured died"), (fails, RuntimeError, "there were 2 batches")],
)
def test_a_failing_process_is_not_taken_for_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None, measure: Any, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(memory, "_measure", measure)
    with pytest.raises(error, match=message):
        memory.memory(Workload(tmp_path, torch.device("cpu"), items=1, side=8), epochs=1)


@pytest.mark.long
def test_a_process_that_is_started_for_it(tmp_path: Path) -> None:
    (report,) = memory.memory(Workload(tmp_path, torch.device("cpu"), items=2, side=16), epochs=2)
    assert [row.name for row in report.rows] == ["epoch 1", "epoch 2"]


@pytest.mark.gpu
def test_memory_of_the_device(tmp_path: Path) -> None:
    host, device = memory.memory(Workload(tmp_path, torch.device("cuda", 0), items=6, side=64), epochs=3)
    for report in (host, device):
        assert len(report.rows) == 3
        assert all(max(row.samples) < report.ceilings[0].samples[0] for row in report.rows)
