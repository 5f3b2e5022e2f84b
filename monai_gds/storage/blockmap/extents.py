"""Where the bytes of a file lie on its disk, according to the kernel: FIEMAP, the file system, the whole disk below it.

All positions are in bytes from the start of the *whole* disk, never of a partition: xNVMe opens a partition without a
geometry and then silently reads wrong bytes.

Files whose bytes cannot be read from the device are refused with the reason
(:class:`~monai_gds.errors.NotMappable`). Only ext4 and XFS directly on a disk, a partition, a loop device or an md
RAID0 store plain file bytes where FIEMAP reports them. On an array these are positions on the array itself, which
:meth:`Disk.pieces` finds on its members.

Formats: ``struct fiemap`` and its flags, Documentation/filesystems/fiemap.rst and include/uapi/linux/fiemap.h of Linux;
the inode flags, include/uapi/linux/fs.h; sysfs, Documentation/ABI/stable/sysfs-block.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from monai_gds.base.file_systems import Mount, mounts
from monai_gds.errors import NotMappable, StorageError
from monai_gds.storage.blockmap.raid0 import Raid0, array_in

SYSFS = Path("/sys")
PROC = Path("/proc")

_FIEMAP = 0xC020660B  # FS_IOC_FIEMAP
_FIEMAP_SYNC = 1
_HEADER = struct.Struct("=QQIIII")  # start, length, flags, mapped extents, room for extents, reserved
_RECORD = struct.Struct("=QQQ16xI12x")  # logical, physical, length, flags
_ROOM = 18  # extents per call: Python passes ioctl buffers below 1024 bytes on without an allocation
_LAST = 0x1
_HARMLESS = 0x1 | 0x1000  # the last extent; merged by the kernel from several

_COPY = "put a copy in its place: cp --reflink=never FILE COPY && mv COPY FILE"

#: FIEMAP flags of extents whose bytes cannot simply be read from the disk.
_REFUSED_EXTENTS = {
    0x0002: "its place on the disk is unknown",
    0x0004: "its allocation is delayed, and a sync did not settle it",
    0x0008: "it is encoded (compressed or encrypted)",
    0x0080: "it is encrypted",
    0x0100: "it is not aligned to blocks",
    0x0200: "its bytes lie inline in the inode",
    0x0400: "its bytes share a block with other files' tails",
    0x0800: f"it is allocated but was never written; {_COPY}",
    0x2000: f"its blocks are shared with another file (reflink), and the file system may remap them; {_COPY}",
}

_GETFLAGS = 0x80086601  # FS_IOC_GETFLAGS: unlike FIEMAP's, these flags include fscrypt
_REFUSED_INODES = {
    0x00000004: "it is compressed",
    0x00000800: "it is encrypted (fscrypt)",
    0x00004000: "its data goes through the journal (chattr +j)",
    0x10000000: "its bytes lie inline in the inode",
}
_REFUSED_FLAGS = sum(_REFUSED_INODES)
_XFS_FSGEOMETRY = 0x80705864  # XFS_IOC_FSGEOMETRY_V1

_GETFSUUID = 0x80111500  # FS_IOC_GETFSUUID, Linux 6.9 and later
_UUID_AT = {"ext4": (0x438, b"\x53\xef", 0x468), "xfs": (0, b"XFSB", 32)}  # magic at, magic, UUID at


class Extent(NamedTuple):
    """Bytes ``offset`` and following of a file, and where on the whole disk they begin."""

    offset: int
    start: int
    nbytes: int  # a multiple of the disk's logical block: the last bytes may lie beyond the end of the file


class DiskClosed(StorageError):
    """This process may not read a disk, so every read of every file on it fails alike."""


@dataclass(frozen=True)
class Disk:
    """A whole disk, or an array of disks. Raises ValueError if the array and its members do not fit together."""

    name: str  # below /dev, such as nvme0n1
    number: str  # major:minor
    block_size: int  # bytes per logical block, 512 or 4096
    nbytes: int
    max_transfer: int  # most bytes per command that the kernel sends
    array: Raid0 | None = None  # how its bytes lie on its members; None for a disk
    members: tuple[Disk, ...] = ()  # the disks that an array is made of

    def __post_init__(self) -> None:
        if (array := self.array) is None:
            return
        if array.nbytes != self.nbytes:
            raise ValueError(f"its members hold {array.nbytes} bytes, and it has {self.nbytes}")
        if any(place % self.block_size for place in (array.chunk, *(part.start for part in array.parts))):
            raise ValueError(f"its chunks do not lie in whole blocks of {self.block_size} bytes")
        for disk, part in zip(self.members, array.parts, strict=True):
            if not 0 <= part.start <= disk.nbytes - part.nbytes:
                raise ValueError(f"its data lie outside {disk.path}")

    @property
    def path(self) -> str:
        return f"/dev/{self.name}"

    @property
    def drives(self) -> tuple[Disk, ...]:
        """The disks that its bytes lie on: the members of an array, or the disk itself."""
        return self.members or (self,)

    def pieces(self, start: int, nbytes: int) -> Iterator[tuple[Disk, int, int]]:
        """The disks that bytes lie on, in their order: disk, first byte there, how many."""
        if self.array is None:
            yield self, start, nbytes
        else:
            for member, first, count in self.array.pieces(start, nbytes):
                yield self.members[member], first, count

    def open(self) -> int:
        """Opens the disk for O_DIRECT reads. Raises DiskClosed if it may not be read or has no node here.

        That is the only way to learn it: a container's device rules can refuse what the mode of the node allows.
        """
        try:
            return os.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except (PermissionError, FileNotFoundError) as e:
            why = f"the device cannot be read ({e.strerror}): {how_to_be_let_read(self.path)}"
            raise DiskClosed(e.errno, why, self.path) from e


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system whose files can be read from the disk below it."""

    kind: str  # ext4 or xfs
    disk: Disk
    start: int  # its first byte on the disk, 0 without a partition
    device: int  # st_dev of its files

    @classmethod
    def of(cls, fd: int, path: str) -> FileSystem:
        """The file system of an open file or folder. Raises NotMappable if its files cannot be read from a device."""
        mount, device = _mount_of(fd), os.fstat(fd).st_dev
        kind, folder = mount.kind, _sysfs(device)
        if kind not in _UUID_AT:
            raise _refusal(path, f"it is on a {kind} file system: only ext4 and xfs store files as plain blocks")
        if not folder.is_dir():
            raise _refusal(path, f"its file system has no block device (sysfs has no {folder})")
        options = PROC / "fs/ext4" / folder.resolve().name / "options"  # mountinfo lacks the superblock's (tune2fs -o)
        in_force = options.read_text().split() if options.exists() else []
        if kind == "ext4" and "data=journal" in [*mount.options.split(","), *in_force]:
            raise _refusal(path, "it is on ext4 mounted with data=journal: a sync leaves data in the journal")
        if kind == "xfs" and _xfs_realtime_blocks(fd):
            raise _refusal(path, "it is on an XFS with a realtime device, on which its files may lie")
        whole, start = _whole(folder)
        return cls(kind, _disk(whole, path), start, device)


