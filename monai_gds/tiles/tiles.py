"""Tiles: a tensor cut into small boxes, each compressed on its own. Packing, and which tiles are read.

Used by :mod:`monai_gds.records.writing`, whose page specifies how tiles lie in a file, and by
:mod:`monai_gds.records.reader`; :mod:`monai_gds.tiles.unpacking` puts tensors together again. Knows neither files nor
items.

    tensor ─▶ palette or bit patterns ─▶ slabs ─▶ tiles ─▶ shuffle and codec (blosc) ─▶ streams + table

Tiles cut the last three axes, in C order; leading axes (channels) are cut into single steps. At the far edges a tile is
filled up with the last voxel, so all tiles of a tensor have one size and go through one native call together.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base.dtypes import DTYPES, name_of
from monai_gds.errors import DamagedRecord, MonaiGdsError, NewerRecord
from monai_gds.storage import ALIGNMENT
from monai_gds.tiles import blosc, nvcomp
from monai_gds.tiles import palette as palettes
from monai_gds.tiles.boxes import Box, last_three
from monai_gds.tiles.codecs import CODECS, ON_CPU

#: Voxels along each edge of a tile.
EDGE = 32

#: Streams begin at multiples of this, at least 4 bytes after the end of the one before (see :func:`blosc.decompress`).
_STREAM_ALIGNMENT = 16

#: A tensor that gets less than 15 % smaller is left as it is: then it needs no decoding.
_LEAST_GAIN = 1.15

#: Element size -> the dtype that stands for its bit patterns.
PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tile_shape(shape: tuple[int, ...], edge: int = EDGE) -> tuple[int, int, int]:
    """The shape of a tile: ``edge`` cubed, or about as many voxels where an axis is shorter.

    Example:
        >>> tile_shape((1, 512, 512, 300))
        (32, 32, 32)
        >>> tile_shape((4, 1, 512, 512))
        (1, 128, 256)
    """
    sizes = [1, 1, 1, *shape][-3:]
    tile = [min(edge, size) for size in sizes]
    axis = 2
    while 2 * math.prod(tile) <= edge**3 and any(2 * t <= s for t, s in zip(tile, sizes, strict=True)):
        if 2 * tile[axis] <= sizes[axis]:
            tile[axis] *= 2
        axis = (axis - 1) % 3
    return tile[0], tile[1], tile[2]


@dataclass(frozen=True)
class Layout:
    """How a tensor is cut and compressed.

    Attributes:
        dtype: the tensor's dtype.
        shape: its shape.
        tile: the shape of a tile over the last three axes.
        codec: one of :data:`monai_gds.tiles.codecs.CODECS`.
        values: how many values the palette has; 0 without a palette.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    tile: tuple[int, int, int]
    codec: str
    values: int

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Steps of the leading axes, and tiles along each of the last three."""
        *leading, x, y, z = 1, 1, 1, *self.shape
        return math.prod(leading), -(-x // self.tile[0]), -(-y // self.tile[1]), -(-z // self.tile[2])

    @property
    def count(self) -> int:
        """The number of tiles."""
        return math.prod(self.grid)

    @property
    def packed_dtype(self) -> torch.dtype:
        """The dtype of what is compressed: indices into the palette, or bit patterns."""
        if self.values:
            return torch.uint8 if self.values <= 256 else torch.int16
        return PATTERNS[self.dtype.itemsize]

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile before compression."""
        return math.prod(self.tile) * self.packed_dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of the tiles along the last axis before compression: the least that goes through the codec at once."""
        return self.grid[3] * self.tile_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the table: size and CRC-32 of each tile, then the palette."""
        return 8 * self.count + self.values * self.dtype.itemsize

    def to_node(self) -> dict[str, Any]:
        """The layout as JSON, for the item tree."""
        return {
            "dtype": name_of(self.dtype), "shape": list(self.shape), "tile": list(self.tile),
            "filter": CODECS[self.codec].filter, "codec": self.codec, "palette": self.values,
        }  # fmt: skip

    @classmethod
    def of_node(cls, node: Any) -> Layout:
        """Parses :meth:`to_node` strictly.

        Raises:
            DamagedRecord: no version writes this.
            NewerRecord: a field, filter or codec of a later version.
        """
        known = ("dtype", "shape", "tile", "filter", "codec", "palette")
        malformed = DamagedRecord("the description of a tensor's tiles is malformed")
        if type(node) is not dict or not all(key in node for key in known):
            raise malformed
        if strange := set(node) - set(known):
            raise NewerRecord(f"its tiles have {min(strange)!r:.40}, which this version does not support")
        if not all(type(node[text]) is str for text in ("dtype", "filter", "codec")):
            raise malformed
        if node["codec"] not in CODECS or node["filter"] != CODECS[node["codec"]].filter:
            known_here = ", ".join(f"{codec.filter!r} with {name!r}" for name, codec in CODECS.items())
            raise NewerRecord(
                f"its tiles went through {node['filter']!r:.40} and {node['codec']!r:.40}, and this version supports "
                f"{known_here}"
            )
        shape, tile, values = node["shape"], node["tile"], node["palette"]
        numbers = [*shape, *tile, values] if type(shape) is list and type(tile) is list else [None]
        sound = node["dtype"] in DTYPES and all(type(n) is int and 0 <= n < 1 << 40 for n in numbers)
        if not sound or len(tile) != 3 or not all(tile) or not all(shape):
            raise malformed
        dtype = getattr(torch, DTYPES[node["dtype"]][0])
        layout = cls(dtype, tuple(shape), (tile[0], tile[1], tile[2]), node["codec"], values)
        if values > palettes.MOST_VALUES or dtype.itemsize not in PATTERNS or layout.tile_bytes > limits.TILE_BYTES:
            raise DamagedRecord(f"its tiles of {layout.tile_bytes} bytes or palette of {values} values are too large")
        if layout.row_bytes > blosc.MOST_BYTES:
            raise DamagedRecord(f"its rows of tiles have {layout.row_bytes} bytes, more than are decompressed at once")
        return layout


