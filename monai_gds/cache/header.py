"""Parses the header of a record. Imports only the standard library: the command ``monai-gds cache`` must start fast.

The format is specified in :mod:`monai_gds.cache.record`. Files are opened for reading only.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

from monai_gds import limits
from monai_gds.errors import DamagedRecord, NewerRecord

__all__ = [
    "ARRAYS",
    "CRC",
    "DTYPES",
    "SUFFIX",
    "VERSION",
    "Header",
    "Ingredients",
    "SourceState",
    "Tensor",
    "digest_in",
    "digest_of",
    "header_length",
    "ingredients",
    "parse",
    "read",
]

#: Of the format.
VERSION = 2

#: What follows the digest in the name of a record.
SUFFIX = f".v{VERSION}.safetensors"

#: The entry of an item's small arrays, packed together.
ARRAYS = "__arrays"
_PAD = "__pad."
_ALIGNMENT = 4096

#: safetensors' name of a dtype -> torch's name and the element size in bytes.
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
}

_NAME = re.compile(rf"([0-9a-f]{{32}}){re.escape(SUFFIX)}")
_HEX = re.compile(r"[0-9a-f]*")
_PREFIX = b'{"__metadata__":{"header_crc32":"'

#: Where the checksum is in a header.
CRC = slice(len(_PREFIX), len(_PREFIX) + 8)

#: Size and identity of a source file; see :class:`monai_gds.cache.sources.Identity`.
SourceState: TypeAlias = tuple[int, str]


class Tensor(NamedTuple):
    """One tensor in the file: ``offset`` and ``nbytes`` in bytes of the file, ``checksum`` of those bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header.

    Attributes:
        key: what the record stores about its key, unchecked; see :func:`ingredients`.
        tree: the item tree.
        arrays: where the packed small arrays lie, if there are any.
        tensors: the item's tensors by name, in the order of the file.
    """

    key: dict[str, Any]
    tree: Any
    arrays: Tensor | None
    tensors: dict[str, Tensor]


class Ingredients(NamedTuple):
    """The ingredients of a record's key.

    Attributes:
        item: hash of the item.
        pipeline: hex digits that identify the transforms; empty if they are not part of the key.
        sources: state of each source, by path.
        same: a hash that is equal for records that differ only in MONAI's version and the state of their sources.
    """

    item: str
    pipeline: str
    sources: dict[str, SourceState]
    same: str


def digest_in(name: str) -> str | None:
    """The digest in a file name; None if it is not the name of a record."""
    found = _NAME.fullmatch(name)
    return None if found is None else found[1]


def digest_of(parts: Any) -> str:
    """The digest of a key's parts, after which its record is named."""
    text = json.dumps(parts, separators=(",", ":"), ensure_ascii=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def read(fd: int) -> Header:
    """Reads the header of an open file.

    Raises:
        DamagedRecord: not a record, or an incomplete one.
        NewerRecord: written by a newer version of the format.
        OSError: the file cannot be read.
    """
    size = os.fstat(fd).st_size
    head = os.pread(fd, limits.HEADER_READ_BYTES, 0)
    needed = header_length(head, size)
    if needed > len(head):
        head = os.pread(fd, needed, 0)
    return parse(head, size)


def header_length(head: bytes, size: int) -> int:
    """The offset of the data in a file of ``size`` bytes that begins with ``head``.

    Raises:
        DamagedRecord: this is not a record.
    """
    length = 8 + int.from_bytes(head[:8], "little")
    if len(head) < 8 or head[8 : 8 + len(_PREFIX)] != _PREFIX[: len(head) - 8]:
        raise DamagedRecord("it is not a record of monai_gds")
    if length % _ALIGNMENT or length > size:
        raise DamagedRecord("its header has an impossible length")
    return length


def parse(head: bytes, size: int) -> Header:
    """Parses a header strictly.

    Args:
        head: the beginning of the file, at least its header.
        size: size of the whole file.

    Raises:
        DamagedRecord: not a record, or an incomplete one.
        NewerRecord: written by a newer version of the format.
    """
    start = header_length(head, size)
    text = bytearray(head[8:start])
    stored, text[CRC] = bytes(text[CRC]), b"00000000"
    if len(text) != start - 8 or stored != b"%08x" % zlib.crc32(text):
        raise DamagedRecord("its header does not match its checksum")
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
        metadata = header.pop("__metadata__")
        version = int(metadata["version"])
        if metadata["format"] == "monai_gds" and version > VERSION:
            raise NewerRecord(f"it has format version {version}, and this monai_gds reads up to {VERSION}")
        if metadata["format"] == "monai_gds" and metadata["checksum"] != "wsum64":
            raise NewerRecord(f"its checksums are {metadata['checksum']!r:.40}, which this version does not know")
        if metadata["format"] != "monai_gds" or version != VERSION:
            raise DamagedRecord(f"its format is {metadata['format']!r} version {version}")
        entries = _entries(header, json.loads(metadata["checksums"]), start, size)
        key, tree = json.loads(metadata["key"]), json.loads(metadata["tree"])
        if not isinstance(key, dict):
            raise DamagedRecord("its key is not a JSON object")
        return Header(key, tree, entries.pop(ARRAYS, None), entries)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as e:
        if isinstance(e, (DamagedRecord, NewerRecord)):
            raise
        raise DamagedRecord(f"its header is malformed: {e!r}") from e


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise DamagedRecord("its header names an entry twice")
    return out


def _entries(header: dict[str, Any], checksums: dict[str, str], start: int, size: int) -> dict[str, Tensor]:
    """The entries in file order, without padding. Together with it they must cover the file without gaps."""
    found: dict[str, Tensor] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = map(_whole, entry["data_offsets"])
        shape = tuple(map(_whole, entry["shape"]))
        if entry["dtype"] not in DTYPES:
            raise DamagedRecord(f"its entry {name!r} has the unknown dtype {entry['dtype']!r}")
        dtype, itemsize = DTYPES[entry["dtype"]]
        if begin != end or stop - begin != math.prod(shape) * itemsize or min(shape, default=0) < 0:
            raise DamagedRecord(f"its entry {name!r} is not where or as large as it should be")
        end = stop
        if not name.startswith(_PAD):
            found[name] = Tensor(dtype, shape, start + begin, stop - begin, int(checksums[name], 16))
    if start + end != size:
        raise DamagedRecord(f"it has {size} bytes instead of {start + end}")
    return found


def ingredients(header: Header, name: str) -> Ingredients:
    """The ingredients of a record's key, checked against its file name.

    Raises:
        DamagedRecord: no writer writes such a key, or it is not the key that the file is named after.
    """
    try:
        found = _ingredients(header.key)
        written_as = digest_of(header.key["parts"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise DamagedRecord(f"its key is malformed: {e!r}") from e
    if written_as != digest_in(name):
        raise DamagedRecord("it is not the record of its name: it was swapped, copied or renamed")
    return found


def _ingredients(key: dict[str, Any]) -> Ingredients:
    parts = key["parts"]
    if type(parts) is not list:
        raise TypeError("its parts are not a list")
    item, pipeline = _text(key["item"]), _text(key["pipeline"])
    if not _HEX.fullmatch(pipeline):
        raise ValueError("its pipeline is not in hex digits")
    sources = {path: (_whole(size), _text(identity)) for path, (size, identity) in key["sources"].items()}
    # parts = [format, item, transforms, MONAI, state, sources, rooted]; leave out MONAI's version and the sources.
    common = [*parts[:3], *parts[4:5], *parts[6:]]
    return Ingredients(item, pipeline, sources, digest_of([common, *sorted(sources)]))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r:.40} is not a text")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} is not a whole number")
    return value
