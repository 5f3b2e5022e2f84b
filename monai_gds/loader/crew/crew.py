"""The worker processes of a loader. They live as long as the loader, and every task of theirs can be done again.

    task ──▶ worker.py ──▶ answer, in the order in which the loader's thread asks for them

If one of them is killed, all are started once more, and the tasks that were under way are done again: a task depends on
its seed alone. If that happens again in the same epoch, the error is raised.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from monai_gds.base.questions import Answers
from monai_gds.base.stages import Measurements, Watch, enter
from monai_gds.base.workers import Workers
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.programmed import Programmed, Seed
from monai_gds.errors import WorkerDied
from monai_gds.loader.crew.sending import mark_of, pickled_work
from monai_gds.loader.crew.shared_memory import Arena, Arenas
from monai_gds.loader.crew.worker import BatchTask, ItemTask, Work, Worker
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


@dataclass(slots=True)
class Running:
    """A task that a worker does."""

    task: BatchTask | ItemTask
    answer: Future[tuple[Any, Measurements | None]]
    generation: int  # of the processes that were given it
    foreseen: bool = False  # whether it was ordered before its epoch began
    begun: Programmed | None = None  # the item, if it was made before its epoch began

    @property
    def has_program(self) -> bool:
        """Whether it is an item that has been recorded."""
        if not self.answer.done() or self.answer.exception() is not None:  # to raise it would make it hold its frames
            return False
        return getattr(self.answer.result()[0], "program", None) is not None


class Crew:
    """The processes, and the memory through which they send batches.

    Args:
        order: how many, and how they are started.
        work: what they do.
        idle: where they wait between epochs.

    Raises:
        ValueError: the work cannot be sent to processes that are not forked.
    """

    def __init__(self, order: Order, work: Work, idle: list[Crew]) -> None:
        self.order, self._idle = order, idle
        self.arenas = Arenas(order.most_bytes, order.ahead + order.waiting + _DELIVERED)
        self._process = os.getpid()
        self._work, self._mark = work, mark_of(work)
        self._splits: list[Split] | None = None
        self.is_warm = False  # whether this process has loaded what the first items need
        self._memory: Arena | None = None  # of work that is newer than the processes
        self._generation = 0
        self._lost = False  # whether one was killed in this epoch
        self._ahead: dict[tuple[int, int, Seed], Running] = {}  # items of the next epoch, as far as it is foreseen
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
        mark = mark_of(work)
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
        running = [replace(self.submit(task), foreseen=True) for task in tasks]
        self._ahead = {(t.part, t.number, t.seed): one for t, one in zip(tasks, running, strict=True)}
        return running

    def again(self, running: Running) -> None:
        """Has a task done once more."""
        once_more = self.submit(running.task)
        running.task, running.answer, running.generation = once_more.task, once_more.answer, once_more.generation
        running.foreseen = False

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
            if found is None:  # its error was raised before, and it is needed once more
                self.again(running)
                continue
            if measurements is not None and watch is not None:
                watch.add(measurements)
            return found

    def end_epoch(self, complete: bool) -> None:
        """Ends the processes, unless the epoch is complete: then they wait for the next one."""
        if complete:
            self._idle.append(self)
        else:
            self.close()

    def close(self) -> None:
        """Ends the processes at once, and removes what they leave half-written."""
        self._ahead = {}
        if self._process == os.getpid():
            self._workers.close()
            for part in self._work.parts:
                part.settings.tidy()

    def _give_up_guess(self) -> None:
        """Forgets what was foreseen and not taken. Workers do it all the same, since they have it in their queue."""
        if self._ahead:
            self._ahead, self.foresees = {}, False

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
