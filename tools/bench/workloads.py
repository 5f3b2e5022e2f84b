"""``python -m tools.bench dataset``: cached epochs, single hits and small records, as workloads of
:mod:`.measured`.

:mod:`.first_epoch` and :mod:`.memory` have workloads that are measured in other ways.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import (
    CenterSpatialCropd,
    Compose,
    CropForegroundd,
    EnsureTyped,
    LoadImaged,
    Orientationd,
    RandomizableTransform,
    RandSpatialCropSamplesd,
    ScaleIntensityRanged,
    Spacingd,
    Transform,
)
from rich.progress import Progress

from monai_gds.bench.comparison import META, OURS, OURS_LOADER, REFERENCE, SILENT
from monai_gds.bench.made_up import ct_like
from monai_gds.bench.report import Report, Row
from monai_gds.pipeline.openmp import LOAD_OF_BUSY_MACHINES
from tools.bench.competitors import (
    OURS_WORKERS,
    REFERENCE_WORKERS,
    WORKERS,
    by_loader,
    chosen,
    competitors_for,
    one_by_one,
)
from tools.bench.measured import Measured, measure

__all__ = [
    "KEYS", "Burn", "BurnAgain", "MakeVolumes", "Workload", "augmentation", "busy", "epochs", "hits", "loaders",
    "small",
]  # fmt: skip

KEYS = ("image", "label")


@dataclass(frozen=True, slots=True)
class Workload:
    """The settings of ``bench dataset``, named like its options.

    There are ``items`` of two float32 volumes with ``side`` voxels along each side, and ``records`` small ones.
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
    def page_cache(self) -> str:
        """The state of the page cache, for titles."""
        return "page cache dropped" if self.cold else "page cache warm"

    def subfolder(self, name: str) -> Path:
        """A folder of one workload, made if it does not exist."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder


class MakeVolumes(Transform):  # type: ignore[misc]  # MONAI has no type hints to speak of
    """Stands for loading: replaces each value of an item, a number, by a random float32 tensor.

    With ``nifti``, tensors are MetaTensors with the 44 metadata keys of a NIfTI file. It adds no key, since
    monai.data.GDSDataset drops keys that are not in the input.
    """

    def __init__(self, shape: tuple[int, ...], nifti: bool = True) -> None:
        self.shape = shape
        self.nifti = nifti

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(next(iter(item.values())))
        tensors = {key: torch.rand(self.shape, generator=generator) for key in item}
        return {k: MetaTensor(t, meta=dict(nifti_like_meta())) for k, t in tensors.items()} if self.nifti else tensors


class Burn(Transform):  # type: ignore[misc]
    """Uses seconds of processor time, as preprocessing does, and returns the item unchanged.

    Sleeping would leave the processor to the threads that save.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, item: Any) -> Any:
        numbers = np.linspace(0, 1, 1 << 14)
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            np.sin(numbers, out=numbers)
        return item


class BurnAgain(Burn, RandomizableTransform):  # type: ignore[misc]
    """As :class:`Burn`, but in every epoch, as random transforms do. Draws nothing, so that results can be compared."""


@cache
def nifti_like_meta() -> dict[str, Any]:
    """The metadata of a NIfTI file as MONAI's NibabelReader reads it."""
    import nibabel
    from monai.transforms import LoadImage

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "volume.nii.gz"
        nibabel.save(nibabel.Nifti1Image(np.zeros((2, 2, 2), np.float32), np.eye(4)), path)
        return dict(LoadImage()(path).meta)


