"""Saves items in the background: one bounded queue per process, and a thread that publishes its items.

Used by :class:`monai_gds.folder.directory.CacheDirectory`. The thread ends when the queue is empty, and the next item
starts it again. So there is usually no thread when the process forks, and the interpreter, which waits for it, never
ends too early.

Ctrl-C may strike between any two operations of a caller, so callers hold no lock, and there is no count that an
interrupt could leave too high. The queue is a single dict: by one atomic operation each, an item enters it when it is
accepted and leaves it once it has been published. How much waits is computed from the dict. A caller that waits starts
the thread if none runs.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from torch import Tensor

from monai_gds import limits
from monai_gds.base import stages
from monai_gds.base.process import Bell, PerProcess, start_thread
from monai_gds.items.tree import EncodedItem
from monai_gds.keys.key import Key
from monai_gds.storage.snapshot import snapshot

#: Seconds until a waiting caller checks the queue without having been woken.
_LOOK_AGAIN = 1.0

Publish: TypeAlias = Callable[[Key, EncodedItem], bool]


@dataclass(frozen=True, slots=True, eq=False)
class _QueuedItem:
    path: str
    work: Callable[[], object]
    nbytes: int
    done: Callable[[], object] | None = None


class Writer:
    """Publishes items one after the other in a thread.

    Args:
        limit: bytes of items that may wait. Each thread that submits concurrently may exceed it by one item.
    """

    def __init__(self, limit: int = limits.QUEUE_BYTES) -> None:
        self._limit = limit
        self._queue: dict[str, _QueuedItem] = {}  # by path, in the order of publishing
        self._turns: dict[object, None] = {}  # of the threads that want to publish; the first one does
        self._bells: deque[Bell] = deque()  # of waiting callers, rung after each item
        self._error: BaseException | None = None

    def submit(
        self, path: str, publish: Publish, key: Key, item: EncodedItem, done: Callable[[], object] | None = None
    ) -> None:
        """Copies an item's tensors and queues the item, which may then be changed. Waits while the queue is full.

        An item whose path is already queued is not queued again, since equal paths mean equal keys and equal records.

        Args:
            path: where the record will be.
            publish: writes it; called by the thread with an item that owns its tensors. After an interrupt it may be
                called again.
            key: the item's key.
            item: the item.
            done: called once publishing has ended in any way, also if this method raises. After an interrupt it may be
                called twice.

        Raises:
            BaseException: what stopped the saving of an earlier item, except disk errors, which are only warned of.
        """
        job, accepted = None, False
        try:
            nbytes = sum(t.nbytes for t in item.tensors.values())
            self._wait(lambda: self._has_room(nbytes))
            self._raise_error()
            if path not in self._queue:
                copies = snapshot(list(item.tensors.values()))  # tree and packed arrays already are copies
                rest = replace(item, tensors={})  # these belong to the user
                job = _QueuedItem(path, partial(_write, publish, key, rest, tuple(item.tensors), copies), nbytes, done)
                accepted = self._queue.setdefault(path, job) is job
            self._start()
        finally:
            if done is not None and not accepted and (job is None or self._queue.get(path) is not job):
                done()

    def offer(self, name: str, work: Callable[[], object], nbytes: int) -> None:
        """Queues optional work. Drops it if the queue is full, or has work of this name. Never waits.

        Args:
            name: what the work is called.
            work: called by the thread. Its errors are raised as by :meth:`submit`.
            nbytes: how much it will write.
        """
        if name not in self._queue and self._has_room(nbytes):
            self._queue.setdefault(name, _QueuedItem(name, work, nbytes))
            self._start()

    def wait_for(self, path: str) -> None:
        """Waits until no item is queued for this path."""
        if path in self._queue:  # rarely, and this runs at every hit
            self._wait(lambda: path not in self._queue)

    def flush(self) -> None:
        """Waits until everything submitted so far is written. Raises as :meth:`submit`."""
        self.settle()
        self._raise_error()

    def settle(self, seconds: float = math.inf, nbytes: float = math.inf) -> None:
        """As :meth:`flush`, but no longer than so many seconds, and not for more bytes than these.

        Errors are left to whoever comes next.
        """
        waiting = list(self._queue.values())
        if waiting and sum(job.nbytes for job in waiting) <= nbytes:
            last = waiting.pop()
            del waiting  # else all items would stay in memory until the last one is written
            self._wait(lambda: self._queue.get(last.path) is not last, seconds)

    def _has_room(self, nbytes: int) -> bool:
        waiting = list(self._queue.values())
        room = len(waiting) < limits.QUEUE_ITEMS and sum(job.nbytes for job in waiting) + nbytes <= self._limit
        return room or not waiting

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait(self, until: Callable[[], bool], seconds: float = math.inf) -> None:
        end = time.monotonic() + seconds
        while not until() and (left := end - time.monotonic()) > 0:
            self._start()
            bell = Bell()
            self._bells.append(bell)
            if not until():  # it may have rung before the bell was there
                bell.wait(min(left, _LOOK_AGAIN))

    # Publishing

    def _start(self) -> None:
        """Starts the thread unless it runs. If no thread can be started, the caller publishes what waits."""
        if self._turns or not self._queue:
            return
        thread = threading.Thread(target=self._work, args=(True,), name="monai-gds-writer", daemon=False)
        try:
            start_thread(thread, _LOOK_AGAIN)
        except Exception:  # no more threads, or the interpreter is ending
            self._work(False)

    def _work(self, own_thread: bool) -> None:
        """Publishes what waits, unless another thread does.

        A caller that submits meanwhile starts no thread, so the queue is checked again after the turn is given back.
        """
        turn = object()
        while self._queue and not self._turns:
            try:
                try:
                    self._turns[turn] = None
                    if list(self._turns)[0] is turn:  # noqa: RUF015 (other threads change the dict; list() copies it atomically)
                        for path in list(self._queue):
                            self._publish(path, own_thread)
                            while self._bells:
                                self._bells.popleft().ring()
                finally:
                    self._turns.pop(turn, None)
            finally:  # Ctrl-C may have struck before the line above if the caller publishes
                self._turns.pop(turn, None)

    def _publish(self, path: str, own_thread: bool) -> None:
        """Publishes an item and removes it from the queue. Its memory is free when this returns."""
        job = self._queue[path]
        self._keep_error(own_thread, job.work)
        if job.done is not None:
            self._keep_error(own_thread, job.done)
        self._queue.pop(path, None)

    def _keep_error(self, own_thread: bool, step: Callable[[], object]) -> None:
        try:
            step()
        except BaseException as e:
            if not own_thread and not isinstance(e, Exception):  # Ctrl-C: the item stays in the queue
                raise
            self._error = self._error or e


def _write(
    publish: Publish, key: Key, rest: EncodedItem, names: tuple[str, ...], copies: Callable[[], list[Tensor]]
) -> None:
    began = time.perf_counter()
    publish(key, replace(rest, tensors=dict(zip(names, copies(), strict=True))))
    stages.saved(time.perf_counter() - began)


#: Returns the process's only writer, so that the queue is bounded however many datasets there are. A forked child has
#: its own; items that its parent queued are the parent's to write.
process_writer: PerProcess[Writer] = PerProcess(Writer)


@atexit.register  # the interpreter has already waited for the thread, unless an item was submitted afterwards
def _finish() -> None:
    process_writer().flush()
