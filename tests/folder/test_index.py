"""The index of a cache directory: what is noted is found, whatever happens to its files, and it never raises."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.folder.directory import tidy
from monai_gds.folder.index import Index, IndexEntry
from monai_gds.shared.notes import FOLDER
from tests.fresh import warm
from tests.machines import ROOT, in_child, mounted_tmpfs, read_only, shared_folder

D = "a" * 32
TENSORS = (("image", "float32", (1, 8, 8, 8)), ("label", "uint8", (1, 8, 8, 8)))


def entry(n: int, **more: Any) -> IndexEntry:
    """A fact about a record, told from others by ``n``."""
    sources = {f"/data/ct_{n}.nii.gz": (100 + n, "ab" * 16)}
    facts = {"item": f"item {n}", "pipeline": "cafe0123", "nbytes": 4096, "mtime_ns": 10, "tensors": TENSORS}
    return IndexEntry(f"{n:032x}", **{**facts, "sources": sources, **more})  # type: ignore[arg-type]


def numbers(index: Index) -> set[int]:
    return {int(digest, 16) for digest in index.entries()}


def files(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*.facts"))


def make_records(folder: Path, count: int) -> None:
    """Files of the names that facts are about: merging leaves out those of records that are gone."""
    for n in range(count):
        (folder / entry(n).name).touch()


def note_in_a_process_that_ends(folder: Path, n: int) -> None:
    """As a process does that had this one's number and ended before this one began."""
    before = files(folder)
    in_child(lambda: Index(folder).note_records([entry(n)]))
    (file,) = set(files(folder)) - set(before)
    place, *_ = file.name.split(".")
    file.rename(file.with_name(f"{place}.{os.getpid()}.1.{n}.facts"))


# ---------------------------------------------------------------------------------------------------------------------
# What is noted is found


def test_what_was_noted_is_found_by_another_process(tmp_path: Path) -> None:
    noted = entry(1, sources={"/d/Ünïcode \udcff\n.nii": (1, "x"), "/d/old": (2, "y")})
    index = Index(tmp_path)
    index.note_records([entry(0), noted])
    reads = "from monai_gds.folder.index import Index; print(pickle.dumps(Index(sys.argv[1]).entries()))"
    code = f"import pickle, sys; {reads}"
    told = subprocess.check_output([sys.executable, "-c", code, tmp_path], cwd=ROOT, text=True)
    found = pickle.loads(ast.literal_eval(told))
    assert found == index.entries() == {entry(0).digest: entry(0), noted.digest: noted}
    assert entry(0).name == f"{0:032x}.v2.safetensors"


def test_a_second_look_reads_only_what_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from monai_gds.shared import notes as module

    writer, reader = Index(tmp_path), Index(tmp_path)
    writer.note_records(map(entry, range(100)))
    assert len(reader.entries()) == 100
    lengths: list[int] = []

    def counted(*args: Any) -> bytes:
        text = read(*args)
        lengths.append(len(text))
        return text

    read = module.read
    monkeypatch.setattr(module, "read", counted)
    assert len(reader.entries()) == 100
    assert lengths == []
    writer.note_records([entry(100)])
    assert len(reader.entries()) == 101
    assert 0 < sum(lengths) < 500


def test_of_facts_about_one_record_the_newest_counts(tmp_path: Path) -> None:
    older, newer = entry(1, mtime_ns=5, nbytes=1), entry(1, mtime_ns=6, nbytes=2)
    for order in ([older, newer], [newer, older]):
        folder = tmp_path / str(order[0].nbytes)
        folder.mkdir()
        Index(folder).note_records(order)
        assert Index(folder).entries() == {newer.digest: newer}


def test_the_result_is_the_callers_own(tmp_path: Path) -> None:
    index = Index(tmp_path)
    index.note_records([entry(1)])
    index.entries().clear()
    assert numbers(index) == {1}


def test_threads_and_several_indices_of_a_process_lose_nothing(tmp_path: Path) -> None:
    shared = Index(tmp_path)

    def work(k: int) -> None:
        for n in range(100):
            (shared if n % 2 else Index(tmp_path)).note_records([entry(100 * k + n)])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers(Index(tmp_path)) == set(range(400))


def test_a_forked_child_writes_a_file_of_its_own(tmp_path: Path) -> None:
    index = Index(tmp_path)
    index.note_records([entry(0)])
    in_child(lambda: index.note_records([entry(1)]))
    index.note_records([entry(2)])
    assert len(files(tmp_path)) == 2
    assert numbers(index) == {0, 1, 2}


