"""The ``kvikio`` backend: GPUDirect Storage through cuFile where the machine has it, KvikIO's threads where not.

With cuFile, large reads go straight to the device: where the kernel module nvidia-fs is loaded, or where you ask for it
with KVIKIO_COMPAT_MODE=OFF (for PCI peer-to-peer DMA without that module, say). KvikIO itself takes cuFile wherever
the library is, but without the module cuFile copies through the host by itself: 3.2 GB/s from the page cache of a
machine where the way below gave 20. Without cuFile KvikIO would copy through pinned memory of its own, on
streams that wait for the legacy default stream: measured, a read behind 300 ms of queued work took 305 ms. So there
KvikIO's threads fill this package's pinned slots, and the copy stream takes them to the device, past whatever training
has queued. (Reading from Python threads held 4 MiB pieces to 18 GB/s: after each, a thread has to get the interpreter's
lock. KvikIO's threads do not.) Small reads go the way of the ``posix`` backend.

**What is changed in your process:** KvikIO has one thread unless told otherwise, which leaves most of the link idle. If
``kvikio.defaults.get("num_threads")`` is that default of 1 and neither KVIKIO_NTHREADS nor KVIKIO_NUM_THREADS is set,
this backend sets it to five eighths of the cores (4 to 16), for the whole process. A number of your own is left alone.
Nothing else is changed.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib.util
import os
import queue
import stat
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from monai_gds.errors import StorageError
from monai_gds.storage import staging
from monai_gds.storage.base import ALIGNMENT, CUDA_ONLY, Availability, Buffer, FileId, Pending, Read, naming
from monai_gds.storage.posix import PosixStorage, is_cold, open_file
from monai_gds.storage.threaded import create_file, total_bytes, write_buffers, write_file

__all__ = ["KvikioStorage"]

#: KvikIO's threads where nobody set any: five eighths of the cores, and no more than this. The others are for Python's
#: own threads (the loader's, the training's, and the one that keeps KvikIO's busy). Measured on an H100 with 16 cores,
#: records of 74 MB one by one: 14 threads moved 23 GB/s to the consumer, 12 moved 33, 10 moved 43, 8 moved 42.
MOST_THREADS = 16

#: Bytes that one of KvikIO's threads reads at a time. For each of them one is woken up, at the pump's expense.
TASK_BYTES = 2 << 20

#: A submission has no more files open at a time (KvikIO opens each twice, and cuFile once more); with more, it waits
#: for the first ones.
OPEN_FILES = 32

#: Requests of fewer bytes are read as the posix backend does.
SMALL = 1 << 20

#: Bytes that are read into one staging slot, slots that are being filled at a time, and these with those that are full
#: or on their way to the device. All slots together are what the processor's cache has to hold between KvikIO's threads
#: and the copy: measured on an H100 whose host has 300 MiB of it, 8 of 12 MiB moved 35 GB/s, 8 of 8 MiB or 4 of 12 MiB
#: moved 52, which is what the link takes. Fewer and larger pieces leave more of the interpreter's time to the loader.
PIECE_BYTES = 12 << 20
SLOTS_IN_FLIGHT = 4
SLOTS = 6

#: There where the kernel module nvidia-fs is loaded.
NVIDIA_FS = "/proc/driver/nvidia-fs/version"

_streams: dict[torch.device, torch.cuda.Stream] = {}
_lock = threading.Lock()


def default_threads() -> int:
    """How many threads KvikIO gets where nobody set any."""
    return max(4, min(MOST_THREADS, len(os.sched_getaffinity(0)) * 5 // 8))


def through_cufile() -> bool:
    """Whether cuFile moves the bytes; see the module's docstring."""
    import kvikio
    import kvikio.defaults

    if kvikio.defaults.is_compat_mode_preferred():
        return False
    return os.path.exists(NVIDIA_FS) or kvikio.defaults.get("compat_mode") == kvikio.CompatMode.OFF


