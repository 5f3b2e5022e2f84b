"""``monai-gds bench training``: epochs of a training fed by each peer, against the same training that never waits."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from monai_gds.bench.comparison import SILENT, batches_of
from monai_gds.bench.feeds import CEILING, PEERS, Feed
from monai_gds.bench.pagecache import drop, warmth
from monai_gds.bench.processor import cpu_seconds, synchronize
from monai_gds.bench.report import Report, Row
from monai_gds.bench.segmentation import Network, Training
from monai_gds.errors import BackendUnavailable, StorageError
from monai_gds.pipeline.words import in_words


class Epoch(NamedTuple):
    """Measurements of one epoch, in seconds."""

    whole: float  # until the device had done everything
    first: float  # until the first batch came
    wait: float  # mean time until each other batch came
    cores: float  # processors in use on average, by this process and those that it started


@dataclass(slots=True)
class Run:
    """A peer and its measurements."""

    name: str
    folder: Path  # of its cache
    feed: Feed | None = None
    filled: float = 0.0  # seconds until the first epoch had been trained, with everything that the peer prepares
    epochs: list[Epoch] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)  # share of its files in the page cache before each epoch
    reason: str = ""  # why it cannot go on

    def fill(self, training: Training, network: Network) -> None:
        """Makes the peer's loader and trains the first epoch."""
        self.folder.mkdir()
        start = time.perf_counter()
        self.feed = PEERS[self.name](training, self.folder)
        epoch(network, self.feed.loader, training.steps)
        self.filled = time.perf_counter() - start
        self.feed.flush()

    def again(self, training: Training, network: Network, cold: bool) -> None:
        """Trains another epoch; if it is to be ``cold``, with none of the peer's files in the page cache."""
        assert self.feed is not None
        if cold and (files := [path for path in self.folder.rglob("*") if path.is_file()]):
            self.cached.append(drop(files))
        self.epochs.append(epoch(network, self.feed.loader, training.steps))

    def row(self, ceiling: Run) -> Row:
        """Its row in the table: whole epochs, each divided by the ceiling's of the same round."""
        if self.reason:
            return Row(self.name, reason=self.reason)
        whole, first, wait, cores = zip(*self.epochs, strict=True)
        ratios = tuple(mine / epoch.whole for mine, epoch in zip(whole, ceiling.epochs, strict=True))
        figures = {
            "epoch, s": whole,
            "wait per step, ms": tuple(1e3 * seconds for seconds in wait),
            "first batch, ms": tuple(1e3 * seconds for seconds in first),
            "cores": cores,
        }
        if self is not ceiling:
            figures["first epoch, s"] = (self.filled,)
        return Row(self.name, ratios, "", {"page cache before": warmth(self.cached)} if self.cached else {}, figures)


def compare(
    training: Training, folder: Path, names: Sequence[str], epochs: int, cold: bool = False, progress: Progress = SILENT
) -> Report:
    """Trains with each peer: a first epoch with an empty cache, then epochs in turns.

    A peer that cannot run, or fails, has the reason in its row. After Ctrl-C the turns that were complete are reported.

    Args:
        training: what is trained.
        folder: an empty folder, for the caches.
        names: of :data:`PEERS`; the ceiling is added.
        epochs: how many turns each peer has.
        cold: whether a peer's files are dropped from the page cache before each of its turns.
        progress: shows how far it is.

    Raises:
        KeyboardInterrupt: no turn was complete.
    """
    network = Network(training.device)
    names = [CEILING, *(name for name in names if name != CEILING)]
    runs = [Run(name, folder / str(number)) for number, name in enumerate(names)]
    task = progress.add_task("training", total=len(runs) * (epochs + 1))
    try:
        for turn in range(epochs + 1):
            for run in runs:
                progress.update(task, description=run.name, advance=1)
                if not run.reason:
                    _try(run, training, network, first=not turn, cold=cold)
            if cold and not turn:
                os.sync()  # otherwise the disk would still be writing the caches
    except KeyboardInterrupt:
        if turn < 2:
            raise
        for run in runs:
            del run.epochs[turn - 1 :], run.cached[turn - 1 :]
    finally:  # the folder is removed next
        for run in runs:
            if run.feed is not None:
                run.feed.flush()
    ceiling, *rows = [run.row(runs[0]) for run in runs]
    return Report(training.what, "÷ ceiling", rows, ceilings=[ceiling])


def _try(run: Run, training: Training, network: Network, first: bool, cold: bool) -> None:
    """Gives a peer a turn. Only an error of the ceiling, without which there are no figures, is raised."""
    try:
        with warnings.catch_warnings(action="ignore"):
            if first:
                run.fill(training, network)
            else:
                run.again(training, network, cold)
    except Exception as e:
        if run.name == CEILING:
            raise
        run.reason = str(e) if isinstance(e, BackendUnavailable) else in_words(e)


def epoch(network: Network, loader: Iterable[Mapping[str, Any]], steps: int) -> Epoch:
    """Trains with every batch of a loader.

    Raises:
        StorageError: there were not as many batches as there should be. MONAI's threads lose errors.
    """
    synchronize(network.device)
    used, start = cpu_seconds(), time.perf_counter()
    asked, waits = start, []
    with batches_of(loader) as batches:
        for batch in batches:
            waits.append(time.perf_counter() - asked)
            network.step(batch)
            asked = time.perf_counter()
    synchronize(network.device)
    seconds = time.perf_counter() - start
    if len(waits) != steps:
        raise StorageError(f"{len(waits)} batches came instead of {steps}")
    return Epoch(seconds, waits[0], sum(waits[1:]) / max(len(waits) - 1, 1), (cpu_seconds() - used) / seconds)
