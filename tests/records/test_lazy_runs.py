"""Runs of labels in records: what they find, and what happens to a record whose runs are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from monai_gds.errors import CacheWarning, DamagedRecord, FileChanged
from monai_gds.folder.directory import CacheDirectory
from monai_gds.folder.maintenance import check
from monai_gds.items.tree import encode_item
from monai_gds.records import header
from monai_gds.records.compression import Compression
from monai_gds.records.header import RunsKey
from monai_gds.records.heads import Form
from monai_gds.records.pending import PendingItem
from monai_gds.tiles import blosc, runs
from tests.caches import key
from tests.records.test_lazy import box, item, lazily, opened, read
from tests.records.test_writing import header_of, with_header

pytestmark = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")


OF_LABEL = RunsKey("label")


def label() -> torch.Tensor:
    found: torch.Tensor = item()["label"].as_tensor()
    return found


def only_organ(found: PendingItem) -> tuple[Any, np.ndarray]:
    of_label = found.runs[OF_LABEL]
    return of_label, (of_label.values == 3).numpy()


def test_labels_have_runs_and_images_have_none(tmp_path: Path) -> None:
    cache = opened(tmp_path, codec="lz4")
    assert cache.publish(key(), encode_item(item()))
    found = lazily(cache)
    assert set(found.runs) == {OF_LABEL}
    of_label, organ = only_organ(found)
    right = torch.nonzero(label().reshape(-1)).flatten()
    assert of_label.count(organ) == len(right)
    assert [of_label.find(organ, k) for k in (0, 10_000, len(right) - 1)] == right[[0, 10_000, -1]].tolist()


def test_an_item_that_keeps_arrays_has_runs_of_tensors_only(tmp_path: Path) -> None:
    cache = opened(tmp_path, codec="lz4", form=Form(numpy=True))
    assert cache.publish(key(), encode_item({**item(), "array": label().numpy()}))
    assert set(lazily(cache).runs) == {OF_LABEL}
    assert set(lazily(opened(tmp_path)).runs) == {OF_LABEL, RunsKey("array")}


@pytest.mark.parametrize("codec", [None, "lz4"])
def test_what_is_stored_whole_has_no_runs(tmp_path: Path, codec: str | None) -> None:
    cache = opened(tmp_path, codec=codec)
    assert cache.publish(key(), encode_item({"label": label()[:, :10] if codec else label()}))
    (found,) = cache.start([key().digest], first="rest")
    assert found is not None and not found.later


def blocks_in(path: Path) -> slice:
    entry = header.parse(path.read_bytes(), path.stat().st_size).runs[OF_LABEL].blocks
    return slice(entry.offset, entry.offset + entry.nbytes)


def test_a_record_whose_runs_are_damaged_is_computed_anew(tmp_path: Path) -> None:
    cache = opened(tmp_path, codec="lz4")
    assert cache.publish(key(), encode_item(item()))
    path = tmp_path / f"{key().digest}{header.SUFFIX}"
    whole = bytearray(path.read_bytes())
    whole[blocks_in(path).start] ^= 1
    path.write_bytes(whole)
    found = lazily(cache)
    of_label, organ = only_organ(found)
    assert of_label.count(organ) == 30 * 30 * 50
    with pytest.raises(DamagedRecord, match="block 0 of 1 of its runs"):
        of_label.find(organ, 5)
    with pytest.warns(CacheWarning, match="computed again: block 0 of 1 of its runs"):
        assert found.read({"label": [box(20, 30, 40, 30)]}).wait() is None
    checked = check(path)
    assert checked is not None and "__run_blocks.label" in checked.problem


@pytest.mark.filterwarnings("error")
def test_a_record_that_was_replaced_is_not_searched(tmp_path: Path) -> None:
    cache = opened(tmp_path, codec="lz4")
    assert cache.publish(key(), encode_item(item()))
    found = lazily(cache)
    of_label, organ = only_organ(found)
    assert opened(tmp_path, codec="zstd").publish(key(), encode_item({"label": label() + 1}))
    with pytest.raises(FileChanged):
        of_label.find(organ, 5)
    assert found.read({"label": [box(20, 30, 40, 30)]}).wait() is None
    (tmp_path / f"{key().digest}{header.SUFFIX}").unlink()
    with pytest.raises(FileNotFoundError):
        of_label.find(organ, 5)


Change = Callable[[dict[str, Any]], Any]
CHANGES: dict[str, tuple[Change, str]] = {
    "runs without blocks": (lambda entries: entries.pop("__run_blocks.label"), "malformed|gaps|place"),
    "of what is not packed": (
        lambda entries: entries.update({f"__{e}.x": entries.pop(f"__{e}.label") for e in ("runs", "run_blocks")}),
        "not packed",
    ),
    "an entry of a later version": (
        lambda entries: entries.update({"__new.a": entries.pop("__arrays")}),
        "does not support",
    ),
}


@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES)
def test_strange_entries_are_refused(tmp_path: Path, change: Change, says: str) -> None:
    cache = opened(tmp_path, codec="lz4")
    assert cache.publish(key(), encode_item(item()))
    path = tmp_path / f"{key().digest}{header.SUFFIX}"
    entries = header_of(path.read_bytes())
    sums = json.loads(entries["__metadata__"]["checksums"])
    change(entries)
    entries["__metadata__"]["checksums"] = json.dumps({**sums, **dict.fromkeys(entries, "0" * 16)})
    path.write_bytes(with_header(path.read_bytes(), entries))
    with pytest.warns(CacheWarning, match=says):
        assert cache.start([key().digest], first="rest") == [None]


def test_runs_that_contradict_their_table_are_not_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def swapping(tensor: torch.Tensor) -> Any:
        packed = pack(tensor)
        if packed is not None:  # one block, two values
            packed.table[20:28] = packed.table[20:28].roll(4)
        return packed

    pack = runs.pack
    monkeypatch.setattr(runs, "pack", swapping)
    cache = opened(tmp_path, codec="lz4")
    assert cache.publish(key(), encode_item(item()))
    found = check(tmp_path / f"{key().digest}{header.SUFFIX}")
    assert found is not None and "counts" in found.problem and found.damaged


def test_every_byte_of_runs_is_verified(tmp_path: Path) -> None:
    cache = opened(tmp_path, codec="lz4")
    assert cache.publish(key(), encode_item(item()))
    path = tmp_path / f"{key().digest}{header.SUFFIX}"
    whole = path.read_bytes()
    parsed = header.parse(whole, len(whole))
    for of, entries in parsed.runs.items():
        for entry, what in zip(entries, of.entries, strict=True):
            for place in range(entry.offset, entry.offset + entry.nbytes, 7):
                path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
                found = check(path)
                assert found is not None and what in found.problem
    path.write_bytes(whole)
    found = check(path)
    assert found is not None and not found.problem


# ---------------------------------------------------------------------------------------------------------------------
# Joint runs


def bright() -> dict[str, Any]:
    """An item whose image is smooth enough for joint runs: bright in a box that overlaps the label's."""
    dark = torch.full((1, 80, 90, 100), -1000.0)
    dark[:, 40:, 20:70, :60] = 50
    return {**item(), "image": dark}


