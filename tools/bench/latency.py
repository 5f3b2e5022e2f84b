"""``python -m tools.bench latency``: small files where every open takes a given time, against 64 threads with pread.

The file system is that of ``tools/slow_disk``, whose server runs on the same cores. In each pass a method reads all
files, and the methods take turns. The first pass of each is not timed: in it the loader reads the heads of
records as well.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from monai.transforms import Lambda

from monai_gds import GDSDataLoader, GDSDataset, open_storage
from monai_gds.bench.report import Report, Row
from monai_gds.imagenet.files.image_storage import ImageStorage
from monai_gds.imagenet.files.listing import ImageList
from monai_gds.imagenet.readers import FileReader
from monai_gds.imagenet.source import open_images
from monai_gds.storage import ALIGNMENT, Reads
from tools.slow_disk import SlowDisk, slow_disk

__all__ = ["measure"]

REFERENCE = "pread, 64 threads"

#: Of this process, without the server's.
_CPU = "CPU µs per file"

#: Reads all files once.
Pass = Callable[[], object]


class Settings(NamedTuple):
    """What is measured: where the folder is mounted, how many files, the delays in ms, passes of each method."""

    where: Path
    files: int
    delays: Sequence[float]
    repeats: int


def measure(settings: Settings) -> list[Report]:
    """Files per second of each method, by what is read and by delay.

    Raises:
        NoSlowDisk: this machine mounts no such file system.
    """
    warnings.simplefilter("ignore")
    reports = []
    with slow_disk(settings.where) as disk, ExitStack() as stack:
        kinds = [partial(_records, disk, settings.files, nbytes) for nbytes in (4096, 110_000)]
        for make in (*kinds, partial(_images, disk, settings.files, 110_000)):
            disk.set_delay(0)
            title, passes = make(stack)
            reports += [_compared(disk, settings, title, passes, delay) for delay in settings.delays]
    return reports


def _compared(disk: SlowDisk, settings: Settings, title: str, passes: dict[str, Pass], delay: float) -> Report:
    samples: dict[str, list[float]] = {name: [] for name in passes}
    spent: dict[str, list[float]] = {name: [] for name in passes}
    most = dict.fromkeys(passes, 0)
    for repeat in range(settings.repeats + 1):
        for name, read in passes.items():
            disk.set_delay(delay / 1000)
            begin, cpu = time.perf_counter(), time.process_time()
            read()
            if repeat:  # the first pass warms up
                samples[name].append(settings.files / (time.perf_counter() - begin))
                spent[name].append((time.process_time() - cpu) / settings.files * 1e6)
                most[name] = max(most[name], disk.most_in_flight)
    rows = [
        Row(name, tuple(samples[name]), "", {"opens in flight": str(most[name])}, {_CPU: tuple(spent[name])})
        for name in passes
    ]
    return Report(f"{settings.files} {title}, {delay:g} ms per open", "files/s", rows, reference=REFERENCE)


def _records(disk: SlowDisk, count: int, nbytes: int, stack: ExitStack) -> tuple[str, dict[str, Pass]]:
    """Records of a cache: the loader over a dataset, and their files."""
    make = Lambda(lambda i: torch.full((nbytes // 4,), float(i)))
    dataset = GDSDataset(list(range(count)), [make], cache_dir=disk.folder / f"{nbytes}", device="cpu")
    dataset.populate()
    files = sorted((disk.folder / f"{nbytes}").glob("*.safetensors"))
    loader = GDSDataLoader(dataset, batch_size=32)
    title = f"records of {os.path.getsize(files[0]) / 1000:.0f} kB"
    return title, {**_plain(files, stack), "GDSDataLoader, batches of 32": lambda: sum(map(len, loader))}


def _images(disk: SlowDisk, count: int, nbytes: int, stack: ExitStack) -> tuple[str, dict[str, Pass]]:
    """Encoded images, which are random bytes: nothing decodes them."""
    (disk.behind / "images" / "class").mkdir(parents=True)
    for i in range(count):
        (disk.behind / "images" / "class" / f"{i}.jpg").write_bytes(os.urandom(nbytes))
    images = open_images(disk.folder / "images")
    assert isinstance(images, ImageList)
    reader = FileReader(images, ImageStorage("posix", torch.device("cpu")))
    stack.callback(reader.close)

    def read(batch: int) -> None:
        for found in reader.read(np.array_split(np.arange(count), -(-count // batch))):
            found.done()

    files = [Path(images.path(i)) for i in range(count)]
    readers = {f"FileReader, batches of {batch}": partial(read, batch) for batch in (256, 16)}
    return f"images of {nbytes / 1000:.0f} kB", {**_plain(files, stack), **readers}


def _plain(files: Sequence[Path], stack: ExitStack) -> dict[str, Pass]:
    """The files by a pool of threads, and through a storage, together and one by one."""
    pool = stack.enter_context(ThreadPoolExecutor(64))
    storage = open_storage("posix", "cpu")
    stack.callback(storage.close)
    paths, nbytes = [*map(str, files)], os.path.getsize(files[0])
    pitch = (nbytes // ALIGNMENT + 1) * ALIGNMENT
    together = Reads.of_files(paths, np.full(len(paths), nbytes), np.arange(len(paths)) * pitch, len(paths) * pitch)
    alone = [Reads.of(path, [(0, nbytes)]) for path in paths]
    return {
        REFERENCE: lambda: list(pool.map(partial(_pread, nbytes), paths)),
        "posix, one read of all": lambda: storage.load(together).wait(),
        "posix, a read of each": lambda: [one.wait() for one in [storage.load(reads) for reads in alone]],
    }


def _pread(nbytes: int, path: str) -> np.ndarray:
    into = np.empty(nbytes, np.uint8)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.preadv(fd, [into.data], 0)
    finally:
        os.close(fd)
    return into
