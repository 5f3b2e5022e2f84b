"""Ctrl-C at every place of a piece of code in turn, which finds what random timing does not."""

from __future__ import annotations

import dis
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Literal

from monai_gds.base import process

__all__ = ["interrupted"]

#: Operations behind which CPython looks for signals.
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


def interrupted(
    n: int,
    work: Callable[[], object],
    files: Iterable[str | None],
    event: Literal["opcode", "line", "check"] = "opcode",
) -> bool:
    """Does it with Ctrl-C before the n-th operation of the interpreter or line, or behind its n-th check, in files.

    What these files call of ``threading`` counts, too.

    Returns:
        Whether there are so many.

    Args:
        n: from 1.
        work: what is done in this thread.
        files: paths of source files, or of folders of them, which end with a slash.
        event: what is counted, but for the begin and the end of except clauses. A check is where the interpreter
            itself looks for signals: behind a call, at the begin of a function, and behind a jump back. So none falls
            between a lock of C and its ``with`` block.
    """
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
        if is_counted(frame, happened) and not _is_deferred() and next(events) == n:
            last.clear()
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    except RuntimeError as e:  # within Condition.wait, which then releases what it does not hold
        if not isinstance(e.__context__, KeyboardInterrupt):
            raise
        return True
    finally:
        sys.settrace(before)
    return False
