"""Competitors over one workload: epochs in turn, every batch counted and consumed, every byte checked.

Competitors take turns epoch by epoch, so that whatever else the machine does affects all of them alike. Before the
timed epochs, each competitor runs one in which every tensor is compared with the result of the transforms without a
cache. ``tools/bench`` in a clone compares more of them, over made-up data.
"""

from __future__ import annotations

import os
import random
import time
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from monai.data import CacheDataset, Dataset, PersistentDataset, ThreadDataLoader
from monai.transforms import Compose
from rich.progress import Progress

from monai_gds.base import cores
from monai_gds.bench.pagecache import drop, warmth
from monai_gds.bench.processor import synchronize
from monai_gds.bench.report import Report, Row
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.errors import BackendUnavailable, StorageError
from monai_gds.pipeline.words import in_words

OURS = "GDSDataset"
OURS_LOADER = "GDSDataset, GDSDataLoader"
REFERENCE = "PersistentDataset"
META = "PersistentDataset + meta"
NO_CACHE = "no cache"

#: The progress display of callers that want none.
SILENT = Progress(disable=True)

#: Seed of the random transforms in epochs that are compared.
_SEED = 20

#: Makes a dataset of items and a transform, with a separate folder for the cache and the target device.
Make: TypeAlias = "Callable[[Sequence[Any], Compose, Path, torch.device], Dataset]"


class Competitor(NamedTuple):
    """A dataset and its loader."""

    make: Make  # raises BackendUnavailable, with the reason, if it cannot run here
    loader: Callable[..., Iterable[Any]] = ThreadDataLoader  # called with the dataset and batch_size


UNCACHED = Competitor(lambda items, transform, *_: Dataset(items, transform))

MONAIS_DATASETS = {
    REFERENCE: Competitor(lambda items, transform, folder, _: PersistentDataset(items, transform, folder)),
    META: Competitor(
        lambda items, transform, folder, _: PersistentDataset(
            items, transform, folder, track_meta=True, weights_only=False
        )
    ),
    "CacheDataset": Competitor(lambda items, transform, *_: CacheDataset(items, transform, progress=False)),
}


@dataclass(frozen=True)
class Comparison:
    """A workload and its competitors."""

    title: str  # the question it answers
    items: Sequence[Any]
    transform: Compose
    keys: Sequence[str]  # the tensors of a result that are consumed and compared
    device: torch.device
    folder: Path  # for the caches
    competitors: Mapping[str, Competitor]  # by name, in the order of the rows
    repeats: int  # timed epochs of each
    batch_size: int = 1
    unit: str = "items/s"  # of amount per second
    reference: str = REFERENCE  # the competitor that the others are compared with
    cold: bool = False  # each epoch begins with none of the competitor's files in the page cache
    uncached: Competitor = UNCACHED  # gives the results that those of the competitors must equal
    equal: bool = True  # whether they must: a GPU rounds interpolations differently

    @property
    def batches(self) -> int:
        """Batches per epoch."""
        return -(-len(self.items) // self.batch_size)

    @property
    def amount(self) -> float:
        """What an epoch moves."""
        return len(self.items)

    def consume(self, tensors: Iterable[torch.Tensor]) -> None:
        """Uses every byte of a batch on the target."""
        for tensor in tensors:
            tensor.to(self.device).as_subclass(torch.Tensor).sum()

    def time(self, entrant: Entrant) -> float:
        """Seconds of a timed epoch. In a turn, all competitors draw the same random numbers."""
        seed(self.transform, len(entrant.seconds))
        return epoch(entrant, self)

    def notes(self, entrant: Entrant) -> dict[str, str]:
        """Further columns of a competitor's row, as text by heading."""
        if not entrant.cached:
            return {}
        return {"page cache before": warmth(entrant.cached) if entrant.files() else "has no files"}


@dataclass(slots=True)
class Entrant:
    """A competitor with its dataset, and its measurements."""

    name: str
    competitor: Competitor
    dataset: Dataset
    folder: Path
    seconds: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)

    def epoch(self, comparison: Comparison) -> Generator[Iterator[torch.Tensor]]:
        """The tensors of each batch of an epoch, without the competitor's warnings.

        Close the generator, which ends the loader's thread, also after Ctrl-C. A thread that is in torch when the
        interpreter ends would abort it.

        Raises StorageError if the number of batches is wrong.
        """
        seen = 0
        loader = partial(self.competitor.loader, self.dataset, batch_size=comparison.batch_size)
        with warnings.catch_warnings(action="ignore"), batches_of(loader()) as batches:
            for batch in batches:
                parts = batch if isinstance(batch, (list, tuple)) else [batch]
                yield (part[key] for part in parts for key in comparison.keys)
                seen += 1
        if seen != comparison.batches:
            raise StorageError(f"{self.name} gave {seen} batches instead of {comparison.batches}")

    def flush(self) -> None:
        """Waits until everything is saved, so that nothing is written to its folder any more."""
        if isinstance(self.dataset, GDSDataset):
            self.dataset.flush()

    def files(self) -> list[Path]:
        """The files of its cache."""
        return [path for path in self.folder.rglob("*") if path.is_file()]


