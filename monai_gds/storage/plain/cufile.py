"""Whether cuFile can read the files of a folder directly into GPU memory, and each reason why or why not.

Where it cannot, cuFile copies through host memory, more slowly than we do. So this is asked of each folder: a scratch
drive may have what it takes, and the home directory not. Only files of the kernel and cuFile's settings are read, below
``root``, so that a test can lay out a machine in a folder. Does not import torch.

Sources: NVIDIA's GPUDirect Storage troubleshooting guide (https://docs.nvidia.com/gpudirect-storage/, "NVMe P2PDMA
Troubleshooting" for P2PDMA), the messages and names of files in libcufile 1.14 and 1.20, and the names of modules in
nvidia-fs's nvfs-dma.h.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from monai_gds.base.file_systems import Mount, mount_of, reached_over, text_of

GUIDE = "https://docs.nvidia.com/gpudirect-storage/troubleshooting-guide/"

#: Properties of a block device that libcufile looks up in udev's database.
UDEV_PROPERTIES = ("ID_FS_TYPE", "ID_FS_USAGE")

#: The driver that has to be registered with nvidia-fs, by what an NVMe drive is reached over.
_DRIVERS = {"": "nvme", "NVMe over RDMA": "nvme_rdma"}

#: The same, by file system that reaches the GPU through the network.
_NETWORKED = {
    "lustre": "lnet", "wekafs": "wekafsio", "beegfs": "beegfs", "gpfs": "mmfslinux", "nfs": "rpcrdma",
    "nfs4": "rpcrdma",
}  # fmt: skip


class Condition(NamedTuple):
    """One of the things that reading directly takes: whether it holds, what was found, and what to do if it fails."""

    holds: bool
    what: str
    remedy: str = ""


def conditions(folder: Path, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> list[Condition]:
    """What cuFile needs to read files of an existing folder directly. It can if all of it holds."""
    mount = mount_of(folder, root / "proc")
    if mount is None:
        return [Condition(False, f"no mounted file system is known for {folder}")]
    found = [_file_system(mount)]
    drivers = {_NETWORKED.get(mount.kind, "nvme")}
    peer_to_peer = False
    if mount.kind not in _NETWORKED:
        drives = list(_drives(root / "sys/dev/block" / mount.number)) or [_Drive(mount.source, "has no block device")]
        drivers = {drive.driver for drive in drives if drive.driver} or drivers
        found += [_readable(drives), _udev(mount, root)]
        on_nvme = [drive.driver for drive in drives] == ["nvme"]
        peer_to_peer = next(lacks_for_p2pdma(root, environment, on_nvme), None) is None
    if _is_on("force_compat_mode", "CUFILE_FORCE_COMPAT_MODE", root, environment):
        found.append(Condition(False, "cuFile's compatibility mode is forced", "set force_compat_mode to false"))
    return [_way(drivers, peer_to_peer, root), *found]


def can_be_direct(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this machine has what it takes besides a folder: nvidia-fs, or PCI P2PDMA as cuFile's settings ask."""
    return nvidia_fs(root) is not None or _is_on("use_pci_p2pdma", "CUFILE_USE_PCIP2PDMA", root, environment)


def _way(drivers: set[str], peer_to_peer: bool, root: Path) -> Condition:
    """How bytes get to the GPU: nvidia-fs, with the drivers of these drives, or PCI P2PDMA."""
    if peer_to_peer:
        return Condition(True, "PCI P2PDMA has all that NVIDIA's guide asks for")
    version = nvidia_fs(root)
    if version is None:
        return Condition(False, "nvidia-fs is not loaded, nor is P2PDMA ready", "see nvidia-fs or p2pdma above")
    if not nvidia_fs_nodes(root):
        return Condition(False, "there is no /dev/nvidia-fs0", "see nvidia-fs above")
    modules = text_of(root / "proc/driver/nvidia-fs/modules")
    missing = sorted(drivers - {line.partition(":")[0].strip() for line in modules.splitlines()})
    if missing:
        what = f"{' and '.join(missing)} is not registered with nvidia-fs"
        return Condition(False, what, f"install the driver that NVIDIA patched, and load it before nvidia-fs: {GUIDE}")
    return Condition(True, f"nvidia-fs {version} with {' and '.join(sorted(drivers))}")


def _file_system(mount: Mount) -> Condition:
    """Of ext4, libcufile demands that the table of mounts lists ``data=ordered``, which is the default, but not listed
    unless it was given.
    """
    options = mount.options.split(",")
    if mount.kind == "ext4":
        given = next((option for option in options if option.startswith("data=")), "no data=")
        holds = given == "data=ordered"
        return Condition(holds, f"ext4 with {given}", "" if holds else f"mount {mount.point} with -o data=ordered")
    if mount.kind in ("nfs", "nfs4"):
        holds = "proto=rdma" in options
        what = f"{mount.kind} {'over' if holds else 'without'} RDMA"
        return Condition(holds, what, "" if holds else f"mount {mount.point} with -o proto=rdma")
    if mount.kind == "xfs" or mount.kind in _NETWORKED:
        return Condition(True, mount.kind)
    return Condition(False, f"{mount.kind} is not a file system of cuFile's", "use ext4 or XFS on a local drive")