def test_after_the_folder_was_deleted_another_is_begun(tmp_path: Path) -> None:
    index = Index(tmp_path)
    index.note_records([entry(0)])
    for file in files(tmp_path):
        file.unlink()
    (tmp_path / FOLDER).rmdir()
    index.note_records([entry(1)])
    assert numbers(Index(tmp_path)) == {1}


def test_nothing_is_made_before_something_is_noted(tmp_path: Path) -> None:
    index = Index(tmp_path)
    assert index.entries() == {} == index.pipeline("cafe0123")
    index.note_records([])
    index.tidy()
    assert list(tmp_path.iterdir()) == []


def test_holds_asks_for_the_file(tmp_path: Path) -> None:
    assert not Index(tmp_path).holds(entry(0))
    make_records(tmp_path, 1)
    assert Index(tmp_path).holds(entry(0))


def test_importing_it_imports_no_library() -> None:
    heavy = {"torch", "monai", "numpy", "safetensors"}
    code = f"import sys, monai_gds.folder.explain, monai_gds.folder.maintenance; print({heavy} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "set()\n"


# ---------------------------------------------------------------------------------------------------------------------
# Pipelines


def test_a_pipeline_is_described_once(tmp_path: Path) -> None:
    description = {"transforms[1] Spacingd.pixdim": "(1.5, 1.5, 1.5)", "state.track_meta": "True", "ä": "→"}
    index = Index(tmp_path)
    index.describe_pipeline("cafe0123", description)
    (file,) = (tmp_path / FOLDER / "pipelines").iterdir()
    inode = file.stat().st_ino
    Index(tmp_path).describe_pipeline("cafe0123", {"other": "words"})
    assert file.stat().st_ino == inode
    assert json.loads(file.read_text()) == description
    assert Index(tmp_path).pipeline("cafe0123") == description
    assert Index(tmp_path).pipeline("cafe0123") == description
    assert Index(tmp_path).pipeline("beef0123") == {}


@pytest.mark.parametrize("name", ["", "../../escaped", "CAFE0123", "cafe", "cafe0123\n", "a" * 65])
def test_a_pipeline_that_is_not_a_hash_is_never_used_as_a_file_name(tmp_path: Path, name: str) -> None:
    Index(tmp_path / "cache").describe_pipeline(name, {"a": "b"})
    (tmp_path / "cache").mkdir()
    Index(tmp_path / "cache").describe_pipeline(name, {"a": "b"})
    assert list((tmp_path / "cache").iterdir()) == []
    assert Index(tmp_path).pipeline(name) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', "[" * 100_000, "\xff"])
def test_a_garbled_description_counts_as_missing_and_is_replaced(tmp_path: Path, text: str) -> None:
    Index(tmp_path).describe_pipeline("cafe0123", {"a": "b"})
    (tmp_path / FOLDER / "pipelines" / "cafe0123.json").write_bytes(text.encode("latin-1"))
    assert Index(tmp_path).pipeline("cafe0123") == {}
    Index(tmp_path).describe_pipeline("cafe0123", {"c": "d"})
    assert Index(tmp_path).pipeline("cafe0123") == {"c": "d"}


