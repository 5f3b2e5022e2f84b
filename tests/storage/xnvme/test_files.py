"""The xnvme backend (xNVMe's file API): the contract over the real library and the test double, and injected faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from monai_gds.errors import StorageError
from monai_gds.storage import Reads, Storage, open_storage
from monai_gds.testing import BackendContract, CudaBackendContract, WriteContract
from monai_gds.testing.tools import bytes_of, content
from tests.loopdisk import loop_disk
from tests.storage.xnvme import libraries


def opened(device: str = "cpu") -> closing[Storage]:
    """The backend's storage, closed at the end."""
    return closing(open_storage("xnvme", device))


class OnAFileSystem(BackendContract):
    """The contract over a library and on a file system."""

    target = "cpu"

    @pytest.fixture(scope="class", params=["real, ext4", "real, xfs", "double, any"])
    @classmethod
    def shared_folder(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        library, _, kind = request.param.partition(", ")
        folder = tmp_path_factory.mktemp("storage")
        with libraries.using(library):
            if kind == "any":
                yield folder
                return
            with loop_disk(folder, kind, size=1 << 30) as disk:
                yield disk.folder

    @pytest.fixture
    def storage(self, shared_folder: Path) -> Iterator[Storage]:
        with opened(self.target) as storage:
            yield storage


class TestXnvmeOnCpu(OnAFileSystem, WriteContract):
    pass


class TestXnvmeOnCuda(OnAFileSystem, CudaBackendContract, WriteContract):
    target = "cuda"


def load(storage: Storage, path: Path, nbytes: int) -> list[torch.Tensor]:
    """The first bytes of a file."""
    return storage.load(Reads.of(str(path), [(0, nbytes)])).wait()


class TestFaults:
    @pytest.fixture
    def double(self) -> Iterator[libraries.Double]:
        with libraries.using("double"):
            double = libraries.Double()
            double.reset()
            yield double
            double.reset()

    def test_a_short_read_is_gone_on_with(self, double: libraries.Double, tmp_path: Path) -> None:
        (tmp_path / "file.bin").write_bytes(content(10_000))
        with opened() as storage:
            double.fail("SHORT_READ")
            (got,) = load(storage, tmp_path / "file.bin", 10_000)
        assert bytes_of(got) == content(10_000)
        assert double.count("reads") == 2

    def test_a_failed_read_is_an_error_and_the_next_one_is_not(self, double: libraries.Double, tmp_path: Path) -> None:
        (tmp_path / "file.bin").write_bytes(content(10_000))
        with opened() as storage:
            double.fail("ERRNO_STATUS")
            with pytest.raises(StorageError, match=r"Input/output error.*file\.bin"):
                load(storage, tmp_path / "file.bin", 10_000)
            assert bytes_of(load(storage, tmp_path / "file.bin", 5)[0]) == content(10_000)[:5]

    def test_writes_through_xnvme(self, double: libraries.Double, tmp_path: Path) -> None:
        with opened() as storage:
            storage.write(str(tmp_path / "file.bin"), [b"one", b"two"], durable=True)
        assert (tmp_path / "file.bin").read_bytes() == b"onetwo"
        assert double.count("writes") == 2
        assert double.count("devices") == 0
