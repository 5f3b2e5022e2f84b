"""What the kernel and the file system tell of this machine: drivers, modules, mounts, udev's entries, containers.

Only small files below ``root`` are read, so a test can lay out a machine in a folder. Nothing is imported or started.

Where figures and paths come from: NVIDIA's GPUDirect Storage troubleshooting guide
(https://docs.nvidia.com/gpudirect-storage/troubleshooting-guide/, "NVMe P2PDMA Troubleshooting" for P2PDMA), and the
names that libcufile 1.20 looks for.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from monai_gds.extents import Mount, mounts

__all__ = ["Drive", "Driver", "Machine", "Place", "nearest_folder"]

#: What libcufile asks udev for, of the block device that a file lies on.
UDEV_PROPERTIES = ("ID_FS_TYPE", "ID_FS_USAGE")


@dataclass(frozen=True)
class Driver:
    """NVIDIA's kernel driver: its version, and whether it is the open one (which P2PDMA needs)."""

    version: str
    is_open: bool


@dataclass(frozen=True)
class Drive:
    """The disk below a file system.

    Attributes:
        name: of the whole disk below /dev: ``nvme0n1``, ``sda``, ``dm-0``.
        model: what it calls itself; empty where it does not.
        rotates: whether it is a spinning disk.
    """

    name: str
    model: str
    rotates: bool

    @property
    def is_virtual(self) -> bool:
        """Whether a hypervisor made it: what it says of itself means nothing."""
        return self.name.startswith(("vd", "xvd"))

    @property
    def is_nvme(self) -> bool:
        """Whether the kernel's NVMe driver serves it."""
        return self.name.startswith("nvme")


@dataclass(frozen=True)
class Place:
    """The cache directory, or its nearest folder that exists.

    Attributes:
        asked: as the user named it.
        folder: the folder that was looked at.
        mount: the file system that it is on; None where the kernel does not tell.
        drive: the disk below; None where there is none.
        free_bytes: that a user may still fill.
        nbytes: of the whole file system.
    """

    asked: Path
    folder: Path
    mount: Mount | None
    drive: Drive | None
    free_bytes: int
    nbytes: int

    @property
    def number(self) -> str:
        """``major:minor`` of the block device; empty where there is none."""
        number = self.mount.number if self.mount else ""
        return "" if number.startswith("0:") else number


def nearest_folder(path: Path) -> Path:
    """The path, or the nearest folder above it that exists.

    Raises:
        NotADirectoryError: the path, or what it leads through, is a file.
    """
    path = Path(os.path.abspath(path))
    found = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not found.is_dir():
        raise NotADirectoryError(f"{found} is not a directory")
    return found


