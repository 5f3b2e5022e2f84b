"""The datasets that are compared, and their loaders: :data:`COMPETITORS`."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from monai.data import CacheDataset, DataLoader, Dataset, LMDBDataset, PersistentDataset, ThreadDataLoader
from monai.data import GDSDataset as MonaiGDSDataset
from monai.transforms import Compose

from monai_gds.bench.blosc2_reader import NNUNetDataset
from monai_gds.bench.variants import PAST_PAGE_CACHE
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.errors import BackendUnavailable
from monai_gds.loader import GDSDataLoader

__all__ = [
    "COMPETITORS",
    "META",
    "MONAIS",
    "NNUNET",
    "NO_CACHE",
    "OURS",
    "OURS_BITCOMP_LOADER",
    "OURS_DIRECT",
    "OURS_KEPT_LOADER",
    "OURS_LOADER",
    "OURS_LZ4",
    "OURS_LZ4_LOADER",
    "OURS_PINNED_LOADER",
    "OURS_WHOLE",
    "OURS_WHOLE_LOADER",
    "OURS_WORKERS",
    "OURS_ZSTD",
    "OURS_ZSTD_LOADER",
    "REFERENCE",
    "REFERENCE_WORKERS",
    "WORKERS",
    "Competitor",
    "competitors_for",
]  # fmt: skip

OURS = "GDSDataset"
OURS_LOADER = "GDSDataset, GDSDataLoader"
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
OURS_WORKERS = "GDSDataset, transforms_on='workers'"
MONAIS = "monai GDSDataset, 16 thr."
REFERENCE = "PersistentDataset"
REFERENCE_WORKERS = "PersistentDataset, workers"
NNUNET = "blosc2, as nnU-Net v2"
META = "PersistentDataset + meta"
NO_CACHE = "no cache"

#: Compared with each other by :mod:`monai_gds.bench.tiles`, and nowhere else.
_OF_TILES = (
    OURS_WHOLE, OURS_WHOLE_LOADER, OURS_LZ4, OURS_LZ4_LOADER, OURS_ZSTD, OURS_ZSTD_LOADER, OURS_BITCOMP_LOADER,
    OURS_KEPT_LOADER, OURS_PINNED_LOADER, NNUNET,
)  # fmt: skip

#: Compared with each other by :func:`monai_gds.bench.workloads.augmentation`, and nowhere else.
_OF_AUGMENTATION = (OURS_WORKERS, REFERENCE_WORKERS)

#: Worker processes of those.
WORKERS = min(8, len(os.sched_getaffinity(0)))

#: Makes a dataset of items and a transform, with a separate folder for the cache and the target device.
Make: TypeAlias = "Callable[[Sequence[Any], Compose, Path, torch.device], Dataset]"


@dataclass(frozen=True, slots=True)
class Competitor:
    """A dataset and its loader.

    Args:
        make: makes the dataset.
        loader: called with the dataset and ``batch_size``.
        missing: returns why it cannot run here; empty if it can.
        cuda_only: it serves CUDA targets only.
        kvikio_threads: KvikIO's process-wide number of threads while it runs; None leaves it alone.
    """

    make: Make
    loader: Callable[..., Iterable[Any]] = ThreadDataLoader
    missing: Callable[[], str] = lambda: ""
    cuda_only: bool = False
    kvikio_threads: int | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Applies its settings of the process, and restores them afterwards."""
        if self.kvikio_threads is None:
            yield
            return
        import kvikio.defaults

        with kvikio.defaults.set("num_threads", self.kvikio_threads):
            yield


def _ours_direct(items: Sequence[Any], transform: Compose, folder: Path, device: torch.device) -> Dataset:
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
    except OSError as e:
        raise BackendUnavailable(f"{folder} does not support O_DIRECT: {e.strerror}") from e
    variant = PAST_PAGE_CACHE
    return GDSDataset(items, transform, folder, device, backend=variant.backend, backend_options=dict(variant.options))


def _monais(items: Sequence[Any], transform: Compose, folder: Path, device: torch.device) -> Dataset:
    return MonaiGDSDataset(items, transform, folder, device.index)


