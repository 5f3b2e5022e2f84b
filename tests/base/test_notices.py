"""Notices given in a run: shared by forked processes."""

from __future__ import annotations

import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor

from monai_gds.base.notices import Notice
from tests.machines import in_child


def test_a_notice_is_new_once() -> None:
    began = time.monotonic()
    assert Notice("full", "/a").last_given() == -math.inf
    assert Notice("full", "/a").is_new() and not Notice("full", "/a").is_new()
    assert Notice("full", "/b").is_new()
    assert began <= Notice("full", "/a").last_given() <= time.monotonic()


def test_a_notice_given_by_a_forked_process_is_not_new_here() -> None:
    in_child(Notice("by a child").mark_given)
    assert not Notice("by a child").is_new()


def test_one_of_the_processes_that_ask_at_once_is_told_that_it_is_new() -> None:
    notices = [Notice("asked at once", number) for number in range(300)]
    start = time.monotonic() + 0.5

    def claimed() -> list[int]:
        time.sleep(max(0, start - time.monotonic()))
        return [number for number, notice in enumerate(notices) if notice.is_new()]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(in_child, [claimed] * 4))
    assert sorted(itertools.chain.from_iterable(found)) == list(range(300))


def test_the_oldest_notices_are_forgotten() -> None:
    notices = [Notice("many", number) for number in range(10_000)]
    for notice in notices:
        notice.mark_given()
    assert notices[-1].last_given() > -math.inf
    assert 4000 < sum(notice.last_given() > -math.inf for notice in notices) <= 512 * 8
