"""Runs of equal elements in a label: how many elements have a value, and where the k-th of them is, without the label.

Random croppers pick their centres this way. MONAI lists the index of every voxel, 8 bytes each, for every item in every
epoch: 0.4 s for a volume of 512 x 512 x 300, and 10 s for 105 classes. Runs are found once, when a record is written.

Used by :mod:`monai_gds.records.writing`, whose page specifies how runs lie in a file, by
:mod:`monai_gds.records.heads`, and through :class:`Runs` by the dataset. Knows neither files nor items.

    tensor ─▶ runs: lengths and values ─▶ blocks ─▶ byte planes and codec (blosc) ─▶ streams + table

The table counts, per block, how many elements have each value. So counting needs only the table, and finding an element
needs the table and one block.

Croppers that are given an image, too, take centres only where ``image > threshold``. For them the runs are *joint*: a
value is then one of the label's, together with whether the image is above the threshold there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from monai_gds import limits
from monai_gds.errors import DamagedRecord
from monai_gds.tiles import blosc

#: Runs that are shorter than this on average do not pay: MONAI's indices take little longer than these would.
_LEAST_LENGTH = 16

#: The same of joint runs. An image is rougher than a label, and without these MONAI needs all of it besides the label.
_LEAST_JOINT_LENGTH = 3

#: Elements per packed byte. Runs that need more bytes do not pay: a label that tiles make 69 times smaller than float32
#: would become less than 40 times smaller with them. The 956,000 runs of 105 organs took a byte per 104 elements.
_LEAST_ELEMENTS_PER_BYTE = 25

#: The same of joint runs, which an image comes with: float32 in tiles has some 2 bytes per voxel.
_LEAST_JOINT_ELEMENTS_PER_BYTE = 8

#: Fewest runs in a block: smaller blocks compress worse, and reading 4 kB takes as long as reading less.
_BLOCK_RUNS = 4096

#: Of each run: its length, 4 bytes, and the index of its value, 1 byte.
_RUN = 5

_MOST_VALUES = 256
_CODEC = "zstd"

#: Elements compared at a time: what a step reads and writes stays in the processor's cache.
_CHUNK = 1 << 18


#: Dtype and shape of a tensor.
Form: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


class Packed(NamedTuple):
    """The runs of a tensor, packed: its table and the streams of its blocks, 1-D uint8 CPU tensors."""

    table: torch.Tensor
    blocks: torch.Tensor


def suits(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a tensor can have runs: one channel, a spatial axis at least, and real elements."""
    return len(shape) > 1 and shape[0] == 1 and 0 < math.prod(shape) < 1 << 32 and not dtype.is_complex


def threshold_text(threshold: Any) -> str:
    """A threshold as records note it: ``0`` and ``0.0`` differ, since torch compares integers with them otherwise.

    Empty if it is not a float or an int of 64 bits.
    """
    if type(threshold) is float or (type(threshold) is int and -(1 << 63) <= threshold < 1 << 63):
        return repr(threshold)
    return ""


def threshold_of(text: str) -> float:
    """What :func:`threshold_text` wrote. Raises DamagedRecord if it did not."""
    with contextlib.suppress(ValueError):
        found = float(text) if text.strip("-0123456789") else int(text)
        if threshold_text(found) == text:
            return found
    raise DamagedRecord(f"its runs are of the threshold {text!r:.40}")


def above(image: torch.Tensor, threshold: str) -> torch.Tensor:
    """Where an image is above a threshold in any channel, as MONAI finds it.

    Args:
        image: (channels, ...).
        threshold: as :func:`threshold_text` gives it.

    Returns:
        A contiguous bool tensor without the axis of channels.

    Raises:
        DamagedRecord: there is no such threshold, or torch cannot compare this dtype.
    """
    try:
        found = image > threshold_of(threshold)
    except NotImplementedError as e:
        raise DamagedRecord(f"its runs are of an image of {image.dtype}") from e
    return found[0] if len(found) == 1 else found.any(0)


