"""Batches that worker processes make on values: they load items, run the random transforms and collate.

    places and positions of the next batch ──▶ worker: seed, load, transform, collate, pack ──▶ unpack, in order
                                                  │                                               ▲
                                                  └───────────── arena (shared memory) ───────────┘

Used where values are what costs: on a CPU target, and without programs. Two batches per worker are under way. Before
each item, everything that its random transforms draw from is seeded with the epoch's seed and the item's position in
the epoch, so batches do not depend on which worker makes them, nor on how many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from monai.transforms.utils import reset_ops_id

from monai_gds.base.stages import Watch, enter
from monai_gds.dataset.broken import Skipping, is_of_memory
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.errors import WorkerDied
from monai_gds.loader.crew.crew import Crew, Running
from monai_gds.loader.crew.drawn import NO_BATCH, Drawn
from monai_gds.loader.crew.shared_memory import Arena, Packed, unpack
from monai_gds.loader.crew.worker import BatchTask, Broken, Work
from monai_gds.pipeline.randomness import seed_transforms
from monai_gds.pipeline.settings import OfThread
from monai_gds.pipeline.split import Split
from monai_gds.pipeline.words import naming


def work_on_values(
    parts: Sequence[GDSDataset], device: torch.device, collate: Callable[[list[Any]], Any], around: OfThread
) -> tuple[Work, list[int]]:
    """What workers do, and how many random transforms they run for each dataset.

    Raises:
        ValueError: ``compression`` names a codec for GPUs.
    """
    views = [part.session.for_worker(loads="values") for part in parts]
    done = [len(view.split().steps()) for view in views]
    whole = done == [len(part.session.split().steps()) for part in parts]
    return Work(views, collate if whole else None, device, around.with_process(), around.inference), done


class _Batch(NamedTuple):
    """A batch that a worker is making."""

    drawn: Drawn
    running: Running
    arena: Arena | None


class WorkerBatches:
    """The batches of one epoch, in order. Belongs to the loader's thread.

    Args:
        crew: the processes, which have begun this epoch.
        parts: the datasets.
        splits: their pipelines, whose random halves are this loop's own.
        done: how many random transforms workers run, for each dataset.
        device: where batches go.
        batches: what to make.
        watch: adds up what workers measure.
        skipping: what takes the places of items that cannot be made; None: their errors are raised.
        around: the settings of the consumer, which hold for random transforms.

    Attributes:
        whole: whether :meth:`next_batch` returns batches, rather than items for the rest of their transforms.
        complete: whether there are no more batches.
        inference: whether their tensors are made in inference mode.
    """

    finished, plain = (0, 0), False
    inference = False

    def __init__(
        self, crew: Crew, parts: Sequence[GDSDataset], splits: Sequence[Split], done: Sequence[int],
        device: torch.device, batches: Iterable[Drawn], watch: Watch | None,
        skipping: Skipping | None = None, around: OfThread = OfThread((), False),  # noqa: B008 (immutable)
    ) -> None:  # fmt: skip
        self._crew, self._parts, self._splits, self._done = crew, parts, splits, done
        self._skipping, self._around = skipping, around
        self._device, self._batches, self._watch = device, iter(batches), watch
        self.whole = all(len(split.steps()) == n for split, n in zip(splits, done, strict=True))
        self._under_way: deque[_Batch] = deque()
        self._error: Exception | None = None  # raised after the batches under way
        self.complete = False

    def taken(self, finished: tuple[int, int]) -> None:
        """Does nothing, unlike that of ReadAhead: the number of batches bounds what is under way."""

    def next_batch(self) -> Any:
        """The next batch, or its items if some transforms are left to this process; NO_BATCH after the last."""
        while len(self._under_way) < self._crew.order.ahead and self._submit():
            pass
        if not self._under_way:
            if self._error is not None:
                raise self._error
            self.complete = True
            return NO_BATCH
        drawn, running, arena = self._under_way.popleft()
        while (packed := self._result(drawn, running)) is not None:
            if isinstance(packed, Broken):
                broken = packed
            else:
                enter("collating")
                with torch.inference_mode(self.inference):
                    batch = self._unpacked(packed, arena)
                found = batch if self.whole else self._all_finished(drawn, batch)
                if not isinstance(found, Broken):
                    return found
                broken, arena = found, None  # which was given back, or is the memory of these items
            drawn = self._mended(drawn, broken)
            running = self._submitted(drawn, arena)
        return NO_BATCH  # the loop was left

    def next_epoch(self) -> Iterator[None]:
        """Nothing is made of the next epoch."""
        return iter(())

    def _result(self, drawn: Drawn, running: Running) -> Packed | Broken | None:
        """What a worker made of a batch; None if the loop was left."""
        try:
            found: Packed | Broken | None = self._crew.result(running, self._watch)
        except WorkerDied as e:
            e.add_note(f"monai_gds: while making a batch of the items {[index for _, index in drawn.places]}")
            raise
        return found

    def _mended(self, drawn: Drawn, broken: Broken) -> Drawn:
        """The batch with another item in the place of a broken one."""
        assert self._skipping is not None, "no task tells what is broken otherwise"
        places, at = list(drawn.places), broken.number
        places[at] = self._skipping.instead(places[at], drawn.seeds[at], broken.why)
        return drawn._replace(places=places)

    def _submit(self) -> bool:
        """Hands the next batch to the workers; False if there is none, or if drawing it failed."""
        try:
            drawn = next(self._batches, None)
        except Exception as e:  # of the user's sampler, or an index that does not exist
            self._error, self._batches = e, iter(())
            return False
        if drawn is None:
            return False
        arena = self._crew.arenas.take()
        self._under_way.append(_Batch(drawn, self._submitted(drawn, arena), arena))
        return True

    def _submitted(self, drawn: Drawn, arena: Arena | None) -> Running:
        """A batch that workers make."""
        items = [(self._parts.index(dataset), index) for dataset, index in drawn.places]
        place, numbers = None if arena is None else arena.place, self._crew.arenas.numbers
        watched, skips = self._watch is not None, self._skipping is not None
        return self._crew.submit(BatchTask(items, drawn.seed, drawn.first, place, numbers, watched, skips))

    def _unpacked(self, packed: Packed, arena: Arena | None) -> Any:
        """A worker's batch, unpacked on the device."""
        arenas = self._crew.arenas
        arenas.note(packed)
        if arena is None or packed.loose is not None or not packed.spans:
            if arena is not None:
                arenas.give_back(arena)
            return unpack(packed, None, self._copied)
        if self._device.type == "cpu":
            memory = arena.shared(packed.nbytes, partial(arenas.give_back, arena))
            return unpack(packed, memory, lambda buffer, moves: buffer)
        arena.pin(packed.nbytes)
        batch = unpack(packed, arena.memory, self._copied)
        arenas.give_back(arena, torch.cuda.current_stream(self._device).record_event())
        return batch

    def _copied(self, buffer: np.ndarray, moves: bool) -> Any:
        """Copies a buffer to separate memory."""
        if not moves:
            return buffer.copy()
        found = torch.empty(buffer.nbytes, dtype=torch.uint8, device=self._device)
        return found.copy_(torch.from_numpy(buffer), non_blocking=True)

    def _all_finished(self, drawn: Drawn, items: Sequence[Any]) -> list[Any] | Broken:
        """The items of a batch, after the transforms that workers leave to this process, or which one is broken."""
        found: list[Any] = []
        for number, item in enumerate(items):
            try:
                found.append(self._finished(drawn, number, item))
            except Exception as e:
                if self._skipping is None or is_of_memory(e):
                    raise
                return Broken(number, e)
        return found

    def _finished(self, drawn: Drawn, number: int, item: Any) -> Any:
        """One of these items."""
        dataset, index = drawn.places[number]
        part = self._parts.index(dataset)
        split, done = self._splits[part], self._done[part]
        with naming(index, dataset.session.data[index]):
            seed_transforms(split.steps(), drawn.seed, drawn.first + number)
            with self._around.applied():
                item = dataset.session.runtime.global_draws.after(split, item, done)
        reset_ops_id(item)  # the user's own transforms must be able to invert the item
        return item
