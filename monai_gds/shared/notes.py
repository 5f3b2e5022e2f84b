"""Notes of one kind in a cache directory: each process appends to its own file, and reads the files of all processes.

    <directory>/.index/<place>.<pid>.<start>.<n>.<kind>

So writes never interleave, also on NFS, and there are no locks. :meth:`Notes.tidy` merges the files of processes that
have ended.

Notes are advisory: callers lose only time if a note is missing, repeated or garbled, or if nothing can be written.
Nothing here follows a link or touches a file whose name has another form. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

from monai_gds import limits
from monai_gds.base.file_systems import read_at
from monai_gds.base.process import PerProcess
from monai_gds.shared.permissions import ANY, share_file, share_folder
from monai_gds.shared.process_names import FOREIGN_SECONDS, PATTERN, still_runs, this_process

__all__ = [
    "FOLDER",
    "Notes",
    "line",
    "lines_in",
    "open_folder",
    "publish",
    "read",
    "remove_unfinished",
    "whole_lines",
    "writer_of",
]

FOLDER = ".index"

_UNFINISHED = re.compile(rf"\.{PATTERN}\.[0-9]+\.new")

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe would wait for its writer
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW

#: Numbers the files of this process.
_counter = itertools.count()


class Notes:
    """The notes of one kind in one cache directory, as one process sees them. Thread-safe.

    Args:
        directory: the cache directory. Nothing is created in it before something is noted.
        kind: suffix of the files.
        whole: bytes of a file -> how many of them are whole notes. The rest, a note being written, is read later.
        file_mode: permissions that files have at most.
        foreign_seconds: age of its last note at which the file of a process that cannot be seen from here is merged.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        kind: str,
        whole: Callable[[bytes], int],
        file_mode: int = ANY,
        foreign_seconds: float = FOREIGN_SECONDS,
    ) -> None:
        self.directory = os.path.abspath(directory)
        self.file_mode = file_mode
        self._kind, self._whole, self._foreign_seconds = kind, whole, foreign_seconds
        self._name = re.compile(rf"{PATTERN}\.[0-9]+\.{kind}")
        self._own = PerProcess(lambda: _new_name(kind))
        self._read_up_to: dict[str, tuple[int, int]] = {}  # by file: its inode, and how much of it was read

    def append(self, notes: bytes) -> bool:
        """Appends whole notes in one write to this process's file, if possible, and returns whether it was.

        The file is closed at once, so that others see the notes over NFS and no unmount has to wait.
        """
        whole = False
        with contextlib.suppress(OSError), self.folder(make=True) as folder:
            fd = os.open(self._own(), _APPEND, self.file_mode, dir_fd=folder)
            try:
                before = os.fstat(fd).st_size
                if not before:
                    share_file(fd, os.fstat(folder), self.file_mode)
                whole = os.write(fd, notes) == len(notes)
                if not whole:  # a full disk cut a note off
                    os.ftruncate(fd, before)
            finally:
                os.close(fd)
        return whole

    def added(self) -> dict[str, bytes]:
        """The notes of all processes that were not read yet, by the names of their files."""
        blocks = {}
        with contextlib.suppress(OSError), self.folder() as folder:
            for name in os.listdir(folder):
                if self._name.fullmatch(name):
                    blocks[name] = self._added(folder, name)
        return {name: block for name, block in blocks.items() if block}

    def _added(self, folder: int, name: str) -> bytes:
        try:
            st = os.stat(name, dir_fd=folder, follow_symlinks=False)
            inode, begin = self._read_up_to.get(name, (st.st_ino, 0))
            if inode != st.st_ino or st.st_size < begin:
                begin = 0
            if st.st_size == begin:
                return b""
            data = read(folder, name, begin)
        except OSError:  # merged meanwhile, or another user's
            return b""
        end = self._whole(data)
        self._read_up_to[name] = st.st_ino, begin + end
        return data[:end]

    def tidy(self, merge: Callable[[list[bytes]], bytes]) -> None:
        """Merges the files of ended processes if there are many, and removes unfinished files.

        ``merge`` gets the notes of each file, the newest first, and returns those to keep. Two processes may do this at
        once and be killed at any step: a file is removed only when another holds its notes. The oldest files beyond the
        size limit are removed too.
        """
        with contextlib.suppress(OSError), self.folder() as folder:
            remove_unfinished(folder)
            names = [name for name in os.listdir(folder) if self._name.fullmatch(name)]
            ended = [name for name in names if _is_abandoned(folder, name, self._foreign_seconds)]
            nbytes = sum(os.stat(name, dir_fd=folder, follow_symlinks=False).st_size for name in ended)
            if len(ended) > limits.NOTE_FILES or nbytes > limits.NOTE_BYTES:
                self._merge(folder, ended, merge)

    def _merge(self, folder: int, names: Sequence[str], merge: Callable[[list[bytes]], bytes]) -> None:
        merged: dict[str, bytes] = {}
        total, file_mode = 0, self.file_mode
        stats = [(os.stat(name, dir_fd=folder, follow_symlinks=False), name) for name in names]
        for st, name in sorted(stats, key=lambda found: -found[0].st_mtime):
            total += st.st_size
            if total > limits.NOTE_BYTES:
                _unlink(folder, name)
            elif st.st_size < limits.NOTE_UNMERGED_BYTES:
                with contextlib.suppress(OSError):
                    merged[name] = read(folder, name)
                    file_mode &= st.st_mode  # what one user keeps from others stays so
        notes = merge(list(merged.values()))
        if notes:
            publish(folder, _new_name(self._kind), notes, file_mode)
        for name, data in merged.items():
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_size == len(data):  # else it was appended to
                    os.unlink(name, dir_fd=folder)

    @contextlib.contextmanager
    def folder(self, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder of notes."""
        above = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with open_folder(FOLDER, above, make) as folder:
                yield folder
        finally:
            os.close(above)


def _new_name(suffix: str) -> str:
    return f"{this_process()}.{next(_counter)}.{suffix}"


def writer_of(name: str) -> str:
    """The name of the process whose file this is; see :mod:`monai_gds.shared.process_names`."""
    return ".".join(name.removeprefix(".").split(".")[:3])


# ---------------------------------------------------------------------------------------------------------------------
# Notes that are lines of text, each with its checksum: ``<crc32 of the text> <text>``


def line(text: bytes) -> bytes:
    """A line that holds this text."""
    return b"%08x %s\n" % (zlib.crc32(text), text)


def lines_in(notes: bytes) -> Iterator[bytes]:
    """The texts of the lines of a block. Torn and garbled lines are skipped."""
    for found in notes.split(b"\n"):
        text = found[9:]
        with contextlib.suppress(ValueError):
            if text and int(found[:8], 16) == zlib.crc32(text):
                yield text


def whole_lines(notes: bytes) -> int:
    """How many of these bytes are whole lines."""
    return notes.rfind(b"\n") + 1


# ---------------------------------------------------------------------------------------------------------------------
# Files below the folder's descriptor


@contextlib.contextmanager
def open_folder(name: str, above: int, make: bool = False) -> Iterator[int]:
    """Opens a folder. It is made, if missing, with the permissions of its parent, so that a group may write to both."""
    made = False
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)
            made = True
    folder = os.open(name, _FOLDER_FLAGS, dir_fd=above)
    try:
        if made:
            share_folder(folder, os.fstat(above))
        yield folder
    finally:
        os.close(folder)


def read(folder: int, name: str, begin: int = 0) -> bytes:
    """The bytes of a regular file. Raises OSError if it cannot be read, is not one, or is far too large."""
    fd = os.open(name, _READ, dir_fd=folder)
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or st.st_size - begin > limits.NOTE_BYTES:
            raise OSError(f"{name} is not a file of notes")
        return read_at(fd, max(0, st.st_size - begin), begin)
    finally:
        os.close(fd)


def publish(folder: int, name: str, data: bytes, file_mode: int = ANY) -> None:
    """Writes a file atomically. It has the folder's group and mode, and no permissions besides ``file_mode``."""
    unfinished = "." + _new_name("new")
    fd = os.open(unfinished, _CREATE, file_mode, dir_fd=folder)
    try:
        try:
            share_file(fd, os.fstat(folder), file_mode)
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _unlink(folder, unfinished)
        raise


def remove_unfinished(folder: int) -> None:
    """Removes what killed processes left behind in :func:`publish`."""
    for name in os.listdir(folder):
        if _UNFINISHED.fullmatch(name) and _is_abandoned(folder, name):
            _unlink(folder, name)


def _unlink(folder: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def _is_abandoned(folder: int, name: str, foreign_seconds: float = FOREIGN_SECONDS) -> bool:
    """Whether a file's writer has ended, and this user may delete the file."""
    try:
        st = os.stat(name, dir_fd=folder, follow_symlinks=False)
        sticky = os.fstat(folder).st_mode & stat.S_ISVTX
    except OSError:  # deleted by another process
        return False
    if not stat.S_ISREG(st.st_mode) or (sticky and st.st_uid != os.geteuid()):
        return False
    runs = still_runs(writer_of(name))
    return time.time() - st.st_mtime > foreign_seconds if runs is None else not runs
