"""Runs the command ``monai-gds`` in this process, as behind a pipe."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from monai_gds.command.main import main
from tests.machines import ROOT

__all__ = ["Done", "on_a_terminal", "run"]


@dataclass(frozen=True)
class Done:
    """The exit code and the output of a command."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Both streams, without the frames and line breaks of usage errors."""
        return " ".join((self.stdout + self.stderr).replace("│", " ").split())


def run(*arguments: object) -> Done:
    """Runs ``monai-gds ARGUMENTS…``. Exceptions that :func:`main` does not handle are raised."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["monai-gds", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
    return Done(code, out.getvalue(), err.getvalue())


def on_a_terminal(command: list[str], columns: int = 100) -> str:
    """The output of a program on a terminal with colours. It must succeed."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "PYTHONPATH": str(ROOT)}
    environment.pop("NO_COLOR", None)
    child = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    printed = b""
    while True:
        try:
            block = os.read(ours, 1 << 16)
        except OSError:  # EIO: the terminal was closed
            break
        printed += block
    os.close(ours)
    assert child.wait(60) == 0
    return printed.decode()
