"""``Pending``: reads under way, which a backend completes and its caller waits for."""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import torch

from monai_gds.base.process import Changes
from monai_gds.storage import staging
from monai_gds.storage.reads import Reads

#: A step after the reads: gets the destinations and the errors by file, returns the tensors to hand out instead.
Then: TypeAlias = "Callable[[list[torch.Tensor], Mapping[int, Exception]], list[torch.Tensor]]"

#: Looks at what was read: gets the errors by file, returns them with those that it adds.
Check: TypeAlias = "Callable[[Mapping[int, Exception]], Mapping[int, Exception]]"


class Pending:
    """Reads under way, and the tensors that they fill.

    For the caller: :meth:`wait`, or :attr:`errors` and :attr:`tensors` where one file's failure must not hide the
    others'. A Pending may be dropped without waiting: the reads go on, and their destinations are freed after them.

    For a backend: :meth:`fail` for each file that cannot be read, then :meth:`finish` once, when every byte has arrived
    or its copy is queued on the copy stream, and nothing writes to a destination any more.

    Args:
        tensors: the destinations.
        device: the target device of the storage.
        files: how many files are read.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds import open_storage
        >>> from monai_gds.storage import Reads
        >>> _ = Path("file.bin").write_bytes(bytes(range(100)))
        >>> pending = open_storage("posix", "cpu").load(Reads.of("file.bin", [(0, 2), (98, 2)]))
        >>> head, tail = pending.wait()
        >>> tail
        tensor([98, 99], dtype=torch.uint8)
    """

    __slots__ = (
        "_arrived", "_device", "_done", "_ended", "_errors", "_files", "_followers", "_on_hand_off", "_ordered",
        "_tensors",
    )  # fmt: skip

    def __init__(self, tensors: list[torch.Tensor], device: torch.device, files: int = 1) -> None:
        self._tensors = tensors
        self._device = device
        self._files = files
        self._errors: dict[int, Exception] = {}
        self._done = False
        self._ended = Changes()
        self._followers: list[Callable[[], None]] = []
        self._arrived: torch.cuda.Event | None = None
        self._on_hand_off: Callable[[], None] | None = None
        self._ordered: set[int] = set()  # raw handles of the streams that wait for the copies already

    @classmethod
    def completed(cls, tensors: list[torch.Tensor], device: torch.device, error: Exception | None = None) -> Pending:
        """A Pending of one file that is over already: host tensors, or the error. Every hit on a CPU makes one."""
        pending = cls(tensors, device)
        pending._done = True
        if error is not None:
            pending._errors[0] = error
        return pending

    # For the caller.

    @property
    def done(self) -> bool:
        """Whether all reads are over, so that the host need not wait."""
        return self._done

    @property
    def errors(self) -> Mapping[int, Exception]:
        """Waits, and returns the errors: index of the file in ``Reads.paths`` to exception."""
        self._wait()
        return self._errors

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Waits, and returns the tensors, ready for the current stream. Those of a file that failed hold anything."""
        self._wait()
        return self._tensors

    def wait(self) -> list[torch.Tensor]:
        """Waits, and returns the tensors in the order of the destinations.

        The host does not wait for copies to a CUDA device: the current stream does. Further calls give the same, also
        from other threads and on other streams.

        Raises:
            OSError: a file could not be opened or read (StorageError for a short read, FileChanged for another file);
                the first by its index if there are several.
        """
        self._wait()
        if self._errors:
            try:
                raise self._errors[min(self._errors)].with_traceback(None)  # another wait() may have raised it before
            finally:
                del self  # else the error holds its traceback, that holds this frame, and that the error
        return self._tensors

    def then(self, step: Then, *, aside: bool = False) -> Pending:
        """Adds a step that runs once, after all reads, in the thread that finishes them and on the copy stream.

        Args:
            step: see :data:`Then`. On a CUDA target it runs on the copy stream, after the copies, and its results are
                handed out like destinations; it must allocate on the current stream. It must not read from the same
                storage, since it may run in the storage's own thread: there a queue raises RuntimeError.
            aside: on a CUDA target, run the step on one of several other streams, so that later copies do not wait for
                it. This suits work that takes longer than a copy.

        Returns:
            Pending of the tensors that ``step`` returns. An exception in ``step`` fails every file.
        """
        after = Pending([], self._device, self._files)

        def run() -> torch.cuda.Event | None:
            after._errors.update(self._errors)  # first: a step that fails over unread bytes must not hide the cause
            device, beside = self._device, aside and self._device.type == "cuda"
            side = staging.on_side_stream(self._tensors, device, self._arrived) if beside else None
            with side or staging.on_copy_stream(device):
                after._tensors = step(self._tensors, self._errors)
                return staging.current_stream(device).record_event() if beside else None

        self._follow(functools.partial(after._finish_by, run))
        return after

    def checked(self, tensors: Sequence[torch.Tensor], files: int, check: Check) -> Pending:
        """A Pending of ``tensors`` and of the first ``files`` files. After all reads, those that ``check`` finds wrong
        fail. It runs where the steps of :meth:`then` do.
        """
        after = Pending(list(tensors), self._device, files)

        def run() -> None:
            after._errors.update((file, error) for file, error in self._errors.items() if file < files)
            with staging.on_copy_stream(self._device):
                for file, error in check(self._errors).items():
                    after.fail(file, error)

        self._follow(functools.partial(after._finish_by, run))
        return after

    def _finish_by(self, run: Callable[[], torch.cuda.Event | None]) -> None:
        """Calls ``run`` and finishes. An error in it fails every file that has not failed before."""
        event = None
        try:
            event = run()
        except Exception as e:
            # As text, since its frames would keep tensors alive until the garbage collector runs.
            e.add_note("".join(traceback.format_tb(e.__traceback__)))
            self.fail_all(e.with_traceback(None))
        self.finish(event)

    def _follow(self, run: Callable[[], None]) -> None:
        """Calls ``run`` after all reads: in the thread that finishes them, or here if they are over already."""
        with self._ended.lock:
            if not self._done:
                self._followers.append(run)
                return
        run()

    def trimmed(self, sizes: list[int]) -> Pending:
        """Cuts each tensor to a number of bytes, and returns this Pending."""
        self._tensors = [tensor[:nbytes] for tensor, nbytes in zip(self._tensors, sizes, strict=True)]
        return self

    # For a backend.

    def fail(self, file: int, error: Exception) -> None:
        """Notes the first error of a file."""
        self._errors.setdefault(file, error)

    def fail_all(self, error: Exception) -> None:
        """Notes an error that is not about one file."""
        for file in range(max(self._files, 1)):  # a step may raise where no file was read
            self.fail(file, error)

    def failed(self, file: int) -> bool:
        """Whether a file has failed already, so that its other reads need not be tried."""
        return file in self._errors

    def on_hand_off(self, note: Callable[[], None]) -> None:
        """Calls ``note`` whenever the tensors are handed to a stream, which is then the current one.

        For destinations in memory that torch's allocator does not manage.
        """
        self._on_hand_off = note

    def finish(self, after: torch.cuda.Event | None = None) -> None:
        """Marks the reads as over: from now on, only copies that are already queued write to the destinations.

        Args:
            after: an event on the copy stream after all of those copies; None records one.
        """
        if after is not None:
            self._arrived = after
        elif self._device.type == "cuda" and any(t.is_cuda for t in self._tensors):
            try:
                self._arrived = staging.copy_stream(self._device).record_event()
            except Exception as e:
                self.fail_all(e)
        with self._ended.lock:
            self._done = True
            followers, self._followers = self._followers, []
            self._ended.notify_all()
        with ExitStack() as stack:  # all of them, also after a Ctrl-C in one
            for follower in reversed(followers):
                stack.callback(follower)

    @classmethod
    def joined(cls, several: Sequence[Pending], tensors: list[torch.Tensor], device: torch.device) -> Pending:
        """One Pending for parts of the same reads that were started separately, with the same indices of files."""
        whole = cls(tensors, device, max(part._files for part in several))
        unfinished = len(several)
        lock = threading.Lock()

        def on_end(part: Pending) -> None:
            nonlocal unfinished
            with lock:
                for file, error in part._errors.items():
                    whole.fail(file, error)
                unfinished -= 1
                last = not unfinished
            if last:
                whole.finish()

        for part in several:
            part._follow(functools.partial(on_end, part))
        return whole

    # Waiting.

    def _wait(self) -> None:
        if not self._done:  # read without the lock: it only ever becomes true
            with self._ended.lock:
                self._ended.wait_for(lambda: self._done)
        if self._arrived is not None:
            self._order()

    def _order(self) -> None:
        """Has the current stream wait for the copies, once, and keeps the memory until it has used it."""
        stream = staging.raw_current_stream(self._device)
        if stream not in self._ordered and self._arrived is not None:
            staging.hand_off([t for t in self._tensors if t.is_cuda], self._device, after=self._arrived)
            if self._on_hand_off is not None:
                self._on_hand_off()
            self._ordered.add(stream)


class Unpacked(Pending):
    """Copies of the parts of one block on a CUDA device, each a tensor; made by one kernel when they are waited for.

    They are made on the first stream that waits, not on the copy stream. A tensor that is freed on the stream that it
    was made on costs torch's allocator nothing. On another stream each costs an event, and a batch has hundreds.
    """

    __slots__ = ("_block", "_lock", "_made_on", "_reads")

    def __init__(self, block: Pending, reads: Reads, device: torch.device) -> None:
        super().__init__([], device, len(reads.paths))
        self._block: Pending | None = block
        self._reads = reads
        self._lock = threading.Lock()
        self._made_on: torch.cuda.Stream | None = None

    @property
    def done(self) -> bool:
        return self._block is None or self._block.done

    def then(self, step: Then, *, aside: bool = False) -> Pending:
        block = self._block
        if block is None:  # the tensors have been made
            return Pending.completed(step(self.tensors, self._errors), self._device)
        return block.then(lambda blocks, errors: step(self._take_apart(blocks[0]), errors), aside=aside)

    def _take_apart(self, block: torch.Tensor) -> list[torch.Tensor]:
        parts = self._reads.parts([block])
        if all(self._reads.nbytes):  # not every version of torch skips empty ones
            return list(torch._foreach_add(parts, 0))  # one kernel; there is no _foreach_clone
        return [part.clone() for part in parts]

    def _wait(self) -> None:
        stream = staging.raw_current_stream(self._device)
        if stream in self._ordered:  # most often: the other records of a group come here
            return
        pending = self._block
        if pending is not None:
            _ = pending.tensors  # without the lock: it may wait
        with self._lock:
            current = staging.current_stream(self._device)
            if self._made_on is None and pending is not None:
                self._errors = dict(pending.errors)
                self._tensors, self._made_on = self._take_apart(pending.tensors[0]), current
                self._block = None  # its memory is free for others
            elif self._made_on is not None and stream not in self._ordered:
                current.wait_stream(self._made_on)
                for tensor in self._tensors:
                    tensor.record_stream(current)
            self._ordered.add(stream)
