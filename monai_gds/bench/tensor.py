"""One tensor to and from one file, by each method, beside plain Python: what ``monai-gds bench tensor`` runs.

The file operations of DeepSpeed's DeepNVMe examples
(https://github.com/deepspeedai/DeepSpeedExamples/tree/master/deepnvme/file_access): load and store, CPU and GPU tensor.
Each method is one function that prepares what the examples prepare outside of their timing (an open storage, a
destination) and returns the operation that is timed. Besides ``python`` the methods are this package's backends and
``direct``, which is what the drive gives: threads over O_DIRECT without any library.
"""

from __future__ import annotations

import itertools
import mmap
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from monai_gds.bench.pagecache import cached, in_words
from monai_gds.bench.report import Report, Row
from monai_gds.errors import FileChanged, MonaiGdsError, StorageError
from monai_gds.storage import FileId, Read, Storage, available_backends, open_storage
from monai_gds.storage.base import naming

__all__ = ["GRID", "LOADS", "STORES", "Job", "Tensors", "WrongBytes", "load", "store", "tune"]

_PIECE = 8 << 20
_UNIT = "GB/s"

#: Given a job, the operation to be timed: it returns the tensor that it loaded, or None when it stored one.
Method = Callable[["Job"], Callable[[], torch.Tensor | None]]


class WrongBytes(StorageError):
    """A method got other bytes than plain Python: no figure of this run can be trusted."""


@dataclass
class Job:
    """What a method works on.

    Args:
        path: the file; for a store, one that does not exist yet.
        device: where the tensor is or goes.
        nbytes: bytes of file and tensor.
        tensor: what is stored; None for a load.
        storage: the open backend, for the methods that are one.
    """

    path: Path
    device: torch.device
    nbytes: int
    tensor: torch.Tensor | None = None
    storage: Storage | None = None


@dataclass(frozen=True)
class Tensors:
    """What is asked for on the command line.

    Args:
        methods: names, in the order of the rows.
        loop: how many times each is timed; one more comes first and does not count.
        validate: compare with what plain Python reads or wrote.
        options: of the two DeepNVMe backends.
    """

    methods: Sequence[str]
    loop: int = 3
    validate: bool = False
    options: dict[str, Any] = field(default_factory=dict)


# Loads.


def load_python(job: Job) -> Callable[[], torch.Tensor]:
    """``open().read()``, and a copy to the device."""

    def run() -> torch.Tensor:
        with open(job.path, "rb") as f, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the bytes are not writable; nobody writes
            return torch.frombuffer(f.read(), dtype=torch.uint8).to(job.device)

    return run


def load_direct(job: Job) -> Callable[[], torch.Tensor]:
    """Threads over O_DIRECT into page-aligned memory: what the drive gives. The tail goes through the page cache."""
    room = mmap.mmap(-1, job.nbytes + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        room.madvise(mmap.MADV_HUGEPAGE)  # memory that is contiguous is read in larger requests
    view = memoryview(room)
    pages = job.nbytes - job.nbytes % mmap.PAGESIZE

    def piece(fd: int, start: int) -> None:
        stop = min(start + _PIECE, pages)
        while start < stop:
            count = os.preadv(fd, [view[start:stop]], start)
            if count == 0:
                raise StorageError(f"{job.path} became shorter while it was being read")
            start += count

    def run() -> torch.Tensor:
        with _descriptor(job.path, os.O_DIRECT) as fd, ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda start: piece(fd, start), range(0, pages, _PIECE)))
        with _descriptor(job.path, 0) as fd:
            os.preadv(fd, [view[pages : job.nbytes]], pages)
        return torch.frombuffer(room, dtype=torch.uint8, count=job.nbytes).to(job.device)

    return run


def load_storage(job: Job) -> Callable[[], torch.Tensor]:
    """One read of a backend into a tensor that it allocated."""
    storage = _opened(job)
    dest = storage.allocate(job.nbytes)

    def run() -> torch.Tensor:
        return storage.submit([Read(str(job.path), 0, dest)]).wait()[0]

    return run


# Stores.


def store_python(job: Job) -> Callable[[], None]:
    """A copy to the host, and ``open().write()``."""
    tensor = _tensor(job)

    def run() -> None:
        with naming(str(job.path)), open(job.path, "wb") as f:
            f.write(tensor.cpu().numpy().data)

    return run


