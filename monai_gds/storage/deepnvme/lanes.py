"""Lanes: one engine and one buffer each, used by one thread at a time, and the pool that a backend takes them from."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import torch

from monai_gds.base.process import Changes, Owner

#: What an engine does with a range of a file.
Verb: TypeAlias = Literal["read", "write"]


class Lane(ABC):
    """One engine and one page-aligned buffer, used by one thread at a time."""

    @property
    def dead(self) -> bool:
        """Whether the engine has ended: then the lane is closed."""
        return False

    @property
    @abstractmethod
    def buffer(self) -> torch.Tensor:
        """1-D uint8 memory of ``VerifiedBackend.lane_bytes`` that the engine reaches, made on first use."""

    def reaches(self, dest: torch.Tensor) -> bool:
        """Whether the engine can fill ``dest`` itself, without going through ``buffer``."""
        return False

    @abstractmethod
    def transfer(self, verb: Verb, fd: int, offset: int, memory: torch.Tensor) -> None:
        """Reads a part of ``buffer``, or a tensor that the engine ``reaches``, or writes it, from ``offset`` of a file.

        Raises StorageError where the engine is known to have failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees engine and buffer."""


class LanePool:
    """Lanes, made on demand, at most ``limit`` at a time. While all of them are in use, :meth:`lane` waits.

    They are freed with ``backend``, at the latest before the interpreter ends.
    """

    def __init__(self, limit: int, backend: object) -> None:
        weakref.finalize(backend, _release, self, Owner())
        self._limit = limit
        self._changed = Changes()
        self._all: list[Lane] = []
        self._free: list[Lane] = []

    @contextlib.contextmanager
    def lane(self, make: Callable[[], Sequence[Lane]]) -> Iterator[Lane]:
        """A lane for this thread alone. ``make`` makes one or more, when none is free and there may be more."""
        lane = self._acquire(make)
        try:
            yield lane
        finally:
            with self._changed.lock:
                if lane in self._all and not lane.dead:
                    self._free.append(lane)
                else:  # the pool was emptied meanwhile, or the engine has ended
                    self._drop(lane)
                self._changed.notify()

    def _acquire(self, make: Callable[[], Sequence[Lane]]) -> Lane:
        with self._changed.lock:
            while True:
                self._changed.wait_for(lambda: self._free or len(self._all) < self._limit)
                if not self._free:
                    made = make()
                    self._all.extend(made)
                    self._free.extend(made)
                lane = self._free.pop()
                if not lane.dead:
                    return lane
                self._drop(lane)

    def _drop(self, lane: Lane) -> None:
        self._all = [other for other in self._all if other is not lane]
        lane.close()

    def empty(self) -> None:
        """Closes the lanes: now those that are free, the others when they come back."""
        with self._changed.lock:
            free, self._free, self._all = self._free, [], []
            self._changed.notify_all()
        for lane in free:
            lane.close()


def _release(lanes: LanePool, owner: Owner) -> None:
    """Frees the lanes of a backend that nobody closed: one that the ending interpreter freed aborted the process.

    In a forked child they are kept for ever: freeing an engine waits for its threads, which do not exist there.
    """
    if owner.is_this_process():
        lanes.empty()
    else:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(lanes))
