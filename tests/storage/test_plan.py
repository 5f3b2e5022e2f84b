"""The planner against a naive model: bytes arrive where they were asked for, in whatever order pieces are read.

The model is as rough as a backend may be: each read scribbles over all of its room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.storage import plan
from monai_gds.storage.files import ALIGNMENT
from monai_gds.storage.reads import Reads

FILE_BYTES = 60_000
FILES = [np.random.default_rng(seed).integers(0, 256, FILE_BYTES, np.uint8) for seed in range(4)]
UNTOUCHED, SCRIBBLE = 0xA5, 0x5A

#: Sizes of reads, and of gaps: at and around whole pages more often than by chance.
sizes = st.one_of(st.sampled_from([0, 1, 100, 4095, 4096, 4097, 8192]), st.integers(0, 10_000))
gaps = st.one_of(st.sampled_from([0, 0, 1, 50, 4095, 4096, 4097]), st.integers(0, 9000))


@dataclass
class Case:
    """Reads with their room, and destinations for them."""

    reads: Reads
    into: list[np.ndarray]

    def wanted(self) -> list[np.ndarray]:
        """The destinations as they have to become, but for what may be overwritten."""
        wanted = [array.copy() for array in self.into]
        for file, offset, nbytes, dest, start in rows(self.reads):
            wanted[dest][start : start + nbytes] = FILES[file][offset : offset + nbytes]
        return wanted

    def check(self, got: Sequence[np.ndarray]) -> None:
        """Fails unless every read has arrived, and nothing before the first of a destination was touched."""
        for dest, (is_now, wanted) in enumerate(zip(got, self.wanted(), strict=True)):
            mine = self.reads.dest == dest
            matters = np.zeros(len(wanted), bool)
            for start, nbytes in zip(self.reads.start[mine], self.reads.nbytes[mine], strict=True):
                matters[start : start + nbytes] = True
            matters[: self.reads.start[mine].min() if mine.any() else len(wanted)] = True
            assert np.array_equal(is_now[matters], wanted[matters]), f"destination {dest}"


def rows(reads: Reads) -> list[tuple[int, ...]]:
    """(file, offset, nbytes, dest, start) each."""
    columns = (reads.file, reads.offset, reads.nbytes, reads.dest, reads.start)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def perform(reads: Reads, into: Sequence[np.ndarray], random: Any) -> None:
    """Does all reads in any order, each with its room."""
    all_rows, rooms = rows(reads), reads.room.tolist()
    for i in random.permutation(len(reads)).tolist():
        file, offset, nbytes, dest, start = all_rows[i]
        end = start + nbytes
        assert offset + nbytes <= FILE_BYTES
        assert end + rooms[i] <= len(into[dest])
        into[dest][end : end + rooms[i]] = SCRIBBLE
        into[dest][start:end] = FILES[file][offset : offset + nbytes]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Reads of several files into several destinations, some of them neighbours in both."""
    files, offsets, lengths, dests, starts, ends = [], [], [], [], [], []
    count = draw(st.integers(1, 3))
    for dest in range(count):
        at = draw(gaps)
        file, after = draw(st.integers(0, 3)), draw(st.integers(0, 20_000))
        for _ in range(draw(st.integers(0, 6))):
            nbytes, gap = draw(sizes), draw(gaps)
            if not draw(st.booleans()) or after + gap + nbytes > FILE_BYTES:  # the file goes on as the destination does
                file, after = draw(st.integers(0, 3)), draw(st.integers(0, 20_000))
            offset = after + gap
            at += gap
            files.append(file)
            offsets.append(offset)
            lengths.append(nbytes)
            dests.append(dest)
            starts.append(at)
            at, after = at + nbytes, offset + nbytes
        ends.append(at + draw(gaps))
    columns = [np.array(column, np.int64) for column in (files, offsets, lengths, dests, starts)]
    into = [np.full(nbytes, UNTOUCHED, np.uint8) for nbytes in ends]
    reads = Reads([f"{i}.bin" for i in range(4)], [None] * 4, *columns, np.array(ends, np.int64))
    return Case(reads.with_room([SimpleNamespace(numel=lambda n=n: n) for n in ends]), into)  # type: ignore[misc]


randoms = st.integers(0, 100).map(np.random.default_rng)


@given(case=cases(), random=randoms)
def test_the_room_of_reads_is_where_no_read_goes(case: Case, random: Any) -> None:
    perform(case.reads, case.into, random)
    case.check(case.into)


