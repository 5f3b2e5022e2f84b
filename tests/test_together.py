"""Several processes that fill one cache at the same time: each item is computed once, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import monai.transforms as mt
import pytest
import torch

from monai_gds import GDSDataLoader, GDSDataset, limits
from monai_gds.dataset import populate
from monai_gds.dataset.populate import Populated
from monai_gds.folder.writer import process_writer
from monai_gds.shared import leases
from monai_gds.shared.leases import Leases, Pace
from tests.fresh import Interpreter, Process
from tests.polls import until

#: What a process does with the dataset.
Work = Callable[..., Any]

ITEMS = 20


class Make(mt.Transform):
    """A tensor for a number; appends the number to a log, and takes its time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __cache_key__(self) -> str:
        return "make"

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        with (self.folder / "log").open("a") as f:
            f.write(f"{data['n']}\n")
        time.sleep(float(os.environ.get("MAKE_SECONDS", 0.1)))
        if os.environ.get("MAKE_FAILS"):
            raise OSError("the disk is broken")
        return {"x": torch.full((2000,), float(data["n"]))}


def dataset_of(folder: Path, count: int = ITEMS) -> GDSDataset:
    """Items that take 0.1 s each, with their cache, in ``folder``."""
    items = [{"n": n} for n in range(count)]
    return GDSDataset(items, mt.Compose([Make(folder)]), folder / "cache", device="cpu")


def log(folder: Path) -> list[int]:
    """The items that were computed, by whomever."""
    path = folder / "log"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def digest(dataset: GDSDataset, index: int) -> str:
    return dataset.key(index).digest


def prepare(environment: dict[str, str]) -> int:
    """Imports in a fresh process what the work needs, and returns its process id."""
    os.environ.update(environment)
    return os.getpid()


def work_on_dataset(work: Work, folder: Path, *args: Any) -> Any:
    """Does ``work`` over the dataset of a folder once :meth:`Fresh.go` lets it."""
    dataset = dataset_of(folder)
    while not (folder / "go").exists():
        time.sleep(0.005)
    return work(dataset, *args)


class Fresh:
    """Fresh processes that work on one dataset, all at the same time."""

    def __init__(self, folder: Path, interpreter: Interpreter) -> None:
        self._folder = folder
        self._interpreter = interpreter
        self._running: dict[Process, int] = {}  # with a pidfd each: an id may be another's by the time of a kill

    def start(self, work: Work, *args: Any, **environment: str) -> int:
        """Begins ``work(dataset, *args)`` in a process, which waits for :meth:`go`; returns the process id."""
        process = self._interpreter.process()
        pid: int = process.call(prepare, environment)
        self._running[process] = os.pidfd_open(pid)
        process.start(work_on_dataset, work, self._folder, *args)
        return pid

    def go(self) -> None:
        """Lets all run that were started."""
        (self._folder / "go").touch()

    def results(self) -> list[Any]:
        """Waits for all, and returns what they returned."""
        return [process.result() for process in self._running]

    def close(self) -> None:
        for process, pidfd in self._running.items():
            process.close()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


@pytest.fixture
def fresh(tmp_path: Path, interpreter: Interpreter) -> Iterator[Fresh]:
    with closing(Fresh(tmp_path, interpreter)) as processes:
        yield processes


@pytest.mark.parametrize("workers", [0, 2])
def test_three_that_populate_together_compute_every_item_once(tmp_path: Path, fresh: Fresh, workers: int) -> None:
    for _ in range(3):
        fresh.start(GDSDataset.populate, workers)
    fresh.go()
    found = fresh.results()
    assert sorted(log(tmp_path)) == list(range(ITEMS))
    assert sum(populated.computed for populated in found) == ITEMS
    assert [populated.cached + populated.computed for populated in found] == [ITEMS] * 3
    assert os.listdir(tmp_path / "cache" / ".tmp") == []


def train(dataset: GDSDataset, seed: int) -> list[int]:
    """The items of a shuffled epoch."""
    torch.manual_seed(seed)
    loader = GDSDataLoader(dataset, batch_size=2, shuffle=True, prefetch=4)
    return sorted(int(x) for batch in loader for x in batch["x"][:, 0])


def test_three_shuffled_training_loops_compute_little_twice(tmp_path: Path, fresh: Fresh) -> None:
    for seed in range(3):
        fresh.start(train, seed)
    fresh.go()
    assert fresh.results() == [list(range(ITEMS))] * 3
    assert sorted(set(log(tmp_path))) == list(range(ITEMS))
    assert len(log(tmp_path)) <= ITEMS + 3 * 4
    assert os.listdir(tmp_path / "cache" / ".tmp") == []


