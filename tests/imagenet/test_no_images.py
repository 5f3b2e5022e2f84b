"""Files that are no images end no process, whatever they are, in batches large enough for DALI's decoders to crash."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from monai_gds.bench.made_up import jpeg
from monai_gds.errors import BrokenImage
from monai_gds.imagenet import ImageNetDataset
from tests.fresh import Interpreter

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")

COUNT = 128


def encoded(random: np.random.Generator, kind: str) -> bytes:
    """A whole image."""
    if kind == "JPEG":
        return jpeg(random, *random.integers(20, 90, 2).tolist())
    file = io.BytesIO()
    pixels = random.integers(0, 256, (*random.integers(20, 60, 2), 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def no_images() -> list[bytes]:
    """What servers, cameras and full disks leave instead of an image."""
    random = np.random.default_rng(0)
    whole = encoded(random, "JPEG")
    cut = [
        encoded(random, kind)[:length] for kind in ("JPEG", "PNG", "TIFF", "BMP", "WEBP", "PPM") for length in (9, 20)
    ]
    heic = b"\0\0\0\x24ftypheic\0\0\0\0mif1heic" + bytes(2000)
    html = b"<!DOCTYPE html><title>404</title>" * 50
    return [html, heic, bytes(5000), b"\0", whole[:100], whole[:2], encoded(random, "GIF"), *cut]


def refused() -> dict[str, bytes]:
    """Headers that can be read, of images that DALI's decoders refuse before they decode."""
    random = np.random.default_rng(0)
    deep, wide = (bytearray(encoded(random, kind)) for kind in ("JPEG", "PNG"))
    frame = deep.index(b"\xff\xc0")
    first = bytes(deep[: frame + 19])
    deep[frame + 4] = 99
    wide[16:20] = b"\xa6" * 4
    wide[29:33] = struct.pack(">I", zlib.crc32(wide[12:29]))
    integers = io.BytesIO()
    Image.fromarray(np.zeros((9, 9), np.int32)).save(integers, "TIFF")
    codestream = io.BytesIO()
    Image.fromarray(np.zeros((40, 56), np.uint8)).save(codestream, "JPEG2000", no_jp2=True)
    jpeg2000 = bytearray(codestream.getvalue())
    jpeg2000[42] = 31  # bits per sample, less one
    return {
        "99 bits per sample": bytes(deep), "a second frame header": first + bytes(deep[frame:]),
        "integers of 32 bits": integers.getvalue(), "JPEG 2000 of 32 bits": bytes(jpeg2000),
        "no rows": b"P5 9 0 255 ", "a width above 2**31": bytes(wide),
    }  # fmt: skip


def _epochs(root: str, crop: tuple[int, int] | None) -> tuple[list[int], list[str]]:
    ours = ImageNetDataset(root, 64, device="cpu", crop=crop, skip_broken=True, num_threads=4)
    counts = []
    for _ in range(2):
        counts.append(sum(len(batch["label"]) for batch in ours))
        ours.close()
    return counts, sorted(ours.broken)


@pytest.mark.parametrize("crop", [None, pytest.param((16, 16), marks=pytest.mark.long)])
def test_files_that_are_no_images_are_skipped(
    tmp_path: Path, interpreter: Interpreter, crop: tuple[int, int] | None
) -> None:
    random = np.random.default_rng(1)
    bad = {int(i): data for i, data in zip(random.permutation(COUNT), no_images(), strict=False)}
    for i in range(COUNT):
        (tmp_path / f"{i:03}.JPEG").write_bytes(bad.get(i) or encoded(random, "JPEG"))
    with interpreter.process() as process:
        counts, broken = process.call(_epochs, str(tmp_path), crop)
    assert counts == [COUNT, COUNT]
    assert broken == [f"{tmp_path}/{i:03}.JPEG" for i in sorted(bad)]


@pytest.mark.parametrize("kind", refused())
def test_refused_images_are_skipped(tmp_path: Path, interpreter: Interpreter, kind: str) -> None:
    random = np.random.default_rng(1)
    for i in range(COUNT):
        (tmp_path / f"{i:03}.JPEG").write_bytes(refused()[kind] if i % 4 == 0 else encoded(random, "JPEG"))
    with interpreter.process() as process:
        counts, broken = process.call(_epochs, str(tmp_path), (16, 16))
    assert counts == [COUNT, COUNT]
    assert broken == [f"{tmp_path}/{i:03}.JPEG" for i in range(0, COUNT, 4)]


def test_without_skipping_one_of_them_is_named(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for i in range(64):
        (tmp_path / f"{i:03}.JPEG").write_bytes(b"<html>" * 99 if i == 40 else encoded(random, "JPEG"))
    with pytest.raises(BrokenImage, match=r"040\.JPEG"):
        list(ImageNetDataset(tmp_path, 64, device="cpu"))


def damaged(random: np.random.Generator, *kinds: str) -> bytes:
    """An image with damage in its first bytes, where its header is."""
    kinds = kinds or ("JPEG", "JPEG", "PNG", "TIFF", "BMP", "WEBP", "PPM")
    data = bytearray(encoded(random, str(random.choice(kinds))))
    way = random.integers(5)
    if way == 0:
        return bytes(data[: random.integers(1, len(data))])
    if way == 1:
        at = int(random.integers(min(200, len(data))))
        return bytes(data[:at] + data[at + int(random.integers(1, 40)) :]) or b"\0"
    if way == 2:
        at = int(random.integers(min(200, len(data) - 4)))
        data[at : at + 4] = struct.pack(">I", int(random.choice([0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF])))
        return bytes(data)
    for _ in range(int(random.integers(1, 9))):
        data[int(random.integers(min(300 if way == 3 else len(data), len(data))))] = int(random.integers(256))
    return bytes(data)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_damaged_headers_crash_nothing(tmp_path: Path, interpreter: Interpreter, seed: int) -> None:
    random = np.random.default_rng(seed)
    for i in range(COUNT):
        data = encoded(random, "JPEG") if random.random() < 0.7 else damaged(random)
        (tmp_path / f"{i:03}.JPEG").write_bytes(data)
    with interpreter.process() as process:
        counts, _ = process.call(_epochs, str(tmp_path), (16, 16) if seed % 2 else None)
    assert counts == [COUNT, COUNT]
