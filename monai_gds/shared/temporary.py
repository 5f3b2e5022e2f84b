"""Temporary files of a cache directory: writing records through them, and removing abandoned ones.

    <directory>/.tmp/<32 hex digits>.<mark of the writer>        (monai_gds.shared.owner)
    <directory>/.tmp/job.<32 hex digits>.<mark of the writer>    needed for days, by other hosts too

``.tmp`` may hold other people's files, and may have been replaced by a link to their folder. It is opened without
following links, and everything is deleted relative to that descriptor. Only regular files whose names have exactly the
form above are deleted; nothing else there is touched.

Files get the group and mode of the cache directory. So whoever may read the directory may read its records,
and whoever may add files to it may add records, whatever the umask of the user who came first. In a folder with the
sticky bit, where users keep their hands off each other's files, only the owner may write to a file; nobody needs to,
since records are replaced and never changed.

Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from functools import partial

from monai_gds.base import file_systems
from monai_gds.shared.owner import HOUR, PATTERN, gone, mark

#: The folder for temporary files in a cache directory.
FOLDER = ".tmp"

#: How the names of files begin that other hosts need for days.
JOB = "job."

#: Seconds after which such a file of a process that cannot be seen from here is removed.
_MONTH = 30 * 24 * HOUR

#: The permissions of files where the user has set no limit.
ANY = 0o666

_OWN = 0o600

_NAME = re.compile(rf"(?:{re.escape(JOB)})?[0-9a-f]{{32}}\.{PATTERN}")

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: Flags to open a file for reading.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe would wait for its writer


# ---------------------------------------------------------------------------------------------------------------------
# Folders, and the files in them by descriptor: links are never followed


@contextlib.contextmanager
def opened(directory: str | os.PathLike[str], make: bool = False) -> Iterator[int]:
    """Opens the ``.tmp`` of a cache directory for ``dir_fd=``, as :func:`inside`.

    With ``make``, a missing cache directory is made too.

    Raises:
        FileNotFoundError: it is missing, and not to be made.
        NotADirectoryError: it is a link or a file. The message names it and the remedy.
        OSError: no permission, read-only.
    """
    if make and not os.path.exists(directory):
        os.makedirs(directory, exist_ok=True)
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    with file_systems.opened(directory, flags) as above, inside(above, FOLDER, make) as folder:
        yield folder


@contextlib.contextmanager
def inside(above: int, name: str, make: bool = False) -> Iterator[int]:
    """Opens a folder in an open one.

    With ``make``, a missing folder is made. One of this user's own is given the group and mode of the one above, so
    that whoever may add files there may add records.
    """
    try:
        folder = _open_folder(above, name)
    except FileNotFoundError:
        if not make:
            raise
        with contextlib.suppress(FileExistsError):  # another process made it
            os.mkdir(name, dir_fd=above)
        folder = _open_folder(above, name)
    try:
        if make:
            st = os.fstat(above)
            _share(folder, os.fstat(folder), st, stat.S_IMODE(st.st_mode))
        yield folder
    finally:
        os.close(folder)


def _open_folder(above: int, name: str) -> int:
    try:
        return os.open(name, _OPEN_FOLDER, dir_fd=above)
    except OSError as e:
        if e.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        path = os.path.join(os.readlink(f"/proc/self/fd/{above}"), name)
        what = "a symbolic link, which is not followed" if os.path.islink(path) else "not a folder"
        raise NotADirectoryError(
            errno.ENOTDIR, f"{path} is {what}, and records are written in a folder there: remove it, or move cache_dir"
        ) from None


def create(folder: int, name: str, content: bytes = b"", at_most: int = ANY) -> None:
    """Creates a file, which has the group and mode of its folder, but no permissions besides ``at_most``.

    If it cannot be written, nothing is left of it.
    """
    fd = os.open(name, _CREATE, at_most, dir_fd=folder)
    try:
        with open(fd, "wb") as file:
            share_file(fd, os.fstat(folder), at_most)
            file.write(content)
    except OSError:
        os.unlink(name, dir_fd=folder)
        raise


def read(folder: int, name: str, most: int, begin: int = 0) -> tuple[bytes, os.stat_result]:
    """At most ``most`` bytes of a file from ``begin``, and what the file was then.

    Raises:
        OSError: it is not a regular file, or cannot be read.
    """
    with file_systems.opened(name, READ, folder=folder) as file:  # makes NFS ask the server; a plain stat may be stale
        st = os.fstat(file)
        if not stat.S_ISREG(st.st_mode):
            raise OSError(f"{name} is not a file")
        return file_systems.read_at(file, min(most, max(0, st.st_size - begin)), begin), st


def share_file(file: int, above: os.stat_result, at_most: int = ANY) -> None:
    """Gives a file of this user's the group and mode of a folder, as far as permitted.

    Args:
        file: its descriptor. A file that is not this user's own, or has a second name, stays as it is.
        above: the state of the folder.
        at_most: permissions that the file may have at most.
    """
    mode = above.st_mode & at_most & (~0o022 if above.st_mode & stat.S_ISVTX else ANY) | _OWN
    st = os.fstat(file)
    if stat.S_ISREG(st.st_mode) and st.st_nlink <= 1:
        _share(file, st, above, mode & ANY)


def _share(target: int, st: os.stat_result, above: os.stat_result, mode: int) -> None:
    if st.st_uid != os.geteuid():
        return
    if st.st_gid != above.st_gid:
        with contextlib.suppress(OSError):  # not a member of that group
            os.fchown(target, -1, above.st_gid)
            st = os.fstat(target)  # fchown may have cleared bits
    if stat.S_IMODE(st.st_mode) != mode:
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(target, mode)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@contextlib.contextmanager
def being_written(
    directory: str, digest: str, target: str, at_most: int = ANY, into: int | None = None
) -> Iterator[str]:
    """Provides the path of a temporary file, which is renamed to ``target`` at the end of the block.

    The file gets the group and mode of the directory, but no permissions besides ``at_most``, before it is renamed.

    After an error nothing is left of it. A ``.tmp`` that is a link is an error before anything is written. Storage
    backends take paths, so the file is created and renamed by path. No other process uses this name, and the file must
    not exist, so a link put there at this very moment cannot redirect the write to an existing file.

    Args:
        directory: the cache directory.
        digest: the digest of the record.
        target: the path that the file gets; or its name in the folder ``into``.
        at_most: permissions that the file may have at most.
        into: descriptor of a folder.

    Raises:
        OSError: as by :func:`opened`, or the file cannot be renamed.
    """
    with opened(directory, make=True) as folder:
        name = f"{digest}.{mark()}"
        path = os.path.join(directory, FOLDER, name)
        try:
            yield path
            with contextlib.suppress(OSError), file_systems.opened(name, READ, folder=folder) as file:
                share_file(file, os.stat(directory), at_most)  # if that fails, it is a record all the same
            os.rename(path, target, **({} if into is None else {"dst_dir_fd": into}))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise


def publish(directory: str, target: str, content: bytes, at_most: int = ANY, into: int | None = None) -> None:
    """Writes a file as :func:`being_written` does: all of it becomes visible, and survives a power cut, or nothing."""
    with (
        being_written(directory, "0" * 32, target, at_most, into) as path,
        open(path, "xb", opener=partial(os.open, mode=at_most)) as file,
    ):
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------------------------------------------------------------
# Removing


def is_temporary(name: str) -> bool:
    """Whether a file name has exactly the form of a temporary file's."""
    return _NAME.fullmatch(name) is not None


