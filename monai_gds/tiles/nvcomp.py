"""Blocks of LZ4, Zstd and Bitcomp, many per call, on a CUDA device: nvCOMP's library through ctypes.

Used by :mod:`monai_gds.tiles.device`. Blocks of LZ4 and Zstd are those that :mod:`monai_gds.tiles.blosc` writes.
Bitcomp is nvCOMP's own and has no decoder on the CPU.

Only the library of the wheels nvidia-libnvcomp-cu12 and -cu13 is loaded, with its batched C functions (nvcomp/lz4.h,
zstd.h, bitcomp.h, crc32.h of version 6): they take arrays of addresses that lie on the device, so no Python runs per
block, and their memory comes from torch's allocator. Everything is queued on a stream. The interpreter's lock is kept
during a call: it takes microseconds, and getting the lock back beside other threads takes more.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch

from monai_gds.base.library import library, problem_with
from monai_gds.errors import MonaiGdsError
from monai_gds.tiles.codecs import CODECS

#: The library, by its soname. Another major version has other structures.
_SONAME = "libnvcomp.so.6"

_HINT = "nvCOMP 6 decompresses tiles on a GPU: pip install 'monai_gds[tiles-cuda13]' (or tiles-cuda12)"

#: Element size -> nvcompType_t of unsigned integers.
_TYPES = {1: 1, 2: 3, 4: 5, 8: 7}

_ONLY_SEGMENT = 0


class _Options(ctypes.Structure):
    """Options of a codec: all are of 64 bytes, and zeros are the defaults of decompressing."""

    _fields_ = (("numbers", ctypes.c_int32 * 16),)


_DEFAULTS = _Options()


class _CrcOptions(ctypes.Structure):
    """``nvcompBatchedCRC32Opts_t``: the polynomial's model, then the shape of the kernel."""

    _fields_ = (
        ("poly", ctypes.c_uint32), ("init", ctypes.c_uint32), ("ref_in", ctypes.c_bool), ("ref_out", ctypes.c_bool),
        ("xorout", ctypes.c_uint32), ("reserved", ctypes.c_byte * 16), ("kernel", ctypes.c_int32 * 8),
        ("rest", ctypes.c_byte * 64),
    )  # fmt: skip


class Blocks(NamedTuple):
    """Where blocks lie on a device: the addresses of int64 arrays there, with an element per block.

    Attributes:
        number: how many blocks there are.
        addresses: where the compressed blocks begin, multiples of 16.
        sizes: how many bytes each has.
        out_addresses: where each is decompressed to.
        out_sizes: how many bytes it has there.
        most_out: the largest of these.
        total_out: the sum of these.
    """

    number: int
    addresses: int
    sizes: int
    out_addresses: int
    out_sizes: int
    most_out: int
    total_out: int


def why_not() -> str | None:
    """Why nothing can be decompressed on a device here; None if it can."""
    return problem_with(_library)


def crc32(count: int, addresses: int, sizes: int, most_bytes: int, out: int, stream: int) -> None:
    """Computes the CRC-32 of ``count`` blocks, as zlib's, on a stream, given by its raw handle.

    ``addresses``, ``sizes`` and ``out`` are the addresses on the device of those of the blocks and of their sizes in
    bytes (int64), and of room for the checksums (uint32). The largest block has ``most_bytes``.
    """
    options = _crc_options(count, most_bytes)
    _call("nvcompBatchedCRC32Async", addresses, sizes, count, out, options, _ONLY_SEGMENT, None, stream)


@functools.lru_cache(maxsize=256)
def _crc_options(count: int, most_bytes: int) -> _CrcOptions:
    """The model of zlib's CRC-32, and the shape of kernel that nvCOMP recommends."""
    options = _CrcOptions(0x04C11DB7, 0xFFFFFFFF, True, True, 0xFFFFFFFF)
    _call("nvcompBatchedCRC32GetHeuristicConf", None, count, options.kernel, most_bytes, None)
    return options


@functools.lru_cache(maxsize=256)
def temp_bytes(codec: str, count: int, most_out: int, total_out: int) -> int:
    """Bytes of memory on the device that :func:`decompress` needs. Raises MonaiGdsError as it does."""
    found = ctypes.c_size_t()
    name = f"nvcompBatched{CODECS[codec].nvcomp}DecompressGetTempSize"
    _call(name, count, most_out, _DEFAULTS, ctypes.byref(found), total_out, None)
    return found.value


