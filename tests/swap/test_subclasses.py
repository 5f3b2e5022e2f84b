"""Subclasses as users write them, of MONAI's datasets under ``patch``: as over MONAI's, or an error with the remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.data
import pytest
from monai.transforms import (
    Compose,
    LoadImaged,
    RandFlipd,
    RandShiftIntensityd,
    ScaleIntensityd,
    reset_ops_id,
)
from monai.utils import set_determinism

import monai_gds
from tests.fixtures_nifti import write_volumes
from tests.same import assert_same

KEYS = ("image", "label")

Item = dict[str, Any]


@pytest.fixture
def items(tmp_path: Path) -> list[Item]:
    (tmp_path / "volumes").mkdir()
    return write_volumes(tmp_path / "volumes", 4, (12, 10, 8))


def numbered(base: Any) -> Any:
    class Numbered(base):  # type: ignore[misc]
        def _transform(self, index: int) -> Any:
            return {**super()._transform(index), "number": index}

    return Numbered


def summed(base: Any) -> Any:
    class Summed(base):  # type: ignore[misc]
        def _post_transform(self, item: Any) -> Any:
            out = super()._post_transform(item)
            return {**out, "sum": float(out["image"].sum())}

    return Summed


def doubled(base: Any) -> Any:
    class Doubled(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.factor = 2

        def _pre_transform(self, item: Any) -> Any:
            out = super()._pre_transform(item)
            return {**out, "image": out["image"] * self.factor}

    return Doubled


def in_own_halves(base: Any) -> Any:
    class InOwnHalves(base):  # type: ignore[misc]
        def _pre_transform(self, item: Any) -> Any:
            return self.transform(item, end=2)

        def _post_transform(self, item: Any) -> Any:
            return self.transform(item, start=2)

    return InOwnHalves


def checked(base: Any) -> Any:
    class Checked(base):  # type: ignore[misc]
        def _cachecheck(self, item: Any) -> Any:
            return {**super()._cachecheck(item), "checked": True}

    return Checked


def from_its_cache(base: Any) -> Any:
    class FromItsCache(base):  # type: ignore[misc]
        def _transform(self, index: int) -> Any:
            return self.transform(copy.deepcopy(self._cache[index]), start=2)

    return FromItsCache


def loading_again(base: Any) -> Any:
    class LoadingAgain(base):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index)["image"], self._load_cache_item(index)["image"]

    return LoadingAgain


def with_less_data(base: Any) -> Any:
    class WithLessData(base):  # type: ignore[misc]
        def set_data(self, data: Any) -> None:
            super().set_data(data[:3])

    return WithLessData


def epochs(name: str, kind: Callable[[Any], Any], items: list[Item], loader: bool) -> list[Any]:
    set_determinism(0)
    steps = [LoadImaged(KEYS, ensure_channel_first=True), ScaleIntensityd("image")]
    steps += [RandFlipd(KEYS, prob=0.5), RandShiftIntensityd("image", offsets=0.1, prob=1.0)]
    arguments: dict[str, dict[str, Any]] = {
        "CacheDataset": {"progress": False},
        "SmartCacheDataset": {"progress": False, "replace_rate": 0.5, "cache_num": 2},
        "PersistentDataset": {"cache_dir": None},
    }
    dataset = kind(getattr(monai.data, name))(items, Compose(steps), **arguments[name])
    dataset.transform.set_random_state(3)
    found: list[Any] = []
    for _ in range(2):
        found += list(monai.data.DataLoader(dataset, batch_size=2)) if loader else [*map(dataset.__getitem__, range(2))]
    reset_ops_id(found)
    set_determinism(None)
    return found


@pytest.mark.parametrize("loader", [False, True], ids=["access", "loader"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("CacheDataset", kind) for kind in (numbered, from_its_cache, loading_again, with_less_data)),
        *(("SmartCacheDataset", kind) for kind in (numbered, from_its_cache)),
        *(("PersistentDataset", kind) for kind in (numbered, summed, doubled, in_own_halves, checked, with_less_data)),
    ],
)
def test_they_do_what_they_do_over_monais(
    name: str, kind: Callable[[Any], Any], loader: bool, items: list[Item], tmp_path: Path
) -> None:
    expected = epochs(name, kind, items, loader)
    for _ in range(2):
        with monai_gds.patch(tmp_path / "cache"):
            assert_same(epochs(name, kind, items, loader), expected)


@pytest.mark.parametrize("kind", [summed, doubled, checked])
def test_a_method_that_monais_would_not_call_is_an_error(
    kind: Callable[[Any], Any], items: list[Item], tmp_path: Path
) -> None:
    error = pytest.raises(TypeError, match=r"of its own, which MONAI's does not have.*Make it a transform")
    with monai_gds.patch(tmp_path / "cache"), error:
        epochs("CacheDataset", kind, items, False)


@pytest.mark.parametrize(
    "change",
    [
        lambda cached: cached.__setitem__(0, cached[1]),
        lambda cached: cached.append(cached[0]),
        lambda cached: cached.clear(),
        lambda cached: cached.__delitem__(slice(0, 1)),
        lambda cached: cached[0].update(image=0),
        lambda cached: cached[0].__setitem__("image", 0),
        lambda cached: next(iter(cached)).pop("label"),
    ],
    ids=["replaced", "appended", "cleared", "deleted", "an item's value", "a value", "a key"],
)
def test_what_is_cached_cannot_be_changed(change: Callable[[Any], Any], items: list[Item], tmp_path: Path) -> None:
    """MONAI's ``_cache`` is a list, whose items later epochs would have as they were changed."""
    with monai_gds.patch(tmp_path / "cache"):
        dataset = monai.data.CacheDataset(items, [LoadImaged(KEYS)], progress=False)
        with pytest.raises(TypeError, match=r"cannot be changed.*set_data"):
            change(dataset._cache)
        for again in (copy.copy(dataset._cache[0]), copy.deepcopy(dataset._cache[0])):
            assert type(again) is dict  # which may be changed, as nobody expects it to last


def test_monais_replacement_goes_on_with_a_cache_that_shows_items(items: list[Item], tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path / "cache"):
        dataset = monai.data.SmartCacheDataset(
            items, [LoadImaged(KEYS)], 0.5, cache_num=2, shuffle=False, progress=False
        )
        first = [item["name"] for item in dataset._cache]
        dataset.update_cache()
        second = [item["name"] for item in dataset._cache]
        dataset.shutdown()
    names = [item["name"] for item in items]
    assert (first, second) == (names[:2], names[1:3])
