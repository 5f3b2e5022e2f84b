"""populate and `cache warm`: the whole cache is filled, by whatever processes, and whatever becomes of them."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
import torch.distributed as dist
from monai.data import MetaTensor

from monai_gds import CacheWarning, GDSDataset, NotSaved, PopulateError, WorkerDied
from monai_gds.base import console
from monai_gds.dataset.populate import Populated
from monai_gds.folder.maintenance import survey
from monai_gds.folder.writer import process_writer
from monai_gds.tiles import blosc
from tests import fresh
from tests.commands import run
from tests.fixtures_nifti import pipeline, write_volumes
from tests.machines import ROOT, in_child, mounted_tmpfs, read_only
from tests.polls import until
from tests.same import assert_same

needs_blosc2 = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")


class Make(mt.Transform):
    """A tensor for a number; notes which process made it, and does what the item asks for before."""

    def __init__(self, log: Path) -> None:
        self.log = str(log)

    def __cache_key__(self) -> str:
        return "make"

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        n = data["n"]
        time.sleep(data.get("sleep", 0))
        if data.get("fail"):
            raise Fragile(data["fail"], n)
        if "kill" in data and os.path.exists(data["kill"]):
            with open(data["kill"], "a+") as trap:  # notes how often it was tried
                trap.seek(0)
                if len(trap.read()) < data.get("times", 100):
                    trap.write("x")
                    trap.flush()
                    os._exit(1)
        with open(f"{self.log}/{n}.{os.getpid()}", "a") as f:
            f.write("x")
        return {"x": torch.full((20_000,), n)}


class Fragile(Exception):
    """Cannot be unpickled."""

    def __init__(self, why: str, n: int) -> None:
        super().__init__(f"{why} {n}")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    return tmp_path / "log"


@pytest.fixture
def make(tmp_path: Path, log: Path) -> Callable[..., GDSDataset]:
    def make_dataset(count: int = 8, cache: Any = tmp_path / "cache", **items: Any) -> GDSDataset:
        data = [{"n": n, **items.get(f"item{n}", items.get("each", {}))} for n in range(count)]
        return GDSDataset(data, mt.Compose([Make(log)]), cache, device="cpu")

    return make_dataset


def made(log: Path) -> dict[int, set[int]]:
    """Which processes made each number."""
    found: dict[int, set[int]] = {}
    for name in os.listdir(log):
        number, pid = map(int, name.split("."))
        found.setdefault(number, set()).add(pid)
    return found


def processes(log: Path) -> set[int]:
    return {pid for pids in made(log).values() for pid in pids}


# ---------------------------------------------------------------------------------------------------------------------
# Filling


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))


@pytest.mark.parametrize(
    ("cuda", "ranks", "workers"), [(False, "1", 3), (False, "3", 1), (True, "1", 1)], ids=["alone", "ranks", "cuda"]
)
def test_by_default_every_core_computes(
    make: Any, log: Path, monkeypatch: pytest.MonkeyPatch, cores: None, cuda: bool, ranks: str, workers: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert make(each={"sleep": 0.1}).populate() == Populated(0, 8)
    assert len(processes(log)) == workers
    assert (os.getpid() in processes(log)) == (workers == 1)


class NeedsThisProcess(mt.Transform):
    """As a transform that uses CUDA, once this process has looked for a device."""

    pid = os.getpid()

    def __call__(self, data: Any) -> Any:
        if os.getpid() != self.pid:
            raise RuntimeError("CUDA error: initialization error")
        return data


@pytest.mark.parametrize("workers", [None, 2], ids=["by default", "two"])
def test_what_workers_cannot_compute_is_computed_here(
    make: Any, log: Path, tmp_path: Path, cores: None, workers: int | None
) -> None:
    trap = tmp_path / "trap"
    trap.touch()
    dataset = make(4, item2={"kill": str(trap)})
    dataset.transform = mt.Compose([*dataset.transform.transforms, NeedsThisProcess()])
    with pytest.warns(CacheWarning, match="is tried once more"), pytest.raises(PopulateError, match="1 of 4") as failed:
        dataset.populate(workers)
    assert [item.index for item in failed.value.failures] == [2], "or it would have killed this process"
    assert [dataset.is_cached(n) for n in range(4)] == [True, True, False, True]


@pytest.mark.parametrize(
    ("workers", "cuda", "elsewhere"),
    [(0, False, False), (2, False, True), pytest.param(2, True, True, marks=pytest.mark.long)],
    ids=["here", "fork", "spawn"],
)
def test_fills_what_is_missing_and_nothing_twice(
    make: Any, log: Path, monkeypatch: pytest.MonkeyPatch, workers: int, cuda: bool, elsewhere: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    dataset = make()
    _ = dataset[1], dataset[6]
    (log / f"1.{os.getpid()}").unlink()
    (log / f"6.{os.getpid()}").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataset.populate(workers) == Populated(cached=2, computed=6)
        assert dataset.populate(workers) == Populated(cached=8, computed=0)
    assert sorted(made(log)) == [0, 2, 3, 4, 5, 7]
    assert all(len(pids) == 1 for pids in made(log).values())
    assert (os.getpid() not in processes(log)) == elsewhere
    before = made(log)
    assert [float(dataset[i]["x"][0]) for i in range(8)] == list(range(8))
    assert made(log) == before, "every item was read"


def test_what_is_populated_is_what_an_access_gives(tmp_path: Path) -> None:
    items = write_volumes(tmp_path, 3)
    GDSDataset(items, pipeline(), tmp_path / "cache", device="cpu").populate(2)
    filled, plain = (GDSDataset(items, pipeline(), cache, device="cpu") for cache in (tmp_path / "cache", None))
    records = sorted((tmp_path / "cache").glob("*.safetensors"))
    assert len(records) == 3
    written = [path.stat().st_mtime_ns for path in records]
    for i in range(3):
        assert_same(plain[i], filled[i])
    assert [path.stat().st_mtime_ns for path in records] == written


def test_threads_are_said_and_do_the_same(make: Any, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    dataset = make()
    dataset.transform = mt.Compose([lambda_identity(), Make(log)])
    with pytest.warns(UserWarning, match="2 threads do the work of processes: .*cannot be pickled") as said:
        assert dataset.populate(2) == Populated(0, 8)
    assert [one.filename for one in said] == [__file__]
    assert processes(log) == {os.getpid()}


def lambda_identity() -> Any:
    return mt.Lambda(lambda data: data)


def test_why_everything_is_computed_anew_is_said(make: Any, tmp_path: Path, log: Path) -> None:
    make().populate()
    other = make()
    other.transform = mt.Compose([Make(log), mt.Lambda(lambda item: {"x": item["x"] + 1})])
    with pytest.warns(CacheWarning, match=r"every item was computed again.*Lambda inserted"):
        other.populate()


def test_a_damaged_header_is_made_anew(make: Any, tmp_path: Path, log: Path) -> None:
    dataset = make()
    dataset.populate()
    record = sorted((tmp_path / "cache").glob("*.safetensors"))[0]
    record.write_bytes(record.read_bytes()[:5000])
    with pytest.warns(CacheWarning, match=record.name):
        assert make().populate() == Populated(7, 1)
    assert make().populate() == Populated(8, 0)


def test_nothing_to_fill(make: Any, tmp_path: Path, log: Path) -> None:
    assert make(cache=None).populate() == Populated(0, 0)
    assert make(0).populate(2) == Populated(0, 0)
    with pytest.warns(CacheWarning, match="nothing is cached"):
        dataset = GDSDataset([{"n": 1}], mt.Compose([mt.RandFlipd("x")]), tmp_path / "cache", device="cpu")
    assert dataset.populate(2) == Populated(0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": -1}, "num_workers=-1"),
        ({"num_workers": 2, "executor": ThreadPoolExecutor(1)}, "give one of them"),
        ({"rank": 0}, "give both or neither"),
        ({"rank": 2, "world_size": 2}, "rank=2 is not within 0 to world_size - 1 = 1"),
    ],
)
def test_bad_arguments_name_themselves(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().populate(**arguments)


def test_a_bar_on_a_terminal_only(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make().populate()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes what it writes to for a terminal
    monkeypatch.setattr(console.stderr, "is_interactive", True)
    make(9).populate(progress=False)
    assert capsys.readouterr() == ("", "")
    make(10).populate(2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "filling the cache, 2 workers (fork)" in shown.err
    assert "10/10" in shown.err


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


@pytest.mark.parametrize("workers", [0, 2])
def test_failing_items_are_named_and_do_not_stop_the_others(make: Any, workers: int, log: Path) -> None:
    dataset = make(item2={"fail": "broken"}, item5={"fail": "strange", "file": "/data/five.nii"})
    with pytest.raises(PopulateError) as caught:
        dataset.populate(workers)
    error = caught.value
    assert [failure.index for failure in error.failures] == [2, 5]
    assert [failure.path for failure in error.failures] == ["{'n': 2, 'fail': 'broken'}", "/data/five.nii"]
    assert "Fragile: broken 2" in error.failures[0].error
    assert "applying transform" in error.failures[0].error
    assert "2 of 8 items failed" in str(error)
    assert "5: /data/five.nii: " in str(error)
    assert sorted(made(log)) == [0, 1, 3, 4, 6, 7]
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.failures) == (str(error), error.failures)


def test_ten_of_many_failures_are_in_the_message(make: Any) -> None:
    with pytest.raises(PopulateError) as caught:
        make(13, each={"fail": "all"}).populate()
    assert len(caught.value.failures) == 13
    lines = str(caught.value).splitlines()
    assert len(lines) == 13
    assert "and 3 more" in lines[-2]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_item_that_cannot_even_be_had_fails_by_itself(tmp_path: Path, log: Path, workers: int) -> None:
    class Lazy(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 2:
                raise OSError("the database is gone")
            return super().__getitem__(index)

    dataset = GDSDataset(Lazy({"n": n} for n in range(5)), mt.Compose([Make(log)]), tmp_path / "cache", device="cpu")
    with pytest.raises(PopulateError, match=r"2: data\[2\]: OSError: the database is gone"):
        dataset.populate(workers)
    assert sorted(made(log)) == [0, 1, 3, 4]


def test_items_that_cannot_be_saved_or_hashed_fail_by_themselves(tmp_path: Path) -> None:
    transform = mt.Compose([mt.Lambda(lambda d: {**d, "x": d["n"] if d["n"] else object()})])
    dataset = GDSDataset([{"n": 0}, {"n": 1}, {"n": (n for n in ())}], transform, tmp_path / "cache", device="cpu")
    with pytest.raises(PopulateError) as caught:
        dataset.populate(2)
    assert [failure.error.split(":")[0] for failure in caught.value.failures] == ["UnsupportedType", "HashingError"]
    assert dataset.is_cached(1)


def test_a_source_that_changes_meanwhile_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old")

    def read(data: Any) -> Any:
        file.write_text("newer")
        return {"text": file.read_text()}

    dataset = GDSDataset([{"file": str(file)}], mt.Compose([mt.Lambda(read)]), tmp_path / "cache", device="cpu")
    with pytest.raises(PopulateError, match=r"while item 0 was computed, .*a\.txt changed"):
        dataset.populate()


def test_a_full_disk_stops_it_with_an_error(make: Any, tmp_path: Path, log: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 300 << 10) as small, warnings.catch_warnings():
        warnings.simplefilter("error")
        for workers in (0, 2):
            with pytest.raises(NotSaved, match=r"nothing more can be cached in .*small.*free some space") as caught:
                make(100, cache=small).populate(workers)
            assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 20
        assert os.listdir(small / ".tmp") == []
    assert len(made(log)) < 20, "nothing is computed in vain"


def test_an_item_that_kills_its_workers_is_reported_and_the_others_are_cached(
    make: Any, tmp_path: Path, log: Path
) -> None:
    trap = tmp_path / "trap"
    trap.touch()
    dataset = make(8, item3={"kill": str(trap)}, item6={"fail": "broken"})
    with pytest.warns(CacheWarning, match="was killed.*tried once more"), pytest.raises(PopulateError) as caught:
        dataset.populate(2)
    assert (caught.value.failures[0].index, caught.value.failures[0].path) == (3, str(trap))
    assert [failure.error.split(":")[0] for failure in caught.value.failures] == ["WorkerDied", "RuntimeError"]
    assert len(trap.read_text()) == 2, "it was tried on two workers"
    assert sorted(made(log)) == [0, 1, 2, 4, 5, 7]
    trap.unlink()
    assert make(8, item3={"kill": str(trap)}).populate(2).cached == 6


def test_what_one_killed_worker_was_at_is_finished_by_others(make: Any, tmp_path: Path, log: Path) -> None:
    trap = tmp_path / "trap"
    trap.touch()
    with pytest.warns(CacheWarning, match="was killed") as told:
        done = make(20, item7={"kill": str(trap), "times": 1}).populate(2)
    assert done.cached + done.computed == 20
    assert done.computed > 15, "an answer may be lost with the worker: its record is there when it is asked again"
    assert len([one for one in told if one.category is CacheWarning]) == 1
    assert sorted(made(log)) == list(range(20))


def test_workers_that_all_die_end_it(make: Any, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.touch()
    with (
        pytest.warns(CacheWarning),
        pytest.raises(WorkerDied, match=r"in a row: a worker process was killed.*Items under way: 0 \(/.*trap\), 1 \("),
    ):
        make(100, each={"kill": str(trap)}).populate(1)
    assert len(trap.read_text()) < 30


def test_what_a_killed_worker_left_is_removed(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, rename = os.getpid(), os.rename

    def die(*paths: Any, **folders: Any) -> None:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*paths, **folders)

    monkeypatch.setattr(os, "rename", die)
    with pytest.warns(CacheWarning), pytest.raises(PopulateError, match="8 of 8 items failed"):
        make().populate(1)
    assert os.listdir(tmp_path / "cache" / ".tmp") == []
    assert make().populate(0) == Populated(0, 8)


def test_goes_on_after_the_whole_run_was_killed(make: Any, tmp_path: Path, log: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
import monai.transforms as mt
from monai_gds import GDSDataset
from tests.dataset.test_populate import Make
data = [{{"n": n, "sleep": 0.05}} for n in range(20)]
GDSDataset(data, mt.Compose([Make(Path({str(log)!r}))]), {str(tmp_path / "cache")!r}, device="cpu").populate(2)
"""
    process = fresh.warm().program("-c", code)
    until(lambda: len(made(log)) >= 6)
    process.send_signal(signal.SIGKILL)
    process.result()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in processes(log)), "the workers end by themselves")
    done = set(made(log))
    assert len(done) < 20
    dataset = make(20, each={"sleep": 0.05})
    assert os.listdir(tmp_path / "cache" / ".tmp") == []
    finished = dataset.populate(2)
    assert finished.cached >= len(done) - 2
    assert finished.cached + finished.computed == 20


