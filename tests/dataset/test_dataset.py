"""GDSDataset: a hit cannot be told from a miss, whatever the item, the loader and the machine."""

from __future__ import annotations

import contextlib
import copy
import csv
import functools
import gc
import io
import json
import operator
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, fields, replace
from inspect import signature
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import monai.transforms as mt
import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import CacheDataset, DataLoader, MetaTensor, PersistentDataset, ThreadDataLoader, list_data_collate
from monai.data.meta_obj import set_track_meta
from monai.data.utils import json_hashing, pickle_hashing
from torch.utils.data import Subset

import monai_gds
from monai_gds import (
    CacheOptions,
    CacheWarning,
    CodecMissing,
    GDSDataLoader,
    GDSDataset,
    HashingError,
    NotSaved,
    PopulateError,
    UnsupportedType,
    limits,
)
from monai_gds.dataset.session import Session
from monai_gds.folder import budget
from monai_gds.folder.directory import CacheDirectory
from monai_gds.folder.maintenance import survey
from monai_gds.folder.writer import process_writer
from monai_gds.records import compression
from monai_gds.tiles import blosc
from tests.fixtures_nifti import KEYS, pipeline, preprocessing, write_volumes
from tests.fresh import Interpreter, printed_by
from tests.machines import ROOT, fork, in_child, mounted_tmpfs, read_only, shared_folder
from tests.same import assert_same, mutable_parts

Make = Callable[..., GDSDataset]


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_volumes(tmp_path_factory.mktemp("volumes"))


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def make(volumes: list[dict[str, Any]], cache_dir: Path) -> Make:
    """Makes a dataset over the volumes, on the CPU, with a new pipeline every time."""

    def make_dataset(transform: Any = None, data: Any = None, cache: Any = cache_dir, **settings: Any) -> GDSDataset:
        items = copy.deepcopy(volumes) if data is None else data
        return GDSDataset(items, pipeline() if transform is None else transform, cache, device="cpu", **settings)

    return make_dataset


@pytest.fixture(autouse=True)
def no_unexpected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        yield
        process_writer().flush()  # before the folder goes


class Count(mt.Transform):
    """Counts how often it ran; the count is not part of the key."""

    calls = 0

    def __cache_key__(self) -> str:
        return "count"

    def __call__(self, data: Any) -> Any:
        type(self).calls += 1
        return data


@pytest.fixture(autouse=True)
def reset_count() -> None:
    Count.calls = 0


def counted(*random: Any) -> mt.Compose:
    return mt.Compose([Count(), *preprocessing(), *random])


def without_ids(item: Any) -> Any:
    """An item without the identities of the random transforms that ran after the cache."""
    mt.utils.reset_ops_id(item)
    return item


def records(cache_dir: Path) -> list[Path]:
    process_writer().flush()
    return sorted(cache_dir.glob("*.safetensors"))


# ---------------------------------------------------------------------------------------------------------------------
# Invisible


def test_imports_the_copy_under_test() -> None:
    assert Path(monai_gds.__file__).parent == ROOT / "monai_gds"


@pytest.mark.parametrize("track_meta", [True, False])
@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_hit_is_miss(make: Make, volumes: list[dict[str, Any]], track_meta: bool, verify: Any) -> None:
    dataset = make(counted(), track_meta=track_meta, options={"verify": verify})
    missed = [dataset[i] for i in range(len(volumes))]
    assert Count.calls == len(volumes)
    for again in (dataset, make(counted(), track_meta=track_meta, options={"verify": verify})):
        for _ in range(3):
            for i, expected in enumerate(missed):
                assert_same(expected, again[i])
    assert Count.calls == len(volumes)
    assert type(missed[0]["image"]) is (MetaTensor if track_meta else torch.Tensor)


def test_gives_what_the_pipeline_gives(make: Make, volumes: list[dict[str, Any]]) -> None:
    for _ in range(2):
        got, expected = make()[1], pipeline()(copy.deepcopy(volumes[1]))
        mt.utils.reset_ops_id(expected)
        assert isinstance(expected["weights"], np.ndarray), "arrays stay arrays, both times"
        assert_same(expected, got)
        assert {"name", "age", "notes", "mask", "foreground_start_coord"} <= set(got)


def test_source_items_are_never_changed(make: Make, volumes: list[dict[str, Any]]) -> None:
    dataset = make(mt.Compose([mt.Lambda(lambda d: d.update(age=0) or d), *preprocessing()]))
    for _ in range(2):
        _ = dataset[0]
    assert_same(volumes, dataset.data)


def test_hits_share_nothing(make: Make) -> None:
    dataset = make()
    items = [dataset[0] for _ in range(4)]  # a miss, a verified read, two mappings
    for i, a in enumerate(items):
        for b in items[i + 1 :]:
            assert not set(mutable_parts(a)) & set(mutable_parts(b))


def test_in_place_transforms_reach_neither_the_file_nor_the_next_hit(make: Make, cache_dir: Path) -> None:
    def spoil(data: Any) -> Any:
        for key in KEYS:
            data[key].fill_(-1)
        data["weights"][:] = -1
        data["image"].meta.clear()
        data["image"].applied_operations.clear()
        data["notes"]["codes"].append(3)
        return data

    expected = make()[0]
    before = records(cache_dir)[0].read_bytes()
    dataset = make(pipeline(spoil))
    for _ in range(3):
        assert bool((dataset[0]["image"] == -1).all())
    assert records(cache_dir)[0].read_bytes() == before
    assert_same(expected, make()[0])


@pytest.mark.parametrize("again", [False, True], ids=["miss", "hit"])
def test_invertd_on_cached_items_with_new_transforms_and_twice(
    make: Make, volumes: list[dict[str, Any]], again: bool
) -> None:
    if again:
        _ = make()[0]
    shape = nib.load(volumes[0]["image"]).shape
    dataset = make()
    for _ in range(2):
        item = dataset[0]
        item["pred"] = MetaTensor(item["label"].clone(), meta=item["label"].meta)
        invert = mt.Invertd("pred", pipeline(), "label", nearest_interp=True)
        back = invert(item)["pred"]
        assert tuple(back.shape[1:]) == shape
        assert np.allclose(back.affine, nib.load(volumes[0]["label"]).affine, atol=1e-3)
        original = nib.load(volumes[0]["label"]).get_fdata()
        overlap = ((back[0].numpy() > 0.5) & (original > 0)).sum()
        assert overlap > 0.9 * (original > 0).sum()
        assert pipeline().inverse(dataset[0])["label"].shape[1:] == shape


def test_reset_ops_id_false_keeps_identities(make: Make) -> None:
    dataset = make(reset_ops_id=False)
    for _ in range(2):
        ids = {op["id"] for op in dataset[0]["image"].applied_operations}
        assert mt.utils.TraceKeys.NONE not in ids


def test_list_of_dicts_from_the_deterministic_part(make: Make) -> None:
    class Halves(mt.Transform):
        def __call__(self, data: Any) -> Any:
            middle = data["image"].shape[1] // 2
            return [{**data, "image": data["image"][:, :middle]}, {**data, "image": data["image"][:, middle:]}]

    def transform() -> mt.Compose:
        return mt.Compose([*preprocessing(), Halves(), mt.RandFlipd("image", prob=0)])

    missed = without_ids(make(transform())[0])
    assert isinstance(missed, list)
    assert len(missed) == 2
    assert_same(missed, without_ids(make(transform())[0]))


def test_random_crops_after_the_cache(make: Make) -> None:
    crop = mt.RandCropByPosNegLabeld(KEYS, "label", (8, 8, 8), num_samples=4)
    dataset = make(pipeline(crop))
    for _ in range(2):
        crops = dataset[0]
        assert len(crops) == 4
        assert {tuple(c["image"].shape) for c in crops} == {(1, 8, 8, 8)}


@pytest.mark.parametrize(
    "item",
    ["just a string", 7, None, [1, "a"], {"a": torch.ones(2)}, {1: "a", ("b", 2): np.float32(3)}, torch.ones(3), {}],
    ids=repr,
)
def test_items_of_any_shape(make: Make, item: Any) -> None:
    dataset = make(mt.Compose([mt.Lambda(lambda d: {"got": d, "x": torch.ones(2)})], map_items=False), [item])
    assert_same(dataset[0], dataset[0])
    assert_same({"got": item, "x": torch.ones(2)}, dataset[0])


def test_lazy_pipeline_hit_is_miss_and_as_persistent_dataset(make: Make, volumes: list[dict[str, Any]]) -> None:
    def transform() -> mt.Compose:
        return mt.Compose([*preprocessing(), mt.RandZoomd(KEYS, prob=0)], lazy=True)

    missed = without_ids(make(transform())[0])
    assert_same(missed, without_ids(make(transform())[0]))
    peer = PersistentDataset(copy.deepcopy(volumes), transform(), cache_dir=None)[0]
    assert torch.equal(peer["image"], missed["image"])
    assert not missed["image"].pending_operations


@pytest.mark.parametrize("cached", [True, False])
def test_slices_and_lists_of_indices_give_a_subset(make: Make, cached: bool) -> None:
    dataset = make() if cached else make(cache=None)
    for subset in (dataset[:2], dataset[[0, 2]]):
        assert isinstance(subset, Subset)
        assert len(subset) == 2
        assert_same(dataset[0], subset[0])


