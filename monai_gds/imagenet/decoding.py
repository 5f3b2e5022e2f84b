"""DALI graphs for images: decode, crop, flip, normalise; and finding the image that a decoder could not read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from monai_gds.imagenet.pipeline import FedPipeline, Input, PipelineFailed, dali

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "Decoding", "broken_images", "reason"]

#: Of ImageNet's training images, RGB, in units of 0 to 255: what torchvision's and DALI's examples use.
IMAGENET_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
IMAGENET_STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)


@dataclass(frozen=True)
class Decoding:
    """What becomes of encoded images.

    Attributes:
        crop: (height, width) of a random resized crop; None for whole images.
        flip: mirror every other image at random.
        normalize: float32 CHW with ImageNet's mean and deviation, or another (mean, std) for values 0 to 255.
        options: for ``fn.decoders.image``: ``device_memory_padding``, ``host_memory_padding``, ``output_type``…
    """

    crop: tuple[int, int] | None = None
    flip: bool = False
    normalize: bool | tuple[Sequence[float], Sequence[float]] = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def graph(self, jpegs: Any, on_gpu: bool) -> Any:
        """The node of decoded images: uint8 HWC RGB, or float32 CHW with ``normalize``."""
        module = dali()
        fn, types = module.fn, module.types
        options = {"device": "mixed" if on_gpu else "cpu", "output_type": types.RGB, **self.options}
        if self.crop is None:
            images = fn.decoders.image(jpegs, **options)
        else:
            images = fn.resize(fn.decoders.image_random_crop(jpegs, **options), size=self.crop)
        mirror = fn.random.coin_flip(probability=0.5) if self.flip else 0
        if self.normalize:
            mean, std = self.normalize if isinstance(self.normalize, tuple) else (IMAGENET_MEAN, IMAGENET_STD)
            return fn.crop_mirror_normalize(
                images, dtype=types.FLOAT, output_layout="CHW", mean=list(mean), std=list(std), mirror=mirror
            )
        return fn.flip(images, horizontal=mirror) if self.flip else images


def broken_images(
    images: Sequence[np.ndarray], device: torch.device, options: Mapping[str, Any]
) -> list[tuple[int, str]]:
    """Decodes images one by one to find those that cannot be.

    Args:
        images: encoded, 1-D uint8, on the host.
        device: as in the pipeline that failed.
        options: for ``fn.decoders.image``.

    Returns:
        (position, what the decoder says) of each that fails.
    """
    decoding = Decoding(options=options)
    on_gpu = device.type == "cuda"
    pipe: FedPipeline[int] = FedPipeline(
        {"image": Input()},
        lambda nodes: {"image": decoding.graph(nodes["image"], on_gpu)},
        batch_size=1,
        device=device,
        threads=1,
    )
    found = []
    for i, image in enumerate(images):
        try:
            for _ in pipe.run([i], _feed(image)):
                pass
        except PipelineFailed as e:
            found.append((i, reason(str(e))))
    return found


def _feed(image: np.ndarray) -> Callable[[int], Mapping[str, Any]]:
    return lambda _: {"image": [image]}


def reason(message: str) -> str:
    """The telling line of DALI's message, which is mostly a traceback."""
    _, _, tail = message.partition("encountered:")
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[0] if lines else message.strip().splitlines()[0]
