"""``python -m tools.bench dali``: the cost of feeding DALI from an iterable, and what is gained by DALI.

It answers the questions of Squirrel's DALI tutorial, twice: from :class:`Memory`, a source that costs nothing, and from
:class:`Store`, a Squirrel store. Rates of the latter are bounded by the store on its own: its shards are gzip files,
which one thread unpacks at some 150 MB/s. Where that is the bottleneck, all answers are alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from monai_gds.bench.processor import synchronize
from monai_gds.bench.report import Report, Row
from monai_gds.errors import BackendUnavailable, ImageListError
from monai_gds.imagenet import dali_iterator, squirrel_source
from monai_gds.imagenet.dali.decoding import IMAGENET_MEAN, IMAGENET_STD
from monai_gds.imagenet.dali.pipeline import dali

__all__ = ["QUESTIONS", "SOURCES", "DaliSettings", "measure"]

#: Height and width of the images that come out, in pixels.
SIDE = 224


@dataclass(frozen=True)
class DaliSettings:
    """What is measured.

    Args:
        store: a Messagepack store of ``{"image": uint8 (3, height, width), "label": int}``.
        device: where batches go.
        batch_size: samples per batch.
        threads: DALI's threads, except where numbers of them are compared.
        repeats: timed epochs of each row.
        compared: the numbers of DALI's threads that are compared.
        held: most samples of the store that are held in memory.
    """

    store: Path
    device: torch.device
    batch_size: int = 64
    threads: int = 4
    repeats: int = 5
    compared: Sequence[int] = (1, 2, 4, 8, 16, 32)
    held: int = 1024


Epoch: TypeAlias = Iterable[Mapping[str, torch.Tensor]]


Convert: TypeAlias = Callable[[Any], Any]


class Source(Protocol):
    """Where samples come from: one by one, or in batches that the source has made."""

    def samples(self) -> Iterable[dict[str, Any]]:
        """Every sample, for one epoch."""

    def batches(self) -> Iterable[dict[str, Any]]:
        """The same in batches, the last of which may be smaller."""


class Store:
    """A Squirrel store, read and unpacked again in every epoch.

    Args:
        settings: name the store.
        convert: turns NumPy's arrays into those of another library, sample by sample or batch by batch.
    """

    def __init__(self, settings: DaliSettings, convert: Convert = np.asarray) -> None:
        self._settings, self._convert = settings, convert

    def samples(self) -> Iterator[dict[str, Any]]:
        for sample in _stored(self._settings):
            yield {key: self._convert(value) for key, value in sample.items()}

    def batches(self) -> Iterator[dict[str, Any]]:
        for batch in _stored(self._settings).batched(self._settings.batch_size, drop_last_if_not_full=False):
            yield _stacked(batch, self._convert)


class Memory:
    """The first samples of the store, unpacked once: an epoch over them, or over ready batches, costs nothing."""

    def __init__(self, settings: DaliSettings, convert: Convert = np.asarray) -> None:
        self._settings, self._convert = settings, convert

    def samples(self) -> list[dict[str, Any]]:
        return self._samples

    def batches(self) -> list[dict[str, Any]]:
        return self._batches

    @cached_property
    def _samples(self) -> list[dict[str, Any]]:
        return [{key: self._convert(value) for key, value in sample.items()} for sample in self._unpacked()]

    @cached_property
    def _batches(self) -> list[dict[str, Any]]:
        unpacked = self._unpacked()
        batches = iter(lambda: list(islice(unpacked, self._settings.batch_size)), [])
        return [_stacked(batch, self._convert) for batch in batches]

    def _unpacked(self) -> Iterator[dict[str, Any]]:
        return islice(_stored(self._settings), self._settings.held)


#: The sources that every question is asked of, the fast one first.
SOURCES: dict[str, Callable[..., Source]] = {"from memory": Memory, "from the store": Store}


def _stored(settings: DaliSettings) -> Any:
    """The samples of the store, as a new stream."""
    try:
        from squirrel.driver import MessagepackDriver
    except ImportError as e:
        raise BackendUnavailable(f"squirrel-core cannot be imported ({e}): pip install 'monai_gds[squirrel]'") from e
    stream: Any = squirrel_source(MessagepackDriver(str(settings.store)))  # it refuses data that would be unpickled
    return stream()


def _stacked(batch: Sequence[Mapping[str, Any]], convert: Convert) -> dict[str, Any]:
    return {key: convert(np.stack([np.asarray(sample[key]) for sample in batch])) for key in ("image", "label")}


def with_dali(settings: DaliSettings, source: Source, *, batched: bool, cupy: bool = False) -> Epoch:
    """Resized, mirrored at random and normalised by DALI."""
    fn, types = dali().fn, dali().types
    on_gpu = settings.device.type == "cuda"

    def graph(nodes: dict[str, Any]) -> dict[str, Any]:
        image, label = nodes["image"], nodes["label"]
        if on_gpu and not cupy:
            image, label = image.gpu(), label.gpu()
        image = fn.resize(image, size=(SIDE, SIDE), antialias=False)
        image = fn.crop_mirror_normalize(
            image, dtype=types.FLOAT, output_layout="CHW", mirror=fn.random.coin_flip(probability=0.5),
            mean=list(IMAGENET_MEAN), std=list(IMAGENET_STD),
        )  # fmt: skip
        return {"image": image, "label": label}

    return dali_iterator(
        source.batches if batched else source.samples, settings.batch_size, graph, already_batched=batched,
        device=settings.device, num_threads=settings.threads, layouts={"image": "CHW"},
    )  # fmt: skip


def _cupy(settings: DaliSettings) -> Convert:
    _on_gpu(settings)
    try:
        import cupy
    except ImportError as e:
        raise BackendUnavailable(f"CuPy cannot be imported ({e}): pip install 'monai_gds[cuda12]' or cuda13") from e
    return cupy.asarray  # type: ignore[no-any-return]


class WithTorch:
    """The same by torch's operators on one device, then copied to the target."""

    def __init__(self, settings: DaliSettings, source: Source, device: torch.device) -> None:
        self._settings, self._source = settings, source
        self._device = device
        self._mean = torch.tensor(IMAGENET_MEAN, device=device).view(1, 3, 1, 1)
        self._std = torch.tensor(IMAGENET_STD, device=device).view(1, 3, 1, 1)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self._source.batches():
            image = torch.from_numpy(batch["image"]).to(self._device).float()
            image = functional.interpolate(image, (SIDE, SIDE), mode="bilinear", align_corners=False)
            mirrored = torch.rand(len(image), device=self._device) < 0.5
            image = torch.where(mirrored.view(-1, 1, 1, 1), image.flip(-1), image)
            image = ((image - self._mean) / self._std).to(self._settings.device)
            yield {"image": image, "label": torch.from_numpy(batch["label"]).to(self._settings.device)}


