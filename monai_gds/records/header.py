"""Parses the header of a record. Imports only the standard library: the command ``monai-gds cache`` must start fast.

The format is specified in :mod:`monai_gds.records.writing`. Files are opened for reading only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from monai_gds import limits
from monai_gds.base.dtypes import DTYPES, MOST_AXES
from monai_gds.base.file_systems import KEEPS_ZEROS, kind_of, open_fd, read_at
from monai_gds.errors import DamagedRecord, NewerRecord

#: The version of the format.
VERSION = 2

#: What follows the digest in the name of a record.
SUFFIX = f".v{VERSION}.safetensors"

#: The entry of an item's small arrays, packed together.
ARRAYS = "__arrays"

#: The entry of a packed tensor's table: this and the tensor's name.
TABLE = "__tiles."

#: The entries of a packed tensor's runs, their table and their blocks: these and the tensor's name.
RUNS = "__runs."
BLOCKS = "__run_blocks."

#: The same of joint runs: these and a :class:`RunsKey` as JSON.
JOINT_RUNS = "__joint_runs."
JOINT_BLOCKS = "__joint_run_blocks."
_RESERVED = "__"

#: The entries between others: this and a number.
PAD = "__pad."
_ALIGNMENT = 4096

#: A longer header is refused, as by the safetensors library: a sparse file of 4 kB can declare one of gigabytes.
_LONGEST = 100_000_000

#: Bytes of holes that may lie beside each byte of data, see :func:`check_holes`.
_MOST_HOLES = 64

_ITEM_BYTES = dict(DTYPES.values())

#: A form in which a record was to be written.
_FORM = re.compile(r"[a-z][a-z0-9]{0,15} [1-9][0-9]{0,3}")

#: The checksum of an entry.
_CHECKSUM = re.compile(r"[0-9a-f]{16}")

_NAME = re.compile(rf"([0-9a-f]{{32}}){re.escape(SUFFIX)}")
_PREFIX = b'{"__metadata__":{"header_crc32":"'

#: Where the checksum is in a header.
CRC = slice(len(_PREFIX), len(_PREFIX) + 8)

#: Size and identity of a source file; see :class:`monai_gds.keys.sources.Identity`.
SourceState: TypeAlias = tuple[int, str]


class Tensor(NamedTuple):
    """One tensor in the file: ``offset`` and ``nbytes`` in bytes of the file, ``checksum`` of those bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int


class Tiled(NamedTuple):
    """A packed tensor."""

    layout: dict[str, Any]  # as the tree describes it, unchecked
    table: Tensor  # where its table lies
    uses: frozenset[str]  # the other fields of its node in the tree: "numpy" for an array, and so on


class RunsKey(NamedTuple):
    """What runs are of: a packed tensor alone, or it and where another tensor is above a threshold (joint runs)."""

    label: str  # the name of the packed tensor
    image: str = ""  # the name of the other tensor
    threshold: str = ""  # as :func:`monai_gds.tiles.runs.threshold_text` gives it; empty if the runs are not joint

    @property
    def entries(self) -> tuple[str, str]:
        """The names of the entries of the table and of the blocks."""
        if not self.threshold:
            return RUNS + self.label, BLOCKS + self.label
        text = json.dumps(self, separators=(",", ":"))
        return JOINT_RUNS + text, JOINT_BLOCKS + text

    @classmethod
    def of_table(cls, entry: str) -> RunsKey | None:
        """The key, given the name of a table's entry; None if it is no such name."""
        if entry.startswith(RUNS):
            return cls(entry.removeprefix(RUNS))
        if not entry.startswith(JOINT_RUNS):
            return None
        parts = _loads(entry.removeprefix(JOINT_RUNS))
        if not isinstance(parts, list) or [type(part) for part in parts] != [str] * 3 or not parts[2]:
            raise DamagedRecord(f"its entry {entry!r:.40} names no joint runs")
        return cls(*parts)


