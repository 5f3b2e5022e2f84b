"""A loop over a loader that begins with its first batch. For :mod:`.data_loader`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

from monai_gds.loader.resume import Place
from monai_gds.loader.stats import MeasuredEpoch


class Later(Iterator[Any]):
    """A loop that begins with its first batch: one that nobody iterates over draws nothing.

    A trainer may begin a loop that it does not use, and tell the sampler of another its epoch after ``iter``. Of
    several threads that share a loop, one begins it. If there is an ``epoch``, the waiting for batches is measured.
    Each batch is given ``times`` times.
    """

    def __init__(
        self, begin: Callable[[], tuple[Place, Iterator[Any]]], epoch: MeasuredEpoch | None = None, times: int = 1
    ) -> None:
        self._begin, self._epoch, self._times = begin, epoch, times
        self._place: Place | None = None
        self._again: deque[Any] = deque()  # what is left of the repetitions
        self._batches: Iterator[Any] | None = None
        self._lock = threading.RLock()

    def __next__(self) -> Any:
        if self._times > 1:  # workers that are forked now would inherit the error, and name it as a cause of theirs
            with suppress(IndexError):
                return self._given(self._again.popleft())
        try:
            with nullcontext() if self._epoch is None else self._epoch.consumer_waits():
                if self._batches is None:
                    with self._lock:
                        if self._batches is None:
                            self._place, self._batches = self._begin()
                due = self._place.due if self._place else 0
                batch = next(self._batches)
        except KeyboardInterrupt:  # as in Epoch
            del self
            raise
        self._again.extend([batch] * (min(due or self._times, self._times) - 1))
        return self._given(batch)

    def _given(self, batch: Any) -> Any:
        if self._place is not None:
            self._place.repeats(len(self._again))
        return batch

    def close(self) -> None:
        """Leaves the loop and ends its thread: ``with contextlib.closing(iter(loader)) as batches: …``."""
        getattr(self._batches, "close", lambda: None)()
        self._batches = iter(())
        self._again.clear()
