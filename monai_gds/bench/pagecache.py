"""How much of a file is in the page cache, and how to drop just that file from it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def cached(path: Path) -> float:
    """The share of a file that is in the page cache, 0 to 1, found without touching it.

    For a file that this process cannot write to, the kernel reports all of it as cached.
    """
    size = path.stat().st_size
    if size == 0:
        return 0.0
    pages = -(-size // mmap.PAGESIZE)
    with open(path, "rb") as f:
        mapping = mmap.mmap(f.fileno(), size, access=mmap.ACCESS_COPY)  # not closed, which fails after a Ctrl-C
    flags = (ctypes.c_ubyte * pages)()
    if _libc.mincore(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), size, flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return bytes(flags).count(1) / pages


def drop(paths: Iterable[Path]) -> float:
    """Drops these files, and no others, from the page cache. Unwritten data is written first.

    Returns the share of their bytes that stayed, 0 to 1: everything on file systems in memory (tmpfs), and pages that a
    process has mapped, see posix_fadvise(2).
    """
    stayed = total = 0.0
    for path in paths:
        with open(path, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = path.stat().st_size
        stayed += cached(path) * size
        total += size
    return stayed / total if total else 0.0


def warmth(shares: Sequence[float]) -> str:
    """Summarises, for a table, the cached shares of files before each of several reads."""
    low, high = min(shares), max(shares)
    if high < 0.02:
        return "cold"
    return "warm" if low > 0.98 else f"{low:.0%} to {high:.0%} warm"
