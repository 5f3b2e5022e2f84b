"""Leases: of several processes that miss the same record, one computes it while the others wait or do other items.

    <directory>/.tmp/<digest>.lease    holds the mark of its holder (monai_gds.shared.owner)

:class:`monai_gds.dataset.dataset.GDSDataset` takes a lease before it computes an item, and releases it once the record
has been published or has failed. While a process holds leases, a thread touches their files. The lease of a dead,
stopped or frozen process is taken over. Ages are measured by the file server's clock, which may differ from this
host's.

A lease is an optimisation, not a lock. If the file system refuses something, there is a lease without a file; a lost
race costs a second computation; and every wait has a limit. Imports neither torch nor MONAI.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from monai_gds.base import file_systems
from monai_gds.base.process import PerProcess
from monai_gds.shared.owner import gone, mark, this_process
from monai_gds.shared.temporary import READ, create, opened, read

#: Seconds between two touches of a lease's file.
BEAT_SECONDS = 2.0

#: Age, in seconds, at which a lease counts as abandoned. A transform that holds the GIL longer loses its lease, which
#: costs a second computation.
STALE_SECONDS = 10.0

#: How long to wait for another process's item, in seconds, before this one has computed any.
UNKNOWN_SECONDS = 10.0

#: First and longest pause between two looks at a lease, in seconds.
_PAUSES = 0.001, 0.05

_NAME = re.compile(r"([0-9a-f]{32})\.lease")

T = TypeVar("T")


class Pace:
    """How long items take to compute in this process. There is no lock: losing a note changes little."""

    def __init__(self) -> None:
        self._sum = (0, 0.0)

    def note(self, seconds: float) -> None:
        count, total = self._sum
        self._sum = count + 1, total + seconds

    @property
    def mean(self) -> float | None:
        """Seconds per item; None before the first."""
        count, total = self._sum
        return total / count if count else None


#: This process's pace. A forked child continues with its parent's.
pace = Pace()


class Lease:
    """The right to compute an item, from :meth:`Leases.take`. Ends with :meth:`release`.

    As a context manager it is released at the end of the block, unless it was handed over. The file of one that was
    dropped is removed by the thread that touches leases, since a Ctrl-C would be lost in a ``__del__``.
    """

    __slots__ = ("__weakref__", "_handed_over", "_holder", "_mark", "_what")

    def __init__(self, folder: str, digest: str, own: bytes) -> None:
        self._holder = _here()
        self._what = folder, digest
        self._handed_over = False
        self._mark = own  # the content of its file, if it gets one; empty if it holds nothing

    def release(self) -> None:
        """Lets others take the lease. May be called repeatedly and from any thread; a no-op in a forked child."""
        holder = self._holder
        if holder is not _here.made() or not self._mark:
            return
        held = holder.held.get(self._what)
        if held is not None and held.mark == self._mark:
            holder.held.pop(self._what, None)
        _remove_file(self._what, self._mark)

    def hand_over(self) -> Callable[[], None]:
        """Passes :meth:`release` on to code that continues with the item. The block then releases only on errors."""
        self._handed_over = True
        return self.release

    def _write(self, fd: int) -> bool:
        """Creates the file in the folder ``fd``, with its content; False if it exists."""
        digest = self._what[1]
        name = f"{digest}.{self._mark.decode()}"  # a temporary file, until it is linked
        try:
            create(fd, name, self._mark)
            _link(fd, name, _name(digest))
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
        return True

    def _beat(self) -> None:
        folder, digest = self._what
        with (
            contextlib.suppress(OSError), opened(folder) as fd,
            file_systems.opened(_name(digest), READ, folder=fd) as file,
        ):  # fmt: skip
            if os.read(file, _MOST_BYTES) == self._mark:  # else it was taken over while this process was frozen
                os.utime(file)  # to the file server's time; by name it could be another's file by now

    def __enter__(self) -> Lease:
        self._handed_over = False
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None or not self._handed_over:
            self.release()


class Leases:
    """The leases of one cache directory. All objects over one directory share them, as do a process's threads.

    The directory's ``.tmp`` is made when it is missing.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._folder = os.path.realpath(directory)

    def take(self, digest: str) -> Lease | None:
        """Takes the lease of an item by its digest. None if another thread or process holds it.

        If its file cannot be created, the lease has none.
        """
        lease = Lease(self._folder, digest, mark().encode())
        if not lease._holder.claim(lease):
            return None
        with lease:
            try:
                if self._make_file(lease):
                    lease._holder.keep_beating()
                    lease.hand_over()
            except OSError:  # full, read-only, somebody else's: computed all the same
                _remove_file(lease._what, lease._mark)
                lease.hand_over()
        return lease if lease._handed_over else None

    @staticmethod
    def none() -> Lease:
        """A lease that holds nothing, for an item that is computed without one."""
        return Lease("", "", b"")

    def wait(self, digest: str, limit_s: float) -> bool:
        """Waits at most ``limit_s`` seconds while another holder of a lease lives. Returns whether it is free."""
        end = time.monotonic() + limit_s
        pause, longest = _PAUSES
        while self.held_elsewhere(digest):
            remaining = end - time.monotonic()
            if remaining <= 0:
                return False
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, longest)
        return True

    def held_elsewhere(self, digest: str) -> bool:
        """Whether a living process, or a thread of this one, holds an item's lease."""
        if _here().holds((self._folder, digest)):
            return True
        with contextlib.suppress(OSError), opened(self._folder) as fd:
            return not _is_abandoned(fd, *_look(fd, digest))
        return False

    def sweep(self) -> None:
        """Removes the leases of dead processes. Nobody may ever ask for these items again."""
        with contextlib.suppress(OSError), opened(self._folder) as fd:
            for name in os.listdir(fd):
                found = _NAME.fullmatch(name)
                if found is not None and not _here().holds((self._folder, found[1])):
                    with contextlib.suppress(OSError):
                        self._evict(fd, found[1])

    def _make_file(self, lease: Lease) -> bool:
        """Whether the lease is ours now. Raises OSError if no file can be created."""
        _, digest = lease._what
        with opened(self._folder, make=True) as fd:
            for _ in range(2):
                if lease._write(fd):
                    return True
                with contextlib.suppress(FileNotFoundError):
                    if not self._evict(fd, digest):
                        return False
        return False

    def _evict(self, fd: int, digest: str) -> bool:
        """Removes a lease if its holder is gone, and returns whether it was."""
        written, seen = _look(fd, digest)
        if not _is_abandoned(fd, written, seen):
            return False
        now = os.stat(_name(digest), dir_fd=fd, follow_symlinks=False)
        if (now.st_ino, now.st_mtime) != (seen.st_ino, seen.st_mtime):  # taken over by another process meanwhile
            return False
        os.unlink(_name(digest), dir_fd=fd)
        return True


