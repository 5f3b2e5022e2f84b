"""What a dataset's user is told of items that are not found or not cached, each thing once. Used by the dataset."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch

from monai_gds.base import stages
from monai_gds.errors import CacheWarning
from monai_gds.folder.directory import CacheDirectory
from monai_gds.folder.explain import Nearest, Wanted, nearest
from monai_gds.folder.index import Index
from monai_gds.keys.key import Key

__all__ = ["Misses", "nearest_record", "warn_of_misses", "why_missed"]


class Misses:
    """Counts the misses of one dataset in one process.

    It has slots because MONAI's ``set_rnd`` walks every ``__dict__`` that it can reach from a dataset.
    """

    __slots__ = ("_count", "_warned", "_why")

    def __init__(self) -> None:
        self._count = 0
        self._why: list[str] = []  # what differs from the nearest record, while every item misses
        self._warned: set[type[Exception]] = set()

    def hit(self) -> None:
        self._why = []  # not every item is missed
        stages.count("hits")

    def miss(self, cache: CacheDirectory, key: Key, items: int) -> None:
        """Warns once, and why, when all ``items`` have missed though the folder has records of a similar pipeline."""
        self._count += 1
        if self._count == 1:
            self._why = why_missed(cache, key)
        worker = torch.utils.data.get_worker_info()
        if self._count * (1 if worker is None else worker.num_workers) >= items:
            warn_of_misses(cache.path, self._why, stacklevel=7)
            self._why = []

    def warn_once(self, kind: type[Exception], message: str) -> None:
        """Warns that an item is not cached, once for each kind of reason."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, CacheWarning, stacklevel=6)

    def warn_anew(self) -> None:
        """Called when the transforms were replaced: what was said of the ones before does not count."""
        self._warned = set()


def warn_of_misses(cache_dir: str, why: Sequence[str], stacklevel: int) -> None:
    """Warns that every item was computed, and why, as :func:`why_missed` found out; empty: nothing.

    ``stacklevel`` is that of :func:`warnings.warn`, called here.
    """
    if why:
        warnings.warn(
            f"every item was computed anew, though {cache_dir} holds records of a similar pipeline. What "
            f"differs: {'; '.join(why)}. See dataset.explain(index)",
            CacheWarning,
            stacklevel=stacklevel,
        )


def why_missed(cache: CacheDirectory, key: Key) -> list[str]:
    """How a key differs from the nearest record; empty if no record is near. Call it before this run saves records.

    Empty too if the key has a record: why that is not used is reported when it is read.
    """
    exists = os.path.exists(cache.record_path(key.digest))
    # a new index, whose memory is free afterwards: 1 kB per record
    near = None if cache.index is None or exists else nearest_record(Index(cache.index.directory), key)
    return near.differences if near is not None and near.entry is not None else []


def nearest_record(index: Index, key: Key) -> Nearest:
    """The record that is most similar to a key, and how it differs."""
    return nearest(index, Wanted(key.item, key.pipeline.digest, key.sources, key.pipeline.describe()))
