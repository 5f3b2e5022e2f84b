"""The ``xnvme-block`` backend: a file's blocks straight from the device, through a command queue of xNVMe.

For each file the kernel reports where its bytes lie (:mod:`.extents`). The blocks are read with as many commands in
flight as the queue takes, each as large as the device allows. Before the bytes count as read, the kernel is asked
again: a different answer is an error, so wrong bytes are never returned. With a driver in user space no file system is
mounted, and a saved :class:`~monai_gds.BlockMap` shows where files lie.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from monai_gds.base.units import bytes_of
from monai_gds.errors import BlockMapError, FileChanged, StorageError
from monai_gds.storage.backend import Availability
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.blockmap.extents import Disk, Extent, disk_of, extents_in, look, transfers
from monai_gds.storage.blockmap.mapped import MappedFiles, WholeDisk, identity, lookup
from monai_gds.storage.blockmap.raid0 import Raid0
from monai_gds.storage.blockmap.saved import FileBlocks
from monai_gds.storage.files import Buffer, Expected, FileId, ends_early, open_file
from monai_gds.storage.pending import Pending
from monai_gds.storage.queue import Command, QueueBackend
from monai_gds.storage.reads import Reads
from monai_gds.storage.xnvme import libxnvme
from monai_gds.storage.xnvme.buffers import Bounce, host_tensor, used_by_current_stream
from monai_gds.storage.xnvme.drive import Drive, Drives, Setup
from monai_gds.storage.xnvme.files import probe_library
from monai_gds.storage.xnvme.libxnvme import KERNEL_INTERFACES, PASSTHROUGH, Completion
from monai_gds.storage.xnvme.user_space import UPCIE, full_address

_KERNEL = (*KERNEL_INTERFACES, PASSTHROUGH)

#: Drivers whose buffers are GPU memory without being asked. The driver creates a CUDA context for it: whether torch's
#: kernels reach that memory was not tried.
_GPU_DRIVERS = ("upcie-cuda",)

#: Transfers issued between two polls of the queue: io_uring starts them only when polled. Measured on 2 cores.
_BURST = 16


class BlockBackend(QueueBackend):
    """Reads files' blocks through the queues of their drives, which are of the class ``drive``."""

    coherent = False

    piece_bytes = QueueBackend.group_bytes

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._waiting: deque[_Transfer] = deque()  # of commands that _submit() took
        self._complete: list[tuple[Command, int | Exception]] = []
        self._burst = 0

    def _set_up(self, setup: Setup, drive: type[Drive] = Drive) -> None:
        """To be called when the backend is opened."""
        self.reaches_gpu = setup.reaches_gpu
        if setup.user_space and setup.origin is not None and (members := setup.origin.disk.members):
            raise BlockMapError(
                f"the block map is of files on {setup.origin.disk.path}, an array of {len(members)} drives, and "
                f"{setup.uri} is one of them at most: leave the drives to the kernel, mount the array, and leave be "
                "and uri out"
            )
        self._setup, self._drives = setup, Drives(setup, drive)
        if setup.user_space:
            assert setup.blockmap is not None and setup.uri is not None, "the constructors ask for them"
            self._mapped = MappedFiles(setup.blockmap, setup.uri, self.device)

    # Reading.

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        start = super().start
        return self._mapped.start(start, reads, into) if self._setup.user_space else start(reads, into)

    def _open(self, path: str, expected: Expected) -> _File:
        if isinstance(path, WholeDisk):
            whole = self._drives.only()
            nbytes = whole.blocks * whole.block
            return _File(path, nbytes, [Extent(0, 0, nbytes)], [whole])
        if self._setup.user_space:
            blocks = self._mapped.entry(path, expected, expected.device if isinstance(expected, FileId) else 0)
            return _File(path, blocks.size, blocks.extents, [self._drives.only()])
        with ExitStack() as on_error:
            fd = open_file(path, expected, regular=True)
            on_error.callback(os.close, fd)
            st = os.fstat(fd)
            fs, drives = self._drives.of_file(fd, st.st_dev, path)
            on_error.callback(self._drives.release, drives)
            answer = look(fd, st.st_size)
            extents = extents_in(answer, fd, st.st_size, fs, path)
            if self._setup.blockmap is not None:
                now = FileBlocks(st.st_size, tuple(extents), st.st_ino, st.st_mtime_ns)
                try:
                    lookup(self._setup.blockmap, path).check(now, path)
                except FileNotFoundError as e:
                    raise StorageError(e.errno, e.strerror, path) from e
            on_error.pop_all()
            return _File(path, st.st_size, extents, drives, fs.disk.array, fd, answer)

    def _close(self, handle: _File) -> None:
        """Raises FileChanged if the blocks that were read are no longer the file's."""
        self._drives.release(handle.drives)
        if handle.fd >= 0:
            try:
                if look(handle.fd, handle.size) != handle.answer:
                    raise FileChanged(f"{handle.path} was changed while its blocks were being read")
                if handle.array is not None:
                    self._drives.check_array(handle.fd, handle.array, handle.path)
            finally:
                os.close(handle.fd)

    def _submit(self, command: Command) -> bool:
        if self._waiting or self._burst >= _BURST:
            return False
        file: _File = command.handle
        drives, end = file.drives, command.offset + command.nbytes
        if end > file.size:
            raise ends_early(file.size, end - file.size, file.path)
        read, address = _Read(command), command.address
        for at, nbytes, place, direct in transfers(
            file.extents, command.offset, command.nbytes, base=address, room=command.room,
            block=max([drive.block for drive in drives]), most=min([drive.most for drive in drives]),
            direct=all(drive.reaches(command.memory) for drive in drives),
        ):  # fmt: skip
            if place is None:
                command.memory[command.start + at :][:nbytes].zero_()
                continue
            for drive, first, count in file.on_drives(place, nbytes):
                self._waiting.append(_Transfer(read, drive, at, count, first, address + at if direct else None))
                read.unfinished += 1
                at += count
        if read.unfinished:
            self._issue()
        else:
            self._complete.append((command, command.nbytes))
        return True

    def _issue(self) -> None:
        """Puts the transfers that wait into the queues, until one is full."""
        while self._waiting:
            transfer = self._waiting[0]
            read = transfer.read
            try:
                if read.error is None and not transfer.issue():
                    return
            except StorageError as e:
                read.error = e
            self._waiting.popleft()
            self._burst += 1
            if read.error is not None:
                transfer.drop_bounce()
                self._finish(read)

    def _poll(self) -> Iterable[tuple[Command, int | Exception]]:
        self._burst = 0
        for drive in self._drives:
            for done in drive.queue.poll() if drive.queue.outstanding else ():
                transfer: _Transfer = done.tag
                try:
                    transfer.finish(done)
                except Exception as e:
                    transfer.read.error = transfer.read.error or e
                self._finish(transfer.read)
        self._issue()
        complete, self._complete = self._complete, []
        return complete

    def _finish(self, read: _Read) -> None:
        """Counts a transfer of a read that is over, or was not issued because another one failed."""
        read.unfinished -= 1
        if not read.unfinished:
            self._complete.append((read.command, read.error or read.command.nbytes))

    def _give_up(self) -> None:
        for transfer in self._waiting:
            transfer.drop_bounce()
        self._waiting.clear()
        self._complete.clear()
        self._drives.give_up()

    # Everything else.

    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        """See :meth:`Backend.write`. Always durable, because blocks are read behind the file system's back."""
        if self._setup.user_space:
            raise StorageError(errno.EROFS, "a drive taken from the kernel has no file system to write through", path)
        super().write(path, buffers, durable=True, mode=mode)

    def head(self, path: str, nbytes: int) -> tuple[bytes, FileId]:
        if not self._setup.user_space:
            return super().head(path, nbytes)
        blocks = self._mapped.entry(path, None)
        head = torch.empty(min(nbytes, blocks.size), dtype=torch.uint8)
        self.start(Reads.of(path, [(0, head.numel())]), [head]).wait()
        return head.numpy().tobytes(), identity(blocks)

    def close(self) -> None:
        super().close()
        self._drives.close()

    def describe(self) -> dict[str, Any]:
        uri = self._setup.uri or "the disk that each file lies on"
        return {**super().describe(), "uri": uri, "queue_depth": self._setup.depth}


