"""``GDSDataLoader``: MONAI's ``DataLoader`` over GDSDatasets, with the records of the coming batches under way.

The way of a batch: the sampler says which items come next; :class:`_ReadAhead` begins their reads, as many as the
bounds allow; one thread finishes them in index order, runs the random transforms and collates; the consumer takes the
batch. This file knows datasets, batches and streams. It knows nothing of records, files and backends.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, groupby
from math import inf
from numbers import Integral, Real
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from monai.data import DataLoader
from torch.utils.data import ConcatDataset, Dataset, Subset
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from monai_gds.cache.single_flight import pace
from monai_gds.collate import collate
from monai_gds.dataset import Begun, GDSDataset
from monai_gds.errors import FileChanged, NotSaved, UnsupportedType
from monai_gds.populate import Saved
from monai_gds.workers import Workers

__all__ = ["GDSDataLoader"]

#: Bytes of records in flight, unless told otherwise.
PREFETCH_BYTES = 1 << 30

#: Records in flight, unless told otherwise: this many, or two batches if that is more. Measured on an H100 with 74 MB
#: records, see the README.
PREFETCH = 8

#: How long leaving a loop waits for its thread. It does so that the next loop finds random transforms at rest; without
#: end it must not: the garbage collector may leave a loop while this thread holds a lock that the other waits for.
_LEAVE_SECONDS = 60.0

#: Where item ``i`` of a loader's dataset lies: the GDSDataset and the index within it.
Resolve: TypeAlias = Callable[[int], tuple[GDSDataset, int]]


class GDSDataLoader(DataLoader):  # type: ignore[misc]  # MONAI has no type hints to speak of
    """MONAI's ``DataLoader`` that reads ahead of the consumer.

    Over a :class:`~monai_gds.GDSDataset`, or ``Subset`` and ``ConcatDataset`` of such, reads of the coming records are
    under way while the batch before is trained on; random transforms and the collation run in a thread, in index
    order, so that equal seeds give the batches that MONAI's ``ThreadDataLoader`` gives, bit for bit. On a CUDA device
    they run on a stream of their own, beside the training, and nothing waits for the whole device. Any other dataset
    is loaded as by MONAI's ``DataLoader``.

    With ``num_workers`` and a CUDA target, the workers compute what is not cached yet; reading and random transforms
    stay in this process; they start with the first such item, and what is meant for workers that load batches
    (``worker_init_fn``, ``timeout``, ``prefetch_factor``, ``persistent_workers``) has no effect on them. With
    ``num_workers`` and a CPU target all is as in MONAI's ``DataLoader``.

    An error, wherever it happened, is raised in the consumer's loop with its traceback, after the batches before it.
    Leaving the loop stops everything.

    Args:
        dataset: what to load.
        num_workers: processes; see above.
        prefetch: how many records may be in flight: being read, transformed, collated, or waiting in a batch that the
            consumer has not taken yet. Default: 8, or two batches. A batch is always completed, whatever this says.
        prefetch_bytes: how many bytes of records may be in flight. One record may, whatever its size.
        kwargs: of ``monai.data.DataLoader``: ``batch_size``, ``shuffle``, ``sampler``, ``collate_fn``…

    Raises:
        ValueError: ``prefetch`` or ``prefetch_bytes`` is not positive; or by ``DataLoader``.
        TypeError: they are no numbers.

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
        prefetch_bytes: float = PREFETCH_BYTES,
        **kwargs: Any,
    ) -> None:
        if prefetch is not None:
            _check_type("prefetch", prefetch, Integral, "a whole number of records")
            if prefetch < 1:
                raise ValueError(f"prefetch={prefetch}: at least one record has to be in flight")
        _check_type("prefetch_bytes", prefetch_bytes, Real, "a number of bytes, 4e9 for instance")
        if not 1 <= prefetch_bytes < inf:
            raise ValueError(f"prefetch_bytes={prefetch_bytes}: it must be positive (one record is always let in)")
        if "collate_fn" not in kwargs and _resolver(dataset) is not None:
            kwargs["collate_fn"] = collate
        super().__init__(dataset, num_workers, **kwargs)
        self.prefetch = prefetch
        self.prefetch_bytes = int(prefetch_bytes)

    def __iter__(self) -> Iterator[Any]:
        resolve = _resolver(self.dataset)
        parts = _parts(self.dataset) if resolve is not None else []
        devices = {part.target() for part in parts}
        if resolve is None or len(devices) != 1:
            return super().__iter__()  # type: ignore[no-any-return]
        device = devices.pop()
        if self.num_workers and (device.type == "cpu" or not all(part.caches for part in parts)):
            return super().__iter__()  # type: ignore[no-any-return]
        helpers = _Helpers(parts, self.num_workers, self.multiprocessing_context) if self.num_workers else None
        return _Epoch(self, resolve, device, helpers)

    def records_in_flight(self, batch: int | None = None) -> int:
        """How many records may be in flight with batches of that size; default: the loader's ``batch_size``."""
        return self.prefetch or max(PREFETCH, 2 * (batch or self.batch_size or 1))

    def index_batches(self) -> Iterator[Sequence[int]]:
        """The indices of the batches of an epoch, drawn as torch's own loader draws them, random seeds included."""
        settings = {"batch_sampler": self.batch_sampler} if self.batch_sampler is not None else {
            "sampler": self.sampler, "batch_size": None
        }  # fmt: skip
        loader = TorchDataLoader(_Indices(), collate_fn=_as_it_is, generator=self.generator, **settings)
        if self.batch_sampler is not None:
            return iter(loader)
        return ([index] for index in loader)

    def assemble(self, items: list[Any]) -> Any:
        """A batch of its items, as torch's loader would make it."""
        batch = self.collate_fn(items if self.batch_sampler is not None else items[0])
        if not self.pin_memory or not torch.cuda.is_available() or cuda_tensors(batch):
            return batch
        return pin_memory(batch, "cuda")  # type: ignore[no-untyped-call]


