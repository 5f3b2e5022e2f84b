"""Closing what a dropped object leaves behind, in a thread of its own.

The garbage collector drops objects at any allocation, in any thread, whatever locks that thread holds. Who then waits
for other threads to end, as closing a storage does, may wait for ever: seen in ``threading``, whose lock a starting
thread held while it collected a dataset and waited for its threads, which need that lock to end.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["close_when_dropped"]

#: What to close, and in which process. The one kind of queue that may be put to while anything is collected.
_dropped: SimpleQueue[tuple[int, Callable[[], None]]] = SimpleQueue()
_started_in: set[int] = set()


def close_when_dropped(owner: object, close: Callable[[], None]) -> None:
    """Calls ``close`` soon after ``owner`` is gone, unless the process ends before or is another one by then.

    Args:
        owner: what ``close`` belongs to and does not refer to.
        close: may wait; what it raises is lost.
    """
    process = os.getpid()
    if process not in _started_in:
        _started_in.add(process)
        threading.Thread(target=_close_dropped, name="monai-gds-closing", daemon=True).start()
    weakref.finalize(owner, _dropped.put, (process, close)).atexit = False


def _close_dropped() -> None:
    while True:
        process, close = _dropped.get()
        if process == os.getpid():
            with contextlib.suppress(Exception):  # there is nobody left to tell
                close()
        del close  # or it would be kept until there is another
