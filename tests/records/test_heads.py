"""Records kept in the memory of a device: budgets and identities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monai_gds.records.heads import KeptRecords
from monai_gds.storage import FileId


def record(folder: Path, name: str) -> tuple[str, FileId]:
    path = folder / name
    path.write_bytes(b"record")
    return str(path), FileId.of(path)


def test_the_first_that_come_are_kept_within_the_budget(tmp_path: Path) -> None:
    kept = KeptRecords(100)
    (a, a_file), (b, b_file), (c, c_file) = (record(tmp_path, name) for name in "abc")
    kept.keep(a, (a_file, [torch.zeros(40, dtype=torch.uint8), torch.zeros(20, dtype=torch.uint8)]), 60)
    assert kept.has_room(b, 40)
    assert not kept.has_room(b, 41)
    assert kept.has_room(a, 1000)  # it is there already
    kept.keep(b, (b_file, [torch.zeros(41, dtype=torch.uint8)]), 41)
    kept.keep(c, (c_file, [torch.zeros(40, dtype=torch.uint8)]), 40)
    found = kept.of_file(a)
    assert found is not None
    assert [tensor.nbytes for tensor in found] == [40, 20]
    assert kept.of_file(b) is None
    assert kept.of_file(c) is not None
    assert kept.nbytes == 100
    kept.drop(a)
    kept.drop(a)
    assert kept.nbytes == 40


def test_a_replaced_record_is_given_up(tmp_path: Path) -> None:
    kept = KeptRecords(100)
    path, file = record(tmp_path, "a")
    kept.keep(path, (file, [torch.zeros(60, dtype=torch.uint8)]), 60)
    Path(path).write_bytes(b"another record")
    assert kept.of_file(path) is None
    assert kept.nbytes == 0
    again = FileId.of(path)
    kept.keep(path, (again, [torch.zeros(50, dtype=torch.uint8)]), 50)
    Path(path).unlink()
    with pytest.raises(FileNotFoundError):
        kept.of_file(path)
