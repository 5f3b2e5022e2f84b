"""The file that the storage tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.contract import BLOB_BYTES, content


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on a file system that the backend under test can use."""
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="session")
def data() -> bytes:
    """What is in ``blob``."""
    return content(BLOB_BYTES)


@pytest.fixture(scope="module")
def blob(shared_folder: Path, data: bytes) -> Path:
    """A file of BLOB_BYTES bytes, ``data``. Tests leave it as it is."""
    path = shared_folder / "blob.bin"
    path.write_bytes(data)
    return path
