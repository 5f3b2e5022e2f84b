"""The position of a loop in its epoch, so that the epoch can be continued later, also in another process.

The loader's thread is ahead of the consumer: it has drawn random numbers for batches that nobody has taken. So each
batch is handed over with the states that the generators of the random transforms had after it. The states of the batch
taken last count: they are saved, and a loop that is left early restores them. The order of the items is not saved: it
is drawn again, from the states that the epoch began with.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import chain, islice
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Sampler, Subset

from monai_gds.errors import warn
from monai_gds.pipeline.randomness import GLOBAL, Slot, is_generator, put_back, slots, states_at

T = TypeVar("T")

#: What a state has.
_PARTS = frozenset({"batches", "order", "transforms", "shared"})

#: What holds the states of all ranks.
_ALL = "of_ranks"

#: With what an epoch continues from another loader's state.
_OTHER_NUMBERS = "the same items, but not with the same random numbers"

#: How the state of every rank is kept.
_REMEDY = "Keep the state of each rank: under Lightning by Trainer(callbacks=[monai_gds.rank_states()])"

#: The number of a batch, and the states of the random transforms before and after it.
Made: TypeAlias = tuple[int, dict[str, Any], dict[str, Any]]

#: Returns what a loop draws from, for a dataset of its loader. None: the dataset's pipeline.
TransformOf = Callable[[Any], Any] | None


class Place:
    """Where the consumer of a loop is. Made before anything is drawn for the epoch.

    Attributes:
        batches: how many the consumer has taken.
        states: the states that the random transforms have for the consumer.
    """

    def __init__(self, loader: DataLoader[Any], transform_of: TransformOf = None) -> None:
        self._by_place, self._rank = bool(loader.num_workers), division(loader)
        self._samplers = _samplers(loader)
        self._order = GLOBAL | _of_samplers(self._samplers)
        self._transforms = _of_transforms(loader.dataset, transform_of)
        self._began: dict[str, Any] = {"states": states_at(self._order), "epochs": self.epochs()}
        self.batches = self._batches_made = 0
        self._before = self.states = self._made = states_at(self._transforms)
        self._turns = 0, 0  # the number of a batch, and how often it is still to be given

    # For the loader's thread

    def made(self) -> Made:
        """Returns the number of the batch that was just made, and the states before and after it, for :meth:`taken`."""
        before, self._made = self._made, states_at(self._transforms)
        self._batches_made += 1
        return self._batches_made, before, self._made

    # For the consumer

    def taken(self, batch: int, before: dict[str, Any] | None = None, after: dict[str, Any] | None = None) -> None:
        """Notes that a batch was taken. Without states, a continued loop makes the batches before it again.

        The one before may have been lost by a Ctrl-C, or be noted later by another thread.
        """
        if batch > self.batches:
            self.batches = batch
            if before is not None and after is not None:
                self._before, self.states = before, after

    @property
    def due(self) -> int:
        """How often the next batch is still to be given, if the loop continues among its repetitions; otherwise 0."""
        batch, times = self._turns
        return times if batch > self.batches else 0

    def repeats(self, times: int) -> None:
        """Notes how often the batch that was taken last is still to be given."""
        self._turns = self.batches, times

    def counted(self, batch: T) -> T:
        """Notes that the next batch of a loop was taken, and returns it."""
        self.taken(self.batches + 1)
        return batch

    def leave(self) -> None:
        """Restores the transforms' states to those of the consumer, unless somebody else has drawn from them."""
        if self._made is not self.states and states_at(self._transforms) == self._made:
            put_back(self._transforms, self.states)

    def state_dict(self, begun: bool) -> dict[str, Any]:
        """The state for :func:`begin_or_go_on`. ``begun``: whether a loop has drawn its order from these states."""
        batch, times = self._turns
        return {
            "batches": batch - 1 if times else self.batches,
            "repeats_left": times,
            "order": self._began,
            "transforms": self._before if times and batch == self.batches else self.states,
            "shared": states_at(GLOBAL),
            "begun": begun,
            "by_place": self._by_place,
            "rank": self._rank,
        }

    # For a loop that continues

    def epochs(self) -> dict[str, int]:
        """The number that ``set_epoch`` was given, by sampler."""
        return {path: s.epoch for path, s in self._samplers.items() if isinstance(getattr(s, "epoch", None), int)}

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Restores all generators to the states that the saved epoch's order was drawn from."""
        self.batches = self._batches_made = state["batches"]
        self._turns = self.batches + 1, state.get("repeats_left", 0)
        self._began = state["order"]
        put_back(self._transforms, state["transforms"])
        put_back(self._order, state["order"]["states"])
        self._before = self.states = self._made = states_at(self._transforms)
        if self.batches or self.due:  # a sampler may be given its epoch until the first batch
            self._set_epochs(state["order"]["epochs"])

    def arrive(self, state: Mapping[str, Any], epochs: Mapping[str, int]) -> None:
        """Restores the generators that training shares to their saved states, once the order is drawn."""
        if state.get("begun", True):
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
    following = list(islice(batches, 1)) if place.due else []  # it was made before the state was taken
    place.arrive(state, epochs)
    if place.batches and not following:
        following = list(islice(batches, 1))
        if not following:
            return Place(loader, transform_of), begin()
    return place, chain(following, batches)