@dataclass(frozen=True)
class Machine:
    """This machine, or one that a test laid out.

    Args:
        root: where ``/proc``, ``/sys``, ``/dev``, ``/run`` and ``/etc`` are.
        environment: the environment variables.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def _text(self, path: str) -> str | None:
        """A file's text; None where it is missing or may not be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        """Whether this machine has ``path``."""
        return (self.root / path.lstrip("/")).exists()

    def place(self, directory: Path) -> Place:
        """Where a directory lies.

        Raises:
            NotADirectoryError: it is a file.
        """
        folder = nearest_folder(directory)
        mount = self._mount_of(folder)
        drive = self._drive(mount.number) if mount else None
        usage = shutil.disk_usage(folder)
        return Place(directory, folder, mount, drive, usage.free, usage.total)

    @cached_property
    def _mounts(self) -> list[Mount]:
        try:
            return list(mounts(self.root / "proc"))
        except (OSError, ValueError):
            return []

    def _mount_of(self, folder: Path) -> Mount | None:
        real = Path(os.path.realpath(folder))
        above = [mount for mount in self._mounts if real.is_relative_to(mount.point)]
        return max(reversed(above), key=lambda mount: len(mount.point), default=None)  # the later of two at one point

    def _drive(self, number: str) -> Drive | None:
        folder = self.root / "sys/dev/block" / number
        if number.startswith("0:") or not folder.is_dir():
            return None
        whole = folder.resolve()
        if (whole / "partition").exists():
            whole = whole.parent
        told = [self._text(os.path.relpath(whole / name, self.root)) for name in ("device/model", "queue/rotational")]
        model, rotates = ((text or "").strip() for text in told)
        return Drive(whole.name, model, rotates == "1")

    @cached_property
    def driver(self) -> Driver | None:
        """NVIDIA's driver; None where it is not loaded."""
        text = self._text("/proc/driver/nvidia/version") or ""
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
        return Driver(match[1], "Open Kernel Module" in text) if match else None

    @cached_property
    def container(self) -> str | None:
        """What kind of container this is; None outside of one."""
        if self.exists("/.dockerenv"):
            return "docker"
        if self.exists("/run/.containerenv"):
            return "podman"
        if "KUBERNETES_SERVICE_HOST" in self.environment:
            return "kubernetes"
        return self.environment.get("container") or None  # systemd's and lxc's way of telling

    @property
    def locked_memory_is_limited(self) -> bool:
        """Whether this process may lock only so much memory, which DeepNVMe's and pinned buffers need."""
        limits = self._text("/proc/self/limits") or ""
        return bool(re.search(r"^Max locked memory\s+\d", limits, re.MULTILINE))

    @property
    def shared_memory_is_small(self) -> bool:
        """Whether /dev/shm, through which workers of a DataLoader send items, has docker's default of 64 MiB."""
        return any(mount.point == "/dev/shm" and "size=65536k" in mount.options for mount in self._mounts)

    @property
    def io_uring_disabled(self) -> bool:
        """Whether the administrator switched io_uring off (Linux 6.6 and later)."""
        return (self._text("/proc/sys/kernel/io_uring_disabled") or "0").strip() != "0"

    @cached_property
    def nvidia_fs(self) -> str | None:
        """Version of the kernel module nvidia-fs ("loaded" where it does not say); None where it is not loaded."""
        told = self._text("/proc/driver/nvidia-fs/version")
        if told is not None:
            match = re.search(r"\d+(\.\d+)+", told)
            return match[0] if match else "loaded"
        modules = self._text("/proc/modules") or ""
        return "loaded" if re.search(r"^nvidia_fs\s", modules, re.MULTILINE) else None

    @cached_property
    def nvidia_fs_nodes(self) -> list[str]:
        """The device nodes of nvidia-fs, by their paths on this machine."""
        return [f"/dev/{node.name}" for node in sorted((self.root / "dev").glob("nvidia-fs*"))]

    def udev_entry(self, number: str) -> dict[str, str] | None:
        """udev's properties of the block device ``major:minor``; None where udev's database is not there.

        A device that udev does not know has no properties.
        """
        if not os.access(self.root / "run/udev", os.R_OK):
            return None
        lines = (self._text(f"/run/udev/data/b{number}") or "").splitlines()
        pairs = (line[2:].partition("=") for line in lines if line.startswith("E:"))
        return {name: value for name, _, value in pairs}

    def lacks_for_p2pdma(self, place: Place) -> list[tuple[str, str]]:
        """What cuFile's way without nvidia-fs, PCI P2PDMA, still needs: ``(what is missing, what to do)`` each."""
        lacking = []
        if place.drive is None or not place.drive.is_nvme:
            lacking.append(("an NVMe drive below the directory", "put the cache on a local NVMe drive"))
        if "p2pdma_pgmap_ops" not in (self._text("/proc/kallsyms") or ""):
            lacking.append(("PCI P2PDMA in the kernel", "use a kernel with CONFIG_PCI_P2PDMA (6.2 or later on Ubuntu)"))
        if self.driver is None or not self.driver.is_open:
            lacking.append(("NVIDIA's open kernel modules", "install them, release 565 or later"))
        lacking += self._lacking_settings()
        return lacking

    def _lacking_settings(self) -> list[tuple[str, str]]:
        lacking = []
        if platform.machine() == "x86_64":
            if "RMForceStaticBar1=1" not in (self._text("/proc/driver/nvidia/params") or ""):
                registry = 'options nvidia NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"'
                lacking.append(("a static BAR1", f"in /etc/modprobe.d: {registry}"))
            if (self._text("/sys/module/nvme_core/parameters/multipath") or "").strip() == "Y":
                lacking.append(("NVMe without multipath", "in /etc/modprobe.d: options nvme_core multipath=N"))
        if not self._cufile_wants_p2pdma():
            lacking.append(
                ("cuFile's setting", f'in {self.cufile_json}: {{"properties": {{"use_pci_p2pdma": true}}}}'),
            )
        return lacking

    @property
    def cufile_json(self) -> str:
        """The path of cuFile's settings."""
        return self.environment.get("CUFILE_ENV_PATH_JSON") or "/etc/cufile.json"

    def _cufile_wants_p2pdma(self) -> bool:
        if self.environment.get("CUFILE_USE_PCIP2PDMA", "").lower() in ("1", "true"):
            return True
        settings = re.sub(r"//.*", "", self._text(self.cufile_json) or "")  # NVIDIA's own file is full of comments
        return bool(re.search(r'"use_pci_p2pdma"\s*:\s*true', settings))
