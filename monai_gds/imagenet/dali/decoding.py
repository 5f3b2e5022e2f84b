"""The DALI graph of images: decode, crop, flip, normalise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monai_gds.imagenet.dali.pipeline import dali

#: Mean and standard deviation of ImageNet's training images, RGB, for values of 0 to 255, as in torchvision's examples.
IMAGENET_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
IMAGENET_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)


@dataclass(frozen=True)
class Decoding:
    """How encoded images are decoded and transformed; see :class:`~monai_gds.imagenet.dataset.ImageNetDataset`.

    ``(mean, std)`` of ``normalize`` are for values of 0 to 255; ``options`` are those of ``fn.decoders.image``.
    """

    crop: tuple[int, int] | None = None
    flip: bool = False
    normalize: bool | tuple[Sequence[float], Sequence[float]] = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises a ValueError for a ``normalize`` that cannot be used: now, and not at the first batch."""
        if self.normalize and not isinstance(self.normalize, bool):
            try:
                _, _ = (tuple(map(float, part)) for part in self.normalize)
            except (TypeError, ValueError) as e:
                raise ValueError(
                    f"normalize={self.normalize!r}: use True, or (mean, std), each a number per channel"
                ) from e

    def graph(self, jpegs: Any, on_gpu: bool) -> Any:
        """Returns the node of decoded images: uint8 HWC RGB, or float32 CHW with ``normalize``."""
        module = dali()
        fn, types = module.fn, module.types
        options = {"device": "mixed" if on_gpu else "cpu", "output_type": types.RGB, **self.options}
        if self.crop is None:
            images = fn.decoders.image(jpegs, **options)
        else:
            images = fn.resize(fn.decoders.image_random_crop(jpegs, **options), size=self.crop)
        mirror = fn.random.coin_flip(probability=0.5) if self.flip else 0
        if self.normalize:
            mean, std = (IMAGENET_MEAN, IMAGENET_STD) if isinstance(self.normalize, bool) else self.normalize
            return fn.crop_mirror_normalize(
                images, dtype=types.FLOAT, output_layout="CHW", mean=list(mean), std=list(std), mirror=mirror
            )
        return fn.flip(images, horizontal=mirror) if self.flip else images
