"""The keys of a dataset's items. Used by the dataset: adds MONAI's part to what the cache's :class:`KeyMaker` makes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import monai

from monai_gds.base import stages
from monai_gds.base.notices import Notice
from monai_gds.dataset.settings import MonaiVersion, Settings
from monai_gds.errors import HashingError
from monai_gds.folder.reads import ReadLists
from monai_gds.keys.hashing import HashedTransforms, canonical_hash, hash_transforms
from monai_gds.keys.kept import KeptReads, words_of
from monai_gds.keys.key import Key, KeyMaker, Pipeline, columns_of, hash_text
from monai_gds.keys.observed import Observation, observing
from monai_gds.keys.origin import digest_of_folder, is_in_site
from monai_gds.keys.reads import reads_of
from monai_gds.keys.source_names import absolute, files_named, looks_like_path
from monai_gds.keys.sources import Identity, Sources
from monai_gds.pipeline.columns import Columns, Touched, touched
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
        options, folders, hash_transform = settings.options, settings.folders, dataset.hash_transform
        self._root = root = settings.form.root
        sources = Sources(options.sources, str(folders[0]) if folders else None)
        self._transforms = [*split.deterministic, *further]
        hashed = _hashed(self._transforms, hash_transform, root)
        if sent is not None and sent[0] == _by_bytecode(self._transforms, root):
            hashed = replace(hashed, digest=sent[1])
        of_compose = {**split.settings(), "reset_ops_id": dataset.reset_ops_id}
        hashed.description.update({f"Compose.{name}": repr(value) for name, value in of_compose.items()})
        hashed.description.update({f"state.{name}": value for name, value in defaults().items()})
        hashed.description.update({"state.mantissa_bits": "None", "state.version": "None", "state.steady": "None"})
        self.transform_hash = _transform_hash(split, of_compose, hash_transform, hashed)
        self.hashed = hashed
        self._names = frozenset[str]().union(*(reads_of(function.__code__).names for function in hashed.functions))
        self._files = tuple(files_named(hashed.strings)) if hash_transform is not None else ()
        self._are_absolute = all(map(os.path.isabs, self._files))
        self._monai_version = options.monai_version
        # With the settings of the process, not the transforms: they count even if transforms do not.
        # A dataset that freezes what is drawn shares no records with one that does not.
        steady = split.steady if split.steady is not None and split.steady.watches else None
        given = {
            "mantissa_bits": options.mantissa_bits,
            "version": _in_a_word(settings.version),
            "steady": None if steady is None else True,
        }
        self._given: State = tuple((name, str(value)) for name, value in given.items() if value is not None)
        self._pipelines: dict[tuple[State, str, tuple[str, ...]], Pipeline] = {}
        self._began, self._logged = settings.began, False
        self._counting = {"names_cuda": "cuda" in hashed.devices, "requires_grad": hashed.requires_grad}
        self._held = counting(settings.held, **self._counting)
        self._make = KeyMaker(dataset.hash_func, sources, loaded_keys(split.deterministic), root)
        self._folders = tuple(map(str, folders))
        within = (step.inner.settings.folders for step in split.inner if hasattr(step.inner, "settings"))  # type: ignore[attr-defined]
        self._caches = (*self._folders, *map(str, chain.from_iterable(within)))  # whose files do not count
        self._written = tuple(text for text in hashed.written if looks_like_path(text) and not os.path.isdir(text))
        self._lists = ReadLists(folders[0], root, settings.file_mode) if folders and sources.counts else None
        # Guards may have an item computed twice, and do not hold for the key of another dataset.
        alone = not further and steady is None and not split.inner
        proves = self.transform_hash and self._lists is not None and alone
        self._columns = Columns(split.deterministic if proves else ())
        self._by_default = dataset.hash_func is canonical_hash
        self._kept = KeptReads.of(self.transform_hash, frozenset(f.__code__ for f in hashed.functions))

    def differences(self) -> dict[str, tuple[str, str]]:
        """How the settings of this process and thread differ from those that held, as far as they count."""
        return differences(self._held, capture(**self._counting))

    def pipeline(self) -> Pipeline:
        """The part that all keys made now have in common.

        The working directory may change between two calls.
        """
        state, version = (*self._held, *by_environment(self._names), *self._given), _version(self._monai_version)
        files = self._files if self._are_absolute else tuple(map(absolute, self._files))
        known = self._pipelines.get((state, version, files))
        if known is None:
            known = Pipeline(self.transform_hash, version, state, self._root, self.hashed.description, files)
            self._pipelines[state, version, files] = known
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
        self,
        item: Any,
        make: Callable[[Any], T],
        read: frozenset[str] | None = None,
        seen: Observation | None = None,
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
            return made, key, self._make.changes(key, times, self._make(item, self.pipeline()))
        began = self._kept.computed
        given, guards = self._columns.guarded(item, read)
        seen, words = seen or Observation(), words_of(item)
        self._kept.running[seen] = _in_keys(key), words
        try:
            with observing(seen):
                made = make(given)
        except BaseException as e:  # perhaps because of a guard
            if not guards or not isinstance(e, (Exception, Touched)):
                if isinstance(e, Exception):  # the next item may use what this one has loaded
                    full, paths = self._with_seen(key, words, seen, began, self._lists)
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
        full, paths = self._with_seen(key, words, seen, began, self._lists)
        changed = self._make.changes(key, times, self._named(item, self.pipeline(), read)) or seen.changed()
        changed = changed or self._kept.changed(paths, full.sources)
        self._kept.keep(seen, paths, dict.fromkeys(paths, _UNKNOWN) if changed else full.sources, words)
        if full is not key and not changed:
            self._lists.note(key.name, full.paths[len(key.paths) :])
        return made, replace(full, columns=self.columns(item)), changed

    def _with_seen(
        self, key: Key, words: frozenset[str], seen: Observation, began: int, lists: ReadLists
    ) -> tuple[Key, list[str]]:
        """The key with what a computation has read and with what others have kept; and what it has read alone."""
        apart = (*self._caches, *map(absolute, self._written))
        paths = seen.paths(_in_keys(key), apart)
        wanted = self._kept.beside(paths, words, began, self._make.sources.read, apart)
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


def _in_a_word(version: Any) -> str | None:
    """A user's ``version`` as text for the key and for ``explain``; unlike values have unlike texts."""
    if version is None:
        return None
    digest = canonical_hash(version).decode()  # raises HashingError if it differs from run to run
    return repr(version) if type(version) in (str, bool, int, float) else digest


