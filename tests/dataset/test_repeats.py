"""An item that never hits, and ranks whose keys differ: one warning names what differs, and the remedy."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import monai.transforms as mt
import pytest
import torch

from monai_gds import CacheWarning, GDSDataset, limits
from tests.dataset.test_populate import on_ranks
from tests.machines import in_child


class Saver(mt.Transform):
    """Holds the folder of the run."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    def __call__(self, data: Any) -> Any:
        return {"x": torch.ones(3), "n": data["n"]}


def said_by(work: Callable[[], Any]) -> list[str]:
    """The warnings about the cache that some work gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(w.message) for w in caught if issubclass(w.category, CacheWarning)]


def epoch(dataset: GDSDataset) -> None:
    for i in range(len(dataset)):
        dataset[i]
    dataset.flush()


def test_a_file_that_the_run_writes_is_named_in_the_third_epoch_and_once(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    items = [{"n": n, "log": str(log)} for n in range(3)]
    dataset = GDSDataset(items, mt.Compose([Saver("out")]), tmp_path / "cache", device="cpu")
    said = []
    for n in range(5):
        log.write_text("epoch\n" * n)
        said.append([text for text in said_by(partial(epoch, dataset)) if "third record" in text])
    assert [len(each) for each in said] == [0, 0, 1, 0, 0]
    assert "train.log changed (size 6 → 12)" in said[2][0]
    assert "item 0 " in said[2][0] and "sources=" in said[2][0] and "version=" in said[2][0]


class Reader(mt.Transform):
    """Reads a file whose path nothing names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __cache_key__(self) -> str:
        return "reader"

    def __call__(self, data: Any) -> Any:
        return {**data, "x": torch.tensor(len((self.folder / "state.txt").read_text()))}


def test_a_file_that_is_only_read_is_named_too(tmp_path: Path) -> None:
    dataset = GDSDataset([{"n": 0}], mt.Compose([Reader(tmp_path)]), tmp_path / "cache", device="cpu")
    said = []
    for n in range(4):
        (tmp_path / "state.txt").write_text("." * n)
        said.append([text for text in said_by(partial(epoch, dataset)) if "third record" in text])
    assert [len(each) for each in said] == [0, 0, 1, 0]
    assert "state.txt changed (size 1 → 2)" in said[2][0]


def test_an_attribute_that_the_run_sets_is_named(tmp_path: Path) -> None:
    dataset = GDSDataset([{"n": 0}], mt.Compose([Saver("run 0")]), tmp_path, device="cpu")

    def run(name: str) -> None:
        dataset.transform = mt.Compose([Saver(name)])
        epoch(dataset)

    said = [said_by(partial(run, f"run {n}")) for n in (0, 1, 0, 1, 2)]
    assert [len([text for text in each if "third record" in text]) for each in said] == [0, 0, 0, 0, 1]
    assert "Saver.run_dir 'run 1' → 'run 2'" in said[4][-1]
    assert "__cache_key__" in said[4][-1]


def test_data_that_change_are_named(tmp_path: Path) -> None:
    dataset = GDSDataset([{"n": 0}], mt.Compose([Saver("")]), tmp_path, device="cpu")

    def run(n: int) -> None:
        dataset.data[0]["n"] = n
        epoch(dataset)

    said = [said_by(partial(run, n)) for n in range(3)]
    assert "the item itself" in said[2][-1]


def test_other_data_are_told_nothing(tmp_path: Path) -> None:
    dataset = GDSDataset([], mt.Compose([Saver("")]), tmp_path, device="cpu")

    def run(fold: int) -> None:
        dataset.set_data([{"n": fold}])
        epoch(dataset)

    assert [said_by(partial(run, fold)) for fold in range(4)] == [[]] * 4


def test_only_so_many_items_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPEATED_ITEMS", 2)
    dataset = GDSDataset([{"n": n} for n in range(5)], mt.Compose([Saver("")]), tmp_path, device="cpu")
    epoch(dataset)
    repeats = dataset.session.runtime.misses.repeats
    assert sorted(repeats._keys) == [0, 1]


def test_hits_are_not_watched(tmp_path: Path) -> None:
    for _ in range(4):  # each time in another process, so to say
        dataset = GDSDataset([{"n": 0}], mt.Compose([Saver("")]), tmp_path, device="cpu")
        assert said_by(partial(epoch, dataset)) == []
    assert not dataset.session.runtime.misses.repeats._keys


# Ranks


def of_rank(cache: Path, steps: Callable[[SimpleNamespace], Any], items: int = 4) -> GDSDataset:
    cfg = SimpleNamespace(rank=torch.distributed.get_rank(), spacing=2)
    data = [{"n": n} for n in range(items)]
    return GDSDataset(data, mt.Compose(steps(cfg)), cache, device="cpu")


def captured(cfg: SimpleNamespace) -> list[Any]:
    """A function that hands its configuration on, the rank in it."""
    return [mt.Lambdad("n", lambda n: len(str(cfg)) * n)]


def populated(cache: Path, steps: Callable[[SimpleNamespace], Any]) -> list[str]:
    """What one rank is told, with populate and without."""
    return said_by(lambda: of_rank(cache, steps).populate(0, progress=False))


def test_ranks_whose_keys_differ_are_told_once(tmp_path: Path) -> None:
    said = on_ranks(*[partial(populated, tmp_path, captured)] * 2)
    told = [text for each in said for text in each]
    assert len(told) == 1, said
    assert "cfg.rank 0 → 1" in told[0] or "cfg.rank 1 → 0" in told[0]
    assert "__cache_key__" in told[0]


def test_ranks_with_one_pipeline_are_told_nothing(tmp_path: Path) -> None:
    assert on_ranks(*[partial(populated, tmp_path, lambda cfg: [Saver("out")])] * 2) == [[], []]


def test_a_rank_that_has_another_dataset_beside_is_told_nothing(tmp_path: Path) -> None:
    def work() -> None:
        if torch.distributed.get_rank() == 0:
            of_rank(tmp_path, lambda cfg: [Saver("validation")], items=3)
        else:
            torch.distributed.barrier()  # the first rank has them all
        for name in ("first", "second"):
            of_rank(tmp_path, lambda cfg, name=name: [Saver(name)])
        if torch.distributed.get_rank() == 0:
            torch.distributed.barrier()

    assert on_ranks(*[partial(said_by, work)] * 2) == [[], []]


_made: list[GDSDataset] = []


def made_with(cache: Path, *processes: tuple[str, str]) -> list[list[str]]:
    """What processes are told that a launcher started, as their environment says, each while those before it run."""
    (rank, port), *others = processes
    os.environ.update(RANK=rank, MASTER_ADDR="here", MASTER_PORT=port)
    steps = mt.Compose([Saver(f"rank {rank}")])
    said = said_by(lambda: _made.append(GDSDataset([{"n": 1}], steps, cache, device="cpu")))
    return [said, *(in_child(partial(made_with, cache, *others)) if others else [])]


def test_training_without_populate_tells_too_within_one_job(tmp_path: Path) -> None:
    said = in_child(partial(made_with, tmp_path, ("0", "1234"), ("1", "9999"), ("1", "1234")))
    assert said[:2] == [[], []], "nobody was there before, and the second is of another job"
    assert "ranks 0 and 1" in said[2][0]
    assert "Saver.run_dir 'rank 0' → 'rank 1'" in said[2][0]


def test_ranks_that_have_ended_do_not_count(tmp_path: Path) -> None:
    """A job is started again under its name."""
    assert [in_child(partial(made_with, tmp_path, (rank, "1234"))) for rank in "01"] == [[[]], [[]]]
