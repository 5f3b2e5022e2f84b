"""Tests of threads and processes: many share a storage, close it at any time, and fork."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from monai_gds.errors import StorageError
from monai_gds.storage import Reads, Storage
from monai_gds.testing.base import OverABackend
from monai_gds.testing.tools import BLOB_BYTES, assert_bytes, assert_file, error_of, meanwhile


class LivesAmongThreads(OverABackend):
    """What a backend promises to threads that share it, and to forked processes."""

    #: Reads during which another thread keeps closing the storage. Fewer where each close takes seconds.
    reads_while_closing: ClassVar[int] = 60

    @pytest.mark.usefixtures("stable_descriptors")
    def test_eight_threads_share_a_storage(self, storage: Storage, folder: Path, blob: Path, data: bytes) -> None:
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
                assert_file(path, b"x" + expected)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))

    @pytest.mark.usefixtures("stable_descriptors")
    def test_close_waits_and_the_storage_can_be_used_again(self, storage: Storage, blob: Path, data: bytes) -> None:
        for _ in range(3):
            pending = storage.load(Reads.of(str(blob), [(0, BLOB_BYTES)]))
            storage.close()
            storage.close()
            assert_bytes(self.ended(pending).wait()[0], data)
            self.assert_gives(storage, blob, data, (5, 9 << 20))

    @pytest.mark.usefixtures("stable_descriptors")
    def test_closing_in_another_thread_disturbs_no_read(self, storage: Storage, blob: Path, data: bytes) -> None:
        with meanwhile(storage.close, pause=0.001):
            for i in range(self.reads_while_closing):
                dest = self.dest(storage, 2 << 20)
                self.fill(storage, (blob, i, dest)).wait()
                assert_bytes(dest, data[i : i + (2 << 20)])
                self.assert_gives(storage, blob, data, (i, 700_001))

    def test_close_leaves_no_thread(self, storage: Storage, blob: Path) -> None:
        storage.close()
        before = threading.active_count()
        self.get(storage, blob, (0, BLOB_BYTES))
        self.fill(storage, (blob, 0, self.dest(storage, 4 << 20))).wait()
        storage.close()
        assert threading.active_count() <= before

    def test_a_forked_child_is_refused_and_disturbs_no_read(self, storage: Storage, blob: Path, data: bytes) -> None:
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
