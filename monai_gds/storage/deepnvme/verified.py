"""Base of the backends whose engine reports success whatever happened: DeepSpeed's ``aio_handle`` and ``gds_handle``.

Both drop the result of every single transfer. This base class asks them only for what they can do, verifies that they
did it, and does the rest with pread and pwrite. A backend provides its engines as lanes (:mod:`.lanes`).

**What an engine is asked for.** Whole pages inside the size that ``fstat`` reports at that moment, in multiples of what
the engine can divide. The descriptor stays open and the engine gets its ``/proc/self/fd`` path, so it reaches the very
file that was checked, even if the path names another file by now. Heads are read as part of their page. The file's
last, partial page and ranges below :data:`SMALL_BYTES` go through pread.

**How a read is verified.** The lane raises for the errors that its engine reveals: ``aio_handle`` the kernel's result
of each transfer (``results.h``), ``gds_handle`` the end of the process that it runs in. That covers every transfer that
was made. To find transfers that were not made, every sector of the buffer (512 bytes, the smallest unit that a drive
transfers) is marked before the read with eight bytes, drawn at random for this read. A sector that nothing was
transferred to still has the mark, so it is always found. A sector that was filled has it by chance once in 2**64.
Afterwards ``fstat`` must still report the range as part of the file.

Marks alone would not suffice: a loop device whose image is gone fills the buffer with zeros and then fails (seen), and
a drive may stop in the middle of a transfer that it reports as failed.

**How a write is verified.** Space is reserved first, so a full disk is found before a byte is written. The lane raises
as for a read. Then each transfer's last page is read back from the drive and compared: a transfer that failed or
stopped short has not written it. At the end the file must have its size and no hole (``SEEK_HOLE``): reserved space
becomes data only once a write to it has succeeded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from monai_gds.errors import StorageError
from monai_gds.storage import files, staging
from monai_gds.storage.blocking import BlockingBackend, Work, naming_file
from monai_gds.storage.deepnvme.lanes import Lane, LanePool
from monai_gds.storage.deepnvme.settings import Settings
from monai_gds.storage.files import ALIGNMENT, Buffer, Expected
from monai_gds.storage.pending import Pending

#: Ranges and files below this many bytes go through pread and pwrite: setting up a transfer costs more than it saves.
SMALL_BYTES = 64 << 10

SECTOR = 512

#: A part of what is written: an array on the host, or a CUDA tensor.
_Source: TypeAlias = "np.ndarray | torch.Tensor"


def _first_words(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.int64).view(-1, SECTOR // 8)[:, 0]


def mark_unread(buffer: torch.Tensor) -> int:
    """Marks each sector of a buffer as not read yet. Returns the mark, for :func:`find_unread`."""
    mark = int.from_bytes(secrets.token_bytes(8), "little", signed=True)
    _first_words(buffer).fill_(mark)
    return mark


def find_unread(buffer: torch.Tensor, mark: int) -> int | None:
    """The first byte of the first sector that still has its mark; None when all have been read."""
    unread = _first_words(buffer) == mark
    if not bool(unread.any()):
        return None
    return int(unread.int().argmax()) * SECTOR


class VerifiedBackend(BlockingBackend):
    """A backend that verifies every transfer of its engine; see the module's docstring.

    Args:
        device: where destinations live.
        threads: lanes in use at once, each with its engine and buffer.
        tuned: the result of ``ds_nvme_tune``, see :meth:`Settings.tuned`.
        settings: fields of :class:`Settings` by name. They take precedence over ``tuned``.

    Raises:
        ValueError: a setting that DeepNVMe does not work with.
    """

    #: Bytes per transfer of the engine. A transfer succeeds as a whole, stops short, or fails.
    transfer_bytes: int = 1 << 20

    #: Equal parts into which the engine divides an operation before it cuts transfers.
    shares: int = 1

    #: Size of a lane's buffer: a piece, and the rest of the pages in which it begins and ends.
    lane_bytes: ClassVar[int] = BlockingBackend.piece_bytes + 2 * ALIGNMENT

    def __init__(
        self,
        device: torch.device,
        threads: int | None = None,
        *,
        tuned: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(device, threads)
        self.settings = Settings.chosen(tuned, settings)
        self._lanes = LanePool(self.threads, self)

    @abstractmethod
    def _new_lanes(self) -> Sequence[Lane]:
        """Makes one or more lanes. Raises StorageError if the machine refuses the resources."""

    @property
    def _unit(self) -> int:
        """The engine takes only multiples of this many bytes."""
        return ALIGNMENT * self.shares

    # Reading.

    def _open(self, path: str, expected: Expected) -> int:
        fd = files.open_file(path, expected, regular=True)
        try:
            os.close(files.open_direct(fd, path))  # now, with a clear error
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _read_into(self, handle: int, offset: int, dest: torch.Tensor) -> int:
        done = 0
        if dest.numel() >= SMALL_BYTES:
            with self._lanes.lane(self._new_lanes) as lane:
                done = self._read_pages(lane, handle, offset, dest)
        return done or _read_plain(handle, offset, dest)

    def _read_pages(self, lane: Lane, fd: int, offset: int, dest: torch.Tensor) -> int:
        """Has the engine read the whole pages in which ``dest`` lies; returns how many bytes of it are filled."""
        end = offset + dest.numel()
        start = offset - offset % ALIGNMENT
        direct = start == offset and lane.reaches(dest)
        stop = min(end if direct else end + -end % ALIGNMENT, os.fstat(fd).st_size)
        stop -= (stop - start) % self._unit
        if stop <= offset:
            return 0
        into = (dest if direct else lane.buffer)[: stop - start]
        with staging.on_copy_stream(into.device):  # not on the default stream, where the user's work may be queued
            mark = mark_unread(into)
            try:
                lane.transfer("read", fd, start, into)
            finally:  # a file that shrank is reported rather than the engine's error
                size = os.fstat(fd).st_size
                if size < stop:
                    raise StorageError(errno.EIO, f"it became shorter while it was read: {size} bytes, not {stop}")
            unread = find_unread(into, mark)
        if unread is not None:
            raise StorageError(errno.EIO, f"the bytes at {start + unread} did not arrive: DeepNVMe does not say why")
        filled = min(stop, end) - offset
        if not direct:
            found = into[offset - start : offset - start + filled]
            _copy(dest[:filled], found if found.is_cuda else found.numpy())
        return filled

    # Writing.

    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        total = files.total_bytes(buffers)
        if total < SMALL_BYTES:
            super().write(path, buffers, durable=durable, mode=mode)
            return
        sources = [_source(buffer) for buffer in buffers]
        for device in {source.device for source in sources if isinstance(source, torch.Tensor)}:
            torch.cuda.current_stream(device).synchronize()  # the work that fills them has finished
        with files.new_file(path, total, durable=durable, mode=mode) as fd:
            self._write_all(fd, path, sources, total)
            size = os.fstat(fd).st_size
            if size != total:
                raise StorageError(errno.EIO, f"the file has {size} bytes after {total} were written")
            hole = os.lseek(fd, 0, os.SEEK_HOLE)
            if hole < total:
                raise StorageError(errno.EIO, f"the bytes at {hole} were not written: DeepNVMe does not say why")

    def _write_all(self, fd: int, path: str, sources: Sequence[_Source], total: int) -> None:
        pending = Pending([], torch.device("cpu"))
        direct = files.open_direct(fd, path)

        def do(offset: int) -> None:
            try:
                if not pending.failed(0):
                    self._write_piece(fd, direct, sources, offset, min(self.piece_bytes, total - offset))
            except Exception as e:
                pending.fail(0, naming_file(e, path))

        work = Work(range(0, total, self.piece_bytes), do, pending.finish)
        try:
            self._run_in_threads(work)
            pending.wait()
        finally:
            while not pending.done:  # interrupted: a later write would go to whatever file gets the descriptor's number
                with contextlib.suppress(KeyboardInterrupt, SystemExit):
                    work.stop()
                    _ = pending.errors
            os.close(direct)

    def _write_piece(self, fd: int, direct: int, sources: Sequence[_Source], offset: int, count: int) -> None:
        with self._lanes.lane(self._new_lanes) as lane, staging.on_copy_stream(lane.buffer.device):
            piece = lane.buffer[:count]
            _gather(sources, offset, piece)
            pages = count - count % self._unit
            if pages:
                lane.transfer("write", fd, offset, piece[:pages])
                self._check_pages(direct, offset, piece[:pages])
            rest = piece[pages:].cpu().numpy().data
            if rest.nbytes and os.pwrite(fd, rest, offset + pages) != rest.nbytes:
                raise StorageError(errno.EIO, f"wrote less than {rest.nbytes} bytes at {offset + pages}")

    def _check_pages(self, direct: int, offset: int, pages: torch.Tensor) -> None:
        """Reads the last page of each transfer back from the drive."""
        found = files.aligned_empty(ALIGNMENT)
        for end in _transfer_ends(pages.numel(), self.shares, self.transfer_bytes):
            at = end - ALIGNMENT
            count = os.preadv(direct, [found.numpy().data], offset + at)
            if count != ALIGNMENT or not torch.equal(found, pages[at:end].cpu()):
                raise StorageError(errno.EIO, f"DeepNVMe did not write the page at {offset + at}")

    def close(self) -> None:
        super().close()
        self._lanes.empty()

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **asdict(self.settings)}


def _transfer_ends(count: int, shares: int, size: int) -> Iterator[int]:
    """Where the engine's transfers end, when it divides ``count`` bytes into equal shares and cuts each by ``size``."""
    share = count // shares
    for start in range(0, count, share):
        yield from range(start + size, start + share, size)
        yield start + share


