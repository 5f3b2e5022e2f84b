"""The limits of the machine."""

from __future__ import annotations

from pathlib import Path

import torch

from tools.bench.ceilings import Ceilings


def test_ceilings_in_the_unit_of_the_report(tmp_path: Path) -> None:
    with Ceilings(tmp_path, torch.device("cpu"), 1, scale=1000) as thousand:
        thousand.sample()
        thousand.sample()
    by_name = {row.name: row for row in thousand.rows()}
    assert len(by_name) == 4
    assert all(len(row.samples) == 2 for row in by_name.values())
    assert all(min(row.samples) > 5 for row in by_name.values()), "no disk reads 5 MB/s"
    assert list(tmp_path.iterdir()) == []
