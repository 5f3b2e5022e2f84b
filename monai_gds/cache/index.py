"""The index of a cache directory: what its records hold, without opening them.

    <directory>/.index/<place>.<pid>.<start>.<n>.facts    facts that one process appended, one per line
    <directory>/.index/pipelines/<hex>.json               what a pipeline is, as {attribute path: short text}

Written when records are published and by ``monai-gds cache``; read by ``cache ls`` and :mod:`.explain`. A fact is
``<crc32 of the JSON> <JSON>``. Torn and garbled lines are skipped, repeated ones are harmless, and of several facts
about a record the one about its newest file counts. Each process appends to a file of its own, so that writes never
interleave, also on NFS. :meth:`Index.tidy` merges the files of processes that have ended.

The index is advisory: if it is missing, full, read-only or wrong, only the command gets slower. Nothing here follows a
link or touches a file whose name has another form. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from monai_gds import limits
from monai_gds.cache.header import SUFFIX, SourceState
from monai_gds.cache.process_names import PATTERN, still_runs, this_process
from monai_gds.process import PerProcess

__all__ = ["FOLDER", "Index", "IndexEntry"]

FOLDER = ".index"
_PIPELINES = "pipelines"


#: How long, in seconds, a file counts as in use whose process cannot be checked from here (another host or container).
_FOREIGN_SECONDS = 3600


_FACTS = re.compile(rf"{PATTERN}\.[0-9]+\.facts")
_UNFINISHED = re.compile(rf"\.{PATTERN}\.[0-9]+\.new")
_PIPELINE = re.compile(r"([0-9a-f]{8,64})\.json")

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe would wait for its writer
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW

#: Numbers the files of this process, which may have several indices.
_counter = itertools.count()


class IndexEntry(NamedTuple):
    """A fact about one record.

    Attributes:
        digest: the key's, 32 hex digits.
        item: hash of the item.
        pipeline: hex digits that identify the transforms and the process's state; empty if they are not in the key.
        nbytes: size of the record.
        mtime_ns: when it was made. With ``nbytes``, shows whether the file is still the one that was noted.
        tensors: name, dtype (``"float32"``) and shape of each.
        sources: size and identity of each source by its absolute path.
    """

    digest: str
    item: str
    pipeline: str
    nbytes: int
    mtime_ns: int
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    sources: dict[str, SourceState]

    @property
    def name(self) -> str:
        """The name of the record's file."""
        return self.digest + SUFFIX


