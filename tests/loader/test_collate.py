"""``collate`` cannot be told from MONAI's ``list_data_collate``, except that a batch of one is not copied."""

from __future__ import annotations

import collections
import copy
import enum
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.data import DataLoader, MetaTensor, decollate_batch, list_data_collate, set_track_meta
from monai.utils import MetaKeys, SpaceKeys
from torch.utils.data._utils.collate import default_collate_fn_map

from monai_gds import GDSDataset, limits
from monai_gds.loader import collate as module
from monai_gds.loader.collate import collate
from monai_gds.storage import memory as pools
from tests.fixtures_nifti import KEYS, pipeline, write_volumes
from tests.same import assert_same

CASE = mt.RandSpatialCropd([*KEYS, "mask"], (8, 8, 8), random_size=False)
CROPS = mt.RandCropByPosNegLabeld([*KEYS, "mask"], "label", (8, 8, 8), num_samples=3)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_volumes(tmp_path_factory.mktemp("volumes"))


@pytest.fixture
def make(volumes: list[dict[str, Any]], tmp_path: Path) -> Callable[..., list[Any]]:
    """Items of a cached dataset of NIfTI files, each read again."""

    def items(*random: Any, count: int = 3, **options: Any) -> list[Any]:
        with GDSDataset(copy.deepcopy(volumes), pipeline(*random), tmp_path, "cpu", **options) as dataset:
            dataset.__getitems__(range(count))
        return dataset.__getitems__(range(count))

    return items


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a whole batch goes to MONAI's function, so that it is not compared with itself."""

    def refuse(batch: Any) -> Any:
        raise AssertionError("went to list_data_collate")

    monkeypatch.setattr(module, "list_data_collate", refuse)


def outcome(function: Callable[[Any], Any], value: Any) -> tuple[Any, ...]:
    try:
        return ("gave", function(value))
    except Exception as e:
        return ("raised", type(e), str(e))


def assert_as_monai(batch: list[Any]) -> Any:
    """Compares the batch, its memory layout, and what decollating it gives; returns the batch."""
    expected = outcome(list_data_collate, batch)  # takes copies of what it is given
    got = outcome(collate, batch)
    assert_same(expected, got)
    if got[0] == "gave":
        for a, b in zip(tensors(expected), tensors(got), strict=True):
            assert a.is_contiguous() == b.is_contiguous()
            assert (a.requires_grad, a.is_leaf, a.is_conj()) == (b.requires_grad, b.is_leaf, b.is_conj())
        assert_same(outcome(decollate_batch, expected[1]), outcome(decollate_batch, got[1]))
    return got[1]


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, MetaTensor):
        return [value, *tensors(value.meta)]
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for part in parts for t in tensors(part)]


# ---------------------------------------------------------------------------------------------------------------------
# Real items


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("track_meta", [True, False])
def test_items_of_a_nifti_pipeline(make: Any, count: int, track_meta: bool) -> None:
    batch = assert_as_monai(make(CASE, count=count, track_meta=track_meta))
    assert batch["image"].shape == (count, 1, 8, 8, 8)
    assert ("filename_or_obj" in batch["image"].meta) == track_meta


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("count", [1, 3])
def test_crops_are_joined(make: Any, count: int) -> None:
    batch = assert_as_monai(make(CROPS, count=count))
    assert batch["image"].shape == (3 * count, 1, 8, 8, 8)
    assert len(batch["name"]) == 3 * count


@pytest.mark.usefixtures("no_fallback")
def test_metadata_that_differs_among_items(make: Any) -> None:
    items = make(CASE)
    items[0]["image"].meta["only here"] = 1
    del items[1]["image"].meta["dim"]
    items[2]["label"].meta["space"] = "LPS"
    assert "dim" not in assert_as_monai(items)["image"].meta


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_not_contiguous_takes_the_fast_way_too(count: int) -> None:
    def item(n: int) -> dict[str, Any]:
        image = MetaTensor(
            torch.rand(1, 4, 4), affine=torch.eye(4).mul(n).T, meta={"dim": np.arange(12).reshape(3, 4).T}
        )
        return {"image": image, "small": torch.rand(3, 5).T, "array": np.arange(16.0).reshape(4, 4)[::2, ::2]}

    assert_as_monai([item(n) for n in range(count)])


