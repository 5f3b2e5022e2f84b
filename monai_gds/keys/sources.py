"""The identity of source files: what a key holds of the volumes, folders and weights that an item is made from.

An identity is size and content, never times, device or inode. A copy, another mount or a touched file is the same
source, and an edit makes another one even if size and mtime were preserved. Reading every source for every key would
take hours, so content hashes are remembered by the ``stat`` of the file when it was read: in this process, and through
:mod:`monai_gds.keys.source_memo` in the cache folder.

Imports neither torch nor MONAI, and writes no file but the memo.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import stat
import struct
import weakref
from collections.abc import Callable
from typing import Literal, NamedTuple

import xxhash

from monai_gds import limits
from monai_gds.base.file_systems import opened
from monai_gds.base.notices import Notice
from monai_gds.errors import HashingError, warn
from monai_gds.keys.folder_listing import FILE, FOLDER, NAMES, UNREADABLE, FolderEntry, digest_of_folder, list_folder
from monai_gds.keys.source_memo import Ages, SourceMemo
from monai_gds.keys.source_names import absolute

#: How sources are identified; :class:`Sources` explains each policy.
Policy = Literal["content", "stat", "once"] | Callable[[str], str | bytes | None] | None

#: Changes with the meaning of a hash in the memo, so that entries of another format are never found.
_FORMAT = 1

#: SQLite makes these files while it reads a database, too.
_EMPTY_IS_ABSENT = ("-wal", "-journal")

_STATE = struct.Struct("<4q")  # inode, size, mtime, ctime


def _state_of(st: os.stat_result) -> bytes:
    return _STATE.pack(st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)


class Identity(NamedTuple):
    """The part of a key that stands for one source.

    Attributes:
        size: in bytes; for a folder, of all its files together; -1 if a callable identifies sources.
        content: xxh3_128 of the content as 32 hex digits. Under ``"stat"``, ``stat:`` and the mtime, or a hash of a
            folder's listing. For an unreadable file, ``unreadable:`` with mtime and ctime. For a folder with more than
            200,000 entries, ``unlisted``. Otherwise what a callable returned, bytes as hex digits.
    """

    size: int
    content: str


#: The identity of a file that was to be read and is not there.
ABSENT = Identity(-1, "absent")


class _Hashed(NamedTuple):
    """A file as it was read."""

    identity: Identity
    content: bytes  # for the hash of a folder
    is_known: bool = True  # whether it is remembered


class Sources:
    """Identities of source files and folders, remembered.

    Args:
        policy: how sources are identified, the option ``sources`` of a dataset. A function is called at every access
            for every string that may be a path. None: nothing is a source.
        folder: the cache folder, where hashes are remembered for other processes, or None.
    """

    def __init__(self, policy: Policy, folder: str | None) -> None:
        self.counts = policy is not None  # whether anything is a source
        self._policy = policy
        self._folder = folder
        self._memo = SourceMemo(folder)
        self._ages = Ages()
        self._once: dict[tuple[str, bool], Identity] = {}
        self._warned: set[str] = set()
        weakref.finalize(self, self._memo.flush, make=False)  # also when the process ends

    def identity(self, path: str, folders: bool = True) -> Identity | None:
        """The identity of the source at a path, absolute or relative to the working directory.

        None if there is neither a file nor, with ``folders``, a folder, or something else, such as a pipe.

        Raises:
            HashingError: a callable returned something other than str, bytes or None.
        """
        if callable(self._policy):
            return _call(self._policy, path)
        return self._find(path, folders) if self.counts else None

    def read(self, path: str) -> Identity | None:
        """The identity of what was read without being named: :data:`ABSENT` if nothing is there now.

        A path that ends in :data:`NAMES` stands for the names in a folder. None if it does not count.
        """
        if callable(self._policy) or not self.counts:
            return self.identity(path)
        found = self._find(path, True, is_names=path.endswith(NAMES))
        return ABSENT if found is None or (not found.size and path.endswith(_EMPTY_IS_ABSENT)) else found

    def changed_at(self, path: str) -> int:
        """When a file was changed, or a folder or anything in it, in ns (ctime); 0 if there is none."""
        with contextlib.suppress(OSError, ValueError):
            st = os.stat(path)
            if not stat.S_ISDIR(st.st_mode):
                return st.st_ctime_ns
            entries = list_folder(path, self._cache()) or []
            folders = [os.stat(f"{path}/{name}").st_ctime_ns for name, kind, *_ in entries if kind == FOLDER]
            return max([*folders, *[ctime for *_, ctime in entries]], default=0)
        return 0

    def _find(self, path: str, folders: bool, is_names: bool = False) -> Identity | None:
        found = self._once.get((path, folders)) if self._policy == "once" else None
        if found is None:
            found = self._names(path.removesuffix(NAMES)) if is_names else self._look(path, folders)
            if found is not None and self._policy == "once":  # absence is not: a source may appear later
                self._once[path, folders] = found
        return found

    def _look(self, path: str, folders: bool) -> Identity | None:
        try:
            st = os.stat(path)
        except (OSError, ValueError):  # ValueError: a NUL, or a character not allowed in file names
            return None
        if (st.st_mode & 0o170000) == 0o100000:
            if self._policy == "stat":
                return Identity(st.st_size, f"stat:{st.st_mtime_ns}")
            found = self._file(absolute(path), _state_of(st))
            return None if found is None else found.identity
        return self._directory(path) if folders and (st.st_mode & 0o170000) == 0o040000 else None

    # Files

    def _file(self, path: str, state: bytes, *, for_others: bool = True) -> _Hashed | None:
        """The identity of a file, given its state; None if it is gone or no longer a regular file."""
        content = self._memo.get(_memo_key(path, state))
        if content is not None:
            return _Hashed(Identity(_STATE.unpack(state)[1], content.hex()), content)
        try:
            # O_NONBLOCK, since opening a pipe that took the file's place would block
            with opened(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC) as fd:
                return self._read(path, fd, for_others)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return _unreadable(path)

    def _read(self, path: str, fd: int, for_others: bool) -> _Hashed | None:
        """Reads an open file until it does not change meanwhile, at most three times."""
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode):
            return None
        for _ in range(3):
            before = _state_of(st)
            is_old = self._ages.is_old(path, before, st, fd)
            content = _content(fd, st.st_size)
            st = os.fstat(fd)
            if before == _state_of(st):
                break
        else:
            is_old = False
        if is_old:
            self._memo.put(_memo_key(path, before), content, for_others=for_others)
        return _Hashed(Identity(st.st_size, content.hex()), content, is_old)

    # Folders

    def _directory(self, path: str) -> Identity:
        """A folder's identity: the names, sizes and contents of everything in it, on all levels."""
        path = absolute(path)
        if path in self._warned:
            return Identity(0, "unlisted")
        cache = self._cache()
        entries = list_folder(path, cache)
        for _ in range(3):
            if entries is None:
                return self._too_many(path)
            size = sum([entry[3] for entry in entries])
            if self._policy == "stat":
                return Identity(size, f"stat:{digest_of_folder(entries, [b'%d' % entry[4] for entry in entries])}")
            state = xxhash.xxh3_128_digest(marshal.dumps(entries, 2))  # version 2 writes values only, no references
            content = self._memo.get(_memo_key(path, state))
            if content is not None:
                return Identity(size, content.hex())
            found = [self._entry(path, entry) for entry in entries]
            digest = digest_of_folder(entries, [content for content, _ in found])
            before, entries = entries, list_folder(path, cache)
            if entries == before:
                if all(is_old for _, is_old in found):
                    self._memo.put(_memo_key(path, state), bytes.fromhex(digest))
                break
        return Identity(size, digest)

    def _names(self, path: str) -> Identity | None:
        """What stands for the names in a folder."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with contextlib.suppress(OSError, ValueError), opened(path, flags) as fd:
            st = os.fstat(fd)
            state = _state_of(st)
            key = _memo_key(path + NAMES, state)
            content = self._memo.get(key)
            if content is None:
                is_old = self._ages.is_old(path, state, st, fd)
                content = xxhash.xxh3_128_digest(os.fsencode("\0".join(sorted(os.listdir(fd)))))
                if is_old and state == _state_of(os.fstat(fd)):
                    self._memo.put(key, content, for_others=False)
            return Identity(0, content.hex())
        return None

    def _cache(self) -> tuple[int, int] | None:
        """Device and inode of the cache folder, which is left out: records must not change the folder around it."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                st = os.stat(self._folder)
                return st.st_dev, st.st_ino
        return None

    def _entry(self, folder: str, entry: FolderEntry) -> tuple[bytes, bool]:
        """The content of a folder's entry, and whether it may be remembered."""
        name, kind, *times = entry
        if kind == UNREADABLE:
            return b"%d:%d" % entry[4:], True
        if kind != FILE:
            return b"", True
        found = self._file(os.path.join(folder, name), _STATE.pack(*times), for_others=False)
        return (b"", False) if found is None else (found.content, found.is_known)

    def _too_many(self, path: str) -> Identity:
        self._warned.add(path)
        if Notice("too many", path).is_new():
            warn(
                f"the folder {path!r} holds more than {limits.FOLDER_ENTRIES:,} entries, so keys contain its name "
                "only, and changes in it are not noticed. If it is the data, name its files or subfolders in the "
                "items, or give sources= a function that returns its version"
            )
        return Identity(0, "unlisted")