def test_two_threads_that_want_an_item_compute_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "pace", Pace())
    datasets = [dataset_of(tmp_path), dataset_of(tmp_path)]
    found: list[float] = []
    threads = [threading.Thread(target=lambda d=d: found.append(float(d[3]["x"][0]))) for d in [*datasets, datasets[0]]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process_writer().flush()
    assert found == [3, 3, 3]
    assert log(tmp_path) == [3]


def test_an_item_is_leased_until_its_record_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, on, publishing = dataset_of(tmp_path), threading.Event(), threading.Event()
    rename = os.rename

    def slow(*paths: Any, **more: Any) -> None:
        publishing.set()
        assert on.wait(20)
        rename(*paths, **more)

    monkeypatch.setattr(os, "rename", slow)
    monkeypatch.setattr(limits, "SAVED_AT_ONCE_BYTES", -1)
    dataset.__getitems__([0])
    assert publishing.wait(20)
    assert Leases(tmp_path / "cache").held_elsewhere(digest(dataset, 0))
    assert dataset.session.save(0).how == "busy"
    on.set()
    dataset.flush()
    assert not Leases(tmp_path / "cache").held_elsewhere(digest(dataset, 0))
    assert dataset.session.save(0).how == "cached"
    assert log(tmp_path) == [0]


@pytest.mark.parametrize("way", [lambda d: d.session.save(0).how, lambda d: d[0] and "cached"], ids=["save", "index"])
def test_what_another_finished_just_before_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[[GDSDataset], str]
) -> None:
    dataset, theirs, take = dataset_of(tmp_path), dataset_of(tmp_path), Leases.take

    def late(leases: Leases, name: str) -> Any:
        monkeypatch.setattr(Leases, "take", take)
        theirs.session.save(0)  # after this one looked for the record, and before it has the lease
        return take(leases, name)

    monkeypatch.setattr(Leases, "take", late)
    assert way(dataset) == "cached"
    assert log(tmp_path) == [0]


# ---------------------------------------------------------------------------------------------------------------------
# Holders that never come to an end


def test_a_compute_that_hangs_for_ever_holds_nobody_up(
    tmp_path: Path, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(populate, "_PATIENCE_SECONDS", 0.4)
    monkeypatch.setattr(populate, "_PATIENCE_ITEMS", 0)
    fresh.start(GDSDataset.__getitem__, 2, MAKE_SECONDS="1000")
    fresh.go()
    until(lambda: log(tmp_path) == [2])
    dataset = dataset_of(tmp_path, 4)
    assert float(dataset[0]["x"][0]) == 0  # and now it is known how long an item takes
    began = time.monotonic()
    assert float(dataset[2]["x"][0]) == 2
    assert time.monotonic() - began < 60
    dataset.flush()
    assert dataset.populate() == Populated(cached=2, computed=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_populate_does_the_others_first_and_then_what_hangs_elsewhere(
    tmp_path: Path, fresh: Fresh, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(populate, "_PATIENCE_SECONDS", 0.4)
    monkeypatch.setattr(populate, "_PATIENCE_ITEMS", 0)
    fresh.start(GDSDataset.populate, 0, MAKE_SECONDS="1000")
    fresh.go()
    until(lambda: log(tmp_path) == [0])
    began = time.monotonic()
    assert dataset_of(tmp_path, 6).populate(workers) == Populated(cached=0, computed=6)
    assert time.monotonic() - began > 0.4
    assert log(tmp_path)[-1] == 0
    assert sorted(log(tmp_path)) == [0, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP, "fails"])
def test_what_a_holder_leaves_is_computed_by_who_waits(
    tmp_path: Path, fresh: Fresh, monkeypatch: pytest.MonkeyPatch, end: Any
) -> None:
    monkeypatch.setattr(leases, "STALE_SECONDS", 1.5)
    environment = {"MAKE_SECONDS": "1", "MAKE_FAILS": "yes"} if end == "fails" else {"MAKE_SECONDS": "1000"}
    pid = fresh.start(GDSDataset.__getitem__, 0, **environment)
    fresh.go()
    until(lambda: log(tmp_path) == [0])
    if end != "fails":
        threading.Timer(0.5, os.kill, (pid, end)).start()
    began = time.monotonic()
    assert dataset_of(tmp_path, 3).populate() == Populated(cached=0, computed=3)
    assert time.monotonic() - began < 20
    assert sorted(log(tmp_path)) == [0, 0, 1, 2]


def test_what_others_failed_at_fails_here_with_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKE_FAILS", "yes")
    dataset = dataset_of(tmp_path, 3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="applying transform"):
            _ = dataset[1]
    assert log(tmp_path) == [1, 1]
    assert os.listdir(tmp_path / "cache" / ".tmp") == []
