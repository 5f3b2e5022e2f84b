"""``monai-gds demo``, end to end: NIfTI volumes, a MONAI pipeline, epochs of GDSDataset beside PersistentDataset.

It uses public names only, as a user would.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from monai.data import DataLoader, PersistentDataset, ThreadDataLoader
from monai.transforms import Compose, EnsureTyped, LoadImaged, RandRotated, RandZoomd, ResizeWithPadOrCropd, Spacingd
from rich.table import Table

from monai_gds.base.console import progress, say, show, stdout
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.loader import GDSDataLoader
from monai_gds.storage import resolve_device

KEYS = ("image", "label")
SEED = 7

#: Timed epochs of the cached part alone. They are short, and the datasets take turns.
READINGS = 7


def pipeline(size: Sequence[int], *, random: bool = True) -> Compose:
    """The pipeline of MONAI's GDS tutorial; volumes are padded or cropped to ``size`` voxels at the end.

    Without ``random``, it ends before the first random transform.
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


def run(
    items: list[dict[str, str]], cache: Path, *, size: Sequence[int], epochs: int, device: str | None, backend: str
) -> bool:
    """Runs the epochs, prints the table and compares the volumes.

    Args:
        items: pairs of NIfTI files.
        cache: an empty folder for all caches.
        size: see :func:`pipeline`.
        epochs: how many epochs of each dataset run, at least 2: the first one fills the cache.
        device, backend: see :class:`GDSDataset`.

    Returns:
        Whether both datasets returned the same volumes.
    """
    target = resolve_device(device)

    def ours(transform: Compose, folder: str = "gds") -> GDSDataset:
        return GDSDataset(items, transform, cache / folder, target, backend=backend)

    def theirs(transform: Compose) -> PersistentDataset:
        return PersistentDataset(items, transform, cache / "persistent", track_meta=True, weights_only=False)

    with ours(pipeline(size)) as dataset:  # all is saved at its end, also after Ctrl-C: the folder is removed next
        say(f"target {target}, backend {dataset.backend} ({dataset.backend_reason})")
        loaders: dict[str, Callable[[Compose], DataLoader]] = {
            "PersistentDataset": lambda transform: ThreadDataLoader(theirs(transform), batch_size=1, num_workers=0),
            "GDSDataset": lambda transform: ThreadDataLoader(ours(transform), batch_size=1, num_workers=0),
            "GDSDataset, GDSDataLoader": lambda transform: GDSDataLoader(ours(transform, "loader"), batch_size=1),
        }
        whole: dict[str, list[float]] = {name: [] for name in loaders}
        cached: dict[str, list[float]] = {name: [] for name in loaders}
        with progress(stdout) as bars:
            task = bars.add_task("", total=len(items) * len(loaders) * (epochs + 1 + READINGS))
            step = partial(bars.advance, task)
            for name, make in loaders.items():
                bars.update(task, description=name)
                loader = make(pipeline(size))
                whole[name] = [_epoch(loader, target, step) for _ in range(epochs)]
            bars.update(task, description="cache alone")
            short = {name: make(pipeline(size, random=False)) for name, make in loaders.items()}
            for _ in range(1 + READINGS):
                for name, loader in short.items():
                    cached[name].append(_epoch(loader, target, step))
        cached_items = ours(pipeline(size, random=False))
        nbytes = sum(cached_items[i][key].nbytes for i in range(len(items)) for key in KEYS)
        show(_table(whole, cached, nbytes, target))
        same = _same(ours, theirs, size, target)
        words = "same volumes, value by value, under the same seed"
        stdout.print(words if same else "[red]the two datasets gave different volumes", highlight=False)
        return same


def _epoch(loader: DataLoader, device: torch.device, step: Callable[[], object]) -> float:
    """Seconds of one epoch. Every batch is summed on the device: a mapping reads nothing before it is accessed."""
    start = time.perf_counter()
    with closing(iter(loader)) as batches:  # its thread ends with the block, also after Ctrl-C
        for batch in batches:
            for key in KEYS:
                batch[key].to(device).as_subclass(torch.Tensor).sum()
            step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _table(whole: dict[str, list[float]], cached: dict[str, list[float]], nbytes: int, device: torch.device) -> Table:
    table = Table(title=f"{nbytes / 1e6:.0f} MB of cached volumes to {device}", title_justify="left")
    table.caption = (
        "ThreadDataLoader unless named; cache alone: epochs without random transforms, which no cache can shorten"
    )
    for heading in ("", "first epoch", "later epochs", "cache alone", "GB/s", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    reading = {name: statistics.median(seconds[1:]) for name, seconds in cached.items()}
    for name, seconds in whole.items():
        table.add_row(
            name,
            f"{seconds[0]:.2f} s",
            f"{statistics.median(seconds[1:]):.2f} s",
            f"{reading[name]:.3f} s",
            f"{nbytes / reading[name] / 1e9:.2f}",
            f"{reading['PersistentDataset'] / reading[name]:.1f}",
        )
    return table


def _same(ours: Any, theirs: Any, size: Sequence[int], device: torch.device) -> bool:
    """Compares items value by value: as they are cached, and on the CPU also after the random transforms.

    A GPU rounds interpolations differently, so only the cached part can be equal to the last bit there.
    """
    for random in (True, False) if device.type == "cpu" else (False,):
        # Each pipeline draws from its own copy of the same random state, item by item.
        a, b = ours(pipeline(size, random=random)), theirs(pipeline(size, random=random))
        for i in range(len(a)):
            x, y = a[i], b[i]
            if not all(torch.equal(x[k].as_tensor().cpu(), y[k].as_tensor()) for k in KEYS):
                return False
    return True
