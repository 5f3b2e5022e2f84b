"""What a process keeps in memory of records it has read, so that the next hit takes one request and parses nothing.

Used by :mod:`monai_gds.cache.reading` only.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from monai_gds import limits
from monai_gds.cache.header import Header
from monai_gds.cache.tree import Recipe, TreePlan, compile_tree
from monai_gds.storage import FileId, Reads

__all__ = ["Form", "HeadMemory", "RecordHead", "TensorTable"]


#: Bytes a record with one tensor takes besides its recipe and its path: ids, checksums, slots in dicts.
_HEAD_BYTES = 800


class Form(NamedTuple):
    """The form in which items come out of records.

    Attributes:
        track_meta: False returns MetaTensors as plain tensors.
        numpy: True returns arrays as NumPy arrays, False as tensors.
        root: the data root that paths in records are relative to, or None.
    """

    track_meta: bool = True
    numpy: bool = False
    root: str | None = None


class TensorTable:
    """Where the tensors of a record lie; shared by all records with the same tensors.

    Attributes:
        tensors: name, dtype and shape of each.
        reads: a template: where each lies, of a file yet to be named.
    """

    def __init__(self, entries: Sequence[tuple[str, torch.dtype, tuple[int, ...], int, int]]) -> None:
        self.tensors = [(name, dtype, shape) for name, dtype, shape, _, _ in entries]
        ranges = [(offset, nbytes) for *_, offset, nbytes in entries]
        self.reads = Reads.of("", ranges or [(0, 0)])  # a read of nothing: the file is opened, and its identity checked


_shared_table = functools.lru_cache(maxsize=256)(TensorTable)


class RecordHead(NamedTuple):
    """All that is needed to read a record again in one request.

    Attributes:
        file: identity of the file it was read from.
        recipe: puts the item together.
        table: where its tensors lie.
        checksums: of each tensor.
    """

    file: FileId
    recipe: Recipe
    table: TensorTable
    checksums: tuple[int, ...]

    @classmethod
    def of(cls, record: Header, file: FileId, arrays: bytes, form: Form) -> RecordHead:
        """The head of a record; ``arrays`` is its packed block of small arrays."""
        recipe = compile_tree(record.tree, arrays, record.tensors, **form._asdict())
        entries = [(name, getattr(torch, e.dtype), e.shape, e.offset, e.nbytes) for name, e in record.tensors.items()]
        return cls(file, recipe, _shared_table(tuple(entries)), tuple(e.checksum for e in record.tensors.values()))


class HeadMemory:
    """Heads by record path, within a memory budget. Thread-safe.

    Attributes:
        nbytes: estimated bytes of memory in use.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._heads: dict[str, tuple[RecordHead, int]] = {}  # with the bytes each takes
        self._plans: weakref.WeakSet[TreePlan] = weakref.WeakSet()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._heads)

    def get(self, path: str) -> RecordHead | None:
        """The head kept for a path. The file may have changed since, which opening it to read shows."""
        known = self._heads.get(path)
        return None if known is None else known[0]

    def keep(self, path: str, head: RecordHead) -> None:
        """Keeps a head if there is room."""
        plan = head.recipe.plan
        nbytes = head.recipe.nbytes + _HEAD_BYTES + len(path)
        with self._lock:
            self._drop(path)
            if plan not in self._plans:  # the first record of a form is charged for what they share
                nbytes += plan.nbytes
            if self.nbytes + nbytes <= limits.HEADS_BYTES:
                self._plans.add(plan)
                self._heads[path] = head, nbytes
                self.nbytes += nbytes

    def drop(self, path: str) -> None:
        """Forgets the head of a path, if any."""
        with self._lock:
            self._drop(path)

    def _drop(self, path: str) -> None:
        _, nbytes = self._heads.pop(path, (None, 0))
        self.nbytes -= nbytes
