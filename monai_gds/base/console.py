"""Printing for people: tables, lines, progress bars and errors in words. Used by commands and benchmarks.

Whatever is printed through :data:`stdout` or :data:`stderr`, lines as well as tables, cannot drive the terminal.
"""

from __future__ import annotations

import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from monai_gds.base.process import print_past_bars
from monai_gds.errors import printable

#: Width of a table that goes to a pipe: wide enough that no cell is cut or wrapped.
_UNLIMITED = 100_000


class _Screen(Console):
    """A console that shows control characters instead of obeying them: in lines, in tables, in their titles."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)


#: For results.
stdout = _Screen()

#: For everything else.
stderr = _Screen(stderr=True)

os.register_at_fork(after_in_child=print_past_bars)  # of executors of the user's, too


def say(line: str, to: Console = stdout) -> None:
    """Prints a line verbatim, without markup and highlighting; a terminal gets it broken between words."""
    if to.is_terminal:
        line = "\n".join(broken(part, to) for part in line.split("\n"))
    to.print(line, highlight=False, soft_wrap=True, markup=False)


def broken(line: str, to: Console = stdout, indent: str = "") -> str:
    """A line in as many as its words need on this terminal. A long word, such as a path, stays whole."""
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(line, max(to.width, 20), initial_indent=indent, subsequent_indent=indent, **how)


def say_lines(lines: Iterable[str]) -> None:
    """Prints many lines to standard output in one write: rich takes 0.3 ms per line."""
    text = "".join(f"{printable(line)}\n" for line in lines)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()  # before `| head` this raises here, where Typer exits quietly


def sentence(error: BaseException) -> str:
    """An error as a sentence. An OSError becomes ``file: reason``, without its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    files = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([*([" to ".join(files)] if files else []), error.strerror])


def say_traceback(error: BaseException, hidden: tuple[str, ...]) -> None:
    """Prints an error to standard error as Python does, without the frames of files whose names begin so."""
    shown = traceback.TracebackException.from_exception(error)
    one: traceback.TracebackException | None = shown
    while one is not None:
        one.stack = traceback.StackSummary.from_list(
            [frame for frame in one.stack if not frame.filename.startswith(hidden)]
        )
        one = one.__cause__ or one.__context__
    stderr.print("".join(shown.format()), highlight=False, soft_wrap=True, markup=False, end="")


def show(table: Table) -> None:
    """Prints a table: fitted to a terminal or notebook, at full width everywhere else."""
    if stdout.is_terminal or stdout.is_jupyter:
        stdout.print(table)
    else:
        stdout.print(Segments(stdout.render(table, stdout.options.update(width=_UNLIMITED))), soft_wrap=True)


def progress(to: Console = stderr) -> Progress:
    """Progress bars, shown on a terminal or in a notebook only."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=to, transient=True, disable=not (to.is_terminal or to.is_jupyter))


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Shows a progress bar named ``what``. Yields ``update(done, total=None)``."""
    with progress() as bars:
        task = bars.add_task(what, total=total)
        yield lambda done, total=None: bars.update(task, completed=done, total=total)
