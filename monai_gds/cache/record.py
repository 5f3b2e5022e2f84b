"""A record: one cached item in one valid safetensors file, laid out so that every way of reading finds it aligned.

The format, version 1. Any safetensors tool opens it, and reading it can run no code.

    8 bytes   N, the length of the header, little-endian
    N bytes   the header: JSON, padded with spaces so that the data begin at a multiple of 4096
    data      in this order, without holes (safetensors allows none):
              __arrays        U8     the small arrays of the item tree, packed together (see monai_gds.cache.tree)
              small tensors   each under 64 KiB, the largest element sizes first, so that each is aligned to its own
              __pad.0         U8     zeros up to a multiple of 4096
              a tensor of 64 KiB or more, then __pad.1 up to the next multiple of 4096, and so on to the end of the file

The header is ``{"__metadata__": {...}, "<tensor>": {"dtype", "shape", "data_offsets"}, ...}``. ``__metadata__`` holds
strings only, as safetensors demands:

    header_crc32   first of all, at a fixed place: CRC-32 of the N bytes with these eight digits as zeros, in hex
    format         "monai_gds"
    version        "1"
    checksum       the name of the checksum, "wsum64" (monai_gds.cache.checksum)
    checksums      JSON: {entry: 16 hex digits} for __arrays and every tensor
    key            JSON: the key's ingredients (monai_gds.cache.key)
    tree           JSON: the item tree (monai_gds.cache.tree)

Refused, as damage: a file that does not begin this way, a wrong header checksum, two entries of one name (safetensors
itself takes the last), entries that overlap or leave holes, sizes that do not match, a byte too many or too few at the
end. Refused by name: a newer version. Names that begin with two underscores are the format's own. Room is left for
per-tensor codecs and chunks: a node of the tree may carry more than a name, and a reader refuses what it does not know.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from monai_gds.cache import checksum as _checksum
from monai_gds.cache.dtypes import DTYPE_NAMES, DTYPES
from monai_gds.cache.tree import EncodedItem, tensor_bytes
from monai_gds.errors import DamagedRecord, NewerRecord
from monai_gds.storage import ALIGNMENT, Buffer

__all__ = ["ARRAYS", "HEAD_BYTES", "VERSION", "Entry", "Record", "header_length", "pack_record", "parse_header"]

VERSION = 1
ARRAYS = "__arrays"
PAD = "__pad."

#: Tensors of this many bytes or more begin at a multiple of ALIGNMENT.
LARGE = 64 << 10

#: Bytes to read at first: holds the header and the small entries of an item of a few NIfTI images.
HEAD_BYTES = 32 << 10

_PREFIX = b'{"__metadata__":{"header_crc32":"'
_CRC = slice(len(_PREFIX), len(_PREFIX) + 8)


class Entry(NamedTuple):
    """One tensor in the file: ``offset`` and ``nbytes`` in bytes of the file, ``checksum`` of those bytes."""

    dtype: torch.dtype
    shape: list[int]
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Record:
    """A parsed header.

    Attributes:
        key: the key's ingredients.
        tree: the item tree.
        arrays: where the packed small arrays lie, or None when there are none.
        tensors: the item's tensors by name, in the order of the file.
        nbytes: size of the whole file.
    """

    key: dict[str, Any]
    tree: Any
    arrays: Entry | None
    tensors: dict[str, Entry]
    nbytes: int


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def pack_record(item: EncodedItem, key: dict[str, Any]) -> list[Buffer]:
    """Lays out a record: buffers which, written back to back, are the file.

    Args:
        item: the item taken apart. Its tensors are not copied: they must not change until they are written.
        key: the key's ingredients, JSON-able.
    """
    layout = _Layout()
    if item.arrays:
        layout.add(ARRAYS, torch.uint8, [len(item.arrays)], torch.frombuffer(item.arrays, dtype=torch.uint8))
    small = [(name, t) for name, t in item.tensors.items() if t.nbytes < LARGE]
    for name, tensor in sorted(small, key=lambda nt: -nt[1].element_size()):
        layout.align(tensor.element_size())
        layout.add(name, tensor.dtype, list(tensor.shape), tensor_bytes(tensor))
    for name, tensor in item.tensors.items():
        if tensor.nbytes >= LARGE:
            layout.align(ALIGNMENT)
            layout.add(name, tensor.dtype, list(tensor.shape), tensor_bytes(tensor))
    layout.align(ALIGNMENT)
    return [_header(layout, item.tree, key), *layout.buffers]


class _Layout:
    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.checksums: dict[str, str] = {}
        self.buffers: list[Buffer] = []
        self.end = 0
        self._pads = 0

    def add(self, name: str, dtype: torch.dtype, shape: list[int], data: torch.Tensor) -> None:
        self._entry(name, DTYPE_NAMES[dtype], shape, data.numel())
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


def _header(layout: _Layout, tree: Any, key: dict[str, Any]) -> bytes:
    metadata = {
        "header_crc32": "00000000",
        "format": "monai_gds",
        "version": str(VERSION),
        "checksum": _checksum.NAME,
        "checksums": _dumps(layout.checksums),
        "key": _dumps(key),
        "tree": _dumps(tree),
    }
    text = bytearray(_dumps({"__metadata__": metadata, **layout.entries}).encode("ascii"))
    text.extend(b" " * (-(8 + len(text)) % ALIGNMENT))
    text[_CRC] = b"%08x" % zlib.crc32(text)
    return len(text).to_bytes(8, "little") + bytes(text)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def header_length(head: bytes, size: int) -> int:
    """Bytes from the start of the file to its data, of a file of ``size`` bytes that begins with ``head``.

    Raises:
        DamagedRecord: this is no record.
    """
    length = 8 + int.from_bytes(head[:8], "little")
    if len(head) < 8 or head[8 : 8 + len(_PREFIX)] != _PREFIX[: len(head) - 8]:
        raise DamagedRecord("it is not a record of monai_gds")
    if length % ALIGNMENT or length > size:
        raise DamagedRecord("its header has an impossible length")
    return length


def parse_header(head: bytes, size: int) -> Record:
    """Reads a header strictly.

    Args:
        head: the beginning of the file, at least its header.
        size: the size of the file.

    Raises:
        DamagedRecord: not a record, or one that is not whole.
        NewerRecord: written by a newer version of the format.
    """
    start = header_length(head, size)
    text = bytearray(head[8:start])
    stored, text[_CRC] = bytes(text[_CRC]), b"00000000"
    if len(text) != start - 8 or stored != b"%08x" % zlib.crc32(text):
        raise DamagedRecord("its header does not match its checksum")
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
        metadata = header.pop("__metadata__")
        version = int(metadata["version"])
        if metadata["format"] == "monai_gds" and version > VERSION:
            raise NewerRecord(f"it has format version {version}, and this monai_gds reads up to {VERSION}")
        if (metadata["format"], version, metadata["checksum"]) != ("monai_gds", VERSION, _checksum.NAME):
            raise DamagedRecord(f"its format is {metadata['format']!r} version {version}")
        entries = _entries(header, json.loads(metadata["checksums"]), start, size)
        arrays = entries.pop(ARRAYS, None)
        return Record(json.loads(metadata["key"]), json.loads(metadata["tree"]), arrays, entries, size)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        if isinstance(e, (DamagedRecord, NewerRecord)):
            raise
        raise DamagedRecord(f"its header is malformed: {e!r}") from e


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise DamagedRecord("its header names an entry twice")
    return out


def _entries(header: dict[str, Any], checksums: dict[str, str], start: int, size: int) -> dict[str, Entry]:
    """The entries that are not padding, in the order of the file, which they must cover without a gap."""
    found: dict[str, Entry] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        dtype, shape = DTYPES.get(entry["dtype"]), entry["shape"]
        if dtype is None:
            raise DamagedRecord(f"its entry {name!r} has the unknown dtype {entry['dtype']!r}")
        if begin != end or stop - begin != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
            raise DamagedRecord(f"its entry {name!r} is not where or as large as it should be")
        end = stop
        if not name.startswith(PAD):
            found[name] = Entry(dtype, shape, start + begin, stop - begin, int(checksums[name], 16))
    if start + end != size:
        raise DamagedRecord(f"it has {size} bytes instead of {start + end}")
    return found
