"""A pipeline without a cache, on a miss, and on a hit in another process: what must be one and the same."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import monai.transforms as mt
import torch
from monai.utils import TraceKeys

from monai_gds import GDSDataset
from tests.fresh import Process
from tests.recipes import RECIPES
from tests.same import assert_same, moved, strides
from tests.studies import Log

__all__ = ["Case", "assert_cached_alike", "uncached"]


class Case(NamedTuple):
    """A pipeline of recipes, by their names; plain values, so that every process makes its own.

    Attributes:
        names: recipes, the first of which gives the item and what comes before.
        folder: for files.
        lazy: of the ``Compose``.
    """

    names: tuple[str, ...]
    folder: Path
    lazy: bool = False

    def item(self) -> dict[str, Any]:
        """The source item."""
        return RECIPES[self.names[0]].item(self.folder)

    def transform(self, *more: Any) -> mt.Compose:
        """The pipeline."""
        first, *others = (RECIPES[name] for name in self.names)
        rest = [t for recipe in others for t in recipe.make()]
        return mt.Compose([*more, *first.transforms(self.folder), *rest], lazy=self.lazy)


def uncached(case: Case) -> Any:
    """What MONAI alone gives."""
    out = case.transform()(deepcopy(case.item()))
    mt.utils.reset_ops_id(out)
    return without_ids(out)


def without_ids(value: Any) -> Any:
    """Removes the identity of transforms where MONAI's ``reset_ops_id`` does not look: in lists of FromMetaTensord."""
    if isinstance(value, dict):
        if value.keys() >= {TraceKeys.CLASS_NAME, TraceKeys.ID}:
            value[TraceKeys.ID] = TraceKeys.NONE
        for v in value.values():
            without_ids(v)
    elif isinstance(value, list):
        for v in value:
            without_ids(v)
    return value


def assert_cached_alike(case: Case, expected: Any, cache: Path, device: str, other: Process) -> None:
    """Asserts that a miss here, a hit here and a hit in another process all give ``expected``, moved to the device."""
    there = expected if device == "cpu" else moved(expected, device)
    missed, hit, computed = _read(case, cache, device)
    assert computed == 1, "the second access computed the item again"
    assert_same(there, missed, "the miss")
    assert_same(there, hit, "the hit")
    complaint, found = other.call(_hit_elsewhere, case, cache, device, expected)
    assert not complaint, complaint
    assert_same(strides(missed), strides(hit), "the strides of the miss and the hit")
    assert_same(strides(missed), found, "the strides of the miss and the hit in another process")


def _hit_elsewhere(case: Case, cache: Path, device: str, expected: Any) -> tuple[str, dict[str, tuple[int, ...]]]:
    """What is wrong with the hits of this process, and their strides."""
    first, second, computed = _read(case, cache, device)
    if computed:
        return f"another process computed the item {computed} times", {}
    try:
        for name, got in (("the hit in another process", first), ("the second hit in another process", second)):
            assert_same(expected if device == "cpu" else moved(expected, device), got, name)
    except AssertionError as e:
        return str(e), {}
    return "", strides(first)


def _read(case: Case, cache: Path, device: str) -> tuple[Any, Any, int]:
    """The item twice, and how often it was computed."""
    log = cache.with_suffix(".log")
    os.environ["STUDY_LOG"] = str(log)
    before = _lines(log)
    with GDSDataset([case.item()], case.transform(Log()), cache, device=device) as dataset:
        first = without_ids(dataset[0])
        dataset.flush()
        second = without_ids(dataset[0])
    if device != "cpu":
        torch.cuda.synchronize()
    return first, second, _lines(log) - before


def _lines(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0
