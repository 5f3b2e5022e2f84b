"""A shared cache directory with one on this machine's drive: which records are read where, copied and verified."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from monai.data import DataLoader
from monai.transforms import Compose, EnsureTyped, RandSpatialCropd, ScaleIntensityd

from monai_gds import GDSDataLoader
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.making import Maker
from monai_gds.errors import CacheWarning, StorageError
from monai_gds.folder import directory
from monai_gds.folder.directory import CacheDirectory
from monai_gds.folder.uses import Uses
from monai_gds.records import reader
from monai_gds.records.pending import PendingItem
from monai_gds.records.reader import Begun
from monai_gds.shared import temporary
from monai_gds.shared.leases import Leases
from monai_gds.storage import FileId, Pending
from monai_gds.tiles import blosc
from tests.folder.test_budget import NBYTES, names, record_size, size
from tests.interrupts import as_killed, interrupted
from tests.machines import fork, in_child, mounted_tmpfs

ITEMS = 4


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


def dataset(
    far: Path, near: Path | None, items: int = ITEMS, shape: tuple[int, ...] = (), **settings: Any
) -> GDSDataset:
    shape = shape or (1, NBYTES // 4)
    data = [
        {"image": torch.arange(i, i + torch.Size(shape).numel(), dtype=torch.float32).view(shape)} for i in range(items)
    ]
    transform = settings.pop("transform", Compose([EnsureTyped("image"), ScaleIntensityd("image", minv=0, maxv=1)]))
    return GDSDataset(data, transform, far, "cpu", local_dir=near, **settings)


def epoch(made: GDSDataset) -> list[torch.Tensor]:
    found = [made[i]["image"] for i in range(len(made))]
    made.flush()
    return found


def filled(far: Path, **settings: Any) -> list[torch.Tensor]:
    """Fills the shared directory; returns the items."""
    with dataset(far, None, **settings) as made:
        return epoch(made)


def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the heads that are read from now on, by the name of their directory."""
    counted: Counter[str] = Counter()
    read = reader.read_record

    def counting(path: str, storage: Any) -> Any:
        found = read(path, storage)
        counted[os.path.basename(os.path.dirname(path))] += 1
        return found

    monkeypatch.setattr(reader, "read_record", counting)
    return counted


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_read_from_afar_is_read_from_the_own_drive_next(
    far: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = filled(far)
    counted = reads(monkeypatch)
    made = dataset(far, near)
    assert same(epoch(made), items)
    assert names(near) == names(far)
    assert all((near / name).read_bytes() == (far / name).read_bytes() for name in names(far))
    assert counted == {"far": ITEMS}
    assert same(epoch(made), items)
    assert counted == {"far": ITEMS, "near": ITEMS}
    assert same(epoch(dataset(far, near)), items), "another process of this machine"
    assert counted == {"far": ITEMS, "near": 2 * ITEMS}


def test_new_records_go_to_the_shared_directory(far: Path, near: Path) -> None:
    made = dataset(far, near)
    items = epoch(made)
    assert (len(names(far)), len(names(near))) == (ITEMS, 0)
    assert same(epoch(made), items)
    assert names(near) == names(far)


def test_an_item_that_is_returned_is_copied(far: Path, near: Path) -> None:
    filled(far)
    made = dataset(far, near)
    for i in range(len(made)):
        made[i]
        assert len(names(near)) == i + 1


@pytest.mark.parametrize("loader", [GDSDataLoader, DataLoader])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_copy_too(far: Path, near: Path, loader: Any, num_workers: int) -> None:
    items = filled(far)
    made = dataset(far, near)
    for _ in range(2):
        batches = list(loader(made, batch_size=2, num_workers=num_workers))
        assert same([image for batch in batches for image in batch["image"]], items)
        made.flush()
    assert names(near) == names(far)


@pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")
def test_crops_of_records_in_tiles(far: Path, near: Path) -> None:
    crop = Compose([EnsureTyped("image"), RandSpatialCropd("image", (8, 8, 8), random_size=False)])
    settings: dict[str, Any] = {"shape": (1, 80, 80, 80), "transform": crop, "compression": "lz4"}

    def crops(made: GDSDataset) -> list[torch.Tensor]:
        made.transform.set_random_state(7)
        return epoch(made)

    filled(far, **settings)
    expected = crops(dataset(far, None, **settings))
    made = dataset(far, near, **settings)
    for _ in range(2):
        assert same(crops(made), expected)
    assert names(near) == names(far)


@pytest.mark.parametrize("place", ["header", "data"])
def test_a_damaged_copy_is_read_from_afar_and_replaced(far: Path, near: Path, place: Literal["header", "data"]) -> None:
    items = filled(far)
    epoch(dataset(far, near))
    broken = near / min(names(near))
    with broken.open("r+b") as file:
        file.seek(100 if place == "header" else -4, os.SEEK_SET if place == "header" else os.SEEK_END)
        file.write(b"\xff\xff\xff")
    made = dataset(far, near)
    with pytest.warns(CacheWarning, match=str(broken)):
        assert same(epoch(made), items)
    assert (far / broken.name).read_bytes() == broken.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        assert same(epoch(made), items)
        assert same(epoch(dataset(far, near)), items)


def test_a_copy_whose_data_cannot_be_read_is_read_from_afar_and_replaced(
    far: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = filled(far)
    epoch(dataset(far, near))
    bad = {FileId.of(str(path)) for path in near.glob("*.safetensors")}
    made_afar = {path.name: path.stat().st_mtime_ns for path in far.glob("*.safetensors")}
    wait = PendingItem.wait

    def failing(self: PendingItem, item: Any = None) -> Any:
        if self._head.file in bad:  # a sector after the header is bad
            error = StorageError(errno.EIO, "reading at byte 4096: Input/output error", self._path)
            self._begun = Begun(Pending.completed([], torch.device("cpu"), error), None)
        return wait(self, item)

    monkeypatch.setattr(PendingItem, "wait", failing)
    monkeypatch.setattr(Maker, "compute", lambda *_: pytest.fail("computed"))
    made = dataset(far, near)
    with pytest.warns(CacheWarning, match="is read from cache_dir.*and move local_dir") as caught:
        assert same(epoch(made), items)
    assert len(caught) == 1
    assert made_afar == {path.name: path.stat().st_mtime_ns for path in far.glob("*.safetensors")}
    assert not bad & {FileId.of(str(path)) for path in near.glob("*.safetensors")}
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        assert same(epoch(made), items)


def test_a_shared_directory_whose_server_loses_a_record_costs_its_copy_only(
    far: Path, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = filled(far)
    stat = os.stat

    def stale(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if sys._getframe(1).f_code.co_name == "_copy":
            raise OSError(errno.ESTALE, "Stale file handle", path)
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", stale)
    assert same(epoch(dataset(far, near)), items)
    assert not names(near)


def test_reading_a_copy_counts_as_using_the_record(far: Path, near: Path) -> None:
    """Or ``prune --unused-for`` deletes in the shared directory what everybody trains on."""
    filled(far)
    in_child(lambda: epoch(dataset(far, near)) and None)
    since = time.time()
    in_child(lambda: epoch(dataset(far, near)) and None)
    for folder in (far, near):
        used = Uses(folder).look().last
        assert len(used) == ITEMS
        assert min(used.values()) >= since - 0.001


def test_a_record_deleted_in_either_directory_is_served_by_the_other(far: Path, near: Path) -> None:
    items = filled(far)
    made = dataset(far, near)
    epoch(made)
    for name in names(near):
        (near / name).unlink()
    assert same(epoch(made), items)
    assert names(near) == names(far)
    shutil.rmtree(far)
    assert same(epoch(made), items)


def test_a_budget_on_the_own_drive(far: Path, near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = filled(far, items=8)
    counted = reads(monkeypatch)
    limit = 3 * record_size(far)
    with pytest.warns(
        CacheWarning, match=f"nothing more is cached in {near} while this lasts: its budget.*raise local_bytes"
    ) as caught:
        made = dataset(far, near, items=8, options={"local_bytes": limit})
        for _ in range(3):
            assert same(epoch(made), items)
    assert len([w for w in caught if "budget" in str(w.message)]) == 1
    assert len(names(near)) == 3
    assert counted == {"far": 8, "near": 3}, "nothing is copied in turns"
    assert len(names(far)) == 8
    del made
    other = Compose([EnsureTyped("image"), ScaleIntensityd("image", minv=0, maxv=2)])
    with pytest.warns(CacheWarning, match="every item was computed again"):
        filled(far, transform=other)
    epoch(dataset(far, near, items=3, transform=other, options={"local_bytes": limit}))
    assert len(names(near)) == 3
    assert size(near) <= limit


def test_a_full_drive_costs_the_copies_only(far: Path, near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = filled(far)
    with (
        mounted_tmpfs(near, 2 * record_size(far)),
        pytest.warns(CacheWarning, match=f"nothing more is cached in {near}"),
    ):
        made = dataset(far, near)
        tried: list[str] = []
        taken = Leases.take
        monkeypatch.setattr(Leases, "take", lambda self, digest: (tried.append(digest), taken(self, digest))[1])
        for _ in range(3):
            assert same(epoch(made), items)
    assert len(tried) <= ITEMS, "not in every epoch"


def test_a_local_directory_that_cannot_be_made_is_reported_once(far: Path, tmp_path: Path) -> None:
    items = filled(far)
    (tmp_path / "file").write_bytes(b"")
    with pytest.warns(CacheWarning, match=r"local_dir=.* cannot be made, so nothing is copied") as caught:
        assert same(epoch(dataset(far, tmp_path / "file" / "near")), items)
    assert len(caught) == 1


def test_ranks_that_read_the_same_copy_it_once(far: Path, near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = filled(far)
    pids = []
    for _ in range(4):
        pid = fork()
        if not pid:
            os._exit(0 if all(same(epoch(dataset(far, near)), items) for _ in range(2)) else 1)
        pids.append(pid)
    assert {os.waitpid(pid, 0)[1] for pid in pids} == {0}
    assert names(near) == names(far)
    assert not list((near / ".tmp").iterdir())


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_a_copy_that_is_stopped_at_any_step_leaves_no_half_record(
    far: Path, near: Path, tmp_path: Path, how: str
) -> None:
    items = filled(far, items=1)
    made = dataset(far, near, items=1)
    (record,) = far.glob("*.safetensors")
    digest = record.name[:32]
    near.mkdir(exist_ok=True)
    tier = CacheDirectory(near, made.session.cache().storage)  # type: ignore[union-attr]
    copy = partial(tier.adopt, digest, str(record))
    files = [temporary.__file__, directory.__file__]

    def interruptions() -> Iterator[Path]:
        for n in itertools.count(1):
            stopped = interrupted(n, copy, files, "line")
            yield near
            if not stopped:
                return

    folders = interruptions() if how == "interrupted" else as_killed(near, copy, files, tmp_path / "copies")
    for n, folder in enumerate(folders, 1):  # noqa: B007 (of the last)
        for found in folder.glob("*.safetensors"):
            assert found.read_bytes() == record.read_bytes()
            found.unlink()
        directory.tidy(folder)
        assert how == "interrupted" or not list((folder / ".tmp").glob("*"))
    assert n > 20
    assert same(epoch(made), items)


def test_two_folders_are_needed(tmp_path: Path, far: Path) -> None:
    for cache_dir in (None, tmp_path / "there" / ".." / "near"):
        with pytest.raises(
            ValueError, match=r"local_dir='.*near' keeps copies of records in cache_dir=.*: name two folders"
        ):
            GDSDataset([], Compose([]), cache_dir, "cpu", local_dir=tmp_path / "near")
    with pytest.raises(ValueError, match="local_bytes='1GB' limits the copies in a local_dir, and there is none"):
        GDSDataset([], Compose([]), far, "cpu", options={"local_bytes": "1GB"})
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"local_dir='.*file' is a file"):
        GDSDataset([], Compose([]), far, "cpu", local_dir=tmp_path / "file")
    made = dataset(far, tmp_path / "near", options={"local_bytes": "2GB"}, max_bytes=1e9)
    assert f"copies:     {tmp_path / 'near'}, of up to 2.0 GB" in str(made)
    assert "budget:     1.0 GB" in str(made)
