"""Questions to libraries and devices, which :mod:`monai_gds.doctor.isolation` asks in another process.

A probe imports what it needs inside its function. It returns JSON types or raises; the message is shown as it is.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict
from pathlib import Path
from timeit import repeat, timeit
from typing import Any

_TRIAL_BYTES = (1 << 20) + 4096
_MEASURED_BYTES = 512 << 20
_FREE_SHARE = 10  # --measure takes at most one tenth of the free space


def torch(device: str | None) -> dict[str, Any]:
    """torch, its CUDA, its GPUs and the device that ``device`` means; ``refused`` if this machine does not have it.

    The names of all ``backends`` too, which need torch.
    """
    import torch

    from monai_gds.storage import backend_names, resolve_device
    from monai_gds.storage.staging import pci_address

    found = []
    problem = target = refused = ""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            pci = pci_address(torch.device("cuda", index))
            about = {"name": gpu.name, "bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}", "pci": pci}
            found.append(about)
    elif torch.version.cuda is not None:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as e:
            problem = str(e).splitlines()[0]
    try:
        target = str(resolve_device(device))
    except ValueError as e:  # nothing is wrong with torch
        refused = str(e)
    return {
        "version": str(torch.__version__), "cuda": torch.version.cuda, "devices": found, "problem": problem,
        "target": target, "refused": refused, "backends": backend_names(),
    }  # fmt: skip


def dali() -> dict[str, Any]:
    """NVIDIA DALI's version."""
    from monai_gds.imagenet.dali.pipeline import dali

    return {"version": str(dali().__version__)}


def tiles() -> dict[str, Any]:
    """Why records in tiles cannot be packed (``blosc2``), and not unpacked on a GPU (``nvcomp``); empty if they can."""
    from monai_gds.tiles import blosc, device

    return {"blosc2": blosc.why_not() or "", "nvcomp": device.why_not() or ""}


def backend(name: str, device: str | None) -> dict[str, Any]:
    """Whether a backend works here: ``ok``, ``reason``, ``remedy``; whether it serves the device (``of_use``), and
    whether ``auto`` would choose it (``by_default``).
    """
    from monai_gds.storage.backend import CUDA_ONLY
    from monai_gds.storage.registry import AUTO, probe_backend, resolve_device

    found = probe_backend(name, device)
    by_default = name in AUTO[resolve_device(device).type]
    return {**asdict(found), "of_use": found.reason != CUDA_ONLY, "by_default": by_default}


def io_uring() -> dict[str, Any]:
    """How many small ``files`` are read per system call. Raises OSError where there is no io_uring that fits."""
    from monai_gds import limits
    from monai_gds.storage.plain.uring import Ring

    Ring()
    return {"files": limits.RING_FILES}


def libxnvme() -> dict[str, Any]:
    """The library's ``version``, its ``drivers`` and where it was ``found``; or the ``problem`` and its ``remedy``."""
    from monai_gds.errors import BackendUnavailable
    from monai_gds.storage.xnvme import libxnvme as binding

    try:
        library = binding.load()
    except BackendUnavailable as e:
        return {"problem": str(e), "remedy": binding.HOW_TO_GET_IT}
    drivers = {"drivers": library.drivers(), "sharing": library.sharing_drivers()}
    return {"version": library.version(), "found": library.describe(), **drivers}


def disk(directory: str) -> dict[str, Any]:
    """The ``disk`` below a directory, whether it is ``readable`` (tried by opening it), the ``problem`` and ``remedy``.

    Raises NotMappable where the directory's files have no plain place on one disk.
    """
    from monai_gds.base.file_systems import opened
    from monai_gds.storage.blockmap.extents import FileSystem, how_to_be_let_read

    with opened(directory, os.O_DIRECTORY) as fd:
        fs = FileSystem.of(fd, directory)
    problem = remedy = ""
    for drive in fs.disk.drives:
        try:
            os.close(drive.open())
        except OSError as e:
            problem = os.strerror(e.errno) if e.errno else str(e)
            remedy = how_to_be_let_read(drive.path)
    disk = fs.disk.path
    if fs.disk.members:
        disk += f", which lies on {', '.join(drive.path for drive in fs.disk.members)}"
    return {"kind": fs.kind, "disk": disk, "readable": not problem, "problem": problem, "remedy": remedy}


