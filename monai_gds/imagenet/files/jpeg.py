"""Finds the end of a JPEG that was read in whole blocks of a disk (ITU-T T.81, annex B).

Neither the first nor the last end-of-image marker in the bytes need be the image's: previews in its metadata have one,
and so may the data after the image. So the segments are followed from the beginning, by their lengths. In the coded
data of a scan, 0xFF is a marker unless 0x00 or a restart marker follows.
"""

from __future__ import annotations

import re

import numpy as np

_FILL = re.compile(rb"\xff+")
_AFTER_A_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_END, _SCAN = 0xD9, 0xDA

#: Bytes of a file system's block, at most, on most machines. A file ends in its last block.
_BLOCK = 4096


def jpeg_nbytes(data: np.ndarray) -> int | None:
    """The size in bytes of the JPEG file in whole blocks of uint8; None if the blocks do not show it.

    They show it if the image ends in the last 4096 bytes and only zeros follow. Otherwise they hold no JPEG, or one
    with other data after it.
    """
    end = _end(data.data)
    if end is None or len(data) - end >= _BLOCK or data[end:].any():
        return None
    return end


def _end(data: memoryview) -> int | None:
    """The first byte after the end-of-image marker."""
    at = 2
    if bytes(data[:at]) != b"\xff\xd8":
        return None
    while (fill := _FILL.match(data, at)) is not None and fill.end() < len(data):
        marker, at = data[fill.end()], fill.end() + 1
        if marker == _END:
            return at
        length = int.from_bytes(data[at : at + 2], "big")
        if length < 2:
            return None
        at += length
        if marker == _SCAN:
            found = _AFTER_A_SCAN.search(data, at)
            if found is None:
                return None
            at = found.start()
    return None
