"""Lists of what items have read are found by every process, in any version of the data, and below any root."""

from __future__ import annotations

from pathlib import Path

import pytest

from monai_gds import limits
from monai_gds.folder.reads import ReadLists
from monai_gds.shared.notes import line

NAME, OTHER = "ab" * 16, "cd" * 16


def test_nothing_is_made_before_a_list_is_noted(tmp_path: Path) -> None:
    lists = ReadLists(tmp_path)
    assert not lists
    assert lists.of(NAME) == ()
    assert list(tmp_path.iterdir()) == []


def test_lists_are_found_by_others_when_they_look_again(tmp_path: Path) -> None:
    mine, theirs = ReadLists(tmp_path), ReadLists(tmp_path)
    assert not theirs
    mine.note(NAME, ["/data/atlas.npy"])
    assert theirs.of(NAME) == ()
    theirs.refresh()
    assert theirs.of(NAME) == [("/data/atlas.npy",)]
    assert theirs.of(OTHER) == ()
    assert ReadLists(tmp_path).of(NAME) == [("/data/atlas.npy",)]


def test_the_newest_list_comes_first_and_each_once(tmp_path: Path) -> None:
    lists = ReadLists(tmp_path)
    for paths in (["/a"], ["/b"], ["/a"]):
        lists.note(NAME, paths)
    assert lists.of(NAME) == [("/b",), ("/a",)]
    assert ReadLists(tmp_path).of(NAME) == [("/b",), ("/a",)]


def test_paths_below_the_root_move_with_it(tmp_path: Path) -> None:
    paths = ["/data/atlas.npy", "/elsewhere/<root>", "/data/\udce9t\udce9"]
    ReadLists(tmp_path, root="/data").note(NAME, paths)
    assert ReadLists(tmp_path, root="/data").of(NAME) == [tuple(paths)]
    assert ReadLists(tmp_path, root="/mnt").of(NAME) == [("/mnt/atlas.npy", "/elsewhere/<root>", "/mnt/\udce9t\udce9")]


@pytest.mark.parametrize(
    "text",
    [b"", b"x", NAME.encode(), f"{NAME} [1]".encode(), f'{NAME} ["a"'.encode(), f"{NAME} []".encode(), b"\xff" * 40,
     f"{NAME} {'[' * 100_000}]".encode(), f'{NAME} {{"a": 1}}'.encode(), f'{NAME.upper()} ["a"]'.encode()],
    ids=range(10),
)  # fmt: skip
def test_strange_lines_count_as_absent(tmp_path: Path, text: bytes) -> None:
    ReadLists(tmp_path).note(OTHER, ["/a"])
    (file,) = (tmp_path / ".index").glob("*.reads")
    with file.open("ab") as more:
        more.write(line(text) + b"00000000 torn\n" + line(f'{OTHER} ["/b"]'.encode()))
    lists = ReadLists(tmp_path)
    assert list(lists.of(NAME)) == []
    assert lists.of(OTHER) == [("/b",), ("/a",)]


def test_files_of_ended_processes_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NOTE_FILES", 1)
    for number, path in enumerate(("/a", "/b", "/b")):
        before = set((tmp_path / ".index").glob("*"))
        lists = ReadLists(tmp_path)
        lists._lists = {}  # it does not know what the others have noted
        lists.note(NAME, [path])
        (file,) = set((tmp_path / ".index").glob("*")) - before
        place, pid, *_ = file.name.split(".")
        file.rename(file.with_name(f"{place}.{pid}.1.{number}.reads"))  # a process that had this one's number before
    ReadLists(tmp_path).tidy()
    (file,) = (tmp_path / ".index").glob("*.reads")
    assert len(file.read_bytes().splitlines()) == 2
    assert set(ReadLists(tmp_path).of(NAME)) == {("/a",), ("/b",)}
