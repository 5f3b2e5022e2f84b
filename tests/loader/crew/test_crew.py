"""Worker processes of a loader that are killed, interrupted, wrong about the next epoch, or in a loop that is left."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import queue
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import monai.transforms as mt
import pytest
import torch
from monai.data import DataLoader
from monai.utils import set_determinism

from monai_gds import GDSDataLoader, GDSDataset, WorkerDied, limits
from monai_gds.dataset import programmed
from monai_gds.loader import ahead, data_loader, hand_over, later, next_epoch, resume
from monai_gds.loader.crew import crew, on_values, worker
from monai_gds.loader.crew import programs as programs_of
from monai_gds.loader.crew.crew import Crew
from monai_gds.programs import recorder
from tests.fresh import Interpreter, printed_by
from tests.interrupts import interrupted
from tests.loader.crew.test_programs import KEYS, Volume
from tests.same import assert_same

COUNT = 3
PROGRAMS = ["check", "off"]


class Quick(Volume):
    """As small as a volume in tiles can be."""

    def __call__(self, n: int) -> dict[str, Any]:
        found = super().__call__(n)
        return {**found, **{key: found[key][:, :65, :65, :65] for key in KEYS}}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = running()
    yield
    set_determinism(None)
    end = time.monotonic() + 20
    while gc.collect() >= 0 and (left := running() - before) and time.monotonic() < end:
        time.sleep(0.1)  # a thread that ends may leave garbage
    for process in multiprocessing.active_children():
        if process in left and process.pid is not None:
            os.kill(process.pid, signal.SIGABRT)  # pytest's faulthandler prints where it is
            process.join()
    assert not left


def running() -> set[object]:
    """Threads of loops, and processes."""
    threads = [thread for thread in threading.enumerate() if thread.name == "monai-gds-loader"]
    return {*threads, *multiprocessing.active_children()}


def make(folder: Path, *random: Any) -> GDSDataset:
    transform = mt.Compose([Quick(), *(random or (mt.RandSpatialCropd(KEYS, (32, 32, 32)), mt.RandFlipd(KEYS, 0.5)))])
    return GDSDataset(list(range(COUNT)), transform, folder / "cache", device="cpu")


def load(dataset: GDSDataset, programs: str = "check", **settings: Any) -> GDSDataLoader:
    set_determinism(3)
    return GDSDataLoader(dataset, 2, **{"batch_size": 1, "shuffle": True, "programs": programs, **settings})


# ---------------------------------------------------------------------------------------------------------------------
# Kills


def killing(monkeypatch: pytest.MonkeyPatch, place: int, kills: Path, times: int) -> None:
    """Has a worker kill itself at the n-th function that it enters for a task; and one of those started after that."""
    call, start = worker.Worker.__call__, Crew._start
    files = (worker.__file__, programmed.__file__, recorder.__file__)
    generations: list[Crew] = []

    def started(self: Crew) -> Any:
        generations.append(self)
        return start(self)

    def traced(self: Any, task: Any) -> Any:
        left, kill = itertools.count(place, -1), kills / str(len(generations))

        def count(frame: FrameType, event: str, arg: Any) -> None:
            if event == "call" and frame.f_code.co_filename in files and next(left) == 1 and len(generations) <= times:
                with contextlib.suppress(FileExistsError):
                    kill.touch(exist_ok=False)
                    kill.write_text(str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        try:
            return call(self, task)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(Crew, "_start", started)
    monkeypatch.setattr(worker.Worker, "__call__", traced)


def places(tmp_path: Path, stride: int) -> Iterator[tuple[int, Path]]:
    for n in itertools.count(1, stride):
        folder = tmp_path / str(n)
        folder.mkdir()
        yield n, folder


@pytest.mark.parametrize(
    ("programs", "stride"),
    [("check", 23), ("off", 4), *(pytest.param(programs, 1, marks=pytest.mark.long) for programs in PROGRAMS)],
)
def test_a_worker_that_is_killed_at_any_step_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: str, stride: int
) -> None:
    expected = list(load(make(tmp_path), programs))
    for n, folder in places(tmp_path, stride):
        with monkeypatch.context() as patch:
            killing(patch, n, folder, 1)
            assert_same(list(load(make(folder), programs)), expected)
        if not (folder / "1").exists():
            break
    assert n > (25 if programs == "check" else 6)


@pytest.mark.parametrize("programs", PROGRAMS)
def test_a_second_kill_is_an_error_that_names_worker_and_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: str
) -> None:
    for n, folder in itertools.islice(places(tmp_path, 2), 3):
        with monkeypatch.context() as patch:
            killing(patch, n, folder, 2)
            with pytest.raises(WorkerDied, match="SIGKILL") as died:
                list(load(make(folder), programs))
        assert f"(process {(folder / '2').read_text()}, SIGKILL)" in str(died.value)
        assert "item" in "".join(traceback.format_exception(died.value))
        assert len(list(load(make(folder), programs))) == COUNT


# ---------------------------------------------------------------------------------------------------------------------
# Ctrl-C, and loops that are left


@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("stride", [61, pytest.param(3, marks=pytest.mark.long)])
def test_ctrl_c_at_any_place_of_an_epoch(tmp_path: Path, programs: str, stride: int) -> None:
    modules = (data_loader, hand_over, ahead, resume, later, crew, next_epoch, on_values, programs_of)
    files = [module.__file__ for module in modules]
    dataset = make(tmp_path)
    expected = list(load(dataset, programs))
    loader = load(dataset, programs)
    for n in itertools.count(1, stride):  # the first epoch of a loader, and one that has its processes
        set_determinism(3)
        begun = interrupted(n, partial(list, loader), files, "check")
        set_determinism(3)
        assert_same(list(loader), expected)
        if n % 2:
            loader = load(dataset, programs)
        if not begun:
            break
    print(n, "places")


@pytest.mark.parametrize("programs", PROGRAMS)
def test_a_loop_that_is_left_at_any_batch(tmp_path: Path, programs: str) -> None:
    loader = load(make(tmp_path), programs)
    for taken in range(COUNT + 1):
        loop = iter(loader)
        for _ in range(taken):
            next(loop)
        del loop
        assert len(list(loader)) == COUNT
    loader.idle.clear()


@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("taken", [COUNT - 1, COUNT, COUNT + 1])
def test_processes_end_with_their_loader(tmp_path: Path, programs: str, taken: int) -> None:
    """Also where the collector does not run."""
    dataset = make(tmp_path)
    gc.collect()
    gc.disable()
    try:
        loader = load(dataset, programs)
        loop = iter(loader)
        for _ in range(taken):
            next(loop, None)
        assert len(multiprocessing.active_children()) == 2
        del loader, loop
        end = time.monotonic() + 20
        while multiprocessing.active_children():
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        gc.enable()


class Fails(mt.RandomizableTransform):
    """Raises an error of a kind of its own, for one item."""

    def __call__(self, data: Any) -> Any:
        if data["n"] == 1:
            raise ArithmeticError("too bright")
        return data


def failure(dataset: GDSDataset, num_workers: int) -> list[str]:
    """The errors of an epoch, each with its notes."""
    with pytest.raises(RuntimeError) as found:
        list(GDSDataLoader(dataset, num_workers, batch_size=1, programs="check"))
    chain: list[BaseException] = []
    error: BaseException | None = found.value
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    lines = [f"{type(one).__name__} {one} {getattr(one, '__notes__', '')}" for one in chain]
    return [re.sub("0x[0-9a-f]+", "", line) for line in lines]


def test_an_error_while_a_transform_is_recorded_is_that_of_the_eager_run(tmp_path: Path) -> None:
    dataset = make(tmp_path, mt.RandSpatialCropd(KEYS, (32, 32, 32)), Fails(), mt.RandFlipd(KEYS, 0.5))
    expected = failure(dataset, 0)
    assert "ArithmeticError too bright" in expected[-1] and "item 1" in expected[0]
    assert failure(dataset, 2) == expected


# ---------------------------------------------------------------------------------------------------------------------
# The next epoch


def crew_of(loader: GDSDataLoader) -> Crew:
    (found,) = loader.idle
    return found


def test_what_was_foreseen_wrongly_is_not_used(tmp_path: Path) -> None:
    dataset = make(tmp_path, mt.RandSpatialCropd(KEYS, (32, 32, 32)))
    dataset.set_data(list(range(4)))
    loader = load(dataset, batch_size=4)
    list(loader)
    assert len(crew_of(loader)._ahead) == 4
    torch.manual_seed(99)  # as a training does that draws
    found = list(loader)
    torch.manual_seed(99)
    assert_same(found, list(GDSDataLoader(dataset, 2, batch_size=4, shuffle=True, programs="check")))


def test_a_task_that_failed_fails_again_when_it_is_needed_once_more(tmp_path: Path) -> None:
    """As where another item takes the place of the one before it, and reads are begun again."""
    loader = load(make(tmp_path))
    list(loader)
    found = crew_of(loader)
    found.news = queue.SimpleQueue()  # as when an epoch begins
    running = found.submit(next(iter(found._ahead.values())).task._replace(number=99))
    for _ in range(2):
        with pytest.raises(IndexError):
            found.result(running, None)


class Read(mt.Transform):
    """Reads an item's file."""

    def __call__(self, item: Any) -> dict[str, Any]:
        image = torch.full((1, 72, 72, 72), float(Path(item["path"]).read_text()))
        return {"image": image, "path": item["path"]}


