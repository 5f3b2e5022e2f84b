"""Moves batches from worker processes to the loader's in shared memory. For :mod:`.on_values`.

A batch is pickled without its large buffers (protocol 5 of pickle). They lie one after another in an :class:`Arena`:
memory of the loader's process (``memfd_create``), which a worker maps too. It does not use /dev/shm, which has 64 MB in
Docker, and nothing is left of it when the processes end, however they end. A batch that does not fit into its arena is
pickled with its buffers.

On a CPU target the tensors of a batch lie in its arena, which is reused when the last of them is gone. For a CUDA
target the arena is page-locked once, and reused when it has been copied.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import mmap
import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from monai.data import MetaTensor

from monai_gds import limits
from monai_gds.base.file_systems import opened
from monai_gds.base.notices import Notice
from monai_gds.base.process import Owner
from monai_gds.errors import warn
from monai_gds.programs.program import of_kind
from monai_gds.storage.memory import tensor_at
from monai_gds.storage.staging import pin, unpin

_log = logging.getLogger("monai_gds")

#: Buffers begin at multiples of this in an arena, as torch aligns its own memory.
_ALIGNMENT = 64

_numbers = itertools.count()


class Place(NamedTuple):
    """Where a worker finds an arena."""

    number: int
    process: int
    descriptor: int
    file: tuple[int, int]  # device and inode: the descriptor may be another file's by now, not to be written to
    nbytes: int


#: Forks of this process. A child may still have a batch that is gone here, so its memory is not written to again.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(before=_count_fork)


class Arena:
    """Shared memory for one batch at a time. The kernel gives it pages as they are written.

    Attributes:
        forks: forks of this process when its batch was handed out; None before that.

    Raises:
        OSError: the process may have no more descriptors or memory.
    """

    def __init__(self, nbytes: int) -> None:
        descriptor = os.memfd_create("monai-gds-batch")
        try:
            os.ftruncate(descriptor, nbytes)
            st = os.fstat(descriptor)
            self.memory = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
        except BaseException:
            os.close(descriptor)
            raise
        self.nbytes = nbytes
        self.forks: int | None = None
        self.place = Place(next(_numbers), os.getpid(), descriptor, (st.st_dev, st.st_ino), nbytes)
        self._pinned = _Pinned(self.memory.ctypes.data)
        weakref.finalize(self, _free, Owner(), descriptor, self._pinned)

    def shared(self, nbytes: int, release: Callable[[], object]) -> np.ndarray:
        """The first bytes; ``release`` is called when nothing refers to them any more."""
        self.forks = _forks
        return tensor_at(self.memory.ctypes.data, nbytes, release).numpy()

    def pin(self, nbytes: int) -> None:
        """Page-locks the first bytes for copies to a CUDA device, unless they are or CUDA refuses."""
        if nbytes <= self._pinned.nbytes:
            return
        self._pinned.end()
        try:
            pin(self._pinned.address, nbytes)
            self._pinned.nbytes = nbytes
        except RuntimeError as e:
            if Notice("not page-locked", str(e)).is_new():
                _log.warning("batches are copied from memory that is not page-locked, which is slower: %s", e)


@dataclass
class _Pinned:
    """How much of an arena is page-locked."""

    address: int
    nbytes: int = 0

    def end(self) -> None:
        if self.nbytes:
            self.nbytes = 0
            unpin(self.address)


def _free(owner: Owner, descriptor: int, pinned: _Pinned) -> None:
    if owner.is_this_process():  # in a forked child CUDA does not work
        with contextlib.suppress(RuntimeError):  # at the end of the interpreter, say
            pinned.end()
    os.close(descriptor)


class Arenas:
    """The arenas of a loader. Their sizes follow the largest batch.

    Args:
        most: most bytes of all together.
        count: how many batches there are at a time.
    """

    def __init__(self, most: int, count: int) -> None:
        self._most, self._count = most, count
        self._size = most // count
        self._made: dict[int, Arena] = {}
        self._free: deque[Arena] = deque()  # any thread gives back, the garbage collector too
        self._copied: deque[tuple[torch.cuda.Event, Arena]] = deque()
        self._warned = False

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the arenas that exist. Workers unmap all others."""
        return frozenset(self._made)

    def take(self) -> Arena | None:
        """An arena without a batch; None if there is no more room, or the system gives none."""
        while self._copied and self._copied[0][0].query():  # type: ignore[no-untyped-call]
            self._free.append(self._copied.popleft()[1])
        while self._free:
            arena = self._free.pop()
            if arena.nbytes >= self._size and arena.forks in (None, _forks):
                return arena
            del self._made[arena.place.number]
        if not self._size or sum(arena.nbytes for arena in self._made.values()) + self._size > self._most:
            return None
        try:
            arena = Arena(self._size)
        except OSError as e:
            if Notice("no shared memory", os.getpid(), e.errno).is_new():
                _log.warning("batches are pickled: there is no memory to share with worker processes (%s)", str(e))
            return None
        self._made[arena.place.number] = arena
        return arena

    def give_back(self, arena: Arena, copied: torch.cuda.Event | None = None) -> None:
        """Takes back an arena whose batch is gone, or will be when it is ``copied``."""
        if copied is None:
            self._free.append(arena)
        else:
            self._copied.append((copied, arena))

    def note(self, packed: Packed) -> None:
        """Makes arenas from now on large enough for batches like this one."""
        if self._size < packed.nbytes <= self._most:
            self._size = min(packed.nbytes + packed.nbytes // 4, self._most)  # others may be larger
        needed = packed.nbytes * self._count
        if packed.loose is not None and needed > self._most and not self._warned:
            self._warned = True
            warn(
                f"batches of {packed.nbytes / 1e6:.0f} MB do not all fit into shared memory and are pickled, which is "
                f"slower: prefetch_bytes={1.25 * needed:.1e} has room for them"
            )


class Mapped:
    """A worker's mappings of arenas."""

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}

    def room(self, place: Place | None, numbers: Container[int]) -> memoryview | None:
        """The memory of an arena; None if there is none, or the system does not let this process have it."""
        for gone in [number for number in self._mappings if number not in numbers]:
            del self._mappings[gone]
        if place is None:
            return None
        if place.number not in self._mappings:
            try:
                self._mappings[place.number] = _mapping(place)
            except OSError as e:
                if Notice("not opened", place.process, e.errno).is_new():
                    _log.warning("batches are pickled: the memory for them cannot be opened (%s)", str(e))
                return None
        return memoryview(self._mappings[place.number])


