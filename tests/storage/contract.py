"""What every storage backend must do, whichever it is: one test class, run over each.

A backend's test module derives from :class:`StorageContract` for a CPU target, from :class:`CudaStorageContract` for a
CUDA target, or from both, and gives the ``storage`` fixture::

    class TestPosixOnCpu(StorageContract):
        @pytest.fixture
        def storage(self) -> Iterator[Storage]:
            with contract.opened("posix", "cpu") as storage:
                yield storage

A backend that cannot use any folder overrides ``folder`` in the class, and in the module the ``shared_folder`` of
conftest.py.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import io
import multiprocessing
import os
import pickle
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monai_gds.errors import FileChanged, StorageError
from monai_gds.storage import ALIGNMENT, FileId, Read, Storage, open_storage, staging
from tests.storage.disks import broken_disk, small_disk

__all__ = ["CudaStorageContract", "StorageContract", "opened"]

LENGTHS = (0, 1, 511, 512, 513, 4095, 4096, 4097, 10_000, 65_536, (3 << 20) + 5)
OFFSETS = (0, 1, 511, 512, 513, 4095, 4096, 4097, 10_000, 65_536, (4 << 20) - 1, (8 << 20) - 1, 8 << 20)

#: Bytes of the file that most tests read: more than two pieces of any backend, and no multiple of anything.
BLOB_BYTES = (20 << 20) + 123

#: What one stored small tensor may weigh beyond its own bytes: a page for alignment, and torch's own framing.
OVERHEAD = ALIGNMENT + (4 << 10)

property_test = settings(
    max_examples=60,
    deadline=None,
    # differing_executors: every backend's class inherits the same test, which is the point
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors],
)


@contextmanager
def opened(name: str, device: str, **options: object) -> Iterator[Storage]:
    """A storage that is closed at the end."""
    storage = open_storage(name, device, **options)
    try:
        yield storage
    finally:
        storage.close()


def content(nbytes: int, seed: int = 0) -> bytes:
    """Bytes of which no two pages are alike, so that one read from a wrong place shows."""
    return np.random.default_rng(seed).bytes(nbytes)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, on the host."""
    return tensor.cpu().numpy().tobytes()


def descriptors() -> int:
    """How many descriptors this process has open."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def errors_of(action: Callable[[], object]) -> Exception | None:
    """The exception that ``action`` ends with, without its traceback, which would keep tensors alive."""
    try:
        action()
    except Exception as e:
        return e.with_traceback(None)
    return None


@contextmanager
def few_descriptors(limit: int) -> Iterator[None]:
    """Allows this process no more than ``limit`` open descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def without_permission(folder: Path) -> Iterator[None]:
    """Takes the right to write to ``folder`` from this process, root or not."""
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


