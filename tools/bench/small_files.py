"""``python -m tools.bench blocks``: many small files read by their blocks, against threads that pread the same blocks.

Each method in :data:`METHODS` is a function that opens what it needs and returns a function that reads one batch. The
methods take turns, pass by pass, so that whatever else the machine does affects them alike. Reads with O_DIRECT always
go to the device; buffered reads come from the page cache after the first pass.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from monai_gds.base.console import sentence
from monai_gds.bench.report import Report, Row
from monai_gds.errors import BackendUnavailable, StorageError
from monai_gds.storage import Reads, open_storage
from monai_gds.storage.blockmap.block_map import BlockMap
from tools.bench.parallel_read import page_aligned

__all__ = ["METHODS", "SmallFiles", "describe_block_map", "measure"]

REFERENCE = "O_DIRECT preads, 16 threads"


@dataclass(frozen=True, slots=True)
class SmallFiles:
    """The files to measure with.

    Args:
        folder: where they are written: ext4 or XFS directly on a disk whose device can be read.
        count: number of files.
        nbytes: mean size of a file; sizes vary by a quarter.
        batch: files read together.
        repeats: timed passes over all files, per method.
    """

    folder: Path
    count: int
    nbytes: int
    batch: int
    repeats: int


#: Reads the files with these numbers.
ReadBatch = Callable[[Sequence[int]], list[torch.Tensor]]


class _Written:
    """The files on disk, their block map, and one page-aligned destination per file of a batch."""

    def __init__(self, settings: SmallFiles) -> None:
        random = np.random.default_rng(0)
        self.paths, sizes = [], []
        for number in range(settings.count):
            path = settings.folder / f"{number % 10}" / f"{number}.bin"
            path.parent.mkdir(exist_ok=True)
            sizes.append(path.write_bytes(random.bytes(int(settings.nbytes * random.uniform(0.75, 1.25)))))
            self.paths.append(str(path))
        os.sync()
        self.sizes = np.asarray(sizes)
        self.blocks = BlockMap.build(settings.folder)
        room = -(-int(self.sizes.max()) // 4096) * 4096
        self.memory = torch.frombuffer(page_aligned(settings.batch * room), dtype=torch.uint8)
        self.starts = np.arange(settings.batch) * room
        self.dests = list(torch.split(self.memory, room))


def pread_direct(files: _Written, stack: ExitStack) -> ReadBatch:
    """16 threads; each reads whole extents of one file from the device with O_DIRECT."""
    origin = files.blocks.origin
    assert origin is not None, "built from a file system"
    device = origin.disk.open()
    stack.callback(os.close, device)
    pool = stack.enter_context(ThreadPoolExecutor(16))
    views = [dest.numpy().data for dest in files.dests]

    def read_one(number: int, view: memoryview) -> None:
        for offset, start, nbytes in files.blocks[files.paths[number]].extents:
            if os.preadv(device, [view[offset : offset + nbytes]], start) != nbytes:
                raise StorageError(f"short read at byte {start} of {origin.disk.path}")

    def read(numbers: Sequence[int]) -> list[torch.Tensor]:
        list(pool.map(read_one, numbers, views))
        return [dest[: files.sizes[n]] for dest, n in zip(files.dests, numbers, strict=False)]

    return read


def by_backend(name: str, options: dict[str, str], files: _Written, stack: ExitStack) -> ReadBatch:
    """A storage backend."""
    storage = open_storage(name, "cpu", **options)
    stack.callback(storage.close)

    def read(numbers: Sequence[int]) -> list[torch.Tensor]:
        paths = [files.paths[n] for n in numbers]
        starts = files.starts[: len(numbers)]
        reads = Reads.of_files(paths, files.sizes[list(numbers)], starts, files.memory.numel())
        return reads.parts(storage.fill(reads, [files.memory]).wait())

    return read


METHODS: dict[str, Callable[[_Written, ExitStack], ReadBatch]] = {
    REFERENCE: pread_direct,
    "xnvme-block, io_uring": partial(by_backend, "xnvme-block", {"be": "io_uring"}),
    "xnvme-block, libaio": partial(by_backend, "xnvme-block", {"be": "libaio"}),
    "xnvme-block, thrpool": partial(by_backend, "xnvme-block", {"be": "thrpool"}),
    "xnvme, page cache": partial(by_backend, "xnvme", {}),
    "posix, page cache": partial(by_backend, "posix", {}),
}


def measure(settings: SmallFiles) -> Report:
    """Files per second of every method. Raises AssertionError if one reads wrong bytes."""
    files = _Written(settings)
    batches = [range(i, min(i + settings.batch, settings.count)) for i in range(0, settings.count, settings.batch)]
    samples: dict[str, list[float]] = {name: [] for name in METHODS}
    reasons: dict[str, str] = {}
    with ExitStack() as stack:
        readers: dict[str, ReadBatch] = {}
        for name, method in METHODS.items():
            try:
                read = method(files, stack)
                files.memory.zero_()
                first = read(batches[0])
            except (BackendUnavailable, OSError) as e:
                reasons[name] = sentence(e)
                continue
            for path, got in zip(files.paths[: len(batches[0])], first, strict=True):
                if got.numpy().tobytes() != Path(path).read_bytes():
                    raise AssertionError(f"{name} read wrong bytes of {path}")
            readers[name] = read
        for repeat in range(settings.repeats + 1):
            for name, read in readers.items():
                start = time.perf_counter()
                for batch in batches:
                    read(batch)
                if repeat:  # the first pass warms up
                    samples[name].append(settings.count / (time.perf_counter() - start))
    rows = [Row(name, tuple(samples[name]), reasons.get(name, "")) for name in METHODS]
    title = f"{settings.count} files of {settings.nbytes / 1000:.0f} kB, batches of {settings.batch}, to the CPU"
    return Report(title, "files/s", rows, reference=REFERENCE)


def describe_block_map(folder: Path) -> dict[str, str]:
    """How fast the folder's block map is built, and how long looking up one file in it takes."""
    start = time.perf_counter()
    blocks = BlockMap.build(folder)
    built = time.perf_counter() - start
    paths = list(blocks)
    start = time.perf_counter()
    for path in paths:
        blocks[path]
    look_up = (time.perf_counter() - start) / len(paths)
    return {"block map": f"{len(paths) / built:,.0f} files/s", "map look-up": f"{look_up * 1e6:.2f} µs"}
