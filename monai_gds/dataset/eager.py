"""Filling a cache while a dataset is made, as MONAI's ``CacheDataset`` does. Used by constructors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from monai.data import PersistentDataset

from monai_gds.dataset.engines import default_workers
from monai_gds.dataset.populate import populate
from monai_gds.dataset.ranks import Ranks
from monai_gds.dataset.settings import CacheOptions
from monai_gds.errors import CacheWarning, PopulateError, UnsupportedType


def fill(
    dataset: PersistentDataset,
    indices: Sequence[int] | None = None,
    num_workers: int | None = None,
    progress: bool = True,
) -> None:
    """Computes what has no record among some items.

    No rank waits for another: a dataset is often made on one rank only. Ranks that fill the same cache at the same time
    share the work by leases.

    Args:
        dataset: a GDSDataset.
        indices: which items; None: all.
        num_workers: at most this many processes; None: one per core. What fails there is tried once more here.
        progress: shows a bar on rank 0.

    Raises:
        PopulateError: items failed; the others are cached. An item that no record can hold is one of them with
            ``unsupported="error"``; otherwise there is a warning.
        NotSaved: nothing more can be written to the cache directory.
    """
    indices = range(len(dataset.data)) if indices is None else indices
    if not len(indices):
        return
    part = copy(dataset)
    part.data = [dataset.data[index] for index in indices]
    try:
        _populate(part, num_workers, progress and Ranks().rank == 0)
    except PopulateError as e:
        broken = [item for item in e.failures if not item.error.startswith(UnsupportedType.__name__)]
        if broken or not e.failures or dataset.settings.options.unsupported == "error":
            raise
        failed = f"{len(e.failures)} of {len(indices)} items cannot be cached, and are computed in every epoch: "
        warnings.warn(failed + e.failures[0].error, CacheWarning, stacklevel=3)
    if dataset.session.caches and dataset.settings.options.sources == "once":
        for index in indices:
            dataset.key(index)  # looks at its sources, for the rest of this process


def _populate(dataset: PersistentDataset, num_workers: int | None, progress: bool) -> None:
    if num_workers is None:
        populate(dataset, None, progress, 0, 1)
        return
    try:
        populate(dataset, min(num_workers, default_workers(len(dataset.data))), progress, 0, 1)
    except PopulateError:
        populate(dataset, 0, progress, 0, 1)


def looked_at_once(options: CacheOptions | Mapping[str, Any]) -> CacheOptions:
    """The options of a dataset that has read everything when it is made: its sources may be gone afterwards."""
    found = CacheOptions.of(options)
    return replace(found, sources="once") if found.sources == "content" else found
