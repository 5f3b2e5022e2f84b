"""The open devices of one ``xnvme-block`` backend, each with its command queue and its bounce buffers."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from monai_gds.errors import FileChanged, StorageError
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.blockmap.extents import Disk, FileSystem, MountedFileSystems, how_to_be_let_read, uuid_in
from monai_gds.storage.blockmap.raid0 import Raid0
from monai_gds.storage.blockmap.saved import Origin
from monai_gds.storage.files import ALIGNMENT
from monai_gds.storage.xnvme.buffers import Bounce, BounceBuffers, GpuBuffers
from monai_gds.storage.xnvme.libxnvme import PASSTHROUGH, Completion, Device, Library, Queue
from monai_gds.storage.xnvme.user_space import why_not_opened

#: A command counts its blocks in 16 bits.
_MOST_BLOCKS = 1 << 16


class BlockDevice(Protocol):
    """What a :class:`Drive` opens: see :class:`.libxnvme.Device` and :class:`.controller.Controller`."""

    block_size: int
    nbytes: int
    max_transfer: int
    in_kernel: bool
    counts_bytes: bool

    def close(self) -> None: ...


class CommandQueue(Protocol):
    """What a :class:`Drive` sends its commands to: see :class:`.libxnvme.Queue` and :class:`.queues.BamQueue`."""

    @property
    def outstanding(self) -> int: ...

    def read(self, tag: Any, block: int, count: int, address: int) -> bool: ...

    def poll(self) -> list[Completion]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How devices are opened: the options of :class:`.blocks.XnvmeBlockBackend`, checked, and what follows from them.

    Disk, block map and library are found and loaded when the backend is opened.
    """

    target: torch.device
    uri: str | None
    depth: int
    user_space: bool  # whether the drive is taken from the kernel, so that only a block map shows where files are
    reaches_gpu: bool  # whether commands may name memory of the GPU
    disk: Disk | None = None  # the one that uri names; None without one, and for a driver in user space
    blockmap: BlockMap | None = None
    library: Library | None = None  # None where no command goes through it
    be: str | None = None
    mem: str | None = None
    nsid: int | None = None
    heap_bytes: int | None = None

    @property
    def origin(self) -> Origin | None:
        return None if self.blockmap is None else self.blockmap.origin

    def interfaces(self, uri: str) -> tuple[str, ...]:
        """The interfaces to try, in this order."""
        if self.be is not None:
            return (self.be,)
        return (PASSTHROUGH,) if stat.S_ISCHR(os.stat(uri).st_mode) else ("io_uring", "thrpool")

    def node_of(self, disk: Disk | None, path: str | None) -> str:
        """The node to open for a file ``path`` on ``disk``. Raises StorageError if this storage reads another one."""
        if self.uri is not None:
            if disk is not None and self.disk is not None and disk.number != self.disk.number:
                raise StorageError(errno.EXDEV, f"it lies on {disk.path}, and this storage reads {self.uri}", path)
            return self.uri
        assert disk is not None, "without a uri, files are on mounted file systems"
        node = disk.path
        return node.replace("/dev/nvme", "/dev/ng") if self.be == PASSTHROUGH else node  # its character device


