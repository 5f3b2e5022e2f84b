"""The position of a loop in its epoch, so that the epoch can be continued later, also in another process.

The loader's thread is ahead of the consumer: it has drawn random numbers for batches that nobody has taken. So each
batch is handed over with the states that the generators of the random transforms had after it. The states of the batch
taken last count: they are saved, and a loop that is left early restores them. The order of the items is not saved: it
is drawn again, from the states that the epoch began with.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from itertools import chain, islice
from typing import Any, TypeVar

from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Sampler, Subset

from monai_gds.loader.stats import MeasuredEpoch
from monai_gds.pipeline.randomness import GLOBAL, Slot, is_generator, put_back, slots, states_at

T = TypeVar("T")

#: Returns what a loop draws from, for a dataset of its loader. None: the dataset's pipeline.
TransformOf = Callable[[Any], Any] | None


class Place:
    """Where the consumer of a loop is. Made before anything is drawn for the epoch.

    Attributes:
        batches: how many the consumer has taken.
    """

    def __init__(self, loader: DataLoader[Any], transform_of: TransformOf = None) -> None:
        self._by_place = bool(loader.num_workers)
        self._samplers = _samplers(loader)
        self._order = GLOBAL | _of_samplers(self._samplers)
        self._transforms = _of_transforms(loader.dataset, transform_of)
        self._began: dict[str, Any] = {"states": states_at(self._order), "epochs": self.epochs()}
        self.batches = self._batches_made = 0
        self._states = self._made = states_at(self._transforms)

    # For the loader's thread

    def made(self) -> tuple[int, dict[str, Any]]:
        """Returns the number of the batch that was just made, and the states after it, for :meth:`taken`."""
        self._made = states_at(self._transforms)
        self._batches_made += 1
        return self._batches_made, self._made

    @property
    def states(self) -> dict[str, Any]:
        """The states that the random transforms have for the consumer."""
        return self._states

    # For the consumer

    def taken(self, batch: int, states: dict[str, Any] | None = None) -> None:
        """Notes that a batch was taken. Without states, a continued loop makes the batches before it again.

        The one before may have been lost by a Ctrl-C, or be noted later by another thread.
        """
        if batch > self.batches:
            self.batches = batch
            if states is not None:
                self._states = states

    def counted(self, batch: T) -> T:
        """Notes that the next batch of a loop was taken, and returns it."""
        self.taken(self.batches + 1)
        return batch

    def leave(self) -> None:
        """Restores the transforms' states to those of the consumer, unless somebody else has drawn from them."""
        if self._made is not self._states and states_at(self._transforms) == self._made:
            put_back(self._transforms, self._states)

    def state_dict(self, begun: bool) -> dict[str, Any]:
        """The state for :func:`begin_or_go_on`. ``begun``: whether a loop has drawn its order from these states."""
        return {
            "batches": self.batches,
            "order": self._began,
            "transforms": self._states,
            "shared": states_at(GLOBAL) if begun else {},
            "by_place": self._by_place,
        }

    # For a loop that continues

    def epochs(self) -> dict[str, int]:
        """The number that ``set_epoch`` was given, by sampler."""
        return {path: s.epoch for path, s in self._samplers.items() if isinstance(getattr(s, "epoch", None), int)}

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Restores all generators to the states that the saved epoch's order was drawn from."""
        self.batches = self._batches_made = state["batches"]
        self._began = state["order"]
        put_back(self._transforms, state["transforms"])
        put_back(self._order, state["order"]["states"])
        self._states = self._made = states_at(self._transforms)
        if self.batches:  # a sampler may be given its epoch until the first batch
            self._set_epochs(state["order"]["epochs"])

    def arrive(self, state: Mapping[str, Any], epochs: Mapping[str, int]) -> None:
        """Restores the generators that training shares to their saved states, once the order is drawn."""
        put_back(GLOBAL, state["shared"])
        self._set_epochs(epochs)

    def _set_epochs(self, epochs: Mapping[str, int]) -> None:
        for path in self._samplers.keys() & epochs.keys():
            self._samplers[path].epoch = epochs[path]


def begin_or_go_on(
    loader: DataLoader[Any], begin: Callable[[], Iterator[Any]], state: Mapping[str, Any] | None,
    transform_of: TransformOf = None,
) -> tuple[Place, Iterator[Any]]:  # fmt: skip
    """Begins an epoch, or continues one after the batches that were taken. If none is left, begins a new epoch."""
    place = Place(loader, transform_of)
    if state is None:
        return place, begin()
    epochs = place.epochs()
    place.go_to(state)
    batches = begin()
    for _ in islice(batches, place.batches):
        pass
    place.arrive(state, epochs)
    if place.batches:
        following = list(islice(batches, 1))
        if not following:
            return Place(loader, transform_of), begin()
        batches = chain(following, batches)
    return place, batches


