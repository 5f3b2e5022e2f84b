"""The key of an item: the name of its record, and what went into that name. Everything that changes an item is in it.

A key is the digest of these ingredients, which the dataset collects in :mod:`dataset.item_keys`:

item        hash of the item's values: :func:`keys.hashing.hash_item`. Not in it: columns that no transform touches
            (:mod:`pipeline.columns`), the order of dicts, strides, and whether two values are one object.
transforms  hash of the deterministic transforms, values and code, and of the settings of their ``Compose``:
            :func:`keys.hashing.hash_transforms`. Code of the user's counts with all that it reads (:mod:`keys.code`), a
            library's by name and version (:mod:`keys.libraries`). Not in it: devices, random states, comments.
monai       MONAI's version, as far as the option ``monai_version`` says: :func:`keys.libraries.version_of_monai`.
state       what differs from its default: settings of the process (tables in :mod:`pipeline.settings`), and what the
            user gave the dataset, ``mantissa_bits`` and ``version``.
sources     path below the root, size and content of files: :class:`keys.sources.Sources`. Which ones: those that the
            item or a transform names (:mod:`keys.source_names`), and those that were read while the item was computed
            (:mod:`keys.observed`), or by an item before and kept (:mod:`keys.kept`). Not in it: times and owners.
root        whether a root was given, below which paths count by what follows it.
format      changes whenever the meaning of the others does.

Nothing else is in it: not the target, the backend, compression, tiles, workers, or the place of the cache.

Which further files an item reads is known when it has been computed. So a lookup has two steps: the ingredients
without them give a name, under which lists of such files are noted (:mod:`folder.reads`), and those of a list with
them the record's digest.

:meth:`Key.parts` is exactly what is digested. The record stores it, and readers digest it again, so a record under the
wrong name is refused.
"""

from __future__ import annotations

import contextlib
import marshal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import xxhash

from monai_gds import limits
from monai_gds.base.names import below, digest_of
from monai_gds.errors import HashingError
from monai_gds.keys.hashing import canonical_hash, hash_item
from monai_gds.keys.source_names import absolute, candidates
from monai_gds.keys.sources import Identity, Sources

#: The first part. Changes whenever the meaning of the others does.
FORMAT = "monai_gds 4"

_PLAIN = frozenset({str, int, float, bool, type(None), bytes, complex})


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What all keys of one pipeline share."""

    transforms: str = ""  # hash of the deterministic transforms; empty if they are not part of the key
    monai: str = ""  # MONAI's version as far as it counts; empty if it does not
    # Settings of the process that differ from their defaults, ``(name, value)`` each.
    state: tuple[tuple[str, str], ...] = ()
    # The data root that keys and records are relative to, without a trailing slash. With None, paths are absolute.
    root: str | None = None
    # Of the transforms, ``{attribute path: short text}``.
    description: dict[str, str] = field(default_factory=dict, hash=False)
    files: tuple[str, ...] = ()  # files that the transforms name

    def parts(self, item: str, sources: list[list[Any]]) -> list[Any]:
        """The parts that are digested, JSON-able, given an item's hash and its sources ``[name, size, content]``."""
        state = [list(pair) for pair in self.state]
        return [FORMAT, item, self.transforms, self.monai, state, sources, self.root is not None]

    @property
    def digest(self) -> str:
        """32 hex digits that identify this pipeline and state; empty if transforms do not count."""
        return digest_of(self.parts("", [])) if self.transforms else ""

    def describe(self) -> dict[str, str]:
        """The description, extended by what counts besides the transforms."""
        state = {f"state.{name}": value for name, value in self.state}
        rooted = {"root": "given"} if self.root is not None else {}
        return {**self.description, "monai": self.monai or "any", **state, **rooted}


