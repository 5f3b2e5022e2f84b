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
        if self.normalize and not isinstance(self.normalize, bool):
            try:
                _, _ = (tuple(map(float, part)) for part in self.normalize)
            except (TypeError, ValueError) as e:
                raise ValueError(
                    f"normalize={self.normalize!r}: use True, or (mean, std), each a number per channel"
                ) from e

    @property
    def random(self) -> bool:
        """Whether images need random numbers, those of :meth:`draw`."""
        return self.training and (self.flip or self.crop is not None)

    def draw(self, seed: int, epoch: int, images: np.ndarray) -> np.ndarray:
        """Random numbers of images, given by their indices: float32, for the argument of :meth:`graph`.

        Each row has the height and width of several attempts at a window, relative to a square of the image's area,
        then two numbers from 0 to below 1 for the window's place, and one for the flip.
        """
        count = self._attempts
        (least, most), (thin, wide) = self._ranges
        drawn = uniform(seed, epoch, images, 2 * count + 3)
        areas = least + (most - least) * drawn[:, :count]
        ratios = thin * (wide / thin) ** drawn[:, count : 2 * count]
        parts = np.sqrt(areas / ratios), np.sqrt(areas * ratios), drawn[:, 2 * count :]
        return np.concatenate(parts, axis=1, dtype=np.float32)

    @property
    def _attempts(self) -> int:
        return int(self.options.get("num_attempts", 10))

    @property
    def _ranges(self) -> list[tuple[float, float]]:
        """Ranges of a crop's part of the image's area, and of its ratio of width to height."""
        return [self.options.get(name, default) for name, default in _RANGES.items()]

    def graph(self, jpegs: Any, on_gpu: bool, draws: Any = None) -> Any:
        """Returns the node of decoded images: uint8 HWC RGB, or float32 CHW with ``normalize``.

        Args:
            jpegs: the node of encoded images.
            on_gpu: decode on the GPU.
            draws: the node of what :meth:`draw` returns. None: DALI draws, the same again whenever a pipeline is built.
        """
        module = dali()
        fn, types = module.fn, module.types
        options = {"device": "mixed" if on_gpu else "cpu", "output_type": types.RGB, **self.options}
        upright = options.get("adjust_orientation", True)
        shape = fn.peek_image_shape(jpegs, adjust_orientation=upright, dtype=types.INT32)[:2]
        # What has no header of an image ends here: in batches of 32 and more it would crash DALI 2.4's decoders.
        jpegs = fn.reshape(jpegs, shape=jpegs.shape() + 0 * shape[:1])
        random_crop = self.crop if self.training else None
        if random_crop and draws is None:
            images = fn.decoders.image_random_crop(jpegs, **options)
        else:
            options = {name: value for name, value in options.items() if name not in _OF_CROPS}
            if random_crop:
                start, size = self._window(shape, draws)
                images = fn.decoders.image_slice(jpegs, start=start, shape=size, axes=[0, 1], **options)
            else:
                images = fn.decoders.image(jpegs, **options)
        if self.crop is not None:
            images = fn.resize(images, size=self.crop) if self.training else _middle(images, shape, self.crop)
        return self._finished(images, draws)

    def _finished(self, images: Any, draws: Any) -> Any:
        """Mirrors and normalises decoded images."""
        module = dali()
        fn, types = module.fn, module.types
        mirror = 0
        if self.flip:
            mirror = fn.random.coin_flip() if draws is None else fn.cast(draws[-1] < 0.5, dtype=types.INT32)
        if self.normalize:
            mean, std = (IMAGENET_MEAN, IMAGENET_STD) if isinstance(self.normalize, bool) else self.normalize
            return fn.crop_mirror_normalize(
                images, dtype=types.FLOAT, output_layout="CHW", mean=list(mean), std=list(std), mirror=mirror
            )
        return fn.flip(images, horizontal=mirror) if self.flip else images

    def _window(self, shape: Any, draws: Any) -> tuple[Any, Any]:
        """Start and shape of a random window, distributed as those of ``fn.decoders.image_random_crop``.

        The first attempt that fits counts. After them comes the largest window, which always does.
        """
        module = dali()
        fn, math, types, count = module.fn, module.math, module.types, self._attempts
        (_, most), (thin, wide) = self._ranges
        shape = fn.cast(shape, dtype=types.FLOAT)
        height, width = shape[:1], shape[1:]
        side = math.sqrt(height * width)
        tallest, widest = math.min(height, math.floor(width / thin)), math.min(width, math.floor(height * wide))
        if most < 1:
            smaller = math.min(1, side * most**0.5 / math.sqrt(tallest * widest))
            tallest, widest = math.floor(tallest * smaller), math.floor(widest * smaller)
        heights = math.max(1, fn.cat(math.floor(side * draws[:count] + 0.5), tallest))
        widths = math.max(1, fn.cat(math.floor(side * draws[count : 2 * count] + 0.5), widest))
        fits = (heights <= height) & (widths <= width) & (widths >= thin * heights) & (widths <= wide * heights)
        number = types.Constant(np.arange(count + 1, dtype=np.float32), device="cpu")
        first = number == math.min(count, fn.reductions.min(number + count * (1 - fits)))
        window = fn.stack(*(fn.reductions.sum(first * sides) for sides in (heights, widths)))
        start = math.floor(draws[2 * count : 2 * count + 2] * (shape - window + 1))
        return fn.cast(start, dtype=types.INT32), fn.cast(window, dtype=types.INT32)


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


def _middle(images: Any, shape: Any, crop: tuple[int, int]) -> Any:
    """The middle of images, as torchvision's ``Resize(side * 256 / 224)`` and ``CenterCrop(side)`` give it."""
    module = dali()
    fn, math, types = module.fn, module.math, module.types
    height, width = (round(side * 256 / 224) for side in crop)
    size = math.max(shape * height // shape[0], shape * width // shape[1])
    spare = size - types.Constant(np.array(crop, np.int32), device="cpu")
    start = (spare + 1) // 4 + (spare + 2) // 4  # half of it, rounded to even
    return fn.slice(fn.resize(images, size=fn.cast(size, dtype=types.FLOAT)), start=start, shape=crop, axes=[0, 1])
