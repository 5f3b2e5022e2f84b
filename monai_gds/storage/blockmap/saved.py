"""The saved form of a block map, and its entries.

A saved map is one JSON object, from paths to blocks::

    {
      "__blockmap__": {"version": 1, "block_size": 512, "parent": "/data", "kind": "ext4", "uuid": "…", "start": 0,
                       "disk": {…}, "folders": ["train/n01491361", "train/without_files"],
                       "unmapped": {"train/n01491361/shared.JPEG": {"size": 5000, "why": "its blocks are …"}}},
      "train/n01491361/n01491361_8657.JPEG":
          {"startblock": 2048, "endblock": 2275, "size": 116504, "inode": 13, "mtime_ns": 1700000000000000000,
           "wsum64": "2fd6a3fbe3b2b1d0"},
      "train/n01491361/cut.JPEG":
          {"extents": [[0, 4096, 4103], [8, 9000, 9003]], "size": 6000, "inode": 14, "mtime_ns": …, "wsum64": …}
    }

* Paths are relative to the parent of the mapped folder, so they begin with the folder's name. ``parent`` is where that
  was; a reader whose disk is mounted elsewhere takes another one.
* Blocks have ``block_size`` bytes, the logical block size of the disk, and are numbered from the start of the whole
  disk. ``endblock`` is the last one.
* Where the disk is an md RAID0, blocks are numbered on the array. Its ``members`` are disks too, and ``array`` says how
  its bytes lie on them: those of a ``chunk``, the ``layout``, and in ``parts`` where its data begin on each and how
  many there are. :mod:`.raid0` has the arithmetic.
* A file of one extent has ``startblock`` and ``endblock``, which any program that knows only these reads correctly.
  Every other file has ``extents`` instead, each ``[first block within the file, startblock, endblock]``; such a program
  fails on it instead of reading wrong bytes. Ranges that no extent covers are zeros.
* ``wsum64`` is the checksum of the file's bytes, 16 hexadecimal digits (:mod:`monai_gds.base.checksum` defines it), in
  maps that were built with checksums.
* ``folders`` lists all folders. One without files appears nowhere else, but may be a class that takes a label.
* ``unmapped`` lists the files whose bytes cannot be read from the disk, and why.
* Without ``__blockmap__`` it is the plain format of the comparison of DALI and xNVMe: blocks of 512 bytes, no sizes, no
  checksums. :meth:`BlockMap.load` reads it, and :meth:`BlockMap.plain` makes one.
* ``folders``, ``unmapped`` and ``wsum64`` may be missing, as in older maps.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from monai_gds.errors import BlockMapError, FileChanged
from monai_gds.storage.blockmap.extents import Disk, Extent, FileSystem, extents_in, look
from monai_gds.storage.blockmap.raid0 import Part, Raid0

VERSION = 1
HEADER = "__blockmap__"  # not a path: those contain a slash
PLAIN_BLOCK = 512
_CHECKSUM = "wsum64"


class FileBlocks(NamedTuple):
    """Where one file lies.

    Attributes:
        size: its bytes; in a plain map, those of its blocks.
        extents: where its bytes lie, in order. Ranges that none covers are zeros.
        inode: its inode number; None in a plain map.
        mtime_ns: time of its last change; None in a plain map.
        checksum: the checksum of its bytes, see :mod:`monai_gds.base.checksum`; None if the map was built without.
    """

    size: int
    extents: tuple[Extent, ...]
    inode: int | None = None
    mtime_ns: int | None = None
    checksum: int | None = None

    @classmethod
    def of(cls, fd: int, fs: FileSystem, path: str) -> FileBlocks:
        """The current blocks of an open file. Raises NotMappable, or BlockMapError for another file system."""
        st = os.fstat(fd)
        if st.st_dev != fs.device:
            raise BlockMapError(f"{path} is on another file system than the rest: build a map for each")
        extents = extents_in(look(fd, st.st_size), fd, st.st_size, fs, path)
        return cls(st.st_size, tuple(extents), st.st_ino, st.st_mtime_ns)

    def check(self, now: FileBlocks, path: str) -> None:
        """Raises FileChanged unless this entry has the current blocks of its file."""
        change = self._change(now)
        if change:
            raise FileChanged(f"{path} is not where the block map says: {change}; build the map again")

    def _change(self, now: FileBlocks) -> str | None:
        if self.inode is None:  # a plain entry may end with the last block of the file or of the file system
            same_start = [e.start for e in self.extents] == [e.start for e in now.extents]
            return None if same_start and self.size >= now.size else "its blocks moved"
        if self.inode != now.inode:
            return f"it was replaced (inode {self.inode} became {now.inode})"
        if self.size != now.size:
            return f"its size changed from {self.size} to {now.size} bytes"
        if self.mtime_ns != now.mtime_ns:
            return "it was written to"
        return None if self.extents == now.extents else "its blocks moved"

    def to_json(self, block: int) -> dict[str, Any]:
        """The entry in a saved map."""
        extents = [[e.offset // block, e.start // block, (e.start + e.nbytes) // block - 1] for e in self.extents]
        single = len(extents) == 1 and self.extents[0].offset == 0 and self.extents[0].nbytes >= self.size
        entry = {"startblock": extents[0][1], "endblock": extents[0][2]} if single else {"extents": extents}
        if self.inode is None:
            return entry
        known = {"size": self.size, "inode": self.inode, "mtime_ns": self.mtime_ns}
        return {**entry, **known} if self.checksum is None else {**entry, **known, _CHECKSUM: f"{self.checksum:016x}"}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], block: int) -> FileBlocks:
        """Reads an entry of a saved map. One that is malformed raises KeyError, TypeError or ValueError."""
        runs = entry["extents"] if "extents" in entry else [[0, entry["startblock"], entry["endblock"]]]
        extents = tuple(
            Extent(_whole(offset) * block, _whole(first) * block, (_whole(last) + 1 - first) * block)
            for offset, first, last in runs
        )
        size = _whole(entry.get("size", sum(e.nbytes for e in extents)))
        if "inode" not in entry:
            return cls(size, extents)
        known = entry.get(_CHECKSUM)
        if known is not None and not re.fullmatch("[0-9a-f]{16}", _text(known)):
            raise ValueError(f"{known!r:.40} is not a checksum")
        checksum = None if known is None else int(known, 16)
        return cls(size, extents, _whole(entry["inode"]), _whole(entry["mtime_ns"]), checksum)


class Unmapped(NamedTuple):
    """A file whose bytes cannot be read from the disk."""

    size: int  # its bytes
    why: str  # the reason, and the remedy if there is one


@dataclass(frozen=True)
class Origin:
    """Where a map was made: the folder that its paths are relative to, and its file system on the disk."""

    parent: str
    kind: str
    uuid: str  # of the file system, by which a disk is recognised
    start: int  # first byte of the file system on the disk
    disk: Disk


class Saved(NamedTuple):
    """What a saved map holds; see :class:`.block_map.BlockMap`. A plain one has no ``origin``, and only ``files``."""

    files: Mapping[str, FileBlocks]
    origin: Origin | None = None
    folders: Sequence[str] = ()
    unmapped: Mapping[str, Unmapped] = MappingProxyType({})

    def write(self, file: str | os.PathLike[str]) -> None:
        block = PLAIN_BLOCK if self.origin is None else self.origin.disk.block_size
        entries = {path: blocks.to_json(block) for path, blocks in self.files.items()}
        if self.origin is not None:
            known = {"version": VERSION, "block_size": block, **asdict(self.origin)}
            unmapped = {path: entry._asdict() for path, entry in self.unmapped.items()}
            entries = {HEADER: {**known, "folders": self.folders, "unmapped": unmapped}, **entries}
        temporary = Path(f"{os.fspath(file)}.{uuid.uuid4().hex}")
        try:
            with open(temporary, "x", encoding="ascii") as out:
                json.dump(entries, out, separators=(",", ":"))
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> Saved:
        """Reads a map. Raises whatever JSON of another form leads to, and BlockMapError for a newer format."""
        entries = json.loads(Path(file).read_bytes())
        header = entries.pop(HEADER, None)
        if header is None:
            return cls(_files(entries, PLAIN_BLOCK))
        if header["version"] > VERSION:
            raise BlockMapError(f"it has format {header['version']}, newer than {VERSION}: update monai_gds")
        origin, folders = _origin(header), header.get("folders", [])
        if not isinstance(folders, list):
            raise TypeError("its folders are not a list of paths")
        left_out = header.get("unmapped", {}).items()
        unmapped = {_below(path): Unmapped(_whole(entry["size"]), _text(entry["why"])) for path, entry in left_out}
        if any(entry.size < 0 for entry in unmapped.values()):
            raise ValueError("the size of a file is negative")
        return cls(_files(entries, origin.disk.block_size), origin, tuple(map(_below, folders)), unmapped)


def _files(entries: Mapping[str, Any], block: int) -> dict[str, FileBlocks]:
    return {_below(path): FileBlocks.from_json(entry, block) for path, entry in entries.items()}


def _below(path: Any) -> str:
    """A path of a saved map, which must not lead out of the folder that it is relative to."""
    if {"", ".."} & set(_text(path).split("/")) or "\0" in path:
        raise ValueError(f"{path!r:.200} is not a path below the folder")
    os.fsencode(path)  # raises ValueError for what no path can contain
    return str(path)


def _origin(header: Mapping[str, Any]) -> Origin:
    disk = _disk(header["disk"])
    if header["block_size"] != disk.block_size:
        raise BlockMapError(f"blocks of {header['block_size']} bytes on a disk with blocks of {disk.block_size}")
    start = _whole(header["start"])
    if not 0 <= start < disk.nbytes:
        raise ValueError(f"its file system begins at byte {start} of a disk of {disk.nbytes} bytes")
    return Origin(_text(header["parent"]), _text(header["kind"]), _text(header["uuid"]), start, disk)


def _disk(entry: Mapping[str, Any]) -> Disk:
    array = entry.get("array")
    members: tuple[Disk, ...] = ()
    if array is not None:
        parts = tuple(Part(_whole(part["start"]), _whole(part["nbytes"])) for part in array["parts"])
        array = Raid0(_whole(array["chunk"]), _whole(array["layout"]), parts)
        members = tuple(_disk({**one, "array": None}) for one in entry["members"])
    for number in ("block_size", "nbytes", "max_transfer"):
        _whole(entry[number])
    if entry["block_size"] not in (512, 1024, 2048, 4096):
        raise BlockMapError(f"its disk has blocks of {entry['block_size']} bytes")
    disk = Disk(**{**entry, "array": array, "members": members})
    if not re.fullmatch(r"[A-Za-z0-9][\w!:.-]*", _text(disk.name), re.ASCII):
        raise ValueError(f"{disk.name!r:.100} is not the name of a disk in /dev")
    if not re.fullmatch(r"[0-9]+:[0-9]+", _text(disk.number), re.ASCII):
        raise ValueError(f"{disk.number!r:.100} is not the number of a disk")
    if disk.nbytes < 1 or disk.max_transfer < disk.block_size:
        raise ValueError("its disk is empty, or takes commands of less than a block")
    return disk


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not text")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise TypeError(f"{value!r:.40} is not a whole number of 64 bits")
    return value
