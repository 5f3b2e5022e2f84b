"""What a campaign gets: a folder, a time budget, random numbers, processes, and the tally."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fresh import Interpreter, Process
from tests.soak.tally import Tally

__all__ = ["Child", "Progress", "Soak"]


class Child:
    """A process that can be told to work, and be killed."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.pid: int = process.call(os.getpid)
        self.killed = False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal, unless the process is gone."""
        self.killed |= number == signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass
class Soak:
    """The surroundings of one campaign.

    Attributes:
        folder: an empty one for its files.
        interpreter: makes its processes.
        seconds: how long it may take. One round is made in any case.
        random: reproducible by its seed.
        tally: what it counts.
    """

    folder: Path
    interpreter: Interpreter
    seconds: float
    random: random.Random
    tally: Tally = field(default_factory=Tally)
    began: float = field(default_factory=time.monotonic)

    @property
    def quick(self) -> bool:
        """Whether there is time for a sample only."""
        return self.seconds < 10

    def more(self) -> bool:
        """Whether there is time for another round."""
        return time.monotonic() - self.began < self.seconds

    def share(self, part: float) -> float:
        """The moment, of ``time.monotonic``, at which this part of the whole budget is over."""
        return self.began + self.seconds * part

    def child(self) -> Child:
        """A new process."""
        return Child(self.interpreter.process())

    def end(self, child: Child, timeout: float = 60) -> Any:
        """Waits for what a child works on. What becomes of it is counted; None if it returned nothing."""
        try:
            answer = child.process.result(timeout)
        except TimeoutError:
            child.kill(signal.SIGCONT)
            self.tally.found("hangs", f"after {timeout} s:\n{stack_of(child.pid)}")
            child.kill()
            return None
        except AssertionError as e:
            if not (child.killed and "the process died" in str(e)):
                self.tally.found("crashes" if "the process died" in str(e) else "lost", str(e)[-1500:])
            return None
        finally:
            child.process.close()
        if isinstance(answer, Tally):
            self.tally.add(answer)
        return answer

    def call(self, work: Callable[..., Any], *args: Any, timeout: float = 60) -> Any:
        """Runs ``work(*args)`` in a process of its own; see :meth:`end`."""
        child = self.child()
        child.process.start(work, *args)
        return self.end(child, timeout)

    def in_turn(self, work: Callable[..., Any], *args: Any, end: float, timeout: float = 30) -> None:
        """Does ``work(*args, first, progress, seconds)`` in processes until it returns None, or the time is over.

        It returns the number of the job to go on with and a tally, and calls ``progress.note(number, …)`` before each
        job. A job that hangs or kills the process is counted, and the next process goes on after it.
        """
        progress, first, once = Progress(self.folder / f"progress-{self.random.random()}"), 0, True
        while once or time.monotonic() < end:
            once = False
            seconds = max(0.5, min(10.0, end - time.monotonic()))
            answer = self.call(work, *args, first, progress, seconds, timeout=seconds + timeout)
            if answer is None:
                first = progress.last() + 1
                self.tally.notes[-1:] = [
                    f"{note}\nin job {first - 1}: {progress.keep()}" for note in self.tally.notes[-1:]
                ]
                continue
            following, tally = answer
            self.tally.add(tally)
            if following is None:
                return
            first = following

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the campaign that this machine may not be able to do."""
        try:
            yield
        except pytest.skip.Exception as e:
            self.tally.skipped.append(f"{name}: {e}")


class Progress:
    """The job that a process is at, in a file, so that it outlives the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.exhibit = path.with_suffix(".exhibit")

    def note(self, number: int, what: str, exhibit: bytes = b"") -> None:
        """Notes the job that comes now, in words, and the bytes that are tried, if they are to be kept."""
        self._path.write_text(f"{number} {what}")
        if os.environ.get("SOAK_KEEP"):
            self.exhibit.write_bytes(exhibit)

    def last(self) -> int:
        """The number of the last job."""
        with contextlib.suppress(FileNotFoundError):
            return int(self._path.read_text().split()[0])
        return 0

    def keep(self) -> str:
        """The last job in words. Its exhibit, if it has one, is copied to the folder in ``SOAK_KEEP``."""
        told = self._path.read_text() if self._path.exists() else "before the first job"
        folder = os.environ.get("SOAK_KEEP")
        if folder and self.exhibit.exists():
            kept = Path(folder) / f"exhibit-{time.time_ns()}"
            shutil.copy(self.exhibit, kept)
            told += f" ({kept})"
        return told


def stack_of(pid: int) -> str:
    """What a process waits for, as the kernel shows it."""
    told = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            told.append(f"{task} {Path(f'/proc/{pid}/task/{task}/wchan').read_text()}")
    return "\n".join(told)
