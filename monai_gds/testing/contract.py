"""Tests of what a single backend can get wrong: :class:`BackendContract`, and :class:`WriteContract` for writing."""

from __future__ import annotations

import copy
import errno
import io
import multiprocessing
import os
import pickle
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.errors import FileChanged, StorageError
from monai_gds.storage import ALIGNMENT, FileId, Pending, Reads, Storage
from monai_gds.storage.backend import Backend
from monai_gds.storage.files import Expected
from monai_gds.testing.disks import broken_disk, small_disk
from monai_gds.testing.tools import (
    BLOB_BYTES,
    LENGTHS,
    OFFSETS,
    assert_bytes,
    assert_each,
    blob_content,
    bytes_of,
    content,
    descriptors,
    error_of,
    property_test,
    without_permission,
)

__all__ = ["BackendContract", "WriteContract"]

#: Bytes that a saved tensor may take beyond its own: a page for alignment, and torch's framing.
_OVERHEAD = ALIGNMENT + (4 << 10)

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


class BackendContract:
    """What a backend promises about bytes, errors, memory and threads, for any target device.

    A backend on one of the two base classes can break each of these by itself. A subclass provides the ``backend``
    fixture; see :mod:`monai_gds.testing`.
    """

    #: Seconds after which reads that have not ended count as hanging.
    patience: ClassVar[float] = 60

    #: Reads during which another thread keeps closing the storage. Fewer where each close takes seconds.
    reads_while_closing: ClassVar[int] = 60

    # Fixtures that a subclass provides, or may override.

    @pytest.fixture
    def backend(self) -> Backend | Iterator[Backend]:
        """The backend under test, returned or yielded."""
        raise NotImplementedError("a subclass provides the backend")

    @pytest.fixture
    def storage(self, backend: Backend) -> Iterator[Storage]:
        """The storage under test."""
        storage = Storage(backend)
        yield storage
        storage.close()

    @pytest.fixture(scope="class")
    @classmethod
    def shared_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        """A folder on a file system that the backend reads from."""
        path = tmp_path_factory.mktemp("storage")
        yield path
        shutil.rmtree(path, ignore_errors=True)

    @pytest.fixture
    def folder(self, shared_folder: Path) -> Iterator[Path]:
        """An empty folder on that file system, for one test."""
        path = Path(tempfile.mkdtemp(dir=shared_folder))
        yield path
        shutil.rmtree(path, ignore_errors=True)

    @pytest.fixture(scope="class")
    @classmethod
    def data(cls) -> bytes:
        """The content of ``blob``."""
        return blob_content()

    @pytest.fixture(scope="class")
    @classmethod
    def blob(cls, shared_folder: Path, data: bytes) -> Path:
        """A file of BLOB_BYTES bytes, which tests do not change."""
        path = shared_folder / "blob.bin"
        path.write_bytes(data)
        return path

    @pytest.fixture
    def stable_descriptors(self, storage: Storage, blob: Path) -> Iterator[None]:
        """Fails a test that leaves more descriptors open than there were, once the backend has warmed up."""
        self.get(storage, blob, (0, 4 << 20), (5, 10))
        self.fill(storage, *((blob, 0, self.dest(storage, 10)) for _ in range(2))).wait()
        storage.close()
        before = descriptors()
        yield
        storage.close()  # its threads may hold some
        assert descriptors() <= before

    # Helpers.

    def make(self, folder: Path, data: bytes, name: str = "file.bin") -> Path:
        """A new file with these bytes."""
        path = folder / name
        path.write_bytes(data)
        return path

    def files(self, folder: Path, sizes: Sequence[int]) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Files of these sizes; their paths, sizes, and starts a page apart or more."""
        paths = [str(self.make(folder, content(size, i), f"many-{i}.bin")) for i, size in enumerate(sizes)]
        lengths = np.asarray(sizes, dtype=np.int64)
        pitch = -(-lengths // ALIGNMENT) * ALIGNMENT
        return paths, lengths, np.cumsum(pitch) - pitch

    def dest(self, storage: Storage, nbytes: int, fill: int = 0xA5) -> torch.Tensor:
        """A new destination on the storage's device."""
        return torch.full((nbytes,), fill, dtype=torch.uint8, device=storage.device)

    def ended(self, pending: Pending) -> Pending:
        """Waits until a Pending is over, and returns it. Fails the test if that takes too long."""
        deadline = time.monotonic() + self.patience
        while not pending.done:
            assert time.monotonic() < deadline, "the backend has not called Pending.finish"
            time.sleep(0.0002)
        return pending

    def fill(self, storage: Storage, *parts: tuple[str | Path, int, torch.Tensor]) -> Pending:
        """Fills each destination from an offset of a file, in one call, and waits until that is over."""
        reads = Reads.join([Reads.of(str(path), [(offset, d.numel())]) for path, offset, d in parts])
        return self.ended(storage.fill(reads, [dest for *_, dest in parts]))

    def get(self, storage: Storage, path: str | Path, *ranges: tuple[int, int]) -> list[bytes]:
        """The bytes of some ranges of a file."""
        return [bytes_of(t) for t in self.ended(storage.load(Reads.of(str(path), ranges))).wait()]

    def assert_gives(
        self,
        storage: Storage,
        path: str | Path,
        data: bytes,
        *ranges: tuple[int, int],
        map: bool = False,  # noqa: A002
    ) -> None:
        """Loads or maps ranges of a file that holds ``data``, and compares."""
        reads = Reads.of(str(path), ranges)
        tensors = self.ended(storage.map(reads) if map else storage.load(reads)).wait()
        assert_each(tensors, [data[offset : offset + nbytes] for offset, nbytes in ranges])

    def assert_at_rest(self, dests: Sequence[torch.Tensor]) -> None:
        """Fails if a destination is still being written to."""
        for dest in dests:
            dest.fill_(0x77)
        time.sleep(0.05)
        assert all(bool((d == 0x77).all()) for d in dests), "a destination was written to after the reads were over"

    # Bytes.

    def test_reads_every_offset_and_length(self, storage: Storage, blob: Path, data: bytes) -> None:
        wanted = [(o, n) for o in OFFSETS for n in LENGTHS]
        dests = [self.dest(storage, n) for _, n in wanted]
        got = self.ended(storage.fill(Reads.of(str(blob), wanted), dests)).wait()
        for (offset, nbytes), dest, tensor in zip(wanted, dests, got, strict=True):
            assert tensor is dest
            assert_bytes(dest, data[offset : offset + nbytes], f"{nbytes} bytes at {offset}")

    @pytest.mark.parametrize("offset", [0, 1, 4096, 4097])
    def test_reads_across_pieces_to_the_last_byte(self, storage: Storage, blob: Path, data: bytes, offset: int) -> None:
        dest = self.dest(storage, BLOB_BYTES - offset)
        self.fill(storage, (blob, offset, dest)).wait()
        assert_bytes(dest, data[offset:])

    @property_test
    @given(parts=st.lists(_PARTS, max_size=4))
    def test_fills_its_parts_and_nothing_around_the_destinations(
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

    @pytest.mark.parametrize("nbytes", [100, 5000, 70_000, 300_000])
    def test_parts_of_two_files_that_take_turns_in_one_destination(
        self, storage: Storage, folder: Path, nbytes: int
    ) -> None:
        """Between two parts of a file lies a part of another file, not a gap."""
        paths = [self.make(folder, content(9 * nbytes, i), f"{i}.bin") for i in range(2)]
        rows = [(i % 2, i * nbytes, nbytes, 0, i * nbytes) for i in range(9)]
        into = [self.dest(storage, 9 * nbytes)]
        self.ended(storage.fill(_table(paths, rows, [9 * nbytes]), into)).wait()
        for file, offset, _, _, start in rows:
            expected = content(9 * nbytes, file)[offset : offset + nbytes]
            assert_bytes(into[0][start : start + nbytes], expected, f"part {start // nbytes}")

    @property_test
    @given(ranges=st.lists(st.tuples(st.integers(0, BLOB_BYTES - 1), st.integers(0, 1 << 20)), max_size=12))
    def test_loads_and_maps_any_ranges(
        self, storage: Storage, blob: Path, data: bytes, ranges: list[tuple[int, int]]
    ) -> None:
        ranges = [(o, min(n, BLOB_BYTES - o)) for o, n in ranges]
        self.assert_gives(storage, blob, data, *ranges)
        self.assert_gives(storage, blob, data, *ranges, map=True)

    def test_fills_large_slices_and_nothing_around_them(self, storage: Storage, blob: Path, data: bytes) -> None:
        cuts = [(1, 3), (7, 512), (600, 4096), (5000, 1), (10_001, 700_003), (1 << 20, (9 << 20) + 1)]
        whole = self.dest(storage, 11 << 20)
        expected = bytearray(bytes_of(whole))
        for start, nbytes in cuts:
            expected[start : start + nbytes] = data[3 * start : 3 * start + nbytes]
        self.fill(storage, *((blob, 3 * start, whole[start : start + nbytes]) for start, nbytes in cuts)).wait()
        assert_bytes(whole, bytes(expected))

    @pytest.mark.parametrize("largest", [3000, 200_000, 3 << 20])
    def test_many_files_into_one_buffer(self, storage: Storage, folder: Path, largest: int) -> None:
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

    def test_the_beginnings_of_many_files(self, storage: Storage, folder: Path) -> None:
        paths, sizes, starts = self.files(folder, [9000] * 70)
        reads = Reads.of_files(paths, sizes - 4000, starts, 70 * 3 * ALIGNMENT)
        into = self.ended(storage.fill(reads, [self.dest(storage, int(reads.sizes[0]))])).wait()
        for i, part in enumerate(reads.parts(into)):
            assert_bytes(part, content(9000, i)[:5000])

    def test_many_files_side_by_side_in_memory_of_its_own(self, storage: Storage, folder: Path) -> None:
        paths, sizes, _ = self.files(folder, [1000 + 13 * i for i in range(200)])
        ends = np.cumsum(sizes)
        reads = Reads.of_files(paths, sizes, ends - sizes, int(ends[-1]), expected=sizes.tolist())
        into = self.ended(storage.fill(reads, [storage.memory(int(ends[-1]))])).wait()
        for i, part in enumerate(reads.parts(into)):
            assert_bytes(part, content(1000 + 13 * i, i))

    def test_an_empty_read_opens_its_file_and_reads_nothing(self, storage: Storage, folder: Path) -> None:
        path = self.make(folder, content(5000))
        self.assert_gives(storage, path, content(5000), (0, 5000), (5000, 0), (9000, 0))
        reads = _table([path], [(0, 0, 5000, 0, 0), (0, 6000, 0, 0, 6000)], [8192])  # the same gap in file and memory
        into = [self.dest(storage, 8192)]
        self.ended(storage.fill(reads, into)).wait()
        assert_bytes(into[0][:5000], content(5000))

    def test_overlapping_ranges_of_a_file_that_is_named_twice(self, storage: Storage, blob: Path, data: bytes) -> None:
        other = blob.parent / ".." / blob.parent.name / blob.name
        dests = [self.dest(storage, 1 << 20) for _ in range(6)]
        self.fill(storage, *((other if i % 2 else blob, i * 1000, d) for i, d in enumerate(dests))).wait()
        assert_each(dests, [data[i * 1000 : i * 1000 + (1 << 20)] for i in range(6)])

    def test_sees_what_was_written_a_moment_ago(self, storage: Storage, folder: Path) -> None:
        for seed in range(20):
            path = self.make(folder, content(100_000, seed))
            self.assert_gives(storage, path, content(100_000, seed), (0, 100_000))

    def test_a_step_behind_the_reads_sees_every_byte(self, storage: Storage, folder: Path, data: bytes) -> None:
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
    def test_reads_on_where_a_call_returned_less(
        self, storage: Storage, folder: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As calls do over FUSE and NFS. A backend that reads by other means does not notice."""
        path = self.make(folder, data[:300_000])
        monkeypatch.setattr(os, "preadv", _short_preadv(os.preadv))
        monkeypatch.setattr(os, "pread", _short_pread(os.pread))
        ranges = [(0, 300_000), (1, 70_001), (4096, 65_536), (8192, 200_000), (0, 10), (299_990, 10), (5, 0)]
        self.assert_gives(storage, path, data, *ranges)
        self.assert_gives(storage, path, data, *ranges, map=True)
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

    # Memory.

    def test_memory_is_on_the_device(self, storage: Storage, blob: Path, data: bytes) -> None:
        ranges = [(o, n) for o in OFFSETS for n in LENGTHS]
        made = [storage.memory(n) for n in LENGTHS]
        loaded = self.ended(storage.load(Reads.of(str(blob), ranges))).wait()
        mapped = self.ended(storage.map(Reads.of(str(blob), ranges))).wait()
        for (offset, nbytes), tensor in zip(
            [(0, n) for n in LENGTHS] + 2 * ranges, made + loaded + mapped, strict=True
        ):
            assert (tensor.shape, tensor.dtype, tensor.device) == ((nbytes,), torch.uint8, storage.device), offset
        self.ended(storage.fill(Reads.of(str(blob), [(7, n) for n in LENGTHS]), made)).wait()
        assert_each(made, [data[7 : 7 + n] for n in LENGTHS])

    @pytest.mark.parametrize("how", ["load", "map"])
    @pytest.mark.parametrize("nbytes", [1, 100, 4096, 65_536, 1 << 20])
    def test_a_loaded_tensor_owns_its_storage(self, storage: Storage, blob: Path, nbytes: int, how: str) -> None:
        kept, *_ = self.ended(getattr(storage, how)(Reads.of(str(blob), [(4096, nbytes), (8192, 4 << 20)]))).wait()
        assert kept.untyped_storage().nbytes() <= nbytes + ALIGNMENT
        assert len(pickle.dumps(kept)) <= nbytes + _OVERHEAD
        file = io.BytesIO()
        torch.save(kept, file)
        assert file.tell() <= nbytes + _OVERHEAD
        assert copy.deepcopy(kept).untyped_storage().nbytes() <= nbytes + ALIGNMENT

    @pytest.mark.parametrize("how", ["load", "map"])
    @pytest.mark.parametrize("nbytes", [100, 65_536, 4 << 20])
    def test_writing_into_a_loaded_tensor_reaches_nothing_else(
        self, storage: Storage, folder: Path, nbytes: int, how: str
    ) -> None:
        data = content(nbytes)
        path = self.make(folder, data)
        first, second = self.ended(getattr(storage, how)(Reads.of(str(path), [(0, nbytes), (0, nbytes)]))).wait()
        first.zero_()
        assert_bytes(first, bytes(nbytes))
        assert_bytes(second, data)
        assert path.read_bytes() == data
        self.assert_gives(storage, path, data, (0, nbytes), map=how == "map")

    @pytest.mark.parametrize("how", ["load", "map"])
    def test_a_loaded_tensor_outlives_its_file_and_its_storage(self, storage: Storage, folder: Path, how: str) -> None:
        data = content(4 << 20)
        path = self.make(folder, data)
        tensors = self.ended(getattr(storage, how)(Reads.of(str(path), [(0, 4 << 20), (4096, 10)]))).wait()
        os.replace(self.make(folder, content(4 << 20, seed=1), "new.bin"), path)
        path.unlink()
        storage.close()
        assert_each(tensors, [data, data[4096:4106]])

    @pytest.mark.parametrize("how", ["load", "map"])
    @pytest.mark.usefixtures("stable_descriptors")
    def test_two_thousand_loaded_tensors_keep_no_descriptor(
        self, storage: Storage, blob: Path, data: bytes, how: str
    ) -> None:
        give = getattr(storage, how)
        give(Reads.of(str(blob), [(0, 65_536)])).wait()  # what the backend opens for itself is open
        before = descriptors()
        held = [give(Reads.of(str(blob), [(4096 * (i % 1000), 65_536)])).wait()[0] for i in range(2000)]
        assert descriptors() <= before
        for i in (0, 1, 999, 1500, 1999):
            assert_bytes(held[i], data[4096 * (i % 1000) :][:65_536])

    # Errors.

    @pytest.mark.parametrize("nbytes", [0, 10, 5 << 20])
    @pytest.mark.usefixtures("stable_descriptors")
    def test_a_missing_file_is_named(self, storage: Storage, folder: Path, nbytes: int) -> None:
        missing = str(folder / "missing.bin")
        reads = Reads.of(missing, [(0, nbytes)])
        for pending in (storage.load(reads), storage.map(reads), storage.fill(reads, [self.dest(storage, nbytes)])):
            with pytest.raises(FileNotFoundError) as caught:
                self.ended(pending).wait()
            assert missing in str(caught.value)

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [
            (0, BLOB_BYTES + 1), (BLOB_BYTES - 10, 11), (BLOB_BYTES - 10, 700_000), (BLOB_BYTES, 1),
            (BLOB_BYTES + 1, 1), (BLOB_BYTES + (1 << 30), 4096), (1 << 50, 9 << 20), (1 << 62, 1),
        ],
    )  # fmt: skip
    @pytest.mark.usefixtures("stable_descriptors")
    def test_reading_past_the_end_is_an_error(
        self, storage: Storage, blob: Path, data: bytes, offset: int, nbytes: int
    ) -> None:
        reads = Reads.of(str(blob), [(0, 10), (offset, nbytes)])
        into = [self.dest(storage, 10), self.dest(storage, nbytes)]
        for pending in (storage.load(reads), storage.map(reads), storage.fill(reads, into)):
            with pytest.raises(StorageError) as caught:
                self.ended(pending).wait()
            assert str(blob) in str(caught.value)
        self.assert_gives(storage, blob, data, (3, 5))

    @pytest.mark.parametrize("keep", [0, 1, 4095, 4096, 4097, 70_000, (3 << 20) - 1])
    @pytest.mark.usefixtures("stable_descriptors")
    def test_a_cut_file_is_an_error(self, storage: Storage, folder: Path, keep: int) -> None:
        data = content(3 << 20)
        path = self.make(folder, data)
        os.truncate(path, keep)
        reads = Reads.of(str(path), [(0, 3 << 20)])
        for pending in (storage.load(reads), storage.map(reads), storage.fill(reads, [self.dest(storage, 3 << 20)])):
            with pytest.raises(StorageError, match=r"file\.bin"):
                self.ended(pending).wait()
        self.assert_gives(storage, path, data, (0, keep))

    def test_an_unreadable_disk_is_an_error(self, storage: Storage, folder: Path, blob: Path) -> None:
        self.get(storage, blob, (0, 4 << 20))
        paths, _, _ = self.files(folder, [5000] * 10)
        storage.close()  # its threads may hold some
        with broken_disk(folder, content(2 << 20)) as path:
            open_before = []
            for _ in range(2):  # what a backend opens once, for errors too, is open after the first time
                for nbytes in (4096, 1 << 20):
                    reads = Reads.of(str(path), [(0, nbytes)])
                    for pending in (storage.load(reads), storage.fill(reads, [self.dest(storage, nbytes)])):
                        with pytest.raises(OSError, match=r"record\.bin") as caught:
                            self.ended(pending).wait()
                        assert caught.value.errno == errno.EIO
                together = Reads.join([Reads.of(p, [(0, 5000)]) for p in [*paths, str(path)]])
                pending = self.ended(storage.load(together))
                assert list(pending.errors) == [10]
                assert_each(pending.tensors[:10], [content(5000, i) for i in range(10)])
                with pytest.raises(OSError, match=r"record\.bin"):
                    storage.head(str(path), 4096)
                del caught, pending
                storage.close()
                open_before.append(descriptors())
            assert open_before[1] <= open_before[0]

    @pytest.mark.usefixtures("stable_descriptors")
    def test_a_directory_and_a_fifo_are_errors_and_not_a_wait(self, storage: Storage, folder: Path) -> None:
        fifo = folder / "file.bin"
        os.mkfifo(fifo)
        for path in (folder, fifo):
            reads = Reads.of(str(path), [(0, 10)])
            for pending in (storage.load(reads), storage.map(reads), storage.fill(reads, [self.dest(storage, 10)])):
                with pytest.raises(OSError, match=str(path)):
                    self.ended(pending).wait()
        with pytest.raises(OSError, match=str(fifo)):
            storage.head(str(fifo), 10)

    @pytest.mark.parametrize("nbytes", [0, 10, 100_000, 2 << 20])
    @pytest.mark.usefixtures("stable_descriptors")
    def test_another_file_than_expected_is_an_error(self, storage: Storage, folder: Path, nbytes: int) -> None:
        data = content(2 << 20)
        path = str(self.make(folder, data))
        reads = Reads.of(path, [(0, nbytes)], FileId.of(path))
        for give in (storage.load, storage.map):
            assert_bytes(self.ended(give(reads)).wait()[0], data[:nbytes])
        os.replace(self.make(folder, content(2 << 20, seed=1), "new.bin"), path)
        indifferent = Reads.of(path, [(0, nbytes)])
        for pending in (storage.load(reads), storage.map(reads), storage.load(Reads.join([indifferent, reads]))):
            with pytest.raises(FileChanged, match=r"file\.bin"):
                self.ended(pending).wait()
        assert_bytes(self.ended(storage.load(indifferent)).wait()[0], content(2 << 20, seed=1)[:nbytes])

    @pytest.mark.parametrize("apart", [1, 0])
    @pytest.mark.parametrize("by", [1, -1, 5000])
    def test_whole_files_that_have_another_size_by_now(
        self, storage: Storage, folder: Path, by: int, apart: int
    ) -> None:
        """Also where there is no room for another byte behind a file."""
        paths, sizes, _ = self.files(folder, [4096, 5000, 100_000, *[3000] * 147])
        starts = np.cumsum(sizes + apart) - sizes - apart
        total = int(starts[-1] + sizes[-1])
        reads = Reads.of_files(paths, sizes, starts, total, expected=sizes.tolist())
        wrong = (0, 77, 149)
        for number in wrong:
            whole = content(int(sizes[number]), number)
            with open(paths[number], "wb") as f:
                f.write((whole + bytes(5000))[: len(whole) + by])
                f.flush()
                os.fsync(f.fileno())
        into = [self.dest(storage, total)]
        errors = self.ended(storage.fill(reads, into)).errors
        assert sorted(errors) == list(wrong)
        for number, error in errors.items():
            assert isinstance(error, FileChanged)
            assert f"many-{number}.bin has {sizes[number] + by} bytes" in str(error)
        for i, part in enumerate(reads.parts(into)):
            if i not in wrong:
                assert_bytes(part, content(part.numel(), i))

    @pytest.mark.parametrize("nbytes", [5000, 1_100_000])
    @pytest.mark.usefixtures("stable_descriptors")
    def test_each_file_has_its_own_error_and_the_others_their_bytes(
        self, storage: Storage, folder: Path, nbytes: int
    ) -> None:
        paths, sizes, starts = self.files(folder, [nbytes] * 40)
        expected: list[Expected] = [(None, FileId.of(p), nbytes)[i % 3] for i, p in enumerate(paths)]
        wrong = self.spoil(paths)
        ranges = [[(0, nbytes // 2), (nbytes // 2, nbytes - nbytes // 2)]] * 40
        apart = Reads.join([Reads.of(*each) for each in zip(paths, ranges, expected, strict=True)])
        together = Reads.of_files(paths, sizes, starts, int(starts[-1]) + nbytes, expected=expected)
        into = [self.dest(storage, int(together.sizes[0]))]
        for reads, pending in ((apart, storage.load(apart)), (together, storage.fill(together, into))):
            errors = self.ended(pending).errors
            assert sorted(errors) == sorted(wrong)
            for file, kind in wrong.items():
                assert isinstance(errors[file], kind), repr(errors[file])
                assert paths[file].partition("\0")[0] in str(errors[file])
                again = pickle.loads(pickle.dumps(errors[file]))  # on its way from a worker
                assert (type(again), str(again)) == (type(errors[file]), str(errors[file]))
            parts = reads.parts(into) if reads is together else pending.tensors
            for file, (offset, n), part in zip(reads.file.tolist(), reads.ranges, parts, strict=True):
                if file not in wrong:
                    assert_bytes(part, content(nbytes, file)[offset : offset + n], f"file {file}")
            with pytest.raises(wrong[min(wrong)]) as caught:
                pending.wait()
            assert caught.value is errors[min(wrong)]
            del caught
            errors = {}

    def spoil(self, paths: list[str]) -> dict[int, type[Exception]]:
        """Makes some files unreadable, in every possible way. Returns which, and the error that each must give."""
        os.unlink(paths[3])
        os.truncate(paths[6], 3000)
        os.unlink(paths[9])
        os.mkdir(paths[9])
        os.unlink(paths[12])
        os.mkfifo(paths[12])
        os.replace(self.make(Path(paths[13]).parent, content(5000, seed=99)), paths[13])
        os.utime(paths[16], ns=(0, 0))
        os.truncate(paths[17], 4999)
        paths[21] += "\0"
        return {
            3: FileNotFoundError, 6: StorageError, 9: OSError, 12: OSError, 13: FileChanged, 16: FileChanged,
            17: FileChanged, 21: OSError,
        }  # fmt: skip

    def test_nothing_is_written_once_it_is_over(self, storage: Storage, folder: Path, data: bytes) -> None:
        """The last piece fails at once, while the others are still being read."""
        paths = [self.make(folder, data[:-short], f"{short}.bin") for short in (1, 100)]
        good = self.make(folder, data)
        for _ in range(2):
            dests = [self.dest(storage, len(data)) for _ in range(3)]
            pending = self.fill(storage, *zip([*paths, good], [0, 0, 0], dests, strict=True))
            assert sorted(pending.errors) == [0, 1]
            assert_bytes(dests[2], data)
            self.assert_at_rest(dests)

    # Threads and processes.

    @pytest.mark.usefixtures("stable_descriptors")
    def test_eight_threads_share_it(self, storage: Storage, folder: Path, blob: Path, data: bytes) -> None:
        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for i in range(10):
                offset, nbytes = int(random.integers(0, 10 << 20)), int(random.integers(0, 3 << 20))
                expected = data[offset : offset + nbytes]
                dest = self.dest(storage, nbytes)
                reads = Reads.of(str(blob), [(offset, nbytes), (9, 5)])
                pending = storage.fill(reads, [dest, self.dest(storage, 5)])
                self.assert_gives(storage, blob, data, (offset, nbytes), (offset, 1))
                assert_bytes(self.ended(pending).wait()[0], expected)
                missing = storage.load(Reads.of(str(folder / "no"), [(0, 9)]))
                assert isinstance(self.ended(missing).errors[0], OSError)
                path = folder / f"{seed}-{i}.bin"
                storage.write(str(path), [b"x", dest])
                assert path.read_bytes() == b"x" + expected

        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(work, seed) for seed in range(8)]:
                future.result()

    @pytest.mark.usefixtures("stable_descriptors")
    def test_close_waits_and_the_storage_can_be_used_again(self, storage: Storage, blob: Path, data: bytes) -> None:
        for _ in range(3):
            pending = storage.load(Reads.of(str(blob), [(0, BLOB_BYTES)]))
            storage.close()
            storage.close()
            assert_bytes(self.ended(pending).wait()[0], data)
            self.assert_gives(storage, blob, data, (5, 9 << 20))

    @pytest.mark.usefixtures("stable_descriptors")
    def test_close_by_another_thread_disturbs_nobody(self, storage: Storage, blob: Path, data: bytes) -> None:
        stop = threading.Event()

        def closing() -> None:
            while not stop.wait(0.001):
                storage.close()

        thread = threading.Thread(target=closing)
        thread.start()
        try:
            for i in range(self.reads_while_closing):
                dest = self.dest(storage, 2 << 20)
                self.fill(storage, (blob, i, dest)).wait()
                assert_bytes(dest, data[i : i + (2 << 20)])
                self.assert_gives(storage, blob, data, (i, 700_001))
        finally:
            stop.set()
            thread.join()

    def test_close_leaves_no_thread(self, storage: Storage, blob: Path) -> None:
        storage.close()
        before = threading.active_count()
        self.get(storage, blob, (0, BLOB_BYTES))
        self.fill(storage, (blob, 0, self.dest(storage, 4 << 20))).wait()
        storage.close()
        assert threading.active_count() <= before

    def test_a_forked_child_is_refused_and_disturbs_nobody(self, storage: Storage, blob: Path, data: bytes) -> None:
        self.assert_gives(storage, blob, data, (0, 9 << 20))
        self.fill(storage, (blob, 0, self.dest(storage, BLOB_BYTES))).wait()
        under_way = storage.load(Reads.of(str(blob), [(0, BLOB_BYTES)]))
        child = multiprocessing.get_context("fork").Process(target=_use_in_child, args=(storage, str(blob)))
        child.start()
        assert_bytes(self.ended(under_way).wait()[0], data)
        child.join(60)
        hung = child.is_alive()
        child.kill()
        assert not hung
        assert child.exitcode == 0
        self.assert_gives(storage, blob, data, (0, 9 << 20))

    def test_describes_itself(self, storage: Storage) -> None:
        described = storage.describe()
        assert described["backend"] == storage.name
        assert described["device"] == str(storage.device)
        backend = type(storage._backend)
        assert backend.probe(storage.device).reason
        assert backend.write is Backend.write or isinstance(self, WriteContract), (
            f"{backend.__name__} has its own write: derive from WriteContract as well"
        )


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


def _use_in_child(storage: Storage, path: str) -> None:
    """Everything that a forked child may try with a storage of its parent."""
    torch.set_num_threads(1)  # torch's own threads do not survive a fork
    reads, dest = Reads.of(path, [(0, 10)]), torch.zeros(10, dtype=torch.uint8)
    attempts: list[Callable[[], object]] = [
        lambda: storage.load(reads),
        lambda: storage.map(reads),
        lambda: storage.fill(reads, [dest]),
        lambda: storage.memory(10),
        lambda: storage.head(path, 10),
        lambda: storage.write(path + ".new", [b"x"]),
    ]
    for attempt in attempts:
        error = error_of(attempt)
        assert isinstance(error, StorageError), repr(error)
        assert "open_storage" in str(error)
    storage.close()
    finaliser = getattr(storage._backend, "__del__", None)
    if finaliser is not None:
        finaliser()


class WriteContract(BackendContract):
    """Further tests for a backend that overrides :meth:`Backend.write`."""

    @pytest.mark.parametrize("durable", [False, True])
    @pytest.mark.usefixtures("stable_descriptors")
    def test_writes_every_kind_of_buffer(self, storage: Storage, folder: Path, durable: bool) -> None:
        big = torch.from_numpy(np.frombuffer(content(9 << 20), dtype=np.uint8).copy())
        floats = np.arange(1000, dtype=np.float32)
        parts: list[bytes | bytearray | memoryview | torch.Tensor] = [
            b"head", bytearray(content(4095)), memoryview(content(513))[13:], floats.data, b"",
            big[:1], big[1:4097], big, big[:0], torch.zeros(0, dtype=torch.uint8), b"tail",
        ]  # fmt: skip
        path = folder / "file.bin"
        storage.write(str(path), parts, durable=durable)
        expected = b"".join(bytes_of(p) if isinstance(p, torch.Tensor) else bytes(p) for p in parts)
        assert path.read_bytes() == expected
        self.assert_gives(storage, path, expected, (0, len(expected)))

    def test_a_file_has_its_permissions_from_the_beginning(self, storage: Storage, folder: Path) -> None:
        storage.write(str(folder / "file.bin"), [content(5000), torch.ones(3 << 20, dtype=torch.uint8)], mode=0o600)
        assert (folder / "file.bin").stat().st_mode & 0o777 == 0o600

    def test_a_tensor_of_anything_but_bytes_is_not_written(self, storage: Storage, folder: Path) -> None:
        plain = torch.zeros(3 << 20, dtype=torch.uint8, device=storage.device)
        for bad in (plain.float(), plain.view(2, -1), plain[::2]):
            with pytest.raises(ValueError, match="only 1-D contiguous uint8 tensors are written"):
                storage.write(str(folder / "file.bin"), [b"head", bad])
        assert not (folder / "file.bin").exists()

    @property_test
    @given(sizes=st.lists(st.one_of(st.sampled_from(LENGTHS[:-1]), st.integers(0, 20_000)), max_size=8))
    def test_reads_back_what_it_wrote(self, storage: Storage, folder: Path, sizes: list[int]) -> None:
        parts = [content(n, seed) for seed, n in enumerate(sizes)]
        tensors = [torch.frombuffer(bytearray(p), dtype=torch.uint8).to(storage.device) if p else b"" for p in parts]
        path = folder / "file.bin"
        path.unlink(missing_ok=True)
        storage.write(str(path), [t if i % 2 else p for i, (p, t) in enumerate(zip(parts, tensors, strict=True))])
        assert path.read_bytes() == b"".join(parts)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.assert_gives(storage, path, b"".join(parts), *zip(starts, sizes, strict=True))

    def test_writes_more_buffers_than_one_system_call_takes(self, storage: Storage, folder: Path) -> None:
        parts = [content(1 + i % 7, i) for i in range(3000)]
        path = folder / "file.bin"
        storage.write(str(path), parts)
        assert path.read_bytes() == b"".join(parts)

    @pytest.mark.parametrize("buffers", [[], [b""], [b"", torch.zeros(0, dtype=torch.uint8)]])
    def test_writes_an_empty_file(self, storage: Storage, folder: Path, buffers: list[bytes]) -> None:
        path = folder / "file.bin"
        storage.write(str(path), buffers)
        assert path.read_bytes() == b""
        self.assert_gives(storage, path, b"", (0, 0))

    @pytest.mark.usefixtures("stable_descriptors")
    def test_never_writes_over_a_file(self, storage: Storage, folder: Path) -> None:
        path = self.make(folder, b"precious")
        for buffers in ([b"new"], [torch.ones(5000, dtype=torch.uint8, device=storage.device)], []):
            with pytest.raises(FileExistsError, match=r"file\.bin"):
                storage.write(str(path), buffers)
        assert path.read_bytes() == b"precious"

    @pytest.mark.usefixtures("stable_descriptors")
    def test_writing_into_a_missing_directory_names_it(self, storage: Storage, folder: Path) -> None:
        for buffer in (b"new", self.dest(storage, 5000)):
            with pytest.raises(FileNotFoundError, match="missing"):
                storage.write(str(folder / "missing" / "file.bin"), [buffer])

    def test_writing_without_permission_names_the_file(self, storage: Storage, folder: Path) -> None:
        for buffer in (b"new", self.dest(storage, 5000)):
            with without_permission(folder), pytest.raises(PermissionError, match=r"file\.bin"):
                storage.write(str(folder / "file.bin"), [buffer])

    def test_a_full_disk_is_an_error_and_no_more(self, storage: Storage, folder: Path) -> None:
        with small_disk(folder) as disk:
            storage.write(str(disk / "first.bin"), [content(1 << 20)])
            before = descriptors()
            for buffer in (content(32 << 20), self.dest(storage, 32 << 20)):
                with pytest.raises(OSError, match=r"big\.bin") as caught:
                    storage.write(str(disk / "big.bin"), [b"head", buffer])
                assert caught.value.errno == errno.ENOSPC
                (disk / "big.bin").unlink(missing_ok=True)
            del caught
            assert descriptors() <= before
            storage.write(str(disk / "second.bin"), [self.dest(storage, 1 << 20)])
            self.assert_gives(storage, disk / "second.bin", b"\xa5" * (1 << 20), (0, 1 << 20))
            self.assert_gives(storage, disk / "first.bin", content(1 << 20), (0, 1 << 20))