def pool_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream on which nothing is ever queued, for its memory pool.

    KvikIO writes from the host, without regard to streams. A block from this pool has no earlier user but those it was
    recorded for, and torch's allocator has waited for those.
    """
    with _lock:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _streams[device]


def keep_for_current_stream(dests: Sequence[torch.Tensor], device: torch.device) -> None:
    """Keeps filled destinations from being given out again before the current stream has used them."""
    current = torch.cuda.current_stream(device)
    for dest in dests:
        dest.record_stream(current)


class KvikioStorage(PosixStorage):
    """Reads and writes CUDA tensors through KvikIO, https://docs.rapids.ai/api/kvikio/.

    Args:
        device: a CUDA device.
        threads: sets KvikIO's number of threads, for the whole process; None as the module's docstring says. With
            cuFile in play KvikIO takes a pinned bounce buffer for each, 16 MiB unless set otherwise.

    Raises:
        BackendUnavailable: by ``open_storage``, where KvikIO is missing or there is no CUDA device.
        ValueError: ``threads`` is not positive.
    """

    name = "kvikio"

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads}: at least one is needed")
        super().__init__(device)
        self._pumps: dict[int, _Pump] = {}
        self._pump_lock = threading.Lock()
        import kvikio
        import kvikio.defaults

        self._kvikio = kvikio
        self._direct = through_cufile()
        if threads is None:
            told = {"KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"} & os.environ.keys()
            threads = default_threads() if kvikio.defaults.get("num_threads") == 1 and not told else None
        if threads is not None and kvikio.defaults.get("num_threads") != threads:
            kvikio.defaults.set("num_threads", threads)

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        if device.type != "cuda":
            return Availability(False, CUDA_ONLY, 'use backend="posix" for a CPU target')
        if not torch.cuda.is_available():
            return Availability(False, "there is no CUDA device (KvikIO needs libcuda.so.1)", 'use device="cpu"')
        if importlib.util.find_spec("kvikio") is None:
            extra = "cuda12" if (torch.version.cuda or "").startswith("12") else "cuda13"
            return Availability(False, "the package kvikio is not installed", f"pip install 'monai_gds[{extra}]'")
        try:
            import kvikio
            import kvikio.defaults
        except Exception as e:
            return Availability(False, f"importing kvikio failed: {e}", "install the wheel for your CUDA version")
        how = "cuFile" if through_cufile() else "its threads and pinned staging"
        return Availability(True, f"KvikIO {kvikio.__version__} through {how}")

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes < SMALL or not self._direct:
            return super().allocate(nbytes)
        with torch.cuda.stream(pool_stream(self.device)):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def allocate_all(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return [self.allocate(nbytes) for nbytes in sizes] if self._direct else self._allocate_on_copy_stream(sizes)

    def submit(self, requests: Sequence[Read], *, fresh: bool = False) -> Pending:
        large = [r for r in requests if r.dest.is_cuda and r.dest.numel() >= SMALL]
        if not large:
            return super().submit(requests, fresh=fresh)
        self._check_devices([r.dest for r in requests])
        if not self._direct:
            return self._submit_staged(requests, large, fresh=fresh)
        if not fresh:  # KvikIO knows nothing of streams, so the host waits for the destinations' earlier users
            torch.cuda.current_stream(self.device).synchronize()
        small = [r for r in requests if not (r.dest.is_cuda and r.dest.numel() >= SMALL)]
        reads = _Reads(self, large)
        others = super().submit(small, fresh=fresh) if small else None

        def finish() -> list[torch.Tensor]:
            try:
                reads.wait()
            finally:
                if others is not None:
                    others.wait()
            keep_for_current_stream([r.dest for r in large], self.device)
            return [r.dest for r in requests]

        return Pending(finish)

    def _submit_staged(self, requests: Sequence[Read], large: Sequence[Read], *, fresh: bool) -> Pending:
        job = _Job(self, large)
        if not fresh:
            staging.adopt([r.dest for r in large], self.device)
        self._pump().submit(job)
        small = [r for r in requests if not (r.dest.is_cuda and r.dest.numel() >= SMALL)]
        others = super().submit(small, fresh=fresh) if small else None

        def finish() -> list[torch.Tensor]:
            try:
                if others is not None:
                    others.wait()
            finally:
                job.done.wait()
                staging.hand_off(
                    [r.dest for r in large], self.device, behind=job.arrived if job.error is None else None
                )
            if job.error is not None:
                raise job.error
            return [r.dest for r in requests]

        return Pending(finish)

    def _pump(self) -> _Pump:
        # One a process, as are threads.
        process = os.getpid()
        with self._pump_lock:
            if process not in self._pumps:
                self._pumps[process] = _Pump(self.device)
            return self._pumps[process]

    def close(self) -> None:
        pump = self._pumps.pop(os.getpid(), None)
        if pump is not None:
            pump.close()
        super().close()

    def open_file(self, path: str, flags: str) -> Any:
        """A ``kvikio.CuFile``, or the system's own error where KvikIO's does not name the cause."""
        if not stat.S_ISREG(os.stat(path).st_mode):  # KvikIO would wait for ever to open a FIFO
            raise StorageError(errno.EINVAL, "not a regular file", path)
        try:
            return self._kvikio.CuFile(path, flags)
        except Exception as e:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            raise StorageError(errno.EIO, f"KvikIO could not open it: {e}", path) from e

    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool = False) -> None:
        if not any(isinstance(b, torch.Tensor) and b.is_cuda for b in buffers):
            write_file(path, buffers, durable=durable)
            return
        torch.cuda.current_stream(self.device).synchronize()  # KvikIO does not wait for who is filling the buffers
        fd = create_file(path, total_bytes(buffers))
        try:
            with self.open_file(path, "r+") as file, naming(path):
                self._write_parts(fd, file, path, buffers)
                if durable:
                    os.fsync(fd)
        finally:
            os.close(fd)

    def _write_parts(self, fd: int, file: Any, path: str, buffers: Sequence[Buffer]) -> None:
        offset = 0
        transfers = _Transfers()
        try:
            for buffer in buffers:
                if isinstance(buffer, torch.Tensor) and buffer.is_cuda and offset % ALIGNMENT == 0:
                    transfers.start(file.pwrite, path, buffer.detach(), offset)
                    offset += buffer.numel()
                    continue
                # It may begin in the block that the last one ends in, and cuFile writes whole blocks.
                transfers.wait()
                os.lseek(fd, offset, os.SEEK_SET)
                write_buffers(fd, [buffer])
                offset += total_bytes([buffer])
        finally:
            transfers.settle()
        transfers.wait()

    def describe(self) -> dict[str, Any]:
        import kvikio.defaults

        threads = kvikio.defaults.get("num_threads")
        # KvikIO's own bounce buffers are used only where it is given device memory.
        bounce = kvikio.defaults.get("bounce_buffer_size") * threads if self._direct else 0
        return {
            **super().describe(),
            "kvikio_threads": threads,
            "task_bytes": TASK_BYTES,
            "cufile": self._direct,
            "pinned_bytes": bounce + staging.pinned_bytes(self.device),
        }


def _pieces(nbytes: int) -> Iterator[slice]:
    """Cuts a tensor into even pieces of whole blocks, each one task of KvikIO's.

    Of a call that KvikIO divides itself, the first error comes back while its other tasks are still at work, with
    nothing left to wait for them by: they would write to memory, and use a file, that is gone.
    """
    count = -(-nbytes // TASK_BYTES)
    size = -(-nbytes // (count * ALIGNMENT)) * ALIGNMENT if count else ALIGNMENT
    for start in range(0, nbytes, size):
        yield slice(start, min(start + size, nbytes))


class _Piece(NamedTuple):
    """A part of a tensor that one of KvikIO's threads is reading or writing."""

    path: str
    offset: int
    nbytes: int
    part: Any
    future: Any

    def wait(self) -> StorageError | None:
        """Waits until KvikIO is done with it; returns what went wrong, if anything did."""
        try:
            count = self.future.get()
        except Exception as e:
            return StorageError(errno.EIO, f"KvikIO failed on {self.nbytes} bytes at {self.offset}: {e}", self.path)
        if count != self.nbytes:
            return StorageError(errno.EIO, f"moved {count} of {self.nbytes} bytes at {self.offset}", self.path)
        return None


