"""Host memory: on huge pages, given back when the last tensor over it is gone, to a pool for instance; mapped files.

Huge pages mean fewer page faults, and fewer and larger requests to a drive. A read with O_DIRECT is cut where its
memory is not physically contiguous. Measured on a virtual disk: into page-locked buffers of 16 MiB, DeepSpeed's handle
read 1.3 GB/s with pages of 4 KiB and 2.7 GB/s with pages of 2 MiB; into fresh memory of 64 MiB and more, ``preadv``
read 0.7 to 1.1 and 2.5 GB/s. Where /sys/kernel/mm/transparent_hugepage/enabled is ``madvise``, the default of most
distributions, the kernel gives huge pages only on request. Asking for them never fails: a kernel without huge
pages keeps its usual pages.

The kernel zeroes fresh memory page by page, which can take longer than filling it. So large batches
(:mod:`monai_gds.loader.collate`), what is read of tensors in tiles, and the buffers of images come from pools.

Files are mapped by plain ``mmap``. Python's own keeps a descriptor open for each mapping, and a process may hold 1,024;
these mappings keep none. ``torch.UntypedStorage.from_file`` keeps none either, but takes no offset.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from monai_gds import limits

#: Bytes of a huge page on x86-64, and on ARM with base pages of 4 KiB.
HUGE = 2 << 20

_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MAP_FAILED = ctypes.c_void_p(-1).value

#: Ends a mapping: called with its address and length. Bound here, because mappings may end after the interpreter.
unmap = _libc.munmap
unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def prefer_huge_pages(memory: torch.Tensor) -> None:
    """Requests huge pages for memory that is not in use yet."""
    _advise(memory, _MADV_HUGEPAGE)


def collapse_to_huge_pages(memory: torch.Tensor) -> None:
    """Replaces the pages of memory in use, page-locked or not, by huge ones: 10 to 50 ms for 16 MiB."""
    _advise(memory, _MADV_COLLAPSE)


def _advise(memory: torch.Tensor, advice: int) -> None:
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    start += -start % HUGE
    end -= end % HUGE
    if start < end:
        _libc.madvise(start, end - start, advice)


def map_file(fd: int, offset: int, nbytes: int, *, shared: bool = False) -> int:
    """Maps a part of a file, from a multiple of the page size on, and returns its address. Raises OSError.

    The mapping is writable and private (copy-on-write), or ``shared`` and read-only.
    """
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE
    if shared:
        protection, flags = mmap.PROT_READ, mmap.MAP_SHARED
    address: int | None = _libc.mmap(None, nbytes, protection, flags, fd, offset)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address


def map_privately(fd: int, offset: int, nbytes: int, size: int) -> torch.Tensor:
    """A private mapping of a part of a file of this size. It is unmapped when the last array or tensor over it is gone.

    It begins and ends between the file's huge pages, since the kernel maps one at once only where all of it is mapped.
    """
    skip = offset % HUGE
    length = min(skip + nbytes + -(skip + nbytes) % HUGE, size - offset + skip)
    start = map_file(fd, offset - skip, length)
    if nbytes <= limits.HUGE_MAP_BYTES:
        # Advice for a part would split the mapping in the kernel, which allows 65,530 per process.
        _libc.madvise(start, length, _MADV_HUGEPAGE)
    return tensor_at(start + skip, nbytes, partial(unmap, start, length))


def resident(address: int, nbytes: int) -> float:
    """The share of the pages of a mapping that are in memory: touching these reads nothing from the drive.

    For a file that the user neither owns nor may write, Linux reports every page as resident.
    """
    pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    if _libc.mincore(address, nbytes, pages.ctypes.data):
        return 0.0
    return float((pages & 1).mean())


def tensor_at(address: int, nbytes: int, release: Callable[[], object]) -> torch.Tensor:
    """A tensor over memory that somebody else owns, as ``torch::from_blob`` with a deleter.

    Args:
        address: where the CPU memory begins, which lasts until ``release``.
        nbytes: how many bytes the tensor covers. A tensor is pickled with its whole storage, and the bytes after these
            may be those of an earlier batch.
        release: called when the tensor and everything that shares its memory is gone. It may be called in any thread,
            by the garbage collector too, so it must take no lock; and after the interpreter's modules are gone.

    Returns:
        A 1-D uint8 CPU tensor. ``resize_`` cannot grow it.
    """
    return torch.from_numpy(np.asarray(_Exporter(address, nbytes, release)))


class _Exporter:
    """The owner of the memory, to NumPy, which keeps it as long as there is an array or a tensor over the memory."""

    __slots__ = ("__array_interface__", "_release")

    def __init__(self, address: int, nbytes: int, release: Callable[[], object]) -> None:
        self._release = release
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    def __del__(self) -> None:
        self._release()


class _Block:
    """Memory on huge pages. Its size is noted, since the garbage collector may return it and must not call torch."""

    __slots__ = ("memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.nbytes = nbytes
        prefer_huge_pages(self.memory)


class _Pool:
    """Unused blocks, the one used last at the end. Their sizes are powers of two, unless they are ``exact``.

    The list is changed by single operations of the interpreter, without a lock: the garbage collector may return a
    block in a thread that is just taking one. It is never copied: CPython before 3.12 may run the collector between
    looking up a list's items and copying them, and a returned block moves them. Iterating looks them up at each step.
    """

    def __init__(self, max_bytes: int, exact: bool = False) -> None:
        self.blocks: list[_Block] = []
        self._max_bytes, self._exact = max_bytes, exact

    def empty(self, nbytes: int) -> torch.Tensor:
        """An uninitialised 1-D uint8 CPU tensor on huge pages, in the memory of an earlier one if possible.

        Its memory returns to the pool when nothing shares it any more.
        """
        size = most = nbytes + -nbytes % HUGE
        if not self._exact and nbytes <= self._max_bytes:  # a larger one is not kept
            size = max(HUGE, 1 << (nbytes - 1).bit_length())
            most = 2 * size
        block = self._take(size, most)
        return tensor_at(block.memory.data_ptr(), nbytes, partial(self._give_back, block))

    def _take(self, nbytes: int, most: int) -> _Block:
        """A kept block of ``nbytes`` to ``most`` bytes, or a new one of ``nbytes``."""
        for block in reversed(self.blocks):
            if nbytes <= block.nbytes <= most:
                try:
                    self.blocks.remove(block)
                except ValueError:  # another thread has taken it
                    continue
                return block
        return _Block(nbytes)

    def _give_back(self, block: _Block) -> None:
        if block.nbytes > self._max_bytes:
            return
        self.blocks.append(block)
        while sum(kept.nbytes for kept in self.blocks) > self._max_bytes:
            del self.blocks[:1]


_pool = _Pool(limits.POOL_BYTES, exact=True)
_volumes = _Pool(limits.VOLUME_POOL_BYTES)
_scratch = _Pool(limits.SCRATCH_POOL_BYTES)

#: For large batches. Stacking six batches of 28 MB of crops beside their consumer on two cores took 24 to 29 ms this
#: way, and 41 in fresh memory.
pooled_empty = _pool.empty

#: For sizes that vary. Batches do not use up this pool.
pooled_volume = _volumes.empty

#: For short-lived data. Such small blocks would push volumes out of their pool.
pooled_scratch = _scratch.empty
