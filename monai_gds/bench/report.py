"""The output of every benchmark: a table of rates with median and range, or the same as JSON.

A benchmark makes one :class:`Report` per question ("load to the GPU") with one :class:`Row` per competitor, and passes
the list to :func:`emit`. A competitor that cannot run here keeps its row, with the reason.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from monai_gds.base import cores
from monai_gds.base.console import say, show, stdout
from monai_gds.errors import BackendUnavailable

#: Medians that are closer than this share of one another are no difference.
_NEAR = 0.15


@dataclass(frozen=True)
class Row:
    """One competitor's figures, or the reason why it has none."""

    name: str
    samples: tuple[float, ...] = ()  # one figure per repetition, in the report's unit; empty if it could not run
    reason: str = ""  # why it could not run, with the remedy
    notes: Mapping[str, str] = field(default_factory=dict)  # further columns, as text by heading
    figures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # and as samples, by heading with the unit

    @property
    def median(self) -> float | None:
        """The median of the samples; None without any."""
        return statistics.median(self.samples) if self.samples else None


@dataclass(frozen=True)
class Report:
    """One table."""

    title: str  # the question it answers
    unit: str  # of every sample, GB/s for instance; of a rate, more is better
    rows: Sequence[Row]  # the competitors, in the order of the table
    reference: str | None = None  # the name of the row that the others are compared with
    ceilings: Sequence[Row] = ()  # what the machine allows: at the end of the table, lines in a chart

    def ratio(self, row: Row) -> float | None:
        """The row's median divided by the reference's; None if either did not run."""
        base = next((r.median for r in self.rows if r.name == self.reference), None)
        return row.median / base if row.median is not None and base else None

    def as_dict(self) -> dict[str, Any]:
        """Everything in the table, as JSON types."""
        return {
            "title": self.title,
            "unit": self.unit,
            "reference": self.reference,
            "rows": [self._row_as_dict(row) for row in self.rows],
            "ceilings": [self._row_as_dict(row) for row in self.ceilings],
        }

    def _row_as_dict(self, row: Row) -> dict[str, Any]:
        return {
            "name": row.name,
            **_summary(row.samples),
            "ratio": self.ratio(row),
            "reason": row.reason,
            "notes": dict(row.notes),
            "figures": {heading: _summary(samples) for heading, samples in row.figures.items()},
        }

    def table(self) -> Table:
        """The figures as a table."""
        table = Table(title=escape(self.title), title_justify="left")
        if self.reference is not None:
            table.caption = escape(f"ratio: to {' and '.join(self.reference.splitlines())}")
        figures = len(self.titles()) - len(self._headings())
        for column, title in enumerate(self.titles()):
            table.add_column(title, no_wrap=not column, justify="right" if 0 < column < figures else "left")
        for row in self.rows:
            table.add_row(*map(escape, self.cells(row)))
        table.add_section()
        for row in self.ceilings:
            table.add_row(*map(escape, self.cells(row)), style="dim")
        return table

    def titles(self) -> list[str]:
        """The titles of the table's columns; the first is empty."""
        figures = [f"median {self.unit}", "range", *(["ratio"] if self.reference is not None else [])]
        return ["", *figures, *self._headings()]

    def _headings(self) -> list[str]:
        rows = (*self.rows, *self.ceilings)
        return list(dict.fromkeys(heading for row in rows for heading in (*row.figures, *row.notes)))

    def cells(self, row: Row) -> list[str]:
        """A row of the table, one text per column of :meth:`titles`."""
        figures = ["", ""]
        if row.median is not None:
            figures = [_figure(row.median), _spread(row.samples)]
        if self.reference is not None:
            ratio = self.ratio(row)
            figures.append("" if ratio is None else f"{ratio:.2f}")
        others = {
            heading: f"{_figure(statistics.median(s))} ({_spread(s)})" if len(s) > 1 else _figure(*s)
            for heading, s in row.figures.items()
        } | dict(row.notes)
        return [row.name, *figures, *(others.get(heading, "") for heading in self._headings())]


def differ(first: Row, second: Row) -> bool:
    """Whether one of two rows was ahead in every turn, of many in four of five, and its median by more than noise."""
    assert first.median is not None and second.median is not None
    turns = [mine > other for mine, other in zip(first.samples, second.samples, strict=True)]
    far = abs(first.median - second.median) > _NEAR * max(first.median, second.median)
    return far and min(sum(turns), len(turns) - sum(turns)) <= len(turns) // 5 * (len(turns) > 7)


def _summary(samples: Sequence[float]) -> dict[str, Any]:
    median = statistics.median(samples) if samples else None
    lowest, highest = min(samples, default=None), max(samples, default=None)
    return {"median": median, "lowest": lowest, "highest": highest, "samples": list(samples)}


def _spread(samples: Sequence[float]) -> str:
    return f"{_figure(min(samples))} to {_figure(max(samples))}"


def _figure(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """The circumstances of figures: the date (UTC), the command (not in a notebook), the machine and the versions."""
    in_notebook = Path(sys.argv[0]).name == "ipykernel_launcher.py"
    module = sys.modules["__main__"].__spec__
    program = f"python -m {module.parent}" if module else "monai-gds"
    on_gpu = device is not None and device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **({} if in_notebook else {"command": " ".join([program, *sys.argv[1:]])}),
        "cores": cores.usable(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **({"gpu": torch.cuda.get_device_name(device)} if on_gpu else {}),
    }


def emit(reports: Sequence[Report], *, as_json: bool | Path, about: Mapping[str, Any]) -> None:
    """Prints the reports to standard output.

    Args:
        reports: the tables.
        as_json: print one JSON object, ``{"about": …, "reports": […]}``, instead of tables; into a file, beside them.
        about: :func:`machine` and the benchmark's own settings.

    Raises:
        BackendUnavailable: no row has a figure; the reasons were printed.
    """
    found = json.dumps({"about": dict(about), "reports": [r.as_dict() for r in reports]}, indent=2)
    if isinstance(as_json, Path):
        as_json.write_text(f"{found}\n")
    if as_json is True:
        print(found)
    else:
        for report in reports:
            show(report.table())
        rows = [row for report in reports for row in (*report.rows, *report.ceilings)]
        for reason in dict.fromkeys(f"{row.name}: {row.reason}" for row in rows if row.reason):
            say(reason)
        settings = ", ".join(f"{key}: {value}" for key, value in about.items())
        stdout.print(settings, style="dim", markup=False, soft_wrap=True)
    if not any(row.samples for report in reports for row in report.rows):
        raise BackendUnavailable("nothing could be measured here; see the reasons above")
