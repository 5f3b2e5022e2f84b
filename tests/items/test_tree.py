"""Whatever an item holds comes back equal from a real record file, and two hits share nothing."""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import functools
import json
import math
import pathlib
import re
import sys
import threading
import time
import types
import uuid
import zoneinfo
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from monai.data import MetaTensor
from monai.utils import GridSampleMode, MetaKeys, SpaceKeys, TraceKeys

from monai_gds.base.dtypes import DTYPES, name_of
from monai_gds.errors import DamagedRecord, NewerRecord, RecordError, UnsupportedType
from monai_gds.folder.directory import CacheDirectory
from monai_gds.items import table
from monai_gds.items import types as item_types
from monai_gds.items.tree import EncodedItem, compile_tree, copy_item, encode_item, register_type, tensor_of
from monai_gds.keys.hashing import canonical_hash, hash_item
from monai_gds.records import header
from monai_gds.records.entries import read_record
from monai_gds.storage import Reads, open_storage
from tests.caches import key
from tests.same import assert_same, mutable_parts

#: The torch dtypes that files hold under their own name.
TORCH_DTYPES = [getattr(torch, name) for name, _ in DTYPES.values()]

RoundTrip = Callable[[Any], Any]


class Custom:
    pass


class Colour(enum.Enum):
    RED = 1


class Text(str):
    pass


Point = collections.namedtuple("Point", "x y")


def as_returned(value: Any) -> Any:
    """What a user gets for an item: numeric arrays outside of metadata are tensors, everything else is itself."""
    if type(value) in (dict, OrderedDict):
        return type(value)((k, as_returned(v)) for k, v in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(as_returned(v) for v in value)
    most = 16 if isinstance(value, np.ndarray) and value.dtype.kind == "c" else 8
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.itemsize <= most:
        return torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))
    return value


def in_memory(item: Any, strict: bool = True, **options: Any) -> Any:
    """Taken apart and put together again, as a miss is."""
    encoded = encode_item(item, strict=strict)
    return compile_tree(encoded.tree, encoded.arrays, encoded.tensors, **options)(encoded.tensors)


def as_json(encoded: EncodedItem) -> Any:
    """The tree as it is read from a record."""
    return json.loads(json.dumps(encoded.tree, allow_nan=False))


def hit(cache: CacheDirectory, item: Any = None, **options: Any) -> Any:
    """The item of the record of :func:`key`, for a target that the cache directory itself does not have."""
    path = cache.record_path(key().digest)
    storage = open_storage("posix", "cpu")
    record, file, blocks = read_record(path, storage)
    raw = storage.map(Reads.of(path, [(e.offset, e.nbytes) for e in record.tensors.values()], file)).wait()
    parts = zip(record.tensors.items(), raw, strict=True)
    tensors = {name: tensor_of(data, getattr(torch, entry.dtype), entry.shape) for (name, entry), data in parts}
    return compile_tree(record.tree, blocks.get(header.ARRAYS, b""), tensors, **options)(tensors, item)


def as_arrays(value: Any) -> Any:
    """What a user of a CPU target gets: every array as it was, in the machine's byte order."""
    if type(value) in (dict, OrderedDict):
        return type(value)((k, as_arrays(v)) for k, v in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(as_arrays(v) for v in value)
    if type(value) is np.ndarray and value.dtype.newbyteorder("=") in item_types.NUMERIC.values():
        return np.array(value, value.dtype.newbyteorder("="), order="C")
    return value


def layouts(value: Any) -> Any:
    """Strides and flags of every array."""
    if isinstance(value, dict):
        return [layouts(v) for v in value.values()]
    if isinstance(value, (list, tuple)):
        return [layouts(v) for v in value]
    if isinstance(value, np.ndarray):
        return value.strides, value.flags.c_contiguous, value.flags.writeable
    return value.stride() if isinstance(value, torch.Tensor) else None


# ---------------------------------------------------------------------------------------------------------------------
# Anything that can be stored

_floats = st.floats(allow_nan=True, allow_infinity=True)
_text = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates too: os.fsdecode makes them
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    _floats,
    st.complex_numbers(allow_nan=True),
    _text,
    st.sampled_from(["$tensor", "$", "__metadata__", "__pad.0", "__arrays", "a.b", "\0", "item"]),
    st.binary(max_size=20),
    st.sampled_from([SpaceKeys.RAS, MetaKeys.AFFINE, TraceKeys.NONE, GridSampleMode.BILINEAR]),
    st.sampled_from([torch.float16, torch.int64, torch.bool, torch.device("cpu"), torch.device("cuda:1")]),
    st.sampled_from([np.dtype("f4"), np.dtype(">i2"), np.dtype("U3")]),
    st.builds(pathlib.Path, st.text("abc/. ", max_size=8)),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers()),
    st.builds(range, st.integers(-5, 5), st.integers(-5, 5), st.integers(1, 3)),
    st.builds(lambda s: torch.Size(s), st.lists(st.integers(0, 5), max_size=4)),
)
_dtypes = st.one_of(
    hnp.scalar_dtypes(),
    hnp.unicode_string_dtypes(max_len=4),
    hnp.byte_string_dtypes(max_len=4),
)
_arrays = _dtypes.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3)))
_numpy_scalars = hnp.arrays(_dtypes.filter(lambda d: d.kind != "S"), 1).map(lambda a: a[0])


def _tensor(seed: int, dtype: torch.dtype, shape: list[int], grad: bool) -> torch.Tensor:
    count = math.prod(shape) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype == torch.bool:
        raw &= 1
    flat = torch.from_numpy(raw).view(dtype) if count else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(grad and (dtype.is_floating_point or dtype.is_complex))


_tensors = st.builds(
    _tensor,
    st.integers(0, 2**32),
    st.sampled_from([*TORCH_DTYPES, torch.complex128, torch.complex32]),
    st.lists(st.integers(0, 4), max_size=4),
    st.booleans(),
)
_keys = st.one_of(
    _text,
    st.sampled_from(["$dict", "$tensor", "__x", "a.b", "a"]),
    st.integers(),
    st.booleans(),
    st.none(),
    st.binary(max_size=3),
    st.floats(allow_nan=False),
    st.tuples(st.integers(0, 3), _text),
    st.sampled_from([MetaKeys.SPACE, np.int64(4), np.float32(0.5), np.str_("s"), torch.float32, pathlib.Path("p")]),
)


def _nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(_keys, inner, max_size=4),
            st.dictionaries(_keys, inner, max_size=3).map(OrderedDict),
        ),
        max_leaves=8,
    )


