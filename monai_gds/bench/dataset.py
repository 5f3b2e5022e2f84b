"""``monai-gds bench dataset``: cached epochs and hits, beside the peers. Here are the workloads.

:mod:`.peers` has the competitors, :mod:`.race` runs them; :mod:`.first` and :mod:`.memory` ask other questions.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, RandSpatialCropSamplesd, Transform
from rich.progress import Progress

from monai_gds.bench.peers import META, OURS, OURS_LOADER, REFERENCE, peers_for
from monai_gds.bench.race import Contest, race
from monai_gds.bench.report import Report

__all__ = ["Burn", "MakeVolumes", "Settings", "epochs", "hits", "small"]

KEYS = ("image", "label")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes:
        folder: where the caches go.
        device: the target.
        items: how many volumes.
        side: voxels along each side of an item's two float32 volumes.
        repeats: epochs of each peer that count.
        batch_size: items a batch.
        records: how many small records.
        loader: whether our dataset goes through GDSDataLoader too.
        cold: whether epochs begin with nothing in the page cache.
    """

    folder: Path
    device: torch.device
    items: int = 6
    side: int = 235
    repeats: int = 7
    batch_size: int = 1
    records: int = 10_000
    loader: bool = False
    cold: bool = False

    @property
    def item_bytes(self) -> int:
        """Bytes of one item of two volumes."""
        return len(KEYS) * 4 * self.side**3

    @property
    def page_cache(self) -> str:
        """For titles."""
        return "page cache dropped" if self.cold else "page cache warm"


class MakeVolumes(Transform):  # type: ignore[misc]  # MONAI has no type hints to speak of
    """Stands for loading: a float32 tensor of random numbers in the place of each number.

    It adds no key, since monai.data.GDSDataset loses those that are not in the input.

    Args:
        shape: of each tensor.
        nifti: MetaTensors with the 44 keys that a NIfTI file's have, in place of plain tensors.
    """

    def __init__(self, shape: tuple[int, ...], nifti: bool = True) -> None:
        self.shape = shape
        self.nifti = nifti

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(next(iter(item.values())))
        tensors = {key: torch.rand(self.shape, generator=generator) for key in item}
        return {k: MetaTensor(t, meta=dict(nifti_like_meta())) for k, t in tensors.items()} if self.nifti else tensors


class Burn(Transform):  # type: ignore[misc]
    """Computes for so many seconds of this thread's processor time, as preprocessing does; the item stays as it is.

    Sleeping would leave the processor to whoever saves meanwhile.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, item: Any) -> Any:
        numbers = np.linspace(0, 1, 1 << 14)
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            np.sin(numbers, out=numbers)
        return item


@cache
def nifti_like_meta() -> dict[str, Any]:
    """The meta of a real NIfTI file read by MONAI's NibabelReader."""
    import nibabel
    from monai.transforms import LoadImage

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "volume.nii.gz"
        nibabel.save(nibabel.Nifti1Image(np.zeros((2, 2, 2), np.float32), np.eye(4)), path)
        return dict(LoadImage()(path).meta)


def epochs(settings: Settings, crops: int | None = None, progress: Progress | None = None) -> Report:
    """Epochs over a filled cache, in GB/s of cached bytes.

    Args:
        settings: see there.
        crops: sides of the 4 random crops that an item gives after the cache; None for whole volumes.
        progress: where a bar is shown.
    """
    transforms: list[Callable[..., Any]] = [MakeVolumes((1, settings.side, settings.side, settings.side))]
    if crops:
        transforms.append(RandSpatialCropSamplesd(KEYS, (crops,) * 3, num_samples=4, random_size=False))
    what = f"4 random crops of {crops}³ from each of" if crops else "whole volumes,"
    title = (
        f"{what} {settings.items} items of {settings.item_bytes / 1e6:.0f} MB to {settings.device}, "
        f"batch {settings.batch_size}, {settings.page_cache}"
    )
    contest = Contest(
        title, [dict.fromkeys(KEYS, n) for n in range(settings.items)], Compose(transforms), KEYS,
        settings.items * settings.item_bytes, settings.device, _folder(settings, "volumes"),
        peers_for(settings.device, loader=settings.loader, cold=settings.cold), settings.repeats, settings.batch_size,
        cold=settings.cold,
    )  # fmt: skip
    return race(contest, progress)


def hits(settings: Settings, nifti: bool, progress: Progress | None = None) -> Report:
    """What an item costs before its bytes count: 64 items of 64 kB, one by one, without a loader."""
    keys = KEYS if nifti else KEYS[:1]
    what = "two NIfTI MetaTensors of 32 kB" if nifti else "one plain tensor of 64 kB"
    contest = Contest(
        f"hits without a loader, {what}, to {settings.device}", [dict.fromkeys(keys, n) for n in range(64)],
        Compose([MakeVolumes((1, 20, 20, 20) if nifti else (16_000,), nifti)]), keys, 64 * 64_000, settings.device,
        _folder(settings, f"hits-{len(keys)}"), peers_for(settings.device), settings.repeats, None, "items/s",
        ceilings=False,
    )  # fmt: skip
    return race(contest, progress)


def small(settings: Settings, nifti: bool, progress: Progress | None = None) -> Report:
    """Many small records in large batches: one tensor of 64 kB each.

    Args:
        settings: see there; the batch size is 256.
        nifti: MetaTensors as of NIfTI files, and PersistentDataset keeps what they carry, as ours does.
        progress: where a bar is shown.
    """
    what = "NIfTI MetaTensor" if nifti else "plain tensor"
    reference = META if nifti else REFERENCE
    names = [OURS, *([OURS_LOADER] if settings.loader else []), reference, "CacheDataset"]
    contest = Contest(
        f"{settings.records} records of one {what} of 64 kB to {settings.device}, batch 256, {settings.page_cache}",
        [{"image": n} for n in range(settings.records)], Compose([MakeVolumes((16_000,), nifti)]), KEYS[:1],
        settings.records * 64_000, settings.device, _folder(settings, f"small-{what[0]}"), names, settings.repeats,
        256, "items/s", reference, settings.cold,
    )  # fmt: skip
    return race(contest, progress)


def _folder(settings: Settings, name: str) -> Path:
    folder = settings.folder / name
    folder.mkdir(exist_ok=True)
    return folder
