"""``monai-gds bench blocks``: many small files by their blocks, beside threads that read the same blocks with pread.

One function a peer (:data:`PEERS`): it gets the files and gives a function that reads one batch of them. Peers take
turns pass by pass, so that what the machine does meanwhile hits them all alike; the first batch of each is compared
with the files' content. What is read with O_DIRECT comes from the device every time, what is read buffered comes from
the page cache after the first pass.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from monai_gds.bench.report import Report, Row
from monai_gds.blockmap import BlockMap
from monai_gds.errors import BackendUnavailable, StorageError
from monai_gds.storage import open_storage
from monai_gds.terminal import in_words

__all__ = ["PEERS", "Settings", "block_map", "measure"]

REFERENCE = "O_DIRECT preads, 16 threads"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes:
        folder: where the files go: on ext4 or XFS, directly on a disk whose device may be read.
        files: how many.
        nbytes: mean size of a file; sizes vary by a quarter.
        batch: files read together.
        repeats: passes over all files that count, for each peer.
    """

    folder: Path
    files: int = 4000
    nbytes: int = 116_000
    batch: int = 64
    repeats: int = 5


#: Reads the files with these numbers, and returns what it read.
ReadBatch = Callable[[Sequence[int]], list[torch.Tensor]]


class Files:
    """The files, their block map, and one page-aligned destination for each file of a batch."""

    def __init__(self, settings: Settings) -> None:
        self.paths = _make_files(settings)
        self.sizes = np.asarray([os.path.getsize(path) for path in self.paths])
        self.blocks = BlockMap.build(settings.folder)
        room = -(-int(self.sizes.max()) // 4096) * 4096
        self._memory = mmap.mmap(-1, settings.batch * room)
        self.whole = torch.from_numpy(np.frombuffer(self._memory, dtype=np.uint8))
        self.starts = np.arange(settings.batch) * room
        self.dests = list(torch.split(self.whole, room))

    def batch(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """A destination of the right length for each of these files."""
        return [self.dests[i][: self.sizes[n]] for i, n in enumerate(numbers)]


def _make_files(settings: Settings) -> list[str]:
    random = np.random.default_rng(0)
    paths = []
    for number in range(settings.files):
        path = settings.folder / f"{number % 10}" / f"{number}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(random.bytes(int(settings.nbytes * random.uniform(0.75, 1.25))))
        paths.append(str(path))
    os.sync()
    return paths


# The peers.


def pread_direct(files: Files, stack: ExitStack) -> ReadBatch:
    """A pool of 16 threads; each reads whole extents of one file from the device with O_DIRECT."""
    origin = files.blocks.origin
    assert origin is not None, "built above"
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
        return files.batch(numbers)

    return read


def _backend(name: str, **options: object) -> Callable[[Files, ExitStack], ReadBatch]:
    """A peer that reads through a storage backend."""

    def peer(files: Files, stack: ExitStack) -> ReadBatch:
        storage = open_storage(name, "cpu", **options)
        stack.callback(storage.close)

        def read(numbers: Sequence[int]) -> list[torch.Tensor]:
            paths = [files.paths[n] for n in numbers]
            starts = files.starts[: len(numbers)]
            return storage.submit_files(paths, files.sizes[list(numbers)], starts, files.whole).wait()

        return read

    return peer


PEERS: dict[str, Callable[[Files, ExitStack], ReadBatch]] = {
    REFERENCE: pread_direct,
    "xnvme-block, io_uring": _backend("xnvme-block", be="io_uring"),
    "xnvme-block, libaio": _backend("xnvme-block", be="libaio"),
    "xnvme-block, thrpool": _backend("xnvme-block", be="thrpool"),
    "xnvme, page cache": _backend("xnvme"),
    "posix, page cache": _backend("posix"),
}


def measure(settings: Settings) -> Report:
    """Files a second of every peer.

    Raises:
        NotMappable: the folder is not on ext4 or XFS directly on a disk.
        AssertionError: a peer read something else than what is in the files.
    """
    files = Files(settings)
    batches = [range(i, min(i + settings.batch, settings.files)) for i in range(0, settings.files, settings.batch)]
    samples: dict[str, list[float]] = {name: [] for name in PEERS}
    reasons: dict[str, str] = {}
    with ExitStack() as stack:
        readers: dict[str, ReadBatch] = {}
        for name, peer in PEERS.items():
            try:
                readers[name] = peer(files, stack)
                _check(readers[name], files, batches[0], name)
            except (BackendUnavailable, OSError) as e:
                readers.pop(name, None)
                reasons[name] = in_words(e)
        for repeat in range(settings.repeats + 1):
            for name, read in readers.items():
                start = time.perf_counter()
                for batch in batches:
                    read(batch)
                if repeat:  # the first pass warms up
                    samples[name].append(settings.files / (time.perf_counter() - start))
    rows = [Row(name, tuple(samples[name]), reasons.get(name, "")) for name in PEERS]
    title = f"{settings.files} files of {settings.nbytes / 1000:.0f} kB, batches of {settings.batch}, to the CPU"
    return Report(title, "files/s", rows, reference=REFERENCE)


def _check(read: ReadBatch, files: Files, numbers: Sequence[int], name: str) -> None:
    for dest in files.dests:
        dest.zero_()
    for number, got in zip(numbers, read(numbers), strict=True):
        if got.numpy().tobytes() != Path(files.paths[number]).read_bytes():
            raise AssertionError(f"{name} read wrong bytes of {files.paths[number]}")


def block_map(settings: Settings) -> dict[str, str]:
    """How fast the map of these files is made, and how long looking one file up in it takes."""
    start = time.perf_counter()
    blocks = BlockMap.build(settings.folder)
    built = time.perf_counter() - start
    paths = list(blocks)
    start = time.perf_counter()
    for path in paths:
        blocks[path]
    look_up = (time.perf_counter() - start) / len(paths)
    return {"block map": f"{len(paths) / built:,.0f} files/s", "map look-up": f"{look_up * 1e6:.2f} µs"}
