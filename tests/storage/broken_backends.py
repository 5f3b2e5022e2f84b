"""Backends that break one promise each, and the contract over them: every test in this file is to fail.

``test_contract.py`` runs it. pytest does not collect it by itself. The first backends break a promise plainly, so that
several tests notice. Those from ``RefusesOtherNames`` on show what each test is there for: no other one notices them.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds.errors import StorageError
from monai_gds.storage import Availability, FileId, Pending, Reads
from monai_gds.storage.blocking import OpenFiles, Work
from monai_gds.storage.files import Buffer, Expected, ends_early, naming, open_file
from monai_gds.testing import BackendContract, WriteContract
from tests.storage.full_contract import FullContract
from tests.storage.sample_blocking_backend import SampleBackend


class LiesAboutShortReads(SampleBackend):
    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        super()._read_into(handle, offset, dest)
        return dest.numel()


class ReadsTheHeadOnce(SampleBackend):
    def head(self, path: str, nbytes: int) -> tuple[bytes, FileId]:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with naming(path):
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
        tensors = mapped(reads, reads.expected[0])
        for i, (offset, nbytes) in enumerate(reads.ranges):
            if nbytes and not offset:
                tensors[i] = torch.from_file(reads.paths[0], shared=True, size=nbytes, dtype=torch.uint8)
        return tensors


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
        executor = self._executors.setdefault(1, ThreadPoolExecutor(1))
        executor.submit(time.sleep, 0.1)
        executor.submit(work.run)

    def close(self) -> None:
        while self._executors:
            self._executors.popitem()[1].shutdown(cancel_futures=True)


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


# What one test alone notices: bytes.


class LosesTheEndOfABlock(SampleBackend):
    many = False

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        self.many = len(reads.paths) == 1 and len(reads.file) > 24  # more than a property test draws
        return super().start(reads, into)

    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        count = super()._read_into(handle, offset, dest)
        if self.many and offset % 512 == 1 and (offset + dest.numel()) % 512 == 0:
            dest[-1] ^= 1
        return count


class RefusesOtherNames(SampleBackend):
    def _open(self, path: str, expected: Expected) -> Any:
        if os.path.normpath(path) != path:
            raise FileNotFoundError(errno.ENOENT, "no such name", path)
        return super()._open(path, expected)


class TakesOnePartOfFurtherDestinations(SampleBackend):
    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        return super().start(reads[(reads.start == 0) | (reads.dest == 0)], into)


class MapsWithShortOffsets(SampleBackend):
    def map(self, reads: Reads) -> list[torch.Tensor] | None:
        return mapped(reads, reads.expected[0], lambda offset: offset & 0xFFFFFF)


class ExpectsSomeBytes(SampleBackend):
    def _open(self, path: str, expected: Expected) -> Any:
        if expected == 0:
            raise StorageError(errno.EIO, "an empty file", path)
        return super()._open(path, expected)


class ReadsNothingWithinAFileOnly(SampleBackend):
    def _open(self, path: str, expected: Expected) -> Any:
        if os.path.getsize(path) < self.empty.get(path, 0):
            raise StorageError(errno.EIO, "it ends before that", path)
        return super()._open(path, expected)

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        rows = zip(reads.file.tolist(), reads.ranges, strict=True)
        self.empty = {reads.paths[file]: offset for file, (offset, nbytes) in rows if not nbytes}
        return super().start(reads, into)


class KeepsWhatItReadThisSecond(SampleBackend):
    kept: dict[Any, bytes] = {}  # noqa: RUF012

    def _open(self, path: str, expected: Expected) -> Any:
        with open(open_file(path, expected, regular=True), "rb") as file:
            st = os.fstat(file.fileno())
            key = path, st.st_ino, st.st_size, int(st.st_mtime)
            if key not in self.kept:
                self.kept[key] = file.read()
            return self.kept[key]

    def _close(self, handle: Any) -> None:
        pass

    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        part = handle[offset : offset + dest.numel()]
        dest.numpy()[: len(part)] = bytearray(part)
        return len(part)


class RunsStepsAtOnce(SampleBackend):
    class Late(Pending):
        begin: Any = None

        def then(self, step: Any, *, aside: bool = False) -> Pending:
            return Pending.completed(step(self._tensors, {}), self._device) if self.begin else super().then(step)

        def _read(self) -> None:
            begin, self.begin = self.begin, None
            if begin is not None:
                self._errors.update(begin().errors)
                self.finish()

        @property
        def done(self) -> bool:
            self._read()
            return True

        def _wait(self) -> None:
            self._read()

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        pending = self.Late(list(into), self.device, len(reads.paths))
        pending.begin = lambda: SampleBackend.start(self, reads, into)
        return pending


class ReadsTheHeadOfNothing(SampleBackend):
    def head(self, path: str, nbytes: int) -> tuple[bytes, FileId]:
        return super().head(path, nbytes) if os.path.lexists(path) else (b"", FileId.of("/dev/null"))


# Memory.


class TakesMappingsBack(SampleBackend):
    def map(self, reads: Reads) -> list[torch.Tensor] | None:
        tensors = mapped(reads, reads.expected[0])
        self.given = [*getattr(self, "given", ()), *map(weakref.ref, tensors)]
        return tensors

    def close(self) -> None:
        super().close()
        for ref in getattr(self, "given", ()):
            if (tensor := ref()) is not None:
                tensor.zero_()


class KeepsADescriptorUntilItIsClosed(SampleBackend):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.kept: list[int] = []

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        self.kept.append(os.open(os.devnull, os.O_RDONLY))
        return super().start(reads, into)

    def close(self) -> None:
        super().close()
        while self.kept:
            os.close(self.kept.pop())


# Errors.


class AfterReading(SampleBackend):
    """Reads as it should; a subclass changes what comes of it."""

    pending_type: type[Pending] = Pending

    def changed(self, reads: Reads, into: Sequence[torch.Tensor], errors: dict[int, Exception]) -> dict[int, Exception]:
        return errors

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        pending = self.pending_type(list(into), self.device, len(reads.paths))
        pending._errors.update(self.changed(reads, into, dict(SampleBackend.start(self, reads, into).errors)))
        pending.finish()
        return pending


class MapsWithoutAName(SampleBackend):
    def map(self, reads: Reads) -> list[torch.Tensor] | None:
        if not os.path.lexists(reads.paths[0]):
            raise FileNotFoundError(errno.ENOENT, "no such file")
        return super().map(reads)


class ForgetsHighBitsOfOffsets(SampleBackend):
    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        return super()._read_into(handle, offset & ((1 << 40) - 1), dest)


class SwallowsErrorsOfTheDisk(SampleBackend):
    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        try:
            return super()._read_into(handle, offset, dest)
        except OSError as e:
            if e.errno != errno.EIO:
                raise
            return dest.numel()


class ReadsTheHeadOfAPipe(SampleBackend):
    def head(self, path: str, nbytes: int) -> tuple[bytes, FileId]:
        return (
            (b"", FileId.of(path)) if os.path.exists(path) and not os.path.isfile(path) else super().head(path, nbytes)
        )


class MapsAnyFile(SampleBackend):
    def map(self, reads: Reads) -> list[torch.Tensor] | None:
        return mapped(reads, None)


class AcceptsFilesThatGrew(SampleBackend):
    def _open(self, path: str, expected: Expected) -> Any:
        grew = isinstance(expected, int) and os.path.getsize(path) > expected
        return super()._open(path, None if grew else expected)


class GivesErrorsOfItsOwn(AfterReading):
    def changed(self, reads: Reads, into: Sequence[torch.Tensor], errors: dict[int, Exception]) -> dict[int, Exception]:
        return {
            file: type("Local", (type(error),), {})(*error.args, reads.paths[file]) for file, error in errors.items()
        }


class TriesAgainWhenItIsOver(AfterReading):
    def changed(self, reads: Reads, into: Sequence[torch.Tensor], errors: dict[int, Exception]) -> dict[int, Exception]:
        def again(before: list[torch.Tensor]) -> None:
            time.sleep(0.01)
            for dest, tensor in zip(into, before, strict=True):
                dest.copy_(tensor)

        if errors:
            threading.Thread(target=again, args=([dest.clone() for dest in into],)).start()
        return errors


# Threads, and what it says about itself.


class MixesUpItsCallers(SampleBackend):
    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        self.asked = reads, into
        time.sleep(0.001)
        return super().start(*self.asked)


class ClosesForGoodWhenClosedTwice(SampleBackend):
    user, closed = 0, 0

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        if self.closed > 1:
            raise StorageError(errno.EBADF, "it was closed twice")
        self.user, self.closed = threading.get_ident(), 0
        return super().start(reads, into)

    def close(self) -> None:
        super().close()
        self.closed += threading.get_ident() == self.user


class IsSurprisedWhenClosed(SampleBackend):
    def _run_in_threads(self, work: Work[Any]) -> None:
        executor = self._executors.setdefault(2, ThreadPoolExecutor(2))
        time.sleep(0.001)
        executor.submit(work.run)


class SaysNothing(SampleBackend):
    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return Availability(True, "")


# Writing.


class CountsItemsForBytes(SampleBackend):
    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        cut = [b.cast("B")[: len(b)] if isinstance(b, memoryview) else b for b in buffers]
        super().write(path, cut, durable=durable, mode=mode)


class IgnoresTheMode(SampleBackend):
    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        super().write(path, buffers, durable=durable, mode=0o666)


class WritesAnyTensor(SampleBackend):
    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        plain = [b.contiguous().flatten().view(torch.uint8) if isinstance(b, torch.Tensor) else b for b in buffers]
        super().write(path, plain, durable=durable, mode=mode)


class LosesTheEndOfAPage(SampleBackend):
    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        super().write(path, buffers, durable=durable, mode=mode)
        if (size := os.path.getsize(path)) % 4096 == 0 and 0 < size < 1 << 20:
            os.truncate(path, size - 1)


class WritesInOneCall(SampleBackend):
    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        if len(buffers) > os.sysconf("SC_IOV_MAX"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        super().write(path, buffers, durable=durable, mode=mode)


class KnowsNoEmptyTensor(SampleBackend):
    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        if buffers and all(len(b) == 0 for b in buffers) and isinstance(buffers[-1], torch.Tensor):
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT), path)
        super().write(path, buffers, durable=durable, mode=mode)


class MakesDirectories(SampleBackend):
    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        super().write(path, buffers, durable=durable, mode=mode)


class SwallowsThatADiskIsFull(SampleBackend):
    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        try:
            super().write(path, buffers, durable=durable, mode=mode)
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise


# What the base classes promise for others.


class HidesErrorsFromSteps(AfterReading):
    class Hiding(Pending):
        def then(self, step: Any, *, aside: bool = False) -> Pending:
            return super().then(lambda tensors, errors: step(tensors, {}))

    pending_type = Hiding


class SwallowsErrorsOfSteps(AfterReading):
    class Swallowing(Pending):
        def then(self, step: Any, *, aside: bool = False) -> Pending:
            def careless(tensors: list[torch.Tensor], errors: Mapping[int, Exception]) -> list[torch.Tensor]:
                try:
                    return list(step(tensors, errors))
                except Exception:
                    return []

            return super().then(careless)

    pending_type = Swallowing


class GivesItsTensorsOnce(AfterReading):
    class Once(Pending):
        def wait(self) -> list[torch.Tensor]:
            tensors = super().wait()
            self._tensors = []
            return tensors

    pending_type = Once


class HoldsUntilAsked(AfterReading):
    """Notes how many Pendings nobody has asked for their errors or tensors yet."""

    unasked: weakref.WeakSet[Pending]

    class Asked(Pending):
        forget: Any = staticmethod(lambda: None)

        @property
        def errors(self) -> Mapping[int, Exception]:
            self.forget()
            return super().errors

        def wait(self) -> list[torch.Tensor]:
            self.forget()
            return super().wait()

    pending_type = Asked


class HasRoomForThirty(HoldsUntilAsked):
    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        self.unasked = getattr(self, "unasked", weakref.WeakSet())
        if len(self.unasked) == 30:
            raise StorageError(errno.EAGAIN, "thirty are under way")
        pending = super().start(reads, into)
        self.unasked.add(pending)
        itself = weakref.ref(pending)
        pending.forget = lambda: self.unasked.discard(itself())
        return pending


class KeepsDescriptorsUntilAsked(HoldsUntilAsked):
    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        pending = super().start(reads, into)
        fds = [os.open(os.devnull, os.O_RDONLY)]
        pending.forget = lambda: os.close(fds.pop()) if fds else None
        return pending


class OpensAllFilesFirst(SampleBackend):
    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        fds = [os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in reads.paths if os.path.isfile(path)]
        try:
            return super().start(reads, into)
        finally:
            for fd in fds:
                os.close(fd)


class PutsManyIntoOneBlock(AfterReading):
    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        pending = super().start(reads, into)
        if len(into) > 150:
            pending._tensors = list(torch.cat(list(into)).split([dest.numel() for dest in into]))
        return pending


class Open:
    """A descriptor, as long as this lives. Is not sent to other processes."""

    def __init__(self) -> None:
        self._fd = os.open(os.devnull, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self._fd)

    def __reduce__(self) -> Any:
        return object, ()


class KeepsADescriptorInAnError(AfterReading):
    def changed(self, reads: Reads, into: Sequence[torch.Tensor], errors: dict[int, Exception]) -> dict[int, Exception]:
        for error in errors.values():
            error.handle = Open()  # type: ignore[attr-defined]
        return errors


class IsSurprisedByOtherSizes(AfterReading):
    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        before = [os.path.getsize(path) for path in reads.paths if os.path.isfile(path)]
        pending = super().start(reads, into)
        if [os.path.getsize(path) for path in reads.paths if os.path.isfile(path)] != before:
            pending._errors[0] = ValueError("it has another size now")
        return pending


def mapped(reads: Reads, expected: Expected, at: Callable[[int], int] = lambda offset: offset) -> list[torch.Tensor]:
    """The ranges of a file, from its bytes at ``at(offset)``; errors are as they should be."""
    path = reads.paths[0]
    with open(open_file(path, expected, regular=True), "rb") as file:
        data = file.read()
    for offset, nbytes in reads.ranges:
        if offset + nbytes > len(data):
            raise ends_early(len(data), offset + nbytes - len(data), path)
    parts = [data[at(offset) : at(offset) + nbytes] for offset, nbytes in reads.ranges]
    return [torch.from_numpy(np.frombuffer(part, np.uint8).copy()) for part in parts]


#: Each backend, and one of the tests that are to fail over it.
GROSS: dict[type[SampleBackend], tuple[type[BackendContract], str]] = {
    LiesAboutShortReads: (BackendContract, "test_reading_past_the_end_is_an_error"),
    SwallowsErrors: (BackendContract, "test_directories_and_fifos_are_refused_without_waiting"),
    ReadsFromTheBlock: (BackendContract, "test_reads_every_offset_and_length"),
    WritesBeyondTheEnd: (BackendContract, "test_reads_across_pieces_and_writes_nothing_around_them"),
    WritesAfterTheEnd: (BackendContract, "test_nothing_is_written_after_the_end"),
    FinishesEarly: (BackendContract, "test_a_step_after_the_reads_sees_every_byte"),
    NeverFinishesAfterAnError: (BackendContract, "test_a_missing_file_is_named"),
    AcceptsAnyFile: (BackendContract, "test_a_replaced_file_is_an_error"),
    AcceptsAnySize: (BackendContract, "test_whole_files_whose_size_has_changed_are_errors[1]"),
    FailsAllForOne: (BackendContract, "test_each_file_fails_alone_and_the_others_are_read[5000]"),
    NamesNoFile: (BackendContract, "test_each_file_fails_alone_and_the_others_are_read[5000]"),
    OpensNothingForNothing: (BackendContract, "test_a_missing_file_is_named"),
    KeepsFilesOpen: (BackendContract, "test_reading_past_the_end_is_an_error"),
    KeepsWhatItRead: (BackendContract, "test_sees_what_was_just_written"),
    SharesOnePosition: (BackendContract, "test_reads_across_pieces_and_writes_nothing_around_them"),
    GivesAnotherHead: (BackendContract, "test_reads_the_head_of_a_file"),
    RunsStepsTwice: (FullContract, "test_a_step_sees_bytes_and_errors_once_and_what_it_gives_is_handed_out"),
    TakesAllMemoryForRoom: (BackendContract, "test_alternating_parts_of_two_files_in_one_destination"),
    ReadsTheHeadOnce: (BackendContract, "test_continues_after_a_short_read"),
    SharesItsMemory: (BackendContract, "test_a_loaded_tensor_owns_its_storage[load]"),
    MapsForWriting: (BackendContract, "test_writing_into_a_loaded_tensor_changes_nothing_else[map]"),
    KeepsItsThreads: (BackendContract, "test_close_leaves_no_thread"),
    BreaksOffWhenClosed: (BackendContract, "test_close_waits_and_the_storage_can_be_used_again"),
    CleansUpInChildren: (BackendContract, "test_a_forked_child_is_refused_and_disturbs_no_read"),
    WritesOverFiles: (WriteContract, "test_never_writes_over_a_file"),
}

#: The same, where no other test notices. So it is with the last ones of those above.
SUBTLE: dict[type[SampleBackend], tuple[type[BackendContract], str]] = {
    LosesTheEndOfABlock: (BackendContract, "test_reads_every_offset_and_length"),
    RefusesOtherNames: (BackendContract, "test_reads_across_pieces_and_writes_nothing_around_them"),
    TakesOnePartOfFurtherDestinations: (BackendContract, "test_fills_its_parts_and_writes_nothing_around_them"),
    MapsWithShortOffsets: (BackendContract, "test_loads_and_maps_any_ranges"),
    ExpectsSomeBytes: (BackendContract, "test_many_files_into_one_buffer"),
    ReadsNothingWithinAFileOnly: (BackendContract, "test_an_empty_read_opens_its_file_and_reads_nothing"),
    KeepsWhatItReadThisSecond: (BackendContract, "test_sees_what_was_just_written"),
    RunsStepsAtOnce: (BackendContract, "test_a_step_after_the_reads_sees_every_byte"),
    ReadsTheHeadOfNothing: (BackendContract, "test_reads_the_head_of_a_file"),
    TakesMappingsBack: (BackendContract, "test_a_loaded_tensor_outlives_its_file_and_its_storage[map]"),
    KeepsADescriptorUntilItIsClosed: (BackendContract, "test_two_thousand_loaded_tensors_keep_no_descriptor[load]"),
    MapsWithoutAName: (BackendContract, "test_a_missing_file_is_named"),
    ForgetsHighBitsOfOffsets: (BackendContract, "test_reading_past_the_end_is_an_error"),
    SwallowsErrorsOfTheDisk: (BackendContract, "test_an_unreadable_disk_is_an_error"),
    ReadsTheHeadOfAPipe: (BackendContract, "test_directories_and_fifos_are_refused_without_waiting"),
    MapsAnyFile: (BackendContract, "test_a_replaced_file_is_an_error"),
    AcceptsFilesThatGrew: (BackendContract, "test_whole_files_whose_size_has_changed_are_errors[1]"),
    GivesErrorsOfItsOwn: (BackendContract, "test_each_file_fails_alone_and_the_others_are_read[5000]"),
    TriesAgainWhenItIsOver: (BackendContract, "test_nothing_is_written_after_the_end"),
    MixesUpItsCallers: (BackendContract, "test_eight_threads_share_a_storage"),
    ClosesForGoodWhenClosedTwice: (BackendContract, "test_close_waits_and_the_storage_can_be_used_again"),
    IsSurprisedWhenClosed: (BackendContract, "test_closing_in_another_thread_disturbs_no_read"),
    SaysNothing: (BackendContract, "test_describes_itself"),
    CountsItemsForBytes: (WriteContract, "test_writes_every_kind_of_buffer[False]"),
    IgnoresTheMode: (WriteContract, "test_a_file_is_created_with_its_permissions"),
    WritesAnyTensor: (WriteContract, "test_only_tensors_of_bytes_are_written"),
    LosesTheEndOfAPage: (WriteContract, "test_reads_back_what_it_wrote"),
    WritesInOneCall: (WriteContract, "test_writes_more_buffers_than_one_system_call_takes"),
    KnowsNoEmptyTensor: (WriteContract, "test_writes_an_empty_file"),
    MakesDirectories: (WriteContract, "test_an_error_names_a_directory_that_is_missing_or_read_only"),
    SwallowsThatADiskIsFull: (WriteContract, "test_a_full_disk_is_an_error_that_breaks_nothing_else"),
    HidesErrorsFromSteps: (FullContract, "test_a_step_sees_bytes_and_errors_once_and_what_it_gives_is_handed_out"),
    SwallowsErrorsOfSteps: (FullContract, "test_a_step_that_raises_fails_what_it_belongs_to_and_nothing_else"),
    GivesItsTensorsOnce: (FullContract, "test_wait_gives_the_destinations_in_order_again_and_to_every_thread"),
    HasRoomForThirty: (FullContract, "test_many_in_flight"),
    KeepsDescriptorsUntilAsked: (FullContract, "test_what_nobody_waits_for"),
    OpensAllFilesFirst: (FullContract, "test_more_files_than_descriptors"),
    PutsManyIntoOneBlock: (FullContract, "test_loads_many_files_each_with_its_ranges"),
    KeepsADescriptorInAnError: (FullContract, "test_failures_leave_nothing_behind"),
    IsSurprisedByOtherSizes: (FullContract, "test_a_file_that_shrinks_and_grows_meanwhile_gives_a_tensor_or_an_error"),
}

BROKEN = {**GROSS, **SUBTLE}

#: The tests that notice what is plainly wrong. They are run over every combination of a backend with options, a library
#: and a disk; see ``conftest.py``.
CORE = {"test_describes_itself", *(test.partition("[")[0] for _, test in GROSS.values())}

#: For each test, a backend that no other test notices.
ALONE = {test.partition("[")[0]: backend for backend, (_, test) in BROKEN.items()}


def _over(backend: type[SampleBackend], contract: type[BackendContract]) -> type[BackendContract]:
    @pytest.fixture
    def give(self: object) -> SampleBackend:
        return backend(torch.device("cpu"))

    patience = 0.5 if backend in (NeverFinishesAfterAnError, BreaksOffWhenClosed) else contract.patience
    return type(f"Test{backend.__name__}", (contract,), {"backend": give, "patience": patience, "__module__": __name__})


globals().update({f"Test{backend.__name__}": _over(backend, contract) for backend, (contract, _) in BROKEN.items()})
