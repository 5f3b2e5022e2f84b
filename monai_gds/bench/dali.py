"""``monai-gds bench dali``: what feeding DALI from an iterable costs, and what DALI gains, on a Squirrel store.

It answers the questions of Squirrel's DALI tutorial. All rows are bounded by the rate of the store on its own:
Squirrel's stores are gzip files, which one thread unpacks at some 150 MB/s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from monai_gds.bench.report import Report, Row
from monai_gds.errors import BackendUnavailable, ImageListError
from monai_gds.imagenet import dali_iterator, squirrel_source
from monai_gds.imagenet.decoding import IMAGENET_MEAN, IMAGENET_STD
from monai_gds.imagenet.pipeline import dali

__all__ = ["QUESTIONS", "DaliSettings", "measure"]

#: Height and width of the images that come out, in pixels.
SIDE = 224


@dataclass(frozen=True)
class DaliSettings:
    """What is measured.

    Args:
        store: a Messagepack store of ``{"image": uint8 (3, height, width), "label": int}``.
        device: where batches go.
        batch_size: samples per batch.
        threads: DALI's, where they are not what is compared.
        repeats: timed epochs of each row.
    """

    store: Path
    device: torch.device
    batch_size: int = 64
    threads: int = 4
    repeats: int = 5


Epoch: TypeAlias = Iterable[Mapping[str, torch.Tensor]]


def samples(settings: DaliSettings) -> Any:
    """The store as a Squirrel driver."""
    try:
        from squirrel.driver import MessagepackDriver
    except ImportError as e:
        raise BackendUnavailable(f"squirrel-core cannot be imported ({e}): pip install 'monai_gds[squirrel]'") from e
    return MessagepackDriver(str(settings.store))


def in_batches(settings: DaliSettings, convert: Callable[[np.ndarray], Any] = np.asarray) -> Iterator[dict[str, Any]]:
    """The store in batches made by the source, the last one of which may be smaller."""
    for batch in samples(settings).get_iter().batched(settings.batch_size, drop_last_if_not_full=False):
        columns = {key: np.stack([np.asarray(sample[key]) for sample in batch]) for key in ("image", "label")}
        yield {key: convert(value) for key, value in columns.items()}


def with_dali(settings: DaliSettings, *, batched: bool, cupy: bool = False) -> Epoch:
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

    convert = _cupy() if cupy else np.asarray
    if batched:
        source: Any = partial(in_batches, settings, convert)
    elif cupy:
        source = squirrel_source(
            lambda: samples(settings).get_iter().map(lambda s: {key: convert(value) for key, value in s.items()})
        )
    else:
        source = squirrel_source(samples(settings))
    return dali_iterator(
        source, settings.batch_size, graph, already_batched=batched, device=settings.device,
        threads=settings.threads, layouts={"image": "CHW"},
    )  # fmt: skip


def _cupy() -> Callable[[Any], Any]:
    try:
        import cupy
    except ImportError as e:
        raise BackendUnavailable(f"CuPy cannot be imported ({e}): pip install 'monai_gds[cuda12]' or cuda13") from e
    return cupy.asarray  # type: ignore[no-any-return]


class WithTorch:
    """The same by torch's operators on one device, then copied to the target."""

    def __init__(self, settings: DaliSettings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._mean = torch.tensor(IMAGENET_MEAN, device=device).view(1, 3, 1, 1)
        self._std = torch.tensor(IMAGENET_STD, device=device).view(1, 3, 1, 1)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in in_batches(self._settings):
            image = torch.from_numpy(batch["image"]).to(self._device).float()
            image = functional.interpolate(image, (SIDE, SIDE), mode="bilinear", align_corners=False)
            mirrored = torch.rand(len(image), device=self._device) < 0.5
            image = torch.where(mirrored.view(-1, 1, 1, 1), image.flip(-1), image)
            image = ((image - self._mean) / self._std).to(self._settings.device)
            yield {"image": image, "label": torch.from_numpy(batch["label"]).to(self._settings.device)}


def batching(settings: DaliSettings) -> Report:
    """Batches made by our wrapper or by the source, of NumPy or CuPy arrays."""
    rows = {
        "NumPy samples, batched here": lambda: with_dali(settings, batched=False),
        "NumPy batches from the source": lambda: with_dali(settings, batched=True),
        "CuPy samples, batched here": lambda: with_dali(_on_gpu(settings), batched=False, cupy=True),
        "CuPy batches from the source": lambda: with_dali(_on_gpu(settings), batched=True, cupy=True),
    }
    return _report("batching, NumPy or CuPy", settings, rows, "NumPy samples, batched here")


def threads(settings: DaliSettings) -> Report:
    """Numbers of DALI's threads."""
    rows = {
        f"{count} thread{'s' * (count > 1)}": partial(with_dali, replace(settings, threads=count), batched=True)
        for count in (1, 2, 4, 8, 16, 32)
    }
    return _report("threads of DALI", settings, rows, "1 thread")


def against_torch(settings: DaliSettings) -> Report:
    """DALI against torch's operators."""
    rows: dict[str, Callable[[], Epoch]] = {
        "torch on the CPU": lambda: WithTorch(settings, torch.device("cpu")),
        "torch on the GPU": lambda: WithTorch(_on_gpu(settings), settings.device),
        "DALI": lambda: with_dali(settings, batched=True),
    }
    return _report("DALI against torch", settings, rows, "torch on the CPU")


QUESTIONS = {"batching": batching, "threads": threads, "torch": against_torch}


def measure(settings: DaliSettings, questions: Sequence[str]) -> list[Report]:
    """Answers some of :data:`QUESTIONS`.

    Raises:
        BackendUnavailable: squirrel-core is not installed.
        ImageListError: the store is empty.
    """
    if not any(True for _ in samples(settings).get_iter()):
        raise ImageListError(f"{settings.store} holds no samples: `monai-gds pack --format squirrel` writes a store")
    return [QUESTIONS[name](settings) for name in questions]


def _on_gpu(settings: DaliSettings) -> DaliSettings:
    if settings.device.type != "cuda":
        raise BackendUnavailable("there is no CUDA device here, or device='cpu' was asked for")
    return settings


def _report(title: str, settings: DaliSettings, rows: Mapping[str, Callable[[], Epoch]], reference: str) -> Report:
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
        start = time.perf_counter()
        count = sum(1 for _ in samples(settings).get_iter())
        alone.append(count / (time.perf_counter() - start))
    shown = [Row(name, tuple(rates[name]), reasons.get(name, "")) for name in rows]
    return Report(title, "images/s", shown, reference, [Row("the store alone", tuple(alone))])


def _rate(epoch: Epoch, settings: DaliSettings) -> float:
    """Images per second over one epoch; checks every batch."""
    start, count = time.perf_counter(), 0
    for batch in epoch:
        image, size = batch["image"], len(batch["label"])
        if image.shape != (size, 3, SIDE, SIDE) or image.device != settings.device:
            raise RuntimeError(f"a batch of {tuple(image.shape)} on {image.device}: this measures something else")
        count += size
    if settings.device.type == "cuda":
        torch.cuda.synchronize(settings.device)
    return count / (time.perf_counter() - start)
