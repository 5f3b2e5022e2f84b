"""Where a JPEG ends: by its structure, whatever its metadata and the blocks behind it hold."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from monai_gds.bench.made_up import jpeg
from monai_gds.imagenet.files.jpeg import jpeg_nbytes


def picture(side: int = 200, **how: Any) -> bytes:
    """Noise, whose coded data has bytes of every value."""
    file = io.BytesIO()
    pixels = np.random.default_rng(side).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(how.pop("mode", "RGB")).save(file, "JPEG", **how)
    return file.getvalue()


def found(data: bytes) -> int | None:
    return jpeg_nbytes(np.frombuffer(data, np.uint8))


PREVIEW = b"Exif\0\0" + jpeg(np.random.default_rng(0), 16, 16)  # has an end-of-image marker of its own

KINDS: list[dict[str, Any]] = [
    {}, {"quality": 100}, {"progressive": True}, {"mode": "L"}, {"mode": "CMYK"}, {"exif": PREVIEW},
    {"comment": b"\xff\xd9 no end \xff\xd9"}, {"optimize": True}, {"restart_marker_blocks": 1}, {"side": 3},
]  # fmt: skip


@pytest.mark.parametrize("how", KINDS, ids=str)
@pytest.mark.parametrize("block", [512, 4096])
def test_every_kind_of_jpeg_in_whole_blocks(how: dict[str, Any], block: int) -> None:
    data = picture(**how)
    for slack in (0, 1, -len(data) % block):
        assert found(data + bytes(slack)) == len(data)


def test_what_lies_behind_the_image_is_not_cut_off_without_need() -> None:
    data = picture()
    assert found(data + b"a second picture" + bytes(400)) is None
    assert found(data + data + bytes(400)) is None
    assert found(data + bytes(4096)) is None
    assert found(data + b"\xff\xd9" + bytes(400)) is None


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", b"\xff\xd8", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n" + bytes(500),
        b"\xff\xd8\xff\xe0\x00\x01\xff\xd9",
        b"\xff\xd8\xff\xe0\xff\xff", b"\xff\xd8\xff\xda\x00\x02" + b"\xff\x00" * 100, b"\xff\xd8" + b"\xff" * 4_000_000,
        b"\xff\xd8\xff\xda\x00\x02" + b"\xff" * 4_000_000,
    ],
)  # fmt: skip
def test_what_is_no_whole_jpeg(data: bytes) -> None:
    assert found(data) is None


@pytest.mark.parametrize("length", range(2, 400, 7))
def test_one_that_is_cut_off_ends_nowhere(length: int) -> None:
    assert found(picture(8)[:length]) is None
