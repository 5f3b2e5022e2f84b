"""The key changes with everything that changes what is cached, and with nothing else."""

from __future__ import annotations

import json
import os
import pathlib
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data.utils import json_hashing, pickle_hashing

from monai_gds import limits
from monai_gds.base.names import digest_of
from monai_gds.errors import HashingError
from monai_gds.keys import key
from monai_gds.keys.hashing import canonical_hash, hash_item
from monai_gds.keys.key import Key, KeyMaker, Pipeline
from monai_gds.keys.sources import Sources

PIPELINE = Pipeline("transforms", "1.6.1")


class Keys:
    """Keys of one pipeline."""

    def __init__(self, hash_func: Callable[[Any], bytes] = canonical_hash, policy: Any = "content", **kwargs: Any):
        self.make = KeyMaker(hash_func, Sources(policy, None), **kwargs)
        self.pipeline = Pipeline("transforms", "1.6.1", root=kwargs.get("root"))

    def __call__(self, item: Any) -> Key:
        return self.make(item, self.pipeline)


@pytest.fixture
def keys() -> Keys:
    return Keys()


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    path = tmp_path / "a.nii.gz"
    path.write_bytes(b"volume")
    return path


def _digests(keys: Keys, *items: Any) -> list[str]:
    return [keys(item).digest for item in items]


# The item


def test_an_item_that_contains_itself_is_an_error_with_a_way_out(keys: Keys) -> None:
    item: dict[str, Any] = {"image": "ct.nii"}
    item["self"] = item
    with pytest.raises(HashingError, match=r"contains itself.*flatten it"):
        keys(item)


def test_an_error_of_the_users_hash_func_is_raised_unchanged() -> None:
    def hash_func(item: Any) -> bytes:
        raise RecursionError("of the user's")

    with pytest.raises(RecursionError, match=r"of the user's"):
        Keys(hash_func)({"image": "ct.nii"})


def test_is_stable(keys: Keys, volume: Path) -> None:
    item = {"image": str(volume), "label": [1, 2.5, None, True]}
    again = Keys()
    assert len({*_digests(keys, item, dict(item)), again(item).digest}) == 1
    assert len(keys(item).digest) == 32
    int(keys(item).digest, 16)


@pytest.mark.parametrize(
    "items",
    [
        pytest.param([{"x": np.zeros(4, np.float32)}, {"x": np.zeros(4, np.int32)}], id="dtype of an array"),
        pytest.param([{"x": np.zeros((2, 8))}, {"x": np.zeros((4, 4))}], id="shape of an array"),
        pytest.param([{"x": np.zeros(4, np.uint8)}, {"x": bytes(4)}], id="array and bytes"),
        pytest.param([{"x": np.float64(5e-324)}, {"x": np.int64(1)}], id="NumPy scalars of the same bytes"),
        pytest.param([{"x": np.str_("a")}, {"x": np.array([97], np.int32)}], id="NumPy string and its code"),
        pytest.param([{"x": 1}, {"x": True}, {"x": 1.0}, {"x": "1"}], id="types of a scalar"),
        pytest.param([{"x": [1, 2]}, {"x": (1, 2)}, {"x": {1, 2}}], id="types of a container"),
        pytest.param([{"x": 0.0}, {"x": -0.0}], id="signs of zero"),
        pytest.param([{"x": torch.zeros(2)}, {"x": torch.zeros(2, dtype=torch.int32)}], id="dtype of a tensor"),
        pytest.param([{"x": "a", "y": "b"}, {"x": "b", "y": "a"}], id="which key has which value"),
        pytest.param([{"x": None}, {}], id="a key more"),
        pytest.param([{"device": "GE"}, {"device": "Siemens"}, {"device": 1}], id="a key called device"),
        pytest.param([{"device": "cuda:0"}, {"device": "cuda:1"}, {"device": None}], id="names of devices"),
        pytest.param([{"x": torch.device("cpu")}, {"x": torch.device("cuda", 1)}], id="devices"),
        pytest.param([{"x": torch.zeros(2)}, {"x": torch.zeros(2, requires_grad=True)}], id="gradients"),
    ],
)
def test_different_items_have_different_keys(keys: Keys, items: list[Any]) -> None:
    assert len(set(_digests(keys, *items))) == len(items)


def test_order_of_keys_does_not_matter(keys: Keys) -> None:
    assert keys({"a": 1, "b": [2]}).digest == keys({"b": [2], "a": 1}).digest


def test_sees_an_item_that_was_changed_in_place(keys: Keys) -> None:
    item = {"image": "a", "windows": [1, 2], "array": np.zeros(3)}
    seen = [keys(item).digest]
    item["image"] = "b"
    seen.append(keys(item).digest)
    item["windows"].append(3)  # type: ignore[attr-defined]
    seen.append(keys(item).digest)
    item["array"][1] = 5  # type: ignore[index]
    seen.append(keys(item).digest)
    assert len(set(seen)) == 4


