"""Two cache directories: one that many machines share, and one on this machine's own drive.

Records are looked for on the own drive first. One that is only in the shared directory is read from there, and copied
byte for byte for the next time, in the background where the process may write there; while many copies wait, it is left
for the epoch after. The copy is a record like any other, verified when it is first read. Its key is the original's, so
it is never out of date. New records go to the shared directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from monai_gds.cache.directory import CacheDirectory
from monai_gds.cache.lazy_item import LazyItem
from monai_gds.cache.pending_item import PendingItem
from monai_gds.cache.single_flight import Leases
from monai_gds.cache.writer import process_writer
from monai_gds.storage import Storage

__all__ = ["TwoTiers"]


class TwoTiers(CacheDirectory):
    """A shared cache directory with one on this machine's drive in front. Arguments as for the shared one alone, and:

    Args:
        near: the directory on this machine's drive, which all processes of the machine may share.
        behind: whether records are copied in the background. Otherwise that is done before a read is waited for.
    """

    def __init__(
        self, near: CacheDirectory, behind: bool, path: str | os.PathLike[str], storage: Storage, **more: Any
    ) -> None:
        super().__init__(path, storage, **more)
        self._near, self._behind = near, behind

    def start(self, digest: str) -> PendingItem | None:
        (found,) = self.start_all([digest])
        return found

    def start_all(self, digests: Sequence[str]) -> list[PendingItem | None]:
        return self._first(digests, CacheDirectory.start_all)

    def start_all_lazily(self, digests: Sequence[str]) -> list[LazyItem | PendingItem | None]:
        return self._first(digests, CacheDirectory.start_all_lazily)

    def _first(self, digests: Sequence[str], start: Callable[[CacheDirectory, Sequence[str]], list[Any]]) -> list[Any]:
        """What the near directory gives, and for the rest what the shared one does, which is copied."""
        found = start(self._near, digests)
        absent = [i for i, one in enumerate(found) if one is None]
        if not absent:
            return found
        for i, one in zip(absent, start(self, [digests[i] for i in absent]), strict=True):
            found[i] = one
            if one is not None:
                self._copy(digests[i])
        return found

    def _copy(self, digest: str) -> None:
        if self._near.full:
            return
        if not self._behind:
            self._copy_now(digest)
            return
        with contextlib.suppress(OSError):  # deleted meanwhile, or lost by its server
            nbytes = os.stat(self.record_path(digest)).st_size
            # under a name of its own: who reads the record does not wait for the copy
            name = f"{self._near.record_path(digest)} from afar"
            process_writer().offer(name, partial(self._copy_now, digest), nbytes)

    def _copy_now(self, digest: str) -> None:
        lease = Leases(self._near.path).take(digest)
        if lease is not None:  # else another process of this machine copies it
            with lease:
                self._near.adopt(digest, self.record_path(digest))
