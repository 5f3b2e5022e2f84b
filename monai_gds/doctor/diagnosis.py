"""What the doctor shows about backends, and about the libraries and devices below them. All results are JSON types."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from monai_gds import limits
from monai_gds.errors import BackendUnavailable
from monai_gds.storage.backend import CUDA_ONLY
from monai_gds.storage.registry import backend_names, probe_backend, resolve_device

__all__ = ["BUILDABLE", "backend", "backends", "build", "cufile", "disk", "io_uring", "libxnvme"]

#: Backends with operators that can be compiled ahead of their first use.
BUILDABLE = ("deepnvme",)

_TRIAL_BYTES = (1 << 20) + 4096


def backends() -> dict[str, Any]:
    """The ``names`` of all backends."""
    return {"names": backend_names()}


def backend(name: str, device: str | None) -> dict[str, Any]:
    """Whether a backend works here: ``ok``, ``reason``, ``remedy``, and ``of_use``: whether it serves the device."""
    found = probe_backend(name, device)
    return {**asdict(found), "of_use": found.reason != CUDA_ONLY}


def io_uring() -> dict[str, Any]:
    """How many small ``files`` are read per system call. Raises OSError where there is no io_uring that fits."""
    from monai_gds.storage.plain.uring import Ring

    Ring()
    return {"files": limits.RING_FILES}


def libxnvme() -> dict[str, Any]:
    """The library's ``version``, its ``drivers`` and where it was ``found``; or the ``problem`` and its ``remedy``."""
    from monai_gds.storage.xnvme import libxnvme as binding

    try:
        library = binding.load()
    except BackendUnavailable as e:
        return {"problem": str(e), "remedy": binding.HOW_TO_GET_IT}
    return {"version": library.version(), "drivers": library.drivers(), "found": library.describe()}


def disk(directory: str) -> dict[str, Any]:
    """The ``disk`` below a directory, whether it is ``readable`` (tried by opening it), the ``problem`` and ``remedy``.

    Raises NotMappable where the directory's files have no plain place on one disk.
    """
    from monai_gds.storage.blockmap.extents import FileSystem, how_to_be_let_read

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
    remedy = how_to_be_let_read(fs.disk.path) if problem else ""
    return {"kind": fs.kind, "disk": fs.disk.path, "readable": not problem, "problem": problem, "remedy": remedy}


def cufile(device: str | None, folder: str) -> dict[str, Any]:
    """Writes and reads a file through cuFile. ``tried`` is False where KvikIO does not work.

    The environment must have ``KVIKIO_COMPAT_MODE=OFF``, so that KvikIO does not fall back to its own threads. Raises
    RuntimeError where cuFile refuses the file, or returns other bytes than were written.
    """
    if not probe_backend("kvikio", device):
        return {"tried": False}
    import kvikio

    target = resolve_device(device)
    path = Path(folder) / "cufile.bin"
    written = torch.randint(0, 256, (_TRIAL_BYTES,), dtype=torch.uint8).to(target)
    read = torch.empty_like(written)
    torch.cuda.synchronize(target)
    with torch.cuda.device(target), kvikio.CuFile(path, "w+") as file:
        count = file.write(written), file.read(read)
    if count != (_TRIAL_BYTES, _TRIAL_BYTES) or not torch.equal(read, written):
        raise RuntimeError(f"cuFile wrote and read {count} of {_TRIAL_BYTES} bytes, or read other bytes than it wrote")
    return {"tried": True, "version": kvikio.__version__}


def build(name: str, say: Callable[[str], None]) -> list[Path]:
    """Compiles the operators of a backend in :data:`BUILDABLE`, and returns their folders.

    Raises:
        BackendUnavailable: a package or tool is missing, or the compiler failed.
    """
    assert name in BUILDABLE
    from monai_gds.storage.deepnvme.build import build_ahead

    return build_ahead(say)
