"""Inodes are found on every form of ext4 and XFS, and no disk, whatever it holds, breaks looking for them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.storage.blockmap.inodes import HEAD_BYTES, Inode, inode_table
from tests.loopdisk import loop_disk, run

FORMS = [
    ("ext4", ["-I", "128"]),
    ("ext4", ["-O", "^64bit,^metadata_csum,^flex_bg"]),
    ("ext4", ["-b", "1024"]),
    ("ext4", ["-N", "16384"]),
    ("xfs", ["-m", "bigtime=0,inobtcount=0"]),
    ("xfs", ["-i", "size=2048"]),
    ("xfs", ["-b", "size=1024"]),
]


def reader(device: str):  # type: ignore[no-untyped-def]
    def read(offset: int, nbytes: int) -> bytes:
        fd = os.open(device, os.O_RDONLY)
        try:
            return os.pread(fd, nbytes, offset)
        finally:
            os.close(fd)

    return read


@pytest.mark.parametrize(("kind", "make"), FORMS, ids=lambda v: v if isinstance(v, str) else " ".join(v))
def test_every_form(tmp_path: Path, kind: str, make: list[str]) -> None:
    with loop_disk(tmp_path, kind, make=make) as disk:
        expected = {}
        for i in range(60):
            file = disk.folder / f"folder{i % 20}" / f"{i}"  # new folders go to other groups
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(b"x" * i * 100)
            late = i % 2 and "128" not in make
            os.utime(file, ns=(0, 3_000_000_000_123_456_789 if late else i * 10**9))
            expected[file.stat().st_ino] = Inode(True, i * 100, file.stat().st_mtime_ns)
        (disk.folder / "deleted").write_bytes(b"x")
        unused = [disk.folder.stat().st_ino, (disk.folder / "deleted").stat().st_ino]
        (disk.folder / "deleted").unlink()
        run("umount", str(disk.folder))
        try:
            read = reader(disk.device)
            table = inode_table(kind, read)
            assert table is not None

            def at(number: int) -> Inode:
                place = table.place(number)
                assert place is not None
                return table.parse(read(place, table.nbytes))

            assert {number: at(number) for number in expected} == expected
            assert not any(at(number).in_use for number in unused)
        finally:
            run("mount", disk.device, str(disk.folder))


def test_an_order_that_is_not_supported_is_told(tmp_path: Path) -> None:
    with loop_disk(tmp_path, "ext4", make=["-O", "meta_bg,^resize_inode"]) as disk:
        assert inode_table("ext4", reader(disk.device)) is None


@given(
    kind=st.sampled_from(["ext4", "xfs"]),
    head=st.binary(max_size=200),
    at=st.integers(0, 1400),
    number=st.integers(-5, 1 << 63),
    inode=st.binary(min_size=256, max_size=256),
)
def test_a_disk_may_hold_anything(kind: str, head: bytes, at: int, number: int, inode: bytes) -> None:
    def read(offset: int, nbytes: int) -> bytes:
        return (bytes(at) + head).ljust(HEAD_BYTES, b"\x01")[:HEAD_BYTES] if offset == 0 else bytes(nbytes)

    table = inode_table(kind, read)
    if table is not None:
        assert table.place(number) is None or table.place(number) >= 0  # type: ignore[operator]
        table.parse(inode[: table.nbytes])


@pytest.mark.parametrize("nbytes", [0, 127, 129, 135, 139, 300])
def test_an_impossible_size_of_inodes_is_told(nbytes: int) -> None:
    head = bytearray(HEAD_BYTES)
    for at, kind, number in ((0, "<I", 100), (0x18, "<I", 2), (0x28, "<I", 100), (0x58, "<H", nbytes)):
        struct.pack_into(kind, head, 1024 + at, number)
    assert inode_table("ext4", lambda offset, n: bytes(head) if offset == 0 else bytes(n)) is None
