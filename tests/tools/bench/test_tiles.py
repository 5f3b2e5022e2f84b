"""``python -m tools.bench dataset --only tiles``: tables per kind of data, every byte compared, sizes, costs."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from monai_gds.bench.comparison import REFERENCE
from tests.tools.bench.commands import bench_dataset, rows
from tools.bench.competitors import NNUNET, OURS_LZ4, OURS_WHOLE, OURS_ZSTD
from tools.bench.kinds import KINDS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("blosc2") is None, reason="blosc2 is not installed")

WHOLE = [OURS_WHOLE, OURS_LZ4, OURS_ZSTD, REFERENCE]
CROPS = [OURS_WHOLE, OURS_LZ4, OURS_ZSTD, NNUNET, REFERENCE]


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return bench_dataset("--only", "tiles", "--side", "64", "--items", "1", "--repeats", "1")


def of(reports: list[dict[str, Any]], kind: str, what: str) -> dict[str, dict[str, Any]]:
    """The rows of one report; without any if it needs what is not installed."""
    (report,) = (report for report in reports if f", {kind}: " in report["title"] and what in report["title"])
    found = rows(report)
    if KINDS[kind].missing():
        assert all("nilearn" in row["reason"] for row in found.values())
        pytest.skip("nilearn is not installed")
    return found


def ratio(row: dict[str, Any], heading: str = "size") -> float:
    return float(row["notes"][heading].removeprefix("÷ "))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_how_much_smaller_its_cache_is(reports: list[dict[str, Any]], kind: str) -> None:
    found = of(reports, kind, "whole volumes")
    assert list(found) == WHOLE
    assert 0.9 < ratio(found[OURS_WHOLE]) <= 1 and 0.9 < ratio(found[REFERENCE]) <= 1
    gained = ratio(found[OURS_LZ4]) > 1.15
    assert gained == (kind != "noise")
    assert ratio(found[OURS_ZSTD]) >= ratio(found[OURS_LZ4])
    alone = ratio(found[OURS_LZ4], "image alone"), ratio(found[OURS_LZ4], "label alone")
    assert alone[0] < alone[1] if gained else alone == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_crops_are_compared_with_nnunets_reader(reports: list[dict[str, Any]], kind: str) -> None:
    found = of(reports, kind, "RandSpatialCropSamplesd")
    assert list(found) == CROPS
    for row in found.values():
        assert row["samples"], row
        assert float(row["notes"]["CPU ms per item"]) > 0
    assert ratio(found[NNUNET]) > (0.9 if kind == "noise" else 1.15)


@pytest.mark.parametrize(("what", "classes"), [("RandCropByPosNegLabeld", 2), ("RandCropByLabelClassesd", 3)])
def test_crops_by_label_only_where_the_label_has_such_values(
    reports: list[dict[str, Any]], what: str, classes: int
) -> None:
    suited = [kind for kind in KINDS if any(f"({what})" in r["title"] and f", {kind}: " in r["title"] for r in reports)]
    assert suited == [kind for kind in KINDS if KINDS[kind].classes >= classes]
    for kind in suited:
        if not KINDS[kind].missing():
            assert all(row["samples"] for row in of(reports, kind, what).values())
