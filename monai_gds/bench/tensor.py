"""``monai-gds bench tensor``: one tensor to and from one file, by each method, beside plain Python.

The file operations of DeepSpeed's DeepNVMe examples
(https://github.com/deepspeedai/DeepSpeedExamples/tree/master/deepnvme/file_access): load and store, CPU and GPU tensor.
Each method is one function that prepares what the examples prepare outside of their timing (an open storage, a
destination) and returns the operation that is timed. Besides ``python`` the methods are this package's backends and
``direct``, which is what the drive gives: threads over O_DIRECT without any library.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from monai_gds.bench.report import Report, Row, emit, machine
from monai_gds.errors import MonaiGdsError, StorageError
from monai_gds.storage import FileId, Read, Storage, available_backends, open_storage, resolve_device

__all__ = ["Job", "Tensors", "app", "cached", "load", "store"]

_PIECE = 8 << 20

#: Given a job, the operation to be timed: it returns the tensor that it loaded, or None when it stored one.
Method = Callable[["Job"], Callable[[], torch.Tensor | None]]


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
    room = mmap.mmap(-1, job.nbytes + mmap.PAGESIZE)
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
        with open(job.path, "wb") as f:
            f.write(tensor.cpu().numpy().data)

    return run


def store_storage(job: Job) -> Callable[[], None]:
    """One write of a backend."""
    storage, tensor = _opened(job), _tensor(job)

    def run() -> None:
        storage.write(str(job.path), [tensor])

    return run


_LOADS: dict[str, Method] = {"python": load_python, "direct": load_direct}
_STORES: dict[str, Method] = {"python": store_python}


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


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def cached(path: Path) -> float:
    """The share of a file that lies in the page cache, without touching it.

    Returns:
        0 to 1. The kernel tells only who may write to the file; to others all of it seems cached.
    """
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with open(path, "rb") as f, mmap.mmap(f.fileno(), size, access=mmap.ACCESS_COPY) as mapping:
        anchor = ctypes.c_char.from_buffer(mapping)
        flags = (ctypes.c_ubyte * pages)()
        code = _libc.mincore(ctypes.addressof(anchor), size, flags)
        del anchor
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return sum(flag & 1 for flag in flags) / pages


def _in_words(shares: Sequence[float]) -> str:
    low, high = min(shares), max(shares)
    if high < 0.02:
        return "cold"
    if low > 0.98:
        return "warm"
    return f"{low:.0%} to {high:.0%} warm"


def load(path: Path, device: torch.device, asked: Tensors) -> Report:
    """Times loading ``path`` into a tensor on ``device`` by each method.

    Raises:
        FileChanged: the file became another one meanwhile.
        StorageError: a method did not load the right bytes.
    """
    before = FileId.of(path)
    right = path.read_bytes() if asked.validate else None
    heading = "page cache before"

    def one(method: str, storage: Storage | None) -> Row:
        operation = _LOADS.get(method, load_storage)(Job(path, device, before.size, storage=storage))
        rates, shares = [], []
        for _ in range(asked.loop + 1):
            shares.append(cached(path))
            seconds, tensor = _timed(operation, device)
            before.check(FileId.of(path), str(path))
            rates.append(before.size / seconds / 1e9)
        if right is not None and tensor is not None:
            _compare(right, tensor.cpu().numpy().tobytes(), method, path)
        return Row(method, tuple(rates[1:]), notes={heading: _in_words(shares[1:])})

    return _report(f"load, {device.type.upper()} tensor, {before.size / 2**20:.0f} MiB", device, asked, one)


def store(folder: Path, nbytes: int, device: torch.device, asked: Tensors) -> Report:
    """Times storing a tensor of ``nbytes`` random bytes on ``device`` into new files in ``folder`` by each method.

    The files are removed. No method waits for the drive to have what is in the page cache or in its own cache.

    Raises:
        StorageError: a method did not store the right bytes.
    """
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    heading = "in page cache after"

    def one(method: str, storage: Storage | None) -> Row:
        rates, shares = [], []
        with tempfile.TemporaryDirectory(prefix="monai-gds-tensor-", dir=folder) as private:
            path = Path(private) / "tensor.bin"
            operation = _STORES.get(method, store_storage)(Job(path, device, nbytes, tensor, storage))
            for _ in range(asked.loop + 1):
                path.unlink(missing_ok=True)
                seconds, _nothing = _timed(operation, device)
                shares.append(cached(path))
                rates.append(nbytes / seconds / 1e9)
            if asked.validate:
                _compare(tensor.cpu().numpy().tobytes(), path.read_bytes(), method, path)
        return Row(method, tuple(rates[1:]), notes={heading: _in_words(shares[1:])})

    return _report(f"store, {device.type.upper()} tensor, {nbytes / 2**20:.0f} MiB", device, asked, one)


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
        finally:
            storage.close()
    return Report(title, "GB/s", rows, reference="python")


def _timed(operation: Callable[[], torch.Tensor | None], device: torch.device) -> tuple[float, torch.Tensor | None]:
    begin = time.perf_counter()
    result = operation()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin, result


def _compare(right: bytes, got: bytes, method: str, path: Path) -> None:
    if got != right:
        raise StorageError(f"{method} got other bytes than plain Python: {path}")


# The command.

app = typer.Typer(no_args_is_help=True, help="One tensor to and from one file, by each method.")

_MethodOption = Annotated[
    list[str] | None, typer.Option("--method", help="Only this one; may be repeated. Default: all of them.")
]
_DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda:N; default: the CPU, and a GPU if there is one.")]
_LoopOption = Annotated[int, typer.Option(min=1, help="How many times each method is timed.")]
_ValidateOption = Annotated[bool, typer.Option("--validate", help="Compare with what plain Python reads or wrote.")]
_BlockOption = Annotated[int | None, typer.Option(help="DeepNVMe: bytes of one transfer.")]
_DepthOption = Annotated[int | None, typer.Option(help="DeepNVMe: transfers in flight, each thread.")]
_TunedOption = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="DeepNVMe: what ds_nvme_tune printed.")
]
_JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_PlotOption = Annotated[Path | None, typer.Option(help="Draw a bar chart into this file.")]


@app.command("load", epilog="Example: monai-gds bench tensor load --input-file big.bin --loop 3 --validate")
def load_command(
    input_file: Annotated[Path, typer.Option(exists=True, dir_okay=False, readable=True, help="The file to load.")],
    loop: _LoopOption = 3,
    validate: _ValidateOption = False,
    method: _MethodOption = None,
    device: _DeviceOption = None,
    block_size: _BlockOption = None,
    queue_depth: _DepthOption = None,
    tuned: _TunedOption = None,
    as_json: _JsonOption = False,
    plot: _PlotOption = None,
) -> None:
    """A file into a tensor: plain Python, DeepNVMe's bounce buffer and GPUDirect, and the other backends."""
    if input_file.stat().st_size == 0:
        raise typer.BadParameter(f"{input_file} is empty", param_hint="--input-file")
    devices = _devices(device)
    asked = _asked(method, loop, validate, block_size, queue_depth, tuned, first=list(_LOADS))
    _run(lambda target: load(input_file, target, asked), devices, as_json, plot)


