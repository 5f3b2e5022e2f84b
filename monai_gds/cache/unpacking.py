"""Puts tensors in tiles together again on the CPU, whole or box by box.

Used by :mod:`monai_gds.cache.reading`. Tiles are decoded in slabs, each by one native call: what a step writes, the
next one finds in the processor's cache.

    streams ─▶ codec and shuffle (blosc) ─▶ tiles ─▶ the voxels of each box ─▶ values of the palette ─▶ tensor
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from monai_gds import huge_pages, limits
from monai_gds.cache import blosc
from monai_gds.cache.boxes import Box, last_three, whole_box
from monai_gds.cache.tiles import PATTERNS, Layout, Selection, Tiles
from monai_gds.errors import DamagedRecord

__all__ = ["unpack", "unpack_boxes"]


def unpack(tiles: Tiles, streams: np.ndarray) -> torch.Tensor:
    """The whole tensor.

    Args:
        tiles: of the tensor.
        streams: 1-D uint8, the bytes of the entry; not changed.

    Returns:
        CPU tensor of the layout's dtype and shape.

    Raises:
        DamagedRecord: a stream is not what was compressed, or there is not enough memory for the tensor.
        MonaiGdsError: Blosc2 is missing.
    """
    layout = tiles.layout
    try:
        out = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
    except (MemoryError, RuntimeError) as e:  # tiles of equal bytes take no room, so any record can declare this
        raise DamagedRecord(f"its tensor of shape {layout.shape} does not fit into memory: {e}") from e
    huge_pages.prefer(out)  # 315 MB took 390 to 460 ms instead of 490 to 520
    region = out.view(PATTERNS[layout.dtype.itemsize]).view(-1, *last_three(layout.shape))
    every = np.arange(layout.count)
    unpacker = _Unpacker(tiles, every, [whole_box(layout.shape)], [region])
    starts, sizes = tiles.starts, tiles.sizes.astype(np.int64)
    for begin, end in _slabs(layout, every):
        some, at = sizes[begin:end], starts[begin:end]
        head, first = blosc.head_bytes(end - begin), int(at[0])
        stop = int((at + np.maximum(some, 0)).max())
        buffer = unpacker.scratch.take("streams", (head + 16 + stop - first,), "u1")
        buffer[head + 16 :] = streams[first:stop]
        unpacker.slab(begin, end, buffer, at - first + head + 16)
    return out


def unpack_boxes(
    tiles: Tiles, selection: Selection, buffer: np.ndarray, boxes: Sequence[Box], regions: Sequence[torch.Tensor]
) -> None:
    """Fills the memory of boxes.

    Args:
        tiles: of the tensor.
        selection: the tiles that the boxes touch.
        buffer: 1-D uint8, into which their streams were read. It is overwritten.
        boxes: which voxels.
        regions: where those of each box go: CPU tensors of bit patterns, (leading, x, y, z).

    Raises:
        DamagedRecord: a stream is not what was compressed.
        MonaiGdsError: Blosc2 is missing.
    """
    unpacker = _Unpacker(tiles, selection.tiles, boxes, regions)
    sizes, starts = selection.sizes, selection.starts
    for begin, end in _slabs(tiles.layout, selection.tiles):
        some, at = sizes[begin:end], starts[begin:end]
        streams = some > 0
        skip, stop = 0, blosc.head_bytes(end - begin)  # the room at the front
        if streams.any():  # what lies before the first stream of a slab is that room, or streams that were decoded
            skip = int(at[streams][0]) - stop - 16
            stop = int((at + some)[streams][-1])
        unpacker.slab(begin, end, buffer[skip:stop], at - skip)


class _Unpacker:
    """Decodes slabs of some tiles, and fills boxes with their voxels.

    With NumPy: torch divides its work among threads that spin while they wait for one another. With other processes on
    both of two cores that took ten times as long.
    """

    def __init__(
        self, tiles: Tiles, selected: np.ndarray, boxes: Sequence[Box], regions: Sequence[torch.Tensor]
    ) -> None:
        self.scratch = _Scratch()
        self._tiles, self._selected = tiles, selected
        self._boxes, self._regions = boxes, [region.numpy() for region in regions]
        self._unsigned = f"u{tiles.layout.packed_dtype.itemsize}"

    def slab(self, begin: int, end: int, buffer: np.ndarray, starts: np.ndarray) -> None:
        """Decodes the selected tiles from ``begin`` to ``end``, a slab."""
        layout, which = self._tiles.layout, self._selected[begin:end]
        shape = (end - begin, math.prod(layout.tile))
        decoded = self.scratch.take("tiles", shape, self._unsigned)
        sizes = self._tiles.sizes[which].astype(np.int64)
        blosc.decompress(buffer, starts, sizes, layout.codec, torch.from_numpy(decoded))
        _, rows, columns, deep = layout.grid
        first, last = int(which[0]) // deep, int(which[-1]) // deep
        lead, x = divmod(first // columns, rows)
        x_tiles = slice(x, last // columns % rows + 1)
        # A slab of several rows of axis -3 holds all of their selected tiles.
        y_tiles = slice(first % columns, last % columns + 1) if x_tiles.stop == x + 1 else slice(0, columns)
        for box, region in zip(self._boxes, self._regions, strict=True):
            x_voxels = _within(box[0], x_tiles, layout.tile[0])
            y_voxels = _within(box[1], y_tiles, layout.tile[1])
            if x_voxels.start < x_voxels.stop and y_voxels.start < y_voxels.stop:
                inside = region[
                    lead, x_voxels.start - box[0].start : x_voxels.stop - box[0].start,
                    y_voxels.start - box[1].start : y_voxels.stop - box[1].start,
                ]  # fmt: skip
                self._fill(decoded, which, lead, (x_voxels, y_voxels, box[2]), inside)

    def _fill(self, decoded: np.ndarray, which: np.ndarray, lead: int, part: Box, region: np.ndarray) -> None:
        """Writes the voxels of a part of a box, which lies within the slab."""
        deep, palette = self._tiles.layout.tile[2], self._tiles.values
        lines = _lines(self._tiles.layout, which, lead, part)
        skip = part[2].start % deep
        step = max(1, limits.FILL_VOXELS // (lines[0].size * deep))
        for begin in range(0, len(lines), step):
            some = lines[begin : begin + step]
            voxels = self.scratch.take("voxels", (some.size, deep), self._unsigned)
            # "clip", as "wrap" below, only spares NumPy a copy for the case that an index is out of range.
            np.take(decoded.reshape(-1, deep), some.reshape(-1), 0, voxels, "clip")
            if palette is not None and int(voxels.max()) >= len(palette):
                raise DamagedRecord("a tile refers to a value that is not in its palette")
            inside = voxels.reshape(*some.shape[:2], -1)[:, :, skip : skip + region.shape[2]]
            self._write(inside, region[begin : begin + step])

    def _write(self, voxels: np.ndarray, region: np.ndarray) -> None:
        """Writes the values of some voxels."""
        palette, divisor = self._tiles.values, self._tiles.divisor
        if palette is None:
            np.copyto(region.view(self._unsigned), voxels)
        elif divisor is not None:  # half the time of looking values up
            numbers = region.view(palette.numpy().dtype)
            np.copyto(numbers, voxels, casting="unsafe")
            if divisor != 1:
                np.divide(numbers, numbers.dtype.type(divisor), out=numbers)
        else:
            wide = self.scratch.take("wide", voxels.shape, "i8")
            np.copyto(wide, voxels)
            found = self.scratch.take("values", voxels.shape, region.dtype)
            np.take(palette.view(PATTERNS[palette.element_size()]).numpy(), wide, 0, found, "wrap")
            np.copyto(region, found)


def _lines(layout: Layout, which: np.ndarray, lead: int, part: Box) -> np.ndarray:
    """Where the voxels of a part of a box lie in decoded tiles: which lines along the last axis.

    Args:
        layout: of the tensor.
        which: tiles that were decoded, in this order.
        lead: index of the leading axes.
        part: of a box.

    Returns:
        Index of the lines that hold the voxels, int64 (x, y, tiles along the last axis).
    """
    _, rows, columns, deep = layout.grid
    x, y, z = (np.arange(voxels.start // t, -(-voxels.stop // t)) for voxels, t in zip(part, layout.tile, strict=True))
    tiles = ((lead * rows + x[:, None, None]) * columns + y[:, None]) * deep + z
    places = np.searchsorted(which, tiles) * (layout.tile[0] * layout.tile[1])
    along_x, along_y = (np.arange(part[i].start, part[i].stop) for i in (0, 1))
    lines: np.ndarray = places.take(along_x // layout.tile[0] - x[0], 0).take(along_y // layout.tile[1] - y[0], 1)
    lines += (along_x % layout.tile[0] * layout.tile[1])[:, None, None] + (along_y % layout.tile[1])[:, None]
    return lines


class _Scratch:
    """Memory that is used again for each slab: fresh memory costs a fault per page."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Memory of any content, as one of NumPy's dtypes; the last one of this name is used no more."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if name not in self._held or len(self._held[name]) < nbytes:
            self._held[name] = np.empty(nbytes, np.uint8)
        memory: np.ndarray = self._held[name][:nbytes].view(dtype)
        return memory.reshape(shape)


