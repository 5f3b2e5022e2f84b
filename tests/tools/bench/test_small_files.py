"""The benchmark of block reads: every method reads the right bytes and has a figure, or has a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.loopdisk import loop_disk, not_permitted
from tests.storage.xnvme import libraries
from tools.bench import small_files
from tools.bench.small_files import SmallFiles, describe_block_map, measure


@pytest.mark.parametrize("kind", ["real", "double"])
def test_every_method_has_a_figure(tmp_path: Path, kind: str) -> None:
    with libraries.using(kind), loop_disk(tmp_path, "xfs") as disk:
        settings = SmallFiles(disk.folder, count=100, nbytes=20_000, batch=16, repeats=2)
        report = measure(settings)
        assert [row.name for row in report.rows] == list(small_files.METHODS)
        for row in report.rows:
            assert len(row.samples) == 2, row.reason
        assert describe_block_map(settings.folder)["block map"].endswith(" files/s")


def test_the_folder_may_be_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with libraries.using("double"), loop_disk(tmp_path, "xfs") as disk:
        monkeypatch.chdir(disk.folder.parent)
        (disk.folder / "set").mkdir()
        settings = SmallFiles(Path(disk.folder.name) / "set", count=20, nbytes=20_000, batch=16, repeats=1)
        assert all(row.samples for row in measure(settings).rows)
        assert describe_block_map(settings.folder)["block map"].endswith(" files/s")


def test_a_method_without_its_library_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XNVME_LIBRARY_PATH", "/nowhere/libxnvme.so")
    with loop_disk(tmp_path, "xfs") as disk:
        report = measure(SmallFiles(disk.folder, count=20, nbytes=20_000, batch=16, repeats=1))
    row = next(row for row in report.rows if row.name.startswith("xnvme-block"))
    assert (row.samples, "/nowhere/libxnvme.so" in row.reason) == ((), True)


def test_a_disk_that_cannot_be_read_shows_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XNVME_LIBRARY_PATH", "/nowhere/libxnvme.so")
    with loop_disk(tmp_path, "xfs") as disk:
        not_permitted(disk.device, monkeypatch)
        report = measure(SmallFiles(disk.folder, count=20, nbytes=20_000, batch=16, repeats=1))
    reason = next(row.reason for row in report.rows if row.name == small_files.REFERENCE)
    for words in (disk.device, "Operation not permitted", "root", "the group disk", f"--device={disk.device}:r"):
        assert words in reason


def test_a_method_that_reads_wrong_bytes_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        small_files, "METHODS", {"wrong": lambda files, stack: lambda n: [torch.zeros(len(n))] * len(n)}
    )
    with loop_disk(tmp_path, "xfs") as disk, pytest.raises(AssertionError, match="wrong read wrong bytes"):
        measure(SmallFiles(disk.folder, count=20, nbytes=20_000, batch=16, repeats=1))
