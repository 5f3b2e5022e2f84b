"""The GDSDatasets that a loader's dataset consists of: itself, or those in ``Subset`` and ``ConcatDataset``."""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, Subset

from monai_gds.dataset.dataset import GDSDataset, changes_items


def gds_datasets(dataset: Dataset[Any]) -> list[GDSDataset]:
    """The GDSDatasets that a dataset consists of, each once; empty if it contains anything else."""
    if isinstance(dataset, GDSDataset):
        return [] if changes_items(type(dataset)) else [dataset]
    if type(dataset) is Subset:
        return gds_datasets(dataset.dataset)
    if type(dataset) is ConcatDataset:
        found = [gds_datasets(part) for part in dataset.datasets]
        return list(dict.fromkeys(chain.from_iterable(found))) if all(found) else []
    return []


def find_item(dataset: Any, index: int) -> tuple[GDSDataset, int]:
    """The GDSDataset that an item of a dataset belongs to, and its index there; IndexError if there is no such item."""
    while not isinstance(dataset, GDSDataset):
        if type(dataset) is Subset:
            dataset, index = dataset.dataset, dataset.indices[index]
            continue
        ends = dataset.cumulative_sizes
        if not -ends[-1] <= index < ends[-1]:
            raise IndexError(f"there is no item {index} in a ConcatDataset of {ends[-1]}")
        index %= ends[-1]
        part = bisect_right(ends, index)
        dataset, index = dataset.datasets[part], index - (ends[part - 1] if part else 0)
    return dataset, index
