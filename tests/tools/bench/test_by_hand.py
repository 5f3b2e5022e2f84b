"""tools.bench training: code by hand is one of the peers, and makes what the transforms make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.transforms import Compose

from monai_gds.bench import feeds
from monai_gds.bench.made_up import write_volumes
from monai_gds.bench.segmentation import KEYS, Training
from tests.tools.bench.commands import run
from tools.bench.by_hand import BY_HAND, ByHand, by_hand


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Two steps of two volumes each."""
    shape = (40, 32, 32)
    return Training(write_volumes(tmp_path_factory.mktemp("volumes"), 5, shape), shape, torch.device("cpu"), workers=1)


class Undecided:
    """Random numbers that change nothing: in the middle of each range, and never likely."""

    def uniform(self, low: float, high: float, size: int | None = None) -> Any:
        return np.full(size, (low + high) / 2) if size else (low + high) / 2

    def random(self) -> float:
        return 0.9

    def permutation(self, count: int) -> np.ndarray:
        return np.arange(count)


@pytest.mark.parametrize("heavy", [False, True])
def test_by_hand_the_volumes_are_those_of_the_transforms(tiny: Training, heavy: bool) -> None:
    made = ByHand(replace(tiny, whole=True, heavy=heavy))
    made._random = Undecided()  # type: ignore[assignment]
    batch = next(iter(made))
    for key in KEYS:
        expected = torch.stack([Compose(tiny.deterministic())(item)[key].as_tensor() for item in tiny.items[:2]])
        torch.testing.assert_close(batch[key], expected, atol=1e-4, rtol=0)


def test_by_hand_half_of_the_crops_are_around_labels(tiny: Training) -> None:
    made = ByHand(tiny)
    image, label = Compose(tiny.deterministic())(tiny.items[0])["image"], made._volumes[0][0][1]
    labelled, others = (np.unravel_index(voxels, tiny.shape) for voxels in made._volumes[0][1])
    assert label[labelled].min() > 0 and len(labelled[0]) == (label > 0).sum()
    assert label[others].max() == 0 and image[0][others].min() > 0


def test_it_is_a_peer_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(feeds.PEERS, BY_HAND, by_hand)  # what the command does, taken back afterwards
    monkeypatch.delitem(feeds.PEERS, BY_HAND)
    file = tmp_path / "found.json"
    run("training", "--cpu", "--volumes", 4, "--shape", 32, 32, 32, "--workers", 1, "--epochs", 1, "--only", "by hand",
        "--json", file)  # fmt: skip
    (row,) = json.loads(file.read_text())["reports"][0]["rows"]
    assert row["name"] == BY_HAND and row["samples"][0] > 0