def _version(wanted: MonaiVersion) -> str:
    if wanted is None:
        return ""
    found = str(monai.__version__)
    if wanted == "exact" and not is_in_site(monai.__file__):  # a clone keeps its version from edit to edit
        found = f"{found} {digest_of_folder(os.path.dirname(monai.__file__))}"
    return ".".join(re.split(r"[.+]", found)[:2]) if wanted == "minor" else found


def _by_bytecode(transforms: Sequence[Any], root: str | None) -> str | None:
    with contextlib.suppress(HashingError):
        return hash_transforms(transforms, root, by_source=False).digest
    return None


def _hashed(transforms: Sequence[Any], hash_transform: HashTransform, root: str | None) -> HashedTransforms:
    """The hash and description of the transforms; empty if they have no stable hash and the user hashes them."""
    try:
        return hash_transforms(transforms, root)
    except HashingError:
        if hash_transform is canonical_hash:
            raise
        return HashedTransforms()


def _transform_hash(
    split: Split, settings: dict[str, Any], hash_transform: HashTransform, hashed: HashedTransforms
) -> str:
    if hash_transform is None:
        return ""
    begin = canonical_hash(settings).decode()
    if hash_transform is canonical_hash:
        return begin + hashed.digest
    try:
        found = hash_transform(split.deterministic)
    except TypeError as e:
        # MONAI's json_hashing cannot hash transforms. MONAI then hashes their names.
        if "is not JSON serializable" not in str(e):
            raise
        found = hash_transform("".join(type(t).__name__ for t in split.deterministic))
    return begin + hash_text(found, "hash_transform")
