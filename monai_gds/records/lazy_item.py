"""Items whose tensors in tiles are read box by box. Begun by :mod:`monai_gds.records.reader`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from monai_gds.base import stages
from monai_gds.errors import DamagedRecord
from monai_gds.records.heads import RecordHead, TensorForm, TensorTable
from monai_gds.records.pending_item import Begun, Reader, is_of_record, tensors_of, verify_entries
from monai_gds.storage import Pending, Reads
from monai_gds.storage.memory import pooled_volume
from monai_gds.tiles.boxes import Arrangement, Box, arrange, whole_box
from monai_gds.tiles.device import Unpacking
from monai_gds.tiles.runs import Runs, RunTable
from monai_gds.tiles.tiles import PATTERNS, Selection, Tiles
from monai_gds.tiles.unpacking import unpack_boxes

__all__ = ["BoxReader", "LazyItem", "Part", "Volume", "Volumes", "reads_of"]

T = TypeVar("T")

#: Elements that runs found, by the name of the label, with the index of their value.
_Found: TypeAlias = "dict[str, dict[int, int]]"


class BoxReader(Reader, Protocol):
    """What a lazy item asks of the reader that began it, :class:`monai_gds.records.reader.RecordReader`."""

    device: torch.device

    def begin(self, path: str, head: RecordHead, table: TensorTable) -> tuple[Pending, Unpacking | None, bool]: ...

    def begin_boxes(self, path: str, head: RecordHead, parts: Sequence[Part]) -> tuple[Pending, Unpacking | None]: ...

    def check_tiles(
        self, path: str, head: RecordHead, tiles: Tiles, chosen: Selection, streams: np.ndarray
    ) -> None: ...

    def run_block(self, path: str, head: RecordHead, name: str, block: int) -> tuple[np.ndarray, np.ndarray]: ...

    def unpacks_there(self) -> bool: ...

    def usable(self, path: str, get: Callable[[], T]) -> T | None: ...


class LazyItem:
    """A record whose tensors in tiles are read box by box, once it is known which boxes are needed.

    Attributes:
        tiled: dtype and shape of each tensor in tiles that comes as a tensor, by name. What comes as a NumPy array, is
            complex or requires a gradient is not among them: it is read whole, with all that is not in tiles.
        nbytes: bytes of the reads begun so far, and of the memory of what they are unpacked to.
    """

    __slots__ = ("_error", "_found", "_head", "_path", "_reader", "_rest", "_verify", "nbytes", "tiled")

    def __init__(self, reader: BoxReader, path: str, begun: Begun) -> None:
        self._reader, self._path, self._head, self._verify = reader, path, begun.head, begun.verify
        self._rest: tuple[Pending, Unpacking | None] | None = begun.pending, begun.unpacking
        self.tiled: Mapping[str, TensorForm] = begun.head.tiled
        self.nbytes = begun.head.rest.reads.total
        self._error: Exception | None = None  # of its runs
        self._found: _Found = {}

    @property
    def ready(self) -> bool:
        """Whether :meth:`assemble` has nothing to wait for."""
        return self._rest is None or self._rest[0].done

    def assemble(self, tensors: Mapping[str, torch.Tensor], item: Any = None) -> Any:
        """Puts the item together, after waiting for the tensors that are not in :attr:`tiled`.

        Args:
            tensors: in place of those in :attr:`tiled`, by name.
            item: the dataset's own item, from which values are taken that no record can store.

        Returns:
            ``(item,)``, which shares nothing with that of another call; or None if the record turned out to be
            unusable, which has been reported, or was replaced or deleted.
        """
        return self._reader.usable(self._path, lambda: (self._head.recipe({**self._others(), **tensors}, item),))

    def _others(self) -> dict[str, torch.Tensor]:
        head = self._head
        begun, self._rest = self._rest, None
        if begun is None:  # somebody may have changed the tensors of the first call
            pending, unpacking, self._verify = self._reader.begin(self._path, head, head.rest)
        else:
            pending, unpacking = begun
        stages.enter("reading")
        raw = pending.wait()[: len(head.rest.tensors)]  # where there are none, one read of nothing
        stages.enter("decoding")
        if unpacking is not None:
            unpacking.check()
        if self._verify:
            verify_entries(head, head.rest, raw, unpacking)
            self._reader.mark_verified(self._path, head.file, whole=False)
        return tensors_of(head, head.rest, raw, unpacking)

    @property
    def runs(self) -> Mapping[str, Runs]:
        """The runs of those labels in :attr:`tiled` that have any, by name. Finding an element reads a few kB, at once.

        If that raises, what :meth:`read` returns afterwards gives None, and the record is reported.
        """
        return {
            name: Runs(table, partial(self._run_block, name), self._found.setdefault(name, {}).__setitem__)
            for name, (table, _) in self._head.runs.items()
        }

    def _run_block(self, name: str, block: int) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self._reader.run_block(self._path, self._head, name, block)
        except Exception as e:
            if is_of_record(e):
                self._error = e
            raise

    def read(self, boxes: Mapping[str, Sequence[Box]]) -> Volumes:
        """Starts reading boxes of tensors in :attr:`tiled`.

        Args:
            boxes: which voxels, by the name of the tensor; none of them empty.
        """
        stages.enter("reading")
        if self._error is not None:
            failed = Pending.completed([], self._reader.device, self._error)
            return Volumes(self._reader, self._path, self._head, [], failed, None, {})
        on_device = self._reader.unpacks_there()
        parts = [part_of(name, self._head, wanted, on_device) for name, wanted in boxes.items() if wanted]
        pending, unpacking = self._reader.begin_boxes(self._path, self._head, parts)
        self.nbytes += sum(part.selection.nbytes + part.nbytes for part in parts)
        return Volumes(self._reader, self._path, self._head, parts, pending, unpacking, self._found)


class Volume(NamedTuple):
    """Voxels of a tensor in boxes that were read. The rest of its memory is undefined.

    Attributes:
        data: the memory, 1-D, of the tensor's dtype.
        arrangement: where the boxes lie in it.
    """

    data: torch.Tensor
    arrangement: Arrangement

    def view(self, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
        """A view within the boxes, given as one of the whole tensor, contiguous and at the front of its memory.

        Views share memory if those of the whole tensor did. A view has the strides that it would have there, in
        elements, as is the offset of its first one.

        Raises:
            ValueError: its first element is in no box.
        """
        if 0 in size:
            return self.data.new_empty(0).as_strided(size, stride)
        return self.data.as_strided(size, stride, self.arrangement.place(offset))

    def whole(self) -> torch.Tensor:
        """The whole tensor, contiguous, if it was read as one box.

        Raises:
            ValueError: it was not.
        """
        if not self.arrangement.is_whole:
            raise ValueError(f"only boxes of this tensor of shape {self.arrangement.shape} were read: take views")
        return self.data.view(self.arrangement.shape)


class Part(NamedTuple):
    """The part of one tensor that is read."""

    name: str
    entry: int  # which of the record's tensors
    tiles: Tiles
    boxes: Sequence[Box]
    arrangement: Arrangement
    selection: Selection

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of the boxes."""
        return self.arrangement.numel * self.tiles.layout.dtype.itemsize


