"""Content hashes of source files, kept in the cache folder so that other processes and nodes need not read the files.

    <cache_dir>/.index/<process>.<n>.sources    hashes that one process noted (monai_gds.shared.notes)

A file is a sequence of 40-byte entries: a 16-byte key (the hash of a path and its ``stat``), the 16-byte content hash,
and an 8-byte checksum. A torn or garbled entry fails its checksum and counts as absent.

The memo only saves time. If it cannot be read or written, nothing fails, and source files are read more often.

Which hashes may be remembered: the clock of a file system has ticks of up to two seconds. An edit within the tick in
which a file was hashed may leave its times as they were, so the file must have been two seconds old when reading began
(git calls younger entries racily clean). :class:`Ages` tells that, and leaves three gaps: setting a clock back hides an
edit that falls into the very tick in which the file was stamped before; writes through a shared memory mapping change
times up to 30 s late; and attributes cached by a network file system's client (``acregmax``) are seen late.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque

import numpy as np
import numpy.typing as npt
import xxhash

from monai_gds import limits
from monai_gds.base.file_systems import LOCAL, kind_of
from monai_gds.base.process import PerProcess
from monai_gds.shared.notes import Notes

_ENTRY = 40  # bytes: key, content, checksum
_CHECKED = 32  # bytes that the checksum covers

#: Seconds between looks at other processes' files, and between writes of our own.
_REFRESH_SECONDS = 1.0

#: The longest tick of a file system's clock (FAT's), in ns.
_TICK = 2_000_000_000

#: How far two machines' clocks may be apart, in ns: a wrong time zone and some hours.
_CLOCKS_DIFFER = 24 * 3600 * 1_000_000_000


class SourceMemo:
    """The memo of one cache folder, as one process sees it. Without a folder nothing is kept."""

    def __init__(self, folder: str | None) -> None:
        self._notes = None if folder is None else Notes(folder, "sources", lambda data: len(data) // _ENTRY * _ENTRY)
        self._table = _Table.of([])
        self._own = PerProcess(_Own)

    # Reading

    def get(self, key: bytes) -> bytes | None:
        """The content hash that any process remembered under a 16-byte key."""
        if self._notes is None:
            return None
        found = self._table.get(key)
        own = self._own()
        if found is None and time.monotonic() - own.refreshed >= _REFRESH_SECONDS:
            with own.lock:  # others wait, since what they miss is being read
                if time.monotonic() - own.refreshed >= _REFRESH_SECONDS:
                    self._refresh(self._notes)
                    own.refreshed = time.monotonic()
            found = self._table.get(key)
        return found

    def _refresh(self, notes: Notes) -> None:
        """Reads what was noted since the last look."""
        blocks = [_rows(data) for data in notes.added().values()]
        if blocks:
            self._table = _Table.of([self._table.rows, *blocks])

    # Writing

    def put(self, key: bytes, content: bytes) -> None:
        """Remembers a 16-byte content hash under a 16-byte key, and writes from time to time."""
        if self._notes is None:
            return
        own = self._own()
        own.waiting.append(_entry(key, content))
        if len(own.waiting) >= limits.MEMO_WAITING_ITEMS or time.monotonic() - own.flushed >= _REFRESH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes the entries that wait. If that fails, they are dropped."""
        own = self._own()
        own.flushed = time.monotonic()
        entries = []
        with contextlib.suppress(IndexError):  # without a lock: other threads may append meanwhile
            while True:
                entries.append(own.waiting.popleft())
        if entries and self._notes is not None:
            self._notes.append(b"".join(entries))

    def tidy(self) -> None:
        """Merges the files of ended processes if there are many."""
        if self._notes is not None:
            self._notes.tidy(_merged)


class _Own:
    """What belongs to one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while other processes' files are read
        self.waiting: deque[bytes] = deque()  # to be written
        self.refreshed = self.flushed = -math.inf


class Ages:
    """Tells which files are old enough for their hashes to be remembered."""

    def __init__(self) -> None:
        self._young: dict[str, tuple[bytes, float]] = {}  # by path: its state, and when that was first seen

    def is_old(self, path: str, state: bytes, st: os.stat_result, fd: int) -> bool:
        """Whether a hash that is about to be taken of an open file may be remembered.

        Local file systems stamp files with this machine's clock. A server's clock may be off by hours, so its files
        must look a day old. Whatever clocks and times say (``touch -d 2099``), a file is old if this process saw it in
        the same state two seconds ago on a monotonic clock.
        """
        age = time.time_ns() - max(st.st_mtime_ns, st.st_ctime_ns)
        if age >= _CLOCKS_DIFFER or (age >= _TICK and kind_of(fd) in LOCAL):
            self._young.pop(path, None)
            return True
        seen, since = self._young.get(path, (b"", 0.0))
        if seen == state:
            return (time.monotonic() - since) * 1e9 >= _TICK
        if len(self._young) < limits.YOUNG_FILES or path in self._young:
            self._young[path] = (state, time.monotonic())
        return False


# Entries

_Rows = npt.NDArray[np.uint64]  # of shape (n, 5): two words of the key, two of the content, one of the checksum


def _entry(key: bytes, content: bytes) -> bytes:
    return key + content + xxhash.xxh3_64_digest(key + content)


def _is_whole(entry: bytes) -> bool:
    return xxhash.xxh3_64_digest(entry[:_CHECKED]) == entry[_CHECKED:]


def _rows(data: bytes) -> _Rows:
    return np.frombuffer(data, np.uint64).reshape(-1, _ENTRY // 8)


class _Table:
    """Entries sorted by the first word of their keys. Checksums are compared when an entry is looked up."""

    __slots__ = ("_first", "rows")

    def __init__(self, rows: _Rows) -> None:
        self.rows = rows
        self._first = np.ascontiguousarray(rows[:, 0])

    @classmethod
    def of(cls, blocks: list[_Rows]) -> _Table:
        rows = np.concatenate([_rows(b""), *blocks])
        return cls(rows[np.argsort(rows[:, 0], kind="stable")])

    def get(self, key: bytes) -> bytes | None:
        first = np.frombuffer(key, np.uint64, 1)[0]
        for row in self.rows[np.searchsorted(self._first, first) :]:
            if row[0] != first:
                break
            entry: bytes = row.tobytes()
            if entry.startswith(key) and _is_whole(entry):
                return entry[16:_CHECKED]
        return None


def _merged(files: list[bytes]) -> bytes:
    """The whole entries of several files, each once."""
    cut = (data[i : i + _ENTRY] for data in files for i in range(0, len(data), _ENTRY))
    return b"".join(dict.fromkeys(entry for entry in cut if _is_whole(entry)))