# ---------------------------------------------------------------------------------------------------------------------
# Converting


class Volume(mt.Transform):
    """An image that compresses, an affine, and a value that only this run knows; notes each call."""

    def __init__(self, log: Path) -> None:
        self.log = str(log)

    def __cache_key__(self) -> str:
        return "volume"

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        with open(f"{self.log}/{data['n']}.{os.getpid()}", "a") as f:
            f.write("x")
        steps = torch.arange(80).repeat(80 * 80).view(1, 80, 80, 80) + data["n"]
        return {"image": MetaTensor(steps / 7, meta={"n": data["n"], "sizes": np.array([0.5, 2.0])})}


@pytest.fixture
def volumes(tmp_path: Path, log: Path) -> Callable[..., GDSDataset]:
    def make_dataset(count: int = 3, random: Sequence[Any] = (), **settings: Any) -> GDSDataset:
        transform = mt.Compose([Volume(log), *random])
        return GDSDataset([{"n": n} for n in range(count)], transform, tmp_path / "cache", device="cpu", **settings)

    return make_dataset


def forms(folder: Path) -> list[str]:
    """The forms of the records in the cache folder."""
    return sorted(found.form for found in survey(folder / "cache"))


@needs_blosc2
@pytest.mark.parametrize("workers", [0, 2])
def test_converts_only_when_asked_and_runs_no_transform(volumes: Any, tmp_path: Path, log: Path, workers: int) -> None:
    plain = volumes(compression=None)
    plain.populate()
    expected = [plain[i] for i in range(3)]
    before = made(log)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for settings, form in (
            ({"compression": "lz4"}, "lz4 32"), ({"compression": "lz4", "options": {"tiles": 16}}, "lz4 16"),
            ({"compression": "zstd"}, "zstd 32"), ({"compression": None}, ""),
        ):  # fmt: skip
            dataset = volumes(**settings)
            assert dataset.populate(workers) == Populated(cached=3, computed=0)
            assert forms(tmp_path) != [form] * 3
            assert dataset.populate(workers, convert=True) == Populated(cached=0, computed=0, converted=3)
            assert forms(tmp_path) == [form] * 3
            assert dataset.populate(workers, convert=True) == Populated(cached=3, computed=0)
            assert_same([dataset[i] for i in range(3)], expected)
            assert_same([plain[i] for i in range(3)], expected)
    assert made(log) == before


