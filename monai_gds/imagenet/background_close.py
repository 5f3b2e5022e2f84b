"""Closes what a dropped dataset leaves behind, in a background thread.

The garbage collector drops objects at any allocation, in any thread, whatever locks that thread holds. Closing a
storage waits for other threads to end, so doing it right there can deadlock. That was seen in ``threading``, whose
lock a starting thread held while it collected a dataset and waited for threads that needed the same lock to end.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from monai_gds.process import Owner, PerProcess

__all__ = ["close_when_dropped"]


def close_when_dropped(owner: object, close: Callable[[], None]) -> None:
    """Calls ``close`` soon after ``owner`` is gone, unless the process ends first or is a forked child.

    Args:
        owner: the object that ``close`` belongs to and must not refer to.
        close: may block. Its errors are lost.
    """
    weakref.finalize(owner, _hand_over, Owner(), _closing_thread(), close).atexit = False


def _hand_over(process: Owner, queue: SimpleQueue[Callable[[], None]], close: Callable[[], None]) -> None:
    if process.is_this_process():
        queue.put(close)


@PerProcess
def _closing_thread() -> SimpleQueue[Callable[[], None]]:
    queue: SimpleQueue[Callable[[], None]] = SimpleQueue()  # the only kind that may be put to from a finaliser
    threading.Thread(target=_work, args=(queue,), name="monai-gds-closing", daemon=True).start()
    return queue


def _work(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        with contextlib.suppress(Exception):  # there is nobody left to tell
            queue.get()()
