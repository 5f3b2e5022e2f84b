"""``monai-gds bench tensor``: one tensor to and from one file, by each method, beside plain Python.

The operations are those of DeepSpeed's DeepNVMe examples
(https://github.com/deepspeedai/DeepSpeedExamples/tree/master/deepnvme/file_access): load and store, CPU and GPU tensor.
Each method is a function that prepares what the examples prepare outside of their timing (an open storage, a
destination) and returns the operation to time. The methods are ``python``, ``direct`` (threads over O_DIRECT without
any library: what the drive gives) and this package's backends.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from monai_gds.bench.pagecache import cached, warmth
from monai_gds.bench.report import Report, Row
from monai_gds.errors import FileChanged, MonaiGdsError, StorageError
from monai_gds.parallel_read import page_aligned, read_parallel
from monai_gds.storage import FileId, Reads, Storage, available_backends, open_storage
from monai_gds.storage.files import check_identity, naming
from monai_gds.storage.variants import TUNABLE, TUNED, TUNING_GRID

__all__ = ["LOADS", "STORES", "Tensors", "Transfer", "WrongBytes", "load", "store", "tune"]

_UNIT = "GB/s"


class WrongBytes(StorageError):
    """A method got other bytes than plain Python: no figure of this run can be trusted."""


@dataclass
class Transfer:
    """What a method transfers.

    Args:
        path: the file; for a store, one that does not exist yet.
        device: the device of the tensor.
        nbytes: bytes of the file and the tensor.
        tensor: the tensor to store; None for a load.
        storage: the open backend, for methods that are one.
    """

    path: Path
    device: torch.device
    nbytes: int
    tensor: torch.Tensor | None = None
    storage: Storage | None = None


#: Returns the operation to time, which returns the tensor that it loaded, or None if it stored one.
Method = Callable[[Transfer], Callable[[], torch.Tensor | None]]


@dataclass(frozen=True)
class Tensors:
    """Settings of :func:`load` and :func:`store`.

    Args:
        methods: names of methods, in the order of the rows.
        loop: timed repetitions of each; one more comes first and does not count.
        validate: compare with what plain Python reads or wrote.
        options: for the backends that can be tuned, see :func:`monai_gds.storage.variants.tuning_options`.
    """

    methods: Sequence[str]
    loop: int = 3
    validate: bool = False
    options: dict[str, Any] = field(default_factory=dict)


# Loads.


def load_python(transfer: Transfer) -> Callable[[], torch.Tensor]:
    """``open().read()``, and a copy to the device."""

    def run() -> torch.Tensor:
        with open(transfer.path, "rb") as f, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the bytes are read-only, and nobody writes to them
            return torch.frombuffer(f.read(), dtype=torch.uint8).to(transfer.device)

    return run


def load_direct(transfer: Transfer) -> Callable[[], torch.Tensor]:
    """Threads over O_DIRECT into page-aligned memory, and a copy to the device."""
    memory = page_aligned(transfer.nbytes)

    def run() -> torch.Tensor:
        read_parallel(transfer.path, transfer.nbytes, memoryview(memory))
        return torch.frombuffer(memory, dtype=torch.uint8, count=transfer.nbytes).to(transfer.device)

    return run


def load_storage(transfer: Transfer) -> Callable[[], torch.Tensor]:
    """One read by a backend into a tensor that it allocated."""
    storage = transfer.storage
    assert storage is not None, "opened by the caller"
    dest = storage.memory(transfer.nbytes)
    reads = Reads.of(str(transfer.path), [(0, transfer.nbytes)])
    return lambda: storage.fill(reads, [dest]).wait()[0]


# Stores.


def store_python(transfer: Transfer) -> Callable[[], None]:
    """A copy to the host, and ``open().write()``."""
    tensor = transfer.tensor
    assert tensor is not None, "given by the caller"

    def run() -> None:
        with naming(str(transfer.path)), open(transfer.path, "wb") as f:
            f.write(tensor.cpu().numpy().data)

    return run


def store_storage(transfer: Transfer) -> Callable[[], None]:
    """One write by a backend."""
    storage, tensor = transfer.storage, transfer.tensor
    assert storage is not None, "opened by the caller"
    assert tensor is not None, "given by the caller"
    return lambda: storage.write(str(transfer.path), [tensor])


#: Methods other than storage backends.
LOADS: dict[str, Method] = {"python": load_python, "direct": load_direct}
STORES: dict[str, Method] = {"python": store_python}


# Measuring.


def load(path: Path, device: torch.device, asked: Tensors) -> Report:
    """Times loading a file into a tensor by each method.

    Args:
        path: the file.
        device: the tensor's device.
        asked: the settings.

    Raises:
        FileChanged: the file changed meanwhile.
        WrongBytes: a method did not load the right bytes.
    """
    before = FileId.of(path)
    right = path.read_bytes() if asked.validate else None

    def one(method: str, storage: Storage | None) -> Row:
        operation = LOADS.get(method, load_storage)(Transfer(path, device, before.size, storage=storage))
        rates, shares = [], []
        for _ in range(asked.loop + 1):
            try:
                shares.append(cached(path))
                seconds, tensor = _timed(operation, device)
            except Exception:  # a file that became shorter raises another error in each method
                check_identity(before, FileId.of(path), str(path))
                raise
            check_identity(before, FileId.of(path), str(path))
            rates.append(before.size / seconds / 1e9)
        if right is not None and tensor is not None:
            _compare(right, tensor.cpu().numpy().tobytes(), method, path)
        return Row(method, tuple(rates[1:]), notes={"page cache before": warmth(shares[1:])})

    return _report(f"load, {device.type.upper()} tensor, {before.size / 2**20:.0f} MiB", device, asked, one)


def store(folder: Path, nbytes: int, device: torch.device, asked: Tensors) -> Report:
    """Times storing a tensor of random bytes in new files by each method. The files are removed.

    The figures are of the store alone: no method waits until data in the page cache or in the drive's own cache is on
    the drive. Rates that include this (fsync) have a column of their own.

    Args:
        folder: where the files are written.
        nbytes: bytes of the tensor.
        device: the tensor's device.
        asked: the settings.

    Raises:
        WrongBytes: a method did not store the right bytes.
    """
    tensor = _random(nbytes, device)

    def one(method: str, storage: Storage | None) -> Row:
        rates, shares, synced = [], [], []
        with _new_file(folder) as path:
            operation = STORES.get(method, store_storage)(Transfer(path, device, nbytes, tensor, storage))
            for _ in range(asked.loop + 1):
                path.unlink(missing_ok=True)
                seconds, _nothing = _timed(operation, device)
                shares.append(cached(path))
                rates.append(nbytes / seconds / 1e9)
                synced.append(nbytes / (seconds + _seconds_to_sync(path)) / 1e9)
            if asked.validate:
                _compare(tensor.cpu().numpy().tobytes(), path.read_bytes(), method, path)
        durable = f"{statistics.median(synced[1:]):.2f}"
        notes = {"in page cache after": warmth(shares[1:]), f"with fsync, {_UNIT}": durable}
        return Row(method, tuple(rates[1:]), notes=notes)

    return _report(f"store, {device.type.upper()} tensor, {nbytes / 2**20:.0f} MiB", device, asked, one)


def tune(
    folder: Path,
    nbytes: int,
    device: torch.device,
    loop: int,
    progress: Callable[[int, int], None],
    grid: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[list[Report], dict[str, Any]]:
    """Stores and loads a tensor with every combination of the settings of the backend that can be tuned.

    Args:
        folder: on the drive to tune for.
        nbytes: bytes of the tensor.
        device: the tensor's device.
        loop: how often each combination is timed; all are tried once before any is tried again.
        progress: called with the number done and the total.
        grid: the values of each setting; default: :data:`~monai_gds.storage.variants.TUNING_GRID`.

    Returns:
        The tables of loads and stores, best combination first, and the best settings: those with the greatest sum of
        both medians.

    Raises:
        BackendUnavailable: the backend does not work here.
        StorageError: no combination works.
    """
    grid = grid or TUNING_GRID
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    rates: list[tuple[list[float], list[float]]] = [([], []) for _ in combinations]
    reasons = [""] * len(combinations)
    tensor = _random(nbytes, device)
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
    names = [", ".join(f"{name} {value}" for name, value in settings.items()) for settings in combinations]
    reports = []
    for which, verb in enumerate(("load", "store")):
        rows = [Row(names[n], tuple(rates[n][which]), reasons[n]) for n in order]
        reports.append(Report(f"{verb}, {device.type.upper()} tensor, {nbytes / 2**20:.0f} MiB", _UNIT, rows))
    return reports, combinations[order[0]]


def _store_and_load(folder: Path, tensor: torch.Tensor, settings: Mapping[str, Any]) -> tuple[float, float]:
    """GB/s of both. One of each comes first and does not count."""
    storage = open_storage(TUNED, tensor.device, **settings)
    try:
        with _new_file(folder) as path:
            transfer = Transfer(path, tensor.device, tensor.numel(), tensor, storage)
            for _ in range(2):
                path.unlink(missing_ok=True)
                stored, _nothing = _timed(store_storage(transfer), tensor.device)
                loaded, _tensor = _timed(load_storage(transfer), tensor.device)
    finally:
        storage.close()
    return tensor.numel() / stored / 1e9, tensor.numel() / loaded / 1e9


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
            storage = open_storage(method, device, **(asked.options if method in TUNABLE else {}))
        except MonaiGdsError as e:
            rows.append(Row(method, reason=str(e)))
            continue
        try:
            rows.append(one(method, storage))
        except (FileChanged, WrongBytes):
            raise
        except StorageError as e:  # it works here, but not with this file: its device cannot be read, for instance
            rows.append(Row(method, reason=str(e)))
        finally:
            storage.close()
    return Report(title, _UNIT, rows, reference="python")


def _random(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)


@contextmanager
def _new_file(folder: Path) -> Iterator[Path]:
    """The path of a file to write, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="monai-gds-tensor-", dir=folder) as private:
        yield Path(private) / "tensor.bin"


def _timed(operation: Callable[[], torch.Tensor | None], device: torch.device) -> tuple[float, torch.Tensor | None]:
    begin = time.perf_counter()
    result = operation()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin, result


def _seconds_to_sync(path: Path) -> float:
    """Seconds until a file that was written is on the drive."""
    with open(path, "rb") as f:
        begin = time.perf_counter()
        os.fsync(f.fileno())
        return time.perf_counter() - begin


def _compare(right: bytes, got: bytes, method: str, path: Path) -> None:
    if got != right:
        raise WrongBytes(f"{method} got other bytes than plain Python: {path}")
