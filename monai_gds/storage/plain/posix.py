"""The ``posix`` backend: preadv from a pool of threads, and private mappings on a CPU target. Needs nothing but torch.

On a CPU target :meth:`PosixBackend.map` hands out copy-on-write mappings, so that a crop touches only the pages it
needs and an in-place transform never reaches the file. Many small files are read in groups, one io_uring call each
where the kernel gives this process one (:mod:`.small_files`).

Reads go through the page cache, cold ones too. With a hint to the kernel for each whole piece
(:func:`.files.expect_cold`), buffered reads were as fast as O_DIRECT ones (on a virtual disk, 16 threads, 1 MiB
pieces: 3.4 GB/s buffered with the hint, 3.3 without, 3.2 direct), and they leave the bytes where the next epoch finds
them. ``direct_io=True`` is for data that will never fit there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base import stages
from monai_gds.base.units import bytes_of
from monai_gds.storage import files, plan
from monai_gds.storage.backend import Availability
from monai_gds.storage.blocking import BlockingBackend, OpenFiles, naming_file
from monai_gds.storage.files import ALIGNMENT, Expected, FileId
from monai_gds.storage.memory import HUGE, map_privately
from monai_gds.storage.pending import Pending
from monai_gds.storage.plain.pinned_files import PinnedFiles
from monai_gds.storage.plain.small_files import read_small_files, ring_of_this_thread
from monai_gds.storage.reads import Reads


class _Handle(NamedTuple):
    """An open file; ``direct`` is a second descriptor with O_DIRECT, or -1."""

    fd: int
    direct: int


class PosixBackend(BlockingBackend):
    """Reads with preadv; see the module's docstring. Works on every Linux machine, for CPU and CUDA targets.

    Args:
        device: where destinations live.
        threads: reads in flight at once; default: one per core, at least 4 and at most 8, but 64 while small files take
            long to be opened or read. With io_uring each thread may have up to 64 small files in flight then.
        direct_io: reads with O_DIRECT, past the page cache, whatever is aligned to blocks of 4096 bytes. Nothing is
            mapped then, and the next epoch reads from the drive again.
        pinned_bytes: how many bytes of files in the page cache may stay registered with CUDA, such as ``50e9`` or
            ``"50GB"``, so that they are copied to the device without the CPU (:mod:`.pinned_files`). Files are
            registered in the order in which they are read, for as long as this storage is open. The memory cannot be
            reclaimed or swapped meanwhile.

    Raises:
        ValueError: ``threads`` is not positive, or ``pinned_bytes`` is not a size, or given for a CPU target or with
            ``direct_io``.
    """

    #: Each group runs Python code, which holds the interpreter's lock. With groups of 2 MiB an image of 108 kB took
    #: 12.7 µs of user time; with groups of 8 MiB 8 µs, and eight threads read 30% more images per second (two cores).
    group_bytes = 8 << 20
    group_reads = limits.RING_FILES

    def __init__(
        self, device: torch.device, threads: int | None = None, direct_io: bool = False, pinned_bytes: float | str = 0
    ) -> None:
        super().__init__(device, threads)
        self.direct_io = direct_io
        most = bytes_of(pinned_bytes, "pinned_bytes")
        if most and (direct_io or device.type != "cuda"):
            raise ValueError(
                f"pinned_bytes={pinned_bytes!r} is for a CUDA target and without direct_io; this is for "
                f"{device}{' with direct_io' if direct_io else ''}"
            )
        self._pinned = PinnedFiles(most, device) if most else None

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return Availability(True, "threads over preadv" + ("" if device.type == "cuda" else ", private mappings"))

    def memory(self, nbytes: int) -> torch.Tensor:
        if nbytes >= 2 * HUGE or self.direct_io or self.device.type != "cpu":
            return super().memory(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # finding where a page begins costs as much again

    def _open(self, path: str, expected: Expected) -> _Handle:
        fd = files.open_file(path, expected)
        try:
            if not self.direct_io:
                return _Handle(fd, -1)
            # What is not aligned is read through the page cache. Read-ahead would bring megabytes into it.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            return _Handle(fd, files.open_direct(fd, path))
        except BaseException:
            os.close(fd)
            raise

    def _close(self, handle: _Handle) -> None:
        os.close(handle.fd)
        if handle.direct >= 0:
            os.close(handle.direct)

    def _read_into(self, handle: _Handle, offset: int, dest: torch.Tensor) -> int:
        fd, direct = handle
        view = dest.numpy().data
        whole = view.nbytes - view.nbytes % ALIGNMENT
        if direct >= 0 and whole and offset % ALIGNMENT == 0 and dest.data_ptr() % ALIGNMENT == 0:
            return os.preadv(direct, [view[:whole]], offset)
        if direct < 0:
            files.expect_cold(fd, offset, view.nbytes)
        return os.preadv(fd, [view], offset)

    def served_by(self, path: str, expected: Expected) -> str:
        return stages.MAPPED if self._pinned is not None and self._pinned.holds(path, expected) else stages.STAGED

    def _largest_piece(self, reads: Reads) -> int:
        if self._pinned is None or not all(map(self._pinned.holds, reads.paths, reads.expected)):
            return self.piece_bytes
        return limits.REGISTERED_PIECE_BYTES

    def _do(self, group: Reads, into: Sequence[torch.Tensor], opened: OpenFiles, pending: Pending) -> None:
        file, expected = int(group.file[0]), group.expected[int(group.file[0])]
        to_pin = self._pinned is not None and isinstance(expected, FileId) and into[int(group.dest[0])].is_cuda
        if not to_pin or group.total < limits.MIN_PIECE_BYTES or (group.file != file).any():
            super()._do(group, into, opened, pending)
            return
        assert self._pinned is not None and isinstance(expected, FileId)
        path = group.paths[file]
        try:
            pinned = self._pinned.get(path, expected)
            if pinned is not None and (group.offset + group.nbytes).max() <= expected.size:
                pinned.copy(group.offset.tolist(), group.parts(into), self.device)
                files.check_identity(expected, FileId.of(path), path)
                opened.recount([file], -len(group))
                return
        except OSError as e:
            opened.recount([file], -len(group))
            pending.fail(file, naming_file(e, path))
            return
        pieces = [group]
        if group.nbytes.max() > self.piece_bytes:  # it was registered when the reads were cut
            small = plan.cut(group, self.piece_bytes)
            opened.recount([file], len(small) - len(group))
            pieces = [small[n : n + 1] for n in range(len(small))]
        for piece in pieces:
            super()._do(piece, into, opened, pending)
        if not pending.failed(file):
            self._pinned.offer(path, expected)

    def _suits_ring(self, reads: Reads) -> bool:
        return not self.direct_io and bool((np.diff(reads.file) > 0).all())  # one read per file

    def _reads_per_group(self, pieces: Reads) -> int:
        if self.is_slow and self._suits_ring(pieces) and ring_of_this_thread():
            return self.group_reads  # a ring reads them at once
        return super()._reads_per_group(pieces)

    def _read_group(self, group: Reads, into: Sequence[torch.Tensor], opened: OpenFiles, pending: Pending) -> None:
        ring = ring_of_this_thread() if len(group) > 1 else None
        if ring is not None and self._suits_ring(group):
            if self.latency.is_unknown or (self.is_slow and self.latency.is_due()):
                super()._read_group(group[:1], into, opened, pending)
                group = group[1:]
            at_once, begin = self.is_slow, time.perf_counter()
            left = read_small_files(ring, group, into, at_once=at_once)
            if not at_once:
                self.latency.note((time.perf_counter() - begin) / len(group))
            opened.recount(np.delete(group.file, left).tolist(), -1)
            if not len(left):
                return
            group = group[left]  # plain calls find out what is wrong
        super()._read_group(group, into, opened, pending)

    def map(self, reads: Reads) -> list[torch.Tensor] | None:
        if self.device.type != "cpu" or self.direct_io:
            return None
        path, expected, ranges = reads.paths[0], reads.expected[0], reads.ranges
        fd = files.open_file(path, expected)
        try:
            size = expected.size if isinstance(expected, FileId) else os.fstat(fd).st_size
            for offset, nbytes in ranges:
                if nbytes and offset + nbytes > size:  # touching a mapped page beyond the end would kill the process
                    raise files.ends_early(size, offset + nbytes - size, path)
            return [self._map_one(fd, offset, nbytes, size, path) for offset, nbytes in ranges]
        finally:
            os.close(fd)

    def _map_one(self, fd: int, offset: int, nbytes: int, size: int, path: str) -> torch.Tensor:
        # A range with an unaligned start is read instead, so that the tensor can be viewed as any dtype.
        if nbytes >= limits.MAP_BYTES and offset % ALIGNMENT == 0:
            with suppress(OSError):  # vm.max_map_count is used up, or the file system maps nothing: read instead
                mapped = map_privately(fd, offset, nbytes, size)
                stages.count(stages.MAPPED, nbytes)
                return mapped
        stages.count(stages.HOST, nbytes)
        dest = torch.empty(nbytes, dtype=torch.uint8)
        with files.naming(path):
            self._fill(_Handle(fd, -1), path, offset, dest)
        return dest

    def close(self) -> None:
        super().close()
        if self._pinned is not None:
            self._pinned.close()

    def describe(self) -> dict[str, Any]:
        pinned = {} if self._pinned is None else {"pinned_limit": self._pinned.nbytes, "pinned": self._pinned.used}
        small = "io_uring" if ring_of_this_thread() and not self.direct_io else "one call after another"
        return {**super().describe(), "direct_io": self.direct_io, "small_files": small, **pinned}
