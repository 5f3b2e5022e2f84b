"""Tests of the memory that reads come in: it belongs to nobody else, and needs neither its file nor the storage."""

from __future__ import annotations

import copy
import io
import os
import pickle
from pathlib import Path

import pytest
import torch

from monai_gds.storage import ALIGNMENT, Reads, Storage
from monai_gds.testing.base import OverABackend
from monai_gds.testing.tools import assert_bytes, assert_each, assert_file, content, descriptors

#: Bytes that a saved tensor may take beyond its own: a page for alignment, and torch's framing.
_OVERHEAD = ALIGNMENT + (4 << 10)

_how = pytest.mark.parametrize("how", ["load", "map"])


class GivesMemoryAway(OverABackend):
    """What a backend promises about the tensors that it loads and maps."""

    @_how
    def test_a_loaded_tensor_owns_its_storage(self, storage: Storage, blob: Path, how: str) -> None:
        for nbytes in (1, 100, 4096, 65_536, 1 << 20):
            kept, *_ = self.ended(getattr(storage, how)(Reads.of(str(blob), [(4096, nbytes), (8192, 4 << 20)]))).wait()
            assert kept.untyped_storage().nbytes() <= nbytes + ALIGNMENT
            assert len(pickle.dumps(kept)) <= nbytes + _OVERHEAD
            file = io.BytesIO()
            torch.save(kept, file)
            assert file.tell() <= nbytes + _OVERHEAD
            assert copy.deepcopy(kept).untyped_storage().nbytes() <= nbytes + ALIGNMENT

    @_how
    def test_writing_into_a_loaded_tensor_changes_nothing_else(self, storage: Storage, folder: Path, how: str) -> None:
        for nbytes in (100, 65_536, 4 << 20):
            data = content(nbytes)
            path = self.make(folder, data, f"{nbytes}.bin")
            first, second = self.ended(getattr(storage, how)(Reads.of(str(path), [(0, nbytes), (0, nbytes)]))).wait()
            first.zero_()
            assert_bytes(first, bytes(nbytes))
            assert_bytes(second, data)
            assert_file(path, data)
            self.assert_gives(storage, path, data, (0, nbytes), how=how)

    @_how
    def test_a_loaded_tensor_outlives_its_file_and_its_storage(self, storage: Storage, folder: Path, how: str) -> None:
        data = content(4 << 20)
        path = self.make(folder, data)
        tensors = self.ended(getattr(storage, how)(Reads.of(str(path), [(0, 4 << 20), (4096, 10)]))).wait()
        os.replace(self.make(folder, content(4 << 20, seed=1), "new.bin"), path)
        path.unlink()
        storage.close()
        assert_each(tensors, [data, data[4096:4106]])

    @_how
    @pytest.mark.usefixtures("stable_descriptors")
    def test_two_thousand_loaded_tensors_keep_no_descriptor(
        self, storage: Storage, blob: Path, data: bytes, how: str
    ) -> None:
        give = getattr(storage, how)
        give(Reads.of(str(blob), [(0, 65_536)])).wait()  # what the backend opens for itself is open
        before = descriptors()
        held = [give(Reads.of(str(blob), [(4096 * (i % 1000), 65_536)])).wait()[0] for i in range(2000)]
        assert descriptors() <= before
        for i in (0, 1, 999, 1500, 1999):
            assert_bytes(held[i], data[4096 * (i % 1000) :][:65_536])
