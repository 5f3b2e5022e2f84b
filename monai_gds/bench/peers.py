"""The datasets that are compared, and the loaders they go through. One function a peer, one line in :data:`PEERS`."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from monai.data import CacheDataset, Dataset, LMDBDataset, PersistentDataset, ThreadDataLoader
from monai.data import GDSDataset as MonaiGDSDataset
from monai.transforms import Compose

from monai_gds.dataset import GDSDataset
from monai_gds.errors import BackendUnavailable
from monai_gds.loader import GDSDataLoader

__all__ = ["META", "NO_CACHE", "OURS", "OURS_DIRECT", "OURS_LOADER", "PEERS", "REFERENCE", "Peer", "Place", "peers_for"]

OURS = "GDSDataset"
OURS_LOADER = "GDSDataset, GDSDataLoader"
OURS_DIRECT = "GDSDataset, direct_io"
REFERENCE = "PersistentDataset"
META = "PersistentDataset + meta"
NO_CACHE = "no cache"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer works.

    Attributes:
        folder: of its own, for its cache; made when it is missing.
        device: the target.
        nbytes: bytes of all items together.
    """

    folder: Path
    device: torch.device
    nbytes: int


Make: TypeAlias = "Callable[[Sequence[Any], Compose, Place], Dataset]"


@dataclass(frozen=True, slots=True)
class Peer:
    """A competitor.

    Attributes:
        make: makes its dataset.
        loader: what its epochs go through: called with the dataset and ``batch_size``.
        missing: says why it cannot run; empty when it can.
        cuda_only: whether it serves CUDA targets only.
        kvikio_threads: KvikIO's process-wide number of threads while it is at work; None leaves what is set.
    """

    make: Make
    loader: Callable[..., Iterable[Any]] = ThreadDataLoader
    missing: Callable[[], str] = lambda: ""
    cuda_only: bool = False
    kvikio_threads: int | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Sets what the peer wants to be set in the process, and puts it back afterwards."""
        if self.kvikio_threads is None:
            yield
            return
        import kvikio.defaults

        with kvikio.defaults.set("num_threads", self.kvikio_threads):
            yield


def _ours(items: Sequence[Any], transform: Compose, place: Place) -> Dataset:
    return GDSDataset(items, transform, place.folder, place.device)


def _ours_direct(items: Sequence[Any], transform: Compose, place: Place) -> Dataset:
    try:
        with tempfile.NamedTemporaryFile(dir=place.folder) as file:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
    except OSError as e:
        raise BackendUnavailable(f"{place.folder} takes no O_DIRECT: {e.strerror}") from e
    options = {"direct_io": True}
    return GDSDataset(items, transform, place.folder, place.device, backend="posix", backend_options=options)


def _persistent(items: Sequence[Any], transform: Compose, place: Place) -> Dataset:
    return PersistentDataset(items, transform, place.folder)


def _persistent_meta(items: Sequence[Any], transform: Compose, place: Place) -> Dataset:
    return PersistentDataset(items, transform, place.folder, track_meta=True, weights_only=False)


def _lmdb(items: Sequence[Any], transform: Compose, place: Place) -> Dataset:
    size = 4 * max(place.nbytes, len(items) << 20)  # of the file, which is sparse
    return LMDBDataset(items, transform, place.folder, progress=False, lmdb_kwargs={"map_size": size})


def _cache(items: Sequence[Any], transform: Compose, place: Place) -> Dataset:
    return CacheDataset(items, transform, progress=False)


def _monais(items: Sequence[Any], transform: Compose, place: Place) -> Dataset:
    return MonaiGDSDataset(items, transform, place.folder, place.device.index)


def _no_cache(items: Sequence[Any], transform: Compose, place: Place) -> Dataset:
    return Dataset(items, transform)


def _needs_lmdb() -> str:
    return "" if importlib.util.find_spec("lmdb") else "needs lmdb: pip install 'monai_gds[bench]'"


def _needs_kvikio() -> str:
    missing = [name for name in ("kvikio", "cupy") if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(missing)}" if missing else ""


PEERS: dict[str, Peer] = {
    OURS: Peer(_ours),
    OURS_LOADER: Peer(_ours, GDSDataLoader),
    OURS_DIRECT: Peer(_ours_direct, GDSDataLoader),
    REFERENCE: Peer(_persistent),
    META: Peer(_persistent_meta),
    "LMDBDataset": Peer(_lmdb, missing=_needs_lmdb),
    "CacheDataset": Peer(_cache),
    # As shipped it reads with KvikIO's default of one thread, which our own dataset raises for the process.
    "monai GDSDataset": Peer(_monais, missing=_needs_kvikio, cuda_only=True, kvikio_threads=1),
    "monai GDSDataset, 16 thr.": Peer(_monais, missing=_needs_kvikio, cuda_only=True, kvikio_threads=16),
    NO_CACHE: Peer(_no_cache),
}


def peers_for(device: torch.device, *, loader: bool = False, cold: bool = False) -> list[str]:
    """The caching peers that serve this kind of device.

    Args:
        device: the target.
        loader: whether our dataset goes through our own loader too.
        cold: whether nothing is in the page cache; then also past it, through our own loader.
    """
    left_out = {NO_CACHE, *([] if loader else [OURS_LOADER]), *([] if loader and cold else [OURS_DIRECT])}
    return [n for n, p in PEERS.items() if n not in left_out and (device.type == "cuda" or not p.cuda_only)]
