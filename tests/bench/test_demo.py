"""The demo: a table of each pipeline, and all datasets draw the same numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from monai.transforms import Compose, RandomizableTransform

from monai_gds.bench import demo
from monai_gds.bench.comparison import META, MONAIS_DATASETS
from monai_gds.bench.made_up import write_volumes


class Draw(RandomizableTransform):
    """Adds random numbers, of its own generator and of torch's."""

    def __call__(self, item: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": item["x"] + self.R.random() + torch.rand(())}


def test_in_a_turn_all_datasets_draw_the_same_numbers(tmp_path: Path) -> None:
    items = [{"x": torch.zeros(1)} for _ in range(4)]
    seen: list[float] = []

    class Watched(demo._Seeded):
        def consume(self, tensors: Iterable[torch.Tensor]) -> None:
            seen.extend(tensor.item() for tensor in tensors)

    comparison = Watched("t", items, Compose([Draw()]), ["x"], torch.device("cpu"), tmp_path, MONAIS_DATASETS, 2)
    demo.compare(comparison)
    seen = seen[3 * len(items) :]  # without the first epochs
    turns = [seen[start : start + 4] for start in range(0, len(seen), 4)]
    assert turns[0] == turns[1] == turns[2]
    assert turns[3] == turns[4] == turns[5] != turns[0]


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
