"""Blocks of LZ4 and Zstd, many per call, by C-Blosc2's library through ctypes.

Used by :mod:`monai_gds.tiles.tiles`. Each block goes through Blosc2's byte shuffle and then through the codec, into one
plain LZ4 block or Zstd frame. Other decoders of these formats read them too, such as nvCOMP on a GPU. A block that does
not get smaller is stored, shuffled. A block of equal bytes takes no room.

The Python package blosc2 is not imported: that takes 0.4 s, and its functions keep the interpreter's lock. Only the
library in its wheel is loaded. Its chunks are specified in C-Blosc2's README_CHUNK_FORMAT.rst:

    32 bytes  header: format versions, flags, element size, bytes, block bytes, compressed bytes, filters, codec
    int32     where each block begins in the chunk
    blocks    int32 size, then the stream; 0: zeros; -v, then a byte 1: each byte is v; the block's own size: stored

Blosc2 accepts gaps between blocks and any order. So a header in front of any selection of streams makes a chunk of
them, and one native call decodes it (:func:`decompress`).
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from monai_gds.base.library import library, problem_with
from monai_gds.errors import DamagedRecord, MonaiGdsError
from monai_gds.tiles.codecs import ON_CPU

HEADER_BYTES = 32

#: Most bytes in a chunk, compressed or not.
MOST_BYTES = (1 << 31) - 1 - HEADER_BYTES

_SHUFFLE = 1
_NEVER_SPLIT = 2

#: Version 5 of the chunk format; its flags for an extended header (1, 4) and blocks of one stream each (16).
_FORMAT = 5
_FLAGS = 0x15
_STORED_CHUNK = 2

#: At 8 v, the entry of a block whose bytes are all v: its size -v and a byte 1.
_CONSTANTS = np.array([(-v, 1) for v in range(256)], np.int32).reshape(-1).view(np.uint8)
_HINT = "pip install 'monai_gds[tiles]'"


class _CompressionSettings(ctypes.Structure):
    """``blosc2_cparams``; fields after the filters stay zero."""

    _fields_ = (
        ("compcode", ctypes.c_uint8), ("compcode_meta", ctypes.c_uint8), ("clevel", ctypes.c_uint8),
        ("use_dict", ctypes.c_int), ("typesize", ctypes.c_int32), ("nthreads", ctypes.c_int16),
        ("blocksize", ctypes.c_int32), ("splitmode", ctypes.c_int32), ("schunk", ctypes.c_void_p),
        ("filters", ctypes.c_uint8 * 6), ("filters_meta", ctypes.c_uint8 * 6), ("rest", ctypes.c_byte * 256),
    )  # fmt: skip


class _DecompressionSettings(ctypes.Structure):
    """``blosc2_dparams``."""

    _fields_ = (("nthreads", ctypes.c_int16), ("schunk", ctypes.c_void_p), ("rest", ctypes.c_byte * 128))


_RUN = ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32

#: What each function returns, and its arguments.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "blosc2_init": (None,),
    "blosc2_create_cctx": (ctypes.c_void_p, _CompressionSettings),
    "blosc2_create_dctx": (ctypes.c_void_p, _DecompressionSettings),
    "blosc2_free_ctx": (None, ctypes.c_void_p),
    "blosc2_compress_ctx": _RUN,
    "blosc2_decompress_ctx": _RUN,
}


class Blocks(NamedTuple):
    """Compressed blocks.

    Attributes:
        data: the streams, 1-D uint8.
        starts: where each block's stream begins in ``data``, int64.
        sizes: bytes of each stream, int64. At most 0 for a block without one, each byte of which is ``-size``.
    """

    data: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


def why_not() -> str | None:
    """Why nothing can be compressed or decompressed here; None if it can."""
    return problem_with(_library)


def compress(blocks: torch.Tensor, codec: str) -> Blocks:
    """Compresses blocks of equal size.

    Args:
        blocks: contiguous CPU tensor of at most :data:`MOST_BYTES`, a block per row. Its element size is the shuffle's.
        codec: one of :data:`monai_gds.tiles.codecs.ON_CPU`.

    Raises:
        ValueError: there are more bytes than that.
        MonaiGdsError: the library is missing, or it failed.
    """
    if blocks.nbytes > MOST_BYTES:
        raise ValueError(f"{blocks.nbytes} bytes are more than Blosc2 takes at once")
    lib = _library()
    ours = ON_CPU[codec]
    count, block_bytes = len(blocks), blocks[0].nbytes
    settings = _CompressionSettings(
        compcode=ours.code, clevel=ours.level, typesize=blocks.element_size(), nthreads=1, blocksize=block_bytes,
        splitmode=_NEVER_SPLIT,
    )  # fmt: skip
    settings.filters[-1] = _shuffle(blocks)
    chunk = np.empty(HEADER_BYTES + count * (block_bytes + 8), np.uint8)
    context = lib.blosc2_create_cctx(settings)
    if not context:
        raise MemoryError("Blosc2 has no memory to compress with")
    got = lib.blosc2_compress_ctx(context, blocks.data_ptr(), blocks.nbytes, chunk.ctypes.data, chunk.nbytes)
    lib.blosc2_free_ctx(context)
    if got <= 0 or chunk[2] & _STORED_CHUNK:
        raise MonaiGdsError(f"Blosc2 could not compress {blocks.nbytes} bytes (error {got})")
    if got == HEADER_BYTES:  # zeros only
        zeros = np.zeros(count, np.int64)
        return Blocks(chunk[:0], zeros, zeros)
    at = chunk[HEADER_BYTES : HEADER_BYTES + 4 * count].view(np.int32).astype(np.int64)
    sizes = chunk[at[:, None] + np.arange(4)].view(np.int32)[:, 0].astype(np.int64)
    return Blocks(chunk[:got], at + 4, sizes)


def head_bytes(count: int) -> int:
    """Bytes that :func:`decompress` needs before the streams of ``count`` blocks, a multiple of 16."""
    return -(-(HEADER_BYTES + 4 * count + len(_CONSTANTS)) // 16) * 16


def decompress(buffer: np.ndarray, starts: np.ndarray, sizes: np.ndarray, codec: str, out: torch.Tensor) -> None:
    """Decompresses blocks in one native call, without the interpreter's lock.

    Args:
        buffer: 1-D uint8, of at most :data:`MOST_BYTES`, with :func:`head_bytes` at the front and 4 bytes before each
            stream, which are overwritten.
        starts: where each stream begins in the buffer, int64; anything for a block without one.
        sizes: as in :class:`Blocks`.
        codec: one of :data:`monai_gds.tiles.codecs.ON_CPU`.
        out: contiguous CPU tensor, a row per block.

    Raises:
        DamagedRecord: the streams are not what was compressed.
        MonaiGdsError: the library is missing.
    """
    lib = _library()
    count, block_bytes = len(sizes), out[0].nbytes
    streams = sizes > 0
    first = HEADER_BYTES + 4 * count
    ends = (starts + sizes)[streams]
    fits = not len(ends) or (ends.max() <= len(buffer) and starts[streams].min() >= head_bytes(count) + 4)
    in_range = sizes.max(initial=0) <= block_bytes and sizes.min(initial=0) >= -255
    if max(len(buffer), out.nbytes) > MOST_BYTES or not fits or not in_range:
        raise DamagedRecord("the sizes of its tiles do not fit its bytes")
    ours = ON_CPU[codec]
    struct.pack_into(
        "<4B3i5x2B9x", buffer.data, 0, _FORMAT, 1, _FLAGS | ours.format << 5, out.element_size(), out.nbytes,
        block_bytes, len(buffer), _shuffle(out), ours.code,
    )  # fmt: skip
    buffer[first : first + len(_CONSTANTS)] = _CONSTANTS
    # A block without a stream begins at its value in the table of constants.
    begins = np.where(streams, starts - 4, first - 8 * sizes)
    buffer[HEADER_BYTES:first] = begins.astype(np.int32).view(np.uint8)
    where = begins[streams]
    buffer[where[:, None] + np.arange(4)] = sizes[streams].astype(np.int32).view(np.uint8).reshape(-1, 4)
    got = lib.blosc2_decompress_ctx(_context(), buffer.ctypes.data, len(buffer), out.data_ptr(), out.nbytes)
    if got != out.nbytes:
        raise DamagedRecord(f"its tiles cannot be decompressed ({codec}, error {got})")


def _shuffle(blocks: torch.Tensor) -> int:
    """The filter of blocks. Elements of one byte stay as they are; Blosc2 would take ten times as long to find out."""
    return _SHUFFLE if blocks.element_size() > 1 else 0


class _Context:
    """Blosc2's memory for decompressing, one per thread."""

    def __init__(self) -> None:
        self._lib = _library()
        self.address = self._lib.blosc2_create_dctx(_DecompressionSettings(nthreads=1))
        if not self.address:
            raise MemoryError("Blosc2 has no memory to decompress with")

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, a daemon thread may still be inside the library, with this.
        if self.address and not is_finalizing():
            self._lib.blosc2_free_ctx(self.address)


_per_thread = threading.local()


def _context() -> int:
    if not hasattr(_per_thread, "context"):
        _per_thread.context = _Context()
    return int(_per_thread.context.address)


@functools.cache
def _library() -> Any:
    """Blosc2's library. Raises MonaiGdsError if it is missing."""
    lib = library("libblosc2.so", _HINT, functions=_FUNCTIONS, package="blosc2", folder="lib")
    lib.blosc2_init()
    return lib
