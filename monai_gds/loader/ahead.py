"""Begins the reads of the coming items within bounds, and finishes the items in order. For :mod:`.data_loader`."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, groupby
from math import inf
from operator import attrgetter
from typing import Any, TypeVar

import torch

from monai_gds.base import stages
from monai_gds.base.workers import Workers
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.making import Saved
from monai_gds.dataset.session import Begun, Session
from monai_gds.errors import CacheWarning, FileChanged, NotSaved, UnsupportedType

T = TypeVar("T")

#: Seconds before each new try where a device has no memory left: reads that were given up fill theirs to the end.
_PAUSES = (0.0, 0.1, 1.0)


class CacheWorkers:
    """Workers that compute and save the items of ``parts`` that are not cached. They start for the first such item."""

    def __init__(self, parts: Sequence[GDSDataset], num_workers: int, context: Any) -> None:
        self._parts, self._num_workers, self._context = parts, num_workers, context
        self._workers: Workers[Saved] | None = None
        self._closed = False
        self._lock = threading.RLock()  # reentrant: the collector may call close() inside save()

    def save(self, dataset: GDSDataset, index: int) -> Future[Saved]:
        """Lets a worker compute and save an item. The future raises the errors of transforms, and WorkerDied."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the loop was left")
            if self._workers is None:
                work = partial(_save, [part.session.for_worker() for part in self._parts])
                self._workers = Workers(work, self._num_workers, self._context)
            return self._workers.submit((self._parts.index(dataset), index))

    def close(self) -> None:
        """Ends the processes at once. Unfinished items are lost."""
        with self._lock:
            self._closed = True
            if self._workers is None:
                return
            self._workers.close()
            self._workers = None
            for part in self._parts:
                part.session.tidy()


def _save(parts: Sequence[Session], place: tuple[int, int]) -> Saved:
    """Runs in a worker."""
    part, index = place
    try:
        return parts[part].save(index)
    except (NotSaved, FileChanged, UnsupportedType):  # then the loader's process computes it, and warns or raises
        return Saved("busy")


class _Upcoming:
    """One item of a batch that is to come."""

    __slots__ = ("begun", "dataset", "index", "nbytes", "saved")

    def __init__(self, dataset: GDSDataset, index: int) -> None:
        self.dataset, self.index = dataset, index
        self.begun: Begun | Exception | None = None  # what the dataset began, or its error
        self.nbytes = 0  # bytes that are counted for it
        self.saved: Future[Saved] | None = None  # of its record, if a worker computes it


