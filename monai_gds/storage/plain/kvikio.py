"""The ``kvikio`` backend: GPUDirect Storage through cuFile where the machine has it, else KvikIO's threads.

With cuFile, large reads go straight to the device. Where it can do that is decided for each folder
(:mod:`.cufile`): by the file system, its mount options, the drive below it, and the driver, nvidia-fs or PCI
peer-to-peer DMA. KvikIO by itself uses cuFile wherever the library is installed, but where cuFile cannot bypass host
memory it copies through it: 3.2 GB/s from the page cache of a machine where KvikIO's threads reached 20. With
KVIKIO_COMPAT_MODE=OFF, cuFile reads all folders.

Elsewhere, KvikIO's threads fill this package's pinned slots, and the copy stream copies them to the device,
without waiting for what training has queued. KvikIO's own copies would run on streams that wait for the legacy default
stream: a read after 300 ms of queued work took 305 ms. Python threads reached only 18 GB/s with pieces of 4 MiB,
because after each piece a thread has to get the interpreter's lock. Small reads, and reads into host memory, go through
the ``posix`` backend.

**What is changed in your process:** KvikIO has one thread by default, which leaves most of the link idle. If
``kvikio.defaults.get("num_threads")`` is that default of 1 and neither KVIKIO_NTHREADS nor KVIKIO_NUM_THREADS is set,
this backend sets it to five eighths of the cores (4 to 16), for the whole process, and the threads stay on the cores of
the GPU's NUMA node where there are several nodes. A number of your own is left alone. Nothing else is changed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base import cores, stages
from monai_gds.errors import StorageError
from monai_gds.storage import files, staging
from monai_gds.storage.backend import Availability, Backend, check_threads
from monai_gds.storage.files import ALIGNMENT, Buffer, Expected
from monai_gds.storage.pending import Pending
from monai_gds.storage.plain import cufile
from monai_gds.storage.plain.posix import PosixBackend
from monai_gds.storage.queue import Command, QueueBackend
from monai_gds.storage.reads import Reads


def default_threads() -> int:
    """How many threads KvikIO gets where nobody set a number."""
    return max(4, min(limits.KVIKIO_THREADS, cores.usable() * 5 // 8))


#: Where the files of the kernel are that decide about cuFile.
ROOT = Path("/")

#: Whether KvikIO uses cuFile: in all folders, in those that it reads directly, or in none.
Use: TypeAlias = Literal["always", "by folder", "never"]
_HOWS: dict[Use, str] = {
    "always": "cuFile",
    "by folder": "cuFile in folders that it reads directly, else its threads and pinned staging",
    "never": "its threads and pinned staging",
}


def use_of_cufile() -> Use:
    """Whether KvikIO's settings, and what it found on this machine, let it use cuFile."""
    import kvikio
    import kvikio.defaults

    if kvikio.defaults.is_compat_mode_preferred():
        return "never"
    return "always" if kvikio.defaults.get("compat_mode") == kvikio.CompatMode.OFF else "by folder"


def _use_here() -> Use:
    use = use_of_cufile()
    return "never" if use == "by folder" and not cufile.can_be_direct(ROOT) else use


class _File:
    """An open file: a descriptor of ours, and KvikIO's ``CuFile`` of the same file.

    Attributes:
        size: bytes that it had when it was opened.
        after: where the last read ended; see :meth:`hint`.
    """

    def __init__(self, fd: int, cu_file: Any) -> None:
        self.fd, self.cu_file = fd, cu_file
        self.size = os.fstat(fd).st_size
        self.after = -1
        self._cold = False

    def hint(self, offset: int, nbytes: int) -> None:
        """Tells the kernel to read ahead a piece that is not in the page cache; see posix.py.

        Called in the pump's thread, because a hint that comes later than KvikIO's reads disturbs them (from a disk of
        3.4 GB/s: 3.3 with this hint, 2.3 with a late one, 2.7 without). Only the first of adjacent pieces is looked up
        in the cache, because at each system call this thread releases the interpreter's lock, and may wait for it.
        """
        if offset != self.after:
            self._cold = files.is_cold(self.fd, offset)
        self.after = offset + nbytes
        if self._cold:
            os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_WILLNEED)


