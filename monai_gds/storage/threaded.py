"""Base of every backend whose primitive is one blocking read: posix, kvikio, deepnvme's aio, xnvme's file API.

A backend gives :meth:`ThreadedStorage._open`, :meth:`ThreadedStorage._close` and :meth:`ThreadedStorage._read_into`;
this file cuts requests into pieces, spreads them over threads, and, where ``_read_into`` only reaches host memory,
takes them to the GPU through pinned staging.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch

from monai_gds import huge_pages
from monai_gds.storage import staging
from monai_gds.storage.base import ALIGNMENT, Buffer, FileId, Pending, Read, Storage, completed, naming

__all__ = [
    "ThreadedStorage", "Work", "aligned_empty", "as_bytes_view", "create_file", "raise_first", "total_bytes",
    "write_all", "write_buffers", "write_file",
]  # fmt: skip

T = TypeVar("T")

#: Requests of together no more than this many bytes on a CPU target are read by the caller's own thread: handing them
#: to another thread costs more than reading them.
INLINE_BYTES = 512 << 10

#: Pieces are not made smaller than this to occupy more threads.
MIN_PIECE_BYTES = 1 << 20

#: Pieces below MIN_PIECE_BYTES are read in groups of about this many bytes: a thread takes one group at a time, and a
#: group goes to the device through one staging slot. Handing over every small file by itself cost more than reading it.
GROUP_BYTES = 2 << 20


def aligned_empty(nbytes: int) -> torch.Tensor:
    """A 1-D uint8 CPU tensor whose first byte lies at a multiple of ALIGNMENT, if it is large on huge pages.

    For backends that read with O_DIRECT. The storage is a page larger than the tensor.
    """
    raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    if nbytes >= 2 * huge_pages.HUGE:
        huge_pages.prefer(raw)
    return raw[start : start + nbytes]


def as_bytes_view(buffer: Buffer) -> memoryview:
    """The bytes of a buffer as a memoryview, fetched to the host first when it lies on a device."""
    view = buffer.detach().cpu().numpy().data if isinstance(buffer, torch.Tensor) else memoryview(buffer)
    return view.cast("B")


def create_file(path: str, nbytes: int) -> int:
    """Creates ``path`` with room for ``nbytes``, and returns a descriptor to write to.

    Raises:
        FileExistsError: ``path`` exists.
        OSError: disk full, no permission.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if nbytes:
            with naming(path):
                os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_file(path: str, buffers: Sequence[Buffer], *, durable: bool) -> None:
    """Writes the buffers back to back into the new file ``path`` through the page cache.

    Space is reserved before the first byte, so that a full disk is found out before anything is written.

    Raises:
        ValueError: a tensor is not as :data:`Buffer` says.
        FileExistsError: ``path`` exists.
        OSError: disk full, no permission, input/output error.
    """
    fd = create_file(path, total_bytes(buffers))
    try:
        with naming(path):
            write_buffers(fd, buffers)
            if durable:
                os.fsync(fd)
    finally:
        os.close(fd)


def total_bytes(buffers: Sequence[Buffer]) -> int:
    """How many bytes the buffers have together.

    Raises:
        ValueError: a tensor is not 1-D, contiguous and of uint8. What is written is counted in its elements.
    """
    for b in buffers:
        if isinstance(b, torch.Tensor) and (b.dtype != torch.uint8 or b.dim() != 1 or not b.is_contiguous()):
            raise ValueError(
                f"only 1-D contiguous uint8 tensors are written, not {tuple(b.shape)} {b.dtype} with strides "
                f"{b.stride()}: tensor.contiguous().view(-1).view(torch.uint8) has the bytes of any other"
            )
    return sum(b.nbytes if isinstance(b, torch.Tensor) else memoryview(b).nbytes for b in buffers)


def write_buffers(fd: int, buffers: Sequence[Buffer]) -> None:
    """Writes buffers back to back at the descriptor's position, large ones on a device through pinned memory.

    Fetched at once, 1 GiB took most of the time: fresh pages, and a copy to memory that is not pinned.
    """
    waiting: list[memoryview] = []
    for buffer in buffers:
        if not isinstance(buffer, torch.Tensor) or not buffer.is_cuda or buffer.nbytes < MIN_PIECE_BYTES:
            waiting.append(as_bytes_view(buffer))
            continue
        write_all(fd, waiting)
        waiting = []
        for piece in staging.on_host(buffer.detach()):
            write_all(fd, [piece])
    write_all(fd, waiting)


def write_all(fd: int, views: list[memoryview]) -> None:
    """Writes byte views back to back at the descriptor's position, whatever the sizes that single calls take."""
    views = [view for view in views if view.nbytes]
    limit = os.sysconf("SC_IOV_MAX")
    while views:
        written = os.writev(fd, views[:limit])
        while views and written >= views[0].nbytes:
            written -= views.pop(0).nbytes
        if written:
            views[0] = views[0][written:]


