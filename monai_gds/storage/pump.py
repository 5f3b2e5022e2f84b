"""The loop in front of a queue: one thread that works on all submissions. For :mod:`.queue`.

There is one thread because several would spend their time passing the interpreter's lock around: measured on an H100,
batches of four 74 MB records arrived at 20 GB/s with four threads and at 40 with one.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from monai_gds.base.process import Changes
from monai_gds.storage import staging

__all__ = ["Pump"]

J = TypeVar("J")

#: Seconds for which an idle pump waits for another job before it leaves its thread. Waking a thread that waits here
#: costs less than handing it a task.
LINGER = 0.02


class Pump(ABC, Generic[J]):
    """Works on jobs until none is left: feeds them, first come first served, then polls, and so on.

    A job is whatever a subclass makes of one submission; the subclass calls :meth:`finished` when it is complete.
    ``feed``, ``poll``, ``give_up`` and ``idle`` run in the pump's thread, with the copy stream as the current stream.
    Where no thread can be started, the caller of :meth:`submit` does the work in its own.

    Args:
        name: the backend's, for the thread.
        device: the target device of the storage.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.device = device
        self._name = name
        self._changed = Changes()
        self._incoming: deque[J] = deque()
        self._jobs: list[J] = []  # touched only by the thread at work
        self._worker: int | None = None  # identifier of that thread; None while no thread is at work
        self._naps = 0
        self._executor: ThreadPoolExecutor | None = None

    @abstractmethod
    def feed(self, job: J) -> bool:
        """Issues commands of a job. Returns False when there was no room for all of them."""

    @abstractmethod
    def poll(self) -> bool:
        """Handles completed commands. Returns whether there were any; if not, the pump sleeps for a moment.

        It may wait for the first command in flight to complete.
        """

    @abstractmethod
    def give_up(self, jobs: list[J], error: Exception) -> None:
        """Ends jobs after an error that ``feed`` or ``poll`` raised. It is not known then what is in flight."""

    def idle(self) -> None:
        """Called when no job is left, before the pump waits for more."""

    def submit(self, job: J) -> None:
        """Adds a job.

        Raises:
            RuntimeError: called in the pump's own thread, by a step of :meth:`Pending.then`: it would wait for itself.
        """
        with self._changed.lock:
            if self._worker == threading.get_ident():
                raise RuntimeError(
                    "a step given to Pending.then runs in the thread that reads, so it cannot read from the same "
                    "storage: wait for the reads first, or open another storage for the step"
                )
            self._incoming.append(job)
            if self._worker is not None:
                self._changed.notify_all()
                return
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"monai-gds-{self._name}")
            try:
                self._executor.submit(self._work, self._executor)
                return
            except RuntimeError:  # the process is ending, or may start no more threads
                pass
        self._work()

    def finished(self, job: J) -> None:
        """Removes a complete job, which is not fed any more."""
        self._jobs.remove(job)

    def close(self) -> None:
        """Waits until no job is left, and ends the thread. The pump may be used again afterwards."""
        with self._changed.lock:
            executor, self._executor = self._executor, None
            self._changed.notify_all()
        if executor is not None:
            executor.shutdown(wait=True)
        with self._changed.lock:
            self._changed.wait_for(lambda: self._worker is None)  # in a caller's thread
        self._work()  # on a job whose caller was interrupted before it could hand it over

    def _work(self, executor: ThreadPoolExecutor | None = None) -> None:
        """Works until no job is left, unless another thread is at work."""
        with self._changed.lock:
            if self._worker is not None:
                return
            self._worker = threading.get_ident()
        interrupt: BaseException | None = None
        while True:
            try:
                with staging.on_copy_stream(self.device):
                    while self._take(executor):
                        self._step()
                break
            except Exception as e:
                self._end_all(e)
                break
            except BaseException as e:  # Ctrl-C in a caller's thread: commands in flight must still arrive
                interrupt = e
        if interrupt is not None:
            raise interrupt

    def _take(self, executor: ThreadPoolExecutor | None) -> bool:
        """Takes incoming jobs. Returns False if there is no job, and then no thread is at work any more."""
        if self._jobs and not self._incoming:
            return True
        if not self._jobs:
            self.idle()
        with self._changed.lock:
            if not self._jobs and executor is not None:  # close() takes the executor away
                self._changed.wait_for(lambda: self._incoming or self._executor is not executor, LINGER)
            self._jobs += self._incoming
            self._incoming.clear()
            if not self._jobs:
                self._stop_working()
            return bool(self._jobs)

    def _stop_working(self) -> None:
        self._worker = None
        self._changed.notify_all()

    def _step(self) -> None:
        for job in list(self._jobs):
            if not self.feed(job):
                break
        if not self._jobs or self.poll():
            self._naps = 0
            return
        self._naps += 1
        if self._naps > 3:  # other processes may take long before they give the processor back
            time.sleep(0 if self._naps < 20 else 50e-6)

    def _end_all(self, error: Exception) -> None:
        while True:
            with self._changed.lock:
                jobs, self._jobs = [*self._jobs, *self._incoming], []
                self._incoming.clear()
                if not jobs:
                    self._stop_working()
                    return
            self.give_up(jobs, error)
