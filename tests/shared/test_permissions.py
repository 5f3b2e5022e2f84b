"""A cache directory that several users share: who can read its records, and who can add them."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.transforms import Compose, EnsureTyped

from monai_gds.dataset.dataset import GDSDataset
from monai_gds.folder import maintenance
from monai_gds.folder.index import Index
from monai_gds.folder.writer import process_writer
from monai_gds.shared import leases, notes
from monai_gds.shared.temporary import share_file
from tests.commands import run
from tests.machines import in_child, shared_folder

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming other users needs root, which this process is not")

#: Users of the group that shares the cache, and that group. None of them need exist.
ANNA, BEN, LAB = 61001, 61002, 61100
STRANGER = 61999


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as path:
        yield path / "cache"


def shared(folder: Path, mode: int, group: int = LAB, owner: int = ANNA) -> Path:
    folder.mkdir()
    os.chown(folder, owner, group)
    folder.chmod(mode)
    return folder


def by(user: int, work: Callable[[], Any], *, umask: int = 0o022, groups: tuple[int, ...] = (LAB,)) -> Any:
    """What ``work`` returns, done by a user whose own group is named as the user is."""

    def as_user() -> Any:
        os.umask(umask)
        os.setgroups(list(groups))
        os.setgid(user)
        os.setuid(user)
        return work()

    return in_child(as_user)


def save(folder: Path, value: float, **choices: Any) -> int:
    """Has an item cached, and returns how many records there are."""
    data = [{"image": torch.full((1, 8, 8), value)}]
    with GDSDataset(data, Compose([EnsureTyped("image")]), folder, "cpu", **choices) as dataset:
        _ = dataset[0]
    return len(maintenance.record_files(folder))


def readable(folder: Path) -> int:
    """How many records this user can read."""
    return sum(not found.problem for found in maintenance.survey(folder))


def modes(files: list[Path]) -> set[tuple[int, int]]:
    return {(stat.S_IMODE(file.stat().st_mode), file.stat().st_gid) for file in files}


@pytest.mark.parametrize("mode", [0o2775, 0o2770, 0o775, 0o1777, 0o777])
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_users_of_one_folder_add_records_and_read_each_others(folder: Path, mode: int, umask: int) -> None:
    shared(folder, mode)
    assert by(ANNA, lambda: save(folder, 1), umask=umask) == 1
    assert by(BEN, lambda: save(folder, 2), umask=umask) == 2
    assert by(ANNA, lambda: save(folder, 3), umask=umask) == 3
    for user in (ANNA, BEN):
        assert by(user, lambda: readable(folder)) == 3
    assert modes([folder / ".tmp", folder / notes.FOLDER]) == {(mode, LAB)}
    written = modes([*maintenance.record_files(folder), *(folder / notes.FOLDER).glob("*.facts")])
    assert written == {(0o644 if mode & stat.S_ISVTX else mode & 0o666, LAB)}
    assert list((folder / ".tmp").iterdir()) == []


def test_a_user_who_may_not_enter_the_folder_reads_nothing(folder: Path) -> None:
    shared(folder, 0o2750)
    by(ANNA, lambda: save(folder, 1))
    (record,) = maintenance.record_files(folder)
    assert modes([record]) == {(0o640, LAB)}
    with pytest.raises(AssertionError, match="PermissionError"):
        by(STRANGER, lambda: record.read_bytes(), groups=())


def test_file_mode_restricts_records_and_notes(folder: Path) -> None:
    shared(folder, 0o2775)
    by(ANNA, lambda: save(folder, 1, options={"file_mode": 0o640}))
    by(BEN, lambda: save(folder, 2, options={"file_mode": 0o600}))
    assert modes(maintenance.record_files(folder)) == {(0o640, LAB), (0o600, LAB)}
    assert modes(list((folder / notes.FOLDER).glob("*.facts"))) == {(0o640, LAB), (0o600, LAB)}
    assert by(ANNA, lambda: readable(folder)) == 1
    assert by(ANNA, lambda: save(folder, 3)) == 3


def test_what_is_strict_is_so_from_its_creation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records, copies of them, what is noted of them, and the dataset that an executor's workers get."""
    modes: dict[str, str] = {}
    leasing: list[int] = []

    def lease(*what: Any) -> None:  # it tells who is busy, which everybody may know
        leasing.append(1)
        made(*what)
        leasing.pop()

    def note(file: int) -> int:
        path = Path(f"/proc/self/fd/{file}").resolve()
        if path.is_relative_to(folder) and path.is_file() and path.suffix != ".lease" and not leasing:
            modes.setdefault(str(path), oct(stat.S_IMODE(path.stat().st_mode)))
        return file

    create, copy, made = os.open, shutil.copyfileobj, leases.create
    monkeypatch.setattr(leases, "create", lease)
    monkeypatch.setattr(os, "open", lambda *how, **where: note(create(*how, **where)))
    monkeypatch.setattr(shutil, "copyfileobj", lambda *files: note(files[1].fileno()) and copy(*files))
    save(folder, 1, options={"file_mode": 0o600})
    save(folder, 1, options={"file_mode": 0o600}, local_dir=folder / "near")
    process_writer().flush()
    data = [{"image": torch.zeros(1, 8, 8)}]
    with (
        ThreadPoolExecutor(1) as executor,
        GDSDataset(data, Compose([EnsureTyped("image")]), folder, "cpu", options={"file_mode": 0o600}) as dataset,
    ):
        dataset.populate(executor=executor, progress=False)
    assert {Path(path).parent.relative_to(folder) for path in modes} >= {Path(".tmp"), Path("near/.tmp")}
    assert {path: mode for path, mode in modes.items() if mode != "0o600"} == {}


