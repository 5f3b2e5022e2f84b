"""Saving behind the training: one bounded queue of items a process, and a thread that publishes them.

Used by :class:`monai_gds.cache.directory.CacheDirectory`. The thread ends when the queue is empty and is started
again by the next item: so none is there for a fork to break, and the interpreter, which waits for it, never ends too
early.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter, deque
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

Publish: TypeAlias = Callable[[Key, EncodedItem], bool]


@dataclass(frozen=True, slots=True)
class _Job:
    path: str
    publish: Publish
    key: Key
    rest: EncodedItem  # without its tensors, which belong to the user
    names: tuple[str, ...]
    copies: Pending
    nbytes: int
    done: Callable[[], None] | None


class Writer:
    """Publishes items one after the other in a thread.

    Args:
        limit: bytes of items that may wait.
    """

    def __init__(self, limit: int = QUEUE_BYTES) -> None:
        self._limit = limit
        self._jobs: deque[_Job] = deque()
        self._unsaved: Counter[str] = Counter()
        self._bytes = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def submit(
        self, path: str, publish: Publish, key: Key, item: EncodedItem, done: Callable[[], None] | None = None
    ) -> None:
        """Takes copies of an item's tensors and queues them; waits while the queue is full.

        Args:
            path: where the record will be.
            publish: writes it; called by the thread, with an item whose tensors nobody else knows.
            key: the item's key.
            item: the item; may be changed when this returns.
            done: called after ``publish``, whatever became of it; not when this raises.

        Raises:
            BaseException: what ended the saving of an earlier item, if it was no error of the disk (those are warned
                of).
        """
        nbytes = sum(t.nbytes for t in item.tensors.values())
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes or self._bytes + nbytes <= self._limit)
            self._raise_error()
            self._bytes += nbytes
            self._unsaved[path] += 1
        try:
            copies = snapshot(list(item.tensors.values()))  # the tree and its packed arrays are copies already
            job = _Job(path, publish, key, replace(item, tensors={}), tuple(item.tensors), copies, nbytes, done)
        except BaseException:
            self._done(path, nbytes)
            raise
        self._start(job)

    def _start(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            if self._thread is not None:
                return
            self._thread = thread = threading.Thread(target=self._run, name="monai-gds-writer")
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            self._run()
        except BaseException:  # Ctrl-C: whether the thread runs is not known, and somebody may wait for the job
            self._run()
            raise

    def wait_for(self, path: str) -> None:
        """Waits until no item is waiting to be written to this path."""
        if path in self._unsaved:  # seen without the lock: usually there is none
            with self._changed:
                self._changed.wait_for(lambda: path not in self._unsaved)

    def flush(self) -> None:
        """Waits until everything submitted so far is written.

        Raises:
            BaseException: as by :meth:`submit`.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._unsaved)
            self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            try:
                tensors = dict(zip(job.names, job.copies.wait(), strict=True))
                job.publish(job.key, replace(job.rest, tensors=tensors))
                del tensors
            except BaseException as e:
                self._error = self._error or e
            if job.done is not None:
                job.done()
            path, nbytes = job.path, job.nbytes
            del job  # its bytes are free before somebody is told so
            self._done(path, nbytes)

    def _done(self, path: str, nbytes: int) -> None:
        with self._changed:
            self._bytes -= nbytes
            self._unsaved[path] -= 1
            if not self._unsaved[path]:
                del self._unsaved[path]
            self._changed.notify_all()


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
