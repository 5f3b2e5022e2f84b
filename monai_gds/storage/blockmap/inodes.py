"""Inodes on a disk that is not mounted: where one lies, and whether it still belongs to a mapped file.

A file may be rewritten, replaced or deleted between mapping it and unmounting its disk, and its old blocks keep
their bytes. Its inode shows that. After a clean unmount the inodes on the disk are up to date.

Formats: "ext4 Data Structures and Algorithms" (Documentation/filesystems/ext4), and the XFS Algorithms & Data
Structures guide, ``xfs_dsb`` and ``xfs_dinode``.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

#: Reads from the start of a file system: offset, bytes.
ReadDisk: TypeAlias = Callable[[int, int], bytes]

#: The superblocks of both file systems lie within these.
HEAD_BYTES = 4096

_MOST_DESCRIPTORS = 64 << 20  # bytes: a million block groups, 128 TiB
_EXT4_64BIT, _EXT4_META_BG = 0x80, 0x10
_XFS_BIGTIME = 1 << 3


class Inode(NamedTuple):
    """What an inode records about its file. ``in_use`` is False unless it is a regular file that was not deleted."""

    in_use: bool
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class InodeTable:
    """The inodes of one file system."""

    nbytes: int  # of an inode
    place: Callable[[int], int | None]  # first byte of an inode by its number; None for one that it lacks
    parse: Callable[[bytes], Inode]


def inode_table(kind: str, read: ReadDisk) -> InodeTable | None:
    """The inodes of a file system; None where they lie in an order that is not supported here."""
    head = read(0, HEAD_BYTES)
    return _xfs(head) if kind == "xfs" else _ext4(head, read)


def _ext4(head: bytes, read: ReadDisk) -> InodeTable | None:
    count, first_block, log_block = (struct.unpack_from("<I", head, 1024 + at)[0] for at in (0, 0x14, 0x18))
    per_group, incompatible = (struct.unpack_from("<I", head, 1024 + at)[0] for at in (0x28, 0x60))
    nbytes, described = (struct.unpack_from("<H", head, 1024 + at)[0] for at in (0x58, 0xFE))
    wide = bool(incompatible & _EXT4_64BIT)
    described = max(described, 64) if wide else 32
    block, groups = 1024 << min(log_block, 6), -(-count // max(per_group, 1))
    fits = per_group and nbytes >= 128 and not nbytes & (nbytes - 1) and groups * described <= _MOST_DESCRIPTORS
    if not fits or incompatible & _EXT4_META_BG:
        return None
    descriptors = read((first_block + 1) * block, groups * described)

    def place(number: int) -> int | None:
        if not 1 <= number <= count:
            return None
        group, index = divmod(number - 1, per_group)
        table = struct.unpack_from("<I", descriptors, group * described + 0x8)[0]
        if wide:
            table |= struct.unpack_from("<I", descriptors, group * described + 0x28)[0] << 32
        return int(table * block + index * nbytes)

    return InodeTable(nbytes, place, _parse_ext4)


def _parse_ext4(data: bytes) -> Inode:
    mode, low, seconds, links = (
        struct.unpack_from(kind, data, at)[0] for kind, at in (("<H", 0), ("<I", 4), ("<i", 0x10), ("<H", 0x1A))
    )
    high = struct.unpack_from("<I", data, 0x6C)[0]
    nanoseconds = 0
    if len(data) > 128 and struct.unpack_from("<H", data, 0x80)[0] >= 12:  # as long as these fields take
        extra = struct.unpack_from("<I", data, 0x88)[0]
        seconds, nanoseconds = seconds + ((extra & 3) << 32), extra >> 2
    return Inode(stat.S_ISREG(mode) and links > 0, high << 32 | low, seconds * 10**9 + nanoseconds)


def _xfs(head: bytes) -> InodeTable | None:
    block, group_blocks, groups = (struct.unpack_from(">I", head, at)[0] for at in (4, 84, 88))
    nbytes, log_per_block, log_group = *struct.unpack_from(">H", head, 104), *struct.unpack_from("2B", head, 123)
    if nbytes < 256 or log_per_block > 16 or log_group > 32:
        return None

    def place(number: int) -> int | None:
        group = number >> (log_group + log_per_block)
        inside = number >> log_per_block & (1 << log_group) - 1
        if number < 0 or group >= groups or inside >= group_blocks:
            return None
        return int((group * group_blocks + inside) * block + (number & (1 << log_per_block) - 1) * nbytes)

    return InodeTable(nbytes, place, _parse_xfs)


def _parse_xfs(data: bytes) -> Inode:
    magic, mode, version = struct.unpack_from(">2sHB", data, 0)
    links, size = struct.unpack_from(">I", data, 16)[0], struct.unpack_from(">Q", data, 56)[0]
    if version >= 3 and struct.unpack_from(">Q", data, 120)[0] & _XFS_BIGTIME:
        mtime = struct.unpack_from(">Q", data, 40)[0] - (1 << 31) * 10**9
    else:
        seconds, nanoseconds = struct.unpack_from(">ii", data, 40)
        mtime = seconds * 10**9 + nanoseconds
    return Inode(magic == b"IN" and stat.S_ISREG(mode) and links > 0, size, mtime)
