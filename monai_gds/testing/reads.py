"""Tests of bytes: each read arrives whole, in its place, and nothing else does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from monai_gds.storage import ALIGNMENT, FileId, Reads, Storage
from monai_gds.testing.base import OverABackend
from monai_gds.testing.tools import (
    BLOB_BYTES,
    LENGTHS,
    OFFSETS,
    assert_bytes,
    assert_each,
    bytes_of,
    content,
    property_test,
)

#: Bytes on both sides of a destination that must stay as they are.
_FENCE = 100

#: Parts of one destination: the file, where it begins in that, bytes, bytes left free before it in the destination, and
#: whether it follows the previous part in its file at the same distance.
_PARTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, BLOB_BYTES),
        st.one_of(st.integers(0, 6000), st.integers(0, 1 << 19), st.sampled_from(LENGTHS)),
        st.one_of(st.just(0), st.integers(0, 9000)),
        st.booleans(),
    ),
    max_size=6,
)


def layout(parts: Sequence[Sequence[tuple[int, int, int, int, bool]]], paths: Sequence[Path]) -> Reads:
    """Reads of several files into several destinations, cut down to what the files hold."""
    rows: list[tuple[int, int, int, int, int]] = []
    sizes = []
    for dest, wanted in enumerate(parts):
        end = offset = 0
        for file, begin, nbytes, gap, follows in wanted:
            follows = follows and bool(rows)
            file = rows[-1][0] if follows else file
            size = paths[file].stat().st_size
            offset = min(offset + gap if follows else begin, size)
            nbytes = min(nbytes, size - offset)
            rows.append((file, offset, nbytes, dest, end + gap))
            end += gap + nbytes
            offset += nbytes
        sizes.append(end)
    return _table(paths, rows, sizes)


def _table(paths: Sequence[Path], rows: Sequence[tuple[int, int, int, int, int]], sizes: Sequence[int]) -> Reads:
    """Reads from rows of (file, offset, bytes, destination, start)."""
    file, offset, nbytes, dest, start = np.array(rows, np.int64).reshape(-1, 5).T
    names = [str(path) for path in paths]
    return Reads(names, [None] * len(names), file, offset, nbytes, dest, start, np.array(sizes, np.int64))


class ReadsRightBytes(OverABackend):
    """What a backend promises about bytes."""

    def test_reads_every_offset_and_length(self, storage: Storage, blob: Path, data: bytes) -> None:
        ranges = [(o, n) for o in OFFSETS for n in LENGTHS]
        reads = Reads.of(str(blob), ranges)
        dests = [self.dest(storage, n) for _, n in ranges]
        filled = self.ended(storage.fill(reads, dests)).wait()
        assert all(tensor is dest for tensor, dest in zip(filled, dests, strict=True))
        for tensors in (filled, self.ended(storage.load(reads)).wait(), self.ended(storage.map(reads)).wait()):
            for (offset, nbytes), tensor in zip(ranges, tensors, strict=True):
                assert (tensor.shape, tensor.dtype, tensor.device) == ((nbytes,), torch.uint8, storage.device), offset
                assert_bytes(tensor, data[offset : offset + nbytes], f"{nbytes} bytes at {offset}")
        own = [storage.memory(n) for n in LENGTHS]
        self.ended(storage.fill(Reads.of(str(blob), [(7, n) for n in LENGTHS]), own)).wait()
        assert_each(own, [data[7 : 7 + n] for n in LENGTHS])

    def test_reads_across_pieces_and_writes_nothing_around_them(
        self, storage: Storage, blob: Path, data: bytes
    ) -> None:
        """Large slices of one tensor, at any distance from a page in it and in a file that is named in two ways."""
        for offset in (0, 1, 4096, 4097):
            dest = self.dest(storage, BLOB_BYTES - offset)
            self.fill(storage, (blob, offset, dest)).wait()
            assert_bytes(dest, data[offset:])
        other = blob.parent / ".." / blob.parent.name / blob.name
        cuts = [(1, 3), (7, 512), (600, 4096), (5000, 1), (10_001, 700_003), (1 << 20, (9 << 20) + 1)]
        whole = self.dest(storage, 11 << 20)
        expected = bytearray(bytes_of(whole))
        parts = []
        for i, (start, nbytes) in enumerate(cuts):
            expected[start : start + nbytes] = data[3 * start : 3 * start + nbytes]
            parts.append((other if i % 2 else blob, 3 * start, whole[start : start + nbytes]))
        self.fill(storage, *parts).wait()
        assert_bytes(whole, bytes(expected))

    @property_test
    @given(parts=st.lists(_PARTS, max_size=4))
    @example(parts=[[(0, 0, 9, 0, False)], [(0, 500, 9, 0, False), (0, 0, 9, 50, True)]])  # several parts in the second
    def test_fills_its_parts_and_writes_nothing_around_them(
        self, storage: Storage, blob: Path, data: bytes, parts: list[list[tuple[int, int, int, int, bool]]]
    ) -> None:
        """Gaps between parts may be overwritten: by nothing that is asserted here."""
        small = [(blob.parent / f"{n}.bin", content(n)) for n in (70_000, 5)]
        for path, bytes_ in small:
            path.exists() or path.write_bytes(bytes_)
        paths, contents = [blob, *(path for path, _ in small)], [data, *(bytes_ for _, bytes_ in small)]
        reads = layout(parts, paths)
        ends = np.cumsum(reads.sizes + _FENCE)
        memory = self.dest(storage, _FENCE + int(ends.max(initial=0)))
        into = [memory[end - n : end] for end, n in zip(ends.tolist(), reads.sizes.tolist(), strict=True)]
        self.ended(storage.fill(reads, into)).wait()
        for file, (offset, nbytes), part in zip(reads.file.tolist(), reads.ranges, reads.parts(into), strict=True):
            assert_bytes(part, contents[file][offset : offset + nbytes], f"{nbytes} bytes at {offset} of {file}")
        for start in (0, *ends.tolist()):
            assert_bytes(memory[start : start + _FENCE], b"\xa5" * len(memory[start : start + _FENCE]))

    def test_alternating_parts_of_two_files_in_one_destination(self, storage: Storage, folder: Path) -> None:
        """Between two parts of a file lies a part of another file, not a gap."""
        for nbytes in (100, 5000, 70_000, 300_000):
            paths = [self.make(folder, content(9 * nbytes, i), f"{i}.bin") for i in range(2)]
            rows = [(i % 2, i * nbytes, nbytes, 0, i * nbytes) for i in range(9)]
            into = [self.dest(storage, 9 * nbytes)]
            self.ended(storage.fill(_table(paths, rows, [9 * nbytes]), into)).wait()
            for file, offset, _, _, start in rows:
                expected = content(9 * nbytes, file)[offset : offset + nbytes]
                assert_bytes(into[0][start : start + nbytes], expected, f"part {start // nbytes}")

    @property_test
    @given(ranges=st.lists(st.tuples(st.integers(0, BLOB_BYTES - 1), st.integers(0, 1 << 20)), max_size=12))
    @example(ranges=[(BLOB_BYTES - 5000, 5000)])  # an offset of more than 24 bits
    def test_loads_and_maps_any_ranges(
        self, storage: Storage, blob: Path, data: bytes, ranges: list[tuple[int, int]]
    ) -> None:
        ranges = [(o, min(n, BLOB_BYTES - o)) for o, n in ranges]
        self.assert_gives(storage, blob, data, *ranges)
        self.assert_gives(storage, blob, data, *ranges, how="map")

    def test_many_files_into_one_buffer(self, storage: Storage, folder: Path) -> None:
        """Whole files a page apart, with empty ones among them; side by side; and the beginnings of files."""
        for largest in (3000, 200_000, 3 << 20):
            some = [(7919 * i) % 3000 if i % 10 else (104_729 * i) % largest for i in range(150)]
            paths, sizes, starts = self.files(folder, [largest, 0, 1, 4095, 4096, 4097, *some, 0])
            nbytes = int(starts[-1]) + ALIGNMENT
            whole = self.dest(storage, nbytes + 2 * _FENCE)
            reads = Reads.of_files(paths, sizes, starts, nbytes, expected=sizes.tolist())
            (dest,) = self.ended(storage.fill(reads, [whole[_FENCE : _FENCE + nbytes]])).wait()
            for i, part in enumerate(reads.parts([dest])):
                assert_bytes(part, content(part.numel(), i))
            for fence in (whole[:_FENCE], whole[-_FENCE:]):
                assert_bytes(fence, b"\xa5" * _FENCE)
        for whole_sizes, less, apart in ([1000 + 13 * i for i in range(200)], 0, False), ([9000] * 70, 4000, True):
            paths, lengths, starts = self.files(folder, whole_sizes)
            ends = starts + lengths if apart else np.cumsum(lengths)
            expected = [None] * len(paths) if less else lengths.tolist()
            reads = Reads.of_files(paths, lengths - less, ends - lengths, int(ends[-1]), expected=expected)
            into = self.ended(storage.fill(reads, [storage.memory(int(ends[-1]))])).wait()
            for i, part in enumerate(reads.parts(into)):
                assert_bytes(part, content(whole_sizes[i], i)[: whole_sizes[i] - less])

    def test_an_empty_read_opens_its_file_and_reads_nothing(self, storage: Storage, folder: Path, blob: Path) -> None:
        path = self.make(folder, content(5000))
        self.assert_gives(storage, path, content(5000), (0, 5000), (5000, 0), (9000, 0))
        reads = _table([path], [(0, 0, 5000, 0, 0), (0, 6000, 0, 0, 6000)], [8192])  # the same gap in file and memory
        into = [self.dest(storage, 8192)]
        self.ended(storage.fill(reads, into)).wait()
        assert_bytes(into[0][:5000], content(5000))
        for nothing in (Reads.join([]), Reads.of(str(blob), [])):
            assert self.ended(storage.load(nothing)).wait() == []
        none = np.empty(0, np.int64)
        dest = self.dest(storage, 10)
        assert self.ended(storage.fill(Reads.of_files([], none, none, 10), [dest])).wait()[0] is dest

    def test_sees_what_was_just_written(self, storage: Storage, folder: Path) -> None:
        for seed in range(20):
            path = self.make(folder, content(100_000, seed))
            self.assert_gives(storage, path, content(100_000, seed), (0, 100_000))

    def test_a_step_after_the_reads_sees_every_byte(self, storage: Storage, folder: Path, data: bytes) -> None:
        """A backend that calls Pending.finish too early shows here."""
        paths = [self.make(folder, data[i * 4096 :], f"{i}.bin") for i in range(6)]
        for nbytes in (5000, 9 << 20):
            reads = Reads.join([Reads.of(str(path), [(0, nbytes)]) for path in paths])
            calls: list[int] = []

            def step(tensors: list[torch.Tensor], errors: Mapping[int, Exception]) -> list[torch.Tensor]:
                calls.append(len(errors))  # noqa: B023
                return [tensor.clone() for tensor in tensors]

            seen = self.ended(storage.load(reads).then(step)).wait()
            assert calls == [0]
            assert_each(seen, [data[i * 4096 :][:nbytes] for i in range(6)])

    @pytest.mark.usefixtures("stable_descriptors")
    def test_reads_the_head_of_a_file(self, storage: Storage, folder: Path, blob: Path, data: bytes) -> None:
        assert storage.head(str(blob), 5000) == (data[:5000], FileId.of(blob))
        short = self.make(folder, b"short")
        assert storage.head(str(short), 5000) == (b"short", FileId.of(short))
        with pytest.raises(FileNotFoundError, match=r"missing\.bin"):
            storage.head(str(folder / "missing.bin"), 10)

    @pytest.mark.usefixtures("stable_descriptors")
    def test_continues_after_a_short_read(
        self, storage: Storage, folder: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As calls do over FUSE and NFS. A backend that reads by other means does not notice."""
        path = self.make(folder, data[:300_000])
        monkeypatch.setattr(os, "preadv", _short_preadv(os.preadv))
        monkeypatch.setattr(os, "pread", _short_pread(os.pread))
        ranges = [(0, 300_000), (1, 70_001), (4096, 65_536), (8192, 200_000), (0, 10), (299_990, 10), (5, 0)]
        self.assert_gives(storage, path, data, *ranges)
        self.assert_gives(storage, path, data, *ranges, how="map")
        paths, sizes, starts = self.files(folder, [9000 + i for i in range(40)])
        (dest,) = [self.dest(storage, int(starts[-1]) + 3 * ALIGNMENT)]
        reads = Reads.of_files(paths, sizes, starts, dest.numel(), expected=sizes.tolist())
        self.ended(storage.fill(reads, [dest])).wait()
        for i, part in enumerate(reads.parts([dest])):
            assert_bytes(part, content(9000 + i, i))
        for nbytes in (10, 5000, 200_000, 400_000):
            assert storage.head(str(path), nbytes) == (data[: min(nbytes, 300_000)], FileId.of(path))
        beyond = Reads.of(str(path), [(4096, 300_000)])
        for pending in (storage.load(beyond), storage.map(beyond)):
            assert isinstance(self.ended(pending).errors[0], OSError)
            assert str(path) in str(pending.errors[0])


def _fewer(nbytes: int) -> int:
    """Fewer bytes, at least one; a multiple of a page where there is one, as O_DIRECT demands."""
    if nbytes < ALIGNMENT:
        return (nbytes + 1) // 2
    return max(ALIGNMENT, nbytes // 2 // ALIGNMENT * ALIGNMENT)


def _short_preadv(preadv: Callable[..., int]) -> Callable[..., int]:
    def short(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        first = memoryview(buffers[0]).cast("B")
        return preadv(fd, [first[: _fewer(first.nbytes)]], offset, flags)

    return short


def _short_pread(pread: Callable[[int, int, int], bytes]) -> Callable[[int, int, int], bytes]:
    return lambda fd, nbytes, offset: pread(fd, _fewer(nbytes), offset)
