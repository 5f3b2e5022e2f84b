"""Huge pages for buffers: fewer page faults, and fewer and larger requests to a drive.

A read with O_DIRECT is cut where the memory that it goes to is not physically contiguous. Measured on a virtual disk:
into page-locked buffers of 16 MiB, DeepSpeed's handle read 1.3 GB/s with pages of 4 KiB and 2.7 GB/s with pages of
2 MiB; into fresh memory of 64 MiB and more, ``preadv`` 0.7 to 1.1 and 2.5 GB/s. The kernel only gives them when it is
asked to where /sys/kernel/mm/transparent_hugepage/enabled says ``madvise``, the default of most distributions.
"""

from __future__ import annotations

import ctypes

import torch

__all__ = ["HUGE", "collapse", "prefer"]

#: Bytes of a huge page on x86-64, and on ARM with base pages of 4 KiB.
HUGE = 2 << 20

_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def prefer(memory: torch.Tensor) -> None:
    """Asks for huge pages where memory is not in use yet. Never fails: a kernel without them gives its usual ones."""
    _advise(memory, _MADV_HUGEPAGE)


def collapse(memory: torch.Tensor) -> None:
    """Exchanges the pages of memory that exists, page-locked or not, for huge ones: 10 to 50 ms for 16 MiB.

    Never fails: what cannot be exchanged stays as it is.
    """
    _advise(memory, _MADV_COLLAPSE)


def _advise(memory: torch.Tensor, advice: int) -> None:
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    start += -start % HUGE
    end -= end % HUGE
    if start < end:
        _libc.madvise(start, end - start, advice)
