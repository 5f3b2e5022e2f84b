"""``transforms_on="workers"``: processes that load items, run the random transforms and collate.

    places and positions of the next batch ──▶ worker: seed, load, transform, collate, pack ──▶ unpack, in order
                                                  │                                               ▲
                                                  └───────────── arena (shared memory) ───────────┘

Two batches per worker are under way. Before each item, everything that its random transforms draw from is seeded with
the epoch's seed and the item's position in the epoch, so batches do not depend on which worker makes them, nor on how
many there are.
"""

from __future__ import annotations

import os
import pickle
import queue
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from monai.transforms.utils import reset_ops_id

from monai_gds.base.stages import Measurements, Watch, enter, measured
from monai_gds.base.workers import Workers
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.session import Session
from monai_gds.loader.shared_memory import Arena, Arenas, Mapped, Packed, Place, pack, unpack
from monai_gds.pipeline.randomness import seed_everything, seed_transforms
from monai_gds.pipeline.settings import State, apply, capture_all
from monai_gds.pipeline.words import naming

#: Makes the seeds of transforms in the loader's process differ from those in workers.
_HERE = 1

#: Arenas beyond those of the batches under way: one is being unpacked, one waits, and the consumer has one or two.
_DELIVERED = 4


class Work(NamedTuple):
    """What a worker needs for every batch."""

    parts: list[Session]  # of the datasets
    collate: Callable[[list[Any]], Any] | None  # makes a batch of a list of items; None: the loader's process does
    on_device: bool  # whether batches go to a CUDA device
    state: State  # the settings of the loader's process


class Task(NamedTuple):
    """One batch."""

    items: list[tuple[int, int]]  # part and index
    seed: int  # of the epoch
    first: int  # position in the epoch of its first item
    place: Place | None
    arenas: frozenset[int]
    measured: bool


# ---------------------------------------------------------------------------------------------------------------------
# In a worker


class Worker:
    """Makes batches. It gets its work pickled, so that an error in unpickling is one of the first batch."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        self._work: Work | None = None
        self._mapped = Mapped()

    def __call__(self, task: Task) -> tuple[Packed, Measurements | None]:
        watch = Watch() if task.measured else None
        with measured(watch):
            packed = self._packed(task)
        return packed, None if watch is None else watch.take()

    def _packed(self, task: Task) -> Packed:
        work = self._work = self._work or _unpickled(self._pickled)
        items = [_item(work.parts[p], index, task.seed, task.first + i) for i, (p, index) in enumerate(task.items)]
        work.parts[0].flush()  # this process may be killed before its own writer is done
        enter("collating")
        first = None if work.collate is None else _first(items)
        batch = items if work.collate is None else work.collate(items)
        del items  # or the batch would have to copy them
        return pack(batch, _moving(batch, first) if work.on_device else (), self._mapped.room(task.place, task.arenas))


def _unpickled(pickled: bytes) -> Work:
    try:
        work: Work = pickle.loads(pickled)
    except Exception as e:
        raise ValueError(
            f"a worker process cannot load the dataset: {e}. Define transforms and functions in a module that it can "
            "import, not in a notebook or under `if __name__ == '__main__':`"
        ) from e
    apply(work.state)
    with warnings.catch_warnings(action="ignore"):  # of the split: the loader's process has given them
        for part in work.parts:
            part.split()
    return work


def _item(session: Session, index: int, *seed: int) -> Any:
    dataset = session.dataset
    with naming(index, dataset.data[index]):
        seed_everything(session.split().steps(), *seed)
        item = dataset[index]
    reset_ops_id(item)  # ids differ from those of the user's transforms, which must be able to invert the item
    return item


def _first(items: list[Any]) -> Any:
    """The first item, or the first of the crops of it."""
    found: Any = items
    while isinstance(found, list) and found:
        found = found[0]
    return found


def _moving(value: Any, item: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch that would be on the device if the items had been made there: not those of numbers."""
    if isinstance(value, torch.Tensor):
        if not isinstance(item, (Number, np.ndarray, np.generic)):
            yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _moving(part, _at(item, key))


