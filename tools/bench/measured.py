"""A comparison that also shows what the machine allows, and what epochs and caches cost."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from rich.progress import Progress

from monai_gds.bench.comparison import SILENT, Comparison, Entrant, compare
from monai_gds.bench.report import Report
from tools.bench.ceilings import Ceilings
from tools.bench.costs import Costs, per_item, sizes, spent

__all__ = ["Measured", "measure"]


@dataclass(frozen=True)
class Measured(Comparison):
    """A workload over made-up data.

    Args:
        nbytes: bytes of all results together.
        ceilings: measure the machine's ceilings too.
        sizes: show how much smaller each cache is than its results.
        costs: show processor time and, if ``cold``, bytes from the disk. Then batches are consumed in one thread, since
            torch's threads spin while they wait for one another, which counts as processor time.
        per_item: show the time of an item.
    """

    nbytes: int = 0
    ceilings: bool = True
    sizes: bool = False
    costs: bool = False
    per_item: bool = False
    _costs: dict[str, list[Costs]] = field(default_factory=lambda: defaultdict(list))

    @property
    def amount(self) -> float:
        """What an epoch moves: gigabytes or items, as the unit has it."""
        return self.nbytes / 1e9 if self.unit == "GB/s" else len(self.items)

    def consume(self, tensors: Iterable[torch.Tensor]) -> None:
        """Uses every byte of a batch on the target."""
        with _one_thread() if self.costs else nullcontext():
            super().consume(tensors)

    def time(self, entrant: Entrant) -> float:
        """Seconds of a timed epoch, whose costs are kept."""
        before = spent()
        seconds = super().time(entrant)
        self._costs[entrant.name].append(spent() - before)
        return seconds

    def notes(self, entrant: Entrant) -> dict[str, str]:
        """Further columns of a competitor's row, as text by heading."""
        notes = super().notes(entrant)
        if self.sizes:
            notes |= sizes(entrant.files(), self.keys, self.nbytes)
        if self.costs:
            notes |= per_item(self._costs[entrant.name], len(self.items), self.cold)
        if self.per_item:
            notes["µs per item"] = f"{1e6 * statistics.median(entrant.seconds) / len(self.items):.0f}"
        return notes


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measure(work: Measured, progress: Progress = SILENT) -> Report:
    """Runs a comparison; the machine's ceilings take turns with the competitors."""
    if not work.ceilings:
        return compare(work, progress)
    with Ceilings(work.folder, work.device, work.nbytes, work.amount / (work.nbytes / 1e9)) as ceilings:
        report = compare(work, progress, ceilings.sample)
    return replace(report, ceilings=ceilings.rows())
