"""The posix backend: the contract on both targets, and what is its own: private mappings and direct reads."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from monai_gds.base.stages import HOST, MAPPED, Watch, measured
from monai_gds.bench import pagecache
from monai_gds.errors import FileChanged, StorageError
from monai_gds.storage import Reads, Storage, files, open_storage
from monai_gds.storage.files import FileId
from monai_gds.storage.plain import posix as posix_module
from monai_gds.storage.plain.posix import PosixBackend
from monai_gds.testing import BackendContract, CudaBackendContract, WriteContract
from monai_gds.testing.tools import BLOB_BYTES, bytes_of, descriptors
from tests.fresh import warm
from tests.polls import until
from tests.storage.full_contract import CudaFullContract, FullContract

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class TestPosixOnCpu(FullContract, WriteContract):
    """Also what BlockingBackend and Backend.write promise for all backends."""

    @pytest.fixture
    def backend(self) -> PosixBackend:
        return PosixBackend(CPU)

    def test_mapping_a_large_range_reads_none_of_it(self, storage: Storage, blob: Path) -> None:
        """A crop must cost the pages that it touches."""
        before = _resident_bytes()
        held = [storage.map(Reads.of(str(blob), [(0, BLOB_BYTES)])).wait()[0] for _ in range(20)]
        assert _resident_bytes() - before < BLOB_BYTES
        assert sum(int(t[-1]) for t in held) == 20 * int(held[0][-1])

    def test_what_is_mapped_suits_any_dtype(self, storage: Storage, blob: Path) -> None:
        for offset in (0, 1, 8, 513, 4096, 8193):
            for nbytes in (16, 4096, 1 << 20):
                (tensor,) = storage.map(Reads.of(str(blob), [(offset, nbytes)])).wait()
                assert tensor.data_ptr() % 16 == 0
                assert tensor.view(torch.complex128).numel() == nbytes // 16

    @pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENODEV])
    def test_reads_where_nothing_can_be_mapped(
        self, storage: Storage, blob: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        """The kernel gives no more mappings (ENOMEM), or the file system supports none (ENODEV)."""

        def no_mapping(*_: object) -> torch.Tensor:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(posix_module, "map_privately", no_mapping)
        self.assert_gives(storage, blob, data, (4096, 1 << 20), how="map")

    def test_what_is_mapped_and_what_is_read_is_counted(self, storage: Storage, blob: Path) -> None:
        with measured(watch := Watch()):
            storage.map(Reads.of(str(blob), [(0, 1 << 20), (1 << 20, 10)])).wait()
        assert watch.counts == {"bytes": (1 << 20) + 10, MAPPED: 1 << 20, HOST: 10}

    def test_unmaps_what_nobody_holds(self, storage: Storage, blob: Path) -> None:
        before = Path("/proc/self/maps").read_text().count("blob.bin")
        tensors = storage.map(Reads.of(str(blob), [(0, 1 << 20), (4096, 1 << 20)])).wait()
        assert Path("/proc/self/maps").read_text().count("blob.bin") > before
        crop = tensors[0][5000:5010]
        expected = bytes_of(crop)
        del tensors
        assert bytes_of(crop) == expected
        del crop
        assert Path("/proc/self/maps").read_text().count("blob.bin") == before

    def test_mappings_and_reads_in_flight_at_exit_are_no_trouble(self, blob: Path) -> None:
        script = (
            "from monai_gds.storage import Reads, open_storage\n"
            "storage = open_storage('posix', 'cpu')\n"
            f"reads = Reads.of({str(blob)!r}, [(0, {BLOB_BYTES})])\n"
            "kept = storage.map(reads).wait()\n"
            "late = storage.load(reads)\n"
        )
        done = warm().run("-c", script, whole=True)
        assert (done.returncode, done.stderr) == (0, "")

    def test_durable_means_fsync(self, storage: Storage, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
        storage.write(str(folder / "whole.bin"), [b"12345"])
        assert synced == []
        storage.write(str(folder / "durable.bin"), [b"12345"], durable=True)
        assert synced == [5]


class TestPosixWithoutIoUring(BackendContract):
    @pytest.fixture
    def backend(self, monkeypatch: pytest.MonkeyPatch) -> PosixBackend:
        """As where the kernel has no io_uring, or a container does not let it through."""
        monkeypatch.setattr(posix_module, "ring_of_this_thread", lambda: None)
        return PosixBackend(CPU)

    def test_describes_how_small_files_are_read(self, storage: Storage) -> None:
        assert storage.describe()["small_files"] == "one call after another"


class TestPosixPastThePageCache(BackendContract):
    @pytest.fixture
    def backend(self) -> PosixBackend:
        return PosixBackend(CPU, direct_io=True)

    def test_reads_leave_no_page_behind(self, storage: Storage, blob: Path, data: bytes) -> None:
        _drop(blob)
        self.assert_gives(storage, blob, data, (0, 2 << 20), (4096, 16_384))
        self.assert_gives(storage, blob, data, (0, 2 << 20), (4096, 16_384), how="map")
        assert pagecache.cached(blob) == 0

    def test_of_what_is_not_aligned_only_its_pages_stay(self, storage: Storage, blob: Path, data: bytes) -> None:
        """The kernel's read-ahead would bring in more: megabytes on drives that are set so."""
        _drop(blob)
        for page in range(20):
            self.assert_gives(storage, blob, data, (page * mmap.PAGESIZE, 1000))
        assert 0 < pagecache.cached(blob) * BLOB_BYTES <= 20 * mmap.PAGESIZE