class _Indices(Dataset[int]):
    """A dataset whose items are their own indices."""

    def __getitem__(self, index: int) -> int:
        return index


def _as_it_is(value: Any) -> Any:
    return value


def _resolver(dataset: Dataset[Any]) -> Resolve | None:
    """How to find the items of a dataset in its GDSDatasets; None when it is made of anything else."""
    if isinstance(dataset, GDSDataset):
        return None if dataset.changes_items() else lambda index: (dataset, index)
    if type(dataset) is Subset:
        inner = _resolver(dataset.dataset)
        indices = dataset.indices
        return None if inner is None else lambda index: inner(indices[index])
    if type(dataset) is ConcatDataset:
        parts = [_resolver(part) for part in dataset.datasets]
        return None if None in parts else _in_turn(parts, dataset.cumulative_sizes)
    return None


def _in_turn(parts: Sequence[Any], ends: Sequence[int]) -> Resolve:
    def resolve(index: int) -> tuple[GDSDataset, int]:
        if not -ends[-1] <= index < ends[-1]:
            raise IndexError(f"there is no item {index} in a ConcatDataset of {ends[-1]}")
        index %= ends[-1]
        part = bisect_right(ends, index)
        found: tuple[GDSDataset, int] = parts[part](index - ends[part - 1] if part else index)
        return found

    return resolve


def _parts(dataset: Any) -> list[GDSDataset]:
    """The GDSDatasets within a dataset that :func:`_resolver` could resolve."""
    if isinstance(dataset, GDSDataset):
        return [dataset]
    if isinstance(dataset, Subset):
        return _parts(dataset.dataset)
    return list(dict.fromkeys(found for part in dataset.datasets for found in _parts(part)))


# ---------------------------------------------------------------------------------------------------------------------
# Reading ahead


class _Record:
    """One item of a batch on its way.

    Attributes:
        begun: what the dataset began with; None as long as it has not.
        saved: of an item that was not cached and that a helper computes: when its record is there.
    """

    __slots__ = ("begun", "dataset", "index", "saved")

    def __init__(self, dataset: GDSDataset, index: int) -> None:
        self.dataset, self.index = dataset, index
        self.begun: Begun | None = None
        self.saved: Future[Saved] | None = None


