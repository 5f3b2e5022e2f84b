"""``monai-gds bench dataset --only tiles``: a table per kind of data, every byte compared, sizes shown."""

from __future__ import annotations

import importlib.util

import pytest

from monai_gds.bench.competitors import OURS, OURS_LZ4, OURS_ZSTD, REFERENCE
from monai_gds.bench.tiles import KINDS
from tests.bench.commands import bench_dataset, rows


@pytest.mark.skipif(importlib.util.find_spec("blosc2") is None, reason="blosc2 is not installed")
def test_every_kind_says_how_much_smaller_its_cache_is() -> None:
    reports = bench_dataset("--only", "tiles", "--side", "64", "--items", "1", "--repeats", "1")
    assert len(reports) == len(KINDS)
    for kind, report in zip(KINDS, reports, strict=True):
        assert kind in report["title"]
        found = rows(report)
        assert list(found) == [OURS, OURS_LZ4, OURS_ZSTD, REFERENCE]
        if KINDS[kind] and importlib.util.find_spec("nilearn") is None:
            assert "nilearn" in found[OURS]["reason"]
            continue
        sizes = {name: float(row["notes"]["size"].removeprefix("÷ ")) for name, row in found.items()}
        assert 0.9 < sizes[OURS] <= 1 and 0.9 < sizes[REFERENCE] <= 1
        gained = sizes[OURS_LZ4] > 1.15
        assert gained == (kind != "noise"), sizes
        assert sizes[OURS_ZSTD] >= sizes[OURS_LZ4]