# ---------------------------------------------------------------------------------------------------------------------
# Torn, garbled, full, read-only


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Three facts as they lie in a file."""
    folder = tmp_path_factory.mktemp("index")
    Index(folder).note_records(map(entry, range(3)))
    (file,) = files(folder)
    return file.read_bytes()


def place(folder: Path, text: bytes) -> Path:
    """A file of a process of another machine."""
    (folder / FOLDER).mkdir(exist_ok=True)
    file = folder / FOLDER / "01234567-1.2.3.0.facts"
    file.write_bytes(text)
    return file


def test_a_file_that_was_cut_off_anywhere_gives_its_whole_lines(tmp_path: Path, text: bytes) -> None:
    ends = [i + 1 for i, byte in enumerate(text) if byte == ord("\n")]
    for length in range(0, len(text) + 1, 7):
        place(tmp_path, text[:length])
        assert numbers(Index(tmp_path)) == {n for n, end in enumerate(ends) if end <= length}


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path, text: bytes) -> None:
    file, index = place(tmp_path, text[:-10]), Index(tmp_path)
    assert numbers(index) == {0, 1}
    file.write_bytes(text)
    assert numbers(index) == {0, 1, 2}


@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_changed_byte_costs_its_line_only(
    at: int, byte: int, text: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("garbled")
    garbled = bytearray(text)
    garbled[at % len(text)] = byte
    place(folder, bytes(garbled))
    found = Index(folder).entries()
    assert len(found) >= 1
    assert all(found[digest] == entry(int(digest, 16)) for digest in found)


@pytest.mark.parametrize(
    "fact",
    [
        None, 1, "record", [], {}, ["record"], ["other", *entry(0)[1:]],
        ["record", "../x", "i", "ab", 1, 1, "[]", {}, ""],
        ["record", D, 1, "ab", 1, 1, "[]", {}, ""],
        ["record", D, "i", "\x1b", 1, 1, "[]", {}, ""],
        ["record", D, "i", "ab", "1", 1, "[]", {}, ""],
        ["record", D, "i", "ab", 1, True, "[]", {}, ""],
        ["record", D, "i", "ab", float("nan"), 1, "[]", {}, ""],
        ["record", D, "i", "ab", -1, 1, "[]", {}, ""],
        ["record", D, "i", "ab", 1, 10**30, "[]", {}, ""],
        ["record", D, "i", "ab", 1, 1, [], {}, ""],
        ["record", D, "i", "ab", 1, 1, json.dumps([["image", "float32", [1] * 65]]), {}, ""],  # NumPy has 64 axes
        ["record", D, "i", "ab", 1, 1, "[", {}, ""],
        ["record", D, "i", "ab", 1, 1, "[[1,2,[3]]]", {}, ""],
        ["record", D, "i", "ab", 1, 1, '[["x","float33",[3]]]', {}, ""],
        ["record", D, "i", "ab", 1, 1, '[["x","float32",[-3]]]', {}, ""],
        ["record", D, "i", "ab", 1, 1, '[["x","float32",[NaN]]]', {}, ""],
        ["record", D, "i", "ab", 1, 1, f'[["x","float32",[{10**400}]]]', {}, ""],
        ["record", D, "i", "ab", 1, 1, f'[["x","float32",{[2] * 2000}]]', {}, ""],
        ["record", D, "i", "ab", 1, 1, "[]", [], ""],
        ["record", D, "i", "ab", 1, 1, "[]", {"/a": 1}, ""],
        ["record", D, "i", "ab", 1, 1, "[]", {"/a": [1.5, "x"]}, ""],
        ["record", D, "i", "ab", 1, 1, "[]", {"/a": [1, ["x"]]}, ""],
        ["record", D, "i", "ab", 1, 1, "[]", {}, 2],
        ["record", D, "i", "ab", 1, 1, "[]", {}],
    ],
)  # fmt: skip
def test_a_fact_of_another_kind_is_passed_over(tmp_path: Path, text: bytes, fact: Any) -> None:
    odd = json.dumps(fact).encode()
    place(tmp_path, b"%08x %s\n" % (zlib.crc32(odd), odd) + text)
    assert numbers(Index(tmp_path)) == {0, 1, 2}


def test_a_fact_of_this_version_counts_though_it_is_odd(tmp_path: Path, text: bytes) -> None:
    odd = json.dumps(["record", D, "i", "", 0, -(1 << 62), '[["x","float8_e5m2",[0, 3]]]', {}, ""]).encode()
    place(tmp_path, b"%08x %s\n" % (zlib.crc32(odd), odd) + text)
    assert numbers(Index(tmp_path)) == {0, 1, 2, int(D, 16)}


def test_after_a_line_that_a_full_disk_cut_off_a_new_one_begins(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 64 << 10) as folder:
        index = Index(folder)
        index.note_records([entry(0)])
        (folder / "fill").write_bytes(bytes(48 << 10))
        for n in range(1, 200):
            index.note_records([entry(n)])
        held = numbers(Index(folder))
        assert 0 in held
        assert len(held) < 200
        assert len(files(folder)) == 1  # what cannot be written must not make a file each time
        (folder / "fill").unlink()
        index.note_records([entry(500)])
        assert numbers(Index(folder)) == held | {500}


def test_where_nothing_can_be_written_nothing_fails(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 1 << 20) as folder:
        index = Index(folder)
        index.note_records([entry(0)])
        read_only(folder)
        for one in (index, Index(folder)):
            one.note_records([entry(1)])
            one.describe_pipeline("cafe0123", {"a": "b"})
            one.tidy()
            assert numbers(one) == {0}


@pytest.mark.parametrize("mode", [0o000, 0o555])
def test_without_permission_nothing_fails(mode: int) -> None:
    with shared_folder() as folder:
        Index(folder).note_records([entry(0)])
        (folder / FOLDER).chmod(mode)

        def as_nobody() -> set[int]:
            index = Index(folder)
            index.note_records([entry(1)])
            index.describe_pipeline("cafe0123", {"a": "b"})
            index.tidy()
            return numbers(index)

        assert in_child(as_nobody, nobody=True) == (set() if mode == 0 else {0})
        (folder / FOLDER).chmod(0o755)


@pytest.mark.parametrize("missing", ["folder", "file", "link", "loop"])
def test_a_cache_directory_that_is_not_one_costs_nothing(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "cache"
    {
        "folder": lambda: None,
        "file": path.touch,
        "link": lambda: path.symlink_to(tmp_path / "nowhere"),
        "loop": lambda: path.symlink_to(path),
    }[missing]()
    index = Index(path)
    index.note_records([entry(0)])
    index.describe_pipeline("cafe0123", {"a": "b"})
    index.tidy()
    assert index.entries() == {} == index.pipeline("cafe0123")
    assert not (tmp_path / "nowhere").exists()


def test_a_group_may_write_to_the_index_of_its_folder() -> None:
    with shared_folder() as folder:
        folder.chmod(0o2775)
        Index(folder).note_records([entry(0)])
        assert (folder / FOLDER).stat().st_mode & 0o7777 == 0o2775


# ---------------------------------------------------------------------------------------------------------------------
# Other people's files


@pytest.mark.parametrize("what", [FOLDER, "pipelines"])
def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path, what: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "01234567-1.2.3.0.facts").write_text("their own")
    (theirs / "cafe0123.json").write_text('{"their": "own"}')
    folder = tmp_path / "cache"
    (folder / FOLDER).mkdir(parents=True)
    if what == FOLDER:
        (folder / FOLDER).rmdir()
    link = folder / FOLDER if what == FOLDER else folder / FOLDER / what
    link.symlink_to(theirs)
    index = Index(folder)
    index.note_records([entry(0)])
    index.describe_pipeline("beef0123", {"a": "b"})
    index.tidy()
    assert {path.name for path in theirs.iterdir()} == {"01234567-1.2.3.0.facts", "cafe0123.json"}
    assert index.pipeline("cafe0123") == {}


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "huge"])
def test_files_that_are_not_regular_are_left_alone(tmp_path: Path, text: bytes, kind: str) -> None:
    place(tmp_path, text)
    odd = tmp_path / FOLDER / "01234567-1.2.4.0.facts"
    Index(tmp_path).note_records([entry(999)])
    theirs = tmp_path / "theirs"
    (own,) = set(files(tmp_path)) - {tmp_path / FOLDER / "01234567-1.2.3.0.facts"}
    own.rename(theirs)
    make: dict[str, Callable[[], Any]] = {
        "link": lambda: odd.symlink_to(theirs),
        "pipe": lambda: os.mkfifo(odd),
        "folder": odd.mkdir,
        "huge": lambda: (odd.touch(), os.truncate(odd, 1 << 34)),
    }
    make[kind]()
    for n in range(20):
        note_in_a_process_that_ends(tmp_path, 100 + n)
    index = Index(tmp_path)
    index.tidy()
    assert numbers(index) >= {0, 1, 2}
    assert 999 not in numbers(index)
    assert os.path.lexists(odd)
    assert theirs.exists()


def test_files_of_other_names_stay(tmp_path: Path) -> None:
    Index(tmp_path).note_records([entry(0)])
    others = ["thesis.docx", "x.facts", ".hidden.new", "1.2.3.4.facts", "01234567-1.2.3.0.sources", "a.1.2.3.facts.bak"]
    for name in others:
        (tmp_path / FOLDER / name).write_text("mine")
        os.utime(tmp_path / FOLDER / name, (0, 0))
    for n in range(20):
        note_in_a_process_that_ends(tmp_path, n)
    Index(tmp_path).tidy()
    assert all((tmp_path / FOLDER / name).read_text() == "mine" for name in others)


# ---------------------------------------------------------------------------------------------------------------------
# Merging


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A cache directory with the files of 20 processes that ended."""
    make_records(tmp_path, 20)
    for n in range(20):
        note_in_a_process_that_ends(tmp_path, n)
    assert len(files(tmp_path)) == 20
    return tmp_path