def busy() -> str:
    """What to say of a machine that does other work, before a comparison; empty if it does not."""
    usable, load = cores.usable(), os.getloadavg()[0]
    if load <= usable / 2:
        return ""
    return f"This machine is busy (load {load:.1f} on {usable} cores), which hides differences, and may invent some."


def batches_of(loader: Iterable[Any]) -> AbstractContextManager[Iterator[Any]]:
    """The batches of an epoch, for a ``with`` block that ends the loader's thread."""
    found: Any = iter(loader)  # an iterator of torch's own loader ends with its workers
    return closing(found) if hasattr(found, "close") else nullcontext(found)


def enter(comparison: Comparison, name: str, folder: Path | None = None) -> Entrant:
    """Makes a competitor's dataset. Raises BackendUnavailable, with the reason, if it cannot run here."""
    competitor = comparison.uncached if name == NO_CACHE else comparison.competitors[name]
    folder = folder or comparison.folder / "".join(c if c.isalnum() else "-" for c in name)
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(action="ignore"):
        dataset = competitor.make(comparison.items, comparison.transform, folder, comparison.device)
    return Entrant(name, competitor, dataset, folder)


def compare(
    comparison: Comparison, progress: Progress = SILENT, after_turn: Callable[[], None] = lambda: None
) -> Report:
    """Runs a comparison, and calls ``after_turn`` whenever each competitor has run one timed epoch.

    Raises:
        StorageError: batches or bytes differ from those of the transforms.
    """
    entrants: list[Entrant] = []
    try:
        return _compare(comparison, entrants, progress, after_turn)
    finally:  # also after Ctrl-C: their folders are removed next
        for entrant in entrants:
            entrant.flush()


def _compare(
    comparison: Comparison, entrants: list[Entrant], progress: Progress, after_turn: Callable[[], None]
) -> Report:
    rows = {}
    expected = checksums(enter(comparison, NO_CACHE), comparison)
    for name in comparison.competitors:
        try:
            entrants.append(enter(comparison, name))
        except BackendUnavailable as e:
            rows[name] = Row(name, reason=str(e))
    task = progress.add_task(comparison.title[:60], total=len(entrants) * (comparison.repeats + 1))
    for entrant in list(entrants):
        try:
            epoch(entrant, comparison)  # fills the cache
            found = checksums(entrant, comparison)
        except Exception:
            reason = _why(entrant)
            if isinstance(entrant.dataset, GDSDataset) or not reason:
                raise
            rows[entrant.name] = Row(entrant.name, reason=reason)
            entrants.remove(entrant)
            continue
        for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
            if comparison.equal and got != wanted:
                raise StorageError(
                    f"{entrant.name} gave other bytes in batch {number} than the transforms without a cache"
                )
        progress.advance(task)
    if comparison.cold:
        os.sync()  # otherwise the disk would still be writing the caches
    for _ in range(comparison.repeats):
        for entrant in entrants:
            if comparison.cold:
                entrant.cached.append(drop(entrant.files()))
            entrant.seconds.append(comparison.time(entrant))
            progress.advance(task)
        after_turn()
    for entrant in entrants:
        rates = tuple(comparison.amount / seconds for seconds in entrant.seconds)
        rows[entrant.name] = Row(entrant.name, rates, notes=comparison.notes(entrant))
    shown = [rows[name] for name in comparison.competitors]
    return Report(comparison.title, comparison.unit, shown, comparison.reference)


def _why(entrant: Entrant) -> str:
    """Why a dataset cannot serve these items; empty if it can. MONAI's threads lose errors: epochs end early."""
    try:
        entrant.dataset[0]
    except Exception as e:
        return in_words(e)
    return ""


def epoch(entrant: Entrant, comparison: Comparison) -> float:
    """Seconds of one epoch in which every batch is consumed on the target."""
    start = time.perf_counter()
    with closing(entrant.epoch(comparison)) as batches:
        for tensors in batches:
            comparison.consume(tensors)
    synchronize(comparison.device)
    return time.perf_counter() - start


def seed(transform: Compose, number: int) -> None:
    """Seeds every generator that random transforms may draw from."""
    for each in (torch.manual_seed, np.random.seed, random.seed):
        each(number)
    transform.set_random_state(number)


def checksums(entrant: Entrant, comparison: Comparison) -> list[int]:
    """A checksum of the bytes of each batch, over an epoch whose random transforms are seeded."""
    found = []
    seed(comparison.transform, _SEED)
    with closing(entrant.epoch(comparison)) as batches:
        for tensors in batches:
            checksum = 0
            for tensor in tensors:
                checksum = zlib.crc32(tensor.as_subclass(torch.Tensor).contiguous().cpu().numpy().data, checksum)
            found.append(checksum)
    return found
