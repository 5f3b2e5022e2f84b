"""The keys of a dataset's items: collects the ingredients that :mod:`keys.key` lists, and looks for records of them.

An item that has no record is computed here as well, by what the caller gives, since what it reads is part of its key.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

from monai_gds.base import stages
from monai_gds.base.notices import Notice
from monai_gds.dataset.settings import Settings
from monai_gds.errors import HashingError
from monai_gds.folder.reads import ReadLists
from monai_gds.keys.code import HashedTransforms
from monai_gds.keys.hashing import canonical_hash, hash_transforms
from monai_gds.keys.kept import KeptReads, words_of
from monai_gds.keys.key import Key, KeyMaker, Pipeline, columns_of, hash_text
from monai_gds.keys.libraries import version_of_monai
from monai_gds.keys.observed import Observation, observing
from monai_gds.keys.reads import reads_of
from monai_gds.keys.source_names import absolute, files_named, looks_like_path
from monai_gds.keys.sources import Identity, Sources
from monai_gds.pipeline.columns import Columns, Touched, touched
from monai_gds.pipeline.parts import name_of
from monai_gds.pipeline.settings import State, by_environment, capture, counting, defaults, differences
from monai_gds.pipeline.split import Split, loaded_keys
from monai_gds.records.header import SUFFIX

_log = logging.getLogger("monai_gds")

#: Transforms -> hash as bytes. None leaves them out of the key.
HashTransform = Callable[..., bytes] | None

T = TypeVar("T")

#: The identity of what an item read while it changed.
_UNKNOWN = Identity(-1, "changed")


class ItemKeys:
    """Makes the keys of one dataset's items, for one pipeline.

    Attributes:
        transform_hash: of the deterministic transforms and the settings of their ``Compose``; empty if they are not
            part of the key.
        hashed: what hashing the transforms met.

    Args:
        further: what else computes items, before the transforms: it counts as these do, and may read any column.
        sent: what :meth:`sent` gave in the process that this one has the transforms from.

    Raises:
        HashingError: a transform has no stable hash.
    """

    def __init__(
        self, split: Split, dataset: Any, settings: Settings, further: Sequence[Any], sent: tuple[str, str] | None
    ) -> None:
        options, folders, root = settings.options, settings.folders, settings.form.root
        self._began, self._logged = settings.began, False
        # transforms, monai, root
        self._transforms, self._root = [*split.deterministic, *further], root
        self.hashed, self.transform_hash = _hashed(self._transforms, split, dataset, root, sent)
        self._monai = version_of_monai(options.monai_version)
        # state
        self._counting = {"names_cuda": "cuda" in self.hashed.devices, "requires_grad": self.hashed.requires_grad}
        self._held = counting(settings.held, **self._counting)
        self._names = frozenset[str]().union(*(reads_of(function.__code__).names for function in self.hashed.functions))
        steady = split.steady is not None and split.steady.watches
        self._given = _given(options.mantissa_bits, settings.version, steady)
        # sources: those that transforms name, that items name, and that items read besides
        self._files = files_named(self.hashed.strings) if dataset.hash_transform is not None else []
        self._sources = Sources(options.sources, str(folders[0]) if folders else None)
        self._lists = ReadLists(folders[0], root, settings.file_mode) if folders and self._sources.counts else None
        self._kept = KeptReads.of(self.transform_hash, frozenset(f.__code__ for f in self.hashed.functions))
        self._folders = tuple(map(str, folders))
        within = (step.inner.settings.folders for step in split.inner if hasattr(step.inner, "settings"))  # type: ignore[attr-defined]
        written = [text for text in self.hashed.written if looks_like_path(text) and not os.path.isdir(text)]
        self._apart = (*self._folders, *map(str, chain.from_iterable(within)), *written)  # these do not count
        # item: guards may have one computed twice, and do not hold for the key of another dataset
        proves = self.transform_hash and self._lists is not None and not (further or steady or split.inner)
        self._columns = Columns(split.deterministic if proves else ())
        self._by_default = dataset.hash_func is canonical_hash
        self._make = KeyMaker(dataset.hash_func, self._sources, loaded_keys(split.deterministic), root)
        self._pipeline: Pipeline | None = None

    def differences(self) -> dict[str, tuple[str, str]]:
        """How the settings of this process and thread differ from those that held, as far as they count."""
        return differences(self._held, capture(**self._counting))

    def pipeline(self) -> Pipeline:
        """The part that all keys made now have in common: all ingredients but the item and what it names and reads."""
        # the environment and the working directory may change between two calls
        state = (*self._held, *by_environment(self._names), *self._given)
        files = tuple(map(absolute, self._files))
        known = self._pipeline
        if known is None or (known.state, known.files) != (state, files):
            known = Pipeline(self.transform_hash, self._monai, state, self._root, self.hashed.description, files)
            self._pipeline = known
        return known

    def sent(self) -> tuple[str, str] | None:
        """The hash of the transforms as they are now, by bytecode, and as they were when this was made."""
        now = _by_bytecode(self._transforms, self._root)
        return None if now is None else (now, self.hashed.digest)

    def __call__(self, items: Sequence[Any]) -> list[Key]:
        """The keys of items. Raises HashingError if an item holds a value without a stable hash."""
        pipeline = self.pipeline()
        reads = self._columns_read(pipeline)
        keys = [self._best(item, pipeline, reads) for item in items]
        if keys and not self._logged:
            self._logged = True
            named = ", ".join(keys[0].sources) or "none"
            Notice("sources", self._began, self.hashed.digest).log(_log, "sources of the first item: %s", named)
        return keys

    def _columns_read(self, pipeline: Pipeline) -> list[frozenset[str]]:
        """The columns that any item was found to read though no transform names them: the newest union first."""
        noted = self._lists.of(pipeline.digest) if self._lists else ()
        return [*map(frozenset, noted), frozenset()]

    def _named(self, item: Any, pipeline: Pipeline, read: frozenset[str]) -> Key:
        """The key without further files, given which columns count. A user's own ``hash_func`` gets all of them."""
        return self._make(self._columns.counting(item, read) if self._by_default else item, pipeline)

    def _best(self, item: Any, pipeline: Pipeline, reads: Sequence[frozenset[str]]) -> Key:
        """The key of which there is a record; the newest, if there is none.

        It may have other columns and further files than the newest. A record is right whichever they are: an item that
        agreed in all of these read no others.
        """
        found = [self._named(item, pipeline, read) for read in reads]
        if self._lists:
            lists = [self._lists.of(key.name) or ((),) for key in found]
            found = [self._make.with_reads(key, p) for key, of in zip(found, lists, strict=True) for p in of]
        return found[0] if len(found) == 1 else next(filter(self._has_record, found), found[0])

    def _has_record(self, key: Key) -> bool:
        return os.path.exists(f"{self._folders[0]}/{key.digest}{SUFFIX}")

    def now(self, item: Any) -> Key:
        """The key of an item; if it has no record, given also what other processes have noted meanwhile."""
        (key,) = self([item])
        if self._lists is None or self._has_record(key) or not self._lists.refresh():
            return key
        return self([item])[0]

    def compute(
        self, item: Any, make: Callable[[Any], T], read: frozenset[str] | None = None, seen: Observation | None = None
    ) -> tuple[T, Key, str]:
        """Computes an item by ``make``, and observes what that reads.

        Args:
            item: as the data hold it.
            make: gets it with guards in the place of the columns that may not count.
            read: columns that count besides those that the transforms name. By default, those known to be read.
            seen: what an attempt before has read, and may have kept in memory.

        Returns:
            What ``make`` returned, the key of its record, and in words what changed meanwhile; empty if nothing did.
        """
        pipeline = self.pipeline()
        read = self._columns_read(pipeline)[0] if read is None else read
        key = self._named(item, pipeline, read)
        times = self._make.times(key)
        if self._lists is None:
            made = make(item)
            return made, key, self._changed(key, times, item, read)
        given, guards = self._columns.guarded(item, read)
        seen, words = seen or Observation(), words_of(item)
        self._kept.running[seen] = _in_keys(key), words
        try:
            with observing(seen):
                made = make(given)
        except BaseException as e:  # perhaps because of a guard
            if not guards or not isinstance(e, (Exception, Touched)):
                if isinstance(e, Exception):  # the next item may use what this one has loaded
                    full, paths = self._with_seen(key, words, seen, self._lists)
                    self._kept.keep(seen, paths, full.sources, words)
                raise
            more = touched(guards) or frozenset(guards)
        else:
            more = touched(guards)
        if more:
            found = self.compute(item, make, read | more, seen)
            self._lists.note(pipeline.digest, sorted(read | more))
            return found
        stages.enter("keys")
        full, paths = self._with_seen(key, words, seen, self._lists)
        changed = self._changed(key, times, item, read) or seen.changed() or self._kept.changed(paths, full.sources)
        self._kept.keep(seen, paths, dict.fromkeys(paths, _UNKNOWN) if changed else full.sources, words)
        if full is not key and not changed:
            self._lists.note(key.name, full.paths[len(key.paths) :])
        return made, replace(full, columns=self.columns(item)), changed

    def _changed(self, key: Key, times: Mapping[str, int], item: Any, read: frozenset[str]) -> str:
        """Describes what changed since a key was made and then its ``times`` were taken; empty if nothing did."""
        written = [path for path, time in self._make.times(key).items() if time != times[path]]
        return key.changes(self._named(item, self.pipeline(), read), written, self._who_names)

    def _who_names(self, path: str) -> str:
        """The transforms that name a file, as far as these alone tell."""
        found = [
            f"{name_of(one)} (transforms[{i}])"
            for i, one in enumerate(self._transforms)
            if path in map(absolute, files_named(hash_transforms([one], self._root).strings))
        ]
        return ", ".join(found) or "A transform"

    def _with_seen(self, key: Key, words: frozenset[str], seen: Observation, lists: ReadLists) -> tuple[Key, list[str]]:
        """The key with what a computation has read and with what others have kept; and what it has read alone."""
        apart = tuple(map(absolute, self._apart))
        paths = seen.paths(_in_keys(key), apart)
        wanted = self._kept.beside(paths, words, apart)
        newest = next(iter(lists.of(key.name)), ())
        if set(wanted) < set(newest):
            wanted = list(newest)  # what it did not read this time, it had in memory
        return self._make.with_reads(key, wanted), paths

    def columns(self, item: Any) -> dict[str, str]:
        """A short hash of each column of an item that counts, as its record holds them."""
        return columns_of(self._columns.counting(item, self._columns_read(self.pipeline())[0]))


