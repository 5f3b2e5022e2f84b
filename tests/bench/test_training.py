"""bench training: every peer feeds the same training or says why not; epochs are measured against the ceiling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from monai.transforms import RandAffined

from monai_gds.bench import feeds, training
from monai_gds.bench.feeds import CEILING, PEERS, Feed
from monai_gds.bench.made_up import write_volumes
from monai_gds.bench.segmentation import Network, Training
from monai_gds.bench.training import Epoch, Run, cpu_seconds, epoch
from monai_gds.errors import BackendUnavailable, StorageError
from tests.commands import run

CPU = torch.device("cpu")
IN_MEMORY = "CacheDataset, n workers"
MONAIS = "monai.data.GDSDataset, ThreadDataLoader"
INDICES = "PersistentDataset with cached indices, n workers"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that spin make these small steps a hundred times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Two steps of two volumes each."""
    shape = (40, 32, 32)
    return Training(write_volumes(tmp_path_factory.mktemp("volumes"), 5, shape), shape, CPU, workers=1)


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_after_ctrl_c_the_complete_turns_are_reported(
    tiny: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """In the middle of the turn after them."""
    left = 2 * (turns + 1) + 1
    measure = training.epoch

    def counted(*args: Any) -> Epoch:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        return measure(*args)

    monkeypatch.setattr(training, "epoch", counted)
    if not turns:
        with pytest.raises(KeyboardInterrupt):
            training.compare(tiny, tmp_path, [IN_MEMORY], 5)
        return
    report = training.compare(tiny, tmp_path, [IN_MEMORY], 5)
    assert [len(row.samples) for row in (*report.ceilings, *report.rows)] == [turns] * 2


@pytest.mark.parametrize("heavy", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", PEERS)
def test_every_peer_feeds_the_same_training(
    tiny: Training, tmp_path: Path, name: str, device: str, heavy: bool
) -> None:
    placed = replace(tiny, device=torch.device(device), heavy=heavy, numpy=heavy)
    try:
        feed = PEERS[name](placed, tmp_path)
    except BackendUnavailable as e:
        assert name == MONAIS and "needs" in str(e)
        pytest.skip(str(e))
    batches = [*feed.loader]
    feed.flush()
    if name == MONAIS and len(batches) < 2:
        return  # its misses come on the CPU and its hits on the device, and no batch is made of both
    assert [batch["image"].shape for batch in batches] == [(8, 1, 16, 16, 16)] * 2
    for batch in batches:
        assert (batch["label"].shape, batch["label"].dtype) == ((8, 1, 16, 16, 16), torch.float32)
        assert set(batch["label"].unique().tolist()) <= {0, 1, 2, 3}
        assert 0.2 < batch["image"].max() < 1.4, "intensities of 0 to 1, scaled and shifted by up to a tenth"
    if name != MONAIS:  # the next epoch may begin with the fifth volume, a miss beside a hit
        assert epoch(Network(placed.device), feed.loader, steps=2).whole > 0


@pytest.mark.parametrize(
    ("options", "shape", "title"),
    [
        ({}, (8, 1, 16, 16, 16), "5 volumes of 40 x 32 x 32, batches of 2: 4 crops of 16³ per volume"),
        ({"heavy": True}, (8, 1, 16, 16, 16), "crops of 16³ per volume, rotated and smoothed"),
        ({"whole": True}, (2, 1, 40, 32, 32), "5 volumes of 40 x 32 x 32, batches of 2: whole volumes"),
        ({"numpy": True}, (8, 1, 16, 16, 16), "crops of 16³ per volume, then NumPy"),
        ({"whole": True, "heavy": True, "numpy": True}, (2, 1, 40, 32, 32), "rotated and smoothed, then NumPy"),
    ],
)
@pytest.mark.parametrize("name", [CEILING, IN_MEMORY, "GDSDataLoader, 0 workers"])
def test_options_change_the_pipeline(
    tiny: Training, tmp_path: Path, name: str, options: dict[str, bool], shape: tuple[int, ...], title: str
) -> None:
    changed = replace(tiny, **options)
    feed = PEERS[name](changed, tmp_path)
    assert [batch["image"].shape for batch in feed.loader] == [shape] * 2
    assert all(batch["label"].shape == shape for batch in feed.loader)
    assert changed.what.endswith(title)
    feed.flush()


def test_the_transforms_that_options_add(tiny: Training) -> None:
    def names(**options: bool) -> set[str]:
        return {type(t).__name__ for t in replace(tiny, **options).random(CPU)}

    light = names()
    assert names(heavy=True) - light == {"RandAffined", "RandGaussianSmoothd"}
    assert names(numpy=True) - light == {"RandGamma"}
    assert light - names(whole=True) == {"RandCropByPosNegLabeld", "RandRotate90d"}


def test_only_worker_processes_are_kept_off_the_device(tiny: Training, tmp_path: Path) -> None:
    def device(name: str) -> Any:
        loader: Any = PEERS[name](replace(tiny, heavy=True), tmp_path).loader
        (affine,) = (t for t in loader.dataset.transform.transforms if isinstance(t, RandAffined))
        return affine.rand_affine.resampler.device

    assert {name: device(name) for name in PEERS if name not in (CEILING, MONAIS)} == {
        "PersistentDataset, n workers": None,
        INDICES: None,
        "CacheDataset, n workers": None,
        "MONAI's fast training": CPU,
        "MONAI's fast training under patch()": CPU,
        "GDSDataset, ThreadDataLoader": CPU,
        "GDSDataLoader, 0 workers": CPU,
        "GDSDataLoader, n workers": CPU,
        "GDSDataLoader, n workers, fast programs": CPU,
    }


def test_indices_are_for_crops(tiny: Training, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="no crops"):
        PEERS[INDICES](replace(tiny, whole=True), tmp_path)


def test_epochs_are_divided_by_the_ceilings_of_the_same_turn(tmp_path: Path) -> None:
    ceiling = Run(CEILING, tmp_path, epochs=[Epoch(1, 0, 0, 1), Epoch(2, 0, 0, 1)])
    row = Run("peer", tmp_path, filled=7, epochs=[Epoch(3, 0.5, 0.25, 2), Epoch(4, 0.5, 0.75, 2)]).row(ceiling)
    assert row.samples == (3, 2)
    assert row.figures["wait per step, ms"] == (250, 750)
    assert row.figures["first batch, ms"] == (500, 500)
    assert row.figures["first epoch, s"] == (7,)


def test_what_is_measured_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = 0.0, 0.0

    def after(seconds: float, processors: float = 0.0) -> None:
        nonlocal now, used
        now, used = now + seconds, used + seconds * processors

    class Steps:
        """In place of the network."""

        device = torch.device("cpu")

        def step(self, batch: object) -> None:
            after(10, processors=1)

    def batches() -> Iterator[dict[str, Any]]:
        for seconds in (7, 2, 4):
            after(seconds, processors=3)
            yield {}

    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(training, "cpu_seconds", lambda: used)
    monkeypatch.setattr(training, "synchronize", lambda device: after(3))
    network: Any = Steps()
    seconds = 7 + 10 + 2 + 10 + 4 + 10 + 3
    assert epoch(network, batches(), 3) == Epoch(seconds, first=7, wait=3, cores=(3 * 13 + 30) / seconds)


def test_peers_take_turns_after_everybodys_first_epoch(
    tiny: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, flushed = [], []

    class Loader(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            order.append(self.name)
            return super().__iter__()

    def peer(name: str, *_: object) -> Feed:
        loader = Loader(feeds.same_batch(tiny, tmp_path).loader)
        loader.name = name
        return Feed(loader, lambda: flushed.append((name, len(order))))

    monkeypatch.setattr(training, "PEERS", {name: partial(peer, name) for name in (CEILING, "a", "b")})
    training.compare(tiny, tmp_path, ["a", "b"], epochs=2)
    assert order == [CEILING, "a", "b"] * 3
    assert flushed[:3] == [(CEILING, 1), ("a", 2), ("b", 3)], "what is saved must not slow down the next peer"


def test_the_report_holds_ranges_and_reasons(tmp_path: Path) -> None:
    file, folder = tmp_path / "found.json", tmp_path / "new" / "folder"
    arguments = ["--cpu", "--volumes", 4, "--shape", 32, 32, 32, "--workers", 1, "--epochs", 2, "--cold"]
    only = ["--only", "cachedataset", "--only", "indices", "--only", "gdsdataset, t"]
    done = run("bench", "training", *arguments, *only, "--folder", folder, "--whole", "--json", file)
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    (report,) = found["reports"]
    rows = {row["name"]: row for row in (*report["rows"], *report["ceilings"])}
    assert list(rows) == [INDICES, IN_MEMORY, MONAIS, "GDSDataset, ThreadDataLoader", CEILING]
    assert rows[CEILING]["samples"] == [1, 1]
    for name in (IN_MEMORY, "GDSDataset, ThreadDataLoader", CEILING):
        for figure in (rows[name], *rows[name]["figures"].values()):
            assert 0 < figure["lowest"] <= figure["median"] <= figure["highest"]
        assert len(rows[name]["figures"]["cores"]["samples"]) == 2
    assert rows[INDICES]["reason"] == "there are no crops that indices would be for"
    assert rows[MONAIS]["reason"].startswith("needs ") and rows[MONAIS]["reason"] in done.stdout
    assert rows["GDSDataset, ThreadDataLoader"]["notes"]["page cache before"]
    assert rows[IN_MEMORY]["notes"] == {}, "it has no files"
    assert found["about"]["workers"] == 1 and "whole volumes" in done.stdout
    assert [path.name for path in folder.iterdir()] == ["32x32x32"], "the volumes stay, and the caches do not"


def test_a_peer_that_fails_keeps_its_row_with_the_reason(
    tiny: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fed(loader: Any, *_: object) -> Feed:
        return Feed(loader)

    good = feeds.same_batch(tiny, tmp_path)
    loaders: dict[str, Any] = {
        CEILING: good.loader,
        "short": [*good.loader][1:],
        "empty": [],
        "none": None,
        "good": [*good.loader],
    }
    monkeypatch.setattr(training, "PEERS", {name: partial(fed, loader) for name, loader in loaders.items()})
    report = training.compare(tiny, tmp_path, [*loaders], epochs=1)
    assert {row.name: (row.reason, len(row.samples)) for row in report.rows} == {
        "short": ("StorageError: 1 batches came instead of 2", 0),
        "empty": ("StorageError: 0 batches came instead of 2", 0),
        "none": ("TypeError: 'NoneType' object is not iterable", 0),
        "good": ("", 1),
    }
    monkeypatch.setattr(training, "PEERS", {CEILING: partial(fed, [])})
    (tmp_path / "new").mkdir()
    with pytest.raises(StorageError, match="0 batches"):
        training.compare(tiny, tmp_path / "new", [], epochs=1)


def test_processors_of_processes_that_run_and_of_those_that_ended_count() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    grandparent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    before = cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", grandparent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = cpu_seconds()
        child.communicate(b"\n")
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert running - before >= 0.2 - tick
    assert cpu_seconds() >= running - tick


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", 32, 32, 36], "a multiple of 8"),
        (["--shape", 24, 32, 32], "32 or more"),
        (["--only", "dali"], "'dali' is in none of: ceiling"),
        (["--volumes", 1], "volumes"),
    ],
)
def test_wrong_usage(arguments: list[object], message: str) -> None:
    done = run("bench", "training", "--cpu", *arguments)
    assert done.exit_code == 2 and message in done.output
