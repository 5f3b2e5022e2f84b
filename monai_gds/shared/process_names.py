"""Names for processes in files, by which other processes can tell whether they still run.

A name is ``<boot>-<pid namespace>.<pid>.<start time>``: no two processes ever have the same.
"""

from __future__ import annotations

import os
import re

from monai_gds.base.process import PerProcess

__all__ = ["FOREIGN_SECONDS", "PATTERN", "still_runs", "this_process"]

#: The first part of a name on a machine that does not reveal its boot or pid namespace.
_UNKNOWN = "unknown"

#: Regular expression for a name.
PATTERN = rf"(?:[0-9a-f]{{8}}-[0-9]+|{_UNKNOWN})\.[0-9]+\.(?:[0-9]+|None)"
_NAME = re.compile(PATTERN)

#: How long, in seconds, a file is left alone whose writer cannot be checked from here (another host or container).
FOREIGN_SECONDS = 3600


def _name() -> str:
    return f"{_place()}.{os.getpid()}.{_started(os.getpid())}"


#: Returns the name of this process, which is read from /proc once.
this_process: PerProcess[str] = PerProcess(_name)


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


def _place() -> str:
    """Where pids are unique: this boot of this machine, this pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read(8)
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return _UNKNOWN


def _started(pid: int | str) -> str | None:
    """When a process started, in clock ticks since boot; None if there is no such process.

    A process that has ended may stay in the table until its parent asks for it, in some containers for ever.
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
