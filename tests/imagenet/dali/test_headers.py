"""Headers: heights and widths are those that DALI decodes, whoever read them."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from monai_gds.imagenet.dali.headers import Headers, jpeg_header
from monai_gds.imagenet.dali.pipeline import PipelineFailed
from tests.imagenet.dali.test_decoding import outputs
from tests.imagenet.test_no_images import damaged

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")

HEIGHT, WIDTH = 24, 40


def exif(order: str, orientation: int) -> bytes:
    """Exif data of two fields, of which the second says how the image is turned; ``order`` is that of struct."""
    mark = b"II" if order == "<" else b"MM"
    fields = struct.pack(f"{order}HHIHH", 0x128, 3, 1, 2, 0) + struct.pack(f"{order}HHIHH", 0x112, 3, 1, orientation, 0)
    return b"Exif\0\0" + mark + struct.pack(f"{order}HIH", 42, 8, 2) + fields + bytes(4)


def encoded(mode: str = "RGB", kind: str = "JPEG", **options: Any) -> np.ndarray:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return np.frombuffer(file.getvalue(), np.uint8)


PLAIN = {
    "colours": encoded(), "grey": encoded("L"), "progressive": encoded(progressive=True),
    "subsampled": encoded(subsampling="4:2:0"), "a comment": encoded(comment="\xff\xc0" * 9),
    "restarts": encoded(restart_marker_rows=1), "a profile": encoded(icc_profile=bytes(3000)),
    **{f"Exif {order} {n}": encoded(exif=exif(order, n)) for order in "<>" for n in (1, 2, 3, 4)},
}  # fmt: skip
OTHER = {
    "CMYK": encoded("CMYK"), "PNG": encoded(kind="PNG"), "fill bytes": np.insert(encoded(), 2, 0xFF),
    **{f"Exif {order} {n}": encoded(exif=exif(order, n)) for order in "<>" for n in (5, 6, 7, 8)},
}  # fmt: skip


@pytest.mark.parametrize("upright", [True, False])
def test_shapes_are_those_that_are_decoded(upright: bool) -> None:
    images = [*PLAIN.values(), *OTHER.values()]
    options = {"adjust_orientation": upright}
    found = Headers(len(images), options).shapes(images, None)

    def graph(nodes: dict[str, Any]) -> Any:
        from nvidia.dali import fn

        return fn.decoders.image(nodes["image"], **options)

    assert found.tolist() == [[*image.shape[:2]] for image in outputs(graph, [{"image": images}])]
    assert [HEIGHT, WIDTH] in found.tolist()
    assert ([WIDTH, HEIGHT] in found.tolist()) == upright


@pytest.mark.parametrize("kind", PLAIN)
def test_ordinary_jpegs_cost_no_pipeline(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Headers, "_build", lambda self: pytest.fail("DALI reads the header"))
    assert Headers(1, {}).shapes([PLAIN[kind]], None).tolist() == [[HEIGHT, WIDTH]]


def test_a_jpeg_of_two_colours_is_refused() -> None:
    data = bytearray(encoded().tobytes())
    frame = data.index(b"\xff\xc0")
    data[frame + 2 : frame + 4] = struct.pack(">H", 8 + 3 * 2)
    data[frame + 9] = 2
    del data[frame + 16 : frame + 19]  # the third
    with pytest.raises(PipelineFailed):
        Headers(1, {}).shapes([np.frombuffer(data, np.uint8)], None)


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.long)])
def test_what_is_read_here_dali_reads_in_the_same_way(count: int) -> None:
    random, read = np.random.default_rng(count), 0
    pipe = Headers(1, {})
    for _ in range(count):
        image = np.frombuffer(damaged(random, "JPEG"), np.uint8)
        header = jpeg_header(image)
        if header is None or header.may_turn:
            continue
        read += 1
        try:
            assert pipe._by_dali([image], None).tolist() == [[header.height, header.width]]
        except PipelineFailed as e:
            pytest.fail(f"DALI refuses {bytes(image)!r}: {e}")
    assert read > count // 4