class _Helpers:
    """Processes that compute what is not cached; they are started for the first such item.

    Args:
        parts: the datasets whose items they compute.
        num_workers: how many.
        context: how they are started; None: see :class:`monai_gds.workers.Workers`.
    """

    def __init__(self, parts: Sequence[GDSDataset], num_workers: int, context: Any) -> None:
        self._parts, self._num_workers, self._context = parts, num_workers, context
        self._workers: Workers[Saved] | None = None
        self._closed = False
        self._lock = threading.RLock()  # the collector may leave the loop, which closes this, while save() holds it

    def save(self, dataset: GDSDataset, index: int) -> Future[Saved]:
        """Has an item computed and saved, unless somebody else is just computing it.

        The future raises what its transforms raise, and WorkerDied.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the loop was left")
            if self._workers is None:
                work = partial(_save, [part.for_saving() for part in self._parts])
                self._workers = Workers(work, self._num_workers, self._context)
            return self._workers.submit((self._parts.index(dataset), index))

    def close(self) -> None:
        """Ends them; what they had begun is lost."""
        with self._lock:
            self._closed = True
            if self._workers is None:
                return
            self._workers.close(grace=0)
            self._workers = None
            for part in self._parts:
                part.tidy()


def _save(parts: Sequence[GDSDataset], place: tuple[int, int]) -> Saved:
    """What a helper runs."""
    part, index = place
    try:
        return parts[part].save(index)
    except (NotSaved, FileChanged, UnsupportedType):  # the loader's process computes it then, and warns or raises
        return Saved("busy")


def _check_type(name: str, value: object, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}={value!r}: it must be {what}")


def _begin_together(dataset: GDSDataset, indices: Sequence[int]) -> list[Begun]:
    """As ``dataset.begin``, but what is wrong with an item is raised when its turn comes to be finished."""
    try:
        return dataset.begin(indices)
    except Exception as e:
        if len(indices) == 1:
            return [Begun(partial(_fail, e))]
    return [_begin_together(dataset, [index])[0] for index in indices]


def _fail(error: Exception) -> Any:
    raise error


class _ReadAhead:
    """Begins the reads of the records that come next, within the bounds. Belongs to the loader's thread.

    What goes wrong ahead of the batch that is wanted is raised in the place of its own.

    Args:
        batches: indices of the batches.
        resolve: finds an item.
        flight: what is in flight.
        helpers: compute what is not cached; None: this thread does.
    """

    def __init__(
        self, batches: Iterable[Sequence[int]], resolve: Resolve, flight: _Flight, helpers: _Helpers | None
    ) -> None:
        self._batches = iter(batches)
        self._resolve = resolve
        self._flight = flight
        self._helpers = helpers
        self._drawn: deque[list[_Record]] = deque()
        self._waiting: deque[_Record] = deque()  # of those drawn, the ones that are not begun
        self._error: Exception | None = None  # behind those drawn

    def next_batch(self) -> tuple[list[Any], int, int] | None:
        """The items of the next batch behind their random transforms, and the records and bytes that they hold."""
        if not self._drawn and not self._draw():
            if self._error is not None:
                raise self._error
            return None
        items, nbytes = [], 0
        for record in self._drawn.popleft():
            self._begin_what_fits()
            if record.begun is None:  # without room too: the batch has to be completed
                self._begin(1)
            begun, record.begun = record.begun, None
            assert begun is not None
            if record.saved is not None:
                saved = record.saved.result()
                if saved.seconds:
                    pace.note(saved.seconds)
                begun = record.dataset.begin([record.index])[0]
                self._flight.add(0, begun.nbytes)
            items.append(record.dataset.end(begun))
            nbytes += begun.nbytes
        return items, len(items), nbytes

    def _begin_what_fits(self) -> None:
        while (room := self._flight.room()) and (self._waiting or self._draw()):
            self._begin(min(room, len(self._waiting)))

    def _begin(self, count: int) -> None:
        """Begins the first records of those that wait, all of one dataset at once."""
        records = [self._waiting.popleft() for _ in range(count)]
        for dataset, of_one in groupby(records, attrgetter("dataset")):
            together = list(of_one)
            for record, begun in zip(together, _begin_together(dataset, [r.index for r in together]), strict=True):
                record.begun = begun
                if self._helpers is not None and not begun.nbytes:
                    record.saved = self._helpers.save(dataset, record.index)
                self._flight.add(1, begun.nbytes)

    def _draw(self) -> bool:
        if self._error is not None:
            return False
        try:
            indices = next(self._batches, None)
            if indices is None:
                return False
            records = [_Record(*self._resolve(index)) for index in indices]
        except Exception as e:  # of the user's sampler, or an index that there is not
            self._error = e
            return False
        self._flight.expect(len(records))
        self._drawn.append(records)
        self._waiting.extend(records)
        return True


class _Flight:
    """What the loader's thread and the consumer share: the bounds, the batch that is ready, and how it ended.

    Args:
        records: gives how many records may be in flight, for the size of a batch.
        nbytes: how many bytes of them.
    """

    def __init__(self, records: Callable[[int], int], nbytes: int) -> None:
        self._records_for = records
        self._most_records, self._most_bytes = 1, nbytes
        self._records = self._bytes = self._last = 0
        self._ready: deque[tuple[_Parcel, int, int]] = deque()
        self._error: BaseException | None = None
        self._ended = self._stopped = False
        self._changed = threading.Condition()

    # The loader's thread

    def expect(self, batch: int) -> None:
        """A batch of that many records comes. A batch sampler does not tell before."""
        with self._changed:
            self._most_records = max(self._most_records, self._records_for(batch))

    def room(self) -> int:
        """How many more records, as large as the last one, may be begun; one when no size is known yet."""
        with self._changed:
            fit = (self._most_bytes - self._bytes) // self._last if self._last else 1
            return max(min(self._most_records - self._records, fit), 0 if self._records else 1)

    def add(self, records: int, nbytes: int) -> None:
        with self._changed:
            self._records += records
            self._bytes += nbytes
            self._last = nbytes or self._last  # what is not cached has no size

    def put(self, batch: _Parcel, records: int, nbytes: int) -> bool:
        """Hands a batch over when the one before is taken; False when nobody wants it any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._ready or self._stopped)
            if not self._stopped:
                self._ready.append((batch, records, nbytes))
                self._changed.notify_all()
            return not self._stopped

    def end(self, error: BaseException | None = None) -> None:
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    # The consumer

    def take(self) -> _Parcel:
        """The next batch.

        Raises:
            StopIteration: there is none, or the loop was stopped.
            BaseException: what went wrong in the thread, once.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._stopped)
            if self._ready:
                batch, records, nbytes = self._ready.popleft()
                self._records -= records
                self._bytes -= nbytes
                self._changed.notify_all()
                return batch
            error, self._error = self._error, None
        try:
            raise StopIteration if error is None else error
        finally:
            del error  # its traceback holds this frame

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()


# ---------------------------------------------------------------------------------------------------------------------
# An epoch


class _Epoch:
    """One pass over the loader: what the consumer iterates over.

    The thread knows nothing of this object, so that it can be dropped half-way: that stops the thread.
    """

    def __init__(self, loader: GDSDataLoader, resolve: Resolve, device: torch.device, helpers: _Helpers | None) -> None:
        self._process = os.getpid()
        self._flight = _Flight(loader.records_in_flight, loader.prefetch_bytes)
        self._hand_over = _HandOver(device)
        # The first draw, in which a random sampler takes its seed, is made in this thread.
        ahead = _ReadAhead(_first_drawn(loader.index_batches()), resolve, self._flight, helpers)
        work = (self._flight, ahead, loader.assemble, self._hand_over, helpers)
        self.thread = threading.Thread(target=_produce, args=work, name="monai-gds-loader", daemon=True)
        self.thread.start()
        self._stop = weakref.finalize(self, _stop, self._process, self._flight, self.thread, helpers)
        self._stop.atexit = False
        _loops.add(self)

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        if self._process != os.getpid():
            raise RuntimeError("this loop was begun before a fork: begin a new one in the child")
        try:
            return self._hand_over.take(self._flight.take())
        except KeyboardInterrupt:  # the loop may go on after it
            raise
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the thread."""
        self._stop()


