"""Content hashes of source files, kept in the cache folder so that other processes and nodes need not read the files.

    <cache_dir>/.index/<process>.<n>.sources    hashes that one process noted (monai_gds.shared.notes)

A note is a 16-byte key, the hash of a path and its ``stat``, and the 16-byte content hash, together 64 hex digits.

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
import re
import threading
import time
from collections import deque
from itertools import chain

from monai_gds import limits
from monai_gds.base.file_systems import LOCAL, kind_of
from monai_gds.base.process import PerProcess
from monai_gds.shared.notes import Notes

_NOTE = re.compile(b"[0-9a-f]{64}")

#: Seconds between looks at other processes' files, and between writes of our own.
_REFRESH_SECONDS = 1.0

#: The longest tick of a file system's clock (FAT's), in ns.
_TICK = 2_000_000_000

#: How far two machines' clocks may be apart, in ns: a wrong time zone and some hours.
_CLOCKS_DIFFER = 24 * 3600 * 1_000_000_000


class SourceMemo:
    """The memo of one cache folder, as one process sees it. Without a folder it is in memory only."""

    def __init__(self, folder: str | None) -> None:
        self._notes = None if folder is None else Notes(folder, "sources")
        self._found: dict[bytes, bytes] = {}  # contents by key
        self._own = PerProcess(_Own)

    def get(self, key: bytes) -> bytes | None:
        """The content hash that this or another process remembered under a 16-byte key."""
        found = self._found.get(key)
        if found is None and self._notes is not None:
            own = self._own()
            if time.monotonic() - own.refreshed >= _REFRESH_SECONDS:
                with own.lock:  # others wait, since what they miss is being read
                    if time.monotonic() - own.refreshed >= _REFRESH_SECONDS:
                        texts = filter(_NOTE.fullmatch, chain(*self._notes.added().values()))
                        notes = (bytes.fromhex(text.decode()) for text in texts)
                        self._found.update((note[:16], note[16:]) for note in notes)
                        own.refreshed = time.monotonic()
                found = self._found.get(key)
        return found

    def put(self, key: bytes, content: bytes, *, for_others: bool = True) -> None:
        """Remembers a 16-byte content hash under a 16-byte key; ``for_others``, writes it, from time to time."""
        if for_others or len(self._found) < limits.KNOWN_FILES:
            self._found[key] = content
        if self._notes is None or not for_others:
            return
        own = self._own()
        own.waiting.append((key + content).hex().encode())
        if len(own.waiting) >= limits.MEMO_WAITING_ITEMS or time.monotonic() - own.flushed >= _REFRESH_SECONDS:
            self.flush()

    def flush(self, make: bool = True) -> None:
        """Writes the entries that wait. If that fails, they are dropped.

        Without ``make``, it fails if this process has not written any before, or somebody is removing the folder.
        """
        own = self._own()
        own.flushed = time.monotonic()
        entries = []
        with contextlib.suppress(IndexError):  # without a lock: other threads may append meanwhile
            while True:
                entries.append(own.waiting.popleft())
        if self._notes is not None:
            self._notes.append(entries, make)

    def tidy(self) -> None:
        """Merges the files of ended processes if there are many."""
        if self._notes is not None:
            self._notes.tidy()


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
