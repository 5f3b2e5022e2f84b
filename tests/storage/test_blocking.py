"""What BlockingBackend does for a backend: sharing work out among threads that may be hard to get, and naming files."""

from __future__ import annotations

import contextlib
import errno
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from monai_gds.errors import FileChanged, StorageError
from monai_gds.storage import Reads, Storage
from monai_gds.storage.blocking import Work, naming_file
from monai_gds.storage.files import Expected
from monai_gds.storage.plain.posix import PosixBackend
from monai_gds.testing.tools import bytes_of, content
from tests.storage.sample_blocking_backend import SampleBackend

CPU = torch.device("cpu")


class Recording(PosixBackend):
    """Counts what is open, and what was read."""

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(CPU, threads)
        self.open_now = self.most_open = self.opened = self.pieces = 0
        self._counting = threading.Lock()

    def _open(self, path: str, expected: Expected) -> Any:
        with self._counting:
            self.opened += 1
            self.open_now += 1
            self.most_open = max(self.most_open, self.open_now)
        return super()._open(path, expected)

    def _close(self, handle: Any) -> None:
        super()._close(handle)
        with self._counting:
            self.open_now -= 1

    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        with self._counting:
            self.pieces += 1
        return super()._read_into(handle, offset, dest)


@pytest.fixture
def backend() -> Recording:
    return Recording(threads=4)


@pytest.fixture
def storage(backend: Recording) -> Iterator[Storage]:
    storage = Storage(backend)
    yield storage
    storage.close()


