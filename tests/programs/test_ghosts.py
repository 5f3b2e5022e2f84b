"""MONAI's crops on ghosts: what they give is what they give on volumes, or they are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import apply_transform

from monai_gds.pipeline.randomness import States
from monai_gds.programs import ghosts
from monai_gds.programs.ghosts import SEES_GHOSTS, Ghosts, NotOnGhosts, drawable, hazard
from tests.global_states import GlobalStates
from tests.same import assert_same, strides

SHAPE = (30, 27, 22)
BOTH = ["image", "label"]
SIZE = (12, 10, 8)
SEEDS = range(4)
TILED = ("image", "label")


@cache
def _volumes() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    affine = torch.diag(torch.tensor([0.8, 0.9, 2.5, 1.0], dtype=torch.float64))
    label = torch.zeros(1, *SHAPE)
    label[:, 8:20, 10:22, 5:15], label[:, 22:28, 3:8, 12:20] = 1, 2
    volumes = {
        "image": MetaTensor(torch.randn(2, *SHAPE, generator=generator), affine=affine),
        "label": MetaTensor(label, affine=affine.clone()),
    }
    for volume in volumes.values():
        volume.meta["filename_or_obj"] = "case.nii.gz"
        volume.meta["pixdim"] = np.array([1, 0.8, 0.9, 2.5, 1, 1, 1, 1])
    item: dict[str, Any] = mt.Flipd(BOTH, spatial_axis=0)(volumes)  # some applied operations
    item["fg"], item["bg"] = mt.FgBgToIndices()(item["label"])
    item["classes"] = mt.ClassesToIndices(num_classes=3)(item["label"])
    item["weight"] = torch.rand(1, *SHAPE, generator=generator)
    item["start"] = torch.tensor([3, 4, 5])
    return {**item, "age": 40, "notes": ["a", {"b": np.arange(3)}]}


def item() -> dict[str, Any]:
    """Two volumes, and beside them what crops may take; nothing is shared with other calls."""
    return copy.deepcopy(_volumes())


#: Ways to make each transform. Those of arrays get the image.
WAYS: dict[str, list[Callable[[], Any]]] = {
    "CenterScaleCrop": [lambda: mt.CenterScaleCrop(0.5)],
    "CenterScaleCropd": [lambda: mt.CenterScaleCropd(BOTH, (0.5, 0.3, 1.0))],
    "CenterSpatialCrop": [lambda: mt.CenterSpatialCrop(SIZE)],
    "CenterSpatialCropd": [lambda: mt.CenterSpatialCropd(BOTH, SIZE), lambda: mt.CenterSpatialCropd(BOTH, (99, 8, -1))],
    "CropForeground": [lambda: mt.CropForeground()],
    "CropForegroundd": [lambda: mt.CropForegroundd(BOTH, "label")],
    "Cropd": [
        lambda: mt.Cropd(BOTH, mt.SpatialCrop(roi_slices=[slice(2, 9), slice(-9, -2), slice(None)])),
        lambda: mt.Cropd("image", mt.CenterSpatialCrop(SIZE)),
    ],
    "RandCropByLabelClasses": [lambda: mt.RandCropByLabelClasses(SIZE, label=item()["label"], num_classes=3)],
    "RandCropByLabelClassesd": [
        lambda: mt.RandCropByLabelClassesd(
            BOTH, "label", SIZE, ratios=[1, 2, 3], num_classes=3, num_samples=3, indices_key="classes"
        ),
        lambda: mt.RandCropByLabelClassesd(BOTH, "label", SIZE, num_classes=3, num_samples=2),
    ],
    "RandCropByPosNegLabel": [lambda: mt.RandCropByPosNegLabel(SIZE, label=item()["label"], num_samples=2)],
    "RandCropByPosNegLabeld": [
        lambda: mt.RandCropByPosNegLabeld(
            BOTH, "label", SIZE, num_samples=3, fg_indices_key="fg", bg_indices_key="bg", allow_smaller=True
        ),
        lambda: mt.RandCropByPosNegLabeld(BOTH, "label", SIZE, num_samples=2),
        lambda: mt.RandCropByPosNegLabeld(BOTH, "label", SIZE, num_samples=2, image_key="image"),
        lambda: mt.RandCropByPosNegLabeld(
            "image", "label", SIZE, num_samples=2, fg_indices_key="fg", bg_indices_key="bg"
        ),
    ],
    "RandCropd": [lambda: mt.RandCropd(BOTH, mt.RandSpatialCrop(SIZE))],
    "RandScaleCrop": [lambda: mt.RandScaleCrop(0.4, 0.7, random_size=True)],
    "RandScaleCropd": [lambda: mt.RandScaleCropd(BOTH, 0.4, 0.7, random_size=True)],
    "RandSpatialCrop": [lambda: mt.RandSpatialCrop(SIZE)],
    "RandSpatialCropSamples": [lambda: mt.RandSpatialCropSamples(SIZE, 3)],
    "RandSpatialCropSamplesd": [
        lambda: mt.RandSpatialCropSamplesd(BOTH, SIZE, 3),
        lambda: mt.RandSpatialCropSamplesd(BOTH, SIZE, 2, random_size=True, max_roi_size=(20, 20, 20)),
        lambda: mt.RandSpatialCropSamplesd("image", SIZE, 2),  # and copies of the label
    ],
    "RandSpatialCropd": [
        lambda: mt.RandSpatialCropd(BOTH, SIZE),
        lambda: mt.RandSpatialCropd(BOTH, SIZE, random_size=True, max_roi_size=(20, 20, 20)),
        lambda: mt.RandSpatialCropd(BOTH, SIZE, random_center=False, random_size=True),
        lambda: mt.RandSpatialCropd(BOTH, (99, 12, -1)),
        lambda: mt.RandSpatialCropd(BOTH, (-1, -1, 1)),
    ],
    "RandWeightedCrop": [lambda: mt.RandWeightedCrop(SIZE, 2, weight_map=item()["weight"])],
    "RandWeightedCropd": [
        lambda: mt.RandWeightedCropd(BOTH, "weight", SIZE, 3),
        lambda: mt.RandWeightedCropd(BOTH, "label", SIZE, 2),
    ],
    "ResizeWithPadOrCrop": [lambda: mt.ResizeWithPadOrCrop(SIZE)],
    "ResizeWithPadOrCropd": [
        lambda: mt.ResizeWithPadOrCropd(BOTH, SIZE),
        lambda: mt.ResizeWithPadOrCropd(BOTH, (40, 8, 8)),
    ],
    "SpatialCrop": [lambda: mt.SpatialCrop(roi_center=(9, 9, 9), roi_size=SIZE)],
    "SpatialCropd": [
        lambda: mt.SpatialCropd(BOTH, roi_start=(3, 4, 5), roi_end=(20, 22, 99)),
        lambda: mt.SpatialCropd(BOTH, roi_start="start", roi_end=[9, 9, 9]),
    ],
    # Others, which crops are used with
    "DivisiblePad": [lambda: mt.DivisiblePad((10, 9, 11))],
    "DivisiblePadd": [lambda: mt.DivisiblePadd(BOTH, (10, 9, 11)), lambda: mt.DivisiblePadd(BOTH, 16)],
    "EnsureType": [lambda: mt.EnsureType()],
    "EnsureTyped": [lambda: mt.EnsureTyped(BOTH), lambda: mt.EnsureTyped(BOTH, dtype=torch.float16)],
    "SpatialPad": [lambda: mt.SpatialPad(SIZE)],
    "SpatialPadd": [lambda: mt.SpatialPadd(BOTH, SIZE), lambda: mt.SpatialPadd(BOTH, 40)],
    "Compose": [lambda: mt.Compose([mt.RandSpatialCropd(BOTH, 16), mt.RandSpatialCropSamplesd(BOTH, SIZE, 2)])],
    "OneOf": [lambda: mt.OneOf([mt.RandSpatialCropd(BOTH, SIZE), mt.CenterSpatialCropd(BOTH, SIZE)])],
    "RandomOrder": [lambda: mt.RandomOrder([mt.RandSpatialCropd(BOTH, 16), mt.RandScaleCropd(BOTH, 0.8)])],
    "SomeOf": [lambda: mt.SomeOf([mt.RandSpatialCropd(BOTH, 16), mt.RandScaleCropd(BOTH, 0.8)], num_transforms=1)],
}

#: Those without, and why.
LEFT_OUT = {"Crop": "takes its slices from the caller, and no pipeline gives it any"}


def crops() -> set[str]:
    """The names of MONAI's classes with Crop in theirs."""
    return {v.__name__ for v in vars(mt).values() if isinstance(v, type) and "Crop" in v.__name__}


