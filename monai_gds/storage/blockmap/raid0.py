"""Linux md RAID0: which bytes of an array lie where on its members.

Chunks go round the members in turn. Where members differ in size, an array has zones: the first has all members, as far
as the smallest reaches, and each further one those that are larger. In later zones, two layouts count the turns from
different chunks.

Formats: drivers/md/raid0.c and drivers/md/md.c of Linux; sysfs, Documentation/admin-guide/md.rst.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

D = TypeVar("D")

#: Values of ``layout``: turns are counted from the first chunk of the array, or of the zone.
ORIGINAL, ALTERNATE = 1, 2


@dataclass(frozen=True)
class Part:
    """An array's data on one of its members."""

    start: int  # their first byte on the whole disk
    nbytes: int  # how many there are, in whole chunks


class _Zone(NamedTuple):
    start: int  # first byte of the array
    level: int  # bytes of each member's data before it
    members: list[int]


@dataclass(frozen=True)
class Raid0:
    """An array. Raises ValueError if no array is like that, or its layout is not certain."""

    chunk: int  # bytes that lie on one member before it is the next one's turn
    layout: int  # see the module; of no meaning where all members have one size
    parts: tuple[Part, ...]  # of each member, in their order

    def __post_init__(self) -> None:
        sizes = {part.nbytes for part in self.parts}
        if not sizes or self.chunk < 1 or any(size < self.chunk or size % self.chunk for size in sizes):
            raise ValueError(f"its members do not hold whole chunks of {self.chunk} bytes")
        if len(sizes) > 1 and self.layout not in (ORIGINAL, ALTERNATE):
            raise ValueError(
                f"its members differ in size, and its layout, {self.layout}, is not one of those that Linux 5.4 and "
                "later write down: `mdadm --assemble --update=layout-original` (or -alternate) does"
            )

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @cached_property
    def _zones(self) -> list[_Zone]:
        zones: list[_Zone] = []
        start = level = 0
        for size in sorted({part.nbytes for part in self.parts}):
            members = [number for number, part in enumerate(self.parts) if part.nbytes > level]
            zones.append(_Zone(start, level, members))
            start, level = start + (size - level) * len(members), size
        return zones

    def pieces(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Where bytes of the array lie, in their order: number of the member, first byte on its disk, how many."""
        end = start + nbytes
        while start < end:
            zone = self._zones[bisect_right(self._zones, start, key=lambda zone: zone.start) - 1]
            chunk, inside = divmod(start, self.chunk)
            within = (start - zone.start) // self.chunk
            turn = within if self.layout == ALTERNATE else chunk
            member, count = zone.members[turn % len(zone.members)], min(self.chunk - inside, end - start)
            row = within // len(zone.members)
            yield member, self.parts[member].start + zone.level + row * self.chunk + inside, count
            start += count


def array_in(folder: Path, whole: Callable[[Path], tuple[D, int]]) -> tuple[Raid0, tuple[D, ...]]:
    """The array that the folder ``md`` of a block device in sysfs describes, and the disks of its members.

    ``whole`` returns the whole disk of a block device in sysfs, and where the device begins on it. Raises ValueError if
    it is not a RAID0, or if where its bytes lie is not certain; the message says why.
    """

    def number(name: str) -> int:
        return int((folder / name).read_text())  # ValueError also while the array is reshaped: "4 (5)"

    if (level := (folder / "level").read_text().strip()) != "raid0":
        raise ValueError(f"it is {level or 'not assembled'}, and only in raid0 every byte has one place")
    chunk, slots = number("chunk_size"), dict[int, tuple[D, Part]]()
    for device in sorted(folder.glob("dev-*")):
        disk, start = whole((device / "block").resolve())
        nbytes = number(f"{device.name}/size") * 1024
        part = Part(start + number(f"{device.name}/offset") * 512, nbytes - nbytes % max(chunk, 1))
        slots[number(f"{device.name}/slot")] = disk, part
    if sorted(slots) != list(range(number("raid_disks"))):
        raise ValueError(f"it has {number('raid_disks')} members, and sysfs shows those of slots {sorted(slots)}")
    disks, parts = zip(*(slots[slot] for slot in sorted(slots)), strict=True)
    return Raid0(chunk, number("layout"), parts), disks
