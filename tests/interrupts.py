"""Ctrl-C or a kill at every place of a piece of code in turn, which finds what random timing does not."""

from __future__ import annotations

import ctypes
import dis
import gc
import itertools
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from monai_gds.base import process
from tests.machines import in_child

__all__ = ["as_killed", "interrupted"]

#: Operations after which CPython looks for signals.
_CHECKS = {
    number
    for name, number in dis.opmap.items()
    if name.startswith(("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD"))
}

#: The first and the last operation of an except clause, where no signal is looked for. If a trace function raises
#: there, CPython 3.11 keeps the handled exception for ever, as the context of all that follow in this thread.
_HANDLERS = {dis.opmap["PUSH_EXC_INFO"], dis.opmap["POP_EXCEPT"]}


def _is_deferred() -> bool:
    """Whether Ctrl-C is only noted for now, by ``process.undisturbed``."""
    return getattr(signal.getsignal(signal.SIGINT), "__module__", "") == process.__name__


def as_killed(folder: Path, work: Callable[[], object], files: Iterable[str | None], copies: Path) -> list[Path]:
    """What becomes of a folder where a process is killed before any line of ``work`` in files, and after the last.

    A kill leaves a folder as it is at that moment, so that one process suffices, which copies it at each line. It has
    ended when this returns.

    Returns:
        The copies, in order.
    """

    def copy(n: int) -> None:
        shutil.copytree(folder, copies / str(n), symlinks=True)

    def work_and_copy() -> int:
        lines = _stepped(work, files, "line", copy)
        copy(lines + 1)
        return lines + 1

    return [copies / str(n) for n in range(1, in_child(work_and_copy) + 1)]


def interrupted(
    n: int,
    work: Callable[[], object],
    files: Iterable[str | None],
    event: Literal["opcode", "line", "check"] = "opcode",
) -> bool:
    """Does it with Ctrl-C before the n-th operation of the interpreter or line, or after its n-th check, in files.

    What these files call of ``threading`` counts, too.

    Returns:
        Whether there are so many.

    Args:
        n: from 1.
        work: what is done in this thread.
        files: paths of source files, or of folders of them, which end with a slash.
        event: what is counted, but for the begin and the end of except clauses. A check is where the interpreter
            itself looks for signals: after a call, at the beginning of a function, and after a jump back. So none falls
            between a lock of C and its ``with`` block.
    """

    def strike(event: int) -> None:
        if event == n:
            raise KeyboardInterrupt

    handled = sys.exc_info()[1]
    try:
        _stepped(work, files, event, strike)
    except KeyboardInterrupt:
        return True
    except RuntimeError as e:  # within Condition.wait, which then releases what it does not hold
        if not isinstance(e.__context__, KeyboardInterrupt):
            raise
        return True
    else:
        return False
    finally:
        # CPython 3.11 may still handle what an interrupted except clause did, and would keep all of its frames.
        ctypes.pythonapi.PyErr_SetHandledException(ctypes.py_object(handled))


def _stepped(
    work: Callable[[], object],
    files: Iterable[str | None],
    event: Literal["opcode", "line", "check"],
    step: Callable[[int], None],
) -> int:
    """Does the work, and a step before each event, with its number. Returns how many there were."""
    named = tuple(str(file) for file in files)
    events = itertools.count(1)

    def counts(frame: FrameType) -> bool:
        called: FrameType | None = frame
        while called is not None and called.f_code.co_filename == threading.__file__:
            called = called.f_back
        return called is not None and called.f_code.co_filename.startswith(named)

    last: dict[FrameType, int] = {}  # operation of each frame

    def is_counted(frame: FrameType, happened: str) -> bool:
        operation = frame.f_code.co_code[frame.f_lasti]
        if event != "check":
            return happened == event and operation not in _HANDLERS
        if happened == "return":
            last.pop(frame, None)
        if happened != "opcode":
            return False
        before, last[frame] = last.get(frame), operation
        return before in _CHECKS

    def trace(frame: FrameType, happened: str, arg: object) -> Any:
        if happened == "call" and not counts(frame):
            return None
        frame.f_trace_opcodes = event != "line"
        if is_counted(frame, happened) and not _is_deferred():
            step(next(events))
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # what the collector finalizes runs wherever it happens to be, and swallows what is raised there
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
        last.clear()
    return next(events) - 1
