"""``monai-gds bench loaders``: images per second of every reader, of DALI's own, torchvision and plain Python, and the
processor time that an image takes.

A peer is a function. Given :class:`LoaderSettings` and a number of threads, it endlessly yields the number of images
in each batch that it has brought to the device. Those named after DALI and ``python-file`` are written for DALI alone,
as in its documentation, and do not even turn their outputs into torch tensors; they decode by the same operators with
the same options as we do. ``torchvision`` is a DataLoader with as many workers. All others are ImageNetDataset with a
reader.

FFCV has no row: from PyPI it comes as source, which does not build without OpenCV and libturbojpeg. TFRecord has none,
either: DALI wants an index of each file, which a script of its own makes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader

from monai_gds.bench.processor import cpu_seconds, synchronize
from monai_gds.bench.report import Report, Row
from monai_gds.errors import BackendUnavailable, ImageListError
from monai_gds.imagenet import ImageNetDataset
from monai_gds.imagenet.dali.decoding import IMAGENET_MEAN, IMAGENET_STD, Decoding
from monai_gds.imagenet.dali.pipeline import dali
from monai_gds.imagenet.files.listing import ImageList, list_block_map, list_folder
from monai_gds.imagenet.files.packed import is_packed, open_packed
from monai_gds.imagenet.files.packing import pack_folder
from monai_gds.storage.registry import backend_names, backend_options

#: Called with the peer, images so far, and images per second so far.
Progress: TypeAlias = Callable[[str, int, float], None]


#: The ceiling of the peers that decode.
_ALONE = "the decoder alone"

#: The heading of processor time.
_CPU = "CPU µs per image"

#: Batches that are timed at least. Readers have read some before the first of them, which would be most of a few.
_FEWEST = 64

#: Batches that the decoder is fed with to find its own ceiling.
_BATCHES_IN_MEMORY = 16


@dataclass(frozen=True)
class LoaderSettings:
    """What is measured.

    ``options`` are storage options, each for the backends that take it. With ``blockmap``, those that take it read the
    images that the map holds.
    """

    datadir: Path  # <class>/<file>; or a block map of such a folder, for readers that need nothing else
    packed: Path  # the same images, packed, maybe made smaller; packed as they are where missing
    device: torch.device  # where batches go
    batch_size: int = 64
    batches: int | None = None  # per measurement; None for the whole dataset, and _FEWEST at least
    decoding: Decoding | None = None  # None: only bytes are read
    threads: Sequence[int] = (1, 2, 4, 8, 16)  # numbers of threads each peer is tried with; the best one counts
    repeats: int = 5  # measurements of each peer
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """What is brought to the device."""
        if self.decoding is None:
            return "encoded bytes"
        if self.decoding.crop is None:
            return "decoded"
        return f"random crops of {self.decoding.crop[0]} pixels, mirrored and normalised,"


def dali_reader(settings: LoaderSettings, threads: int) -> Generator[int]:
    """``fn.readers.file``."""
    return run_dali(settings, threads, lambda fn: fn.readers.file(file_root=str(settings.datadir)))


def python_file(settings: LoaderSettings, threads: int) -> Generator[int]:
    """``open`` and ``read`` in the callback of an external source."""
    images = list_folder(settings.datadir)
    paths = [images.path(i) for i in range(len(images))]

    def batches() -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
        for start in range(0, len(paths) - settings.batch_size + 1, settings.batch_size):
            data = [_read(path) for path in paths[start : start + settings.batch_size]]
            yield data, images.labels[start : start + settings.batch_size, None]

    return run_dali(settings, threads, lambda fn: fn.external_source(batches, num_outputs=2, cycle="quiet"))


def decoder_alone(settings: LoaderSettings, threads: int) -> Generator[int]:
    """No reader: the decoder is fed with a few batches that are in memory. No peer that decodes them is faster."""
    images = list_images(settings.datadir)
    count = min(len(images) // settings.batch_size, _BATCHES_IN_MEMORY) * settings.batch_size
    data = [_read(images.path(i)) for i in range(count)]
    starts = range(0, count, settings.batch_size)
    batches = [(data[i : i + settings.batch_size], images.labels[i : i + settings.batch_size, None]) for i in starts]
    return run_dali(
        settings, threads, lambda fn: fn.external_source(batches, num_outputs=2, cycle="quiet", no_copy=True)
    )


def _read(path: str) -> np.ndarray:
    with open(path, "rb") as file:
        return np.frombuffer(file.read(), dtype=np.uint8)


def torchvision_loader(settings: LoaderSettings, threads: int) -> Generator[int]:
    """torchvision's ImageFolder and transforms in torch's DataLoader, with one worker for each thread of the others."""
    decoding, on_gpu = settings.decoding, settings.device.type == "cuda"
    if decoding is None:
        raise BackendUnavailable("torchvision's ImageFolder decodes what it reads: it has no row of encoded bytes")
    try:
        from torchvision import datasets, transforms
    except (ImportError, RuntimeError) as e:  # RuntimeError: one that was built for another torch
        raise BackendUnavailable(f"torchvision cannot be imported ({e}): pip install torchvision") from e
    transform = transforms.PILToTensor()
    if decoding.crop is not None:
        mean, std = ([value / 255 for value in values] for values in (IMAGENET_MEAN, IMAGENET_STD))
        steps = transforms.RandomResizedCrop(decoding.crop), transforms.RandomHorizontalFlip(), transforms.ToTensor()
        transform = transforms.Compose([*steps, transforms.Normalize(mean, std)])
    loader = DataLoader(
        datasets.ImageFolder(settings.datadir, transform, allow_empty=True), settings.batch_size, num_workers=threads,
        pin_memory=on_gpu, drop_last=True, persistent_workers=True,
        collate_fn=_in_lists if decoding.crop is None else None,
    )  # fmt: skip
    while True:
        for images, labels in loader:
            tensors = images if isinstance(images, list) else [images]
            _ = [tensor.to(settings.device, non_blocking=True) for tensor in (*tensors, labels)]
            yield len(labels)


def _in_lists(samples: list[tuple[torch.Tensor, int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A batch of images of different sizes."""
    images, labels = zip(*samples, strict=True)
    return list(images), torch.tensor(labels)