def test_without_cache_dir_nothing_is_written_and_the_item_is_the_same(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    dataset = make(cache=None)
    item = dataset[0]
    assert not dataset.is_cached(0)
    assert set(tmp_path.rglob("*")) == before
    assert_same(make()[0], item)


class Odd:
    """What no record can hold."""


def test_what_cannot_be_stored_is_computed_in_every_epoch_with_one_warning(make: Make, cache_dir: Path) -> None:
    transform = mt.Compose([Count(), mt.Lambda(lambda d: {**d, "odd": Odd()})])
    dataset = make(transform)
    with pytest.warns(CacheWarning, match=r"item\['odd'\] is a .*Odd.*DeleteItemsd") as told:
        items = [dataset[i] for i in (0, 1, 0, 1)]
    assert len(told) == 1
    assert Count.calls == 4
    assert all(type(item["odd"]) is Odd for item in items)
    assert records(cache_dir) == []


def test_what_cannot_be_stored_is_an_error_where_that_is_wanted(make: Make) -> None:
    transform = mt.Compose([mt.Lambda(lambda d: {**d, "odd": Odd()})])
    with pytest.raises(UnsupportedType, match=r"item\['odd'\] is a .*Odd.*DeleteItemsd"):
        _ = make(transform, options={"unsupported": "error"})[0]
    assert type(make(transform, cache=None)[0]["odd"]) is Odd


def test_values_of_the_item_that_no_record_can_hold_are_taken_from_it(make: Make) -> None:
    data = [{"x": 1, "odd": Odd()}]
    for _ in range(2):
        item = make(mt.Compose([Count()]), data)[0]
        assert type(item["odd"]) is Odd
        assert item["odd"] is not data[0]["odd"]
    assert Count.calls == 1


def test_why_every_item_missed_is_said_once_and_only_where_every_item_did(make: Make) -> None:
    data = [{"x": n} for n in range(4)]
    scaled = [mt.Compose([Count(), mt.Lambdad("x", func=functools.partial(operator.mul, n))]) for n in range(4)]
    for i in range(4):
        _ = make(scaled[0], data)[i]
    process_writer().flush()
    with pytest.warns(CacheWarning, match="(?i)every item was computed again.*what differs: .*0 → 1") as told:
        dataset = make(scaled[1], data)
        for i in (0, 1, 2, 3, 0, 1):
            _ = dataset[i]
    assert len(told) == 1
    with pytest.warns(CacheWarning, match="0 → 2|1 → 2"):
        make(scaled[2], data).populate()
    partly = make(scaled[3], data)
    _ = partly[0]
    process_writer().flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = make(scaled[3], data)
        for _ in range(2):
            _ = [again[i] for i in range(4)]


@pytest.mark.parametrize("arrays", ["auto", "numpy", "torch"])
def test_arrays_are_what_was_asked_for(make: Make, arrays: Any) -> None:
    data = [{"x": np.arange(6, dtype=np.int16).reshape(2, 3), "t": torch.ones(2)}]
    for _ in range(3):  # a miss, a verified read, a mapping
        item = make(mt.Compose([mt.Identity()]), data, options={"arrays": arrays})[0]
        assert type(item["x"]) is (torch.Tensor if arrays == "torch" else np.ndarray)
        assert type(item["t"]) is torch.Tensor
        assert np.array_equal(np.asarray(item["x"]), data[0]["x"])
        item["x"][0] = 9  # writable, and nobody else's


# ---------------------------------------------------------------------------------------------------------------------
# When an item is computed again


def test_changed_source_changed_transform_changed_item(make: Make, tmp_path: Path) -> None:
    data = write_volumes(tmp_path, 1)
    dataset = make(counted(), data)
    _ = dataset[0], dataset[0]
    assert Count.calls == 1
    image = nib.load(data[0]["image"])
    nib.save(nib.Nifti1Image(np.zeros(image.shape, np.int16), image.affine), data[0]["image"])
    assert float(dataset[0]["image"].median()) == 0.5, "within the same dataset object"
    assert Count.calls == 2
    data[0]["age"] = 99
    with pytest.warns(CacheWarning, match="item 0 gets its third record in this process.*the item itself"):
        assert dataset[0]["age"] == 99
    other = counted()
    other.transforms[5].scaler.b_max = 2.0
    with pytest.warns(CacheWarning, match=r"every item was computed again.*ScaleIntensityRanged.*b_max 1.0 → 2.0"):
        changed = make(other, data)
        assert float(changed[0]["image"].median()) == 1.0
    assert Count.calls == 4
    cache = changed.session.cache()
    assert cache is not None and cache.index is not None
    assert not cache.index._entries, "what was compared with takes no memory afterwards"


def test_what_a_subclass_computes_before_the_transforms_counts(tmp_path: Path) -> None:
    class Scaled(GDSDataset):
        def __init__(self, scale: float, unread: float) -> None:
            folder = tmp_path / f"{type(self).__name__} {scale}"  # of its own, so that nothing is compared
            super().__init__([{"x": 1.0}], mt.Compose([mt.Lambdad("x", abs)]), folder, "cpu")
            self.scale, self.unread = scale, unread

        def _pre_transform(self, item_transformed: Any) -> Any:
            return super()._pre_transform({"x": item_transformed["x"] * self.scale})

    class Shifted(Scaled):
        def _pre_transform(self, item_transformed: Any) -> Any:
            return super()._pre_transform({"x": item_transformed["x"] + self.scale})

    datasets = [Scaled(2.0, 0), Scaled(3.0, 0), Shifted(2.0, 0)]
    assert [dataset[0]["x"] for dataset in datasets] == [2.0, 3.0, 6.0]
    assert len({dataset.key(0).digest for dataset in datasets}) == 3
    assert Scaled(2.0, 1).key(0).digest == datasets[0].key(0).digest


def test_a_source_that_changes_while_it_is_read_is_not_cached_under_the_old_key(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    os.utime(path, ns=(5, 5))

    class Read(mt.Transform):
        def __call__(self, data: Any) -> Any:
            path.write_text("new")  # somebody else, between the look at the file and its reading
            return {"text": path.read_text()}

    dataset = make(mt.Compose([Read()]), [{"file": str(path)}])
    with pytest.warns(CacheWarning, match=f"not cached: while it was computed, {path} changed"):
        assert dataset[0]["text"] == "new"
    assert records(Path(dataset.cache_dir)) == []


class Logs(mt.Transform):
    """Writes into a file that it names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, data: Any) -> Any:
        with open(self.path, "a") as file:
            file.write(f"{data['n']}\n")
        return data


def test_a_transform_that_writes_a_file_that_it_names_is_named_with_what_to_do(make: Make, tmp_path: Path) -> None:
    class Leaves(Logs):
        def __cache_key__(self) -> str:
            return ""

    items, steps, log = [{"n": n} for n in range(3)], [mt.Identity(), mt.Lambda(dict)], tmp_path / "log.txt"
    with pytest.warns(CacheWarning) as told:
        assert [*make(mt.Compose([*steps, Logs(log)]), items)] == items
    (said,) = (str(one.message) for one in told)
    assert f"{log} changed. It is named by Logs (transforms[2]). If a transform writes it" in said
    assert "__cache_key__" in said
    with make(mt.Compose([*steps, Leaves(log)]), items) as dataset:
        assert [*dataset] == items
        assert all(map(dataset.is_cached, range(3)))


def test_all_that_name_a_file_that_changes_are_told_but_for_one_that_cannot_be_hashed_any_more(
    make: Make, tmp_path: Path
) -> None:
    class Opens(Logs):
        writer: Any = None

        def __call__(self, data: Any) -> Any:
            self.writer = csv.writer(io.StringIO())
            return super().__call__(data)

    items, log = [{"n": n} for n in range(3)], tmp_path / "log.txt"
    with pytest.warns(CacheWarning, match="named by Logs.*0.* and Logs.*1"):
        assert [*make(mt.Compose([Logs(log), Logs(log), Opens(log)]), items)] == items


@pytest.mark.parametrize("named", ["a file", "a folder"])
def test_a_source_that_changes_and_changes_back_while_it_is_read_is_not_cached(
    make: Make, tmp_path: Path, named: str
) -> None:
    path = tmp_path / "series" / "a.txt"
    path.parent.mkdir()
    path.write_text("whole")
    os.utime(path, ns=(5, 5))

    class Read(mt.Transform):
        def __call__(self, data: Any) -> Any:
            path.write_text("half of i")  # somebody else copies the same file over it once more
            found = path.read_text()
            path.write_text("whole")
            os.utime(path, ns=(5, 5))
            return {"text": found}

    item = {"file": str(path if named == "a file" else path.parent)}
    dataset = make(mt.Compose([Read()]), [item])
    with pytest.warns(CacheWarning, match=f"while it was computed, {item['file']}.* changed, and holds the same"):
        assert dataset[0]["text"] == "half of i"
    assert records(Path(dataset.cache_dir)) == []
    with pytest.raises(PopulateError, match="holds the same as before"):
        dataset.populate(num_workers=0, progress=False)


@pytest.mark.parametrize("where", [".", "inner"])
def test_a_file_that_comes_and_goes_in_a_source_folder_while_it_is_read_is_noticed(
    make: Make, tmp_path: Path, where: str
) -> None:
    folder = tmp_path / "series"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a.txt").write_text("a")

    class Count(mt.Transform):
        def __call__(self, data: Any) -> Any:
            other = folder / where / "b.txt"
            other.write_text("b")  # somebody else copies a file to a wrong place
            found = len(list(folder.rglob("*.txt")))
            other.unlink()
            return {"files": found}

    dataset = make(mt.Compose([Count()]), [{"series": str(folder)}])
    time.sleep(0.02)  # the clock of a file system has ticks
    with pytest.warns(CacheWarning, match=f"while it was computed, {folder} changed, and holds the same"):
        assert dataset[0] == {"files": 2}
    assert records(Path(dataset.cache_dir)) == []


def test_a_cache_within_a_source_folder_does_not_change_it(make: Make, tmp_path: Path) -> None:
    (tmp_path / "series" / "inner").mkdir(parents=True)
    dataset = make(
        mt.Compose([mt.Identity()]), [{"series": str(tmp_path / "series")}] * 2, tmp_path / "series" / "cache"
    )
    _ = dataset[0], dataset[1]
    assert len(records(Path(dataset.cache_dir))) == 1


def test_replacing_the_transform(make: Make) -> None:
    dataset = make(mt.Compose([mt.Lambda(lambda d: {"x": 1})]))
    assert dataset[0] == {"x": 1}
    dataset.transform = mt.Compose([mt.Lambda(lambda d: {"x": 2})])
    assert dataset[0] == {"x": 2}
    unhashable = mt.Compose([mt.Lambda(lambda d: {"x": 3, "y": unhashable_thing}), mt.Identity()])
    unhashable_thing = (i for i in range(3))
    dataset.transform = unhashable
    for _ in range(2):  # also the second time: never on with the key of the transforms before
        with pytest.raises(HashingError):
            _ = dataset[0]


@pytest.mark.parametrize("random", [[], [mt.RandIdentity()]], ids=["cached", "random"])
def test_replacing_the_transforms_of_the_compose(make: Make, random: list[Any]) -> None:
    dataset = make(mt.Compose([mt.Identity(), *random, mt.Lambda(lambda d: {"x": d["x"] + 1})]), [{"x": 1}])
    assert dataset[0] == {"x": 2}
    dataset.transform.transforms = (mt.Identity(), *random, mt.Lambda(lambda d: {"x": d["x"] + 10}))
    assert dataset[0] == {"x": 11}


def test_a_transform_changed_in_place_is_looked_at_again_when_asked(make: Make) -> None:
    transform = mt.Compose([mt.ScaleIntensityd("x", 0.0, 1.0)])
    dataset = make(transform, [{"x": torch.arange(4.0)}])
    assert float(dataset[0]["x"].max()) == 1
    transform.transforms[0].scaler.maxv = 5.0
    warnings.filterwarnings("ignore", "every item was computed again")  # if the first one is on the disk by then
    dataset.set_transform_hash(dataset.hash_transform)
    assert float(dataset[0]["x"].max()) == 5


@pytest.mark.parametrize("hash_transform", [pickle_hashing, json_hashing, None])
def test_hash_transform(make: Make, hash_transform: Any) -> None:
    warnings.filterwarnings("ignore", "every item was computed again")  # if the first one is on the disk by then
    transforms = [mt.Compose([mt.Lambdad("x", func=np.exp)]), mt.Compose([mt.Lambdad("x", func=np.log)])]
    items = [make(t, [{"x": np.ones(2)}], hash_transform=hash_transform)[0]["x"] for t in transforms]
    assert torch.equal(*items) == (hash_transform is not pickle_hashing), "json_hashing hashes names, None nothing"


@pytest.mark.parametrize("hash_func", [pickle_hashing, json_hashing])
def test_hash_func(make: Make, hash_func: Any) -> None:
    data = [{"a": 1}, {"a": 2}]
    dataset = make(mt.Compose([Count()]), data, hash_func=hash_func)
    assert [dataset[i] for i in (0, 1, 0, 1)] == [*data, *data]
    assert Count.calls == 2


def test_a_hash_func_that_looks_at_files_is_asked_every_time(make: Make, tmp_path: Path) -> None:
    def modified(item: Any) -> bytes:
        return str(os.stat(item["image"]).st_mtime_ns).encode()

    source = tmp_path / "ct.nii"
    source.touch()
    dataset = make(mt.Compose([Count()]), [{"image": str(source)}], hash_func=modified, options={"sources": None})
    _ = dataset[0], dataset[0]
    os.utime(source, (0, 0))
    _ = dataset[0]
    assert Count.calls == 2


def test_a_relative_cache_dir_stays_where_it_was_made(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = make(mt.Compose([Count()]), [{"a": 1}], "cache")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _ = dataset[0]
    assert len(records(tmp_path / "cache")) == 1
    assert os.listdir() == []


def test_print_shows_what_is_wrong_with_the_first_item(make: Make) -> None:
    assert "cannot be hashed" in str(make(data=[{"a": (n for n in ())}]))


def test_hits_among_the_misses_need_no_reason(make: Make, volumes: Any) -> None:
    """Items that cannot be cached are missed in every epoch, and soon as often as there are items."""
    shared = {"image": volumes[0]["image"]}
    data = [shared, {**shared, "odd": 1}]

    def odd(item: Any) -> Any:
        return {**item, "image": object()} if "odd" in item else item

    _ = make(mt.Compose([mt.Lambda(odd)]), data[:1])[0]
    dataset = make(mt.Compose([mt.Lambda(odd)]), data)
    with pytest.warns(CacheWarning, match="computed in every epoch"):
        _ = [dataset[i] for i in (0, 1)]
    _ = [dataset[i] for i in (0, 1, 0, 1)]


def test_that_items_cannot_be_cached_is_told_of_each_pipeline(make: Make) -> None:
    dataset = make(mt.Compose([mt.Lambda(lambda item: {**item, "odd": object()})]))
    for _ in range(2):
        with pytest.warns(CacheWarning, match="computed in every epoch"):
            _ = dataset[0]
        dataset.transform = mt.Compose([mt.Lambda(lambda item: {**item, "other": object()})])


def test_the_forked_processes_of_a_run_tell_once_that_items_come_on_the_cpu(make: Make) -> None:
    dataset = make()
    dataset.settings = replace(dataset.settings, device=torch.device("cuda"))

    def target() -> tuple[str, int]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = dataset.session.target()
        return str(found), len(caught)

    assert [in_child(target) for _ in range(2)] == [("cpu", 1), ("cpu", 0)]


def test_sources_none(make: Make, tmp_path: Path) -> None:
    data = write_volumes(tmp_path, 1)
    for _ in range(2):
        _ = make(counted(), data, options={"sources": None})[0]
        Path(data[0]["image"]).write_bytes(b"no volume any more")
    assert Count.calls == 1


def test_set_data_takes_new_data_and_deletes_nothing(make: Make, cache_dir: Path, volumes: Any) -> None:
    dataset = make(counted())
    _ = dataset[0]
    kept = records(cache_dir)
    dataset.set_data(volumes[1:])
    assert len(dataset) == 2
    assert dataset[0]["name"] == "case 1"
    assert set(kept) < set(records(cache_dir))
    dataset.set_data(volumes)
    _ = dataset[0]
    assert Count.calls == 2


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (mt.Compose([mt.RandFlipd(KEYS)]), "the pipeline begins with RandFlipd, and only"),
        (mt.Compose([]), "there is no transform$"),
        (lambda d: d, "the pipeline begins with .*<lambda>, and only"),
        (mt.OneOf([mt.Flipd(KEYS)]), "the pipeline begins with OneOf, and only"),
    ],
)
def test_nothing_deterministic_is_said_once_and_caches_nothing(
    make: Make, cache_dir: Path, transform: Any, reason: str
) -> None:
    with pytest.warns(CacheWarning, match=f"nothing is cached: {reason}") as caught:
        dataset = make(transform, [{k: torch.rand(1, 3, 3) for k in KEYS}])
        for _ in range(3):
            _ = dataset[0]
    assert len(caught) == 1
    assert records(cache_dir) == []


def test_no_transform_at_all_is_said(cache_dir: Path) -> None:
    with pytest.warns(CacheWarning, match="nothing is cached: there is no transform$"):
        GDSDataset([1], None, cache_dir, device="cpu")  # type: ignore[arg-type]


def test_a_function_that_keeps_the_pipeline_from_the_cache_is_named(make: Make) -> None:
    with pytest.warns(CacheWarning, match=r"begins with .*<lambda>"):
        _ = make(mt.Compose([lambda d: d, mt.Flipd(KEYS)]), [{k: torch.rand(1, 3, 3) for k in KEYS}])[0]


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:99"}, "device='cuda:99'"),
        ({"device": 99}, "device=99"),
        ({"device": -1}, "device=-1"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": "mps"}, "only CPU and CUDA"),
        ({"device": True}, "device must be"),
        ({"device": "cpu", "backend": "warp"}, "backend='warp'.*auto, posix"),
        ({"device": "cpu", "options": {"verify": "sometimes"}}, "verify='sometimes'.*'first'"),
        ({"device": "cpu", "compression": "gzip"}, "compression='gzip'.*'auto', 'lz4', 'zstd', 'bitcomp' or None"),
        ({"device": "cpu", "compression": "bitcomp"}, "unpacked by GPUs only.*use 'lz4' or 'zstd'"),
        (
            {"device": "cpu", "compression": "lz4", "options": {"tiles": None}},
            "compression='lz4' packs tiles, and tiles=None",
        ),
        (
            {"device": "cpu", "compression": None, "options": {"tiles": 32}},
            "tiles=32 are compressed, and compression=None",
        ),
        (
            {"device": "cpu", "options": {"tiles": 24}},
            "tiles=24: use 'auto', None for whole tensors, or the edge.*16, 32 or 64",
        ),
        ({"device": "cpu", "options": {"tiles": True}}, "tiles=True"),
        (
            {"device": "cpu", "options": {"mantissa_bits": 23}},
            "mantissa_bits=23: use 1 to 22 of float32's 23 bits, or None",
        ),
        ({"device": "cpu", "options": {"mantissa_bits": 0}}, "mantissa_bits=0"),
        ({"device": "cpu", "options": {"mantissa_bits": True}}, "mantissa_bits=True"),
    ],
)
def test_bad_arguments_name_themselves(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GDSDataset([], pipeline(), tmp_path, **settings)


def test_a_backend_that_cannot_serve_the_device(tmp_path: Path) -> None:
    with pytest.raises(monai_gds.BackendUnavailable, match=r"kvikio.*CUDA targets only.*posix"):
        GDSDataset([], pipeline(), tmp_path, device="cpu", backend="kvikio")


def test_backend_options_reach_the_backend(make: Make) -> None:
    dataset = make(backend="posix", backend_options={"threads": 3})
    _ = dataset[0]
    assert dataset.session.cache().storage.describe()["threads"] == 3  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="warp"):
        _ = make(backend_options={"warp": 9})[0]


def test_cache_dir_that_is_a_file(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="is a file: name a directory"):
        make(cache=tmp_path / "file")


def test_a_cache_dir_that_cannot_be_made_is_said_once(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.warns(CacheWarning, match="file is a file: name another folder") as caught:
        dataset = make(cache=tmp_path / "file" / "cache")
        for there in (dataset, pickle.loads(pickle.dumps(dataset))):
            _ = there[0], there[1]
            there.flush()
    assert len(caught) == 1


def test_strict_is_an_error_where_nothing_can_be_written(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotSaved, match=r"strict=True, and nothing can be saved in .*file/cache: .*is a file"):
        make(cache=tmp_path / "file" / "cache", strict=True)
    with pytest.raises(ValueError, match="strict=True is for a cache_dir"):
        make(cache=None, strict=True)
    with make(cache=tmp_path / "new", strict=True) as dataset:
        assert not any((tmp_path / "new" / ".tmp").iterdir())
        dataset[0]


def test_strict_is_an_error_on_a_full_disk_and_a_read_only_one(make: Make, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 64 << 10) as small:
        with contextlib.suppress(OSError), (small / "all").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        with pytest.raises(NotSaved, match="free some space"):
            make(cache=small, strict=True)
        read_only(small)
        with pytest.raises(NotSaved, match=r"strict=True.*small: Read-only file system \(mount it writable"):
            make(cache=small, strict=True)


@pytest.mark.parametrize("whose", ["argument", "folder"])
def test_strict_is_an_error_where_the_budget_leaves_no_room(make: Make, tmp_path: Path, whose: str) -> None:
    def limited(nbytes: int, **settings: Any) -> GDSDataset:
        if whose == "argument":
            return make(cache=tmp_path / "cache", strict=True, max_bytes=nbytes, **settings)
        (tmp_path / "cache").mkdir(exist_ok=True)
        budget.write(tmp_path / "cache", nbytes)
        return make(cache=tmp_path / "cache", strict=True, **settings)

    remedy = "raise max_bytes" if whose == "argument" else "monai-gds cache budget"
    with pytest.raises(NotSaved, match=rf"strict=True, and nothing can be saved in .*cache: its budget.*{remedy}"):
        limited(100)
    first = limited(1 << 30)
    assert first.is_cached(0) and not first.is_cached(1)
    _ = first[0]  # in use, so that it makes no room
    size = records(tmp_path / "cache")[0].stat().st_size
    with pytest.raises(NotSaved, match=r"no room for a record.*beside those that are in use"):
        limited(size + 100)
    with pytest.warns(CacheWarning, match="computed in every epoch"), pytest.raises(NotSaved, match="leaves out"):
        limited(2 * size + 100, populate=True)
    limited(1 << 30, populate=True)
    limited(size)  # everything is there


def test_strict_leaves_an_item_that_fails_to_whoever_reads_it(make: Make, tmp_path: Path) -> None:
    dataset = make(mt.Lambda(lambda item: 1 // 0), cache=tmp_path / "cache", strict=True, max_bytes=1 << 30)
    with pytest.raises(RuntimeError, match="Lambda"):
        _ = dataset[0]


@pytest.mark.parametrize("how", [str, Path])
def test_the_home_directory_is_meant_by_a_tilde(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    _ = make(cache=how("~/cache"))[0]
    assert len(records(tmp_path / "home" / "cache")) == 1
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("argument", ["cache_dir", "local_dir", "root"])
@pytest.mark.parametrize("folder", ["$SCRATCH/cache", "${SCRATCH}/cache", "here/$SCRATCH"])
def test_a_variable_that_is_meant_for_a_shell_is_not_taken_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, Any] = {"cache_dir": tmp_path / "cache", argument: folder}
    with pytest.raises(ValueError, match=re.escape(f"{argument}={folder!r}: there is no folder '$")) as said:
        GDSDataset([1], [mt.Identity()], device="cpu", **arguments)
    assert f"give os.path.expandvars({folder!r})" in str(said.value)


@pytest.mark.parametrize("folder", ["$5", "5$x", "$there/cache"])
def test_a_folder_may_have_a_dollar_in_its_name(tmp_path: Path, folder: str) -> None:
    (tmp_path / "$there").mkdir()
    _ = GDSDataset([1], [mt.Identity()], tmp_path / folder, device="cpu")[0]
    assert len(records(tmp_path / folder)) == 1


@pytest.mark.parametrize(("cache", "error"), [("", ValueError), (5, TypeError), (b"cache", TypeError)])
def test_a_cache_dir_that_names_no_folder(make: Make, cache: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"cache_dir={cache!r} .*None for none"):
        make(cache=cache)


@pytest.mark.parametrize(
    "data", [None, ({"image": i} for i in range(3)), {"image": "ct.nii"}, {1, 2}, "data.json"], ids=lambda d: type(d)
)
def test_data_that_are_no_sequence_are_named(data: Any) -> None:
    with pytest.raises(TypeError, match=f"data is of type {type(data).__name__}: give a sequence of items"):
        GDSDataset(data, pipeline(), None, device="cpu")
    dataset = GDSDataset([], pipeline(), None, device="cpu")
    with pytest.raises(TypeError, match="data is of type"):
        dataset.set_data(data)


def test_missing_volume_is_monais_own_error(make: Make, cache_dir: Path) -> None:
    with pytest.raises(RuntimeError, match="LoadImage"):
        _ = make(data=[{"image": "/nowhere/a.nii.gz", "label": "/nowhere/b.nii.gz"}])[0]
    assert records(cache_dir) == []


@pytest.mark.parametrize("argument", ["hash_func", "hash_transform"])
def test_a_hash_function_that_returns_no_bytes_is_named(make: Make, argument: str) -> None:
    with pytest.raises(HashingError, match=f"{argument} returned a str: it has to return bytes"):
        _ = make(**{argument: lambda value: "abc"})[0]


def test_unhashable_transform_and_item_name_themselves(make: Make) -> None:
    numbers = (n for n in range(3))
    with pytest.raises(HashingError, match=r"variable numbers.*generator.*hash_transform=None"):
        make(mt.Compose([mt.Lambda(lambda d: numbers)]))
    make(mt.Compose([mt.Lambda(lambda d: numbers)]), hash_transform=None)
    with pytest.raises(HashingError, match=r"item\['n'\].*generator.*hash_func"):
        _ = make(mt.Compose([mt.Identity()]), [{"n": numbers}])[0]


# ---------------------------------------------------------------------------------------------------------------------
# Disks


def _damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize("how", [_damage, lambda p: os.truncate(p, 5000), lambda p: p.write_text("hello")])
def test_damaged_record_is_reported_once_recomputed_and_replaced(make: Make, cache_dir: Path, how: Any) -> None:
    expected = make(counted())[0]
    how(records(cache_dir)[0])
    dataset = make(counted())
    with pytest.warns(CacheWarning, match=str(records(cache_dir)[0])) as caught:
        assert_same(expected, dataset[0])
    assert len(caught) == 1
    assert Count.calls == 2
    assert_same(expected, dataset[0])
    assert_same(expected, make(counted())[0])
    assert Count.calls == 2


def _of_a_newer_version(path: Path, how: str) -> bytes:
    """Makes a record one that this version does not know, with a sound checksum."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    if how == "version":
        header["__metadata__"]["version"] = "3"
    else:
        header["__metadata__"]["tree"] = json.dumps({"$tensor": {"name": "image", "tiles": {"codec": "lz4"}}})
    text = bytearray(json.dumps(header, separators=(",", ":")).encode().ljust(start - 8))
    text[33:41] = b"00000000"
    text[33:41] = b"%08x" % zlib.crc32(text)
    path.write_bytes(raw[:8] + bytes(text) + raw[start:])
    return path.read_bytes()


@pytest.mark.parametrize("how", ["version", "packed tensor"])
def test_a_record_of_a_newer_version_is_computed_and_never_overwritten(make: Make, cache_dir: Path, how: str) -> None:
    expected = make(counted())[0]
    process_writer().flush()
    (path,) = records(cache_dir)
    newer = _of_a_newer_version(path, how)
    with pytest.warns(CacheWarning, match="without being replaced") as told:
        dataset = make(counted())
        for _ in range(2):
            assert_same(expected, dataset[0])
        dataset.flush()
        dataset.populate()
    assert len({str(warning.message) for warning in told}) == 1
    assert path.read_bytes() == newer


def test_full_disk_costs_the_cache_and_not_the_epoch(make: Make, tmp_path: Path, volumes: Any) -> None:
    expected = [make()[i] for i in range(len(volumes))]
    with mounted_tmpfs(tmp_path / "small", 300 << 10) as small:
        dataset = make(counted(), cache=small)
        with pytest.warns(CacheWarning, match="free some space") as caught:
            for _ in range(2):
                for i, item in enumerate(expected):
                    assert_same(item, dataset[i])
            dataset.flush()
        assert len(caught) == 1
        assert Count.calls > len(volumes)
        assert os.listdir(small / ".tmp") == []
        for path in records(small):
            assert path.stat().st_size % 4096 == 0


def test_read_only_cache_is_used(make: Make, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 64 << 20) as small:
        expected = make(counted(), cache=small)[0]
        process_writer().flush()
        read_only(small)
        dataset = make(counted(), cache=small)
        assert_same(expected, dataset[0])
        assert Count.calls == 1
        with pytest.warns(CacheWarning, match="mount it writable") as caught:
            _ = dataset[1], dataset[2]
            dataset.flush()
        assert len(caught) == 1


def test_someone_elses_cache_is_read_and_not_written(make: Make) -> None:
    with shared_folder() as folder:
        data = write_volumes(folder, 2)
        cache = folder / "cache"
        expected = make(counted(), data, cache)[0]

        def read() -> tuple[Any, int, list[str]]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                dataset = make(counted(), data, cache)
                same = [float(dataset[i]["image"].sum()) for i in (0, 1, 1)]
            return same, Count.calls, [str(w.message) for w in caught if w.category is CacheWarning]

        process_writer().flush()
        sums, calls, said = in_child(read, nobody=True)
        assert sums[0] == float(expected["image"].sum())
        assert calls == 3, "the first from the cache, the second computed twice"
        assert len(said) == 1
        assert "Permission denied" in said[0]


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def _saved(value: Any) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.tell()


@pytest.mark.parametrize("hits", [0, 1, 3], ids=["miss", "first hit", "later hit"])
def test_a_small_tensor_does_not_drag_the_record_along(make: Make, hits: int) -> None:
    transform = mt.Compose([mt.Lambda(lambda d: {"image": torch.zeros(1 << 20), "label": torch.ones(10)})])
    dataset = make(transform, [{"a": 1}])
    for _ in range(hits):
        _ = dataset[0]
    item = dataset[0]
    label = item["label"]
    assert _saved(label) < 10_000
    assert len(ForkingPickler.dumps(label)) < 10_000
    assert len(pickle.dumps(label)) < 10_000
    assert copy.deepcopy(label).untyped_storage().nbytes() < 10_000
    assert label.untyped_storage().nbytes() < 10_000
    assert (4 << 20) < _saved(item) < (4 << 20) + 20_000


def test_thousands_of_items_at_once_with_few_descriptors(make: Make) -> None:
    transform = mt.Compose([mt.Lambda(lambda d: {"image": torch.zeros(70_000, dtype=torch.uint8), "n": d["n"]})])
    dataset = make(transform, [{"n": i % 50} for i in range(5000)])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        for i in range(100):
            _ = dataset[i]
        before = len(os.listdir("/proc/self/fd"))
        held = [dataset[i] for i in range(5000)]
        assert len(os.listdir("/proc/self/fd")) <= before
        assert [h["n"] for h in held] == [i % 50 for i in range(5000)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_dropping_items_gives_their_memory_back(make: Make) -> None:
    dataset = make(mt.Compose([mt.Lambda(lambda d: {"image": torch.zeros(1 << 20)})]), [{"a": 1}])
    for _ in range(3):
        _ = dataset[0]

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(".safetensors")

    before = mappings()
    held = [dataset[0] for _ in range(20)]
    assert mappings() == before + 20
    del held
    assert mappings() == before


# ---------------------------------------------------------------------------------------------------------------------
# Loaders and processes


def collate(batch: list[Any]) -> Any:
    return [list_data_collate(batch), len(batch)]


def random_part() -> list[Any]:
    return [
        mt.SelectItemsd([*KEYS, "name"]),
        mt.RandFlipd(KEYS, prob=0.5, spatial_axis=0),
        mt.RandSpatialCropd(KEYS, (8, 8, 8), random_size=False),
        mt.RandGaussianNoised("image", prob=1.0),
    ]


def sums(loader: Any) -> list[float]:
    return [float(x) for batch in loader for x in batch["image"].double().sum((1, 2, 3, 4))]


def _seeded_loader(dataset: Any, workers: int, context: str | None = None) -> Any:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(
        dataset, batch_size=2, num_workers=workers, multiprocessing_context=context, generator=generator, shuffle=True
    )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_same_random_numbers_as_persistent_dataset(make: Make, volumes: Any, tmp_path: Path, workers: int) -> None:
    def epochs(dataset: Any) -> list[float]:
        dataset.transform.set_random_state(3)
        torch.manual_seed(3)
        loader = _seeded_loader(dataset, workers)
        return [value for _ in range(2) for value in sums(loader)]

    peer = PersistentDataset(
        copy.deepcopy(volumes), pipeline(*random_part()), tmp_path / "peer", track_meta=True, weights_only=False
    )
    expected = epochs(peer)
    assert len(set(expected)) == len(expected)
    for _ in range(2):  # filling the cache, and from the cache
        assert epochs(make(pipeline(*random_part()))) == expected


@pytest.mark.parametrize(("context", "workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.long)])
def test_workers_fill_and_read_the_cache(make: Make, volumes: Any, cache_dir: Path, context: str, workers: int) -> None:
    loader = DataLoader(
        make(), batch_size=1, num_workers=workers, multiprocessing_context=context, collate_fn=_only,
        persistent_workers=True,
    )  # fmt: skip
    expected = [make(cache=None)[i] for i in range(len(volumes))]
    for _ in range(2):
        for item, wanted in zip(loader, expected, strict=True):
            assert_same(wanted, item)
    assert len(records(cache_dir)) == len(volumes), "parent and workers have the same keys"
    assert_same(expected[0], make(counted())[0])


def _only(batch: list[Any]) -> Any:
    return batch[0]


def test_fork_after_the_cache_was_used(make: Make, volumes: Any) -> None:
    dataset = make(pipeline(mt.ResizeWithPadOrCropd([*KEYS, "mask"], (16, 16, 16))))
    for i in range(len(volumes)):
        _ = dataset[i], dataset[i]
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=2, num_workers=2, collate_fn=list_data_collate, multiprocessing_context="fork"
    )
    assert sum(len(batch["image"]) for batch in loader) == len(volumes)


def test_fork_after_threads_have_read(make: Make) -> None:
    """A pool of threads does not survive a fork: a child that went on with its parent's would wait for ever."""
    transform = mt.Compose([mt.Lambda(lambda d: {"x": torch.ones(1 << 20)})])
    dataset = make(transform, [{"a": 1}], options={"verify": "always"})
    _ = dataset[0], dataset[0]

    def read() -> float:
        signal.alarm(30)
        return float(dataset[0]["x"].sum())

    assert in_child(read) == 1 << 20


@pytest.mark.parametrize("use_thread_workers", [False, True])
def test_thread_data_loader(make: Make, volumes: Any, use_thread_workers: bool) -> None:
    fit = mt.ResizeWithPadOrCropd([*KEYS, "mask"], (16, 16, 16))
    dataset = make(mt.Compose([Count(), *preprocessing(), fit]))
    for _ in range(1 if use_thread_workers else 2):
        loader = ThreadDataLoader(dataset, batch_size=1, num_workers=2 * use_thread_workers,
                                  use_thread_workers=use_thread_workers)  # fmt: skip
        assert sorted(batch["name"][0] for batch in loader) == [v["name"] for v in volumes]
    # A thread that begins seeds the process's generators, so an item under way seems random, and is computed once more.
    assert len(volumes) <= Count.calls <= len(volumes) + use_thread_workers


def test_several_processes_fill_one_cache(make: Make, cache_dir: Path, volumes: Any) -> None:
    pids = []
    for _ in range(3):
        pid = fork()
        if pid == 0:
            code = 1
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    dataset = make()
                    for _ in range(2):
                        for i in range(len(volumes)):
                            _ = dataset[i]
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    assert len(records(cache_dir)) == len(volumes)
    assert os.listdir(cache_dir / ".tmp") == []


def test_several_items_at_once_are_the_items_one_by_one(make: Make) -> None:
    one_by_one, at_once = make(pipeline(*random_part())), make(pipeline(*random_part()))
    for _ in range(3):
        one_by_one.transform.set_random_state(1)
        at_once.transform.set_random_state(1)
        indices = [2, 0, 0, 1]
        expected = [one_by_one[i] for i in indices]
        assert_same(without_ids(expected), without_ids(at_once.__getitems__(indices)))


def test_pickle_and_copies(make: Make) -> None:
    dataset = make()
    expected = dataset[0]
    for again in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset), copy.copy(dataset)):
        assert_same(expected, again[0])
        assert again.cache_dir == dataset.cache_dir
        assert again.transform_hash == dataset.transform_hash
    assert len(pickle.dumps(dataset)) < 100_000


def _keeps_its_settings(path: Path) -> bool:
    """Whether a process with a setting of its own has it still after reading a dataset."""
    torch.set_default_dtype(torch.float64)
    pickle.loads(path.read_bytes())
    return torch.get_default_dtype() == torch.float64


def test_a_process_that_reads_a_dataset_keeps_its_settings(
    make: Make, tmp_path: Path, interpreter: Interpreter
) -> None:
    (tmp_path / "pickled").write_bytes(pickle.dumps(make()))
    assert interpreter.call(_keeps_its_settings, tmp_path / "pickled")


def test_explain_names_both_values_of_a_setting(make: Make) -> None:
    dataset = make(mt.Compose([Count()]), [{"a": 1}])
    _ = dataset[0]
    set_track_meta(False)
    try:
        assert "track_meta True → False" in make(mt.Compose([Count()]), [{"a": 1}]).explain(0)
    finally:
        set_track_meta(True)


def test_is_a_persistent_dataset_with_monais_signature(tmp_path: Path) -> None:
    import inspect

    from monai.data import GDSDataset as MonaiGDSDataset

    monais = list(inspect.signature(MonaiGDSDataset.__init__).parameters)[1:8]
    ours = inspect.signature(GDSDataset.__init__).parameters
    assert list(ours)[1:8] == monais
    assert set(inspect.signature(PersistentDataset.__init__).parameters) <= set(ours)
    own = (
        "backend", "backend_options", "root", "version", "compression", "max_bytes", "local_dir", "populate",
        "strict", "options",
    )  # fmt: skip
    assert tuple(n for n in ours if ours[n].kind is inspect.Parameter.KEYWORD_ONLY) == own
    assert issubclass(GDSDataset, PersistentDataset)
    GDSDataset([], [mt.Identity()], str(tmp_path), "cpu", pickle_module="pickle", pickle_protocol=2, weights_only=False)


def test_durable_and_not_give_the_same(make: Make, cache_dir: Path) -> None:
    expected = make()[0]
    raw = records(cache_dir)[0].read_bytes()
    records(cache_dir)[0].unlink()
    assert_same(expected, make(options={"durable": True})[0])
    assert records(cache_dir)[0].read_bytes() == raw


# ---------------------------------------------------------------------------------------------------------------------
# Saving beside the training


def test_a_folder_may_go_once_items_are_returned(make: Make, cache_dir: Path, volumes: Any) -> None:
    for _ in range(20):
        dataset = make([*preprocessing(), mt.RandFlipd(KEYS)])
        for index in (0, 1, 0):
            dataset[index]
        assert len(list(cache_dir.glob("*.safetensors"))) == 2
        shutil.rmtree(cache_dir)
    del dataset
    assert not process_writer()._queue
    assert not cache_dir.exists()


@pytest.mark.parametrize("left", [False, True], ids=["whole", "left"])
def test_a_folder_may_go_after_a_loop(make: Make, cache_dir: Path, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = CacheDirectory.publish

    def slowly(*args: Any) -> bool:
        time.sleep(0.05)
        return publish(*args)

    monkeypatch.setattr(CacheDirectory, "publish", slowly)
    monkeypatch.setattr(limits, "SETTLE_SECONDS", 60.0)  # a busy machine takes longer than half a second
    for _ in GDSDataLoader(make()):
        if left:
            break
    assert not process_writer()._queue
    assert list(cache_dir.glob("*.safetensors"))
    shutil.rmtree(cache_dir)
    assert not cache_dir.exists()


def test_the_end_of_a_dataset_makes_nothing_in_a_folder_that_is_being_removed(make: Make, cache_dir: Path) -> None:
    dataset = make()
    dataset[0]
    shutil.rmtree(cache_dir / ".index")
    del dataset
    gc.collect()
    assert not (cache_dir / ".index").exists()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is published before this event is set."""
    gate = threading.Event()
    publish = CacheDirectory.publish

    def wait_and_publish(cache: CacheDirectory, key: Any, item: Any) -> bool:
        assert gate.wait(30)
        return publish(cache, key, item)

    monkeypatch.setattr(CacheDirectory, "publish", wait_and_publish)
    yield gate
    gate.set()
    process_writer().flush()


def test_a_loader_does_not_wait_for_the_disk_and_flush_does(
    make: Make, cache_dir: Path, slow_disk: threading.Event
) -> None:
    dataset = make()
    with dataset:
        items = dataset.__getitems__([0, 1])
        assert list(cache_dir.glob("*.safetensors")) == []
        slow_disk.set()
    assert len(list(cache_dir.glob("*.safetensors"))) == 2
    assert_same([dataset[0], dataset[1]], items)


@pytest.mark.parametrize(("seconds", "nbytes"), [(0.01, 1 << 30), (60.0, 0)])
def test_the_end_of_a_loop_waits_for_little_and_for_no_slow_disk(
    make: Make,
    cache_dir: Path,
    slow_disk: threading.Event,
    seconds: float,
    nbytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SETTLE_SECONDS", seconds)
    monkeypatch.setattr(limits, "SETTLE_BYTES", nbytes)
    start = time.monotonic()
    assert len(list(GDSDataLoader(make()))) == 3
    assert time.monotonic() - start < 30
    assert list(cache_dir.glob("*.safetensors")) == []


def test_an_item_that_is_being_saved_is_not_computed_again(make: Make, slow_disk: threading.Event) -> None:
    steps = [Count(), *preprocessing(), Count()]
    (first,) = make(steps).__getitems__([0])
    threading.Timer(0.2, slow_disk.set).start()
    again = make(steps)[0]
    assert Count.calls == 2
    assert_same(again, first)


def test_what_is_saved_is_what_the_deterministic_transforms_gave(make: Make, slow_disk: threading.Event) -> None:
    def spoil(data: Any) -> Any:
        for key in KEYS:
            data[key].fill_(-1)
        return data

    (spoiled,) = make([*preprocessing(), spoil]).__getitems__([0])
    slow_disk.set()
    process_writer().flush()
    assert (spoiled["image"] == -1).all()
    assert not (make(preprocessing())[0]["image"] == -1).any()


def test_the_interpreter_waits_for_what_is_not_saved_yet(tmp_path: Path) -> None:
    printed = printed_by(
        """
import sys, time, numpy as np
from monai.transforms import Compose, EnsureTyped
from monai_gds import GDSDataset
from monai_gds.folder.directory import CacheDirectory
publish = CacheDirectory.publish
def slowly(*args):
    time.sleep(0.5)
    return publish(*args)
CacheDirectory.publish = slowly
dataset = GDSDataset([{"x": np.ones(99_999)}], Compose([EnsureTyped("x")]), sys.argv[1], device="cpu")
dataset.__getitems__([0])
import os; print(len([n for n in os.listdir(sys.argv[1]) if n.endswith("safetensors")]))
""",
        str(tmp_path / "cache"),
        whole=True,
    )
    assert printed == "0"
    assert len(records(tmp_path / "cache")) == 1


def test_a_worker_has_saved_its_item_when_it_returns_it(make: Make, cache_dir: Path, volumes: Any) -> None:
    dataset = make()
    for seen, _ in enumerate(DataLoader(dataset, batch_size=1, num_workers=1, prefetch_factor=1), 1):
        assert len(list(cache_dir.glob("*.safetensors"))) >= seen
    assert len(list(cache_dir.glob("*.safetensors"))) == len(volumes)


def test_a_full_disk_found_out_in_the_background_is_a_warning(make: Make, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 64 << 10) as small:
        dataset = make(cache=small)
        with pytest.warns(CacheWarning, match="free some space"):
            assert dataset.__getitems__([0])
            dataset.flush()
        assert not any(small.glob(".tmp/*")), "nothing is half-written"


# ---------------------------------------------------------------------------------------------------------------------
# Compression


def _volume(item: dict[str, Any]) -> dict[str, Any]:
    """An image as a MetaTensor, a label as an array: 2 MB each, of few values."""
    steps = torch.arange(80).repeat(80 * 80).view(1, 80, 80, 80) + item["n"]
    return {"image": MetaTensor(steps.float() / 7), "label": (steps % 5).numpy(), "n": item["n"]}


VOLUMES = [{"n": 1}, {"n": 2}]
needs_blosc2 = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")


@needs_blosc2
@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compression_changes_the_size_and_nothing_else(make: Make, cache_dir: Path, compression: Any) -> None:
    transform = mt.Compose([mt.Lambda(_volume)])
    wanted = make(transform, VOLUMES, None)[0]
    dataset = make(transform, VOLUMES, compression=compression)
    with dataset:
        assert_same(dataset[0], wanted)
    assert sum(path.stat().st_size for path in records(cache_dir)) < 1 << 20
    for again in (dataset, make(transform, VOLUMES), make(transform, VOLUMES, compression="lz4")):
        assert again.is_cached(0)
        assert_same(again[0], wanted)


@needs_blosc2
def test_records_in_both_forms_serve_one_dataset(make: Make, cache_dir: Path) -> None:
    transform = mt.Compose([mt.Lambda(_volume)])
    with make(transform, VOLUMES) as plain:
        plain[0]
    with make(transform, VOLUMES, compression="zstd") as dataset:
        dataset[1]
    sizes = sorted(path.stat().st_size for path in records(cache_dir))
    assert sizes[0] < 1 << 20 < 4 << 20 < sizes[1]
    for i in (0, 1):
        assert_same(dataset[i], make(transform, VOLUMES, None)[i])


def test_compression_without_its_library_says_what_to_install(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blosc2", None)
    blosc._library.cache_clear()
    with pytest.raises(CodecMissing, match=r"compression='lz4'.*pip install 'monai_gds\[tiles\]'"):
        make(compression="lz4")
    blosc._library.cache_clear()


CROPS, FLIPS = mt.RandSpatialCropd("image", 8), mt.RandFlipd("image")
BY_LABEL = mt.RandCropByPosNegLabeld("image", "label", (8, 8, 8))


@pytest.fixture
def small_volumes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large ones are by ``auto``, where crops come first."""
    monkeypatch.setattr("monai_gds.limits.CROPPED_BYTES", 0)


def forms(cache_dir: Path) -> list[str]:
    """The forms of the records, as their headers note them."""
    process_writer().flush()
    return sorted(found.form for found in survey(cache_dir))


@needs_blosc2
@pytest.mark.usefixtures("small_volumes_are_cut")
def test_auto_writes_tiles_where_the_first_random_transform_crops(make: Make, cache_dir: Path) -> None:
    items = [{"n": n} for n in range(4)]
    written: list[str] = []
    for n, (random, settings, form) in enumerate(
        [
            ([CROPS, FLIPS], {}, "lz4 32"), ([FLIPS, CROPS], {}, ""), ([CROPS], {"options": {"tiles": 16}}, "lz4 16"),
            ([CROPS], {"compression": None}, ""),
        ]
    ):  # fmt: skip
        make(mt.Compose([mt.Lambda(_volume), *random]), [items[n]], **settings)[0]
        written = sorted([*written, form])
        assert forms(cache_dir) == written
    dataset = make(mt.Compose([mt.Lambda(_volume), CROPS]), items)
    assert all(dataset.is_cached(n) for n in range(4)), "one key, whatever the form"


@needs_blosc2
def test_auto_writes_tiles_of_small_volumes_only_for_crops_that_follow_a_label(make: Make, cache_dir: Path) -> None:
    for n, (random, settings) in enumerate([(CROPS, {}), (BY_LABEL, {}), (CROPS, {"compression": "lz4"})]):
        make(mt.Compose([mt.Lambda(_volume), random]), [{"n": n}], **settings)[0]
        assert forms(cache_dir) == ["", *["lz4 32"] * n]


@needs_blosc2
@pytest.mark.usefixtures("small_volumes_are_cut")
def test_the_form_follows_a_pipeline_that_is_assigned(make: Make, cache_dir: Path) -> None:
    dataset = make(mt.Compose([mt.Lambda(_volume), FLIPS]), [{"n": 1}, {"n": 2}])
    dataset[0]
    dataset.transform = mt.Compose([mt.Lambda(_volume), CROPS])
    dataset[1]
    assert forms(cache_dir) == ["", "lz4 32"]


@needs_blosc2
@pytest.mark.usefixtures("small_volumes_are_cut")
def test_workers_write_the_form_that_the_dataset_asks_for(make: Make, cache_dir: Path) -> None:
    dataset = make(mt.Compose([mt.Lambda(_volume), CROPS]), [{"n": n} for n in range(2)])
    dataset.populate(2)
    assert forms(cache_dir) == ["lz4 32"] * 2


def test_auto_without_blosc2_writes_whole_tensors_and_only_print_says_why(
    make: Make, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blosc, "why_not", lambda: "Blosc2 is not installed: pip install 'monai_gds[tiles]'")
    dataset = make(mt.Compose([mt.Lambda(_volume), CROPS]), VOLUMES)
    dataset[0]
    assert forms(cache_dir) == [""]
    assert "pip install 'monai_gds[tiles]'" in str(dataset)


def test_on_a_gpu_crops_by_label_without_tiles_are_a_warning(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "target", lambda self: torch.device("cuda", 0))
    monkeypatch.setattr(blosc, "why_not", lambda: "Blosc2 is not installed: pip install 'monai_gds[tiles]'")
    items = [{"n": 1}]
    with pytest.warns(CacheWarning, match=r"look for the label's voxels in every epoch.*tiles-cuda13 or tiles-cuda12"):
        make(mt.Compose([mt.Lambda(_volume), BY_LABEL]), items).session.record_form()
    make(mt.Compose([mt.Lambda(_volume), CROPS]), items).session.record_form()
    make(mt.Compose([mt.Lambda(_volume), BY_LABEL]), items, compression=None).session.record_form()


def test_what_cannot_be_called_is_refused(make: Make) -> None:
    with pytest.raises(TypeError, match="transform holds 'LoadImaged', which cannot be called: give transforms"):
        make(mt.Compose(["LoadImaged"]), VOLUMES)
    with pytest.raises(TypeError, match=r"the class EnsureTyped: give an object of it, EnsureTyped\(…\)"):
        make(mt.Compose([mt.EnsureTyped]), VOLUMES)
    for name in ("hash_func", "hash_transform"):
        with pytest.raises(TypeError, match=f"{name}='md5' cannot be called"):
            make(mt.Compose([mt.Lambda(_volume)]), VOLUMES, **{name: "md5"})


@pytest.mark.parametrize("crops", [True, False])
def test_an_error_of_a_random_transform_names_the_item(make: Make, crops: bool) -> None:
    dataset = make(
        mt.Compose([mt.Lambda(_volume), *([CROPS] if crops else []), mt.RandGaussianNoised("imag", prob=1)]), VOLUMES
    )
    for _ in range(2):  # computed, and read
        with pytest.raises(RuntimeError) as raised:
            list(GDSDataLoader(dataset))
        cause, item = raised.value.__notes__
        assert re.match("because of KeyError: .*`imag`", cause)
        assert item == "monai_gds: while computing item 0 of the dataset"


def test_a_function_among_the_transforms_is_named_as_the_user_does(make: Make) -> None:
    def mine(data: Any) -> Any:
        return data

    with pytest.warns(CacheWarning, match="^mine is not a Transform of MONAI's .* though the next 1 could be cached"):
        make(mt.Compose([mt.Lambda(_volume), mine, mt.Identity()]), VOLUMES)


def test_repr_is_one_line_that_says_what_it_is(make: Make, cache_dir: Path) -> None:
    dataset = make(mt.Compose([mt.Lambda(_volume), CROPS]), VOLUMES, backend="posix")
    assert repr(dataset) == f"GDSDataset({len(VOLUMES)} items, cache_dir='{cache_dir}', device='cpu', backend='posix')"
    assert "cache_dir=None" in repr(make(mt.Compose([mt.Lambda(_volume)]), VOLUMES, cache=None))


def test_print_counts_the_records_of_the_pipeline(make: Make, cache_dir: Path) -> None:
    dataset = make(mt.Compose([mt.Lambda(_volume), CROPS]), VOLUMES)
    assert "records:    0 of this pipeline, new ones as" in str(dataset)
    dataset.populate(0, progress=False)
    assert f"records:    {len(VOLUMES)} of this pipeline, new ones as" in str(dataset)
    next(cache_dir.glob("*.safetensors")).unlink()
    assert f"records:    {len(VOLUMES) - 1} of this pipeline" in str(dataset)
    other = make(mt.Compose([mt.Lambda(_volume), mt.Identity()]), VOLUMES)
    assert "records:    0 of this pipeline" in str(other)


@needs_blosc2
@pytest.mark.usefixtures("small_volumes_are_cut")
def test_the_form_is_told(make: Make) -> None:
    dataset = make(mt.Compose([mt.Lambda(_volume), CROPS]), VOLUMES, options={"mantissa_bits": 9})
    assert "new ones as lz4, in tiles of 32³ (crops come first)" in str(dataset)
    assert "to 9 bits of mantissa" in str(dataset)
    dataset[0]
    assert re.match(r"item 0 is a hit: .*\.safetensors ÷ \d+\.\d \(lz4, 32³\)\n", dataset.explain(0))
    assert "mantissa_bits 9 → None" in make(mt.Compose([mt.Lambda(_volume)]), VOLUMES).explain(0)
    assert "whole tensors" in str(make(mt.Compose([mt.Lambda(_volume)]), VOLUMES))
    assert "records:" not in str(make(mt.Compose([mt.Lambda(_volume)]), VOLUMES, None))


@needs_blosc2
def test_workers_make_the_records_that_the_gpu_asks_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "why_not_on_gpu", lambda: None)
    dataset = make(mt.Compose([mt.Lambda(_volume)]), VOLUMES)
    assert dataset.session.for_worker().record_form().codec is None
    dataset.settings = replace(dataset.settings, device=torch.device("cuda", 0))
    view = dataset.session.for_worker()
    assert (view.target().type, view.record_form().codec) == ("cpu", "lz4")
    assert pickle.loads(pickle.dumps(view)).record_form() == view.record_form()


def test_a_codec_for_gpus_is_refused_in_workers_that_return_items(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make(mt.Compose([mt.Lambda(_volume)]), VOLUMES)
    dataset.settings = replace(dataset.settings, device=torch.device("cuda", 0), compression="bitcomp")
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(id=1, num_workers=2))
    with pytest.raises(
        ValueError, match=r"compression='bitcomp' is unpacked by GPUs only, .* worker that returns items"
    ):
        dataset[0]


# ---------------------------------------------------------------------------------------------------------------------
# Rounding


def _many_kinds(item: dict[str, Any]) -> dict[str, Any]:
    """Large floats as MetaTensor, array and tensor; and what is never rounded."""
    values = torch.rand(1, 80, 80, 80, generator=torch.Generator().manual_seed(item["n"]))
    affine = torch.full((4, 4), 0.123456789, dtype=torch.float64)
    return {
        "image": MetaTensor(values, affine=affine, meta={"spacing": np.full(3, 0.123456789)}),
        "array": values[0].numpy() + np.float32(1),
        "double": values.double() / 3,
        "small": torch.full((10,), 0.123456789),
        "label": (values * 1e6).int(),
    }


ROUNDED = ("image", "array", "double")


@pytest.mark.parametrize("compression", [None, pytest.param("lz4", marks=needs_blosc2)])
@pytest.mark.parametrize("bits", [3, 13])
def test_rounded_items_are_the_same_as_hits_and_misses(make: Make, bits: int, compression: Any) -> None:
    transform = mt.Compose([mt.Lambda(_many_kinds)])
    exact = make(transform, VOLUMES, None)[0]
    expected = make(transform, VOLUMES, None, options={"mantissa_bits": bits})[0]
    for name in ROUNDED:
        off = np.abs(np.asarray(expected[name], np.float64) / np.asarray(exact[name], np.float64) - 1).max()
        assert 0 < off <= 2 ** -(bits + 1)
    assert_same({**exact, **{name: expected[name] for name in ROUNDED}}, expected)
    assert_same(expected["image"].affine, exact["image"].affine)
    with make(transform, VOLUMES, compression=compression, options={"mantissa_bits": bits}) as dataset:
        assert_same(dataset[0], expected)
    for again in (dataset, make(transform, VOLUMES, options={"mantissa_bits": bits})):
        assert again.is_cached(0)
        assert_same(again[0], expected)
    other = make(transform, VOLUMES)
    assert not other.is_cached(0)
    assert_same(other[0], exact)
    assert not make(transform, VOLUMES, options={"mantissa_bits": bits + 1}).is_cached(0)


def test_rounding_counts_where_transforms_do_not(make: Make) -> None:
    transform = mt.Compose([mt.Lambda(_many_kinds)])
    for settings in ({}, {"options": {"mantissa_bits": 5}}):
        dataset = make(transform, VOLUMES, hash_transform=None, **settings)
        assert not dataset.is_cached(0)
        with dataset:
            dataset[0]


@needs_blosc2
def test_rounded_values_compress_better(make: Make, cache_dir: Path) -> None:
    transform = mt.Compose([mt.Lambda(_many_kinds)])
    for settings in ({}, {"options": {"mantissa_bits": 7}}):
        with make(transform, VOLUMES, compression="zstd", **settings) as dataset:
            dataset[0]
    rounded, exact = sorted(path.stat().st_size for path in records(cache_dir))
    assert rounded < 0.8 * exact


def test_a_transform_keeps_the_tensor_that_it_returned(make: Make) -> None:
    volume = torch.full((1, 80, 80, 80), 0.1)
    _ = make(mt.Compose([mt.Lambda(lambda item: {"image": volume})]), VOLUMES, options={"mantissa_bits": 5})[0]
    assert bool((volume == 0.1).all())


# ---------------------------------------------------------------------------------------------------------------------
# What people try who come from elsewhere


def test_arguments_that_became_options_name_their_place(tmp_path: Path) -> None:
    for name in (one.name for one in fields(CacheOptions)):
        with pytest.raises(TypeError, match=rf"^{name}= is options=CacheOptions\({name}=...\)$"):
            GDSDataset([1], [mt.Identity()], tmp_path, device="cpu", **{name: None})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cachedir", r"no argument 'cachedir': did you mean 'cache_dir'\?$"),
        ("cache_rat", r"no argument 'cache_rat': did you mean 'cache_rate'\?$"),
        ("colour", r"no argument 'colour': help\(GDSDataset\)"),
        *(
            (name, f"no argument '{name}', which is CacheDataset's: leave it out. populate=True caches all items")
            for name in sorted(set(signature(CacheDataset).parameters) - set(signature(GDSDataset).parameters))
        ),
    ],
)
def test_an_argument_that_there_is_not_is_answered_with_what_to_write(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        GDSDataset([1], [mt.Identity()], tmp_path, device="cpu", **{name: 0.5})


def test_options_may_be_a_dict(make: Make) -> None:
    as_dict, as_such = make(options={"verify": "always"}), make(options=CacheOptions(verify="always"))
    assert as_dict.settings.options == as_such.settings.options != make().settings.options
    with pytest.raises(TypeError, match=r"CacheOptions has no option 'checks': help\(CacheOptions\)"):
        make(options={"checks": "always"})
    with pytest.raises(TypeError, match="compression= is an argument of GDSDataset itself"):
        make(options={"compression": None})
    with pytest.raises(TypeError, match=r"CacheOptions has no option 'veriffy': did you mean 'verify'\?"):
        make(options={"veriffy": "always"})
    with pytest.raises(TypeError, match=r"options='always': give CacheOptions\(...\), or a dict"):
        make(options="always")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"mmap": "no"}, ValueError, "mmap='no': use 'auto', True or False"),
        ({"sources": "name"}, ValueError, "sources='name': use 'content', 'stat', 'once' or None"),
        ({"mantissa_bits": 23}, ValueError, "mantissa_bits=23"),
        ({"device_bytes": "much"}, ValueError, "device_bytes='much'"),
        ({"local_bytes": -1}, ValueError, "local_bytes=-1"),
        ({"file_mode": "rw"}, TypeError, "file_mode='rw'"),
    ],
)
def test_options_are_checked_before_there_is_a_dataset(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        CacheOptions(**options)


def test_options_cannot_be_changed_and_go_to_other_processes() -> None:
    options = CacheOptions(sources="stat", file_mode=0o600)
    with pytest.raises(FrozenInstanceError):
        options.verify = "never"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(options)) == options


