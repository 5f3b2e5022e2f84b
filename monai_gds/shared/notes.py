"""Notes of one kind in a cache directory: each process appends to its own file, and reads the files of all processes.

    <directory>/.index/<mark of the process>.<kind>        (monai_gds.shared.owner)

All datasets of a process share its file. Writes of processes never interleave, also on NFS, and there are no locks.
:meth:`Notes.tidy` merges the files of processes that have ended. A note is a line, ``<crc32 of the text> <text>``; torn
and garbled lines are skipped.

Notes are advisory: callers lose only time if a note is missing, repeated or garbled, or if nothing can be written.
Nothing here follows a link or touches a file whose name has another form. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from monai_gds import limits
from monai_gds.base.file_systems import opened
from monai_gds.base.process import PerProcess
from monai_gds.shared import temporary
from monai_gds.shared.owner import HOUR, PATTERN, gone, mark
from monai_gds.shared.temporary import ANY

FOLDER = ".index"

#: The files of this process, by folder, kind and permissions.
_own: PerProcess[dict[tuple[str, str, int], str]] = PerProcess(dict)

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK


class Notes:
    """The notes of one kind in one cache directory, as one process sees them. Thread-safe.

    Args:
        directory: the cache directory. Nothing is created in it before something is noted.
        kind: suffix of the files.
        file_mode: permissions that files have at most.
        patience: seconds after its last note at which a process that cannot be seen from here counts as ended.
    """

    def __init__(
        self, directory: str | os.PathLike[str], kind: str, file_mode: int = ANY, patience: float = HOUR
    ) -> None:
        self.directory = os.path.abspath(directory)
        self.file_mode = file_mode
        self._kind, self._patience = kind, patience
        self._name = re.compile(rf"{PATTERN}\.{kind}")
        self._read_up_to: dict[str, tuple[int, int]] = {}  # by file: its inode, and how much of it was read

    def append(self, texts: Iterable[bytes], make: bool = True) -> None:
        """Appends notes in one write to this process's file, if possible.

        The file is closed at once, so that others see the notes over NFS and no unmount has to wait.

        Args:
            texts: what is noted, without line ends.
            make: whether the file is made when it is missing. Somebody may be removing the directory.
        """
        notes = b"".join(map(line, texts))
        if not notes:
            return
        with (
            contextlib.suppress(OSError),
            self.folder(make) as folder,
            opened(self._own_file(), _APPEND | os.O_CREAT if make else _APPEND, self.file_mode, folder) as file,
        ):
            before = os.fstat(file).st_size
            if not before:
                temporary.share_file(file, os.fstat(folder), self.file_mode)
            if os.write(file, notes) != len(notes):  # a full disk cut a note off
                os.ftruncate(file, before)

    def _own_file(self) -> str:
        files, what = _own(), (self.directory, self._kind, self.file_mode)
        return files.get(what) or files.setdefault(what, f"{mark()}.{self._kind}")

    def added(self) -> dict[str, list[bytes]]:
        """The notes of all processes that were not read yet, by the names of their files."""
        found = {}
        with contextlib.suppress(OSError), self.folder() as folder:
            for name, st in self._files(folder):
                with contextlib.suppress(OSError):  # merged meanwhile, or another user's
                    found[name] = self._added(folder, name, st)
        return {name: texts for name, texts in found.items() if texts}

    def _added(self, folder: int, name: str, st: os.stat_result) -> list[bytes]:
        inode, begin = self._read_up_to.get(name, (st.st_ino, 0))
        if inode != st.st_ino or st.st_size < begin:
            begin = 0
        if st.st_size == begin:
            return []
        data = read(folder, name, begin)
        end = data.rfind(b"\n") + 1  # the rest, a note being written, is read later
        self._read_up_to[name] = st.st_ino, begin + end
        return _texts(data[:end])

    def tidy(self, merge: Callable[[list[list[bytes]]], Iterable[bytes]] = lambda files: chain(*files)) -> None:
        """Merges the files of ended processes if there are many.

        ``merge`` gets the notes of each file, the newest first, and returns those to keep: all of them by default, each
        once. Two processes may do this at once and be killed at any step: a file is removed only when another holds its
        notes. The oldest files beyond the size limit are removed too.
        """
        with contextlib.suppress(OSError), self.folder() as folder:
            sticky = os.fstat(folder).st_mode & stat.S_ISVTX  # then others' files stay
            found = [(st, name) for name, st in self._files(folder) if not sticky or st.st_uid == os.geteuid()]
            ended = [(st, name) for st, name in found if gone(name, st.st_mtime, self._patience, folder)]
            if len(ended) > limits.NOTE_FILES or sum(st.st_size for st, _ in ended) > limits.NOTE_BYTES:
                self._merge(folder, ended, merge)

    def running(self) -> set[str]:
        """The files of processes that still run, for all that can be seen from here."""
        with contextlib.suppress(OSError), self.folder() as folder:
            files = self._files(folder)
            return {name for name, st in files if not gone(name, st.st_mtime, self._patience, folder)}
        return set()

    def _files(self, folder: int) -> Iterator[tuple[str, os.stat_result]]:
        for name in filter(self._name.fullmatch, os.listdir(folder)):
            with contextlib.suppress(OSError):  # deleted by another process
                st = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(st.st_mode):
                    yield name, st

    def _merge(
        self,
        folder: int,
        ended: list[tuple[os.stat_result, str]],
        merge: Callable[[list[list[bytes]]], Iterable[bytes]],
    ) -> None:
        merged: dict[str, bytes] = {}
        total, file_mode = 0, self.file_mode
        for st, name in sorted(ended, key=lambda found: -found[0].st_mtime):
            total += st.st_size
            with contextlib.suppress(OSError):
                if total > limits.NOTE_BYTES:
                    os.unlink(name, dir_fd=folder)
                elif st.st_size < limits.NOTE_UNMERGED_BYTES:
                    merged[name] = read(folder, name)
                    file_mode &= st.st_mode  # what one user keeps from others stays so
        notes = b"".join(map(line, dict.fromkeys(merge(list(map(_texts, merged.values()))))))
        if notes:
            temporary.publish(self.directory, f"{mark()}.{self._kind}", notes, file_mode, into=folder)
        for name, data in merged.items():
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_size == len(data):  # else it was appended to
                    os.unlink(name, dir_fd=folder)

    @contextlib.contextmanager
    def folder(self, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder of notes."""
        flags = os.O_RDONLY | os.O_DIRECTORY
        with opened(self.directory, flags) as above, temporary.inside(above, FOLDER, make) as folder:
            yield folder


def line(text: bytes) -> bytes:
    """The line that holds a note."""
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _texts(notes: bytes) -> list[bytes]:
    """The texts of whole lines."""
    return [found[9:] for found in notes.split(b"\n") if found[9:] and line(found[9:]) == found + b"\n"]


def read(folder: int, name: str, begin: int = 0) -> bytes:
    """The bytes of a file from ``begin``. Raises OSError if it is not a file, cannot be read, or is far too large."""
    data, _ = temporary.read(folder, name, limits.NOTE_BYTES + 1, begin)
    if len(data) > limits.NOTE_BYTES:
        raise OSError(f"{name} is not a file of notes")
    return data