def _call(policy: Callable[[str], str | bytes | None], path: str) -> Identity | None:
    found = policy(path)
    if found is None:
        return None
    if not isinstance(found, (str, bytes)):
        raise HashingError(
            f"sources returned a {type(found).__name__} for {path!r}: it has to return str, bytes or None"
        )
    return Identity(-1, found.hex() if isinstance(found, bytes) else found)


def _memo_key(path: str, state: bytes) -> bytes:
    return xxhash.xxh3_128_digest(state + os.fsencode(path), seed=_FORMAT)


def _content(fd: int, size: int) -> bytes:
    """The hash of an open file. Reading and hashing release the interpreter's lock."""
    hashed, at = xxhash.xxh3_128(), 0
    view = memoryview(bytearray(min(size + 1, limits.SOURCE_PIECE_BYTES)))
    while at <= size and (n := os.preadv(fd, [view], at)):  # a file that grows as fast as it is read would never end
        hashed.update(view[:n])
        at += n
    return hashed.digest()


def _unreadable(path: str) -> _Hashed | None:
    """Identifies a file that cannot be read by its times, since nothing else would show an edit."""
    try:
        st = os.stat(path)
    except (OSError, ValueError):
        return None
    times = f"unreadable:{st.st_mtime_ns}:{st.st_ctime_ns}"
    return _Hashed(Identity(st.st_size, times), times.encode(), is_known=False)