def part_of(name: str, head: RecordHead, boxes: Sequence[Box], on_device: bool) -> Part:
    """The part of a tensor to read for the voxels of some boxes."""
    tiles = head.tiles[name]
    entry = next(i for i, (other, _, _) in enumerate(head.table.tensors) if other == name)
    shape = tiles.layout.shape
    # On a device tiles are placed whole, and memory that was not touched before costs nothing.
    arrangement = arrange(shape, tiles.layout.dtype.itemsize, [whole_box(shape)] if on_device else boxes)
    return Part(name, entry, tiles, boxes, arrangement, tiles.select(tiles.touched(boxes)))


class Volumes:
    """Boxes being read of the tensors of a record."""

    def __init__(
        self, reader: BoxReader, path: str, head: RecordHead, parts: Sequence[Part], pending: Pending,
        unpacking: Unpacking | None, runs: _Found,
    ) -> None:  # fmt: skip
        self._reader, self._path, self._head, self._parts, self._runs = reader, path, head, parts, runs
        self._unpacking = unpacking
        self._pending: Pending | None = pending
        self._found: dict[str, Volume] | None = None
        self._lock = threading.Lock()

    def wait(self) -> dict[str, Volume] | None:
        """Waits for the reads, and unpacks what was read on the CPU. Tensors may be used on the current stream at once.

        Returns:
            By name, memory of the tensor's dtype on the target device. None if the record turned out to be unusable,
            which has been reported, or was replaced or deleted meanwhile: compute the item, or start anew.
        """
        with self._lock:
            if self._pending is not None:
                self._found = self._reader.usable(self._path, self._unpacked)
                self._pending = None
            return self._found

    def _unpacked(self) -> dict[str, Volume]:
        assert self._pending is not None
        stages.enter("reading")
        raw = self._pending.wait()
        stages.enter("decoding")
        if self._unpacking is not None:
            self._unpacking.check()
            return {
                part.name: Volume(data.view(-1), part.arrangement) for part, data in zip(self._parts, raw, strict=True)
            }
        found = {}
        for part, data in zip(self._parts, raw, strict=True):
            self._reader.check_tiles(self._path, self._head, part.tiles, part.selection, data.numpy())
            volume = _unpacked_boxes(part, data.numpy())
            if part.name in self._runs:
                _check_found(volume, self._head.runs[part.name][0], self._runs[part.name])
            found[part.name] = volume._replace(data=volume.data.to(self._reader.device))
        return found