def pack(tensor: torch.Tensor, above: torch.Tensor | None = None) -> Packed | None:
    """Finds and packs the runs of a tensor.

    Args:
        tensor: contiguous CPU tensor.
        above: makes the runs joint: what :func:`above` returned of an image of the same spatial shape, on the CPU.

    Returns:
        The packed runs, or None if they do not pay, if the tensor has more than 256 different bit patterns (with joint
        runs, together with ``above``), or if it does not suit (:func:`suits`).

    Raises:
        MonaiGdsError: Blosc2 is missing.
    """
    if not suits(tuple(tensor.shape), tensor.dtype):
        return None
    flat = tensor.reshape(-1).view(torch.uint8).numpy().view(f"u{tensor.element_size()}")
    starts = _starts(flat)
    if starts is None:
        return None
    of_runs = flat[starts]
    values = np.unique(of_runs)
    if len(values) > _MOST_VALUES:
        return None
    own = _Found(starts, np.searchsorted(values, of_runs).astype(np.uint8), values)
    found = own if above is None else _joint(own, above.reshape(-1).numpy())
    packed = None if found is None else _packed(found, len(flat))
    if packed is None:
        return None
    least = _LEAST_ELEMENTS_PER_BYTE if above is None else _LEAST_JOINT_ELEMENTS_PER_BYTE
    return packed if (len(packed.table) + len(packed.blocks)) * least <= len(flat) else None


class _Found(NamedTuple):
    """Runs: where each begins, int64; the index of its value, uint8; the bit patterns of the values, and the flags."""

    starts: np.ndarray
    ids: np.ndarray
    values: np.ndarray
    above: np.ndarray = np.empty(0, np.uint8)


def _starts(flat: np.ndarray) -> np.ndarray | None:
    """Where each run begins, int64; None if there are too many runs."""
    most = len(flat) // _LEAST_LENGTH
    found, count = [np.zeros(1, np.int64)], 1
    for begin in range(1, len(flat), _CHUNK):
        part = flat[begin : begin + _CHUNK]
        edges = np.flatnonzero(part != flat[begin - 1 : begin - 1 + len(part)]) + begin
        found.append(edges)
        count += len(edges)
        if count > most:
            return None
    return np.concatenate(found)


