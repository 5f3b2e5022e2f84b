"""Files that the items of one pipeline have read in this process, and that no item names.

What one call loads and keeps (``lru_cache``, a lazy model, a late import) is read by the first item only, so such a
file counts for every later item, too: of this pipeline, and of others with a function in common.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np

from monai_gds import limits
from monai_gds.keys.folder_listing import NAMES
from monai_gds.keys.observed import Observation
from monai_gds.keys.source_names import texts
from monai_gds.keys.sources import Identity


@dataclass(slots=True)
class _Kept:
    """A file that an item has read."""

    shared: frozenset[str]  # the words that it shares with the items that have read it
    identity: Identity  # what it was then
    at: int  # how many items had been computed
    again: bool = False  # whether an item that began afterwards has read it again
    counts: bool = False  # whether it has counted for an item that has not read it


class KeptReads:
    """Those of one pipeline.

    A file counts for an item that has all words of the file's stem, and all folders above it, that the item has which
    read it: so what one item alone names does not count for others.

    Attributes:
        computed: how many items were computed.
        running: what is being computed, or was interrupted, with the paths that the item names and its words.
    """

    def __init__(self, functions: frozenset[CodeType] = frozenset()) -> None:
        self.computed = 0
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

    def beside(
        self,
        paths: Collection[str],
        words: frozenset[str],
        began: int,
        identify: Callable[[str], Identity | None],
        apart: Collection[str],
    ) -> list[str]:
        """The paths that an item has read, and those that count for it.

        Args:
            paths: what it has read.
            words: its words.
            began: how many items had been computed when it began.
            identify: gives the identity of a path.
            apart: folders whose files do not count.
        """
        found = set(paths)
        for one in self._related():
            for path, kept in list(one._kept.items()):
                if path in paths:
                    kept.again = kept.again or (one is self and began >= kept.at)
                elif kept.again and one is not self:
                    pass  # read again whenever it is needed,
                elif kept.again and identify(path) != kept.identity:
                    one._kept.pop(path, None)  # so this item did without it
                elif kept.shared <= words:
                    kept.counts = True
                    found.add(path)
            for seen, (named, its) in list(one.running.items()):  # what it has loaded by now may be in use here
                found.update(path for path in seen.paths(named, apart) if its & _words_of_path(path) <= words)
        return sorted(found)

    def keep(
        self, seen: Observation, paths: Collection[str], identities: Mapping[str, Identity], words: frozenset[str]
    ) -> None:
        """Keeps what an item has read, and counts the item."""
        self.computed += 1
        for path in identities.keys() & paths:
            before = self._kept.get(path)
            if before is None and len(self._kept) >= limits.KEPT_READS:  # for one that only its own item needs
                self._kept.pop(next((p for p, kept in list(self._kept.items()) if not kept.counts), ""), None)
            if before is not None or len(self._kept) < limits.KEPT_READS:
                shared = words & (_words_of_path(path) if before is None else before.shared)
                flags = (False, False) if before is None else (before.again, before.counts)
                self._kept[path] = _Kept(shared, identities[path], self.computed, *flags)
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
