"""Memory that libxnvme allocates: bounce buffers, destinations on the host, and tensors in GPU memory.

A drive transfers whole blocks to aligned addresses. Reads that do not fit this go through a bounce buffer, in host
memory or, for a drive that writes to GPU memory by itself, on the GPU.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from monai_gds.base.process import Owner
from monai_gds.errors import StorageError
from monai_gds.storage import staging
from monai_gds.storage.files import ALIGNMENT, whole_pages
from monai_gds.storage.memory import tensor_at
from monai_gds.storage.xnvme.libxnvme import Device, Library

#: Most bytes of one drive's bounce buffers.
MOST_BYTES = 64 << 20


class Bounce(NamedTuple):
    """A bounce buffer: its address, and on a GPU its memory and the event to wait for before it is filled again."""

    address: int
    memory: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None


class BounceBuffers:
    """The bounce buffers of one drive, of ``nbytes`` each, made as they are needed by ``make``; ``free`` frees one."""

    def __init__(
        self, nbytes: int, make: Callable[[int], Bounce], free: Callable[[Bounce], object] = lambda bounce: None
    ) -> None:
        self._nbytes = whole_pages(nbytes)
        self._make, self._free_one = make, free
        self._free: deque[Bounce] = deque()
        self._unmade, self._made = max(1, MOST_BYTES // self._nbytes), 0

    def take(self) -> Bounce | None:
        """A buffer that may be filled at once; None while all are in use."""
        if self._free:
            copied = self._free[0].copied
            if copied is None or copied.query():  # type: ignore[no-untyped-call]
                return self._free.popleft()
        if not self._unmade:
            return None
        try:
            made = self._make(self._nbytes)
        except StorageError:
            if not self._made:
                raise
            self._unmade = 0  # the existing ones must do
            return None
        self._unmade -= 1
        self._made += 1
        return made

    def give_back(self, bounce: Bounce) -> None:
        self._free.append(bounce)

    def deliver(self, bounce: Bounce, skip: int, dest: torch.Tensor) -> None:
        """Copies the bytes from ``skip`` on to ``dest``; takes the buffer back.

        From a GPU's memory the copy is queued on the copy stream, which is current.
        """
        if bounce.memory is None:
            ctypes.memmove(dest.data_ptr(), bounce.address + skip, dest.numel())
            return self.give_back(bounce)
        dest.copy_(bounce.memory[skip : skip + dest.numel()], non_blocking=True)
        copied = torch.cuda.current_stream(bounce.memory.device).record_event()
        if not dest.is_cuda:
            copied.synchronize()
        self.give_back(bounce._replace(copied=copied))

    def close(self) -> None:
        while self._free:
            self._free_one(self._free.pop())


class GpuBuffers:
    """Tensors in GPU memory that a drive writes to by itself.

    A buffer is freed once its tensor is gone and the streams that used it are done with it. The device stays open until
    the last one is freed. ``device`` was opened with an allocator of memory on the GPU ``target``.
    """

    def __init__(self, device: Device, target: torch.device) -> None:
        self.target = target
        self.owner = Owner()
        self._device = device
        self._lock = threading.RLock()  # reentrant: a tensor may be collected while this thread holds it
        self._alive = 0
        self._retired: deque[tuple[int, list[torch.cuda.Event]]] = deque()
        self._closing = False

    def tensor(self, nbytes: int) -> torch.Tensor:
        """A new 1-D uint8 tensor over a new buffer, ``nbytes`` rounded up to whole pages."""
        self._free_retired()
        nbytes = whole_pages(max(nbytes, 1))
        with torch.cuda.device(self.target), self._lock:
            address = self._device.alloc(nbytes)
            self._alive += 1
        array = _arrays[address] = _GpuArray(self, address, nbytes)
        return torch.as_tensor(array, device=self.target)

    def bounce(self, nbytes: int) -> Bounce:
        memory = self.tensor(nbytes)
        return Bounce(memory.data_ptr(), memory)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        array = _arrays.get(tensor.untyped_storage().data_ptr())
        return array is not None and array.buffers is self

    def retire(self, address: int, streams: set[torch.cuda.Stream]) -> None:
        """Takes a buffer whose tensor is gone. It is freed after the work queued on its streams."""
        self._retired.append((address, [stream.record_event() for stream in streams]))
        if self._closing:
            self._free_retired(wait=True)

    def _free_retired(self, *, wait: bool = False) -> None:
        with self._lock:
            for _ in range(len(self._retired)):
                address, events = self._retired.popleft()
                if not wait and not all(event.query() for event in events):  # type: ignore[no-untyped-call]
                    self._retired.append((address, events))
                    continue
                for event in events:
                    event.synchronize()
                self._device.free(address)
                self._alive -= 1
            if self._closing and not self._alive:
                self._device.close()

    def close(self) -> None:
        """Closes the device, at once or when the last tensor has gone."""
        self._closing = True
        self._free_retired(wait=True)


class _GpuArray:
    """The object that torch wraps as a tensor. It retires its buffer when the last tensor over it is gone."""

    def __init__(self, buffers: GpuBuffers, address: int, nbytes: int) -> None:
        self.buffers, self._address = buffers, address
        self.streams = {staging.copy_stream(buffers.target)}
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip

    def __del__(self) -> None:
        if self.buffers.owner.is_this_process() and not sys.is_finalizing():  # else CUDA must not be called
            self.buffers.retire(self._address, self.streams | {torch.cuda.current_stream(self.buffers.target)})


#: Buffers in GPU memory, by address.
_arrays: weakref.WeakValueDictionary[int, _GpuArray] = weakref.WeakValueDictionary()


def used_by_current_stream(tensors: list[torch.Tensor]) -> None:
    """Notes that the current stream uses these tensors: torch's ``record_stream`` works only for torch's own memory."""
    for tensor in tensors:
        array = _arrays.get(tensor.untyped_storage().data_ptr())
        if array is not None:
            array.streams.add(torch.cuda.current_stream(array.buffers.target))


def host_tensor(library: Library, nbytes: int) -> torch.Tensor:
    """A 1-D uint8 CPU tensor of whole pages, ``nbytes`` long or longer.

    torch's own memory begins anywhere in a page: room for whole pages in it would make every tensor a page longer.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    nbytes = whole_pages(nbytes)
    address = library.api.xnvme_buf_virt_alloc(ALIGNMENT, nbytes)
    if not address:
        raise MemoryError(f"xnvme_buf_virt_alloc gave no {nbytes} bytes")
    return tensor_at(address, nbytes, partial(library.api.xnvme_buf_virt_free, address))