class MountedFileSystems:
    """A cache of :meth:`FileSystem.of`, emptied when something is mounted or unmounted. For one thread."""

    def __init__(self) -> None:
        self._known: dict[int, FileSystem] = {}
        self._uuids: dict[int, str] = {}
        self._table = os.open(PROC / "self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._changes = select.poll()
        self._changes.register(self._table, select.POLLPRI)  # signals that the table changed, proc(5)

    def refresh(self) -> None:
        """Empties the cache if a mount changed. To be called before opening files."""
        if self._changes.poll(0):
            self.forget()

    def forget(self) -> None:
        self._known.clear()
        self._uuids.clear()

    def of(self, fd: int, device: int, path: str) -> FileSystem:
        """Like :meth:`FileSystem.of`; ``device`` is the file's ``st_dev``."""
        if device not in self._known:
            self._known[device] = FileSystem.of(fd, path)
        return self._known[device]

    def uuid(self, fd: int, fs: FileSystem, path: str) -> str:
        if fs.device not in self._uuids:
            self._uuids[fs.device] = read_uuid(fd, fs, path)
        return self._uuids[fs.device]

    def close(self) -> None:
        os.close(self._table)


def _mount_of(fd: int) -> Mount:
    """The mount that a descriptor was opened through. Found by id, because btrfs and overlayfs make up st_dev."""
    info = (PROC / "self/fdinfo" / str(fd)).read_text()
    mount_id = next(line.split()[1] for line in info.splitlines() if line.startswith("mnt_id:"))
    unknown = Mount(mount_id, "0:0", "", "unknown", "", "")
    return next((mount for mount in mounts(PROC) if mount.id == mount_id), unknown)


def _xfs_realtime_blocks(fd: int) -> int:
    """Blocks on the realtime device of an XFS: ``rtblocks`` of ``struct xfs_fsop_geom_v1``, xfs_fs.h."""
    return int(struct.unpack_from("=Q", fcntl.ioctl(fd, _XFS_FSGEOMETRY, bytes(112)), 40)[0])


def _sysfs(device: int) -> Path:
    return SYSFS / "dev/block" / f"{os.major(device)}:{os.minor(device)}"


def _whole(folder: Path) -> tuple[Path, int]:
    """The folder of the whole disk of a disk or a partition, and the first byte of that on it."""
    if (folder / "partition").exists():
        return folder.resolve().parent, int((folder / "start").read_text()) * 512
    return folder.resolve(), 0


def _disk(folder: Path, path: str, *, member: bool = False) -> Disk:
    """The disk of a folder in sysfs, or the array if it is not itself a ``member`` of one."""
    for mark, layer in (("dm", "device-mapper (LVM, LUKS…)"), ("bcache", "bcache")):
        if (folder / mark).is_dir():
            raise _refusal(path, f"it is on {folder.name}, {layer}: its blocks lie elsewhere on the disks below")

    def member_at(device: Path) -> tuple[Disk, int]:
        whole, start = _whole(device)
        return _disk(whole, path, member=True), start

    array: Raid0 | None = None
    members: tuple[Disk, ...] = ()
    try:
        if (folder / "md").is_dir() and not member:
            array, members = array_in(folder / "md", member_at)
        elif any((folder / "slaves").glob("*")):
            raise _refusal(path, f"it is on {folder.name}, which is made of other devices: its blocks lie elsewhere")
        return Disk(
            name=folder.name.replace("!", "/"),
            number=(folder / "dev").read_text().strip(),
            block_size=int((folder / "queue/logical_block_size").read_text()),
            nbytes=int((folder / "size").read_text()) * 512,
            max_transfer=int((folder / "queue/max_sectors_kb").read_text()) * 1024,
            array=array,
            members=members,
        )
    except ValueError as e:
        raise _refusal(path, f"it is on {folder.name}, an md array, and where its bytes lie is not certain: {e}") from e


def disk_of(device: int, path: str) -> Disk:
    """The whole disk with this ``st_rdev``. Raises NotMappable for a partition, and what is made of other devices."""
    folder = _sysfs(device)
    if (folder / "partition").exists():
        whole = folder.resolve().parent.name
        raise _refusal(path, f"it is a partition, which xNVMe reads wrongly: open the whole disk, /dev/{whole}")
    if not folder.is_dir():
        raise _refusal(path, "it is not a block device known to sysfs")
    disk = _disk(folder.resolve(), path)
    if disk.array is not None:
        raise _refusal(path, "it is an array of drives: leave uri out, and the drives that files lie on are opened")
    return disk


def _refusal(path: str, why: str) -> NotMappable:
    return NotMappable(errno.EOPNOTSUPP, f"cannot be read from its device: {why}", path)


def look(fd: int, size: int) -> bytes:
    """FIEMAP's raw answer for the first ``size`` bytes of a file. Equal answers mean that nothing moved.

    Written data is flushed first, so that the places are final and the bytes are on the disk.
    """
    found = b""
    position = 0
    while position < size:
        buffer = bytearray(_HEADER.size + _ROOM * _RECORD.size)
        _HEADER.pack_into(buffer, 0, position, size - position, _FIEMAP_SYNC, 0, _ROOM, 0)
        fcntl.ioctl(fd, _FIEMAP, buffer)
        count = _HEADER.unpack_from(buffer)[3]
        found += buffer[_HEADER.size : _HEADER.size + count * _RECORD.size]
        if count < _ROOM:
            break
        offset, _, nbytes, flags = _RECORD.unpack_from(found, len(found) - _RECORD.size)
        if flags & _LAST:
            break
        position = offset + nbytes
    return found


def extents_in(answer: bytes, fd: int, size: int, fs: FileSystem, path: str) -> list[Extent]:
    """The extents of the first ``size`` bytes of an open file, in order, from the result of :func:`look`.

    Raises NotMappable, with the reason, if an extent or the file cannot be read from the device.
    """
    if fs.kind == "ext4":
        inode = struct.unpack_from("=I", fcntl.ioctl(fd, _GETFLAGS, bytes(8)))[0]
        if inode & _REFUSED_FLAGS:
            raise _refusal(path, next(why for bit, why in _REFUSED_INODES.items() if inode & bit))
    block = fs.disk.block_size
    end = -(-size // block) * block
    extents: list[Extent] = []
    for offset, physical, nbytes, flags in _RECORD.iter_unpack(answer):
        if flags & ~_HARMLESS:
            unknown = f"FIEMAP has unknown flags, {flags:#x}"
            why = next((why for bit, why in _REFUSED_EXTENTS.items() if flags & bit), unknown)
            raise _refusal(path, f"of the extent at byte {offset}, {why}")
        nbytes = min(nbytes, end - offset)
        if (offset | physical | nbytes) % block:
            raise _refusal(path, f"the extent at byte {offset} is not aligned to blocks of {block} bytes")
        start = physical + fs.start
        if extents and extents[-1].offset + extents[-1].nbytes == offset and sum(extents[-1][1:]) == start:
            extents[-1] = extents[-1]._replace(nbytes=extents[-1].nbytes + nbytes)  # ext4 cuts at 128 MiB
        else:
            extents.append(Extent(offset, start, nbytes))
    return extents


def runs(extents: Sequence[Extent], start: int, end: int) -> Iterator[tuple[int, int, int | None]]:
    """Where the bytes ``start`` to ``end`` of a file lie: from, to, and first byte on the disk, None for a hole."""
    first = max(bisect_right(extents, start, key=lambda extent: extent.offset) - 1, 0) if len(extents) > 1 else 0
    for extent in extents[first:]:
        if start >= end or extent.offset >= end:
            break
        if start < extent.offset:
            yield start, extent.offset, None
            start = extent.offset
        stop = min(extent.offset + extent.nbytes, end)
        if start < stop:
            yield start, stop, extent.start + start - extent.offset
            start = stop
    if start < end:
        yield start, end, None


def transfers(
    extents: Sequence[Extent], offset: int, nbytes: int, *, base: int, room: int, block: int, most: int, direct: bool
) -> Iterator[tuple[int, int, int | None, bool]]:
    """Cuts one read into transfers of whole blocks, of at most ``most`` bytes, a multiple of the disk's ``block``.

    The destination begins at the address ``base``, and ``room`` bytes after it may be overwritten. ``direct``: whether
    the disk reaches it.

    Yields:
        ``(byte of the read, bytes of it, where they begin on the disk, whether the blocks may be read into the
        destination itself)``; the place of a hole is None.
    """
    end = offset + nbytes
    for begin, stop, place in runs(extents, offset, end):
        at = begin - offset
        if place is None:
            yield at, stop - begin, None, False
            continue
        in_place = direct and place % block == 0 and (base + at) % block == 0
        left, tail = stop - begin, (stop - begin) % block
        if in_place and tail and (room if stop == end else 0) < block - tail:
            left -= tail
            yield at + left, tail, place + left, False
        done = 0
        while done < left:
            piece = min(most - (place + done) % block, left - done)
            yield at + done, piece, place + done, in_place
            done += piece


def how_to_be_let_read(disk: str) -> str:
    """The remedy where this process may not read the disk with this device node."""
    return f"run as root, or as a member of the group disk; in a container, start that with --device={disk}:r"


def read_uuid(fd: int, fs: FileSystem, path: str) -> str:
    """The UUID of the file system of ``fd``, from the kernel (6.9 and later) or else from the disk."""
    with suppress(OSError):
        answer = fcntl.ioctl(fd, _GETFSUUID, bytes(17))
        return str(uuid.UUID(bytes=bytes(answer[1:17])))
    with open(fs.disk.path, "rb", buffering=0) as disk:
        head = os.pread(disk.fileno(), 4096, fs.start)
    found = uuid_in(head)
    if found is None:
        raise _refusal(path, f"no file system was found at byte {fs.start} of {fs.disk.path}")
    return found


def uuid_in(head: bytes) -> str | None:
    """The UUID in the first 4096 bytes of an ext4 or XFS file system, None if it is neither."""
    for magic_at, magic, uuid_at in _UUID_AT.values():
        if head[magic_at : magic_at + len(magic)] == magic:
            return str(uuid.UUID(bytes=head[uuid_at : uuid_at + 16]))
    return None
