"""Looking after a cache directory from outside: list, verify, prune. Used by the command ``monai-gds cache``.

Neither importing this nor :func:`survey` imports torch, so that listing a directory starts at once.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from monai_gds.cache import header, temporary
from monai_gds.cache.header import ARRAYS, Header, Source, Tensor
from monai_gds.cache.index import Index, IndexEntry
from monai_gds.errors import DamagedRecord, NewerRecord, RecordError

__all__ = [
    "FEWEST",
    "SHOWN",
    "Found",
    "check",
    "other_files",
    "pipeline_of",
    "prunable",
    "record_files",
    "remove",
    "survey",
]

#: Digits of a pipeline that messages show, and the fewest that name one.
SHOWN, FEWEST = 8, 4

#: The identity of a source whose content was hashed.
_CONTENT = re.compile(r"[0-9a-f]{32}")

#: Gives size and identity of a source as it is now; None where there is none, or where this cannot be told.
Identify = Callable[[str], Source | None]


@dataclass(frozen=True, slots=True)
class Found:
    """A file in a cache directory.

    Attributes:
        file: its path; ``path`` and ``name`` give it as a ``Path`` and without the folder.
        nbytes: its size.
        problem: what is wrong with it, or why it may go; empty when nothing is.
        damaged: whether the problem is damage. A record of a newer version, or that one may not read, is not damaged.
        mtime_ns: when it was made.
        version: of its format; 0 where its header cannot be read.
        item: hash of the item.
        pipeline: what tells the transforms that made it from others: hex digits; empty where they are no part of its
            key.
        sources: the source files as they were when the record was made.
        tensors: name, dtype and shape of the tensors in it.
        same: a hash, equal for records of which the newest supersedes the others; empty where the header was not read.
        inode: its number in the file system; 0 where the file could not be looked at.
    """

    file: str
    nbytes: int
    problem: str = ""
    damaged: bool = False
    mtime_ns: int = 0
    version: int = 0
    item: str = ""
    pipeline: str = ""
    sources: dict[str, Source] = field(default_factory=dict)
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    same: str = ""
    inode: int = 0

    @property
    def path(self) -> Path:
        return Path(self.file)

    @property
    def name(self) -> str:
        return os.path.basename(self.file)

    @property
    def has_relative_sources(self) -> bool:
        """Whether it names sources relative to a folder that nobody knows any more, as older versions did."""
        return not all(map(os.path.isabs, self.sources))


# ---------------------------------------------------------------------------------------------------------------------
# What is there


def record_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The records of a directory, by their names. Whatever is named otherwise is not ours to judge or to delete."""
    return [Path(entry.path) for entry in _files(directory) if header.named(entry.name)]


def other_files(directory: str | os.PathLike[str]) -> list[Path]:
    """Files that are no records by their names, but for hidden ones: somebody else's, or records that were renamed."""
    others = (e for e in _files(directory) if not header.named(e.name) and not e.name.startswith("."))
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
    """Every record of a directory by its header, damaged ones with what is wrong.

    Args:
        directory: the cache directory.
        index: its index, for listing: headers of records whose size and mtime are as noted there are not read.
            What it did not tell is noted in it if the directory is this user's own.
    """
    known = index.entries() if index is not None else {}
    found, unknown = [], []
    for file in _files(directory):
        name = header.named(file.name)
        if name is None:
            continue
        entry = known.get(name[0])
        try:
            st = file.stat()
        except OSError:  # deleted meanwhile
            continue
        if entry and (entry.version, entry.nbytes, entry.mtime_ns) == (name[1], st.st_size, st.st_mtime_ns):
            found.append(_as_noted(file.path, entry))
        else:
            looked_at = _look(file.path)
            if looked_at is not None:
                found.append(looked_at)
                if not looked_at.problem and (entry is None or entry.mtime_ns <= looked_at.mtime_ns):
                    unknown.append(_to_note(looked_at))  # but for one whose mtime was set back: the newest fact counts
    if index is not None and os.stat(directory).st_uid == os.geteuid():
        index.note_records(unknown)
    return found


