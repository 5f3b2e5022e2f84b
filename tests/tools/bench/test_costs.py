"""What epochs and caches cost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from monai_gds.bench.pagecache import drop
from tools.bench.costs import Costs, per_item, sizes, spent


def test_processor_time_and_bytes_from_the_disk_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(4 << 20))
    stayed = drop([file])
    before = spent()
    file.read_bytes()
    sum(range(1_000_000))
    used = spent() - before
    assert used.cpu > 0
    if used.disk is None or stayed or not used.disk:
        pytest.skip("this kernel or file system does not count what is read from the disk")
    assert 4 << 20 <= used.disk < 8 << 20


def test_costs_are_medians_per_item() -> None:
    costs = [Costs(0.2, 6_000_000), Costs(0.1, 2_000_000), Costs(9, 90_000_000)]
    assert per_item(costs, 2, cold=True) == {"CPU ms per item": "100.0", "MB read per item": "3.00"}


def test_a_warm_epoch_shows_no_bytes_from_the_disk() -> None:
    assert per_item([Costs(1, 0)], 1, cold=False) == {"CPU ms per item": "1000.0"}


@pytest.mark.parametrize("disk", [0, None])
def test_a_cold_epoch_that_read_nothing_was_not_counted(disk: int | None) -> None:
    assert per_item([Costs(1, disk)], 1, cold=True)["MB read per item"] == "not counted here"


def test_sizes_are_shown_by_key_where_files_name_it(tmp_path: Path) -> None:
    image, tables = torch.zeros(300, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    save_file({"image": image, "__tiles.image": tables, "label": image[:100].clone()}, tmp_path / "a.safetensors")
    assert sizes([tmp_path / "a.safetensors"], ["image", "label"], 1600)["image alone"] == "÷ 2.0"
    assert sizes([tmp_path / "a.safetensors"], ["image", "label"], 1600)["label alone"] == "÷ 8.0"
    for key, size in (("image", 400), ("label", 100)):
        (tmp_path / f"{key}.b2nd").write_bytes(bytes(size))
    found = sizes(tmp_path.glob("*.b2nd"), ["image", "label"], 1600)
    assert found == {"size": "÷ 3.2", "image alone": "÷ 2.0", "label alone": "÷ 8.0"}
    (tmp_path / "pickled.pt").write_bytes(bytes(800))
    assert sizes([tmp_path / "pickled.pt"], ["image", "label"], 1600) == {"size": "÷ 2.0"}
