"""The kernel of xnvme-bam on this machine's processor, and the backend over it for a CPU target."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from monai_gds.storage.backend import Availability
from monai_gds.storage.xnvme.bam import queues
from monai_gds.storage.xnvme.bam.bam import XnvmeBamBackend

_SHIM = Path(__file__).with_name("host_cuda.cpp")


@cache
def compiled() -> Any:
    """The kernel's entry."""
    if shutil.which("g++") is None:
        pytest.skip("this machine has no g++ to compile the kernel for the host with")
    folder = tempfile.mkdtemp(prefix="monai-gds-bam-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = Path(folder) / "bam.so"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["g++", *flags, f'-DKERNEL="{queues.SOURCE}"', "-o", str(target), str(_SHIM)], check=True)
    entry = ctypes.CDLL(str(target)).read_blocks
    entry.argtypes = [ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return entry


class HostKernel(queues.CudaKernel):
    """Runs it with so many threads per block."""

    def __init__(self, threads: int = 1) -> None:
        self._entry, self._threads = compiled(), threads
        self._running: threading.Thread | None = None

    def launch(self, batch: int, queues: int) -> None:
        self._running = threading.Thread(target=self._entry, args=(batch, queues, self._threads))
        self._running.start()

    def done(self) -> bool:
        assert self._running is not None, "it was launched"
        return not self._running.is_alive()


class HostBamBackend(XnvmeBamBackend):
    """The backend, but for a CPU target."""

    name = "xnvme-bam"
    needs_cuda = False

    def _kernel(self) -> HostKernel:
        return HostKernel()

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return Availability(True, "on the host")
