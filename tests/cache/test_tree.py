"""Whatever an item holds comes back equal from a real record file, and two hits share nothing."""

from __future__ import annotations

import collections
import datetime
import enum
import math
import pathlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from monai.data import MetaTensor
from monai.utils import GridSampleMode, MetaKeys, SpaceKeys, TraceKeys

from monai_gds.cache import codecs
from monai_gds.cache.directory import CacheDirectory
from monai_gds.cache.dtypes import DTYPE_NAMES
from monai_gds.cache.tree import compile_tree, encode_item, register_type
from monai_gds.errors import DamagedRecord, UnsupportedType
from monai_gds.storage import open_storage
from tests.cache.conftest import key
from tests.same import assert_same, mutable_parts

RoundTrip = Callable[[Any], Any]


def as_returned(value: Any) -> Any:
    """What a user gets for an item: numeric arrays outside of metadata are tensors, everything else is itself."""
    if type(value) in (dict, OrderedDict):
        return type(value)((k, as_returned(v)) for k, v in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(as_returned(v) for v in value)
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            out = np.empty(value.size, object)
            for i, v in enumerate(value.ravel().tolist()):
                out[i] = as_returned(v)
            return out.reshape(value.shape)
        if value.dtype.kind in "biufc" and value.dtype.itemsize <= (16 if value.dtype.kind == "c" else 8):
            return torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))
    return value


def in_memory(item: Any) -> Any:
    """Taken apart and put together again, as a miss is."""
    encoded = encode_item(item)
    return compile_tree(encoded.tree, encoded.arrays, encoded.tensors)(encoded.tensors)


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
    st.sampled_from([np.dtype("f4"), np.dtype(">i2"), np.dtype("U3"), np.float32, np.int64, int, float, bool, str]),
    st.builds(pathlib.Path, st.text("abc/. ", max_size=8)),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers()),
    st.builds(range, st.integers(-5, 5), st.integers(-5, 5), st.integers(1, 3)),
    st.builds(lambda s: torch.Size(s), st.lists(st.integers(0, 5), max_size=4)),
)
_dtypes = st.one_of(
    hnp.scalar_dtypes(),
    hnp.unicode_string_dtypes(max_len=4),
    hnp.byte_string_dtypes(max_len=4),
    hnp.array_dtypes(),
)
_arrays = _dtypes.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3)))
_numpy_scalars = hnp.arrays(_dtypes, 1).map(lambda a: a[0])


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
    st.sampled_from([*DTYPE_NAMES, torch.complex128, torch.complex32]),
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
            st.lists(inner, max_size=3).map(_object_array),
        ),
        max_leaves=8,
    )


def _object_array(values: list[Any]) -> np.ndarray:
    out = np.empty(len(values), object)
    for i, v in enumerate(values):
        out[i] = v
    return out


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
    st.frozensets(_hashable, max_size=3), st.binary(max_size=5).map(bytearray),
)  # fmt: skip


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> CacheDirectory:
    return CacheDirectory(tmp_path_factory.mktemp("records"), open_storage("posix", "cpu"), verify="always")


@given(item=_nested(_leaves))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_item_comes_back_equal(scratch: CacheDirectory, item: Any) -> None:
    import safetensors

    assert scratch.publish(key(), encode_item(item))
    (first,) = scratch.start(key().digest).wait()  # type: ignore[union-attr]
    (second,) = scratch.start(key().digest).wait()  # type: ignore[union-attr]
    expected = as_returned(item)
    assert_same(expected, first)
    assert_same(first, second)
    assert_same(first, in_memory(item))
    shared = set(mutable_parts(first)) & set(mutable_parts(second))
    assert not shared
    with safetensors.safe_open(scratch.record_path(key().digest), "pt") as f:  # any safetensors tool opens a record
        assert f.metadata()["format"] == "monai_gds"
        for name in f.keys():  # noqa: SIM118 (it is no mapping)
            f.get_tensor(name)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


@pytest.mark.parametrize("dtype", [*DTYPE_NAMES, torch.complex128, torch.complex32], ids=str)
@pytest.mark.parametrize("shape", [[], [0], [3, 0, 2], [5], [2, 3, 4], [70_000]], ids=str)
def test_every_dtype_and_shape(round_trip: RoundTrip, dtype: torch.dtype, shape: list[int]) -> None:
    tensor = _tensor(1, dtype, shape, False)
    assert_same(tensor, round_trip(tensor))


