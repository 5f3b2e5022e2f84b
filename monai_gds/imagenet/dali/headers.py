"""What is read of encoded images before they are decoded: heights, widths, and whether DALI may refuse them."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from monai_gds.imagenet.dali.pipeline import PipelineFailed, dali, tensor_list


class Headers:
    """Upright heights and widths of encoded images.

    Those of ordinary JPEGs are read here, 64 in 0.3 ms. DALI reads the others in a pipeline of its own, which runs in
    the caller's thread: 64 took 2.4 to 4.4 ms there, beside two threads that decode. In the pipeline that decodes,
    arithmetic on shapes would take an operator per step: 7 ms for 64 images with 16 threads, where decoding on an H200
    takes 5. Headers are read in every epoch, since a file may have been replaced. DALI 2.4's decoders can crash in a
    batch of more than 4 images per thread if they refuse a header or a window: if the calling thread's share fails, it
    frees memory that the others still use.
    """

    def __init__(self, batch_size: int, decoder: Mapping[str, Any]) -> None:
        self._batch_size = batch_size
        self._upright = decoder.get("adjust_orientation", True)
        self._pipe: Any = None

    def shapes(self, images: Sequence[np.ndarray], feed: Any) -> np.ndarray:
        """Heights and widths, int32 (images, 2), of encoded images, each 1-D uint8.

        Raises PipelineFailed, with ``feed``, if one of them has no header of an image, or an impossible one.
        """
        shapes = np.empty((len(images), 2), np.int32)
        others = []
        for i, image in enumerate(images):
            header = jpeg_header(image)
            if header is None or (header.may_turn and self._upright):
                others.append(i)
            else:
                shapes[i] = header.height, header.width
        if others:
            shapes[others] = self._by_dali([images[i] for i in others], feed)
        return shapes

    def _by_dali(self, images: Sequence[np.ndarray], feed: Any) -> np.ndarray:
        pipe, self._pipe = self._pipe or self._build(), None  # one that fails cannot be used again
        try:
            pipe.feed_input("image", tensor_list(images))
            (output,) = pipe.run()
        except RuntimeError as e:
            raise PipelineFailed(e, [feed]) from e
        self._pipe = pipe
        shapes = np.array(output.as_tensor())
        if (shapes <= 0).any():
            raise PipelineFailed(ValueError("its header states a size of 0, or of more than 2**31 - 1"), [feed])
        return shapes[:, :2]

    def _build(self) -> Any:
        module = dali()
        pipe = module.Pipeline(
            self._batch_size, 1, None, prefetch_queue_depth=1, exec_async=False, exec_pipelined=False,
            exec_dynamic=False,
        )  # fmt: skip
        with pipe:
            encoded = module.fn.external_source(name="image", no_copy=True)
            shape = module.fn.peek_image_shape(
                encoded, adjust_orientation=self._upright, dtype=module.types.INT32, image_type=module.types.ANY_DATA
            )
            pipe.set_outputs(shape)
        pipe.build()
        return pipe

    def discard(self) -> None:
        """Frees the pipeline."""
        self._pipe = None


class JpegHeader(NamedTuple):
    """What :func:`jpeg_header` finds."""

    height: int
    width: int
    may_turn: bool  # whether its Exif data may say that an upright image has the other height and width


def jpeg_header(image: np.ndarray) -> JpegHeader | None:
    """Reads the header of an ordinary JPEG, as DALI does; None for whatever else the bytes are.

    Ordinary is a chain of segments up to a first scan, with one frame header: of a baseline, extended or progressive
    image of 8 bits, not lossless or arithmetic, in grey or three colours (ITU T.81, B.2.2).
    """
    data = image.data
    if bytes(data[:2]) != b"\xff\xd8":
        return None
    at, frame, exif = 2, 0, False
    while at + 10 <= len(data) and data[at] == 0xFF and 0xC0 <= (marker := data[at + 1]) < 0xFF:
        if marker == _SCAN:
            break
        if marker <= 0xCF and marker not in _NO_FRAMES:
            if frame or marker not in _FRAMES:
                return None
            frame = at
        exif |= marker == _APP1
        at += 2 + (data[at + 2] << 8 | data[at + 3])
    else:
        return None
    _, _, size, bits, height, width, components = _FRAME.unpack_from(data, frame)
    if not frame or bits != 8 or not height or not width or components not in (1, 3) or size != 8 + 3 * components:
        return None
    return JpegHeader(height, width, exif and any(turned.search(data[:at]) for turned in _TURNED))


def has_plain_samples(image: np.ndarray) -> bool:
    """Whether the header of an encoded image, which can be read, shows that DALI decodes samples of its type.

    False for TIFF and JPEG 2000, whose samples may be of 32 bits, and for a JPEG that is not an ordinary one.
    """
    start = bytes(image.data[:4])
    return start not in _OTHERS and (start[:2] != b"\xff\xd8" or jpeg_header(image) is not None)


#: TIFF, BigTIFF, JPEG 2000 in a file and its bare codestream.
_OTHERS = {b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"\0\0\0\x0c", b"\xff\x4f\xff\x51"}
_SCAN, _APP1 = 0xDA, 0xE1
_FRAMES = {0xC0, 0xC1, 0xC2}
_NO_FRAMES = {0xC4, 0xC8, 0xCC}  # tables of codes, an extension, and arithmetic conditioning
#: A frame header: marker, size, bits per sample, height, width, components.
_FRAME = struct.Struct(">BBHBHHB")
#: Where Exif's orientation (tag 0x112) might be 5 to 8, in big-endian data and in little-endian.
_TURNED = [re.compile(pattern, re.DOTALL) for pattern in (rb"\x01\x12.{6}\0[\5-\x08]", rb"\x12\x01.{6}[\5-\x08]\0")]
