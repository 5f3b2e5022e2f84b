"""Loops that run at once do not share random transforms; loops that follow one another do."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.data import DataLoader, Dataset, ThreadDataLoader

from monai_gds import GDSDataLoader, GDSDataset, limits
from monai_gds.loader.hand_over import HandOver
from tests.same import assert_same

KEYS = ["image", "label"]
COUNT = 6

#: The most seconds that a thread waits for another one.
LIMIT = 10


class Crop(mt.RandomizableTransform):  # type: ignore[misc]
    """Crops at a place that it keeps for the second key, and waits in between where a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.between, self.lock = 0, lambda item: None, threading.Lock()

    def __call__(self, data: Any) -> Any:
        self.at = int(self.R.randint(30))
        image = data["image"][..., self.at : self.at + 8]
        self.between(data)
        return {**data, "image": image, "label": data["label"][..., self.at : self.at + 8], "by": id(self)}


class Meeting:
    """Where two threads meet, each within an item that has one of these numbers. Later ones pass."""

    def __init__(self, *numbers: int) -> None:
        self._numbers, self._barrier = numbers, threading.Barrier(2)
        self._left, self._lock = 2, threading.Lock()

    def __call__(self, item: Any) -> None:
        with self._lock:
            wait = self._left > 0 and item["number"] in self._numbers
            self._left -= wait
        if wait:
            self._barrier.wait(LIMIT)

    @property
    def over(self) -> bool:
        return not self._left and not self._barrier.broken


class Stay:
    """Where a thread stays, within the item with number 0, until a test has it go on."""

    def __init__(self) -> None:
        self.there, self.go_on = threading.Event(), threading.Event()

    def __call__(self, item: Any) -> None:
        if item["number"] == 0:
            self.there.set()
            assert self.go_on.wait(LIMIT)


def items() -> list[dict[str, Any]]:
    return [{**dict.fromkeys(KEYS, np.arange(40.0)[None] + 100 * i), "number": i} for i in range(COUNT)]


def steps(between: Callable[[Any], None] = lambda item: None) -> mt.Compose:
    crop = Crop()
    crop.between = between
    return mt.Compose([mt.EnsureTyped(KEYS), crop]).set_random_state(3)


def dataset(folder: Path, between: Callable[[Any], None] = lambda item: None) -> GDSDataset:
    made = GDSDataset(items(), steps(between), folder, "cpu")
    made.populate(0, progress=False)
    return made


def drawn(results: list[Any]) -> list[int]:
    """Where items were cropped: every key of an item at the same place."""
    for item in results:
        assert_same(item["image"], item["label"])
    return [int(item["image"].flatten()[0]) % 100 for item in results]


def alone(count: int) -> list[int]:
    """Where a single loop of MONAI's crops."""
    theirs = Dataset(items(), steps())
    return drawn([theirs[i % COUNT] for i in range(count)])


def own(mine: GDSDataset) -> int:
    return id(mine.transform.transforms[1])


@pytest.fixture
def stay() -> Iterator[Stay]:
    made = Stay()
    yield made
    made.go_on.set()


@pytest.fixture
def beside(tmp_path: Path, stay: Stay) -> Iterator[GDSDataset]:
    """A dataset that another thread is indexing, and has drawn one place from."""
    mine = dataset(tmp_path, stay)
    with ThreadPoolExecutor(1) as other:
        future = other.submit(lambda: mine[0])
        assert stay.there.wait(LIMIT)
        yield mine
        stay.go_on.set()
        assert drawn([future.result()]) == alone(1)


def test_two_threads_that_index_one_dataset(tmp_path: Path) -> None:
    mine = dataset(tmp_path, meeting := Meeting(0, 1))
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(mine.__getitem__, range(2)))
    assert meeting.over
    assert sorted(drawn(found)) in (sorted([alone(2)[0]] * 2), sorted(alone(2)))  # copied before or after the draw
    assert sorted(item["by"] == own(mine) for item in found) == [False, True]
    following = mine[2]
    assert following["by"] == own(mine)
    assert drawn([following]) == alone(2)[1:]


