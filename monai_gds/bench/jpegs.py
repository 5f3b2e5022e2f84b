"""Made-up image folders in ImageNet's layout, for benchmarks, tests and demonstrations."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

__all__ = ["MEAN_BYTES", "jpeg", "write_image_folder"]

#: Average size of the JPEGs in ImageNet's training set: 138 GB in 1,281,167 files.
MEAN_BYTES = 110_000


def jpeg(random: np.random.Generator, height: int, width: int, nbytes: int | None = None, text: str = "") -> bytes:
    """Makes a JPEG of smooth colours with noise: ``nbytes`` large within 5%, or without noise if that is None.

    The text across its middle is for the viewer: it shows which picture it is, and whether it is mirrored.
    """
    from PIL import Image, ImageDraw, ImageFont

    small = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    canvas = small.resize((width, height), Image.Resampling.BICUBIC)
    if text:
        font = ImageFont.load_default(size=height / 6)
        middle = (width / 2, height / 2)
        ImageDraw.Draw(canvas).text(
            middle, text, "white", font, "mm", align="center", stroke_width=4, stroke_fill="black"
        )
    smooth = np.asarray(canvas, dtype=np.float32)
    noise = random.standard_normal((height, width, 1), dtype=np.float32) if nbytes else np.float32(0)
    low, high, data = 0.0, 80.0, b""
    for _ in range(10):  # more noise makes a larger file
        level = (low + high) / 2
        file = io.BytesIO()
        pixels = np.clip(smooth + level * noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(file, "JPEG", quality=90)
        data = file.getvalue()
        if nbytes is None or abs(len(data) - nbytes) < nbytes / 20:
            break
        low, high = (level, high) if len(data) < nbytes else (low, level)
    return data


def write_image_folder(
    root: Path, count: int, *, per_class: int = 100, progress: Callable[[int], None] | None = None
) -> Path:
    """Writes JPEGs of about 500 by 375 pixels, each showing its name, in classes named like ImageNet's.

    Args:
        root: a new folder.
        count: number of images; the same files every time.
        per_class: images per class.
        progress: called with the number of images written so far.

    Raises:
        FileExistsError: ``root`` exists.
        ImportError: Pillow is missing.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as e:
        raise ImportError(f"making images needs Pillow ({e}): pip install 'monai_gds[bench]'") from e
    root.mkdir(parents=True)

    def write(index: int) -> None:
        number, of_class = divmod(index, per_class)
        name = f"n{1440764 + 3 * number:08d}"
        random = np.random.default_rng([0, index])
        size = int(np.clip(random.normal(1, 0.25), 0.4, 1.8) * MEAN_BYTES)
        height, width = (375, 500) if random.random() < 0.75 else (500, 375)
        folder = root / name
        folder.mkdir(exist_ok=True)
        text = f"{name}\n{of_class}"
        data = jpeg(random, height - int(random.integers(50)), width - int(random.integers(50)), size, text)
        (folder / f"{name}_{of_class}.JPEG").write_bytes(data)

    with ThreadPoolExecutor() as pool:
        for done, _ in enumerate(pool.map(write, range(count)), start=1):
            if progress is not None:
                progress(done)
    return root
