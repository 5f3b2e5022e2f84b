"""Tiles: a tensor cut into small boxes, each compressed on its own. Packing and unpacking on the CPU.

Used by :mod:`monai_gds.cache.record`, whose page specifies how tiles lie in a file, and by
:mod:`monai_gds.cache.reading`. Knows neither files nor items.

    tensor ─▶ palette or bit patterns ─▶ slabs ─▶ tiles ─▶ shuffle and codec (blosc) ─▶ streams + table

Tiles cut the last three axes, in C order; leading axes (channels) are cut into single steps. At the far edges a tile is
filled up with the last voxel, so all tiles of a tensor have one size and go through one native call together.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from monai_gds import huge_pages, limits
from monai_gds.cache import blosc
from monai_gds.cache import palette as palettes
from monai_gds.cache.codecs import DTYPE_NAMES
from monai_gds.cache.header import DTYPES
from monai_gds.errors import DamagedRecord, NewerRecord

__all__ = ["EDGE", "Layout", "Packed", "Tiles", "check", "pack", "tile_shape"]

#: Voxels along each edge of a tile.
EDGE = 32

#: Streams begin at multiples of this, at least 4 bytes behind one another (see :func:`blosc.decompress`).
_STREAM_ALIGNMENT = 16

_FILTER = "shuffle"

#: A tensor that gets less than 15 % smaller is left as it is: then it needs no decoding.
_LEAST_GAIN = 1.15

#: Element size -> the dtype that stands for its bit patterns.
_PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        dtype: of the tensor.
        shape: of the tensor.
        tile: shape of a tile over the last three axes.
        codec: one of :data:`blosc.CODECS`.
        values: number of values in the palette; 0 without a palette.
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
        """What is compressed: indices into the palette, or bit patterns."""
        if self.values:
            return torch.uint8 if self.values <= 256 else torch.int16
        return _PATTERNS[self.dtype.itemsize]

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
            "dtype": DTYPE_NAMES[self.dtype], "shape": list(self.shape), "tile": list(self.tile), "filter": _FILTER,
            "codec": self.codec, "palette": self.values,
        }  # fmt: skip

    @classmethod
    def of_node(cls, node: Any) -> Layout:
        """Parses :meth:`to_node` strictly.

        Raises:
            DamagedRecord: no version writes this.
            NewerRecord: a field, filter or codec of a later version.
        """
        known = ("dtype", "shape", "tile", "filter", "codec", "palette")
        if type(node) is not dict or not all(key in node for key in known):
            raise DamagedRecord("the tiles of a tensor are not described as they should be")
        if strange := set(node) - set(known):
            raise NewerRecord(f"its tiles have {min(strange)!r:.40}, which this version does not know")
        if not all(type(node[text]) is str for text in ("dtype", "filter", "codec")):
            raise DamagedRecord("the tiles of a tensor are not described as they should be")
        if node["filter"] != _FILTER or node["codec"] not in blosc.CODECS:
            raise NewerRecord(
                f"its tiles went through {node['filter']!r:.40} and {node['codec']!r:.40}, and this version knows "
                f"{_FILTER!r} with {' or '.join(map(repr, blosc.CODECS))}"
            )
        shape, tile, values = node["shape"], node["tile"], node["palette"]
        numbers = [*shape, *tile, values] if type(shape) is list and type(tile) is list else [None]
        sound = node["dtype"] in DTYPES and all(type(n) is int and 0 <= n < 1 << 40 for n in numbers)
        if not sound or len(tile) != 3 or not all(tile) or not all(shape):
            raise DamagedRecord("the tiles of a tensor are not described as they should be")
        dtype = getattr(torch, DTYPES[node["dtype"]][0])
        layout = cls(dtype, tuple(shape), (tile[0], tile[1], tile[2]), node["codec"], values)
        if values > palettes.MOST_VALUES or dtype.itemsize not in _PATTERNS or layout.tile_bytes > limits.TILE_BYTES:
            raise DamagedRecord(f"its tiles of {layout.tile_bytes} bytes or palette of {values} values are too large")
        if layout.row_bytes > blosc.MOST_BYTES:
            raise DamagedRecord(f"its rows of tiles have {layout.row_bytes} bytes, more than are decompressed at once")
        return layout


class Packed(NamedTuple):
    """A packed tensor.

    Attributes:
        layout: how.
        table: its table, 1-D uint8 CPU tensor.
        streams: its streams, 1-D uint8 CPU tensor.
    """

    layout: Layout
    table: torch.Tensor
    streams: torch.Tensor


def pack(tensor: torch.Tensor, codec: str, edge: int = EDGE) -> Packed | None:
    """Packs a tensor.

    Args:
        tensor: contiguous CPU tensor.
        codec: one of :data:`blosc.CODECS`.
        edge: voxels along each edge of a tile.

    Returns:
        The packed tensor, or None if it is small (:data:`limits.TILED_BYTES`), would not get 15 % smaller, or has more
        than :data:`blosc.MOST_BYTES` in a row of tiles.

    Raises:
        MonaiGdsError: Blosc2 is missing.
    """
    if tensor.nbytes < limits.TILED_BYTES or tensor.element_size() not in _PATTERNS:
        return None
    palette = palettes.find(tensor)
    tile = tile_shape(tuple(tensor.shape), edge)
    layout = Layout(tensor.dtype, tuple(tensor.shape), tile, codec, 0 if palette is None else len(palette.values))
    if layout.row_bytes > blosc.MOST_BYTES:
        return None
    whole = tensor.view(_PATTERNS[tensor.element_size()]).view(-1, *_last_three(layout.shape))
    slabs = list(_slabs(layout))
    most = int(tensor.nbytes / _LEAST_GAIN) - layout.table_bytes
    done: dict[int, _Aligned] = {}
    # The middle of a volume is where its content is. If nothing is gained there, the rest is not tried.
    middle = len(slabs) // 2
    for n in [middle, *range(middle), *range(middle + 1, len(slabs))]:
        region = slabs[n].of(whole, tile).contiguous()
        plain_bytes = region.nbytes
        if palette is not None:
            region = palette.indices(region.view(tensor.dtype)).view(layout.packed_dtype)
        done[n] = _align(blosc.compress(_cut(region, tile), codec))
        most -= len(done[n].streams)
        if most < 0 or (n == middle and len(done[n].streams) * _LEAST_GAIN > plain_bytes):
            return None
    sizes, crcs = (np.concatenate([done[n][i] for n in range(len(slabs))]) for i in (1, 2))
    values = np.empty(0, np.uint8) if palette is None else palette.values.view(torch.uint8).numpy()
    table = np.concatenate([sizes.view(np.uint8), crcs.view(np.uint8), values])
    streams = np.concatenate([np.zeros(_STREAM_ALIGNMENT, np.uint8), *(done[n].streams for n in range(len(slabs)))])
    return Packed(layout, torch.from_numpy(table), torch.from_numpy(streams))


class _Aligned(NamedTuple):
    """Streams in slots, as they lie in a record; their sizes, int32; their CRC-32, uint32."""

    streams: np.ndarray
    sizes: np.ndarray
    crcs: np.ndarray


def _align(blocks: blosc.Blocks) -> _Aligned:
    starts, nbytes = _slots(blocks.sizes)
    out = np.zeros(nbytes, np.uint8)
    crcs = np.zeros(len(starts), np.uint32)
    for i in (blocks.sizes > 0).nonzero()[0]:
        size, source = blocks.sizes[i], blocks.starts[i]
        stream = blocks.data[source : source + size]
        out[starts[i] : starts[i] + size] = stream
        crcs[i] = zlib.crc32(stream.data)
    return _Aligned(out, blocks.sizes.astype(np.int32), crcs)


def check(tiles: Tiles, table: np.ndarray, streams: np.ndarray) -> None:
    """Compares every stream with its CRC-32, given the bytes of table and streams.

    Raises:
        DamagedRecord: one differs.
    """
    crcs, starts = table[4 * len(tiles.sizes) : 8 * len(tiles.sizes)].view(np.uint32), tiles.starts
    for i in (tiles.sizes > 0).nonzero()[0]:
        if zlib.crc32(streams[starts[i] : starts[i] + tiles.sizes[i]].data) != crcs[i]:
            raise DamagedRecord(f"tile {i} of {len(tiles.sizes)} does not match its checksum")


def _slots(sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """Where each stream begins behind the first one, and the bytes of all, with room for 4 bytes before the next."""
    step, sizes = _STREAM_ALIGNMENT, sizes.astype(np.int64)
    slots = np.where(sizes > 0, (sizes + 4 + step - 1) // step * step, 0)
    ends = np.cumsum(slots)
    return ends - slots, int(ends[-1])


class Tiles:
    """The tiles of one tensor in a record.

    Args:
        layout: how the tensor is cut and compressed.
        table: the table's bytes, whose checksum has been compared.
        nbytes: bytes of the streams.

    Attributes:
        layout: as given.
        sizes: bytes of each stream, int32; at most 0 for a tile without one, each byte of which is ``-size``.
        values: the palette, or None.
        nbytes: bytes of memory of these.

    Raises:
        DamagedRecord: the table does not fit the layout or the streams.
    """

    def __init__(self, layout: Layout, table: np.ndarray, nbytes: int) -> None:
        if len(table) != layout.table_bytes:
            raise DamagedRecord(f"a table of tiles has {len(table)} bytes instead of {layout.table_bytes}")
        count = layout.count
        self.layout = layout
        self.sizes = table[: 4 * count].view(np.int32).copy()
        in_range = self.sizes.min() >= -255 and self.sizes.max() <= layout.tile_bytes
        if not in_range or _slots(self.sizes)[1] + _STREAM_ALIGNMENT != nbytes:
            raise DamagedRecord("the sizes of its tiles do not add up to its bytes")
        values = torch.from_numpy(table[8 * count :].copy())
        self.values = values.view(layout.dtype) if layout.values else None
        self.nbytes = self.sizes.nbytes + values.nbytes

    @property
    def starts(self) -> np.ndarray:
        """Where each stream begins, int64."""
        return _slots(self.sizes)[0] + _STREAM_ALIGNMENT

    def unpack(self, streams: np.ndarray) -> torch.Tensor:
        """The whole tensor.

        Args:
            streams: 1-D uint8, all of them; not changed.

        Returns:
            CPU tensor of the layout's dtype and shape.

        Raises:
            DamagedRecord: a stream is not what was compressed, or there is not enough memory for the tensor.
            MonaiGdsError: Blosc2 is missing.
        """
        layout = self.layout
        try:
            out = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
        except (MemoryError, RuntimeError) as e:  # tiles of equal bytes take no room, so any record can declare this
            raise DamagedRecord(f"its tensor of shape {layout.shape} does not fit into memory: {e}") from e
        huge_pages.prefer(out)  # 315 MB took 390 to 460 ms instead of 490 to 520
        whole = out.view(_PATTERNS[layout.dtype.itemsize]).view(-1, *_last_three(layout.shape))
        starts, scratch = self.starts, _Scratch()
        for slab in _slabs(layout):
            region = slab.of(whole, layout.tile)
            tiles = self._decompress(streams, slab, starts[slab.begin : slab.end], scratch)
            if self.values is None:
                _place(tiles, region)
            else:
                indices = scratch.take("indices", region.shape, layout.packed_dtype)
                _place(tiles, indices)
                region.copy_(self._values_of(indices, scratch))
        return out

    def _decompress(self, streams: np.ndarray, slab: _Slab, starts: np.ndarray, scratch: _Scratch) -> torch.Tensor:
        """The tiles of a slab, ``(1, y, z, *tile)``."""
        layout = self.layout
        sizes = self.sizes[slab.begin : slab.end].astype(np.int64)
        head = blosc.head_bytes(len(sizes))
        source = int(starts[0]) - _STREAM_ALIGNMENT
        stop = int((starts + np.maximum(sizes, 0)).max())
        buffer = scratch.take("streams", (head + stop - source,), torch.uint8).numpy()
        buffer[head:] = streams[source:stop]
        tiles = scratch.take("tiles", (len(sizes), math.prod(layout.tile)), layout.packed_dtype)
        blosc.decompress(buffer, starts - source + head, sizes, layout.codec, tiles)
        return tiles.view(1, -1, layout.grid[3], *layout.tile)

    def _values_of(self, indices: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
        """The value of each index, as bit patterns."""
        assert self.values is not None
        wide = scratch.take("wide", indices.shape, torch.int32).copy_(indices)
        if indices.dtype == torch.int16:
            wide &= 0xFFFF
        if int(wide.max()) >= len(self.values):
            raise DamagedRecord("a tile refers to a value that is not in its palette")
        values = self.values.view(_PATTERNS[self.values.element_size()])
        out = scratch.take("values", indices.shape, values.dtype)
        torch.index_select(values, 0, wide.view(-1), out=out.view(-1))
        return out


class _Scratch:
    """Memory that is used again for each slab: fresh memory costs a fault per page."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of any content; the last one of this name is used no more."""
        nbytes = math.prod(shape) * dtype.itemsize
        if name not in self._held or len(self._held[name]) < nbytes:
            self._held[name] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._held[name][:nbytes].view(dtype).view(*shape)


