"""The costs of a cache: processor time, bytes read from the disk, bytes on it. For :mod:`.measured`."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Costs", "per_item", "sizes", "spent"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What this process used, in all its threads.

    Attributes:
        cpu: processor time in seconds, user and system.
        disk: bytes that the kernel read from a disk for it, including read-ahead; None if the kernel does not count.
    """

    cpu: float
    disk: int | None

    def __sub__(self, other: Costs) -> Costs:
        disk = None if self.disk is None or other.disk is None else self.disk - other.disk
        return Costs(self.cpu - other.cpu, disk)


def spent() -> Costs:
    """The costs since the process began."""
    try:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return Costs(time.process_time(), int(counts["read_bytes"]))
    except (OSError, KeyError):
        return Costs(time.process_time(), None)


def per_item(costs: Sequence[Costs], items: int, cold: bool) -> dict[str, str]:
    """The medians of some epochs' costs, by headings of a table.

    Args:
        costs: what each epoch used.
        items: how many items an epoch has.
        cold: whether the page cache was empty before each, so that something must have come from the disk.
    """
    notes = {"CPU ms per item": f"{1e3 * statistics.median(cost.cpu for cost in costs) / items:.1f}"}
    if cold:
        disk = statistics.median(cost.disk or 0 for cost in costs) / items
        # Some file systems, and those in memory, are not counted.
        notes["MB read per item"] = f"{disk / 1e6:.2f}" if disk else "not counted here"
    return notes


def sizes(files: Iterable[Path], keys: Sequence[str], nbytes: int) -> dict[str, str]:
    """How much smaller a cache is than its results, by headings of a table.

    Args:
        files: the files of the cache.
        keys: name tensors of equal sizes. Each is also shown alone, if the files' names or headers name it.
        nbytes: bytes of all results together.
    """
    files = list(files)
    notes = {"size": f"÷ {nbytes / sum(path.stat().st_size for path in files):.1f}"}
    for key in keys if len(keys) > 1 else ():
        if stored := sum(_bytes_of(key, path) for path in files):
            notes[f"{key} alone"] = f"÷ {nbytes / len(keys) / stored:.1f}"
    return notes


def _bytes_of(key: str, path: Path) -> int:
    """Bytes that a file has for a key, with its tables (``__tiles.<key>``); 0 if the file does not show them."""
    if path.stem == key:
        return path.stat().st_size
    if path.suffix != ".safetensors":
        return 0
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    places = (entry["data_offsets"] for name, entry in header.items() if name.rpartition(".")[2] == key)
    return sum(end - begin for begin, end in places)
