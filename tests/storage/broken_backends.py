"""Backends that break one promise each, and the contract over them: every test in this file is to fail.

``test_contract.py`` runs it. pytest does not collect it by itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds.storage import FileId, Pending, Reads
from monai_gds.storage.blocking import OpenFiles
from monai_gds.storage.files import Buffer, Expected, open_file
from monai_gds.testing import BackendContract, FullContract, WriteContract
from tests.storage.sample_blocking_backend import SampleBackend


class LiesAboutShortReads(SampleBackend):
    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        super()._read_into(handle, offset, dest)
        return dest.numel()


class ReadsTheHeadOnce(SampleBackend):
    def head(self, path: str, nbytes: int) -> tuple[bytes, FileId]:
        fd = os.open(path, os.O_RDONLY)
        try:
            return os.pread(fd, nbytes, 0), FileId.of(fd)
        finally:
            os.close(fd)


class SwallowsErrors(SampleBackend):
    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        try:
            return super()._read_into(handle, offset, dest)
        except OSError:
            return dest.numel()


class ReadsFromTheBlock(SampleBackend):
    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        return super()._read_into(handle, offset - offset % 512, dest)


class WritesBeyondTheEnd(SampleBackend):
    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        room = dest.untyped_storage().nbytes() - dest.storage_offset()
        whole = dest.as_strided((min(dest.numel() + 16, room),), (1,))
        return min(super()._read_into(handle, offset, whole), dest.numel())


class TakesAllMemoryForRoom(SampleBackend):
    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        columns = (reads.file, reads.offset, reads.nbytes, reads.dest, reads.start, reads.sizes)
        return super().start(Reads(reads.paths, reads.expected, *columns, np.full_like(reads.file, 1 << 30)), into)


class WritesAfterTheEnd(SampleBackend):
    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        def scribble() -> None:
            for _ in range(100):
                time.sleep(0.01)
                dest.numpy()[0] = 0

        threading.Thread(target=scribble, daemon=True).start()
        return super()._read_into(handle, offset, dest)


class FinishesEarly(SampleBackend):
    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        def late() -> None:
            time.sleep(0.05)
            SampleBackend.start(self, reads, into).wait()

        threading.Thread(target=late).start()
        return Pending.completed(list(into), self.device)


class NeverFinishesAfterAnError(SampleBackend):
    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        pending = super().start(reads, into)
        return Pending(list(into), self.device) if pending.errors else pending


class AcceptsAnyFile(SampleBackend):
    def _open(self, path: str, expected: Expected) -> Any:
        return super()._open(path, None)


class AcceptsAnySize(SampleBackend):
    def _open(self, path: str, expected: Expected) -> Any:
        return super()._open(path, expected if isinstance(expected, FileId) else None)


class FailsAllForOne(SampleBackend):
    def _read_group(self, group: Reads, into: Sequence[torch.Tensor], opened: OpenFiles, pending: Pending) -> None:
        super()._read_group(group, into, opened, pending)
        for file in group.file.tolist():
            if pending.failed(file):
                pending.fail_all(OSError(5, "something failed"))


class NamesNoFile(SampleBackend):
    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        pending, errors = Pending(list(into), self.device, len(reads.paths)), super().start(reads, into).errors
        for file, error in errors.items():
            pending.fail(file, type(error)(*error.args))
        pending.finish()
        return pending


class OpensNothingForNothing(SampleBackend):
    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        return super().start(reads[reads.nbytes > 0], into)


class KeepsFilesOpen(SampleBackend):
    def _close(self, handle: Any) -> None:
        os.dup(handle.fileno())
        super()._close(handle)


class KeepsWhatItRead(SampleBackend):
    kept: dict[str, bytes] = {}  # noqa: RUF012

    def _open(self, path: str, expected: Expected) -> Any:
        with open(open_file(path, expected), "rb") as file:
            return self.kept.setdefault(path, file.read())

    def _close(self, handle: Any) -> None:
        pass

    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        part = handle[offset : offset + dest.numel()]
        dest.numpy()[: len(part)] = bytearray(part)
        return len(part)


class SharesItsMemory(SampleBackend):
    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes + 100_000, dtype=torch.uint8)


class MapsForWriting(SampleBackend):
    def map(self, reads: Reads) -> list[torch.Tensor] | None:
        size = os.path.getsize(reads.paths[0])
        whole = torch.from_file(reads.paths[0], shared=True, size=size, dtype=torch.uint8)
        return [whole[offset : offset + nbytes] for offset, nbytes in reads.ranges]


class SharesOnePosition(SampleBackend):
    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        handle.seek(offset)
        time.sleep(0.001)
        return handle.readinto(dest.numpy())


class KeepsItsThreads(SampleBackend):
    def close(self) -> None:
        pass


class BreaksOffWhenClosed(SampleBackend):
    def _run_in_threads(self, work: Any) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1)
        self._executor.submit(time.sleep, 0.1)
        self._executor.submit(work.run)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None


class CleansUpInChildren(SampleBackend):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._process = os.getpid()

    def __del__(self) -> None:
        assert self._process == os.getpid()


class GivesAnotherHead(SampleBackend):
    def head(self, path: str, nbytes: int) -> tuple[bytes, FileId]:
        found, identity = super().head(path, nbytes)
        return found.ljust(nbytes, b"\0"), identity


class WritesOverFiles(SampleBackend):
    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        if os.path.exists(path):
            os.unlink(path)
        super().write(path, buffers, durable=durable, mode=mode)


class RunsStepsTwice(SampleBackend):
    class Twice(Pending):
        def then(self, step: Any) -> Pending:
            def twice(tensors: list[torch.Tensor], errors: Mapping[int, Exception]) -> list[torch.Tensor]:
                step(tensors, errors)
                return list(step(tensors, errors))

            return super().then(twice)

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        pending, errors = self.Twice(list(into), self.device, len(reads.paths)), super().start(reads, into).errors
        pending._errors.update(errors)
        pending.finish()
        return pending


#: Each backend, and the test that is to fail over it. These tests are run over every combination of a backend with
#: options, a library and a disk; see ``conftest.py``.
GROSS: dict[type[SampleBackend], tuple[type[BackendContract], str]] = {
    LiesAboutShortReads: (BackendContract, "test_reading_past_the_end_is_an_error"),
    ReadsTheHeadOnce: (BackendContract, "test_reads_on_where_a_call_returned_less"),
    SwallowsErrors: (BackendContract, "test_a_directory_and_a_fifo_are_errors_and_not_a_wait"),
    ReadsFromTheBlock: (BackendContract, "test_reads_every_offset_and_length"),
    WritesBeyondTheEnd: (BackendContract, "test_reads_across_pieces_to_the_last_byte_and_nothing_around"),
    TakesAllMemoryForRoom: (BackendContract, "test_parts_of_two_files_that_take_turns_in_one_destination"),
    WritesAfterTheEnd: (BackendContract, "test_nothing_is_written_once_it_is_over"),
    FinishesEarly: (BackendContract, "test_a_step_behind_the_reads_sees_every_byte"),
    NeverFinishesAfterAnError: (BackendContract, "test_a_missing_file_is_named"),
    AcceptsAnyFile: (BackendContract, "test_another_file_than_expected_is_an_error"),
    AcceptsAnySize: (BackendContract, "test_whole_files_that_have_another_size_by_now[1]"),
    FailsAllForOne: (BackendContract, "test_each_file_has_its_own_error_and_the_others_their_bytes[5000]"),
    NamesNoFile: (BackendContract, "test_each_file_has_its_own_error_and_the_others_their_bytes[5000]"),
    OpensNothingForNothing: (BackendContract, "test_a_missing_file_is_named"),
    KeepsFilesOpen: (BackendContract, "test_reading_past_the_end_is_an_error"),
    KeepsWhatItRead: (BackendContract, "test_sees_what_was_written_a_moment_ago"),
    SharesItsMemory: (BackendContract, "test_a_loaded_tensor_owns_its_storage[load]"),
    MapsForWriting: (BackendContract, "test_writing_into_a_loaded_tensor_reaches_nothing_else[map]"),
    SharesOnePosition: (BackendContract, "test_reads_across_pieces_to_the_last_byte_and_nothing_around"),
    KeepsItsThreads: (BackendContract, "test_close_leaves_no_thread"),
    BreaksOffWhenClosed: (BackendContract, "test_close_waits_and_the_storage_can_be_used_again"),
    CleansUpInChildren: (BackendContract, "test_a_forked_child_is_refused_and_disturbs_nobody"),
    GivesAnotherHead: (BackendContract, "test_reads_the_head_of_a_file"),
    WritesOverFiles: (WriteContract, "test_never_writes_over_a_file"),
    RunsStepsTwice: (FullContract, "test_a_step_sees_bytes_and_errors_once_and_what_it_gives_is_handed_out"),
}

#: Faults that no other test of the contract notices.
SUBTLE: dict[type[SampleBackend], tuple[type[BackendContract], str]] = {}

BROKEN = {**GROSS, **SUBTLE}


def _over(backend: type[SampleBackend], contract: type[BackendContract]) -> type[BackendContract]:
    @pytest.fixture
    def give(self: object) -> SampleBackend:
        return backend(torch.device("cpu"))

    patience = 0.5 if backend in (NeverFinishesAfterAnError, BreaksOffWhenClosed) else contract.patience
    return type(f"Test{backend.__name__}", (contract,), {"backend": give, "patience": patience, "__module__": __name__})


globals().update({f"Test{backend.__name__}": _over(backend, contract) for backend, (contract, _) in BROKEN.items()})
