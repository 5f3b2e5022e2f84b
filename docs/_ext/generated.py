"""What other files hold, brought into the site before it is read: the command line and the notebooks.

All of it goes to ``docs/generated``, which git ignores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]


def bring(app: Sphinx) -> None:
    """Makes ``docs/generated`` again."""
    target = Path(app.srcdir) / "generated"
    shutil.rmtree(target, ignore_errors=True)
    (target / "tutorials").mkdir(parents=True)
    for notebook in sorted((ROOT / "tutorials").glob("*.ipynb")):
        shutil.copy(notebook, target / "tutorials")
    command = [sys.executable, "-m", "typer", "monai_gds.command.main", "utils", "docs", "--name", "monai-gds"]
    subprocess.run([*command, "--output", str(target / "commands.md")], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", bring)
    return {"parallel_read_safe": True}
