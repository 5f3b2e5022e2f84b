"""Begins the reads of the coming items within bounds, and finishes the items in order. For :mod:`.data_loader`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, islice, takewhile
from math import inf
from operator import attrgetter
from typing import Any, TypeVar

from monai_gds import limits
from monai_gds.base import stages
from monai_gds.dataset.broken import Skipping, is_of_memory
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.programmed import Programmed, Seed
from monai_gds.dataset.session import Begun
from monai_gds.errors import WorkerDied, causes, warn
from monai_gds.loader.crew.crew import Running
from monai_gds.loader.crew.drawn import NO_BATCH, Drawn
from monai_gds.loader.crew.programs import LoopLeft, Programs
from monai_gds.pipeline.settings import OfThread
from monai_gds.pipeline.words import naming

T = TypeVar("T")

#: Items that are begun for each that is finished, until as many are in flight as may be.
_SOME = 2

#: Seconds before each new try where a device has no memory left: reads that were given up fill theirs to the end.
_PAUSES = (0.0, 0.1, 1.0)


class _Upcoming:
    """One item of a batch that is to come."""

    __slots__ = ("begun", "dataset", "index", "nbytes", "running", "seed")

    def __init__(self, dataset: GDSDataset, index: int, seed: Seed) -> None:
        self.dataset, self.index, self.seed = dataset, index, seed
        self.begun: Begun | Programmed | Exception | None = None  # what the dataset began, or its error
        self.nbytes = 0  # bytes that are counted for it
        self.running: Running | None = None  # a worker's task, if one draws it

    @property
    def is_drawn(self) -> bool:
        """Whether it can be begun without waiting for a worker."""
        return self.running is None or self.running.answer.done()

    @property
    def is_made(self) -> bool:
        """Whether it was made before its epoch began."""
        return self.running is not None and self.running.begun is not None


class ReadAhead:
    """Begins the reads of the items that come next, and finishes them. Belongs to the loader's thread.

    An error of an item is raised with that item's batch. If a device has no memory left for the current batch, reads
    ahead of it are given up and begun again later, and half as many records are in flight from then on. Random
    transforms are not run again.

    Args:
        batches: the items, batch by batch.
        most_records: returns how many records may be in flight with batches of a given size.
        most_bytes: returns how many bytes may be in flight. Called once the size of a record is known.
        programs: where items get their programs; None: this thread draws, and computes what is not cached.
        skipping: what takes the places of items that cannot be made; None: their errors are raised.
        around: the settings of the consumer, which hold for random transforms.

    Attributes:
        complete: whether there are no more batches.
        finished: records and bytes of the batches so far.
        plain: whether the last batch has no tensors of the device but those in dicts and lists.
    """

    def __init__(
        self,
        batches: Iterable[Drawn],
        most_records: Callable[[int], int],
        most_bytes: Callable[[], int],
        programs: Programs | None,
        skipping: Skipping | None = None,
        around: OfThread = OfThread((), False),  # noqa: B008 (immutable)
    ) -> None:
        self._batches = iter(batches)
        self._skipping, self._around = skipping, around
        self._records_for, self._most_records = most_records, 1
        self._bytes_for, self._most_bytes = most_bytes, 0
        self._programs = programs
        self._all_ordered = self.complete = False
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
        self._filled: tuple[Any, ...] = ()  # the counts with which no more could be begun
        self.plain = False
        self._last = 0  # size of the last record that has one

    def taken(self, finished: tuple[int, int]) -> None:
        """Notes, in the consumer's thread, that it took a batch. ``finished`` counts records and bytes up to there."""
        self._taken = finished

    def next_batch(self) -> Any:
        """The items of the next batch, a list, after their random transforms; NO_BATCH after the last."""
        if not self._drawn and not self._draw():
            if self._error is not None:
                raise self._error
            self.complete = True
            return NO_BATCH
        items = []
        plain = True
        records, nbytes = self.finished
        self._current.extend(self._drawn.popleft())
        while self._current:
            upcoming = self._current[0]
            try:
                begun = self.with_memory(self._arrived)
                with self._around.applied():
                    items.append(begun.end())
            except LoopLeft:
                return NO_BATCH
            except Exception as e:
                if self._skipping is None or isinstance(e, WorkerDied) or is_of_memory(e):
                    upcoming.begun = None  # or the error would hold itself
                    raise
                place = self._skipping.instead((upcoming.dataset, upcoming.index), upcoming.seed, e)
                self._restart(upcoming, place)
                continue
            upcoming.begun = None
            self._current.popleft()
            plain = plain and isinstance(begun, Programmed) and begun.plain
            self._count(0, begun.nbytes, upcoming)
            nbytes += upcoming.nbytes
            del begun  # its item alone keeps the memory
            if self._unsized:
                self._count_drawn()
        self.finished, self.plain = (records + len(items), nbytes), plain
        return items

    def next_epoch(self) -> Iterator[None]:
        """Makes the items of the first batches of the next epoch, one batch's before each value."""
        if self._programs is not None and self._last and self.complete and self._limit == inf:
            # A quarter of what may be in flight: a validation may come first, and need memory.
            self._most_bytes = self._most_bytes or self._bytes_for()
            room = self._most_bytes // 4
            yield from self._programs.make_next(room, self._last, self._around)

    def with_memory(self, work: Callable[[], T]) -> T:
        """Returns what ``work`` returns. If a device has no memory for it, gives up the reads ahead and tries again."""
        for pause in _PAUSES:
            try:
                return work()
            except RuntimeError as e:  # MONAI raises another one in place of torch's
                if not is_of_memory(e):
                    raise
                _drop_frames(e)
                self._give_up()
            time.sleep(pause)
        self._limit = self._most_records = 1
        return work()

    def _give_up(self) -> None:
        """Drops items that are begun and not finished, which are begun again later, and lowers the limit."""
        begun = [upcoming for upcoming in chain(self._current, *self._drawn) if upcoming.begun is not None]
        if len(begun) > 1 and len(begun) // 2 < self._limit:
            self._limit = self._most_records = len(begun) // 2
            warn(
                f"the device has no memory left for {len(begun)} records in flight: the rest of this epoch has "
                f"{self._limit}. GDSDataLoader(prefetch={self._limit}) starts with that many"
            )
        self._drop_begun()

    def _restart(self, upcoming: _Upcoming, place: tuple[GDSDataset, int]) -> None:
        """Puts another item in the place of the current one. What was drawn after that is drawn again."""
        self._drop_begun()
        upcoming.dataset, upcoming.index = place
        upcoming.running = None

    def _drop_begun(self) -> None:
        for upcoming in chain(self._current, *self._drawn):
            if upcoming.running is not None:
                upcoming.running.begun = None  # made before the epoch
            if upcoming.begun is not None:
                upcoming.begun = None
                self._count(-1, 0, upcoming)
        self._unsized = []
        self._waiting = deque(chain(self._current, *self._drawn))

    def _arrived(self) -> Begun | Programmed:
        """The next item of the current batch, up to its random transforms. Waits for its worker, if one draws it."""
        if self._programs is None:
            self._fill()
        else:
            while len(self._waiting) < self._programs.window and self._draw():
                pass
            if not self._current[0].is_made:  # else the training begins, and this would compete with its first step
                self._programs.warm()
                if not self._last:
                    self._begin_drawn(1)  # its size tells for how many there is room
                # A few at a time, or the first batch, and the training with it, would wait for the reads of many others
                self._begin_drawn(sum(upcoming.begun is None for upcoming in self._current) or _SOME)
        upcoming = self._current[0]
        if upcoming.begun is None:  # even without room: the batch has to be completed
            self._begin(1)
        begun = upcoming.begun
        if isinstance(begun, Exception):
            try:
                raise begun
            finally:
                del begun  # else the error holds this frame, and that the error
        assert begun is not None, "it was begun above"
        begun.arrive()
        return begun

    def _fill(self) -> None:
        """Begins what there is room for, or a few of it. Most often nothing has changed since the item before."""
        while (counted := (self._taken, self._records, self._nbytes)) != self._filled:
            least, room, few = self._least_room(), self._room(), _few(self._current)
            while room >= least and len(self._waiting) < max(least, few) and self._draw():
                pass
            if room < least or not self._waiting:
                self._filled = counted
                continue
            self._begin(min(room, few or room, len(self._waiting)))
            if few:
                return

    def _room(self) -> int:
        """How many more records, each as large as the last one, may be begun; one while no size is known."""
        records, nbytes = self._records - self._taken[0], self._nbytes - self._taken[1]
        fit = 1
        if self._last:
            self._most_bytes = self._most_bytes or self._bytes_for()
            fit = (self._most_bytes - nbytes) // self._last
        return max(min(self._most_records - records, fit), 0 if records else 1)

    def _least_room(self) -> int:
        """For how many records there must be room before any is begun. Where reads take long, many are begun together:
        their heads are read at the same time, and then they are.
        """
        upcoming = self._current[0]
        if upcoming.begun is None or not upcoming.dataset.session.runtime.is_slow:
            return 1
        most = min(self._most_records, self._most_bytes // self._last) if self._last else 1
        return max(1, min(most // 2, limits.SLOW_READS))

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

    def _begin_drawn(self, most: int) -> None:
        """Begins items that workers have drawn, in their order, as far as there is room."""
        some = islice(self._waiting, min(self._room(), most))
        self._begin(sum(1 for _ in takewhile(attrgetter("is_drawn"), some)))

    def _begin(self, count: int) -> None:
        """Begins the first ``count`` items that wait, those of one dataset together."""
        first = [self._waiting.popleft() for _ in range(count)]
        for dataset, group in groupby(first, attrgetter("dataset")):
            together = list(group)
            for upcoming, begun in zip(together, self._all_begun(dataset, together), strict=True):
                upcoming.begun = begun
                if isinstance(begun, Exception):
                    self._count(1, 0, upcoming)
                else:
                    self._count(1, begun.nbytes, upcoming)
                    if begun.waits:
                        self._unsized.append(upcoming)
                del begun  # an error holds the frames that called what raised it

    def _all_begun(self, dataset: GDSDataset, items: Sequence[_Upcoming]) -> Sequence[Begun | Programmed | Exception]:
        if self._programs is None:
            return _begin_all(dataset, [upcoming.index for upcoming in items])
        return [self._begun_by_program(self._programs, upcoming) for upcoming in items]

    def _begun_by_program(self, programs: Programs, upcoming: _Upcoming) -> Programmed | Exception:
        if upcoming.running is None:  # reads were given up, or it is drawn just now
            upcoming.running = programs.order(upcoming.dataset, upcoming.index, upcoming.seed)
        dataset, index = upcoming.dataset, upcoming.index
        try:
            with naming(index, dataset.session.data[index]):
                return programs.begin(dataset, index, upcoming.seed, upcoming.running)
        except LoopLeft:
            raise
        except Exception as e:
            if is_of_memory(e):
                _drop_frames(e)
            return e

    def _draw(self) -> bool:
        """Draws a batch; False if there is none, or if that failed."""
        stages.enter("sampling")
        try:
            batch = next(self._batches, None)
        except Exception as e:  # of the user's sampler, or an index that does not exist
            self._error = e
            return False
        if batch is None:
            if self._programs is not None and not self._all_ordered:
                self._all_ordered = True
                self._programs.go_on()
            return False
        drawn = [_Upcoming(*place, seed) for place, seed in zip(batch.places, batch.seeds, strict=True)]
        if self._programs is not None:
            for upcoming in drawn:
                upcoming.running = self._programs.order(upcoming.dataset, upcoming.index, upcoming.seed)
        self._most_records = int(min(max(self._most_records, self._records_for(len(drawn))), self._limit))
        self._drawn.append(drawn)
        self._waiting.extend(drawn)
        return True


def _few(current: Sequence[_Upcoming]) -> int:
    """How many records to begin at once where each is drawn, in this thread: what the batch needs, then some for each
    item, or the first batch, and the training with it, would wait for the draws of many others. 0: any number.
    """
    begun = current[0].begun
    if not isinstance(begun, Begun) or begun.lazy is None or current[0].dataset.session.runtime.is_slow:
        return 0
    return sum(upcoming.begun is None for upcoming in current) or _SOME


def _drop_frames(error: BaseException | None) -> None:
    """Drops the tracebacks of an error and of those that led to it. Frames that hold the error itself are a circle, and
    keep the memory of finished items until the collector runs.
    """
    for one in causes(error, contexts=True):
        one.__traceback__ = None


def _begin_all(dataset: GDSDataset, indices: Sequence[int]) -> list[Begun | Exception]:
    """As :meth:`Session.begin`, with the exception in place of each item that fails."""
    try:
        return [*dataset.session.begin(indices)]
    except Exception as e:
        if is_of_memory(e):
            _drop_frames(e)
        if len(indices) == 1:
            return [e]
    return [_begin_all(dataset, [index])[0] for index in indices]
