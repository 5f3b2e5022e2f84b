"""Records that no encoder writes, with right checksums, so that only their content can give them away.

Each kind is a function that changes an :class:`Opened` record: its entries, its tree, its key, its metadata, or the
header's JSON as it is written. ``KINDS`` are for any record, ``TILED`` for one with tensors in tiles.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from monai_gds.base.checksum import checksum
from monai_gds.base.dtypes import DTYPES
from monai_gds.records.header import BLOCKS, CRC, JOINT_BLOCKS, JOINT_RUNS, RUNS, TABLE, RunsKey

__all__ = ["KINDS", "TILED", "Opened"]

_ALIGNMENT = 4096


@dataclass
class Entry:
    """What a header says about an entry, and its bytes."""

    dtype: str
    shape: list[Any]
    data: bytes


@dataclass
class Opened:
    """A record taken apart, to be changed and written again.

    Attributes:
        metadata: the texts of the header, without those that follow.
        tree: the item tree.
        key: the key's ingredients.
        entries: by name, without padding, in the order of the file.
        header: changes the header's JSON last; may return its text instead.
        grow: bytes that the file has more than its data, as a hole.
        sums: checksums other than the right ones.
    """

    metadata: dict[str, Any]
    tree: Any
    key: Any
    entries: dict[str, Entry]
    header: Callable[[dict[str, Any]], str | bytes | None] = lambda _: None
    grow: int = 0
    sums: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, blob: bytes) -> Opened:
        """A sound record."""
        start = 8 + int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8:start])
        metadata = header.pop("__metadata__")
        tree, key = json.loads(metadata.pop("tree")), json.loads(metadata.pop("key"))
        metadata.pop("checksums")
        entries = {}
        for name, entry in header.items():
            if not name.startswith("__pad."):
                begin, end = (start + offset for offset in entry["data_offsets"])
                entries[name] = Entry(entry["dtype"], entry["shape"], blob[begin:end])
        return cls(metadata, tree, key, entries)

    def node(self, *path: Any) -> Any:
        """A part of the tree."""
        found = self.tree
        for key in path:
            found = found[key]
        return found

    def tiles(self, name: str) -> dict[str, Any]:
        """The description of the tiles of a tensor: the only one of this name."""
        found: dict[str, Any] = next(node for node in self._nodes(self.tree) if node.get("name") == name)["tiles"]
        return found

    def _nodes(self, node: Any) -> Any:
        if isinstance(node, dict):
            if isinstance(node.get("$tensor"), dict):
                yield node["$tensor"]
            node = list(node.values())
        if isinstance(node, list):
            for part in node:
                yield from self._nodes(part)

    def table(self, name: str, dtype: str = "i4") -> np.ndarray:
        """The table of the tiles, or with the right prefix the runs, of a tensor, to be put back by :meth:`put`."""
        return np.frombuffer(self.entries[name].data, dtype).copy()

    def put(self, name: str, data: np.ndarray | bytes) -> None:
        """Gives an entry of bytes other ones, as many as there are."""
        raw = data if isinstance(data, bytes) else data.tobytes()
        self.entries[name] = Entry("U8", [len(raw)], raw)

    def bytes(self) -> bytes:
        """The record, laid out as it should be."""
        header: dict[str, Any] = {}
        data, sums = bytearray(), {}
        for name, entry in self.entries.items():
            large = (
                len(entry.data) >= 64 << 10 or TABLE + name in self.entries or name.startswith((BLOCKS, JOINT_BLOCKS))
            )
            size = DTYPES.get(entry.dtype, ("", 1))[1] if type(entry.dtype) is str else 1
            _pad(header, data, _ALIGNMENT if large else size)
            begin = len(data)
            data += entry.data
            header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, len(data)]}
            flat = torch.frombuffer(bytearray(entry.data), dtype=torch.uint8) if entry.data else torch.empty(0)
            sums[name] = f"{checksum(flat):016x}" if entry.data else f"{0:016x}"
        _pad(header, data, _ALIGNMENT)
        texts = {"checksums": {**sums, **self.sums}, "key": self.key, "tree": self.tree}
        metadata = {**self.metadata, "header_crc32": "00000000"}
        for name, value in texts.items():
            metadata[name] = value if isinstance(value, Text) else json.dumps(value)
        whole = {"__metadata__": metadata, **header}
        changed = self.header(whole)
        text = json.dumps(whole, separators=(",", ":")) if changed is None else changed
        raw = bytearray(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        raw += b" " * (-(8 + len(raw)) % _ALIGNMENT)
        raw[CRC] = b"00000000"
        raw[CRC] = b"%08x" % zlib.crc32(raw)
        return len(raw).to_bytes(8, "little") + bytes(raw) + bytes(data)


class Text(str):
    """Text that stands for itself, where other values are written as JSON."""


def _pad(header: dict[str, Any], data: bytearray, to: int) -> None:
    gap = -len(data) % to
    if gap:
        header[f"__pad.{len(header)}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [len(data), len(data) + gap]}
        data += bytes(gap)


Kind = Callable[[Opened], Any]
KINDS: dict[str, Kind] = {}
TILED: dict[str, Kind] = {}

# ---------------------------------------------------------------------------------------------------------------------
# Metadata, whatever the type

_ODD: dict[str, Any] = {
    "null": None, "true": True, "3": 3, "-1": -1, "a huge number": 10**400, "1e999": math.inf, "nan": math.nan,
    "0.5": 0.5, "a list": [], "an object": {}, "empty": "", "a NUL": "\0", "an escape": "\x1b]0;x\a\n",
    "a lone surrogate": "\ud800", "deep": None,
}  # fmt: skip


def _metadata(name: str, value: Any) -> Kind:
    return lambda record: setattr(record, "header", lambda whole: whole["__metadata__"].__setitem__(name, value))


for _name in ("format", "version", "checksum", "checksums", "key", "tree"):
    for _text, _value in _ODD.items():
        KINDS[f"{_name} is {_text}"] = _metadata(_name, _value)
    KINDS[f"no {_name}"] = lambda record, name=_name: setattr(
        record, "header", lambda whole: whole["__metadata__"].pop(name) and None
    )
    KINDS[f"{_name} is JSON nested deeply"] = _metadata(_name, "[" * 100_000 + "]" * 100_000)
    KINDS[f"{_name} is half of an object"] = _metadata(_name, '{"a":')
    KINDS[f"{_name} is a number of many digits"] = _metadata(_name, "9" * 10_000)
for _text, _value in _ODD.items():
    KINDS[f"form is {_text}"] = _metadata("form", _value)
    KINDS[f"all metadata are {_text}"] = lambda record, value=_value: setattr(
        record, "header", lambda whole: whole.__setitem__("__metadata__", value)
    )
del KINDS["form is deep"]

KINDS["a header nested deeply"] = lambda record: setattr(
    record, "header", lambda whole: _begin(whole) + ',"x":' + "[" * 200_000 + "]" * 200_000 + "}"
)
KINDS["a header that is not UTF-8"] = lambda record: setattr(
    record, "header", lambda whole: _begin(whole).encode() + b',"\xff\xfe":1}'
)
KINDS["a header of two objects"] = lambda record: setattr(record, "header", lambda whole: json.dumps(whole) + "{}")
KINDS["a header with NaN"] = lambda record: setattr(record, "header", lambda whole: _begin(whole) + ',"x":NaN}')
KINDS["a header in UTF-16"] = lambda record: setattr(
    record, "header", lambda whole: _begin(whole).encode() + "}".encode("utf-16")
)
KINDS["a header with a BOM"] = lambda record: setattr(record, "header", lambda whole: b"\xef\xbb\xbf" + _dump(whole))
KINDS["a key twice in the metadata"] = lambda record: setattr(
    record, "header", lambda whole: _dump(whole).replace(b'"format":', b'"version":"2","format":', 1)
)


def _dump(whole: Any) -> bytes:
    return json.dumps(whole, separators=(",", ":")).encode()


def _begin(whole: Any) -> str:
    return json.dumps(whole, separators=(",", ":"))[:-1]


# ---------------------------------------------------------------------------------------------------------------------
# Entries


def _entry(name: str, change: Callable[[dict[str, Any]], Any]) -> Kind:
    return lambda record: setattr(record, "header", lambda whole: change(whole[name]) and None)


_SHAPES: dict[str, Any] = {
    "negative": [-3], "two negative": [-1, -3], "huge": [10**400], "overflowing to nothing": [0, 1 << 62, 1 << 62],
    "nothing by a huge number": [0, 10**30], "overflowing 64 bits to 3": [(1 << 64) + 3], "null": None, "text": "3",
    "an object": {}, "of floats": [3.0], "of booleans": [True, 3], "nested": [[3]], "NaN": [math.nan],
    "of 100 axes": [*[1] * 100, 3], "of 70,000 axes": [*[1] * 70_000, 3],
}  # fmt: skip
for _text, _shape in _SHAPES.items():
    KINDS[f"shape {_text}"] = _entry("small", lambda entry, shape=_shape: entry.update(shape=shape) or True)
for _text, _dtype in {
    **_ODD, "of a quantised tensor": "quint8", "of torch": "float32", "complex128": "C128", "4 bits": "F4",
    "another size": "F64", "__class__": "__class__",
}.items():  # fmt: skip
    KINDS[f"dtype {_text}"] = _entry("small", lambda entry, dtype=_dtype: entry.update(dtype=dtype) or True)
for _text, _offsets in {
    "negative": [-12, 0], "backwards": [12, 0], "beyond the end": [1 << 40, (1 << 40) + 12], "huge": [0, 10**400],
    "of floats": [0.0, 12.0], "one": [0], "three": [0, 6, 12], "null": None, "text": "ab", "of another entry": [0, 12],
    "NaN": [math.nan, math.nan], "an object": {"0": 0, "1": 12}, "Infinity": [0, math.inf],
    "of booleans": [False, True],
}.items():  # fmt: skip
    KINDS[f"offsets {_text}"] = _entry("small", lambda e, offsets=_offsets: e.update(data_offsets=offsets) or True)
for _text, _value in _ODD.items():
    KINDS[f"an entry is {_text}"] = lambda record, value=_value: setattr(
        record, "header", lambda whole: whole.__setitem__("small", value)
    )
    KINDS[f"a checksum is {_text}"] = lambda record, value=_value: record.sums.__setitem__("small", value)
KINDS["a checksum is negative"] = lambda record: record.sums.__setitem__("small", "-1")
KINDS["a checksum has a prefix and underscores"] = lambda record: record.sums.__setitem__("small", "0x1_0")
for _text, _name in {
    "a NUL": "a\0b", "an escape": "\x1b[2J", "a line": "a\nb", "a lone surrogate": "\ud800", "nothing": "",
    "a path": "../../etc/shadow", "100,000 characters": "x" * 100_000, "a reserved name": "__class__",
    "an unused table of tiles": f"{TABLE}small", "unused runs": f"{RUNS}small", "unused blocks": f"{BLOCKS}small",
    "joint runs of nothing": JOINT_RUNS, "joint runs of what is whole": f'{JOINT_RUNS}["small","small","0.0"]',
}.items():  # fmt: skip
    KINDS[f"one entry more, of the name {_text}"] = lambda record, name=_name: record.entries.__setitem__(
        name, Entry("U8", [8], bytes(8))
    )
    KINDS[f"a tensor of the name {_text}"] = lambda record, name=_name: _renamed(record, name)
KINDS["an entry of nothing, of a dtype that is larger than it"] = lambda record: record.entries.__setitem__(
    "x", Entry("F64", [0], b"")
)
KINDS["an entry twice"] = lambda record: setattr(
    record, "header", lambda whole: _begin(whole) + ',"small":' + json.dumps(whole["small"]) + "}"
)
KINDS["empty small arrays"] = lambda record: record.put("__arrays", b"")
KINDS["text of code points beyond the last"] = lambda record: record.put(
    "__arrays", b"\xff" * len(record.entries["__arrays"].data)
)
KINDS["empty small arrays that nothing uses"] = lambda record: (
    record.put("__arrays", b"") or setattr(record, "tree", {"a": {"$tensor": {"name": "small"}}})
)
KINDS["no small arrays"] = lambda record: record.entries.pop("__arrays")
KINDS["small arrays of floats"] = lambda record: setattr(record.entries["__arrays"], "dtype", "F32")
KINDS["small arrays that were cut"] = lambda record: record.put("__arrays", record.entries["__arrays"].data[:16])
KINDS["a tensor whose bytes are those of a longer one"] = lambda record: setattr(
    record.entries["small"], "data", bytes(16)
)


def _renamed(record: Opened, name: str) -> None:
    """Gives the small tensor another name, in the tree too."""
    record.entries = {name if old == "small" else old: entry for old, entry in record.entries.items()}
    next(node for node in record._nodes(record.tree) if node["name"] == "small")["name"] = name


# ---------------------------------------------------------------------------------------------------------------------
# Keys

for _text, _value in _ODD.items():
    KINDS[f"the key is {_text} in JSON"] = lambda record, value=_value: setattr(record, "key", value)
    KINDS[f"the parts of the key are {_text}"] = lambda record, value=_value: record.key.update(parts=value)
KINDS["the key of another record"] = lambda record: record.key["parts"].append("more")
KINDS["a key nested deeply"] = lambda record: setattr(
    record, "key", Text('{"parts":' + "[" * 50_000 + "]" * 50_000 + "}")
)
KINDS["parts that are no text in UTF-8"] = lambda record: record.key.update(parts=["\ud800"])

# ---------------------------------------------------------------------------------------------------------------------
# Trees


def _deep(depth: int) -> Text:
    return Text("[" * depth + "]" * depth)


def _tree(node: Any) -> Kind:
    """Another tree, beside whose node every tensor is used once."""
    return lambda record: setattr(record, "tree", node if isinstance(node, Text) else {"x": node, "image": record.tree})


_QUANTISED = ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")
_NODES: dict[str, Any] = {
    **{f"small tensor of {name}": {"$small_tensor": [name, [2], 0, {}]} for name in (
        *_QUANTISED, "bits8", "bits16", "uint1", "int4", "float4_e2m1fn_x2", "float8_e8m0fnu", "complex32", "Tensor",
        "float", "load", "__class__", "", "no such name", "strided", "sparse_coo", "contiguous_format",
    )},
    "small tensor beyond the end": {"$small_tensor": ["float32", [2], 1 << 40, {}]},
    "small tensor at a negative place": {"$small_tensor": ["float32", [2], -8, {}]},
    "small tensor at half a byte": {"$small_tensor": ["float32", [2], 0.5, {}]},
    "small tensor that is not aligned": {"$small_tensor": ["float32", [2], 3, {}]},
    "small tensor of a negative size": {"$small_tensor": ["float32", [-2], 0, {}]},
    "small tensor that overflows": {"$small_tensor": ["float32", [1 << 62, 1 << 62], 0, {}]},
    "small tensor of nothing that overflows": {"$small_tensor": ["float32", [0, 1 << 62, 1 << 62], 0, {}]},
    "small tensor of nothing by a huge number": {"$small_tensor": ["float32", [0, 10**30], 0, {}]},
    "small tensor of 100 axes": {"$small_tensor": ["float32", [1] * 100, 0, {}]},
    "small tensor of 70,000 axes": {"$small_tensor": ["float32", [1] * 70_000, 0, {}]},
    "small tensor that requires a gradient of an integer": {"$small_tensor": ["int32", [1], 0, {"requires_grad": 1}]},
    "small tensor whose shape is text": {"$small_tensor": ["float32", "22", 0, {}]},
    "small tensor whose dtype is a list": {"$small_tensor": [["float32"], [2], 0, {}]},
    "small tensor whose flags are a list": {"$small_tensor": ["float32", [2], 0, ["requires_grad"]]},
    "array of pointers": {"$array": ["|O", [1], 0]},
    "array of gigabytes": {"$array": ["|S2000000000", [1 << 33], 0]},
    "array of nothing in gigabytes": {"$array": ["|S2000000000", [0, 1 << 60], 0]},
    "array of elements of no size": {"$array": ["|S0", [1 << 60], 0]},
    "array of text of no size": {"$array": ["<U0", [1 << 50], 0]},
    "array of text that is none": {"$array": ["<U1", [4], 0]},
    "array of no size with axes": {"$array": ["|S0", [1 << 40, 1 << 40], 0]},
    "array of nothing beside axes": {"$array": ["<f4", [1 << 40, 1 << 40, 0], 0]},
    "array of a dtype that is none": {"$array": ["nothing", [1], 0]},
    "array of a dtype with commas": {"$array": ["i4,i4", [1], 0]},
    "array of a negative size": {"$array": ["<f4", [-1], 0]},
    "array of 100 axes": {"$array": ["<f4", [1] * 100, 0]},
    "array that begins nowhere": {"$array": ["<f4", [1], None]},
    "array of a date without a unit": {"$array": ["<M8", [1], 0]},
    "array of JSON that is none": {"$array": ["[", [1], 0]},
    "array of JSON that is deep": {"$array": ["[" * 50_000, [1], 0]},
    "texts of a huge width": {"$texts": ["<", 1 << 40, [1], ["a"]]},
    "texts of a large width": {"$texts": ["<", 1 << 28, [3], ["a", "b", "c"]]},
    "texts of a width that is text": {"$texts": ["<", "5", [1], ["a"]]},
    "texts of a shape that overflows": {"$texts": ["<", None, [1 << 62, 0, 1 << 62], []]},
    "texts of numbers": {"$texts": ["<", None, [1], [5]]},
    "a scalar of pointers": {"$scalar": ["|O", "AAAAAAAAAAA="]},
    "a scalar of no bytes": {"$scalar": ["<f4", ""]},
    "a scalar of no size": {"$scalar": ["|S0", ""]},
    "an integer of many digits": {"$int": "f" * 2_000_000},
    "an integer that is none": {"$int": "0x"},
    "an integer that is a number": {"$int": 5},
    "a float that is none": {"$float": "1__0"},
    "a float of text of many digits": {"$float": "9" * 100_000},
    "bytes that are none": {"$bytes": "ä"},
    "bytes of a number": {"$bytes": 5},
    "an enum that is none": {"$enum": ["__doc__", "x"]},
    "an enum of another module": {"$enum": ["os.system", "x"]},
    "an enum of a list": {"$enum": [[], []]},
    "an enum with too much": {"$enum": ["a", "b", "c"]},
    "a dtype that is none": {"$dtype": "x"},
    "a dtype of pointers": {"$dtype": "|O"},
    "a dtype of an object": {"$dtype": {}},
    "a named tuple of os": {"$namedtuple": ["os", "system", ["a"], ["id"]]},
    "a named tuple of os.path": {"$namedtuple": ["os", "path.join", [], []]},
    "a named tuple that is an instance": {"$namedtuple": ["sys", "version_info", ["major"], [1]]},
    "a named tuple of an unimported module": {"$namedtuple": ["antigravity", "x", [], []]},
    "a named tuple of other fields": {"$namedtuple": ["inspect", "ArgSpec", ["a"], [1]]},
    "a named tuple of a list": {"$namedtuple": [["os"], "system", [], []]},
    "a registered type that is none": {"$registered": ["os.system", "id"]},
    "a registered type of a list": {"$registered": [[], 1]},
    "a built-in type as a registered one": {"$registered": ["$date", "2020-01-01"]},
    "a range of huge numbers": {"$range": [0, 10**30, 0]},
    "a slice of too many": {"$slice": [1, 2, 3, 4]},
    "a set of lists": {"$set": [[1]]},
    "a set of tensors": {"$set": [{"$small_tensor": ["float32", [1], 0, {}]}]},
    "a size of text": {"$size": ["a"]},
    "a size of huge numbers": {"$size": [10**30]},
    "a size that is negative": {"$size": [-5]},
    "a dict of lists as keys": {"$dict": [[[1], 1]]},
    "a dict of tensors as keys": {"$dict": [[{"$small_tensor": ["float32", [1], 0, {}]}, 1]]},
    "a dict of nodes as keys that are none": {"$dict": [[{"$date": "x"}, 1]]},
    "a dict of three": {"$dict": [[1, 2, 3]]},
    "a dict of text": {"$dict": "ab"},
    "a dict that is none": {"$dict": 5},
    "a type of an earlier version": {"$deque": [-1, "a"]},
    "a date that is none": {"$date": 5},
    "a zone of a huge offset": {"$timezone": ["offset", [10**9, 0, 0]]},
    "a delta that overflows": {"$timedelta": [10**30, 0, 0]},
    "a device that is none": {"$device": "x"},
    "a device of a list": {"$device": []},
    "a path of a NUL": {"$path": "a\0b"},
    "a path of a number": {"$path": 5},
    "a path below a root": {"$root": "/../../etc"},
    "a path below a root that is a list": {"$root": []},
    "a value of the item": {"$item": ["no", "such", "key"]},
    "a value of the item, of a list": {"$item": [[]]},
    "a value of the item, of no keys": {"$item": None},
    "something opaque": {"$opaque": 5},
    "a MetaTensor of a list": {"$metatensor": [[1], []]},
    "a MetaTensor of a number": {"$metatensor": [5, []]},
    "a MetaTensor with an odd attribute": {"$metatensor": [{"$small_tensor": ["float32", [1], 0, {}]}, [[5, 6]]]},
    "one MetaTensor in another": {"$metatensor": [{"$metatensor": [{"$small_tensor": ["int8", [1], 0, {}]}, []]}, []]},
    "a MetaTensor of three": {"$metatensor": [1, 2, 3]},
    "a tensor that is not there": {"$tensor": {"name": "no such tensor"}},
    "a tensor without a name": {"$tensor": {}},
    "a tensor that is text": {"$tensor": "small"},
    "a tensor of a list": {"$tensor": {"name": []}},
    "a tensor used twice": {"$tensor": {"name": "small"}},
    "the small arrays as a tensor": {"$tensor": {"name": "__arrays"}},
    "padding as a tensor": {"$tensor": {"name": "__pad.0"}},
    "tiles that are text": {"$tensor": {"name": "small", "tiles": "x"}},
    "nested deeply": Text('{"x":' * 50_000 + "1" + "}" * 50_000),
    "a list nested deeply": _deep(100_000),
    "a list nested a little too deeply": _deep(150),
    "NaN as a number": Text('{"x":NaN}'),
    "a number of many digits": Text('{"x":' + "9" * 10_000 + "}"),
    "a key twice": Text('{"x":1,"x":2}'),
    "a tag beside a key": {"$tuple": [], "a": 1},
    "a tag of a later version": {"$new": 1},
    "a name with an escape": {"\x1b[2J\0\n": 1},
}  # fmt: skip
for _text, _node in _NODES.items():
    KINDS[f"tree: {_text}"] = _tree(_node)
for _text, _value in _ODD.items():
    KINDS[f"the tree is {_text} in JSON"] = lambda record, value=_value: setattr(record, "tree", value)
for _tag in (
    "$tensor", "$metatensor", "$small_tensor", "$array", "$texts", "$namedtuple", "$dict", "$registered", "$tuple",
    "$set", "$frozenset", "$slice", "$size", "$scalar", "$enum", "$int", "$float", "$complex", "$bytes", "$str",
    "$path", "$root", "$item", "$ordered_dict", "$range", "$date", "$datetime", "$torch_dtype", "$dtype",
):  # fmt: skip
    for _text, _value in {"null": None, "3": 3, "text": "ab", "a list of lists": [[[]]], "an object": {"a": 1}}.items():
        KINDS[f"tree: {_tag} of {_text}"] = _tree({_tag: _value})


def _use(**more: Any) -> Kind:
    return lambda record: next(n for n in record._nodes(record.tree) if n["name"] == "small").update(more)


KINDS["a complex tensor of three numbers"] = _use(complex=True)
KINDS["a tensor as an array of another dtype"] = _use(numpy="<i8")
KINDS["a tensor as an array of pointers"] = _use(numpy="|O")
KINDS["a tensor with an unknown field"] = _use(other=1)
KINDS["a gradient of odd type"] = _use(requires_grad=[1])


KINDS["a tensor of the dtype BOOL whose bytes are 7"] = lambda record: record.entries.__setitem__(
    "small", Entry("BOOL", [3], b"\7\7\7")
)


# ---------------------------------------------------------------------------------------------------------------------
# Tiles


def _layout(**change: Any) -> Kind:
    return lambda record: record.tiles("image").update(change)


for _text, _change in {
    "a codec of a list": {"codec": []}, "a codec of a later version": {"codec": "new"}, "bitcomp": {"codec": "bitcomp"},
    "another codec": {"codec": "zstd"}, "bitcomp without a filter": {"codec": "bitcomp", "filter": "none"},
    "a filter that is none": {"filter": "none"}, "a shape that is huge": {"shape": [10**400]},
    "a shape that is negative": {"shape": [-5, 3]}, "a shape of 100 axes": {"shape": [1] * 100},
    "a shape of 64 axes": {"shape": [*[1] * 61, 64, 64, 72]}, "a shape of 63 axes": {"shape": [*[1] * 60, 64, 64, 72]},
    "a shape of 2**40": {"shape": [1 << 40]}, "a shape that is too small": {"shape": [1, 64, 64, 71]},
    "a shape of one axis": {"shape": [64 * 64 * 72]}, "a shape of other axes": {"shape": [1, 72, 64, 64]},
    "a shape of floats": {"shape": [1.0, 64.0, 64.0, 72.0]}, "a shape of booleans": {"shape": [True, 64, 64, 72]},
    "no shape": {"shape": []}, "a shape that is null": {"shape": None}, "a shape with 0": {"shape": [0, 64, 64, 72]},
    "a tile that is negative": {"tile": [-32, -32, 32]}, "a tile of nothing": {"tile": [0, 32, 32]},
    "a tile of two axes": {"tile": [32, 32]}, "a tile of text": {"tile": "xyz"}, "a huge tile": {"tile": [1 << 20] * 3},
    "a tile of one voxel": {"tile": [1, 1, 1]}, "a long tile": {"tile": [1, 1, 1 << 20]},
    "a tile that is larger than the tensor": {"tile": [128, 64, 128]}, "a tile of floats": {"tile": [32.0, 32.0, 32.0]},
    "a palette of a value more": {"palette": 101}, "a palette of a value less": {"palette": 99},
    "a huge palette": {"palette": 1 << 39}, "a negative palette": {"palette": -1}, "no palette": {"palette": 0},
    "a palette of text": {"palette": "x"}, "a palette of a boolean": {"palette": True}, "65,536": {"palette": 65536},
    "a dtype that is none": {"dtype": "quint8"}, "a dtype of a number": {"dtype": 7}, "a dtype of []": {"dtype": []},
    "a dtype of another size": {"dtype": "F64"}, "a dtype without patterns": {"dtype": "C64"},
    "a float in place of another": {"dtype": "BF16"}, "an unknown field": {"later": 1},
}.items():  # fmt: skip
    TILED[f"tiles: {_text}"] = _layout(**_change)
for _name in ("dtype", "shape", "tile", "filter", "codec", "palette"):
    TILED[f"tiles: no {_name}"] = lambda record, name=_name: record.tiles("image").pop(name)
for _text, _value in _ODD.items():
    TILED[f"tiles are {_text}"] = lambda record, value=_value: next(
        n for n in record._nodes(record.tree) if n["name"] == "image"
    ).update(tiles=value)
TILED["tiles of another tensor too"] = lambda record: next(
    n for n in record._nodes(record.tree) if n["name"] == "small"
).update(tiles=record.tiles("image"))
TILED["tiles of a complex tensor"] = lambda record: next(
    n for n in record._nodes(record.tree) if n["name"] == "image"
).update(complex=True)
TILED["no tiles"] = lambda record: next(n for n in record._nodes(record.tree) if n["name"] == "image").pop("tiles")


def _table(change: Callable[[np.ndarray], Any], name: str = f"{TABLE}image") -> Kind:
    def spoil(record: Opened) -> None:
        table = record.table(name, "i4" if len(record.entries[name].data) % 4 == 0 else "u1")
        changed = change(table)
        record.put(name, table if changed is None else changed)

    return spoil


def _set(index: Any, value: Any) -> Callable[[np.ndarray], None]:
    return lambda table: table.__setitem__(index, value)


for _text, _edit in {
    "sizes that are huge": _set(slice(0, 12), 1 << 30), "a size of INT_MIN": _set(0, -(1 << 31)),
    "a size of -256": _set(0, -256), "a size of INT_MAX": _set(0, (1 << 31) - 1),
    "only constants": _set(slice(0, 12), 0),
    "sizes in another order": lambda table: table.__setitem__(slice(0, 12), table[:12][::-1].copy()),
    "a size that is a byte less": lambda table: table.__setitem__(0, table[0] - 1),
    "a size that is 16 bytes more": lambda table: table.__setitem__(0, table[0] + 16),
    "checksums of zero": _set(slice(12, 24), 0), "another palette of NaN": _set(slice(24, None), 0x7FC00000),
    "cut": lambda table: table[:-1].copy(), "one entry more": lambda table: np.append(table, table[:1]),
    "nothing": lambda table: table[:0].copy(), "a part of a number": lambda table: table.tobytes()[:-1],
}.items():  # fmt: skip
    TILED[f"table: {_text}"] = _table(_edit)
TILED["streams: other bytes with their checksums"] = lambda record: _streams(record, lambda stream: stream[::-1])
TILED["streams: zeros with their checksums"] = lambda record: _streams(record, lambda stream: bytes(len(stream)))
TILED["streams: 255 with their checksums"] = lambda record: _streams(record, lambda stream: b"\xff" * len(stream))
TILED["streams: those of another tile"] = lambda record: _streams(record, lambda stream: stream[:4] + stream[:-4])
TILED["streams: cut"] = lambda record: record.put("image", record.entries["image"].data[:-16])
TILED["streams: none"] = lambda record: record.put("image", b"")
TILED["streams: of floats"] = lambda record: record.entries.__setitem__(
    "image", Entry("F32", [len(record.entries["image"].data) // 4], record.entries["image"].data)
)
TILED["streams: in a table of axes"] = lambda record: setattr(
    record.entries["image"], "shape", [1, len(record.entries["image"].data)]
)


def _streams(record: Opened, change: Callable[[bytes], bytes]) -> None:
    """Changes every stream, and its CRC-32."""
    table, data = record.table(f"{TABLE}image"), bytearray(record.entries["image"].data)
    count, at = record_tiles(record), 16
    for i in range(count):
        size = int(table[i])
        if size > 0:
            data[at : at + size] = change(bytes(data[at : at + size]))
            table[count + i : count + i + 1].view("u4")[0] = zlib.crc32(data[at : at + size])
            at += (size + 4 + 15) // 16 * 16
    record.put(f"{TABLE}image", table)
    record.put("image", bytes(data))


def record_tiles(record: Opened) -> int:
    """How many tiles the image has."""
    layout = record.tiles("image")
    return math.prod(-(-s // t) for s, t in zip(layout["shape"][-3:], layout["tile"], strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Runs

_RUNS = f"{RUNS}label"
for _text, _edit in {
    "no runs": _set(0, 0), "many runs": _set(0, -1), "blocks of no runs": _set(1, 0), "huge blocks": _set(1, -1),
    "no values": _set(2, 0), "many values": _set(2, 257), "another value": lambda table: table.__setitem__(-1, 77),
    "a huge size": _set(3, 1 << 30), "a size of INT_MIN": _set(3, -(1 << 31)), "a constant": _set(3, 0),
    "another checksum": _set(4, 1), "cut": lambda table: table[:-1].copy(), "nothing": lambda table: table[:0].copy(),
    "one entry more": lambda table: np.append(table, table[:1]),
    "counts of one value less and the other more": lambda table: np.add.at(table, [5, 6], [-9, 9]),
    "counts the other way round": lambda table: table.__setitem__(slice(5, 7), table[5:7][::-1].copy()),
    "counts that wrap": lambda table: table.__setitem__(slice(5, 7), [-1, int(table[5] + table[6] + 1)]),
    "values the other way round": lambda table: table.__setitem__(slice(7, 9), table[7:9][::-1].copy()),
    "values of NaN": _set(slice(7, 9), 0x7FC00000),
}.items():  # fmt: skip
    TILED[f"runs: {_text}"] = _table(_edit, _RUNS)
TILED["runs: blocks that were cut"] = lambda record: record.put(
    f"{BLOCKS}label", record.entries[f"{BLOCKS}label"].data[:-1]
)
TILED["runs: no blocks"] = lambda record: record.entries.pop(f"{BLOCKS}label")
TILED["runs: only blocks"] = lambda record: record.entries.pop(_RUNS)
TILED["runs: of the image"] = lambda record: setattr(
    record,
    "entries",
    {name.replace("s.label", "s.image") if "run" in name else name: e for name, e in record.entries.items()},
)

# ---------------------------------------------------------------------------------------------------------------------
# Joint runs: a table of one block and four values

JOINT = RunsKey("label", "image", "0.0")


def _flags(*order: int) -> Callable[[np.ndarray], None]:
    def change(table: np.ndarray) -> None:
        flags = table[-1:].view(np.uint8)
        flags[:] = flags[list(order)]

    return change


for _text, _edit in {
    "no runs": _set(0, 0), "no values": _set(2, 0), "two values": _set(2, 2), "a huge size": _set(3, 1 << 30),
    "another checksum": _set(4, 1), "cut": lambda table: table[:-1].copy(), "no flags": _set(-1, 0),
    "only flags": _set(-1, 0x01010101), "flags that are more": _set(-1, 0x02000200),
    "flags the other way round": _flags(1, 0, 3, 2), "another value": _set(9, 77),
    "counts the other way round": lambda table: table.__setitem__(slice(5, 9), table[5:9][[1, 0, 3, 2]]),
    "values the other way round": lambda table: table.__setitem__(slice(9, 13), table[9:13][::-1].copy()),
}.items():  # fmt: skip
    TILED[f"joint runs: {_text}"] = _table(_edit, JOINT.entries[0])


def _of(text: str) -> Kind:
    """Joint runs that are of something else, as their entries' names say."""

    def rename(record: Opened) -> None:
        was = JOINT.entries[0].removeprefix(JOINT_RUNS)
        record.entries = {
            name.replace(was, text) if name in JOINT.entries else name: entry for name, entry in record.entries.items()
        }

    return rename


