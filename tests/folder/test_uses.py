"""Notes of the use of records: other processes find them, garbled ones are skipped, and there are few files."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from monai_gds import limits
from monai_gds.folder import uses as module
from monai_gds.folder.uses import Uses
from monai_gds.records.header import SUFFIX
from monai_gds.shared.notes import FOLDER, line
from monai_gds.shared.owner import this_process
from tests.machines import fork, in_child

A, B = "a" * 32, "b" * 32


def files(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*.uses"))


def put(folder: Path, *lines: Any, process: str = "unknown.7.7", n: int = 0, age: float = 0.0) -> Path:
    """A file of notes of one dataset of another process, the last of them written some seconds ago."""
    (folder / FOLDER).mkdir(exist_ok=True)
    path = folder / FOLDER / f"{process}.{n}.uses"
    path.write_bytes(
        b"".join(
            entry if isinstance(entry, bytes) else line(json.dumps([*entry, 0] if len(entry) == 3 else entry).encode())
            for entry in lines
        )
    )
    os.utime(path, (time.time() - age,) * 2)
    return path


def run(folder: Path, *digests: str, pipeline: str = "cafe") -> None:
    """A process that uses records, and ends."""

    def work() -> None:
        uses = Uses(folder)
        uses.open(pipeline)
        for digest in digests:
            uses.read(digest)

    in_child(work)


def test_another_process_finds_when_a_record_was_last_used(tmp_path: Path) -> None:
    before = time.time()
    run(tmp_path, A)
    between = time.time()
    run(tmp_path, B)
    used = Uses(tmp_path).look()
    assert before - 0.001 <= used.last[A] <= between + 0.001 <= used.last[B] + 0.002 <= time.time() + 0.003
    assert used.open == frozenset()


def test_a_pipeline_is_in_use_until_its_process_has_ended(tmp_path: Path) -> None:
    ready, tell = os.pipe()
    pid = fork()
    if not pid:
        uses = Uses(tmp_path)
        uses.open("cafe")
        uses.read(A)
        os.write(tell, b"!")
        signal.pause()
    try:
        os.read(ready, 1)
        mine = Uses(tmp_path)
        time.sleep(0.05)
        looked = time.time()
        found = mine.look()
        assert found.open == {"cafe"}
        assert found.last[A] >= looked - 0.001, "what it has read it may read again at any moment"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    found = mine.look()
    assert found.open == frozenset()
    assert found.last[A] <= looked - 0.049


def test_a_dropped_dataset_uses_nothing_any_more(tmp_path: Path) -> None:
    uses = Uses(tmp_path)
    uses.open("cafe")
    others = Uses(tmp_path)
    assert others.look().open == {"cafe"}
    del uses
    assert others.look().open == frozenset()


def test_datasets_of_one_process_share_a_file_and_each_has_its_end(tmp_path: Path) -> None:
    """As in a notebook or a sweep, where a constructor would look at the files of all that were made before."""
    first, second = Uses(tmp_path), Uses(tmp_path)
    first.open("cafe")
    first.read(A)
    first.flush()
    second.open("beef")
    second.read(B)
    second.flush()
    del first
    ended, looked = time.time(), Uses(tmp_path)
    time.sleep(0.05)
    found = looked.look()
    assert found.open == {"beef"}
    assert found.last[A] <= ended + 0.001 < found.last[B]
    for _ in range(20):
        Uses(tmp_path).open("cafe")
    assert len(files(tmp_path)) == 1
    assert looked.look().open == {"beef"}


DAY = 86_400


def test_a_process_that_cannot_be_seen_from_here_uses_what_it_opened_for_a_week(tmp_path: Path) -> None:
    """Of another node or container. Its last note tells when it was there, by the clock of the file's server."""
    now = time.time()
    put(tmp_path, ["open", 100, "cafe"], ["read", 200, A], age=6 * DAY)
    put(tmp_path, ["open", now, "dead"], ["read", 200, B], age=8 * DAY, n=1)
    put(tmp_path, ["open", now - 60, "beef"], ["end", now - 50, ""], n=2)
    found = Uses(tmp_path).look()
    assert found.open == {"cafe"}
    assert found.last[A] >= now, "it may read it again at any moment"
    assert found.last[B] == 200


def test_notes_of_a_process_that_cannot_be_seen_from_here_are_not_merged_for_a_week(many: Path) -> None:
    theirs = put(many, ["open", time.time(), "cafe"], age=6 * DAY)
    Uses(many).tidy()
    assert Uses(many).look().open == {"cafe"}
    put(many, ["open", time.time(), "cafe"], age=8 * DAY)
    for n in range(limits.NOTE_FILES + 1):
        put(many, ["read", n, A], process=f"{this_process().split('.')[0]}.1.1", n=n)
    Uses(many).tidy()
    assert not theirs.exists()


