"""The classes that a backend's tests derive from: :class:`BackendContract`, and :class:`WriteContract` for writing."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from monai_gds.storage import Storage
from monai_gds.storage.backend import Backend
from monai_gds.testing.disks import small_disk
from monai_gds.testing.errors import FailsFileByFile
from monai_gds.testing.life import LivesAmongThreads
from monai_gds.testing.memory import GivesMemoryAway
from monai_gds.testing.reads import ReadsRightBytes
from monai_gds.testing.tools import (
    LENGTHS,
    assert_file,
    bytes_of,
    content,
    descriptors,
    property_test,
    without_permission,
)


class BackendContract(ReadsRightBytes, GivesMemoryAway, FailsFileByFile, LivesAmongThreads):
    """What a backend promises about bytes, errors, memory and threads, for any target device.

    A backend on one of the two base classes can break each of these by itself. A subclass provides the ``backend``
    fixture; see :mod:`monai_gds.testing`.
    """

    def test_describes_itself(self, storage: Storage) -> None:
        described = storage.describe()
        assert described["backend"] == storage.name
        assert described["device"] == str(storage.device)
        backend = type(storage._backend)
        assert backend.probe(storage.device).reason
        assert backend.write is Backend.write or isinstance(self, WriteContract), (
            f"{backend.__name__} has its own write: derive from WriteContract as well"
        )


class WriteContract(BackendContract):
    """Further tests for a backend that overrides :meth:`Backend.write`."""

    @pytest.mark.parametrize("durable", [False, True])
    @pytest.mark.usefixtures("stable_descriptors")
    def test_writes_every_kind_of_buffer(self, storage: Storage, folder: Path, durable: bool) -> None:
        big = torch.from_numpy(np.frombuffer(content(9 << 20), dtype=np.uint8).copy())
        floats = np.arange(1000, dtype=np.float32)
        parts: list[bytes | bytearray | memoryview | torch.Tensor] = [
            b"head", bytearray(content(4095)), memoryview(content(513))[13:], floats.data, b"",
            big[:1], big[1:4097], big, big[:0], torch.zeros(0, dtype=torch.uint8), b"tail",
        ]  # fmt: skip
        path = folder / "file.bin"
        storage.write(str(path), parts, durable=durable)
        expected = b"".join(bytes_of(p) if isinstance(p, torch.Tensor) else bytes(p) for p in parts)
        assert_file(path, expected)
        self.assert_gives(storage, path, expected, (0, len(expected)))

    def test_a_file_is_created_with_its_permissions(self, storage: Storage, folder: Path) -> None:
        storage.write(str(folder / "file.bin"), [content(5000), torch.ones(3 << 20, dtype=torch.uint8)], mode=0o600)
        assert (folder / "file.bin").stat().st_mode & 0o777 == 0o600

    def test_only_tensors_of_bytes_are_written(self, storage: Storage, folder: Path) -> None:
        plain = torch.zeros(3 << 20, dtype=torch.uint8, device=storage.device)
        for bad in (plain.float(), plain.view(2, -1), plain[::2]):
            with pytest.raises(ValueError, match="only 1-D contiguous uint8 tensors are written"):
                storage.write(str(folder / "file.bin"), [b"head", bad])
        assert not (folder / "file.bin").exists()

    @property_test
    @given(sizes=st.lists(st.one_of(st.sampled_from(LENGTHS[:-1]), st.integers(0, 20_000)), max_size=8))
    @example(sizes=[4096])
    def test_reads_back_what_it_wrote(self, storage: Storage, folder: Path, sizes: list[int]) -> None:
        parts = [content(n, seed) for seed, n in enumerate(sizes)]
        tensors = [torch.frombuffer(bytearray(p), dtype=torch.uint8).to(storage.device) if p else b"" for p in parts]
        path = folder / "file.bin"
        path.unlink(missing_ok=True)
        storage.write(str(path), [t if i % 2 else p for i, (p, t) in enumerate(zip(parts, tensors, strict=True))])
        assert_file(path, b"".join(parts))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.assert_gives(storage, path, b"".join(parts), *zip(starts, sizes, strict=True))

    def test_writes_more_buffers_than_one_system_call_takes(self, storage: Storage, folder: Path) -> None:
        parts = [content(1 + i % 7, i) for i in range(3000)]
        path = folder / "file.bin"
        storage.write(str(path), parts)
        assert_file(path, b"".join(parts))

    def test_writes_an_empty_file(self, storage: Storage, folder: Path) -> None:
        empty: list[list[bytes | torch.Tensor]] = [[], [b""], [b"", torch.zeros(0, dtype=torch.uint8)]]
        for i, buffers in enumerate(empty):
            path = folder / f"{i}.bin"
            storage.write(str(path), buffers)
            assert_file(path, b"")
            self.assert_gives(storage, path, b"", (0, 0))

    @pytest.mark.usefixtures("stable_descriptors")
    def test_never_writes_over_a_file(self, storage: Storage, folder: Path) -> None:
        path = self.make(folder, b"precious")
        for buffers in ([b"new"], [torch.ones(5000, dtype=torch.uint8, device=storage.device)], []):
            with pytest.raises(FileExistsError, match=r"file\.bin"):
                storage.write(str(path), buffers)
        assert_file(path, b"precious")

    @pytest.mark.usefixtures("stable_descriptors")
    def test_an_error_names_a_directory_that_is_missing_or_read_only(self, storage: Storage, folder: Path) -> None:
        for buffer in (b"new", self.dest(storage, 5000)):
            with pytest.raises(FileNotFoundError, match="missing"):
                storage.write(str(folder / "missing" / "file.bin"), [buffer])
            with without_permission(folder), pytest.raises(PermissionError, match=r"file\.bin"):
                storage.write(str(folder / "file.bin"), [buffer])

    def test_a_full_disk_is_an_error_that_breaks_nothing_else(self, storage: Storage, folder: Path) -> None:
        with small_disk(folder) as disk:
            storage.write(str(disk / "first.bin"), [content(1 << 20)])
            before = descriptors()
            for buffer in (content(32 << 20), self.dest(storage, 32 << 20)):
                with pytest.raises(OSError, match=r"big\.bin") as caught:
                    storage.write(str(disk / "big.bin"), [b"head", buffer])
                assert caught.value.errno == errno.ENOSPC
                (disk / "big.bin").unlink(missing_ok=True)
            del caught
            assert descriptors() <= before
            storage.write(str(disk / "second.bin"), [self.dest(storage, 1 << 20)])
            self.assert_gives(storage, disk / "second.bin", b"\xa5" * (1 << 20), (0, 1 << 20))
            self.assert_gives(storage, disk / "first.bin", content(1 << 20), (0, 1 << 20))