def test_volumes_of_different_shapes_are_monais_error(make: Any) -> None:
    got = outcome(collate, make())
    assert got[0] == "raised" and got[1] is RuntimeError
    assert "Collate error on the key 'image'" in got[2] and "pad_list_data_collate" in got[2]
    assert_as_monai(make())


@pytest.mark.parametrize("kind", [torch.Tensor, MetaTensor])
@pytest.mark.parametrize(
    "second",
    [
        lambda t: t + 1,
        lambda t: t.transpose(1, 3),
        lambda t: t.to(torch.float64),
        lambda t: t.to(torch.bfloat16),
        lambda t: t.requires_grad_(),
        lambda t: torch.complex(t, t).conj().imag,
    ],
)
def test_large_volumes(monkeypatch: pytest.MonkeyPatch, kind: type, second: Callable[..., torch.Tensor]) -> None:
    monkeypatch.setattr(limits, "POOLED_BATCH_BYTES", 40_000)
    first = torch.rand(1, 20, 20, 20)
    for pair in ([first, second(first.clone())], [second(first.clone()), first]):
        assert_as_monai([{"image": kind(t), "n": 1} for t in pair])


@pytest.mark.parametrize("count", [1, 3])
def test_decollated_items_can_be_inverted(make: Any, volumes: list[dict[str, Any]], count: int) -> None:
    transforms, batch, back = pipeline(CASE), make(CASE, count=count), {}
    for function in (list_data_collate, collate):
        items = decollate_batch(function(copy.deepcopy(batch)))
        assert len(items) == count
        back[function] = [mt.Invertd("label", transforms, "label")(item)["label"] for item in items]
    assert_same(back[list_data_collate], back[collate])
    assert back[collate][0].shape[1:] == (40, 36, 32)


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader(volumes: list[dict[str, Any]], tmp_path: Path, workers: int) -> None:
    dataset = GDSDataset(copy.deepcopy(volumes), pipeline(CASE), tmp_path, "cpu")
    for batch_size in (1, 2):
        batches = []
        for function in (list_data_collate, collate):
            torch.manual_seed(0)
            dataset.transform.set_random_state(0)
            loader = DataLoader(dataset, batch_size=batch_size, num_workers=workers, collate_fn=function)
            batches.append(list(loader))
        mt.utils.reset_ops_id(batches[0])
        mt.utils.reset_ops_id(batches[1])
        assert_same(batches[0], batches[1])


# ---------------------------------------------------------------------------------------------------------------------
# Anything


class _Point(collections.namedtuple("_Point", "x y")):
    __slots__ = ()


class _Colour(enum.IntEnum):
    RED = 1


class _Text(str):
    __slots__ = ()


def _meta_tensor(rng: np.random.Generator) -> MetaTensor:
    meta = {"filename_or_obj": f"{rng.integers(9)}", "dim": rng.integers(9, size=8, dtype=np.int16)}
    meta |= {
        "original_channel_dim": float("nan"),
        MetaKeys.SPACE: SpaceKeys.RAS,
        "n": np.array(3.0, ">f4").astype("f4"),
    }
    return MetaTensor(torch.rand(1, 2, 3), meta=meta, applied_operations=[{"id": int(rng.integers(9))}])