def test_a_dataset_that_is_dropped_takes_its_cache_along(make: Make) -> None:
    """At once, and not when the collector finds it: a cache may hold memory of the device."""
    dataset = make()
    _ = dataset[0]
    cache = weakref.ref(dataset.session.cache())
    dataset.flush()
    gc.disable()
    try:
        del dataset
        assert cache() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------------------------------
# The user's own word in the key


def test_another_version_is_a_miss_and_explained(make: Make) -> None:
    with make(version="network 3") as dataset:
        _ = dataset[0]
    assert make(version="network 3").is_cached(0)
    other = make(version="network 4")
    assert not other.is_cached(0)
    assert "version 'network 3' → 'network 4'" in other.explain(0)
    assert "settings of the process: version 'network 4'" in other.explain(0)
    assert "version 'network 3' → None" in make().explain(0)


def test_no_version_leaves_the_key_as_it_was(make: Make) -> None:
    dataset = make()
    assert dataset.key(0).digest == make(version=None).key(0).digest
    assert all(name != "version" for name, _ in dataset.key(0).pipeline.state)


def test_versions_that_differ_in_anything_have_other_keys(make: Make) -> None:
    versions = ["1", 1, True, 1.0, "", "None", (1, 2), [1, 2], {"a": 1, "b": 2}, {"a": 1}, np.arange(3), np.arange(4)]
    digests = [make(version=version).key(0).digest for version in [None, *versions]]
    assert len(set(digests)) == len(digests)
    assert make(version={"b": 2, "a": 1}).key(0).digest in digests, "the order of a dict does not count"