def joint(tmp_path: Path, made: Any, *lookups: tuple[str, str, str]) -> CacheDirectory:
    """A cache with a record of an item that was written for lookups."""
    cache = opened(tmp_path)
    cache.compression = Compression("lz4", joint=lookups)
    assert cache.publish(key(), encode_item(made))
    return cache


LOOKUP = ("label", "image", "-100")


def test_joint_runs_find_voxels_where_the_image_is_above_the_threshold(tmp_path: Path) -> None:
    found = lazily(joint(tmp_path, bright(), LOOKUP))
    assert {of for of in found.runs if of[2]} == {LOOKUP}
    runs = found.runs[LOOKUP]
    assert runs.image == (torch.float32, (1, 80, 90, 100)) and runs.above is not None
    right = ((label() == 3) & (bright()["image"] > -100)).flatten().nonzero().flatten()
    chosen = ((runs.values == 3) & runs.above).numpy()
    assert runs.count(chosen) == len(right)
    assert [runs.find(chosen, k) for k in (0, 5000, len(right) - 1)] == right[[0, 5000, -1]].tolist()
    assert read(found, {"label": [box(40, 30, 40, 10)], "image": [box(40, 30, 40, 10)]})
    checked = check(tmp_path / f"{key().digest}{header.SUFFIX}")
    assert checked is not None and not checked.problem


def test_tensors_without_joint_runs(tmp_path: Path) -> None:
    """The image has another shape, is not there, is no tensor, or is noise."""
    dark = bright()["image"]
    made = {**bright(), "noise": item()["image"], "nested": {"image": dark}, "flat": dark[0]}
    names = ("array", "none", "name", "small", "noise", "nested", "nested.image", "flat")
    found = lazily(joint(tmp_path, made, *(("label", name, "28") for name in names), ("name", "image", "28")))
    assert {of for of in found.runs if of[2]} == set()


def test_the_image_may_be_whole_in_the_record(tmp_path: Path) -> None:
    """Powers of two with random exponents do not get smaller."""
    made = bright()
    noise = torch.rand(made["image"].shape, generator=torch.Generator().manual_seed(0))
    made["image"] = made["image"].sign() * torch.exp2(noise * 200 - 100)
    found = lazily(joint(tmp_path, made, ("label", "image", "0.0")))
    assert "image" not in found.later and ("label", "image", "0.0") in found.runs
    given = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in found.later.items()}
    (out,) = found.wait(tensors=given)
    image = out["image"]
    assert found.name_of(image) == found.name_of(MetaTensor(image)) == found.name_of(image[:]) == "image"
    parts = (image[:, 1:], image[:, :-1], image.transpose(1, 2), image.view(torch.int32), out["small"][:0])
    for other in (image.clone(), *parts):
        assert found.name_of(other) is None
    checked = check(tmp_path / f"{key().digest}{header.SUFFIX}")
    assert checked is not None and not checked.problem


def test_a_conversion_writes_the_joint_runs_that_it_is_asked_for(tmp_path: Path) -> None:
    cache = joint(tmp_path, bright())
    assert LOOKUP not in lazily(cache).runs
    cache.compression = Compression("zstd", joint=(LOOKUP,))
    assert cache.convert(key()) == "converted"
    assert LOOKUP in lazily(cache).runs