for _text, _name in {
    "nothing": "", "text": "label", "two names": '["label","image"]', "an object": '{"label":"image"}',
    "a number": '["label","image",0.0]', "spaces": '["label", "image", "0.0"]', "no threshold": '["label","image",""]',
    "no number": '["label","image","x"]', "infinite digits": f'["label","image","{"9" * 5000}"]',
    "a number with zeros": '["label","image","00"]', "a number with underscores": '["label","image","1_0"]',
    "another threshold": '["label","image","1.0"]', "the label itself": '["label","label","0.0"]',
    "a small tensor": '["label","small","0.0"]', "no such tensor": '["label","none","0.0"]',
    "no such label": '["none","image","0.0"]', "a label that is whole": '["small","image","0.0"]',
    "a reserved name": '["label","__arrays","0.0"]', "nested deeply": "[" * 10_000, "a surrogate": '["\\ud800","","0"]',
    "the other way round": '["image","label","0.0"]',
}.items():  # fmt: skip
    TILED[f"joint runs: of {_text}"] = _of(_name)
TILED["joint runs: no blocks"] = lambda record: record.entries.pop(JOINT.entries[1])
TILED["joint runs: only blocks"] = lambda record: record.entries.pop(JOINT.entries[0])
TILED["joint runs: alone"] = lambda record: [record.entries.pop(name) for name in RunsKey("label").entries]
