"""Starts the process that asks the libraries, and starts it anew behind a step that hung or ended it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

__all__ = ["Answer", "Request", "ask"]

#: Seconds that one step may take: an import from a slow network drive takes tens of them.
LIMIT = 120

_LAST_LINES = 3


@dataclass(frozen=True)
class Request:
    """What to ask, and where the answers go.

    Args:
        directory: the folder that the user asked about, or what there is of it; an absolute path.
        folder: an empty folder on the same drive, for files that are written and read; None: it takes none.
        device: the target, as a user writes it; None for the default.
        only: these steps; empty for all of them but ``cufile`` and ``speed``.
        done: steps to leave out.
        descriptor: for the answers.
    """

    directory: str
    folder: str | None = None
    device: str | None = None
    only: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    descriptor: int = -1


@dataclass(frozen=True)
class Answer:
    """What a step said: its ``values``, or else the ``error`` that it ended with."""

    values: Mapping[str, Any]
    error: str = ""

    def __bool__(self) -> bool:
        return not self.error


def ask(
    request: Request,
    environment: Mapping[str, str] | None = None,
    *,
    module: str = "monai_gds.doctor.probes",
    limit: float = LIMIT,
) -> dict[str, Answer]:
    """Goes through the steps of a request, whatever single ones do.

    Args:
        request: its descriptor and what is done are filled in here.
        environment: further environment variables.
        module: what is run; tests have others.
        limit: seconds a step.

    Returns:
        Answers by step. When the process cannot even begin, that is the answer of ``start``.
    """
    answers: dict[str, Answer] = {}
    while True:
        failed = _ask_once(replace(request, done=tuple(answers)), answers, environment or {}, module, limit)
        if failed is None:
            return answers
        step, error = failed
        answers[step] = Answer({}, error)
        if step in ("start", "torch"):  # everything else stands on them
            return answers


def _ask_once(
    request: Request, answers: dict[str, Answer], environment: Mapping[str, str], module: str, limit: float
) -> tuple[str, str] | None:
    """Starts one process and takes its answers; returns the step that ended it, and how, if one did."""
    with tempfile.TemporaryFile() as printed, _child(request, environment, module, printed) as (child, lines):
        step = "start"
        for line in _until(lines, limit):
            if line is None:
                return step, f"it gave no answer within {limit:g} seconds{_last_words(printed)}"
            message = json.loads(line)
            if "end" in message:
                return None
            if "begin" in message:
                step = message["begin"]
            else:
                answers[step] = Answer(message.get("answer", {}), message.get("error", ""))
                step = "start"
        return step, f"it ended its process ({_how_it_ended(child)}){_last_words(printed)}"


@contextlib.contextmanager
def _child(
    request: Request, environment: Mapping[str, str], module: str, printed: IO[bytes]
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process, and the descriptor that its answers come from. It does not outlive the block."""
    lines, theirs = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lines)
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="monai-gds-doctor-"))  # for what they drop
            path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
            child = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(asdict(replace(request, descriptor=theirs)))],
                cwd=folder, env={**os.environ, "PYTHONPATH": path, **environment}, pass_fds=[theirs],
                stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(theirs)
        stack.callback(_end, child)
        yield child, lines


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _until(descriptor: int, limit: float) -> Iterator[bytes | None]:
    """Lines as they come; None when the next one takes longer than ``limit`` seconds. Ends with the writer."""
    rest = b""
    deadline = time.monotonic() + limit
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            yield None
            return
        block = os.read(descriptor, 1 << 16)
        if not block:
            return
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            deadline = time.monotonic() + limit
        yield from lines


def _how_it_ended(child: subprocess.Popen[bytes]) -> str:
    try:
        code = child.wait(10)
    except subprocess.TimeoutExpired:
        return "it closed its answers and went on"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _last_words(printed: IO[bytes]) -> str:
    printed.seek(0)
    lines = [line for line in printed.read().decode(errors="replace").splitlines() if line.strip()]
    return f": {' / '.join(lines[-_LAST_LINES:])}" if lines else ""
