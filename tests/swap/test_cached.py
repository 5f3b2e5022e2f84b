"""Stand-ins for MONAI's caching datasets: the items and attributes of the originals, from records."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import monai.apps
import monai.data
import nibabel
import numpy as np
import pytest
import torch
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    EnsureTyped,
    FgBgToIndicesd,
    Identityd,
    LoadImaged,
    OneOf,
    RandFlipd,
    RandShiftIntensityd,
    ScaleIntensityd,
    ToTensord,
    Transform,
    reset_ops_id,
)
from monai.utils import set_determinism

import monai_gds
from monai_gds import CacheWarning, GDSDataset, NotSaved, PopulateError
from monai_gds.dataset.settings import Settings
from tests.fixtures_nifti import write_volumes
from tests.same import assert_same

KEYS = ("image", "label")

#: MONAI's own classes, to compare with.
Theirs = monai.data.CacheDataset


def transform() -> Compose:
    return Compose(
        [
            LoadImaged(KEYS, ensure_channel_first=True),
            ScaleIntensityd("image"),
            RandFlipd(KEYS, prob=0.5),
            RandShiftIntensityd("image", offsets=0.1, prob=1.0),
            EnsureTyped(KEYS),
        ]
    )


@pytest.fixture
def items(tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "volumes").mkdir()
    return write_volumes(tmp_path / "volumes", 4, (12, 10, 8))


@pytest.fixture
def patched(tmp_path: Path) -> Iterator[monai_gds.swap.patching.Patch]:
    with monai_gds.patch(tmp_path / "cache") as done:
        yield done


def epoch(dataset: Any, seed: int = 0) -> list[Any]:
    """The items, without the identity of the transforms, which a ``CacheDataset`` keeps."""
    dataset.transform.set_random_state(seed)
    found = [dataset[index] for index in range(len(dataset))]
    reset_ops_id(found)
    return found


def test_a_cache_dataset_gives_the_same_and_has_read_everything(
    items: list[dict[str, Any]], tmp_path: Path, patched: Any
) -> None:
    theirs = Theirs(items, transform(), progress=False)
    ours = monai.data.CacheDataset(items, transform(), progress=False, num_workers=2)
    shutil.rmtree(tmp_path / "volumes")
    for _ in range(2):
        assert_same(epoch(ours), epoch(theirs))


def test_its_attributes_are_there(items: list[dict[str, Any]], patched: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        ours = monai.data.CacheDataset(items, transform(), cache_num=3, cache_rate=0.8, copy_cache=False, num_workers=0)
    assert isinstance(ours, Theirs) and isinstance(ours, GDSDataset)
    given = (
        "set_num",
        "set_rate",
        "cache_num",
        "num_workers",
        "progress",
        "copy_cache",
        "runtime_cache",
        "hash_as_key",
    )
    assert [getattr(ours, name) for name in given] == [3, 0.8, 3, 1, True, False, False, False]
    assert len(ours._cache) == 3
    assert_same(ours._cache[-1]["image"], transform()(items[2], end=2)["image"])
    assert len(ours._cache[1:]) == len(list(ours._cache)[1:]) == 2
    with pytest.raises(TypeError, match="set_data"):
        ours._cache = [1]


class Moves(Transform):  # type: ignore[misc]
    """Names a CUDA device, as ``EnsureTyped(device=)`` does, and needs none."""

    def __init__(self) -> None:
        self.device = torch.device("cuda:0")

    def __call__(self, data: Any) -> Any:
        assert "moved" not in data
        return {**data, "moved": True}


def moving() -> Compose:
    steps = transform().transforms
    return Compose([*steps[:2], Moves(), ScaleIntensityd("image", 0, 2), *steps[2:]])


@pytest.mark.parametrize("copy_cache", [True, False])
def test_what_is_moved_to_a_gpu_stays_there_and_so_does_the_loader(
    copy_cache: bool, items: list[dict[str, Any]], patched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Theirs(items, moving(), progress=False, copy_cache=copy_cache)
    monai.data.CacheDataset(items, moving(), progress=False)
    monkeypatch.setattr(nibabel, "load", None)  # whoever loads a volume fails
    ours = monai.data.CacheDataset(items, moving(), progress=False, copy_cache=copy_cache)
    assert isinstance(ours, GDSDataset) and isinstance(ours, monai.data.CacheDataset)
    for _ in range(2):
        assert_same(epoch(ours), epoch(theirs))
    assert ours[0]["moved"] and ours._cache[0] is ours._cache[0]
    assert_same(ours._cache[1]["image"], theirs._cache[1]["image"])
    assert ours.is_cached(3) and "a hit" in ours.explain(3)
    assert "4 of this pipeline" in str(ours) and "in memory:  4 items" in str(ours)
    loader = monai.data.ThreadDataLoader(ours, num_workers=0, batch_size=2)
    assert type(loader) is monai.data.ThreadDataLoader and len([*loader]) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"cache_rate": 0.5},
        {"runtime_cache": True},
        {"hash_as_key": True},
        {"transform": Compose([*transform().transforms, Moves()])},
    ],
    ids=lambda other: next(iter(other)),
)
@pytest.mark.filterwarnings("ignore:cache_num, cache_rate")
def test_what_is_not_all_kept_on_a_gpu_is_read_from_records(
    other: dict[str, Any], items: list[dict[str, Any]], patched: Any
) -> None:
    """Half of it; when it is first read; once for equal items; moved after a random transform."""
    ours = monai.data.CacheDataset(items, **{"transform": moving(), "progress": False, **other})
    with pytest.raises(TypeError, match="set_data"):
        ours._cache[0]["image"] = 1


def test_items_on_a_gpu_follow_set_data_and_are_pickled(items: list[dict[str, Any]], patched: Any) -> None:
    theirs, ours = Theirs(items[:3], moving(), progress=False), monai.data.CacheDataset(items, moving(), progress=False)
    ours.set_data(items[:3])
    for one in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert len(one) == len(one._cache) == 3 and type(one._cache) is list
        assert_same(epoch(one), epoch(theirs))


def test_a_subclass_whose_items_are_on_a_gpu(items: list[dict[str, Any]], patched: Any) -> None:
    class Paired(monai.data.CacheDataset):  # type: ignore[misc]
        def __init_subclass__(cls, of: str) -> None: ...

        def pairs(self) -> int:
            return len(self) // 2

        def set_data(self, data: Any) -> None:
            super().set_data(data)
            self.names = [item["name"] for item in data]

        def __str__(self) -> str:
            return f"{len(self.names)} names"

        def __repr__(self) -> str:
            return f"<{self}>"

    ours = Paired(items, moving(), progress=False)
    assert isinstance(ours, Paired) and ours.pairs() == 2
    assert (str(ours), repr(ours)) == ("4 names", "<4 names>")
    assert_same(epoch(ours), epoch(Theirs(items, moving(), progress=False)))
    ours.set_data(items[:2])
    assert len(ours) == len(ours.names) == 2


def test_a_subclass_that_orders_its_data_has_its_items_on_a_gpu_in_that_order(
    items: list[dict[str, Any]], patched: Any
) -> None:
    def reverses(kind: Any) -> Any:
        return type("Reversed", (kind,), {"set_data": lambda self, data: kind.set_data(self, data[::-1])})

    ours, theirs = (reverses(k)(items, moving(), progress=False) for k in (monai.data.CacheDataset, Theirs))
    for data in (items, items[:3]):
        assert_same(epoch(ours), epoch(theirs))
        for one in (ours, theirs):
            one.set_data(data)
    assert_same(epoch(ours), epoch(theirs))


def test_set_data_keeps_items_on_a_gpu_as_the_dataset_is_now(items: list[dict[str, Any]], patched: Any) -> None:
    """With another pipeline, none that moves items, and for no more items than are to be cached; copies have theirs."""
    ours, theirs = (kind(items, moving(), progress=False) for kind in (monai.data.CacheDataset, Theirs))
    copied = copy.copy(ours)
    other = Compose([ScaleIntensityd("image", 1, 5) if i == 1 else s for i, s in enumerate(moving().transforms)])
    for steps, kept in ((other, True), (transform(), False), (moving(), True)):
        for one in (ours, theirs):
            one.transform = copy.deepcopy(steps)
            one.set_data(items[:3])
        assert (type(ours._cache) is list) == kept
        assert_same(epoch(ours), epoch(theirs))
    ours.set_num = theirs.set_num = 3
    with pytest.warns(CacheWarning, match="3 of 4 items are cached now"):
        ours.set_data(items)
    theirs.set_data(items)
    assert_same(epoch(ours), epoch(theirs))
    assert all(map(ours.is_cached, range(4)))
    assert len(copied) == len(copied._cache) == 4 and all(map(copied.is_cached, range(4)))


def test_data_whose_move_fails_leave_no_items_of_others(items: list[dict[str, Any]], patched: Any) -> None:
    ours = monai.data.CacheDataset(items, moving(), progress=False)
    with pytest.raises(RuntimeError, match="applying transform"):
        ours.set_data([{**items[0], "moved": 1}])
    with pytest.raises(RuntimeError, match="set_data"):
        _ = ours[0]
    assert "in memory:  0 items" in str(ours)
    ours.set_data(items[:1])
    assert_same(epoch(ours), epoch(Theirs(items[:1], moving(), progress=False)))


def test_what_is_made_of_items_on_a_gpu_has_all_their_transforms(items: list[dict[str, Any]], patched: Any) -> None:
    steps, outer = Compose(moving().transforms[:4]), Compose([ScaleIntensityd("image", 0, 3), RandFlipd(KEYS, 0.5)])
    theirs = Theirs(Theirs(items, steps, progress=False), outer, progress=False)
    with pytest.warns(CacheWarning, match="items are read at a hit, too"):
        ours = monai.data.CacheDataset(
            monai.data.CacheDataset(items, steps, progress=False), copy.deepcopy(outer), progress=False
        )
    for _ in range(2):
        assert_same(epoch(ours), epoch(theirs))


class Filled(Transform):  # type: ignore[misc]
    """Adds a tensor of the default type."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, item: Any) -> Any:
        return {**item, self.key: torch.full((3,), float(item["n"]))}


