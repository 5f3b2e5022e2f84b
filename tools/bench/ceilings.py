"""The limits of the machine: the copy to the device, reads from the page cache, reads from the disk.

Each moves the same bytes in the simplest way there is, so nothing that returns tensors should be faster, with one
exception: private mappings on a CPU target copy nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from monai_gds.bench.pagecache import drop
from monai_gds.bench.processor import synchronize
from monai_gds.bench.report import Row
from tools.bench.parallel_read import page_aligned, read_parallel

__all__ = ["Ceilings"]

_CACHED_BLOCK = 4 << 20  # bytes per request to the page cache
_DIRECT_BLOCK = 8 << 20  # bytes per request to the disk
_MEMORY = 256 << 20  # bytes of the destination: more than the processor's caches hold
_IN_FLIGHT = 4  # direct requests
_MOST_THREADS = 16  # reading from the page cache

#: Size of the file: enough to see a disk's sustained speed, and no more than needed for that.
_LEAST_BYTES = 256 << 20
_MOST_BYTES = 1 << 30


class Ceilings:
    """The measurements and the file that they read, on the drive to measure. A context manager.

    An epoch moves ``nbytes``; the file has as many, but at least 256 MiB and at most 1 GiB. ``scale`` converts GB/s to
    the report's unit.
    """

    def __init__(self, folder: Path, device: torch.device, nbytes: int, scale: float = 1.0) -> None:
        self._path = folder / "ceilings.bin"
        self._device = device
        self._scale = scale
        self.nbytes = min(max(nbytes, _LEAST_BYTES), _MOST_BYTES) // _DIRECT_BLOCK * _DIRECT_BLOCK
        self._memory = torch.empty(0)
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        on_gpu = device.type == "cuda"
        copy = "pinned copy to the GPU" if on_gpu else "reading memory (torch's sum)"
        page_cache = f"page cache to {'pinned ' if on_gpu else ''}memory, {threads} threads"
        self._measurements: dict[str, Callable[[], float]] = {
            copy: self._copy if on_gpu else self._sum,
            page_cache: partial(self._read, False, _CACHED_BLOCK, threads),
            f"disk, direct, {_IN_FLIGHT} in flight": partial(self._read, True, _DIRECT_BLOCK, _IN_FLIGHT),
            "disk, direct, one by one": partial(self._read, True, _DIRECT_BLOCK, 1),
        }
        self._samples: dict[str, list[float]] = {name: [] for name in self._measurements}
        self._reasons = dict.fromkeys(self._measurements, "")

    def __enter__(self) -> Ceilings:
        block = os.urandom(_DIRECT_BLOCK)
        with open(self._path, "xb") as f:
            for _ in range(self.nbytes // _DIRECT_BLOCK):
                f.write(block)
            os.fsync(f.fileno())
        if self._device.type == "cuda":
            self._memory = torch.zeros(_MEMORY, dtype=torch.uint8, pin_memory=True)
        else:
            self._memory = torch.frombuffer(page_aligned(_MEMORY), dtype=torch.uint8).zero_()
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink()
        self._memory = torch.empty(0)

    def sample(self) -> None:
        """Takes one sample of each measurement."""
        for name, measure in self._measurements.items():
            if self._reasons[name]:
                continue
            try:
                self._samples[name].append(self._scale * self.nbytes / 1e9 / measure())
            except OSError as e:
                self._reasons[name] = str(e)

    def rows(self) -> list[Row]:
        """The samples, usually fastest first."""
        return [Row(name, tuple(self._samples[name]), self._reasons[name]) for name in self._measurements]

    def _copy(self) -> float:
        dest = torch.empty_like(self._memory, device=self._device)
        torch.cuda.synchronize(self._device)
        return self._seconds(lambda: dest.copy_(self._memory, non_blocking=True))

    def _sum(self) -> float:
        return self._seconds(self._memory.view(torch.float32).sum)

    def _seconds(self, use_memory: Callable[[], object]) -> float:
        """Seconds for as many bytes as the file has, which need not be a multiple of the memory's size."""
        times = self.nbytes // self._memory.numel()
        start = time.perf_counter()
        for _ in range(times):
            use_memory()
        synchronize(self._device)
        return (time.perf_counter() - start) * self.nbytes / (times * self._memory.numel())

    def _read(self, direct: bool, block: int, threads: int) -> float:
        """Seconds of reading the file once, in order."""
        memory = self._memory.numpy().data
        if not direct:
            read_parallel(self._path, self.nbytes, memory, direct=False)  # into the page cache
        elif drop([self._path]) > 0.5:
            raise OSError(f"the file system of {self._path.parent} keeps its files in memory: there is no disk to read")
        start = time.perf_counter()
        read_parallel(self._path, self.nbytes, memory, direct=direct, block=block, threads=threads)
        return time.perf_counter() - start
