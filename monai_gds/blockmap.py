"""Which blocks of a disk the files of a folder occupy: built from the file system, saved as JSON, verified.

A map is made where the file system is mounted and read where it may not be: by the ``xnvme-block`` backend over a
user-space driver, or by another program. On disk it is one JSON object, path to blocks::

    {
      "__blockmap__": {"version": 1, "block_size": 512, "parent": "/data", "kind": "ext4", "uuid": "…", "start": 0,
                       "disk": {…}, "folders": ["train/n01491361", "train/without_files"]},
      "train/n01491361/n01491361_8657.JPEG":
          {"startblock": 2048, "endblock": 2275, "size": 116504, "inode": 13, "mtime_ns": 1700000000000000000},
      "train/n01491361/cut.JPEG":
          {"extents": [[0, 4096, 4103], [8, 9000, 9003]], "size": 6000, "inode": 14, "mtime_ns": …}
    }

* Paths are relative to the parent of the folder that was mapped, so they begin with its name.
* Blocks are ``block_size`` bytes, the disk's logical blocks, counted on the whole disk; ``endblock`` is the last one.
* A file of one extent has ``startblock`` and ``endblock``, so that a program that knows nothing else reads it rightly;
  any other has ``extents``, each ``[first block within the file, startblock, endblock]``, and no ``startblock``: such
  a program fails instead of reading wrong bytes. What no extent covers is zeros.
* ``folders`` are all folders: one without files shows nowhere else, and may be a class that takes a label.
* Without ``__blockmap__`` it is the plain format of the DALI comparison, blocks of 512 bytes and nothing known of
  sizes; :meth:`BlockMap.load` reads it, :meth:`BlockMap.save` writes it with ``plain=True``.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from monai_gds.errors import BlockMapError, FileChanged, StorageError
from monai_gds.extents import Disk, Extent, FileSystem, MountedFileSystems, map_extents, read_uuid

__all__ = ["BlockMap", "FileBlocks", "Origin"]

VERSION = 1
HEADER = "__blockmap__"  # no path: those hold a slash
PLAIN_BLOCK = 512
_THREADS = 16  # measured on 2 cores: waiting for inodes from the disk is what takes the time
_CHUNK = 256  # files a task
_COMPARE_BYTES = 8 << 20


class FileBlocks(NamedTuple):
    """Where one file lies.

    Attributes:
        size: its bytes; in a plain map, those of its blocks.
        extents: where they are, in order; what none covers is zeros.
        inode: its inode number; None in a plain map.
        mtime_ns: when it was last changed; None in a plain map.
    """

    size: int
    extents: tuple[Extent, ...]
    inode: int | None = None
    mtime_ns: int | None = None

    @classmethod
    def of(cls, fd: int, fs: FileSystem, path: str) -> FileBlocks:
        """The blocks of an open file, as they are now.

        Raises:
            NotMappable: they cannot be read from the device; the message says why.
        """
        st = os.fstat(fd)
        if st.st_dev != fs.device:
            raise BlockMapError(f"{path} is on another file system than the rest: build a map for each")
        return cls(st.st_size, tuple(map_extents(fd, st.st_size, fs, path)), st.st_ino, st.st_mtime_ns)

    def difference(self, now: FileBlocks) -> str | None:
        """What of this entry is no longer so, in words; None when all of it still holds."""
        if self.inode is None:  # a plain entry: it may end with the file's last block or with the file system's
            same_start = [e.start for e in self.extents] == [e.start for e in now.extents]
            return None if same_start and self.size >= now.size else "its blocks moved"
        if self.inode != now.inode:
            return f"it was replaced (inode {self.inode} became {now.inode})"
        if self.size != now.size:
            return f"its size changed from {self.size} to {now.size} bytes"
        if self.mtime_ns != now.mtime_ns:
            return "it was written to"
        return None if self.extents == now.extents else "its blocks moved"

    def check(self, now: FileBlocks, path: str) -> None:
        """Raises FileChanged when ``now`` is not what this entry says."""
        difference = self.difference(now)
        if difference:
            raise FileChanged(f"{path} is not where the block map says: {difference}; build the map again")


@dataclass(frozen=True)
class Origin:
    """Where a map was made.

    Attributes:
        parent: absolute path of the folder that the map's paths are relative to.
        kind: ``ext4`` or ``xfs``.
        uuid: the file system's UUID, by which a disk is recognised.
        start: the file system's first byte on the disk.
        disk: the whole disk.
    """

    parent: str
    kind: str
    uuid: str
    start: int
    disk: Disk


class BlockMap(Mapping[str, FileBlocks]):
    """Path to blocks, for every file of a folder.

    Args:
        files: the entries.
        origin: where they were made; None for a plain map.
        folders: every folder below the one that was mapped, also those without files, as the map's paths are; none in
            a plain map.

    Raises:
        BlockMapError: extents overlap, lie beyond the disk, or are out of order.

    Example:
        Of a folder, ``blocks = BlockMap.build("/data/imagenet/train")``; by hand, a file of two blocks of 4096 bytes:

        >>> from monai_gds.blockmap import FileBlocks
        >>> from monai_gds.extents import Extent
        >>> one = FileBlocks(size=5000, extents=(Extent(offset=0, start=1 << 20, nbytes=8192),))
        >>> blocks = BlockMap({"train/n01491361/n01491361_8657.JPEG": one})
        >>> blocks.save("train.json", plain=True)
        >>> BlockMap.load("train.json")["train/n01491361/n01491361_8657.JPEG"].extents
        (Extent(offset=0, start=1048576, nbytes=8192),)
    """

    def __init__(
        self, files: Mapping[str, FileBlocks], origin: Origin | None = None, folders: Iterable[str] = ()
    ) -> None:
        self._files = dict(files)
        self.origin = origin
        self.folders = tuple(folders)
        _check(self._files, origin)

    def __getitem__(self, path: str) -> FileBlocks:
        try:
            return self._files[path]
        except KeyError:
            pass
        try:
            return self._files[self.key(path)]
        except KeyError:
            raise KeyError(f"{path} is not in the block map (its paths look like {next(iter(self), None)!r})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def block_size(self) -> int:
        """Bytes a block, in the saved form."""
        return self.origin.disk.block_size if self.origin else PLAIN_BLOCK

    def key(self, path: str) -> str:
        """The map's own name for a path, absolute or from the working directory."""
        return path if self.origin is None else os.path.relpath(os.path.abspath(path), self.origin.parent)

    # Making one.

    @classmethod
    def build(cls, root: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> BlockMap:
        """Maps every file below a folder.

        Symbolic links to files are followed. Of those to folders only the ones directly in ``root`` are, for there
        they are classes of images; deeper ones and those that lead back to ``root`` or above it are not.

        Args:
            root: the folder; on ext4 or XFS, directly on a disk, a partition or a loop device.
            progress: called with (files done, files in all) as it goes.

        Raises:
            NotMappable: a file cannot be read from the device; the message names it and says why.
            BlockMapError: the folder spans file systems, or holds no file.
            OSError: a file or folder could not be opened, or a symbolic link is dead.
        """
        root = os.path.abspath(root)
        parent = os.path.dirname(root)
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fs = FileSystem.of(fd, root)
            origin = Origin(parent, fs.kind, read_uuid(fd, fs, root), fs.start, fs.disk)
        finally:
            os.close(fd)
        paths, folders = _walk(root)
        if not paths:
            raise BlockMapError(f"{root} holds no file")
        files: dict[str, FileBlocks] = {}
        skip = len(parent.rstrip("/")) + 1
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="monai-gds-blockmap") as pool:
            chunks = [paths[i : i + _CHUNK] for i in range(0, len(paths), _CHUNK)]
            for chunk, found in zip(chunks, pool.map(lambda c: [_map_file(p, fs) for p in c], chunks), strict=True):
                files.update((path[skip:], blocks) for path, blocks in zip(chunk, found, strict=True))
                if progress:
                    progress(len(files), len(paths))
        return cls(files, origin, [path[skip:] for path in folders])

    # Saving and loading.

    def save(self, file: str | os.PathLike[str], *, plain: bool = False) -> None:
        """Writes the map as JSON (see the module's docstring), in one piece or not at all.

        Args:
            file: where to.
            plain: only ``startblock`` and ``endblock``, in sectors of 512 bytes.

        Raises:
            BlockMapError: ``plain``, and a file is empty, has a hole or several extents.
        """
        entries: dict[str, Any] = {}
        if self.origin is not None and not plain:
            known = {"version": VERSION, "block_size": self.block_size, **asdict(self.origin)}
            entries[HEADER] = {**known, "folders": self.folders}
        block = PLAIN_BLOCK if plain else self.block_size
        for path, blocks in self._files.items():
            entries[path] = _to_plain(path, blocks) if plain else _to_json(blocks, block)
        temporary = f"{os.fspath(file)}.{os.getpid()}"
        try:
            with open(temporary, "x", encoding="ascii") as out:
                json.dump(entries, out, separators=(",", ":"))
            os.replace(temporary, file)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> BlockMap:
        """Reads a map that :meth:`save` wrote, or a plain one.

        Raises:
            BlockMapError: it is no block map, of a newer format, or contradicts itself.
        """
        try:
            entries = json.loads(Path(file).read_bytes())
            header = entries.pop(HEADER, None)
            if header is not None and header["version"] > VERSION:
                raise BlockMapError(
                    f"{file} is a block map of format {header['version']}, newer than {VERSION}: update monai_gds"
                )
            origin = None if header is None else _origin(header)
            block = PLAIN_BLOCK if origin is None else origin.disk.block_size
            folders = [] if header is None else header.get("folders", [])
            if not all(isinstance(folder, str) for folder in folders):
                raise TypeError("its folders are no list of paths")
            return cls({path: _from_json(entry, block) for path, entry in entries.items()}, origin, folders)
        except BlockMapError as e:
            raise BlockMapError(f"{file}: {e}") from e
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise BlockMapError(f"{file} is no block map: {type(e).__name__}: {e}") from e

    # Is it still true?

    def verify(
        self,
        parent: str | os.PathLike[str] | None = None,
        *,
        data: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, str]:
        """Compares the map with the files as they are now: what changed, is gone, or is new below the mapped folder.

        Args:
            parent: the folder that the paths are relative to, where it is not the one the map was made in.
            data: also compare every byte read through the device with every byte read through the file; this needs
                the right to read the device.
            progress: called with (files done, files in all) as it goes.

        Returns:
            What is wrong, by path: empty when the map is true.

        Raises:
            BlockMapError: a plain map and no ``parent``.
        """
        if parent is None and self.origin is None:
            raise BlockMapError("a plain block map does not say where its files are: name their parent folder")
        base = os.fspath(parent) if parent is not None else self.origin.parent if self.origin else ""
        wrong: dict[str, str] = {}
        keys = list(self._files)
        done = 0
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="monai-gds-blockmap") as pool:
            chunks = [keys[i : i + _CHUNK] for i in range(0, len(keys), _CHUNK)]
            for chunk, found in zip(chunks, pool.map(lambda c: self._verify_chunk(base, c, data), chunks), strict=True):
                wrong.update(found)
                done += len(chunk)
                if progress:
                    progress(done, len(keys))
        return wrong | self._unmapped(base)

    def _verify_chunk(self, base: str, keys: Iterable[str], data: bool) -> dict[str, str]:
        wrong: dict[str, str] = {}
        mounted = MountedFileSystems()  # one a chunk: it is for one thread
        try:
            for key in keys:
                mounted.refresh()
                try:
                    self._verify_file(os.path.join(base, key), self._files[key], data, mounted)
                except OSError as e:
                    wrong[key] = str(e)
        finally:
            mounted.close()
        return wrong

    def _unmapped(self, base: str) -> dict[str, str]:
        """What is wrong with the names alone: files and folders that are there and not in the map, or folders gone."""
        wrong: dict[str, str] = {}
        skip = len(base.rstrip("/")) + 1
        folders: set[str] = set()
        for top in sorted({key.split("/", 1)[0] for key in self._files}):
            try:
                files_now, folders_now = _walk(os.path.join(base, top))
            except OSError as e:
                wrong[str(e.filename or top)[skip:] or top] = str(e)
                continue
            wrong.update((path[skip:], "it is new") for path in files_now if path[skip:] not in self._files)
            folders.update(path[skip:] for path in folders_now)
        if self.folders:  # else none were recorded
            wrong.update((path, "it is a new folder") for path in sorted(folders.difference(self.folders)))
            wrong.update((path, "the folder is gone") for path in self.folders if path not in folders)
        return wrong

    def _verify_file(self, path: str, blocks: FileBlocks, data: bool, mounted: MountedFileSystems) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fs = mounted.of(fd, os.fstat(fd).st_dev, path)
            origin = self.origin
            if origin is not None and (mounted.uuid(fd, fs, path), fs.start) != (origin.uuid, origin.start):
                raise FileChanged(f"{path} is on another file system than the one that was mapped")
            now = FileBlocks.of(fd, fs, path)
            blocks.check(now, path)
            if data:
                _compare(fd, fs, path, now)
                blocks.check(FileBlocks.of(fd, fs, path), path)
        finally:
            os.close(fd)