def test_a_file_is_opened_once_and_few_are_open_at_a_time(backend: Recording, storage: Storage, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{i}.bin") for i in range(50)]
    for i, path in enumerate(paths):
        Path(path).write_bytes(bytes([i]) * 100_000)
    reads = Reads.join([Reads.of(path, [(0, 100_000), (7, 10), (9, 5000)]) for path in paths])
    tensors = storage.load(reads).wait()
    assert backend.opened == 50
    assert backend.most_open <= 8  # per thread one that it reads, and one whose last piece is in another's group
    assert backend.open_now == 0
    assert all(set(bytes_of(t)) == {file} for file, t in zip(reads.file.tolist(), tensors, strict=True))


def test_small_files_are_shared_out_in_groups(tmp_path: Path) -> None:
    """A thread for each file would cost more than reading it: 64 files of 100 kB are work for four."""
    for i in range(64):
        (tmp_path / f"{i}").write_bytes(bytes(100_000))
    before = set(threading.enumerate())
    storage = Storage(PosixBackend(CPU, threads=16))
    storage.load(Reads.join([Reads.of(str(tmp_path / f"{i}"), [(0, 100_000)]) for i in range(64)])).wait()
    assert 1 <= len(set(threading.enumerate()) - before) <= 4
    storage.close()


def test_large_reads_are_cut_for_the_idle_threads(tmp_path: Path) -> None:
    """After each piece a thread has to get the interpreter's lock."""
    (path := tmp_path / "file.bin").write_bytes(data := content(8 << 20))
    go_on, begun = threading.Event(), threading.Semaphore(0)

    class Waiting(Recording):
        def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
            begun.release()
            assert go_on.wait(60)
            return super()._read_into(handle, offset, dest)

    backend = Waiting(threads=6)
    with contextlib.closing(Storage(backend)) as storage:
        pending = [storage.load(Reads.of(str(path), [(0, 4 << 20)]))]  # for 6 threads, but of 1 MiB at least
        for _ in range(4):
            assert begun.acquire(timeout=60)
        pending += [storage.load(Reads.of(str(path), [(0, 8 << 20)])) for _ in range(2)]  # for two threads, for none
        go_on.set()
        assert all(bytes_of(p.wait()[0]) == data[: p.wait()[0].numel()] for p in pending)
        assert backend.pieces == 4 + 2 + 1
        storage.load(Reads.of(str(path), [(0, 6 << 20)])).wait()  # all are idle again
        assert backend.pieces == 4 + 2 + 1 + 6


def test_few_bytes_are_read_by_the_callers_own_thread(storage: Storage, blob: Path, data: bytes) -> None:
    before = threading.active_count()
    assert bytes_of(storage.load(Reads.of(str(blob), [(5, 300_000)])).wait()[0]) == data[5:300_005]
    assert threading.active_count() == before


@pytest.mark.parametrize("granted", [0, 1, 3])
def test_reads_all_the_same_where_no_more_threads_start(
    backend: Recording, storage: Storage, blob: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, granted: int
) -> None:
    submit = ThreadPoolExecutor.submit
    left = [granted]

    def stingy(executor: ThreadPoolExecutor, *args: Any) -> Any:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        return submit(executor, *args)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", stingy)
    whole, empty = storage.load(Reads.of(str(blob), [(0, len(data)), (5, 0)])).wait()
    assert bytes_of(whole) == data
    assert len(empty) == backend.open_now == 0


def test_nothing_is_kept_where_no_thread_starts(
    backend: Recording, storage: Storage, blob: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor keeps the task, which must not keep what was read until the storage is closed."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    read: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(3):
        dest = torch.zeros(len(data), dtype=torch.uint8)
        (whole,) = storage.fill(Reads.of(str(blob), [(0, len(data))]), [dest]).wait()
        assert bytes_of(whole) == data
        read.append(weakref.ref(whole))
    del dest, whole
    gc.collect()
    assert [tensor() for tensor in read] == [None] * 3


@pytest.mark.parametrize("at_once", [False, True])
def test_nothing_is_there_before_all_of_it_is_where_no_more_threads_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """An executor keeps a task for which it could start no thread, and one that was busy may begin with it later."""
    begun = threading.Event()
    path, data = tmp_path / "file.bin", content(2 << 20)  # two pieces
    path.write_bytes(data)

    class Slow(Recording):
        def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
            if threading.current_thread() is threading.main_thread():
                begun.set()  # the thread that was busy is free now
                time.sleep(0.2)
            else:
                time.sleep(0.6)
            return super()._read_into(handle, offset, dest)

    storage = Storage(backend := Slow(threads=2))
    backend._run_in_threads(Work([1], lambda _: begun.wait(30), lambda: None))
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("monai-gds"):
            if at_once:
                begun.set()
                time.sleep(0.1)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert bytes_of(storage.load(Reads.of(str(path), [(0, len(data))])).wait()[0]) == data
    storage.close()


def test_a_failure_drops_what_was_still_to_be_read_of_that_file(
    backend: Recording, storage: Storage, blob: Path
) -> None:
    beyond = [((1 << 30) + i, 1 << 20) for i in range(200)]
    reads = Reads.join([Reads.of(str(blob), [(0, 1 << 20)]), Reads.of(str(blob), beyond)])
    assert list(storage.load(reads).errors) == [1]
    assert backend.pieces < 50
    assert backend.open_now == 0


@pytest.mark.parametrize("nbytes", [100, 2 << 20])
@pytest.mark.parametrize("name", ["missing.bin", "short.bin"])
@pytest.mark.parametrize("how", ["wait", "errors"])
def test_an_error_that_was_handled_keeps_no_destination(
    storage: Storage, tmp_path: Path, nbytes: int, name: str, how: str
) -> None:
    """A volume's worth of memory must not wait for the garbage collector."""
    (tmp_path / "short.bin").write_bytes(bytes(50))

    def attempt() -> weakref.ref[torch.Tensor]:
        dest = torch.empty(nbytes, dtype=torch.uint8)
        reads = Reads.of(str(tmp_path / name), [(0, nbytes)])
        with contextlib.suppress(OSError):
            if how == "wait":
                storage.fill(reads, [dest]).wait()
            else:
                assert len(storage.fill(reads, [dest]).errors) == 1
        return weakref.ref(dest)

    gc.collect()
    gc.disable()
    try:
        kept = attempt()
        storage.close()  # its threads have let go of it too
        assert kept() is None
    finally:
        gc.enable()


class Faulty(SampleBackend):
    """Ends every read of one file with an error of its own."""

    error: BaseException = SystemExit(3)

    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        if handle.name.endswith("faulty.bin"):
            raise self.error
        return super()._read_into(handle, offset, dest)


@pytest.fixture
def faulty() -> Iterator[Storage]:
    storage = Storage(Faulty(CPU, threads=2))
    yield storage
    storage.close()


def three_files(folder: Path, nbytes: int) -> Reads:
    paths = [folder / name for name in ("good.bin", "faulty.bin", "better.bin")]
    for path in paths:
        path.write_bytes(content(nbytes))
    return Reads.join([Reads.of(str(path), [(0, nbytes)]) for path in paths])


@pytest.mark.parametrize("nbytes", [100, 3 << 20])
@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (RuntimeError("queue full"), "RuntimeError: queue full"),
        (OSError(errno.ENODEV, "gone"), "gone"),
        (OSError(errno.ENODEV, "gone", 17), "gone"),
        (OSError(errno.ENODEV, "gone", "/dev/ng0n1"), "gone: '/dev/ng0n1'"),
        (OSError("no number"), "no number"),
    ],
    ids=["no OSError", "no name", "a descriptor", "another name", "no number"],
)
def test_whatever_a_backend_raises_is_an_error_of_that_file_and_names_it(
    faulty: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kept: str, nbytes: int
) -> None:
    monkeypatch.setattr(Faulty, "error", error)
    pending = faulty.load(three_files(tmp_path, nbytes))
    assert list(pending.errors) == [1]
    with pytest.raises(OSError, match=r"faulty\.bin") as caught:
        pending.wait()
    assert kept in str(caught.value)
    assert caught.value.errno == (getattr(error, "errno", None) or errno.EIO)
    assert [bytes_of(t) for t in pending.tensors[::2]] == [content(nbytes)] * 2


