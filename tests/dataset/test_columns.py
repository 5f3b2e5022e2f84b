"""Columns that no transform touches, in a dataset: passed through from the present item."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import monai.transforms as mt
import pytest
import torch

from monai_gds import GDSDataLoader, GDSDataset

computed: list[Any] = []


class Reads(mt.MapTransform):  # type: ignore[misc]  # MONAI is untyped
    """Stands for a transform of MONAI that reads a column that is not among its keys, if there is reason to."""

    __module__ = "monai.transforms.made_up"

    def __call__(self, data: Any) -> Any:
        computed.append(data["i"])
        image = torch.full((1, 2, 2), float(data["i"]))
        if data["i"] >= 2:
            image += data["extra"]
        return {**data, "image": image}


class Fails(Reads):
    __module__ = "monai.transforms.made_up"

    def __call__(self, data: Any) -> Any:
        computed.append(data["i"])
        raise ZeroDivisionError(str(data["i"]))


@pytest.fixture(autouse=True)
def nothing_computed() -> Iterator[None]:
    computed.clear()
    yield


def items(extra: int = 0, fold: Any = 1) -> list[dict[str, Any]]:
    return [{"i": i, "extra": extra, "fold": fold} for i in range(4)]


def dataset(data: Any, folder: Path, transform: Any = None, **settings: Any) -> GDSDataset:
    return GDSDataset(data, mt.Compose([transform or Reads("i")]), folder, device="cpu", **settings)


def read(made: GDSDataset) -> list[tuple[float, int, Any]]:
    found = [(float(item["image"].max()), item["extra"], item["fold"]) for item in made]
    made.flush()
    return found


def expected(extra: int, fold: Any) -> list[tuple[float, int, Any]]:
    return [(i + (extra if i >= 2 else 0), extra, fold) for i in range(4)]


def test_a_column_that_is_found_to_be_read_counts_from_then_on_and_renames_nothing(tmp_path: Path) -> None:
    assert read(dataset(items(), tmp_path)) == expected(0, 1)
    assert computed == [0, 1, 2, 2, 3], "the first that reads it is computed once more"
    computed.clear()
    assert read(dataset(items(fold=2), tmp_path)) == expected(0, 2)
    assert computed == []
    assert read(dataset(items(extra=5, fold=3), tmp_path)) == expected(5, 3)
    assert computed == [2, 3], "those before do not read it, and were saved before it was known"
    computed.clear()
    assert read(dataset(items(extra=0, fold=4), tmp_path)) == expected(0, 4)
    assert computed == []


def test_batches_and_filling_ahead_agree(tmp_path: Path) -> None:
    first = dataset(items(), tmp_path)
    first.populate(0, progress=False)
    computed.clear()
    other = dataset(items(fold=7), tmp_path)
    assert all(map(other.is_cached, range(4)))
    batches = [batch["fold"].tolist() for batch in GDSDataLoader(other, batch_size=2)]
    assert batches == [[7, 7], [7, 7]]
    assert computed == []


def test_what_a_hash_func_leaves_out_comes_from_the_present_item(tmp_path: Path) -> None:
    def by_number(item: Any) -> bytes:
        return str(item["i"]).encode()

    assert read(dataset(items()[:2], tmp_path, hash_func=by_number)) == expected(0, 1)[:2]
    computed.clear()
    assert read(dataset(items(fold=2)[:2], tmp_path, hash_func=by_number)) == expected(0, 2)[:2]
    assert computed == []


def test_an_error_is_that_of_the_real_item_and_no_column_counts_for_it(tmp_path: Path) -> None:
    failing = dataset(items(), tmp_path, Fails("i"))
    with pytest.raises(RuntimeError) as raised:
        failing[1]
    assert raised.value.__notes__[-1] == "monai_gds: while computing item 1 of the dataset"
    assert not list(tmp_path.glob(".index/*.reads"))


def test_without_a_cache_the_item_is_the_users(tmp_path: Path) -> None:
    assert read(GDSDataset(items(), Reads("i"), None, device="cpu")) == expected(0, 1)


def test_explain_names_the_columns_that_differ(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    data = [{**item, "i": 3, "file": str(tmp_path / "a.txt")} for item in items()[:1]]
    named = mt.CopyItemsd(("file", "extra"), names=("f", "e"))
    made = GDSDataset(data, mt.Compose([Reads("i"), named]), tmp_path / "cache", device="cpu")
    made[0]
    made.flush()
    data[0].update(extra=9, fold=9)
    assert "values that differ: 'extra'\n" in made.explain(0)
