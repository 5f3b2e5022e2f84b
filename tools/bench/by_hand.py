"""A training's batches made by hand: the distributions of MONAI's transforms in plain torch. A peer of the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from monai.transforms import Compose
from torch.nn.functional import affine_grid, conv3d, grid_sample

from monai_gds.bench.feeds import Feed
from monai_gds.bench.segmentation import CROPS, KEYS, Training

BY_HAND = "by hand, volumes on the device"


def by_hand(training: Training, _: Path) -> Feed:
    """No MONAI, no thread: see :class:`ByHand`."""
    return Feed(ByHand(training))


class ByHand:
    """Volumes in the device's memory, cropped and changed there, in the training's own thread.

    The voxels that crops are centred on are listed once. Nothing waits for the device.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._random = np.random.default_rng()
        with ThreadPoolExecutor(training.workers) as pool:
            self._volumes = list(pool.map(self._volume, range(len(training.items))))

    def _volume(self, index: int) -> tuple[torch.Tensor, list[np.ndarray]]:
        """Image and label as one tensor ``(2, x, y, z)`` on the device; the indices of labelled and other voxels."""
        item = Compose(self._training.deterministic())(self._training.items[index])
        image, label = (item[key].as_subclass(torch.Tensor) for key in KEYS)
        centers = [] if self._training.whole else [label > 0, (label == 0) & (image > 0)]
        voxels = [np.flatnonzero(where.numpy()).astype(np.int32) for where in centers]
        return torch.cat([image, label]).to(self._training.device), voxels

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order, size = self._random.permutation(len(self._volumes)), self._training.batch_size
        for step in range(self._training.steps):
            cuts = [cut for index in order[step * size :][:size] for cut in self._cuts(*self._volumes[index])]
            parts = zip(*map(self._changed, cuts), strict=True)
            yield {key: torch.stack(part) for key, part in zip(KEYS, parts, strict=True)}

    def _cuts(self, volume: torch.Tensor, voxels: list[np.ndarray]) -> Iterator[torch.Tensor]:
        """Random crops of a volume, half of them around a labelled voxel; or the whole volume."""
        if self._training.whole:
            yield volume
            return
        crop, shape = self._training.crop, volume.shape[1:]
        for _ in range(CROPS):
            center = np.unravel_index(self._random.choice(voxels[self._random.integers(2)]), shape)
            x, y, z = (int(np.clip(c - crop // 2, 0, n - crop)) for c, n in zip(center, shape, strict=True))
            yield volume[:, x : x + crop, y : y + crop, z : z + crop]

    def _changed(self, cut: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Image and label ``(1, x, y, z)`` after the other transforms of :meth:`Training.random`."""
        draw, likely = self._random.uniform, self._likely
        if self._training.heavy:
            cut = self._moved(cut)
        cut = cut.flip([axis for axis in (1, 2, 3) if likely()])
        if not self._training.whole and likely():
            cut = cut.rot90(int(self._random.integers(1, 4)), (1, 2))
        image, label = cut[:1], cut[1:]
        scale, shift = (draw(-0.1, 0.1) * likely() for _ in range(2))
        image = image * (1 + scale) + shift
        if self._training.heavy and likely():
            image = _smoothed(image, draw(0.25, 1.5, 3))
        if self._training.numpy:
            image = image.clamp(min=0) ** draw(0.8, 1.25)
        return image, label

    def _likely(self) -> bool:
        return self._random.random() < 0.5

    def _moved(self, cut: torch.Tensor) -> torch.Tensor:
        """Rotated by up to 0.3 about each axis, and scaled by up to a tenth along each."""
        matrix = np.diag(self._random.uniform(0.9, 1.1, 3))
        for axis, angle in enumerate(self._random.uniform(-0.3, 0.3, 3)):
            turn = np.eye(3)
            plane = np.ix_(*[[other for other in range(3) if other != axis]] * 2)
            turn[plane] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
            matrix = turn @ matrix
        theta = torch.from_numpy(np.c_[matrix, np.zeros(3)][None].astype(np.float32)).to(cut.device, non_blocking=True)
        grid = affine_grid(theta, [1, 1, *cut.shape[1:]], align_corners=False)
        parts = zip(cut, ("bilinear", "nearest"), strict=True)
        moved = [grid_sample(part[None, None], grid, mode, "border", align_corners=False)[0] for part, mode in parts]
        return torch.cat(moved)


def _smoothed(image: torch.Tensor, sigmas: np.ndarray) -> torch.Tensor:
    """An image ``(1, x, y, z)`` after a Gaussian filter along each axis."""
    for axis, sigma in enumerate(sigmas):
        reach = math.ceil(4 * sigma)
        kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, device=image.device) / sigma) ** 2)
        sides, padding = [1, 1, 1], [0, 0, 0]
        sides[axis], padding[axis] = -1, reach
        image = conv3d(image[None], (kernel / kernel.sum()).view(1, 1, *sides), padding=padding)[0]
    return image
