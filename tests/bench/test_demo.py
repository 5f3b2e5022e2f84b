"""The demo: a table of each pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from monai_gds.bench import demo
from monai_gds.bench.comparison import META
from monai_gds.bench.made_up import write_volumes


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
        assert printed.count(f" {name} ") >= 3
    assert "same volumes, value by value" in printed
    assert "This machine is busy (load 99.0 on " in printed
