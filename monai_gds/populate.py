"""``GDSDataset.populate``: fills a cache before training, with many processes and on many ranks.

Each record is published by itself, so what a killed run had finished is there when it is started again. It asks the
dataset for single records, :mod:`monai_gds.workers` for processes, and :mod:`monai_gds.ranks` for its share.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from monai_gds.cache.single_flight import pace
from monai_gds.errors import FailedItem, NotSaved, PopulateError, WorkerDied
from monai_gds.naming import paths_of
from monai_gds.ranks import Ranks
from monai_gds.workers import Workers

if TYPE_CHECKING:
    from monai_gds.dataset import GDSDataset

__all__ = ["Populated", "Saved", "populate"]

#: Items handed to the workers ahead, for each of them. More would only be lost when one is killed.
_AHEAD = 2

#: Failed items that the message of the error names.
_NAMED = 10

#: Characters of an error's message that are kept.
_WORDS = 500

#: How long items that other processes compute are waited for at the end: so many seconds, or times that an item takes
#: here if that is longer. Then they are computed here too.
_PATIENCE_SECONDS, _PATIENCE_ITEMS = 60.0, 10

#: First and longest pause between two rounds over such items.
_PAUSES = 0.02, 0.5


class Saved(NamedTuple):
    """What became of an item that should have a record.

    Attributes:
        how: its record was there, its record was made, or somebody else is computing it.
        seconds: what computing it took.
    """

    how: Literal["cached", "computed", "busy"]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Populated:
    """What :meth:`GDSDataset.populate` did, on all ranks together.

    Attributes:
        cached: items whose records were there.
        computed: items whose records were made.
    """

    cached: int
    computed: int


def populate(dataset: GDSDataset, num_workers: int, show: bool, ranks: Ranks) -> Populated:
    """See :meth:`GDSDataset.populate`; ``dataset`` caches, and its target is the CPU."""
    if num_workers < 0:
        raise ValueError(f"num_workers={num_workers}: use 0 for this process, or a number of workers")
    with _Bar(show and ranks.rank == 0) as bar:
        with ranks.at_work():
            dataset.flush()  # other processes do not know what waits to be saved here
            tally = _fill(dataset, ranks.share(len(dataset.data)), num_workers, bar)
        try:
            tallies = ranks.exchange(tally.as_list(), bar.wait_for)
        except RuntimeError as e:
            raise PopulateError(f"not every rank has filled its share of the cache: {e}") from e
    cached, computed, failures = (list(column) for column in zip(*tallies, strict=True))
    failed = sorted(FailedItem(*failure) for of_rank in failures for failure in of_rank)
    if failed:
        raise PopulateError(_name_some(failed, len(dataset.data)), failed)
    return Populated(sum(cached), sum(computed))


@dataclass
class _Tally:
    """What became of this rank's items."""

    cached: int = 0
    computed: int = 0
    failures: list[FailedItem] = field(default_factory=list)

    def note(self, outcome: Saved | FailedItem) -> None:
        """Counts one item: whether it had to be computed, or how it failed."""
        if isinstance(outcome, FailedItem):
            self.failures.append(outcome)
        elif outcome.how == "computed":
            self.computed += 1
        else:
            self.cached += 1

    def as_list(self) -> list[Any]:
        """As JSON types, for the other ranks."""
        return [self.cached, self.computed, [astuple(failure) for failure in self.failures]]


def _fill(dataset: GDSDataset, share: Sequence[int], num_workers: int, bar: _Bar) -> _Tally:
    """Round by round: what other processes were computing comes again in the next."""
    tally, left, waited = _Tally(), share, 0.0
    pause, longest = _PAUSES
    with ExitStack() as stack:
        work: _Here | _InWorkers = _Here(dataset) if num_workers == 0 else _InWorkers(dataset, num_workers, bar, stack)
        bar.begin(len(share), "in this process")
        while left:
            busy = []
            anyway = waited >= max(_PATIENCE_SECONDS, _PATIENCE_ITEMS * (pace.mean or 0.0))
            for index, outcome in work.attempt(left, anyway):
                if isinstance(outcome, Saved) and outcome.how == "busy":
                    busy.append(index)
                    continue
                tally.note(outcome)
                bar.advance(len(tally.failures))
            if len(busy) == len(left):
                time.sleep(pause)
                waited += pause
                pause = min(2 * pause, longest)
            left = busy
    return tally


class _Here:
    """Attempts items one after the other, in this process."""

    def __init__(self, dataset: GDSDataset) -> None:
        self._dataset = dataset

    def attempt(self, indices: Sequence[int], anyway: bool) -> Iterator[tuple[int, Saved | FailedItem]]:
        """Index and outcome of each; see :func:`_attempt`."""
        return ((index, _attempt(self._dataset, (index, anyway))) for index in indices)


