"""The packed format: valid safetensors, the folder's list, few large reads, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds.base.checksum import checksums
from monai_gds.errors import DamagedRecord, FileChanged, ImageListError
from monai_gds.imagenet import ImageNetDataset, open_images, pack_folder, readers
from monai_gds.imagenet.files.image_storage import Fetch, ImageStorage, load_item, save_item
from monai_gds.imagenet.files.packed import INDEX, PackedImages, open_packed
from monai_gds.imagenet.readers import PackedReader, RangeReader
from monai_gds.storage import Reads, open_storage
from tests.commands import run
from tests.imagenet.conftest import COUNT

pytest.importorskip("PIL", reason="Pillow is not installed on this machine")


def test_it_has_the_list_of_the_folder(folder: Path, packed: Path) -> None:
    ours, theirs = open_packed(packed), open_images(folder)
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


class Counting(ImageStorage):
    """Notes what is read."""

    def __init__(self) -> None:
        super().__init__("posix", torch.device("cpu"))
        self.reads: list[int] = []

    def start(self, reads: Reads, *others: Any) -> Fetch:
        self.reads.append(reads.total)
        return super().start(reads, *others)


def packed_reader(packed: Path, ahead: int = 2) -> tuple[PackedReader, Counting, PackedImages]:
    images, storage = open_packed(packed), Counting()
    return PackedReader(images, storage, ahead=ahead), storage, images


@pytest.mark.parametrize("ahead", [1, 2, 100])
def test_every_file_is_read_once_in_one_piece(packed: Path, ahead: int) -> None:
    reader, storage, images = packed_reader(packed, ahead)
    batches = np.array_split(np.arange(COUNT), 5)
    read = [bytes(image.numpy()) for batch in reader.read(batches) for image in batch.images]
    assert [len(data) for data in read] == images.sizes.tolist()
    assert len(storage.reads) == len(images.files)


def test_a_shard_reads_its_share_only(packed: Path) -> None:
    reader, storage, images = packed_reader(packed)
    list(reader.read([np.arange(8, 12), np.arange(12, 15)]))
    assert sum(storage.reads) == images.sizes[8:15].sum()


def test_without_a_window_a_batch_is_read_by_itself(folder: Path, packed: Path) -> None:
    """In any order, images that are named twice included; nothing else is read."""
    images, storage = open_packed(packed), Counting()
    reader = RangeReader(images, storage)
    batches = [np.array([20, 0, 3, 4, 3]), np.array([22]), np.arange(COUNT), np.array([7, 6])]
    listed = open_images(folder)
    for wanted, batch in zip(batches, reader.read(batches), strict=True):
        assert [bytes(image.numpy()) for image in batch.images] == [Path(listed.path(i)).read_bytes() for i in wanted]
        assert batch.labels.tolist() == listed.labels[wanted].tolist()
    assert storage.reads == [images.sizes[wanted].sum() for wanted in batches]


def test_only_a_few_files_are_held(packed: Path) -> None:
    """Reading ahead is bounded by files, and what no batch needs any more is let go."""
    reader, storage, images = packed_reader(packed, ahead=1)
    begun = []
    for batch in reader.read([np.arange(i, i + 1) for i in range(COUNT)]):
        file = int(images.file_of(batch.indices)[0])
        begun.append(len(storage.reads) - file)
    assert max(begun) <= 2


def test_a_file_that_goes_missing_is_an_error_after_the_batches_before_it(packed: Path, tmp_path: Path) -> None:
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
        assert list(damaged.names) == list(open_packed(packed).names)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"names": {"a": 1}}, id="names that are no tensor"),
        pytest.param({"names": torch.zeros(3)}, id="names of another dtype"),
        pytest.param({"names": torch.zeros(2, 2, dtype=torch.uint8)}, id="names in rows"),
        pytest.param({"labels": torch.zeros(2, dtype=torch.int32)}, id="labels for some"),
        pytest.param({"labels": torch.full((COUNT,), 99, dtype=torch.int32)}, id="a label without a class"),
        pytest.param({"labels": torch.full((COUNT,), -1, dtype=torch.int32)}, id="a negative label"),
        pytest.param({"sizes": torch.full((COUNT,), -5)}, id="negative sizes"),
        pytest.param({"sizes": torch.full((COUNT,), 1 << 62)}, id="sizes that overflow"),
        pytest.param({"sizes": torch.ones(COUNT, dtype=torch.int64)}, id="sizes of others"),
        pytest.param({"files": torch.tensor(3)}, id="files without axes"),
        pytest.param({"files": torch.zeros(0, 4, dtype=torch.int64)}, id="no files"),
        pytest.param({"files": torch.zeros(1, 2, dtype=torch.int64)}, id="files of two columns"),
        pytest.param({"files": torch.full((1, 4), 1 << 62)}, id="a file of exabytes"),
        pytest.param({"files": torch.tensor([[COUNT, -1, -1, -1]])}, id="a file of negative size"),
        pytest.param({"files": torch.tensor([[COUNT - 1, 9, 9, 9]])}, id="a file for fewer images"),
        pytest.param({"classes": 3}, id="classes that are a number"),
        pytest.param({"classes": [1, 2, 3, 4]}, id="classes that are numbers"),
        pytest.param({"version": "x"}, id="a version in letters"),
        pytest.param({"version": 1}, id="the version without checksums"),
        pytest.param({"checksums": torch.zeros(2, dtype=torch.int64)}, id="checksums for some"),
        pytest.param(
            {"names": torch.zeros(0, dtype=torch.uint8), "sizes": torch.zeros(0, dtype=torch.int64),
             "labels": torch.zeros(0, dtype=torch.int32), "checksums": torch.zeros(0, dtype=torch.int64),
             "files": torch.zeros(0, 4, dtype=torch.int64)},
            id="no images",
        ),
    ],
)  # fmt: skip
def test_an_index_that_nobody_packed_is_refused(packed: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    item = {**load_item(str(copy / INDEX)), **change}
    with closing(open_storage(device="cpu")) as storage:
        (copy / INDEX).unlink()
        save_item(storage, copy / INDEX, item)
    with pytest.raises(ImageListError, match="pack the folder again"):
        open_packed(copy)


def test_batches_hold_as_many_classes_as_of_a_folder_of_files(tmp_path: Path) -> None:
    """The images of a class in a batch are a hypergeometric draw from all; within a window, which is an option, not."""
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed on this machine")
    classes, each, batch_size = 60, 20, 128
    for name in range(classes):
        (tmp_path / "train" / f"n{name:02}").mkdir(parents=True)
        for i in range(each):
            (tmp_path / "train" / f"n{name:02}" / f"{i}.JPEG").write_bytes(bytes(100))
    pack_folder(open_images(tmp_path / "train"), tmp_path / "packed", file_bytes=6000)
    expected = stats.hypergeom(classes * each, each, batch_size).pmf(np.arange(7))
    for window, likely in ((None, True), (4, False)):
        ours = ImageNetDataset(
            tmp_path / "packed", batch_size, device="cpu", decode=False, shuffle=True, last_batch="drop", window=window
        )
        batches = [batch["label"].numpy() for _ in range(3) for batch in ours]
        counts = np.concatenate([np.bincount(labels, minlength=classes) for labels in batches])
        found = np.bincount(np.minimum(counts, 7), minlength=8)
        assert len(counts) == 3 * 9 * classes
        p = stats.chisquare(found, len(counts) * np.append(expected, 1 - expected.sum())).pvalue
        assert p > 1e-4 if likely else p < 1e-9


# ---------------------------------------------------------------------------------------------------------------------
# Damage


def flipped(file: Path, at: int, bit: int = 0) -> None:
    """Flips a bit, as a failing disk does: size and time stay."""
    st = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0] ^ 1 << bit
        opened.seek(at)
        opened.write(bytes([byte]))
    os.utime(file, ns=(st.st_atime_ns, st.st_mtime_ns))


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copy"))


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at what this process has verified finds nothing, as in another process."""
    monkeypatch.setattr(readers, "_verified", dict)


