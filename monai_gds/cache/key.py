"""The key: under which name an item's record lies, and what went into it.

A key covers the item, the deterministic transforms, MONAI's version, and size and mtime of every file that the item
names (of a folder, as in DICOM, its listing). The dataset gives the first two as hashes; the files are looked at here,
on every access, so that a volume that was edited is never served stale.
"""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import monai
import numpy as np

from monai_gds.errors import HashingError

__all__ = ["Key", "KeyMaker", "hash_text", "source_stat", "strings"]

#: What is known of a source file: (size, mtime_ns); of a folder, (entries, a hash of their names, sizes and mtimes).
Stat = tuple[int, int]

_PLAIN = frozenset({str, int, float, bool, type(None), bytes, complex})

#: Items whose hash is remembered: at most about 24 MB. A hash costs 40 us.
_MOST_SEEN = 40_000


@dataclass(frozen=True, slots=True)
class Key:
    """Name and ingredients of one record.

    Attributes:
        digest: 32 hex digits.
        item: hash of the item.
        transform: hash of the deterministic transforms, empty when they are no part of the key.
        sources: ``{path: (size, mtime_ns)}`` of the files that the item names.
    """

    digest: str
    item: str
    transform: str
    sources: dict[str, Stat]

    def ingredients(self) -> dict[str, Any]:
        """What the record stores of its key, JSON-able.

        Paths are stored absolute: who looks after the cache stands in another folder. The digest has them as given.
        """
        sources = {_absolute(path): list(stat) for path, stat in self.sources.items()}
        return {"item": self.item, "transform": self.transform, "monai": monai.__version__, "sources": sources}


def _absolute(path: str) -> str:
    """Not ``os.path.abspath``: behind a link, the ``..`` that it takes away leads elsewhere."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


class KeyMaker:
    """Makes keys for the items of one dataset.

    Args:
        hash_func: item -> hash as bytes, as MONAI's ``hash_func``.
        transform: hash of the deterministic transforms, or empty.
        hash_sources: whether size and mtime of the files that an item names are part of its key.
    """

    def __init__(self, hash_func: Callable[[Any], bytes], transform: str, hash_sources: bool) -> None:
        self._hash_func = hash_func
        self._transform = transform
        self._hash_sources = hash_sources
        self._seen: dict[bytes, _Seen] = {}

    def __call__(self, item: Any) -> Key:
        """The key of an item.

        Raises:
            HashingError: the item holds something without a stable content.
        """
        seen = self._look(item)
        sources, stats = {}, []
        for i, path in enumerate(seen.paths):
            stat = source_stat(path)
            if stat is not None:
                sources[path] = stat
                stats.append((i, stat))  # paths are in the item's hash already: their places are enough here
        if stats:
            return self._key(seen.hash, sources, stats)
        if seen.key is None:
            seen.key = self._key(seen.hash, {}, [])
        return seen.key

    def _key(self, item_hash: str, sources: dict[str, Stat], stats: list[tuple[int, Stat]]) -> Key:
        parts = (item_hash, self._transform, monai.__version__, stats)
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
        return Key(digest, item_hash, self._transform, sources)

    def _look(self, item: Any) -> _Seen:
        """What does not depend on the files that an item names.

        An item of plain values is hashed once and recognised by its serialised value, not by its identity: a list of
        dicts may be changed in place.
        """
        if not _is_plain(item):  # marshal would take an array for its bytes, without dtype and shape
            return self._hash(item)
        fingerprint = marshal.dumps(item, 2)  # version 2 writes values only, no references
        found = self._seen.get(fingerprint)
        if found is None:
            found = self._hash(item)
            if len(self._seen) < _MOST_SEEN:
                self._seen[fingerprint] = found
        return found

    def _hash(self, item: Any) -> _Seen:
        paths = tuple(dict.fromkeys(strings(item))) if self._hash_sources else ()
        return _Seen(hash_text(self._hash_func(item), "hash_func"), paths)


def hash_text(found: Any, name: str) -> str:
    """What a user's hash function returned, as text.

    Args:
        found: bytes, as MONAI's hash functions return.
        name: of the argument that the function is.

    Raises:
        HashingError: it is anything else.
    """
    if not isinstance(found, bytes):
        raise HashingError(f"{name} returned a {type(found).__name__}: it has to return bytes, a hash as text in UTF-8")
    return found.decode("utf-8")


class _Seen:
    """What is remembered of an item: its hash, the strings in it that may name files, its key if none of them does."""

    __slots__ = ("hash", "key", "paths")

    def __init__(self, item_hash: str, paths: tuple[str, ...]) -> None:
        self.hash = item_hash
        self.paths = paths
        self.key: Key | None = None


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return _all_plain(value) and _all_plain(value.values())
    return kind in _PLAIN or (kind in (list, tuple) and _all_plain(value))


def _all_plain(values: Collection[Any]) -> bool:
    return _PLAIN.issuperset(map(type, values)) or all(map(_is_plain, values))


def strings(value: Any) -> Iterator[str]:
    """Every string and path among the values of an item, nested ones too."""
    if isinstance(value, str):
        if 0 < len(value) < 4096 and "\0" not in value:
            yield value
    elif isinstance(value, pathlib.PurePath):
        yield str(value)
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from strings(v)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for v in value:
            yield from strings(v)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "UO":
        yield from strings(value.ravel().tolist())


def source_stat(path: str) -> Stat | None:
    """Size and mtime of a file, or what stands for them of a folder; None where there is neither."""
    try:
        st = os.stat(path)
    except (OSError, ValueError):
        return None
    if (st.st_mode & 0o170000) == 0o100000:
        return st.st_size, st.st_mtime_ns
    if (st.st_mode & 0o170000) == 0o040000:
        return _listing(path)
    return None


def _listing(path: str) -> Stat:
    entries = []
    with contextlib.suppress(OSError), os.scandir(path) as found:  # no permission to list it: an empty listing
        for entry in found:
            try:
                st = entry.stat()
            except OSError:  # a dead link, or it vanished meanwhile
                entries.append((entry.name, -1, 0))
            else:
                entries.append((entry.name, st.st_size, st.st_mtime_ns))
    digest = hashlib.blake2b(repr(sorted(entries)).encode("utf-8", "surrogatepass"), digest_size=7).digest()
    return len(entries), int.from_bytes(digest, "little")
