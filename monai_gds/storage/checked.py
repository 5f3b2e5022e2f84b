"""Base of the backends whose engine reports success whatever happened: DeepSpeed's ``aio_handle`` and ``gds_handle``.

Both drop the result of every single transfer. This file asks them only for what they can do, finds out whether they
did it, and does the rest with pread and pwrite. A backend gives a :class:`Lane`: one engine and one buffer, used by one
thread at a time.

**What is asked.** Whole pages that lie inside the size that ``fstat`` reports at that moment, in multiples of what the
engine can divide. The descriptor stays open and the engine gets its ``/proc/self/fd`` path, so it reaches the very
file that was checked, also when the path has another file by now. Heads are read as part of their page; the file's
last, partial page and ranges below :data:`SMALL_BYTES` go through pread.

**How a read is verified.** The lane raises for what its engine lets it see: for ``aio_handle`` what the kernel
answered to each transfer (``deepnvme_results.h``), for ``gds_handle`` the end of the process that it runs in. That
covers every transfer that was made; for those that were not, every sector of the buffer (512 bytes, the smallest unit
that a drive transfers) gets eight bytes before the read, drawn at random for this one. A sector that nothing was
transferred to still has them, so it is always found; one that was filled has them by chance once in 2**64. Afterwards
``fstat`` must still report the range as part of the file.

Looking at the bytes alone would not do: a loop device whose image is gone fills the buffer with zeros and then fails
(seen), and a drive may stop in the middle of a transfer that it reports as failed.

**How a write is verified.** Space is reserved first, so a full disk is found before a byte is written. The lane raises
as for a read. Then each transfer's last page is read back from the drive and compared: a transfer that failed or
stopped short has not written it. At the end the file must have its size and no hole (``SEEK_HOLE``): reserved space
becomes data only once a write to it has succeeded.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import mmap
import os
import secrets
import stat
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch

from monai_gds.errors import StorageError
from monai_gds.storage import staging
from monai_gds.storage.base import ALIGNMENT, Buffer, FileId, naming
from monai_gds.storage.posix import pread_into
from monai_gds.storage.threaded import (
    ThreadedStorage,
    Work,
    as_bytes_view,
    create_file,
    raise_first,
    total_bytes,
    write_file,
)

__all__ = ["CheckedStorage", "Lane", "LanePool", "OpenFile", "find_unread", "mark_unread"]

#: Ranges and files below this many bytes go through pread and pwrite: setting up a transfer costs more than it saves.
SMALL_BYTES = 64 << 10

SECTOR = 512

#: A part of what is written: host bytes, or a tensor on either side.
_Source: TypeAlias = "memoryview | torch.Tensor"


class OpenFile(NamedTuple):
    """A file being read or written: its descriptor, and the path to name in errors."""

    fd: int
    path: str

    @property
    def by_descriptor(self) -> str:
        """A path by which this process opens this very file, whatever its real path holds by now."""
        return f"/proc/self/fd/{self.fd}"


class Lane(ABC):
    """One engine and one page-aligned buffer, used by one thread at a time."""

    #: Bytes: the engine takes only multiples of this, itself a multiple of ALIGNMENT.
    unit: int = ALIGNMENT

    @property
    def dead(self) -> bool:
        """Whether the engine has ended, so that the lane is to be closed and not used again."""
        return False

    @property
    @abstractmethod
    def buffer(self) -> torch.Tensor:
        """1-D uint8 memory that the engine reaches, two pages larger than the storage's piece; made on first use."""

    def reaches(self, dest: torch.Tensor) -> bool:
        """Whether the engine can fill ``dest`` itself, without going through ``buffer``."""
        return False

    @abstractmethod
    def read(self, file: OpenFile, offset: int, dest: torch.Tensor) -> None:
        """Fills ``dest`` (a part of ``buffer``, or a tensor that the engine ``reaches``), as far as anybody can tell.

        Raises:
            StorageError: the engine is known to have failed.
        """

    @abstractmethod
    def write(self, file: OpenFile, offset: int, source: torch.Tensor) -> None:
        """Writes ``source``, a part of ``buffer``, as far as anybody can tell.

        Raises:
            StorageError: the engine is known to have failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees engine and buffer."""