def _mapping(place: Place) -> mmap.mmap:
    with opened(f"/proc/{place.process}/fd/{place.descriptor}", os.O_RDWR) as descriptor:
        st = os.fstat(descriptor)
        if (st.st_dev, st.st_ino) != place.file:
            raise FileNotFoundError(errno.ENOENT, "it is gone")
        return mmap.mmap(descriptor, place.nbytes)


# ---------------------------------------------------------------------------------------------------------------------
# Packing


class Packed(NamedTuple):
    """A packed batch."""

    pickled: bytes  # everything but large buffers
    spans: list[tuple[int, int, bool]]  # offset and size of each buffer in the arena, and whether it goes to the device
    nbytes: int  # of an arena that the buffers take
    loose: list[np.ndarray] | None  # the buffers, if they are not in the arena


def pack(batch: Any, moving: Iterable[torch.Tensor], room: memoryview | None) -> Packed:
    """Packs a batch into an arena, if it fits. The tensors ``moving`` go to the loader's device."""
    file = io.BytesIO()
    pickler = _Pickler(file, moving)
    pickler.dump(batch)
    spans, end = [], 0
    for raw, moves in pickler.buffers:
        spans.append((end, raw.nbytes, moves))
        end += raw.nbytes + -raw.nbytes % _ALIGNMENT
    if room is None or end > room.nbytes:
        return Packed(file.getvalue(), spans, end, [np.frombuffer(raw, np.uint8) for raw, _ in pickler.buffers])
    for (start, nbytes, _), (raw, _) in zip(spans, pickler.buffers, strict=True):
        room[start : start + nbytes] = raw
    return Packed(file.getvalue(), spans, end, None)


