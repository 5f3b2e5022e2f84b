"""``monai-gds bench dataset`` with small data."""

from __future__ import annotations

import json
from typing import Any

from tests.commands import run

SMALL = ["--device", "cpu", "--items", "3", "--side", "24", "--records", "300", "--repeats", "2"]


def bench_dataset(*arguments: Any) -> list[dict[str, Any]]:
    """Its reports."""
    done = run("bench", "dataset", *SMALL, "--json", *arguments)
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["reports"]
    return found


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a report by their names."""
    return {row["name"]: row for row in report["rows"]}
