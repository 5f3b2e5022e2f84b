"""The ``posix`` backend: preadv from a pool of threads, and private mappings on a CPU target. Needs nothing but torch.

On a CPU target :meth:`PosixStorage.map` hands out copy-on-write mappings, so that a crop touches only the pages it
needs and an in-place transform never reaches the file. Many small files are read in groups, one io_uring call each
where the kernel gives this process one (:mod:`._uring`).

Reads go through the page cache, cold ones too: with the kernel told of a whole piece at once (:func:`expect_cold`),
buffered reads were as fast as O_DIRECT ones (measured on a virtual disk, 16 threads, 1 MiB pieces: 3.4 GB/s buffered
with the hint, 3.3 without, 3.2 direct), and they leave the bytes where the next epoch finds them. ``direct_io=True`` is
for data that will never fit there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from monai_gds import huge_pages
from monai_gds.errors import StorageError
from monai_gds.storage import staging
from monai_gds.storage._statx import identities
from monai_gds.storage._uring import FILES, Ring
from monai_gds.storage.base import ALIGNMENT, Availability, FileId, Pending, check_ranges, later, naming, places
from monai_gds.storage.threaded import GROUP_BYTES, MIN_PIECE_BYTES, ThreadedStorage, Work

__all__ = ["PosixStorage", "expect_cold", "is_cold", "open_file", "pread_into"]

#: Ranges below this many bytes are read instead of mapped: a mapping costs two system calls and a fault a page.
MAP_BYTES = 64 << 10

#: Mappings of 2 MiB up to this many bytes ask for huge pages. What is not in the page cache is read 2 MiB at a time
#: then: six items of two 52 MB volumes took 0.32 s instead of 0.62, four crops of 96³ from each 0.38 instead of 0.57,
#: and once it is there 0.12 instead of 0.17. Of larger volumes a crop would read much more than it needs: of 512³
#: 100 MB instead of 40, where the kernel reads 128 kB ahead.
HUGE_UP_TO = 64 << 20

#: Small files are read in groups of at most this many bytes, and at most FILES of them, by one thread in one call. Each
#: group takes Python, during which no other thread has its lock. With groups of 2 MiB an image of 108 kB took 12.7 us
#: of user time, with these 8, and eight threads read 30% more images a second (two cores). They fit a staging slot.
CALL_BYTES = 8 << 20

#: Pieces of fewer bytes are left to the kernel's own reading ahead.
EXPECT_BYTES = 512 << 10

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a FIFO must not wait

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """A private mapping that NumPy can wrap. It is unmapped when the last array or tensor over it is gone.

    Python's own ``mmap`` keeps a descriptor open for each mapping, and a process may hold 1,024 of them; this keeps
    none. ``torch.UntypedStorage.from_file`` keeps none either, but takes no offset.
    """

    __slots__ = ("__array_interface__", "_length", "_munmap", "_start")

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        skip = offset % mmap.ALLOCATIONGRANULARITY
        length = nbytes + skip
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        start = _libc.mmap(None, length, protection, mmap.MAP_PRIVATE, fd, offset - skip)
        if start == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        if huge_pages.HUGE <= nbytes <= HUGE_UP_TO:
            huge_pages.prefer_for_mapping(start, length)
        self._start, self._length = start, length
        self._munmap = _libc.munmap  # module globals may be gone when the interpreter exits
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (start + skip, False), "version": 3}

    def __del__(self) -> None:
        if hasattr(self, "_munmap"):
            self._munmap(self._start, self._length)


def pread_into(fd: int, offset: int, view: memoryview, name: str) -> None:
    """Fills ``view``, whatever the sizes that single calls return.

    Raises:
        StorageError: the device failed, or the file called ``name`` ends too early.
    """
    done = 0
    while done < view.nbytes:
        try:
            count = os.preadv(fd, [view[done:] if done else view], offset + done)
        except OSError as e:
            raise StorageError(e.errno, f"reading at byte {offset + done}: {e.strerror}", name) from e
        if count == 0:
            raise StorageError(
                errno.EIO, f"file ends at byte {offset + done}, {view.nbytes - done} bytes were still to come", name
            )
        done += count


def open_file(path: str, expect: FileId | None) -> int:
    """Opens a file for reading; raises FileChanged when it is not the one expected."""
    fd = os.open(path, _FLAGS)
    if expect is not None:
        try:
            expect.check_open(fd, path)
        except BaseException:
            os.close(fd)
            raise
    return fd


def is_cold(fd: int, offset: int) -> bool:
    """Whether a byte would have to be read from the drive. The question costs about 2 µs."""
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:  # a file system that cannot tell
        pass
    return False


def expect_cold(fd: int, offset: int, nbytes: int) -> None:
    """Has the kernel begin with all of a range that is about to be read, if its first byte is not in the page cache.

    The hint itself walks the cache, so it is not given for what is there already. It is for pieces, not for whole
    volumes: a disk that reads many files at once reads all of them more slowly.
    """
    if nbytes >= EXPECT_BYTES and is_cold(fd, offset):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)


_local = threading.local()


def ring_of_this_thread() -> Ring | None:
    """An io_uring that no other thread uses; None where the kernel gives none."""
    process = os.getpid()  # a forked child must not use its parent's
    if getattr(_local, "process", None) != process:
        try:
            _local.ring = Ring()
        except OSError:
            _local.ring = None
        _local.process = process
    ring: Ring | None = _local.ring
    return ring


class _Files(Work[slice]):
    """Small files on their way into one buffer, in groups of neighbours.

    Args:
        paths, sizes, starts, dest, whole: see :meth:`Storage.submit_files`.
        device: where ``dest`` is.
        offsets: where in each file the bytes begin.
        expects: the files that they have to be.
    """

    def __init__(
        self,
        paths: Sequence[str],
        sizes: np.ndarray,
        starts: np.ndarray,
        dest: torch.Tensor,
        device: torch.device,
        offsets: np.ndarray | None = None,
        expects: Sequence[FileId | None] | None = None,
        whole: bool = False,
    ) -> None:
        super().__init__()
        self._paths, self._sizes, self._starts = paths, sizes, starts
        self._offsets = np.zeros_like(sizes) if offsets is None else offsets
        self._expects = [None] * len(paths) if expects is None else expects
        self._whole = whole
        self._dest = dest
        self._device = device
        ends = starts + sizes
        first = 0
        while first < len(paths):
            fit = int(np.searchsorted(ends, starts[first] + CALL_BYTES, "right"))
            after = min(max(fit, first + 1), first + FILES)
            self._groups.append(slice(first, after))
            first = after

    def _do(self, group: slice) -> None:
        sizes, begin = self._sizes[group], int(self._starts[group.start])
        starts = self._starts[group] - begin
        end = int(self._starts[group.stop]) if group.stop < len(self._paths) else self._dest.numel()
        part = self._dest[begin : min(begin + int(starts[-1] + sizes[-1]) + self._whole, end)]
        where = self._offsets[group], sizes, starts
        if not part.numel():
            part = torch.empty(0, dtype=torch.uint8)  # the files are only opened
        if not part.is_cuda:
            read_small_files(self._paths[group], *where, part, self._expects[group], self._whole)
            return
        with staging.staging_pool(self._device).lend([part]) as (host,):
            read_small_files(self._paths[group], *where, host, self._expects[group], self._whole)


def read_small_files(
    paths: Sequence[str],
    offsets: np.ndarray,
    sizes: np.ndarray,
    starts: np.ndarray,
    dest: torch.Tensor,
    expects: Sequence[FileId | None],
    whole: bool = False,
) -> None:
    """Reads a part of each file into a CPU tensor, or, if so it is, ``whole`` files of these sizes.

    Raises:
        OSError: a file could not be opened or read (StorageError for a short one, FileChanged for another one).
    """
    ring = ring_of_this_thread()
    if ring is None:
        left = list(range(len(paths)))
    else:
        names = [os.fsencode(path) for path in paths]
        # One byte more than a whole file has, where there is room for it, shows that it has become longer.
        more = whole & (np.append(starts[1:], dest.numel()) > starts + sizes)
        got = ring.read(names, offsets, sizes + more, dest.data_ptr() + starts)
        # Those that failed too: the plain calls say why. A file that the path names now is the one that was read.
        left = np.flatnonzero((got != sizes) | (more != whole)).tolist()
        if any(expect is not None for expect in expects):
            seen = zip(expects, identities(names), strict=True)
            left += [i for i, (expect, now) in enumerate(seen) if expect is not None and now != expect]
    view = dest.numpy().data
    for i in left:
        size, start = int(sizes[i]), int(starts[i])
        fd = open_file(paths[i], FileId.sized(size) if whole else expects[i])
        try:
            pread_into(fd, int(offsets[i]), view[start : start + size], paths[i])
        finally:
            os.close(fd)


def _span(path: str, ranges: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Where ranges of a file begin and end; None if they overlap or are in no order."""
    check_ranges(path, ranges)
    end = begin = ranges[0][0] if ranges else 0
    for at, nbytes in ranges:
        if at < end:
            return None
        end = at + nbytes
    return begin, end


