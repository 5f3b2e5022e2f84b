"""What the machine allows: the copy to the device, reading from the page cache, reading from the disk.

Measured beside the peers, one sample each in turn with them, and shown as lines in the plot. Each moves the same bytes
in the simplest way there is, so that nothing that gives tensors should be faster, with one exception: private mappings
on a CPU target copy nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from monai_gds.bench.pagecache import drop
from monai_gds.bench.report import Row
from monai_gds.storage.threaded import aligned_empty

__all__ = ["Ceilings"]

#: A block of the page cache that a thread reads at a time, and one of the disk.
_CACHED_BLOCK = 4 << 20
_DIRECT_BLOCK = 8 << 20

#: The memory that is read into; more than the processor's caches hold.
_ROOM = 256 << 20

#: Threads that read directly, each taking the next block: as many requests are in flight.
_IN_FLIGHT = 4

#: Fewer bytes show how a disk begins, and more are not needed to see its full speed.
_LEAST_BYTES = 256 << 20
_MOST_BYTES = 1 << 30

#: Threads that read from the page cache, at the most.
_MOST_THREADS = 16


class Ceilings:
    """The measurements, and the file that they read. Use it in a ``with`` statement.

    Args:
        folder: on the drive that is measured.
        device: the target.
        nbytes: bytes that an epoch moves; 256 MiB to 1 GiB are read.
        scale: what a GB/s is in the report's unit.
    """

    def __init__(self, folder: Path, device: torch.device, nbytes: int, scale: float = 1.0) -> None:
        self._path = folder / "ceilings.bin"
        self._device = device
        self._blocks = min(max(nbytes, _LEAST_BYTES), _MOST_BYTES) // _DIRECT_BLOCK
        self._scale = scale
        self._reasons: dict[str, str] = {}
        self._samples: dict[str, list[float]] = {}
        self._room = torch.empty(0)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._blocks * _DIRECT_BLOCK

    def __enter__(self) -> Ceilings:
        block = os.urandom(_DIRECT_BLOCK)
        with open(self._path, "xb") as f:
            for _ in range(self._blocks):
                f.write(block)
            os.fsync(f.fileno())
        if self._device.type == "cuda":
            self._room = torch.zeros(_ROOM, dtype=torch.uint8, pin_memory=True)
        else:
            self._room = aligned_empty(_ROOM).zero_()
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink()
        self._room = torch.empty(0)

    def sample(self) -> None:
        """Measures each once."""
        for name, measure in self._measurements().items():
            if name in self._reasons:
                continue
            try:
                seconds = measure()
            except OSError as e:
                self._reasons[name] = str(e)
                continue
            self._samples.setdefault(name, []).append(self._scale * self.nbytes / 1e9 / seconds)

    def rows(self) -> list[Row]:
        """What was measured, in the order of speed that is usual."""
        return [
            Row(name, tuple(self._samples.get(name, ())), reason=self._reasons.get(name, ""))
            for name in self._measurements()
        ]

    def _measurements(self) -> dict[str, Callable[[], float]]:
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        into = "pinned memory" if self._device.type == "cuda" else "memory"
        found: dict[str, Callable[[], float]] = {}
        if self._device.type == "cuda":
            found["pinned copy to the GPU"] = self._copy
        else:
            found["reading memory (torch's sum)"] = self._sum
        found[f"page cache to {into}, {threads} threads"] = lambda: self._read(0, _CACHED_BLOCK, threads)
        found[f"disk, direct, {_IN_FLIGHT} in flight"] = lambda: self._read(os.O_DIRECT, _DIRECT_BLOCK, _IN_FLIGHT)
        found["disk, direct, one by one"] = lambda: self._read(os.O_DIRECT, _DIRECT_BLOCK, 1)
        return found

    def _copy(self) -> float:
        dest = torch.empty_like(self._room, device=self._device)
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        for _ in range(self.nbytes // self._room.numel()):
            dest.copy_(self._room, non_blocking=True)
        torch.cuda.synchronize(self._device)
        copied = self.nbytes // self._room.numel() * self._room.numel()
        return (time.perf_counter() - start) * self.nbytes / copied

    def _sum(self) -> float:
        numbers = self._room.view(torch.float32)
        times = self.nbytes // self._room.numel()
        start = time.perf_counter()
        for _ in range(times):
            numbers.sum()
        return (time.perf_counter() - start) * self.nbytes / (times * self._room.numel())

    def _read(self, flags: int, block: int, threads: int) -> float:
        """Seconds of reading the file once, in order, with so many requests in flight."""
        view = self._room.numpy().data
        if not flags & os.O_DIRECT:
            _warm(self._path, view)
        elif drop([self._path]) > 0.5:
            raise OSError(f"the file system of {self._path.parent} keeps its files in memory: there is no disk to read")
        blocks = range(0, self.nbytes, block)
        with ExitStack() as stack:
            fd = stack.enter_context(_opened(self._path, flags))

            def read(offset: int) -> None:
                at = offset % len(view)
                if os.preadv(fd, [view[at : at + block]], offset) != block:
                    raise OSError(f"short read at byte {offset} of {self._path}")

            pool = stack.enter_context(ThreadPoolExecutor(threads)) if threads > 1 else None
            start = time.perf_counter()
            _run_all(read, blocks, pool)
            return time.perf_counter() - start


def _run_all(read: Callable[[int], None], blocks: Sequence[int], pool: ThreadPoolExecutor | None) -> None:
    for _ in (pool.map if pool is not None else map)(read, blocks):
        pass


def _warm(path: Path, view: memoryview) -> None:
    with open(path, "rb", buffering=0) as f:
        while f.readinto(view):
            pass


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)