def _read_plain(fd: int, offset: int, dest: torch.Tensor) -> int:
    data = np.empty(dest.numel(), np.uint8) if dest.is_cuda else dest.numpy()
    count = os.preadv(fd, [data.data], offset)
    if dest.is_cuda:
        _copy(dest[:count], data[:count])
    return count


def _source(buffer: Buffer) -> _Source:
    if isinstance(buffer, torch.Tensor):
        return buffer.detach() if buffer.is_cuda else buffer.detach().numpy()
    return np.asarray(files.as_bytes_view(buffer))


def _gather(sources: Sequence[_Source], offset: int, piece: torch.Tensor) -> None:
    """Fills ``piece`` with the bytes from ``offset`` on of the sources laid end to end."""
    begin = 0
    for source in sources:
        first, last = max(begin, offset), min(begin + source.nbytes, offset + piece.numel())
        if first < last:
            _copy(piece[first - offset : last - offset], source[first - begin : last - begin])
        begin += source.nbytes


def _copy(dest: torch.Tensor, source: _Source) -> None:
    """Copies between host and device, or on one of them. The copy is complete when this returns.

    On the host torch's own copy ran at half of NumPy's speed: it divides every piece among its own threads, though
    several pieces are being copied at once (2 cores, 16 MiB: 5.4 to 7.4 GB/s, NumPy 8 to 13).
    """
    if isinstance(source, np.ndarray):
        if not dest.is_cuda:
            np.copyto(dest.numpy(), source)
            return
        source = torch.from_numpy(source.copy())  # torch warns about arrays that cannot be written to
    stream = staging.copy_stream(dest.device if dest.is_cuda else source.device)
    with torch.cuda.stream(stream):
        dest.copy_(source, non_blocking=True)
    stream.synchronize()
