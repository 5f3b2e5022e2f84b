"""Which transforms are drawn before their item's turn: crops and pads that run nothing but MONAI's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch

from monai_gds.pipeline.ahead import drawn_ahead, why_not
from monai_gds.pipeline.split import Split

SIZE = (12, 10, 8)


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
    "a Compose of what is not listed": lambda: mt.OneOf([mt.Compose([mt.RandSpatialCropd("image", SIZE), mine])]),
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
def test_what_may_do_anything_is_not_drawn_ahead(name: str) -> None:
    step = REFUSED[name]()
    assert why_not(step)
    assert ahead(step, mt.RandSpatialCropd("image", SIZE)) == []


def test_functions_of_libraries_do_not_matter() -> None:
    notes = [np.float32, mt.utils.is_positive, torch.uint8]
    assert not why_not(_with(mt.RandSpatialCropd("image", SIZE), "notes", notes))


def ahead(*steps: Any) -> list[Any]:
    """The steps that are drawn ahead of those after a cached one."""
    split = Split(mt.Compose([mt.Identityd("image")]))
    split.rest = list(steps)  # as they are: a Compose would seed them
    return drawn_ahead(split)


def test_first_steps_up_to_the_last_crop() -> None:
    crop, pad, flip = mt.RandSpatialCropd("image", SIZE), mt.SpatialPadd("image", SIZE), mt.RandFlipd("image")
    again = mt.CenterSpatialCropd("image", 5)
    assert ahead(crop, pad, again, pad, flip, crop) == [crop, pad, again]
    assert ahead(pad, flip) == ahead(flip, crop) == ahead() == []
