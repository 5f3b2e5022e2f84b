"""The software controller: an NVMe controller as a thread of this process, over a file or a block device.

It stands in for a drive, since no drive gives its queues to a GPU yet. The kernel cannot tell the difference: the
controller watches the doorbells, takes the submission entries, follows PRP lists to addresses of its own, and posts
completions. The bytes go through the processor and pinned memory, so it is slower than any other backend.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from monai_gds.errors import StorageError
from monai_gds.storage.xnvme.bam.controller import PAGE, Controller, DmaMemory, QueuePair, host_pages

#: Opcode of the NVM command set's Read.
READ = 0x02

# Status fields as a completion holds them: the type's three bits, then the code's eight.
INVALID_OPCODE, INVALID_NAMESPACE, INVALID_FIELD, INVALID_PRP, OUT_OF_RANGE = 0x01, 0x0B, 0x02, 0x13, 0x80
UNRECOVERED_READ = 2 << 8 | 0x81

#: Seconds between two polls of idle doorbells, and polls without a pause after the last command.
_IDLE_SECONDS, _EAGER_LOOKS = 2e-4, 200

#: ioctl: bytes per logical block of a block device.
_BLKSSZGET = 0x1268


class Entry(NamedTuple):
    """A submission entry, decoded."""

    opcode: int
    identifier: int
    nsid: int
    prp1: int
    prp2: int
    lba: int
    blocks: int


class _Queue:
    """A queue pair as the controller sees it, in its own memory."""

    def __init__(self, depth: int, target: torch.device) -> None:
        self.depth = depth
        self._memory = [host_pages(nbytes, target) for nbytes in (64 * depth, 16 * depth, 8)]
        submission, completion, doorbells = (memory.numpy() for memory in self._memory)
        self._entries = submission.data
        self._completions = completion.view(np.uint32)
        self._doorbells = doorbells.view(np.uint32)
        self._head = self._tail = 0
        self._phase = 1

    def pair(self) -> QueuePair:
        submission, completion, doorbells = (memory.data_ptr() for memory in self._memory)
        return QueuePair(submission, completion, doorbells, doorbells + 4, self.depth)

    def take(self) -> list[Entry]:
        """The commands that were submitted since the last call."""
        tail, found = int(self._doorbells[0]), []
        while self._head != tail:
            word, nsid, prp1, prp2, lba, count = struct.unpack_from("<II16xQQQI", self._entries, 64 * self._head)
            found.append(Entry(word & 0xFF, word >> 16, nsid, prp1, prp2, lba, (count & 0xFFFF) + 1))
            self._head = (self._head + 1) % self.depth
        return found

    def post(self, identifier: int, status: int) -> None:
        """Completes a command. Raises RuntimeError if the queue has no room, which no correct driver lets happen."""
        after = (self._tail + 1) % self.depth
        if after == int(self._doorbells[1]):
            raise RuntimeError(f"the completion queue of {self.depth} entries overflows")
        self._completions[4 * self._tail + 2] = self._head
        # Last: it makes the entry valid
        self._completions[4 * self._tail + 3] = identifier | self._phase << 16 | status << 17
        self._phase ^= after == 0
        self._tail = after


class _Region(NamedTuple):
    """Memory for data and PRP lists, and the controller's address of its last page. Pages count down from the end, so
    that an address that was not translated is noticed.
    """

    memory: np.ndarray
    address: int


class SoftwareController(Controller):
    """See the module's docstring.

    Args:
        path: the file or block device to read. It is opened for reading only.
        target: the device whose kernel drives the queues.
        block_size: bytes per logical block of a file; a block device reports its own.
        max_transfer: most bytes per command.

    Raises:
        StorageError: it cannot be opened, or is neither a file nor a block device.
    """

    def __init__(self, path: str, target: torch.device, block_size: int = 512, max_transfer: int = 256 << 10) -> None:
        self._target = target
        self.block_size, self.max_transfer = block_size, max_transfer
        try:
            mode = os.stat(path).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
                raise OSError(errno.ENOTBLK, "it is neither a file nor a block device", path)
            direct = os.O_DIRECT if stat.S_ISBLK(mode) else 0  # buffered reads of a device give stale blocks
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | direct)
        except OSError as e:
            raise StorageError(e.errno, "the software controller cannot open it", path) from e
        if direct:
            (self.block_size,) = struct.unpack("i", fcntl.ioctl(self._fd, _BLKSSZGET, bytes(4)))
        self.nbytes = os.lseek(self._fd, 0, os.SEEK_END)
        self._regions: list[_Region] = []
        self._queues: dict[int, _Queue] = {}  # by the address of the submission queue
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._close_file = weakref.finalize(self, os.close, self._fd)
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), self._ended), name="monai-gds-software-controller", daemon=True
        )
        self._thread.start()

    def memory(self, nbytes: int) -> DmaMemory:
        tensor = host_pages(nbytes, self._target)
        pages = len(tensor) // PAGE
        with self._lock:
            first = 1 + sum(len(region.memory) // PAGE for region in self._regions)
            self._regions.append(_Region(tensor.numpy(), first * PAGE))
        return DmaMemory(tensor, np.arange(first, first + pages, dtype=np.uint64)[::-1] * np.uint64(PAGE))

    def create_queue(self, depth: int) -> QueuePair:
        queue = _Queue(depth, self._target)
        pair = queue.pair()
        with self._lock:
            self._queues[pair.submission] = queue
        return pair

    def delete_queue(self, pair: QueuePair) -> None:
        with self._lock:  # held while commands are carried out
            del self._queues[pair.submission]

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._close_file()

    # The controller's own thread.

    def look(self) -> bool:
        """Takes the new commands of every queue and completes them. Returns whether there were any."""
        found = False
        with self._lock:
            for queue in self._queues.values():
                entries = queue.take()
                if entries:
                    self.answer(queue, entries)
                    found = True
        return found

    def answer(self, queue: _Queue, entries: Sequence[Entry]) -> None:
        """Carries out commands, and posts their completions."""
        for entry in entries:
            queue.post(entry.identifier, self.execute(entry))

    def execute(self, entry: Entry) -> int:
        """Carries out a command. Returns its status, 0 for success."""
        if entry.opcode != READ:
            return INVALID_OPCODE
        if entry.nsid != self.nsid:
            return INVALID_NAMESPACE
        nbytes = entry.blocks * self.block_size
        if nbytes > self.max_transfer:
            return INVALID_FIELD
        if (entry.lba + entry.blocks) * self.block_size > self.nbytes:
            return OUT_OF_RANGE
        try:
            parts = self._parts(entry, nbytes)
        except LookupError:
            return INVALID_PRP
        try:
            got = os.preadv(self._fd, parts, entry.lba * self.block_size)
        except OSError:
            got = -1
        return 0 if got == nbytes else UNRECOVERED_READ

    def _parts(self, entry: Entry, nbytes: int) -> list[memoryview]:
        """The memory that a command names, page by page. Raises LookupError if it is not the controller's."""
        count = -(-(entry.prp1 % PAGE + nbytes) // PAGE)
        addresses = [entry.prp1]
        if count == 2:
            addresses.append(entry.prp2)
        elif count > 2:
            listed = self._at(entry.prp2)
            if len(listed) < 8 * (count - 1) or entry.prp2 % 8:
                raise LookupError(entry.prp2)
            addresses += listed.view(np.uint64)[: count - 1].tolist()
        parts = []
        for i, address in enumerate(addresses):
            if i and address % PAGE:
                raise LookupError(address)
            parts.append(self._at(address)[:nbytes].data)
            nbytes -= len(parts[-1])
        return parts

    def _at(self, address: int) -> np.ndarray:
        """The rest of the page at an address of the controller's."""
        for region in self._regions:
            page = (address - region.address) // PAGE
            pages = len(region.memory) // PAGE
            if 0 <= page < pages:
                start = (pages - 1 - page) * PAGE
                return region.memory[start + address % PAGE : start + PAGE]
        raise LookupError(address)


def _serve(controller: weakref.ref[SoftwareController], ended: threading.Event) -> None:
    """Polls the doorbells until the controller is closed or garbage-collected."""
    quiet = 0
    while not ended.is_set():
        alive = controller()
        if alive is None:
            return
        quiet = 0 if alive.look() else quiet + 1
        del alive
        time.sleep(_IDLE_SECONDS if quiet > _EAGER_LOOKS else 0)
