"""What saving costs: the epoch that fills the cache beside one without a cache, and filling it ahead of training."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monai.transforms import Compose
from rich.progress import Progress

from monai_gds.bench.dataset import KEYS, Burn, MakeVolumes, Settings
from monai_gds.bench.peers import META, NO_CACHE, OURS, OURS_LOADER, REFERENCE
from monai_gds.bench.race import Contest, Racer, checksums, enter, epoch
from monai_gds.bench.report import Report, Row
from monai_gds.dataset import GDSDataset
from monai_gds.errors import StorageError

__all__ = ["filling", "large_items", "medium_items"]

#: Seconds of processor time that preprocessing takes, where it is made up.
_PREPROCESSING = 0.1

#: Bytes of a large item.
_LARGE = 100_000_000


def medium_items(settings: Settings, progress: Progress | None = None) -> Report:
    """The first epoch over items of up to 10 MB whose transforms take 100 ms."""
    sizes = (2, 5, 10)
    transform = Compose([Burn(_PREPROCESSING), MakeUpTo(sizes)])
    items = [{"image": n} for n in range(18)]
    title = f"first epoch, {len(items)} items of 2, 5 and 10 MB behind 100 ms of transforms, to {settings.device}"
    nbytes = sum(sizes[n % len(sizes)] for n in range(len(items))) * 1_000_000
    return _first(_contest(settings, "medium", title, items, transform, nbytes), progress)


def large_items(settings: Settings, progress: Progress | None = None) -> Report:
    """The first epoch over items of 100 MB."""
    transform = Compose([MakeVolumes((_LARGE // 4,))])
    items = [{"image": n} for n in range(6)]
    title = f"first epoch, {len(items)} items of {_LARGE / 1e6:.0f} MB to {settings.device}"
    return _first(_contest(settings, "large", title, items, transform, len(items) * _LARGE), progress)


class MakeUpTo(MakeVolumes):
    """Tensors of several sizes in turn, in MB."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(())
        self.sizes = tuple(sizes)

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        size = self.sizes[item["image"] % len(self.sizes)]
        made: dict[str, Any] = MakeVolumes((size * 250_000,))(item)
        return made


def _contest(
    settings: Settings, name: str, title: str, items: Sequence[Any], transform: Compose, nbytes: int
) -> Contest:
    names = [NO_CACHE, OURS, *([OURS_LOADER] if settings.loader else []), REFERENCE, META]
    folder = settings.folder / f"first-{name}"
    folder.mkdir()
    return Contest(
        title, items, transform, KEYS[:1], nbytes, settings.device, folder, names, settings.repeats,
        unit="items/s", reference=NO_CACHE,
    )  # fmt: skip


def _first(contest: Contest, progress: Progress | None) -> Report:
    """Epochs in turn, each with an empty cache. What is still to be saved at the end of an epoch counts too."""
    expected = checksums(enter(contest, NO_CACHE), contest)
    for name in contest.names[1:]:
        with _emptied(contest, name) as racer:
            if checksums(racer, contest) != expected:
                raise StorageError(f"{name} gave other bytes in its first epoch than the transforms without a cache")
    seconds: dict[str, list[float]] = {name: [] for name in contest.names}
    flushes: dict[str, list[float]] = {name: [] for name in contest.names}
    task = progress.add_task(contest.title[:60], total=contest.repeats) if progress else None
    for _ in range(contest.repeats):
        for name in contest.names:
            with _emptied(contest, name) as racer:
                spent = epoch(racer, contest)
                flush = _flush(racer)
            seconds[name].append(spent + flush)
            flushes[name].append(flush)
        if progress is not None and task is not None:
            progress.advance(task)
    return Report(contest.title, contest.unit, _rows(contest, seconds, flushes), NO_CACHE)


@contextmanager
def _emptied(contest: Contest, name: str) -> Iterator[Racer]:
    """A racer with an empty cache, which is removed afterwards."""
    racer = enter(contest, name, contest.folder / "now")
    try:
        yield racer
    finally:
        _flush(racer)
        shutil.rmtree(racer.folder)


def _flush(racer: Racer) -> float:
    start = time.perf_counter()
    if isinstance(racer.dataset, GDSDataset):
        racer.dataset.flush()
    return time.perf_counter() - start


def _rows(contest: Contest, seconds: dict[str, list[float]], flushes: dict[str, list[float]]) -> list[Row]:
    plain = seconds[NO_CACHE]
    added = {name: statistics.median(_minus(taken, plain)) for name, taken in seconds.items()}
    rows = []
    for name, taken in seconds.items():
        without_flush = statistics.median(_minus(taken, flushes[name]))
        notes = {} if name == NO_CACHE else {
            "epoch": f"{without_flush / statistics.median(plain):.3f} of no cache's",
            "flush after it": f"{statistics.median(flushes[name]):.2f} s",
            "saving adds": f"{added[name]:.2f} s",
            f"of {REFERENCE}'s": f"{added[name] / added[REFERENCE]:.0%}" if added[REFERENCE] > 0 else "",
        }  # fmt: skip
        rows.append(Row(name, tuple(len(contest.items) / t for t in taken), notes=notes))
    return rows


def _minus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def filling(settings: Settings, progress: Progress | None = None, count: int = 40) -> Report:
    """``populate`` with one process and more: items of 2 MB whose transforms take 100 ms."""
    transform = Compose([Burn(_PREPROCESSING), MakeVolumes((500_000,))])
    workers = sorted({1, 2, min(16, len(os.sched_getaffinity(0)))})
    names = {0: "in this process", **{n: f"{n} worker{'s' * (n > 1)}" for n in workers}}
    samples: dict[int, list[float]] = {n: [] for n in names}
    task = progress.add_task("populate", total=settings.repeats * len(names)) if progress else None
    for _ in range(settings.repeats):
        for n in names:
            samples[n].append(count / _fill(settings.folder / "filling", transform, count, n))
            if progress is not None and task is not None:
                progress.advance(task)
    title = f"populate, {count} items of 2 MB behind 100 ms of transforms"
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
