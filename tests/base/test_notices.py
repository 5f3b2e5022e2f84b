"""Notices given in a run: shared by forked processes."""

from __future__ import annotations

import logging
import math
import time

import pytest

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
