"""Reads records through a storage backend. All reads of hits go through this file."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base import stages
from monai_gds.base.file_systems import LOCAL, kind_of_folder
from monai_gds.errors import DamagedRecord, FileChanged, NewerRecord
from monai_gds.records.entries import read_record
from monai_gds.records.header import SUFFIX, Header, RunsKey
from monai_gds.records.heads import Form, Kept, KeptRecords, RecordHead, TensorTable
from monai_gds.records.problems import Problems, is_of_record
from monai_gds.records.volumes import Part, reads_of
from monai_gds.records.writing import check_name
from monai_gds.storage import FileId, Pending, Reads, Storage
from monai_gds.storage.memory import pooled_scratch
from monai_gds.tiles import device
from monai_gds.tiles.device import Unpacking
from monai_gds.tiles.tiles import Selection, Tiles

#: When the checksums of a record's tensors are compared: the first time this process reads a version of the file (at
#: every read where the storage bypasses the file system), at every read, or never. The header's always is.
Verify = Literal["first", "always", "never"]

#: Whether tensors on a CPU target are mappings of the record: always, never, or where the folder is on a file system of
#: this machine.
Mmap = Literal["auto"] | bool

#: How many times a record is read if it keeps being replaced meanwhile.
TRIES = 5


class Begun(NamedTuple):
    """Reads that were begun of a record, or of several records together."""

    pending: Pending
    unpacking: Unpacking | None  # the step after them that unpacks tiles on a device
    verify: bool = False  # whether checksums are to be compared
    file: int = 0  # the index of the record's file among those of the reads
    first: int = 0  # the index of its first tensor among those of the reads


class RecordReader:
    """Reads the records of one directory. Problems are reported, and the record counts as absent.

    Args:
        storage: moves the bytes.
        verify: see :data:`Verify`.
        form: the form in which items come out of records.
        problems: reports what is wrong with records.
        device_bytes: budget for packed records that stay in the memory of a CUDA device.
        mmap: see :data:`Mmap`.
        on_first_read: called with a record's digest whenever its head is read from the file.
        copies: the records are copies of another directory's.
    """

    def __init__(
        self, storage: Storage, verify: Verify, form: Form, problems: Problems, device_bytes: int = 0,
        mmap: Mmap = "auto", on_first_read: Callable[[str], None] | None = None, copies: bool = False,
    ) -> None:  # fmt: skip
        self.heads: Kept[RecordHead] = Kept(limits.HEADS_BYTES)
        self.storage = storage
        self.device = storage.device
        self.on_cpu = storage.device.type == "cpu"
        self._on_first_read, self._copies = on_first_read, copies
        self._kept = KeptRecords(device_bytes) if device_bytes else None
        self._verify: Verify = "always" if verify == "first" and not storage.coherent else verify
        self._mmap: Mmap = mmap
        self._form = form
        self._problems = problems
        self._verified: dict[str, FileId] = {}
        self._damaged: dict[str, FileId] = {}
        self._verified_rest: dict[str, FileId] = {}  # all but tensors in tiles, which note it themselves

    # Heads

    def head(self, path: str) -> RecordHead:
        """The head of a record, from memory if it is there. Raises as :meth:`examine`."""
        head = self.heads.get(path)
        if head is None:
            _, head = self.examine(path)
            if self._damaged.get(path) == head.file:
                raise DamagedRecord("it was found damaged before")
            self.heads.keep(path, head, head.nbytes)
            if self._on_first_read is not None:
                self._on_first_read(_digest(path))
        return head

    def all_heads(self, paths: Sequence[str]) -> dict[str, RecordHead]:
        """The heads of records, read at the same time where they are not in memory; without those that fail."""
        found: dict[str, RecordHead] = {}

        def find(path: str) -> None:
            with suppress(Exception):  # it comes again when the record is read alone
                found[path] = self.head(path)

        self.storage.each(find, [path for path in paths if self.heads.get(path) is None])
        return found

    def examine(self, path: str) -> tuple[Header, RecordHead]:
        """Reads the header of a record, and all else that its head holds, from the file.

        Raises:
            RecordError: the record cannot be used here.
            OSError: it cannot be read.
        """
        record, file, blocks = read_record(path, self.storage)
        check_name(record, _digest(path))
        return record, RecordHead.of(record, file, blocks, self._form, not self.on_cpu)

    def is_sound(self, path: str, suits: Callable[[Header], bool] | None = None) -> bool:
        """Whether a record has a sound header, and satisfies ``suits``. Its data are not read.

        A record that only another version or machine can use is sound: it is reported, and not replaced.
        """
        try:
            record, _ = self.examine(path)
        except Exception as e:
            self.give_up(path, e)
            return isinstance(e, NewerRecord)
        return suits is None or suits(record)

    # Reads

    def begin(self, path: str, head: RecordHead, table: TensorTable) -> Begun:
        """Begins to read the tensors of a table."""
        verify = self.must_verify(path, head.file, table is head.table)
        # A record to be verified is read, not mapped: on a failing disk a read raises, touching a mapping kills. Ranges
        # of a small one are never mapped, and so they are read at once.
        reads = not verify or head.file.size < limits.MAP_BYTES
        begin = self.storage.map if self.on_cpu and reads and self._maps(path) else self.storage.load
        if not head.tiles or not self.unpacks_there():
            return Begun(begin(table.reads.at(path, head.file)), None, verify)
        tiles = [head.tiles.get(name) for name, _, _ in table.tensors]
        wanted = [None if one is None else (one, one.starts, None) for one in tiles]
        if table is head.table and self._is_kept(path, head):
            return self._begin_kept(path, head, wanted)._replace(verify=verify)
        unpacking = Unpacking(wanted)
        return Begun(begin(table.reads.at(path, head.file)).then(unpacking, aside=True), unpacking, verify)

    def begin_boxes(self, path: str, head: RecordHead, parts: Sequence[Part]) -> Begun:
        """Begins to read the streams of boxes, as :meth:`Tiles.select` lays them out."""
        if not self.unpacks_there():
            into = [pooled_scratch(part.selection.nbytes) for part in parts]
            return Begun(self.storage.fill(reads_of(path, head, parts), into), None)
        ids = [part.selection.tiles.astype(np.int32) for part in parts]
        if self._is_kept(path, head):
            wanted: list[Any] = [None] * len(head.table.tensors)
            for part, some in zip(parts, ids, strict=True):
                wanted[part.entry] = part.tiles, part.tiles.starts[some], some
            return self._begin_kept(path, head, wanted, [part.entry for part in parts])
        unpacking = Unpacking([(p.tiles, p.selection.starts, some) for p, some in zip(parts, ids, strict=True)])
        return Begun(self.storage.load(reads_of(path, head, parts)).then(unpacking, aside=True), unpacking)

    def run_block(self, path: str, head: RecordHead, key: RunsKey, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Reads a block of the runs of a tensor in tiles, see :meth:`RunTable.decode`.

        Raises:
            RecordError: it is damaged.
            OSError: it cannot be read, or the record was replaced or deleted.
        """
        table, at = head.runs[key]
        begin, nbytes = table.range_of(block)
        stream = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.storage.fill(Reads.of(path, [(at + begin, nbytes)], head.file), [stream]).wait()
        return table.decode(block, stream.numpy())

    def _maps(self, path: str) -> bool:
        """Whether records are mapped. Drives of other machines fail often: a read survives that, a mapping does not."""
        if self._mmap == "auto":
            self._mmap = kind_of_folder(os.path.dirname(path)) in LOCAL
        return self._mmap

    def _is_kept(self, path: str, head: RecordHead) -> bool:
        """Whether a record is in the device's memory, or will be when it is read whole."""
        return self._kept is not None and self._kept.has_room(path, head.table.reads.total)

    def _begin_kept(
        self, path: str, head: RecordHead, wanted: Sequence[Any], only: Sequence[int] | None = None
    ) -> Begun:
        """Takes a record from the device's memory, or begins to read all of it, to be kept there."""
        assert self._kept is not None, "the caller has checked"
        raw = self._kept.of_file(path)
        if raw is not None:
            stages.count(stages.KEPT, sum(tensor.nbytes for tensor in raw))
            unpacking = Unpacking(wanted, kept=True, only=only)
            pending = Pending.completed(list(raw), self.device)
        else:
            unpacking = Unpacking(wanted, keep=functools.partial(self._keep, path, head.file), only=only)
            pending = self.storage.load(head.table.reads.at(path, head.file))
        return Begun(pending.then(unpacking, aside=True), unpacking)

    def _keep(self, path: str, file: FileId, raw: Sequence[torch.Tensor]) -> None:
        assert self._kept is not None, "only then is anything kept"
        self._kept.keep(path, (file, raw), sum(tensor.nbytes for tensor in raw))

    def unpacks_there(self) -> bool:
        """Whether tiles are unpacked on the target, a CUDA device. Warns once if they cannot be."""
        if self.on_cpu:
            return False
        why = device.why_not()
        if why is not None:
            self._problems.warn("tiles", f"compressed records are unpacked by the CPU, which is slow: {why}")
        return why is None

    def warm(self) -> None:
        """Loads what the first unpacking on the target needs."""
        if not self.on_cpu:
            device.warm(self.device)

    # Checksums

    def must_verify(self, path: str, file: FileId, whole: bool = True) -> bool:
        """Whether checksums are to be compared: of all tensors of a record, or of those that are not in tiles."""
        if self._verify == "first":
            return self._verified.get(path) != file and (whole or self._verified_rest.get(path) != file)
        return self._verify == "always"

    def mark_verified(self, path: str, file: FileId, whole: bool = True) -> None:
        """Notes that every byte of this version of the file, or of all but what is in tiles, matched its checksum."""
        (self._verified if whole else self._verified_rest)[path] = file

    def check_tiles(self, path: str, head: RecordHead, tiles: Tiles, chosen: Selection, streams: np.ndarray) -> None:
        """Compares the streams of some tiles with their checksums, where that is due.

        Raises:
            DamagedRecord: one differs.
        """
        if not self.must_verify(path, head.file):
            return
        due = np.ones(len(chosen.tiles), bool) if self._verify == "always" else ~tiles.verified[chosen.tiles]
        tiles.check(streams, chosen.starts[due], chosen.tiles[due])

    # What goes wrong

    def give_up(self, path: str, error: Exception, tries: int = 0) -> int:
        """Forgets a record after an error, which is reported unless another process replaced or deleted the record.

        Args:
            path: the record.
            error: what reading it raised.
            tries: how many times a record that keeps being replaced could be read when this read began.

        Returns:
            How many times the record can still be read; 0 if it is given up.

        Raises:
            Exception: ``error``, if it is not about the record.
        """
        if not is_of_record(error):
            raise error
        replaced = isinstance(error, FileChanged)
        if isinstance(error, FileNotFoundError) or (replaced and tries != 1):
            self.forget(path)
        else:  # tries have run out on a file system on which a file never keeps its identity, or it is unusable
            self._report(path, error)
        return tries - 1 if replaced and tries else 0

    def forget(self, path: str) -> None:
        """Forgets what is known of a record, except that this version of the file is damaged."""
        self.heads.drop(path)
        if self._kept is not None:
            self._kept.drop(path)
        self._verified.pop(path, None)
        self._verified_rest.pop(path, None)

    def _report(self, path: str, error: Exception) -> None:
        """Warns of a record that cannot be used, and remembers if it is damaged, so that it is replaced.

        Without this, damage that only one way of reading notices would stay, as would a copy of which the header can be
        read and the data cannot. Records that cannot be read for another reason are tried again: a server may come
        back.
        """
        head = self.heads.get(path)
        broken_copy = self._copies and isinstance(error, OSError) and error.errno == errno.EIO
        if head is not None and (broken_copy or isinstance(error, DamagedRecord)):
            self._damaged[path] = head.file
        self.forget(path)
        self._problems.unusable(path, error)


def _digest(path: str) -> str:
    return os.path.basename(path).removesuffix(SUFFIX)