@needs_blosc2
def test_auto_converts_whole_records_where_it_chooses_tiles_and_nothing_else(
    volumes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monai_gds.limits.CROPPED_BYTES", 0)
    crops, flips = mt.RandSpatialCropd("image", 8), mt.RandFlipd("image")
    volumes(compression=None).populate()
    assert volumes(random=[flips]).populate(convert=True) == Populated(3, 0)
    assert volumes(random=[crops]).populate(convert=True) == Populated(0, 0, 3)
    assert forms(tmp_path) == ["lz4 32"] * 3
    for settings in ({}, {"random": [flips]}, {"random": [crops]}, {"random": [crops], "options": {"tiles": 16}}):
        assert volumes(**settings).populate(convert=True) == Populated(3, 0)
    volumes(compression="zstd").populate(convert=True)
    assert volumes(random=[crops]).populate(convert=True) == Populated(3, 0)
    assert forms(tmp_path) == ["zstd 32"] * 3


@needs_blosc2
def test_a_damaged_record_is_computed_where_it_was_to_be_converted(volumes: Any, tmp_path: Path, log: Path) -> None:
    volumes(compression=None).populate()
    before = made(log)
    record = sorted((tmp_path / "cache").glob("*.safetensors"))[1]
    with record.open("r+b") as file:
        file.seek(-9000, os.SEEK_END)
        file.write(b"\x00\xff\xff")
    dataset = volumes(compression="lz4")
    with pytest.warns(CacheWarning, match=f"{record.name} cannot be used and is computed again"):
        assert dataset.populate(0, convert=True) == Populated(cached=0, computed=1, converted=2)
    assert forms(tmp_path) == ["lz4 32"] * 3
    calls = sum(len((log / name).read_text()) for name in os.listdir(log))
    assert calls == sum(map(len, before.values())) + 1
    assert_same(dataset[1], volumes(compression=None)[1])


@needs_blosc2
def test_records_that_cannot_be_unpacked_here_are_kept(
    volumes: Any, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volumes(compression="lz4").populate()
    files = {path: path.read_bytes() for path in (tmp_path / "cache").glob("*.safetensors")}
    monkeypatch.setattr(blosc, "why_not", lambda: "Blosc2 is not installed: pip install it")
    dataset = volumes(compression=None)
    with pytest.warns(CacheWarning, match="without being replaced: Blosc2 is not installed") as given:
        assert dataset.populate(convert=True) == Populated(3, 0)
    with warnings.catch_warnings(action="error", category=CacheWarning):  # it was said in this run
        assert float(dataset[1]["image"][0, 0, 0, 0]) == np.float32(1 / 7)
        assert_same(dataset[1], dataset[1])
    assert len(given) == 1
    assert {path: path.read_bytes() for path in files} == files
    assert dataset.explain(1).startswith("item 1 is computed in every epoch: ")
    assert "pip install it" in dataset.explain(1)


@needs_blosc2
def test_a_folder_that_cannot_be_written_is_told_from_one_without_anything_to_do(volumes: Any, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "cache", 64 << 20) as folder:
        volumes(compression="lz4").populate()
        read_only(folder)
        assert volumes(compression="lz4").populate(convert=True) == Populated(3, 0)
        assert volumes(compression="zstd").populate() == Populated(3, 0)
        with pytest.raises(NotSaved, match=r"records in .* cannot be converted: .*mount it writable"):
            volumes(compression="zstd").populate(convert=True)
        assert forms(tmp_path) == ["lz4 32"] * 3


@needs_blosc2
def test_two_processes_that_convert_to_two_forms_come_to_an_end(volumes: Any, tmp_path: Path, log: Path) -> None:
    plain = volumes(12, compression=None)
    plain.populate()
    expected, before = [plain[i] for i in range(12)], made(log)
    datasets = [volumes(12, compression=codec) for codec in ("lz4", "zstd")]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda one: in_child(lambda: one.populate(convert=True, progress=False)), datasets))
    for one in done:
        assert one.cached + one.converted == 12 and one.computed == 0
    assert 12 <= sum(one.converted for one in done) <= 24
    assert set(forms(tmp_path)) <= {"lz4 32", "zstd 32"}
    assert_same([datasets[0][i] for i in range(12)], expected)
    assert made(log) == before
    assert os.listdir(tmp_path / "cache" / ".tmp") == []


