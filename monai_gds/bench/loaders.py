"""``monai-gds bench loaders``: images per second of every reader, beside DALI's own file reader and plain Python.

A peer is a function. Given :class:`LoaderSettings` and a number of threads, it yields the number of images in each
batch that it has brought to the device, without end. ``dali`` and ``python-file`` are written for DALI alone, as in its
documentation, and do not even turn their outputs into torch tensors. All others are ImageNetDataset with a reader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from monai_gds.bench.report import Report, Row
from monai_gds.errors import BackendUnavailable, ImageListError
from monai_gds.imagenet import ImageNetDataset
from monai_gds.imagenet.listing import list_folder
from monai_gds.imagenet.packed import is_packed, open_packed
from monai_gds.imagenet.packing import pack_folder
from monai_gds.imagenet.pipeline import dali
from monai_gds.storage.registry import backend_names, backend_options

__all__ = ["PEERS", "LoaderSettings", "compare", "options_for"]

#: Called with the peer, images so far, and images per second so far.
Progress: TypeAlias = Callable[[str, int, float], None]


@dataclass(frozen=True)
class LoaderSettings:
    """What is measured.

    Args:
        datadir: an image folder ``<class>/<file>``.
        packed: the same images, packed.
        device: where batches go.
        batch_size: images per batch.
        batches: batches per measurement; None for the whole dataset.
        decode: also decode.
        threads: numbers of threads each peer is tried with. The best one counts.
        repeats: measurements of each peer.
        options: storage options, each for the backends that take it. With ``blockmap``, those that take it read the
            images that the map holds.
    """

    datadir: Path
    packed: Path
    device: torch.device
    batch_size: int = 64
    batches: int | None = None
    decode: bool = False
    threads: Sequence[int] = (1, 2, 4, 8, 16)
    repeats: int = 5
    options: Mapping[str, Any] = field(default_factory=dict)


def dali_reader(settings: LoaderSettings, threads: int) -> Generator[int]:
    """``fn.readers.file``."""
    fn = dali().fn
    return _run(settings, threads, lambda: fn.readers.file(file_root=str(settings.datadir)))


def python_file(settings: LoaderSettings, threads: int) -> Generator[int]:
    """``open`` and ``read`` in the callback of an external source."""
    fn = dali().fn
    images = list_folder(settings.datadir)
    paths = [images.path(i) for i in range(len(images))]

    def batches() -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
        for start in range(0, len(paths) - settings.batch_size + 1, settings.batch_size):
            data = []
            for path in paths[start : start + settings.batch_size]:
                with open(path, "rb") as file:
                    data.append(np.frombuffer(file.read(), dtype=np.uint8))
            yield data, images.labels[start : start + settings.batch_size, None]

    return _run(settings, threads, lambda: fn.external_source(batches, num_outputs=2, cycle="quiet"))


def _run(settings: LoaderSettings, threads: int, inputs: Callable[[], Any]) -> Generator[int]:
    """Runs a pipeline without this package, without end."""
    module = dali()
    on_gpu = settings.device.type == "cuda"
    pipe = module.Pipeline(settings.batch_size, threads, settings.device.index if on_gpu else None)
    with pipe:
        images, labels = inputs()
        if settings.decode:
            images = module.fn.decoders.image(images, device="mixed" if on_gpu else "cpu")
        elif on_gpu:
            images = images.gpu()
        pipe.set_outputs(images, labels)
    pipe.build()
    while True:
        yield len(pipe.run()[0])


def options_for(reader: str, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Those of the storage options that the reader's backend takes."""
    taken = backend_options(reader if reader in backend_names() else "auto", device)
    return {name: value for name, value in options.items() if name in taken}


def ours(reader: str, settings: LoaderSettings, threads: int) -> Generator[int]:
    """ImageNetDataset with one of its readers."""
    offered = settings.options if settings.decode else {"threads": threads, **settings.options}
    options = options_for(reader, offered, settings.device)
    root = settings.packed if reader == "packed" else options.get("blockmap", settings.datadir)
    dataset = ImageNetDataset(
        root, settings.batch_size, reader, settings.device, settings.decode, num_threads=threads, last_batch="drop",
        storage_options=options,
    )  # fmt: skip
    with closing(dataset):
        while True:
            for batch in dataset:
                yield len(batch["image"])


PEERS: Mapping[str, Callable[[LoaderSettings, int], Generator[int]]] = {
    "dali": dali_reader,
    "python-file": python_file,
    **{name: partial(ours, name) for name in (*backend_names(), "packed")},
}


def compare(settings: LoaderSettings, readers: Sequence[str], progress: Progress) -> Report:
    """Measures some of :data:`PEERS` in turns, each with the number of threads that suits it best.

    Raises:
        ImageListError: the folder cannot be used, or the packed one has other images.
        ValueError: the folder holds less than a batch.
    """
    images = list_folder(settings.datadir)
    if settings.batch_size > len(images):
        raise ValueError(f"a batch of {settings.batch_size} is larger than the {len(images)} images there are")
    count = settings.batches or len(images) // settings.batch_size
    if "packed" in readers:
        packed = open_packed(settings.packed) if is_packed(settings.packed) else pack_folder(images, settings.packed)
        if list(packed.images.names) != list(images.names):
            raise ImageListError(f"{settings.packed} does not hold the images of {settings.datadir}: pack that folder")
    best: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in readers}
    reasons: dict[str, str] = {}
    for name in readers:
        try:
            rates = {t: _rate(name, settings, t, count, progress) for t in dict.fromkeys(settings.threads)}
            best[name] = max(rates, key=rates.__getitem__)
        except (BackendUnavailable, ValueError, OSError) as e:
            reasons[name] = str(e)
    for _ in range(settings.repeats):
        for name, threads in best.items():
            samples[name].append(_rate(name, settings, threads, count, progress))
    rows = [
        Row(name, tuple(samples[name]), reasons.get(name, ""), {"threads": str(best.get(name, ""))}) for name in readers
    ]
    what = "decoded" if settings.decode else "encoded bytes"
    return Report(f"{what} to {settings.device.type}", "images/s", rows, "dali" if "dali" in best else None)


def _rate(name: str, settings: LoaderSettings, threads: int, batches: int, progress: Progress) -> float:
    """Images per second over so many batches, after a tenth as many, at least ten, to warm up."""
    with closing(PEERS[name](settings, threads)) as run:
        for _ in range(max(10, batches // 10)):
            next(run)
        _synchronize(settings.device)
        start, done, told = time.perf_counter(), 0, 0.0
        for _ in range(batches):
            done += next(run)
            elapsed = time.perf_counter() - start
            if elapsed - told > 0.5:
                told = elapsed
                progress(name, done, done / elapsed)
        _synchronize(settings.device)
        return done / (time.perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm(root: Path) -> None:
    """Reads every file once, so that all peers find them in the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            path.read_bytes()
