"""The table of mounted file systems, /proc/self/mountinfo. Used by the block map and the doctor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mount", "mounts"]


class Mount(NamedTuple):
    """A mounted file system, as described in proc(5).

    Attributes:
        id: the kernel's number of this mount.
        number: ``major:minor`` of its device; ``0:…`` if it has none.
        point: where it is mounted.
        kind: ``ext4``, ``xfs``, ``tmpfs``…
        source: what is mounted, often a device node.
        options: of the mount and of the file system, separated by commas.
    """

    id: str
    number: str
    point: str
    kind: str
    source: str
    options: str


def mounts(proc: Path) -> Iterator[Mount]:
    """All mounts in the kernel's order. Where two share a mount point, the later one is visible."""
    for line in (proc / "self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        number, _, number_of_device, _, point, own, *_ = left.split(" ")
        kind, source, rest = right.split(" ", 2)
        options = f"{own},{rest.split(' ')[-1]}"
        yield Mount(number, number_of_device, _unescape(point), kind, _unescape(source), options)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)  # a space is \040
