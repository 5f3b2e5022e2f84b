"""The ``xnvme-block`` backend: a file's blocks straight from the device, through a command queue of xNVMe.

For each file the kernel says where its bytes lie (:mod:`monai_gds.extents`); those blocks are read with as many commands
in flight as the queue takes, each as large as the device allows. The file stays open meanwhile, and its extents are
compared again before its bytes are called good: what moved in between is an error, never wrong bytes. Over a driver in
user space no file system is mounted, and a saved :class:`~monai_gds.blockmap.BlockMap` says where the files are.

One :class:`_Engine` a process does it: jobs come in, one thread at a time works on all of them, and when none is left it
goes home. Nothing here ever writes to a device: files are written through the file system.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from monai_gds.blockmap import BlockMap, FileBlocks
from monai_gds.errors import FileChanged, StorageError
from monai_gds.extents import Disk, Extent, FileSystem, MountedFileSystems, disk_of, map_extents, uuid_in
from monai_gds.storage import _libxnvme, staging
from monai_gds.storage._landing import (
    GpuBuffers,
    GpuLandings,
    HostLandings,
    Landing,
    Landings,
    PinnedLandings,
    host_tensor,
)
from monai_gds.storage._libxnvme import KERNEL_INTERFACES, PASSTHROUGH, Completion, Device, Library, Queue
from monai_gds.storage.base import ALIGNMENT, Availability, Buffer, FileId, Pending, Read, Storage
from monai_gds.storage.posix import open_file
from monai_gds.storage.threaded import INLINE_BYTES, write_file
from monai_gds.storage.xnvme import probe_library

__all__ = ["XnvmeBlockStorage"]

#: A command counts its blocks in 16 bits.
_MOST_BLOCKS = 1 << 16

#: A destination without room for the last block: below this size all of it takes a detour through a landing, above it
#: only the last block does. A copy of 128 KiB costs about what a command more costs.
_DETOUR_BYTES = 128 << 10

#: Drivers whose buffers are GPU memory without being asked.
_GPU_DRIVERS = ("upcie-cuda",)


class _Drive:
    """One open device with its queue and its landings."""

    def __init__(self, library: Library, uri: str, disk: Disk | None, options: _Options, target: torch.device) -> None:
        self.uri, self.disk = uri, disk
        self.device, self.queue = _open_queue(library, uri, options, target)
        try:
            if disk is not None and self.device.block_size != disk.block_size:
                raise StorageError(
                    errno.EINVAL,
                    f"xNVMe sees blocks of {self.device.block_size} bytes where the kernel sees {disk.block_size}",
                    uri,
                )
        except BaseException:
            self.queue.close()
            self.device.close()
            raise
        self.block = self.device.block_size
        most = min(self.device.max_transfer, _MOST_BLOCKS * self.block, disk.max_transfer if disk else 1 << 30)
        self.most = max(most // ALIGNMENT * ALIGNMENT, self.block)
        self.broken = False
        self.buffers = GpuBuffers(self.device, target) if options.gpu_memory else None
        room = -(-max(self.most, 1 << 20) // ALIGNMENT) * ALIGNMENT
        self._to_host: Landings
        if self.buffers is not None:  # whatever this device fills is on the GPU
            self._to_host = self._to_gpu = GpuLandings(self.buffers, target, max(room, 8 << 20))
        else:
            self._to_host = HostLandings(self.device, room)
            self._to_gpu = PinnedLandings(target) if target.type == "cuda" else self._to_host

    def landings(self, dest: torch.Tensor) -> Landings:
        """The kind that reaches ``dest``."""
        return self._to_gpu if dest.is_cuda else self._to_host

    def takes(self, dest: torch.Tensor) -> bool:
        """Whether commands may read into ``dest`` itself."""
        if self.buffers is not None:
            return dest.is_cuda and dest in self.buffers
        return self.device.in_kernel and not dest.is_cuda

    def tensor(self, nbytes: int) -> torch.Tensor:
        """A tensor over a buffer of the drive's own in GPU memory."""
        assert self.buffers is not None, "only with gpu_memory"
        return self.buffers.tensor(nbytes)

    def hand_off(self, dests: Sequence[torch.Tensor]) -> None:
        """Notes that the current stream uses these tensors; see staging.hand_off, which cannot for foreign memory."""
        assert self.buffers is not None, "only with gpu_memory"
        self.buffers.used(dests)

    def close(self) -> None:
        """Ends the queue and closes the device; nothing may be in flight."""
        self.queue.close()
        self._to_host.close()
        if self.buffers is not None:
            self.buffers.close()
        else:
            self.device.close()


