"""``monai-gds bench dataset``: epochs over a filled cache, and what a hit and a first epoch cost, beside the peers.

One function a peer (:data:`PEERS`), one a workload. Peers take turns epoch by epoch, so that what the machine does
meanwhile hits them all alike; the table shows medians, spread and ratios of one run. Every epoch goes through MONAI's
``ThreadDataLoader``, the number of batches is checked, and every batch is consumed on the target device, so that a lazy
mapping pays for what it gives.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import CacheDataset, Dataset, LMDBDataset, MetaTensor, PersistentDataset, ThreadDataLoader
from monai.data import GDSDataset as MonaiGDSDataset
from monai.transforms import Compose, RandSpatialCropSamplesd, Transform
from rich.progress import Progress

from monai_gds.bench.report import Report, Row
from monai_gds.dataset import GDSDataset

__all__ = ["PEERS", "Settings", "epochs", "first_epoch", "hits"]

KEYS = ("image", "label")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes:
        folder: where the caches go.
        device: the target.
        items: how many.
        side: voxels along each side of an item's two float32 volumes.
        repeats: epochs of each peer that count.
        batch_size: items a batch.
        crops: sides of the 4 random crops an item gives after the cache; None for whole volumes.
    """

    folder: Path
    device: torch.device
    items: int
    side: int
    repeats: int
    batch_size: int = 1
    crops: int | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of one cached item."""
        return len(KEYS) * 4 * self.side**3


class MakeVolumes(Transform):  # type: ignore[misc]  # MONAI has no type hints to speak of
    """Stands for loading and preprocessing: a float32 MetaTensor in the place of each number, as of a NIfTI file.

    It adds no key, since monai.data.GDSDataset loses those that are not in the input.

    Args:
        side: voxels along each side.
        nifti_meta: whether the tensors carry the 44 keys that a NIfTI file's do.
    """

    def __init__(self, side: int, nifti_meta: bool = True) -> None:
        self.side = side
        self.nifti_meta = nifti_meta

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(item["image"])
        shape = (1, self.side, self.side, self.side)
        meta = nifti_like_meta() if self.nifti_meta else {}
        return {key: MetaTensor(torch.rand(shape, generator=generator), meta=dict(meta)) for key in KEYS}


class MakeTensor(Transform):  # type: ignore[misc]
    """One plain float32 tensor of ``nbytes`` bytes in the place of a number."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"image": torch.full((self.nbytes // 4,), float(item["image"]))}


def nifti_like_meta() -> dict[str, Any]:
    """The meta of a real NIfTI file read by MONAI's NibabelReader."""
    import tempfile

    import nibabel
    from monai.transforms import LoadImage

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "volume.nii.gz"
        nibabel.save(nibabel.Nifti1Image(np.zeros((2, 2, 2), np.float32), np.eye(4)), path)
        return dict(LoadImage()(path).meta)


# ---------------------------------------------------------------------------------------------------------------------
# Peers: each makes a dataset.


@dataclass(frozen=True, slots=True)
class Peer:
    """A competitor.

    Attributes:
        make: ``(items, transform, settings) -> dataset``.
        missing: says why it cannot run with these settings; empty when it can.
        cuda_only: whether it serves CUDA targets only.
    """

    make: Callable[[Sequence[Any], Compose, Settings], Dataset]
    missing: Callable[[Settings], str] = lambda settings: ""
    cuda_only: bool = False


def _monai_gds(items: Sequence[Any], transform: Compose, settings: Settings) -> Dataset:
    return GDSDataset(items, transform, settings.folder / "monai_gds", settings.device)


def _persistent(items: Sequence[Any], transform: Compose, settings: Settings) -> Dataset:
    return PersistentDataset(items, transform, settings.folder / "persistent")


def _persistent_meta(items: Sequence[Any], transform: Compose, settings: Settings) -> Dataset:
    cache = settings.folder / "persistent_meta"
    return PersistentDataset(items, transform, cache, track_meta=True, weights_only=False)


def _lmdb(items: Sequence[Any], transform: Compose, settings: Settings) -> Dataset:
    size = 4 * settings.items * max(settings.item_bytes, 1 << 20)
    return LMDBDataset(items, transform, settings.folder / "lmdb", progress=False, lmdb_kwargs={"map_size": size})


