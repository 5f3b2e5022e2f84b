"""The memo of source files saves reading, survives whatever happens to it, and never fails anything."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monai_gds import limits
from monai_gds.keys import source_memo as module
from monai_gds.keys.source_memo import Ages, SourceMemo
from monai_gds.shared import notes
from monai_gds.shared.notes import line
from monai_gds.shared.owner import this_process

#: Bytes of the line of one hash.
LINE = 74


def k(n: int) -> bytes:
    """The n-th key, spread as hashes are."""
    return (n * 0x9E3779B97F4A7C15F39CC0605CEDC834 % (1 << 128)).to_bytes(16, "little")


def c(n: int) -> bytes:
    """The n-th content."""
    return k(n + 10**9)


def write(folder: Path, *numbers: int) -> Path:
    """What a process that found out these leaves behind: its file."""
    before = set((folder / ".index").glob("*")) if (folder / ".index").exists() else set()
    notes._own.forget()  # as in another process
    memo = SourceMemo(str(folder))
    for n in numbers:
        memo.put(k(n), c(n))
    memo.flush()
    (file,) = set((folder / ".index").iterdir()) - before
    return file


def known(folder: Path, numbers: range) -> list[int]:
    """Those that a new process finds."""
    memo = SourceMemo(str(folder))
    found = [(n, memo.get(k(n))) for n in numbers]
    assert all(content in (None, c(n)) for n, content in found)
    return [n for n, content in found if content is not None]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REFRESH_SECONDS", 0.0)


def test_another_process_finds_what_was_written(tmp_path: Path) -> None:
    write(tmp_path, *range(1000))
    assert known(tmp_path, range(2000)) == list(range(1000))


def test_what_is_found_out_is_written_within_seconds_without_being_asked(tmp_path: Path) -> None:
    memo = SourceMemo(str(tmp_path))
    memo.put(k(0), c(0))  # written at once, or a process that is killed would leave nothing
    for n in range(1, 600):
        memo.put(k(n), c(n))
    assert len(known(tmp_path, range(600))) > 500


def test_what_others_write_meanwhile_is_found(tmp_path: Path, at_once: None) -> None:
    memo = SourceMemo(str(tmp_path))
    other = SourceMemo(str(tmp_path))
    for n in range(20):
        assert memo.get(k(n)) is None
        other.put(k(n), c(n))
        assert memo.get(k(n)) == c(n)


def test_the_folder_is_not_looked_at_for_everything_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, system = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda *a: looked.append(a) or system(*a))
    write(tmp_path, 1)
    looked.clear()
    memo = SourceMemo(str(tmp_path))
    for n in range(1000):
        memo.get(k(n))
    assert len(looked) == 1


def test_many_entries_are_found_as_they_are_added(tmp_path: Path, at_once: None) -> None:
    memo = SourceMemo(str(tmp_path))
    for i in range(0, 1000, 40):
        write(tmp_path, *range(i, i + 40))
        assert all(memo.get(k(n)) == c(n) for n in range(i + 40))


# Damage


@pytest.mark.parametrize("length", [0, 1, LINE - 1, LINE + 1, LINE * 50, LINE * 50 + 17, LINE * 100 - 1])
def test_a_torn_file_gives_what_is_whole(tmp_path: Path, length: int) -> None:
    file = write(tmp_path, *range(100))
    os.truncate(file, length)
    assert known(tmp_path, range(100)) == list(range(length // LINE))


def test_garbled_entries_are_ignored(tmp_path: Path) -> None:
    file = write(tmp_path, *range(100))
    for at in range(0, 100, 3):
        data = bytearray(file.read_bytes())
        data[at * LINE + at % (LINE - 1)] ^= 0x10
        file.write_bytes(data)
    assert known(tmp_path, range(100)) == [n for n in range(100) if n % 3]


@pytest.mark.parametrize("data", [b"\0" * 4000, b"\xff" * 4000, b"text\n" * 1000])
def test_a_file_of_another_kind_with_such_a_name_is_harmless(tmp_path: Path, data: bytes) -> None:
    write(tmp_path, 1).write_bytes(data)
    write(tmp_path, 2)
    assert known(tmp_path, range(3)) == [2]


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "socket"])
def test_other_than_regular_files_are_not_opened(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    write(tmp_path, 1).rename(secret)
    name = tmp_path / ".index" / "01234567-1.2.3.0.sources"
    {
        "pipe": lambda: os.mkfifo(name),
        "link": lambda: name.symlink_to(secret),
        "folder": name.mkdir,
        "socket": lambda: os.mknod(name, 0o140600),
    }[kind]()
    write(tmp_path, 2)
    assert known(tmp_path, range(3)) == [2]


# Where it cannot be kept


def _nothing_there(folder: Path) -> None:
    folder.rmdir()


def _a_file_instead(folder: Path) -> None:
    (folder / ".index").write_bytes(b"mine")


def _a_link_instead(folder: Path) -> None:
    (folder.parent / "theirs").mkdir()
    (folder / ".index").symlink_to(folder.parent / "theirs")


@pytest.mark.parametrize("spoil", [_nothing_there, _a_file_instead, _a_link_instead])
def test_without_a_usable_folder_nothing_fails_and_nothing_is_touched(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    spoil(folder)
    memo = SourceMemo(str(folder))
    memo.put(k(1), c(1))
    memo.flush()
    assert known(folder, range(2)) == []
    memo.tidy()
    assert not (tmp_path / "theirs").exists() or not list((tmp_path / "theirs").iterdir())
    assert not (folder / ".index").is_file() or (folder / ".index").read_bytes() == b"mine"


@pytest.mark.parametrize("fails", ["mkdir", "open", "write", "listdir", "fstat"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
def test_disk_errors_are_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, error: int, at_once: None
) -> None:
    write(tmp_path, 1)
    memo = SourceMemo(str(tmp_path))

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as during:
        during.setattr(os, fails, fail)
        memo.get(k(1))
        memo.put(k(2), c(2))
        memo.flush()
    memo.put(k(3), c(3))
    memo.flush()
    assert {1, 3} <= set(known(tmp_path, range(4)))


def test_what_is_written_after_the_disk_was_full_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memo = SourceMemo(str(tmp_path))
    system = os.write
    with monkeypatch.context() as during:
        during.setattr(os, "write", lambda fd, data: system(fd, data[:17]))
        memo.put(k(1), c(1))
        memo.flush()
    memo.put(k(2), c(2))
    memo.flush()
    assert known(tmp_path, range(3)) == [2]


# Merging


def ended(folder: Path, numbers: list[list[int]], began: int) -> None:
    """Files of processes that ended long ago, one for each list."""
    (folder / ".index").mkdir(exist_ok=True)
    for i, of_one in enumerate(numbers, began):
        place, pid, _ = this_process().split(".")
        file = folder / ".index" / f"{place}.{pid}.1.{i}.sources"
        file.write_bytes(b"".join(line((k(n) + c(n)).hex().encode()) for n in of_one))
        os.utime(file, (10**9 + i, 10**9 + i))


def end(file: Path, n: int) -> None:
    """Makes a file one of a process that ended."""
    place, pid, _, _, kind = file.name.removeprefix(".").split(".")
    file.rename(file.with_name(("." if file.name.startswith(".") else "") + f"{place}.{pid}.1.{n}.{kind}"))


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A folder with files of 80 processes that ended long ago, with one of another kind, and one that still writes."""
    ended(tmp_path, [[2 * n, 2 * n + 1] for n in range(80)], 100)
    (tmp_path / ".index" / "host-1-1.jsonl").write_text("another's")
    os.utime(tmp_path / ".index" / "host-1-1.jsonl", (0, 0))
    (tmp_path / ".index" / f"{this_process()}.1000.sources").write_bytes(line((k(160) + c(160)).hex().encode()))
    return tmp_path


