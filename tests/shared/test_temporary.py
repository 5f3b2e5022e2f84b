"""Temporary files: those of dead writers are removed, and nobody else's files, whatever their names and places."""

from __future__ import annotations

import os
import stat
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.transforms import Compose, EnsureTyped

from monai_gds.dataset.dataset import GDSDataset
from monai_gds.errors import CacheWarning, NotSaved
from monai_gds.folder import maintenance
from monai_gds.folder.directory import CacheDirectory, prepare
from monai_gds.items.tree import encode_item
from monai_gds.shared import owner
from monai_gds.shared.owner import this_process
from monai_gds.shared.temporary import abandoned, being_written, opened, tidy
from monai_gds.storage import open_storage
from tests.caches import key
from tests.commands import run
from tests.machines import in_child, mounted_tmpfs, read_only, shared_folder

DEAD = "999999999.5"  # a process id that Linux gives to nobody
HOURS = 7200


def here() -> str:
    return this_process().split(".")[0]


def leftover(number: int = 0, place: str = "") -> str:
    """The name of a file that a dead writer left."""
    return f"{'d' * 32}.{place or here()}.{DEAD}.{number}"


def aged(path: Path, seconds: float = HOURS) -> Path:
    os.utime(path, (time.time() - seconds, time.time() - seconds), follow_symlinks=False)
    return path


def put(path: Path, seconds: float = HOURS) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("mine")
    return aged(path, seconds)


def construct(folder: Path) -> None:
    GDSDataset([{"image": torch.ones(4)}], Compose([EnsureTyped("image")]), folder, "cpu").flush()


def populate(folder: Path) -> None:
    GDSDataset([{"image": torch.ones(4)}], Compose([EnsureTyped("image")]), folder, "cpu").populate()


def prune(folder: Path) -> None:
    done = run("cache", "prune", folder)
    assert done.exit_code == 0, done.output


EVERYWHERE = pytest.mark.parametrize("clean", [construct, populate, prune])


# ---------------------------------------------------------------------------------------------------------------------
# What goes, what stays


@pytest.mark.parametrize(
    ("name", "age", "stays"),
    [
        ("{digest}.{place}.{pid}.{started}.0", 0, True),
        ("{digest}.{place}.{pid}.{started}.0", 10**6, True),
        ("{digest}.{place}.{pid}.1.0", 0, False),  # the process id was given to another process
        ("{digest}.{place}.999999999.5.0", 0, False),
        ("{digest}.otherhost-123.{pid}.{started}.0", 10**6, True),  # no writer names a host
        ("{digest}.0a0b0c0d-123.{pid}.{started}.0", 0, True),
        ("{digest}.0a0b0c0d-123.{pid}.{started}.0", 3500, True),
        ("{digest}.0a0b0c0d-123.{pid}.{started}.0", 3700, False),
        ("{digest}.unknown.{pid}.None.0", 0, True),
        ("{digest}.unknown.{pid}.None.0", 10**6, False),
        ("rubbish", 10**6, True),
    ],
)
def test_temporaries_of_ended_writers_are_removed(tmp_path: Path, name: str, age: int, stays: bool) -> None:
    place, pid, started = this_process().split(".")
    path = put(tmp_path / ".tmp" / name.format(digest="d" * 32, place=place, pid=pid, started=started), age)
    listed = [path for path, _ in abandoned(tmp_path)]
    assert listed == ([] if stays else [str(path)])
    tidy(tmp_path)
    assert path.exists() == stays
    assert [p for p in path.parent.iterdir() if p != path] == [], "nothing is left of finding out"


@EVERYWHERE
def test_other_files_in_the_folder_stay(tmp_path: Path, clean: Callable[[Path], None]) -> None:
    thesis = put(tmp_path / ".tmp" / "thesis.docx")
    left = put(tmp_path / ".tmp" / leftover())
    clean(tmp_path)
    assert thesis.read_text() == "mine"
    assert not left.exists()