class _Options:
    """The keyword arguments of :class:`XnvmeBlockStorage`, checked."""

    def __init__(self, target: torch.device, uri: str | None, be: str | None, mem: str | None, depth: int) -> None:
        if depth < 1 or depth & (depth - 1) or depth >= 4096:
            raise ValueError(f"queue_depth={depth}: xNVMe takes powers of two below 4096")
        pci = uri is not None and re.fullmatch(r"([0-9a-fA-F]{4}:)?[0-9a-fA-F]{2}[:.][0-9a-fA-F]{2}\.[0-7]", uri)
        self.user_space = bool(pci) or (be is not None and be not in (*KERNEL_INTERFACES, PASSTHROUGH))
        if self.user_space and (be is None or uri is None):
            raise ValueError(
                "a driver in user space is chosen with be='upcie', 'spdk'…, its drive with uri='0000:01:00.0'"
            )
        self.gpu_memory = mem == "gpu" or be in _GPU_DRIVERS
        if self.gpu_memory and (target.type != "cuda" or uri is None):
            raise ValueError("buffers on a GPU need a CUDA target, and the drive by its uri")
        self.uri, self.be, self.mem, self.depth = uri, be, mem, depth

    def interfaces(self, uri: str) -> tuple[str, ...]:
        """What to try, in this order."""
        if self.be is not None:
            return (self.be,)
        return (PASSTHROUGH,) if stat.S_ISCHR(os.stat(uri).st_mode) else ("io_uring", "thrpool")


def _open_queue(library: Library, uri: str, options: _Options, target: torch.device) -> tuple[Device, Queue]:
    if not options.user_space:
        _check_permission(uri)
    refused: StorageError | None = None
    for interface in options.interfaces(uri):
        device: Device | None = None
        try:
            device = Device(library, uri, interface, options.mem, target.index if options.gpu_memory else None)
            return device, Queue(device, options.depth)
        except StorageError as e:
            refused = e
            if device is not None:
                device.close()
    raise refused or StorageError(errno.ENODEV, "no interface to try", uri)