@pytest.mark.parametrize(
    ("mode", "kind", "shown"),
    [
        ("0o600", TypeError, "'0o600'"),
        (384.0, TypeError, "384.0"),
        (np.int64(640), ValueError, "640, in octal 0o1200"),
        (640, ValueError, "640, in octal 0o1200"),
        (0o400, ValueError, "0o400"),
        (0o1777, ValueError, "0o1777"),
        (-1, ValueError, "-1"),
    ],
)
def test_values_that_are_not_permissions_are_refused(
    folder: Path, mode: Any, kind: type[Exception], shown: str
) -> None:
    with pytest.raises(kind, match=f"file_mode=.*{shown}"):
        GDSDataset([], Compose([EnsureTyped("image")]), folder, "cpu", options={"file_mode": mode})


def test_permissions_may_be_an_integer_of_numpy(folder: Path) -> None:
    with GDSDataset(
        [], Compose([EnsureTyped("image")]), folder, "cpu", options={"file_mode": np.int64(0o640)}
    ) as dataset:
        assert dataset.settings.file_mode == 0o640
        assert type(dataset.settings.file_mode) is int


def test_the_folder_of_an_earlier_version_is_opened_by_the_user_whose_it_is(folder: Path) -> None:
    shared(folder, 0o2775)
    by(ANNA, lambda: (folder / ".tmp").mkdir(mode=0o755))
    (folder / ".tmp").chmod(0o755)
    with pytest.raises(AssertionError, match="CacheWarning"):
        by(BEN, lambda: failing_on_warnings(folder))
    by(ANNA, lambda: save(folder, 1))
    assert by(BEN, lambda: save(folder, 2)) == 2


def failing_on_warnings(folder: Path) -> int:
    import warnings

    warnings.simplefilter("error")
    return save(folder, 2)


def test_merging_notes_does_not_make_them_readable_to_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from monai_gds import limits

    monkeypatch.setattr(limits, "NOTE_FILES", 1)
    shared(folder, 0o2775)
    for value in (1, 2, 3):
        by(ANNA, lambda value=value: save(folder, value, options={"file_mode": 0o600}))
    by(ANNA, lambda: Index(folder).tidy())
    (merged,) = (folder / notes.FOLDER).glob("*.facts")
    assert modes([merged]) == {(0o600, LAB)}


def test_in_a_users_own_folder_nothing_changes(folder: Path) -> None:
    shared(folder, 0o755, group=ANNA)
    by(ANNA, lambda: save(folder, 1))
    assert modes(maintenance.record_files(folder)) == {(0o644, ANNA)}
    assert modes([folder / ".tmp"]) == {(0o755, ANNA)}


def test_prune_continues_after_another_users_file(folder: Path) -> None:
    """In a folder with the sticky bit: BEN may not delete what ANNA left there."""
    shared(folder, 0o1777, owner=0)
    by(ANNA, lambda: save(folder, 1))
    by(BEN, lambda: save(folder, 2))
    for record in maintenance.record_files(folder):
        record.write_bytes(b"damaged")
    done = by(BEN, lambda: run("cache", "prune", folder))
    assert done.exit_code == 1
    assert "cannot be deleted: Operation not permitted" in done.stdout
    assert done.stdout.endswith("1 files, 0.0 MB deleted, 1 that cannot be deleted\n")
    (left,) = maintenance.record_files(folder)
    assert left.stat().st_uid == ANNA


def test_records_that_a_user_may_not_read_take_up_their_room(folder: Path) -> None:
    shared(folder, 0o1777, owner=0)
    by(ANNA, lambda: save(folder, 1, options={"file_mode": 0o600}))
    (record,) = maintenance.record_files(folder)
    listed = json.loads(by(BEN, lambda: run("cache", "ls", "--json", folder)).stdout)
    assert listed["bytes"] == record.stat().st_size
    assert listed["records"][0]["mtime_ns"] == record.stat().st_mtime_ns
    pruned = by(BEN, lambda: run("cache", "prune", "--max-size", "0", folder))
    assert (pruned.exit_code, record.exists()) == (1, True)
    assert "more than --max-size: they are in use, kept, or cannot be deleted" in pruned.stdout


@pytest.mark.parametrize("kind", ["another users", "a second name", "a folder"])
def test_files_that_are_not_the_users_own_keep_their_permissions(folder: Path, kind: str) -> None:
    shared(folder, 0o2777)
    file = folder / "file"
    if kind == "a folder":
        file.mkdir()
    else:
        file.touch()
    os.chown(file, BEN if kind == "another users" else ANNA, 0)
    file.chmod(0o700 if kind == "a folder" else 0o604)
    before = modes([file])
    if kind == "a second name":
        os.link(file, folder / "other")

    def try_it() -> None:
        fd = os.open(file, os.O_RDONLY)
        share_file(fd, os.stat(folder))

    by(ANNA, try_it)
    assert modes([file]) == before