@EVERYWHERE
def test_names_that_nearly_have_the_form_of_a_temporary_are_left_alone(
    tmp_path: Path, clean: Callable[[Path], None]
) -> None:
    name = leftover()
    digest, place, pid, start, n = name.split(".")
    names = [
        name + ".bak", name + "~", name + "\n", "." + name, name.upper(), name[:-2], name[1:], f"e{name}", name + "a",
        f"{digest}.lease.{place}.{pid}.{start}", f"{digest}.{place}.{pid}.{start}.x",
        f"{digest}.{place}.{pid}.{start}.-1", f"{digest}.{place}.{pid}.{start}.\u0663",
        f"{digest}.{place}.x.{start}.{n}",
        f"{digest}.host-1.{pid}.{start}.{n}", f"{digest}..{pid}.{start}.{n}", f"{digest}.safetensors",
        f"{'g' * 32}.{place}.{pid}.{start}.{n}", f"{digest} {place}.{pid}.{start}.{n}",
    ]  # fmt: skip
    for path in (tmp_path / ".tmp" / name for name in names):
        put(path)
    aged(tmp_path / ".tmp")
    clean(tmp_path)
    assert sorted(os.listdir(tmp_path / ".tmp")) == sorted(names)


@EVERYWHERE
def test_files_that_are_not_regular_stay_and_raise_nothing(tmp_path: Path, clean: Callable[[Path], None]) -> None:
    folder = tmp_path / "cache" / ".tmp"
    left, mine = put(folder / leftover(0)), put(tmp_path / "mine.txt")
    (folder / leftover(1)).mkdir()
    put(folder / leftover(1) / "inside.txt")
    (folder / "a folder").mkdir()
    os.mkfifo(folder / leftover(2))
    (folder / leftover(3)).symlink_to(mine)
    (folder / leftover(4)).symlink_to(tmp_path)
    (folder / leftover(5)).symlink_to("nowhere")
    for path in folder.iterdir():
        aged(path)
    clean(tmp_path / "cache")
    assert sorted(os.listdir(folder)) == sorted(["a folder", *map(leftover, range(1, 6))])
    assert (folder / leftover(1) / "inside.txt").exists()
    assert mine.exists()
    assert not left.exists()


def test_the_temporary_of_a_process_that_cannot_be_seen_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /proc is mounted with hidepid: of another user's process there is only the answer of kill()."""

    def not_permitted(pid: int, signal: int) -> None:
        raise PermissionError

    path = put(tmp_path / ".tmp" / leftover(), 0)
    monkeypatch.setattr(os, "kill", not_permitted)
    monkeypatch.setattr(owner, "_started", lambda pid: None)
    prepare(tmp_path)
    assert path.exists()
    os.utime(path, (0, 0))
    prepare(tmp_path)
    assert not path.exists()


def test_where_processes_cannot_be_identified_a_writers_own_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_place", lambda: "unknown")
    monkeypatch.setattr(owner, "this_process", lambda: f"unknown.{os.getpid()}.None")
    with being_written(str(tmp_path), "d" * 32, str(tmp_path / "target")) as path:
        Path(path).write_text("half")
        tidy(tmp_path)
        assert os.path.exists(path)
    assert (tmp_path / "target").read_text() == "half"


