"""What other files hold, brought into the site before it is read: the command line, the notebooks, the first plot.

All of it goes to ``docs/generated``, which git ignores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from benchmarks import BENCHMARKS, read
from monai_gds.bench.report import Report, draw

ROOT = Path(__file__).resolve().parents[2]


def bring(app: Sphinx) -> None:
    """Makes ``docs/generated`` again."""
    target = Path(app.srcdir) / "generated"
    shutil.rmtree(target, ignore_errors=True)
    (target / "tutorials").mkdir(parents=True)
    for notebook in sorted((ROOT / "tutorials").glob("*.ipynb")):
        shutil.copy(notebook, target / "tutorials")
    (target / "plots").mkdir()
    overview().savefig(target / "plots/overview.svg")
    command = [sys.executable, "-m", "typer", "monai_gds.command.main", "utils", "docs", "--name", "monai-gds"]
    subprocess.run([*command, "--output", str(target / "commands.md")], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def overview() -> Any:
    """The plot of the first page: what most people come from, this package, and the link."""
    _, (report,) = read(BENCHMARKS / "h100/volumes.json")
    names = {
        "PersistentDataset": "PersistentDataset",
        "CacheDataset": "CacheDataset",
        "monai GDSDataset": "monai.data.GDSDataset",
        "GDSDataset, GDSDataLoader": "monai_gds",
    }
    rows = [replace(row, name=shown) for name, shown in names.items() for row in report.rows if row.name == name]
    link = [row for row in report.ceilings if row.name == "pinned copy to the GPU"]
    return draw([Report("Cached volumes to the GPU, GB/s (H100, page cache warm)", "GB/s", rows, ceilings=link)])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", bring)
    return {"parallel_read_safe": True}
