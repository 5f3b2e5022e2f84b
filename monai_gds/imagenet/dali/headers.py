"""What is read of encoded images before they are decoded: heights, widths, and whether DALI may refuse them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from monai_gds.imagenet.dali.pipeline import PipelineFailed, dali


class Headers:
    """Upright heights and widths of encoded images.

    DALI reads them in a pipeline of its own, which runs in the caller's thread. In the pipeline that decodes,
    arithmetic on shapes would take an operator per step: 7 ms for 64 images with 16 threads, where decoding on an H200
    takes 5. Headers are read in every epoch, since a file may have been replaced. DALI 2.4's decoders can crash in a
    batch of more than 4 images per thread if they refuse a header or a window: if the calling thread's share fails, it
    frees memory that the others still use.
    """

    def __init__(self, batch_size: int, decoder: Mapping[str, Any]) -> None:
        self._batch_size = batch_size
        self._upright = decoder.get("adjust_orientation", True)
        self._pipe: Any = None

    def shapes(self, encoded: Any, feed: Any) -> np.ndarray:
        """Heights and widths, int32 (images, 2), of encoded images, as ``tensor_list`` gives them.

        Raises PipelineFailed, with ``feed``, if one of them has no header of an image, or an impossible one.
        """
        pipe, self._pipe = self._pipe or self._build(), None  # one that fails cannot be used again
        try:
            pipe.feed_input("image", encoded)
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


def has_plain_samples(image: np.ndarray) -> bool:
    """Whether the header of an encoded image, which can be read, shows that DALI decodes samples of its type.

    False for TIFF and JPEG 2000, whose samples may be of 32 bits, and for a JPEG that is not a chain of segments up to
    its first scan (ITU T.81, B.2.2), or has samples of more than 16 bits. Of several frame headers the last one counts.
    """
    data = image.data
    if bytes(data[:4]) in _OTHERS:
        return False
    if bytes(data[:2]) != b"\xff\xd8":
        return True
    at = 2
    while at + 5 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xFF:
        marker = data[at + 1]
        if marker == _SCAN:
            return True
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAMES and data[at + 4] > 16:
            return False
        at += 2 + (data[at + 2] << 8 | data[at + 3])
    return False


#: TIFF, BigTIFF, JPEG 2000 in a file and its bare codestream.
_OTHERS = {b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"\0\0\0\x0c", b"\xff\x4f\xff\x51"}
_SCAN = 0xDA
_NO_FRAMES = {0xC4, 0xC8, 0xCC}  # tables of codes, an extension, and arithmetic conditioning
