"""Files that are known only from a saved block map: lookups, and whether the disk still holds what was mapped.

With a driver in user space no file system notices that a map is out of date. So the disk itself is examined. The first
time that this process reads a file, its inode is read along with it: it shows whether the file was written, replaced or
deleted after it was mapped. If the map has checksums, they are compared for files that are read whole, in one go for
all that is read at once: they show whether blocks were moved, overwritten or damaged.

Neither is possible with a plain map, which holds nothing but blocks.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch

from monai_gds.base.checksum import checksums
from monai_gds.errors import FileChanged, NotMappable, warn
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.blockmap.inodes import InodeTable, inode_table
from monai_gds.storage.blockmap.saved import FileBlocks, Origin
from monai_gds.storage.files import Expected, FileId, check_identity
from monai_gds.storage.pending import Pending
from monai_gds.storage.reads import Reads

#: Starts reads, as :meth:`monai_gds.storage.backend.Backend.start` does.
Start: TypeAlias = Callable[[Reads, Sequence[torch.Tensor]], Pending]

_UNNOTICED = (
    "the block map has no checksums: bytes that were moved or damaged since it was made are read without an error; "
    "`monai-gds blockmap build --checksums` stores them"
)
_NO_INODES = (
    "this file system's inodes cannot be found (ext4 with meta_bg, for instance): files that were written, replaced or "
    "deleted since they were mapped are read as they were then, without an error"
)
_UNNOTICED_BY_PLAIN = (
    "a plain block map holds neither checksums nor the identity of the disk and its files: out of date, or on another "
    "disk, it gives other bytes without an error; `monai-gds blockmap build --checksums` makes one that notices"
)


class WholeDisk(str):
    """Stands for the disk itself in place of a path. Its text is the disk's address."""

    __slots__ = ()


def lookup(blocks: BlockMap, path: str) -> FileBlocks:
    """A file's entry in a map. Raises NotMappable if it could not be mapped, FileNotFoundError if the map lacks it."""
    try:
        return blocks[path]
    except KeyError as e:
        why = blocks.why_not(path)
        if why is not None:
            raise NotMappable(errno.EOPNOTSUPP, why, path) from e
        raise FileNotFoundError(errno.ENOENT, str(e.args[0]), path) from e


