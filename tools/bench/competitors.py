"""The datasets that are compared, and their loaders: :data:`COMPETITORS`."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from monai.data import DataLoader, Dataset, LMDBDataset, ThreadDataLoader
from monai.data import GDSDataset as MonaiGDSDataset
from monai.transforms import Compose

from monai_gds.bench.comparison import (
    META,
    MONAIS_DATASETS,
    OURS,
    OURS_LOADER,
    REFERENCE,
    UNCACHED,
    Competitor,
    Make,
)
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.errors import BackendUnavailable
from monai_gds.loader import GDSDataLoader
from tools.bench.blosc2_reader import NNUNetDataset

__all__ = [
    "COMPETITORS",
    "MONAIS",
    "NNUNET",
    "OURS_BITCOMP_LOADER",
    "OURS_DIRECT",
    "OURS_KEPT_LOADER",
    "OURS_LZ4",
    "OURS_LZ4_LOADER",
    "OURS_PINNED_LOADER",
    "OURS_WHOLE",
    "OURS_WHOLE_LOADER",
    "OURS_WORKERS",
    "OURS_ZSTD",
    "OURS_ZSTD_LOADER",
    "REFERENCE_WORKERS",
    "WORKERS",
    "by_loader",
    "chosen",
    "competitors_for",
    "one_by_one",
]  # fmt: skip

OURS_DIRECT = "GDSDataset, direct_io"
OURS_WHOLE = "GDSDataset, not compressed"
OURS_LZ4 = "GDSDataset, lz4"
OURS_ZSTD = "GDSDataset, zstd"
OURS_WHOLE_LOADER = "GDSDataset, not compressed, GDSDataLoader"
OURS_LZ4_LOADER = "GDSDataset, lz4, GDSDataLoader"
OURS_ZSTD_LOADER = "GDSDataset, zstd, GDSDataLoader"
OURS_BITCOMP_LOADER = "GDSDataset, bitcomp, GDSDataLoader"
OURS_KEPT_LOADER = "GDSDataset, lz4, device_bytes, GDSDataLoader"
OURS_PINNED_LOADER = "GDSDataset, not compressed, pinned_bytes, GDSDataLoader"
OURS_WORKERS = "GDSDataset, workers"
MONAIS_ONE_THREAD = "monai GDSDataset"
MONAIS = "monai GDSDataset, 16 thr."
REFERENCE_WORKERS = "PersistentDataset, workers"
NNUNET = "blosc2, as nnU-Net v2"

#: Compared with each other by :mod:`tools.bench.tiles`, and nowhere else.
_OF_TILES = (
    OURS_WHOLE, OURS_WHOLE_LOADER, OURS_LZ4, OURS_LZ4_LOADER, OURS_ZSTD, OURS_ZSTD_LOADER, OURS_BITCOMP_LOADER,
    OURS_KEPT_LOADER, OURS_PINNED_LOADER, NNUNET,
)  # fmt: skip

#: Compared with each other by :func:`tools.bench.workloads.augmentation`, and nowhere else.
_OF_AUGMENTATION = (OURS_WORKERS, REFERENCE_WORKERS)

#: They serve CUDA targets only.
_CUDA_ONLY = (MONAIS_ONE_THREAD, MONAIS)

#: Worker processes of those.
WORKERS = min(8, len(os.sched_getaffinity(0)))


def _ours_direct(items: Sequence[Any], transform: Compose, folder: Path, device: torch.device) -> Dataset:
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
    except OSError as e:
        raise BackendUnavailable(f"{folder} does not support O_DIRECT: {e.strerror}") from e
    return GDSDataset(items, transform, folder, device, backend="posix", backend_options={"direct_io": True})


@dataclass(frozen=True, slots=True)
class _Monais:
    """``monai.data.GDSDataset`` and its loader, while KvikIO has this number of threads in the whole process."""

    threads: int

    def make(self, items: Sequence[Any], transform: Compose, folder: Path, device: torch.device) -> Dataset:
        from kvikio import defaults

        with defaults.set("num_threads", self.threads):
            return MonaiGDSDataset(items, transform, folder, device.index)

    def loader(self, dataset: Dataset, batch_size: int) -> Iterator[Any]:
        from kvikio import defaults

        with defaults.set("num_threads", self.threads):
            yield from ThreadDataLoader(dataset, batch_size=batch_size)

    def competitor(self) -> Competitor:
        return Competitor(_needing(self.make, "kvikio", "cupy"), self.loader)


class _Staying:
    """A loader whose workers stay from epoch to epoch."""

    def __init__(self, make: Callable[..., Iterable[Any]]) -> None:
        self._make = make
        self._made: tuple[Dataset, Iterable[Any]] | None = None

    def __call__(self, dataset: Dataset, batch_size: int) -> Iterable[Any]:
        if self._made is None or self._made[0] is not dataset:
            self._made = dataset, self._make(dataset, batch_size=batch_size)
        return self._made[1]


def _needing(make: Make, *packages: str, remedy: str = "") -> Make:
    """Makes the dataset where these packages are installed."""

    def checked(items: Sequence[Any], transform: Compose, folder: Path, device: torch.device) -> Dataset:
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if missing:
            raise BackendUnavailable(f"needs {' and '.join(missing)}{remedy}")
        return make(items, transform, folder, device)

    return checked


_needing_blosc2 = partial(_needing, remedy=": pip install 'monai_gds[tiles]'")


def _tiles(loader: Any = ThreadDataLoader, **settings: Any) -> Competitor:
    """Ours with these settings, which need Blosc2."""
    return Competitor(_needing_blosc2(partial(GDSDataset, **settings), "blosc2"), loader)


COMPETITORS: dict[str, Competitor] = {
    OURS: Competitor(GDSDataset),
    OURS_LOADER: Competitor(GDSDataset, GDSDataLoader),
    OURS_DIRECT: Competitor(_ours_direct, GDSDataLoader),
    OURS_WHOLE: Competitor(partial(GDSDataset, compression=None)),
    OURS_WHOLE_LOADER: Competitor(partial(GDSDataset, compression=None), GDSDataLoader),
    OURS_LZ4: _tiles(compression="lz4"),
    OURS_ZSTD: _tiles(compression="zstd"),
    OURS_LZ4_LOADER: _tiles(GDSDataLoader, compression="lz4"),
    OURS_ZSTD_LOADER: _tiles(GDSDataLoader, compression="zstd"),
    OURS_BITCOMP_LOADER: Competitor(partial(GDSDataset, compression="bitcomp"), GDSDataLoader),
    OURS_KEPT_LOADER: _tiles(GDSDataLoader, compression="lz4", options={"device_bytes": "100GB"}),
    OURS_PINNED_LOADER: Competitor(
        partial(GDSDataset, compression=None, backend="posix", backend_options={"pinned_bytes": 100e9}), GDSDataLoader
    ),
    REFERENCE: MONAIS_DATASETS[REFERENCE],
    OURS_WORKERS: Competitor(
        GDSDataset, partial(GDSDataLoader, num_workers=WORKERS, programs="off", prefetch_bytes=8 << 30)
    ),
    REFERENCE_WORKERS: Competitor(
        MONAIS_DATASETS[REFERENCE].make, partial(DataLoader, num_workers=WORKERS, persistent_workers=True)
    ),
    NNUNET: Competitor(
        _needing_blosc2(lambda items, transform, folder, _: NNUNetDataset(items, transform, folder), "blosc2")
    ),
    META: MONAIS_DATASETS[META],
    "LMDBDataset": Competitor(
        _needing(
            lambda items, transform, folder, _: LMDBDataset(items, transform, folder, progress=False),
            "lmdb",
            remedy=": pip install lmdb",
        )
    ),
    "CacheDataset": MONAIS_DATASETS["CacheDataset"],
    # As shipped it reads with KvikIO's default of one thread, which our own dataset raises for the whole process.
    MONAIS_ONE_THREAD: _Monais(1).competitor(),
    MONAIS: _Monais(16).competitor(),
}


def chosen(names: Sequence[str]) -> dict[str, Competitor]:
    """Some of :data:`COMPETITORS`, in this order."""
    found = {name: COMPETITORS[name] for name in names}
    for name in set(names).intersection(_OF_AUGMENTATION):
        found[name] = found[name]._replace(loader=_Staying(found[name].loader))
    return found


def by_loader(persistent: str) -> dict[str, Competitor]:
    """Ours, CacheDataset and this PersistentDataset, each through MONAI's loaders, and ours through our own."""
    found = {OURS_LOADER: COMPETITORS[OURS_LOADER]}
    for name in (OURS, "CacheDataset", persistent):
        found[f"{name}, ThreadDataLoader"] = COMPETITORS[name]._replace(loader=ThreadDataLoader)
        workers = _Staying(partial(DataLoader, num_workers=2, persistent_workers=True))
        found[f"{name}, 2 workers"] = COMPETITORS[name]._replace(loader=workers)
    return found


def one_by_one(names: Sequence[str]) -> dict[str, Any]:
    """The arguments of a comparison in which competitors give single items, without a loader."""
    found = {name: COMPETITORS[name]._replace(loader=_one_by_one) for name in names}
    return {"competitors": found, "uncached": UNCACHED._replace(loader=_one_by_one), "per_item": True}


def _one_by_one(dataset: Dataset, batch_size: int) -> Iterator[Any]:
    return (dataset[index] for index in range(len(dataset)))


def competitors_for(device: torch.device, *, loader: bool = False, cold: bool = False) -> list[str]:
    """The caching competitors that serve a device.

    With ``loader``, our dataset through our own loader too; if that is ``cold``, also with reads past the page cache.
    """
    left_out = {*_OF_TILES, *_OF_AUGMENTATION, *(_CUDA_ONLY if device.type != "cuda" else ())}
    left_out |= {*([] if loader else [OURS_LOADER]), *([] if loader and cold else [OURS_DIRECT])}
    return [name for name in COMPETITORS if name not in left_out]
