"""Where the time of an epoch went: ``GDSDataLoader(stats=True)``. :mod:`monai_gds.base.stages` defines the stages."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from monai_gds.base import cores, stages
from monai_gds.base.stages import Watch
from monai_gds.errors import FailedItem

#: The stages in which the loader's thread has nothing to do.
_AHEAD, _BEHIND = "waiting for the training", "waiting for workers"

#: Training that waits for a smaller share of an epoch gains nothing from a faster loader.
_LITTLE = 0.05

#: A larger share of the records' bytes is all of them but their heads.
_ALL = 0.95

#: More workers than that hardly make a training faster.
_WORKERS = 8

#: What to do about the stage that takes most of the time.
_REMEDIES = {
    "sampling": "make the sampler faster",
    "keys": "CacheOptions(sources='once') looks at each file once per process, sources='stat' reads none",
    "decoding": "compression=None stores tensors as they are; checksums are compared in a process's first epoch only",
    "transforms": "the next epoch reads their results; populate(num_workers=…) computes them ahead of the training",
    "encoding": "compression='lz4' or None packs faster, and the next epoch only reads",
    "saving": "the records are written to a drive that is slower than the transforms; the next epoch only reads",
    "waiting for other processes": "they compute the same items; the next epoch reads them",
    _BEHIND: "more of them are faster; items that they compute are read in the next epoch",
    "collating": "smaller batches, or a collate_fn that copies less",
}


def _of_reading() -> str:
    """What to do about reading on this machine."""
    faster = "a drive or folder that reads faster"
    return f"{faster}, or smaller records: compression='zstd'" if find_spec("blosc2") else faster


def _of_random(in_workers: bool) -> str:
    """What to do about random transforms on this machine."""
    usable = cores.usable()
    ways = []
    if in_workers:
        ways.append("more workers are faster while processor cores are idle")
    elif usable > 1:
        ways.append(f"run them in workers (num_workers={min(_WORKERS, usable)})")
    if torch.cuda.is_available():
        ways.append("run them on the GPU (device=None)")
    return ", or ".join(ways) or "this machine has one core and no GPU, so only fewer or cheaper ones take less time"


@dataclass(frozen=True)
class Stats:
    """Where the time of an epoch went. ``print`` shows a table.

    Attributes:
        seconds: length of the epoch, from when its first batch was asked for to the last one, or so far.
        waiting: seconds of these in which the training waited for a batch.
        stages: the seconds that the loader's thread, or its workers together, took for each stage. On a CUDA device
            they include the work there. ``saving`` is the thread's own share of saving computed items. Empty where
            MONAI's ``DataLoader`` makes the batches, and nothing is measured; hits and bytes are not counted then.
        transforms: the seconds of each deterministic transform, of items that were computed.
        random_transforms: the seconds of each random transform: where programs are used, of drawing it in a worker and,
            if it is in no program, of running it. ``recording`` is what else recording takes; in the loader's thread
            ``replay`` is what programs take, and ``comparing`` to make items without their programs and compare.
        saving_behind: the seconds in which records were written in the background.
        batches: batches that were delivered.
        hits: items that were read.
        computed: items that were computed.
        nbytes: bytes of records that were read.
        served: how many bytes went ``"directly into GPU memory"``, through ``"cuFile's compatibility mode"`` or
            ``"pinned staging"``, were ``"mapped"``, ``"read into host memory"``, or came from the device's ``"kept
            memory"`` (``device_bytes``), which are not part of ``nbytes``.
        nvidia_fs: bytes that the kernel module nvidia-fs counted as read into GPU memory meanwhile, by all processes,
            in whole MiB; None where it does not count.
        in_workers: whether worker processes ran the random transforms, or drew them.
        on_values: the first transforms that no program could hold, and why. With those after them they ran in the
            loader's thread.
        global_draws: which transforms drew from generators of the whole process, in words; empty if none was seen to.
        skipped: items that could not be made, for which others came.
        rounded: items for which workers computed small tensors that are the GPU's to compute.
        stored: bytes of the records that were read, in part or whole.
        made: the bytes that transforms in programs made on the CPU for another device, such as sampling grids.
        steps: the steps that transforms had in the programs that were replayed.
    """

    seconds: float
    waiting: float
    stages: Mapping[str, float]
    transforms: Mapping[str, float]
    random_transforms: Mapping[str, float]
    saving_behind: float
    batches: int
    hits: int
    computed: int
    nbytes: int
    served: Mapping[str, int] = field(default_factory=dict)
    nvidia_fs: int | None = None
    in_workers: bool = False
    on_values: Mapping[str, str] = field(default_factory=dict)
    global_draws: str = ""
    skipped: tuple[FailedItem, ...] = ()
    rounded: int = 0
    stored: int = 0
    made: Mapping[str, int] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """The share of items that were read."""
        return self.hits / max(self.hits + self.computed, 1)

    @property
    def gigabytes_per_second(self) -> float:
        """Gigabytes of records that were read, per second of the epoch."""
        return self.nbytes / 1e9 / self.seconds if self.seconds else 0.0

    @property
    def read_by(self) -> str:
        """What served the bytes, in words; empty if nothing was read."""
        words = [f"{nbytes / 1e9:.3f} GB {way}" for way, nbytes in self.served.items()]
        if words and self.nvidia_fs is not None:
            words.append(f"nvidia-fs counted {self.nvidia_fs / 1e9:.3f} GB")
        return ", ".join(words)

    @property
    def advice(self) -> str:
        """One sentence: where most of the time goes, and what can be done about it."""
        if self.waiting <= _LITTLE * self.seconds:
            return (
                f"The training waits {_share(self.waiting, self.seconds)} of the epoch: a faster loader gains nothing."
            )
        idle = (_AHEAD, _BEHIND) if self.in_workers else (_AHEAD,)  # the workers' own stages are measured
        work = {stage: seconds for stage, seconds in self.stages.items() if stage not in idle}
        if not work:
            return (
                f"The training waits {_share(self.waiting, self.seconds)} of the epoch for MONAI's DataLoader, which "
                "is not measured. It loads all but GDSDatasets for one device."
            )
        stage = max(work, key=work.__getitem__)
        whose = "the loader's and its workers'" if self.in_workers else "the loader's"
        share = f"{_share(work[stage], sum(work.values()))} of {whose} time"
        if stage == "random transforms":
            name = max(self.random_transforms, key=self.random_transforms.__getitem__)
            most = _share(self.random_transforms[name], sum(work.values()))
            share, remedy = f"{share}, {name} alone {most}", _of_random(self.in_workers)
            if name == "comparing":
                remedy = "only programs that are new are compared, and all with programs='check'"
            elif name in self.on_values:
                why = self.on_values[name]
                remedy = f"the loader's thread runs it, since {why}; programs='off' gives it to workers"
        else:
            remedy = _of_reading() if stage == "reading" else _REMEDIES[stage]
        verb = "take" if stage.endswith("transforms") or stage == "keys" else "takes"
        return f"{stage.capitalize()} {verb} {share}: {remedy}."

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        derived = ("hit_rate", "gigabytes_per_second", "read_by", "advice")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def __str__(self) -> str:
        of = f"of {self.stored / 1e9:.3f} " if self.nbytes < _ALL * self.stored else ""
        read = (
            f", {self.hits} hits and {self.computed} computed items ({self.hit_rate:.0%} hits), "
            f"{self.nbytes / 1e9:.3f} {of}GB read, {self.gigabytes_per_second:.2f} GB/s"
        )
        lines = [
            f"{self.seconds:.3f} s, {self.batches} batches{read if self.stages else ''}",
            f"{'the training waited':<34}{self.waiting:>9.3f} s {_share(self.waiting, self.seconds):>5}",
        ]
        total, items = sum(self.stages.values()), max(self.hits + self.computed, 1)
        for stage, seconds in self.stages.items():
            lines.append(f"{stage:<34}{seconds:>9.3f} s {_share(seconds, total):>5}")
            parts = {"transforms": self.transforms, "random transforms": self.random_transforms}.get(stage, {})
            steps = self.steps if stage == "random transforms" else {}
            for name, part in parts.items():
                each = f"  {steps[name] / items:.1f} steps per item" if name in steps else ""
                lines.append(f"  {name:<32}{part:>9.3f} s {_share(part, total):>5}{each}")
        if self.saving_behind:
            lines.append(f"{'saving, in the background':<34}{self.saving_behind:>9.3f} s")
        lines += [f"bytes: {self.read_by}"] if self.served else []
        lines += [f"on values from {name} on: {why}" for name, why in self.on_values.items()]
        lines += [self.global_draws] if self.global_draws else []
        if self.rounded:
            lines.append(f"programs='fast': last bits of {self.rounded} items may differ from what the GPU computes")
        for name, nbytes in self.made.items():
            each = f"{nbytes / 1e6 / items:.1f} MB per item"
            lines.append(f"{name} computes {each} on the CPU; given device=, it does so on the GPU")
        lines += [f"skipped item {one.index} ({one.path}): {one.error}" for one in self.skipped]
        return "\n".join([*lines, self.advice])


def _named(counts: Mapping[str, int], begins: str) -> dict[str, int]:
    """Those of the counts whose names begin like this, by the rest of the names."""
    return {what.removeprefix(begins): n for what, n in counts.items() if what.startswith(begins)}


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


class MeasuredEpoch:
    """The measurements of an epoch. It keeps no loop alive."""

    def __init__(self) -> None:
        self.watch = Watch()
        self.began = self.seconds = self.waiting = 0.0
        self.batches = 0
        self._nvidia_fs = stages.nvidia_fs_bytes()

    @contextmanager
    def consumer_waits(self) -> Iterator[None]:
        """Counts the time of the block as waiting of the consumer for a batch."""
        asked = time.perf_counter()
        self.began = self.began or asked
        try:
            yield
            self.batches += 1
        finally:
            now = time.perf_counter()
            self.waiting += now - asked
            self.seconds = now - self.began

    def stats(self, on_values: Mapping[str, str], global_draws: str, skipped: tuple[FailedItem, ...]) -> Stats:
        """What was measured so far. For the arguments see :class:`Stats`."""
        seconds, counts = dict(self.watch.seconds), dict(self.watch.counts)
        behind = seconds.pop(("saving", "in the background"), 0.0)
        totals: defaultdict[str, float] = defaultdict(float)
        parts: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (stage, part), taken in sorted(seconds.items(), key=lambda item: -item[1]):
            totals[stage] += taken
            parts[stage][part] = taken
        counted = stages.nvidia_fs_bytes()
        return Stats(
            seconds=self.seconds,
            waiting=self.waiting,
            stages=dict(sorted(totals.items(), key=lambda item: -item[1])),
            transforms=parts["transforms"],
            random_transforms=parts["random transforms"],
            saving_behind=behind,
            batches=self.batches,
            hits=counts.get("hits", 0),
            computed=counts.get("computed", 0),
            nbytes=counts.get("bytes", 0),
            served={way: counts[way] for way in stages.WAYS if counts.get(way)},
            nvidia_fs=None if counted is None or self._nvidia_fs is None else counted - self._nvidia_fs,
            in_workers=self.watch.in_workers,
            on_values=on_values,
            global_draws=global_draws,
            skipped=skipped,
            rounded=counts.get("rounded", 0),
            stored=counts.get("stored", 0),
            made=_named(counts, stages.MADE),
            steps=_named(counts, stages.STEPS),
        )
