"""Two cache directories: one that many machines share, and one on this machine's own drive.

Records are looked for on this machine's drive first. A record that is only in the shared directory is read from there,
and copied byte for byte for the next time, in the background if the process may write there. If many copies are
waiting, it is left for the next epoch. The copy is a record like any other, verified when it is first read. Its key is
the original's, so it is never out of date. New records go to the shared directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from monai_gds.folder.directory import CacheDirectory
from monai_gds.folder.writer import process_writer
from monai_gds.records.pending import First, PendingItem
from monai_gds.shared.leases import Leases
from monai_gds.storage import Storage


class TwoTiers(CacheDirectory):
    """A shared cache directory with one on this machine's drive in front. Arguments as for the shared one alone, and:

    Args:
        near: the directory on this machine's drive, which all processes of the machine may share.
        in_background: whether records are copied in the background. Otherwise they are copied at once.
    """

    def __init__(
        self, near: CacheDirectory, in_background: bool, path: str | os.PathLike[str], storage: Storage, **more: Any
    ) -> None:
        super().__init__(path, storage, **more)
        self._near, self._in_background = near, in_background

    def start(self, digests: Sequence[str], first: First = "all") -> list[PendingItem | None]:
        """Starts records from the near directory, and those it lacks from the shared one. Those are then copied."""
        found = self._near.start(digests, first)
        absent = [i for i, one in enumerate(found) if one is None]
        if not absent:
            return found
        for i, one in zip(absent, super().start([digests[i] for i in absent], first), strict=True):
            found[i] = one
            if one is not None:
                self._copy(digests[i])
        return found

    def _copy(self, digest: str) -> None:
        if self._near.full:
            return
        if not self._in_background:
            self._copy_now(digest)
            return
        with contextlib.suppress(OSError):  # deleted meanwhile, or lost by its server
            nbytes = os.stat(self.record_path(digest)).st_size
            process_writer().offer(self._name(digest), partial(self._copy_now, digest), nbytes)

    def settle(self, digest: str) -> None:
        """Waits until a record is copied, if it is being copied."""
        process_writer().wait_for(self._name(digest))

    def _name(self, digest: str) -> str:
        """The name of a copy in the queue: not the record's, or all who read that would wait for the copy."""
        return f"{self._near.record_path(digest)} from afar"

    def _copy_now(self, digest: str) -> None:
        lease = Leases(self._near.path).take(digest)
        if lease is not None:  # else another process of this machine copies it
            with lease:
                self._near.adopt(digest, self.record_path(digest))