def take_turn(directory: str | os.PathLike[str], digest: str, look: Callable[[], T | None]) -> tuple[Lease, T | None]:
    """Takes the lease of an item that is needed now, or waits for its holder, until ``look`` returns its record.

    It waits no longer than an item takes in this process. Then the item is computed without a lease.

    Returns:
        A lease under which to compute the item, and None; or one that holds nothing, and what ``look`` found.
    """
    leases = Leases(directory)
    end = time.monotonic() + (pace.mean or UNKNOWN_SECONDS)
    while True:
        lease = leases.take(digest)
        with lease or leases.none() as mine:
            found = look()  # the previous holder may have just finished
            if lease is not None and found is None:
                mine.hand_over()
        if lease is not None or found is not None:
            return mine, found
        remaining = end - time.monotonic()
        if remaining <= 0:
            return leases.none(), None
        leases.wait(digest, remaining)


# ---------------------------------------------------------------------------------------------------------------------
# Per process


class _Held(NamedTuple):
    """A lease as its process holds it, and after it was dropped."""

    lease: weakref.ref[Lease]
    mark: bytes


class _Holder:
    """The leases that a process holds, and the thread that touches their files.

    Dictionaries are changed by single operations without a lock, which an interrupt could leave locked.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], _Held] = {}  # by folder and digest
        self._thread: threading.Thread | None = None
        self._woken: SimpleQueue[object] = SimpleQueue()  # wakes the thread
        # written in C, as what is called for a dropped lease must be: no Ctrl-C strikes there
        self.wake = self._woken.put

    def claim(self, lease: Lease) -> bool:
        """Whether no other thread of this process holds it."""
        mine = _Held(weakref.ref(lease, self.wake), lease._mark)
        while True:
            known = self.held.setdefault(lease._what, mine)
            if known is mine:
                return True
            if known.lease() is not None:
                return False
            if self.held.get(lease._what) is known:
                self.held.pop(lease._what, None)

    def holds(self, what: tuple[str, str]) -> bool:
        known = self.held.get(what)
        return known is not None and known.lease() is not None

    # The thread is started and ended without a lock, which an interrupt could leave locked forever.

    def keep_beating(self) -> None:
        """Starts the thread unless it runs."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._thread = thread = threading.Thread(target=self._beat, name="monai-gds-leases", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: others may take the lease over
                thread.start()

    def _beat(self) -> None:
        me = threading.current_thread()
        while self._thread is me:  # else two were started at once
            with contextlib.suppress(Empty):
                self._woken.get(timeout=BEAT_SECONDS)
            if not self.held and self._thread is me:
                self._thread = None
                if not self.held:  # checked again: take() claims a lease first, and then looks at the thread
                    return
                self.keep_beating()
            for what, held in list(self.held.items()):
                if not _beat_for(held):  # nobody has it any more
                    if self.held.get(what) is held:
                        self.held.pop(what, None)
                    _remove_file(what, held.mark)

    def end_idle_thread(self) -> None:
        """Called before a fork, since Python 3.12 warns of forks of a process with threads."""
        for _ in range(20):  # limited: the thread may be waiting for the file server
            thread = self._thread
            if self.held or thread is None or not thread.is_alive():
                return
            self.wake(None)
            thread.join(0.05)


