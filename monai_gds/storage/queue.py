"""Base of backends whose primitive is a queue: it takes commands, and reports later which of them are complete.

A backend implements two methods: :meth:`QueueBackend._submit` puts one read into its queue, or refuses while the queue
is full, and :meth:`QueueBackend._poll` returns the reads that are complete. This file plans, opens files, copies bytes
to the GPU through pinned staging, names the file in every error, and keeps the queue full::

    reads ──plan──▶ commands ──_submit──▶ the device's queue ──_poll──▶ destination on the host, or where it reaches
                                                                └───▶ staging slot ──copy stream──▶ on the GPU

Submissions are served in the order in which they came, by one thread.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ClassVar, TypeAlias

import torch

from monai_gds import limits
from monai_gds.base import cores
from monai_gds.base.process import Changes
from monai_gds.storage import files, plan, staging
from monai_gds.storage.backend import Backend
from monai_gds.storage.blocking import OpenFiles, naming_file, naming_group
from monai_gds.storage.files import ALIGNMENT, Expected
from monai_gds.storage.pending import Pending
from monai_gds.storage.reads import Reads, Row

#: Seconds for which an idle pump waits for another job before it leaves its thread. Waking a thread that waits here
#: costs less than handing it a task.
LINGER = 0.02


#: Pieces for the host, or for the device: as arrays, one by one, and in groups.
_Planned: TypeAlias = tuple[Reads, list[Row], list[slice]]


class Command:
    """One read of a part of a file into memory, as a queue takes and returns it.

    Attributes:
        handle: what :meth:`QueueBackend._open` returned for the file.
        offset: first byte within the file.
        nbytes: bytes to read; never 0.
        memory: 1-D uint8 tensor, a part of which they fill.
        start: first byte within ``memory``.
        room: bytes of ``memory`` after it that may be overwritten.
    """

    __slots__ = ("_file", "_group", "handle", "memory", "nbytes", "offset", "room", "start")

    def __init__(self, group: _Group, row: Row, memory: torch.Tensor) -> None:
        self._group = group
        self._file, self.offset, self.nbytes, _, self.start, self.room = row
        self.memory = memory
        self.handle: Any = None

    @property
    def address(self) -> int:
        """Address of the destination, in host memory, or on the device if the backend ``reaches_gpu``."""
        return self.memory.data_ptr() + self.start

    @property
    def dest(self) -> torch.Tensor:
        """The destination as a tensor."""
        return self.memory[self.start : self.start + self.nbytes]


class QueueBackend(Backend):
    """A backend that implements a queue of commands; see the module's docstring."""

    #: Most bytes per command: a multiple of ALIGNMENT, and no more than a staging slot has. Longer reads are cut.
    piece_bytes: int = 1 << 20

    #: Most bytes and commands that share a staging slot, which is copied when all of the commands are complete.
    group_bytes: ClassVar[int] = 4 << 20
    group_reads: ClassVar[int] = 256

    #: Most files open at a time, roughly: for commands in flight, and for those to come.
    open_files: ClassVar[int] = 32

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pump = _Pump(self)

    # What a backend implements, besides ``_open`` and ``_close``. All of it but close() runs in one thread.

    @abstractmethod
    def _submit(self, command: Command) -> bool:
        """Puts a command into the queue. Returns False while the queue is full.

        The command's memory and handle stay valid until :meth:`_poll` returns it.

        Raises:
            Exception: this command was refused, and is not in flight. Its file fails.
        """

    @abstractmethod
    def _poll(self) -> Iterable[tuple[Command, int | Exception]]:
        """Returns the commands that are complete, each with the bytes read or the error.

        After a short read the rest of the command is submitted again. Zero bytes mean that the file has ended. Called
        only while commands are in flight: it may wait until one is complete, or return none and be called again soon.

        Raises:
            Exception: the queue is broken. Everything in flight fails, and its memory is never freed, because the
                device may still write to it. :meth:`_give_up` is called next.
        """

    def _give_up(self) -> None:
        """Forgets all commands in flight, which have failed, after an error of the queue or of this file."""

    # Shared by all such backends.

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        self._count_served(reads, into)
        pending = Pending(list(into), self.device, len(reads.paths))
        direct = self.reaches_gpu and any(tensor.is_cuda for tensor in into)
        # A device that writes to GPU memory by itself bypasses the copy stream: it waits for the work that is queued
        # there by now.
        job = _Job(reads.paths, into, pending, staging.copy_stream(self.device).record_event() if direct else None)
        for part, rows, groups in self._plan(reads, into):
            opened = OpenFiles(reads, part.per_file(), self._pump.open, self._pump.close_file)
            job.opened.append(opened)
            job.groups.extend(_Group(job, part, rows, which, opened) for which in groups)
        job.unfinished = len(job.groups)
        if job.unfinished:
            self._pump.submit(job)
        else:
            pending.finish()
        return pending

    def _plan(self, reads: Reads, into: Sequence[torch.Tensor]) -> list[_Planned]:
        """The pieces for host and for device memory, in groups; planned once for all files with the same reads."""

        def make() -> list[_Planned]:
            whole = plan.coalesce(plan.by_file(reads.with_room(into)), limits.GAP_BYTES)
            parts = plan.by_side(plan.cut(whole, self.piece_bytes, even=True), into)
            return [
                (part, part.rows, plan.group(part, self.group_bytes, self.group_reads, self.group_bytes))
                for part in parts
            ]

        sizes = (self.piece_bytes, self.group_bytes, self.group_reads)
        return reads.planned((*sizes, *((t.numel(), t.is_cuda) for t in into)), make)

    def close(self) -> None:
        self._pump.close()

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "piece_bytes": self.piece_bytes}


