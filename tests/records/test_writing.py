"""A record is a safetensors file, laid out as specified, and is read only if it is whole."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.data import MetaTensor

from monai_gds import limits
from monai_gds.base import checksum
from monai_gds.base.names import digest_of
from monai_gds.errors import CacheWarning, DamagedRecord, MonaiGdsError, NewerRecord, RecordError
from monai_gds.items.tree import compile_tree, encode_item, tensor_of
from monai_gds.records.compression import WHOLE, Compression
from monai_gds.records.entries import read_record
from monai_gds.records.header import ARRAYS, CRC, parse
from monai_gds.records.writing import LARGE, check_name, pack_record
from monai_gds.storage import ALIGNMENT, Reads, Storage, open_storage
from monai_gds.tiles import blosc
from monai_gds.tiles.codecs import ON_CPU

ITEM = {
    "image": MetaTensor(torch.rand(1, 20, 30, 40), meta={"affine": np.eye(4), "spacing": np.ones(3), "name": "a"}),
    "label": torch.randint(0, 3, (1, 20, 30, 40), dtype=torch.uint8),
    "class": torch.tensor(3),
    "half": torch.ones(3, dtype=torch.float16),
    "flag": torch.tensor([True]),
}


def pack(item: Any, key: dict[str, Any] | None = None) -> bytes:
    """The bytes of the record file of an item."""
    buffers = pack_record(encode_item(item), key or {})
    return b"".join(b.numpy().tobytes() if isinstance(b, torch.Tensor) else bytes(b) for b in buffers)


def unpack(path: Path, storage: Storage) -> Any:
    """Reads a record with every check there is."""
    record, file, blocks = read_record(str(path), storage)
    raw = storage.map(Reads.of(str(path), [(e.offset, e.nbytes) for e in record.tensors.values()], file)).wait()
    tensors = {}
    for (name, entry), data in zip(record.tensors.items(), raw, strict=True):
        if checksum.checksum(data) != entry.checksum:
            raise DamagedRecord(name)
        tensors[name] = tensor_of(data, getattr(torch, entry.dtype), entry.shape)
    return compile_tree(record.tree, blocks.get(ARRAYS, b""), record.tensors)(tensors)


def header_of(blob: bytes) -> dict[str, Any]:
    length = int.from_bytes(blob[:8], "little")
    return json.loads(blob[8 : 8 + length])


def with_header(blob: bytes, header: dict[str, Any] | bytes, pad_to: int = ALIGNMENT) -> bytes:
    """A record whose header was replaced, its checksum made right again."""
    data = blob[8 + int.from_bytes(blob[:8], "little") :]
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % pad_to)
    place = text.index(b'"header_crc32":"') + len(b'"header_crc32":"')
    zeroed = text[:place] + b"00000000" + text[place + 8 :]
    text = zeroed[:place] + b"%08x" % zlib.crc32(zeroed) + zeroed[place + 8 :]
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture(scope="module")
def storage() -> Storage:
    return open_storage("posix", "cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.safetensors"


# ---------------------------------------------------------------------------------------------------------------------
# Layout

_sizes = st.one_of(st.integers(0, 40), st.integers(LARGE - 3, LARGE + 3), st.sampled_from([5000, 100_000, 131072]))
_dtypes = st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128, torch.bool])


@given(sizes=st.lists(st.tuples(_sizes, _dtypes), max_size=6), arrays=st.integers(0, 50), text=st.text(max_size=20))
def test_everything_lies_where_the_format_says(sizes: Any, arrays: int, text: str) -> None:
    item = {
        "tensors": [torch.zeros(n, dtype=dtype) for n, dtype in sizes],
        "arrays": [np.array([f"{i}x" * i]) for i in range(arrays % 7)],
        text: text * arrays,
    }
    blob = pack(item)
    start = 8 + int.from_bytes(blob[:8], "little")
    assert start % ALIGNMENT == 0
    assert len(blob) % ALIGNMENT == 0
    record = parse(blob, len(blob))
    for name, entry in record.tensors.items():
        alignment = ALIGNMENT if entry.nbytes >= LARGE else getattr(torch, entry.dtype).itemsize
        assert entry.offset % alignment == 0, name
        assert entry.offset >= start
    assert len(safetensors.deserialize(blob)) == len(header_of(blob)) - 1  # the reference takes it for a valid file


def test_small_arrays_begin_at_multiples_of_their_element_size() -> None:
    """Where a hit finds them without a copy, and libraries want them."""
    dtypes = ("u1", "<u2", "<u4", "<f8", "<c16")
    meta = {f"{n} {dtype}": np.arange(n, dtype=dtype) for n in (1, 3) for dtype in dtypes}
    tree = encode_item(MetaTensor(torch.zeros(3), meta=meta)).tree
    found = re.findall(r'"\$array": \["([^"]+)", \[\d\], (\d+)\]', json.dumps(tree))
    assert len(found) == 2 * len(dtypes)
    for dtype, offset in found:
        assert int(offset) % np.dtype(dtype).itemsize == 0, (dtype, offset)


@pytest.mark.parametrize("shape", [[4], [2, 2], []], ids=str)
def test_a_small_array_at_an_odd_offset_has_its_values(shape: list[int]) -> None:
    """Another writer may put it there."""
    values = np.arange(1, 5, dtype="<f4")[: 4 if shape else 1].reshape(shape)
    recipe = compile_tree({"x": {"$array": ["<f4", shape, 3]}, "n": 1}, b"\xff" * 3 + values.tobytes(), {})
    for _ in range(2):
        assert np.array_equal(recipe({})["x"], values)


def test_padding_is_zeros_and_the_file_hardly_larger_than_its_data() -> None:
    blob = pack(ITEM)
    for name, entry in header_of(blob).items():
        if name.startswith("__pad."):
            start = 8 + int.from_bytes(blob[:8], "little")
            begin, end = (start + o for o in entry["data_offsets"])
            assert blob[begin:end] == bytes(end - begin)
    data = sum(t.nbytes for t in (ITEM["image"], ITEM["label"]))  # type: ignore[union-attr]
    assert len(blob) < data + 5 * ALIGNMENT


def test_same_item_same_bytes() -> None:
    assert pack(ITEM, {"a": 1}) == pack(ITEM, {"a": 1})


def test_any_safetensors_tool_opens_it(path: Path) -> None:
    path.write_bytes(pack(ITEM, {"item": "hash"}))
    with safetensors.safe_open(path, "pt") as f:
        assert torch.equal(f.get_tensor("image"), ITEM["image"].as_subclass(torch.Tensor))  # type: ignore[union-attr]
        assert torch.equal(f.get_tensor("label"), ITEM["label"])  # type: ignore[arg-type]
        assert json.loads(f.metadata()["key"]) == {"item": "hash"}
    with safetensors.safe_open(path, "np") as f:
        assert f.get_tensor("class") == 3
    assert torch.equal(torch.load(path)["half"], ITEM["half"]) if torch.__version__ >= "2.13" else True


def test_names_of_the_users_never_meet_the_formats_own(path: Path, storage: Storage) -> None:
    names = ["__metadata__", "__arrays", "__pad.0", ".__arrays", "a"]
    item: dict[str, Any] = {name: torch.full((2,), i) for i, name in enumerate(names)}
    item["nested"] = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    item["text"] = np.array(["x"])
    path.write_bytes(pack(item))
    back = unpack(path, storage)
    assert [int(back[name][0]) for name in names] == [0, 1, 2, 3, 4]
    assert (back["nested"]["a.b"], back["nested"]["a"]["b"]) == (0, 1)


@pytest.mark.parametrize("name", ["\ud800", "\0", "é", '"', "\\", "a" * 5000, ""], ids=ascii)
def test_keys_of_any_characters_make_a_valid_file(path: Path, storage: Storage, name: str) -> None:
    path.write_bytes(pack({name: torch.ones(3)}))
    assert torch.equal(unpack(path, storage)[name], torch.ones(3))
    with safetensors.safe_open(path, "pt") as f:
        assert torch.equal(f.get_tensor(*[n for n in f.keys() if not n.startswith("__")]), torch.ones(3))  # noqa: SIM118


def test_header_and_arrays_larger_than_the_first_read(path: Path, storage: Storage) -> None:
    many = {f"key {i}": "x" * 20 for i in range(4000)}
    item = {"many": many, "text": np.array(["y" * 50_000, "z"]), "t": torch.ones(3)}
    path.write_bytes(pack(item))
    assert int.from_bytes(path.read_bytes()[:8], "little") > limits.HEAD_READ_BYTES
    back = unpack(path, storage)
    assert back["many"] == item["many"]
    assert np.array_equal(back["text"], item["text"])


def test_empty_item(path: Path, storage: Storage) -> None:
    for item in ({}, [], None, torch.empty(0), {"a": torch.empty(0, 3), "b": np.empty(0, "U3")}):
        path.write_bytes(pack(item))
        unpack(path, storage)


# ---------------------------------------------------------------------------------------------------------------------
# Damage


def _refused(blob: bytes, path: Path, storage: Storage) -> RecordError:
    path.write_bytes(blob)
    with pytest.raises(RecordError) as caught:
        unpack(path, storage)
    return caught.value


def test_every_cut_is_found(path: Path, storage: Storage) -> None:
    blob = pack(ITEM)
    lengths = {*range(200), 4095, 4096, 4097, *range(200, len(blob), 997), *range(len(blob) - 50, len(blob))}
    for length in sorted(lengths):
        error = _refused(blob[:length], path, storage)
        assert isinstance(error, DamagedRecord), length


def test_data_that_does_not_begin_on_a_page_is_damage(path: Path, storage: Storage) -> None:
    """Also where the checksum of the header is right."""
    blob = bytearray(pack(ITEM))
    length = int.from_bytes(blob[:8], "little")
    text = blob[8 : 8 + length] + b" " * 8
    text[CRC] = b"00000000"
    text[CRC] = b"%08x" % zlib.crc32(text)
    error = _refused((length + 8).to_bytes(8, "little") + text + blob[8 + length :], path, storage)
    assert isinstance(error, DamagedRecord)
    assert "impossible length" in str(error)


def test_a_sparse_file_cannot_make_the_reader_take_gigabytes(path: Path, storage: Storage) -> None:
    blob = bytearray(pack(ITEM)[:4096])
    length = (8 << 30) - 8
    blob[:8] = length.to_bytes(8, "little")
    path.write_bytes(blob)
    os.truncate(path, 16 << 30)
    tracemalloc.start()
    with pytest.raises(DamagedRecord, match="impossible length"):
        read_record(str(path), storage)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("extra", [1, 7, 4096])
def test_trailing_bytes_are_refused(path: Path, storage: Storage, extra: int) -> None:
    _refused(pack(ITEM) + bytes(extra), path, storage)


def test_every_flipped_bit_is_found(path: Path, storage: Storage) -> None:
    blob = bytearray(pack(ITEM))
    entries = header_of(bytes(blob))
    start = 8 + int.from_bytes(blob[:8], "little")
    places = {*range(0, 300, 3), *range(300, start, 41), start - 1}
    for name, entry in entries.items():
        if not name.startswith(("__pad.", "__metadata__")):
            begin, end = (start + o for o in entry["data_offsets"])
            places |= {begin, end - 1, (begin + end) // 2}
    for place in sorted(places):
        for bit in (0, 7):
            blob[place] ^= 1 << bit
            _refused(bytes(blob), path, storage)
            blob[place] ^= 1 << bit
    path.write_bytes(blob)
    unpack(path, storage)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        b"\xff" * 8,
        b"\xff" * 10_000,
        bytes(10_000),
        b"PK\x03\x04" + bytes(5000),
        b"{}",
        (4088).to_bytes(8, "little") + b"{" * 4088,
        (1 << 62).to_bytes(8, "little") + b'{"__metadata__":{"header_crc32":"00000000"}}',
    ],
    ids=lambda b: repr(b[:12]),
)
def test_foreign_files_are_refused(path: Path, storage: Storage, content: bytes) -> None:
    assert isinstance(_refused(content, path, storage), DamagedRecord)


def test_other_safetensors_files_are_refused(path: Path, storage: Storage) -> None:
    from safetensors.torch import save

    _refused(save({"a": torch.ones(5000)}), path, storage)
    _refused(save({"a": torch.ones(5000)}, {"format": "pt"}), path, storage)


def test_two_entries_of_one_name_are_refused(path: Path, storage: Storage) -> None:
    blob = pack({"a": torch.ones(4)})
    text = json.dumps(header_of(blob), separators=(",", ":"))
    entry = json.dumps({"a": header_of(blob)["a"]}, separators=(",", ":"))[1:-1]
    doubled = with_header(blob, text.replace(entry, f"{entry},{entry}", 1).encode())
    path.write_bytes(doubled)
    with safetensors.safe_open(path, "pt") as f:
        assert "a" in f.keys()  # noqa: SIM118  safetensors itself takes it
    assert "twice" in str(_refused(doubled, path, storage))


def _edited(change: Any) -> bytes:
    blob = pack({"a": torch.arange(20_000), "b": torch.ones(3)})
    header = header_of(blob)
    change(header)
    return with_header(blob, header)


def test_a_correctly_edited_header_is_not_damaged(path: Path, storage: Storage) -> None:
    path.write_bytes(_edited(lambda h: None))
    assert torch.equal(unpack(path, storage)["b"], torch.ones(3))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda h: h.pop("__pad.0"), id="a hole"),
        pytest.param(lambda h: h["a"]["data_offsets"].__setitem__(0, 0), id="an overlap"),
        pytest.param(lambda h: h["b"].update(shape=[4]), id="shape too large"),
        pytest.param(lambda h: h["b"].update(shape=[-3]), id="negative shape"),
        pytest.param(lambda h: h["b"].update(shape=[-1, -3]), id="two negative sizes"),
        pytest.param(lambda h: h["b"].update(dtype="F64"), id="other dtype"),
        pytest.param(lambda h: h["b"].update(dtype="Q8"), id="unknown dtype"),
        pytest.param(lambda h: h["b"].pop("dtype"), id="no dtype"),
        pytest.param(lambda h: h.update(b=[1]), id="an entry that is none"),
        pytest.param(lambda h: h.pop("b"), id="a tensor less"),
        pytest.param(lambda h: h["__metadata__"].pop("tree"), id="no tree"),
        pytest.param(lambda h: h["__metadata__"].update(tree="{"), id="tree is no JSON"),
        pytest.param(lambda h: h["__metadata__"].update(checksums="{}"), id="no checksums"),
        pytest.param(lambda h: h["__metadata__"].update(format="other"), id="another format"),
        pytest.param(lambda h: h["__metadata__"].update(version="0"), id="version 0"),
        pytest.param(lambda h: h["__metadata__"].update(version="1"), id="version 1"),
        pytest.param(lambda h: h["__metadata__"].update(version="x"), id="version is no number"),
        pytest.param(lambda h: h["__metadata__"].update(tree='{"$tensor":{"name":"c"}}'), id="not there"),
        pytest.param(lambda h: h["__metadata__"].update(key="[]"), id="key is a list"),
        pytest.param(lambda h: h["__metadata__"].update(tree="[" * 100_000), id="tree without an end"),
    ],
)  # fmt: skip
def test_what_no_writer_writes_is_damage(path: Path, storage: Storage, change: Any) -> None:
    assert isinstance(_refused(_edited(change), path, storage), DamagedRecord)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(lambda h: h["__metadata__"].update(version="3", checksum="new"), "version 3", id="version"),
        pytest.param(lambda h: h["__metadata__"].update(checksum="md5"), "md5", id="checksum"),
        pytest.param(
            lambda h: h["__metadata__"].update(tree='{"$tensor":{"name":"b","tiles":{}}}'),
            "tiles without a table",
            id="packed",
        ),
        pytest.param(lambda h: h["__metadata__"].update(tree='{"$new":1}'), "$new", id="tag"),
    ],
)
def test_what_a_newer_version_may_have_written_is_refused_by_name(
    path: Path, storage: Storage, change: Any, named: str
) -> None:
    error = _refused(_edited(change), path, storage)
    assert isinstance(error, NewerRecord)
    assert named in str(error)


@pytest.mark.parametrize("parts", [None, "text", {"a": 1}, ["other"], 5])
def test_a_record_under_another_name_than_its_own_is_refused(path: Path, storage: Storage, parts: Any) -> None:
    key = {} if parts is None else {"parts": parts}
    path.write_bytes(_edited(lambda h: h["__metadata__"].update(key=json.dumps(key))))
    record, _, _ = read_record(str(path), storage)
    with pytest.raises(DamagedRecord, match="swapped, copied or linked"):
        check_name(record, digest_of(["mine"]))


def test_a_record_under_its_own_name_is_taken(path: Path, storage: Storage) -> None:
    parts = ["monai_gds 2", "item", 1, None, [["/data/ü \ud800", 5, "x"]]]
    path.write_bytes(_edited(lambda h: h["__metadata__"].update(key=json.dumps({"parts": parts}))))
    record, _, _ = read_record(str(path), storage)
    check_name(record, digest_of(parts))


# ---------------------------------------------------------------------------------------------------------------------
# Tensors in tiles


def packed_item() -> dict[str, Any]:
    """Two tensors that are packed, one that gains nothing, one that is small."""
    image = torch.arange(60).float().repeat(80 * 80).view(1, 80, 80, 60)
    return {
        "image": MetaTensor(image, affine=torch.eye(4)),
        "label": (image > 30).to(torch.int64),
        "noise": torch.randn(1 << 18),
        "small": torch.zeros(1000),
    }


needs_blosc2 = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")


@needs_blosc2
@pytest.mark.parametrize("codec", ON_CPU)
def test_a_packed_record_is_a_valid_safetensors_file_laid_out_as_specified(path: Path, codec: str) -> None:
    buffers = pack_record(encode_item(packed_item()), {}, Compression(codec, 32))
    path.write_bytes(b"".join(b.numpy().tobytes() if isinstance(b, torch.Tensor) else bytes(b) for b in buffers))
    header = header_of(path.read_bytes())
    entries = {k: v for k, v in header.items() if not k.startswith(("__metadata__", "__pad."))}
    assert list(entries)[:3] == ["__arrays", "__tiles.image", "__tiles.label"]
    assert {name: entries[name]["dtype"] for name in ("image", "label", "noise", "small")} == {
        "image": "U8", "label": "U8", "noise": "F32", "small": "F32"
    }  # fmt: skip
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == set(header) - {"__metadata__"}
    parsed = parse(path.read_bytes(), path.stat().st_size)
    assert (parsed.tensors["label"].dtype, parsed.tensors["label"].shape) == ("int64", (1, 80, 80, 60))
    assert max(parsed.tensors["label"].nbytes, parsed.tensors["image"].nbytes) < (1 << 20)
    assert not parsed.tensors["image"].offset % ALIGNMENT


@needs_blosc2
@pytest.mark.parametrize("codec", ON_CPU)
def test_runs_of_a_label_lie_as_specified(path: Path, codec: str) -> None:
    zstandard = pytest.importorskip("zstandard")
    label = torch.zeros(1, 80, 80, 60)
    label[0, 10:50, 20:70, 5:40], label[0, 30:35] = 2, float("nan")
    buffers = pack_record(encode_item({**packed_item(), "label": label}), {}, Compression(codec))
    blob = b"".join(b.numpy().tobytes() if isinstance(b, torch.Tensor) else bytes(b) for b in buffers)
    entries = {k: v for k, v in header_of(blob).items() if not k.startswith(("__metadata__", "__pad."))}
    assert list(entries)[:4] == ["__arrays", "__tiles.image", "__tiles.label", "__runs.label"]
    assert list(entries)[-1] == "__run_blocks.label"
    data = blob[8 + int.from_bytes(blob[:8], "little") :]
    table, blocks = (data[slice(*entries[f"__{which}.label"]["data_offsets"])] for which in ("runs", "run_blocks"))
    assert entries["__run_blocks.label"]["data_offsets"][0] % ALIGNMENT == 0

    count, per_block, values = np.frombuffer(table, "<u4", 3).tolist()
    number = -(-count // per_block)
    sizes, crcs = np.frombuffer(table, "<i4", number, 12), np.frombuffer(table, "<u4", number, 12 + 4 * number)
    counts = np.frombuffer(table, "<u4", number * values, 12 + 8 * number)
    patterns = np.frombuffer(table, "<f4", values, 12 + 8 * number + 4 * number * values)
    found, begin = [], 0
    for block, size in enumerate(sizes):
        stream = blocks[begin : begin + size]
        assert zlib.crc32(stream) == crcs[block]
        planes = zstandard.ZstdDecompressor().decompress(stream, max_output_size=5 * per_block)
        rows = np.frombuffer(planes, np.uint8).reshape(5, per_block)
        lengths = sum(rows[i].astype(np.int64) << 8 * i for i in range(4))
        of_values = np.bincount(rows[4], weights=lengths, minlength=values)
        assert of_values.tolist() == counts[block * values : (block + 1) * values].tolist()
        found.append(np.repeat(patterns[rows[4]], lengths))
        begin += size
    assert begin == len(blocks)
    assert np.concatenate(found).tobytes() == label.numpy().tobytes()


@needs_blosc2
def test_joint_runs_lie_as_specified() -> None:
    zstandard = pytest.importorskip("zstandard")
    label, image = torch.zeros(1, 80, 80, 60), torch.zeros(2, 80, 80, 60)
    label[0, 10:50, 20:50, 5:40], image[0, :30], image[1, :, 60:] = 2, 7, float("inf")
    joint = (("label", "image", "0.5"), ("label", "image", "0"), ("none", "image", "0"), ("label", "small", "0"))
    item = encode_item({"label": label, "image": MetaTensor(image), "small": torch.zeros(3)})
    buffers = pack_record(item, {}, Compression("lz4", joint=joint))
    blob = b"".join(b.numpy().tobytes() if isinstance(b, torch.Tensor) else bytes(b) for b in buffers)
    entries = header_of(blob)
    tables = [name for name in entries if name.startswith("__joint_runs.")]
    assert tables == [f'__joint_runs.["label","image","{threshold}"]' for threshold in ("0.5", "0")]
    data = blob[8 + int.from_bytes(blob[:8], "little") :]
    names = (tables[0], tables[0].replace("runs", "run_blocks"))
    table, blocks = (data[slice(*entries[name]["data_offsets"])] for name in names)
    assert entries[names[1]]["data_offsets"][0] % ALIGNMENT == 0

    count, per_block, values = np.frombuffer(table, "<u4", 3).tolist()
    assert count <= per_block and values == 4
    patterns, flags = np.frombuffer(table, "<f4", values, 20 + 4 * values), np.frombuffer(table[-values:], np.uint8)
    assert len(table) == 20 + 9 * values
    planes = zstandard.ZstdDecompressor().decompress(blocks, max_output_size=5 * per_block)
    rows = np.frombuffer(planes, np.uint8).reshape(5, per_block)
    lengths = sum(rows[i].astype(np.int64) << 8 * i for i in range(4))
    assert np.array_equal(np.repeat(patterns[rows[4]], lengths), label.flatten().numpy())
    assert np.array_equal(np.repeat(flags[rows[4]], lengths), (image > 0.5).any(0).flatten().numpy())


@needs_blosc2
def test_without_a_codec_or_large_tensors_a_record_is_what_it_was() -> None:
    item = encode_item({"a": torch.zeros(1000), "b": torch.randn((1 << 18) - 1)})
    plain, asked = (pack_record(item, {}, Compression(codec)) for codec in (None, "lz4"))
    assert plain[0] == asked[0]


@needs_blosc2
def test_a_record_notes_the_form_that_it_was_asked_for_where_there_was_something_to_pack() -> None:
    noise, zeros = ({"a": tensor} for tensor in (torch.randn(1 << 18), torch.zeros(1 << 18)))
    for item, compression, form, is_packed in (
        (noise, Compression("lz4", 16), "lz4 16", False),
        (zeros, Compression("lz4", 16), "lz4 16", True),
        (zeros, Compression("zstd"), "zstd 32", True),
        (zeros, WHOLE, "", False),
    ):
        buffers = pack_record(encode_item(item), {}, compression)
        header = parse(bytes(buffers[0]), sum(len(b) for b in buffers))
        assert (header.form, bool(header.tiles)) == (form, is_packed)


@needs_blosc2
def test_what_could_not_be_packed_notes_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise MonaiGdsError("Blosc2 failed")

    monkeypatch.setattr(blosc, "compress", failing)
    with pytest.warns(CacheWarning, match="saved uncompressed"):
        buffers = pack_record(encode_item({"a": torch.zeros(1 << 18)}), {}, Compression("lz4"))
    assert parse(bytes(buffers[0]), sum(len(b) for b in buffers)).form == ""


@pytest.mark.parametrize("form", ["lz4", "lz4 032", "LZ4 32", " ", "lz4 32 ", "x" * 20 + " 3", 7, [], None, ""])
def test_a_form_that_nobody_writes_is_damage(path: Path, form: Any) -> None:
    header = header_of(pack(ITEM))
    header["__metadata__"]["form"] = form
    blob = with_header(pack(ITEM), header)
    with pytest.raises(DamagedRecord):
        parse(blob, len(blob))
