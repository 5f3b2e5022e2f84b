"""The packed format: valid safetensors, the folder's list, few large reads, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from monai_gds.cli import app
from monai_gds.errors import BrokenImage, ImageListError
from monai_gds.imagenet import ImageNetDataset, open_images, pack_folder
from monai_gds.imagenet.image_storage import Fetch, ImageStorage
from monai_gds.imagenet.packed import INDEX, PackedImages, open_packed
from monai_gds.imagenet.readers import PackedReader
from monai_gds.storage import Storage
from monai_gds.storage.posix import PosixBackend
from tests.imagenet.conftest import COUNT

pytest.importorskip("PIL", reason="Pillow is not installed on this machine")


def test_it_has_the_list_of_the_folder(folder: Path, packed: Path) -> None:
    ours, theirs = open_packed(packed).images, open_images(folder)
    assert ours.classes == theirs.classes == ["n01440764", "n01443537", "n01484850", "n01491361"]  # type: ignore[union-attr]
    assert list(ours.names) == theirs.names  # type: ignore[union-attr]
    assert ours.labels.tolist() == theirs.labels.tolist()  # type: ignore[union-attr]
    assert ours.sizes.tolist() == theirs.sizes.tolist()  # type: ignore[union-attr]


def test_each_file_is_valid_safetensors_and_complete_in_itself(folder: Path, packed: Path) -> None:
    from safetensors.torch import load_file

    seen = []
    for file in sorted(packed.glob("images-*.safetensors")):
        tensors = load_file(file)
        names = tensors["names"].numpy().tobytes().decode().split("\0")[:-1]
        images = torch.split(tensors["images"], tensors["sizes"].tolist())
        for name, image in zip(names, images, strict=True):
            assert image.numpy().tobytes() == (folder / name).read_bytes()
        seen += names
    assert seen == open_images(folder).names  # type: ignore[union-attr]


@pytest.mark.parametrize("file_bytes", [1, 1500, 10**9])
def test_files_hold_what_they_should(folder: Path, tmp_path: Path, file_bytes: int) -> None:
    out = pack_folder(open_images(folder), tmp_path / "out", file_bytes=file_bytes)  # type: ignore[arg-type]
    assert out.bounds[-1] == COUNT
    assert len(out.files) == (COUNT if file_bytes == 1 else 1 if file_bytes > 10**8 else len(out.files))
    assert all(count == 1 or nbytes <= file_bytes for count, nbytes in out.files[:, :2].tolist())


class Counting(ImageStorage):
    """Notes what is read."""

    def __init__(self) -> None:
        super().__init__("posix", torch.device("cpu"))
        self.reads: list[int] = []

    def start_range(self, path: str, offset: int, sizes: list[int], file_bytes: int) -> Fetch:
        self.reads.append(sum(sizes))
        return super().start_range(path, offset, sizes, file_bytes)


def packed_reader(packed: Path, ahead: int = 2) -> tuple[PackedReader, Counting, PackedImages]:
    images, storage = open_packed(packed), Counting()
    return PackedReader(images, storage, ahead=ahead), storage, images


@pytest.mark.parametrize("ahead", [1, 2, 100])
def test_every_file_is_read_once_in_one_piece(packed: Path, ahead: int) -> None:
    reader, storage, images = packed_reader(packed, ahead)
    batches = np.array_split(np.arange(COUNT), 5)
    read = [bytes(image.numpy()) for batch in reader.read(batches) for image in batch.images]
    assert [len(data) for data in read] == images.images.sizes.tolist()
    assert len(storage.reads) == len(images.files)


def test_a_shard_reads_its_share_only(packed: Path) -> None:
    reader, storage, images = packed_reader(packed)
    list(reader.read([np.arange(8, 12), np.arange(12, 15)]))
    assert sum(storage.reads) == images.images.sizes[8:15].sum()


def test_only_a_few_files_are_held(packed: Path) -> None:
    """Reading ahead is bounded by files, and what no batch needs any more is let go."""
    reader, storage, images = packed_reader(packed, ahead=1)
    begun = []
    for batch in reader.read([np.arange(i, i + 1) for i in range(COUNT)]):
        file = int(images.file_of(batch.indices)[0])
        begun.append(len(storage.reads) - file)
    assert max(begun) <= 2


def test_a_file_that_goes_missing_is_an_error_behind_the_batches_before_it(packed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    reader, _, images = packed_reader(copy, ahead=100)
    first = int(images.bounds[2])
    (copy / "images-00002.safetensors").unlink()
    seen = 0
    with pytest.raises(FileNotFoundError, match="images-00002"):
        for _ in reader.read([np.arange(i, i + 1) for i in range(COUNT)]):
            seen += 1
    assert seen == first > 0


def test_a_missing_or_cut_file_is_named(packed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    file = copy / "images-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(ImageListError, match=r"images-00002\.safetensors has \d+ bytes instead of"):
        open_packed(copy)
    file.unlink()
    with pytest.raises(ImageListError, match=r"images-00002\.safetensors is missing"):
        ImageNetDataset(copy, 4, device="cpu", decode=False)
    file.write_bytes(data)
    ours = ImageNetDataset(copy, 4, device="cpu", decode=False)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="images-00002"):
        list(ours)


@pytest.mark.parametrize("where", [0, 9, 2000, -5000])
def test_a_damaged_index_is_refused(packed: Path, tmp_path: Path, where: int) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    data = bytearray((copy / INDEX).read_bytes())
    data[where] ^= 1
    (copy / INDEX).write_bytes(data)
    try:
        damaged = open_packed(copy)
    except ImageListError as e:
        assert "index.safetensors" in str(e)
    else:
        assert list(damaged.images.names) == list(open_packed(packed).images.names)


def test_nothing_half_written_is_taken_for_packed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Storage, path: str, buffers: Any, **_: Any) -> None:
        raise OSError(28, "No space left on device", path)

    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "write", fail)
        with pytest.raises(OSError, match="No space left"):
            pack_folder(open_images(folder), tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out" / INDEX).exists()


def test_an_empty_image_and_a_full_folder_are_refused(copy_of: Callable[[], Path], tmp_path: Path) -> None:
    root = copy_of()
    with pytest.raises(ImageListError, match="not empty"):
        pack_folder(open_images(root), root)  # type: ignore[arg-type]
    bad = sorted(root.glob("*/*"))[3]
    bad.write_bytes(b"")
    with pytest.raises(BrokenImage, match=bad.name):
        pack_folder(open_images(root), tmp_path / "out")  # type: ignore[arg-type]


def test_the_command(folder: Path, tmp_path: Path) -> None:
    run = CliRunner()
    done = run.invoke(app, ["pack", str(folder), str(tmp_path / "out"), "--file-mb", "1"])
    assert done.exit_code == 0, done.output
    assert "23 images of 4 classes in 2 files" in done.output
    assert len(open_packed(tmp_path / "out").images) == COUNT
    assert run.invoke(app, ["pack", str(tmp_path / "absent"), str(tmp_path / "x")]).exit_code == 2
    assert run.invoke(app, ["pack", str(folder), str(tmp_path / "x"), "--file-mb", "0"]).exit_code == 2


def test_the_command_writes_a_squirrel_store(folder: Path, tmp_path: Path) -> None:
    driver = pytest.importorskip("squirrel.driver", reason="squirrel-core is not installed")
    out = tmp_path / "store"
    done = CliRunner().invoke(app, ["pack", str(folder), str(out), "--format", "squirrel", "--size", "16"])
    assert done.exit_code == 0, done.output
    samples = driver.MessagepackDriver(str(out)).get_iter().collect()
    assert {sample["image"].shape for sample in samples} == {(3, 16, 16)}
    assert len(samples) == COUNT
