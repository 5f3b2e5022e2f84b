"""The identity of source files: what a key holds of the volumes, folders and weights that an item is made from.

An identity is size and content, never times, device or inode: a copy, another mount or a touched file is the same
source, and an edit is another one even where size and mtime were kept. Reading every source for every key would take
hours, so the hash of a content is remembered by what ``stat`` told of the file when it was read: in this process, and
through :mod:`monai_gds.cache.source_memo` in the cache folder.

**When a hash is remembered.** A file system's clock has ticks, of up to two seconds. What was edited within the tick
that it was hashed in may look unchanged, so a hash counts only for now unless the file was two seconds old when reading
began (git calls such entries racily clean). A file's age takes two clocks, and a file server's may be an hour off:

* local file systems stamp with this machine's clock: its time is compared with ctime and mtime;
* elsewhere, files that are a day older than this machine's clock are old, whichever of the two clocks is wrong;
* in the cache folder's file system the server is asked for its time, by touching a file there;
* whatever the clocks and times say (``touch -d 2099``), a file is old when this process found it just so two seconds
  ago, on a clock that only runs forward.

Limits: a clock that is set back makes an edit look like the old file where it comes in the very tick, an hour or a
day later, that the file was stamped in before. Writes through a shared memory mapping change times up to 30 s late.
Attributes that a network file system's client holds back (``acregmax``) are seen late.

Called by :mod:`monai_gds.cache.key`. This file imports neither torch nor MONAI, and no file is ever written but
the memo.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import marshal
import math
import os
import re
import stat
import struct
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from monai_gds.cache.source_memo import SourceMemo
from monai_gds.errors import CacheWarning, HashingError

__all__ = ["Identity", "Policy", "Sources", "absolute", "candidates", "companions", "files_named", "looks_like_path"]

#: How sources are told apart; :class:`Sources` says what each does.
Policy = Literal["content", "stat", "once"] | Callable[[str], str | bytes | None] | None

#: Folders of more entries are no sources but by name. Listing as many takes half a second, at every access.
_MOST_ENTRIES = 200_000

#: Contents remembered per process, of sources and of files in folders: at most about 200 and 50 MB.
_MOST_KNOWN = 1_000_000
_MOST_INSIDE = 200_000

#: The longest tick of a file system's clock, FAT's, in ns.
_TICK = 2_000_000_000

#: By how much two machines' clocks may differ: time zones that were set wrong, and some hours.
_CLOCKS_DIFFER = 24 * 3600 * 1_000_000_000

#: How often a file server is asked for its time, in seconds. In between its clock is taken to run as ours, less 0.1 %.
_ASK_SERVER_SECONDS = 60.0

#: File systems that stamp with this machine's clock (linux/magic.h): ext4, XFS, btrfs, tmpfs, overlayfs, ZFS, F2FS,
#: bcachefs, ramfs.
_LOCAL = frozenset(
    {0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0x2FC12FC1, 0xF2F52010, 0xCA451A4E, 0x858458F6}
)

#: Bytes read at once: with 512 KiB what was read is still in the processor's cache when it is hashed.
_CHUNK = 512 << 10

#: Changes with what a hash in the memo stands for: entries of another format are never found.
_FORMAT = 1

_KNOWN_FILE = struct.Struct("<4q")  # inode, size, mtime, ctime
_FILE, _FOLDER, _NOTHING, _OTHER, _LOOP, _UNREADABLE = range(6)


class Identity(NamedTuple):
    """What a key holds of one source.

    Attributes:
        size: in bytes; of a folder, of all its files together; -1 where a callable says what the source is.
        content: 32 hex digits of xxh3_128 of the content. Under ``"stat"``: ``stat:`` and the mtime, of a folder a
            hash of its listing. Of what cannot be read: ``unreadable:`` and mtime and ctime. Of a folder of more than
            200,000 entries: ``unlisted``. What a callable returned, bytes as hex digits.
    """

    size: int
    content: str


class _Hashed(NamedTuple):
    """A file as it was read."""

    known: bytes  # by which it will be recognised
    size: int
    content: bytes | None  # None where it cannot be read
    is_old: bool  # enough to be remembered
    unreadable: str


class Sources:
    """Identities of source files and folders, remembered.

    Args:
        policy: how sources are told apart:

            * ``"content"``: by size and a hash of the content. One ``stat`` per access; a source is read again only
              when something about it changed.
            * ``"stat"``: by size and mtime, without reading. Blind to an edit that keeps both, as ``cp -p``,
              ``rsync -t`` and edits within a tick of the clock do; a touched file counts as another.
            * ``"once"``: as ``"content"``, but each source is looked at once per process. Blind to later edits.
            * a callable: path -> what identifies it (``str`` or ``bytes``), or None for no source. It is asked at every
              access, for every string that may be a path.
            * None: nothing is a source.
        folder: the cache folder, where hashes are remembered for other processes; None for this process alone.

    Raises:
        ValueError: there is no such policy.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds.cache.sources import Sources
        >>> _ = Path("ct.nii").write_bytes(b"volume")
        >>> sources = Sources("content", None)
        >>> sources.identity("ct.nii")
        Identity(size=6, content='023796e8628423915b99be82d6d143ad')
        >>> sources.identity("no such file") is None
        True
    """

    def __init__(self, policy: Policy, folder: str | None) -> None:
        if not (policy is None or callable(policy) or policy in ("content", "stat", "once")):
            raise ValueError(f"sources={policy!r}: give 'content', 'stat', 'once', a function of a path, or None")
        self._policy = policy
        self._folder = folder
        self._memo = SourceMemo(folder)
        self._clock = _Clock(self._memo)
        # By absolute path: what it was recognised by (of a file 32 bytes, of a folder 16), and 16 of its content.
        self._known: dict[str, bytes] = {}
        self._inside: dict[bytes, bytes] = {}  # the same for files in folders, needed when one of many changed
        self._once: dict[tuple[str, bool], Identity] = {}
        self._warned: set[str] = set()
        _living.add(self)

    def __reduce__(self) -> tuple[type[Sources], tuple[Policy, str | None]]:
        return type(self), (self._policy, self._folder)  # a spawned process has the memo

    def identity(self, path: str, folders: bool = True) -> Identity | None:
        """What a key holds of the source at a path.

        Args:
            path: a file or a folder, absolute or relative to the working directory.
            folders: whether a folder counts.

        Returns:
            None where there is neither a file nor a folder, or only a pipe, a socket, a device.

        Raises:
            HashingError: a callable returned something else than str, bytes or None.
        """
        if self._policy == "content":
            return self._look(path, folders)
        if self._policy == "once":
            found = self._once.get((path, folders))
            if found is None:  # of what is not there nothing is remembered: it may come, and be another thing each time
                found = self._look(path, folders)
                if found is not None:
                    self._once[path, folders] = found
            return found
        if self._policy is None:
            return None
        if self._policy == "stat":
            return self._look(path, folders)
        return _asked(self._policy, path)

    def flush(self) -> None:
        """Writes what was found out to the memo in the cache folder, where there is one. It fails silently."""
        self._memo.flush()

    def forked(self) -> None:
        """Begins anew what belongs to one process; called in forked children."""
        self._memo.forked()

    def _look(self, path: str, folders: bool) -> Identity | None:
        try:
            st = os.stat(path)
        except (OSError, ValueError):  # ValueError: a NUL, or a character that no file name can have
            return None
        if (st.st_mode & 0o170000) == 0o100000:
            if self._policy == "stat":
                return Identity(st.st_size, f"stat:{st.st_mtime_ns}")
            return self._file(path, st)
        if folders and (st.st_mode & 0o170000) == 0o040000:
            return self._directory(path)
        return None

    def _file(self, path: str, st: os.stat_result) -> Identity | None:
        path = absolute(path)
        known = _KNOWN_FILE.pack(st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
        content = self._recall(path, known)
        if content is not None:
            return Identity(st.st_size, content.hex())
        read = self._read(path)
        if read is None:
            return None
        if read.content is None:
            return Identity(read.size, read.unreadable)
        if read.is_old:
            self._remember(path, read.known, read.content)
        return Identity(read.size, read.content.hex())

    def _recall(self, path: str, known: bytes) -> bytes | None:
        """The content's hash of what was seen before, here or by another process."""
        found = self._known.get(path)
        if found is not None and found.startswith(known):
            return found[len(known) :]
        content = self._memo.get(_memo_key(path, known))
        if content is not None:
            self._keep(path, known, content)
        return content

    def _remember(self, path: str, known: bytes, content: bytes) -> None:
        self._keep(path, known, content)
        self._memo.put(_memo_key(path, known), content)

    def _keep(self, path: str, known: bytes, content: bytes) -> None:
        if len(self._known) < _MOST_KNOWN or path in self._known:
            self._known[path] = known + content

    # Files

    def _read(self, path: str) -> _Hashed | None:
        """Reads a file. None where it is gone, or something else by now."""
        try:
            # O_NONBLOCK: a pipe that took the file's place would be waited for
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return _unreadable(path)
        try:
            return self._hash(path, fd)
        except OSError:
            return _unreadable(path)
        finally:
            os.close(fd)

    def _hash(self, path: str, fd: int) -> _Hashed | None:
        """Reads an open file until it did not change meanwhile, at most three times."""
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode):
            return None
        for _ in range(3):
            before = _KNOWN_FILE.pack(st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
            is_old = self._clock.is_old(path, before, st, fd)
            content = _content(fd, st.st_size)
            st = os.fstat(fd)
            after = _KNOWN_FILE.pack(st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
            if before == after:
                return _Hashed(after, st.st_size, content, is_old, "")
        return _Hashed(after, st.st_size, content, False, "")

    # Folders

    def _directory(self, path: str) -> Identity:
        """A folder's identity: names, sizes and contents of all that is in it, on all levels."""
        path = absolute(path)
        if path in self._warned:
            return Identity(0, "unlisted")
        cache = self._cache()
        rows = _listing(path, cache)
        for _ in range(3):
            if rows is None:
                return self._too_many(path)
            size = sum([row[3] for row in rows])
            if self._policy == "stat":
                return Identity(size, f"stat:{_digest_of(rows, [b'%d' % row[4] for row in rows])}")
            known = xxhash.xxh3_128_digest(marshal.dumps(rows, 2))  # version 2 writes values only, no references
            content = self._recall(path, known)
            if content is not None:
                return Identity(size, content.hex())
            contents, all_old = self._contents(path, rows)
            digest = _digest_of(rows, contents)
            before, rows = rows, _listing(path, cache)
            if rows == before:
                if all_old:
                    self._remember(path, known, bytes.fromhex(digest))
                break
        return Identity(size, digest)

    def _cache(self) -> tuple[int, int] | None:
        """Device and inode of the cache folder: a folder that it lies in is not another one with every record."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                st = os.stat(self._folder)
                return st.st_dev, st.st_ino
        return None

    def _contents(self, folder: str, rows: list[_Row]) -> tuple[list[bytes], bool]:
        """The contents of a folder's entries, and whether all of them may be remembered."""
        found, all_old = [], True
        for row in rows:
            content, is_old = self._entry(folder, row)
            found.append(content)
            all_old = all_old and is_old
        return found, all_old

    def _entry(self, folder: str, row: _Row) -> tuple[bytes, bool]:
        name, kind, *looks = row
        if kind == _UNREADABLE:
            return b"%d:%d" % row[4:], True
        if kind != _FILE:
            return b"", True
        path = os.path.join(folder, name)
        key = _memo_key(path, _KNOWN_FILE.pack(*looks))
        content = self._inside.get(key)
        if content is not None:
            return content, True
        read = self._read(path)
        if read is None:
            return b"", False
        if read.content is None:
            return read.unreadable.encode(), False
        if read.is_old:
            if len(self._inside) >= _MOST_INSIDE:
                self._inside.clear()
            self._inside[_memo_key(path, read.known)] = read.content
        return read.content, read.is_old

    def _too_many(self, path: str) -> Identity:
        self._warned.add(path)
        warnings.warn(
            f"the folder {path!r} holds more than {_MOST_ENTRIES:,} entries, so keys have its name only, and changes "
            "in it are not noticed. If it is the data, name its files or subfolders in the items, or give sources= a "
            "function that tells its version",
            CacheWarning,
            stacklevel=2,
        )
        return Identity(0, "unlisted")


_living: weakref.WeakSet[Sources] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for sources in list(_living):
        sources.forked()


def _flush_all() -> None:
    for sources in list(_living):
        sources.flush()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_flush_all)


def _asked(policy: Callable[[str], str | bytes | None], path: str) -> Identity | None:
    told = policy(path)
    if told is None:
        return None
    if not isinstance(told, (str, bytes)):
        raise HashingError(
            f"sources returned a {type(told).__name__} for {path!r}: it has to return str, bytes or None"
        )
    return Identity(-1, told.hex() if isinstance(told, bytes) else told)


def absolute(path: str) -> str:
    """The absolute path of a source; ``~`` is the home directory, as it is to MONAI's LoadImage.

    Not by ``os.path.abspath``: behind a link, the ``..`` that it takes away leads elsewhere.
    """
    path = os.path.expanduser(path)
    if path.startswith("/"):
        return path
    with contextlib.suppress(OSError):  # the working directory is gone
        return os.path.join(os.getcwd(), path)
    return path


def _memo_key(path: str, known: bytes) -> bytes:
    return xxhash.xxh3_128_digest(known + os.fsencode(path), seed=_FORMAT)


# Reading


_buffers: deque[bytearray] = deque()  # one per thread that ever read at the same time as others


def _content(fd: int, size: int) -> bytes:
    """The hash of what a file holds, from its beginning. The interpreter's lock is free while it is read and hashed."""
    try:
        buffer = _buffers.pop()
    except IndexError:
        buffer = bytearray(_CHUNK)
    hashed = xxhash.xxh3_128()
    view = memoryview(buffer)
    at = 0
    while at <= size:  # one that grows as fast as it is read would never end
        n = os.preadv(fd, [view], at)
        if n == 0:
            break
        hashed.update(view[:n])
        at += n
    _buffers.append(buffer)
    return hashed.digest()


def _unreadable(path: str) -> _Hashed | None:
    """What stands for a file that is there and gives no bytes: its times too, since nothing else would show an edit."""
    try:
        st = os.stat(path)
    except (OSError, ValueError):
        return None
    return _Hashed(b"", st.st_size, None, False, f"unreadable:{st.st_mtime_ns}:{st.st_ctime_ns}")


# Time


class _Clock:
    """Whether a file is old enough that any later edit will show in its times. The module's docstring says how."""

    def __init__(self, memo: SourceMemo) -> None:
        self._memo = memo
        self._is_local: dict[int, bool] = {}
        self._server: dict[int, tuple[float, int | None]] = {}  # by device: when it answered, and what
        self._young: dict[str, tuple[bytes, float]] = {}  # by path: how it looked, and when that was first seen

    def is_old(self, path: str, known: bytes, st: os.stat_result, fd: int) -> bool:
        """Whether a hash may be remembered that is about to be taken of an open file."""
        youngest = max(st.st_mtime_ns, st.st_ctime_ns)
        now = time.time_ns()
        if now - youngest >= _CLOCKS_DIFFER or self._now(st.st_dev, fd, now) - youngest >= _TICK:
            self._young.pop(path, None)
            return True
        seen, since = self._young.get(path, (b"", 0.0))
        if seen == known:
            return (time.monotonic() - since) * 1e9 >= _TICK
        if len(self._young) < _MOST_KNOWN or path in self._young:
            self._young[path] = (known, time.monotonic())
        return False

    def _now(self, device: int, fd: int, here: int) -> int:
        """The earliest that the clock which stamps files of a device may show; ``here`` is this machine's, in ns."""
        if device not in self._is_local:
            self._is_local[device] = _file_system(fd) in _LOCAL
        if self._is_local[device]:
            return here
        answered, told = self._server.get(device, (-math.inf, None))
        if time.monotonic() - answered > _ASK_SERVER_SECONDS:
            told = self._memo.server_time(device)
            answered = time.monotonic()  # after the file was stamped: earlier would make its clock seem ahead
            self._server[device] = (answered, told)
        if told is None:
            return here - _CLOCKS_DIFFER
        return told + int((time.monotonic() - answered) * 0.999e9)


_libc = ctypes.CDLL(None, use_errno=True)


def _file_system(fd: int) -> int | None:
    """The magic number of the file system that a file lies in; None where the system does not say."""
    told = ctypes.create_string_buffer(256)  # struct statfs is 120 bytes, and begins with it as a long
    if _libc.fstatfs(fd, told):
        return None
    return ctypes.c_ulong.from_buffer(told).value & 0xFFFFFFFF


# Folders


#: One entry of a folder, however deep: name, kind, inode, size, mtime, ctime. Of what is no file only name and kind, of
#: what is unreadable also the times. Plain tuples: making 600 of a class costs as much as the system calls.
_Row = tuple[str, int, int, int, int, int]


def _no_file(name: str, kind: int) -> _Row:
    return name, kind, 0, 0, 0, 0


def _listing(path: str, cache: tuple[int, int] | None) -> list[_Row] | None:
    """All entries of a folder on all levels, sorted by their names; None where there are more than it may have.

    Links count as what they lead to; one that leads to a folder that it lies in is an end. The folder that ``cache``
    identifies, by device and inode, is left out.
    """
    rows: list[_Row] = []
    todo: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ())]
    while todo:
        prefix, above = todo.pop()
        try:
            fd = os.open(path + "/" + prefix, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            rows.append(_unlisted(path, prefix))
            continue
        try:
            here = os.fstat(fd)
            identity = (here.st_dev, here.st_ino)
            if identity == cache:
                continue
            if identity in above:
                rows.append(_no_file(prefix, _LOOP))
                continue
            rows.append(_no_file(prefix, _FOLDER))
            folders = _entries(fd, prefix, rows)
            if folders is None:
                return None
            todo += [(folder, (*above, identity)) for folder in folders]
        except OSError:  # it cannot be listed to its end
            rows.append(_unlisted(path, prefix))
        finally:
            os.close(fd)
    rows.sort()
    return rows


def _entries(fd: int, prefix: str, rows: list[_Row]) -> list[str] | None:
    """Appends one folder's entries but its folders, which it returns; None where there are too many."""
    folders = []
    with os.scandir(fd) as found:
        for entry in found:
            name = prefix + entry.name
            try:
                st = entry.stat()
            except OSError:  # a dead link, a loop of links, or it vanished meanwhile
                rows.append(_no_file(name, _NOTHING))
                continue
            kind = st.st_mode & 0o170000
            if kind == 0o100000:
                rows.append((name, _FILE, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns))
            elif kind == 0o040000:
                folders.append(name + "/")
            else:
                rows.append(_no_file(name, _OTHER))
            if len(rows) + len(folders) > _MOST_ENTRIES:
                return None
    return folders


def _unlisted(path: str, prefix: str) -> _Row:
    with contextlib.suppress(OSError):
        st = os.stat(path + "/" + prefix)
        return prefix, _UNREADABLE, 0, 0, st.st_mtime_ns, st.st_ctime_ns
    return _no_file(prefix, _NOTHING)


def _digest_of(rows: list[_Row], contents: list[bytes]) -> str:
    """The hash of a folder: of names, kinds, sizes and contents, in the order of the listing."""
    hashed = xxhash.xxh3_128()
    for (path, kind, _, size, _, _), content in zip(rows, contents, strict=True):
        name = os.fsencode(path)
        hashed.update(struct.pack("<IBqI", len(name), kind, size, len(content)) + name + content)
    return hashed.hexdigest()


# Which strings are sources


#: Suffix of a file -> those of files beside it that hold a part of the same image: of Analyze and NIfTI pairs, and of
#: the headers of MetaImage and NRRD, which most often name a data file of their own stem.
_COMPANIONS = {
    ".hdr": (".img", ".img.gz"),
    ".hdr.gz": (".img.gz", ".img"),
    ".img": (".hdr", ".hdr.gz", ".mat"),
    ".img.gz": (".hdr.gz", ".hdr"),
    ".mhd": (".raw", ".zraw", ".raw.gz"),
    ".nhdr": (".raw", ".raw.gz", ".nrrd"),
}


def companions(path: str) -> list[str]:
    """The files that an image may have its other part in, whether they are there or not.

    Example:
        >>> from monai_gds.cache.sources import companions
        >>> companions("scans/ct.mhd")
        ['scans/ct.raw', 'scans/ct.zraw', 'scans/ct.raw.gz']
    """
    lower = path.lower()
    for suffix, others in _COMPANIONS.items():
        if lower.endswith(suffix):
            return [path[: -len(suffix)] + other for other in others]
    return []


def looks_like_path(text: str) -> bool:
    """Whether a string may name a file: it has a separator, or a suffix such as ``.nii.gz``, ``.dcm``, ``.npy``.

    Example:
        >>> from monai_gds.cache.sources import looks_like_path
        >>> [looks_like_path(text) for text in ("ct.nii.gz", "/data/series", "train", "a sentence.")]
        [True, True, False, False]
    """
    if not 0 < len(text) < 4096 or "\0" in text:
        return False
    stem, _, suffix = text.rpartition(".")
    return "/" in text or (bool(stem.strip()) and len(suffix) <= 12 and suffix.isalnum() and suffix.isascii())


def candidates(item: Any, loaded_keys: Collection[Any] | Literal["all"]) -> list[tuple[str, bool]]:
    """The strings of an item that may name sources, each with whether a folder by that name counts too.

    A string may if a transform loads what is under its key, if it looks like a path, or if it is a ``Path``. A folder
    counts where it is loaded, a ``Path``, or has a separator: ``{"split": "train"}`` never means ``./train``.

    Args:
        item: of a dataset: dicts, lists, tuples, sets, arrays of strings, nested.
        loaded_keys: the keys that the pipeline's Load transforms read; ``"all"`` where they read whole items.

    Returns:
        Each string once, sorted: sets have another order in every process.

    Example:
        >>> from monai_gds.cache.sources import candidates
        >>> candidates({"image": "ct", "split": "train", "notes": "see notes.txt"}, {"image"})
        [('ct', True), ('see notes.txt', False)]
    """
    found: dict[str, bool] = {}
    for text, is_path in _strings(item, loaded_keys, loaded_keys == "all"):
        if is_path or looks_like_path(text):
            found[text] = found.get(text, False) or is_path or "/" in text
            for other in companions(text):
                found.setdefault(other, False)
    return sorted(found.items())


def _strings(value: Any, keys: Collection[Any], loaded: bool) -> Iterator[tuple[str, bool]]:
    """Every string and path among an item's values, and whether it is known to be a path.

    Transforms read the keys of an item, or of the dicts in an item that is a list; below a key none counts.
    """
    if isinstance(value, str):
        if 0 < len(value) < 4096 and "\0" not in value:
            yield str.__str__(value), loaded  # of np.str_ and enums, the plain string
    elif isinstance(value, os.PathLike):
        yield os.fsdecode(value), True
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _strings(below, (), loaded or key in keys)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for element in value:
            yield from _strings(element, keys, loaded)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "UO":
        for element in value.ravel().tolist():
            yield from _strings(element, keys, loaded)


def files_named(strings: Iterable[str]) -> list[str]:
    """Those of the strings that name a file, each once, sorted.

    For what transforms were given: an atlas, weights, a table. They are regular files now, or paths without a blank,
    where a file may appear later. Folders do not count: one that is written to would be another in every run.
    """
    found = {text for text in strings if looks_like_path(text) and (_is_file(text) or _may_appear(text))}
    return sorted(found.union(*map(companions, found)))


def _may_appear(path: str) -> bool:
    """Whether a file may be put there. Texts with blanks, wildcards or placeholders are something else most often."""
    return "/" in path and not _UNUSUAL.search(path) and not os.path.isdir(path)


#: What a path of data hardly has, and other texts with a slash do.
_UNUSUAL = re.compile(r"[\s*?%{}<>|\\]|://|/$")


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(os.path.expanduser(path)).st_mode)
    except (OSError, ValueError):
        return False
