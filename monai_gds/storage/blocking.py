"""Base of backends whose primitive is one blocking read of a part of a file.

A backend implements :meth:`BlockingBackend._read_into`, and overrides :meth:`~BlockingBackend._open` and
:meth:`~BlockingBackend._close` unless it reads from a plain descriptor. This file cuts reads into pieces, spreads them
over threads, copies them to the GPU through pinned staging, and names the file in every error::

    reads ──plan──▶ groups ──threads──▶ _read_into ──▶ destination on the host
                                             └───────▶ staging slot ──copy stream──▶ destination on the GPU
"""

from __future__ import annotations

import errno
import threading
import time
import traceback
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch

from monai_gds import limits
from monai_gds.base import cores
from monai_gds.errors import StorageError
from monai_gds.storage import files, plan, staging
from monai_gds.storage.backend import Backend, check_threads
from monai_gds.storage.files import Expected
from monai_gds.storage.latency import Latency
from monai_gds.storage.pending import Pending
from monai_gds.storage.reads import Reads

T = TypeVar("T")


def naming_file(error: Exception, path: str) -> Exception:
    """The error, as an OSError that names the file.

    It comes without its traceback, whose frames would keep the destinations alive until the garbage collector runs.
    """
    if isinstance(error, OSError):
        if error.errno is not None and not isinstance(error.filename, str):  # a call got a descriptor, or no name
            error.filename = path
        if error.filename == path or (error.errno is None and path in str(error)):
            return error.with_traceback(None)
    named = StorageError(getattr(error, "errno", None) or errno.EIO, f"{type(error).__name__}: {error}", path)
    named.add_note("".join(traceback.format_exception(error)))
    return named


def naming_group(error: Exception, path: str) -> Exception:
    """As :func:`naming_file`, for an error of a whole group. One of CUDA, or of memory, is not about a file: it stays
    as it is, so that the file is not taken for damaged.
    """
    return naming_file(error, path) if isinstance(error, OSError) else error.with_traceback(None)


def _ended(by: BaseException, path: str) -> StorageError:
    return StorageError(errno.EINTR, f"reading was ended by {by!r}", path)


class Work(Generic[T]):
    """A queue of groups of reads or writes, which any number of threads work on.

    Args:
        groups: what is to be processed, group by group.
        do: processes one group, and handles its errors. An exception that it raises ends the work.
        on_done: called once, by the last thread, when every group has been processed or dropped.
    """

    def __init__(self, groups: Iterable[T], do: Callable[[T], None], on_done: Callable[[], None]) -> None:
        self._groups = deque(groups)
        self._do, self._on_done = do, on_done
        self._lock = threading.Lock()
        self.unfinished = len(self._groups)  # neither processed nor dropped yet

    def run(self) -> None:
        """Processes one group after another until none is left."""
        while True:
            try:
                group = self._groups.popleft()
            except IndexError:
                return
            try:
                self._do(group)
            except BaseException:
                self.stop()
                raise
            finally:
                del group
                self._finish(1)

    def stop(self) -> None:
        """Drops the groups that no thread has started."""
        dropped = 0
        with suppress(IndexError):
            while True:
                self._groups.popleft()
                dropped += 1
        if dropped:
            self._finish(dropped)

    def _finish(self, groups: int) -> None:
        with self._lock:
            self.unfinished -= groups
            last = not self.unfinished
        if last:
            on_done = self._on_done
            del self._do, self._on_done  # an executor may keep this object: it must not keep destinations
            on_done()


class OpenFiles:
    """The files of one submission, each open from the first of its ``pieces`` to the last."""

    def __init__(
        self, reads: Reads, pieces: list[int], open_: Callable[[str, Expected], Any], close: Callable[[Any], None]
    ) -> None:
        self._reads, self._pieces = reads, pieces
        self._open, self._close = open_, close
        self._handles: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._opening: dict[int, threading.Lock] = {}

    def __contains__(self, file: int) -> bool:
        return file in self._handles

    def handle(self, file: int) -> Any:
        """What ``open_`` returned for a file, or raised. The first caller opens it."""
        with self._opening.setdefault(file, threading.Lock()):
            if file not in self._handles:
                self._handles[file] = self._open(self._reads.paths[file], self._reads.expected[file])
            return self._handles[file]

    def done(self, file: int) -> None:
        """Counts a piece of a file as done, read or not. The last one closes the file."""
        with self._lock:
            self._pieces[file] -= 1
            if self._pieces[file] or file not in self._handles:
                return
            handle = self._handles.pop(file)
        self._close(handle)

    def recount(self, files: Iterable[int], by: int) -> None:
        """Counts pieces of files that were cut into more, or are done without a handle (-1), once for each mention."""
        with self._lock:
            for file in files:
                self._pieces[file] += by

    def close(self, fail: Callable[[int, Exception], None]) -> None:
        """Closes files that are still open: after an interrupt, or because their last piece needed no handle."""
        while self._handles:
            file, handle = self._handles.popitem()
            try:
                self._close(handle)
            except Exception as e:
                fail(file, naming_file(e, self._reads.paths[file]))


