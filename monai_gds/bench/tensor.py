"""``monai-gds bench tensor``: one tensor to and from one file, by each method and by plain Python.

The operations are those of DeepSpeed's DeepNVMe examples
(https://github.com/deepspeedai/DeepSpeedExamples/tree/master/deepnvme/file_access): load and store, CPU and GPU tensor.
The examples prepare an open storage and a destination outside of their timing, and so do the methods here. Methods are
``python``, ``direct`` (threads over O_DIRECT without any library: what the drive gives) and this package's backends.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from monai_gds.base.parallel_read import page_aligned, read_parallel
from monai_gds.bench.pagecache import cached, warmth
from monai_gds.bench.report import Report, Row
from monai_gds.bench.variants import TUNABLE, TUNED, TUNING_GRID
from monai_gds.errors import FileChanged, MonaiGdsError, StorageError
from monai_gds.storage import FileId, Reads, Storage, available_backends, open_storage
from monai_gds.storage.files import check_identity, naming

__all__ = ["LOADS", "STORES", "Tensors", "WrongBytes", "load", "store", "tune"]

T = TypeVar("T")

_UNIT = "GB/s"


class WrongBytes(StorageError):
    """A method got other bytes than plain Python: no figure of this run can be trusted."""


@dataclass(frozen=True)
class Tensors:
    """Settings of :func:`load` and :func:`store`.

    Args:
        methods: names of methods, in the order of the rows.
        loop: timed repetitions of each; one more comes first and does not count.
        validate: compare with what plain Python reads or wrote.
        options: for the backends that can be tuned.
    """

    methods: Sequence[str]
    loop: int = 3
    validate: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def load_python(path: Path, nbytes: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """``open().read()``, and a copy to the device."""

    def run() -> torch.Tensor:
        with open(path, "rb") as f, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the bytes are read-only, and nobody writes to them
            return torch.frombuffer(f.read(), dtype=torch.uint8).to(device)

    return run


def load_direct(path: Path, nbytes: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Threads over O_DIRECT into page-aligned memory, and a copy to the device."""
    memory = page_aligned(nbytes)

    def run() -> torch.Tensor:
        read_parallel(path, nbytes, memoryview(memory))
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes).to(device)

    return run


def load_storage(path: Path, nbytes: int, storage: Storage) -> Callable[[], torch.Tensor]:
    """One read by a backend into a tensor that it allocated."""
    dest = storage.memory(nbytes)
    reads = Reads.of(str(path), [(0, nbytes)])
    return lambda: storage.fill(reads, [dest]).wait()[0]


def store_python(path: Path, tensor: torch.Tensor) -> None:
    """A copy to the host, and ``open().write()``."""
    with naming(str(path)), open(path, "wb") as f:
        f.write(tensor.cpu().numpy().data)


#: Methods other than storage backends. Those of loads prepare what is not timed, and return the operation to time.
LOADS: dict[str, Callable[[Path, int, torch.device], Callable[[], torch.Tensor]]] = {
    "python": load_python,
    "direct": load_direct,
}
STORES = ("python",)


def load(path: Path, device: torch.device, settings: Tensors) -> Report:
    """Times loading a file into a tensor on a device by each method. Raises FileChanged if it changes meanwhile."""
    before = FileId.of(path)
    right = path.read_bytes() if settings.validate else None

    def one(method: str, storage: Storage | None) -> Row:
        if storage is None:
            operation = LOADS[method](path, before.size, device)
        else:
            operation = load_storage(path, before.size, storage)
        rates, shares = [], []
        for _ in range(settings.loop + 1):
            try:
                shares.append(cached(path))
                seconds, tensor = _timed(operation, device)
            except Exception:  # a file that became shorter raises another error in each method
                check_identity(before, FileId.of(path), str(path))
                raise
            check_identity(before, FileId.of(path), str(path))
            rates.append(before.size / seconds / 1e9)
        if right is not None:
            _compare(right, tensor.cpu().numpy().tobytes(), method, path)
        return Row(method, tuple(rates[1:]), notes={"page cache before": warmth(shares[1:])})

    return _report(_title("load", device, before.size), device, settings, one)


