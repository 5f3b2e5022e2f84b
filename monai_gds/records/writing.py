"""A record: one cached item in one valid safetensors file, aligned for every way of reading.

This is the specification of format version 2. Any safetensors tool opens such a file, and reading it runs no code. The
file is named after its key, ``<digest>.v2.safetensors``.

    8 bytes   N, the length of the header, little-endian
    N bytes   the header: JSON, padded with spaces so that the data begin at a multiple of 4096
    data      in this order, without gaps (safetensors allows none):
              __arrays        U8     the small arrays of the item tree, packed together (see monai_gds.items.tree)
              __tiles.<name>  U8     the tables of packed tensors, see below
              __runs.<name>   U8     the tables of the runs of packed tensors, see below
              __joint_runs.<of>  U8  the tables of joint runs, see below
              small tensors   each under 64 KiB, largest element size first, so that each is aligned to its own
              __pad.0         U8     zeros up to a multiple of 4096
              a tensor of 64 KiB or more, then __pad.1 up to the next multiple of 4096, and so on
              __run_blocks.<name>, __joint_run_blocks.<of>  U8  the blocks of those runs, each then padded to a multiple
                              of 4096, to the end

The header is ``{"__metadata__": {...}, "<tensor>": {"dtype", "shape", "data_offsets"}, ...}``. ``__metadata__`` holds
only strings, as safetensors requires:

    header_crc32   always first, at a fixed offset: CRC-32 of the N bytes with these eight digits as zeros, in hex
    format         "monai_gds"
    version        "2"
    checksum       the name of the checksum, "wsum64" (monai_gds.base.checksum)
    checksums      JSON: {entry: 16 hex digits} for every entry but padding
    key            JSON: the key's ingredients (monai_gds.keys.key). The digest in the file's name was made from
                   ``parts``, and a reader computes it again. The rest serves maintenance and is never compared.
    tree           JSON: the item tree (monai_gds.items.tree)
    form           only where tensors were to be packed and all were tried: the codec and the edge of tiles that were
                   asked for, as in "lz4 32". Tensors that would not get smaller are whole all the same, so this tells
                   whether packing them is worth trying. It says nothing about what is in the file.

A tensor is whole or packed. A packed one is a U8 entry at a multiple of 4096, whose node in the tree describes what it
holds: ``{"$tensor": {"name", "tiles": {"dtype", "shape", "tile", "filter", "codec", "palette"}}}``. Tiles of the shape
``tile`` cut the last three axes, in C order, and leading axes into single steps. Shapes of fewer axes count as if they
began with 1. At the far edges tiles are filled up, so that all have one size. With a ``palette`` of n > 0 values a tile
holds indices into it, of one byte up to 256 values and of two bytes above; otherwise it holds the elements. Their bytes
go through the filter, ``"shuffle"`` (all first bytes, then all second bytes …), and then through the codec, ``"lz4"``
or ``"zstd"``, into one LZ4 block or Zstd frame: a stream. The first stream begins at 16 in the entry, and each other
one at the first multiple of 16 that is at least 4 bytes after the end of the one before. The entry ends where another
stream would begin.

The table ``__tiles.<name>`` holds for each tile an int32, the size of its stream, then for each a uint32, the CRC-32 of
its stream, then the bit patterns of the palette's values, all little-endian. A stream of a tile's own size went through
the filter only. A size of -v, at most 0, means no stream and no room: each byte of the tile is v, and its CRC-32 counts
as 0. A palette has at most 65,536 values, a tile at most 4 MiB, a row of tiles along the last axis at most 2 GiB, and
no axis 0. Memory is allocated only after the checksum of the table holds.

A packed tensor of at most 256 different bit patterns, whose first of two axes or more is 1, may also have runs. A run
is a stretch, in C order, of elements with equal bits. Runs follow one another in blocks of R, of which the last may
have fewer. A block is 5 R bytes: all first bytes of the lengths, which are uint32, then all second, third and fourth
bytes, then for each run the index of its value, one byte. Runs that a last block lacks are zeros. Blocks go through
``zstd`` as tiles do, without the filter, into streams that follow one another in ``__run_blocks.<name>`` without gaps.
The table ``__runs.<name>`` holds three uint32, which are the number of runs, R, and the number of values; then for each
block an int32, the size of its stream, with -v as in the tables of tiles; for each block a uint32, the CRC-32 of its
stream; for each block and each value, values of a block together, a uint32, how many elements of the block have that
value; and the bit patterns of the values. 5 R is at most 4 MiB, and the counts add up to the elements of the tensor.

Joint runs are of such a tensor, the label, and of where another tensor of the record, the image, is above a threshold
in any step of its first axis; the other axes of both are equal. There ``<of>`` is JSON without spaces, the names of the
label and of the image, and the threshold as Python writes it, a float or an int of 64 bits:
``["label","image","0.0"]``. A run is then a stretch of elements with equal bits that are all above the threshold or all
not. A value is a bit pattern with a byte, 1 above the threshold and 0 elsewhere. Tables and blocks are those of other
runs, and after the bit patterns the table holds these bytes.

Refused as damaged: a file that does not begin this way, a wrong header checksum, two entries of one name (safetensors
itself uses the last), entries that overlap or leave gaps, sizes that do not match, missing or extra bytes at the end,
and a record whose parts do not yield its name. Refused by name and never overwritten: a newer version, and any tag,
field, codec or reserved name that a reader does not know. Names that begin with two underscores are reserved for the
format.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from monai_gds.base import checksum as _checksum
from monai_gds.base.dtypes import name_of
from monai_gds.base.names import digest_of
from monai_gds.errors import DamagedRecord, MonaiGdsError, warn
from monai_gds.items.tree import EncodedItem, tensor_bytes
from monai_gds.records.compression import WHOLE, Compression, Lookup
from monai_gds.records.header import ARRAYS, CRC, PAD, TABLE, VERSION, Header, RunsKey
from monai_gds.storage import ALIGNMENT, Buffer
from monai_gds.tiles import runs, tiles

K = TypeVar("K")
P = TypeVar("P")

#: Tensors of at least this size begin at a multiple of ALIGNMENT.
LARGE = 64 << 10


def pack_record(item: EncodedItem, key: dict[str, Any], compression: Compression = WHOLE) -> list[Buffer]:
    """Lays out a record as buffers that are written back to back.

    Args:
        item: the item taken apart. Its tensors are not copied and must not change until they are written.
        key: the key's ingredients, JSON-able.
        compression: how to pack large tensors that get smaller by it, see :func:`tiles.pack`.
    """
    layout = _FileLayout()
    large = {name: tensor for name, tensor in item.tensors.items() if compression.cuts(tensor.nbytes)}

    def in_tiles(_: str, tensor: torch.Tensor) -> tiles.Packed | None:
        return tiles.pack(tensor, compression.codec or "", compression.edge)

    packed, failed = _packed(large, in_tiles, "uncompressed")
    form = compression.text if large and not failed else ""  # noted where all were tried
    found = _runs(item, packed, compression.joint)
    if item.arrays:
        layout.add(ARRAYS, torch.uint8, [len(item.arrays)], torch.frombuffer(item.arrays, dtype=torch.uint8))
    for name, (_, table, _) in packed.items():
        layout.add(f"{TABLE}{name}", torch.uint8, [len(table)], table)
    for of, (table, _) in found.items():
        layout.add(of.entries[0], torch.uint8, [len(table)], table)
    small = [(name, t) for name, t in item.tensors.items() if t.nbytes < LARGE and name not in packed]
    for name, tensor in sorted(small, key=lambda nt: -nt[1].element_size()):
        layout.align(tensor.element_size())
        layout.add(name, tensor.dtype, list(tensor.shape), tensor_bytes(tensor))
    for name, tensor in item.tensors.items():
        if name in packed:
            layout.align(ALIGNMENT)
            layout.add(name, torch.uint8, [len(packed[name].streams)], packed[name].streams)
        elif tensor.nbytes >= LARGE:
            layout.align(ALIGNMENT)
            layout.add(name, tensor.dtype, list(tensor.shape), tensor_bytes(tensor))
    for of, (_, blocks) in found.items():
        layout.align(ALIGNMENT)
        layout.add(of.entries[1], torch.uint8, [len(blocks)], blocks)
    layout.align(ALIGNMENT)
    return [_pack_header(layout, _with_tiles(item.tree, packed), key, form), *layout.buffers]


def _runs(item: EncodedItem, packed: Iterable[str], joint: Iterable[Lookup]) -> dict[RunsKey, runs.Packed]:
    """The runs of packed tensors, and their joint runs for lookups."""
    keys = [RunsKey(name) for name in packed]
    for label, image, threshold in joint:
        key = RunsKey(_name_at(item.tree, label), _name_at(item.tree, image), threshold)
        if RunsKey(key.label) in keys and key.image:
            keys.append(key)

    def pack(key: RunsKey, label: torch.Tensor) -> runs.Packed | None:
        if not key.threshold:
            return runs.pack(label)
        image = item.tensors[key.image]
        return runs.pack(label, runs.above(image.cpu(), key.threshold)) if image.shape[1:] == label.shape[1:] else None

    return _packed({key: item.tensors[key.label] for key in keys}, pack, "without the runs of its values")[0]


def _name_at(tree: Any, key: str) -> str:
    """The name of the tensor that an item has under a key; empty if it has none there."""
    node = tree.get(key) if isinstance(tree, dict) else None
    if isinstance(node, dict) and "$metatensor" in node:
        node = node["$metatensor"][0]
    return str(node["$tensor"]["name"]) if isinstance(node, dict) and "$tensor" in node else ""


def _packed(
    tensors: dict[K, torch.Tensor], pack: Callable[[K, torch.Tensor], P | None], how: str
) -> tuple[dict[K, P], bool]:
    """What ``pack`` makes of tensors, where it pays, and whether it failed. Then a tensor is saved all the same."""
    packed, failed = {}, False
    for name, tensor in tensors.items():
        try:
            found = pack(name, tensor.cpu())
        except (MonaiGdsError, MemoryError, RuntimeError) as e:  # packing is optional, and must not end an epoch
            warn(f"a tensor is saved {how}: {e}")
            failed = True
            continue
        if found is not None:
            packed[name] = found
    return packed, failed


def _with_tiles(tree: Any, packed: dict[str, tiles.Packed]) -> Any:
    """A copy of a tree in which the nodes of packed tensors describe how these are packed."""

    def described(tensor: dict[str, Any]) -> dict[str, Any]:
        found = packed.get(tensor["name"])
        return tensor if found is None else {**tensor, "tiles": found.layout.to_node()}

    return _changed(tree, described) if packed else tree


def without_tiles(node: Any) -> Any:
    """A copy of a record's tree in which no tensor is packed. Raises DamagedRecord if it is nested too deeply."""
    try:
        return _changed(node, lambda tensor: {key: value for key, value in tensor.items() if key != "tiles"})
    except RecursionError as e:
        raise DamagedRecord("its tree is nested too deeply") from e


