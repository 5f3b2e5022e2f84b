"""What runs in the worker processes of a loader: whole batches on values, or programs of single items.

The work may change from one epoch to the next, with a transform's attribute say. It is then in memory of the loader's
process, which each task names.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from monai.transforms.utils import reset_ops_id

from monai_gds.base.questions import ask
from monai_gds.base.stages import Measurements, Watch, enter, measured
from monai_gds.dataset.broken import is_of_memory
from monai_gds.dataset.programmed import Answer, Seed, draw
from monai_gds.dataset.session import Session
from monai_gds.loader.crew.shared_memory import Mapped, Packed, Place, pack
from monai_gds.pipeline.randomness import seed_everything
from monai_gds.pipeline.settings import State, apply
from monai_gds.pipeline.words import in_words, naming

#: Inference mode, on or off, while this process does its present work.
_inference: AbstractContextManager[Any] = nullcontext()


class Work(NamedTuple):
    """What a worker needs for every task."""

    parts: list[Session]  # of the datasets
    collate: Callable[[list[Any]], Any] | None  # makes a batch of a list of items; None: the loader's process does
    target: torch.device  # where batches go
    state: State  # the settings of the loader's process, and those of the consumer's thread
    inference: bool = False  # whether random transforms run in inference mode


class BatchTask(NamedTuple):
    """One batch, to be made on values."""

    items: list[tuple[int, int]]  # part and index
    seed: int  # of the epoch
    first: int  # position in the epoch of its first item
    place: Place | None
    arenas: frozenset[int]
    measured: bool
    skips: bool  # whether an item that cannot be made is told, rather than raised
    work: Place | None = None  # what the processes do since they began


class Broken(NamedTuple):
    """An item of a batch that cannot be made."""

    number: int  # in the batch
    why: Exception | str


class ItemTask(NamedTuple):
    """One item, whose random transforms are to be recorded."""

    part: int
    number: int
    seed: Seed
    most: int | None
    guesses: Mapping[tuple[int, int], bool]
    address: str | None  # of who computes numbers on the target; None: the worker does, on the CPU
    measured: bool
    work: Place | None = None


class Worker:
    """Does tasks. Work that is pickled is unpickled for the first of them, whose error it then is."""

    def __init__(self, work: Work | bytes) -> None:
        self._given = work
        self._work: Work | None = None
        self._number = -1  # of the work that came later
        self._mapped = Mapped()

    def __call__(self, task: BatchTask | ItemTask) -> tuple[Any, Measurements | None]:
        watch = Watch() if task.measured else None
        with measured(watch):
            done = self._drawn(task) if isinstance(task, ItemTask) else self._packed(task)
        return done, None if watch is None else watch.take()

    def _drawn(self, task: ItemTask) -> Answer:
        work = self._work_of(task.work)
        asked = None if task.address is None else partial(ask, task.address)
        return draw(work.parts[task.part], task.number, task.seed, work.target, task.most, task.guesses, asked)

    def _packed(self, task: BatchTask) -> Packed | Broken:
        work = self._work_of(task.work)
        items: list[Any] = []
        for number, (part, index) in enumerate(task.items):
            try:
                items.append(_item(work.parts[part], index, task.seed, task.first + number))
            except Exception as e:
                if not task.skips or is_of_memory(e):
                    raise
                return Broken(number, in_words(e))
        work.parts[0].flush()  # this process may be killed before its own writer is done
        enter("collating")
        first = None if work.collate is None else _first(items)
        batch = items if work.collate is None else work.collate(items)
        del items  # or the batch would have to copy them
        moving = () if work.target.type == "cpu" else _moving(batch, first)
        return pack(batch, moving, self._mapped.room(task.place, task.arenas))

    def _work_of(self, place: Place | None) -> Work:
        if place is not None and place.number != self._number:
            room = self._mapped.room(place, {place.number})
            if room is None:
                raise RuntimeError("a worker process cannot open the memory in which the dataset is")
            self._given, self._work, self._number = bytes(room), None, place.number
        if self._work is None:
            self._work = _begun(self._given)
        return self._work


def _begun(given: Work | bytes) -> Work:
    try:
        work: Work = pickle.loads(given) if isinstance(given, bytes) else given
    except Exception as e:
        raise ValueError(
            f"a worker process cannot load the dataset: {e}. Define transforms and functions in a module that it can "
            "import, not in a notebook or under `if __name__ == '__main__':`, or install cloudpickle"
        ) from e
    global _inference
    _inference.__exit__(None, None, None)  # of the work before
    _inference = torch.inference_mode(work.inference)  # which a thread hands on to the processes that it forks
    _inference.__enter__()
    apply(work.state)
    with warnings.catch_warnings(action="ignore"):  # of the split: the loader's process has given them
        for part in work.parts:
            part.split()
            part.runtime.alone = True
    return work


def _item(session: Session, index: int, *seed: int) -> Any:
    dataset = session.dataset
    with naming(index, session.data[index]):
        seed_everything(session.split().steps(), *seed)
        item = dataset[index]
    reset_ops_id(item)  # ids differ from those of the user's transforms, which must be able to invert the item
    return item


def _first(items: list[Any]) -> Any:
    """The first item, or the first of the crops of it."""
    found: Any = items
    while isinstance(found, list) and found:
        found = found[0]
    return found


def _moving(value: Any, item: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch that would be on the device if the items had been made there: not those of numbers."""
    if isinstance(value, torch.Tensor):
        if not isinstance(item, (Number, np.ndarray, np.generic)):
            yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _moving(part, _at(item, key))


def _at(item: Any, key: Any) -> Any:
    try:
        return item[key]
    except (LookupError, TypeError):
        return None
