"""What files of the kernel show about this machine: drivers, modules, mounts, udev's entries, containers.

It reads small files below ``root`` only, so a test can lay out a machine in a folder. What cuFile looks at is in
:mod:`monai_gds.storage.plain.cufile`.
"""

from __future__ import annotations

import ctypes
import fcntl
import grp
import os
import pwd
import re
import shutil
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from monai_gds.base import cores
from monai_gds.base.file_systems import Mount, has_no_inodes, mount_of, mounts, opened, reached_over, text_of


@dataclass(frozen=True)
class Driver:
    """NVIDIA's kernel driver: its version, and whether it is the open variant, which P2PDMA needs."""

    version: str
    is_open: bool


@dataclass(frozen=True)
class Drive:
    """The disk below a file system."""

    name: str  # of the whole disk in /dev: nvme0n1, sda, dm-0
    model: str  # empty if unknown
    rotates: bool  # as the kernel reports it; False for a hypervisor's disk, where that means nothing
    errors: Mapping[str, int]  # its counters of errors that are not zero, by what they count
    over: str  # what it is reached over if it is in another machine; see reached_over()

    @property
    def is_nvme(self) -> bool:
        """Whether it is an NVMe drive of this machine."""
        return self.name.startswith("nvme") and not self.over


@dataclass(frozen=True)
class Access:
    """Who may use a folder."""

    owner: str
    group: str
    mode: int  # its permissions, with the bits above them
    is_there: bool  # if not, owner, group and mode are those that it would get
    narrower: tuple[str, ...]  # folders within the cache that fewer users can write to
    is_hidden: bool = False  # it may be there: this user may not enter the folder above


@dataclass(frozen=True)
class Place:
    """The cache directory."""

    asked: Path  # as the user named it
    folder: Path  # the directory, or its nearest existing parent
    mount: Mount | None  # its file system; None if unknown
    drive: Drive | None  # the disk below; None if there is none
    free_bytes: int  # that a user may still fill
    nbytes: int  # of the whole file system
    access: Access
    no_inodes: bool  # no file can be made, however many bytes are free

    @property
    def number(self) -> str:
        """``major:minor`` of the block device; empty if there is none."""
        number = self.mount.number if self.mount else ""
        return "" if number.startswith("0:") else number


