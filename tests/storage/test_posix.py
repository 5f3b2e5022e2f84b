"""The posix backend: the contract on both targets, and what is its own (private mappings)."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from monai_gds.errors import FileChanged
from monai_gds.storage import FileId, Read, Storage, _uring, open_storage, staging
from monai_gds.storage import posix as posix_module
from monai_gds.storage._uring import Ring
from monai_gds.storage.posix import PosixStorage
from tests.storage.contract import BLOB_BYTES, CudaStorageContract, StorageContract, bytes_of, content, opened


@pytest.fixture
def no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that has no io_uring, or a container that does not let it through."""

    def refuse() -> Ring:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(posix_module, "Ring", refuse)
    monkeypatch.setattr(posix_module, "_local", threading.local())


class TestPosixOnCpu(StorageContract):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        with opened("posix", "cpu") as storage:
            yield storage

    def test_loading_a_large_range_reads_none_of_it(self, storage: Storage, blob: Path) -> None:
        """A crop must cost the pages it touches: what load() gives of a large range is a mapping."""
        before = _resident_bytes()
        held = [storage.load(str(blob), [(0, BLOB_BYTES)]).wait()[0] for _ in range(20)]
        assert _resident_bytes() - before < BLOB_BYTES
        assert sum(int(t[-1]) for t in held) == 20 * int(held[0][-1])

    def test_what_is_loaded_suits_any_dtype(self, storage: Storage, blob: Path) -> None:
        for offset in (0, 1, 8, 513, 4096, 8193):
            for nbytes in (16, 4096, 1 << 20):
                (tensor,) = storage.load(str(blob), [(offset, nbytes)]).wait()
                assert tensor.data_ptr() % 16 == 0
                assert tensor.view(torch.complex128).numel() == nbytes // 16

    @pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENODEV])
    def test_reads_where_nothing_can_be_mapped(
        self, storage: Storage, blob: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        """The kernel gives no more mappings (ENOMEM), or the file system knows none (ENODEV)."""

        class NoMapping:
            def __init__(self, *_: object) -> None:
                raise OSError(code, os.strerror(code))

        monkeypatch.setattr(posix_module, "_Mapping", NoMapping)
        assert self.get(storage, blob, (4096, 1 << 20)) == [data[4096 : 4096 + (1 << 20)]]

    def test_many_small_files_take_no_calls_of_their_own(
        self, storage: Storage, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With several threads, each call into the kernel can mean a wait for the interpreter's lock."""
        try:
            Ring()
        except OSError as e:
            pytest.skip(f"this machine's kernel gives no io_uring that chains commands: {e}")
        monkeypatch.setattr(posix_module, "open_file", lambda *_: pytest.fail("a file was opened by itself"))
        paths, sizes, starts = self.files(folder, [20_000] * 100)
        parts = storage.submit_files(paths, sizes, starts, torch.empty(100 * 20_480, dtype=torch.uint8)).wait()
        assert [bytes_of(p) for p in parts] == [content(20_000, i) for i in range(100)]

    def test_names_that_hold_anything(self, storage: Storage, folder: Path) -> None:
        names = ["a b", "ü", os.fsdecode(b"\xff\xfe"), "\n", "x" * 200]
        paths = [str(self.make(folder, content(50, i), name)) for i, name in enumerate(names)]
        sizes, starts = np.full(5, 50), np.arange(5) * 50
        parts = storage.submit_files(paths, sizes, starts, torch.empty(250, dtype=torch.uint8)).wait()
        assert [bytes_of(p) for p in parts] == [content(50, i) for i in range(5)]
        with pytest.raises(ValueError, match="null"):
            storage.submit_files(["a\0b", *paths[1:]], sizes, starts, torch.empty(250, dtype=torch.uint8)).wait()

    def test_a_forked_child_has_rings_of_its_own(self, storage: Storage, folder: Path) -> None:
        paths, sizes, starts = self.files(folder, [3000] * 10)
        dest = torch.empty(10 * 4096, dtype=torch.uint8)
        posix_module.read_small_files(
            paths, 0 * sizes, sizes, starts, dest, [None] * 10
        )  # in this thread, the one that the child has too

        def child() -> None:
            mine = torch.from_numpy(np.zeros(10 * 4096, np.uint8))  # OpenMP does not survive a fork
            posix_module.read_small_files(paths, 0 * sizes, sizes, starts, mine, [None] * 10)
            same = all(bytes_of(mine[i * 4096 :][:3000]) == content(3000, i) for i in range(10))
            os._exit(0 if same else 1)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(30)
        process.kill()
        assert process.exitcode == 0
        dest.zero_()
        posix_module.read_small_files(paths, 0 * sizes, sizes, starts, dest, [None] * 10)
        assert bytes_of(dest[:3000]) == content(3000, 0)

    def test_a_read_that_was_interrupted_leaves_nothing_to_the_next(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C reaches a read where no thread could be started for it, so that the caller's own reads."""
        enter, presses = _uring._call, iter([True])

        def interrupted(number: int, *arguments: object) -> int:
            result = enter(number, *arguments)
            if number == _uring._ENTER and next(presses, False):
                raise KeyboardInterrupt
            return result

        if posix_module.ring_of_this_thread() is None:
            pytest.skip("this machine's kernel gives no io_uring that chains commands")
        paths, sizes, starts = self.files(folder, [3000] * 10)
        expects: list[FileId | None] = [None] * 10
        dest = torch.zeros(10 * 4096, dtype=torch.uint8)
        with monkeypatch.context() as patch:
            patch.setattr(_uring, "_call", interrupted)
            with pytest.raises(KeyboardInterrupt):
                posix_module.read_small_files(paths, 0 * sizes, sizes, starts, dest, expects)
        os.unlink(paths[7])
        with pytest.raises(FileNotFoundError, match="many-7"):
            posix_module.read_small_files(paths, 0 * sizes, sizes, starts, dest, expects)

    def test_parts_of_small_files_and_only_of_those_expected(self, storage: Storage, folder: Path) -> None:
        paths, sizes, starts = self.files(folder, [3000] * 10)
        offsets = np.arange(10) * 7
        dest = torch.empty(10 * 4096, dtype=torch.uint8)
        expects = [FileId.of(path) if i % 2 else None for i, path in enumerate(paths)]
        posix_module.read_small_files(paths, offsets, sizes - offsets, starts, dest, expects)
        for i in range(10):
            assert bytes_of(dest[i * 4096 :][: 3000 - 7 * i]) == content(3000, i)[7 * i :]
        os.utime(paths[4])
        posix_module.read_small_files(paths, offsets, sizes - offsets, starts, dest, expects)  # nobody minds
        os.utime(paths[5])
        with pytest.raises(FileChanged, match="many-5"):
            posix_module.read_small_files(paths, offsets, sizes - offsets, starts, dest, expects)

    def test_small_files_are_shared_out_in_groups(self, tmp_path: Path) -> None:
        """A thread for each file would cost more than reading it: 64 files of 100 kB are work for four."""
        for i in range(64):
            (tmp_path / f"{i}").write_bytes(bytes(100_000))
        dest = torch.empty(64, 100_000, dtype=torch.uint8)
        before = set(threading.enumerate())
        with closing(open_storage("posix", "cpu", threads=16)) as storage:
            storage.read([Read(str(tmp_path / f"{i}"), 0, dest[i]) for i in range(64)])
            assert 1 <= len(set(threading.enumerate()) - before) <= 4

    def test_unmaps_what_nobody_holds(self, storage: Storage, blob: Path) -> None:
        self.get(storage, blob, (0, 1 << 20))
        before = Path("/proc/self/maps").read_text().count("blob.bin")
        tensors = storage.load(str(blob), [(0, 1 << 20), (4096, 1 << 20)]).wait()
        assert Path("/proc/self/maps").read_text().count("blob.bin") > before
        crop = tensors[0][5000:5010]
        expected = bytes_of(crop)
        del tensors
        assert bytes_of(crop) == expected
        del crop
        assert Path("/proc/self/maps").read_text().count("blob.bin") == before

    def test_mappings_and_reads_in_flight_at_exit_are_no_trouble(self, blob: Path) -> None:
        script = (
            "import torch\n"
            "from monai_gds.storage import Read, open_storage\n"
            "storage = open_storage('posix', 'cpu')\n"
            f"kept = storage.load({str(blob)!r}, [(0, {BLOB_BYTES})]).wait()\n"
            f"late = storage.submit([Read({str(blob)!r}, 0, torch.empty({BLOB_BYTES}, dtype=torch.uint8))])\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")

    def test_durable_means_fsync(self, storage: Storage, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
        storage.write(str(folder / "whole.bin"), [b"12345"])
        assert synced == []
        storage.write(str(folder / "durable.bin"), [b"12345"], durable=True)
        assert synced == [5]

    @pytest.mark.parametrize("threads", [0, -1])
    def test_refuses_no_threads(self, threads: int) -> None:
        with pytest.raises(ValueError, match="threads"), opened("posix", "cpu", threads=threads):
            pass


class TestPosixPastThePageCache(StorageContract):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        with opened("posix", "cpu", direct_io=True) as storage:
            yield storage

    def test_reads_leave_no_page_behind(self, storage: Storage, blob: Path, data: bytes) -> None:
        _drop(blob)
        assert self.get(storage, blob, (0, 2 << 20), (4096, 10_000)) == [data[: 2 << 20], data[4096:14_096]]
        assert not _is_cached(blob, 1 << 20)


class TestPosixPastThePageCacheOnCuda(CudaStorageContract):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        with opened("posix", "cuda", direct_io=True) as storage:
            yield storage


def test_a_cold_file_is_asked_for_as_a_whole_and_stays_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(bytes(range(256)) * (8 << 12))
    _drop(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        posix_module.expect_cold(fd, 0, 8 << 20)
        deadline = time.monotonic() + 20
        while not _is_cached(path, (8 << 20) - 4096):
            assert time.monotonic() < deadline, "the kernel was not told of the end of the file"
    finally:
        os.close(fd)
    _drop(path)
    with opened("posix", "cpu") as storage:
        dest = torch.empty(8 << 20, dtype=torch.uint8)
        storage.read([Read(str(path), 0, dest)])
    assert bytes_of(dest) == path.read_bytes()
    assert _is_cached(path, 4 << 20)


def test_direct_io_where_there_is_none_is_an_error_that_says_so(tmp_path: Path) -> None:
    fd, path = tempfile.mkstemp(dir="/dev/shm")
    os.close(fd)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        pytest.skip("this kernel's tmpfs takes O_DIRECT")
    except OSError as e:
        assert e.errno == errno.EINVAL
    try:
        with opened("posix", "cpu", direct_io=True) as storage, pytest.raises(OSError, match="direct_io"):
            storage.read([Read(path, 0, torch.empty(0, dtype=torch.uint8))])
    finally:
        os.unlink(path)


def _drop(path: Path) -> None:
    """Takes a file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if _is_cached(path, 0):
        pytest.skip(f"the file system of {path} keeps its files in memory")


def _is_cached(path: Path, offset: int) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


class TestBlocksOnASimulatedDevice:
    """What happens to small files on the way to a CUDA device, with host memory in the device's place."""

    @pytest.fixture
    def storage(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
        stream = object()
        monkeypatch.setattr(PosixStorage, "_reads_blocks", lambda self: True)
        monkeypatch.setattr(staging, "hand_off", lambda *args, **settings: None)
        monkeypatch.setattr(staging, "allocate_on_copy_stream", lambda n, device: torch.empty(n, dtype=torch.uint8))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(staging, "raw_current_stream", lambda device: 1)
        with opened("posix", "cpu") as storage:
            yield storage

    folder = StorageContract.folder
    make = StorageContract.make
    files = StorageContract.files
    test_loads_many_files_each_with_its_ranges = StorageContract.test_loads_many_files_each_with_its_ranges
    test_loads_nothing_of_many_files = StorageContract.test_loads_nothing_of_many_files
    test_each_of_many_loaded_files_has_its_own_error = StorageContract.test_each_of_many_loaded_files_has_its_own_error

    def test_who_waits_again_gets_the_same_though_another_file_of_the_block_is_missing(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        good = tmp_path / "good.bin"
        good.write_bytes(content(1000))
        files = [(str(good), [(0, 1000)], None), (str(tmp_path / "missing.bin"), [(0, 10)], None)]
        pending, missing = storage.load_all(files)
        (first,), (again,) = pending.wait(), pending.wait()
        assert first is again
        assert bytes_of(first) == good.read_bytes()
        for _ in range(2):
            with pytest.raises(FileNotFoundError, match="missing"):
                missing.wait()


@pytest.mark.usefixtures("no_ring")
class TestPosixWithoutIoUring(StorageContract):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        with opened("posix", "cpu") as storage:
            yield storage


class TestPosixOnCuda(CudaStorageContract):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        with opened("posix", "cuda") as storage:
            yield storage

    def test_a_forked_child_that_exits_by_itself_does_so_quietly(self, blob: Path, storage: Storage) -> None:
        """The child drops what it inherited (streams, events, pinned slots) without touching CUDA."""
        script = (
            "import os, sys, torch\n"
            "from monai_gds.storage import open_storage\n"
            f"storage = open_storage({storage.name!r}, {str(storage.device)!r})\n"
            f"storage.load({str(blob)!r}, [(0, 9 << 20)]).wait()\n"
            "torch.cuda.synchronize()\n"
            "if os.fork() == 0: sys.exit(0)\n"
            "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
