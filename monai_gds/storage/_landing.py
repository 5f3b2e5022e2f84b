"""Where block reads land that cannot go to their destination at once, and how they get on from there.

A device gives whole blocks at aligned addresses; a destination wants any bytes anywhere, on the host or on a GPU. So
commands read into a *landing*, a buffer that several of them share, and when all of its commands are done its parts are
copied on. There is one kind a memory: xNVMe's host buffers, pinned staging for a GPU, and xNVMe's own GPU buffers.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from monai_gds.storage import staging
from monai_gds.storage._libxnvme import Device, Library
from monai_gds.storage.base import ALIGNMENT

__all__ = ["GpuBuffers", "GpuLandings", "HostLandings", "Landing", "Landings", "PinnedLandings", "host_tensor"]

#: Most bytes that one device's host landings, or GPU landings, hold together.
MOST_BYTES = 64 << 20


class Landing:
    """A buffer on the way.

    Attributes:
        address: of its first byte, a multiple of ALIGNMENT.
        memory: what holds it: an address, a staging slot, a GPU tensor.
        used: bytes given out to commands.
        left: commands in flight that read into it.
        sealed: no further command will.
        parts: (offset in the landing, destination) that are to be copied on.
    """

    __slots__ = ("address", "event", "left", "memory", "parts", "sealed", "used")

    def __init__(self, address: int, memory: Any) -> None:
        self.address, self.memory = address, memory
        self.event: torch.cuda.Event | None = None
        self.renew()

    def renew(self) -> Landing:
        """As new: nothing given out, nothing to copy."""
        self.used = self.left = 0
        self.sealed = False
        self.parts: list[tuple[int, torch.Tensor]] = []
        return self


class Landings(ABC):
    """A bounded set of landings of ``nbytes`` each."""

    nbytes: int

    @abstractmethod
    def take(self) -> Landing | None:
        """One that may be filled at once; None while all are on their way."""

    @abstractmethod
    def deliver(self, landing: Landing) -> None:
        """Copies its parts to their destinations and takes it back."""

    @abstractmethod
    def release(self, landing: Landing) -> None:
        """Takes it back without a copy."""

    def close(self) -> None:  # noqa: B027 (optional: a kind may own nothing)
        """Frees all; none may be on its way."""


class HostLandings(Landings):
    """xNVMe's buffers in host memory, for destinations in host memory."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device = device
        self._free: list[Landing] = []
        self._made = 0

    def take(self) -> Landing | None:
        if self._free:
            return self._free.pop().renew()
        if self._made and (self._made + 1) * self.nbytes > MOST_BYTES:
            return None
        address = self._device.alloc(self.nbytes)
        self._made += 1
        return Landing(address, address)

    def deliver(self, landing: Landing) -> None:
        for offset, dest in landing.parts:
            ctypes.memmove(dest.data_ptr(), landing.address + offset, dest.numel())
        self.release(landing)

    def release(self, landing: Landing) -> None:
        self._free.append(landing)

    def close(self) -> None:
        for landing in self._free:
            self._device.free(landing.address)
        self._made -= len(self._free)
        self._free.clear()


