"""Closes what a dropped dataset leaves behind, in a background thread.

The garbage collector drops objects at any allocation, in any thread, whatever locks that thread holds. Closing a
storage waits for other threads to end, so doing it right there can deadlock. That was seen in ``threading``, whose
lock a starting thread held while it collected a dataset and waited for threads that needed the same lock to end.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from monai_gds.base.process import Owner, PerProcess


def close_when_dropped(owner: object, close: Callable[[], None]) -> None:
    """Calls ``close`` soon after ``owner`` is gone, unless the process ends first or is a forked child.

    At exit the interpreter waits for closes that are under way: a thread inside a C++ library would abort it.

    Args:
        owner: the object that ``close`` belongs to and must not refer to.
        close: may block. Its errors are lost.
    """
    weakref.finalize(owner, _hand_over, Owner(), _closing_thread().queue, close).atexit = False


def _hand_over(process: Owner, queue: SimpleQueue[Callable[[], None] | None], close: Callable[[], None]) -> None:
    if process.is_this_process():
        queue.put(close)


#: Most seconds that the interpreter's exit waits for closes that are under way.
_END_SECONDS = 60.0


class _ClosingThread:
    """A thread that calls the functions in its queue, until it takes None."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # may be put to from a finaliser
        self._thread = threading.Thread(target=self._work, name="monai-gds-closing", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (close := self.queue.get()) is not None:
            with contextlib.suppress(Exception):  # there is nobody left to tell
                close()
            del close

    def end(self) -> None:
        self.queue.put(None)
        self._thread.join(_END_SECONDS)


_closing_thread: PerProcess[_ClosingThread] = PerProcess(_ClosingThread)


@atexit.register
def _end() -> None:
    thread = _closing_thread.made()
    if thread is not None:
        thread.end()
