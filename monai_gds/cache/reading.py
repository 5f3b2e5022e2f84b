"""Reads records through a storage backend. All reads of the cache go through this file."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from monai_gds import limits
from monai_gds.cache import device_tiles
from monai_gds.cache.boxes import Arrangement, Box, arrange, last_three, whole_box
from monai_gds.cache.checksum import checksum
from monai_gds.cache.device_tiles import Unpacking
from monai_gds.cache.header import SUFFIX, Header, header_length, parse
from monai_gds.cache.heads import Form, HeadMemory, RecordHead, TensorForm, TensorTable, check_codecs
from monai_gds.cache.kept import KeptRecords
from monai_gds.cache.problems import Problems
from monai_gds.cache.record import check_name
from monai_gds.cache.runs import Runs
from monai_gds.cache.tiles import PATTERNS, Selection, Tiles
from monai_gds.cache.tree import tensor_of
from monai_gds.cache.unpacking import unpack, unpack_boxes
from monai_gds.errors import DamagedRecord, FileChanged, NewerRecord, RecordError
from monai_gds.pooled_memory import pooled_volume
from monai_gds.storage import FileId, Pending, Reads, Storage
from monai_gds.storage.files import check_identity

__all__ = ["LazyItem", "PendingItem", "RecordReader", "Verify", "Volume", "Volumes", "read_record"]

T = TypeVar("T")

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

    __slots__ = (
        "_file", "_first", "_head", "_path", "_pending", "_reader", "_tries", "_unpacking", "_verify", "nbytes",
    )  # fmt: skip

    def __init__(
        self, reader: RecordReader, path: str, head: RecordHead, verify: bool, tries: int, pending: Pending,
        unpacking: Unpacking | None = None, file: int = 0, first: int = 0,
    ) -> None:  # fmt: skip
        self._reader, self._path, self._tries = reader, path, tries
        self._head, self._verify = head, verify
        self._pending, self._unpacking, self._file, self._first = pending, unpacking, file, first
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
            if self._unpacking is not None:
                self._unpacking.check()
            if self._verify:
                _verify_all(head, head.table, raw, self._unpacking)
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
            return (head.recipe(_tensors(head, head.table, raw, self._unpacking), item),)
        except RecordError as e:
            self._reader.report_unusable(self._path, e)
            return None


def _verify_all(head: RecordHead, table: TensorTable, raw: Sequence[torch.Tensor], unpacking: Unpacking | None) -> None:
    """Compares the checksums of what was read. Unpacking on a device has compared those of each tile."""
    checksums = dict(zip((name for name, _, _ in head.table.tensors), head.checksums, strict=True))
    for (name, _, _), data in zip(table.tensors, raw, strict=True):
        if unpacking is None or name not in head.tiles:
            _check(name, checksums[name], data)


def _tensors(
    head: RecordHead, table: TensorTable, raw: Sequence[torch.Tensor], unpacking: Unpacking | None
) -> dict[str, torch.Tensor]:
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


class LazyItem:
    """A record whose tensors in tiles are read box by box, once it is known which boxes are needed.

    Attributes:
        tiled: dtype and shape of each tensor in tiles that comes as a tensor, by name. What comes as a NumPy array, is
            complex or requires a gradient is not among them: it is read whole, with all that is not in tiles.
        nbytes: bytes of the reads begun so far, and of the memory of what they are unpacked to.
    """

    __slots__ = ("_error", "_head", "_path", "_reader", "_rest", "_verify", "nbytes", "tiled")

    def __init__(self, reader: RecordReader, path: str, begun: _Begun) -> None:
        self._reader, self._path, self._head, self._verify = reader, path, begun.head, begun.verify
        self._rest: tuple[Pending, Unpacking | None] | None = begun.pending, begun.unpacking
        self.tiled: Mapping[str, TensorForm] = begun.head.tiled
        self.nbytes = begun.head.rest.reads.total
        self._error: Exception | None = None  # of its runs

    @property
    def ready(self) -> bool:
        """Whether :meth:`assemble` has nothing to wait for."""
        return self._rest is None or self._rest[0].done

    def assemble(self, tensors: Mapping[str, torch.Tensor], item: Any = None) -> Any:
        """Puts the item together, after waiting for the tensors that are not in :attr:`tiled`.

        Args:
            tensors: in place of those in :attr:`tiled`, by name.
            item: the dataset's own item, from which values are taken that no record can store.

        Returns:
            ``(item,)``, which shares nothing with that of another call; or None if the record turned out to be
            unusable, which has been reported, or was replaced or deleted.
        """
        return self._reader.usable(self._path, lambda: (self._head.recipe({**self._others(), **tensors}, item),))

    def _others(self) -> dict[str, torch.Tensor]:
        head = self._head
        begun, self._rest = self._rest, None
        if begun is None:  # somebody may have changed the tensors of the first call
            pending, unpacking, self._verify = self._reader.begin(self._path, head, head.rest)
        else:
            pending, unpacking = begun
        raw = pending.wait()[: len(head.rest.tensors)]  # where there are none, one read of nothing
        if unpacking is not None:
            unpacking.check()
        if self._verify:
            _verify_all(head, head.rest, raw, unpacking)
            self._reader.mark_verified(self._path, head.file, head.rest is head.table)
        return _tensors(head, head.rest, raw, unpacking)

    @property
    def runs(self) -> Mapping[str, Runs]:
        """The runs of those labels in :attr:`tiled` that have any, by name. Finding an element reads a few kB, at once.

        Where that raises, what :meth:`read` returns afterwards comes to nothing, and the record is reported.
        """
        return {name: Runs(table, partial(self._run_block, name)) for name, (table, _) in self._head.runs.items()}

    def _run_block(self, name: str, block: int) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self._reader.run_block(self._path, self._head, name, block)
        except (RecordError, OSError) as e:
            self._error = e
            raise

    def read(self, boxes: Mapping[str, Sequence[Box]]) -> Volumes:
        """Starts reading boxes of tensors in :attr:`tiled`.

        Args:
            boxes: which voxels, by the name of the tensor; none of them empty.
        """
        if self._error is not None:
            return Volumes(self._reader, self._path, self._head, [], self._reader.failed(self._error), None)
        on_device = self._reader.unpacks_there()
        parts = [_part(name, self._head, wanted, on_device) for name, wanted in boxes.items() if wanted]
        pending, unpacking = self._reader.begin_boxes(self._path, self._head, parts)
        self.nbytes += sum(part.selection.nbytes + part.nbytes for part in parts)
        return Volumes(self._reader, self._path, self._head, parts, pending, unpacking)


class Volume(NamedTuple):
    """Voxels of a tensor in boxes that were read. All else in its memory is anything.

    Attributes:
        data: the memory, 1-D, of the tensor's dtype.
        arrangement: where the boxes lie in it.
    """

    data: torch.Tensor
    arrangement: Arrangement

    def view(self, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
        """A view within the boxes, given as one of the whole tensor, contiguous and at the front of its memory.

        Views share memory if those of the whole tensor did. A view has the strides that it would have there.

        Args:
            size: of the view.
            stride: of the view, in elements.
            offset: of its first element.

        Raises:
            ValueError: its first element is in no box.
        """
        if 0 in size:
            return self.data.new_empty(0).as_strided(size, stride)
        return self.data.as_strided(size, stride, self.arrangement.place(offset))

    def whole(self) -> torch.Tensor:
        """The whole tensor, contiguous, if it was read as one box.

        Raises:
            ValueError: it was not.
        """
        if not self.arrangement.is_whole:
            raise ValueError(f"only boxes of this tensor of shape {self.arrangement.shape} were read: take views")
        return self.data.view(self.arrangement.shape)


class _Part(NamedTuple):
    """What is read of one tensor."""

    name: str
    entry: int  # which of the record's tensors
    tiles: Tiles
    boxes: Sequence[Box]
    arrangement: Arrangement
    selection: Selection

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of the boxes."""
        return self.arrangement.numel * self.tiles.layout.dtype.itemsize


