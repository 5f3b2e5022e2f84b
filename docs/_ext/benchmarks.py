"""The directive ``benchmark``: a plot and tables of a file of ``benchmarks/``, as a benchmark printed it with --json.

    ```{benchmark} h100/volumes.json
    :plot: bars of GB/s; GDSDataLoader's is the longest
    ```

``plot`` draws it, and is the picture's alternative text. The tables, folded, come with the machine, the date and the
command. The role ``median`` is one figure of the first table: {median}`h100/volumes.json PersistentDataset`.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.parsers.rst.states import Inliner
from figures import BENCHMARKS, draw, read
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from monai_gds.bench.report import Report


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
        title = about.get("gpu") or f"{about['cores']} cores"
        summary = f"The figures: {about['date'][:10]}, {title}"
        found: list[nodes.Node] = [self._picture(path, reports)] if "plot" in self.options else []
        found.append(nodes.raw("", f"<details><summary>{escape(summary)}</summary>", format="html"))
        found += [node for report in reports for node in self._tables(report)]
        return [*found, _origin(about, self.arguments[0]), nodes.raw("", "</details>", format="html")]

    def _tables(self, report: Report) -> list[nodes.Node]:
        rows = [report.cells(row) for row in (*report.rows, *report.ceilings)]
        missing = [f"{row.name}: {row.reason}" for row in (*report.rows, *report.ceilings) if row.reason]
        reasons = [nodes.paragraph("", line, classes=["reason"]) for line in missing]
        return [nodes.rubric(report.title, report.title), _table(report.titles(), rows), *reasons]

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


def median(
    name: str, rawtext: str, text: str, lineno: int, inliner: Inliner, options: Any = None, content: Any = None
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """The median of a row: ``file.json row``."""
    file, _, wanted = text.partition(" ")
    inliner.document.settings.env.note_dependency(str(BENCHMARKS / file))
    try:
        _, (report, *_) = read(BENCHMARKS / file)
        (row,) = [row for row in (*report.rows, *report.ceilings) if row.name == wanted]
    except (OSError, ValueError) as e:
        problem = inliner.reporter.error(f"{text}: {e}", line=lineno)
        return [inliner.problematic(rawtext, rawtext, problem)], [problem]
    return [nodes.Text(report.cells(row)[1])], []


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("benchmark", Benchmark)
    app.add_role("median", median)
    return {"parallel_read_safe": True}