def _check_permission(uri: str) -> None:
    """The system's own error for a device that may not be read, or is not there: xNVMe's names no cause."""
    try:
        os.close(os.open(uri, os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError as e:
        raise StorageError(
            e.errno, "the device may not be read: run as root, or as a member of the group that owns it", uri
        ) from e


class _OpenFile:
    """One file of a job, open from the look at its extents until its last block is there.

    Attributes:
        blocks: where it lies.
        drive: on which device.
    """

    def __init__(
        self, path: str, blocks: FileBlocks, drive: _Drive, fd: int = -1, fs: FileSystem | None = None
    ) -> None:
        self.path, self.blocks, self.drive = path, blocks, drive
        self._fd, self._fs = fd, fs
        self._references = 1
        self._starts = [extent.offset for extent in blocks.extents]

    def retain(self) -> None:
        """One command more."""
        self._references += 1

    def release(self, *, check: bool) -> None:
        """One command less; with the last, the extents are compared and the file is closed.

        Raises:
            FileChanged: the blocks that were read are no longer the file's.
        """
        self._references -= 1
        if self._references or self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            if check and self._fs is not None:
                now = map_extents(fd, self.blocks.size, self._fs, self.path)
                if tuple(now) != self.blocks.extents:
                    raise FileChanged(f"{self.path} was changed while its blocks were being read")
        finally:
            os.close(fd)

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """(from, to, place on the disk) for the bytes ``start`` to ``end``; the place of a hole is None."""
        index = max(bisect_right(self._starts, start) - 1, 0)
        for extent in self.blocks.extents[index:]:
            if extent.offset >= end or start >= end:
                break
            stop = extent.offset + extent.nbytes
            if stop <= start:
                continue
            if start < extent.offset:
                yield start, extent.offset, None
                start = extent.offset
            stop = min(stop, end)
            yield start, stop, extent.start + start - extent.offset
            start = stop
        if start < end:
            yield start, end, None


class _Command:
    """One read of a device: ``count`` blocks from ``block``, of which ``nbytes`` bytes after ``skip`` go to ``dest``."""

    __slots__ = ("address", "block", "count", "dest", "file", "job", "landing", "nbytes", "skip")

    def __init__(self, job: _Job, file: _OpenFile, place: int, nbytes: int, dest: torch.Tensor, address: int | None):
        size = file.drive.block
        self.job, self.file, self.dest, self.address = job, file, dest, address
        self.block, self.skip = divmod(place, size)
        self.nbytes = nbytes
        self.count = -(-(self.skip + nbytes) // size)
        self.landing: Landing | None = None

    def check(self, done: Completion) -> None:
        """Raises StorageError unless the device read all of it."""
        device = self.file.drive.device
        where = f"{self.count} blocks from LBA {self.block} of {device.uri}"
        if done.status:
            code, why = done.failure(in_kernel=device.counts_bytes)
            raise StorageError(code, f"reading {where}: {why}", self.file.path)
        wanted = self.count * device.block_size
        if device.counts_bytes and done.result != wanted:
            raise StorageError(errno.EIO, f"reading {where} gave {done.result} of {wanted} bytes", self.file.path)


class _Job:
    """One submission on its way through the engine.

    Args:
        requests: what to read.
        room: every destination has room behind it up to the next page boundary.
        earlier: what must be over before a device writes into a destination on a GPU by itself.
    """

    def __init__(self, requests: Sequence[Read], room: bool, earlier: torch.cuda.Event | None) -> None:
        self.requests, self.room, self.earlier = requests, room, earlier
        self.steps: Iterator[_Command] = iter(())
        self.next: _Command | None = None
        self.planned = False  # every command has been issued
        self.left = 0  # commands in flight
        self.landings: set[tuple[Landings, Landing]] = set()  # not delivered yet
        self.drives: set[str] = set()  # that it reads from
        self.error: Exception | None = None
        self.future: Future[None] = Future()

    def fail(self, error: Exception) -> None:
        """Notes the first error. What is in flight is waited for; nothing more is issued."""
        self.error = self.error or error


class _Engine:
    """Works on jobs, in whatever thread has begun to, until none is left."""

    def __init__(self, storage: XnvmeBlockStorage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._incoming: deque[_Job] = deque()
        self._running = False
        self._executor: ThreadPoolExecutor | None = None
        self._active: deque[_Job] = deque()
        self._drives: dict[str, _Drive] = {}
        self._mounted: MountedFileSystems | None = None
        self._opening = threading.RLock()

    # Jobs come in.

    def submit(self, job: _Job, *, here: bool) -> None:
        """Takes a job, and works on it in this thread (``here``) where nobody is at work already."""
        with self._lock:
            self._incoming.append(job)
            if self._running:
                return
            self._running = True
        if here:
            self._work(job)
        else:
            self._work_elsewhere()

    def _work_elsewhere(self) -> None:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="monai-gds-xnvme-block")
            executor = self._executor
        try:
            executor.submit(self._work)
        except RuntimeError:  # the process is ending, may start no more threads, or another thread closed the storage
            self._work()

    def close(self) -> None:
        """Waits for the jobs that are there, then closes every device."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)
        while True:
            with self._lock:
                if not self._running:
                    break
            time.sleep(0.001)
        with self._opening:
            for drive in self._drives.values():
                drive.close()
            self._drives.clear()
            if self._mounted is not None:
                self._mounted.close()
                self._mounted = None

    # One thread works.

    def _work(self, until: _Job | None = None) -> None:
        """Works until no job is left, or ``until`` is done; then others go on with the rest."""
        idle = 0
        while True:
            with self._lock:
                while self._incoming:
                    self._begin(self._incoming.popleft())
                if not self._active:
                    self._running = False
                    return
            if until is not None and until.future.done():
                self._work_elsewhere()
                return
            try:
                moved = self._feed() | self._poll()
            except BaseException as e:
                self._give_up(list(self._active), e)
                raise
            idle = 0 if moved else idle + 1
            if idle:
                time.sleep(0 if idle < 20 else 20e-6)

    def _begin(self, job: _Job) -> None:
        job.steps = self._plan(job)
        self._active.append(job)

    def _feed(self) -> bool:
        """Issues commands of the jobs, first come first served, until the queue is full or all are issued."""
        moved = False
        for job in list(self._active):
            if job.planned:
                continue
            if job.earlier is not None and not job.earlier.query():
                break
            while self._step(job):
                moved = True
            if not job.planned:
                break
            moved = True
            self._settle(job)
        return moved

    def _step(self, job: _Job) -> bool:
        """Issues the job's next command. False when it has none left, or there is no room for it now."""
        try:
            if job.next is None:
                job.next = None if job.error else next(job.steps, None)
            if job.error or job.next is None:
                self._end_plan(job)
                return False
            if not self._issue(job.next):
                return False
        except Exception as e:
            job.fail(e)
            self._end_plan(job)
            return False
        job.next = None
        return True

    def _end_plan(self, job: _Job) -> None:
        job.planned = True
        job.steps.close()  # type: ignore[attr-defined]
        if job.next is not None:
            self._release(job, job.next.file)
            job.next = None
        for landings, landing in list(job.landings):
            landing.sealed = True
            self._arrived(job, landings, landing)

    def _issue(self, command: _Command) -> bool:
        drive, job = command.file.drive, command.job
        if command.address is None and not self._land(command):
            return False
        assert command.address is not None
        if not drive.queue.read(command, command.block, command.count, command.address):
            return False
        job.left += 1
        if command.landing is not None:
            command.landing.left += 1
        return True

    def _land(self, command: _Command) -> bool:
        """Gives a command its place in a landing of its job."""
        job, drive = command.job, command.file.drive
        landings = drive.landings(command.dest)
        needed = -(-command.count * drive.block // ALIGNMENT) * ALIGNMENT
        landing = next((at for kind, at in job.landings if kind is landings and not at.sealed), None)
        if landing is not None and landing.used + needed > landings.nbytes:
            landing.sealed = True
            self._arrived(job, landings, landing)
            landing = None
        if landing is None:
            landing = landings.take()
            if landing is None:
                return False
            job.landings.add((landings, landing))
        command.landing, command.address = landing, landing.address + landing.used
        landing.parts.append((landing.used + command.skip, command.dest))
        landing.used += needed
        return True

    def _poll(self) -> bool:
        """Takes completions from every queue."""
        moved = False
        for drive in list(self._drives.values()):
            if not drive.queue.outstanding:
                continue
            try:
                completions = drive.queue.poll()
            except StorageError as e:
                self._abandon(drive, e)
                return True
            for done in completions:
                moved = True
                self._complete(done)
        return moved

    def _abandon(self, drive: _Drive, error: StorageError) -> None:
        """Gives up a device whose queue no longer says what completed.

        It may still write into the destinations, so neither they nor its own memory are ever freed.
        """
        _abandoned.append((drive, drive.queue.in_flight()))
        del self._drives[drive.uri]
        self._give_up([job for job in self._active if job.drives & {drive.uri}], error)

    def _give_up(self, jobs: list[_Job], error: BaseException) -> None:
        for job in jobs:
            job.steps.close()  # type: ignore[attr-defined]
            self._active.remove(job)
            job.future.set_exception(error)

    def _complete(self, done: Completion) -> None:
        command: _Command = done.tag
        job, file = command.job, command.file
        job.left -= 1
        try:
            command.check(done)
        except StorageError as e:
            file.drive.broken = True
            job.fail(e)
        self._release(job, file)
        if command.landing is not None:
            command.landing.left -= 1
            self._arrived(job, file.drive.landings(command.dest), command.landing)
        self._settle(job)

    def _arrived(self, job: _Job, landings: Landings, landing: Landing) -> None:
        """Delivers a landing whose last command is done."""
        if not landing.sealed or landing.left or (landings, landing) not in job.landings:
            return
        job.landings.discard((landings, landing))
        try:
            if job.error is None:
                landings.deliver(landing)
            else:
                landings.release(landing)
        except Exception as e:
            job.fail(e)

    def _release(self, job: _Job, file: _OpenFile) -> None:
        try:
            file.release(check=job.error is None)
        except Exception as e:
            job.fail(e)

    def _settle(self, job: _Job) -> None:
        """Ends a job that has nothing left to do."""
        if not job.planned or job.left or job.landings or job.future.done():
            return
        self._active.remove(job)
        if not self._active:
            self._drop_broken()
        if job.error is None:
            job.future.set_result(None)
        else:
            job.future.set_exception(job.error)

    # What to read from where.

    def _plan(self, job: _Job) -> Iterator[_Command]:
        """The commands of a job, file by file: a file is opened when the first of its commands is due."""
        by_file: dict[tuple[str, FileId | None], list[Read]] = {}
        for request in job.requests:
            by_file.setdefault((request.path, request.expect), []).append(request)
        for (path, expect), requests in by_file.items():
            file = self._open(path, expect)
            job.drives.add(file.drive.uri)
            try:
                for request in requests:
                    yield from self._plan_request(job, file, request)
            finally:
                self._release(job, file)

    def _plan_request(self, job: _Job, file: _OpenFile, request: Read) -> Iterator[_Command]:
        start, end = request.offset, request.offset + request.dest.numel()
        if end > file.blocks.size and end > start:
            raise StorageError(errno.EIO, f"file ends at byte {file.blocks.size}, before byte {end}", file.path)
        for begin, stop, place in file.runs(start, end):
            if place is None:
                self._zero(request.dest[begin - start : stop - start])
                continue
            for piece, nbytes, address in self._cut(job, file, request.dest, begin - start, place, stop - begin):
                dest = request.dest
                if address is None:
                    dest = dest[begin - start + piece : begin - start + piece + nbytes]
                file.retain()
                yield _Command(job, file, place + piece, nbytes, dest, address)

    def _cut(
        self, job: _Job, file: _OpenFile, dest: torch.Tensor, at: int, place: int, nbytes: int
    ) -> Iterator[tuple[int, int, int | None]]:
        """Cuts one run into commands: (first byte within the run, bytes, address or None for a landing)."""
        drive = file.drive
        direct = drive.takes(dest) and (dest.data_ptr() + at) % drive.block == 0 and place % drive.block == 0
        tail = nbytes % drive.block
        if direct and tail and not (job.room and at + nbytes == dest.numel()):
            if nbytes <= _DETOUR_BYTES:
                direct = False
            else:
                yield nbytes - tail, tail, None
                nbytes -= tail
        done = 0
        while done < nbytes:
            piece = min(drive.most - (place + done) % drive.block, nbytes - done)
            yield done, piece, dest.data_ptr() + at + done if direct else None
            done += piece

    def _zero(self, dest: torch.Tensor) -> None:
        if not dest.is_cuda:
            dest.zero_()
            return
        with torch.cuda.stream(staging.copy_stream(self._storage.device)):
            dest.zero_()

    def _open(self, path: str, expect: FileId | None) -> _OpenFile:
        blockmap = self._storage.blockmap
        if self._storage.options.user_space:
            assert blockmap is not None, "the constructor asks for one"
            return self._open_mapped(path, expect, blockmap)
        fd = open_file(path, expect)
        try:
            st = os.fstat(fd)
            if not stat.S_ISREG(st.st_mode):
                raise StorageError(errno.EINVAL, "it is no regular file", path)
            if self._mounted is None:
                self._mounted = MountedFileSystems()
            fs = self._mounted.of(fd, st.st_dev, path)
            drive = self.drive(fs.disk)
            blocks = FileBlocks.of(fd, fs, path)
            if blockmap is not None:
                _entry(blockmap, path).check(blocks, path)
            return _OpenFile(path, blocks, drive, fd, fs)
        except BaseException:
            os.close(fd)
            raise

    def _open_mapped(self, path: str, expect: FileId | None, blockmap: BlockMap) -> _OpenFile:
        blocks = _entry(blockmap, path)
        if expect is not None and (expect.inode, expect.size, expect.mtime_ns) != (
            blocks.inode, blocks.size, blocks.mtime_ns,
        ):  # fmt: skip
            raise FileChanged(f"{path} is another file in the block map than was expected")
        return _OpenFile(path, blocks, self.drive(None))

    # Devices.

    def drive(self, disk: Disk | None) -> _Drive:
        """The open device for a disk (None: for the one that the storage was given).

        Raises:
            StorageError: it cannot be opened, or is not the one that the block map was made on.
        """
        storage = self._storage
        uri, disk = storage.node_of(disk)
        with self._opening:
            if uri not in self._drives:
                drive = _Drive(storage.library, uri, disk, storage.options, storage.device)
                try:
                    if storage.blockmap is not None:
                        _check_uuid(drive, storage.blockmap)
                except BaseException:
                    drive.close()
                    raise
                self._drives[uri] = drive
            return self._drives[uri]

    def _drop_broken(self) -> None:
        """Closes devices that gave an error; the next read opens them again, should they be back."""
        with self._opening:
            for drive in [drive for drive in self._drives.values() if drive.broken]:
                del self._drives[drive.uri]
                drive.close()


#: See _Engine._abandon.
_abandoned: list[Any] = []


def _entry(blockmap: BlockMap, path: str) -> FileBlocks:
    try:
        return blockmap[path]
    except KeyError as e:
        raise StorageError(errno.ENOENT, str(e.args[0]), path) from e


def _check_uuid(drive: _Drive, blockmap: BlockMap) -> None:
    """Raises StorageError unless the device holds the file system that was mapped (a plain map names none)."""
    origin = blockmap.origin
    if origin is None:
        return
    head = torch.empty(ALIGNMENT, dtype=torch.uint8)
    landings = drive.landings(head)
    landing = landings.take()
    assert landing is not None, "nothing is in flight on a device that was just opened"
    try:
        if origin.start + ALIGNMENT <= drive.device.nbytes:
            drive.queue.read(None, origin.start // drive.block, ALIGNMENT // drive.block, landing.address)
        done: list[Completion] = []
        while drive.queue.outstanding and not done:
            done = drive.queue.poll()
        landing.parts.append((0, head))
    finally:
        landings.deliver(landing)
    found = uuid_in(head.numpy().tobytes()) if done and not done[0].status else None
    if found != origin.uuid:
        raise StorageError(
            errno.ENODEV,
            f"it is not the disk that the block map was made on: at byte {origin.start} there is "
            f"{'no file system' if found is None else f'file system {found}'}, not {origin.uuid}",
            drive.uri,
        )


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
        self.library = _libxnvme.load()
        self.options = _Options(device, uri, be, mem, queue_depth)
        loaded = blockmap is None or isinstance(blockmap, BlockMap)
        self.blockmap: BlockMap | None = blockmap if loaded else BlockMap.load(blockmap)  # type: ignore[arg-type, assignment]
        if self.options.user_space and (self.blockmap is None or self.blockmap.origin is None):
            raise ValueError("over a driver in user space no file system is mounted: give the blockmap made before")
        self._disk = None if uri is None or self.options.user_space else _disk_behind(uri)
        self._engines: dict[int, _Engine] = {}

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return probe_library()

    def node_of(self, disk: Disk | None) -> tuple[str, Disk | None]:
        """What to open for a file on ``disk``, and the disk behind it (None: a driver in user space).

        Raises:
            StorageError: this storage reads another disk.
        """
        uri = self.options.uri
        if uri is not None:
            if disk is not None and self._disk is not None and disk.number != self._disk.number:
                raise StorageError(errno.EXDEV, f"the file lies on {disk.path}, which is not this device", uri)
            return uri, self._disk
        assert disk is not None, "without a uri, files are on mounted file systems"
        character = re.sub(r"nvme(\d+)n(\d+)$", r"ng\1n\2", disk.path)
        return character if self.options.be == PASSTHROUGH else disk.path, disk

    def submit(self, requests: Sequence[Read], *, fresh: bool = False) -> Pending:
        return self._submit(requests, fresh=fresh, room=False)

    def load(
        self, path: str, ranges: Sequence[tuple[int, int]], expect: FileId | None = None, *, mapped: bool = True
    ) -> Pending:
        if any(offset < 0 or nbytes < 0 for offset, nbytes in ranges):
            raise ValueError(f"{path}: negative offset or length in the ranges {list(ranges)}")
        requests = [Read(path, offset, self.allocate(nbytes), expect) for offset, nbytes in ranges]
        return self._submit(requests, fresh=True, room=True)

    def _submit(self, requests: Sequence[Read], *, fresh: bool, room: bool) -> Pending:
        dests = [r.dest for r in requests]
        on_device = [d for d in dests if d.is_cuda]
        for dest in on_device:
            if dest.device != self.device:
                raise ValueError(f"a destination lies on {dest.device}, but this storage serves {self.device}")
        if on_device and not fresh:
            staging.adopt(on_device, self.device)
        by_itself = on_device and self.options.gpu_memory  # the drive does not know of streams
        earlier = staging.copy_stream(self.device).record_event() if by_itself else None
        job = _Job(requests, room, earlier)
        small = self.device.type == "cpu" and sum(d.numel() for d in dests) <= INLINE_BYTES
        self._engine().submit(job, here=small)

        def finish() -> list[torch.Tensor]:
            job.future.result()
            if on_device:
                staging.hand_off(on_device, self.device)
                if self.options.gpu_memory:
                    self._engine().drive(None).hand_off(on_device)
            return dests

        return Pending(finish)

    def _engine(self) -> _Engine:
        # One a process: a queue that was inherited over a fork is shared with the parent, who goes on using it.
        process = os.getpid()
        if process not in self._engines:
            return self._engines.setdefault(process, _Engine(self))
        return self._engines[process]

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self.options.gpu_memory:
            return self._engine().drive(None).tensor(nbytes)
        if self.device.type == "cuda":
            return staging.allocate_on_copy_stream(nbytes, self.device)
        return host_tensor(self.library, nbytes)

    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool = False) -> None:
        """As the base class says; always durable, since the blocks are read behind the file system's back."""
        if self.options.user_space:
            raise StorageError(errno.EROFS, "a drive taken from the kernel has no file system to write through", path)
        write_file(path, buffers, durable=True)

    def read_head(self, path: str, nbytes: int) -> tuple[bytes, FileId]:
        if not self.options.user_space:
            return super().read_head(path, nbytes)
        assert self.blockmap is not None, "the constructor asks for one"
        blocks = _entry(self.blockmap, path)
        head = torch.empty(min(nbytes, blocks.size), dtype=torch.uint8)
        self.read([Read(path, 0, head)])
        return head.numpy().tobytes(), FileId(0, blocks.inode or 0, blocks.size, blocks.mtime_ns or 0)

    def close(self) -> None:
        engine = self._engines.pop(os.getpid(), None)
        if engine is not None:
            engine.close()

    def describe(self) -> dict[str, Any]:
        options = self.options
        return {
            **super().describe(),
            "library": self.library.describe(),
            "uri": options.uri or "the disk that each file lies on",
            "be": options.be or "io_uring, else thrpool",
            "mem": options.mem or "that of be",
            "queue_depth": options.depth,
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
