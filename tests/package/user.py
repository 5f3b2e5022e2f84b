"""A user's program, which ``run.py`` checks with mypy's strict rules against the installed package. It is not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

import monai_gds
from monai_gds import GDSDataLoader, GDSDataset, ImageNetDataset, PopulateError, open_storage
from monai_gds.storage import Reads


def load(items: Sequence[Mapping[str, str]]) -> GDSDataLoader:
    """Fills a cache and returns a loader over it."""
    dataset = GDSDataset(items, [], "/nvme/cache", device="cpu", compression="lz4", options={"tiles": 32})
    try:
        populated = dataset.populate(executor=ProcessPoolExecutor(2))
    except PopulateError as e:
        raise SystemExit(str(e)) from e
    computed: int = populated.computed
    print(computed, dataset.explain(0), dataset.is_cached(0))
    return GDSDataLoader(dataset, batch_size=2, prefetch=4)


def first_bytes(path: str) -> torch.Tensor:
    """The first kilobyte of a file."""
    tensors: list[torch.Tensor] = open_storage("posix", "cpu").load(Reads.of(path, [(0, 1000)])).wait()
    return tensors[0]


def images(root: str) -> int:
    """How many batches a folder of images gives."""
    return sum(1 for _ in ImageNetDataset(root, 64, device="cpu"))


version: str = monai_gds.__version__
