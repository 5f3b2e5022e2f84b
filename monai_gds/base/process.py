"""What belongs to one process, also after a fork, and ending with the parent.

Threads, locks, streams and pinned memory do not survive a fork. Whatever is shared within a process is made through
:class:`PerProcess`, and an object that holds such things notes its :class:`Owner`.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: How often a process checks that its parent is alive.
_WATCH_SECONDS = 1.0


class PerProcess(Generic[*Ts, T]):
    """A function whose results are made once per process: ``functools.cache`` that a fork empties.

    Any thread may call it. A forked child starts without results and makes its own on demand. The parent's results
    stay in the child's memory and are never finalised there: freeing a stream, for example, would call CUDA, which
    does not work in a forked child.
    """

    def __init__(self, make: Callable[[*Ts], T]) -> None:
        self._make = make
        self._results: dict[tuple[*Ts], T] = {}
        self._lock = threading.RLock()  # reentrant: the garbage collector may run code that calls this too
        _living.add(self)

    def __call__(self, *args: *Ts) -> T:
        try:
            return self._results[args]
        except KeyError:
            pass
        with self._lock:
            if args not in self._results:
                self._results.setdefault(args, self._make(*args))
            return self._results[args]

    def made(self, *args: *Ts) -> T | None:
        """The result for these arguments if this process has made it, else None."""
        return self._results.get(args)

    def forget(self) -> None:
        """Starts again in a forked child, without finalising any result."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._results))
        self._results, self._lock = {}, threading.RLock()


_living: weakref.WeakSet[PerProcess[*tuple[Any, ...], Any]] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for results in list(_living):
        results.forget()


os.register_at_fork(after_in_child=_forget_after_fork)


class Owner:
    """The process in which an object was made, and the only one that may use what the object holds."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    def is_this_process(self) -> bool:
        """False in a forked child that inherited the object."""
        return self._pid == os.getpid()


class Bell:
    """Wakes a thread that waits, or the next one that will. Ringing twice before that is ringing once.

    Unlike a ``threading.Event``, it holds no lock that a Ctrl-C could leave locked.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has been rung
            self._lock.release()

    def wait(self, timeout: float = -1) -> None:
        """Waits until it is rung, or for so many seconds."""
        self._lock.acquire(timeout=timeout)


class Changes(threading.Condition):
    """A condition whose lock is taken by ``with changes.lock:``.

    ``with`` on the condition itself calls a function of Python, and Ctrl-C at its end would leave the lock locked.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        super().__init__(self.lock)


def start_thread(thread: threading.Thread, timeout: float = -1) -> None:
    """Starts a thread. If Ctrl-C interrupts this call, the thread runs all the same, or will in a moment.

    ``Thread.start`` waits on a condition whose lock an interrupt can leave held. Then the thread would never run, and
    the interpreter would wait for it forever at exit. Interrupts reach only the main thread, so a bare thread makes the
    call. A ``timeout`` that is not negative is the most seconds to wait for it.

    Raises:
        BaseException: what ``Thread.start`` raises, such as RuntimeError where there can be no more threads.
    """
    refused: list[BaseException] = []
    started = Bell()

    def start() -> None:
        try:
            thread.start()
        except BaseException as e:
            refused.append(e)
        finally:
            started.ring()

    start_new_thread(start, ())
    started.wait(timeout)
    if refused:
        raise refused[0]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within the block Ctrl-C is noted. It is raised at the end.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed meanwhile.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:  # None: a handler in C
        yield
        return
    struck: list[Any] = []
    signal.signal(signal.SIGINT, lambda *signalled: struck.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if struck and callable(before):
        before(*struck[0])


def end_with_parent() -> None:
    """Ends this process within a second of its parent's end, however that ends.

    A thread watches. The kernel's own PR_SET_PDEATHSIG would not do: it follows the *thread* that started the process.
    If a fork server did, only the pipe from the true parent shows its end.
    """
    parents = os.getppid(), multiprocessing.parent_process()
    threading.Thread(target=_watch, args=parents, name="monai-gds-parent", daemon=True).start()


def _watch(parent: int, true_parent: BaseProcess | None) -> None:
    while os.getppid() == parent and (true_parent is None or true_parent.is_alive()):
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def print_past_bars() -> None:
    """In a forked process: sends output straight to the terminal, past the progress bar of rich that the parent shows.

    While rich shows a bar, ``sys.stderr`` is its proxy, which takes a lock that one of rich's threads may hold at the
    moment of the fork. The child lacks that thread, so its first line would wait for ever.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, getattr(stream, "rich_proxied_file", stream))