@needs_blosc2
def test_cache_warm_converts_unless_told_not_to(
    volumes: Any, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volumes(compression=None).populate()
    name = f"converting_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = ModuleType(name)
    module.make = lambda: volumes(4, compression="zstd", options={"tiles": 16})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    done = run("cache", "warm", f"{name}:make", "--no-convert")
    assert done.stdout == "1 items computed, 3 were cached already\n", done.stderr
    assert forms(tmp_path) == ["", "", "", "zstd 16"]
    done = run("cache", "warm", f"{name}:make")
    assert done.stdout == (
        "0 items computed, 1 were cached already, 3 converted to zstd, in tiles of 16³ (compression='zstd')\n"
    ), done.stderr
    assert forms(tmp_path) == ["zstd 16"] * 4


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


def test_ranks_given_by_hand_share_the_items(make: Any, log: Path) -> None:
    assert make().populate(rank=1, world_size=3) == Populated(0, 3)
    assert sorted(made(log)) == [1, 4, 7]
    assert make().populate(2, rank=0, world_size=3) == Populated(0, 3)
    assert sorted(made(log)) == [0, 1, 3, 4, 6, 7]


def on_ranks(*works: Callable[[], Any]) -> list[Any]:
    """What each did in a process of its own, all of one gloo group whose collectives wait for 1 second only."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{s.getsockname()[1]}"

    def on_rank(rank: int, work: Callable[[], Any]) -> Any:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=len(works))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
        dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=1))
        try:
            return work()
        except Exception as e:
            return f"{type(e).__name__}: {e}"

    with ThreadPoolExecutor(len(works)) as threads:
        futures = [threads.submit(in_child, partial(on_rank, rank, work)) for rank, work in enumerate(works)]
        return [future.result() for future in futures]


def test_every_rank_waits_for_the_slow_one_however_long(make: Any, log: Path) -> None:
    slow = {f"item{n}": {"sleep": 0.8} for n in (1, 3, 5)}  # all of rank 1's share

    def work() -> Any:
        first = make(6, **slow).populate(0)
        return first, make(6, **slow).populate(2)

    start = time.monotonic()
    assert on_ranks(work, work) == [(Populated(0, 6), Populated(6, 0))] * 2
    assert time.monotonic() - start > 2, "longer than the collectives of the group would have waited"
    by = made(log)
    assert by[0] == by[2] == by[4] != by[1] == by[3] == by[5]


def test_what_fails_on_one_rank_is_raised_by_all(make: Any) -> None:
    said = on_ranks(*[lambda: make(6, item3={"fail": "broken"}).populate()] * 2)
    assert said[0] == said[1]
    assert said[0].startswith("PopulateError: 1 of 6 items failed")
    assert "3: {'n': 3, 'fail': 'broken'}" in said[0]


def test_a_rank_that_cannot_go_on_stops_all(make: Any, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 200 << 10) as small:
        said = on_ranks(lambda: make(cache=tmp_path / "own").populate(), lambda: make(100, cache=small).populate())
    assert said[0].startswith(
        "PopulateError: not every rank has filled its share of the cache: rank 1 ended with NotSav"
    )
    assert said[1].startswith("NotSaved: nothing more can be cached")


def test_what_could_not_be_saved_on_one_rank_is_not_waited_for(make: Any) -> None:
    def broken() -> Any:
        process_writer()._error = RuntimeError("an earlier item")  # as an item that breaks the writer leaves it
        return make().populate()

    start = time.monotonic()
    said = on_ranks(lambda: make().populate(), broken)
    assert said[0].startswith("PopulateError: not every rank has filled its share of the cache: rank 1 ended with Runt")
    assert said[1] == "RuntimeError: an earlier item"
    assert time.monotonic() - start < 60


def test_a_rank_that_was_killed_is_not_waited_for(make: Any, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.touch()
    start = time.monotonic()
    with pytest.raises(EOFError):  # the second has no answer to give
        on_ranks(
            partial(_write_answer, tmp_path / "said", lambda: make().populate()),
            lambda: make(item3={"kill": str(trap)}).populate(0),
        )
    said = (tmp_path / "said").read_text()
    assert said.startswith("PopulateError: not every rank has filled its share of the cache: a rank was killed, or")
    assert time.monotonic() - start < 60
    assert make().populate().cached >= 4, "what the others finished is cached"


def _write_answer(path: Path, work: Callable[[], Any]) -> None:
    try:
        path.write_text(str(work()))
    except Exception as e:
        path.write_text(f"{type(e).__name__}: {e}")


# ---------------------------------------------------------------------------------------------------------------------
# The command

MODULE = """
from pathlib import Path
import monai.transforms as mt
from monai_gds import GDSDataset
from tests.dataset.test_populate import Make
def good(fail=()):
    data = [{"n": n, "fail": n in fail and "broken"} for n in range(5)]
    return GDSDataset(data, mt.Compose([Make(Path("log"))]), "cache", device="cpu")
def bad():
    return good(fail=(3,))
def slow():
    dataset = good()
    dataset.set_data([{"n": n, "sleep": 0.1} for n in range(200)])
    return dataset
def wrong():
    return 7
def needs(folder):
    return good()
"""


def warm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return fresh.warm().run("-m", "monai_gds", "cache", "warm", *arguments, cwd=folder)


def test_cache_warm(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "training.py").write_text(MODULE)
    done = warm(tmp_path, "training:good", "--num-workers", "2")
    assert (done.returncode, done.stdout) == (0, "5 items computed, 0 were cached already\n"), done.stderr
    assert len(processes(log)) <= 2
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "training", raising=False)
    again = run("cache", "warm", "training:good", "--num-workers", "2")
    assert (again.exit_code, again.stdout) == (0, "0 items computed, 5 were cached already\n"), again.stderr
    failed = run("cache", "warm", "training:bad")
    assert failed.exit_code == 1
    assert failed.stderr.startswith("monai-gds: 1 of 5 items failed, the others are cached:\n  3: {'n': 3, ")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_cache_warm_stopped_by_ctrl_c_says_how_far_it_came(tmp_path: Path, log: Path, workers: str) -> None:
    (tmp_path / "training.py").write_text(MODULE)
    command = ("-m", "monai_gds", "cache", "warm", "training:slow", "--num-workers", workers)
    running = fresh.warm().program(*command, cwd=tmp_path)
    until(lambda: len(list(log.iterdir())) >= 3)
    running.send_signal(signal.SIGINT)
    done = running.result()
    held = len(list((tmp_path / "cache").glob("*.safetensors")))
    assert 0 < held < 200
    assert done.returncode == 130
    cache = tmp_path / "cache"
    assert done.stderr == f"monai-gds: stopped: {cache} holds {held} records now, start it again to go on\n"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("training", "not have the form module:function"),
        ("training:", "not have the form module:function"),
        ("trainin:good", "no module 'trainin'"),
        ("training:goood", "has no function 'goood'"),
        ("training:needs", "missing a required argument: 'folder'"),
        ("training:wrong", "returned a value of type int, not a GDSDataset"),
    ],
)
def test_cache_warm_used_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, message: str) -> None:
    (tmp_path / "training.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "training", raising=False)
    done = run("cache", "warm", function)
    assert done.exit_code == 2
    assert message in done.output


def test_cache_warm_hands_arguments_to_the_function_and_takes_a_share(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "training.py").write_text(
        f"{MODULE}def folds(fold, name='mr', scale=1.0):\n"
        "    assert (fold, name, scale) == (3, 'ct', 0.5), (fold, name, scale)\n    return good()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "training", raising=False)
    given = ("training:folds", "fold=3", "name=ct", "scale=0.5")
    done = run("cache", "warm", *given, "--rank", "1", "--world-size", "2")
    assert (done.exit_code, done.stdout) == (0, "2 items computed, 0 were cached already\n"), done.output
    done = run("cache", "warm", *given)
    assert (done.exit_code, done.stdout) == (0, "3 items computed, 2 were cached already\n"), done.output
    assert "item 1" in run("cache", "explain", *given, "1").stdout
    for arguments, message in (
        (["fold=3", "rate"], "'rate' does not have the form key=value"),
        (["fold=3", "rate=1"], "unexpected keyword argument 'rate'; give its arguments as key=value"),
        (["fold=3", "--rank", "1"], "--rank and --world-size go together"),
        (["fold=3", "--rank", "2", "--world-size", "2"], "--rank: 2: with --world-size 2 the last one is 1"),
    ):
        done = run("cache", "warm", "training:folds", *arguments)
        assert done.exit_code == 2
        assert message in " ".join(done.output.replace("│", " ").split())
