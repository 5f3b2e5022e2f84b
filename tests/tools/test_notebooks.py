"""tools/notebooks.py: what it executes, where it saves, and that a failure is told and stops nothing else."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from monai_gds.base.file_systems import Mount
from tests.tools import load_tool

nbformat = pytest.importorskip("nbformat", reason="this machine has no nbformat")
pytest.importorskip("nbclient", reason="this machine has no nbclient to execute notebooks with")
pytest.importorskip("ipykernel", reason="this machine has no ipykernel to execute notebooks with")

notebooks = load_tool("notebooks")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two notebooks: one that fails in its second cell, one that says where it runs and what it has imported."""
    cells = {
        "bad": ["print('before')", "raise KeyError('the reason')", "print('behind')"],
        "good": [
            "import os, monai_gds",
            "print(monai_gds.__file__)\nprint(os.listdir(), os.getcwd() == os.environ['TMPDIR'])",
        ],
    }
    for name, sources in cells.items():
        node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
        nbformat.write(node, tmp_path / f"{name}.ipynb")
    monkeypatch.setattr(notebooks, "TUTORIALS", tmp_path)
    return tmp_path


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def test_a_failure_is_saved_and_told_and_the_others_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert notebooks.main([]) == 1
    out, err = capsys.readouterr()
    assert "bad: FAILED" in out
    assert "good: done" in out
    assert "the reason" in err
    bad = read(folder / "bad.ipynb")
    assert notebooks.text_of(bad, "stdout") == "before\n"
    assert [o.ename for cell in bad.cells for o in cell.outputs if o.output_type == "error"] == ["KeyError"]
    good = notebooks.text_of(read(folder / "good.ipynb"), "stdout")
    assert good == f"{notebooks.ROOT / 'monai_gds' / '__init__.py'}\n[] True\n"


def test_only_those_named_and_to_another_folder(folder: Path) -> None:
    before = (folder / "good.ipynb").read_bytes()
    assert notebooks.main(["good", "--output", str(folder / "out" / "here")]) == 0
    assert (folder / "good.ipynb").read_bytes() == before
    (saved,) = (folder / "out" / "here").iterdir()
    node = read(saved)
    assert [cell.execution_count for cell in node.cells] == [1, 2]
    assert node.metadata.language_info == {"name": "python"}  # no version that would change with the machine


def test_the_first_cell_tells_where_the_outputs_came_from(folder: Path) -> None:
    source = "# Title\n\n**Where its outputs came from.** A machine of long ago.\n\nMore."
    node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(source)])
    node.cells[0].metadata = {"scrolled": True, "mystnb": {"image": {"alt": "a curve"}}}
    nbformat.write(node, folder / "good.ipynb")
    assert notebooks.main(["good"]) == 0
    (cell,) = read(folder / "good.ipynb").cells
    title, origin, more = cell.source.split("\n\n")
    assert (title, more) == ("# Title", "More.")
    today = datetime.now(UTC).date().isoformat()
    assert origin.startswith(f"**Where its outputs came from.** The notebook was executed on {today} on a machine with")
    assert cell.metadata == {"mystnb": {"image": {"alt": "a curve"}}}


def test_the_first_cell_tells_what_the_data_lay_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONAI_DATA_DIRECTORY", str(tmp_path))
    device = tmp_path.stat().st_dev
    mount = Mount("1", f"{os.major(device)}:{os.minor(device)}", "/data", "ext4", "/dev/loop7", "rw")
    monkeypatch.setattr(notebooks, "mounts", lambda proc: iter([mount._replace(number="0:99", kind="tmpfs"), mount]))
    node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("**Where its outputs came from.** -")])
    notebooks.sign(node)
    assert node.cells[0].source.endswith(" Its data lay on ext4 on /dev/loop7, a file behind a loop device.")


def test_an_unknown_name_is_wrong_usage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        notebooks.main(["god"])
    assert "there are: bad, good" in capsys.readouterr().err