def _with_gaps(places: Iterable[tuple[int, int]], end: int) -> Iterator[int]:
    """Bytes of the gap before each place, and of the place; and of the gap behind them all."""
    done = 0
    for at, nbytes in places:
        yield at - done
        yield nbytes
        done = at + nbytes
    yield end - done


def _blocks(sizes: Sequence[int]) -> Iterator[slice]:
    """Cuts a list of files into neighbours of at most FILES and, in whole pages, CALL_BYTES."""
    first, room = 0, CALL_BYTES
    for i, size in enumerate(sizes):
        size += -size % ALIGNMENT
        if i - first == FILES or (size > room and i > first):
            yield slice(first, i)
            first, room = i, CALL_BYTES
        room -= size
    yield slice(first, len(sizes))


#: What :meth:`Storage.load_all` is told of a file.
_Asked: TypeAlias = "tuple[str, Sequence[tuple[int, int]], FileId | None]"


class _Block:
    """Small files on a CUDA device: their bytes come in one copy, and one kernel makes the files' tensors of them.

    Args:
        pending: gives the block that the bytes are read into.
        sizes: bytes of the gap before each tensor and, in turn with these, of the tensor; and of the last gap.
    """

    def __init__(self, pending: Pending, sizes: Sequence[int]) -> None:
        self._pending: Pending | None = pending
        self._sizes = sizes
        self._tensors: Sequence[torch.Tensor] = ()
        self._made_on: torch.cuda.Stream | None = None
        self._made_on_raw = 0
        self.lock = threading.Lock()

    def tensors(self, first: int, after: int) -> list[torch.Tensor]:
        """Some of its tensors, for the current stream. Each owns its memory.

        Raises:
            OSError: one of the files could not be read.
        """
        with self.lock:
            if self._pending is not None:
                (block,) = self._pending.wait()
                self._made_on = torch.cuda.current_stream(block.device)
                self._made_on_raw = staging.raw_current_stream(block.device)
                parts = block.split_with_sizes(self._sizes)[1::2]
                if all(self._sizes[1::2]):
                    self._tensors = torch._foreach_add(parts, 0) if parts else ()  # there is no _foreach_clone
                else:  # not every version of torch skips what is empty
                    self._tensors = [part.clone() for part in parts]
                self._pending = None
        found = list(self._tensors[first:after])
        if found and staging.raw_current_stream(found[0].device) != self._made_on_raw:
            current = torch.cuda.current_stream(found[0].device)
            current.wait_stream(self._made_on)  # type: ignore[arg-type]  # it was made
            for tensor in found:
                tensor.record_stream(current)
        return found


