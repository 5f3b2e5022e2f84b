"""``GDSDataLoader``: MONAI's ``DataLoader`` over GDSDatasets, which reads the records of the coming batches ahead.

               sampler            indices of a batch, drawn as torch's own loader draws them: here, and resume.py
                  │
    ┌─────────────▼─────────────┐ loader's thread; the storage reads with threads of its own
    │ begin reads               │ ahead.py: how many; dataset/session.py: key and record, or a miss; records/reader.py;
    │                           │ programs/draws.py: crops that are drawn before anything is read
    └─────────────┬─────────────┘
                  │               in flight: up to ``prefetch`` records and ``prefetch_bytes``, in index order
    ┌─────────────▼─────────────┐ loader's thread, on the loader's stream of a CUDA device
    │ finish items              │ records/pending.py; with ``num_workers``, processes compute what is not cached
    │ random transforms         │ pipeline/split.py
    │ collate                   │ collate.py: the results of MONAI's ``list_data_collate``
    └─────────────┬─────────────┘
                  │               1 batch, and the event after the work that makes it: hand_over.py
    ┌─────────────▼─────────────┐
    │ consumer                  │ the user's thread and stream
    └───────────────────────────┘

A record is in flight from the beginning of its read until the consumer takes its batch. :class:`Epoch`, below, runs
these stages. With ``num_workers``, crew.py has processes do what can be done before the target is needed (worker.py):
they draw and record items for a CUDA target (dataset/programmed.py), or make whole batches on values (on_values.py,
shared_memory.py). Not needed to follow a batch: stats.py (where the time goes) and openmp.py (idle threads).
"""

from __future__ import annotations

import atexit
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from monai.data import DataLoader
from torch.utils.data import ConcatDataset, Dataset, Subset
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from monai_gds import limits
from monai_gds.base.process import Owner, undisturbed
from monai_gds.base.stages import Watch, enter, measured
from monai_gds.base.units import bytes_of
from monai_gds.dataset.dataset import GDSDataset, changes_items
from monai_gds.loader.ahead import Programs, ReadAhead
from monai_gds.loader.collate import collate
from monai_gds.loader.crew import Crew, Drawn, Order, numbered, with_seed
from monai_gds.loader.hand_over import HandOver, cuda_tensors
from monai_gds.loader.next_epoch import foreseen
from monai_gds.loader.on_values import WorkerBatches, work_on_values
from monai_gds.loader.openmp import heed_load
from monai_gds.loader.resume import Later, Place, begin_or_go_on, check
from monai_gds.loader.stats import MeasuredEpoch, Stats
from monai_gds.loader.worker import Work
from monai_gds.pipeline.loops import Loop
from monai_gds.pipeline.settings import capture_all
from monai_gds.pipeline.split import Split
from monai_gds.programs.trust import Trust

#: Seconds that leaving a loop waits for its thread, so that the next loop finds random transforms at rest. Bounded,
#: because the garbage collector may leave a loop in a thread that holds a lock the loader's thread waits for.
_LEAVE_SECONDS = 60.0


_Programs = Literal["auto", "check", "off"]


