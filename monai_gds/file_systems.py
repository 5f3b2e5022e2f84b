"""Which kind of file system a file is on, by the kernel's number for it (statfs(2), linux/magic.h)."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

__all__ = ["KEEPS_ZEROS", "LOCAL", "kind_of", "kind_of_folder"]

#: On which zeros that a program writes do not become a hole: ext4, XFS, btrfs, tmpfs, F2FS, ramfs.
KEEPS_ZEROS = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0xF2F52010, 0x858458F6})

#: On a drive, or in the memory, of this machine: these, and overlayfs, ZFS, bcachefs.
LOCAL = KEEPS_ZEROS | {0x794C7630, 0x2FC12FC1, 0xCA451A4E}

_libc = ctypes.CDLL(None, use_errno=True)


def kind_of(fd: int) -> int | None:
    """The number of the file system of an open file, or None if the system does not report one."""
    told = ctypes.create_string_buffer(256)  # struct statfs has 120 bytes and begins with it as a long
    if _libc.fstatfs(fd, told):
        return None
    return ctypes.c_ulong.from_buffer(told).value & 0xFFFFFFFF


def kind_of_folder(path: str) -> int | None:
    """The number of the file system that a folder is on, or None if that cannot be found out."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return kind_of(fd)
        finally:
            os.close(fd)
    return None
