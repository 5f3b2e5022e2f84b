"""Where a loop is in its epoch, so that the epoch can be continued later, in another process too.

The loader's thread is ahead of the consumer: it has drawn random numbers for batches that nobody has taken. So each
batch is handed over with the states that the generators of the random transforms had behind it, and those of the batch
taken last are what counts: a saved state has them, and a loop that is left early puts the generators back to them. The
order of the items is not saved: it is drawn again, from the states that the epoch began with.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Sampler, Subset

from monai_gds.generators import Slot, is_generator, put_back, slots, states_at

__all__ = ["Counted", "Later", "Place", "begin_or_go_on", "check"]

#: Samplers without a generator of their own draw from these, and so may training.
_SHARED = {
    "torch": Slot(torch, "default_generator"),
    "numpy": Slot(np.random.mtrand, "_rand"),
    "python": Slot(random, "_inst"),
}

_NOTHING = object()


class Place:
    """Where the consumer of a loop is. Made before anything is drawn for the epoch.

    Attributes:
        batches: how many the consumer has taken.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._samplers = _samplers(loader)
        self._order = _SHARED | _of_samplers(self._samplers)
        self._transforms = _of_transforms(loader.dataset)
        self._began: dict[str, Any] = {"states": states_at(self._order), "epochs": self.epochs()}
        self.batches = 0
        self._states = self._left = states_at(self._transforms)

    # For the loader's thread

    def made(self) -> dict[str, Any]:
        """The states behind the batch that was just made, for :meth:`taken`."""
        self._left = states_at(self._transforms)
        return self._left

    # For the consumer

    def taken(self, states: dict[str, Any] | None = None) -> None:
        """Notes that a batch was taken. Without states, a loop that goes on makes the batches before it again."""
        self.batches += 1
        if states is not None:
            self._states = states

    def leave(self) -> None:
        """Puts the transforms back to where the consumer is, unless somebody else has drawn from them."""
        if self._left is not self._states and states_at(self._transforms) == self._left:
            put_back(self._transforms, self._states)

    def state_dict(self, begun: bool) -> dict[str, Any]:
        """What :func:`begin_or_go_on` needs. ``begun``: whether a loop has drawn its order from these states."""
        return {
            "batches": self.batches,
            "order": self._began,
            "transforms": self._states,
            "shared": states_at(_SHARED) if begun else {},
        }

    # For a loop that goes on

    def epochs(self) -> dict[str, int]:
        """The number that ``set_epoch`` was given, by sampler."""
        return {path: s.epoch for path, s in self._samplers.items() if isinstance(getattr(s, "epoch", None), int)}

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Puts all generators where an order is drawn from that was drawn before."""
        self.batches, self._began = state["batches"], state["order"]
        put_back(self._transforms, state["transforms"])
        put_back(self._order, state["order"]["states"])
        self._states = self._left = states_at(self._transforms)
        if self.batches:  # before the first one a sampler may be told its epoch
            self._set_epochs(state["order"]["epochs"])

    def arrive(self, state: Mapping[str, Any], epochs: Mapping[str, int]) -> None:
        """Once the order is drawn: what training shares is put to where it was when the state was taken."""
        put_back(_SHARED, state["shared"])
        self._set_epochs(epochs)

    def _set_epochs(self, epochs: Mapping[str, int]) -> None:
        for path in self._samplers.keys() & epochs.keys():
            self._samplers[path].epoch = epochs[path]


def begin_or_go_on(
    loader: DataLoader[Any], begin: Callable[[], Iterator[Any]], state: Mapping[str, Any] | None
) -> tuple[Place, Iterator[Any]]:
    """Begins an epoch, or continues one behind the batches that were taken. Behind its last one, a new epoch begins."""
    place = Place(loader)
    if state is None:
        return place, begin()
    epochs = place.epochs()
    place.go_to(state)
    batches = begin()
    for _ in islice(batches, place.batches):
        pass
    place.arrive(state, epochs)
    if place.batches:
        following = next(batches, _NOTHING)
        if following is _NOTHING:
            return Place(loader), begin()
        batches = chain([following], batches)
    return place, batches


def check(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    """Refuses what is not the state of a loader, and warns of one whose transforms are others."""
    if {"batches", "order", "transforms", "shared"} - state.keys():
        raise ValueError("this is not what GDSDataLoader.state_dict() gave: was it saved by another kind of loader?")
    differ = _of_transforms(loader.dataset).keys() ^ state["transforms"].keys()
    if differ:
        warnings.warn(
            f"the state is that of another pipeline: only one of the two has {', '.join(sorted(differ)[:3])}. The "
            "epoch continues with the same items, but not with the same random numbers",
            stacklevel=3,
        )


class Counted(Iterator[Any]):
    """A loop of torch's own, with a place."""

    def __init__(self, batches: Iterator[Any], place: Place) -> None:
        self._batches, self._place = batches, place

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._place.taken()
        return batch

    def close(self) -> None:
        """Leaves the loop."""
        self._batches = iter(())


class Later(Iterator[Any]):
    """A loop that begins with its first batch: one that nobody iterates over draws nothing.

    A trainer may begin a loop that it does not use, and tell the sampler of another its epoch after ``iter``.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._begin()
        try:
            return next(self._batches)
        except KeyboardInterrupt:  # as in Epoch
            del self
            raise

    def close(self) -> None:
        """Leaves the loop and ends its thread: ``with contextlib.closing(iter(loader)) as batches: …``."""
        getattr(self._batches, "close", lambda: None)()
        self._batches = iter(())


# ---------------------------------------------------------------------------------------------------------------------
# What random numbers are drawn from


def _samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """A loader's samplers, and those that they ask, by path."""
    found: dict[str, Any] = {"": loader}
    left: dict[str, Any] = {"sampler": loader.sampler, "batch_sampler": loader.batch_sampler}
    while left:
        path, sampler = left.popitem()
        if not hasattr(sampler, "__dict__") or any(sampler is other for other in found.values()):
            continue
        found[path] = sampler
        left |= {f"{path}.{n}": v for n, v in vars(sampler).items() if isinstance(v, Sampler)}
    return found


def _of_samplers(samplers: Mapping[str, Any]) -> dict[str, Slot]:
    return {
        f"{path}.{name}": Slot(sampler, name)
        for path, sampler in samplers.items()
        for name, value in vars(sampler).items()
        if is_generator(value)
    }


def _of_transforms(dataset: Any) -> dict[str, Slot]:
    """The generators of a dataset's pipelines, by path."""
    if isinstance(dataset, Subset):
        return _of_transforms(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        parts = {id(part): part for part in dataset.datasets}
        return {f"{i}.{n}": s for i, p in enumerate(parts.values()) for n, s in _of_transforms(p).items()}
    return slots(getattr(dataset, "transform", None))
