"""Labels and files exactly as DALI's own file reader has them, and what is refused."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.errors import ImageListError
from monai_gds.imagenet import ImageNetDataset, open_images
from monai_gds.imagenet.files import listing
from monai_gds.imagenet.files.listing import EXTENSIONS, list_block_map, list_folder
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.blockmap.extents import Disk, Extent
from monai_gds.storage.blockmap.saved import FileBlocks, Origin
from tests.imagenet.conftest import samples_of_dali
from tests.loopdisk import loop_disk

dali = pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")

KINDS = ("file", "link", "folder", "fifo")


def as_dali_sees_it(root: str | Path) -> list[tuple[bytes, int]]:
    """(content, label) of every image in DALI's order."""
    return [(content, label) for content, _, label in samples_of_dali(root)]


def names() -> st.SearchStrategy[bytes]:
    parts = [b"", b".", b"a", b"B", b"b", b"Z", b"~", b"_", b" ", b"0", b"10", b"9", "é".encode(), b"\xff\xfe", b"-"]
    ends = [os.fsencode(e) for e in EXTENSIONS] + [b".JPG", b".Jpeg", b".gif", b".npy", b"", b".jpg.txt", b"jpg"]
    name = st.tuples(st.sampled_from(parts), st.sampled_from(parts), st.sampled_from(ends)).map(b"".join)
    return name.filter(lambda n: n not in (b"", b".", b".."))


@given(st.dictionaries(names(), st.dictionaries(names(), st.sampled_from(KINDS), max_size=6), min_size=1, max_size=6),
       st.sets(names(), max_size=2))  # fmt: skip
def test_as_dali_lists_it(classes: dict[bytes, dict[bytes, str]], stray: set[bytes]) -> None:
    top = os.fsencode(tempfile.mkdtemp())
    try:
        content = iter(range(1, 1000))
        root = top + b"/root"
        os.mkdir(root)
        Path(os.fsdecode(top + b"/elsewhere")).write_bytes(b"elsewhere")
        for name, files in classes.items():
            os.mkdir(root + b"/" + name)
            for file, kind in files.items():
                path = root + b"/" + name + b"/" + file
                if kind == "file":
                    Path(os.fsdecode(path)).write_bytes(str(next(content)).encode())
                elif kind == "link":
                    os.symlink(top + b"/elsewhere", path)
                elif kind == "folder":
                    os.mkdir(path)
                else:
                    os.mkfifo(path)
        for name in stray - classes.keys():
            Path(os.fsdecode(root + b"/" + name)).write_bytes(b"stray")
        try:
            images = list_folder(os.fsdecode(root))
        except ImageListError as e:
            assert "is not a folder of classes, but" not in str(e)
            with pytest.raises(RuntimeError, match="No files found"):
                as_dali_sees_it(os.fsdecode(root))
            return
        ours = [(Path(images.path(i)).read_bytes(), int(images.labels[i])) for i in range(len(images))]
        assert ours == as_dali_sees_it(os.fsdecode(root))
        assert [len(data) for data, _ in ours] == images.sizes.tolist()
        assert list(images.classes) == [os.fsdecode(name) for name in sorted(classes)]
    finally:
        shutil.rmtree(top)


def test_a_linked_class_is_a_class(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "cat").symlink_to(folder / "n01440764")
    assert len(list_folder(tmp_path / "root")) == len(as_dali_sees_it(tmp_path / "root")) == 7


def test_the_filter_is_dalis() -> None:
    schema = dali.backend.GetSchema("readers__File")
    assert [f"*{e}" for e in EXTENSIONS] == eval(schema.GetArgumentDefaultValueString("file_filters"))


@pytest.mark.parametrize("where", ["n0/dead.jpg", "dead"])
def test_a_dead_link_is_refused_by_name(tmp_path: Path, where: str) -> None:
    (tmp_path / "n0").mkdir()
    (tmp_path / "n0" / "a.jpg").write_bytes(b"x")
    (tmp_path / where).symlink_to("nowhere")
    with pytest.raises(ImageListError, match=f"{where} is a link that leads nowhere .nowhere"):
        list_folder(tmp_path)


def test_a_link_to_a_folder_called_like_an_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "n0").mkdir()
    (tmp_path / "n0" / "a.jpg").symlink_to(tmp_path)
    with pytest.raises(ImageListError, match=r"a\.jpg .* not lead to a regular file"):
        list_folder(tmp_path)


def test_a_root_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageListError, match="holds no image: images are expected"):
        list_folder(tmp_path)
    (tmp_path / "a.jpg").write_bytes(b"x")
    (tmp_path / "n0").mkdir()
    with pytest.raises(ImageListError, match=r"no image at .*/<class>/<file>.* the folder 'n0': move the folder"):
        list_folder(tmp_path)
    (tmp_path / "a.jpg").unlink()
    with pytest.raises(ImageListError, match=r"no image at .*/<class>/<file> \([^;]*\)$"):
        list_folder(tmp_path)
    with pytest.raises(ImageListError, match="not a folder"):
        list_folder(tmp_path / "absent")