@given(case=cases())
def test_room_stays_that_of_all_reads_when_they_are_divided(case: Case) -> None:
    for part in (case.reads[::2], plan.by_file(case.reads)):
        again = part.with_room([SimpleNamespace(numel=lambda: 1 << 40)] * len(case.into))  # type: ignore[list-item]
        assert again.room.tolist() == part.room.tolist()


@given(case=cases(), random=randoms, most_gap=gaps)
def test_merged_reads_bring_the_same_bytes(case: Case, random: Any, most_gap: int) -> None:
    by_file = plan.by_file(case.reads)
    assert (np.diff(by_file.file) >= 0).all()
    merged = plan.coalesce(by_file, most_gap)
    perform(merged, case.into, random)
    case.check(case.into)


def test_neighbours_are_merged_across_a_gap_that_is_free() -> None:
    reads = Reads(("a",), (None,), *np.array([[0, 0, 0], [0, 150, 300], [100, 100, 100], [0, 0, 0], [0, 150, 300]]),
                  np.array([400])).with_room([SimpleNamespace(numel=lambda: 400)])  # fmt: skip
    assert rows(plan.coalesce(reads, 50)) == [(0, 0, 400, 0, 0)]
    assert len(plan.coalesce(reads, 49)) == 3


def test_an_empty_read_beyond_the_end_of_its_file_does_not_lengthen_another() -> None:
    """Nobody reads there, so it is no error: merged, the file would be too short."""
    reads = Reads.of("a", [(0, 100), (150, 0)])
    reads = Reads(reads.paths, reads.expected, reads.file, reads.offset, reads.nbytes, np.zeros(2, np.int64),
                  reads.offset, np.array([150])).with_room([SimpleNamespace(numel=lambda: 150)])  # type: ignore[list-item]  # fmt: skip
    assert rows(plan.coalesce(reads, 100)) == [(0, 0, 100, 0, 0), (0, 150, 0, 0, 150)]


@given(
    case=cases(),
    random=randoms,
    most=st.sampled_from([1, 2, 3]).map(lambda pages: pages * ALIGNMENT),
    even=st.booleans(),
)
def test_pieces_are_no_larger_than_allowed(case: Case, random: Any, most: int, even: bool) -> None:
    pieces = plan.cut(case.reads, most, even=even)
    perform(pieces, case.into, random)
    case.check(case.into)
    assert len(pieces) >= len(case.reads)
    assert not len(pieces) or pieces.nbytes.max() <= most
    assert pieces.total == case.reads.total


