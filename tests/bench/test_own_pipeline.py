"""``monai-gds profile`` and ``bench dataset --function``: a user's function, and what is printed about it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from monai_gds.bench import own_pipeline
from monai_gds.bench.comparison import META, OURS, OURS_LOADER, REFERENCE
from monai_gds.bench.report import Report, Row
from tests.commands import run

MODULE = '''
import monai.transforms as mt
import numpy as np
from monai_gds import GDSDataset


class RandOwn(mt.RandomizableTransform):
    """Draws from NumPy's own state, as users' transforms do."""

    def __call__(self, item):
        return {**item, "image": item["image"] + np.random.rand()}


def make(count=3, cached=True):
    items = [{"image": np.full((1, 8, 8, 8), n, np.float32), "name": f"scan {n}"} for n in range(count)]
    steps = [mt.EnsureTyped("image"), mt.RandFlipd("image", prob=0.5), RandOwn()]
    return GDSDataset(items, mt.Compose(steps), "cache" if cached else None, device="cpu")


def of_files():
    return GDSDataset([{"image": "/no/such/ct.nii.gz"}], mt.Compose([mt.LoadImaged("image")]), "cache", device="cpu")
'''


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive reads fewer bytes than it needs for good figures."""
    monkeypatch.setattr("monai_gds.doctor.probes._MEASURED_BYTES", 8 << 20)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_training.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_training", raising=False)
    return "own_training:make"


def test_epochs_in_words(module: str) -> None:
    done = run("profile", module, "count=4", "--batch-size", "2")
    assert done.exit_code == 0, done.output
    first, second, third, limits = done.stdout.strip().split("\n\n")
    assert first.startswith("epoch 1: ") and "2 batches, 0 hits and 4 computed items" in first
    assert second.startswith("epoch 2: ") and "4 hits and 0 computed items (100% hits)" in second
    assert third.startswith("epoch 3: ") and "4 hits and 0 computed items (100% hits)" in third
    assert "  RandOwn" in second and "  EnsureTyped" in first and "  EnsureTyped" not in second
    assert limits.startswith("This machine: 8 MiB: written") and "from the page cache by posix" in limits
    assert [path.suffix for path in Path("cache").iterdir() if path.is_file()] == [".safetensors"] * 4


def test_epochs_as_json(module: str) -> None:
    done = run("profile", module, "--json", "--epochs", "1")
    found = json.loads(done.stdout)
    assert found["epochs"][0]["computed"] == 3 and found["epochs"][0]["stages"]["random transforms"] > 0
    assert found["limits"]["backend"] == "posix" and found["limits"]["warm"] > 0


def test_random_transforms_in_workers(module: str) -> None:
    done = run("profile", module, "--json", "--num-workers", "1")
    (*_, epoch) = json.loads(done.stdout)["epochs"]
    assert epoch["stages"]["waiting for workers"] > 0 and epoch["random_transforms"]["RandOwn"] > 0
    assert "replay" not in epoch["random_transforms"]


def test_programs_of_random_transforms(module: str) -> None:
    done = run("profile", module, "--json", "--num-workers", "1", "--programs", "check", "--epochs", "1")
    (epoch,) = json.loads(done.stdout)["epochs"]
    assert epoch["random_transforms"]["replay"] > 0


def test_without_a_cache_there_is_no_drive_to_measure(module: str) -> None:
    done = run("profile", module, "cached=False")
    assert done.exit_code == 0, done.output
    assert "This machine: not measured: there is no cache_dir" in done.output


def test_the_own_pipeline_beside_monais_datasets(module: str) -> None:
    done = run("bench", "dataset", "--function", module, "--items", "2", "--repeats", "2", "--json")
    assert done.exit_code == 0, done.output
    (report,) = json.loads(done.stdout)["reports"]
    assert report["title"].startswith("the first 2 items of 3 to cpu, batch 1")
    assert [row["name"] for row in report["rows"]] == [OURS, OURS_LOADER, REFERENCE, META, "CacheDataset"]
    assert all(len(row["samples"]) == 2 for row in report["rows"])
    told = [row["notes"].get("read by", "") for row in report["rows"]]
    assert ["GB mapped" in words or "GB read into host memory" in words for words in told] == [True, True, *[False] * 3]
    assert not list(Path("cache").glob("*.safetensors"))


def test_a_file_that_is_not_there_is_named_in_one_line(module: str) -> None:
    done = run("bench", "dataset", "--function", "own_training:of_files")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("monai-gds: /no/such/ct.nii.gz: LoadImaged cannot load it")
    assert "Traceback" not in done.stderr


def test_a_busy_machine_is_told(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0.0, 0.0))
    done = run("bench", "dataset", "--function", module, "--items", "1", "--repeats", "1", "--json")
    assert "This machine is busy (load 99.0 on " in done.stderr
    assert json.loads(done.stdout)["reports"]


def test_a_ratio_that_may_be_noise_is_told(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {REFERENCE: (1.0, 1.1, 1.0), OURS: (1.2, 1.0, 1.3), OURS_LOADER: (2.0, 2.2, 2.1), "CacheDataset": ()}

    def compare(*_: Any) -> Report:
        return Report("", "items/s", [Row(name, samples) for name, samples in measured.items()], REFERENCE)

    monkeypatch.setattr(own_pipeline, "compare", compare)
    done = run("bench", "dataset", "--function", module, "--json")
    rows = json.loads(done.stdout)["reports"][0]["rows"]
    assert [row["name"] for row in rows if row["notes"] == {"difference": "not told apart"}] == [OURS]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["count=3"], "Missing option '--function'"),
        (["--function", "own_training:nothing"], "has no function 'nothing'"),
    ],
)
def test_wrong_usage(module: str, arguments: list[str], said: str) -> None:
    done = run("bench", "dataset", *arguments)
    assert done.exit_code == 2 and said in done.output
