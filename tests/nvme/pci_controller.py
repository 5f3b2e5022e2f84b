"""An NVMe controller taken from the kernel and driven through its BAR: what xnvme-bam's kernel is checked against.

Inside the guest of ``make test-nvme`` only, as root: it maps the controller's registers, has its admin queue make I/O
queues in huge pages, and finds out physical addresses in ``/proc/self/pagemap``.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

import numpy as np
import torch

from monai_gds.storage.xnvme.bam.controller import PAGE, Controller, DmaMemory, QueuePair

#: Huge pages of DMA memory.
_HUGE, _HUGE_PAGES = 2 << 20, 48

# Registers, and admin commands
_CC, _CSTS, _AQA, _ASQ, _ACQ, _DOORBELLS = 0x14, 0x1C, 0x24, 0x28, 0x30, 0x1000
_DELETE_SQ, _CREATE_SQ, _DELETE_CQ, _CREATE_CQ, _IDENTIFY = 0x00, 0x01, 0x04, 0x05, 0x06
_ADMIN_DEPTH = 32


def device_with_serial(serial: str) -> tuple[Path, str]:
    """The PCI device of a controller that the kernel drives, and the name of its first namespace."""
    for controller in Path("/sys/class/nvme").iterdir():
        if (controller / "serial").read_text().strip() == serial:
            namespace = next(p.name for p in controller.iterdir() if p.name.startswith("nvme"))
            return (controller / "device").resolve(), namespace
    raise LookupError(serial)


def take_from_kernel(device: Path) -> None:
    """Unbinds a PCI device from its driver, and has it answer to its registers and do DMA."""
    (device / "driver/unbind").write_text(device.name)
    (device / "enable").write_text("1")
    with (device / "config").open("r+b", buffering=0) as config:
        config.seek(4)
        (command,) = struct.unpack("<H", config.read(2))
        config.seek(4)
        config.write(struct.pack("<H", command | 0x6))  # memory space, bus master


class PciController(Controller):
    """See the module's docstring. It is reset when it is opened and when it is closed.

    Args:
        device: its folder below /sys, taken from the kernel before.
        max_transfer: most bytes per command, if the controller takes more.
    """

    def __init__(self, device: Path, max_transfer: int = 2 << 20) -> None:
        reserved = Path("/proc/sys/vm/nr_hugepages")
        reserved.write_text(str(max(_HUGE_PAGES, int(reserved.read_text()))))
        with (device / "resource0").open("r+b") as bar:
            self._bar = mmap.mmap(bar.fileno(), 0)
        self._registers = np.frombuffer(self._bar, np.uint32)
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE | 0x40000  # MAP_HUGETLB
        self._arena = np.frombuffer(mmap.mmap(-1, _HUGE * _HUGE_PAGES, flags), np.uint8)
        self._physical = _physical_addresses(self._arena)
        self._used = 0
        self._stride = 4 << (int(self._registers[1]) & 0xF)  # CAP.DSTRD
        self._queues: dict[int, int] = {}  # numbers by the address of the submission queue
        self._reset()
        self._admin, self._admin_completions = self._take(64 * _ADMIN_DEPTH), self._take(16 * _ADMIN_DEPTH)
        self._tail = 0
        self._start()
        self._identify(max_transfer)

    def _take(self, nbytes: int) -> np.ndarray:
        """Zeroed pages that are contiguous, physically too if there are less than a huge page of them."""
        nbytes = -(-nbytes // PAGE) * PAGE
        if nbytes <= _HUGE and self._used % _HUGE + nbytes > _HUGE:
            self._used = -(-self._used // _HUGE) * _HUGE
        found = self._arena[self._used :][:nbytes]
        assert len(found) == nbytes, "the arena is used up"
        self._used += nbytes
        found[:] = 0
        return found

    def _address(self, memory: np.ndarray) -> int:
        at = memory.ctypes.data - self._arena.ctypes.data
        return int(self._physical[at // _HUGE]) + at % _HUGE

    def _write(self, register: int, value: int) -> None:
        self._registers[register // 4] = value & 0xFFFFFFFF

    def _wait_ready(self, ready: int) -> None:
        end = time.monotonic() + 60
        while int(self._registers[_CSTS // 4]) & 1 != ready:
            assert time.monotonic() < end, "the controller does not get ready"

    def _reset(self) -> None:
        self._write(_CC, 0)
        self._wait_ready(0)

    def _start(self) -> None:
        self._write(_AQA, (_ADMIN_DEPTH - 1) << 16 | (_ADMIN_DEPTH - 1))
        for register, memory in ((_ASQ, self._admin), (_ACQ, self._admin_completions)):
            self._write(register, self._address(memory))
            self._write(register + 4, self._address(memory) >> 32)
        self._write(_CC, 4 << 20 | 6 << 16 | 1)  # entries of 16 and 64 bytes, pages of 4 KiB, enable
        self._wait_ready(1)

    def _command(self, opcode: int, nsid: int, address: int, ten: int, eleven: int = 0) -> None:
        """One admin command."""
        slot = self._tail % _ADMIN_DEPTH
        phase = self._tail // _ADMIN_DEPTH % 2 ^ 1
        struct.pack_into("<II16xQQII", self._admin.data, 64 * slot, opcode, nsid, address, 0, ten, eleven)
        self._tail += 1
        self._write(_DOORBELLS, self._tail % _ADMIN_DEPTH)
        completions = self._admin_completions.view(np.uint32)
        end = time.monotonic() + 60
        while int(completions[4 * slot + 3]) >> 16 & 1 != phase:
            assert time.monotonic() < end, "the controller does not answer"
        status = int(completions[4 * slot + 3]) >> 17
        assert not status, f"admin command {opcode:#x}: status {status:#x}"
        self._write(_DOORBELLS + self._stride, self._tail % _ADMIN_DEPTH)

    def _identify(self, max_transfer: int) -> None:
        page = self._take(PAGE)
        self._command(_IDENTIFY, 0, self._address(page), 1)
        most = PAGE << int(page[77]) if page[77] else 2 << 20  # MDTS
        self.max_transfer = min(most, max_transfer)
        self._command(_IDENTIFY, self.nsid, self._address(page), 0)
        (blocks,) = struct.unpack_from("<Q", page.data)
        self.block_size = 1 << int(page[128 + 4 * (int(page[26]) & 0xF) + 2])
        self.nbytes = blocks * self.block_size

    def memory(self, nbytes: int) -> DmaMemory:
        pages = self._take(nbytes)
        return DmaMemory(
            torch.from_numpy(pages),
            np.array([self._address(pages[at:]) for at in range(0, len(pages), PAGE)], np.uint64),
        )

    def create_queue(self, depth: int) -> QueuePair:
        number = next(n for n in range(1, 1000) if n not in self._queues.values())
        submission, completion = self._take(64 * depth), self._take(16 * depth)
        size = (depth - 1) << 16 | number
        self._command(_CREATE_CQ, 0, self._address(completion), size, 1)
        self._command(_CREATE_SQ, 0, self._address(submission), size, number << 16 | 1)
        self._queues[submission.ctypes.data] = number
        doorbell = self._registers.ctypes.data + _DOORBELLS + 2 * number * self._stride
        return QueuePair(submission.ctypes.data, completion.ctypes.data, doorbell, doorbell + self._stride, depth)

    def delete_queue(self, pair: QueuePair) -> None:
        number = self._queues.pop(pair.submission)
        self._command(_DELETE_SQ, 0, 0, number)
        self._command(_DELETE_CQ, 0, 0, number)

    def close(self) -> None:
        assert not self._queues
        self._reset()


def _physical_addresses(arena: np.ndarray) -> np.ndarray:
    """Of each huge page."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        found = []
        for at in range(0, len(arena), _HUGE):
            pagemap.seek((arena.ctypes.data + at) // PAGE * 8)
            (entry,) = struct.unpack("<Q", pagemap.read(8))
            assert entry >> 63, "a page is not there"
            found.append((entry & ((1 << 55) - 1)) * PAGE)
    return np.array(found, np.uint64)
