"""Processes, or threads where there can be none, that run a function for many arguments.

Used for filling a cache before training, and by the loader for computing items beside the training.
It knows nothing of datasets: the function it is given carries what it needs.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, Generic, TypeVar

import torch

from monai_gds.errors import WorkerDied

__all__ = ["Workers"]

_log = logging.getLogger("monai_gds")

T = TypeVar("T")

#: How often a worker looks whether its parent still lives. The end of the parent's orders it notices at once.
_WATCH_SECONDS = 1.0


class Workers(Generic[T]):
    """Runs ``work(argument)`` in other processes.

    They are forked while CUDA is not initialised here, else spawned; where ``work`` cannot be sent to a spawned
    process, they are threads of this one, with a warning. They start at once, run torch on one thread each, ignore
    Ctrl-C (the parent decides), and end when the parent does, however it ends.

    Args:
        work: what is run. Forked workers inherit it, spawned ones get it by pickle, threads share it.
        num_workers: how many; at least one.
        context: a start method (``"fork"``, ``"spawn"``, ``"forkserver"``) or a multiprocessing context; None chooses.

    Attributes:
        kind: the start method, or ``"threads"``.

    Raises:
        ValueError: ``num_workers`` is not positive, there is no such start method, or one was named and ``work`` cannot
            be sent to such a process.
        WorkerDied: a spawned worker ended while it started.

    Example:
        >>> with Workers(abs, 2) as workers:
        ...     [future.result() for future in map(workers.submit, (-1, -2, 3))]
        [1, 2, 3]
    """

    def __init__(self, work: Callable[[Any], T], num_workers: int, context: str | BaseContext | None = None) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: at least one is needed")
        self._running: set[Future[T]] = set()
        self._orders: Connection | None = None
        self._executor: Executor
        self._work: Callable[[Any], T] = work
        self.kind = "threads"
        chosen, why = _choose(context)
        problem = why if chosen is None else self._start_processes(work, num_workers, chosen)
        if not problem:
            _log.info("%d worker processes by %s (%s)", num_workers, self.kind, why)
            return
        if context is not None:
            raise ValueError(f"multiprocessing_context={context!r} cannot be used: {problem}")
        warnings.warn(f"{num_workers} threads do the work of processes: {problem}", stacklevel=3)
        self.kind = "threads"
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="monai-gds-worker")
        self._work = work

    def _start_processes(self, work: Callable[[Any], T], num_workers: int, context: BaseContext) -> str:
        """Starts them, or says why ``work`` cannot be sent to them."""
        self.kind = context.get_start_method()
        self._work = _run
        sent: Any = work
        if self.kind != "fork":
            try:
                sent = pickle.dumps(work)
            except Exception as e:
                return f"what they would run cannot be pickled: {e}"
        told, self._orders = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin, initargs=(sent, told))
        try:
            first = self._executor.submit(_problem_of_this_one)  # forked ones all start here
            problem = "" if self.kind == "fork" else first.result()
        except BaseException as e:
            self.close(grace=0)
            if isinstance(e, BrokenProcessPool):
                raise WorkerDied(
                    f"a process started by {self.kind} ended before it began: the script that starts it must be a "
                    "file, and do so behind `if __name__ == '__main__':`"
                ) from e
            raise
        if problem:
            self.close(grace=0)
        return problem

    def submit(self, argument: Any) -> Future[T]:
        """Has ``work(argument)`` run.

        Returns:
            A future of what it returns. It raises what ``work`` raised, with the worker's traceback as its cause, or
            WorkerDied when the worker was killed.
        """
        outer: Future[T] = Future()
        outer.set_running_or_notify_cancel()
        try:
            inner = self._executor.submit(self._work, argument)
        except BrokenProcessPool as e:
            outer.set_exception(_died(e))
            return outer
        self._running.add(inner)
        inner.add_done_callback(partial(self._settle, argument, outer))
        return outer

    def _settle(self, argument: Any, outer: Future[T], inner: Future[T]) -> None:
        self._running.discard(inner)
        if inner.cancelled():
            outer.set_exception(WorkerDied(f"the workers were closed before they came to {argument!r}"))
            return
        error = inner.exception()
        if error is None:
            outer.set_result(inner.result())
        else:
            outer.set_exception(_died(error) if isinstance(error, BrokenProcessPool) else error)

    def close(self, grace: float = 5.0) -> None:
        """Ends the workers: what has not begun is dropped, what has begun gets ``grace`` seconds to end.

        Threads cannot be ended: what they have begun they finish.
        """
        for future in list(self._running):
            future.cancel()
        wait(list(self._running), timeout=grace)
        if self._orders is None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            return
        if self._running:
            self._orders.send_bytes(b"end")  # each of them sees it, and none takes it away
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._orders.close()
        self._orders = None

    def __enter__(self) -> Workers[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(5.0 if kind is None else 0.0)


def _choose(context: str | BaseContext | None) -> tuple[BaseContext | None, str]:
    """The context to start processes with, and why; None where this process may have no children."""
    if isinstance(context, BaseContext):
        return context, "asked for"
    if context is not None:
        return multiprocessing.get_context(context), "asked for"
    if multiprocessing.current_process().daemon:
        return None, "this process is itself a worker (daemonic), which may start none"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return multiprocessing.get_context("spawn"), "CUDA is initialised, and does not survive a fork"
    return multiprocessing.get_context("fork"), "CUDA is not initialised"


def _died(error: BaseException) -> WorkerDied:
    died = WorkerDied(
        "a worker process was killed: by a signal, by the system when memory ran out, or by a crash in a library"
    )
    died.__cause__ = error
    return died


# What follows runs in the workers.

_work: Callable[[Any], Any]
_problem = ""


def _begin(work: Any, orders: Connection) -> None:
    global _work, _problem
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # the others' threads are enough; and a pool of OpenMP's does not survive a fork
    threading.Thread(target=_watch, args=(orders, os.getppid()), daemon=True).start()
    if isinstance(work, bytes):
        try:
            work = pickle.loads(work)
        except Exception as e:
            _problem = f"what they would run cannot be unpickled in another process: {e}"
    _work = work


def _watch(orders: Connection, parent: int) -> None:
    """Ends this process when it is told to, or when its parent is gone: nothing else would tell it."""
    while not orders.poll(_WATCH_SECONDS):
        if os.getppid() != parent:
            break
    os._exit(1)


def _problem_of_this_one() -> str:
    return _problem


def _run(argument: Any) -> Any:
    try:
        return _work(argument)
    except Exception as e:
        raise _portable(e) from e.__cause__


def _notes(error: Exception) -> list[str]:
    return getattr(error, "__notes__", [])


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same where it would not survive the way to the parent."""
    try:
        again = pickle.loads(pickle.dumps(error))
        if str(again) == str(error) and _notes(again) == _notes(error):
            return error
    except Exception:
        pass
    return RuntimeError("".join(traceback.format_exception(error)))
