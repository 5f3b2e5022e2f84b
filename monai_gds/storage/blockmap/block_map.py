"""Block maps: which blocks of a disk the files of a folder occupy. Built from the file system, saved, verified.

A map is made where the file system is mounted and used where it may not be: by the ``xnvme-block`` backend over a
user-space driver, or by another program. :mod:`.saved` specifies its saved form.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from monai_gds.base.file_systems import opened, read_at
from monai_gds.errors import BlockMapError, FileChanged, NotMappable, StorageError
from monai_gds.storage.blockmap.extents import (
    Disk,
    DiskClosed,
    Extent,
    FileSystem,
    MountedFileSystems,
    read_uuid,
    runs,
)  # fmt: skip
from monai_gds.storage.blockmap.saved import PLAIN_BLOCK, FileBlocks, Origin, Saved, Unmapped

T = TypeVar("T")

#: Called with (files done, files in all).
Progress: TypeAlias = Callable[[int, int], None]

_THREADS = 16  # measured on 2 cores: most of the time goes into waiting for inodes from the disk
_CHUNK = 256  # files per task
_COMPARE_BYTES = 8 << 20


class BlockMap(Mapping[str, FileBlocks]):
    """The blocks of every file of a folder, by path.

    Args:
        files: the entries.
        origin: where they were made; None for a plain map.
        folders: every folder below the mapped one, including those without files, by paths like the map's; none for a
            plain map.
        unmapped: files whose bytes cannot be read from the disk, by paths like the map's.
        parent: the folder that the paths are relative to; default: the one they were made in.

    Attributes:
        parent: that folder; None for a plain map without one. Then a path counts by its end: any path that ends with a
            path of the map is that file.

    Raises:
        BlockMapError: extents overlap, are out of order, or lie beyond the disk.

    Example:
        Build a map of a folder with ``blocks = BlockMap.build("/data/imagenet/train")``. By hand, with one file of two
        blocks of 4096 bytes:

        >>> from monai_gds.storage.blockmap.saved import FileBlocks
        >>> from monai_gds.storage.blockmap.extents import Extent
        >>> one = FileBlocks(size=5000, extents=(Extent(offset=0, start=1 << 20, nbytes=8192),))
        >>> blocks = BlockMap({"train/n01491361/n01491361_8657.JPEG": one})
        >>> blocks.save("train.json")
        >>> BlockMap.load("train.json")["train/n01491361/n01491361_8657.JPEG"].extents
        (Extent(offset=0, start=1048576, nbytes=8192),)
    """

    def __init__(
        self,
        files: Mapping[str, FileBlocks],
        origin: Origin | None = None,
        folders: Iterable[str] = (),
        unmapped: Mapping[str, Unmapped] = MappingProxyType({}),
        parent: str | os.PathLike[str] | None = None,
    ) -> None:
        self._files = dict(files)
        self.parent = os.path.abspath(parent) if parent is not None else None
        if origin is not None:
            origin = replace(origin, parent=self.parent or origin.parent)
            self.parent = origin.parent
        self.origin = origin
        self.folders = tuple(folders)
        self.unmapped = dict(unmapped)
        _check(self._files, origin)
        if both := self._files.keys() & self.unmapped.keys():
            raise BlockMapError(f"{min(both)} is listed both as mapped and as unmapped")

    def __getitem__(self, path: str) -> FileBlocks:
        """The blocks of a file, by the map's own path or any other path of the file.

        Raises:
            KeyError: the map lacks it; the message says why.
        """
        own = self._own(path, self._files)
        if own is not None:
            return self._files[own]
        if why := self.why_not(path):
            raise KeyError(f"{path} could not be mapped: {why}")
        where = f" below {self.parent}; if files are elsewhere, BlockMap.load(map, parent=…) names the folder"
        paths = f"its paths look like {next(iter(self), None)!r}{where if self.parent is not None else ''}"
        raise KeyError(f"{path} is not in the block map ({paths})")

    def why_not(self, path: str) -> str | None:
        """Why a file could not be mapped, and what to do; None for any other file."""
        own = self._own(path, self.unmapped)
        return None if own is None else self.unmapped[own].why

    def _own(self, path: str, among: Mapping[str, object]) -> str | None:
        """The map's own path of the file at ``path``; None if the map lacks it."""
        if path in among:
            return path
        if self.parent is not None:
            own = os.path.relpath(os.path.abspath(path), self.parent)
            return own if own in among else None
        while "/" in path:
            path = path.partition("/")[2]
            if path in among:
                return path
        return None

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def block_size(self) -> int:
        """Bytes per block in the saved form."""
        return self.origin.disk.block_size if self.origin else PLAIN_BLOCK

    @property
    def has_checksums(self) -> bool:
        """Whether it has the checksum of every file."""
        return all(blocks.checksum is not None for blocks in self._files.values())

    # Making one.

    @classmethod
    def build(
        cls, root: str | os.PathLike[str], progress: Progress | None = None, *, checksums: bool = False
    ) -> BlockMap:
        """Maps every file below a folder.

        A file whose bytes cannot be read from the device is listed in ``unmapped`` with the reason, and the rest is
        mapped.

        Symbolic links to files are followed. Links to folders are followed only directly in ``root``, where they are
        classes of images, and never if they lead to ``root`` or above it.

        Args:
            root: the folder; on ext4 or XFS, directly on a disk, a partition, a loop device or an md RAID0.
            progress: called with (files done, files in all) as it goes.
            checksums: store a checksum for every file, which reads all of it. Drivers in user space compare it.

        Raises:
            NotMappable: no file can be read from the device; the message names one and says why.
            BlockMapError: the folder spans file systems, or holds no file.
            OSError: a file or folder cannot be opened, or a symbolic link is dead.
        """
        root = os.path.abspath(root)
        parent = os.path.dirname(root)
        with opened(root, os.O_DIRECTORY) as fd:
            fs = FileSystem.of(fd, root)
            origin = Origin(parent, fs.kind, read_uuid(fd, fs, root), fs.start, fs.disk)
        paths, folders = _walk(root)
        if not paths:
            raise BlockMapError(f"{root} holds no file")
        skip = len(parent.rstrip("/")) + 1

        def map_chunk(chunk: Sequence[str]) -> dict[str, FileBlocks | Unmapped]:
            return {path[skip:]: _map_file(path, fs, checksums) for path in chunk}

        found = _in_threads(map_chunk, paths, progress)
        files = {path: entry for path, entry in found.items() if isinstance(entry, FileBlocks)}
        unmapped = {path: entry for path, entry in found.items() if isinstance(entry, Unmapped)}
        if not files:
            path, (_, why) = next(iter(unmapped.items()))
            raise NotMappable(errno.EOPNOTSUPP, why, os.path.join(parent, path))
        return cls(files, origin, [path[skip:] for path in folders], unmapped)

    def plain(self) -> BlockMap:
        """The plain map of these files: nothing but their first and last blocks, in sectors of 512 bytes.

        Files that it cannot hold are listed in ``unmapped``, with the reason. That is not saved.

        Raises:
            BlockMapError: the disk is an array of drives, which a plain map cannot say.
        """
        if self.origin is not None and self.origin.disk.array is not None:
            raise BlockMapError(f"{self.origin.disk.path} is an array of drives, and a plain map cannot say so")
        files, unmapped = dict[str, FileBlocks](), dict(self.unmapped)
        for path, (size, extents, *_) in self._files.items():
            if len(extents) == 1 and extents[0].offset == 0 and extents[0].nbytes >= size:
                files[path] = FileBlocks(extents[0].nbytes, extents)
            else:
                why = "it is empty, has holes or has several extents, which a plain map cannot hold"
                unmapped[path] = Unmapped(size, why)
        return BlockMap(files, unmapped=unmapped, parent=self.parent)

    # Saving and loading.

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the map as JSON (see the module's docstring). The file appears whole or not at all."""
        Saved(self._files, self.origin, self.folders, self.unmapped).write(file)

    @classmethod
    def load(cls, file: str | os.PathLike[str], parent: str | os.PathLike[str] | None = None) -> BlockMap:
        """Reads a map that :meth:`save` wrote, or a plain one.

        The author of a map decides which blocks are read, and nothing else: the disk that it names lies in ``/dev``,
        and its paths cannot leave the folder that they are relative to.

        Args:
            file: the map.
            parent: the folder that its paths are relative to, where the disk is mounted elsewhere than it was when the
                map was made, or the map is plain.

        Raises:
            BlockMapError: it is not a map, has a newer format, or contradicts itself.
            OSError: it cannot be read.
        """
        try:
            return cls(*Saved.read(file), parent)
        except BlockMapError as e:
            raise BlockMapError(f"{file}: {e}") from e
        except RecursionError as e:
            raise BlockMapError(f"{file} is not a block map: it is nested too deeply") from e
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
            raise BlockMapError(f"{file} is not a block map: {type(e).__name__}: {e}") from e

    @classmethod
    def given(cls, blockmap: BlockMap | str | os.PathLike[str] | None) -> BlockMap | None:
        """The map that an argument means: itself, the path of a saved one, or None. Raises as :meth:`load` does."""
        return blockmap if isinstance(blockmap, BlockMap) or blockmap is None else cls.load(blockmap)

    # Verifying.

    def verify(self, *, data: bool = False, progress: Progress | None = None) -> dict[str, str]:
        """Compares the map with the files as they are now.

        Args:
            data: also compare every byte read through the device with every byte read through the file. This needs
                the right to read the device.
            progress: called with (files done, files in all) as it goes.

        Returns:
            What is wrong, by path: files and folders that changed, are gone, or are new, and files that could not be
            mapped and now can. Empty if the map is up to date.

        Raises:
            BlockMapError: the map is plain and was loaded without ``parent``.
            StorageError: ``data``, and the device may not be read.
        """
        base = self.parent
        if base is None:
            raise BlockMapError("a plain block map does not record where its files are: give their parent folder")

        def verify_chunk(chunk: Sequence[str]) -> dict[str, str]:
            wrong = {}
            with closing(MountedFileSystems()) as mounted:  # one per chunk, since only one thread may use it
                for path in chunk:
                    mounted.refresh()
                    try:
                        self._verify_file(os.path.join(base, path), self._files.get(path), data, mounted)
                    except DiskClosed:  # this says nothing of the file, and the next one would fail alike
                        raise
                    except OSError as e:
                        wrong[path] = str(e)
            return wrong

        return _in_threads(verify_chunk, [*self._files, *self.unmapped], progress) | self._new_or_gone(base)

    def _verify_file(self, path: str, blocks: FileBlocks | None, data: bool, mounted: MountedFileSystems) -> None:
        """Raises OSError if a file has changed. ``blocks`` is None for one of ``unmapped``."""
        with opened(path, os.O_NONBLOCK) as fd:
            device = os.fstat(fd).st_dev
            if blocks is None:
                with suppress(NotMappable):
                    FileBlocks.of(fd, mounted.of(fd, device, path), path)
                    raise FileChanged("it could not be mapped, and now it can: build the map again")
                return
            fs = mounted.of(fd, device, path)
            origin = self.origin
            if origin is not None and (mounted.uuid(fd, fs, path), fs.start) != (origin.uuid, origin.start):
                raise FileChanged(f"{path} is on another file system than the one that was mapped")
            now = FileBlocks.of(fd, fs, path)
            blocks.check(now, path)
            if data:
                _compare(fd, fs.disk, now, path)
                blocks.check(FileBlocks.of(fd, fs, path), path)

    def _new_or_gone(self, base: str) -> dict[str, str]:
        """Files and folders that are new, and folders that are gone."""
        wrong: dict[str, str] = {}
        skip = len(base.rstrip("/")) + 1
        folders: set[str] = set()
        for top in sorted({path.split("/", 1)[0] for path in self._files}):
            try:
                files_now, folders_now = _walk(os.path.join(base, top))
            except OSError as e:
                wrong[str(e.filename or top)[skip:] or top] = str(e)
                continue
            known = self._files.keys() | self.unmapped.keys()
            wrong.update((path[skip:], "it is new") for path in files_now if path[skip:] not in known)
            folders.update(path[skip:] for path in folders_now)
        if self.folders:  # else none were recorded
            wrong.update((path, "it is a new folder") for path in sorted(folders.difference(self.folders)))
            wrong.update((path, "the folder is gone") for path in self.folders if path not in folders)
        return wrong


def _map_file(path: str, fs: FileSystem, checksums: bool) -> FileBlocks | Unmapped:
    with opened(path, os.O_NONBLOCK) as fd:
        try:
            blocks = FileBlocks.of(fd, fs, path)
        except NotMappable as e:
            return Unmapped(os.fstat(fd).st_size, str(e.strerror))
        if checksums:
            from monai_gds.base.checksum import checksum_of_file  # brings torch

            blocks = blocks._replace(checksum=checksum_of_file(fd, blocks.size))
        return blocks


def _in_threads(
    work: Callable[[Sequence[str]], dict[str, T]], paths: Sequence[str], progress: Progress | None
) -> dict[str, T]:
    chunks = [paths[i : i + _CHUNK] for i in range(0, len(paths), _CHUNK)]
    results: dict[str, T] = {}
    done = 0
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="monai-gds-blockmap") as pool:
        for chunk, result in zip(chunks, pool.map(work, chunks), strict=True):
            results.update(result)
            done += len(chunk)
            if progress:
                progress(done, len(paths))
    return results


