"""The training of ``monai-gds bench training``: MONAI's transforms over volumes, and a step of its UNet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import monai.transforms as mt
import numpy as np
import torch
from monai.losses import DiceCELoss
from monai.networks.nets import UNet

KEYS = ("image", "label")

#: Labels of :func:`~monai_gds.bench.made_up.ct_like`, with the background.
_CLASSES = 4

#: Crops of a volume.
CROPS = 4

#: The keys of the voxels that crops may be centred on.
_INDICES = ("label_fg_indices", "label_bg_indices")


@dataclass(frozen=True)
class Training:
    """What is trained, and where."""

    items: Sequence[Mapping[str, str]]  # pairs of NIfTI files, as write_volumes returns them
    shape: tuple[int, int, int]  # voxels of each volume, multiples of 8, and 32 or more
    device: torch.device  # on which the network is trained
    workers: int  # of the peers that have some
    heavy: bool = False  # rotate, scale and smooth each crop, too
    whole: bool = False  # train with whole volumes instead of crops
    numpy: bool = False  # end with a transform in NumPy
    batch_size: int = 2  # volumes

    @property
    def steps(self) -> int:
        """Batches per epoch; an incomplete one is left out."""
        return len(self.items) // self.batch_size

    @property
    def crop(self) -> int:
        """Voxels along each side of a crop: half of the volume's shortest side in multiples of 8, at most 96."""
        return min(96, min(self.shape) // 16 * 8)

    @property
    def what(self) -> str:
        """The training in words."""
        cut = "whole volumes" if self.whole else f"{CROPS} crops of {self.crop}³ per volume"
        added = [", rotated and smoothed"] * self.heavy + [", then NumPy"] * self.numpy
        shape = " x ".join(map(str, self.shape))
        return f"{len(self.items)} volumes of {shape}, batches of {self.batch_size}: {cut}{''.join(added)}"

    def deterministic(self, indices: bool = False) -> list[Any]:
        """The transforms that a cache saves the result of; with ``indices``, of the voxels to centre crops on, too."""
        return [
            mt.LoadImaged(KEYS),
            mt.EnsureChannelFirstd(KEYS),
            mt.Orientationd(KEYS, "RAS", labels=None),
            mt.ScaleIntensityRanged("image", -200, 400, 0, 1, clip=True),
            mt.EnsureTyped(KEYS),
            *[mt.FgBgToIndicesd("label", image_key="image", image_threshold=0)] * indices,
        ]

    def random(self, device: torch.device | None, indices: bool = False) -> list[Any]:
        """The random transforms. ``device`` is RandAffined's: in worker processes it has to be None."""
        found: list[Any] = []
        if not self.whole:
            fg, bg = _INDICES if indices else (None, None)
            found += [
                mt.RandCropByPosNegLabeld(
                    KEYS, "label", (self.crop,) * 3, num_samples=CROPS, image_key="image", image_threshold=0,
                    fg_indices_key=fg, bg_indices_key=bg,
                )
            ]  # fmt: skip
        if self.heavy:
            found += [
                mt.RandAffined(
                    KEYS, prob=1, rotate_range=(0.3,) * 3, scale_range=(0.1,) * 3, mode=("bilinear", "nearest"),
                    padding_mode="border", device=device,
                )
            ]  # fmt: skip
        found += [mt.RandFlipd(KEYS, prob=0.5, spatial_axis=axis) for axis in range(3)]
        found += [mt.RandRotate90d(KEYS, prob=0.5)] * (not self.whole)
        found += [mt.RandScaleIntensityd("image", 0.1, prob=0.5), mt.RandShiftIntensityd("image", 0.1, prob=0.5)]
        return [*found, *[mt.RandGaussianSmoothd("image", prob=0.5)] * self.heavy, *[RandGamma()] * self.numpy]


class RandGamma(mt.RandomizableTransform):  # type: ignore[misc]  # MONAI is untyped
    """A transform as users write them: NumPy's arithmetic and random numbers, whatever device the image is on."""

    def __call__(self, item: Mapping[str, Any]) -> dict[str, Any]:
        image = mt.ToNumpy()(item["image"])
        changed = np.maximum(image, 0) ** np.float32(self.R.uniform(0.8, 1.25))
        return {**item, "image": torch.as_tensor(changed).to(item["image"])}


class Network:
    """MONAI's UNet with its loss and optimiser. On a CPU it is small, and in float32 instead of bfloat16."""

    def __init__(self, device: torch.device) -> None:
        channels = (32, 64, 128, 256) if device.type == "cuda" else (4, 8, 16, 32)
        self.device = device
        self._network = UNet(3, 1, _CLASSES, channels, (2, 2, 2), num_res_units=2).to(device)
        self._optimizer = torch.optim.AdamW(self._network.parameters(), 1e-4)
        self._loss: Callable[..., torch.Tensor] = DiceCELoss(to_onehot_y=True, softmax=True)

    def step(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Trains with a batch, which is copied to the device if it is not there yet.

        Metadata are left behind: MONAI's MetaTensor would slow down every operation of the network.
        """
        image, label = (batch[key].as_subclass(torch.Tensor).to(self.device, non_blocking=True) for key in KEYS)
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self._loss(self._network(image), label)
        torch.autograd.backward(loss)
        self._optimizer.step()