@dataclass(frozen=True, slots=True)
class Key:
    """Name and ingredients of one record."""

    digest: str  # 32 hex digits
    item: str  # hash of the item
    pipeline: Pipeline  # what computes it
    paths: tuple[str, ...] = ()  # possible sources, absolute
    identities: tuple[Identity | None, ...] = ()  # of each path; None if there is neither a file nor a folder
    columns: dict[str, str] | None = None  # of the item that was computed, as :func:`columns_of` has them
    without: str = ""  # the digest without further files, if the last paths are such; those are never None

    @property
    def name(self) -> str:
        """The digest of the ingredients that are known before the item is computed: what leases are on."""
        return self.without or self.digest

    @property
    def sources(self) -> dict[str, Identity]:
        """The sources that exist, by absolute path."""
        pairs = zip(self.paths, self.identities, strict=True)
        return {path: identity for path, identity in pairs if identity is not None}

    def parts(self) -> list[Any]:
        """The parts that are digested, JSON-able."""
        return _parts(self.item, self.pipeline, self.paths, self.identities)

    def changes(
        self, later: Key, written: Sequence[str] = (), who_names: Callable[[str], str] = lambda path: "A transform"
    ) -> str:
        """Describes what changed between this key and a later one of the same item; empty if nothing did.

        Args:
            later: that key.
            written: sources that were written meanwhile. They did change, even if they hold the same: reads may have
                given anything.
            who_names: returns the names of the transforms that name one of the pipeline's files.
        """
        same = later.name == self.name
        pairs = zip(self.paths, self.identities, later.identities, strict=False)
        changed = list(written) if same else [path for path, before, now in pairs if before != now]
        if changed:
            named = next((path for path in changed if path in self.pipeline.files), None)
            hint, what = "", f"changed{', and holds the same as before' if same else ''}"
            if named is not None:
                hint = f". {who_names(named)} names it: if it writes it, leave it out by a __cache_key__ of its class"
            elif same:
                hint = ". If a transform writes it, leave it out of the key by a function for sources="
            return f"{', '.join(changed[:3])} {what}{hint}"
        if same:
            return ""
        if later.pipeline.state != self.pipeline.state:
            return f"settings of the process changed from {dict(self.pipeline.state)} to {dict(later.pipeline.state)}"
        return "the item or the transforms changed"

    def ingredients(self) -> dict[str, Any]:
        """What the record stores of its key: the parts, and plain values for maintenance. JSON-able."""
        return {
            "parts": self.parts(),
            "item": self.item,
            "pipeline": self.pipeline.digest,
            "monai": self.pipeline.monai,
            "sources": {path: [identity.size, identity.content] for path, identity in self.sources.items()},
            **({"columns": self.columns} if self.columns else {}),
        }


def columns_of(item: Any) -> dict[str, str]:
    """A short hash of each value of an item that is a dict, to tell later which of them differ."""
    found = {}
    for name, value in item.items() if type(item) is dict else ():
        with contextlib.suppress(HashingError, RecursionError):
            found[str(name)] = hash_item(value)[:8]
    return found


def _key(
    item: str, pipeline: Pipeline, paths: tuple[str, ...], identities: tuple[Identity | None, ...], without: str = ""
) -> Key:
    return Key(digest_of(_parts(item, pipeline, paths, identities)), item, pipeline, paths, identities, None, without)


def _parts(item: str, pipeline: Pipeline, paths: Sequence[str], identities: Sequence[Identity | None]) -> list[Any]:
    named = []
    for path, identity in zip(paths, identities, strict=True):
        if identity is not None:
            rest = None if pipeline.root is None else below(path, pipeline.root)
            named.append([path if rest is None else f"<root>{rest}", identity.size, identity.content])
    return pipeline.parts(item, sorted(named))  # independent of the root


