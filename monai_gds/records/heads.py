"""What a process keeps of records that it has read, so that the next hit costs less.

A head in memory saves all parsing: the hit takes one request. A packed record in the memory of a CUDA device saves the
read and the copy: the hit only decodes it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from monai_gds import limits
from monai_gds.errors import CodecMissing
from monai_gds.items.tree import Recipe, compile_tree
from monai_gds.records.header import ARRAYS, TABLE, Header, RunsKey
from monai_gds.storage import FileId, Reads
from monai_gds.tiles import device
from monai_gds.tiles.codecs import ON_CPU
from monai_gds.tiles.runs import RunTable, threshold_of
from monai_gds.tiles.tiles import Layout, Tiles
from monai_gds.tiles.unpacking import why_not

T = TypeVar("T")


class Form(NamedTuple):
    """The form in which items come out of records."""

    track_meta: bool = True  # False returns MetaTensors as plain tensors
    numpy: bool = False  # True returns arrays as NumPy arrays, False as tensors
    root: str | None = None  # the data root that paths in records are relative to, or None


class TensorForm(NamedTuple):
    """What a tensor is, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorTable:
    """Where the tensors of a record lie; shared by all records with the same tensors."""

    def __init__(
        self, tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...], ranges: tuple[tuple[int, int], ...]
    ) -> None:
        self.tensors = tensors
        # A template, of a file yet to be named. A read of nothing opens the file, whose identity is checked.
        self.reads = Reads.of("", ranges or [(0, 0)])


_shared_table = functools.lru_cache(maxsize=256)(TensorTable)


class RecordHead(NamedTuple):
    """Everything that is needed to read a record again in one request."""

    file: FileId  # identity of the file it was read from
    recipe: Recipe  # puts the item together
    table: TensorTable  # where its tensors lie
    checksums: tuple[int, ...]  # of the bytes of each tensor in the file
    tiles: dict[str, Tiles]  # of packed tensors, by name
    tiled: dict[str, TensorForm]  # those of them that may be read box by box: they come as plain tensors
    rest: TensorTable  # where all other tensors lie; the same as ``table`` if none may be
    runs: dict[RunsKey, tuple[RunTable, int]]  # of tiled labels: the table of the runs, and where the blocks begin
    nbytes: int  # of memory, about or less: as many as the front of the file has, and those of the tables of tensors

    @classmethod
    def of(cls, record: Header, file: FileId, blocks: dict[str, bytes], form: Form, on_gpu: bool) -> RecordHead:
        """The head of a record.

        Args:
            record: its header.
            file: the identity of its file.
            blocks: its packed small arrays and its tables of tiles and runs, by the names of their entries.
            form: the form of items.
            on_gpu: whether items come on a CUDA device.

        Raises:
            RecordError: its tree, its tiles or its runs are damaged, or of a newer version.
            CodecMissing: its tiles cannot be unpacked here.
        """
        recipe = compile_tree(record.tree, blocks.get(ARRAYS, b""), record.tensors, **form._asdict())
        tiles = {name: tiles_of(record, name, np.frombuffer(blocks[TABLE + name], np.uint8)) for name in record.tiles}
        check_codecs(record, on_gpu)
        entries = record.tensors.values()
        tensors = tuple([(name, getattr(torch, e.dtype), e.shape) for name, e in record.tensors.items()])
        ranges = tuple([(e.offset, e.nbytes) for e in entries])
        table = _shared_table(tensors, ranges)
        kept = {"numpy"} if form.numpy else set()
        separate = {"complex", "requires_grad", *kept}
        tiled = {name: _form_of(record, name) for name, tile in record.tiles.items() if not tile.uses & separate}
        others = [i for i, (name, _, _) in enumerate(tensors) if name not in tiled]
        rest = TensorTable(tuple([tensors[i] for i in others]), tuple([ranges[i] for i in others])) if tiled else table
        runs = {
            key: (run_table_of(record, key, np.frombuffer(blocks[key.entries[0]], np.uint8)), at.offset)
            for key, (_, at) in record.runs.items() if key.label in tiled
        }  # fmt: skip
        nbytes = min((e.offset for e in entries), default=file.size) + limits.HEAD_TENSOR_BYTES * len(tensors)
        return cls(file, recipe, table, tuple([e.checksum for e in entries]), tiles, tiled, rest, runs, nbytes)

    def forms(self) -> dict[str, TensorForm]:
        """What each tensor is, by name, but for those that become arrays."""
        arrays = self.recipe.plan.arrays
        return {name: TensorForm(dtype, shape) for name, dtype, shape in self.table.tensors if name not in arrays}

    def part(self, names: Collection[str]) -> TensorTable:
        """Where the tensors of these names lie."""
        if len(names) == len(self.table.tensors):
            return self.table
        chosen = [i for i, (name, _, _) in enumerate(self.table.tensors) if name in names]
        reads = self.table.reads
        ranges = tuple([(int(reads.offset[i]), int(reads.nbytes[i])) for i in chosen])
        return TensorTable(tuple([self.table.tensors[i] for i in chosen]), ranges)