def _walk(root: str) -> tuple[list[str], list[str]]:
    """Every file and every folder below ``root``, in order; see :meth:`BlockMap.build` for links."""
    files: list[str] = []
    folders: list[str] = []
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda e: e.name)
        below: list[str] = []
        for entry in listed:
            if entry.is_file():
                files.append(entry.path)
            elif entry.is_dir(follow_symlinks=False) or (folder == root and entry.is_dir()):
                folders.append(entry.path)
                if not (entry.is_symlink() and _holds(entry.path, root)):
                    below.append(entry.path)
            elif entry.is_symlink() and not os.path.exists(entry.path):
                raise FileNotFoundError(errno.ENOENT, "the symbolic link is dead", entry.path)
        waiting.extend(reversed(below))
    return files, folders


def _holds(link: str, folder: str) -> bool:
    """Whether a symbolic link leads to ``folder`` or to one above it: walking it would have no end."""
    target = os.path.realpath(link)
    return os.path.commonpath([target, os.path.realpath(folder)]) == target


def _map_file(path: str, fs: FileSystem) -> FileBlocks:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return FileBlocks.of(fd, fs, path)
    finally:
        os.close(fd)


def _check(files: Mapping[str, FileBlocks], origin: Origin | None) -> None:
    """Raises BlockMapError for extents that no file system gives. Links to one file share theirs."""
    seen: dict[tuple[Extent, ...], str] = {}
    for path, blocks in files.items():
        if blocks.extents:
            seen.setdefault(blocks.extents, path)
            if blocks.extents[0].offset < 0:
                raise BlockMapError(f"the first extent of {path} lies before its first byte")
        if any(a.offset + a.nbytes > b.offset for a, b in pairwise(blocks.extents)):
            raise BlockMapError(f"the extents of {path} overlap or are out of order")
    runs = sorted((e.start, e.start + e.nbytes, path) for extents, path in seen.items() for e in extents)
    for (start, end, path), (following, _, other) in pairwise([*runs, (1 << 64, 0, "")]):
        if start < 0 or end <= start:
            raise BlockMapError(f"{path} has an extent from byte {start} to {end}")
        if origin is not None and end > origin.disk.nbytes:
            raise BlockMapError(f"{path} ends at byte {end} of a disk of {origin.disk.nbytes} bytes")
        if end > following:
            raise BlockMapError(f"{path} and {other} share bytes {following} to {end} of the disk")
    for path, blocks in files.items():
        if blocks.size < 0:
            raise BlockMapError(f"{path} has a size of {blocks.size} bytes")


