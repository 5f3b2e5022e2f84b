"""Reads a file with threads and no library in between, to measure what the drive or the page cache gives."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from monai_gds.errors import StorageError

__all__ = ["page_aligned", "read_parallel"]


def page_aligned(nbytes: int) -> mmap.mmap:
    """Zeroed memory that starts on a page boundary, on huge pages where the kernel has them."""
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # physically contiguous memory is read in larger requests
    return memory


def read_parallel(
    path: Path, nbytes: int, into: memoryview, *, direct: bool = True, block: int = 8 << 20, threads: int = 8
) -> None:
    """Reads the first bytes of a file in blocks, several at a time.

    Args:
        path: the file.
        nbytes: bytes to read.
        into: page-aligned memory, see :func:`page_aligned`. If it is shorter than ``nbytes``, it is filled repeatedly;
            then its length must be a multiple of ``block``.
        direct: read past the page cache (O_DIRECT), except for a tail that is shorter than a page.
        block: bytes per request.
        threads: requests in flight.

    Raises:
        OSError: the file system refuses O_DIRECT, as some network file systems do.
        StorageError: the file is shorter than ``nbytes``.
    """
    pages = nbytes - nbytes % mmap.PAGESIZE if direct else nbytes

    def fill(fd: int, start: int, stop: int) -> None:
        while start < stop:
            at = start % len(into)
            count = os.preadv(fd, [into[at : at + stop - start]], start)
            if count == 0:
                raise StorageError(f"{path} became shorter while it was being read")
            start += count

    with _opened(path, os.O_DIRECT if direct else 0) as fd, ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start: fill(fd, start, min(start + block, pages)), range(0, pages, block)))
    if pages < nbytes:
        with _opened(path, 0) as fd:
            fill(fd, pages, nbytes)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)
