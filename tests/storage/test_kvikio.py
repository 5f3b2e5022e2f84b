"""The kvikio backend: the contract on a CUDA target, and what is its own (the user's settings stay theirs)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.errors import BackendUnavailable, StorageError
from monai_gds.storage import ALIGNMENT, Read, Storage, available_backends, open_storage
from monai_gds.storage import kvikio as kvikio_module
from tests.storage.contract import CudaStorageContract, opened, safe_from_another_backend


@pytest.mark.gpu
class TestKvikio(CudaStorageContract):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        pytest.importorskip("kvikio", reason="KvikIO is not installed on this machine")
        with opened("kvikio", "cuda") as storage:
            yield storage


def straight(storage: Storage) -> Storage:
    """Makes a kvikio storage hand its reads to KvikIO with device memory, as it does where cuFile works."""
    assert isinstance(storage, kvikio_module.KvikioStorage)
    storage._direct = True
    return storage


@pytest.mark.gpu
class TestKvikioStraight(CudaStorageContract):
    """The path for cuFile, on whatever KvikIO makes of it on this machine."""

    test_loads_while_the_default_stream_is_busy = None  # KvikIO's own copies wait for the legacy default stream

    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        pytest.importorskip("kvikio", reason="KvikIO is not installed on this machine")
        with opened("kvikio", "cuda") as storage:
            yield straight(storage)

    def test_sets_the_threads_that_nobody_set_and_no_more(self, storage: Storage, blob: Path, folder: Path) -> None:
        import kvikio.defaults

        names = ("compat_mode", "task_size", "gds_threshold", "bounce_buffer_size")
        before = {name: kvikio.defaults.get(name) for name in names}
        self.get(storage, blob, (0, 9 << 20))
        storage.write(str(folder / "file.bin"), [self.dest(storage, 1 << 20)])
        assert {name: kvikio.defaults.get(name) for name in names} == before
        with kvikio.defaults.set("num_threads", 1), opened("kvikio", "cuda"):
            assert kvikio.defaults.get("num_threads") == kvikio_module.default_threads() >= 4
        with kvikio.defaults.set("num_threads", 5), opened("kvikio", "cuda"):
            assert kvikio.defaults.get("num_threads") == 5, "the user's own number is left alone"
        with kvikio.defaults.set("num_threads", 5), opened("kvikio", "cuda", threads=3):
            assert kvikio.defaults.get("num_threads") == 3, "threads= says it outright"

    def test_leaves_kvikio_s_environment_in_charge(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kvikio = pytest.importorskip("kvikio", reason="KvikIO is not installed on this machine")
        monkeypatch.setenv("KVIKIO_NTHREADS", "1")
        with kvikio.defaults.set("num_threads", 1), opened("kvikio", "cuda"):
            assert kvikio.defaults.get("num_threads") == 1

    def test_its_memory_is_safe_from_copies_of_another_backend(
        self, storage: Storage, blob: Path, data: bytes, consumer: torch.cuda.Stream
    ) -> None:
        assert safe_from_another_backend(storage, blob, data, consumer)

    def test_says_how_it_reads(self, storage: Storage) -> None:
        assert isinstance(storage.describe()["cufile"], bool)
        assert "KvikIO" in available_backends("cuda")["kvikio"].reason

    def test_the_errors_of_kvikio_are_storage_errors(self, storage: Storage, folder: Path) -> None:
        path = self.make(folder, b"short")
        with pytest.raises(OSError, match=r"file\.bin"):
            storage.read([Read(str(path), 0, self.dest(storage, 4 << 20))])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("module", "forced", "expected"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_cufile_is_used_where_it_reaches_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: bool, forced: bool, expected: bool
) -> None:
    """Not wherever its library is: without nvidia-fs it copies through the host, more slowly than we do."""
    kvikio = pytest.importorskip("kvikio", reason="KvikIO is not installed on this machine")
    monkeypatch.setattr(kvikio.defaults, "is_compat_mode_preferred", lambda: False)
    monkeypatch.setattr(kvikio_module, "NVIDIA_FS", "/" if module else str(tmp_path / "missing"))
    mode = kvikio.CompatMode.OFF if forced else kvikio.CompatMode.AUTO
    with kvikio.defaults.set("compat_mode", mode), opened("kvikio", "cuda") as storage:
        assert storage.describe()["cufile"] is expected
        assert ("cuFile" in available_backends("cuda")["kvikio"].reason) is expected


def test_serves_cuda_targets_only() -> None:
    with pytest.raises(BackendUnavailable, match="posix"):
        open_storage("kvikio", "cpu")


TASK = kvikio_module.TASK_BYTES


class FakeFuture:
    """Stands for KvikIO's: done when told, with an error or a count."""

    def __init__(self, result: int | BaseException) -> None:
        self.result = result
        self.done = False

    def get(self) -> int:
        self.done = True
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def started(results: list[int | BaseException], nbytes: int) -> tuple[kvikio_module._Transfers, list[FakeFuture]]:
    """Transfers of one tensor, in a piece a result."""
    futures = [FakeFuture(result) for result in results]
    left = iter(futures)
    transfers = kvikio_module._Transfers()
    transfers.start(lambda *_: next(left), "file.bin", torch.zeros(nbytes, dtype=torch.uint8), 0)
    return transfers, futures


@given(nbytes=st.integers(0, 100 << 20))
def test_pieces_are_even_whole_blocks_and_one_task_each(nbytes: int) -> None:
    pieces = list(kvikio_module._pieces(nbytes))
    assert [p.start for p in pieces] == [0, *(p.stop for p in pieces[:-1])][: len(pieces)]
    assert (pieces[-1].stop if pieces else 0) == nbytes
    sizes = [p.stop - p.start for p in pieces]
    assert all(0 < size <= kvikio_module.TASK_BYTES for size in sizes)
    assert all(p.start % ALIGNMENT == 0 for p in pieces)
    assert len(set(sizes[:-1])) <= 1


def test_an_error_comes_when_all_pieces_are_done() -> None:
    transfers, futures = started([TASK, RuntimeError("EOF"), ValueError("later"), TASK], 4 * TASK)
    with pytest.raises(StorageError, match=r"EOF.*file\.bin"):
        transfers.wait()
    assert all(f.done for f in futures)
    transfers.wait()  # it is told once


def test_a_short_piece_is_an_error() -> None:
    transfers, _ = started([TASK, 5], 2 * TASK)
    with pytest.raises(StorageError, match=rf"5 of {TASK} bytes at {TASK}.*file\.bin"):
        transfers.wait()


def test_an_interrupt_loses_no_piece() -> None:
    transfers, futures = started([TASK, KeyboardInterrupt(), TASK], 3 * TASK)
    with pytest.raises(KeyboardInterrupt):
        transfers.wait()
    futures[1].result = TASK
    transfers.wait()
    assert all(f.done for f in futures)


def test_what_is_dropped_is_waited_for() -> None:
    transfers, futures = started([TASK, RuntimeError("EOF")], 2 * TASK)
    del transfers
    assert all(f.done for f in futures)
