"""``data=`` that is another dataset: at a hit it is not read, unless its items may differ each time."""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.data
import pytest
import torch
from monai.data import CacheDataset, Dataset
from monai.transforms import (
    Compose,
    EnsureTyped,
    LoadImaged,
    RandFlipd,
    RandScaleIntensityd,
    RandSpatialCropd,
    ScaleIntensityd,
    Transform,
    reset_ops_id,
)

import monai_gds
from monai_gds import CacheWarning, GDSDataLoader, GDSDataset, PopulateError
from tests.fixtures_nifti import write_volumes
from tests.same import assert_same

KEYS = ("image", "label")


class Names(list[str]):
    """Does not count in keys, whatever is in it."""

    def __cache_key__(self) -> str:
        return "names"


#: Of the items that the inner dataset has read.
READ = Names()


class Counted(Transform):
    """Adds a number, and notes which items it met."""

    def __init__(self, number: int = 1) -> None:
        self.number = number

    def __cache_key__(self) -> Any:
        return self.number

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        READ.append(data["name"])
        return {**data, "image": data["image"] + self.number}


def loaded(*more: Any) -> Compose:
    return Compose([LoadImaged(KEYS, ensure_channel_first=True), Counted(), *more])


def outer() -> Compose:
    return Compose([ScaleIntensityd("image"), RandSpatialCropd("image", (6, 6, 6)), RandFlipd("image", prob=0.5)])


@pytest.fixture
def items(tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "volumes").mkdir()
    return write_volumes(tmp_path / "volumes", 3, (12, 10, 8))


def epoch(dataset: Any) -> list[Any]:
    """The items, and has ``READ`` tell what was read for them."""
    READ.clear()
    dataset.transform.set_random_state(1)
    found = [dataset[index] for index in range(len(dataset))]
    if isinstance(dataset, GDSDataset):
        dataset.flush()
    reset_ops_id(found)
    return found


class Mine(Dataset):  # type: ignore[misc]
    note = "of mine"


INNER: dict[str, Callable[[Any, Path], Any]] = {
    "Dataset": lambda items, folder: Dataset(items, loaded()),
    "CacheDataset": lambda items, folder: CacheDataset(items, loaded(), progress=False, runtime_cache=True),
    "GDSDataset": lambda items, folder: GDSDataset(items, loaded(), folder / "inner", "cpu"),
    "two": lambda items, folder: Dataset(Dataset(items, loaded()), [EnsureTyped("image", dtype=torch.float64)]),
    "a part": lambda items, folder: Dataset([items[1], *items], loaded())[1:],
    "another class": lambda items, folder: Mine(items, loaded()),
}


@pytest.mark.parametrize("kind", INNER)
def test_a_hit_does_not_read_the_inner_dataset(kind: str, items: list[dict[str, Any]], tmp_path: Path) -> None:
    expected = epoch(Dataset(INNER[kind](items, tmp_path), outer()))
    names = [item["name"] for item in items]
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        for read in (names if kind != "GDSDataset" else [], [], []):  # that one has records since the first epoch
            ours = GDSDataset(INNER[kind](items, tmp_path), outer(), tmp_path / "cache", "cpu")
            assert_same(epoch(ours), expected)
            assert read == READ
        again = pickle.loads(pickle.dumps(ours))
        assert_same(epoch(again), expected)
        for workers in (0, 1):
            assert len(list(GDSDataLoader(ours, num_workers=workers))) == 3
    assert READ == [] and all(map(ours.is_cached, range(3))) and len(ours.data) == 3
    assert f"Dataset, {'Dataset, ' if kind == 'two' else ''}ScaleIntensityd" in str(ours) or kind == "another class"


def test_the_inner_transforms_count(items: list[dict[str, Any]], tmp_path: Path) -> None:
    inner = Dataset(items, loaded())
    ours = GDSDataset(inner, outer(), tmp_path / "cache", "cpu")
    epoch(ours)
    inner.transform = loaded(ScaleIntensityd("image", 0, 3))
    expected = epoch(Dataset(inner, outer()))
    assert_same(epoch(ours), expected)
    assert len(READ) == 3
    inner.transform.transforms = loaded(ScaleIntensityd("image", 0, 5)).transforms
    assert_same(epoch(ours), epoch(Dataset(inner, outer())))
    inner.data = items[1:]
    assert_same(epoch(ours), epoch(Dataset(inner, outer())))
    assert_same(epoch(ours), epoch(Dataset(inner, outer())))
    ours.set_data(items[:1])
    assert ours.session.data is ours.data and len(ours) == 1


def test_a_file_that_changed_counts(items: list[dict[str, Any]], tmp_path: Path) -> None:
    ours = GDSDataset(Dataset(items, loaded()), outer(), tmp_path / "cache", "cpu")
    epoch(ours)
    write_volumes(tmp_path / "volumes", 1, (13, 10, 8))
    assert_same(epoch(ours), epoch(Dataset(Dataset(items, loaded()), outer())))


