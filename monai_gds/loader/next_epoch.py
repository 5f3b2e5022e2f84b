"""The order that the next epoch will have, if nobody draws from the generators until then.

Workers that have nothing left to do go on with it. What they do for an item depends on the epoch's seed and the item's
position only, so a wrong guess costs nothing but their time. Nothing is drawn from anybody's generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler


def foreseen(loader: DataLoader[Any]) -> tuple[int, Iterator[Sequence[int]]] | None:
    """The seed of the next epoch and its batches of indices; None where only the sampler itself can tell."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return None
    shared = torch.default_generator.clone_state()
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
