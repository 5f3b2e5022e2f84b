"""The libxnvme that a test runs over: the machine's own, or the test double, compiled when it is first asked for."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from monai_gds.errors import BackendUnavailable
from monai_gds.storage.xnvme import libxnvme

SOURCE = Path(__file__).parent / "double.c"

#: What there is to choose from. "next" has the options of xNVMe's development branch.
KINDS = ("real", "double", "double next", "double gpu")

#: The faults that the double can be told to have, and what it counts, in the order of its source.
FAULTS = (
    "NONE", "SHORT_READ", "BAD_STATUS", "ERRNO_STATUS", "FULL_AGAIN", "FULL_BUSY", "REVERSE", "NO_MEMORY", "WRITABLE",
    "BUFFERED", "NO_GEOMETRY", "NO_IO_URING", "BROKEN_QUEUE", "REFUSED", "STUCK", "LOSES", "UNOPENED", "HEAP",
)  # fmt: skip
COUNTS = [
    "reads", "buffers", "writes", "devices", "most_in_flight", "largest_read", "gpu_id", "queues",
    "nsid", "heap_mib", "shm_id",
]  # fmt: skip


@cache
def compiled(kind: str) -> str:
    """Path of the double, compiled."""
    if shutil.which("cc") is None:
        pytest.skip("this machine has no C compiler to build the test double with")
    flags = {"double": [], "double next": ["-DNEXT"], "double gpu": ["-DCUDA"]}[kind]
    folder = tempfile.mkdtemp(prefix="monai-gds-double-")
    atexit.register(_remove_as, os.getpid(), folder)
    target = Path(folder) / "libxnvme.so"
    cudart = _loaded_cudart() if kind == "double gpu" else []
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags, "-o", str(target), str(SOURCE)]
    subprocess.run([*command, *cudart], check=True)
    return str(target)


def _remove_as(pid: int, folder: str) -> None:
    if os.getpid() == pid:  # forked children use it too, and end earlier
        shutil.rmtree(folder, ignore_errors=True)


def _loaded_cudart() -> list[str]:
    """The CUDA runtime that torch has loaded, as arguments for the compiler."""
    torch.cuda.init()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
    if not mapped:
        pytest.skip("torch brings its CUDA runtime linked in, so the double cannot share it")
    path = sorted(mapped)[0]
    return [path, f"-Wl,-rpath,{os.path.dirname(path)}"]


#: The real library that the tests were started with.
NAMED = os.environ.get(libxnvme.ENVIRONMENT)


@contextmanager
def using(kind: str) -> Iterator[None]:
    """Makes the backends find this library."""
    with pytest.MonkeyPatch.context() as patch:
        if kind != "real":
            patch.setenv(libxnvme.ENVIRONMENT, compiled(kind))
        elif NAMED is None:  # a fixture around this may have named a double
            patch.delenv(libxnvme.ENVIRONMENT, raising=False)
        else:
            patch.setenv(libxnvme.ENVIRONMENT, NAMED)
        try:
            libxnvme.load()
        except BackendUnavailable as e:
            if kind != "real" or libxnvme.ENVIRONMENT in os.environ:  # one that was named is to be tested
                raise
            pytest.skip(f"no real libxnvme on this machine: {e}")
        yield


class Double:
    """The handles of a double."""

    def __init__(self, kind: str = "double") -> None:
        self._library = ctypes.CDLL(compiled(kind))
        self._library.double_count.restype = ctypes.c_long
        self._library.double_fail.argtypes = [ctypes.c_int, ctypes.c_long]

    def fail(self, fault: str, value: int = 0) -> None:
        """From now on it fails so."""
        self._library.double_fail(FAULTS.index(fault), value)

    def count(self, what: str) -> int:
        """How many there were since the last reset; see COUNTS."""
        return int(self._library.double_count(COUNTS.index(what)))

    def reset(self) -> None:
        """Nothing fails, everything is counted from 0."""
        self._library.double_reset()