def _joint(of_label: _Found, above: np.ndarray) -> _Found | None:
    """The joint runs, given those of the label; None if there are too many, or too many values.

    Only the flags are looked at: the label's own runs tell which value a joint run has.
    """
    begins = np.empty(len(above), bool)
    np.not_equal(above[1:], above[:-1], out=begins[1:])
    begins[of_label.starts] = True
    most = blosc.MOST_BYTES // (2 * _RUN)  # half of what is packed at once: the last block is filled up
    if np.count_nonzero(begins) > min(len(above) // _LEAST_JOINT_LENGTH, most):
        return None
    starts = np.flatnonzero(begins)
    per_run = np.diff(np.searchsorted(starts, of_label.starts), append=len(starts))
    pairs = np.repeat(of_label.ids, per_run).astype(np.uint16) * 2 + above[starts]
    there = np.bincount(pairs, minlength=2 * len(of_label.values)) > 0
    if np.count_nonzero(there) > _MOST_VALUES:
        return None
    ids = (np.cumsum(there) - 1).astype(np.uint8)[pairs]
    flags = np.tile(np.arange(2, dtype=np.uint8), len(of_label.values))
    return _Found(starts, ids, np.repeat(of_label.values, 2)[there], flags[there])


def _packed(found: _Found, elements: int) -> Packed | None:
    """Packs runs; None if a block would be larger than a reader takes."""
    starts, ids, values, above = found
    per_block = max(_BLOCK_RUNS, -(-len(ids) * 4 * len(values) // limits.RUN_COUNTS_BYTES))
    if per_block * _RUN > limits.TILE_BYTES:
        return None
    lengths = np.diff(starts, append=elements).astype(np.uint32)
    count = -(-len(ids) // per_block)
    rows = np.zeros((_RUN, count * per_block), np.uint8)  # the planes of the lengths, then the indices of the values
    rows[:4, : len(ids)] = lengths.astype("<u4").view(np.uint8).reshape(-1, 4).T
    rows[4, : len(ids)] = ids
    planes = rows.reshape(_RUN, count, per_block).swapaxes(0, 1).reshape(count, -1)
    of_block = np.arange(len(ids)) // per_block * len(values) + ids
    counts = np.bincount(of_block, weights=lengths, minlength=count * len(values)).astype(np.uint32)
    done = blosc.compress(torch.from_numpy(planes), _CODEC)
    streams = [done.data[start : start + max(size, 0)] for start, size in zip(done.starts, done.sizes, strict=True)]
    crcs = np.array([zlib.crc32(stream.data) for stream in streams], np.uint32)
    numbers = np.array([len(ids), per_block, len(values)], np.uint32)
    table = [numbers, done.sizes.astype(np.int32), crcs, counts, values, above]
    return Packed(
        torch.from_numpy(np.concatenate([part.view(np.uint8) for part in table])),
        torch.from_numpy(np.concatenate(streams)),
    )


class RunTable:
    """The table of a tensor's runs in a record: what the head keeps of them.

    Args:
        shape: the tensor's shape.
        dtype: its dtype.
        table: the table's bytes, 1-D uint8, whose checksum has been compared.
        nbytes: how many bytes the blocks have.
        image: of joint runs, dtype and shape of the image; None for those of the tensor alone.

    Attributes:
        values: the different values, 1-D CPU tensor.
        above: of joint runs, whether the image is above the threshold, 1-D bool CPU tensor, one per value. A value may
            be there twice then. None for those of the tensor alone.
        counts: how many elements of each block have each value, uint32 (blocks, values).

    Raises:
        DamagedRecord: the table does not fit the tensor or the blocks.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, table: np.ndarray, nbytes: int, image: Form | None = None
    ) -> None:
        self.shape, self.dtype, self.image = shape, dtype, image
        numbers: list[int] = table[:12].copy().view(np.uint32).tolist() if len(table) >= 12 else [0, 0, 0]
        self._count, self._per_block, values = numbers
        blocks = -(-self._count // max(self._per_block, 1))
        flags = 0 if image is None else values
        ends = np.cumsum([12, 4 * blocks, 4 * blocks, 4 * blocks * values, values * dtype.itemsize, flags])
        sound = self._count > 0 and 0 < self._per_block * _RUN <= limits.TILE_BYTES and 0 < values <= _MOST_VALUES
        fits = suits(shape, dtype) and (image is None or tuple(image[1][1:]) == shape[1:])
        if not sound or ends[-1] != len(table) or not fits:
            raise DamagedRecord("the table of its runs has the wrong size, or impossible numbers")
        parts = [table[begin:end].copy() for begin, end in itertools.pairwise(ends)]
        self._sizes, self._crcs = parts[0].view(np.int32), parts[1].view(np.uint32)
        self.counts = parts[2].view(np.uint32).reshape(blocks, values)
        self.values = torch.from_numpy(parts[3]).view(dtype)
        self.above = None if image is None else torch.from_numpy(parts[4] > 0)
        pairs = np.hstack([parts[3].reshape(values, -1), parts[4].reshape(values, -1)])
        if parts[4].max(initial=0) > 1 or len(np.unique(pairs, axis=0)) != values:
            raise DamagedRecord("the table of its runs has a value twice")
        most = self._per_block * _RUN
        in_range = self._sizes.min() >= -255 and self._sizes.max() <= most
        if not in_range or np.maximum(self._sizes, 0).sum(dtype=np.int64) != nbytes:
            raise DamagedRecord("the sizes of its runs do not add up to their bytes")
        if self.counts.sum(dtype=np.uint64) != math.prod(shape):
            raise DamagedRecord("the counts of its runs do not add up to the elements of the tensor")

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self._sizes)

    def range_of(self, block: int) -> tuple[int, int]:
        """Where the stream of a block begins in the blocks, and its bytes."""
        sizes = np.maximum(self._sizes[: block + 1], 0)
        return int(sizes[:-1].sum(dtype=np.int64)), int(sizes[-1])

    def decode(self, block: int, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The runs of a block.

        Args:
            block: the block's index.
            stream: the block's stream, 1-D uint8.

        Returns:
            The length of each run, int64, and the index of its value, uint8.

        Raises:
            DamagedRecord: it is not what was compressed.
            MonaiGdsError: Blosc2 is missing.
        """
        size = np.array([self._sizes[block]], np.int64)
        if len(stream) != max(int(size[0]), 0) or zlib.crc32(stream.data) != self._crcs[block]:
            raise DamagedRecord(f"block {block} of {self.blocks} of its runs does not match its checksum")
        room = blosc.head_bytes(1) + 4
        buffer = np.empty(room + len(stream), np.uint8)
        buffer[room:] = stream
        out = torch.empty((1, _RUN * self._per_block), dtype=torch.uint8, device="cpu")
        blosc.decompress(buffer, np.array([room]), size, _CODEC, out)
        count = min(self._per_block, self._count - block * self._per_block)
        rows = out.numpy().reshape(_RUN, self._per_block)[:, :count]
        lengths, ids = np.ascontiguousarray(rows[:4].T).view(np.uint32)[:, 0].astype(np.int64), rows[4]
        counts = np.bincount(ids, weights=lengths, minlength=len(self.values))
        if not np.array_equal(counts, self.counts[block]):
            raise DamagedRecord(f"block {block} of {self.blocks} of its runs does not hold what its table counts")
        return lengths, ids


class Runs:
    """The runs of a tensor that lies in a record.

    Args:
        table: the table of the runs.
        read_block: reads a block, given its index, and returns what :meth:`RunTable.decode` does.
        on_found: called with the index of each element that :meth:`find` finds, and the index of its value.

    Attributes:
        shape: the tensor's shape.
        dtype: its dtype.
        values: its different values, 1-D CPU tensor.
        above: see :class:`RunTable`.
        image: of joint runs, dtype and shape of the image.

    Example:
        >>> label = torch.zeros(1, 64, 64, 64)
        >>> label[0, 10, 20:40] = 3
        >>> packed = pack(label)
        >>> table = RunTable(tuple(label.shape), label.dtype, packed.table.numpy(), len(packed.blocks))
        >>> runs = Runs(table, lambda block: table.decode(block, packed.blocks.numpy()))  # there is only one
        >>> is_organ = (runs.values == 3).numpy()
        >>> runs.count(is_organ), runs.find(is_organ, 0) == (10 * 64 + 20) * 64
        (1280, True)
    """

    def __init__(
        self,
        table: RunTable,
        read_block: Callable[[int], tuple[np.ndarray, np.ndarray]],
        on_found: Callable[[int, int], object] = lambda element, value: None,
    ) -> None:
        self.shape, self.dtype, self.values = table.shape, table.dtype, table.values
        self.above, self.image = table.above, table.image
        self._table = table
        self._read_block = read_block
        self._on_found = on_found

    def count(self, chosen: np.ndarray) -> int:
        """How many elements have one of the chosen values; ``chosen`` is a bool per value. Reads nothing."""
        return int(self._table.counts[:, chosen].sum(dtype=np.int64))

    def find(self, chosen: np.ndarray, k: int) -> int:
        """The index, in C order, of the ``k``-th element with one of the chosen values. Reads one block.

        Args:
            chosen: bool, one per value.
            k: counted from 0, less than :meth:`count`.

        Raises:
            IndexError: there is no such element.
            DamagedRecord: the block is not what was written.
            OSError: it cannot be read.
        """
        if not 0 <= k < self.count(chosen):
            raise IndexError(f"element {k} of {self.count(chosen)}")
        counts = self._table.counts
        ends = np.cumsum(counts[:, chosen].sum(1, dtype=np.int64))
        block = int(np.searchsorted(ends, k, side="right"))
        k -= int(ends[block - 1]) if block else 0  # counted from the block's first from here on
        lengths, ids = self._read_block(block)
        ends = np.cumsum(np.where(chosen[ids], lengths, 0))
        run = int(np.searchsorted(ends, k, side="right"))
        k -= int(ends[run - 1]) if run else 0
        element = int(counts[:block].sum(dtype=np.int64)) + int(lengths[:run].sum()) + k
        self._on_found(element, int(ids[run]))
        return element
