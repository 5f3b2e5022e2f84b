"""A file's runs on the disk, and the transfers that bring its bytes, against a model of a disk."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.storage.blockmap.extents import Extent, runs, transfers
from tests.storage.test_plan import UNTOUCHED, gaps, sizes


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[int, list[Extent], np.ndarray, np.ndarray]:
    """Bytes per block, extents of a file with holes, the disk, and the file as the two make it."""
    block = draw(st.sampled_from([512, 4096]))
    lengths = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=5))  # of a hole, of an extent
    blocks = sum(nbytes for _, nbytes in lengths)
    disk = np.random.default_rng(blocks).integers(0, 256, (blocks + len(lengths)) * block, np.uint8)
    extents, offset, left = [], 0, draw(st.permutations(range(len(lengths))))
    starts = dict(zip(left, np.cumsum([0, *(lengths[i][1] + 1 for i in left)]).tolist(), strict=False))
    for i, (hole, nbytes) in enumerate(lengths):
        offset += hole * block
        extents.append(Extent(offset, starts[i] * block, nbytes * block))
        offset += nbytes * block
    file = np.zeros(offset + draw(st.integers(0, 2)) * block, np.uint8)
    for at, start, nbytes in extents:
        file[at : at + nbytes] = disk[start : start + nbytes]
    return block, extents, disk, file


@given(laid=laid_out(), begin=st.integers(0, 100_000), nbytes=sizes)
def test_runs_cover_a_range_once_and_in_order(
    laid: tuple[int, list[Extent], np.ndarray, np.ndarray], begin: int, nbytes: int
) -> None:
    _, extents, disk, file = laid
    end = min(begin + nbytes, len(file))
    at, got = begin, []
    for start, stop, place in runs(extents, begin, end):
        assert start == at < stop
        got.append(np.zeros(stop - start, np.uint8) if place is None else disk[place : place + stop - start])
        at = stop
    assert at == max(begin, end)
    assert np.array_equal(np.concatenate([[], *got]), file[begin:end])


@given(
    laid=laid_out(), begin=st.one_of(st.integers(0, 20).map(lambda n: n * 4096), st.integers(0, 100_000)),
    nbytes=st.one_of(sizes, st.integers(0, 400_000)), base=st.sampled_from([0, 4096, 512, 100]), room=gaps,
    most=st.integers(1, 8),
    direct=st.booleans(),
)  # fmt: skip
def test_transfers_bring_every_byte_and_write_no_more_than_allowed(
    laid: tuple[int, list[Extent], np.ndarray, np.ndarray],
    begin: int, nbytes: int, base: int, room: int, most: int, direct: bool,
) -> None:  # fmt: skip
    """The model transfers whole blocks, as a disk does: straight to the destination, or through a bounce buffer."""
    block, extents, disk, file = laid
    begin = min(begin, len(file))
    nbytes = min(nbytes, len(file) - begin)
    memory = np.full(base + nbytes + room + block, UNTOUCHED, np.uint8)
    brought = 0
    cut = transfers(extents, begin, nbytes, base=base, room=room, block=block, most=most * block, direct=direct)
    for at, count, place, in_place in cut:
        brought += count
        if place is None:
            memory[base + at : base + at + count] = 0
            continue
        first, skip = place // block * block, place % block
        whole = -(-(skip + count) // block) * block
        assert whole <= most * block
        if in_place:
            assert direct
            assert skip == 0
            assert (base + at) % block == 0
            memory[base + at : base + at + whole] = disk[first : first + whole]
        else:
            memory[base + at : base + at + count] = disk[place : place + count]
    assert brought == nbytes
    assert np.array_equal(memory[base : base + nbytes], file[begin : begin + nbytes])
    assert (memory[:base] == UNTOUCHED).all()
    assert (memory[base + nbytes + room :] == UNTOUCHED).all()


def test_an_aligned_read_without_room_bounces_its_last_block_only() -> None:
    for size in (4096 + 100, 200_000):
        tail = size % 4096
        got = transfers([Extent(0, 8192, 1 << 20)], 0, size, base=0, room=0, block=4096, most=1 << 20, direct=True)
        assert [(nbytes, direct) for _, nbytes, _, direct in got] == [(tail, False), (size - tail, True)]
