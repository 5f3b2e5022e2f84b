"""How many bytes the records of a directory may occupy, and which of them are deleted to make room.

The least recently used records are deleted, but never these: records that were noted as used since the run began,
records of a pipeline that a process uses now (:mod:`monai_gds.folder.uses`), and files that cannot be read. So a run
never deletes what it caches itself, and an epoch larger than the budget keeps hitting what is there: the rest is
computed and not cached.

Looking at a large directory takes seconds. So a process reserves a part of the room that is left, and makes room for
more than one record, before it looks again. Each process may exceed the budget by what it reserved. Imports only the
standard library.
"""

from __future__ import annotations

import contextlib
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
from monai_gds.shared.temporary import ANY

#: Seconds until a directory without room is looked at again.
LOOK_AGAIN = 60.0

#: How old, in seconds, the knowledge of which records are in use may be when a record is deleted.
KNOWN_SECONDS = 1.0


class OverBudget(NotSaved):
    """A record does not fit into the budget of its directory."""


class Budget:
    """The budget of a directory, as one process of a run sees it. Thread-safe.

    Args:
        directory: the cache directory.
        nbytes: how much its records may occupy.
        uses: what is used of it.
        began: when the run began.
        file_mode: permissions that files have at most.
        argument: the user's name for ``nbytes``.

    Attributes:
        nbytes: the same.
    """

    def __init__(
        self, directory: str, nbytes: int, uses: Uses, began: float, file_mode: int = ANY, argument: str = "max_bytes"
    ) -> None:
        self.nbytes = nbytes
        self._directory, self._uses, self._began = directory, uses, began
        self._file_mode, self._argument = file_mode, argument
        self._reserved = 0  # bytes that this process may write before it looks again
        self._idle: list[Found] = []  # the least recently used comes last
        self._refused = -math.inf
        self._found_full = Notice("full", directory, argument, began)  # by any process of the run
        self._lock = threading.Lock()

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
        with self._lock:
            if self._reserved < nbytes:
                self._reserved = self._look(nbytes)
            if self._reserved < nbytes:
                if nbytes > self.nbytes:  # others may fit
                    raise OverBudget(
                        f"its budget of {shown(self.nbytes)} is smaller than a record of {shown(nbytes)}: raise "
                        f"{self._argument}"
                    )
                self._refused = time.monotonic()
                self._found_full.mark_given()
                raise OverBudget(
                    f"its budget of {shown(self.nbytes)} has no room for a record of {shown(nbytes)} beside those that "
                    f"are in use, or were since this run began: raise {self._argument}, or delete records with "
                    "`monai-gds cache prune`"
                )
            self._reserved -= nbytes

    def _look(self, nbytes: int) -> int:
        """The bytes that this process may write now: at least ``nbytes``, if there is room or it can be made."""
        room, freed = self.nbytes - _total(self._directory), 0
        if room < nbytes:
            freed = self._evict(nbytes - room, nbytes - room + _part(self.nbytes))
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


def _total(directory: str) -> int:
    """The bytes of the records of a directory."""
    total = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if header.digest_in(entry.name):
                with contextlib.suppress(OSError):  # deleted meanwhile
                    total += entry.stat().st_size
    return total
