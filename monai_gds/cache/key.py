"""The key: under which name an item's record lies, and what went into it.

A key covers the item, the deterministic transforms, the process's settings that change results, MONAI's version, and
the content of every source file. The dataset gives the pipeline with its state; the item and the files are looked at
here, on every access, so that a volume that was edited is never served stale.

:meth:`Key.parts` is exactly what is digested. The record stores it, and a reader digests it again: a record that lies
under another name than its own is not believed.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from monai_gds.cache.hashing import canonical_hash, hash_item
from monai_gds.cache.header import digest_of
from monai_gds.cache.rooted import below
from monai_gds.cache.sources import Identity, Sources, absolute, candidates
from monai_gds.errors import HashingError

__all__ = ["Key", "KeyMaker", "Pipeline", "hash_text"]

#: First of the parts: a change of what the others mean gives another one.
_FORMAT = "monai_gds 2"

_PLAIN = frozenset({str, int, float, bool, type(None), bytes, complex})

#: Items whose hash is remembered: at most about 24 MB. A hash costs 40 us.
_MOST_SEEN = 40_000

#: Items whose last key is remembered too: at most about 5 MB. To make one again costs 8 us.
_MOST_KEYS = 10_000


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What all keys of one pipeline share.

    Attributes:
        transforms: hash of the deterministic transforms, empty when they are not part of the key.
        monai: MONAI's version as far as it counts, empty when it does not.
        state: settings of the process that differ from their defaults, ``(name, value)`` each.
        root: the data root that keys and records are relative to, without a slash at its end; None: paths are absolute.
        description: what the transforms are made of, ``{attribute path: short text}``.
        files: files that the transforms name.
    """

    transforms: str = ""
    monai: str = ""
    state: tuple[tuple[str, str], ...] = ()
    root: str | None = None
    description: dict[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    def parts(self, item: str, sources: list[list[Any]]) -> list[Any]:
        """What is digested, JSON-able, for an item's hash and its sources, ``[name, size, content]`` each."""
        state = [list(pair) for pair in self.state]
        return [_FORMAT, item, self.transforms, self.monai, state, sources, self.root is not None]

    @property
    def digest(self) -> str:
        """Tells records of this pipeline and state from others: 32 hex digits; empty where transforms do not count."""
        return digest_of(self.parts("", [])) if self.transforms else ""

    def describe(self) -> dict[str, str]:
        """The description with what counts besides the transforms."""
        state = {f"state.{name}": value for name, value in self.state}
        rooted = {"root": "given"} if self.root is not None else {}
        return {**self.description, "monai": self.monai or "any", **state, **rooted}


@dataclass(frozen=True, slots=True)
class Key:
    """Name and ingredients of one record.

    Attributes:
        digest: 32 hex digits.
        item: hash of the item.
        pipeline: what computes it.
        paths: the sources, absolute.
        identities: of each source, or None where there is neither a file nor a folder.
    """

    digest: str
    item: str
    pipeline: Pipeline
    paths: tuple[str, ...] = ()
    identities: tuple[Identity | None, ...] = ()

    @property
    def sources(self) -> dict[str, Identity]:
        """The sources that are there, by absolute path."""
        pairs = zip(self.paths, self.identities, strict=True)
        return {path: identity for path, identity in pairs if identity is not None}

    def parts(self) -> list[Any]:
        """What is digested, JSON-able."""
        return _parts(self.item, self.pipeline, self.paths, self.identities)

    def changes(self, later: Key) -> str:
        """What changed until the same item's key was made again, in words; empty when nothing did."""
        if later.digest == self.digest:
            return ""
        pairs = zip(self.paths, self.identities, later.identities, strict=False)
        changed = [path for path, before, now in pairs if before != now]
        if changed:
            named = [path for path in changed if path in self.pipeline.files]
            hint = ". Transforms name it: if one of them writes it, leave it out of the key by __cache_key__"
            return f"{', '.join(changed[:3])} changed{hint if named else ''}"
        if later.pipeline.state != self.pipeline.state:
            return f"settings of the process changed from {dict(self.pipeline.state)} to {dict(later.pipeline.state)}"
        return "the item or the transforms changed"

    def ingredients(self) -> dict[str, Any]:
        """What the record stores of its key, JSON-able: the parts, and for looking after the cache what they hide."""
        return {
            "parts": self.parts(),
            "item": self.item,
            "pipeline": self.pipeline.digest,
            "monai": self.pipeline.monai,
            "sources": {path: [identity.size, identity.content] for path, identity in self.sources.items()},
        }


def _parts(item: str, pipeline: Pipeline, paths: Sequence[str], identities: Sequence[Identity | None]) -> list[Any]:
    named = []
    for path, identity in zip(paths, identities, strict=True):
        if identity is not None:
            rest = None if pipeline.root is None else below(path, pipeline.root)
            named.append([path if rest is None else f"<root>{rest}", identity.size, identity.content])
    return pipeline.parts(item, sorted(named))  # by the names as they count, whatever the root is


class KeyMaker:
    """Makes keys for the items of one dataset.

    Args:
        hash_func: item -> hash as bytes, as MONAI's ``hash_func``.
        sources: tells what files are.
        loaded: keys of an item under which a transform loads files, so that any string there names a source; ``"all"``
            for items that are nothing else.
        root: see :class:`Pipeline`.
    """

    def __init__(
        self,
        hash_func: Callable[[Any], bytes] = canonical_hash,
        sources: Sources | None = None,
        loaded: Collection[str] | Literal["all"] = (),
        root: str | None = None,
    ) -> None:
        self._hash_func = hash_func
        self._sources = sources or Sources(None, None)
        self._loaded = loaded
        self._root = root
        self._seen: dict[bytes, _Seen] = {}
        self._keys = 0  # how many of them keep their key

    def __call__(self, item: Any, pipeline: Pipeline) -> Key:
        """The key of an item.

        Raises:
            HashingError: the item holds something without a stable content.
        """
        seen = self._look(item)
        paths = seen.absolute()
        identities = tuple(map(self._sources.identity, paths, seen.folders))
        if pipeline.files:
            files = tuple([path for path in pipeline.files if path not in paths])
            paths = (*paths, *files)
            identities = (*identities, *[self._sources.identity(path, False) for path in files])
        known = seen.key
        if known is not None and known.pipeline is pipeline and known.identities == identities and known.paths == paths:
            return known
        made = Key(digest_of(_parts(seen.hash, pipeline, paths, identities)), seen.hash, pipeline, paths, identities)
        if known is not None or self._keys < _MOST_KEYS:
            self._keys += known is None
            seen.key = made
        return made

    def flush(self) -> None:
        """Writes down what was learned of sources, for other processes."""
        self._sources.flush()

    def _look(self, item: Any) -> _Seen:
        """What does not depend on the files that an item names.

        An item of plain values is hashed once and recognised by its serialised value, not by its identity: a list of
        dicts may be changed in place. A hash function of the user's is asked every time: it may look at files.
        """
        # marshal would take an array for its bytes, without dtype and shape
        if self._hash_func is not canonical_hash or not _is_plain(item):
            return self._hash(item)
        fingerprint = marshal.dumps(item, 2)  # version 2 writes values only, no references
        found = self._seen.get(fingerprint)
        if found is None:
            found = self._hash(item)
            if len(self._seen) < _MOST_SEEN:
                self._seen[fingerprint] = found
        return found

    def _hash(self, item: Any) -> _Seen:
        if self._hash_func is canonical_hash:
            found = hash_item(item, self._root)
        else:
            found = hash_text(self._hash_func(item), "hash_func")
        return _Seen(found, candidates(item, self._loaded))


def hash_text(found: Any, name: str) -> str:
    """The text that a user's hash function returned.

    Args:
        found: bytes, as MONAI's hash functions return.
        name: of the argument that the function is.

    Raises:
        HashingError: it is anything else.
    """
    if not isinstance(found, bytes):
        raise HashingError(f"{name} returned a {type(found).__name__}: it has to return bytes, a hash as text in UTF-8")
    return found.decode("utf-8")


#: Tuples that many items share.
_interned: dict[tuple[bool, ...], tuple[bool, ...]] = {}


class _Seen:
    """What is remembered of an item: its hash, the strings in it that may name files, and its last key."""

    __slots__ = ("_is_absolute", "_paths", "folders", "hash", "key")

    def __init__(self, item_hash: str, strings: Sequence[tuple[str, bool]]) -> None:
        self.hash = item_hash
        self.key: Key | None = None
        self._paths = tuple([path for path, _ in strings])
        folders = tuple([folders for _, folders in strings])
        self.folders = _interned.setdefault(folders, folders)  # whether each may be a folder
        self._is_absolute = all(map(os.path.isabs, self._paths))  # "~/ct.nii" is not, and means another file elsewhere

    def absolute(self) -> tuple[str, ...]:
        """The paths; relative ones lead elsewhere from another working directory."""
        if self._is_absolute:
            return self._paths
        return tuple(map(absolute, self._paths))


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return _all_plain(value) and _all_plain(value.values())
    return kind in _PLAIN or (kind in (list, tuple) and _all_plain(value))


def _all_plain(values: Collection[Any]) -> bool:
    return _PLAIN.issuperset(map(type, values)) or all(map(_is_plain, values))