class XnvmeBlockBackend(BlockBackend):
    """Reads files' blocks from their device; see the module's docstring. ext4 and XFS on Linux, for CPU and CUDA.

    Args:
        device: where destinations live.
        uri: the device to read: a whole disk (``/dev/nvme0n1``), its NVMe character device (``/dev/ng0n1``), or the PCI
            address of a drive for a driver in user space. None: the disk that each file lies on.
        be: how commands reach it: ``io_uring``, ``libaio`` or ``thrpool`` through the kernel, ``io_uring_cmd`` for NVMe
            passthrough, or a user-space driver that libxnvme was built with (``spdk``, ``upcie``, ``upcie-cuda``…).
            None: ``io_uring`` or, where the kernel does not allow it, ``thrpool``.
        mem: memory that commands read into: ``cpu``, ``gpu``, or xNVMe's name of an allocator. None: what suits ``be``.
        queue_depth: commands in flight at once, a power of two.
        blockmap: a saved map, or the path of one. Files must be where it says. Needed for a user-space driver: there a
            file that was written, replaced or deleted after it was mapped is an error, and so are other bytes where the
            map has checksums and the file is read whole. If files are below another folder than the map was made in,
            pass ``BlockMap.load(map, parent=…)``.
        nsid: the namespace, for a user-space driver. None: the first.
        heap_bytes: size of ``upcie``'s heap in huge pages, such as ``"128MiB"``; ``upcie-cuda`` has a second heap of
            that size on the GPU. The first drive of a process decides. None: 1 GiB; 128 MiB are enough for one drive.

    Raises:
        BackendUnavailable: libxnvme is missing, does not fit, or was built without ``be``.
        ValueError: arguments that do not go together.
        BlockMapError: the map cannot be used.
        NotMappable: ``uri`` is a partition, or made of other devices.
    """

    def __init__(
        self,
        device: torch.device,
        uri: str | None = None,
        be: str | None = None,
        mem: str | None = None,
        queue_depth: int = 64,
        blockmap: BlockMap | str | os.PathLike[str] | None = None,
        nsid: int | None = None,
        heap_bytes: float | str | None = None,
    ) -> None:
        super().__init__(device)
        address = None if uri is None else full_address(uri)
        user_space = address is not None or be not in (None, *_KERNEL)
        reaches_gpu = mem == "gpu" or be in _GPU_DRIVERS
        if not isinstance(queue_depth, int) or not 1 <= queue_depth < 4096 or queue_depth & (queue_depth - 1):
            raise ValueError(f"queue_depth={queue_depth!r}: xNVMe takes powers of two below 4096")
        if user_space and (be in (None, *_KERNEL) or uri is None):
            raise ValueError("a driver in user space is chosen with be='upcie' (or 'spdk'…) and uri='0000:01:00.0'")
        if mem == "cpu" and be in _GPU_DRIVERS:
            raise ValueError(f"be={be!r} has its buffers on the GPU: leave mem='cpu' out, or choose be='upcie'")
        if nsid is not None and not user_space:
            raise ValueError(f"nsid={nsid} is for a driver in user space: through the kernel, uri names the namespace")
        if heap_bytes is not None and be not in UPCIE:
            raise ValueError(f"heap_bytes={heap_bytes!r}: only uPCIe has a heap (be='upcie')")
        heap = None if heap_bytes is None else bytes_of(heap_bytes, "heap_bytes", least=1)
        if user_space and blockmap is None:
            raise ValueError("a driver in user space reads without a file system: give the blockmap made before")
        if reaches_gpu and (device.type != "cuda" or uri is None):
            raise ValueError("buffers on a GPU need a CUDA target, and the address of the drive as uri")
        named = mem == "cpu" or (mem == "gpu" and be in _GPU_DRIVERS)  # not by xNVMe: its default is meant
        self._blockmap = blockmap
        self._setup = Setup(
            target=device, uri=address or uri, depth=queue_depth, user_space=user_space, reaches_gpu=reaches_gpu,
            be=be, mem=None if named else mem, nsid=nsid, heap_bytes=heap,
        )  # fmt: skip

    def open(self) -> None:
        setup, blockmap = self._setup, BlockMap.given(self._blockmap)
        disk = None if setup.uri is None or setup.user_space else disk_behind(setup.uri)
        self._library = libxnvme.load()
        if setup.be is not None:
            self._library.check_driver(setup.be)
        self._set_up(replace(setup, disk=disk, blockmap=blockmap, library=self._library))

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return probe_library()

    def memory(self, nbytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return host_tensor(self._library, nbytes)
        if not self.reaches_gpu:
            return super().memory(nbytes)
        drive = self._drives.only()
        try:
            assert drive.buffers is not None, "the setup asks for them"
            return drive.buffers.tensor(nbytes)
        finally:
            self._drives.release([drive])

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        pending = super().start(reads, into)
        if self.reaches_gpu:
            pending.on_hand_off(lambda: used_by_current_stream([tensor for tensor in into if tensor.is_cuda]))
        return pending

    def describe(self) -> dict[str, Any]:
        setup = self._setup
        return {
            **super().describe(),
            "library": self._library.describe(),
            "shm_id": self._library.shm_id(setup.uri or "", setup.be or "") or "the drive is not shared",
            "be": self._setup.be or "io_uring, else thrpool",
            "mem": self._setup.mem or "that of be",
        }


class _File(NamedTuple):
    """An open file."""

    path: str
    size: int
    extents: Sequence[Extent]
    drives: Sequence[Drive]  # those that it lies on, one for each member of the array
    array: Raid0 | None = None  # None where it lies on one drive
    fd: int = -1  # -1 where no file system is mounted
    answer: bytes = b""  # the result of look()

    def on_drives(self, place: int, nbytes: int) -> Iterable[tuple[Drive, int, int]]:
        """Where bytes of its disk or array lie: drive, first byte there, how many."""
        if self.array is None:
            return ((self.drives[0], place, nbytes),)
        return [(self.drives[member], first, count) for member, first, count in self.array.pieces(place, nbytes)]


@dataclass(slots=True)
class _Read:
    """A command under way: how many of its transfers are unfinished, and the first error."""

    command: Command
    unfinished: int = 0
    error: Exception | None = None


class _Transfer:
    """A transfer of whole blocks for ``nbytes`` of a read from its byte ``at`` on, which begin at ``place`` on disk.

    They go to ``address``, or through a bounce buffer where that is None.
    """

    __slots__ = ("_address", "_at", "_block", "_bounce", "_count", "_drive", "_nbytes", "_skip", "read")

    def __init__(self, read: _Read, drive: Drive, at: int, nbytes: int, place: int, address: int | None) -> None:
        self.read, self._drive, self._at, self._nbytes, self._address = read, drive, at, nbytes, address
        self._block, self._skip = divmod(place, drive.block)
        self._count = -(-(self._skip + nbytes) // drive.block)
        self._bounce: Bounce | None = None

    def issue(self) -> bool:
        """Puts the transfer into the drive's queue. Returns False while that is full or no bounce buffer is free."""
        drive, last = self._drive, self._block + self._count - 1
        if last >= drive.blocks:
            raise StorageError(
                errno.ENXIO, f"LBA {last} lies past the end of {drive.uri}, which has {drive.blocks} blocks"
            )
        if self._address is None:
            self._bounce = self._drive.bounce.take()
            if self._bounce is None:
                return False
            self._address = self._bounce.address
        return self._drive.queue.read(self, self._block, self._count, self._address)

    def finish(self, done: Completion) -> None:
        """Takes the completion, and copies the bytes out of the bounce buffer if there is one."""
        try:
            self._drive.check(done, self._block, self._count)
        except StorageError:
            self._drive.broken = True
            self.drop_bounce()
            raise
        if self._bounce is not None:
            start = self.read.command.start + self._at
            dest = self.read.command.memory[start : start + self._nbytes]
            self._drive.bounce.deliver(self._bounce, self._skip, dest)

    def drop_bounce(self) -> None:
        """For a transfer that failed or was not issued."""
        bounce, self._bounce = self._bounce, None
        if bounce is not None:
            self._drive.bounce.give_back(bounce)


def disk_behind(uri: str) -> Disk:
    """The disk that a device node stands for."""
    try:
        st = os.stat(uri)
    except OSError as e:
        raise StorageError(e.errno, "there is no such device", uri) from e
    if stat.S_ISCHR(st.st_mode):
        namespace = re.sub(r"^ng(\d+n\d+)$", r"nvme\1", os.path.basename(os.path.realpath(uri)))
        try:
            st = os.stat(os.path.join("/dev", namespace))
        except OSError as e:
            raise StorageError(errno.ENODEV, "it is not an NVMe namespace (such as /dev/ng0n1)", uri) from e
    if not stat.S_ISBLK(st.st_mode):
        raise StorageError(errno.ENOTBLK, "it is not a block device", uri)
    return disk_of(st.st_rdev, uri)