def test_knows_every_dtype_that_safetensors_knows() -> None:
    from safetensors import torch as st_torch

    assert all(DTYPE_NAMES[dtype] == name for name, dtype in st_torch._TYPES.items())


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
    assert back.is_contiguous()
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
    image.push_applied_operation({"class": "Flip", "extra_info": {"axes": (1, 2), "dtype": np.float32}, "n": math.nan})
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
        np.array([(1, 2.5, "x")], [("a", "i4"), ("b", ">f8"), ("c", "U2")]),
        np.array([((1, [2, 3]),)], [("a", [("b", "u1"), ("c", "i2", (2,))])]),
        np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        np.array([None, "a", 1, 2.5, [1, 2], {"k": (1,)}], object),
        _object_array([[1, 2], [3, 4]]),
        _object_array([[1], np.arange(3), torch.ones(2)]),
        _object_array([[1], [2]]).reshape(1, 2, 1),
        np.array([], dtype="U5"),
        np.empty((0, 3)),
        np.empty(2, "V0"),
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
    if array.dtype != object:
        assert_same(np.ascontiguousarray(array).reshape(array.shape), back["meta"].meta["array"])
    assert_same(back, in_memory(item))


@pytest.mark.parametrize(
    "scalar",
    [
        np.str_(""), np.str_("ab"), np.bytes_(b""), np.bytes_(b"a\0"), np.float64(math.nan), np.int8(-3),
        np.bool_(True), np.longdouble(1.5), np.complex64(1j), np.datetime64("2020-01-01"), np.datetime64("NaT"),
        np.timedelta64(3, "h"), np.array([(1, "x")], [("a", "i4"), ("b", "U2")])[0],
    ],
    ids=lambda s: f"{type(s).__name__}-{s!r}".replace("\0", "0"),
)  # fmt: skip
def test_every_kind_of_scalar(round_trip: RoundTrip, scalar: np.generic) -> None:
    assert_same(scalar, round_trip(scalar))
    assert_same([scalar, {scalar: scalar}] if scalar.dtype.kind != "V" else [scalar],
                round_trip([scalar, {scalar: scalar}] if scalar.dtype.kind != "V" else [scalar]))  # fmt: skip


def test_structured_scalars_are_not_shared(scratch: CacheDirectory) -> None:
    record = np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])[0]
    encoded = encode_item(record)
    build = compile_tree(encoded.tree, encoded.arrays, encoded.tensors)
    first, second = build({}), build({})
    first["a"] = 7
    assert second["a"] == 1


def test_memory_map_becomes_memory(round_trip: RoundTrip, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(5))
    for mode in ("r", "r+", "c"):
        mapped = np.load(tmp_path / "a.npy", mmap_mode=mode)  # type: ignore[arg-type]
        assert_same(torch.arange(5), round_trip(mapped))
        in_memory(mapped).fill_(9)
        assert np.array_equal(np.load(tmp_path / "a.npy"), np.arange(5))


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be stored


class Custom:
    pass


class Colour(enum.Enum):
    RED = 1


class Text(str):
    pass


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(Custom(), "Custom", id="object"),
        pytest.param(Colour.RED, "Colour", id="a user's enum"),
        pytest.param(Point(1, 2), "Point", id="named tuple"),
        pytest.param(Text("a"), "Text", id="subclass of str"),
        pytest.param(collections.defaultdict(list), "defaultdict", id="subclass of dict"),
        pytest.param(datetime.date(2020, 1, 1), "date", id="date"),
        pytest.param(threading.Lock(), "lock", id="lock"),
        pytest.param(lambda: 1, "function", id="function"),
        pytest.param(Custom, "type", id="class"),
        pytest.param(pathlib.PureWindowsPath("a"), "PureWindowsPath", id="another system's path"),
        pytest.param(torch.eye(2).to_sparse(), "Tensor", id="sparse tensor"),
        pytest.param(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "Tensor", id="nested tensor"),
        pytest.param(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "Tensor", id="quantized tensor"),
        pytest.param(torch.empty(2, device="meta"), "Tensor", id="meta tensor"),
        pytest.param(torch.nn.Parameter(torch.ones(2)), "Parameter", id="parameter"),
        pytest.param(np.ma.masked_array([1, 2], [True, False]), "MaskedArray", id="masked array"),
        pytest.param(np.array([(None,)], [("a", object)]), "ndarray", id="structured array of objects"),
        pytest.param(_object_array([Custom()]), "Custom", id="object array of anything"),
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
    with pytest.raises(UnsupportedType, match=r"item\['image'\].*'reader'.* is a .*Custom"):
        encode_item({"image": image})