@pytest.mark.usefixtures("forgetful")
def test_no_flipped_bit_gives_other_bytes(folder: Path, copy: Path) -> None:
    """Of 200 bits all over the folder: each is an error that names the file and the remedy, or changes nothing."""
    images = open_images(folder)
    expected = [Path(images.path(i)).read_bytes() for i in range(COUNT)]
    random = np.random.default_rng(0)
    files = sorted(copy.glob("*.safetensors"))
    sizes = np.array([file.stat().st_size for file in files])
    outcomes = []
    for _ in range(200):
        place, bit = int(random.integers(sizes.sum())), int(random.integers(8))
        number = int(np.searchsorted(np.cumsum(sizes), place, side="right"))
        file, at = files[number], place - int(sizes[:number].sum())
        flipped(file, at, bit)
        try:
            reader = PackedReader(open_packed(copy), Counting(), ahead=2)
            read = [bytes(image.numpy()) for batch in reader.read([np.arange(COUNT)]) for image in batch.images]
        except (DamagedRecord, ImageListError) as e:
            assert file.name in str(e)
            assert "pack the folder again" in str(e)
            outcomes.append("told")
        else:
            assert read == expected
            outcomes.append("harmless")
        flipped(file, at, bit)
    assert outcomes.count("told") > 40  # the other bytes are headers of images files, and what fills them up