class LanePool:
    """Lanes, made as they are needed; with all of them in use, ``acquire`` waits.

    A forked child starts with none. The parent's are dropped without freeing them: their engines' threads do not exist
    there, and freeing an engine waits for its threads.

    Args:
        make: makes a lane.
        limit: how many there may be.
    """

    def __init__(self, make: Callable[[], Lane], limit: int) -> None:
        self._make = make
        self._limit = limit
        self._changed = threading.Condition()
        self._all: list[Lane] = []
        self._free: list[Lane] = []
        _pools.add(self)

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane for this thread alone."""
        changed = self._changed
        with changed:
            changed.wait_for(lambda: self._free or len(self._all) < self._limit)
            lane = self._take_free() or self._add()
        try:
            yield lane
        finally:
            with changed:
                if lane in self._all and not lane.dead:
                    self._free.append(lane)
                else:  # the pool was emptied meanwhile, or the engine has ended
                    self._drop(lane)
                changed.notify()

    def _take_free(self) -> Lane | None:
        while self._free:
            lane = self._free.pop()
            if not lane.dead:
                return lane
            self._drop(lane)
        return None

    def _add(self) -> Lane:
        lane = self._make()
        self._all.append(lane)
        return lane

    def _drop(self, lane: Lane) -> None:
        self._all = [other for other in self._all if other is not lane]
        lane.close()

    def empty(self) -> None:
        """Frees the lanes: now those that nobody uses, the others when they come back."""
        with self._changed:
            free, self._free, self._all = self._free, [], []
            self._changed.notify_all()
        for lane in free:
            lane.close()

    def forget(self) -> None:
        """Drops every lane unfreed, in a forked child."""
        for lane in self._all:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(lane))
        self._changed = threading.Condition()
        self._all, self._free = [], []


_pools: weakref.WeakSet[LanePool] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for pool in list(_pools):
        pool.forget()


os.register_at_fork(after_in_child=_forget_after_fork)


@atexit.register
def _free_lanes() -> None:
    """Of storages that nobody closed: one that an ending interpreter frees was seen to abort the process."""
    for pool in list(_pools):
        pool.empty()


def _first_words(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.int64).view(-1, SECTOR // 8)[:, 0]


def mark_unread(buffer: torch.Tensor) -> int:
    """Marks each sector of a buffer as not read yet.

    Args:
        buffer: 1-D uint8, CPU or CUDA, a multiple of 512 bytes long and 8-byte aligned.

    Returns:
        The mark, for :func:`find_unread`.
    """
    mark = int.from_bytes(secrets.token_bytes(8), "little", signed=True)
    _first_words(buffer).fill_(mark)
    return mark


def find_unread(buffer: torch.Tensor, mark: int) -> int | None:
    """The first byte of the first sector that still has its mark; None when all have been read."""
    unread = _first_words(buffer) == mark
    if not bool(unread.any()):
        return None
    return int(unread.int().argmax()) * SECTOR


def _check_size(file: OpenFile, end: int, when: str) -> int:
    size = os.fstat(file.fd).st_size
    if end > size:
        raise StorageError(errno.EIO, f"file ends at byte {size}, before byte {end}{when}", file.path)
    return size


class CheckedStorage(ThreadedStorage):
    """See the module's docstring.

    Args:
        device: where destinations live.
        threads: lanes in use at once, each with its engine and buffer.
    """

    #: Bytes of one transfer of the engine; a transfer succeeds as a whole, stops short, or fails.
    transfer_bytes: int = 1 << 20

    #: Into how many equal parts the engine divides what it is asked for, before it cuts transfers.
    shares: int = 1

    #: Room that a lane's buffer needs: a piece, and the rest of the pages that it begins and ends in.
    lane_bytes: ClassVar[int] = ThreadedStorage.piece_bytes + 2 * ALIGNMENT

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        super().__init__(device, threads)
        self._lanes = LanePool(self._new_lane, self.threads)

    @abstractmethod
    def _new_lane(self) -> Lane:
        """Makes a lane. Raises StorageError when the machine refuses what it needs."""

    # Reading.

    def _open(self, path: str, expect: FileId | None) -> OpenFile:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO must not wait
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise StorageError(errno.EINVAL, "not a regular file", path)
            if expect is not None:
                expect.check(FileId.from_stat(found), path)
            _try_direct(fd, path)
        except BaseException:
            os.close(fd)
            raise
        return OpenFile(fd, path)

    def _close(self, handle: Any) -> None:
        os.close(handle.fd)

    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> None:
        file: OpenFile = handle
        end = offset + dest.numel()
        size = _check_size(file, end, "")
        done = offset  # what the engine brings: up to here
        if dest.numel() >= SMALL_BYTES:
            with self._lanes.lane() as lane, self._stream():
                done = self._read_pages(lane, file, offset, dest, size)
        if done < end:
            self._read_rest(file, done, dest[done - offset :])

    def _read_pages(self, lane: Lane, file: OpenFile, offset: int, dest: torch.Tensor, size: int) -> int:
        """Reads the whole pages of a file of ``size`` bytes that ``dest`` lies in; returns up to where it is filled."""
        end = offset + dest.numel()
        start = offset - offset % ALIGNMENT
        direct = start == offset and lane.reaches(dest)
        stop = min(end if direct else end + -end % ALIGNMENT, size)
        stop -= (stop - start) % lane.unit
        if stop <= offset:
            return offset
        into = (dest if direct else lane.buffer)[: stop - start]
        mark = mark_unread(into)
        try:
            lane.read(file, start, into)
        finally:  # the reason that a user can do something about comes first
            _check_size(file, stop, " (it became shorter while it was being read)")
        unread = find_unread(into, mark)
        if unread is not None:
            raise StorageError(
                errno.EIO, f"the bytes at {start + unread} did not arrive: DeepNVMe does not say why", file.path
            )
        if not direct:
            wanted = min(stop - offset, dest.numel())
            found = into[offset - start : offset - start + wanted]
            if into.is_cuda:
                dest[:wanted].copy_(found)
                torch.cuda.current_stream(into.device).synchronize()  # the lane's next reader may come at once
            else:
                _copy_on_host(dest[:wanted], found.numpy())
        return min(stop, end)

    def _stream(self) -> AbstractContextManager[Any]:
        """Work on the device goes to the copy stream, not to the default one, where the user's may be queued."""
        if self.device.type == "cuda" and self.reaches_gpu:
            return torch.cuda.stream(staging.copy_stream(self.device))
        return nullcontext()

    def _read_rest(self, file: OpenFile, offset: int, dest: torch.Tensor) -> None:
        """Reads without the engine."""
        pread_into(file.fd, offset, dest.numpy().data, file.path)

    # Writing.

    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool = False) -> None:
        total = total_bytes(buffers)
        sources = [b.detach() if isinstance(b, torch.Tensor) else as_bytes_view(b) for b in buffers]
        if total < SMALL_BYTES:
            write_file(path, buffers, durable=durable)
            return
        if any(isinstance(source, torch.Tensor) and source.is_cuda for source in sources):
            torch.cuda.current_stream(self.device).synchronize()  # whoever fills them has finished
        file = OpenFile(create_file(path, total), path)
        try:
            with naming(path):
                with _reopened(file, os.O_RDONLY | os.O_DIRECT) as back:
                    self._write_all(file, back, sources, total)
                self._check_written(file, total)
                if durable:
                    os.fsync(file.fd)
        finally:
            os.close(file.fd)

    def _write_all(self, file: OpenFile, back: int, sources: Sequence[_Source], total: int) -> None:
        writing = _Writing(self, file, back, sources, total)
        try:
            raise_first(self._start(writing))
        finally:  # interrupted: whoever wrote on would write to whatever file gets the descriptor's number next
            writing.settle()

    def _write_piece(self, file: OpenFile, back: int, sources: Sequence[_Source], offset: int, count: int) -> None:
        with self._lanes.lane() as lane:
            piece = lane.buffer[:count]
            _gather(sources, offset, piece)
            pages = count - count % lane.unit
            if pages:
                lane.write(file, offset, piece[:pages])
                self._check_pages(file, back, offset, piece[:pages])
            rest = piece[pages:].cpu().numpy().data
            if rest.nbytes and os.pwrite(file.fd, rest, offset + pages) != rest.nbytes:
                raise StorageError(errno.EIO, f"wrote less than {rest.nbytes} bytes at {offset + pages}", file.path)

    def _check_pages(self, file: OpenFile, back: int, offset: int, pages: torch.Tensor) -> None:
        """Reads the last page of each transfer back from the drive."""
        count = pages.numel()
        found = mmap.mmap(-1, ALIGNMENT)
        for end in _transfer_ends(count, self.shares, self.transfer_bytes):
            at = end - ALIGNMENT
            if os.preadv(back, [found], offset + at) != ALIGNMENT or not _same(found, pages[at:end]):
                raise StorageError(
                    errno.EIO, f"the page at {offset + at} is not on the drive: DeepNVMe did not write it", file.path
                )

    def _check_written(self, file: OpenFile, total: int) -> None:
        size = os.fstat(file.fd).st_size
        if size != total:
            raise StorageError(errno.EIO, f"the file has {size} bytes after {total} were written", file.path)
        hole = os.lseek(file.fd, 0, os.SEEK_HOLE)
        if hole < total:
            raise StorageError(errno.EIO, f"the bytes at {hole} were not written: DeepNVMe does not say why", file.path)

    def close(self) -> None:
        super().close()
        self._lanes.empty()


