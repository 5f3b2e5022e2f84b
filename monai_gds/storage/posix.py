"""The ``posix`` backend: preadv from a pool of threads, and private mappings on a CPU target. Needs nothing but torch.

On a CPU target :meth:`PosixStorage.map` hands out copy-on-write mappings, so that a crop touches only the pages it
needs and an in-place transform never reaches the file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from monai_gds.errors import StorageError
from monai_gds.storage.base import ALIGNMENT, Availability, FileId
from monai_gds.storage.threaded import ThreadedStorage

__all__ = ["PosixStorage", "open_file", "pread_into"]

#: Ranges below this many bytes are read instead of mapped: a mapping costs two system calls and a fault a page.
MAP_BYTES = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """A private mapping that NumPy can wrap. It is unmapped when the last array or tensor over it is gone.

    Python's own ``mmap`` keeps a descriptor open for each mapping, and a process may hold 1,024 of them; this keeps
    none. ``torch.UntypedStorage.from_file`` keeps none either, but takes no offset.
    """

    __slots__ = ("__array_interface__", "_length", "_munmap", "_start")

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        skip = offset % mmap.ALLOCATIONGRANULARITY
        length = nbytes + skip
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        start = _libc.mmap(None, length, protection, mmap.MAP_PRIVATE, fd, offset - skip)
        if start == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._start, self._length = start, length
        self._munmap = _libc.munmap  # module globals may be gone when the interpreter exits
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (start + skip, False), "version": 3}

    def __del__(self) -> None:
        if hasattr(self, "_munmap"):
            self._munmap(self._start, self._length)


def pread_into(fd: int, offset: int, view: memoryview, name: str) -> None:
    """Fills ``view``, whatever the sizes that single calls return.

    Raises:
        StorageError: the device failed, or the file called ``name`` ends too early.
    """
    done = 0
    while done < view.nbytes:
        try:
            count = os.preadv(fd, [view[done:] if done else view], offset + done)
        except OSError as e:
            raise StorageError(e.errno, f"reading at byte {offset + done}: {e.strerror}", name) from e
        if count == 0:
            raise StorageError(
                errno.EIO, f"file ends at byte {offset + done}, {view.nbytes - done} bytes were still to come", name
            )
        done += count


def open_file(path: str, expect: FileId | None) -> int:
    """Opens a file for reading; raises FileChanged when it is not the one expected."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO must not wait
    if expect is not None:
        try:
            expect.check(FileId.of(fd), path)
        except BaseException:
            os.close(fd)
            raise
    return fd


class PosixStorage(ThreadedStorage):
    """Reads with preadv; see the module's docstring. Works on every Linux machine, for CPU and CUDA targets.

    Example::

        storage = PosixStorage(torch.device("cpu"))
        head, tail = storage.load("volume.bin", [(0, 4096), (8192, 100)]).wait()
    """

    name = "posix"

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return Availability(True, "threads over preadv" + ("" if device.type == "cuda" else ", private mappings"))

    def map(
        self, path: str, ranges: Sequence[tuple[int, int]], expect: FileId | None = None
    ) -> list[torch.Tensor] | None:
        if self.device.type != "cpu":
            return None
        fd = open_file(path, expect)
        try:
            size = os.fstat(fd).st_size
            for offset, nbytes in ranges:
                if nbytes and offset + nbytes > size:  # touching a mapped page beyond the end would kill the process
                    raise StorageError(errno.EIO, f"file ends at byte {size}, before byte {offset + nbytes}", path)
            return [self._map_one(fd, offset, nbytes, path) for offset, nbytes in ranges]
        finally:
            os.close(fd)

    def _map_one(self, fd: int, offset: int, nbytes: int, path: str) -> torch.Tensor:
        # An unaligned start is read, so that what is handed out is always good for any dtype.
        if nbytes >= MAP_BYTES and offset % ALIGNMENT == 0:
            try:
                return torch.from_numpy(np.asarray(_Mapping(fd, offset, nbytes)))
            except OSError:  # vm.max_map_count is used up, or the file system maps nothing: read instead
                pass
        dest = torch.empty(nbytes, dtype=torch.uint8)
        pread_into(fd, offset, dest.numpy().data, path)
        return dest

    def _open(self, path: str, expect: FileId | None) -> tuple[int, str]:
        return open_file(path, expect), path

    def _close(self, handle: Any) -> None:
        os.close(handle[0])

    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> None:
        fd, path = handle
        pread_into(fd, offset, dest.numpy().data, path)