@st.composite
def _metatensors(draw: st.DrawFn) -> MetaTensor:
    plain = draw(_tensors)
    out = plain.detach().as_subclass(MetaTensor)
    small = _nested(st.one_of(_scalars, _arrays, _numpy_scalars, _tensors))
    out.__dict__ = {
        "_meta": draw(st.dictionaries(_text | st.sampled_from(list(MetaKeys)), small, max_size=4)),
        "_applied_operations": draw(st.lists(st.dictionaries(_text, small, max_size=2), max_size=2)),
        "_pending_operations": draw(st.lists(small, max_size=1)),
        "_is_batch": draw(st.booleans()),
        "_spatial_ndim": draw(st.integers(0, 3)),
    }
    return out.requires_grad_(plain.requires_grad)


_hashable = _scalars.filter(lambda v: not isinstance(v, slice) and v == v)
_leaves = st.one_of(
    _scalars, _arrays, _numpy_scalars, _tensors, _metatensors(), st.sets(_hashable, max_size=3),
    st.frozensets(_hashable, max_size=3),
)  # fmt: skip


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> CacheDirectory:
    return CacheDirectory(tmp_path_factory.mktemp("records"), open_storage("posix", "cpu"), verify="always")


@given(item=_nested(_leaves))
def test_any_item_comes_back_equal(scratch: CacheDirectory, item: Any) -> None:
    import safetensors

    assert scratch.publish(key(), encode_item(item))
    (first,) = scratch.start([key().digest])[0].wait()  # type: ignore[union-attr]
    (second,) = scratch.start([key().digest])[0].wait()  # type: ignore[union-attr]
    expected = as_returned(item)
    assert_same(expected, first)
    assert_same(first, second)
    assert_same(first, in_memory(item))
    arrays = hit(scratch, numpy=True)
    assert_same(as_arrays(item), arrays)
    assert_same(arrays, in_memory(item, numpy=True))
    assert layouts(arrays) == layouts(in_memory(item, numpy=True))
    shared = set(mutable_parts(first)) & set(mutable_parts(second))
    assert not shared
    with safetensors.safe_open(scratch.record_path(key().digest), "pt") as f:  # any safetensors tool opens a record
        assert f.metadata()["format"] == "monai_gds"
        for name in f.keys():  # noqa: SIM118 (it is no mapping)
            f.get_tensor(name)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


@pytest.mark.parametrize("dtype", [*TORCH_DTYPES, torch.complex128, torch.complex32], ids=str)
@pytest.mark.parametrize("shape", [[], [0], [3, 0, 2], [5], [2, 3, 4], [70_000]], ids=str)
def test_every_dtype_and_shape(round_trip: RoundTrip, dtype: torch.dtype, shape: list[int]) -> None:
    tensor = _tensor(1, dtype, shape, False)
    assert_same(tensor, round_trip(tensor))


