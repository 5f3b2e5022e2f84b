"""A source is identified by its content: every edit makes another source, nothing else does; no file is read twice."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import warnings
from collections import UserList, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from monai_gds import limits
from monai_gds.errors import CacheWarning, HashingError
from monai_gds.keys import source_memo
from monai_gds.keys.source_names import candidates, files_named, looks_like_path
from monai_gds.keys.sources import Identity, Sources
from tests.loopdisk import loop_disk

MIB = 1 << 20


@pytest.fixture
def sources() -> Sources:
    return Sources("content", None)


@pytest.fixture
def no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock so fine that what was just written may be remembered, which otherwise takes two seconds."""
    monkeypatch.setattr(source_memo, "_TICK", -(10**9))


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    path = tmp_path / "ct.nii"
    path.write_bytes(os.urandom(MIB))
    return path


def fresh(path: Path) -> Identity | None:
    """The identity as a process finds it that remembers nothing."""
    return Sources("content", None).identity(str(path))


def bytes_read(look: Callable[[], Any]) -> int:
    """How many bytes this process reads from files meanwhile."""

    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = count()
    look()
    read = count() - before
    return read if read > 250 else 0  # the file that says so is read too


def in_another_process(code: str, *arguments: str) -> str:
    code = "import sys, os; from monai_gds.keys.sources import Sources\n" + code
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# A file is its content


def test_identity_is_size_and_hash_of_the_content(sources: Sources, volume: Path) -> None:
    content = xxhash.xxh3_128_hexdigest(volume.read_bytes())
    assert sources.identity(str(volume)) == (MIB, content)


@pytest.mark.parametrize("size", [0, 1, 512 << 10, (512 << 10) + 1, 3 * MIB - 7])
def test_files_of_any_size_are_hashed_to_their_end(sources: Sources, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    assert sources.identity(str(tmp_path / "f")) == (size, xxhash.xxh3_128_hexdigest(data))


def _hard_link(volume: Path) -> Path:
    os.link(volume, volume.parent / "linked.nii")
    return volume.parent / "linked.nii"


def _moved(volume: Path) -> Path:
    (volume.parent / "elsewhere").mkdir()
    return volume.rename(volume.parent / "elsewhere" / "other.nii")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p: os.utime(p), id="touch"),
        pytest.param(lambda p: os.utime(p, ns=(0, 0)), id="an old mtime"),
        pytest.param(lambda p: p.chmod(0o400), id="chmod"),
        pytest.param(lambda p: p.write_bytes(p.read_bytes()), id="written again"),
        pytest.param(_hard_link, id="hard link"),
        pytest.param(_moved, id="mv"),
        pytest.param(lambda p: shutil.copy(p, p.parent / "copy.nii"), id="cp"),
        pytest.param(lambda p: shutil.copy2(p, p.parent / "copy.nii"), id="cp -p"),
        pytest.param(lambda p: (p.parent / "l").symlink_to(p) or p.parent / "l", id="symlink"),
    ],
)
def test_the_same_content_is_the_same_source(
    sources: Sources, no_ticks: None, volume: Path, change: Callable[[Path], Any]
) -> None:
    before = sources.identity(str(volume))
    now = change(volume)
    assert sources.identity(str(now or volume) if isinstance(now, (Path, str)) else str(volume)) == before


def _copied_over(volume: Path, other: Path) -> None:
    subprocess.run(["cp", "-p", other, volume], check=True)


def _synchronised(volume: Path, other: Path) -> None:
    """As rsync -t: another file, given the times, and renamed."""
    partial = volume.parent / ".ct.nii.Xa81"
    partial.write_bytes(other.read_bytes())
    st = other.stat()
    os.utime(partial, ns=(st.st_atime_ns, st.st_mtime_ns))
    partial.rename(volume)


def _unpacked(volume: Path, other: Path) -> None:
    archive = volume.parent / "a.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(other, volume.name)
    with tarfile.open(archive) as tar:
        tar.extractall(volume.parent, filter="tar")


def _in_place(volume: Path, other: Path) -> None:
    st = volume.stat()
    with volume.open("r+b") as f:
        f.write(other.read_bytes())
    os.utime(volume, ns=(st.st_atime_ns, st.st_mtime_ns))