class _Writing(Work[int]):
    """The pieces of a file to be written, by their offsets."""

    def __init__(
        self, storage: CheckedStorage, file: OpenFile, back: int, sources: Sequence[_Source], total: int
    ) -> None:
        super().__init__()
        self._write_piece = partial(storage._write_piece, file, back, sources)
        self._total, self._size = total, storage.piece_bytes
        self._groups.extend(range(0, total, self._size))
        self._changed = threading.Condition()
        self._busy = 0  # pieces that were taken and are not done

    def _next(self) -> int | None:
        with self._changed:
            offset = super()._next()
            self._busy += offset is not None
            return offset

    def _do(self, group: int) -> None:
        try:
            self._write_piece(group, min(self._size, self._total - group))
        finally:
            self._drop(group)

    def _drop(self, group: int) -> None:
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def settle(self) -> None:
        """Begins with no further piece, and waits for those under way, whatever the user presses meanwhile."""
        while True:
            try:
                with self._changed:
                    self._groups.clear()
                    self._changed.wait_for(lambda: not self._busy)
                return
            except (KeyboardInterrupt, SystemExit):  # the first one is raised behind this
                continue


def _transfer_ends(count: int, shares: int, size: int) -> Iterator[int]:
    """Where the engine's transfers end, when it divides ``count`` bytes into equal shares and cuts each by ``size``."""
    share = count // shares
    for start in range(0, count, share):
        yield from range(start + size, start + share, size)
        yield start + share