def made_ahead(loader: GDSDataLoader, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches of an epoch, at the end of which the workers have recorded what is foreseen."""
    make = programs_of.Programs.make_next

    def waiting(self: programs_of.Programs, *given: Any) -> Iterator[None]:
        for _, running in itertools.chain.from_iterable(self._next):
            running.answer.result(20)
        return make(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(programs_of.Programs, "make_next", waiting)
        return list(loader)


def kept(loader: GDSDataLoader) -> list[bool]:
    """Which of the foreseen items are made."""
    return [running.begun is not None for running in crew_of(loader)._ahead.values()]


def test_the_first_items_of_an_epoch_are_made_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the training need not wait for them."""
    expected = [list(loader) for loader in [load(make(tmp_path))] for _ in range(3)]
    loader = load(make(tmp_path))
    found = []
    for _ in range(3):
        found.append(made_ahead(loader, monkeypatch))
        assert kept(loader) == [True] * COUNT
    assert_same(found, expected)


def test_nothing_else_is_begun_while_batches_are_handed_over_whose_items_were_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training's first step would wait for Python's lock."""
    dataset = make(tmp_path)
    dataset.set_data(list(range(8)))
    dataset.populate(num_workers=0, progress=False)
    loader = load(dataset)
    made_ahead(loader, monkeypatch)
    begin, put, done = programs_of.Programs.begin, hand_over.HandOver.put, list[str]()

    def beginning(self: programs_of.Programs, *given: Any) -> Any:
        done.append("made" if given[-1].begun else "begun")
        return begin(self, *given)

    monkeypatch.setattr(programs_of.Programs, "begin", beginning)
    monkeypatch.setattr(hand_over.HandOver, "put", lambda self, *given: (done.append("put"), put(self, *given)))
    assert len(list(loader)) == 8
    assert done[: 2 * limits.BATCHES_AHEAD + 1] == ["made", "put"] * limits.BATCHES_AHEAD + ["begun"]


def test_as_many_are_made_as_their_crops_have_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their records take room while they are read: here for one at a time, in a quarter of what may be in flight."""
    crops = mt.RandSpatialCropd(KEYS, (32, 32, 32)), mt.RandFlipd(KEYS, 1)  # a crop that is a view has its volume's
    loader = load(make(tmp_path, *crops), prefetch_bytes=12 << 20)
    list(loader)
    made_ahead(loader, monkeypatch)
    assert kept(loader) == [True] * COUNT
    whole = load(make(tmp_path, mt.RandFlipd(KEYS, 1)), prefetch_bytes=12 << 20)
    list(whole)
    made_ahead(whole, monkeypatch)
    assert kept(whole) == [True, False, False]


def test_no_batch_is_of_inference_mode_because_its_items_were_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient could not use what is read in it."""
    crop = mt.RandSpatialCropd(KEYS, (32, 32, 32), random_size=False)
    list(load(make(tmp_path, crop)))  # saves the items
    loader = load(make(tmp_path, crop), collate_fn=as_they_are)
    with torch.inference_mode():
        for _ in range(2):
            batches = made_ahead(loader, monkeypatch)
            assert all(kept(loader))
    assert not any(item["image"].is_inference() for items in batches for item in items)


def as_they_are(items: list[Any]) -> list[Any]:
    return items


def test_nothing_is_done_for_an_epoch_before_it_begins_where_that_is_not_wanted(tmp_path: Path) -> None:
    expected = [list(loader) for loader in [load(make(tmp_path))] for _ in range(3)]
    loader = load(make(tmp_path), persistent_workers=False)
    for batches in expected:
        assert_same(list(loader), batches)
        assert not crew_of(loader)._ahead


def test_nothing_is_made_before_an_epoch_where_the_last_one_was_not_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a training draws is not foreseen: the device's memory and time are better spent."""
    dataset = make(tmp_path)
    dataset.populate(num_workers=0, progress=False)  # an item that is just being saved has no program yet
    loader = load(dataset)
    for training, wanted in ((False, True), (True, False), (True, False), (False, True)):
        if training:
            torch.rand(3)
        made_ahead(loader, monkeypatch)
        assert kept(loader) == [wanted] * COUNT


def test_a_measured_epoch_has_its_own_items_in_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = load(make(tmp_path), stats=True)
    for _ in range(3):
        made_ahead(loader, monkeypatch)
        assert not any(kept(loader))
    assert loader.stats().hits == COUNT


def test_items_that_need_much_memory_are_not_made_before_their_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = load(make(tmp_path), prefetch_bytes=5 << 20)
    made_ahead(loader, monkeypatch)
    assert sum(kept(loader)) < COUNT


def test_items_that_were_made_before_their_epoch_are_given_up_where_memory_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BATCHES_AHEAD", 4)
    list(load(make(tmp_path)))  # saves the items
    dataset = make(tmp_path)
    loader = load(dataset, shuffle=False, sampler=torch.utils.data.RandomSampler(dataset, num_samples=6))
    made_ahead(loader, monkeypatch)
    made = list(crew_of(loader)._ahead.values())
    arrive = programmed.Programmed.arrive

    def arrived(self: programmed.Programmed) -> None:
        if any(running.begun is not None for running in made):
            raise torch.OutOfMemoryError("CUDA out of memory")
        arrive(self)

    assert all(kept(loader)) and len(made) == 4
    monkeypatch.setattr(programmed.Programmed, "arrive", arrived)
    assert len(list(loader)) == 6


def test_a_file_that_is_edited_between_epochs_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [{"path": str(tmp_path / f"{n}.txt")} for n in range(COUNT)]
    for item in items:
        Path(item["path"]).write_text("1")
    transform = mt.Compose([Read(), mt.RandSpatialCropd("image", (32, 32, 32))])
    dataset = GDSDataset(items, transform, tmp_path / "cache", device="cpu")
    dataset.populate(num_workers=0, progress=False)  # what is just being saved is drawn again, too
    loader = load(dataset)
    done_again: list[object] = []
    again = Crew.again
    monkeypatch.setattr(Crew, "again", lambda self, running: (done_again.append(running), again(self, running)))
    for _ in range(2):
        assert {float(batch["image"].max()) for batch in made_ahead(loader, monkeypatch)} == {1.0}
    assert any(kept(loader)) and not done_again
    for item in items:
        Path(item["path"]).write_text("22")
    assert {float(batch["image"].max()) for batch in loader} == {22.0}
    assert done_again


# ---------------------------------------------------------------------------------------------------------------------
# Thousands of epochs

EPOCHS = """
import gc, os, sys, threading
from pathlib import Path
import tests.loader.crew.test_crew as t
loader = t.load(t.make(Path(sys.argv[1])), programs=sys.argv[3])
for n in range(10):
    for k in range(int(sys.argv[2])):
        loop = iter(loader)
        for _ in range(t.COUNT):
            next(loop)
        if k % 50 == 7:  # left before it gave its last batch
            loop = iter(loader)
            next(loop)
        del loop
    gc.collect()
    status = open("/proc/self/status").read()
    anonymous = int(status.split("RssAnon:")[1].split()[0]) >> 10
    processes = len(t.multiprocessing.active_children())
    print(anonymous, len(os.listdir("/proc/self/fd")), threading.active_count(), processes)
"""


@pytest.mark.long
@pytest.mark.parametrize("programs", PROGRAMS)
def test_two_thousand_epochs_leave_nothing(tmp_path: Path, programs: str) -> None:
    """Memory in MB, descriptors, threads and processes."""
    lines = printed_by(EPOCHS, str(tmp_path), "200", programs, timeout=1200).splitlines()
    use = [[int(number) for number in line.split()] for line in lines]
    assert len(use) == 10
    # A loop that is left after its last batch ends its crew, if the loader has not noticed the end.
    first, last = [max(some) for some in zip(*use[2:5], strict=True)], use[-1]
    assert last[0] < first[0] + 48, use
    assert all(now <= before + 2 for now, before in zip(last[1:], first[1:], strict=True)), use


class Unstorable(mt.Transform):
    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "odd": object()}


