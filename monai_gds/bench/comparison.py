"""Competitors over one workload: epochs in turn, every batch counted and consumed, every byte checked.

Competitors and the machine's ceilings take turns epoch by epoch, so that whatever else the machine does affects all of
them alike. Before the timed epochs, each competitor runs one in which every tensor is compared with the result of the
transforms without a cache.
"""

from __future__ import annotations

import os
import random
import statistics
import time
import warnings
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import Dataset
from monai.transforms import Compose
from rich.progress import Progress

from monai_gds.bench.ceilings import Ceilings
from monai_gds.bench.competitors import COMPETITORS, NO_CACHE, REFERENCE, Competitor
from monai_gds.bench.costs import Costs, per_item, sizes, spent
from monai_gds.bench.pagecache import drop, warmth
from monai_gds.bench.report import Report, Row
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.engines import in_words
from monai_gds.errors import BackendUnavailable, StorageError

__all__ = ["SILENT", "Comparison", "Entrant", "checksums", "compare", "enter", "epoch"]

#: The progress display of callers that want none.
SILENT = Progress(disable=True)

#: Seed of the random transforms in epochs that are compared.
_SEED = 20


@dataclass(frozen=True, slots=True)
class Comparison:
    """A workload and its competitors.

    Args:
        title: the question it answers.
        items, transform: of the datasets.
        keys: the tensors of a result that are consumed and compared.
        nbytes: bytes of all results together.
        device: the target.
        folder: for the caches, and for the file that the ceilings read.
        names: the competitors.
        repeats: timed epochs of each.
        batch_size: items per batch; None gets single items from the dataset, without a loader.
        unit: ``GB/s`` or ``items/s``.
        reference: the competitor that the others are compared with.
        cold: each epoch begins with none of the competitor's files in the page cache.
        ceilings: measure the machine's ceilings too.
        sizes: show how much smaller each cache is than its results.
        competitors: the competitors by name.
        costs: show processor time and, if ``cold``, bytes from the disk. Then batches are consumed in one thread, since
            torch's threads spin while they wait for one another, which counts as processor time.
    """

    title: str
    items: Sequence[Any]
    transform: Compose
    keys: Sequence[str]
    nbytes: int
    device: torch.device
    folder: Path
    names: Sequence[str]
    repeats: int
    batch_size: int | None = 1
    unit: str = "GB/s"
    reference: str = REFERENCE
    cold: bool = False
    ceilings: bool = True
    sizes: bool = False
    costs: bool = False
    competitors: Mapping[str, Competitor] = field(default_factory=lambda: COMPETITORS)

    @property
    def batches(self) -> int:
        """Batches per epoch."""
        return -(-len(self.items) // (self.batch_size or 1))

    @property
    def amount(self) -> float:
        """What an epoch moves: gigabytes or items, as the unit has it."""
        return self.nbytes / 1e9 if self.unit == "GB/s" else len(self.items)


@dataclass(slots=True)
class Entrant:
    """A competitor with its dataset, and its measurements."""

    name: str
    competitor: Competitor
    dataset: Dataset
    folder: Path
    seconds: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    costs: list[Costs] = field(default_factory=list)
    loader: Iterable[Any] | None = None

    def epoch(self, comparison: Comparison) -> Generator[Iterator[torch.Tensor]]:
        """The tensors of each batch of an epoch, without the competitor's warnings.

        Close the generator, which ends the loader's thread, also after Ctrl-C. A thread that is in torch when the
        interpreter ends would abort it.

        Raises StorageError if the number of batches is wrong.
        """
        seen = 0
        with warnings.catch_warnings(action="ignore"), self.competitor.at_work():
            loader: Iterable[Any]
            if comparison.batch_size is None:
                loader = (self.dataset[i] for i in range(len(self.dataset)))
            else:
                loader = self.loader or self.competitor.loader(self.dataset, batch_size=comparison.batch_size)
                if getattr(loader, "num_workers", 0):  # its workers persist
                    self.loader = loader
            found: Any = iter(loader)  # an iterator of torch's own loader ends with its workers
            with closing(found) if hasattr(found, "close") else nullcontext(found) as batches:
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

    def row(self, comparison: Comparison) -> Row:
        """Its row of the table."""
        notes = {"page cache before": warmth(self.cached) if self.files() else "has no files"} if self.cached else {}
        if comparison.sizes:
            notes |= sizes(self.files(), comparison.keys, comparison.nbytes)
        if comparison.costs:
            notes |= per_item(self.costs, len(comparison.items), comparison.cold)
        if comparison.batch_size is None:
            notes["µs per item"] = f"{1e6 * statistics.median(self.seconds) / len(comparison.items):.0f}"
        return Row(self.name, tuple(comparison.amount / seconds for seconds in self.seconds), notes=notes)


def enter(comparison: Comparison, name: str, folder: Path | None = None) -> Entrant:
    """Makes a competitor's dataset. Raises BackendUnavailable, with the reason, if it cannot run here."""
    competitor = comparison.competitors[name]
    if why := competitor.missing():
        raise BackendUnavailable(why)
    folder = folder or comparison.folder / "".join(c if c.isalnum() else "-" for c in name)
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(action="ignore"), competitor.at_work():
        dataset = competitor.make(comparison.items, comparison.transform, folder, comparison.device)
    return Entrant(name, competitor, dataset, folder)


def compare(comparison: Comparison, progress: Progress = SILENT) -> Report:
    """Runs a comparison. Raises StorageError if batches or bytes differ from those of the transforms."""
    entrants: list[Entrant] = []
    try:
        return _compare(comparison, entrants, progress)
    finally:  # also after Ctrl-C: their folders are removed next
        for entrant in entrants:
            entrant.flush()


def _compare(comparison: Comparison, entrants: list[Entrant], progress: Progress) -> Report:
    rows = {}
    expected = checksums(enter(comparison, NO_CACHE), comparison)
    for name in comparison.names:
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
            if got != wanted:
                raise StorageError(
                    f"{entrant.name} gave other bytes in batch {number} than the transforms without a cache"
                )
        progress.advance(task)
    if comparison.cold:
        os.sync()  # otherwise the disk would still be writing the caches
    ceilings = None
    if comparison.ceilings:
        scale = comparison.amount / (comparison.nbytes / 1e9)
        ceilings = Ceilings(comparison.folder, comparison.device, comparison.nbytes, scale)
    with ceilings or nullcontext():
        for _ in range(comparison.repeats):
            for entrant in entrants:
                if comparison.cold:
                    entrant.cached.append(drop(entrant.files()))
                before = spent()
                entrant.seconds.append(epoch(entrant, comparison))
                entrant.costs.append(spent() - before)
                progress.advance(task)
            if ceilings is not None:
                ceilings.sample()
    rows |= {entrant.name: entrant.row(comparison) for entrant in entrants}
    shown = [rows[name] for name in comparison.names]
    return Report(comparison.title, comparison.unit, shown, comparison.reference, ceilings.rows() if ceilings else ())


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
            with _one_thread() if comparison.costs else nullcontext():
                for tensor in tensors:
                    tensor.to(comparison.device).as_subclass(torch.Tensor).sum()
    if comparison.device.type == "cuda":
        torch.cuda.synchronize(comparison.device)
    return time.perf_counter() - start


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def checksums(entrant: Entrant, comparison: Comparison) -> list[int]:
    """A checksum of the bytes of each batch, over an epoch whose random transforms are seeded."""
    found = []
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(_SEED)
    comparison.transform.set_random_state(_SEED)
    with closing(entrant.epoch(comparison)) as batches:
        for tensors in batches:
            checksum = 0
            for tensor in tensors:
                checksum = zlib.crc32(tensor.as_subclass(torch.Tensor).contiguous().cpu().numpy().data, checksum)
            found.append(checksum)
    return found