class _Queue(QueueBackend):
    """Reads large pieces through KvikIO, from files that the backend chose for it.

    Args:
        device: a CUDA device.
        straight: whether KvikIO gets device memory, which cuFile fills, or pinned slots.
        served_by: see :meth:`Backend.served_by`.
    """

    name = "kvikio"
    group_bytes = limits.KVIKIO_LEAST_BYTES  # one piece per slot
    open_files = 16  # each takes three descriptors: KvikIO opens a file once with O_DIRECT and once without
    kvikio: Any  # the package

    def __init__(self, device: torch.device, straight: bool, served_by: Callable[[str, Expected], str]) -> None:
        super().__init__(device)
        # With cuFile each piece is one task: of a read that KvikIO divides, the first error comes back while the other
        # tasks are still writing. Pinned slots outlive that, see _settle, but the caller's memory may not.
        self.reaches_gpu = straight
        self.piece_bytes = limits.KVIKIO_TASK_BYTES if straight else limits.KVIKIO_PIECE_BYTES
        self._served_by = served_by
        self._under_way: deque[tuple[Command, Any]] = deque()  # with KvikIO's futures, oldest first

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return KvikioBackend.probe(device)

    def served_by(self, path: str, expected: Expected) -> str:
        return self._served_by(path, expected)

    def _open(self, path: str, expected: Expected) -> _File:
        fd = files.open_file(path, expected, regular=True)
        try:
            return _File(fd, _cu_file(self.kvikio, fd, "r", path))
        except BaseException:
            os.close(fd)
            raise

    def _close(self, handle: _File) -> None:
        with contextlib.suppress(Exception):  # every byte is read by now
            handle.cu_file.close()
        os.close(handle.fd)

    def _submit(self, command: Command) -> bool:
        file: _File = command.handle
        end = command.offset + command.nbytes
        if end > file.size:
            raise StorageError(errno.EIO, f"file ends at byte {file.size}, before byte {end}")
        if not command.memory.is_cuda:
            file.hint(command.offset, command.nbytes)
        elif len(self._under_way) == limits.KVIKIO_TASKS:
            return False
        dest = command.dest if command.memory.is_cuda else command.dest.numpy()
        future = file.cu_file.pread(dest, command.nbytes, command.offset, limits.KVIKIO_TASK_BYTES)
        self._under_way.append((command, future))
        return True

    def _poll(self) -> Iterable[tuple[Command, int | Exception]]:
        command, future = self._under_way[0]
        result: int | Exception
        try:
            result = future.get()
        except Exception as e:
            result = StorageError(errno.EIO, f"KvikIO could not read {command.nbytes} bytes at {command.offset}: {e}")
            if not self.reaches_gpu:
                self._settle(command.handle)
        self._under_way.popleft()
        return [(command, result)]

    def _give_up(self) -> None:
        self._under_way.clear()

    def _settle(self, file: _File) -> None:
        """Waits until KvikIO has finished all tasks that it has so far.

        It divides a piece for a slot into tasks (dividing it here, with a future for each, cost 15% of the speed at
        batch 1), and returns the first error while the other tasks still read the file and write to the slot. Tasks
        start in order: once one more task is complete, all earlier ones have started. Setting the number of threads,
        even to its current value, waits for the running ones.
        """
        defaults = self.kvikio.defaults
        with contextlib.suppress(Exception):  # it fails as the others did
            file.cu_file.pread(np.empty(1, np.uint8), 1).get()
        with contextlib.suppress(Exception):
            defaults.set("num_threads", defaults.get("num_threads"))


def _cu_file(kvikio: Any, fd: int, flags: str, path: str) -> Any:
    """Opens the file of a descriptor, since its path may name another file by now.

    Raises:
        OSError: the system's own error where there is one, because KvikIO's does not name the cause.
    """
    try:
        return kvikio.CuFile(f"/proc/self/fd/{fd}", flags)
    except Exception as e:
        with files.naming(path):
            os.close(os.dup(fd))
        # The disk is well: a plain open found the file. cuFile refuses some file systems and containers.
        raise StorageError(errno.EOPNOTSUPP, f"KvikIO could not open it: {e}", path) from e