class GDSDataLoader(DataLoader):  # type: ignore[misc]  # MONAI is untyped
    """MONAI's ``DataLoader`` that reads ahead of the consumer.

    Over a :class:`~monai_gds.GDSDataset`, or a ``Subset`` or ``ConcatDataset`` of GDSDatasets, the coming records are
    read while the training uses the current batch. Random transforms and collation run in a thread, in index order, so
    equal seeds give the batches of MONAI's ``ThreadDataLoader``, bit for bit. As there, a loop begins when its first
    batch is asked for. On a CUDA device transforms and collation run on a stream of their own, beside the training, and
    nothing waits for the whole device. Any other dataset is loaded by MONAI's ``DataLoader``.

    With ``num_workers``, that many processes do what can be done before the target is needed. They compute and save
    the items that are not cached. On a CUDA target they also run the random transforms on tensors without values, and
    record what these do to the tensors. This process reads the voxels that are touched and replays the records on the
    device, where they give what the transforms would give there, bit for bit. What cannot be recorded runs in this
    process's thread: ``explain`` names it. On a CPU target, and with ``programs="off"``, the processes load the items,
    run the transforms and collate, up to the first transform that names a CUDA device. Batches then come through shared
    memory, in order.

    The random sequence differs from the one without workers, but is the same for any number of them, on any target: for
    each item, the generators that the transforms use, and in the processes those of Python, NumPy and torch, are seeded
    with the epoch's seed and the item's position in the epoch. The epoch's seed comes from torch's generator, or the
    loader's ``generator``. The processes are forked, as torch's are, also where CUDA is initialised, which they never
    use; ``multiprocessing_context`` names another way, for which the dataset must be picklable. They stay for the next
    epoch, where they see what has changed in the dataset, its transforms and the settings, but not in modules and
    classes. They end with a loop that is left early. One that is killed is replaced once in an epoch. Arguments for
    torch's own workers (``worker_init_fn``, ``timeout``, ``prefetch_factor``, ``persistent_workers``) have no effect.

    An error, wherever it happened, is raised in the consumer's loop with its traceback, after the batches before it.
    Leaving the loop stops everything, and leaves the random transforms in the state that a loop without reading ahead
    would. :meth:`state_dict` records where the loop is, so that a run can be continued in the middle of an epoch.

    Args:
        dataset: what to load.
        num_workers: how many processes there are, see above.
        prefetch: how many records may be in flight: being read, transformed, collated, or waiting in a batch that the
            consumer has not taken. Default: 8, or three batches if that is more. A batch is always completed.
        prefetch_bytes: how many bytes of records may be in flight, such as ``4e9`` or ``"4GB"``. One record always may,
            whatever its size. Default: a sixteenth of the GPU's memory, but at least 1 GiB and at most 2 GiB, and 1 GiB
            without a GPU. Where processes make whole batches it bounds the shared memory (1 GiB), in which batches of
            B bytes need ``2.5 * (num_workers + 2) * B``. Batches that find no room are pickled, which is slower.
        stats: measures where the time of each epoch goes, for :meth:`stats`.
        programs: ``"auto"`` records the transforms for a CUDA target. What they do is also run directly at first, and
            compared. ``"check"`` records for any target and compares every item, which takes twice the time. ``"off"``
            records nothing.
        kwargs: arguments of ``monai.data.DataLoader``: ``batch_size``, ``shuffle``, ``sampler``, ``collate_fn``…

    Raises:
        ValueError: ``prefetch`` or ``prefetch_bytes`` is not positive, or ``programs`` is none of these; from a loop,
            something cannot be sent to processes that are not forked; or from ``DataLoader``.
        TypeError: ``prefetch`` is not a whole number, or ``transforms_on`` is given, which ``num_workers`` replaces.

    Example:
        >>> import tempfile, numpy as np
        >>> from monai.transforms import Compose, EnsureTyped, RandFlipd
        >>> from monai_gds import GDSDataset
        >>> transform = Compose([EnsureTyped("image"), RandFlipd("image", prob=0.5)])
        >>> items = [{"image": np.random.rand(1, 8, 8, 8)} for _ in range(4)]
        >>> with tempfile.TemporaryDirectory() as folder, GDSDataset(items, transform, folder, device="cpu") as dataset:
        ...     [tuple(batch["image"].shape) for batch in GDSDataLoader(dataset, batch_size=2, shuffle=True)]
        [(2, 1, 8, 8, 8), (2, 1, 8, 8, 8)]
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_workers: int = 0,
        *,
        prefetch: int | None = None,
        prefetch_bytes: float | str | None = None,
        stats: bool = False,
        programs: _Programs = "auto",
        **kwargs: Any,
    ) -> None:
        if not isinstance(prefetch, Integral | None):
            raise TypeError(f"prefetch={prefetch!r}: it must be a whole number of records")
        if prefetch is not None and prefetch < 1:
            raise ValueError(f"prefetch={prefetch}: at least one record has to be in flight")
        if programs not in get_args(_Programs):
            raise ValueError(f"programs={programs!r}: use one of {', '.join(map(repr, get_args(_Programs)))}")
        if "transforms_on" in kwargs:
            raise TypeError(
                "transforms_on= is gone: num_workers= is enough, and programs='off' runs transforms on values"
            )
        if gds_datasets(dataset):
            kwargs.setdefault("collate_fn", collate)
        super().__init__(dataset, num_workers, **kwargs)
        self.prefetch: int | None = prefetch
        given = None if prefetch_bytes is None else bytes_of(prefetch_bytes, "prefetch_bytes", least=1)
        self.prefetch_bytes: int | None = given
        self.programs: _Programs = programs
        #: Processes of the last epoch, for the next.
        self.idle: list[Crew] = []
        self._trusts: weakref.WeakKeyDictionary[Split, Trust] = weakref.WeakKeyDictionary()  # by pipeline
        weakref.finalize(self, _close_all, self.idle)
        self._place: Place | None = None  # of the loop that was begun last
        self._loaded: Mapping[str, Any] | None = None  # the state from which the next loop continues
        self._measures = stats
        self._epoch: MeasuredEpoch | None = None  # that was begun last

    def __iter__(self) -> Iterator[Any]:
        epoch = MeasuredEpoch() if self._measures else None
        return Later(partial(self._begin, epoch), epoch)

    def stats(self) -> Stats:
        """Where the time of the last epoch went, or of the current one so far.

        Raises:
            RuntimeError: the loader was made without ``stats=True``, or no epoch has begun.
        """
        if not self._measures:
            raise RuntimeError("nothing is measured: make the loader with stats=True")
        if self._epoch is None:
            raise RuntimeError("no epoch has begun: iterate over the loader first")
        records = self.num_workers and self.programs != "off"
        runtimes = [part.session.runtime for part in gds_datasets(self.dataset)]
        found = [runtime.on_values for runtime in runtimes] if records else []
        drew = filter(None, (runtime.global_draws.in_words() for runtime in runtimes))
        return self._epoch.stats(dict(chain.from_iterable(one.items() for one in found)), "; ".join(drew))

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop that was begun last: after the last batch that it gave.

        It holds plain values, and ``torch.load`` loads it with ``weights_only=True``. Each rank saves its own.

        Returns:
            The number of batches that were taken, the states that the order of the items was drawn from, those of the
            random transforms after the batch, by the place of each generator in the pipeline, and the current states
            of the global generators of torch (CPU), NumPy and Python.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        return Place(self).state_dict(begun=False) if self._place is None else self._place.state_dict(begun=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next loop over this loader give the remaining batches of the epoch that was saved.

        If none remains, it gives the next epoch. The loader must be made from the same items, transforms and settings.
        ``len`` stays that of a whole epoch.

        Raises:
            ValueError: this is not the state of a GDSDataLoader.
        """
        check(self, state_dict)
        self._loaded = dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, here or in another process, has begun no loop."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_trusts"}
        return {**kept, "idle": [], "_place": None, "_epoch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _trusts=weakref.WeakKeyDictionary())
        weakref.finalize(self, _close_all, self.idle)

    def _begin(self, epoch: MeasuredEpoch | None) -> Iterator[Any]:
        self._epoch = epoch
        state, self._loaded = self._loaded, None
        loops = {part: Loop(part.session.runtime.loops) for part in gds_datasets(self.dataset)}
        try:
            return self._begin_at(state, None if epoch is None else epoch.watch, loops)
        except BaseException:  # a second attempt continues from the same state
            _end(loops)
            self._loaded = state
            raise

    def _begin_at(self, state: Mapping[str, Any] | None, watch: Watch | None, loops: Loops) -> Iterator[Any]:
        parts = gds_datasets(self.dataset)
        devices = {part.session.target() for part in parts}
        device = devices.pop() if len(devices) == 1 else None
        if device is None:
            self._place, batches = begin_or_go_on(self, super().__iter__, state)
            return map(self._place.counted, batches)
        return Epoch(self, device, state, watch, loops)

    def records(self, device: torch.device) -> bool:
        """Whether worker processes record programs."""
        parts = [part.session for part in gds_datasets(self.dataset)]
        wanted = self.programs == "check" or (self.programs == "auto" and device.type == "cuda")
        # Of a lazy pipeline the last operations are applied after all transforms.
        able = all(part.caches and not part.own_end and part.split().compose.lazy is False for part in parts)
        return wanted and bool(self.num_workers) and able

    def crew(self, work: Work) -> Crew:
        """The processes for an epoch: those of the last one, if they can do this work."""
        most = self.prefetch_bytes or limits.PREFETCH_BYTES
        order = Order(self.num_workers, self.multiprocessing_context, self.batches_in_flight(), most)
        while self.idle:
            crew = self.idle.pop()
            if crew.begin(order, work):
                return crew
            crew.close()
        return Crew(order, work)

    def trust(self, part: GDSDataset) -> Trust:
        """What is known of the programs of a dataset."""
        return self._trusts.setdefault(part.session.split(), Trust(self.programs == "check"))

    def records_in_flight(self, batch: int | None = None) -> int:
        """How many records may be in flight with batches of this size (default: the loader's ``batch_size``)."""
        return self.prefetch or max(
            limits.PREFETCH_RECORDS, (1 + limits.BATCHES_WAITING) * (batch or self.batch_size or 1)
        )

    def bytes_in_flight(self, device: torch.device) -> int:
        """How many bytes of records may be in flight to a device. Begins to use CUDA, for a CUDA device."""
        if self.prefetch_bytes is not None:
            return self.prefetch_bytes
        if device.type == "cpu":
            return limits.PREFETCH_BYTES
        part = torch.cuda.get_device_properties(device).total_memory // limits.PREFETCH_PART_OF_DEVICE
        return min(max(part, limits.PREFETCH_BYTES), limits.PREFETCH_DEVICE_BYTES)

    def index_batches(self) -> Iterator[Sequence[int]]:
        """The indices of the batches of an epoch, drawn as torch's own loader draws them, random seeds included."""
        batched = self.batch_sampler is not None
        settings = {"batch_sampler": self.batch_sampler} if batched else {"sampler": self.sampler, "batch_size": None}
        loader = TorchDataLoader(_Indices(), collate_fn=lambda found: found, generator=self.generator, **settings)
        return iter(loader) if batched else ([index] for index in loader)

    def batches_in_flight(self) -> int:
        """How many batches workers may be making, or have made without the consumer having taken them."""
        return max(1, self.prefetch // (self.batch_size or 1)) if self.prefetch else 2 * self.num_workers

    @property
    def collation(self) -> Callable[[list[Any]], Any]:
        """Makes a batch of a list of its items."""
        return self.collate_fn if self.batch_sampler is not None else partial(_collate_alone, self.collate_fn)

    def assemble(self, items: list[Any]) -> Any:
        """Makes a batch of items as torch's loader would."""
        return self.pinned(self.collation(items))

    def pinned(self, batch: Any) -> Any:
        """Page-locks a batch, if the loader's ``pin_memory`` asks for that."""
        if not self.pin_memory or not torch.cuda.is_available() or cuda_tensors(batch):
            return batch
        return pin_memory(batch, "cuda")  # type: ignore[no-untyped-call]


def _collate_alone(collate_fn: Callable[[Any], Any], items: list[Any]) -> Any:
    return collate_fn(items[0])


def _close_all(idle: list[Crew]) -> None:
    while idle:
        idle.pop().close()


class _Indices(Dataset[int]):
    """A dataset whose items are their own indices."""

    def __getitem__(self, index: int) -> int:
        return index


# ---------------------------------------------------------------------------------------------------------------------
# Subsets and concatenations


def gds_datasets(dataset: Dataset[Any]) -> list[GDSDataset]:
    """The GDSDatasets that a dataset consists of, each once; empty if it contains anything else."""
    if isinstance(dataset, GDSDataset):
        return [] if changes_items(type(dataset)) else [dataset]
    if type(dataset) is Subset:
        return gds_datasets(dataset.dataset)
    if type(dataset) is ConcatDataset:
        found = [gds_datasets(part) for part in dataset.datasets]
        return list(dict.fromkeys(chain.from_iterable(found))) if all(found) else []
    return []


def find_item(dataset: Any, index: int) -> tuple[GDSDataset, int]:
    """The GDSDataset that an item of a dataset belongs to, and its index there; IndexError if there is no such item."""
    while not isinstance(dataset, GDSDataset):
        if type(dataset) is Subset:
            dataset, index = dataset.dataset, dataset.indices[index]
            continue
        ends = dataset.cumulative_sizes
        if not -ends[-1] <= index < ends[-1]:
            raise IndexError(f"there is no item {index} in a ConcatDataset of {ends[-1]}")
        index %= ends[-1]
        part = bisect_right(ends, index)
        dataset, index = dataset.datasets[part], index - (ends[part - 1] if part else 0)
    return dataset, index


# ---------------------------------------------------------------------------------------------------------------------
# An epoch


#: An epoch's loops over its datasets: until their end, nobody else draws from the same random transforms.
Loops = Mapping[GDSDataset, Loop]


def _drawn_from(loops: Loops, dataset: Any) -> Any:
    """The pipeline that an epoch draws from."""
    return loops[dataset].split(dataset.session.split()).compose


def _end(loops: Loops) -> None:
    for loop in loops.values():
        loop.end()


class Epoch(Iterator[Any]):
    """One pass over a loader: what the consumer iterates over.

    The thread has no reference to this object, so the loop can be dropped half-way, which stops the thread.
    """

    def __init__(
        self,
        loader: GDSDataLoader,
        device: torch.device,
        state: Mapping[str, Any] | None,
        watch: Watch | None,
        loops: Loops,
    ) -> None:
        for left in _left_threads - {threading.current_thread()}:  # a transform may begin a loop
            _leave(left, _LEAVE_SECONDS)
        if device.type == "cpu":
            heed_load()
        ahead, assemble, place, workers = _stages(loader, device, state, watch, loops)
        loader._place = place
        self._owner = Owner()

        def on_taken(mark: tuple[tuple[int, int], tuple[int, dict[str, Any]]]) -> None:
            ahead.taken(mark[0])
            place.taken(*mark[1])

        self._hand_over = HandOver(device, on_taken, place.leave)
        work = (ahead, assemble, self._hand_over, place, watch, loops, loader.collate_fn is collate)
        self.thread = threading.Thread(target=_produce, args=work, name="monai-gds-loader", daemon=True)
        #: Leaves the loop, which ends the thread.
        self.stop = weakref.finalize(self, _stop, self._owner, self._hand_over, self.thread, workers)
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
        except BaseException:
            self.stop()
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
    loader: GDSDataLoader, device: torch.device, state: Mapping[str, Any] | None, watch: Watch | None, loops: Loops
) -> tuple[ReadAhead | WorkerBatches, Callable[[Any], Any], Place, Programs | WorkerBatches | None]:
    """What makes items and batches, where the consumer is, and what is to be woken when the loop is left."""
    draw = partial(_drawn, loader)
    in_flight = loader.records_in_flight, partial(loader.bytes_in_flight, device)
    if not loader.num_workers:
        place, batches = begin_or_go_on(loader, lambda: numbered(draw(), 0), state, partial(_drawn_from, loops))
        reading = ReadAhead(batches, *in_flight, None)
        return reading, partial(_with_memory, reading, loader.assemble), place, None
    parts = gds_datasets(loader.dataset)
    # By place: workers seed what they draw from, and this process draws from copies.
    place, batches = begin_or_go_on(loader, partial(with_seed, loader.generator, draw), state)
    if loader.records(device):
        views = [part.session.for_worker(loads="programs") for part in parts]
        crew = loader.crew(Work(views, None, device, capture_all()))
        trusts = [loader.trust(part) for part in parts]
        own = dict(zip(parts, crew.splits(parts), strict=True))
        programs = Programs(crew, own, trusts, watch, loader.idle, partial(_foreseen, loader))
        reading = ReadAhead(batches, *in_flight, programs)
        return reading, partial(_with_memory, reading, loader.assemble), place, programs
    work, done = work_on_values(parts, device, loader.collation)
    crew = loader.crew(work)
    made = WorkerBatches(crew, parts, crew.splits(parts), done, device, batches, watch, loader.idle)
    return made, loader.pinned if made.whole else loader.assemble, place, made


def _with_memory(reading: ReadAhead, assemble: Callable[[Any], Any], items: list[Any]) -> Any:
    return reading.with_memory(partial(assemble, items))


def _drawn(loader: GDSDataLoader) -> Iterator[list[tuple[GDSDataset, int]]]:
    """The dataset and index of each item, by batch. The first batch, and with it a sampler's seed, is drawn at once."""
    batches, dataset = loader.index_batches(), loader.dataset
    drawn = chain(list(islice(batches, 1)), batches)
    return ([find_item(dataset, index) for index in indices] for indices in drawn)


def _foreseen(loader: GDSDataLoader) -> Iterator[Drawn]:
    """The batches of the next epoch, as far as that can be told."""
    found, dataset = foreseen(loader), loader.dataset
    if found is not None:
        seed, batches = found
        yield from numbered(([find_item(dataset, index) for index in indices] for indices in batches), seed)


def _produce(
    ahead: ReadAhead | WorkerBatches,
    assemble: Callable[[Any], Any],
    hand_over: HandOver,
    place: Place,
    watch: Watch | None,
    loops: Loops,
    plain: bool,
) -> None:
    """The loader's thread. ``plain``: whether batches are made of items by our own function."""
    ended = False
    for loop in loops.values():
        loop.enter()

    def fail(error: BaseException) -> None:
        try:
            place.made()  # the failed batch may have drawn
        finally:  # a consumer waits
            _end(loops)
            hand_over.end(error)

    try:
        with hand_over.on_stream(), measured(watch, hand_over.stream):
            while not hand_over.stopped and (items := ahead.next_batch()) is not None:
                enter("collating")
                batch = assemble(items)
                del items
                enter("waiting for the training")
                if not hand_over.put(batch, (ahead.finished, place.made()), ahead.plain and plain):
                    break
                del batch  # the consumer alone keeps it
        _end(loops)  # before the consumer knows, who may begin another
        if not hand_over.stopped:
            ahead.end()
            ended = True
        hand_over.end()
    except StopIteration as e:  # from a collate_fn, say: it would end the consumer's loop silently
        error = RuntimeError("StopIteration was raised while a batch was made")
        error.__cause__ = e
        fail(error)
    except BaseException as e:
        fail(e)
    finally:
        if not ended:
            ahead.end()


def _stop(
    owner: Owner, hand_over: HandOver, thread: threading.Thread, workers: Programs | WorkerBatches | None
) -> None:
    if not owner.is_this_process():  # locks, thread and workers belong to the parent
        return
    hand_over.stop()
    if workers is not None:  # the thread may be waiting for one
        workers.close()
    if not thread.is_alive():  # it has ended; or Ctrl-C struck before it began, and it will end at once
        return
    _left_threads.add(thread)
    # The collector may get here in any thread: in this one, or in one that this one waits for.
    if hand_over.consumer == threading.get_ident():
        _leave(thread, _LEAVE_SECONDS)  # or until Ctrl-C: whoever comes next waits on


def _leave(thread: threading.Thread, seconds: float | None) -> None:
    """Waits for the thread of a loop that was left; None: however long it takes."""
    with suppress(RuntimeError):  # it has not begun, and will do nothing
        thread.join(seconds)
    if not thread.is_alive():
        _left_threads.discard(thread)