def _changed(node: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of a tree in which ``change`` was applied to the description of each tensor."""
    if isinstance(node, list):
        return [_changed(part, change) for part in node]
    if not isinstance(node, dict):
        return node
    tensor = node.get("$tensor")
    if isinstance(tensor, dict):
        return {"$tensor": change(tensor)}
    return {key: _changed(value, change) for key, value in node.items()}


class _FileLayout:
    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.checksums: dict[str, str] = {}
        self.buffers: list[Buffer] = []
        self.end = 0
        self._pads = 0

    def add(self, name: str, dtype: torch.dtype, shape: list[int], data: torch.Tensor) -> None:
        self._entry(name, name_of(dtype), shape, data.numel())
        self.checksums[name] = f"{_checksum.checksum(data):016x}"
        self.buffers.append(data)

    def align(self, to: int) -> None:
        gap = -self.end % to
        if gap:
            self._entry(f"{PAD}{self._pads}", "U8", [gap], gap)
            self.buffers.append(bytes(gap))
            self._pads += 1

    def _entry(self, name: str, dtype: str, shape: list[int], nbytes: int) -> None:
        self.entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [self.end, self.end + nbytes]}
        self.end += nbytes


def _pack_header(layout: _FileLayout, tree: Any, key: dict[str, Any], form: str) -> bytes:
    metadata = {
        "header_crc32": "00000000",
        "format": "monai_gds",
        "version": str(VERSION),
        "checksum": _checksum.NAME,
        "checksums": _dumps(layout.checksums),
        "key": _dumps(key),
        "tree": _dumps(tree),
        **({"form": form} if form else {}),
    }
    text = bytearray(_dumps({"__metadata__": metadata, **layout.entries}).encode("ascii"))
    text.extend(b" " * (-(8 + len(text)) % ALIGNMENT))
    text[CRC] = b"%08x" % zlib.crc32(text)
    return len(text).to_bytes(8, "little") + bytes(text)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def check_name(record: Header, digest: str) -> None:
    """Checks that a record belongs to a key. Raises DamagedRecord if it was swapped, copied or linked."""
    parts = record.key.get("parts")
    if not isinstance(parts, list) or digest_of(parts) != digest:
        raise DamagedRecord("its key does not match its name: the file was swapped, copied or linked")
