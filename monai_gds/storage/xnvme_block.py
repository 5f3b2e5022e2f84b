"""The ``xnvme-block`` backend: a file's blocks straight from the device, through a command queue of xNVMe.

For each file the kernel says where its bytes lie (:mod:`monai_gds.extents`); those blocks are read with as many
commands in flight as the queue takes, each as large as the device allows. Over a driver in user space no file system is
mounted, and a saved :class:`~monai_gds.blockmap.BlockMap` says where the files are. How it is done: :mod:`._engine`.

Nothing here ever writes to a device: files are written through the file system.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from typing import Any

import torch

from monai_gds.blockmap import BlockMap
from monai_gds.errors import StorageError
from monai_gds.extents import Disk, disk_of
from monai_gds.storage import _libxnvme, staging
from monai_gds.storage._engine import Engine, Job, Setup, mapped
from monai_gds.storage._landing import host_tensor
from monai_gds.storage._libxnvme import KERNEL_INTERFACES, PASSTHROUGH
from monai_gds.storage.base import ALIGNMENT, Availability, Buffer, FileId, Pending, Read, Storage
from monai_gds.storage.threaded import INLINE_BYTES, write_file
from monai_gds.storage.xnvme import probe_library

__all__ = ["XnvmeBlockStorage"]

_KERNEL = (*KERNEL_INTERFACES, PASSTHROUGH)
_PCI_ADDRESS = re.compile(r"([0-9a-fA-F]{4}:)?[0-9a-fA-F]{2}[:.][0-9a-fA-F]{2}\.[0-7]")

#: Drivers whose buffers are GPU memory without being asked.
_GPU_DRIVERS = ("upcie-cuda",)


class XnvmeBlockStorage(Storage):
    """Reads files' blocks from their device; see the module's docstring. ext4 and XFS on Linux, for CPU and CUDA.

    Args:
        device: where destinations live.
        uri: the device to read: a whole disk (``/dev/nvme0n1``), its NVMe character device (``/dev/ng0n1``), or the PCI
            address of a drive for a driver in user space. None: the disk that each file lies on.
        be: how commands reach it: ``io_uring``, ``libaio`` or ``thrpool`` through the kernel, ``io_uring_cmd`` for NVMe
            passthrough, or a user-space driver that libxnvme was built with (``spdk``, ``upcie``, ``upcie-cuda``…).
            None: ``io_uring`` or, where the kernel does not allow it, ``thrpool``.
        mem: xNVMe's memory allocator; ``gpu`` for one that gives GPU memory. None: the one that goes with ``be``.
        queue_depth: commands in flight at once, a power of two.
        blockmap: a saved map, or the path of one. Files must be where it says. Needed for a user-space driver.

    Raises:
        BackendUnavailable: libxnvme is missing or does not fit.
        ValueError: arguments that do not go together.
        BlockMapError: the map cannot be used.
        NotMappable: ``uri`` is a partition, or made of other devices.
    """

    name = "xnvme-block"
    past_file_system = True

    def __init__(
        self,
        device: torch.device,
        uri: str | None = None,
        be: str | None = None,
        mem: str | None = None,
        queue_depth: int = 64,
        blockmap: BlockMap | str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(device)
        if not (isinstance(blockmap, BlockMap) or blockmap is None):
            blockmap = BlockMap.load(blockmap)
        user_space = (uri is not None and bool(_PCI_ADDRESS.fullmatch(uri))) or be not in (None, *_KERNEL)
        gpu_memory = mem == "gpu" or be in _GPU_DRIVERS
        if queue_depth < 1 or queue_depth & (queue_depth - 1) or queue_depth >= 4096:
            raise ValueError(f"queue_depth={queue_depth}: xNVMe takes powers of two below 4096")
        if user_space and (be in (None, *_KERNEL) or uri is None):
            raise ValueError("a driver in user space is chosen with be='upcie' (or 'spdk'…) and uri='0000:01:00.0'")
        if user_space and (blockmap is None or blockmap.origin is None):
            raise ValueError("over a driver in user space no file system is mounted: give the blockmap made before")
        if gpu_memory and (device.type != "cuda" or uri is None):
            raise ValueError("buffers on a GPU need a CUDA target, and the drive by its uri")
        disk = None if uri is None or user_space else _disk_behind(uri)
        library = _libxnvme.load()
        self._setup = Setup(library, device, uri, disk, be, mem, queue_depth, blockmap, user_space, gpu_memory)
        self._engines: dict[int, Engine] = {}

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return probe_library()

    def submit(self, requests: Sequence[Read], *, fresh: bool = False) -> Pending:
        dests = [r.dest for r in requests]
        on_device = [d for d in dests if d.is_cuda]
        for dest in on_device:
            if dest.device != self.device:
                raise ValueError(f"a destination lies on {dest.device}, but this storage serves {self.device}")
        if on_device and not fresh:
            staging.adopt(on_device, self.device)
        # A drive that writes to the GPU by itself knows nothing of streams: it begins when what they hold is over.
        drive = self._engine().drive(None) if on_device and self._setup.gpu_memory else None
        job = Job(requests, None if drive is None else staging.copy_stream(self.device).record_event())
        small = self.device.type == "cpu" and sum(d.numel() for d in dests) <= INLINE_BYTES
        self._engine().submit(job, here=small)

        def finish() -> list[torch.Tensor]:
            try:
                job.future.result()
            finally:
                if on_device:  # after an error too: the copies of other landings may be under way
                    staging.hand_off(on_device, self.device)
                if drive is not None:
                    drive.hand_off(on_device)
            return dests

        return Pending(finish)

    def load(
        self, path: str, ranges: Sequence[tuple[int, int]], expect: FileId | None = None, *, mapped: bool = True
    ) -> Pending:
        if any(offset < 0 or nbytes < 0 for offset, nbytes in ranges):
            raise ValueError(f"{path}: negative offset or length in the ranges {list(ranges)}")
        requests = [Read(path, at, self.allocate(nbytes), expect, room=-nbytes % ALIGNMENT) for at, nbytes in ranges]
        return self.submit(requests, fresh=True)

    def _engine(self) -> Engine:
        # One a process: a queue that was inherited over a fork is shared with the parent, who goes on using it.
        process = os.getpid()
        if process not in self._engines:
            return self._engines.setdefault(process, Engine(self._setup))
        return self._engines[process]

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self._setup.gpu_memory:
            return self._engine().drive(None).tensor(nbytes)
        if self.device.type == "cuda":
            return staging.allocate_on_copy_stream(nbytes, self.device)
        return host_tensor(self._setup.library, nbytes)

    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool = False) -> None:
        """As the base class says; always durable, since the blocks are read behind the file system's back."""
        if self._setup.user_space:
            raise StorageError(errno.EROFS, "a drive taken from the kernel has no file system to write through", path)
        write_file(path, buffers, durable=True)

    def read_head(self, path: str, nbytes: int) -> tuple[bytes, FileId]:
        if not self._setup.user_space:
            return super().read_head(path, nbytes)
        assert self._setup.blockmap is not None, "the constructor asks for one"
        blocks = mapped(self._setup.blockmap, path)
        head = torch.empty(min(nbytes, blocks.size), dtype=torch.uint8)
        self.read([Read(path, 0, head)])
        return head.numpy().tobytes(), FileId(0, blocks.inode or 0, blocks.size, blocks.mtime_ns or 0)

    def close(self) -> None:
        engine = self._engines.pop(os.getpid(), None)
        if engine is not None:
            engine.close()

    def describe(self) -> dict[str, Any]:
        setup = self._setup
        return {
            **super().describe(),
            "library": setup.library.describe(),
            "uri": setup.uri or "the disk that each file lies on",
            "be": setup.be or "io_uring, else thrpool",
            "mem": setup.mem or "that of be",
            "queue_depth": setup.depth,
        }


def _disk_behind(uri: str) -> Disk:
    """The disk that a device node stands for.

    Raises:
        StorageError: it is no device.
        NotMappable: it is a partition, or made of other devices.
    """
    try:
        st = os.stat(uri)
    except OSError as e:
        raise StorageError(e.errno, "there is no such device", uri) from e
    if stat.S_ISCHR(st.st_mode):
        namespace = re.sub(r"^ng(\d+n\d+)$", r"nvme\1", os.path.basename(os.path.realpath(uri)))
        try:
            st = os.stat(os.path.join("/dev", namespace))
        except OSError as e:
            raise StorageError(errno.ENODEV, "it is no NVMe namespace (/dev/ng0n1, for instance)", uri) from e
    if not stat.S_ISBLK(st.st_mode):
        raise StorageError(errno.ENOTBLK, "it is no block device", uri)
    return disk_of(st.st_rdev, uri)
