"""Items that get one record after another in one process, and why: something that the run itself writes or sets.

An item that names a log, an output or a checkpoint of the run has another key in every epoch, as has a pipeline that is
made again with the run's name or the time in it. No epoch hits, and records pile up. Used by the dataset.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any

from monai_gds import limits
from monai_gds.errors import CacheWarning
from monai_gds.folder.explain import pipeline_differences, source_differences
from monai_gds.keys.key import Key

#: Differences that a warning names.
NAMED = 3


class Repeats:
    """The keys of one dataset's items that were computed in this process: the first two of each, by the item's index.

    The third tells: one may be a deliberate change, such as ``dataset.transform = …``.
    """

    __slots__ = ("_keys", "_warned")

    def __init__(self) -> None:
        self._keys: dict[int, tuple[Key, ...]] = {}
        self._warned = False

    def note(self, index: Any, key: Key) -> None:
        """Notes that an item is computed under a key, and warns once if it is the item's third."""
        try:
            place = operator.index(index)
        except TypeError:  # an item of its own, without an index
            return
        known = self._keys.get(place, ())
        if self._warned or any(one.digest == key.digest for one in known):
            return
        if len(known) == 2:
            self._warned = True
            self._keys.clear()
            _warn(place, known[-1], key)
        elif known or len(self._keys) < limits.REPEATED_ITEMS:
            self._keys[place] = (*known, key)


def _warn(index: int, before: Key, now: Key) -> None:
    found = source_differences(before.sources, now.sources)
    old, new = before.pipeline, now.pipeline
    if old.digest != new.digest:
        found += pipeline_differences(old.digest, new.digest, old.describe(), new.describe())
    if not found:
        found = ["the item itself, as the data hold it"]
    warnings.warn(
        f"item {index} gets its third record in this process, so no epoch finds the last one. What differs: "
        f"{'; '.join(found[:NAMED])}. What the run itself writes or sets, such as a log, a checkpoint or its name, "
        "should not count: leave it out of the item, or out of the key by the transform's __cache_key__ or a function "
        "for sources=; version= is for what should count now and then",
        CacheWarning,
        stacklevel=8,
    )
