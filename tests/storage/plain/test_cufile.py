"""Whether cuFile reads a folder directly: simulated, on machines laid out in a folder.

No machine here has nvidia-fs or an NVMe drive beside a GPU. These tests show what is decided from the kernel's files,
not that cuFile then reads directly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from monai_gds.base.stages import nvidia_fs_bytes
from monai_gds.storage.plain.cufile import can_be_direct, conditions
from tests.doctor.laid import Laid

Change = Callable[[Laid], None]


def ready(laid: Laid) -> None:
    """A machine with nvidia-fs, without the file system and drive."""
    laid.with_gpu()
    laid.with_nvidia_fs("nvme", "nvme_rdma", "lnet", "beegfs", "rpcrdma", "wekafsio", "mmfslinux")


def on_multipath(laid: Laid) -> None:
    on_disk(laid, "259:3", "nvme0n1")
    laid.file("sys/devices/pci0/nvme0n1/device/nvme0/transport", "tcp\n")


def udev(laid: Laid, number: str) -> None:
    laid.file(f"run/udev/data/b{number}", "E:ID_FS_TYPE=ext4\nE:ID_FS_USAGE=filesystem\n")


def on_nvme(laid: Laid, kind: str = "ext4", options: str = "rw,data=ordered", transport: str = "pcie") -> None:
    laid.mount(kind, "259:3", options=options)
    laid.drive("259:3", "nvme0n1", partition="nvme0n1p1")
    laid.file("sys/devices/pci0/nvme0n1/device/transport", f"{transport}\n")
    udev(laid, "259:3")


def on_raid(laid: Laid, level: str = "raid0", second: str = "nvme1n1") -> None:
    laid.mount("xfs", "9:0", "/dev/md0")
    laid.drive("9:0", "md0")
    laid.file("sys/devices/pci0/md0/md/level", f"{level}\n")
    for number, name in (("259:0", "nvme0n1"), ("259:1", second)):
        laid.drive(number, name)
        laid.link(f"sys/devices/pci0/md0/slaves/{name}", f"sys/devices/pci0/{name}")
    udev(laid, "9:0")


def on_lvm(laid: Laid) -> None:
    laid.mount("xfs", "253:0", "/dev/mapper/data")
    laid.drive("253:0", "dm-0")
    laid.drive("259:0", "nvme0n1")
    laid.link("sys/devices/pci0/dm-0/slaves/nvme0n1", "sys/devices/pci0/nvme0n1")
    udev(laid, "253:0")


def on_disk(laid: Laid, number: str, name: str) -> None:
    laid.mount("xfs", number, f"/dev/{name}")
    laid.drive(number, name)
    udev(laid, number)


def failing(laid: Laid) -> list[str]:
    return [one.what for one in conditions(laid.cache, laid.root, laid.environment) if not one.holds]


@pytest.mark.parametrize(
    "lay",
    [
        on_nvme,
        lambda laid: on_nvme(laid, "xfs", "rw,noatime"),
        lambda laid: on_nvme(laid, transport="rdma"),
        on_raid,
        lambda laid: laid.mount("lustre", "0:50", "10.0.0.1@o2ib:/fs"),
        lambda laid: laid.mount("wekafs", "0:50", "fs"),
        lambda laid: laid.mount("beegfs", "0:50", "beegfs_nodev"),
        lambda laid: laid.mount("gpfs", "0:50", "fs0"),
        lambda laid: laid.mount("nfs4", "0:50", "server:/fs", "rw,vers=4.2,proto=rdma,port=20049"),
    ],
)
def test_simulated_folders_that_cufile_reads_directly(laid: Laid, lay: Change) -> None:
    ready(laid)
    lay(laid)
    assert failing(laid) == []


@pytest.mark.parametrize(
    ("lay", "why"),
    [
        (lambda laid: on_nvme(laid, options="rw"), "ext4 with no data="),  # libcufile wants to see it listed
        (lambda laid: on_nvme(laid, options="rw,data=journal"), "ext4 with data=journal"),
        (lambda laid: on_nvme(laid, "btrfs"), "btrfs is not a file system of cuFile's"),
        (lambda laid: on_nvme(laid, transport="tcp"), "nvme0n1 is NVMe over TCP"),
        (on_multipath, "nvme0n1 is NVMe over TCP"),
        (lambda laid: on_raid(laid, "raid1"), "md0 is raid1: cuFile reads NVMe drives and RAID0"),
        (lambda laid: on_raid(laid, second="sda"), "sda is not an NVMe drive"),
        (on_lvm, "dm-0 is a volume of the device mapper: cuFile reads NVMe drives and RAID0"),
        (lambda laid: on_disk(laid, "7:0", "loop0"), "loop0 is not an NVMe drive"),
        (lambda laid: on_disk(laid, "8:0", "sda"), "sda is not an NVMe drive"),
        (lambda laid: on_disk(laid, "254:9", "vdb"), "vdb is not an NVMe drive"),
        (lambda laid: laid.mount("nfs4", "0:50", "server:/fs", "rw,vers=4.2,proto=tcp"), "nfs4 without RDMA"),
    ],
)
def test_simulated_folders_that_cufile_does_not_read_directly(laid: Laid, lay: Change, why: str) -> None:
    ready(laid)
    lay(laid)
    assert failing(laid) == [why]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda laid: laid.remove("proc/driver/nvidia-fs/version"), "nvidia-fs is not loaded, nor is P2PDMA ready"),
        (lambda laid: laid.remove("dev/nvidia-fs0"), "there is no /dev/nvidia-fs0"),
        (lambda laid: laid.file("proc/driver/nvidia-fs/modules", "lnet: 2\n"), "nvme is not registered with nvidia-fs"),
        (lambda laid: laid.remove("run/udev/data/b259:3"), "udev does not list 259:3"),
        (
            lambda laid: laid.file("etc/cufile.json", '{"properties": {"force_compat_mode": true}}'),
            "cuFile's compatibility mode is forced",
        ),
        (
            lambda laid: laid.environment.update(CUFILE_FORCE_COMPAT_MODE="true"),
            "cuFile's compatibility mode is forced",
        ),
    ],
)
def test_simulated_what_the_rest_of_the_machine_lacks(laid: Laid, change: Change, why: str) -> None:
    ready(laid)
    on_nvme(laid)
    change(laid)
    assert failing(laid) == [why]
    assert all(one.remedy for one in conditions(laid.cache, laid.root, laid.environment) if not one.holds)


def test_simulated_peer_to_peer_needs_no_nvidia_fs_but_a_single_local_drive(laid: Laid, tmp_path: Path) -> None:
    laid.with_gpu()
    laid.ready_for_p2pdma()
    assert can_be_direct(laid.root, laid.environment)
    on_nvme(laid)
    assert failing(laid) == []
    (tmp_path / "other").mkdir()
    other = Laid(tmp_path / "other")
    other.with_gpu()
    other.ready_for_p2pdma()
    on_raid(other)
    assert failing(other) == ["nvidia-fs is not loaded, nor is P2PDMA ready"]
    other.file("etc/cufile.json", '{"properties": {\n // "use_pci_p2pdma": true\n}}')
    assert not can_be_direct(other.root, other.environment)


def test_simulated_what_nvidia_fs_counts(laid: Laid) -> None:
    assert nvidia_fs_bytes(laid.root) is None
    laid.file("proc/driver/nvidia-fs/stats", "Reads\t\t\t\t: err=0 io_state_err=0\n")
    assert nvidia_fs_bytes(laid.root) is None, "it does not count"
    laid.file("proc/driver/nvidia-fs/stats", "Reads\t\t\t\t: n=40 ok=40 err=0 readMiB=160 io_state_err=0\n")
    assert nvidia_fs_bytes(laid.root) == 160 << 20
