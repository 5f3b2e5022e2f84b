"""``Dataset`` and what is made of it, under ``patch``: ours where files are loaded, and the same items."""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import monai.data
import pytest
import torch
from monai.data import Dataset  # a name that was imported before
from monai.transforms import (
    Compose,
    EnsureChannelFirst,
    EnsureType,
    Lambda,
    LoadImage,
    LoadImaged,
    RandFlip,
    RandFlipd,
    RandSpatialCropSamplesd,
    SaveImaged,
    ScaleIntensity,
    ScaleIntensityd,
    Spacingd,
    reset_ops_id,
)
from monai.utils import set_determinism

import monai_gds
from monai_gds import CacheWarning, GDSDataset
from tests.fixtures_nifti import write_volumes
from tests.same import assert_same

KEYS = ("image", "label")
CSV, Images = monai.data.CSVDataset, monai.data.ImageDataset


@pytest.fixture
def items(tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "volumes").mkdir()
    return write_volumes(tmp_path / "volumes", 3, (12, 10, 8))


@pytest.fixture
def patched(tmp_path: Path) -> Iterator[Any]:
    with monai_gds.patch(tmp_path / "cache") as done:
        yield done


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    set_determinism(0)
    yield
    set_determinism(None)


def transform() -> Compose:
    return Compose([LoadImaged(KEYS, ensure_channel_first=True), ScaleIntensityd("image"), RandFlipd(KEYS, prob=0.5)])


def plainly(items: Any) -> list[Any]:
    """Items without the identity of their transforms, which MONAI keeps where nothing is cached."""
    found = list(items)
    reset_ops_id(found)
    return found


def epoch(dataset: Any) -> list[Any]:
    return plainly(dataset[index] for index in range(len(dataset)))


def seeded(dataset: Any) -> list[Any]:
    dataset.transform.set_random_state(3)
    return epoch(dataset)


def test_a_dataset_that_loads_files_is_ours_also_by_a_name_imported_before(
    items: list[dict[str, Any]], tmp_path: Path
) -> None:
    expected = seeded(Dataset(items, transform()))
    with monai_gds.patch(tmp_path / "cache"), Dataset(items, transform()) as ours:
        assert isinstance(ours, GDSDataset) and isinstance(ours, Dataset)
        assert_same(seeded(ours), expected)
        again = pickle.loads(pickle.dumps(ours))
    assert ours.is_cached(2) and again.is_cached(2)
    assert_same(seeded(again), expected)
    assert type(Dataset(items, transform())) is Dataset


@pytest.mark.parametrize(
    ("data", "steps"),
    [
        ([1.0, 2.0], Compose([EnsureType()])),  # in memory
        ([1.0, 2.0], None),
        ([{"image": "a.nii"}], [RandFlipd("image"), LoadImaged("image")]),  # nothing deterministic comes first
        ({"a": 1}, [LoadImaged("image")]),  # not a sequence
        ([{"image": "a.nii"}], [LoadImaged("image"), Compose([SaveImaged("image")])]),  # each epoch writes files
    ],
    ids=["memory", "no transform", "random", "mapping", "saves"],
)
def test_others_stay_monais(data: Any, steps: Any, patched: Any) -> None:
    ours = Dataset(data, steps)
    assert type(ours) is Dataset and ours.data is data


def test_so_does_one_whose_transforms_have_no_stable_hash_with_the_reason(
    items: list[dict[str, Any]], patched: Any
) -> None:
    class Odd(LoadImaged):
        pass

    odd = Odd(KEYS)
    odd.generator = (number for number in range(3))
    with pytest.warns(CacheWarning, match="a Dataset stays MONAI's") as said:
        ours = Dataset(items, odd)
    assert type(ours) is Dataset and len(ours) == 3 and said[-1].filename == __file__


def test_subclasses_stay_what_they_are(items: list[dict[str, Any]], patched: Any) -> None:
    class Mine(Dataset):
        def __getitem__(self, index: Any) -> Any:
            return index

    assert Mine(items, transform())[2] == 2
    assert type(monai.data.ZipDataset([[1, 2], [3, 4]])) is monai.data.ZipDataset


def test_arrays_and_zips_are_made_of_ours(items: list[dict[str, Any]], tmp_path: Path) -> None:
    def made() -> Any:
        images, labels = ([item[key] for item in items] for key in KEYS)
        steps = [Compose([LoadImage(image_only=True), EnsureChannelFirst(), RandFlip(0.5, 0)]) for _ in KEYS]
        return monai.data.ArrayDataset(images, steps[0], labels, steps[1]).set_random_state(5)

    expected = epoch(made())
    with monai_gds.patch(tmp_path / "cache"):
        for _ in range(2):
            ours = made()
            assert [type(part).__mro__[1].__name__ for part in ours.dataset.data] == ["Plain", "Plain"]
            assert_same(epoch(ours), expected)
            for part in ours.dataset.data:
                part.flush()
    assert all(part.is_cached(1) for part in ours.dataset.data)


