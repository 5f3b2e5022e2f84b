"""Columns that no transform touches: what a guard notices, and for which pipelines they are told."""

from __future__ import annotations

import copy
import json
import operator
import pickle
from collections.abc import Callable
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from monai_gds.pipeline.columns import Columns, Guard, touched, watched

USES: dict[str, Callable[[Any], Any]] = {
    "==": lambda v: v == 1,
    "!=": lambda v: v != "a",
    "<": lambda v: v < 1,
    "the right of +": lambda v: 1 + v,
    "+": lambda v: v + 1,
    "+=": lambda v: operator.iadd(v, 1),
    "%": lambda v: v % 2,
    "divmod": lambda v: divmod(v, 2),
    "**": lambda v: v**2,
    "in": lambda v: "a" in v,
    "if": bool,
    "len": len,
    "for": list,
    "next": next,
    "v[0]": lambda v: v[0],
    "hash": hash,
    "a key of a dict": lambda v: {"a": 1}.get(v),
    "a member of a set": lambda v: v in {1, 2},
    "a member of a list": lambda v: v in [1, 2],
    "str": str,
    "repr": repr,
    "an f-string": lambda v: f"{v:>3}",
    "int": int,
    "float": float,
    "an index": lambda v: [1, 2][v],
    "range": range,
    "round": round,
    "abs": abs,
    "open": open,
    "an attribute": lambda v: v.upper(),
    "getattr": lambda v: getattr(v, "shape", None),
    "hasattr": lambda v: hasattr(v, "__array__"),
    "numpy": np.asarray,
    "a NumPy number": lambda v: np.float32(1) + v,
    "a tensor and it": lambda v: torch.ones(1) + v,
    "pickle": pickle.dumps,
    "sorted": lambda v: sorted([v, v]),
    "sum": lambda v: sum([v]),
    "called": lambda v: v(),
    "set": lambda v: setattr(v, "a", 1),
    "dir": dir,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_guard_notices_every_use(use: Callable[[Any], Any]) -> None:
    guards = {"fold": Guard(int)}

    def run(item: Any) -> None:
        with pytest.raises(BaseException):  # noqa: B017 (not an Exception)
            use(item["fold"])

    watched(guards, run)
    assert touched(guards) == {"fold"}


#: What MONAI does with all values of an item, whatever they are.
PASSED: dict[str, Callable[[Any], Any]] = {
    "copied": lambda item: dict(item),
    "copied deeply": copy.deepcopy,
    "its types": lambda item: [isinstance(v, (MetaTensor, str, list)) for v in item.values()],
    "moved": lambda item: {"other": item["fold"]},
    "nested": lambda item: [{"other": (item["fold"],)}],
}


@pytest.mark.parametrize("use", PASSED.values(), ids=PASSED)
def test_a_guard_may_be_passed_on(use: Callable[[Any], Any]) -> None:
    guards = {"fold": Guard(int)}
    watched(guards, use)
    assert not touched(guards)
    assert copy.deepcopy(guards["fold"]) is guards["fold"]


def test_a_guard_has_the_type_of_its_value_while_it_watches() -> None:
    assert watched(
        {"fold": Guard(str)}, lambda item: isinstance(item["fold"], str) and not isinstance(item["fold"], int)
    )


def test_json_fails_even_if_it_does_not_touch() -> None:
    with pytest.raises(BaseException):  # noqa: B017 (not an Exception)
        watched({"fold": Guard(int)}, json.dumps)


class Users(mt.MapTransform):  # type: ignore[misc]  # MONAI is untyped
    def __call__(self, data: Any) -> Any:
        return data


SCALE = mt.ScaleIntensityd("image")


@pytest.mark.parametrize(
    ("transforms", "counts"),
    [
        ([SCALE], False),
        ([mt.Compose([SCALE, mt.Identityd("image")], lazy=True)], False),
        ([mt.Lambdad("image", lambda image: image + 1)], False),  # it sees the image only
        ([mt.Identityd(("image", "fold"))], True),
        ([SCALE, mt.CopyItemsd("fold", names="other")], True),
        ([mt.SelectItemsd(("image", "fold"))], True),
        ([SCALE, Users("image")], True),
        ([SCALE, mt.Lambda(lambda item: item)], True),
        ([SCALE, lambda item: item], True),
        ([type("Own", (mt.ScaleIntensityd,), {})("image")], True),
        ([], True),
    ],
)
def test_which_pipelines_tell(transforms: list[Any], counts: bool) -> None:
    columns = Columns(transforms)
    one, other = ({"image": 1, "fold": fold} for fold in (1, 2))
    assert (columns.counting(one, frozenset()) != columns.counting(other, frozenset())) == counts
    _, guards = columns.guarded(one, frozenset())
    assert guards.keys() == (set() if counts else {"fold"})
    assert columns.guarded(one, frozenset({"fold"}))[1] == {}


@pytest.mark.parametrize("value", [[1], {"a": 1}, np.ones(1), torch.ones(1), (1, 2)])
def test_what_can_be_changed_in_place_counts(value: Any) -> None:
    item = {"image": 1, "fold": value}
    assert Columns([SCALE]).guarded(item, frozenset())[1] == {}
    assert Columns([SCALE]).counting(item, frozenset())["fold"] is value


def test_the_type_of_a_value_and_the_names_of_columns_count() -> None:
    columns = Columns([SCALE])
    items: list[Any] = [{"fold": 1}, {"fold": "1"}, {"fold": None}, {"wold": 1}, {}]
    found = [columns.counting(item, frozenset()) for item in items]
    assert all(a != b for i, a in enumerate(found) for b in found[:i])