def test_no_file_looks_as_if_it_had_been_read_after_a_thread_was_ended(faulty: Storage, tmp_path: Path) -> None:
    errors = faulty.load(three_files(tmp_path, 3 << 20)).errors
    assert sorted(errors) == [0, 1, 2]
    assert all(isinstance(e, StorageError) and "SystemExit(3)" in str(e) for e in errors.values())


def test_an_error_that_names_the_file_stays_as_it_is() -> None:
    for error in (
        FileNotFoundError(2, "No such file", "/a"),
        FileChanged("/a was replaced"),
        StorageError(5, "x", "/a"),
    ):
        assert naming_file(error, "/a") is error


def test_an_interrupt_in_the_callers_own_thread_is_raised_there_and_closes_the_files(
    storage: Storage, backend: Recording, blob: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads.of(str(blob), [(0, 1000), (300_000, 1000)])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PosixBackend, "_read_into", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        storage.load(reads)
    assert backend.open_now == 0
    assert bytes_of(storage.load(reads).wait()[1]) == data[300_000:301_000]


def test_work_counts_its_groups_and_ends_once() -> None:
    done: list[int] = []
    over: list[int] = []
    work = Work(range(500), done.append, lambda: over.append(len(done)))
    threads = [threading.Thread(target=work.run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work.run()
    assert (sorted(done), over) == (list(range(500)), [500])


def test_a_small_read_takes_no_larger_pieces_than_the_backend_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file.bin").write_bytes(data := content(300_000))
    monkeypatch.setattr(Recording, "piece_bytes", 64 << 10)
    recording = Recording()
    with contextlib.closing(Storage(recording)) as storage:
        assert bytes_of(storage.load(Reads.of(str(tmp_path / "file.bin"), [(0, len(data))])).wait()[0]) == data
    assert recording.pieces == 5