def _at(item: Any, key: Any) -> Any:
    try:
        return item[key]
    except (LookupError, TypeError):
        return None


# ---------------------------------------------------------------------------------------------------------------------
# In the loader's process


class Order(NamedTuple):
    """What processes are started for. Processes with an equal order are used again."""

    num_workers: int
    context: Any
    ahead: int  # how many batches may be under way
    most_bytes: int  # of shared memory
    work: bytes = b""
    process: int = 0  # that starts them


class Processes:
    """Worker processes, and the memory through which their batches come. They outlive an epoch."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.arenas = Arenas(order.most_bytes, order.ahead + _DELIVERED)
        cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        context = order.context or ("forkserver" if cuda else "fork")  # by name: threads would not do
        self.workers = Workers(Worker(order.work), order.num_workers, context)

    def close(self) -> None:
        """Ends them at once."""
        if self.order.process == os.getpid():
            self.workers.close()


class Drawn(NamedTuple):
    """A batch that is to be made."""

    places: Sequence[tuple[GDSDataset, int]]  # the dataset and index of each item
    seed: int  # of the epoch
    first: int  # position in the epoch of its first item


def with_seed(
    generator: torch.Generator | None, draw: Callable[[], Iterator[Sequence[tuple[GDSDataset, int]]]]
) -> Iterator[Drawn]:
    """The batches of an epoch, whose seed is what torch's loader is about to draw for its workers."""
    ahead = (generator or torch.default_generator).clone_state()
    return _numbered(draw(), int(torch.empty((), dtype=torch.int64).random_(generator=ahead)))


def _numbered(batches: Iterable[Sequence[tuple[GDSDataset, int]]], seed: int) -> Iterator[Drawn]:
    first = 0
    for places in batches:
        yield Drawn(places, seed, first)
        first += len(places)


class _Running(NamedTuple):
    """A batch that a worker is making."""

    drawn: Drawn
    packed: Future[tuple[Packed, Measurements | None]]
    arena: Arena | None