class Drive:
    """One open device, with its command queue and its bounce buffers.

    Raises StorageError if it cannot be opened, or is not the disk that the block map was made on.
    """

    def __init__(self, uri: str, disk: Disk | None, setup: Setup) -> None:
        self.uri, self.key = uri, disk.number if disk else None  # None for a driver in user space
        self.users = 0  # open files, and others, that need it open
        self.broken = False  # once it gave an error: then it is opened again when nobody uses it
        self.buffers: GpuBuffers | None = None  # memory on a GPU that it reaches; None if it reaches host memory
        self.device, self.queue, self.bounce = self._open(disk, setup)
        self.block = self.device.block_size
        self.blocks = self.device.nbytes // self.block
        self.most = most_bytes(self.device, disk)  # per command
        try:
            if disk is not None and self.block != disk.block_size:
                why = f"xNVMe sees blocks of {self.block} bytes where the kernel sees {disk.block_size}"
                raise StorageError(errno.EINVAL, why, uri)
            if setup.origin is not None and setup.origin.disk.array is None:  # else Drives asks the file system
                self._check_uuid(setup.origin)
        except BaseException:
            self.close()
            raise

    def _open(self, disk: Disk | None, setup: Setup) -> tuple[BlockDevice, CommandQueue, BounceBuffers]:
        device, queue = _open_queue(self.uri, setup)
        most = most_bytes(device, disk)
        if not setup.reaches_gpu:
            bounce = BounceBuffers(most, lambda n: Bounce(device.alloc(n)), lambda one: device.free(one.address))
            return device, queue, bounce
        self.buffers = GpuBuffers(device, setup.target)
        return device, queue, BounceBuffers(most, self.buffers.bounce)

    def reaches(self, memory: torch.Tensor) -> bool:
        """Whether commands may read into this memory. A driver in user space reaches its own allocator's only."""
        if self.buffers is not None:
            return memory.is_cuda and memory in self.buffers
        return self.device.in_kernel and not memory.is_cuda

    def check(self, done: Completion, block: int, count: int) -> None:
        """Raises StorageError unless a command read its ``count`` blocks from ``block`` on."""
        expected = count * self.block
        if not done.status and (done.result == expected or not self.device.counts_bytes):
            return
        where = f"reading {count} blocks from LBA {block} of {self.uri}"
        code, kind = done.status >> 1 & 0xFF, done.status >> 9 & 0x7
        if kind == 7 and self.device.counts_bytes:  # such an interface reports an errno as a vendor's status code
            raise StorageError(code, f"{where}: {os.strerror(code)}")
        if done.status:
            raise StorageError(errno.EIO, f"{where}: NVMe status code type {kind:#x}, status code {code:#x}")
        raise StorageError(errno.EIO, f"{where} gave {done.result} of {expected} bytes")

    def _check_uuid(self, origin: Origin) -> None:
        """Raises StorageError unless the device holds the file system that was mapped, or if that cannot be read."""
        inside = origin.start + ALIGNMENT <= self.device.nbytes
        found = uuid_in(self._read_head(origin.start)) if inside else None
        if found != origin.uuid:
            there = f"at byte {origin.start} there is {f'file system {found}' if found else 'no file system'}"
            why = f"it is not the disk that the block map was made on: {there}, not {origin.uuid}"
            raise StorageError(errno.ENODEV, why, self.uri)

    def _read_head(self, start: int) -> bytes:
        """The first ALIGNMENT bytes of a file system that begins at byte ``start``; nothing else is in flight."""
        head = torch.empty(ALIGNMENT, dtype=torch.uint8)
        bounce = self.bounce.take()
        assert bounce is not None, "nothing is in flight on a device that was just opened"
        block, count = start // self.block, ALIGNMENT // self.block
        done: list[Completion] = []
        while not done:
            if not self.queue.outstanding:
                self.queue.read(bounce, block, count, bounce.address)  # once more where the queue was full
            done = self.queue.poll()
        self.bounce.deliver(bounce, 0, head)
        self.check(done[0], block, count)
        return head.numpy().tobytes()

    def close(self) -> None:
        """Ends the queue and closes the device. If commands are in flight, its memory is kept for ever instead."""
        if self.queue.outstanding:
            _abandoned.append(self)
            return
        self.queue.close()
        self.bounce.close()
        if self.buffers is not None:
            self.buffers.close()
        else:
            self.device.close()