def _cache(items: Sequence[Any], transform: Compose, settings: Settings) -> Dataset:
    return CacheDataset(items, transform, progress=False)


def _monai_gds_shipped(items: Sequence[Any], transform: Compose, settings: Settings) -> Dataset:
    # One thread is KvikIO's default, which our own dataset raises for the process.
    return _WithKvikioThreads(MonaiGDSDataset(items, transform, settings.folder / "shipped", settings.device.index), 1)


class _WithKvikioThreads(Dataset):  # type: ignore[misc]
    """MONAI's GDSDataset with KvikIO's process-wide thread count set while it reads, and put back."""

    def __init__(self, dataset: Dataset, threads: int) -> None:
        super().__init__(dataset.data, dataset.transform)
        self._dataset, self._threads = dataset, threads

    def __getitem__(self, index: int) -> Any:
        import kvikio.defaults

        with kvikio.defaults.set("num_threads", self._threads):
            return self._dataset[index]


def _monai_gds_16(items: Sequence[Any], transform: Compose, settings: Settings) -> Dataset:
    dataset = MonaiGDSDataset(items, transform, settings.folder / "shipped16", settings.device.index)
    return _WithKvikioThreads(dataset, 16)


def _needs_lmdb(settings: Settings) -> str:
    return "" if importlib.util.find_spec("lmdb") else "needs lmdb: pip install 'monai_gds[bench]'"


def _needs_kvikio(settings: Settings) -> str:
    missing = [name for name in ("kvikio", "cupy") if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(missing)}" if missing else ""


OURS = "monai_gds GDSDataset"
REFERENCE = "PersistentDataset"

PEERS: dict[str, Peer] = {
    OURS: Peer(_monai_gds),
    REFERENCE: Peer(_persistent),
    "PersistentDataset + meta": Peer(_persistent_meta),
    "LMDBDataset": Peer(_lmdb, missing=_needs_lmdb),
    "CacheDataset": Peer(_cache),
    "monai GDSDataset": Peer(_monai_gds_shipped, missing=_needs_kvikio, cuda_only=True),
    "monai GDSDataset, 16 thr.": Peer(_monai_gds_16, missing=_needs_kvikio, cuda_only=True),
}


def peers(device: torch.device) -> list[str]:
    """The names of those that serve this kind of device."""
    return [name for name, peer in PEERS.items() if device.type == "cuda" or not peer.cuda_only]


# ---------------------------------------------------------------------------------------------------------------------
# Workloads


def epochs(settings: Settings, progress: Progress | None = None, names: Sequence[str] | None = None) -> Report:
    """Epochs over a filled cache, in GB/s of cached bytes."""
    transforms: list[Callable[..., Any]] = [MakeVolumes(settings.side)]
    if settings.crops:
        transforms.append(RandSpatialCropSamplesd(KEYS, (settings.crops,) * 3, num_samples=4, random_size=False))
    items = [dict.fromkeys(KEYS, n) for n in range(settings.items)]
    what = f"4 random crops of {settings.crops}³ from each of" if settings.crops else "whole volumes,"
    title = (
        f"{what} {settings.items} items of {settings.item_bytes / 1e6:.0f} MB to {settings.device}, "
        f"batch {settings.batch_size}, page cache warm"
    )
    return _race(settings, items, Compose(transforms), title, progress, names)


def hits(settings: Settings, kind: str, progress: Progress | None = None) -> Report:
    """What an item costs before its bytes count: items a second of 64 kB, plain or with NIfTI metadata."""
    count = 64
    plain = kind == "plain"
    transform = Compose([MakeTensor(64_000) if plain else MakeVolumes(20)])
    items = [{"image": n} if plain else dict.fromkeys(KEYS, n) for n in range(count)]
    small = Settings(settings.folder / kind, settings.device, count, 20, settings.repeats)
    what = "one plain tensor of 64 kB" if plain else "two NIfTI MetaTensors of 32 kB"
    rows = []
    for name in peers(settings.device):
        peer = PEERS[name]
        why = peer.missing(small)
        if why:
            rows.append(Row(name, reason=why))
            continue
        dataset = peer.make(items, transform, small)
        for _ in range(2):  # fills, then verifies
            _touch_all(dataset, count, small.device)
        samples = [count / _touch_all(dataset, count, small.device) for _ in range(settings.repeats)]
        rows.append(Row(name, tuple(samples), notes={"µs a hit": f"{1e6 / sorted(samples)[len(samples) // 2]:.0f}"}))
    return Report(f"hits without a loader, {what}, to {settings.device}", "items/s", rows, REFERENCE)


