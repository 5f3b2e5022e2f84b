"""Runs probes in another process: one that hangs, crashes or exits becomes an :class:`Answer` with an error.

Libraries may print, chdir and leave files behind: each process has a temporary folder as its working directory and
writes its standard output and error there.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monai_gds.errors import MonaiGdsError

#: Seconds that a process may take. An import from a slow network drive takes tens of them.
LIMIT = 120.0

_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from monai_gds.doctor.isolation import answer_all
answer_all()"""

#: A probe takes no arguments and returns JSON types. It is pickled: a module-level function, or a partial of one.
Probe = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Answer:
    """The values that a probe returned, or the error that it ended with."""

    values: Mapping[str, Any]
    error: str = ""

    def __bool__(self) -> bool:
        return not self.error


def ask(
    probes: Mapping[str, Probe], environment: Mapping[str, str] | None = None, *, limit: float = LIMIT
) -> dict[str, Answer]:
    """Runs probes one after the other in one process. If one ends it or hangs, another process runs those after it.

    Args:
        probes: what to run, by name.
        environment: additional environment variables.
        limit: a process is killed after this many seconds.

    Returns:
        The values that each returned. If it failed, the error is its exception, or how its process ended and the last
        lines that it printed.
    """
    answers: dict[str, Answer] = {}
    while left := {name: probe for name, probe in probes.items() if name not in answers}:
        found, how = _run(left, {**os.environ, **(environment or {})}, limit)
        answers |= found
        for name in [name for name in left if name not in found][:1]:
            answers[name] = Answer({}, how)
    return answers


def _run(probes: Mapping[str, Probe], environment: Mapping[str, str], limit: float) -> tuple[dict[str, Answer], str]:
    """The answers until the process ended, and how it ended."""
    with tempfile.TemporaryDirectory(prefix="monai-gds-doctor-", ignore_cleanup_errors=True) as made:
        folder, path = Path(made), json.dumps([os.path.abspath(entry) for entry in sys.path])
        (folder / "probes").write_bytes(pickle.dumps([(name, pickle.dumps(probe)) for name, probe in probes.items()]))
        with open(folder / "printed", "wb") as printed:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, path], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=printed, stderr=printed, start_new_session=True,  # Ctrl-C does not reach it
            )  # fmt: skip
        try:
            code = process.wait(limit)
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            how = f"it ended its process ({ended})"
        except subprocess.TimeoutExpired:
            how = f"it gave no answer within {limit:g} seconds"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also the processes that probes started
            process.wait()
        lines = [line for line in (folder / "printed").read_text(errors="replace").splitlines() if line.strip()]
        answers = (folder / "answers").read_text().splitlines() if (folder / "answers").exists() else []
    found = {name: Answer(values, error) for name, values, error in map(json.loads, answers)}
    return found, ": ".join([how, *([" / ".join(lines[-3:])] if lines else [])])


def answer_all() -> None:
    """What the process does: runs the probes in its working directory, and writes the answers there."""
    with open("answers", "w") as answers:
        for name, pickled in pickle.loads(Path("probes").read_bytes()):
            try:
                answer = Answer(pickle.loads(pickled)())
            except Exception as e:
                is_sentence = isinstance(e, (MonaiGdsError, OSError))
                answer = Answer({}, str(e) if is_sentence else f"{type(e).__name__}: {e}")
            print(json.dumps([name, answer.values, answer.error]), file=answers, flush=True)
    os._exit(0)  # what libraries do at exit does not matter
