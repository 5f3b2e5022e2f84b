"""The order that the next epoch will have, unless somebody draws from the generators until then in another way.

Workers that have nothing left to do go on with it. What they do for an item depends on the epoch's seed and the item's
position only, so a wrong guess costs nothing but their time. Nothing is drawn from anybody's generator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from monai_gds import limits


class Foresight:
    """What a loader learns from its epochs in order to foresee the next.

    Between two of them others draw from torch's generator: each epoch of a validation's loader draws its seed. They are
    taken to draw as often as they did two epochs ago, so that a validation may follow every epoch, or every other one.
    """

    def __init__(self) -> None:
        self._ended: torch.Generator | None = None  # torch's, as it was when the last epoch was all drawn
        self._draws: deque[int] = deque(maxlen=2)  # since then, before the two last epochs

    def began(self) -> None:
        """Notes how often torch's generator was drawn from until now, when an epoch begins."""
        at, self._ended = self._ended, None
        if at is None:
            return
        now, draws = torch.default_generator.get_state(), 0
        while not torch.equal(at.get_state(), now):
            if draws == limits.DRAWS_BETWEEN_EPOCHS:  # or numbers of another kind were drawn
                draws = 0
                break
            _drawn(at)
            draws += 1
        self._draws.append(draws)

    def next_epoch(self, loader: DataLoader[Any]) -> tuple[int, Iterator[Sequence[int]]] | None:
        """The seed of the next epoch and its batches of indices; None where only the sampler itself can tell."""
        batches = loader.batch_sampler
        if type(batches) is not BatchSampler:
            return None
        shared = torch.default_generator.clone_state()
        self._ended = shared.clone_state()
        for _ in range(self._draws[0] if self._draws else 0):
            _drawn(shared)
        own = shared if loader.generator is None else loader.generator.clone_state()
        seed = _drawn(own)  # torch's loader draws it first
        sampler = _as_it_will_be(batches.sampler, loader.generator, own, shared)
        if sampler is None:
            return None
        batches = copy(batches)
        batches.sampler = sampler
        return seed, iter(batches)


def _as_it_will_be(
    sampler: Any, of_loader: torch.Generator | None, own: torch.Generator, shared: torch.Generator
) -> Sampler[int] | None:
    """A copy of a sampler that gives the next epoch. ``own`` is the loader's generator after its seed."""
    found: Sampler[int] = copy(sampler)
    if isinstance(found, RandomSampler) and type(found) is RandomSampler:
        if found.generator is None:
            found.generator = torch.Generator().manual_seed(_drawn(shared))
        else:
            found.generator = own if found.generator is of_loader else found.generator.clone_state()
        return found
    if isinstance(found, DistributedSampler) and type(found) is DistributedSampler:
        found.epoch += 1
        return found
    return found if type(found) is SequentialSampler else None


def _drawn(generator: torch.Generator) -> int:
    """What torch's loader and samplers draw as a seed."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
