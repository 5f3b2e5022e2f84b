"""How much of a file is in the page cache, and how to drop just that file from it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from monai_gds.base.file_systems import opened
from monai_gds.storage import memory


def cached(path: Path) -> float:
    """The share of a file that is in the page cache, 0 to 1, found without touching it.

    For a file that this process cannot write to, the kernel reports all of it as cached.
    """
    size = path.stat().st_size
    if size == 0:
        return 0.0
    with opened(path, os.O_RDONLY) as fd:
        address = memory.map_file(fd, 0, size, shared=True)
    try:
        return memory.resident(address, size)
    finally:
        memory.unmap(address, size)


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
