"""Saving behind the training: one bounded queue of items a process, and a thread that publishes them.

Used by :class:`monai_gds.cache.directory.CacheDirectory`. The thread ends when the queue is empty and is started again
by the next item: so none is there for a fork to break, and the interpreter, which waits for it, never ends too early.

Ctrl-C may strike between any two operations of a caller, so no caller holds a lock, and nothing is counted that an
interrupt could leave too high. The queue is one dict: an item is in it, by one atomic operation, from when it is
accepted until its publishing has ended, and everything else (what waits, how many bytes) is read off it. Whoever waits
starts a thread where none runs.
"""

from __future__ import annotations

import atexit
import os
import threading
from _thread import LockType, allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from monai_gds.cache.key import Key
from monai_gds.cache.tree import EncodedItem
from monai_gds.storage import Pending
from monai_gds.storage.snapshot import snapshot

__all__ = ["QUEUE_BYTES", "Writer", "process_writer"]

#: Bytes of items that may wait to be written. One item is let in whatever its size.
QUEUE_BYTES = 256 << 20

#: Items that may wait, however small: their bytes are added up whenever another comes, which takes 0.1 ms for so many.
_QUEUE_ITEMS = 4096

#: Seconds until somebody who waits looks by himself whether the queue has moved.
_LOOK_AGAIN = 1.0

Publish: TypeAlias = Callable[[Key, EncodedItem], bool]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    path: str
    publish: Publish
    key: Key
    rest: EncodedItem  # without its tensors, which belong to the user
    names: tuple[str, ...]
    copies: Pending
    nbytes: int
    done: Callable[[], object] | None


class Writer:
    """Publishes items one after the other in a thread.

    Args:
        limit: bytes of items that may wait. Each thread that submits at the same time may exceed it by one item.
    """

    def __init__(self, limit: int = QUEUE_BYTES) -> None:
        self._limit = limit
        self._jobs: dict[str, _Job] = {}  # by path, in the order in which they are published
        self._turns: dict[object, None] = {}  # of whoever is publishing, or wants to: the first one does
        self._bells: deque[LockType] = deque()  # of those who wait, released when a job is done
        self._error: BaseException | None = None

    def submit(
        self, path: str, publish: Publish, key: Key, item: EncodedItem, done: Callable[[], object] | None = None
    ) -> None:
        """Takes copies of an item's tensors and queues them; waits while the queue is full.

        An item whose path is in the queue already is not queued again: equal paths are equal keys, thus equal records.

        Args:
            path: where the record will be.
            publish: writes it; called by the thread, with an item whose tensors nobody else has. After an interrupt it
                may be called again.
            key: the item's key.
            item: the item; may be changed when this returns.
            done: called when nothing more will be published, whatever happened, also if this raises; after an
                interrupt perhaps twice.

        Raises:
            BaseException: what ended the saving of an earlier item, other than an error of the disk (those are warned
                of).
        """
        job, accepted = None, False
        try:
            nbytes = sum(t.nbytes for t in item.tensors.values())
            self._wait(lambda: self._has_room(nbytes))
            self._raise_error()
            if path not in self._jobs:
                copies = snapshot(list(item.tensors.values()))  # the tree and its packed arrays are copies already
                job = _Job(path, publish, key, replace(item, tensors={}), tuple(item.tensors), copies, nbytes, done)
                accepted = self._jobs.setdefault(path, job) is job
            self._start()
        finally:
            if done is not None and not accepted and (job is None or self._jobs.get(path) is not job):
                done()

    def wait_for(self, path: str) -> None:
        """Waits until no item is waiting to be written to this path."""
        if path in self._jobs:  # usually it is not, and this runs at every hit
            self._wait(lambda: path not in self._jobs)

    def flush(self) -> None:
        """Waits until everything submitted so far is written.

        Raises:
            BaseException: as by :meth:`submit`.
        """
        waiting = list(self._jobs.values())
        if waiting:
            last = waiting.pop()
            del waiting  # or nobody's memory would be free before the last one is written
            self._wait(lambda: self._jobs.get(last.path) is not last)
        self._raise_error()

    def _has_room(self, nbytes: int) -> bool:
        waiting = list(self._jobs.values())
        if not waiting:
            return True
        return len(waiting) < _QUEUE_ITEMS and sum(job.nbytes for job in waiting) + nbytes <= self._limit

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait(self, until: Callable[[], bool]) -> None:
        while not until():
            self._start()
            bell = allocate_lock()
            bell.acquire()
            self._bells.append(bell)
            if not until():  # else whoever changed that may have rung before the bell was there
                bell.acquire(timeout=_LOOK_AGAIN)

    # Publishing

    def _start(self) -> None:
        """Sees to it that somebody publishes what waits: a thread, or the caller where no thread can be started.

        ``Thread.start`` waits on a condition, whose lock an interrupt can leave held: the thread would never run, and
        the interpreter would wait for it at its end for ever. Interrupts reach only the main thread, so a bare thread
        calls it.
        """
        if self._turns or not self._jobs:
            return
        refused: list[BaseException] = []
        started = allocate_lock()
        started.acquire()

        def start() -> None:
            try:
                threading.Thread(target=self._work, args=(True,), name="monai-gds-writer", daemon=False).start()
            except BaseException as e:
                refused.append(e)
            finally:
                started.release()

        try:
            start_new_thread(start, ())
            started.acquire(timeout=_LOOK_AGAIN)
        except RuntimeError as e:
            refused.append(e)
        if refused and not isinstance(refused[0], Exception):
            raise refused[0]
        if refused:  # no more threads, or the interpreter is ending
            self._work(False)

    def _work(self, own_thread: bool) -> None:
        """Publishes what waits, unless somebody does so already.

        Whoever submits sees that somebody has a turn and starts no thread; so whoever gives a turn back looks at the
        queue once more.
        """
        turn = object()
        while self._jobs and not self._turns:
            try:
                try:
                    self._turns[turn] = None
                    if list(self._turns)[0] is turn:  # noqa: RUF015 (others change the dict; list() takes it whole)
                        for path in list(self._jobs):
                            self._publish(path, own_thread)
                            self._ring()
                finally:
                    self._turns.pop(turn, None)
            finally:  # Ctrl-C, with the caller publishing, may have come before the line above
                self._turns.pop(turn, None)

    def _publish(self, path: str, own_thread: bool) -> None:
        """Publishes a job and takes it out of the queue. Its bytes are free when this returns."""
        job = self._jobs[path]
        self._keep_error(own_thread, lambda: self._write(job))
        if job.done is not None:
            self._keep_error(own_thread, job.done)
        self._jobs.pop(path, None)

    @staticmethod
    def _write(job: _Job) -> None:
        tensors = dict(zip(job.names, job.copies.wait(), strict=True))
        job.publish(job.key, replace(job.rest, tensors=tensors))

    def _keep_error(self, own_thread: bool, step: Callable[[], object]) -> None:
        try:
            step()
        except BaseException as e:
            if not own_thread and not isinstance(e, Exception):  # Ctrl-C: the job stays in the queue
                raise
            self._error = self._error or e

    def _ring(self) -> None:
        while self._bells:
            self._bells.popleft().release()


_writer = Writer()


def process_writer() -> Writer:
    """The process's one writer: what waits to be saved is bounded however many datasets there are."""
    return _writer


@atexit.register  # the interpreter has waited for the thread by now, unless something was submitted afterwards
def _finish() -> None:
    _writer.flush()


def _forget_after_fork() -> None:
    """What the parent had queued is the parent's to write."""
    global _writer
    _writer = Writer()


os.register_at_fork(after_in_child=_forget_after_fork)