def kvikio() -> dict[str, Any]:
    """Whether KvikIO lets the backend ``kvikio`` ``use`` cuFile. Raises where KvikIO is missing."""
    from monai_gds.storage.plain.kvikio import use_of_cufile

    return {"use": use_of_cufile()}


def cufile(device: str | None, folder: str) -> dict[str, Any]:
    """Writes and reads a file through cuFile. ``tried`` is False where KvikIO does not work.

    The environment must have ``KVIKIO_COMPAT_MODE=OFF``, so that KvikIO does not fall back to its own threads. Raises
    RuntimeError where cuFile refuses the file, or returns other bytes than were written.
    """
    import torch

    from monai_gds.storage.registry import probe_backend, resolve_device

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


def default(device: str | None, folder: str | None) -> dict[str, Any]:
    """The backend that ``auto`` chooses. It must write a file to ``folder`` and read it back; what ``served`` that."""
    import torch

    from monai_gds.base import stages
    from monai_gds.errors import StorageError
    from monai_gds.storage import Reads, choose_backend, open_storage, resolve_device

    target = resolve_device(device)
    name, reason = choose_backend("auto", target)
    if folder is None:
        return {"backend": name, "reason": reason}
    path = Path(folder) / "trial.bin"
    storage = open_storage(name, target)
    written = torch.randint(0, 256, (_TRIAL_BYTES,), dtype=torch.uint8).to(target)
    try:
        storage.write(str(path), [written])
        with stages.measured(watch := stages.Watch()):
            (read,) = storage.load(Reads.of(str(path), [(0, _TRIAL_BYTES)])).wait()
        if not torch.equal(read, written):
            raise StorageError(f"{name} read other bytes than it wrote: {path}")
    finally:
        storage.close()
        path.unlink(missing_ok=True)
    return {"backend": name, "reason": reason, "served": next((way for way in stages.WAYS if watch.counts[way]), "")}


def speed(device: str | None, folder: str) -> dict[str, Any]:
    """GB/s of the drive (writes with fsync, reads with O_DIRECT), and of the default backend from the page cache."""
    import torch

    from monai_gds.storage import Reads, choose_backend, open_storage, resolve_device

    free = os.statvfs(folder)
    nbytes = min(_MEASURED_BYTES, free.f_bavail * free.f_frsize // _FREE_SHARE) // 4096 * 4096
    if nbytes < 1 << 20:
        raise OSError("a tenth of the free space is less than 1 MiB")
    path, target = Path(folder) / "speed.bin", resolve_device(device)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).to(target)
    name, _ = choose_backend("auto", target)
    storage, direct = open_storage(name, target), open_storage("posix", "cpu", direct_io=True)
    reads, room = Reads.of(str(path), [(0, nbytes)]), direct.memory(nbytes)

    def cold() -> None:
        direct.fill(reads, [room]).wait()

    def warm() -> None:
        storage.fill(reads, [data]).wait()
        if target.type == "cuda":
            torch.cuda.synchronize(target)

    answer: dict[str, Any] = {"bytes": nbytes, "backend": name}
    try:
        answer["write"] = nbytes / 1e9 / timeit(lambda: storage.write(str(path), [data], durable=True), number=1)
        for key, read in (("cold", cold), ("warm", warm)):
            try:
                seconds = statistics.median(repeat(read, number=1, repeat=4)[1:])
                answer[key], answer[f"{key}_problem"] = nbytes / 1e9 / seconds, ""
            except OSError as e:  # some file systems refuse O_DIRECT
                answer[key], answer[f"{key}_problem"] = None, str(e)
    finally:
        storage.close()
        direct.close()
    return answer
