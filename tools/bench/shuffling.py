"""``python -m tools.bench shuffling``: a packed folder, shuffled as a whole and within a window, beside its files.

Encoded images come to the CPU, out of the page cache and out of the drive. The ways take turns, epoch by epoch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path

import torch

from monai_gds.bench.pagecache import drop
from monai_gds.bench.report import Report, Row
from monai_gds.imagenet import ImageNetDataset

__all__ = ["WINDOW", "measure"]

#: Files of the packed folder that are shuffled together where not all are.
WINDOW = 8


def measure(
    images: Path, packed: Path, batch_size: int, repeats: int, progress: Callable[[int], None], window: int = WINDOW
) -> list[Report]:
    """Images per second, and classes in a batch, of a folder of images and of one with these images, packed."""
    ways = {"a folder of files": (images, None), "packed": (packed, None), f"packed, window={window}": (packed, window)}
    with ExitStack() as stack:
        sets = {
            name: ImageNetDataset(root, batch_size, device="cpu", decode=False, shuffle=True, window=files)
            for name, (root, files) in ways.items()
        }
        for dataset in sets.values():
            stack.enter_context(closing(dataset))
        done = count(1)
        files = [path for root in (images, packed) for path in root.rglob("*") if path.is_file()]
        return [_turns(sets, repeats, lambda: progress(next(done)), cold) for cold in ([], files)]


def _turns(sets: dict[str, ImageNetDataset], repeats: int, progress: Callable[[], None], cold: list[Path]) -> Report:
    """Epochs of all in turns; before each, the files that are to be ``cold`` are dropped from the page cache."""
    images = len(next(iter(sets.values())).images)
    rates: dict[str, list[float]] = {name: [] for name in sets}
    classes: dict[str, list[int]] = {name: [] for name in sets}
    stayed = 0.0
    for repeat in range(repeats + 1):
        for name, dataset in sets.items():
            stayed = max(stayed, drop(cold))
            start = time.perf_counter()
            labels = [batch["label"] for batch in dataset]
            seconds = time.perf_counter() - start
            if repeat:  # the first epoch warms up, and compares checksums
                rates[name].append(images / seconds)
                classes[name] += [len(torch.unique(batch)) for batch in labels[:-1] or labels]
                progress()
    rows = [
        Row(name, tuple(rates[name]), notes={"classes in a batch": f"{statistics.median(classes[name]):g}"})
        for name in sets
    ]
    cache = f"dropped before each epoch ({stayed:.0%} of it stayed)" if cold else "warm"
    return Report(f"{images} encoded images to the CPU, page cache {cache}", "images/s", rows, reference="packed")
