"""Notices given in a run: shared by forked processes."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from monai_gds.base import notices
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


def test_of_processes_that_ask_at_once_one_is_told_that_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_TRIES", 100_000)
    read_end, write_end = os.pipe()

    def claim() -> None:
        with notices._alone():
            os.write(write_end, b"it asks")
            time.sleep(0.1)
            Notice("asked at once").mark_given()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(in_child, claim)
        os.read(read_end, 1)
        assert not Notice("asked at once").is_new()
        other.result()


def test_a_claim_that_is_never_given_up_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_TRIES", 3)
    with notices._alone():
        assert in_child(Notice("another holds the lock").is_new)


def test_the_oldest_notices_are_forgotten() -> None:
    notices = [Notice("many", number) for number in range(10_000)]
    for notice in notices:
        notice.mark_given()
    assert notices[-1].last_given() > -math.inf
    assert 4000 < sum(notice.last_given() > -math.inf for notice in notices) <= 512 * 8