def test_workers_that_are_threads(tmp_path: Path) -> None:
    mine = dataset(tmp_path, meeting := Meeting(0, 1))
    loader = ThreadDataLoader(mine, batch_size=1, num_workers=2, use_thread_workers=True, collate_fn=list)
    found = [batch[0] for batch in loader]
    assert meeting.over
    assert len(drawn(found)) == COUNT
    assert own(mine) in {item["by"] for item in found}


@pytest.mark.parametrize("kind", [GDSDataLoader, ThreadDataLoader])
def test_two_loaders_side_by_side(tmp_path: Path, kind: Any) -> None:
    mine = dataset(tmp_path, meeting := Meeting(2))  # the one reads ahead of the other
    loaders = [kind(mine, batch_size=2, num_workers=0, collate_fn=list) for _ in range(2)]
    for pair in zip(*loaders, strict=True):
        for batch in pair:
            assert len(drawn(batch)) == 2
    assert meeting.over


def test_one_loader_twice_and_then_once(tmp_path: Path) -> None:
    mine = dataset(tmp_path, meeting := Meeting(2))
    loader = GDSDataLoader(mine, batch_size=2, collate_fn=list)
    mine.transform.set_random_state(3)  # MONAI's loader has seeded it
    found = list(zip(loader, loader, strict=True))
    assert meeting.over
    first, second = ([item for pair in found for item in pair[i]] for i in (0, 1))
    assert drawn(first) == alone(COUNT)
    assert len(drawn(second)) == COUNT
    assert {item["by"] for item in first} == {own(mine)} != {item["by"] for item in second}
    later = [item for batch in loader for item in batch]
    assert {item["by"] for item in later} == {own(mine)}
    assert drawn(later) == alone(2 * COUNT)[COUNT:]


def test_crops_that_are_drawn_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TILED_BYTES", 1000)
    volume = np.arange(20.0**3, dtype=np.float32).reshape(1, 20, 20, 20) // 7
    crop = mt.RandSpatialCropSamplesd(KEYS, (6, 6, 6), 2, random_size=False)
    pipeline = mt.Compose([mt.EnsureTyped(KEYS), crop, mt.RandFlipd(KEYS, 0.5)]).set_random_state(3)
    mine = GDSDataset([dict.fromkeys(KEYS, volume + i) for i in range(8)], pipeline, tmp_path, "cpu", compression="lz4")
    mine.populate(0, progress=False)
    loader = GDSDataLoader(mine, batch_size=2, collate_fn=list)
    for pair in zip(loader, loader, loader, strict=True):
        for sample in (sample for batch in pair for samples in batch for sample in samples):
            assert_same(sample["image"].as_tensor(), sample["label"].as_tensor())


def test_the_state_of_a_loop_beside_another_is_its_own(tmp_path: Path) -> None:
    mine = dataset(tmp_path)
    first, second = (GDSDataLoader(mine, batch_size=1, prefetch=1, collate_fn=list) for _ in range(2))
    one, other = iter(first), iter(second)
    next(one)
    for _ in range(2):
        next(other)
    state = second.state_dict()
    rest = [item for batch in other for item in batch]
    assert own(mine) not in {item["by"] for item in rest}
    continued = GDSDataLoader(dataset(tmp_path), batch_size=1, collate_fn=list)
    continued.load_state_dict(state)
    assert drawn([item for batch in continued for item in batch]) == drawn(rest)
    assert len(rest) == COUNT - 2


def test_a_loop_is_over_before_its_consumer_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, by, end = dataset(tmp_path), list[int](), HandOver.end

    def tell(self: HandOver, error: BaseException | None = None) -> None:
        with ThreadPoolExecutor(1) as consumer:
            by.append(consumer.submit(lambda: mine[0]["by"]).result())
        end(self, error)

    monkeypatch.setattr(HandOver, "end", tell)
    list(GDSDataLoader(mine, collate_fn=list))
    assert by == [own(mine)]


