"""Where the kernel says that a file's bytes lie: FIEMAP, the file system, and the whole disk below it.

Used by :mod:`monai_gds.blockmap` and by the ``xnvme-block`` backend. Everything here is in bytes, and every position on
a disk counts from the start of the *whole* disk, never of a partition: xNVMe opens a partition without a geometry and
then reads wrong bytes without an error.

What cannot be read from the device is refused by name (:class:`~monai_gds.errors.NotMappable`): only ext4 and XFS
directly on a disk, a partition or a loop device put plain file bytes where FIEMAP says.

Formats: ``struct fiemap`` and its flags, Documentation/filesystems/fiemap.rst and include/uapi/linux/fiemap.h of Linux;
the inode flags, include/uapi/linux/fs.h; sysfs, Documentation/ABI/stable/sysfs-block.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from monai_gds.errors import NotMappable, StorageError

__all__ = [
    "Disk",
    "Extent",
    "FileSystem",
    "Mount",
    "MountedFileSystems",
    "disk_of",
    "extents_in",
    "how_to_be_let_read",
    "look",
    "map_extents",
    "mounts",
    "read_uuid",
    "uuid_in",
]

SYSFS = Path("/sys")
PROC = Path("/proc")

_FIEMAP = 0xC020660B  # FS_IOC_FIEMAP
_FIEMAP_SYNC = 1
_HEADER = struct.Struct("=QQIIII")  # start, length, flags, mapped extents, room for extents, reserved
_RECORD = struct.Struct("=QQQ16xI12x")  # logical, physical, length, flags
_ROOM = 18  # extents a call: the buffer stays below 1024 bytes, which Python copies without an allocation
_LAST = 0x1
_HARMLESS = 0x1 | 0x1000  # the last extent; merged by the kernel from several

#: FIEMAP flags of extents whose bytes are not simply at their place on the disk.
_REFUSED_EXTENTS = {
    0x0002: "its place on the disk is unknown",
    0x0004: "its allocation is delayed, and a sync did not settle it",
    0x0008: "it is encoded (compressed or encrypted)",
    0x0080: "it is encrypted",
    0x0100: "it is not aligned to blocks",
    0x0200: "its bytes lie inline in the inode",
    0x0400: "its bytes share a block with other files' tails",
    0x0800: "it is allocated but was never written",
    0x2000: "its blocks are shared with another file (reflink), and the file system may remap them",
}

_GETFLAGS = 0x80086601  # FS_IOC_GETFLAGS: unlike FIEMAP's flags, these name fscrypt
_REFUSED_INODES = {
    0x00000004: "it is compressed",
    0x00000800: "it is encrypted (fscrypt)",
    0x00004000: "its data goes through the journal (chattr +j)",
    0x10000000: "its bytes lie inline in the inode",
}
_REFUSED_FLAGS = sum(_REFUSED_INODES)
_FSGETXATTR = 0x801C581F  # FS_IOC_FSGETXATTR
_XFS_REALTIME = 0x1
_XFS_FSGEOMETRY = 0x80705864  # XFS_IOC_FSGEOMETRY_V1

_GETFSUUID = 0x80111500  # FS_IOC_GETFSUUID, Linux 6.9 and later
_UUID_AT = {"ext4": (0x438, b"\x53\xef", 0x468), "xfs": (0, b"XFSB", 32)}  # magic at, magic, UUID at


class Extent(NamedTuple):
    """Bytes of a file that lie one after another on the disk.

    Attributes:
        offset: first byte within the file.
        start: first byte on the whole disk.
        nbytes: how many, a multiple of the disk's logical block; the last ones may lie beyond the end of the file.
    """

    offset: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class Disk:
    """A whole disk.

    Attributes:
        name: what it is called below /dev, ``nvme0n1`` for instance.
        number: ``major:minor``.
        block_size: bytes a logical block, 512 or 4096.
        nbytes: its size.
        max_transfer: the most bytes that the kernel sends it in one command.
    """

    name: str
    number: str
    block_size: int
    nbytes: int
    max_transfer: int

    @property
    def path(self) -> str:
        """Its device node."""
        return f"/dev/{self.name}"

    @property
    def character_path(self) -> str:
        """The character device that passes NVMe commands through: ``/dev/ng0n1`` for ``nvme0n1``."""
        return self.path.replace("/dev/nvme", "/dev/ng")

    def open(self) -> int:
        """A descriptor for reads past the page cache (O_DIRECT), which the caller closes.

        Opening it is also how to find out whether it may be read: a container's device rules refuse what the node's
        mode allows, and only then.

        Raises:
            StorageError: it may not be read, or has no node here; with the remedy.
        """
        try:
            return os.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except (PermissionError, FileNotFoundError) as e:
            why = f"the device cannot be read ({e.strerror}): {how_to_be_let_read(self.path)}"
            raise StorageError(e.errno, why, self.path) from e


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system whose files can be read from the disk below it.

    Attributes:
        kind: ``ext4`` or ``xfs``.
        disk: the whole disk that it lies on.
        start: its first byte on that disk (0 unless it lies in a partition).
        nbytes: size of its partition or disk.
        device: ``st_dev`` of its files.
        realtime: whether files may lie on a realtime device of its own (XFS).
    """

    kind: str
    disk: Disk
    start: int
    nbytes: int
    device: int
    realtime: bool = False

    @classmethod
    def of(cls, fd: int, path: str) -> FileSystem:
        """The file system of an open file or folder.

        Raises:
            NotMappable: its files cannot be read from a device; the message says why.
        """
        return _file_system(fd, _mount_of(fd), path)


