"""``monai-gds bench dataset --only tiles``: cached epochs of compressed records, over data of several kinds.

Each kind is named after its data: synthetic CT or a real MRI template, on its native grid (few different values) or
resampled (many), and noise, from which nothing is gained.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, Transform
from rich.progress import Progress

from monai_gds.bench.comparison import SILENT, Comparison, compare
from monai_gds.bench.competitors import OURS, OURS_LZ4, OURS_ZSTD, REFERENCE
from monai_gds.bench.report import Report, Row
from monai_gds.bench.workloads import KEYS, Workload
from monai_gds.synthetic import ct_like

__all__ = ["KINDS", "MakeKind", "tiles"]

#: What is measured -> whether it needs nilearn.
KINDS = {
    "synthetic CT, native grid": False,
    "synthetic CT, resampled": False,
    "MRI (MNI152 with noise), native grid": True,
    "MRI (MNI152 with noise), resampled": True,
    "noise": False,
}


class MakeKind(Transform):  # type: ignore[misc]  # MONAI has no type hints to speak of
    """Stands for loading and preprocessing: replaces the numbers of an item by an image and a label of one kind.

    Both are float32 MetaTensors ``(1, side, side, side)``.
    """

    def __init__(self, kind: str, side: int) -> None:
        self.kind, self.side = kind, side

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        seed = next(iter(item.values()))
        if self.kind == "noise":
            generator = torch.Generator().manual_seed(seed)
            image, label = torch.randn(2, self.side, self.side, self.side, generator=generator)
        else:
            image, label = _native(self.kind.split(",")[0], self.side, seed)
            if self.kind.endswith("resampled"):
                image, label = _resampled(image, "trilinear"), _resampled(label, "nearest")
            image = _scaled(self.kind, image)
        return dict(zip(KEYS, (MetaTensor(image[None].contiguous()), MetaTensor(label[None])), strict=True))


def _native(what: str, side: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An image in the units of its scanner and a label, float32."""
    if what.startswith("MRI"):
        brain = _template()
        grid = torch.nn.functional.interpolate(brain[None, None], (side,) * 3, mode="nearest")[0, 0]
        noise = torch.randn(grid.shape, generator=torch.Generator().manual_seed(seed))
        return (grid + 15 * noise).clamp(0, 4095).round(), (grid > 2000).float()
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
    """As ScaleIntensityRanged over a soft tissue window of CT, and NormalizeIntensityd of MRI."""
    if kind.startswith("MRI"):
        return (image - image.mean()) / image.std()
    return ((image + 175) / 425).clamp(0, 1)


def tiles(work: Workload, progress: Progress = SILENT) -> list[Report]:
    """Epochs over whole volumes of each kind, in GB/s of float32, with the size of the caches."""
    return [_kind(work, kind, progress) for kind in KINDS]


def _kind(work: Workload, kind: str, progress: Progress) -> Report:
    item_bytes = len(KEYS) * 4 * work.side**3
    names = [OURS, OURS_LZ4, OURS_ZSTD, REFERENCE]
    items = f"{work.items} items of {item_bytes / 1e6:.0f} MB"
    title = f"whole volumes, {kind}: {items} to {work.device}, {work.page_cache}"
    if KINDS[kind] and importlib.util.find_spec("nilearn") is None:
        reason = "needs nilearn, for the MNI152 template: pip install 'monai_gds[tutorials]'"
        return Report(title, "GB/s", [Row(name, reason=reason) for name in names], REFERENCE)
    comparison = Comparison(
        title, [dict.fromkeys(KEYS, n) for n in range(work.items)], Compose([MakeKind(kind, work.side)]), KEYS,
        work.items * item_bytes, work.device, work.subfolder("".join(c if c.isalnum() else "-" for c in kind)), names,
        work.repeats, work.batch_size, cold=work.cold, sizes=True,
    )  # fmt: skip
    return compare(comparison, progress)