def test_a_foreign_file_is_judged_by_the_clock_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host whose clock is a day ahead deletes nothing that another host is writing, and one behind is no worse."""
    young = put(tmp_path / ".tmp" / leftover(0, "0a0b0c0d-7"), 60)
    old = put(tmp_path / ".tmp" / leftover(1, "0a0b0c0d-7"), HOURS)
    real = time.time
    for wrong in (86400, -86400):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: real() + wrong)
        assert [path for path, _ in abandoned(tmp_path)] == [str(old)]
    tidy(tmp_path)
    assert young.exists()
    assert not old.exists()


def test_the_clock_of_the_file_system_is_asked_by_touching_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file server a day ahead, whose files have its times."""
    young = put(tmp_path / ".tmp" / leftover(0, "0a0b0c0d-7"), 60 - 86400)
    old = put(tmp_path / ".tmp" / leftover(1, "0a0b0c0d-7"), HOURS - 86400)
    fstat = os.fstat

    def a_day_ahead(fd: int) -> os.stat_result:
        now = tuple(fstat(fd))
        return os.stat_result((*now[:8], now[8] + 86400, now[9]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", a_day_ahead)
        tidy(tmp_path)
    assert young.exists()
    assert not old.exists()


def test_foreign_files_of_a_read_only_cache_raise_nothing(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 8 << 20) as small:
        path = put(small / ".tmp" / leftover(0, "0a0b0c0d-7"))
        read_only(small)
        prepare(small)
        prune(small)
        assert path.exists()


def test_a_cache_without_temporaries_lists_none(tmp_path: Path) -> None:
    assert abandoned(tmp_path) == abandoned(tmp_path / "missing") == []
    tidy(tmp_path / "missing")
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------------------
# A link in the place of the folder


@pytest.fixture
def somebodys(tmp_path: Path) -> Path:
    """Somebody's folder, with old files that are called as a dead writer's."""
    folder = tmp_path / "somebodys"
    put(folder / leftover())
    put(folder / "thesis.docx")
    return folder


def save(folder: Path) -> bool:
    return CacheDirectory(folder, open_storage("posix", "cpu")).publish(key(), encode_item({"image": torch.ones(4)}))


@EVERYWHERE
def test_a_link_is_not_followed(tmp_path: Path, somebodys: Path, clean: Callable[[Path], None]) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".tmp").symlink_to(somebodys)
    before = sorted(os.listdir(somebodys))
    if clean is populate:
        with pytest.raises(NotSaved, match=r"symbolic link, which is not followed.*remove it"):
            clean(tmp_path / "cache")
    else:
        clean(tmp_path / "cache")
    assert sorted(os.listdir(somebodys)) == before
    assert (tmp_path / "cache" / ".tmp").is_symlink()


@pytest.mark.parametrize("dangling", [False, True])
def test_nothing_is_written_through_a_link_and_the_warning_names_it_with_the_remedy(
    tmp_path: Path, somebodys: Path, dangling: bool
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / ".tmp").symlink_to(tmp_path / "nowhere" if dangling else somebodys)
    before = {path: path.stat().st_mtime_ns for path in [somebodys, *somebodys.iterdir()]}
    with pytest.warns(CacheWarning) as caught:
        assert not save(cache)
    (said,) = caught
    assert f"{cache}/.tmp is a symbolic link, which is not followed" in str(said.message)
    assert "remove it, or move cache_dir" in str(said.message)
    assert {path: path.stat().st_mtime_ns for path in [somebodys, *somebodys.iterdir()]} == before
    assert not (tmp_path / "nowhere").exists()
    (cache / ".tmp").unlink()
    assert save(cache)


def test_a_file_in_the_place_of_the_folder_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / ".tmp").write_text("mine")
    prepare(tmp_path)
    prune(tmp_path)
    with pytest.warns(CacheWarning, match=r"\.tmp is not a folder.*remove it, or move cache_dir"):
        assert not save(tmp_path)
    assert (tmp_path / ".tmp").read_text() == "mine"


def test_a_cache_directory_that_is_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "real")
    left = put(tmp_path / "real" / ".tmp" / leftover())
    assert save(tmp_path / "cache")
    prune(tmp_path / "cache")
    assert not left.exists()


#: Everything that cleaning asks of the system, by the name of the function.
STEPS = ["listdir", "stat", "unlink", "open", "close"]