class StorageContract:
    """The promises of :class:`monai_gds.storage.Storage`, for any target device."""

    #: Reads during which another thread keeps closing the storage. Fewer where each close costs seconds.
    reads_while_closing = 60

    #: Reads of a file that is cut and grown meanwhile. Fewer where each error costs seconds.
    reads_while_shrinking = 200

    # What a subclass gives, or may override.

    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        raise NotImplementedError("a subclass gives the storage")

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """An empty folder on a file system that the backend can use."""
        return tmp_path

    @pytest.fixture
    def stable_descriptors(self, storage: Storage, blob: Path) -> Iterator[None]:
        """Fails the test when it leaves more descriptors open than it found, the backend having warmed up."""
        self.get(storage, blob, (0, 4 << 20), (5, 10))
        before = descriptors()
        yield
        assert descriptors() <= before

    # Helpers.

    def make(self, folder: Path, data: bytes, name: str = "file.bin") -> Path:
        """A new file with these bytes."""
        path = folder / name
        path.write_bytes(data)
        return path

    def dest(self, storage: Storage, nbytes: int, fill: int = 0xA5) -> torch.Tensor:
        """A destination of the caller's own."""
        return torch.full((nbytes,), fill, dtype=torch.uint8, device=storage.device)

    def get(self, storage: Storage, path: Path, *ranges: tuple[int, int]) -> list[bytes]:
        """The bytes that ``load`` gives."""
        return [bytes_of(t) for t in storage.load(str(path), list(ranges)).wait()]

    # Reading.

    def test_reads_every_offset_and_length(self, storage: Storage, blob: Path, data: bytes) -> None:
        wanted = [(o, n) for o in OFFSETS for n in LENGTHS]
        dests = [self.dest(storage, n) for _, n in wanted]
        storage.read([Read(str(blob), o, d) for (o, _), d in zip(wanted, dests, strict=True)])
        for (offset, nbytes), dest in zip(wanted, dests, strict=True):
            assert bytes_of(dest) == data[offset : offset + nbytes], f"{nbytes} bytes at {offset}"

    @pytest.mark.parametrize("offset", [0, 1, 4096, 4097])
    def test_reads_across_pieces_to_the_last_byte(self, storage: Storage, blob: Path, data: bytes, offset: int) -> None:
        dest = self.dest(storage, BLOB_BYTES - offset)
        storage.read([Read(str(blob), offset, dest)])
        assert bytes_of(dest) == data[offset:]

    @property_test
    @given(ranges=st.lists(st.tuples(st.integers(0, BLOB_BYTES - 1), st.integers(0, 1 << 20)), max_size=12))
    def test_reads_and_loads_any_ranges(
        self, storage: Storage, blob: Path, data: bytes, ranges: list[tuple[int, int]]
    ) -> None:
        ranges = [(o, min(n, BLOB_BYTES - o)) for o, n in ranges]
        expected = [data[o : o + n] for o, n in ranges]
        dests = [self.dest(storage, n) for _, n in ranges]
        got = storage.submit([Read(str(blob), o, d) for (o, _), d in zip(ranges, dests, strict=True)]).wait()
        assert [bytes_of(t) for t in got] == expected
        assert self.get(storage, blob, *ranges) == expected

    def test_wait_gives_the_destinations_in_order_and_may_be_called_again(
        self, storage: Storage, blob: Path, data: bytes
    ) -> None:
        dests = [self.dest(storage, n) for n in (5 << 20, 10, 100_000)]
        pending = storage.submit([Read(str(blob), i, d) for i, d in enumerate(dests)])
        for _ in range(2):
            assert [t.data_ptr() for t in pending.wait()] == [d.data_ptr() for d in dests]
        assert [bytes_of(d) for d in dests] == [data[i : i + d.numel()] for i, d in enumerate(dests)]

    def test_several_threads_may_wait_for_one_submission(self, storage: Storage, blob: Path, data: bytes) -> None:
        for _ in range(5):
            pending = storage.load(str(blob), [(1, 9 << 20), (2, 700_001)], mapped=False)
            with ThreadPoolExecutor(8) as pool:
                waits = [pool.submit(pending.wait) for _ in range(8)]
            assert all([t.numel() for t in w.result()] == [9 << 20, 700_001] for w in waits)
            assert bytes_of(pending.wait()[1]) == data[2 : 2 + 700_001]

    def test_nothing_asked_nothing_given(self, storage: Storage) -> None:
        storage.read([])
        assert storage.submit([]).wait() == []

    def test_many_submissions_in_flight(self, storage: Storage, blob: Path, data: bytes) -> None:
        offsets = range(0, 40 * 100_003, 100_003)
        pendings = [storage.load(str(blob), [(o, 1 << 20), (o, 100)]) for o in offsets]
        for offset, pending in reversed(list(zip(offsets, pendings, strict=True))):
            big, small = pending.wait()
            assert bytes_of(big) == data[offset : offset + (1 << 20)]
            assert bytes_of(small) == data[offset : offset + 100]

    @pytest.mark.parametrize("nbytes", [100, 5000, (1 << 20) + 1])
    def test_more_files_than_descriptors_in_one_submission(
        self, storage: Storage, folder: Path, blob: Path, nbytes: int
    ) -> None:
        self.get(storage, blob, (0, 4 << 20))  # what the backend opens for itself is open
        files = [self.make(folder, content(100, seed), f"{seed}.bin") for seed in range(300)]
        for file in files:
            os.truncate(file, nbytes)
        dests = [self.dest(storage, nbytes) for _ in files]
        with few_descriptors(descriptors() + 150):
            storage.read([Read(str(f), 0, d) for f, d in zip(files, dests, strict=True)])
        for seed, dest in enumerate(dests):
            assert bytes_of(dest) == content(100, seed) + bytes(nbytes - 100)

    def test_fills_slices_and_nothing_around_them(self, storage: Storage, blob: Path, data: bytes) -> None:
        cuts = [(1, 3), (7, 512), (600, 4096), (5000, 1), (10_001, 700_003), (1 << 20, (9 << 20) + 1)]
        whole = self.dest(storage, 11 << 20)
        expected = bytearray(bytes_of(whole))
        for start, nbytes in cuts:
            expected[start : start + nbytes] = data[3 * start : 3 * start + nbytes]
        storage.read([Read(str(blob), 3 * start, whole[start : start + nbytes]) for start, nbytes in cuts])
        assert bytes_of(whole) == bytes(expected)

    def test_small_files_fill_neighbours_and_nothing_between(self, storage: Storage, folder: Path) -> None:
        """A batch of images: files of all sizes into slices of one buffer, side by side or with a gap, in any order."""
        sizes = [(7919 * i) % 200_000 for i in range(80)]
        files = [self.make(folder, content(size, i), f"{i}.bin") for i, size in enumerate(sizes)]
        whole = self.dest(storage, sum(sizes) + 16 * 100)
        expected = bytearray(bytes_of(whole))
        requests, start = [], 0
        for i, (file, size) in enumerate(zip(files, sizes, strict=True)):
            start += 100 * (i % 5 == 4)
            expected[start : start + size] = content(size, i)
            requests.append(Read(str(file), 0, whole[start : start + size]))
            start += size
        storage.read(requests)
        assert bytes_of(whole) == bytes(expected)
        whole.fill_(0xA5)
        storage.read(sorted(requests, key=lambda r: r.path))
        assert bytes_of(whole) == bytes(expected)

    def test_fills_what_it_allocated(self, storage: Storage, blob: Path, data: bytes) -> None:
        dests = [storage.allocate(n) for n in LENGTHS]
        for dest, nbytes in zip(dests, LENGTHS, strict=True):
            assert (dest.shape, dest.dtype, dest.device) == ((nbytes,), torch.uint8, storage.device)
        storage.submit([Read(str(blob), 7, d) for d in dests], fresh=True).wait()
        assert [bytes_of(d) for d in dests] == [data[7 : 7 + n] for n in LENGTHS]

    def test_reads_overlapping_ranges_of_a_file_named_twice(self, storage: Storage, blob: Path, data: bytes) -> None:
        other = blob.parent / ".." / blob.parent.name / blob.name
        dests = [self.dest(storage, 1 << 20) for _ in range(6)]
        storage.read([Read(str(other if i % 2 else blob), i * 1000, d) for i, d in enumerate(dests)])
        assert [bytes_of(d) for d in dests] == [data[i * 1000 : i * 1000 + (1 << 20)] for i in range(6)]

    def test_sees_what_was_written_a_moment_ago(self, storage: Storage, folder: Path) -> None:
        path = folder / "file.bin"
        for seed in range(20):
            fresh = content(100_000, seed)
            with open(path, "wb") as f:
                f.write(fresh)
            assert self.get(storage, path, (0, 100_000)) == [fresh]

    @pytest.mark.usefixtures("stable_descriptors")
    def test_reads_the_head_of_a_file(self, storage: Storage, folder: Path, blob: Path, data: bytes) -> None:
        assert storage.read_head(str(blob), 5000) == (data[:5000], FileId.of(blob))
        short = self.make(folder, b"short")
        assert storage.read_head(str(short), 5000) == (b"short", FileId.of(short))
        with pytest.raises(FileNotFoundError, match=r"missing\.bin"):
            storage.read_head(str(folder / "missing.bin"), 10)

    # What load() gives.

    def test_loads_ranges_on_the_device(self, storage: Storage, blob: Path, data: bytes) -> None:
        ranges = [(o, n) for o in OFFSETS for n in LENGTHS]
        tensors = storage.load(str(blob), ranges).wait()
        for (offset, nbytes), tensor in zip(ranges, tensors, strict=True):
            assert (tensor.shape, tensor.dtype, tensor.device) == ((nbytes,), torch.uint8, storage.device)
            assert bytes_of(tensor) == data[offset : offset + nbytes], f"{nbytes} bytes at {offset}"

    @pytest.mark.parametrize("nbytes", [1, 100, 4096, 65_536, 1 << 20])
    def test_a_loaded_tensor_owns_its_storage(self, storage: Storage, blob: Path, nbytes: int) -> None:
        kept, *_ = storage.load(str(blob), [(4096, nbytes), (8192, 4 << 20)]).wait()
        assert kept.untyped_storage().nbytes() <= nbytes + ALIGNMENT
        assert len(pickle.dumps(kept)) <= nbytes + OVERHEAD
        file = io.BytesIO()
        torch.save(kept, file)
        assert file.tell() <= nbytes + OVERHEAD
        assert copy.deepcopy(kept).untyped_storage().nbytes() <= nbytes + ALIGNMENT

    @pytest.mark.parametrize("nbytes", [100, 65_536, 4 << 20])
    def test_writing_into_a_loaded_tensor_reaches_nothing_else(
        self, storage: Storage, folder: Path, nbytes: int
    ) -> None:
        data = content(nbytes)
        path = self.make(folder, data)
        first, second = storage.load(str(path), [(0, nbytes), (0, nbytes)]).wait()
        first.zero_()
        assert bytes_of(first) == bytes(nbytes)
        assert bytes_of(second) == data
        assert path.read_bytes() == data
        assert self.get(storage, path, (0, nbytes)) == [data]

    def test_a_loaded_tensor_outlives_its_file_and_its_storage(self, storage: Storage, folder: Path) -> None:
        data = content(4 << 20)
        path = self.make(folder, data)
        tensors = storage.load(str(path), [(0, 4 << 20), (4096, 10)]).wait()
        replacement = self.make(folder, content(4 << 20, seed=1), "new.bin")
        os.replace(replacement, path)
        path.unlink()
        storage.close()
        assert [bytes_of(t) for t in tensors] == [data, data[4096:4106]]

    @pytest.mark.usefixtures("stable_descriptors")
    def test_five_thousand_loaded_tensors_keep_no_descriptor(self, storage: Storage, blob: Path, data: bytes) -> None:
        before = descriptors()
        held = [storage.load(str(blob), [(4096 * (i % 1000), 65_536)]).wait()[0] for i in range(5000)]
        assert descriptors() <= before
        for i in (0, 1, 999, 2500, 4999):
            assert bytes_of(held[i]) == data[4096 * (i % 1000) :][:65_536]

    @pytest.mark.parametrize("kind", ["in order", "with empty ones", "in no order"])
    def test_loads_many_files_each_with_its_ranges(self, storage: Storage, folder: Path, kind: str) -> None:
        sizes = [0, 1, 511, 4096, 4097, 10_000, *[65_536 + 4096] * 150, 300_000, (1 << 20) - 1, 77]
        paths, _, _ = self.files(folder, sizes)
        asked = []
        for i, (path, size) in enumerate(zip(paths, sizes, strict=True)):
            parts = [[(0, size)], [(size // 3, size // 3), (size - 1, 1)]] if size > 3 else [[]]
            parts += {"in order": [], "with empty ones": [[], [(size, 0)]], "in no order": [[(size, 0), (0, size)]]}[
                kind
            ]
            asked.append((path, parts[i % len(parts)], FileId.of(path) if i % 2 else None))
        pendings = storage.load_all(asked, mapped=False)
        assert len(pendings) == len(paths)
        for i, ((_, ranges, _), pending) in enumerate(zip(asked, pendings, strict=True)):
            got = pending.wait()
            assert [t.device for t in got] == [storage.device] * len(ranges)
            assert [bytes_of(t) for t in got] == [content(sizes[i], i)[at : at + n] for at, n in ranges], f"file {i}"
            assert all(t.untyped_storage().nbytes() <= t.numel() + ALIGNMENT for t in got)
        assert storage.load_all([]) == []

    def test_loads_nothing_of_many_files(self, storage: Storage, folder: Path) -> None:
        """As of records without a tensor: there is nothing to read, but they have to be there."""
        paths, _, _ = self.files(folder, [5000] * 3)
        asked = [(paths[0], [], FileId.of(paths[0])), (paths[1], [(4096, 0)], None), (paths[2], [], None)]
        os.unlink(paths[2])
        first, second, missing = storage.load_all(asked, mapped=False)
        assert first.wait() == []
        assert [t.numel() for t in second.wait()] == [0]
        with contextlib.suppress(FileNotFoundError):  # a backend may notice
            assert missing.wait() == []

    def test_each_of_many_loaded_files_has_its_own_error(self, storage: Storage, folder: Path) -> None:
        paths, _, _ = self.files(folder, [5000] * 100)
        asked = [(path, [(100, 4900)], FileId.of(path)) for path in paths]
        os.replace(self.make(folder, content(5000, seed=1), "new.bin"), paths[3])
        os.unlink(paths[40])
        with open(paths[70], "r+b") as f:
            f.write(b"changed in place")
        os.truncate(paths[99], 3000)
        asked[99] = (paths[99], [(100, 4900)], FileId.of(paths[99]))
        wrong: dict[int, type[Exception]] = {3: FileChanged, 40: FileNotFoundError, 70: FileChanged, 99: StorageError}
        for i, pending in enumerate(storage.load_all(asked, mapped=False)):
            if i not in wrong:
                assert bytes_of(pending.wait()[0]) == content(5000, i)[100:]
                continue
            with pytest.raises(wrong[i], match=f"many-{i}\\.bin"):
                pending.wait()
        with pytest.raises(ValueError, match="negative"):
            storage.load_all([(paths[0], [(-1, 5)], None)], mapped=False)

    # Many files at once.

    def files(self, folder: Path, sizes: Sequence[int]) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Files of these sizes; their paths, sizes, and starts a page apart or more."""
        paths = [str(self.make(folder, content(size, i), f"many-{i}.bin")) for i, size in enumerate(sizes)]
        lengths = np.asarray(sizes, dtype=np.int64)
        pitch = -(-lengths // ALIGNMENT) * ALIGNMENT
        return paths, lengths, np.cumsum(pitch) - pitch

    @pytest.mark.parametrize("largest", [3000, 200_000, 3 << 20])
    def test_many_files_into_one_buffer(self, storage: Storage, folder: Path, largest: int) -> None:
        some = [(7919 * i) % 3000 if i % 10 else (104_729 * i) % largest for i in range(300)]
        paths, sizes, starts = self.files(folder, [largest, 0, 1, 4095, 4096, 4097, *some, 0])
        nbytes = int(starts[-1]) + ALIGNMENT
        whole = self.dest(storage, nbytes + 200)
        around = whole[:100], whole[100 + nbytes :]
        parts = storage.submit_files(paths, sizes, starts, whole[100 : 100 + nbytes]).wait()
        assert len(parts) == len(paths)
        for i, (part, size, start) in enumerate(zip(parts, sizes.tolist(), starts.tolist(), strict=True)):
            assert bytes_of(part) == content(size, i)
            assert part.numel() == 0 or part.data_ptr() == whole.data_ptr() + 100 + start
        assert all(bytes_of(outside) == b"\xa5" * 100 for outside in around)

    def test_many_files_side_by_side_in_what_it_allocated(self, storage: Storage, folder: Path) -> None:
        paths, sizes, _ = self.files(folder, [1000 + 13 * i for i in range(200)])
        ends = np.cumsum(sizes)
        parts = storage.submit_files(paths, sizes, ends - sizes, storage.allocate(int(ends[-1])), fresh=True).wait()
        assert all(bytes_of(part) == content(1000 + 13 * i, i) for i, part in enumerate(parts))

    def test_the_beginnings_of_many_files(self, storage: Storage, folder: Path) -> None:
        paths, sizes, starts = self.files(folder, [9000] * 70)
        parts = storage.submit_files(paths, sizes - 4000, starts, self.dest(storage, 70 * 3 * ALIGNMENT)).wait()
        assert all(bytes_of(part) == content(9000, i)[:5000] for i, part in enumerate(parts))

    def test_no_files_give_nothing(self, storage: Storage) -> None:
        none = np.empty(0, np.int64)
        assert storage.submit_files([], none, none, self.dest(storage, 10)).wait() == []

    @pytest.mark.parametrize("kind", ["missing", "short", "folder", "fifo"])
    def test_the_one_of_many_files_that_fails_is_named(self, storage: Storage, folder: Path, kind: str) -> None:
        paths, sizes, starts = self.files(folder, [5000] * 150)
        os.unlink(paths[77])
        if kind == "short":
            self.make(folder, content(4999), "many-77.bin")
        elif kind == "folder":
            os.mkdir(paths[77])
        elif kind == "fifo":
            os.mkfifo(paths[77])
        dest = self.dest(storage, 150 * 2 * ALIGNMENT)
        with pytest.raises(FileNotFoundError if kind == "missing" else OSError, match=r"many-77\.bin"):
            storage.submit_files(paths, sizes, starts, dest).wait()
        dest.fill_(7)
        time.sleep(0.05)
        assert bool((dest == 7).all()), "something was written after the error"
        keep = [i for i in range(150) if i != 77]
        parts = storage.submit_files([paths[i] for i in keep], sizes[keep], starts[keep], dest).wait()
        assert all(bytes_of(part) == content(5000, i) for i, part in zip(keep, parts, strict=True))

    @pytest.mark.parametrize("apart", [1, 0])
    @pytest.mark.parametrize("by", [1, -1, 5000])
    def test_whole_files_that_have_another_size_by_now(
        self, storage: Storage, folder: Path, by: int, apart: int
    ) -> None:
        """Also where there is no room for another byte behind a file."""
        paths, sizes, _ = self.files(folder, [4096, 5000, 100_000, *[3000] * 147])
        starts = np.cumsum(sizes + apart) - sizes - apart
        dest = self.dest(storage, int(starts[-1] + sizes[-1]))
        for _ in range(2):
            parts = storage.submit_files(paths, sizes, starts, dest, whole=True).wait()
            assert [bytes_of(part) for part in parts] == [content(size, i) for i, size in enumerate(sizes.tolist())]
        for number in (0, 77, 149):
            whole = content(int(sizes[number]), number)
            Path(paths[number]).write_bytes((whole + bytes(5000))[: len(whole) + by])
            os.sync()
            with pytest.raises(FileChanged, match=rf"many-{number}\.bin.* has {len(whole) + by} bytes.*list the files"):
                storage.submit_files(paths, sizes, starts, dest, whole=True).wait()
            Path(paths[number]).write_bytes(whole)
            os.sync()

    def test_many_files_on_an_unreadable_disk(self, storage: Storage, folder: Path) -> None:
        with broken_disk(folder, content(2 << 20)) as path:
            paths, sizes, starts = self.files(folder, [5000] * 10)
            dest = self.dest(storage, 11 * 2 * ALIGNMENT)
            sizes, starts = np.append(sizes, 5000), np.append(starts, 10 * 2 * ALIGNMENT)
            with pytest.raises(OSError, match=r"record\.bin") as caught:
                storage.submit_files([*paths, str(path)], sizes, starts, dest).wait()
            assert caught.value.errno == errno.EIO
            del caught

    def test_many_files_need_no_more_descriptors_than_there_are(self, storage: Storage, folder: Path) -> None:
        before = descriptors()
        paths, sizes, starts = self.files(folder, [100] * 600)
        dest = self.dest(storage, 600 * ALIGNMENT)
        self.get(storage, Path(paths[0]), (0, 10))  # what the backend opens for itself is open
        with few_descriptors(descriptors() + 150):
            parts = storage.submit_files(paths, sizes, starts, dest).wait()
        assert all(bytes_of(part) == content(100, i) for i, part in enumerate(parts))
        storage.close()
        assert descriptors() <= before

    @pytest.mark.parametrize("starts", [[0, 50], [100, 0], [0, 101], [-1, 100]])
    def test_places_that_overlap_or_do_not_fit_are_refused(
        self, storage: Storage, folder: Path, starts: list[int]
    ) -> None:
        paths, sizes, _ = self.files(folder, [100, 100])
        with pytest.raises(ValueError, match="2 files overlap"):
            storage.submit_files(paths, sizes, np.asarray(starts), self.dest(storage, 200))

    # Errors of reading.

    @pytest.mark.parametrize("nbytes", [0, 10, 5 << 20])
    @pytest.mark.usefixtures("stable_descriptors")
    def test_missing_file_is_named(self, storage: Storage, folder: Path, nbytes: int) -> None:
        missing = str(folder / "missing.bin")
        for attempt in (
            lambda: storage.read([Read(missing, 0, self.dest(storage, nbytes))]),
            lambda: storage.load(missing, [(0, nbytes)]).wait(),
        ):
            with pytest.raises(FileNotFoundError) as caught:
                attempt()
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
        for attempt in (
            lambda: storage.read([Read(str(blob), offset, self.dest(storage, nbytes))]),
            lambda: storage.load(str(blob), [(0, 10), (offset, nbytes)]).wait(),
        ):
            with pytest.raises(StorageError) as caught:
                attempt()
            assert str(blob) in str(caught.value)
        assert self.get(storage, blob, (3, 5)) == [data[3:8]]

    @pytest.mark.parametrize("keep", [0, 1, 4095, 4096, 4097, 70_000, (3 << 20) - 1])
    @pytest.mark.usefixtures("stable_descriptors")
    def test_a_cut_file_is_an_error(self, storage: Storage, folder: Path, keep: int) -> None:
        data = content(3 << 20)
        path = self.make(folder, data)
        os.truncate(path, keep)
        with pytest.raises(StorageError, match=r"file\.bin"):
            storage.load(str(path), [(0, 3 << 20)]).wait()
        with pytest.raises(StorageError, match=r"file\.bin"):
            storage.read([Read(str(path), 0, self.dest(storage, 3 << 20))])
        assert self.get(storage, path, (0, keep)) == [data[:keep]]

    @pytest.mark.usefixtures("stable_descriptors")
    def test_a_file_that_shrinks_and_grows_meanwhile_gives_a_tensor_or_an_error(
        self, storage: Storage, folder: Path
    ) -> None:
        path = self.make(folder, bytes(2 << 20))
        stop = threading.Event()

        def saw() -> None:
            while not stop.is_set():
                os.truncate(path, 5000)
                os.truncate(path, 2 << 20)

        thread = threading.Thread(target=saw)
        thread.start()
        try:
            for _ in range(self.reads_while_shrinking):
                error = errors_of(lambda: storage.load(str(path), [(0, 2 << 20), (4096, 10_000)]).wait())
                assert error is None or isinstance(error, OSError)
        finally:
            stop.set()
            thread.join()

    def test_an_unreadable_disk_is_an_error(self, storage: Storage, folder: Path, blob: Path) -> None:
        self.get(storage, blob, (0, 4 << 20))
        with broken_disk(folder, content(2 << 20)) as path:
            before = descriptors()
            for nbytes in (4096, 1 << 20):
                with pytest.raises(OSError, match=r"record\.bin") as caught:
                    storage.read([Read(str(path), 0, self.dest(storage, nbytes))])
                assert caught.value.errno == errno.EIO
                with pytest.raises(OSError, match=r"record\.bin"):
                    storage.load(str(path), [(0, nbytes)], mapped=False).wait()
            with pytest.raises(OSError, match=r"record\.bin"):
                storage.read_head(str(path), 4096)
            del caught
            assert descriptors() <= before

    @pytest.mark.usefixtures("stable_descriptors")
    def test_a_directory_is_an_error(self, storage: Storage, folder: Path) -> None:
        with pytest.raises(OSError, match=str(folder)):
            storage.read([Read(str(folder), 0, self.dest(storage, 10))])

    @pytest.mark.usefixtures("stable_descriptors")
    def test_a_fifo_is_an_error_and_not_a_wait(self, storage: Storage, folder: Path) -> None:
        fifo = str(folder / "fifo")
        os.mkfifo(fifo)
        for attempt in (
            lambda: storage.read([Read(fifo, 0, self.dest(storage, 10))]),
            lambda: storage.load(fifo, [(0, 10)]).wait(),
            lambda: storage.read_head(fifo, 10),
        ):
            with pytest.raises(OSError, match="fifo"):
                attempt()

    def test_an_error_survives_the_way_from_a_worker(self, storage: Storage, blob: Path) -> None:
        error = errors_of(lambda: storage.load(str(blob), [(BLOB_BYTES, 10)]).wait())
        again = pickle.loads(pickle.dumps(error))
        assert isinstance(again, StorageError)
        assert str(again) == str(error)

    @pytest.mark.parametrize("nbytes", [10, 100_000, 2 << 20])
    @pytest.mark.usefixtures("stable_descriptors")
    def test_another_file_than_expected_is_an_error(self, storage: Storage, folder: Path, nbytes: int) -> None:
        path = str(self.make(folder, content(2 << 20)))
        expect = FileId.of(path)
        assert bytes_of(storage.load(path, [(0, nbytes)], expect).wait()[0]) == content(2 << 20)[:nbytes]
        storage.read([Read(path, 0, self.dest(storage, nbytes), expect)])
        os.replace(self.make(folder, content(2 << 20, seed=1), "new.bin"), path)
        for attempt in (
            lambda: storage.load(path, [(0, nbytes)], expect).wait(),
            lambda: storage.read([Read(path, 0, self.dest(storage, nbytes), expect)]),
            # one that does not care beside one that does
            lambda: storage.read([Read(path, 0, self.dest(storage, nbytes), e) for e in (None, expect)]),
        ):
            with pytest.raises(FileChanged, match=r"file\.bin"):
                attempt()

    @pytest.mark.parametrize("nbytes", [1000, 300_000, 3 << 20])
    @pytest.mark.usefixtures("stable_descriptors")
    def test_one_failure_among_many_files(
        self, storage: Storage, folder: Path, blob: Path, data: bytes, nbytes: int
    ) -> None:
        for bad in (0, 12, 24):
            dests = [self.dest(storage, nbytes if i % 3 else 1000) for i in range(25)]
            requests = [Read(str(blob), 0, d) for d in dests]
            requests[bad] = Read(str(folder / "missing.bin"), 0, dests[bad])
            error = errors_of(lambda requests=requests: storage.submit(requests).wait())
            assert isinstance(error, FileNotFoundError)
            self.assert_at_rest(dests)
        assert self.get(storage, blob, (3, 5 << 20)) == [data[3 : 3 + (5 << 20)]]

    def assert_at_rest(self, dests: list[torch.Tensor]) -> None:
        """Fails when a destination is still being written, which may be freed once the error is out."""
        for dest in dests:
            dest.fill_(0x77)
        time.sleep(0.05)
        assert all(bool((d == 0x77).all()) for d in dests), "a destination was written after the error was raised"

    def test_nothing_is_written_after_the_error(self, storage: Storage, folder: Path, data: bytes) -> None:
        """The last piece fails at once, while the others are still being read."""
        path = self.make(folder, data[:-1])
        for _ in range(5):
            dests = [self.dest(storage, len(data)) for _ in range(4)]
            error = errors_of(lambda dests=dests: storage.read([Read(str(path), 0, d) for d in dests]))
            assert isinstance(error, StorageError)
            self.assert_at_rest(dests)

    @pytest.mark.usefixtures("stable_descriptors")
    def test_failures_leave_nothing_behind(self, storage: Storage, folder: Path, blob: Path, data: bytes) -> None:
        missing = str(folder / "missing.bin")
        errors = []  # kept, as a program that reports them at the end would
        for i in range(300):
            requests = [
                Read(str(blob), i, self.dest(storage, 100)),
                Read(str(blob), BLOB_BYTES - 5, self.dest(storage, 100)) if i % 2 else
                Read(missing, 0, self.dest(storage, 700_000)),
            ]  # fmt: skip
            try:
                storage.read(requests)
            except OSError as e:
                errors.append(e)
            errors.append(errors_of(lambda: storage.load(missing, [(0, 100)]).wait()))
            errors.append(errors_of(lambda: storage.load(str(blob), [(BLOB_BYTES, 100_000)]).wait()))
        assert len(errors) == 900
        assert all(isinstance(e, OSError) for e in errors)
        assert self.get(storage, blob, (3, 5 << 20)) == [data[3 : 3 + (5 << 20)]]

    @pytest.mark.parametrize(
        ("make", "offset"),
        [
            (lambda: torch.zeros(10, dtype=torch.float32), 0),
            (lambda: torch.zeros((2, 5), dtype=torch.uint8), 0),
            (lambda: torch.zeros(20, dtype=torch.uint8)[::2], 0),
            (lambda: torch.zeros(10, dtype=torch.uint8, device="meta"), 0),
            (lambda: torch.zeros(10, dtype=torch.uint8), -1),
        ],
        ids=["float32", "two dimensions", "strided", "no memory", "negative offset"],
    )
    def test_a_request_that_makes_no_sense_is_refused(
        self, storage: Storage, blob: Path, make: Callable[[], torch.Tensor], offset: int
    ) -> None:
        dest = make()
        if not dest.is_meta:
            dest = torch.empty_strided(dest.shape, dest.stride(), dtype=dest.dtype, device=storage.device)
        with pytest.raises(ValueError, match=r"blob\.bin"):
            storage.read([Read(str(blob), offset, dest)])

    @pytest.mark.parametrize("bad", [(-1, 10), (10, -1)])
    def test_a_negative_range_is_refused(self, storage: Storage, blob: Path, bad: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match=r"blob\.bin"):
            storage.load(str(blob), [(0, 10), bad])

    # Writing.

    @pytest.mark.parametrize("durable", [False, True])
    @pytest.mark.usefixtures("stable_descriptors")
    def test_writes_every_kind_of_buffer(self, storage: Storage, folder: Path, durable: bool) -> None:
        big = torch.from_numpy(np.frombuffer(content(9 << 20), dtype=np.uint8).copy())
        floats = np.arange(1000, dtype=np.float32)
        parts: list[bytes | bytearray | memoryview | torch.Tensor] = [
            b"head", bytearray(content(4095)), memoryview(content(513))[13:], memoryview(floats), b"",
            big[:1], big[1:4097], big, big[:0], torch.zeros(0, dtype=torch.uint8), b"tail",
        ]  # fmt: skip
        path = folder / "file.bin"
        storage.write(str(path), parts, durable=durable)
        expected = b"".join(bytes_of(p) if isinstance(p, torch.Tensor) else bytes(p) for p in parts)
        assert path.read_bytes() == expected
        assert self.get(storage, path, (0, len(expected))) == [expected]

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
        tensors = [torch.tensor(list(p), dtype=torch.uint8, device=storage.device) for p in parts]
        path = folder / "file.bin"
        path.unlink(missing_ok=True)
        storage.write(str(path), [t if i % 2 else p for i, (p, t) in enumerate(zip(parts, tensors, strict=True))])
        assert path.read_bytes() == b"".join(parts)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        assert self.get(storage, path, *zip(starts, sizes, strict=True)) == parts

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
        assert self.get(storage, path, (0, 0)) == [b""]

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
            assert self.get(storage, disk / "second.bin", (0, 1 << 20)) == [b"\xa5" * (1 << 20)]
            assert self.get(storage, disk / "first.bin", (0, 1 << 20)) == [content(1 << 20)]

    # Living with it.

    @pytest.mark.usefixtures("stable_descriptors")
    def test_eight_threads_share_it(self, storage: Storage, folder: Path, blob: Path, data: bytes) -> None:
        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for i in range(15):
                offset, nbytes = int(random.integers(0, 10 << 20)), int(random.integers(0, 3 << 20))
                expected = data[offset : offset + nbytes]
                dest = self.dest(storage, nbytes)
                pending = storage.submit([Read(str(blob), offset, dest), Read(str(blob), 9, self.dest(storage, 5))])
                assert self.get(storage, blob, (offset, nbytes), (offset, 1)) == [expected, data[offset : offset + 1]]
                assert bytes_of(pending.wait()[0]) == expected
                assert isinstance(errors_of(lambda: storage.load(str(folder / "no"), [(0, 9)]).wait()), OSError)
                path = folder / f"{seed}-{i}.bin"
                storage.write(str(path), [b"x", dest])
                assert path.read_bytes() == b"x" + expected

        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(work, seed) for seed in range(8)]:
                future.result()

    @pytest.mark.usefixtures("stable_descriptors")
    def test_a_submission_nobody_waits_for(self, storage: Storage, blob: Path, data: bytes) -> None:
        for _ in range(10):
            storage.load(str(blob), [(0, 9 << 20), (1, 600_000)])
            missing = [Read(str(blob) + "missing", 0, self.dest(storage, 1 << 20))]
            errors_of(lambda requests=missing: storage.submit(requests))  # the error may come here or with wait()
        assert self.get(storage, blob, (5, 9 << 20)) == [data[5 : 5 + (9 << 20)]]
        storage.close()

    @pytest.mark.usefixtures("stable_descriptors")
    def test_close_waits_and_the_storage_can_be_used_again(self, storage: Storage, blob: Path, data: bytes) -> None:
        for _ in range(3):
            pending = storage.load(str(blob), [(0, BLOB_BYTES)])
            storage.close()
            storage.close()
            assert bytes_of(pending.wait()[0]) == data
            assert self.get(storage, blob, (5, 9 << 20)) == [data[5 : 5 + (9 << 20)]]

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
                assert bytes_of(storage.submit([Read(str(blob), i, dest)]).wait()[0]) == data[i : i + (2 << 20)]
                assert self.get(storage, blob, (i, 700_001)) == [data[i : i + 700_001]]
        finally:
            stop.set()
            thread.join()

    def test_close_leaves_no_thread(self, storage: Storage, blob: Path) -> None:
        storage.close()
        before = threading.active_count()
        self.get(storage, blob, (0, BLOB_BYTES))
        storage.read([Read(str(blob), 0, self.dest(storage, 4 << 20))])
        storage.close()
        assert threading.active_count() <= before

    def test_belongs_to_one_process(self, storage: Storage) -> None:
        """A user who sends one to a worker learns what to do instead."""
        with pytest.raises(TypeError, match="open_storage"):
            pickle.dumps(storage)

    def test_a_forked_child_gets_the_bytes_or_an_error(self, storage: Storage, blob: Path, data: bytes) -> None:
        self.get(storage, blob, (0, 9 << 20))
        storage.read([Read(str(blob), 0, self.dest(storage, BLOB_BYTES))])
        time.sleep(0.1)  # the threads that did it are idle now: one that counts on them in the child waits for ever
        child = multiprocessing.get_context("fork").Process(target=_use_in_child, args=(storage, str(blob), data))
        child.start()
        child.join(60)
        hung = child.is_alive()
        child.kill()
        assert not hung
        assert child.exitcode == 0
        assert self.get(storage, blob, (0, 9 << 20)) == [data[: 9 << 20]]  # and the parent goes on

    def test_describes_itself(self, storage: Storage) -> None:
        described = storage.describe()
        assert described["backend"] == storage.name
        assert described["device"] == str(storage.device)
        assert type(storage).probe(storage.device).reason


def _use_in_child(storage: Storage, path: str, data: bytes) -> None:
    torch.set_num_threads(1)  # as DataLoader's workers do: torch's own threads do not survive a fork either
    for ranges in ([(0, 100)], [(0, 9 << 20), (5, 100_000)]):
        try:
            got = storage.load(path, ranges).wait()
            dest = torch.zeros(9 << 20, dtype=torch.uint8, device=storage.device)
            storage.read([Read(path, 0, dest)])
        except Exception as e:  # CUDA cannot be used here, and says so
            print(f"in the forked child: {type(e).__name__}: {e}")
            continue
        assert [bytes_of(t) for t in got] == [data[o : o + n] for o, n in ranges]
        assert bytes_of(dest) == data[: 9 << 20]


#: Clock cycles that keep a stream busy for some tenths of a second: far longer than anything here takes.
LONG = 600_000_000


def handed_over(storage: Storage, path: Path, data: bytes, consumer: torch.cuda.Stream) -> bool:
    """Whether a consumer sees what it loaded although the copies are late.

    Fails when ``staging.hand_off`` does not make the current stream wait for the copy stream.
    """
    nbytes = 9 << 20
    storage.load(str(path), [(1000, nbytes), (2000, 100)]).wait()  # other bytes where the next ones will go
    torch.cuda.synchronize(storage.device)
    with torch.cuda.stream(staging.copy_stream(storage.device)):
        torch.cuda._sleep(LONG)
    with torch.cuda.stream(consumer):
        seen = [t.clone() for t in storage.load(str(path), [(1, nbytes), (5, 100)]).wait()]
        dest = torch.zeros(nbytes, dtype=torch.uint8, device=storage.device)
        storage.read([Read(str(path), 2, dest)])
        seen.append(dest.clone())
    torch.cuda.synchronize(storage.device)
    return [bytes_of(t) for t in seen] == [data[1 : 1 + nbytes], data[5:105], data[2 : 2 + nbytes]]


def many_slow_consumers_keep_their_data(storage: Storage, paths: Sequence[str], consumer: torch.cuda.Stream) -> bool:
    """The same for many small files: those of a block are waited for on two streams, and freed at once."""
    sizes = [os.path.getsize(path) for path in paths]
    streams = (consumer, torch.cuda.Stream(storage.device))
    seen = []
    for _ in range(4):
        pendings = storage.load_all([(p, [(0, n)], None) for p, n in zip(paths, sizes, strict=True)])
        with torch.cuda.stream(staging.copy_stream(storage.device)):
            torch.cuda._sleep(LONG // 8)
        for i, pending in enumerate(pendings):
            with torch.cuda.stream(streams[i % 2]):
                (tensor,) = pending.wait()
                if i < 2:
                    torch.cuda._sleep(LONG // 8)
                seen.append((i, tensor.clone()))
                del tensor
        del pendings
    torch.cuda.synchronize(storage.device)
    return all(bytes_of(t) == content(sizes[i], i) for i, t in seen)


def slow_consumer_keeps_its_data(storage: Storage, path: Path, data: bytes, consumer: torch.cuda.Stream) -> bool:
    """Whether a consumer that uses and frees each tensor late sees its own bytes and not those of the next load.

    Fails when ``staging.hand_off`` does not record the tensors on the consumer's stream.
    """
    nbytes = 12 << 20
    seen = []
    with torch.cuda.stream(consumer):
        for i in range(8):
            (tensor,) = storage.load(str(path), [(i * 4096, nbytes)]).wait()
            torch.cuda._sleep(LONG // 4)
            seen.append(tensor.clone())
            del tensor  # the host is done with it, the stream is not
    torch.cuda.synchronize(storage.device)
    return all(bytes_of(t) == data[i * 4096 : i * 4096 + nbytes] for i, t in enumerate(seen))


def refilled_after_use(storage: Storage, path: Path, data: bytes, consumer: torch.cuda.Stream) -> bool:
    """Whether a tensor that is read into again keeps its old bytes for the work that was queued before.

    Fails when ``staging.adopt`` does not make the copy stream wait (for a backend that writes without it: when the
    backend does not wait for the event that ``adopt`` gives).
    """
    nbytes = 9 << 20
    with torch.cuda.stream(consumer):
        dest = torch.full((nbytes,), 0xA5, dtype=torch.uint8, device=storage.device)
        torch.cuda._sleep(LONG)
        before = dest.clone()
        storage.read([Read(str(path), 3, dest)])
        after = dest.clone()
    torch.cuda.synchronize(storage.device)
    return bytes_of(before) == b"\xa5" * nbytes and bytes_of(after) == data[3 : 3 + nbytes]


def dropped_destination_is_not_reused(storage: Storage, path: Path, data: bytes, consumer: torch.cuda.Stream) -> bool:
    """Whether memory of a destination that nobody waited for stays unused until its copy is over.

    Fails when ``staging.adopt`` does not record the destinations on the copy stream.
    """
    nbytes = 20 << 20
    torch.cuda.synchronize(storage.device)
    torch.cuda.empty_cache()
    with torch.cuda.stream(consumer):
        dest = torch.empty(nbytes, dtype=torch.uint8, device=storage.device)
        with torch.cuda.stream(staging.copy_stream(storage.device)):
            torch.cuda._sleep(LONG)
        storage.submit([Read(str(path), 0, dest)])
        del dest
        storage.close()  # every byte is read, and every copy queued
        fresh = torch.full((nbytes,), 7, dtype=torch.uint8, device=storage.device)
    torch.cuda.synchronize(storage.device)
    return bool((fresh == 7).all())


def safe_from_another_backend(storage: Storage, path: Path, data: bytes, consumer: torch.cuda.Stream) -> bool:
    """Whether what is loaded is safe from copies of another backend into the same memory that are still under way.

    For a backend that writes to the device by itself. Buffers come from the copy stream's pool, and that stream's order
    protects only what goes through it: such a backend must wait for it, also before it fills a fresh buffer.
    """
    nbytes = 20 << 20
    torch.cuda.synchronize(storage.device)
    torch.cuda.empty_cache()
    with torch.cuda.stream(staging.copy_stream(storage.device)):
        torch.cuda._sleep(LONG)
    with opened("posix", str(storage.device)) as posix:
        posix.load(str(path), [(0, nbytes)])  # nobody waits: the block is free, its copies are not over
    with torch.cuda.stream(consumer):
        seen = storage.load(str(path), [(100, nbytes)]).wait()[0]
    torch.cuda.synchronize(storage.device)
    return bytes_of(seen) == data[100 : 100 + nbytes]


@pytest.mark.gpu
class CudaStorageContract(StorageContract):
    """What comes on top for a CUDA target: streams, and memory that changes hands."""

    @pytest.fixture(params=["default stream", "another stream"])
    def consumer(self, request: pytest.FixtureRequest, storage: Storage) -> torch.cuda.Stream:
        """The stream that uses what was loaded."""
        if request.param == "default stream":
            return torch.cuda.default_stream(storage.device)
        return torch.cuda.Stream(storage.device)

    # Each of these fails when one piece of staging.py is taken out; test_staging.py takes it out and looks.

    def test_wait_hands_over_to_the_current_stream(
        self, storage: Storage, blob: Path, data: bytes, consumer: torch.cuda.Stream
    ) -> None:
        assert handed_over(storage, blob, data, consumer)

    def test_a_slow_consumer_keeps_its_data(
        self, storage: Storage, blob: Path, data: bytes, consumer: torch.cuda.Stream
    ) -> None:
        assert slow_consumer_keeps_its_data(storage, blob, data, consumer)

    def test_slow_consumers_of_many_files_keep_their_data(
        self, storage: Storage, folder: Path, consumer: torch.cuda.Stream
    ) -> None:
        paths, _, _ = self.files(folder, [20_000 + i for i in range(150)])
        assert many_slow_consumers_keep_their_data(storage, paths, consumer)

    def test_a_destination_is_filled_only_after_its_last_use(
        self, storage: Storage, blob: Path, data: bytes, consumer: torch.cuda.Stream
    ) -> None:
        assert refilled_after_use(storage, blob, data, consumer)

    def test_a_dropped_destination_is_not_reused_too_early(
        self, storage: Storage, blob: Path, data: bytes, consumer: torch.cuda.Stream
    ) -> None:
        assert dropped_destination_is_not_reused(storage, blob, data, consumer)

    def test_loaded_on_one_stream_and_used_on_another(self, storage: Storage, blob: Path, data: bytes) -> None:
        streams = [torch.cuda.Stream(storage.device) for _ in range(3)]
        pendings = []
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                pendings.append(storage.load(str(blob), [(i, 9 << 20)]))
        for i, (stream, pending) in enumerate(zip(reversed(streams), pendings, strict=True)):
            with torch.cuda.stream(stream):
                seen = pending.wait()[0].clone()
            stream.synchronize()
            assert bytes_of(seen) == data[i : i + (9 << 20)]

    def test_after_an_error_the_destinations_are_the_callers_again(
        self, storage: Storage, folder: Path, blob: Path, consumer: torch.cuda.Stream
    ) -> None:
        """Copies that were queued before the error was found arrive late."""
        with torch.cuda.stream(staging.copy_stream(storage.device)):
            torch.cuda._sleep(LONG)
        with torch.cuda.stream(consumer):
            dests = [self.dest(storage, 100_000) for _ in range(12)]
            requests = [Read(str(blob), 0, d) for d in dests]
            requests.append(Read(str(folder / "missing.bin"), 0, self.dest(storage, 10)))
            error = errors_of(lambda: storage.read(requests))
            assert isinstance(error, FileNotFoundError)
            for dest in dests:
                dest.fill_(0x77)
        torch.cuda.synchronize(storage.device)
        assert all(bool((d == 0x77).all()) for d in dests)

    def test_many_slow_consumers_in_threads(self, storage: Storage, blob: Path, data: bytes) -> None:
        nbytes = 3 << 20

        def consume(seed: int) -> None:
            stream = torch.cuda.Stream(storage.device)
            seen = []
            with torch.cuda.device(storage.device), torch.cuda.stream(stream):
                for i in range(40):
                    offset = (seed * 40 + i) * 4096
                    (tensor,) = storage.load(str(blob), [(offset, nbytes)]).wait()
                    torch.cuda._sleep(LONG // 200)
                    seen.append((offset, tensor.clone()))
                    del tensor
            stream.synchronize()
            assert all(bytes_of(t) == data[offset : offset + nbytes] for offset, t in seen)

        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(consume, seed) for seed in range(8)]:
                future.result()

    def test_fills_host_memory_too(self, storage: Storage, blob: Path, data: bytes) -> None:
        host = torch.zeros(9 << 20, dtype=torch.uint8)
        device = self.dest(storage, 9 << 20)
        storage.read([Read(str(blob), 5, host), Read(str(blob), 6, device), Read(str(blob), 7, host[:0])])
        assert bytes_of(host) == data[5 : 5 + (9 << 20)]
        assert bytes_of(device) == data[6 : 6 + (9 << 20)]

    def test_writes_tensors_larger_than_a_staging_slot(self, storage: Storage, folder: Path) -> None:
        data = content(2 * staging.SLOT_BYTES + 4097)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(storage.device)
        storage.write(str(folder / "file.bin"), [b"head", tensor, tensor[5 : 2 << 20], b"tail"])
        assert (folder / "file.bin").read_bytes() == b"head" + data + data[5 : 2 << 20] + b"tail"

    def test_writes_what_the_current_stream_is_still_computing(self, storage: Storage, folder: Path) -> None:
        with torch.cuda.stream(torch.cuda.Stream(storage.device)):
            tensor = torch.zeros(5 << 20, dtype=torch.uint8, device=storage.device)
            torch.cuda._sleep(LONG)
            tensor.fill_(9)
            storage.write(str(folder / "file.bin"), [b"head", tensor[1:], tensor[:1]])
        assert (folder / "file.bin").read_bytes() == b"head" + b"\x09" * (5 << 20)

    def test_leaves_the_current_device_and_stream_alone(self, storage: Storage, blob: Path) -> None:
        stream = torch.cuda.Stream(storage.device)
        with torch.cuda.stream(stream):
            storage.load(str(blob), [(0, 1 << 20)]).wait()
            storage.read([Read(str(blob), 0, self.dest(storage, 100))])
            assert torch.cuda.current_stream(storage.device) == stream

    def test_loads_while_the_default_stream_is_busy(self, storage: Storage, blob: Path, data: bytes) -> None:
        """Reading ahead must not wait for the training that it runs ahead of."""
        self.get(storage, blob, (0, BLOB_BYTES))
        busy = torch.cuda.Event()
        torch.cuda._sleep(LONG)
        busy.record(torch.cuda.default_stream(storage.device))
        with torch.cuda.stream(torch.cuda.Stream(storage.device)):
            (tensor,) = storage.load(str(blob), [(0, BLOB_BYTES)]).wait()
            torch.cuda.current_stream(storage.device).synchronize()
        assert not busy.query(), "it waited for the default stream"
        assert bytes_of(tensor) == data
