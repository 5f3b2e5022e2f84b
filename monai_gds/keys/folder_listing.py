"""Lists source folders on all levels, and hashes the listings. Used by :mod:`monai_gds.keys.sources`."""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TypeAlias

import xxhash

from monai_gds import limits
from monai_gds.base.file_systems import opened

# The kind of an entry, part of a folder's hash.
FILE = 0
FOLDER = 1
MISSING = 2  # a dead link
OTHER = 3  # a pipe, a socket, a device
LOOP = 4  # a link to a folder that contains it
UNREADABLE = 5  # a folder that cannot be listed

#: Path within the folder, kind, inode, size, mtime, ctime. An entry that is not a file has zeros, except for the times
#: of an unreadable folder. Plain tuples, because making 600 instances of a class costs as much as the system calls.
FolderEntry: TypeAlias = "tuple[str, int, int, int, int, int]"


def _without_stat(name: str, kind: int) -> FolderEntry:
    return name, kind, 0, 0, 0, 0


def list_folder(path: str, left_out: tuple[int, int] | None) -> list[FolderEntry] | None:
    """All entries of a folder on all levels, sorted by path. None if more than ``limits.FOLDER_ENTRIES``.

    Links count as what they point to. The folder whose device and inode are ``left_out`` is omitted.
    """
    entries: list[FolderEntry] = []
    todo: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ())]
    while todo:
        prefix, above = todo.pop()
        try:
            with opened(path + "/" + prefix, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
                st = os.fstat(fd)
                here = (st.st_dev, st.st_ino)
                if here == left_out:
                    continue
                if here in above:
                    entries.append(_without_stat(prefix, LOOP))
                    continue
                entries.append(_without_stat(prefix, FOLDER))
                folders = _scan(fd, prefix, entries)
                if folders is None:
                    return None
                todo += [(folder, (*above, here)) for folder in folders]
        except OSError:  # perhaps halfway
            entries.append(_unreadable(path, prefix))
    entries.sort()
    return entries


def _scan(fd: int, prefix: str, entries: list[FolderEntry]) -> list[str] | None:
    """Appends the entries of one folder, and returns its subfolders; None if there are too many entries."""
    folders = []
    with os.scandir(fd) as found:
        for entry in found:
            name = prefix + entry.name
            try:
                st = entry.stat()
            except OSError:  # a dead link, a loop of links, or deleted meanwhile
                entries.append(_without_stat(name, MISSING))
                continue
            kind = st.st_mode & 0o170000
            if kind == 0o100000:
                entries.append((name, FILE, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns))
            elif kind == 0o040000:
                folders.append(name + "/")
            else:
                entries.append(_without_stat(name, OTHER))
            if len(entries) + len(folders) > limits.FOLDER_ENTRIES:
                return None
    return folders


def _unreadable(path: str, prefix: str) -> FolderEntry:
    with contextlib.suppress(OSError):
        st = os.stat(path + "/" + prefix)
        return prefix, UNREADABLE, 0, 0, st.st_mtime_ns, st.st_ctime_ns
    return _without_stat(prefix, MISSING)


def digest_of_folder(entries: list[FolderEntry], contents: list[bytes]) -> str:
    """The hash of names, kinds, sizes and contents, in the order of the listing."""
    hashed = xxhash.xxh3_128()
    for (path, kind, _, size, _, _), content in zip(entries, contents, strict=True):
        name = os.fsencode(path)
        hashed.update(struct.pack("<IBqI", len(name), kind, size, len(content)) + name + content)
    return hashed.hexdigest()


#: The end of a path that stands for the names in a folder.
NAMES = "/*"
