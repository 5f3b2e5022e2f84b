"""``python -m tools.bench`` in this process, and ``dataset`` of it with small data."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from tools.bench.__main__ import app

SMALL = ["--device", "cpu", "--items", "3", "--side", "24", "--records", "80", "--repeats", "2"]


def run(*arguments: object, code: int = 0) -> str:
    """Its output; also that of standard error, without frames and line breaks, if it is to fail."""
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else " ".join(done.output.replace("│", " ").split())


def bench_dataset(*arguments: Any) -> list[dict[str, Any]]:
    """The reports of ``dataset``."""
    found: list[dict[str, Any]] = json.loads(run("dataset", *SMALL, "--json", *arguments))["reports"]
    return found


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a report by their names."""
    return {row["name"]: row for row in report["rows"]}
