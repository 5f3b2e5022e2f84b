"""An epoch of ``GDSDataLoader``: what runs in its thread, and what the consumer iterates over.

:mod:`.data_loader` draws the stages. Here they are put together, begun, left and ended.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias

import torch

from monai_gds.base.process import Owner, undisturbed
from monai_gds.base.stages import Watch, enter, measured
from monai_gds.dataset.broken import Skipping
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.repeats import compare_seeds
from monai_gds.errors import shorten, warn
from monai_gds.loader.ahead import ReadAhead
from monai_gds.loader.collate import collate
from monai_gds.loader.crew.crew import Crew
from monai_gds.loader.crew.drawn import NO_BATCH, Drawn, numbered, with_seed
from monai_gds.loader.crew.on_values import WorkerBatches, work_on_values
from monai_gds.loader.crew.programs import Programs
from monai_gds.loader.crew.worker import Work
from monai_gds.loader.hand_over import HandOver, metadata_in
from monai_gds.loader.resume import Made, Place, begin_or_go_on, division
from monai_gds.loader.subsets import find_item, gds_datasets
from monai_gds.pipeline.loops import Loop
from monai_gds.pipeline.openmp import heed_load
from monai_gds.pipeline.settings import OfThread

#: A GDSDataLoader, whose module imports this one.
Loader: TypeAlias = Any

#: Seconds that leaving a loop waits for its thread, so that the next loop finds random transforms at rest. Bounded,
#: because the garbage collector may leave a loop in a thread that holds a lock the loader's thread waits for.
_LEAVE_SECONDS = 60.0


#: An epoch's loops over its datasets: until their end, nobody else draws from the same random transforms.
Loops = Mapping[GDSDataset, Loop]


def _drawn_from(loops: Loops, dataset: Any) -> Any:
    """The pipeline that an epoch draws from."""
    return loops[dataset].split(dataset.session.split()).compose


def end_all(loops: Loops) -> None:
    """Ends the loops: whoever begins to draw now has MONAI's objects."""
    for loop in loops.values():
        loop.end()


class Epoch(Iterator[Any]):
    """One pass over a loader: what the consumer iterates over.

    The thread has no reference to this object, so the loop can be dropped half-way, which stops the thread.

    Attributes:
        place: where the consumer is.
    """

    def __init__(
        self,
        loader: Loader,
        device: torch.device,
        state: Mapping[str, Any] | None,
        watch: Watch | None,
        loops: Loops,
        around: OfThread,
    ) -> None:
        for left in _left_threads - {threading.current_thread()}:  # a transform may begin a loop
            _leave(left, _LEAVE_SECONDS)
        if device.type == "cpu":
            heed_load()
        ahead, assemble, place, crew = _stages(loader, device, state, watch, loops, around)
        self.place = place
        self._owner = Owner()

        def on_taken(mark: tuple[tuple[int, int], Made]) -> None:
            ahead.taken(mark[0])
            place.taken(*mark[1])

        self._hand_over = HandOver(device, on_taken, place.leave, loader.batches_waiting())
        work = ahead, crew, assemble, self._hand_over, place, watch, loops, loader.collate_fn is collate
        self.thread = threading.Thread(target=_produce, args=work, name="monai-gds-loader", daemon=True)
        #: Leaves the loop, which ends the thread.
        news = None if crew is None else crew.news
        parts = self._owner, self._hand_over, self.thread, place, news, loader.skipping
        self.stop = weakref.finalize(self, _stop, *parts)
        self.stop.atexit = False
        _epochs.add(self)
        try:
            # Loops whose threads start_thread() began used more memory, probably since its second thread takes turns
            # with theirs in malloc's arenas: a training under a limit was killed that is not this way.
            with undisturbed():
                self.thread.start()
        except BaseException:  # also a Ctrl-C, whose traceback may keep this object
            self.stop()
            raise

    def __next__(self) -> Any:
        if not self._owner.is_this_process():
            raise RuntimeError("this loop was begun before a fork: begin a new one in the child")
        try:
            return self._hand_over.take()
        except KeyboardInterrupt:  # the loop may go on after it, if anybody has it; a notebook keeps the traceback
            del self
            raise
        except BaseException as e:
            self.stop()
            shorten(e)
            raise

    def close(self) -> None:
        """Leaves the loop and ends its thread."""
        self.stop()


#: Epochs whose loops are not over.
_epochs: weakref.WeakSet[Epoch] = weakref.WeakSet()

#: Threads of loops that were left, which may still run. The next loop waits for them, and the interpreter at exit.
_left_threads: set[threading.Thread] = set()


@atexit.register  # runs before the writer's handler, which saves what these threads computed last
def _stop_all() -> None:
    for epoch in list(_epochs):
        epoch.stop()
    for thread in {epoch.thread for epoch in list(_epochs)} | _left_threads:
        _leave(thread, None)  # however long it takes: one that is in torch while the interpreter ends would abort it


