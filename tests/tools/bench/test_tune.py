"""``python -m tools.bench tune``: DeepNVMe's settings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from monai_gds.storage import available_backends
from monai_gds.storage.deepnvme import Settings
from tests import commands
from tests.tools.bench.commands import run
from tools.bench import tune

pytestmark = pytest.mark.long  # for DeepNVMe


@pytest.fixture(autouse=True)
def deepnvme() -> None:
    found = available_backends("cpu")["deepnvme"]
    if not found:
        pytest.skip(f"{found.reason}; {found.remedy}")


def test_the_best_comes_first_and_can_be_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = {"block_size": (1 << 20, 4096), "queue_depth": (32,), "intra_op_parallelism": (1, 2)}
    monkeypatch.setattr(tune, "GRID", grid)
    done = run("tune", "--nvme-folder", tmp_path, "--mb-size", 8, "--loop", 2)
    (tmp_path / "tuned.json").write_text(done)
    assert os.listdir(tmp_path) == ["tuned.json"]
    settings = Settings.tuned(tmp_path / "tuned.json")
    first = next(line for line in done.splitlines() if "block_size" in line)
    assert f"block_size {settings.block_size}, queue_depth 32, intra_op_parallelism" in first
    file = tmp_path / "input.bin"
    file.write_bytes(bytes(1 << 20))
    method = ["--method", "deepnvme", "--tuned", tmp_path / "tuned.json", "--device", "cpu", "--json"]
    got = commands.run("bench", "tensor", "load", "--input-file", file, *method)
    assert json.loads(got.stdout)["reports"][0]["rows"][0]["samples"]


def test_what_does_not_work_says_why_and_the_rest_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = {"block_size": (4096,), "queue_depth": (8, 500_000), "intra_op_parallelism": (1,)}
    monkeypatch.setattr(tune, "GRID", grid)
    (loads, _), best = tune.tune(tmp_path, 1 << 20, torch.device("cpu"), 1, lambda *_: None)
    assert best["queue_depth"] == 8
    assert [bool(row.samples) for row in loads.rows] == [True, False]
    assert "queue" in loads.rows[1].reason
