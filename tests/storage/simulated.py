"""A simulated GPU and a simulated KvikIO, over host memory: what the queue base and kvikio.py do with theirs.

Copies to the "device" arrive late and in order, by a thread, as on a copy stream. Nothing here shows that CUDA or
KvikIO behave like this: the tests marked ``gpu`` do.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds import limits
from monai_gds.storage import staging

GPU = torch.device("cuda", 0)


class DeviceTensor(torch.Tensor):
    """A host tensor that passes for one on the GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    device = property(lambda self: GPU)  # type: ignore[assignment]

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return on_device(self.cpu().clone())


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a "device" tensor."""
    return tensor.as_subclass(DeviceTensor)


class Event:
    """Is over when all copies that were queued before it are."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._over.set()

    def record(self, stream: Stream) -> None:
        over = self._over = threading.Event()
        stream.put(over.set)

    def query(self) -> bool:
        return self._over.is_set()

    def synchronize(self) -> None:
        assert self._over.wait(30)


class Stream:
    """Does what is queued in order, each a moment late."""

    cuda_stream = 1

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.put = self._tasks.put
        self._thread = threading.Thread(target=self._run, name="simulated GPU", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def keep(self, tensor: torch.Tensor) -> None:
        """Keeps the memory of a dropped tensor until what is queued by then is over, as CUDA's allocator does."""
        weakref.finalize(tensor, self.put, functools.partial(id, tensor.cpu()))

    @contextmanager
    def current(self, device: torch.device) -> Iterator[None]:
        """What is queued inside of this runs on the host at once, so all that was queued before has to be over."""
        self.record_event().synchronize()
        yield

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()


class Slot:
    """In place of staging.StagingSlot."""

    def __init__(self, nbytes: int) -> None:
        raw = torch.empty(nbytes + 4096, dtype=torch.uint8)
        start = -raw.data_ptr() % 4096
        self.buffer = raw[start : start + nbytes]
        self.event = Event()

    def send(self, address: int, nbytes: int, stream: Stream, offset: int = 0) -> None:
        source = self.buffer.data_ptr() + offset

        def copy() -> None:
            time.sleep(0.0005)
            ctypes.memmove(address, source, nbytes)

        stream.put(copy)
        self.event.record(stream)


class Pool(staging.StagingPool):
    """Without a current stream of CUDA's."""

    def upload(self, slot: Any, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        for offset, dest in parts:
            if dest.nbytes:
                slot.send(dest.data_ptr(), dest.nbytes, staging.copy_stream(GPU), offset)
        self.release(slot)


def install_gpu(patch: pytest.MonkeyPatch, slots: int = limits.STAGING_SLOTS) -> SimpleNamespace:
    """Puts a simulated GPU in place of CUDA. Its ``stream`` has to be closed at the end."""
    stream = Stream()
    patch.setattr(staging, "StagingSlot", Slot)
    pool = Pool(GPU, slots)
    patch.setattr(staging, "copy_stream", lambda device: stream)
    patch.setattr(staging, "on_copy_stream", stream.current)
    patch.setattr(staging, "staging_pool", lambda device: pool)
    patch.setattr(staging, "pinned_bytes", lambda device: pool.nbytes)
    patch.setattr(staging, "raw_current_stream", lambda device: 1)
    patch.setattr(staging, "current_stream", lambda device: stream)
    patch.setattr(staging, "adopt", lambda dests, device: [stream.keep(dest) for dest in dests])
    patch.setattr(staging, "hand_off", lambda dests, device, after: after.synchronize())

    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        tensor = on_device(torch.empty(nbytes, dtype=torch.uint8))
        stream.keep(tensor)
        return tensor

    patch.setattr(staging, "allocate_on_copy_stream", allocate)
    return SimpleNamespace(stream=stream, pool=pool)


class KvikIO:
    """In place of the package: reads and writes in tasks, by threads of its own.

    As the real one, it reports the first error of a read while other tasks of that read are still at work.

    Attributes:
        fail: called with the offset of each task, and may raise.
        called: called with the name of each call, and may raise in its place. Gives ``get`` another result, if any.
        opened, reads: what it was asked for: paths, and (offset, bytes) of each read.
        misused: what a caller did that would have crashed the real one.
    """

    def __init__(self, threads: int = 1) -> None:
        self.fail: Callable[[int], None] = lambda offset: None
        self.called: Callable[[str], int | None] = lambda name: None
        self.opened: list[str] = []
        self.reads: list[tuple[int, int]] = []
        self.misused: list[str] = []
        self.settings: dict[str, Any] = {"num_threads": threads, "bounce_buffer_size": 16 << 20, "compat_mode": "AUTO"}
        self.pool = _started()
        self.prefers_compat_mode = True

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Makes ``import kvikio`` find this."""
        module, defaults = ModuleType("kvikio"), ModuleType("kvikio.defaults")
        defaults.__dict__.update(
            get=self.settings.get, set=self.set, is_compat_mode_preferred=lambda: self.prefers_compat_mode
        )
        module.__dict__.update(
            defaults=defaults, CuFile=lambda path, flags: CuFile(self, path, flags), __version__="0",
            CompatMode=SimpleNamespace(OFF="OFF", AUTO="AUTO"),
        )  # fmt: skip
        patch.setitem(sys.modules, "kvikio", module)
        patch.setitem(sys.modules, "kvikio.defaults", defaults)

    def set(self, name: str, value: Any) -> None:
        """Setting the number of threads waits for running tasks."""
        self.settings[name] = value
        if name == "num_threads":
            before, self.pool = self.pool, _started()
            before.shutdown()


def _started() -> ThreadPoolExecutor:
    """All threads at once, as KvikIO's are there from the beginning."""
    pool, together = ThreadPoolExecutor(4), threading.Barrier(4)
    for future in [pool.submit(together.wait) for _ in range(4)]:
        future.result()
    return pool


class CuFile:
    """In place of kvikio.CuFile."""

    def __init__(self, kvikio: KvikIO, path: str, flags: str) -> None:
        self._kvikio = kvikio
        kvikio.called("open")
        self._fd = os.open(path, {"r": os.O_RDONLY, "r+": os.O_RDWR}[flags])
        self._at_work = 0
        self._lock = threading.Lock()
        kvikio.opened.append(os.path.realpath(path))

    def __enter__(self) -> CuFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._at_work:
            self._kvikio.misused.append("a file was closed while tasks were at work on it")
        os.close(self._fd)
        self._kvikio.called("close")

    def pread(self, buffer: Any, size: int, file_offset: int = 0, task_size: int = 4 << 20) -> IOFuture:
        self._kvikio.called("pread")
        self._kvikio.reads.append((file_offset, size))
        return self._start(os.preadv, buffer, size, file_offset, task_size)

    def pwrite(self, buffer: Any, size: int, file_offset: int = 0, task_size: int = 4 << 20) -> IOFuture:
        self._kvikio.called("pwrite")
        return self._start(self._write_blocks, buffer, size, file_offset, task_size)

    @staticmethod
    def _write_blocks(fd: int, views: list[memoryview], offset: int) -> int:
        """As cuFile writes: the last block with what was after the data some time ago."""
        end = offset + views[0].nbytes
        behind = os.pread(fd, -end % 4096, end)
        time.sleep(0.01)
        os.pwritev(fd, [*views, behind], offset)
        return views[0].nbytes

    def _start(self, call: Any, buffer: Any, size: int, offset: int, task_size: int) -> IOFuture:
        if call is not os.preadv and offset % 4096:
            self._kvikio.misused.append("a write began inside of a block")
        array = buffer.cpu().numpy() if isinstance(buffer, torch.Tensor) else buffer
        assert array.nbytes == size, "KvikIO would write past the end of the buffer"
        with self._lock:
            self._at_work += -(-size // task_size)
        starts = range(0, size, task_size)
        return IOFuture(
            self._kvikio,
            [self._kvikio.pool.submit(self._task, call, array[at : at + task_size], offset + at) for at in starts],
        )

    def _task(self, call: Any, part: np.ndarray, offset: int) -> int:
        try:
            self._kvikio.fail(offset)
            done = 0
            while done < part.nbytes:
                count = call(self._fd, [part.data[done:]], offset + done)
                if not count:
                    raise RuntimeError("POSIX error on pread: EOF")
                done += count
            return done
        finally:
            with self._lock:
                self._at_work -= 1


class IOFuture:
    """In place of KvikIO's: the bytes of all tasks, or the first error."""

    def __init__(self, kvikio: KvikIO, tasks: list[Future[int]]) -> None:
        self._kvikio, self._tasks = kvikio, tasks

    def get(self) -> int:
        done = sum(task.result() for task in self._tasks)
        instead = self._kvikio.called("get")
        return done if instead is None else instead