def with_ghosts(of: dict[str, Any], keys: tuple[str, ...] = TILED) -> tuple[Ghosts, dict[str, Any]]:
    """An item with ghosts of some of its tensors."""
    made = Ghosts({key: (of[key].dtype, tuple(of[key].shape)) for key in keys})
    out = dict(of)
    for key in keys:
        ghost = made.tensors[key].as_subclass(type(of[key]))
        ghost.__dict__ = copy.deepcopy(vars(of[key]))
        out[key] = ghost
    made.enter(out)
    return made, out


class Volume:
    """A volume of which boxes were read: all else is garbage."""

    def __init__(self, whole: torch.Tensor, boxes: list[Any]) -> None:
        self._data = torch.empty_like(whole)
        self._data.view(torch.uint8).fill_(0x5A)
        for box in boxes:
            self._data[(..., *box)] = whole[(..., *box)]

    def view(self, size: Any, stride: Any, offset: int) -> torch.Tensor:
        """As that of records."""
        return self._data.as_strided(size, stride, offset)


def read(of: Mapping[str, Any], boxes: Mapping[str, list[Any]]) -> dict[str, Volume]:
    """Volumes with garbage outside the boxes."""
    return {key: Volume(torch.Tensor(of[key]), found) for key, found in boxes.items()}


