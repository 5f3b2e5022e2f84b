"""Plain files: identity, memory that begins at a page, and hints to the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from monai_gds.errors import FileChanged
from monai_gds.storage import ALIGNMENT, FileId, files
from monai_gds.testing.tools import descriptors


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, (4 << 20) - 1, 4 << 20, (9 << 20) + 5])
def test_memory_begins_at_a_page(nbytes: int) -> None:
    memory = files.aligned_empty(nbytes)
    assert memory.numel() == nbytes
    assert memory.data_ptr() % ALIGNMENT == 0
    assert memory.untyped_storage().nbytes() <= nbytes + ALIGNMENT  # it is pickled as a whole


def test_only_the_expected_file_is_opened_and_the_error_tells_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"12345")
    for expected in (None, 5, FileId.of(path)):
        os.close(files.open_file(str(path), expected))
    identity, before = FileId.of(path), descriptors()
    path.write_bytes(b"123456")
    with pytest.raises(FileChanged, match=r"file\.bin has 6 bytes, and had 5 .*list the files again"):
        files.open_file(str(path), 5)
    with pytest.raises(FileChanged, match=r"file\.bin"):
        files.open_file(str(path), identity)
    assert descriptors() == before
