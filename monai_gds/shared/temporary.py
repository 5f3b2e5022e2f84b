"""Temporary files of a cache directory: writing records through them, and removing abandoned ones.

    <directory>/.tmp/<32 hex digits>.<boot>-<pid namespace>.<pid>.<start time>.<n>

The name of a file contains that of its writer (:mod:`monai_gds.shared.process_names`), so that other processes can tell
whether it runs.

``.tmp`` may hold other people's files, and may have been replaced by a link to their folder. It is opened without
following links, and everything is deleted relative to that descriptor. Only regular files whose names have exactly the
form above are deleted; nothing else there is touched.
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

from monai_gds.shared.permissions import ANY, share_file, share_folder
from monai_gds.shared.process_names import FOREIGN_SECONDS, PATTERN, still_runs, this_process

__all__ = [
    "FOLDER",
    "Abandoned",
    "abandoned",
    "being_written",
    "is_temporary",
    "opened",
    "remove",
    "remove_record",
    "server_time",
    "tidy",
]

#: The folder for temporary files in a cache directory.
FOLDER = ".tmp"

_NAME = re.compile(rf"[0-9a-f]{{32}}\.(?P<writer>{PATTERN})\.[0-9]+")

#: Numbers the files of this process, which may have several caches over one directory.
_counter = itertools.count()


class Abandoned(NamedTuple):
    """A temporary file whose writer has ended."""

    path: str
    nbytes: int


@contextlib.contextmanager
def opened(directory: str | os.PathLike[str], create: bool = False) -> Iterator[int]:
    """Opens the ``.tmp`` of a cache directory for ``dir_fd=``, never following a link.

    With ``create``, a missing folder is made, and so is the cache directory. One of this user's own is given the group
    and mode of the cache directory, so that whoever may add files there may add records.

    Raises:
        FileNotFoundError: it is missing, and not to be created.
        NotADirectoryError: it is a link or a file. The message names it and the remedy.
        OSError: no permission, read-only.
    """
    path = os.path.join(directory, FOLDER)
    try:
        folder = _open_folder(path)
    except FileNotFoundError:
        if not create:
            raise
        os.makedirs(directory, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another process made it; or it is a link, refused below
            os.mkdir(path)
        folder = _open_folder(path)
    try:
        if create:
            share_folder(folder, os.stat(directory))
        yield folder
    finally:
        os.close(folder)


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
def being_written(directory: str, digest: str, target: str, at_most: int = ANY) -> Iterator[str]:
    """Provides the path of a temporary file, which is renamed to ``target`` at the end of the block.

    The file gets the group and mode of the directory, but no permissions besides ``at_most``, before it is renamed.

    After an error nothing is left of it. A ``.tmp`` that is a link is an error before anything is written. Storage
    backends take paths, so the file is created and renamed by path. No other process uses this name, and the file must
    not exist, so a link put there at this very moment cannot redirect the write to an existing file.

    Raises:
        OSError: as by :func:`opened`, or the file cannot be renamed.
    """
    with opened(directory, create=True) as folder:
        name = _new_name(digest)
        path = os.path.join(directory, FOLDER, name)
        try:
            yield path
            with contextlib.suppress(OSError):  # it is a record all the same
                _share(folder, name, os.stat(directory), at_most)
            os.rename(path, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise


def _share(folder: int, name: str, above: os.stat_result, at_most: int) -> None:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        share_file(file, above, at_most)
    finally:
        os.close(file)


def _new_name(digest: str) -> str:
    return f"{digest}.{this_process()}.{next(_counter)}"


# Removing


def is_temporary(name: str) -> bool:
    """Whether a file name has exactly the form of a temporary file's."""
    return _NAME.fullmatch(name) is not None


def tidy(directory: str | os.PathLike[str]) -> None:
    """Removes abandoned temporary files of a cache directory, as far as permitted."""
    for found in abandoned(directory):
        with contextlib.suppress(OSError):
            remove(directory, os.path.basename(found.path))


def abandoned(directory: str | os.PathLike[str]) -> list[Abandoned]:
    """The temporary files of a cache directory whose writers have ended."""
    try:
        with opened(directory) as folder:
            found = list(_abandoned(folder, os.listdir(folder)))
    except OSError:
        return []
    return [Abandoned(os.path.join(directory, FOLDER, name), st.st_size) for name, st in found]


def remove_record(path: str, seen: os.stat_result) -> bool:
    """Deletes a record if it is the file that was seen. A record that replaces it at this very moment stays.

    The file is first moved into ``.tmp``, where nobody replaces it. A process that looks for the record meanwhile
    computes the item.

    Args:
        path: of the record.
        seen: of its directory entry, by ``os.lstat``.

    Returns:
        Whether it was deleted.

    Raises:
        OSError: no permission, read-only.
    """
    directory, name = os.path.split(path)
    try:
        with opened(directory, create=True) as folder:
            aside = _new_name(name[:32])
            os.rename(path, aside, dst_dir_fd=folder)
            moved = os.stat(aside, dir_fd=folder, follow_symlinks=False)
            same = _which(moved) == _which(seen)
            if not same:
                _put_back(folder, aside, path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside, dir_fd=folder)
            return same
    except FileNotFoundError:
        return False


def _put_back(folder: int, name: str, path: str) -> None:
    try:
        os.link(name, path, src_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:  # yet another one is there by now
        pass
    except OSError:  # a file system without hard links
        os.rename(name, path, src_dir_fd=folder)


def _which(st: os.stat_result) -> tuple[int, int, int]:
    return st.st_ino, st.st_size, st.st_mtime_ns


def remove(directory: str | os.PathLike[str], name: str) -> bool:
    """Deletes the file of this name that :func:`abandoned` returned, if it still would. Returns whether it did.

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


def _abandoned(folder: int, names: list[str]) -> Iterator[tuple[str, os.stat_result]]:
    clock = functools.cache(lambda: server_time(folder))  # asked once, and only if needed
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        try:
            st = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISREG(st.st_mode) and not _is_in_use(match["writer"], st, clock):
            yield name, st


def _is_in_use(writer: str, st: os.stat_result, clock: Callable[[], float | None]) -> bool:
    runs = still_runs(writer)
    if runs is not None:
        return runs
    now = clock()
    return now is None or now - st.st_mtime < FOREIGN_SECONDS


def server_time(folder: int) -> float | None:
    """The current time, in seconds, of the clock that stamps the files of a ``.tmp``, which may be a file server's.

    Found by creating a file. None if that fails.
    """
    name = _new_name("0" * 32)
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