def _stages(
    loader: Loader,
    device: torch.device,
    state: Mapping[str, Any] | None,
    watch: Watch | None,
    loops: Loops,
    around: OfThread,
) -> tuple[ReadAhead | WorkerBatches, Callable[[Any], Any], Place, Crew | None]:
    """What makes items and batches, where the consumer is, and the worker processes."""
    draw, skipping = partial(_drawn, loader), loader.skipping
    in_flight = loader.records_in_flight, partial(loader.bytes_in_flight, device)

    def assemble(items: list[Any]) -> Any:
        with around.applied():
            return loader.assemble(items)

    def begin() -> Iterator[Drawn]:
        drawn = with_seed(loader.generator, draw, division(loader)[0])
        return drawn if skipping is None else skipping.over(drawn)

    if not loader.num_workers:
        place, batches = begin_or_go_on(loader, begin, state, partial(_drawn_from, loops))
        if division(loader)[1] > 1:
            compare_seeds(next(iter(loops)).settings, place.states)
        reading = ReadAhead(batches, *in_flight, None, skipping, around)
        return reading, partial(_with_memory, reading, assemble), place, None
    parts = gds_datasets(loader.dataset)
    loader.foresight.began()
    # By place: workers seed what they draw from, and this process draws from copies.
    place, batches = begin_or_go_on(loader, begin, state)
    if loader.records(device):
        views = [part.session.for_worker(loads="programs") for part in parts]
        crew = loader.crew(Work(views, None, device, around.with_process()))
        trusts = [loader.trust(part) for part in parts]
        own = dict(zip(parts, crew.splits(parts), strict=True))
        programs = Programs(crew, own, trusts, watch, partial(_foreseen, loader))
        reading = ReadAhead(batches, *in_flight, programs, skipping, around)
        return reading, partial(_with_memory, reading, assemble), place, crew
    work, done = work_on_values(parts, device, loader.collation, around)
    crew = loader.crew(work)
    made = WorkerBatches(crew, parts, crew.splits(parts), done, device, batches, watch, skipping, around)
    made.inference = around.inference and loader.around == "iter"  # ThreadDataLoader unpacks in a thread
    return made, loader.pinned if made.whole else assemble, place, crew


def _with_memory(reading: ReadAhead, assemble: Callable[[Any], Any], items: list[Any]) -> Any:
    return reading.with_memory(partial(assemble, items))


def _drawn(loader: Loader) -> Iterator[list[tuple[GDSDataset, int]]]:
    """The dataset and index of each item, by batch. The first batch, and with it a sampler's seed, is drawn at once."""
    batches, dataset = loader.index_batches(), loader.dataset
    drawn = chain(list(islice(batches, 1)), batches)
    return ([find_item(dataset, index) for index in indices] for indices in drawn)


def _foreseen(loader: Loader) -> Iterator[Drawn]:
    """The batches of the next epoch, as far as that can be told and is wanted."""
    found, dataset = loader.foresight.next_epoch(loader) if loader.foresees else None, loader.dataset
    if found is not None:
        seed, batches = found
        yield from numbered(
            ([find_item(dataset, index) for index in indices] for indices in batches), seed, division(loader)[0]
        )


def _produce(
    ahead: ReadAhead | WorkerBatches,
    crew: Crew | None,
    assemble: Callable[[Any], Any],
    hand_over: HandOver,
    place: Place,
    watch: Watch | None,
    loops: Loops,
    plain: bool,
) -> None:
    """The loader's thread. ``plain``: whether batches are made of items by our own function."""
    for loop in loops.values():
        loop.enter()

    def fail(error: BaseException) -> None:
        try:
            place.made()  # the failed batch may have drawn
        finally:  # a consumer waits
            end_all(loops)
            hand_over.end(error)

    try:
        with hand_over.on_stream(), measured(watch, hand_over.stream):
            while hand_over.room() and (items := ahead.next_batch()) is not NO_BATCH:
                enter("collating")
                easy = ahead.plain and plain
                metadata = [*metadata_in(items)] if easy else []
                batch = assemble(items)
                metadata += metadata_in(batch) if easy else ()
                del items
                hand_over.put(batch, (ahead.finished, place.made()), easy, metadata)
                del batch  # the consumer alone keeps it
                enter("waiting for the training")
            hand_over.complete = True
            for _ in ahead.next_epoch():
                if hand_over.stopped:  # whoever begins another loop waits for this thread
                    break
        end_all(loops)  # before the consumer knows, who may begin another
        if crew is not None and not hand_over.stopped:
            crew.end_epoch(ahead.complete)
            crew = None
        next(iter(loops)).session.settle()  # the writer is the process's
        hand_over.end()
    except StopIteration as e:  # from a collate_fn, say: it would end the consumer's loop silently
        error = RuntimeError("StopIteration was raised while a batch was made")
        error.__cause__ = e
        fail(error)
    except BaseException as e:
        fail(e)
    finally:
        if crew is not None:
            crew.end_epoch(ahead.complete)


def _stop(
    owner: Owner, hand_over: HandOver, thread: threading.Thread, place: Place,
    news: queue.SimpleQueue[object] | None, skipping: Skipping | None,
) -> None:  # fmt: skip
    """Leaves a loop. Tells what was skipped if all batches were taken: a trainer that counts them asks for no more."""
    if not owner.is_this_process():  # locks, thread and workers belong to the parent
        return
    said = ""
    if skipping is not None and (hand_over.is_over or 0 < skipping.batches <= place.batches):
        said = skipping.warning()
    hand_over.stop()
    if news is not None:  # the thread may be waiting for a worker
        news.put(None)
    if thread.is_alive():  # else it has ended; or Ctrl-C struck before it began, and it will end at once
        _left_threads.add(thread)
        # The collector may get here in any thread: in this one, or in one that this one waits for.
        if hand_over.consumer == threading.get_ident():
            _leave(thread, _LEAVE_SECONDS)  # or until Ctrl-C: whoever comes next waits on
    if said:
        warn(said)


def _leave(thread: threading.Thread, seconds: float | None) -> None:
    """Waits for the thread of a loop that was left; None: however long it takes."""
    with suppress(RuntimeError):  # it has not begun, and will do nothing
        thread.join(seconds)
    if not thread.is_alive():
        _left_threads.discard(thread)
