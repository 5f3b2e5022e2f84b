"""The key changes with everything that changes what is cached, and with nothing else."""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data.utils import json_hashing, pickle_hashing

from monai_gds.cache import key
from monai_gds.cache.hashing import canonical_hash
from monai_gds.cache.key import KeyMaker, source_stat


@pytest.fixture
def keys() -> KeyMaker:
    return KeyMaker(canonical_hash, "transforms", True)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    path = tmp_path / "a.nii.gz"
    path.write_bytes(b"volume")
    return path


def _digests(keys: KeyMaker, *items: Any) -> list[str]:
    return [keys(item).digest for item in items]


# The item


def test_is_stable(keys: KeyMaker, volume: Path) -> None:
    item = {"image": str(volume), "label": [1, 2.5, None, True]}
    again = KeyMaker(canonical_hash, "transforms", True)
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
    ],
)
def test_different_items_have_different_keys(keys: KeyMaker, items: list[Any]) -> None:
    assert len(set(_digests(keys, *items))) == len(items)


def test_order_of_keys_is_no_difference(keys: KeyMaker) -> None:
    assert keys({"a": 1, "b": [2]}).digest == keys({"b": [2], "a": 1}).digest


def test_sees_an_item_that_was_changed_in_place(keys: KeyMaker) -> None:
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


def test_changes_with_size_and_mtime_of_a_source(keys: KeyMaker, volume: Path) -> None:
    item = {"image": str(volume)}
    first = keys(item)
    assert first.sources == {str(volume): (6, volume.stat().st_mtime_ns)}
    volume.write_bytes(b"longer volume")
    longer = keys(item).digest
    os.utime(volume, ns=(0, 0))
    older = keys(item).digest
    volume.unlink()
    gone = keys(item)
    assert len({first.digest, longer, older, gone.digest}) == 4
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
def test_finds_sources_wherever_they_are_named(keys: KeyMaker, volume: Path, item: Any) -> None:
    before = keys(item(volume)).digest
    os.utime(volume, ns=(0, 0))
    assert keys(item(volume)).digest != before


def test_a_key_is_not_a_path(keys: KeyMaker, volume: Path) -> None:
    assert keys({str(volume): 1}).sources == {}


