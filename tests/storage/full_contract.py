"""Tests of what the two base classes promise on behalf of every backend on them, and a backend without them by itself.

A backend of another package is on one of these classes, and tests only what it can get wrong: :mod:`monai_gds.testing`.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from monai_gds import limits
from monai_gds.errors import StorageError
from monai_gds.storage import ALIGNMENT, FileId, Reads, Storage, staging
from monai_gds.testing import BackendContract, CudaBackendContract
from monai_gds.testing.cuda import LONG, Scenario, _load, _sleep, _stream
from monai_gds.testing.tools import (
    BLOB_BYTES,
    assert_bytes,
    assert_each,
    assert_file,
    content,
    descriptors,
    meanwhile,
)
from tests.machines import few_descriptors
from tests.storage import streams

__all__ = ["CudaFullContract", "FullContract"]


class FullContract(BackendContract):
    """What a backend that implements ``start`` itself promises in addition, and the base classes for all others."""

    #: Reads of a file that is cut and grown meanwhile. Fewer where each error takes seconds.
    reads_while_shrinking: ClassVar[int] = 200

    # Steps after the reads.

    def test_a_step_sees_bytes_and_errors_once_and_what_it_gives_is_handed_out(
        self, storage: Storage, folder: Path
    ) -> None:
        for nbytes in (5000, 3 << 20):
            paths, _, _ = self.files(folder, [nbytes] * 10)
            os.unlink(paths[4])
            calls: list[list[int]] = []

            def step(tensors: list[torch.Tensor], errors: Mapping[int, Exception]) -> list[torch.Tensor]:
                calls.append(sorted(errors))  # noqa: B023
                return [t ^ 1 for i, t in enumerate(tensors) if i not in errors]

            pending = storage.load(Reads.join([Reads.of(path, [(0, nbytes)]) for path in paths]))
            early = pending.then(step)
            late = self.ended(pending).then(step)
            for after in (early, late):
                assert list(self.ended(after).errors) == [4]
                with pytest.raises(FileNotFoundError, match="many-4"):
                    after.wait()
                whole = [i for i in range(10) if i != 4]
                for i, tensor in zip(whole, after.tensors, strict=True):
                    assert_bytes(tensor ^ 1, content(nbytes, i))
            assert calls == [[4], [4]]
            assert len(pending.tensors) == 10

    def test_a_step_that_raises_fails_what_it_belongs_to_and_nothing_else(
        self, storage: Storage, blob: Path, data: bytes
    ) -> None:
        def step(tensors: list[torch.Tensor], errors: Mapping[int, Exception]) -> list[torch.Tensor]:
            raise ArithmeticError("not a tile")

        for nbytes in (5000, 3 << 20):
            pending = storage.load(Reads.of(str(blob), [(5, nbytes)]))
            early = pending.then(step)
            late = self.ended(pending).then(step)
            last = early.then(lambda tensors, errors: tensors)
            nothing = storage.load(Reads.join([])).then(step)
            for after in (early, late, last, nothing):
                with pytest.raises(ArithmeticError, match="not a tile"):
                    self.ended(after).wait()
            assert_bytes(pending.wait()[0], data[5 : 5 + nbytes])

    # Many at once.

    def test_wait_gives_the_destinations_in_order_again_and_to_every_thread(
        self, storage: Storage, blob: Path, data: bytes
    ) -> None:
        for _ in range(5):
            dests = [self.dest(storage, n) for n in (9 << 20, 10, 700_001)]
            pending = storage.fill(Reads.of(str(blob), [(i, d.numel()) for i, d in enumerate(dests)]), dests)
            with ThreadPoolExecutor(8) as pool:
                waits = [pool.submit(pending.wait) for _ in range(8)]
            for tensors in [pending.wait(), *(wait.result() for wait in waits)]:
                assert [t.data_ptr() for t in tensors] == [d.data_ptr() for d in dests]
            assert_each(dests, [data[i : i + d.numel()] for i, d in enumerate(dests)])

    def test_many_in_flight(self, storage: Storage, blob: Path, data: bytes) -> None:
        offsets = range(0, 40 * 100_003, 100_003)
        pendings = [storage.load(Reads.of(str(blob), [(o, 1 << 20), (o, 100)])) for o in offsets]
        for offset, pending in reversed(list(zip(offsets, pendings, strict=True))):
            big, small = pending.wait()
            assert_bytes(big, data[offset : offset + (1 << 20)])
            assert_bytes(small, data[offset : offset + 100])

    @pytest.mark.usefixtures("stable_descriptors")
    def test_what_nobody_waits_for(self, storage: Storage, blob: Path, data: bytes) -> None:
        for _ in range(10):
            storage.load(Reads.of(str(blob), [(0, 9 << 20), (1, 600_000)]))
            storage.load(Reads.of(str(blob) + "missing", [(0, 1 << 20)]))
        self.assert_gives(storage, blob, data, (5, 9 << 20))
        storage.close()

    def test_more_files_than_descriptors(self, storage: Storage, folder: Path, blob: Path) -> None:
        self.get(storage, blob, (0, 4 << 20))  # what the backend opens for itself is open
        paths, _, _ = self.files(folder, [100] * 150)
        for nbytes in (100, (1 << 20) + 1):
            for path in paths:
                os.truncate(path, nbytes)
            sizes = np.full(150, nbytes)
            apart = Reads.join([Reads.of(path, [(0, nbytes)]) for path in paths])
            together = Reads.of_files(paths, sizes, np.cumsum(sizes) - nbytes, 150 * nbytes)
            for reads in (apart, together):
                dests = [self.dest(storage, n) for n in reads.sizes.tolist()]
                with few_descriptors(75):
                    self.ended(storage.fill(reads, dests)).wait()
                for seed, part in enumerate(reads.parts(dests)):
                    assert_bytes(part[:100], content(100, seed))
                    assert not part[100:].any()
        storage.close()

    def test_loads_many_files_each_with_its_ranges(self, storage: Storage, folder: Path) -> None:
        """In order, in no order, and with empty ones."""
        sizes = [0, 1, 511, 4096, 4097, 10_000, *[65_536 + 4096] * 150, 300_000, (1 << 20) - 1, 77]
        paths, _, _ = self.files(folder, sizes)
        empty: list[Callable[[int], list[list[tuple[int, int]]]]] = [
            lambda size: [], lambda size: [[], [(size, 0)]], lambda size: [[(size, 0), (0, size)]],
        ]  # fmt: skip
        for more in empty:
            asked = []
            for i, (path, size) in enumerate(zip(paths, sizes, strict=True)):
                parts = [[(0, size)], [(size // 3, size // 3), (size - 1, 1)]] if size > 3 else [[]]
                parts += more(size)
                asked.append(Reads.of(path, parts[i % len(parts)], FileId.of(path) if i % 2 else None))
            reads = Reads.join(asked)
            tensors = self.ended(storage.load(reads)).wait()
            for file, (at, n), tensor in zip(reads.file.tolist(), reads.ranges, tensors, strict=True):
                assert tensor.device == storage.device
                assert_bytes(tensor, content(sizes[file], file)[at : at + n], f"file {file}")
                held = tensor.untyped_storage().nbytes()
                assert held <= n + ALIGNMENT  # pytest would print a storage byte for byte

    # Errors.

    def test_failures_leave_nothing_behind(self, storage: Storage, folder: Path, blob: Path, data: bytes) -> None:
        """No descriptor and no thread, also while a program keeps the errors, to report them at the end."""
        self.get(storage, blob, (0, 4 << 20), (5, 10))
        storage.close()
        before, threads = descriptors(), threading.active_count()
        missing = str(folder / "missing.bin")
        short = self.make(folder, content(9 << 20))
        errors: list[Exception] = []
        for i in range(100):
            bad = (
                (blob, BLOB_BYTES - 5, self.dest(storage, 100)) if i % 2 else (missing, 0, self.dest(storage, 700_000))
            )
            errors += self.fill(storage, (blob, i, self.dest(storage, 100)), bad).errors.values()
            errors += self.ended(storage.load(Reads.of(missing, [(0, 100)]))).errors.values()
            errors += self.ended(storage.load(Reads.of(str(blob), [(BLOB_BYTES, 100_000)]))).errors.values()
        errors += self.fill(storage, *((p, 0, self.dest(storage, 10 << 20)) for p in (missing, short))).errors.values()
        assert len(errors) == 302
        assert all(isinstance(e, OSError) for e in errors)
        self.assert_gives(storage, blob, data, (3, 5 << 20))
        storage.close()
        time.sleep(0.01)
        assert descriptors() <= before
        assert threading.active_count() <= threads

    @pytest.mark.usefixtures("stable_descriptors")
    def test_a_file_that_shrinks_and_grows_meanwhile_gives_a_tensor_or_an_error(
        self, storage: Storage, folder: Path
    ) -> None:
        path = self.make(folder, bytes(2 << 20))
        sizes = itertools.cycle([5000, 2 << 20])
        with meanwhile(lambda: os.truncate(path, next(sizes))):
            for i in range(self.reads_while_shrinking):
                reads = Reads.of(str(path), [(0, 2 << 20), (4096, 10_000)])
                pending = self.ended(storage.map(reads) if i % 2 else storage.load(reads))
                assert all(isinstance(error, StorageError) for error in pending.errors.values())


@pytest.mark.gpu
class CudaFullContract(CudaBackendContract, FullContract):
    """What a backend that implements ``start`` itself promises in addition for a CUDA target."""

    @pytest.mark.parametrize(
        "scenario",
        [streams.handed_over, streams.handed_over_to_every_stream, streams.dropped_destination_is_not_reused],
        ids=lambda scenario: scenario.__name__,
    )
    def test_memory_changes_hands_safely(
        self, storage: Storage, blob: Path, data: bytes, consumer: torch.cuda.Stream, scenario: Scenario
    ) -> None:
        assert scenario(storage, blob, data, consumer), scenario.__doc__

    def test_slow_consumers_of_many_files_keep_their_data(
        self, storage: Storage, folder: Path, consumer: torch.cuda.Stream
    ) -> None:
        paths, _, _ = self.files(folder, [20_000 + i for i in range(150)])
        assert streams.many_slow_consumers_keep_their_data(storage, paths, consumer)

    def test_a_step_runs_on_the_copy_stream_and_its_results_are_handed_over(
        self, storage: Storage, blob: Path, data: bytes, consumer: torch.cuda.Stream
    ) -> None:
        nbytes = 9 << 20
        copying = staging.copy_stream(storage.device)
        on: list[bool] = []

        def step(tensors: list[torch.Tensor], errors: Mapping[int, Exception]) -> list[torch.Tensor]:
            on.append(torch.cuda.current_stream(storage.device) == copying)
            _sleep(LONG)
            return [tensor ^ 1 for tensor in tensors]

        seen = []
        with torch.cuda.stream(consumer):
            for i in range(3):
                pending = storage.load(Reads.of(str(blob), [(i, nbytes)]))
                if i == 2:
                    self.ended(pending)
                (tensor,) = pending.then(step).wait()
                seen.append(tensor.clone())
                del tensor, pending
        torch.cuda.synchronize(storage.device)
        assert on == [True] * 3
        for i, t in enumerate(seen):
            assert_bytes(t ^ 1, data[i : i + nbytes])

    def test_loaded_on_one_stream_and_used_on_another(self, storage: Storage, blob: Path, data: bytes) -> None:
        streams = [_stream(storage) for _ in range(3)]
        pendings = []
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                pendings.append(storage.load(Reads.of(str(blob), [(i, 9 << 20)])))
        for i, (stream, pending) in enumerate(zip(reversed(streams), pendings, strict=True)):
            with torch.cuda.stream(stream):
                seen = pending.wait()[0].clone()
            stream.synchronize()
            assert_bytes(seen, data[i : i + (9 << 20)])

    def test_after_an_error_the_destinations_are_the_callers_again(
        self, storage: Storage, folder: Path, blob: Path, consumer: torch.cuda.Stream
    ) -> None:
        """Copies that were queued before the error was found arrive late."""
        with torch.cuda.stream(staging.copy_stream(storage.device)):
            _sleep(LONG)
        with torch.cuda.stream(consumer):
            dests = [self.dest(storage, 100_000) for _ in range(12)]
            missing = (folder / "missing.bin", 0, self.dest(storage, 10))
            assert list(self.fill(storage, *((blob, 0, d) for d in dests), missing).errors) == [12]
            for dest in dests:
                dest.fill_(0x77)
        torch.cuda.synchronize(storage.device)
        assert all(bool((d == 0x77).all()) for d in dests)

    def test_many_slow_consumers_in_threads(self, storage: Storage, blob: Path, data: bytes) -> None:
        nbytes = 3 << 20

        def consume(seed: int) -> None:
            stream = _stream(storage)
            seen = []
            with torch.cuda.device(storage.device), torch.cuda.stream(stream):
                for i in range(40):
                    offset = (seed * 40 + i) * 4096
                    (tensor,) = _load(storage, blob, (offset, nbytes))
                    _sleep(LONG // 200)
                    seen.append((offset, tensor.clone()))
                    del tensor
            stream.synchronize()
            for offset, t in seen:
                assert_bytes(t, data[offset : offset + nbytes])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(consume, range(8)))

    def test_writes_tensors_larger_than_a_staging_slot(self, storage: Storage, folder: Path) -> None:
        data = content(2 * limits.SLOT_BYTES + 4097)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(storage.device)
        storage.write(str(folder / "file.bin"), [b"head", tensor, tensor[5 : 2 << 20], b"tail"])
        assert_file(folder / "file.bin", b"head" + data + data[5 : 2 << 20] + b"tail")

    def test_writes_what_the_current_stream_is_still_computing(self, storage: Storage, folder: Path) -> None:
        with torch.cuda.stream(_stream(storage)):
            tensor = torch.zeros(5 << 20, dtype=torch.uint8, device=storage.device)
            _sleep(LONG)
            tensor.fill_(9)
            storage.write(str(folder / "file.bin"), [b"head", tensor[1:], tensor[:1]])
        assert_file(folder / "file.bin", b"head" + b"\x09" * (5 << 20))