class Met(Transform):
    """Returns once two threads of this process are in it."""

    def __init__(self, met: threading.Barrier) -> None:
        self.met = met

    def __call__(self, item: Any) -> Any:
        self.met.wait(10)
        return {**item, "process": os.getpid()}

    def __reduce__(self) -> Any:
        raise TypeError("another process cannot have the barrier")


@pytest.fixture
def unforkable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As once CUDA is initialised. A process that is not forked imports MONAI first, which may take longer than all."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


@pytest.mark.parametrize("last", [Moves, EnsureTyped], ids=["on a GPU", "from records"])
def test_threads_compute_where_no_process_can_be_forked(last: Any, patched: Any, unforkable: None) -> None:
    steps = Compose([Met(threading.Barrier(2)), last() if last is Moves else last("n")])
    ours = monai.data.CacheDataset([{"n": n} for n in range(4)], steps, progress=False, num_workers=2)
    assert {item["process"] for item in ours} == {os.getpid()}
    assert all(ours.is_cached(n) for n in range(4))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_item_that_fails_there_costs_no_other_item(
    num_workers: int, items: list[dict[str, Any]], tmp_path: Path, patched: Any, unforkable: None
) -> None:
    broken = [{**items[0], "image": str(tmp_path / "none.nii")}, *items[1:]]
    with pytest.raises(PopulateError, match="1 of 4 items failed, the others are cached") as e:
        monai.data.CacheDataset(broken, moving(), progress=False, num_workers=num_workers)
    assert [one.index for one in e.value.failures] == [0]
    assert len([*(tmp_path / "cache").glob("*.safetensors")]) == 3