class _Transfers:
    """Pieces that KvikIO's threads are at.

    Whoever drops it unfinished leaves KvikIO writing: tensors and files are kept until it is done.
    """

    def __init__(self) -> None:
        self._error: StorageError | None = None
        self._pieces: deque[_Piece] = deque()
        self._process = os.getpid()

    def start(self, call: Callable[..., Any], path: str, tensor: torch.Tensor, offset: int) -> None:
        """Hands a tensor to ``CuFile.pread`` or ``pwrite``, piece by piece; after a failure none is under way."""
        whole = tensor if tensor.is_cuda else tensor.numpy()
        try:
            for where in _pieces(tensor.numel()):
                part, nbytes, at = whole[where], where.stop - where.start, offset + where.start
                self._pieces.append(_Piece(path, at, nbytes, part, call(part, nbytes, at, TASK_BYTES)))
        except BaseException:
            self.settle()
            raise

    def settle(self) -> None:
        """Waits until none is under way, and keeps the first error."""
        while self._pieces:  # a piece leaves the queue only when it is done: an interrupt loses none
            error = self._pieces[0].wait()
            self._error = self._error or error
            self._pieces.popleft()

    def wait(self) -> None:
        """Waits until none is under way.

        Raises:
            StorageError: the first of those that failed.
        """
        self.settle()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # an error that is in its own traceback keeps the tensors alive until the collector comes by

    def __del__(self) -> None:
        if self._process == os.getpid():  # a forked child has none of KvikIO's threads
            self.settle()