def test_knows_every_dtype_that_safetensors_knows() -> None:
    from safetensors import torch as st_torch

    assert all(name_of(dtype) == name for name, dtype in st_torch._TYPES.items())


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1), id="permuted"),
        pytest.param(lambda: torch.arange(24.0)[::3], id="strided"),
        pytest.param(lambda: torch.arange(4.0).expand(3, 4), id="expanded"),
        pytest.param(lambda: torch.arange(4.0, requires_grad=True), id="requires_grad"),
        pytest.param(lambda: torch.arange(4.0, requires_grad=True) * 2, id="not a leaf of autograd"),
        pytest.param(lambda: torch.tensor([1 + 2j, 3j]).conj(), id="conjugated"),
        pytest.param(lambda: torch.tensor([1 + 2j, 3j], dtype=torch.complex128).conj(), id="conjugated complex128"),
        pytest.param(lambda: torch.tensor([1 + 2j, 3j]).conj().imag, id="negated"),
        pytest.param(lambda: torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last), id="channels last"),
        pytest.param(lambda: torch.tensor([math.nan, -0.0, math.inf]), id="nan"),
        pytest.param(lambda: torch.full((), 7), id="zero-dimensional"),
        pytest.param(lambda: torch.arange(10)[10:], id="empty view"),
        pytest.param(lambda: torch.empty(0, 3).T, id="empty and transposed"),
        pytest.param(lambda: torch.zeros(1, 200, 5)[:, 0], id="odd stride of an axis of length 1"),
    ],
)
def test_every_kind_of_tensor(round_trip: RoundTrip, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    for item in (
        tensor,
        [tensor, tensor],
        MetaTensor(tensor),
        {"meta": MetaTensor(torch.zeros(2), meta={"x": tensor})},
    ):
        back = round_trip(item)
        assert_same(item, back)
        assert_same(back, in_memory(item))
    back = round_trip(tensor)
    assert back.stride() == in_memory(tensor).stride() == torch.empty(tensor.shape).stride()
    assert back.is_leaf


def test_nan_keeps_its_bits(round_trip: RoundTrip) -> None:
    bits = torch.tensor([0x7FC00001, 0x7FF00000, -1], dtype=torch.int32)
    back = round_trip({"nan": bits.view(torch.float32)})
    assert torch.equal(back["nan"].view(torch.int32), bits)


@pytest.mark.parametrize("route", ["hit", "miss"])
def test_each_tensor_owns_its_storage(round_trip: RoundTrip, route: str) -> None:
    big = torch.zeros(1 << 20)
    array = np.zeros(1 << 20)
    item = {"big": big, "view": big[:10], "same": big, "array": array, "array_view": array[5:15], "again": array[5:15]}
    back = round_trip(item) if route == "hit" else in_memory(item)
    storages = [t.untyped_storage() for t in back.values()]
    assert len({s.data_ptr() for s in storages}) == len(item)
    back["array"].fill_(3)
    back["big"].fill_(3)
    for name in ("view", "array_view", "again"):
        assert back[name].untyped_storage().nbytes() <= back[name].nbytes + 4096
        assert not back[name].any(), f"{name} shares memory with another tensor"


def test_a_small_array_does_not_hold_the_large_one_it_was_cut_from() -> None:
    import weakref

    large = np.zeros(1 << 20)
    gone = weakref.ref(large)
    item = in_memory({"crop": large[:10], "text": np.array(["a"])})
    del large
    assert gone() is None
    assert item["crop"].shape == (10,)


def test_metatensor_keeps_everything(round_trip: RoundTrip) -> None:
    image = MetaTensor(
        torch.rand(1, 4, 5, 6), affine=torch.diag(torch.tensor([1.0, 2, 3, 1])), meta={"a": np.arange(3)}
    )
    image.push_applied_operation(
        {"class": "Flip", "extra_info": {"axes": (1, 2), "dtype": torch.float32}, "n": math.nan}
    )
    image.push_pending_operation({"lazy_affine": torch.eye(4), "lazy_shape": (4, 5, 6)})
    image.is_batch = True
    image.meta["original_channel_dim"] = math.nan
    image.meta["space"] = SpaceKeys.RAS
    back = round_trip(image)
    assert_same(image, back)
    assert back.spatial_ndim == image.spatial_ndim
    assert (back + 1).meta["space"] is SpaceKeys.RAS  # a MetaTensor that works, not only one that looks like it
    assert back[0].shape == (4, 5, 6)


def test_track_meta_false_gives_plain_tensors() -> None:
    encoded = encode_item({"a": [MetaTensor(torch.ones(2), meta={"x": 1})]})
    back = compile_tree(encoded.tree, encoded.arrays, encoded.tensors, track_meta=False)(encoded.tensors)
    assert_same({"a": [torch.ones(2)]}, back)


# ---------------------------------------------------------------------------------------------------------------------
# NumPy


@pytest.mark.parametrize(
    "array",
    [
        np.array(["ab", "c", ""]),
        np.array([b"ab", b"\0c"]),
        np.array([1 + 2j], ">c8"),
        np.arange(3, dtype=">i4"),
        np.array([1.5], np.longdouble),
        np.array([1.5 + 1j], np.clongdouble),
        np.array(["2020-01-01", "NaT"], "M8[D]"),
        np.array([5], "m8[ns]"),
        np.array([], dtype="U5"),
        np.empty((0, 3)),
        np.array(3.5),
        np.arange(6.0).reshape(2, 3).T,
        np.broadcast_to(np.arange(3), (2, 3)),
        np.arange(10)[::-2],
        np.array([True, False]),
        np.float16([1.5]),
        np.uint64([2**64 - 1]),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}".replace(" ", ""),
)  # fmt: skip
def test_every_kind_of_array(round_trip: RoundTrip, array: np.ndarray) -> None:
    item = {"item": array, "meta": MetaTensor(torch.zeros(1), meta={"array": array})}
    back = round_trip(item)
    assert_same(as_returned(array), back["item"])
    assert_same(np.ascontiguousarray(array).reshape(array.shape), back["meta"].meta["array"])
    assert_same(back, in_memory(item))


@pytest.mark.parametrize(
    "scalar",
    [
        np.str_(""), np.str_("ab"), np.float64(math.nan), np.int8(-3),
        np.bool_(True), np.longdouble(1.5), np.complex64(1j), np.datetime64("2020-01-01"), np.datetime64("NaT"),
        np.timedelta64(3, "h"),
    ],
    ids=lambda s: f"{type(s).__name__}-{s!r}".replace("\0", "0"),
)  # fmt: skip
def test_every_kind_of_scalar(round_trip: RoundTrip, scalar: np.generic) -> None:
    assert_same(scalar, round_trip(scalar))
    assert_same([scalar, {scalar: scalar}], round_trip([scalar, {scalar: scalar}]))


def test_memory_map_becomes_memory(round_trip: RoundTrip, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(5))
    for mode in ("r", "r+", "c"):
        mapped = np.load(tmp_path / "a.npy", mmap_mode=mode)  # type: ignore[arg-type]
        assert_same(torch.arange(5), round_trip(mapped))
        in_memory(mapped).fill_(9)
        assert np.array_equal(np.load(tmp_path / "a.npy"), np.arange(5))


ARRAYS = [
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.arange(6.0).reshape(2, 3).T,
    np.zeros((4, 500, 3))[:1, :, :1],
    np.zeros((1, 200, 5), "f4")[:, 0],
    np.broadcast_to(np.arange(3), (2, 3)),
    np.arange(10)[::-2],
    np.array(3.5),
    np.array(2, ">u2"),
    np.empty((0, 3)).T,
    np.empty((3, 0, 1)),
    np.array([True, False]),
    np.float16([1.5]),
    np.uint64([2**64 - 1]),
    np.array([1 + 2j, 3j]),
    np.array(1j, ">c16"),
    np.array([1 + 2j], np.complex64),
    np.arange(70_000, dtype="u2").reshape(7, -1),
    np.array([1.5], np.longdouble),
    np.array(["ab", "c"]),
    np.array(["2020-01-01"], "M8[D]"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}".replace(" ", ""))
def test_arrays_stay_arrays_on_a_cpu_target(cache: CacheDirectory, array: np.ndarray) -> None:
    array.flags.writeable = False
    assert cache.publish(key(), encode_item([array, {"again": array}]))
    expected = np.array(array, array.dtype.newbyteorder("="), order="C")
    miss, first, second = in_memory([array, array], numpy=True), hit(cache, numpy=True), hit(cache, numpy=True)
    for back in (*miss, first[0], first[1]["again"], second[0]):
        assert_same(expected, back)
        assert back.flags.writeable
        assert back.strides == expected.strides
        assert back.dtype.isnative
    first[0][...] = np.zeros((), expected.dtype)
    miss[0][...] = np.zeros((), expected.dtype)
    for other in (first[1]["again"], second[0], hit(cache, numpy=True)[0], miss[1]):
        assert_same(expected, other)  # nothing shares memory, and no write reaches the record


def test_tensors_stay_tensors_where_arrays_are_wanted(cache: CacheDirectory) -> None:
    image = MetaTensor(torch.ones(2), meta={"a": np.ones(2)})
    item = {"t": torch.ones(2), "m": image, "g": torch.ones(1).requires_grad_()}
    assert cache.publish(key(), encode_item(item))
    assert_same(item, hit(cache, numpy=True))


def test_an_array_is_the_tensors_memory() -> None:
    encoded = encode_item({"a": np.zeros(3)})
    array = compile_tree(encoded.tree, encoded.arrays, encoded.tensors, numpy=True)(encoded.tensors)["a"]
    array[0] = 7
    assert encoded.tensors["a"][0] == 7


class _Records(torch.utils.data.Dataset[Any]):
    """Reads a record in the worker, where its large arrays are private mappings."""

    def __init__(self, folder: Path, item: Any) -> None:
        self.folder = folder
        self.expected = item
        assert CacheDirectory(folder, open_storage("posix", "cpu")).publish(key(), encode_item(item))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        found = hit(CacheDirectory(self.folder, open_storage("posix", "cpu")), numpy=True)
        found["view"] = found["large"][10:14]
        return found


def _as_it_is(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize(
    ("context", "collate"),
    [
        *(("fork", collate) for collate in ("default", "list_data", "none", "list")),
        *(pytest.param("spawn", collate, marks=pytest.mark.long) for collate in ("none", "list")),
    ],
)
def test_a_worker_of_a_loader_sends_arrays(tmp_path: Path, context: str, collate: str) -> None:
    from monai.data import list_data_collate

    item = {"large": np.arange(100_000.0), "small": np.arange(3, dtype="i2"), "zero": np.array(1.5)}
    item["none"] = np.ones((0, 2))
    options: dict[str, Any] = {
        "default": {"batch_size": 2},
        "list_data": {"batch_size": 2, "collate_fn": list_data_collate},
        "none": {"batch_size": None},
        "list": {"batch_size": 2, "collate_fn": _as_it_is},
    }[collate]
    loader = torch.utils.data.DataLoader(
        _Records(tmp_path, item),
        num_workers=2 if context == "fork" else 1,  # one that is spawned imports MONAI
        multiprocessing_context=context,
        timeout=120,
        **options,
    )
    expected = {**item, "view": item["large"][10:14]}
    count = 0
    for batch in loader:
        members = batch if collate == "list" else [batch]
        for found in members:
            assert found.keys() == expected.keys()
            for name, one in expected.items():
                assert isinstance(found[name], np.ndarray if collate == "list" else torch.Tensor)
                whole = np.stack([one] * 2) if collate in ("default", "list_data") else one
                assert np.array_equal(np.asarray(found[name]), whole), name
            count += 1 if collate in ("none", "list") else len(found["large"])
    assert count == 4


def test_an_array_is_sent_with_its_own_bytes_only(tmp_path: Path) -> None:
    from multiprocessing.reduction import ForkingPickler

    found = _Records(tmp_path, {"large": np.arange(1_000_000.0)})[0]
    assert len(ForkingPickler.dumps(found["large"])) < found["large"].nbytes + 1000
    assert len(ForkingPickler.dumps(found["view"])) < 1000


# ---------------------------------------------------------------------------------------------------------------------
# Odd values: each comes back exactly, or is refused by its place


class Pair(NamedTuple):
    left: Any
    right: Any = None


class Words(list):  # type: ignore[type-arg]
    pass


class Table(dict):  # type: ignore[type-arg]
    pass


class Number(int):
    pass


class Length(float):
    pass


class Blob(bytes):
    pass


class Single(np.float64):
    pass


class Extended(Pair):
    pass


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int


class Emptied(Pair):
    __slots__ = ()
    _fields = ()


_Namesake = collections.namedtuple("Point", "x y")
_LocalPair = collections.namedtuple("NotItsName", "a b")
_UTC = datetime.UTC
_NOON = datetime.datetime(2024, 10, 27, 2, 30, 1, 5)


STORED = {
    "date": datetime.date(2020, 1, 1),
    "datetime": _NOON,
    "datetime in UTC": _NOON.replace(tzinfo=_UTC),
    "datetime at an offset": _NOON.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=-5, seconds=1))),
    "datetime at a named offset": _NOON.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=1), "X")),
    "first and last": [datetime.datetime.min, datetime.datetime.max, datetime.date.min, datetime.time.max],
    "time": datetime.time(1, 2, 3, 4),
    "time in UTC": datetime.time(1, tzinfo=_UTC, fold=1),
    "timedelta": datetime.timedelta(-1, 3, 5),
    "longest timedelta": datetime.timedelta.max,
    "time zones": [_UTC, datetime.timezone(datetime.timedelta(0), "GMT")],
    "named tuple": Point(1, "a"),
    "named tuple of arrays": Point(np.ones(2), torch.ones(2)),
    "typing.NamedTuple": Pair(Pair(1), [Pair(2, 3)]),
    "int beyond 64 bits": [2**64, -(2**200)],
    "floats": [math.nan, -math.inf, -0.0, 5e-324],
    "complex": complex(math.nan, -0.0),
    "bytes": [b"\0", b"a"],
    "sets": [{1, "a"}, frozenset({(1, 2.0)})],
    "range": range(5, -1, -2),
    "np.str_": np.str_("a\0"),
    "np.longdouble": np.longdouble("0.1"),
    "np.datetime64": np.datetime64("2020-01-01T00:00:00.000000001"),
    "np.dtype": np.dtype(">f4"),
    "OrderedDict": OrderedDict([(None, 1), (Level, 2)][:1]),
    "torch.Size": torch.Size([1, 2]),
    "lone surrogate": "\ud800",
    "tuple keys": {(1, "a"): 1, datetime.date(2020, 1, 1): 2, Point(1, 2): 3, _UTC: 5},
}  # fmt: skip

