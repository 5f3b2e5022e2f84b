"""The file that the storage tests read, and how much of the contract runs over each backend in ``make test``."""

from __future__ import annotations

from pathlib import Path

import pytest

from monai_gds.testing import BackendContract
from monai_gds.testing.tools import blob_content
from tests.storage.broken_backends import CORE

#: The whole contract runs over these: a blocking backend, a queue, and a device that is read by blocks.
WHOLE = {"TestPosixOnCpu", "TestSampleQueueBackend", "TestBlocksOfTheDoubleToCpu"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leaves to ``make test-long`` what another combination is unlikely to break by itself."""
    if isinstance(item, pytest.Function) and item.cls is not None and issubclass(item.cls, BackendContract):
        of_the_contract = item.function.__module__.startswith(("monai_gds.testing", "tests.storage.full_contract"))
        if of_the_contract and item.cls.__name__ not in WHOLE and item.originalname not in CORE:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def data() -> bytes:
    """What is in ``blob``."""
    return blob_content()


@pytest.fixture(scope="module")
def blob(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> Path:
    """A file of BLOB_BYTES bytes, ``data``. Tests leave it as it is."""
    path = tmp_path_factory.mktemp("storage") / "blob.bin"
    path.write_bytes(data)
    return path