@dataclass(frozen=True)
class Machine:
    """This machine, or one that a test laid out below ``root``."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def _text(self, path: str) -> str:
        return text_of(self.root / path.lstrip("/"))

    def exists(self, path: str) -> bool:
        """Whether this machine has ``path``."""
        return (self.root / path.lstrip("/")).exists()

    def place(self, directory: Path) -> Place:
        """The file system and drive of a directory. Raises NotADirectoryError if it or a parent is a file."""
        path = Path(os.path.abspath(directory))
        folder = next(above for above in (path, *path.parents) if os.path.lexists(above))
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a directory")
        mount = mount_of(folder, self.root / "proc")
        drive = self._drive(mount.number) if mount else None
        usage = shutil.disk_usage(folder)
        access = self._access(path, folder)
        return Place(directory, folder, mount, drive, usage.free, usage.total, access, has_no_inodes(folder))

    def _access(self, path: Path, folder: Path) -> Access:
        st = folder.stat()
        if path == folder:
            inside = filter(os.path.exists, (folder / ".tmp", folder / ".index"))
            narrower = tuple(str(one) for one in inside if st.st_mode & ~one.stat().st_mode & 0o022)
            return Access(_name(pwd.getpwuid, st.st_uid), _name(grp.getgrgid, st.st_gid), st.st_mode, True, narrower)
        inherited = st.st_mode & stat.S_ISGID
        group = st.st_gid if inherited else os.getegid()
        umask = re.search(r"^Umask:\s*([0-7]+)", self._text("/proc/self/status"), re.MULTILINE)
        mode = stat.S_IFDIR | inherited | 0o777 & ~(int(umask[1], 8) if umask else 0o022)
        hidden = not os.access(folder, os.X_OK, effective_ids=True)
        return Access(_name(pwd.getpwuid, os.geteuid()), _name(grp.getgrgid, group), mode, False, (), hidden)

    def _drive(self, number: str) -> Drive | None:
        folder = self.root / "sys/dev/block" / number
        if number.startswith("0:") or not folder.is_dir():
            return None
        device = folder.resolve()
        whole = device.parent if (device / "partition").exists() else device
        is_virtual = whole.name.startswith(("vd", "xvd"))
        rotates = text_of(whole / "queue/rotational").strip() == "1"
        errors = {what: count for what, count in self._errors(whole, device.name) if count}
        model = text_of(whole / "device/model").strip()
        return Drive(whole.name, model, rotates and not is_virtual, errors, reached_over(device))

    def _errors(self, whole: Path, name: str) -> Iterator[tuple[str, int]]:
        """What the kernel and the drive count: the disk's folder in sysfs, and the name of its partition."""
        for what, file in {
            "failed commands": whole / "device/ioerr_cnt",
            "commands that timed out": whole / "device/iotmo_cnt",
            "errors of the file system": self.root / "sys/fs/ext4" / name / "errors_count",
        }.items():
            yield what, int(text_of(file).strip() or "0", 0)
        if whole.name.startswith("nvme"):
            yield "unreadable blocks", _media_errors(self.root / "dev" / whole.name)

    @cached_property
    def driver(self) -> Driver | None:
        """NVIDIA's driver; None if it is not loaded."""
        text = self._text("/proc/driver/nvidia/version")
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
        return Driver(match[1], "Open Kernel Module" in text) if match else None

    def node_of(self, pci: str) -> tuple[int, frozenset[int]]:
        """The NUMA node of a PCI device, -1 if unknown or none, and the node's processors."""
        node = self._text(f"/sys/bus/pci/devices/{pci}/numa_node").strip() or "-1"
        return int(node), cores.near(pci, self.root)

    @cached_property
    def container(self) -> str | None:
        """The kind of container that this is; None outside of one."""
        if self.exists("/.dockerenv"):
            return "docker"
        if self.exists("/run/.containerenv"):
            return "podman"
        if "KUBERNETES_SERVICE_HOST" in self.environment:
            return "kubernetes"
        return self.environment.get("container") or None  # set by systemd and lxc

    @property
    def locked_memory_is_limited(self) -> bool:
        """Whether locked memory, which DeepNVMe and pinned buffers need, is limited."""
        return bool(re.search(r"^Max locked memory\s+\d", self._text("/proc/self/limits"), re.MULTILINE))

    @property
    def shared_memory_is_small(self) -> bool:
        """Whether /dev/shm, through which DataLoader workers send items, has docker's default of 64 MiB."""
        with suppress(OSError, ValueError):
            return any(
                mount.point == "/dev/shm" and "size=65536k" in mount.options for mount in mounts(self.root / "proc")
            )
        return False

    @property
    def io_uring_disabled(self) -> bool:
        """Whether io_uring is switched off by sysctl (Linux 6.6 and later)."""
        return self._text("/proc/sys/kernel/io_uring_disabled").strip() not in ("", "0")


def _media_errors(node: Path) -> int:
    """What an NVMe drive counts in its SMART log as errors of the medium; 0 if only root may ask."""
    log = ctypes.create_string_buffer(512)
    # struct nvme_passthru_cmd of linux/nvme_ioctl.h: Get Log Page 2, 128 words, of the controller
    command = struct.pack(
        "=BxxxIIIQQII6III", 2, 0xFFFFFFFF, 0, 0, 0, ctypes.addressof(log), 0, len(log), 127 << 16 | 2, *[0] * 7
    )
    with suppress(OSError), opened(node, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) as fd:
        fcntl.ioctl(fd, 0xC0484E41, command)  # NVME_IOCTL_ADMIN_CMD
    return int.from_bytes(log.raw[160:176], "little")


def _name(look_up: Callable[[int], Any], number: int) -> str:
    """The name of a user or group, or its number, since those of other machines or containers have no name here."""
    try:
        return str(look_up(number)[0])
    except (KeyError, OverflowError):
        return str(number)
