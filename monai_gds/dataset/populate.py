"""``GDSDataset.populate``: when each item is handed to an engine, and what became of it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

from monai.data import PersistentDataset
from torch.utils.data import Subset

from monai_gds.base.units import shown
from monai_gds.dataset.broken import list_of, where_and_why, write_list
from monai_gds.dataset.engines import AHEAD, Answer, Engine, Here, InWorkers, OverExecutor, default_workers
from monai_gds.dataset.inner import is_dataset
from monai_gds.dataset.making import Saved, misses_in_words, why_missed
from monai_gds.dataset.ranks import RankLost, Ranks
from monai_gds.dataset.repeats import compare_ranks
from monai_gds.dataset.session import Session
from monai_gds.errors import FailedItem, NotSaved, PopulateError, UnsupportedType, WorkerDied, shorten, warn
from monai_gds.folder.budget import limit_of
from monai_gds.pipeline.settings import of_process
from monai_gds.pipeline.words import in_words, path_of
from monai_gds.shared.leases import pace

_log = logging.getLogger(__name__)

#: Items that the message of an error names.
_NAMED = 10

#: How long to wait at the end for items that other processes compute: this many seconds, or this many times the mean
#: time per item if that is longer. Then they are computed here too.
_PATIENCE_SECONDS, _PATIENCE_ITEMS = 60.0, 10

#: How often an item may have another key once it is made, as where a file is edited: then it has no record to keep.
_OTHERS = 3

#: First and longest pause between two rounds over such items.
_PAUSES = 0.02, 0.5

#: Seconds between lines of the log, where no bar is shown.
_LOG_SECONDS = 10.0

#: How many windows of items may kill their workers, one after the other, before the job ends too.
_HOPELESS_WINDOWS = 10


@dataclass(frozen=True, slots=True)
class Populated:
    """How many items had a record, and how many records were made or converted, on all ranks together.

    Attributes:
        cached: items whose record stayed as it was.
        computed: items whose record was made.
        converted: items whose record was rewritten in the form asked for, with ``convert=True``.
        left_out: items whose record does not fit into ``max_bytes``.
    """

    cached: int
    computed: int
    converted: int = 0
    left_out: int = 0


def populate(
    dataset: PersistentDataset,
    num_workers: int | None = None,
    progress: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    executor: Executor | None = None,
    convert: bool = False,
) -> Populated:
    """Runs the deterministic transforms over every item that is not cached yet.

    Records are published one by one, so after a kill another call continues where the first one stopped. An item
    that fails, or kills the workers that compute it, does not stop the others: it is reported at the end.

    Workers are forked from this process while CUDA is not initialised, and from a fork server afterwards. If the
    dataset cannot be pickled for that, they are threads, with a warning. Transforms that use CUDA themselves need
    ``num_workers=0`` or an initialised CUDA.

    An executor may have its workers on other hosts, such as Dask's ``client.get_executor()`` or mpi4py's
    ``MPIPoolExecutor``. They must see ``cache_dir`` and the source files under the same paths, and be able to
    import what the dataset is made of.

    Under torch.distributed every rank must call this. The ranks share the items, each waits until all have done
    theirs, however long that takes, and a failure on one rank is raised on all. For cache directories that are
    local to a node, give its local rank and world size.

    Args:
        num_workers: processes that compute items; 0 computes in this one. Default: one per core, 8 at most, where
            they can be forked. An item that fails in them is tried once more in this process.
        progress: shows a bar on rank 0, where there is a terminal or a notebook.
        rank: the rank of this process; default: torch.distributed's if it is initialised, else 0.
        world_size: how many processes share the items; default: torch.distributed's if it is initialised, else 1.
            With 1 the process waits for no other.
        executor: computes the items in place of ``num_workers``. It is not shut down.
        convert: rewrites records that are in another form than ``compression`` and ``tiles`` ask for, from their
            own bytes. With ``compression="auto"`` only records of whole tensors that nobody has tried to compress
            are converted, so machines that share a cache do not undo each other's work. A damaged record is
            computed; one that cannot be unpacked here stays as it is.

    Returns:
        How many items were cached already, how many were computed and how many converted, on all ranks together.

    Raises:
        PopulateError: items failed, which a file in the cache lists, another rank did, or the workers of ``executor``
            cannot do the work; all items that did not fail are cached.
        NotSaved: nothing more can be written to the cache directory.
        WorkerDied: a worker of ``executor`` died and took it along, or all workers die; finished items are
            cached.
        ValueError: an argument is out of range, or the dataset cannot be pickled for the workers of ``executor``.
    """
    ranks, session = Ranks(rank, world_size), dataset.session
    if not session.caches:
        return Populated(0, 0)  # by cache_dir=None, or the user has been warned of it
    if num_workers is not None and num_workers < 0:
        raise ValueError(f"num_workers={num_workers}: use 0 for this process, or a number of workers")
    if executor is not None and num_workers:
        raise ValueError(f"num_workers={num_workers} and executor={executor!r}: give one of them")
    # They may have made their datasets before they had a rank.
    compare_ranks(session.settings, session.keys().pipeline(), len(dataset.data))
    why: list[str] = []
    with suppress(Exception):  # populating raises it again, and notes it
        if ranks.rank == 0 and (cache := session.cache()) is not None:
            why = why_missed(cache, session.key(0))  # before records of this run are in the index
    try:
        done = _fill(session.for_worker(convert=convert), num_workers, executor, progress, ranks)
    except Exception as e:
        shorten(e)
        raise
    finally:
        session.settings.tidy()
    folder = session.settings.folders[0]
    most = limit_of(folder, session.settings.max_bytes) or 0
    if why and not done.cached and not done.converted:
        warn(misses_in_words(str(folder), why))
    if done.left_out and ranks.rank == 0:
        warn(
            f"{done.left_out} items are computed {session.settings.again}: the budget of {folder}, {shown(most)}, "
            "leaves no room beside the records there that are in use, or were since this run began"
        )
    return done


def _fill(session: Session, num_workers: int | None, executor: Executor | None, show: bool, ranks: Ranks) -> Populated:
    """Fills the cache from a copy of the dataset that caches, and whose target is the CPU."""
    with _bar(show and ranks.rank == 0) as bar:

        def fill_share() -> _Tally:
            session.flush()  # other processes cannot see what waits in this one to be saved
            share = ranks.share(len(session.dataset.data))
            engine: Engine = _here(session)
            if executor is not None:
                engine = OverExecutor(session, executor)
            elif workers := default_workers(len(share)) if num_workers is None else num_workers:
                engine = InWorkers(session, workers)
            tally = _Tally()
            with closing(engine):
                _Filling(session, engine, bar, tally).run(share)
            if tally.failures and isinstance(engine, InWorkers):
                again = [item.index for item in tally.failures]  # transforms may need this process, as for CUDA
                tally.failures = []
                with closing(_here(session)) as here:
                    _Filling(session, here, bar, tally).run(again)
            if ranks.together:
                bar(description="waiting for the other ranks")
            return tally

        try:
            tallies = ranks.gather(fill_share)
        except RankLost as e:
            raise PopulateError(f"not every rank has filled its share of the cache: {e}") from e
    failed = sorted(failure for tally in tallies for failure in (*tally.failures, *tally.killers))
    listed = list_of(session.settings.folders[0], session.pipeline_digest())
    if ranks.rank == 0:
        write_list(listed, failed)
    if failed:
        raise PopulateError(f"{_name_some(failed, len(session.dataset.data))}\n{listed} lists them all", failed)
    return Populated(*(sum(tally.counts[one.name] for tally in tallies) for one in fields(Populated)))


def _here(session: Session) -> Engine:
    """Computes items in this process, or in one of its own if this one's settings are not those that held."""
    return InWorkers(session, 1) if of_process(session.keys().differences()) else Here(session)


