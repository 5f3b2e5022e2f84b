"""Programs as MONAI's users write them give under ``patch()`` what they give without it, cold and warm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monai_gds.pipeline.split import Split
from monai_gds.swap.patching import LEFT_ALONE, NAMES
from tests.same import assert_same, same
from tests.swap.programs import engines, loops, parts, tasks  # noqa: F401  they list their programs
from tests.swap.programs.table import PAGE, PROGRAMS, TIMES, Program, Study, plain, records, run, write


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the volumes are, which all programs share."""
    return tmp_path_factory.mktemp("programs") / "data"


def _marked(one: Program) -> Any:
    return pytest.param(one, id=one.name, marks=[pytest.mark.long] if one.long else [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [_marked(one) for one in PROGRAMS.values()])
def test_a_program_gives_the_same_cold_and_warm(
    program: Program, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in program.needs:
        pytest.importorskip(package, reason=f"{package} is not installed on this machine")
    expected = run(program, Study(data, tmp_path / "monai"))
    assert expected
    cache, ours = tmp_path / "cache", Study(data, tmp_path / "ours")
    cold = run(program, ours, cache)
    made = records(cache, ours.scratch)
    monkeypatch.setattr(Split, "before", None)  # which makes what is not cached
    warm = run(program, ours, cache)
    assert (made > 0) == program.cached
    assert records(cache, ours.scratch) == made, "the warm run made other records"
    assert_same(cold, warm)
    if program.differs:
        assert not same(plain(expected), plain(cold)), "the table is wrong about it"
    elif program.other:
        assert_same(plain(expected), plain(cold))
        assert not same(expected, cold), "the table is wrong about it"
    else:
        assert_same(expected, cold)


def test_the_table_is_that_of_these_programs(tmp_path: Path) -> None:
    page = tmp_path / "moving.md"
    page.write_text(PAGE.read_text())
    write(page)
    assert page.read_text() == PAGE.read_text(), "python -m tests.swap.programs writes it again"
    assert json.loads(TIMES.read_text())["seconds"].keys() <= PROGRAMS.keys()


def test_every_dataset_that_runs_without_a_network_or_a_gpu_is_in_a_program() -> None:
    used = {name for one in PROGRAMS.values() for name in one.uses}
    joined = {name for name, why in LEFT_ALONE.items() if "other datasets" in why or "another dataset" in why}
    elsewhere = {"GDSDataset", "TciaDataset", "MaskedPatchWSIDataset", "DatasetFunc"}
    assert (set(NAMES) | joined | {"Dataset", "CSVDataset", "DataLoader", "ThreadDataLoader"}) - used == elsewhere