def _last_three(shape: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (1, 1, 1, *shape)[-3:]
    return x, y, z


class _Slab(NamedTuple):
    """Tiles that follow one another in one row of tiles of axis -3.

    Attributes:
        lead: index of the leading axes.
        row: of axis -3, in tiles.
        first: of axis -2, in tiles.
        last: behind the last of axis -2, in tiles.
        begin: index of the first tile.
        end: index behind the last tile.
    """

    lead: int
    row: int
    first: int
    last: int
    begin: int
    end: int

    def of(self, whole: torch.Tensor, tile: tuple[int, int, int]) -> torch.Tensor:
        """What these tiles cover of a tensor with one leading axis."""
        x, y, _ = tile
        return whole[self.lead, self.row * x : (self.row + 1) * x, self.first * y : self.last * y]


def _slabs(layout: Layout) -> Iterator[_Slab]:
    """All tiles in order, in slabs of about :data:`limits.SLAB_BYTES`."""
    leading, rows, columns, deep = layout.grid
    step = max(1, limits.SLAB_BYTES // (deep * layout.tile_bytes))
    for lead in range(leading):
        for row in range(rows):
            begin = (lead * rows + row) * columns * deep
            for first in range(0, columns, step):
                last = min(first + step, columns)
                yield _Slab(lead, row, first, last, begin + first * deep, begin + last * deep)


def _cut(region: torch.Tensor, tile: tuple[int, int, int]) -> torch.Tensor:
    """The tiles of a region, one per row, filled up with its last voxels."""
    grid = [-(-size // edge) for size, edge in zip(region.shape, tile, strict=True)]
    tiles = torch.empty(*grid, *tile, dtype=region.dtype, device="cpu")
    for inside, part in _parts(tiles, region):
        inside.copy_(part)
    for axis, (size, edge) in enumerate(zip(region.shape, tile, strict=True)):
        if rest := size % edge:
            last = tiles.narrow(axis, grid[axis] - 1, 1)
            last.narrow(axis + 3, rest, edge - rest).copy_(last.narrow(axis + 3, rest - 1, 1))
    return tiles.view(-1, math.prod(tile))


def _place(tiles: torch.Tensor, region: torch.Tensor) -> None:
    """Writes tiles, ``(x, y, z, *tile)``, into the region that they cover."""
    for inside, part in _parts(tiles, region):
        part.copy_(inside)


def _parts(tiles: torch.Tensor, region: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views, in the tiles and in the region: of whole tiles, and of those in which the region ends."""
    edges = [list(_edges(size, edge)) for size, edge in zip(region.shape, tiles.shape[3:], strict=True)]
    for x, y, z in itertools.product(*edges):
        part = region[x.voxels, y.voxels, z.voxels]
        for axis, along in ((2, z), (1, y), (0, x)):
            part = part.unflatten(axis, (-1, along.edge))  # type: ignore[no-untyped-call]
        inside = tiles[x.tiles, y.tiles, z.tiles, : x.edge, : y.edge, : z.edge]
        yield inside, part.permute(0, 2, 4, 1, 3, 5)


@dataclass(frozen=True)
class _Edge:
    tiles: slice
    voxels: slice
    edge: int


def _edges(size: int, edge: int) -> Iterator[_Edge]:
    """Along one axis: the whole tiles, and the one that the tensor ends in."""
    whole, rest = divmod(size, edge)
    if whole:
        yield _Edge(slice(0, whole), slice(0, whole * edge), edge)
    if rest:
        yield _Edge(slice(whole, whole + 1), slice(whole * edge, size), rest)
