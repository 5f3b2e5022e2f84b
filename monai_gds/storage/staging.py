"""Pinned staging and the hand-off between streams: how bytes get from host memory to a CUDA device, and back to a file.

Every copy to a device runs on that device's one copy stream. Device buffers come from the memory pool of that stream:

* A buffer that its consumer frees returns to the pool. torch's allocator reuses it only after the streams that it was
  recorded on are done with it (``record_stream``).
* A pinned slot is refilled only after the event of its last copy.

So no buffer or slot is overwritten before its last reader is done, and nothing waits for the whole device.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from monai_gds import limits
from monai_gds.base import cores
from monai_gds.base.process import PerProcess
from monai_gds.storage.files import ALIGNMENT, Buffer, as_bytes_view, write_all

#: CUDA_ERROR_INVALID_CONTEXT of the driver's cuda.h.
_INVALID_CONTEXT = 201

#: Flags of cuMemHostRegister in cuda.h.
_PORTABLE, _READ_ONLY = 1, 8


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of the highest priority. Its kernels are short, and do not wait for those that a training has queued.

    Four epochs of a training on an H100 took 1.04 to 1.06 times as long as one that never waits, and four without the
    priority 1.04 to 1.17 times.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return stream


#: The process's one copy stream of a device.
copy_stream = PerProcess(new_stream)

#: The process's streams of a device for work after the copies, in turn.
_side_streams = PerProcess(lambda device: itertools.cycle([new_stream(device) for _ in range(limits.SIDE_STREAMS)]))


def allocate_on_copy_stream(nbytes: int, device: torch.device) -> torch.Tensor:
    """A 1-D uint8 CUDA tensor from the copy stream's pool: free of earlier readers, so it may be filled at once."""
    with on_copy_stream(device):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def on_copy_stream(device: torch.device) -> AbstractContextManager[object]:
    """Makes the copy stream of a CUDA device current; does nothing for the CPU, or where it is current already."""
    if device.type != "cuda":
        return nullcontext()
    stream = copy_stream(device)  # making it current costs as much as an allocation
    return nullcontext() if raw_current_stream(device) == stream.cuda_stream else torch.cuda.stream(stream)


@contextmanager
def on_side_stream(
    tensors: Sequence[torch.Tensor], device: torch.device, after: torch.cuda.Event | None
) -> Iterator[None]:
    """Makes the next side stream current. It waits for ``after``, and ``tensors`` are kept until it has used them."""
    stream = next(_side_streams(device))
    if after is not None:
        stream.wait_event(after)
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