@given(nbytes=st.integers(1, 200 * ALIGNMENT), most=st.integers(1, 64).map(lambda pages: pages * ALIGNMENT))
def test_even_pieces_are_few_whole_pages_and_differ_only_in_the_last(nbytes: int, most: int) -> None:
    pieces = plan.cut(Reads.of("a", [(5, nbytes)]), most, even=True)
    got = pieces.nbytes.tolist()
    assert sum(got) == nbytes
    assert len(got) <= -(-nbytes // most)
    assert len(set(got[:-1])) <= 1
    assert all(n % ALIGNMENT == 0 for n in got[:-1])
    assert 0 < got[-1] <= max(got) <= most


@given(
    case=cases(), random=randoms, most_bytes=st.integers(4, 12).map(lambda pages: pages * ALIGNMENT),
    most_reads=st.integers(1, 5), alone=st.integers(1, 9000), most_gap=gaps,
)  # fmt: skip
def test_groups_pass_through_a_bounce_buffer(
    case: Case, random: Any, most_bytes: int, most_reads: int, alone: int, most_gap: int
) -> None:
    """As backends do it for a GPU: merged, cut, grouped, laid out in a slot, and copied from there."""
    reads = plan.cut(plan.coalesce(plan.by_file(case.reads), most_gap), 4 * ALIGNMENT)
    groups = plan.group(reads, most_bytes, most_reads, alone)
    assert [i for which in groups for i in range(which.start, which.stop)] == list(range(len(reads)))
    for which in [groups[i] for i in random.permutation(len(groups))]:
        part = reads[which]
        assert 1 <= len(part) <= most_reads
        staged, copies = plan.stage(part)
        assert len(part) == 1 or (part.nbytes.max() < alone and staged.sizes[0] <= most_bytes)
        buffer = np.full(max(most_bytes, int(part.nbytes.max())), UNTOUCHED, np.uint8)
        perform(staged, [buffer], random)
        for at, dest, start, nbytes in copies:
            assert nbytes
            case.into[dest][start : start + nbytes] = buffer[at : at + nbytes]
    case.check(case.into)


def test_small_files_in_pages_of_their_own_take_one_copy() -> None:
    """A batch of images: one copy to the device for all of a group."""
    sizes = np.array([5000, 100, 4096, 9000])
    starts = np.array([0, 8192, 12_288, 16_384])
    reads = Reads.of_files(list("abcd"), sizes, starts, 28_672).with_room([SimpleNamespace(numel=lambda: 28_672)])
    assert plan.stage(reads)[1] == [(0, 0, 0, 25_384)]


@given(ranges=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50_000), sizes), max_size=8), random=randoms)
def test_packed_reads_have_one_destination(ranges: list[tuple[int, int, int]], random: Any) -> None:
    most_gap = 1000
    ranges = [(file, offset, min(nbytes, FILE_BYTES - offset)) for file, offset, nbytes in sorted(ranges)]
    random.shuffle(ranges)
    file, offset, nbytes = np.array(ranges, np.int64).reshape(-1, 3).T
    zeros = np.zeros_like(file)
    packed = plan.pack(
        Reads(list("abcd"), [None] * 4, file, offset, nbytes, np.arange(len(file)), zeros, nbytes), most_gap
    )
    block = np.full(int(packed.sizes.sum()), UNTOUCHED, np.uint8)
    perform(packed, [block], random)
    for (which, at, count), start in zip(ranges, packed.start.tolist(), strict=True):
        assert np.array_equal(block[start : start + count], FILES[which][at : at + count])
    assert len(block) <= sum(count + ALIGNMENT + most_gap for _, _, count in ranges), "mostly what nobody asked for"


@given(case=cases(), on_device=st.lists(st.booleans(), min_size=3, max_size=3))
def test_sides_are_divided(case: Case, on_device: list[bool]) -> None:
    into = [SimpleNamespace(is_cuda=on_device[i]) for i in range(len(case.into))]
    parts = plan.by_side(case.reads, into)  # type: ignore[arg-type]
    assert sorted(row for part in parts for row in rows(part)) == sorted(rows(case.reads))
    for part in parts:
        assert len({on_device[dest] for dest in part.dest.tolist()}) <= 1


@given(total=st.integers(0, 1 << 40), workers=st.integers(1, 64))
def test_shares_are_whole_pages_within_limits(total: int, workers: int) -> None:
    share = plan.share(total, workers, 1 << 20, 16 << 20)
    assert share % ALIGNMENT == 0
    assert 1 << 20 <= share <= 16 << 20
    assert share * workers >= total or share == 16 << 20


def test_gaps_that_are_copied_count_for_the_size_of_a_group() -> None:
    count = np.arange(20, dtype=np.int64)
    reads = Reads.of_files([str(i) for i in count], count * 0 + ALIGNMENT, count * 2 * ALIGNMENT, 40 * ALIGNMENT)
    reads = reads.with_room([SimpleNamespace(numel=lambda: 40 * ALIGNMENT)])  # type: ignore[list-item]
    groups = plan.group(reads, 10 * ALIGNMENT, 100, 1 << 20)
    assert len(groups) > 1
    assert all(plan.stage(reads[which])[0].sizes[0] <= 10 * ALIGNMENT for which in groups)


def test_a_read_of_another_file_keeps_two_of_one_file_apart() -> None:
    """Both are as far from each other as in their file, but what lies between them in the destination is taken."""
    whole = Case(
        Reads(
            ["0", "1"], [None] * 2, *np.array([[0, 1, 0], [0, 7, 200], [100, 100, 50], [0, 0, 0], [0, 100, 200]]),
            np.array([250]),
        ).with_room([SimpleNamespace(numel=lambda: 250)]),  # type: ignore[list-item]
        [np.full(250, UNTOUCHED, np.uint8)],
    )  # fmt: skip
    reads = plan.by_file(whole.reads)
    assert rows(reads) == [(0, 0, 100, 0, 0), (0, 200, 50, 0, 200), (1, 7, 100, 0, 100)]
    assert len(plan.coalesce(reads, 1 << 20)) == 3
    _, copies = plan.stage(reads)
    assert [nbytes for *_, nbytes in copies] == [100, 50, 100]
