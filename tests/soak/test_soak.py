"""A second of each campaign of ``make soak``: nothing wrong, nothing lost, nothing that hangs or dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monai_gds.tiles import blosc
from tests.fresh import Interpreter
from tests.soak.campaigns import CAMPAIGNS, PRELOAD, tally_of

pytestmark = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """Processes that have imported the campaigns already, of which each starts several."""
    with Interpreter(*PRELOAD) as started:
        yield started


QUICK = [name for name in CAMPAIGNS if name != "power"]


def finds_nothing(name: str, folder: Path, interpreter: Interpreter, seconds: float) -> None:
    tally = tally_of(name, folder / "soak", interpreter, seconds)
    assert tally.bad == 0, "\n".join(tally.notes)
    if not tally.trials:
        pytest.skip("; ".join(tally.skipped))


@pytest.mark.parametrize("name", QUICK)
def test_a_campaign_finds_nothing(name: str, tmp_path: Path, interpreter: Interpreter) -> None:
    finds_nothing(name, tmp_path, interpreter, 1.0)


@pytest.mark.long
def test_power_cuts_lose_nothing_that_is_durable(tmp_path: Path, interpreter: Interpreter) -> None:
    finds_nothing("power", tmp_path, interpreter, 15.0)
