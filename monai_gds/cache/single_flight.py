"""Leases: of several processes that miss the same record, one computes it, and the others wait or do others first.

    <directory>/.tmp/<digest>.lease    whose item it is to compute: boot, pid namespace, pid, start time, a number

:class:`monai_gds.dataset.GDSDataset` takes a lease before it computes an item and releases it when the record was
renamed, or was not. While a process holds leases, a thread touches their files; the lease of a dead, stopped or frozen
process is taken over. Ages are told by the clock of the file server, which is not this host's.

A lease is an optimisation, not a lock. Whatever the file system refuses ends in a lease without a file, a lost race in
an item that is computed twice, and every wait has a limit. This file imports neither torch nor MONAI.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, TypeVar

from monai_gds.cache.temporary import now as server_time
from monai_gds.cache.temporary import opened, owner, owner_lives

__all__ = ["Lease", "Leases", "Pace", "pace", "take_turn"]

#: How often the files of leases are touched, and the age at which they count as left behind. A transform that keeps
#: Python's global lock for longer loses its lease, which costs a second computation.
BEAT_SECONDS = 2.0
STALE_SECONDS = 10.0

#: How long a process waits for another's item before it has computed one itself.
UNKNOWN_SECONDS = 10.0

#: First and longest pause between two looks at a lease that is waited for.
_PAUSES = 0.001, 0.05

_NAME = re.compile(r"([0-9a-f]{32})\.lease")

T = TypeVar("T")


class Pace:
    """How long items take to compute in this process. Threads note without a lock: a lost note changes little."""

    def __init__(self) -> None:
        self._sum = (0, 0.0)

    def note(self, seconds: float) -> None:
        """Counts an item."""
        count, total = self._sum
        self._sum = count + 1, total + seconds

    @property
    def mean(self) -> float | None:
        """Seconds an item; None before the first."""
        count, total = self._sum
        return total / count if count else None


#: This process's. A forked child goes on with its parent's.
pace = Pace()


class Lease:
    """The right to compute an item, which :meth:`Leases.take` gives. It ends with :meth:`release`, or when dropped.

    As a context manager it is released at the end of the block, unless it was handed over.
    """

    __slots__ = ("__weakref__", "_handed_over", "_mark", "_process", "_ref", "_what", "_written")

    def __init__(self, folder: str, digest: str) -> None:
        self._process = _here
        self._what = folder, digest
        self._mark: bytes | None = None  # what its file says, or is about to; None without a file
        self._written = False
        self._handed_over = False
        self._ref = weakref.ref(self)

    def release(self) -> None:
        """Lets others have the item. May be called again, and from any thread; in a forked child it does nothing."""
        process = self._process
        if process is not _here:
            return
        if process.held.get(self._what) is self._ref:
            process.held.pop(self._what, None)
        self._forget_file()

    def _forget_file(self) -> None:
        if self._mark is not None:
            folder, digest = self._what
            with contextlib.suppress(OSError), opened(folder) as fd:
                written = _look(fd, digest).mark
                if written == self._mark or not (written or self._written):
                    os.unlink(_name(digest), dir_fd=fd)
        self._mark = None

    def hand_over(self) -> Callable[[], None]:
        """Gives :meth:`release` to whoever goes on with the item; the block then releases only after an error."""
        self._handed_over = True
        return self.release

    def _write(self, fd: int) -> bool:
        """Makes the file; False if there is one. ``fd`` is of the folder."""
        self._mark = _here.mark()  # before the file, so that an interrupt does not leave one that nobody removes
        try:
            file = os.open(_name(self._what[1]), _CREATE, 0o666, dir_fd=fd)
        except FileExistsError:
            self._mark = None
            return False
        try:
            os.write(file, self._mark)
            self._written = True
        finally:
            os.close(file)
        return True

    def _beat(self) -> None:
        folder, digest = self._what
        with contextlib.suppress(OSError), opened(folder) as fd:
            file = os.open(_name(digest), _READ, dir_fd=fd)
            try:
                if os.read(file, _MOST) == self._mark:  # else somebody took it over while this process was frozen
                    os.utime(file)  # no time given: the file server's
            finally:
                os.close(file)

    def __enter__(self) -> Lease:
        self._handed_over = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or not self._handed_over:
            self.release()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter's modules may be gone
            self.release()


class Leases:
    """The leases of one cache directory. All objects over one directory share them, as do a process's threads.

    Args:
        directory: the cache directory; its ``.tmp`` is made when it is missing.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._folder = os.path.realpath(directory)

    def take(self, digest: str) -> Lease | None:
        """The lease of an item, with or without a file; None when somebody else holds it and lives.

        Args:
            digest: of the item's key, 32 hex digits.
        """
        lease = Lease(self._folder, digest)
        if not _here.claim(lease):
            return None
        try:
            if self._make_file(lease):
                _here.keep_beating()
                return lease
        except OSError:  # full, read-only, somebody else's: computed all the same
            lease._forget_file()
            return lease
        except BaseException:
            lease.release()
            raise
        lease.release()
        return None

    def none(self, digest: str) -> Lease:
        """A lease of nothing, for an item that is computed without."""
        return Lease(self._folder, digest)

    def wait(self, digest: str, limit_s: float) -> bool:
        """Waits while an item is leased to somebody who lives.

        Args:
            digest: of the item's key.
            limit_s: seconds to wait at most.

        Returns:
            Whether nobody holds it any more.
        """
        end = time.monotonic() + limit_s
        pause, longest = _PAUSES
        while self.held_elsewhere(digest):
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)
        return True

    def held_elsewhere(self, digest: str) -> bool:
        """Whether another process, or a thread of this one, holds an item's lease and lives."""
        if _here.holds((self._folder, digest)):
            return True
        try:
            with opened(self._folder) as fd:
                return not self._is_abandoned(fd, _look(fd, digest))
        except OSError:
            return False

    def sweep(self) -> None:
        """Removes the leases that dead processes left, which nobody may ever ask for again."""
        with contextlib.suppress(OSError), opened(self._folder) as fd:
            for name in os.listdir(fd):
                found = _NAME.fullmatch(name)
                if found is not None and not _here.holds((self._folder, found[1])):
                    with contextlib.suppress(OSError):
                        self._evict(fd, found[1])

    def _make_file(self, lease: Lease) -> bool:
        """Whether the lease is ours now. Raises OSError where no file can be made."""
        _, digest = lease._what
        with opened(self._folder, create=True) as fd:
            for _ in range(2):
                if lease._write(fd):
                    return True
                with contextlib.suppress(FileNotFoundError):
                    if not self._evict(fd, digest):
                        return False
        return False

    def _evict(self, fd: int, digest: str) -> bool:
        """Removes a lease whose holder is gone, and returns whether it was."""
        seen = _look(fd, digest)
        if not self._is_abandoned(fd, seen):
            return False
        now = os.stat(_name(digest), dir_fd=fd, follow_symlinks=False)
        if now.st_ino != seen.inode or now.st_mtime != seen.touched:  # taken over by somebody else meanwhile
            return False
        os.unlink(_name(digest), dir_fd=fd)
        return True

    def _is_abandoned(self, fd: int, seen: _Seen) -> bool:
        """Whether nobody holds a lease any more. The caller has checked that this process does not."""
        holder = seen.mark.decode(errors="replace").rpartition(".")[0]
        if holder == _here.owner or owner_lives(holder) is False:
            return True
        # Of a time to come too: the server's clock was put back.
        return abs(_here.server_time(self._folder, fd) - seen.touched) > STALE_SECONDS


