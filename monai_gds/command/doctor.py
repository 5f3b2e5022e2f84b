"""The command ``monai-gds doctor``: arguments, the screen, JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from monai_gds.base.console import say, say_lines, stderr, stdout
from monai_gds.command.options import JsonOption, one_of
from monai_gds.doctor import Diagnosis, Finding, NoSuchDevice, Status, examine

app = typer.Typer()

_STYLES = {
    Status.OK: "green", Status.NOTE: "yellow", Status.MISSING: "yellow", Status.OPTIONAL: "bright_black",
    Status.FAILED: "bold red",
}  # fmt: skip


@app.command(epilog="Example: monai-gds doctor /nvme/cache --measure")
def doctor(
    directory: Annotated[
        Path, typer.Argument(help="Where the cache is, or will be.", show_default="the working directory")
    ] = Path(),
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N; default: a GPU if there is one.")] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Also measure the speed of the drive, with a temporary file of up to 512 MiB."),
    ] = False,
    as_json: JsonOption = False,
    build: Annotated[
        str | None,
        typer.Option(metavar="BACKEND", help="Compile a backend's operators now instead of at their first use."),
    ] = None,
) -> None:
    """Show what this machine can do, and how to improve it; exit code 1 when the default does not work."""
    if device is not None and not re.fullmatch(r"cpu|(cuda:)?\d+|cuda", device):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda:N", param_hint="--device")
    if build is not None:
        _build(build, as_json)
        return
    try:
        with stderr.status("looking around…"):
            report = examine(directory, device=device, measure=measure)
    except NotADirectoryError as e:
        raise typer.BadParameter(str(e), param_hint="DIRECTORY") from None
    except NoSuchDevice as e:
        raise typer.BadParameter(f"{e} (run it without --device to see why)", param_hint="--device") from None
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        show(report)
    raise typer.Exit(0 if report.works else 1)


def _build(backend: str, as_json: bool) -> None:
    from monai_gds.storage.deepnvme import build

    one_of(["deepnvme"], [backend], "--build")
    built = [str(path) for path in build.build_ahead(lambda line: say(line, stderr))]
    say_lines([json.dumps({"built": built}, indent=2)] if as_json else built)


def show(report: Diagnosis) -> None:
    """Prints a report: a table on a terminal; to a pipe, one line per finding and one per remedy."""
    rows = list(_merged(finding for finding in report.findings if finding.status is not Status.UNUSED))
    say(f"monai-gds doctor: {report.place.asked.absolute()}, target {report.target or 'unknown'}")
    if not stdout.is_terminal and not stdout.is_jupyter:
        for name, finding in rows:
            say(f"{name}: {finding.status}: {finding.found}")
            if finding.remedy:
                say(f"{name}: to do: {finding.remedy}")
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, finding in rows:
        remedy = f"\n[cyan]→ {escape(finding.remedy)}[/cyan]" if finding.remedy else ""
        status = f"[{_STYLES[finding.status]}]{finding.status}[/]"
        table.add_row(name.replace(", ", "\n"), status, f"{escape(finding.found)}{remedy}")
    stdout.print(table)


def _merged(findings: Iterable[Finding]) -> Iterable[tuple[str, Finding]]:
    """Findings with the same text share a row, at the place of the first. What is optional is not to be done."""
    rows: dict[tuple[Status, str, str], list[Finding]] = {}
    for finding in findings:
        if finding.status is Status.OPTIONAL and finding.remedy:
            finding = replace(finding, found=f"{finding.found}; to have it: {finding.remedy}", remedy="")
        rows.setdefault((finding.status, finding.found, finding.remedy), []).append(finding)
    for same in rows.values():
        yield ", ".join(finding.name for finding in same), same[0]
