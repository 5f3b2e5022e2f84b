"""When the records of a cache directory were last used, and which pipelines are in use now.

    <directory>/.index/<process>.<n>.uses    what one dataset of one process uses (monai_gds.shared.notes), by lines

A line is one of

    ["open", seconds, pipeline]    from now on the dataset uses records of this pipeline
    ["read", seconds, digests]     it has read these records, 32 hex digits each, for the first time in its process
    ["end", seconds]               it uses nothing any more

Records themselves are left alone: their times are part of their identity. A hit writes nothing. A record is noted when
its head is first read, and the note is written within about a second, with others. From then on the record counts as
used while its process runs. A process that cannot be seen from here, of another node or container, notes once a day
that it runs, and counts as ended two days after its last note.

Notes are advisory. If they are missing, records count as used when they were made, and may be deleted too early, which
costs a second computation. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from monai_gds.base.process import PerProcess
from monai_gds.shared.notes import Notes, line, lines_in, whole_lines, writer_of
from monai_gds.shared.permissions import ANY
from monai_gds.shared.process_names import still_runs

__all__ = ["Used", "Uses"]

#: Seconds between writes while records are read for the first time, after one that failed, and while nothing is new.
_SOON, _AGAIN, _DAY = 1.0, 60.0, 86400.0

_DIGITS = 32
_DIGESTS = re.compile(rf"(?:[0-9a-f]{{{_DIGITS}}})*")
_PIPELINE = re.compile(r"[0-9a-f]*")


class Used(NamedTuple):
    """What was used, and when.

    Attributes:
        last: when records were last used, in seconds since the epoch, by their digests. Missing records were not used
            since they were made.
        open: pipelines that a process uses now. A process that cannot be seen from here counts until two days after its
            last note.
    """

    last: dict[str, float]
    open: frozenset[str]


@dataclass
class _File:
    """What is in one file of notes."""

    read: dict[str, float] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    at: float = 0.0  # time of the last line about a dataset in use, or about its end
    ended: bool = False

    def add(self, notes: bytes) -> None:
        for kind, seconds, what in _entries(notes):
            if kind == "read":
                self.read.update(dict.fromkeys(_split(what), seconds))
                continue
            self.at = max(self.at, seconds)
            if kind == "open":
                self.opened.add(what)
            else:
                self.ended = True

    def lives(self, process: str, now: float) -> bool:
        """Whether the dataset is in use, by a process of this name."""
        if self.ended or not self.opened:
            return False
        runs = still_runs(process)
        return now - self.at < 2 * _DAY if runs is None else runs

    def last(self, now: float | None) -> dict[str, float]:
        """When the records were last used. While the dataset is open, all that it has read are in use ``now``."""
        at = self.at if now is None else now
        return {digest: max(seconds, at) for digest, seconds in self.read.items()}


class _Own:
    """What one process has written, and has yet to write. The rest is written when this is dropped, or at exit."""

    def __init__(self, notes: Notes) -> None:
        self.opened: set[str] = set()
        self.seen: set[str] | None = None  # digests that need not be noted
        self.left_out: set[str] = set()  # digests of these that were read here
        self.waiting: set[str] = set()
        self.written = -math.inf  # when digests were last written
        self.noted_open = time.monotonic()  # when it was last written which pipelines are open
        Finalize(self, _end, (notes, self.waiting, self.opened), exitpriority=0)


class Uses:
    """Notes and finds what is used of one cache directory. Thread-safe.

    Args:
        directory: the cache directory. Nothing is created in it before something is noted.
        began: when the run began. What any process has noted since, such as another worker, is not noted again, so that
            times of last use are at most the length of a run too early.
        file_mode: permissions that files have at most.

    Attributes:
        due: when :meth:`flush` should be called next, by ``time.monotonic``.
    """

    def __init__(self, directory: str | os.PathLike[str], began: float = 0.0, file_mode: int = ANY) -> None:
        self.due = math.inf
        self._began = began
        self._notes = Notes(directory, "uses", whole_lines, file_mode, foreign_seconds=2 * _DAY)
        self._files: dict[str, _File] = {}
        self._opened: set[str] = set()  # also by the process that this one was forked from, which lives as long
        self._own = PerProcess(partial(_Own, self._notes))
        self._lock = PerProcess(threading.Lock)  # of what was read of the notes
        self._seen = -math.inf, Used({}, frozenset())  # what was found last, and when

    # Writing

    def open(self, pipeline: str) -> None:
        """Notes that records of a pipeline are used from now on, if possible."""
        if pipeline not in self._opened:
            self._opened.add(pipeline)
            own, wait = self._own(), _DAY
            own.opened.add(pipeline)
            if not self._notes.append(_line("open", pipeline)):  # a full drive
                own.noted_open, wait = -math.inf, _AGAIN
            self.due = min(self.due, time.monotonic() + wait)

    def read(self, digest: str) -> None:
        """Notes that a record was read, unless that is known."""
        own = self._own()
        if own.seen is None:
            own.seen = self._noted_since(max(self._began, time.time() - _DAY))
        if digest in own.seen:
            own.left_out.add(digest)
            return
        own.seen.add(digest)
        own.waiting.add(digest)
        self.due = min(self.due, own.written + _SOON)
        if time.monotonic() >= self.due:
            self.flush()

    def flush(self) -> None:
        """Writes what waits, and once a day that the pipelines and the records that were read are still in use."""
        own, now = self._own(), time.monotonic()
        still = b""
        if now - own.noted_open >= _DAY:
            own.opened |= self._opened
            self._take_over(own)
            still = b"".join(_line("open", pipeline) for pipeline in own.opened)
        written = _write(self._notes, own.waiting, still)
        if still and written:
            own.noted_open = now
        own.written, self.due = now, own.noted_open + _DAY if written else now + _AGAIN

    def _take_over(self, own: _Own) -> None:
        """Notes what was read here and noted only by processes that have ended, such as workers of an earlier epoch."""
        if not own.left_out:
            return
        last, day = self.look().last, time.time() - _DAY
        ended = {digest for digest in own.left_out.copy() if last.get(digest, 0.0) < day}
        own.left_out -= ended
        own.waiting |= ended

    # Reading

    def look(self, age: float = 0.0) -> Used:
        """What was used by any process, as far as it is written. Reads only what was added since the last call.

        A result that is less than ``age`` seconds old is returned again.
        """
        with self._lock():
            if time.monotonic() < self._seen[0] + age:
                return self._seen[1]
            self._read()
            now, last, opened = time.time(), dict[str, float](), set(self._opened)
            for name, file in self._files.items():
                lives = file.lives(writer_of(name), now)
                if lives:
                    opened |= file.opened
                for digest, seconds in file.last(now if lives else None).items():
                    last[digest] = max(seconds, last.get(digest, 0.0))
            used = Used(last, frozenset(opened))
            self._seen = time.monotonic(), used
            return used

    def _noted_since(self, seconds: float) -> set[str]:
        with self._lock():
            self._read()
            return {digest for file in self._files.values() for digest, at in file.read.items() if at >= seconds}

    def _read(self) -> None:
        for name, notes in self._notes.added().items():
            self._files.setdefault(name, _File()).add(notes)

    def tidy(self) -> None:
        """Merges the files of ended processes if there are many."""
        self._notes.tidy(self._merged)

    def _merged(self, files: list[bytes]) -> bytes:
        """When each record that still exists was last used."""
        last: dict[str, float] = {}
        for notes in files:
            file = _File()
            file.add(notes)
            for digest, seconds in file.last(None).items():
                last[digest] = max(seconds, last.get(digest, 0.0))
        there = {name[:_DIGITS] for name in os.listdir(self._notes.directory)}
        by_time: dict[float, list[str]] = {}
        for digest, seconds in last.items():
            if digest in there:
                by_time.setdefault(seconds, []).append(digest)
        return b"".join(_line("read", "".join(digests), seconds) for seconds, digests in by_time.items())


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def _write(notes: Notes, waiting: set[str], more: bytes) -> bool:
    """Writes the waiting digests, and ``more`` after them, and empties the set. Returns whether all was written."""
    digests = []
    with contextlib.suppress(KeyError):  # without a lock: other threads may add some meanwhile
        while True:
            digests.append(waiting.pop())
    lines = (_line("read", "".join(digests)) if digests else b"") + more
    return not lines or notes.append(lines)


def _end(notes: Notes, waiting: set[str], opened: set[str]) -> None:
    _write(notes, waiting, _line("end") if opened else b"")


def _line(kind: str, what: str = "", seconds: float | None = None) -> bytes:
    return line(json.dumps([kind, round(time.time() if seconds is None else seconds, 3), what]).encode())


def _entries(notes: bytes) -> Iterator[tuple[str, float, str]]:
    for text in lines_in(notes):
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            yield _entry(json.loads(text.decode()))


def _entry(found: Any) -> tuple[str, float, str]:
    """Parses an entry strictly: anyone who may write to the folder may have written it."""
    kind, seconds, what = found
    if type(seconds) not in (int, float) or not math.isfinite(seconds) or type(what) is not str:
        raise TypeError("not an entry of this version")
    if not {"open": _PIPELINE, "read": _DIGESTS, "end": _PIPELINE}[kind].fullmatch(what):
        raise ValueError("not an entry of this version")
    return kind, min(float(seconds), time.time()), what


def _split(digests: str) -> list[str]:
    return [digests[i : i + _DIGITS] for i in range(0, len(digests), _DIGITS)]
