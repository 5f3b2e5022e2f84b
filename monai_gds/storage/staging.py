"""Pinned staging and stream hand-off: the one way by which host memory reaches a CUDA device, and one back to a file.

Used by the backends only. Every copy to a device runs on that device's one copy stream, whose memory pool the device
buffers come from:

* a buffer freed by its consumer returns to the copy stream's pool, and torch's allocator gives it out again only after
  the streams it was recorded on have finished with it (``record_stream``);
* a pinned slot is refilled only after the event behind its last copy.

So neither is overwritten before its last reader has finished, and nobody waits for the whole device.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from monai_gds.storage.base import ALIGNMENT

__all__ = [
    "StagingPool",
    "StagingSlot",
    "adopt",
    "allocate_on_copy_stream",
    "copy_stream",
    "footprint",
    "forget_after_fork",
    "hand_off",
    "on_host",
    "pinned_bytes",
    "raw_current_stream",
    "staging_pool",
]

#: Measured on the way from the page cache to a GPU: 16 MiB pieces read by 8 threads gave 25 GB/s, 8 MiB pieces 21.
SLOT_BYTES = 16 << 20
SLOTS = 16

#: CUDA_ERROR_INVALID_CONTEXT of the driver's cuda.h.
_INVALID_CONTEXT = 201

_lock = threading.Lock()
_streams: dict[torch.device, torch.cuda.Stream] = {}
_pools: dict[torch.device, StagingPool] = {}


def forget_after_fork() -> None:
    """Starts a forked child without streams and slots: CUDA does not work there.

    The parent's are kept for ever, since freeing them would call CUDA.
    """
    global _lock, _streams, _pools
    for inherited in (_streams, _pools):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
    _lock, _streams, _pools = threading.Lock(), {}, {}


os.register_at_fork(after_in_child=forget_after_fork)


def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The process's one copy stream of ``device``."""
    with _lock:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _streams[device]


def allocate_on_copy_stream(nbytes: int, device: torch.device) -> torch.Tensor:
    """A 1-D uint8 CUDA tensor from the copy stream's pool: free of earlier readers, so it may be filled at once."""
    with torch.cuda.stream(copy_stream(device)):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def adopt(dests: Sequence[torch.Tensor], device: torch.device) -> None:
    """Makes the copy stream wait for the work queued so far on the current stream before it writes to ``dests``."""
    stream = copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    for dest in dests:
        dest.record_stream(stream)


def hand_off(
    dests: Sequence[torch.Tensor],
    device: torch.device,
    *,
    arrived: bool = False,
    behind: torch.cuda.Event | None = None,
) -> None:
    """Gives ``dests`` to the current stream: it waits for their copies, and they are kept until it has used them.

    Args:
        dests: CUDA tensors.
        device: where they are.
        arrived: they are filled already, so there is no copy to wait for.
        behind: an event behind their copies; without one, all copies queued so far are waited for.
    """
    stream = copy_stream(device)
    current = torch.cuda.current_stream(device)
    if current == stream:
        return
    if behind is not None:
        current.wait_event(behind)
    elif not arrived:
        current.wait_stream(stream)
    for dest in dests:
        dest.record_stream(current)


class StagingSlot:
    """A page-aligned pinned buffer on its way between a file and a device.

    Attributes:
        buffer: 1-D uint8 pinned CPU tensor of ``SLOT_BYTES``.
        array, view: the same memory as a NumPy array and as a writable memoryview.
    """

    __slots__ = ("array", "buffer", "event", "view")

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        if self.buffer.data_ptr() % ALIGNMENT:  # torch may carve small ones out of a larger block
            raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
            start = -raw.data_ptr() % ALIGNMENT
            self.buffer = raw[start : start + nbytes]
        self.array = self.buffer.numpy()
        self.view = self.array.data
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, address: int, nbytes: int, stream: torch.cuda.Stream, offset: int = 0) -> None:
        """Queues the copy of ``nbytes`` from ``offset`` on to device memory, and the event behind it.

        For a thread whose current stream is ``stream``.

        Raises:
            RuntimeError: CUDA refused.
        """
        _copy_to_device(address, self.buffer.data_ptr() + offset, nbytes, stream.cuda_stream)
        self.event.record(stream)


def raw_current_stream(device: torch.device) -> int:
    """The current stream's ``cuda_stream``, for who asks at every record: torch takes 4 us to give a stream."""
    raw: int = torch._C._cuda_getCurrentRawStream(device.index)
    return raw


def _copy_to_device(dest: int, source: int, nbytes: int, stream: int) -> None:
    """The driver's own call. torch's ``copy_`` takes 70 us where three threads share the interpreter, for it lets go of
    its lock and looks after pinned memory that it did not allocate for this; this takes 5. (Where five do, an upload
    with ``copy_`` took 800.)
    """
    copy = _driver().cuMemcpyHtoDAsync_v2
    code = copy(dest, source, nbytes, stream)
    if code == _INVALID_CONTEXT:  # a thread in which no call of CUDA's runtime has made the device's context current
        torch.cuda.mem_get_info()
        code = copy(dest, source, nbytes, stream)
    if code:
        raise RuntimeError(f"CUDA refused a copy of {nbytes} bytes to the device: error {code} of cuMemcpyHtoDAsync")


