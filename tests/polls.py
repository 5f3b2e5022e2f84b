"""Waiting for what happens elsewhere: as short as it takes, and on a busy machine as long."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["until"]


def until(true: Callable[[], object], what: str = "", seconds: float = 100) -> None:
    """Returns once ``true()`` is. Fails the test after so many seconds, and says ``what`` it waited for."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what or f"it took longer than {seconds} s"
        time.sleep(0.005)
