"""The xnvme backend (xNVMe's file API): the contract over the real library and the test double, and injected faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monai_gds.errors import StorageError
from monai_gds.storage import Storage
from tests.loopdisk import loop_disk
from tests.storage import libraries
from tests.storage.contract import CudaStorageContract, StorageContract, content, opened


@pytest.fixture(scope="module", params=["real, ext4", "real, xfs", "double, any"])
def shared_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    library, _, kind = request.param.partition(", ")
    with libraries.using(library):
        folder = tmp_path_factory.mktemp("storage")
        if kind == "any":
            yield folder
            return
        with loop_disk(folder, kind, size=1 << 30) as disk:
            (disk.folder / "shared").mkdir()
            yield disk.folder / "shared"


@pytest.fixture
def folder(shared_folder: Path, request: pytest.FixtureRequest) -> Path:
    """A new folder on the same file system."""
    made = shared_folder.parent / f"test-{abs(hash(request.node.nodeid))}"
    made.mkdir()
    return made


class _OnItsFileSystem:
    @pytest.fixture
    def folder(self, folder: Path) -> Path:
        return folder


class TestXnvmeOnCpu(_OnItsFileSystem, StorageContract):
    @pytest.fixture
    def storage(self, shared_folder: Path) -> Iterator[Storage]:
        with opened("xnvme", "cpu") as storage:
            yield storage


class TestXnvmeOnCuda(_OnItsFileSystem, CudaStorageContract):
    @pytest.fixture
    def storage(self, shared_folder: Path) -> Iterator[Storage]:
        with opened("xnvme", "cuda") as storage:
            yield storage


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
        with opened("xnvme", "cpu") as storage:
            double.fail("SHORT_READ")
            (got,) = storage.load(str(tmp_path / "file.bin"), [(0, 10_000)]).wait()
        assert got.numpy().tobytes() == content(10_000)
        assert double.count("reads") == 2

    def test_a_failed_read_is_an_error_and_the_next_one_is_not(self, double: libraries.Double, tmp_path: Path) -> None:
        (tmp_path / "file.bin").write_bytes(content(10_000))
        with opened("xnvme", "cpu") as storage:
            double.fail("ERRNO_STATUS")
            with pytest.raises(StorageError, match=r"Input/output error.*file\.bin"):
                storage.load(str(tmp_path / "file.bin"), [(0, 10_000)]).wait()
            assert storage.load(str(tmp_path / "file.bin"), [(0, 5)]).wait()[0].numpy().tobytes() == content(10_000)[:5]

    def test_writes_through_xnvme(self, double: libraries.Double, tmp_path: Path) -> None:
        with opened("xnvme", "cpu") as storage:
            storage.write(str(tmp_path / "file.bin"), [b"one", b"two"], durable=True)
        assert (tmp_path / "file.bin").read_bytes() == b"onetwo"
        assert double.count("writes") == 2
        assert double.count("devices") == 0
