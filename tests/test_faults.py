"""A dataset over a system that misbehaves: the right item comes, or a clear error, and nothing stays open."""

from __future__ import annotations

import errno
import faulthandler
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, RandSpatialCropd, Transform

from monai_gds import CacheWarning, GDSDataset
from monai_gds.records import reader
from monai_gds.testing.tools import descriptors
from monai_gds.tiles import blosc
from tests.fresh import Interpreter
from tests.loopdisk import LoopDisk, loop_disk, run
from tests.machines import few_descriptors
from tests.same import assert_same

_CODECS = [
    None,
    pytest.param("lz4", marks=pytest.mark.skipif(blosc.why_not() is not None, reason=f"{blosc.why_not()}")),
]


class Make(Transform):  # type: ignore[misc]  # MONAI is untyped
    def __call__(self, data: Any) -> Any:
        image = torch.arange(64 * 64 * 72).remainder(100 + data["i"]).float().view(1, 64, 64, 72)
        return {"image": MetaTensor(image, meta={"affine": torch.eye(4)}), "number": torch.tensor(data["i"])}


def dataset(folder: Path, *, crops: bool = False, **options: Any) -> GDSDataset:
    transform = Compose([Make(), *([RandSpatialCropd("image", (16, 16, 16), random_size=False)] if crops else [])])
    transform.set_random_state(1)
    return GDSDataset([{"i": i} for i in range(4)], transform, folder, device="cpu", **options)


def mapped(folder: Path) -> bool:
    """Whether this process maps a file of a folder."""
    return str(folder) in Path("/proc/self/maps").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# Reads that return less


