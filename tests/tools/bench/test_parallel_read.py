"""Threads that read a file, past the page cache and through it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from monai_gds.errors import StorageError
from tools.bench.parallel_read import page_aligned, read_parallel


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4096, 100_000, (3 << 20) + 5])
def test_every_byte_arrives_in_its_place(tmp_path: Path, direct: bool, nbytes: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    path = tmp_path / "file"
    path.write_bytes(content)
    memory = page_aligned(nbytes)
    read_parallel(path, nbytes, memoryview(memory), direct=direct, block=1 << 20, threads=3)
    assert memory[:nbytes] == content


def test_small_memory_is_filled_repeatedly(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 4096 + b"b" * 4096)
    memory = page_aligned(4096)
    read_parallel(path, 8192, memoryview(memory), block=4096, threads=1)
    assert memory[:] == b"b" * 4096


def test_a_file_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with pytest.raises(StorageError, match="file became shorter"):
        read_parallel(path, 16384, memoryview(page_aligned(16384)))