def epochs(work: Workload, crops: int | None = None, progress: Progress = SILENT) -> Report:
    """Epochs over a filled cache, in GB/s of cached bytes; of ``crops``³ voxels taken after the cache, if given."""
    item_bytes = len(KEYS) * 4 * work.side**3
    transforms: list[Callable[..., Any]] = [MakeVolumes((1, work.side, work.side, work.side))]
    if crops:
        transforms.append(RandSpatialCropSamplesd(KEYS, (crops,) * 3, num_samples=4, random_size=False))
    what = f"4 random crops of {crops}³ from each of" if crops else "whole volumes,"
    title = (
        f"{what} {work.items} items of {item_bytes / 1e6:.0f} MB to {work.device}, "
        f"batch {work.batch_size}, {work.page_cache}"
    )
    names = competitors_for(work.device, loader=work.loader, cold=work.cold)
    comparison = Measured(
        title, [dict.fromkeys(KEYS, n) for n in range(work.items)], Compose(transforms), KEYS, work.device,
        work.subfolder("volumes"), chosen(names), work.repeats, work.batch_size, "GB/s", cold=work.cold,
        nbytes=work.items * item_bytes,
    )  # fmt: skip
    return measure(comparison, progress)


def loaders(work: Workload, track_meta: bool, progress: Progress = SILENT) -> Report:
    """Epochs over whole CT-like volumes in files, as the spleen tutorial prepares them, through each loader."""
    folder = work.subfolder("loaders")
    scale = ScaleIntensityRanged("image", -57, 164, 0, 1, clip=True)
    transforms = [
        LoadImaged(KEYS, ensure_channel_first=True), scale, CropForegroundd(KEYS, "image"), Orientationd(KEYS, "RAS"),
        Spacingd(KEYS, (1.5, 1.5, 2.0), mode=("bilinear", "nearest")),
        *([] if track_meta else [EnsureTyped(KEYS, track_meta=False)]),
    ]  # fmt: skip
    reference = META if track_meta else REFERENCE
    comparison = Measured(
        f"{work.items} whole volumes of {work.side} x {work.side} x {work.side // 2} voxels to {work.device}, "
        f"{'MetaTensors' if track_meta else 'plain tensors'}, batch {work.batch_size}",
        _ct_files(folder, work), Compose(transforms), KEYS, work.device,
        work.subfolder(f"loaders-{track_meta}"), by_loader(reference), work.repeats, work.batch_size,
        reference=f"{reference}, ThreadDataLoader", ceilings=False, costs=True,
    )  # fmt: skip
    report = measure(comparison, progress)
    least = [{} if not row.samples else {"least ms": f"{1e3 / max(row.samples):.2f}"} for row in report.rows]
    rows = [replace(row, notes={**note, **row.notes}) for row, note in zip(report.rows, least, strict=True)]
    return replace(report, rows=rows)