class TestPosixOnCuda(CudaFullContract, WriteContract):
    @pytest.fixture
    def backend(self) -> PosixBackend:
        return PosixBackend(GPU)

    def test_a_forked_child_that_exits_by_itself_does_so_quietly(self, blob: Path) -> None:
        """The child drops what it inherited (streams, events, pinned slots) without touching CUDA."""
        script = (
            "import os, sys, torch\n"
            "from monai_gds.storage import Reads, open_storage\n"
            "storage = open_storage('posix', 'cuda:0')\n"
            f"storage.load(Reads.of({str(blob)!r}, [(0, 9 << 20)])).wait()\n"
            "torch.cuda.synchronize()\n"
            "if os.fork() == 0: sys.exit(0)\n"
            "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        )
        command = [sys.executable, "-W", "ignore", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")


class TestPosixPinnedOnCuda(CudaFullContract):
    """Every file that was read once is registered, and copied from the page cache."""

    @pytest.fixture
    def backend(self) -> PosixBackend:
        return PosixBackend(GPU, pinned_bytes="4GB")

    def test_the_second_read_is_a_copy_from_the_page_cache(
        self, backend: PosixBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "large.bin"
        path.write_bytes(data := os.urandom(40 << 20))
        ranges = [(0, 20 << 20), ((20 << 20) + 5, (20 << 20) - 5)]
        with closing(Storage(backend)) as storage:
            for _ in range(3):
                tensors = storage.load(Reads.of(str(path), ranges, FileId.of(path))).wait()
                assert b"".join(map(bytes_of, tensors)) == data[: 20 << 20] + data[(20 << 20) + 5 :]
                _until_pinned(storage)
            assert storage.describe()["pinned"] == 40 << 20
            monkeypatch.setattr(backend, "_read_group", None)  # nothing is read any more
            (again,) = storage.load(Reads.of(str(path), [(0, 40 << 20)], FileId.of(path))).wait()
            assert bytes_of(again) == data

    def test_pieces_larger_than_a_slot_are_read_if_their_file_was_dropped_meanwhile(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "large.bin"
        path.write_bytes(data := os.urandom(40 << 20))
        ranges = [(0, 40 << 20), (5, 100), ((3 << 20) + 5, 33 << 20)]
        backend = PosixBackend(GPU, threads=1, pinned_bytes="4GB")
        with closing(Storage(backend)) as storage:
            for dropped in (False, False, True):
                if dropped:
                    monkeypatch.setattr(backend._pinned, "get", lambda *_: None)
                tensors = storage.load(Reads.of(str(path), ranges, FileId.of(path))).wait()
                for tensor, (start, nbytes) in zip(tensors, ranges, strict=True):
                    assert bytes_of(tensor) == data[start : start + nbytes]
                _until_pinned(storage)

    @pytest.mark.parametrize("change", ["replaced", "cut", "removed"])
    def test_a_registered_file_that_changed_is_noticed(
        self, backend: PosixBackend, tmp_path: Path, change: str
    ) -> None:
        path = tmp_path / "large.bin"
        path.write_bytes(os.urandom(8 << 20))
        file = FileId.of(path)
        with closing(Storage(backend)) as storage:
            storage.load(Reads.of(str(path), [(0, 8 << 20)], file)).wait()
            _until_pinned(storage)
            if change == "replaced":
                (tmp_path / "other").write_bytes(other := os.urandom(8 << 20))
                os.replace(tmp_path / "other", path)
            elif change == "cut":
                os.truncate(path, 1000)
            else:
                path.unlink()
            with pytest.raises(FileNotFoundError if change == "removed" else FileChanged):
                storage.load(Reads.of(str(path), [(0, 8 << 20)], file)).wait()
            if change == "replaced":
                (now,) = storage.load(Reads.of(str(path), [(0, 8 << 20)], FileId.of(path))).wait()
                assert bytes_of(now) == other
            assert storage.describe()["pinned"] in (0, 8 << 20)


def _until_pinned(storage: Storage) -> None:
    """Waits for the thread that registers files."""
    until(lambda: storage.describe()["pinned"])
    time.sleep(0.2)


@pytest.mark.parametrize(
    ("device", "options"),
    [(CPU, {"pinned_bytes": 1e9}), (GPU, {"pinned_bytes": -1}), (GPU, {"pinned_bytes": 1e9, "direct_io": True})],
)
def test_pinned_bytes_are_refused_where_they_have_no_meaning(device: torch.device, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="pinned_bytes"):
        PosixBackend(device, **options)  # type: ignore[arg-type]


class TestPosixPastThePageCacheOnCuda(CudaBackendContract):
    @pytest.fixture
    def backend(self) -> PosixBackend:
        return PosixBackend(GPU, direct_io=True)


def test_a_cold_file_is_announced_as_a_whole_and_stays_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(bytes(range(256)) * (8 << 12))
    _drop(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        files.expect_cold(fd, 0, 8 << 20)
        until(lambda: pagecache.cached(path) == 1, "the kernel was not told of the end of the file")
    finally:
        os.close(fd)
    _drop(path)
    with closing(open_storage("posix", "cpu")) as storage:
        (tensor,) = storage.load(Reads.of(str(path), [(0, 8 << 20)])).wait()
    assert bytes_of(tensor) == path.read_bytes()
    assert pagecache.cached(path) == 1


@pytest.mark.parametrize("nbytes", [0, 100])
def test_direct_io_where_there_is_none_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    path, real = tmp_path / "file.bin", os.open

    def refuse(target: str, flags: int, *mode: int, **settings: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), target)
        return real(target, flags, *mode, **settings)

    path.write_bytes(bytes(100))
    before = descriptors()
    monkeypatch.setattr(os, "open", refuse)
    with closing(open_storage("posix", "cpu", direct_io=True)) as storage:
        pending = storage.load(Reads.of(str(path), [(0, nbytes)]))
        with pytest.raises(StorageError, match=r"O_DIRECT.*file\.bin"):
            pending.wait()
    assert descriptors() <= before


@pytest.mark.parametrize("threads", [0, -1])
def test_refuses_no_threads(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        open_storage("posix", "cpu", threads=threads)


def _drop(path: Path) -> None:
    """Takes a file out of the page cache. Pages that the kernel is busy with leave at a later try."""
    deadline = time.monotonic() + 20
    while pagecache.drop([path]):
        if time.monotonic() > deadline:
            pytest.skip(f"the file system of {path} keeps its files in memory")
        time.sleep(0.1)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