def test_filled_it_reads_each_item_once(items: list[dict[str, Any]], tmp_path: Path) -> None:
    READ.clear()
    ours = GDSDataset(Dataset(items, loaded()), outer(), tmp_path / "cache", "cpu")
    ours.populate(num_workers=0, progress=False)
    assert len(READ) == 3
    shutil.rmtree(tmp_path / "cache")
    full = GDSDataset(Dataset(items, loaded()), outer(), tmp_path / "cache", "cpu", populate=True)
    shutil.rmtree(tmp_path / "volumes")
    assert len(epoch(full)) == 3 and READ == []


@pytest.mark.filterwarnings("ignore:imported or derived before patch")
def test_under_patch_too(items: list[dict[str, Any]], tmp_path: Path) -> None:
    expected = epoch(CacheDataset(CacheDataset(items, loaded(), progress=False), outer(), progress=False))
    for _ in range(2):
        with monai_gds.patch(tmp_path / "cache"):
            inner = monai.data.CacheDataset(items, loaded(), progress=False)
            ours = monai.data.CacheDataset(inner, outer(), progress=False)
            assert_same(epoch(ours), expected)
            assert READ == []
            assert_same(ours._cache[1]["label"], inner[1]["label"])


def test_what_the_inner_dataset_has_no_records_of_is_cached_before_random_transforms(
    items: list[dict[str, Any]], tmp_path: Path
) -> None:
    flip = Compose([RandFlipd("image", 0.5)])
    ours = GDSDataset(Dataset(items, loaded()), flip, tmp_path / "cache", "cpu")
    assert_same([*epoch(ours), *epoch(ours)], 2 * epoch(Dataset(Dataset(items, loaded()), flip)))
    assert all(map(ours.is_cached, range(3)))
    with pytest.warns(CacheWarning, match="nothing is cached"):  # once is enough
        over = GDSDataset(GDSDataset(items, loaded(), tmp_path / "cache", "cpu"), flip, tmp_path / "cache", "cpu")
    assert_same(epoch(over), epoch(ours))


def test_the_records_of_the_inner_dataset_are_no_sources(items: list[dict[str, Any]], tmp_path: Path) -> None:
    inner = GDSDataset(items, loaded(), tmp_path / "inner", "cpu", populate=True)
    ours = GDSDataset(inner, outer(), tmp_path / "cache", "cpu")
    epoch(ours)
    assert {Path(path).parent for path in ours.key(0).paths} == {tmp_path / "volumes"}


class Noisy(torch.utils.data.Dataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return loaded()(self.items[index])


class Own(Dataset):  # type: ignore[misc]
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)


class OwnOuter(GDSDataset):
    def _transform(self, index: int) -> Any:
        return self._post_transform(self._cachecheck(self.data[index]))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda items: Noisy(items), "Noisy is not known to give the same items"),
        (lambda items: Own(items, loaded()), "Own is not known to give the same items"),
        (lambda items: Dataset(items, loaded(RandFlipd("image", 0.5))), "its RandFlipd is random"),
        (lambda items: CacheDataset(items, loaded(lambda item: item), progress=False), "counts as random"),
        (lambda items: Dataset(Noisy(items), [EnsureTyped("image")]), "Noisy is not known"),
    ],
    ids=["torch", "own", "random", "function", "two"],
)
def test_any_other_is_read_at_each_access_with_one_note(
    make: Any, why: str, items: list[dict[str, Any]], tmp_path: Path
) -> None:
    transform = Compose([EnsureTyped("image"), RandFlipd("image", 0.5)])
    with pytest.warns(CacheWarning) as said:
        ours = GDSDataset(make(items), transform, tmp_path / "cache", "cpu")
        for _ in range(2):
            READ.clear()
            _ = ours[0], ours[1]
            assert len(READ) == 2 or why == "counts as random"  # MONAI's has it in memory
    notes = [str(one.message) for one in said if "read at a hit, too" in str(one.message)]
    assert len(notes) == 1 and why in notes[0]


def test_there_is_one_note_where_the_cache_is_filled_too(items: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.warns(CacheWarning) as said:
        GDSDataset(Noisy(items), [EnsureTyped("image")], tmp_path / "cache", "cpu", populate=True)
    assert ["data is a Noisy" in str(one.message) for one in said] == [True]


def test_so_it_is_where_a_subclass_takes_items_itself(items: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.warns(CacheWarning, match="OwnOuter makes items in a way of its own"):
        ours = OwnOuter(Dataset(items, loaded()), outer(), tmp_path / "cache", "cpu")
    assert_same(epoch(ours), epoch(Dataset(Dataset(items, loaded()), outer())))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_items_that_differ_each_time_they_are_read_end_populate(
    num_workers: int, items: list[dict[str, Any]], tmp_path: Path
) -> None:
    """They have another key each time, so it would make records without an end."""
    random = Dataset(items, loaded(RandScaleIntensityd("image", 0.5, prob=1.0)))
    with pytest.warns(CacheWarning, match="is random"):
        ours = GDSDataset(random, [EnsureTyped("image")], tmp_path / "cache", "cpu")
    with pytest.raises(PopulateError, match="data holds another item each time it is read"):
        ours.populate(num_workers=num_workers, progress=False)