def applied(step: Any, value: Any) -> Any:
    return apply_transform(step, value, lazy=False)


def array_or_dict(step: Any, of: dict[str, Any]) -> Any:
    """What a transform takes of an item."""
    is_array = type(step).__name__ in ("EnsureType",) or not isinstance(step, (mt.MapTransform, mt.Compose))
    return of["image"] if is_array else of


def on_ghosts(step: Any) -> Any:
    """What a transform gives on ghosts, with only what is covered read."""
    of = item()
    made, value = with_ghosts(of)
    out = made.run(step, applied, array_or_dict(step, value))
    return made.realize(out, read(of, made.boxes(out)), torch.device("cpu"))


def seeded(make: Callable[[], Any], seed: int) -> Any:
    step = make()
    torch.manual_seed(seed)
    np.random.seed(seed)
    if isinstance(step, mt.Randomizable):
        step.set_random_state(seed)
    return step


def is_proved(make: Callable[[], Any]) -> bool:
    """Whether ghosts do for a way to make a transform. If they give something else than volumes, this fails."""
    proved = False
    for seed in SEEDS:
        real, ghostly = seeded(make, seed), seeded(make, seed)
        before = GlobalStates()
        expected = applied(real, array_or_dict(real, item()))
        assert not before.moved(), "it draws from a generator that is not its own"
        try:
            got = on_ghosts(ghostly)
        except NotOnGhosts:
            continue
        proved = True
        assert not before.moved()
        for out in (expected, got):
            mt.utils.reset_ops_id(out)
        assert_same(expected, got)
        assert_same(strides(expected), strides(got))
        states = [States([step]).generators() for step in (real, ghostly)]
        assert_same(*states)
    return proved


@pytest.mark.long
def test_the_list_is_what_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts, "_hazard_within", lambda transform: "")  # the list does not prove itself
    proved = {name for name, ways in WAYS.items() if sum(map(is_proved, ways))}
    assert sorted(proved) == sorted(SEES_GHOSTS)


def test_every_crop_is_tried_or_has_a_reason() -> None:
    assert crops() == {name for name in (WAYS.keys() | LEFT_OUT.keys()) if "Crop" in name}


def test_no_crop_reads_more_than_it_covers() -> None:
    of = item()
    made, value = with_ghosts(of)
    out = made.run(mt.SpatialCropd(BOTH, roi_start=(3, 4, 5), roi_end=(20, 22, 9)), applied, value)
    expected = [(slice(3, 20), slice(4, 22), slice(5, 9))]
    assert made.boxes(out) == {"image": expected, "label": expected}


# What must not see ghosts


def mine(x: Any) -> Any:
    """Somebody's own function."""
    return x > 0


class MyCrop(mt.RandSpatialCropd):  # type: ignore[misc]
    """Somebody's own crop."""


class Keys(str):
    """Somebody's own keys."""