class MountedFileSystems:
    """:meth:`FileSystem.of`, remembered until :meth:`refresh` sees that something was mounted or unmounted."""

    def __init__(self) -> None:
        self._known: dict[int, FileSystem] = {}
        self._uuids: dict[int, str] = {}
        self._table = os.open(PROC / "self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._changes = select.poll()
        self._changes.register(self._table, select.POLLPRI)  # the kernel's sign that the table changed, proc(5)

    def refresh(self) -> None:
        """To be called before a row of files is opened."""
        if self._changes.poll(0):
            self._known.clear()
            self._uuids.clear()

    def of(self, fd: int, device: int, path: str) -> FileSystem:
        """As :meth:`FileSystem.of`; ``device`` is the file's ``st_dev``."""
        if device not in self._known:
            self._known[device] = FileSystem.of(fd, path)
        return self._known[device]

    def uuid(self, fd: int, fs: FileSystem, path: str) -> str:
        """As :func:`read_uuid`, for what :meth:`of` gave."""
        if fs.device not in self._uuids:
            self._uuids[fs.device] = read_uuid(fd, fs, path)
        return self._uuids[fs.device]

    def close(self) -> None:
        """Closes the descriptor on the table of mounts."""
        os.close(self._table)


class Mount(NamedTuple):
    """A mounted file system, as in /proc/self/mountinfo, proc(5).

    Attributes:
        id: the kernel's number for this mount.
        number: ``major:minor`` of its device; ``0:…`` where it has none.
        point: where it is mounted.
        kind: ``ext4``, ``xfs``, ``tmpfs``…
        source: what is mounted, often a device node.
        options: of the mount and of the file system, with commas between them.
    """

    id: str
    number: str
    point: str
    kind: str
    source: str
    options: str


def mounts(proc: Path) -> Iterator[Mount]:
    """What is mounted, in the kernel's order: of two at one point, the later one is seen."""
    for line in (proc / "self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        number, _, number_of_device, _, point, own, *_ = left.split(" ")
        kind, source, rest = right.split(" ", 2)
        options = f"{own},{rest.split(' ')[-1]}"
        yield Mount(number, number_of_device, _unescape(point), kind, _unescape(source), options)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)  # a space is \040


def _mount_of(fd: int) -> Mount:
    """The mount that a descriptor was opened through: by its id, for st_dev is made up on btrfs and overlayfs."""
    info = (PROC / "self/fdinfo" / str(fd)).read_text()
    mount_id = next(line.split()[1] for line in info.splitlines() if line.startswith("mnt_id:"))
    unknown = Mount(mount_id, "0:0", "", "unknown", "", "")
    return next((mount for mount in mounts(PROC) if mount.id == mount_id), unknown)


def _file_system(fd: int, mount: Mount, path: str) -> FileSystem:
    device, kind = os.fstat(fd).st_dev, mount.kind
    if kind not in _UUID_AT:
        raise _refusal(path, f"it is on a {kind} file system: only ext4 and xfs keep files as plain blocks")
    folder = _sysfs(device)
    if not folder.is_dir():
        raise _refusal(path, f"its file system has no block device (sysfs has no {folder})")
    if kind == "ext4" and "data=journal" in mount.options.split(",") + _ext4_options(folder.resolve().name):
        raise _refusal(path, "it is on ext4 mounted with data=journal: a sync leaves data in the journal")
    start, whole = 0, folder.resolve()
    if (folder / "partition").exists():
        start, whole = int((folder / "start").read_text()) * 512, whole.parent
    disk = _disk(whole, path)
    nbytes = int((folder / "size").read_text()) * 512
    return FileSystem(kind, disk, start, nbytes, device, realtime=kind == "xfs" and _xfs_realtime_blocks(fd) > 0)


def _xfs_realtime_blocks(fd: int) -> int:
    """Blocks on the realtime device of an XFS: ``rtblocks`` of ``struct xfs_fsop_geom_v1``, xfs_fs.h."""
    return int(struct.unpack_from("=Q", fcntl.ioctl(fd, _XFS_FSGEOMETRY, bytes(112)), 40)[0])


def _ext4_options(name: str) -> list[str]:
    """Every option in force: mountinfo leaves out those that are the superblock's own defaults (tune2fs -o)."""
    try:
        return (PROC / "fs/ext4" / name / "options").read_text().split()
    except OSError:
        return []


def _sysfs(device: int) -> Path:
    return SYSFS / "dev/block" / f"{os.major(device)}:{os.minor(device)}"


def _disk(folder: Path, path: str) -> Disk:
    for mark, layer in (("dm", "device-mapper (LVM, LUKS…)"), ("md", "an md array"), ("bcache", "bcache")):
        if (folder / mark).is_dir():
            raise _refusal(path, f"it is on {folder.name}, {layer}: its blocks lie elsewhere on the disks below")
    if any((folder / "slaves").glob("*")):
        raise _refusal(path, f"it is on {folder.name}, which is made of other devices: its blocks lie elsewhere")
    return Disk(
        name=folder.name.replace("!", "/"),
        number=(folder / "dev").read_text().strip(),
        block_size=int((folder / "queue/logical_block_size").read_text()),
        nbytes=int((folder / "size").read_text()) * 512,
        max_transfer=int((folder / "queue/max_sectors_kb").read_text()) * 1024,
    )


def disk_of(device: int, path: str) -> Disk:
    """The whole disk with this device number (``st_rdev`` of its node).

    Raises:
        NotMappable: it is a partition, or made of other devices.
    """
    folder = _sysfs(device)
    if (folder / "partition").exists():
        whole = folder.resolve().parent.name
        raise _refusal(path, f"it is a partition, which xNVMe reads wrongly: open the whole disk, /dev/{whole}")
    if not folder.is_dir():
        raise _refusal(path, "it is no block device that sysfs knows")
    return _disk(folder.resolve(), path)


def _refusal(path: str, why: str) -> NotMappable:
    return NotMappable(errno.EOPNOTSUPP, f"cannot be read from its device: {why}", path)


def look(fd: int, size: int) -> bytes:
    """What the kernel says of the places of the first ``size`` bytes: equal answers mean that nothing moved.

    Written data is flushed first, so that the places are final and the bytes are there.
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


def map_extents(fd: int, size: int, fs: FileSystem, path: str) -> list[Extent]:
    """The extents that hold the first ``size`` bytes of an open file, in order of their offset.

    Written data is flushed first. Holes have no extent.

    Raises:
        NotMappable: an extent, or the file, cannot be read from the device; the message says why.
    """
    return extents_in(look(fd, size), fd, size, fs, path)


def extents_in(answer: bytes, fd: int, size: int, fs: FileSystem, path: str) -> list[Extent]:
    """As :func:`map_extents`, from what :func:`look` gave."""
    _check_inode(fd, fs, path)
    block = fs.disk.block_size
    end = -(-size // block) * block
    extents: list[Extent] = []
    for offset, physical, nbytes, flags in _RECORD.iter_unpack(answer):
        if flags & ~_HARMLESS:
            _refuse_extent(offset, flags, path)
        nbytes = min(nbytes, end - offset)
        if (offset | physical | nbytes) % block:
            raise _refusal(path, f"the extent at byte {offset} is not aligned to blocks of {block} bytes")
        start = physical + fs.start
        if extents and extents[-1].offset + extents[-1].nbytes == offset and sum(extents[-1][1:]) == start:
            extents[-1] = extents[-1]._replace(nbytes=extents[-1].nbytes + nbytes)  # ext4 cuts at 128 MiB
        else:
            extents.append(Extent(offset, start, nbytes))
    return extents


def _refuse_extent(offset: int, flags: int, path: str) -> None:
    why = next((why for bit, why in _REFUSED_EXTENTS.items() if flags & bit), f"FIEMAP has unknown flags, {flags:#x}")
    raise _refusal(path, f"of the extent at byte {offset}, {why}")


def _check_inode(fd: int, fs: FileSystem, path: str) -> None:
    if fs.kind == "xfs":
        if fs.realtime and struct.unpack_from("=I", fcntl.ioctl(fd, _FSGETXATTR, bytes(28)))[0] & _XFS_REALTIME:
            raise _refusal(path, "it is on the realtime device of its XFS")
        return
    flags = struct.unpack_from("=I", fcntl.ioctl(fd, _GETFLAGS, bytes(8)))[0]
    if flags & _REFUSED_FLAGS:
        raise _refusal(path, next(why for bit, why in _REFUSED_INODES.items() if flags & bit))


def how_to_be_let_read(disk: str) -> str:
    """What to do where this process may not read a disk, given the path of its device node."""
    return f"run as root, or as a member of the group disk; in a container, start that with --device={disk}:r"


def read_uuid(fd: int, fs: FileSystem, path: str) -> str:
    """The UUID of the file system that ``fd`` is on.

    From the kernel where it tells (6.9 and later), else from the disk, which needs the right to read it.

    Raises:
        OSError: the disk may not be read.
    """
    try:
        answer = fcntl.ioctl(fd, _GETFSUUID, bytes(17))
        return str(uuid.UUID(bytes=bytes(answer[1:17])))
    except OSError:
        pass
    with open(fs.disk.path, "rb", buffering=0) as disk:
        head = os.pread(disk.fileno(), 4096, fs.start)
    found = uuid_in(head)
    if found is None:
        raise _refusal(path, f"no file system was found at byte {fs.start} of {fs.disk.path}")
    return found


def uuid_in(head: bytes) -> str | None:
    """The UUID in the first 4096 bytes of an ext4 or XFS file system; None where it is neither."""
    for magic_at, magic, uuid_at in _UUID_AT.values():
        if head[magic_at : magic_at + len(magic)] == magic:
            return str(uuid.UUID(bytes=head[uuid_at : uuid_at + 16]))
    return None