class MappedFiles:
    """The files of a map on a disk, named by its address, that is not mounted.

    If the map has no checksums, a warning says which changes go unnoticed.
    """

    def __init__(self, blocks: BlockMap, disk: str, device: torch.device) -> None:
        self._map, self._disk, self._device = blocks, WholeDisk(disk), device
        self._current: set[str] = set()  # files whose inode was seen to be the one that was mapped
        self._table: InodeTable | None = None
        self._looked_for_table = False
        if not blocks.has_checksums:
            warn(_UNNOTICED if blocks.origin else _UNNOTICED_BY_PLAIN, UserWarning)

    def entry(self, path: str, expected: Expected, device: int = 0) -> FileBlocks:
        """A file's entry. ``device`` counts as its ``st_dev``. Raises as :func:`lookup`, and FileChanged."""
        blocks = lookup(self._map, path)
        check_identity(expected, identity(blocks, device), path)
        return blocks

    def start(self, start: Start, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        """Starts reads. A file fails if the disk no longer holds it as it was mapped."""
        files, entries = len(reads.paths), [self._map.get(path) for path in reads.paths]
        new = [
            (file, entry)
            for file, entry in enumerate(entries)
            if entry is not None and entry.inode is not None and reads.paths[file] not in self._current
        ]
        try:
            inodes = self._inodes(new, start) if new else None
        except OSError as e:
            failed = Pending(list(into), self._device, files)
            failed.fail_all(e)
            failed.finish()
            return failed
        # Reads of a whole file whose checksum the map has.
        sizes = [-1 if entry is None or entry.checksum is None else entry.size for entry in entries]
        whole = np.flatnonzero((reads.offset == 0) & (reads.nbytes == np.array(sizes, np.int64)[reads.file]))
        if inodes is None and not len(whole):
            return start(reads, into)

        def check(errors: Mapping[int, Exception]) -> Mapping[int, Exception]:
            wrong = dict(errors)
            if inodes is not None:
                wrong = inodes.compared(reads.paths, wrong)
                self._current.update(reads.paths[file] for file, _ in new if file not in wrong)
            return _compared(reads, into, entries, whole, wrong)

        if inodes is not None:  # their file comes last
            pending = start(Reads.join([reads, inodes.reads]), [*into, inodes.data])
        else:
            pending = start(reads, into)
        return pending.checked(into, files, check)

    def _inodes(self, new: Sequence[tuple[int, FileBlocks]], start: Start) -> _Inodes | None:
        """The inodes of some files, to be read; None where they cannot be found on this file system."""
        origin = self._map.origin
        assert origin is not None, "only maps with an origin have inodes"
        if not self._looked_for_table:

            def read(offset: int, nbytes: int) -> bytes:
                data = torch.empty(nbytes, dtype=torch.uint8)
                start(Reads.of(self._disk, [(origin.start + offset, nbytes)]), [data]).wait()
                return data.numpy().tobytes()

            self._table, self._looked_for_table = inode_table(origin.kind, read), True
            if self._table is None:
                warn(_NO_INODES, UserWarning)
        return None if self._table is None else _Inodes(self._table, self._disk, origin, new)


class _Inodes:
    """The inodes of mapped files: reading them along with the files, and comparing them with the map."""

    def __init__(
        self, table: InodeTable, disk: WholeDisk, origin: Origin, files: Sequence[tuple[int, FileBlocks]]
    ) -> None:
        self._table, self._files = table, files
        found = [table.place(entry.inode or 0) for _, entry in files]
        room = origin.disk.nbytes - origin.start - table.nbytes
        self._places = [-1 if at is None or at > room else at for at in found]
        self._unique = np.unique([at for at in self._places if at >= 0]).astype(np.int64)
        count = len(self._unique)
        self.reads = Reads(
            [disk], [None], np.zeros(count, np.int64), self._unique + origin.start, np.full(count, table.nbytes),
            np.zeros(count, np.int64), np.arange(count) * table.nbytes, np.array([count * table.nbytes]),
        )  # fmt: skip
        self.data = torch.empty(count * table.nbytes, dtype=torch.uint8)

    def compared(self, paths: Sequence[str], errors: dict[int, Exception]) -> dict[int, Exception]:
        """Adds an error for each file whose inode has changed; returns the errors by file."""
        unread = errors.pop(len(paths), None)
        data = self.data.numpy().tobytes()
        for (file, entry), place in zip(self._files, self._places, strict=True):
            why: Exception | str | None = unread
            if unread is None:
                at = int(np.searchsorted(self._unique, place)) * self._table.nbytes
                why = _change(entry, data[at : at + self._table.nbytes] if place >= 0 else b"", self._table)
            if isinstance(why, str):
                why = FileChanged(
                    f"{paths[file]} is not on the disk as it was mapped: {why}, or the disk was not unmounted cleanly; "
                    "mount it and build the map again"
                )
            if why is not None:
                errors.setdefault(file, why)
        return errors


def _change(entry: FileBlocks, inode: bytes, table: InodeTable) -> str | None:
    if not inode:
        return f"it has no inode {entry.inode}"
    now = table.parse(inode)
    if not now.in_use:
        return "it was deleted or replaced"
    if now.size != entry.size:
        return f"its size changed from {entry.size} to {now.size} bytes"
    return None if now.mtime_ns == entry.mtime_ns else "it was written to or replaced"


def _compared(
    reads: Reads, into: Sequence[torch.Tensor], entries: Sequence[FileBlocks | None], whole: np.ndarray,
    errors: dict[int, Exception],
) -> dict[int, Exception]:  # fmt: skip
    """Adds an error for each file that was read whole and does not match its checksum; returns the errors by file."""
    rows = [row for row in reads[whole].rows if row.file not in errors]
    for device in {into[row.dest].device for row in rows}:
        there = [row for row in rows if into[row.dest].device == device]
        found = checksums([into[row.dest][row.start : row.start + row.nbytes] for row in there])
        for row, checksum in zip(there, found, strict=True):
            entry, path = entries[row.file], reads.paths[row.file]
            if entry is not None and checksum != entry.checksum:
                why = "its bytes do not match their checksum: they were moved, overwritten or damaged"
                errors[row.file] = FileChanged(
                    f"{path} is not on the disk as it was mapped: {why}; mount the disk and build the map again"
                )
    return errors


def identity(blocks: FileBlocks, device: int = 0) -> FileId:
    """The identity of a file according to its entry in the map."""
    return FileId(device, blocks.inode or 0, blocks.size, blocks.mtime_ns or 0)