@dataclass
class _Tally:
    """What became of a rank's items."""

    counts: Counter[str] = field(default_factory=Counter)  # by the names of Populated
    failures: list[FailedItem] = field(default_factory=list)
    killers: list[FailedItem] = field(default_factory=list)  # items whose workers died


#: An exception comes from the engine, and means that a worker died.
_Outcome = Saved | FailedItem | Exception


class _Filling:
    """Fills a rank's share, and counts what became of it in a tally.

    Items that another process is computing are tried again in the next round. Items that were under way when a worker
    died are tried once more at the end, one at a time, so that an item that kills its worker costs no other item.
    """

    def __init__(self, session: Session, engine: Engine, bar: Callable[..., None], tally: _Tally) -> None:
        self._session, self._engine, self._bar, self._tally = session, engine, bar, tally
        self._running: dict[Future[Answer], tuple[int, str]] = {}  # index, and the name of its key at submission
        self._workers: set[str] = set()
        self._suspects: list[int] = []
        self._others = Counter[int]()  # how often an item had another key afterwards
        self._lost = 0  # items in a row whose worker died

    def run(self, share: Sequence[int]) -> None:
        self._bar(total=len(share))
        try:
            self._fill(share, last=False)
            self._fill(self._suspects, last=True)
        finally:
            for future in self._running:
                future.cancel()

    def _fill(self, indices: Sequence[int], last: bool) -> None:
        waited, (pause, longest) = 0.0, _PAUSES
        while indices:
            anyway = waited >= max(_PATIENCE_SECONDS, _PATIENCE_ITEMS * (pace.mean or 0.0))
            outcomes = self._outcomes(indices, anyway, last)
            busy = [index for index, outcome in outcomes if not self._settle(index, outcome, last)]
            if len(busy) == len(indices):
                time.sleep(pause)
                waited += pause
                pause = min(2 * pause, longest)
            indices = busy

    def _settle(self, index: int, outcome: _Outcome, last: bool) -> bool:
        """Counts an item, unless it must be tried again in the next round."""
        tally = self._tally
        match outcome:
            case Saved("busy"):
                return False
            case Saved(how):
                tally.counts[how] += 1
            case FailedItem():
                tally.failures.append(outcome)
            case Exception() if last:
                tally.killers.append(FailedItem(index, path_of(self._session.data, index), in_words(outcome)))
            case _:
                self._suspect(index, outcome)
                return True
        self._lost = 0
        failed = f", {len(tally.failures)} failed" if tally.failures else ""
        self._bar(advance=1, description=f"filling the cache, {self._engine.kind}{failed}")
        return True

    def _suspect(self, index: int, error: Exception) -> None:
        if not self._suspects:
            warn(f"{error}. What was under way is tried once more at the end, one item at a time")
        self._suspects.append(index)
        self._lost += 1
        if self._lost > _HOPELESS_WINDOWS * self._engine.window:
            raise WorkerDied(f"{self._lost} items in a row: {error}. {self._under_way()}") from error

    def _outcomes(self, indices: Sequence[int], anyway: bool, one_by_one: bool) -> Iterator[tuple[int, _Outcome]]:
        """Index and outcome of each item, in the order in which they end."""
        for index in indices:
            name, cached = self._look(index)
            if cached:
                yield index, Saved("cached")
                continue
            try:
                self._running[self._engine.submit(index, anyway)] = index, name
            except BrokenExecutor as e:
                raise WorkerDied(f"the executor lost a worker and runs nothing more: {e}. {self._under_way()}") from e
            window = 1 if one_by_one else max(self._engine.window, AHEAD * len(self._workers))
            while len(self._running) >= window:
                yield from self._ended()
        while self._running:
            yield from self._ended()

    def _ended(self) -> Iterator[tuple[int, _Outcome]]:
        """Waits for at least one item."""
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            index, name = self._running[future]
            outcome: _Outcome
            try:
                outcome, worker = future.result()
                self._workers.add(worker)
                outcome = self._expected(index, name, outcome, worker)
            except (NotSaved, PopulateError):
                raise
            except Exception as e:
                outcome = e
            if isinstance(outcome, Saved):
                outcome.note()
            del self._running[future]
            yield index, outcome

    def _look(self, index: int) -> tuple[str, bool]:
        """The name of an item's key, and whether it has a record now."""
        try:
            (key,) = self._session.keys()([self._session.data[index]])
            return key.name, self._session.holds(key)
        except Exception:  # it will be raised again where failures are noted
            return "", False

    def _expected(self, index: int, name: str, outcome: Saved | FailedItem, worker: str) -> Saved | FailedItem:
        """The outcome if the worker made the record that is looked for here; busy if the item has another key by now,
        and a failure if it has one again and again.

        Raises:
            PopulateError: the worker makes other keys than this process.
        """
        if isinstance(outcome, FailedItem) or not name or outcome.name in ("", name):
            return outcome
        if self._look(index)[0] != name:  # a source file was edited meanwhile
            self._others[index] += 1
            if self._others[index] < _OTHERS:
                return Saved("busy")
            error = f"{UnsupportedType.__name__}: data holds another item each time it is read"
            return FailedItem(index, path_of(self._session.data, index), error)
        raise PopulateError(
            f"{worker} made the record of item {index} under another key than the process that fills the cache looks "
            "for: MONAI's version, code, settings or source files differ between the two"
        )

    def _under_way(self) -> str:
        items = sorted({*self._suspects, *(index for index, _ in self._running.values())})
        named = ", ".join(f"{index} ({path_of(self._session.data, index)})" for index in items[:_NAMED])
        return f"Items under way: {named}. What was finished is cached: populate continues from there"