def _as_noted(file: str, entry: IndexEntry) -> Found:
    return Found(
        file,
        entry.nbytes,
        mtime_ns=entry.mtime_ns,
        version=entry.version,
        item=entry.item,
        pipeline=entry.pipeline,
        sources=entry.sources,
        tensors=entry.tensors,
    )


def _to_note(found: Found) -> IndexEntry:
    digest = found.name.partition(".")[0]
    facts = (found.item, found.pipeline, found.nbytes, found.mtime_ns, found.tensors, found.sources, found.version)
    return IndexEntry(digest, *facts)


def check(path: str | os.PathLike[str]) -> Found | None:
    """A record, every byte of it checked, also by the safetensors library; None when it was deleted meanwhile."""
    return _look(os.fspath(path), _check_bytes)


def _look(path: str, more: Callable[[str, int, Header], None] | None = None) -> Found | None:
    """Reads the header of a record, and has ``more`` check the rest of it."""
    file = Found(path, 0)
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            st = os.fstat(fd)
            file = Found(path, st.st_size, mtime_ns=st.st_mtime_ns, inode=st.st_ino)
            read = header.read(fd)
            key = header.ingredients(read, file.name)
            if more is not None:
                more(path, fd, read)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except (RecordError, OSError) as e:
        return replace(file, problem=str(e), damaged=_is_damage(e))
    return replace(
        file,
        version=read.version,
        item=key.item,
        pipeline=key.pipeline,
        sources=key.sources,
        tensors=tuple((name, t.dtype, t.shape) for name, t in read.entries.items() if name != ARRAYS),
        same=key.same,
    )


def _is_damage(error: Exception) -> bool:
    """Whether the file itself is at fault, and not its format's version or whoever reads it."""
    if isinstance(error, OSError):
        return error.errno == errno.EIO
    return not isinstance(error, NewerRecord)


def _check_bytes(path: str, fd: int, read: Header) -> None:
    import torch
    from safetensors import SafetensorError, safe_open

    from monai_gds.cache.checksum import checksum

    wrong = []
    for name, tensor in read.entries.items():
        data = _read_tensor(fd, tensor)
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        if checksum(flat) != tensor.checksum:
            wrong.append(name)
    if wrong:
        raise DamagedRecord(f"the bytes of {', '.join(map(repr, wrong))} do not match their checksum")
    try:
        with safe_open(path, "pt"):
            pass
    except SafetensorError as e:
        raise DamagedRecord(f"the safetensors library refuses it: {e}") from e


def _read_tensor(fd: int, tensor: Tensor) -> bytearray:
    data = bytearray(tensor.nbytes)
    done = 0
    while done < tensor.nbytes:
        count = os.preadv(fd, [memoryview(data)[done:]], tensor.offset + done)
        if not count:
            raise DamagedRecord("it was cut off while it was read")
        done += count
    return data


# ---------------------------------------------------------------------------------------------------------------------
# What may go


