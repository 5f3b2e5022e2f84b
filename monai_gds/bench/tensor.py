"""``monai-gds bench tensor``: one tensor to and from one file, by each method and by plain Python.

The operations are those of DeepSpeed's DeepNVMe examples
(https://github.com/deepspeedai/DeepSpeedExamples/tree/master/deepnvme/file_access): load and store, CPU and GPU tensor.
The examples prepare an open storage and a destination outside of their timing, and so do the methods here. Methods are
``python``, ``direct`` (threads that read past the page cache: what the drive gives) and this package's backends.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from monai_gds.bench.pagecache import cached, warmth
from monai_gds.bench.processor import synchronize
from monai_gds.bench.report import Report, Row
from monai_gds.errors import FileChanged, MonaiGdsError, StorageError
from monai_gds.storage import FileId, Reads, Storage, available_backends, open_storage
from monai_gds.storage.files import check_identity, naming

T = TypeVar("T")

_UNIT = "GB/s"

#: Methods other than storage backends, by what is measured.
LOADS = ("python", "direct")
STORES = ("python",)

#: The backends that take :attr:`Tensors.options`.
TUNABLE = ("deepnvme", "deepnvme-gds")


class WrongBytes(StorageError):
    """A method got other bytes than plain Python: no figure of this run can be trusted."""


@dataclass(frozen=True)
class Tensors:
    """Settings of :func:`load` and :func:`store`."""

    methods: Sequence[str]  # names of methods, in the order of the rows
    loop: int = 3  # timed repetitions of each; one more comes first and does not count
    validate: bool = False  # compare with what plain Python reads or wrote
    options: dict[str, Any] = field(default_factory=dict)  # for the backends in TUNABLE


def load_python(path: Path, device: torch.device) -> Callable[[], torch.Tensor]:
    """``open().read()``, and a copy to the device."""

    def run() -> torch.Tensor:
        with open(path, "rb") as f, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the bytes are read-only, and nobody writes to them
            return torch.frombuffer(f.read(), dtype=torch.uint8).to(device)

    return run


def load_storage(path: Path, nbytes: int, storage: Storage) -> Callable[[], torch.Tensor]:
    """One read by a backend into a tensor that it allocated."""
    dest, reads = storage.memory(nbytes), Reads.of(str(path), [(0, nbytes)])
    return lambda: storage.fill(reads, [dest]).wait()[0]


def store_python(path: Path, tensors: Sequence[torch.Tensor]) -> None:
    """A copy to the host, and ``open().write()``."""
    with naming(str(path)), open(path, "wb") as f:
        f.writelines(tensor.cpu().numpy().data for tensor in tensors)


def load(path: Path, device: torch.device, settings: Tensors) -> Report:
    """Times loading a file into a tensor on a device by each method. Raises FileChanged if it changes meanwhile."""
    before = FileId.of(path)
    right = path.read_bytes() if settings.validate else None

    def one(method: str, storage: Storage | None) -> Row:
        operation = load_python(path, device) if storage is None else load_storage(path, before.size, storage)
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

    return _report(title("load", device, before.size), device, settings, one)


def store(folder: Path, nbytes: int, device: torch.device, settings: Tensors) -> Report:
    """Times storing a tensor of random bytes on a device in new files by each method. The files are removed.

    The figures are of the store alone: no method waits until data in the page cache or in the drive's own cache is on
    the drive. Rates that include this (fsync) are in a separate column.
    """
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(device)

    def one(method: str, storage: Storage | None) -> Row:
        rates, shares, synced = [], [], []
        with tempfile.TemporaryDirectory(prefix="monai-gds-tensor-", dir=folder) as private:
            path = Path(private) / "tensor.bin"
            operation = partial(store_python, path) if storage is None else partial(storage.write, str(path))
            for _ in range(settings.loop + 1):
                path.unlink(missing_ok=True)
                seconds, _nothing = _timed(lambda: operation([tensor]), device)
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

    return _report(title("store", device, nbytes), device, settings, one)


def title(verb: str, device: torch.device, nbytes: int) -> str:
    """The title of a report."""
    return f"{verb}, {device.type.upper()} tensor, {nbytes / 2**20:.0f} MiB"


def _report(heading: str, device: torch.device, settings: Tensors, one: Callable[[str, Storage | None], Row]) -> Report:
    found = available_backends(device)

    def row(method: str) -> Row:
        if method == "python":
            return one(method, None)
        backend, options = ("posix", {"direct_io": True}) if method == "direct" else (method, {})
        if not found[backend]:
            remedy = f"; {found[backend].remedy}" if found[backend].remedy else ""
            return Row(method, reason=f"{found[backend].reason}{remedy}")
        try:
            options = settings.options if method in TUNABLE else options
            with closing(open_storage(backend, device, **options)) as storage:
                return one(method, storage)
        except (FileChanged, WrongBytes):
            raise
        except MonaiGdsError as e:  # it works here, but not with this file: its device cannot be read, for instance
            return Row(method, reason=str(e))

    return Report(heading, _UNIT, [row(method) for method in settings.methods], reference="python")


def _timed(operation: Callable[[], T], device: torch.device) -> tuple[float, T]:
    begin = time.perf_counter()
    result = operation()
    synchronize(device)
    return time.perf_counter() - begin, result


def _compare(right: bytes, got: bytes, method: str, path: Path) -> None:
    if got != right:
        raise WrongBytes(f"{method} got other bytes than plain Python: {path}")
