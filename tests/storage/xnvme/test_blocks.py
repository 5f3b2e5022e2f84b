"""The xnvme-block backend: the contract on real file systems, and everything a device or a map can do wrong."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import mmap
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from monai.transforms import Transform

from monai_gds import GDSDataset
from monai_gds.errors import BlockMapError, CacheWarning, FileChanged, NotMappable, StorageError
from monai_gds.storage import FileId, Pending, Reads, Storage, open_storage
from monai_gds.storage import queue as queue_module
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.blockmap.extents import Extent, MountedFileSystems
from monai_gds.storage.blockmap.inodes import inode_table
from monai_gds.storage.blockmap.saved import FileBlocks
from monai_gds.storage.xnvme import libxnvme, user_space
from monai_gds.storage.xnvme.blocks import XnvmeBlockBackend
from monai_gds.testing import BackendContract, CudaBackendContract, WriteContract
from monai_gds.testing.disks import small_disk
from monai_gds.testing.tools import bytes_of, content
from tests.fresh import printed_by, warm
from tests.loopdisk import LoopDisk, loop_disk, new_uuid, run
from tests.storage import simulated
from tests.storage.blockmap.striped import ARRAYS, striped
from tests.storage.full_contract import FullContract
from tests.storage.xnvme import libraries

SIZES = (0, 1, 511, 512, 513, 4095, 4096, 4097, 10_000, 116_000, 3_000_001)


def opened(device: str = "cpu", **options: Any) -> closing[Storage]:
    """The backend's storage, closed at the end."""
    return closing(open_storage("xnvme-block", device, **options))


class Place:
    """A loop disk, and how the backend is opened over it."""

    def __init__(self, disk: LoopDisk, gpu: bool) -> None:
        self.folder = disk.folder / "shared"
        self.folder.mkdir()
        self.options: dict[str, Any] = {"uri": disk.device, "mem": "gpu"} if gpu else {}


class OnADisk(BackendContract):
    """The contract on a disk of its own."""

    target = "cpu"

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
        """Which library, which file system, and bytes per block."""
        library, kind, block = request.param.split(", ")
        folder = tmp_path_factory.mktemp("disk")
        with libraries.using(library), loop_disk(folder, kind, block_size=int(block), size=1 << 30) as disk:
            yield Place(disk, gpu=library == "double gpu")

    @pytest.fixture(scope="class")
    @classmethod
    def shared_folder(cls, place: Place) -> Path:
        return place.folder

    @pytest.fixture
    def storage(self, place: Place) -> Iterator[Storage]:
        with opened(self.target, **place.options) as storage:
            yield storage


@pytest.mark.parametrize("place", ["real, ext4, 512", "real, xfs, 4096"], indirect=True)
class TestBlocksToCpu(OnADisk, WriteContract):
    pass


@pytest.mark.parametrize("place", ["double, ext4, 4096"], indirect=True)
class TestBlocksOfTheDoubleToCpu(OnADisk, FullContract, WriteContract):
    pass


