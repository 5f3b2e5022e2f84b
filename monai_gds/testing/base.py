"""What all tests of a backend start from: the fixtures that a subclass provides or overrides, and ways to read."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from monai_gds.storage import ALIGNMENT, Pending, Reads, Storage
from monai_gds.storage.backend import Backend
from monai_gds.testing.tools import assert_each, blob_content, bytes_of, content, descriptors


class OverABackend:
    """Fixtures and helpers of the tests of a backend. Holds no test."""

    #: Seconds after which reads that have not ended count as hanging.
    patience: ClassVar[float] = 60

    @pytest.fixture
    def backend(self) -> Backend | Iterator[Backend]:
        """The backend under test, returned or yielded."""
        raise NotImplementedError("a subclass provides the backend")

    @pytest.fixture
    def storage(self, backend: Backend) -> Iterator[Storage]:
        """The storage under test."""
        storage = Storage(backend)
        yield storage
        storage.close()

    @pytest.fixture(scope="class")
    @classmethod
    def shared_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        """A folder on a file system that the backend reads from."""
        path = tmp_path_factory.mktemp("storage")
        yield path
        shutil.rmtree(path, ignore_errors=True)

    @pytest.fixture
    def folder(self, shared_folder: Path) -> Iterator[Path]:
        """An empty folder on that file system, for one test."""
        path = Path(tempfile.mkdtemp(dir=shared_folder))
        yield path
        shutil.rmtree(path, ignore_errors=True)

    @pytest.fixture(scope="class")
    @classmethod
    def data(cls) -> bytes:
        """The content of ``blob``."""
        return blob_content()

    @pytest.fixture(scope="class")
    @classmethod
    def blob(cls, shared_folder: Path, data: bytes) -> Path:
        """A file of BLOB_BYTES bytes, which tests do not change."""
        path = shared_folder / "blob.bin"
        path.write_bytes(data)
        return path

    @pytest.fixture
    def stable_descriptors(self, storage: Storage, blob: Path) -> Iterator[None]:
        """Fails a test that leaves more descriptors open than there were, once the backend has warmed up."""
        self.get(storage, blob, (0, 4 << 20), (5, 10))
        self.fill(storage, *((blob, 0, self.dest(storage, 10)) for _ in range(2))).wait()
        storage.close()
        before = descriptors()
        yield
        storage.close()  # its threads may hold some
        assert descriptors() <= before

    def make(self, folder: Path, data: bytes, name: str = "file.bin") -> Path:
        """A new file with these bytes."""
        path = folder / name
        path.write_bytes(data)
        return path

    def files(self, folder: Path, sizes: Sequence[int]) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Files of these sizes; their paths, sizes, and starts a page apart or more."""
        paths = [str(self.make(folder, content(size, i), f"many-{i}.bin")) for i, size in enumerate(sizes)]
        lengths = np.asarray(sizes, dtype=np.int64)
        pitch = -(-lengths // ALIGNMENT) * ALIGNMENT
        return paths, lengths, np.cumsum(pitch) - pitch

    def dest(self, storage: Storage, nbytes: int, fill: int = 0xA5) -> torch.Tensor:
        """A new destination on the storage's device."""
        return torch.full((nbytes,), fill, dtype=torch.uint8, device=storage.device)

    def ended(self, pending: Pending) -> Pending:
        """Waits until a Pending is over, and returns it. Fails the test if that takes too long."""
        deadline = time.monotonic() + self.patience
        while not pending.done:
            assert time.monotonic() < deadline, "the backend has not called Pending.finish"
            time.sleep(0.0002)
        return pending

    def fill(self, storage: Storage, *parts: tuple[str | Path, int, torch.Tensor]) -> Pending:
        """Fills each destination from an offset of a file, in one call, and waits until that is over."""
        reads = Reads.join([Reads.of(str(path), [(offset, d.numel())]) for path, offset, d in parts])
        return self.ended(storage.fill(reads, [dest for *_, dest in parts]))

    def get(self, storage: Storage, path: str | Path, *ranges: tuple[int, int]) -> list[bytes]:
        """The bytes of some ranges of a file."""
        return [bytes_of(t) for t in self.ended(storage.load(Reads.of(str(path), ranges))).wait()]

    def assert_gives(
        self, storage: Storage, path: str | Path, data: bytes, *ranges: tuple[int, int], how: str = "load"
    ) -> None:
        """Loads or maps (``how``) ranges of a file that holds ``data``, and compares."""
        tensors = self.ended(getattr(storage, how)(Reads.of(str(path), ranges))).wait()
        assert_each(tensors, [data[offset : offset + nbytes] for offset, nbytes in ranges])

    def in_each_way(self, storage: Storage, reads: Reads) -> Iterator[Pending]:
        """The same reads loaded, mapped, and filled into destinations; each is over."""
        yield self.ended(storage.load(reads))
        yield self.ended(storage.map(reads))
        yield self.ended(storage.fill(reads, [self.dest(storage, nbytes) for nbytes in reads.sizes.tolist()]))

    def assert_at_rest(self, dests: Sequence[torch.Tensor]) -> None:
        """Fails if a destination is still being written to."""
        for dest in dests:
            dest.fill_(0x77)
        time.sleep(0.05)
        assert all(bool((d == 0x77).all()) for d in dests), "a destination was written to after the reads were over"