def decompress(codec: str, blocks: Blocks, temp: int, temp_nbytes: int, statuses: int, got: int, stream: int) -> None:
    """Decompresses blocks. Those of Zstd and Bitcomp must be sound: nvCOMP does not validate them.

    Args:
        codec: one of :data:`monai_gds.tiles.codecs.CODECS`.
        blocks: where they are.
        temp: address of memory for nvCOMP's own use, see :func:`temp_bytes`.
        temp_nbytes: how many bytes that has.
        statuses: address of an int32 per block, which becomes 0 if it is sound.
        got: address of an int64 per block, which becomes its bytes after decompressing.
        stream: raw handle of the stream.

    Raises:
        MonaiGdsError: nvCOMP is missing or refuses to launch.
    """
    _call(
        f"nvcompBatched{CODECS[codec].nvcomp}DecompressAsync", blocks.addresses, blocks.sizes, blocks.out_sizes, got,
        blocks.number, temp, temp_nbytes, blocks.out_addresses, _DEFAULTS, statuses, stream,
    )  # fmt: skip


def compress(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compresses blocks of equal size by Bitcomp.

    Args:
        blocks: contiguous CUDA tensor of 1 to 8 bytes per element, a block per row.

    Returns:
        uint8 tensor with a row of room per block, whose front its stream fills, and the bytes of each, int64.

    Raises:
        MonaiGdsError: nvCOMP is missing or refuses.
    """
    count, nbytes, device = len(blocks), blocks[0].nbytes, blocks.device
    options = _Options()
    options.numbers[1] = _TYPES[blocks.element_size()]
    room = ctypes.c_size_t()
    _call("nvcompBatchedBitcompCompressGetMaxOutputChunkSize", nbytes, options, ctypes.byref(room))
    step = -(-room.value // 16) * 16
    out = torch.empty(count, step, dtype=torch.uint8, device=device)
    rows = torch.arange(count, dtype=torch.int64, device=device)
    sources, addresses = blocks.data_ptr() + rows * nbytes, out.data_ptr() + rows * step
    sizes, got = torch.full_like(rows, nbytes), torch.empty_like(rows)
    statuses = torch.empty(count, dtype=torch.int32, device=device)
    _call(
        "nvcompBatchedBitcompCompressAsync", sources.data_ptr(), sizes.data_ptr(), nbytes, count, None, 0,
        addresses.data_ptr(), got.data_ptr(), options, statuses.data_ptr(),
        torch.cuda.current_stream(device).cuda_stream,
    )  # fmt: skip
    if bool(statuses.any()):
        raise MonaiGdsError(f"nvCOMP could not compress (status {int(statuses.max())})")
    return out, got


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise MonaiGdsError(f"nvCOMP refused {name}: status {status}")


@functools.cache
def _library() -> Any:
    """nvCOMP's library, version 6."""
    return library(
        _SONAME, _HINT, functions=_functions(), package="nvidia.libnvcomp", folder="lib64", load=ctypes.PyDLL
    )


def _functions() -> dict[str, tuple[Any, ...]]:
    """What each function returns, its status, and its arguments: pointers and streams, sizes, options by value."""
    status, size, pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
    functions: dict[str, tuple[Any, ...]] = {
        "CRC32Async": (status, pointer, pointer, size, pointer, _CrcOptions, ctypes.c_int, pointer, pointer),
        "CRC32GetHeuristicConf": (status, pointer, size, pointer, size, pointer),
        "BitcompCompressGetMaxOutputChunkSize": (status, size, _Options, pointer),
        "BitcompCompressAsync": (
            status, pointer, pointer, size, size, pointer, size, pointer, pointer, _Options, pointer, pointer
        ),
    }  # fmt: skip
    for name in (codec.nvcomp for codec in CODECS.values()):
        functions[f"{name}DecompressAsync"] = (
            status, *[pointer] * 4, size, pointer, size, pointer, _Options, pointer, pointer,
        )  # fmt: skip
        functions[f"{name}DecompressGetTempSize"] = status, size, size, _Options, pointer, size, pointer
    return {f"nvcompBatched{name}": types for name, types in functions.items()}
