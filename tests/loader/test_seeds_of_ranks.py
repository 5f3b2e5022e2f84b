"""Ranks with one seed: draws by place differ from rank to rank, and other equal draws are told."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.transforms import Compose, EnsureTyped, RandScaleIntensityd
from torch.utils.data import DistributedSampler

from monai_gds import GDSDataLoader, GDSDataset
from tests.machines import in_child


def drawn(folder: Path, rank: int, num_workers: int, divided: bool = True, seed: int = 1) -> list[float]:
    """The factors that a rank draws; all items are ones."""
    data = [{"image": torch.ones(1, 4)} for _ in range(8)]
    transform = Compose([EnsureTyped("image"), RandScaleIntensityd("image", factors=0.5, prob=1)])
    dataset = GDSDataset(data, transform.set_random_state(seed), folder, "cpu")
    sampler: Any = DistributedSampler(dataset, 2, rank, shuffle=False) if divided else None
    torch.manual_seed(seed)
    loader = GDSDataLoader(dataset, num_workers, batch_size=4, sampler=sampler)
    return [float(value) for batch in loader for value in batch["image"][:, 0, 0]]


def test_draws_by_place_differ_where_a_sampler_divides_the_items(tmp_path: Path) -> None:
    first, second = (drawn(tmp_path, rank, 1) for rank in (0, 1))
    assert not set(first) & set(second)
    assert drawn(tmp_path, 1, 1) == second
    whole = drawn(tmp_path, 0, 1, divided=False)
    assert whole[: len(first)] == first, "rank 0 and loaders without ranks keep their draws"


@pytest.mark.parametrize(("other", "told"), [(1, True), (2, False)])
def test_equal_seeds_without_workers_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: int, told: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("RANK", "0")

    def second() -> list[str]:
        os.environ["RANK"] = "1"
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                drawn(tmp_path, 1, 0, seed=other)
        return [str(one.message) for one in found if "have the same seed" in str(one.message)]

    drawn(tmp_path, 0, 0)
    words = in_child(second)
    assert [text.startswith("ranks 0 and 1 of this job") for text in words] == [True] * told
