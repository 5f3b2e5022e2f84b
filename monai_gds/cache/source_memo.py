"""Content hashes of source files, kept in the cache folder so that other processes and nodes need not read the files.

    <cache_dir>/.index/<host>-<pid>-<start>.sources      the hashes of one process, which appends to it
    <cache_dir>/.index/merged-<hash>.sources             the hashes of several processes that have ended

A file is a sequence of 40-byte entries: a 16-byte key (the hash of a path and its ``stat``), the 16-byte content hash,
and an 8-byte checksum. A torn or garbled entry fails its checksum and counts as absent. There are no locks: each
process writes a file of its own, so that appends never interleave, also on NFS.

The memo only saves time. If it cannot be read or written, nothing fails, and source files are read more often.
Used by :mod:`monai_gds.cache.sources`. Other kinds of files in ``.index/`` are left alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import xxhash

from monai_gds import limits
from monai_gds.process import PerProcess

__all__ = ["SourceMemo"]

_FOLDER = ".index"
_SUFFIX = ".sources"

#: Names of this module's files. Other files in the folder are left alone.
_OURS = re.compile(r"(merged-[0-9a-f]{32}|.+-\d+-[0-9a-f]+)\.sources(\.new)?", re.DOTALL)

_ENTRY = 40  # bytes: key, content, checksum
_CHECKED = 32  # bytes that the checksum covers

#: Seconds between looks at other processes' files, and between writes of our own.
_REFRESH_SECONDS = 1.0


#: Seconds without a write after which the writer of a file counts as ended.
_IDLE_SECONDS = 600.0


class SourceMemo:
    """The memo of one cache folder, as one process sees it.

    Args:
        folder: the cache folder, or None to keep nothing.

    Example:
        >>> import os
        >>> from monai_gds.cache.source_memo import SourceMemo
        >>> os.makedirs("cache", exist_ok=True)
        >>> memo = SourceMemo("cache")
        >>> memo.put(bytes(15) + b"k", bytes(15) + b"c")
        >>> memo.flush()
        >>> SourceMemo("cache").get(bytes(15) + b"k")[-1:]  # as another process
        b'c'
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else os.path.join(folder, _FOLDER)
        self._large = _Table.of([])
        self._small = _Table.of([])
        self._read_up_to: dict[str, int] = {}
        self._own = PerProcess(_Own)

    # Reading

    def get(self, key: bytes) -> bytes | None:
        """The content hash that any process remembered under a 16-byte key."""
        if self._folder is None:
            return None
        found = self._small.get(key) or self._large.get(key)
        own = self._own()
        if found is None and time.monotonic() - own.refreshed >= _REFRESH_SECONDS:
            with own.lock:  # others wait, since what they miss is being read
                if time.monotonic() - own.refreshed >= _REFRESH_SECONDS:
                    self._refresh()
                    own.refreshed = time.monotonic()
            found = self._small.get(key) or self._large.get(key)
        return found

    def _refresh(self) -> None:
        """Reads what was appended since the last look."""
        with contextlib.suppress(OSError), self._opened(make=False) as at:
            added = [self._appended(at, name) for name in os.listdir(at) if _is_memo(name)]
            blocks = [block for block in added if len(block)]
            if not blocks:
                return
            if len(self._small) + sum(map(len, blocks)) <= limits.MEMO_SMALL_TABLE_ITEMS:
                self._small = _Table.of([self._small.rows, *blocks])
            else:
                self._large = _Table.of([self._large.rows, self._small.rows, *blocks])
                self._small = _Table.of([])

    def _appended(self, at: int, name: str) -> _Rows:
        """The whole entries of a file that were not read yet."""
        start = self._read_up_to.get(name, 0)
        with contextlib.suppress(OSError):
            data = _read(at, name, start)
            self._read_up_to[name] = start + len(data)
            return _rows(data)
        return _rows(b"")

    # Writing

    def put(self, key: bytes, content: bytes) -> None:
        """Remembers a 16-byte content hash under a 16-byte key, and writes from time to time."""
        if self._folder is None:
            return
        own = self._own()
        own.waiting.append(_entry(key, content))
        if len(own.waiting) >= limits.MEMO_WAITING_ITEMS or time.monotonic() - own.flushed >= _REFRESH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes the entries that wait. If that fails, they are dropped."""
        own = self._own()
        own.flushed = time.monotonic()
        entries = []
        with contextlib.suppress(IndexError):  # without a lock: other threads may append meanwhile
            while True:
                entries.append(own.waiting.popleft())
        if entries and self._folder is not None:
            with contextlib.suppress(OSError), self._opened(make=True) as at:
                self._append(at, b"".join(entries))
                if own.flushed - own.tidied > _IDLE_SECONDS:
                    own.tidied = own.flushed
                    _tidy(at)

    def _append(self, at: int, data: bytes) -> None:
        # Opened and closed each time: over NFS another node sees only closed files, and a merged file starts anew.
        fd = self._open_own(at)
        try:
            if os.fstat(fd).st_size % _ENTRY == 0 and os.write(fd, data) == len(data):
                return
        finally:
            os.close(fd)
        self._own().rename()  # a full disk cut an entry short, and entries behind it would be misaligned

    def _open_own(self, at: int) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(self._own().name, flags, 0o666, dir_fd=at)

    def server_time(self, device: int) -> int | None:
        """The file server's current time in ns, from touching a file; None if the cache folder is on another device."""
        with contextlib.suppress(OSError), self._opened(make=True) as at:
            if os.fstat(at).st_dev != device:
                return None
            fd = self._open_own(at)
            try:
                os.utime(fd)
                return os.fstat(fd).st_ctime_ns
            finally:
                os.close(fd)
        return None

    @contextlib.contextmanager
    def _opened(self, make: bool) -> Iterator[int]:
        """A descriptor of the folder. Links are not followed, so it is never somebody else's."""
        if self._folder is None:
            raise FileNotFoundError("there is no cache folder")
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._folder)
        at = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield at
        finally:
            os.close(at)


