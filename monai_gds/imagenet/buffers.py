"""Memory for batches, used again and again: clearing new pages, at 4 GB/s, would take longer than reading into them."""

from __future__ import annotations

from collections import deque
from functools import partial

import torch

from monai_gds.lease import lend
from monai_gds.storage import Storage

__all__ = ["Buffers"]

#: Unused ones that are kept at the most.
KEPT = 8


class Buffers:
    """Gives memory that nobody uses.

    Host memory comes back by itself when the last tensor over it is gone. Pinned memory does not, since a copy to a
    GPU may still read from it then: :meth:`give_back` says that it is free. Device memory is always new, for torch's
    allocator knows by itself when it is free.

    Args:
        storage: allocates what it fills fastest, on its device.
        pinned: host memory is to be pinned.
    """

    def __init__(self, storage: Storage, *, pinned: bool) -> None:
        self._storage = storage
        self._pinned = pinned
        self._free: deque[torch.Tensor] = deque(maxlen=KEPT)

    def take(self, nbytes: int) -> torch.Tensor:
        """A 1-D uint8 tensor of this many bytes or more."""
        if self._storage.device.type == "cuda":
            return self._storage.allocate(nbytes)
        memory = self._unused(nbytes)
        return memory if self._pinned else lend(memory, memory.numel(), partial(self._free.append, memory))

    def _unused(self, nbytes: int) -> torch.Tensor:
        for _ in range(len(self._free)):
            try:
                memory = self._free.popleft()
            except IndexError:  # another thread was faster
                break
            if memory.numel() >= nbytes:
                return memory  # those that were too small are dropped
        nbytes += nbytes // 4  # so that it fits the next batches too
        if self._pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._storage.allocate(nbytes)

    def give_back(self, memory: torch.Tensor) -> None:
        """Says that nothing reads from a taken tensor any more."""
        if self._pinned and not memory.is_cuda:
            self._free.append(memory)

    def clear(self) -> None:
        """Frees what is unused."""
        self._free.clear()