def tiles_of(record: Header, name: str, table: np.ndarray) -> Tiles:
    """The tiles of a packed tensor, given the bytes of their table. Raises RecordError."""
    return Tiles(Layout.of_node(record.tiles[name].layout), table, record.tensors[name].nbytes)


def run_table_of(record: Header, key: RunsKey, table: np.ndarray) -> RunTable:
    """The table of the runs of a packed tensor, given its bytes. Raises DamagedRecord."""
    dtype, shape = _form_of(record, key.label)
    image = None
    if key.threshold:
        threshold_of(key.threshold)  # raises if it is none
        image = _form_of(record, key.image)
    return RunTable(shape, dtype, table, record.runs[key].blocks.nbytes, image)


def _form_of(record: Header, name: str) -> TensorForm:
    entry = record.tensors[name]
    return TensorForm(getattr(torch, entry.dtype), entry.shape)


def check_codecs(record: Header, on_gpu: bool) -> None:
    """Checks that the tiles of a record can be unpacked here, by the CPU or, for items on a CUDA device, there.

    Raises:
        RecordError: their description is damaged, or of a newer version.
        CodecMissing: a library is missing, or the CPU cannot unpack them.
    """
    for node, *_ in record.tiles.values():
        codec = Layout.of_node(node).codec
        no_gpu = device.why_not() if on_gpu else "items do not come on a GPU here"
        no_cpu = why_not(codec)
        if no_gpu and no_cpu:
            raise CodecMissing(no_cpu if codec in ON_CPU else f"{no_cpu}, and {no_gpu}")


class Kept(Generic[T]):
    """What is kept of records, by path, within a budget. Thread-safe.

    An epoch reads every record once, so the first records are kept and none is replaced by another.

    Args:
        budget: bytes.

    Attributes:
        nbytes: bytes kept now.
    """

    def __init__(self, budget: int) -> None:
        self.nbytes = 0
        self._budget = budget
        self._kept: dict[str, tuple[T, int]] = {}
        self._lock = threading.Lock()

    def get(self, path: str) -> T | None:
        """What is kept of a path. Its file may have changed since."""
        found = self._kept.get(path)
        return None if found is None else found[0]

    def has_room(self, path: str, nbytes: int) -> bool:
        """Whether a record of ``nbytes`` would be kept. Another thread may take the room meanwhile."""
        return path in self._kept or self.nbytes + nbytes <= self._budget

    def keep(self, path: str, what: T, nbytes: int) -> None:
        """Keeps something of a record, if there is room."""
        with self._lock:
            if path not in self._kept and self.nbytes + nbytes <= self._budget:
                self._kept[path] = what, nbytes
                self.nbytes += nbytes

    def drop(self, path: str) -> None:
        """Frees what was kept of a path, if anything."""
        with self._lock:
            self.nbytes -= self._kept.pop(path, (None, 0))[1]


class KeptRecords(Kept[tuple[FileId, Sequence[torch.Tensor]]]):
    """What was read of files, with their identities, in the memory of a device. Nobody else may write to it."""

    def of_file(self, path: str) -> Sequence[torch.Tensor] | None:
        """The tensors kept of the file that is at a path now; None if there are none.

        Raises:
            OSError: the file no longer exists.
        """
        found = self.get(path)
        if found is None or FileId.of(path) == found[0]:
            return None if found is None else found[1]
        self.drop(path)
        return None
