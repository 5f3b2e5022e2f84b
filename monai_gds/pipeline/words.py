"""Errors that name the item: an exception from a transform gets notes (PEP 678) of its cause, and of the item's files.

Used by the dataset.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from monai_gds.errors import MonaiGdsError, causes
from monai_gds.keys.libraries import library_of

#: The most paths that a note names, and the most characters of each.
_MOST_PATHS = 4
_MOST_CHARACTERS = 160

#: Characters of an error's message that are kept.
_WORDS = 500

#: The first error in a worker's traceback, which is the cause of the others.
_RAISED = re.compile(r"^(\w[\w.]*: .+)$", re.MULTILINE)

#: How the note of an error's cause begins, and the type whose text is the traceback of another process.
_BECAUSE, _REMOTE = "because of ", "_RemoteTraceback"

#: How the note begins that names the item.
NOTE = "monai_gds: while computing"

_SUFFIX = re.compile(r"\w\.[A-Za-z]\w{0,7}$")


class naming:  # noqa: N801 (a function, to those who use it)
    """Adds a note that names the item, as it is before any transform, to an exception that leaves the block."""

    __slots__ = ("_index", "_item")  # not a generator, which costs three times as much at every hit

    def __init__(self, index: Any, item: Any) -> None:
        self._index, self._item = index, item

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, frames: Any) -> None:
        if isinstance(error, Exception):  # Ctrl-C has nothing to do with the item
            note = _note(self._index, self._item)
            if note not in getattr(error, "__notes__", ()):
                _add_cause(error)
                error.add_note(note)


def _add_cause(error: Exception) -> None:
    """Notes the first cause: a traceback has it at the top, and at the end MONAI's error, which names the transform."""
    *_, cause = causes(error)
    if cause is not error and not isinstance(error, MonaiGdsError) and type(cause).__name__ != _REMOTE:
        error.add_note(f"{_BECAUSE}{type(cause).__name__}: {' '.join(str(cause).split())[:_WORDS]}")


def _note(index: Any, item: Any) -> str:
    try:
        which = "an item" if index is None else f"item {operator.index(index)}"
        paths = [f"{name}={_shortened(path)}" if name else _shortened(path) for name, path in paths_of(item)]
        if len(paths) > _MOST_PATHS:
            paths[_MOST_PATHS:] = [f"and {len(paths) - _MOST_PATHS} more"]
        named = ": " + ", ".join(paths) if paths else ""
    except Exception:  # the user's own types may raise at any access
        which, named = "an item", ""
    return f"{NOTE} {which} of the dataset{named}"


def _shortened(text: str) -> str:
    """The end of a text, where the paths of a dataset differ."""
    return text if len(text) <= _MOST_CHARACTERS else "…" + text[1 - _MOST_CHARACTERS :]


def paths_of(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Key and text of every value of an item, nested ones too, that looks like a path."""
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if isinstance(text, str) and "\n" not in text and ("/" in text or _SUFFIX.search(text)):
            yield name, text
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from paths_of(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from paths_of(inner, name)


def path_of(data: Sequence[Any], index: int) -> str:
    """The first file that an item names, or the item in short."""
    try:
        item = data[index]
        return next((path for _, path in paths_of(item)), " ".join(repr(item).split())[:80])
    except Exception:  # the item itself may be what fails
        return f"data[{index}]"


def in_words(error: BaseException) -> str:
    """Types and messages of an error and its causes, and the line of the user's that led to the first of these.

    MONAI's own error names the transform, and its cause the reason.
    """
    words = []
    added = (note for note in getattr(error, "__notes__", ()) if not note.startswith(_BECAUSE))
    notes = "".join(f" ({' '.join(note.split())})" for note in added)
    for cause in causes(error):
        raised = _RAISED.search(str(cause)) if type(cause).__name__ == _REMOTE else None
        text = raised[1] if raised else f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        words.append(text[:_WORDS])
    if line := own_line(cause):
        words[-1] += f", at {line}"
    return ", because of ".join(words) + notes


def own_line(error: BaseException) -> str:
    """File and number of the last line of the user's own code that led to an error; empty if none did."""
    line, step = "", error.__traceback__
    while step is not None:
        if library_of(step.tb_frame.f_globals.get("__name__")) is None:
            line = f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return line
