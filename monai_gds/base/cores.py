"""Which processors this process may use, and which of them are near a GPU.

``os.cpu_count`` counts those of the machine. A container or a job of a cluster has fewer: by its affinity (cpusets,
Slurm), or by its control group's quota of their time (``docker --cpus``, limits of Kubernetes), beyond which the kernel
stops its threads until the next period. Only files of the kernel below ``ROOT`` are read.

Files: Documentation/admin-guide/cgroup-v2.rst (cpu.max), scheduler/sched-bwc.rst (cpu.cfs_quota_us), and
ABI/testing/sysfs-bus-pci (local_cpulist) of Linux.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from monai_gds.base.file_systems import mounts

#: Where the files of the kernel are. Tests lay out another machine in a folder.
ROOT = Path("/")

#: Files of a control group with its quota and the period that this is of, in version 2 and in version 1.
_QUOTAS = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def usable() -> int:
    """How many processors' worth of time this process may use at once, rounded up. For numbers of threads."""
    return math.ceil(min(len(allowed()), quota(ROOT)))


def allowed() -> frozenset[int]:
    """The processors of this process's affinity: of its main thread, since others may have been kept on fewer."""
    return frozenset(os.sched_getaffinity(os.getpid()))


def quota(root: Path) -> float:
    """How many processors' worth of time its control groups allow this process; infinite without a limit."""
    with suppress(OSError, ValueError):
        return min(map(_quota_of, _groups(root)), default=math.inf)
    return math.inf


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups, and of those above, for version 2 and for version 1's ``cpu``.

    In a container without a namespace of its own, a group has the name that it has on the host. Then only the mount's
    own folder exists, which is the container's.
    """
    groups = [line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines()]
    for mount in mounts(root / "proc"):
        is_first = mount.kind == "cgroup" and "cpu" in mount.options.split(",")
        for controllers, name in groups:
            if "cpu" in controllers.split(",") if is_first else mount.kind == "cgroup2" and not controllers:
                top = root / mount.point.lstrip("/")
                group = top / name.lstrip("/")
                yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _quota_of(group: Path) -> float:
    for files in _QUOTAS:
        with suppress(OSError, ValueError):  # there are no such files, or "max" in them
            quota, period = (int(number) for name in files for number in (group / name).read_text().split())
            if quota > 0:
                return quota / period
    return math.inf


def near(pci: str, root: Path) -> frozenset[int]:
    """The processors on the NUMA node of a PCI device, ``0000:17:00.0`` for instance; empty if that is unknown."""
    found: set[int] = set()
    with suppress(OSError, ValueError):
        for part in (root / "sys/bus/pci/devices" / pci / "local_cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def stay_on(processors: Collection[int]) -> None:
    """Keeps the calling thread, and the threads that it starts, on these processors, unless there are none."""
    with suppress(OSError):  # none, or none that it may use any more
        os.sched_setaffinity(0, processors)


@contextmanager
def staying_on(processors: Collection[int]) -> Iterator[None]:
    """As :func:`stay_on`, within the block."""
    before = processors and os.sched_getaffinity(0)
    stay_on(processors)
    try:
        yield
    finally:
        stay_on(before)
