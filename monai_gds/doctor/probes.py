"""What libraries tell of themselves, asked in a process of their own: one that hangs or dies takes nobody with it.

The parent (:mod:`monai_gds.doctor.asking`) starts ``python -m monai_gds.doctor.probes REQUEST`` and reads one JSON
object a line from the descriptor that the request names: ``{"begin": step}`` before a step, then its ``answer`` or its
``error``, and ``{"end": true}`` behind the last one. Libraries may print what they like.

Every probe is a function without arguments that returns JSON types, or raises: the message is shown as it is.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from monai_gds.doctor.asking import Request
from monai_gds.errors import MonaiGdsError

__all__: list[str] = []

Probe = Callable[[], dict[str, Any]]

_TRIAL_BYTES = (1 << 20) + 4096
_MEASURED_BYTES = 512 << 20
_FREE_SHARE = 10  # --measure takes no more than one tenth of what is free


def steps(request: Request) -> Iterator[tuple[str, Probe]]:
    """Every step by its name, in order. What is needed to list them is imported when its turn comes."""
    yield "torch", functools.partial(_torch, request.device)
    yield "dali", _dali
    yield "io_uring", _io_uring
    yield "libxnvme", _libxnvme
    yield "blocks", functools.partial(_blocks, request.directory)
    if not request.only or any(name.startswith("backend ") for name in request.only):
        from monai_gds.storage.registry import backend_names

        for name in backend_names():
            yield f"backend {name}", functools.partial(_backend, name, request.device)
    yield "default", functools.partial(_default, request.device, request.folder)
    if "cufile" in request.only:
        yield "cufile", functools.partial(_cufile, request.device, request.folder)
    if "speed" in request.only:
        yield "speed", functools.partial(_speed, request.device, request.folder)


def main(request: Request) -> None:
    """Goes through the steps."""
    with open(request.descriptor, "w", buffering=1) as out:

        def say(**message: Any) -> None:
            print(json.dumps(message), file=out)

        for name, probe in steps(request):
            if name in request.done or (request.only and name not in request.only):
                continue
            say(begin=name)
            try:
                answer = probe()
            except Exception as e:
                known = isinstance(e, (MonaiGdsError, OSError))  # these are sentences by themselves
                say(error=str(e) if known else f"{type(e).__name__}: {e}")
            else:
                say(answer=answer)
                if answer.get("refused"):  # nobody can serve a device that is not here: no need to ask
                    break
        say(end=True)
    os._exit(0)  # what libraries do at the end of a process is of no interest


def _torch(device: str | None) -> dict[str, Any]:
    import torch

    from monai_gds.storage import resolve_device

    found: list[dict[str, Any]] = []
    problem = ""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(index)
            found.append({"name": of.name, "bytes": of.total_memory, "capability": f"{of.major}.{of.minor}"})
    elif torch.version.cuda is not None:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as e:
            problem = str(e).splitlines()[0]
    target = refused = ""
    try:
        target = str(resolve_device(device))
    except ValueError as e:  # it was asked for a device that is not here: nothing is wrong with torch
        refused = str(e)
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "devices": found,
        "problem": problem,
        "target": target,
        "refused": refused,
    }


def _dali() -> dict[str, Any]:
    from monai_gds.imagenet.pipeline import dali

    return {"version": str(dali().__version__)}


def _io_uring() -> dict[str, Any]:
    from monai_gds.storage._uring import FILES, Ring

    Ring()
    return {"files": FILES}


def _libxnvme() -> dict[str, Any]:
    from monai_gds.storage import _libxnvme

    library = _libxnvme.load()
    return {"version": library.version(), "drivers": library.drivers(), "found": library.describe()}


def _blocks(directory: str) -> dict[str, Any]:
    """The disk below a directory, and whether it may be read: asked by opening it, as who reads blocks does."""
    from monai_gds.extents import FileSystem

    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fs = FileSystem.of(fd, directory)
    finally:
        os.close(fd)
    problem = ""
    try:
        os.close(fs.disk.open())
    except OSError as e:
        problem = os.strerror(e.errno) if e.errno else str(e)
    return {"kind": fs.kind, "disk": fs.disk.path, "readable": not problem, "problem": problem}


def _backend(name: str, device: str | None) -> dict[str, Any]:
    from monai_gds.storage.base import CUDA_ONLY
    from monai_gds.storage.registry import probe_backend

    found = probe_backend(name, device)
    return {**asdict(found), "of_use": found.reason != CUDA_ONLY}


def _default(device: str | None, folder: str | None) -> dict[str, Any]:
    """What ``auto`` takes, and whether it writes and reads a file."""
    from monai_gds.storage import choose_backend, resolve_device

    target = resolve_device(device)
    name, reason = choose_backend("auto", target)
    if folder is not None:
        _round_trip(name, str(target), Path(folder) / "trial.bin")
    return {"backend": name, "reason": reason}


def _round_trip(backend: str, device: str, path: Path) -> None:
    import torch

    from monai_gds.errors import StorageError
    from monai_gds.storage import open_storage

    storage = open_storage(backend, device)
    written = torch.randint(0, 256, (_TRIAL_BYTES,), dtype=torch.uint8).to(storage.device)
    try:
        storage.write(str(path), [written])
        (read,) = storage.load(str(path), [(0, _TRIAL_BYTES)], mapped=False).wait()
        if not torch.equal(read, written):
            raise StorageError(f"{backend} read other bytes than it wrote: {path}")
    finally:
        storage.close()
        path.unlink(missing_ok=True)


def _cufile(device: str | None, folder: str | None) -> dict[str, Any]:
    """Has cuFile itself write and read a file; the environment must keep KvikIO from its own ways."""
    import kvikio
    import torch

    from monai_gds.storage import resolve_device

    assert folder is not None, "this step is for a folder that can be written to"
    target = resolve_device(device)
    path = Path(folder) / "cufile.bin"
    written = torch.randint(0, 256, (_TRIAL_BYTES,), dtype=torch.uint8).to(target)
    read = torch.empty_like(written)
    torch.cuda.synchronize(target)
    with torch.cuda.device(target), kvikio.CuFile(path, "w+") as file:
        count = file.write(written), file.read(read)
    if count != (_TRIAL_BYTES, _TRIAL_BYTES) or not torch.equal(read, written):
        raise RuntimeError(f"cuFile wrote and read {count} of {_TRIAL_BYTES} bytes, or other ones")
    return {"version": kvikio.__version__}


def _speed(device: str | None, folder: str | None) -> dict[str, Any]:
    """GB/s of the drive (fsync behind the write, reads with O_DIRECT), and of the default backend in the page cache."""
    import torch

    from monai_gds.bench.tensor import Tensors, load
    from monai_gds.storage import choose_backend, open_storage, resolve_device

    assert folder is not None, "this step is for a folder that can be written to"
    free = os.statvfs(folder)
    nbytes = min(_MEASURED_BYTES, free.f_bavail * free.f_frsize // _FREE_SHARE) // 4096 * 4096
    if nbytes < 4096:
        raise OSError("the drive is full")
    path, target = Path(folder) / "speed.bin", resolve_device(device)
    backend, _ = choose_backend("auto", target)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).to(target)
    storage = open_storage(backend, target)
    try:
        begin = time.perf_counter()
        storage.write(str(path), [data], durable=True)
        seconds = time.perf_counter() - begin
    finally:
        storage.close()
    answer: dict[str, Any] = {"bytes": nbytes, "write": nbytes / seconds / 1e9, "backend": backend}
    for name, method, to in (("cold", "direct", torch.device("cpu")), ("warm", backend, target)):
        try:
            (row,) = load(path, to, Tensors([method])).rows
            answer[name], answer[f"{name}_problem"] = statistics.median(row.samples), ""
        except OSError as e:  # tmpfs and some network file systems refuse O_DIRECT
            answer[name], answer[f"{name}_problem"] = None, str(e)
    return answer


if __name__ == "__main__":
    main(Request(**json.loads(sys.argv[1])))