def test_items_without_room_are_an_error_there_if_that_is_asked_for(
    items: list[dict[str, Any]], patched: Any, unforkable: None
) -> None:
    with pytest.warns(CacheWarning, match="the budget"), pytest.raises(NotSaved, match=r"leaves out [1-4] items"):
        monai.data.CacheDataset(items, moving(), progress=False, num_workers=2, strict=True, max_bytes=60_000)


def test_no_record_is_made_there_that_nobody_reads(items: list[dict[str, Any]], tmp_path: Path, patched: Any) -> None:
    ours = monai.data.CacheDataset(items, moving(), progress=False, strict=True, max_bytes="1GB")
    assert all(ours.is_cached(n) for n in range(4)) and len([*(tmp_path / "cache").glob("*.safetensors")]) == 4
    for one in (Compose([*transform().transforms[:2], Identityd("image")]), moving()):  # nor read as it is made
        with pytest.raises(NotSaved, match="nothing can be saved"):
            monai.data.CacheDataset(items, one, progress=False, strict=True, max_bytes=1000, runtime_cache=True)


def test_other_data_are_computed_there_under_the_settings_of_before(patched: Any, unforkable: None) -> None:
    def steps() -> Compose:
        return Compose([Filled("x"), Moves()])

    ours = monai.data.CacheDataset([{"n": 0}, {"n": 1}], steps(), progress=False, num_workers=2)
    torch.set_default_dtype(torch.float64)
    try:
        ours.set_data([{"n": 2}, {"n": 3}])
    finally:
        torch.set_default_dtype(torch.float32)
    assert [item["x"].dtype for item in ours] == [torch.float32] * 2