def batching(settings: DaliSettings, where: str) -> Report:
    """Batches made by our wrapper or by the source, of NumPy or CuPy arrays."""
    make = SOURCES[where]
    rows = {
        "NumPy samples, batched here": lambda: with_dali(settings, make(settings), batched=False),
        "NumPy batches from the source": lambda: with_dali(settings, make(settings), batched=True),
        "CuPy samples, batched here": lambda: with_dali(
            settings, make(settings, _cupy(settings)), batched=False, cupy=True
        ),
        "CuPy batches from the source": lambda: with_dali(
            settings, make(settings, _cupy(settings)), batched=True, cupy=True
        ),
    }
    return _report("batching, NumPy or CuPy", where, settings, rows, "NumPy samples, batched here")


def threads(settings: DaliSettings, where: str) -> Report:
    """Numbers of DALI's threads."""
    source = SOURCES[where](settings)
    rows = {
        f"{count} thread{'s' * (count > 1)}": partial(with_dali, replace(settings, threads=count), source, batched=True)
        for count in settings.compared
    }
    return _report("threads of DALI", where, settings, rows, next(iter(rows)))


def against_torch(settings: DaliSettings, where: str) -> Report:
    """DALI against torch's operators."""
    source = SOURCES[where](settings)
    rows: dict[str, Callable[[], Epoch]] = {
        "torch on the CPU": lambda: WithTorch(settings, source, torch.device("cpu")),
        "torch on the GPU": lambda: WithTorch(_on_gpu(settings), source, settings.device),
        "DALI": lambda: with_dali(settings, source, batched=True),
    }
    return _report("DALI against torch", where, settings, rows, "torch on the CPU")


QUESTIONS = {"batching": batching, "threads": threads, "torch": against_torch}


def measure(settings: DaliSettings, questions: Sequence[str]) -> list[Report]:
    """Answers some of :data:`QUESTIONS`, each from every source of :data:`SOURCES`.

    Raises:
        BackendUnavailable: squirrel-core is not installed.
        ImageListError: the store is empty.
    """
    if not any(True for _ in _stored(settings)):
        raise ImageListError(f"{settings.store} holds no samples: tools/bench/squirrel_store.py writes a store")
    return [QUESTIONS[name](settings, where) for name in questions for where in SOURCES]


def _on_gpu(settings: DaliSettings) -> DaliSettings:
    if settings.device.type != "cuda":
        raise BackendUnavailable("there is no CUDA device here, or device='cpu' was asked for")
    return settings


def _report(
    question: str, where: str, settings: DaliSettings, rows: Mapping[str, Callable[[], Epoch]], reference: str
) -> Report:
    epochs: dict[str, Epoch] = {}
    reasons: dict[str, str] = {}
    for name, make in rows.items():
        try:
            epoch = make()
            _rate(epoch, settings)  # builds the pipeline, warms the page cache
        except BackendUnavailable as e:
            reasons[name] = str(e)
        else:
            epochs[name] = epoch
    rates: dict[str, list[float]] = {name: [] for name in rows}
    alone: list[float] = []
    for _ in range(settings.repeats):
        for name, epoch in epochs.items():
            rates[name].append(_rate(epoch, settings))
        if SOURCES[where] is Store:
            start = time.perf_counter()
            count = sum(1 for _ in _stored(settings))
            alone.append(count / (time.perf_counter() - start))
    shown = [Row(name, tuple(rates[name]), reasons.get(name, "")) for name in rows]
    ceilings = [Row("the store alone", tuple(alone))] if alone else []
    return Report(f"{question}, {where}", "images/s", shown, reference, ceilings)


def _rate(epoch: Epoch, settings: DaliSettings) -> float:
    """Images per second over one epoch; checks every batch."""
    start, count = time.perf_counter(), 0
    for batch in epoch:
        image, size = batch["image"], len(batch["label"])
        if image.shape != (size, 3, SIDE, SIDE) or image.device != settings.device:
            raise RuntimeError(f"a batch of {tuple(image.shape)} on {image.device}: this measures something else")
        count += size
    synchronize(settings.device)
    return count / (time.perf_counter() - start)