class Packed(NamedTuple):
    """A packed tensor; its table and its streams are 1-D uint8 CPU tensors."""

    layout: Layout
    table: torch.Tensor
    streams: torch.Tensor


def pack(tensor: torch.Tensor, codec: str, edge: int = EDGE) -> Packed | None:
    """Packs a tensor.

    Args:
        tensor: contiguous CPU tensor.
        codec: one of :data:`monai_gds.tiles.codecs.CODECS`.
        edge: voxels along each edge of a tile.

    Returns:
        The packed tensor, or None if it is small (:data:`limits.TILED_BYTES`), would not get 15 % smaller, or has more
        than :data:`blosc.MOST_BYTES` in a row of tiles.

    Raises:
        MonaiGdsError: the codec's library is missing, or for Bitcomp a CUDA device.
    """
    if tensor.nbytes < limits.TILED_BYTES or tensor.element_size() not in PATTERNS:
        return None
    palette = palettes.find(tensor)
    tile = tile_shape(tuple(tensor.shape), edge)
    layout = Layout(tensor.dtype, tuple(tensor.shape), tile, codec, 0 if palette is None else len(palette.values))
    if layout.row_bytes > blosc.MOST_BYTES:
        return None
    slabs = _slabs(tensor.view(PATTERNS[tensor.element_size()]).view(-1, *last_three(layout.shape)), layout)
    most = int(tensor.nbytes / _LEAST_GAIN) - layout.table_bytes
    done: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    # The middle of a volume is where its content is. If nothing is gained there, the rest is not tried.
    middle = len(slabs) // 2
    for n in [middle, *range(middle), *range(middle + 1, len(slabs))]:
        region = slabs[n].contiguous()
        plain_bytes = region.nbytes
        if palette is not None:
            region = palette.indices(region.view(tensor.dtype)).view(layout.packed_dtype)
        done[n] = _align(_compress(_cut(region, tile), codec))
        nbytes = len(done[n][0])
        most -= nbytes
        if most < 0 or (n == middle and nbytes * _LEAST_GAIN > plain_bytes):
            return None
    streams, sizes, crcs = zip(*(done[n] for n in range(len(slabs))), strict=True)
    values = np.empty(0, np.uint8) if palette is None else palette.values.view(torch.uint8).numpy()
    table = np.concatenate([*(part.view(np.uint8) for part in (*sizes, *crcs)), values])
    front = np.zeros(_STREAM_ALIGNMENT, np.uint8)
    return Packed(layout, torch.from_numpy(table), torch.from_numpy(np.concatenate([front, *streams])))


