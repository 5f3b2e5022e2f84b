"""Reads records through a storage backend. All reads of the cache go through this file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from monai_gds import limits
from monai_gds.cache.checksum import checksum
from monai_gds.cache.header import SUFFIX, Header, header_length, parse
from monai_gds.cache.heads import Form, HeadMemory, RecordHead
from monai_gds.cache.problems import Problems
from monai_gds.cache.record import check_name
from monai_gds.cache.tiles import Tiles
from monai_gds.cache.tree import tensor_of
from monai_gds.errors import DamagedRecord, FileChanged, NewerRecord, RecordError
from monai_gds.storage import FileId, Pending, Reads, Storage
from monai_gds.storage.files import check_identity

__all__ = ["PendingItem", "RecordReader", "Verify", "read_record"]

#: When the checksums of a record's tensors are compared: the first time this process reads a version of the file (at
#: every read where the storage bypasses the file system), at every read, or never. The header's always is.
Verify = Literal["first", "always", "never"]


#: How often a record is tried again that keeps being replaced while it is read.
_TRIES = 5


def read_record(path: str, storage: Storage) -> tuple[Header, FileId, dict[str, bytes]]:
    """Reads and checks the front of a record.

    Returns:
        The header, the identity of the file, and by name the entries behind the header: packed small arrays, and tables
        of tiles.

    Raises:
        RecordError: damaged, or of a newer format.
        OSError: the file cannot be read.
    """
    head, file = storage.head(path, limits.HEAD_READ_BYTES)
    needed = header_length(head, file.size)
    if needed > len(head):
        head, file = storage.head(path, needed)
    record = parse(head, file.size)
    front = record.front()
    end = max((entry.offset + entry.nbytes for entry in front.values()), default=0)
    if end > len(head):
        head, again = storage.head(path, end)
        check_identity(file, again, path)
    blocks = {}
    for name, entry in front.items():
        blocks[name] = head[entry.offset : entry.offset + entry.nbytes]
        _check(name, entry.checksum, torch.from_numpy(np.frombuffer(bytearray(blocks[name]), np.uint8)))
    return record, file, blocks


def _check(name: str, expected: int, data: torch.Tensor) -> None:
    if checksum(data) != expected:
        raise DamagedRecord(f"the bytes of {name!r} do not match their checksum")


class PendingItem:
    """An item being read from a record of ``nbytes`` bytes."""

    __slots__ = ("_file", "_first", "_head", "_path", "_pending", "_reader", "_tries", "_verify", "nbytes")

    def __init__(
        self, reader: RecordReader, path: str, head: RecordHead, verify: bool, tries: int, pending: Pending,
        file: int = 0, first: int = 0,
    ) -> None:  # fmt: skip
        self._reader, self._path, self._tries = reader, path, tries
        self._head, self._verify = head, verify
        self._pending, self._file, self._first = pending, file, first
        self.nbytes = head.file.size

    def wait(self, item: Any = None) -> Any:
        """Waits for the reads. The item's tensors may be used at once on the current CUDA stream.

        Args:
            item: the dataset's own item, from which values are taken that no record can store.

        Returns:
            ``(item,)``, since an item may itself be None; or None if the record turned out to be unusable, which has
            been reported.
        """
        head = self._head
        try:
            errors, raw = self._pending.errors, self._pending.tensors
            if errors and self._file in errors:
                raise errors[self._file]
            if len(raw) != len(head.checksums):  # it was read together with others
                raw = raw[self._first : self._first + len(head.checksums)]
            if self._verify:
                for (name, _, _), expected, data in zip(head.table.tensors, head.checksums, raw, strict=True):
                    _check(name, expected, data)
                self._reader.mark_verified(self._path, head.file)
        except FileChanged as e:  # replaced by another process while it was read
            again = self._reader.start_again(self._path, self._tries, e)
            return None if again is None else again.wait(item)
        except FileNotFoundError:  # deleted by another process
            return None
        except (RecordError, OSError) as e:
            self._reader.report_unusable(self._path, e)
            return None
        try:
            return (head.recipe(_tensors(head, raw), item),)
        except RecordError as e:
            self._reader.report_unusable(self._path, e)
            return None


def _tensors(head: RecordHead, raw: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    parts = zip(head.table.tensors, raw, strict=True)
    if not head.tiles:
        return {name: tensor_of(data, dtype, shape) for (name, dtype, shape), data in parts}
    tensors = {}
    for (name, dtype, shape), data in parts:
        tiles = head.tiles.get(name)
        tensors[name] = tensor_of(data, dtype, shape) if tiles is None else _unpacked(tiles, data)
    return tensors


def _unpacked(tiles: Tiles, streams: torch.Tensor) -> torch.Tensor:
    """A packed tensor on the device of its streams."""
    return tiles.unpack(streams.cpu().numpy()).to(streams.device)


def _in_groups(members: Sequence[tuple[int, RecordHead, bool]]) -> Iterator[list[tuple[int, RecordHead, bool]]]:
    group: list[tuple[int, RecordHead, bool]] = []
    nbytes = 0
    for member in members:
        size = member[1].file.size
        if group and (len(group) == limits.TOGETHER_RECORDS or nbytes + size > limits.TOGETHER_BYTES):
            yield group
            group, nbytes = [], 0
        group.append(member)
        nbytes += size
    if group:
        yield group


class RecordReader:
    """Reads the records of one directory. Problems are reported, and the record counts as absent."""

    def __init__(self, storage: Storage, verify: Verify, form: Form, problems: Problems) -> None:
        self.heads = HeadMemory()
        self._storage = storage
        self._on_cpu = storage.device.type == "cpu"
        self._verify: Verify = "always" if verify == "first" and not storage.coherent else verify
        self._form = form
        self._problems = problems
        self._verified: dict[str, FileId] = {}

    def start(self, path: str, tries: int = _TRIES) -> PendingItem | None:
        """Starts reading a record; None if there is no usable one."""
        try:
            head = self._head(path)
            verify = self._must_verify(path, head.file)
            # A record to be verified is read, not mapped: on a failing disk a read raises, touching a mapping kills.
            begin = self._storage.load if verify else self._storage.map
            pending = begin(head.table.reads.at(path, head.file))
            if self._on_cpu and pending.done and (errors := pending.errors):
                raise errors[0]
        except FileNotFoundError:
            return None
        except FileChanged as e:
            return self.start_again(path, tries, e)
        except (RecordError, OSError) as e:
            self.report_unusable(path, e)
            return None
        return PendingItem(self, path, head, verify, tries, pending)

    def start_all(self, paths: Sequence[str]) -> list[PendingItem | None]:
        """Starts reading several records; small ones whose heads are in memory are read together."""
        found: list[PendingItem | None] = [None] * len(paths)
        together: list[tuple[int, RecordHead, bool]] = []
        for i, path in enumerate(paths):
            head = self.heads.get(path)
            if head is not None and head.file.size <= limits.TOGETHER_RECORD_BYTES:
                verify = self._must_verify(path, head.file)
                if verify or self._storage.device.type != "cpu":
                    together.append((i, head, verify))
                    continue
            found[i] = self.start(path)
        for group in _in_groups(together):
            reads = Reads.join([head.table.reads.at(paths[i], head.file) for i, head, _ in group])
            pending, first = self._storage.load(reads), 0
            for file, (i, head, verify) in enumerate(group):
                found[i] = PendingItem(self, paths[i], head, verify, _TRIES, pending, file, first)
                first += len(head.table.reads)
        return found

    def start_again(self, path: str, tries: int, error: FileChanged) -> PendingItem | None:
        """Starts anew on a record that was replaced while it was read."""
        self.forget(path)
        if tries > 1:
            return self.start(path, tries - 1)
        self.report_unusable(path, error)  # a file system on which a file never keeps its identity
        return None

    def is_sound(self, path: str, digest: str) -> bool:
        """Whether the record of a key is there with a sound header. Its data are not read."""
        try:
            record, _, _ = read_record(path, self._storage)
            check_name(record, digest)
        except FileNotFoundError:
            return False
        except (RecordError, OSError) as e:
            self.report_unusable(path, e)
            return isinstance(e, NewerRecord)  # sound for another version; it is not replaced
        return True

    def forget(self, path: str) -> None:
        self.heads.drop(path)
        self._verified.pop(path, None)

    def mark_verified(self, path: str, file: FileId) -> None:
        """Notes that every byte of this version of the file matched its checksum."""
        self._verified[path] = file

    def report_unusable(self, path: str, error: Exception) -> None:
        """Warns of a record that cannot be used, and forgets it."""
        self.forget(path)
        self._problems.unusable(path, error)

    def _head(self, path: str) -> RecordHead:
        head = self.heads.get(path)
        if head is None:
            record, file, blocks = read_record(path, self._storage)
            check_name(record, os.path.basename(path).removesuffix(SUFFIX))
            head = RecordHead.of(record, file, blocks, self._form)
            self.heads.keep(path, head)
        return head

    def _must_verify(self, path: str, file: FileId) -> bool:
        if self._verify == "first":
            return self._verified.get(path) != file
        return self._verify == "always"
