"""Which files items have read besides those that they name.

    <directory>/.index/<process>.<n>.reads    lists that one process noted (monai_gds.shared.notes), by lines

A line is the name of an item, 32 hex digits, and a JSON list of paths as in keys; below a data root they are relative
to it. An item has several lists if what it reads depends on what it finds.

Notes are advisory: an item whose list is lost has another digest without it, and is computed again. Imports only the
standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Sequence
from itertools import chain

from monai_gds import limits
from monai_gds.base.names import above, below
from monai_gds.base.process import PerProcess
from monai_gds.shared.notes import Notes
from monai_gds.shared.temporary import ANY

_LINE = re.compile(rb"([0-9a-f]{32}) (\[.+\])", re.DOTALL)

_ROOT = "<root>"


class ReadLists:
    """Notes and finds the lists of one cache directory. Thread-safe. Nothing is read before the first query.

    Args:
        directory: the cache directory. Nothing is created in it before something is noted.
        root: the data root, or None.
        file_mode: permissions that files have at most.
    """

    def __init__(self, directory: str | os.PathLike[str], root: str | None = None, file_mode: int = ANY) -> None:
        self._notes = Notes(directory, "reads", file_mode)
        self._root = root
        self._lists: dict[str, tuple[bytes, ...]] | None = None  # by name, the newest first
        self._parsed: dict[bytes, tuple[str, ...]] = {}  # most items have the same
        self._lock = PerProcess(threading.Lock)

    def __bool__(self) -> bool:
        """Whether there is any list."""
        if self._lists is None:
            self.refresh()
        return bool(self._lists)

    def of(self, name: str) -> Sequence[tuple[str, ...]]:
        """The lists that are noted for an item, the newest first."""
        found = self._lists.get(name) if self and self._lists else None
        return [paths for text in found if (paths := self._paths(text))] if found else ()

    def refresh(self) -> bool:
        """Reads what was noted since the last look. Returns whether there was anything."""
        with self._lock():
            self._lists = {} if self._lists is None else self._lists
            added = self._notes.added()
            for text in chain(*added.values()):
                self._add(text)
            return bool(added)

    def note(self, name: str, paths: Sequence[str]) -> None:
        """Notes what an item has read, unless that is known."""
        if tuple(paths) in self.of(name):
            return
        text = f"{name} {json.dumps([self._relative(path) for path in paths])}".encode()
        with self._lock():
            self._add(text)
        self._notes.append([text])

    def tidy(self) -> None:
        """Merges the files of ended processes if there are many."""
        self._notes.tidy()

    def _add(self, text: bytes) -> None:
        if (found := _LINE.fullmatch(text)) and self._lists is not None:
            name, paths = found[1].decode(), found[2]
            known = self._lists.get(name, ())
            if paths not in known:
                self._lists[name] = (paths, *known)[: limits.READ_LISTS]

    def _paths(self, text: bytes) -> tuple[str, ...]:
        """The paths of a list; none if it is malformed: anyone who may write to the folder may have written it."""
        if text not in self._parsed:
            with contextlib.suppress(ValueError, RecursionError):
                paths = json.loads(text)
                self._parsed[text] = tuple(map(self._absolute, paths)) if {str}.issuperset(map(type, paths)) else ()
        return self._parsed.setdefault(text, ())

    def _relative(self, path: str) -> str:
        rest = None if self._root is None else below(path, self._root)
        return path if rest is None else _ROOT + rest

    def _absolute(self, path: str) -> str:
        return above(path.removeprefix(_ROOT), self._root) if path.startswith(_ROOT) and self._root else path
