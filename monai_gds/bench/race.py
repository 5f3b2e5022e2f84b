"""Peers against each other over one workload: epochs in turn, every batch counted and consumed, every byte checked.

Peers take turns epoch by epoch, and so do the machine's ceilings, so that what the machine does meanwhile hits them
all alike. Before the epochs that count, each peer gives one in which every tensor is compared with what the transforms
give without a cache.
"""

from __future__ import annotations

import os
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from monai.data import Dataset
from monai.transforms import Compose
from rich.progress import Progress

from monai_gds.bench.ceilings import Ceilings
from monai_gds.bench.pagecache import drop, in_words
from monai_gds.bench.peers import NO_CACHE, PEERS, REFERENCE, Peer, Place
from monai_gds.bench.report import Report, Row
from monai_gds.errors import BackendUnavailable, StorageError

__all__ = ["Contest", "Racer", "checksums", "enter", "race"]

#: The seed of the epochs that are compared.
_SEED = 20

_NONE: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class Contest:
    """What the peers do.

    Attributes:
        title: the question it answers.
        items: of the datasets.
        transform: of the datasets.
        keys: the tensors of a result that are consumed and compared.
        nbytes: of all results together.
        device: the target.
        folder: for the caches, and the file that the ceilings read.
        names: the peers.
        repeats: epochs of each that count.
        batch_size: items a batch; None asks the dataset for item after item, without a loader.
        unit: ``GB/s`` or ``items/s``.
        reference: the peer that the others are compared with.
        cold: whether each epoch begins with nothing of the peer's files in the page cache.
        ceilings: whether the machine's ceilings say something about it.
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

    @property
    def batches(self) -> int:
        """How many an epoch has."""
        return -(-len(self.items) // (self.batch_size or 1))

    @property
    def amount(self) -> float:
        """What an epoch moves, in the unit times a second."""
        return self.nbytes / 1e9 if self.unit == "GB/s" else len(self.items)


@dataclass(slots=True)
class Racer:
    """A peer with its dataset, and what was measured of it."""

    name: str
    peer: Peer
    dataset: Dataset
    folder: Path
    seconds: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)

    def batches(self, batch_size: int | None) -> Iterator[Any]:
        """An epoch."""
        if batch_size is None:
            return (self.dataset[i] for i in range(len(self.dataset)))
        return iter(self.peer.loader(self.dataset, batch_size=batch_size))

    def files(self) -> list[Path]:
        """What lies in its cache."""
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def row(self, contest: Contest) -> Row:
        """What the table shows."""
        notes = {"page cache before": in_words(self.cached) if self.files() else "has no files"} if self.cached else {}
        median = sorted(self.seconds)[len(self.seconds) // 2]
        if contest.batch_size is None:
            notes["µs an item"] = f"{1e6 * median / len(contest.items):.0f}"
        return Row(self.name, tuple(contest.amount / seconds for seconds in self.seconds), notes=notes)


def enter(contest: Contest, name: str, folder: Path | None = None) -> Racer:
    """Makes a peer's dataset.

    Raises:
        BackendUnavailable: the peer cannot run here; the message says why.
    """
    peer = PEERS[name]
    why = peer.missing()
    if why:
        raise BackendUnavailable(why)
    folder = folder or contest.folder / "".join(c if c.isalnum() else "-" for c in name)
    folder.mkdir(parents=True, exist_ok=True)
    with _quietly(), peer.at_work():
        place = Place(folder, contest.device, contest.nbytes)
        return Racer(name, peer, peer.make(contest.items, contest.transform, place), folder)


def race(contest: Contest, progress: Progress | None = None) -> Report:
    """The contest's report.

    Raises:
        StorageError: a peer gave another number of batches than there are, or other bytes than the transforms give.
    """
    racers, rows = [], []
    expected = checksums(enter(contest, NO_CACHE), contest)
    for name in contest.names:
        try:
            racers.append(enter(contest, name))
        except BackendUnavailable as e:
            rows.append(Row(name, reason=str(e)))
    task = progress.add_task(contest.title[:60], total=len(racers) * (contest.repeats + 1)) if progress else None

    def tick() -> None:
        if progress is not None and task is not None:
            progress.advance(task)

    for racer in racers:
        epoch(racer, contest)  # fills the cache
        verify(racer, contest, expected)
        tick()
    if contest.cold:
        os.sync()  # the disk is not to be writing yet what filled the caches
    scale = contest.amount / (contest.nbytes / 1e9)
    with Ceilings(contest.folder, contest.device, contest.nbytes, scale) if contest.ceilings else _NONE as ceilings:
        for _ in range(contest.repeats):
            for racer in racers:
                if contest.cold:
                    racer.cached.append(drop(racer.files()))
                racer.seconds.append(epoch(racer, contest))
                tick()
            if ceilings is not None:
                ceilings.sample()
    by_name = {row.name: row for row in (*rows, *(racer.row(contest) for racer in racers))}
    shown = [by_name[name] for name in contest.names]
    return Report(contest.title, contest.unit, shown, contest.reference, ceilings.rows() if ceilings else ())


def epoch(racer: Racer, contest: Contest) -> float:
    """Seconds of one epoch in which every batch is consumed on the target.

    Raises:
        StorageError: another number of batches came than there are.
    """
    seen = 0
    with _quietly(), racer.peer.at_work():
        start = time.perf_counter()
        for batch in racer.batches(contest.batch_size):
            for tensor in _tensors(batch, contest.keys):
                tensor.to(contest.device).as_subclass(torch.Tensor).sum()
            seen += 1
        if contest.device.type == "cuda":
            torch.cuda.synchronize(contest.device)
        seconds = time.perf_counter() - start
    _count(racer, seen, contest)
    return seconds


def verify(racer: Racer, contest: Contest, expected: Sequence[int]) -> None:
    """An epoch that is not timed, in which the bytes of every batch are compared.

    Raises:
        StorageError: a batch is not what it should be, or their number.
    """
    for number, (got, wanted) in enumerate(zip(checksums(racer, contest), expected, strict=True)):
        if got != wanted:
            raise StorageError(f"{racer.name} gave other bytes in batch {number} than the transforms without a cache")


def checksums(racer: Racer, contest: Contest) -> list[int]:
    """A checksum of the bytes of each batch's tensors, in an epoch whose random transforms are seeded."""
    found = []
    with _quietly(), racer.peer.at_work():
        torch.manual_seed(_SEED)
        contest.transform.set_random_state(_SEED)
        for batch in racer.batches(contest.batch_size):
            checksum = 0
            for tensor in _tensors(batch, contest.keys):
                checksum = zlib.crc32(tensor.as_subclass(torch.Tensor).contiguous().cpu().numpy().data, checksum)
            found.append(checksum)
    _count(racer, len(found), contest)
    return found


def _count(racer: Racer, seen: int, contest: Contest) -> None:
    if seen != contest.batches:
        raise StorageError(f"{racer.name} gave {seen} batches instead of {contest.batches}")


def _tensors(batch: Any, keys: Iterable[str]) -> Iterator[torch.Tensor]:
    for part in batch if isinstance(batch, (list, tuple)) else [batch]:
        yield from (part[key] for key in keys)


def _quietly() -> ExitStack:
    """Peers warn of much that is none of the reader's business here."""
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    return stack
