"""Sharing a submission out among threads, where threads are hard to get and files are many."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monai_gds.storage import ALIGNMENT, FileId, Read, staging
from monai_gds.storage.posix import PosixStorage
from monai_gds.storage.threaded import aligned_empty
from tests.storage.contract import bytes_of, content

CPU = torch.device("cpu")


class Recording(PosixStorage):
    """Counts what is open, and what was read."""

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(CPU, threads)
        self.open_now = self.most_open = self.opened = self.pieces = 0
        self._counting = threading.Lock()

    def _open(self, path: str, expect: FileId | None) -> tuple[int, str]:
        with self._counting:
            self.opened += 1
            self.open_now += 1
            self.most_open = max(self.most_open, self.open_now)
        return super()._open(path, expect)

    def _close(self, handle: Any) -> None:
        super()._close(handle)
        with self._counting:
            self.open_now -= 1

    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> None:
        super()._read_into(handle, offset, dest)
        with self._counting:
            self.pieces += 1


@pytest.fixture
def storage() -> Iterator[Recording]:
    storage = Recording(threads=4)
    yield storage
    storage.close()


def empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_a_file_is_opened_once_and_no_more_are_open_than_threads(storage: Recording, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{i}.bin") for i in range(50)]
    for i, path in enumerate(paths):
        Path(path).write_bytes(bytes([i]) * 100_000)
    requests = [Read(path, 0, empty(n)) for n in (100_000, 10, 5000) for path in paths]  # by turns
    storage.read(requests)
    assert storage.opened == 50
    assert storage.most_open <= 4
    assert storage.open_now == 0
    assert all(set(bytes_of(r.dest)) == {i % 50} for i, r in enumerate(requests))


@pytest.mark.parametrize("granted", [0, 1, 3])
def test_reads_all_the_same_where_no_more_threads_start(
    storage: Recording, blob: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, granted: int
) -> None:
    submit = ThreadPoolExecutor.submit
    left = [granted]

    def stingy(executor: ThreadPoolExecutor, *args: Any) -> Any:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        return submit(executor, *args)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", stingy)
    dest = empty(len(data))
    storage.read([Read(str(blob), 0, dest), Read(str(blob), 5, empty(0))])
    assert bytes_of(dest) == data
    assert storage.open_now == 0


@pytest.mark.parametrize("at_once", [False, True])
def test_nothing_is_there_before_all_of_it_is_where_no_more_threads_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """An executor keeps a task for which it could start no thread, and one that was busy may begin with it later."""
    begun = threading.Event()
    path, data = tmp_path / "file.bin", content(2 << 20)  # two pieces
    path.write_bytes(data)

    class Slow(Recording):
        def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> None:
            if threading.current_thread() is threading.main_thread():
                begun.set()  # the thread that was busy is free now
                time.sleep(0.2)
            else:
                time.sleep(0.6)
            super()._read_into(handle, offset, dest)

    storage = Slow(threads=2)
    storage._threads().submit(begun.wait, 30)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("monai-gds"):
            if at_once:
                begun.set()
                time.sleep(0.1)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    dest = torch.zeros(len(data), dtype=torch.uint8)
    storage.read([Read(str(path), 0, dest)])
    assert bytes_of(dest) == data
    storage.close()


def test_a_failure_drops_what_was_still_to_be_read(storage: Recording, blob: Path, tmp_path: Path) -> None:
    missing = Read(str(tmp_path / "missing.bin"), 0, empty(1 << 20))
    with pytest.raises(FileNotFoundError):
        storage.read([missing, *(Read(str(blob), i, empty(1 << 20)) for i in range(500))])
    assert storage.pieces < 500
    assert storage.open_now <= 1  # "missing" counted when it was tried


@pytest.mark.parametrize("nbytes", [100, 2 << 20])
def test_an_error_that_was_handled_keeps_no_destination(storage: Recording, tmp_path: Path, nbytes: int) -> None:
    """A volume's worth of memory must not wait for the garbage collector."""

    def attempt() -> weakref.ref[torch.Tensor]:
        dest = empty(nbytes)
        with contextlib.suppress(OSError):
            storage.submit([Read(str(tmp_path / "missing.bin"), 0, dest)]).wait()
        return weakref.ref(dest)

    gc.collect()
    gc.disable()
    try:
        kept = attempt()
        storage.close()  # its threads have let go of it too
        assert kept() is None
    finally:
        gc.enable()


def test_each_expectation_of_a_file_is_checked_once(storage: Recording, blob: Path) -> None:
    here = FileId.of(blob)
    storage.read([Read(str(blob), i, empty(1 << 20), expect) for i, expect in enumerate([here, None, here, None])])
    assert storage.opened == 2


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, (4 << 20) - 1, 4 << 20, (9 << 20) + 5])
def test_buffers_begin_at_a_page(nbytes: int) -> None:
    memory = aligned_empty(nbytes)
    assert memory.numel() == nbytes
    assert memory.data_ptr() % ALIGNMENT == 0
    assert memory.untyped_storage().nbytes() <= nbytes + ALIGNMENT  # it is pickled as a whole


def test_a_tensor_leaves_the_device_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over host memory in place of a pinned slot, which also goes back to its pool."""
    buffer = torch.empty(4096, dtype=torch.uint8)
    slot, free = SimpleNamespace(buffer=buffer, view=buffer.numpy().data), []
    pool = SimpleNamespace(slot_bytes=4096, acquire=lambda: slot, release=free.append)
    monkeypatch.setattr(staging, "staging_pool", lambda device: pool)
    data = content(3 * 4096 + 5)
    pieces = [bytes(piece) for piece in staging.on_host(torch.frombuffer(bytearray(data), dtype=torch.uint8))]
    assert b"".join(pieces) == data
    assert [len(piece) for piece in pieces] == [4096, 4096, 4096, 5]
    assert free == [slot]
    pieces_of_another = staging.on_host(torch.zeros(2 * 4096, dtype=torch.uint8))
    next(pieces_of_another)
    del pieces_of_another  # the disk is full, for example
    assert free == [slot, slot]
