"""A device without memory for what is read ahead: the epoch goes on with less of it, and with the same batches."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.utils import set_determinism

from monai_gds import CacheWarning, GDSDataLoader, GDSDataset
from monai_gds.dataset.session import Begun, Session
from monai_gds.loader import ahead
from tests.same import assert_same

COUNT = 6


class Full:
    """A device whose memory is full at the n-th time that it is asked for some, and at those after it."""

    def __init__(self, when: int, times: int = 1) -> None:
        self.when, self.times, self.asked = when, times, 0

    def ask(self) -> None:
        self.asked += 1
        if self.when < self.asked <= self.when + self.times:
            raise torch.OutOfMemoryError("CUDA out of memory")


@contextmanager
def memory(full: Full, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    begin, arrive = Session.begin, Begun.arrive

    def asking_begin(self: Session, indices: Any) -> Any:
        full.ask()
        return begin(self, indices)

    def asking_arrive(self: Begun) -> None:
        full.ask()
        arrive(self)

    def asking_collate(items: list[Any]) -> list[Any]:
        full.ask()
        return items

    with monkeypatch.context() as patch:
        patch.setattr(ahead, "_PAUSES", (0.0,) * 3)
        patch.setattr(Session, "begin", asking_begin)
        patch.setattr(Begun, "arrive", asking_arrive)
        patch.setattr("tests.loader.test_no_memory.collate", asking_collate)
        yield


def collate(items: list[Any]) -> list[Any]:
    return items


@pytest.fixture(params=[None, "lz4"], ids=["whole", "crops drawn first"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> GDSDataset:
    if request.param:
        pytest.importorskip("blosc2", reason="blosc2 is not installed")
    items = [{"x": np.arange(64**3, dtype=np.float32).reshape(1, 64, 64, 64) % (n + 3)} for n in range(COUNT)]
    random = [mt.RandSpatialCropSamplesd("x", (8, 8, 8), num_samples=2, random_size=False), mt.RandFlipd("x", prob=0.5)]
    transform = mt.Compose([mt.EnsureTyped("x"), *random])
    found = GDSDataset(items, transform, tmp_path / "cache", device="cpu", compression=request.param)
    found.populate()
    return found


def batches(dataset: GDSDataset) -> list[Any]:
    set_determinism(1)
    dataset.transform.set_random_state(1)
    loader = GDSDataLoader(dataset, batch_size=2, prefetch=5, shuffle=True, collate_fn=lambda items: collate(items))
    try:
        return list(loader)
    finally:
        set_determinism(None)


def test_batches_are_the_same_wherever_memory_ends(dataset: GDSDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = batches(dataset)
    count = Full(10**6)
    with memory(count, monkeypatch):
        assert_same(batches(dataset), expected)
    for when in range(count.asked):
        full = Full(when)
        with memory(full, monkeypatch), warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            assert_same(batches(dataset), expected)
        assert full.asked > when, "it was not asked"


def test_less_is_read_ahead_from_then_on_and_that_is_said(dataset: GDSDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    begin = Session.begin

    def room_for_two(self: Session, indices: Any) -> Any:
        alive.append(sum(type(found) is Begun for found in gc.get_objects()))
        if alive[-1] + len(indices) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return begin(self, indices)

    monkeypatch.setattr(Session, "begin", room_for_two)
    with pytest.warns(CacheWarning, match="no memory left") as warned:
        assert len(batches(dataset)) == COUNT // 2
    said = [re.search(r"GDSDataLoader\(prefetch=(\d)\)", str(w.message)) for w in warned]
    limits = [int(found[1]) for found in said if found]
    assert limits in ([1], [2], [2, 1])  # it depends on how many the consumer has taken by then
    assert max(alive[-2:]) <= limits[-1] + 1  # with the one that is finished


def test_an_error_of_monais_that_says_so_is_understood(dataset: GDSDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """``list_data_collate`` and ``Compose`` raise RuntimeErrors of their own."""
    expected = batches(dataset)
    asked = 0

    def wrapped(items: list[Any]) -> list[Any]:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise RuntimeError("collate error") from torch.OutOfMemoryError("CUDA out of memory")
        return items

    monkeypatch.setattr("tests.loader.test_no_memory.collate", wrapped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        assert_same(batches(dataset), expected)


def test_at_last_there_is_one_in_flight(dataset: GDSDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_PAUSES", (0.0,))
    begin = Session.begin

    def room_for_one(self: Session, indices: Any) -> Any:
        if sum(type(found) is Begun for found in gc.get_objects()) + len(indices) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return begin(self, indices)

    monkeypatch.setattr(Session, "begin", room_for_one)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        assert len(batches(dataset)) == COUNT // 2


def test_an_error_keeps_no_memory_of_what_was_begun(dataset: GDSDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that a frame of its own traceback holds is a circle, which only the collector would free."""
    begin, left = Session.begin, []

    def begin_one_at_most(self: Session, indices: Any) -> Any:
        begun = begin(self, indices)
        if len(indices) < 2:
            return begun
        memory = np.zeros(1)  # beside what was begun
        left.append(weakref.ref(memory))
        errors = {0: torch.OutOfMemoryError("CUDA out of memory")}
        raise errors[0] from errors[0]

    monkeypatch.setattr(Session, "begin", begin_one_at_most)
    gc.collect()
    gc.disable()
    try:
        list(batches(dataset))
        assert left, "the loader begins several items together"
        assert not [ref for ref in left if ref() is not None]
    finally:
        gc.enable()


def test_an_item_that_does_not_fit_at_all_is_an_error(dataset: GDSDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        memory(Full(5, times=10**6), monkeypatch),
        warnings.catch_warnings(),
        pytest.raises(torch.OutOfMemoryError, match="out of memory"),
    ):
        warnings.simplefilter("ignore", CacheWarning)
        batches(dataset)
