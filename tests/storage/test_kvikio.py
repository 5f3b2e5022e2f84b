"""The kvikio backend: the contract on a CUDA target, and what is its own (the user's settings stay theirs)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from monai_gds.errors import BackendUnavailable
from monai_gds.storage import Read, Storage, available_backends, open_storage
from tests.storage.contract import CudaStorageContract, opened, safe_from_another_backend


@pytest.mark.gpu
class TestKvikio(CudaStorageContract):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        pytest.importorskip("kvikio", reason="KvikIO is not installed on this machine")
        with opened("kvikio", "cuda") as storage:
            yield storage

    def test_sets_the_threads_that_nobody_set_and_no_more(self, storage: Storage, blob: Path, folder: Path) -> None:
        import kvikio.defaults

        names = ("compat_mode", "task_size", "gds_threshold", "bounce_buffer_size")
        before = {name: kvikio.defaults.get(name) for name in names}
        self.get(storage, blob, (0, 9 << 20))
        storage.write(str(folder / "file.bin"), [self.dest(storage, 1 << 20)])
        assert {name: kvikio.defaults.get(name) for name in names} == before
        with kvikio.defaults.set("num_threads", 1), opened("kvikio", "cuda"):
            assert kvikio.defaults.get("num_threads") == 16
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
        assert isinstance(storage.describe()["compatibility_mode"], bool)
        assert "KvikIO" in available_backends("cuda")["kvikio"].reason

    def test_the_errors_of_kvikio_are_storage_errors(self, storage: Storage, folder: Path) -> None:
        path = self.make(folder, b"short")
        with pytest.raises(OSError, match=r"file\.bin"):
            storage.read([Read(str(path), 0, self.dest(storage, 4 << 20))])


def test_serves_cuda_targets_only() -> None:
    with pytest.raises(BackendUnavailable, match="posix"):
        open_storage("kvikio", "cpu")
