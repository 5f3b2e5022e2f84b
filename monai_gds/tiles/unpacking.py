"""Puts tensors in tiles together again on the CPU, whole or box by box.

Used by :mod:`monai_gds.records.reader`. Tiles are decoded in slabs, each by one native call: what a step writes, the
next one finds in the processor's cache.

    streams ─▶ codec and shuffle (blosc) ─▶ tiles ─▶ the voxels of each box ─▶ values of the palette ─▶ tensor

Half of the time goes into writing the boxes: their rows are short, and lie in memory that no cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from monai_gds import limits
from monai_gds.errors import DamagedRecord
from monai_gds.storage.memory import pooled_scratch, prefer_huge_pages
from monai_gds.tiles import blosc
from monai_gds.tiles.boxes import Arrangement, Box, arrange, last_three, whole_box
from monai_gds.tiles.codecs import ON_CPU
from monai_gds.tiles.tiles import PATTERNS, Layout, Selection, Tiles


def why_not(codec: str) -> str | None:
    """Why the CPU cannot unpack tiles of a codec here; None if it can."""
    return blosc.why_not() if codec in ON_CPU else f"{codec} is unpacked by GPUs only"


def unpack(tiles: Tiles, streams: np.ndarray) -> torch.Tensor:
    """The whole tensor.

    Args:
        tiles: the tensor's tiles.
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
    prefer_huge_pages(out)  # 315 MB took 390 to 460 ms instead of 490 to 520
    every, boxes = np.arange(layout.count), [whole_box(layout.shape)]
    arrangement = arrange(layout.shape, layout.dtype.itemsize, boxes)
    unpacker = _Unpacker(tiles, every, _regions(boxes, arrangement, out.view(-1)))
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
    tiles: Tiles, selection: Selection, buffer: np.ndarray, boxes: Sequence[Box], arrangement: Arrangement,
    memory: torch.Tensor,
) -> None:  # fmt: skip
    """Fills the memory of boxes.

    Args:
        tiles: the tensor's tiles.
        selection: the tiles that the boxes touch.
        buffer: 1-D uint8, into which their streams were read. It is overwritten.
        boxes: the voxels to fill.
        arrangement: where their voxels go.
        memory: 1-D CPU tensor of the arrangement's size and the layout's dtype. Elements between the boxes may change.

    Raises:
        DamagedRecord: a stream is not what was compressed.
        MonaiGdsError: Blosc2 is missing.
    """
    unpacker = _Unpacker(tiles, selection.tiles, _regions(boxes, arrangement, memory))
    sizes, starts = selection.sizes, selection.starts
    for begin, end in _slabs(tiles.layout, selection.tiles):
        some, at = sizes[begin:end], starts[begin:end]
        streams = some > 0
        skip, stop = 0, blosc.head_bytes(end - begin)  # the room at the front
        if streams.any():  # what lies before the first stream of a slab is that room, or streams that were decoded
            skip = int(at[streams][0]) - stop - 16
            stop = int((at + some)[streams][-1])
        unpacker.slab(begin, end, buffer[skip:stop], at - skip)


class _Region(NamedTuple):
    """A box, and its memory: the bit patterns, (leading, x, y, z)."""

    box: Box
    memory: np.ndarray