#: Values of one type each; the second of two calls gives another value.
_LEAVES: list[Callable[[np.random.Generator], Any]] = [
    lambda rng: float(rng.random()),
    lambda rng: float("nan"),
    lambda rng: int(rng.integers(-(2**63), 2**63 - 1)),
    lambda rng: 2**63 + int(rng.integers(9)),
    lambda rng: bool(rng.integers(2)),
    lambda rng: complex(rng.random()),
    lambda rng: str(rng.integers(99)),
    lambda rng: _Text(rng.integers(99)),
    lambda rng: rng.bytes(2),
    lambda rng: None,
    lambda rng: _Colour.RED,
    lambda rng: SpaceKeys.RAS,
    lambda rng: Path("a"),
    lambda rng: np.str_("a"),
    lambda rng: np.datetime64("2020-01-01"),
    *(lambda rng, d=d: rng.integers(2, size=3).astype(d)[0] for d in "?bBhHiIlLefdgFD"),
    *(lambda rng, d=d: rng.integers(2, size=(2, 3)).astype(d) for d in "?bBhHiIlLefdgFD"),
    lambda rng: np.array(rng.integers(9)),
    lambda rng: rng.integers(9, size=(2, 3)).astype(">i4"),
    lambda rng: np.asfortranarray(rng.random((2, 3))),
    lambda rng: rng.random((2, 3))[:, ::-1],
    lambda rng: rng.random((4, 3))[::2],
    lambda rng: np.empty((0, 2)),
    lambda rng: np.array(["a", "b"]),
    lambda rng: np.array([None, 1]),
    lambda rng: np.array(["2020"], "M8[D]"),
    lambda rng: np.frombuffer(bytes(8), np.float32),
    lambda rng: torch.rand(2, 3),
    lambda rng: torch.rand(2, 3).t(),
    lambda rng: torch.rand(4, 2, 3)[1],
    lambda rng: torch.rand(2, 3, requires_grad=True),
    lambda rng: torch.tensor(float(rng.random())),
    lambda rng: torch.empty(0, 3),
    lambda rng: torch.rand(2, 2, dtype=torch.complex64).conj(),
    lambda rng: torch.rand(2, 3).to(torch.bfloat16),
    lambda rng: torch.rand(2, 2).to_sparse(),
    lambda rng: torch.nn.Parameter(torch.rand(2)),
    lambda rng: torch.Size([1, 2]),
    _meta_tensor,
    lambda rng: MetaTensor(torch.rand(2)),
    lambda rng: MetaTensor(torch.rand(2, 3).t(), meta={"a": None}),
    lambda rng: torch.rand(2).as_subclass(MetaTensor),
    lambda rng: MetaTensor(torch.rand(3, 2, 4, 4), affine=torch.eye(3)),
    lambda rng: MetaTensor(torch.rand(2)).requires_grad_(),
]
_schema = st.recursive(
    st.sampled_from(_LEAVES),
    lambda inner: st.one_of(
        st.tuples(st.just(list), st.lists(inner, max_size=3)),
        st.tuples(st.just(tuple), st.lists(inner, max_size=3)),
        st.tuples(st.just(lambda values: _Point(*values)), st.tuples(inner, inner)),
        st.dictionaries(st.sampled_from(["a", "b", 1, SpaceKeys.RAS]), inner, max_size=3),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2).map(OrderedDict),
    ),
    max_leaves=6,
)


def _filled(schema: Any, rng: np.random.Generator) -> Any:
    if isinstance(schema, dict):
        return type(schema)((key, _filled(value, rng)) for key, value in schema.items())
    if isinstance(schema, tuple):
        make, parts = schema
        return make([_filled(part, rng) for part in parts])
    return schema(rng)


@given(_schema | st.dictionaries(st.sampled_from("abc"), _schema, max_size=3), st.integers(1, 4), st.none() | _schema)
@pytest.mark.filterwarnings("ignore")
def test_any_tree(schema: Any, count: int, odd: Any) -> None:
    rng = np.random.default_rng(count)
    batch = [_filled(schema, rng) for _ in range(count)]
    if odd is not None:
        batch.append(_filled(odd, rng))
    assert_as_monai(batch)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("leaf", range(len(_LEAVES)))
@pytest.mark.filterwarnings("ignore")
def test_every_type_alone_and_in_metadata(leaf: int, count: int) -> None:
    rng = np.random.default_rng(0)
    values = [_LEAVES[leaf](rng) for _ in range(count)]
    assert_as_monai(copy.deepcopy(values))
    assert_as_monai([{"a": v} for v in copy.deepcopy(values)])
    assert_as_monai([[{"a": v}, {"a": v}] for v in copy.deepcopy(values)])
    assert_as_monai([{"a": MetaTensor(torch.ones(1, 2), meta={"v": v, "w": 1.0})} for v in values])


