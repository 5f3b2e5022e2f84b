"""Runs a probe in its own process: one that hangs, crashes or exits becomes an :class:`Answer` with an error.

Libraries may print, chdir and leave files behind: each process has a temporary folder as its working directory and
writes its standard output and error there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import get_context, set_forkserver_preload
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from monai_gds.errors import MonaiGdsError

__all__ = ["LIMIT", "Answer", "Probe", "ask", "preload"]

#: Seconds that a probe may take. An import from a slow network drive takes tens of them.
LIMIT = 120.0

#: In a folder with a longer name, the path of the fork server's socket would exceed the 108 bytes of AF_UNIX.
_LONGEST_TMPDIR = 70

#: A probe takes no arguments and returns JSON types. It is pickled: a module-level function, or a partial of one.
Probe = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Answer:
    """The values that a probe returned, or the error that it ended with."""

    values: Mapping[str, Any]
    error: str = ""

    def __bool__(self) -> bool:
        return not self.error


def preload() -> None:
    """Imports torch once for all later probes instead of in each of them. Only for a torch that is known to work."""
    modules = ["torch", "monai_gds.doctor.diagnosis"]
    if "torch" not in sys.modules:  # the command line: every process imports __main__, and with it these modules
        modules += [name for name in sys.modules if name.startswith("monai_gds.")]
    set_forkserver_preload(modules)


def ask(
    probe: Probe, environment: Mapping[str, str] | None = None, *, limit: float = LIMIT, fresh: bool = False
) -> Answer:
    """Runs a probe, and kills it after ``limit`` seconds.

    Args:
        probe: what to run.
        environment: additional environment variables.
        limit: in seconds.
        fresh: start a new interpreter instead of forking one that has torch imported.

    Returns:
        The values that it returned. If it failed, the error is its exception, or how its process ended and the last
        lines that it printed.
    """
    fresh = fresh or len(tempfile.gettempdir()) > _LONGEST_TMPDIR
    context: SpawnContext | ForkServerContext = get_context("spawn") if fresh else get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    with ours, tempfile.TemporaryDirectory(prefix="monai-gds-doctor-", ignore_cleanup_errors=True) as folder:
        arguments = (theirs, probe, {**os.environ, **(environment or {})}, folder)
        process: SpawnProcess | ForkServerProcess = context.Process(target=_run, args=arguments)
        try:
            with theirs, _interrupts_held():
                process.start()
            return _answer(ours, process, limit, Path(folder, "printed"))
        finally:
            _kill(process)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Makes processes that start in this block ignore Ctrl-C, on which they would print tracebacks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(theirs: Connection, probe: Probe, environment: Mapping[str, str], folder: str) -> None:
    """The process: runs the probe and sends its answer."""
    os.setsid()  # so that processes that the probe starts can be killed with it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    printed = os.open("printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    try:
        answer = Answer(probe())
    except Exception as e:
        is_sentence = isinstance(e, (MonaiGdsError, OSError))
        answer = Answer({}, str(e) if is_sentence else f"{type(e).__name__}: {e}")
    theirs.send(answer)
    os._exit(0)  # what libraries do at exit does not matter


def _answer(ours: Connection, process: SpawnProcess | ForkServerProcess, limit: float, printed: Path) -> Answer:
    if not wait([ours, process.sentinel], limit):
        return Answer({}, f"it gave no answer within {limit:g} seconds{_last_words(printed)}")
    with contextlib.suppress(EOFError, OSError):
        if ours.poll():
            answer: Answer = ours.recv()
            return answer
    process.join(10)
    code = process.exitcode
    if code is None:
        how = "it closed its pipe and went on"
    else:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return Answer({}, f"it ended its process ({how}){_last_words(printed)}")


def _kill(process: SpawnProcess | ForkServerProcess) -> None:
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # a process that did not reach setsid()
    process.join()
    process.close()


def _last_words(printed: Path) -> str:
    if not printed.exists():
        return ""
    lines = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()]
    return f": {' / '.join(lines[-3:])}" if lines else ""
