"""The cost of saving: the epoch that fills the cache against one without a cache, and filling it ahead of training."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from monai.transforms import Compose, Transform
from rich.progress import Progress

from monai_gds.bench.comparison import (
    META,
    NO_CACHE,
    OURS,
    OURS_LOADER,
    REFERENCE,
    SILENT,
    Comparison,
    Entrant,
    checksums,
    enter,
    epoch,
)
from monai_gds.bench.report import Report, Row
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.errors import StorageError
from tools.bench.competitors import chosen
from tools.bench.workloads import KEYS, Burn, MakeVolumes, Workload

__all__ = ["filling", "large_items", "medium_items"]

_PREPROCESSING = 0.1  # seconds of processor time, made up
_MEDIUM = (2_000_000, 5_000_000, 10_000_000)  # bytes of items
_LARGE = 100_000_000  # bytes of an item


def medium_items(work: Workload, progress: Progress = SILENT) -> Report:
    """The first epoch over items of up to 10 MB whose transforms take 100 ms."""
    title = f"18 items of 2, 5 and 10 MB after 100 ms of transforms, to {work.device}"
    transform = Compose([Burn(_PREPROCESSING), MakeMedium()])
    return _first(work, "medium", title, 18, transform, progress)


def large_items(work: Workload, progress: Progress = SILENT) -> Report:
    """The first epoch over items of 100 MB."""
    title = f"6 items of {_LARGE / 1e6:.0f} MB to {work.device}"
    return _first(work, "large", title, 6, Compose([MakeVolumes((_LARGE // 4,))]), progress)


class MakeMedium(Transform):  # type: ignore[misc]
    """Makes tensors of 2, 5 and 10 MB in turn."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        return MakeVolumes((_MEDIUM[item["image"] % 3] // 4,))(item)


def _first(work: Workload, name: str, title: str, count: int, transform: Compose, progress: Progress) -> Report:
    """Epochs in turn, each with an empty cache. Saving that is left at the end of an epoch counts too."""
    names = [NO_CACHE, OURS, *([OURS_LOADER] if work.loader else []), REFERENCE, META]
    comparison = Comparison(
        f"first epoch, {title}", [{"image": n} for n in range(count)], transform, KEYS[:1], work.device,
        work.subfolder(f"first-{name}"), chosen(names[1:]), work.repeats, reference=NO_CACHE,
    )  # fmt: skip
    expected = checksums(enter(comparison, NO_CACHE), comparison)
    for name in names[1:]:
        with _emptied(comparison, name) as entrant:
            if checksums(entrant, comparison) != expected:
                raise StorageError(f"{name} gave other bytes in its first epoch than the transforms without a cache")
    epochs: dict[str, list[float]] = {name: [] for name in names}
    flushes: dict[str, list[float]] = {name: [] for name in names}
    task = progress.add_task(comparison.title[:60], total=comparison.repeats)
    for _ in range(comparison.repeats):
        for name in names:
            with _emptied(comparison, name) as entrant:
                epochs[name].append(epoch(entrant, comparison))
                flushes[name].append(_flush(entrant))
        progress.advance(task)
    return Report(comparison.title, comparison.unit, _rows(comparison, epochs, flushes), NO_CACHE)


@contextmanager
def _emptied(comparison: Comparison, name: str) -> Iterator[Entrant]:
    """An entrant with an empty cache, which is removed afterwards."""
    entrant = enter(comparison, name, comparison.folder / "now")
    try:
        yield entrant
    finally:
        entrant.flush()
        shutil.rmtree(entrant.folder)


def _flush(entrant: Entrant) -> float:
    """Seconds until everything is saved."""
    start = time.perf_counter()
    entrant.flush()
    return time.perf_counter() - start


def _rows(comparison: Comparison, epochs: dict[str, list[float]], flushes: dict[str, list[float]]) -> list[Row]:
    seconds = {name: np.add(epochs[name], flushes[name]) for name in epochs}
    added = {name: float(np.median(taken - seconds[NO_CACHE])) for name, taken in seconds.items()}
    plain = statistics.median(epochs[NO_CACHE])
    rows = []
    for name, taken in seconds.items():
        notes = {} if name == NO_CACHE else {
            "epoch": f"{statistics.median(epochs[name]) / plain:.3f} of no cache's",
            "flush after it": f"{statistics.median(flushes[name]):.2f} s",
            "saving adds": f"{added[name]:.2f} s",
            f"of {REFERENCE}'s": f"{added[name] / added[REFERENCE]:.0%}" if added[REFERENCE] > 0 else "",
        }  # fmt: skip
        rows.append(Row(name, tuple((len(comparison.items) / taken).tolist()), notes=notes))
    return rows


def filling(work: Workload, progress: Progress = SILENT) -> Report:
    """``populate`` with one process and with more: items of 2 MB whose transforms take 100 ms."""
    count = 40
    transform = Compose([Burn(_PREPROCESSING), MakeVolumes((500_000,))])
    workers = sorted({1, 2, min(16, len(os.sched_getaffinity(0)))})
    names = {0: "in this process", **{n: f"{n} worker{'s' * (n > 1)}" for n in workers}}
    samples: dict[int, list[float]] = {n: [] for n in names}
    task = progress.add_task("populate", total=work.repeats * len(names))
    for _ in range(work.repeats):
        for n in names:
            samples[n].append(count / _fill(work.folder / "filling", transform, count, n))
            progress.advance(task)
    title = f"populate, {count} items of 2 MB after 100 ms of transforms"
    return Report(title, "items/s", [Row(names[n], tuple(s)) for n, s in samples.items()], names[1])


def _fill(folder: Path, transform: Compose, count: int, workers: int) -> float:
    """Seconds of filling an empty cache."""
    try:
        dataset = GDSDataset([{"image": n} for n in range(count)], transform, folder, "cpu")
        start = time.perf_counter()
        done = dataset.populate(workers, progress=False)
        seconds = time.perf_counter() - start
    finally:
        shutil.rmtree(folder)
    if done.computed != count:
        raise StorageError(f"{done.computed} items were computed instead of {count}")
    return seconds
