"""The ``deepnvme`` backend: DeepSpeed's ``aio_handle``, libaio with O_DIRECT through page-locked host memory.

https://www.deepspeed.ai/tutorials/deepnvme/. Always the bounce buffer, on a CPU and on a CUDA target;
``deepnvme-gds`` is the one that reads into GPU memory. ``aio_handle`` returns success whatever the kernel answered, and
ends the process when an assertion fails, so

* what the kernel answered is asked for separately (``deepnvme_results.h``);
* what it read and wrote is verified by :mod:`monai_gds.storage.checked`, which also does heads, tails and small files;
* what it would assert is checked before: that the kernel has room for its queues (``fs.aio-max-nr``), and that the
  memory can be locked (``RLIMIT_MEMLOCK``). That the range lies inside the file is checked before and again after the
  read, in between by nobody: see :mod:`monai_gds.storage.deepnvme_build`.

On a CUDA target the handle fills the pinned staging slots themselves; elsewhere it fills a page-locked tensor of its
own (``new_cpu_locked_tensor``), which is copied to the destination.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from monai_gds import huge_pages
from monai_gds.errors import StorageError
from monai_gds.storage import deepnvme_build
from monai_gds.storage.base import ALIGNMENT, Availability
from monai_gds.storage.checked import CheckedStorage, Lane, OpenFile

__all__ = ["DeepNvmeStorage", "Settings"]

_INT_MAX = 2**31 - 1

#: Whatever the number of cores: with 2 of them, 8 handles stored and loaded 1 GiB 1.05 to 1.1 times as fast as 4.
_THREADS = 8

_AIO_MAX = Path("/proc/sys/fs/aio-max-nr")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = _libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class Settings:
    """The settings of a handle, by DeepSpeed's names.

    The defaults were measured with ``monai-gds bench tensor tune --mb-size 256`` on a virtual disk and 2 cores, beside
    other work (2026-11-21). Only ``block_size`` stood out, and only for stores: of 8 MiB they ran at 1.72 GB/s in the
    median of eleven turns, of 1 MiB at 1.33. Over all 72 combinations the values of every other setting, and of this
    one for loads, differed by no more than a tenth. The command finds what suits another drive.

    Args:
        block_size: bytes of one transfer, a multiple of 4096.
        queue_depth: transfers in flight, each thread of a handle.
        single_submit: one system call a transfer instead of one for many.
        overlap_events: submit the next transfer as soon as one has finished instead of when all have. Off by default:
            DeepSpeed then fills its control blocks anew while the kernel is still at work for them.
        intra_op_parallelism: threads among which one operation is divided.

    Raises:
        ValueError: a value that DeepNVMe does not work with; the message names it.
    """

    block_size: int = 8 << 20
    queue_depth: int = 32
    single_submit: bool = False
    overlap_events: bool = False
    intra_op_parallelism: int = 1

    def __post_init__(self) -> None:
        for name in ("block_size", "queue_depth", "intra_op_parallelism"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, not {value!r}")
        for name in ("single_submit", "overlap_events"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a bool, not {getattr(self, name)!r}")
        if self.block_size % ALIGNMENT:
            raise ValueError(f"block_size must be a multiple of {ALIGNMENT} bytes (O_DIRECT), not {self.block_size}")
        if self.block_size * self.queue_depth > _INT_MAX:  # it multiplies them in 32 bits
            raise ValueError(
                f"block_size times queue_depth must stay below 2 GiB, and {self.block_size} times "
                f"{self.queue_depth} does not"
            )
        if self.intra_op_parallelism > 64:
            raise ValueError(f"intra_op_parallelism must be at most 64, not {self.intra_op_parallelism}")

    @classmethod
    def chosen(cls, tuned: str | os.PathLike[str] | Mapping[str, Any] | None, by_name: Mapping[str, Any]) -> Settings:
        """The tuned settings (see :meth:`tuned`) or else the defaults, but for those given by name (not None)."""
        base = cls() if tuned is None else cls.tuned(tuned)
        return replace(base, **{name: value for name, value in by_name.items() if value is not None})

    @classmethod
    def tuned(cls, found: str | os.PathLike[str] | Mapping[str, Any]) -> Settings:
        """The settings that DeepSpeed's tuner ``ds_nvme_tune`` found.

        Args:
            found: a file with what it printed (lines before its JSON are fine), or that JSON as a mapping:
                ``{"aio": {"block_size": …, "queue_depth": …, "single_submit": "false", "overlap_events": "true",
                "num_threads": …}}``, with or without the outer ``aio``.

        Raises:
            ValueError: it holds something else.
            OSError: the file cannot be read.
        """
        values = found if isinstance(found, Mapping) else _json_in(Path(found))
        inner = values.get("aio", values)
        if not isinstance(inner, Mapping):
            raise ValueError(f"tuned: expected settings by name, not {inner!r}")
        named = {"intra_op_parallelism" if key == "num_threads" else key: value for key, value in inner.items()}
        unknown = sorted(set(named) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"tuned: unknown setting {unknown[0]!r}; there are {[f.name for f in fields(cls)]}")
        return cls(**{key: {"true": True, "false": False}.get(value, value) for key, value in named.items()})


def _json_in(path: Path) -> Mapping[str, Any]:
    text = path.read_text()
    try:
        values, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    except ValueError:
        raise ValueError(f"{path} holds no JSON: expected what ds_nvme_tune prints") from None
    return dict(values)


class _AioLane(Lane):
    """One handle, and the page-locked tensor that belongs to it."""

    def __init__(self, module: ModuleType, settings: Settings, nbytes: int, pinned: bool) -> None:
        self.unit = ALIGNMENT * settings.intra_op_parallelism
        self._nbytes = nbytes
        self._pinned = pinned
        self._handle = _new_handle(module, settings)
        self._take_error = deepnvme_build.taker_of_errors(module)
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
                huge_pages.collapse(self._buffer)
        return self._buffer

    def reaches(self, dest: torch.Tensor) -> bool:
        return self._pinned and dest.data_ptr() % ALIGNMENT == 0 and dest.is_pinned()

    def read(self, file: OpenFile, offset: int, dest: torch.Tensor) -> None:
        code = self._handle.sync_pread(dest, file.by_descriptor, offset)
        self._keep(code, dest)
        self._check(code, "read", file, offset, dest)

    def write(self, file: OpenFile, offset: int, source: torch.Tensor) -> None:
        with deepnvme_build.writing():
            code = self._handle.sync_pwrite(source, file.by_descriptor, offset)
        self._keep(code, source)
        self._check(code, "write", file, offset, source)

    def _keep(self, code: int, memory: torch.Tensor) -> None:
        """Keeps the tensor until the handle's threads have done another operation.

        They let go of it a moment after they have said that it is done, and whoever lets go last frees it. That must
        not be a thread that knows nothing of the interpreter, nor be decided between the two at that very moment.
        """
        if code >= 0:  # else the threads saw nothing of it
            self._kept = memory

    def _check(self, code: int, verb: str, file: OpenFile, offset: int, memory: torch.Tensor) -> None:
        failed = self._take_error(memory)
        if failed is not None:
            at, error = failed
            reason = os.strerror(error) if error else "transferred in part only"
            raise StorageError(error or errno.EIO, f"{reason}, at byte {offset + at}", file.path)
        if code < 0:
            raise StorageError(errno.EIO, f"DeepNVMe refused to {verb} {memory.numel()} bytes at {offset}", file.path)

    def close(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None and not self._pinned:
            self._handle.free_cpu_locked_tensor(buffer)
        with _making:  # nobody is counting queues meanwhile
            self._handle = None
        self._kept = None


_making = threading.Lock()
_TRIES = 5


def _new_handle(module: ModuleType, settings: Settings) -> Any:
    """Makes a handle and sees that the kernel gave it its queues: a handle without ends the process when it is used."""
    needed = settings.intra_op_parallelism + 1
    for _ in range(_TRIES):  # a storage that nobody closed may be freed meanwhile, and its queues with it
        with _making:
            before = _contexts()
            handle = module.aio_handle(
                settings.block_size, settings.queue_depth, settings.single_submit, settings.overlap_events,
                settings.intra_op_parallelism,
            )  # fmt: skip
            if _contexts() - before >= needed:
                return handle
            del handle
    limit = _AIO_MAX.read_text().strip()
    raise StorageError(
        errno.EAGAIN,
        f"the kernel has no room for {needed} more queues of {settings.queue_depth} transfers (fs.aio-max-nr is "
        f"{limit} for the whole machine): use a smaller queue_depth or fewer threads, or raise it with sysctl",
    )


def _contexts() -> int:
    """How many libaio queues this process has: the kernel maps each into it."""
    return Path("/proc/self/maps").read_text().count("/[aio]")


def _check_lockable(nbytes: int) -> None:
    """Locks as much memory for a moment: the handle ends the process when it cannot."""
    room = mmap.mmap(-1, nbytes)
    anchor = ctypes.c_char.from_buffer(room)
    address = ctypes.addressof(anchor)
    code = ctypes.get_errno() if _libc.mlock(address, nbytes) else 0
    if not code:
        _libc.munlock(address, nbytes)
    del anchor
    room.close()
    if code:
        raise StorageError(
            code,
            f"{os.strerror(code)}: DeepNVMe must lock {nbytes} bytes of memory a thread; raise `ulimit -l` or use "
            "fewer threads",
        )


class DeepNvmeStorage(CheckedStorage):
    """Reads and writes with DeepSpeed's ``aio_handle``; see the module's docstring.

    Making one compiles DeepSpeed's operator when that has not been done on this machine (minutes; it says so first).

    Args:
        device: ``cpu`` or a CUDA device.
        threads: handles in use at once, default 8: most of the time they wait for the drive. Each has a page-locked
            buffer of 16 MiB.
        block_size: this and the following: see :class:`Settings`, where the defaults are.
        queue_depth: see above.
        single_submit: see above.
        overlap_events: see above.
        intra_op_parallelism: see above.
        tuned: what ``ds_nvme_tune`` found, see :meth:`Settings.tuned`; a setting that is also given by name wins.

    Raises:
        BackendUnavailable: deepspeed, or a tool to compile it, is missing, or compiling failed.
        ValueError: a setting that DeepNVMe does not work with.
    """

    name = "deepnvme"

    def __init__(
        self,
        device: torch.device,
        threads: int | None = None,
        *,
        block_size: int | None = None,
        queue_depth: int | None = None,
        single_submit: bool | None = None,
        overlap_events: bool | None = None,
        intra_op_parallelism: int | None = None,
        tuned: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device, _THREADS if threads is None else threads)
        given: dict[str, Any] = {
            "block_size": block_size, "queue_depth": queue_depth, "single_submit": single_submit,
            "overlap_events": overlap_events, "intra_op_parallelism": intra_op_parallelism,
        }  # fmt: skip
        self.settings = Settings.chosen(tuned, given)
        self.transfer_bytes = self.settings.block_size
        self.shares = self.settings.intra_op_parallelism
        self._module = deepnvme_build.load("aio")

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        found = deepnvme_build.probe("aio")
        return Availability(True, f"bounce buffer with libaio: {found.reason}") if found else found

    def _new_lane(self) -> Lane:
        return _AioLane(self._module, self.settings, self.lane_bytes, pinned=self.device.type == "cuda")

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **asdict(self.settings), "pinned_bytes": self.threads * self.lane_bytes}