class KeyMaker:
    """Makes keys for the items of one dataset.

    Args:
        hash_func: returns the hash of an item as bytes, as MONAI's ``hash_func``.
        sources: identifies files.
        loaded: keys of an item under which a transform loads files, so that any string there names a source; ``"all"``
            if transforms load whole items.
        root: see :class:`Pipeline`.
    """

    def __init__(
        self,
        hash_func: Callable[[Any], bytes],
        sources: Sources,
        loaded: Collection[str] | Literal["all"] = (),
        root: str | None = None,
    ) -> None:
        self._hash_func = hash_func
        self._sources = sources
        self._loaded = loaded
        self._root = root
        self._known: dict[bytes, _KnownItem] = {}
        self._key = lru_cache(limits.KEYED_ITEMS)(_key)

    def __call__(self, item: Any, pipeline: Pipeline) -> Key:
        """The key of an item. Raises HashingError if the item holds something without a stable content."""
        by_default = self._hash_func is canonical_hash  # a user's function is called every time: it may read files
        given = None if by_default else hash_text(self._hash_func(item), "hash_func")
        try:
            seen = self._look(item) if given is None else _KnownItem(given, candidates(item, self._loaded))
        except RecursionError as e:
            raise HashingError(
                "the item contains itself, or is nested too deeply to be hashed: flatten it, or pass an object in its "
                "place whose class has a method __cache_key__(self) that returns plain data"
            ) from e
        paths = tuple([absolute(path) for path, _ in seen.strings])  # the working directory may have changed
        identities = tuple([self._sources.identity(path, of[1]) for path, of in zip(paths, seen.strings, strict=True)])
        if pipeline.files:
            files = tuple([path for path in pipeline.files if path not in paths])
            paths = (*paths, *files)
            identities = (*identities, *[self._sources.identity(path, False) for path in files])
        return self._key(seen.hash, pipeline, paths, identities)

    def with_reads(self, key: Key, paths: Sequence[str]) -> Key:
        """The key of an item that reads further files, given its key without them."""
        found = [(path, identity) for path in paths if (identity := self._sources.read(path)) is not None]
        if not found:
            return key
        more = zip(*found, strict=True)
        paths, identities = (*key.paths, *next(more)), (*key.identities, *next(more))
        return self._key(key.item, key.pipeline, paths, identities, key.digest)

    def times(self, key: Key) -> dict[str, int]:
        """When each source of a key last changed, in ns, by path; without those that a user's function identifies."""
        named = [path for path, identity in key.sources.items() if identity.size >= 0]
        return {path: self._sources.changed_at(path) for path in named}

    def _look(self, item: Any) -> _KnownItem:
        """What is known of an item.

        One of plain values is hashed once and recognised by the XXH3 of its serialised value rather than by its
        identity, since a list of dicts may be changed in place.
        """
        # not only plain values: marshal would write an array's bytes without dtype and shape
        is_plain = _is_plain(item)
        # version 2 writes values only, no references; of an image in the item nothing is kept in memory
        fingerprint = xxhash.xxh3_128_digest(marshal.dumps(item, 2)) if is_plain else b""
        found = self._known.get(fingerprint)
        if found is None:
            found = _KnownItem(hash_item(item, self._root), candidates(item, self._loaded))
            if is_plain and len(self._known) < limits.HASHED_ITEMS:
                self._known[fingerprint] = found
        return found


def hash_text(found: Any, name: str) -> str:
    """The text of the bytes that a user's function returned, given as the argument ``name``. Raises HashingError."""
    if not isinstance(found, bytes):
        raise HashingError(f"{name} returned a {type(found).__name__}: it has to return bytes, a hash as text in UTF-8")
    return found.decode("utf-8")


class _KnownItem(NamedTuple):
    """What is known of an item, whatever its files hold."""

    hash: str
    strings: Sequence[tuple[str, bool]]  # that may name sources, with whether each may name a folder


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return _all_plain(value) and _all_plain(value.values())
    return kind in _PLAIN or (kind in (list, tuple) and _all_plain(value))


def _all_plain(values: Collection[Any]) -> bool:
    return _PLAIN.issuperset(map(type, values)) or all(map(_is_plain, values))
