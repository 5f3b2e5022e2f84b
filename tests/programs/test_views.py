"""Crops that are recorded as views, without modes of torch: they give what they give on volumes, or are refused."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch

from monai_gds.pipeline.ahead import why_not
from monai_gds.programs.recorder import Recorder
from monai_gds.programs.replay import replay
from tests.fresh import printed_by
from tests.programs.random_recipes import OnImage
from tests.programs.recordings import BOTH, CPU, SHAPE, Outcome, Voxels, item, record, run, seeded

SIZE = (12, 10, 8)


@cache
def _item() -> dict[str, Any]:
    made = item()
    made["classes"] = mt.ClassesToIndices(num_classes=4)(made["label"])
    return {**made, "weight": torch.rand(1, *SHAPE)}


def of() -> dict[str, Any]:
    """Two volumes, and beside them what crops may take; nothing is shared with other calls."""
    return copy.deepcopy(_item())


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
    "RandCropByLabelClasses": [lambda: mt.RandCropByLabelClasses(SIZE, label=of()["label"], num_classes=4)],
    "RandCropByLabelClassesd": [
        lambda: mt.RandCropByLabelClassesd(
            BOTH, "label", SIZE, ratios=[1, 2, 3, 0], num_classes=4, num_samples=3, indices_key="classes"
        ),
        lambda: mt.RandCropByLabelClassesd(BOTH, "label", SIZE, num_classes=4, num_samples=2),
    ],
    "RandCropByPosNegLabel": [lambda: mt.RandCropByPosNegLabel(SIZE, label=of()["label"], num_samples=2)],
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
    "RandWeightedCrop": [lambda: mt.RandWeightedCrop(SIZE, 2, weight_map=of()["weight"])],
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
    "DivisiblePad": [lambda: mt.DivisiblePad((8, 10, 7))],
    "DivisiblePadd": [lambda: mt.DivisiblePadd(BOTH, (8, 10, 7)), lambda: mt.DivisiblePadd(BOTH, 16)],
    "SpatialPad": [lambda: mt.SpatialPad(SIZE)],
    "SpatialPadd": [lambda: mt.SpatialPadd(BOTH, SIZE), lambda: mt.SpatialPadd(BOTH, 40)],
    "Compose": [lambda: mt.Compose([mt.RandSpatialCropd(BOTH, 16), mt.RandSpatialCropSamplesd(BOTH, SIZE, 2)])],
    "OneOf": [lambda: mt.OneOf([mt.RandSpatialCropd(BOTH, SIZE), mt.CenterSpatialCropd(BOTH, SIZE)])],
    "RandomOrder": [lambda: mt.RandomOrder([mt.RandSpatialCropd(BOTH, 16), mt.RandScaleCropd(BOTH, 0.8)])],
    "SomeOf": [lambda: mt.SomeOf([mt.RandSpatialCropd(BOTH, 16), mt.RandScaleCropd(BOTH, 0.8)], num_transforms=1)],
}


#: MONAI's crops without one, and why.
LEFT_OUT = {"Crop": "takes its slices from the caller, and no pipeline gives it any"}

#: Those that need values, or are no crops.
ON_VALUES = {"CropForeground", "CropForegroundd"}


def tried(make: Callable[[], Any], seed: int) -> Outcome:
    """What becomes of a transform after a crop that takes all. This fails if it is not what MONAI gives."""

    def pipeline() -> mt.Compose:
        step = make()
        if not isinstance(step, (mt.MapTransform, mt.Compose)):
            step = OnImage(step)
        return mt.Compose([mt.RandSpatialCropd(BOTH, SHAPE), step])

    return run(pipeline, seed=seed, of=of(), views_only=True)


@pytest.mark.parametrize("name", WAYS)
def test_crops_give_what_monai_gives(name: str) -> None:
    outcomes = [tried(make, seed) for make in WAYS[name] for seed in range(2)]
    assert any(outcome.done is None for outcome in outcomes) == (name not in ON_VALUES)


def test_every_crop_is_tried_or_has_a_reason() -> None:
    crops = {v.__name__ for v in vars(mt).values() if isinstance(v, type) and "Crop" in v.__name__}
    assert crops == {name for name in (WAYS.keys() | LEFT_OUT.keys()) if "Crop" in name}


@pytest.mark.parametrize("name", WAYS)
def test_crops_and_pads_may_be_drawn_ahead(name: str) -> None:
    for make in WAYS[name]:
        assert not why_not(make())


# What is no crop is noticed, were it drawn ahead


DOES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "writes in place": (lambda d: (d["image"].mul_(2), d)[1], "in place"),
    "writes in place into a part": (lambda d: {**d, "image": d["image"][:, 2:].add_(1)}, "in place"),
    "writes behind torch's back": (lambda d: {**d, "image": d["image"].data.zero_()}, "in place"),
    "makes a tensor of its own": (lambda d: {**d, "image": d["image"] + 1}, "of its own"),
    "makes a mask": (lambda d: {**d, "mask": d["image"] > 0}, "of its own"),
    "takes bits": (lambda d: {**d, "image": d["image"].view(torch.int32)}, "of its own"),
    "copies": (lambda d: copy.deepcopy(d), "of its own"),
    "keeps a tensor of its own in metadata": (lambda d: _noted(d, d["image"].sum()), "elsewhere"),
    "keeps a view in metadata": (lambda d: _noted(d, d["image"][0]), "elsewhere"),
    "keeps a view in applied operations": (lambda d: _traced(d, d["image"][0]), "elsewhere"),
    "keeps a view in an array": (lambda d: {**d, "array": _array_of(d["image"])}, "elsewhere"),
    "keeps a view in an object": (lambda d: {**d, "object": Box(d["image"])}, "elsewhere"),
    "reads a value": (lambda d: {**d, "first": float(torch.as_tensor(d["image"])[0, 0, 0, 0])}, "raised"),
    "asks whether": (lambda d: d if d["image"].any() else {}, "raised"),
    "makes an array": (lambda d: {**d, "image": d["image"].numpy()}, "raised"),
    "raises": (lambda d: d["nothing"], "raised KeyError: 'nothing'"),
}  # fmt: skip


class Box:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


def _noted(d: dict[str, Any], value: Any) -> dict[str, Any]:
    d["label"].meta["note"] = {"deep": [value]}
    return d


def _traced(d: dict[str, Any], value: Any) -> dict[str, Any]:
    d["label"].applied_operations.append({"extra_info": {"x": value}})
    return d


def _array_of(value: Any) -> Any:
    out = np.empty(1, object)
    out[0] = value
    return out


class Does(mt.RandomizableTransform):  # type: ignore[misc]
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def __call__(self, data: Any) -> Any:
        return self.function(dict(data))


@pytest.mark.parametrize("name", DOES)
def test_what_is_no_crop_is_noticed(name: str) -> None:
    function, why = DOES[name]
    program, refused = record(seeded(lambda: Does(function), 0), of(), CPU, views_only=True)
    assert program is None and refused is not None and why in refused.why


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, 3:9, :, 2:],
        lambda x: x[:, 3:4],
        lambda x: x[0, 3:9],
        lambda x: x.permute(0, 3, 1, 2)[:, :4],
        lambda x: x[:, 5:5],
        lambda x: x[None, :, 2:],
        lambda x: x.transpose(1, 2)[:, 3, :, 20:],
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(4, -1, -1, -1),
        lambda x: x.unfold(1, 5, 1),
        lambda x: torch.Tensor(x.as_tensor()).as_strided((4,), (1,), SHAPE[2] - 2),
    ],
)
def test_views_hold_what_the_volumes_do(function: Callable[[Any], Any]) -> None:
    out = run(lambda: Does(lambda d: {**d, "image": function(d["image"])}), of=of(), views_only=True)
    assert out.done is None


def test_items_keep_what_cannot_be_copied() -> None:
    lock, one = threading.Lock(), of()
    split = seeded(lambda: Does(lambda d: {**d, "lock": lock}), 0)
    program, refused = record(split, one, CPU, views_only=True)
    assert program is not None and refused is None
    volumes = {name: Voxels(one[name].as_subclass(torch.Tensor), boxes) for name, boxes in program.boxes().items()}
    assert replay(program, volumes, torch.device("cpu"), shared=False)["lock"] is lock


def test_a_volume_that_nothing_can_replace_is_refused() -> None:
    recorder = Recorder({"image": (torch.float32, SHAPE)}, torch.device("cpu"), views_only=True)
    for make in (lambda ghosts: {"image": Box(ghosts["image"])}, lambda ghosts: {}):
        program, refused = recorder.record([lambda data: data], lambda step, data: step(data), make)
        assert program is None and refused is not None and "'image'" in refused.why


def test_a_forked_process_replays_whatever_threads_did_at_the_fork() -> None:
    """As workers that are forked while a loader's thread runs. TorchScript has a lock for each function."""
    assert printed_by(FORKS) == "{0}"


FORKS = """
import os, signal, threading, torch
from monai_gds.programs.replay import _strided

memory, ended, found = torch.arange(1000.0), threading.Event(), set()

def views():
    return _strided(memory, [((2, 2), (10, 1), 5)])

def loader():
    while not ended.is_set():
        views()

threads = [threading.Thread(target=loader) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(40):
    if not (child := os.fork()):
        signal.alarm(20)
        views()
        os._exit(0)
    found.add(os.waitpid(child, 0)[1])
    if found != {0}:
        break
ended.set()
for thread in threads:
    thread.join()
print(found)
"""
