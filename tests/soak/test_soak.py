"""A second or two of each campaign of ``make soak``: nothing wrong, nothing lost, nothing that hangs or dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from monai_gds.cache import blosc
from tests.fresh import Interpreter
from tests.soak.campaigns import CAMPAIGNS, tally_of

pytestmark = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_campaign_finds_nothing(name: str, tmp_path: Path, interpreter: Interpreter) -> None:
    tally = tally_of(name, tmp_path / "soak", interpreter, 2.0)
    assert tally.bad == 0, "\n".join(tally.notes)
    if not tally.trials:
        pytest.skip("; ".join(tally.skipped))
