"""Images by a block map, on real file systems: plain maps, disks mounted elsewhere or not at all, files left out."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monai_gds.errors import FileChanged, ImageListError, NotMappable
from monai_gds.imagenet import ImageNetDataset, open_images
from monai_gds.imagenet.files.listing import ImageList, list_folder
from monai_gds.storage.blockmap.block_map import BlockMap
from tests.loopdisk import LoopDisk, loop_disk, run
from tests.storage.xnvme import libraries

USER_SPACE = {"be": "upcie", "uri": "0000:01:00.0"}


@pytest.fixture(params=["ext4", "xfs"])
def disk(
    request: pytest.FixtureRequest, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LoopDisk]:
    """A disk with the images in ``train``, and libxnvme's double, for whose user-space driver it is the drive."""
    with libraries.using("double"), loop_disk(tmp_path, request.param) as disk:
        shutil.copytree(folder, disk.folder / "train")
        monkeypatch.setenv("XNVME_DOUBLE_DRIVE", disk.device)
        yield disk


@contextmanager
def unmounted(disk: LoopDisk) -> Iterator[None]:
    run("umount", str(disk.folder))
    try:
        yield
    finally:
        run("mount", disk.device, str(disk.folder))


def samples(root: Any, epochs: int = 1, **arguments: Any) -> list[tuple[bytes, int]]:
    """Every encoded image with its label."""
    with closing(ImageNetDataset(root, 4, device="cpu", decode=False, **arguments)) as dataset:
        batches = [batch for _ in range(epochs) for batch in dataset]
    return [
        (image.numpy().tobytes(), label)
        for batch in batches
        for image, label in zip(batch["image"], batch["label"].tolist(), strict=True)
    ]


def of_folder(root: Path, *, with_empty: bool = False) -> list[tuple[bytes, int]]:
    """The same by reading a folder; with the labels of classes without images or, as a plain map has it, without."""
    images = list_folder(root)
    found = [(Path(images.path(i)).read_bytes(), int(images.labels[i])) for i in range(len(images))]
    labels = sorted({label for _, label in found})
    return found if with_empty else [(data, labels.index(label)) for data, label in found]


@pytest.fixture
def plain(disk: LoopDisk) -> Path:
    """A plain map, beside the folder of images."""
    BlockMap.build(disk.folder / "train").plain().save(disk.folder / "p.json")
    return disk.folder / "p.json"


