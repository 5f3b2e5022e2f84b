"""Over what a drive is reached, on machines laid out in a folder: simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from monai_gds.base.file_systems import reached_over


class Sysfs:
    """A /sys laid out in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/dev/block").mkdir(parents=True)

    def device(self, path: str, *, number: str = "", files: dict[str, str] | None = None) -> Path:
        device = self.root / "sys/devices" / path
        device.mkdir(parents=True, exist_ok=True)
        for name, text in (files or {}).items():
            (device / name).parent.mkdir(parents=True, exist_ok=True)
            (device / name).write_text(text)
        if number:
            (self.root / "sys/dev/block" / number).symlink_to(device)
        return device

    def nvme(self, name: str, transport: str, *, number: str = "", partition: bool = False) -> Path:
        """A drive below its controller, as without multipath."""
        controller = self.device(f"pci0/nvme/{name[:5]}", files={"transport": f"{transport}\n"})
        drive = self.device(f"pci0/nvme/{name[:5]}/{name}", number="" if partition else number)
        (drive / "device").symlink_to(controller)
        if not partition:
            return drive
        return self.device(f"pci0/nvme/{name[:5]}/{name}/{name}p1", number=number, files={"partition": "1\n"})

    def above(self, name: str, *below: Path) -> None:
        """A device of device-mapper or md."""
        device = self.device(f"virtual/block/{name}", number="9:0")
        (device / "slaves").mkdir()
        for one in below:
            (device / "slaves" / one.name).symlink_to(one)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize(
    ("transport", "over"),
    [
        ("pcie", ""), ("loop", ""), ("tcp", "NVMe over TCP"), ("rdma", "NVMe over RDMA"),
        ("fc", "NVMe over Fibre Channel"),
    ],
)  # fmt: skip
def test_simulated_an_nvme_drive_has_a_transport(sysfs: Sysfs, transport: str, over: str, partition: bool) -> None:
    sysfs.nvme("nvme1n1", transport, number="9:0", partition=partition)
    assert reached_over((sysfs.root / "sys/dev/block/9:0").resolve()) == over


@pytest.mark.parametrize(("transport", "over"), [("pcie", ""), ("tcp", "NVMe over TCP")])
def test_simulated_an_nvme_drive_with_several_paths_is_below_a_subsystem(
    sysfs: Sysfs, transport: str, over: str
) -> None:
    subsystem = sysfs.device("virtual/nvme-subsystem/nvme-subsys0")
    for name in ("nvme0", "nvme1"):
        (subsystem / name).symlink_to(sysfs.device(f"fabrics/{name}", files={"transport": f"{transport}\n"}))
    drive = sysfs.device("virtual/nvme-subsystem/nvme-subsys0/nvme0n1", number="9:0")
    (drive / "device").symlink_to(subsystem)
    assert reached_over((sysfs.root / "sys/dev/block/9:0").resolve()) == over


@pytest.mark.parametrize(
    ("path", "over"),
    [
        ("pci0/ata1/host0/target0:0:0/0:0:0:0/block/sda", ""),
        ("pci0/host1/port-1:0/end_device-1:0/target1:0:0/1:0:0:0/block/sda", ""),  # SAS
        ("pci0/virtio1/block/vda", ""),
        ("platform/host3/session1/target3:0:0/3:0:0:1/block/sdb", "iSCSI"),
        ("pci0/host4/rport-4:0-1/target4:0:0/4:0:0:0/block/sdc", "Fibre Channel"),
        ("rbd/0/block/rbd0", "Ceph RBD"),
        ("virtual/block/nbd7", "NBD"),
        ("virtual/block/drbd1", "DRBD"),
        ("virtual/block/loop0", ""),
    ],
)
def test_simulated_other_drives_have_a_driver_or_a_bus(sysfs: Sysfs, path: str, over: str) -> None:
    sysfs.device(path, number="9:0")
    assert reached_over((sysfs.root / "sys/dev/block/9:0").resolve()) == over


def test_simulated_what_is_made_of_drives_is_where_they_are(sysfs: Sysfs) -> None:
    local = sysfs.nvme("nvme0n1", "pcie", partition=True)
    remote = sysfs.nvme("nvme1n1", "tcp", partition=True)
    sysfs.above("dm-0", local)
    assert reached_over((sysfs.root / "sys/dev/block/9:0").resolve()) == ""
    (sysfs.root / "sys/devices/virtual/block/dm-0/slaves/nvme1n1p1").symlink_to(remote)
    assert reached_over((sysfs.root / "sys/dev/block/9:0").resolve()) == "NVMe over TCP", "one of two"


def test_a_number_without_a_device_is_reached_over_nothing(sysfs: Sysfs) -> None:
    assert reached_over((sysfs.root / "sys/dev/block/0:40").resolve()) == ""
