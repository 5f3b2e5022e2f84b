"""Where the time of a loop goes, and what served its bytes.

Code enters a stage, and the watch of its thread, if it has one, adds up the seconds. Called in the dataset, the cache
and the loader. Usually no thread has a watch: each function then finds an empty dict and returns.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

if TYPE_CHECKING:
    import torch

#: What serves the bytes of records: they are read past host memory; cuFile copies them through host memory by itself;
#: they are read into pinned memory and copied; pages of the file are mapped; the record is in the device's memory; they
#: are read into host memory, for a destination there.
DIRECT, COMPATIBLE, STAGED = "directly into GPU memory", "cuFile's compatibility mode", "pinned staging"
MAPPED, KEPT, HOST = "mapped", "kept memory", "read into host memory"
WAYS = (DIRECT, COMPATIBLE, STAGED, MAPPED, KEPT, HOST)

#: Begins the name of a count: what a transform made on the CPU, to be copied to the device.
MADE = "made on the CPU by "

#: Begins the name of a count: the steps of programs that do what a transform does.
STEPS = "steps of "

#: Seconds and counts of a watch.
Measurements: TypeAlias = "tuple[dict[tuple[str, str], float], dict[str, int]]"


class Watch:
    """What a thread measures: the seconds of each stage, and counts.

    Attributes:
        seconds: the seconds of each stage and part of it, such as ``("random transforms", "RandFlipd")``.
        counts: ``"hits"``, ``"computed"`` (items), ``"bytes"`` that were read of records, the bytes that are
            ``"stored"`` there, those that each of :data:`WAYS` served, and for a transform's name, after :data:`MADE`,
            the bytes that it made on the CPU for another device, and after :data:`STEPS` the steps of its programs.
        in_workers: whether other processes measured a part of this.
        stream: a CUDA stream, whose work counts to the stage that began it; None: no stage waits for a device.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self.in_workers = False
        self.stream: torch.cuda.Stream | None = None
        self.held = False  # whether the thread stays in its stage, whatever it enters
        self._stage: tuple[str, str] | None = None
        self._since = 0.0

    def enter(self, stage: tuple[str, str] | None) -> None:
        """Ends the stage that the thread is in, and begins another; None begins none."""
        if self.held:
            return
        if self.stream is not None:
            self.stream.synchronize()
        now = time.perf_counter()
        if self._stage is not None:
            self.seconds[self._stage] += now - self._since
        self._stage, self._since = stage, now

    def take(self) -> Measurements:
        """Ends the stage, and gives what was measured since the last call, for :meth:`add` in another process."""
        self.enter(None)
        taken = dict(self.seconds), dict(self.counts)
        self.seconds.clear()
        self.counts.clear()
        return taken

    def add(self, taken: Measurements) -> None:
        """Adds what :meth:`take` returned in another process."""
        self.in_workers = True
        for stage, seconds in taken[0].items():
            self.seconds[stage] += seconds
        self.counts.update(taken[1])


#: By the thread's identity.
_watches: dict[int, Watch] = {}
os.register_at_fork(after_in_child=_watches.clear)  # a child's first thread has the number of the one that forked


@contextmanager
def measured(watch: Watch | None, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Measures the stages that the calling thread enters within the block. Without a watch, it does nothing.

    The thread's work on ``stream``, of a CUDA device, counts to the stage that began it: each stage waits for it.
    """
    if watch is None:
        yield
        return
    watch.stream = stream
    _watches[threading.get_ident()] = watch
    try:
        yield
    finally:
        del _watches[threading.get_ident()]
        watch.enter(None)


def enter(stage: str, part: str = "") -> None:
    """From here on the calling thread is in this stage."""
    if _watches and (watch := _watches.get(threading.get_ident())) is not None:
        watch.enter((stage, part))


@contextmanager
def all_in(stage: str, part: str) -> Iterator[None]:
    """The calling thread is in this stage throughout the block, whatever stages it enters there."""
    watch = _watches.get(threading.get_ident()) if _watches else None
    if watch is None:
        yield
        return
    watch.enter((stage, part))
    watch.held = True
    try:
        yield
    finally:
        watch.held = False


def count(what: str, by: int = 1) -> None:
    """Adds to one of the ``counts`` of the thread's watch, if it has one."""
    if _watches and (watch := _watches.get(threading.get_ident())) is not None:
        watch.counts[what] += by


def read(reads: Any) -> None:
    """Counts the bytes of reads (:class:`monai_gds.storage.Reads`)."""
    if _watches:
        count("bytes", reads.total)


def nvidia_fs_bytes(root: Path = Path("/")) -> int | None:
    """What the kernel module nvidia-fs counts as read into GPU memory, by all processes, in whole MiB.

    None where it is not loaded, or does not count: ``echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled``.
    """
    try:
        text = (root / "proc/driver/nvidia-fs/stats").read_text()
    except OSError:
        return None
    found = re.search(r"\breadMiB=(\d+)", text)
    return int(found[1]) << 20 if found else None


def saved(seconds: float) -> None:
    """Notes how long another thread took to save a record."""
    for watch in list(_watches.values()):
        watch.seconds["saving", "in the background"] += seconds


def watching() -> bool:
    """Whether any thread is measured."""
    return bool(_watches)


def each(stage: str, transforms: Sequence[Any]) -> Sequence[Any]:
    """The transforms. Iterating over them enters a part of the stage for each, named by the transform's class."""
    return Around(transforms, lambda one: enter(stage, type(one).__name__)) if _watches else transforms


class Around(list[Any]):
    """Transforms. Iterating calls ``before(transform)`` ahead of each, and ``after(transform, what that returned)``."""

    def __init__(
        self,
        transforms: Sequence[Any],
        before: Callable[[Any], Any],
        after: Callable[[Any, Any], object] = lambda *_: None,
    ) -> None:
        super().__init__(transforms)
        self._transforms, self._before, self._after = transforms, before, after

    def __getitem__(self, which: SupportsIndex | slice) -> Any:
        found = self._transforms[which]  # type: ignore[index]
        return Around(found, self._before, self._after) if isinstance(which, slice) else found

    def __iter__(self) -> Iterator[Any]:
        for transform in self._transforms:
            seen = self._before(transform)
            yield transform
            self._after(transform, seen)