class BlockingBackend(Backend):
    """A backend that implements one blocking read; see the module's docstring.

    Args:
        device: where destinations live.
        threads: reads in flight at once; default: one per core, at least 4 and at most 8, but 64 while small reads
            take long.

    Raises:
        ValueError: ``threads`` is not positive.
    """

    #: Most bytes per read, no more than a staging slot has. Large pieces are fastest: after each, a thread has to get
    #: the interpreter's lock, which took 0.1 ms when 8 threads wanted it.
    piece_bytes: ClassVar[int] = limits.SLOT_BYTES

    #: Most bytes and pieces per group of small pieces. One thread reads a group, which goes to the device through one
    #: staging slot. Handing over every small file by itself cost more than reading it.
    group_bytes: ClassVar[int] = 2 << 20
    group_reads: ClassVar[int] = 256

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        super().__init__(device)
        check_threads(threads)
        self.threads = threads or max(4, min(8, cores.usable()))
        self.latency = Latency()
        self._most_threads = threads or max(self.threads, limits.SLOW_READS)
        self._under_way: weakref.WeakSet[Work[Any]] = weakref.WeakSet()
        self._executors: dict[tuple[int, frozenset[int]], ThreadPoolExecutor] = {}  # by their threads and processors
        self._lock = threading.Lock()

    # What a backend implements, besides ``_open`` and ``_close`` unless it reads from a plain descriptor.

    @abstractmethod
    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        """Reads into ``dest`` from ``offset``. Blocking, called by many threads at once.

        Args:
            handle: what ``_open`` returned.
            offset: first byte within the file.
            dest: 1-D uint8, not empty, on the CPU; or on the device if the backend ``reaches_gpu``, and then the bytes
                must have arrived when the call returns.

        Returns:
            Bytes read. After a short read the rest is asked for again. Zero means that the file has ended.
        """

    # Shared by all such backends.

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        self._count_served(reads, into)
        pending = Pending(list(into), self.device, len(reads.paths))
        small = self.device.type == "cpu" and reads.total <= limits.INLINE_BYTES
        work: Work[Any]
        if small and len(reads) == len(reads.paths) == 1 and reads.total <= self.piece_bytes:
            work = Work([reads], partial(self._read_one, into, pending), pending.finish)
        else:
            work = self._work(reads, into, pending)
        if not work.unfinished:
            pending.finish()
        elif small and not self.is_slow:
            work.run()
        else:
            self._run_in_threads(work)
        return pending

    def _read_one(self, into: Sequence[torch.Tensor], pending: Pending, read: Reads) -> None:
        """Reads a small part of one file into host memory. Planning it first would take as long again."""
        path, (offset, nbytes), start = read.paths[0], read.ranges[0], int(read.start[0])
        begin = time.perf_counter()
        try:
            handle = self._open(path, read.expected[0])
            try:
                self._fill(handle, path, offset, into[int(read.dest[0])][start : start + nbytes])
            finally:
                self._close(handle)
            self.latency.note(time.perf_counter() - begin)
        except Exception as e:
            pending.fail(0, naming_file(e, path))
        except BaseException as e:
            pending.fail(0, _ended(e, path))
            raise

    def _work(self, reads: Reads, into: Sequence[torch.Tensor], pending: Pending) -> Work[tuple[Reads, OpenFiles]]:
        reads = plan.coalesce(plan.by_file(reads.with_room(into)), limits.GAP_BYTES)
        size = plan.share(reads.total, self._idle_threads(), limits.MIN_PIECE_BYTES, self._largest_piece(reads))
        pieces = plan.cut(reads, size)
        if self.latency.is_unknown and len(reads.paths) > self.group_reads:
            begin = time.perf_counter()
            with suppress(Exception):  # which come again when the file is read
                self._close(self._open(reads.paths[0], reads.expected[0]))
                self.latency.note(time.perf_counter() - begin)
        # The parts for host and device open their files separately: otherwise all would stay open until the second.
        parts = [
            (part, OpenFiles(part, part.per_file(), self._open, self._close)) for part in plan.by_side(pieces, into)
        ]
        groups = [
            (part[which], opened)
            for part, opened in parts
            for which in plan.group(part, self.group_bytes, self._reads_per_group(part), limits.MIN_PIECE_BYTES)
        ]
        # A backend that writes to the device by itself bypasses the copy stream: it waits, on the host, for the work
        # that is queued there by now.
        direct = self.reaches_gpu and any(tensor.is_cuda for tensor in into)
        earlier = staging.copy_stream(self.device).record_event() if direct else None

        def do(work: tuple[Reads, OpenFiles]) -> None:
            group, opened = work
            try:
                if earlier is not None:
                    earlier.synchronize()
                self._do(group, into, opened, pending)
            except Exception as e:  # of CUDA, or out of memory: errors of files are noted where they happen
                for file in set(group.file.tolist()):
                    pending.fail(file, naming_group(e, reads.paths[file]))
            except BaseException as e:  # ends the work: no file may look as if it had been read
                for file, path in enumerate(reads.paths):
                    pending.fail(file, _ended(e, path))
                raise

        def on_done() -> None:
            for _, opened in parts:
                opened.close(pending.fail)
            pending.finish()

        work = Work(groups, do, on_done)
        with self._lock:
            self._under_way.add(work)
        return work

    @property
    def is_slow(self) -> bool:
        return self.latency.is_long

    def _reads_per_group(self, pieces: Reads) -> int:
        """Most pieces that one thread reads one after another: where each takes long, a share for every thread."""
        return -(-len(pieces) // self._most_threads) if self.is_slow else self.group_reads

    def _idle_threads(self) -> int:
        """How many threads have nothing to do, at least one. Reads are cut for no more than these.

        Files of 32 MiB, eight at a time, cut for all of 8 threads arrived on an H100 at 8 GB/s, and at 14 if only for
        the idle ones; records of 74 MB, four at a time, at 24 and 28.
        """
        with self._lock:
            return max(1, self.threads - sum(work.unfinished for work in self._under_way))

    def _largest_piece(self, reads: Reads) -> int:
        """Most bytes per piece of these reads: no more than a slot has, unless ``_do`` can do without."""
        return self.piece_bytes

    def _do(self, group: Reads, into: Sequence[torch.Tensor], opened: OpenFiles, pending: Pending) -> None:
        if self.reaches_gpu or not into[int(group.dest[0])].is_cuda:
            self._read_group(group, into, opened, pending)
            return
        staged, copies = plan.stage(group)
        pool = staging.staging_pool(self.device)
        slot = pool.acquire()
        try:
            self._read_group(staged, [slot.buffer], opened, pending)
        except BaseException:
            pool.release(slot)
            raise
        pool.upload(slot, [(at, into[dest][start : start + n]) for at, dest, start, n in copies])

    def _read_group(self, group: Reads, into: Sequence[torch.Tensor], opened: OpenFiles, pending: Pending) -> None:
        """Reads a group's pieces one after the other into memory that ``_read_into`` reaches, and calls
        ``opened.done`` once per piece. A backend that reads several at once overrides this.
        """
        pieces = deque(zip(group.file.tolist(), group.offset.tolist(), group.parts(into), strict=True))
        while pieces:
            file, offset, dest = pieces[0]
            try:
                if not pending.failed(file):
                    begin = time.perf_counter()
                    self._fill(opened.handle(file), group.paths[file], offset, dest)
                    if dest.numel() <= limits.INLINE_BYTES:
                        self.latency.note(time.perf_counter() - begin)
            except Exception as e:
                pending.fail(file, naming_file(e, group.paths[file]))
            pieces.popleft()
            opened.done(file)

    def _fill(self, handle: Any, path: str, offset: int, dest: torch.Tensor) -> None:
        done, total = 0, dest.numel()
        while done < total:
            count = self._read_into(handle, offset + done, dest[done:] if done else dest)
            if not count:
                raise files.ends_early(offset + done, total - done, path)
            done += count

    def each(self, do: Callable[[T], None], over: Sequence[T]) -> None:
        if len(over) < 2 or not self.is_slow:
            return super().each(do, over)
        done = Pending([], torch.device("cpu"))
        self._run_in_threads(Work(over, do, done.finish))
        done.wait()

    def _run_in_threads(self, work: Work[Any]) -> None:
        """Processes the work in the pool of threads, or in this thread if no other can be started."""
        threads = self._most_threads if self.is_slow else self.threads
        near = staging.near(self.device, self.threads)
        try:
            with self._lock:
                if (executor := self._executors.get((threads, near))) is None:
                    executor = ThreadPoolExecutor(threads, f"monai-gds-{self.name}", cores.stay_on, (near,))
                    self._executors[threads, near] = executor
            for _ in range(min(threads, work.unfinished)):
                executor.submit(work.run)
        except RuntimeError:  # the process may start no more threads, is ending, or another thread closed this storage
            work.run()

    def close(self) -> None:
        with self._lock:
            executors, self._executors = self._executors, {}
        for executor in executors.values():
            executor.shutdown(wait=True)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "threads": self.threads, "piece_bytes": self.piece_bytes}
