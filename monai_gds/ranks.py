"""Ranks that share out a job and wait for one another through torch.distributed's store.

Not through a collective: that would fail on the ranks that wait when one works longer than the process group's
timeout. Nothing here knows what the job is.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

__all__ = ["Ranks"]

#: How often a rank that waits looks, and how often one that works says that it lives.
_POLL_SECONDS = 0.5
_BEAT_SECONDS = 5.0

#: A rank that has said nothing for so long is given up, and one that has not even come.
_SILENT_SECONDS = 300.0
_ABSENT_SECONDS = 1800.0

#: How long the first rank, which usually holds the store, stays for others to read its last words.
_STAY_SECONDS = 60.0

#: Calls so far: the same on every rank, since each must take part in each.
_calls = itertools.count()


class Ranks:
    """This process's share of a job, and what the other ranks say of theirs.

    Args:
        rank: this process's; None takes it from torch.distributed where that is initialised, else it is 0.
        world_size: how many ranks share the job; None takes it from there too, else it is 1.

    Attributes:
        rank, world_size: those in force.
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
        if self.together:
            self._store = dist.distributed_c10d._get_default_store()
            self._me, self._all = dist.get_rank(), range(dist.get_world_size())
            self._prefix = f"monai_gds/{next(_calls)}"

    def share(self, count: int) -> range:
        """Which of ``count`` things are this rank's."""
        return range(self.rank, count, self.world_size)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While this lasts the others know that this rank lives; of an exception they learn, and wait no longer."""
        if not self.together:
            yield
            return
        over = threading.Event()
        self._say("beat", 0)  # from this thread: it has come, whatever becomes of it
        beats = threading.Thread(target=self._beat, args=(over,), daemon=True)
        beats.start()
        try:
            yield
        except BaseException as e:
            self._say("done", {"broken": f"{type(e).__name__}: {e}"})
            raise
        finally:
            over.set()
            beats.join()

    def exchange(self, answer: Any, on_wait: Callable[[list[int]], None] = lambda ranks: None) -> list[Any]:
        """Tells every rank ``answer``, and waits for theirs as long as they are at work.

        Args:
            answer: this rank's, JSON-able.
            on_wait: called now and then with the ranks that are still being waited for.

        Returns:
            One answer a rank of torch.distributed, this one's among them; alone, just this one's.

        Raises:
            RuntimeError: a rank ended with an exception, or is silent; the message says which and why.
        """
        if not self.together:
            return [answer]
        self._say("done", {"answer": answer})
        self._wait_for_all(on_wait)
        said = [json.loads(self._store.get(self._key("done", rank))) for rank in self._all]
        self._say("seen", None)
        broken = [f"rank {rank} ended with {words['broken']}" for rank, words in enumerate(said) if "broken" in words]
        if self._me == 0 and not broken:
            self._stay()
        if broken:
            raise RuntimeError("; ".join(broken))
        return [words["answer"] for words in said]

    def _wait_for_all(self, on_wait: Callable[[list[int]], None]) -> None:
        heard: dict[int, tuple[bytes, float]] = {rank: (b"", time.monotonic()) for rank in self._all}
        looked = time.monotonic()
        while not self._store.check([self._key("done", rank) for rank in self._all]):
            time.sleep(_POLL_SECONDS)
            if time.monotonic() - looked < _BEAT_SECONDS:
                continue
            looked = time.monotonic()
            missing = [rank for rank in self._all if not self._store.check([self._key("done", rank)])]
            on_wait(missing)
            for rank in missing:
                self._check_life(rank, heard)

    def _check_life(self, rank: int, heard: dict[int, tuple[bytes, float]]) -> None:
        key, now = self._key("beat", rank), time.monotonic()
        beat = self._store.get(key) if self._store.check([key]) else b""
        if beat != heard[rank][0]:
            heard[rank] = beat, now
        patience = _SILENT_SECONDS if beat else _ABSENT_SECONDS
        if now - heard[rank][1] > patience:
            what = "has said nothing" if beat else "has not come to do its share"
            raise RuntimeError(f"rank {rank} {what} for {patience:.0f} s: it was killed, or hangs")

    def _stay(self) -> None:
        end = time.monotonic() + _STAY_SECONDS
        while not self._store.check([self._key("seen", rank) for rank in self._all]) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def _beat(self, over: threading.Event) -> None:
        for count in itertools.count(1):
            if over.wait(_BEAT_SECONDS):
                return
            self._say("beat", count)

    def _say(self, what: str, words: Any) -> None:
        self._store.set(self._key(what, self._me), json.dumps(words))

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"
