"""Sizes and times as users write them, and groups."""

from __future__ import annotations

from typing import Any

import pytest

from monai_gds.base.units import bytes_of, in_groups, seconds_of


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (0, 0),
        ("20GB", 20 * 10**9),
        ("1.5 GiB", 3 << 29),
        (2e9, 2 * 10**9),
        ("7", 7),
        (" 3 kb ", 3000),
        ("3 KiB", 3 << 10),
        ("18MiB", 18 << 20),
        ("2TiB", 2 << 40),
        ("20e9", 20 * 10**9),
        ("1.5e+3 kB", 1_500_000),
    ],
)
def test_sizes(size: float | str, nbytes: int) -> None:
    assert bytes_of(size, "device_bytes") == nbytes


@pytest.mark.parametrize(
    "size", ["", "GB", "-1", -5, "20 parsecs", "1.2.3", float("nan"), float("inf"), "1e-9", "1e999", "2e", None, [1]]
)
def test_values_that_are_not_sizes(size: Any) -> None:
    with pytest.raises(ValueError, match=r"device_bytes=.*'20GB'"):
        bytes_of(size, "device_bytes")


@pytest.mark.parametrize(("span", "hours"), [("36h", 36), ("30d", 720), ("0d", 0), ("1.5 d", 36), (" 2w ", 336)])
def test_spans(span: str, hours: float) -> None:
    assert seconds_of(span) == 3600 * hours


@pytest.mark.parametrize("span", ["", "30", "d", "-3d", "3 months", "1.2.3d", "3D"])
def test_texts_that_are_not_spans(span: str) -> None:
    with pytest.raises(ValueError, match="36h, 30d, 2w"):
        seconds_of(span)


def test_groups_have_at_most_a_number_and_a_size_and_a_large_member_is_alone() -> None:
    sizes = {"a": 1, "b": 1, "c": 1, "d": 1, "large": 100, "after": 0}
    assert list(in_groups(sizes, lambda name: sizes[name], 3, 100)) == [["a", "b", "c"], ["d"], ["large", "after"]]
    assert list(in_groups([], len, 3, 100)) == []