def _check_found(volume: Volume, table: RunTable, found: Mapping[int, int]) -> None:
    """Compares elements that runs found with the voxels themselves, as far as these were read.

    Raises:
        DamagedRecord: one has another value.
    """
    pattern = PATTERNS[table.dtype.itemsize]
    voxels, values = volume.data.view(pattern), table.values.view(pattern)
    for element, value in list(found.items()):
        try:
            place = volume.arrangement.place(element)
        except ValueError:  # in none of the boxes
            continue
        if voxels[place] != values[value]:
            raise DamagedRecord("its runs do not hold the values of its voxels")


def _unpacked_boxes(part: Part, streams: np.ndarray) -> Volume:
    layout, arrangement = part.tiles.layout, part.arrangement
    try:
        flat = pooled_volume(part.nbytes).view(layout.dtype)
    except (MemoryError, RuntimeError) as e:  # tiles of equal bytes take no room, so any record can declare this
        raise DamagedRecord(f"boxes of its tensor of shape {layout.shape} do not fit into memory: {e}") from e
    unpack_boxes(part.tiles, part.selection, streams, part.boxes, arrangement, flat)
    return Volume(flat, arrangement)


def reads_of(path: str, head: RecordHead, parts: Sequence[Part]) -> Reads:
    """The reads of the tiles of some tensors, each into a buffer as :meth:`Tiles.select` lays it out."""
    chosen = [part.selection for part in parts]
    if not any(len(s.offset) for s in chosen):  # no tile has a stream: a read of nothing, which opens the file
        sizes = np.array([s.nbytes for s in chosen], np.int64)
        none = np.zeros(1, np.int64)
        return Reads((path,), (head.file,), none, none, none, none, none, sizes)
    entries = [head.table.reads.offset[part.entry] for part in parts]
    offset = np.concatenate([s.offset + at for s, at in zip(chosen, entries, strict=True)])
    length, start = (np.concatenate([getattr(s, which) for s in chosen]) for which in ("length", "dest"))
    dest = np.repeat(np.arange(len(chosen)), [len(s.offset) for s in chosen])
    sizes = np.array([s.nbytes for s in chosen], np.int64)
    return Reads((path,), (head.file,), np.zeros_like(offset), offset, length, dest, start, sizes)
