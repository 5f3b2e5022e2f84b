"""What an epoch is made of: its batches, each with the seed of the epoch and its place there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.programmed import Seed

#: In place of a batch, after the last one. A ``collate_fn`` may return None.
NO_BATCH = object()


class Drawn(NamedTuple):
    """A batch that is to be made."""

    places: Sequence[tuple[GDSDataset, int]]  # the dataset and index of each item
    seed: int  # of the epoch
    first: int  # position in the epoch of its first item

    @property
    def seeds(self) -> list[Seed]:
        """What the generators are seeded with for each item."""
        return [(self.seed, self.first + i) for i in range(len(self.places))]


def with_seed(
    generator: torch.Generator | None, draw: Callable[[], Iterator[Sequence[tuple[GDSDataset, int]]]], rank: int
) -> Iterator[Drawn]:
    """The batches of an epoch, whose seed is what torch's loader is about to draw for its workers, and the rank."""
    ahead = (generator or torch.default_generator).clone_state()
    return numbered(draw(), int(torch.empty((), dtype=torch.int64).random_(generator=ahead)), rank)


def numbered(batches: Iterator[Sequence[tuple[GDSDataset, int]]], seed: int, rank: int) -> Iterator[Drawn]:
    """Batches with the positions of their items in the epoch.

    Ranks among which a sampler divides the items draw other numbers from the same seed. All others, such as those of a
    tensor-parallel group, draw the same.
    """
    if rank:
        seed = int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint64)[0]) >> 1
    first = 0
    for places in batches:
        yield Drawn(places, seed, first)
        first += len(places)
