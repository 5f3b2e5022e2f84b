"""``SmartCacheDataset``: the items of MONAI's, in its order, over records that stay."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import monai.data
import pytest
from monai.handlers import SmartCacheHandler
from monai.transforms import Compose, EnsureTyped, RandFlipd, RandShiftIntensityd

import monai_gds
from monai_gds import GDSDataLoader, SmartCacheDataset
from tests.fresh import printed_by

Theirs = monai.data.SmartCacheDataset


def items(count: int, begin: int = 0) -> list[dict[str, Any]]:
    return [{"image": [[[float(number)]]]} for number in range(begin, begin + count)]


def transform() -> Compose:
    return Compose([EnsureTyped("image"), RandShiftIntensityd("image", offsets=0.5, prob=1.0)])


def numbers(dataset: Any) -> list[int]:
    """Which items an epoch has; the shift of intensity is less than a half."""
    return [round(float(dataset[index]["image"])) for index in range(len(dataset))]


def course(dataset: Any, count: int) -> list[Any]:
    """What happens in a training: epochs, an end and a new beginning, and other data."""
    seen: list[Any] = [numbers(dataset)]
    dataset.start()
    for _ in range(4):
        dataset.update_cache()
        seen.append(numbers(dataset))
    seen.append(dataset.is_started())
    dataset.shutdown()
    seen += [dataset.is_started(), numbers(dataset)]
    dataset.update_cache()  # which starts it again
    seen.append(numbers(dataset))
    dataset.shutdown()
    dataset.set_data(items(count, 100))
    seen.append(numbers(dataset))
    dataset.update_cache()
    seen.append(numbers(dataset))
    dataset.shutdown()
    return seen


@pytest.mark.filterwarnings("ignore:cache_num is greater")
@pytest.mark.parametrize(
    ("count", "arguments"),
    [
        (5, {"cache_num": 4, "replace_rate": 0.25, "shuffle": False}),
        (7, {"cache_num": 3, "replace_rate": 0.5, "seed": 3}),
        (10, {"cache_rate": 0.4, "replace_rate": 1.0, "num_replace_workers": 2}),
        (3, {}),
    ],
    ids=str,
)
def test_the_items_of_each_epoch_are_monais(count: int, arguments: dict[str, Any], tmp_path: Path) -> None:
    theirs = Theirs(items(count), transform(), progress=False, **arguments)
    ours = SmartCacheDataset(items(count), transform(), progress=False, cache_dir=tmp_path, device="cpu", **arguments)
    assert len(ours) == len(theirs)
    assert course(ours, count) == course(theirs, count)


def test_the_values_too_and_what_comes_next_has_a_record_already(tmp_path: Path) -> None:
    theirs = Theirs(items(6), transform(), 0.5, 4, progress=False)
    ours = SmartCacheDataset(items(6), transform(), 0.5, 4, progress=False, cache_dir=tmp_path, device="cpu")
    for dataset in (theirs, ours):
        dataset.update_cache()
        dataset.transform.set_random_state(0)
    assert [ours.is_cached(index) for index in range(4)] == [True] * 4
    assert [float(item["image"]) for item in ours] == [float(item["image"]) for item in theirs]
    for dataset in (theirs, ours):
        dataset.shutdown()


def test_the_same_share_of_other_data_is_replaced(tmp_path: Path) -> None:
    ours = SmartCacheDataset(
        items(40), transform(), 0.5, cache_rate=0.25, shuffle=False, progress=False, cache_dir=tmp_path, device="cpu"
    )
    seen = []
    for data in (items(8), items(1), items(16, 100)):  # 5 of 10 were replaced; of 1, none can be
        ours.set_data(data)
        seen += [numbers(ours)]
        ours.update_cache()
        seen += [numbers(ours)]
        ours.shutdown()
    assert seen == [[0, 1], [1, 2], [], [], [100, 101, 102, 103], [102, 103, 104, 105]]


def test_an_item_that_fails_in_the_background_raises_where_it_is_read(tmp_path: Path) -> None:
    data = [*items(2), {"label": "no image"}]
    ours = SmartCacheDataset(data, transform(), 0.5, 2, shuffle=False, progress=False, cache_dir=tmp_path, device="cpu")
    ours.update_cache()  # MONAI's waits for ever
    ours.shutdown()
    assert round(float(ours[0]["image"])) == 1
    with pytest.raises(RuntimeError, match="EnsureTyped"):
        _ = ours[1]


def test_populate_fills_the_cache_with_what_later_epochs_have_too(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"progress": False, "cache_dir": tmp_path, "device": "cpu"}
    ours = SmartCacheDataset(items(6), transform(), 0.5, 2, **arguments)
    ours.update_cache()
    ours.shutdown()
    now = numbers(ours)
    done = ours.populate(progress=False)
    assert done.cached + done.computed == 6 and done.computed and numbers(ours) == now
    assert ours.populate(progress=False).cached == 6


def test_a_script_may_end_without_shutting_it_down(tmp_path: Path) -> None:
    """A thread that comes back from a C++ call while the interpreter ends would end the process with SIGABRT."""
    said = printed_by(
        """
import sys, threading, torch
from monai.transforms import Compose, Lambda
from monai_gds import SmartCacheDataset

entered = threading.Event()

def slow(number):
    if number > 2:
        entered.set()
        values = torch.rand(1000, 1000)
        for _ in range(20):
            values = (values @ values).clamp(-1, 1)
    return torch.tensor(float(number))

dataset = SmartCacheDataset(
    range(9), Compose([Lambda(slow)]), 1.0, 3, shuffle=False, progress=False, cache_dir=sys.argv[1], device="cpu"
)
dataset.start()
entered.wait(60)
print(dataset.is_started())
        """,
        str(tmp_path / "cache"),
        whole=True,
    )
    assert said == "True"
    assert len([*(tmp_path / "cache").glob("*.safetensors")]) < 6, "what had not begun is left out"


def test_our_loader_and_monais_handler_take_it(tmp_path: Path) -> None:
    steps = Compose([EnsureTyped("image"), RandFlipd("image", prob=0.5)])
    ours = SmartCacheDataset(items(6), steps, 0.5, 4, shuffle=False, progress=False, cache_dir=tmp_path, device="cpu")
    SmartCacheHandler(ours).started(None)
    loader, seen = GDSDataLoader(ours, batch_size=4, num_workers=1), []
    for _ in range(3):
        seen += [batch["image"].flatten().tolist() for batch in loader]
        ours.update_cache()
    ours.shutdown()
    assert seen == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 0, 1]]


def test_copies_have_its_items_and_no_thread(tmp_path: Path) -> None:
    ours = SmartCacheDataset(items(5), transform(), 0.5, 2, progress=False, cache_dir=tmp_path, device="cpu")
    ours.update_cache()
    before = threading.active_count()
    for again in (copy.copy(ours), pickle.loads(pickle.dumps(ours))):
        assert numbers(again) == numbers(ours) and not again.is_started()
        again.update_cache()
        again.shutdown()
    assert threading.active_count() <= before
    ours.shutdown()


def test_patched_the_name_is_ours(tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path):
        ours = monai.data.SmartCacheDataset(items(5), transform(), replace_rate=0.5, cache_num=2, progress=False)
    assert isinstance(ours, SmartCacheDataset) and ours.is_cached(0) and str(ours.cache_dir) == str(tmp_path)
    with pytest.raises(NotImplementedError, match="runtime_cache"):
        SmartCacheDataset(items(5), transform(), runtime_cache=True, cache_dir=tmp_path)