def most_bytes(device: BlockDevice, disk: Disk | None) -> int:
    most = min(device.max_transfer, _MOST_BLOCKS * device.block_size, disk.max_transfer if disk else 1 << 30)
    return max(most // ALIGNMENT * ALIGNMENT, device.block_size)


#: Drives whose commands may still write to memory, which their queues name.
_abandoned: list[Drive] = []


def _open_queue(uri: str, setup: Setup) -> tuple[Device, Queue]:
    assert setup.library is not None, "the backend names it"
    if not setup.user_space:
        try:
            os.close(os.open(uri, os.O_RDONLY | os.O_CLOEXEC))
        except PermissionError as e:  # xNVMe's own error does not name the cause
            raise StorageError(e.errno, f"the device may not be read: {how_to_be_let_read(uri)}", uri) from e
    refused: StorageError | None = None
    for interface in setup.interfaces(uri):
        device: Device | None = None
        try:
            gpu = setup.target.index if setup.reaches_gpu else None
            device = Device(setup.library, uri, interface, setup.mem, gpu, setup.nsid, setup.heap_bytes)
            return device, Queue(device, setup.depth)
        except StorageError as e:
            refused = e
            why = why_not_opened(e.errno or 0, uri, interface, setup.heap_bytes) if setup.user_space else ""
            if why:
                refused = StorageError(e.errno, f"{e.strerror} ({why})", uri)
            if device is not None:
                device.close()
    raise refused or StorageError(errno.ENODEV, "no interface to try", uri)


class Drives:
    """The drives of one backend, of the class ``make``, opened as they are needed. Any thread may call it."""

    def __init__(self, setup: Setup, make: type[Drive] = Drive) -> None:
        self._setup, self._class = setup, make
        self._open: dict[str | None, Drive] = {}  # by the number of the disk, None for a driver in user space
        self._mounted: MountedFileSystems | None = None
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Drive]:
        return iter(list(self._open.values()))

    def of_file(self, fd: int, device: int, path: str) -> tuple[FileSystem, list[Drive]]:
        """The file system of an open file, whose ``st_dev`` is ``device``, and the drives to read it from.

        These are that of its disk, or of an array those of the members, in their order. They stay open until they are
        given to :meth:`release`. Raises NotMappable, or StorageError if a device cannot be opened, or is not the one
        that this storage reads.
        """
        with self._lock:
            if self._mounted is None:
                self._mounted = MountedFileSystems()
            self._mounted.refresh()
            fs, origin = self._mounted.of(fd, device, path), self._setup.origin
            if origin is not None and origin.disk.array is not None:
                found = self._mounted.uuid(fd, fs, path)
                if found != origin.uuid:
                    why = f"it is on file system {found}, and the block map was made on {origin.uuid}"
                    raise StorageError(errno.ENODEV, why, path)
            drives: list[Drive] = []
            try:
                for disk in fs.disk.drives:
                    drives.append(self._use(disk, path))
            except BaseException:
                self.release(drives)
                raise
            return fs, drives

    def check_array(self, fd: int, array: Raid0, path: str) -> None:
        """Raises FileChanged if an open file's array is another one now, and NotMappable while md reshapes it."""
        now: Raid0 | None = None
        try:
            now = FileSystem.of(fd, path).disk.array
        finally:
            if now != array:
                with self._lock:
                    if self._mounted is not None:
                        self._mounted.forget()
        if now != array:
            raise FileChanged(f"{path} lies elsewhere on the drives of its array than when it was opened")

    def only(self) -> Drive:
        """The drive that the storage was given by its ``uri``. It stays open until it is given to :meth:`release`."""
        with self._lock:
            return self._use(self._setup.disk, None)

    def _use(self, disk: Disk | None, path: str | None) -> Drive:
        key = disk.number if disk else None
        if key not in self._open:
            self._open[key] = self._class(self._setup.node_of(disk, path), disk, self._setup)
        self._open[key].users += 1
        return self._open[key]

    def release(self, drives: Iterable[Drive]) -> None:
        """Ends one use of each. One that gave an error is closed with its last use, and opened again later."""
        with self._lock:
            for drive in drives:
                drive.users -= 1
                if drive.broken and not drive.users:
                    self._close([drive])

    def give_up(self) -> None:
        """Gives up every drive with commands in flight: nobody will take their completions."""
        with self._lock:
            self._close([drive for drive in self if drive.queue.outstanding])

    def close(self) -> None:
        """Closes the drives that nobody uses."""
        with self._lock:
            self._close([drive for drive in self if not drive.users])
            mounted, self._mounted = self._mounted, None
            if mounted is not None:
                mounted.close()

    def _close(self, drives: Sequence[Drive]) -> None:
        for drive in drives:
            if self._open.get(drive.key) is drive:  # not one that was abandoned
                del self._open[drive.key]
                drive.close()
