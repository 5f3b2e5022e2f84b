"""Plain files: identity, opening, whole reads and whole writes. Everything here blocks and uses host memory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base.file_systems import open_fd, opened, read_at, reserve
from monai_gds.errors import FileChanged, StorageError
from monai_gds.storage.memory import HUGE, prefer_huge_pages

N = TypeVar("N", int, np.ndarray)

#: Bytes. Offsets, lengths and addresses that are multiples of it suit O_DIRECT, cuFile and NVMe blocks.
ALIGNMENT = 4096

#: Host bytes, or a 1-D contiguous uint8 tensor on the CPU or a CUDA device.
Buffer: TypeAlias = "bytes | bytearray | memoryview | torch.Tensor"

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a FIFO must not wait


def whole_pages(nbytes: N) -> N:
    """Rounds a number of bytes, or several, up to whole pages."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class FileId(NamedTuple):
    """Identity of a file's content. Equal ids mean equal bytes, unless somebody sets the clock back.

    Attributes:
        device: ``st_dev`` of the file.
        inode: its inode number.
        size: its length in bytes.
        mtime_ns: time of the last change, in nanoseconds since 1970.

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
        """Returns the id of a path or of an open descriptor. Raises OSError if there is no such file."""
        return cls.from_stat(os.stat(target))

    @classmethod
    def from_stat(cls, st: os.stat_result) -> FileId:
        """Returns the id held in an ``os.stat_result``."""
        return cls(st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns)


#: What a file must be when it is opened: this very file, any file of this many bytes, or anything.
Expected: TypeAlias = "FileId | int | None"


def check_identity(expected: Expected, found: FileId, path: str) -> None:
    """Raises FileChanged unless a file is the expected one."""
    if isinstance(expected, FileId):
        if found != expected:
            raise FileChanged(f"{path} was replaced or changed while it was being read")
    elif expected is not None and found.size != expected:
        raise FileChanged(
            f"{path} has {found.size} bytes, and had {expected} when it was listed: it was replaced or changed; list "
            "the files again"
        )


def check_open(fd: int, expected: Expected, path: str) -> None:
    """Raises FileChanged unless an open descriptor is of the expected file."""
    if expected is not None:
        st = os.fstat(fd)
        if (st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns) != expected:  # every hit comes here: no FileId is made
            check_identity(expected, FileId.from_stat(st), path)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Adds the path to an OSError of a call that was given a descriptor only."""
    try:
        yield
    except OSError as e:
        if e.filename is None:
            e.filename = path
        raise


# Reading.


def open_file(path: str, expected: Expected = None, *, regular: bool = False) -> int:
    """Opens a file for reading. Raises OSError, and FileChanged if it is not the expected one.

    ``regular`` refuses what is not a regular file: some libraries would wait for ever to open a FIFO.
    """
    fd = open_fd(path, _FLAGS)
    try:
        check_open(fd, expected, path)
        if regular and not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StorageError(errno.EINVAL, "not a regular file", path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_direct(fd: int, path: str) -> int:
    """Opens the file of a descriptor once more, with O_DIRECT; its path may name another file by now.

    Raises StorageError where the file system has no O_DIRECT.
    """
    try:
        with naming(path):
            return open_fd(f"/proc/self/fd/{fd}", _FLAGS | os.O_DIRECT)
    except OSError as e:
        why = "the file system refuses it; backend='posix' reads without" if e.errno == errno.EINVAL else e.strerror
        raise StorageError(e.errno, f"opening it with O_DIRECT: {why}", path) from e


def ends_early(at: int, missing: int, path: str) -> StorageError:
    """The error for a file that ended at byte ``at`` with ``missing`` bytes still to come."""
    return StorageError(errno.EIO, f"file ends at byte {at}, {missing} bytes were still to come", path)


def read_head(path: str, nbytes: int) -> tuple[bytes, FileId]:
    """Reads the first bytes of a file, fewer from a smaller one, and returns them with its identity."""
    with opened(path, _FLAGS) as fd, naming(path):
        file = FileId.of(fd)
        return read_at(fd, min(nbytes, file.size)), file


def is_cold(fd: int, offset: int) -> bool:
    """Returns whether a byte would have to be read from the drive. Takes about 2 µs."""
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except OSError as e:  # if any other, a file system without RWF_NOWAIT
        return isinstance(e, BlockingIOError)
    return False


def expect_cold(fd: int, offset: int, nbytes: int) -> None:
    """Tells the kernel to read ahead a range that is about to be read, if its first byte is not in the page cache.

    The hint itself walks the cache, so it is not given for a range that is cached. It is for pieces, not for whole
    volumes: a disk that reads many files at once reads all of them more slowly.
    """
    if nbytes >= limits.KERNEL_READ_AHEAD_BYTES and is_cold(fd, offset):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)


# Memory.


def aligned_empty(nbytes: int) -> torch.Tensor:
    """Allocates a 1-D uint8 CPU tensor that begins at a multiple of ALIGNMENT; large ones prefer huge pages.

    The storage is one page larger than the tensor.
    """
    raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    if nbytes >= 2 * HUGE:
        prefer_huge_pages(raw)
    return raw[start : start + nbytes]


def as_bytes_view(buffer: Buffer) -> memoryview:
    """Returns the bytes of a buffer as a memoryview, copied to the host first when it lies on a device."""
    view = buffer.detach().cpu().numpy().data if isinstance(buffer, torch.Tensor) else memoryview(buffer)
    return view.cast("B")


# Writing.


@contextmanager
def new_file(path: str, nbytes: int, *, durable: bool, mode: int) -> Iterator[int]:
    """Creates ``path``, which must not exist, with room for ``nbytes``, and yields a descriptor to write to.

    With ``durable``, the file is synced before it is closed (fsync), so that it survives a power cut. ``mode``: its
    permissions, less the umask.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with naming(path):
            if nbytes:
                reserve(fd, nbytes)
            yield fd
            if durable:
                os.fsync(fd)
    finally:
        os.close(fd)


def total_bytes(buffers: Sequence[Buffer]) -> int:
    """Returns the buffers' total size. Raises ValueError for a tensor that is not 1-D, contiguous and of uint8."""
    for b in buffers:
        if isinstance(b, torch.Tensor) and (b.dtype != torch.uint8 or b.dim() != 1 or not b.is_contiguous()):
            raise ValueError(
                f"only 1-D contiguous uint8 tensors are written, not {tuple(b.shape)} {b.dtype} with strides "
                f"{b.stride()}: tensor.contiguous().view(-1).view(torch.uint8) has the bytes of any other"
            )
    return sum(b.nbytes if isinstance(b, torch.Tensor) else memoryview(b).nbytes for b in buffers)


def write_all(fd: int, views: list[memoryview]) -> None:
    """Writes byte views back to back at the descriptor's position, however few bytes a single call takes.

    They are written together: the kernel's pages in the page cache are as large as a call allows, and a record whose
    header was written alone begins with small ones.
    """
    views = [view for view in views if view.nbytes]
    limit = os.sysconf("SC_IOV_MAX")
    while views:
        written = os.writev(fd, views[:limit])
        while views and written >= views[0].nbytes:
            written -= views.pop(0).nbytes
        if written:
            views[0] = views[0][written:]
