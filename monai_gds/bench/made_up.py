"""Made-up volumes and image folders for the demo, the benchmarks and the tutorials: no network, no patients."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nibabel
import numpy as np

from monai_gds.base import cores

#: Mean and deviation of the noise in images, in grey levels. The JPEGs have some 110 kB then, as in ImageNet's training
#: set: 138 GB in 1,281,167 files.
_NOISE = 45, 20


def ct_like(size: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A volume that looks like an abdominal CT, and its labels.

    Args:
        size: voxels along x, y, z.
        seed: equal seeds give equal volumes.

    Returns:
        ``(image, label)``: int16 in Hounsfield units, and uint8 with 1 for the liver-like organ, 2 for the lesion in
        it, 3 for bone.
    """
    rng = np.random.default_rng(seed)
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n, dtype=np.float32) for n in size), indexing="ij", sparse=True)

    def ball(center: Sequence[float], radii: Sequence[float]) -> np.ndarray:
        cx, cy, cz = np.asarray(center) + rng.normal(0, 0.02, 3)
        rx, ry, rz = np.asarray(radii) * rng.uniform(0.9, 1.1, 3)
        inside: np.ndarray = ((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2 + ((z - cz) / rz) ** 2 < 1
        return inside

    body = np.broadcast_to((x / 0.85) ** 2 + (y / 0.65) ** 2 < 1, size)
    liver, lesion = ball((-0.3, 0.05, 0.1), (0.38, 0.35, 0.5)), ball((-0.35, 0.1, 0.15), (0.1, 0.1, 0.15))
    lung = ball((0.4, -0.05, 0.8), (0.3, 0.4, 0.5)) | ball((-0.4, -0.05, 0.9), (0.3, 0.4, 0.4))
    spine = np.broadcast_to((x / 0.12) ** 2 + ((y - 0.4) / 0.12) ** 2 < 1, size)

    image = np.full(size, -1000, dtype=np.float32)
    for part, hounsfield in ((body, 40), (lung & body, -800), (liver, 110), (lesion & liver, 60), (spine & body, 600)):
        image[part] = hounsfield
    noise = rng.standard_normal(size, dtype=np.float32)
    noise *= 12
    image += noise
    label = np.zeros(size, dtype=np.uint8)
    for part, value in ((liver, 1), (lesion & liver, 2), (spine & body, 3)):
        label[part] = value
    np.rint(image, out=image)
    return np.clip(image, -1024, 3071, out=image).astype(np.int16), label


def write_volumes(folder: str | Path, count: int, size: Sequence[int]) -> list[dict[str, str]]:
    """Writes volumes as ``imagesTr/case_N.nii.gz`` and ``labelsTr/case_N.nii.gz``, where missing.

    Args:
        folder: made if it is missing.
        count: how many pairs to write.
        size: voxels along x, y, z; each has 1.5 x 1.5 x 2 mm.

    Returns:
        The pairs, as :func:`find_pairs` gives them.
    """
    folder = Path(folder)
    affine = np.diag([1.5, 1.5, 2.0, 1.0])
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True, exist_ok=True)

    def write(i: int) -> None:
        paths = [folder / name / f"case_{i:03d}.nii.gz" for name in ("imagesTr", "labelsTr")]
        if not all(path.exists() for path in paths):
            for path, volume in zip(paths, ct_like(size, seed=i), strict=True):
                part = path.with_name(f".{path.name}.part.nii.gz")
                nibabel.save(nibabel.Nifti1Image(volume, affine), part)
                part.rename(path)

    with ThreadPoolExecutor(min(8, cores.usable())) as pool:  # each takes a few times the volume's memory
        list(pool.map(write, range(count)))
    return find_pairs(folder)[:count]


def find_pairs(folder: str | Path) -> list[dict[str, str]]:
    """Pairs of image and label in a folder with the layout of the Medical Segmentation Decathlon.

    Args:
        folder: holds ``imagesTr/`` and ``labelsTr/`` with NIfTI files of equal names.

    Returns:
        ``[{"image": path, "label": path}, ...]`` sorted by name.

    Raises:
        FileNotFoundError: one of the two folders is missing, or no image has a label.
    """
    images, labels = Path(folder) / "imagesTr", Path(folder) / "labelsTr"
    for part in (images, labels):
        if not part.is_dir():
            raise FileNotFoundError(f"{part} is missing: the folder must hold imagesTr/ and labelsTr/")
    found = [p for p in sorted(images.iterdir()) if p.name.endswith((".nii", ".nii.gz")) and p.name[0] != "."]
    pairs = [{"image": str(p), "label": str(labels / p.name)} for p in found if (labels / p.name).exists()]
    if not pairs:
        raise FileNotFoundError(f"no NIfTI file of {images} has a file of the same name in {labels}")
    return pairs


def jpeg(random: np.random.Generator, height: int, width: int, noise: float = 0, text: str = "") -> bytes:
    """Makes a JPEG of smooth colours, with noise of this standard deviation, in grey levels.

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
    grains = random.standard_normal((height, width, 1), dtype=np.float32)
    pixels = np.clip(np.asarray(canvas, dtype=np.float32) + noise * grains, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_image_folder(
    root: Path, count: int, *, per_class: int = 100, progress: Callable[[int], None] | None = None
) -> Path:
    """Writes JPEGs of about 500 by 375 pixels, each showing its name, in classes named like ImageNet's.

    Args:
        root: a new folder.
        count: how many images to write; the same files every time.
        per_class: how many of them a class gets.
        progress: is called with the number of images written so far.

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
        noise = np.clip(random.normal(*_NOISE), 5, 90)
        height, width = (375, 500) if random.random() < 0.75 else (500, 375)
        folder = root / name
        folder.mkdir(exist_ok=True)
        text = f"{name}\n{of_class}"
        data = jpeg(random, height - int(random.integers(50)), width - int(random.integers(50)), noise, text)
        (folder / f"{name}_{of_class}.JPEG").write_bytes(data)

    with ThreadPoolExecutor() as pool:
        for done, _ in enumerate(pool.map(write, range(count)), start=1):
            if progress is not None:
                progress(done)
    return root