class RunEntries(NamedTuple):
    """Where runs lie."""

    table: Tensor
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header."""

    key: dict[str, Any]  # what the record stores about its key, unchecked
    tree: Any  # the item tree
    arrays: Tensor | None  # where the packed small arrays lie, if there are any
    tensors: dict[str, Tensor]  # the item's tensors by name, in the order of the file
    tiles: dict[str, Tiled]  # the packed tensors
    runs: dict[RunsKey, RunEntries]  # those of packed tensors
    form: str  # codec and edge with which packing was tried; empty if it was not

    def front(self) -> dict[str, Tensor]:
        """The entries between the header and the item's tensors, by name."""
        arrays = {} if self.arrays is None else {ARRAYS: self.arrays}
        tables = {TABLE + name: tiled.table for name, tiled in self.tiles.items()}
        return {**arrays, **tables, **{key.entries[0]: runs.table for key, runs in self.runs.items()}}


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor of the item when it is not packed."""
    return math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]


def digest_in(name: str) -> str | None:
    """The digest in a file name; None if it is not the name of a record."""
    found = _NAME.fullmatch(name)
    return None if found is None else found[1]


def read(fd: int) -> Header:
    """Reads the header of an open file. Raises as :func:`parse`, or OSError."""
    size = os.fstat(fd).st_size
    head = read_at(fd, limits.HEADER_READ_BYTES)
    needed = header_length(head, size)
    check_holes(fd)
    if needed > len(head):
        head = read_at(fd, needed)
    return parse(head, size)


def check_holes(file: int | str) -> None:
    """Refuses a file, given by its descriptor or its path, that is nearly all holes.

    A sparse file of 4 kB can declare tensors of terabytes, all zeros, with right checksums, and holes take memory as
    soon as they are read. A record has none when it is written, but a copy may have some where the tensors have zeros,
    as may any file on a file system that does not store zeros. So a file is refused only if it cannot be such a copy:
    it has more than 256 MiB of holes, and less than 1/64 as much data, on a file system that keeps zeros. Its item is
    computed again, and the new record has no holes.

    Raises:
        DamagedRecord: the file is refused.
        OSError: it cannot be opened.
    """
    st = os.stat(file)
    if st.st_size <= limits.HOLES_BYTES or st.st_blocks * 512 >= st.st_size:
        return
    fd = file if isinstance(file, int) else open_fd(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        data = _data_bytes(fd, st.st_size) if kind_of(fd) in KEEPS_ZEROS else st.st_size
    finally:
        if fd != file:
            os.close(fd)
    if st.st_size - data > max(limits.HOLES_BYTES, _MOST_HOLES * data):
        raise DamagedRecord(f"only {data} of its {st.st_size} bytes are there, all others are holes")


def _data_bytes(fd: int, size: int) -> int:
    """Bytes of a file that are not in holes, as far as the file system can tell. Compression does not change them."""
    data = end = 0
    with contextlib.suppress(OSError):  # ENXIO: no data after this
        while end < size:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            data += end - begin
    return data


def header_length(head: bytes, size: int) -> int:
    """The offset of the data in a file of ``size`` bytes that begins with ``head``. Raises DamagedRecord."""
    length = 8 + int.from_bytes(head[:8], "little")
    if len(head) < 8 or head[8 : 8 + len(_PREFIX)] != _PREFIX[: len(head) - 8]:
        raise DamagedRecord("it is not a record of monai_gds")
    if length % _ALIGNMENT or length > min(size, _LONGEST):
        raise DamagedRecord("its header has an impossible length")
    return length


def parse(head: bytes, size: int) -> Header:
    """Parses a header strictly, given at least the header and the size of the whole file.

    Raises:
        DamagedRecord: it is not a record, or incomplete.
        NewerRecord: it was written in a newer version of the format.
    """
    start = header_length(head, size)
    text = bytearray(head[8:start])
    stored, text[CRC] = bytes(text[CRC]), b"00000000"
    if len(text) != start - 8 or stored != b"%08x" % zlib.crc32(text):
        raise DamagedRecord("its header does not match its checksum")
    try:
        header = _loads_entries(text.decode())
        metadata = header.pop("__metadata__")
        "".join([*header, *metadata, *metadata.values()]).encode()  # raises for lone surrogates, as safetensors does
        version = int(metadata["version"])
        if metadata["format"] == "monai_gds" and version > VERSION:
            raise NewerRecord(f"it has format version {version}, and this monai_gds reads up to {VERSION}")
        if metadata["format"] == "monai_gds" and metadata["checksum"] != "wsum64":
            raise NewerRecord(f"its checksums are {metadata['checksum']!r:.40}, which this version does not support")
        if metadata["format"] != "monai_gds" or version != VERSION:
            raise DamagedRecord(f"its format is {metadata['format']!r} version {version}")
        entries = _entries(header, _loads(metadata["checksums"]), start, size)
        key, tree = _loads(metadata["key"]), _loads(metadata["tree"])
        if not isinstance(key, dict):
            raise DamagedRecord("its key is not a JSON object")
        runs = _runs(entries)
        tiles = _tiles(tree, entries) if '"tiles":' in metadata["tree"] else {}
        arrays = entries.pop(ARRAYS, None)
        if not tiles.keys() >= {key.label for key in runs}:
            raise DamagedRecord("it has runs of a tensor that is not packed")
        if not entries.keys() >= {key.image for key in runs if key.threshold}:
            raise DamagedRecord("it has joint runs with a tensor that is not there")
        if strange := [name for name in entries if name.startswith(_RESERVED)]:
            raise NewerRecord(f"it has the entry {strange[0]!r:.40}, which this version does not support")
        if "form" in metadata and not _FORM.fullmatch(metadata["form"]):
            raise DamagedRecord(f"its header names the form {metadata['form']!r:.40}, which no version writes")
        return Header(key, tree, arrays, entries, tiles, runs, metadata.get("form", ""))
    except (DamagedRecord, NewerRecord):
        raise
    except Exception as e:  # anyone may have written it
        raise DamagedRecord(f"its header is malformed: {e!r:.200}") from e


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise DamagedRecord("its header names an entry twice")
    return out


#: Python's own parser takes NaN and Infinity, which no other parser of JSON does. ``json.loads`` would make a new one
#: for each text.
_loads = json.JSONDecoder(parse_constant=_no_constant).decode
_loads_entries = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_no_duplicates).decode


def _entries(header: dict[str, Any], checksums: dict[str, str], start: int, size: int) -> dict[str, Tensor]:
    """The entries in file order, without padding. Together with the padding they must cover the file without gaps."""
    found: dict[str, Tensor] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = map(_whole, entry["data_offsets"])
        shape = tuple(map(_whole, entry["shape"]))
        if entry["dtype"] not in DTYPES:
            raise DamagedRecord(f"its entry {name!r:.40} has the unknown dtype {entry['dtype']!r:.40}")
        dtype, itemsize = DTYPES[entry["dtype"]]
        if len(shape) > MOST_AXES or min(shape, default=0) < 0 or math.prod([n or 1 for n in shape]) >= 1 << 63:
            raise DamagedRecord(f"its entry {name!r:.40} has an impossible shape")
        if begin != end or stop - begin != math.prod(shape) * itemsize:
            raise DamagedRecord(f"its entry {name!r:.40} has the wrong place or size")
        end = stop
        if not name.startswith(PAD):
            if not _CHECKSUM.fullmatch(checksums[name]):
                raise DamagedRecord(f"the checksum of its entry {name!r:.40} is malformed")
            found[name] = Tensor(dtype, shape, start + begin, stop - begin, int(checksums[name], 16))
    if start + end != size:
        raise DamagedRecord(f"it has {size} bytes instead of {start + end}")
    return found


def _runs(entries: dict[str, Tensor]) -> dict[RunsKey, RunEntries]:
    """The runs of packed tensors. Removes their tables and blocks from ``entries``."""
    keys = [key for key in map(RunsKey.of_table, entries) if key is not None]
    return {key: RunEntries(*map(entries.pop, key.entries)) for key in keys}


def _tiles(tree: Any, entries: dict[str, Tensor]) -> dict[str, Tiled]:
    """The packed tensors. Removes their tables from ``entries``, and gives them the dtype and shape they unpack to."""
    tables = {name.removeprefix(TABLE): entries.pop(name) for name in list(entries) if name.startswith(TABLE)}
    found: dict[str, Tiled] = {}
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            tensor = node.get("$tensor")
            if isinstance(tensor, dict) and "tiles" in tensor:
                if tensor["name"] not in tables:
                    raise NewerRecord(f"its tensor {tensor['name']!r:.40} has tiles without a table, which is unknown")
                uses = frozenset(tensor) - {"name", "tiles"}
                found[tensor["name"]] = Tiled(tensor["tiles"], tables[tensor["name"]], uses)
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)
    if found.keys() != tables.keys():
        raise DamagedRecord("it has tables of tiles that no tensor uses")
    for name, (layout, _, _) in found.items():
        if entries[name].dtype != "uint8" or layout["dtype"] not in DTYPES:
            raise DamagedRecord(f"its packed tensor {name!r:.40} has an impossible dtype")
        shape = tuple(map(_whole, layout["shape"]))
        if len(shape) > MOST_AXES or not 0 < math.prod(shape) < 1 << 48:
            raise DamagedRecord(f"its packed tensor {name!r:.40} has an impossible shape")
        entries[name] = entries[name]._replace(dtype=DTYPES[layout["dtype"]][0], shape=shape)
    return found


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} is not a whole number")
    return value