def _ct_files(folder: Path, work: Workload) -> list[dict[str, str]]:
    """Items of CT-like volumes with voxels of 1.2 x 1.2 x 2 mm, and their labels."""
    import nibabel

    items = [{key: str(folder / f"{key}{n}.nii") for key in KEYS} for n in range(work.items)]
    for n, item in enumerate(items):
        if not Path(item[KEYS[0]]).exists():
            for path, volume in zip(item.values(), ct_like((work.side, work.side, work.side // 2), n), strict=True):
                nibabel.save(nibabel.Nifti1Image(volume, np.diag([-1.2, 1.2, 2.0, 1.0])), path)
    return items


def hits(work: Workload, nifti: bool, progress: Progress = SILENT) -> Report:
    """The fixed cost of an item: 64 items of 64 kB, one by one, without a loader."""
    keys = KEYS if nifti else KEYS[:1]
    what = "two NIfTI MetaTensors of 32 kB" if nifti else "one plain tensor of 64 kB"
    comparison = Measured(
        f"hits without a loader, {what}, to {work.device}", [dict.fromkeys(keys, n) for n in range(64)],
        Compose([MakeVolumes((1, 20, 20, 20) if nifti else (16_000,), nifti)]), keys, work.device,
        work.subfolder(f"hits-{len(keys)}"), repeats=work.repeats, ceilings=False,
        **one_by_one(competitors_for(work.device)),
    )  # fmt: skip
    return measure(comparison, progress)


def small(work: Workload, nifti: bool, progress: Progress = SILENT) -> Report:
    """Many small records of one tensor of 64 kB, in batches of 256.

    With ``nifti``, they are MetaTensors as of NIfTI files, whose metadata PersistentDataset keeps too.
    """
    what = "NIfTI MetaTensor" if nifti else "plain tensor"
    reference = META if nifti else REFERENCE
    names = [OURS, *([OURS_LOADER] if work.loader else []), reference, "CacheDataset"]
    comparison = Measured(
        f"{work.records} records of one {what} of 64 kB to {work.device}, batch 256, {work.page_cache}",
        [{"image": n} for n in range(work.records)], Compose([MakeVolumes((16_000,), nifti)]), KEYS[:1],
        work.device, work.subfolder(f"small-{what[0]}"), chosen(names), work.repeats, 256,
        reference=reference, cold=work.cold, nbytes=work.records * 64_000,
    )  # fmt: skip
    return measure(comparison, progress)


def augmentation(work: Workload, seconds: float, crop: bool, progress: Progress = SILENT) -> Report:
    """Epochs over a filled cache, with random transforms that take ``seconds`` of processor time per item."""
    transforms: list[Callable[..., Any]] = [MakeVolumes((1, work.side, work.side, work.side)), BurnAgain(seconds)]
    if crop:
        transforms.append(CenterSpatialCropd(KEYS, (96, 96, 96)))
    items = 8 * WORKERS * work.batch_size
    what = "the middle 96³" if crop else "whole volumes"
    comparison = Measured(
        f"{what} of {items} items to {work.device} with random transforms of {1e3 * seconds:.0f} ms per item, "
        f"{WORKERS} workers, batch {work.batch_size}",
        [dict.fromkeys(KEYS, n % work.items) for n in range(items)], Compose(transforms), KEYS, work.device,
        work.subfolder("augmentation"), chosen([OURS_WORKERS, OURS_LOADER, REFERENCE_WORKERS]), work.repeats,
        work.batch_size, reference=REFERENCE_WORKERS, ceilings=False,
    )  # fmt: skip
    ideal = Row("the transforms alone, on all workers", (WORKERS / seconds,))
    return replace(measure(comparison, progress), ceilings=[ideal])


def busy(work: Workload, progress: Progress = SILENT) -> Report:
    """Epochs of 8 small items while other processes use the processors too: two per processor."""
    nbytes = len(KEYS) * 4 * 64**3
    names = [OURS, OURS_LOADER, REFERENCE, "CacheDataset"]
    comparison = Measured(
        f"8 items of {nbytes / 1e6:.0f} MB to {work.device}, batch 1, while two other processes per processor compute",
        [dict.fromkeys(KEYS, n) for n in range(8)], Compose([MakeVolumes((1, 64, 64, 64))]), KEYS, work.device,
        work.subfolder("busy"), chosen(names), work.repeats, 1, "GB/s", nbytes=8 * nbytes, ceilings=False,
    )  # fmt: skip
    with _processors_in_use(progress):
        return measure(comparison, progress)


#: Computes until its parent has ended.
_COMPUTE = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"

#: Seconds until the load average over a minute shows the processes.
_LOAD_SECONDS = 150


@contextmanager
def _processors_in_use(progress: Progress) -> Iterator[None]:
    """Runs two processes for each processor, and waits until the machine's load shows them."""
    processors = os.cpu_count() or 1
    processes = []
    task = progress.add_task("waiting until the load shows", total=1)
    end = time.monotonic() + _LOAD_SECONDS
    try:
        for _ in range(2 * processors):
            processes.append(subprocess.Popen([sys.executable, "-c", _COMPUTE]))
        while (load := os.getloadavg()[0] / processors) < LOAD_OF_BUSY_MACHINES and time.monotonic() < end:
            progress.update(task, completed=load / LOAD_OF_BUSY_MACHINES)
            time.sleep(1)
        progress.update(task, completed=1)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
