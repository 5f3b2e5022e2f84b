"""The xnvme backend (xNVMe's file API): the contract on ext4 and XFS."""

from __future__ import annotations
from collections.abc import Iterator
import pytest
from monai_gds.storage import Storage
from tests.storage.contract import StorageContract, opened


class TestXnvmeOnCpu(StorageContract):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        with opened("xnvme", "cpu") as storage:
            yield storage