REFUSED = {
    "deque": collections.deque([1]),
    "defaultdict": collections.defaultdict(list),
    "Counter": collections.Counter("a"),
    "SimpleNamespace": types.SimpleNamespace(a=1),
    "MappingProxyType": types.MappingProxyType({"a": 1}),
    "MaskedArray": np.ma.MaskedArray([1.0], [True]),
    "np.ma.masked": np.ma.masked,
    "array of fields": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    "its element": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])[0],
    "its dtype": np.dtype([("a", "i4")]),
    "array of raw bytes": np.zeros(1, "V2"),
    "array of objects": np.array([None, "a"], object),
    "bytearray": bytearray(b"a"),
    "Decimal": decimal.Decimal(1),
    "Fraction": Fraction(1, 2),
    "UUID": uuid.UUID(int=7),
    "ZoneInfo": zoneinfo.ZoneInfo("Europe/Berlin"),
    "datetime in a zone": _NOON.replace(tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    "Ellipsis": ...,
    "NumPy type": np.float32,
    "np.bytes_": np.bytes_(b"a"),
    "named tuple not found by its name": _LocalPair(1, 2),
    "another class of that name": _Namesake(1, 2),
    "subclass of a named tuple": Extended(1, 2),
    "subclass that hides its fields": Emptied(1, 2),
    "struct_time": time.gmtime(0),
    "torch's own named tuple": torch.ones(2).max(0),
    "subclass of str": Text("a"),
    "subclass of int": Number(1),
    "subclass of float": Length(1),
    "subclass of bytes": Blob(b"a"),
    "subclass of list": Words([1]),
    "subclass of dict": Table(a=1),
    "subclass of np.float64": Single(1),
    "ChainMap": collections.ChainMap({}),
    "UserDict": collections.UserDict(a=1),
    "IntEnum": Level.LOW,
    "Flag": Bits.A,
    "dataclass": Frozen(1),
    "iterator": iter([1]),
    "generator": (i for i in ()),
    "memoryview": memoryview(b"a"),
    "array.array": array.array("i", [1]),
    "pattern": re.compile("a"),
    "module": math,
    "function": math.sin,
    "partial": functools.partial(print),
    "lock": threading.Lock(),
    "exception": ValueError("a"),
    "random state": np.random.default_rng(0),
    "torch.Generator": torch.Generator(),
    "PurePath": pathlib.PurePosixPath("a"),
    "np.matrix": np.asmatrix([[1]]),
    "recarray": np.rec.array([(1, 2.0)]),
    "record": np.rec.array([(1, 2.0)])[0],
    "user's tzinfo": _NOON.replace(tzinfo=type("Zone", (datetime.tzinfo,), {})()),
    "deep": functools.reduce(lambda inner, _: [inner], range(200), None),
}


