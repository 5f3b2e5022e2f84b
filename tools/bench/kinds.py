"""The data of :mod:`tools.bench.tiles`: images and labels of several kinds.

Synthetic CT or a real MRI template, on its native grid (few different values) or resampled (many), and noise, which
cannot be compressed.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import Transform

from monai_gds.bench.made_up import ct_like
from tools.bench.workloads import KEYS

__all__ = ["KINDS", "Kind", "MakeKind", "forget"]


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of one kind of data.

    Args:
        classes: the label's values are 0 to ``classes - 1``; 0 for a label with other values.
        nilearn: whether making it needs nilearn.
    """

    classes: int = 0
    nilearn: bool = False

    def missing(self) -> str:
        """Why it cannot be made here; empty if it can."""
        if self.nilearn and importlib.util.find_spec("nilearn") is None:
            return "needs nilearn, for the MNI152 template: pip install 'monai_gds[tutorials]'"
        return ""


KINDS = {
    "synthetic CT, native grid": Kind(classes=4),
    "synthetic CT, resampled": Kind(classes=4),
    "MRI (MNI152 with noise), native grid": Kind(classes=2, nilearn=True),
    "MRI (MNI152 with noise), resampled": Kind(classes=2, nilearn=True),
    "noise": Kind(),
}


class MakeKind(Transform):  # type: ignore[misc]  # MONAI has no type hints to speak of
    """Stands for loading and preprocessing: replaces the numbers of an item by an image and a label of one kind.

    Both are float32 MetaTensors ``(1, side, side, side)``.
    """

    def __init__(self, kind: str, side: int) -> None:
        self.kind, self.side = kind, side

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        made = _made(self.kind, self.side, next(iter(item.values())))
        return {key: MetaTensor(volume[None].clone()) for key, volume in zip(KEYS, made, strict=True)}


@cache
def _made(kind: str, side: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An image and a label. They are kept, since every competitor needs them and making them takes seconds."""
    if kind == "noise":
        image, label = torch.randn(2, side, side, side, generator=torch.Generator().manual_seed(seed))
        return image, label
    image, label = _native(kind.split(",")[0], side, seed)
    if kind.endswith("resampled"):
        image, label = _resampled(image, "trilinear"), _resampled(label, "nearest")
    return _scaled(kind, image), label


def _native(what: str, side: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An image in the units of its scanner and a label, float32."""
    if what.startswith("MRI"):
        brain = _template()
        grid = torch.nn.functional.interpolate(brain[None, None], (side,) * 3, mode="nearest")[0, 0]
        noise = torch.randn(grid.shape, generator=torch.Generator().manual_seed(seed))
        return noise.mul_(15).add_(grid).clamp_(0, 4095).round_(), (grid > 2000).float()
    image, label = ct_like((side,) * 3, seed)
    return torch.from_numpy(image.astype(np.float32)), torch.from_numpy(label.astype(np.float32))


@cache
def _template() -> torch.Tensor:
    from nilearn.datasets import load_mni152_template

    data = np.asarray(load_mni152_template(resolution=1).get_fdata(), np.float32)
    return torch.from_numpy(data / data.max() * 3000)


def _resampled(volume: torch.Tensor, mode: str) -> torch.Tensor:
    """As Spacingd with another grid of about as many voxels: all values are interpolated."""
    size = [round(n * 0.8) for n in volume.shape]
    coarse = torch.nn.functional.interpolate(volume[None, None], size, mode=mode)
    return torch.nn.functional.interpolate(coarse, volume.shape, mode=mode)[0, 0]


def _scaled(kind: str, image: torch.Tensor) -> torch.Tensor:
    """As ScaleIntensityRanged over a soft tissue window of CT, and NormalizeIntensityd of MRI; in place."""
    if kind.startswith("MRI"):
        deviation, mean = torch.std_mean(image)
        return image.sub_(mean).div_(deviation)
    return image.add_(175).div_(425).clamp_(0, 1)


def forget() -> None:
    """Frees the volumes that were made."""
    _made.cache_clear()