class _Drive(NamedTuple):
    """A drive below a file system. ``driver`` is empty if cuFile cannot read it; ``problem`` says why not."""

    name: str
    problem: str = ""
    driver: str = ""


def _drives(device: Path) -> Iterator[_Drive]:
    """The drives below a block device, which is a folder of sysfs: itself, or the members of a RAID0."""
    if not device.is_dir():
        return
    folder = device.resolve()
    whole = folder.parent if (folder / "partition").exists() else folder
    members, level = sorted((whole / "slaves").glob("*")), text_of(whole / "md/level").strip()
    if members and level == "raid0":
        for member in members:
            yield from _drives(member)
    elif members or level:
        yield _Drive(whole.name, f"is {level or 'a volume of the device mapper'}: cuFile reads NVMe drives and RAID0")
    elif not whole.name.startswith("nvme"):
        yield _Drive(whole.name, "is not an NVMe drive")
    else:
        over = reached_over(whole)
        driver = _DRIVERS.get(over, "")
        yield _Drive(whole.name, "" if driver else f"is {over}", driver)


def _readable(drives: list[_Drive]) -> Condition:
    names = ", ".join(drive.name for drive in drives)
    problems = [f"{drive.name} {drive.problem}" for drive in drives if drive.problem]
    if problems:
        return Condition(False, ", ".join(problems), "put the cache on a local NVMe drive, or a RAID0 of such drives")
    return Condition(True, f"{names}: NVMe{', RAID0' if len(drives) > 1 else ''}")


def _udev(mount: Mount, root: Path) -> Condition:
    entry = udev_entry(mount.number, root)
    holds = entry is not None and all(name in entry for name in UDEV_PROPERTIES)
    what = "lists" if holds else "does not list"
    return Condition(holds, f"udev {what} {mount.number}", "" if holds else "see udev above")


# What libcufile looks at.


def nvidia_fs(root: Path = Path("/")) -> str | None:
    """Version of the kernel module nvidia-fs ("loaded" if unknown); None if it is not loaded."""
    version = text_of(root / "proc/driver/nvidia-fs/version")
    if match := re.search(r"\d+(\.\d+)+", version):
        return match[0]
    return "loaded" if version or re.search(r"^nvidia_fs\s", text_of(root / "proc/modules"), re.MULTILINE) else None


def nvidia_fs_nodes(root: Path) -> list[str]:
    """Paths of nvidia-fs's device nodes."""
    return [f"/dev/{node.name}" for node in sorted((root / "dev").glob("nvidia-fs*"))]


def udev_entry(number: str, root: Path) -> dict[str, str] | None:
    """udev's properties of the block device ``major:minor``; None without udev's database.

    A device that is not in the database has no properties.
    """
    if not os.access(root / "run/udev", os.R_OK):
        return None
    lines = text_of(root / f"run/udev/data/b{number}").splitlines()
    pairs = (line[2:].partition("=") for line in lines if line.startswith("E:"))
    return {name: value for name, _, value in pairs}


def lacks_for_p2pdma(root: Path, environment: Mapping[str, str], on_nvme: bool) -> Iterator[tuple[str, str]]:
    """What PCI P2PDMA, cuFile's way without nvidia-fs, lacks, as pairs of (what is missing, what to do)."""
    if not _is_on("use_pci_p2pdma", "CUFILE_USE_PCIP2PDMA", root, environment):
        file = _settings_file(environment)
        yield "cuFile's setting", f'in {file}: {{"properties": {{"use_pci_p2pdma": true}}}}'
    if not on_nvme:
        yield "an NVMe drive below the directory", "put the cache on a local NVMe drive"
    if "p2pdma_pgmap_ops" not in text_of(root / "proc/kallsyms"):
        yield "PCI P2PDMA in the kernel", "use a kernel with CONFIG_PCI_P2PDMA (6.2 or later on Ubuntu)"
    if "Open Kernel Module" not in text_of(root / "proc/driver/nvidia/version"):
        yield "NVIDIA's open kernel modules", "install them, release 565 or later"
    if platform.machine() == "x86_64":
        if "RMForceStaticBar1=1" not in text_of(root / "proc/driver/nvidia/params"):
            registry = 'options nvidia NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"'
            yield "a static BAR1", f"in /etc/modprobe.d: {registry}"
        if text_of(root / "sys/module/nvme_core/parameters/multipath").strip() == "Y":
            yield "NVMe without multipath", "in /etc/modprobe.d: options nvme_core multipath=N"


def _settings_file(environment: Mapping[str, str]) -> str:
    return environment.get("CUFILE_ENV_PATH_JSON") or "/etc/cufile.json"


def _is_on(setting: str, variable: str, root: Path, environment: Mapping[str, str]) -> bool:
    """Whether a setting of cuFile is true, in its file or by a variable of the environment."""
    text = text_of(root / _settings_file(environment).lstrip("/"))
    text = re.sub(r"//.*", "", text)  # NVIDIA's own file is full of comments
    is_given = environment.get(variable, "").lower() in ("1", "true")
    return is_given or bool(re.search(rf'"{setting}"\s*:\s*true', text))
