"""Questions to libraries, each run in a separate process by :mod:`monai_gds.doctor.isolation`.

A probe imports what it needs inside its function. It returns JSON types or raises; the message is shown as it is.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["dali", "default", "diagnose", "speed", "torch"]

_TRIAL_BYTES = (1 << 20) + 4096
_MEASURED_BYTES = 512 << 20
_FREE_SHARE = 10  # --measure takes at most one tenth of the free space


def torch(device: str | None) -> dict[str, Any]:
    """torch, its CUDA, its GPUs and the device that ``device`` means; ``refused`` if this machine does not have it."""
    import torch

    from monai_gds.storage import resolve_device

    found = []
    problem = target = refused = ""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            found.append({"name": gpu.name, "bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"})
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
        "target": target, "refused": refused,
    }  # fmt: skip


def dali() -> dict[str, Any]:
    """NVIDIA DALI's version."""
    from monai_gds.imagenet.dali.pipeline import dali

    return {"version": str(dali().__version__)}


def diagnose(question: str, *arguments: Any) -> dict[str, Any]:
    """Calls a function of :mod:`monai_gds.doctor.diagnosis` by its name."""
    from monai_gds.doctor import diagnosis

    answer: dict[str, Any] = getattr(diagnosis, question)(*arguments)
    return answer


def default(device: str | None, folder: str | None) -> dict[str, Any]:
    """The backend that ``auto`` chooses. It must write a file to ``folder`` and read it back."""
    import torch

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
        (read,) = storage.load(Reads.of(str(path), [(0, _TRIAL_BYTES)])).wait()
        if not torch.equal(read, written):
            raise StorageError(f"{name} read other bytes than it wrote: {path}")
    finally:
        storage.close()
        path.unlink(missing_ok=True)
    return {"backend": name, "reason": reason}


def speed(device: str | None, folder: str) -> dict[str, Any]:
    """GB/s of the drive (writes with fsync, reads with O_DIRECT), and of the default backend from the page cache."""
    import torch

    from monai_gds.storage import Reads, choose_backend, open_storage, resolve_device

    free = os.statvfs(folder)
    nbytes = min(_MEASURED_BYTES, free.f_bavail * free.f_frsize // _FREE_SHARE) // 4096 * 4096
    if nbytes < 4096:
        raise OSError("the drive is full")
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
        answer["write"] = nbytes / 1e9 / _seconds(lambda: storage.write(str(path), [data], durable=True))
        for key, read in (("cold", cold), ("warm", warm)):
            try:
                read()  # once without counting
                seconds = statistics.median([_seconds(read) for _ in range(3)])
                answer[key], answer[f"{key}_problem"] = nbytes / 1e9 / seconds, ""
            except OSError as e:  # some file systems refuse O_DIRECT
                answer[key], answer[f"{key}_problem"] = None, str(e)
    finally:
        storage.close()
        direct.close()
    return answer


def _seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
