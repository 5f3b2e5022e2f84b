"""``wsum64``: the checksum of data in records and block maps, computed where the data are, and equal on every device.

The bytes are read as little-endian signed 64-bit words, padded with zeros. Each word is folded (``x + (x >> 32)``, so
that its upper bits reach all bits of the sum), multiplied by an odd weight that depends on its position, and summed
modulo 2**64, with the length mixed in. (``x ^ (x >> 32)`` would give a word and its inverse the same sum, because the
shift is arithmetic.) A flipped bit always shows; larger damage is missed with a probability of about 2**-32 at worst.
The checksum finds damage, not malice. A weighted sum runs at memory speed both in NumPy (6 GB/s on one core) and on a
GPU, which a CRC does not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base.file_systems import read_at

#: The checksum's name in records.
NAME = "wsum64"

_COLUMNS = 4096
_MASK = (1 << 64) - 1


def mix(n: np.ndarray) -> np.ndarray:
    """Pseudo-random odd 64-bit weights: the finaliser of splitmix64 (Steele, Lea, Flood 2014) with the low bit set."""
    with np.errstate(over="ignore"):
        z = (n + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@functools.lru_cache(maxsize=1)
def _column_weights() -> np.ndarray:
    return mix(np.arange(_COLUMNS, dtype=np.uint64)).view(np.int64)


@functools.lru_cache(maxsize=8)
def _column_weights_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_column_weights()).to(device)


@functools.lru_cache(maxsize=16)
def _row_weights(count: int) -> np.ndarray:
    return mix(np.arange(count, dtype=np.uint64) + np.uint64(1 << 32)).view(np.int64)


def _row_sums(words: np.ndarray) -> np.ndarray:
    """Weighted sums of whole rows, (rows * 4096,) -> (rows,) int64, single-threaded.

    100 MB take 16 ms. Torch, whose ``add`` first multiplies by ``alpha``, takes 26 ms with one thread and 16 with two.
    """
    sums = np.empty(words.size // _COLUMNS, np.int64)
    count = limits.CHECKSUM_PIECE_BYTES // 8
    buffer = np.empty(min(count, words.size), np.int64)
    for start in range(0, words.size, count):
        chunk = words[start : start + count]
        folded = np.right_shift(chunk, 32, out=buffer[: chunk.size])
        folded += chunk
        first = start // _COLUMNS
        np.dot(folded.reshape(-1, _COLUMNS), _column_weights(), out=sums[first : first + chunk.size // _COLUMNS])
    return sums


def _rows(data: np.ndarray) -> np.ndarray:
    """The weighted sum of each row; the last row is as if padded with zeros."""
    whole = data.size - data.size % (8 * _COLUMNS)
    sums = [_row_sums(data[:whole].view(np.int64))] if whole else []
    if whole < data.size or not sums:  # small data have no other
        words = np.frombuffer(data[whole:].tobytes() + bytes(-data.size % 8), np.int64)
        sums.append(np.dot(((words >> 32) + words)[None], _column_weights()[: words.size]))
    return np.concatenate(sums) if len(sums) > 1 else sums[0]


def _rows_on_device(data: torch.Tensor) -> torch.Tensor:
    """As :func:`_rows`, on the data's own device."""
    row = 8 * _COLUMNS
    whole = data.numel() - data.numel() % row
    parts = [data[:whole].clone() if data.data_ptr() % 8 else data[:whole]] if whole else []
    if whole < data.numel():
        parts.append(torch.zeros(row, dtype=torch.uint8, device=data.device))
        parts[-1][: data.numel() - whole] = data[whole:]
    sums, count = [torch.empty(0, dtype=torch.int64, device=data.device)], limits.CHECKSUM_PIECE_BYTES // 8
    for words in (part.view(torch.int64) for part in parts):
        for start in range(0, words.numel(), count):
            chunk = words[start : start + count]
            folded = (chunk >> 32).add_(chunk).view(-1, _COLUMNS)
            sums.append((folded * _column_weights_on(data.device)).sum(1))  # torch has no int64 product on GPUs
    return torch.cat(sums)


def checksum(data: torch.Tensor) -> int:
    """The checksum of a 1-D contiguous uint8 tensor on any device, as an unsigned 64-bit integer.

    On a GPU it runs on the current stream, and waits for the result.
    """
    return checksums([data])[0]


def checksums(several: Sequence[torch.Tensor]) -> list[int]:
    """The checksum of each of several tensors on one device, as :func:`checksum`. On a GPU it waits once, for all."""
    if sys.byteorder != "little":
        raise RuntimeError("checksums are defined for little-endian machines")
    if not several or several[0].device.type == "cpu":
        return [_total(data.numel(), _rows(data.numpy())) for data in several]
    rows = [_rows_on_device(data) for data in several]
    sums = torch.cat(rows).cpu().numpy()
    ends = np.cumsum([len(row) for row in rows]).tolist()
    return [_total(data.numel(), sums[begin:end]) for data, begin, end in zip(several, [0, *ends], ends, strict=False)]


def checksum_of_file(fd: int, nbytes: int) -> int:
    """The checksum of the first ``nbytes`` of an open file, which is read a piece at a time. Raises OSError."""
    rows = [np.empty(0, np.int64)]
    for start in range(0, nbytes, limits.CHECKSUM_PIECE_BYTES):
        piece = read_at(fd, min(limits.CHECKSUM_PIECE_BYTES, nbytes - start), start)
        if piece:  # else the file has become shorter
            rows.append(_rows(np.frombuffer(piece, np.uint8)))
    return _total(nbytes, np.concatenate(rows))


def _total(nbytes: int, sums: np.ndarray) -> int:
    return nbytes * 0x9E3779B97F4A7C15 + int(sums @ _row_weights(len(sums))) & _MASK
