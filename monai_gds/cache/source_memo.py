"""What is remembered of source files in the cache folder, so that other processes and other nodes need not read them.

    <cache_dir>/.index/<host>-<pid>-<start>.sources      what one process found out; it appends
    <cache_dir>/.index/merged-<hash>.sources             what several earlier processes found out

A file is a row of entries of 40 bytes: 16 of a key, which is the hash of a path and of what ``stat`` told of it, 16 of
the content's hash, 8 of a checksum. Whatever is torn or garbled fails its checksum and is as good as absent. Nobody
waits for anybody: each process writes a file of its own, so that appends never mix, on NFS either.

The memo only saves time. Where it can be neither read nor written, nothing fails, and files are read more often.
:mod:`monai_gds.cache.sources` uses it; other kinds of files in ``.index/`` are left alone.
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

__all__ = ["SourceMemo"]

_FOLDER = ".index"
_SUFFIX = ".sources"

#: Names that this module gives; any other file in the folder belongs to somebody else.
_OURS = re.compile(r"(merged-[0-9a-f]{32}|.+-\d+-[0-9a-f]+)\.sources(\.new)?", re.DOTALL)

_ENTRY = 40  # bytes: key, content, checksum
_CHECKED = 32  # bytes of it that the checksum covers

#: How often the folder is looked at for what other processes found out, and how often ours is written, in seconds.
_REFRESH_SECONDS = 1.0

#: As many findings are written at once, whenever that was last done: a process that is killed loses no more.
_MOST_WAITING = 256

#: More files than this are merged into one, but for large ones, which would only be copied, and those of late.
_MOST_FILES = 64
_LARGE = 16 << 20
_IDLE_SECONDS = 600.0

#: All files together, in bytes: 6.7 million entries. The oldest are removed, and what was in them is read again.
_MOST_BYTES = 256 << 20

#: Entries of a table that is sorted anew whenever something comes; beyond that they move to the large one.
_FEW = 1 << 16


class SourceMemo:
    """The memo of one cache folder, as one process sees it.

    Args:
        folder: the cache folder; None keeps nothing.

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
        self.forked()

    def forked(self) -> None:
        """Begins anew what belongs to one process: called in a forked child, whose parent writes what it found out."""
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._name = f"{os.uname().nodename.replace('/', '_')}-{os.getpid()}-{time.time_ns():x}{_SUFFIX}"
        self._refreshed = self._flushed = self._tidied = -math.inf

    # Reading

    def get(self, key: bytes) -> bytes | None:
        """The content's hash that is remembered under a key of 16 bytes, by now and by whichever process."""
        if self._folder is None:
            return None
        found = self._small.get(key) or self._large.get(key)
        if found is None and time.monotonic() - self._refreshed >= _REFRESH_SECONDS:
            with self._lock:  # others wait: what they miss is being read
                if time.monotonic() - self._refreshed >= _REFRESH_SECONDS:
                    self._refresh()
                    self._refreshed = time.monotonic()
            found = self._small.get(key) or self._large.get(key)
        return found

    def _refresh(self) -> None:
        """Reads what was appended since the last look."""
        with contextlib.suppress(OSError), self._opened(make=False) as at:
            new = [self._appended(at, name) for name in os.listdir(at) if _is_memo(name)]
            blocks = [block for block in new if len(block)]
            if not blocks:
                return
            if len(self._small) + sum(map(len, blocks)) <= _FEW:
                self._small = _Table.of([self._small.rows, *blocks])
            else:
                self._large = _Table.of([self._large.rows, self._small.rows, *blocks])
                self._small = _Table.of([])

    def _appended(self, at: int, name: str) -> _Rows:
        """Whole entries of a file from where it was read up to."""
        start = self._read_up_to.get(name, 0)
        with contextlib.suppress(OSError):
            data = _read(at, name, start)
            self._read_up_to[name] = start + len(data)
            return _rows(data)
        return _rows(b"")

    # Writing

    def put(self, key: bytes, content: bytes) -> None:
        """Remembers a content's hash, 16 bytes, under a key of 16 bytes, and writes now and then."""
        if self._folder is None:
            return
        self._waiting.append(_entry(key, content))
        if len(self._waiting) >= _MOST_WAITING or time.monotonic() - self._flushed >= _REFRESH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes what waits. Where that cannot be done, it is given up."""
        self._flushed = time.monotonic()
        entries = []
        with contextlib.suppress(IndexError):  # a deque, since it needs no lock: other threads may append meanwhile
            while True:
                entries.append(self._waiting.popleft())
        if entries and self._folder is not None:
            with contextlib.suppress(OSError), self._opened(make=True) as at:
                self._append(at, b"".join(entries))
                if self._flushed - self._tidied > _IDLE_SECONDS:
                    self._tidied = self._flushed
                    _tidy(at)

    def _append(self, at: int, data: bytes) -> None:
        # Opened and closed each time: another node sees over NFS what was closed, and a merged file begins anew.
        fd = self._own(at)
        try:
            if os.fstat(fd).st_size % _ENTRY == 0 and os.write(fd, data) == len(data):
                return
        finally:
            os.close(fd)
        # Cut short by a full disk: entries behind a piece of one would be read at the wrong places.
        self._name = f"{self._name.rpartition('-')[0]}-{time.time_ns():x}{_SUFFIX}"

    def _own(self, at: int) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(self._name, flags, 0o666, dir_fd=at)

    def server_time(self, device: int) -> int | None:
        """What the clock of the file server shows now, in ns; None where the cache folder is not on that device.

        A file of ours is touched: who keeps the files stamps it.
        """
        with contextlib.suppress(OSError), self._opened(make=True) as at:
            if os.fstat(at).st_dev != device:
                return None
            fd = self._own(at)
            try:
                os.utime(fd)
                return os.fstat(fd).st_ctime_ns
            finally:
                os.close(fd)
        return None

    @contextlib.contextmanager
    def _opened(self, make: bool) -> Iterator[int]:
        """A descriptor of the folder, which is nobody else's behind a link."""
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


