"""Stages: seconds and counts belong to the thread that is measured, and nothing is left behind."""

from __future__ import annotations

import threading
import time

import monai.transforms as mt
import pytest

from monai_gds.base import stages
from monai_gds.base.stages import Watch, measured


def test_each_stage_lasts_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    watch = Watch()
    with measured(watch):
        now += 1
        stages.enter("reading")
        now += 2
        stages.enter("transforms", "Flip")
        now += 3
    now += 4
    assert watch.seconds == {("reading", ""): 2, ("transforms", "Flip"): 3}


def test_a_stage_ends_where_the_block_is_left_by_an_error() -> None:
    watch = Watch()
    with pytest.raises(ZeroDivisionError), measured(watch):
        stages.enter("reading")
        raise ZeroDivisionError
    stages.enter("decoding")
    assert set(watch.seconds) == {("reading", "")} and not stages.watching()


def test_other_threads_are_not_measured() -> None:
    watch = Watch()
    with measured(watch):
        other = threading.Thread(target=lambda: (stages.enter("reading"), stages.count("hits")))
        other.start()
        other.join()
    assert not watch.seconds and not watch.counts


def test_transforms_are_themselves_and_have_names() -> None:
    transforms = [mt.Identity(), mt.ToTensor()]
    assert stages.each("transforms", transforms) is transforms
    watch = Watch()
    with measured(watch):
        listed = stages.each("transforms", transforms)
        assert [*listed] == [*listed[:]] == transforms and len(listed) == 2
    assert {part for _, part in watch.seconds} == {"Identity", "ToTensor"}


def test_what_a_worker_measured_is_added_once() -> None:
    worker, watch = Watch(), Watch()
    with measured(worker):
        for _ in range(2):
            stages.enter("reading")
            stages.count("hits")
            watch.add(worker.take())
    assert watch.counts == {"hits": 2} and not worker.take()[1]


def test_a_thread_may_stay_in_one_stage_whatever_it_enters() -> None:
    watch = Watch()
    with stages.all_in("a", "b"):  # nobody measures
        pass
    with measured(watch):
        with stages.all_in("a", "b"):
            stages.enter("c")
        stages.enter("d")
    assert list(watch.seconds) == [("a", "b"), ("d", "")]