class TestPlain:
    @pytest.mark.parametrize("reader", ["posix", "auto", "xnvme-block"])
    def test_every_reader_reads_it_with_exact_sizes(self, disk: LoopDisk, plain: Path, reader: str) -> None:
        assert samples(plain, reader=reader) == of_folder(disk.folder / "train")

    def test_wherever_the_map_lies(
        self, disk: LoopDisk, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        moved = shutil.move(plain, tmp_path / "p.json")
        expected = of_folder(disk.folder / "train")
        with pytest.raises(ImageListError, match=rf"not in {tmp_path}/train; BlockMap.load\(map, parent=…\)"):
            samples(moved, reader="posix")
        assert samples(BlockMap.load(moved, parent=disk.folder), reader="posix") == expected
        options = {"blockmap": str(moved)}
        assert samples(disk.folder / "train", reader="xnvme-block", storage_options=options) == of_folder(
            disk.folder / "train", with_empty=True
        )
        monkeypatch.chdir(disk.folder)
        assert samples(moved, reader="posix") == expected

    def test_without_the_file_system_images_come_in_whole_blocks_and_decode(
        self, disk: LoopDisk, tmp_path: Path
    ) -> None:
        from PIL import Image

        train = disk.folder / "pictures"
        (train / "a").mkdir(parents=True)
        Image.new("RGB", (50, 40), "red").save(train / "a/1.png")
        shutil.copy(disk.folder / "train/n01440764/n01440764_0.JPEG", train / "a/2.jpg")
        jpeg = (train / "a/2.jpg").read_bytes()
        png = (train / "a/1.png").read_bytes()
        BlockMap.build(train).plain().save(tmp_path / "p.json")
        arguments: dict[str, Any] = {"reader": "xnvme-block", "storage_options": USER_SPACE}
        with unmounted(disk), pytest.warns(UserWarning, match="a plain block map holds neither"):
            whole = [(data + bytes(-len(data) % 512), 0) for data in (png, jpeg)]
            assert samples(tmp_path / "p.json", **arguments) == whole
            with closing(ImageNetDataset(tmp_path / "p.json", 1, device="cpu", **arguments)) as dataset:
                first, second = (batch["image"] for batch in dataset)
        assert tuple(first.shape) == (1, 40, 50, 3)
        assert (first[0, 0, 0].tolist(), first[0, -1, -1].tolist()) == ([255, 0, 0], [255, 0, 0])
        assert second[0].numpy().tobytes() == np.asarray(Image.open(train / "a/2.jpg").convert("RGB")).tobytes()

    def test_one_that_is_out_of_date_is_an_error_where_the_kernel_knows(self, disk: LoopDisk, plain: Path) -> None:
        image = disk.folder / "train/n01440764/n01440764_0.JPEG"
        shutil.copy(image, image.with_suffix(".new"))
        os.rename(image.with_suffix(".new"), image)
        with pytest.raises(FileChanged, match="its blocks moved; build the map again"):
            samples(plain, reader="xnvme-block")


def test_a_map_made_at_another_mount_point(disk: LoopDisk, tmp_path: Path) -> None:
    BlockMap.build(disk.folder / "train").save(tmp_path / "map.json")
    expected = of_folder(disk.folder / "train", with_empty=True)
    (tmp_path / "data").mkdir()
    run("mount", "--move", str(disk.folder), str(tmp_path / "data"))
    try:
        for reader in ("posix", "xnvme-block"):
            with pytest.raises(ImageListError, match=rf"not in {disk.folder}/train; BlockMap.load\(map, parent=…\)"):
                samples(tmp_path / "map.json", reader=reader)
            assert samples(BlockMap.load(tmp_path / "map.json", parent=tmp_path / "data"), reader=reader) == expected
        options = {"blockmap": BlockMap.load(tmp_path / "map.json", parent=tmp_path / "data")}
        assert samples(tmp_path / "data/train", reader="xnvme-block", storage_options=options) == expected
    finally:
        run("mount", "--move", str(tmp_path / "data"), str(disk.folder))


def test_a_map_is_all_that_a_drive_in_user_space_needs(disk: LoopDisk, tmp_path: Path) -> None:
    BlockMap.build(disk.folder / "train", checksums=True).save(tmp_path / "map.json")
    expected = of_folder(disk.folder / "train", with_empty=True)
    with unmounted(disk), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert samples(tmp_path / "map.json", reader="xnvme-block", storage_options=USER_SPACE) == expected


def test_an_image_that_was_written_anew_before_unmounting_is_an_error(disk: LoopDisk, tmp_path: Path) -> None:
    BlockMap.build(disk.folder / "train", checksums=True).save(tmp_path / "map.json")
    image = disk.folder / "train/n01443537/n01443537_3.JPEG"
    image.write_bytes(image.read_bytes())
    with unmounted(disk), pytest.raises(FileChanged, match=r"n01443537_3\.JPEG is not on the disk as it was mapped"):
        samples(tmp_path / "map.json", reader="xnvme-block", storage_options=USER_SPACE)


def test_images_that_could_not_be_mapped_are_listed_and_say_why(disk: LoopDisk, tmp_path: Path) -> None:
    image = disk.folder / "train/n01443537/n01443537_3.JPEG"
    with image.open("r+b") as f:
        os.posix_fallocate(f.fileno(), 0, 1 << 20)
    BlockMap.build(disk.folder / "train", checksums=True).save(tmp_path / "map.json")
    ours, theirs = open_images(tmp_path / "map.json"), list_folder(disk.folder / "train")
    assert isinstance(ours, ImageList)
    assert (ours.names, ours.labels.tolist(), ours.sizes.tolist()) == (
        theirs.names,
        theirs.labels.tolist(),
        theirs.sizes.tolist(),
    )
    assert samples(tmp_path / "map.json", reader="posix") == of_folder(disk.folder / "train", with_empty=True)
    with unmounted(disk), pytest.raises(NotMappable, match=r"never written.*cp --reflink=never.*n01443537_3\.JPEG"):
        samples(tmp_path / "map.json", reader="xnvme-block", storage_options=USER_SPACE)


def test_a_map_in_memory_has_labels_of_its_own(disk: LoopDisk) -> None:
    with pytest.raises(ValueError, match="its own labels"):
        open_images(BlockMap.build(disk.folder / "train"), labels=[1])
