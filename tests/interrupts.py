"""Ctrl-C at every place of a piece of code in turn, which finds what random timing does not."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Literal

__all__ = ["interrupted"]


def interrupted(
    n: int,
    work: Callable[[], object],
    files: Iterable[str | None],
    event: Literal["opcode", "line"] = "opcode",
) -> bool:
    """Does it with Ctrl-C before the n-th operation of the interpreter, or line, in some files.

    What these files call of ``threading`` counts, too.

    Returns:
        Whether there are so many.

    Args:
        n: from 1.
        work: what is done in this thread.
        files: paths of source files, or of folders of them, which end with a slash.
        event: what is counted.
    """
    named = tuple(str(file) for file in files)
    events = itertools.count(1)

    def counts(frame: FrameType) -> bool:
        called: FrameType | None = frame
        while called is not None and called.f_code.co_filename == threading.__file__:
            called = called.f_back
        return called is not None and called.f_code.co_filename.startswith(named)

    def trace(frame: FrameType, happened: str, arg: object) -> Any:
        if happened == "call" and not counts(frame):
            return None
        frame.f_trace_opcodes = event == "opcode"
        if happened == event and next(events) == n:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
