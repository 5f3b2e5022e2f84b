"""Makes JPEGs of large images before they are packed, so that there are fewer pixels to decode and bytes to read."""

from __future__ import annotations

import io
from typing import Any

from monai_gds.errors import BackendUnavailable

#: Modes of Pillow with 8 bits per channel. Images in other modes, such as 16-bit PNGs, are left as they are.
_EIGHT_BITS = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")


def smaller_jpeg(image: bytes, max_side: int, quality: int) -> bytes:
    """An encoded image as a JPEG of at most ``max_side`` pixels per side, or unchanged if it has no more.

    The picture is rotated according to its EXIF data, which the JPEG lacks. Colours are RGB, or grey as before; those
    of transparent pixels stay, as decoders see them.

    Raises:
        BackendUnavailable: Pillow is not installed.
        Exception: Pillow cannot decode it.
    """
    module, operations = pillow()
    with module.open(io.BytesIO(image)) as opened:
        if max(opened.size) <= max_side or opened.mode not in _EIGHT_BITS:
            return image
        picture = opened
        if opened.mode not in ("L", "RGB"):  # Pillow would blacken what is transparent, and skip pixels of a palette
            picture = operations.exif_transpose(opened).convert("RGB")
        picture.thumbnail((max_side, max_side), module.Resampling.LANCZOS, reducing_gap=3.0)
        file = io.BytesIO()
        operations.exif_transpose(picture).save(file, "JPEG", quality=quality)
        return file.getvalue()


def pillow() -> tuple[Any, Any]:
    """``PIL.Image`` and ``PIL.ImageOps``. Raises BackendUnavailable where they cannot be imported."""
    try:
        from PIL import Image, ImageOps
    except ImportError as e:
        raise BackendUnavailable(f"making images smaller needs Pillow ({e}): pip install 'monai_gds[bench]'") from e
    return Image, ImageOps