#: Loops that are not over.
_loops: weakref.WeakSet[_Epoch] = weakref.WeakSet()


@atexit.register  # before the writer's own, which was registered earlier and saves what these threads computed last
def _stop_all() -> None:
    for loop in list(_loops):
        loop.stop()
        loop.thread.join()  # however long it takes: a thread must not run while the interpreter is taken down


def _produce(
    flight: _Flight,
    ahead: _ReadAhead,
    assemble: Callable[[list[Any]], Any],
    hand_over: _HandOver,
    helpers: _Helpers | None,
) -> None:
    """The loader's thread."""
    try:
        with hand_over.in_thread():
            while (found := ahead.next_batch()) is not None:
                items, records, nbytes = found
                parcel = hand_over.give(assemble(items))
                del found, items
                if not flight.put(parcel, records, nbytes):
                    return
                del parcel  # the consumer alone keeps it
        flight.end()
    except StopIteration as e:  # of a collate_fn, for example: it would end the consumer's loop without a word
        error = RuntimeError("StopIteration was raised while a batch was made")
        error.__cause__ = e
        flight.end(error)
    except BaseException as e:
        flight.end(e)
    finally:
        if helpers is not None:
            helpers.close()


def _stop(process: int, flight: _Flight, thread: threading.Thread, helpers: _Helpers | None) -> None:
    if process != os.getpid():  # a forked child's copy: locks, thread and helpers are the parent's
        return
    flight.stop()
    if helpers is not None:  # the thread may be waiting for one
        helpers.close()
    # The collector may run anywhere, also in this thread, or in one for which it waits.
    if not threading.current_thread().name.startswith("monai-gds"):
        thread.join(_LEAVE_SECONDS)