class _InWorkers:
    """Has workers compute what is missing; they are not even started where nothing is."""

    def __init__(self, dataset: GDSDataset, num_workers: int, bar: _Bar, stack: ExitStack) -> None:
        self._dataset, self._num_workers, self._bar, self._stack = dataset, num_workers, bar, stack
        self._workers: Workers[Saved | FailedItem] | None = None
        self._running: dict[Future[Saved | FailedItem], int] = {}

    def attempt(self, indices: Sequence[int], anyway: bool) -> Iterator[tuple[int, Saved | FailedItem]]:
        """Index and outcome of each, in the order in which they come to an end; see :func:`_attempt`."""
        for index in indices:
            if _is_there(self._dataset, index):
                yield index, Saved("cached")
                continue
            if self._workers is None:
                self._workers = self._stack.enter_context(Workers(partial(_attempt, self._dataset), self._num_workers))
                self._bar.describe(f"{self._num_workers} workers ({self._workers.kind})")
            self._running[self._workers.submit((index, anyway))] = index
            if len(self._running) >= _AHEAD * self._num_workers:
                yield from self._finished()
        while self._running:
            yield from self._finished()

    def _finished(self) -> Iterator[tuple[int, Saved | FailedItem]]:
        """Waits for one at least, and takes those away that have come to an end."""
        running = self._running
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        try:
            for future in done:
                outcome = future.result()
                yield running.pop(future), outcome
                if isinstance(outcome, Saved) and outcome.how == "computed":
                    pace.note(outcome.seconds)
        except WorkerDied as e:
            at = ", ".join(f"{i} ({_path_of(self._dataset.data, i)})" for i in sorted(running.values()))
            raise WorkerDied(f"{e}. Under way were items {at}. The others are safe: populate goes on from there") from e


def _is_there(dataset: GDSDataset, index: int) -> bool:
    try:
        return dataset.is_cached(index)
    except Exception:  # it will be raised again where failures are noted
        return False


def _attempt(dataset: GDSDataset, what: tuple[int, bool]) -> Saved | FailedItem:
    """Sees to the record of one item; this is what workers run.

    Args:
        dataset: whose item it is.
        what: the item's index, and whether it is computed even while somebody else does.

    Returns:
        What became of it, or how it failed.

    Raises:
        NotSaved: the cache directory takes no more, so that to go on is of no use.
    """
    index, anyway = what
    try:
        return dataset.save(index, anyway)
    except NotSaved:
        raise
    except Exception as e:
        return FailedItem(index, _path_of(dataset.data, index), _in_words(e))


def _path_of(data: Sequence[Any], index: int) -> str:
    try:
        item = data[index]
        return next((path for _, path in paths_of(item)), repr(item)[:80])
    except Exception:  # the item itself may be what fails
        return f"data[{index}]"


def _in_words(error: BaseException) -> str:
    words = []
    notes = "".join(f" ({' '.join(note.split())})" for note in getattr(error, "__notes__", ()))
    cause: BaseException | None = error
    while cause is not None:  # MONAI's own error names the transform, and its cause what went wrong
        words.append(f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:_WORDS])
        cause = cause.__cause__
    return ", because of ".join(words) + notes


def _name_some(failed: Sequence[FailedItem], count: int) -> str:
    named = [f"  {item.index}: {item.path}: {item.error}" for item in failed[:_NAMED]]
    if len(failed) > _NAMED:
        named.append(f"  and {len(failed) - _NAMED} more, see the error's attribute `failures`")
    return "\n".join([f"{len(failed)} of {count} items failed, the others are cached:", *named])


class _Bar:
    """A progress bar, where there is a terminal or a notebook to show it."""

    def __init__(self, wanted: bool) -> None:
        from monai_gds.terminal import progress  # with all that commands need, which a dataset does not

        self._progress = progress()
        self._progress.disable = self._progress.disable or not wanted
        self._task = self._progress.add_task("looking", total=None)
        self._how = ""

    def begin(self, total: int, how: str) -> None:
        """Shows the bar."""
        self._progress.update(self._task, total=total)
        self.describe(how)

    def describe(self, how: str) -> None:
        """Says by whom the items are computed."""
        self._how = how
        self._progress.update(self._task, description=f"filling the cache, {how}")

    def advance(self, failed: int) -> None:
        """One more item is done with."""
        failures = f", {failed} failed" if failed else ""
        self._progress.update(self._task, advance=1, description=f"filling the cache, {self._how}{failures}")

    def wait_for(self, ranks: Sequence[int]) -> None:
        """Says for which ranks this one waits."""
        self._progress.update(self._task, description=f"waiting for rank {', '.join(map(str, ranks))}")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
