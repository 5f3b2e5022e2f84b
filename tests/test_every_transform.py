"""Every deterministic dictionary transform of MONAI: uncached, a miss, and a hit in another process are one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import monai.transforms as mt
import numpy as np
import pytest

from monai_gds import GDSDataset, UnsupportedType
from tests.fresh import Interpreter, Process
from tests.recipes import LEFT_OUT, RECIPES, exported
from tests.roundtrip import Case, assert_cached_alike, uncached

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def other(interpreter: Interpreter) -> Iterator[Process]:
    """The one process that all hits are read in."""
    with interpreter.process() as process:
        yield process


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.mark.parametrize("name", sorted(exported()))
def test_has_a_recipe_or_a_reason(name: str) -> None:
    assert (name in RECIPES) != (name in LEFT_OUT), (
        f"MONAI exports {name}: add a line to RECIPES in tests/recipes.py with arguments and an item that it works on, "
        "or to LEFT_OUT why that cannot be"
    )


def test_there_is_no_recipe_of_what_monai_does_not_export() -> None:
    assert not (RECIPES.keys() | LEFT_OUT.keys()) - exported().keys()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RECIPES)
def test_uncached_is_miss_is_hit(name: str, device: str, files: Path, tmp_path: Path, other: Process) -> None:
    missing = RECIPES[name].missing()
    if missing:
        pytest.skip(f"{name} needs {' and '.join(missing)}, which this machine has not")
    case = Case((name,), tmp_path if RECIPES[name].writes else files)
    assert_cached_alike(case, uncached(case), tmp_path / "cache", device, other)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_cannot_be_cached(name: str, tmp_path: Path) -> None:
    print(f"{name} {LEFT_OUT[name]}")
    item = {"image": np.arange(48, dtype=np.uint8).reshape(4, 4, 3)}
    if name == "MapTransform":
        with pytest.raises(TypeError, match="abstract"):
            mt.MapTransform("image")
        return
    pytest.importorskip({"ToPILd": "PIL.Image", "ToCupyd": "cupy"}[name])
    transform = [getattr(mt, name)("image")]
    with pytest.raises(UnsupportedType, match="image"):
        _ = GDSDataset([item], transform, tmp_path, device="cpu", options={"unsupported": "error"})[0]
