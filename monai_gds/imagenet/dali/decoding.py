"""The DALI graph of images: decode, crop, flip, normalise."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from monai_gds.imagenet.dali.pipeline import dali
from monai_gds.imagenet.files.sampling import uniform

#: Mean and standard deviation of ImageNet's training images, RGB, for values of 0 to 255, as in torchvision's examples.
IMAGENET_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
IMAGENET_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)


@dataclass(frozen=True)
class Decoding:
    """How encoded images are decoded and transformed; see :class:`~monai_gds.imagenet.dataset.ImageNetDataset`.

    ``(mean, std)`` of ``normalize`` are for values of 0 to 255; ``options`` are those of ``fn.decoders.image``, and of
    ``fn.decoders.image_random_crop``.
    """

    crop: tuple[int, int] | None = None
    flip: bool = False
    normalize: bool | tuple[Sequence[float], Sequence[float]] = False
    options: Mapping[str, Any] = field(default_factory=dict)
    training: bool = True

    def __post_init__(self) -> None:
        """Raises a ValueError for what cannot be used: now, and not at the first batch."""
        if self.flip and not self.training:
            raise ValueError("flip=True mirrors at random, as for training: leave it out, or training=False")
        if self.crop is not None and not _is_size(self.crop):
            raise ValueError(f"crop={self.crop!r}: give (height, width) in pixels, such as (224, 224)")
        for name, default in _RANGES.items():
            given = self.options.get(name, default)
            if not _is_range(given, above_zero=name == "random_aspect_ratio"):
                raise ValueError(
                    f"decoder={ {name: given} }: give two numbers, the smaller one first; areas from 0, ratios above it"
                )
        if self.normalize and not isinstance(self.normalize, bool):
            try:
                _, _ = (tuple(map(float, part)) for part in self.normalize)
            except (TypeError, ValueError) as e:
                raise ValueError(
                    f"normalize={self.normalize!r}: use True, or (mean, std), each a number per channel"
                ) from e

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays that :meth:`arrays` returns."""
        return (*(("start", "size") if self.crop is not None else ()), *(("mirror",) if self.flip else ()))

    def arrays(self, seed: int, epoch: int, images: np.ndarray, shapes: np.ndarray) -> dict[str, np.ndarray]:
        """Where images are cut and which are mirrored, for :meth:`graph`: one row per image.

        They are computed here since DALI takes an operator per step of arithmetic, which cost more than decoding.

        Args:
            seed, epoch, images: what is random follows from these; ``images`` are indices.
            shapes: heights and widths, int32 (images, 2), of :class:`~monai_gds.imagenet.dali.headers.Headers`.
        """
        drawn = uniform(seed, epoch, images, 2 * self._attempts + 3)
        found: dict[str, np.ndarray] = {}
        if self.crop is not None:
            start, size = self._windows(shapes, drawn) if self.training else _middles(shapes, self.crop)
            found = {"start": start.astype(np.int32), "size": size.astype(np.int32 if self.training else np.float32)}
        return {**found, "mirror": (drawn[:, -1] < 0.5).astype(np.int32)} if self.flip else found

    @property
    def _attempts(self) -> int:
        return int(self.options.get("num_attempts", 10))

    def _windows(self, shapes: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Starts and sizes of random windows, distributed as those of ``fn.decoders.image_random_crop``.

        The first attempt that fits counts. After them comes the largest window, which always does.
        """
        count = self._attempts
        (least, most), (thin, wide) = (self.options.get(name, default) for name, default in _RANGES.items())
        areas = least + (most - least) * drawn[:, :count]
        ratios = thin * (wide / thin) ** drawn[:, count : 2 * count]
        height, width = shapes.T[:, :, None].astype(np.float64)
        side = np.sqrt(height * width)
        tallest, widest = np.minimum(height, np.floor(width / thin)), np.minimum(width, np.floor(height * wide))
        if most < 1:
            smaller = np.minimum(1, side * most**0.5 / np.sqrt(tallest * widest))
            tallest, widest = np.floor(tallest * smaller), np.floor(widest * smaller)
        heights = np.maximum(1, np.hstack([np.floor(side * np.sqrt(areas / ratios) + 0.5), tallest]))
        widths = np.maximum(1, np.hstack([np.floor(side * np.sqrt(areas * ratios) + 0.5), widest]))
        fits = (heights <= height) & (widths <= width) & (widths >= thin * heights) & (widths <= wide * heights)
        fits[:, -1] = True
        first = np.arange(len(fits)), fits.argmax(1)
        size = np.stack([heights[first], widths[first]], axis=1)
        return np.floor(drawn[:, 2 * count : 2 * count + 2] * (shapes - size + 1)), size

    def graph(self, jpegs: Any, on_gpu: bool, nodes: Mapping[str, Any] | None = None) -> Any:
        """Returns the node of decoded images: uint8 HWC RGB, or float32 CHW with ``normalize``.

        Args:
            jpegs: the node of encoded images.
            on_gpu: decode on the GPU.
            nodes: those of :meth:`arrays`, by name. None: DALI draws, the same again whenever a pipeline is built.
        """
        module = dali()
        fn, types = module.fn, module.types
        options = {"device": "mixed" if on_gpu else "cpu", "output_type": types.RGB, **self.options}
        plain = {name: value for name, value in options.items() if name not in _OF_CROPS}
        at = nodes or {}
        if self.crop is None:
            images = fn.decoders.image(jpegs, **plain)
        elif not self.training:
            images = fn.resize(fn.decoders.image(jpegs, **plain), size=at["size"])
            images = fn.slice(images, start=at["start"], shape=self.crop, axes=[0, 1])
        else:
            if nodes is None:
                images = fn.decoders.image_random_crop(jpegs, **options)
            else:
                images = fn.decoders.image_slice(jpegs, start=at["start"], shape=at["size"], axes=[0, 1], **plain)
            images = fn.resize(images, size=self.crop)
        return self._finished(images, nodes)

    def _finished(self, images: Any, nodes: Mapping[str, Any] | None) -> Any:
        """Mirrors and normalises decoded images."""
        module = dali()
        fn, types = module.fn, module.types
        mirror = 0
        if self.flip:
            mirror = nodes["mirror"] if nodes is not None else fn.random.coin_flip()
        if self.normalize:
            mean, std = (IMAGENET_MEAN, IMAGENET_STD) if isinstance(self.normalize, bool) else self.normalize
            return fn.crop_mirror_normalize(
                images, dtype=types.FLOAT, output_layout="CHW", mean=list(mean), std=list(std), mirror=mirror
            )
        return fn.flip(images, horizontal=mirror) if self.flip else images


#: Arguments of ``fn.decoders.image_random_crop`` only.
_RANGES = {"random_area": (0.08, 1.0), "random_aspect_ratio": (3 / 4, 4 / 3)}
_OF_CROPS = {*_RANGES, "num_attempts"}


def _is_size(value: Any) -> bool:
    """Whether this is a height and a width."""
    try:
        height, width = map(operator.index, value)
    except (TypeError, ValueError):
        return False
    return height > 0 and width > 0


def _is_range(value: Any, above_zero: bool) -> bool:
    try:
        least, most = value
        return bool(0 <= least <= most and (least or not above_zero))
    except (TypeError, ValueError):
        return False


def _middles(shapes: np.ndarray, crop: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Starts of the middle, and sizes before it is cut, as torchvision's ``Resize(side * 256 / 224)`` gives them."""
    height, width = (round(side * 256 / 224) for side in crop)
    size = np.maximum(shapes * height // shapes[:, :1], shapes * width // shapes[:, 1:])
    spare = size - np.array(crop)
    return (spare + 1) // 4 + (spare + 2) // 4, size  # half of what is spare, rounded to even
