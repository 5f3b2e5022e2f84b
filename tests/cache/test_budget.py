"""A budget for a cache directory: what is deleted to make room, and what never is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.transforms import Compose, EnsureTyped, Lambdad, ScaleIntensityd

from monai_gds import GDSDataLoader
from monai_gds.cache import budget, maintenance, temporary, uses
from monai_gds.cache.index import Index
from monai_gds.cache.uses import Uses
from monai_gds.dataset import GDSDataset
from monai_gds.errors import CacheWarning
from tests.interrupts import interrupted
from tests.machines import NOBODY, ROOT, in_child, shared_folder

#: Bytes of the tensor of an item; its record has a few kB more.
NBYTES = 1 << 16


def pipeline(number: int) -> Compose:
    return Compose([EnsureTyped("image"), ScaleIntensityd("image", minv=0.0, maxv=float(number))])


def dataset(folder: Path, number: int, items: int = 3, **settings: Any) -> GDSDataset:
    data = [{"image": torch.arange(i, i + NBYTES // 4, dtype=torch.float32)[None]} for i in range(items)]
    return GDSDataset(data, pipeline(number), folder, "cpu", **settings)


def run(folder: Path, number: int, items: int = 3, **settings: Any) -> None:
    """A run that has ended: all its items are cached and read."""
    with dataset(folder, number, items, **settings) as made:
        for _ in range(2):
            _ = [made[i] for i in range(items)]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.safetensors")}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def earlier_runs(folder: Path, *numbers: int) -> list[set[str]]:
    """Caches three items by each of some pipelines, one run after the other; returns the records of each."""
    found: list[set[str]] = []
    for number in numbers:
        before = names(folder)
        run(folder, number)
        found.append(names(folder) - before)
        assert len(found[-1]) == 3
    return found


def record_size(folder: Path) -> int:
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


# ---------------------------------------------------------------------------------------------------------------------
# What a training notices


def test_a_run_makes_room_by_deleting_what_was_unused_for_longest(tmp_path: Path) -> None:
    first, second = earlier_runs(tmp_path, 1, 2)
    run(tmp_path, 1)  # only read: its records are older, and used later
    limit = size(tmp_path) + record_size(tmp_path) // 2
    run(tmp_path, 3, items=2, max_bytes=limit)
    assert size(tmp_path) <= limit
    assert first <= names(tmp_path), "the records that were used last"
    assert len(second & names(tmp_path)) == 1, "two of the others made room for two"
    assert len(names(tmp_path)) == 6


def test_what_is_used_is_not_written_into_records(tmp_path: Path) -> None:
    earlier_runs(tmp_path, 1)
    before = {path: path.stat() for path in tmp_path.glob("*.safetensors")}
    run(tmp_path, 1)
    for path, st in before.items():
        now = path.stat()
        assert (now.st_mtime_ns, now.st_ctime_ns, now.st_ino) == (st.st_mtime_ns, st.st_ctime_ns, st.st_ino)
        assert not os.listxattr(path)


def test_an_epoch_larger_than_the_budget_hits_what_is_there_and_warns_once(tmp_path: Path) -> None:
    computed: list[int] = []
    data = [{"image": torch.full((1, NBYTES // 4), float(i)), "i": i} for i in range(8)]
    transform = Compose([EnsureTyped("image"), Lambdad("i", lambda i: computed.append(i) or i)])
    with pytest.warns(CacheWarning) as caught:
        made = GDSDataset(data, transform, tmp_path, "cpu", max_bytes=4 * NBYTES, hash_transform=lambda _: b"same")
        for _ in range(3):
            for i in range(8):
                assert made[i]["image"][0, 0] == i
            made.flush()
    there = names(tmp_path)
    assert len(there) == 3
    assert size(tmp_path) <= 4 * NBYTES
    # the same three are hit in each epoch, and the other five are computed
    assert sorted(computed) == sorted([*range(8), *(i for i in computed[:8] if computed.count(i) > 1)] * 1 + [
        i for i in set(computed) if computed.count(i) == 3
    ])
    assert sum(computed.count(i) == 1 for i in range(8)) == 3
    told = [str(w.message) for w in caught if "budget" in str(w.message)]
    assert len(told) == 1
    assert "computed in every epoch" in told[0]


def test_a_record_larger_than_the_budget_deletes_nothing(tmp_path: Path) -> None:
    (first,) = earlier_runs(tmp_path, 1)
    with pytest.warns(CacheWarning, match=r"its budget of 0\.0 MB is full"):
        run(tmp_path, 2, max_bytes=1000)
    assert names(tmp_path) == first


def test_too_little_to_delete_deletes_nothing(tmp_path: Path) -> None:
    """Deleting something for a record that does not fit all the same would only cost others their records."""
    (first,) = earlier_runs(tmp_path, 1)
    keeps = dataset(tmp_path, 2, items=30)
    _ = [keeps[i] for i in range(30)]
    keeps.flush()
    there = names(tmp_path)
    big = [{"image": torch.zeros(1, 8 * NBYTES // 4)}]
    with pytest.warns(CacheWarning, match="budget"), GDSDataset(
        big, pipeline(3), tmp_path, "cpu", max_bytes=size(tmp_path)
    ) as made:
        _ = made[0]
    assert names(tmp_path) == there
    assert first <= there