@pytest.mark.parametrize("kind", ["list", "dict", "array", "metatensor"])
def test_what_contains_itself_is_refused(kind: str) -> None:
    item: Any = {"list": [], "dict": {}, "array": np.empty(1, object), "metatensor": MetaTensor(torch.ones(1))}[kind]
    {
        "list": lambda: item.append(item),
        "dict": lambda: item.update(x=item),
        "array": lambda: item.__setitem__(0, item),
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
    for dtype in ("<i2", ">i2", "<u2", "f2", "f4", "c16", "M8[D]", "M8[s]", "U3", "S3", [("a", "u1"), ("b", "<i2")]):
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


def test_what_is_there_twice_is_no_cycle(round_trip: RoundTrip) -> None:
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
    monkeypatch.setattr(codecs, "_by_class", {})
    monkeypatch.setattr(codecs, "_by_name", {})


def test_register_type(registry: None, round_trip: RoundTrip) -> None:
    register_type(Fraction, "fraction", lambda f: [f.numerator, f.denominator], lambda v: Fraction(*v))
    register_type(Point, "point", tuple, lambda v: Point(*v))
    item = {"f": Fraction(1, 3), "p": [Point(torch.ones(2), Fraction(2))], Fraction(1): 1}
    assert_same(item, round_trip(item))


def test_registering_again_replaces_and_a_taken_name_is_an_error(registry: None) -> None:
    register_type(Fraction, "fraction", str, Fraction)
    register_type(Fraction, "fraction", lambda f: [f.numerator, f.denominator], lambda v: Fraction(*v))
    with pytest.raises(ValueError, match="'fraction' is registered for Fraction"):
        register_type(Custom, "fraction", str, str)


def test_subclass_of_a_registered_type_is_not_meant(registry: None) -> None:
    register_type(Fraction, "fraction", str, Fraction)

    class Half(Fraction):
        pass

    with pytest.raises(UnsupportedType, match="Half"):
        encode_item(Half(1, 2))


def test_unregistered_name_in_a_record_says_so(registry: None) -> None:
    register_type(Fraction, "fraction", str, Fraction)
    encoded = encode_item([Fraction(1, 2)])
    codecs._by_name.clear()
    with pytest.raises(DamagedRecord, match=r"'fraction'.*register_type"):
        compile_tree(encoded.tree, encoded.arrays, encoded.tensors)


# ---------------------------------------------------------------------------------------------------------------------
# Trees that no writer made


@pytest.mark.parametrize(
    "node",
    [
        {"$new": 1},
        {"$enum": ["MetaKeys", "NOPE"]},
        {"$enum": ["os", "system"]},
        {"$enum": ["StrEnum", "mro"]},
        {"$numpy_type": "ndarray"},
        {"$numpy_type": "load"},
        {"$torch_dtype": "load"},
        {"$torch_dtype": "nothing"},
        {"$type": "object"},
        {"$opaque": 1},
        {"$opaque": {"value": 1}},
        {"$registered": ["nobody", 1]},
        {"$array": ["<f4", [4], 0]},
        {"$array": ["|O", [1], 0]},
        {"$array": ["<f4", [-1], 0]},
        {"$small_tensor": ["float32", [9], 0, {}]},
        {"$tensor": {}},
        {"$tensor": {"name": "x", "codec": "zstd"}},
        {"$tensor": {"name": "not there"}},
        {"$tuple": 3},
        {"$scalar": ["<f4", "AA=="]},
        {"$bytes": "not base64!"},
        {"$dict": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$metatensor": []},
    ],
    ids=str,
)
def test_malformed_or_unknown_nodes_are_damage(node: Any) -> None:
    with pytest.raises(DamagedRecord):
        compile_tree({"a": [node]}, b"\0" * 8, {"x"})
