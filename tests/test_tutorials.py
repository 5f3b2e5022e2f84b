"""The notebooks of tutorials/: they run from clean, also where libraries are missing, and are saved with their outputs.

They run on the CPU, on small data, also where there is a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tools import load_tool

nbformat = pytest.importorskip("nbformat", reason="this machine has no nbformat")
pytest.importorskip("nbclient", reason="this machine has no nbclient to execute notebooks with")
pytest.importorskip("ipykernel", reason="this machine has no ipykernel to execute notebooks with")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))

#: Those that take seconds; the others take half a minute each.
QUICK = {"block_map", "tensor_io"}
each = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


#: Libraries that no notebook may take for granted, and what makes a Python start without them.
OPTIONAL = ("blosc2", "deepspeed", "matplotlib", "nilearn", "nvidia.dali", "squirrel")
NOT_INSTALLED = """
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, PackageNotFoundError

hidden = {}
find, from_name = PathFinder.find_spec, Distribution.from_name
PathFinder.find_spec = staticmethod(lambda name, *where: None if name in hidden else find(name, *where))

def distribution(name):
    if name in hidden:
        raise PackageNotFoundError(name)
    return from_name(name)

Distribution.from_name = staticmethod(distribution)
"""

tool = load_tool("notebooks")


def warnings_in(node: Any) -> list[str]:
    """What came on standard error, but for DeepSpeed's operators, which say that they are compiled on first use."""
    return [
        line for line in tool.text_of(node, "stderr").splitlines() if not line.startswith(("compiling ", "compiled"))
    ]


@each
def test_the_first_cell_tells_how_to_install_what_is_on_no_index(notebook: Path) -> None:
    (line,) = [line for line in nbformat.read(notebook, 4).cells[0].source.splitlines() if "What you need" in line]
    assert "pip install '.[" in line and "in a clone" in line
    assert "'monai_gds[" not in line


@pytest.fixture(autouse=True)
def as_on_a_fresh_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONAI_DATA_DIRECTORY", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_all_of_them_are_here() -> None:
    names = {path.stem for path in NOTEBOOKS}
    assert names == {
        "block_map", "gds_dataset", "imagenet_dali", "looking_after_a_cache", "several_gpus", "squirrel_dali",
        "tensor_io", "train_segmentation",
    }  # fmt: skip


@pytest.fixture
def without(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has a Python that is started later take these libraries for not installed."""

    def hide(*names: str) -> None:
        site = tmp_path_factory.mktemp("site")
        (site / "sitecustomize.py").write_text(NOT_INSTALLED.format(names))
        monkeypatch.setenv("PYTHONPATH", str(site))

    return hide


@pytest.mark.parametrize(
    ("notebook", "everything"),
    [
        pytest.param(path, everything, marks=[] if path.stem in QUICK and not everything else pytest.mark.long)
        for path in NOTEBOOKS
        for everything in (False, True)
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else str(value),
)
@pytest.mark.timeout(900)
def test_runs_from_clean_without_a_warning_and_leaves_nothing_behind(
    notebook: Path, everything: bool, tmp_path: Path, without: Callable[..., None]
) -> None:
    if not everything:
        without("deepspeed")  # whose operators take minutes to compile
    node, error = tool.execute(notebook, tmp_path)
    assert not error, error
    assert warnings_in(node) == []
    assert list(tmp_path.iterdir()) == []


#: What is left in MONAI_DATA_DIRECTORY for the next time.
KEPT = {"gds_dataset": ["made_volumes"], "train_segmentation": ["deformed_template_2mm_5"]}


@pytest.mark.long
@each
@pytest.mark.timeout(900)
def test_says_what_is_missing_instead_of_failing_and_keeps_data_where_told(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: Callable[..., None]
) -> None:
    without(*OPTIONAL)
    data, work = tmp_path / "data", tmp_path / "work"
    data.mkdir()
    work.mkdir()
    monkeypatch.setenv("MONAI_DATA_DIRECTORY", str(data))
    node, error = tool.execute(notebook, work)
    assert not error, error
    said = tool.text_of(node, "stdout")
    assert "matplotlib is missing" in said
    assert "DALI is missing" in said or "dali" not in notebook.stem
    assert "Squirrel is missing" in said or "squirrel" not in notebook.stem
    assert "nilearn is missing" in said or notebook.stem != "train_segmentation"
    assert "Blosc2 is missing" in said or notebook.stem != "train_segmentation"
    assert "No CUDA device here" in said or notebook.stem == "block_map"
    assert warnings_in(node) == []
    assert list(work.iterdir()) == []
    assert [path.name for path in data.iterdir()] == KEPT.get(notebook.stem, [])


@each
def test_is_saved_with_outputs_and_pictures_and_small(notebook: Path) -> None:
    node = nbformat.read(notebook, as_version=4)
    assert notebook.stat().st_size < 1_000_000
    code = [cell for cell in node.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code), "a cell was not executed"
    outputs = [output for cell in code for output in cell.outputs]
    assert [o.ename for o in outputs if o.output_type == "error"] == []
    assert any({"image/png", "image/jpeg"} & o.get("data", {}).keys() for o in outputs)
    assert node.cells[0].source.startswith("# ")
    for paragraph in HEAD:
        assert f"\n**{paragraph}.** " in node.cells[0].source


#: Paragraphs of every first cell.
HEAD = ("What you learn", "How long it takes", "Where its outputs came from", "What you need")


@each
def test_ends_with_one_sentence_that_its_last_cell_makes_of_the_run(notebook: Path) -> None:
    last = nbformat.read(notebook, as_version=4).cells[-1]
    (output,) = last.outputs
    assert re.fullmatch(r"[A-Z](?:[^.\n]|\.\w)+\.\n", output.text), output.text
    assert any(char.isdigit() for char in output.text), "a figure of the run"


@each
def test_every_picture_has_an_alternative_text(notebook: Path) -> None:
    for cell in nbformat.read(notebook, as_version=4).cells:
        if any({"image/png", "image/jpeg"} & output.get("data", {}).keys() for output in cell.get("outputs", ())):
            assert len(cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")) > 20, cell.source
