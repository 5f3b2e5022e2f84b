"""Plain files: identity, memory that begins at a page, and hints to the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monai_gds.base import file_systems
from monai_gds.errors import FileChanged
from monai_gds.keys.sources import Sources
from monai_gds.storage import ALIGNMENT, FileId, Reads, files, open_storage
from monai_gds.testing.tools import descriptors
from tests.loopdisk import loop_disk


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, (4 << 20) - 1, 4 << 20, (9 << 20) + 5])
def test_memory_begins_at_a_page(nbytes: int) -> None:
    memory = files.aligned_empty(nbytes)
    assert memory.numel() == nbytes
    assert memory.data_ptr() % ALIGNMENT == 0
    assert memory.untyped_storage().nbytes() <= nbytes + ALIGNMENT  # it is pickled as a whole


def test_only_the_expected_file_is_opened_and_the_error_tells_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"12345")
    for expected in (None, 5, FileId.of(path)):
        os.close(files.open_file(str(path), expected))
    identity, before = FileId.of(path), descriptors()
    path.write_bytes(b"123456")
    with pytest.raises(FileChanged, match=r"file\.bin has 6 bytes, and had 5 .*list the files again"):
        files.open_file(str(path), 5)
    with pytest.raises(FileChanged, match=r"file\.bin"):
        files.open_file(str(path), identity)
    assert descriptors() == before


@contextmanager
def leased(path: Path) -> Iterator[None]:
    """A process that has a lease on a file, as Samba and knfsd take them, and gives it up when asked."""
    holder = """
import fcntl, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDWR)
signal.signal(signal.SIGIO, lambda *_: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK))
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", holder, str(path)], **pipes) as process:  # type: ignore[call-overload]
        if process.stdout.readline() != "held\n":
            pytest.skip("this file system has no leases")
        yield
        process.stdin.close()


def by_storage(path: str) -> None:
    (out,) = open_storage("posix", "cpu").load(Reads.of(path, [(0, 5)])).wait()
    assert bytes(out) == b"12345"


def as_a_source(path: str) -> None:
    found = Sources("content", None).identity(path)
    assert found is not None
    assert "unreadable" not in found.content


@pytest.mark.parametrize("way", [by_storage, as_a_source, lambda path: files.read_head(path, 5)])
def test_a_file_that_another_process_has_a_lease_on(tmp_path: Path, way: Callable[[str], object]) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"12345")
    with leased(path):
        way(str(path))


def test_a_new_file_takes_no_writes_where_room_cannot_be_reserved(tmp_path: Path) -> None:
    nbytes = 1 << 20
    with loop_disk(tmp_path, make=("-O", "^extent,^64bit")) as disk:  # as ext3: no fallocate
        with files.new_file(str(disk.folder / "new"), nbytes, durable=False, mode=0o600) as fd:
            assert os.fstat(fd).st_blocks == 0
            files.write_all(fd, [memoryview(bytes(nbytes))])
        assert (disk.folder / "new").stat().st_size == nbytes


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    with (
        loop_disk(tmp_path, size=32 << 20) as disk,
        pytest.raises(OSError, match="No space left"),
        files.new_file(str(disk.folder / "new"), 64 << 20, durable=False, mode=0o600),
    ):
        pytest.fail("there is no room")


def test_a_filter_of_system_calls_may_refuse_to_reserve_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def fallocate(self, *_: object) -> int:
            file_systems.ctypes.set_errno(1)  # EPERM, as a seccomp filter gives
            return -1

    monkeypatch.setattr(file_systems, "_libc", Refusing())
    with files.new_file(str(tmp_path / "new"), 5, durable=False, mode=0o600) as fd:
        files.write_all(fd, [memoryview(b"12345")])
    assert (tmp_path / "new").read_bytes() == b"12345"
