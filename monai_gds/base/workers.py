"""Processes that run one function for many arguments, or threads where processes cannot be started."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool, _RemoteTraceback
from contextlib import contextmanager, suppress
from functools import partial
from mmap import PROT_READ, mmap
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from multiprocessing.util import Finalize
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from monai_gds.base.notices import Notice
from monai_gds.base.process import end_with_parent, print_past_bars, undisturbed
from monai_gds.errors import WorkerDied, shorten, warn

_log = logging.getLogger("monai_gds")

T = TypeVar("T")

#: How long idle workers have to end by themselves. At their end they write notes, on file systems that may be slow.
_CLOSE_SECONDS = 5.0


class Workers(Generic[T]):
    """Runs ``work(argument)`` in other processes.

    They are forked from this process while CUDA is not initialised in it, else from a fork server: a process of its
    own, in which the module of ``work`` is imported once for all workers. If such a process cannot receive ``work``,
    threads of this one run it, with a warning. Processes start at once, all of them, run torch on one thread each,
    ignore Ctrl-C (the parent decides), and end when the parent does, however it ends.

    Args:
        work: the function. Workers forked from this process inherit it, others unpickle it, threads share it.
        num_workers: how many processes or threads run it.
        context: a start method (``"fork"``, ``"spawn"``, ``"forkserver"``) or a multiprocessing context; None chooses.
            The imports of a starting fork server are set here, unless this is a context.

    Attributes:
        kind: the start method, or ``"threads"``.
        broken: whether a worker died, after which these workers run nothing more.

    Raises:
        ValueError: there is no such start method, or one was named and ``work`` cannot be sent to such a process.
        WorkerDied: a worker that was not forked from this process ended while it started.
    """

    def __init__(self, work: Callable[[Any], T], num_workers: int, context: str | BaseContext | None = None) -> None:
        self.kind = "threads"
        self.broken = self._closed = False
        self._running: set[Future[T]] = set()
        self._executor: Executor
        self._work: Callable[[Any], T] = _run
        chosen, why = _choose(context)
        if isinstance(chosen, ForkServerContext) and chosen is not context:
            _start_fork_server(getattr(work, "func", work).__module__)  # of a partial's function
        problem = why if chosen is None else self._start_processes(work, num_workers, chosen)
        if not problem:
            named = num_workers, self.kind, why
            Notice("workers", *named).log(_log, "%d worker processes by %s (%s)", *named)
            return
        if context is not None:
            raise ValueError(f"multiprocessing_context={context!r} cannot be used: {problem}")
        warn(f"{num_workers} threads do the work of processes: {problem}", UserWarning)
        self.kind, self._work = "threads", work
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="monai-gds-worker")

    def _start_processes(self, work: Callable[[Any], T], num_workers: int, context: BaseContext) -> str:
        """Starts the processes. Returns why ``work`` cannot be sent to them; empty if it was."""
        self.kind = context.get_start_method()
        sent: Any = work
        # The fork server has the environment of its own start.
        environment = dict(os.environ) if self.kind == "forkserver" else None
        if self.kind != "fork":
            try:
                sent = pickle.dumps(work)
            except Exception as e:
                return f"the function that they would run cannot be pickled: {e}"
            sent = _InMemory(sent)
        self._executor = ProcessPoolExecutor(
            num_workers, mp_context=context, initializer=_begin, initargs=(sent, environment)
        )
        # Calls of more than 64 KiB fill the pipe to the workers. Where other forked processes have inherited it, the
        # thread that writes to it does not notice that they were killed, and waiting for it would be for ever.
        self._executor._call_queue.cancel_join_thread()  # type: ignore[attr-defined]
        try:
            with undisturbed(), _uncollected():  # Python drops a Ctrl-C that strikes while it forks
                first = self._executor.submit(_problem_of_this_worker)  # starts all workers if forked from here
                while len(self._processes()) < num_workers:  # else one, unless another is idle already
                    self._executor.submit(_problem_of_this_worker)
            problem = "" if self.kind == "fork" else first.result()
        except BaseException as e:
            self._kill()  # if the executor cannot start them all, it forgets those that it started
            self.close()
            if isinstance(e, BrokenProcessPool):
                raise WorkerDied(
                    f"a process started by {self.kind} ended before it began: the script that starts it must be a "
                    "file, and do so under `if __name__ == '__main__':`"
                ) from e
            raise
        if problem:
            self.close()
        # A child of multiprocessing waits for its own children before the executor's hook at exit tells them to end.
        Finalize(self, _close, (weakref.ref(self),), exitpriority=100)  # before that of the executor's queue
        return problem

    def submit(self, argument: Any) -> Future[T]:
        """Has ``work(argument)`` run.

        The future raises what ``work`` raised, with the worker's traceback as its cause, or WorkerDied if the worker
        was killed or the workers were closed.
        """
        outer: Future[T] = Future()
        outer.set_running_or_notify_cancel()
        try:
            inner = self._executor.submit(self._work, argument)
        except BrokenProcessPool as e:
            outer.set_exception(self._died(e))
            return outer
        self._running.add(inner)
        inner.add_done_callback(partial(self._settle, argument, outer))
        return outer

    def _settle(self, argument: Any, outer: Future[T], inner: Future[T]) -> None:
        self._running.discard(inner)
        error = BrokenProcessPool() if inner.cancelled() else inner.exception()
        if isinstance(error, BrokenProcessPool) and self._closed and not self.broken:
            outer.set_exception(WorkerDied(f"the workers were closed before they had done {argument!r}"))
        elif error is not None:
            outer.set_exception(self._died(error) if isinstance(error, BrokenProcessPool) else error)
        elif isinstance(found := inner.result(), _Raised):
            remote = _RemoteTraceback(f"\n{found.frames.rstrip()}")  # type: ignore[arg-type] # it takes text
            found.error.__cause__ = remote if found.frames else None
            outer.set_exception(found.error)
        else:
            outer.set_result(found)

    def _died(self, error: BaseException) -> WorkerDied:
        self.broken = True
        died = WorkerDied(
            "a worker process was killed: by a signal, by the system when memory ran out, or by a crash in a library"
            f"{self._ended()}"
        )
        died.__cause__ = error
        return died

    def _ended(self) -> str:
        """Which processes have ended, and how. Those that the executor has ended since are left out."""
        processes = self._processes()
        ended = wait([process.sentinel for process in processes], 0)
        for process in processes:
            if process.sentinel in ended:
                process.join(_CLOSE_SECONDS)  # it is about to be
        codes = [(process.pid, process.exitcode) for process in processes]
        how = [f"process {pid}, {_how(code)}" for pid, code in codes if code not in (None, -signal.SIGTERM)]
        return f" ({'; '.join(how)})" if how else ""

    def close(self) -> None:
        """Ends the workers at once and drops their calls. Threads finish the calls that they have begun."""
        self._closed = True
        if self._running:
            # Not by cancel(): the executor's thread, which may have just found a worker dead, would end at a future
            # that is cancelled meanwhile, and the calls after it would wait for ever.
            self._kill()
        processes, manager = self._processes(), getattr(self._executor, "_executor_manager_thread", None)
        self._executor.shutdown(wait=False, cancel_futures=True)
        if manager is not None:
            _end(processes)
            _end_manager(manager)
            # Calls that were dropped lead back here, so that work and arguments would be kept until the collector runs.
            vars(self._executor).update(_pending_work_items={}, _initargs=())

    def _kill(self) -> None:
        for process in self._processes():
            process.kill()  # whatever it does: a C library may have the interpreter's lock for minutes

    def _processes(self) -> list[BaseProcess]:
        return list((getattr(self._executor, "_processes", None) or {}).values())


def _how(code: int | None) -> str:
    """How a process ended, by its exit code."""
    return next((one.name for one in signal.Signals if code == -one), f"exit code {code}")


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collects nothing within the block, also in processes that are forked in it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _close(workers: weakref.ref[Workers[Any]]) -> None:
    if (open_ones := workers()) is not None:
        open_ones.close()


def _end(processes: list[BaseProcess]) -> None:
    """Waits until idle workers have ended, and kills those that still start: they would import everything before.

    All that are left are killed, since one of them may hold the lock of the queue that the others read.
    """
    end = time.monotonic() + _CLOSE_SECONDS
    left: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
    while left and (ended := wait(list(left), max(0.0, end - time.monotonic()))):
        for sentinel in ended:
            del left[sentinel]
    for process in left.values():
        process.kill()


def _end_manager(manager: Any) -> None:
    """Waits until the executor's thread has ended, whose processes have.

    One that was killed may have sent a part of a result. The thread waits for the rest, and the pipe has no end: this
    process, and others that it forked, may write there too. So the rest is sent from here; nobody uses the result.
    """
    manager.join(1.0)
    if not manager.is_alive():
        return
    pipe = manager.result_queue._writer.fileno()
    os.set_blocking(pipe, False)
    while manager.is_alive():
        with suppress(BlockingIOError):
            while True:
                os.write(pipe, bytes(1 << 16))
        manager.join(0.001)


def _choose(context: str | BaseContext | None) -> tuple[BaseContext | None, str]:
    """The context to start processes with, and why; None where this process may have no children."""
    if isinstance(context, BaseContext):
        return context, "asked for"
    if context is not None:
        return multiprocessing.get_context(context), "asked for"
    if multiprocessing.current_process().daemon:
        return None, "this process is itself a worker (daemonic), which may start none"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return multiprocessing.get_context("forkserver"), "CUDA is initialised, and does not survive a fork"
    return multiprocessing.get_context("fork"), "CUDA is not initialised"


def _start_fork_server(module: str) -> None:
    """Starts the fork server, which imports a module first, unless it runs.

    It must find what this process would. Python before 3.12.8 and 3.13.1 starts it with the path of ``python -c``: the
    current folder comes first, and folders that the user's script added are missing.
    """
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path if isinstance(folder, str))
    there = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in there}
    forkserver.set_forkserver_preload([module])
    os.environ.update(there)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _InMemory:
    """Bytes that processes which are not forked map, and which do not take the way of their other arguments.

    That is a pipe of 64 KiB, and who fills it waits for ever, or gets an error of the pipe, where the process has ended
    instead of reading on.
    """

    def __init__(self, content: bytes) -> None:
        self._file = os.memfd_create("monai-gds-work")
        weakref.finalize(self, os.close, self._file)
        with open(self._file, "wb", closefd=False) as file:
            file.write(content)

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (DupFd(self._file),)


# What follows runs in the workers.


def _mapped(received: Any) -> mmap:
    file = received.detach()
    try:
        return mmap(file, 0, prot=PROT_READ)
    finally:
        os.close(file)


_work: Callable[[Any], Any]
_problem = ""


def _begin(work: Any, environment: Mapping[str, str] | None) -> None:
    global _work, _problem
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What the parent leaves to be collected stays: freeing a tensor on a GPU would end a forked process. And the first
    # collection would copy the parent's pages, which takes half a second.
    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)  # the other workers are parallel enough, and OpenMP's threads do not survive a fork
    end_with_parent()
    print_past_bars()  # Lightning shows some of rich's
    if isinstance(work, mmap):
        try:
            work = pickle.loads(work)
        except Exception as e:
            _problem = f"the function that they would run cannot be unpickled in another process: {e}"
    _work = work


def _problem_of_this_worker() -> str:
    return _problem


class _Raised(NamedTuple):
    """What the function raised, and the traceback as far as the error itself does not tell it."""

    error: Exception
    frames: str


def _run(argument: Any) -> Any:
    try:
        return _work(argument)
    except Exception as e:
        shorten(e)
        portable, frames = _portable(e), ""
        if portable is e and (told := e if e.__traceback__ else e.__cause__) is not None:
            frames = "".join(traceback.format_exception(told))
        return _Raised(portable.with_traceback(None), frames)  # or this frame would hold the error, and it this frame


def _portable(error: Exception) -> Exception:
    """The error itself, or a RuntimeError with its text if pickle does not preserve it."""
    try:
        again = pickle.loads(pickle.dumps(error))
        if str(again) == str(error) and getattr(again, "__notes__", []) == getattr(error, "__notes__", []):
            return error
    except Exception:
        pass
    return RuntimeError("".join(traceback.format_exception(error)))