class WorkerBatches:
    """The batches of one epoch, in order. Belongs to the loader's thread, but for :meth:`close`.

    Args:
        order: what processes are started for; their work is added here.
        idle: processes of the last epoch; those of this one are left there.
        collate: makes a batch of a list of items.
        parts: the datasets.
        device: where batches go.
        batches: what to make.
        watch: adds up what workers measure.

    Attributes:
        whole: whether :meth:`next_batch` returns batches, rather than items for the rest of their transforms.

    Raises:
        ValueError: something cannot be sent to workers.
    """

    finished = 0, 0

    def __init__(
        self, order: Order, idle: list[Processes], collate: Callable[[list[Any]], Any], parts: Sequence[GDSDataset],
        device: torch.device, batches: Iterable[Drawn], watch: Watch | None,
    ) -> None:  # fmt: skip
        self._parts, self._device, self._batches, self._watch = parts, device, iter(batches), watch
        views = [part.session.for_worker(loads=True) for part in parts]
        self._done = [len(view.split().steps()) for view in views]
        self.whole = self._done == [len(part.session.split().steps()) for part in parts]
        work = Work(views, collate if self.whole else None, device.type == "cuda", capture_all())
        order = order._replace(work=_pickled(work), process=os.getpid())
        self._idle = idle
        while idle and idle[-1].order != order:
            idle.pop().close()
        self._processes = idle.pop() if idle else Processes(order)
        self._running: deque[_Running] = deque()
        self._news: queue.SimpleQueue[object] = queue.SimpleQueue()  # the next batch is ready, or the loop was left
        self._error: Exception | None = None  # raised after the running batches
        self._complete = False

    def taken(self, finished: tuple[int, int]) -> None:
        """Does nothing, unlike that of ReadAhead: the number of batches bounds what is under way."""

    def next_batch(self) -> Any:
        """The next batch, or its items if some transforms are left to this process; None if there is none."""
        while len(self._running) < self._processes.order.ahead and self._submit():
            pass
        if not self._running:
            if self._error is not None:
                raise self._error
            self._complete = True
            return None
        running = self._running.popleft()
        enter("waiting for workers")
        if not running.packed.done():
            running.packed.add_done_callback(self._news.put)
            self._news.get()
            if not running.packed.done():  # the loop was left
                return None
        packed, measurements = running.packed.result()
        if measurements is not None and self._watch is not None:
            self._watch.add(measurements)
        enter("collating")
        batch = self._unpacked(packed, running.arena)
        if self.whole:
            return batch
        return [self._finished(running.drawn, i, item) for i, item in enumerate(batch)]

    def close(self) -> None:
        """Wakes the loader's thread, since the loop was left. May be called in any thread, by the collector too."""
        self._news.put(None)

    def end(self) -> None:
        """Ends the processes, unless the epoch is complete: then they wait for the next one."""
        if self._complete and not self._processes.workers.broken:
            self._idle.append(self._processes)
        else:
            self._processes.close()

    def _submit(self) -> bool:
        """Hands the next batch to the workers; False if there is none, or if drawing it failed."""
        try:
            drawn = next(self._batches, None)
        except Exception as e:  # of the user's sampler, or an index that does not exist
            self._error, self._batches = e, iter(())
            return False
        if drawn is None:
            return False
        arenas = self._processes.arenas
        arena = arenas.take()
        items = [(self._parts.index(dataset), index) for dataset, index in drawn.places]
        place = None if arena is None else arena.place
        task = Task(items, drawn.seed, drawn.first, place, arenas.numbers, self._watch is not None)
        self._running.append(_Running(drawn, self._processes.workers.submit(task), arena))
        return True

    def _unpacked(self, packed: Packed, arena: Arena | None) -> Any:
        """A worker's batch, unpacked on the device."""
        arenas = self._processes.arenas
        arenas.note(packed)
        if arena is None or packed.loose is not None or not packed.spans:
            if arena is not None:
                arenas.give_back(arena)
            return unpack(packed, None, self._copied)
        if self._device.type == "cpu":
            memory = arena.shared(packed.nbytes, partial(arenas.give_back, arena))
            return unpack(packed, memory, lambda buffer, moves: buffer)
        arena.pin(packed.nbytes)
        batch = unpack(packed, arena.memory, self._copied)
        arenas.give_back(arena, torch.cuda.current_stream(self._device).record_event())
        return batch

    def _copied(self, buffer: np.ndarray, moves: bool) -> Any:
        """Copies a buffer to separate memory."""
        if not moves:
            return buffer.copy()
        found = torch.empty(buffer.nbytes, dtype=torch.uint8, device=self._device)
        return found.copy_(torch.from_numpy(buffer), non_blocking=True)

    def _finished(self, drawn: Drawn, number: int, item: Any) -> Any:
        """An item of a batch, after the transforms that workers leave to this process."""
        dataset, index = drawn.places[number]
        session, done = dataset.session, self._done[self._parts.index(dataset)]
        loops, split = session.runtime.loops, session.split()
        with naming(index, dataset.data[index]), loops.here() as loop:
            seed_transforms(loop.split(split).steps()[done:], drawn.seed, drawn.first + number, _HERE)
            return loops.after(split, item, done)


def _pickled(work: Work) -> bytes:
    try:
        return pickle.dumps(work)
    except Exception as e:
        raise ValueError(
            f"transforms_on='workers': {_culprit(work)} cannot be sent to another process: {e}. Pickle finds "
            "classes and functions at the top of a module, and no others"
        ) from e


def _culprit(work: Work) -> str:
    """The part of the work that cannot be pickled."""
    named = [
        (f"transform {i}, {type(transform).__name__},", transform)
        for part in work.parts for i, transform in enumerate(part.dataset.transform.flatten().transforms)
    ]  # fmt: skip
    named += [("collate_fn", work.collate), *(("the dataset's data", part.dataset.data) for part in work.parts)]
    for name, value in named:
        try:
            pickle.dumps(value)
        except Exception:
            return name
    return "the dataset"