def pipeline_of(records: Iterable[Found], prefix: str) -> str:
    """The pipeline among those of the records whose hash begins with these digits.

    Raises:
        ValueError: these are no digits of a hash, or too few; no pipeline begins with them, or several do.
    """
    prefix = prefix.lower()
    if not re.fullmatch(rf"[0-9a-f]{{{FEWEST},}}", prefix):
        raise ValueError(f"{prefix!r} names no pipeline: give {FEWEST} or more of the hex digits that `ls` shows")
    known = sorted({found.pipeline for found in records} - {""})
    matching = [pipeline for pipeline in known if pipeline.startswith(prefix)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ValueError(f"{prefix!r} is the beginning of several pipelines: {', '.join(matching)}")
    there = f"there are {', '.join(p[:SHOWN] for p in known)}" if known else "its records name none"
    raise ValueError(f"no record here is of a pipeline {prefix!r}: {there}")


def prunable(
    directory: str | os.PathLike[str],
    records: Iterable[Found],
    *,
    missing_sources: bool = False,
    old_format: bool = False,
    pipeline: str = "",
    identify: Identify | None = None,
) -> Iterator[Found]:
    """Files that are of no more use, each with the reason in ``problem``.

    These are temporary files whose writer is gone; damaged records; and superseded records: a source file is there and
    is not what the record was made from, or a newer record was made of the same item, sources and transforms. A
    relative source proves neither: from here, its path leads to another file or to none. Files of others are left
    alone, so that a wrong folder costs nobody a checkpoint.

    Args:
        directory: the cache directory.
        records: what :func:`survey` found in it by the headers, without an index: an index proves nothing.
        missing_sources: also records with a source file that is not there. Not by default: a disk may be unmounted.
        old_format: also records of format version 1, which this version does not read.
        pipeline: also the records of this pipeline, see :func:`pipeline_of`. Nobody else can know that one is given up.
        identify: compares the sources of version 2 also by identity. Without it, by size only: hashes take long.
    """
    for path, nbytes in temporary.abandoned(directory):
        yield Found(path, nbytes, "left behind by a writer that is gone")
    identify = identify and functools.cache(identify)  # many records have one source
    newest: dict[str, Found] = {}
    for found in records:
        if found.problem:
            if found.damaged:
                yield found
            continue
        reason = _outdated(found, missing_sources, identify)
        if pipeline and found.pipeline == pipeline:
            reason = f"of the pipeline {pipeline[:SHOWN]}"
        if old_format and found.version == 1:
            reason = "of format version 1, which this version of monai_gds does not read"
        if reason:
            yield replace(found, problem=reason)
            continue
        if found.has_relative_sources or not found.same:
            continue
        other = newest.get(found.same)
        if other is not None:
            found, other = sorted((found, other), key=lambda f: -f.mtime_ns)
            yield replace(other, problem=f"superseded by {found.name}")
        newest[found.same] = found


def _outdated(found: Found, missing_sources: bool, identify: Identify | None) -> str:
    has_changed = _changed_since_version_1 if found.version == 1 else _changed_since_version_2
    for path, source in found.sources.items():
        if not os.path.isabs(path):
            continue
        if not _is_there(path):
            if missing_sources:
                return f"its source {path} is missing"
        elif has_changed(path, source, identify):
            return f"superseded: its source {path} has changed"
    return ""


def _is_there(path: str) -> bool:
    try:
        return os.path.isfile(path) or os.path.isdir(path)
    except ValueError:
        return False


def _changed_since_version_1(path: str, source: Source, _: Identify | None) -> bool:
    """Version 1 told sources by size and mtime, folders by their listing."""
    return _size_and_mtime(path) not in (source, None)


def _changed_since_version_2(path: str, source: Source, identify: Identify | None) -> bool:
    """Whether a source of a record of version 2 is another now, as far as that can be told from here.

    Of what a user's function said of a source (its size is negative) nothing can be told.
    """
    size, identity = source
    try:
        st = os.stat(path)
    except OSError:
        return False
    if size < 0 or not isinstance(identity, str):
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


def _size_and_mtime(path: str) -> Source | None:
    """What version 1 kept of a source: of a folder, the number of its entries and a hash of their stats."""
    try:
        if not os.path.isdir(path):
            st = os.stat(path)
            return st.st_size, st.st_mtime_ns
        with os.scandir(path) as entries:
            listed = sorted(_entry_of_version_1(entry) for entry in entries)
    except OSError:  # what one may not list proves nothing
        return None
    digest = blake2b(repr(listed).encode("utf-8", "surrogatepass"), digest_size=7).digest()
    return len(listed), int.from_bytes(digest, "little")


def _entry_of_version_1(entry: os.DirEntry[str]) -> tuple[str, int, int]:
    try:
        st = entry.stat()
    except OSError:  # a dead link, or it vanished meanwhile
        return entry.name, -1, 0
    return entry.name, st.st_size, st.st_mtime_ns


def remove(found: Found) -> bool:
    """Deletes a file that :func:`prunable` or :func:`check` gave, unless another has taken its place meanwhile.

    Whoever reads a damaged record computes it anew and replaces it: a sound one may have its name by now.

    Returns:
        Whether it was deleted.

    Raises:
        OSError: no permission, read-only.
    """
    if temporary.is_temporary(found.path.name):
        return temporary.remove(found.path.parent.parent, found.path.name)
    try:
        st = os.stat(found.file)
        if (st.st_ino, st.st_size, st.st_mtime_ns) != (found.inode, found.nbytes, found.mtime_ns):
            return False
        os.unlink(found.file)
    except FileNotFoundError:
        return False
    return True
