"""Records that somebody wrote on purpose: every checksum holds, and what they say is anything.

A sound record is taken apart, some of its parts are replaced by what the grammar gives, and it is put together again.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from monai_gds.base.checksum import checksum
from monai_gds.base.dtypes import DTYPES
from monai_gds.errors import MonaiGdsError
from monai_gds.items import table
from monai_gds.records.header import CRC, TABLE, RunsKey
from monai_gds.storage import ALIGNMENT
from monai_gds.tiles import blosc
from monai_gds.tiles.tiles import Layout

__all__ = ["TEXTS", "Parts", "dumps", "mutated", "records", "sound"]

#: Texts that mean something to somebody: dtypes, tags, names of entries, places, terminals.
TEXTS = [
    "", "x", "image", "label", "noise", "__arrays", "__tiles.image", "__runs.label", "__run_blocks.label", "__pad.0",
    "float32", "quint8", "qint32", "quint4x2", "bfloat16", "complex32", "object", "<f4", "|O", ">i8", "|V0",
    "<U99999999", "<M8[ns]", "|S0", "O", "1e400", "-0", "nan", "Infinity", "0x" + "f" * 5000, "9" * 5000, "lz4",
    "zstd", "bitcomp", "shuffle", "lz4 32", "wsum64", "../../etc/passwd", "/", "/dev/zero", "/dev/tty", "~", "\0",
    "\x1b[2J\x1b]0;x\x07",
    "\u202e", "\ud800", "a" * 70_000, "builtins", "os", "system", "collections", "torch", "Tensor", "__class__",
    "monai_gds", "UTC", "2020-01-01T00:00:00", "AA==",
]  # fmt: skip

NUMBERS = [
    *(0, 1, -1, 2, 3, 15, 16, 31, 64, 255, 256, 4095, 4096, 65_535, 65_536, -255, -256),
    *(
        sign * ((1 << bits) - less)
        for bits in (20, 31, 32, 40, 47, 53, 62, 63, 64, 100)
        for sign in (1, -1)
        for less in (0, 1)
    ),
]

_scalars = (
    st.sampled_from(NUMBERS)
    | st.sampled_from(TEXTS)
    | st.text(max_size=6)
    | st.none()
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.just(10**400)
)

_texts = st.sampled_from(TEXTS)
_numbers = st.sampled_from(NUMBERS)
_names = st.sampled_from(["image", "label", "noise"])

#: What a node of a tensor may have beside its name.
USES = ["numpy", "complex", "requires_grad", "tiles", "name", "x"]

#: Texts that :func:`dumps` replaces by JSON that is nested so deeply that nothing else could write it.
DEEP = {
    f'"@{number} {depth}"': begin * depth + "1" + end * depth
    for number, (begin, end) in enumerate([("[", "]"), ('{"a":', "}"), ('{"$tuple":[', "]}")])
    for depth in (30, 200, 3000)
}

_shapes = st.lists(st.sampled_from([0, 1, 2, 3, 8, -1, 1 << 20, 1 << 31, 1 << 62]), max_size=5)
_dtypes = st.sampled_from(
    [*DTYPES, "float32", "quint8", "qint8", "qint32", "quint4x2", "complex32", "<f4", "|O", "|V0", "<U3"]
)


def _some(shape: list[int]) -> int:
    """How many members an array of this shape has, but only a few."""
    return min(8, max(0, math.prod(shape)))


_TAGS = [tag for tag in table.ROWS if isinstance(tag, str)]

#: Nodes of an item tree: every tag over anything, and those of tensors and arrays over what nearly makes sense.
nodes = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*_TAGS, "name", "numpy", "tiles", "a"]), inner, max_size=2)
        | st.dictionaries(st.sampled_from(_TAGS), st.lists(inner, max_size=5), min_size=1, max_size=1)
    ),
    max_leaves=8,
) | st.one_of(
    st.builds(lambda d, s, o, m: {"$small_tensor": [d, s, o, m]}, _dtypes, _shapes, _numbers, _scalars),
    st.builds(lambda d, s, o: {"$small_tensor": [d, s, o, {}]}, _dtypes, _shapes, st.sampled_from([0, 8, 64])),
    st.builds(lambda d, s, o: {"$array": [d, s, o]}, _dtypes, _shapes, _numbers),
    st.builds(
        lambda o, w, s: {"$texts": [o, w, s, ["a"] * _some(s)]}, st.sampled_from("<>O"), _numbers | st.none(), _shapes
    ),
    st.builds(lambda n, k, v: {"$tensor": {"name": n, k: v}}, _names, st.sampled_from(USES), _scalars),
    st.builds(lambda a, b: {"$namedtuple": [a, b, ["x"], [1]]}, _texts, _texts),
    st.builds(lambda a, b: {"$enum": [a, b, 1]}, _texts, _texts),
    st.builds(lambda a: {"$range": [0, a, 1]}, _numbers),
    st.builds(lambda a: {"$int": a}, _texts),
    st.sampled_from([text.strip('"') for text in DEEP]),
)


@st.composite
def mutated(draw: st.DrawFn, value: Any) -> Any:
    """A copy of JSON, in which one place is something else, is missing, or is there twice."""
    out = [copy.deepcopy(value)]
    places: list[tuple[Any, Any]] = []

    def walk(inside: Any) -> None:
        for key in list(inside) if isinstance(inside, dict) else range(len(inside)):
            places.append((inside, key))
            if isinstance(inside[key], (dict, list)):
                walk(inside[key])

    walk(out)
    inside, key = draw(st.sampled_from(range(len(places))).map(places.__getitem__))
    how = draw(st.sampled_from(["replace", "replace", "number", "drop", "double", "rename"]))
    if how == "drop" and inside is not out:
        del inside[key]
    elif how == "double" and isinstance(inside, list) and inside is not out:
        inside.insert(key, copy.deepcopy(inside[key]))
    elif how == "rename" and isinstance(inside, dict):
        inside[draw(st.sampled_from(TEXTS))] = inside.pop(key)
    elif how == "number" and isinstance(inside[key], int):
        inside[key] += draw(st.sampled_from(NUMBERS))
    else:
        inside[key] = draw(nodes)
    return out[0]


@dataclass
class Parts:
    """A record taken apart.

    Attributes:
        metadata: its ``__metadata__`` but for what is derived, JSON within it parsed.
        entries: of the header.
        data: the bytes of each entry.
    """

    metadata: dict[str, Any]
    entries: dict[str, dict[str, Any]]
    data: dict[str, bytes]

    @classmethod
    def of(cls, blob: bytes) -> Parts:
        """Takes a sound record apart."""
        start = 8 + int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8:start])
        metadata = header.pop("__metadata__")
        for name in ("checksums", "key", "tree"):
            metadata[name] = json.loads(metadata[name])
        data = {n: blob[start + e["data_offsets"][0] : start + e["data_offsets"][1]] for n, e in header.items()}
        return cls(metadata, header, data)

    def to_bytes(self, relaid: bool = True, last: tuple[str, dict[str, Any], int] | None = None) -> bytes:
        """The record, all of whose checksums hold.

        Args:
            relaid: whether entries are laid out from the start. Otherwise they stay where they say they are.
            last: the name, the entry and the bytes of one that is to follow, whose checksum is a wrong one.
        """
        entries, blob = copy.deepcopy(self.entries), b""
        for name, entry in entries.items():
            data = self.data.get(name, b"")
            if relaid and isinstance(entry, dict):
                entry["data_offsets"] = [len(blob), len(blob) + len(data)]
            blob += data
        metadata = {"header_crc32": "00000000", **self.metadata}
        if last is not None:
            name, entry, nbytes = last
            entries[name] = {**entry, "data_offsets": [len(blob), len(blob) + nbytes]}
            metadata["checksums"] = {**metadata["checksums"], name: "0" * 16}
        if isinstance(metadata.get("checksums"), dict):
            known = {name: f"{_sum(data):016x}" for name, data in self.data.items() if not name.startswith("__pad.")}
            metadata["checksums"] = {**known, **{k: v for k, v in metadata["checksums"].items() if k not in known}}
        for name in ("checksums", "key", "tree"):
            if name in metadata:
                metadata[name] = dumps(metadata[name])
        text = bytearray(dumps({"__metadata__": metadata, **entries}).encode())
        text.extend(b" " * (-(8 + len(text)) % ALIGNMENT))
        text[CRC] = b"00000000"
        text[CRC] = b"%08x" % zlib.crc32(text)
        return len(text).to_bytes(8, "little") + bytes(text) + blob


def _sum(data: bytes) -> int:
    return checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))


def dumps(value: Any) -> str:
    """JSON, nested deeply where that was asked for."""
    text = json.dumps(value, separators=(",", ":"))
    for short, long in DEEP.items():
        text = text.replace(short, long)
    return text


def _tree(draw: st.DrawFn, parts: Parts) -> None:
    parts.metadata["tree"] = draw(mutated(parts.metadata["tree"]))


def _key(draw: st.DrawFn, parts: Parts) -> None:
    rest = draw(mutated({name: value for name, value in parts.metadata["key"].items() if name != "parts"}))
    parts.metadata["key"] = {"parts": parts.metadata["key"]["parts"], **(rest if isinstance(rest, dict) else {})}


def _metadata(draw: st.DrawFn, parts: Parts) -> None:
    name = draw(st.sampled_from(["version", "format", "checksum", "form", "checksums", "key", "new"]))
    parts.metadata[name] = draw(st.sampled_from(["0", "1", "2", "3", " 2 ", "٢"]) | nodes)


def _entry(draw: st.DrawFn, parts: Parts) -> None:
    found = draw(mutated(parts.entries))
    if isinstance(found, dict):
        parts.entries = found


def _resized(draw: st.DrawFn, parts: Parts) -> None:
    """Entries of another dtype and shape, with as many bytes as these need."""
    name = draw(st.sampled_from([n for n in parts.entries if not n.startswith("__pad.")]))
    dtype, shape = (
        draw(st.sampled_from([*DTYPES])),
        draw(st.lists(st.sampled_from([0, 1, 2, 3, 100, 5000]), max_size=3)),
    )
    nbytes = math.prod(shape) * DTYPES[dtype][1]
    if nbytes < 1 << 24:
        parts.entries[name].update(dtype=dtype, shape=shape)
        parts.data[name] = (parts.data[name] * (1 + nbytes // max(1, len(parts.data[name]))))[:nbytes].ljust(
            nbytes, b"\0"
        )


def _bytes(draw: st.DrawFn, parts: Parts) -> None:
    """A table of tiles or of runs, blocks of runs, small arrays, streams: as numbers of 32 bits, or cut."""
    names = [name for name in parts.data if not name.startswith("__pad.") and parts.data[name]]
    fronts = [name for name in names if name.startswith("__")]
    name = draw(st.sampled_from(fronts or names) | st.sampled_from(names))
    data = bytearray(parts.data[name])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        if draw(st.booleans()):
            at -= at % 4
            data[at : at + 4] = (draw(st.sampled_from(NUMBERS)) & 0xFFFFFFFF).to_bytes(4, "little")[: len(data) - at]
        elif data:
            data[at] ^= draw(st.integers(1, 255))
    if draw(st.integers(0, 5)) == 0:
        data = data[: draw(st.integers(0, len(data)))]
        parts.entries[name]["shape"] = [len(data)]
    parts.data[name] = bytes(data)
    sound(parts)


def sound(parts: Parts) -> None:
    """The checksums of all tiles, and of all blocks of runs, so that their streams reach the codec."""
    for name in list(parts.data):
        with contextlib.suppress(LookupError, TypeError, ValueError, ArithmeticError, MonaiGdsError):  # made so
            if name.startswith(TABLE):
                _sound_tiles(parts, name.removeprefix(TABLE))
            elif (key := RunsKey.of_table(name)) is not None:
                _sound_runs(parts, *key.entries)


def _sound_tiles(parts: Parts, name: str) -> None:
    layout = Layout.of_node(_layout_of(parts.metadata["tree"], name))
    table = np.frombuffer(bytearray(parts.data[TABLE + name]), np.uint8)
    sizes, crcs = np.split(table[: 8 * layout.count].view(np.int32), 2)
    _sum_up(sizes, crcs, parts.data[name], 16, lambda size: (size + 4 + 15) // 16 * 16)
    parts.data[TABLE + name] = table.tobytes()


def _sound_runs(parts: Parts, name: str, blocks: str) -> None:
    table = np.frombuffer(bytearray(parts.data[name]), np.uint8)
    runs, per_block = table[:8].view(np.uint32).tolist()
    sizes, crcs = np.split(table[12 : 12 + 8 * -(-runs // per_block)].view(np.int32), 2)
    _sum_up(sizes, crcs, parts.data[blocks], 0, lambda size: size)
    parts.data[name] = table.tobytes()


def _sum_up(sizes: np.ndarray, crcs: np.ndarray, data: bytes, at: int, step: Callable[[int], int]) -> None:
    for i, size in enumerate(sizes.tolist()):
        if size > 0:
            crcs.view(np.uint32)[i] = zlib.crc32(data[at : at + size])
            at += step(size)


def _streams(draw: st.DrawFn, parts: Parts) -> None:
    """Streams of the tiles of a tensor that the codec takes, of any values, such as indices beyond the palette."""
    name = draw(st.sampled_from([name.removeprefix(TABLE) for name in parts.data if name.startswith(TABLE)]))
    layout = Layout.of_node(_layout_of(parts.metadata["tree"], name))
    shape = layout.count, layout.tile_bytes // layout.packed_dtype.itemsize
    if math.prod(shape) > 1 << 20:
        return
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    most = draw(st.sampled_from([1, layout.values or 1, layout.values + 1, 200, 1 << 15]))
    numbers = random.integers(0, most, shape).repeat(draw(st.sampled_from([1, 50])), 1)[:, : shape[1]]
    done = blosc.compress(torch.from_numpy(numbers).to(layout.packed_dtype), layout.codec)
    table = np.frombuffer(bytearray(parts.data[TABLE + name]), np.uint8)
    table[: 4 * layout.count].view(np.int32)[:] = done.sizes
    streams = [
        done.data[at : at + size].tobytes() for at, size in zip(done.starts, done.sizes, strict=True) if size > 0
    ]
    data = bytes(16) + b"".join(stream + bytes(-len(stream) % 16 or 16) for stream in streams)
    _put(parts, {TABLE + name: table.tobytes(), name: data})


def _runs(draw: st.DrawFn, parts: Parts) -> None:
    """Runs of other lengths and values than the label has; the table counts what they hold."""
    key = draw(st.sampled_from([key for name in parts.data if (key := RunsKey.of_table(name))]))
    name, blocks = key.entries
    table = np.frombuffer(bytearray(parts.data[name]), np.uint8)
    runs, per_block, values = table[:12].view(np.uint32).tolist()
    if runs > per_block or per_block * 5 > 1 << 20:
        return
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    most = draw(st.sampled_from([1, 2, 100, 1 << 31]))
    rows = np.zeros((5, per_block), np.uint8)
    lengths = random.integers(0, most, runs).astype(np.uint32)
    rows[:4, :runs] = lengths.view(np.uint8).reshape(-1, 4).T
    rows[4, :runs] = ids = random.integers(0, values + draw(st.sampled_from([0, 0, 1])), runs)
    done = blosc.compress(torch.from_numpy(rows.reshape(1, -1)), "zstd")
    table[12:16].view(np.int32)[:] = done.sizes
    counts = np.bincount(ids, lengths, values)[:values].astype(np.int64)
    if draw(st.booleans()):
        counts[-1] += math.prod(_layout_of(parts.metadata["tree"], key.label)["shape"]) - counts.sum()
    table[20 : 20 + 4 * values].view(np.uint32)[:] = counts & 0xFFFFFFFF
    _put(parts, {name: table.tobytes(), blocks: done.data[done.starts[0] :][: done.sizes[0]].tobytes()})


def _put(parts: Parts, data: dict[str, bytes]) -> None:
    for name, raw in data.items():
        parts.data[name] = raw
        parts.entries[name]["shape"] = [len(raw)]
    sound(parts)


def _layout_of(node: Any, name: str) -> Any:
    if isinstance(node, dict):
        tensor = node.get("$tensor")
        if isinstance(tensor, dict) and tensor.get("name") == name:
            return tensor.get("tiles")
    inside = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return next((found for part in inside if (found := _layout_of(part, name)) is not None), None)


def _layout(draw: st.DrawFn, parts: Parts) -> None:
    """Another description of a packed tensor."""
    name = draw(st.sampled_from(["image", "label"]))
    layout = _layout_of(parts.metadata["tree"], name)
    if not isinstance(layout, dict):
        _tree(draw, parts)
        return
    field = draw(st.sampled_from(["dtype", "shape", "tile", "filter", "codec", "palette", "new"]))
    layout[field] = draw(_shapes if field in ("shape", "tile") else _dtypes if field == "dtype" else _scalars)


_CHANGES = [_tree, _tree, _key, _metadata, _entry, _resized, _bytes, _bytes, _layout, _streams, _runs]


@st.composite
def records(draw: st.DrawFn, blob: bytes) -> bytes:
    """Hostile records made of a sound one."""
    parts = Parts.of(blob)
    relaid = True
    for _ in range(draw(st.integers(1, 3))):
        change = draw(st.sampled_from(_CHANGES))
        relaid &= change is not _entry or draw(st.booleans())
        try:
            change(draw, parts)
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, MonaiGdsError, InvalidArgument):
            break  # an earlier change left nothing for it
    return parts.to_bytes(relaid)
