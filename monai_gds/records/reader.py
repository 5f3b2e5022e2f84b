"""Reads records through a storage backend. All reads of the cache go through this file."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base.file_systems import LOCAL, kind_of_folder
from monai_gds.errors import DamagedRecord, FileChanged, NewerRecord
from monai_gds.folder.uses import Uses
from monai_gds.records.header import SUFFIX, Header, check_holes, header_length, parse
from monai_gds.records.heads import Form, HeadMemory, RecordHead, TensorTable
from monai_gds.records.kept import KeptRecords
from monai_gds.records.lazy_item import LazyItem, Part, reads_of
from monai_gds.records.pending_item import Begun, PendingItem, check_entry, is_of_record
from monai_gds.records.problems import Problems
from monai_gds.records.writing import check_name
from monai_gds.storage import FileId, Pending, Reads, Storage
from monai_gds.storage.files import check_identity
from monai_gds.storage.memory import pooled_scratch
from monai_gds.tiles import device
from monai_gds.tiles.device import Unpacking
from monai_gds.tiles.tiles import Selection, Tiles

__all__ = ["Mmap", "RecordReader", "Verify", "read_record"]

T = TypeVar("T")

#: When the checksums of a record's tensors are compared: the first time this process reads a version of the file (at
#: every read where the storage bypasses the file system), at every read, or never. The header's always is.
Verify = Literal["first", "always", "never"]


#: Whether tensors on a CPU target are mappings of the record: always, never, or where the folder is on a file system of
#: this machine.
Mmap = Literal["auto"] | bool

#: How many times a record is read if it keeps being replaced meanwhile.
_TRIES = 5


def read_record(path: str, storage: Storage) -> tuple[Header, FileId, dict[str, bytes]]:
    """Reads and checks the front of a record.

    Returns:
        The header, the identity of the file, and by name the entries that follow the header: packed small arrays, and
        tables of tiles and runs.

    Raises:
        RecordError: damaged, or of a newer format.
        FileChanged: it was replaced meanwhile.
        OSError: the file cannot be read.
    """
    head, file = storage.head(path, limits.HEAD_READ_BYTES)
    needed = header_length(head, file.size)
    if file.size > limits.HOLES_BYTES:
        check_holes(path)
    if needed > len(head):
        head = _longer_head(path, file, needed, storage)
    record = parse(head, file.size)
    front = record.front()
    end = max((entry.offset + entry.nbytes for entry in front.values()), default=0)
    if end > len(head):
        head = _longer_head(path, file, end, storage)
    blocks = {}
    for name, entry in front.items():
        blocks[name] = head[entry.offset : entry.offset + entry.nbytes]
        if len(blocks[name]) != entry.nbytes:
            raise DamagedRecord("it was cut off while it was read")
        check_entry(name, entry.checksum, torch.from_numpy(np.frombuffer(bytearray(blocks[name]), np.uint8)))
    return record, file, blocks


def _longer_head(path: str, file: FileId, nbytes: int, storage: Storage) -> bytes:
    head, again = storage.head(path, nbytes)
    check_identity(file, again, path)
    return head


def _in_groups(members: Sequence[tuple[int, RecordHead, bool]]) -> Iterator[list[tuple[int, RecordHead, bool]]]:
    """Divides small records into groups that are read together."""
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

    def __init__(
        self, storage: Storage, verify: Verify, form: Form, problems: Problems, device_bytes: int = 0,
        mmap: Mmap = "auto", uses: Sequence[Uses] = (), copies: bool = False,
    ) -> None:  # fmt: skip
        self.heads = HeadMemory()
        self._uses, self._copies = uses, copies
        self._kept = KeptRecords(device_bytes) if device_bytes else None
        self._storage = storage
        self.device = storage.device
        self._on_cpu = storage.device.type == "cpu"
        self._verify: Verify = "always" if verify == "first" and not storage.coherent else verify
        self._mmap: Mmap = mmap
        self._form = form
        self._problems = problems
        self._verified: dict[str, FileId] = {}
        self._damaged: dict[str, FileId] = {}
        self._verified_rest: dict[str, FileId] = {}  # all but tensors in tiles, which note it themselves

    def start(self, path: str, tries: int = _TRIES) -> PendingItem | None:
        """Starts reading a record; None if there is no usable one."""
        begun = self._start(path, tries, lazily=False)
        return None if begun is None else PendingItem(self, path, begun)

    def _start(self, path: str, tries: int, lazily: bool) -> Begun | None:
        while True:
            try:
                head = self._head(path)
                pending, unpacking, verify = self.begin(path, head, head.rest if lazily else head.table)
                if self._on_cpu and pending.done and (errors := pending.errors):
                    raise errors[0]
                return Begun(head, verify, tries, pending, unpacking)
            except FileNotFoundError:
                return None
            except FileChanged as e:
                self.forget(path)
                tries -= 1
                if not tries:
                    self.report_unusable(path, e)  # a file system on which a file never keeps its identity
                    return None
            except Exception as e:
                if not is_of_record(e):
                    raise
                self.report_unusable(path, e)
                return None

    def begin(self, path: str, head: RecordHead, table: TensorTable) -> tuple[Pending, Unpacking | None, bool]:
        """Begins to read the tensors of a table.

        Returns:
            The reads; the step after them that unpacks tiles on a device, if any; whether checksums must be compared.
        """
        verify = self._must_verify(path, head.file, table is head.table)
        # A record to be verified is read, not mapped: on a failing disk a read raises, touching a mapping kills.
        maps = self._on_cpu and not verify and self._maps(path)
        begin = self._storage.map if maps else self._storage.load
        if not head.tiles or not self.unpacks_there():
            return begin(table.reads.at(path, head.file)), None, verify
        tiles = [head.tiles.get(name) for name, _, _ in table.tensors]
        wanted = [None if one is None else (one, one.starts, None) for one in tiles]
        if table is head.table and self._is_kept(path, head):
            pending, unpacking = self._begin_kept(path, head, wanted)
            return pending, unpacking, verify
        unpacking = Unpacking(wanted)
        return begin(table.reads.at(path, head.file)).then(unpacking, aside=True), unpacking, verify

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
    ) -> tuple[Pending, Unpacking]:
        """Takes a record from the device's memory, or begins to read all of it, to be kept there."""
        assert self._kept is not None, "the caller has checked"
        raw = self._kept.get(path)
        if raw is not None:
            unpacking = Unpacking(wanted, kept=True, only=only)
            return Pending.completed(list(raw), self._storage.device).then(unpacking, aside=True), unpacking
        unpacking = Unpacking(wanted, keep=functools.partial(self._kept.keep, path, head.file), only=only)
        return self._storage.load(head.table.reads.at(path, head.file)).then(unpacking, aside=True), unpacking

    def unpacks_there(self) -> bool:
        """Whether tiles are unpacked on the target, a CUDA device. Warns once if they cannot be."""
        if self._on_cpu:
            return False
        why = device.why_not()
        if why is not None:
            self._problems.warn("tiles", f"compressed records are unpacked by the CPU, which is slow: {why}")
        return why is None

    def begin_boxes(self, path: str, head: RecordHead, parts: Sequence[Part]) -> tuple[Pending, Unpacking | None]:
        """Begins to read the streams of boxes, as :meth:`Tiles.select` lays them out."""
        try:
            if not self.unpacks_there():
                into = [pooled_scratch(part.selection.nbytes) for part in parts]
                return self._storage.fill(reads_of(path, head, parts), into), None
            ids = [part.selection.tiles.astype(np.int32) for part in parts]
            if self._is_kept(path, head):
                wanted: list[Any] = [None] * len(head.table.tensors)
                for part, some in zip(parts, ids, strict=True):
                    wanted[part.entry] = part.tiles, part.tiles.starts[some], some
                return self._begin_kept(path, head, wanted, [part.entry for part in parts])
            unpacking = Unpacking([(p.tiles, p.selection.starts, some) for p, some in zip(parts, ids, strict=True)])
            return self._storage.load(reads_of(path, head, parts)).then(unpacking, aside=True), unpacking
        except Exception as e:
            if not is_of_record(e):
                raise
            return Pending.completed([], self._storage.device, e), None

    def check_tiles(self, path: str, head: RecordHead, tiles: Tiles, chosen: Selection, streams: np.ndarray) -> None:
        """Compares the streams of some tiles with their checksums, where that is due.

        Raises:
            DamagedRecord: one differs.
        """
        if not self._must_verify(path, head.file, whole=True):
            return
        due = np.ones(len(chosen.tiles), bool) if self._verify == "always" else ~tiles.verified[chosen.tiles]
        tiles.check(streams, chosen.starts[due], chosen.tiles[due])

    def run_block(self, path: str, head: RecordHead, name: str, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Reads a block of the runs of a tensor in tiles, see :meth:`RunTable.decode`.

        Raises:
            RecordError: it is damaged.
            OSError: it cannot be read, or the record was replaced or deleted.
        """
        table, at = head.runs[name]
        begin, nbytes = table.range_of(block)
        stream = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._storage.fill(Reads.of(path, [(at + begin, nbytes)], head.file), [stream]).wait()
        return table.decode(block, stream.numpy())

    def usable(self, path: str, get: Callable[[], T]) -> T | None:
        """The result of ``get``, which reads a record; None if the record is unusable, which is reported, or gone."""
        try:
            return get()
        except (FileChanged, FileNotFoundError):  # replaced or deleted by another process
            self.forget(path)
        except Exception as e:
            if not is_of_record(e):
                raise
            self.report_unusable(path, e)
        return None

    def start_all(self, paths: Sequence[str]) -> list[PendingItem | None]:
        """Starts reading several records; small ones whose heads are in memory are read together."""
        found: list[PendingItem | None] = [None] * len(paths)
        together: list[tuple[int, RecordHead, bool]] = []
        for i, path in enumerate(paths):
            head = self.heads.get(path)
            if head is not None and not head.tiles and head.file.size <= limits.TOGETHER_RECORD_BYTES:
                verify = self._must_verify(path, head.file)
                if verify or self._storage.device.type != "cpu":
                    together.append((i, head, verify))
                    continue
            found[i] = self.start(path)
        for group in _in_groups(together):
            reads = Reads.join([head.table.reads.at(paths[i], head.file) for i, head, _ in group])
            pending, first = self._storage.load(reads), 0
            for file, (i, head, verify) in enumerate(group):
                found[i] = PendingItem(self, paths[i], Begun(head, verify, _TRIES, pending, None), file, first)
                first += len(head.table.reads)
        return found

    def start_all_lazily(self, paths: Sequence[str]) -> list[LazyItem | PendingItem | None]:
        """As :meth:`start_all`, but of tensors in tiles only those boxes are read that are requested later."""
        found: list[LazyItem | PendingItem | None] = [None] * len(paths)
        others: list[int] = []
        for i, path in enumerate(paths):
            head = self.heads.get(path)
            if head is not None and not head.tiled:
                others.append(i)
                continue
            begun = self._start(path, _TRIES, lazily=True)
            if begun is not None and begun.head.tiled:
                found[i] = LazyItem(self, path, begun)
            elif begun is not None:  # all of it is being read
                found[i] = PendingItem(self, path, begun)
        for i, pending in zip(others, self.start_all([paths[i] for i in others]), strict=True):
            found[i] = pending
        return found

    def start_again(self, path: str, tries: int, error: FileChanged) -> PendingItem | None:
        """Starts anew on a record that was replaced while it was read."""
        self.forget(path)
        if tries > 1:
            return self.start(path, tries - 1)
        self.report_unusable(path, error)  # a file system on which a file never keeps its identity
        return None

    def is_sound(self, path: str, digest: str, suits: Callable[[Header], bool] | None = None) -> bool:
        """Whether the record of a key has a sound header, and satisfies ``suits``. Its data are not read.

        A record that only another version or machine can use is sound: it is reported, and not replaced.
        """
        try:
            record = self.examine(path, digest)
        except (FileChanged, FileNotFoundError):  # replaced or deleted by another process
            return False
        except Exception as e:
            if not is_of_record(e):
                raise
            self.report_unusable(path, e)
            return isinstance(e, NewerRecord)
        return suits is None or suits(record)

    def examine(self, path: str, digest: str) -> Header:
        """The header of the record of a key.

        Raises:
            RecordError: it shows that the record cannot be used here.
            OSError: it cannot be read.
        """
        record, file, blocks = read_record(path, self._storage)
        check_name(record, digest)
        RecordHead.of(record, file, blocks, self._form, not self._on_cpu)  # raises what reading it would
        return record

    def forget(self, path: str) -> None:
        """Forgets what is known of a record, except that this version of the file is damaged."""
        self.heads.drop(path)
        if self._kept is not None:
            self._kept.drop(path)
        self._verified.pop(path, None)
        self._verified_rest.pop(path, None)

    def mark_verified(self, path: str, file: FileId, whole: bool = True) -> None:
        """Notes that every byte of this version of the file, or of all but what is in tiles, matched its checksum."""
        (self._verified if whole else self._verified_rest)[path] = file

    def report_unusable(self, path: str, error: Exception) -> None:
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

    def _head(self, path: str) -> RecordHead:
        head = self.heads.get(path)
        if head is None:
            digest = os.path.basename(path).removesuffix(SUFFIX)
            record, file, blocks = read_record(path, self._storage)
            check_name(record, digest)
            head = RecordHead.of(record, file, blocks, self._form, not self._on_cpu)
            if self._damaged.get(path) == file:
                raise DamagedRecord("it was found damaged before")
            self.heads.keep(path, head)
            for uses in self._uses:
                uses.read(digest)
        return head

    def _must_verify(self, path: str, file: FileId, whole: bool = True) -> bool:
        if self._verify == "first":
            return self._verified.get(path) != file and (whole or self._verified_rest.get(path) != file)
        return self._verify == "always"
