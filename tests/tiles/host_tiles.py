"""The kernels of ``device_tiles`` on this machine's processor, and what stands in for nvCOMP and CUDA around them.

They are compiled with checks of alignment, shifts and signed numbers that overflow. One that fails ends the process.
"""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds.storage import staging
from monai_gds.tiles import blosc, nvcomp
from monai_gds.tiles import device as device_tiles

_SHIM = """
#define __device__
#define __global__
#define __align__(n) alignas(n)
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim;
%s
typedef const Part* Parts;
#define RUN(name, parameters, ...) \\
    extern "C" void run_##name parameters \\
    { \\
        blockDim.x = threads; \\
        for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) \\
            for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) name(__VA_ARGS__); \\
    }
#define FIRST int64 blocks, int64 threads, Parts parts, int64 count, int64 total, int64* all
RUN(prepare, (FIRST, int64 sound, int64 bytes), parts, count, total, all, sound, bytes)
RUN(check, (FIRST, int64 sound, int64 bytes, const int* crcs, int* failed),
    parts, count, total, all, sound, bytes, crcs, failed)
RUN(place, (FIRST, const int* statuses, const int64* got, int* failed), parts, count, total, all, statuses, got, failed)
"""

_CHECKS = ["-fsanitize=alignment,bounds,shift,signed-integer-overflow", "-fsanitize-undefined-trap-on-error"]


@cache
def _compiled() -> Any:
    if shutil.which("g++") is None:
        pytest.skip("this machine has no g++ to compile the kernels for the host with")
    folder = Path(tempfile.mkdtemp(prefix="monai-gds-tiles-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "tiles.cpp").write_text(_SHIM % device_tiles._KERNELS)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", *_CHECKS]
    subprocess.run(["g++", *flags, "-o", str(folder / "tiles.so"), str(folder / "tiles.cpp")], check=True)
    return ctypes.CDLL(str(folder / "tiles.so"))


def _launch(name: str, _: torch.device, blocks: int, threads: int, arguments: Sequence[int], __: int) -> None:
    assert 0 < blocks < 1 << 31
    getattr(_compiled(), f"run_{name}")(*map(ctypes.c_int64, (blocks, threads, *arguments)))


class _Event:
    """Everything before it is over."""

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _Host(device_tiles._Host):
    """In memory that is not pinned."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(16 + nbytes, dtype=torch.uint8)
        self.failed = self.memory.numpy()[:4].view(np.int32)
        self.tables = self.memory.numpy()[16:]
        self.event: Any = _Event()


def _int64s(address: int, count: int) -> Any:
    return (ctypes.c_int64 * count).from_address(address)


def _crc32(count: int, addresses: int, sizes: int, most_bytes: int, out: int, stream: int) -> None:
    found = (ctypes.c_uint32 * count).from_address(out)
    for i, (address, nbytes) in enumerate(zip(_int64s(addresses, count), _int64s(sizes, count), strict=True)):
        assert 0 <= nbytes <= most_bytes
        found[i] = zlib.crc32(ctypes.string_at(address, nbytes))


def _decompressed(codec: str, stream: bytes, most: int) -> bytes:
    if codec == "lz4":
        import lz4.block

        return bytes(lz4.block.decompress(stream, uncompressed_size=most))
    if codec == "zstd":
        import zstandard

        return zstandard.ZstdDecompressor().decompress(stream, max_output_size=most)
    return zlib.decompress(stream)


def _decompress(codec: str, blocks: nvcomp.Blocks, _: int, __: int, statuses: int, got: int, ___: int) -> None:
    count = blocks.number
    columns = (blocks.addresses, blocks.sizes, blocks.out_addresses, blocks.out_sizes)
    found, done = (ctypes.c_int32 * count).from_address(statuses), _int64s(got, count)
    for i, (address, nbytes, out, room) in enumerate(zip(*(_int64s(c, count) for c in columns), strict=True)):
        assert address % 8 == 0 and out % 16 == 0, "Bitcomp takes nothing else"
        try:
            data = _decompressed(codec, ctypes.string_at(address, nbytes), room)
        except Exception:
            found[i], done[i] = 12, 0
            continue
        assert len(data) <= room
        ctypes.memmove(out, data, len(data))
        found[i], done[i] = 0, len(data)


def _compress(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of Bitcomp."""
    streams = [zlib.compress(row.tobytes(), 1) for row in blocks.view(torch.uint8).numpy()]
    out = np.zeros((len(streams), max(map(len, streams))), np.uint8)
    for row, stream in zip(out, streams, strict=True):
        row[: len(stream)] = np.frombuffer(stream, np.uint8)
    return torch.from_numpy(out), torch.tensor([len(stream) for stream in streams])


def install(patch: pytest.MonkeyPatch) -> None:
    """Has CPU tensors unpacked as those on a device are."""
    if why := blosc.why_not():
        pytest.skip(f"streams are made by Blosc2: {why}")
    pytest.importorskip("lz4.block")
    pytest.importorskip("zstandard")
    _compiled()
    patch.setattr(device_tiles, "_launch", _launch)
    patch.setattr(device_tiles, "_Host", _Host)
    for name, stand_in in (("crc32", _crc32), ("decompress", _decompress), ("compress", _compress)):
        patch.setattr(nvcomp, name, stand_in)
    patch.setattr(nvcomp, "temp_bytes", lambda *_: 1000)
    patch.setattr(staging, "raw_current_stream", lambda device: 0)
    patch.setattr(staging, "copy_to_device", lambda dest, source, nbytes, stream: ctypes.memmove(dest, source, nbytes))
    cuda = {
        "current_stream": lambda device: SimpleNamespace(),
        "synchronize": lambda device: None,
        "is_available": lambda: True,
    }
    for name, stand_in in cuda.items():
        patch.setattr(torch.cuda, name, stand_in)
    patch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
