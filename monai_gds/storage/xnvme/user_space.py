"""Drives that a driver in user space has taken from the kernel: addresses, claims, and why one could not be opened.

xNVMe gives nothing but an errno. /sys shows its cause.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from monai_gds.errors import StorageError

#: xNVMe's drivers that take their memory from a heap of their own, in huge pages.
UPCIE = ("upcie", "upcie-cuda")

#: The default size of that heap: XNVME_BE_UPCIE_DEFAULT_HEAP_SIZE.
_HEAP_BYTES = 1 << 30

#: Drivers of the kernel that leave a device to a process.
_FOR_USER_SPACE = ("uio_pci_generic", "vfio-pci", "igb_uio")

_ADDRESS = re.compile(r"([0-9a-f]{4,}:)?([0-9a-f]{2})[:.]([0-9a-f]{2}\.[0-7])", re.IGNORECASE)

#: The last process of those that share a drive has it alone for the moment in which it closes it.
_CLOSING_SECONDS = 1.0

#: Where the kernel lists PCI devices.
_DEVICES = "sys/bus/pci/devices"


def full_address(uri: str) -> str | None:
    """A PCI address with its domain, as xNVMe and /sys have it; None for what is not a PCI address."""
    found = _ADDRESS.fullmatch(uri)
    return found and f"{found[1] or '0000:'}{found[2]}:{found[3]}".lower()


def why_not_opened(code: int, address: str, driver: str, heap_bytes: int | None, root: Path = Path("/")) -> str:
    """Why opening a drive failed with the errno ``code``, and the remedy; empty if this machine shows no cause."""
    if full_address(address) is None:
        return ""  # it is elsewhere in the network
    device = root / _DEVICES / address
    if not device.exists():
        return "this machine has no PCI device of that address"
    bound = _bound_driver(device)
    if bound not in _FOR_USER_SPACE:
        return f"it is bound to {bound}: unmount it and bind it to uio_pci_generic or vfio-pci (`xnvme-driver` does)"
    if code == errno.ENOMEM and driver in UPCIE:
        mib = (heap_bytes or _HEAP_BYTES) >> 20
        return (
            f"uPCIe's heap of {mib} MiB lies in huge pages (`grep Huge /proc/meminfo`) that this process locks: "
            "reserve more with `sysctl vm.nr_hugepages`, raise `ulimit -l`, or give another heap_bytes"
        )
    if code == errno.EROFS:
        return f"{driver} keeps in /tmp and /dev/shm what processes share: make both writable"
    return ""


def _bound_driver(device: Path) -> str:
    """The driver of the kernel that a PCI device in /sys is bound to."""
    link = device / "driver"
    return os.path.basename(os.path.realpath(link)) if link.exists() else "no driver"


def sharing_id(address: str, driver: str, root: Path = Path("/")) -> int:
    """The ``shm_id`` by which processes share a drive: the same in all of them. 0 where the driver cannot share it.

    uPCIe shares its memory only where that lies in huge pages, and not with a drive that is bound to vfio-pci.
    """
    if full_address(address) is None:
        return 0  # it is elsewhere in the network, where several may ask for it
    if driver in UPCIE and _bound_driver(root / _DEVICES / address) != "uio_pci_generic":
        return 0
    return zlib.crc32(address.encode()) % ((1 << 31) - 1) + 1  # xNVMe takes it for an int


_ONLY_ONE = (
    "another process reads this drive in user space, and only one can: read it in a single process, or in each by "
    "be='upcie' of xNVMe's development branch of July 2026 or later, bound to uio_pci_generic"
)


class Claims:
    """The drives that this process drives.

    A second process would reset a drive, and the reads of the first would hang, unless the driver shares it.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._held: dict[tuple[int, str], tuple[int, int]] = {}  # by process and address: descriptor, and how often

    def take(self, address: str, *, shared: bool = False) -> None:
        """Claims a drive, once more where this process has it. Raises StorageError if another process has it.

        With ``shared`` others may have it, if theirs are shared too.
        """
        key = os.getpid(), address
        with self._lock:
            if shared and any(pid != key[0] for pid, _ in self._held):
                why = "this one was forked from it, with the driver's memory: start processes by 'spawn'"
                raise StorageError(errno.EBUSY, f"another process reads this drive in user space, and {why}", address)
            fd, count = self._held.get(key, (-1, 0))
            self._held[key] = (self._locked(address, shared) if fd < 0 else fd), count + 1

    def _locked(self, address: str, shared: bool) -> int:
        try:
            fd = os.open(self._root / _DEVICES / address / "config", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1  # opening the drive gives a better error
        until = time.monotonic() + (_CLOSING_SECONDS if shared else 0)
        while not _lock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            if time.monotonic() > until:
                os.close(fd)
                raise StorageError(errno.EBUSY, _ONLY_ONE, address)
            time.sleep(0.02)
        return fd

    def give_up(self, address: str, close: Callable[[], None] | None = None) -> None:
        """Ends one claim, and calls ``close``, which closes what was opened under it, if anything was.

        What is the last to be closed stays open and claimed until this process ends if other processes have the drive:
        xNVMe takes it from all of them when the one that opened it first closes it.
        """
        key = os.getpid(), address
        with self._lock:
            fd, count = self._held.get(key, (-1, 0))
            if close is not None:
                if count == 1 and fd >= 0 and not _lock(fd, fcntl.LOCK_EX):
                    _lock(fd, fcntl.LOCK_SH)  # which the attempt gave up
                    return
                close()
            self._held.pop(key, None)
            if count > 1:
                self._held[key] = fd, count - 1
            elif fd >= 0:
                fcntl.flock(fd, fcntl.LOCK_UN)  # also for processes forked since, which have the descriptor too
                os.close(fd)


def _lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


#: The claims of this process.
claims = Claims()
