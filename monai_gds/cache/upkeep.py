"""Looking after a cache directory from outside: list, verify, prune. Used by the command ``monai-gds cache``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors

from monai_gds.cache.checksum import checksum
from monai_gds.cache.directory import SUFFIX, abandoned, read_record
from monai_gds.cache.key import source_stat
from monai_gds.cache.record import Entry, Record
from monai_gds.errors import NewerRecord, RecordError
from monai_gds.storage import Storage, open_storage

__all__ = ["Found", "problem_of", "prunable", "record_files", "survey"]

#: What a writer names a record: its key's digest. Whatever is named otherwise is not ours to delete.
_RECORD_NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}")


@dataclass(frozen=True, slots=True)
class Found:
    """A file in a cache directory; ``problem`` says what is wrong with it, or why it may go."""

    path: Path
    nbytes: int
    problem: str = ""
    mtime_ns: int = 0
    key: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Entry] = field(default_factory=dict)

    @property
    def sources(self) -> dict[str, list[int]]:
        """Size and mtime of the source files, as they were when the record was made."""
        return dict(self.key.get("sources", {}))


def record_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The files that are records by their name, and any others but hidden ones: they do not belong there."""
    return sorted(p for p in Path(directory).iterdir() if p.is_file() and not p.name.startswith("."))


def survey(directory: str | os.PathLike[str]) -> Iterator[Found]:
    """Every record of a directory by its header, damaged ones with what is wrong."""
    storage = open_storage("posix", "cpu")
    for path in record_files(directory):
        found = _look(path, storage)
        if found is not None:
            yield found


def _look(path: Path, storage: Storage) -> Found | None:
    try:
        st = path.stat()
        record, _, _ = read_record(str(path), storage)
    except FileNotFoundError:  # deleted or replaced meanwhile
        return None
    except (RecordError, OSError) as e:
        newer = isinstance(e, NewerRecord)
        return Found(path, st.st_size, f"{'newer' if newer else 'unreadable'}: {e}", st.st_mtime_ns)
    return Found(path, st.st_size, "", st.st_mtime_ns, record.key, record.tensors)


def problem_of(path: Path) -> str:
    """What is wrong with a record, every byte of it checked, also by the safetensors library; empty when nothing is."""
    if path.suffix != SUFFIX:
        return "it is not a record of monai_gds"
    storage = open_storage("posix", "cpu")
    try:
        record, file, _ = read_record(str(path), storage)
        wrong = _wrong_tensors(str(path), record, storage)
        with safetensors.safe_open(path, "pt"):
            pass
        if wrong:
            return f"the bytes of {', '.join(map(repr, wrong))} do not match their checksum"
    except (RecordError, OSError, safetensors.SafetensorError) as e:
        return str(e)
    return "" if file.size == record.nbytes else "its size changed"


def _wrong_tensors(path: str, record: Record, storage: Storage) -> list[str]:
    wrong = []
    for name, entry in record.tensors.items():
        (data,) = storage.load(path, [(entry.offset, entry.nbytes)], mapped=False).wait()
        if checksum(data) != entry.checksum:
            wrong.append(name)
    return wrong


def prunable(directory: str | os.PathLike[str], *, missing_sources: bool = False) -> Iterator[Found]:
    """Files that are of no more use, each with the reason in ``problem``.

    These are temporary files whose writer is gone; damaged records (but not those of a newer version, which a newer
    monai_gds can read); and superseded records: a source file is there and has another size or mtime than the record
    was made from, or a newer record was made of the same item and transforms. Files of others are left alone, so that
    a wrong folder costs nobody a checkpoint: only what is named as a record is taken for a damaged one.

    Args:
        directory: the cache directory.
        missing_sources: also records with a source file that is not there. Not by default: a disk may be unmounted.
    """
    for temporary in abandoned(os.fspath(directory)):
        yield Found(Path(temporary), _size(temporary), "left behind by a writer that is gone")
    newest: dict[tuple[str, str], Found] = {}
    for found in survey(directory):
        if found.problem:
            if not found.problem.startswith("newer") and _RECORD_NAME.fullmatch(found.path.name):
                yield found
            continue
        reason = _outdated(found, missing_sources)
        if reason:
            yield _because(found, reason)
            continue
        same = (found.key.get("item", ""), found.key.get("transform", ""))
        other = newest.get(same)
        if other is not None:
            found, other = sorted((found, other), key=lambda f: -f.mtime_ns)
            yield _because(other, f"superseded by {found.path.name}")
        newest[same] = found


def _outdated(found: Found, missing_sources: bool) -> str:
    for path, stat in found.sources.items():
        now = source_stat(path)
        if now is None:
            if missing_sources:
                return f"its source {path} is missing"
        elif list(now) != list(stat):
            return f"superseded: its source {path} has changed"
    return ""


def _because(found: Found, reason: str) -> Found:
    return Found(found.path, found.nbytes, reason, found.mtime_ns, found.key, found.tensors)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