def _compress(tiles: torch.Tensor, codec: str) -> blosc.Blocks:
    """The streams of tiles, one per row."""
    if codec in ON_CPU:
        return blosc.compress(tiles, codec)
    if not torch.cuda.is_available():
        others = " or ".join(map(repr, ON_CPU))
        raise MonaiGdsError(f"{codec!r} compresses on a CUDA device, and this process has none: use {others}")
    rows, compressed = nvcomp.compress(tiles.cuda())
    plain, sizes = tiles.view(torch.uint8), compressed.cpu()
    constant = (plain == plain[:, :1]).all(1)
    stored = (sizes >= plain.shape[1]) & ~constant
    sizes = torch.where(stored, plain.shape[1], torch.where(constant, -plain[:, 0].to(torch.int64), sizes))
    count, room = rows.shape
    starts = np.arange(count, dtype=np.int64) * room
    starts[stored.numpy()] = count * room + plain.shape[1] * np.arange(int(stored.sum()), dtype=np.int64)
    data = np.concatenate([rows.cpu().numpy().reshape(-1), plain[stored].numpy().reshape(-1)])
    return blosc.Blocks(data, starts, sizes.numpy())


def _align(blocks: blosc.Blocks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Streams in slots, as they lie in a record; their sizes, int32; their CRC-32, uint32."""
    starts, nbytes = _slots(blocks.sizes)
    out = np.zeros(nbytes, np.uint8)
    crcs = np.zeros(len(starts), np.uint32)
    for i in (blocks.sizes > 0).nonzero()[0]:
        size, source = blocks.sizes[i], blocks.starts[i]
        stream = blocks.data[source : source + size]
        out[starts[i] : starts[i] + size] = stream
        crcs[i] = zlib.crc32(stream.data)
    return out, blocks.sizes.astype(np.int32), crcs


def _slots(sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """Where each stream begins, from the first one, and the bytes of all, with room for 4 bytes before the next."""
    step, sizes = _STREAM_ALIGNMENT, sizes.astype(np.int64)
    slots = np.where(sizes > 0, (sizes + 4 + step - 1) // step * step, 0)
    ends = np.cumsum(slots)
    return ends - slots, int(ends[-1])


class Selection(NamedTuple):
    """Some tiles of a tensor, and how their streams are read into a buffer.

    Attributes:
        tiles: which tiles these are, rising, int64 (n,).
        sizes: as in :class:`Tiles`, int64 (n,).
        starts: where each stream begins in the buffer, int64 (n,); anything for a tile without one.
        nbytes: how many bytes the buffer has. :func:`blosc.head_bytes` of all tiles are free at its front.
        offset: where each read begins in the entry, int64 (m,).
        length: bytes of each read, int64 (m,).
        dest: where each begins in the buffer, int64 (m,).
    """

    tiles: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray
    nbytes: int
    offset: np.ndarray
    length: np.ndarray
    dest: np.ndarray


class Tiles:
    """The tiles of one tensor in a record.

    Args:
        layout: how the tensor is cut and compressed.
        table: the table's bytes, whose checksum has been compared.
        nbytes: how many bytes the streams have.

    Attributes:
        table: a copy of that given.
        sizes: bytes of each stream, int32; at most 0 for a tile without one, each byte of which is ``-size``.
        crcs: CRC-32 of each stream, uint32.
        verified: whether each stream has been compared with it, bool.
        values: the palette, or None.
        divisor: indices divided by it are the palette's values, bit for bit: those of labels that count from 0, divided
            by 1, and of integers that were scaled to 0..1. None if there is no such number.

    Raises:
        DamagedRecord: the table does not fit the layout or the streams.
    """

    def __init__(self, layout: Layout, table: np.ndarray, nbytes: int) -> None:
        if len(table) != layout.table_bytes:
            raise DamagedRecord(f"a table of tiles has {len(table)} bytes instead of {layout.table_bytes}")
        count = layout.count
        self.layout = layout
        self.table = table.copy()
        self.sizes = self.table[: 4 * count].view(np.int32)
        self.crcs = self.table[4 * count : 8 * count].view(np.uint32)
        self.verified = np.zeros(count, bool)
        in_range = self.sizes.min() >= -255 and self.sizes.max() <= layout.tile_bytes
        if not in_range or _slots(self.sizes)[1] + _STREAM_ALIGNMENT != nbytes:
            raise DamagedRecord("the sizes of its tiles do not add up to its bytes")
        self.values = torch.from_numpy(self.table[8 * count :]).view(layout.dtype) if layout.values else None
        self.divisor = None if self.values is None else _divisor(self.values)

    @property
    def starts(self) -> np.ndarray:
        """Where each stream begins, int64."""
        return _slots(self.sizes)[0] + _STREAM_ALIGNMENT

    def touched(self, boxes: Sequence[Box]) -> np.ndarray:
        """The tiles that hold a voxel of a box, rising, int64."""
        marks = np.zeros(self.layout.grid, bool)
        for box in boxes:
            x, y, z = (slice(a.start // t, -(-a.stop // t)) for a, t in zip(box, self.layout.tile, strict=True))
            marks[:, x, y, z] = True
        return np.flatnonzero(marks)

    def select(self, tiles: np.ndarray) -> Selection:
        """How to read some tiles, given in rising order.

        Streams that are neighbours in the entry are read together, and so are streams with at most one whole page
        between them.
        """
        sizes = self.sizes[tiles].astype(np.int64)
        streams = sizes > 0
        begin = self.starts[tiles[streams]]
        end = begin + sizes[streams]
        starts = np.zeros(len(tiles), np.int64)
        head = blosc.head_bytes(len(tiles))
        if not len(begin):
            return Selection(tiles, sizes, starts, head, begin, begin, begin)
        joins = begin[1:] // ALIGNMENT - (end[:-1] - 1) // ALIGNMENT <= 2
        first = np.flatnonzero(np.append(True, ~joins))
        last = np.append(first[1:] - 1, len(begin) - 1)
        offset, length = begin[first], end[last] - begin[first]
        places, nbytes = _slots(length)
        run = np.cumsum(np.append(True, ~joins)) - 1
        dest = places + head + _STREAM_ALIGNMENT
        starts[streams] = begin - offset[run] + dest[run]
        return Selection(tiles, sizes, starts, head + _STREAM_ALIGNMENT + nbytes, offset, length, dest)

    def check(self, streams: np.ndarray, starts: np.ndarray, tiles: np.ndarray) -> None:
        """Compares the streams of ``tiles``, which begin at ``starts`` in the 1-D uint8 ``streams``, with their CRC-32.

        Notes those that match. Raises DamagedRecord if one differs.
        """
        for tile, start in zip(tiles.tolist(), starts.tolist(), strict=True):
            size = self.sizes[tile]
            if size > 0 and zlib.crc32(streams[start : start + size].data) != self.crcs[tile]:
                raise DamagedRecord(f"tile {tile} of {len(self.sizes)} does not match its checksum")
        self.verified[tiles] = True


def _divisor(values: torch.Tensor) -> float | None:
    if values.dtype == torch.bfloat16:  # which NumPy lacks
        return None
    wanted = values.numpy()
    numbers = np.arange(len(wanted)).astype(wanted.dtype)
    if numbers.tobytes() == wanted.tobytes():
        return 1.0
    if wanted.dtype.kind != "f" or not 0 < wanted[-1] < len(wanted):
        return None
    divisor = float(round(float(numbers[-1]) / float(wanted[-1])))
    found = np.divide(numbers, numbers.dtype.type(divisor)) if divisor else numbers
    return divisor if found.tobytes() == wanted.tobytes() else None


def _slabs(whole: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The regions of a tensor with one leading axis that hold about :data:`limits.SLAB_BYTES` of its tiles, in order.

    The tiles of a slab follow one another in one row of tiles of axis -3.
    """
    step = layout.tile[1] * max(1, limits.SLAB_BYTES // layout.row_bytes)
    return [slab for lead in whole for row in lead.split(layout.tile[0]) for slab in row.split(step, 1)]


def _cut(region: torch.Tensor, tile: tuple[int, int, int]) -> torch.Tensor:
    """The tiles of a region, one per row, filled up with its last voxels."""
    for axis, edge in enumerate(tile):
        if missing := -region.shape[axis] % edge:
            last = region.narrow(axis, region.shape[axis] - 1, 1)
            region = torch.cat([region, last.repeat_interleave(missing, axis)], axis)
    for axis, edge in ((2, tile[2]), (1, tile[1]), (0, tile[0])):
        region = region.unflatten(axis, (-1, edge))  # type: ignore[no-untyped-call]
    return region.permute(0, 2, 4, 1, 3, 5).reshape(-1, math.prod(tile))
