"""Items are computed under the settings that held when the dataset was made, wherever that is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.data import CacheDataset, DataLoader, MetaTensor, get_track_meta, set_track_meta
from monai.transforms.utils import reset_ops_id

from monai_gds import GDSDataLoader, GDSDataset, PopulateError, limits
from tests.same import assert_same

KEYS = ["image", "label"]
COUNT = 3


@pytest.fixture(autouse=True)
def _settings_of_the_process() -> Iterator[None]:
    yield
    set_track_meta(True)
    torch.set_default_dtype(torch.float32)


def items(count: int = COUNT) -> list[dict[str, Any]]:
    values = np.random.default_rng(0).integers(0, 9, (count, 1, 12, 11, 10)).astype(np.float32)
    return [{**dict.fromkeys(KEYS, value), "number": i} for i, value in enumerate(values)]


def where(item: dict[str, Any]) -> dict[str, Any]:
    """Notes the process and its settings."""
    return {**item, "pid": os.getpid(), "tracks": get_track_meta(), "dtype": str(torch.zeros(()).dtype)}


def with_affine(item: dict[str, Any]) -> dict[str, Any]:
    """As a loader of images leaves it."""
    affine = torch.diag(torch.tensor([2.0, 2.0, 1.0, 1.0]))
    return {**item, **{key: MetaTensor(torch.as_tensor(item[key]), affine=affine) for key in KEYS}}


def now(item: dict[str, Any]) -> dict[str, Any]:
    """Runs in every epoch, and notes the settings then."""
    return {**item, "tracks_now": get_track_meta()}


def nothing(item: Any) -> Any:
    return item


RANDOM: dict[str, Callable[[], list[Any]]] = {
    "nothing": list,
    "a function": lambda: [nothing],
    "a flip": lambda: [mt.RandFlipd(KEYS, 1.0, 0)],
    "no flip": lambda: [mt.RandFlipd(KEYS, 0.0, 0)],
    "of one key": lambda: [mt.RandShiftIntensityd("image", 0.5, prob=1.0)],
    "crops": lambda: [mt.RandSpatialCropSamplesd(KEYS, (6, 6, 6), 2, random_size=False), mt.RandFlipd("image", 0.5)],
    "crops of one key": lambda: [mt.RandSpatialCropd("image", (6, 6, 6), random_size=False)],
}


def steps(random: list[Any], *further: Any) -> mt.Compose:
    deterministic = [mt.Lambda(with_affine), mt.Spacingd(KEYS, (1.0, 1.0, 1.0)), *further]
    return mt.Compose([*deterministic, *random]).set_random_state(3)


def dataset(folder: Path | None, *further: Any, **settings: Any) -> GDSDataset:
    noted = steps([now], mt.Lambda(where), *further)
    return GDSDataset(items(), noted, folder, "cpu", **settings)


@pytest.mark.parametrize("populated", [True, False], ids=["hits", "misses"])
@pytest.mark.parametrize("random", RANDOM)
def test_tracking_off_gives_what_a_cache_dataset_gives(
    tmp_path: Path, random: str, populated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in MONAI's tutorials of Swin UNETR and fast training: bit for bit, and type for type."""
    monkeypatch.setattr(limits, "TILED_BYTES", 1000)
    theirs = CacheDataset(items(2), steps(RANDOM[random]()), progress=False)
    mine = GDSDataset(items(2), steps(RANDOM[random]()), tmp_path, "cpu", compression="lz4")
    if populated:
        mine.populate(0, progress=False)
    tracked = [theirs[0], mine[0]]
    set_track_meta(False)
    for kind in (theirs, mine):
        kind.transform.set_random_state(3)
    pairs = [(theirs[i], mine[i]) for i in (0, 1, 0)]
    set_track_meta(True)
    pairs += [tuple(tracked), (theirs[1], mine[1])]  # type: ignore[list-item]
    for expected, got in pairs:
        reset_ops_id(expected), reset_ops_id(got)
        assert_same(expected, got)