def _part(name: str, head: RecordHead, boxes: Sequence[Box], on_device: bool) -> _Part:
    tiles = head.tiles[name]
    entry = next(i for i, (other, _, _) in enumerate(head.table.tensors) if other == name)
    shape = tiles.layout.shape
    # On a device tiles are placed whole, and memory that was not touched before costs nothing.
    arrangement = arrange(shape, tiles.layout.dtype.itemsize, [whole_box(shape)] if on_device else boxes)
    return _Part(name, entry, tiles, boxes, arrangement, tiles.select(tiles.touched(boxes)))


class Volumes:
    """Boxes being read of the tensors of a record."""

    def __init__(
        self, reader: RecordReader, path: str, head: RecordHead, parts: Sequence[_Part], pending: Pending,
        unpacking: Unpacking | None,
    ) -> None:  # fmt: skip
        self._reader, self._path, self._head, self._parts = reader, path, head, parts
        self._unpacking = unpacking
        self._pending: Pending | None = pending
        self._found: dict[str, Volume] | None = None
        self._lock = threading.Lock()

    def wait(self) -> dict[str, Volume] | None:
        """Waits for the reads, and unpacks what was read on the CPU. Tensors may be used on the current stream at once.

        Returns:
            By name, memory of the tensor's dtype on the target device. None if the record turned out to be unusable,
            which has been reported, or was replaced or deleted meanwhile: compute the item, or start anew.
        """
        with self._lock:
            if self._pending is not None:
                self._found = self._reader.usable(self._path, self._unpacked)
                self._pending = None
            return self._found

    def _unpacked(self) -> dict[str, Volume]:
        assert self._pending is not None
        raw = self._pending.wait()
        if self._unpacking is not None:
            self._unpacking.check()
            return {
                part.name: Volume(data.view(-1), part.arrangement) for part, data in zip(self._parts, raw, strict=True)
            }
        found = {}
        for part, data in zip(self._parts, raw, strict=True):
            self._reader.check_tiles(self._path, self._head, part.tiles, part.selection, data.numpy())
            volume = _unpacked_boxes(part, data.numpy())
            found[part.name] = volume._replace(data=volume.data.to(self._reader.device))
        return found