def _name_some(failed: Sequence[FailedItem], count: int) -> str:
    named: list[str] = []
    first: dict[str, int] = {}  # the index of the first item that failed for a reason
    for item in failed[:_NAMED]:
        path, why = where_and_why(item)
        named.append(f"  {item.index}: {path}: {why if why not in first else f'as item {first[why]}'}")
        first.setdefault(why, item.index)
    if len(failed) > _NAMED:
        named.append(f"  and {len(failed) - _NAMED} more, see the error's attribute `failures`")
    others = ", the others are cached" if len(failed) < count else ""
    return "\n".join([f"{len(failed)} of {count} items failed{others}:", *named])


@contextmanager
def _bar(wanted: bool) -> Iterator[Callable[..., None]]:
    """A progress bar, if there is a terminal or a notebook to show it; else lines of the log, now and then.

    Yields the function that updates it.
    """
    from monai_gds.base.console import progress

    display, logged = progress(), time.monotonic()
    display.disable = display.disable or not wanted
    task = display.add_task("filling the cache", total=None)

    def update(**changes: Any) -> None:
        nonlocal logged
        display.update(task, **changes)
        if display.disable and time.monotonic() >= logged + _LOG_SECONDS:
            logged = time.monotonic()
            (now,) = display.tasks
            _log.info("%s: %d of %d items", now.description, now.completed, now.total)

    with display:
        yield update


