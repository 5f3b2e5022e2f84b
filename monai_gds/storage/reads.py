"""``Reads``: the parts of files to read, and where each part goes. Arrays only, no I/O."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from monai_gds.storage.files import Expected

P = TypeVar("P")


class Row(NamedTuple):
    """One read, as Python ints; see :class:`Reads`."""

    file: int
    offset: int
    nbytes: int
    dest: int
    start: int
    room: int


class Reads:
    """``n`` reads of ``m`` files into ``k`` destinations.

    Reads are ordered by destination and, within one, by where they begin in it. Bytes between two reads of one
    destination, and after the last, may be overwritten: if parts begin at multiples of ``ALIGNMENT``, a backend that
    transfers whole blocks needs no bounce buffer.

    Attributes:
        paths: the files (m).
        expected: what each of them must be: a :class:`FileId`, a size in bytes, or None (m).
        file: index of the file of each read, int64 (n,).
        offset: first byte within the file, int64 (n,). Any value, aligned or not.
        nbytes: bytes to read, int64 (n,). Zero opens the file and reads nothing.
        dest: index of the destination, int64 (n,).
        start: first byte within the destination, int64 (n,).
        sizes: bytes of each destination, int64 (k,).
        room: bytes after each read in its destination that may be overwritten, int64 (n,); see :meth:`with_room`.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds import open_storage
        >>> _ = Path("file.bin").write_bytes(bytes(range(100)))
        >>> head, tail = open_storage("posix", "cpu").load(Reads.of("file.bin", [(0, 2), (97, 3)])).wait()
        >>> tail
        tensor([97, 98, 99], dtype=torch.uint8)
    """

    __slots__ = (
        "_checked", "_plans", "_ranges", "_room_is_known", "dest", "expected", "file", "nbytes", "offset", "paths",
        "room", "sizes", "start",
    )  # fmt: skip

    def __init__(
        self,
        paths: Sequence[str],
        expected: Sequence[Expected],
        file: np.ndarray,
        offset: np.ndarray,
        nbytes: np.ndarray,
        dest: np.ndarray,
        start: np.ndarray,
        sizes: np.ndarray,
        room: np.ndarray | None = None,
    ) -> None:
        self.paths, self.expected = paths, expected
        self.file, self.offset, self.nbytes, self.dest, self.start = file, offset, nbytes, dest, start
        self.sizes = sizes
        self.room = np.zeros_like(file) if room is None else room
        self._room_is_known = room is not None
        self._ranges: list[tuple[int, int]] | None = None
        self._plans: dict[Any, Any] | None = None
        self._checked = False

    @classmethod
    def of(cls, path: str, ranges: Sequence[tuple[int, int]], expected: Expected = None) -> Reads:
        """Ranges of one file, each into its own destination.

        Args:
            path: the file.
            ranges: ``(offset, nbytes)`` each.
            expected: what the file must be.

        Raises:
            ValueError: a range is negative.
        """
        offset, nbytes = np.array(ranges, np.int64).reshape(-1, 2).T
        if len(offset) and min(offset.min(), nbytes.min()) < 0:
            raise ValueError(f"{path}: negative offset or length in the ranges {list(ranges)}")
        zeros = np.zeros_like(offset)
        reads = cls((path,), (expected,), zeros, offset, nbytes, np.arange(len(offset)), zeros, nbytes)
        reads._checked = True
        reads._ranges = list(zip(offset.tolist(), nbytes.tolist(), strict=True))
        return reads

    @classmethod
    def of_files(
        cls,
        paths: Sequence[str],
        sizes: np.ndarray,
        starts: np.ndarray,
        total: int,
        *,
        offsets: np.ndarray | int = 0,
        expected: Sequence[Expected] | None = None,
    ) -> Reads:
        """One part of each of many files, all into one destination: a batch of images, for instance.

        Args:
            paths: the files (m).
            sizes: bytes to read of each file, int64 (m,).
            starts: where in the destination each part begins, int64 (m,), in rising order.
            total: bytes of the destination.
            offsets: where in its file each part begins.
            expected: what each file must be. The size of the whole file catches one that has become shorter or longer;
                if at least one byte is free after each part in the destination, some backends notice that without a
                system call of its own.

        Raises:
            ValueError: the parts overlap, are out of order, or do not fit.
        """
        count = len(paths)
        zeros = np.zeros(count, np.int64)
        reads = cls(
            paths, expected if expected is not None else [None] * count, _counting(count), zeros + offsets, sizes,
            zeros, starts, np.array([total], np.int64),
        )  # fmt: skip
        reads.check()
        return reads

    @classmethod
    def join(cls, several: Sequence[Reads]) -> Reads:
        """Several reads as one: files and destinations are those of the first, then those of the second, and so on."""
        if len(several) == 1:
            return several[0]
        files = np.cumsum([0, *(len(r.paths) for r in several)])
        dests = np.cumsum([0, *(len(r.sizes) for r in several)])
        counts = [len(r.file) for r in several]

        def all_of(name: str) -> np.ndarray:
            return np.concatenate([np.empty(0, np.int64), *(getattr(r, name) for r in several)])

        return cls(
            [path for r in several for path in r.paths], [e for r in several for e in r.expected],
            all_of("file") + np.repeat(files[:-1], counts), all_of("offset"), all_of("nbytes"),
            all_of("dest") + np.repeat(dests[:-1], counts), all_of("start"), all_of("sizes"),
        )  # fmt: skip

    def at(self, path: str, expected: Expected) -> Reads:
        """The same reads of another file; for reads of one file. They share their arrays."""
        other = Reads.__new__(Reads)  # every hit comes here
        other.paths, other.expected = (path,), (expected,)
        other.file, other.offset, other.nbytes, other.dest = self.file, self.offset, self.nbytes, self.dest
        other.start, other.sizes, other.room, other._ranges = self.start, self.sizes, self.room, self._ranges
        other._room_is_known, other._checked = self._room_is_known, self._checked
        if self._plans is None:
            self._plans = {}
        other._plans = self._plans
        return other

    def check(self) -> None:
        """Raises ValueError unless reads are in order, and within their files and destinations. Once per instance.

        Backends take addresses from these arrays, so a wrong one would write into memory of others.
        """
        if self._checked or not len(self):
            return
        end = self.start + self.nbytes
        fits = min(self.offset.min(), self.nbytes.min(), self.start.min()) >= 0 and (end <= self.sizes[self.dest]).all()
        same = self.dest[1:] == self.dest[:-1]
        if not fits or (np.diff(self.dest) < 0).any() or (same & (self.start[1:] < end[:-1])).any():
            named = f"{self.paths[0]}: " if len(self.paths) == 1 else ""
            raise ValueError(
                f"{named}{len(self)} reads overlap, are out of order, negative, or do not fit into their destinations"
            )
        self._checked = True

    def planned(self, key: Any, make: Callable[[], P]) -> P:
        """Returns what ``make`` returns, remembered for all reads that :meth:`at` makes of the same ones.

        ``key`` is all that the plan depends on besides these reads; ``make`` plans without regard to paths.
        """
        if self._plans is None:
            return make()
        if key not in self._plans:
            self._plans[key] = make()
        found: P = self._plans[key]
        return found

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, which: slice | np.ndarray) -> Reads:
        """Some of the reads, of the same files into the same destinations."""
        if isinstance(which, slice) and which.stop == len(self) and not which.start:
            return self
        return Reads(
            self.paths, self.expected, self.file[which], self.offset[which], self.nbytes[which], self.dest[which],
            self.start[which], self.sizes, self.room[which] if self._room_is_known else None,
        )  # fmt: skip

    def with_room(self, into: Sequence[torch.Tensor]) -> Reads:
        """The same reads with the room after each: up to the next one, or to the end of the destination.

        It stays as it is when reads are then divided or put into another order: only all of them show what is free.
        """
        if self._room_is_known or not len(self):
            return self
        ends = np.array([tensor.numel() for tensor in into], np.int64)[self.dest]
        if len(self) > 1:
            np.copyto(ends[:-1], self.start[1:], where=self.dest[1:] == self.dest[:-1])
        return Reads(
            self.paths, self.expected, self.file, self.offset, self.nbytes, self.dest, self.start, self.sizes,
            ends - self.start - self.nbytes,
        )  # fmt: skip

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """``(offset, nbytes)`` of each read, as Python ints."""
        if self._ranges is None:
            self._ranges = list(zip(self.offset.tolist(), self.nbytes.tolist(), strict=True))
        return self._ranges

    @property
    def rows(self) -> list[Row]:
        """The reads one by one."""
        columns = (self.file, self.offset, self.nbytes, self.dest, self.start, self.room)
        return list(map(Row, *(column.tolist() for column in columns)))

    def per_file(self) -> list[int]:
        """How many reads there are of each file."""
        if len(self.paths) == 1:
            return [len(self)]
        counts: list[int] = np.bincount(self.file, minlength=len(self.paths)).tolist()
        return counts

    @property
    def total(self) -> int:
        """Bytes of all reads together."""
        return int(self.nbytes.sum())

    def parts(self, into: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The part of its destination that each read fills."""
        if len(into) == 1 and len(self) > 1:
            edges = np.empty(2 * len(self) + 2, np.int64)  # where a part begins and ends, in turn
            edges[0], edges[1:-1:2], edges[2:-1:2], edges[-1] = 0, self.start, self.start + self.nbytes, into[0].numel()
            lengths = np.diff(edges)
            if (lengths >= 0).all():
                return list(torch.split(into[0], lengths.tolist())[1::2])  # half the time of slicing
        places = zip(self.dest.tolist(), self.start.tolist(), self.nbytes.tolist(), strict=True)
        return [into[dest][start : start + nbytes] for dest, start, nbytes in places]

    def __repr__(self) -> str:
        return f"Reads({len(self)} of {len(self.paths)} files into {len(self.sizes)} destinations, {self.total} bytes)"


@functools.lru_cache(maxsize=16)
def _counting(count: int) -> np.ndarray:
    """0, 1, 2… Making it again, beside threads that read, took as long as everything else about a batch of images."""
    numbers = np.arange(count)
    numbers.setflags(write=False)
    return numbers


def check_destinations(reads: Reads, into: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raises ValueError unless destinations are 1-D contiguous uint8, large enough, on the CPU or ``device``."""
    if len(into) != len(reads.sizes):
        raise ValueError(f"{len(into)} destinations were given for reads into {len(reads.sizes)}")
    named = f"{reads.paths[0]}: " if len(reads.paths) == 1 else ""
    for tensor, nbytes in zip(into, reads.sizes.tolist(), strict=True):
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.is_meta:
            raise ValueError(
                f"{named}a destination must be a 1-D contiguous uint8 tensor with memory, not {tuple(tensor.shape)} "
                f"{tensor.dtype} with strides {tensor.stride()} on {tensor.device}"
            )
        if tensor.is_cuda and tensor.device != device:
            raise ValueError(f"{named}a destination lies on {tensor.device}, this storage serves {device}")
        if tensor.numel() < nbytes:
            raise ValueError(f"{named}a destination has {tensor.numel()} bytes, the reads fill {nbytes}")