def run_dali(settings: LoaderSettings, threads: int, inputs: Callable[[Any], Any]) -> Generator[int]:
    """Runs a pipeline over these ``(images, labels)`` without this package, without end."""
    module = dali()
    on_gpu = settings.device.type == "cuda"
    pipe = module.Pipeline(settings.batch_size, threads, settings.device.index if on_gpu else None)
    with pipe:
        images, labels = inputs(module.fn)
        if settings.decoding is not None:
            images = settings.decoding.graph(images, on_gpu)
        elif on_gpu:
            images = images.gpu()
        pipe.set_outputs(images, labels)
    pipe.build()
    while True:
        yield len(pipe.run()[0])


def options_for(reader: str, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The storage options that the reader's backend takes."""
    accepted = backend_options(reader if reader in backend_names() else "auto", device)
    return {name: value for name, value in options.items() if name in accepted}


def ours(reader: str, settings: LoaderSettings, threads: int) -> Generator[int]:
    """ImageNetDataset with one of its readers."""
    decoding = settings.decoding
    offered = settings.options if decoding is not None else {"threads": threads, **settings.options}
    options = options_for(reader, offered, settings.device)
    blocks = options.pop("blockmap", None)  # given as the root: the dataset passes it on
    root = settings.packed if reader == "packed" else settings.datadir if blocks is None else blocks
    transforms: dict[str, Any] = {}
    if decoding is not None:
        transforms = {"crop": decoding.crop, "flip": decoding.flip, "normalize": decoding.normalize}
        transforms["decoder"] = decoding.options
    dataset = ImageNetDataset(
        root, settings.batch_size, reader, settings.device, decoding is not None, num_threads=threads,
        last_batch="drop", storage_options=options, **transforms,
    )  # fmt: skip
    with closing(dataset):
        while True:
            for batch in dataset:
                yield len(batch["image"])


Peer: TypeAlias = Callable[[LoaderSettings, int], Generator[int]]

#: By name. ``tools/bench`` in a clone adds a tar file of the images.
PEERS: dict[str, Peer] = {
    "dali": dali_reader,
    "python-file": python_file,
    "torchvision": torchvision_loader,
    **{name: partial(ours, name) for name in (*backend_names(), "packed")},
}


def list_images(datadir: Path) -> ImageList:
    """The images of :attr:`LoaderSettings.datadir`. Raises ImageListError."""
    return list_block_map(datadir) if datadir.is_file() else list_folder(datadir)


def compare(settings: LoaderSettings, readers: Sequence[str], progress: Progress) -> Report:
    """Measures some of :data:`PEERS` in turns, each with the number of threads that suits it best.

    Raises:
        ImageListError: the folder cannot be used, or the packed one has other images.
        ValueError: the folder holds less than a batch.
    """
    images = list_images(settings.datadir)
    if settings.batch_size > len(images):
        raise ValueError(f"a batch of {settings.batch_size} is larger than the {len(images)} images there are")
    count = settings.batches or max(len(images) // settings.batch_size, _FEWEST)
    if "packed" in readers:
        with ThreadPoolExecutor() as executor:
            folder = settings.packed
            packed = open_packed(folder) if is_packed(folder) else pack_folder(images, folder, executor=executor)
        if list(packed.names) != list(images.names):
            raise ImageListError(f"{folder} does not hold the images of {settings.datadir}: pack that folder")
    peers: dict[str, Peer] = {name: PEERS[name] for name in readers}
    if settings.decoding is not None:
        peers[_ALONE] = decoder_alone
    best: dict[str, int] = {}
    samples: dict[str, list[_Rate]] = {name: [] for name in peers}
    reasons: dict[str, str] = {}
    for name, peer in peers.items():
        try:
            rates = {t: _rate(peer, settings, t, count, partial(progress, name)) for t in settings.threads}
            best[name] = max(rates, key=rates.__getitem__)
        except (BackendUnavailable, ValueError, OSError) as e:
            reasons[name] = str(e)
    for _ in range(settings.repeats):
        for name, threads in best.items():
            samples[name].append(_rate(peers[name], settings, threads, count, partial(progress, name)))
    rows = {
        name: Row(
            name, tuple(rate.images for rate in samples[name]), reasons.get(name, ""),
            {"threads": str(best.get(name, ""))},
            {_CPU: tuple(rate.cpu for rate in samples[name])} if name in best else {},
        )
        for name in peers
    }  # fmt: skip
    ceilings = [rows.pop(_ALONE)] if _ALONE in rows else []
    reference = "dali" if "dali" in best else None
    return Report(f"{settings.what} to {settings.device.type}", "images/s", list(rows.values()), reference, ceilings)


class _Rate(NamedTuple):
    """What was measured once."""

    images: float  # per second
    cpu: float  # processor time in µs per image, of all threads and processes


def _rate(
    peer: Peer, settings: LoaderSettings, threads: int, batches: int, progress: Callable[[int, float], None]
) -> _Rate:
    """Measures a number of batches, after a tenth as many, but at least ten, to warm up."""
    with closing(peer(settings, threads)) as run:
        for _ in range(max(10, batches // 10)):
            next(run)
        synchronize(settings.device)
        used, start, done, reported = cpu_seconds(), time.perf_counter(), 0, 0.0
        for _ in range(batches):
            done += next(run)
            elapsed = time.perf_counter() - start
            if elapsed - reported > 0.5:
                reported = elapsed
                progress(done, done / elapsed)
        synchronize(settings.device)
        seconds = time.perf_counter() - start
        return _Rate(done / seconds, 1e6 * (cpu_seconds() - used) / done)


def warm(root: Path) -> None:
    """Reads every file once, so that all peers find them in the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            path.read_bytes()