def _same(found: mmap.mmap, page: torch.Tensor) -> bool:
    return bytes(found) == page.cpu().numpy().tobytes()


@contextmanager
def _reopened(file: OpenFile, flags: int) -> Iterator[int]:
    fd = os.open(file.by_descriptor, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _try_direct(fd: int, path: str) -> None:
    """Finds out now, with a clear error, whether the file system takes O_DIRECT."""
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        raise StorageError(
            errno.EINVAL, 'the file system refuses O_DIRECT, which DeepNVMe needs; use backend="posix"', path
        ) from None


def _gather(sources: Sequence[_Source], offset: int, piece: torch.Tensor) -> None:
    """Fills ``piece`` with the bytes from ``offset`` on of the sources laid end to end."""
    begin = 0
    for source in sources:
        first, last = max(begin, offset), min(begin + source.nbytes, offset + piece.numel())
        if first < last:
            _copy_part(piece[first - offset : last - offset], source[first - begin : last - begin])
        begin += source.nbytes


def _copy_part(dest: torch.Tensor, source: _Source) -> None:
    if isinstance(source, memoryview):
        if not dest.is_cuda:
            _copy_on_host(dest, np.frombuffer(source, dtype=np.uint8))
            return
        source = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    on_device = next((t.device for t in (dest, source) if t.is_cuda), None)
    if on_device is None:
        _copy_on_host(dest, source.numpy())
        return
    stream = staging.copy_stream(on_device)  # not the default stream, where the user's work may be queued
    with torch.cuda.stream(stream):
        dest.copy_(source, non_blocking=True)
    stream.synchronize()


def _copy_on_host(dest: torch.Tensor, source: np.ndarray) -> None:
    """torch's own copy ran at half the speed of NumPy's here: it divides every piece among threads of its own, though
    several pieces are being copied at once (2 cores, 16 MiB: 5.4 to 7.4 GB/s, NumPy 8 to 13).
    """
    np.copyto(dest.numpy(), source)
