"""``GDSDataset(populate=True)``: the cache is full when the constructor returns, on every rank by itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.transforms import Compose, EnsureTyped, Lambdad, LoadImaged, RandFlipd, ScaleIntensityd

from monai_gds import CacheWarning, GDSDataset, PopulateError
from tests.fixtures_nifti import write_volumes

KEYS = ("image", "label")


def transform() -> Compose:
    return Compose([LoadImaged(KEYS, ensure_channel_first=True), ScaleIntensityd("image"), RandFlipd(KEYS, prob=0.5)])


@pytest.fixture
def items(tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "volumes").mkdir()
    return write_volumes(tmp_path / "volumes", 3, (12, 10, 8))


def test_everything_is_cached_and_sources_may_be_gone(items: list[dict[str, Any]], tmp_path: Path) -> None:
    expected = [transform().transforms[0](item)["image"].shape for item in items]
    dataset = GDSDataset(items, transform(), tmp_path / "cache", "cpu", populate=True)
    for file in (tmp_path / "volumes").iterdir():
        file.unlink()
    assert [item["image"].shape for item in dataset] == expected
    assert [dataset.is_cached(index) for index in range(3)] == [True] * 3


def test_a_file_that_is_made_anew_before_the_next_dataset_counts(items: list[dict[str, Any]], tmp_path: Path) -> None:
    GDSDataset(items, transform(), tmp_path / "cache", "cpu", populate=True)
    write_volumes(tmp_path / "volumes", 1, (13, 10, 8))
    again = GDSDataset(items, transform(), tmp_path / "cache", "cpu", populate=True)
    assert again[0]["image"].shape == (1, 13, 10, 8)


def test_errors_in_the_data_show_in_the_constructor(items: list[dict[str, Any]], tmp_path: Path) -> None:
    Path(items[1]["label"]).write_bytes(b"cut")
    with pytest.raises(PopulateError, match="1 of 3 items failed") as caught:
        GDSDataset(items, transform(), tmp_path / "cache", "cpu", populate=True)
    assert [failed.index for failed in caught.value.failures] == [1]


def test_each_broken_file_is_named_once(items: list[dict[str, Any]], tmp_path: Path) -> None:
    for item in items:
        Path(item["image"]).unlink()
    with pytest.raises(PopulateError, match="3 of 3 items failed:\n") as caught:
        GDSDataset(items, transform(), tmp_path / "cache", "cpu", populate=True)
    for n, line in enumerate(str(caught.value).splitlines()[1:4]):
        assert line.startswith(f"  {n}: {items[n]['image']}: LoadImaged cannot load it: FileNotFoundError: ")
        assert "while computing" not in line and items[n]["label"] not in line


def test_a_reason_that_all_items_have_is_given_once(items: list[dict[str, Any]], tmp_path: Path) -> None:
    wrong = Compose([LoadImaged(KEYS), ScaleIntensityd("imaeg")])
    with pytest.raises(PopulateError, match="3 of 3 items failed:\n") as caught:
        GDSDataset(items, wrong, tmp_path / "cache", "cpu", populate=True)
    told = str(caught.value).splitlines()
    assert told[1].startswith(f"  0: {items[0]['image']}: RuntimeError: ") and "Key `imaeg`" in told[1]
    assert told[2:4] == [f"  {n}: {items[n]['image']}: as item 0" for n in (1, 2)]


def test_what_no_record_holds_is_a_warning_unless_it_is_to_be_an_error(tmp_path: Path) -> None:
    steps = Compose([EnsureTyped("image"), Lambdad("name", func=lambda name: object() if name else name)])
    items = [{"image": np.zeros((1, 4, 4)), "name": name} for name in ("odd", "")]
    with pytest.warns(CacheWarning, match="1 of 2 items cannot be cached") as caught:
        dataset = GDSDataset(items, steps, tmp_path, "cpu", populate=True)
    assert caught[-1].filename == __file__
    with warnings.catch_warnings(action="error"):  # it is told once
        assert dataset.is_cached(1) and type(dataset[0]["name"]) is object
    with pytest.raises(PopulateError, match="UnsupportedType"):
        GDSDataset(items, steps, tmp_path, "cpu", populate=True, options={"unsupported": "error"})


class Late(GDSDataset):
    """Sets what it needs after the base class's constructor."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.factor = 3

    def _pre_transform(self, item: Any) -> Any:
        item = super()._pre_transform(item)
        return {**item, "image": item["image"] * self.factor}


class LateWithDefault(Late):
    factor = 1


def test_a_subclass_that_sets_what_it_needs_too_late_is_told_where(items: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(PopulateError, match="no attribute 'factor'") as caught:
        Late(items, transform(), tmp_path / "cache", "cpu", populate=True)
    assert "call self.populate() at the end of __init__" in "".join(caught.value.__notes__)
    expected = GDSDataset(items, transform(), None, "cpu")[0]["image"].mean()
    # What was computed with the class's own value is not served.
    late = LateWithDefault(items, transform(), tmp_path / "cache", "cpu", populate=True)
    assert torch.allclose(late[0]["image"].mean(), 3 * expected)


def test_no_rank_waits_for_another(tmp_path: Path) -> None:
    """A validation set is often made on rank 0 only."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        whole = torch.distributed.get_world_size
        torch.distributed.get_world_size = lambda group=None: 2
        dataset = GDSDataset(
            [{"image": np.zeros((1, 4, 4))}] * 2,
            Compose([EnsureTyped("image")]),
            tmp_path / "cache",
            "cpu",
            populate=True,
        )
        assert dataset.is_cached(0) and dataset.is_cached(1)
    finally:
        torch.distributed.get_world_size = whole
        torch.distributed.destroy_process_group()