_FileKey: TypeAlias = "tuple[str, FileId | None]"


class _Part(NamedTuple):
    """As much of a request as one staging slot takes.

    Attributes:
        offset: within the file.
        nbytes: how many.
        address: of the device memory that they go to.
    """

    request: Read
    offset: int
    nbytes: int
    address: int


def _parts(request: Read) -> Iterator[_Part]:
    """Cuts a request into even parts of whole blocks."""
    left, address = request.dest.numel(), request.dest.data_ptr()
    count = -(-left // PIECE_BYTES)
    size = -(-left // (count * ALIGNMENT)) * ALIGNMENT
    for done in range(0, left, size):
        yield _Part(request, request.offset + done, min(size, left - done), address + done)


class _Job:
    """The large reads of one submission on their way through slots, and the files they come from.

    Made by the submitting thread; from then on only the pump's thread touches it, until ``done`` is set.
    """

    def __init__(self, storage: KvikioStorage, requests: Sequence[Read]) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.arrived: torch.cuda.Event | None = None
        self.parts: deque[_Part] = deque()
        self._storage = storage
        self._requests: dict[_FileKey, list[Read]] = {}
        self._files: dict[_FileKey, tuple[int, Any]] = {}
        self._cold: set[_FileKey] = set()
        self._parts_of: Counter[_FileKey] = Counter()
        for request in requests:
            key = (request.path, request.expect)
            self._requests.setdefault(key, []).append(request)
            parts = list(_parts(request))
            self.parts.extend(parts)
            self._parts_of[key] += len(parts)
        self.left = len(self.parts)

    def read(self, part: _Part, slot: staging.StagingSlot) -> Any:
        """Has KvikIO fill the beginning of a slot; returns its future. After an error see :meth:`settle`."""
        request, offset, nbytes, _ = part
        key = (request.path, request.expect)
        if key not in self._files:
            self._files[key] = self._open(key)
        fd, file = self._files[key]
        if key in self._cold:
            # The kernel begins with the part as a whole; see posix.py. Here and not in another thread: one that comes
            # later than KvikIO's reads disturbs them (3.3 GB/s from a disk of 3.4; 2.3 that way; 2.7 without a hint).
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)
        return file.pread(slot.array[:nbytes], nbytes, offset, TASK_BYTES)

    def _open(self, key: _FileKey) -> tuple[int, Any]:
        """Opens a file and has the kernel look at what will be read of it.

        Once for all parts: at every system call this thread lets go of the interpreter's lock, and may wait for it.
        """
        path, expect = key
        fd = open_file(path, expect)
        try:
            size = os.fstat(fd).st_size
            for request in self._requests[key]:
                end = request.offset + request.dest.numel()
                if end > size:
                    raise StorageError(errno.EIO, f"file ends at byte {size}, before byte {end}", path)
                if is_cold(fd, request.offset):
                    self._cold.add(key)
            # By way of the descriptor, since the path may name another file by now.
            return fd, self._storage.open_file(f"/proc/self/fd/{fd}", "r")
        except BaseException:
            os.close(fd)
            raise

    def settle(self, request: Read) -> None:
        """Waits until KvikIO is done with everything handed to it so far.

        It divides a read into tasks (doing that here, with a future each, cost 15% of the speed at batch 1), and gives
        the first error back while the others still read the file and write to the slot. Tasks begin in order: when one
        more is through, all those have begun. Setting the number of threads, to what it is, waits for the running ones.
        """
        import kvikio.defaults

        _, file = self._files[request.path, request.expect]
        with contextlib.suppress(Exception):  # it fails as the others did
            file.pread(np.empty(1, np.uint8), 1).get()
        kvikio.defaults.set("num_threads", kvikio.defaults.get("num_threads"))

    def finished(self, request: Read, error: BaseException | None = None) -> None:
        """A part of the request is through, or failed."""
        self.error = self.error or error
        key = (request.path, request.expect)
        self._parts_of[key] -= 1
        if not self._parts_of[key] and key in self._files:
            fd, file = self._files.pop(key)
            with contextlib.suppress(Exception):  # every byte is read; who waits for the others must not wait for ever
                file.close()
            os.close(fd)
        self.left -= 1
        if not self.left:
            self.done.set()


_pumps: weakref.WeakSet[_Pump] = weakref.WeakSet()


@atexit.register  # the interpreter would end the thread inside of KvikIO, and with it the process, by SIGABRT
def _close_pumps() -> None:
    for pump in list(_pumps):
        pump.close()


class _Pump:
    """One thread that keeps KvikIO's threads busy with slots to fill, and sends those that are full to the device.

    It is one because several would spend their time handing the interpreter's lock around: measured on an H100, batches
    of four 74 MB records came at 20 GB/s with four threads and at 40 with one.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = staging.staging_pool(device)
        self._stream = staging.copy_stream(device)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._backlog: deque[_Job] = deque()
        self._filling: deque[tuple[_Job, _Part, staging.StagingSlot, Any]] = deque()
        self._sent: deque[staging.StagingSlot] = deque()  # their copies to the device are queued
        self._closed = False
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="monai-gds-kvikio", daemon=True)
        self._thread.start()
        _pumps.add(self)

    def submit(self, job: _Job) -> None:
        with self._lock:
            if not self._closed:
                self._jobs.put(job)
                return
        job.error = StorageError(errno.EBADF, "this storage is closed")
        job.done.set()

    def close(self) -> None:
        """Ends the thread when everything submitted so far is through."""
        if self._process != os.getpid():  # the thread is the parent's
            return
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.cuda.stream(self._stream):
            with contextlib.suppress(Exception):
                self._stream.query()  # makes the device's context current in this thread, which StagingSlot.send needs
            self._work()

    def _work(self) -> None:
        open_ = True
        while open_ or self._backlog or self._filling:
            idle = not (self._backlog or self._filling)
            if idle or not self._jobs.empty():
                if idle and self._jobs.empty():
                    self._give_back()
                job = self._jobs.get()
                if job is None:
                    open_ = False
                else:
                    self._backlog.append(job)
                del job  # it holds the destinations, and may be the last for long
            elif self._backlog and len(self._filling) < SLOTS_IN_FLIGHT and self._fill_next():
                continue
            elif self._filling:
                self._send_oldest()
            else:
                with contextlib.suppress(Exception):  # a kernel of somebody's failed: _slot() will say so too
                    self._sent[0].event.synchronize()
        self._give_back()

    def _slot(self) -> staging.StagingSlot | None:
        """A slot to fill; None as long as all that this pump may have are in use.

        Who holds slots does not wait here for another: several pumps that did so could wait for each other for ever.
        """
        if self._sent and self._sent[0].event.query():  # type: ignore[no-untyped-call]
            return self._sent.popleft()
        if not self._filling and not self._sent:
            return self._pool.acquire()
        return self._pool.try_acquire() if len(self._filling) + len(self._sent) < SLOTS else None

    def _give_back(self) -> None:
        while self._sent:
            self._pool.release(self._sent.popleft())

    def _fill_next(self) -> bool:
        """Has KvikIO fill a slot with the next part; False as long as there is no slot for it."""
        job = self._backlog[0]
        slot, error = None, job.error
        if error is None:
            try:
                slot = self._slot()
            except BaseException as e:  # no more memory can be pinned
                error = e
            if slot is None and error is None:
                return False
        part = job.parts.popleft()
        if not job.parts:
            self._backlog.popleft()
        if slot is None:
            job.finished(part.request, error)
            return True
        try:
            future = job.read(part, slot)
        except BaseException as e:
            self._sent.append(slot)
            job.finished(part.request, e)
            return True
        self._filling.append((job, part, slot, future))
        return True

    def _send_oldest(self) -> None:
        job, part, slot, future = self._filling.popleft()
        request = part.request
        error: BaseException | None = None
        try:
            count = future.get()
        except BaseException as e:
            with contextlib.suppress(Exception):
                job.settle(request)
            error = StorageError(errno.EIO, f"KvikIO could not read it: {e}", request.path)
        else:
            try:
                if count != part.nbytes:
                    raise StorageError(errno.EIO, f"read {count} of {part.nbytes} bytes", request.path)
                slot.send(part.address, part.nbytes, self._stream)
                job.arrived = slot.event  # recorded behind this copy; if the slot is used again, behind a later one
            except BaseException as e:
                error = e
        self._sent.append(slot)
        job.finished(request, error)


class _Reads(_Transfers):
    """The large reads of one submission, and the files they come from."""

    def __init__(self, storage: KvikioStorage, requests: Sequence[Read]) -> None:
        super().__init__()
        self._files: dict[tuple[str, FileId | None], Any] = {}
        self._storage = storage
        try:
            for request in requests:
                self.start(self._open(request).pread, request.path, request.dest, request.offset)
        except BaseException:
            self.settle()  # it closes the files too
            raise

    def _open(self, request: Read) -> Any:
        key = (request.path, request.expect)
        if key not in self._files:
            if len(self._files) == OPEN_FILES:
                self.settle()
            self._files[key] = file = self._storage.open_file(request.path, "r")
            if request.expect is not None:
                request.expect.check(FileId.of(file.fileno()), request.path)
        return self._files[key]

    def settle(self) -> None:
        super().settle()
        while self._files:
            self._files.popitem()[1].close()
