"""What the ``xnvme-block`` backend runs on: one engine a process that works on every submission at once.

A *job* is one submission. For each of its files the engine asks the kernel where the bytes lie, cuts them into
*commands*, and keeps the queue of the *drive* full with commands of any job. A command reads into the destination
itself or into a landing. While commands are in flight the file stays open, and before its bytes are called good the
kernel is asked again: another answer is an error, never wrong bytes.

Nobody waits in a loop of their own: whoever submits first works, or has a thread work, until no job is left.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from monai_gds.blockmap import BlockMap, FileBlocks
from monai_gds.errors import FileChanged, StorageError
from monai_gds.extents import Disk, MountedFileSystems, extents_in, how_to_be_let_read, look, uuid_in
from monai_gds.storage import staging
from monai_gds.storage._landing import GpuBuffers, GpuLandings, HostLandings, Landing, Landings, PinnedLandings
from monai_gds.storage._libxnvme import PASSTHROUGH, Completion, Device, Library, Queue
from monai_gds.storage.base import ALIGNMENT, FileId, Read
from monai_gds.storage.posix import open_file

__all__ = ["Drive", "Engine", "Job", "Setup", "entry_of"]

#: A command counts its blocks in 16 bits.
_MOST_BLOCKS = 1 << 16

#: A destination without room for the last block: up to this size all of it takes a detour through a landing, above it
#: only the last block does, with a command of its own.
_DETOUR_BYTES = 128 << 10


#: Commands issued between two looks at the queue: io_uring's start moving with the look only. Measured on 2 cores.
_BURST = 16


@dataclass(frozen=True)
class Setup:
    """How the engine reads: the backend's keyword arguments, checked.

    Attributes:
        library: libxnvme.
        target: where destinations live.
        uri: the device to read; None: the disk that each file lies on.
        disk: the disk behind ``uri``; None without one, and for a driver in user space.
        be: xNVMe's interface; None: the first of the kernel's that works.
        mem: xNVMe's memory allocator; None: the interface's own.
        depth: commands in flight at once.
        blockmap: where files must be.
        user_space: whether ``be`` takes the drive from the kernel, so that only the map says where files are.
        gpu_memory: whether xNVMe's buffers lie on the GPU.
    """

    library: Library
    target: torch.device
    uri: str | None
    disk: Disk | None
    be: str | None
    mem: str | None
    depth: int
    blockmap: BlockMap | None
    user_space: bool
    gpu_memory: bool

    def interfaces(self, uri: str) -> tuple[str, ...]:
        """What to try, in this order."""
        if self.be is not None:
            return (self.be,)
        return (PASSTHROUGH,) if stat.S_ISCHR(os.stat(uri).st_mode) else ("io_uring", "thrpool")

    def node_of(self, disk: Disk | None, path: str | None) -> tuple[str, Disk | None]:
        """What to open for the file ``path`` on ``disk``, and the disk behind that.

        Raises:
            StorageError: this storage reads another disk.
        """
        if self.uri is not None:
            if disk is not None and self.disk is not None and disk.number != self.disk.number:
                raise StorageError(errno.EXDEV, f"it lies on {disk.path}, and this storage reads {self.uri}", path)
            return self.uri, self.disk
        assert disk is not None, "without a uri, files are on mounted file systems"
        return disk.character_path if self.be == PASSTHROUGH else disk.path, disk


class Drive:
    """One open device with its queue and its landings."""

    def __init__(self, uri: str, disk: Disk | None, setup: Setup) -> None:
        target, self.uri = setup.target, uri
        self.device, self.queue = _open_queue(uri, setup)
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
        self.buffers = GpuBuffers(self.device, target) if setup.gpu_memory else None
        room = -(-max(self.most, 1 << 20) // ALIGNMENT) * ALIGNMENT
        if self.buffers is not None:  # whatever this device fills is on the GPU
            self._to_host: Landings = GpuLandings(self.buffers, target, max(room, 8 << 20))
            self._to_gpu: Landings = self._to_host
        else:
            self._to_host = HostLandings(self.device, room)
            self._to_gpu = PinnedLandings(target) if target.type == "cuda" else self._to_host

    def landings(self, dest: torch.Tensor) -> Landings:
        """The kind that reaches ``dest``."""
        return self._to_gpu if dest.is_cuda else self._to_host

    def check_end(self, end: int, path: str) -> None:
        """Raises StorageError when byte ``end`` of the disk is past its end."""
        if end > self.device.nbytes:
            lba, blocks = (end - 1) // self.block, self.device.nbytes // self.block
            raise StorageError(
                errno.ENXIO, f"LBA {lba} lies past the end of {self.uri}, which has {blocks} blocks", path
            )

    def check(self, done: Completion, block: int, count: int, path: str) -> None:
        """Raises StorageError unless a command read its ``count`` blocks from ``block``."""
        wanted = count * self.block
        if not done.status and (done.result == wanted or not self.device.counts_bytes):
            return
        where = f"reading {count} blocks from LBA {block} of {self.device.uri}"
        if done.status:
            code, why = done.failure(in_kernel=self.device.counts_bytes)
            raise StorageError(code, f"{where}: {why}", path)
        raise StorageError(errno.EIO, f"{where} gave {done.result} of {wanted} bytes", path)

    def read_head(self, start: int) -> bytes:
        """The first ALIGNMENT bytes of a file system that begins at byte ``start``; nothing else may be in flight.

        Raises:
            StorageError: they could not be read. After one of the queue itself the command may still be in flight.
        """
        head = torch.empty(ALIGNMENT, dtype=torch.uint8)
        landing = self._to_host.take()
        assert landing is not None, "nothing is in flight on a device that was just opened"
        landing.parts.append((0, head))
        block, count = start // self.block, ALIGNMENT // self.block
        done: list[Completion] = []
        while not done:
            if not self.queue.outstanding:
                self.queue.read(landing, block, count, landing.address)  # once more where the queue was full
            done = self.queue.poll()
        try:
            self.check(done[0], block, count, self.uri)
        except StorageError:
            self._to_host.release(landing)
            raise
        self._to_host.deliver(landing)
        return head.numpy().tobytes()

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


def _open_queue(uri: str, setup: Setup) -> tuple[Device, Queue]:
    if not setup.user_space:
        _check_permission(uri)
    refused: StorageError | None = None
    for interface in setup.interfaces(uri):
        device: Device | None = None
        try:
            device = Device(setup.library, uri, interface, setup.mem, setup.target.index if setup.gpu_memory else None)
            return device, Queue(device, setup.depth)
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
        raise StorageError(e.errno, f"the device may not be read: {how_to_be_let_read(uri)}", uri) from e


class _OpenFile:
    """One file of a job, open from the look at its extents until its last block is there.

    Args:
        path: its name, for messages.
        blocks: where it lies.
        drive: on which device.
        fd: its descriptor; -1 where no file system is mounted.
        answer: what the kernel said of its places.
    """

    __slots__ = ("_answer", "_fd", "_left", "blocks", "drive", "path")

    def __init__(self, path: str, blocks: FileBlocks, drive: Drive, fd: int = -1, answer: bytes = b"") -> None:
        self.path, self.blocks, self.drive = path, blocks, drive
        self._fd, self._answer = fd, answer
        self._left = 1

    def retain(self, count: int) -> None:
        """So many commands more."""
        self._left += count

    def release(self, *, check: bool) -> None:
        """One command less; with the last, the kernel is asked again and the file is closed.

        Raises:
            FileChanged: the blocks that were read are no longer the file's.
        """
        self._left -= 1
        if self._left or self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            if check and look(fd, self.blocks.size) != self._answer:
                raise FileChanged(f"{self.path} was changed while its blocks were being read")
        finally:
            os.close(fd)

    def runs(self, start: int, end: int) -> Iterable[tuple[int, int, int | None]]:
        """(from, to, place on the disk) for the bytes ``start`` to ``end``; the place of a hole is None."""
        extents = self.blocks.extents
        if len(extents) == 1 and extents[0].offset <= start < end <= extents[0].offset + extents[0].nbytes:
            return ((start, end, extents[0].start + start - extents[0].offset),)
        return self._walk(start, end)

    def _walk(self, start: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        extents = self.blocks.extents
        first = max(bisect_right(extents, start, key=lambda extent: extent.offset) - 1, 0)
        for extent in extents[first:]:
            if start >= end or extent.offset >= end:
                break
            if start < extent.offset:
                yield start, extent.offset, None
                start = extent.offset
            stop = min(extent.offset + extent.nbytes, end)
            if start < stop:
                yield start, stop, extent.start + start - extent.offset
                start = stop
        if start < end:
            yield start, end, None


class _Command:
    """One read of ``count`` blocks from ``block`` to ``address``, of which ``dest`` wants the bytes after ``skip``.

    ``address`` is None until the command has its place in a landing; where it reads into the destination itself,
    ``dest`` only keeps that alive.
    """

    __slots__ = ("address", "block", "count", "dest", "file", "job", "landing", "skip")

    def __init__(self, job: Job, file: _OpenFile, place: int, nbytes: int, dest: torch.Tensor, address: int | None):
        size = file.drive.block
        self.job, self.file, self.dest, self.address = job, file, dest, address
        self.block, self.skip = divmod(place, size)
        self.count = -(-(self.skip + nbytes) // size)
        self.landing: Landing | None = None

    def check(self, done: Completion) -> None:
        """Raises StorageError unless the device read all of it."""
        self.file.drive.check(done, self.block, self.count, self.file.path)


class Job:
    """One submission on its way through the engine.

    Args:
        requests: what to read.
        earlier: what must be over before a device writes into a destination on a GPU by itself.
    """

    def __init__(self, requests: Sequence[Read], earlier: torch.cuda.Event | None = None) -> None:
        self.requests, self.earlier = requests, earlier
        self.files: Iterator[tuple[_OpenFile, list[_Command]]] = iter(())
        self.todo: deque[_Command] = deque()  # of the file at hand, not issued yet
        self.planned = False  # every command has been issued
        self.left = 0  # commands in flight
        self.landings: dict[Landings, Landing] = {}  # being filled, one a kind
        self.arriving = 0  # landings full, and not delivered yet
        self.drives: set[str] = set()  # that it reads from
        self.error: Exception | None = None
        self.future: Future[None] = Future()

    def fail(self, error: Exception) -> None:
        """Notes the first error. What is in flight is waited for; nothing more is issued."""
        self.error = self.error or error


class Engine:
    """Works on jobs, in whatever thread has begun to, until none is left."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._incoming: deque[Job] = deque()
        self._running = False
        self._executor: ThreadPoolExecutor | None = None
        self._active: deque[Job] = deque()
        self._drives: dict[str, Drive] = {}  # by uri
        self._known: dict[str, Drive] = {}  # by the number of the disk
        self._mounted: MountedFileSystems | None = None
        self._opening = threading.RLock()

    # Jobs come in.

    def submit(self, job: Job, *, here: bool) -> None:
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
            self._known.clear()
            if self._mounted is not None:
                self._mounted.close()
                self._mounted = None

    # One thread works.

    def _work(self, until: Job | None = None) -> None:
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
            except Exception as e:  # a fault of this package: nobody is to wait for ever
                for drive in list(self._drives.values()):
                    self._abandon(drive, e)
                self._give_up(list(self._active), e)
                continue
            except BaseException:  # Ctrl-C in a caller's thread: what is in flight must still arrive
                self._work_elsewhere()
                raise
            idle = 0 if moved else idle + 1
            if idle:
                time.sleep(0 if idle < 20 else 50e-6)

    def _begin(self, job: Job) -> None:
        job.files = self._plan(job)
        self._active.append(job)
        if self._mounted is not None:
            self._mounted.refresh()

    def _feed(self) -> bool:
        """Issues commands of the jobs, first come first served, until the queue is full or all are issued."""
        moved = False
        for job in list(self._active):
            if job.planned:
                continue
            if job.earlier is not None and not job.earlier.query():  # type: ignore[no-untyped-call]
                break
            try:
                burst = _BURST
                while burst and self._step(job):
                    burst -= 1
                    moved = True
            except Exception as e:
                job.fail(e)
                self._end_plan(job)
            if not job.planned:
                break
            moved = True
            self._settle(job)
        return moved

    def _step(self, job: Job) -> bool:
        """Issues the job's next command. False when it has none left, or there is no room for it now."""
        while not job.todo and not job.error:
            following = next(job.files, None)
            if following is None:
                break
            file, commands = following
            file.retain(len(commands))
            job.todo.extend(commands)
            self._release(job, file)
        if job.error or not job.todo:
            self._end_plan(job)
            return False
        if not self._issue(job.todo[0]):
            return False
        job.todo.popleft()
        return True

    def _end_plan(self, job: Job) -> None:
        job.planned = True
        for command in job.todo:
            self._release(job, command.file)
        job.todo.clear()
        for landings in list(job.landings):
            self._seal(job, landings)

    def _issue(self, command: _Command) -> bool:
        if command.address is None and not self._land(command):
            return False
        assert command.address is not None
        if not command.file.drive.queue.read(command, command.block, command.count, command.address):
            return False
        command.job.left += 1
        if command.landing is not None:
            command.landing.left += 1
        return True

    def _land(self, command: _Command) -> bool:
        """Gives a command its place in a landing of its job."""
        job, drive = command.job, command.file.drive
        landings = drive.landings(command.dest)
        needed = -(-command.count * drive.block // ALIGNMENT) * ALIGNMENT
        if landings in job.landings and job.landings[landings].used + needed > landings.nbytes:
            self._seal(job, landings)
        if landings not in job.landings:
            taken = landings.take()
            if taken is None:
                return False
            job.landings[landings] = taken
        landing = job.landings[landings]
        command.landing, command.address = landing, landing.address + landing.used
        landing.parts.append((landing.used + command.skip, command.dest))
        landing.used += needed
        return True

    def _seal(self, job: Job, landings: Landings) -> None:
        """No further command will read into the job's landing of this kind."""
        landing = job.landings.pop(landings)
        landing.sealed = True
        job.arriving += 1
        self._arrived(job, landings, landing)

    def _arrived(self, job: Job, landings: Landings, landing: Landing) -> None:
        """Delivers a landing whose last command is done."""
        if not landing.sealed or landing.left:
            return
        job.arriving -= 1
        try:
            if job.error is None:
                landings.deliver(landing)
            else:
                landings.release(landing)
        except Exception as e:
            job.fail(e)

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

    def _abandon(self, drive: Drive, error: Exception) -> None:
        """Gives up a device of which it is no longer known what completed.

        It may still write into the destinations, so neither they nor its own memory are ever freed.
        """
        _abandoned.append((drive, drive.queue.in_flight()))
        self._forget(drive)
        self._give_up([job for job in self._active if job.drives & {drive.uri}], error)

    def _give_up(self, jobs: list[Job], error: Exception) -> None:
        for job in jobs:
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

    def _release(self, job: Job, file: _OpenFile) -> None:
        try:
            file.release(check=job.error is None)
        except Exception as e:
            job.fail(e)

    def _settle(self, job: Job) -> None:
        """Ends a job that has nothing left to do."""
        if not job.planned or job.left or job.arriving or job.future.done():
            return
        self._active.remove(job)
        if not self._active:
            self._drop_broken()
        if job.error is None:
            job.future.set_result(None)
        else:
            job.future.set_exception(job.error)

    # What to read from where.

    def _plan(self, job: Job) -> Iterator[tuple[_OpenFile, list[_Command]]]:
        """Opens a job's files one after the other, each when the first of its commands is due."""
        by_file: dict[tuple[str, FileId | None], list[Read]] = {}
        for request in job.requests:
            by_file.setdefault((request.path, request.expect), []).append(request)
        for (path, expect), requests in by_file.items():
            file = self._open(path, expect)
            job.drives.add(file.drive.uri)
            try:
                commands = [command for request in requests for command in self._commands(job, file, request)]
            except BaseException:
                file.release(check=False)
                raise
            yield file, commands

    def _commands(self, job: Job, file: _OpenFile, request: Read) -> Iterable[_Command]:
        dest, start, drive = request.dest, request.offset, file.drive
        nbytes = dest.numel()
        end = start + nbytes
        extents = file.blocks.extents
        inside = len(extents) == 1 and start == extents[0].offset and 0 < end <= start + extents[0].nbytes
        if inside and end <= file.blocks.size and nbytes <= drive.most:
            # A small file as a whole, read in place: most of what a folder of images asks for, so it gets a short cut.
            address, place = dest.data_ptr(), extents[0].start
            if -nbytes % drive.block <= request.room and address % drive.block == 0 and drive.takes(dest):
                drive.check_end(place + nbytes, file.path)
                return (_Command(job, file, place, nbytes, dest, address),)
        return self._cut_request(job, file, request, start, end)

    def _cut_request(self, job: Job, file: _OpenFile, request: Read, start: int, end: int) -> Iterator[_Command]:
        dest = request.dest
        if end > file.blocks.size and end > start:
            raise StorageError(errno.EIO, f"file ends at byte {file.blocks.size}, before byte {end}", file.path)
        for begin, stop, place in file.runs(start, end):
            if place is None:
                self._zero(dest[begin - start : stop - start])
                continue
            file.drive.check_end(place + stop - begin, file.path)
            room = request.room if stop == end else 0
            for piece, nbytes, direct in _cut(file.drive, dest, begin - start, place, stop - begin, room):
                at = begin - start + piece
                if direct:
                    yield _Command(job, file, place + piece, nbytes, dest, dest.data_ptr() + at)
                else:
                    yield _Command(job, file, place + piece, nbytes, dest[at : at + nbytes], None)

    def _zero(self, dest: torch.Tensor) -> None:
        if not dest.is_cuda:
            dest.zero_()
            return
        with torch.cuda.stream(staging.copy_stream(self._setup.target)):
            dest.zero_()

    def _open(self, path: str, expect: FileId | None) -> _OpenFile:
        setup = self._setup
        if setup.user_space:
            return self._open_mapped(path, expect)
        fd = open_file(path, expect)
        try:
            st = os.fstat(fd)
            if not stat.S_ISREG(st.st_mode):
                raise StorageError(errno.EINVAL, "it is no regular file", path)
            if self._mounted is None:
                self._mounted = MountedFileSystems()
            fs = self._mounted.of(fd, st.st_dev, path)
            drive = self._known.get(fs.disk.number) or self.drive(fs.disk, path)
            answer = look(fd, st.st_size)
            extents = extents_in(answer, fd, st.st_size, fs, path)
            blocks = FileBlocks(st.st_size, tuple(extents), st.st_ino, st.st_mtime_ns)
            if setup.blockmap is not None:
                entry_of(setup.blockmap, path).check(blocks, path)
            return _OpenFile(path, blocks, drive, fd, answer)
        except BaseException:
            os.close(fd)
            raise

    def _open_mapped(self, path: str, expect: FileId | None) -> _OpenFile:
        assert self._setup.blockmap is not None, "the backend asks for one"
        blocks = mapped(self._setup.blockmap, path)
        if expect is not None:
            expect.check(FileId(expect.device, blocks.inode or 0, blocks.size, blocks.mtime_ns or 0), path)
        return _OpenFile(path, blocks, self.drive(None))

    # Devices.

    def drive(self, disk: Disk | None, path: str | None = None) -> Drive:
        """The open device for the file ``path`` on a disk (None: for the one that the storage was given).

        Raises:
            StorageError: it cannot be opened, or is not the one that the block map was made on.
        """
        setup = self._setup
        uri, behind = setup.node_of(disk, path)
        with self._opening:
            if uri not in self._drives:
                drive = Drive(uri, behind, setup)
                try:
                    if setup.blockmap is not None:
                        _check_uuid(drive, setup.blockmap)
                except BaseException:
                    if drive.queue.outstanding:  # it may still write into the drive's memory
                        _abandoned.append((drive, drive.queue.in_flight()))
                    else:
                        drive.close()
                    raise
                self._drives[uri] = drive
            if disk is not None:
                self._known[disk.number] = self._drives[uri]
            return self._drives[uri]

    def _drop_broken(self) -> None:
        """Closes devices that gave an error; the next read opens them again, should they be back."""
        with self._opening:
            for drive in [drive for drive in self._drives.values() if drive.broken]:
                self._forget(drive)
                drive.close()

    def _forget(self, drive: Drive) -> None:
        del self._drives[drive.uri]
        self._known = {number: known for number, known in self._known.items() if known is not drive}


def _cut(
    drive: Drive, dest: torch.Tensor, at: int, place: int, nbytes: int, room: int
) -> Iterator[tuple[int, int, bool]]:
    """Cuts one run into commands.

    Args:
        drive: what it is read from.
        dest: the whole destination.
        at: where in ``dest`` the run goes.
        place: its first byte on the disk.
        nbytes: how many.
        room: bytes behind it in memory that may be overwritten.

    Returns:
        (first byte within the run, bytes, whether it reads into ``dest`` itself).
    """
    block = drive.block
    direct = place % block == 0 and drive.takes(dest) and (dest.data_ptr() + at) % block == 0
    tail = nbytes % block
    if direct and tail and room < block - tail:
        if nbytes <= _DETOUR_BYTES:
            direct = False
        else:
            yield nbytes - tail, tail, False
            nbytes -= tail
    done = 0
    while done < nbytes:
        piece = min(drive.most - (place + done) % block, nbytes - done)
        yield done, piece, direct
        done += piece


#: See Engine._abandon.
_abandoned: list[Any] = []


def entry_of(blockmap: BlockMap, path: str) -> FileBlocks:
    """A file's entry; StorageError where the map has none."""
    try:
        return blockmap[path]
    except KeyError as e:
        raise StorageError(errno.ENOENT, str(e.args[0]), path) from e


def mapped(blockmap: BlockMap, path: str) -> FileBlocks:
    """As :func:`entry_of`, where the map is all that is known of the files: FileNotFoundError for one that it has not.

    So a record that is not in the map is a plain miss for a cache.
    """
    try:
        return blockmap[path]
    except KeyError as e:
        raise FileNotFoundError(errno.ENOENT, str(e.args[0]), path) from e


def _check_uuid(drive: Drive, blockmap: BlockMap) -> None:
    """Raises StorageError unless the device holds the file system that was mapped (a plain map names none).

    What cannot be read is an error of its own: no reason to take the drive for another one.
    """
    origin = blockmap.origin
    if origin is None:
        return
    inside = origin.start + ALIGNMENT <= drive.device.nbytes
    found = uuid_in(drive.read_head(origin.start)) if inside else None
    if found != origin.uuid:
        raise StorageError(
            errno.ENODEV,
            f"it is not the disk that the block map was made on: at byte {origin.start} there is "
            f"{'no file system' if found is None else f'file system {found}'}, not {origin.uuid}",
            drive.uri,
        )