def _unpacked_boxes(part: _Part, streams: np.ndarray) -> Volume:
    layout, arrangement = part.tiles.layout, part.arrangement
    try:
        flat = pooled_volume(part.nbytes).view(PATTERNS[layout.dtype.itemsize])
    except (MemoryError, RuntimeError) as e:  # tiles of equal bytes take no room, so any record can declare this
        raise DamagedRecord(f"boxes of its tensor of shape {layout.shape} do not fit into memory: {e}") from e
    volume = math.prod(last_three(layout.shape))
    strides = arrangement.strides
    regions = []
    for box in part.boxes:
        size = [axis.stop - axis.start for axis in box]
        first = sum(axis.start * stride for axis, stride in zip(box, strides, strict=True))
        steps = (volume, *strides)
        regions.append(flat.as_strided((layout.grid[0], *size), steps, arrangement.place(first)))
    unpack_boxes(part.tiles, part.selection, streams, part.boxes, regions)
    return Volume(flat.view(layout.dtype), arrangement)


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


def _reads_of(path: str, head: RecordHead, parts: Sequence[_Part]) -> Reads:
    """The reads of the tiles of some tensors, each into a buffer as :meth:`Tiles.select` lays it out."""
    chosen = [part.selection for part in parts]
    if not any(len(s.offset) for s in chosen):  # no tile has a stream: a read of nothing, which opens the file
        sizes = np.array([s.nbytes for s in chosen], np.int64)
        none = np.zeros(1, np.int64)
        return Reads((path,), (head.file,), none, none, none, none, none, sizes)
    entries = [head.table.reads.offset[part.entry] for part in parts]
    offset = np.concatenate([s.offset + at for s, at in zip(chosen, entries, strict=True)])
    length, start = (np.concatenate([getattr(s, which) for s in chosen]) for which in ("length", "dest"))
    dest = np.repeat(np.arange(len(chosen)), [len(s.offset) for s in chosen])
    sizes = np.array([s.nbytes for s in chosen], np.int64)
    return Reads((path,), (head.file,), np.zeros_like(offset), offset, length, dest, start, sizes)


