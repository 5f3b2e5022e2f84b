"""How many bytes the records of a directory may occupy, and which of them are deleted to make room.

The least recently used records are deleted, but never these: records that were noted as used since the run began,
records of a pipeline that a process uses now (:mod:`monai_gds.folder.uses`), and files that cannot be read. So a run
never deletes what it caches itself, and an epoch larger than the budget keeps hitting what is there: the rest is
computed and not cached.

A budget is a file of the directory, ``.index/budget.json``, which every process heeds from the next ten seconds on. An
argument of one process may only lower it.

Looking at a large directory takes seconds. So a process reserves a part of the room that is left, and makes room for
more than one record, before it looks again. Each process may exceed the budget by what it reserved. Imports only the
standard library.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time

from monai_gds import limits
from monai_gds.base.notices import Notice
from monai_gds.base.units import shown
from monai_gds.errors import NotSaved
from monai_gds.folder import maintenance
from monai_gds.folder.index import Index
from monai_gds.folder.maintenance import Found, idle
from monai_gds.folder.uses import Used, Uses
from monai_gds.records import header
from monai_gds.shared.notes import Notes, read
from monai_gds.shared.temporary import ANY, publish

#: Seconds until a directory without room is looked at again.
LOOK_AGAIN = 60.0

#: How old, in seconds, the knowledge of which records are in use may be when a record is deleted.
KNOWN_SECONDS = 1.0


#: Seconds for which what is written in a directory counts as known.
_HEED_SECONDS = 10.0

_NAME = "budget.json"


def written(directory: str | os.PathLike[str]) -> int | None:
    """The budget that is written in a directory, in bytes; None if there is none."""
    with (
        contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError),
        Notes(directory, "budget").folder() as folder,
    ):
        nbytes = json.loads(read(folder, _NAME))["bytes"]
        return nbytes if type(nbytes) is int and nbytes >= 0 else None
    return None


def write(directory: str | os.PathLike[str], nbytes: int | None) -> None:
    """Writes the budget of a directory for all processes; None removes it.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with Notes(directory, "budget").folder(make=True) as folder:
            if nbytes is not None:
                publish(os.path.abspath(directory), _NAME, json.dumps({"bytes": nbytes}).encode(), into=folder)
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_NAME, dir_fd=folder)
    except OSError as e:
        if e.filename is not None:
            e.filename = os.path.join(directory, e.filename)  # which is opened by its name in the directory
        raise


def limit_of(directory: str | os.PathLike[str], given: int | None) -> int | None:
    """How many bytes the records of a directory may occupy for a process that was given a limit of its own."""
    return min((one for one in (written(directory), given) if one is not None), default=None)


class OverBudget(NotSaved):
    """A record does not fit into the budget of its directory."""


class Budget:
    """The budget of a directory, as one process of a run sees it. Thread-safe.

    Args:
        directory: the cache directory.
        nbytes: how much its records may occupy, for this process; None: what is written in the directory.
        uses: what is used of it.
        began: when the run began.
        file_mode: permissions that files have at most.
        argument: the user's name for ``nbytes``.
    """

    def __init__(
        self,
        directory: str,
        nbytes: int | None,
        uses: Uses,
        began: float,
        file_mode: int = ANY,
        argument: str = "max_bytes",
    ) -> None:
        self._given, self._limit, self._read = nbytes, nbytes, -math.inf
        self._directory, self._uses, self._began = directory, uses, began
        self._file_mode, self._argument = file_mode, argument
        self._reserved = 0  # bytes that this process may write before it looks again
        self._idle: list[Found] = []  # the least recently used comes last
        self._refused = -math.inf
        self._found_full = Notice("full", directory, argument, began)  # by any process of the run
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int | None:
        """How much the records may occupy; None: there is no limit."""
        if time.monotonic() >= self._read + _HEED_SECONDS:
            self._limit, self._read = limit_of(self._directory, self._given), time.monotonic()
        return self._limit

    @property
    def full(self) -> bool:
        """Whether there was no room for a record recently, so that others need not be prepared for writing."""
        refused = self._refused if self._reserved else self._found_full.last_given()
        return time.monotonic() < refused + LOOK_AGAIN

    def take(self, nbytes: int) -> None:
        """Takes room for a record that will be written, after deleting others if need be.

        Raises:
            OverBudget: there is no room.
        """
        limit = self.nbytes
        if limit is None:
            return
        with self._lock:
            if self._reserved < nbytes:
                self._reserved = self._look(nbytes, limit)
            if self._reserved < nbytes:
                remedy = f"raise {self._argument}" if limit == self._given else "raise it with `monai-gds cache budget`"
                if nbytes > limit:  # others may fit
                    raise OverBudget(
                        f"its budget of {shown(limit)} is smaller than a record of {shown(nbytes)}: {remedy}"
                    )
                self._refused = time.monotonic()
                self._found_full.mark_given()
                users = ", ".join(self._uses.users())
                raise OverBudget(
                    f"its budget of {shown(limit)} has no room for a record of {shown(nbytes)} beside those that "
                    f"are in use{f' (by {users})' if users else ''}, or were since this run began: {remedy}, or delete "
                    "records with `monai-gds cache prune`"
                )
            self._reserved -= nbytes

    def _look(self, nbytes: int, limit: int) -> int:
        """The bytes that this process may write now: at least ``nbytes``, if there is room or it can be made."""
        room, freed = limit - total(self._directory), 0
        if room < nbytes:
            freed = self._evict(nbytes - room, nbytes - room + _part(limit))
            room += freed
        return min(room, max(nbytes, freed, _part(room)))

    def _evict(self, least: int, most: int) -> int:
        """Deletes idle records of at least ``least`` bytes, and more up to ``most``. Deletes none if there are too few.

        Returns how many bytes were deleted.
        """
        if sum(record.nbytes for record in self._idle) < least:
            records = maintenance.survey(self._directory, Index(self._directory, self._file_mode))
            self._idle = [record for _, record in reversed(idle(records, self._uses.look(), self._began))]
            if sum(record.nbytes for record in self._idle) < least:
                return 0
        freed = 0
        while self._idle and (freed < least or freed + self._idle[-1].nbytes <= most):
            freed += self._delete(self._idle.pop(), self._uses.look(KNOWN_SECONDS))
        return freed

    def _delete(self, record: Found, used: Used) -> int:
        """Deletes a record unless it was used, replaced or deleted meanwhile. Returns how many bytes were deleted."""
        now = maintenance.look(record.file)  # not from the index, which others write
        if now is None or not idle([now], used, self._began):
            return 0
        try:
            return now.nbytes if maintenance.remove(now) else 0
        except OSError:  # another user's, in a folder with the sticky bit
            return 0


def _part(nbytes: int) -> int:
    return min(nbytes // limits.BUDGET_PARTS, limits.BUDGET_PART_BYTES)


def total(directory: str | os.PathLike[str]) -> int:
    """The bytes of the records of a directory."""
    total = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if header.digest_in(entry.name):
                with contextlib.suppress(OSError):  # deleted meanwhile
                    total += entry.stat().st_size
    return total
