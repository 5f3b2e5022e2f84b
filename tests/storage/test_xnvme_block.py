"""x"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monai_gds.storage import Storage
from tests.loopdisk import LoopDisk, loop_disk
from tests.storage.contract import StorageContract, opened


@pytest.fixture(scope="module", params=["ext4"])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path_factory.mktemp("disk"), request.param, size=1 << 30) as disk:
        yield disk


@pytest.fixture(scope="module")
def shared_folder(disk: LoopDisk) -> Path:
    (disk.folder / "shared").mkdir()
    return disk.folder / "shared"


class TestBlock(StorageContract):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        with opened("xnvme-block", "cpu") as storage:
            yield storage

    @pytest.fixture
    def folder(self, disk: LoopDisk, request: pytest.FixtureRequest) -> Path:
        import tempfile

        return Path(tempfile.mkdtemp(dir=disk.folder))
