"""Notices given in a run, such as warnings: a small table in memory that a process shares with those it starts.

Workers of a loader may live for one epoch. Without the table each would repeat the warnings that others gave, and look
again at what others found. The table holds a hash of each notice and when it was last given. Of the notices that share
a row, the oldest is forgotten, so a notice may be given twice.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import math
import mmap
import multiprocessing
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_ROWS = 512
_ROW = struct.Struct("=" + 8 * "Qd")  # pairs of a hash and a time; a time of 0 is long ago

_NAME = "monai-gds-notices"

#: The table's memory, which a forked process has as well. Whoever claims a notice locks it, for some microseconds; the
#: kernel unlocks it for a process that is killed.
_memory = os.memfd_create(_NAME)
os.ftruncate(_memory, _ROWS * _ROW.size)
_own = mmap.mmap(_memory, _ROWS * _ROW.size)

#: How often the lock is tried for, a millisecond apart: after that a notice may be given twice.
_TRIES = 100


class Notice:
    """Something that is reported once in a run, named by any values.

    Example:
        >>> [Notice("drive full", "/nvme").is_new() for _ in range(2)]
        [True, False]
    """

    def __init__(self, *what: Any) -> None:
        self._hash = int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little")
        self._offset = self._hash % _ROWS * _ROW.size

    def last_given(self) -> float:
        """When it was last given, by ``time.monotonic``; minus infinity if it was not."""
        hashes, times = self._row()
        return times[hashes.index(self._hash)] if self._hash in hashes else -math.inf

    def mark_given(self) -> None:
        """Notes that it is given now."""
        hashes, times = self._row()
        slot = hashes.index(self._hash) if self._hash in hashes else times.index(min(times))
        struct.pack_into("=Qd", _table(), self._offset + 16 * slot, self._hash, time.monotonic())

    def is_new(self) -> bool:
        """Whether it was not given before. Marks it as given. True for one of the processes that ask at once."""
        if self.last_given() > -math.inf:
            return False
        with _alone():
            if self.last_given() > -math.inf:
                return False
            self.mark_given()
        return True

    def log(self, logger: logging.Logger, message: str, *args: Any) -> None:
        """Logs a message as INFO if it is new. Where nobody listens yet, it stays new."""
        if logger.isEnabledFor(logging.INFO) and self.is_new():
            logger.info(message, *args, stacklevel=2)

    def _row(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        row = _ROW.unpack_from(_table(), self._offset)
        return row[::2], row[1::2]


@functools.cache
def _table() -> mmap.mmap:
    """The table: that of the process by which multiprocessing started this one, if it may see it."""
    parent = multiprocessing.parent_process()  # unknown while a spawned process imports this
    if parent is not None:
        with suppress(OSError):
            _join(f"/proc/{parent.pid}/fd")
            return mmap.mmap(_memory, _ROWS * _ROW.size)
    return _own


def _join(descriptors: str) -> None:
    """Has ``_memory`` be that of another process, in which a spawned one finds it in turn."""
    for name in os.listdir(descriptors):
        path = f"{descriptors}/{name}"
        with suppress(FileNotFoundError):
            if os.readlink(path).startswith(f"/memfd:{_NAME} "):
                theirs = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                os.dup2(theirs, _memory, inheritable=False)
                os.close(theirs)
                return


@contextmanager
def _alone() -> Iterator[None]:
    for _ in range(_TRIES):
        try:
            fcntl.lockf(_memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            time.sleep(0.001)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.lockf(_memory, fcntl.LOCK_UN)
