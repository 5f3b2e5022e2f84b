"""The worker processes of a loader. They live as long as the loader, and every task of theirs can be done again.

    task ──▶ worker.py ──▶ answer, in the order in which the loader's thread asks for them

If one of them is killed, all are started once more, and the tasks that were under way are done again: a task depends on
its seed alone. If that happens again in the same epoch, the error is raised.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch

from monai_gds.base.questions import Answers
from monai_gds.base.stages import Measurements, Watch, enter
from monai_gds.base.workers import Workers
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.programmed import Programmed, Seed
from monai_gds.errors import WorkerDied
from monai_gds.loader.shared_memory import Arena, Arenas
from monai_gds.loader.worker import BatchTask, Guess, ItemTask, Work, Worker
from monai_gds.pipeline.randomness import is_generator
from monai_gds.pipeline.split import Split
from monai_gds.programs.replay import answered

#: Arenas beyond those of the batches that are under way or wait: one is being unpacked, the consumer has one or two.
_DELIVERED = 3


class Order(NamedTuple):
    """What processes are started for."""

    num_workers: int
    context: Any
    ahead: int  # how many batches may be under way
    waiting: int  # how many finished ones may wait for the consumer
    most_bytes: int  # of shared memory


class Drawn(NamedTuple):
    """A batch that is to be made."""

    places: Sequence[tuple[GDSDataset, int]]  # the dataset and index of each item
    seed: int  # of the epoch
    first: int  # position in the epoch of its first item

    @property
    def seeds(self) -> list[Seed]:
        """What the generators are seeded with for each item."""
        return [(self.seed, self.first + i) for i in range(len(self.places))]


def with_seed(
    generator: torch.Generator | None, draw: Callable[[], Iterator[Sequence[tuple[GDSDataset, int]]]], rank: int
) -> Iterator[Drawn]:
    """The batches of an epoch, whose seed is what torch's loader is about to draw for its workers, and the rank."""
    ahead = (generator or torch.default_generator).clone_state()
    return numbered(draw(), int(torch.empty((), dtype=torch.int64).random_(generator=ahead)), rank)


def numbered(batches: Iterator[Sequence[tuple[GDSDataset, int]]], seed: int, rank: int) -> Iterator[Drawn]:
    """Batches with the positions of their items in the epoch.

    Ranks among which a sampler divides the items draw other numbers from the same seed. All others, such as those of a
    tensor-parallel group, draw the same.
    """
    if rank:
        seed = int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint64)[0]) >> 1
    first = 0
    for places in batches:
        yield Drawn(places, seed, first)
        first += len(places)


@dataclass(slots=True)
class Running:
    """A task that a worker does."""

    task: BatchTask | ItemTask
    answer: Future[tuple[Any, Measurements | None]]
    generation: int  # of the processes that were given it
    begun: Programmed | None = None  # the item, if it was made before its epoch began

    @property
    def foreseen(self) -> bool:
        """Whether it was ordered before its epoch began."""
        return isinstance(self.task, ItemTask) and self.task.guess is not None

    @property
    def is_done(self) -> bool:
        """Whether its result can be had without waiting."""
        return self.answer.done()

    @property
    def has_program(self) -> bool:
        """Whether it is an item that has been recorded."""
        if not self.is_done or self.answer.exception() is not None:  # to raise it would make it hold its frames
            return False
        return getattr(self.answer.result()[0], "program", None) is not None


