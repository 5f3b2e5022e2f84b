"""Faults while records are on their way to a CUDA device."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path

import monai.transforms as mt
import pytest
import torch

from monai_gds import GDSDataLoader, GDSDataset
from monai_gds.tiles import blosc
from tests.fresh import Interpreter
from tests.soak.made import Reader, enter, warned, write_sources
from tests.soak.tally import Tally

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed"),
]

COUNT = 8

forms = pytest.mark.parametrize("form", ["whole", "lz4"])


def damage(cache: Path, stop: threading.Event) -> None:
    """Flips a byte of a record where it lies, again and again."""
    rng = random.Random(0)
    while not stop.is_set():
        for record in cache.glob("*.safetensors"):
            try:
                with record.open("r+b") as file:
                    at = rng.randrange(record.stat().st_size)
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 1]))
            except (OSError, IndexError):
                continue
        time.sleep(rng.random() / 100)


def epochs(folder: Path, form: str, seconds: float, **settings: object) -> Tally:
    """Epochs through the loader, every item of which is compared."""
    enter()
    tally = Tally()
    items = [{"source": str(folder / f"source_{i}.txt"), "index": i} for i in range(COUNT)]
    reader = Reader(items, folder / "cache", form, device="cuda:0", **settings)
    end, once = time.monotonic() + seconds, True
    with warned():
        while once or time.monotonic() < end:
            once = False
            for batch in GDSDataLoader(reader.dataset, batch_size=2, collate_fn=list):
                for got in batch:
                    tally.items += 1
                    if wrong := reader.differs(got, got["index"], range(1)):
                        tally.found("wrong", wrong)
        reader.dataset.flush()
    return tally


def epochs_over_damage(folder: Path, form: str) -> Tally:
    """The same, while a thread damages the records."""
    stop = threading.Event()
    thread = threading.Thread(target=damage, args=(folder / "cache", stop))
    thread.start()
    try:
        return epochs(folder, form, 3.0, options={"verify": "always"})
    finally:
        stop.set()
        thread.join()


@forms
def test_a_record_that_is_damaged_while_it_is_read_gives_no_wrong_item(
    tmp_path: Path, interpreter: Interpreter, form: str
) -> None:
    write_sources(tmp_path, COUNT)
    tally = interpreter.call(epochs_over_damage, tmp_path, form)
    assert tally.items >= COUNT
    assert tally.bad == 0, "\n".join(tally.notes)


@forms
def test_a_process_that_is_killed_with_copies_in_flight_leaves_a_sound_cache(
    tmp_path: Path, interpreter: Interpreter, form: str
) -> None:
    write_sources(tmp_path, COUNT)
    rng = random.Random(0)
    for _ in range(4):
        process = interpreter.process()
        pid = process.call(os.getpid)
        process.start(epochs, tmp_path, form, 60.0)
        end = time.monotonic() + 60
        while not (tmp_path / "cache").exists() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.1, 2.0))
        os.kill(pid, signal.SIGKILL)
        process.close()
    tally = interpreter.call(epochs, tmp_path, form, 0.0)
    assert tally.items == COUNT
    assert tally.bad == 0, "\n".join(tally.notes)


def epoch_with_little_memory(folder: Path, form: str) -> tuple[Tally, int]:
    """An epoch that reads ahead more than the device has memory for; what is in flight when it is over."""
    enter()
    tally, side = Tally(), 160
    items = [{"n": n} for n in range(24)]
    made = mt.Lambda(lambda item: {"x": torch.full((1, side, side, side), float(item["n"])), "n": item["n"]})
    dataset = GDSDataset(items, mt.Compose([made]), folder / "cache", 0, compression=None if form == "whole" else form)
    dataset.populate()
    record = 4 * side**3
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(10 * record / torch.cuda.get_device_properties(0).total_memory)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for batch in GDSDataLoader(dataset, batch_size=2, prefetch=64, collate_fn=list):
            for item in batch:
                tally.items += 1
                if not bool((item["x"].cpu() == float(item["n"])).all()):  # there is no memory to compare it there
                    tally.found("wrong", f"item {item['n']}")
    return tally, sum("no memory left" in str(w.message) for w in warned)


@forms
def test_an_epoch_goes_on_where_the_device_has_no_memory_for_what_is_ahead(
    tmp_path: Path, interpreter: Interpreter, form: str
) -> None:
    tally, warned = interpreter.call(epoch_with_little_memory, tmp_path, form)
    assert (tally.items, tally.bad) == (24, 0), "\n".join(tally.notes)
    assert warned