@pytest.mark.parametrize("name", STORED)
def test_odd_values_come_back_exactly(cache: CacheDirectory, name: str) -> None:
    value = STORED[name]
    assert cache.publish(key(), encode_item({"a": [value], "meta": MetaTensor(torch.ones(1), meta={"v": value})}))
    for back in (hit(cache, numpy=True), in_memory({"a": [value]}, numpy=True), hit(cache, numpy=True)):
        assert_exactly(value, back["a"][0])
    assert_exactly(value, back["meta"].meta["v"])
    first, second = hit(cache, numpy=True), back
    assert not set(mutable_parts(first)) & set(mutable_parts(second))


@pytest.mark.parametrize("name", REFUSED)
def test_odd_values_are_refused_by_their_place(name: str) -> None:
    with pytest.raises(UnsupportedType, match=r"^item\['a'\]\[1\].*register_type"):
        encode_item({"a": [torch.ones(1), REFUSED[name]]})


def assert_exactly(a: Any, b: Any) -> None:
    """As :func:`assert_same`, for what it only compares by ``==`` and what else there is to see of a value."""
    assert type(a) is type(b)
    if isinstance(a, collections.abc.Mapping):
        assert list(map(type, a)) == list(map(type, b))
        assert list(a) == list(b)
        for x, y in zip(a.values(), b.values(), strict=True):
            assert_exactly(x, y)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_exactly(x, y)
    else:
        assert_same(a, b)
        if isinstance(a, (datetime.datetime, datetime.time)):
            assert (a.fold, a.tzinfo, a.tzname(), a.utcoffset()) == (b.fold, b.tzinfo, b.tzname(), b.utcoffset())


def test_a_named_tuple_is_looked_up_only_among_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode_item([Point(1, 2)])
    recipe = compile_tree(encoded.tree, b"", ())
    other, fake = collections.namedtuple("Point", "x z"), type("Point", (tuple,), {"_fields": ("x", "y")})
    for found in (None, other, Custom, fake):
        monkeypatch.setattr("tests.items.test_tree.Point", found)
        with pytest.raises(DamagedRecord, match=r"cannot be read in this process.*test_tree\.Point"):
            compile_tree(encoded.tree, b"", ())
        with pytest.raises(DamagedRecord):
            recipe({})
    monkeypatch.undo()
    for module in ("this", "antigravity", "monai.no_such_module", "os"):
        before = set(sys.modules)
        with pytest.raises(DamagedRecord):
            compile_tree({"$namedtuple": [module, "Point", ["x"], [1]]}, b"", ())
        assert set(sys.modules) == before


def test_a_named_tuple_runs_no_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode_item([Point(1, 2)])
    monkeypatch.setattr(Point, "__new__", None)
    assert compile_tree(encoded.tree, b"", ())({}) == [tuple.__new__(Point, (1, 2))]


# ---------------------------------------------------------------------------------------------------------------------
# Values that passed through from the item


class Reader:
    def __init__(self, level: int, random: Any = None) -> None:
        self.level = level
        self.random = random


def through(item: Any, transform: Callable[[Any], Any], reader_item: Any = None) -> Any:
    """What a hit gives of what a transform made of an item."""
    copied, given = copy_item(item, hash_item)
    encoded = encode_item(transform(copied), given=given)
    recipe = compile_tree(as_json(encoded), encoded.arrays, encoded.tensors)
    return recipe(encoded.tensors, item if reader_item is None else reader_item)


@pytest.mark.parametrize(
    ("item", "place"),
    [
        pytest.param({"v": Reader(1)}, lambda i: i["v"], id="object"),
        pytest.param({"v": [0, (1, Reader(2))]}, lambda i: i["v"][1][1], id="nested object"),
        pytest.param({7: Reader(1)}, lambda i: i[7], id="under a number"),
        pytest.param({"v": Words([1, Reader(3)])}, lambda i: i["v"], id="subclass of list"),
        pytest.param({"v": Table(a=1)}, lambda i: i["v"], id="subclass of dict"),
        pytest.param({"v": Frozen(1)}, lambda i: i["v"], id="dataclass"),
        pytest.param({"v": Level.LOW}, lambda i: i["v"], id="enum"),
        pytest.param({"v": {Frozen(1): 2}}, lambda i: i["v"], id="dict with odd keys"),
        pytest.param({"v": {Frozen(1): Reader(1)}}, lambda i: i["v"], id="object under an odd key"),
        pytest.param({"v": math.sin}, lambda i: i["v"], id="builtin function"),
        pytest.param({"v": through}, lambda i: i["v"], id="function"),
        pytest.param({"v": Custom}, lambda i: i["v"], id="class"),
        pytest.param([Reader(1)], lambda i: i[0], id="item is a list"),
        pytest.param(Reader(1), lambda i: i, id="item itself"),
    ],
)
def test_what_passed_through_is_taken_from_the_item(item: Any, place: Callable[[Any], Any]) -> None:
    for reader_item in (item, deepcopy(item)):
        back = place(through(item, lambda i: i, reader_item))
        value = place(reader_item)
        assert type(back) is type(value)
        assert canonical_hash(back) == canonical_hash(value)
        if not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, enum.Enum)):
            assert back is not value


def test_what_passed_through_may_be_anywhere_in_the_result() -> None:
    def into_metadata(item: Any) -> Any:
        image = MetaTensor(torch.ones(1), meta={"reader": item["r"], 1: [item["r"]]})
        return {"image": image, "all": {"deep": (item["r"],)}}

    back = through({"r": Reader(4)}, into_metadata)
    assert back["image"].meta["reader"].level == back["image"].meta[1][0].level == back["all"]["deep"][0].level == 4
    assert len({id(back["image"].meta["reader"]), id(back["image"].meta[1][0]), id(back["all"]["deep"][0])}) == 3


def test_two_hits_share_nothing_of_the_item() -> None:
    item = {"r": Reader(1)}
    first = through(item, lambda i: i)
    first["r"].level = 9
    assert item["r"].level == 1
    assert through(item, lambda i: i)["r"].level == 1


def _changed(item: Any) -> Any:
    item["r"].level += 1
    return item


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(_changed, id="changed in place"),
        pytest.param(lambda i: {"r": Reader(1)}, id="an equal one"),
        pytest.param(lambda i: {"r": deepcopy(i["r"])}, id="a copy of it"),
        pytest.param(lambda i: vars(i["r"]).update(device="cpu") or i, id="given a device"),
        pytest.param(lambda i: {i["r"]: 1}, id="as a key"),
        pytest.param(lambda i: {(i["r"], 1): 1}, id="in a key"),
        pytest.param(lambda i: {"r": [i["r"], Custom()]}, id="beside another"),
    ],
)
def test_what_did_not_pass_through_unchanged_is_refused(transform: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedType):
        through({"r": Reader(1)}, transform)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(Reader(1, np.random.default_rng(0)), id="in an object"),
        pytest.param(np.random.RandomState(0), id="of NumPy"),
        pytest.param(torch.Generator(), id="of torch"),
        pytest.param(torch.eye(2).to_sparse(), id="a sparse tensor, which has no hash"),
    ],
)
def test_what_cannot_be_shown_to_be_unchanged_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedType):
        through({"r": value}, lambda i: i)


