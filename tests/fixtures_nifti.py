"""Small NIfTI volumes with labels and with everything a header can say, and the pipelines that tests run on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import monai.transforms as mt
import nibabel as nib
import numpy as np

__all__ = ["KEYS", "pipeline", "preprocessing", "write_volumes"]

KEYS = ["image", "label"]


def write_volumes(folder: Path, count: int = 3, shape: tuple[int, int, int] = (40, 36, 32)) -> list[dict[str, Any]]:
    """Writes ``count`` volumes (int16, oblique affine) with labels (uint8), and gives them as items."""
    rng, items = np.random.default_rng(0), []
    affine = np.diag([1.5, 1.5, 2.0, 1.0])
    affine[:3, 3] = [-30, -20, 10]
    affine[0, 1] = 0.1
    for i in range(count):
        image = nib.Nifti1Image(rng.integers(-1000, 1000, shape, dtype=np.int16), affine)
        image.header["descrip"] = b"made up"
        nib.save(image, folder / f"image{i}.nii.gz")
        label = np.zeros(shape, np.uint8)
        label[5:20, 5 + i : 25, 8:20] = 1
        nib.save(nib.Nifti1Image(label, affine), folder / f"label{i}.nii.gz")
        items.append(
            {
                "image": str(folder / f"image{i}.nii.gz"),
                "label": str(folder / f"label{i}.nii.gz"),
                "name": f"case {i}",
                "age": 40 + i,
                "weights": np.array([0.5, i]),
                "notes": {"site": ("a", 1.5), "codes": [1, 2]},
            }
        )
    return items


def preprocessing() -> list[Any]:
    """Deterministic transforms, some of which change the geometry."""
    return [
        mt.LoadImaged(KEYS, ensure_channel_first=True),
        mt.EnsureTyped(KEYS),
        mt.Orientationd(KEYS, "RAS", labels=None),
        mt.Spacingd(KEYS, (2.0, 2.0, 2.0), mode=("bilinear", "nearest")),
        mt.ScaleIntensityRanged("image", -1000, 1000, 0.0, 1.0, clip=True),
        mt.CropForegroundd(KEYS, "label", margin=4, allow_smaller=True),
        mt.CopyItemsd("label", names="mask"),
    ]


def pipeline(*random: Any) -> mt.Compose:
    """Preprocessing, then random transforms."""
    return mt.Compose([*preprocessing(), *random])
