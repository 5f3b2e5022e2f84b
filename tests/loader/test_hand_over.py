"""What the loader's thread and the training do to each other while a batch is handed over."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from monai_gds import limits
from monai_gds.loader.hand_over import HandOver, metadata_in
from tests.polls import until


@pytest.fixture
def hand_over() -> HandOver:
    return HandOver(torch.device("cpu"), lambda mark: None)


def batch(number: int) -> dict[str, Any]:
    meta = {"spacing": torch.from_numpy(np.ones(3)), "corners": [torch.from_numpy(np.zeros(3))], "name": "a"}
    return {"image": MetaTensor(torch.full((2,), float(number)), meta=meta), "number": number}


def put(hand_over: HandOver, number: int) -> None:
    assert hand_over.room()
    made = batch(number)
    hand_over.put(made, None, True, [*metadata_in(made)])


def begun(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_no_batch_is_made_that_would_have_to_wait_for_room(hand_over: HandOver) -> None:
    """It would take memory, and the interpreter's lock while the training begins its first step."""
    for number in range(limits.BATCHES_WAITING):
        put(hand_over, number)
    loader = begun(hand_over.room)
    loader.join(0.05)
    assert loader.is_alive()
    hand_over.take()
    loader.join(10)
    assert not loader.is_alive()


def test_a_loop_that_is_left_wakes_the_loader(hand_over: HandOver) -> None:
    for number in range(limits.BATCHES_WAITING):
        put(hand_over, number)
    found: list[bool] = []
    loader = begun(lambda: found.append(hand_over.room()))
    hand_over.stop()
    loader.join(10)
    assert found == [False]


def test_metadata_is_freed_while_the_loader_rests_and_not_when_its_batch_is_dropped(hand_over: HandOver) -> None:
    """Each of its tensors that the consumer frees gives the interpreter's lock to a loader that works."""
    for number in range(2):
        put(hand_over, number)
    first = hand_over.take()
    held = [weakref.ref(first["image"].meta["spacing"]), weakref.ref(first["image"].meta["corners"][0])]
    del first
    gc.collect()
    assert all(ref() is not None for ref in held)
    put(hand_over, 2)
    loader = begun(lambda: put(hand_over, 3))  # finds no room
    until(lambda: hand_over._at_rest)
    hand_over.take()
    assert all(ref() is not None for ref in held)  # the batch may be the consumer's still
    loader.join()
    loader = begun(lambda: put(hand_over, 4))
    until(lambda: hand_over._at_rest)
    hand_over.take()
    assert not any(ref() is not None for ref in held)
    loader.join()


def test_no_more_metadata_is_kept_than_the_page_of_limits_has(hand_over: HandOver) -> None:
    """Where the loader is never at rest."""
    held = []
    for number in range(20):
        put(hand_over, number)
        held.append(weakref.ref(hand_over.take()["image"].meta["spacing"]))
    assert sum(ref() is not None for ref in held) <= limits.METADATA_KEPT + 1


def test_an_iterator_that_is_kept_after_its_loop_keeps_no_metadata(hand_over: HandOver) -> None:
    """As trainers keep it until the next epoch."""
    for number in range(2):
        put(hand_over, number)
    hand_over.end()
    held = [weakref.ref(hand_over.take()["image"].meta["spacing"]) for _ in range(2)]
    with pytest.raises(StopIteration):
        hand_over.take()
    hand_over.stop()
    assert not any(ref() is not None for ref in held)


def test_a_tensor_that_the_user_adds_to_metadata_goes_with_the_batch(hand_over: HandOver) -> None:
    put(hand_over, 0)
    taken = hand_over.take()
    taken["image"].meta["prediction"] = torch.zeros(1)
    added = weakref.ref(taken["image"].meta["prediction"])
    del taken
    gc.collect()
    assert added() is None