def first_epoch(settings: Settings, progress: Progress | None = None) -> Report:
    """The epoch that fills the cache, in items a second, each time with an empty cache."""
    transform = Compose([MakeVolumes(settings.side)])
    items = [dict.fromkeys(KEYS, n) for n in range(settings.items)]
    names = [OURS, REFERENCE, "PersistentDataset + meta", "no cache"]
    samples: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(settings.repeats):
        for name in names:
            empty = Settings(
                settings.folder / f"first-{repeat}-{name}", settings.device, settings.items, settings.side, 1
            )
            peer = PEERS.get(name, Peer(lambda items, transform, settings: Dataset(items, transform)))
            seconds = _epoch(peer.make(items, transform, empty), empty, settings.items)
            samples[name].append(settings.items / seconds)
            _clear(empty.folder)
    title = f"first epoch, {settings.items} items of {settings.item_bytes / 1e6:.0f} MB to {settings.device}"
    return Report(title, "items/s", [Row(name, tuple(s)) for name, s in samples.items()], REFERENCE)


def _race(
    settings: Settings,
    items: Sequence[Any],
    transform: Compose,
    title: str,
    progress: Progress | None,
    names: Sequence[str] | None,
) -> Report:
    racers: dict[str, Dataset] = {}
    reasons: dict[str, str] = {}
    for name in names or peers(settings.device):
        why = PEERS[name].missing(settings)
        if why:
            reasons[name] = why
        else:
            racers[name] = PEERS[name].make(items, transform, settings)
    samples: dict[str, list[float]] = {name: [] for name in racers}
    batches = -(-len(items) // settings.batch_size)
    gigabytes = len(items) * settings.item_bytes / 1e9
    task = progress.add_task(title[:40], total=(settings.repeats + 2) * len(racers)) if progress else None
    for repeat in range(-2, settings.repeats):  # one epoch fills, one verifies
        for name, dataset in racers.items():
            seconds = _epoch(dataset, settings, batches)
            if repeat >= 0:
                samples[name].append(gigabytes / seconds)
            if progress and task is not None:
                progress.advance(task)
    rows = [Row(n, tuple(samples.get(n, ())), reason=reasons.get(n, "")) for n in (*racers, *reasons)]
    return Report(title, "GB/s", rows, REFERENCE)


def _epoch(dataset: Dataset, settings: Settings, batches: int) -> float:
    """Seconds of one epoch in which every batch is consumed.

    Raises:
        RuntimeError: the loader gave another number of batches than it should have.
    """
    seen = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.perf_counter()
        for batch in ThreadDataLoader(dataset, batch_size=settings.batch_size, num_workers=0):
            _consume(batch, settings.device)
            seen += 1
        _settle(settings.device)
        seconds = time.perf_counter() - start
    if seen != batches:
        raise RuntimeError(f"{type(dataset).__name__} gave {seen} batches instead of {batches}")
    return seconds


def _touch_all(dataset: Dataset, count: int, device: torch.device) -> float:
    start = time.perf_counter()
    for i in range(count):
        _consume(dataset[i], device)
    _settle(device)
    return time.perf_counter() - start


def _consume(batch: Any, device: torch.device) -> None:
    """Brings a batch's tensors to the target device if they are not there, and reads every byte of them."""
    for tensor in _tensors(batch):
        tensor.to(device).as_subclass(torch.Tensor).sum()


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    for part in batch if isinstance(batch, (list, tuple)) else [batch]:
        yield from (part[key] for key in KEYS if key in part)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clear(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