@pytest.mark.parametrize(
    "batch",
    [
        [],
        [[]],
        [None],
        [{"a": 1}, {}],
        [{}, {"a": 1}],
        [{"a": 1, "b": 2}, {"b": 3, "a": 4, "c": 5}],
        [[1, 2], [3]],
        [{"a": [1, 2]}, {"a": [1]}],
        [{"a": 1}, {"a": 2.5}],
        [{"a": 1}, {"a": True}, {"a": np.float32(1)}],
        [{"a": True}, {"a": 2}],
        [{"a": "x"}, {"a": None}],
        [{"a": torch.ones(2)}, {"a": np.ones(2)}],
        [{"a": np.ones(2)}, {"a": torch.ones(2)}],
        [{"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.int64)}],
        [{"a": np.ones(2, np.float32)}, {"a": np.ones(2, np.int64)}],
        [{"a": np.ones(2)}, {"a": np.ones(2, np.int64)}],
        [{"a": np.ones(2)}, {"a": np.ones((2, 1))}],
        [{"a": 2**63}, {"a": -1}],
        [{"a": np.ones((2, 3))}, {"a": np.ones((3, 2))}],
        [{"a": torch.ones(2)}, {"a": torch.ones(3)}],
        [{"a": torch.ones(2)}, {"a": MetaTensor(torch.ones(2))}],
        [{"a": MetaTensor(torch.ones(2))}, {"a": torch.ones(2)}],
        [{"a": MetaTensor(torch.ones(2), meta={"x": 1})}, {"a": MetaTensor(torch.ones(2), meta={"y": 1})}],
        [[{"a": torch.ones(2)}], [{"a": torch.ones(3)}]],
        [{"a": OrderedDict(b=torch.ones(2))}, {"a": OrderedDict(b=torch.ones(2))}],
    ],
    ids=repr,
)
def test_what_does_not_fit_together(batch: list[Any]) -> None:
    assert_as_monai(batch)


@pytest.mark.usefixtures("no_fallback")
def test_pending_operations_and_attributes_are_the_firsts() -> None:
    batch = [MetaTensor(torch.full((1, 2, 2), float(i))) for i in range(2)]
    batch[0].push_pending_operation({"lazy": 1})
    batch[0].note = ["mine"]
    got = assert_as_monai(batch)
    assert got.pending_operations == [{"lazy": 1}]
    got.push_pending_operation({})
    got.note.append("yours")
    assert len(batch[0].pending_operations) == len(batch[0].note) == 1


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("shape", [(1, 4, 4, 4), (1, 4), (4,), ()])
def test_number_of_spatial_axes(shape: tuple[int, ...]) -> None:
    batch = [MetaTensor(torch.ones(shape)) for _ in range(3)]
    for tensor, axes in zip(batch, (3, 5, 2), strict=True):
        tensor.spatial_ndim = axes
    for part in (batch, batch[:1], batch[1:2]):
        assert_as_monai(part)


def test_without_tracking_of_metadata() -> None:
    set_track_meta(False)
    try:
        assert type(assert_as_monai([MetaTensor(torch.ones(2)), MetaTensor(torch.ones(2))])) is torch.Tensor
    finally:
        set_track_meta(True)


def test_torchs_default_device_counts() -> None:
    with torch.device("meta"):
        assert collate([{"a": 1.0}, {"a": 2.0}])["a"].device.type == "meta"


def test_a_function_registered_with_torch_is_used() -> None:
    default_collate_fn_map[Path] = lambda batch, *, collate_fn_map=None: [str(p) for p in batch]
    try:
        assert assert_as_monai([{"a": Path("x")}, {"a": Path("y")}]) == {"a": ["x", "y"]}
    finally:
        del default_collate_fn_map[Path]


# ---------------------------------------------------------------------------------------------------------------------
# A batch of one


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize("shape", [(1, 4, 4, 4), (3,), ()])
@pytest.mark.parametrize("kind", [torch.Tensor, MetaTensor])
@pytest.mark.parametrize("inference", [False, True])
def test_a_batch_of_one_is_not_copied(shape: tuple[int, ...], kind: type, inference: bool) -> None:
    """Nor in inference mode, whose tensors it has all the same, as those that torch stacks."""
    items = [{"image": kind(torch.rand(shape))}]
    with torch.inference_mode(inference):
        batch = collate(items)
    assert batch["image"].shape == (1, *shape)
    assert same_memory(batch["image"], items[0]["image"])
    assert type(batch["image"]) is kind
    assert batch["image"].is_inference() == inference


@pytest.mark.parametrize(
    "remember",
    [torch.Tensor.detach, MetaTensor.as_tensor, MetaTensor.numpy, lambda t: t[:1], lambda t: t._base],
    ids=["detach", "as_tensor", "numpy", "view", "base"],
)
def test_what_a_random_transform_remembers_is_not_changed_through_the_batch(remember: Callable[[Any], Any]) -> None:
    class Mix(mt.RandomizableTransform):
        """Adds the item before, which it remembers without a copy."""

        last: Any = 0

        def __call__(self, image: Any) -> Any:
            mixed = image + self.last
            self.last = torch.as_tensor(remember(mixed))
            return mixed

    mix, image = Mix(), MetaTensor(torch.ones(1, 4))
    for _ in range(2):
        batch = collate([{"image": mix(image)}])
        remembered = mix.last.clone()
        batch["image"].zero_()
        assert torch.equal(mix.last, remembered)


def test_volumes_of_a_cached_item_are_not_copied(tmp_path: Path) -> None:
    def volume(item: Any) -> Any:
        return {"image": MetaTensor(torch.rand(1, 64, 64, 64)), "label": torch.ones(1, 64, 64, 64)}

    with GDSDataset([{"n": 1}], [mt.Lambda(volume)], tmp_path, "cpu") as dataset:
        _ = dataset[0]
    for _ in range(3):  # verified, then mapped
        items = dataset.__getitems__([0])
        batch = collate(items)
        assert all(same_memory(batch[key], items[0][key]) for key in KEYS)


def test_large_batches_that_are_kept_keep_their_bytes() -> None:
    def batch(value: int) -> torch.Tensor:
        items = [{"image": torch.full((2_000_000,), float(value + i))} for i in range(2)]
        return collate(items)["image"]  # type: ignore[no-any-return]

    kept = {value: batch(value) for value in range(0, 60, 10)}
    pools._pool.blocks.clear()
    batch(0)
    assert len(pools._pool.blocks) == 1, "its memory is there for the next one"
    for value in range(5, 65, 10):
        del kept[value - 5]
        kept[value] = batch(value)
    assert all(bool((rows[i] == value + i).all()) for value, rows in kept.items() for i in range(2))


def test_a_crop_does_not_keep_its_volume(make: Any) -> None:
    volume = MetaTensor(torch.rand(1, 64, 64, 64))
    batch = collate([[{"image": volume[:, :2]}]])
    assert batch["image"].untyped_storage().nbytes() == 2 * 64 * 64 * 4
    crop = collate([{"image": torch.rand(1, 64, 64, 64)[:, 3:9, 3:9, 3:9]}])["image"]
    assert crop.is_contiguous() and crop.untyped_storage().nbytes() == 6**3 * 4


def test_what_somebody_else_holds_is_copied() -> None:
    weights, item = torch.ones(1000), {"image": torch.zeros(4000)}
    item |= {"weights": weights, "mask": item["image"], "view": item["image"].view(40, 100)}
    batch = assert_as_monai([item])
    for value in batch.values():
        value += 1
    assert bool((weights == 1).all())
    assert float(batch["image"].max()) == float(batch["mask"].max()) == float(batch["view"].max()) == 1


def test_views_of_one_tensor_do_not_become_one_in_the_batch() -> None:
    whole = torch.zeros(4000)
    item = {"a": whole.view(40, 100), "b": whole.view(100, 40)}
    del whole
    batch = collate([item])
    assert not same_memory(batch["a"], batch["b"])


def test_gradients_flow_as_with_monai() -> None:
    item = {"image": torch.ones(2, requires_grad=True)}
    batch = collate([item])
    batch["image"].mul_(3).sum().backward()
    assert item["image"].grad is not None
    assert item["image"].grad.tolist() == [3, 3]


def test_a_conjugate_view_is_resolved() -> None:
    item = {"image": torch.rand(2, dtype=torch.complex64).conj()}
    batch = collate([item])
    assert not batch["image"].is_conj()
    assert_same(batch, list_data_collate([item]))


# ---------------------------------------------------------------------------------------------------------------------
# On a CUDA device


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.usefixtures("no_fallback")
def test_cuda_tensors_stay_on_the_device_and_nobody_waits(make: Any, count: int) -> None:
    items = make(CASE, count=count)
    for item in items:
        for key in (*KEYS, "mask"):
            item[key] = item[key].cuda()
    expected = list_data_collate(items)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = collate(items)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert batch["image"].is_cuda
    assert batch["image"].meta["affine"].device.type == "cpu"
    assert_same(expected, batch)
    assert same_memory(batch["mask"], items[0]["mask"]) == (count == 1)
