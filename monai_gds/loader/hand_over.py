"""Hands batches from the loader's thread and stream over to the consumer's. For :mod:`.data_loader`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from monai.data import MetaTensor

from monai_gds import limits
from monai_gds.base.process import Bell, PerProcess
from monai_gds.programs.program import outer_tensors
from monai_gds.storage.staging import new_stream

#: The loader's stream of a device. Epochs share it, and with it the memory of its pool.
_loader_stream = PerProcess(new_stream)


class _Parcel(NamedTuple):
    """A batch between the two threads."""

    batch: Any
    mark: Any
    made: torch.cuda.Event | None  # after the work that makes it on a CUDA device
    tensors: Sequence[torch.Tensor]  # those on that device
    metadata: Sequence[Any]  # of its MetaTensors, and of its items'


class HandOver:
    """Hands batches from the loader's thread to the consumer.

    Two may wait by default, so that the thread can be late for one of them: it shares the interpreter's lock with the
    training.

    On a CUDA device the thread works on its own stream, so a random transform that waits for a result does not
    wait for the training too. The consumer's stream waits for the batch, and the batch's memory is reused only after
    that stream is done with it.

    Each tensor that is freed gives the interpreter's lock back, twice if its memory is NumPy's, and a batch has some
    hundred in its metadata. A consumer that drops them while the thread works waits for the lock as often: 5 to 7 ms in
    a step of 31 ms on an H100. So they are kept until it comes for a later batch and the thread is at rest.

    There is no lock, since Ctrl-C may strike between any two operations of the consumer, also right after a
    ``Condition.__enter__``. The state is in attributes, each of which changes by single operations.

    Args:
        device: where batches are made.
        on_taken: called with the ``mark`` of each batch that the consumer takes. Several consumers may call it at the
            same time, and in another order.
        on_left: called once the loop was left and the loader's thread makes no more batches.
        waiting: how many finished batches may wait.

    Attributes:
        stopped: whether the loop was left.
        complete: whether the thread has put the last batch, unless the loop was left.
        stream: the loader's, on a CUDA device.
        consumer: the thread that took the last batch; before the first, the one that made this object.
    """

    def __init__(
        self,
        device: torch.device,
        on_taken: Callable[[Any], None],
        on_left: Callable[[], None] = lambda: None,
        waiting: int = limits.BATCHES_WAITING,
    ) -> None:
        self.consumer = threading.get_ident()
        self._device, self._on_taken, self._on_left, self._waiting = device, on_taken, [on_left], waiting
        self.stream = _loader_stream(device) if device.type == "cuda" else None
        if self.stream is not None:  # a transform may use what was made before the loop
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self._parcels: deque[_Parcel] = deque()
        self._error: BaseException | None = None
        self._ended = self.stopped = self.complete = False
        self._at_rest = False  # whether the loader's thread waits for room
        self._taken: deque[Sequence[Any]] = deque()  # metadata of the last batches that the consumer took
        self._room, self._news = Bell(), Bell()  # for the loader's thread, and for the consumer

    # For the loader's thread

    def on_stream(self) -> AbstractContextManager[Any]:
        """Makes the loader's stream current."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def room(self) -> bool:
        """Waits until there is room for another batch. Returns False if the loop was left.

        To be called before that batch is made: the consumer begins an epoch's first step while this thread rests.
        """
        while len(self._parcels) >= self._waiting and not self.stopped:
            self._at_rest = True
            self._room.wait()
        self._at_rest = False
        return not self.stopped

    def put(self, batch: Any, mark: Any, plain: bool = False, metadata: Sequence[Any] = ()) -> None:
        """Hands over a batch.

        Args:
            batch: the batch.
            mark: for ``on_taken``.
            plain: whether it has no tensors of the device but those in dicts and lists, which are found faster.
            metadata: of the batch, and of the items that it was made of.
        """
        made, tensors = None, []
        if self.stream is not None:
            made = self.stream.record_event()
            tensors = [tensor for tensor in cuda_tensors(batch, plain) if tensor.device == self._device]
        self._free(but=limits.METADATA_KEPT)
        self._parcels.append(_Parcel(batch, mark, made, tensors, metadata))
        if self.stopped:  # perhaps just now, by a thread that found nothing to drop
            self._parcels.clear()
        self._news.ring()

    def end(self, error: BaseException | None = None) -> None:
        """Ends the batches, with the error after the last one if there is one."""
        self._error = error
        self._ended = True
        self._news.ring()
        if self.stopped:
            self._leave()

    # For the consumer

    def take(self) -> Any:
        """The next batch, ready for the current stream. Ctrl-C may lose that batch, and nothing else.

        Raises:
            StopIteration: there is none, or the loop was stopped.
            BaseException: the error of the thread, once.
        """
        self.consumer = threading.get_ident()
        if self._at_rest:
            self._free(but=1)  # the consumer still has the last one
        while (parcel := self._next()) is None:
            if self._ended or self.stopped:
                parcel = self._next()  # the last one came before the end
                break
            self._room.ring()  # a Ctrl-C may have ended the last call before it did
            self._news.wait()
        if parcel is None:
            self._news.ring()  # for whoever waits too
            error, self._error = self._error, None
            try:
                raise StopIteration if error is None else error
            finally:
                del error  # its traceback holds this frame
        self._on_taken(parcel.mark)
        if parcel.made is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(parcel.made)
            for tensor in parcel.tensors:
                tensor.record_stream(current)
        self._taken.append(parcel.metadata)
        self._room.ring()  # last: the thread that wakes takes the interpreter's lock, which each of these gives back
        return parcel.batch

    @property
    def is_over(self) -> bool:
        """Whether the consumer has taken every batch, and has not left the loop."""
        return self.complete and not self.stopped and not self._parcels

    def stop(self) -> None:
        """Leaves the loop: nothing is put or taken any more. May be called in any thread, by the collector too."""
        self.stopped = True
        self._on_taken = lambda mark: None  # a traceback that is kept must not keep what was read ahead
        self._parcels.clear()
        self._taken.clear()
        self._room.ring()
        self._news.ring()
        if self._ended:
            self._leave()

    def _free(self, but: int) -> None:
        """Frees the metadata of batches that the consumer took and dropped, but for the last ones."""
        while len(self._taken) > but:
            with suppress(IndexError):  # the other thread frees, too
                self._taken.popleft()

    def _next(self) -> _Parcel | None:
        with suppress(IndexError):
            return self._parcels.popleft()
        return None

    def _leave(self) -> None:
        with suppress(IndexError):  # the other thread does
            self._on_left.pop()()


def metadata_in(batch: Any) -> Iterator[list[Any]]:
    """What the MetaTensors within dicts, lists and tuples hold as metadata."""
    return (list(tensor.meta.values()) for tensor in outer_tensors(batch) if isinstance(tensor, MetaTensor))


#: Types that hold no tensors.
_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None), np.ndarray, type, ModuleType})


def cuda_tensors(value: Any, plain: bool = False) -> list[torch.Tensor]:
    """Every CUDA tensor within containers and objects, as plain tensors; those in a MetaTensor's metadata included.

    With ``plain`` only those within dicts, lists and tuples.
    """
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    todo: list[Iterable[Any]] = [(value,)]
    while todo:
        for part in todo.pop():
            kind = type(part)
            if kind is torch.Tensor:
                if part.is_cuda:
                    found.append(part)
            elif kind not in _PLAIN and id(part) not in seen:
                seen.add(id(part))
                todo.extend(_members(part, plain))
    return found


def _members(value: Any, plain: bool) -> Iterator[Iterable[Any]]:
    if isinstance(value, torch.Tensor):
        yield (value.as_subclass(torch.Tensor),)
    if isinstance(value, Mapping):
        yield value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield value
    elif not plain:
        yield getattr(value, "__dict__", {}).values()
