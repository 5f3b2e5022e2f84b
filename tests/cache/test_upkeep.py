"""What the commands `monai-gds cache ls`, `verify` and `prune` say of a cache directory, delete, and must not."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from monai.data import PersistentDataset
from monai.transforms import Compose, EnsureTyped, ScaleIntensityd

from monai_gds.cache.key import Key
from monai_gds.cache.upkeep import Found, check, pipeline_of, survey
from monai_gds.dataset import GDSDataset
from tests.commands import Done, on_a_terminal, run
from tests.machines import in_child, shared_folder

EARLIER = Compose([EnsureTyped("image")])
LATER = Compose([EnsureTyped("image"), ScaleIntensityd("image")])


def fill(folder: Path, transform: Any = EARLIER, items: int = 1, **more: Any) -> None:
    """Caches items that differ."""
    data = [{"image": torch.full((1, 64, 64), float(i)), **more} for i in range(items)]
    with GDSDataset(data, transform, folder, "cpu") as dataset:
        _ = [dataset[i] for i in range(items)]


def records(folder: Path) -> set[Path]:
    return set(folder.glob("*.safetensors"))


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The one record of a cache directory."""
    fill(tmp_path)
    (record,) = records(tmp_path)
    return record


def flip_last_tensor(record: Path) -> None:
    """Damages the data, which the header's checksum does not cover."""
    found = check(record)
    assert found is not None
    with record.open("r+b") as file:
        file.seek(max(e.offset for e in found.tensors.values()))
        file.write(b"\xff")


# ---------------------------------------------------------------------------------------------------------------------
# prune


@pytest.mark.parametrize("damage", [b"", b"no header at all", b"\x08" + bytes(7) + b'{"a":0} '])
def test_a_damaged_record_is_deleted(record: Path, damage: bytes) -> None:
    record.write_bytes(damage)
    done = run("cache", "prune", record.parent)
    assert done.exit_code == 0
    assert "1 files" in done.stdout
    assert not record.exists()


def test_files_of_others_are_left_alone(record: Path) -> None:
    """A training's folder by mistake: its checkpoints, weights and MONAI's own cache stay, and a renamed record."""
    folder = record.parent
    torch.save({"epoch": 1}, folder / "checkpoint.pt")
    safetensors.torch.save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
    _ = PersistentDataset([{"image": torch.ones(1, 8, 8, 8)}], Compose([EnsureTyped("image")]), folder)[0]
    (folder / "kept.safetensors").write_bytes(record.read_bytes())
    before = {path.name for path in folder.iterdir() if path.is_file()}
    assert len(before) == 5
    done = run("cache", "prune", "--damaged", folder)
    assert done.exit_code == 0
    assert "0 files" in done.stdout
    assert {path.name for path in folder.iterdir() if path.is_file()} == before


@pytest.fixture
def projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two folders with files of one name and other contents, cached by relative path into one cache directory."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for i, folder in enumerate(folders):
        folder.mkdir()
        np.save(folder / "ct.npy", np.full(8 + i, i))
        monkeypatch.chdir(folder)
        fill(tmp_path / "cache", source="ct.npy")
    monkeypatch.chdir(tmp_path)
    return folders