def test_a_zip_of_ours_with_another(items: list[dict[str, Any]], patched: Any) -> None:
    first = monai.data.CacheDataset(items, transform(), progress=False)
    zipped = monai.data.ZipDataset([first, [1, 2]])
    image, number = zipped[1]["image"] if isinstance(zipped[1], dict) else zipped[1][0]["image"], zipped[1][1]
    assert (tuple(image.shape), number, len(zipped)) == ((1, 12, 10, 8), 2, 2)


def test_a_table(items: list[dict[str, Any]], tmp_path: Path, patched: Any) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed on this machine")
    table = tmp_path / "table.csv"
    pandas.DataFrame([{key: item[key] for key in (*KEYS, "age")} for item in items]).to_csv(table, index=False)
    arguments = {"col_names": [*KEYS, "age"], "row_indices": [[0, 2]], "transform": transform()}
    expected = seeded(CSV(str(table), **arguments))
    with monai.data.CSVDataset(str(table), **arguments) as ours:
        assert isinstance(ours, CSV) and len(ours) == 2
        assert_same(seeded(ours), expected)
    assert ours.is_cached(1)


@pytest.mark.parametrize("image_only", [True, False])
def test_images_whose_files_are_records(
    image_only: bool, items: list[dict[str, Any]], tmp_path: Path, patched: Any
) -> None:
    images, segments = ([item[key] for item in items] for key in KEYS)
    steps = [Compose([EnsureChannelFirst(channel_dim="no_channel"), ScaleIntensity(), RandFlip(0.5, 0)]) for _ in KEYS]
    arguments = (images, segments, [1.0, 2.0, 3.0], *steps, Lambda(lambda label: -label), image_only)
    theirs, ours = Images(*arguments), monai.data.ImageDataset(*arguments)
    theirs.set_random_state(2)
    expected = epoch(theirs)
    for _ in range(2):
        ours.set_random_state(2)
        assert_same(epoch(ours), expected)
        ours.cache.flush()
    assert isinstance(ours, Images) and all(ours.cache.is_cached(index) for index in range(6))


def test_patches_of_our_items(items: list[dict[str, Any]], tmp_path: Path) -> None:
    """``GridPatchDataset`` and ``PatchDataset`` take any dataset, and stay MONAI's."""

    def grid(data: Any, **cache: Any) -> Any:
        patches = monai.data.PatchIterd(KEYS, (4, 4, None), mode=None)
        return monai.data.GridPatchDataset(data, patches, ScaleIntensityd("image"), progress=False, **cache)

    def crops(data: Any) -> Any:
        sampler = RandSpatialCropSamplesd(KEYS, (4, 4, 4), 2, random_size=False).set_random_state(1)
        return monai.data.PatchDataset(data, sampler, 2, ScaleIntensityd("image"))

    def loaded() -> Compose:
        return Compose([LoadImaged(KEYS, ensure_channel_first=True)])

    theirs = Dataset(items, loaded())
    expected = [plainly(found) for found in (grid(theirs), grid(theirs, cache=True), crops(theirs))]
    with monai_gds.patch(tmp_path / "cache"):
        ours = monai.data.CacheDataset(items, loaded(), progress=False)
        shutil.rmtree(tmp_path / "volumes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [plainly(found) for found in (grid(ours), grid(ours, cache=True), crops(ours))]
    assert_same(found, expected)
    assert len(crops(ours)) == 6 and torch.is_tensor(found[2][0]["image"])


@pytest.mark.parametrize("lazy", [True, None, False])
def test_lazy_transforms_before_random_ones_stay_monais_with_a_warning(
    lazy: bool | None, items: list[dict[str, Any]], patched: Any
) -> None:
    def made(*more: Any) -> Any:
        spacing = Spacingd(KEYS, (2.0, 2.0, 2.0), lazy=True)
        return monai.data.Dataset(
            items, Compose([LoadImaged(KEYS, ensure_channel_first=True), spacing, *more], lazy=lazy)
        )

    assert isinstance(made(), GDSDataset)  # all of it is cached
    if lazy is False:  # which overrides what the transform asks for
        assert isinstance(made(RandFlipd(KEYS, prob=0.5)), GDSDataset)
        return
    with pytest.warns(CacheWarning, match="resample once together"):
        assert type(made(RandFlipd(KEYS, prob=0.5))) is Dataset