class Loaded(dict[str, Any]):
    """A saved state for one loop, which empties it: of a loader, or of one that Lightning makes with this object."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Loaded:
        """A saved state, or that of the loader from which another is made.

        Raises:
            ValueError: this is not the state of a loader.
        """
        if isinstance(state, cls):
            return state
        if any(_PARTS - one.keys() for one in state.get(_ALL, [state])):
            raise ValueError(
                "this is not a state of GDSDataLoader.state_dict(): was it saved by another kind of loader?"
            )
        return cls(state)


def own(loader: DataLoader[Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """The state from which a loader goes on, of a saved one or of those of all ranks.

    Warns if it is that of another pipeline, or of another rank. Such a rank draws from its own generators then: two
    ranks that draw the same numbers would be worse than one that draws others than it would have drawn.
    """
    rank = division(loader)
    if _ALL in state:
        number = dist.get_rank() if dist.is_available() and dist.is_initialized() else rank[0]
        state = state[_ALL][number if number < len(state[_ALL]) else 0]
    transforms, saved = _of_transforms(loader.dataset), tuple(state.get("rank", rank))
    differ = transforms.keys() ^ state["transforms"].keys()
    if state.get("by_place", loader.num_workers > 0) != (loader.num_workers > 0):
        _warn(f"a loader {'without' if loader.num_workers else 'with'} workers", _OTHER_NUMBERS)
    if differ:
        _warn(f"another pipeline: only one of the two has {', '.join(sorted(differ)[:3])}", _OTHER_NUMBERS)
    if saved == rank:
        return dict(state)
    goes_on = _OTHER_NUMBERS + (", unless all ranks have one seed" if loader.num_workers else "")
    goes_on = "other items" if saved[1] != rank[1] else goes_on
    _warn(f"rank {saved[0]} of {saved[1]}, and this is rank {rank[0]} of {rank[1]}", f"{goes_on}. {_REMEDY}")
    return {**state, "transforms": states_at(transforms), "rank": rank}


def _warn(whose: str, goes_on: str) -> None:
    warn(f"the state is that of {whose}. The epoch continues with {goes_on}", UserWarning)


def rank_states() -> Any:
    """A callback for Lightning's ``Trainer``: checkpoints keep the states of GDSDataLoaders on all ranks.

    Lightning saves those of rank 0, and gives them to all ranks. With this callback, ``trainer.fit(…, ckpt_path=…)``
    gives each rank its own, and a run that was interrupted in the middle of an epoch continues bit for bit.

    Returns:
        A ``LambdaCallback``, of ``pytorch_lightning`` if that was imported, otherwise of ``lightning``.

    Raises:
        ModuleNotFoundError: Lightning is not installed.

    Example:
        >>> import lightning
        >>> from monai_gds import rank_states
        >>> trainer = lightning.Trainer(callbacks=[rank_states()], accelerator="cpu", logger=False)
    """
    kind = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
    return import_module(f"{kind}.callbacks").LambdaCallback(on_save_checkpoint=_keep_all)


def _keep_all(trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
    """Puts the loaders' states of all ranks in the place of one's own. Every rank calls it, as all of Lightning's."""
    loop = checkpoint["loops"]["fit_loop"]["state_dict"]
    mine = loop.get("combined_loader")
    if not mine or trainer.world_size == 1:
        return
    everyone: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everyone, mine)
    loop["combined_loader"] = [
        one if _PARTS - one.keys() else {_ALL: [states[i] for states in everyone]} for i, one in enumerate(mine)
    ]


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


def division(loader: DataLoader[Any]) -> tuple[int, int]:
    """The rank for which a sampler gives the items, and among how many ranks it divides them; 0 and 1 if none does."""
    samplers = (s for s in _samplers(loader).values() if isinstance(s, DistributedSampler))
    return next(((s.rank, s.num_replicas) for s in samplers), (0, 1))


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