@pytest.mark.parametrize("where", ["a", "b", "."])
def test_records_of_relative_sources_are_judged_by_the_folder_that_they_were_made_in(
    projects: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    live = records(tmp_path / "cache")
    assert len(live) == 2
    monkeypatch.chdir(where)
    done = run("cache", "prune", "--missing-sources", tmp_path / "cache")
    assert "0 files" in done.stdout
    assert records(tmp_path / "cache") == live
    os.utime(projects[0] / "ct.npy", ns=(0, 0))  # of one of them, the source really changes
    assert f"{projects[0]}/ct.npy has changed" in run("cache", "prune", tmp_path / "cache").stdout
    assert len(records(tmp_path / "cache")) == 1


def test_records_that_name_relative_sources_are_kept_and_counted(
    projects: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an earlier version wrote them."""

    def as_before(self: Key) -> dict[str, Any]:
        return {"item": "i", "transform": "t", "monai": "1", "sources": {"ct.npy": [1, 2]}}

    monkeypatch.setattr(Key, "ingredients", as_before)
    for folder in projects:
        monkeypatch.chdir(folder)
        fill(tmp_path / "old", source="ct.npy")
    live = records(tmp_path / "old")
    assert len(live) == 2
    done = run("cache", "prune", "--missing-sources", tmp_path / "old")
    assert done.stdout.count("relative") == 1
    assert "2 records name sources by relative paths" in done.stdout
    assert "0 files" in done.stdout
    assert records(tmp_path / "old") == live


def test_a_pipeline_that_was_given_up_goes_when_it_is_named(tmp_path: Path) -> None:
    fill(tmp_path, EARLIER, 2)
    earlier = records(tmp_path)
    fill(tmp_path, LATER, 3)
    later = records(tmp_path) - earlier
    assert "0 files" in run("cache", "prune", tmp_path).stdout
    listed = run("cache", "ls", tmp_path).stdout
    (digits,) = re.findall(
        r"^pipeline (\w{8}): 2 records, 0\.\d MB, the latest made [-\d]+ [:\d]+$", listed, re.MULTILINE
    )

    done = run("cache", "prune", "--pipeline", digits.upper(), "--dry-run", tmp_path)
    assert "2 files" in done.stdout
    assert all(str(path) in done.stdout for path in earlier)
    assert records(tmp_path) == earlier | later
    assert run("cache", "prune", "--pipeline", digits[:4], tmp_path).exit_code == 0
    assert records(tmp_path) == later


@pytest.mark.parametrize(("digits", "why"), [("abc", "4 or more"), ("", "4 or more"), ("graf", "4 or more")])
def test_what_names_no_pipeline_is_wrong_usage(record: Path, digits: str, why: str) -> None:
    done = run("cache", "prune", f"--pipeline={digits}", record.parent)
    assert done.exit_code == 2
    assert why in done.output
    assert record.exists()


def test_a_pipeline_that_is_not_there_is_wrong_usage_and_those_that_are_are_named(record: Path) -> None:
    (found,) = survey(record.parent)
    other = f"{int(found.pipeline[:8], 16) ^ 1:08x}"
    done = run("cache", "prune", "--pipeline", other, record.parent)
    assert done.exit_code == 2
    assert other in done.output
    assert found.pipeline[:8] in done.output
    assert record.exists()


def test_digits_of_several_pipelines_name_none(tmp_path: Path) -> None:
    several = [Found(tmp_path, 0, key={"transform": str(i)}) for i in range(2000)]
    prefixes = [found.pipeline[:4] for found in several]
    twice = next(prefix for prefix in prefixes if prefixes.count(prefix) > 1)
    with pytest.raises(ValueError, match=f"'{twice}' is the beginning of several pipelines: {twice}.*, {twice}"):
        pipeline_of(several, twice)


def test_records_whose_transforms_are_no_part_of_the_key_have_no_pipeline(tmp_path: Path) -> None:
    with GDSDataset([{"image": torch.ones(1)}], EARLIER, tmp_path, "cpu", hash_transform=None) as dataset:
        _ = dataset[0]
    assert "pipeline -: 1 records" in run("cache", "ls", tmp_path).stdout
    done = run("cache", "prune", "--pipeline", "abcd", tmp_path)
    assert done.exit_code == 2
    assert "name none" in done.output


# ---------------------------------------------------------------------------------------------------------------------
# verify


def test_damage_is_counted_and_prune_damaged_deletes_it(tmp_path: Path) -> None:
    fill(tmp_path, items=3)
    victim = min(records(tmp_path))
    flip_last_tensor(victim)
    (tmp_path / "notes.txt").write_text("mine")
    safetensors.torch.save_file({"weight": torch.ones(4)}, tmp_path / "model.safetensors")

    done = run("cache", "verify", tmp_path)
    assert done.exit_code == 1
    assert f"{victim}: the bytes of 'image' do not match" in done.stdout
    assert "3 records, 1 damaged; 2 other files\n" in done.stdout
    assert "model.safetensors:" not in done.stdout
    assert "computed again when" in done.stdout
    assert f"monai-gds cache prune --damaged {tmp_path}" in done.stdout

    assert "0 files" in run("cache", "prune", tmp_path).stdout  # it reads headers only
    assert "1 files" in run("cache", "prune", "--damaged", "--dry-run", tmp_path).stdout
    assert victim.exists()
    assert "1 files" in run("cache", "prune", "--damaged", tmp_path).stdout
    assert not victim.exists()
    done = run("cache", "verify", tmp_path)
    assert (done.exit_code, done.stdout) == (0, "2 records, 0 damaged; 2 other files\n")


def test_a_record_of_a_newer_version_is_not_damage_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monai_gds.cache.record.VERSION", 2)
    fill(tmp_path)
    monkeypatch.undo()
    (record,) = records(tmp_path)
    done = run("cache", "verify", record.parent)
    assert done.exit_code == 1
    assert "1 records, 0 damaged, 1 that cannot be checked\n" in done.stdout
    assert "prune" not in done.stdout
    assert "0 files" in run("cache", "prune", "--damaged", record.parent).stdout
    assert record.exists()


def test_records_that_one_may_not_read_are_no_damage_and_stay() -> None:
    """In a group's folder, another user's records."""
    with shared_folder() as folder:
        fill(folder)
        (record,) = records(folder)
        record.chmod(0o600)
        verified, pruned = in_child(
            lambda: [run("cache", *command, folder).stdout for command in (["verify"], ["prune", "--damaged"])],
            nobody=True,
        )
        assert "1 records, 0 damaged, 1 that cannot be checked" in verified
        assert "0 files" in pruned
        assert record.exists()


def test_a_record_deleted_while_it_is_looked_at_is_no_damage(record: Path) -> None:
    record.unlink()
    assert check(record) is None


# ---------------------------------------------------------------------------------------------------------------------
# ls


def listing(done: Done) -> list[list[str]]:
    """Its lines of records, by columns."""
    return [line.split(maxsplit=5) for line in done.stdout.splitlines() if ".safetensors " in line]


def test_lists_the_pipeline_and_the_time_of_each_record(tmp_path: Path) -> None:
    fill(tmp_path, EARLIER, 2)
    earlier = records(tmp_path)
    fill(tmp_path, LATER, 1)
    for path in records(tmp_path):
        os.utime(path, (0, 1_000_000_000 + 60 * (path in earlier)))
    (tmp_path / "notes.txt").write_text("mine")
    done = run("cache", "ls", tmp_path)
    rows = listing(done)
    assert {row[0] for row in rows} == {path.name for path in records(tmp_path)}
    made = {row[1]: f"{row[2]} {row[3]}" for row in rows}
    assert len(made) == 2  # two pipelines, one minute apart
    assert len(set(made.values())) == 2
    assert all(re.fullmatch(r"2001-09-0\d \d\d:\d\d", time) for time in made.values())
    last = done.stdout.splitlines()[-3:]
    assert sorted(line.split(":")[1].split(",")[0] for line in last[:2]) == [" 1 records", " 2 records"]
    assert last[2].startswith("3 records of 0.1 MB, 0 damaged; 1 other files")


def test_a_damaged_record_is_listed_as_such(record: Path) -> None:
    record.write_bytes(b"no header at all")
    done = run("cache", "ls", record.parent)
    assert listing(done)[0][5] == "it is not a record of monai_gds"
    assert "1 records of 0.0 MB, 1 damaged" in done.stdout


def test_names_are_whole_on_a_narrow_terminal(record: Path) -> None:
    shown = on_a_terminal([sys.executable, "-m", "monai_gds", "cache", "ls", str(record.parent)], columns=80)
    assert record.name in shown
