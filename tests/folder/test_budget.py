"""A budget for a cache directory: which records are deleted to make room, and which never are."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.transforms import Compose, EnsureTyped, Lambdad, ScaleIntensityd
from torch.utils.data import DataLoader

from monai_gds.dataset.dataset import GDSDataset
from monai_gds.errors import CacheWarning
from monai_gds.folder import budget, maintenance
from monai_gds.folder.budget import Budget, OverBudget
from monai_gds.folder.directory import tidy
from monai_gds.folder.index import Index
from monai_gds.folder.uses import Uses
from monai_gds.shared import temporary
from tests.commands import run as command
from tests.interrupts import as_killed, interrupted
from tests.machines import fork, in_child, shared_folder
from tests.records.handmade import key_of_version_2, version_2

#: Bytes of the tensor of an item; its record has a few kB more.
NBYTES = 1 << 16


#: Each test has several pipelines, and items that are all new.
pytestmark = pytest.mark.filterwarnings("ignore:every item was computed again")


def pipeline(number: int) -> Compose:
    return Compose([EnsureTyped("image"), ScaleIntensityd("image", minv=0.0, maxv=float(number))])


def dataset(folder: Path, number: int, items: int = 3, **settings: Any) -> GDSDataset:
    data = [{"image": torch.arange(i, i + NBYTES // 4, dtype=torch.float32)[None]} for i in range(items)]
    return GDSDataset(data, pipeline(number), folder, "cpu", **settings)


def run(folder: Path, number: int, items: int = 3, **settings: Any) -> None:
    """A run that has ended: all its items are cached and read."""
    with dataset(folder, number, items, **settings) as made:
        for _ in range(2):
            _ = [made[i] for i in range(items)]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.safetensors")}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def earlier_runs(folder: Path, *numbers: int) -> list[set[str]]:
    """Caches three items by each of some pipelines, one run after the other; returns the records of each."""
    found: list[set[str]] = []
    for number in numbers:
        before = names(folder)
        run(folder, number)
        found.append(names(folder) - before)
        assert len(found[-1]) == 3
    return found


def record_size(folder: Path) -> int:
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


# ---------------------------------------------------------------------------------------------------------------------
# What a training notices


def test_a_run_makes_room_by_deleting_what_was_unused_for_longest(tmp_path: Path) -> None:
    first, second = earlier_runs(tmp_path, 1, 2)
    run(tmp_path, 1)  # only read: its records are older, and used later
    limit = size(tmp_path) + record_size(tmp_path) // 2
    run(tmp_path, 3, items=2, max_bytes=limit)
    assert size(tmp_path) <= limit
    assert first <= names(tmp_path), "the records that were used last"
    assert len(second & names(tmp_path)) == 1, "two of the others made room for two"
    assert len(names(tmp_path)) == 6


def test_what_is_used_is_not_written_into_records(tmp_path: Path) -> None:
    earlier_runs(tmp_path, 1)
    before = {path: path.stat() for path in tmp_path.glob("*.safetensors")}
    run(tmp_path, 1)
    for path, st in before.items():
        now = path.stat()
        assert (now.st_mtime_ns, now.st_ctime_ns, now.st_ino) == (st.st_mtime_ns, st.st_ctime_ns, st.st_ino)
        assert not os.listxattr(path)


def test_an_epoch_larger_than_the_budget_hits_what_is_there_and_warns_once(tmp_path: Path) -> None:
    computed: Counter[int] = Counter()
    data = [{"image": torch.full((1, NBYTES // 4), float(i)), "i": i} for i in range(8)]
    note = Lambdad("i", lambda i: computed.update([i]) or i)
    settings: Any = {"hash_transform": lambda _: b"same", "max_bytes": 4 * NBYTES}
    with pytest.warns(CacheWarning) as caught:
        made = GDSDataset(data, Compose([EnsureTyped("image"), note]), tmp_path, "cpu", **settings)
        for _ in range(3):
            assert [int(made[i]["image"][0, 0]) for i in range(8)] == list(range(8))
            made.flush()
    assert len(names(tmp_path)) == 3
    assert size(tmp_path) <= 4 * NBYTES
    assert sorted(computed.values()) == [1, 1, 1, 3, 3, 3, 3, 3]
    (told,) = (str(w.message) for w in caught if "budget" in str(w.message))
    assert told.startswith(f"nothing more is cached in {tmp_path} while this lasts: its budget of 0.3 MB has no room")


def test_a_record_larger_than_the_budget_deletes_nothing(tmp_path: Path) -> None:
    (first,) = earlier_runs(tmp_path, 1)
    with pytest.warns(CacheWarning, match=r"budget of 0\.0 MB is smaller than a record of 0\.1 MB: raise max_bytes"):
        run(tmp_path, 2, max_bytes=1000)
    assert names(tmp_path) == first


def test_one_item_larger_than_the_budget_does_not_keep_others_out(tmp_path: Path) -> None:
    data = [{"image": torch.zeros(1, NBYTES)}, *({"image": torch.full((1, 100), float(i))} for i in range(9))]
    with pytest.warns(CacheWarning, match="1 items are computed in every epoch"):
        done = GDSDataset(data, pipeline(1), tmp_path, "cpu", max_bytes=200_000).populate(0, progress=False)
    assert (done.computed, done.left_out) == (9, 1)


def test_what_a_budget_notes_has_no_more_permissions_than_records(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    earlier_runs(tmp_path, 1)
    shutil.rmtree(tmp_path / ".index")
    run(tmp_path, 2, max_bytes=size(tmp_path) + NBYTES // 2, options={"file_mode": 0o600})
    facts = list((tmp_path / ".index").glob("*.facts"))
    assert {path.stat().st_mode & 0o777 for path in facts} == {0o600}


def test_too_little_to_delete_deletes_nothing(tmp_path: Path) -> None:
    """Deleting something for a record that does not fit all the same would only cost others their records."""
    (first,) = earlier_runs(tmp_path, 1)
    keeps = dataset(tmp_path, 2, items=30)
    _ = [keeps[i] for i in range(30)]
    keeps.flush()
    there = names(tmp_path)
    big = [{"image": torch.zeros(1, 8 * NBYTES // 4)}]
    with (
        pytest.warns(CacheWarning, match="budget"),
        GDSDataset(big, pipeline(3), tmp_path, "cpu", max_bytes=size(tmp_path)) as made,
    ):
        _ = made[0]
    assert names(tmp_path) == there
    assert first <= there


def test_populate_and_warm_leave_out_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(
        CacheWarning, match=r"^4 items are computed in every epoch: the budget of .*, 0\.3 MB, leaves no room"
    ):
        done = dataset(tmp_path / "a", 1, items=8, max_bytes=5 * NBYTES).populate(1, progress=False)
    assert (done.computed, done.cached, done.left_out) == (4, 0, 4)
    (tmp_path / "budgeted_study.py").write_text(
        "from pathlib import Path\nfrom tests.folder.test_budget import NBYTES, dataset\n"
        "def make(): return dataset(Path('b'), 1, items=8, max_bytes=5 * NBYTES)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.warns(CacheWarning, match="4 items"):
        warmed = command("cache", "warm", "budgeted_study:make", "--num-workers", "1")
    assert (warmed.exit_code, warmed.stdout) == (
        0,
        "4 items computed, 0 were cached already, 4 left out by the budget\n",
    )


def test_populate_counts_what_fails_in_workers_and_does_not_fit(tmp_path: Path) -> None:
    parent = os.getpid()

    def here_only(image: torch.Tensor) -> torch.Tensor:
        if os.getpid() != parent:
            raise RuntimeError("it needs what only this process has")
        return image

    data = [{"image": torch.zeros(1, NBYTES)} for _ in range(4)]
    transform = Compose([Lambdad("image", here_only)])
    made = GDSDataset(data, transform, tmp_path, "cpu", hash_transform=lambda _: b"same", max_bytes=1000)
    with pytest.warns(CacheWarning, match="4 items are computed in every epoch"):
        assert made.populate(progress=False).left_out == 4


def test_limits_need_their_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes='1GB' limits the records of a cache_dir, and there is none"):
        GDSDataset([], pipeline(1), None, "cpu", max_bytes="1GB")
    with pytest.raises(ValueError, match="max_bytes='lots'"):
        dataset(tmp_path, 1, max_bytes="lots")


# ---------------------------------------------------------------------------------------------------------------------
# What others use


@contextmanager
def holder(folder: Path) -> Iterator[int]:
    """Another process that has a dataset of pipeline 1, of which it reads nothing."""
    ready, tell = os.pipe()
    pid = fork()
    if not pid:
        made = dataset(folder, 1)
        os.write(tell, b"!")
        signal.pause()
        del made
    try:
        assert os.read(ready, 1) == b"!"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_a_process_of_this_node_uses_stays_until_it_ends(tmp_path: Path) -> None:
    (first,) = earlier_runs(tmp_path, 1)
    limit = size(tmp_path) + NBYTES // 2
    with holder(tmp_path):
        with pytest.warns(
            CacheWarning, match=r"beside those that are in use \(by .*\), or were since this run began: raise max_bytes"
        ):
            run(tmp_path, 2, max_bytes=limit)
        assert names(tmp_path) == first
        assert command("cache", "prune", "--unused-for", "0d", tmp_path).stdout == "0 files, 0.0 MB deleted\n"
    run(tmp_path, 2, max_bytes=limit)
    assert len(names(tmp_path)) == 3
    assert not names(tmp_path) & first


def test_a_dataset_that_was_dropped_uses_nothing_any_more(tmp_path: Path) -> None:
    """As in a notebook, where a cell with other transforms is run again and again."""
    limit = 0
    for number in range(1, 6):
        made = dataset(tmp_path, number, max_bytes=limit or None)
        _ = [made[i] for i in range(3)]
        made.flush()
        limit = limit or size(tmp_path) * 2 + NBYTES // 2
        assert made.is_cached(2)
        assert size(tmp_path) <= limit
    kinds = sorted(path.suffix for path in (tmp_path / ".index").glob("*.*"))
    assert kinds == [".facts", ".uses"], "later constructors do not look at files of earlier datasets"
    with pytest.warns(CacheWarning, match="budget"):  # it is still there
        run(tmp_path, 9, items=6, max_bytes=limit)
    assert all(made.is_cached(i) for i in range(3))


def test_what_workers_of_a_loader_read_counts_as_used(tmp_path: Path) -> None:
    first, second = earlier_runs(tmp_path, 1, 2)
    made = dataset(tmp_path, 1)
    for _ in range(3):
        _ = list(DataLoader(made, batch_size=1, num_workers=2))
    written = list((tmp_path / ".index").glob("*.uses"))
    assert len(written) <= 2 + 1 + 2, "two runs, this one, and its workers of the first epoch"
    del made
    run(tmp_path, 3, max_bytes=size(tmp_path) + NBYTES // 2)
    assert first <= names(tmp_path)
    assert not second & names(tmp_path)


def test_a_record_used_since_the_run_began_stays(tmp_path: Path) -> None:
    """As by a run of another node, whose processes cannot be seen from here."""
    first, second = earlier_runs(tmp_path, 1, 2)
    made = dataset(tmp_path, 3, items=5, max_bytes=size(tmp_path) + NBYTES // 2)
    run(tmp_path, 1)
    with pytest.warns(CacheWarning, match="budget"):
        _ = [made[i] for i in range(5)]
        made.flush()
    assert first <= names(tmp_path)
    assert not second & names(tmp_path)


def test_what_is_opened_while_others_are_deleted_stays(crowded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "KNOWN_SECONDS", 0.0)
    begun, remove = Uses(crowded), maintenance.remove

    def then_another_begins(found: maintenance.Found) -> bool:
        begun.open("bbbb")
        return remove(found)

    monkeypatch.setattr(maintenance, "remove", then_another_begins)
    with pytest.raises(OverBudget):
        take(crowded)
    left = [found.pipeline for found in maintenance.survey(crowded)]
    assert (left.count("aaaa"), left.count("bbbb")) == (0, 2)


def test_processes_that_fill_a_cache_at_once_stay_within_its_budget(tmp_path: Path) -> None:
    limit = 20 * NBYTES
    pids = []
    for number in range(1, 5):
        pid = fork()
        if not pid:
            warnings.simplefilter("ignore")
            run(tmp_path, number, items=12, max_bytes=limit)
            os._exit(0)
        pids.append(pid)
    assert {os.waitpid(pid, 0)[1] for pid in pids} == {0}
    most = record_size(tmp_path)
    assert limit - 4 * most < size(tmp_path) <= limit + 3 * most


def test_files_of_others_and_damaged_records_are_left_alone(tmp_path: Path) -> None:
    (first,) = earlier_runs(tmp_path, 1)
    others = {"checkpoint.pt", "model.safetensors", ".hidden", ".tmp/mine"}
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    damaged = tmp_path / sorted(first)[0]
    damaged.write_bytes(b"no header" * 1000)
    with pytest.warns(CacheWarning, match="its budget of .* has no room"):
        run(tmp_path, 2, max_bytes=size(tmp_path) + NBYTES // 2)
    assert all((tmp_path / name).read_bytes() == b"mine" for name in others)
    assert names(tmp_path) & first == {damaged.name}


def test_records_of_another_user_in_a_sticky_folder_stay() -> None:
    with shared_folder() as folder:
        folder.chmod(0o1777)
        (first,) = earlier_runs(folder, 1)

        def theirs() -> list[str]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run(folder, 2, max_bytes=size(folder) + NBYTES // 2)
            return [str(w.message) for w in caught if "budget" in str(w.message)]

        assert len(in_child(theirs, nobody=True)) == 1
        assert names(folder) == first


# ---------------------------------------------------------------------------------------------------------------------
# Kills and Ctrl-C while records are deleted


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """Six records of two pipelines that nobody uses, two of one in use, and files of others."""
    folder = tmp_path / "cache"
    for i in range(8):
        path = version_2(folder, key_of_version_2(f"item {i}", pipeline=("aaaa", "bbbb", "cccc", "cccc")[i % 4]))
        os.utime(path, (0, 1_000_000_000 + i))
    (folder / "checkpoint.pt").write_bytes(b"mine")
    (folder / ".tmp").mkdir()
    (folder / ".tmp" / "mine").write_bytes(b"mine")
    return folder


def take(folder: Path) -> None:
    """Makes room for one record where there are three too many."""
    used = Uses(folder)
    used.open("cccc")
    one = record_size(folder)
    Budget(str(folder), 6 * one, used, time.time()).take(one)


def in_use(folder: Path) -> set[str]:
    return {found.name for found in maintenance.survey(folder) if found.pipeline == "cccc"}


def check(folder: Path, before: list[maintenance.Found]) -> None:
    """Of the records that were there none is lost but idle ones, and no more of them than were too many."""
    found = {record.name: record for record in maintenance.survey(folder)}
    assert not [record for record in found.values() if record.problem]
    lost = [record for record in before if record.name not in found]
    assert not any(record.pipeline == "cccc" for record in lost)
    idle = sorted((record for record in before if record.pipeline != "cccc"), key=lambda record: record.mtime_ns)
    assert {record.name for record in lost} == {record.name for record in idle[: len(lost)]}
    assert len(lost) <= 3
    assert (folder / "checkpoint.pt").read_bytes() == (folder / ".tmp" / "mine").read_bytes() == b"mine"


def killed(crowded: Path, copies: Path) -> Iterator[Path]:
    yield from as_killed(crowded, partial(take, crowded), [temporary.__file__], copies)


def interrupted_each(crowded: Path, copies: Path) -> Iterator[Path]:
    for n in itertools.count(1):
        folder = shutil.copytree(crowded, copies / str(n))
        stopped = interrupted(n, partial(take, folder), [temporary.__file__], "line")
        yield folder
        if not stopped:
            return


@pytest.mark.parametrize("stopped", [interrupted_each, killed])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it strikes where the end is noted
def test_deleting_may_be_stopped_at_any_step(
    crowded: Path, tmp_path: Path, stopped: Callable[[Path, Path], Iterator[Path]]
) -> None:
    before = maintenance.survey(crowded)
    for n, folder in enumerate(stopped(crowded, tmp_path / "copies"), 1):  # noqa: B007 (of the last)
        check(folder, before)
        take(folder)
        tidy(folder)
        check(folder, before)
        assert size(folder) == 5 * record_size(folder)
        left = [path for path in (folder / ".tmp").iterdir() if path.name != "mine"]
        assert stopped is interrupted_each or not left
        shutil.rmtree(folder)
    assert n > 50


def test_a_record_that_is_replaced_while_others_are_deleted_stays(
    crowded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest = min(crowded.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)

    def replaced(path: str) -> maintenance.Found | None:
        if path == str(oldest):
            os.utime(oldest)  # made again, just now
        return look(path)

    look = maintenance.look
    monkeypatch.setattr(maintenance, "look", replaced)
    take(crowded)
    assert oldest.exists()
    assert size(crowded) == 5 * record_size(crowded)


def test_a_large_directory_is_not_looked_at_for_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(130):
        os.utime(version_2(tmp_path, key_of_version_2(f"item {i}")), (0, i))
    looked: list[str] = []
    total = budget.total
    monkeypatch.setattr(budget, "total", lambda directory: (looked.append(directory), total(directory))[1])
    one, limit = record_size(tmp_path), size(tmp_path)
    found = Budget(str(tmp_path), limit, Uses(tmp_path), time.time())
    for i in range(60):
        found.take(one)
        os.utime(version_2(tmp_path, key_of_version_2(f"new {i}")))
        assert size(tmp_path) <= limit
    assert len(looked) <= 20


def test_a_wrong_index_deletes_nothing_of_a_pipeline_in_use(crowded: Path) -> None:
    """Whoever may write to the folder writes there."""
    there = in_use(crowded)
    index = Index(crowded)
    records = maintenance.survey(crowded)
    index.note_records([maintenance._to_note(replace(found, pipeline="dddd")) for found in records])
    take(crowded)
    assert there <= names(crowded)


# ---------------------------------------------------------------------------------------------------------------------
# A budget that is written in the folder


def test_a_budget_of_the_folder_binds_every_process(tmp_path: Path) -> None:
    run(tmp_path, 1, items=2)
    most = size(tmp_path)
    budget.write(tmp_path, most)
    in_child(lambda: run(tmp_path, 2, items=1))
    assert 0 < size(tmp_path) <= most
    budget.write(tmp_path, None)
    run(tmp_path, 3)
    assert size(tmp_path) > most


@pytest.mark.parametrize(("given", "limit"), [(None, 1000), (500, 500), (2000, 1000)])
def test_an_argument_may_only_lower_it(tmp_path: Path, given: int | None, limit: int) -> None:
    budget.write(tmp_path, 1000)
    assert Budget(str(tmp_path), given, Uses(tmp_path), 0.0).nbytes == limit


def test_who_leaves_no_room_is_named(tmp_path: Path) -> None:
    budget.write(tmp_path, int(1.5 * NBYTES))
    made = dataset(tmp_path, 1)
    with pytest.warns(CacheWarning, match=rf"in use \(by \S+ process {os.getpid()}\).*monai-gds cache budget"):
        _ = [made[i] for i in range(3)]


def test_the_command_writes_and_shows_it(tmp_path: Path) -> None:
    run(tmp_path, 1)
    assert "has no budget" in command("cache", "budget", str(tmp_path)).stdout
    done = command("cache", "budget", str(tmp_path), "1kB")
    assert "may hold 0.0 MB" in done.stdout
    assert "more than its budget" in done.stderr
    assert budget.written(tmp_path) == 1000
    (makes_room,) = re.findall("`monai-gds (.*?)` makes room", done.stderr)
    assert command(*makes_room.split(), "1kB", tmp_path).exit_code == 0
    assert not maintenance.record_files(tmp_path)
    command("cache", "budget", str(tmp_path), "none")
    assert budget.written(tmp_path) is None


def test_a_budget_that_may_not_be_written_is_an_error_with_the_remedy() -> None:
    with shared_folder() as folder:
        done = in_child(lambda: command("cache", "budget", folder, "1kB"), nobody=True)
        assert done.exit_code == 1
        denied = f"Permission denied (change the permissions of {folder}, or move the cache)"
        assert done.stderr == f"monai-gds: the budget of {folder} cannot be written: {denied}\n"


@pytest.mark.parametrize("content", [b"", b"[]", b'{"bytes": -1}', b'{"bytes": "1"}', b"\xff"])
def test_a_garbled_budget_is_none(tmp_path: Path, content: bytes) -> None:
    budget.write(tmp_path, 1)
    (tmp_path / ".index" / "budget.json").write_bytes(content)
    assert budget.written(tmp_path) is None


def test_a_share_is_not_a_number_of_bytes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_bytes=0\.5 is less than a byte, and a share of a drive is not meant"):
        dataset(tmp_path, 1, max_bytes=0.5)
