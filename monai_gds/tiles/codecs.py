"""The codecs of tiles, one row per codec: all that distinguishes one from the others.

A codec that C-Blosc2 has needs a row here, and its name in the documentation of ``GDSDataset(compression=...)``.
"""

from __future__ import annotations

from typing import NamedTuple


class Blosc2(NamedTuple):
    """What C-Blosc2 calls a codec."""

    code: int
    level: int  # of compression
    format: int  # in the flags of a chunk's header


class Codec(NamedTuple):
    """A codec.

    Attributes:
        name: what users and records call it.
        blosc2: for the library that compresses, and decompresses on the CPU. None: only a GPU does either, by nvCOMP.
        nvcomp: the middle of the names of nvCOMP's functions, which decompress on a GPU.
        sound: one zero byte, compressed. nvCOMP gets it in place of a damaged stream, and for tiles of equal bytes.
            Empty: streams depend on the type of the elements. Then nvCOMP makes one of zeros, and decompresses tiles of
            several types by several calls.
    """

    name: str
    blosc2: Blosc2 | None
    nvcomp: str
    sound: bytes = b""

    @property
    def filter(self) -> str:
        """What tiles go through before this. nvCOMP's own codec works on elements of any size itself."""
        return "none" if self.blosc2 is None else "shuffle"


CODECS = {
    codec.name: codec
    for codec in (
        Codec("lz4", Blosc2(1, 5, 1), "LZ4", b"\x10\x00"),
        Codec("zstd", Blosc2(5, 1, 4), "Zstd", bytes.fromhex("28b52ffd200109000000")),
        Codec("bitcomp", None, "Bitcomp"),
    )
}

#: Codecs that the CPU can decompress too, and what C-Blosc2 calls them.
ON_CPU = {name: codec.blosc2 for name, codec in CODECS.items() if codec.blosc2 is not None}

#: What ``compression="auto"`` writes. On one core, synthetic CT with noise was unpacked at 0.95 GB/s by lz4 and 0.9 by
#: zstd on its native grid, and at 1.6 and 1.0 resampled; there lz4 took 1/3.1 of the bytes, and zstd 1/3.6.
AUTO = "lz4"