def _walk(root: str) -> tuple[list[str], list[str]]:
    """Every file and every folder below ``root``, in order. See :meth:`BlockMap.build` for links."""
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
                target = os.path.realpath(entry.path) if entry.is_symlink() else None
                if target is None or os.path.commonpath([target, os.path.realpath(root)]) != target:  # else endless
                    below.append(entry.path)
            elif entry.is_symlink() and not os.path.exists(entry.path):
                raise FileNotFoundError(errno.ENOENT, "the symbolic link is dead", entry.path)
        waiting.extend(reversed(below))
    return files, folders


def _check(files: Mapping[str, FileBlocks], origin: Origin | None) -> None:
    """Raises BlockMapError for extents that no file system has. Links to one file share theirs."""
    owner: dict[tuple[Extent, ...], str] = {}
    for path, blocks in files.items():
        owner.setdefault(blocks.extents, path)
        position = 0
        for extent in blocks.extents:
            if extent.offset < position:
                raise BlockMapError(f"the extents of {path} overlap or are out of order")
            position = extent.offset + extent.nbytes
    runs = sorted((e.start, e.start + e.nbytes, path) for extents, path in owner.items() for e in extents)
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


def _compare(fd: int, disk: Disk, blocks: FileBlocks, path: str) -> None:
    """Raises StorageError where the disk, or a hole, does not hold the bytes that are read through the file."""
    with ExitStack() as stack:
        opened: dict[Disk, int] = {}
        # Aligned, as O_DIRECT demands. Closing it would fail after a Ctrl-C that leaves a part of it in use.
        aligned = memoryview(mmap.mmap(-1, _COMPARE_BYTES))
        for offset, on, start, nbytes in _pieces(blocks, disk):
            expected = read_at(fd, min(nbytes, blocks.size - offset), offset)
            if on is None:
                place, found = "a hole", bytes(len(expected))
            else:
                if on not in opened:
                    opened[on] = on.open()
                    stack.callback(os.close, opened[on])
                place = f"byte {start} of {on.path} and what follows"
                got = os.preadv(opened[on], [aligned[:nbytes]], start)
                found = bytes(aligned[: min(got, len(expected))])
            if found != expected:
                end = offset + len(expected)
                raise StorageError(errno.EIO, f"{place} should be bytes {offset} to {end} of the file", path)


def _pieces(blocks: FileBlocks, disk: Disk) -> Iterator[tuple[int, Disk | None, int, int]]:
    """The whole file in pieces of at most _COMPARE_BYTES: (offset, disk or None in a hole, byte on the disk, bytes)."""
    end = max([blocks.size, *(e.offset + e.nbytes for e in blocks.extents[-1:])])  # the last block is read whole
    for start, stop, place in runs(blocks.extents, 0, end):
        for at in range(start, stop, _COMPARE_BYTES):
            nbytes = min(_COMPARE_BYTES, stop - at)
            if place is None:
                yield at, None, 0, nbytes
                continue
            for on, first, count in disk.pieces(place + at - start, nbytes):
                yield at, on, first, count
                at += count