def _told(folder: Path, of_monai: bool) -> list[str]:
    """What the processes of a run tell in three epochs, the second of which is left."""
    logging.basicConfig(filename=folder / "log", level=logging.INFO, force=True)
    logging.captureWarnings(True)
    warnings.simplefilter("always")
    dataset = GDSDataset(list(range(4)), mt.Compose([Quick(), Unstorable()]), folder / "cache", "cpu")
    settings: dict[str, Any] = {"num_workers": 2, "batch_size": 1, "collate_fn": list}
    loader = DataLoader(dataset, **settings) if of_monai else GDSDataLoader(dataset, **settings)
    for most in (None, 1, None):
        list(itertools.islice(loader, most))
    return (folder / "log").read_text().splitlines()


@pytest.mark.parametrize("of_monai", [False, True])
def test_the_processes_of_a_run_tell_each_thing_once(of_monai: bool, tmp_path: Path, interpreter: Interpreter) -> None:
    lines = interpreter.call(_told, tmp_path, of_monai)
    for what in ("sources of the first item", "cannot be cached"):
        assert len([line for line in lines if what in line]) == 1, lines
    for what in ("uses backend", "2 worker processes by"):  # by another process of these tests, perhaps
        assert len([line for line in lines if what in line]) <= 1, lines