class _Begun(NamedTuple):
    """Reads of a record that were begun."""

    head: RecordHead
    verify: bool  # whether checksums are to be compared
    tries: int  # left
    pending: Pending
    unpacking: Unpacking | None


class RecordReader:
    """Reads the records of one directory. Problems are reported, and the record counts as absent."""

    def __init__(self, storage: Storage, verify: Verify, form: Form, problems: Problems, device_bytes: int = 0) -> None:
        self.heads = HeadMemory()
        self._kept = KeptRecords(device_bytes) if device_bytes else None
        self._storage = storage
        self.device = storage.device
        self._on_cpu = storage.device.type == "cpu"
        self._verify: Verify = "always" if verify == "first" and not storage.coherent else verify
        self._form = form
        self._problems = problems
        self._verified: dict[str, FileId] = {}
        self._verified_rest: dict[str, FileId] = {}  # all but tensors in tiles, which note it themselves

    def start(self, path: str, tries: int = _TRIES) -> PendingItem | None:
        """Starts reading a record; None if there is no usable one."""
        begun = self._start(path, tries, lazily=False)
        if begun is None:
            return None
        return PendingItem(self, path, begun.head, begun.verify, begun.tries, begun.pending, begun.unpacking)

    def start_lazily(self, path: str) -> LazyItem | None:
        """As :meth:`start`, but of tensors in tiles only what is asked for later."""
        begun = self._start(path, _TRIES, lazily=True)
        return None if begun is None else LazyItem(self, path, begun)

    def _start(self, path: str, tries: int, lazily: bool) -> _Begun | None:
        while True:
            try:
                head = self._head(path)
                pending, unpacking, verify = self.begin(path, head, head.rest if lazily else head.table)
                if self._on_cpu and pending.done and (errors := pending.errors):
                    raise errors[0]
                return _Begun(head, verify, tries, pending, unpacking)
            except FileNotFoundError:
                return None
            except FileChanged as e:
                self.forget(path)
                tries -= 1
                if not tries:
                    self.report_unusable(path, e)  # a file system on which a file never keeps its identity
                    return None
            except (RecordError, OSError) as e:
                self.report_unusable(path, e)
                return None

    def begin(self, path: str, head: RecordHead, table: TensorTable) -> tuple[Pending, Unpacking | None, bool]:
        """Begins to read the tensors of a table.

        Returns:
            The reads, what unpacks tensors in tiles behind them, on a device, and whether checksums are to be compared.
        """
        verify = self._must_verify(path, head.file, table is head.table)
        # A record to be verified is read, not mapped: on a failing disk a read raises, touching a mapping kills.
        begin = self._storage.load if verify else self._storage.map
        if not head.tiles or not self.unpacks_there():
            return begin(table.reads.at(path, head.file)), None, verify
        tiles = [head.tiles.get(name) for name, _, _ in table.tensors]
        wanted = [None if one is None else (one, one.starts, None) for one in tiles]
        if table is head.table and self._stays(path, head):
            pending, unpacking = self._begin_kept(path, head, wanted)
            return pending, unpacking, verify
        unpacking = Unpacking(wanted)
        return begin(table.reads.at(path, head.file)).then(unpacking, aside=True), unpacking, verify

    def _stays(self, path: str, head: RecordHead) -> bool:
        """Whether a record is in the device's memory, or will be when it is read whole."""
        return self._kept is not None and self._kept.has_room(path, head.table.reads.total)

    def _begin_kept(
        self, path: str, head: RecordHead, wanted: Sequence[Any], only: Sequence[int] | None = None
    ) -> tuple[Pending, Unpacking]:
        """Takes a record from the device's memory, or begins to read all of it, to be kept there."""
        assert self._kept is not None, "the caller has looked"
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
        why = device_tiles.why_not()
        if why is not None:
            self._problems.warn("tiles", f"compressed records are unpacked by the CPU, which is slow: {why}")
        return why is None

    def begin_boxes(self, path: str, head: RecordHead, parts: Sequence[_Part]) -> tuple[Pending, Unpacking | None]:
        """Begins to read the streams of boxes, as :meth:`Tiles.select` lays them out."""
        try:
            if not self.unpacks_there():
                into = [pooled_volume(part.selection.nbytes) for part in parts]
                return self._storage.fill(_reads_of(path, head, parts), into), None
            ids = [part.selection.tiles.astype(np.int32) for part in parts]
            if self._stays(path, head):
                wanted: list[Any] = [None] * len(head.table.tensors)
                for part, some in zip(parts, ids, strict=True):
                    wanted[part.entry] = part.tiles, part.tiles.starts[some], some
                return self._begin_kept(path, head, wanted, [part.entry for part in parts])
            unpacking = Unpacking([(p.tiles, p.selection.starts, some) for p, some in zip(parts, ids, strict=True)])
            return self._storage.load(_reads_of(path, head, parts)).then(unpacking, aside=True), unpacking
        except OSError as e:
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

    def failed(self, error: Exception) -> Pending:
        """Reads of a record that has failed already."""
        return Pending.completed([], self._storage.device, error)

    def usable(self, path: str, get: Callable[[], T]) -> T | None:
        """What ``get`` reads of a record; None if the record is unusable, which is reported, or there no more."""
        try:
            return get()
        except (FileChanged, FileNotFoundError):  # replaced or deleted by another process
            self.forget(path)
        except (RecordError, OSError) as e:
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
                found[i] = PendingItem(self, paths[i], head, verify, _TRIES, pending, None, file, first)
                first += len(head.table.reads)
        return found

    def start_all_lazily(self, paths: Sequence[str]) -> list[LazyItem | PendingItem | None]:
        """As :meth:`start_lazily` for records with tensors in tiles, and as :meth:`start_all` for all others."""
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
                found[i] = PendingItem(
                    self, path, begun.head, begun.verify, begun.tries, begun.pending, begun.unpacking
                )
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
        """Whether the record of a key is there with a sound header, and ``suits``. Its data are not read.

        A record that only another version or machine can use is sound: it is reported, and not replaced.
        """
        try:
            record = self.examine(path, digest)
        except FileNotFoundError:
            return False
        except (RecordError, OSError) as e:
            self.report_unusable(path, e)
            return isinstance(e, NewerRecord)
        return suits is None or suits(record)

    def examine(self, path: str, digest: str) -> Header:
        """The header of the record of a key.

        Raises:
            RecordError: it shows that the record cannot be used here.
            OSError: it cannot be read.
        """
        record, _, _ = read_record(path, self._storage)
        check_name(record, digest)
        check_codecs(record, not self._on_cpu)
        return record

    def forget(self, path: str) -> None:
        self.heads.drop(path)
        if self._kept is not None:
            self._kept.drop(path)
        self._verified.pop(path, None)
        self._verified_rest.pop(path, None)

    def mark_verified(self, path: str, file: FileId, whole: bool = True) -> None:
        """Notes that every byte of this version of the file, or of all but what is in tiles, matched its checksum."""
        (self._verified if whole else self._verified_rest)[path] = file

    def report_unusable(self, path: str, error: Exception) -> None:
        """Warns of a record that cannot be used, and forgets it."""
        self.forget(path)
        self._problems.unusable(path, error)

    def _head(self, path: str) -> RecordHead:
        head = self.heads.get(path)
        if head is None:
            record, file, blocks = read_record(path, self._storage)
            check_name(record, os.path.basename(path).removesuffix(SUFFIX))
            head = RecordHead.of(record, file, blocks, self._form, not self._on_cpu)
            self.heads.keep(path, head)
        return head

    def _must_verify(self, path: str, file: FileId, whole: bool = True) -> bool:
        if self._verify == "first":
            return self._verified.get(path) != file and (whole or self._verified_rest.get(path) != file)
        return self._verify == "always"