def store_storage(job: Job) -> Callable[[], None]:
    """One write of a backend."""
    storage, tensor = _opened(job), _tensor(job)

    def run() -> None:
        storage.write(str(job.path), [tensor])

    return run


#: The methods that are no storage backend.
LOADS: dict[str, Method] = {"python": load_python, "direct": load_direct}
STORES: dict[str, Method] = {"python": store_python}


def _opened(job: Job) -> Storage:
    if job.storage is None:
        raise ValueError("this method needs an open storage")
    return job.storage


def _tensor(job: Job) -> torch.Tensor:
    if job.tensor is None:
        raise ValueError("this method needs a tensor")
    return job.tensor


@contextmanager
def _descriptor(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)


# Measuring.


def load(path: Path, device: torch.device, asked: Tensors) -> Report:
    """Times loading ``path`` into a tensor on ``device`` by each method.

    Raises:
        FileChanged: the file became another one meanwhile.
        WrongBytes: a method did not load the right bytes.
    """
    before = FileId.of(path)
    right = path.read_bytes() if asked.validate else None
    heading = "page cache before"

    def one(method: str, storage: Storage | None) -> Row:
        operation = LOADS.get(method, load_storage)(Job(path, device, before.size, storage=storage))
        rates, shares = [], []
        for _ in range(asked.loop + 1):
            try:
                shares.append(cached(path))
                seconds, tensor = _timed(operation, device)
            except Exception:  # as many kinds as there are methods, when the file became shorter
                before.check(FileId.of(path), str(path))
                raise
            before.check(FileId.of(path), str(path))
            rates.append(before.size / seconds / 1e9)
        if right is not None and tensor is not None:
            _compare(right, tensor.cpu().numpy().tobytes(), method, path)
        return Row(method, tuple(rates[1:]), notes={heading: in_words(shares[1:])})

    return _report(f"load, {device.type.upper()} tensor, {before.size / 2**20:.0f} MiB", device, asked, one)


def store(folder: Path, nbytes: int, device: torch.device, asked: Tensors) -> Report:
    """Times storing a tensor of ``nbytes`` random bytes on ``device`` into new files in ``folder`` by each method.

    The files are removed. What is timed is the store alone: no method waits for the drive to have what is in the page
    cache or in the drive's own cache. What waiting for that makes of it (fsync) has a column of its own.

    Raises:
        WrongBytes: a method did not store the right bytes.
    """
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    heading, durable = "in page cache after", f"with fsync, {_UNIT}"

    def one(method: str, storage: Storage | None) -> Row:
        rates, shares, synced = [], [], []
        with tempfile.TemporaryDirectory(prefix="monai-gds-tensor-", dir=folder) as private:
            path = Path(private) / "tensor.bin"
            operation = STORES.get(method, store_storage)(Job(path, device, nbytes, tensor, storage))
            for _ in range(asked.loop + 1):
                path.unlink(missing_ok=True)
                seconds, _nothing = _timed(operation, device)
                shares.append(cached(path))
                rates.append(nbytes / seconds / 1e9)
                synced.append(nbytes / (seconds + _seconds_to_sync(path)) / 1e9)
            if asked.validate:
                _compare(tensor.cpu().numpy().tobytes(), path.read_bytes(), method, path)
        notes = {heading: in_words(shares[1:]), durable: f"{statistics.median(synced[1:]):.2f}"}
        return Row(method, tuple(rates[1:]), notes=notes)

    return _report(f"store, {device.type.upper()} tensor, {nbytes / 2**20:.0f} MiB", device, asked, one)


#: What :func:`tune` tries: every combination. DeepSpeed's ds_nvme_tune has these, and transfers of 1 and 8 MiB only.
GRID: dict[str, Sequence[Any]] = {
    "block_size": (256 << 10, 1 << 20, 8 << 20),
    "queue_depth": (8, 32, 128),
    "single_submit": (False, True),
    "intra_op_parallelism": (1, 2, 4, 8),
}