@pytest.mark.parametrize("place", ["double, ext4, 512"], indirect=True)
class TestBlocksToSimulatedGpu(OnADisk):
    """Through pinned memory."""

    @pytest.fixture
    def storage(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
        gpu = simulated.install_gpu(monkeypatch)
        with closing(Storage(XnvmeBlockBackend(simulated.GPU))) as storage:
            yield storage
        gpu.stream.close()

    def dest(self, storage: Storage, nbytes: int, fill: int = 0xA5) -> torch.Tensor:
        return simulated.on_device(torch.full((nbytes,), fill, dtype=torch.uint8))

    test_describes_itself = None  # its write is tested on the CPU


@pytest.mark.parametrize("place", ["real, ext4, 512", "double, ext4, 4096"], indirect=True)
class TestBlocksToCudaThroughPinnedMemory(OnADisk, CudaBackendContract, WriteContract):
    target = "cuda"


@pytest.mark.parametrize("place", ["double gpu, ext4, 512", "double gpu, ext4, 4096"], indirect=True)
class TestBlocksToCudaBuffers(OnADisk, CudaBackendContract, WriteContract):
    """The drive writes to GPU memory by itself: buffers of cudaMalloc, wrapped as tensors."""

    target = "cuda"

    test_loads_while_the_default_stream_is_busy = None  # cudaMalloc and cudaFree wait for the whole device

    # The contract reads from disks that it makes itself; this storage reads one device, and refuses them by name.

    def test_an_unreadable_disk_is_an_error(self, storage: Storage, folder: Path) -> None:
        paths, _, _ = self.files(folder, [5000] * 10)
        with small_disk(folder) as other:
            (other / "record.bin").write_bytes(content(5000))
            reads = Reads.join([Reads.of(path, [(0, 5000)]) for path in [*paths, str(other / "record.bin")]])
            pending = self.ended(storage.load(reads))
            assert list(pending.errors) == [10]
            with pytest.raises(StorageError, match=r"it lies on .*record\.bin"):
                pending.wait()
            assert [bytes_of(t) for t in pending.tensors[:10]] == [content(5000, i) for i in range(10)]

    def test_a_full_disk_is_an_error_that_breaks_nothing_else(self, storage: Storage, folder: Path) -> None:
        with small_disk(folder) as other, pytest.raises(OSError, match=r"big\.bin") as caught:
            storage.write(str(other / "big.bin"), [b"head", self.dest(storage, 32 << 20)])
        assert caught.value.errno == errno.ENOSPC

    def test_a_forked_child_that_exits_by_itself_does_so_quietly(
        self, place: Place, blob: Path, storage: Storage
    ) -> None:
        script = (
            "import os, sys, torch\n"
            "from monai_gds.storage import Reads, open_storage\n"
            f"storage = open_storage('xnvme-block', {str(storage.device)!r}, **{place.options!r})\n"
            f"kept = storage.load(Reads.of({str(blob)!r}, [(0, 9 << 20)])).wait()\n"
            "torch.cuda.synchronize()\n"
            "if os.fork() == 0: sys.exit(0)\n"
            "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        )
        assert ended_quietly(script)

    def test_no_copy_is_made(self, storage: Storage, blob: Path, data: bytes) -> None:
        """The tensor of a large read is the buffer that the drive filled; it goes back when the tensor is gone."""
        double = libraries.Double("double gpu")
        gc.collect()
        for _ in range(2):  # frees what earlier tests left; of these two, one is still to be freed
            torch.cuda.synchronize()
            storage.memory(1)
        torch.cuda.synchronize()
        before = double.count("buffers") - 1
        tensors = [storage.load(Reads.of(str(blob), [(0, n)])).wait()[0] for n in (1 << 20, 5000)]
        assert double.count("buffers") == before + 2
        assert [bytes_of(t) for t in tensors] == [data[: 1 << 20], data[:5000]]
        del tensors
        torch.cuda.synchronize()
        storage.memory(1)
        assert double.count("buffers") <= before + 1  # that one

    def test_memory_that_runs_out_is_an_error(self, storage: Storage, blob: Path) -> None:
        double = libraries.Double("double gpu")
        double.fail("NO_MEMORY")
        try:
            with pytest.raises(StorageError, match="xnvme_buf_alloc"):
                storage.load(Reads.of(str(blob), [(0, 1 << 20)]))
        finally:
            double.reset()


# On every kind of disk.


@pytest.fixture(
    scope="module",
    params=[(kind, block, part) for kind in ("ext4", "xfs") for block in (512, 4096) for part in (False, True)],
    ids=lambda p: f"{p[0]}-{p[1]}{'-partition' if p[2] else ''}",
)
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopDisk]:
    """A disk with files of every size, of many extents and with holes, and hundreds of small ones."""
    kind, block, partitioned = request.param
    with loop_disk(tmp_path_factory.mktemp("filled"), kind, block_size=block, partitioned=partitioned) as disk:
        folder = disk.folder / "set"
        (folder / "small").mkdir(parents=True)
        for seed, size in enumerate(SIZES):
            (folder / f"{size}.bin").write_bytes(content(size, seed))
        for seed in range(0, 2000, 8):
            (folder / f"small/{seed}.bin").write_bytes(content(500 + seed * 3, seed))
        with (folder / "sparse.bin").open("wb") as f:
            f.truncate(5 << 20)
            for offset, nbytes in ((100_000, 5000), (700_000, 1), (4_000_001, 600_000)):
                f.seek(offset)
                f.write(content(nbytes))
        (folder / "tail.bin").write_bytes(content(50_000))
        os.sync()  # what is punched out stays on the disk after the extent
        run("fallocate", "--punch-hole", "--offset", "8192", "--length", "42000", str(folder / "tail.bin"))
        with (folder / "cut.bin").open("wb") as f, (folder / "other.bin").open("wb") as g:
            for i in range(200):
                for out in (f, g):
                    os.posix_fallocate(out.fileno(), i * 5000, 5000)
            for out in (f, g):
                out.write(content(1_000_000))
        os.sync()
        assert len(BlockMap.build(folder)["set/cut.bin"].extents) > 18, "more than one call of FIEMAP gives"
        yield disk


@pytest.mark.parametrize("library", ["real", "double"])
@pytest.mark.parametrize("mapped", [False, True], ids=["", "over a map"])
def test_every_file_on_every_disk(filled: LoopDisk, library: str, mapped: bool) -> None:
    files = sorted(p for p in (filled.folder / "set").rglob("*") if p.is_file())
    options = {"blockmap": BlockMap.build(filled.folder / "set")} if mapped else {}
    with libraries.using(library), opened(**options) as storage:
        for start in range(0, len(files), 64):
            batch = files[start : start + 64]
            dests = [torch.full((p.stat().st_size,), 0xA5, dtype=torch.uint8) for p in batch]
            reads = Reads.join([Reads.of(str(p), [(0, d.numel())]) for p, d in zip(batch, dests, strict=True)])
            storage.fill(reads, dests).wait()
            for path, dest in zip(batch, dests, strict=True):
                assert bytes_of(dest) == path.read_bytes(), path
        for path in files[::40]:
            assert whole(storage, path) == path.read_bytes()
        for name in ("cut.bin", "sparse.bin", "tail.bin"):
            path = filled.folder / "set" / name
            data = path.read_bytes()
            ranges = [(o, n) for o in range(0, len(data), 33_333) for n in (1, 777, 40_000) if o + n <= len(data)]
            got = storage.load(Reads.of(str(path), ranges)).wait()
            assert [bytes_of(t) for t in got] == [data[o : o + n] for o, n in ranges]


def fill_array(folder: Path) -> None:
    (folder / "set").mkdir()
    for seed, size in enumerate((*SIZES, *[900_001] * 20)):
        (folder / f"set/{seed}.bin").write_bytes(content(size, seed))


@pytest.mark.parametrize("library", ["real", "double"])
@pytest.mark.parametrize("mapped", [False, True], ids=["", "over a map"])
@pytest.mark.parametrize("array", ARRAYS)
def test_every_file_on_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: str, mapped: bool, library: str
) -> None:
    """The array is simulated; see :mod:`tests.storage.blockmap.striped`."""
    with libraries.using(library), striped(tmp_path, *ARRAYS[array], fill_array, monkeypatch) as made:
        options = {"blockmap": BlockMap.build(made.disk.folder / "set")} if mapped else {}
        with opened(**options) as storage:
            for path in (made.disk.folder / "set").iterdir():
                data = path.read_bytes()
                size = len(data)
                assert whole(storage, path) == data
                got = storage.load(Reads.of(str(path), [(size // 3, size // 2)])).wait()
                assert bytes_of(got[0]) == data[size // 3 :][: size // 2]


def test_the_drives_of_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double: libraries.Double) -> None:
    """Simulated. They are opened for a file and, after an error, again."""
    with striped(tmp_path, *ARRAYS["equal"], fill_array, monkeypatch) as made:
        path = made.disk.folder / "set/20.bin"
        with opened() as storage:
            assert whole(storage, path) == content(900_001, 20)
            assert double.count("devices") == len(made.members)
            double.fail("BAD_STATUS")
            with pytest.raises(StorageError, match="NVMe status"):
                whole(storage, path)
            assert double.count("devices") == len(made.members) - 1, "one gave the error"
            assert whole(storage, path) == content(900_001, 20)
        assert (double.count("devices"), double.count("buffers")) == (0, 0)
        with opened(uri=made.members[0]) as storage, pytest.raises(StorageError, match="this storage reads"):
            whole(storage, path)
        assert double.count("devices") == 0, "nothing keeps the first one open"
        made_elsewhere = BlockMap.build(made.disk.folder / "set")
        assert made_elsewhere.origin is not None
        other = replace(made_elsewhere.origin, uuid="0" * 36)
        with (
            opened(blockmap=BlockMap(dict(made_elsewhere), other)) as storage,
            pytest.raises(StorageError, match="and the block map was made on 0000"),
        ):
            whole(storage, path)


def test_an_array_that_is_reshaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double: libraries.Double) -> None:
    """Simulated. md does that while it is mounted, and FIEMAP's answer stays the same."""
    with striped(tmp_path, *ARRAYS["equal"], fill_array, monkeypatch) as made, opened() as storage:
        path, md = made.disk.folder / "set/20.bin", made.sysfs / "md"
        assert whole(storage, path) == content(900_001, 20)
        (md / "level").write_text("raid4")
        with pytest.raises(StorageError, match="it is raid4"):
            whole(storage, path)
        (md / "level").write_text("raid0")
        assert whole(storage, path) == content(900_001, 20)
        monkeypatch.setattr(MountedFileSystems, "refresh", lambda _: None)  # as where nobody mounts anything meanwhile
        (md / "chunk_size").write_text("131072")
        with pytest.raises(StorageError, match="lies elsewhere on the drives of its array"):
            whole(storage, path)
        assert whole(storage, path) != content(900_001, 20), "looked for where the new array would have it"


def test_an_array_is_read_through_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with striped(tmp_path, *ARRAYS["equal"], fill_array, monkeypatch) as array, libraries.using("double"):
        blocks = BlockMap.build(array.disk.folder)
        with pytest.raises(BlockMapError, match=r"an array of 3 drives, and 0000:01:00\.0 is one of them"):
            open_storage("xnvme-block", "cpu", uri="0000:01:00.0", be="upcie", blockmap=blocks)
        with pytest.raises(NotMappable, match="an array of drives: leave uri out"):
            open_storage("xnvme-block", "cpu", uri=array.disk.device)


# Over one ext4 disk.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path, "ext4") as disk:
        (disk.folder / "set").mkdir()
        yield disk


@pytest.fixture
def file(disk: LoopDisk) -> Path:
    """A file of 3 MB, ``content(3_000_000)``."""
    path = disk.folder / "set/file.bin"
    path.write_bytes(content(3_000_000))
    return path


@pytest.fixture
def double() -> Iterator[libraries.Double]:
    with libraries.using("double"):
        double = libraries.Double()
        gc.collect()  # tensors of a test that failed
        double.reset()
        yield double
        double.reset()


def start(storage: Storage, path: Path) -> Pending:
    """Starts to read a whole file."""
    return storage.load(Reads.of(str(path), [(0, path.stat().st_size)]))


def whole(storage: Storage, path: Path) -> bytes:
    """The bytes of a file."""
    return bytes_of(start(storage, path).wait()[0])


def fill(storage: Storage, path: Path, offset: int, dest: torch.Tensor) -> None:
    """Reads into a tensor of the caller's own."""
    storage.fill(Reads.of(str(path), [(offset, dest.numel())]), [dest]).wait()


@pytest.mark.parametrize("be", ["io_uring", "libaio", "thrpool", "emu"])
@pytest.mark.parametrize("depth", [1, 4, 256])
def test_every_interface_of_the_real_library(disk: LoopDisk, file: Path, be: str, depth: int) -> None:
    with libraries.using("real"), opened(uri=disk.device, be=be, queue_depth=depth) as storage:
        assert whole(storage, file) == content(3_000_000)
        with pytest.raises(FileNotFoundError, match="no-such"):
            storage.load(Reads.of(str(file) + "no-such", [(0, 1)])).wait()


def test_an_allocator_by_name(disk: LoopDisk, file: Path) -> None:
    with libraries.using("real"), opened(mem="posix") as storage:
        dest = torch.empty(2_999_999, dtype=torch.uint8)
        fill(storage, file, 1, dest)
        assert bytes_of(dest) == content(3_000_000)[1:]
    with (
        libraries.using("real"),
        opened(mem="nonsense") as storage,
        pytest.raises(StorageError, match=r"could not open it: .*has no allocator 'nonsense'"),
    ):
        whole(storage, file)


@pytest.mark.parametrize("kind", ["real", "double"])
def test_devices_are_open_for_reading_only_and_direct(disk: LoopDisk, file: Path, kind: str) -> None:
    with libraries.using(kind), opened() as storage:
        before = libxnvme._descriptors_of(disk.device)
        whole(storage, file)
        (fd,) = libxnvme._descriptors_of(disk.device) - before
        flags = int(Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8)
        assert flags & os.O_ACCMODE == os.O_RDONLY
        assert flags & os.O_DIRECT
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, bytes(4096), 0)


def test_reads_a_device_that_cannot_be_written(disk: LoopDisk, file: Path) -> None:
    os.sync()
    run("mount", "-o", "remount,ro", str(disk.folder))
    run("blockdev", "--setro", disk.device)
    try:
        with libraries.using("real"), opened(uri=disk.device) as storage:
            assert whole(storage, file) == content(3_000_000)
    finally:
        run("blockdev", "--setrw", disk.device)  # it would stay with the number of the loop device


class TestQueue:
    def test_as_many_commands_as_it_takes_each_as_large_as_allowed(
        self, disk: LoopDisk, double: libraries.Double
    ) -> None:
        path = disk.folder / "set/large.bin"
        path.write_bytes(content(40 << 20))
        with opened(queue_depth=32) as storage:
            assert whole(storage, path) == content(40 << 20)
        assert double.count("largest_read") == 256 << 10  # its MDTS
        assert double.count("most_in_flight") == 32
        assert double.count("reads") <= (40 << 20) // (256 << 10) + 4

    @pytest.mark.parametrize(("fault", "value"), [("FULL_AGAIN", 100), ("FULL_BUSY", 100), ("REVERSE", 0)])
    def test_a_full_queue_and_completions_out_of_order(
        self, file: Path, double: libraries.Double, fault: str, value: int
    ) -> None:
        double.fail(fault, value)
        with opened() as storage:
            assert whole(storage, file) == content(3_000_000)

    @pytest.mark.parametrize(
        ("fault", "match"),
        [
            ("SHORT_READ", r"blocks from LBA \d+ of /dev/loop\d+ gave \d+ of \d+ bytes"),
            ("BAD_STATUS", r"LBA \d+ of /dev/loop\d+: NVMe status code type 0x2, status code 0x81"),
            ("ERRNO_STATUS", r"LBA \d+ of /dev/loop\d+: Input/output error"),
        ],
    )
    @pytest.mark.parametrize("at", [0, 5, 11])
    def test_a_failed_command_is_an_error_with_its_lba(
        self, file: Path, double: libraries.Double, fault: str, match: str, at: int
    ) -> None:
        with opened() as storage:
            whole(storage, file)
            double.fail(fault, at)
            with pytest.raises(StorageError, match=match) as caught:
                whole(storage, file)
            assert str(file) in str(caught.value)
            assert double.count("devices") == 0, "it is opened again, should it be back"
            assert whole(storage, file) == content(3_000_000)  # contexts are reused, and their status is not

    def test_a_refused_command(self, file: Path, double: libraries.Double) -> None:
        with opened() as storage:
            double.fail("REFUSED")
            with pytest.raises(StorageError, match="xnvme_nvm_read of block"):
                whole(storage, file)
            assert whole(storage, file) == content(3_000_000)

    def test_a_broken_queue_ends_every_submission_and_the_next_one_opens_another(
        self, file: Path, double: libraries.Double
    ) -> None:
        with opened() as storage:
            double.fail("STUCK")
            pendings = [start(storage, file) for _ in range(3)]
            double.fail("BROKEN_QUEUE")
            for pending in pendings:
                with pytest.raises(StorageError, match="xnvme_queue_poke"):
                    pending.wait()
            double.reset()
            assert whole(storage, file) == content(3_000_000)

    @pytest.mark.usefixtures("double")
    def test_a_fault_of_the_engine_itself_leaves_nobody_waiting(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened() as storage:
            with monkeypatch.context() as patch:
                patch.setattr(queue_module._Pump, "_check", lambda *_: 1 / 0)
                pendings = [start(storage, file) for _ in range(3)]
                for pending in pendings:
                    with pytest.raises(StorageError, match=r"division by zero.*file\.bin"):
                        pending.wait()
            assert whole(storage, file) == content(3_000_000)

    def test_other_submissions_survive_a_failed_one(self, file: Path, double: libraries.Double) -> None:
        with opened() as storage:
            pendings = [start(storage, file) for _ in range(20)]
            double.fail("BAD_STATUS", 7)
            pendings += [start(storage, file) for _ in range(20)]
            failed = 0
            for pending in pendings:
                try:
                    assert bytes_of(pending.wait()[0]) == content(3_000_000)
                except StorageError:
                    failed += 1
            assert failed == 1

    def test_no_memory(self, file: Path, double: libraries.Double) -> None:
        with opened() as storage:
            double.fail("NO_MEMORY")
            with pytest.raises(MemoryError, match="xnvme_buf_virt_alloc"):
                storage.memory(5000)
            with pytest.raises(StorageError, match="xnvme_buf_alloc"):
                fill(storage, file, 1, torch.empty(5000, dtype=torch.uint8))
            double.reset()
            assert whole(storage, file) == content(3_000_000)

    def test_thrpool_where_io_uring_is_not_allowed(self, file: Path, double: libraries.Double) -> None:
        double.fail("NO_IO_URING")
        with opened() as storage:
            assert whole(storage, file) == content(3_000_000)
            (drive,) = storage._backend._drives  # type: ignore[attr-defined]
            assert drive.device.interface == "thrpool"
        double.reset()
        double.fail("NO_IO_URING")
        with opened(be="io_uring") as storage, pytest.raises(StorageError, match="io_uring"):
            whole(storage, file)

    @pytest.mark.parametrize("fault", ["BAD_STATUS", "REFUSED", "SHORT_READ"])
    def test_failures_leave_no_bounce_buffer_behind(self, file: Path, double: libraries.Double, fault: str) -> None:
        dest = torch.empty(700_000, dtype=torch.uint8)
        with opened() as storage:
            for _ in range(3):
                double.fail(fault)
                with pytest.raises(StorageError):
                    fill(storage, file, 1, dest)
            fill(storage, file, 1, dest)
        assert (double.count("buffers"), double.count("devices")) == (0, 0)

    def test_a_transfer_that_waits_for_room_in_the_queue_gives_its_bounce_buffer_back(
        self, file: Path, double: libraries.Double
    ) -> None:
        """One that has taken a buffer, found the queue full, and is not issued since another one fails meanwhile."""
        dest = torch.empty(2_900_000, dtype=torch.uint8)
        with opened(queue_depth=1) as storage:
            for _ in range(3):
                double.fail("BAD_STATUS")
                with pytest.raises(StorageError):
                    fill(storage, file, 1, dest)
            fill(storage, file, 1, dest)
        assert (double.count("buffers"), double.count("devices")) == (0, 0)

    def test_nothing_stays_open_or_allocated(self, file: Path, double: libraries.Double) -> None:
        with opened() as storage:
            tensor = storage.load(Reads.of(str(file), [(1, 100_000)])).wait()[0]
            fill(storage, file, 1, torch.empty(5000, dtype=torch.uint8))
        assert double.count("devices") == 0
        assert double.count("buffers") == 1
        assert bytes_of(tensor) == content(3_000_000)[1:100_001]
        del tensor
        assert double.count("buffers") == 0


class TestDevice:
    @pytest.mark.parametrize(
        ("fault", "match"),
        [("WRITABLE", "for writing"), ("BUFFERED", "without O_DIRECT"), ("NO_GEOMETRY", "is it a partition")],
    )
    def test_one_that_xnvme_opened_otherwise_is_not_read(
        self, file: Path, double: libraries.Double, fault: str, match: str
    ) -> None:
        double.fail(fault)
        with opened() as storage, pytest.raises(StorageError, match=match):
            whole(storage, file)
        assert (double.count("reads"), double.count("devices")) == (0, 0)

    def test_an_allocator_without_memory_is_not_taken_for_a_partition(
        self, file: Path, double: libraries.Double
    ) -> None:
        """As xNVMe does with mem="hugepage" where none are reserved."""
        double.fail("NO_GEOMETRY")
        with (
            opened(mem="hugepage") as storage,
            pytest.raises(StorageError, match="does mem='hugepage' give no memory"),
        ):
            whole(storage, file)

    def test_a_partition_is_refused_and_the_whole_disk_named(self, tmp_path: Path, double: libraries.Double) -> None:
        with (
            loop_disk(tmp_path, "xfs", partitioned=True) as disk,
            pytest.raises(NotMappable, match=f"open the whole disk, {disk.device}"),
            opened(uri=disk.partition),
        ):
            pass

    @pytest.mark.parametrize(
        ("uri", "match"),
        [
            ("/dev/nothing", "no such device"),
            ("/etc/passwd", "not a block device"),
            ("/dev/null", "not a block device"),
        ],
    )
    def test_what_is_no_block_device(self, double: libraries.Double, uri: str, match: str) -> None:
        with pytest.raises(StorageError, match=match), opened(uri=uri):
            pass

    @pytest.mark.parametrize("kind", ["real", "double"])
    def test_without_permission(self, file: Path, disk: LoopDisk, kind: str) -> None:
        with tempfile.TemporaryDirectory(prefix="monai-gds-public-") as public, libraries.using(kind):
            os.chmod(public, 0o755)
            run("mount", "--bind", str(disk.folder), public)
            os.seteuid(65534)
            try:
                with (
                    opened() as storage,
                    pytest.raises(StorageError, match=f"may not be read: run as root.*{disk.device}"),
                ):
                    storage.load(Reads.of(f"{public}/set/file.bin", [(0, 10)])).wait()
            finally:
                os.seteuid(0)
                run("umount", public)

    def test_a_file_on_another_disk(self, disk: LoopDisk, tmp_path: Path, double: libraries.Double) -> None:
        (tmp_path / "two").mkdir()
        with loop_disk(tmp_path / "two", "xfs") as other, opened(uri=disk.device) as storage:
            (other.folder / "file.bin").write_bytes(b"x" * 5000)
            with pytest.raises(StorageError, match=rf"it lies on {other.device}.*file\.bin"):
                whole(storage, other.folder / "file.bin")

    def test_a_file_on_a_file_system_of_another_kind(self, double: libraries.Double) -> None:
        with opened() as storage, pytest.raises(NotMappable, match="proc"):
            storage.load(Reads.of("/proc/self/status", [(0, 10)])).wait()

    @pytest.mark.parametrize("kind", ["real", "double"])
    def test_a_device_that_disappears(self, disk: LoopDisk, file: Path, kind: str) -> None:
        """The image behind it is cut off while it is read."""
        with libraries.using(kind), opened() as storage:
            assert whole(storage, file) == content(3_000_000)
            os.sync()
            os.truncate(disk.image, 1 << 20)
            for _ in range(3):
                with pytest.raises(StorageError, match=r"LBA \d+ of /dev/loop|cannot be opened|could not open"):
                    whole(storage, file)

    def test_an_lba_past_the_end(self, tmp_path: Path, disk: LoopDisk, double: libraries.Double) -> None:
        """A map names blocks that a smaller drive, with the same file system's copy on it, does not have."""
        with _user_space(disk, [("set/far.bin", Extent(0, disk.image.stat().st_size - 4096, 4096))]) as storage:
            assert bytes_of(storage.load(Reads.of("set/far.bin", [(0, 4096)])).wait()[0]) == bytes(4096)
        with _user_space(disk, [("set/far.bin", Extent(0, disk.image.stat().st_size, 4096))]) as storage:
            with pytest.raises(StorageError, match=r"LBA 655367 lies past the end of 0000:01:00\.0, which has 655360"):
                storage.load(Reads.of("set/far.bin", [(0, 4096)])).wait()
            assert double.count("reads") <= 3


class TestMoved:
    @pytest.mark.parametrize("kind", ["real", "double"])
    def test_a_file_that_moves_while_it_is_read_is_an_error(
        self, disk: LoopDisk, file: Path, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        poll = libxnvme.Queue.poll
        moved = threading.Event()

        def and_move(queue: libxnvme.Queue) -> list[libxnvme.Completion]:
            done = poll(queue)
            if done and not moved.is_set():
                moved.set()
                (disk.folder / "taker.bin").write_bytes(b"x" * 100_000)
                with file.open("r+b") as f:
                    f.truncate(0)
                    (disk.folder / "other.bin").write_bytes(b"x" * 3_000_000)
                    f.write(content(3_000_000))
            return done

        monkeypatch.setattr(libxnvme.Queue, "poll", and_move)
        with libraries.using(kind), opened() as storage:
            with pytest.raises(FileChanged, match="changed while its blocks were being read"):
                whole(storage, file)
            assert whole(storage, file) == content(3_000_000)

    def test_a_stale_map_is_an_error_before_the_first_read(
        self, disk: LoopDisk, file: Path, double: libraries.Double
    ) -> None:
        blocks = BlockMap.build(disk.folder / "set")
        with opened(blockmap=blocks) as storage:
            assert whole(storage, file) == content(3_000_000)
            file.write_bytes(content(3_000_000, 1))
            before = double.count("reads")
            with pytest.raises(FileChanged, match="build the map again"):
                whole(storage, file)
            assert double.count("reads") == before
            (disk.folder / "set/new.bin").write_bytes(b"x")
            with pytest.raises(StorageError, match=r"new\.bin is not in the block map"):
                whole(storage, disk.folder / "set/new.bin")

    def test_the_map_of_another_disk(self, disk: LoopDisk, file: Path, double: libraries.Double) -> None:
        blocks = BlockMap.build(disk.folder / "set")
        run("umount", str(disk.folder))
        new_uuid(disk.device)
        run("mount", disk.device, str(disk.folder))
        with (
            opened(uri=disk.device, blockmap=blocks) as storage,
            pytest.raises(StorageError, match="not the disk that the block map was made on"),
        ):
            whole(storage, file)

    @pytest.mark.parametrize("fault", ["FULL_AGAIN", "FULL_BUSY"])
    def test_a_queue_that_is_full_at_first_is_no_other_disk(
        self, disk: LoopDisk, file: Path, double: libraries.Double, fault: str
    ) -> None:
        blocks = BlockMap.build(disk.folder / "set")
        double.fail(fault, 3)
        with opened(blockmap=blocks) as storage:
            assert whole(storage, file) == content(3_000_000)

    @pytest.mark.parametrize(
        ("fault", "match"),
        [
            ("SHORT_READ", r"LBA 0 of /dev/loop\d+ gave 2048 of 4096 bytes"),
            ("BAD_STATUS", r"LBA 0 of /dev/loop\d+: NVMe status code type 0x2, status code 0x81"),
            ("ERRNO_STATUS", r"LBA 0 of /dev/loop\d+: Input/output error"),
            ("BROKEN_QUEUE", "xnvme_queue_poke"),
        ],
    )
    def test_a_disk_whose_file_system_cannot_be_read_is_no_other_disk(
        self, disk: LoopDisk, file: Path, double: libraries.Double, fault: str, match: str
    ) -> None:
        blocks = BlockMap.build(disk.folder / "set")
        with opened(blockmap=blocks) as storage:
            double.fail(fault)
            with pytest.raises(StorageError, match=match):
                whole(storage, file)
            # what may still be written to is never freed
            assert double.count("devices") == (1 if fault == "BROKEN_QUEUE" else 0)
            double.reset()
            assert whole(storage, file) == content(3_000_000)

    @pytest.mark.usefixtures("double")
    def test_a_plain_map_knows_files_by_the_end_of_their_paths(self, disk: LoopDisk, file: Path) -> None:
        BlockMap.build(disk.folder / "set").plain().save(disk.folder / "map.json")
        with opened(blockmap=disk.folder / "map.json") as storage:
            assert whole(storage, file) == content(3_000_000)
            file.write_bytes(content(3_000_000, 1))
            with pytest.raises(FileChanged, match="its blocks moved; build the map again"):
                whole(storage, file)
            (disk.folder / "file.bin").write_bytes(b"x")
            with pytest.raises(StorageError, match="not in the block map"):
                whole(storage, disk.folder / "file.bin")

    @pytest.mark.usefixtures("double")
    def test_a_disk_that_is_mounted_elsewhere(self, disk: LoopDisk, file: Path, tmp_path: Path) -> None:
        blocks = BlockMap.build(disk.folder / "set")
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        run("mount", "--move", str(disk.folder), str(elsewhere))
        try:
            with (
                opened(blockmap=blocks) as storage,
                pytest.raises(StorageError, match=r"not in the block map.*BlockMap.load\(map, parent=…\)"),
            ):
                whole(storage, elsewhere / "set/file.bin")
            blocks.save(tmp_path / "map.json")
            with opened(blockmap=BlockMap.load(tmp_path / "map.json", parent=elsewhere)) as storage:
                assert whole(storage, elsewhere / "set/file.bin") == content(3_000_000)
        finally:
            run("mount", "--move", str(elsewhere), str(disk.folder))

    @pytest.mark.usefixtures("double")
    def test_a_file_that_could_not_be_mapped_says_why(self, disk: LoopDisk, file: Path) -> None:
        tail = disk.folder / "set/tail.bin"
        with tail.open("wb") as f:
            f.write(content(5000))
            os.posix_fallocate(f.fileno(), 0, 1 << 20)
        blocks = BlockMap.build(disk.folder / "set")
        with opened(blockmap=blocks) as storage:
            assert whole(storage, file) == content(3_000_000)
            with pytest.raises(NotMappable, match=r"never written; put a copy in its place: cp --reflink=never.*tail"):
                whole(storage, tail)
        with _user_space(disk) as storage, pytest.raises(NotMappable, match=r"cp --reflink=never.*tail"):
            storage.load(Reads.of("set/tail.bin", [(0, 10)])).wait()


@contextmanager
def _unmounted(disk: LoopDisk) -> Iterator[None]:
    """Cleanly, as for a driver in user space."""
    run("umount", str(disk.folder))
    try:
        yield
    finally:
        run("mount", disk.partition, str(disk.folder))


def _flip(device: str, place: int) -> None:
    """Changes a byte on a device, below the file system."""
    fd = os.open(device, os.O_RDWR | os.O_DIRECT | os.O_SYNC)
    with mmap.mmap(-1, 4096) as page:
        os.preadv(fd, [page], place - place % 4096)
        page[place % 4096] ^= 1
        os.pwritev(fd, [page], place - place % 4096)
    os.close(fd)


def _user_space(
    disk: LoopDisk, extra: list[tuple[str, Extent]] = [], nbytes: int = 1 << 40, **options: Any  # noqa: B006
) -> Any:  # fmt: skip
    """The backend over a driver in user space, which the double plays; the drive is the loop device.

    ``nbytes``: what the map says of its size.
    """
    if not any((disk.folder / "set").iterdir()):
        (disk.folder / "set/any.bin").write_bytes(b"x")
    made = BlockMap.build(disk.folder / "set", checksums=True)
    assert made.origin is not None
    larger = made.origin.disk.__class__(**{**vars(made.origin.disk), "nbytes": nbytes})
    origin = made.origin.__class__(**{**vars(made.origin), "disk": larger})
    files = dict(made) | {path: FileBlocks(extent.nbytes, (extent,)) for path, extent in extra}
    os.environ["XNVME_DOUBLE_DRIVE"] = disk.device
    blocks = BlockMap(files, origin, unmapped=made.unmapped)
    return opened(**{"uri": "0000:01:00.0", "be": "upcie", "blockmap": blocks, **options})


#: Reads a file by a driver in user space, as another process: prints what came of it.
_OTHER_PROCESS = """
import sys
from monai_gds import open_storage
from monai_gds.storage import Reads
from monai_gds.storage.xnvme import user_space
user_space._DEVICES, user_space._CLOSING_SECONDS = sys.argv[1], 0.1
storage = open_storage("xnvme-block", "cpu", uri="0000:01:00.0", be="upcie", blockmap=sys.argv[2])
try:
    read = storage.load(Reads.of(sys.argv[3], [(0, 3_000_000)])).wait()[0].numel()
    print(f"read {read} bytes, shm_id {storage.describe()['shm_id']}")
except OSError as e:
    print(e)
"""


def _pci_device(root: Path, driver: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The drive's folder in a /sys below ``root``, where a driver of the kernel has it."""
    device = root / "devices/0000:01:00.0"
    device.mkdir(parents=True, exist_ok=True)
    (device / "config").touch()
    (root / driver).mkdir()
    (device / "driver").unlink(missing_ok=True)
    (device / "driver").symlink_to(root / driver)
    monkeypatch.setattr(user_space, "_DEVICES", str(root / "devices"))
    return device


class TestUserSpace:
    def test_reads_by_the_map_alone(self, disk: LoopDisk, file: Path, double: libraries.Double) -> None:
        (disk.folder / "set/small.bin").write_bytes(content(777))
        with _user_space(disk) as storage:
            run("umount", "-l", str(disk.folder))
            try:
                for path, data in (("small.bin", content(777)), ("file.bin", content(3_000_000))):
                    for name in (f"set/{path}", str(disk.folder / "set" / path)):
                        assert bytes_of(storage.load(Reads.of(name, [(0, len(data))])).wait()[0]) == data
                        head, identity = storage.head(name, 100)
                        assert head == data[:100]
                        assert identity.size == len(data)
                        storage.load(Reads.of(name, [(0, 1)], identity)).wait()
                        with pytest.raises(FileChanged):
                            storage.load(Reads.of(name, [(0, 1)], FileId(0, 1, 2, 3))).wait()
            finally:
                run("mount", disk.device, str(disk.folder))

    @pytest.mark.parametrize("partitioned", [False, True], ids=["", "partition"])
    @pytest.mark.parametrize(("kind", "block"), [("ext4", 512), ("ext4", 4096), ("xfs", 512), ("xfs", 4096)])
    def test_files_that_changed_before_it_was_unmounted_are_errors(
        self, tmp_path: Path, kind: str, block: int, partitioned: bool, double: libraries.Double
    ) -> None:
        """Their old blocks still hold their old bytes. Of a batch, the other files are read."""
        with loop_disk(tmp_path, kind, block_size=block, partitioned=partitioned) as disk:
            folder = disk.folder / "set"
            folder.mkdir()
            names = ("deleted", "rewritten", "replaced", "grown", *(f"same{i}" for i in range(40)))
            for seed, name in enumerate(names):
                (folder / name).write_bytes(content(9000, seed))
            with _user_space(disk) as storage:
                (folder / "deleted").unlink()
                (folder / "rewritten").write_bytes(content(9000, 100))
                (folder / "new").write_bytes(content(9000, 101))
                os.rename(folder / "new", folder / "replaced")
                with (folder / "grown").open("ab") as f:
                    f.write(b"x")
                with _unmounted(disk):
                    reads = Reads.join([Reads.of(f"set/{name}", [(0, 9000)]) for name in names])
                    for _ in range(2):
                        pending = storage.load(reads)
                        assert {names[file] for file in pending.errors} == set(names[:4])
                        assert all("build the map again" in str(error) for error in pending.errors.values())
                        for seed in range(4, len(names)):
                            assert bytes_of(pending.tensors[seed]) == content(9000, seed)
                    with pytest.raises(FileChanged, match=r"deleted or replaced|written to"):
                        storage.head("set/deleted", 10)

    def test_paths_below_another_folder_than_the_maps(
        self, disk: LoopDisk, file: Path, tmp_path: Path, double: libraries.Double, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XNVME_DOUBLE_DRIVE", disk.device)
        BlockMap.build(disk.folder / "set", checksums=True).save(tmp_path / "map.json")
        reads = Reads.of("/data/set/file.bin", [(0, 3_000_000)])
        drive = {"uri": "0000:01:00.0", "be": "upcie"}
        with _unmounted(disk):
            with (
                opened(**drive, blockmap=tmp_path / "map.json") as storage,
                pytest.raises(FileNotFoundError, match=rf"below {disk.folder}; if files are elsewhere.*parent="),
            ):
                storage.load(reads).wait()
            with opened(**drive, blockmap=BlockMap.load(tmp_path / "map.json", parent="/data")) as storage:
                assert bytes_of(storage.load(reads).wait()[0]) == content(3_000_000)

    def test_inodes_are_read_once(self, disk: LoopDisk, double: libraries.Double) -> None:
        for seed in range(64):
            (disk.folder / f"set/{seed}.bin").write_bytes(content(5000, seed))
        reads = Reads.join([Reads.of(f"set/{seed}.bin", [(0, 5000)]) for seed in range(64)])
        with _user_space(disk) as storage, _unmounted(disk):
            storage.load(reads).wait()
            first = double.count("reads")
            assert first < 64 + 20  # neighbouring inodes are read together
            storage.load(reads).wait()
            assert double.count("reads") == first + 64

    def test_checksums_show_bytes_that_changed_below_the_file_system(
        self, disk: LoopDisk, file: Path, double: libraries.Double
    ) -> None:
        (disk.folder / "set/other.bin").write_bytes(content(70_000))
        with _user_space(disk) as storage, _unmounted(disk):
            reads = Reads.join(
                [Reads.of(f"set/{n}.bin", [(0, s)]) for n, s in (("file", 3_000_000), ("other", 70_000))]
            )
            storage.load(reads).wait()
            (extent,) = storage._backend._setup.blockmap["set/file.bin"].extents
            _flip(disk.device, extent.start + 1_000_000)
            pending = storage.load(reads)
            assert list(pending.errors) == [0]
            assert "do not match their checksum" in str(pending.errors[0])
            assert bytes_of(pending.tensors[1]) == content(70_000)
            with pytest.raises(FileChanged, match="checksum"):
                storage.fill(
                    Reads.of("set/file.bin", [(0, 3_000_000)]), [torch.empty(3_000_000, dtype=torch.uint8)]
                ).wait()

    @pytest.mark.gpu
    @pytest.mark.parametrize(("kind", "options"), [("double", {}), ("double gpu", {"mem": "gpu"})])
    def test_files_that_changed_are_errors_on_a_gpu_too(
        self, disk: LoopDisk, file: Path, kind: str, options: dict[str, Any]
    ) -> None:
        for name in ("damaged", "rewritten"):
            (disk.folder / "set" / name).write_bytes(content(70_000))
        names = {"file.bin": 3_000_000, "damaged": 70_000, "rewritten": 70_000}
        with libraries.using(kind), _user_space(disk, device="cuda", **options) as storage:
            (disk.folder / "set/rewritten").write_bytes(content(70_000))
            with _unmounted(disk):
                reads = Reads.join([Reads.of(f"set/{name}", [(0, nbytes)]) for name, nbytes in names.items()])
                assert list(storage.load(reads).errors) == [2]
                (extent,) = storage._backend._setup.blockmap["set/damaged"].extents
                _flip(disk.device, extent.start + 10_000)
                pending = storage.load(reads)
                assert sorted(pending.errors) == [1, 2]
                assert bytes_of(pending.tensors[0]) == content(3_000_000)

    def test_a_map_with_checksums_is_taken_without_a_word_and_others_with_a_warning(
        self, disk: LoopDisk, file: Path, tmp_path: Path, double: libraries.Double, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XNVME_DOUBLE_DRIVE", disk.device)
        drive = {"uri": "0000:01:00.0", "be": "upcie"}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with opened(**drive, blockmap=BlockMap.build(disk.folder / "set", checksums=True)):
                pass
            with opened(blockmap=BlockMap.build(disk.folder / "set")):  # the kernel knows where files are
                pass
        with pytest.warns(UserWarning, match="the block map has no checksums.*--checksums"):
            opened(**drive, blockmap=BlockMap.build(disk.folder / "set"))
        BlockMap.build(disk.folder / "set").plain().save(tmp_path / "plain.json")
        with pytest.warns(UserWarning, match="a plain block map holds neither.*--checksums") as said:
            storage = open_storage("xnvme-block", "cpu", **drive, blockmap=tmp_path / "plain.json")
        assert said[0].filename == __file__
        with closing(storage), _unmounted(disk):
            (data,) = storage.load(Reads.of("set/file.bin", [(0, 3_000_320)])).wait()  # all of its blocks
            assert bytes_of(data) == content(3_000_000) + bytes(320)
            for wrong in (3_000_321, 1000):  # of a larger file of that name somewhere, or of a smaller one
                with pytest.raises(FileChanged, match=f"has 3000320 bytes, and had {wrong} when it was listed"):
                    storage.load(Reads.of("set/file.bin", [(0, 1)], wrong)).wait()

    def test_an_inode_may_end_with_the_disk_and_not_past_it(
        self, disk: LoopDisk, file: Path, double: libraries.Double
    ) -> None:
        made = BlockMap.build(disk.folder / "set").origin
        assert made is not None
        with open(disk.device, "rb") as device:
            table = inode_table(
                made.kind, lambda offset, nbytes: os.pread(device.fileno(), nbytes, made.start + offset)
            )
        assert table is not None
        place = table.place(file.stat().st_ino)
        assert place is not None
        end = made.start + place + table.nbytes
        reads = Reads.of("set/file.bin", [(0, 3_000_000)])
        with _user_space(disk, nbytes=end) as storage, _unmounted(disk):
            assert bytes_of(storage.load(reads).wait()[0]) == content(3_000_000)
        with (
            _user_space(disk, nbytes=end - 1) as storage,
            _unmounted(disk),
            pytest.raises(FileChanged, match="it has no inode"),
        ):
            storage.load(reads).wait()

    @pytest.mark.parametrize(("fault", "submissions"), [("STUCK", 3), ("LOSES", 1)])
    def test_a_drive_that_does_not_answer_leaves_nobody_waiting_and_is_opened_anew(
        self,
        disk: LoopDisk,
        file: Path,
        double: libraries.Double,
        fault: str,
        submissions: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(libxnvme, "SILENT_SECONDS", 0.0)
        with _user_space(disk) as storage:
            assert whole(storage, file) == content(3_000_000)
            devices, buffers = double.count("devices"), double.count("buffers")
            double.fail(fault)
            told = r"drive did not answer within 0 s.* '0000:01:00\.0'.* '.*file\.bin'"
            for pending in [start(storage, file) for _ in range(submissions)]:
                with pytest.raises(StorageError, match=told):
                    pending.wait()
            assert double.count("buffers") >= buffers, "the drive may still write there"
            double.fail("NONE")
            assert whole(storage, file) == content(3_000_000)
            assert double.count("devices") > devices

    def test_a_process_that_was_stopped_finds_what_the_drive_answered_meanwhile(
        self, disk: LoopDisk, file: Path, double: libraries.Double, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As by Ctrl-Z, wherever it is while it reads."""
        looks = itertools.count()

        def monotonic() -> float:
            if next(looks) < 3:
                return 0.0
            double.fail("NONE")
            return 3600.0

        monkeypatch.setattr(libxnvme, "time", SimpleNamespace(monotonic=monotonic))
        with _user_space(disk) as storage:
            double.fail("STUCK")
            assert whole(storage, file) == content(3_000_000)

    def test_inodes_that_cannot_be_found_are_told(self, tmp_path: Path, double: libraries.Double) -> None:
        with loop_disk(tmp_path, "ext4", make=["-O", "meta_bg,^resize_inode"]) as disk:
            (disk.folder / "set").mkdir()
            with _user_space(disk) as storage, _unmounted(disk), pytest.warns(UserWarning, match="inodes cannot be"):
                assert bytes_of(storage.load(Reads.of("set/any.bin", [(0, 1)])).wait()[0]) == b"x"

    def test_the_namespace_and_the_heap_are_passed_on(self, disk: LoopDisk, file: Path) -> None:
        double = libraries.Double("double next")
        double.reset()
        with libraries.using("double next"), _user_space(disk, nsid=2, heap_bytes="128MiB", mem="cpu") as storage:
            assert whole(storage, file) == content(3_000_000)
        assert (double.count("nsid"), double.count("heap_mib")) == (2, 128)

    def test_processes_share_a_drive(
        self, disk: LoopDisk, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Simulated: the double counts what it was opened with, and is a drive that any process may open."""
        device = _pci_device(tmp_path, "uio_pci_generic", monkeypatch)
        monkeypatch.setattr(libxnvme, "claims", user_space.Claims())
        double = libraries.Double("double next")
        BlockMap.build(disk.folder / "set", checksums=True).save(tmp_path / "map.json")
        other = _OTHER_PROCESS, str(device.parent), str(tmp_path / "map.json"), str(file)
        with libraries.using("double next"), _user_space(disk) as storage:
            double.reset()
            assert whole(storage, file) == content(3_000_000)
            assert double.count("shm_id") == storage.describe()["shm_id"] > 0
            assert printed_by(*other) == f"read 3000000 bytes, shm_id {double.count('shm_id')}"
            assert whole(storage, file) == content(3_000_000)
            child = os.fork()
            if not child:
                try:
                    libxnvme.claims.take("0000:01:00.0", shared=True)
                except StorageError as e:
                    os._exit(0 if "start processes by 'spawn'" in str(e) else 2)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "it has the memory of the driver"
        assert double.count("devices") == 0, "nobody else had it at the end"
        with libraries.using("double next"), _user_space(disk) as storage:
            other_one = user_space.Claims()
            other_one.take("0000:01:00.0", shared=True)
            assert whole(storage, file) == content(3_000_000)
            storage.close()
            assert double.count("devices") == 1, "else closing it would end the reads of the others"
            _pci_device(tmp_path, "vfio-pci", monkeypatch)
            assert "another process reads this drive in user space" in printed_by(*other)

    @pytest.mark.parametrize(("kind", "be"), [("double", "upcie"), ("double next", "libvfn")])
    def test_a_library_or_a_driver_that_does_not_share(
        self, disk: LoopDisk, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, be: str
    ) -> None:
        _pci_device(tmp_path, "uio_pci_generic", monkeypatch)
        monkeypatch.setattr(libxnvme, "claims", user_space.Claims())
        monkeypatch.setattr(user_space, "_CLOSING_SECONDS", 0.1)
        double = libraries.Double(kind)
        with libraries.using(kind), _user_space(disk, be=be) as storage:
            double.reset()
            storage.load(Reads.of("set/file.bin", [(0, 1)])).wait()
            assert (double.count("shm_id"), double.count("devices")) == (0, 1)
            with pytest.raises(StorageError, match="another process reads this drive"):
                user_space.Claims().take("0000:01:00.0", shared=True)

    def test_an_address_without_its_domain(self, disk: LoopDisk, file: Path, double: libraries.Double) -> None:
        with _user_space(disk, uri="01:00.0") as storage:
            assert storage.describe()["uri"] == "0000:01:00.0"
            assert whole(storage, file) == content(3_000_000)

    def test_a_heap_with_room_for_few_buffers(self, disk: LoopDisk, file: Path, double: libraries.Double) -> None:
        with _user_space(disk) as storage:
            double.fail("HEAP", 2)
            for _ in range(3):
                assert whole(storage, file) == content(3_000_000)
            assert double.count("most_in_flight") <= 2

    def test_a_drive_that_does_not_open(self, disk: LoopDisk, file: Path, double: libraries.Double) -> None:
        with _user_space(disk, uri="ffff:01:00.0") as storage:
            double.fail("UNOPENED", errno.ENOMEM)
            with pytest.raises(
                StorageError, match=r"Cannot allocate memory \(this machine has no PCI device"
            ) as failed:
                whole(storage, file)
            assert failed.value.errno == errno.ENOMEM

    def test_only_reads(self, disk: LoopDisk, double: libraries.Double) -> None:
        with _user_space(disk) as storage, pytest.raises(StorageError, match="no file system to write through"):
            storage.write(str(disk.folder / "new.bin"), [b"x"])

    def test_another_disk_than_the_maps(
        self, disk: LoopDisk, file: Path, tmp_path: Path, double: libraries.Double
    ) -> None:
        (tmp_path / "two").mkdir()
        with loop_disk(tmp_path / "two", "xfs") as other, _user_space(disk) as storage:
            os.environ["XNVME_DOUBLE_DRIVE"] = other.device
            with pytest.raises(StorageError, match="not the disk that the block map was made on"):
                storage.load(Reads.of("set/file.bin", [(0, 10)])).wait()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"queue_depth": 0}, "powers of two"),
        ({"queue_depth": 48}, "powers of two"),
        ({"queue_depth": 4096}, "powers of two"),
        ({"uri": "0000:01:00.0"}, "driver in user space"),
        ({"be": "upcie"}, "driver in user space"),
        ({"be": "upcie", "uri": "0000:01:00.0"}, "give the blockmap made before"),
        ({"mem": "gpu", "uri": "/dev/null"}, "CUDA target"),
        ({"mem": "cpu", "be": "upcie-cuda", "uri": "0000:01:00.0"}, "choose be='upcie'"),
        ({"nsid": 2, "uri": "/dev/nvme0n1"}, "uri names the namespace"),
        ({"heap_bytes": 1 << 27, "be": "spdk", "uri": "0000:01:00.0"}, "only uPCIe has a heap"),
        ({"heap_bytes": 0, "be": "upcie", "uri": "0000:01:00.0"}, "heap_bytes=0: it must be a positive number"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], match: str) -> None:
    with libraries.using("double"), pytest.raises(ValueError, match=match), opened(**options):
        pass


class Volume(Transform):  # type: ignore[misc]
    """Makes a volume, and notes for which item."""

    def __call__(self, item: dict[str, int]) -> dict[str, Any]:
        logging.getLogger("tests.volume").info("%d", item["n"])  # a list of calls would be part of the key
        volume = (torch.arange(120_000) * (item["n"] + 7) % 251 / 251).reshape(1, 40, 50, 60)
        return {"image": volume, "n": item["n"]}


@pytest.fixture
def calls(caplog: pytest.LogCaptureFixture) -> Callable[[], list[int]]:
    """For which items volumes were made."""
    caplog.set_level(logging.INFO, "tests.volume")
    return lambda: [int(record.getMessage()) for record in caplog.records if record.name == "tests.volume"]


def _dataset(cache_dir: Path, items: list[dict[str, int]], **options: Any) -> GDSDataset:
    return GDSDataset(items, Volume(), cache_dir, device="cpu", backend="xnvme-block", **options)


@pytest.mark.parametrize("kind", ["real", "double next"])
def test_a_cache_over_it(disk: LoopDisk, kind: str, calls: Callable[[], list[int]]) -> None:
    """GDSDataset gives the same on a miss and on a hit, also for a record that was written again elsewhere."""
    with libraries.using(kind):
        dataset = _dataset(disk.folder / "cache", [{"n": n} for n in range(4)])
        missed = [dataset[i] for i in range(4)]
        hit = [dataset[i] for i in range(4)]
        for record in [p for p in (disk.folder / "cache").rglob("*") if p.suffix == ".safetensors"]:
            data = record.read_bytes()
            record.with_suffix(".new").write_bytes(data)
            os.replace(record.with_suffix(".new"), record)
        again = [dataset[i] for i in range(4)]
    assert calls() == [0, 1, 2, 3]
    for first, *others in zip(missed, hit, again, strict=True):
        for other in others:
            assert other["n"] == first["n"]
            assert torch.equal(other["image"], first["image"])


@pytest.mark.usefixtures("double")
def test_checksums_are_compared_at_every_read(disk: LoopDisk, calls: Callable[[], list[int]]) -> None:
    """A byte that changes on the device, below the file system, after the record was found to be right."""
    dataset = _dataset(disk.folder / "cache", [{"n": 0}])
    first = dataset[0]
    dataset[0]
    (record,) = (disk.folder / "cache").rglob("*.safetensors")
    ((_, start, _),) = BlockMap.build(disk.folder / "cache")[str(record)].extents
    _flip(disk.device, start + 4196)
    assert calls() == [0]
    with pytest.warns(CacheWarning, match="checksum"):
        again = dataset[0]
    dataset.flush()  # before the disk goes
    assert torch.equal(again["image"], first["image"])
    assert calls() == [0, 0]


@pytest.mark.parametrize("kind", ["double", "double next"])
def test_a_cache_on_a_drive_taken_from_the_kernel(
    disk: LoopDisk, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, calls: Callable[[], list[int]]
) -> None:
    """Filled and mapped while it is mounted; then hits are read by the map, and misses are computed and not cached."""
    folder = disk.folder / "cache"
    items = [{"n": n} for n in range(6)]
    monkeypatch.setenv("XNVME_DOUBLE_DRIVE", disk.device)
    with libraries.using(kind):
        with _dataset(folder, items[:4]) as dataset:
            filled = [dataset[i] for i in range(4)]
        BlockMap.build(folder).save(tmp_path / "cache.json")
        os.sync()
        run("umount", "-l", str(disk.folder))
        try:
            drive = {"uri": "0000:01:00.0", "be": "upcie", "blockmap": tmp_path / "cache.json"}
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                with _dataset(folder, items, backend_options=drive) as dataset:
                    batch = dataset.__getitems__([5, 0, 1, 2, 3])
                    epochs = [[dataset[i] for i in range(6)] for _ in range(2)]
            assert not list(folder.rglob("*.safetensors"))
        finally:
            run("mount", disk.device, str(disk.folder))
    assert calls() == [0, 1, 2, 3, 5, 4, 5, 4, 5]
    for got in (batch[1:], *epochs):
        for expected, item in zip(filled, got[:4], strict=True):
            assert torch.equal(item["image"], expected["image"])
            assert item["n"] == expected["n"]
    assert [item["n"] for item in epochs[0]] == list(range(6))
    messages = [str(w.message) for w in said if issubclass(w.category, CacheWarning)]
    assert len(messages) == 1, messages
    assert "nothing more is cached" in messages[0]
    assert "no file system to write through" in messages[0]


def ended_quietly(script: str) -> bool:
    """Runs a Python script, and fails unless it ends well and writes no message."""
    done = warm().run("-c", script, env={**os.environ, "PYTHONWARNINGS": "ignore"}, whole=True)
    assert (done.returncode, done.stderr) == (0, "")
    return True


def test_reads_in_flight_at_exit_are_no_trouble(file: Path) -> None:
    script = (
        "import torch\n"
        "from monai_gds.storage import Reads, open_storage\n"
        "storage = open_storage('xnvme-block', 'cpu')\n"
        f"reads = Reads.of({str(file)!r}, [(0, 3_000_000)])\n"
        "kept = storage.load(reads).wait()\n"
        "late = [storage.load(reads) for _ in range(20)]\n"
    )
    with libraries.using("double"):
        assert ended_quietly(script)
