#!/usr/bin/env python3
"""Writes the figures of the first page again: of ``h100/training.json`` and ``cpu/memory.json`` in ``benchmarks/``.

    python -m tools.bench training --volumes 48 --workers 8 --epochs 3 --json benchmarks/h100/training.json
    python -m tools.bench memory --json > benchmarks/cpu/memory.json
    python tools/figures.py

Given what a benchmark printed with --json, it draws that instead::

    python tools/figures.py epochs.json epochs.png

The picture of the first page is ``benchmarks/training.svg``; its alternative text and its caption stand in README.md,
between comments. Every row of the run is in it, also one that could not run.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from monai_gds.bench.report import Report, Row

__all__ = ["BENCHMARKS", "PICTURE", "draw", "read", "seconds", "words", "write"]

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
TRAINING = BENCHMARKS / "h100/training.json"
MEMORY = BENCHMARKS / "cpu/memory.json"
PICTURE = BENCHMARKS / "training.svg"

#: The column of a training's table that is drawn.
EPOCH = "epoch, s"

#: What stands in README.md between these two.
BETWEEN = r"(?<=<!-- {0} -->\n).*?(?=<!-- end of {0} -->)"


def read(path: Path) -> tuple[dict[str, Any], list[Report]]:
    """The circumstances of a run, and its tables, of a file that a benchmark wrote with ``--json``."""
    found = json.loads(path.read_text())
    reports, workers = [], found["about"].get("workers", "n")
    for report in found["reports"]:
        rows, ceilings = ([_row(row, workers) for row in report[which]] for which in ("rows", "ceilings"))
        reports.append(Report(report["title"], report["unit"], rows, report["reference"], ceilings))
    return found["about"], reports


def _row(row: dict[str, Any], workers: int | str) -> Row:
    figures = {heading: tuple(found["samples"]) for heading, found in row.get("figures", {}).items()}
    name = row["name"].replace("n workers", f"{workers} workers")
    return Row(name, tuple(row["samples"]), row["reason"], row["notes"], figures)


def draw(reports: Sequence[Report], caption: str = "") -> Any:
    """Draws one panel per report: bars at the medians, whiskers over the range, ceilings as dashed lines.

    Returns a ``matplotlib.figure.Figure``, which a notebook displays. Raises ImportError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("a plot needs matplotlib: pip install 'monai_gds[bench]'") from e
    tallest = max((len(report.rows) + len(report.ceilings) for report in reports), default=0)
    columns = max(1, math.ceil(math.sqrt(len(reports))))
    lines = max(1, math.ceil(len(reports) / columns))
    figure = Figure(figsize=(5.5 * columns, (1.6 + 0.35 * tallest) * lines), layout="constrained")
    for index, report in enumerate(reports):
        _draw(report, figure.add_subplot(lines, columns, index + 1))
    if caption:
        figure.supxlabel(caption, fontsize=8)
    return figure


def _draw(report: Report, axes: Any) -> None:
    samples = [row.samples or (0.0,) for row in report.rows]
    medians = [statistics.median(figures) for figures in samples]
    below = [median - min(figures) for median, figures in zip(medians, samples, strict=True)]
    above = [max(figures) - median for median, figures in zip(medians, samples, strict=True)]
    axes.barh([row.name for row in report.rows], medians, xerr=[below, above], capsize=3)
    for place, row in enumerate(report.rows):
        if not row.samples:  # a bar of length zero would look like a figure
            axes.text(0, place, " not here", va="center", fontsize=8)
    axes.invert_yaxis()
    for number, row in enumerate(report.ceilings):
        if row.median is not None:
            label = f"{row.name}: {report.cells(row)[1]}"
            axes.axvline(row.median, color=f"C{number + 1}", linestyle="--", linewidth=1, label=label)
    if any(row.samples for row in report.ceilings):
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=5)  # below the unit
    axes.set_title(textwrap.fill(report.title, 36), fontsize=9)
    axes.set_xlabel(report.unit)
    axes.tick_params(labelsize=8)


