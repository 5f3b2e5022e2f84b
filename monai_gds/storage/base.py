"""What a storage backend promises. Read this file before writing one.

The cache and the DALI sources call :meth:`Storage.load`, :meth:`Storage.read` and :meth:`Storage.write`; a backend
implements :meth:`Storage.submit` and whatever it can do better than the defaults here. A backend whose
primitive is a blocking read derives from :class:`monai_gds.storage.threaded.ThreadedStorage` and implements just that.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch

from monai_gds.errors import FileChanged

__all__ = [
    "ALIGNMENT",
    "CUDA_ONLY",
    "Availability",
    "Buffer",
    "FileId",
    "Pending",
    "Read",
    "Storage",
    "completed",
    "naming",
    "places",
]

#: Bytes. O_DIRECT, cuFile and NVMe blocks are all content with offsets, lengths and addresses that are multiples of it.
ALIGNMENT = 4096

#: Why a backend that reads into GPU memory does not work for a CPU target.
CUDA_ONLY = "it serves CUDA targets only"

#: What :meth:`Storage.write` takes: host bytes, or a 1-D contiguous uint8 tensor on the CPU or a CUDA device.
Buffer: TypeAlias = "bytes | bytearray | memoryview | torch.Tensor"


class FileId(NamedTuple):
    """Identity of a file's content: two equal ids are the same bytes, short of somebody setting the clock back.

    Attributes:
        device: ``st_dev`` of the file.
        inode: its inode number.
        size: its bytes.
        mtime_ns: when it was last changed, in nanoseconds since 1970.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("file.bin").write_bytes(b"1234")
        >>> before = FileId.of("file.bin")
        >>> before.size, before == FileId.of("file.bin")
        (4, True)
    """

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, target: int | str | os.PathLike[str]) -> FileId:
        """The id of a path or of an open descriptor.

        Raises:
            OSError: there is no such file.
        """
        return cls.from_stat(os.stat(target))

    @classmethod
    def from_stat(cls, st: os.stat_result) -> FileId:
        """The id held in an ``os.stat_result``."""
        return cls(st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns)

    @classmethod
    def sized(cls, size: int) -> FileId:
        """Stands for any file of this size: for what was listed with its size and is read as a whole."""
        return cls(-1, -1, size, -1)

    def check(self, now: FileId, path: str) -> None:
        """Raises FileChanged when ``now`` is another file than this one."""
        if self.inode == -1:
            if now.size != self.size:
                raise FileChanged(
                    f"{path} has {now.size} bytes, and had {self.size} when it was listed: it was replaced or changed; "
                    "list the files again"
                )
        elif now != self:
            raise FileChanged(f"{path} was replaced or changed while it was being read")

    def check_open(self, fd: int, path: str) -> None:
        """Raises FileChanged when an open descriptor is of another file than this one."""
        st = os.fstat(fd)
        if (st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns) != self:  # no FileId is made: this is done for every hit
            self.check(FileId.from_stat(st), path)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Gives the path to an OSError of a call that knew a descriptor only."""
    try:
        yield
    except OSError as e:
        if e.filename is None:
            e.filename = path
        raise