class _InBlock(Pending):
    """One file of a block.

    Batches hold hundreds of these, and the more objects a record takes the more often Python's garbage collector goes
    through all that there are: with half as many it ran 29 times over 4,096 records where it had run 60 times. So this
    has no lock, list and callable of its own.

    Args:
        block: where its tensors are made.
        first, after: which of them are its own.
        storage: reads the file by itself if the block could not be read.
        file: what was asked for.
    """

    __slots__ = ("_after", "_alone", "_block", "_file", "_first", "_storage")

    def __init__(self, block: _Block, first: int, after: int, storage: PosixStorage, file: _Asked) -> None:
        self._block, self._first, self._after = block, first, after
        self._storage, self._file = storage, file
        self._alone: Pending | None = None

    def wait(self) -> list[torch.Tensor]:
        try:
            return self._block.tensors(self._first, self._after)
        except OSError:  # of any of its files
            with self._block.lock:  # for all who wait the same
                if self._alone is None:
                    self._alone = self._storage.load(*self._file, mapped=False)
            return self._alone.wait()


class PosixStorage(ThreadedStorage):
    """Reads with preadv; see the module's docstring. Works on every Linux machine, for CPU and CUDA targets.

    Args:
        device: where destinations live.
        threads: reads in flight at once; default: one a core, 4 at least and 8 at most.
        direct_io: reads with O_DIRECT, past the page cache, whatever is aligned to blocks of 4096 bytes. Nothing is
            mapped then, and the next epoch reads from the drive again.

    Raises:
        ValueError: ``threads`` is not positive.

    Example::

        storage = PosixStorage(torch.device("cpu"))
        head, tail = storage.load("volume.bin", [(0, 4096), (8192, 100)]).wait()
    """

    name = "posix"

    def __init__(self, device: torch.device, threads: int | None = None, direct_io: bool = False) -> None:
        super().__init__(device, threads)
        self.direct_io = direct_io

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return Availability(True, "threads over preadv" + ("" if device.type == "cuda" else ", private mappings"))

    def submit_files(
        self, paths: Sequence[str], sizes: np.ndarray, starts: np.ndarray, dest: torch.Tensor, *, fresh: bool = False,
        whole: bool = False,
    ) -> Pending:  # fmt: skip
        if self.direct_io or not len(paths) or sizes.max() > MIN_PIECE_BYTES:
            return super().submit_files(paths, sizes, starts, dest, fresh=fresh, whole=whole)
        parts = places(dest, sizes, starts)
        on_device = [dest] if dest.is_cuda else []
        if on_device:
            self._check_devices(on_device)
            if fresh:  # it may be from another pool than the copy stream's, which is to write to it
                dest.record_stream(staging.copy_stream(self.device))
            else:
                staging.adopt(on_device, self.device)
        return self._run(_Files(paths, sizes, starts, dest, self.device, whole=whole), parts, on_device)

    def load_all(self, files: Sequence[_Asked], *, mapped: bool = True) -> list[Pending]:
        if not self._reads_blocks() or not files:
            return super().load_all(files, mapped=mapped)
        spans = [span for path, ranges, _ in files if (span := _span(path, ranges)) is not None]
        if len(spans) < len(files) or max(end - begin for begin, end in spans) > GROUP_BYTES:
            return super().load_all(files, mapped=mapped)
        blocks = _blocks([end - begin for begin, end in spans])
        return [pending for block in blocks for pending in self._load_block(files[block], spans[block])]

    def _reads_blocks(self) -> bool:
        return self.device.type == "cuda" and not self.direct_io

    def _load_block(self, files: Sequence[_Asked], spans: Sequence[tuple[int, int]]) -> Iterator[Pending]:
        begins, ends = np.array(spans, np.int64).T
        sizes = ends - begins
        ends = np.cumsum(sizes + -sizes % ALIGNMENT)  # within the block from here on
        starts = np.concatenate([[0], ends[:-1]])
        dest = staging.allocate_on_copy_stream(int(ends[-1]), self.device)
        paths, expects = [path for path, _, _ in files], [expect for _, _, expect in files]
        work = _Files(paths, sizes, starts, dest, self.device, begins, expects)
        pending = later(self._run, work, [dest], [dest])
        places = [
            (at + shift, nbytes)
            for (_, ranges, _), shift in zip(files, (starts - begins).tolist(), strict=True)
            for at, nbytes in ranges
        ]
        block = _Block(pending, list(_with_gaps(places, dest.numel())))
        first = 0
        for file in files:
            after = first + len(file[1])
            yield _InBlock(block, first, after, self, file)
            first = after

    def map(
        self, path: str, ranges: Sequence[tuple[int, int]], expect: FileId | None = None
    ) -> list[torch.Tensor] | None:
        if self.device.type != "cpu" or self.direct_io:
            return None
        fd = open_file(path, expect)
        try:
            size = os.fstat(fd).st_size if expect is None else expect.size
            for offset, nbytes in ranges:
                if nbytes and offset + nbytes > size:  # touching a mapped page beyond the end would kill the process
                    raise StorageError(errno.EIO, f"file ends at byte {size}, before byte {offset + nbytes}", path)
            return [self._map_one(fd, offset, nbytes, path) for offset, nbytes in ranges]
        finally:
            os.close(fd)

    def _map_one(self, fd: int, offset: int, nbytes: int, path: str) -> torch.Tensor:
        # An unaligned start is read, so that what is handed out is always good for any dtype.
        if nbytes >= MAP_BYTES and offset % ALIGNMENT == 0:
            try:
                return torch.from_numpy(np.asarray(_Mapping(fd, offset, nbytes)))
            except OSError:  # vm.max_map_count is used up, or the file system maps nothing: read instead
                pass
        dest = torch.empty(nbytes, dtype=torch.uint8)
        pread_into(fd, offset, dest.numpy().data, path)
        return dest

    def _open(self, path: str, expect: FileId | None) -> tuple[int, int | None, str]:
        fd = open_file(path, expect)
        if not self.direct_io:
            return fd, None, path
        try:
            with naming(path):  # by way of the descriptor: the path may name another file by now
                return fd, os.open(f"/proc/self/fd/{fd}", _FLAGS | os.O_DIRECT), path
        except OSError as e:
            os.close(fd)
            raise StorageError(e.errno, f"opening it with O_DIRECT for direct_io=True: {e.strerror}", path) from e

    def _close(self, handle: Any) -> None:
        for fd in handle[:2]:
            if fd is not None:
                os.close(fd)

    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> None:
        fd, direct, path = handle
        view = dest.numpy().data
        if direct is not None and offset % ALIGNMENT == 0 and dest.data_ptr() % ALIGNMENT == 0:
            whole = view.nbytes - view.nbytes % ALIGNMENT
            pread_into(direct, offset, view[:whole], path)
            offset, view = offset + whole, view[whole:]
        else:
            expect_cold(fd, offset, view.nbytes)
        pread_into(fd, offset, view, path)

    def describe(self) -> dict[str, Any]:
        small = "io_uring" if ring_of_this_thread() and not self.direct_io else "one call after another"
        return {**super().describe(), "direct_io": self.direct_io, "small_files": small}
