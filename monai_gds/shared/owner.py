"""The owners of files that processes share: names for processes, and whether the one of a file is gone.

A name is ``<boot>-<pid namespace>.<pid>.<start time>``: no two processes ever have the same. A process marks what it
writes with its name and a number, so that other processes can tell whether its writer still runs.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import time

from monai_gds.base.process import PerProcess

#: The first part of a name on a machine that does not reveal its boot or pid namespace.
_UNKNOWN = "unknown"

_PROCESS = rf"(?:[0-9a-f]{{8}}-[0-9]+|{_UNKNOWN})\.[0-9]+\.(?:[0-9]+|None)"
_NAME = re.compile(_PROCESS)

#: Regular expression for a mark.
PATTERN = rf"{_PROCESS}\.[0-9]+"

#: The usual patience with a process of another host or container, in seconds.
HOUR = 3600.0

#: Numbers what this process marks.
_counter = itertools.count()

#: Clocks that stamp folders, by device and inode: how far they are ahead, and when that was found out.
_clocks: dict[tuple[int, int], tuple[float, float]] = {}


def _name() -> str:
    return f"{_place()}.{os.getpid()}.{_started(os.getpid())}"


#: Returns the name of this process, which is read from /proc once.
this_process: PerProcess[str] = PerProcess(_name)


def mark() -> str:
    """The name of this process and a number, which is another one at each call."""
    return f"{this_process()}.{next(_counter)}"


def gone(text: str, touched: float, patience: float, folder: int, beats: bool = False) -> bool:
    """Whether the owner of a file is gone, so that the file may be removed or taken over.

    A process of another host or container cannot be seen. It counts as gone once its file has not been touched for some
    time, by the clock that stamps the file. That may be a file server's, which differs from ours.

    Args:
        text: holds the name of the process: a file's name, or what it contains.
        touched: when the file was last touched (its mtime).
        patience: seconds after which a process that cannot be seen is gone. A time as far in the future counts the
            same, since the server's clock may have been set back.
        folder: descriptor of the file's folder.
        beats: whether owners touch the file all the time. Then a process that is stopped or frozen is gone too.

    Where the clock is needed and cannot be asked, since this user may not touch the folder or it is read-only, the
    owner counts as gone if it beats: nobody can keep such a file fresh either.
    """
    found = _NAME.search(text)
    runs = still_runs(found[0]) if found else None
    if runs is False or (runs and not beats):
        return not runs
    try:
        return abs(_now(folder) - touched) > patience
    except OSError:
        return beats


def _now(folder: int) -> float:
    """The time of the clock that stamps a folder: by touching it, once a second, and extrapolated in between."""
    here = time.clock_gettime(time.CLOCK_BOOTTIME)  # continues while the machine sleeps
    st = os.fstat(folder)
    ahead, asked = _clocks.get((st.st_dev, st.st_ino), (0.0, -math.inf))
    if not asked <= here < asked + 1:
        os.utime(folder)  # to the file server's time
        ahead, asked = os.fstat(folder).st_mtime - here, here
        _clocks[st.st_dev, st.st_ino] = ahead, asked
    return here + ahead


def still_runs(name: str) -> bool | None:
    """Whether the process of a name still runs.

    None if that cannot be determined: a process of another host or container, one that ``/proc`` does not show, or a
    malformed name.
    """
    place = _place()
    if place == _UNKNOWN or not _NAME.fullmatch(name):
        return None
    where, pid, started = name.split(".")
    if where != place:
        return None
    start = _started(pid)
    if start is None and _is_hidden(pid):
        return None
    return start == started


def _found_place() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read(8)
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return _UNKNOWN


#: Returns where pids are unique: this boot of this machine, this pid namespace.
_place: PerProcess[str] = PerProcess(_found_place)


def _started(pid: int | str) -> str | None:
    """When a process started, in clock ticks since boot; None if there is no such process.

    A process that has ended may stay in the table until its parent asks for it, in some containers forever.
    """
    try:
        with open(f"/proc/{pid}/stat") as f:
            state, *fields = f.read().rpartition(")")[2].split()
            return "ended" if state in ("Z", "X") else fields[18]
    except (OSError, IndexError):
        return None


def _is_hidden(pid: str) -> bool:
    """Whether a process exists that /proc does not show: another user's, if it is mounted with hidepid."""
    try:
        os.kill(int(pid), 0)  # sends nothing
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        pass
    return False
