"""Base of every backend whose primitive is one blocking read: posix, kvikio, deepnvme's aio, xnvme's file API.

A backend gives :meth:`ThreadedStorage._open`, :meth:`ThreadedStorage._close` and :meth:`ThreadedStorage._read_into`;
this file cuts requests into pieces, spreads them over threads, and, where ``_read_into`` only reaches host memory,
takes them to the GPU through pinned staging.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch

from monai_gds.storage import staging
from monai_gds.storage.base import ALIGNMENT, Buffer, FileId, Pending, Read, Storage, completed

__all__ = ["ThreadedStorage", "aligned_empty", "as_bytes_view", "create_file", "write_file"]

#: Requests of together no more than this many bytes on a CPU target are read by the caller's own thread: handing them
#: to another thread costs more than reading them.
INLINE_BYTES = 512 << 10


def aligned_empty(nbytes: int) -> torch.Tensor:
    """A 1-D uint8 CPU tensor whose first byte lies at a multiple of ALIGNMENT.

    For backends that read with O_DIRECT. The storage is a page larger than the tensor.
    """
    raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + nbytes]


def as_bytes_view(buffer: Buffer) -> memoryview:
    """The bytes of a buffer as a memoryview, fetched to the host first when it lies on a device."""
    if isinstance(buffer, torch.Tensor):
        return buffer.detach().cpu().numpy().data
    return memoryview(buffer).cast("B")


def create_file(path: str, nbytes: int) -> int:
    """Creates ``path`` with room for ``nbytes``, and returns a descriptor to write to.

    Raises:
        FileExistsError: ``path`` exists.
        OSError: disk full, no permission.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_file(path: str, buffers: Sequence[Buffer], *, durable: bool) -> None:
    """Writes the buffers back to back into the new file ``path`` through the page cache.

    Space is reserved before the first byte, so that a full disk is found out before anything is written.

    Raises:
        FileExistsError: ``path`` exists.
        OSError: disk full, no permission, input/output error.
    """
    views = [view for view in map(as_bytes_view, buffers) if view.nbytes]
    fd = create_file(path, sum(view.nbytes for view in views))
    try:
        _write_all(fd, views)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, views: list[memoryview]) -> None:
    limit = os.sysconf("SC_IOV_MAX")
    while views:
        written = os.writev(fd, views[:limit])
        while views and written >= views[0].nbytes:
            written -= views.pop(0).nbytes
        if written:
            views[0] = views[0][written:]


def _pieces(request: Read, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Cuts a request at multiples of ``size`` of the destination: (file offset, part of the destination)."""
    total = request.dest.numel()
    for start in range(0, total, size):
        yield request.offset + start, request.dest[start : min(start + size, total)]


class _OpenFiles:
    """The files of one submission, each opened once and closed behind the last read."""

    def __init__(self, storage: ThreadedStorage, requests: Sequence[Read]) -> None:
        self._storage = storage
        self._handles: dict[str, Any] = {}
        self._left = 1
        self._lock = threading.Lock()
        try:
            for request in requests:
                if request.path not in self._handles:
                    self._handles[request.path] = storage._open(request.path, request.expect)
        except BaseException:
            self.done()
            raise

    def __getitem__(self, path: str) -> Any:
        return self._handles[path]

    def add(self, count: int) -> None:
        with self._lock:
            self._left += count

    def done(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            for handle in self._handles.values():
                self._storage._close(handle)


class ThreadedStorage(Storage):
    """See the module's docstring.

    Args:
        device: where destinations live.
        threads: reads in flight at once; default: one a core, 4 at least and 16 at most.
    """

    #: Whether ``_read_into`` fills CUDA tensors; if not, they are filled through pinned staging.
    reaches_gpu: ClassVar[bool] = False

    #: One thread reads this many bytes at a time. Measured: with 16 threads, 8 MiB pieces are the fastest into pinned
    #: memory (smaller ones pay more calls, larger ones balance worse). No larger than a staging slot.
    piece_bytes: ClassVar[int] = staging.SLOT_BYTES

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        super().__init__(device)
        self.threads = threads or max(4, min(16, os.cpu_count() or 4))
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    # What a backend implements.

    @abstractmethod
    def _open(self, path: str, expect: FileId | None) -> Any:
        """Opens a file for reading and returns any handle; raises FileChanged when it is not the one expected."""

    @abstractmethod
    def _close(self, handle: Any) -> None:
        """Closes a handle that ``_open`` gave."""

    @abstractmethod
    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> None:
        """Fills ``dest`` (1-D uint8) from ``offset``. Blocking, called by many threads at once.

        ``dest`` lies on the CPU, or on the device where the backend ``reaches_gpu``; then all of it must have arrived
        when the call returns.

        Raises:
            OSError: the device failed; StorageError when the file ends before ``dest`` is full.
        """

    # What they all share.

    def submit(self, requests: Sequence[Read], *, fresh: bool = False) -> Pending:
        if self.device.type == "cpu" and sum(r.dest.numel() for r in requests) <= INLINE_BYTES:
            return self._read_inline(requests)
        dests = [r.dest for r in requests]
        on_device = [d for d in dests if d.is_cuda]
        earlier: torch.cuda.Event | None = None
        if on_device and not fresh:
            earlier = staging.adopt(on_device, self.device)
        futures = self._start(requests, earlier if self.reaches_gpu else None)

        def finish() -> list[torch.Tensor]:
            _raise_first(futures)
            if on_device:
                staging.hand_off(on_device, self.device, arrived=self.reaches_gpu)
            return dests

        return Pending(finish)

    def _read_inline(self, requests: Sequence[Read]) -> Pending:
        files = _OpenFiles(self, requests)
        try:
            for request in requests:
                if request.dest.numel():
                    self._read_into(files[request.path], request.offset, request.dest)
        finally:
            files.done()
        return completed([r.dest for r in requests])

    def _start(self, requests: Sequence[Read], earlier: torch.cuda.Event | None) -> list[Future[None]]:
        files = _OpenFiles(self, requests)
        executor = self._threads()
        futures: list[Future[None]] = []
        try:
            for request in requests:
                for offset, dest in _pieces(request, self.piece_bytes):
                    files.add(1)
                    try:
                        future = executor.submit(self._read_piece, files, request.path, offset, dest, earlier)
                    except BaseException:
                        files.done()
                        raise
                    futures.append(future)
        finally:
            files.done()
        return futures

    def _read_piece(
        self, files: _OpenFiles, path: str, offset: int, dest: torch.Tensor, earlier: torch.cuda.Event | None
    ) -> None:
        try:
            if earlier is not None:
                earlier.synchronize()
            if not dest.is_cuda or self.reaches_gpu:
                self._read_into(files[path], offset, dest)
                return
            pool = staging.staging_pool(self.device)
            slot = pool.acquire()
            try:
                self._read_into(files[path], offset, slot.buffer[: dest.numel()])
            except BaseException:
                pool.release(slot)
                raise
            pool.upload(slot, dest)
        finally:
            files.done()

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix=f"monai-gds-{self.name}")
            return self._executor

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self.device.type == "cuda":
            return staging.allocate_on_copy_stream(nbytes, self.device)
        return aligned_empty(nbytes)

    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool = False) -> None:
        write_file(path, buffers, durable=durable)

    def close(self) -> None:
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "threads": self.threads, "piece_bytes": self.piece_bytes}


def _raise_first(futures: Sequence[Future[None]]) -> None:
    """Waits for all, so that no destination is still being written, then raises the first error there was."""
    errors = [e for e in (f.exception() for f in futures) if e is not None]
    if errors:
        raise errors[0]
