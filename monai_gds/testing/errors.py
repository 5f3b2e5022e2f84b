"""Tests of errors: each file fails by itself, with its name, and leaves nothing open and nothing under way."""

from __future__ import annotations

import errno
import os
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from monai_gds.errors import FileChanged, StorageError
from monai_gds.storage import FileId, Reads, Storage
from monai_gds.storage.files import Expected
from monai_gds.testing.base import OverABackend
from monai_gds.testing.disks import broken_disk
from monai_gds.testing.tools import BLOB_BYTES, assert_bytes, assert_each, content, descriptors


class FailsFileByFile(OverABackend):
    """What a backend promises about files that cannot be read."""

    @pytest.mark.usefixtures("stable_descriptors")
    def test_a_missing_file_is_named(self, storage: Storage, folder: Path) -> None:
        missing = str(folder / "missing.bin")
        for nbytes in (0, 10, 5 << 20):
            for pending in self.in_each_way(storage, Reads.of(missing, [(0, nbytes)])):
                with pytest.raises(FileNotFoundError) as caught:
                    pending.wait()
                assert missing in str(caught.value)

    @pytest.mark.usefixtures("stable_descriptors")
    def test_reading_past_the_end_is_an_error(self, storage: Storage, folder: Path, blob: Path, data: bytes) -> None:
        for offset, nbytes in (
            (0, BLOB_BYTES + 1), (BLOB_BYTES - 10, 11), (BLOB_BYTES - 10, 700_000), (BLOB_BYTES, 1),
            (BLOB_BYTES + 1, 1), (BLOB_BYTES + (1 << 30), 4096), (1 << 50, 9 << 20), (1 << 62, 1),
        ):  # fmt: skip
            for pending in self.in_each_way(storage, Reads.of(str(blob), [(0, 10), (offset, nbytes)])):
                with pytest.raises(StorageError) as caught:
                    pending.wait()
                assert str(blob) in str(caught.value)
            self.assert_gives(storage, blob, data, (3, 5))
        path = self.make(folder, data[: 3 << 20])
        for keep in ((3 << 20) - 1, 70_000, 4097, 4096, 4095, 1, 0):
            os.truncate(path, keep)
            for pending in self.in_each_way(storage, Reads.of(str(path), [(0, 3 << 20)])):
                with pytest.raises(StorageError, match=r"file\.bin"):
                    pending.wait()
            self.assert_gives(storage, path, data, (0, keep))

    def test_an_unreadable_disk_is_an_error(self, storage: Storage, folder: Path, blob: Path) -> None:
        self.get(storage, blob, (0, 4 << 20))
        paths, _, _ = self.files(folder, [5000] * 10)
        storage.close()  # its threads may hold some
        with broken_disk(folder, content(2 << 20)) as path:
            opened = []
            for _ in range(3):  # a leak grows each time; what a backend opens once, for errors too, does not
                for nbytes in (4096, 1 << 20):
                    reads = Reads.of(str(path), [(0, nbytes)])
                    for pending in (storage.load(reads), storage.fill(reads, [self.dest(storage, nbytes)])):
                        with pytest.raises(OSError, match=r"record\.bin") as caught:
                            self.ended(pending).wait()
                        assert caught.value.errno == errno.EIO
                together = Reads.join([Reads.of(p, [(0, 5000)]) for p in [*paths, str(path)]])
                pending = self.ended(storage.load(together))
                assert list(pending.errors) == [10]
                assert_each(pending.tensors[:10], [content(5000, i) for i in range(10)])
                with pytest.raises(OSError, match=r"record\.bin"):
                    storage.head(str(path), 4096)
                del caught, pending
                storage.close()
                opened.append(descriptors())
            assert any(later <= earlier for earlier, later in pairwise(opened))

    @pytest.mark.usefixtures("stable_descriptors")
    def test_directories_and_fifos_are_refused_without_waiting(self, storage: Storage, folder: Path) -> None:
        fifo = folder / "file.bin"
        os.mkfifo(fifo)
        for path in (folder, fifo):
            for pending in self.in_each_way(storage, Reads.of(str(path), [(0, 10)])):
                with pytest.raises(OSError, match=str(path)):
                    pending.wait()
        with pytest.raises(OSError, match=str(fifo)):
            storage.head(str(fifo), 10)

    @pytest.mark.usefixtures("stable_descriptors")
    def test_a_replaced_file_is_an_error(self, storage: Storage, folder: Path) -> None:
        data = [content(2 << 20, seed) for seed in range(2)]
        path = str(self.make(folder, data[0]))
        before = FileId.of(path)
        sizes = (0, 10, 100_000, 2 << 20)
        for nbytes in sizes:
            for give in (storage.load, storage.map):
                assert_bytes(self.ended(give(Reads.of(path, [(0, nbytes)], before))).wait()[0], data[0][:nbytes])
        os.replace(self.make(folder, data[1], "new.bin"), path)
        for nbytes in sizes:
            reads, indifferent = Reads.of(path, [(0, nbytes)], before), Reads.of(path, [(0, nbytes)])
            for pending in (storage.load(reads), storage.map(reads), storage.load(Reads.join([indifferent, reads]))):
                with pytest.raises(FileChanged, match=r"file\.bin"):
                    self.ended(pending).wait()
            assert_bytes(self.ended(storage.load(indifferent)).wait()[0], data[1][:nbytes])

    @pytest.mark.parametrize("by", [1, -1, 5000])
    def test_whole_files_whose_size_has_changed_are_errors(self, storage: Storage, folder: Path, by: int) -> None:
        """Also where there is no room for another byte after a file."""
        paths, sizes, _ = self.files(folder, [4096, 5000, 100_000, *[3000] * 147])
        wrong = (0, 77, 149)
        for number in wrong:
            whole = content(int(sizes[number]), number)
            with open(paths[number], "wb") as f:
                f.write((whole + bytes(5000))[: len(whole) + by])
                f.flush()
                os.fsync(f.fileno())
        for apart in (1, 0):
            starts = np.cumsum(sizes + apart) - sizes - apart
            total = int(starts[-1] + sizes[-1])
            reads = Reads.of_files(paths, sizes, starts, total, expected=sizes.tolist())
            into = [self.dest(storage, total)]
            errors = self.ended(storage.fill(reads, into)).errors
            assert sorted(errors) == list(wrong)
            for number, error in errors.items():
                assert isinstance(error, FileChanged)
                assert f"many-{number}.bin has {sizes[number] + by} bytes" in str(error)
            for i, part in enumerate(reads.parts(into)):
                if i not in wrong:
                    assert_bytes(part, content(part.numel(), i))

    @pytest.mark.parametrize("nbytes", [5000, 1_100_000])
    @pytest.mark.usefixtures("stable_descriptors")
    def test_each_file_fails_alone_and_the_others_are_read(self, storage: Storage, folder: Path, nbytes: int) -> None:
        paths, sizes, starts = self.files(folder, [nbytes] * 40)
        expected: list[Expected] = [(None, FileId.of(p), nbytes)[i % 3] for i, p in enumerate(paths)]
        wrong = self.spoil(paths)
        ranges = [[(0, nbytes // 2), (nbytes // 2, nbytes - nbytes // 2)]] * 40
        apart = Reads.join([Reads.of(*each) for each in zip(paths, ranges, expected, strict=True)])
        together = Reads.of_files(paths, sizes, starts, int(starts[-1]) + nbytes, expected=expected)
        into = [self.dest(storage, int(together.sizes[0]))]
        for reads, pending in ((apart, storage.load(apart)), (together, storage.fill(together, into))):
            errors = self.ended(pending).errors
            assert sorted(errors) == sorted(wrong)
            for file, kind in wrong.items():
                assert isinstance(errors[file], kind), repr(errors[file])
                assert paths[file].partition("\0")[0] in str(errors[file])
                again = pickle.loads(pickle.dumps(errors[file]))  # on its way from a worker
                assert (type(again), str(again)) == (type(errors[file]), str(errors[file]))
            parts = reads.parts(into) if reads is together else pending.tensors
            for file, (offset, n), part in zip(reads.file.tolist(), reads.ranges, parts, strict=True):
                if file not in wrong:
                    assert_bytes(part, content(nbytes, file)[offset : offset + n], f"file {file}")
            with pytest.raises(wrong[min(wrong)]) as caught:
                pending.wait()
            assert caught.value is errors[min(wrong)]
            del caught
            errors = {}

    def spoil(self, paths: list[str]) -> dict[int, type[Exception]]:
        """Makes some files unreadable, in every possible way. Returns which, and the error that each must give."""
        os.unlink(paths[3])
        os.truncate(paths[6], 3000)
        os.unlink(paths[9])
        os.mkdir(paths[9])
        os.unlink(paths[12])
        os.mkfifo(paths[12])
        os.replace(self.make(Path(paths[13]).parent, content(5000, seed=99)), paths[13])
        os.utime(paths[16], ns=(0, 0))
        os.truncate(paths[17], 4999)
        paths[21] += "\0"
        return {
            3: FileNotFoundError, 6: StorageError, 9: OSError, 12: OSError, 13: FileChanged, 16: FileChanged,
            17: FileChanged, 21: OSError,
        }  # fmt: skip

    @pytest.mark.usefixtures("stable_descriptors")
    def test_nothing_is_written_after_the_end(self, storage: Storage, folder: Path, blob: Path, data: bytes) -> None:
        """One file fails at once, the first, the last or any, or the last piece of it, while others are being read."""
        paths = [self.make(folder, data[:-short], f"{short}.bin") for short in (1, 100)]
        for _ in range(2):
            dests = [self.dest(storage, len(data)) for _ in range(3)]
            pending = self.fill(storage, *zip([*paths, blob], [0, 0, 0], dests, strict=True))
            assert sorted(pending.errors) == [0, 1]
            assert_bytes(dests[2], data)
            self.assert_at_rest(dests)
        for bad, nbytes in ((0, 1000), (12, 300_000), (24, 1_100_000)):
            dests = [self.dest(storage, nbytes if i % 3 else 1000) for i in range(25)]
            among = [folder / "missing.bin" if i == bad else blob for i in range(25)]
            pending = self.fill(storage, *zip(among, [0] * 25, dests, strict=True))
            assert list(pending.errors) == [bad]
            good = [dest for i, dest in enumerate(dests) if i != bad]
            assert_each(good, [data[: dest.numel()] for dest in good])
            self.assert_at_rest(dests)
