"""The contract of a storage backend, over DeepSpeed's real handles and over a stand-in for ``gds_handle``."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from monai_gds.storage import Storage, open_storage
from monai_gds.testing import BackendContract, CudaBackendContract, WriteContract, errors
from tests.storage.deepnvme.common import need_cufile, need_deepnvme, over_host_memory

pytestmark = pytest.mark.long  # DeepSpeed's operator takes minutes to compile


class OverAio(BackendContract):
    """What the runs over ``aio_handle`` share."""

    device: ClassVar[str] = "cpu"
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        need_deepnvme()
        storage = open_storage("deepnvme", self.device, **self.options)
        yield storage
        storage.close()


class TestOnCpu(OverAio, WriteContract):
    pass


class TestDividingItsWork(OverAio, WriteContract):
    """Three threads per handle: lengths must be divisible by three pages, and no block size divides the pieces."""

    options: ClassVar[dict[str, Any]] = {
        "threads": 2, "intra_op_parallelism": 3, "block_size": 5 * 4096, "queue_depth": 7,
    }  # fmt: skip


@pytest.mark.gpu
class TestOnCuda(OverAio, CudaBackendContract, WriteContract):
    device: ClassVar[str] = "cuda"


class WithHelper(WriteContract):
    """What both runs with a helper process need."""

    reads_while_closing: ClassVar[int] = 2  # a close ends the helper, and the next read starts another

    @pytest.fixture
    def stable_descriptors(self, storage: Storage, blob: Path) -> Iterator[None]:
        """Opens every lane first: the storage keeps a socket for each."""
        self.get(storage, blob, *[(0, 1 << 20)] * 12)
        yield


@pytest.mark.gpu
class TestGds(WithHelper, CudaBackendContract):
    """One storage for all: a helper with a CUDA context of its own starts slowly."""

    @pytest.fixture(scope="class")
    @classmethod
    def storage(cls, shared_folder: Path) -> Iterator[Storage]:
        need_cufile(shared_folder)
        storage = open_storage("deepnvme-gds", "cuda", threads=4)
        yield storage
        storage.close()

    def test_says_what_cufile_does_here(self, storage: Storage) -> None:
        assert ("nvidia-fs" in storage.describe()["cufile"]) and ("cuFile" in storage.describe()["cufile"])

    def test_a_file_that_cufile_refuses_is_an_error_and_not_the_end_of_the_process(self, storage: Storage) -> None:
        path = Path("/dev/shm/monai-gds-test.bin")
        path.write_bytes(bytes(1 << 20))
        try:
            self.get(storage, path, (0, 1 << 20))
        except OSError as e:
            assert str(path) in str(e)
        finally:
            path.unlink()


def _descriptors_but_sockets() -> int:
    gc.collect()
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(link.is_symlink() and not os.readlink(link).startswith("socket:") for link in links)


class TestHelperOnCpu(WithHelper):
    """Requests, sockets, descriptors and errors; all but CUDA and cuFile. One storage for all: helpers start slowly."""

    @pytest.fixture(scope="class")
    @classmethod
    def storage(cls) -> Iterator[Storage]:
        with over_host_memory() as storage:
            yield storage

    def test_an_unreadable_disk_is_an_error(  # type: ignore[override]
        self, storage: Storage, folder: Path, blob: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Sockets are not counted: torch keeps one to the shared memory of each helper process that there was."""
        monkeypatch.setattr(errors, "descriptors", _descriptors_but_sockets)
        super().test_an_unreadable_disk_is_an_error(storage, folder, blob)
