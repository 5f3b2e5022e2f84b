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

A record is in flight from the beginning of its read until the consumer takes its batch. epoch.py runs these stages.
With ``num_workers``, processes do what can be done before the target is needed (crew/crew.py, and what they run,
crew/worker.py): they draw and record items for a CUDA target (crew/programs.py), or make whole batches on values
(crew/on_values.py). Not needed to follow a batch: stats.py (where the time goes) and arguments.py (those of other
loaders).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any, Literal, get_args

import torch
from monai.data import DataLoader
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from monai_gds import limits
from monai_gds.base.stages import Watch
from monai_gds.base.units import bytes_of
from monai_gds.dataset.broken import Skipping
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.loader.arguments import at_least_one, drop_idle, one_of
from monai_gds.loader.collate import collate
from monai_gds.loader.crew.crew import Crew, Order
from monai_gds.loader.crew.worker import Work
from monai_gds.loader.epoch import Epoch, Loops, end_all
from monai_gds.loader.hand_over import cuda_tensors
from monai_gds.loader.later import Later
from monai_gds.loader.next_epoch import Foresight
from monai_gds.loader.resume import Loaded, Place, begin_or_go_on, own
from monai_gds.loader.stats import MeasuredEpoch, Stats
from monai_gds.loader.subsets import gds_datasets
from monai_gds.pipeline.loops import Loop
from monai_gds.pipeline.settings import OfThread
from monai_gds.pipeline.split import Split
from monai_gds.programs.trust import Trust