def empty_for_side_stream(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that the current side stream may fill. All side streams share the copy stream's pool."""
    with on_copy_stream(device):
        found = torch.empty(tuple(shape), dtype=dtype, device=device)
    if found.is_cuda:  # earlier copies into this memory may still be queued, if nobody waited for them
        side = current_stream(device)
        side.wait_stream(copy_stream(device))
        found.record_stream(side)
    return found


def adopt(dests: Sequence[torch.Tensor], device: torch.device) -> None:
    """Makes the copy stream wait for the work queued so far on the current stream before it writes to ``dests``."""
    stream = copy_stream(device)
    stream.wait_stream(current_stream(device))
    for dest in dests:
        dest.record_stream(stream)


def hand_off(dests: Sequence[torch.Tensor], device: torch.device, after: torch.cuda.Event) -> None:
    """Gives CUDA tensors to the current stream: it waits for the event after their copies, and they are kept until it
    has used them.
    """
    current = current_stream(device)
    if current == copy_stream(device):
        return
    current.wait_event(after)
    for dest in dests:
        dest.record_stream(current)


def pci_address(device: torch.device) -> str:
    """The name of a CUDA device below /sys/bus/pci/devices; empty with an old torch, which does not tell it."""
    gpu = torch.cuda.get_device_properties(device)
    try:
        return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    except AttributeError:
        return ""


def _find_near(device: torch.device) -> frozenset[int]:
    allowed = cores.allowed()
    found = allowed & cores.near(pci_address(device), cores.ROOT)
    return found if found != allowed else frozenset()


_near = PerProcess(_find_near)


def near(device: torch.device, threads: int = 1) -> frozenset[int]:
    """The processors on which threads that fill memory for a device stay, so that it is on the device's NUMA node.

    Empty where all that this process may use are near, or fewer than the ``threads``; and before it has used CUDA,
    which asking would begin.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return frozenset()
    found = _near(device)
    return found if len(found) >= threads else frozenset()


class StagingSlot:
    """A page-aligned pinned buffer on its way between a file and a device."""

    __slots__ = ("buffer", "event")

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        if self.buffer.data_ptr() % ALIGNMENT:  # torch may carve small ones out of a larger block
            raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
            start = -raw.data_ptr() % ALIGNMENT
            self.buffer = raw[start : start + nbytes]
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, address: int, nbytes: int, stream: torch.cuda.Stream, offset: int = 0) -> None:
        """Queues the copy of ``nbytes`` from ``offset`` on to device memory, and the event after it.

        For a thread whose current stream is ``stream``. Raises RuntimeError if CUDA refuses.
        """
        copy_to_device(address, self.buffer.data_ptr() + offset, nbytes, stream.cuda_stream)
        self.event.record(stream)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream of a CUDA device. Takes 4 µs."""
    stream: torch.cuda.Stream = torch.cuda.current_stream(device)
    return stream


def raw_current_stream(device: torch.device) -> int:
    """Raw handle of the current stream, for hot paths."""
    raw: int = torch._C._cuda_getCurrentRawStream(device.index)
    return raw


def copy_to_device(dest: int, source: int, nbytes: int, stream: int) -> None:
    """Queues a copy from pinned memory through the driver: 5 µs beside two other threads, ``copy_`` 70.

    torch's ``copy_`` releases the interpreter's lock, and tracks pinned memory. With five threads it took 800 µs.
    """
    _call_driver("cuMemcpyHtoDAsync_v2", dest, source, nbytes, stream)


def pin(address: int, nbytes: int) -> None:
    """Registers the memory of a read-only mapping for copies to any device. The mapping must outlive them.

    Raises RuntimeError if CUDA refuses: too much is registered, or this kernel and file system cannot.
    """
    _call_driver("cuMemHostRegister_v2", address, nbytes, _PORTABLE | _READ_ONLY, releases_lock=True)


def unpin(address: int) -> None:
    """Unregisters memory that :func:`pin` registered."""
    _call_driver("cuMemHostUnregister", address, releases_lock=True)


@functools.cache
def compiled(source: str, name: str, device: int) -> int:
    """The ``CUfunction`` of a kernel, compiled by CuPy when it is first asked for. CuPy keeps the result on disk."""
    import cupy

    with cupy.cuda.Device(device):  # CuPy compiles and loads when it is asked for the function
        return int(_module(source, device).get_function(name).kernel.ptr)


@functools.cache
def _module(source: str, device: int) -> Any:
    import cupy

    return cupy.RawModule(code=source, options=("--std=c++14",))


def launch(function: int, blocks: int, threads: int, arguments: Sequence[int], stream: int) -> None:
    """Launches a kernel, a ``CUfunction``, whose arguments are all addresses and 64-bit integers, on a raw stream."""
    values = (ctypes.c_int64 * len(arguments))(*arguments)
    first = ctypes.addressof(values)
    addresses = (ctypes.c_void_p * len(arguments))(*range(first, first + 8 * len(arguments), 8))
    _call_driver("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, addresses, None)


def _call_driver(name: str, *arguments: object, releases_lock: bool = False) -> None:
    """Calls the driver. A call that takes long releases the interpreter's lock."""
    function = getattr(_driver(releases_lock), name)
    code = function(*arguments)
    if code == _INVALID_CONTEXT:  # a thread in which no call of CUDA's runtime has made the device's context current
        torch.cuda.mem_get_info()
        code = function(*arguments)
    if code:
        raise RuntimeError(f"CUDA refused {name}: error {code}")


@functools.cache
def _driver(releases_lock: bool) -> ctypes.CDLL:
    driver = (ctypes.CDLL if releases_lock else ctypes.PyDLL)("libcuda.so.1")
    number, pointer, size = ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t
    driver.cuMemcpyHtoDAsync_v2.argtypes = [ctypes.c_uint64, pointer, size, pointer]
    driver.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    driver.cuMemHostRegister_v2.argtypes = [pointer, size, number]
    driver.cuMemHostUnregister.argtypes = [pointer]
    return driver


class StagingPool:
    """At most ``slots`` pinned slots, made as they are needed and shared by every backend of the process."""

    def __init__(
        self, device: torch.device, slots: int = limits.STAGING_SLOTS, slot_bytes: int = limits.SLOT_BYTES
    ) -> None:
        self.device = device
        self.slot_bytes = slot_bytes
        self._limit = slots
        self._made = 0
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[StagingSlot] = queue.SimpleQueue()

    @property
    def nbytes(self) -> int:
        """Pinned bytes held now."""
        return self._made * self.slot_bytes

    def acquire(self) -> StagingSlot:
        """A slot whose last copy has finished. Give it back with :meth:`upload` or :meth:`release`."""
        if (free := self.try_acquire()) is not None:
            return free
        slot = self._free.get()
        try:
            slot.event.synchronize()
        except BaseException:
            self._free.put(slot)
            raise
        return slot

    def try_acquire(self) -> StagingSlot | None:
        """As :meth:`acquire`, but None where that would wait for a slot or for the last copy of one."""
        try:
            slot = self._free.get_nowait()
        except queue.Empty:
            return self._make()
        done = False
        try:
            done = slot.event.query()  # type: ignore[no-untyped-call]
        finally:
            if not done:
                self._free.put(slot)
        return slot if done else None

    def _make(self) -> StagingSlot | None:
        with self._lock:  # also while the slot is made: whoever then finds the limit reached can rely on it
            if self._made >= self._limit:
                return None
            with cores.staying_on(near(self.device)):  # the kernel gives memory of the node of the thread that asks
                slot = StagingSlot(self.slot_bytes)
            self._made += 1
            return slot

    def upload(self, slot: StagingSlot, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Queues the copies of parts of a slot on the copy stream, ``(offset, destination)`` each; frees the slot."""
        stream = copy_stream(self.device)
        try:
            with torch.cuda.stream(stream):
                for offset, dest in parts:
                    if not dest.is_contiguous() or not 0 <= offset <= self.slot_bytes - dest.nbytes:
                        raise ValueError(f"{dest.nbytes} bytes from {offset} of a slot: too many, or strided")
                    if dest.nbytes:
                        slot.send(dest.data_ptr(), dest.nbytes, stream, offset)
        finally:
            self._free.put(slot)

    def release(self, slot: StagingSlot) -> None:
        """Gives a slot back without a copy."""
        self._free.put(slot)

    def forget(self, slots: int) -> None:
        """Writes off slots that will not be given back. As many new ones may be made."""
        with self._lock:
            self._made -= slots


#: The process's one staging pool of a device.
staging_pool = PerProcess(lambda device: StagingPool(device))


def write_buffers(fd: int, buffers: Sequence[Buffer]) -> None:
    """Writes buffers back to back at the descriptor's position, large ones on a device through pinned memory.

    Fetching 1 GiB at once took most of the time: page faults, and a copy to memory that is not pinned.
    """
    waiting: list[memoryview] = []
    for buffer in buffers:
        if not isinstance(buffer, torch.Tensor) or not buffer.is_cuda or buffer.nbytes < limits.STAGED_WRITE_BYTES:
            waiting.append(as_bytes_view(buffer))
            continue
        write_all(fd, waiting)
        waiting = []
        for piece in _on_host(buffer.detach()):
            write_all(fd, [piece])
    write_all(fd, waiting)


def _on_host(source: torch.Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a 1-D uint8 CUDA tensor piece by piece, through one pinned slot.

    Waits for the work queued so far on the current stream. A piece is valid until the next one.
    """
    pool = staging_pool(source.device)
    slot = pool.acquire()
    try:
        for start in range(0, source.numel(), pool.slot_bytes):
            piece = source[start : start + pool.slot_bytes]
            slot.buffer[: piece.numel()].copy_(piece)
            yield as_bytes_view(slot.buffer[: piece.numel()])
    finally:
        pool.release(slot)


def pinned_bytes(device: torch.device) -> int:
    """Pinned bytes that the staging pool of ``device`` holds now."""
    pool = staging_pool.made(device)
    return 0 if pool is None else pool.nbytes