def test_files_of_ended_processes_are_merged_when_they_are_many(many: Path) -> None:
    alive = Index(many)
    alive.note_records([entry(3, mtime_ns=11)])
    reader = Index(many)
    assert numbers(reader) == set(range(20))
    Index(many).tidy()
    assert len(files(many)) == 2
    assert numbers(reader) == numbers(Index(many)) == set(range(20))
    alive.note_records([entry(50)])
    assert 50 in numbers(reader)


def test_a_few_files_are_left_alone(tmp_path: Path) -> None:
    make_records(tmp_path, 16)
    for n in range(16):
        note_in_a_process_that_ends(tmp_path, n)
    before = files(tmp_path)
    Index(tmp_path).tidy()
    assert files(tmp_path) == before


def test_facts_of_records_that_are_gone_are_left_out(many: Path) -> None:
    (many / entry(7).name).unlink()
    Index(many).tidy()
    assert numbers(Index(many)) == set(range(20)) - {7}


def test_files_of_living_processes_and_of_other_machines_stay(many: Path, text: bytes) -> None:
    foreign = place(many, text)
    with warm().process() as living:
        pid = living.call(note_and_live_on, many)
        (theirs,) = [file for file in files(many) if file.name.split(".")[1] == str(pid)]
        Index(many).tidy()
        assert foreign.exists()
        assert theirs.exists()
        assert len(files(many)) == 3
        os.utime(foreign, (time.time() - 7200,) * 2)
        for n in range(20):
            note_in_a_process_that_ends(many, n)
        Index(many).tidy()
        assert not foreign.exists()
        assert theirs.exists()