def test_a_process_of_its_own_computes_what_is_missing(tmp_path: Path) -> None:
    mine = dataset(tmp_path)
    assert mine[0]["pid"] == os.getpid()
    set_track_meta(False)
    torch.set_default_dtype(torch.float64)
    found = mine.__getitems__([0, 1, 2])
    assert [item["pid"] == os.getpid() for item in found] == [True, False, False]
    assert found[1]["pid"] == found[2]["pid"]
    for item in found:
        assert (item["tracks"], item["dtype"], item["tracks_now"]) == (True, "torch.float32", False)
    set_track_meta(True)
    torch.set_default_dtype(torch.float32)
    assert dataset(tmp_path)[2]["pid"] == found[2]["pid"], "the record of one process is a hit in another"


def test_the_helper_knows_new_data_and_transforms(tmp_path: Path) -> None:
    mine = dataset(tmp_path)
    set_track_meta(False)
    mine[0]
    mine.set_data(items(COUNT + 1))
    assert mine[COUNT]["number"] == COUNT
    mine.transform = steps([], mt.Lambda(where), mt.Lambda(lambda item: {**item, "new": 1}))
    assert mine[0]["new"] == 1
    assert mine[0]["tracks"], "the settings of the dataset hold for transforms that are assigned later"


@pytest.mark.parametrize("workers", [0, 2])
def test_populate_after_the_change(tmp_path: Path, workers: int) -> None:
    mine = dataset(tmp_path)
    set_track_meta(False)
    assert mine.populate(workers, progress=False).computed == COUNT
    set_track_meta(True)
    for i in range(COUNT):
        item = dataset(tmp_path)[i]
        assert item["tracks"]
        assert item["pid"] != os.getpid()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_of_a_loader(tmp_path: Path, context: str) -> None:
    mine = dataset(tmp_path)
    set_track_meta(False)
    loader = DataLoader(mine, batch_size=None, num_workers=1, multiprocessing_context=context, collate_fn=nothing)
    for item in loader:
        assert (item["tracks"], item["tracks_now"]) == (True, False)
        assert item["pid"] != os.getpid()
        assert type(item["image"]) is torch.Tensor


@pytest.mark.parametrize("settings", [{}, {"num_workers": 1}], ids=["thread", "workers"])
def test_our_loader(tmp_path: Path, settings: dict[str, Any]) -> None:
    mine = dataset(tmp_path)
    set_track_meta(False)
    for item in GDSDataLoader(mine, batch_size=None, collate_fn=nothing, **settings):
        assert (item["tracks"], item["tracks_now"]) == (True, False)
        assert item["pid"] != os.getpid()


def test_a_setting_of_the_thread_is_switched_here(tmp_path: Path) -> None:
    mine = dataset(tmp_path, mt.Lambda(lambda item: {**item, "made": torch.zeros(2)}))
    torch.set_default_device("meta")
    try:
        item = mine[0]
        assert torch.zeros(()).is_meta
    finally:
        torch.set_default_device(None)
    assert (item["pid"], str(item["made"].device)) == (os.getpid(), "cpu")


def test_without_a_cache_the_error_names_both_settings() -> None:
    mine = dataset(None)
    set_track_meta(False)
    with pytest.raises(
        RuntimeError, match=r"track_meta was True and is now False\. .* before the dataset is made, or "
    ):
        mine[0]
    set_track_meta(True)
    assert mine[0]["tracks"]


def test_without_deterministic_transforms_nothing_is_computed(tmp_path: Path) -> None:
    with pytest.warns(match="nothing is cached"):
        mine = GDSDataset(items(), mt.Compose([now]), tmp_path, "cpu")
    set_track_meta(False)
    assert mine[0]["tracks_now"] is False


def test_a_helper_that_dies_or_cannot_save(tmp_path: Path) -> None:
    set_track_meta(True)
    dies = dataset(tmp_path, mt.Lambda(lambda item: os._exit(1)))
    keeps = dataset(tmp_path, mt.Lambda(lambda item: {**item, "code": nothing.__code__}))
    set_track_meta(False)
    for mine in (dies, keeps):
        with pytest.raises(RuntimeError, match=r"a helper process .*track_meta was True and is now False"):
            mine[0]


def test_an_error_of_a_transform_is_its_own(tmp_path: Path) -> None:
    mine = dataset(tmp_path, mt.Lambda(lambda item: item["missing"]))
    set_track_meta(False)
    with pytest.raises(RuntimeError, match="applying transform"):
        mine[0]
    with pytest.raises(PopulateError, match="missing"):
        mine.populate(0, progress=False)
