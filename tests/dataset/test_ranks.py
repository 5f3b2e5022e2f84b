"""Ranks: they share a job, and wait for one another as long as each lives."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from monai_gds.dataset import ranks
from monai_gds.dataset.ranks import Ranks
from tests.dataset.test_populate import on_ranks


def test_alone_nothing_is_exchanged() -> None:
    assert Ranks().gather(lambda: 7) == [7]
    assert not Ranks(1, 3).together
    assert list(Ranks(1, 3).share(8)) == [1, 4, 7]


def late(seconds: float, answer: Any = None) -> Any:
    time.sleep(seconds)
    return answer


def test_each_gets_what_all_returned_however_late() -> None:
    def come_and_work_late(seconds: float) -> Any:
        time.sleep(seconds)  # on_ranks has given the collectives of the user's group 3 seconds
        return Ranks().gather(partial(late, seconds, {"slept": seconds}))

    works = [partial(come_and_work_late, seconds) for seconds in (0, 4, 0)]
    assert on_ranks(*works) == [[{"slept": 0}, {"slept": 4}, {"slept": 0}]] * 3


def stop(how: Callable[[], Any]) -> Any:
    return Ranks().gather(lambda: late(2) or how())


def test_what_one_raises_all_raise_when_they_are_done() -> None:
    def done() -> Any:
        return Ranks().gather(lambda: late(4))

    said = on_ranks(done, partial(stop, lambda: 1 / 0), done)
    assert said[0] == said[2] == "RankLost: rank 1 ended with ZeroDivisionError: division by zero"
    assert said[1] == "ZeroDivisionError: division by zero"


def test_one_that_is_killed_is_noticed_at_once(tmp_path: Path) -> None:
    def other() -> Any:
        start = time.monotonic()
        try:
            return Ranks().gather(lambda: None)
        except ranks.RankLost as e:
            (tmp_path / f"{time.monotonic() - start:.1f}").write_text(str(e))

    with pytest.raises(EOFError):  # the killed one has no answer to give
        on_ranks(other, partial(stop, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    (noticed,) = tmp_path.iterdir()
    assert noticed.read_text().startswith("a rank was killed, or ended before its share was done")
    assert float(noticed.name) < 5


def test_one_that_is_interrupted_lets_the_others_know_while_it_lives_on() -> None:
    def interrupted() -> Any:
        try:
            stop(partial(os.kill, os.getpid(), signal.SIGINT))
        except KeyboardInterrupt:
            return late(5, "lived on")

    def other() -> Any:
        start = time.monotonic()
        with pytest.raises(ranks.RankLost):
            Ranks().gather(lambda: None)
        return time.monotonic() - start

    waited, said = on_ranks(other, interrupted)
    assert said == "lived on"
    assert waited < 5, "the other one lived on for so long"


def test_waiting_can_be_interrupted() -> None:
    def waiting() -> Any:
        threading.Timer(1, partial(os.kill, os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            Ranks().gather(lambda: None)
        return time.monotonic() - start

    def slow() -> Any:
        with pytest.raises(ranks.RankLost):
            Ranks().gather(partial(late, 5))

    assert on_ranks(waiting, slow)[0] < 4


def test_one_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_MEETING", timedelta(seconds=2))
    said = on_ranks(lambda: Ranks().gather(lambda: None), partial(late, 6))
    assert said[0].startswith("RankLost: not every rank came to do its share within 0:00:02: each must call this")
