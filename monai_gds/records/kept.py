"""Packed records that stay in the memory of a CUDA device: a hit on one of them is decoded, without a read or a copy.

Used by :mod:`monai_gds.records.reader`. An epoch reads every record once, so the first records are kept and none is
replaced by another.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from monai_gds.storage import FileId

__all__ = ["KeptRecords"]


class KeptRecords:
    """What was read of records, by path, within a budget. Thread-safe.

    Args:
        budget: bytes on the device.

    Attributes:
        nbytes: bytes kept now.
    """

    def __init__(self, budget: int) -> None:
        self.nbytes = 0
        self._budget = budget
        self._records: dict[str, tuple[FileId, Sequence[torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def get(self, path: str) -> Sequence[torch.Tensor] | None:
        """The tensors kept of the file that is at a path now; None if there are none.

        Raises:
            OSError: the file no longer exists.
        """
        found = self._records.get(path)
        if found is None:
            return None
        file, raw = found
        if FileId.of(path) == file:
            return raw
        self.drop(path)
        return None

    def has_room(self, path: str, nbytes: int) -> bool:
        """Whether a record of ``nbytes`` would be kept. Another thread may take the room meanwhile."""
        return path in self._records or self.nbytes + nbytes <= self._budget

    def keep(self, path: str, file: FileId, raw: Sequence[torch.Tensor]) -> None:
        """Keeps what was read of a file, if there is room. Nobody else may write to it."""
        nbytes = sum(tensor.nbytes for tensor in raw)
        with self._lock:
            if path not in self._records and self.nbytes + nbytes <= self._budget:
                self._records[path] = file, raw
                self.nbytes += nbytes

    def drop(self, path: str) -> None:
        """Frees what was kept of a path, if anything."""
        with self._lock:
            found = self._records.pop(path, None)
            if found is not None:
                self.nbytes -= sum(tensor.nbytes for tensor in found[1])
