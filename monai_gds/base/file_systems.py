"""Which kind of file system a file is on, by the kernel's number for it (statfs(2), linux/magic.h)."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

__all__ = ["KEEPS_ZEROS", "LOCAL", "kind_of", "kind_of_folder"]

#: File systems that store zeros that a program writes, and make no hole of them: ext4, XFS, btrfs, tmpfs, F2FS, ramfs.
KEEPS_ZEROS = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0xF2F52010, 0x858458F6})

#: File systems on a drive or in the memory of this machine: those above, and overlayfs, ZFS, bcachefs.
LOCAL = KEEPS_ZEROS | {0x794C7630, 0x2FC12FC1, 0xCA451A4E}

_libc = ctypes.CDLL(None, use_errno=True)


def kind_of(fd: int) -> int | None:
    """The number of the file system of an open file, or None if the system does not report one."""
    statfs = ctypes.create_string_buffer(256)  # struct statfs has 120 bytes and begins with the number, a long
    if _libc.fstatfs(fd, statfs):
        return None
    return ctypes.c_ulong.from_buffer(statfs).value & 0xFFFFFFFF


def kind_of_folder(path: str) -> int | None:
    """The number of the file system that a folder is on, or None if it cannot be determined."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return kind_of(fd)
        finally:
            os.close(fd)
    return None