def check(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    """Raises ValueError unless this is the state of a loader. Warns if it is that of another pipeline."""
    if {"batches", "order", "transforms", "shared"} - state.keys():
        raise ValueError("this is not a state of GDSDataLoader.state_dict(): was it saved by another kind of loader?")
    if state.get("by_place", loader.num_workers > 0) != (loader.num_workers > 0):
        warnings.warn(
            f"the state is that of a loader {'without' if loader.num_workers else 'with'} workers: the epoch continues "
            "with the same items, but not with the same random numbers",
            stacklevel=3,
        )
    differ = _of_transforms(loader.dataset).keys() ^ state["transforms"].keys()
    if differ:
        warnings.warn(
            f"the state is that of another pipeline: only one of the two has {', '.join(sorted(differ)[:3])}. The "
            "epoch continues with the same items, but not with the same random numbers",
            stacklevel=3,
        )


class Later(Iterator[Any]):
    """A loop that begins with its first batch: one that nobody iterates over draws nothing.

    A trainer may begin a loop that it does not use, and tell the sampler of another its epoch after ``iter``. Of
    several threads that share a loop, one begins it. If there is an ``epoch``, the waiting for batches is measured.
    Each batch is given ``times`` times.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]], epoch: MeasuredEpoch | None = None, times: int = 1) -> None:
        self._begin, self._epoch, self._times = begin, epoch, times
        self._again: deque[Any] = deque()  # what is left of the repetitions
        self._batches: Iterator[Any] | None = None
        self._lock = threading.RLock()

    def __next__(self) -> Any:
        if self._times > 1:  # workers that are forked now would inherit the error, and name it as a cause of theirs
            with suppress(IndexError):
                return self._again.popleft()
        try:
            with nullcontext() if self._epoch is None else self._epoch.consumer_waits():
                if self._batches is None:
                    with self._lock:
                        if self._batches is None:
                            self._batches = self._begin()
                batch = next(self._batches)
        except KeyboardInterrupt:  # as in Epoch
            del self
            raise
        self._again.extend([batch] * (self._times - 1))
        return batch

    def close(self) -> None:
        """Leaves the loop and ends its thread: ``with contextlib.closing(iter(loader)) as batches: …``."""
        getattr(self._batches, "close", lambda: None)()
        self._batches = iter(())
        self._again.clear()


# ---------------------------------------------------------------------------------------------------------------------
# Where random numbers are drawn from


def _samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """A loader, its samplers and the samplers within those, by path."""
    # A circle would keep a loader that nobody has, and its processes, until the collector runs.
    found: dict[str, Any] = {"": weakref.proxy(loader)}
    todo: dict[str, Any] = {"sampler": loader.sampler, "batch_sampler": loader.batch_sampler}
    while todo:
        path, sampler = todo.popitem()
        if not hasattr(sampler, "__dict__") or any(sampler is other for other in found.values()):
            continue
        found[path] = sampler
        todo |= {f"{path}.{n}": v for n, v in vars(sampler).items() if isinstance(v, Sampler)}
    return found


def rank_of(loader: DataLoader[Any]) -> int:
    """The rank for which a sampler gives the items; 0 if none divides them among ranks."""
    return next((s.rank for s in _samplers(loader).values() if isinstance(s, DistributedSampler)), 0)


def divides(loader: DataLoader[Any]) -> bool:
    """Whether a sampler divides the items among several ranks."""
    return any(isinstance(s, DistributedSampler) and s.num_replicas > 1 for s in _samplers(loader).values())


def _of_samplers(samplers: Mapping[str, Any]) -> dict[str, Slot]:
    return {
        f"{path}.{name}": Slot(sampler, name)
        for path, sampler in samplers.items()
        for name, value in vars(sampler).items()
        if is_generator(value)
    }


def _of_transforms(dataset: Any, transform_of: TransformOf = None) -> dict[str, Slot]:
    """The generators of a dataset's pipelines, by path."""
    if isinstance(dataset, Subset):
        return _of_transforms(dataset.dataset, transform_of)
    if isinstance(dataset, ConcatDataset):
        parts = {id(part): part for part in dataset.datasets}
        return {f"{i}.{n}": s for i, p in enumerate(parts.values()) for n, s in _of_transforms(p, transform_of).items()}
    return slots(transform_of(dataset) if transform_of else getattr(dataset, "transform", None))
