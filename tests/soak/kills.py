"""Processes that are killed, stopped or interrupted while they fill and read a cache.

A kill cannot tear a record, since records are renamed into place. So there is nothing to warn of afterwards either, no
temporary file stays behind, and nobody waits for the lease of somebody who is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import monai_gds
from monai_gds.folder import budget, directory, tiers, uses, writer
from monai_gds.folder.directory import prepare
from monai_gds.shared import leases, notes, temporary
from tests.interrupts import interrupted
from tests.soak.made import TINY, USUAL, Reader, enter, warned, write_source, write_sources
from tests.soak.soak import Soak
from tests.soak.tally import Tally

__all__ = ["run"]

COUNT = 6

#: Forms of records, and whether they are read in part.
WAYS = [("whole", False), ("lz4", True), ("zstd", True), ("lz4", False)]


def run(soak: Soak) -> None:
    """Kills of one process, storms over eight, and Ctrl-C at every place."""
    one_process(soak, 0.3)
    several_processes(soak, 0.6)
    every_place(soak)


# ---------------------------------------------------------------------------------------------------------------------
# Signals at random times


def one_process(soak: Soak, until: float) -> None:
    """Kills one writer after another; each comes upon what the one before left."""
    once = True
    while once or time.monotonic() < soak.share(until):
        once = False
        form, crops = soak.random.choice(WAYS)
        folder = soak.folder / f"one-{form}-{crops}"
        child = soak.child()
        child.process.start(work_on, folder, form, crops, soak.random.random(), 30.0)
        wait_for_start(folder)
        time.sleep(soak.random.uniform(0, 0.15))
        child.kill()
        soak.tally.trials += 1
        soak.end(child)
        if not soak.quick and soak.random.random() < 0.7:
            continue  # the next one starts in what this one left
        soak.call(look_after, folder, form, crops)


def several_processes(soak: Soak, until: float) -> None:
    """Eight processes over one folder, of which some are killed, stopped for a while, or interrupted."""
    once = True
    while once or time.monotonic() < soak.share(until):
        once = False
        form, crops = soak.random.choice(WAYS)
        folder = soak.folder / f"eight-{form}-{crops}"
        seconds = 1.0 if soak.quick else 6.0
        children = [soak.child() for _ in range(3 if soak.quick else 8)]
        for child in children:
            child.process.start(work_on, folder, form, crops, soak.random.random(), seconds)
        wait_for_start(folder)
        end = time.monotonic() + seconds
        stopped = []
        while time.monotonic() < end and sum(not child.killed for child in children) > 1:
            time.sleep(soak.random.uniform(0.005, 0.25))
            child = soak.random.choice([child for child in children if not child.killed])
            number = soak.random.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGINT])
            child.kill(number)
            soak.tally.trials += 1
            if number == signal.SIGSTOP:
                stopped.append(child)
            if stopped and soak.random.random() < 0.5:
                stopped.pop(0).kill(signal.SIGCONT)
        for child in stopped:
            child.kill(signal.SIGCONT)
        for child in children:
            soak.end(child, seconds + 60)
        soak.call(look_after, folder, form, crops)
        shutil.rmtree(folder)


def wait_for_start(folder: Path) -> None:
    """Waits until a process works in the folder."""
    end = time.monotonic() + 20
    while not (folder / "cache").exists() and time.monotonic() < end:
        time.sleep(0.001)


def work_on(folder: Path, form: str, crops: bool, seed: float, seconds: float) -> Tally:
    """Reads and makes items, in an order of its own; now and then a source changes, or a record goes."""
    import random

    enter()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng, tally, end = random.Random(seed), Tally(), time.monotonic() + seconds
    items = [{"source": str(folder / f"source_{i}.txt"), "index": i} for i in range(COUNT)]
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(COUNT):
        if not Path(items[i]["source"]).exists():
            write_source(folder, i, 0)
    reader = None
    with warned() as said:
        while time.monotonic() < end:
            with contextlib.suppress(KeyboardInterrupt):
                reader = reader or Reader(items, folder / "cache", form, crops)
                step(reader, folder, rng, tally)
        with contextlib.suppress(KeyboardInterrupt):
            if reader is not None:
                reader.dataset.flush()
    for text in said:
        tally.found("other", f"warned: {text}")
    return tally


def step(reader: Reader, folder: Path, rng: Any, tally: Tally) -> None:
    """Reads an item, or changes what is read."""
    what, index = rng.random(), rng.randrange(COUNT)
    if what < 0.15:
        records = sorted((folder / "cache").glob("*.safetensors"))
        if records:
            rng.choice(records).unlink(missing_ok=True)
    elif what < 0.2:
        reader.dataset.flush()
    else:
        reader.check(index, tally)


def look_after(folder: Path, form: str, crops: bool) -> Tally:
    """What the next run finds: right items, nothing to warn of, nothing left over."""
    enter()
    tally = Tally()
    items = [{"source": str(folder / f"source_{i}.txt"), "index": i} for i in range(COUNT)]
    for i in range(COUNT):
        if not Path(items[i]["source"]).exists():
            write_source(folder, i, 0)
    began = time.monotonic()
    with warned() as said:
        for _ in range(2):
            Reader(items, folder / "cache", form, crops).check_all(tally)
    if time.monotonic() - began > 30:
        tally.found("hangs", f"a second run took {time.monotonic() - began:.0f} s for {COUNT} items")
    for text in said:
        tally.found("other", f"warned after kills: {text}")
    prepare(folder / "cache")
    left = sorted(os.listdir(folder / "cache/.tmp")) if (folder / "cache/.tmp").exists() else []
    for name in left:
        tally.found("other", f"left behind: {name}")
    return tally


# ---------------------------------------------------------------------------------------------------------------------
# Ctrl-C at every place in turn

PACKAGE = str(Path(monai_gds.__file__).parent) + "/"
WRITING = [module.__file__ for module in (directory, leases, temporary, writer, budget, tiers, uses, notes)]

#: What is interrupted: a miss, a hit in this process, the first hit of a process, a flush.
MOMENTS: dict[str, Callable[[Reader], object]] = {
    "a miss": lambda reader: reader.dataset[0],
    "a hit": lambda reader: reader.dataset[0],
    "a first hit": lambda reader: reader.dataset[0],
    "a batch": lambda reader: reader.dataset.__getitems__([0, 1, 0]),
    "flush": lambda reader: reader.dataset.flush(),
    "populate": lambda reader: reader.dataset.populate(progress=False),
}


def every_place(soak: Soak) -> None:
    """Lines of the whole package, operations of the files that write."""
    jobs = [
        (moment, form, crops, event)
        for moment in MOMENTS
        for form, crops in (("whole", False), ("lz4", True))
        for event in ("line", "opcode")
        if (moment != "populate" or event == "line")
    ]
    soak.random.shuffle(jobs)
    del jobs[4 if soak.quick else len(jobs) :]
    places = dict.fromkeys(jobs, 1)
    while places and (soak.more() or len(places) == len(jobs)):
        for job in list(places):
            end = soak.began + soak.seconds
            seconds = 0.5 if soak.quick else max(1.0, min(10.0, (end - time.monotonic()) / len(places)))
            folder = soak.folder / "place"
            shutil.rmtree(folder, ignore_errors=True)
            stride = 97 if soak.quick else 1
            next_place = soak.call(interrupt_from, folder, *job, places[job], stride, seconds, timeout=seconds + 60)
            if isinstance(next_place, tuple):
                place, tally = next_place
                soak.tally.add(tally)
                places[job] = place
            else:
                place = None  # it hung or died, which is counted
            if place is None:
                del places[job]
            if not soak.more():
                return


def interrupt_from(
    folder: Path, moment: str, form: str, crops: bool, event: Any, place: int, stride: int, seconds: float
) -> tuple[int | None, Tally]:
    """Interrupts at one place after another. Returns the next one, None if there are no more, and the tally."""
    enter()
    tally, end = Tally(), time.monotonic() + seconds
    items = write_sources(folder, 2)
    shape = USUAL if crops else TINY
    files = [PACKAGE] if event == "line" else WRITING
    settings: dict[str, Any] = {"max_bytes": "1 GB", "local_dir": folder / "near"} if crops else {}
    reached = True
    with warned() as said:
        reader = Reader(items, folder / "cache", form, crops, shape, **settings)
        while reached and time.monotonic() < end:
            if moment == "a first hit":
                reader = Reader(items, folder / "cache", form, crops, shape, **settings)
            if moment in ("a miss", "flush", "populate"):
                for record in folder.glob("*/*.safetensors"):
                    record.unlink()
            if moment == "flush":
                reader.dataset[0]
            reached = interrupted(place, partial(MOMENTS[moment], reader), files, event)
            tally.trials += 1
            for index in (0, 1, 0):
                before = tally.bad
                reader.check(index, tally)
                if tally.bad > before:
                    tally.notes[-1] += f"\nafter Ctrl-C at {event} {place} of {moment} ({form})"
            try:
                reader.dataset.flush()
            except Exception:
                tally.found("lost", f"flush after {event} {place} of {moment}: {traceback.format_exc()[-1000:]}")
            place += stride
    for text in said:
        tally.found("other", f"warned after Ctrl-C in {moment}: {text}")
    return (place if reached else None), tally