#: In the process that lives on.
kept: list[Index] = []


def note_and_live_on(folder: Path) -> int:
    kept.append(Index(folder))
    kept[0].note_records([entry(1)])
    return os.getpid()


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_merging_may_be_stopped_at_any_step(many: Path, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """An error at each call in turn that reads or changes files: no fact is lost, and the next merge succeeds."""
    steps = 0
    while True:
        folder = many.parent / f"{kind.__name__}-{steps}"
        shutil.copytree(many, folder)
        with monkeypatch.context() as patch:
            calls = fail_at_call(patch, steps, kind)
            with contextlib.suppress(KeyboardInterrupt):
                Index(folder).tidy()
        assert numbers(Index(folder)) == set(range(20))
        Index(folder).tidy()
        assert numbers(Index(folder)) == set(range(20))
        assert len(files(folder)) <= 17
        if len(calls) <= steps:
            break
        steps += 1
    assert steps > 60  # 20 files are read and deleted, one is written


def fail_at_call(patch: pytest.MonkeyPatch, step: int, kind: type) -> list[str]:
    """Has the call number ``step`` of these fail; gives the list of calls."""
    calls: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == step + 1:
                raise kind(5, "stopped")
            return real(*args, **options)

        return call

    for name in ("open", "listdir", "pread", "write", "fsync", "rename", "unlink"):
        patch.setattr(os, name, counted(name, getattr(os, name)))
    return calls


def test_two_mergers_at_once_lose_nothing(many: Path) -> None:
    read_end, write_end = os.pipe()
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            os.close(write_end)
            os.read(read_end, 1)  # until the pipe is closed: all begin together
            Index(many).tidy()
            os._exit(0)
        children.append(pid)
    os.close(read_end)
    os.close(write_end)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
    assert numbers(Index(many)) == set(range(20))
    for n in range(20):
        note_in_a_process_that_ends(many, n)
    Index(many).tidy()
    assert numbers(Index(many)) == set(range(20))
    assert len(files(many)) == 1


def test_what_a_killed_merger_left_is_removed(many: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os.rename = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
        Index(many).tidy()
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert len(os.listdir(many / ".tmp")) == 1
    tidy(many)
    assert os.listdir(many / ".tmp") == []
    assert len(files(many)) == 1
    assert numbers(Index(many)) == set(range(20))


def test_in_a_sticky_folder_files_of_other_users_stay() -> None:
    with shared_folder() as folder:
        folder.chmod(0o1777)
        make_records(folder, 40)
        for n in range(20):
            note_in_a_process_that_ends(folder, n)
        for n in range(20, 40):
            in_child(lambda n=n: Index(folder).note_records([entry(n)]), nobody=True)
        in_child(lambda: Index(folder).tidy(), nobody=True)
        merged = files(folder)
        assert len(merged) == 21
        in_child(lambda: Index(folder).tidy(), nobody=True)
        assert files(folder) == merged  # a user who cannot delete the others' files does not merge them each time
        assert numbers(Index(folder)) == set(range(40))