def _first_drawn(batches: Iterator[Sequence[int]]) -> Iterator[Sequence[int]]:
    first = next(batches, None)
    return iter(()) if first is None else chain([first], batches)


# ---------------------------------------------------------------------------------------------------------------------
# From the loader's stream to the consumer's


class _Parcel(NamedTuple):
    """A batch, the event behind the work that makes it, and its tensors on the device."""

    batch: Any
    made: torch.cuda.Event | None = None
    tensors: Sequence[torch.Tensor] = ()


class _HandOver:
    """Takes batches from the loader's thread to the consumer.

    On a CUDA device the thread works on a stream of its own: a random transform that waits for a result does not wait
    for the training too. The consumer's stream waits for the batch, and its memory is given out again only when that
    stream has used it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _loader_stream(device) if device.type == "cuda" else None
        if self._stream is not None:  # a transform may use what was made before the loop
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def in_thread(self) -> AbstractContextManager[Any]:
        """The thread's work goes on the loader's stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def give(self, batch: Any) -> _Parcel:
        if self._stream is None:
            return _Parcel(batch)
        tensors = [tensor for tensor in cuda_tensors(batch) if tensor.device == self._device]
        return _Parcel(batch, self._stream.record_event(), tensors)

    def take(self, parcel: _Parcel) -> Any:
        if parcel.made is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(parcel.made)
            for tensor in parcel.tensors:
                tensor.record_stream(current)
        return parcel.batch


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _loader_stream(device: torch.device) -> torch.cuda.Stream:
    """The process's one stream for random transforms and collation, so that epochs share its memory."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


#: Types that hold no tensors.
_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None), np.ndarray, type, ModuleType})


def cuda_tensors(value: Any) -> list[torch.Tensor]:
    """Every CUDA tensor within containers and objects, as plain tensors; those in a MetaTensor's metadata included."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    left: list[Iterable[Any]] = [(value,)]
    while left:
        for part in left.pop():
            kind = type(part)
            if kind is torch.Tensor:
                if part.is_cuda:
                    found.append(part)
            elif kind not in _PLAIN and id(part) not in seen:
                seen.add(id(part))
                left.extend(_members(part))
    return found


def _members(value: Any) -> Iterator[Iterable[Any]]:
    if isinstance(value, torch.Tensor):
        yield (value.as_subclass(torch.Tensor),)
    if isinstance(value, Mapping):
        yield value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield value
    else:
        yield getattr(value, "__dict__", {}).values()
