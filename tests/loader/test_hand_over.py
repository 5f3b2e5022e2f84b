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
    made = batch(number)
    hand_over.put(made, None, True, [*metadata_in(made)])


def begun(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


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


def test_more_work_after_the_last_batch_is_done_bit_by_bit(
    hand_over: HandOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STEP_SECONDS", 60)
    done: list[int] = []

    def loader() -> None:
        for bit in range(4):
            done.append(bit)
            hand_over.keep_pace()

    for number in range(2):
        put(hand_over, number)
    thread = begun(loader)
    for taken in range(2):
        until(lambda: len(done) > taken)  # noqa: B023 (called here)
        thread.join(0.05)
        assert len(done) == taken + 1
        hand_over.take()
    thread.join(10)  # no batch waits any more
    assert len(done) == 4


class SimulatedStream:
    """Does for a stream of CUDA where nothing is computed."""

    def record_event(self) -> object:
        return object()

    def wait_event(self, event: object) -> None:
        assert event is not None


def test_the_loader_rests_after_the_first_batch_of_a_simulated_gpu(
    hand_over: HandOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And after no other one: a step that syncs would hold it up."""
    monkeypatch.setattr(limits, "FIRST_STEP_SECONDS", 60)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimulatedStream())
    hand_over.stream = SimulatedStream()  # type: ignore[assignment]
    loader = begun(lambda: put(hand_over, 0))
    hand_over.take()
    loader.join(0.05)
    assert loader.is_alive()
    consumer = begun(hand_over.take)
    loader.join(10)
    assert not loader.is_alive()
    put(hand_over, 1)  # at once
    consumer.join(10)
    put(hand_over, 2)


def test_the_loader_rests_until_the_first_step_is_queued(hand_over: HandOver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FIRST_STEP_SECONDS", 60)
    put(hand_over, 0)
    hand_over.take()
    loader = begun(hand_over._let_begin)
    loader.join(0.05)
    assert loader.is_alive()
    second = begun(hand_over.take)  # as soon as the consumer comes, before there is a batch
    loader.join(10)
    assert not loader.is_alive()
    put(hand_over, 1)
    second.join(10)


def test_whoever_takes_no_more_does_not_keep_the_loader(hand_over: HandOver) -> None:
    """Such as a loop of a given number of steps: the next one has the same workers."""
    put(hand_over, 0)
    loader = begun(hand_over.keep_pace)
    loader.join(10)
    assert not loader.is_alive()


@pytest.mark.parametrize("work", [HandOver._let_begin, HandOver.keep_pace])
def test_a_loop_that_is_left_wakes_the_loader(
    hand_over: HandOver, work: Callable[[HandOver], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FIRST_STEP_SECONDS", 60)
    monkeypatch.setattr(limits, "STEP_SECONDS", 60)
    put(hand_over, 0)
    loader = begun(lambda: work(hand_over))
    hand_over.stop()
    loader.join(10)
    assert not loader.is_alive()
