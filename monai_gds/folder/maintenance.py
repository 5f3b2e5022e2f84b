"""Lists, verifies and prunes the records of a cache directory, for the command ``monai-gds cache``.

Neither importing this file nor :func:`survey` imports torch, so that listing a directory starts at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

from monai_gds.base.dtypes import DTYPES
from monai_gds.base.names import digest_of
from monai_gds.errors import DamagedRecord, RecordError
from monai_gds.folder.index import Index, IndexEntry
from monai_gds.folder.uses import Used
from monai_gds.keys.folder_listing import NAMES
from monai_gds.records import header
from monai_gds.records.header import Header, SourceState
from monai_gds.shared import temporary

#: How many digits of a pipeline messages show, and how many it takes to name one.
SHOWN, FEWEST = 8, 4

_HEX = re.compile(r"[0-9a-f]*")

#: The identity of a source by a hash of its content.
_CONTENT = re.compile(r"[0-9a-f]{32}")

#: The identity of a source that was not there (monai_gds.keys.sources, which imports NumPy).
ABSENT: SourceState = (-1, "absent")

#: Returns the current state of a source, or None if there is no source or its state cannot be determined.
Identify = Callable[[str], SourceState | None]


@dataclass(frozen=True, slots=True)
class Found:
    """A file in a cache directory."""

    file: str  # its path
    nbytes: int  # its size
    problem: str = ""  # what is wrong with it, or why it may be deleted; empty if nothing is
    # Whether the problem is damage. A record that is of a newer version or not readable is not damaged.
    damaged: bool = False
    mtime_ns: int = 0  # when it was made
    item: str = ""  # hash of the item
    pipeline: str = ""  # hex digits that identify the transforms that made it; empty if they are not part of its key
    # The source files as they were when the record was made.
    sources: dict[str, SourceState] = field(default_factory=dict)
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...] = ()  # name, dtype and shape of each tensor
    # A hash that is equal for records of which the newest supersedes the others; empty if the header was not read.
    same: str = ""
    inode: int = 0  # its inode number; 0 if the file could not be opened
    form: str = ""  # codec and edge of its tiles, as its header notes them; empty if no packing was tried

    @property
    def path(self) -> Path:
        return Path(self.file)

    @property
    def ratio(self) -> float:
        """Bytes of the item's tensors per byte of the file; 0 if they are not known."""
        bits = dict(DTYPES.values())
        return sum(bits[dtype] * math.prod(shape) for _, dtype, shape in self.tensors) / max(self.nbytes, 1)

    @property
    def packed(self) -> str:
        """How much smaller the record is than its tensors, and by which codec; empty if it is not."""
        codec, _, edge = self.form.partition(" ")
        by = f" ({codec}, {edge}³)" if codec else ""
        return f"÷ {self.ratio:.1f}{by}" if self.ratio > 1 else ""

    @property
    def name(self) -> str:
        return os.path.basename(self.file)


# ---------------------------------------------------------------------------------------------------------------------
# What is there


def record_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The records of a directory, by their names. Files with other names are not ours to judge or delete."""
    return [Path(entry.path) for entry in _files(directory) if header.digest_in(entry.name)]


def other_files(directory: str | os.PathLike[str]) -> list[Path]:
    """Files without the name of a record, except hidden ones: other people's, or renamed records."""
    others = (e for e in _files(directory) if not header.digest_in(e.name) and not e.name.startswith("."))
    return [Path(entry.path) for entry in others]