@app.command("store", epilog="Example: monai-gds bench tensor store --nvme-folder /mnt/nvme --mb-size 1024")
def store_command(
    nvme_folder: Annotated[Path, typer.Option(exists=True, file_okay=False, help="A folder on the drive to measure.")],
    mb_size: Annotated[int, typer.Option(min=1, help="MiB of the tensor.")] = 1024,
    loop: _LoopOption = 3,
    validate: _ValidateOption = False,
    method: _MethodOption = None,
    device: _DeviceOption = None,
    block_size: _BlockOption = None,
    queue_depth: _DepthOption = None,
    tuned: _TunedOption = None,
    as_json: _JsonOption = False,
    plot: _PlotOption = None,
) -> None:
    """A tensor into a file: plain Python, DeepNVMe's bounce buffer and GPUDirect, and the other backends."""
    _check_folder(nvme_folder, mb_size << 20)
    devices = _devices(device)
    asked = _asked(method, loop, validate, block_size, queue_depth, tuned, first=list(_STORES))
    _run(lambda target: store(nvme_folder, mb_size << 20, target, asked), devices, as_json, plot)


def _check_folder(folder: Path, nbytes: int) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise typer.BadParameter(f"cannot write to {folder}: {e.strerror}", param_hint="--nvme-folder") from None
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise typer.BadParameter(
            f"{folder} has {free >> 20} MiB free, and {nbytes >> 20} MiB are to be stored", param_hint="--nvme-folder"
        )


def _devices(device: str | None) -> list[torch.device]:
    if device is None:
        return [torch.device("cpu"), *([resolve_device("cuda")] if torch.cuda.is_available() else [])]
    try:
        return [resolve_device(device)]
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint="--device") from None


def _asked(
    methods: list[str] | None,
    loop: int,
    validate: bool,
    block_size: int | None,
    queue_depth: int | None,
    tuned: Path | None,
    *,
    first: list[str],
) -> Tensors:
    from monai_gds.storage.deepnvme import Settings

    known = [*first, *available_backends("cpu")]
    for name in methods or []:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint="--method")
    given = {"block_size": block_size, "queue_depth": queue_depth}
    try:
        Settings.chosen(tuned, given)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from None
    options = {name: value for name, value in {**given, "tuned": tuned}.items() if value is not None}
    return Tensors(methods or known, loop, validate, options)


def _run(
    measure: Callable[[torch.device], Report], devices: Sequence[torch.device], as_json: bool, plot: Path | None
) -> None:
    try:
        reports = [measure(device) for device in devices]
        emit(reports, as_json=as_json, plot=plot, about=machine(devices[-1]))
    except (MonaiGdsError, OSError, ImportError) as e:
        Console(stderr=True).print(f"monai-gds: {e}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
