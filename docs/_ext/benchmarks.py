"""The directive ``benchmark``: tables and a plot of a file of ``benchmarks/``, as a benchmark printed it with --json.

    ```{benchmark} h100/volumes.json
    :plot: bars of GB/s; GDSDataLoader's is the longest
    ```

``plot`` draws it, and is the picture's alternative text. Below come the machine, the date and the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from figures import BENCHMARKS, read
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from monai_gds.bench.report import Report, draw


class Benchmark(SphinxDirective):
    """One file: its tables, one plot of all of them, and where the figures are from."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar = {"plot": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        path = BENCHMARKS / self.arguments[0]
        self.env.note_dependency(str(path))
        try:
            about, reports = read(path)
        except (OSError, ValueError, KeyError) as e:
            raise self.error(f"{path} does not hold the output of a benchmark: {e!r}") from e
        found: list[nodes.Node] = [table for report in reports for table in self._tables(report)]
        if "plot" in self.options:
            found.append(self._picture(path, reports))
        found.append(_origin(about, self.arguments[0]))
        return found

    def _tables(self, report: Report) -> list[nodes.Node]:
        rows = [report.cells(row) for row in (*report.rows, *report.ceilings)]
        return [nodes.rubric(report.title, report.title), _table(report.titles(), rows)]

    def _picture(self, path: Path, reports: list[Report]) -> nodes.Node:
        folder = Path(self.env.srcdir) / "generated" / "plots"
        folder.mkdir(parents=True, exist_ok=True)
        name = "-".join(path.relative_to(BENCHMARKS).with_suffix("").parts)
        draw(reports).savefig(folder / f"{name}.svg")
        return nodes.image(uri=f"/generated/plots/{name}.svg", alt=self.options["plot"])


def _table(titles: list[str], rows: list[list[str]]) -> nodes.Node:
    table = nodes.table(classes=["benchmark"])
    group = nodes.tgroup(cols=len(titles))
    table += group
    group += [nodes.colspec(colwidth=4 if not i else 1) for i in range(len(titles))]
    group += nodes.thead("", _line(titles))
    group += nodes.tbody("", *(_line(row) for row in rows))
    return table


def _line(cells: list[str]) -> nodes.row:
    row = nodes.row()
    for column, cell in enumerate(cells):
        row += nodes.entry("", nodes.paragraph("", cell), classes=["figure"] if column else [])
    return row


def _origin(about: dict[str, Any], name: str) -> nodes.Node:
    command = about.get("command", "")
    told = ", ".join(f"{key} {value}" for key, value in about.items() if key not in ("command", "date"))
    line = nodes.paragraph("", f"{about['date']}: {told}. ")
    line += nodes.literal("", command)
    line += nodes.Text(f" (benchmarks/{name})")
    return line


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("benchmark", Benchmark)
    return {"parallel_read_safe": True}