_Programs = Literal["auto", "fast", "check", "off"]
_OnError = Literal["raise", "skip"]


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
    classes. They end with a loop that is left early. One that is killed is replaced once in an epoch.

    Random transforms and collation run under the ``no_grad``, ``inference_mode``, ``autocast`` and default device that
    held for the consumer at ``iter``, as with MONAI's ``DataLoader`` without workers. What is cached is computed under
    the settings in its key.

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
            compared. ``"fast"`` also has the processes compute the small tensors that transforms read from the GPU,
            such as the matrix of a rotation, on the CPU, whose last bits may differ: nothing waits for the GPU.
            ``"check"`` records for any target and compares every item, which takes twice the time. ``"off"``
            records nothing.
        on_error: what happens to an item that cannot be made. ``"raise"`` raises its error. ``"skip"`` puts another
            item of the epoch and rank in its place, drawn from the epoch's seed and the position, so sizes and numbers
            of batches stay. A warning at the end of the epoch lists what was skipped, as does :meth:`stats`. More than
            5 % of the dataset's items are an error.
        repeats: how often each batch is given, as by ``ThreadDataLoader``.
        buffer_size: how many finished batches may wait, as in ``ThreadDataLoader``, but at least 2. 0, which is without
            a bound there, is as 1.
        state: from which the first loop continues, as after :meth:`load_state_dict`.
        kwargs: arguments of ``monai.data.DataLoader``: ``batch_size``, ``shuffle``, ``sampler``, ``collate_fn``…; and
            of ``ThreadDataLoader``. Those that have no effect here are named in a warning. Processes always stay for
            the next epoch; ``persistent_workers=False`` has them do nothing for it before it begins.

    Raises:
        ValueError: ``prefetch``, ``prefetch_bytes``, ``repeats`` or ``buffer_size`` is too small, or ``programs`` is
            none of these; from a loop, something cannot be sent to processes that are not forked; or from
            ``DataLoader``.
        BrokenItem: from a loop, a file cannot be loaded, or too many items cannot be made.
        TypeError: one of these is not a whole number, there is no such argument, or ``transforms_on`` is given, which
        ``num_workers`` replaces.

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
        on_error: _OnError = "raise",
        repeats: int = 1,
        buffer_size: int = 1,
        state: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if prefetch is not None:
            at_least_one("prefetch", prefetch)
        one_of("programs", programs, get_args(_Programs))
        one_of("on_error", on_error, get_args(_OnError))
        if "transforms_on" in kwargs:
            raise TypeError(
                "transforms_on= is gone: num_workers= is enough, and programs='off' runs transforms on values"
            )
        ours = bool(gds_datasets(dataset))
        drop_idle(kwargs, signature(GDSDataLoader), ours)
        if ours:
            kwargs.setdefault("collate_fn", collate)
        elif on_error == "skip":
            raise ValueError("on_error='skip' is for GDSDatasets, and for Subset and ConcatDataset of them")
        super().__init__(dataset, num_workers, **kwargs)
        # Lightning makes loaders again, of the attributes that have the names of arguments: also of stats, below.
        self.repeats, self.buffer_size = at_least_one("repeats", repeats), at_least_one("buffer_size", buffer_size or 1)
        self.prefetch: int | None = prefetch
        given = None if prefetch_bytes is None else bytes_of(prefetch_bytes, "prefetch_bytes", least=1)
        self.prefetch_bytes: int | None = given
        self.programs: _Programs = programs
        self.on_error: _OnError = on_error
        #: Whose settings hold for random transforms: the consumer's at one of these times, or those of a new thread.
        self.around: Literal["iter", "first batch", "thread"] = "iter"
        #: What takes the places of the items of the last epoch that cannot be made.
        self.skipping: Skipping | None = None
        #: Processes of the last epoch, for the next.
        self.idle: list[Crew] = []
        #: Foresees the order of the next epoch.
        self.foresight = Foresight()
        self.foresees = kwargs.get("persistent_workers") is not False
        self._trusts: weakref.WeakKeyDictionary[Split, Trust] = weakref.WeakKeyDictionary()  # by pipeline
        weakref.finalize(self, _close_all, self.idle)
        self._place: Place | None = None  # of the loop that was begun last
        #: The state from which the next loop continues, of this loader or of one that Lightning makes of it.
        self.state: Loaded | None = None
        if state is not None:
            self.load_state_dict(state)
        self.__dict__["stats"] = self._measures = bool(stats)  # the property hides it
        self._epoch: MeasuredEpoch | None = None  # that was begun last

    def __iter__(self) -> Iterator[Any]:
        epoch = MeasuredEpoch() if self._measures else None
        around = OfThread.now() if self.around == "iter" else None
        return Later(partial(self._begin, epoch, around), epoch, self.repeats)

    @property
    def stats(self) -> Callable[[], Stats]:
        """``stats()`` returns where the time of the last epoch went, or of the current one so far.

        Raises:
            RuntimeError: the loader was made without ``stats=True``, or no epoch has begun.
        """
        return partial(_stats, self)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop that was begun last: after the last batch that it gave.

        It holds plain values, and ``torch.load`` loads it with ``weights_only=True``. Each rank saves its own.

        Returns:
            The number of batches that were taken, the states that the order of the items was drawn from, those of the
            random transforms after the batch, by the place of each generator in the pipeline, and the current states
            of the global generators of torch (CPU), NumPy and Python. A batch that is still to be repeated is not
            counted.
        """
        if self.state:
            return dict(self.state)
        return Place(self).state_dict(begun=False) if self._place is None else self._place.state_dict(begun=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next loop over this loader give the remaining batches of the epoch that was saved.

        If none remains, it gives the next epoch. The loader must be made from the same items, transforms and settings.
        ``len`` stays that of a whole epoch. The state of another rank, or of another pipeline, is used as far as
        possible, with a warning from the loop. A loader that Lightning makes of this one, before the loop begins,
        continues in its place.

        Raises:
            ValueError: this is not the state of a GDSDataLoader.
        """
        self.state = Loaded.of(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, here or in another process, has begun no loop."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_trusts"}
        return {**kept, "idle": [], "foresight": Foresight(), "_place": None, "_epoch": None, "skipping": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _trusts=weakref.WeakKeyDictionary())
        weakref.finalize(self, _close_all, self.idle)

    def _begin(self, epoch: MeasuredEpoch | None, around: OfThread | None) -> tuple[Place, Iterator[Any]]:
        self._epoch = epoch
        around = around or (OfThread.now() if self.around == "first batch" else OfThread((), False))
        loops = {part: Loop(part.session.runtime.loops) for part in gds_datasets(self.dataset)}
        try:
            state = own(self, self.state) if self.state else None
            place, batches = self._begin_at(state, None if epoch is None else epoch.watch, loops, around)
        except BaseException:  # a second attempt continues from the same state
            end_all(loops)
            raise
        if self.state:
            self.state.clear()
        self._place = place
        return place, batches

    def _begin_at(
        self, state: Mapping[str, Any] | None, watch: Watch | None, loops: Loops, around: OfThread
    ) -> tuple[Place, Iterator[Any]]:
        parts = gds_datasets(self.dataset)
        devices = {part.session.target() for part in parts}
        device = devices.pop() if len(devices) == 1 else None
        if device is None:
            place, batches = begin_or_go_on(self, super().__iter__, state)
            return place, map(place.counted, batches)
        self.skipping = None if self.on_error == "raise" else Skipping(len(self.dataset), _batches_told(self))
        epoch = Epoch(self, device, state, watch, loops, around)
        return epoch.place, epoch

    def records(self, device: torch.device) -> bool:
        """Whether worker processes record programs."""
        parts = [part.session for part in gds_datasets(self.dataset)]
        wanted = self.programs == "check" or (self.programs in ("auto", "fast") and device.type == "cuda")
        # Of a lazy pipeline the last operations are applied after all transforms.
        able = all(part.caches and not part.own_end and part.split().compose.lazy is False for part in parts)
        return wanted and bool(self.num_workers) and able

    def crew(self, work: Work) -> Crew:
        """The processes for an epoch: those of the last one, if they can do this work."""
        most = self.prefetch_bytes or limits.PREFETCH_BYTES
        order = Order(
            self.num_workers, self.multiprocessing_context, self.batches_in_flight(), self.batches_waiting(), most
        )
        while self.idle:
            crew = self.idle.pop()
            if crew.begin(order, work):
                return crew
            crew.close()
        return Crew(order, work, self.idle)

    def trust(self, part: GDSDataset) -> Trust:
        """What is known of the programs of a dataset."""
        return self._trusts.setdefault(part.session.split(), Trust(self.programs == "check", self.programs == "fast"))

    def records_in_flight(self, batch: int | None = None) -> int:
        """How many records may be in flight with batches of this size (default: the loader's ``batch_size``)."""
        slow = any(part.session.runtime.is_slow for part in gds_datasets(self.dataset))
        least = limits.SLOW_AHEAD if slow else limits.PREFETCH_RECORDS
        return self.prefetch or max(least, (1 + self.batches_waiting()) * (batch or self.batch_size or 1))

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
        if self.prefetch:
            return max(1, self.prefetch // (self.batch_size or 1))
        batches: int = (self.prefetch_factor or 1) * self.num_workers
        return batches

    def batches_waiting(self) -> int:
        """How many finished batches may wait for the consumer."""
        return max(limits.BATCHES_WAITING, self.buffer_size)

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


def _stats(loader: GDSDataLoader) -> Stats:
    if not loader._measures:
        raise RuntimeError("nothing is measured: make the loader with stats=True")
    if loader._epoch is None:
        raise RuntimeError("no epoch has begun: iterate over the loader first")
    records = loader.num_workers and loader.programs != "off"
    runtimes = [part.session.runtime for part in gds_datasets(loader.dataset)]
    found = [runtime.on_values for runtime in runtimes] if records else []
    drew = filter(None, (runtime.global_draws.in_words() for runtime in runtimes))
    skipped = () if loader.skipping is None else loader.skipping.failed
    return loader._epoch.stats(dict(chain.from_iterable(one.items() for one in found)), "; ".join(drew), skipped)


def _batches_told(loader: GDSDataLoader) -> int:
    """How many batches an epoch has, as far as the sampler tells; otherwise 0."""
    try:
        return len(loader)
    except TypeError:
        return 0


def _collate_alone(collate_fn: Callable[[Any], Any], items: list[Any]) -> Any:
    return collate_fn(items[0])


def _close_all(idle: list[Crew]) -> None:
    while idle:
        idle.pop().close()


class _Indices(Dataset[int]):
    """A dataset whose items are their own indices."""

    def __getitem__(self, index: int) -> int:
        return index