def _files(directory: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return sorted(filter(_is_file, entries), key=lambda entry: entry.name)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself
        return False


def survey(directory: str | os.PathLike[str], index: Index | None = None) -> list[Found]:
    """Every record of a directory by its header, including damaged ones.

    A header is not read if the index holds a record of the same size and mtime. Others are noted in the index if the
    directory belongs to this user.
    """
    known = index.entries() if index is not None else {}
    found, unknown = [], []
    for file in _files(directory):
        digest = header.digest_in(file.name)
        if digest is None:
            continue
        entry = known.get(digest)
        try:
            st = file.stat()
        except OSError:  # deleted meanwhile
            continue
        if entry and (entry.nbytes, entry.mtime_ns) == (st.st_size, st.st_mtime_ns):
            facts = entry._asdict()
            del facts["digest"]
            found.append(Found(file.path, **facts))
        else:
            looked_at = look(file.path)
            if looked_at is not None:
                found.append(looked_at)
                if not looked_at.problem and (entry is None or entry.mtime_ns <= looked_at.mtime_ns):
                    unknown.append(_to_note(looked_at))  # else its mtime was set back, and the newest note wins
    if index is not None and os.stat(directory).st_uid == os.geteuid():
        index.note_records(unknown)
    return found


def _to_note(found: Found) -> IndexEntry:
    return IndexEntry(found.name.partition(".")[0], *(getattr(found, name) for name in IndexEntry._fields[1:]))


def check(path: str | os.PathLike[str]) -> Found | None:
    """Checks every byte of a record, also with the safetensors library. None if it was deleted meanwhile."""
    return look(path, every_byte=True)


def look(path: str | os.PathLike[str], every_byte: bool = False) -> Found | None:
    """Reads the header of a record, and checks ``every_byte`` if wanted. Returns None if there is no such file."""
    path = os.fspath(path)
    file = Found(path, 0)
    try:
        with open(path, "rb") as opened:
            st = os.fstat(opened.fileno())
            file = Found(path, st.st_size, mtime_ns=st.st_mtime_ns, inode=st.st_ino)
            read = header.read(opened.fileno())
            facts = _facts(read.key, file.name)
            if every_byte:
                _check_bytes(opened, read)
    except FileNotFoundError:
        return None
    except (RecordError, OSError) as e:
        if not file.inode:  # it could not be opened, as another user's: it takes up its room all the same
            with contextlib.suppress(OSError):
                st = os.stat(path)
                file = Found(path, st.st_size, mtime_ns=st.st_mtime_ns)
        damaged = isinstance(e, DamagedRecord) or (isinstance(e, OSError) and e.errno == errno.EIO)
        return replace(file, problem=str(e), damaged=damaged)
    tensors = tuple((name, t.dtype, t.shape) for name, t in read.tensors.items())
    return replace(file, tensors=tensors, form=read.form, **facts)


def key_in(path: str) -> dict[str, Any]:
    """What a record holds of its key; empty if that cannot be read."""
    with contextlib.suppress(OSError, RecordError), open(path, "rb") as opened:
        return header.read(opened.fileno()).key
    return {}


def format_of(path: str) -> str:
    """The format of the key in a record, which changes with the version of this package; empty if it is unknown."""
    with contextlib.suppress(KeyError, IndexError, TypeError):
        return str(key_in(path)["parts"][0])
    return ""


def _facts(key: dict[str, Any], name: str) -> dict[str, Any]:
    """What the key in a record holds about it, checked against its file name. Raises DamagedRecord."""
    try:
        parts, item, pipeline = key["parts"], key["item"], key["pipeline"]
        sources = {path: (size, identity) for path, (size, identity) in key["sources"].items()}
        if not {str}.issuperset(map(type, [item, pipeline, *(identity for _, identity in sources.values())])):
            raise TypeError("a hash or an identity is not a string")
        if not {int}.issuperset(type(size) for size, _ in sources.values()) or not _HEX.fullmatch(pipeline):
            raise ValueError("a size is not a whole number, or the pipeline is not hexadecimal")
        # parts = [format, item, transforms, MONAI, state, sources, rooted]; leave out MONAI's version and the sources.
        same = digest_of([[*parts[:3], *parts[4:5], *parts[6:]], *sorted(sources)])
        digest = digest_of(parts)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise DamagedRecord(f"its key is malformed: {e!r}") from e
    if digest != header.digest_in(name):
        raise DamagedRecord("its key does not match its name: the file was swapped, copied or renamed")
    return {"item": item, "pipeline": pipeline, "sources": sources, "same": same}


def _check_bytes(file: BufferedReader, read: Header) -> None:
    from monai_gds.records.soundness import check_record  # it imports torch

    try:
        check_record(file, read)
    except MemoryError as e:
        raise OSError(errno.ENOMEM, f"it does not fit into memory: {e}") from e


# ---------------------------------------------------------------------------------------------------------------------
# What may be deleted


@dataclass(frozen=True, slots=True)
class Unwanted:
    """Which records are to be deleted besides those that are no longer of use."""

    pipeline: str = ""  # all records of this pipeline, see :func:`pipeline_of`
    missing_sources: bool = False  # records with a missing source file; not by default, since a disk may be unmounted
    # Compares sources by identity. By default only sizes are compared, because hashing takes long.
    identify: Identify | None = None
    # These leave out what is in use.
    older_than: float = math.inf  # seconds since a record was made
    unused_for: float = math.inf  # seconds since a record was last used or made
    # Bytes that the other records may have. If they have more, the least recently used ones are unwanted.
    max_size: float = math.inf
    keep: Collection[str] = ()  # pipelines whose records stay


def choose(
    directory: str | os.PathLike[str],
    records: Sequence[Found],
    unwanted: Unwanted,
    used: Used,
    checked: Callable[[list[str]], Iterable[Found]] | None = None,
) -> tuple[list[Found], list[Found]]:
    """Chooses the files of a directory that may be deleted, each with the reason in ``problem``.

    Args:
        directory: the cache directory.
        records: what :func:`survey` found in it, without an index.
        unwanted: what to choose besides files that are no longer of use.
        used: what is used there.
        checked: checks every byte of these files as :func:`check` does, to choose the damaged ones too.

    Returns:
        Files that nobody can use or that were named, and idle records, which stay if they are used meanwhile.
    """
    chosen = list(prunable(directory, records, unwanted))
    if checked is not None:
        files = [found.file for found in without(chosen, records)]
        chosen += [found for found in checked(files) if found.damaged]
    return chosen, _unused(without(chosen, records), used, unwanted)


def without(excluded: Iterable[Found], records: Iterable[Found]) -> list[Found]:
    """The records whose files are not among those excluded."""
    files = {found.file for found in excluded}
    return [found for found in records if found.file not in files]


def idle(records: Iterable[Found], used: Used, before: float, keep: Collection[str] = ()) -> list[tuple[float, Found]]:
    """Records that nobody uses, and when each was last used or made, in seconds since the epoch; the earliest first.

    Args:
        records: the records of a directory. Those with a problem are left out.
        used: what is used there.
        before: records that were used at or after this time are left out.
        keep: records of these pipelines are left out.
    """
    found = []
    for record in records:
        last = max(record.mtime_ns / 1e9, used.last.get(record.name[:32], 0.0))
        if not record.problem and last < before and record.pipeline not in used.open and record.pipeline not in keep:
            found.append((last, record))
    return sorted(found, key=lambda one: one[0])


def used_since(found: Found, used: Used, since: float) -> bool:
    """Whether a record that was idle has been used since.

    By the notes alone: a record that was replaced since is not deleted, and a wrong clock may have dated it.
    """
    return not idle([replace(found, problem="", mtime_ns=0)], used, since)


def _unused(records: Sequence[Found], used: Used, unwanted: Unwanted) -> list[Found]:
    """Idle records that are too old or too many."""
    now = time.time()
    found, rest = [], []
    # Also those that a wrong clock dated later than now.
    for last, record in idle(records, used, math.inf, unwanted.keep):
        made = record.mtime_ns / 1e9
        if made < now - unwanted.older_than:
            found.append(replace(record, problem=f"made {_ago(now - made)} ago"))
        elif last < now - unwanted.unused_for:
            found.append(replace(record, problem=f"not used for {_ago(now - last)}"))
        else:
            rest.append((last, record))
    excess = sum(record.nbytes for record in records) - sum(record.nbytes for record in found) - unwanted.max_size
    for last, record in rest:
        if excess > 0:
            excess -= record.nbytes
            found.append(replace(record, problem=f"not used for {_ago(now - last)}; those that stay were used later"))
    return found


def _ago(seconds: float) -> str:
    if seconds < 3600:
        return "less than an hour"
    days, hours = int(seconds // 86400), int(seconds // 3600)
    number, unit = (days, "day") if days else (hours, "hour")
    return f"{number} {unit}{'' if number == 1 else 's'}"


def pipeline_of(records: Iterable[Found], prefix: str) -> str:
    """The only pipeline of these records whose hash begins with ``prefix``.

    Raises:
        ValueError: the prefix is too short or not hexadecimal, or no or several pipelines begin with it.
    """
    prefix = prefix.lower()
    if not re.fullmatch(rf"[0-9a-f]{{{FEWEST},}}", prefix):
        raise ValueError(
            f"{prefix!r} does not name a pipeline: give {FEWEST} or more of the hex digits that `ls` shows"
        )
    known = sorted({found.pipeline for found in records} - {""})
    matching = [pipeline for pipeline in known if pipeline.startswith(prefix)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ValueError(f"{prefix!r} is the beginning of several pipelines: {', '.join(matching)}")
    there = f"there are {', '.join(p[:SHOWN] for p in known)}" if known else "its records name none"
    raise ValueError(f"no record here is of a pipeline {prefix!r}: {there}")


def prunable(
    directory: str | os.PathLike[str], records: Iterable[Found], unwanted: Unwanted = Unwanted()
) -> Iterator[Found]:
    """Files that are no longer of use, each with the reason in ``problem``.

    These are temporary files whose writer is gone, damaged records, and superseded records: a source file differs from
    the one the record was made from, or there is a newer record of the same item, sources and transforms. Other
    people's files are left alone, so that a wrong folder costs nobody a checkpoint.

    Args:
        directory: the cache directory.
        records: what :func:`survey` found in it, without an index: that may be wrong.
        unwanted: whether sources are compared, and what else is of no use.
    """
    for path, nbytes in temporary.abandoned(directory):
        yield Found(path, nbytes, "left behind by a writer that is gone")
    identify = unwanted.identify and functools.cache(unwanted.identify)  # many records share a source
    newest: dict[str, Found] = {}
    for found in records:
        if found.problem:
            if found.damaged:
                yield found
            continue
        reason = _outdated(found, unwanted.missing_sources, identify)
        if unwanted.pipeline and found.pipeline == unwanted.pipeline:
            reason = f"of the pipeline {found.pipeline[:SHOWN]}"
        if reason:
            yield replace(found, problem=reason)
            continue
        other = newest.get(found.same)
        if other is not None:
            found, other = sorted((found, other), key=lambda f: -f.mtime_ns)
            yield replace(other, problem=f"superseded by {found.name}")
        newest[found.same] = found


def _outdated(found: Found, missing_sources: bool, identify: Identify | None) -> str:
    for path, source in found.sources.items():
        file = path.removesuffix(NAMES)
        if not (os.path.isfile(file) or os.path.isdir(file)):
            if missing_sources and source != ABSENT:
                return f"its source {path} is missing"
        elif source == ABSENT:
            return f"superseded: {path} was not there when it was made"
        elif _has_changed(path, source, identify):
            return f"superseded: its source {path} has changed"
    return ""


def _has_changed(path: str, source: SourceState, identify: Identify | None) -> bool:
    """Whether a source is known to have changed.

    Nothing is known about sources that a user's function identified (their size is negative).
    """
    size, identity = source
    try:
        st = os.stat(path)
    except OSError:
        return False
    if size < 0:
        return False
    if stat.S_ISREG(st.st_mode):
        if st.st_size != size:
            return True
        if identity.startswith("stat:"):
            return identity != f"stat:{st.st_mtime_ns}"
    if identify is None or not _CONTENT.fullmatch(identity):
        return False
    now = identify(path)
    return now is not None and tuple(now) != source


def remove(found: Found) -> bool:
    """Deletes a file that :func:`prunable` or :func:`check` returned, unless it was replaced meanwhile.

    A process that reads a damaged record computes it again and replaces it with a sound one.

    Returns whether it was deleted. Raises OSError: no permission, read-only.
    """
    if temporary.is_temporary(found.path.name):
        return temporary.remove(found.path.parent.parent, found.path.name)
    try:
        st = os.stat(found.file)  # a link was judged by its target
        if (st.st_ino, st.st_size, st.st_mtime_ns) != (found.inode, found.nbytes, found.mtime_ns):
            return False
        os.unlink(found.file)
    except FileNotFoundError:
        return False
    return True
