"""Items being read from records: whole, or box by box once it is known which boxes are needed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base import stages
from monai_gds.base.units import in_groups
from monai_gds.errors import DamagedRecord
from monai_gds.items.tree import tensor_of
from monai_gds.records.entries import check
from monai_gds.records.heads import RecordHead, TensorForm, TensorTable
from monai_gds.records.problems import is_of_record
from monai_gds.records.reader import TRIES, Begun, RecordReader
from monai_gds.records.volumes import Part, Volume
from monai_gds.storage import Reads
from monai_gds.tiles.boxes import Box
from monai_gds.tiles.runs import Runs, RunTable
from monai_gds.tiles.tiles import PATTERNS
from monai_gds.tiles.unpacking import unpack

#: Elements that runs found, by the name of the label, with the index of their value.
_Found: TypeAlias = "dict[str, dict[int, int]]"

_NONE: Mapping[str, Any] = MappingProxyType({})


def start(reader: RecordReader, paths: Sequence[str], lazily: bool = False) -> list[PendingItem | None]:
    """Starts reading records. Small ones whose heads are in memory are read together.

    Args:
        reader: reads them.
        paths: the records.
        lazily: whether to leave out tensors in tiles, of which :meth:`PendingItem.read` then reads boxes.

    Returns:
        For each record what is being read of it; None if there is no usable one, which has been reported unless it is
        absent.
    """
    if len(paths) == 1:  # reading one record "together" costs 5 us
        return [_started(reader, paths[0], lazily)]
    found: list[PendingItem | None] = [None] * len(paths)
    together: list[tuple[int, RecordHead, bool]] = []
    for i, path in enumerate(paths):
        head = reader.heads.get(path)
        if head is not None and not head.tiles and head.file.size <= limits.TOGETHER_RECORD_BYTES:
            verify = reader.must_verify(path, head.file)
            if verify or not reader.on_cpu:
                together.append((i, head, verify))
                continue
        found[i] = _started(reader, path, lazily)
    for group in in_groups(together, lambda small: small[1].file.size, limits.TOGETHER_RECORDS, limits.TOGETHER_BYTES):
        reads = Reads.join([head.table.reads.at(paths[i], head.file) for i, head, _ in group])
        pending, first = reader.storage.load(reads), 0
        for file, (i, head, verify) in enumerate(group):
            found[i] = PendingItem(reader, paths[i], head, Begun(pending, None, verify, file, first), lazily)
            first += len(head.table.reads)
    return found


def _started(reader: RecordReader, path: str, lazily: bool) -> PendingItem | None:
    tries = TRIES
    while tries:
        try:
            head = reader.head(path)
            begun = reader.begin(path, head, head.rest if lazily else head.table)
            if reader.on_cpu and begun.pending.done and (errors := begun.pending.errors):
                raise errors[0]
            return PendingItem(reader, path, head, begun, lazily)
        except Exception as e:
            tries = reader.give_up(path, e, tries)
    return None


class PendingItem:
    """An item being read from a record.

    Attributes:
        tiled: dtype and shape, by name, of each tensor of which :meth:`read` reads boxes. Empty if all of the item is
            being read. Tensors that come as NumPy arrays, are complex or require a gradient are not among them.
        nbytes: bytes of the record. If boxes are read, bytes of the reads begun so far, and of the memory of what they
            are unpacked to.
    """

    __slots__ = ("_begun", "_error", "_found", "_head", "_path", "_reader", "nbytes", "tiled")

    def __init__(self, reader: RecordReader, path: str, head: RecordHead, begun: Begun, lazily: bool) -> None:
        self._reader, self._path, self._head = reader, path, head
        self._begun: Begun | None = begun
        self.tiled: Mapping[str, TensorForm] = head.tiled if lazily else _NONE
        self.nbytes = head.rest.reads.total if self.tiled else head.file.size
        self._error: Exception | None = None  # of its runs
        self._found: _Found = {}

    @property
    def ready(self) -> bool:
        """Whether :meth:`wait` has nothing to wait for."""
        return self._begun is None or self._begun.pending.done

    def wait(self, item: Any = None, tensors: Mapping[str, torch.Tensor] = _NONE) -> Any:
        """Waits for the reads, and puts the item together. Its tensors may be used at once on the current CUDA stream.

        Args:
            item: the dataset's own item, from which values are taken that no record can store.
            tensors: replace those in :attr:`tiled`, by name.

        Returns:
            ``(item,)``, since an item may itself be None. It shares nothing with that of another call. None if the
            record turned out to be unusable, which has been reported, or was deleted; also if it was replaced, unless
            all of it can be read again.
        """
        tries = TRIES
        while tries:
            try:
                return (self._assembled(item, tensors),)
            except Exception as e:
                tries = self._reader.give_up(self._path, e, 0 if self.tiled else tries)
        return None

    def _assembled(self, item: Any, given: Mapping[str, torch.Tensor]) -> Any:
        begun, self._begun = self._begun, None
        if begun is None:  # the record was replaced, or somebody may have changed the tensors of the first call
            if not self.tiled:
                self._head = self._reader.head(self._path)
            begun = self._reader.begin(self._path, self._head, self._head.rest if self.tiled else self._head.table)
        pending, unpacking, verify, file, first = begun
        head = self._head
        table = head.rest if self.tiled else head.table
        stages.enter("reading")
        errors, raw = pending.errors, pending.tensors
        stages.enter("decoding")
        if errors and file in errors:
            raise errors[file]
        if unpacking is not None:
            unpacking.check()
        if len(raw) != len(table.tensors):  # it was read together with others
            raw = raw[first : first + len(table.tensors)]
        if verify:
            self._verify(table, raw, unpacking is not None)
        if head.tiles:
            tensors = {**self._unpacked(table, raw, unpacking is not None), **given}
        else:
            tensors = {
                name: tensor_of(data, dtype, shape)
                for (name, dtype, shape), data in zip(table.tensors, raw, strict=True)
            }
        return head.recipe(tensors, item)

    def _verify(self, table: TensorTable, raw: Sequence[torch.Tensor], on_device: bool) -> None:
        """Compares checksums. A device has compared those of tiles when it unpacked them."""
        head = self._head
        checksums = dict(zip((name for name, _, _ in head.table.tensors), head.checksums, strict=True))
        for (name, _, _), data in zip(table.tensors, raw, strict=True):
            if not (on_device and name in head.tiles):
                check(name, checksums[name], data)
        self._reader.mark_verified(self._path, head.file, whole=not self.tiled)

    def _unpacked(self, table: TensorTable, raw: Sequence[torch.Tensor], on_device: bool) -> dict[str, torch.Tensor]:
        tiles, tensors = self._head.tiles, {}
        for (name, dtype, shape), data in zip(table.tensors, raw, strict=True):
            if name not in tiles:
                tensors[name] = tensor_of(data, dtype, shape)
            else:
                tensors[name] = data if on_device else unpack(tiles[name], data.cpu().numpy()).to(data.device)
        return tensors

    @property
    def runs(self) -> Mapping[str, Runs]:
        """The runs of those labels in :attr:`tiled` that have any, by name. Finding an element reads a few kB, at once.

        If that raises, what :meth:`read` returns afterwards gives None, and the record is reported.
        """
        return {
            name: Runs(table, partial(self._run_block, name), self._found.setdefault(name, {}).__setitem__)
            for name, (table, _) in self._head.runs.items()
        }

    def _run_block(self, name: str, block: int) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self._reader.run_block(self._path, self._head, name, block)
        except Exception as e:
            if is_of_record(e):
                self._error = e
            raise

    def read(self, boxes: Mapping[str, Sequence[Box]]) -> Volumes:
        """Starts reading boxes of tensors in :attr:`tiled`.

        Args:
            boxes: which voxels, by the name of the tensor; none of them empty.
        """
        stages.enter("reading")
        begun, parts = None, list[Part]()
        if self._error is not None:
            self._reader.give_up(self._path, self._error)
        else:
            on_device = self._reader.unpacks_there()
            parts = [Part.of(name, self._head, wanted, on_device) for name, wanted in boxes.items() if wanted]
            try:
                begun = self._reader.begin_boxes(self._path, self._head, parts)
            except Exception as e:
                self._reader.give_up(self._path, e)
            self.nbytes += sum(part.selection.nbytes + part.nbytes for part in parts)
        return Volumes(self._reader, self._path, self._head, parts, begun, self._found)


class Volumes:
    """Boxes being read of the tensors of a record."""

    def __init__(
        self, reader: RecordReader, path: str, head: RecordHead, parts: Sequence[Part], begun: Begun | None,
        runs: _Found,
    ) -> None:  # fmt: skip
        self._reader, self._path, self._head, self._parts, self._runs = reader, path, head, parts, runs
        self._begun = begun
        self._found: dict[str, Volume] | None = None
        self._lock = threading.Lock()

    def wait(self) -> dict[str, Volume] | None:
        """Waits for the reads, and unpacks what was read on the CPU. Tensors may be used on the current stream at once.

        Returns:
            By name, memory of the tensor's dtype on the target device. None if the record turned out to be unusable,
            which has been reported, or was replaced or deleted meanwhile: compute the item, or start again.
        """
        with self._lock:
            if self._begun is not None:
                try:
                    self._found = self._unpacked(self._begun)
                except Exception as e:
                    self._reader.give_up(self._path, e)
                self._begun = None
            return self._found

    def _unpacked(self, begun: Begun) -> dict[str, Volume]:
        stages.enter("reading")
        raw = begun.pending.wait()
        stages.enter("decoding")
        if begun.unpacking is not None:
            begun.unpacking.check()
            return {
                part.name: Volume(data.view(-1), part.arrangement) for part, data in zip(self._parts, raw, strict=True)
            }
        found = {}
        for part, data in zip(self._parts, raw, strict=True):
            self._reader.check_tiles(self._path, self._head, part.tiles, part.selection, data.numpy())
            volume = part.unpack(data.numpy())
            if part.name in self._runs:
                _check_found(volume, self._head.runs[part.name][0], self._runs[part.name])
            found[part.name] = volume._replace(data=volume.data.to(self._reader.device))
        return found


def _check_found(volume: Volume, table: RunTable, found: Mapping[int, int]) -> None:
    """Compares elements that runs found with the voxels themselves, as far as these were read.

    Raises:
        DamagedRecord: one has another value.
    """
    pattern = PATTERNS[table.dtype.itemsize]
    voxels, values = volume.data.view(pattern), table.values.view(pattern)
    for element, value in list(found.items()):
        try:
            place = volume.arrangement.place(element)
        except ValueError:  # in none of the boxes
            continue
        if voxels[place] != values[value]:
            raise DamagedRecord("its runs do not hold the values of its voxels")