class ReadAhead:
    """Begins the reads of the items that come next, and finishes them. Belongs to the loader's thread.

    An error of an item is raised with that item's batch. If a device has no memory left for the current batch, reads
    ahead of it are given up and begun again later, and half as many records are in flight from then on. Random
    transforms are not run again.

    Args:
        batches: the dataset and index of each item, batch by batch.
        most_records: returns how many records may be in flight with batches of a given size.
        most_bytes: returns how many bytes may be in flight. Called once the size of a record is known.
        workers: compute the items that are not cached; None: this thread does.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[tuple[GDSDataset, int]]],
        most_records: Callable[[int], int],
        most_bytes: Callable[[], int],
        workers: CacheWorkers | None,
    ) -> None:
        self._batches = iter(batches)
        self._records_for, self._most_records = most_records, 1
        self._bytes_for, self._most_bytes = most_bytes, 0
        self._workers = workers
        self._limit = inf  # of records in flight, once a device had no memory for more
        self._current: deque[_Upcoming] = deque()  # the rest of the batch that is being finished
        self._drawn: deque[list[_Upcoming]] = deque()  # the batches after it
        self._waiting: deque[_Upcoming] = deque()  # drawn items that are not begun
        self._unsized: list[_Upcoming] = []  # begun items whose bytes are not known yet
        self._error: Exception | None = None  # raised after the drawn batches
        # Records and bytes: begun, finished, taken by the consumer. Those begun and not taken are in flight. No lock is
        # needed: each is written by one thread.
        self._records = self._nbytes = 0
        self.finished = self._taken = 0, 0
        self._last = 0  # size of the last record that has one

    def taken(self, finished: tuple[int, int]) -> None:
        """Notes, in the consumer's thread, that it took a batch. ``finished`` counts records and bytes up to there."""
        self._taken = finished

    def next_batch(self) -> list[Any] | None:
        """The items of the next batch, after their random transforms. None after the last."""
        if not self._drawn and not self._draw():
            if self._error is not None:
                raise self._error
            return None
        items = []
        records, nbytes = self.finished
        self._current.extend(self._drawn.popleft())
        while self._current:
            begun = self.with_memory(self._arrived)
            upcoming = self._current.popleft()
            items.append(begun.end())
            self._count(0, begun.nbytes, upcoming)
            nbytes += upcoming.nbytes
            del begun  # its item alone keeps the memory
            self._count_drawn()
        self.finished = records + len(items), nbytes
        return items

    def with_memory(self, work: Callable[[], T]) -> T:
        """Returns what ``work`` returns. If a device has no memory for it, gives up the reads ahead and tries again."""
        for pause in _PAUSES:
            try:
                return work()
            except RuntimeError as e:  # MONAI raises another one in place of torch's
                if not _is_of_memory(e):
                    raise
                _drop_frames(e)
                self._give_up()
            time.sleep(pause)
        self._limit = self._most_records = 1
        return work()

    def end(self) -> None:
        """Ends the workers: no more batches are asked for."""
        if self._workers is not None:
            self._workers.close()

    def _give_up(self) -> None:
        """Drops items that are begun and not finished, which are begun again later, and lowers the limit."""
        begun = [upcoming for upcoming in chain(self._current, *self._drawn) if upcoming.begun is not None]
        if len(begun) > 1 and len(begun) // 2 < self._limit:
            self._limit = self._most_records = len(begun) // 2
            warnings.warn(
                f"the device has no memory left for {len(begun)} records in flight: the rest of this epoch has "
                f"{self._limit}. GDSDataLoader(prefetch={self._limit}) starts with that many",
                CacheWarning,
                stacklevel=2,
            )
        for upcoming in begun:
            upcoming.begun = None
            self._count(-1, 0, upcoming)
        self._unsized = []
        self._waiting = deque(chain(self._current, *self._drawn))

    def _arrived(self) -> Begun:
        """The next item of the current batch, up to its random transforms. Waits for its worker, if one computes it."""
        while (room := self._room()) and (self._waiting or self._draw()):
            self._begin(min(room, len(self._waiting)))
        upcoming = self._current[0]
        if upcoming.begun is None:  # even without room: the batch has to be completed
            self._begin(1)
        if upcoming.saved is not None:
            stages.enter("waiting for workers")
            saved, upcoming.saved = upcoming.saved.result(), None
            saved.note()
            if saved.how == "computed":
                stages.count("computed")
                stages.count("hits", -1)  # it is read now
            upcoming.begun = upcoming.dataset.session.begin([upcoming.index])[0]
            self._count(0, upcoming.begun.nbytes, upcoming)
        begun = upcoming.begun
        if isinstance(begun, Exception):
            raise begun
        assert begun is not None, "it was begun above"
        begun.arrive()
        upcoming.begun = None
        return begun

    def _room(self) -> int:
        """How many more records, each as large as the last one, may be begun; one while no size is known."""
        records, nbytes = self._records - self._taken[0], self._nbytes - self._taken[1]
        fit = 1
        if self._last:
            self._most_bytes = self._most_bytes or self._bytes_for()
            fit = (self._most_bytes - nbytes) // self._last
        return max(min(self._most_records - records, fit), 0 if records else 1)

    def _count(self, records: int, nbytes: int, upcoming: _Upcoming) -> None:
        """Counts records, and replaces the bytes that were counted for one of them."""
        self._records += records
        self._nbytes += nbytes - upcoming.nbytes
        upcoming.nbytes = nbytes
        self._last = nbytes or self._last

    def _count_drawn(self) -> None:
        """Counts the bytes of items that were waiting to be drawn."""
        unsized = []
        for upcoming in self._unsized:
            begun = upcoming.begun
            if begun is None or isinstance(begun, Exception):
                continue
            self._count(0, begun.nbytes, upcoming)
            if begun.waits:
                unsized.append(upcoming)
        self._unsized = unsized

    def _begin(self, count: int) -> None:
        """Begins the first ``count`` items that wait, those of one dataset together."""
        first = [self._waiting.popleft() for _ in range(count)]
        for dataset, group in groupby(first, attrgetter("dataset")):
            together = list(group)
            for upcoming, begun in zip(together, _begin_all(dataset, [u.index for u in together]), strict=True):
                upcoming.begun = begun
                if isinstance(begun, Exception):
                    self._count(1, 0, upcoming)
                    continue
                self._count(1, begun.nbytes, upcoming)
                if begun.waits:
                    self._unsized.append(upcoming)
                if self._workers is not None and not begun.cached and upcoming.saved is None:
                    upcoming.saved = self._workers.save(dataset, upcoming.index)

    def _draw(self) -> bool:
        """Draws a batch; False if there is none, or if that failed."""
        stages.enter("sampling")
        try:
            batch = next(self._batches, None)
        except Exception as e:  # of the user's sampler, or an index that does not exist
            self._error = e
            return False
        if batch is None:
            return False
        drawn = [_Upcoming(dataset, index) for dataset, index in batch]
        self._most_records = int(min(max(self._most_records, self._records_for(len(drawn))), self._limit))
        self._drawn.append(drawn)
        self._waiting.extend(drawn)
        return True


def _is_of_memory(error: BaseException | None) -> bool:
    """Whether this error, or the one that caused it, says that a device had no memory."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or _is_of_memory(error.__cause__))


def _drop_frames(error: BaseException | None) -> None:
    """Drops the tracebacks of an error and of those that led to it. Frames that hold the error itself are a circle, and
    keep the memory of finished items until the collector runs.
    """
    dropped: list[BaseException] = []
    while error is not None and error not in dropped:  # "raise e from e" leads to itself
        error.__traceback__ = None
        dropped.append(error)
        error = error.__cause__ or error.__context__


def _begin_all(dataset: GDSDataset, indices: Sequence[int]) -> list[Begun | Exception]:
    """As :meth:`Session.begin`, with the exception in place of each item that fails."""
    try:
        return [*dataset.session.begin(indices)]
    except Exception as e:
        if _is_of_memory(e):
            _drop_frames(e)
        if len(indices) == 1:
            return [e]
    return [_begin_all(dataset, [index])[0] for index in indices]
