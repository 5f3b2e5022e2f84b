"""What `monai-gds cache prune` deletes, and what it must not."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from monai.data import PersistentDataset
from monai.transforms import Compose, EnsureTyped

from monai_gds.dataset import GDSDataset
from tests.commands import run


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The one record of a cache directory."""
    with GDSDataset([{"image": torch.ones(1, 8, 8, 8)}], Compose([EnsureTyped("image")]), tmp_path, "cpu") as dataset:
        _ = dataset[0]
    (record,) = tmp_path.glob("*.safetensors")
    return record


@pytest.mark.parametrize("damage", [b"", b"no header at all", b"\x08" + bytes(7) + b'{"a":0} '])
def test_a_damaged_record_is_deleted(record: Path, damage: bytes) -> None:
    record.write_bytes(damage)
    done = run("cache", "prune", record.parent)
    assert done.exit_code == 0
    assert "1 files" in done.stdout
    assert not record.exists()


def test_files_of_others_are_left_alone(record: Path) -> None:
    """A training's folder by mistake: its checkpoints, weights and MONAI's own cache stay."""
    folder = record.parent
    torch.save({"epoch": 1}, folder / "checkpoint.pt")
    safetensors.torch.save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
    _ = PersistentDataset([{"image": torch.ones(1, 8, 8, 8)}], Compose([EnsureTyped("image")]), folder)[0]
    before = {path.name for path in folder.iterdir() if path.is_file()}
    assert len(before) == 4
    done = run("cache", "prune", folder)
    assert done.exit_code == 0
    assert "0 files" in done.stdout
    assert {path.name for path in folder.iterdir() if path.is_file()} == before