@pytest.mark.parametrize("batch", [1, COUNT])
def test_damage_is_an_error_after_the_batches_before_it(copy: Path, batch: int) -> None:
    packed = open_packed(copy)
    flipped(copy / "images-00001.safetensors", int(packed.files[1, 2]))
    reader = PackedReader(packed, Counting(), ahead=2)
    seen = 0
    with pytest.raises(DamagedRecord, match=r"images-00001.*pack the folder again"):
        for found in reader.read(np.array_split(np.arange(COUNT), COUNT // batch)):
            seen += len(found.indices)
    assert seen == (packed.bounds[1] if batch == 1 else 0)


def test_damage_of_one_image_does_not_concern_another(copy: Path) -> None:
    packed = open_packed(copy)
    end = int(packed.bounds[1])
    flipped(copy / "images-00000.safetensors", int(packed.places[end - 1]))
    reader = RangeReader(packed, Counting())
    list(reader.read([np.arange(end - 1), np.arange(end, COUNT)]))
    with pytest.raises(DamagedRecord, match=rf"images-00000.*{packed.names[end - 1]}.*pack the folder again"):
        list(reader.read([np.array([end, end - 1])]))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of images whose checksums are compared."""
    found: list[int] = []
    monkeypatch.setattr(readers, "checksums", lambda some: (found.extend(map(len, some)), checksums(some))[1])
    return found


def test_checksums_are_compared_once_in_a_process(copy: Path, compared: list[int]) -> None:
    """However many epochs and datasets read the images, in whichever order."""
    for number in range(2):
        images = open_packed(copy)
        for reader in (PackedReader(images, Counting(), ahead=2), RangeReader(images, Counting())):
            list(reader.read(np.array_split(np.random.default_rng(number).permutation(COUNT), 5)))
            assert sorted(compared) == sorted(images.sizes.tolist()), f"after an epoch of dataset {number}"


def test_a_folder_that_is_packed_anew_is_verified_anew(folder: Path, tmp_path: Path) -> None:
    """Also if the clock, the files' sizes and their names do not show it: the index is another one."""
    for number in range(2):
        out = tmp_path / "packed"
        pack_folder(open_images(folder), out, file_bytes=3000)  # type: ignore[arg-type]
        packed = open_packed(out)
        if number:
            flipped(out / "images-00001.safetensors", int(packed.files[1, 2]))
            with pytest.raises(DamagedRecord, match="images-00001"):
                list(PackedReader(packed, Counting(), ahead=1).read([np.arange(COUNT)]))
        else:
            list(PackedReader(packed, Counting(), ahead=1).read([np.arange(COUNT)]))
            shutil.rmtree(out)


def test_where_storage_bypasses_the_file_system_they_are_compared_in_every_epoch(
    packed: Path, compared: list[int]
) -> None:
    reader, storage, images = packed_reader(packed)
    storage.storage().coherent = False
    for _ in range(2):
        list(reader.read([np.arange(COUNT)]))
    assert compared == 2 * images.sizes.tolist()


def test_a_file_that_is_replaced_between_epochs_is_verified_anew(packed: Path, copy: Path) -> None:
    images = open_packed(copy)
    reader = PackedReader(images, Counting(), ahead=2)
    list(reader.read([np.arange(COUNT)]))
    file = copy / "images-00001.safetensors"
    file.unlink()
    shutil.copyfile(packed / file.name, file)
    flipped(file, int(images.files[1, 2]))
    with pytest.raises(FileChanged, match="images-00001"):
        list(reader.read([np.arange(COUNT)]))
    with pytest.raises(DamagedRecord, match="images-00001"):
        list(PackedReader(open_packed(copy), Counting(), ahead=2).read([np.arange(COUNT)]))


def test_files_that_were_swapped_are_refused(folder: Path, tmp_path: Path) -> None:
    """Two of the same size: their images would get each other's labels."""
    same = tmp_path / "same"
    for name in ("a", "b"):
        (same / name).mkdir(parents=True)
        (same / name / "image.JPEG").write_bytes(name.encode() * 5000)
    pack_folder(open_images(same), tmp_path / "out", file_bytes=1)  # type: ignore[arg-type]
    one, other = (tmp_path / "out" / f"images-{i:05d}.safetensors" for i in range(2))
    assert one.stat().st_size == other.stat().st_size
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    with pytest.raises(DamagedRecord, match=r"images-00000.*'a/image.JPEG' do not match their checksum"):
        list(PackedReader(open_packed(tmp_path / "out"), Counting(), ahead=1).read([np.arange(2)]))


def test_a_damaged_file_ends_an_epoch_of_the_dataset_with_its_name(copy: Path) -> None:
    flipped(copy / "images-00002.safetensors", int(open_packed(copy).files[2, 2]))
    for reader in ("auto", "posix"):
        with pytest.raises(DamagedRecord, match="images-00002"):
            list(ImageNetDataset(copy, 4, reader, device="cpu", decode=False))


@pytest.mark.parametrize("options", [[], ["--summary"], ["--json"]])
def test_cache_verify_checks_packed_images(copy: Path, options: list[str]) -> None:
    count = len(list(copy.glob("*.safetensors")))
    done = run("cache", "verify", *options, copy)
    assert done.exit_code == 0
    if options == ["--json"]:
        assert json.loads(done.stdout) == {
            "directory": str(copy), "problems": [], "packed_files": count, "damaged": 0,
        }  # fmt: skip
    else:
        assert done.stdout == f"{count} files of packed images, 0 damaged\n"
    flipped(copy / "images-00001.safetensors", int(open_packed(copy).files[1, 2]) + 100)
    flipped(copy / "images-00002.safetensors", 100)
    done = run("cache", "verify", *options, copy)
    assert done.exit_code == 1
    if options == ["--json"]:
        assert [Path(one["path"]).name for one in json.loads(done.stdout)["problems"]] == [
            "images-00001.safetensors", "images-00002.safetensors",
        ]  # fmt: skip
    else:
        assert done.stdout.endswith(f"{count} files of packed images, 2 damaged\n")
        assert ("images-00001" in done.stdout) == (options == [])
    (copy / "images-00000.safetensors").unlink()
    done = run("cache", "verify", copy)
    assert done.exit_code == 1
    assert "images-00000.safetensors is missing" in done.stdout
