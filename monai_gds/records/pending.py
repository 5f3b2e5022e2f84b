"""Items being read from records: whole, or box by box once it is known which boxes are needed."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base import stages
from monai_gds.base.units import in_groups
from monai_gds.errors import DamagedRecord
from monai_gds.items.tree import tensor_of
from monai_gds.records.entries import check
from monai_gds.records.header import RunsKey
from monai_gds.records.heads import RecordHead, TensorForm, TensorTable
from monai_gds.records.problems import is_of_record
from monai_gds.records.reader import TRIES, Begun, RecordReader
from monai_gds.records.volumes import Part, Volume, Whole
from monai_gds.storage import Reads
from monai_gds.tiles.boxes import Box
from monai_gds.tiles.runs import Runs, RunTable, above
from monai_gds.tiles.tiles import PATTERNS
from monai_gds.tiles.unpacking import unpack

#: Elements that runs found, by what these are of, with the index of their value.
_Found: TypeAlias = "dict[RunsKey, dict[int, int]]"

_NONE: Mapping[str, Any] = MappingProxyType({})

#: What of a record is read at once: all of it, all but what is in tiles, or nothing but its head.
First: TypeAlias = Literal["all", "rest", "head"]


def start(reader: RecordReader, paths: Sequence[str], first: First = "all") -> list[PendingItem | None]:
    """Starts reading records. Small ones whose heads are in memory are read together.

    Args:
        reader: reads them.
        paths: the records.
        first: what to read now. :meth:`PendingItem.read` reads boxes of the other tensors.

    Returns:
        For each record what is being read of it; None if there is no usable one, which has been reported unless it is
        absent.
    """
    if len(paths) == 1:  # reading one record "together" costs 5 us
        return [_started(reader, paths[0], first)]
    found: list[PendingItem | None] = [None] * len(paths)
    together: list[tuple[int, RecordHead, bool]] = []
    slow = reader.storage.is_slow
    heads = reader.all_heads(paths) if slow else {}
    for i, path in enumerate(paths):
        head = heads.get(path) or reader.heads.get(path)
        small = head is not None and not head.tiles and head.file.size <= limits.TOGETHER_RECORD_BYTES
        if head is not None and small and first != "head":
            verify = reader.must_verify(path, head.file)
            if verify or slow or not reader.on_cpu:
                together.append((i, head, verify))
                continue
        found[i] = _started(reader, path, first, head)
    for group in in_groups(together, lambda small: small[1].file.size, limits.TOGETHER_RECORDS, limits.TOGETHER_BYTES):
        reads = Reads.join([head.table.reads.at(paths[i], head.file) for i, head, _ in group])
        pending, tensor = reader.storage.load(reads), 0
        for file, (i, head, verify) in enumerate(group):
            found[i] = PendingItem(reader, paths[i], head, Begun(pending, None, verify, file, tensor), first)
            tensor += len(head.table.reads)
    return found


def _started(reader: RecordReader, path: str, first: First, head: RecordHead | None = None) -> PendingItem | None:
    tries = TRIES
    while tries:
        try:
            head = head or reader.head(path)
            begun = None if first == "head" else reader.begin(path, head, head.rest if first == "rest" else head.table)
            if begun is not None and reader.on_cpu and begun.pending.done and (errors := begun.pending.errors):
                raise errors[0]
            return PendingItem(reader, path, head, begun, first)
        except Exception as e:
            tries, head = reader.give_up(path, e, tries), None
    return None


class PendingItem:
    """An item being read from a record.

    Attributes:
        later: dtype and shape, by name, of each tensor that is not being read. :meth:`read` reads boxes of those in
            tiles, and all of any other. Tensors that come as NumPy arrays, are complex or require a gradient are among
            them only if nothing is being read.
        nbytes: bytes of the record. If boxes are read, bytes of the reads begun so far, and of the memory of what they
            are unpacked to.
    """

    __slots__ = (
        "_begun", "_blocks", "_error", "_first", "_found", "_head", "_path", "_reader", "_whole", "later", "nbytes",
    )  # fmt: skip

    def __init__(self, reader: RecordReader, path: str, head: RecordHead, begun: Begun | None, first: First) -> None:
        self._reader, self._path, self._head, self._first = reader, path, head, first
        self._begun: Begun | None = begun
        self.later: Mapping[str, TensorForm] = _NONE if first == "all" else head.tiled
        if first == "head":
            self.later = head.forms()
        self.nbytes = 0 if first == "head" else head.rest.reads.total if self.later else head.file.size
        if first != "head":
            stages.count("stored", head.file.size)
        self._error: Exception | None = None  # of its runs
        self._found: _Found = {}
        self._blocks: dict[tuple[RunsKey, int], tuple[np.ndarray, np.ndarray]] = {}  # of its runs, as they were read
        self._whole: dict[int, tuple[str, torch.Tensor]] = {}  # what is not in :attr:`later`, by its address

    @property
    def ready(self) -> bool:
        """Whether :meth:`wait` has nothing to wait for."""
        return self._begun is None or self._begun.pending.done

    def wait(self, item: Any = None, tensors: Mapping[str, torch.Tensor] = _NONE) -> Any:
        """Waits for the reads, and puts the item together. Its tensors may be used at once on the current CUDA stream.

        Args:
            item: the dataset's own item, from which values are taken that no record can store.
            tensors: take the place of those in :attr:`later`, by name.

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
                tries = self._reader.give_up(self._path, e, 0 if self.later else tries)
        return None

    def _assembled(self, item: Any, given: Mapping[str, torch.Tensor]) -> Any:
        begun, self._begun = self._begun, None
        if self._first == "head":
            return self._head.recipe({**self._arrays(), **given}, item)
        if begun is None:  # the record was replaced, or somebody may have changed the tensors of the first call
            if not self.later:
                self._head = self._reader.head(self._path)
            begun = self._reader.begin(self._path, self._head, self._head.rest if self.later else self._head.table)
        table = self._head.rest if self.later else self._head.table
        tensors = _whole(self._head, table, begun)
        if begun.verify:
            self._reader.mark_verified(self._path, self._head.file, whole=not self.later)
        if self.later and self._head.runs:
            self._whole = {tensor.data_ptr(): (name, tensor) for name, tensor in tensors.items()}
        return self._head.recipe({**tensors, **given}, item)

    def _arrays(self) -> dict[str, torch.Tensor]:
        """The tensors that become arrays, which nothing can stand for."""
        if not self._head.recipe.plan.arrays:
            return {}
        table = self._head.part(self._head.recipe.plan.arrays)
        return _whole(self._head, table, self._reader.begin(self._path, self._head, table))

    @property
    def runs(self) -> Mapping[tuple[str, str, str], Runs]:
        """The runs of those labels in :attr:`later` that have any, by :class:`RunsKey`.

        Finding an element reads a few kB, at once.

        If that raises, what :meth:`read` returns afterwards gives None, and the record is reported.
        """
        return {
            key: Runs(table, partial(self._run_block, key), self._found.setdefault(key, {}).__setitem__)
            for key, (table, _) in self._head.runs.items()
        }

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name of the tensor, not in :attr:`later`, of which this shows all as the last :meth:`wait` gave it."""
        name, whole = self._whole.get(tensor.data_ptr(), (None, tensor))
        same = tensor.shape == whole.shape and tensor.dtype == whole.dtype and tensor.is_contiguous()
        return name if same else None

    def _run_block(self, key: RunsKey, block: int) -> tuple[np.ndarray, np.ndarray]:
        if (key, block) in self._blocks:  # the centres of an item's crops often lie in one
            return self._blocks[key, block]
        try:
            found = self._blocks[key, block] = self._reader.run_block(self._path, self._head, key, block)
            return found
        except Exception as e:
            if is_of_record(e):
                self._error = e
            raise

    def read(self, boxes: Mapping[str, Sequence[Box]]) -> Volumes:
        """Starts reading tensors in :attr:`later`.

        Args:
            boxes: which voxels, by the name of the tensor; none of them empty. A tensor that is not in tiles is read
                whole.
        """
        stages.enter("reading")
        head, reader = self._head, self._reader
        if self._first == "head":
            stages.count("stored", head.file.size)
        volumes = Volumes(reader, self._path, head, self._found)
        if self._error is not None:
            reader.give_up(self._path, self._error)
            volumes.failed = True
            return volumes
        on_device = reader.unpacks_there()
        volumes.parts = [
            Part.of(name, head, wanted, on_device) for name, wanted in boxes.items() if wanted and name in head.tiled
        ]
        self.nbytes += sum(part.selection.nbytes + part.nbytes for part in volumes.parts)
        whole = boxes.keys() - head.tiled.keys()
        try:
            if volumes.parts:
                volumes.begun = reader.begin_boxes(self._path, head, volumes.parts)
            if whole:
                volumes.table = head.part(whole)
                volumes.whole = reader.begin(self._path, head, volumes.table)
                self.nbytes += volumes.table.reads.total
        except Exception as e:
            reader.give_up(self._path, e)
            volumes.failed = True
        return volumes


def _whole(head: RecordHead, table: TensorTable, begun: Begun) -> dict[str, torch.Tensor]:
    """The tensors of a table, whole, once they are read."""
    stages.enter("reading")
    errors, raw = begun.pending.errors, begun.pending.tensors
    stages.enter("decoding")
    if errors and begun.file in errors:
        raise errors[begun.file]
    on_device = begun.unpacking is not None
    if begun.unpacking is not None:
        begun.unpacking.check()
    if len(raw) != len(table.tensors):  # it was read together with others
        raw = raw[begun.first : begun.first + len(table.tensors)]
    if begun.verify:
        checksums = dict(zip((name for name, _, _ in head.table.tensors), head.checksums, strict=True))
        for (name, _, _), data in zip(table.tensors, raw, strict=True):
            if not (on_device and name in head.tiles):  # a device has compared those of tiles when it unpacked them
                check(name, checksums[name], data)
    tensors = {}
    for (name, dtype, shape), data in zip(table.tensors, raw, strict=True):
        if name not in head.tiles:
            tensors[name] = tensor_of(data, dtype, shape)
        else:
            tensors[name] = data if on_device else unpack(head.tiles[name], data.cpu().numpy()).to(data.device)
    return tensors


class Volumes:
    """What is being read of the tensors of a record.

    Attributes:
        parts: boxes of tensors in tiles.
        begun: their read.
        table: other tensors, which are read whole.
        whole: their read.
        failed: whether they cannot be read, which has been reported.
    """

    def __init__(self, reader: RecordReader, path: str, head: RecordHead, runs: _Found) -> None:
        self._reader, self._path, self._head, self._runs = reader, path, head, runs
        self.parts: Sequence[Part] = ()
        self.table: TensorTable | None = None
        self.begun: Begun | None = None
        self.whole: Begun | None = None
        self.failed = False
        self._found: dict[str, Volume | Whole] | None = None
        self._lock = threading.Lock()

    def wait(self) -> dict[str, Volume | Whole] | None:
        """Waits for the reads, and unpacks what was read on the CPU. Tensors may be used on the current stream at once.

        Returns:
            By name, memory of the tensor's dtype on the target device. None if the record turned out to be unusable,
            which has been reported, or was replaced or deleted meanwhile: compute the item, or start again.
        """
        with self._lock:
            if self._found is None and not self.failed:
                self.failed = True  # until it is certain that it did not, whatever is raised
                try:
                    found: dict[str, Volume | Whole] = {} if self.begun is None else {**self._unpacked(self.begun)}
                    if self.whole is not None and self.table is not None:
                        tensors = _whole(self._head, self.table, self.whole)
                        found |= {name: Whole(tensor) for name, tensor in tensors.items()}
                    self._found, self.failed = found, False
                except Exception as e:
                    self._reader.give_up(self._path, e)
                finally:
                    self.begun = self.whole = None
            return self._found

    def _unpacked(self, begun: Begun) -> dict[str, Volume]:
        stages.enter("reading")
        raw = begun.pending.wait()
        stages.enter("decoding")
        if begun.unpacking is not None:
            begun.unpacking.check()
            return {part.name: Volume(data, part.arrangement) for part, data in zip(self.parts, raw, strict=True)}
        found = {}
        for part, data in zip(self.parts, raw, strict=True):
            self._reader.check_tiles(self._path, self._head, part.tiles, part.selection, data.numpy())
            found[part.name] = part.unpack(data.numpy())
        for key, elements in self._runs.items():
            _check_found(found, key, self._head.runs[key][0], elements)
        return {name: volume._replace(data=volume.data.to(self._reader.device)) for name, volume in found.items()}


def _check_found(volumes: Mapping[str, Volume], key: RunsKey, table: RunTable, found: Mapping[int, int]) -> None:
    """Compares elements that runs found with the voxels themselves, as far as these were read.

    Raises:
        DamagedRecord: one has another value, or is not where the image is above the threshold, or below it.
    """
    wrong = DamagedRecord("its runs do not hold the values of its voxels")
    values, flags = table.values.view(PATTERNS[table.dtype.itemsize]), table.above
    for element, value in list(found.items()):
        label = _voxels(volumes.get(key.label), [element])
        if label is not None and label.view(values.dtype) != values[value]:
            raise wrong
        if table.image is None or flags is None:
            continue
        channels, step = table.image[1][0], math.prod(table.shape)
        image = _voxels(volumes.get(key.image), [element + c * step for c in range(channels)])
        if image is not None and above(image[:, None], key.threshold) != flags[value]:
            raise wrong


def _voxels(volume: Volume | None, elements: Sequence[int]) -> torch.Tensor | None:
    """The values of some elements; None if one was not read."""
    try:
        return None if volume is None else volume.data[[volume.arrangement.place(element) for element in elements]]
    except ValueError:  # in none of the boxes
        return None
