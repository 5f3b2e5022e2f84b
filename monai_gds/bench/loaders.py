"""``monai-gds bench loaders``: images a second of every reader, beside DALI's own file reader and plain Python.

A peer is a function: given :class:`Settings` and a number of threads it yields, for ever, the number of images of each
batch that it has brought to the device. ``dali`` and ``python-file`` are written against DALI alone, as its
documentation has it, and their outputs are not even turned into torch tensors; all others are ImageNetDataset as its
users have it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from monai_gds.bench.report import Report, Row
from monai_gds.errors import BackendUnavailable, ImageListError
from monai_gds.imagenet import ImageNetDataset
from monai_gds.imagenet.listing import list_folder
from monai_gds.imagenet.packed import is_packed, open_packed, pack_folder
from monai_gds.imagenet.pipeline import dali

__all__ = ["BLOCK_READERS", "PEERS", "Settings", "compare"]

#: Which readers take a drive, its buffers' place and a block map.
BLOCK_READERS = frozenset({"xnvme-block", "xnvme-gds"})

#: Called with the peer, images so far, and images a second so far.
Progress: TypeAlias = Callable[[str, int, float], None]


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        datadir: ``<class>/<file>``.
        packed: the same, packed.
        device: where batches go.
        batch_size: images a batch.
        batches: how many a measurement; None for the whole dataset.
        decode: decode as well.
        threads: what each peer is tried with; the best counts.
        repeats: measurements of each peer.
        block: options of the block readers: uri, mem, blockmap.
    """

    datadir: Path
    packed: Path
    device: torch.device
    batch_size: int = 64
    batches: int | None = None
    decode: bool = False
    threads: Sequence[int] = (1, 2, 4, 8, 16)
    repeats: int = 5
    block: Mapping[str, Any] = field(default_factory=dict)


Peer: TypeAlias = Callable[[Settings, int], Iterator[int]]


def dali_reader(settings: Settings, threads: int) -> Iterator[int]:
    """``fn.readers.file``."""
    fn = dali().fn
    yield from _run(settings, threads, lambda: fn.readers.file(file_root=str(settings.datadir)))


def python_file(settings: Settings, threads: int) -> Iterator[int]:
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

    yield from _run(settings, threads, lambda: fn.external_source(batches, num_outputs=2, cycle="quiet"))


def _run(settings: Settings, threads: int, inputs: Callable[[], Any]) -> Iterator[int]:
    """Runs a pipeline of DALI's own for ever."""
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


def ours(reader: str) -> Peer:
    """ImageNetDataset with one of its readers."""

    def peer(settings: Settings, threads: int) -> Iterator[int]:
        options: dict[str, Any] = (
            {} if settings.decode or reader.startswith(("xnvme", "deep")) else {"threads": threads}
        )
        root = settings.packed if reader == "packed" else settings.datadir
        if reader in BLOCK_READERS:
            options.update(settings.block)
            root = Path(settings.block.get("blockmap", root))
        dataset = ImageNetDataset(
            root, settings.batch_size, reader, settings.device, settings.decode, threads=threads,
            last_batch="drop", storage_options=options,
        )  # fmt: skip
        with contextlib.closing(dataset):
            while True:
                for batch in dataset:
                    yield len(batch["image"])

    return peer


PEERS: Mapping[str, Peer] = {
    "dali": dali_reader,
    "python-file": python_file,
    **{name: ours(name) for name in (
        "posix", "kvikio", "deepnvme", "deepnvme-gds", "xnvme-file", "xnvme-block", "xnvme-gds", "packed",
    )},
}  # fmt: skip


def compare(settings: Settings, readers: Sequence[str], progress: Progress) -> Report:
    """Measures readers side by side, in turns, each with the number of threads that suits it best.

    Args:
        settings: what to measure.
        readers: names in :data:`PEERS`.
        progress: called now and then.

    Raises:
        ImageListError: the folder cannot be used, or the packed one has other images.
        ValueError: it holds less than a batch.
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
    reasons: dict[str, str] = {}
    for name in readers:
        try:
            rates = {t: _rate(name, settings, t, count, progress) for t in dict.fromkeys(settings.threads)}
            best[name] = max(rates, key=lambda t: rates[t])
        except (BackendUnavailable, ValueError, OSError) as e:
            reasons[name] = str(e)
    samples: dict[str, list[float]] = {name: [] for name in best}
    for _ in range(settings.repeats):
        for name, threads in best.items():
            samples[name].append(_rate(name, settings, threads, count, progress))
    rows = [
        Row(name, tuple(samples.get(name, ())), reasons.get(name, ""), {"threads": str(best.get(name, ""))})
        for name in readers
    ]
    what = "decoded" if settings.decode else "encoded bytes"
    return Report(f"{what} to {settings.device.type}", "images/s", rows, "dali" if "dali" in best else None)


def _rate(name: str, settings: Settings, threads: int, batches: int, progress: Progress) -> float:
    """Images a second over so many batches, after a tenth as many, ten at least, to warm up."""
    run = PEERS[name](settings, threads)
    try:
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
    finally:
        run.close()  # type: ignore[attr-defined]  # it is a generator


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm(root: Path) -> None:
    """Reads every file once, so that all peers find it in the page cache."""
    for folder, _, files in os.walk(root):
        for file in files:
            with open(os.path.join(folder, file), "rb") as f:
                while f.read(1 << 20):
                    pass


def mean_bytes(root: Path) -> float:
    """Bytes an image, on average."""
    images = open_packed(root).images if is_packed(root) else list_folder(root)
    return float(images.sizes.mean())