class KvikioBackend(Backend):
    """Reads and writes CUDA tensors through KvikIO, https://docs.rapids.ai/api/kvikio/.

    Args:
        device: a CUDA device.
        threads: sets KvikIO's number of threads, for the whole process; None: see the module's docstring. With cuFile,
            KvikIO allocates a pinned bounce buffer per thread, 16 MiB unless set otherwise.

    Raises:
        BackendUnavailable: from ``open_storage``, where KvikIO is missing or there is no CUDA device.
        ValueError: ``threads`` is not positive.
    """

    needs_cuda = True

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        check_threads(threads)
        super().__init__(device)
        self._threads = threads
        self._posix = PosixBackend(device)
        self._staged, self._straight = (_Queue(device, straight, self.served_by) for straight in (False, True))
        self._to_move = 0  # threads of KvikIO's that this backend had it start, and that may be far from the device
        self._use: Use = "never"
        self._ways: dict[str, str] = {}  # by folder

    def open(self) -> None:
        import kvikio
        import kvikio.defaults

        self._kvikio = self._staged.kvikio = self._straight.kvikio = kvikio
        self._use = _use_here()
        threads = self._threads
        if threads is None:
            set_by_user = {"KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"} & os.environ.keys()
            threads = default_threads() if kvikio.defaults.get("num_threads") == 1 and not set_by_user else None
        if threads is not None and kvikio.defaults.get("num_threads") != threads:
            kvikio.defaults.set("num_threads", threads)
            self._to_move = threads

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        try:
            import kvikio
            import kvikio.defaults
        except Exception as e:
            if isinstance(e, ModuleNotFoundError) and e.name == "kvikio":
                extra = "cuda12" if (torch.version.cuda or "").startswith("12") else "cuda13"
                return Availability(False, "the package kvikio is not installed", f"pip install 'monai_gds[{extra}]'")
            return Availability(False, f"importing kvikio failed: {e}", "install the wheel for your CUDA version")
        return Availability(True, f"KvikIO {kvikio.__version__} through {_HOWS[_use_here()]}")

    # Reading.

    def served_by(self, path: str, expected: Expected) -> str:
        """What serves large reads of a file; found out once for each folder."""
        if self._use == "never":
            return stages.STAGED
        folder = os.path.dirname(path)
        if folder not in self._ways:
            direct = all(one.holds for one in cufile.conditions(Path(folder), ROOT))
            otherwise = stages.COMPATIBLE if self._use == "always" else stages.STAGED
            self._ways[folder] = stages.DIRECT if direct else otherwise
        return self._ways[folder]

    def memory(self, nbytes: int) -> torch.Tensor:
        """See :meth:`Backend.memory`. Where cuFile may fill it, it begins at a page, as large tensors in files do.

        What that gains is not known: no machine at hand reads directly. It is not registered with cuFile: each
        load has its own destinations, and what lives long is torch's segments, which torch frees without notice, though
        by then they must not be registered any more.
        """
        if self._use == "never" or nbytes < limits.KVIKIO_LEAST_BYTES:
            return super().memory(nbytes)
        raw = super().memory(nbytes + ALIGNMENT)
        return raw[-raw.data_ptr() % ALIGNMENT :]

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        large = reads.nbytes >= limits.KVIKIO_LEAST_BYTES
        large &= np.array([tensor.is_cuda for tensor in into], bool)[reads.dest]
        if not large.any():
            return self._posix.start(reads, into)
        if self._to_move:
            self._move_threads()
        straight = large & np.array([self.served_by(path, None) != stages.STAGED for path in reads.paths])[reads.file]
        choices = ((self._staged, large & ~straight), (self._straight, straight), (self._posix, ~large))
        parts: list[tuple[Backend, np.ndarray]] = [(one, which) for one, which in choices if which.any()]
        if len(parts) == 1:
            return parts[0][0].start(reads, into)
        reads = reads.with_room(into)  # only all reads together show the room after each
        return Pending.joined([one.start(reads[which], into) for one, which in parts], list(into), self.device)

    def _move_threads(self) -> None:
        """Has KvikIO start its threads again, near the device. It is known only now that CUDA is in use."""
        threads, self._to_move = self._to_move, 0
        if near := staging.near(self.device, threads):
            with cores.staying_on(near):  # new threads stay where the one is that starts them
                self._kvikio.defaults.set("num_threads", threads)

    # Writing.

    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        if not any(isinstance(b, torch.Tensor) and b.is_cuda for b in buffers):
            super().write(path, buffers, durable=durable, mode=mode)
            return
        torch.cuda.current_stream(self.device).synchronize()  # KvikIO does not wait for what fills the buffers
        with files.new_file(path, files.total_bytes(buffers), durable=durable, mode=mode) as fd:
            cu_file = _cu_file(self._kvikio, fd, "r+", path)
            try:
                _write_parts(fd, cu_file, buffers)
            finally:
                with contextlib.suppress(Exception):  # every byte is written by now
                    cu_file.close()

    def close(self) -> None:
        for one in (self._staged, self._straight, self._posix):
            one.close()

    def describe(self) -> dict[str, Any]:
        defaults = self._kvikio.defaults
        threads = defaults.get("num_threads")
        # KvikIO's own bounce buffers are used only where it is given device memory.
        bounce = defaults.get("bounce_buffer_size") * threads if {*self._ways.values()} - {stages.STAGED} else 0
        return {
            **self._posix.describe(),
            "kvikio_threads": threads,
            "task_bytes": limits.KVIKIO_TASK_BYTES,
            "cufile": self._use,
            "pinned_bytes": bounce + staging.pinned_bytes(self.device),
        }