def _beat_for(held: _Held) -> bool:
    """Touches the file of a lease; False if nobody has it any more."""
    lease = held.lease()  # in a function of its own, so that the thread does not keep a lease alive
    if lease is not None:
        lease._beat()
    return lease is not None


#: The holder that is this process. A forked child has its own; its parent's leases stay its parent's.
_here: PerProcess[_Holder] = PerProcess(_Holder)


def _before_fork() -> None:
    holder = _here.made()
    if holder is not None:
        holder.end_idle_thread()


os.register_at_fork(before=_before_fork)


# ---------------------------------------------------------------------------------------------------------------------
# Files, relative to a descriptor of their folder


#: Bytes of a lease that are read, more than any has.
_MOST_BYTES = 256


def _name(digest: str) -> str:
    return f"{digest}.lease"


def _remove_file(what: tuple[str, str], own: bytes) -> None:
    """Removes the file of a lease with this mark, unless it is another's by now."""
    folder, digest = what
    with contextlib.suppress(OSError), opened(folder) as fd:
        if _look(fd, digest)[0] == own:
            os.unlink(_name(digest), dir_fd=fd)


def _link(fd: int, name: str, lease: str) -> None:
    """Gives a file the name of a lease. Raises FileExistsError if there is one."""
    try:
        os.link(name, lease, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, where two may take a lease at once
        with contextlib.suppress(FileNotFoundError):
            os.stat(lease, dir_fd=fd, follow_symlinks=False)
            raise FileExistsError(lease) from None
        os.rename(name, lease, src_dir_fd=fd, dst_dir_fd=fd)


def _look(fd: int, digest: str) -> tuple[bytes, os.stat_result]:
    """The mark in a lease's file, and what the file was then."""
    try:
        return read(fd, _name(digest), _MOST_BYTES)
    except PermissionError:  # another user's unreadable file; its age shows all the same
        return b"", os.stat(_name(digest), dir_fd=fd, follow_symlinks=False)


def _is_abandoned(fd: int, written: bytes, seen: os.stat_result) -> bool:
    """Whether a lease is abandoned. The caller has checked that this process does not hold it."""
    holder = written.decode(errors="replace")
    return holder.startswith(f"{this_process()}.") or gone(holder, seen.st_mtime, STALE_SECONDS, fd, beats=True)