@functools.cache
def _driver() -> ctypes.PyDLL:
    driver = ctypes.PyDLL("libcuda.so.1")  # unlike CDLL it keeps the interpreter's lock during a call
    driver.cuMemcpyHtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return driver


def footprint(dest: torch.Tensor) -> int:
    """Bytes that ``dest`` takes of a slot at the most."""
    return -(-dest.numel() // ALIGNMENT) * ALIGNMENT


def _lay_out(
    dests: Sequence[torch.Tensor], buffer: torch.Tensor
) -> tuple[list[torch.Tensor], list[tuple[int, torch.Tensor]]]:
    """Places for ``dests`` within a slot's buffer, and the copies to make: (offset within the buffer, destination).

    Neighbours in one piece of device memory are neighbours in the slot too, and share one copy; all else begins at a
    multiple of ALIGNMENT.
    """
    hosts: list[torch.Tensor] = []
    copies: list[tuple[int, torch.Tensor]] = []
    end = 0
    for dest in dests:
        size = dest.numel()
        if not dest.is_cuda or not size:
            hosts.append(dest)
            continue
        start, before = copies[-1] if copies else (0, dest)
        if copies and before.data_ptr() + before.numel() == dest.data_ptr() and _share_storage(before, dest):
            copies[-1] = start, before.as_strided((before.numel() + size,), (1,))
        else:
            end = -(-end // ALIGNMENT) * ALIGNMENT
            copies.append((end, dest))
        hosts.append(buffer[end : end + size])
        end += size
    return hosts, copies


def _share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class StagingPool:
    """A bounded set of pinned slots, made as they are needed and shared by every backend of the process.

    Args:
        device: the CUDA device that the slots are copied to.
        slots: how many there may be at most; with all of them in use, ``acquire`` waits.
        slot_bytes: bytes a slot.
    """

    def __init__(self, device: torch.device, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
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
        try:
            slot = self._free.get_nowait()
        except queue.Empty:
            slot = self._make() or self._free.get()
        try:
            if not slot.event.query():  # type: ignore[no-untyped-call]  # unlike synchronize(), this keeps the interpreter's lock
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
        try:
            done = slot.event.query()  # type: ignore[no-untyped-call]
        except BaseException:
            self._free.put(slot)
            raise
        if done:
            return slot
        self._free.put(slot)
        return None

    def _make(self) -> StagingSlot | None:
        with self._lock:  # held meanwhile: who finds the limit reached waits for a slot that surely comes
            if self._made >= self._limit:
                return None
            slot = StagingSlot(self.slot_bytes)
            self._made += 1
            return slot

    def upload(self, slot: StagingSlot, dest: torch.Tensor, offset: int = 0) -> None:
        """Queues the copy of ``slot.buffer[offset:][:dest.numel()]`` to ``dest`` on the copy stream; frees the slot."""
        self.upload_parts(slot, [(offset, dest)])

    def upload_parts(self, slot: StagingSlot, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        """As :meth:`upload`, for several (offset, destination) of one slot.

        Raises:
            ValueError: a destination is not contiguous, or the slot has not that many bytes from its offset on.
        """
        stream = copy_stream(self.device)
        try:
            with torch.cuda.stream(stream):
                for offset, dest in parts:
                    if not dest.is_contiguous() or not 0 <= offset <= self.slot_bytes - dest.nbytes:
                        raise ValueError(f"{dest.nbytes} bytes from {offset} of a slot do not fit into its destination")
                    if dest.nbytes:
                        slot.send(dest.data_ptr(), dest.nbytes, stream, offset)
        finally:
            self._free.put(slot)

    @contextmanager
    def lend(self, dests: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Lends host memory to fill in place of ``dests``, and queues its copy to them when the block ends.

        Args:
            dests: 1-D uint8 tensors, together of no more :func:`footprint` than a slot has bytes. One that lies on the
                CPU is lent itself.

        Yields:
            One host tensor each. After an exception nothing is copied.
        """
        slot = self.acquire()
        try:
            hosts, copies = _lay_out(dests, slot.buffer)
            yield hosts
        except BaseException:
            self.release(slot)
            raise
        self.upload_parts(slot, copies)

    def release(self, slot: StagingSlot) -> None:
        """Gives a slot back without a copy (after a failed read)."""
        self._free.put(slot)


def staging_pool(device: torch.device) -> StagingPool:
    """The process's one staging pool of ``device``."""
    with _lock:
        if device not in _pools:
            _pools[device] = StagingPool(device)
        return _pools[device]


def on_host(source: torch.Tensor) -> Iterator[memoryview]:
    """Brings a tensor to the host piece by piece, through one pinned slot.

    Args:
        source: 1-D contiguous uint8 CUDA tensor; the work queued so far on the current stream is waited for.

    Yields:
        Its bytes in order, each piece until the next is asked for.
    """
    pool = staging_pool(source.device)
    slot = pool.acquire()
    try:
        for start in range(0, source.numel(), pool.slot_bytes):
            piece = source[start : start + pool.slot_bytes]
            slot.buffer[: piece.numel()].copy_(piece)
            yield slot.view[: piece.numel()]
    finally:
        pool.release(slot)


def pinned_bytes(device: torch.device) -> int:
    """Pinned bytes that the staging pool of ``device`` holds now."""
    with _lock:
        return _pools[device].nbytes if device in _pools else 0