class _Group:
    """Neighbouring reads that are issued together, into one staging slot or straight into their destinations."""

    __slots__ = ("_reads", "_rows", "_which", "copies", "job", "opened", "slot", "unfinished")

    def __init__(self, job: _Job, reads: Reads, rows: Sequence[Row], which: slice, opened: OpenFiles) -> None:
        self.job, self._reads, self._rows, self._which, self.opened = job, reads, rows[which], which, opened
        self.copies: plan.Copies = []  # from the slot to the destinations
        self.unfinished = len(self._rows)
        self.slot: staging.StagingSlot | None = None

    @property
    def on_device(self) -> bool:
        return self.job.into[self._rows[0].dest].is_cuda

    def commands(self, slot: staging.StagingSlot | None) -> list[Command]:
        """Its reads as commands, into a slot or into the destinations."""
        self.slot = slot
        if slot is None:
            into = self.job.into
            return [Command(self, row, into[row.dest]) for row in self._rows]
        if len(self._rows) == 1:  # most often: stage() takes as long as all the rest
            (row,) = self._rows
            self.copies = [(0, row.dest, row.start, row.nbytes)] if row.nbytes else []
            row = Row(row.file, row.offset, row.nbytes, 0, 0, -row.nbytes % ALIGNMENT)
            return [Command(self, row, slot.buffer)]
        staged, self.copies = plan.stage(self._reads[self._which])
        return [Command(self, row, slot.buffer) for row in staged.rows]

    def fail(self, error: Exception) -> None:
        for file in {row.file for row in self._rows}:
            self.job.pending.fail(file, naming_group(error, self.job.paths[file]))


class _Job:
    """One submission. The device waits for the event ``earlier`` before it writes to GPU memory by itself."""

    def __init__(
        self, paths: Sequence[str], into: Sequence[torch.Tensor], pending: Pending, earlier: torch.cuda.Event | None
    ) -> None:
        self.paths, self.into, self.pending, self.earlier = paths, into, pending, earlier
        self.groups: deque[_Group] = deque()  # that have not been started
        self.opened: list[OpenFiles] = []
        self.todo: deque[Command] = deque()  # of the current group, not issued yet
        self.unfinished = 0  # groups


class _Slots:
    """The staging slots of one queue: those being filled, and those whose copies to the device are under way.

    A queue reuses its own slots as soon as they are free, before it takes others of the pool: all slots in use together
    should fit into the processor's cache from the read that fills them to the copy. An idle queue gives them back.
    """

    #: Most slots being filled at a time, and most slots in all, with those on their way to the device.
    filling_at_once, all_at_once = 4, 6

    def __init__(self, device: torch.device) -> None:
        self._pool = staging.staging_pool(device)
        self._filling = 0
        self._sent: deque[staging.StagingSlot] = deque()

    def take(self) -> staging.StagingSlot | None:
        """A slot to fill, or None while there is none.

        A queue that holds slots never waits for the pool: two that did could wait for each other for ever.
        """
        if self._filling == self.filling_at_once:
            return None
        slot: staging.StagingSlot | None = None
        if self._sent and self._sent[0].event.query():  # type: ignore[no-untyped-call]
            slot = self._sent.popleft()
        elif not self._filling and not self._sent:
            slot = self._pool.acquire()
        elif self._filling + len(self._sent) < self.all_at_once:
            slot = self._pool.try_acquire()
        self._filling += slot is not None
        return slot

    def sent(self, slot: staging.StagingSlot) -> None:
        """Takes a slot whose copies are queued, or which is not needed any more."""
        self._filling -= 1
        self._sent.append(slot)

    def wait(self) -> bool:
        """Waits for the oldest copy; False when none is under way."""
        if self._sent:
            self._sent[0].event.synchronize()
        return bool(self._sent)

    def give_back(self, *, abandon: bool = False) -> None:
        """Returns the slots that are not being filled to the pool. To ``abandon`` is to write off the others too."""
        while self._sent:
            self._pool.release(self._sent.popleft())
        if abandon:
            self._pool.forget(self._filling)
            self._filling = 0


