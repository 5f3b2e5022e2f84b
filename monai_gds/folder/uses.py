"""When the records of a cache directory were last used, and which pipelines are in use now.

    <directory>/.index/<process>.<n>.uses    what the datasets of one process use (monai_gds.shared.notes), by lines

A line is one of

    ["open", seconds, pipeline, dataset]    from now on the dataset uses records of this pipeline
    ["read", seconds, digests, dataset]     it has read these records, 32 hex digits each, for the first time
    ["end", seconds, "", dataset]           it uses nothing any more

where ``dataset`` is a number within the process.

Records themselves are left alone: their times are part of their identity. A hit writes nothing. A record is noted when
its head is first read, and the note is written with others, about once a second. From then on the record counts as used
while its process runs. A process that cannot be seen from here, of another node or container, counts as ended a week
after its last note.

Notes are advisory. If they are missing, records count as used when they were made, and may be deleted too early, which
costs a second computation. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pwd
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from monai_gds.base.process import PerProcess
from monai_gds.shared.notes import Notes
from monai_gds.shared.temporary import ANY

#: Seconds between writes while records are read for the first time.
_SOON = 1.0

_DAY = 86400.0

_DIGITS = 32
_DIGESTS = re.compile(rf"(?:[0-9a-f]{{{_DIGITS}}})*")
_PIPELINE = re.compile(r"[0-9a-f]*")


class Used(NamedTuple):
    """What was used, and when."""

    # When records were last used, in seconds since the epoch, by digest. Others were not used since they were made.
    last: dict[str, float]
    open: frozenset[str]  # pipelines that a process uses now


@dataclass
class _Dataset:
    """What is noted of one dataset."""

    read: dict[str, float] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    ended: float = 0.0  # when it ended; 0 if that is not noted

    def add(self, kind: str, seconds: float, what: str) -> None:
        if kind == "read":
            digests = (what[i : i + _DIGITS] for i in range(0, len(what), _DIGITS))
            self.read.update(dict.fromkeys(digests, seconds))
        elif kind == "open":
            self.opened.add(what)
        else:
            self.ended = max(self.ended, seconds)


class _File(dict[int, _Dataset]):
    """What is in one file of notes, by the numbers of datasets."""

    def add(self, texts: Iterable[bytes]) -> None:
        for kind, seconds, what, number in _entries(texts):
            self.setdefault(number, _Dataset()).add(kind, seconds, what)


def _last(datasets: Iterable[_Dataset]) -> dict[str, float]:
    """When records were last used. Records that a dataset has read are in use until it ends."""
    last: dict[str, float] = {}
    for dataset in datasets:
        for digest, seconds in dataset.read.items():
            last[digest] = max(seconds, dataset.ended, last.get(digest, 0.0))
    return last


#: Numbers the datasets of this process.
_numbers = count()


class _Own:
    """What a dataset of one process has yet to write, which is written when this is dropped, or at exit."""

    def __init__(self, notes: Notes) -> None:
        self.number = next(_numbers)
        self.opened: set[str] = set()
        self.seen: set[str] | None = None  # digests that need not be noted
        self.waiting: set[str] = set()
        self.written = -math.inf  # when digests were last written
        Finalize(self, _end, (notes, self.number, self.waiting, self.opened), exitpriority=0)


class Uses:
    """Notes and finds what is used of one cache directory. Thread-safe.

    Args:
        directory: the cache directory. Nothing is created in it before something is noted.
        began: when the run began. Records that any process has noted since, such as another worker, are not noted
            again, so that times of last use are at most the length of a run too early.
        file_mode: permissions that files have at most.
    """

    def __init__(self, directory: str | os.PathLike[str], began: float = 0.0, file_mode: int = ANY) -> None:
        self._began = began
        self._notes = Notes(directory, "uses", file_mode, patience=7 * _DAY)
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
            own = self._own()
            own.opened.add(pipeline)
            self._notes.append([_text("open", pipeline, own.number)])

    def read(self, digest: str) -> None:
        """Notes that a record was read, unless that is known."""
        own = self._own()
        if own.seen is None:
            since = max(self._began, time.time() - _DAY)
            with self._lock():
                self._read()
                read = chain(*(dataset.read.items() for dataset in self._datasets()))
                own.seen = {digest for digest, at in read if at >= since}
        if digest not in own.seen:
            own.seen.add(digest)
            own.waiting.add(digest)
            if time.monotonic() >= own.written + _SOON:
                self.flush()

    def flush(self) -> None:
        """Writes what waits."""
        own = self._own()
        self._notes.append(_taken(own.waiting, own.number))
        own.written = time.monotonic()

    # Reading

    def look(self, age: float = 0.0) -> Used:
        """What was used by any process, as far as it is written. Reads only what was added since the last call.

        A result that is less than ``age`` seconds old is returned again.
        """
        with self._lock():
            if time.monotonic() < self._seen[0] + age:
                return self._seen[1]
            self._read()
            running = self._notes.running()
            there = chain(*(file.values() for name, file in self._files.items() if name in running))
            in_use = [dataset for dataset in there if dataset.opened and not dataset.ended]
            last = _last([*self._datasets(), *(replace(dataset, ended=time.time()) for dataset in in_use)])
            used = Used(last, frozenset(self._opened).union(*(dataset.opened for dataset in in_use)))
            self._seen = time.monotonic(), used
            return used

    def users(self) -> list[str]:
        """Who uses the directory now: the user and number of each running process that noted it."""
        found = set()
        running = self._notes.running()
        with contextlib.suppress(OSError), self._notes.folder() as folder:
            for name in running:
                with contextlib.suppress(OSError):
                    uid = os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid
                    found.add(f"{_login(uid)}'s process {name.split('.')[1]}")
        return sorted(found)

    def _datasets(self) -> Iterator[_Dataset]:
        return chain(*(file.values() for file in self._files.values()))

    def _read(self) -> None:
        for name, texts in self._notes.added().items():
            self._files.setdefault(name, _File()).add(texts)

    def tidy(self) -> None:
        """Merges the files of ended processes if there are many."""
        self._notes.tidy(self._merged)

    def _merged(self, files: list[list[bytes]]) -> list[bytes]:
        """When each record that still exists was last used."""
        read = [_File() for _ in files]
        for file, texts in zip(read, files, strict=True):
            file.add(texts)
        there = {name[:_DIGITS] for name in os.listdir(self._notes.directory)}
        by_time: dict[float, list[str]] = {}
        for digest, seconds in _last(chain(*(file.values() for file in read))).items():
            if digest in there:
                by_time.setdefault(seconds, []).append(digest)
        return [_text("read", "".join(digests), seconds=seconds) for seconds, digests in by_time.items()]


# ---------------------------------------------------------------------------------------------------------------------
# Texts


def _login(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # of another machine
        return f"user {uid}"


def _taken(waiting: set[str], number: int) -> list[bytes]:
    """The note of the waiting digests, if there are any. Empties the set."""
    digests = []
    with contextlib.suppress(KeyError):  # without a lock: other threads may add some meanwhile
        while True:
            digests.append(waiting.pop())
    return [_text("read", "".join(digests), number)] if digests else []


def _end(notes: Notes, number: int, waiting: set[str], opened: set[str]) -> None:
    # The collector may end a dataset at any time, also while its folder is being removed.
    notes.append([*_taken(waiting, number), *([_text("end", "", number)] if opened else [])], make=False)


def _text(kind: str, what: str, number: int = 0, seconds: float | None = None) -> bytes:
    return json.dumps([kind, round(time.time() if seconds is None else seconds, 3), what, number]).encode()


def _entries(texts: Iterable[bytes]) -> Iterator[tuple[str, float, str, int]]:
    for text in texts:
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            yield _entry(json.loads(text.decode()))


def _entry(found: Any) -> tuple[str, float, str, int]:
    """Parses an entry strictly: anyone who may write to the folder may have written it."""
    kind, seconds, what, number = found
    is_time = type(seconds) in (int, float) and math.isfinite(seconds)
    if not is_time or type(what) is not str or type(number) is not int:
        raise TypeError("not an entry of this version")
    if not {"open": _PIPELINE, "read": _DIGESTS, "end": _PIPELINE}[kind].fullmatch(what):
        raise ValueError("not an entry of this version")
    return kind, min(float(seconds), time.time()), what, number