def take_turn(directory: str | os.PathLike[str], digest: str, look: Callable[[], T | None]) -> tuple[Lease, T | None]:
    """Takes the lease of an item that is wanted now, or waits for whoever holds it.

    It waits no longer than an item takes in this process. Then the item is computed without a lease.

    Args:
        directory: the cache directory.
        digest: of the item's key.
        look: gives the record if it is there.

    Returns:
        A lease to compute the item under, and None; or one of nothing, and what ``look`` found.
    """
    leases = Leases(directory)
    end = time.monotonic() + (pace.mean or UNKNOWN_SECONDS)
    while True:
        lease = leases.take(digest)
        with lease or leases.none(digest) as mine:
            found = look()  # whoever had the lease may have just finished
            if lease is not None and found is None:
                mine.hand_over()
        if lease is not None or found is not None:
            return mine, found
        left = end - time.monotonic()
        if left <= 0:
            return leases.none(digest), None
        leases.wait(digest, left)


# ---------------------------------------------------------------------------------------------------------------------
# What belongs to a process


class _Process:
    """The leases that a process holds, and the thread that touches their files.

    Dictionaries are changed by single operations and without a lock: the garbage collector may release a lease
    anywhere.

    Attributes:
        held: by folder and digest.
        owner: this process, in the words of a lease.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], weakref.ref[Lease]] = {}
        self._count = itertools.count()
        self._clocks: dict[str, tuple[float, float]] = {}
        self._thread: threading.Thread | None = None
        self._wake = threading.Lock()  # released to wake the thread, which takes it again
        self._wake.acquire()
        self._owner: str | None = None

    @property
    def owner(self) -> str:
        if self._owner is None:  # read once: /proc is slow
            self._owner = owner()
        return self._owner

    def mark(self) -> bytes:
        """What a new lease's file says: no other's says the same."""
        return f"{self.owner}.{next(self._count)}".encode()

    def claim(self, lease: Lease) -> bool:
        """Whether no other thread of this process holds it."""
        while True:
            known = self.held.setdefault(lease._what, lease._ref)
            if known is lease._ref:
                return True
            if known() is not None:
                return False
            if self.held.get(lease._what) is known:
                self.held.pop(lease._what, None)

    def holds(self, what: tuple[str, str]) -> bool:
        """Whether a thread of this process holds the lease of that folder and digest."""
        known = self.held.get(what)
        return known is not None and known() is not None

    def server_time(self, folder: str, fd: int) -> float:
        """The time by the clock that dates the files of a folder. Asked once a beat, and reckoned in between."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps
        ahead, asked = self._clocks.get(folder, (0.0, -BEAT_SECONDS))
        if not asked <= now < asked + BEAT_SECONDS:
            told = server_time(fd)
            if told is None:
                raise OSError("the time cannot be asked for where no file can be made")
            ahead, asked = told - now, now
            self._clocks[folder] = ahead, asked
        return now + ahead

    # The thread. It is begun and ended without a lock, since an interrupt could leave one locked for ever.

    def keep_beating(self) -> None:
        """Sees to it that the thread runs."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._thread = thread = threading.Thread(target=self._beat, name="monai-gds-leases", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: others may take the lease over
                thread.start()

    def _beat(self) -> None:
        me = threading.current_thread()
        while self._thread is me:  # else two were begun at once
            self._wake.acquire(timeout=BEAT_SECONDS)
            if not self.held and self._thread is me:
                self._thread = None
                if not self.held:  # looked at once more: who claims a lease looks at the thread afterwards
                    return
                self.keep_beating()
            for ref in list(self.held.values()):
                _beat_for(ref)

    def end_idle_thread(self) -> None:
        """Before a fork: Python 3.12 warns of forks of a process that has threads."""
        for _ in range(20):  # not without end: it may be waiting for the file server
            thread = self._thread
            if self.held or thread is None or not thread.is_alive():
                return
            with contextlib.suppress(RuntimeError):  # it is being woken already
                self._wake.release()
            thread.join(0.05)


def _beat_for(ref: weakref.ref[Lease]) -> None:
    lease = ref()  # in a function of its own: the thread must not be what keeps a lease
    if lease is not None:
        lease._beat()


_here = _Process()


def _begin_anew() -> None:
    """What the parent holds is the parent's to touch and to release."""
    global _here
    _here = _Process()


def _before_fork() -> None:
    _here.end_idle_thread()


os.register_at_fork(before=_before_fork, after_in_child=_begin_anew)


# ---------------------------------------------------------------------------------------------------------------------
# Files, all of them relative to a descriptor of the folder


_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

#: Bytes of a lease that are read: more than any has.
_MOST = 256


class _Seen(NamedTuple):
    """A lease's file: what it says, which file it is, when it was touched by the file server's clock."""

    mark: bytes
    inode: int
    touched: float


def _name(digest: str) -> str:
    return f"{digest}.lease"


def _look(fd: int, digest: str) -> _Seen:
    try:
        file = os.open(_name(digest), _READ, dir_fd=fd)  # opened, since NFS asks the server then: stat may be old
    except PermissionError:  # of a user who lets nobody read: its age is seen all the same
        found = os.stat(_name(digest), dir_fd=fd, follow_symlinks=False)
        return _Seen(b"", found.st_ino, found.st_mtime)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{_name(digest)} is not a file")
        return _Seen(os.read(file, _MOST), found.st_ino, found.st_mtime)
    finally:
        os.close(file)
