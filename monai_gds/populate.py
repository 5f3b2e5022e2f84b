"""``GDSDataset.populate``: fills a cache before training, with many processes and on many ranks.

Each record is published by itself, so what a killed run had finished is there when it is started again. It asks the
dataset for single records, :mod:`monai_gds.workers` for processes, and :mod:`monai_gds.ranks` for its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from monai_gds.cache.key import strings
from monai_gds.errors import FailedItem, NotSaved, PopulateError, WorkerDied
from monai_gds.ranks import Ranks
from monai_gds.workers import Workers

if TYPE_CHECKING:
    from monai_gds.dataset import GDSDataset

__all__ = ["Populated", "populate"]

#: Items handed to the workers ahead, for each of them. More would only be lost when one is killed.
_AHEAD = 2

#: Failed items that the message of the error names.
_NAMED = 10

#: Characters of an error's message that are kept.
_WORDS = 500


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

    def note(self, outcome: bool | FailedItem) -> None:
        """Counts one item: whether it had to be computed, or how it failed."""
        if isinstance(outcome, FailedItem):
            self.failures.append(outcome)
        elif outcome:
            self.computed += 1
        else:
            self.cached += 1

    def as_list(self) -> list[Any]:
        """As JSON types, for the other ranks."""
        return [self.cached, self.computed, [astuple(failure) for failure in self.failures]]


def _fill(dataset: GDSDataset, share: Sequence[int], num_workers: int, bar: _Bar) -> _Tally:
    tally = _Tally()
    outcomes = _one_by_one(dataset, share) if num_workers == 0 else _by_workers(dataset, share, num_workers, bar)
    bar.begin(len(share), "in this process")
    for outcome in outcomes:
        tally.note(outcome)
        bar.advance(len(tally.failures))
    return tally


def _one_by_one(dataset: GDSDataset, share: Sequence[int]) -> Iterator[bool | FailedItem]:
    return (_attempt(dataset, index) for index in share)


def _by_workers(dataset: GDSDataset, share: Sequence[int], num_workers: int, bar: _Bar) -> Iterator[bool | FailedItem]:
    """Has workers compute what is missing; they are not even started where nothing is."""
    running: dict[Future[bool | FailedItem], int] = {}
    with ExitStack() as stack:
        workers: Workers[bool | FailedItem] | None = None
        for index in share:
            if _is_there(dataset, index):
                yield False
                continue
            if workers is None:
                workers = stack.enter_context(Workers(partial(_attempt, dataset), num_workers))
                bar.describe(f"{num_workers} workers ({workers.kind})")
            running[workers.submit(index)] = index
            if len(running) >= _AHEAD * num_workers:
                yield from _finished(running, dataset)
        while running:
            yield from _finished(running, dataset)


def _finished(running: dict[Future[bool | FailedItem], int], dataset: GDSDataset) -> Iterator[bool | FailedItem]:
    """Waits for one at least, and takes those away that have come to an end."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    try:
        for future in done:
            yield future.result()
            del running[future]
    except WorkerDied as e:
        at = ", ".join(f"{index} ({_path_of(dataset.data, index)})" for index in sorted(running.values()))
        raise WorkerDied(f"{e}. Under way were items {at}. The others are safe: populate goes on from there") from e


def _is_there(dataset: GDSDataset, index: int) -> bool:
    try:
        return dataset._is_cached(index)
    except Exception:  # it will be raised again where failures are noted
        return False


def _attempt(dataset: GDSDataset, index: int) -> bool | FailedItem:
    """Sees to the record of one item; this is what workers run.

    Returns:
        Whether it had to be computed, or how it failed.

    Raises:
        NotSaved: the cache directory takes no more, so that to go on is of no use.
    """
    try:
        return dataset.save(index)
    except NotSaved:
        raise
    except Exception as e:
        return FailedItem(index, _path_of(dataset.data, index), _in_words(e))


def _path_of(data: Sequence[Any], index: int) -> str:
    try:
        item = data[index]
        found = [text for text in strings(item) if "/" in text]
        return found[0] if found else repr(item)[:80]
    except Exception:  # the item itself may be what fails
        return f"data[{index}]"


def _in_words(error: BaseException) -> str:
    words = []
    cause: BaseException | None = error
    while cause is not None:  # MONAI's own error names the transform, and its cause what went wrong
        words.append(f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:_WORDS])
        cause = cause.__cause__
    return ", because of ".join(words)


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
