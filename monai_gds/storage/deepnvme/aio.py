"""The ``deepnvme`` backend: DeepSpeed's ``aio_handle``, libaio with O_DIRECT through page-locked host memory.

It goes through host memory on a CPU and on a CUDA target; ``deepnvme-gds`` is the one that reads into GPU memory.
``aio_handle`` returns success whatever the kernel answered, so what it moves is verified (:mod:`.verified`), and the
kernel's own results are fetched separately (``results.h``). It ends the process when an assertion fails, so these are
checked beforehand: that the kernel has room for its queues (``fs.aio-max-nr``), and that the memory can be locked
(``RLIMIT_MEMLOCK``). That the range lies inside the file is checked before and after the read; :mod:`.build` takes the
assertion in between out.

On a CUDA target the handle fills the pinned staging slots themselves. Elsewhere it fills a page-locked tensor of its
own (``new_cpu_locked_tensor``), which is copied to the destination.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from monai_gds.base.process import PerProcess
from monai_gds.errors import StorageError
from monai_gds.storage.backend import Availability
from monai_gds.storage.deepnvme import build
from monai_gds.storage.deepnvme.lanes import Lane, Verb
from monai_gds.storage.deepnvme.settings import Settings
from monai_gds.storage.deepnvme.verified import VerifiedBackend
from monai_gds.storage.files import ALIGNMENT
from monai_gds.storage.memory import collapse_to_huge_pages

#: Whatever the number of cores: with 2 of them, 8 handles stored and loaded 1 GiB 1.05 to 1.1 times as fast as 4.
_THREADS = 8

#: Attempts to count the queues of a new handle.
_TRIES = 5

_AIO_MAX = Path("/proc/sys/fs/aio-max-nr")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

#: Held while handles are made and freed, so that their queues can be counted. Reentrant: the garbage collector may
#: free one while another is made.
_making = PerProcess(threading.RLock)


class _AioLane(Lane):
    """One handle, and the page-locked tensor that belongs to it."""

    def __init__(self, module: ModuleType, settings: Settings, nbytes: int, pinned: bool) -> None:
        self._nbytes = nbytes
        self._pinned = pinned
        self._handle = _new_handle(module, settings)
        self._take_error = ctypes.CDLL(module.__file__).monai_gds_take_error  # of results.h
        self._take_error.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        self._buffer: torch.Tensor | None = None
        self._kept: torch.Tensor | None = None

    @property
    def buffer(self) -> torch.Tensor:
        if self._buffer is None:
            if self._pinned:
                self._buffer = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=True)
            else:
                _check_lockable(self._nbytes)
                self._buffer = self._handle.new_cpu_locked_tensor(self._nbytes, torch.empty(0, dtype=torch.uint8))
                collapse_to_huge_pages(self._buffer)
        return self._buffer

    def reaches(self, dest: torch.Tensor) -> bool:
        return self._pinned and dest.data_ptr() % ALIGNMENT == 0 and dest.is_pinned()

    def transfer(self, verb: Verb, fd: int, offset: int, memory: torch.Tensor) -> None:
        move = self._handle.sync_pread if verb == "read" else self._handle.sync_pwrite
        code = move(memory, f"/proc/self/fd/{fd}", offset)
        if code >= 0:  # else the handle's threads saw nothing of the tensor
            # They drop it a moment after they have reported that they are done, and whoever drops it last frees it.
            # That must not be a thread without the interpreter, so it is kept until they have done another operation.
            self._kept = memory
        at, result = ctypes.c_void_p(), ctypes.c_long()
        if self._take_error(memory.data_ptr(), memory.numel(), ctypes.byref(at), ctypes.byref(result)):
            error = max(0, -result.value)
            reason = os.strerror(error) if error else "transferred in part only"
            at_byte = offset + (at.value or 0) - memory.data_ptr()
            raise StorageError(error or errno.EIO, f"{reason}, at byte {at_byte}")
        if code < 0:
            raise StorageError(errno.EIO, f"DeepNVMe refused to {verb} {memory.numel()} bytes at {offset}")

    def close(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None and not self._pinned:
            self._handle.free_cpu_locked_tensor(buffer)
        with _making():
            self._handle = None
        self._kept = None


def _new_handle(module: ModuleType, settings: Settings) -> Any:
    """Makes a handle and checks that the kernel gave it its queues: using one without them ends the process."""
    needed = settings.intra_op_parallelism + 1
    for _ in range(_TRIES):  # a backend that nobody closed may be freed meanwhile, and its queues with it
        with _making():
            before = _queues()
            handle = module.aio_handle(*astuple(settings))
            if _queues() - before >= needed:
                return handle
            del handle
    raise StorageError(*_refusal(module, settings, needed))


def _refusal(module: ModuleType, settings: Settings, needed: int) -> tuple[int, str]:
    """Why the kernel gave a handle no queues, which DeepNVMe does not tell: asked for one more, it does."""
    libaio, queue = ctypes.CDLL(module.__file__), ctypes.c_void_p()  # the operator is linked to libaio
    code = -libaio.io_setup(settings.queue_depth, ctypes.byref(queue))
    if not code:
        libaio.io_destroy(queue)
    elif code not in (errno.EAGAIN, errno.EINVAL, errno.ENOMEM):
        return code, (
            f"this process may not call io_setup ({os.strerror(code)}): allow it in the container's seccomp profile "
            "(--security-opt seccomp=PROFILE), or use backend='posix'"
        )
    return errno.EAGAIN, (
        f"the kernel gives no {needed} more queues of {settings.queue_depth} transfers (fs.aio-max-nr is "
        f"{_AIO_MAX.read_text().strip()} for the whole machine): use a smaller queue_depth or fewer threads, or raise "
        "it with sysctl"
    )


def _queues() -> int:
    """How many libaio queues this process has: the kernel maps each into it."""
    return Path("/proc/self/maps").read_text().count("/[aio]")


def _check_lockable(nbytes: int) -> None:
    """Locks as much memory for a moment, because the handle ends the process if it cannot. Raises StorageError.

    The memory is a mapping: malloc would reuse it for the handle's buffer, into which 300 kB then took 590 µs instead
    of 500.
    """
    room = mmap.mmap(-1, nbytes)
    anchor = ctypes.c_char.from_buffer(room)
    address = ctypes.addressof(anchor)
    code = ctypes.get_errno() if _libc.mlock(address, nbytes) else 0
    del anchor
    room.close()  # unlocks it too
    if code:
        raise StorageError(
            code,
            f"{os.strerror(code)}: DeepNVMe must lock {nbytes} bytes of memory per thread; raise `ulimit -l` or use "
            "fewer threads",
        )


class DeepNvmeBackend(VerifiedBackend):
    """Reads and writes with DeepSpeed's ``aio_handle``; see the module's docstring.

    Opening it compiles DeepSpeed's operator unless this machine has it (minutes, with a warning first).

    Args:
        device: ``cpu`` or a CUDA device.
        threads: handles in use at once, default 8: most of the time they wait for the drive. Each has a page-locked
            buffer of 16 MiB.
        settings: fields of :class:`Settings` by name, and ``tuned``; see :class:`VerifiedBackend`.

    Raises:
        BackendUnavailable: deepspeed, or a tool to compile it, is missing, or compiling failed.
        ValueError: a setting that DeepNVMe does not work with.
    """

    def __init__(self, device: torch.device, threads: int | None = None, **settings: Any) -> None:
        super().__init__(device, _THREADS if threads is None else threads, **settings)
        self.transfer_bytes = self.settings.block_size
        self.shares = self.settings.intra_op_parallelism

    def open(self) -> None:
        self._module = build.load("aio")

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        found = build.probe("aio")
        return Availability(True, f"bounce buffer with libaio: {found.reason}") if found else found

    def _new_lanes(self) -> Sequence[Lane]:
        return [_AioLane(self._module, self.settings, self.lane_bytes, pinned=self.device.type == "cuda")]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "pinned_bytes": self.threads * self.lane_bytes}
