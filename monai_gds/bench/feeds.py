"""The ways to feed a training, for :mod:`.training`: a peer is a function that makes a loader, in :data:`PEERS`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import monai.data
import torch
from monai.data import CacheDataset, DataLoader, Dataset, PersistentDataset, ThreadDataLoader, list_data_collate
from monai.data import GDSDataset as MonaisGDSDataset
from monai.transforms import Compose, EnsureTyped

from monai_gds.bench.segmentation import KEYS, Training
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.errors import BackendUnavailable
from monai_gds.loader import GDSDataLoader
from monai_gds.swap.patching import patch

CEILING = "ceiling: one batch again and again"


class Feed(NamedTuple):
    """What a peer made."""

    loader: Iterable[Mapping[str, Any]]  # of batches, epoch by epoch
    flush: Callable[[], None] = lambda: None  # waits until nothing more is written to the peer's folder


#: Called with the training and an empty folder for a cache. Raises BackendUnavailable, with the reason, if it cannot
#: run here.
Peer: TypeAlias = "Callable[[Training, Path], Feed]"


def same_batch(training: Training, _: Path) -> Feed:
    """The ceiling: nothing but the training, fed with one batch that lies on the device."""
    transform = Compose([*training.deterministic(), *training.random(None)])
    batch = list_data_collate([transform(item) for item in training.items[: training.batch_size]])
    ready = {key: batch[key].as_subclass(torch.Tensor).to(training.device) for key in KEYS}
    return Feed([ready] * training.steps)


def persistent(training: Training, folder: Path, indices: bool = False) -> Feed:
    """MONAI's PersistentDataset; with ``indices``, the voxels that crops are centred on are cached, too."""
    if indices and training.whole:
        raise BackendUnavailable("there are no crops that indices would be for")
    return _in_workers(training, PersistentDataset(training.items, _on_cpu(training, indices), folder))


def in_memory(training: Training, _: Path) -> Feed:
    """MONAI's CacheDataset."""
    items, transform = training.items, _on_cpu(training)
    return _in_workers(training, CacheDataset(items, transform, num_workers=training.workers, progress=False))


def fast(training: Training, _: Path) -> Feed:
    """As MONAI's fast training tutorial: volumes on the device, and indices, in a CacheDataset that copies nothing."""
    indices, device = not training.whole, training.device
    moved = EnsureTyped(KEYS, device=device, track_meta=False)
    transform = Compose([*training.deterministic(indices), moved, *training.random(device, indices)])
    dataset = monai.data.CacheDataset(  # by the name that patch() replaces
        training.items, transform, num_workers=training.workers, progress=False, copy_cache=False
    )
    return _in_a_thread(training, dataset)


def fast_under_patch(training: Training, folder: Path) -> Feed:
    """The same code under ``patch``, which reads its start from records and leaves its epochs as they are."""
    with patch(folder, training.device):
        return fast(training, folder)


def monais_gds(training: Training, folder: Path) -> Feed:
    """MONAI's own GDSDataset."""
    missing = [name for name in ("kvikio", "cupy") if importlib.util.find_spec(name) is None]
    if missing or training.device.type != "cuda":
        raise BackendUnavailable(f"needs {' and '.join(missing) or 'a GPU'}")
    return _in_a_thread(
        training, MonaisGDSDataset(training.items, _on_device(training), folder, training.device.index or 0)
    )


def ours_in_a_thread(training: Training, folder: Path) -> Feed:
    """Our GDSDataset through MONAI's loader."""
    dataset = _ours(training, folder)
    return _in_a_thread(training, dataset)._replace(flush=dataset.flush)


def ours(training: Training, folder: Path, workers: bool, programs: Literal["auto", "fast"] = "auto") -> Feed:
    """Our GDSDataset through our loader."""
    dataset = _ours(training, folder)
    num_workers = training.workers * workers
    loader = GDSDataLoader(dataset, num_workers, programs=programs, **_batches(training))
    return Feed(loader, dataset.flush)


def _ours(training: Training, folder: Path) -> GDSDataset:
    return GDSDataset(training.items, _on_device(training), folder, training.device)


def _on_cpu(training: Training, indices: bool = False) -> Compose:
    return Compose([*training.deterministic(indices), *training.random(None, indices)])


def _on_device(training: Training) -> Compose:
    return Compose([*training.deterministic(), *training.random(training.device)])


def _in_workers(training: Training, dataset: Dataset) -> Feed:
    """In worker processes, which stay from epoch to epoch, and by way of pinned memory."""
    return Feed(
        DataLoader(
            dataset, num_workers=training.workers, persistent_workers=True, pin_memory=training.device.type == "cuda",
            **_batches(training),
        )
    )  # fmt: skip


def _in_a_thread(training: Training, dataset: Dataset) -> Feed:
    return Feed(ThreadDataLoader(dataset, num_workers=0, **_batches(training)))


def _batches(training: Training) -> dict[str, Any]:
    """What all loaders are made with. Each has its own generator, as if it were the only one."""
    generator = torch.Generator().manual_seed(0)
    return {"batch_size": training.batch_size, "shuffle": True, "drop_last": True, "generator": generator}


#: By name. ``tools/bench`` in a clone adds code by hand.
PEERS: dict[str, Peer] = {
    CEILING: same_batch,
    "PersistentDataset, n workers": persistent,
    "PersistentDataset with cached indices, n workers": partial(persistent, indices=True),
    "CacheDataset, n workers": in_memory,
    "MONAI's fast training": fast,
    "MONAI's fast training under patch()": fast_under_patch,
    "monai.data.GDSDataset, ThreadDataLoader": monais_gds,
    "GDSDataset, ThreadDataLoader": ours_in_a_thread,
    "GDSDataLoader, 0 workers": partial(ours, workers=False),
    "GDSDataLoader, n workers": partial(ours, workers=True),
    "GDSDataLoader, n workers, fast programs": partial(ours, workers=True, programs="fast"),
}
