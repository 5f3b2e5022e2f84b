"""bench dataset: every workload runs, what it says is so, and a peer that gives other bytes is found out."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.data import Dataset
from monai.transforms import Compose, Lambda

from monai_gds import BackendUnavailable, MonaiGdsError, StorageError
from monai_gds.bench import first, memory, race
from monai_gds.bench.ceilings import Ceilings
from monai_gds.bench.dataset import Burn, MakeVolumes, Settings
from monai_gds.bench.pagecache import cached, drop
from monai_gds.bench.peers import NO_CACHE, OURS, OURS_DIRECT, OURS_LOADER, PEERS, REFERENCE, Peer, Place, peers_for
from monai_gds.bench.race import Contest, checksums, enter
from tests.commands import run
from tests.machines import mounted_tmpfs

SMALL = ["--device", "cpu", "--items", "3", "--side", "24", "--records", "300", "--repeats", "2"]


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monai_gds.bench.ceilings._LEAST_BYTES", 16 << 20)
    monkeypatch.setattr("monai_gds.bench.ceilings._ROOM", 8 << 20)


def bench(*arguments: Any) -> list[dict[str, Any]]:
    done = run("bench", "dataset", *SMALL, "--json", *arguments)
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["reports"]
    return found


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["rows"]}


def ceilings(report: dict[str, Any]) -> list[str]:
    return [row["name"] for row in report["ceilings"] if row["samples"]]


def test_epochs_with_our_loader_beside_the_peers_and_the_ceilings(tmp_path: Path) -> None:
    plot = tmp_path / "epochs.png"
    volumes, crops = bench(
        "--only", "volumes", "--only", "crops", "--loader", "--batch-size", "2", "--plot", plot, "--cache-dir", tmp_path
    )
    for report in (volumes, crops):
        assert list(rows(report)) == peers_for(torch.device("cpu"), loader=True)
        assert report["reference"] == REFERENCE
        assert report["unit"] == "GB/s"
        for row in report["rows"]:
            assert row["reason"] or len(row["samples"]) == 2
        for row in report["ceilings"]:
            assert len(row["samples"]) == 2
            assert row["median"] > 0
    assert OURS_LOADER in rows(volumes)
    assert "batch 2, page cache warm" in volumes["title"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == [plot.name], "nothing is left behind"


def test_without_the_loader_there_is_no_row_for_it() -> None:
    (report,) = bench("--only", "volumes", "--repeats", "1")
    assert OURS in rows(report)
    assert OURS_LOADER not in rows(report)


def test_hits() -> None:
    for report in bench("--only", "hits", "--repeats", "1"):
        assert report["unit"] == "items/s"
        assert float(rows(report)[OURS]["notes"]["µs an item"]) > 0
        assert report["ceilings"] == []


def test_small_records_keep_their_metadata_on_both_sides() -> None:
    plain, nifti = bench("--only", "small", "--loader", "--repeats", "1")
    assert plain["reference"] == REFERENCE
    assert nifti["reference"] == "PersistentDataset + meta"
    for report in (plain, nifti):
        assert {OURS, OURS_LOADER, report["reference"]} <= set(rows(report))
        assert "300 records" in report["title"]
        assert "batch 256" in report["title"]


def test_cold_says_what_was_cold(tmp_path: Path) -> None:
    (report,) = bench("--only", "volumes", "--cold", "--loader", "--cache-dir", tmp_path)
    before = {name: row["notes"]["page cache before"] for name, row in rows(report).items() if row["samples"]}
    assert before[OURS] == before[OURS_DIRECT] == before[REFERENCE] == "cold"
    assert before["CacheDataset"] == "has no files"
    assert "page cache dropped" in report["title"]


def test_past_the_page_cache_only_where_that_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def refuse(path: str, flags: int, *mode: int, **at: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really(path, flags, *mode, **at)

    with monkeypatch.context() as patch, pytest.raises(BackendUnavailable, match="takes no O_DIRECT: Invalid arg"):
        patch.setattr("monai_gds.bench.peers.os.open", refuse)  # through which the file is made, too
        PEERS[OURS_DIRECT].make([], Compose([]), Place(tmp_path, torch.device("cpu"), 0))
    assert list(tmp_path.iterdir()) == []


def test_cold_says_when_dropping_did_not_work(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "memory", 256 << 20) as folder:
        (report,) = bench("--only", "volumes", "--cold", "--cache-dir", folder, "--repeats", "1")
        before = {name: row["notes"]["page cache before"] for name, row in rows(report).items() if row["samples"]}
        assert before[OURS] == before[REFERENCE] == "warm"
        disks = [row for row in report["ceilings"] if row["name"].startswith("disk")]
        assert len(disks) == 2
        assert all("there is no disk to read" in row["reason"] for row in disks)
        assert len(ceilings(report)) == 2


def test_dropping_takes_just_these_files(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    for path in files:
        path.write_bytes(bytes(1 << 20))
    assert drop(files[:1]) == 0
    assert cached(files[0]) == 0
    assert cached(files[1]) == 1
    assert drop([]) == 0


def test_the_first_epoch_beside_one_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "_PREPROCESSING", 0.01)
    monkeypatch.setattr(first, "_LARGE", 1_000_000)
    medium, large = bench("--only", "first", "--loader", "--repeats", "1", "--cache-dir", tmp_path)
    for report in (medium, large):
        assert list(rows(report))[:4] == [NO_CACHE, OURS, OURS_LOADER, REFERENCE]
        assert report["reference"] == NO_CACHE
        notes = rows(report)[OURS]["notes"]
        assert notes["epoch"].endswith("of no cache's")
        assert notes["flush after it"].endswith(" s")
        assert notes["saving adds"].endswith(" s")
        assert rows(report)[REFERENCE]["notes"]["flush after it"] == "0.00 s", "it saves in its epoch"
    assert list(tmp_path.iterdir()) == []


def test_what_is_still_to_be_saved_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from monai_gds.cache.directory import CacheDirectory

    save = CacheDirectory.save

    def slow(*arguments: Any) -> None:
        time.sleep(0.1)
        save(*arguments)

    monkeypatch.setattr(CacheDirectory, "save", slow)
    monkeypatch.setattr(first, "_LARGE", 1_000_000)
    report = first.large_items(Settings(tmp_path, torch.device("cpu"), repeats=1))
    ours = next(row for row in report.rows if row.name == OURS)
    assert 6 / ours.samples[0] > 0.6, "six items were saved, one after the other"
    assert float(ours.notes["saving adds"].split()[0]) > 0.4


def test_filling_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "_PREPROCESSING", 0.01)
    (report,) = bench("--only", "populate", "--repeats", "1")
    assert {"in this process", "1 worker", "2 workers"} <= set(rows(report))
    assert report["reference"] == "1 worker"


def test_burning_takes_processor_time() -> None:
    start = time.thread_time()
    assert Burn(0.05)("item") == "item"
    assert 0.05 <= time.thread_time() - start < 0.5


def test_memory_by_epoch_beside_the_promise(tmp_path: Path) -> None:
    settings = Settings(tmp_path, torch.device("cpu"), items=3, side=32)
    (report,) = memory.memory(settings, epochs=3)
    assert [row.name for row in report.rows] == ["epoch 1", "epoch 2", "epoch 3"]
    assert report.unit == "MB"
    (promise,) = report.ceilings
    record = next(tmp_path.rglob("*.safetensors")).stat().st_size
    assert promise.samples == ((4 * record + (64 << 20)) / 1e6,)
    assert all(max(row.samples) < promise.samples[0] for row in report.rows)


def test_memory_that_grows_is_seen(tmp_path: Path) -> None:
    run_ = memory._Run(str(tmp_path), "cpu", 2, 16, 1, 3)
    memory._dataset(run_, "cpu").populate(progress=False)
    kept = []

    class Loader(memory.GDSDataLoader):
        def __iter__(self) -> Any:
            kept.append(torch.ones(200 << 20, dtype=torch.uint8))
            return super().__iter__()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "GDSDataLoader", Loader)
        found = memory._measure(run_)
    peaks = [max(values) for values in found["host"]]
    assert peaks[0] > 100 << 20  # less what earlier tests left, which may go meanwhile
    assert peaks[2] - peaks[1] > 100 << 20


def test_a_failing_process_is_not_taken_for_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "asdict", lambda run: {"no": "run"})
    with pytest.raises(MonaiGdsError, match=r"ended with 1:\n(.*\n)*.*unexpected keyword argument 'no'"):
        memory.memory(Settings(tmp_path, torch.device("cpu"), items=1, side=8), epochs=1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda item: {"image": item["image"] + 1}, "gave other bytes in batch 0"),
        (lambda item: {"image": item["image"].flip(0)}, "gave other bytes in batch 0"),
    ],
)
def test_a_peer_that_gives_other_bytes_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str
) -> None:
    def make(items: Any, transform: Any, place: Any) -> Dataset:
        return Dataset(items, Compose([*transform.transforms, Lambda(spoil)]))

    monkeypatch.setitem(PEERS, REFERENCE, Peer(make))
    with pytest.raises(StorageError, match=f"{REFERENCE} {message}"):
        race.race(contest(tmp_path))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_peer_that_gives_another_number_of_batches_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    def make(items: Any, transform: Any, place: Any) -> Dataset:
        return Dataset(([*items, *items])[: len(items) + change], transform)

    monkeypatch.setitem(PEERS, REFERENCE, Peer(make))
    with pytest.raises(StorageError, match=f"{REFERENCE} gave {4 + change} batches instead of 4"):
        race.race(contest(tmp_path))


def contest(folder: Path, **changes: Any) -> Contest:
    settings: dict[str, Any] = {
        "title": "t", "items": [{"image": n} for n in range(4)], "transform": Compose([MakeVolumes((3, 5))]),
        "keys": ["image"], "nbytes": 240, "device": torch.device("cpu"), "folder": folder, "names": [OURS, REFERENCE],
        "repeats": 1, **changes,
    }  # fmt: skip
    return Contest(**settings)


def test_a_peer_that_cannot_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, REFERENCE, Peer(PEERS[REFERENCE].make, missing=lambda: "needs a miracle"))
    report = race.race(contest(tmp_path))
    assert [row.reason for row in report.rows] == ["", "needs a miracle"]


@pytest.mark.parametrize("name", peers_for(torch.device("cpu"), loader=True))
def test_random_crops_are_compared_too(tmp_path: Path, name: str) -> None:
    from monai.transforms import RandSpatialCropd

    crop = Compose([MakeVolumes((1, 9, 9, 9)), RandSpatialCropd("image", (4, 4, 4), random_size=False)])
    work = contest(tmp_path, transform=crop, batch_size=2)
    expected = checksums(enter(work, NO_CACHE), work)
    try:
        racer = enter(work, name)
    except BackendUnavailable as e:
        pytest.skip(str(e))
    for _ in range(2):
        assert checksums(racer, work) == expected


def test_ceilings_in_the_unit_of_the_report(tmp_path: Path) -> None:
    with Ceilings(tmp_path, torch.device("cpu"), 1, scale=1000) as thousand:
        thousand.sample()
        thousand.sample()
    by_name = {row.name: row for row in thousand.rows()}
    assert len(by_name) == 4
    assert all(len(row.samples) == 2 for row in by_name.values())
    assert all(min(row.samples) > 5 for row in by_name.values()), "no disk reads 5 MB/s"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "volume"], "'volume' is not one of"), (["--batch-size", "0"], "--batch-size")],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    done = run("bench", "dataset", *arguments)
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.gpu
def test_on_a_gpu_every_peer_and_ceiling_is_measured(tmp_path: Path) -> None:
    done = run("bench", "dataset", *SMALL[2:], "--json", "--loader", "--only", "volumes", "--cache-dir", tmp_path)
    assert done.exit_code == 0, done.output
    (report,) = json.loads(done.stdout)["reports"]
    assert {"monai GDSDataset", "monai GDSDataset, 16 thr."} <= set(rows(report))
    assert "pinned copy to the GPU" in ceilings(report)


@pytest.mark.gpu
def test_memory_of_the_device(tmp_path: Path) -> None:
    host, device = memory.memory(Settings(tmp_path, torch.device("cuda", 0), items=6, side=64), epochs=3)
    for report in (host, device):
        assert len(report.rows) == 3
        assert all(max(row.samples) < report.ceilings[0].samples[0] for row in report.rows)