class Index:
    """Notes and finds what the records of a cache directory hold. Thread-safe. Nothing is read before the first query.

    Args:
        directory: the cache directory. Nothing is created in it before something is noted.

    Example:
        >>> index = Index(directory)
        >>> index.note_record(IndexEntry("ab" * 16, "item", "cafe0123", 4096, 1, (), {}))
        >>> [entry.name for entry in Index(directory).entries().values()]
        ['abababababababababababababababab.v2.safetensors']
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.path.abspath(directory)
        self._own = PerProcess(_OwnFile)
        self._entries: dict[str, IndexEntry] = {}
        self._read_up_to: dict[str, tuple[int, int]] = {}  # by file: its inode, and how much of it was read
        self._described: set[str] = set()

    def __reduce__(self) -> Any:
        return Index, (self.directory,)

    # Writing

    def note_record(self, entry: IndexEntry) -> None:
        """Notes that a record was published, if possible."""
        self.note_records([entry])

    def note_records(self, entries: Iterable[IndexEntry]) -> None:
        """Notes several records in one write, if possible."""
        lines = b"".join(map(_line, entries))
        if not lines:
            return
        with contextlib.suppress(OSError), self._folder(make=True) as folder:
            self._append(folder, lines)

    def _append(self, folder: int, lines: bytes) -> None:
        """Appends whole lines in one write to this process's file.

        The file is closed at once, so that others see the lines over NFS and no unmount has to wait.
        """
        own = self._own()
        fd = os.open(own.name, _APPEND, 0o666, dir_fd=folder)
        try:
            data = b"\n" + lines if own.is_torn else lines
            own.is_torn = True
            own.is_torn = os.write(fd, data) != len(data)
        finally:
            os.close(fd)

    def describe_pipeline(self, pipeline: str, description: Mapping[str, str]) -> None:
        """Stores the description of a pipeline, once, if possible.

        Args:
            pipeline: its hex digits, as in records.
            description: short texts by attribute path, ``{"transforms[1] Spacingd.pixdim": "(1.5, 1.5, 1.5)"}``.
        """
        if pipeline in self._described or not _PIPELINE.fullmatch(f"{pipeline}.json"):
            return
        self._described.add(pipeline)
        with (
            contextlib.suppress(OSError),
            self._folder(make=True) as above,
            _open_folder(_PIPELINES, above, True) as folder,
        ):
            if not _description(folder, pipeline):
                _publish(folder, f"{pipeline}.json", json.dumps(dict(description), indent=0).encode())

    # Reading

    def entries(self) -> dict[str, IndexEntry]:
        """The facts by digest, whether the records still exist or not.

        The first call reads everything, later ones only what was added.
        """
        with contextlib.suppress(OSError), self._folder() as folder:
            for name in os.listdir(folder):
                if _FACTS.fullmatch(name):
                    for entry in self._added(folder, name):
                        _keep_newest(self._entries, entry)
        return dict(self._entries)

    def holds(self, entry: IndexEntry) -> bool:
        """Whether this record still exists."""
        return os.path.exists(os.path.join(self.directory, entry.name))

    def pipeline(self, pipeline: str) -> dict[str, str]:
        """The description of a pipeline; empty if there is none."""
        if _PIPELINE.fullmatch(f"{pipeline}.json"):
            with contextlib.suppress(OSError), self._folder() as above, _open_folder(_PIPELINES, above) as folder:
                return _description(folder, pipeline)
        return {}

    def _added(self, folder: int, name: str) -> list[IndexEntry]:
        """The facts of one file that were not read yet. A line that is not whole is left for later."""
        try:
            st = os.stat(name, dir_fd=folder, follow_symlinks=False)
            inode, begin = self._read_up_to.get(name, (st.st_ino, 0))
            if inode != st.st_ino or st.st_size < begin:
                begin = 0
            if st.st_size == begin:
                return []
            text = _read(folder, name, begin)
        except OSError:  # merged meanwhile, or another user's
            return []
        end = text.rfind(b"\n") + 1
        self._read_up_to[name] = st.st_ino, begin + end
        return list(_facts(text[:end]))

    # Maintenance

    def tidy(self) -> None:
        """Merges the files of ended processes if there are many, and removes unfinished files.

        Facts about deleted records are dropped. Two processes may do this at once: repeated facts are harmless.
        """
        with contextlib.suppress(OSError), self._folder() as folder:
            _remove_unfinished(folder)
            ended = [n for n in os.listdir(folder) if _FACTS.fullmatch(n) and _is_abandoned(folder, n)]
            if len(ended) > limits.INDEX_FILES:
                self._merge(folder, ended)
            with _open_folder(_PIPELINES, folder) as pipelines:
                _remove_unfinished(pipelines)

    def _merge(self, folder: int, names: list[str]) -> None:
        newest: dict[str, IndexEntry] = {}
        read: dict[str, int] = {}
        for name in names:
            with contextlib.suppress(OSError):
                text = _read(folder, name)
                read[name] = len(text)
                for entry in _facts(text):
                    _keep_newest(newest, entry)
        there = set(os.listdir(self.directory))
        lines = b"".join(_line(entry) for entry in newest.values() if entry.name in there)
        if lines:
            _publish(folder, _own_name(".facts"), lines)
        for name, nbytes in read.items():
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_size == nbytes:  # else it was appended to
                    os.unlink(name, dir_fd=folder)

    @contextlib.contextmanager
    def _folder(self, make: bool = False) -> Iterator[int]:
        above = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with _open_folder(FOLDER, above, make) as folder:
                yield folder
        finally:
            os.close(above)


# ---------------------------------------------------------------------------------------------------------------------
# Facts and lines


def _line(entry: IndexEntry) -> bytes:
    """Encodes a fact. The tensors are JSON within JSON: most records have the same, whose text is parsed only once."""
    tensors = json.dumps([[name, dtype, list(shape)] for name, dtype, shape in entry.tensors], separators=(",", ":"))
    fact = ["record", *entry[:5], tensors, entry.sources]
    text = json.dumps(fact, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _facts(text: bytes) -> Iterator[IndexEntry]:
    """The facts in these lines. Torn and garbled ones, and those of another kind, are skipped."""
    layouts: dict[str, Any] = {}
    for line in text.split(b"\n"):
        fact = line[9:]
        try:
            if fact and int(line[:8], 16) == zlib.crc32(fact):
                yield _entry(json.loads(fact.decode()), layouts)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            continue


def _entry(fact: Any, layouts: dict[str, Any]) -> IndexEntry:
    kind, digest, item, pipeline, nbytes, mtime_ns, tensors, sources = fact
    if kind != "record" or not (type(digest) is type(item) is type(pipeline) is str and _DIGEST.fullmatch(digest)):
        raise TypeError("not a fact of this version")
    if type(nbytes) is not int or type(mtime_ns) is not int:
        raise TypeError("not a fact of this version")
    layout = layouts.get(tensors)
    if layout is None:
        layout = layouts[tensors] = _layout(tensors)
    for path, (size, identity) in sources.items():
        if type(size) is not int or type(identity) is not str:
            raise TypeError("not a fact of this version")
        sources[path] = size, identity
    return IndexEntry(digest, item, pipeline, nbytes, mtime_ns, layout, sources)


def _layout(text: str) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    layout = tuple((name, dtype, tuple(shape)) for name, dtype, shape in json.loads(text))
    for name, dtype, shape in layout:
        if type(name) is not str or type(dtype) is not str or not all(type(side) is int for side in shape):
            raise TypeError("not a fact of this version")
    return layout


_DIGEST = re.compile(r"[0-9a-f]{32}")


def _keep_newest(entries: dict[str, IndexEntry], entry: IndexEntry) -> None:
    known = entries.get(entry.digest)
    if known is None or known.mtime_ns <= entry.mtime_ns:
        entries[entry.digest] = entry


def _description(folder: int, pipeline: str) -> dict[str, str]:
    try:
        found = json.loads(_read(folder, f"{pipeline}.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    whole = isinstance(found, dict) and all(isinstance(text, str) for text in found.values())
    return found if whole else {}


# ---------------------------------------------------------------------------------------------------------------------
# Files below the folder's descriptor


@contextlib.contextmanager
def _open_folder(name: str, above: int, make: bool = False) -> Iterator[int]:
    """Opens a folder. It is made, if missing, with the permissions of its parent, so that a group may write to both."""
    made = False
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)
            made = True
    folder = os.open(name, _FOLDER_FLAGS, dir_fd=above)
    try:
        if made:
            os.fchmod(folder, stat.S_IMODE(os.fstat(above).st_mode))
        yield folder
    finally:
        os.close(folder)


def _read(folder: int, name: str, begin: int = 0) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    fd = os.open(name, _READ, dir_fd=folder)
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or st.st_size - begin > limits.INDEX_FILE_BYTES:
            raise OSError(f"{name} is not a file of an index")
        return os.pread(fd, max(0, st.st_size - begin), begin)
    finally:
        os.close(fd)


def _remove_unfinished(folder: int) -> None:
    """Removes what killed processes left behind in :func:`_publish`."""
    for name in os.listdir(folder):
        if _UNFINISHED.fullmatch(name) and _is_abandoned(folder, name):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)


def _publish(folder: int, name: str, data: bytes) -> None:
    """Writes a file atomically."""
    unfinished = "." + _own_name(".new")
    fd = os.open(unfinished, _CREATE, 0o666, dir_fd=folder)
    try:
        try:
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=folder)
        raise


def _own_name(suffix: str) -> str:
    return f"{this_process()}.{next(_counter)}{suffix}"


class _OwnFile:
    """The file that one process appends to."""

    def __init__(self) -> None:
        self.name = _own_name(".facts")
        self.is_torn = False  # whether a full disk cut its last line off


def _is_abandoned(folder: int, name: str) -> bool:
    """Whether a file's writer has ended and this user may delete the file."""
    try:
        st = os.stat(name, dir_fd=folder, follow_symlinks=False)
        sticky = os.fstat(folder).st_mode & stat.S_ISVTX
    except OSError:  # deleted by another process
        return False
    if not stat.S_ISREG(st.st_mode) or (sticky and st.st_uid != os.geteuid()):
        return False
    runs = still_runs(".".join(name.removeprefix(".").split(".")[:3]))
    return time.time() - st.st_mtime > _FOREIGN_SECONDS if runs is None else not runs
