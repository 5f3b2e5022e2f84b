"""Sizes and times as users write them, and groups of what has a size. Imports only the standard library."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_BYTES = {
    "": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SECONDS = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def bytes_of(size: float | str, argument: str, least: int = 0) -> int:
    """The number of bytes that a user's argument names.

    Args:
        size: a number, or one with a unit.
        argument: the name of the argument, for errors.
        least: the smallest number that makes sense.

    Raises:
        ValueError: it is neither, or too small.

    Example:
        >>> bytes_of("20GB", "device_bytes"), bytes_of(1e9, "device_bytes")
        (20000000000, 1000000000)
    """
    if isinstance(size, float) and 0 < size < 1:
        raise ValueError(
            f"{argument}={size!r} is less than a byte, and a share of a drive is not meant: give a number of bytes, or "
            "one with a unit: 20e9, '20GB' or '18GiB'"
        )
    try:
        text = size if isinstance(size, str) else f"{size:.0f}"
        found = re.fullmatch(r"\s*([0-9.]+(?:[eE]\+?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        if found is None:
            raise ValueError
        nbytes = int(float(found[1]) * _BYTES[found[2].upper()])
        if nbytes < least:
            raise ValueError
        return nbytes
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{argument}={size!r}: it must be a {'positive ' * bool(least)}number of bytes, or one with a unit: 20e9, "
            "'20GB' or '18GiB'"
        ) from None


def shown(nbytes: int) -> str:
    """A number of bytes for messages.

    Example:
        >>> shown(500 * 10**9), shown(1_500_000)
        ('500.0 GB', '1.5 MB')
    """
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def seconds_of(span: str) -> float:
    """The number of seconds of a span of time.

    Raises:
        ValueError: it is not a number with a unit.

    Example:
        >>> seconds_of("36h"), seconds_of("2w")
        (129600.0, 1209600.0)
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([hdw])\s*", span)
    if found is None:
        raise ValueError(f"{span!r} is not a span of time: use a number of hours, days or weeks: 36h, 30d, 2w")
    return float(found[1]) * _SECONDS[found[2]]


def in_groups(members: Iterable[T], size: Callable[[T], int], most: int, most_bytes: int) -> Iterator[list[T]]:
    """Divides members into groups of neighbours: at most so many, of so many bytes together, unless one has more."""
    group: list[T] = []
    nbytes = 0
    for member in members:
        if group and (len(group) == most or nbytes + size(member) > most_bytes):
            yield group
            group, nbytes = [], 0
        group.append(member)
        nbytes += size(member)
    if group:
        yield group
