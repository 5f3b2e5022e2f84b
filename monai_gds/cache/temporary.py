"""Temporary files of a cache directory: writing through one, and removing those that nobody writes any more.

    <directory>/.tmp/<32 hex digits>.<boot>-<pid namespace>.<pid>.<start time>.<n>

Called by :mod:`monai_gds.cache.directory`, which writes records and tidies up when a dataset is made, and by
:mod:`monai_gds.cache.upkeep` for ``prune``. The name says whose file it is, so that other processes can tell whether
its owner still runs.

``.tmp`` may hold other people's files, and may have been made a link to other people's folder. It is opened without
following links and everything is deleted relative to that descriptor; only regular files go, and only those whose names
have exactly the form above. Whatever else lies there is not touched.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = [
    "FOLDER",
    "Abandoned",
    "abandoned",
    "being_written",
    "is_temporary",
    "now",
    "open_tmp",
    "opened",
    "owner",
    "owner_lives",
    "remove",
    "tidy",
]

#: Where in a cache directory the temporary files are.
FOLDER = ".tmp"

#: The place of an owner on a machine that does not tell its boot or pid namespace.
_UNKNOWN = "unknown"

_OWNER = rf"(?:[0-9a-f]{{8}}-[0-9]+|{_UNKNOWN})\.[0-9]+\.(?:[0-9]+|None)"
_OWNER_TEXT = re.compile(_OWNER)
_NAME = re.compile(rf"[0-9a-f]{{32}}\.(?P<owner>{_OWNER})\.[0-9]+")

#: A file whose owner cannot be checked from here (another host or container) is left alone this long.
_FOREIGN_SECONDS = 3600

#: Numbers the files of this process, which may have several caches over one directory.
_counter = itertools.count()


class Abandoned(NamedTuple):
    """A temporary file whose owner is gone.

    Attributes:
        path: where it is.
        nbytes: its size.
    """

    path: str
    nbytes: int


def open_tmp(directory: str | os.PathLike[str], create: bool = False) -> int:
    """Opens the ``.tmp`` of a cache directory for ``dir_fd=``; never what a link there points to.

    Args:
        directory: the cache directory.
        create: make the folder, and the cache directory, where they are missing.

    Returns:
        A descriptor, which the caller closes.

    Raises:
        FileNotFoundError: it is missing, and not to be made.
        NotADirectoryError: it is a link or a file; the message names it and the remedy.
        OSError: no permission, read-only.
    """
    path = os.path.join(directory, FOLDER)
    try:
        return _open_folder(path)
    except FileNotFoundError:
        if not create:
            raise
    os.makedirs(directory, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another process made it; or it is a link, which opening it refuses
        os.mkdir(path)
    return _open_folder(path)


def _open_folder(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        if e.errno not in (errno.ENOTDIR, errno.ELOOP) or not os.path.lexists(path):
            raise
        what = "a symbolic link, which is not followed" if os.path.islink(path) else "not a folder"
        raise NotADirectoryError(
            errno.ENOTDIR, f"{path} is {what}, and records are written in a folder there: remove it, or move cache_dir"
        ) from None


# Writing


@contextlib.contextmanager
def being_written(directory: str, digest: str, target: str) -> Iterator[str]:
    """The path of a temporary file to write, which becomes ``target`` at the end of the block.

    After an error nothing is left of it. A ``.tmp`` that is a link is an error before anything is written. Storage
    backends take paths, so the file is created and renamed by its path: it must not exist, and no other process makes
    one of this name, so that a link put there at this very moment leads to no file of somebody's that could be changed.

    Args:
        directory: the cache directory.
        digest: 32 hex digits that the name begins with.
        target: the path that the file gets.

    Raises:
        OSError: as by :func:`open_tmp`, or the file cannot be renamed.
    """
    folder = open_tmp(directory, create=True)
    try:
        name = _name(digest)
        path = os.path.join(directory, FOLDER, name)
        try:
            yield path
            os.rename(path, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise
    finally:
        os.close(folder)


def _name(digest: str) -> str:
    return f"{digest}.{owner()}.{next(_counter)}"


# Removing


def is_temporary(name: str) -> bool:
    """Whether a file name has exactly the form of a temporary file's."""
    return _NAME.fullmatch(name) is not None


