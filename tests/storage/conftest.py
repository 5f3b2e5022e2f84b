"""The file that the storage tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from monai_gds.testing.tools import blob_content


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
