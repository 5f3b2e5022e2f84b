"""The kvikio backend: the contract on a CUDA target, and what is its own (the user's settings stay theirs).

Tests named ``simulated`` run over host memory and a KvikIO made of threads, see :mod:`tests.storage.simulated`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.base.stages import COMPATIBLE, DIRECT, HOST, STAGED, WAYS, Watch, measured
from monai_gds.errors import BackendUnavailable, StorageError
from monai_gds.limits import KVIKIO_LEAST_BYTES, KVIKIO_PIECE_BYTES, KVIKIO_TASK_BYTES, KVIKIO_TASKS
from monai_gds.storage import ALIGNMENT, FileId, Reads, Storage, available_backends, files, open_storage, staging
from monai_gds.storage.backend import Backend
from monai_gds.storage.plain import kvikio as kvikio_module
from monai_gds.storage.plain.kvikio import KvikioBackend
from monai_gds.testing import WriteContract
from monai_gds.testing.tools import bytes_of, content, descriptors
from tests.doctor.laid import Laid
from tests.storage import simulated
from tests.storage.full_contract import CudaFullContract

CUDA = "cuda:0"


def straight(backend: KvikioBackend) -> KvikioBackend:
    """Has a backend hand device memory to KvikIO, as it does where cuFile works."""
    backend.served_by = lambda path, expected: DIRECT  # type: ignore[method-assign]
    return backend


def real() -> KvikioBackend:
    """The backend, where KvikIO is installed."""
    pytest.importorskip("kvikio", reason="KvikIO is not installed on this machine")
    return KvikioBackend(torch.device(CUDA))


@pytest.mark.gpu
class TestKvikio(CudaFullContract, WriteContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return real()


@pytest.mark.gpu
class TestKvikioStraight(CudaFullContract, WriteContract):
    """The path for cuFile, on whatever KvikIO makes of it on this machine."""

    test_loads_while_the_default_stream_is_busy = None  # KvikIO's own copies wait for the legacy default stream

    @pytest.fixture
    def backend(self) -> Backend:
        return straight(real())


@pytest.mark.gpu
def test_sets_the_threads_that_nobody_set_and_no_more(tmp_path: Path) -> None:
    kvikio = pytest.importorskip("kvikio", reason="KvikIO is not installed on this machine")
    names = ("compat_mode", "task_size", "gds_threshold", "bounce_buffer_size")
    before = {name: kvikio.defaults.get(name) for name in names}
    (tmp_path / "in.bin").write_bytes(content(9 << 20))
    storage = open_storage("kvikio", CUDA)
    (tensor,) = storage.load(Reads.of(str(tmp_path / "in.bin"), [(0, 9 << 20)])).wait()
    storage.write(str(tmp_path / "out.bin"), [tensor])
    storage.close()
    assert {name: kvikio.defaults.get(name) for name in names} == before
    assert (tmp_path / "out.bin").read_bytes() == content(9 << 20)
    assert storage.describe()["cufile"] in ("always", "by folder", "never")
    assert "KvikIO" in available_backends("cuda")["kvikio"].reason


def test_serves_cuda_targets_only() -> None:
    with pytest.raises(BackendUnavailable, match="posix"):
        open_storage("kvikio", "cpu")


# Simulated.


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[simulated.KvikIO]:
    """A simulated KvikIO that nobody misused at the end."""
    found = simulated.KvikIO()
    found.install(monkeypatch)
    yield found
    found.pool.shutdown()
    assert not found.misused


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A simulated GPU."""
    found = simulated.install_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.stream)
    yield found
    found.stream.close()


@pytest.fixture
def backend(kvikio: simulated.KvikIO, gpu: Any) -> Iterator[KvikioBackend]:
    """A backend over both."""
    backend = KvikioBackend(simulated.GPU)
    backend.open()
    yield backend
    backend.close()


def dest(nbytes: int, fill: int = 0xA5) -> torch.Tensor:
    return simulated.on_device(torch.full((nbytes,), fill, dtype=torch.uint8))


class TestKvikioSimulated(WriteContract):
    """What the backend itself can get wrong, without KvikIO and CUDA."""

    # These make tensors on the device in ways that are not simulated.
    test_only_tensors_of_bytes_are_written = None
    test_reads_back_what_it_wrote = None
    test_never_writes_over_a_file = None

    @pytest.fixture(params=["staged", "straight"])
    def backend(self, kvikio: simulated.KvikIO, gpu: Any, request: pytest.FixtureRequest) -> Backend:
        backend = KvikioBackend(simulated.GPU)
        return straight(backend) if request.param == "straight" else backend

    def dest(self, storage: Storage, nbytes: int, fill: int = 0xA5) -> torch.Tensor:
        return dest(nbytes, fill)