class _Pump:
    """The loop in front of a queue: one thread that feeds it with all submissions, first come first served, and polls.

    There is one thread because several would spend their time passing the interpreter's lock around: measured on an
    H100, batches of four 74 MB records arrived at 20 GB/s with four threads and at 40 with one. The copy stream is its
    current stream. Where no thread can be started, the caller of :meth:`submit` does the work in its own.
    """

    def __init__(self, backend: QueueBackend) -> None:
        self.device = backend.device
        self._backend = backend
        self._in_flight: set[Command] = set()
        self._open_files = 0
        self._slots = _Slots(self.device)
        self._changed = Changes()
        self._incoming: deque[_Job] = deque()
        self._jobs: list[_Job] = []  # touched only by the thread at work
        self._worker: int | None = None  # identifier of that thread; None while no thread is at work
        self._naps = 0
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, job: _Job) -> None:
        """Adds a job. Raises RuntimeError in the pump's own thread, in a step of :meth:`Pending.then`."""
        with self._changed.lock:
            if self._worker == threading.get_ident():
                raise RuntimeError(
                    "a step given to Pending.then runs in the thread that reads, so it cannot read from the same "
                    "storage: wait for the reads first, or open another storage for the step"
                )
            self._incoming.append(job)
            if self._worker is not None:
                self._changed.notify_all()
                return
            if self._executor is None:
                name, near = f"monai-gds-{self._backend.name}", staging.near(self.device)
                self._executor = ThreadPoolExecutor(1, name, cores.stay_on, (near,))
            with suppress(RuntimeError):  # the process is ending, or may start no more threads
                self._executor.submit(self._work, self._executor)
                return
        self._work()

    def close(self) -> None:
        """Waits until no job is left, and ends the thread. The pump may be used again afterwards."""
        with self._changed.lock:
            executor, self._executor = self._executor, None
            self._changed.notify_all()
        if executor is not None:
            executor.shutdown(wait=True)
        with self._changed.lock:
            self._changed.wait_for(lambda: self._worker is None)  # in a caller's thread
        self._work()  # on a job whose caller was interrupted before it could hand it over

    def _work(self, executor: ThreadPoolExecutor | None = None) -> None:
        """Works until no job is left, unless another thread is at work."""
        with self._changed.lock:
            if self._worker is not None:
                return
            self._worker = threading.get_ident()
        interrupt: BaseException | None = None
        while True:
            try:
                with staging.on_copy_stream(self.device):
                    while self._take(executor):
                        self._step()
                break
            except Exception as e:
                self._give_up(e)
                break
            except BaseException as e:  # Ctrl-C in a caller's thread: commands in flight must still arrive
                interrupt = e
        if interrupt is not None:
            raise interrupt

    def _take(self, executor: ThreadPoolExecutor | None) -> bool:
        """Takes incoming jobs. Returns False if there is no job, and then no thread is at work any more."""
        if self._jobs and not self._incoming:
            return True
        if not self._jobs:
            self._slots.give_back()
        with self._changed.lock:
            if not self._jobs and executor is not None:  # close() takes the executor away
                self._changed.wait_for(lambda: self._incoming or self._executor is not executor, LINGER)
            self._jobs += self._incoming
            self._incoming.clear()
            if not self._jobs:
                self._stop_working()
            return bool(self._jobs)

    def _stop_working(self) -> None:
        self._worker = None
        self._changed.notify_all()

    def _step(self) -> None:
        for job in list(self._jobs):
            if not self._feed(job):
                break
        if not self._jobs or self._poll():
            self._naps = 0
            return
        self._naps += 1
        if self._naps > 3:  # other processes may take long before they give the processor back
            time.sleep(0 if self._naps < 20 else 50e-6)

    # Files and commands.

    def open(self, path: str, expected: Expected) -> Any:
        handle = self._backend._open(path, expected)
        self._open_files += 1
        return handle

    def close_file(self, handle: Any) -> None:
        self._open_files -= 1
        self._backend._close(handle)

    def _feed(self, job: _Job) -> bool:
        if job.earlier is not None:
            if self._in_flight and not job.earlier.query():  # type: ignore[no-untyped-call]
                return False
            job.earlier.synchronize()
            job.earlier = None
        while job.todo or job.groups:
            if not job.todo and not self._begin(job):
                return False
            while job.todo:
                if not self._issue(job, job.todo[0]):
                    return False
                job.todo.popleft()
        return True

    def _begin(self, job: _Job) -> bool:
        """Turns a job's next group into commands. Returns False while there is no slot for it."""
        group, slot = job.groups[0], None
        if not self._backend.reaches_gpu and group.on_device:
            try:
                slot = self._slots.take()
            except Exception as e:  # no more memory can be pinned
                group.fail(e)
            else:
                if slot is None:
                    return False
        job.todo.extend(group.commands(slot))
        job.groups.popleft()
        return True

    def _issue(self, job: _Job, command: Command) -> bool:
        """Puts a command into the queue, or completes it if there is nothing to read. False while there is no room."""
        file, opened = command._file, command._group.opened
        try:
            if not job.pending.failed(file):
                if self._open_files >= self._backend.open_files and file not in opened and self._in_flight:
                    return False
                command.handle = opened.handle(file)
                if command.nbytes:
                    self._in_flight.add(command)
                    if not self._backend._submit(command):
                        self._in_flight.remove(command)
                        return False
                    return True
        except Exception as e:
            self._in_flight.discard(command)
            job.pending.fail(file, naming_file(e, job.paths[file]))
        self._complete(command)
        return True

    def _poll(self) -> bool:
        """Handles completed commands. Returns whether there were any. It may wait for the first one in flight."""
        if not self._in_flight:
            return self._slots.wait()
        found = False
        for command, result in self._backend._poll():
            found = True
            self._in_flight.remove(command)
            self._check(command, result)
        return found

    def _check(self, command: Command, result: int | Exception) -> None:
        job = command._group.job
        path = job.paths[command._file]
        if isinstance(result, Exception):
            job.pending.fail(command._file, naming_file(result, path))
        elif 0 < result < command.nbytes:
            command.offset += result
            command.start += result
            command.nbytes -= result
            job.todo.appendleft(command)
            return
        elif not result:
            job.pending.fail(command._file, files.ends_early(command.offset, command.nbytes, path))
        self._complete(command)

    def _complete(self, command: Command) -> None:
        """Handles the end of a command, read or not. The last one of a group queues its copies."""
        group = command._group
        try:
            group.opened.done(command._file)
        except Exception as e:
            group.job.pending.fail(command._file, naming_file(e, group.job.paths[command._file]))
        group.unfinished -= 1
        if group.unfinished:
            return
        sent = None if group.slot is None else self._send(group, group.slot)
        group.job.unfinished -= 1
        if not group.job.unfinished:
            self._jobs.remove(group.job)
            # Its last copy is after all others of the job, which went to the same stream before it.
            group.job.pending.finish(sent)

    def _send(self, group: _Group, slot: staging.StagingSlot) -> torch.cuda.Event | None:
        """Queues a group's copies. Returns the event after them; None if there were none, or one was refused."""
        stream, into = staging.copy_stream(self.device), group.job.into
        after: torch.cuda.Event | None = slot.event if group.copies else None
        try:
            for at, dest, start, nbytes in group.copies:
                slot.send(into[dest].data_ptr() + start, nbytes, stream, at)
        except Exception as e:
            group.fail(e)
            after = None
        self._slots.sent(slot)
        return after

    def _give_up(self, error: Exception) -> None:
        """Ends all jobs after an error of the queue itself: the device may still write to memory of those in flight."""
        while True:
            with self._changed.lock:
                jobs, self._jobs = [*self._jobs, *self._incoming], []
                self._incoming.clear()
                if not jobs:
                    self._stop_working()
                    return
            if self._in_flight:
                _abandoned.append(self._in_flight)
                self._in_flight = set()
            self._slots.give_back(abandon=True)
            self._backend._give_up()
            for job in jobs:
                for opened in job.opened:
                    opened.close(job.pending.fail)
                for file, path in enumerate(job.paths):
                    job.pending.fail(file, naming_file(RuntimeError(f"the queue failed: {error}"), path))
                job.pending.finish()


#: Commands of queues that broke. Their destinations and slots are never freed.
_abandoned: list[set[Command]] = []
