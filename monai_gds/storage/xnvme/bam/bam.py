"""The ``xnvme-bam`` backend: a file's blocks by NVMe commands that CUDA threads submit themselves.

As with ``xnvme-block``, the kernel or a saved :class:`~monai_gds.BlockMap` shows where a file's bytes lie. The
commands are built, submitted and polled by a kernel (``bam.cu``), as in BaM (Qureshi et al., 2023)::

    reads ─plan─▶ extents ─▶ commands ─▶ kernel: entries, doorbells, completions ─▶ pool ─copy stream─▶ destination

Transfers that arrive while the kernel runs join those in flight at its next launch (:mod:`.queues`). The pool is the
controller's own memory, since it cannot reach torch's.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from monai_gds.errors import BackendUnavailable, StorageError
from monai_gds.storage.backend import Availability
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.blockmap.extents import Disk
from monai_gds.storage.xnvme.bam.controller import Controller
from monai_gds.storage.xnvme.bam.queues import LOST, MOST_DEPTH, STRANGE, UNSENT, BamQueue, CudaKernel, Pool
from monai_gds.storage.xnvme.bam.software_controller import SoftwareController
from monai_gds.storage.xnvme.blocks import BlockBackend, disk_behind
from monai_gds.storage.xnvme.buffers import MOST_BYTES, BounceBuffers
from monai_gds.storage.xnvme.drive import BlockDevice, CommandQueue, Drive, Setup, most_bytes
from monai_gds.storage.xnvme.libxnvme import Completion

_MOST_QUEUES = 128

#: Why there is no controller but the one in software.
_NO_DRIVE = (
    "no drive gives it queues: libxnvme's xnvme_cuda_queue_create keeps them, and the memory that commands read into, "
    "in a CUDA context of its own, and this kernel runs in torch's"
)


class XnvmeBamBackend(BlockBackend):
    """Reads files' blocks by commands of a CUDA kernel; see the module's docstring. For CUDA targets.

    Args:
        device: where destinations live.
        uri: what to read: a whole disk (``/dev/nvme0n1``), or a file that holds the image of one, in which ``blockmap``
            shows where files are. None: the disk that each file lies on.
        controller: the one whose queues the kernel drives. ``software`` is an NVMe controller in a thread of this
            process. It is for trying the kernel and everything around it, and slower than any other backend.
        queues: queue pairs, at most 128. Each is driven by a block of threads.
        queue_depth: entries per queue, 2 to 1024. At most one command fewer is in flight.
        blockmap: a saved map, or the path of one. Files must be where it says.
        seconds: if nothing completes for this time, the commands in flight are lost, and their files fail.

    Raises:
        BackendUnavailable: CuPy is missing, or ``controller`` is not ``software``: no drive gives a kernel its queues.
        ValueError: arguments that do not go together.
        BlockMapError: the map cannot be used.
        NotMappable: ``uri`` is a partition, or made of other devices.
    """

    needs_cuda = True

    def __init__(
        self,
        device: torch.device,
        uri: str | None = None,
        controller: str | None = None,
        queues: int = 4,
        queue_depth: int = 128,
        blockmap: BlockMap | str | os.PathLike[str] | None = None,
        seconds: float = 30.0,
    ) -> None:
        super().__init__(device)
        if controller is None:
            raise BackendUnavailable(f"{_NO_DRIVE}; controller='software' tries the kernel without a drive")
        if controller != "software":
            raise ValueError(f"controller={controller!r} is not known; there is: software")
        if not (1 <= queues <= _MOST_QUEUES and 2 <= queue_depth <= MOST_DEPTH and 0 < seconds < 1e9):
            raise ValueError(
                f"queues={queues}, queue_depth={queue_depth}, seconds={seconds}: use 1 to {_MOST_QUEUES} queues of 2 "
                f"to {MOST_DEPTH} entries, and a time limit above 0"
            )
        self._blockmap = blockmap
        self._settings = {"controller": controller, "queues": queues, "seconds": seconds}
        self._setup = BamSetup(
            target=device, uri=uri, depth=queue_depth, user_space=False, reaches_gpu=device.type == "cuda",
            kernel=self._kernel, queues=queues, seconds=seconds,
        )  # fmt: skip

    def open(self) -> None:
        uri, blockmap = self._setup.uri, BlockMap.given(self._blockmap)
        image = uri is not None and _is_file(uri)
        if image and blockmap is None:
            raise ValueError(f"uri={uri!r} is an image, in which only a block map shows where files are: give blockmap")
        disk = disk_behind(uri) if uri is not None and not image else None
        self._set_up(replace(self._setup, disk=disk, blockmap=blockmap, user_space=image), BamDrive)

    def _kernel(self) -> CudaKernel:
        return CudaKernel(self.device)

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        try:
            import cupy  # noqa: F401
        except ImportError as e:
            problem = f"CuPy, which compiles its kernel, cannot be imported ({e})"
            return Availability(False, problem, "pip install 'monai_gds[cuda13]' (or cuda12)")
        return Availability(True, "NVMe reads by a CUDA kernel, to controller='software' only")

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **self._settings}


def _is_file(uri: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(uri).st_mode)
    except OSError as e:
        raise StorageError(e.errno, "there is no such device", uri) from e


@dataclass(frozen=True, kw_only=True)
class BamSetup(Setup):
    """The setup of a :class:`BamDrive`: the maker of its kernel, its queue pairs, and the kernel's time limit."""

    kernel: Callable[[], CudaKernel]
    queues: int
    seconds: float


class BamDrive(Drive):
    """A drive whose commands a kernel submits."""

    def _open(self, disk: Disk | None, setup: Setup) -> tuple[BlockDevice, CommandQueue, BounceBuffers]:
        assert isinstance(setup, BamSetup)
        self._seconds = setup.seconds
        controller = self._controller(disk, setup)
        try:
            most = most_bytes(controller, disk)
            pool = Pool(controller, setup.target, most, max(1, MOST_BYTES // most))
            queue = BamQueue(controller, setup.kernel(), pool, setup.queues, setup.depth, setup.seconds, setup.target)
        except BaseException:
            controller.close()
            raise
        return controller, queue, pool

    def _controller(self, disk: Disk | None, setup: BamSetup) -> Controller:
        block = setup.origin.disk.block_size if disk is None and setup.origin is not None else 512
        return SoftwareController(self.uri, setup.target, block)

    def reaches(self, memory: torch.Tensor) -> bool:
        return False

    def check(self, done: Completion, block: int, count: int) -> None:
        if done.status < 0:
            where = f"reading {count} blocks from LBA {block} of {self.uri}"
            why = {
                LOST: f"the drive did not answer within {self._seconds:g} s",
                STRANGE: "its queue failed: the drive completed a command that was not in flight",
                UNSENT: "its queue had failed before",
            }[done.status]
            raise StorageError(errno.ETIMEDOUT if done.status == LOST else errno.EIO, f"{where}: {why}")
        super().check(done, block, count)