@pytest.mark.parametrize("replace", [_copied_over, _synchronised, _unpacked, _in_place])
def test_other_content_with_size_and_mtime_kept_is_another_source(
    sources: Sources, no_ticks: None, volume: Path, tmp_path: Path, replace: Callable[[Path, Path], None]
) -> None:
    other = tmp_path / "other.nii"
    other.write_bytes(os.urandom(MIB))
    for path in (volume, other):
        os.utime(path, (10**9, 10**9))
    before = sources.identity(str(volume))
    replace(volume, other)
    assert (volume.stat().st_size, volume.stat().st_mtime) == (MIB, 10**9)
    assert sources.identity(str(volume)) == sources.identity(str(other)) != before


@pytest.mark.parametrize("clock", ["local", "of a server", "of a server, ours an hour ahead"])
def test_an_edit_within_a_tick_at_the_same_size_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    with loop_disk(tmp_path, make=("-I", "128")) as disk:  # its inodes hold whole seconds only
        if clock != "local":
            monkeypatch.setattr(source_memo, "LOCAL", frozenset())
        if "ours" in clock:
            now = time.time_ns
            monkeypatch.setattr(source_memo.time, "time_ns", lambda: now() + 3600 * 10**9)
        sources = Sources("content", str(disk.folder))
        path = disk.folder / "ct.nii"
        path.write_bytes(b"-%07d" % 0)
        unchanged = 0
        before = sources.identity(str(path))
        for i in range(24):
            stat = path.stat()
            with path.open("r+b") as f:
                f.write(b"-%07d" % (i + 1))
            unchanged += (stat.st_mtime_ns, stat.st_ctime_ns) == (path.stat().st_mtime_ns, path.stat().st_ctime_ns)
            now_it_is = sources.identity(str(path))
            assert now_it_is != before, f"edit {i}"
            before = now_it_is
            time.sleep(0.055)  # in all, more than a second
        assert unchanged > 12  # or this has tested nothing


# When a source is read


class Clocks:
    """Those of :mod:`time`, as seconds later as a test says that have passed."""

    def __init__(self) -> None:
        self.passed = self.wrong = 0.0  # the second only by the clock that tells the time

    def time_ns(self) -> int:
        return time.time_ns() + int((self.passed + self.wrong) * 10**9)

    def monotonic(self) -> float:
        return time.monotonic() + self.passed


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    monkeypatch.setattr(source_memo, "time", clocks := Clocks())
    return clocks


def test_an_old_file_is_read_once(sources: Sources, volume: Path, clocks: Clocks) -> None:
    clocks.passed = 2.1
    assert bytes_read(lambda: sources.identity(str(volume))) >= MIB
    assert bytes_read(lambda: sources.identity(str(volume))) == 0
    volume.chmod(0o600)
    assert bytes_read(lambda: sources.identity(str(volume))) >= MIB


def test_a_young_file_is_read_at_each_look_until_it_is_old(sources: Sources, volume: Path, clocks: Clocks) -> None:
    for _ in range(3):
        assert bytes_read(lambda: sources.identity(str(volume))) >= MIB
    clocks.passed = 2.1
    assert bytes_read(lambda: sources.identity(str(volume))) >= MIB  # the earlier hashes were of a young file
    assert bytes_read(lambda: sources.identity(str(volume))) == 0


@pytest.mark.parametrize("clock", [0, 3600, -3600, -(10**9)])
@pytest.mark.parametrize("local", [True, False])
def test_a_file_is_remembered_whatever_its_times(
    volume: Path, monkeypatch: pytest.MonkeyPatch, clocks: Clocks, clock: int, local: bool
) -> None:
    if not local:
        monkeypatch.setattr(source_memo, "LOCAL", frozenset())
    clocks.wrong = clock
    os.utime(volume, (4 * 10**9, 4 * 10**9))  # in 2096
    sources = Sources("content", None)
    sources.identity(str(volume))
    clocks.passed = 2.1
    sources.identity(str(volume))
    assert bytes_read(lambda: sources.identity(str(volume))) == 0


