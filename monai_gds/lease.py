"""Memory on loan: it comes back when the last tensor over it is gone. For memory that is used again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

__all__ = ["lend"]


def lend(memory: torch.Tensor, nbytes: int, give_back: Callable[[], object]) -> torch.Tensor:
    """Gives a tensor over memory that somebody uses again.

    Args:
        memory: 1-D uint8 CPU tensor.
        nbytes: how many of its bytes. No more are lent, for a tensor is pickled with all of its storage: there may be
            an earlier batch's bytes behind these.
        give_back: called when the tensor and all that shares its memory is gone: in any thread, by the garbage
            collector too, so it must take no lock; and when the interpreter's modules are gone already.

    Returns:
        A 1-D uint8 CPU tensor, which ``resize_`` refuses to grow.
    """
    return torch.from_numpy(np.asarray(_Lease(memory, nbytes, give_back)))


class _Lease:
    """What NumPy keeps as long as there is an array or a tensor over the memory."""

    __slots__ = ("__array_interface__", "_give_back", "_memory")

    def __init__(self, memory: torch.Tensor, nbytes: int, give_back: Callable[[], object]) -> None:
        self._memory = memory
        self._give_back = give_back
        start = memory.data_ptr()
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (start, False), "version": 3}

    def __del__(self) -> None:
        self._give_back()
