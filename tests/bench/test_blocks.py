"""The benchmark of block reads: every peer runs, reads the right bytes, and has a figure or a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monai_gds.bench import blocks
from tests.loopdisk import loop_disk, not_permitted
from tests.storage import libraries


@pytest.mark.parametrize("kind", ["real", "double"])
def test_every_peer_has_a_figure(tmp_path: Path, kind: str) -> None:
    with libraries.using(kind), loop_disk(tmp_path, "xfs") as disk:
        settings = blocks.Settings(disk.folder, files=100, nbytes=20_000, batch=16, repeats=2)
        report = blocks.measure(settings)
        assert [row.name for row in report.rows] == list(blocks.PEERS)
        for row in report.rows:
            assert len(row.samples) == 2, row.reason
        assert blocks.block_map(settings)["block map"].endswith(" files/s")


def test_the_folder_may_be_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with libraries.using("double"), loop_disk(tmp_path, "xfs") as disk:
        monkeypatch.chdir(disk.folder.parent)
        (disk.folder / "set").mkdir()
        settings = blocks.Settings(Path(disk.folder.name) / "set", files=20, nbytes=20_000, batch=16, repeats=1)
        assert all(row.samples for row in blocks.measure(settings).rows)
        assert blocks.block_map(settings)["block map"].endswith(" files/s")


def test_a_peer_without_its_library_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XNVME_LIBRARY_PATH", "/nowhere/libxnvme.so")
    with loop_disk(tmp_path, "xfs") as disk:
        report = blocks.measure(blocks.Settings(disk.folder, files=20, nbytes=20_000, batch=16, repeats=1))
    row = next(row for row in report.rows if row.name.startswith("xnvme-block"))
    assert (row.samples, "/nowhere/libxnvme.so" in row.reason) == ((), True)


def test_a_disk_that_may_not_be_read_says_how_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XNVME_LIBRARY_PATH", "/nowhere/libxnvme.so")
    with loop_disk(tmp_path, "xfs") as disk:
        not_permitted(disk.device, monkeypatch)
        report = blocks.measure(blocks.Settings(disk.folder, files=20, nbytes=20_000, batch=16, repeats=1))
    reason = next(row.reason for row in report.rows if row.name == blocks.REFERENCE)
    for words in (disk.device, "Operation not permitted", "root", "the group disk", f"--device={disk.device}:r"):
        assert words in reason


def test_a_peer_that_reads_wrong_bytes_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "PEERS", {"wrong": lambda files, stack: lambda n: [torch.zeros(len(n))] * len(n)})
    with loop_disk(tmp_path, "xfs") as disk, pytest.raises(AssertionError, match="wrong read wrong bytes"):
        blocks.measure(blocks.Settings(disk.folder, files=20, nbytes=20_000, batch=16, repeats=1))
