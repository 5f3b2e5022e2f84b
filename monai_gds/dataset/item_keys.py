"""The keys of a dataset's items. Used by the dataset: adds MONAI's part to what the cache's :class:`KeyMaker` makes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import monai

from monai_gds.errors import HashingError
from monai_gds.keys.hashing import HashedTransforms, canonical_hash, hash_transforms
from monai_gds.keys.key import Key, KeyMaker, Pipeline, hash_text
from monai_gds.keys.source_names import absolute, files_named
from monai_gds.keys.sources import Sources
from monai_gds.pipeline.settings import State, capture, defaults
from monai_gds.pipeline.split import Split, loaded_keys

_log = logging.getLogger("monai_gds")

#: Transforms -> hash as bytes. None leaves them out of the key.
HashTransform = Callable[..., bytes] | None

#: How much of MONAI's version is part of a key.
MonaiVersion = Literal["exact", "minor"] | None


class ItemKeys:
    """Makes the keys of one dataset's items, for one pipeline.

    Attributes:
        transform_hash: of the deterministic transforms and the settings of their ``Compose``; empty if they are not
            part of the key.

    Raises:
        HashingError: a transform has no stable hash.
    """

    def __init__(
        self,
        split: Split,
        hash_func: Callable[..., bytes],
        hash_transform: HashTransform,
        sources: Sources,
        root: str | None,
        monai_version: MonaiVersion,
        reset_ops_id: bool,
        mantissa_bits: int | None,
        version: Any,
    ) -> None:
        hashed = _hashed(split, hash_transform, root)
        settings = {**split.settings(), "reset_ops_id": reset_ops_id}
        hashed.description.update({f"Compose.{name}": repr(value) for name, value in settings.items()})
        hashed.description.update({f"state.{name}": value for name, value in defaults().items()})
        hashed.description.update({"state.mantissa_bits": "None", "state.version": "None"})
        self.transform_hash = _transform_hash(split, settings, hash_transform, hashed)
        self._hashed = hashed
        named = files_named(hashed.strings) if hash_transform is not None else []
        self._files = tuple(named)
        self._are_absolute = all(map(os.path.isabs, named))
        self._root = root
        self._monai_version: MonaiVersion = monai_version
        # With the settings of the process, not the transforms: they count even if transforms do not.
        given = {"mantissa_bits": mantissa_bits, "version": None if version is None else _in_a_word(version)}
        self._given: State = tuple((name, str(value)) for name, value in given.items() if value is not None)
        self._pipelines: dict[tuple[State, str, tuple[str, ...]], Pipeline] = {}
        self._logged = False
        self._make = KeyMaker(hash_func, sources, loaded_keys(split.deterministic), root)

    def capture(self) -> State:
        """The settings of this process and thread that count for this pipeline."""
        return capture(names_cuda="cuda" in self._hashed.devices, requires_grad=self._hashed.requires_grad)

    def pipeline(self) -> Pipeline:
        """The part that all keys made now have in common.

        Settings of the process may change between two calls, and so may the working directory.
        """
        state, version = (*self.capture(), *self._given), _version(self._monai_version)
        files = self._files if self._are_absolute else tuple(map(absolute, self._files))
        known = self._pipelines.get((state, version, files))
        if known is None:
            known = Pipeline(self.transform_hash, version, state, self._root, self._hashed.description, files)
            self._pipelines[state, version, files] = known
        return known

    def __call__(self, items: Sequence[Any]) -> list[Key]:
        """The keys of items. Raises HashingError if an item holds a value without a stable hash."""
        pipeline = self.pipeline()
        keys = [self._make(item, pipeline) for item in items]
        if keys and not self._logged:
            self._logged = True
            _log.info("sources of the first item: %s", ", ".join(keys[0].sources) or "none")
        return keys

    def times(self, key: Key) -> dict[str, int]:
        """When each source of a key last changed; taken before its item is computed."""
        return self._make.times(key)

    def changes(self, key: Key, times: dict[str, int], item: Any) -> str:
        """What changed while an item was computed, in words; empty if nothing did."""
        return self._make.changes(key, times, self([item])[0])

    def flush(self) -> None:
        """Saves what was learned about sources, for other processes."""
        self._make.flush()


def _in_a_word(version: Any) -> str:
    """A user's ``version`` as text for the key and for ``explain``; unlike values have unlike texts."""
    digest = canonical_hash(version).decode()  # raises HashingError if it differs from run to run
    return repr(version) if type(version) in (str, bool, int, float) else digest


def _version(wanted: MonaiVersion) -> str:
    if wanted is None:
        return ""
    found = str(monai.__version__)
    return ".".join(re.split(r"[.+]", found)[:2]) if wanted == "minor" else found


def _hashed(split: Split, hash_transform: HashTransform, root: str | None) -> HashedTransforms:
    """The hash and description of the transforms; empty if they have no stable hash and the user hashes them."""
    try:
        return hash_transforms(split.deterministic, root)
    except HashingError:
        if hash_transform is canonical_hash:
            raise
        return HashedTransforms("", {}, frozenset(), devices=frozenset(), requires_grad=False)


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
