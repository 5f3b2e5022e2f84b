"""Notices given in a run: shared by forked processes."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def _give_in_a_process_of_ones_own(levels: int) -> None:
    Notice("by a spawned process", levels).mark_given()
    if levels:
        _run(_give_in_a_process_of_ones_own, levels - 1)


def _run(work: Callable[..., None], *args: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=work, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_notice_given_by_a_spawned_process_is_not_new_here() -> None:
    """Nor one that a process gave which that one has spawned."""
    _run(_give_in_a_process_of_ones_own, 1)
    assert not Notice("by a spawned process", 1).is_new()
    assert not Notice("by a spawned process", 0).is_new()


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


def test_what_nobody_listened_to_is_logged_once_somebody_does(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("monai_gds.tests")
    for level in (logging.WARNING, logging.INFO, logging.INFO):  # a notebook that turns logging on, and runs on
        with caplog.at_level(level, logger=log.name):
            Notice("a backend").log(log, "uses %s", "posix")
    assert caplog.messages == ["uses posix"]


def test_the_oldest_notices_are_forgotten() -> None:
    notices = [Notice("many", number) for number in range(10_000)]
    for notice in notices:
        notice.mark_given()
    assert notices[-1].last_given() > -math.inf
    assert 4000 < sum(notice.last_given() > -math.inf for notice in notices) <= 512 * 8