# Source files


def test_changes_with_the_content_of_a_source_and_not_with_its_times(keys: Keys, volume: Path) -> None:
    item = {"image": str(volume)}
    first = keys(item)
    os.utime(volume, ns=(0, 0))
    touched = keys(item)
    volume.write_bytes(b"VOLUME")
    os.utime(volume, ns=(0, 0))
    edited = keys(item).digest
    volume.unlink()
    gone = keys(item)
    assert touched.digest == first.digest
    assert len({first.digest, edited, gone.digest}) == 3
    assert {path: identity.size for path, identity in first.sources.items()} == {str(volume): 6}
    assert gone.sources == {}


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(lambda p: str(p), id="a string"),
        pytest.param(lambda p: p, id="a Path"),
        pytest.param(lambda p: {"image": [str(p), "x"]}, id="in a list"),
        pytest.param(lambda p: {"image": {"t1": (p,)}}, id="nested"),
        pytest.param(lambda p: {"image": np.str_(str(p))}, id="a NumPy string"),
        pytest.param(lambda p: {"image": np.array([str(p)])}, id="an array of strings"),
        pytest.param(lambda p: {"image": np.array([str(p)], object)}, id="an array of objects"),
    ],
)
def test_finds_sources_wherever_they_are_named(keys: Keys, volume: Path, item: Any) -> None:
    before = keys(item(volume)).digest
    volume.write_bytes(b"VOLUME")
    assert keys(item(volume)).digest != before


def test_a_file_that_cache_key_leaves_out_is_not_a_source(keys: Keys, volume: Path, tmp_path: Path) -> None:
    class Case:
        def __init__(self) -> None:
            self.volume, self.log = str(volume), str(tmp_path / "log.txt")
            self.own: list[Any] = []
            self.own.append(self.own)

        def __cache_key__(self) -> dict[str, str]:
            return {"volume": self.volume}

    item = {"case": Case()}
    before = keys(item)
    assert list(before.sources) == [str(volume)]
    Path(item["case"].log).write_text("a run")
    assert keys(item).digest == before.digest
    volume.write_bytes(b"VOLUME")
    assert keys(item).digest != before.digest


def test_a_key_is_not_a_path(keys: Keys, volume: Path) -> None:
    assert keys({str(volume): 1}).sources == {}


