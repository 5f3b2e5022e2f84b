"""Whether a file is old enough that any later edit will show in its times.

The clock of a file system has ticks of up to two seconds. An edit within the tick in which a file was hashed may leave
its times as they were, so a hash may be remembered only if the file was already two seconds old when reading began
(git calls such entries racily clean). Telling a file's age takes two clocks, and a file server's may be off by hours:

* Local file systems stamp with this machine's clock, which is compared with ctime and mtime.
* On others, files that are a day older than this machine's clock are old, whichever of the two clocks is wrong.
* In the cache folder's file system, the server's time is found by creating a file there.
* Whatever clocks and times say (``touch -d 2099``), a file is old if this process saw it in the same state two seconds
  ago on a monotonic clock.

Limits: setting a clock back hides an edit that falls into the very tick in which the file was stamped before. Writes
through a shared memory mapping change times up to 30 s late. Attributes cached by a network file system's client
(``acregmax``) are seen late.
"""

from __future__ import annotations

import contextlib
import math
import os
import time

from monai_gds import limits
from monai_gds.base.file_systems import LOCAL, kind_of
from monai_gds.shared import temporary

__all__ = ["FileClock"]

#: The longest tick of a file system's clock (FAT's), in ns.
_TICK = 2_000_000_000

#: How far two machines' clocks may be apart, in ns: a wrong time zone and some hours.
_CLOCKS_DIFFER = 24 * 3600 * 1_000_000_000

#: How often a file server is asked for its time, in seconds. In between, its clock is taken to run 0.1 % slow.
_ASK_SERVER_SECONDS = 60.0


class FileClock:
    """Tells the age of files, if need be by the clock of the cache folder's file server."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._is_local: dict[int, bool] = {}  # by device
        self._server: dict[int, tuple[float, int | None]] = {}  # by device: when it answered, and what
        self._young: dict[str, tuple[bytes, float]] = {}  # by path: its state, and when that was first seen

    def is_old(self, path: str, state: bytes, st: os.stat_result, fd: int) -> bool:
        """Whether a hash that is about to be taken of an open file may be remembered."""
        youngest = max(st.st_mtime_ns, st.st_ctime_ns)
        now = time.time_ns()
        if now - youngest >= _CLOCKS_DIFFER or self._now(st.st_dev, fd, now) - youngest >= _TICK:
            self._young.pop(path, None)
            return True
        seen, since = self._young.get(path, (b"", 0.0))
        if seen == state:
            return (time.monotonic() - since) * 1e9 >= _TICK
        if len(self._young) < limits.YOUNG_FILES or path in self._young:
            self._young[path] = (state, time.monotonic())
        return False

    def _now(self, device: int, fd: int, here: int) -> int:
        """The earliest time, in ns, that the clock stamping a device's files may show; ``here`` is this machine's."""
        if device not in self._is_local:
            self._is_local[device] = kind_of(fd) in LOCAL
        if self._is_local[device]:
            return here
        answered, theirs = self._server.get(device, (-math.inf, None))
        if time.monotonic() - answered > _ASK_SERVER_SECONDS:
            theirs = self._server_time(device)
            answered = time.monotonic()  # after the file was stamped; earlier would make the server seem ahead
            self._server[device] = (answered, theirs)
        if theirs is None:
            return here - _CLOCKS_DIFFER
        return theirs + int((time.monotonic() - answered) * 0.999e9)

    def _server_time(self, device: int) -> int | None:
        """The file server's current time in ns; None if the cache folder is on another device."""
        if self._folder is None or not os.path.isdir(self._folder):
            return None
        with contextlib.suppress(OSError), temporary.opened(self._folder, create=True) as folder:
            seconds = temporary.server_time(folder) if os.fstat(folder).st_dev == device else None
            return None if seconds is None else int(seconds * 1e9)
        return None