REFUSED: dict[str, Callable[[], Any]] = {
    "Lambda": lambda: mt.Lambda(lambda x: x),
    "Lambdad": lambda: mt.Lambdad("image", mine),
    "RandLambdad": lambda: mt.RandLambdad("image", mine),
    "DataStatsd": lambda: mt.DataStatsd("image"),
    "SaveImaged": lambda: mt.SaveImaged("image"),
    "SimulateDelayd": lambda: mt.SimulateDelayd("image"),
    "a function": lambda: mine,
    "a class of one's own": lambda: MyCrop("image", SIZE),
    "a crop within a class of MONAI's": lambda: mt.RandCropd("image", type("C", (mt.RandSpatialCrop,), {})(SIZE)),
    "a list of what is not listed": lambda: mt.OneOf([mt.RandSpatialCropd("image", SIZE), mt.RandFlipd("image")]),
    "a Compose of what is not listed": lambda: mt.Compose([mt.RandSpatialCropd("image", SIZE), mine]),
    "a function among the attributes": lambda: _with(mt.RandSpatialCropd("image", SIZE), "randomize", mine),
    "a function deep within": lambda: _with(mt.RandSpatialCropd("image", SIZE), "notes", [{"a": (mine,)}]),
    "a class deep within": lambda: _with(mt.RandSpatialCropd("image", SIZE), "notes", {"a": Keys}),
    "an object of one's own": lambda: _with(mt.RandSpatialCropd("image", SIZE), "notes", Keys("a")),
    "a wrapped function": lambda: _with(mt.SpatialPadd("image", 9), "mode", mt.adaptor(mine, "x")),
    "another kind of generator": lambda: mt.RandSpatialCropd("image", SIZE).set_random_state(
        state=np.random.RandomState(np.random.PCG64(1))
    ),
    "an array of objects": lambda: _with(mt.RandSpatialCropd("image", SIZE), "notes", np.array([mine], object)),
}


def _with(transform: Any, name: str, value: Any) -> Any:
    setattr(transform, name, value)
    return transform


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_do_anything_sees_no_ghosts(name: str) -> None:
    step = REFUSED[name]()
    assert hazard(step)
    assert drawable([step, mt.RandSpatialCropd("image", SIZE)]) == []
    made, value = with_ghosts(item())
    with pytest.raises(NotOnGhosts):
        made.run(step, lambda step, value: pytest.fail("it saw a ghost"), value)


def test_functions_of_libraries_do_not_matter() -> None:
    notes = [np.float32, mt.utils.is_positive, torch.uint8]
    assert not hazard(_with(mt.RandSpatialCropd("image", SIZE), "notes", notes))


def test_first_steps_up_to_the_last_crop() -> None:
    crop, pad, flip = mt.RandSpatialCropd("image", SIZE), mt.SpatialPadd("image", SIZE), mt.RandFlipd("image")
    again = mt.CenterSpatialCropd("image", 5)
    assert drawable([crop, pad, again, pad, flip, crop]) == [crop, pad, again]
    assert drawable([pad, flip]) == drawable([flip, crop]) == drawable([]) == []


# What transforms do with ghosts, were they let


DOES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "writes in place": (lambda d: d["image"].mul_(2) is None, "in place"),
    "writes in place into a part": (lambda d: {**d, "image": d["image"][:, 2:].add_(1)}, "in place"),
    "writes in place and gives another": (lambda d: (d["image"].zero_(), {"label": d["label"]})[1], "in place"),
    "writes behind torch's back": (lambda d: {**d, "image": _zeroed(d["image"].data)}, "in place"),
    "makes a tensor of its own": (lambda d: {**d, "image": d["image"] + 1}, "of its own"),
    "makes a mask": (lambda d: {**d, "mask": d["image"] > 0}, "of its own"),
    "keeps a tensor of its own in metadata": (lambda d: _noted(d, d["image"].sum()), "metadata"),
    "keeps a view in metadata": (lambda d: _noted(d, d["image"][0]), "metadata"),
    "keeps a view in applied operations": (lambda d: _traced(d, d["image"][0]), "metadata"),
    "keeps a view in pending operations": (lambda d: _traced(d, d["image"][0], "_pending_operations"), "metadata"),
    "keeps a view in an array": (lambda d: {**d, "array": _array_of(d["image"])}, "metadata"),
    "copies": (lambda d: copy.deepcopy(d), "of its own"),
    "reads a value": (lambda d: {**d, "first": float(torch.as_tensor(d["image"])[0, 0, 0, 0])}, "raised"),
    "asks whether": (lambda d: d if d["image"].any() else {}, "raised"),
    "makes an array": (lambda d: {**d, "image": d["image"].numpy()}, "raised"),
    "takes every second": (lambda d: {**d, "image": d["image"][:, ::2]}, "no crop makes"),
    "repeats": (lambda d: {**d, "image": d["image"][:1].expand(4, -1, -1, -1)}, "no crop makes"),
    "takes windows": (lambda d: {**d, "image": d["image"].unfold(1, 5, 1)}, "no crop makes"),
    "takes bits": (lambda d: {**d, "image": d["image"].view(torch.int32)}, "no crop makes"),
    "runs over the edge": (lambda d: {**d, "image": _past(d["image"])}, "no crop makes"),
    "raises": (lambda d: d["nothing"], "raised KeyError: 'nothing'"),
}  # fmt: skip


