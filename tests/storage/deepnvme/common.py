"""What the tests of both DeepNVMe backends share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from monai_gds.errors import StorageError
from monai_gds.storage import Reads, Storage, available_backends, open_storage
from monai_gds.storage.deepnvme import build, gds

__all__ = ["fill", "need_cufile", "need_deepnvme", "opened", "over_host_memory"]


def need_deepnvme() -> None:
    """Skips where DeepSpeed or what compiles it is not installed."""
    found = available_backends("cpu")["deepnvme"]
    if not found:
        pytest.skip(f"{found.reason}; {found.remedy}")


def need_cufile(folder: Path) -> None:
    """Skips where gds_handle is missing, or where cuFile refuses the file system of ``folder``."""
    found = available_backends("cuda")["deepnvme-gds"]
    if not found:
        pytest.skip(f"{found.reason}; {found.remedy}")
    path = folder / "does-cufile-take-this.bin"
    path.write_bytes(bytes(1 << 20))
    with opened("deepnvme-gds", "cuda", threads=1) as storage:
        try:
            storage.load(Reads.of(str(path), [(0, 1 << 20)])).wait()
        except StorageError as e:
            pytest.skip(f"cuFile refuses the files of this machine: {e}")


@contextmanager
def opened(name: str, device: str, **options: Any) -> Iterator[Storage]:
    """A storage that is closed at the end."""
    storage = open_storage(name, device, **options)
    try:
        yield storage
    finally:
        storage.close()


@contextmanager
def over_host_memory() -> Iterator[Storage]:
    """deepnvme-gds over host memory, with a helper process that has no gds_handle but behaves like it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gds._Helper, "module", "tests.storage.deepnvme.fake_gds_helper")
        patch.setattr(build, "build", lambda operator: None)
        storage = Storage(gds.DeepNvmeGdsBackend(torch.device("cpu"), threads=3))
        yield storage
        storage.close()


def fill(storage: Storage, path: Path | str, dest: torch.Tensor) -> torch.Tensor:
    """Fills a destination from the beginning of a file, and returns it."""
    return storage.fill(Reads.of(str(path), [(0, dest.numel())]), [dest]).wait()[0]
