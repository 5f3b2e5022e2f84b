"""Ranks of torch.distributed that share a job and wait for one another. Used by ``populate``.

They meet in their own gloo group. So the others wait for a rank that works for longer than the user's time limit for
collectives, and notice at once if a rank is killed.

A killed rank is noticed when its connections close. Processes that it forked inherit the connections: its own workers
end within a second of it, but workers that a user's executor forked keep the other ranks waiting until they end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

_log = logging.getLogger("monai_gds")

T = TypeVar("T")

#: How long the ranks may take to meet, and then to do their shares. The second is just below 2**31 milliseconds.
_MEETING = timedelta(minutes=30)
_WORKING = timedelta(days=20)

#: Seconds between two checks whether all ranks have arrived. Waiting inside the collective would defer Ctrl-C.
_POLL_SECONDS = 0.1

#: Meetings that Ctrl-C ended. They are kept, since dropping one would wait for the other ranks.
_interrupted: list[Any] = []


class RankLost(RuntimeError):
    """Another rank did not do its share; the message says why as far as that is known."""


class Ranks:
    """This process's share of a job, and the meeting with the other ranks.

    Args:
        rank: this process's; None takes it from torch.distributed if that is initialised, else it is 0.
        world_size: how many ranks share the job; None takes it from there too, else it is 1.

    Attributes:
        rank, world_size: the values in use.
        together: whether the ranks wait for one another: torch.distributed is initialised, and there are several.

    Raises:
        ValueError: only one of the two was given, or they do not fit.
    """

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError("rank and world_size go together: give both or neither")
        known = dist.is_available() and dist.is_initialized()
        if rank is None or world_size is None:
            rank, world_size = (dist.get_rank(), dist.get_world_size()) if known else (0, 1)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is not within 0 to world_size - 1 = {world_size - 1}")
        self.rank, self.world_size = rank, world_size
        self.together = known and world_size > 1
        self._group: Any = None

    def share(self, count: int) -> range:
        """Which of ``count`` things are this rank's."""
        return range(self.rank, count, self.world_size)

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Runs ``work`` on every rank and exchanges what it returned; every rank must call this.

        A rank whose ``work`` raises logs the error and raises it once the others have done their shares: a launcher
        may kill them as soon as one ends. The result of ``work`` is pickled.

        Raises:
            RankLost: another rank did not come, was killed, or raised.
            Exception: what ``work`` raised.
        """
        if not self.together:
            return [work()]
        self._group = _meet()
        try:
            return self._gather(work)
        finally:
            dist.destroy_process_group(self._group)
            self._group = None  # its connections close with the last reference, which tells the others

    def _gather(self, work: Callable[[], T]) -> list[T]:
        mine: T | None = None
        error: Exception | None = None
        try:
            mine = work()
        except Exception as e:
            error = e
            _log.error("rank %d ended with %s: %s", dist.get_rank(), type(e).__name__, e)
        try:
            everyone = self._exchange((mine, error and f"{type(error).__name__}: {error}"))
        except RuntimeError as e:
            raise error or RankLost(f"a rank was killed, or ended before its share was done ({e})") from e
        if error is not None:
            raise error
        ended = [f"rank {rank} ended with {words}" for rank, (_, words) in enumerate(everyone) if words]
        if ended:
            raise RankLost("; ".join(ended))
        return [theirs for theirs, _ in everyone]

    def _exchange(self, mine: Any) -> list[Any]:
        arrival: Any = dist.barrier(self._group, async_op=True)
        try:
            while not arrival.is_completed():
                time.sleep(_POLL_SECONDS)
        except BaseException:
            _interrupted.append((self._group, arrival))
            raise
        arrival.wait()  # raises if a rank was lost
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self._group)
        return everyone


def _meet() -> Any:
    """Makes a group that waits as long as the ranks work, once all ranks have arrived."""
    try:
        meeting = dist.new_group(backend="gloo", timeout=_MEETING)
        group = dist.new_group(backend="gloo", timeout=_WORKING)
    except RuntimeError as e:
        raise RankLost(f"not every rank came to do its share within {_MEETING}: each must call this ({e})") from e
    dist.destroy_process_group(meeting)
    return group