class _File:
    """A file of one submission, open from its first piece to its last."""

    def __init__(self, storage: ThreadedStorage, path: str, expect: FileId | None) -> None:
        self.left = 0  # pieces that are not done yet
        self._storage = storage
        self._path = path
        self._expect = expect
        self._lock = threading.Lock()
        self._handle: Any = None
        self._open = False

    def handle(self) -> Any:
        """The backend's handle of the file, which the first caller opens."""
        with self._lock:
            if not self._open:
                self._handle = self._storage._open(self._path, self._expect)
                self._open = True
            return self._handle

    def done(self) -> None:
        """One piece is done with, read or not."""
        with self._lock:
            self.left -= 1
            close, self._open = self._open and not self.left, self._open and self.left > 0
        if close:
            self._storage._close(self._handle)


#: A part of a request that is read in one go: file, offset within it, destination.
_Piece: TypeAlias = "tuple[_File, int, torch.Tensor]"


class Work(ABC, Generic[T]):
    """Groups of reads, or of writes. Any number of threads :meth:`run` it, each taking one group after another."""

    def __init__(self) -> None:
        self._groups: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def run(self) -> None:
        """Does one group after another until none is left. After an error the rest is dropped.

        Raises:
            OSError: a file could not be opened, read or written.
        """
        try:
            self._begin()
            while (group := self._next()) is not None:
                self._do(group)
        except BaseException:
            while (group := self._next()) is not None:
                self._drop(group)
            raise

    def _next(self) -> T | None:
        try:
            return self._groups.popleft()
        except IndexError:
            return None

    def _begin(self) -> None:
        """Waits for what must have happened before the first byte is written."""

    @abstractmethod
    def _do(self, group: T) -> None:
        """Reads or writes a group."""

    def _drop(self, group: T) -> None:
        """Lets go of a group that nobody has begun with."""


class _Submission(Work["list[_Piece]"]):
    """The pieces of one submission.

    Pieces are taken file by file, and no more files are open at a time than threads are at work: a submission may name
    more files than a process may open.

    Args:
        storage: who reads.
        requests: what to read.
        earlier: the event to wait for before the first byte is written, if any.
    """

    def __init__(self, storage: ThreadedStorage, requests: Sequence[Read], earlier: torch.cuda.Event | None) -> None:
        super().__init__()
        self._storage = storage
        self._earlier = earlier
        self._room = 0  # bytes that the last group still takes
        size = storage._piece_size(sum(request.dest.numel() for request in requests))
        by_file: dict[tuple[str, FileId | None], list[Read]] = {}
        for request in requests:
            by_file.setdefault((request.path, request.expect), []).append(request)
        for key, its_requests in by_file.items():
            file = _File(storage, *key)
            for request in its_requests:
                for offset, dest in _cut(request, size):
                    self._add((file, offset, dest))
                    file.left += 1

    def _add(self, piece: _Piece) -> None:
        nbytes = staging.footprint(piece[2])
        if not self._groups or nbytes > self._room or nbytes >= MIN_PIECE_BYTES:
            self._groups.append([])
            self._room = GROUP_BYTES
        self._groups[-1].append(piece)
        self._room -= nbytes

    def _begin(self) -> None:
        if self._earlier is not None:
            self._earlier.synchronize()

    def _do(self, group: list[_Piece]) -> None:
        self._storage._read_group(group)

    def _drop(self, group: list[_Piece]) -> None:
        for file, _, _ in group:
            file.done()