def tidy(directory: str | os.PathLike[str]) -> None:
    """Removes the temporary files of a cache directory whose owner is gone, as far as that is permitted."""
    with contextlib.suppress(OSError), opened(directory) as folder:
        for name, _ in _abandoned(folder, os.listdir(folder)):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)


def abandoned(directory: str | os.PathLike[str]) -> list[Abandoned]:
    """The temporary files of a cache directory whose owner is gone."""
    try:
        with opened(directory) as folder:
            found = list(_abandoned(folder, os.listdir(folder)))
    except OSError:
        return []
    return [Abandoned(os.path.join(directory, FOLDER, name), st.st_size) for name, st in found]


def remove(directory: str | os.PathLike[str], name: str) -> bool:
    """Deletes one file that :func:`abandoned` gave, if it would give it again.

    Args:
        directory: the cache directory.
        name: the file's name in its ``.tmp``.

    Returns:
        Whether it was deleted.

    Raises:
        OSError: no permission, read-only.
    """
    try:
        with opened(directory) as folder:
            for _ in _abandoned(folder, [name]):
                os.unlink(name, dir_fd=folder)
                return True
    except (FileNotFoundError, NotADirectoryError):
        pass
    return False


@contextlib.contextmanager
def opened(directory: str | os.PathLike[str], create: bool = False) -> Iterator[int]:
    """:func:`open_tmp` for a ``with`` block, which closes the descriptor."""
    folder = open_tmp(directory, create)
    try:
        yield folder
    finally:
        os.close(folder)


def _abandoned(folder: int, names: list[str]) -> Iterator[tuple[str, os.stat_result]]:
    clock = functools.cache(lambda: now(folder))  # asked once, and only where it matters
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        try:
            st = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISREG(st.st_mode) and not _is_written(match["owner"], st, clock):
            yield name, st


def _is_written(by: str, st: os.stat_result, clock: Callable[[], float | None]) -> bool:
    lives = owner_lives(by)
    if lives is not None:
        return lives
    time = clock()
    return time is None or time - st.st_mtime < _FOREIGN_SECONDS


def now(folder: int) -> float | None:
    """The time by the clock that a folder's files get their times from, which may be a file server's.

    It is the time of a file that is made to find out.

    Args:
        folder: descriptor of a ``.tmp``.

    Returns:
        Seconds since the epoch; None where no file can be made: read-only, full, no permission.
    """
    name = _name("0" * 32)
    try:
        probe = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError:
        return None
    try:
        return os.fstat(probe).st_mtime
    finally:
        os.close(probe)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)


# Owners


def owner() -> str:
    """This process, in words that no other process has: ``<boot>-<pid namespace>.<pid>.<start time>``."""
    return f"{_place()}.{os.getpid()}.{_started(os.getpid())}"


def owner_lives(text: str) -> bool | None:
    """Whether the process that :func:`owner` named still runs.

    Returns:
        None where that cannot be told from here: a process of another host or container, one that ``/proc`` does not
        show, or a text that names none.
    """
    place = _place()
    if place == _UNKNOWN or not _OWNER_TEXT.fullmatch(text):
        return None
    where, pid, started = text.split(".")
    if where != place:
        return None
    start = _started(pid)
    if start is None and _is_hidden(pid):
        return None
    return start == started


def _place() -> str:
    """Where process ids mean what they mean here: this boot of this machine, this pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read(8)
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return _UNKNOWN


def _started(pid: int | str) -> str | None:
    """When a process started, in clock ticks since boot; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _is_hidden(pid: str) -> bool:
    """Whether there is a process that /proc does not show: another user's, where it is mounted with hidepid."""
    try:
        os.kill(int(pid), 0)  # sends nothing
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        pass
    return False
