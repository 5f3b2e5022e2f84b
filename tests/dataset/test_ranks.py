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
from tests.polls import until


def test_alone_nothing_is_exchanged() -> None:
    assert Ranks().gather(lambda: 7) == [7]
    assert not Ranks(1, 3).together
    assert list(Ranks(1, 3).share(8)) == [1, 4, 7]


def late(seconds: float, answer: Any = None) -> Any:
    time.sleep(seconds)
    return answer


def test_each_gets_what_all_returned_however_late() -> None:
    def come_and_work_late(seconds: float) -> Any:
        time.sleep(seconds)  # on_ranks has given the collectives of the user's group 1 second
        return Ranks().gather(partial(late, seconds, {"slept": seconds}))

    works = [partial(come_and_work_late, seconds) for seconds in (0, 1.2, 0)]
    assert on_ranks(*works) == [[{"slept": 0}, {"slept": 1.2}, {"slept": 0}]] * 3


def stop(how: Callable[[], Any]) -> Any:
    return Ranks().gather(lambda: late(0.2) or how())


def test_what_one_raises_all_raise_when_they_are_done() -> None:
    def done() -> Any:
        return Ranks().gather(lambda: late(1.5))

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


def test_one_that_is_interrupted_lets_the_others_know_while_it_lives_on(tmp_path: Path) -> None:
    def interrupted() -> None:
        try:
            stop(partial(os.kill, os.getpid(), signal.SIGINT))
        except KeyboardInterrupt:
            until((tmp_path / "known").exists)

    def other() -> None:
        with pytest.raises(ranks.RankLost):
            Ranks().gather(lambda: None)
        (tmp_path / "known").touch()

    assert on_ranks(other, interrupted) == [None, None]


def test_waiting_can_be_interrupted(tmp_path: Path) -> None:
    def ctrl_c() -> None:
        until((tmp_path / "they met").exists)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    def waiting() -> None:
        threading.Thread(target=ctrl_c).start()
        with pytest.raises(KeyboardInterrupt):
            Ranks().gather(lambda: None)
        (tmp_path / "interrupted").touch()

    def work() -> None:
        (tmp_path / "they met").touch()
        until((tmp_path / "interrupted").exists)

    def slow() -> None:
        with pytest.raises(ranks.RankLost):
            Ranks().gather(work)

    assert on_ranks(waiting, slow) == [None, None]


def test_one_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks, "_MEETING", timedelta(seconds=1))

    def there() -> None:
        try:
            Ranks().gather(lambda: None)
        finally:
            (tmp_path / "given up").touch()

    said = on_ranks(there, partial(until, (tmp_path / "given up").exists))
    assert said[0].startswith("RankLost: not every rank came to do its share within 0:00:01: each must call this")
    assert said[1] is None
