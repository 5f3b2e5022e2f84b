"""Programs as MONAI's users write them give under ``patch()`` what they give without it, cold and warm."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import monai.data
import pytest

from monai_gds.swap.patching import LEFT_ALONE, NAMES
from tests.same import assert_same, same
from tests.swap.programs import engines, loops, parts, tasks  # noqa: F401  they list their programs
from tests.swap.programs.table import BETWEEN, PAGE, PROGRAMS, Program, Study, plain, records, run, table


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the volumes are, which all programs share."""
    return tmp_path_factory.mktemp("programs") / "data"


def _marked(one: Program) -> Any:
    return pytest.param(one, id=one.name, marks=[pytest.mark.long] if one.long else [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", map(_marked, PROGRAMS.values()))
def test_a_program_gives_the_same_cold_and_warm(program: Program, data: Path, tmp_path: Path) -> None:
    for package in program.needs:
        pytest.importorskip(package, reason=f"{package} is not installed on this machine")
    expected = run(program, Study(data, tmp_path / "monai"))
    assert expected
    cache, scratch = tmp_path / "cache", tmp_path / "ours"
    cold = run(program, Study(data, scratch), cache)
    made = records(cache, scratch)
    warm = run(program, Study(data, scratch), cache)
    assert (made > 0) == program.cached
    assert records(cache, scratch) == made, "the warm run computed items again"
    for found in (cold, warm):
        if program.differs:
            assert not same(plain(expected), plain(found))
        elif program.other:
            assert_same(plain(expected), plain(found))
            assert not same(expected, found)
        else:
            assert_same(expected, found)