class _Own:
    """What belongs to one process: the file it writes, and what waits to be written."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while other processes' files are read
        self.waiting: deque[bytes] = deque()
        self.refreshed = self.flushed = self.tidied = -math.inf
        self.rename()

    def rename(self) -> None:
        """Starts a new file."""
        self.name = f"{os.uname().nodename.replace('/', '_')}-{os.getpid()}-{time.time_ns():x}{_SUFFIX}"


# Entries

_Rows = npt.NDArray[np.uint64]  # of shape (n, 5): two words of the key, two of the content, one of the checksum


def _entry(key: bytes, content: bytes) -> bytes:
    return key + content + xxhash.xxh3_64_digest(key + content)


def _is_whole(entry: bytes) -> bool:
    return xxhash.xxh3_64_digest(entry[:_CHECKED]) == entry[_CHECKED:]


def _rows(data: bytes) -> _Rows:
    return np.frombuffer(data, np.uint64).reshape(-1, _ENTRY // 8)


class _Table:
    """Entries sorted by the first word of their keys. Checksums are compared when an entry is looked up."""

    __slots__ = ("_first", "rows")

    def __init__(self, rows: _Rows) -> None:
        self.rows = rows
        self._first = np.ascontiguousarray(rows[:, 0])

    @classmethod
    def of(cls, blocks: list[_Rows]) -> _Table:
        held = [block for block in blocks if len(block)]
        rows = held[0] if len(held) == 1 else np.concatenate([_rows(b""), *held])
        return cls(rows[np.argsort(rows[:, 0], kind="stable")])

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, key: bytes) -> bytes | None:
        first = np.frombuffer(key, np.uint64, 1)[0]
        for row in self.rows[np.searchsorted(self._first, first) :]:
            if row[0] != first:
                break
            entry: bytes = row.tobytes()
            if entry.startswith(key) and _is_whole(entry):
                return entry[16:_CHECKED]
        return None


# Files


def _is_memo(name: str) -> bool:
    return name.endswith(_SUFFIX) and _OURS.fullmatch(name) is not None


def _read(at: int, name: str, start: int = 0) -> bytes:
    """The whole entries of a file from ``start`` on. Pipes and links are not read."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    with open(fd, "rb", buffering=0) as file:
        st = os.fstat(fd)
        size = (st.st_size - start) // _ENTRY * _ENTRY
        if not stat.S_ISREG(st.st_mode) or not 0 < size <= limits.MEMO_BYTES:
            return b""
        data = os.pread(file.fileno(), size, start)
        return data[: len(data) // _ENTRY * _ENTRY]


def _tidy(at: int) -> None:
    """Merges the files of ended processes if there are many, and removes the oldest files beyond the size limit.

    Several processes may do this at once and be killed at any step: a file is removed only when another holds its
    entries. A process that wrote nothing for ten minutes counts as ended. If it still runs, what it appends meanwhile
    is lost, and the files concerned are read once more.
    """
    found: list[tuple[float, str, int]] = []
    names = [name for name in os.listdir(at) if _OURS.fullmatch(name)]
    if len(names) <= limits.MEMO_FILES:
        return
    for name in names:
        with contextlib.suppress(OSError):
            st = os.stat(name, dir_fd=at, follow_symlinks=False)
            if stat.S_ISREG(st.st_mode):
                found.append((st.st_mtime, name, st.st_size))
    found.sort()
    too_much = sum(size for _, _, size in found) - limits.MEMO_BYTES
    now, idle = time.time(), []
    for age, name, size in found:
        if too_much > 0 or (name.endswith(".new") and now - age > _IDLE_SECONDS):  # left by a killed merge
            too_much -= size
            _unlink(at, name)
        elif size < limits.MEMO_UNMERGED_BYTES and not name.endswith(".new") and now - age > _IDLE_SECONDS:
            idle.append(name)
    if len(idle) > limits.MEMO_FILES // 2:
        _merge(at, idle)


def _merge(at: int, names: list[str]) -> None:
    whole: dict[bytes, None] = {}
    for name in names:
        data = _read(at, name)
        cut = (data[i : i + _ENTRY] for i in range(0, len(data), _ENTRY))
        whole.update(dict.fromkeys(entry for entry in cut if _is_whole(entry)))
    data = b"".join(whole)
    merged = f"merged-{xxhash.xxh3_128_hexdigest(data)}{_SUFFIX}"
    new = f"{merged}.new"  # the same bytes whichever process writes it
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=at)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.rename(new, merged, src_dir_fd=at, dst_dir_fd=at)
    except OSError:
        _unlink(at, new)
        return
    for name in names:
        if name != merged:
            _unlink(at, name)


def _unlink(at: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=at)
