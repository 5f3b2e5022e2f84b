"""PCI addresses, and why a drive in user space was not opened, on machines made up below a folder."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from monai_gds.errors import StorageError
from monai_gds.storage.xnvme import user_space
from monai_gds.storage.xnvme.user_space import Claims, full_address, sharing_id, why_not_opened

ADDRESS = "0000:01:00.0"


def test_addresses() -> None:
    assert full_address("01:00.0") == full_address(ADDRESS) == ADDRESS
    assert full_address("/dev/nvme0n1") is None
    assert full_address("10.0.0.1:4420") is None
    assert full_address("C1.00.0") == full_address("0000:C1:00.0") == "0000:c1:00.0", "as /sys has it"
    assert full_address("10000:e1:00.0") == "10000:e1:00.0", "a domain of Intel's VMD"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with a drive, bound to uio_pci_generic."""
    (tmp_path / "sys/bus/pci/devices" / ADDRESS).mkdir(parents=True)
    bind(tmp_path, "uio_pci_generic")
    return tmp_path


def bind(root: Path, driver: str) -> None:
    """Binds the drive to a driver."""
    link = root / "sys/bus/pci/devices" / ADDRESS / "driver"
    link.unlink(missing_ok=True)
    (root / "sys/bus/pci/drivers" / driver).mkdir(parents=True)
    link.symlink_to(root / "sys/bus/pci/drivers" / driver)


def why(root: Path, code: int, driver: str = "upcie", heap_bytes: int | None = None, address: str = ADDRESS) -> str:
    return why_not_opened(code, address, driver, heap_bytes, root)


def test_a_drive_that_is_not_there(root: Path) -> None:
    assert "no PCI device" in why(root, errno.ENOENT, address="0000:02:00.0")


def test_a_drive_that_the_kernel_has(root: Path) -> None:
    bind(root, "nvme")
    assert "bound to nvme: unmount it and bind it to uio_pci_generic" in why(root, errno.EOPNOTSUPP)
    (root / "sys/bus/pci/devices" / ADDRESS / "driver").unlink()
    assert "bound to no driver" in why(root, errno.ENOENT)


def test_the_memory_of_the_heap(root: Path) -> None:
    assert "heap of 1024 MiB lies in huge pages" in why(root, errno.ENOMEM)
    assert "heap of 128 MiB" in why(root, errno.ENOMEM, heap_bytes=128 << 20)


def test_what_processes_share_where_nothing_can_be_written(root: Path) -> None:
    assert "upcie keeps in /tmp and /dev/shm what processes share" in why(root, errno.EROFS)


def test_a_drive_belongs_to_one_process(root: Path) -> None:
    (root / "sys/bus/pci/devices" / ADDRESS / "config").touch()
    first, second = Claims(root), Claims(root)  # of two processes
    first.take(ADDRESS)
    first.take(ADDRESS)
    first.give_up(ADDRESS)
    with pytest.raises(StorageError, match="another process reads this drive"):
        second.take(ADDRESS)
    first.give_up(ADDRESS)
    second.take(ADDRESS)
    second.give_up(ADDRESS)
    first.take("10.0.0.1:4420")  # in the network: whoever opens it says more


def test_processes_whose_drivers_share_have_a_drive_together(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_space, "_CLOSING_SECONDS", 0.1)
    (root / "sys/bus/pci/devices" / ADDRESS / "config").touch()
    first, second, alone = Claims(root), Claims(root), Claims(root)  # of three processes
    for claims in (first, second, first):
        claims.take(ADDRESS, shared=True)
    with pytest.raises(StorageError, match="in each by be='upcie' of xNVMe's development branch"):
        alone.take(ADDRESS)
    first.give_up(ADDRESS)  # of what could not be opened
    first.give_up(ADDRESS)
    second.give_up(ADDRESS)
    alone.take(ADDRESS)
    with pytest.raises(StorageError, match="another process reads this drive"):
        second.take(ADDRESS, shared=True)


def test_a_drive_that_others_have_stays_open(root: Path) -> None:
    """As xNVMe takes it from all of them when the process that opened it first closes it."""
    (root / "sys/bus/pci/devices" / ADDRESS / "config").touch()
    first, second, alone = Claims(root), Claims(root), Claims(root)
    closed: list[str] = []
    for claims in (first, first, second):
        claims.take(ADDRESS, shared=True)
    first.give_up(ADDRESS, lambda: closed.append("one of two"))
    first.give_up(ADDRESS, lambda: closed.append("the last one"))
    assert closed == ["one of two"]
    first.take(ADDRESS, shared=True)
    first.give_up(ADDRESS, lambda: closed.append("opened again"))
    assert closed == ["one of two", "opened again"]
    second.give_up(ADDRESS)
    with pytest.raises(StorageError, match="another process reads this drive"):
        alone.take(ADDRESS)


def test_the_last_process_closes_its_drive(root: Path) -> None:
    (root / "sys/bus/pci/devices" / ADDRESS / "config").touch()
    first, second, alone = Claims(root), Claims(root), Claims(root)
    closed: list[str] = []
    for claims in (first, second):
        claims.take(ADDRESS, shared=True)
    second.give_up(ADDRESS)
    first.give_up(ADDRESS, lambda: closed.append("the last one"))
    assert closed == ["the last one"]
    alone.take(ADDRESS)


def test_what_a_drive_is_shared_by(root: Path) -> None:
    here = sharing_id(ADDRESS, "upcie", root)
    assert here == sharing_id(ADDRESS, "upcie-cuda", root) > 0, "for all processes the same"
    assert here != sharing_id("0000:02:00.0", "spdk", root) > 0
    assert sharing_id("10.0.0.1:4420", "spdk", root) == 0
    bind(root, "vfio-pci")
    assert sharing_id(ADDRESS, "upcie", root) == 0, "uPCIe would refuse to open it"


def test_other_errors_and_other_drivers_have_their_errno_alone(root: Path) -> None:
    assert why(root, errno.EIO) == why(root, errno.ENOMEM, driver="spdk") == ""