def swapped_before(step: str, call: int, cache: Path, somebodys: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Puts a link in the place of ``.tmp`` right before the n-th call of a function of ``os``."""
    original, calls, done = getattr(os, step), [0], []

    def swap(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            os.rename(cache / ".tmp", cache / "moved")
            os.symlink(somebodys, cache / ".tmp")
            done.append(True)
        return original(*args, **kwargs)

    monkeypatch.setattr(os, step, swap)
    return done


@pytest.mark.parametrize("way", [tidy, prepare, prune])
@pytest.mark.parametrize("step", STEPS)
def test_swapped_for_a_link_at_any_step_costs_nobody_a_file(
    tmp_path: Path, way: Callable[[Path], Any], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in range(1, 1000):
        cache, somebodys = tmp_path / f"{call}" / "cache", tmp_path / f"{call}" / "somebodys"
        for folder in (cache / ".tmp", somebodys):
            for number in range(3):
                put(folder / leftover(number))
        with monkeypatch.context() as patch:
            swapped = swapped_before(step, call, cache, somebodys, patch)
            way(cache)
        assert sorted(os.listdir(somebodys)) == [leftover(number) for number in range(3)]
        if not swapped:
            break
    assert call > 1, "it was swapped at least once"
    assert os.listdir(cache / ".tmp") == [], "and was cleaned where it was not"


def test_swapped_for_a_link_while_a_record_is_written_costs_the_record_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("rename", "unlink", "close"):
        cache, somebodys = tmp_path / step / "cache", tmp_path / step / "somebodys"
        thesis = put(somebodys / leftover())
        assert save(cache)
        for record in maintenance.record_files(cache):
            record.unlink()
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True):
            assert not swapped_before(step, 1, cache, somebodys, patch)
            save(cache)
        assert thesis.read_text() == "mine"
        assert sorted(os.listdir(somebodys)) == [leftover()]


# ---------------------------------------------------------------------------------------------------------------------
# prune


def test_prune_lists_temporaries_before_it_deletes_them(tmp_path: Path) -> None:
    left = put(tmp_path / ".tmp" / leftover())
    put(tmp_path / ".tmp" / "thesis.docx")
    listed = run("cache", "prune", "--dry-run", tmp_path).stdout
    assert f"{left}: left behind by a writer that is gone" in listed
    assert "1 files, 0.0 MB to delete" in listed
    assert "thesis" not in listed
    assert left.exists()
    assert "1 files, 0.0 MB deleted" in run("cache", "prune", tmp_path).stdout
    assert not left.exists()


@pytest.mark.parametrize("same_size", [False, True])
def test_a_sound_record_in_the_place_of_a_damaged_one_survives_prune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_size: bool
) -> None:
    """Whoever reads a damaged record replaces it: also between prune's judging and deleting it."""
    populate(tmp_path)
    (record,) = maintenance.record_files(tmp_path)
    sound = record.read_bytes()
    damaged = bytes(len(sound)) if same_size else b"no record"
    record.write_bytes(damaged)
    judge = maintenance.prunable

    def replaced_meanwhile(*args: Any, **kwargs: Any) -> Any:
        found = list(judge(*args, **kwargs))
        (tmp_path / "new").write_bytes(sound)
        os.utime(tmp_path / "new", ns=(0, record.stat().st_mtime_ns))
        os.rename(tmp_path / "new", record)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(maintenance, "prunable", replaced_meanwhile)
        done = run("cache", "prune", tmp_path)
    assert "0 files" in done.stdout
    assert f"{record}: kept, since it was replaced" in done.stdout
    assert record.read_bytes() == sound
    record.write_bytes(damaged)
    assert "1 files" in run("cache", "prune", tmp_path).stdout
    assert not record.exists()


def test_a_link_in_the_place_of_a_record_goes_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    populate(tmp_path)
    (record,) = maintenance.record_files(tmp_path)
    os.rename(record, tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"no record")
    record.symlink_to("elsewhere")
    assert "1 files" in run("cache", "prune", tmp_path).stdout
    assert not record.is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == b"no record"


def test_a_cache_directory_called_as_the_folder_of_temporaries_is_pruned(tmp_path: Path) -> None:
    cache = tmp_path / ".tmp"
    populate(cache)
    (record,) = maintenance.record_files(cache)
    record.write_bytes(b"")
    left = put(cache / ".tmp" / leftover())
    prune(cache)
    assert not record.exists()
    assert not left.exists()


# ---------------------------------------------------------------------------------------------------------------------
# What others use


def test_the_folder_is_made_when_asked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), opened(tmp_path / "cache"):
        pass
    assert not (tmp_path / "cache").exists()
    with opened(tmp_path / "cache", make=True) as fd:
        assert os.path.samestat(os.fstat(fd), os.stat(tmp_path / "cache" / ".tmp"))
        assert stat.S_ISDIR(os.fstat(fd).st_mode)
        assert os.listdir(fd) == []


def test_where_the_clock_cannot_be_asked_the_file_of_an_unseen_process_stays() -> None:
    with shared_folder() as folder:
        put(folder / ".tmp" / leftover(0, "0a0b0c0d-7"))
        assert in_child(lambda: abandoned(folder), nobody=True) == []
        assert len(abandoned(folder)) == 1


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    put(tmp_path / ".tmp" / leftover(0, "0a0b0c0d-7"))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        tidy(tmp_path)
        abandoned(tmp_path)
        save(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
