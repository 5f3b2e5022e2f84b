"""Random windows are distributed as DALI's own, and the middle of an image has torchvision's pixels."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from monai_gds.imagenet.dali.decoding import Decoding
from monai_gds.imagenet.dali.headers import Headers
from monai_gds.imagenet.dali.pipeline import FedPipeline, execution

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")
pytest.importorskip("scipy", reason="SciPy is not installed on this machine")

CPU = torch.device("cpu")


def png(pixels: np.ndarray) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return np.frombuffer(file.getvalue(), np.uint8)


def outputs(graph: Callable[[dict[str, Any]], Any], batches: list[dict[str, Any]]) -> list[torch.Tensor]:
    pipe: FedPipeline[dict[str, Any]] = FedPipeline(
        {name: {} for name in batches[0]}, lambda nodes: {"out": graph(nodes)}, batch_size=len(batches[0]["image"]),
        device=CPU, seed=1, execution=execution(num_threads=2),
    )  # fmt: skip
    return [image for _, out in pipe.run(batches, lambda batch: batch) for image in out["out"]]


def decoded(decoding: Decoding, images: list[np.ndarray], epochs: int = 1) -> list[torch.Tensor]:
    """The images of some epochs, cut where the decoding says."""
    numbers = np.arange(len(images))
    shapes = Headers(len(images), decoding.options).shapes(images, None)
    batches = [{"image": images, **decoding.arrays(0, epoch, numbers, shapes)} for epoch in range(epochs)]
    return outputs(lambda nodes: decoding.graph(nodes["image"], False, nodes), batches)


def windows_of(images: list[torch.Tensor]) -> np.ndarray:
    """(y, x, height, width) of crops of :func:`places`."""
    return np.array([[*image[0, 0, :2].tolist(), *image.shape[:2]] for image in images], float)


def places(height: int, width: int) -> np.ndarray:
    """An image whose pixels say where they are."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(height)[:, None], np.arange(width)
    return png(pixels)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((100, 150), {}),
        pytest.param((200, 20), {}, marks=pytest.mark.long),  # most attempts fail
        pytest.param((1, 17), {}, marks=pytest.mark.long),  # all of them do
        pytest.param((3, 5), {}, marks=pytest.mark.long),
        pytest.param((90, 90), {"random_area": [0.1, 0.3], "random_aspect_ratio": [0.5, 0.9]}, marks=pytest.mark.long),
        pytest.param((90, 20), {"random_area": [0.5, 0.9], "num_attempts": 1}, marks=pytest.mark.long),
        # Attempts fail, and then the largest window: it has too large an area, or no ratio that was asked for.
        ((40, 40), {"random_area": [0.5, 0.6], "random_aspect_ratio": [1.0, 3.0], "num_attempts": 1}),
        ((3, 5), {"random_aspect_ratio": [1.4, 1.4]}),
    ],
)
def test_windows_are_distributed_as_dalis(size: tuple[int, int], options: dict[str, Any]) -> None:
    from nvidia.dali import fn
    from scipy.stats import ks_2samp

    def cut(nodes: dict[str, Any]) -> Any:
        return fn.decoders.image_slice(nodes["image"], start=nodes["start"], shape=nodes["size"], axes=[0, 1])

    image, count = places(*size), 500
    batches: list[dict[str, Any]] = [{"image": [image] * count} for _ in range(4)]
    theirs = windows_of(outputs(lambda nodes: fn.decoders.image_random_crop(nodes["image"], **options), batches))
    decoding, numbers = Decoding((8, 8), options=options), np.arange(count)
    for epoch, batch in enumerate(batches):
        batch.update(decoding.arrays(0, epoch, numbers, np.tile(size, (count, 1))))
    ours = windows_of(outputs(cut, batches))
    for what in (
        lambda w: w[:, 0], lambda w: w[:, 1], lambda w: w[:, 2], lambda w: w[:, 3], lambda w: w[:, 2] * w[:, 3],
        lambda w: w[:, 3] / w[:, 2], lambda w: w[:, 0] / (size[0] - w[:, 2] + 1e-9),
    ):  # fmt: skip
        assert ks_2samp(what(ours), what(theirs), method="asymp").pvalue > 1e-4


def torchvisions(pixels: np.ndarray) -> np.ndarray:
    """``Resize(256, antialias=True)`` and ``CenterCrop(224)``, by the function that they call, in whole numbers."""
    height, width = pixels.shape[:2]
    size = (256, int(256 * width / height)) if height <= width else (int(256 * height / width), 256)
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    image = torch.nn.functional.interpolate(image, size, mode="bilinear", antialias=True, align_corners=False)
    top, left = (round((side - 224) / 2.0) for side in size)
    middle = image.round().clamp(0, 255)[0, :, top : top + 224, left : left + 224]
    return middle.permute(1, 2, 0).numpy()


def test_the_middle_has_torchvisions_pixels() -> None:
    """Of noise, in which a shift by half a pixel is a mean difference of 20."""
    random = np.random.default_rng(0)
    sizes = [(500, 375), (375, 500), (333, 500), (251, 1000), (120, 90), (97, 300), (256, 256), (300, 301), (224, 224)]
    images = [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    found = decoded(Decoding((224, 224), training=False), list(map(png, images)))
    for pixels, middle in zip(images, found, strict=True):
        difference = np.abs(middle.numpy() - torchvisions(pixels))
        assert difference.mean() <= 1 / 255  # measured: at most 0.001
        assert difference.max() <= 1


def test_the_middle_of_another_shape() -> None:
    """As large as fits: both sides are at least 256/224 of the crop's, one of them exactly."""
    image = png(np.full((100, 400, 3), 7, np.uint8))
    for crop in ((112, 224), (20, 300)):
        (found,) = decoded(Decoding(crop, training=False), [image])
        assert tuple(found.shape) == (*crop, 3)
        assert set(found.flatten().tolist()) == {7}


def test_a_picture_that_is_stored_on_its_side_is_cropped_upright() -> None:
    """The orientation of EXIF counts before a window is chosen: it swaps the sides."""
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.zeros((20, 200, 3), np.uint8)).save(file, "JPEG", exif=exif)
    jpegs = [np.frombuffer(file.getvalue(), np.uint8)] * 64
    for adjust in (True, False):
        decoding = Decoding((8, 8), options={"adjust_orientation": adjust, "random_area": (0.99, 1.0)})
        assert len(decoded(decoding, jpegs)) == 64