def _write_parts(fd: int, cu_file: Any, buffers: Sequence[Buffer]) -> None:
    """Writes buffers back to back: tensors on the device that begin at a page through KvikIO, the rest by ``fd``."""
    offset = 0
    under_way: deque[tuple[torch.Tensor, int, Any]] = deque()  # pieces, each with its offset and KvikIO's future
    try:
        for buffer in buffers:
            nbytes = files.total_bytes([buffer])
            if isinstance(buffer, torch.Tensor) and buffer.is_cuda and offset % ALIGNMENT == 0:
                for at in range(0, nbytes, limits.KVIKIO_TASK_BYTES):  # in pieces of one task each; see open()
                    part = buffer.detach()[at : at + limits.KVIKIO_TASK_BYTES]
                    under_way.append((part, offset + at, _start_write(cu_file, part, offset + at)))
            else:  # it may begin in the block that the last one ends in, and cuFile writes whole blocks
                _wait_for_writes(under_way)
                os.lseek(fd, offset, os.SEEK_SET)
                staging.write_buffers(fd, [buffer])
            offset += nbytes
        _wait_for_writes(under_way)
    except BaseException:
        with contextlib.suppress(StorageError):
            _wait_for_writes(under_way)
        raise


def _start_write(cu_file: Any, part: torch.Tensor, offset: int) -> Any:
    try:
        return cu_file.pwrite(part, part.numel(), offset, limits.KVIKIO_TASK_BYTES)
    except Exception as e:
        raise StorageError(errno.EIO, f"KvikIO refused to write at {offset}: {e}") from e


def _wait_for_writes(under_way: deque[tuple[torch.Tensor, int, Any]]) -> None:
    """Waits until no piece is under way, even after Ctrl-C: KvikIO reads the tensors and writes to the file.

    Raises:
        StorageError: the first error of a piece.
    """
    first: BaseException | None = None
    while under_way:
        part, at, future = under_way[0]
        try:
            if (count := future.get()) != part.numel():
                raise ValueError(f"it wrote {count}")
        except Exception as e:
            first = first or StorageError(errno.EIO, f"KvikIO could not write {part.numel()} bytes at {at}: {e}")
        except BaseException as e:
            first = e
            continue
        under_way.popleft()
    if first is not None:
        raise first