def tune(
    folder: Path,
    nbytes: int,
    device: torch.device,
    loop: int,
    progress: Callable[[int, int], None],
    grid: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[list[Report], dict[str, Any]]:
    """Stores and loads a tensor with every combination of the ``deepnvme`` backend's settings.

    Args:
        folder: on the drive to tune for.
        nbytes: of the tensor.
        device: where it is.
        loop: how often each combination is timed; all are tried once before any is tried again.
        progress: called with what is done, and what there is to do.
        grid: the values of each setting; default: :data:`GRID`.

    Returns:
        The tables of loads and stores, the combination first that has the greatest sum of both medians, and that one's
        settings.

    Raises:
        BackendUnavailable: the backend does not work here.
        StorageError: no combination works.
    """
    grid = grid or GRID
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    rates: list[tuple[list[float], list[float]]] = [([], []) for _ in combinations]
    reasons = [""] * len(combinations)
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    for turn in range(loop):
        for number, settings in enumerate(combinations):
            progress(turn * len(combinations) + number, loop * len(combinations))
            if reasons[number]:
                continue
            try:
                stored, loaded = _store_and_load(folder, tensor, settings)
            except StorageError as e:
                reasons[number] = str(e)
                continue
            rates[number][0].append(loaded)
            rates[number][1].append(stored)

    def both(number: int) -> float:
        return sum(statistics.median(r) if r else 0.0 for r in rates[number])

    order = sorted(range(len(combinations)), key=both, reverse=True)
    if reasons[order[0]]:
        raise StorageError(reasons[order[0]])
    reports = []
    for which, verb in enumerate(("load", "store")):
        rows = [Row(_named(combinations[n]), tuple(rates[n][which]), reasons[n]) for n in order]
        reports.append(Report(f"{verb}, {device.type.upper()} tensor, {nbytes / 2**20:.0f} MiB", _UNIT, rows))
    return reports, combinations[order[0]]


def _store_and_load(folder: Path, tensor: torch.Tensor, settings: Mapping[str, Any]) -> tuple[float, float]:
    """GB/s of both, with an untimed one of each before."""
    storage = open_storage("deepnvme", tensor.device, **settings)
    try:
        with tempfile.TemporaryDirectory(prefix="monai-gds-tensor-", dir=folder) as private:
            path = Path(private) / "tensor.bin"
            job = Job(path, tensor.device, tensor.numel(), tensor, storage)
            seconds = [0.0, 0.0]
            for _ in range(2):
                path.unlink(missing_ok=True)
                seconds[0], _nothing = _timed(store_storage(job), tensor.device)
                seconds[1], _loaded = _timed(load_storage(job), tensor.device)
    finally:
        storage.close()
    return tensor.numel() / seconds[0] / 1e9, tensor.numel() / seconds[1] / 1e9


def _named(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _report(title: str, device: torch.device, asked: Tensors, one: Callable[[str, Storage | None], Row]) -> Report:
    rows = []
    found = available_backends(device)
    for method in asked.methods:
        if method not in found:
            rows.append(one(method, None))
            continue
        if not found[method]:
            remedy = f"; {found[method].remedy}" if found[method].remedy else ""
            rows.append(Row(method, reason=f"{found[method].reason}{remedy}"))
            continue
        try:
            storage = open_storage(method, device, **(asked.options if method.startswith("deepnvme") else {}))
        except MonaiGdsError as e:
            rows.append(Row(method, reason=str(e)))
            continue
        try:
            rows.append(one(method, storage))
        except (FileChanged, WrongBytes):
            raise
        except StorageError as e:  # works here, but not with this file: cuFile refuses it, its device may not be read
            rows.append(Row(method, reason=str(e)))
        finally:
            storage.close()
    return Report(title, _UNIT, rows, reference="python")


def _timed(operation: Callable[[], torch.Tensor | None], device: torch.device) -> tuple[float, torch.Tensor | None]:
    begin = time.perf_counter()
    result = operation()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin, result


def _seconds_to_sync(path: Path) -> float:
    """What is missing until the drive has a file that was written."""
    with _descriptor(path, 0) as fd:
        begin = time.perf_counter()
        os.fsync(fd)
        return time.perf_counter() - begin


def _compare(right: bytes, got: bytes, method: str, path: Path) -> None:
    if got != right:
        raise WrongBytes(f"{method} got other bytes than plain Python: {path}")