@dataclass(frozen=True, slots=True)
class Read:
    """One read: ``dest.numel()`` bytes of ``path`` from ``offset`` into ``dest``.

    Args:
        path: the file.
        offset: first byte within the file; any value, aligned or not.
        dest: 1-D contiguous uint8 tensor on the CPU or on the storage's device. All of it is filled.
        expect: when given, the file opened must have this identity, else the read fails with FileChanged.
        room: bytes behind ``dest`` in the same memory that may be overwritten too. Up to the next multiple of ALIGNMENT
            they spare a backend that reads whole blocks a detour.

    Raises:
        ValueError: ``offset`` is negative, or ``dest`` is not as said above.

    Example:
        >>> from pathlib import Path
        >>> import torch
        >>> from monai_gds import open_storage
        >>> _ = Path("file.bin").write_bytes(bytes(range(100)))
        >>> dest = torch.empty(4, dtype=torch.uint8)
        >>> open_storage("posix", "cpu").read([Read("file.bin", 10, dest)])
        >>> dest
        tensor([10, 11, 12, 13], dtype=torch.uint8)
    """

    path: str
    offset: int
    dest: torch.Tensor
    expect: FileId | None = None
    room: int = 0

    def __post_init__(self) -> None:
        dest = self.dest
        if self.offset < 0:
            raise ValueError(f"{self.path}: cannot read from the negative offset {self.offset}")
        if dest.dtype != torch.uint8 or dest.dim() != 1 or not dest.is_contiguous() or dest.is_meta:
            raise ValueError(
                f"{self.path}: dest must be a 1-D contiguous uint8 tensor with memory, not {tuple(dest.shape)} "
                f"{dest.dtype} with strides {dest.stride()} on {dest.device}"
            )


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend works here: ``ok``, what was found (``reason``), and what to do about it (``remedy``).

    Example:
        >>> found = Availability(False, "the package kvikio is not installed", "pip install 'monai_gds[cuda13]'")
        >>> found.remedy if not found else "nothing to do"
        "pip install 'monai_gds[cuda13]'"
    """

    ok: bool
    reason: str
    remedy: str = ""

    def __bool__(self) -> bool:
        return self.ok


class Pending:
    """Reads under way. ``wait()`` returns once the destinations may be used on the current CUDA stream.

    It may be dropped without waiting; the reads go on, and their destinations are freed behind them.

    Args:
        finish: called once, by the first ``wait()``; returns the result or raises. On a CUDA target it makes the
            stream that is current *then* wait for the copies, without blocking the host on them.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds import open_storage
        >>> _ = Path("file.bin").write_bytes(bytes(range(100)))
        >>> pending = open_storage("posix", "cpu").load("file.bin", [(0, 2), (98, 2)])
        >>> head, tail = pending.wait()
        >>> tail
        tensor([98, 99], dtype=torch.uint8)
    """

    __slots__ = ("_error", "_finish", "_lock", "_result")

    def __init__(self, finish: Callable[[], list[torch.Tensor]] | None) -> None:
        self._finish = finish
        self._lock = threading.Lock()
        self._result: list[torch.Tensor] = []
        self._error: Exception | None = None

    def wait(self) -> list[torch.Tensor]:
        """Waits, and returns the destinations in the order of the requests.

        Further calls, also from other threads, give the same; only the stream of the first is made to wait.

        Raises:
            OSError: a file could not be opened or read (StorageError for a short read).
        """
        if self._finish is None and self._error is None:  # seen without the lock: it is the last to change
            return self._result
        with self._lock:
            if self._finish is not None:
                try:
                    self._result = self._finish()
                except Exception as e:  # not a KeyboardInterrupt: after one, the reads can still be waited for
                    self._error = e
                self._finish = None
        try:
            if self._error is not None:
                raise self._error
            return self._result
        finally:
            del self  # else the error holds its traceback, that holds this frame, and that the error


def completed(tensors: list[torch.Tensor]) -> Pending:
    """A Pending whose result is already there."""
    pending = Pending(None)
    pending._result = tensors
    return pending


def check_ranges(path: str, ranges: Sequence[tuple[int, int]]) -> None:
    """Raises ValueError when one of a file's (offset, bytes) is negative."""
    if ranges and min(map(min, ranges)) < 0:
        raise ValueError(f"{path}: negative offset or length in the ranges {list(ranges)}")


def later(begin: Callable[..., Pending], *args: Any, **kwargs: Any) -> Pending:
    """What ``begin`` gives; an error that it raises at once is raised by ``wait()``."""
    try:
        return begin(*args, **kwargs)
    except OSError as e:
        error = e

    def fail() -> list[torch.Tensor]:
        raise error

    return Pending(fail)


def places(dest: torch.Tensor, sizes: np.ndarray, starts: np.ndarray) -> list[torch.Tensor]:
    """The parts ``dest[start : start + size]``.

    Args:
        dest: 1-D.
        sizes, starts: int64; see :meth:`Storage.submit_files`.

    Raises:
        ValueError: they are not in order, overlap, or do not fit.
    """
    if not len(sizes):
        return []
    edges = np.empty(2 * len(sizes) + 2, np.int64)  # where a part begins and ends, in turn
    edges[0], edges[1:-1:2], edges[2:-1:2], edges[-1] = 0, starts, starts + sizes, dest.numel()
    lengths = np.diff(edges)
    if (lengths < 0).any():
        raise ValueError(f"{len(sizes)} files overlap, are out of order, or do not fit into {dest.numel()} bytes")
    return list(torch.split(dest, lengths.tolist()))[1::2]