def store(folder: Path, nbytes: int, device: torch.device, settings: Tensors) -> Report:
    """Times storing a tensor of random bytes on a device in new files by each method. The files are removed.

    The figures are of the store alone: no method waits until data in the page cache or in the drive's own cache is on
    the drive. Rates that include this (fsync) are in a separate column.
    """
    tensor = _random(nbytes, device)

    def one(method: str, storage: Storage | None) -> Row:
        rates, shares, synced = [], [], []
        with _new_file(folder) as path:
            operation = partial(store_python, path, tensor) if storage is None else _write(storage, path, tensor)
            for _ in range(settings.loop + 1):
                path.unlink(missing_ok=True)
                seconds, _nothing = _timed(operation, device)
                shares.append(cached(path))
                rates.append(nbytes / seconds / 1e9)
                with open(path, "rb") as f:
                    begin = time.perf_counter()
                    os.fsync(f.fileno())
                    seconds += time.perf_counter() - begin
                synced.append(nbytes / seconds / 1e9)
            if settings.validate:
                _compare(tensor.cpu().numpy().tobytes(), path.read_bytes(), method, path)
        durable = f"{statistics.median(synced[1:]):.2f}"
        notes = {"in page cache after": warmth(shares[1:]), f"with fsync, {_UNIT}": durable}
        return Row(method, tuple(rates[1:]), notes=notes)

    return _report(_title("store", device, nbytes), device, settings, one)


def tune(
    folder: Path, nbytes: int, device: torch.device, loop: int, progress: Callable[[int, int], None]
) -> tuple[list[Report], dict[str, Any]]:
    """Stores and loads a tensor with every combination of :data:`~monai_gds.bench.variants.TUNING_GRID`.

    Each is timed ``loop`` times; all are tried once before any is tried again. ``progress`` is called with the number
    done and the total.

    Returns:
        The tables of loads and stores, best combination first, and the best settings: those with the greatest sum of
        both medians.

    Raises:
        BackendUnavailable: the backend does not work here.
        StorageError: no combination works.
    """
    combinations = [dict(zip(TUNING_GRID, values, strict=True)) for values in itertools.product(*TUNING_GRID.values())]
    loads: list[list[float]] = [[] for _ in combinations]
    stores: list[list[float]] = [[] for _ in combinations]
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
            else:
                loads[number].append(loaded)
                stores[number].append(stored)

    def both(number: int) -> float:
        return sum(statistics.median(rates[number]) for rates in (loads, stores) if rates[number])

    order = sorted(range(len(combinations)), key=both, reverse=True)
    if reasons[order[0]]:
        raise StorageError(reasons[order[0]])
    names = [", ".join(f"{name} {value}" for name, value in settings.items()) for settings in combinations]
    reports = []
    for verb, rates in (("load", loads), ("store", stores)):
        rows = [Row(names[n], tuple(rates[n]), reasons[n]) for n in order]
        reports.append(Report(_title(verb, device, nbytes), _UNIT, rows))
    return reports, combinations[order[0]]


def _store_and_load(folder: Path, tensor: torch.Tensor, settings: Mapping[str, Any]) -> tuple[float, float]:
    """GB/s of both. One of each comes first and does not count."""
    nbytes = tensor.numel()
    with closing(open_storage(TUNED, tensor.device, **settings)) as storage, _new_file(folder) as path:
        for _ in range(2):
            path.unlink(missing_ok=True)
            stored, _nothing = _timed(_write(storage, path, tensor), tensor.device)
            loaded, _tensor = _timed(load_storage(path, nbytes, storage), tensor.device)
    return nbytes / stored / 1e9, nbytes / loaded / 1e9


def _write(storage: Storage, path: Path, tensor: torch.Tensor) -> Callable[[], None]:
    return lambda: storage.write(str(path), [tensor])


def _title(verb: str, device: torch.device, nbytes: int) -> str:
    return f"{verb}, {device.type.upper()} tensor, {nbytes / 2**20:.0f} MiB"


def _report(title: str, device: torch.device, settings: Tensors, one: Callable[[str, Storage | None], Row]) -> Report:
    found = available_backends(device)

    def row(method: str) -> Row:
        if method not in found:
            return one(method, None)
        if not found[method]:
            remedy = f"; {found[method].remedy}" if found[method].remedy else ""
            return Row(method, reason=f"{found[method].reason}{remedy}")
        try:
            with closing(open_storage(method, device, **(settings.options if method in TUNABLE else {}))) as storage:
                return one(method, storage)
        except (FileChanged, WrongBytes):
            raise
        except MonaiGdsError as e:  # it works here, but not with this file: its device cannot be read, for instance
            return Row(method, reason=str(e))

    return Report(title, _UNIT, [row(method) for method in settings.methods], reference="python")


def _random(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)


@contextmanager
def _new_file(folder: Path) -> Iterator[Path]:
    """The path of a file to write, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="monai-gds-tensor-", dir=folder) as private:
        yield Path(private) / "tensor.bin"


def _timed(operation: Callable[[], T], device: torch.device) -> tuple[float, T]:
    begin = time.perf_counter()
    result = operation()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin, result


def _compare(right: bytes, got: bytes, method: str, path: Path) -> None:
    if got != right:
        raise WrongBytes(f"{method} got other bytes than plain Python: {path}")