# Entries

_Rows = npt.NDArray[np.uint64]  # of shape (n, 5): two words of the key, two of the content, one of the checksum


def _entry(key: bytes, content: bytes) -> bytes:
    return key + content + xxhash.xxh3_64_digest(key + content)


def _is_whole(entry: bytes) -> bool:
    return xxhash.xxh3_64_digest(entry[:_CHECKED]) == entry[_CHECKED:]


def _rows(data: bytes) -> _Rows:
    return np.frombuffer(data, np.uint64).reshape(-1, _ENTRY // 8)


class _Table:
    """Entries sorted by the first word of their keys. Checksums are looked at when an entry is asked for."""

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
    """Whole entries of a file from ``start`` on; a pipe or a link by that name is not opened."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    with open(fd, "rb", buffering=0) as file:
        st = os.fstat(fd)
        size = (st.st_size - start) // _ENTRY * _ENTRY
        if not stat.S_ISREG(st.st_mode) or not 0 < size <= _MOST_BYTES:
            return b""
        data = os.pread(file.fileno(), size, start)
        return data[: len(data) // _ENTRY * _ENTRY]


def _tidy(at: int) -> None:
    """Merges the files of processes that write no more, where there are many, and removes the oldest of too many bytes.

    Several processes may do so at once, and be killed at any step: a file goes only when another holds what is in it.
    A process that wrote nothing for ten minutes counts as finished. If it still runs, what it appends meanwhile is
    lost, and the files that it is about are read once more.
    """
    found: list[tuple[float, str, int]] = []
    names = [name for name in os.listdir(at) if _OURS.fullmatch(name)]
    if len(names) <= _MOST_FILES:
        return
    for name in names:
        with contextlib.suppress(OSError):
            st = os.stat(name, dir_fd=at, follow_symlinks=False)
            if stat.S_ISREG(st.st_mode):
                found.append((st.st_mtime, name, st.st_size))
    found.sort()
    too_much = sum(size for _, _, size in found) - _MOST_BYTES
    now, idle = time.time(), []
    for age, name, size in found:
        if too_much > 0 or (name.endswith(".new") and now - age > _IDLE_SECONDS):  # half of a merge that was killed
            too_much -= size
            _unlink(at, name)
        elif size < _LARGE and not name.endswith(".new") and now - age > _IDLE_SECONDS:
            idle.append(name)
    if len(idle) > _MOST_FILES // 2:
        _merge(at, idle)


def _merge(at: int, names: list[str]) -> None:
    whole: dict[bytes, None] = {}
    for name in names:
        data = _read(at, name)
        cut = (data[i : i + _ENTRY] for i in range(0, len(data), _ENTRY))
        whole.update(dict.fromkeys(entry for entry in cut if _is_whole(entry)))
    data = b"".join(whole)
    merged = f"merged-{xxhash.xxh3_128_hexdigest(data)}{_SUFFIX}"
    new = f"{merged}.new"  # of the same bytes whoever writes it
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
