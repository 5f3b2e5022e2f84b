"""Croppers whose indices come out of a label's runs draw what MONAI's own lists make them draw, or are left alone."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.data import MetaTensor
from monai.transforms import (
    FgBgToIndicesd,
    RandCropByLabelClassesd,
    RandCropByPosNegLabel,
    RandCropByPosNegLabeld,
    RandSpatialCropd,
    Spacingd,
)

from monai_gds.errors import DamagedRecord
from monai_gds.programs.indices import RunsOf, Selection, lookup_of, standing_in
from monai_gds.tiles import blosc
from monai_gds.tiles.runs import Runs, RunTable, pack
from tests.runs_of import reading, unpacking
from tests.same import assert_same

pytestmark = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")

KEYS = ["image", "label"]


def organs(dtype: torch.dtype = torch.float32, values: tuple[float, ...] = (0, 1, 2, 5, 3)) -> torch.Tensor:
    """A label of boxes, (1, 40, 50, 60)."""
    which = torch.zeros(1, 40, 50, 60, dtype=torch.int64)
    for i in range(1, len(values)):
        which[0, 3 * i : 3 * i + 12, 5 * i : 5 * i + 17, 30 : 30 + 5 * i] = i
    return torch.tensor(values, dtype=torch.float64).to(dtype)[which]


def item_of(label: torch.Tensor, meta: bool = True) -> dict[str, Any]:
    image = torch.arange(label.numel(), dtype=torch.float32).view(label.shape)
    item = {"image": image, "label": label, "id": "case 3"}
    return {k: MetaTensor(v) if meta and isinstance(v, torch.Tensor) else v for k, v in item.items()}


def over(item: dict[str, Any]) -> RunsOf:
    """Runs for whatever lies in the memory of an item's label, and joint ones for that of its image."""
    label, image = (item[key].as_subclass(torch.Tensor) for key in ("label", "image"))
    read = functools.cache(reading)

    def runs_of(of: torch.Tensor, with_image: torch.Tensor | None = None, threshold: str = "", /) -> Runs | None:
        if not _same_memory(of, label):
            return None
        if with_image is None:
            return read(label)
        found = [tensor for tensor in (image, label) if _same_memory(with_image, tensor)]
        return read(label, found[0], threshold) if found else None

    return runs_of


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def none(*_: Any) -> None:
    """No record has runs."""


Outcome = tuple[list[dict[str, Any]] | str, Any, list[str], bool]


def run(transform: Any, item: dict[str, Any], runs_of: RunsOf) -> Outcome:
    """Two calls: what they give or raise, the random state afterwards, the warnings, whether runs stood in."""
    start, centers = transform.cropper.R.get_state(), transform.cropper.centers
    result: Any = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        stood_in = False
        for _ in range(2):
            before = dict(vars(transform.cropper))
            try:
                with standing_in(transform, item, runs_of) as stood_in:
                    result += transform(item)
            except Exception as e:
                result = f"{type(e).__name__}: {e}"
                break
            finally:
                assert {k for k, v in before.items() if v is not vars(transform.cropper)[k]} <= {"centers"}
    end = transform.cropper.R.get_state()
    transform.cropper.R.set_state(start)
    transform.cropper.centers = centers
    return result, end, [str(w.message) for w in given], stood_in


def without_ids(samples: Any) -> Any:
    """The samples, without the address of the object that made each crop."""
    for sample in samples if isinstance(samples, list) else []:
        for image in sample.values():
            for operation in getattr(image, "applied_operations", []) + getattr(image, "pending_operations", []):
                operation["id"] = operation.get("extra_info", {})["id"] = 0
    return samples


def as_monai(transform: Any, item: dict[str, Any], runs_of: Any = None, stands_in: bool = True) -> None:
    """Compares everything that two calls leave behind with what MONAI's own lists would."""
    found = run(transform, item, over(item) if runs_of is None else runs_of)
    expected = run(transform, item, none)
    assert found[3] == stands_in and not expected[3]
    assert_same(without_ids(found[0]), without_ids(expected[0]))
    assert_same(found[1], expected[1])
    assert found[2] == expected[2]


DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.float32, torch.float64, torch.bool]
ODD = (0.0, -0.0, float("nan"), -3.0, 2.5, 1.0, float("inf"))


