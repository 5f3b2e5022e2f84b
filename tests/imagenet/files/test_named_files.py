"""Images named one by one: whatever DALI's reader makes of a file list or of files and labels, so do we."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from monai_gds.errors import BrokenImage, ImageListError
from monai_gds.imagenet import ImageNetDataset, ImageSource, open_images, pack_folder
from monai_gds.imagenet.files.named_files import list_files, read_file_list
from tests.imagenet.conftest import samples_of_dali

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")

#: Files of an odd tree, each holding its own name. The last one is a link.
NAMES = (
    b"a.jpg",
    b"b c.jpg",
    b" lead.jpg",
    b"x.gif",
    b"noext",
    b"7",
    b"-1",
    b"sub/d.jpg",
    b"\xc3\xa9.jpg",
    b"link.png",
)


def tree(top: str) -> str:
    """Makes an odd tree in a folder, and returns its path."""
    root = os.path.join(top, "root")
    for name in NAMES[:-1]:
        path = os.fsencode(root) + b"/" + name
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(name)
    os.symlink("a.jpg", os.path.join(root, "link.png"))
    return root


def ours(*args: Any, **kwargs: Any) -> list[tuple[bytes, int]]:
    """(content, label) of each image in order."""
    images = open_images(*args, **kwargs)
    assert not images.classes  # type: ignore[union-attr]
    found = [Path(images.path(i)).read_bytes() for i in range(len(images.labels))]  # type: ignore[union-attr]
    assert [len(data) for data in found] == images.sizes.tolist()  # type: ignore[union-attr]
    return list(zip(found, images.labels.tolist(), strict=True))  # type: ignore[union-attr]


def dalis(root: str | None, **kwargs: Any) -> list[tuple[bytes, int]]:
    return [(content, label) for content, _, label in samples_of_dali(root, **kwargs)]


def lines() -> st.SearchStrategy[bytes]:
    space = st.text(" \t\r\v\f", max_size=2).map(str.encode)
    name = st.sampled_from(
        [*NAMES, b"sub/../a.jpg", b"./a.jpg", b"", b"sub", b"no.jpg", b"a.jpg 1", "\ufeffa.jpg".encode()]
    )
    label = st.sampled_from([b"0", b"5", b"007", b"2147483647", b"-1", b"+1", b"0x1", b"", b"1.0", b"4 2", b"3\0junk"])
    made = st.tuples(space, name, space, label, space).map(b"".join)
    return st.one_of(st.tuples(name, st.just(b" "), label).map(b"".join), made, st.sampled_from([b"", b"  "]))


@given(st.lists(lines(), max_size=5), st.booleans(), st.sampled_from(["", "sub"]))
def test_a_file_list_is_what_dali_makes_of_it(rows: list[bytes], newline: bool, root: str) -> None:
    assume(not any(b"12147483647" in row for row in rows))  # refused here; DALI's int32 runs over
    with tempfile.TemporaryDirectory() as top:
        where = tree(top)
        Path(where, "list.txt").write_bytes(b"\n".join(rows) + b"\n" * newline)
        arguments = {"file_list": f"{where}/list.txt"}
        given_root = f"{where}/{root}" if root else None
        try:
            found = ours(given_root, **arguments)
        except ImageListError:
            with pytest.raises(RuntimeError):
                dalis(given_root, **arguments)
            return
        assert found == dalis(given_root, **arguments)


@given(st.lists(st.sampled_from([*NAMES, b"no.jpg", b"sub", b"./a.jpg", b""]), max_size=5), st.data())
def test_files_and_labels_are_what_dali_makes_of_them(names: list[bytes], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as top:
        root = tree(top)
        files = [os.fsdecode(name) if data.draw(st.booleans()) else f"{root}/{os.fsdecode(name)}" for name in names]
        label = st.integers(-(2**31), 2**31 - 1)
        labels = data.draw(st.one_of(st.none(), st.lists(label, min_size=len(files), max_size=len(files))))
        arguments = {"files": files} if labels is None or not files else {"files": files, "labels": labels}
        try:
            found = ours(root, **arguments)
        except ImageListError:
            with pytest.raises(RuntimeError):
                dalis(root, **arguments)
            return
        assert found == dalis(root, **arguments)


def test_relative_to_the_folder_of_the_list_or_to_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree(str(tmp_path)))
    Path("sub/list.txt").write_text("d.jpg 3\n")
    for file_list in ("sub/list.txt", "sub/../sub/list.txt"):
        assert ours(file_list=file_list) == dalis(None, file_list=file_list) == [(b"sub/d.jpg", 3)]
    assert ours(files=["sub/d.jpg", "a.jpg"]) == dalis(None, files=["sub/d.jpg", "a.jpg"])
    assert ours(files="a.jpg") == [(b"a.jpg", 0)]  # as DALI takes a single one


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a.jpg 0\nno.jpg 1\n", "list.txt, line 2: .*no.jpg' cannot be read: No such file"),
        ("\na.jpg\n", "line 2: 'a.jpg' is not a file and a label"),
        ("a.jpg 2147483648\n", "a number from 0 to 2147483647"),  # DALI gives -2147483648
        ("a.jpg " + "1" * 5000 + "\n", "a number from 0 to 2147483647"),
        ("sub 1\n", "line 1: .*sub' is not a regular file"),
        ("x" * 20_000 + " 1\n", "File name too long"),
        ("\n", "no file is named"),
    ],
)
def test_what_is_wrong_with_a_file_list_is_told_by_line(tmp_path: Path, content: str, message: str) -> None:
    root = tree(str(tmp_path))
    Path(root, "list.txt").write_text(content)
    with pytest.raises(ImageListError, match=message):
        read_file_list(f"{root}/list.txt")


@pytest.mark.parametrize("labels", [[1], [[1, 2]], [1, 2**31], [1.0, 2.0], [1, -(2**31) - 1]])
def test_labels_that_dali_would_not_take_as_they_are(tmp_path: Path, labels: Any) -> None:
    with pytest.raises(ValueError, match="labels"):
        list_files(["a.jpg", "7"], labels, tree(str(tmp_path)))


@pytest.mark.parametrize("labels", ["truth.txt", Path("truth.txt")])
def test_a_text_file_is_no_labels(tmp_path: Path, labels: Any) -> None:
    (tmp_path / "a.jpg").write_bytes(b"a")
    for files in (None, ["a.jpg"]):
        with pytest.raises(ValueError, match=r"truth\.txt.* are not labels: give the numbers.* file_list="):
            open_images(tmp_path, files=files, labels=labels)


def test_labels_beyond_32_bits_are_named_on_either_side() -> None:
    for labels in ([1, -(2**40)], [-(2**40), 2**40]):
        with pytest.raises(ValueError, match=f"int32, not int64 from {min(labels)} to {max(labels)}"):
            list_files(["a.jpg", "7"], labels)


@pytest.mark.parametrize("labels", [[], None])
def test_no_file_is_named_as_such(labels: list[int] | None) -> None:
    with pytest.raises(ImageListError, match="no file is named"):
        open_images(files=[], labels=labels)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "name the images"),
        ({"file_list": "l", "files": ["f"]}, "leave files and labels out"),
        ({"file_list": "l", "labels": [1]}, "leave files and labels out"),
    ],
)
def test_arguments_that_do_not_go_together(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageNetDataset(batch_size=2, device="cpu", **arguments)


@pytest.mark.parametrize("reader", ["posix", "packed"])
@pytest.mark.parametrize("decode", [False, True])
def test_the_dataset_reads_them(folder: Path, tmp_path: Path, reader: str, decode: bool) -> None:
    """In any order, some of them twice in a batch, by absolute and by relative paths; and packed."""
    images = open_images(folder)
    names = [*images.names[::-2], str(folder / images.names[3]), images.names[3]]  # type: ignore[union-attr]
    labels = np.arange(len(names)) - 4
    arguments: dict[str, Any] = {"root": folder, "files": names, "labels": labels}
    theirs = samples_of_dali(folder, files=names, labels=labels.tolist(), decode=decode)
    if reader == "packed":
        pack_folder(list_files(names, labels, folder), tmp_path / "packed", file_bytes=3000)
        arguments = {"root": tmp_path / "packed"}
    dataset = ImageNetDataset(**arguments, batch_size=4, reader=reader, device="cpu", decode=decode)
    found = [
        (image.numpy().tobytes(), tuple(image.shape), label)
        for batch in dataset
        for image, label in zip(batch["image"], batch["label"].tolist(), strict=True)
    ]
    assert found == theirs
    dataset.close()


def test_an_image_source_reads_them(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("n01440764/n01440764_1.JPEG 8\n")
    ((images, labels),) = ImageSource(folder, 2, file_list=tmp_path / "list.txt")
    assert images[0].tobytes() == (folder / "n01440764" / "n01440764_1.JPEG").read_bytes()
    assert labels.tolist() == [[8]]


def test_an_empty_file_of_a_list_is_named_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(BrokenImage, match=r"empty\.jpg"):
        list(ImageNetDataset(files=[tmp_path / "empty.jpg"], device="cpu"))