def unpack(packed: Packed, memory: np.ndarray | None, take: Callable[[np.ndarray, bool], Any]) -> Any:
    """Unpacks a batch. ``take`` gets each buffer, and whether it goes to the device, and returns the memory to use."""
    buffers = packed.loose
    if buffers is None:
        buffers = [] if memory is None else [memory[start : start + nbytes] for start, nbytes, _ in packed.spans]
    memories = [take(buffer, moves) for buffer, (_, _, moves) in zip(buffers, packed.spans, strict=True)]
    return pickle.loads(packed.pickled, buffers=memories)


class _Pickler(pickle.Pickler):
    """Leaves out large buffers, and those of tensors that go to the device (``moving``).

    Attributes:
        buffers: the buffers that were left out, in order, and whether each is moving.
    """

    def __init__(self, file: io.BytesIO, moving: Iterable[torch.Tensor]) -> None:
        super().__init__(file, 5, buffer_callback=self._leave_out)
        self._moving = {id(tensor) for tensor in moving}
        self._moves = False
        self.buffers: list[tuple[memoryview, bool]] = []

    def _leave_out(self, buffer: pickle.PickleBuffer) -> bool:
        moves, self._moves = self._moves, False
        raw = buffer.raw()
        if raw.nbytes < limits.PICKLED_BUFFER_BYTES and not moves:
            return True  # pickled with the rest
        self.buffers.append((raw, moves))
        return False

    def reducer_override(self, value: Any) -> Any:
        """Pickles a tensor as its bytes and its form. Other kinds of tensors are left to torch."""
        kind = type(value)
        if kind not in (torch.Tensor, MetaTensor):
            return NotImplemented
        if kind is torch.Tensor and id(value) not in self._moving and (array := _small(value)) is not None:
            return torch.from_numpy, (array,)
        with torch._C.DisableTorchFunctionSubclass():
            if value.layout != torch.strided or value.is_cuda or value.is_quantized or value.requires_grad:
                return NotImplemented
            plain = value.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
            if not plain.numel() and id(value) not in self._moving:
                return NotImplemented
            if not plain.is_contiguous():
                plain = plain.clone(memory_format=torch.preserve_format)
            raw = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
            form = plain.dtype, tuple(plain.shape), plain.stride()
        self._moves = id(value) in self._moving
        return _tensor, (pickle.PickleBuffer(raw), form, kind, vars(value))


def _small(tensor: torch.Tensor) -> np.ndarray | None:
    """A small plain tensor as an array, which takes pickle a third of the time. A batch may have a hundred of them."""
    with contextlib.suppress(TypeError, RuntimeError):  # NumPy has no such form
        if tensor.is_contiguous() and not tensor.is_quantized and not vars(tensor):
            return tensor.numpy() if tensor.nbytes < limits.PICKLED_BUFFER_BYTES else None
    return None


def _tensor(raw: Any, form: tuple[torch.dtype, Any, Any], kind: type[torch.Tensor], attributes: Any) -> torch.Tensor:
    """A tensor over its bytes, which lie in an arena, on a device, or in a bytearray."""
    dtype, shape, strides = form
    flat = raw if isinstance(raw, torch.Tensor) else torch.from_numpy(np.frombuffer(raw, np.uint8))
    with torch._C.DisableTorchFunctionSubclass():
        return of_kind(flat.view(dtype).as_strided(shape, strides), kind, attributes)