def read(backend: KvikioBackend, reads: Reads, into: list[torch.Tensor]) -> list[torch.Tensor]:
    return Storage(backend).fill(reads, into).wait()


def test_simulated_large_reads_take_few_slots_and_small_ones_none(
    backend: KvikioBackend, kvikio: simulated.KvikIO, gpu: Any, tmp_path: Path
) -> None:
    """Slots together have to fit into the processor's cache."""
    data = content(150 << 20)
    path = tmp_path / "file.bin"
    path.write_bytes(data)
    big, small = dest(len(data)), dest(KVIKIO_LEAST_BYTES - 1)
    read(
        backend,
        Reads.join([Reads.of(str(path), [(0, len(data))]), Reads.of(str(path), [(5, KVIKIO_LEAST_BYTES - 1)])]),
        [big, small],
    )
    assert bytes_of(big) == data
    assert bytes_of(small) == data[5 : KVIKIO_LEAST_BYTES + 4]
    assert kvikio.reads
    assert min(nbytes for _, nbytes in kvikio.reads) >= KVIKIO_LEAST_BYTES
    assert max(nbytes for _, nbytes in kvikio.reads) <= KVIKIO_PIECE_BYTES
    assert gpu.pool.nbytes <= 7 * gpu.pool.slot_bytes, "6 of the pump, and one of the posix backend"
    kvikio.opened.clear()
    read(backend, Reads.of(str(path), [(5, KVIKIO_LEAST_BYTES - 1)]), [small])
    assert not kvikio.opened


def test_simulated_straight_reads_are_one_task_each_and_not_all_at_once(
    backend: KvikioBackend, kvikio: simulated.KvikIO, tmp_path: Path
) -> None:
    data = content(150 << 20)
    (tmp_path / "file.bin").write_bytes(data)
    go = threading.Event()
    kvikio.fail = lambda offset: go.wait(30)
    big = dest(len(data))
    pending = Storage(straight(backend)).fill(Reads.of(str(tmp_path / "file.bin"), [(0, len(data))]), [big])
    time.sleep(0.3)
    assert len(kvikio.reads) == KVIKIO_TASKS
    go.set()
    assert bytes_of(pending.wait()[0]) == data
    assert max(nbytes for _, nbytes in kvikio.reads) <= KVIKIO_TASK_BYTES
    assert len({nbytes for _, nbytes in kvikio.reads}) <= 2, "even pieces"