def _within(voxels: slice, tiles: slice, edge: int) -> slice:
    """Those of the voxels that lie in tiles of this edge."""
    return slice(max(voxels.start, tiles.start * edge), min(voxels.stop, tiles.stop * edge))


def _slabs(layout: Layout, tiles: np.ndarray) -> Iterator[tuple[int, int]]:
    """Divides tiles into slabs of about :data:`limits.SLAB_BYTES`: where each begins and ends.

    A slab has all tiles of some rows of axis -3, or some of the tiles of one of them: at least those of one row along
    the last axis.
    """
    _, rows, columns, deep = layout.grid
    most = max(1, limits.SLAB_BYTES // layout.tile_bytes)
    lines = tiles // deep
    planes = lines // columns
    begin = end = 0
    while begin < len(tiles):
        plane = planes[begin]
        plane_end, lead_end = np.searchsorted(planes, [plane + 1, plane // rows * rows + rows])
        stop = begin + most
        if plane_end > stop:  # a part of a plane
            end = max(np.searchsorted(lines, lines[stop]), np.searchsorted(lines, lines[begin] + 1))
        elif end and planes[end - 1] == plane:  # the last part of one
            end = plane_end
        else:
            end = min(lead_end, np.searchsorted(planes, planes[stop]) if stop < len(tiles) else len(tiles))
        yield begin, int(end)
        begin = int(end)