def test_threads_that_look_at_once_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes records makes room while the loop reads others for the first time."""
    put(tmp_path, ["read", 7, A])
    add = module._File.add
    monkeypatch.setattr(module._File, "add", lambda self, notes: (time.sleep(0.05), add(self, notes)))
    uses = Uses(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        looks = [pool.submit(uses.look) for _ in range(4)]
        assert [look.result().last for look in looks] == [{A: 7}] * 4


def test_the_end_of_a_run_counts_as_use(tmp_path: Path) -> None:
    now = time.time()
    put(tmp_path, ["open", now - 9 * DAY, "cafe"], ["read", now - 9 * DAY, A], ["end", now - 50, ""])
    assert Uses(tmp_path).look().last[A] == pytest.approx(now - 50)


def test_what_is_read_is_written_in_few_writes_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    appended: list[int] = []
    append = module.Notes.append
    monkeypatch.setattr(module.Notes, "append", lambda self, texts: (appended.append(len(texts)), append(self, texts)))
    uses = Uses(tmp_path)
    for n in range(1000):
        uses.read(f"{n:032x}")
        uses.read(f"{n:032x}")
    assert len(appended) <= 3
    uses.flush()
    assert len(Uses(tmp_path).look().last) == 1000
    for n in range(1000):
        uses.read(f"{n:032x}")
    uses.flush()
    assert len(appended) <= 4
    monkeypatch.undo()  # before what it has is written at its end


def test_workers_do_not_note_again_what_their_run_has_noted(tmp_path: Path) -> None:
    """A loader forks others in every epoch."""
    uses = Uses(tmp_path, began=time.time())
    uses.open("cafe")

    def worker() -> None:
        uses.open("cafe")
        uses.read(A)

    for _ in range(3):
        in_child(worker)
    assert len(files(tmp_path)) == 2
    run(tmp_path, A)
    assert len(files(tmp_path)) == 3, "another run"


GARBLED: list[Any] = [
    b"", b"\n", b"00000000 nothing\n", line(b"{}"), line(b"[]"), line(b"\xff"), line(b"[" * 100_000),
    ["read"], ["read", "1", A], ["read", 1, 7], ["read", 1, "xyz"], ["read", 1, A[:-1]], ["read", 10**400, A],
    ["read", 1, A, "0"], ["read", 1, A, 0, 0], ["read", 1, A, True],
    ["read", float("nan"), A], ["read", float("inf"), A], ["open", 1, "../x"], ["other", 1, A], [[], 1, A],
]  # fmt: skip


def test_garbled_notes_are_passed_over(tmp_path: Path) -> None:
    put(tmp_path, *GARBLED, ["read", 5, A + B], b"12345678 [torn")
    assert Uses(tmp_path).look().last == {A: 5, B: 5}


def test_a_time_in_the_future_counts_as_now(tmp_path: Path) -> None:
    """Clocks differ, and whoever may write to the folder writes there."""
    put(tmp_path, ["read", 1e300, A])
    assert Uses(tmp_path).look().last[A] <= time.time()


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """More files of ended processes than are kept, about two records that exist and one that does not."""
    boot, _, _ = this_process().split(".")
    for n in range(limits.NOTE_FILES + 1):
        put(
            tmp_path,
            ["open", n, "cafe"],
            ["read", n, (A, B, "c" * 32)[n % 3]],
            ["end", n, ""],
            process=f"{boot}.1.1",
            n=n,
        )
    for digest in (A, B):
        (tmp_path / f"{digest}{SUFFIX}").touch()
    return tmp_path


def test_files_of_ended_processes_are_merged(many: Path) -> None:
    before = Uses(many).look()
    Uses(many).tidy()
    assert len(files(many)) == 1
    assert Uses(many).look().last == {digest: before.last[digest] for digest in (A, B)}
    assert Uses(many).look().open == frozenset(), "the process that merged them has none open"


@pytest.mark.parametrize("make", [lambda f: f.chmod(0o555), lambda f: f.joinpath(FOLDER).touch(), lambda f: f.rmdir()])
def test_where_nothing_can_be_written_nothing_fails(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    make(folder)
    uses = Uses(folder)
    uses.open("cafe")
    uses.read(A)
    uses.flush()
    uses.tidy()
    assert uses.look().open == {"cafe"}, "its own it knows all the same"