class PinnedLandings(Landings):
    """Slots of the shared pinned staging, for destinations on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._pool = staging.staging_pool(device)
        self.nbytes = self._pool.slot_bytes

    def take(self) -> Landing | None:
        slot = self._pool.try_acquire()
        return None if slot is None else Landing(slot.buffer.data_ptr(), slot)

    def deliver(self, landing: Landing) -> None:
        self._pool.upload_parts(landing.memory, landing.parts)

    def release(self, landing: Landing) -> None:
        self._pool.release(landing.memory)


class GpuBuffers:
    """Buffers in GPU memory that the drive writes to by itself, as tensors.

    A buffer is used again, or freed, once its tensor is gone and the streams that used it are through with it. The
    device stays open until the last one is freed.

    Args:
        device: the drive, opened with a memory allocator that gives GPU memory.
        target: the CUDA device.
    """

    def __init__(self, device: Device, target: torch.device) -> None:
        self._device, self._target = device, target
        self._process = os.getpid()
        self._lock = threading.RLock()  # a tensor may be collected, and leave, in the middle of what holds it
        self._out: dict[int, set[torch.cuda.Stream]] = {}  # address to the streams that use it
        self._leaving: deque[tuple[int, list[torch.cuda.Event]]] = deque()
        self._closing = False

    def tensor(self, nbytes: int) -> torch.Tensor:
        """A new 1-D uint8 tensor over a buffer of its own, rounded up to whole pages; no copy is made.

        Raises:
            StorageError: there is no such memory left.
        """
        self._free_what_left()
        room = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with torch.cuda.device(self._target), self._lock:
            address = self._device.alloc(room)
            self._out[address] = {staging.copy_stream(self._target)}
        return torch.as_tensor(_GpuArray(self, address, room), device=self._target)[:nbytes]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._out

    def used(self, tensors: Sequence[torch.Tensor]) -> None:
        """Notes that the current stream uses these tensors."""
        stream = torch.cuda.current_stream(self._target)
        for tensor in tensors:
            streams = self._out.get(tensor.untyped_storage().data_ptr())
            if streams is not None:
                streams.add(stream)

    def leave(self, address: int) -> None:
        """The tensor over a buffer is gone; the buffer is freed behind the work queued on its streams."""
        if os.getpid() != self._process or sys.is_finalizing():  # no place to call CUDA
            return
        streams = {*self._out[address], torch.cuda.current_stream(self._target)}
        self._leaving.append((address, [stream.record_event() for stream in streams]))
        if self._closing:
            self._free_what_left(wait=True)

    def _free_what_left(self, *, wait: bool = False) -> None:
        with self._lock:
            for _ in range(len(self._leaving)):
                address, events = self._leaving.popleft()
                if not wait and not all(event.query() for event in events):  # type: ignore[no-untyped-call]
                    self._leaving.append((address, events))
                    continue
                for event in events:
                    event.synchronize()
                del self._out[address]
                self._device.free(address)
            if self._closing and not self._out:
                self._device.close()

    def close(self) -> None:
        """Closes the device, at once or when the last tensor has gone."""
        self._closing = True
        self._free_what_left(wait=True)


class _GpuArray:
    """What torch wraps: a buffer that goes back when the last tensor over it is gone."""

    def __init__(self, buffers: GpuBuffers, address: int, nbytes: int) -> None:
        self._buffers, self._address = buffers, address
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip

    def __del__(self) -> None:
        self._buffers.leave(self._address)


class GpuLandings(Landings):
    """xNVMe's buffers in GPU memory, for destinations on that GPU that are not such a buffer themselves."""

    def __init__(self, buffers: GpuBuffers, target: torch.device, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffers, self._target = buffers, target
        self._free: deque[Landing] = deque()
        self._made = 0

    def take(self) -> Landing | None:
        if self._made * self.nbytes < MOST_BYTES and not self._free:
            memory = self._buffers.tensor(self.nbytes)
            self._made += 1
            return Landing(memory.data_ptr(), memory)
        if self._free and (self._free[0].event is None or self._free[0].event.query()):  # type: ignore[no-untyped-call]
            return self._free.popleft().renew()
        return None

    def deliver(self, landing: Landing) -> None:
        stream = staging.copy_stream(self._target)
        with torch.cuda.stream(stream):
            for offset, dest in landing.parts:
                dest.copy_(landing.memory[offset : offset + dest.numel()], non_blocking=True)
            landing.event = stream.record_event()
        if not all(dest.is_cuda for _, dest in landing.parts):
            landing.event.synchronize()
        self.release(landing)

    def release(self, landing: Landing) -> None:
        landing.parts = []
        self._free.append(landing)

    def close(self) -> None:
        self._free.clear()


class _HostArray:
    """A page-aligned buffer of xNVMe's that NumPy wraps, freed with the last array or tensor over it."""

    def __init__(self, library: Library, nbytes: int) -> None:
        address = library.api.xnvme_buf_virt_alloc(ALIGNMENT, nbytes)
        if not address:
            raise MemoryError(f"xnvme_buf_virt_alloc gave no {nbytes} bytes")
        self._address, self._free = address, library.api.xnvme_buf_virt_free
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    def __del__(self) -> None:
        if hasattr(self, "_free"):
            self._free(self._address)


def host_tensor(library: Library, nbytes: int) -> torch.Tensor:
    """A 1-D uint8 CPU tensor at a page boundary, with room behind it up to the next one."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    room = -(-nbytes // ALIGNMENT) * ALIGNMENT
    return torch.from_numpy(np.asarray(_HostArray(library, room)))[:nbytes]
