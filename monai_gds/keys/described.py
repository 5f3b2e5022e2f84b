"""What a walk over values notes beside their hash: a description, the texts and the devices it meets.

Used by :mod:`monai_gds.keys.hashing` and :mod:`monai_gds.keys.code`. Does not import torch, which sources do not need.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

_DEVICE = "cpu|cuda|mps|xpu"
_DEVICE_NAMES = frozenset({"device", "devices"})


def join(parts: Iterable[bytes]) -> bytes:
    """The digest of several parts, 16 bytes."""
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.digest()


class Described:
    """What one walk notes. The arguments are those of :class:`~monai_gds.keys.hashing.Values`.

    Attributes:
        description: ``{attribute path: short text}`` of everything that counts; None if it is not wanted.
        strings: every string met, except in transforms that write files.
        devices: the types of the devices named, such as ``"cuda"``.
        requires_grad: whether a tensor requires a gradient.
        writes_files: greater than 0 inside a transform that writes the files it names.
    """

    def __init__(self, *, exact: bool, describes: bool) -> None:
        self._exact = exact
        self.description: dict[str, str] | None = {} if describes else None
        self.strings: set[str] = set()
        self.devices: set[str] = set()
        self.requires_grad = False
        self.writes_files = 0

    def describe(self, where: str, text: str) -> None:
        """Notes what is at an attribute path."""
        if self.description is not None:
            self.description[where] = text

    def describe_library(self, library: bytes) -> None:
        """Notes the version of a library that something is from."""
        name, _, version = library.decode().partition(" ")
        if version:
            self.describe(f"library {name}", version)

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Suspends the description. Strings are still collected."""
        kept, self.description = self.description, {} if self.description is not None else None
        try:
            yield
        finally:
            self.description = kept

    def is_device(self, name: Any, value: Any) -> bool:
        """Whether this is a transform's device, which does not count: another device gives the same item."""
        if self._exact or not isinstance(name, str) or name not in _DEVICE_NAMES or not _names_device(value):
            return False
        self.devices.update(re.findall(_DEVICE, str(value)))
        return True


def _names_device(value: Any) -> bool:
    """Whether a value names torch devices. Anything else called ``device``, such as a scanner, counts."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_names_device, value))
    if value is None or (type(value).__module__, type(value).__name__) == ("torch", "device"):
        return True
    return isinstance(value, str) and re.fullmatch(rf"({_DEVICE})(:\d+)?", value) is not None