def _to_json(blocks: FileBlocks, block: int) -> dict[str, Any]:
    extents = [[e.offset // block, e.start // block, (e.start + e.nbytes) // block - 1] for e in blocks.extents]
    whole = len(extents) == 1 and blocks.extents[0].offset == 0 and blocks.extents[0].nbytes >= blocks.size
    where = {"startblock": extents[0][1], "endblock": extents[0][2]} if whole else {"extents": extents}
    known = {"size": blocks.size, "inode": blocks.inode, "mtime_ns": blocks.mtime_ns}
    return where if blocks.inode is None else {**where, **known}


def _to_plain(path: str, blocks: FileBlocks) -> dict[str, int]:
    entry = _to_json(blocks, PLAIN_BLOCK)
    if "startblock" not in entry:
        raise BlockMapError(f"{path} is empty, has holes or has several extents, which a plain map cannot say")
    return {"startblock": entry["startblock"], "endblock": entry["endblock"]}


def _from_json(entry: Mapping[str, Any], block: int) -> FileBlocks:
    runs = entry["extents"] if "extents" in entry else [[0, entry["startblock"], entry["endblock"]]]
    extents = tuple(
        Extent(int(offset) * block, int(first) * block, (int(last) + 1 - int(first)) * block)
        for offset, first, last in runs
    )
    size = entry.get("size", sum(e.nbytes for e in extents))
    return FileBlocks(int(size), extents, entry.get("inode"), entry.get("mtime_ns"))


def _origin(header: Mapping[str, Any]) -> Origin:
    disk = Disk(**header["disk"])
    if disk.block_size not in (512, 1024, 2048, 4096) or header["block_size"] != disk.block_size:
        raise BlockMapError(f"blocks of {header['block_size']} bytes on a disk with blocks of {disk.block_size}")
    return Origin(header["parent"], header["kind"], header["uuid"], header["start"], disk)


def _compare(fd: int, fs: FileSystem, path: str, blocks: FileBlocks) -> None:
    """Raises StorageError at the first byte where the device says another thing than the file."""
    disk = fs.disk.open()
    try:
        with mmap.mmap(-1, _COMPARE_BYTES) as buffer:
            position = 0
            for extent in blocks.extents:
                _compare_zeros(fd, position, extent.offset, path)
                for at in range(0, extent.nbytes, _COMPARE_BYTES):
                    _compare_run(fd, disk, extent, at, buffer, blocks.size, path)
                position = extent.offset + extent.nbytes
            _compare_zeros(fd, position, blocks.size, path)
    finally:
        os.close(disk)


def _compare_run(fd: int, disk: int, extent: Extent, at: int, buffer: mmap.mmap, size: int, path: str) -> None:
    nbytes = min(_COMPARE_BYTES, extent.nbytes - at)
    with memoryview(buffer) as whole, whole[:nbytes] as view:
        got = os.preadv(disk, [view], extent.start + at)
        expected = os.pread(fd, min(nbytes, size - extent.offset - at), extent.offset + at)
        if got != nbytes or view[: len(expected)] != expected:
            raise StorageError(
                errno.EIO,
                f"byte {extent.start + at} of the device and what follows are not bytes {extent.offset + at} to "
                f"{extent.offset + at + len(expected)} of the file",
                path,
            )


def _compare_zeros(fd: int, start: int, end: int, path: str) -> None:
    while start < end:
        piece = os.pread(fd, min(_COMPARE_BYTES, end - start), start)
        if not piece or piece.count(0) != len(piece):
            raise StorageError(errno.EIO, f"bytes {start} to {start + len(piece)} should be a hole", path)
        start += len(piece)