class Crew:
    """The processes, and the memory through which they send batches.

    Args:
        order: how many, and how they are started.
        work: what they do.

    Raises:
        ValueError: the work cannot be sent to processes that are not forked.
    """

    def __init__(self, order: Order, work: Work) -> None:
        self.order = order
        self.arenas = Arenas(order.most_bytes, order.ahead + order.waiting + _DELIVERED)
        self._process = os.getpid()
        self._work, self._mark = work, _mark(work)
        self._splits: list[Split] | None = None
        self.is_warm = False  # whether this process has loaded what the first items need
        self._memory: Arena | None = None  # of work that is newer than the processes
        self._generation = 0
        self._lost = False  # whether one was killed in this epoch
        self._ahead: dict[tuple[int, int, Seed], Running] = {}  # items of the next epoch, as far as it is foreseen
        self._guesses = 0  # how often it was
        self._wrong: Arena | None = None  # the number of the last guess that was wrong
        self.foresees = True  # whether the last guess was right
        #: Where answers of this epoch are told, and that its loop was left. Another epoch has another one.
        self.news: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._answers: Answers | None = None
        self._workers = self._start()

    @property
    def address(self) -> str:
        """Where workers ask for numbers that the target computes."""
        if self._answers is None:
            self._answers = Answers(partial(answered, device=self._work.target))
        return self._answers.address

    def begin(self, order: Order, work: Work) -> bool:
        """Begins another epoch. Returns False if these processes cannot do its work."""
        mark = _mark(work)
        if self.order != order or mark is None or self._workers.broken or self._process != os.getpid():
            return False
        self._lost, self.news = False, queue.SimpleQueue()
        if mark != self._mark:
            try:
                pickled = pickled_work(work)
            except ValueError:  # forked processes have it without that
                return False
            self._give_up_guess()
            self._splits = self._answers = None
            self._work, self._mark = work, mark
            self._memory = Arena(len(pickled))
            self._memory.memory[:] = bytearray(pickled)
        return True

    def splits(self, parts: Iterable[GDSDataset]) -> list[Split]:
        """The pipelines, whose random halves are the loader's own: it seeds them. They are copied when they change."""
        if self._splits is None:
            self._splits = [part.session.split().copied() for part in parts]
        return self._splits

    def submit(self, task: BatchTask | ItemTask) -> Running:
        """Has a task done."""
        task = task._replace(work=None if self._memory is None else self._memory.place)
        return Running(task, self._workers.submit(task), self._generation)

    def take(self, task: ItemTask) -> Running:
        """Has an item drawn, unless it is already. If another one was foreseen, those are given up."""
        running = self._ahead.pop((task.part, task.number, task.seed), None)
        if running is None:
            self._give_up_guess()
            return self.submit(task)
        self.foresees = True
        return running

    def go_on(self, tasks: Sequence[ItemTask]) -> list[Running]:
        """Has items drawn that the next epoch will order, if it is the one that is foreseen."""
        self._wrong = self._wrong or Arena(8)
        self._guesses += 1
        guess = Guess(self._guesses, self._wrong.place)
        running = [self.submit(task._replace(guess=guess)) for task in tasks]
        self._ahead = {(t.part, t.number, t.seed): one for t, one in zip(tasks, running, strict=True)}
        return running

    def again(self, running: Running) -> None:
        """Has a task done once more."""
        task = running.task
        if isinstance(task, ItemTask):
            task = task._replace(guess=None)
        once_more = self.submit(task)
        running.task, running.answer, running.generation = once_more.task, once_more.answer, once_more.generation

    def result(self, running: Running, watch: Watch | None) -> Any:
        """What a task gave; None if the loop was left meanwhile. Raises what the task raised, or WorkerDied."""
        enter("waiting for workers")
        while True:
            if not running.answer.done():
                running.answer.add_done_callback(partial(_tell, self.news))
                while not running.answer.done():
                    if self.news.get() is None:
                        return None
            try:
                found, measurements = running.answer.result()
            except WorkerDied:
                if running.generation == self._generation:
                    if self._lost:
                        raise
                    self._replace()
                self.again(running)
                continue
            except Exception:  # whose frames hold the task: it must not hold the error, and is done again if need be
                running.answer = Future()
                running.answer.set_result((None, None))
                raise
            if found is None:  # it was foreseen, taken, and given up with those that were not
                self.again(running)
                continue
            if measurements is not None and watch is not None:
                watch.add(measurements)
            return found

    def close(self) -> None:
        """Ends the processes at once, and removes what they leave half-written."""
        self._ahead = {}
        if self._process == os.getpid():
            self._workers.close()
            for part in self._work.parts:
                part.settings.tidy()

    def _give_up_guess(self) -> None:
        """Has workers leave out what was foreseen and they have not begun. They have it in their queue already."""
        if self._ahead:
            self._ahead, self.foresees = {}, False
            if self._wrong is not None:
                self._wrong.memory[:] = list(self._guesses.to_bytes(8, "little"))

    def _replace(self) -> None:
        self._lost = True
        self._workers.close()
        self._memory = None
        self._workers = self._start()
        self._generation += 1

    def _start(self) -> Workers[Any]:
        context = self.order.context
        # By name, or a fork server would not import what they need. torch's loader forks too: children never use CUDA.
        kind = context if isinstance(context, str) else context.get_start_method() if context else "fork"
        work = self._work if kind == "fork" else pickled_work(self._work)
        return Workers(Worker(work), self.order.num_workers, kind)


def _tell(news: queue.SimpleQueue[object], answer: object) -> None:
    news.put(True)  # not the answer: the loader that has the news is in the frames of its error


# ---------------------------------------------------------------------------------------------------------------------
# Sending work


def pickled_work(work: Work) -> bytes:
    """The work, pickled; by cloudpickle where it is installed and pickle cannot.

    Raises:
        ValueError: something in it cannot be sent to another process. The message names it.
    """
    try:
        return _dumps(work)
    except Exception as e:
        raise ValueError(
            f"{_culprit(work)} cannot be sent to another process: {e}. Pickle finds classes and functions at the top "
            "of a module, and no others: define it there, or install cloudpickle"
        ) from e


def _dumps(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:
        if not find_spec("cloudpickle"):
            raise
    found: bytes = import_module("cloudpickle").dumps(value)
    return found


def _culprit(work: Work) -> str:
    """The part of the work that cannot be pickled."""
    named = [
        (f"transform {i}, {type(transform).__name__},", transform)
        for part in work.parts for i, transform in enumerate(part.dataset.transform.flatten().transforms)
    ]  # fmt: skip
    named += [("collate_fn", work.collate), *(("the dataset's data", part.dataset.data) for part in work.parts)]
    for name, value in named:
        try:
            _dumps(value)
        except Exception:
            return name
    return "the dataset"


def _mark(work: Work) -> bytes | None:
    """A digest that differs if the work does, but for the states of generators; None if there is none."""
    digest = _Digest()
    try:
        _Marker(digest).dump(work)
    except Exception:
        return None
    return digest.of.digest()


class _Digest:
    """A file of which only the digest is kept: data in memory may be large."""

    def __init__(self) -> None:
        self.of = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.of.update(data)
        return len(data)


class _Marker(pickle.Pickler):
    """Leaves out random states, which are seeded for every item, and takes functions that cannot be pickled apart."""

    def reducer_override(self, value: Any) -> Any:
        if is_generator(value):
            return str, (type(value).__name__,)
        if isinstance(value, FunctionType) and "<" in value.__qualname__:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return tuple, ((value.__code__, value.__defaults__, cells),)
        if isinstance(value, CodeType):
            return tuple, ((value.co_code, value.co_consts, value.co_names),)
        return NotImplemented