def test_one_of_some_transforms_of_which_one_moves_to_a_gpu(patched: Any) -> None:
    ours = monai.data.CacheDataset([{"a": 1}] * 20, OneOf([Identityd("a"), Moves()]), progress=False)
    assert {len(item) for item in ours} == {1, 2}


def test_arrays_are_given_to_the_move_as_they_are(
    items: list[dict[str, Any]], patched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device of other datasets is a GPU (simulated), on which these would have tensors in their place."""
    made = Settings.of

    def on_gpu(device: Any, *rest: Any) -> Settings:
        found = made("cpu", *rest)
        return replace(found, device=torch.device("cuda:0"), form=found.form._replace(numpy=False))

    monkeypatch.setattr(Settings, "of", on_gpu)
    ours = monai.data.CacheDataset(items, moving(), progress=False)
    assert_same(epoch(ours), epoch(Theirs(items, moving(), progress=False)))


@pytest.mark.gpu
def test_a_fast_training_has_its_volumes_on_the_gpu(items: list[dict[str, Any]], patched: Any) -> None:
    def fast() -> Compose:
        steps = transform().transforms
        moved = EnsureTyped(KEYS, device=torch.device("cuda:0"), track_meta=False)
        return Compose([*steps[:2], FgBgToIndicesd("label"), moved, *steps[2:4]])

    given = {"progress": False, "num_workers": 2, "copy_cache": False}
    theirs, ours = Theirs(items, fast(), **given), monai.data.CacheDataset(items, fast(), **given)
    assert ours[0]["image"].is_cuda and type(ours[0]["label_fg_indices"]) is type(theirs[0]["label_fg_indices"])
    assert_same(epoch(ours), epoch(theirs))
    batches = []
    for one in (theirs, ours):
        torch.manual_seed(1)  # MONAI's loader draws its transforms' seed from it
        loader = monai.data.ThreadDataLoader(one, num_workers=0, batch_size=2)
        batches.append([{key: batch[key].as_tensor() for key in KEYS} for batch in loader])
    assert_same(batches[1], batches[0])


@pytest.mark.parametrize("arguments", [{"cache_num": 2}, {"cache_rate": 0.5}], ids=str)
def test_a_part_is_cached_now_and_the_rest_when_it_is_read(
    arguments: Any, items: list[dict[str, Any]], patched: Any
) -> None:
    with pytest.warns(CacheWarning, match="2 of 4 items are cached now") as said:
        ours = monai.data.CacheDataset(items, transform(), progress=False, **arguments)
    assert [one.filename for one in said] == [__file__]
    assert [ours.is_cached(index) for index in range(4)] == [True, True, False, False]
    with ours:
        _ = ours[3]
    assert [ours.is_cached(index) for index in range(4)] == [True, True, False, True]


@pytest.mark.parametrize("runtime_cache", [True, "threads", "processes", [None] * 4], ids=str)
def test_a_runtime_cache_is_filled_by_the_items_that_are_read(
    runtime_cache: Any, items: list[dict[str, Any]], patched: Any
) -> None:
    with monai.data.CacheDataset(items, transform(), runtime_cache=runtime_cache) as ours:
        _ = ours[1]
    assert [ours.is_cached(index) for index in range(4)] == [False, True, False, False]


def test_other_data_are_cached_too_and_files_are_looked_at_again(
    items: list[dict[str, Any]], tmp_path: Path, patched: Any
) -> None:
    ours = monai.data.CacheDataset(items[:1], transform(), progress=False)
    write_volumes(tmp_path / "volumes", 1, (13, 10, 8))
    ours.set_data(items[:2])
    assert [item["image"].shape[1] for item in ours] == [13, 12]
    assert ours.cache_num == 2 and ours.is_cached(1)


def test_equal_items_count_once_where_that_is_asked_for(items: list[dict[str, Any]], patched: Any) -> None:
    data = [items[0], items[1], dict(items[1]), items[2]]
    ours = monai.data.CacheDataset(data, transform(), progress=False, hash_as_key=True, cache_num=4)
    assert (len(ours), ours.cache_num, len(ours._cache), len(ours._hash_keys)) == (4, 3, 3, 3)
    assert_same(ours._cache[1]["image"], transform()(items[1], end=2)["image"])


def test_items_that_fail_show_in_the_constructor(items: list[dict[str, Any]], patched: Any) -> None:
    Path(items[2]["image"]).write_bytes(b"cut")
    with pytest.raises(monai_gds.PopulateError, match="1 of 4 items failed"):
        monai.data.CacheDataset(items, transform(), num_workers=2, progress=False)


def test_a_subclass_that_makes_items_in_memory_is_told_where_to_make_them(patched: Any) -> None:
    class Mine(monai.data.CacheDataset):  # type: ignore[misc, name-defined, unused-ignore]
        def _load_cache_item(self, idx: int) -> Any:
            return 0

    with pytest.raises(TypeError, match=r"Mine has a _load_cache_item of its own.*_pre_transform"):
        Mine([1], transform())


def test_copies_keep_methods_and_attributes(items: list[dict[str, Any]], patched: Any) -> None:
    ours = monai.data.CacheDataset(items, transform(), progress=False)
    for again in (copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert again.cache_num == 4 and isinstance(again, Theirs)
        assert_same(epoch(again), epoch(ours))


def test_its_options_are_those_of_a_gds_dataset_too(items: list[dict[str, Any]], tmp_path: Path, patched: Any) -> None:
    ours = monai.data.CacheDataset(items, transform(), cache_dir=tmp_path / "own", options={"verify": "always"})
    assert (ours.cache_dir, ours.settings.options.verify) == (tmp_path / "own", "always")
    with pytest.raises(TypeError, match="GDSDataset has no argument 'cache_rates'"):
        monai.data.CacheDataset(items, transform(), cache_rates=0.5)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("CacheDataset", {"transform": moving()}),
        ("CacheDataset", {"cache_rate": 0.5}),
        ("CacheDataset", {"runtime_cache": True}),
        ("SmartCacheDataset", {"replace_rate": 0.5, "cache_rate": 0.5}),
        ("LMDBDataset", {}),
    ],
    ids=["on a GPU", "half", "when it is used", "smart", "LMDB"],
)
def test_populate_makes_one_record_of_every_item(
    items: list[dict[str, Any]], tmp_path: Path, name: str, given: dict[str, Any]
) -> None:
    with monai_gds.patch(tmp_path / "cache", populate=True), warnings.catch_warnings(action="error"):
        ours = getattr(monai.data, name)(items, **{"transform": transform(), "progress": False, **given})
    assert len([*(tmp_path / "cache").glob("*.safetensors")]) == 4
    assert "4 of this pipeline" in str(ours)


@pytest.mark.parametrize("name", ["CacheDataset", "SmartCacheDataset", "LMDBDataset"])
def test_a_folder_that_cannot_be_written_costs_the_cache_and_not_the_program(
    items: list[dict[str, Any]], tmp_path: Path, name: str
) -> None:
    (tmp_path / "cache").symlink_to("/proc/none/here")
    given = {"replace_rate": 0.5, "cache_rate": 0.5} if name == "SmartCacheDataset" else {}
    for populate in (False, True):
        with monai_gds.patch(tmp_path / "cache", populate=populate):
            with pytest.warns(CacheWarning, match="Items without a record are computed in every epoch"):
                ours = getattr(monai.data, name)(items, transform(), progress=False, **given)
            assert len(epoch(ours)) == len(ours) > 0
            with pytest.raises(NotSaved):
                getattr(monai.data, name)(items, transform(), progress=False, strict=True, **given)


class Unstorable(Transform):  # type: ignore[misc]
    """Adds what no record can hold."""

    def __call__(self, data: Any) -> Any:
        return {**data, "function": print}


@pytest.mark.parametrize(
    ("given", "folder", "said"),
    [
        ({}, "/proc/none/here", r"Items without a record are computed AGAIN"),
        ({"max_bytes": 20_000}, "cache", "4 items are computed AGAIN: the budget"),
        (
            {"transform": Compose([Unstorable(), Moves()])},
            "cache",
            "4 of 4 items cannot be cached, and are computed AGAIN",
        ),
    ],
    ids=["folder", "budget", "type"],
)
def test_what_stays_on_a_gpu_and_has_no_record_is_not_computed_in_every_epoch(
    items: list[dict[str, Any]], tmp_path: Path, given: dict[str, Any], folder: str, said: str
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "folder").symlink_to(folder)
    again = "whenever the dataset is made"
    with monai_gds.patch(tmp_path / "folder"), pytest.warns(CacheWarning, match=said.replace("AGAIN", again)) as told:
        ours = monai.data.CacheDataset(items, **{"transform": moving(), "progress": False, **given})
    assert not any("epoch" in str(one.message) for one in told)
    assert ours._cache[0] is ours._cache[0]


# ---------------------------------------------------------------------------------------------------------------------
# Other ways to cache


def test_the_first_n_transforms(items: list[dict[str, Any]], tmp_path: Path, patched: Any) -> None:
    ours = monai.data.CacheNTransDataset(items, transform(), 1, None)
    with ours:
        assert_same(epoch(ours), epoch(Theirs(items, transform(), progress=False)))
    assert ours.cache_n_trans == 1 and ours.is_cached(0)
    with pytest.raises(ValueError, match=r"cache_n_trans=3 keeps what RandFlipd draws.*put RandFlipd after it"):
        monai.data.CacheNTransDataset(items, transform(), 3, None)


def test_an_lmdb_dataset_without_a_database(items: list[dict[str, Any]], tmp_path: Path, patched: Any) -> None:
    idle = {"db_name": "other", "lmdb_kwargs": {"map_size": 1 << 30}}
    with pytest.warns(monai_gds.CacheWarning, match="db_name, lmdb_kwargs: without effect.* max_bytes= limits"):
        ours = monai.data.LMDBDataset(items, transform(), progress=False, hash_transform=None, **idle)
    shutil.copytree(tmp_path / "volumes", tmp_path / "kept")
    shutil.rmtree(tmp_path / "volumes")
    assert ours.info() == {"size": 4, "filename": str(tmp_path / "cache")}
    assert len(epoch(ours)) == 4 and ours.lmdb_kwargs == {"map_size": 1 << 30}
    shutil.copytree(tmp_path / "kept", tmp_path / "volumes")
    ours.set_data(items[:1])
    assert len(ours) == 1 and not ours.db_file.exists()
    ours.close()


def test_a_persistent_dataset_takes_its_arguments_in_their_order(items: list[dict[str, Any]], patched: Any) -> None:
    ours = monai.data.PersistentDataset(items, transform(), None, monai.data.pickle_hashing, "pickle", 2, None, False)
    assert (ours.reset_ops_id, ours.pickle_protocol) == (False, 2)
    gds = monai.data.GDSDataset(items, transform(), None, "cpu", track_meta=False)
    assert not gds.settings.form.track_meta


# ---------------------------------------------------------------------------------------------------------------------
# Datasets that download


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Data in the layouts of the Decathlon, MedNIST and TCIA."""
    from PIL import Image

    task = tmp_path / "root" / "Task04_Hippocampus"
    task.mkdir(parents=True)
    files = [{key: item[key] for key in KEYS} for item in write_volumes(task, 5, (8, 8, 8))]
    (task / "dataset.json").write_text(
        json.dumps({"name": "made up", "labels": {"0": "background"}, "modality": {"0": "MRI"}, "numTraining": 5,
                    "description": "", "reference": "", "licence": "", "tensorImageSize": "3D", "numTest": 0,
                    "training": files, "test": []})
    )  # fmt: skip
    rng = np.random.default_rng(0)
    for name in ("Hand", "HeadCT"):
        (tmp_path / "root" / "MedNIST" / name).mkdir(parents=True)
        for number in range(10):
            pixels = rng.integers(0, 255, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "root" / "MedNIST" / name / f"{number}.png")
    for patient in "abcde":
        for kind in ("image", "seg"):
            folder = tmp_path / "root" / "C4KC-KiTS" / patient / "1" / kind
            folder.mkdir(parents=True)
    return tmp_path / "root"


def test_a_decathlon_task(root: Path, patched: Any) -> None:
    arguments = {"root_dir": root, "task": "Task04_Hippocampus", "section": "training", "seed": 3, "progress": False}
    theirs = patched_away("DecathlonDataset")(transform=transform(), **arguments)
    ours = monai.apps.DecathlonDataset(transform=transform(), **arguments)
    assert isinstance(ours, GDSDataset) and list(ours.get_indices()) == list(theirs.get_indices())
    assert ours.get_properties("name") == {"name": "made up"}
    shutil.rmtree(root)
    assert_same(epoch(ours), epoch(theirs))


def test_a_cross_validation_over_it(root: Path, patched: Any) -> None:
    arguments = {"root_dir": root, "task": "Task04_Hippocampus", "section": "training", "transform": transform()}
    folds = monai.apps.CrossValidation(monai.apps.DecathlonDataset, 5, 0, progress=False, **arguments)
    theirs = monai.apps.CrossValidation(patched_away("DecathlonDataset"), 5, 0, progress=False, **arguments)
    ours = folds.get_dataset([0, 2])
    assert isinstance(ours, GDSDataset) and ours.data == theirs.get_dataset([0, 2]).data


def test_mednist(root: Path, patched: Any) -> None:
    steps = Compose([LoadImaged("image"), EnsureChannelFirstd("image"), ToTensord("image"), RandFlipd("image", 0.5)])
    arguments = {"root_dir": root, "section": "training", "transform": steps, "progress": False}
    theirs, ours = patched_away("MedNISTDataset")(**arguments), monai.apps.MedNISTDataset(**arguments)
    assert (len(ours), ours.get_num_classes()) == (16, 2)
    set_determinism(0)
    found = epoch(ours)
    assert_same(found, epoch(theirs))
    assert len(monai.apps.MedNISTDataset(root, "test", progress=False)) == 2


def test_tcia_caches_what_is_read_since_its_cache_rate_is_0(root: Path, patched: Any) -> None:
    arguments = {"root_dir": root, "collection": "C4KC-KiTS", "section": "training", "transform": Identityd("image")}
    theirs = patched_away("TciaDataset")(**arguments)
    with pytest.warns(CacheWarning, match="0 of 4 items are cached now"), monai.apps.TciaDataset(**arguments) as ours:
        assert ours.data == theirs.data and list(ours.get_indices()) == list(theirs.get_indices())
        assert_same(epoch(ours), epoch(theirs))
    assert ours.cache_num == 0 and ours.is_cached(3)


def test_downloads_are_monais(root: Path, patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("monai.apps.datasets.download_and_extract", lambda **given: asked.append(given["url"]))
    monai.apps.MedNISTDataset(root, "test", progress=False, download=True)
    assert asked == [monai.apps.MedNISTDataset.resource]


def patched_away(name: str) -> Any:
    """MONAI's own class while its name is replaced."""
    return next(kind for kind in getattr(monai.apps, name).__mro__[1:] if kind.__name__ == name)
