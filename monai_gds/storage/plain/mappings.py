"""Mappings of files by plain ``mmap``, for ``posix``.

Python's own ``mmap`` keeps a descriptor open for each mapping, and a process may hold 1,024 descriptors; these mappings
keep none. ``torch.UntypedStorage.from_file`` keeps none either, but takes no offset.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_MAP_FAILED = ctypes.c_void_p(-1).value

#: Ends a mapping: called with its address and length. Bound here, because mappings may end after the interpreter.
unmap = _libc.munmap
unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_file(fd: int, offset: int, nbytes: int, *, shared: bool = False) -> int:
    """Maps a part of a file, from a multiple of the page size on, and returns its address.

    The mapping is writable and private (copy-on-write), or ``shared`` and read-only.

    Raises:
        OSError: the kernel has no more mappings, or the file system has none.
    """
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE
    if shared:
        protection, flags = mmap.PROT_READ, mmap.MAP_SHARED
    address: int | None = _libc.mmap(None, nbytes, protection, flags, fd, offset)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address


def resident(address: int, nbytes: int) -> float:
    """The share of the pages of a mapping that are in memory: touching these reads nothing from the drive.

    For a file that the user neither owns nor may write, Linux reports every page as resident.
    """
    pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    if _libc.mincore(address, nbytes, pages.ctypes.data):
        return 0.0
    return float((pages & 1).mean())