class Storage(ABC):
    """Moves bytes between files and tensors of one target device.

    An instance belongs to the process that made it (threads, pinned memory and CUDA streams do not survive a fork) and
    may be used by several threads at once. Options of a backend are keyword arguments of its constructor and are never
    seen outside of it.

    Memory is a two-way promise. Nothing is read before it has arrived: what ``wait()`` returns may be used at once on
    the current stream. Nothing is overwritten before its last reader has finished: a destination that did not come
    from :meth:`allocate` is written only after the work that was queued on the current stream when it was submitted.

    Args:
        device: where destinations live, ``cpu`` or ``cuda:N``.

    Example:
        >>> import os, torch
        >>> from monai_gds import open_storage
        >>> storage = open_storage("auto", "cpu")
        >>> storage.write("new.bin", [b"head", torch.arange(4, dtype=torch.uint8)])
        >>> os.path.getsize("new.bin")
        8
        >>> storage.load("new.bin", [(4, 4)]).wait()
        [tensor([0, 1, 2, 3], dtype=torch.uint8)]
        >>> storage.close()
    """

    #: The name in the registry, which is what a user writes as ``backend="…"``.
    name: ClassVar[str]

    #: Whether reads go behind the file system's back: what was right once is worth another look at its checksum.
    past_file_system: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    @abstractmethod
    def probe(cls, device: torch.device) -> Availability:
        """Says whether this backend works here for ``device``, without side effects; cheap enough to call often."""

    @abstractmethod
    def submit(self, requests: Sequence[Read], *, fresh: bool = False) -> Pending:
        """Starts all reads together and returns at once.

        Args:
            requests: any number of reads, of any files, offsets and lengths (zero included).
            fresh: every CUDA destination came from :meth:`allocate` and has not been used yet, so there is no
                earlier reader to wait for.

        Raises:
            ValueError: a destination lies on another device than the CPU and the storage's.
            OSError: as by ``wait()``, where it is known at once.
        """

    def read(self, requests: Sequence[Read]) -> None:
        """Performs all reads together and waits for them.

        Raises:
            OSError: a file could not be opened or read (StorageError for a short read, FileChanged for another file).
        """
        self.submit(requests).wait()

    def submit_files(
        self, paths: Sequence[str], sizes: np.ndarray, starts: np.ndarray, dest: torch.Tensor, *, fresh: bool = False,
        whole: bool = False,
    ) -> Pending:  # fmt: skip
        """Starts reading the beginnings of many files into one buffer, and returns at once.

        For folders of small files, where what a call costs is more than what its bytes cost.

        Args:
            paths: the files.
            sizes: bytes wanted of each, int64 (files,).
            starts: where in ``dest`` each begins, int64 (files,), in rising order. What lies between the end of one and
                the start of the next, and behind the last, may be overwritten: with starts at multiples of ALIGNMENT
                a backend that reads whole blocks needs no detour.
            dest: 1-D contiguous uint8 tensor on the CPU or on the storage's device.
            fresh: see :meth:`submit`.
            whole: ``sizes`` are those of the whole files: one that is shorter or longer by now fails with FileChanged.
                With a byte at least between the end of a file and the start of the next, finding that out costs no
                system call of its own.

        Returns:
            Pending of one tensor a file, each a slice of ``dest``.

        Raises:
            ValueError: the places overlap or do not fit, or ``dest`` lies on another device.
            OSError: as by ``wait()``, where it is known at once.
        """
        parts = places(dest, sizes, starts)
        ends = np.append(starts[1:], dest.numel())
        rooms = (ends - starts - sizes).tolist()
        expects = [FileId.sized(size) if whole else None for size in sizes.tolist()]
        reads = [Read(path, 0, *rest) for path, *rest in zip(paths, parts, expects, rooms, strict=True)]
        return self.submit(reads, fresh=fresh)

    def load(
        self, path: str, ranges: Sequence[tuple[int, int]], expect: FileId | None = None, *, mapped: bool = True
    ) -> Pending:
        """Gives ranges of a file as new tensors, mapped where the backend can and read where it cannot.

        Args:
            path: the file.
            ranges: ``(offset, nbytes)`` each.
            expect: see :class:`Read`.
            mapped: False reads in any case, so that a failing disk shows as an error and not when a page is touched.

        Returns:
            Pending of one 1-D uint8 tensor a range, each owning its storage, on ``self.device``.

        Raises:
            ValueError: a range is negative.
            OSError: as by ``wait()``, where it is known at once.
        """
        check_ranges(path, ranges)
        tensors = self.map(path, ranges, expect) if mapped else None
        if tensors is not None:
            return completed(tensors)
        dests = self.allocate_all([nbytes for _, nbytes in ranges])
        requests = [Read(path, offset, dest, expect) for (offset, _), dest in zip(ranges, dests, strict=True)]
        return self.submit(requests, fresh=True)

    def load_all(
        self, files: Sequence[tuple[str, Sequence[tuple[int, int]], FileId | None]], *, mapped: bool = True
    ) -> list[Pending]:
        """As :meth:`load`, for several small files at once: where they are read, it is in one submission.

        Args:
            files: ``(path, ranges, expect)`` each.
            mapped: see :meth:`load`.

        Returns:
            One Pending a file. What goes wrong with a file is raised by its own.
        """
        if mapped and self.device.type == "cpu":
            return [later(self.load, *file, mapped=True) for file in files]
        sizes = [nbytes for _, ranges, _ in files for _, nbytes in ranges]
        dests = iter(self.allocate_all(sizes))
        requests = [[Read(path, at, next(dests), expect) for at, _ in ranges] for path, ranges, expect in files]
        together = later(self.submit, [read for reads in requests for read in reads], fresh=True)

        def one(file: tuple[str, Sequence[tuple[int, int]], FileId | None], reads: list[Read]) -> Pending:
            def finish() -> list[torch.Tensor]:
                try:
                    together.wait()
                    return [read.dest for read in reads]
                except OSError:  # of any of them
                    return self.load(*file, mapped=False).wait()

            return Pending(finish)

        return [one(file, reads) for file, reads in zip(files, requests, strict=True)]

    def map(
        self, path: str, ranges: Sequence[tuple[int, int]], expect: FileId | None = None
    ) -> list[torch.Tensor] | None:
        """Maps ranges of a file privately (copy-on-write), or returns None where this backend cannot.

        Args and results as for :meth:`load`. Writing into a mapped tensor never reaches the file.
        """
        return None

    def read_head(self, path: str, nbytes: int) -> tuple[bytes, FileId]:
        """The first bytes of a file, on the host, and the file's identity.

        Args:
            path: the file.
            nbytes: how many; fewer come back from a smaller file.

        Raises:
            OSError: the file could not be opened or read.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO must not wait
        try:
            with naming(path):
                return os.pread(fd, nbytes, 0), FileId.of(fd)
        finally:
            os.close(fd)

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """A new 1-D uint8 tensor on the device, uninitialised, of the kind that this backend fills fastest."""

    def allocate_all(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """As :meth:`allocate`, for several, each with a storage of its own."""
        return [self.allocate(nbytes) for nbytes in sizes]

    @abstractmethod
    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool = False) -> None:
        """Writes the buffers back to back as the whole content of the new file ``path``.

        The caller publishes the file (renames it) and removes it after a failure.

        Args:
            path: a file that does not exist yet, in a directory that does.
            buffers: see :data:`Buffer`.
            durable: return only once the bytes would survive a power cut (fsync).

        Raises:
            ValueError: a tensor is not 1-D, contiguous and of uint8.
            OSError: disk full, no permission, input/output error.
        """

    def close(self) -> None:  # noqa: B027 (optional: a backend may hold nothing)
        """Waits for what is under way and frees threads and staging memory. Tensors handed out stay valid."""

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} belongs to the process that made it and cannot be pickled or copied: call "
            "open_storage where it is needed"
        )

    def describe(self) -> dict[str, Any]:
        """What a user may want to see of the settings in force, for ``doctor`` and the benchmarks."""
        return {"backend": self.name, "device": str(self.device)}