def test_a_container_that_is_taken_from_the_item_leaves_no_tensor_behind() -> None:
    odd = {"t": torch.ones(5), "m": MetaTensor(torch.ones(2)), Frozen(1): 1}
    copied, given = copy_item({"v": odd, "x": torch.ones(1)}, hash_item)
    encoded = encode_item(copied, given=given)
    assert list(encoded.tensors) == ["x"]
    assert encoded.tree["v"] == {"$item": ["v"]}


def test_the_copies_of_volumes_do_not_live_on_for_this() -> None:
    import weakref

    item = {"r": Reader(1), "volume": np.zeros(1000)}
    copied, given = copy_item(item, hash_item)
    del item
    gone = weakref.ref(copied["volume"])
    copied = {"r": copied["r"]}
    assert gone() is None
    assert encode_item(copied, given=given).tree == {"r": {"$item": ["r"]}}


@pytest.mark.parametrize("item", [None, {}, {"r": []}, {"r": [1]}, {"r": 5}, [1], "text"], ids=str)
def test_an_item_without_the_value_is_damage(item: Any) -> None:
    recipe = compile_tree({"a": {"$item": ["r", 1]}}, b"", ())
    with pytest.raises(DamagedRecord, match=r"item\['r'\]\[1\]"):
        recipe({}, item)


def test_a_missing_key_is_not_made_by_a_defaultdict() -> None:
    item = collections.defaultdict(list)
    with pytest.raises(DamagedRecord):
        compile_tree({"$item": ["r"]}, b"", ())({}, item)
    assert not item


# ---------------------------------------------------------------------------------------------------------------------
# Text below the data root


def moved(item: Any, root: str, to: str | None) -> Any:
    encoded = encode_item(item, root=root)
    text = json.dumps(encoded.tree)
    assert root == "/" or not any(named in text for named in (f'"{root}"', f'"{root}/')), "the record names the root"
    return compile_tree(json.loads(text), encoded.arrays, encoded.tensors, root=to)(encoded.tensors)


def under(root: str) -> Any:
    """An item as it is computed where the data lie under this root."""
    name = f"{root}/case 3/ct.nii".replace("//", "/")
    image = MetaTensor(torch.ones(1), meta={"filename_or_obj": np.str_(name), "all": np.array([name, "x"]), name: root})
    image.push_applied_operation({"class": "Load", "extra_info": {"file": name, "path": Path(name), 1: (name,)}})
    return {
        "image": image, "path": Path(name), "root": root, "set": {name}, "bytes": b"/elsewhere", "$odd": Path(root),
        "names": np.array([[name], ["short"]]), "zero": np.array(name),
        "dict": {name: 1, (name, 2): name, Path(name): 2},
        "other": ["/elsewhere/x", "relative/x", "a string", "x" + name, f"{root}2/x".replace("//", "/e")],
        "point": Point(name, 1),
        "wide": np.array([name, "b"], "U200"), "swapped": np.array([name]).astype(">U100"),
        "strings": {np.str_(name): np.str_("a")},
    }  # fmt: skip


@pytest.mark.parametrize("root", ["/data", "/a/much longer/name of a folder", "/d", "/ümlaut"])
@pytest.mark.parametrize("to", ["/data", "/scratch/job 17/data", "/e"])
def test_text_below_the_root_moves_with_the_data(root: str, to: str) -> None:
    item, expected = under(root), under(to)
    expected["other"][-1] = item["other"][-1]  # a neighbour of the root is not below it
    expected["other"][3] = item["other"][3]
    assert_exactly(expected, moved(item, root, to))
    assert_exactly(item, in_memory(item, numpy=True))  # without a root nothing changes


def test_every_absolute_path_is_below_the_root_of_all() -> None:
    item = {"a": "/x/y", "b": "/", "c": "x", "d": Path("/x"), "e": ""}
    assert_same(item, moved(item, "/", "/"))
    assert_same({"a": "/r/x/y", "b": "/r", "c": "x", "d": Path("/r/x"), "e": ""}, moved(item, "/", "/r"))
    item = {"a": "/data", "b": "/data/x", "c": "/datax"}
    assert_same({"a": "/", "b": "/x", "c": "/datax"}, moved(item, "/data", "/"))


def test_a_record_with_relative_text_needs_a_root() -> None:
    with pytest.raises(DamagedRecord, match=r"/case/ct\.nii.*root="):
        moved({"a": ["/data/case/ct.nii"]}, "/data", None)


def test_keys_of_the_item_are_relative_too() -> None:
    copied, given = copy_item({"/data/x": Reader(3)}, hash_item)
    encoded = encode_item(copied, root="/data", given=given)
    assert "/data" not in json.dumps(encoded.tree)
    back = compile_tree(as_json(encoded), b"", (), root="/new")({}, {"/new/x": Reader(3)})
    assert list(back) == ["/new/x"]
    assert back["/new/x"].level == 3


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be stored


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(Custom(), "Custom", id="object"),
        pytest.param(Colour.RED, "Colour", id="a user's enum"),
        pytest.param(Text("a"), "Text", id="subclass of str"),
        pytest.param(threading.Lock(), "lock", id="lock"),
        pytest.param(lambda: 1, "function", id="function"),
        pytest.param(Custom, "type", id="class"),
        pytest.param(pathlib.PureWindowsPath("a"), "PureWindowsPath", id="another system's path"),
        pytest.param(torch.eye(2).to_sparse(), "Tensor", id="sparse tensor"),
        pytest.param(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "Tensor", id="nested tensor"),
        pytest.param(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "Tensor", id="quantized tensor"),
        pytest.param(torch.empty(2, device="meta"), "Tensor", id="meta tensor"),
        pytest.param(torch.nn.Parameter(torch.ones(2)), "Parameter", id="parameter"),
        pytest.param(np.array([(None,)], [("a", object)]), "ndarray", id="structured array of objects"),
        pytest.param({torch.ones(1): 1}, "Tensor", id="tensor as a key"),
        pytest.param({(torch.ones(1), 1): 1}, "tuple", id="tensor in a key"),
        pytest.param({Custom(): 1}, "Custom", id="object as a key"),
        pytest.param(np.zeros(1, np.dtype({"names": "ab", "formats": ["i4", "i4"], "offsets": [2, 0]})), "ndarray",
                     id="overlapping fields"),
    ],
)  # fmt: skip
def test_unsupported_names_key_path_type_and_way_out(value: Any, name: str) -> None:
    with pytest.raises(UnsupportedType) as caught:
        encode_item({"image": torch.ones(1), "extra": [0, {"deep": value}]})
    message = str(caught.value)
    assert message.startswith("item['extra'][1]['deep']")
    assert name in message.split(",")[0]
    assert "register_type" in message
    assert "DeleteItemsd" in message


