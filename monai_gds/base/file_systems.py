"""Which kind of file system a file is on, what is mounted, and a part of a file, however few bytes single calls return.

Kinds are the kernel's numbers (statfs(2), linux/magic.h); mounts come from /proc/self/mountinfo. Imports only the
standard library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

#: File systems that store zeros that a program writes, and make no hole of them: ext4, XFS, btrfs, tmpfs, F2FS, ramfs.
KEEPS_ZEROS = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0xF2F52010, 0x858458F6})

#: File systems on a drive or in the memory of this machine: those above, and overlayfs, ZFS, bcachefs.
LOCAL = KEEPS_ZEROS | {0x794C7630, 0x2FC12FC1, 0xCA451A4E}

#: Over what drives of other machines are reached, by their transport (/sys/class/nvme/*/transport), their driver, or a
#: folder above them in sysfs.
_OVER = {
    "nvme tcp": "NVMe over TCP", "nvme rdma": "NVMe over RDMA", "nvme fc": "NVMe over Fibre Channel",
    "rbd": "Ceph RBD", "nbd": "NBD", "drbd": "DRBD", "session": "iSCSI", "rport-": "Fibre Channel",
}  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


def kind_of(fd: int) -> int | None:
    """The number of the file system of an open file, or None if the system does not report one."""
    statfs = ctypes.create_string_buffer(256)  # struct statfs has 120 bytes and begins with the number, a long
    if _libc.fstatfs(fd, statfs):
        return None
    return ctypes.c_ulong.from_buffer(statfs).value & 0xFFFFFFFF


def kind_of_folder(path: str) -> int | None:
    """The number of the file system that a folder is on, or None if it cannot be determined."""
    with suppress(OSError), opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
        return kind_of(fd)
    return None


def has_no_inodes(folder: str | os.PathLike[str]) -> bool:
    """Whether no more files can be made on a folder's file system, however many bytes are free there."""
    with suppress(OSError):
        found = os.statvfs(folder)
        return found.f_files > 0 and found.f_favail == 0  # btrfs counts none
    return False


class Mount(NamedTuple):
    """A mounted file system, as described in proc(5).

    Attributes:
        id: the kernel's number of this mount.
        number: ``major:minor`` of its device; ``0:…`` if it has none.
        point: where it is mounted.
        kind: ``ext4``, ``xfs``, ``tmpfs``…
        source: what is mounted, often a device node.
        options: options of the mount and of the file system, separated by commas.
    """

    id: str
    number: str
    point: str
    kind: str
    source: str
    options: str


def mounts(proc: Path) -> Iterator[Mount]:
    """All mounts in the kernel's order. Where two share a mount point, the later one is visible."""
    for line in (proc / "self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        number, _, number_of_device, _, point, own, *_ = left.split(" ")
        kind, source, rest = right.split(" ", 2)
        options = f"{own},{rest.split(' ')[-1]}"
        yield Mount(number, number_of_device, _unescape(point), kind, _unescape(source), options)


def mount_of(folder: Path, proc: Path) -> Mount | None:
    """The file system that an existing folder is on; None if the table of mounts cannot be read."""
    path = folder.resolve()
    with suppress(OSError, ValueError):
        above = [mount for mount in mounts(proc) if path.is_relative_to(mount.point)]
        return max(reversed(above), key=lambda one: len(one.point), default=None)  # the later of two at one point
    return None


def text_of(file: Path) -> str:
    """The text of a file of the kernel or of settings; empty if it is missing or cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def reached_over(device: Path) -> str:
    """Over what a block device is reached if its drive is in another machine; empty if it is not.

    Its file system is local all the same: only this machine writes to it. Partitions, device-mapper and md are followed
    to the drives below, of which one in another machine is enough.

    Args:
        device: its folder in sysfs, without links.
    """
    if (device / "partition").exists():
        device = device.parent
    for below in sorted((device / "slaves").glob("*")):
        if over := reached_over(below.resolve()):
            return over
    if driver := re.match(r"rbd|nbd|drbd", device.name):
        return _OVER[driver[0]]
    transports = (device / "device/transport", *(device / "device").glob("nvme*/transport"))  # the latter of multipath
    if transport := next((file.read_text().strip() for file in transports if file.exists()), ""):
        return _OVER.get(f"nvme {transport}", "")
    above = re.search(r"/(session|rport-)\d.*/target", str(device))
    return _OVER[above[1]] if above else ""


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)  # a space is \040


def open_fd(path: str | os.PathLike[str], flags: int, mode: int = 0o777, folder: int | None = None) -> int:
    """A descriptor as of ``os.open``, of a path or a name in an open folder.

    With O_NONBLOCK, so that a FIFO is not waited for, a file that another process has a lease on (fcntl(2): Samba,
    knfsd) would be refused. The kernel has then asked for the lease, and the file is opened once it is given up, after
    45 s at most (/proc/sys/fs/lease-break-time).
    """
    try:
        return os.open(path, flags, mode, dir_fd=folder)
    except BlockingIOError:
        if not flags & os.O_NONBLOCK or not stat.S_ISREG(os.stat(path, dir_fd=folder).st_mode):
            raise
    return os.open(path, flags & ~os.O_NONBLOCK, mode, dir_fd=folder)


@contextmanager
def opened(path: str | os.PathLike[str], flags: int, mode: int = 0o777, folder: int | None = None) -> Iterator[int]:
    """As :func:`open_fd`. The descriptor is closed at the end of the block."""
    fd = open_fd(path, flags, mode, folder)
    try:
        yield fd
    finally:
        os.close(fd)


def reserve(fd: int, nbytes: int) -> None:
    """Reserves room for an open file on its drive (fallocate), where the file system can.

    ``os.posix_fallocate`` would write a byte into each block where it cannot (FUSE, ext3, a seccomp filter).

    Raises:
        OSError: there is no room, or the drive fails.
    """
    while _libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(nbytes)):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(code, os.strerror(code))
        if code != errno.EINTR:
            return


def read_at(fd: int, nbytes: int, offset: int = 0) -> bytes:
    """Reads ``nbytes`` of an open file from ``offset``; fewer only if the file ends before.

    A call may return fewer bytes than there are: over FUSE and network file systems, for more than 2 GiB, and after a
    signal.

    Raises:
        OSError: the file cannot be read.
    """
    data = os.pread(fd, nbytes, offset)
    if len(data) == nbytes or not data:  # nearly always
        return data
    parts = [data]
    done = len(data)
    while done < nbytes and (data := os.pread(fd, nbytes - done, offset + done)):
        parts.append(data)
        done += len(data)
    return b"".join(parts)
