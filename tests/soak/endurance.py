"""Thousands of epochs with hits, misses, damage, errors and early exits: nothing grows."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from monai_gds import GDSDataLoader
from tests.soak.made import TINY, Reader, enter, warned, write_source, write_sources
from tests.soak.soak import Soak
from tests.soak.tally import Tally

__all__ = ["run"]

COUNT = 6

WAYS = [("whole", False), ("lz4", True), ("lz4", False)]

#: What may be more at the end than once everything has been done some times.
MORE_DESCRIPTORS, MORE_THREADS, MORE_MAPS, MORE_BYTES = 8, 4, 200, 96 << 20


def run(soak: Soak) -> None:
    """Each way for a part of the time."""
    ways = WAYS[1:2] if soak.quick else WAYS
    for form, crops in ways:
        seconds = max(1.0, soak.seconds / len(ways))
        soak.call(
            epochs, soak.folder / f"{form}-{crops}", form, crops, soak.random.random(), seconds, timeout=seconds + 120
        )


class Use(NamedTuple):
    """What a process uses now."""

    descriptors: int
    threads: int
    maps: int
    nbytes: int

    @classmethod
    def now(cls) -> Use:
        """After what is garbage has been collected."""
        gc.collect()
        nbytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        maps = Path("/proc/self/maps").read_text().count("\n")
        return cls(len(os.listdir("/proc/self/fd")), threading.active_count(), maps, nbytes)


class Broken(Exception):
    """What a transform raises."""


def fails_sometimes(item: dict[str, Any]) -> dict[str, Any]:
    """A transform that fails where the test wants it."""
    if os.environ.get("SOAK_FAILS"):
        raise Broken
    return item


def epochs(folder: Path, form: str, crops: bool, seed: float, seconds: float) -> Tally:
    """Epochs, and what the process uses after some of them and at the end."""
    enter()
    tally, rng = Tally(), random.Random(seed)
    items = write_sources(folder, COUNT)
    reader = Reader(items, folder / "cache", form, crops, TINY, last=[fails_sometimes])
    began = time.monotonic()
    first: Use | None = None
    with warned():
        while time.monotonic() - began < seconds:
            an_epoch(reader, folder, rng, tally)
            tally.trials += 1
            if first is None and tally.trials >= 20 and time.monotonic() - began > seconds / 4:
                first = Use.now()
        reader.dataset.flush()
    if first is None:
        return tally
    last = Use.now()
    allowed = first.descriptors + MORE_DESCRIPTORS, first.threads + MORE_THREADS, first.maps + MORE_MAPS
    if last[:3] > allowed and any(now > most for now, most in zip(last, allowed, strict=False)):
        tally.found("other", f"{first} became {last} in {tally.trials} epochs ({form}, crops {crops})")
    if last.nbytes > first.nbytes + MORE_BYTES:
        tally.found("other", f"{first.nbytes >> 20} MiB became {last.nbytes >> 20} in {tally.trials} epochs ({form})")
    return tally


def an_epoch(reader: Reader, folder: Path, rng: random.Random, tally: Tally) -> None:
    """An epoch in which something happens."""
    what = rng.random()
    if what < 0.1:
        for record in (folder / "cache").glob("*.safetensors"):
            record.unlink()
    elif what < 0.2:
        write_source(folder, rng.randrange(COUNT), rng.randrange(50))
    elif what < 0.3:
        records = sorted((folder / "cache").glob("*.safetensors"))
        if records:
            record = rng.choice(records)
            blob = bytearray(record.read_bytes())
            blob[rng.randrange(len(blob))] ^= 1
            record.with_suffix(".half").write_bytes(blob)
            record.with_suffix(".half").replace(record)
    elif what < 0.4 and reader.crops:  # else the transform is one of those whose result is cached
        os.environ["SOAK_FAILS"] = "1"
    loader = GDSDataLoader(reader.dataset, batch_size=2, collate_fn=list, prefetch=rng.choice([1, 4]))
    try:
        for number, _ in enumerate(loader):
            if what > 0.8 and number == 1:
                break
    except Exception as e:
        if not os.environ.get("SOAK_FAILS"):
            tally.found("lost", repr(e))
    else:
        if os.environ.get("SOAK_FAILS"):
            tally.found("lost", "the error of a transform did not come through")
    finally:
        os.environ.pop("SOAK_FAILS", None)
    reader.check(rng.randrange(COUNT), tally)
