"""Squirrel's Messagepack stores of images, for the comparisons of feeding DALI."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from monai_gds.errors import BackendUnavailable, BrokenImage
from monai_gds.imagenet.files.listing import ImageList, StrPath
from monai_gds.imagenet.files.packing import empty_folder

__all__ = ["write_store"]


def write_store(
    images: ImageList,
    out: StrPath,
    *,
    size: int = 300,
    shard_size: int = 1000,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a Messagepack store of samples ``{"image": uint8 (3, size, size), "label": int}``.

    Args:
        images: what to store. Each is decoded, rotated according to its EXIF data, resized to ``size`` at its shorter
            side, and cropped at the centre.
        out: an empty folder, created if missing.
        size: height and width in pixels.
        shard_size: samples per file.
        progress: called with the number of images stored so far.

    Raises:
        BackendUnavailable: squirrel-core or Pillow is not installed.
        BrokenImage: an image cannot be decoded.
        ImageListError: ``out`` is not empty, or is a file.
        ValueError: ``size`` or ``shard_size`` is not positive.
    """
    try:
        from PIL import Image  # noqa: F401
        from squirrel.serialization import MessagepackSerializer
        from squirrel.store import SquirrelStore
    except ImportError as e:
        raise BackendUnavailable(
            f"a Squirrel store needs squirrel-core and Pillow ({e}): pip install 'monai_gds[squirrel]'"
        ) from e
    if size < 1 or shard_size < 1:
        raise ValueError(f"size={size} and shard_size={shard_size} must be positive")
    top = empty_folder(out)
    store = SquirrelStore(os.fspath(top), serializer=MessagepackSerializer())
    for start in range(0, len(images), shard_size):
        stop = min(start + shard_size, len(images))
        shard = [{"image": _pixels(images.path(i), size), "label": int(images.labels[i])} for i in range(start, stop)]
        store.set(shard, key=f"{start // shard_size:05d}")
        if progress is not None:
            progress(stop)


def _pixels(path: str, size: int) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            turned = ImageOps.exif_transpose(image).convert("RGB")
            fitted = ImageOps.fit(turned, (size, size), Image.Resampling.BILINEAR)
    except FileNotFoundError:
        raise
    except Exception as e:  # Pillow raises errors of many types
        raise BrokenImage(path, f"it cannot be decoded: {e}") from e
    return np.ascontiguousarray(np.asarray(fitted).transpose(2, 0, 1))
