"""What the commands share: where they print, their progress bars, and the options that several of them take.

Importing this imports neither torch nor MONAI, and a command's module must not either before the command runs: the
shell's completion and ``--help`` wait for the imports.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segments
from rich.table import Table

__all__ = [
    "BackendOption",
    "DeviceOption",
    "JsonOption",
    "PlotOption",
    "console",
    "errors",
    "in_words",
    "known_device",
    "printable",
    "progress",
    "progress_bar",
    "say",
    "say_lines",
    "show",
]

_WIDE = 100_000

#: Control characters but for tabs and line ends, characters that turn or break lines, halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

#: Standard output, for results.
console = Console()

#: Standard error, for everything else.
errors = Console(stderr=True)


def printable(text: str) -> str:
    r"""A text in which control characters, which could command the terminal, are written out as ``\x1b``.

    Tabs and line ends stay. Halves of surrogate pairs are written out too, since they cannot be encoded: names of files
    that are not UTF-8 have them.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(line: str, to: Console = console) -> None:
    """Prints a line as it is: no markup, no colours, and not broken where the terminal ends."""
    to.print(printable(line), highlight=False, soft_wrap=True, markup=False)


def say_lines(lines: Iterable[str]) -> None:
    """Prints lines on standard output as :func:`say` does, all at once: rich takes 0.3 ms for each."""
    text = "".join(f"{printable(line)}\n" for line in lines)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()  # behind `| head` this fails here, where Typer ends quietly


def in_words(error: BaseException) -> str:
    """An error as a sentence: of the system's errors the file and what is wrong with it, without their number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    files = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([*([" to ".join(files)] if files else []), error.strerror])


def show(table: Table, to: Console = console) -> None:
    """Prints a table. Where there is no terminal whose width it must fit, nothing in it is cut or broken."""
    if to.is_terminal or to.is_jupyter:
        to.print(table)
        return
    to.print(Segments(to.render(table, to.options.update(width=_WIDE))), soft_wrap=True)


def progress(to: Console = errors) -> Progress:
    """A display of bars that shows itself on a terminal or in a notebook, and nowhere else."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=to, transient=True, disable=not (to.is_terminal or to.is_jupyter))


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """One bar of :func:`progress`; gives the function to call with what is done, and with the total if that changes."""
    with progress() as bars:
        task = bars.add_task(what, total=total)

        def update(done: int, total: int | None = None) -> None:
            bars.update(task, completed=done, total=total)

        yield update


def known_device(name: str | None) -> str | None:
    """Refuses a device that this machine does not have."""
    if name is not None:
        from monai_gds.storage import resolve_device

        try:
            resolve_device(int(name) if name.isdecimal() else name)
        except ValueError as e:
            raise typer.BadParameter(str(e)) from None
    return name


def _known_backend(name: str) -> str:
    """Refuses a backend that does not exist; one that does not work here is found out when it is opened."""
    if name != "auto":
        from monai_gds.storage.registry import backend_names

        if name not in backend_names():
            raise typer.BadParameter(f"{name!r} is not one of auto, {', '.join(backend_names())}")
    return name


def _plot(path: Path | None) -> Path | None:
    """Says now, and not after minutes of measuring, that this plot cannot be drawn or saved."""
    if path is None:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("a plot needs matplotlib: pip install 'monai_gds[bench]'")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is not a folder")
    if not os.access(path.parent, os.W_OK):
        raise typer.BadParameter(f"cannot write to {path.parent}")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in ("", *formats):
        raise typer.BadParameter(f"{path.name} must end in one of {', '.join(formats)}")
    return path


DeviceOption = Annotated[
    str | None, typer.Option(help="cpu or cuda:N; default: a GPU if there is one.", callback=known_device)
]
BackendOption = Annotated[
    str, typer.Option(help="The storage backend: auto, or one that `monai-gds doctor` lists.", callback=_known_backend)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PlotOption = Annotated[Path | None, typer.Option(help="Draw a bar chart into this file.", callback=_plot)]
