"""``monai-gds blockmap``: output and exit codes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from monai_gds.storage.blockmap.block_map import BlockMap
from tests import commands
from tests.commands import Done
from tests.loopdisk import LoopDisk, loop_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path, "xfs") as disk:
        (disk.folder / "set").mkdir()
        (disk.folder / "set/a.bin").write_bytes(b"a" * 5000)
        (disk.folder / "set/b.bin").write_bytes(b"b" * 70_000)
        yield disk


def run(*arguments: object) -> Done:
    return commands.run("blockmap", *arguments)


def test_build_and_verify(disk: LoopDisk, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    built = run("build", disk.folder / "set", "--output", file)
    assert (built.exit_code, disk.device in built.output, "2 files" in built.output) == (0, True, True)
    verified = run("verify", file, "--data")
    assert (verified.exit_code, "2 files, 0 of them not as mapped" in verified.output) == (0, True)


def test_verify_names_what_changed_and_fails(disk: LoopDisk, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    run("build", disk.folder / "set", "--output", file)
    (disk.folder / "set/a.bin").write_bytes(b"c" * 5000)
    verified = run("verify", file)
    assert verified.exit_code == 1
    assert "set/a.bin" in verified.output
    assert "set/b.bin" not in verified.output


def test_a_plain_map_is_verified_below_a_parent(disk: LoopDisk, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    assert run("build", disk.folder / "set", "--output", file, "--plain").exit_code == 0
    assert run("verify", file, "--parent", disk.folder).exit_code == 0


def test_files_that_cannot_be_mapped_are_listed_with_the_remedy(disk: LoopDisk, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    with (disk.folder / "set/tail.bin").open("wb") as f:
        os.posix_fallocate(f.fileno(), 0, 1 << 20)
    built = run("build", disk.folder / "set", "--output", file)
    assert built.exit_code == 1
    assert "set/tail.bin: cannot be read" in built.output
    assert "cp --reflink=never" in built.output
    assert "2 files" in built.output
    assert "1 could not be mapped" in built.output
    assert run("verify", file, "--data").exit_code == 0
    (disk.folder / "set/tail.bin").write_bytes(b"can be mapped")
    os.sync()
    verified = run("verify", file)
    assert (verified.exit_code, "set/tail.bin: it could not be mapped, and now it can" in verified.output) == (1, True)
    (disk.folder / "set/tail.bin").unlink()
    assert "set/tail.bin: [Errno 2]" in run("verify", file).output


def test_a_plain_map_leaves_out_what_it_cannot_hold(disk: LoopDisk, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    (disk.folder / "set/empty.bin").touch()
    built = run("build", disk.folder / "set", "--output", file, "--plain")
    assert (built.exit_code, len(BlockMap.load(file))) == (1, 2)
    assert "set/empty.bin: it is empty" in built.output


def test_checksums(disk: LoopDisk, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    assert run("build", disk.folder / "set", "--output", file, "--checksums").exit_code == 0
    assert BlockMap.load(file).has_checksums
    refused = run("build", disk.folder / "set", "--output", file, "--checksums", "--plain")
    assert refused.exit_code == 2
    assert "plain map cannot hold" in refused.output


def test_a_device_that_may_not_be_read_is_named_once_and_no_file_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").mkdir()
    for name in "abc":
        (tmp_path / "set" / name).write_bytes(bytes(5000))
    file = tmp_path / "map.json"
    if run("build", tmp_path / "set", "--output", file).exit_code:
        pytest.skip("the temporary folder is not on a disk that can be mapped")
    opened = os.open

    def refuse_devices(path: str, *how: int, **where: int) -> int:
        if str(path).startswith("/dev/"):
            raise PermissionError(1, "Operation not permitted", path)
        return opened(path, *how, **where)

    monkeypatch.setattr(os, "open", refuse_devices)
    verified = run("verify", file, "--data")
    assert (verified.exit_code, verified.output.count("the device cannot be read")) == (1, 1)
    assert "not as mapped" not in verified.output


def test_a_map_for_a_missing_folder_is_refused_before_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.bin").write_bytes(b"a")
    refused = run("build", tmp_path / "set", "--output", tmp_path / "missing/map.json", "--checksums")
    assert refused.exit_code == 2
    assert "--output" in refused.output
    assert "is not a folder" in refused.output