def _in_keys(key: Key) -> list[str]:
    """The paths of a key that count by themselves; a folder may count for its name only."""
    pairs = zip(key.paths, key.identities, strict=True)
    return [path for path, identity in pairs if identity is not None or not os.path.isdir(path)]


def _given(mantissa_bits: int | None, version: Any, steady: bool) -> State:
    """What counts of the dataset's arguments, beside the settings of the process: it counts even if transforms do not.

    A dataset that is ``steady`` freezes what is drawn, so it shares no records with one that does not. Unlike values of
    ``version`` have unlike texts. Raises HashingError if it has no stable hash.
    """
    digest = canonical_hash(version).decode()
    word = repr(version) if type(version) in (str, bool, int, float) else digest
    given = {"mantissa_bits": mantissa_bits, "version": None if version is None else word, "steady": steady or None}
    return tuple((name, str(value)) for name, value in given.items() if value is not None)


def _by_bytecode(transforms: Sequence[Any], root: str | None) -> str | None:
    with contextlib.suppress(HashingError):
        return hash_transforms(transforms, root, by_source=False).digest
    return None


def _hashed(
    transforms: Sequence[Any], split: Split, dataset: Any, root: str | None, sent: tuple[str, str] | None
) -> tuple[HashedTransforms, str]:
    """What hashing the transforms met, and the hash of them and of their ``Compose``; empty if they do not count.

    Raises HashingError if they have no stable hash, unless the user hashes them.
    """
    hashed, hash_transform = HashedTransforms(), dataset.hash_transform
    try:
        hashed = hash_transforms(transforms, root)
    except HashingError:
        if hash_transform is canonical_hash:
            raise
    if sent is not None and sent[0] == _by_bytecode(transforms, root):
        hashed.digest = sent[1]
    settings = {**split.settings(), "reset_ops_id": dataset.reset_ops_id}
    hashed.description.update({f"Compose.{name}": repr(value) for name, value in settings.items()})
    unset = {**defaults(), "mantissa_bits": "None", "version": "None", "steady": "None"}
    hashed.description.update({f"state.{name}": value for name, value in unset.items()})
    if hash_transform is None:
        return hashed, ""
    begin = canonical_hash(settings).decode()
    if hash_transform is canonical_hash:
        return hashed, begin + hashed.digest
    try:
        found = hash_transform(split.deterministic)
    except TypeError as e:
        # MONAI's json_hashing cannot hash transforms. MONAI then hashes their names.
        if "is not JSON serializable" not in str(e):
            raise
        found = hash_transform("".join(type(t).__name__ for t in split.deterministic))
    return hashed, begin + hash_text(found, "hash_transform")