def _cut(request: Read, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Cuts a request at multiples of ``size`` of the destination: (file offset, part of the destination).

    A request of no bytes gives one piece of none, so that its file is opened, and missed if it is missing.
    """
    total = request.dest.numel()
    if total <= size:
        yield request.offset, request.dest
        return
    for start in range(0, total, size):
        yield request.offset + start, request.dest[start : min(start + size, total)]


class ThreadedStorage(Storage):
    """See the module's docstring.

    Args:
        device: where destinations live.
        threads: reads in flight at once; default: one a core, 4 at least and 8 at most.

    Raises:
        ValueError: ``threads`` is not positive.
    """

    #: Whether ``_read_into`` fills CUDA tensors; if not, they are filled through pinned staging.
    reaches_gpu: ClassVar[bool] = False

    #: One thread reads at most this many bytes at a time. Large pieces are the fastest: after each, a thread has to get
    #: the interpreter's lock, which was seen to cost 0.1 ms when 8 threads want it. No larger than a staging slot.
    piece_bytes: ClassVar[int] = staging.SLOT_BYTES

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        super().__init__(device)
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads}: at least one is needed")
        self.threads = threads or max(4, min(8, os.cpu_count() or 4))
        self._executors: dict[int, ThreadPoolExecutor] = {}

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
        dests = [r.dest for r in requests]
        self._check_devices(dests)
        on_device = [d for d in dests if d.is_cuda]
        if on_device and not fresh:
            staging.adopt(on_device, self.device)
        # A backend that writes to the device by itself does not go through the copy stream: it waits on the host for
        # the work that is queued there by now, which is also what adopt() made that stream wait for.
        waits = on_device and self.reaches_gpu
        work = _Submission(self, requests, staging.copy_stream(self.device).record_event() if waits else None)
        if self.device.type == "cpu" and sum(d.numel() for d in dests) <= INLINE_BYTES:
            work.run()
            return completed(dests)
        return self._run(work, dests, on_device)

    def _run(self, work: Work[Any], result: list[torch.Tensor], on_device: Sequence[torch.Tensor]) -> Pending:
        """Has the threads do some work.

        Args:
            work: what.
            result: what the Pending gives.
            on_device: the CUDA tensors that are filled.
        """
        futures = self._start(work)

        def finish() -> list[torch.Tensor]:
            try:
                raise_first(futures)
            finally:
                if on_device:  # after an error too: the copies of other pieces may be under way
                    staging.hand_off(on_device, self.device, arrived=self.reaches_gpu)
            return result

        return Pending(finish)

    def _check_devices(self, dests: Sequence[torch.Tensor]) -> None:
        for dest in dests:
            if dest.is_cuda and dest.device != self.device:
                raise ValueError(f"a destination lies on {dest.device}, this storage serves {self.device}")

    def _start(self, work: Work[Any]) -> list[Future[None]]:
        executor = self._threads()
        futures: list[Future[None]] = []
        turn: list[Any] = []
        try:
            for _ in range(min(self.threads, len(work))):
                turn = [work]
                futures.append(executor.submit(_take_turn, turn))
        except RuntimeError:  # the process may start no more threads, is ending, or another thread closed this storage
            try:
                turn.pop()  # an executor keeps a task for which it could start no thread
            except IndexError:  # and one that came free has begun with it
                futures.append(_end_of(turn))
            if not futures:
                work.run()
        return futures

    def _piece_size(self, total: int) -> int:
        """Bytes a piece: an even share for every thread, in whole blocks, but neither tiny nor above the most."""
        share = -(-total // self.threads)
        return min(self.piece_bytes, max(MIN_PIECE_BYTES, share + -share % ALIGNMENT))

    def _read_group(self, group: list[_Piece]) -> None:
        dests = [dest for _, _, dest in group]
        if self.reaches_gpu or not any(dest.is_cuda for dest in dests):
            self._read_pieces(group, dests)
            return
        with staging.staging_pool(self.device).lend(dests) as hosts:
            self._read_pieces(group, hosts)

    def _read_pieces(self, group: list[_Piece], dests: Sequence[torch.Tensor]) -> None:
        """Reads a group's pieces into ``dests``, which stand in for their own."""
        left = len(group)
        try:
            for (file, offset, _), dest in zip(group, dests, strict=True):
                handle = file.handle()
                if dest.numel():
                    self._read_into(handle, offset, dest)
                left -= 1
                file.done()
        finally:
            for file, _, _ in group[len(group) - left :]:
                file.done()

    def _threads(self) -> ThreadPoolExecutor:
        # One a process: threads do not survive a fork, and neither does a lock that another thread held then.
        process = os.getpid()
        if process not in self._executors:
            made = ThreadPoolExecutor(self.threads, thread_name_prefix=f"monai-gds-{self.name}")
            return self._executors.setdefault(process, made)
        return self._executors[process]

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self.device.type == "cuda":
            return staging.allocate_on_copy_stream(nbytes, self.device)
        return aligned_empty(nbytes)

    def allocate_all(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        if self.device.type != "cuda" or type(self).allocate is not ThreadedStorage.allocate:
            return super().allocate_all(sizes)
        return self._allocate_on_copy_stream(sizes)

    def _allocate_on_copy_stream(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        with torch.cuda.stream(staging.copy_stream(self.device)):  # making it current costs as much as allocating
            return [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for nbytes in sizes]

    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool = False) -> None:
        write_file(path, buffers, durable=durable)

    def close(self) -> None:
        executor = self._executors.pop(os.getpid(), None)
        if executor is not None:
            executor.shutdown(wait=True)

    def describe(self) -> dict[str, Any]:
        staged = {"pinned_bytes": staging.pinned_bytes(self.device)} if self.device.type == "cuda" else {}
        return {**super().describe(), "threads": self.threads, "piece_bytes": self.piece_bytes, **staged}


def _take_turn(turn: list[Any]) -> None:
    """What a thread runs: the work that is in ``turn``, unless it was taken back. Leaves there what it raised."""
    try:
        work = turn.pop()
    except IndexError:
        return
    error: BaseException | None = None
    try:
        work.run()
    except BaseException as e:
        error = e
        raise
    finally:
        turn.append(error)
        del turn, work, error  # the error's traceback holds this frame


def _end_of(turn: list[Any]) -> Future[None]:
    """Waits for a turn that a thread has begun with, and of which the executor gave no future."""
    while not turn:
        time.sleep(0.001)
    end: Future[None] = Future()
    end.set_exception(turn.pop())  # None if there was no error
    return end


def raise_first(futures: list[Future[None]]) -> None:
    """Waits for all, so that no destination is still being written, then raises the first error there was."""
    errors = [e for e in (f.exception() for f in futures) if e is not None]
    futures.clear()
    try:
        if errors:
            raise errors[0]
    finally:
        del errors  # an error that is in its own traceback keeps the destinations alive until the collector comes by