def test_simulated_cufile_is_given_destinations_that_begin_at_a_page(
    kvikio: simulated.KvikIO, gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        """As torch's allocator: at any multiple of 512 bytes."""
        raw = dest(nbytes + 2 * ALIGNMENT)
        return raw[-raw.data_ptr() % ALIGNMENT + 512 :][:nbytes]

    monkeypatch.setattr(staging, "allocate_on_copy_stream", allocate)
    kvikio.prefers_compat_mode, kvikio.settings["compat_mode"] = False, "OFF"
    data = content(5_000_001)
    (tmp_path / "file.bin").write_bytes(data)
    with closing(Storage(KvikioBackend(simulated.GPU))) as storage:
        reads = Reads.of(str(tmp_path / "file.bin"), [(0, len(data)), (4096, 2 << 20), (0, 5000)])
        tensors = storage.load(reads).wait()
    assert [bytes_of(tensor) for tensor in tensors] == [data, data[4096:][: 2 << 20], data[:5000]]
    assert [tensor.data_ptr() % ALIGNMENT for tensor in tensors] == [0, 0, 512], "small ones do not go through cuFile"


def test_simulated_straight_reads_wait_for_what_is_queued_on_the_copy_stream(
    backend: KvikioBackend, gpu: Any, tmp_path: Path
) -> None:
    data = content(4 << 20)
    (tmp_path / "file.bin").write_bytes(data)
    reads = Reads.of(str(tmp_path / "file.bin"), [(0, len(data))])
    into = dest(len(data))
    for _ in range(3):  # also when the pump is at work already
        gpu.stream.put(lambda: (time.sleep(0.1), into.cpu().fill_(1)))  # an earlier user of the memory
        (got,) = read(straight(backend), reads, [into])
        assert bytes_of(got) == data


@pytest.mark.parametrize("count", [1, 8])
def test_simulated_a_slot_is_free_only_when_all_tasks_of_a_failed_read_are_over(
    backend: KvikioBackend, kvikio: simulated.KvikIO, tmp_path: Path, count: int
) -> None:
    """KvikIO reports the first error while the other tasks are still reading the file and writing to the slot."""
    names = [str(tmp_path / f"{i}.bin") for i in range(count)]
    for i, name in enumerate(names):
        Path(name).write_bytes(content(KVIKIO_PIECE_BYTES, i))
    failed = [False]

    def fail(offset: int) -> None:
        if not failed[0] and offset == 0:
            failed[0] = True
            raise OSError(5, "broken")
        if offset:
            time.sleep(0.02)  # the others are slow

    kvikio.fail = fail
    into = [dest(KVIKIO_PIECE_BYTES) for _ in names]
    reads = Reads.join([Reads.of(name, [(0, KVIKIO_PIECE_BYTES)]) for name in names])
    pending = Storage(backend).fill(reads, into)
    assert [type(e) for e in pending.errors.values()] == [StorageError]
    (which,) = pending.errors
    assert pending.errors[which].filename == names[which]
    assert "broken" in str(pending.errors[which])
    for i, tensor in enumerate(pending.tensors):
        assert i == which or bytes_of(tensor) == content(KVIKIO_PIECE_BYTES, i)


def test_simulated_what_lies_between_large_reads_of_a_file_is_left_alone(
    backend: KvikioBackend, tmp_path: Path
) -> None:
    """Even where a small read of another file goes there, which another backend does."""
    first, second = tmp_path / "first.bin", tmp_path / "second.bin"
    first.write_bytes(content(3 << 20))
    second.write_bytes(content(4096, 1))
    whole = dest((2 << 20) + 4096)
    reads = Reads(
        [str(first), str(second)], [None, None],
        *np.array([
            [0, 1, 0], [0, 0, (1 << 20) + 4096], [1 << 20, 4096, 1 << 20], [0, 0, 0], [0, 1 << 20, (1 << 20) + 4096],
        ]),
        np.array([whole.numel()]),
    )  # fmt: skip
    for _ in range(5):
        got = bytes_of(read(backend, reads, [whole])[0])
        assert got == content(3 << 20)[: 1 << 20] + content(4096, 1) + content(3 << 20)[(1 << 20) + 4096 :][: 1 << 20]


def test_simulated_cold_pieces_are_announced_to_the_kernel(
    backend: KvikioBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece as a whole, but only the first of adjacent ones is looked at."""
    (tmp_path / "file.bin").write_bytes(bytes(60 << 20))
    looked, hinted = [], []
    monkeypatch.setattr(files, "is_cold", lambda fd, offset: looked.append(offset) or offset == 0)
    monkeypatch.setattr(kvikio_module.os, "posix_fadvise", lambda fd, at, n, advice: hinted.append((at, n)))
    ranges = [(0, 24 << 20), (40 << 20, 10 << 20)]
    read(backend, Reads.of(str(tmp_path / "file.bin"), ranges), [dest(n) for _, n in ranges])
    assert looked == [0, 40 << 20]
    assert hinted == [(0, 12 << 20), (12 << 20, 12 << 20)]


@pytest.mark.parametrize("nbytes", [KVIKIO_LEAST_BYTES, 5 << 20])
def test_simulated_a_file_that_is_another_or_not_a_file_fails_alone(
    backend: KvikioBackend, kvikio: simulated.KvikIO, tmp_path: Path, nbytes: int
) -> None:
    good, fifo = tmp_path / "good.bin", tmp_path / "fifo"
    good.write_bytes(content(5 << 20))
    os.mkfifo(fifo)
    before = descriptors()
    reads = [Reads.of(str(path), [(0, nbytes)]) for path in (good, fifo, tmp_path, tmp_path / "missing.bin")]
    reads.append(Reads.of(str(good), [(0, nbytes)], FileId(1, 2, 3, 4)))
    pending = Storage(backend).fill(Reads.join(reads), [dest(nbytes) for _ in reads])
    assert sorted(pending.errors) == [1, 2, 3, 4]
    assert bytes_of(pending.tensors[0]) == content(5 << 20)[:nbytes]
    backend.close()
    assert descriptors() <= before


def test_simulated_closing_without_waiting(backend: KvikioBackend, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(content(30 << 20))
    into = dest(30 << 20)
    pending = Storage(backend).fill(Reads.of(str(tmp_path / "file.bin"), [(0, 30 << 20)]), [into])
    backend.close()
    assert pending.done
    assert bytes_of(pending.wait()[0]) == content(30 << 20)


@pytest.mark.parametrize(
    "sizes", [[9 << 20], [4096, 3 << 20, 5, 10], [100, 3 << 20], [0, KVIKIO_TASK_BYTES + 1, 3 << 20]]
)
def test_simulated_tensors_are_written_back_to_back(backend: KvikioBackend, tmp_path: Path, sizes: list[int]) -> None:
    parts = [torch.frombuffer(bytearray(content(n, i)), dtype=torch.uint8) if n else torch.empty(0, dtype=torch.uint8)
             for i, n in enumerate(sizes)]  # fmt: skip
    backend.write(str(tmp_path / "file.bin"), [*map(simulated.on_device, parts), b"tail"], durable=True, mode=0o666)
    assert (tmp_path / "file.bin").read_bytes() == b"".join(content(n, i) for i, n in enumerate(sizes)) + b"tail"


def test_simulated_a_failed_write_names_the_file(
    backend: KvikioBackend, kvikio: simulated.KvikIO, tmp_path: Path
) -> None:
    def fail(offset: int) -> None:
        if offset:
            raise OSError(28, "No space left on device")
        time.sleep(0.05)

    kvikio.fail = fail
    with pytest.raises(StorageError, match=r"No space left.*file\.bin"):
        backend.write(str(tmp_path / "file.bin"), [dest(9 << 20)], durable=False, mode=0o666)


@pytest.mark.parametrize("name", ["open", "pwrite", "get", "close"])
def test_simulated_whatever_fails_of_a_write_is_an_oserror_that_names_the_file(
    backend: KvikioBackend, kvikio: simulated.KvikIO, tmp_path: Path, name: str
) -> None:
    parts = [dest(5 << 20), b"between", dest(3 << 20)]
    for first in range(1, 9):
        seen = [0]

        def fail(call: str, first: int = first, seen: list[int] = seen) -> None:
            seen[0] += call == name
            if call == name and seen[0] == first:
                raise RuntimeError("cuFile error: 5011")

        kvikio.called = fail
        path, before = tmp_path / f"{first}.bin", descriptors()
        try:
            backend.write(str(path), parts, durable=True, mode=0o666)
        except StorageError as e:
            assert seen[0] >= first
            assert "cuFile error: 5011" in str(e)
            assert e.filename == str(path)
        else:
            assert seen[0] < first or name == "close"
            assert path.stat().st_size == (8 << 20) + 7
        assert descriptors() <= before


# Settings.


@pytest.mark.parametrize(
    ("set_before", "asked", "environment", "expected"),
    [
        (1, None, {}, kvikio_module.default_threads()),
        (5, None, {}, 5),  # the user's own number is left alone
        (1, None, {"KVIKIO_NTHREADS": "1"}, 1),
        (1, None, {"KVIKIO_NUM_THREADS": "1"}, 1),
        (5, 3, {}, 3),  # threads= is explicit
    ],
)
def test_simulated_threads_are_set_where_nobody_set_them(
    kvikio: simulated.KvikIO, gpu: Any, monkeypatch: pytest.MonkeyPatch,
    set_before: int, asked: int | None, environment: dict[str, str], expected: int,
) -> None:  # fmt: skip
    kvikio.settings["num_threads"] = set_before
    for name in ("KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    described = Storage(KvikioBackend(simulated.GPU, threads=asked)).describe()
    assert kvikio.settings["num_threads"] == described["kvikio_threads"] == expected
    assert kvikio_module.default_threads() >= 4
    with pytest.raises(ValueError, match="at least 1"):
        KvikioBackend(simulated.GPU, threads=0)


@pytest.mark.parametrize(
    ("compat", "loaded", "forced", "use", "words"),
    [
        (False, False, False, "never", "its threads"),  # cuFile would copy through the host, more slowly than we do
        (False, True, False, "by folder", "cuFile in folders"),
        (False, False, True, "always", "through cuFile"),
        (True, True, True, "never", "its threads"),
    ],
)
def test_simulated_where_cufile_is_used(
    kvikio: simulated.KvikIO, gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    compat: bool, loaded: bool, forced: bool, use: str, words: str,
) -> None:  # fmt: skip
    laid = Laid(tmp_path)
    monkeypatch.setattr(kvikio_module, "ROOT", laid.root)
    if loaded:
        laid.with_nvidia_fs("nvme")
    kvikio.prefers_compat_mode = compat
    kvikio.settings["compat_mode"] = "OFF" if forced else "AUTO"
    assert Storage(KvikioBackend(simulated.GPU)).describe()["cufile"] == use
    assert words in KvikioBackend.probe(simulated.GPU).reason


@pytest.mark.parametrize("forced", [False, True])
def test_simulated_each_folder_is_read_by_what_suits_it_and_that_is_counted(
    kvikio: simulated.KvikIO, gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    """Of one submission: a large file on an NVMe drive and one on another disk, a small file, and host memory."""
    laid = Laid(tmp_path)
    laid.on_nvme()
    laid.with_nvidia_fs("nvme")
    laid.file("run/udev/data/b259:3", "E:ID_FS_TYPE=ext4\nE:ID_FS_USAGE=filesystem\n")
    monkeypatch.setattr(kvikio_module, "ROOT", laid.root)
    kvikio.prefers_compat_mode = False
    kvikio.settings["compat_mode"] = "OFF" if forced else "AUTO"
    sizes = {laid.cache / "large": 9 << 20, tmp_path / "large": 7 << 20, laid.cache / "small": 5000,
             laid.cache / "host": 3 << 20}  # fmt: skip
    for path, nbytes in sizes.items():
        path.write_bytes(content(nbytes, nbytes % 251))
    watched = Watch()
    storage = Storage(KvikioBackend(simulated.GPU))
    reads = Reads.join([Reads.of(str(path), [(0, nbytes)]) for path, nbytes in sizes.items()])
    into = [torch.empty(n, dtype=torch.uint8) if path.name == "host" else dest(n) for path, n in sizes.items()]
    with measured(watched):
        got = storage.fill(reads, into).wait()
    storage.close()
    assert [bytes_of(tensor) for tensor in got] == [path.read_bytes() for path in sizes]
    assert {way: watched.counts[way] for way in WAYS if watched.counts[way]} == (
        {DIRECT: 9 << 20, COMPATIBLE: 7 << 20, STAGED: 5000, HOST: 3 << 20}
        if forced
        else {DIRECT: 9 << 20, STAGED: (7 << 20) + 5000, HOST: 3 << 20}
    )
    assert watched.counts["bytes"] == sum(sizes.values())
    pieces = max(nbytes for offset, nbytes in kvikio.reads)
    assert pieces <= KVIKIO_TASK_BYTES if forced else pieces > KVIKIO_TASK_BYTES, "one goes through a slot"


# Writes.


class FakeFuture:
    """In place of KvikIO's: done when it is waited for, with an error or a count."""

    def __init__(self, result: int | BaseException) -> None:
        self.result = result
        self.done = False

    def get(self) -> int:
        if isinstance(self.result, KeyboardInterrupt):
            pressed, self.result = self.result, KVIKIO_TASK_BYTES
            raise pressed
        self.done = True
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def write(results: list[int | BaseException]) -> None:
    """Writes one tensor, one piece per result. All pieces are over when it returns or raises."""
    futures = [FakeFuture(result) for result in results]
    left = iter(futures)

    class Fake:
        def pwrite(self, *_: Any) -> FakeFuture:
            return next(left)

    try:
        kvikio_module._write_parts(-1, Fake(), [dest(len(results) * KVIKIO_TASK_BYTES)])
    finally:
        assert all(f.done for f in futures)


@given(nbytes=st.integers(0, 100 << 20))
def test_written_pieces_are_whole_blocks_and_one_task_each(nbytes: int) -> None:
    pieces: list[tuple[int, int]] = []

    class Fake:
        def pwrite(self, part: torch.Tensor, nbytes: int, offset: int, task: int) -> FakeFuture:
            assert part.numel() == nbytes <= task
            pieces.append((offset, nbytes))
            return FakeFuture(nbytes)

    tensor = simulated.on_device(torch.empty(nbytes, dtype=torch.uint8))
    kvikio_module._write_parts(-1, Fake(), [dest(8192), tensor])
    assert pieces.pop(0) == (0, 8192)
    assert sum(n for _, n in pieces) == nbytes
    assert all(offset % ALIGNMENT == 0 and 0 < n <= KVIKIO_TASK_BYTES for offset, n in pieces)
    assert len({n for _, n in pieces[:-1]}) <= 1


def test_an_error_of_writing_comes_when_all_pieces_are_done() -> None:
    with pytest.raises(StorageError, match="full"):
        write([KVIKIO_TASK_BYTES, RuntimeError("full"), ValueError("later"), KVIKIO_TASK_BYTES])


def test_a_short_write_is_an_error() -> None:
    with pytest.raises(StorageError, match=rf"{KVIKIO_TASK_BYTES} bytes at {KVIKIO_TASK_BYTES}: it wrote 5"):
        write([KVIKIO_TASK_BYTES, 5])


def test_an_interrupt_comes_when_all_pieces_are_done() -> None:
    with pytest.raises(KeyboardInterrupt):
        write([KVIKIO_TASK_BYTES, KeyboardInterrupt(), KVIKIO_TASK_BYTES])