def _regions(boxes: Sequence[Box], arrangement: Arrangement, memory: torch.Tensor) -> list[_Region]:
    volume = math.prod(last_three(arrangement.shape))
    patterns = memory.view(PATTERNS[memory.element_size()]).numpy()
    strides = [stride * patterns.itemsize for stride in (volume, *arrangement.strides)]
    regions = []
    for box in boxes:
        size = (math.prod(arrangement.shape) // volume, *(axis.stop - axis.start for axis in box))
        begin = arrangement.place_of(box) * patterns.itemsize
        regions.append(_Region(box, np.ndarray(size, patterns.dtype, patterns.data, begin, strides)))
    return regions


class _Unpacker:
    """Decodes slabs of some tiles, and fills regions with their voxels.

    By NumPy: torch divides its work among threads that spin while they wait for one another. With other processes on
    both of two cores that took ten times as long.
    """

    def __init__(self, tiles: Tiles, selected: np.ndarray, regions: Sequence[_Region]) -> None:
        self.scratch = _Scratch()
        self._tiles, self._selected, self._regions = tiles, selected, regions
        self._unsigned = f"u{tiles.layout.packed_dtype.itemsize}"
        self._lookup: _Lookup | None = None
        if tiles.values is not None and tiles.divisor is None:
            values = tiles.values.view(PATTERNS[tiles.values.element_size()]).numpy()
            self._lookup = _Lookup(values, self._unsigned, sum(r.memory.size for r in regions), self.scratch)

    def slab(self, begin: int, end: int, buffer: np.ndarray, starts: np.ndarray) -> None:
        """Decodes the selected tiles from ``begin`` to ``end``, a slab."""
        layout, which = self._tiles.layout, self._selected[begin:end]
        decoded, firsts = self._decoded(self._tiles.sizes[which].astype(np.int64), buffer, starts)
        _, rows, columns, deep = layout.grid
        first, last = int(which[0]) // deep, int(which[-1]) // deep
        lead, x = divmod(first // columns, rows)
        x_tiles = slice(x, last // columns % rows + 1)
        # A slab of several rows of axis -3 holds all of their selected tiles.
        y_tiles = slice(first % columns, last % columns + 1) if x_tiles.stop == x + 1 else slice(0, columns)
        for box, memory in self._regions:
            x_voxels, y_voxels = _within(box[0], x_tiles, layout.tile[0]), _within(box[1], y_tiles, layout.tile[1])
            if x_voxels.start < x_voxels.stop and y_voxels.start < y_voxels.stop:
                inside = memory[
                    lead, x_voxels.start - box[0].start : x_voxels.stop - box[0].start,
                    y_voxels.start - box[1].start : y_voxels.stop - box[1].start,
                ]  # fmt: skip
                lines = _lines(layout, which, firsts, lead, (x_voxels, y_voxels, box[2]))
                self._fill(decoded, lines, box, inside)

    def _decoded(self, sizes: np.ndarray, buffer: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Decodes tiles, of those of equal bytes one for each value.

        Returns their lines along the last axis, and the index of the first line of each tile.
        """
        layout, streams = self._tiles.layout, sizes > 0
        constants, of_constants = np.unique(sizes[~streams], return_inverse=True)
        places = np.cumsum(streams) - 1
        places[~streams] = np.count_nonzero(streams) + of_constants
        sizes = np.append(sizes[streams], constants)
        decoded = self.scratch.take("tiles", (len(sizes), math.prod(layout.tile)), self._unsigned)
        starts = np.append(starts[streams], np.zeros_like(constants))
        blosc.decompress(buffer, starts, sizes, layout.codec, torch.from_numpy(decoded))
        if layout.values and int(decoded.max()) >= layout.values:
            raise DamagedRecord("a tile refers to a value that is not in its palette")
        return decoded.reshape(-1, layout.tile[2]), places * (layout.tile[0] * layout.tile[1])

    def _fill(self, decoded: np.ndarray, lines: np.ndarray, box: Box, inside: np.ndarray) -> None:
        """Writes the voxels of some lines of a box into a part of its memory."""
        step = max(1, limits.FILL_VOXELS // (lines[0].size * decoded.shape[1]))
        for begin in range(0, len(inside), step):
            self._write(self._voxels(decoded, lines[begin : begin + step], box), inside[begin : begin + step])

    def _voxels(self, decoded: np.ndarray, lines: np.ndarray, box: Box) -> np.ndarray:
        """The voxels of a box in some lines, in memory that the next call uses again."""
        deep = decoded.shape[1]
        voxels = self.scratch.take("voxels", (lines.size, deep), self._unsigned)
        # "clip", as "wrap" below, only spares NumPy a copy for the case that an index is out of range.
        np.take(decoded, lines.reshape(-1), 0, voxels, "clip")
        skip = box[2].start % deep
        return voxels.reshape(*lines.shape[:2], -1)[:, :, skip : skip + box[2].stop - box[2].start]

    def _write(self, voxels: np.ndarray, region: np.ndarray) -> None:
        """Writes the values of some voxels."""
        palette, divisor = self._tiles.values, self._tiles.divisor
        if palette is None:
            np.copyto(region.view(self._unsigned), voxels)
        elif self._lookup is not None:
            np.copyto(region, self._lookup.of(voxels))
        else:  # half the time of looking values up
            numbers = region.view(palette.numpy().dtype)
            np.copyto(numbers, voxels, casting="unsafe")
            if divisor != 1:
                np.divide(numbers, numbers.dtype.type(divisor), out=numbers)


class _Lookup:
    """Finds the values of a palette, given as bit patterns, by their indices of a dtype ``unsigned``.

    NumPy takes indices of eight bytes only. So those of one byte are looked up two at a time, in a table of all pairs,
    which takes two thirds of the time. For a small ``count`` of indices the table would cost more than it saves.
    """

    def __init__(self, values: np.ndarray, unsigned: str, count: int, scratch: _Scratch) -> None:
        self._values, self._unsigned, self._scratch = values, unsigned, scratch
        self._table, self._one = values, unsigned
        if unsigned == "u1" and values.itemsize <= 4 and count > 1 << 16:
            pairs = scratch.take("pairs", (256, 256, 2), values.dtype)
            pairs[:, : len(values), 0] = values
            pairs[: len(values), :, 1] = values[:, None]
            self._table, self._one = pairs.view(f"i{2 * values.itemsize}").reshape(-1), "<u2"

    def of(self, indices: np.ndarray) -> np.ndarray:
        """The values, in memory that the next call uses again. Every index must be one of a value."""
        count = indices.size
        room = count + count % 2
        if indices.flags.c_contiguous and room == count:
            flat = indices.reshape(-1)
        else:
            flat = self._scratch.take("indices", (room,), self._unsigned)
            flat[count:] = 0
            np.copyto(flat[:count].reshape(indices.shape), indices)
        narrow = flat.view(self._one)
        wide = self._scratch.take("wide", narrow.shape, "i8")
        np.copyto(wide, narrow)
        found = self._scratch.take("values", (room,), self._values.dtype)
        np.take(self._table, wide, 0, found.view(self._table.dtype), "wrap")
        return found[:count].reshape(indices.shape)


def _lines(layout: Layout, which: np.ndarray, firsts: np.ndarray, lead: int, part: Box) -> np.ndarray:
    """Which lines along the last axis of decoded tiles hold the voxels of a part of a box: (x, y, tiles along z).

    ``which`` tiles were decoded, rising; ``firsts`` is the first line of each. ``lead`` is the index of the leading
    axes.
    """
    _, rows, columns, deep = layout.grid
    x, y, z = (np.arange(voxels.start // t, -(-voxels.stop // t)) for voxels, t in zip(part, layout.tile, strict=True))
    tiles = ((lead * rows + x[:, None, None]) * columns + y[:, None]) * deep + z
    along_x, along_y = (np.arange(part[i].start, part[i].stop) for i in (0, 1))
    planes = firsts.take(np.searchsorted(which, tiles)).take(along_y // layout.tile[1] - y[0], 1)
    planes += (along_y % layout.tile[1])[:, None]
    lines: np.ndarray = planes.take(along_x // layout.tile[0] - x[0], 0)
    lines = lines + (along_x % layout.tile[0] * layout.tile[1])[:, None, None]
    return lines


class _Scratch:
    """Memory that is used again for each slab, and by the next unpacker: fresh memory costs a fault per page."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Uninitialised memory of one of NumPy's dtypes. Reuses the memory that was last taken under this name."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if name not in self._held or len(self._held[name]) < nbytes:
            self._held[name] = pooled_scratch(nbytes).numpy()
        found: np.ndarray = self._held[name][:nbytes].view(dtype).reshape(shape)
        return found


def _within(voxels: slice, tiles: slice, edge: int) -> slice:
    """The voxels that lie in these tiles, of this edge."""
    return slice(max(voxels.start, tiles.start * edge), min(voxels.stop, tiles.stop * edge))


def _slabs(layout: Layout, tiles: np.ndarray) -> Iterator[tuple[int, int]]:
    """Divides tiles into slabs of about :data:`limits.DECODED_BYTES`: where each begins and ends.

    A slab has all tiles of some rows of axis -3, or some of the tiles of one of them: at least those of one row along
    the last axis.
    """
    _, rows, columns, deep = layout.grid
    most = max(1, limits.DECODED_BYTES // layout.tile_bytes)
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
