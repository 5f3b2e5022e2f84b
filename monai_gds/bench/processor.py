"""What the clocks of a benchmark need: the end of a device's work, and processor time."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch


def synchronize(device: torch.device) -> None:
    """Waits until a device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cpu_seconds() -> float:
    """Processor time that this process has used so far, and all processes that it or they started, ended ones too.

    Its own is exact, and that of the others in ticks of 10 ms.
    """
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()  # a name may hold spaces
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    family, added = set[int](), {os.getpid()}
    while added:
        family |= added
        added = {pid for pid, parent in parents.items() if parent in added}
    others = sum(ticks.get(pid, 0) for pid in family - {os.getpid()}) / os.sysconf("SC_CLK_TCK")
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system + others