@pytest.mark.parametrize("end", ["close", "dropped"])
def test_a_loop_that_was_left(tmp_path: Path, end: str) -> None:
    mine = dataset(tmp_path)
    batches = iter(GDSDataLoader(mine, batch_size=1, prefetch=2, collate_fn=list))
    next(batches)
    if end == "close":
        batches.close()  # type: ignore[attr-defined]
    else:
        del batches
        gc.collect()
    assert mine[0]["by"] == own(mine)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("way", ["item", "batch", "loader"])
def test_an_error_ends_the_loop(tmp_path: Path, error: type[BaseException], way: str) -> None:
    """Also while somebody keeps its traceback, as a notebook does."""
    failing = [error]

    def fail(item: Any) -> None:
        if failing:
            raise failing.pop()

    mine = dataset(tmp_path, fail)
    ways: dict[str, Callable[[], Any]] = {
        "item": lambda: mine[0],
        "batch": lambda: mine.__getitems__([0, 1, 2]),
        "loader": lambda: list(GDSDataLoader(mine, batch_size=2, collate_fn=list)),
    }
    with pytest.raises((error, RuntimeError)) as kept:
        ways[way]()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: mine[1]["by"]).result() == own(mine)
    assert kept.value.__traceback__ is not None


def test_items_beside_another_loop_go_on(beside: GDSDataset) -> None:
    """A loop that stays in the middle must not have all others draw the same."""
    found = [beside[i] for i in range(1, 5)]
    assert own(beside) not in {item["by"] for item in found}
    assert drawn(found) == alone(5)[1:]


def test_a_seed_reaches_the_loop_that_begins_next(beside: GDSDataset) -> None:
    found = []
    for _ in range(2):
        beside.transform.set_random_state(3)
        found.append(beside[1])
    assert drawn(found) == alone(1) * 2


def test_an_attribute_reaches_the_loop_that_begins_next(beside: GDSDataset) -> None:
    assert "new" not in beside[1]
    beside.transform.transforms[1].between = lambda item: item.update(new=True)
    assert beside[1]["new"]


class Rotated(mt.Transform):  # type: ignore[misc]
    """Has what MONAI's own have under this name: a generator."""

    def __init__(self) -> None:
        self.R = torch.eye(3)

    def __call__(self, data: Any) -> Any:
        return data


def test_a_rotation_that_a_user_calls_r(tmp_path: Path) -> None:
    transform = mt.Compose([*steps().transforms, Rotated()]).set_random_state(3)
    mine = GDSDataset(items(), transform, tmp_path, "cpu")
    loader = GDSDataLoader(mine, batch_size=2, collate_fn=list)
    assert [len(drawn(a + b)) for a, b in zip(loader, loader, strict=True)] == [4, 4, 4]


def test_transforms_that_are_assigned_reach_the_loop_that_begins_next(beside: GDSDataset) -> None:
    beside.transform = steps()
    assert drawn([beside[1]]) == alone(1)


def test_a_forked_worker_has_the_transforms_for_itself(beside: GDSDataset) -> None:
    class Last(torch.utils.data.Subset[Any]):
        pass

    loader = DataLoader(Last(beside, [4, 5]), batch_size=1, num_workers=1, collate_fn=list)
    assert {batch[0]["by"] for batch in loader} == {own(beside)}


def test_an_item_from_a_copy_is_inverted_by_the_users_transforms(tmp_path: Path) -> None:
    stay = Stay()

    def wait(item: Any) -> Any:
        stay(item)
        return item

    pipeline = mt.Compose([mt.EnsureTyped(KEYS), mt.RandFlipd(KEYS, 1.0, 0), wait])
    mine = GDSDataset(items(), pipeline, tmp_path, "cpu")
    with ThreadPoolExecutor(1) as other:
        future = other.submit(lambda: mine[0])
        assert stay.there.wait(LIMIT)
        flipped = mine[1]
        stay.go_on.set()
        future.result()
    flip = pipeline.transforms[1]
    assert_same(flip.inverse(flipped)["image"].as_tensor(), torch.as_tensor(items()[1]["image"]))
