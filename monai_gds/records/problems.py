"""Warnings about a cache directory: each problem is reported once, with advice, and never ends an epoch."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

from monai_gds.base.file_systems import has_no_inodes
from monai_gds.base.notices import Notice
from monai_gds.errors import CodecMissing, NewerRecord, RecordError, warn
from monai_gds.items.types import UnknownHere

#: Errors that concern the directory, its disk or this process rather than one file: hundreds of records have the same.
_SHARED = (
    errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
    errno.EOPNOTSUPP,
)  # fmt: skip

#: Errors of a whole disk, of which the name of a file says nothing.
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

_ADVICE: dict[Any, str] = {
    errno.ENOSPC: "free some space, or move {folder}",
    errno.EDQUOT: "free some of your quota, or move {folder}",
    errno.EROFS: "mount it writable, or move {folder}",
    errno.EACCES: "change the permissions of {path}, or move {folder}",
    errno.EPERM: "change the permissions of {path}, or move {folder}",
    errno.EIO: "the disk fails: look at the kernel's messages (dmesg), and move {folder}",
    errno.ESTALE: "the file server has lost it: mount it again",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
    errno.EOPNOTSUPP: 'GDSDataset(backend="posix") reads without it; `monai-gds doctor` shows more',
    errno.ENFILE: "this machine has too many files open: raise fs.file-max",
}


def is_of_record(error: Exception) -> bool:
    """Whether an error costs the record only: it is damaged or cannot be read, or declares more than fits into memory.

    An error of CUDA is not about a record, and neither is too little memory there.
    """
    of_memory = isinstance(error, MemoryError) or (type(error) is RuntimeError and "CPUAllocator" in str(error))
    return isinstance(error, (RecordError, OSError)) or of_memory


class Problems:
    """Reports the problems of one cache directory.

    Args:
        directory: the cache directory.
        unmade: the user has been warned that it cannot be made, so nothing is reported until it exists.
        copies: it holds copies of records: messages call it ``local_dir``, not ``cache_dir``.
        run: processes with an equal value report each problem once; None: each process reports it.
    """

    def __init__(self, directory: str, unmade: bool, copies: bool = False, run: Any = None) -> None:
        self._directory = directory
        self._run = run
        self._unmade = unmade
        self._folder = "local_dir" if copies else "cache_dir"
        self._instead = "read from cache_dir" if copies else "computed again"
        self._reported: set[Any] = set()
        self._newer: set[str] = set()
        self._lock = threading.Lock()

    def must_not_replace(self, path: str) -> bool:
        """Whether a record was written by a newer version, which this one can neither read nor replace."""
        return path in self._newer

    def unusable(self, path: str, error: Exception) -> None:
        """Warns, once per file, of a record that cannot be used. It will be computed again and replaced.

        An error that concerns the whole directory is reported once in all, as are records of a newer version, and those
        that hold the same type that is unknown here.
        """
        if isinstance(error, NewerRecord):
            self._newer.add(path)
            advice = "Install it, or" if isinstance(error, CodecMissing) else "Update monai_gds, or"
            self.warn(
                type(error),
                f"cache record {path} cannot be used and is computed without being replaced: {error}; the same goes "
                f"for others of its kind. {advice} give this version a cache_dir of its own",
            )
            return
        once_for: Any = path
        reason = str(error)
        if isinstance(error, UnknownHere):
            once_for, reason = reason, f"{reason}; the same goes for others, without another warning"
        elif isinstance(error, OSError) and error.errno in _SHARED:
            advised = with_advice(error, self._folder)
            once_for, reason = error.errno, f"{advised}; the same goes for others, without another warning"
        self.warn(once_for, f"cache record {path} cannot be used and is {self._instead}: {reason}")
        self._reported.add(path)

    def unwritable(self, error: OSError) -> None:
        """Warns, once per kind of error, that records cannot be saved."""
        advised = with_advice(error, self._folder)
        self.warn(error.errno, f"nothing more is cached in {self._directory} while this lasts: {advised}")

    def warn(self, once_for: Any, message: str) -> None:
        """Gives a CacheWarning, unless one was given for the same thing."""
        if self._unmade and not os.path.isdir(self._directory):
            return
        with self._lock:
            if once_for in self._reported:
                return
            self._reported.add(once_for)
        if self._run is not None and not Notice(self._directory, self._run, once_for).is_new():
            return
        warn(message)


def with_advice(error: OSError, folder: str = "cache_dir") -> str:
    """The text of a disk error, followed by what to do about it; ``folder`` is the argument that names the folder."""
    path, there = None, "the folder"  # or what exists of the path
    if error.filename is not None:
        path = Path(os.path.abspath(os.fsdecode(error.filename)))
        there = str(next((p for p in (path, *path.parents) if os.path.exists(p)), path))
    advice = _ADVICE.get(error.errno, "").format(path=there, folder=folder)
    if error.errno == errno.ENOTDIR and error.filename is not None:
        advice = f"{'a part of it' if os.path.isdir(there) else there} is a file: name another folder"
    if error.errno == errno.ENOSPC and path is not None and has_no_inodes(path.parent):
        advice = f"the file system has no room for more files (df -i): delete some, or move {folder}"
    forbidden = error.errno in (errno.EACCES, errno.EPERM) and there != str(path)  # by the folder that is named
    nameless = error.strerror and (error.errno in _OF_DISK or error.filename is None or forbidden)
    return f"{error.strerror if nameless else error}" + (f" ({advice})" if advice else "")
