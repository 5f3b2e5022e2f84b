"""Looking after a cache directory from outside: list, verify, prune. Used by the command ``monai-gds cache``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import safetensors

from monai_gds.cache import temporary
from monai_gds.cache.checksum import checksum
from monai_gds.cache.directory import SUFFIX, read_record
from monai_gds.cache.key import source_stat
from monai_gds.cache.record import Entry, Record
from monai_gds.errors import DamagedRecord, FileChanged, NewerRecord, RecordError
from monai_gds.storage import FileId, Storage, open_storage

__all__ = ["Found", "check", "other_files", "pipeline_of", "prunable", "record_files", "remove", "survey"]

#: What a writer names a record: its key's digest. Whatever is named otherwise is not ours to judge or to delete.
_RECORD_NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}")

#: Digits of a pipeline that are shown, and the fewest that name one.
SHOWN, FEWEST = 8, 4


@dataclass(frozen=True, slots=True)
class Found:
    """A file in a cache directory.

    Attributes:
        path: where it is.
        nbytes: its size.
        problem: what is wrong with it, or why it may go; empty when nothing is.
        damaged: whether the problem is damage. A record of a newer version, or that one may not read, is not damaged.
        mtime_ns: when it was made.
        key: the ingredients of its key, empty where its header cannot be read.
        tensors: the tensors in it.
        inode: its number in the file system; 0 where the file could not be looked at.
    """

    path: Path
    nbytes: int
    problem: str = ""
    damaged: bool = False
    mtime_ns: int = 0
    key: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Entry] = field(default_factory=dict)
    inode: int = 0

    @property
    def sources(self) -> dict[str, list[int]]:
        """Size and mtime of the source files, as they were when the record was made."""
        return dict(self.key.get("sources", {}))

    @property
    def has_relative_sources(self) -> bool:
        """Whether it names sources relative to a folder that nobody knows any more, as older versions did."""
        return not all(map(os.path.isabs, self.sources))

    @property
    def pipeline(self) -> str:
        """What tells the transforms that made it from others: 32 hex digits; empty where they are no part of its key.

        A hash of the key's transform hash: that one begins with the settings of the ``Compose``, which most pipelines
        share, and may be any text where the user gave ``hash_transform``.
        """
        transform = self.key.get("transform", "")
        return blake2b(transform.encode(), digest_size=16).hexdigest() if transform else ""


def record_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The records of a directory, by their names."""
    return sorted(p for p in Path(directory).iterdir() if _RECORD_NAME.fullmatch(p.name) and p.is_file())


def other_files(directory: str | os.PathLike[str]) -> list[Path]:
    """Files that are no records by their names, but for hidden ones: somebody else's, or records that were renamed."""
    files = (p for p in Path(directory).iterdir() if p.is_file() and not p.name.startswith("."))
    return sorted(p for p in files if not _RECORD_NAME.fullmatch(p.name))


def survey(directory: str | os.PathLike[str]) -> Iterator[Found]:
    """Every record of a directory by its header, damaged ones with what is wrong."""
    storage = open_storage("posix", "cpu")
    for path in record_files(directory):
        found = _look(path, storage, whole=False)
        if found is not None:
            yield found


def check(path: Path) -> Found | None:
    """A record, every byte of it checked, also by the safetensors library; None when it was deleted meanwhile."""
    return _look(path, open_storage("posix", "cpu"), whole=True)


def _look(path: Path, storage: Storage, whole: bool) -> Found | None:
    nbytes, mtime_ns, inode = 0, 0, 0
    try:
        st = path.stat()
        nbytes, mtime_ns, inode = st.st_size, st.st_mtime_ns, st.st_ino
        record, file, _ = read_record(str(path), storage)
        if whole:
            _check_bytes(str(path), record, file, storage)
    except (FileNotFoundError, FileChanged):  # deleted or replaced meanwhile: what is there now is new
        return None
    except (RecordError, OSError, safetensors.SafetensorError) as e:
        damaged = not isinstance(e, (NewerRecord, PermissionError))
        return Found(path, nbytes, str(e), damaged, mtime_ns, inode=inode)
    return Found(path, nbytes, "", False, mtime_ns, record.key, record.tensors, inode)


def _check_bytes(path: str, record: Record, file: FileId, storage: Storage) -> None:
    wrong = []
    for name, entry in record.tensors.items():
        (data,) = storage.load(path, [(entry.offset, entry.nbytes)], file, mapped=False).wait()
        if checksum(data) != entry.checksum:
            wrong.append(name)
    if wrong:
        raise DamagedRecord(f"the bytes of {', '.join(map(repr, wrong))} do not match their checksum")
    with safetensors.safe_open(path, "pt"):
        pass


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
    pipeline: str = "",
) -> Iterator[Found]:
    """Files that are of no more use, each with the reason in ``problem``.

    These are temporary files whose writer is gone; damaged records; and superseded records: a source file is there and
    has another size or mtime than the record was made from, or a newer record was made of the same item, sources and
    transforms. A relative source proves neither: from here, its path leads to another file or to none. Files of others
    are left alone, so that a wrong folder costs nobody a checkpoint.

    Args:
        directory: the cache directory.
        records: what :func:`survey` found in it.
        missing_sources: also records with a source file that is not there. Not by default: a disk may be unmounted.
        pipeline: also the records of this pipeline, see :func:`pipeline_of`. Nobody else can know that one is given up.
    """
    for path, nbytes in temporary.abandoned(directory):
        yield Found(Path(path), nbytes, "left behind by a writer that is gone")
    newest: dict[tuple[Any, ...], Found] = {}
    for found in records:
        if found.problem:
            if found.damaged:
                yield found
            continue
        reason = _outdated(found, missing_sources)
        if pipeline and found.pipeline == pipeline:
            reason = f"of the pipeline {pipeline[:SHOWN]}"
        if reason:
            yield replace(found, problem=reason)
            continue
        if found.has_relative_sources:
            continue
        same = (found.key.get("item", ""), found.key.get("transform", ""), *sorted(found.sources))
        other = newest.get(same)
        if other is not None:
            found, other = sorted((found, other), key=lambda f: -f.mtime_ns)
            yield replace(other, problem=f"superseded by {found.path.name}")
        newest[same] = found


def _outdated(found: Found, missing_sources: bool) -> str:
    for path, stat in found.sources.items():
        if not os.path.isabs(path):
            continue
        now = source_stat(path)
        if now is None:
            if missing_sources:
                return f"its source {path} is missing"
        elif list(now) != list(stat):
            return f"superseded: its source {path} has changed"
    return ""


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
        st = found.path.stat()
        if (st.st_ino, st.st_size, st.st_mtime_ns) != (found.inode, found.nbytes, found.mtime_ns):
            return False
        found.path.unlink()
    except FileNotFoundError:
        return False
    return True