@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([8, (12, 8, 10), (40, 50, 60), (-1, 8, 8), (64, 8, 8)]),
    ratio=st.sampled_from([(1, 1), (0, 1), (1, 0), (3, 1)]),
    samples=st.integers(1, 4),
    smaller=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from([(0, 1, 2, 5, 3), (0, 1), (0, 0), (1, 1), (7, 0, 7), (-2, 3, 0)]),
    meta=st.booleans(),
)
def test_positive_and_negative_centres_are_monais(
    seed: int, size: Any, ratio: Any, samples: int, smaller: bool, dtype: torch.dtype, values: Any, meta: bool
) -> None:
    pos, neg = ratio
    transform = RandCropByPosNegLabeld(
        KEYS, "label", size, pos=pos, neg=neg, num_samples=samples, allow_smaller=smaller
    ).set_random_state(seed)
    unsigned = dtype in (torch.uint8, torch.bool)
    as_monai(transform, item_of(organs(dtype, tuple(map(abs, values)) if unsigned else values), meta))


@given(
    seed=st.integers(0, 10_000),
    classes=st.integers(1, 9),
    ratios=st.sampled_from([None, "equal", "rising", "wrong"]),
    samples=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from([(0, 1, 2, 5, 3), (0, 1), (2, 2), (300, 0, 7), (-2, 3, 0)]),
    warn=st.booleans(),
)
def test_centres_by_class_are_monais(
    seed: int, classes: int, ratios: str | None, samples: int, dtype: torch.dtype, values: Any, warn: bool
) -> None:
    given_ratios = {None: None, "equal": [1] * classes, "rising": list(range(classes)), "wrong": [1]}[ratios]
    transform = RandCropByLabelClassesd(
        KEYS, "label", (10, 12, 14), given_ratios, classes, num_samples=samples, warn=warn
    ).set_random_state(seed)
    narrow = dtype in (torch.uint8, torch.bool, torch.int8)
    as_monai(transform, item_of(organs(dtype, tuple(abs(v) % 128 for v in values) if narrow else values)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_that_are_no_classes(seed: int, dtype: torch.dtype) -> None:
    item = item_of(organs(dtype, ODD))
    as_monai(RandCropByPosNegLabeld(KEYS, "label", 8, num_samples=8).set_random_state(seed), item)
    as_monai(RandCropByLabelClassesd(KEYS, "label", 8, num_classes=4, num_samples=8).set_random_state(seed), item)


def test_a_slice_of_two_axes() -> None:
    label = torch.zeros(1, 300, 200)
    label[0, 20:90, 30:150] = 2
    as_monai(RandCropByPosNegLabeld(KEYS, "label", (32, 32), num_samples=4).set_random_state(0), item_of(label))


def test_lazy_croppers_too() -> None:
    transform = RandCropByPosNegLabeld(KEYS, "label", 8, num_samples=2, lazy=True).set_random_state(0)
    item = item_of(organs())
    runs_of = over(item)
    with standing_in(transform, item, runs_of) as stood_in:
        found = transform(item)
    assert stood_in
    assert found[0]["label"].pending_operations
    assert_same(without_ids(found), without_ids(transform.set_random_state(0)(item)))


def test_volumes_without_memory_are_cropped_at_the_same_places() -> None:
    item = item_of(organs())
    ghosts = {k: MetaTensor(torch.empty_like(v, device="meta")) for k, v in item.items() if k != "id"}
    transform = RandCropByPosNegLabeld(KEYS, "label", 8, num_samples=4).set_random_state(3)
    expected = copy.deepcopy(transform)(item)
    runs = reading(organs())
    with standing_in(transform, ghosts, lambda tensor: runs):
        found = transform(ghosts)
    for one, other in zip(found, expected, strict=True):
        assert one["image"].storage_offset() == int(other["image"].reshape(-1)[0])
        assert one["label"].meta["crop_center"] == other["label"].meta["crop_center"]


# ---------------------------------------------------------------------------------------------------------------------
# Where an image is above a threshold


def regions(channels: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An image of boxes that lie across those of :func:`organs`, with NaN, infinite and negative values."""
    image = torch.zeros(channels, 40, 50, 60, dtype=torch.float64)
    image[0, :20, 10:40], image[0, 5:15, :, 40:] = -1, 3
    image[-1, 10:30, 5:25, 10:], image[-1, 25:, 40:] = 0.25, float("inf")
    image[0, 12:20, 12:20, 32:] = float("nan")
    return (image if dtype.is_floating_point else image.nan_to_num(0, 7, -7)).to(dtype)


def with_image(label: torch.Tensor, image: torch.Tensor, meta: bool = True) -> dict[str, Any]:
    item = {"image": image, "label": label, "id": "case 3"}
    return {k: MetaTensor(v) if meta and isinstance(v, torch.Tensor) else v for k, v in item.items()}


THRESHOLDS = [0, 0.0, -0.5, 0.25, 3, -math.inf, 1e9, math.nan]


@given(
    seed=st.integers(0, 10_000),
    by_classes=st.booleans(),
    threshold=st.sampled_from(THRESHOLDS),
    channels=st.integers(1, 3),
    of_image=st.sampled_from([torch.float32, torch.float16, torch.int16, torch.float64, torch.bool]),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from([(0, 1, 2, 5, 3), (0, 1), (0, 0), (1, 1), (2, 2)]),
    meta=st.booleans(),
)
def test_centres_where_an_image_is_above_a_threshold_are_monais(
    seed: int, by_classes: bool, threshold: float, channels: int, of_image: torch.dtype, dtype: torch.dtype,
    values: Any, meta: bool,
) -> None:  # fmt: skip
    image = {"image_key": "image", "image_threshold": threshold}
    transform: Any = (
        RandCropByLabelClassesd(KEYS, "label", (9, 8, 7), None, 4, 5, **image)  # type: ignore[arg-type]
        if by_classes
        else RandCropByPosNegLabeld(KEYS, "label", (9, 8, 7), num_samples=5, **image)  # type: ignore[arg-type]
    )
    as_monai(transform.set_random_state(seed), with_image(organs(dtype, values), regions(channels, of_image), meta))


@pytest.mark.parametrize("threshold", [0.5, 2])
def test_the_label_itself_may_be_the_image(threshold: float) -> None:
    transform = crop(image_key="label", image_threshold=threshold, num_samples=9)
    as_monai(transform, item_of(organs()))


def test_an_item_without_the_image_goes_by_its_label() -> None:
    item = item_of(organs())
    runs_of = over(item)
    as_monai(crop(image_key="other", num_samples=9), item, runs_of)


def test_without_joint_runs_monai_looks_itself() -> None:
    """A record that was written for another threshold, or none, has runs of the label only."""
    item = item_of(organs())
    as_monai(crop(image_key="image"), item, lambda label, image=None, *_: reading(organs()) if image is None else None,
             stands_in=False)  # fmt: skip


def test_lookups_tell_writers_which_joint_runs_croppers_want() -> None:
    assert lookup_of(crop()) == lookup_of(by_class(num_classes=2)) == ("label", "", "")
    assert lookup_of(crop(image_key="image")) == ("label", "image", "0.0")
    assert lookup_of(by_class(num_classes=2, image_key="ct", image_threshold=-175)) == ("label", "ct", "-175")
    assert lookup_of(crop(fg_indices_key="a")) is lookup_of(RandSpatialCropd(KEYS, 8)) is None


# ---------------------------------------------------------------------------------------------------------------------
# What is left to MONAI


def crop(**kwargs: Any) -> RandCropByPosNegLabeld:
    return RandCropByPosNegLabeld(KEYS, "label", 8, **kwargs).set_random_state(0)


def by_class(**kwargs: Any) -> RandCropByLabelClassesd:
    return RandCropByLabelClassesd(KEYS, "label", 8, **kwargs).set_random_state(0)


class Derived(RandCropByPosNegLabeld):
    """A user's own."""


def with_indices() -> dict[str, Any]:
    return FgBgToIndicesd("label")(item_of(organs()))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "transform",
    [
        crop(image_key="image", image_threshold=np.float32(0.5)), crop(image_key="image", image_threshold=1 << 64),
        crop(image_key=0), crop(image_key="image", fg_indices_key="a"), crop(fg_indices_key="a"),
        by_class(num_classes=3, max_samples_per_class=2),
        by_class(), by_class(num_classes=3, indices_key="indices"), by_class(num_classes="3"),
        Derived(KEYS, "label", 8).set_random_state(0),
    ],
    ids=lambda transform: type(transform).__name__,
)  # fmt: skip
def test_arguments_that_need_more_than_the_label(transform: Any) -> None:
    as_monai(transform, item_of(organs()), stands_in=False)


def test_indices_that_the_user_computed() -> None:
    transform = crop(fg_indices_key="label_fg_indices", bg_indices_key="label_bg_indices")
    as_monai(transform, with_indices(), stands_in=False)
    transform = crop()
    transform.cropper.fg_indices = transform.cropper.bg_indices = torch.tensor([70_000])
    as_monai(transform, item_of(organs()), stands_in=False)


def test_other_transforms_are_left_alone() -> None:
    item = item_of(organs())
    for transform in (RandSpatialCropd(KEYS, 8), Spacingd(KEYS, 1.0), lambda x: x, RandCropByPosNegLabel(8)):
        with standing_in(transform, item, over(item)) as stood_in:
            assert not stood_in


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cropped": lambda label: label[:, 1:],
    "at the front": lambda label: label[:, :-1],
    "transposed": lambda label: label.transpose(1, 2),
    "other bits": lambda label: label.view(torch.int32),
    "one more axis": lambda label: label[None],
    "no channel": lambda label: label[0],
    "reshaped": lambda label: label.reshape(-1, 50, 40, 60),
    "flipped": lambda label: label.flip(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("transform", [crop(), by_class(num_classes=4)], ids=["grounds", "classes"])
def test_a_label_that_is_no_more_the_whole_volume(transform: Any, change: Callable[[Any], Any]) -> None:
    item = item_of(organs(), meta=False)
    runs_of = over(item)
    item["label"] = change(item["label"])
    as_monai(transform, item, runs_of, stands_in=False)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_image_that_is_no_more_the_whole_volume(change: Callable[[Any], Any]) -> None:
    item = with_image(organs(), regions(2), meta=False)
    runs_of = over(item)
    item["image"] = change(item["image"])
    as_monai(crop(image_key="image"), item, runs_of, stands_in=False)


def test_one_channel_of_an_image_of_two() -> None:
    item = with_image(organs(), regions(2), meta=False)
    runs_of = over(item)
    as_monai(crop(image_key="image"), item, runs_of)
    as_monai(crop(image_key="image"), {**item, "image": item["image"][:1]}, runs_of, stands_in=False)
    as_monai(crop(image_key="image"), {**item, "image": item["image"].numpy()}, runs_of, stands_in=False)


def test_another_order_of_the_same_memory() -> None:
    label = torch.zeros(1, 40, 40, 40)
    label[0, 5:20, 5:30] = 1
    item = {"image": label, "label": label}
    runs_of = over(item)
    as_monai(crop(), item, runs_of)
    as_monai(crop(), {**item, "label": label.transpose(1, 3)}, runs_of, stands_in=False)


def test_a_label_with_pending_operations() -> None:
    item = item_of(organs())
    runs_of = over(item)
    item["label"] = Spacingd("label", 2.0, mode="nearest", lazy=True)(item)["label"]
    assert item["label"].pending_operations
    as_monai(crop(), item, runs_of, stands_in=False)


def test_a_label_of_another_type_or_none_at_all() -> None:
    item = item_of(organs(), meta=False)
    runs_of = over(item)
    as_monai(crop(), {**item, "label": item["label"].numpy()}, runs_of, stands_in=False)
    as_monai(crop(), {"image": item["image"]}, runs_of, stands_in=False)
    as_monai(crop(), {**item, "label": torch.nn.Parameter(item["label"])}, runs_of, stands_in=False)
    as_monai(crop(), {**item, None: item["image"]}, stands_in=False)  # type: ignore[dict-item]  # MONAI's image_key


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


def test_a_block_that_cannot_be_read_leaves_nothing_behind() -> None:
    label = organs()
    packed = pack(label)
    assert packed is not None
    table = RunTable(tuple(label.shape), label.dtype, packed.table.numpy(), len(packed.blocks))
    runs = unpacking(table, np.zeros(len(packed.blocks), np.uint8))
    transform, item = crop(), item_of(label)
    with pytest.raises(DamagedRecord, match="checksum"), standing_in(transform, item, lambda tensor: runs):
        transform(item)
    assert transform.cropper.fg_indices is None and transform.cropper.bg_indices is None
    assert len(transform(item)) == 1


def test_an_element_is_what_an_element_of_monais_list_is() -> None:
    label = organs()
    runs = reading(label)
    foreground = Selection(runs, [i for i, value in enumerate(runs.values) if value])
    right = torch.nonzero(label.reshape(-1)).flatten()
    assert len(foreground) == len(right)
    for k in (0, 17, len(right) - 1):
        found = foreground[k]
        assert (found.dtype, found.shape, int(found)) == (right.dtype, right[k].shape, int(right[k]))