def _zeroed(x: torch.Tensor) -> torch.Tensor:
    return x.zero_()


def _noted(d: dict[str, Any], value: Any) -> dict[str, Any]:
    d["label"].meta["note"] = {"deep": [value]}
    return d


def _traced(d: dict[str, Any], value: Any, where: str = "_applied_operations") -> dict[str, Any]:
    getattr(d["label"], where).append({"extra_info": {"x": value}})
    return d


def _array_of(value: Any) -> Any:
    out = np.empty(1, object)
    out[0] = value
    return out


def _past(x: torch.Tensor) -> torch.Tensor:
    """A row that ends in the next one."""
    return torch.Tensor(x.as_tensor()).as_strided((4,), (1,), SHAPE[2] - 2)


@pytest.mark.parametrize("name", DOES)
def test_what_ghosts_cannot_do_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts, "_hazard_within", lambda transform: "")
    function, why = DOES[name]
    made, value = with_ghosts(item())
    with pytest.raises(NotOnGhosts, match=why):
        made.run(mt.Lambda(function), lambda step, d: step.func(d), value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, 3:9, :, 2:],
        lambda x: x[1:, 3:4],
        lambda x: x[1, 3:9],
        lambda x: x.permute(0, 3, 1, 2)[:, :4],
        lambda x: x[:, 5:5],
        lambda x: x[None, :, 2:],
        lambda x: x.transpose(1, 2)[:, 3, :, 20:],
    ],
)
def test_views_hold_what_the_volumes_do(function: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts, "_hazard_within", lambda transform: "")
    of = item()
    made, value = with_ghosts(of)
    step = mt.Lambdad("image", function)
    expected, out = step(dict(of)), made.run(step, applied, value)
    got = made.realize(out, read(of, made.boxes(out)), torch.device("cpu"))
    assert_same(expected, got)
    assert_same(strides(expected), strides(got))


def test_crops_of_one_ghost_stay_views_of_one_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    of = item()
    made, value = with_ghosts(of)
    out = made.run(seeded(lambda: mt.RandSpatialCropSamplesd(BOTH, 20, 3), 0), applied, value)
    first, second, _ = made.realize(out, read(of, made.boxes(out)), torch.device("cpu"))
    assert first["image"].untyped_storage().data_ptr() == second["image"].untyped_storage().data_ptr()
    assert first["label"].untyped_storage().data_ptr() != first["image"].untyped_storage().data_ptr()


def test_a_ghost_that_is_not_found_is_an_error() -> None:
    class Box:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    made = Ghosts({"image": (torch.float32, (4, 4, 4))})
    with pytest.raises(NotOnGhosts, match="'image'"):
        made.enter({"image": Box(made.tensors["image"])})


def test_a_write_into_a_real_tensor_is_noticed() -> None:
    made, value = with_ghosts(item(), ("image",))
    assert not made.spoilt()
    value["label"][0, 0, 0] = 5
    assert made.spoilt()


def test_a_view_is_known_by_the_name_of_its_tensor() -> None:
    made, value = with_ghosts(item())
    assert made.name_of(value["label"]) == "label"
    assert made.name_of(value["image"][:, 1:, 2]) == "image"
    assert made.name_of(value["image"] + 1) is None
    assert made.name_of(value["weight"]) is None