def test_unsupported_in_metadata_names_its_place() -> None:
    image = MetaTensor(torch.ones(1), meta={"reader": Custom()})
    with pytest.raises(UnsupportedType, match=r"item\['image'\].*'reader'.* is a .*Custom.*out of the metadata"):
        encode_item({"image": image})


@pytest.mark.parametrize("kind", ["list", "dict", "metatensor"])
def test_what_contains_itself_is_refused(kind: str) -> None:
    item: Any = {"list": [], "dict": {}, "metatensor": MetaTensor(torch.ones(1))}[kind]
    {
        "list": lambda: item.append(item),
        "dict": lambda: item.update(x=item),
        "metatensor": lambda: item.meta.update(x=item),
    }[kind]()
    with pytest.raises(UnsupportedType, match="contains itself"):
        encode_item([item])


def test_records_of_one_form_do_not_mix_up_their_values(round_trip: RoundTrip) -> None:
    """Putting an item together is worked out once for all items that look alike; equal is not the same."""
    alike = [1, True, 1.0, np.float64(1), np.int8(1), "1", b"1", 0.0, -0.0, None, "RAS", SpaceKeys.RAS]
    alike += [np.str_("RAS"), (1, "a"), (True, "a"), (1.0, "a"), (1, "b"), frozenset({1}), frozenset({1.0}), 2**70]
    for _ in range(2):
        for value in alike:
            meta = {"x": value, "list": [value, "RAS"], "set": {value}, value: "key", "n": np.array([3])}
            for item in (meta, [value, [value]], MetaTensor(torch.ones(1), meta=meta)):
                assert_same(item if not isinstance(item, dict) else as_returned(item), round_trip(item))


def test_small_arrays_of_one_form_do_not_mix_up(round_trip: RoundTrip) -> None:
    for dtype in ("<i2", ">i2", "<u2", "f2", "f4", "c16", "M8[D]", "M8[s]", "U3", "S3"):
        for shape in ((), (2,), (1, 2), (2, 1), (0,)):
            for fill in (1, 2):
                array = np.full(shape, fill, np.uint8).astype(dtype)
                image = MetaTensor(
                    torch.ones(1), meta={"odd": np.array(7, np.uint8), "x": array, "t": torch.ones(2) * fill}
                )
                back = round_trip(image)
                assert_same(image, back)
                back.meta["x"][...] = np.zeros((), array.dtype)  # it can be written to, and next to nothing else
                assert back.meta["odd"] == 7
                assert back.meta["t"].tolist() == [fill, fill]


def test_an_object_that_appears_twice_is_not_a_cycle(round_trip: RoundTrip) -> None:
    inner = [1, {"a": 2}]
    assert_same([inner, inner], round_trip([inner, inner]))


def test_not_strict_lets_anything_pass() -> None:
    value, lock = Custom(), threading.Lock()
    encoded = encode_item({"a": value, "b": [lock, np.ones(1)], "c": torch.eye(2).to_sparse()}, strict=False)
    back = compile_tree(encoded.tree, encoded.arrays, encoded.tensors)(encoded.tensors)
    assert back["a"] is value
    assert back["b"][0] is lock
    assert isinstance(back["b"][1], torch.Tensor)
    assert back["c"].is_sparse


# ---------------------------------------------------------------------------------------------------------------------
# Types of the user's


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_types, "_by_class", item_types._by_class.copy())
    monkeypatch.setattr(item_types, "_by_name", item_types._by_name.copy())


def test_register_type(registry: None, round_trip: RoundTrip) -> None:
    register_type(Fraction, "fraction", lambda f: [f.numerator, f.denominator], lambda v: Fraction(*v))
    register_type(Point, "point", tuple, lambda v: Point(*v))
    item = {"f": Fraction(1, 3), "p": [Point(torch.ones(2), Fraction(2))], Fraction(1): 1}
    assert_same(item, round_trip(item))


def test_registering_again_replaces_and_a_taken_name_is_an_error(registry: None) -> None:
    register_type(Fraction, "fraction", str, Fraction)
    register_type(Fraction, "fraction", lambda f: [f.numerator, f.denominator], lambda v: Fraction(*v))
    with pytest.raises(ValueError, match="'fraction' is already registered for Fraction"):
        register_type(Custom, "fraction", str, str)


def test_a_class_that_a_notebook_defines_again_takes_its_name_along(registry: None, round_trip: RoundTrip) -> None:
    notebook: dict[str, Any] = {"__name__": "__main__", "register_type": register_type}
    cell = """if True:
        class Voxel(str):
            __slots__ = ()

        register_type(Voxel, "voxel", str.__str__, lambda value: Voxel(value))
    """
    exec(cell, notebook)
    first = notebook["Voxel"]
    exec(cell, notebook)
    again = notebook["Voxel"]
    assert first is not again
    assert type(round_trip(again("a"))) is again


def test_classes_that_a_function_makes_do_not_replace_each_other(registry: None) -> None:
    def make(factor: int) -> type:
        class Scaled(str):
            __slots__ = ()

        register_type(Scaled, "scaled", str.__str__, lambda value: Scaled(value * factor))
        return Scaled

    made = make(2)
    with pytest.raises(ValueError, match=r"'scaled' is already registered for .*make\.<locals>\.Scaled"):
        make(3)
    register_type(made, "scaled", str.__str__, made)


def test_an_instance_that_a_codec_refuses_is_named_with_the_reason(registry: None) -> None:
    def encode(value: Fraction) -> str:
        raise ValueError("has no place here")

    register_type(Fraction, "fraction", encode, Fraction)
    with pytest.raises(UnsupportedType, match=r"item\['a'\] is a fractions.Fraction, which has no place here"):
        encode_item({"a": Fraction(1, 2)})


def test_a_subclass_of_a_registered_type_is_not_covered(registry: None) -> None:
    register_type(Fraction, "fraction", str, Fraction)

    class Half(Fraction):
        pass

    with pytest.raises(UnsupportedType, match="Half"):
        encode_item(Half(1, 2))


def test_an_unregistered_name_in_a_record_is_named(registry: None) -> None:
    register_type(Fraction, "fraction", str, Fraction)
    encoded = encode_item([Fraction(1, 2)])
    del item_types._by_name["fraction"]
    with pytest.raises(DamagedRecord, match=r"'fraction'.*register_type"):
        compile_tree(encoded.tree, encoded.arrays, encoded.tensors)


# ---------------------------------------------------------------------------------------------------------------------
# Trees that no writer made