def seconds(path: Path = TRAINING) -> tuple[dict[str, Any], Report]:
    """A run of ``bench training``, as seconds per epoch.

    Returns:
        Its circumstances, and a report with every row of the run. The note ``ratio`` of a row is its median divided by
        the ceiling's, where it has figures.
    """
    about, (report,) = read(path)

    def in_seconds(row: Row) -> Row:
        notes = {} if row.median is None else {"ratio": f"{row.median:.2f}"}
        return replace(row, samples=row.figures.get(EPOCH, ()), notes=notes, figures={})

    rows, ceilings = ([in_seconds(row) for row in some] for some in (report.rows, report.ceilings))
    return about, replace(report, unit="seconds per epoch", rows=rows, ceilings=ceilings)


def picture(about: dict[str, Any], report: Report) -> Any:
    """The chart: a bar a row with its range, the median and, in brackets, how often the ceiling's; ours in colour."""
    figure = draw([replace(report, title="")])
    (axes,) = figure.axes
    figure.set_size_inches(4.8, 0.9 + 0.25 * len(report.rows))
    for place, (row, bar) in enumerate(zip(report.rows, axes.patches, strict=True)):
        bar.set_color("C0" if row.name.startswith("GDS") else "0.75")
        if row.samples:
            text = f"{_median(row)} ({row.notes['ratio']})"
            axes.annotate(text, (max(row.samples), place), (4, 0), textcoords="offset points", va="center", fontsize=7)
    names = [textwrap.fill(row.name, 30) for row in report.rows]
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlim(right=1.35 * max(max(row.samples, default=0) for row in report.rows))
    axes.set_xlabel(f"{report.unit}, median and range (÷ ceiling)\n{about['gpu']}, {about['date'][:10]}", fontsize=7)
    axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def words(about: dict[str, Any], report: Report) -> dict[str, str]:
    """Markdown, by where it stands in README.md: the picture with its figures as text, and where they are from."""
    (ceiling,) = report.ceilings
    told = [
        f"{row.name} {_median(row)} s ({row.notes['ratio']})" if row.samples else f"{row.name} not here: {row.reason}"
        for row in report.rows
    ]
    told.append(f"{ceiling.name} {_median(ceiling)} s")
    caption = (
        f"The figure: an epoch of MONAI's UNet on one {about['gpu']} ({about['date'][:10]}; {report.title}), median "
        f"and range of {len(ceiling.samples)} epochs in turns. The line is the same training fed with one batch again "
        "and again. Bars in colour are this package's."
    )
    return {
        "figure": f"![Seconds per epoch, and divided by the ceiling: {'; '.join(told)}](benchmarks/{PICTURE.name})\n",
        "caption": f"{textwrap.fill(caption, 120)}\n",
    }


def memory(path: Path = MEMORY) -> str:
    """The run of ``tools.bench memory`` as a table in Markdown, with a caption."""
    about, (report,) = read(path)
    epochs = max(len(row.samples) for row in report.rows)
    lines = [f"| {report.title} | MB read in {epochs} epochs | MB on the drive |", "| --- | --: | --: |"]
    for row in report.rows:
        killed = ["killed" if row.reason.startswith("killed") else row.reason, ""]
        figures = [row.notes["MB in all"], row.notes["MB on the drive"]] if row.samples else killed
        lines.append(f"| {' | '.join([row.name, *figures])} |")
    caption = f"{about['cores']} cores, {about['date'][:10]}: `python -m tools.bench memory`, see"
    return "\n".join([*lines, "", f"{caption} [what a cache costs](docs/benchmarks/cost.md).", ""])


def _median(row: Row) -> str:
    return f"{statistics.median(row.samples):.2f}"


def write(readme: Path = ROOT / "README.md", target: Path = PICTURE) -> None:
    """Writes the picture, and its words into README.md."""
    import matplotlib

    about, report = seconds()
    # Text stays text, which a test reads; without a date and with fixed ids, equal figures give equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "monai_gds", "font.family": "sans-serif"}):
        picture(about, report).savefig(target, metadata={"Date": None})
    text = readme.read_text()
    for place, told in {**words(about, report), "memory": memory()}.items():
        text = re.sub(BETWEEN.format(place), told.replace("\\", r"\\"), text, flags=re.DOTALL)
    readme.write_text(text)


def main(arguments: Sequence[str]) -> None:
    """Writes the figures of the first page, or draws a file into another one."""
    if not arguments:
        write()
        return
    source, picture = map(Path, arguments)
    about, reports = read(source)
    draw(reports, caption=about["date"]).savefig(picture, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1:])