def tidy(directory: str | os.PathLike[str]) -> None:
    """Removes abandoned temporary files of a cache directory, as far as permitted."""
    for path, _ in abandoned(directory):
        with contextlib.suppress(OSError):
            remove(directory, os.path.basename(path))


def abandoned(directory: str | os.PathLike[str]) -> list[tuple[str, int]]:
    """The paths and sizes of the temporary files of a cache directory whose writers have ended."""
    with contextlib.suppress(OSError), opened(directory) as folder:
        found = _abandoned(folder, os.listdir(folder))
        return [(os.path.join(directory, FOLDER, name), nbytes) for name, nbytes in found]
    return []


def remove(directory: str | os.PathLike[str], name: str) -> bool:
    """Deletes the file of this name that :func:`abandoned` returned, if it still would. Returns whether it did.

    Raises:
        OSError: no permission, read-only.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), opened(directory) as folder:
        for _ in _abandoned(folder, [name]):
            os.unlink(name, dir_fd=folder)
            return True
    return False


def _abandoned(folder: int, names: list[str]) -> Iterator[tuple[str, int]]:
    for name in filter(is_temporary, names):
        with contextlib.suppress(OSError):  # removed meanwhile
            st = os.stat(name, dir_fd=folder, follow_symlinks=False)
            patience = _MONTH if name.startswith(JOB) else HOUR
            if stat.S_ISREG(st.st_mode) and gone(name, st.st_mtime, patience, folder):
                yield name, st.st_size
