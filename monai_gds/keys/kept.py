"""Files that the items of one pipeline have read in this process, and that no item names.

What one call loads and keeps (``lru_cache``, a lazy model, a late import) is read by the first item only, so such a
file counts for every later item, too: of this pipeline, and of others with a function in common.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from monai_gds import limits
from monai_gds.keys.folder_listing import NAMES
from monai_gds.keys.observed import Observation
from monai_gds.keys.source_names import texts
from monai_gds.keys.sources import Identity


class _Kept(NamedTuple):
    """A file that an item has read."""

    shared: frozenset[str]  # the words that it shares with the items that have read it
    identity: Identity  # what it was then


class KeptReads:
    """Those of one pipeline.

    A file counts for an item that has all words of the file's stem, and all folders above it, that the item has which
    read it: so what one item alone names does not count for others.

    Attributes:
        running: what is being computed, or was interrupted, with the paths that the item names and its words.
    """

    def __init__(self, functions: frozenset[CodeType] = frozenset()) -> None:
        self.running: dict[Observation, tuple[Collection[str], frozenset[str]]] = {}
        self._functions = functions
        self._kept: dict[str, _Kept] = {}

    @classmethod
    def of(cls, pipeline: str, functions: frozenset[CodeType]) -> KeptReads:
        """Those of a pipeline, given its hash and the user's functions in it; new ones if it has no hash."""
        return _all.setdefault(pipeline, cls(functions)) if pipeline else cls(functions)

    def _related(self) -> list[KeptReads]:
        others = [one for one in list(_all.values()) if one is not self and self._functions & one._functions]
        return [self, *others]

    def beside(self, paths: Collection[str], words: frozenset[str], apart: Collection[str]) -> list[str]:
        """The ``paths`` that an item has read, and those that count for it, given its words.

        Files in the folders that are ``apart`` do not count.
        """
        found = set(paths)
        for one in self._related():
            found.update(path for path, kept in list(one._kept.items()) if kept.shared <= words)
            for seen, (named, its) in list(one.running.items()):  # what it has loaded by now may be in use here
                found.update(path for path in seen.paths(named, apart) if its & _words_of_path(path) <= words)
        return sorted(found)

    def keep(
        self, seen: Observation, paths: Collection[str], identities: Mapping[str, Identity], words: frozenset[str]
    ) -> None:
        """Keeps what an item has read."""
        for path in identities.keys() & paths:
            before = self._kept.get(path)
            shared = words & (_words_of_path(path) if before is None else before.shared)
            self._kept[path] = _Kept(shared, identities[path])
            if len(self._kept) > limits.KEPT_READS:  # the one that counts for the fewest items, and came last
                kept = dict(self._kept)
                self._kept.pop(max(reversed(kept), key=lambda path: len(kept[path].shared)), None)
        self.running.pop(seen, None)

    def changed(self, paths: Collection[str], identities: Mapping[str, Identity]) -> str:
        """Describes what changed since an item before read it, given what this one has read; empty if nothing did."""
        kept = [pair for one in self._related() for pair in list(one._kept.items())]
        then = {path: kept.identity for path, kept in kept if path not in paths}
        changed = [path for path, identity in identities.items() if then.get(path, identity) != identity]
        return f"{', '.join(changed[:3])} changed after an item before had read it" if changed else ""


#: Of all pipelines of this process, by their hashes.
_all: dict[str, KeptReads] = {}


def words_of(item: Any) -> frozenset[str]:
    """The words and folders in the texts of an item, and its numbers."""
    return frozenset(word for text in (*texts(item), *_numbers(item)) for word in (*_words(text), *text.split("/")))


def _words_of_path(path: str) -> frozenset[str]:
    *folders, name = path.removesuffix(NAMES).split("/")
    return frozenset((*_words(name.partition(".")[0]), *folders))


def _words(text: str) -> Iterator[str]:
    for word in re.findall(r"[^\W_]+", text):
        yield word.lstrip("0") or "0" if word.isdecimal() else word


def _numbers(value: Any) -> Iterator[str]:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        yield str(int(value))
    elif isinstance(value, (Mapping, list, tuple)):
        for element in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(element)
