"""``patch``: code that names MONAI's datasets gets ours, through every way it finds them, until that is undone.

What each stand-in does is tested beside this file.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import monai.data
import pytest
import torch
from monai.bundle import ConfigParser
from monai.transforms import Compose, EnsureTyped, LoadImaged, ScaleIntensityd

import monai_gds
from monai_gds import GDSDataset
from monai_gds.swap.patching import NAMES
from tests.fixtures_nifti import write_volumes
from tests.fresh import ROOT, warm

KEYS = ("image", "label")
ORIGINAL = {name: getattr(monai.data, name) for name in NAMES if hasattr(monai.data, name)}


def transform() -> Compose:
    return Compose([LoadImaged(KEYS, ensure_channel_first=True), ScaleIntensityd("image"), EnsureTyped(KEYS)])


@pytest.fixture
def items(tmp_path: Path) -> list[dict[str, str]]:
    (tmp_path / "volumes").mkdir()
    return write_volumes(tmp_path / "volumes", 2, (12, 10, 8))


def records(folder: Path) -> int:
    return len(list(folder.glob("*.safetensors")))


@pytest.mark.parametrize(
    "make",
    [
        lambda items, folder: monai.data.CacheDataset(items[1:], transform(), progress=False),
        lambda items, folder: monai.data.dataset.CacheDataset(data=items, transform=transform(), runtime_cache=True),
        lambda items, folder: monai.data.PersistentDataset(items, transform(), None, monai.data.pickle_hashing),
        lambda items, folder: monai.data.GDSDataset(items, transform(), None, "cpu"),
    ],
    ids=["cache", "where it is defined", "persistent", "gds"],
)
def test_names_of_monai_data_make_ours(make: Any, items: list[dict[str, str]], tmp_path: Path) -> None:
    with warnings.catch_warnings(), monai_gds.patch(tmp_path / "cache"):
        warnings.simplefilter("ignore", monai_gds.CacheWarning)
        dataset = make(items, tmp_path)
    assert isinstance(dataset, GDSDataset)
    with dataset:
        assert torch.equal(dataset[len(dataset) - 1]["image"], transform()(items[1])["image"])
    assert records(tmp_path / "cache") == 1


def test_a_folder_that_is_named_stays(items: list[dict[str, str]], tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path / "cache", compression=None):
        dataset = monai.data.PersistentDataset(items, transform(), tmp_path / "own")
    with dataset:
        _ = dataset[0]
    assert (records(tmp_path / "own"), records(tmp_path / "cache"), dataset.settings.compression) == (1, 0, None)


def test_a_config_finds_them(items: list[dict[str, str]], tmp_path: Path) -> None:
    config = {
        "short": {"_target_": "CacheDataset", "data": items, "transform": transform(), "cache_rate": 1.0},
        "long": {
            "_target_": "monai.data.PersistentDataset",
            "data": items,
            "transform": transform(),
            "cache_dir": None,
        },
    }
    with monai_gds.patch(tmp_path / "cache"):
        made = [ConfigParser(config).get_parsed_content(name) for name in config]
    assert all(isinstance(dataset, GDSDataset) for dataset in made)
    again = ConfigParser({**config, "short": {**config["short"], "progress": False}}).get_parsed_content("short")
    assert type(again) is ORIGINAL["CacheDataset"]


def test_a_cache_dataset_needs_no_transform(tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path), pytest.warns(monai_gds.CacheWarning, match="there is no transform") as told:
        assert list(monai.data.CacheDataset([1, 2])) == [1, 2]
    assert len(told) == 1


def test_undone_everything_is_as_before(tmp_path: Path) -> None:
    done = monai_gds.patch(tmp_path)
    assert "CacheDataset" in repr(done) and "CacheDataset: monai_gds.swap.cached.Cached" in repr(done)
    done.undo()
    assert {name: getattr(monai.data, name) for name in ORIGINAL} == ORIGINAL
    assert "themselves again" in repr(done)
    done.undo()  # twice does no harm


def test_undone_in_the_wrong_order_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    first = monai_gds.patch(tmp_path)
    second = monai_gds.patch(tmp_path)
    with pytest.raises(RuntimeError, match="undo that first"):
        first.undo()
    second.undo()
    first.undo()
    assert monai.data.CacheDataset is ORIGINAL["CacheDataset"]


def test_undone_also_when_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), monai_gds.patch(tmp_path):
        _ = 1 // 0
    assert monai.data.CacheDataset is ORIGINAL["CacheDataset"]


def test_what_was_made_can_be_pickled_where_nothing_is_patched(items: list[dict[str, str]], tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path / "cache"):
        dataset = monai.data.PersistentDataset(items, transform(), None)
        inside = pickle.dumps(dataset)
    for data in (inside, pickle.dumps(dataset)):
        again = pickle.loads(data)
        assert isinstance(again, GDSDataset) and not isinstance(again, monai.data.CacheDataset)
        assert torch.equal(again[0]["image"], dataset[0]["image"])


def test_datasets_of_names_that_were_imported_before_can_be_pickled(
    items: list[dict[str, str]], tmp_path: Path
) -> None:
    """As for workers that are spawned, or come from a fork server."""
    for name, arguments in (("CacheDataset", {"progress": False}), ("PersistentDataset", {"cache_dir": tmp_path})):
        dataset = ORIGINAL[name](items, transform(), **arguments)
        with monai_gds.patch(tmp_path / "outer"), monai_gds.patch(tmp_path / "inner"):
            inside = pickle.dumps(dataset)
            assert type(copy.copy(dataset)) is type(pickle.loads(inside)) is ORIGINAL[name]
        again = pickle.loads(inside)
        assert type(again) is ORIGINAL[name] and torch.equal(again[0]["image"], dataset[0]["image"])
        assert b"monai_gds" not in pickle.dumps(dataset)  # nothing is left of it


@pytest.mark.parametrize("name", ["CacheDataset", "PersistentDataset", "SmartCacheDataset"])
def test_copies_are_of_the_class_that_is_patched(name: str, items: list[dict[str, str]], tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path / "cache"):
        kind = getattr(monai.data, name)
        arguments = {"cache_dir": None} if name.startswith("Persistent") else {"progress": False}
        dataset = kind(items, transform(), **arguments)
        for again in (copy.copy(dataset), copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
            assert isinstance(again, kind) and len(again) == len(dataset)


def test_a_class_of_the_users_own_stays_that_class(items: list[dict[str, str]], tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path / "cache"):

        class Mine(monai.data.CacheDataset):  # type: ignore[misc, name-defined, unused-ignore]
            def __getitem__(self, index: Any) -> Any:
                return super().__getitem__(index)["image"].shape

        dataset = Mine(items, transform())
        assert dataset[0] == (1, 12, 10, 8)
        for again in (copy.copy(dataset), copy.deepcopy(dataset)):
            assert type(again) is Mine and again[0] == (1, 12, 10, 8)
        assert dataset.is_cached(1)


def test_unknown_options_are_refused_before_anything_is_replaced(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="GDSDataset has no argument 'cach_dir'"):
        monai_gds.patch(tmp_path, cach_dir=1)
    assert monai.data.CacheDataset is ORIGINAL["CacheDataset"]


def test_options_that_moved_name_their_place(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"verify= is options=CacheOptions\(verify=...\)"):
        monai_gds.patch(tmp_path, verify="always")


def test_it_lists_what_is_replaced_and_what_is_left_alone_and_why(tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path, loaders=False) as patched:
        assert {"CacheDataset", "Dataset", "DecathlonDataset", "SmartCacheDataset"} <= patched.replaced.keys()
        assert not patched.replaced.keys() & patched.left_alone.keys()
        assert "by loaders=False" in patched.left_alone["ThreadDataLoader"]
        assert "ZipDataset: it is made of other datasets" in repr(patched)
    with monai_gds.patch(tmp_path) as patched:
        assert "ThreadDataLoader" in patched.replaced


def test_every_dataset_and_loader_of_monai_is_in_one_of_the_lists(tmp_path: Path) -> None:
    classes = {name: kind for name, kind in vars(monai.data).items() if isinstance(kind, type)}
    found = {name for name, kind in classes.items() if issubclass(kind, torch.utils.data.Dataset)}
    found |= {name for name, kind in classes.items() if issubclass(kind, torch.utils.data.DataLoader)}
    with monai_gds.patch(tmp_path) as patched:
        assert found - patched.replaced.keys() - patched.left_alone.keys() == set()


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("from monai.data import CacheDataset", "CacheDataset in volumes"),
        ("from monai.data import PersistentDataset as Ours, CacheDataset", "CacheDataset in volumes"),
        ("from monai.data import Dataset, DataLoader\nclass Mine(Dataset): pass", ""),
        ("import monai.data\nclass Mine(monai.data.SmartCacheDataset): pass", "Mine in volumes"),
        ("import monai_gds\nclass Mine(monai_gds.GDSDataset): pass", ""),
    ],
    ids=["name", "one of two", "not cached", "derived", "ours"],
)
def test_what_was_imported_or_derived_before_is_told_with_its_module(module: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "volumes.py").write_text(module)
    script = "import volumes, monai_gds; monai_gds.patch('cache')"
    done = warm().run("-c", script, cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"})
    found = re.findall(r"derived before patch\(\), and still MONAI's: .*\b(\w+ in volumes)\b", done.stderr)
    assert found == [told] * bool(told), done.stderr