def test_files_of_a_server_that_look_a_day_old_are_read_once(
    sources: Sources, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two clocks is wrong. Younger ones are read again by each process."""
    monkeypatch.setattr(source_memo, "LOCAL", frozenset())
    now = time.time_ns
    for hours, read in ((23, MIB), (25, MIB), (25, 0)):
        monkeypatch.setattr(source_memo.time, "time_ns", lambda ahead=hours * 3600 * 10**9: now() + ahead)
        assert read <= bytes_read(lambda: sources.identity(str(volume))) < read + MIB


def test_a_file_that_changes_while_it_is_hashed_is_hashed_again(
    sources: Sources, no_ticks: None, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, edits = os.preadv, [b"first edit", b"second edit"]

    def edited_meanwhile(*arguments: Any) -> int:
        if edits:
            volume.write_bytes(edits.pop())
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", edited_meanwhile)
    assert sources.identity(str(volume)) == (10, xxhash.xxh3_128_hexdigest(b"first edit"))


def test_a_file_that_keeps_changing_is_not_remembered(
    sources: Sources, no_ticks: None, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv

    def edited_meanwhile(*arguments: Any) -> int:
        n = read(*arguments)
        os.utime(volume)
        return n

    with monkeypatch.context() as during:
        during.setattr(os, "preadv", edited_meanwhile)
        sources.identity(str(volume))
    assert bytes_read(lambda: sources.identity(str(volume))) >= MIB


def test_hashing_a_file_that_grows_as_fast_as_it_is_read_ends(
    sources: Sources, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv

    def growing(*arguments: Any) -> int:
        with volume.open("ab") as f:
            f.write(bytes(MIB))
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", growing)
    assert sources.identity(str(volume)) is not None


def test_threads_hash_at_the_same_time(tmp_path: Path) -> None:
    sources, found = Sources("content", None), {}
    data = {f"{i}.npy": os.urandom(3 * MIB + i) for i in range(8)}
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)

    def look(name: str) -> None:
        found[name] = sources.identity(str(tmp_path / name))

    threads = [threading.Thread(target=look, args=(name,)) for name in data]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: (len(c), xxhash.xxh3_128_hexdigest(c)) for name, c in data.items()}


# What is no source, and what cannot be read


@pytest.mark.parametrize("path", ["", "\0", "x" * 10_000, "/" * 5000, "\ud800", "a\nb", "/no/such/file", "/dev/null"])
@pytest.mark.parametrize("policy", ["content", "stat", "once"])
def test_a_missing_file_is_not_a_source(path: str, policy: Any) -> None:
    if path != "/" * 5000:  # which is too long a name
        assert Sources(policy, None).identity(path) is None


def test_pipes_and_sockets_are_left_alone(sources: Sources, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert sources.identity(str(tmp_path / "pipe")) is None
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as s:
        s.bind(f"{short}/s")
        assert sources.identity(f"{short}/s") is None


def test_a_pipe_that_takes_a_files_place_is_not_waited_for(
    sources: Sources, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = os.open

    def replaced(path: Any, *arguments: Any, **more: Any) -> int:
        if path == str(volume):
            volume.unlink()
            os.mkfifo(volume)
        return system(path, *arguments, **more)

    monkeypatch.setattr(os, "open", replaced)
    assert sources.identity(str(volume)) is None


@pytest.mark.parametrize("fails", ["open", "preadv"])
def test_an_unreadable_file_is_identified_by_its_times(
    sources: Sources, volume: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def refuse(path: Any, *_: Any, **__: Any) -> int:
        raise OSError(errno.EACCES if fails == "open" else errno.EIO, "refused", path)

    with monkeypatch.context() as during:
        during.setattr(os, fails, refuse)
        seen = [sources.identity(str(volume)) for _ in range(2)]
        os.utime(volume, ns=(0, 0))
        seen.append(sources.identity(str(volume)))
    readable = sources.identity(str(volume))
    assert None not in seen
    assert seen[0] == seen[1]
    assert len({*seen, readable}) == 3


# Folders


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """study/series/slice, three levels deep, with a hidden file."""
    study = tmp_path / "study"
    for name in ("s1/1.dcm", "s1/2.dcm", "s2/c/0/0", "s2/.zarray"):
        (study / name).parent.mkdir(parents=True, exist_ok=True)
        (study / name).write_bytes(name.encode().ljust(100))
    return study


def _replace(path: Path, data: bytes) -> None:
    """Other content of equal size and mtime."""
    st = path.stat()
    path.write_bytes(data.ljust(st.st_size))
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda s: _replace(s / "s1/2.dcm", b"edited"), id="a slice edited"),
        pytest.param(lambda s: _replace(s / "s2/c/0/0", b"edited"), id="a chunk three levels down edited"),
        pytest.param(lambda s: _replace(s / "s2/.zarray", b"edited"), id="a hidden file edited"),
        pytest.param(lambda s: (s / "s2/c/0/1").write_bytes(b""), id="a chunk more"),
        pytest.param(lambda s: (s / "s2/c/0/0").unlink(), id="a chunk less"),
        pytest.param(lambda s: (s / "s1/2.dcm").rename(s / "s1/3.dcm"), id="a slice renamed"),
        pytest.param(lambda s: (s / "s1/2.dcm").rename(s / "s2/2.dcm"), id="a slice in another series"),
        pytest.param(lambda s: (s / "s1").rename(s / "s0"), id="a series renamed"),
        pytest.param(lambda s: (s / "s3").mkdir(), id="an empty folder more"),
        pytest.param(lambda s: (s / "l").symlink_to(s / "s1/1.dcm"), id="a link more"),
        pytest.param(lambda s: (s / "l").symlink_to("nowhere"), id="a dead link more"),
        pytest.param(lambda s: os.mkfifo(s / "pipe"), id="a pipe more"),
        pytest.param(lambda s: (s / "s1/1.dcm").write_bytes(b""), id="a slice emptied"),
    ],
)
def test_a_folder_changes_with_what_is_in_it_on_any_level(
    sources: Sources, no_ticks: None, study: Path, change: Callable[[Path], Any]
) -> None:
    before = sources.identity(str(study))
    change(study)
    now = sources.identity(str(study))
    assert before is not None
    assert now == fresh(study) != before


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda s: [os.utime(p, ns=(0, 0)) for p in s.rglob("*")], id="touch"),
        pytest.param(lambda s: [p.chmod(0o700) for p in s.rglob("*")], id="chmod"),
        pytest.param(lambda s: shutil.copytree(s, s.parent / "copy"), id="cp -r"),
        pytest.param(lambda s: s.rename(s.parent / "moved"), id="mv"),
        pytest.param(lambda s: (s.parent / "l").symlink_to(s) or s.parent / "l", id="behind a link"),
        pytest.param(lambda s: f"{s}/", id="named with a slash"),
        pytest.param(lambda s: f"{s}/../{s.name}", id="named in a roundabout way"),
        pytest.param(lambda s: os.link(s / "s1/1.dcm", s.parent / "1"), id="a file of it linked"),
    ],
)
def test_the_same_folder_elsewhere_is_the_same_source(
    sources: Sources, no_ticks: None, study: Path, change: Callable[[Path], Any]
) -> None:
    before = sources.identity(str(study))
    now = change(study)
    assert sources.identity(str(now if isinstance(now, (Path, str)) else study)) == before


def test_a_folders_size_is_that_of_its_files(sources: Sources, study: Path) -> None:
    assert sources.identity(str(study)).size == 400  # type: ignore[union-attr]


def test_a_cache_in_a_source_folder_is_left_out(no_ticks: None, study: Path) -> None:
    (study / "cache").mkdir()
    sources = Sources("content", str(study / "cache"))
    before = sources.identity(str(study))
    (study / "cache/record").write_bytes(b"record")
    assert sources.identity(str(study)) == before
    (study / "s1/1.dcm").write_bytes(b"other")
    assert sources.identity(str(study)) != before


def test_swapped_slices_are_another_folder(sources: Sources, study: Path) -> None:
    before = sources.identity(str(study))
    one, two = study / "s1/1.dcm", study / "s1/2.dcm"
    one.rename(study / "t")
    two.rename(one)
    (study / "t").rename(two)
    assert sources.identity(str(study)) != before


_NAMES = st.sampled_from(["a", "b", "ab", ".a", "a.b", "é", os.fsdecode(b"\xff"), "a\n", "A", "10", "9"])
_TREES = st.dictionaries(
    st.lists(_NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=3), min_size=1, max_size=8
)


def _plant(folder: Path, tree: dict[str, bytes], order: list[str]) -> bool:
    for name in order:
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(tree[name])
        except OSError:  # one name is another's folder
            return False
    return True


@given(tree=_TREES, data=st.data())
def test_the_order_in_which_a_folder_was_filled_does_not_matter(tree: dict[str, bytes], data: st.DataObject) -> None:
    order = data.draw(st.permutations(sorted(tree)))
    with tempfile.TemporaryDirectory() as top:
        a, b = Path(top, "a"), Path(top, "b")
        a.mkdir()
        b.mkdir()
        if _plant(a, tree, sorted(tree)) and _plant(b, tree, order):
            assert fresh(a) == fresh(b)


def test_the_order_in_which_a_file_system_lists_does_not_matter(
    study: Path, monkeypatch: pytest.MonkeyPatch, no_ticks: None, tmp_path: Path
) -> None:
    found, system = Sources("content", str(tmp_path)), os.scandir
    before = found.identity(str(study))

    @contextlib.contextmanager
    def reversed_scandir(folder: Any) -> Iterator[Iterator[os.DirEntry[str]]]:
        with system(folder) as entries:
            yield reversed(list(entries))

    monkeypatch.setattr(os, "scandir", reversed_scandir)
    assert fresh(study) == before
    assert bytes_read(lambda: found.identity(str(study))) == 0


@given(trees=st.lists(_TREES, min_size=2, max_size=2, unique_by=lambda t: tuple(sorted(t.items()))))
def test_different_folders_are_different_sources(trees: list[dict[str, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as top:
        found = []
        for i, tree in enumerate(trees):
            folder = Path(top, str(i))
            folder.mkdir()
            if not _plant(folder, tree, sorted(tree)):
                return
            found.append(fresh(folder))
        assert found[0] != found[1]


def test_listing_loops_of_links_ends(sources: Sources, study: Path) -> None:
    (study / "s1" / "up").symlink_to(study)
    (study / "s1" / "across").symlink_to(study / "s2")
    (study / "s2" / "across").symlink_to(study / "s1")
    (study / "self").symlink_to("self")
    before = sources.identity(str(study))
    _replace(study / "s2/c/0/0", b"edited")
    assert before != sources.identity(str(study)) == fresh(study)


def test_a_link_in_a_folder_is_what_it_leads_to(sources: Sources, no_ticks: None, study: Path, volume: Path) -> None:
    (study / "annex").symlink_to(volume)
    before = sources.identity(str(study))
    _replace(volume, b"edited")
    after = sources.identity(str(study))
    (study / "annex").unlink()
    shutil.copy(volume, study / "annex")
    assert before != after == sources.identity(str(study))


def test_what_vanishes_from_a_folder_meanwhile_hides_nothing(
    sources: Sources, study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv

    def vanishing(*arguments: Any) -> int:
        (study / "s2/c/0/0").unlink(missing_ok=True)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", vanishing)
    assert sources.identity(str(study)) == fresh(study)


def test_a_subfolder_that_cannot_be_listed_hides_nothing(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = os.open

    def refuse(path: Any, *arguments: Any, **more: Any) -> int:
        if str(path).endswith("/s2/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return system(path, *arguments, **more)

    readable = fresh(study)
    monkeypatch.setattr(os, "open", refuse)
    before = fresh(study)
    _replace(study / "s1/1.dcm", b"edited")
    assert len({readable, before, fresh(study)}) == 3


def test_only_the_changed_files_of_a_folder_are_read(sources: Sources, no_ticks: None, tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i}.dcm").write_bytes(os.urandom(MIB))
    assert bytes_read(lambda: sources.identity(str(tmp_path))) >= 20 * MIB
    assert bytes_read(lambda: sources.identity(str(tmp_path))) == 0
    (tmp_path / "7.dcm").write_bytes(os.urandom(MIB))
    assert MIB <= bytes_read(lambda: sources.identity(str(tmp_path))) < 2 * MIB


def test_beyond_the_limit_sources_are_remembered_and_only_the_files_in_folders_are_not(
    sources: Sources, no_ticks: None, study: Path, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KNOWN_FILES", 0)
    named = [str(study), str(volume)]
    before = [sources.identity(path) for path in named]
    assert bytes_read(lambda: [sources.identity(path) for path in named]) == 0
    assert [sources.identity(path) for path in named] == before


def test_a_folder_of_young_files_is_not_trusted(sources: Sources, study: Path, clocks: Clocks) -> None:
    assert bytes_read(lambda: sources.identity(str(study))) >= 400
    assert bytes_read(lambda: sources.identity(str(study))) >= 400
    clocks.passed = 2.1
    sources.identity(str(study))
    assert bytes_read(lambda: sources.identity(str(study))) == 0


def test_a_folder_with_too_many_entries_counts_by_name_and_is_reported_once(
    sources: Sources, study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FOLDER_ENTRIES", 5)
    with pytest.warns(CacheWarning, match=r"study.* more than 5 entries.*name its files or subfolders"):
        before = sources.identity(str(study))
    _replace(study / "s1/1.dcm", b"edited")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sources.identity(str(study)) == before != sources.identity(str(study / "s1"))


def test_folders_can_be_left_out(sources: Sources, study: Path) -> None:
    assert sources.identity(str(study), folders=False) is None
    assert sources.identity(str(study / "s1/1.dcm"), folders=False) is not None


# The other policies


def test_stat_takes_size_and_mtime_and_reads_nothing(volume: Path, study: Path) -> None:
    sources = Sources("stat", None)
    for path in (volume, study):
        file = path if path.is_file() else path / "s2/c/0/0"
        assert bytes_read(lambda path=path: sources.identity(str(path))) == 0
        before = sources.identity(str(path))
        _replace(file, b"edited")
        assert sources.identity(str(path)) == before
        os.utime(file, ns=(0, 0))
        older = sources.identity(str(path))
        file.write_bytes(b"shorter")
        os.utime(file, ns=(0, 0))
        assert len({before, older, sources.identity(str(path))}) == 3
    assert sources.identity(str(volume)) == (7, "stat:0")


def test_once_looks_once(volume: Path, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources("once", None)
    found = [sources.identity(str(path)) for path in (volume, study)]
    assert found == [fresh(volume), fresh(study)]

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("looked again")

    for name in ("stat", "open", "scandir", "getcwd"):
        monkeypatch.setattr(os, name, refuse)
    assert [sources.identity(str(path)) for path in (volume, study)] == found


def test_once_finds_a_file_that_comes_later(tmp_path: Path) -> None:
    sources = Sources("once", None)
    assert sources.identity(str(tmp_path / "ct.nii")) is None
    (tmp_path / "ct.nii").write_bytes(b"1")
    assert sources.identity(str(tmp_path / "ct.nii")) is not None


def test_a_callable_identifies_sources(volume: Path) -> None:
    told: dict[str, Any] = {"s3://bucket/ct.nii": "etag-1", str(volume): b"\x01\xff", "none": None, "wrong": 3}
    sources = Sources(told.__getitem__, None)
    assert sources.identity("s3://bucket/ct.nii") == (-1, "etag-1")
    assert sources.identity(str(volume)) == (-1, "01ff")
    assert sources.identity("none") is None
    with pytest.raises(HashingError, match=r"sources returned a int for 'wrong'.*str, bytes or None"):
        sources.identity("wrong")


def test_none_has_no_sources(volume: Path) -> None:
    assert Sources(None, None).identity(str(volume)) is None


# The working directory, other processes


def test_a_relative_path_is_looked_up_in_the_working_directory(
    sources: Sources, no_ticks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "ct.nii").write_bytes(name.encode())
        monkeypatch.chdir(tmp_path / name)
        assert sources.identity("ct.nii") == fresh(tmp_path / name / "ct.nii")


def test_a_process_that_has_the_cache_folder_does_not_read_what_another_read(
    no_ticks: None, volume: Path, study: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    sources = Sources("content", str(cache))
    found = [sources.identity(str(path)) for path in (volume, study)]
    sources._memo.flush()
    code = """
from monai_gds.keys import sources
def refuse(*_): raise AssertionError("read again")
sources.os.preadv = refuse
print([tuple(Sources("content", sys.argv[1]).identity(p)) for p in sys.argv[2:]])
"""
    assert in_another_process(code, str(cache), str(volume), str(study)) == str([tuple(f) for f in found if f])


def test_processes_learn_from_one_another_while_they_run(no_ticks: None, tmp_path: Path, clocks: Clocks) -> None:
    paths = [tmp_path / f"{i}.npy" for i in range(2)]
    for path in paths:
        path.write_bytes(os.urandom(MIB))
    sources = Sources("content", str(tmp_path))
    sources.identity(str(paths[0]))  # the memo was looked at, and held nothing
    code = """
from monai_gds.keys import source_memo
source_memo._TICK = -10**9
Sources("content", sys.argv[1]).identity(sys.argv[2])"""
    in_another_process(code, str(tmp_path), str(paths[1]))
    clocks.passed = 1.1
    assert bytes_read(lambda: sources.identity(str(paths[1]))) < MIB


def test_a_forked_child_knows_what_its_parent_knew_and_writes_its_own(no_ticks: None, tmp_path: Path) -> None:
    known, late, new = (tmp_path / f"{name}.npy" for name in ("known", "late", "new"))
    for path in (known, late, new):
        path.write_bytes(os.urandom(MIB))
    sources = Sources("content", str(tmp_path))
    sources.identity(str(known))
    sources.identity(str(late))  # which waits to be written
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            again = bytes_read(lambda: sources.identity(str(known)))
            sources.identity(str(new))
            sources._memo.flush()
            code = 0 if again == 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    sources._memo.flush()
    assert sorted(p.read_bytes().count(b"\n") for p in (tmp_path / ".index").iterdir()) == [1, 2]
    other = Sources("content", str(tmp_path))
    assert bytes_read(lambda: [other.identity(str(p)) for p in (known, late, new)]) < MIB


def test_a_fork_in_the_middle_of_another_threads_look_locks_nobody_out(tmp_path: Path, volume: Path) -> None:
    sources = Sources("content", str(tmp_path))
    with sources._memo._own().lock:  # as a thread holds it that reads the memo
        pid = os.fork()
        if pid == 0:
            os._exit(0 if sources.identity(str(volume)) is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# Which strings are sources


class Pointer(os.PathLike[str]):
    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/ct", True),
        ("data/ct", True),
        ("../ct", True),
        ("ct.nii.gz", True),
        ("1.2.840.113619.dcm", True),
        ("a folder/scan of 3 May.npy", True),
        ("model.safetensors", True),
        ("ÄÖ.nii", True),
        ("train", False),
        ("", False),
        (".nii", False),
        ("  .nii", False),
        ("a sentence.", False),
        ("ct.averylongsuffix", False),
        ("ct.n i", False),
        ("ct.nii\n", False),
        ("a/b\0c", False),
        ("/" + "x" * 5000, False),
    ],
)
def test_what_looks_like_a_path(text: str, expected: bool) -> None:
    assert looks_like_path(text) is expected


@dataclass(slots=True)
class Case:
    """Refers back to itself, as parts of a tree do."""

    path: str
    case: Any = None

    def __post_init__(self) -> None:
        self.case = [self]


@pytest.mark.parametrize(
    ("item", "loaded", "expected"),
    [
        pytest.param({"split": "train"}, (), [], id="a word"),
        pytest.param({"split": "train"}, {"image"}, [], id="a word beside what is loaded"),
        pytest.param({"image": "train"}, {"image"}, [("train", True)], id="a word that is loaded"),
        pytest.param({"image": "ct.nii"}, (), [("ct.nii", False)], id="a suffix: no folder"),
        pytest.param({"image": "d/ct"}, (), [("d/ct", True)], id="a separator"),
        pytest.param({"a": "x.nii", "image": ["x.nii"]}, {"image"}, [("x.nii", True)], id="named twice"),
        pytest.param({"image": {"t1": ("ct",)}}, ["image"], [("ct", True)], id="nested below what is loaded"),
        pytest.param({"meta": {"image": "train"}}, {"image"}, [], id="the same key deeper down"),
        pytest.param([{"image": "ct"}, {"n": "b"}], {"image"}, [("ct", True)], id="an item that is a list"),
        pytest.param("ct", "all", [("ct", True)], id="an item that is a string"),
        pytest.param("ct", (), [], id="a string that nobody loads"),
        pytest.param({"x": Path("series")}, (), [("series", True)], id="a Path"),
        pytest.param({"x": Pointer("series")}, (), [("series", True)], id="a path of another library"),
        pytest.param({"x": {"c.nii", "a.nii", "b.nii"}}, (), [(f"{c}.nii", False) for c in "abc"], id="a set"),
        pytest.param({"x": np.array(["a.nii", "b"])}, (), [("a.nii", False)], id="an array of strings"),
        pytest.param({"x": np.array(["a.nii", 3], object)}, (), [("a.nii", False)], id="an array of objects"),
        pytest.param({"x": Case("a.nii")}, (), [("a.nii", False)], id="an object of the user's"),
        pytest.param(Case("d/ct"), (), [("d/ct", True)], id="an item that is one"),
        pytest.param(SimpleNamespace(x="a.nii"), (), [("a.nii", False)], id="a namespace"),
        pytest.param({"x": deque(["a.nii"])}, (), [("a.nii", False)], id="a deque"),
        pytest.param({"x": UserList(["a.nii"])}, (), [("a.nii", False)], id="another kind of list"),
        pytest.param({"x": b"a.nii"}, (), [("a.nii", False)], id="bytes"),
        pytest.param({"x": np.array([b"a.nii"])}, (), [("a.nii", False)], id="an array of bytes"),
        pytest.param({"x": np.zeros(3), "y": 3, "z": range(9)}, "all", [], id="nothing of that kind"),
        pytest.param({"a.nii": 1}, "all", [], id="a key"),
        pytest.param({"x": "\0.nii", "y": "x" * 5000 + ".nii"}, "all", [], id="no name of a file"),
    ],
)
def test_candidates(item: Any, loaded: Any, expected: list[tuple[str, bool]]) -> None:
    assert candidates(item, loaded) == expected


class Linked:
    """An object of a user's that refers to others."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.others: list[Linked] = []


@pytest.mark.parametrize(
    "pair",
    [
        ("ct.hdr", "ct.img", "ct.mat"), ("ct.hdr.gz", "ct.img.gz", "ct.mat.gz"),
        ("ct.hdr.bz2", "ct.img.bz2", "ct.mat.bz2"), ("CT.PAR", "CT.REC"), ("ct+orig.HEAD", "ct+orig.BRIK"),
        ("ct+orig.HEAD", "ct+orig.BRIK.gz"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_either_file_of_a_pair_names_the_others(pair: tuple[str, ...]) -> None:
    header, voxels, *affine = pair
    assert {voxels, *affine} <= {name for name, _ in candidates({"image": header}, ())}
    assert {header, *affine} <= {name for name, _ in candidates({"image": voxels}, ())}


def test_objects_that_refer_to_each_other_are_visited_once() -> None:
    visits = []

    class Counted(Linked):
        def __cache_key__(self) -> Any:
            visits.append(self)
            return [self.path, *self.others]

    grid = [Counted(f"{n}.nii") for n in range(6)]
    for one in grid:
        one.others = grid
    names = sorted((f"{n}.nii", False) for n in range(6))
    assert candidates({"x": grid[0]}, ()) == names
    assert len(visits) == 6
    plain = Linked("a.nii")
    plain.others = [Linked("b.nii"), plain]
    assert candidates({"x": plain, "image": plain}, {"image"}) == [("a.nii", True), ("b.nii", True)]


def test_what_cache_key_leaves_out_is_not_looked_through() -> None:
    class Slice:
        def __init__(self, below: Any) -> None:
            self.below = below

        def __cache_key__(self) -> str:
            return "ct.nii"

    stack = None
    for _ in range(2 * sys.getrecursionlimit()):
        stack = Slice(stack)
    assert candidates({"x": stack, "class": Slice}, ()) == [("ct.nii", False)]


def test_candidates_are_plain_strings() -> None:
    assert type(candidates({"x": np.str_("a.nii")}, ())[0][0]) is str


def test_a_word_beside_a_folder_of_that_name_is_not_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train", "v1.2"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    sources = Sources("content", None)
    item = {"image": "ct.nii", "split": "train", "version": "v1.2"}
    assert [sources.identity(*candidate) for candidate in candidates(item, {"image"})] == [None, None]


def test_files_named_are_regular_files_that_look_like_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "atlas.nii").write_bytes(b"")
    (tmp_path / "bilinear").write_bytes(b"")
    (tmp_path / "output.d").mkdir()
    os.mkfifo(tmp_path / "pipe.d")
    strings = ["bilinear", "atlas.nii", str(tmp_path / "atlas.nii"), "atlas.nii", "output.d", str(tmp_path), "pipe.d"]
    assert files_named([*strings, "no.nii", "\ud800.nii", "a\0.nii"]) == [str(tmp_path / "atlas.nii"), "atlas.nii"]


def test_each_of_many_slices_is_examined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_ticks: None) -> None:
    names = [str(tmp_path / f"{i:05}.dcm") for i in range(2000)]
    for name in names:
        Path(name).write_bytes(b"")
    sources, asked, system = Sources("content", None), [], os.stat
    for name, folders in candidates({"image": names, "again": names}, {"image"}):
        sources.identity(name, folders)
    monkeypatch.setattr(os, "stat", lambda path, *a, **k: asked.append(path) or system(path, *a, **k))
    for name, folders in candidates({"image": names, "again": names}, {"image"}):
        sources.identity(name, folders)
    assert asked == names


def test_neither_torch_nor_monai_is_imported() -> None:
    assert in_another_process("print({'torch', 'monai'} & set(sys.modules))") == "set()"
