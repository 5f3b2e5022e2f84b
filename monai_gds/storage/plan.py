"""The planner: cuts, merges and groups reads. Pure functions from reads to reads: no I/O, no memory, no threads.

The two base classes of backends call these, as does ``Storage``. Results are reads of the same files into
the same destinations, in an order that keeps each file's reads together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from monai_gds.storage.files import ALIGNMENT, whole_pages
from monai_gds.storage.reads import Reads


def share(total: int, workers: int, least: int, most: int) -> int:
    """Bytes per piece: an even share per worker in whole pages, but within ``least`` and ``most``."""
    return min(most, max(least, -(-total // (workers * ALIGNMENT)) * ALIGNMENT))


def by_file(reads: Reads) -> Reads:
    """The same reads file by file, so that few files are open at a time."""
    if len(reads.paths) == 1 or (np.diff(reads.file) >= 0).all():
        return reads
    return reads[np.argsort(reads.file, kind="stable")]


def by_side(reads: Reads, into: Sequence[torch.Tensor]) -> list[Reads]:
    """The reads into host memory, then those into device memory, each where there are any."""
    on_device = [tensor.is_cuda for tensor in into]
    if all(on_device) or not any(on_device):
        return [reads]
    which = np.array(on_device)[reads.dest]
    return [part for part in (reads[~which], reads[which]) if len(part)]


def coalesce(reads: Reads, most_gap: int) -> Reads:
    """Merges reads, which come file by file and with their room, that are neighbours in file and destination.

    Up to ``most_gap`` bytes between two are read along with them, into the room between their destinations.
    """
    if len(reads) < 2:
        return reads
    same_dest = reads.dest[1:] == reads.dest[:-1]
    if not same_dest.any():
        return reads
    end = reads.offset + reads.nbytes
    gap = reads.offset[1:] - end[:-1]
    joins = (
        same_dest
        & (reads.file[1:] == reads.file[:-1])
        & (reads.start[1:] - reads.start[:-1] == reads.offset[1:] - reads.offset[:-1])
        & (gap >= 0)
        & (gap <= np.minimum(reads.room[:-1], most_gap))
        & ((reads.nbytes[1:] > 0) | (gap == 0))  # an empty read may lie beyond the end of its file
    )
    if not joins.any():
        return reads
    first, last, _ = _joined(joins)
    merged = reads[first]
    merged.nbytes = end[last] - merged.offset
    merged.room = reads.room[last]
    return merged


def cut(reads: Reads, most: int, *, even: bool = False) -> Reads:
    """Cuts reads into pieces of at most ``most`` bytes, a multiple of ALIGNMENT.

    With ``even``, all pieces of a read but the last have the same size, in whole pages.
    """
    if not len(reads) or reads.nbytes.max() <= most:
        return reads
    count = np.maximum(-(-reads.nbytes // most), 1)
    size = np.full(len(reads), most, np.int64)
    if even:
        size = np.minimum(whole_pages(-(-reads.nbytes // count)), most)
        count = np.maximum(-(-reads.nbytes // np.maximum(size, 1)), 1)
    row = np.repeat(np.arange(len(reads)), count)
    done = (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)) * size[row]
    pieces = reads[row]
    pieces.offset = pieces.offset + done
    pieces.start = pieces.start + done
    pieces.room = np.where(pieces.nbytes - done > size[row], 0, pieces.room)
    pieces.nbytes = np.minimum(pieces.nbytes - done, size[row])
    return pieces


def group(reads: Reads, most_bytes: int, most_reads: int, alone: int) -> list[slice]:
    """Groups neighbouring pieces into runs, each for one thread or one staging slot.

    A group has at most ``most_reads`` and, as :func:`stage` lays it out, ``most_bytes``. A single piece may have more,
    and one of at least ``alone`` bytes is a separate group.
    """
    if len(reads) < 2 or reads.nbytes.min() >= alone:
        return [slice(i, i + 1) for i in range(len(reads))]
    ends = np.cumsum(whole_pages(reads.nbytes + np.minimum(reads.room, ALIGNMENT)))  # stage() keeps gaps of that size
    if ends[-1] <= most_bytes and len(reads) <= most_reads and reads.nbytes.max() < alone:
        return [slice(0, len(reads))]
    large = np.flatnonzero(reads.nbytes >= alone)
    groups: list[slice] = []
    first = 0
    while first < len(reads):
        begin = ends[first - 1] if first else 0
        after = int(np.searchsorted(ends, begin + most_bytes, "right"))
        stop = int(np.searchsorted(large, first))
        if stop < len(large):
            after = min(after, int(large[stop]))
        after = min(max(after, first + 1), first + most_reads, len(reads))
        groups.append(slice(first, after))
        first = after
    return groups


#: Copies out of a bounce buffer: ``(first byte in the buffer, destination, first byte in that, bytes)`` each.
Copies: TypeAlias = list[tuple[int, int, int, int]]


def stage(reads: Reads) -> tuple[Reads, Copies]:
    """Lays a group out in a bounce buffer. Returns the reads into that, as destination 0, and the copies from there.

    Reads with nothing but room between them keep their distance, and share one copy, which overwrites that room. All
    others begin at a multiple of ALIGNMENT.
    """
    if len(reads) == 1:
        dest, start, nbytes = int(reads.dest[0]), int(reads.start[0]), int(reads.nbytes[0])
        return _into_block(reads, np.zeros(1, np.int64), nbytes), [(0, dest, start, nbytes)] if nbytes else []
    end = reads.start + reads.nbytes
    gap = reads.start[1:] - end[:-1]
    joins = (reads.dest[1:] == reads.dest[:-1]) & (gap >= 0) & (gap <= np.minimum(reads.room[:-1], ALIGNMENT))
    first, last, run = _joined(joins)
    length = end[last] - reads.start[first]
    ends = np.cumsum(whole_pages(length))
    begin = ends - whole_pages(length)
    copies = zip(begin.tolist(), reads.dest[first].tolist(), reads.start[first].tolist(), length.tolist(), strict=True)
    place = begin[run] + reads.start - reads.start[first][run]
    return _into_block(reads, place, int(ends[-1])), [copy for copy in copies if copy[3]]


def pack(reads: Reads, most_gap: int) -> Reads:
    """Moves many small destinations into one block: the same reads, in the same order, into a single destination.

    Reads with at most ``most_gap`` bytes between them in their file keep their distance, so that they coalesce. All
    others begin at a multiple of ALIGNMENT.
    """
    if not len(reads):
        return _into_block(reads, reads.start, 0)
    end = reads.offset + reads.nbytes
    gap = reads.offset[1:] - end[:-1]
    first, last, run = _joined((reads.file[1:] == reads.file[:-1]) & (gap >= 0) & (gap <= most_gap))
    length = whole_pages(end[last] - reads.offset[first])
    begin = np.cumsum(length) - length
    return _into_block(reads, begin[run] + reads.offset - reads.offset[first][run], int(length.sum()))


def _joined(joins: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First read, last read, and the run of each read, where ``joins`` marks reads that continue the one before."""
    starts = np.append(True, ~joins)
    first = np.flatnonzero(starts)
    return first, np.append(first[1:] - 1, len(starts) - 1), np.cumsum(starts) - 1


def _into_block(reads: Reads, place: np.ndarray, total: int) -> Reads:
    """The same reads into one block of ``total`` bytes, at the rising positions ``place``."""
    room = np.append(place[1:], total) - place - reads.nbytes
    return Reads(
        reads.paths, reads.expected, reads.file, reads.offset, reads.nbytes, np.zeros_like(place), place,
        np.array([total], np.int64), room,
    )  # fmt: skip