def test_swapped_sources_are_a_difference(keys: Keys, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    item = {"image": str(a), "label": str(b)}
    digests = set()
    for one, two in ((b"1", b"2"), (b"2", b"1")):
        a.write_bytes(one)
        b.write_bytes(two)
        digests.add(keys(item).digest)
    assert len(digests) == 2


def test_which_of_the_sources_is_there_is_a_difference(keys: Keys, tmp_path: Path) -> None:
    digests = []
    for present in (tmp_path / "a", tmp_path / "b"):
        present.write_bytes(b"1")
        digests.append(keys([str(tmp_path / "a"), str(tmp_path / "b")]).digest)
        present.unlink()
    assert digests[0] != digests[1]


def test_a_plain_word_does_not_name_a_folder(keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    before = keys({"split": "train"}).digest
    (tmp_path / "train" / "log").write_bytes(b"1")
    assert keys({"split": "train"}).digest == before
    loading = Keys(loaded={"split"})
    assert loading({"split": "train"}).sources.keys() == {f"{tmp_path}/train"}


def test_relative_paths_mean_another_file_in_another_folder(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "ct.nii").write_bytes(b"1")
        monkeypatch.chdir(folder)
        found = keys({"image": "ct.nii"})
        digests.add(found.digest)
        assert list(found.ingredients()["sources"]) == [f"{folder}/ct.nii"]
    assert len(digests) == 2


def test_a_source_behind_a_link_is_stored_as_what_it_leads_to(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far" / "sub").mkdir(parents=True)
    (tmp_path / "far" / "ct.nii").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "far" / "sub")
    monkeypatch.chdir(tmp_path)
    (stored,) = keys({"image": "link/../ct.nii"}).ingredients()["sources"]
    assert os.path.samefile(stored, tmp_path / "far" / "ct.nii")


def test_a_file_that_appears_and_goes_again_changes_the_key(keys: Keys, tmp_path: Path) -> None:
    item = {"image": str(tmp_path / "a.nii")}
    without = keys(item).digest
    (tmp_path / "a.nii").write_bytes(b"1")
    there = keys(item)
    assert there.digest != without
    assert list(there.sources) == [item["image"]]
    (tmp_path / "a.nii").unlink()
    assert keys(item).digest == without


def test_files_of_the_pipeline_count(keys: Keys, volume: Path) -> None:
    pipeline = Pipeline("transforms", files=(str(volume),))
    before = keys.make({"n": 1}, pipeline)
    volume.write_bytes(b"another atlas")
    after = keys.make({"n": 1}, pipeline)
    assert before.digest != after.digest
    assert "__cache_key__" in before.changes(after), "what to do about a transform that writes it"


# The data root


def test_below_the_root_only_the_rest_of_a_path_counts(tmp_path: Path) -> None:
    digests = set()
    for name in ("a", "longer name", "z"):
        root = tmp_path / name
        root.mkdir()
        (root / "ct.nii").write_bytes(b"1")
        other = tmp_path / "m.nii"  # sorted before or after it
        other.write_bytes(b"2")
        item = {
            "image": f"{root}/ct.nii", "atlas": other, "names": np.array([f"{root}/x", "y"]), "path": root / "ct.nii"
        }  # fmt: skip
        digests.add(Keys(root=str(root))(item).digest)
    assert len(digests) == 1


def test_a_folder_whose_name_only_begins_like_the_root_is_not_below_it(tmp_path: Path) -> None:
    item = {"image": f"{tmp_path}-old/ct.nii"}
    other = {"image": f"{tmp_path}/ct.nii"}
    keys = Keys(root=str(tmp_path))
    assert len({keys(item).digest, keys(other).digest, keys({"image": "-old/ct.nii"}).digest}) == 3


def test_with_and_without_a_root_are_different_records() -> None:
    assert Keys(root="/data")({"n": 1}).digest != Keys()({"n": 1}).digest


# What can be switched off or replaced


def test_sources_none_leaves_files_out(volume: Path) -> None:
    keys = Keys(policy=None)
    before = keys({"image": str(volume)})
    volume.write_bytes(b"another volume")
    assert keys({"image": str(volume)}).digest == before.digest
    assert before.sources == {}


@pytest.mark.parametrize(
    "pipelines",
    [
        pytest.param([Pipeline(t) for t in ("", "x", "y")], id="transforms"),
        pytest.param([Pipeline("t", version) for version in ("", "1.6", "1.6.1")], id="MONAI's version"),
        pytest.param([Pipeline("t", state=s) for s in ((), (("track_meta", "False"),))], id="state"),
    ],
)
def test_what_a_pipeline_is_counts(keys: Keys, pipelines: list[Pipeline]) -> None:
    digests = {keys.make({"a": 1}, pipeline).digest for pipeline in pipelines}
    assert len(digests) == len(pipelines) == len({pipeline.digest for pipeline in pipelines})


def test_remembers_no_more_items_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def counting(item: Any, root: str | None) -> str:
        hashed.append(item)
        return hash_item(item, root)

    monkeypatch.setattr(limits, "HASHED_ITEMS", 3)
    monkeypatch.setattr(key, "hash_item", counting)
    keys = Keys()
    digests = [keys({"n": n}).digest for n in range(5)]
    assert [keys({"n": n}).digest for n in range(5)] == digests
    assert len(keys.make._known) == 3
    assert len(hashed) == 7


def test_nothing_of_a_large_item_is_kept_in_memory(keys: Keys) -> None:
    tracemalloc.start()
    try:
        for n in range(20):
            keys({"image": bytes(1_000_000), "n": n})
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_keys_are_right_whether_they_are_remembered_or_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "KEYED_ITEMS", 2)
    items = [{"image": str(tmp_path / f"{n}.nii")} for n in range(4)]
    keys = Keys()
    for round_ in range(3):
        for item in items:
            Path(item["image"]).write_bytes(b"%d" % round_)
        assert _digests(keys, *items) == _digests(Keys(), *items) == _digests(keys, *items)


@pytest.mark.parametrize("hash_func", [pickle_hashing, json_hashing, lambda item: b"always the same"])
def test_takes_a_hash_func_of_the_users(hash_func: Any, volume: Path) -> None:
    keys = Keys(hash_func)
    item = {"image": str(volume), "n": 1}
    assert keys(item).digest == keys(dict(item)).digest
    assert keys(item).item == hash_func(item).decode()
    before = keys(item).digest
    volume.write_bytes(b"VOLUME")
    assert keys(item).digest != before


# What a record stores


def test_what_is_stored_gives_the_digest_again(keys: Keys, volume: Path) -> None:
    made = keys({"image": pathlib.Path(volume), "odd": "\ud800 ünï"})
    found = json.loads(json.dumps(made.ingredients()))
    assert digest_of(found["parts"]) == made.digest
    assert found["sources"] == {str(volume): [6, made.sources[str(volume)].content]}
    assert found["pipeline"] == PIPELINE.digest


def test_what_changed_meanwhile_is_named(keys: Keys, volume: Path) -> None:
    item = {"image": str(volume)}
    before = keys(item)
    assert before.changes(keys(item)) == ""
    volume.write_bytes(b"other")
    assert before.changes(keys(item)) == f"{volume} changed"
    later = keys.make(item, Pipeline("transforms", "1.6.1", (("track_meta", "False"),)))
    assert "track_meta" in keys(item).changes(later)