def _needs(*packages: str, remedy: str = "") -> str:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(missing)}{remedy}" if missing else ""


_needs_lmdb = partial(_needs, "lmdb", remedy=": pip install 'monai_gds[bench]'")
_needs_blosc2 = partial(_needs, "blosc2", remedy=": pip install 'monai_gds[tiles]'")
_needs_kvikio = partial(_needs, "kvikio", "cupy")

COMPETITORS: dict[str, Competitor] = {
    OURS: Competitor(GDSDataset),
    OURS_LOADER: Competitor(GDSDataset, GDSDataLoader),
    OURS_DIRECT: Competitor(_ours_direct, GDSDataLoader),
    OURS_WHOLE: Competitor(partial(GDSDataset, compression=None)),
    OURS_WHOLE_LOADER: Competitor(partial(GDSDataset, compression=None), GDSDataLoader),
    OURS_LZ4: Competitor(partial(GDSDataset, compression="lz4"), missing=_needs_blosc2),
    OURS_ZSTD: Competitor(partial(GDSDataset, compression="zstd"), missing=_needs_blosc2),
    OURS_LZ4_LOADER: Competitor(partial(GDSDataset, compression="lz4"), GDSDataLoader, missing=_needs_blosc2),
    OURS_ZSTD_LOADER: Competitor(partial(GDSDataset, compression="zstd"), GDSDataLoader, missing=_needs_blosc2),
    OURS_BITCOMP_LOADER: Competitor(partial(GDSDataset, compression="bitcomp"), GDSDataLoader, cuda_only=True),
    OURS_KEPT_LOADER: Competitor(
        partial(GDSDataset, compression="lz4", options={"device_bytes": "100GB"}),
        GDSDataLoader,
        missing=_needs_blosc2,
        cuda_only=True,
    ),
    OURS_PINNED_LOADER: Competitor(
        partial(GDSDataset, compression=None, backend="posix", backend_options={"pinned_bytes": 100e9}),
        GDSDataLoader,
        cuda_only=True,
    ),
    REFERENCE: Competitor(lambda items, transform, folder, _: PersistentDataset(items, transform, folder)),
    OURS_WORKERS: Competitor(
        GDSDataset, partial(GDSDataLoader, num_workers=WORKERS, transforms_on="workers", prefetch_bytes=8 << 30)
    ),
    REFERENCE_WORKERS: Competitor(
        lambda items, transform, folder, _: PersistentDataset(items, transform, folder),
        partial(DataLoader, num_workers=WORKERS, persistent_workers=True),
    ),
    NNUNET: Competitor(
        lambda items, transform, folder, _: NNUNetDataset(items, transform, folder), missing=_needs_blosc2
    ),
    META: Competitor(
        lambda items, transform, folder, _: PersistentDataset(
            items, transform, folder, track_meta=True, weights_only=False
        )
    ),
    "LMDBDataset": Competitor(
        lambda items, transform, folder, _: LMDBDataset(items, transform, folder, progress=False), missing=_needs_lmdb
    ),
    "CacheDataset": Competitor(lambda items, transform, *_: CacheDataset(items, transform, progress=False)),
    # As shipped it reads with KvikIO's default of one thread, which our own dataset raises for the whole process.
    "monai GDSDataset": Competitor(_monais, missing=_needs_kvikio, cuda_only=True, kvikio_threads=1),
    MONAIS: Competitor(_monais, missing=_needs_kvikio, cuda_only=True, kvikio_threads=16),
    NO_CACHE: Competitor(lambda items, transform, *_: Dataset(items, transform)),
}


def competitors_for(device: torch.device, *, loader: bool = False, cold: bool = False) -> list[str]:
    """The caching competitors that serve a device.

    With ``loader``, our dataset through our own loader too; if that is ``cold``, also with reads past the page cache.
    """
    left_out = {NO_CACHE, *_OF_TILES, *_OF_AUGMENTATION}
    left_out |= {*([] if loader else [OURS_LOADER]), *([] if loader and cold else [OURS_DIRECT])}
    return [n for n, c in COMPETITORS.items() if n not in left_out and (device.type == "cuda" or not c.cuda_only)]