# ---------------------------------------------------------------------------------------------------------------------
# While a dataset is made


def check_room(dataset: PersistentDataset) -> None:
    """For ``strict``: makes the first record that is missing, where a budget may leave no room for it.

    Raises:
        NotSaved: there is no room.
    """
    session, settings, count = dataset.session, dataset.settings, len(dataset.data)
    if not session.caches or limit_of(settings.folders[0], settings.max_bytes) is None:
        return
    view = session.for_worker()
    try:
        made = next((saved for i in range(count) if (saved := view.save(i)).how != "cached"), None)
    except NotSaved:
        raise
    except Exception:  # of the item: whoever reads it gets that
        return
    if made is not None and made.how == "left_out":
        raise NotSaved(f"strict=True, and nothing can be saved in {settings.folders[0]}: {made.why}")


def fill(
    dataset: PersistentDataset,
    indices: Sequence[int] | None = None,
    most_workers: int | None = None,
    progress: bool = True,
    threads: int = 1,
) -> None:
    """Computes what has no record among some items.

    No rank waits for another: a dataset is often made on one rank only. Ranks that fill the same cache at the same time
    share the work by leases.

    Args:
        dataset: a GDSDataset.
        indices: which items; None: all.
        most_workers: at most this many processes; None: one per core.
        progress: shows a bar on rank 0.
        threads: how many compute them where no process can be forked.

    Raises:
        PopulateError: items failed; the others are cached. An item that no record can hold is one of them with
            ``unsupported="error"``; otherwise there is a warning.
        NotSaved: nothing more can be written to the cache directory; or, with ``strict``, its budget leaves items out.
    """
    indices = range(len(dataset.data)) if indices is None else indices
    if not len(indices):
        return
    part = copy(dataset)
    part.data = Subset(data, indices) if is_dataset(data := dataset.data) else [data[index] for index in indices]
    workers = default_workers(len(indices))
    try:
        with _threads(part.session, 0 if workers else threads) as executor:
            most = workers if most_workers is None else min(most_workers, workers)
            done = populate(part, most, progress and Ranks().rank == 0, 0, 1, executor=executor)
        if done.left_out and dataset.settings.strict:
            raise NotSaved(f"strict=True, and the budget of {dataset.cache_dir} leaves out {done.left_out} items")
    except PopulateError as e:
        missing = f"'{type(dataset).__name__}' object has no attribute"
        if any(missing in item.error for item in e.failures):
            e.add_note(
                f"monai_gds: {type(dataset).__name__} sets it after super().__init__(), which fills the cache: set it "
                "before that, or leave out populate=True and call self.populate() at the end of __init__"
            )
        broken = [item for item in e.failures if not item.error.startswith(UnsupportedType.__name__)]
        if broken or not e.failures or dataset.settings.options.unsupported == "error":
            raise
        failed, again = f"{len(e.failures)} of {len(indices)} items", dataset.settings.again
        said = f"{failed} cannot be cached, and are computed {again}: {e.failures[0].error}"
        part.session.runtime.misses.warn_once(UnsupportedType, said)  # and not of each item again
    if dataset.session.caches and dataset.settings.options.sources == "once":
        for index in indices:
            dataset.key(index)  # looks at its sources, for the rest of this process


@contextmanager
def _threads(session: Session, count: int) -> Iterator[Executor | None]:
    """Threads that compute items; None if one is enough, or the items need a process with other settings."""
    if count < 2 or not session.caches or of_process(session.keys().differences()):
        yield None
        return
    with ThreadPoolExecutor(count, "monai-gds-fill") as executor:
        yield executor
