"""An item being read whole from a record. Begun by :mod:`monai_gds.records.reader`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from monai_gds.base import stages
from monai_gds.base.checksum import checksum
from monai_gds.errors import DamagedRecord, FileChanged, RecordError
from monai_gds.items.tree import tensor_of
from monai_gds.records.heads import RecordHead, TensorTable
from monai_gds.storage import FileId, Pending
from monai_gds.tiles.device import Unpacking
from monai_gds.tiles.tiles import Tiles
from monai_gds.tiles.unpacking import unpack

__all__ = ["Begun", "PendingItem", "Reader", "check_entry", "is_of_record", "tensors_of", "verify_entries"]


class Begun(NamedTuple):
    """Reads of a record that were begun."""

    head: RecordHead
    verify: bool  # whether checksums are to be compared
    tries: int  # left
    pending: Pending
    unpacking: Unpacking | None


def check_entry(name: str, expected: int, data: torch.Tensor) -> None:
    """Compares the bytes of an entry with its checksum.

    Raises:
        DamagedRecord: they differ.
    """
    if checksum(data) != expected:
        raise DamagedRecord(f"the bytes of {name!r} do not match their checksum")


def is_of_record(error: Exception) -> bool:
    """Whether an error costs the record only: it is damaged or cannot be read, or declares more than fits into memory.

    An error of CUDA is not about a record, and neither is too little memory there.
    """
    of_memory = isinstance(error, MemoryError) or (type(error) is RuntimeError and "CPUAllocator" in str(error))
    return isinstance(error, (RecordError, OSError)) or of_memory


class Reader(Protocol):
    """What an item asks of the reader that began it, :class:`monai_gds.records.reader.RecordReader`."""

    def start_again(self, path: str, tries: int, error: FileChanged) -> PendingItem | None: ...

    def mark_verified(self, path: str, file: FileId, whole: bool = True) -> None: ...

    def report_unusable(self, path: str, error: Exception) -> None: ...


class PendingItem:
    """An item being read from a record of ``nbytes`` bytes.

    Args:
        reader: the reader that began it.
        path: of the record.
        begun: the reads of this record, or of several records together.
        file: the index of this record's file among those of the reads.
        first: the index of its first tensor among those of the reads.
    """

    __slots__ = (
        "_file", "_first", "_head", "_path", "_pending", "_reader", "_tries", "_unpacking", "_verify", "nbytes",
    )  # fmt: skip

    def __init__(self, reader: Reader, path: str, begun: Begun, file: int = 0, first: int = 0) -> None:
        self._reader, self._path = reader, path
        self._head, self._verify, self._tries = begun.head, begun.verify, begun.tries
        self._pending, self._unpacking = begun.pending, begun.unpacking
        self._file, self._first = file, first
        self.nbytes = begun.head.file.size

    def wait(self, item: Any = None) -> Any:
        """Waits for the reads. The item's tensors may be used at once on the current CUDA stream.

        Args:
            item: the dataset's own item, from which values are taken that no record can store.

        Returns:
            ``(item,)``, since an item may itself be None; or None if the record turned out to be unusable, which has
            been reported.
        """
        head = self._head
        stages.enter("reading")
        try:
            errors, raw = self._pending.errors, self._pending.tensors
            stages.enter("decoding")
            if errors and self._file in errors:
                raise errors[self._file]
            if len(raw) != len(head.checksums):  # it was read together with others
                raw = raw[self._first : self._first + len(head.checksums)]
            if self._unpacking is not None:
                self._unpacking.check()
            if self._verify:
                verify_entries(head, head.table, raw, self._unpacking)
                self._reader.mark_verified(self._path, head.file)
            return (head.recipe(tensors_of(head, head.table, raw, self._unpacking), item),)
        except FileChanged as e:  # replaced by another process while it was read
            again = self._reader.start_again(self._path, self._tries, e)
            return None if again is None else again.wait(item)
        except FileNotFoundError:  # deleted by another process
            return None
        except Exception as e:
            if not is_of_record(e):
                raise
            self._reader.report_unusable(self._path, e)
            return None


def verify_entries(
    head: RecordHead, table: TensorTable, raw: Sequence[torch.Tensor], unpacking: Unpacking | None
) -> None:
    """Compares the checksums of what was read, except tiles that were unpacked, and so compared, on a device.

    Raises:
        DamagedRecord: one differs.
    """
    checksums = dict(zip((name for name, _, _ in head.table.tensors), head.checksums, strict=True))
    for (name, _, _), data in zip(table.tensors, raw, strict=True):
        if unpacking is None or name not in head.tiles:
            check_entry(name, checksums[name], data)


def tensors_of(
    head: RecordHead, table: TensorTable, raw: Sequence[torch.Tensor], unpacking: Unpacking | None
) -> dict[str, torch.Tensor]:
    """The tensors of a table, by name, of what was read of it."""
    parts = zip(table.tensors, raw, strict=True)
    if not head.tiles:
        return {name: tensor_of(data, dtype, shape) for (name, dtype, shape), data in parts}
    tensors = {}
    for (name, dtype, shape), data in parts:
        tiles = head.tiles.get(name)
        if tiles is None:
            tensors[name] = tensor_of(data, dtype, shape)
        else:
            tensors[name] = _unpacked(tiles, data) if unpacking is None else data
    return tensors


def _unpacked(tiles: Tiles, streams: torch.Tensor) -> torch.Tensor:
    """A packed tensor on the device of its streams."""
    return unpack(tiles, streams.cpu().numpy()).to(streams.device)
