"""Processes that fill, limit, copy, read, verify and prune one directory while sources change; ranks that share it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from monai_gds import GDSDataLoader
from monai_gds.folder.directory import tidy
from monai_gds.folder.index import Index
from monai_gds.folder.maintenance import check, prunable, remove, survey
from tests.machines import ROOT
from tests.soak.made import TINY, Reader, enter, warned, write_source, write_sources
from tests.soak.soak import Soak
from tests.soak.tally import Tally

__all__ = ["run"]

COUNT = 8

#: Forms and ways of reading of the processes, which share the records.
PROCESSES = [
    ("whole", False), ("lz4", True), ("zstd", True), ("lz4", False),
    ("whole", True), ("zstd", False), ("lz4", True), ("whole", False),
]  # fmt: skip


def run(soak: Soak) -> None:
    """A crowd for most of the time, then ranks."""
    once = True
    while once or time.monotonic() < soak.share(0.8):
        once = False
        a_crowd(soak, 1.0 if soak.quick else min(60.0, max(5.0, soak.share(0.8) - time.monotonic())))
    while soak.more():
        ranks(soak)
        if soak.quick:
            return


# ---------------------------------------------------------------------------------------------------------------------
# A crowd


def a_crowd(soak: Soak, seconds: float) -> None:
    """Processes over one folder: forked ones, and in a long run also one that was spawned."""
    folder = soak.folder / f"crowd-{soak.random.random()}"
    write_sources(folder, COUNT)
    spawned = None if soak.quick else spawn(folder, seconds)
    children = [soak.child() for _ in PROCESSES[: 4 if soak.quick else 7]]
    for child, (form, crops) in zip(children, PROCESSES, strict=False):
        child.process.start(member, folder, form, crops, soak.random.random(), seconds)
    for child in children:
        soak.end(child, seconds + 120)
    if spawned is not None:
        try:
            said, errors = spawned.communicate(timeout=120)
            if spawned.returncode or not said.startswith("0 "):
                soak.tally.found("lost", f"a spawned process: {said[-1500:]}{errors[-1500:]}")
        except subprocess.TimeoutExpired:
            spawned.kill()
            soak.tally.found("hangs", "a spawned process")
    soak.call(last_one, folder)


def spawn(folder: Path, seconds: float) -> subprocess.Popen[str]:
    """A process of its own that is one of the crowd."""
    code = (
        "import sys; from pathlib import Path; from tests.soak.crowd import member;"
        "tally = member(Path(sys.argv[1]), 'zstd', True, 0.5, float(sys.argv[2])); print(tally.bad, tally.notes)"
    )
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(folder), str(seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def member(folder: Path, form: str, crops: bool, seed: float, seconds: float) -> Tally:
    """Does what comes to its mind until the time is over."""
    enter()
    tally, rng, end = Tally(), random.Random(seed), time.monotonic() + seconds
    items = [{"source": str(folder / f"source_{i}.txt"), "index": i} for i in range(COUNT)]
    cache = folder / "cache"
    reader = Reader(items, cache, form, crops, TINY)
    whole = Reader(items, cache, form, False, TINY)
    with warned() as said:
        while time.monotonic() < end:
            what = rng.random()
            tally.trials += 1
            try:
                if what < 0.75:
                    reader.check(rng.randrange(COUNT), tally)
                elif what < 0.8:
                    an_epoch(whole, tally, rng)
                elif what < 0.85:
                    change_a_source(folder, rng)
                elif what < 0.9:
                    look_through(cache, rng, tally)
                elif what < 0.95:
                    reader = Reader(items, cache, form, crops, TINY, **limited(folder, rng))
                elif what < 0.97:
                    whole.dataset.populate(progress=False, convert=rng.random() < 0.5)
                else:
                    tidy(cache)
            except Exception:
                tally.found("lost", traceback.format_exc()[-1500:])
        reader.dataset.flush()
    for text in said:
        # its source changed, so it is right not to save it; or there was no room
        if "while it was computed" not in text and "while this lasts: its budget of" not in text:
            tally.found("other", f"warned: {text}")
    return tally


def limited(folder: Path, rng: random.Random) -> dict[str, Any]:
    """Settings for a dataset with a budget, for a few records or for none, or with copies beside the cache, or both."""
    settings: dict[str, Any] = {}
    if rng.random() < 0.4:
        settings["max_bytes"] = rng.choice(["10 kB", "1 MB", "3 MB"])
    if rng.random() < 0.4:
        settings.update(local_dir=folder / "near", options={"local_bytes": rng.choice([None, "500 kB"])})
    return settings


def change_a_source(folder: Path, rng: random.Random) -> None:
    """Gives a source its next version. Two processes may give it the same one."""
    index = rng.randrange(COUNT)
    path = folder / f"source_{index}.txt"
    write_source(folder, index, int(path.read_text()) + 1)


def an_epoch(reader: Reader, tally: Tally, rng: random.Random) -> None:
    """Some batches through the loader, which reads ahead, and is left early now and then."""
    before = [int(Path(item["source"]).read_text()) for item in reader.items]
    loader = GDSDataLoader(reader.dataset, batch_size=3, collate_fn=list, prefetch=rng.choice([1, 4]))
    leave = rng.random() < 0.3
    for batch in loader:
        for got in batch:
            index = got["index"]
            now = int(Path(reader.items[index]["source"]).read_text())
            tally.items += 1
            if wrong := reader.differs(got, index, range(before[index], now + 1)):
                tally.found("wrong", f"through the loader: {wrong}")
        if leave:
            break


def look_through(cache: Path, rng: random.Random, tally: Tally) -> None:
    """Verifies or prunes, as the command does."""
    if rng.random() < 0.5:
        for record in list(cache.glob("*.safetensors")):
            found = check(record)
            if found is not None and found.problem:
                tally.found("wrong", f"verify: {record.name}: {found.problem}")
        return
    for found in list(prunable(cache, survey(cache))):
        if found.damaged and found.problem:
            tally.found("wrong", f"prune: {found.name}: {found.problem}")
        remove(found)
    survey(cache, Index(cache))


def last_one(folder: Path) -> Tally:
    """What is there when all are gone: sound records, and nothing half-written."""
    enter()
    tally = Tally()
    items = [{"source": str(folder / f"source_{i}.txt"), "index": i} for i in range(COUNT)]
    with warned() as said:
        for form, crops in PROCESSES[:4]:
            Reader(items, folder / "cache", form, crops, TINY).check_all(tally)
    for record in (folder / "cache").glob("*.safetensors"):
        found = check(record)
        if found is None or found.problem:
            tally.found("wrong", f"verify at the end: {record.name}: {found and found.problem}")
    tidy(folder / "cache")
    for name in os.listdir(folder / "cache/.tmp") if (folder / "cache/.tmp").exists() else []:
        tally.found("other", f"left behind: {name}")
    for text in said:
        tally.found("other", f"warned at the end: {text}")
    return tally


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


def ranks(soak: Soak, count: int = 4) -> None:
    """Ranks that fill a cache together and train on parts of it."""
    folder = soak.folder / f"ranks-{soak.random.random()}"
    write_sources(folder, COUNT)
    children = [soak.child() for _ in range(count)]
    form, crops = soak.random.choice(PROCESSES)
    for number, child in enumerate(children):
        child.process.start(rank, folder, number, count, form, crops)
    for child in children:
        soak.end(child, 120)


def rank(folder: Path, number: int, count: int, form: str, crops: bool) -> Tally:
    """One rank over gloo: populates with the others, then three epochs over its part, in step with them."""
    import torch.distributed as dist

    enter()
    tally = Tally(trials=1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=number, world_size=count)
    try:
        items = [{"source": str(folder / f"source_{i}.txt"), "index": i} for i in range(COUNT)]
        reader = Reader(items, folder / "cache", form, crops, TINY)
        reader.dataset.populate(progress=False)
        if (left := sum(1 for _ in (folder / "cache").glob("*.safetensors"))) != COUNT:
            tally.found("other", f"{left} of {COUNT} records after populate over {count} ranks")
        sampler: Any = torch.utils.data.DistributedSampler(reader.dataset, count, number, shuffle=True)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for index in sampler:
                reader.check(index, tally)
                step = torch.ones(1)
                dist.all_reduce(step)
                if step.item() != count:
                    tally.found("lost", f"a step of {step.item()} ranks")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return tally