def test_a_version_counts_where_transforms_do_not(make: Make) -> None:
    assert make(hash_transform=None, version=1).key(0).digest != make(hash_transform=None, version=2).key(0).digest


def test_a_version_without_a_stable_hash_is_an_error(make: Make) -> None:
    with pytest.raises(monai_gds.HashingError):
        make(version=(n for n in ()))


def test_options_that_a_backend_does_not_take_fail_at_once_and_those_it_takes_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"backend 'posix' has no option 'thread': it takes .*threads"):
        GDSDataset([1], [mt.Identity()], tmp_path, device="cpu", backend="posix", backend_options={"thread": 3})
    with pytest.raises(TypeError, match="backend_options='threads': give a dict of them by name"):
        GDSDataset([1], [mt.Identity()], tmp_path, device="cpu", backend_options="threads")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["auto", "posix"])
@pytest.mark.parametrize(
    ("options", "wrong"),
    [({"threads": 0}, "threads=0"), ({"threads": "x"}, "threads='x'"), ({"pinned_bytes": "4GB"}, "pinned_bytes='4GB'")],
)
def test_values_of_options_that_cannot_work_fail_at_once(
    tmp_path: Path, backend: str, options: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ValueError, match=wrong):
        GDSDataset([1], [mt.Identity()], tmp_path, device="cpu", backend=backend, backend_options=options)


