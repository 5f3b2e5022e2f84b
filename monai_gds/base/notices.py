"""Notices given in a run, such as warnings: a small table in memory that a process shares with those it forks.

Workers of a loader may live for one epoch. Without the table each would repeat the warnings that others gave, and look
again at what others found. The table holds a hash of each notice and when it was last given. Of the notices that share
a row, the oldest is forgotten, and there is no lock: so a notice may be given twice.
"""

from __future__ import annotations

import hashlib
import logging
import math
import mmap
import struct
import time
from typing import Any

_ROWS = 512
_ROW = struct.Struct("=" + 8 * "Qd")  # pairs of a hash and a time; a time of 0 is long ago

#: Anonymous and shared: a forked process has the same pages, as have all that a fork server forks.
_table = mmap.mmap(-1, _ROWS * _ROW.size)


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
        struct.pack_into("=Qd", _table, self._offset + 16 * slot, self._hash, time.monotonic())

    def is_new(self) -> bool:
        """Whether it was not given before. Marks it as given."""
        is_new = self.last_given() == -math.inf
        if is_new:
            self.mark_given()
        return is_new

    def log(self, logger: logging.Logger, message: str, *args: Any) -> None:
        """Logs a message as INFO if it is new. Where nobody listens yet, it stays new."""
        if logger.isEnabledFor(logging.INFO) and self.is_new():
            logger.info(message, *args, stacklevel=2)

    def _row(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        row = _ROW.unpack_from(_table, self._offset)
        return row[::2], row[1::2]
