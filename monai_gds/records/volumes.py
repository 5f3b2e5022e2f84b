"""Boxes of tensors in tiles: which tiles they need, where the streams of these lie, and what they unpack to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from monai_gds.errors import DamagedRecord
from monai_gds.records.heads import RecordHead
from monai_gds.storage import Reads
from monai_gds.storage.memory import pooled_volume
from monai_gds.tiles.boxes import Arrangement, Box, arrange, whole_box
from monai_gds.tiles.tiles import Selection, Tiles
from monai_gds.tiles.unpacking import unpack_boxes


class Volume(NamedTuple):
    """Voxels of a tensor in boxes that were read. The rest of its memory is undefined.

    Attributes:
        data: the memory, contiguous, of the tensor's dtype.
        arrangement: where the boxes lie in it.
    """

    data: torch.Tensor
    arrangement: Arrangement

    def place(self, offset: int) -> int:
        """The offset in the memory of an element within the boxes, given that in the whole tensor, contiguous.

        The strides of a view are those that it has in the whole tensor.

        Raises:
            ValueError: the element is in no box.
        """
        return self.arrangement.place(offset)

    def whole(self) -> torch.Tensor:
        """The whole tensor, contiguous, if it was read as one box.

        Raises:
            ValueError: it was not.
        """
        if not self.arrangement.is_whole:
            raise ValueError(f"only boxes of this tensor of shape {self.arrangement.shape} were read: take views")
        return self.data.view(self.arrangement.shape)


class Whole(NamedTuple):
    """A whole tensor, contiguous. Has :class:`Volume`'s places."""

    data: torch.Tensor

    def place(self, offset: int) -> int:
        """The offset in the tensor's memory of an element of the tensor."""
        return int(self.data.storage_offset()) + offset

    def whole(self) -> torch.Tensor:
        """The tensor."""
        return self.data


class Part(NamedTuple):
    """The part of one tensor that is read."""

    name: str
    entry: int  # which of the record's tensors
    tiles: Tiles
    boxes: Sequence[Box]
    arrangement: Arrangement
    selection: Selection

    @classmethod
    def of(cls, name: str, head: RecordHead, boxes: Sequence[Box], on_device: bool) -> Part:
        """The part of a tensor to read for the voxels of some boxes."""
        tiles = head.tiles[name]
        entry = next(i for i, (other, _, _) in enumerate(head.table.tensors) if other == name)
        shape = tiles.layout.shape
        # On a device tiles are placed whole, and memory that was not touched before costs nothing.
        arrangement = arrange(shape, tiles.layout.dtype.itemsize, [whole_box(shape)] if on_device else boxes)
        return cls(name, entry, tiles, boxes, arrangement, tiles.select(tiles.touched(boxes)))

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of the boxes."""
        return self.arrangement.numel * self.tiles.layout.dtype.itemsize

    def unpack(self, streams: np.ndarray) -> Volume:
        """The boxes, unpacked by the CPU.

        Raises:
            DamagedRecord: they cannot be unpacked, or do not fit into memory.
        """
        layout = self.tiles.layout
        try:
            flat = pooled_volume(self.nbytes).view(layout.dtype)
        except (MemoryError, RuntimeError) as e:  # tiles of equal bytes take no room, so any record can declare this
            raise DamagedRecord(f"boxes of its tensor of shape {layout.shape} do not fit into memory: {e}") from e
        unpack_boxes(self.tiles, self.selection, streams, self.boxes, self.arrangement, flat)
        return Volume(flat, self.arrangement)


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