def test_many_files_become_few_and_nothing_is_lost(many: Path) -> None:
    running = SourceMemo(str(many))
    assert running.get(k(0)) == c(0)
    SourceMemo(str(many)).put(k(161), c(161))
    SourceMemo(str(many)).tidy()
    names = [p.name for p in (many / ".index").iterdir()]
    assert len(names) < 10
    assert known(many, range(162)) == list(range(162))
    assert (many / ".index" / "host-1-1.jsonl").read_text() == "another's"
    assert all(running.get(k(n)) == c(n) for n in range(160))


def test_a_writer_whose_file_was_merged_writes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = SourceMemo(str(tmp_path))
    asleep.put(k(500), c(500))
    ended(tmp_path, [[n] for n in range(80)], 100)
    (own,) = (tmp_path / ".index").glob(f"{this_process()}.*")
    foreign = own.with_name("01234567-1.2.3.0.sources")  # as processes of other hosts see it
    own.rename(foreign)
    os.utime(foreign, (0, 0))
    monkeypatch.setattr(asleep._notes, "_own_file", lambda: foreign.name)
    SourceMemo(str(tmp_path)).put(k(80), c(80))
    SourceMemo(str(tmp_path)).tidy()
    assert not foreign.exists()
    asleep.put(k(501), c(501))
    asleep.flush()
    assert known(tmp_path, range(600)) == [*range(81), 500, 501]


def test_merging_what_was_merged_before_keeps_it(tmp_path: Path) -> None:
    for n in range(2):  # the same findings by other processes
        ended(tmp_path, [[1, 2]] * 80, 100)
        SourceMemo(str(tmp_path)).put(k(3 + n), c(3 + n))
        SourceMemo(str(tmp_path)).tidy()
        for i, path in enumerate(list((tmp_path / ".index").iterdir())):
            end(path, 1000 + i)
    assert known(tmp_path, range(5)) == [1, 2, 3, 4]


@pytest.mark.parametrize("step", range(83))
def test_a_merge_that_is_killed_at_any_step_loses_nothing(
    many: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    class Killed(BaseException):
        pass

    steps = iter(range(1000))

    def counted(system: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if next(steps) == step:
                raise Killed
            return system(*arguments, **more)

        return call

    with monkeypatch.context() as during:
        for name in ("rename", "unlink"):
            during.setattr(os, name, counted(getattr(os, name)))
        with contextlib.suppress(Killed):
            SourceMemo(str(many)).tidy()
    assert known(many, range(160)) == list(range(160))
    for i, path in enumerate([p for p in (many / ".index").iterdir() if p.suffix != ".jsonl"]):
        end(path, 1000 + i)
    ended(many, [[200 + n] for n in range(80)], 300)
    SourceMemo(str(many)).tidy()  # and the next makes it good
    assert len(list((many / ".index").iterdir())) < 10
    assert known(many, range(160)) == list(range(160))


def test_too_many_bytes_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NOTE_BYTES", LINE * 50)
    monkeypatch.setattr(limits, "NOTE_UNMERGED_BYTES", LINE)
    ended(tmp_path, [[n] for n in range(80)], 100)
    SourceMemo(str(tmp_path)).tidy()
    assert known(tmp_path, range(81)) == list(range(30, 80))


def test_a_file_whose_mtime_was_set_back_is_as_young_as_its_last_change(tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(b"as from `cp -p`")
    os.utime(path, (0, 0))
    fd = os.open(path, os.O_RDONLY)
    try:
        assert not Ages().is_old(str(path), b"state", os.fstat(fd), fd)
    finally:
        os.close(fd)