@given(st.dictionaries(names(), st.sampled_from(("file", "link")), min_size=1, max_size=8))
def test_a_flat_folder_is_what_dali_lists_by_files(files: dict[bytes, str]) -> None:
    with tempfile.TemporaryDirectory() as top:
        for number, (name, kind) in enumerate(files.items()):
            content = Path(top) / "content" / str(number)
            content.parent.mkdir(exist_ok=True)
            content.write_bytes(str(number).encode() + b"x")
            path = os.fsencode(top) + b"/val/" + name
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(content, path) if kind == "link" else shutil.copy(content, os.fsdecode(path))
        root = Path(top) / "val"
        listed = sorted(name for name in files if name.lower().endswith(tuple(os.fsencode(e) for e in EXTENSIONS)))
        if not listed:
            with pytest.raises(ImageListError, match="holds no image"):
                open_images(root)
            return
        images = open_images(root)
        assert isinstance(images, listing.ImageList)
        ours = [(Path(images.path(i)).read_bytes(), int(images.labels[i])) for i in range(len(images))]
        file_list = Path(top) / "list.txt"  # from Python, files= of DALI takes UTF-8 only
        file_list.write_bytes(b"".join(b"%s %d\n" % (name, label) for label, name in enumerate(listed)))
        theirs = samples_of_dali(root, file_list=str(file_list))
        assert ours == [(content, label) for content, _, label in theirs]
        assert not images.classes


def test_a_flat_folder_takes_labels_in_the_order_of_its_names(folder: Path, packed: Path) -> None:
    flat = folder / "n01440764"
    images = open_images(flat, labels=[5, 4, 3, 2, 1, 0, -1])
    assert images.labels.tolist() == [5, 4, 3, 2, 1, 0, -1]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"shape \(2,\) for 7 images"):
        open_images(flat, labels=[1, 2])
    for root in (folder, packed):
        with pytest.raises(ValueError, match="has its own labels"):
            open_images(root, labels=[0] * 23)


@pytest.mark.parametrize("beside", ["nothing", "a flat val", "a class of images"])
def test_a_root_that_holds_train_is_told_to_name_it(folder: Path, tmp_path: Path, beside: str) -> None:
    """DALI's reader lists the images of val as a class here, or finds nothing."""
    (tmp_path / "train").symlink_to(folder)
    if beside != "nothing":
        shutil.copytree(folder / "n01440764", tmp_path / ("val" if beside == "a flat val" else "n0"))
    with pytest.raises(ImageListError, match=f"{tmp_path}/train is: name {tmp_path}/train"):
        open_images(tmp_path)
    (tmp_path / "train").rename(tmp_path / "training")
    if beside == "nothing":
        with pytest.raises(ImageListError, match=f"name {tmp_path}/training"):
            open_images(tmp_path)


def test_train_may_be_a_class(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "n01440764", tmp_path / "train")
    shutil.copytree(folder / "n01443537", tmp_path / "plane")
    images = list_folder(tmp_path)
    ours = [(Path(images.path(i)).read_bytes(), int(images.labels[i])) for i in range(len(images))]
    assert ours == as_dali_sees_it(tmp_path)


def test_a_block_map_lists_what_its_folder_does(folder: Path, tmp_path: Path) -> None:
    files, start = {}, 1 << 20
    for file in folder.rglob("*.JPEG"):
        size = file.stat().st_size
        extent = Extent(0, start, -(-size // 512) * 512)
        files[str(file.relative_to(folder.parent))] = FileBlocks(size, (extent,), inode=1, mtime_ns=1)
        start += extent.nbytes
    disk = Disk("nvme0n1", "259:0", 512, start, 1 << 20)
    origin = Origin(str(folder.parent), "ext4", "", 0, disk)
    BlockMap(files, origin, [f"train/{n.name}" for n in folder.iterdir()]).save(tmp_path / "map.json")
    ours, theirs = open_images(tmp_path / "map.json"), list_folder(folder)
    assert ours.classes == theirs.classes  # type: ignore[union-attr]
    assert ours.names == theirs.names  # type: ignore[union-attr]
    assert ours.labels.tolist() == theirs.labels.tolist()  # type: ignore[union-attr]
    assert ours.sizes.tolist() == theirs.sizes.tolist()  # type: ignore[union-attr]
    assert ours.root == theirs.root  # type: ignore[union-attr]


def test_a_block_map_numbers_classes_as_dali_numbers_its_folder(folder: Path, tmp_path: Path) -> None:
    """Classes without images are in no file's path, and yet they move the labels of those after them."""
    with loop_disk(tmp_path, "ext4") as disk:
        root = disk.folder / "train"
        shutil.copytree(folder, root)
        for name in ("a_empty", "n01440764_only_a_folder/x.jpg", "~empty"):
            (root / name).mkdir(parents=True)
        (root / "n01443537" / "nested").mkdir()
        (root / "n01443537" / "nested" / "no.JPEG").write_bytes(b"no")
        (root / "b_notes").mkdir()
        (root / "b_notes" / "readme.txt").write_bytes(b"no image")
        (root / "stray.JPEG").write_bytes(b"stray")
        os.mkdir(os.fsencode(root) + b"/\xff")
        shutil.copytree(folder / "n01491361", disk.folder / "elsewhere")
        (root / "c_linked").symlink_to(disk.folder / "elsewhere")
        BlockMap.build(root).save(tmp_path / "map.json")
        images = open_images(tmp_path / "map.json")
        assert isinstance(images, listing.ImageList)
        ours = [(Path(images.path(i)).read_bytes(), int(images.labels[i])) for i in range(len(images))]
        assert ours == as_dali_sees_it(root)
        assert list(images.classes) == list(list_folder(root).classes)
        dataset = ImageNetDataset(tmp_path / "map.json", 4, reader="posix", device="cpu", decode=False)
        assert [label for batch in dataset for label in batch["label"].tolist()] == [label for _, label in ours]
        dataset.close()


def test_a_file_that_is_not_a_block_map_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ImageListError, match="not a block map"):
        list_block_map(tmp_path / "x.json")
    (tmp_path / "list.txt").write_text("a.jpg 0\n")
    with pytest.raises(ImageListError, match=r"not a block map.*; for a list of files, use file_list="):
        open_images(tmp_path / "list.txt")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ImageListError, match="maps no image"):
        list_block_map(tmp_path / "x.json")
