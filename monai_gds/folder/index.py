"""The index of a cache directory: what its records hold, without opening them.

    <directory>/.index/<process>.<n>.facts     facts that one process noted (monai_gds.shared.notes), one per line
    <directory>/.index/pipelines/<hex>.json    what a pipeline is, as {attribute path: short text}

Written when records are published and by ``monai-gds cache``; read by ``cache ls`` and :mod:`.explain`. A fact is
``<crc32 of the JSON> <JSON>``. Garbled lines are skipped, repeated ones are harmless, and of several facts about a
record the one about its newest file counts. If the index is missing or wrong, only the command gets slower.

Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from monai_gds.base.dtypes import DTYPES, MOST_AXES
from monai_gds.records.header import SUFFIX, SourceState
from monai_gds.shared.notes import Notes, read
from monai_gds.shared.temporary import ANY, inside, publish

_PIPELINES = "pipelines"
_PIPELINE = re.compile(r"([0-9a-f]{8,64})\.json")


class IndexEntry(NamedTuple):
    """A fact about one record."""

    digest: str  # the key's, 32 hex digits
    item: str  # hash of the item
    pipeline: str  # hex digits that identify the transforms and the process's state; empty if they are not in the key
    nbytes: int  # size of the record
    # When it was made. With ``nbytes``, shows whether the file is still the one that was noted.
    mtime_ns: int
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype (``"float32"``) and shape of each
    sources: dict[str, SourceState]  # size and identity of each source by its absolute path
    form: str = ""  # as in the record's header: codec and edge of its tiles

    @property
    def name(self) -> str:
        return self.digest + SUFFIX


class Index:
    """Notes and finds what the records of a cache directory hold. Thread-safe. Nothing is read before the first query.

    Args:
        directory: the cache directory. Nothing is created in it before something is noted.
        file_mode: permissions that files have at most.

    Example:
        >>> index = Index(".")
        >>> index.note_records([IndexEntry("ab" * 16, "item", "cafe0123", 4096, 1, (), {})])
        >>> [entry.name for entry in Index(".").entries().values()]
        ['abababababababababababababababab.v2.safetensors']
    """

    def __init__(self, directory: str | os.PathLike[str], file_mode: int = ANY) -> None:
        self.directory = os.path.abspath(directory)
        self._notes = Notes(directory, "facts", file_mode)
        self._entries: dict[str, IndexEntry] = {}
        self._described: set[str] = set()

    # Writing

    def note_records(self, entries: Iterable[IndexEntry]) -> None:
        """Notes that records were published, in one write, if possible."""
        self._notes.append(map(_fact, entries))

    def describe_pipeline(self, pipeline: str, description: Mapping[str, str]) -> None:
        """Stores the description of a pipeline, ``{attribute path: short text}``, once, if possible."""
        if pipeline in self._described or not _PIPELINE.fullmatch(f"{pipeline}.json"):
            return
        self._described.add(pipeline)
        with (
            contextlib.suppress(OSError),
            self._notes.folder(make=True) as above,
            inside(above, _PIPELINES, make=True) as folder,
        ):
            if not _description(folder, pipeline):
                text = json.dumps(dict(description), indent=0).encode()
                publish(self.directory, f"{pipeline}.json", text, self._notes.file_mode, into=folder)

    # Reading

    def entries(self) -> dict[str, IndexEntry]:
        """The facts by digest, whether the records still exist or not.

        The first call reads everything, later ones only what was added.
        """
        _keep_newest(self._entries, self._notes.added().values())
        return dict(self._entries)

    def count(self, pipeline: str) -> int:
        """How many records of a pipeline exist."""
        there = set(os.listdir(self.directory))
        return sum(entry.pipeline == pipeline and entry.name in there for entry in self.entries().values())

    def holds(self, entry: IndexEntry) -> bool:
        """Whether this record still exists."""
        return os.path.exists(os.path.join(self.directory, entry.name))

    def pipeline(self, pipeline: str) -> dict[str, str]:
        """The description of a pipeline; empty if there is none."""
        if _PIPELINE.fullmatch(f"{pipeline}.json"):
            with contextlib.suppress(OSError), self._notes.folder() as above, inside(above, _PIPELINES) as folder:
                return _description(folder, pipeline)
        return {}

    # Maintenance

    def tidy(self) -> None:
        """Merges the files of ended processes if there are many."""
        self._notes.tidy(self._merged)

    def _merged(self, files: list[list[bytes]]) -> list[bytes]:
        """The newest fact about each record that still exists."""
        newest: dict[str, IndexEntry] = {}
        _keep_newest(newest, files)
        there = set(os.listdir(self.directory))
        return [_fact(entry) for entry in newest.values() if entry.name in there]


# ---------------------------------------------------------------------------------------------------------------------
# Facts


def _fact(entry: IndexEntry) -> bytes:
    """Encodes a fact. The tensors are JSON within JSON: most records have the same, whose text is parsed only once."""
    tensors = json.dumps([[name, dtype, list(shape)] for name, dtype, shape in entry.tensors], separators=(",", ":"))
    fact = ["record", *entry[:5], tensors, entry.sources, entry.form]
    return json.dumps(fact, separators=(",", ":")).encode()


def _keep_newest(entries: dict[str, IndexEntry], files: Iterable[list[bytes]]) -> None:
    """Adds the facts noted in files. Facts of another kind are skipped."""
    layouts: dict[str, Any] = {}
    for text in chain.from_iterable(files):
        try:
            entry = _entry(json.loads(text.decode()), layouts)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            continue
        known = entries.get(entry.digest)
        if known is None or known.mtime_ns <= entry.mtime_ns:
            entries[entry.digest] = entry


def _entry(fact: Any, layouts: dict[str, Any]) -> IndexEntry:
    """Parses a fact strictly: anyone who may write to the folder may have written it. ``ls`` and ``explain`` use it."""
    kind, digest, item, pipeline, nbytes, mtime_ns, tensors, sources, form = fact
    states = {path: (size, identity) for path, (size, identity) in sources.items()}
    named = kind == "record" and _DIGEST.fullmatch(digest) and _HEX.fullmatch(pipeline)
    typed = type(item) is type(form) is str and _is_whole(nbytes, 0) and _is_whole(mtime_ns)
    if not (named and typed and all(type(a) is int and type(b) is str for a, b in states.values())):
        raise TypeError("not a fact of this version")
    if tensors not in layouts:
        layouts[tensors] = _layout(tensors)
    return IndexEntry(digest, item, pipeline, nbytes, mtime_ns, layouts[tensors], states, form)


def _layout(text: str) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    layout = tuple((name, dtype, tuple(shape)) for name, dtype, shape in json.loads(text))
    for name, dtype, shape in layout:
        sides = len(shape) <= MOST_AXES and all(_is_whole(side, 0) for side in shape)
        if type(name) is not str or dtype not in _DTYPES or not sides or math.prod(shape) >= _MOST:
            raise TypeError("not a fact of this version")
    return layout


def _is_whole(value: Any, least: int = -(1 << 63)) -> bool:
    """Whether a value is a whole number that a file system could have given."""
    return type(value) is int and least <= value < _MOST


_DIGEST = re.compile(r"[0-9a-f]{32}")
_HEX = re.compile(r"[0-9a-f]*")
_DTYPES = frozenset(dtype for dtype, _ in DTYPES.values())
_MOST = 1 << 63


def _description(folder: int, pipeline: str) -> dict[str, str]:
    try:
        found = json.loads(read(folder, f"{pipeline}.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    whole = isinstance(found, dict) and all(isinstance(text, str) for text in found.values())
    return found if whole else {}