@contextmanager
def short_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call returns at most 1,000 bytes, as over FUSE."""
    preadv, pread = os.preadv, os.pread

    def short_preadv(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        return preadv(fd, [memoryview(buffers[0]).cast("B")[:1000]], offset, flags)

    with monkeypatch.context() as during:
        during.setattr(os, "preadv", short_preadv)
        during.setattr(os, "pread", lambda fd, nbytes, offset: pread(fd, min(nbytes, 1000), offset))
        yield


@pytest.mark.filterwarnings("error::monai_gds.CacheWarning")
@pytest.mark.parametrize("compression", _CODECS)
@pytest.mark.parametrize("crops", [False, True])
def test_short_reads_lose_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: Any, crops: bool
) -> None:
    with dataset(tmp_path, compression=compression, options={"tiles": None if compression is None else 32}) as made:
        expected = [made[i] for i in range(4)]
    records = {path: path.stat().st_ino for path in tmp_path.glob("*.safetensors")}
    with short_reads(monkeypatch):
        for mmap in (True, False):
            found = dataset(tmp_path, crops=crops, options={"mmap": mmap})
            assert found.key(0).digest in str(records)
            for _ in range(2):
                items = [*found.__getitems__([0, 1, 2, 3]), found[0]]
                for item, i in zip(items, (0, 1, 2, 3, 0), strict=True):
                    assert item["number"] == i
                    if not crops:
                        assert_same(item, expected[i])
            found.flush()
    assert {path: path.stat().st_ino for path in tmp_path.glob("*.safetensors")} == records  # none was written again


# ---------------------------------------------------------------------------------------------------------------------
# Errors in the middle of an epoch


@pytest.mark.parametrize("compression", _CODECS)
@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "preadv", "pread"])
def test_an_error_of_the_system_costs_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str, compression: Any
) -> None:
    with dataset(tmp_path, compression=compression, options={"tiles": None if compression is None else 32}) as made:
        expected = [made[i] for i in range(4)]
    paths = {str(path) for path in tmp_path.glob("*.safetensors")}
    real, failed = getattr(os, call), []

    def failing(what: Any, *arguments: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{what}") if type(what) is int else what
        if path in paths and len(failed) < 2:
            failed.append(path)
            raise OSError(code, os.strerror(code), path)
        return real(what, *arguments, **options)

    for options in ({}, {"options": {"mmap": False}}):
        failed.clear()
        with dataset(tmp_path, **options) as found:
            found[3]
            before = descriptors()
            with warnings.catch_warnings(record=True) as told, monkeypatch.context() as during:
                warnings.simplefilter("always")
                during.setattr(os, call, failing)
                items = [found[0], *found.__getitems__([1, 2, 3]), found[0]]
            for item, i in zip(items, (0, 1, 2, 3, 0), strict=True):
                assert_same(item, expected[i])
            warned = len([w for w in told if "computed again" in str(w.message)])
            assert bool(failed) <= warned <= len(set(failed))  # some errors are said once for all records
        del items, item
        assert descriptors() <= before


def test_a_process_without_descriptors_gives_right_items_or_an_error_that_names_the_file(tmp_path: Path) -> None:
    with dataset(tmp_path) as made:
        expected = [made[i] for i in range(4)]
    found = dataset(tmp_path)
    found[0]
    before = descriptors()
    right = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        for spare in range(5):
            with few_descriptors(spare):
                for i in range(4):
                    try:
                        item = found[i]
                    except OSError as e:
                        assert e.errno == errno.EMFILE
                    else:
                        assert_same(item, expected[i])
                        right += 1
        found.flush()
    assert right >= 16
    assert descriptors() <= before
    for i in range(4):
        assert_same(dataset(tmp_path)[i], expected[i])


# ---------------------------------------------------------------------------------------------------------------------
# Disks that fail under a mapping


@pytest.mark.parametrize(("mmap", "kind", "maps"), [
    (True, 0x6969, True), (False, 0xEF53, False), ("auto", 0xEF53, True), ("auto", 0x6969, False),
    ("auto", 0x65735546, False), ("auto", None, False),
])  # fmt: skip
def test_records_are_mapped_where_they_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mmap: Any, kind: int | None, maps: bool
) -> None:
    monkeypatch.setattr(reader, "kind_of_folder", lambda path: kind)
    with dataset(tmp_path, compression=None, options={"tiles": None}) as made:
        expected = made[0]
    found = dataset(tmp_path, options={"mmap": mmap})
    assert_same(found[0], expected)
    assert not mapped(tmp_path)  # what is to be verified is read
    item = found[0]
    assert mapped(tmp_path) is maps
    assert_same(item, expected)


def test_mmap_takes_no_other_value(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mmap='no': use 'auto', True or False"):
        dataset(tmp_path, options={"mmap": "no"})


def _reads_from_a_disk_that_fails(disk: LoopDisk, mmap: bool) -> list[str]:
    """Reads an epoch, then breaks the disk and reads another."""
    folder = disk.folder / "cache"
    with dataset(folder, compression=None, options={"tiles": None, "mmap": mmap}) as found:
        for i in range(4):
            found[i]
    expected = [found[i]["image"].clone() for i in range(4)]
    run("umount", str(disk.folder))  # what the page cache holds of it goes
    run("mount", "-t", "ext4", disk.partition, str(disk.folder))
    held = found[1]
    os.truncate(disk.image, 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        items = [found[i] for i in range(4)]
        found.flush()
    for item, wanted in zip([*items, held], [*expected, expected[1]], strict=True):
        assert torch.equal(item["image"], wanted)
    return [str(warning.message) for warning in told]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path, "ext4", size=64 << 20) as made:
        yield made


def test_a_disk_that_fails_costs_records_where_they_are_read(disk: LoopDisk, interpreter: Interpreter) -> None:
    told = interpreter.call(_reads_from_a_disk_that_fails, disk, False)
    assert [text for text in told if "computed again" in text and "Input/output error" in text]


def _reads_and_prints_the_stack(file: Path, disk: LoopDisk) -> None:
    with file.open("w") as stack:
        faulthandler.enable(stack)  # as `python -X faulthandler` does
        _reads_from_a_disk_that_fails(disk, True)


def test_a_disk_that_fails_ends_a_process_that_maps_records(
    tmp_path: Path, disk: LoopDisk, interpreter: Interpreter
) -> None:
    """What ``mmap=False`` is for."""
    with pytest.raises(AssertionError, match="the process died"):
        interpreter.call(_reads_and_prints_the_stack, tmp_path / "stack", disk)
    told = (tmp_path / "stack").read_text()
    assert "Bus error" in told and "_reads_from_a_disk_that_fails" in told
