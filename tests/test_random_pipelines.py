"""Random pipelines of MONAI's deterministic transforms: uncached, a miss, and a hit in another process are one."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fresh import Interpreter, Process
from tests.recipes import RECIPES, loaded, volumes
from tests.roundtrip import Case, assert_cached_alike, uncached

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]

#: Those that work on a volume that was loaded, and cost no time on purpose.
NAMES = sorted(
    name
    for name, recipe in RECIPES.items()
    if recipe.item is volumes and recipe.before is loaded and not recipe.writes and not recipe.missing()
    if name not in ("SimulateDelayd", "DataStatsd")
)


@pytest.fixture(scope="module")
def other(interpreter: Interpreter) -> Iterator[Process]:
    """The one process that all hits are read in."""
    with interpreter.process() as process:
        yield process


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def draw(number: int, files: Path) -> tuple[Case, Any]:
    """The pipeline of a number, and what it gives: the first one drawn whose transforms take one another's results."""
    rng = random.Random(number)
    while True:
        names = rng.choices(NAMES, k=rng.randint(2, 6))
        case = Case(tuple(names), files, lazy=rng.random() < 0.3)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return case, uncached(case)
        except Exception:  # one cannot take what another gives: not a pipeline that anybody has
            continue


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [n if n < 20 else pytest.param(n, marks=pytest.mark.long) for n in range(300)])
def test_uncached_is_miss_is_hit(number: int, device: str, files: Path, tmp_path: Path, other: Process) -> None:
    case, expected = draw(number, files)
    try:
        assert_cached_alike(case, expected, tmp_path / "cache", device, other)
    except AssertionError as e:
        raise AssertionError(f"{', '.join(case.names)}{', lazy' if case.lazy else ''}: {e}") from e
