#!/usr/bin/env python3
"""Builds the site: ``build/site/<version>``, and ``build/site/index.html``, which lists the versions that are there.

    python tools/docs.py             # builds; a warning is an error
    python tools/docs.py --check     # also opens every page in headless Chromium, see tools/browse.py

It needs ``pip install '.[docs]'``. The site works without a network and without a server, search included.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from importlib.metadata import version
from pathlib import Path

__all__ = ["build", "list_versions", "main"]

ROOT = Path(__file__).resolve().parent.parent

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>monai_gds: versions</title><meta http-equiv="refresh" content="0; url={newest}/index.html"></head>
<body><h1>monai_gds</h1><ul>{rows}</ul></body></html>
"""


def build(target: Path) -> Path:
    """Builds this checkout's version below ``target``.

    Returns:
        Its folder.
    """
    from sphinx.cmd.build import main as sphinx

    folder = target / version("monai_gds")
    # -W: warnings are errors; --keep-going: all of them are shown.
    wrong = sphinx(["-q", "-W", "--keep-going", "-d", str(ROOT / "build/doctrees"), str(ROOT / "docs"), str(folder)])
    if wrong:
        sys.exit("the site has warnings, see above")
    list_versions(target)
    return folder


def list_versions(target: Path) -> None:
    """Writes the page that lists the versions below ``target`` and opens the newest."""
    names = [path.parent.name for path in target.glob("*/index.html")]
    names.sort(key=lambda name: [(part.isdigit(), part.zfill(8)) for part in name.split(".")], reverse=True)
    rows = "".join(f'<li><a href="{escape(name)}/index.html">{escape(name)}</a></li>' for name in names)
    (target / "index.html").write_text(PAGE.format(newest=escape(names[0]), rows=rows))


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=ROOT / "build/site", help="the folder of all versions")
    parser.add_argument("--check", action="store_true", help="open every page in headless Chromium")
    options = parser.parse_args(arguments)
    folder = build(options.target)
    print(f"built {folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder}")
    if options.check:
        from browse import browse

        sys.exit(browse(folder))


if __name__ == "__main__":
    main()