def test_swapped_sources_are_a_difference(keys: KeyMaker, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    item = {"image": str(a), "label": str(b)}
    a.write_bytes(b"1")
    b.write_bytes(b"22")
    os.utime(a, ns=(0, 1))
    os.utime(b, ns=(0, 1))
    before = keys(item).digest
    a.write_bytes(b"22")
    b.write_bytes(b"1")
    os.utime(a, ns=(0, 1))
    os.utime(b, ns=(0, 1))
    assert keys(item).digest != before


def test_which_of_the_sources_is_there_is_a_difference(keys: KeyMaker, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    digests = []
    for present in (a, b):
        present.write_bytes(b"1")
        os.utime(present, ns=(0, 1))
        digests.append(keys([str(a), str(b)]).digest)
        present.unlink()
    assert digests[0] != digests[1]


def test_a_folder_counts_by_its_listing(keys: KeyMaker, tmp_path: Path) -> None:
    folder = tmp_path / "series"
    folder.mkdir()
    item = {"image": str(folder)}
    seen = [keys(item).digest]
    for name in ("1.dcm", "2.dcm"):
        (folder / name).write_bytes(b"slice")
        seen.append(keys(item).digest)
    (folder / "2.dcm").write_bytes(b"other slice")
    seen.append(keys(item).digest)
    os.utime(folder / "1.dcm", ns=(0, 0))
    seen.append(keys(item).digest)
    (folder / "1.dcm").rename(folder / "3.dcm")
    seen.append(keys(item).digest)
    assert len(set(seen)) == len(seen)
    assert keys(item).digest == seen[-1]


def test_a_dead_link_in_a_folder_hides_nothing(keys: KeyMaker, tmp_path: Path) -> None:
    folder = tmp_path / "series"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.dcm").write_bytes(b"slice")
        (folder / f"{i}.link").symlink_to("nowhere")
    before = keys(str(folder)).digest
    for i in range(20):
        os.utime(folder / f"{i}.dcm", ns=(0, i))
        now = keys(str(folder)).digest
        assert now != before
        before = now


def test_odd_strings_are_no_paths(keys: KeyMaker) -> None:
    odd = ["", "\0", "x" * 10_000, "/" * 5000, "\ud800", "a\nb"]
    assert keys({"notes": odd}).sources == {}


def test_source_stat_leaves_pipes_and_devices_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert source_stat(str(tmp_path / "pipe")) is None
    assert source_stat("/dev/null") is None


def test_of_many_slices_each_is_asked_for_once(keys: KeyMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(tmp_path / f"{i:05}.dcm") for i in range(2000)]
    for name in names:
        Path(name).write_bytes(b"")
    asked: Counter[str] = Counter()
    stat = os.stat

    def counted(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        asked[str(path)] += 1
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", counted)
    assert len(keys({"image": names, "again": names}).sources) == 2000
    assert {asked[name] for name in names} == {1}


# What can be switched off or replaced


def test_hash_sources_false_leaves_files_out(volume: Path) -> None:
    keys = KeyMaker(canonical_hash, "", False)
    before = keys({"image": str(volume)})
    volume.write_bytes(b"another volume")
    assert keys({"image": str(volume)}) == before
    assert before.sources == {}


def test_transform_is_part_of_the_key() -> None:
    digests = {KeyMaker(canonical_hash, t, True)({"a": 1}).digest for t in ("", "x", "y")}
    assert len(digests) == 3


def test_monai_version_is_part_of_the_key(keys: KeyMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys({"a": 1}).digest
    monkeypatch.setattr("monai.__version__", "0.0.1")
    other = KeyMaker(canonical_hash, "transforms", True)  # as in another process
    assert other({"a": 1}).digest != before
    assert other({"a": 1}).ingredients()["monai"] == "0.0.1"


def test_a_file_that_appears_and_goes_again_changes_the_key(keys: KeyMaker, tmp_path: Path) -> None:
    item = {"image": str(tmp_path / "a.nii")}
    without = keys(item)
    (tmp_path / "a.nii").write_bytes(b"1")
    there = keys(item)
    assert there.digest != without.digest
    assert list(there.sources) == [item["image"]]
    (tmp_path / "a.nii").unlink()
    assert keys(item) == without


def test_remembers_no_more_items_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def counting(item: Any) -> bytes:
        hashed.append(item)
        return canonical_hash(item)

    monkeypatch.setattr(key, "_MOST_SEEN", 3)
    keys = KeyMaker(counting, "", True)
    digests = [keys({"n": n}).digest for n in range(5)]
    assert [keys({"n": n}).digest for n in range(5)] == digests
    assert len(keys._seen) == 3
    assert len(hashed) == 7


@pytest.mark.parametrize("hash_func", [pickle_hashing, json_hashing, lambda item: b"always the same"])
def test_takes_a_hash_func_of_the_users(hash_func: Any, volume: Path) -> None:
    keys = KeyMaker(hash_func, "", True)
    item = {"image": str(volume), "n": 1}
    assert keys(item).digest == keys(dict(item)).digest
    assert keys(item).item == hash_func(item).decode()
    os.utime(volume, ns=(0, 0))
    assert keys(item).digest != KeyMaker(hash_func, "", False)(item).digest


def test_ingredients_are_json_able(keys: KeyMaker, volume: Path) -> None:
    import json

    found = json.loads(json.dumps(keys({"image": pathlib.Path(volume)}).ingredients()))
    assert found["sources"] == {str(volume): [6, volume.stat().st_mtime_ns]}
    assert set(found) == {"item", "transform", "monai", "sources"}


def test_sources_are_stored_absolute_and_the_digest_has_them_as_given(
    keys: KeyMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "ct.nii").write_bytes(b"1")
        os.utime(folder / "ct.nii", ns=(0, 0))
        monkeypatch.chdir(folder)
        key = keys({"image": "ct.nii"})
        digests.add(key.digest)
        assert key.ingredients()["sources"] == {f"{folder}/ct.nii": [1, 0]}
    assert len(digests) == 1


def test_a_source_behind_a_link_is_stored_as_what_it_leads_to(
    keys: KeyMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far" / "sub").mkdir(parents=True)
    (tmp_path / "far" / "ct.nii").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "far" / "sub")
    monkeypatch.chdir(tmp_path)
    (stored,) = keys({"image": "link/../ct.nii"}).ingredients()["sources"]
    assert os.path.samefile(stored, tmp_path / "far" / "ct.nii")