@pytest.mark.parametrize(
    "node",
    [
        {"$enum": ["MetaKeys", "NOPE"]},
        {"$enum": ["os", "system"]},
        {"$enum": ["StrEnum", "mro"]},
        {"$torch_dtype": "load"},
        {"$torch_dtype": "nothing"},
        {"$opaque": 1},
        {"$opaque": {"value": 1}},
        {"$registered": ["nobody", 1]},
        {"$array": ["<f4", [4], 0]},
        {"$array": ["|O", [1], 0]},
        {"$array": ["<f4", [-1], 0]},
        {"$small_tensor": ["float32", [9], 0, {}]},
        {"$tensor": {}},
        {"$tensor": {"name": "not there"}},
        {"$tuple": 3},
        {"$scalar": ["<f4", "AA=="]},
        {"$bytes": "not base64!"},
        {"$dict": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$metatensor": []},
        {"$small_tensor": ["quint8", [1], 0, {}]},
        {"$small_tensor": ["quint4x2", [1], 0, {}]},
        {"$small_tensor": ["float32", [1], 1, {}]},
        {"$small_tensor": ["float32", [1], 0, None, 1]},
        {"$small_tensor": ["float32", [-1], 0, {}]},
        {"$small_tensor": ["float32", [2**62, 2**62], 0, {}]},
        {"$small_tensor": ["float32", ["a"], 0, {}]},
        {"$array": ["<f4", [2**62, 8], 0]},
        {"$array": ["[" * 300, [1], 0]},
        {"$texts": ["<", None, [2**40], []]},
        {"$texts": ["<", None, [1], [1]]},
        {"$texts": ["<", "9", [1], ["a"]]},
        {"$texts": ["O", None, [1], ["a"]]},
        {"$root": "/a"},
        {"$root": 1},
        {"$path": 1},
        {"$item": "abc"},
        {"$item": [1.5]},
        {"$item": []},
        {"$set": [[1]]},
        {"$frozenset": [[1]]},
        {"$size": ["a"]},
        {"$namedtuple": ["collections", "namedtuple", [], []]},
        {"$namedtuple": ["tests.items.test_tree", "Point", ["x", "y"], [1]]},
        {"$namedtuple": [None, None, None, None]},
        {"$date": "2020-13-01"},
        {"$date": 1},
        {"$datetime": ["2020-01-01T00:00:00", 2, None]},
        {"$datetime": ["2020-01-01T00:00:00", 0, ["offset", [2, 0, 0]]]},
        {"$timedelta": [10**12, 0, 0]},
        {"$range": [0, 1, 0]},
        {"$tensor": 1},
        {"$tensor": {"name": ["x"]}},
        {"$tensor": {"name": "x", "numpy": "|O"}},
        {"$tensor": {"name": "x", "numpy": "<f4", "requires_grad": True}},
        {"$tensor": {"name": "x", "complex": True}},
        {"$tensor": {"name": "x", "requires_grad": True}},
        {"$tuple": [{"$tensor": {"name": "x"}}, {"$tensor": {"name": "x"}}]},
        {"$registered": ["reversed", 1]},
    ],
    ids=str,
)
def test_a_malformed_node_is_damage(registry: None, node: Any) -> None:
    """Found out when it is compiled or when an item is put together, and never anything else."""
    register_type(Custom, "reversed", vars, lambda value: value[::-1])
    names = {"x": torch.ones(3, dtype=torch.int32)}
    for numpy in (False, True):
        with pytest.raises(DamagedRecord):
            compile_tree({"a": [node]}, b"\0" * 8, names, numpy=numpy)(names)


@pytest.mark.parametrize(
    "deeper",
    [
        pytest.param(lambda inner: [inner], id="list"),
        pytest.param(lambda inner: {"a": inner}, id="dict"),
        pytest.param(lambda inner: {"$tuple": [inner]}, id="tuple"),
        pytest.param(lambda inner: {"$registered": ["reversed", inner]}, id="registered"),
        pytest.param(lambda inner: {"$metatensor": [inner, []]}, id="metatensor"),
        pytest.param(lambda inner: {"$dict": [[inner, 1]]}, id="key"),
        pytest.param(lambda inner: {"$complex": [inner, 1]}, id="part of a number"),
    ],
)
@pytest.mark.parametrize("limit", [1000, 100_000])
def test_a_deep_tree_is_damage(
    registry: None, monkeypatch: pytest.MonkeyPatch, deeper: Callable[[Any], Any], limit: int
) -> None:
    register_type(Custom, "reversed", vars, list)
    before = sys.getrecursionlimit()
    node = functools.reduce(lambda inner, _: deeper(inner), range(5000), 1)
    try:
        sys.setrecursionlimit(limit)
        with pytest.raises(RecordError):
            compile_tree(node, b"", ())
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize(
    "deeper", [lambda i: [i], lambda i: {"a": i}, lambda i: OrderedDict(a=i), lambda i: {1: i}, lambda i: (i,), slice]
)
def test_what_is_as_deep_as_can_be_stored_comes_back(deeper: Callable[[Any], Any]) -> None:
    item = functools.reduce(lambda inner, _: deeper(inner), range(item_types.MAX_DEPTH), 1)
    assert in_memory(item) == item
    with pytest.raises(UnsupportedType, match="deep"):
        encode_item([item])
    assert in_memory([item], strict=False) == [item]


@pytest.mark.parametrize(
    "node",
    [
        {"$new": 1},
        {"$new": 1, "$tensor": {"name": "x"}},
        {"a": 1, "$b": 2},
        {"$tensor": {"name": "x", "codec": "zstd"}},
        {"$small_tensor": ["float32", [1], 0, {"codec": 1}]},
        {"$path": {"$home": "x"}},
        {"$path": "x", "style": 1},
        {"$datetime": ["2020-01-01T00:00:00", 0, ["planet", "Mars"]]},
        {"$dict": [[{"$new": 1}, 2]]},
    ],
    ids=str,
)
def test_trees_of_a_newer_version_are_not_damaged(node: Any) -> None:
    with pytest.raises(NewerRecord, match="which this version does not support"):
        compile_tree({"a": [node]}, b"\0" * 8, {"x"})


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
    | st.sampled_from(["<f4", "float32", "x", "list", "tests.items.test_tree", "Point"]),
    lambda inner: st.lists(inner, max_size=5)
    | st.dictionaries(st.sampled_from([*table.ROWS, "name", "numpy"]), inner, min_size=1, max_size=2)
    | st.dictionaries(st.sampled_from([*table.ROWS]), inner, min_size=1, max_size=1),
    max_leaves=12,
)  # fmt: skip


@given(tree=_json)
def test_any_tree_is_decoded_or_refused(tree: Any) -> None:
    tensors = {"x": torch.ones(2)}
    with contextlib.suppress(RecordError):
        compile_tree(tree, b"\0" * 64, tensors, numpy=True, root="/r")(tensors, {"x": 1})
