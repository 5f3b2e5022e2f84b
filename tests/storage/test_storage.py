"""``Storage``: what it refuses, what it hands on, and how small reads for a GPU are packed into one."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from monai_gds.errors import StorageError
from monai_gds.limits import PACK_BYTES, PACK_READS
from monai_gds.storage import Availability, Pending, Reads, Storage, staging
from monai_gds.storage.backend import Backend
from monai_gds.storage.plain.posix import PosixBackend
from monai_gds.testing.tools import assert_each, bytes_of, content, error_of

CPU = torch.device("cpu")


class Noting(Backend):
    """Notes what it was given, and reads it with plain calls."""

    name = "noting"
    room = 0

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.started: list[tuple[Reads, list[torch.Tensor]]] = []
        self.closed = 0

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return Availability(True, "a test's")

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes + self.room, dtype=torch.uint8)

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        self.started.append((reads, list(into)))
        pending = Pending(list(into), self.device, len(reads.paths))
        for file, (offset, nbytes), part in zip(reads.file.tolist(), reads.ranges, reads.parts(into), strict=True):
            try:
                part.numpy()[:] = np.fromfile(reads.paths[file], np.uint8, nbytes, offset=offset)
            except (OSError, ValueError) as e:
                pending.fail(file, e)
        pending.finish()
        return pending

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def backend() -> Noting:
    return Noting()


@pytest.fixture
def storage(backend: Noting) -> Storage:
    return Storage(backend)


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = tmp_path / "file.bin"
    path.write_bytes(content(100_000))
    return str(path)


# What it refuses.


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(10, dtype=torch.float32),
        lambda: torch.zeros((2, 5), dtype=torch.uint8),
        lambda: torch.zeros(20, dtype=torch.uint8)[::2],
        lambda: torch.zeros(10, dtype=torch.uint8, device="meta"),
        lambda: torch.zeros(9, dtype=torch.uint8),
    ],
    ids=["float32", "two dimensions", "strided", "no memory", "too small"],
)
def test_a_destination_that_makes_no_sense_is_refused(
    storage: Storage, backend: Noting, path: str, make: Callable[[], torch.Tensor]
) -> None:
    with pytest.raises(ValueError, match=r"file\.bin: a destination"):
        storage.fill(Reads.of(path, [(0, 10), (0, 10)]), [torch.zeros(10, dtype=torch.uint8), make()])
    assert backend.started == []


def test_as_many_destinations_as_the_reads_fill(storage: Storage, path: str) -> None:
    with pytest.raises(ValueError, match="1 destinations were given for reads into 2"):
        storage.fill(Reads.of(path, [(0, 10), (0, 10)]), [torch.zeros(10, dtype=torch.uint8)])


@pytest.mark.parametrize("bad", [(-1, 10), (10, -1)])
def test_a_negative_range_is_refused(path: str, bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"file\.bin: negative offset or length"):
        Reads.of(path, [(0, 10), bad])


@pytest.mark.parametrize("starts", [[0, 50], [100, 0], [0, 101], [-1, 100]])
def test_files_that_overlap_or_do_not_fit_are_refused(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="2 reads overlap"):
        Reads.of_files(["a", "b"], np.array([100, 100]), np.array(starts), 200)


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda send: send.__name__)
def test_it_cannot_be_sent_to_another_process(storage: Storage, send: Callable[[object], object]) -> None:
    """The error tells a user who sends one to a worker what to do instead."""
    with pytest.raises(TypeError, match="open_storage"):
        send(storage)


def test_a_forked_child_is_refused_and_its_close_reaches_no_backend(
    storage: Storage, backend: Noting, path: str
) -> None:
    def child() -> None:
        storage.close()
        refused = [
            error_of(lambda: storage.load(Reads.of(path, [(0, 10)]))),
            error_of(lambda: storage.head(path, 10)),
            error_of(lambda: storage.memory(10)),
        ]
        right = all(type(e) is StorageError and f"process {os.getppid()}, which made it" in str(e) for e in refused)
        os._exit(0 if right and not backend.closed and not backend.started else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert bytes_of(storage.load(Reads.of(path, [(0, 10)])).wait()[0]) == content(100_000)[:10]
    storage.close()
    assert backend.closed == 1


# What it hands on.


def test_a_tensor_ends_where_the_bytes_do_though_its_memory_is_larger(
    storage: Storage, backend: Noting, path: str
) -> None:
    backend.room = 4000
    assert [t.numel() for t in storage.load(Reads.of(path, [(0, 10), (5, 0)])).wait()] == [10, 0]
    assert storage.memory(7).numel() == 7


def test_what_the_backend_does_not_map_is_loaded(storage: Storage, backend: Noting, path: str) -> None:
    assert bytes_of(storage.map(Reads.of(path, [(3, 10)])).wait()[0]) == content(100_000)[3:13]
    assert len(backend.started) == 1


def test_an_error_of_mapping_comes_out_of_the_pending(tmp_path: Path) -> None:
    storage = Storage(PosixBackend(CPU))
    pending = storage.map(Reads.of(str(tmp_path / "missing.bin"), [(0, 100_000)]))
    assert list(pending.errors) == [0]
    with pytest.raises(FileNotFoundError, match=r"missing\.bin"):
        pending.wait()


def test_it_describes_its_backend(storage: Storage) -> None:
    assert storage.describe() == {"backend": "noting", "device": "cpu"}
    assert (storage.name, storage.device, storage.coherent) == ("noting", CPU, True)


# Packing, with host memory in the place of a GPU's.


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    monkeypatch.setattr(staging, "on_copy_stream", lambda device: nullcontext())
    monkeypatch.setattr(staging, "raw_current_stream", lambda device: 1)
    monkeypatch.setattr(staging, "current_stream", lambda device: None)
    yield Storage(Noting(torch.device("cuda", 0)))


def started(storage: Storage) -> list[tuple[Reads, list[torch.Tensor]]]:
    assert isinstance(storage._backend, Noting)
    return storage._backend.started


@pytest.mark.parametrize("with_empty", [False, True])
def test_small_reads_come_in_one_block_and_are_tensors_of_their_own(
    on_gpu: Storage, tmp_path: Path, with_empty: bool
) -> None:
    paths = [tmp_path / f"{i}.bin" for i in range(20)]
    for i, path in enumerate(paths):
        path.write_bytes(content(6000 + i, i))
    empty = [(100, 0)] if with_empty else []
    reads = Reads.join([Reads.of(str(path), [(5, 300), (400, 5000), *empty, (0, 5000)]) for path in paths])
    tensors = on_gpu.load(reads).wait()
    assert_each(
        tensors, [content(6000 + i, i)[at : at + n] for i, (at, n) in zip(reads.file, reads.ranges, strict=True)]
    )
    assert all(t.untyped_storage().nbytes() == t.numel() for t in tensors)
    ((packed, into),) = started(on_gpu)
    assert len(into) == len(packed.sizes) == 1


def test_one_file_that_fails_hides_no_other_of_the_block(on_gpu: Storage, tmp_path: Path) -> None:
    good = tmp_path / "good.bin"
    good.write_bytes(content(1000))
    reads = Reads.join([*[Reads.of(str(good), [(0, 1000)])] * 9, Reads.of(str(tmp_path / "missing.bin"), [(0, 10)])])
    pending = on_gpu.load(reads)
    assert list(pending.errors) == [9]
    assert bytes_of(pending.tensors[0]) == content(1000)
    assert pending.tensors[0] is pending.tensors[0]
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"missing\.bin"):
            pending.wait()


@pytest.mark.parametrize("ranges", [[(0, 10)] * (PACK_READS - 1), [*[(0, 10)] * PACK_READS, (0, PACK_BYTES)], []])
def test_few_and_large_reads_are_not_packed(on_gpu: Storage, tmp_path: Path, ranges: list[tuple[int, int]]) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(content(PACK_BYTES))
    tensors = on_gpu.load(Reads.of(str(path), ranges)).wait()
    assert_each(tensors, [content(PACK_BYTES)[at : at + n] for at, n in ranges])
    ((reads, into),) = started(on_gpu)
    assert len(into) == len(reads.sizes) == len(ranges)


@pytest.mark.gpu
def test_a_destination_on_another_device_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"file\.bin: a destination lies on cuda:0, this storage serves cpu"):
        Storage(PosixBackend(CPU)).fill(Reads.of(path, [(0, 10)]), [torch.zeros(10, dtype=torch.uint8, device="cuda")])
