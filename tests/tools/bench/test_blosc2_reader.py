"""nnU-Net's way to store volumes, as a competitor: the pipeline's own crops, and only once computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from monai.data import Dataset
from monai.transforms import Compose, MapTransform, RandSpatialCropd, RandSpatialCropSamplesd

from tools.bench.blosc2_reader import NNUNetDataset

blosc2 = pytest.importorskip("blosc2")

KEYS = ("image", "label")


class Made(MapTransform):  # type: ignore[misc]
    """Replaces numbers by volumes, and counts."""

    def __init__(self) -> None:
        super().__init__(KEYS)
        self.count = 0

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        n = item["image"]
        whole = torch.arange(2 * 50 * 70 * 40).reshape(2, 50, 70, 40) * n
        return {"image": whole.float() / 7, "label": (whole % 5).to(torch.uint8)}


@pytest.mark.parametrize("samples", [None, 3])
def test_its_crops_are_the_pipelines(tmp_path: Path, samples: int | None) -> None:
    made = Made()
    size = (33, 17, 40)
    crop = (
        RandSpatialCropSamplesd(KEYS, size, num_samples=samples, random_size=False)
        if samples
        else RandSpatialCropd(KEYS, size, random_size=False)
    )
    pipeline = Compose([made, crop])
    items = [dict.fromkeys(KEYS, n) for n in (1, 2)]
    expected, ours = Dataset(items, pipeline), NNUNetDataset(items, pipeline, tmp_path)
    for _ in range(2):
        for n in range(2):
            pipeline.set_random_state(n)
            wanted = expected[n]
            pipeline.set_random_state(n)
            got = ours[n]
            wanted, got = ([one] if isinstance(one, dict) else one for one in (wanted, got))
            assert len(got) == len(wanted) == (samples or 1)
            for theirs, own in zip(wanted, got, strict=True):
                for key in KEYS:
                    torch.testing.assert_close(own[key], theirs[key].as_tensor(), rtol=0, atol=0)
    assert made.count == 4 + 2, "each item was computed and stored once"


def test_files_are_as_nnunets(tmp_path: Path) -> None:
    pipeline = Compose([Made(), RandSpatialCropd(KEYS, (8, 8, 8), random_size=False)])
    NNUNetDataset([dict.fromkeys(KEYS, 3)], pipeline, tmp_path)[0]
    stored = blosc2.open(str(tmp_path / "0" / "image.b2nd"), mode="r")
    assert stored.blocks == (1, 32, 32, 32) and stored.shape == (2, 50, 70, 40)
    assert stored.schunk.cparams.codec == blosc2.Codec.LZ4HC and stored.schunk.cparams.clevel == 5
