"""The main job, end to end: NIfTI volumes, a MONAI pipeline, epochs with GDSDataset beside PersistentDataset.

``monai-gds demo`` calls :func:`run`. It only uses what a user has.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from monai.data import DataLoader, PersistentDataset, ThreadDataLoader
from monai.transforms import (
    Compose,
    EnsureTyped,
    LoadImaged,
    RandRotated,
    RandZoomd,
    ResizeWithPadOrCropd,
    Spacingd,
)
from rich.console import Console
from rich.table import Table

from monai_gds.dataset import GDSDataset
from monai_gds.loader import GDSDataLoader
from monai_gds.storage import resolve_device
from monai_gds.terminal import progress, say, show

__all__ = ["pipeline", "run"]

KEYS = ("image", "label")
SEED = 7

#: Epochs of the cached part alone that count, a short one each; the datasets take turns.
READINGS = 7


def pipeline(size: Sequence[int], *, random: bool = True) -> Compose:
    """The pipeline of MONAI's GDS tutorial.

    Args:
        size: the voxels that volumes are padded or cropped to at the end.
        random: False leaves out everything from the first random transform on.
    """
    deterministic = [
        LoadImaged(KEYS, ensure_channel_first=True),
        EnsureTyped(KEYS),
        Spacingd(KEYS, pixdim=(1.5, 1.5, 1.5), mode=("bilinear", "nearest")),
    ]
    augmentation = [
        RandRotated(KEYS, range_x=0.3, prob=0.5, mode=("bilinear", "nearest")),
        RandZoomd(KEYS, prob=0.5, min_zoom=0.9, max_zoom=1.1, mode=("trilinear", "nearest")),
        ResizeWithPadOrCropd(KEYS, spatial_size=tuple(size)),
    ]
    compose = Compose([*deterministic, *augmentation] if random else deterministic)
    return compose.set_random_state(SEED)


@dataclass
class Times:
    """Seconds an epoch of one dataset, with everything and for the cached part alone."""

    epochs: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)


def run(
    items: list[dict[str, str]],
    cache: Path,
    *,
    size: Sequence[int],
    epochs: int,
    device: str | None,
    backend: str,
    console: Console,
) -> bool:
    """Runs the epochs, compares the volumes, prints the table.

    Args:
        items: pairs of NIfTI files.
        cache: an empty folder for both caches.
        size: see :func:`pipeline`.
        epochs: how many of each, at least 2: the first one fills the cache.
        device: see :class:`GDSDataset`.
        backend: see :class:`GDSDataset`.
        console: where progress and the table go.

    Returns:
        Whether both datasets gave the same volumes.
    """
    target = resolve_device(device)

    def ours(transform: Compose, folder: str = "gds") -> GDSDataset:
        return GDSDataset(items, transform, cache / folder, target, backend=backend)

    def theirs(transform: Compose) -> PersistentDataset:
        return PersistentDataset(items, transform, cache / "persistent", track_meta=True, weights_only=False)

    dataset = ours(pipeline(size))
    say(f"target {target}, backend {dataset.backend} ({dataset.backend_reason})", console)
    loaders: dict[str, Callable[[Compose], DataLoader]] = {
        "PersistentDataset": lambda transform: ThreadDataLoader(theirs(transform), batch_size=1, num_workers=0),
        "GDSDataset": lambda transform: ThreadDataLoader(ours(transform), batch_size=1, num_workers=0),
        "GDSDataset, GDSDataLoader": lambda transform: GDSDataLoader(ours(transform, "loader"), batch_size=1),
    }
    times = {name: Times() for name in loaders}
    with progress(console) as bars:
        task = bars.add_task("", total=len(items) * len(loaders) * (epochs + 1 + READINGS))
        step = partial(bars.advance, task)
        for name, make in loaders.items():
            bars.update(task, description=name)
            loader = make(pipeline(size))
            times[name].epochs = [_epoch(loader, target, step) for _ in range(epochs)]
        bars.update(task, description="cache alone")
        cached = {name: make(pipeline(size, random=False)) for name, make in loaders.items()}
        for _ in range(1 + READINGS):
            for name, loader in cached.items():
                times[name].reading.append(_epoch(loader, target, step))
    cached_items = ours(pipeline(size, random=False))
    nbytes = sum(cached_items[i][key].nbytes for i in range(len(items)) for key in KEYS)
    show(_table(times, nbytes, target), console)
    same = _same(ours, theirs, size, target)
    console.print(
        "same volumes, value by value, under the same seed" if same else "[red]the two datasets gave different volumes",
        highlight=False,
    )
    return same


def _epoch(loader: DataLoader, device: torch.device, step: Callable[[], object]) -> float:
    """Seconds of one epoch. Every batch is summed on the device, for a mapping reads nothing before somebody looks."""
    start = time.perf_counter()
    for batch in loader:
        for key in KEYS:
            batch[key].to(device).as_subclass(torch.Tensor).sum()
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _table(times: dict[str, Times], nbytes: int, device: torch.device) -> Table:
    table = Table(title=f"{nbytes / 1e6:.0f} MB of cached volumes to {device}", title_justify="left")
    table.caption = "ThreadDataLoader if none is named; cache alone: epochs without random transforms"
    for heading in ("", "first epoch", "later epochs", "cache alone", "GB/s", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    reading = {name: statistics.median(t.reading[1:]) for name, t in times.items()}
    for name, t in times.items():
        later = statistics.median(t.epochs[1:])
        table.add_row(
            name,
            f"{t.epochs[0]:.2f} s",
            f"{later:.2f} s",
            f"{reading[name]:.3f} s",
            f"{nbytes / reading[name] / 1e9:.2f}",
            f"{reading['PersistentDataset'] / reading[name]:.1f}",
        )
    return table


def _same(ours: Any, theirs: Any, size: Sequence[int], device: torch.device) -> bool:
    """Compares items value by value: the cached ones, and on the CPU also those behind the random transforms.

    (A GPU rounds an interpolation differently, so there only what was cached can be equal to the last bit.)
    """
    kinds = (True, False) if device.type == "cpu" else (False,)
    for random in kinds:
        a, b = ours(pipeline(size, random=random)), theirs(pipeline(size, random=random))
        for i in range(len(a)):
            # Both pipelines draw from their own copy of the same random state, item by item.
            x, y = a[i], b[i]
            if not all(torch.equal(x[k].as_tensor().cpu(), y[k].as_tensor()) for k in KEYS):
                return False
    return True
