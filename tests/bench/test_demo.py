"""The demo: rows that are not told apart are one."""

from __future__ import annotations

from pathlib import Path

import pytest

from monai_gds.bench import demo
from monai_gds.bench.comparison import META
from monai_gds.bench.made_up import write_volumes
from monai_gds.bench.report import Report, Row, differ


def rows_of(report: Report) -> dict[str, float | None]:
    return {row.name: row.median for row in demo.merged(report).rows}


def test_rows_that_are_not_told_apart_are_one_and_the_order_is_that_of_the_medians() -> None:
    slow, fast = Row("slow", (1.0, 1.2, 0.9, 1.1)), Row("fast", (5.0, 4.0, 6.0, 5.0))
    alike = Row("like slow", (1.1, 1.0, 1.0, 1.2))
    report = Report("t", "volumes/s", [fast, slow, alike], reference="slow")
    assert list(rows_of(report)) == ["slow\nlike slow", "fast"], "in the order of the report"
    (both, other) = demo.merged(report).rows
    assert sorted(both.samples) == sorted(slow.samples + alike.samples)
    assert [row.notes.get("") for row in (both, other)] == ["not told apart", None]
    assert demo.merged(report).ratio(other) == pytest.approx(5 / 1.05)


@pytest.mark.parametrize(
    ("first", "second", "different"),
    [
        ((1.0, 1.0, 1.0), (1.1, 1.1, 1.1), False),  # always, but by little
        ((1.0, 9.0, 1.0), (2.0, 2.0, 2.0), False),  # by much, but not always
        ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0), True),
        ((1.0,) * 12 + (9.0,) * 3, (2.0,) * 15, True),  # three hiccups in fifteen
        ((1.0,) * 11 + (9.0,) * 4, (2.0,) * 15, False),
    ],
)
def test_what_a_difference_is(first: tuple[float, ...], second: tuple[float, ...], different: bool) -> None:
    assert differ(Row("a", first), Row("b", second)) is different
    assert differ(Row("b", second), Row("a", first)) is different


def test_a_row_that_could_not_run_is_in_no_order() -> None:
    report = Report("t", "volumes/s", [Row("a", (1.0,)), Row("b", reason="absent")], reference="a")
    assert list(rows_of(report)) == ["a"]


def test_it_shows_whole_volumes_crops_and_what_no_cache_shortens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "READINGS", 2)
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0.0, 0.0))
    items = write_volumes(tmp_path / "volumes", 2, (32, 32, 24))
    demo.run(items, tmp_path / "cache", size=(16, 16, 8), epochs=2, device="cpu", backend="auto")
    printed = capsys.readouterr().out
    for title in ("whole volumes: 2", "4 random crops of 8x8x4 from each: 2", "whole volumes, rotated and zoomed"):
        assert title in printed
    for name in (META, "CacheDataset", "GDSDataset", "GDSDataset, GDSDataLoader"):
        assert name in printed or "whichever dataset" in printed
    assert "same volumes, value by value" in printed
    assert "This machine is busy (load 99.0 on " in printed