@pytest.mark.parametrize("argument", ["cache_dir", "local_dir", "root"])
@pytest.mark.parametrize("url", ["s3://bucket/cache", Path("s3://bucket/cache")])  # Path leaves one slash of two
def test_a_url_is_no_folder(argument: str, url: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, Any] = {"cache_dir": tmp_path, argument: url}
    with pytest.raises(ValueError, match=f"{argument}='s3:/+bucket/cache' is a URL, and records are files"):
        GDSDataset([1], [mt.Identity()], device="cpu", **arguments)
    assert not list(tmp_path.iterdir())


def test_a_table_is_told_to_give_its_rows(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="this machine has no pandas")
    table = pandas.DataFrame({"image": ["a.nii", "b.nii"]})
    with pytest.raises(TypeError, match=r"data.to_dict\('records'\)"):
        GDSDataset(table, [mt.Identity()], tmp_path, device="cpu")
    assert len(GDSDataset(table.to_dict("records"), [mt.Identity()], tmp_path, device="cpu")) == 2


def test_help_is_about_this_class() -> None:
    assert "PersistentDataset" not in (GDSDataset.__init__.__doc__ or "PersistentDataset")


def test_a_dataset_names_its_pipeline_as_ls_does(tmp_path: Path) -> None:
    items = write_volumes(tmp_path, 1, (8, 8, 8))
    with GDSDataset(items, pipeline(), tmp_path / "cache", device="cpu") as dataset:
        _ = dataset[0]
    (found,) = survey(tmp_path / "cache")
    assert dataset.session.pipeline_digest() == found.pipeline
    assert f"pipeline:   {found.pipeline[:8]}" in str(dataset)


def test_a_function_is_not_called_a_random_transform(tmp_path: Path) -> None:
    dataset = GDSDataset([1], [mt.Identity(), abs], tmp_path / "cache", device="cpu")
    assert "before abs, which is not a Transform of MONAI's and counts as random" in str(dataset)
