"""Records of earlier versions that hold a type which records no longer hold: their items are computed again."""

from __future__ import annotations

import decimal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.transforms import Lambda

from monai_gds import CacheWarning, GDSDataset
from monai_gds.folder.directory import CacheDirectory
from monai_gds.folder.maintenance import check
from monai_gds.items.tree import EncodedItem, compile_tree, encode_item
from monai_gds.items.types import UnknownHere
from monai_gds.storage import open_storage
from tests.caches import key

#: What commit b1ae7ec made of these values.
NODES: dict[str, Any] = {
    "deque": {"$deque": [3, [1, [2]]]},
    "defaultdict": {"$defaultdict": ["list", [["a", [1]]]]},
    "Counter": {"$counter": [["a", 1], ["b", 1]]},
    "SimpleNamespace": {"$namespace": [["a", 1]]},
    "MappingProxyType": {"$proxy": [["a", 1]]},
    "MaskedArray": {"$masked_array": [["<f8", [2], 0], ["|b1", [2], 16], None, False]},
    "np.ma.masked": {"$masked": None},
    "array of fields": {"$array": [[["a", "<i4"], ["b", "<f8"]], [1], 0]},
    "its element": {"$void": [[["a", "<i4"], ["b", "<f8"]], [], 0]},
    "its dtype": {"$dtype": [["a", "<i4"]]},
    "array of raw bytes": {"$array": ["|V2", [1], 0]},
    "array of objects": {"$objects": [[2], [None, "a"]]},
    "bytearray": {"$bytearray": "YQ=="},
    "Decimal": {"$decimal": "1.1"},
    "Fraction": {"$fraction": ["0x1", "0x3"]},
    "UUID": {"$uuid": ["00000000000000000000000000000007", None]},
    "datetime in a zone": {"$datetime": ["2024-01-01T00:00:00", 0, ["zone", "Europe/Berlin"]]},
    "ZoneInfo": {"$timezone": ["zone", "Europe/Berlin"]},
    "Ellipsis": {"$ellipsis": None},
    "NumPy type": {"$numpy_type": "float32"},
    "np.bytes_": {"$numpy_bytes": "YQ=="},
    "class": {"$type": "int"},
}


@pytest.mark.parametrize("name", NODES)
def test_a_type_that_is_gone_counts_as_one_that_nobody_registered(name: str) -> None:
    for tree in (
        NODES[name],
        {"a": [NODES[name]]},
        {"$metatensor": [{"$tensor": {"name": "x"}}, [["a", NODES[name]]]]},
    ):
        with pytest.raises(UnknownHere, match=r"only by monai_gds\.register_type"):
            compile_tree(tree, bytes(64), {"x"})


def test_a_record_of_before_is_refused_with_one_warning(cache: CacheDirectory) -> None:
    path = Path(cache.record_path(key().digest))
    assert cache.publish(key(), EncodedItem({"history": NODES["deque"]}, {}, bytearray()))
    with pytest.warns(CacheWarning, match=r"computed again: it holds a '\$deque'.*register_type") as caught:
        assert cache.start([key().digest]) == [None]
        assert cache.start([key().digest]) == [None]
    assert len(caught) == 1
    found = check(path)
    assert found is not None
    assert not found.problem  # another installation may be able to read it
    assert cache.publish(key(), encode_item({"image": torch.arange(3.0)}))  # it is replaced
    assert cache.start([key().digest]) != [None]


def _append(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "history": decimal.Decimal(item["n"])}


def test_its_items_are_computed_again_with_one_warning_for_all(tmp_path: Path) -> None:
    dataset = GDSDataset([{"n": n} for n in range(3)], [Lambda(_append)], tmp_path)
    cache = CacheDirectory(tmp_path, open_storage("posix", "cpu"))
    for n in range(3):
        tree = {"n": n, "history": {"$decimal": str(n)}}
        assert cache.publish(dataset.key(n), EncodedItem(tree, {}, bytearray()))
    expected = [{"n": n, "history": decimal.Decimal(n)} for n in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [dataset[n] for n in range(3)] == expected
        assert [dataset[n] for n in range(3)] == expected
    messages = [str(one.message) for one in caught]
    assert len([text for text in messages if "'$decimal'" in text]) == 1, messages
    assert len([text for text in messages if "cannot be cached" in text]) == 1, messages
