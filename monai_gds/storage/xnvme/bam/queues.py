"""Batches of reads for the kernel of ``xnvme-bam``: its queue pairs, its pool, its launches and their results."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from monai_gds.storage import staging
from monai_gds.storage.files import whole_pages
from monai_gds.storage.xnvme.bam.controller import PAGE, Controller, QueuePair, host_pages
from monai_gds.storage.xnvme.buffers import Bounce, BounceBuffers
from monai_gds.storage.xnvme.libxnvme import Completion

#: The kernel. The tests compile it for the host too.
SOURCE = Path(__file__).with_name("bam.cu")

#: Most entries of a queue; as in the kernel.
MOST_DEPTH = 1024

#: Results of a command besides the controller's status, which the kernel notes: it was not answered in time, the
#: controller completed one that was not in flight, or its queue failed before it was submitted.
LOST, STRANGE, UNSENT = -1, -2, -3

#: What the host notes for a command that it hands to the kernel, which may be in flight over several launches.
_UNDER_WAY = -4

#: Threads per block, and so per queue.
_THREADS = 128

#: Seconds between two polls of a kernel.
_POLL_SECONDS = 5e-5

_QUEUE = np.dtype(
    [(name, np.uint64) for name in ("submission", "completion", "submission_doorbell", "completion_doorbell")]
    + [(name, np.uint32) for name in ("depth", "tail", "head", "phase", "flying", "failed")]
    + [("since", np.uint64)]
)
_COMMAND = np.dtype([("lba", np.uint64), ("blocks", np.uint32), ("slot", np.uint32)])
_BATCH = np.dtype([
    (name, np.uint64)
    for name in (
        "queues", "identifiers", "commands", "results", "over", "pages", "lists", "list_pages",
        "count", "first", "slot_pages", "list_entries", "block_bytes", "nsid", "limit_ns",
    )
])  # fmt: skip


class CudaKernel:
    """The kernel on a CUDA device, on a separate stream, so that no copy waits for a drive. One launch at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = staging.new_stream(device)
        self._event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._function = staging.compiled(SOURCE.read_text(), "read_blocks", device.index)

    def launch(self, batch: int, queues: int) -> None:
        """Starts the kernel on the batch at this address, with a block of threads per queue. Returns at once."""
        staging.launch(self._function, queues, _THREADS, [batch], self._stream.cuda_stream)
        self._event.record(self._stream)

    def done(self) -> bool:
        """Whether the launch is over. Raises RuntimeError if it failed."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class Pool(BounceBuffers):
    """The memory that a controller reads into: slots of at least its ``max_transfer``, copied on from there."""

    def __init__(self, controller: Controller, target: torch.device, slot_bytes: int, slots: int) -> None:
        slot_bytes = whole_pages(slot_bytes)
        self.data = controller.memory(slots * slot_bytes)
        self._base = self.data.tensor.data_ptr()
        addresses = itertools.count(self._base, slot_bytes)
        super().__init__(slot_bytes, lambda _: Bounce(next(addresses)))
        self._unmade, self._target = slots, target
        self.slots, self.slot_pages = slots, slot_bytes // PAGE
        # A list per slot, which names its pages but the first. In powers of two none crosses a page.
        self.list_entries = 1 << max(self.slot_pages - 2, 0).bit_length()
        self.lists = controller.memory(8 * self.list_entries * slots)

    def slot(self, address: int) -> int:
        """The number of the slot at an address."""
        return (address - self._base) // self._nbytes

    def deliver(self, bounce: Bounce, skip: int, dest: torch.Tensor) -> None:
        if not dest.is_cuda:
            return super().deliver(bounce, skip, dest)
        stream = staging.current_stream(self._target)  # the copy stream is current
        staging.copy_to_device(dest.data_ptr(), bounce.address + skip, dest.numel(), stream.cuda_stream)
        self.give_back(bounce._replace(copied=stream.record_event()))

    def close(self) -> None:
        """Frees the slots after the copies from them. The queues whose commands name them must have been deleted."""
        for bounce in self._free:
            if bounce.copied is not None:
                bounce.copied.synchronize()
        super().close()


class BamQueue:
    """Queue pairs of a controller that a kernel drives, in short launches: each ends once a command has completed, or
    another read has arrived.

    Commands stay in flight between launches, and the reads join them at the next one, so the controller has work as
    long as there are reads. After ``seconds`` without a completion, a queue's commands are lost. The kernel runs on
    ``target``.
    """

    def __init__(
        self, controller: Controller, kernel: CudaKernel, pool: Pool, pairs: int, depth: int, seconds: float,
        target: torch.device,
    ) -> None:  # fmt: skip
        self._controller, self._kernel, self._pool = controller, kernel, pool
        self._depth = depth
        self._pairs: list[QueuePair] = []
        self._waiting: list[tuple[Any, int, int, int]] = []  # for the next launch: tag, first block, blocks, slot
        self._under_way: dict[int, Any] = {}  # tags of those that the kernel has, by slot
        self._launched = False
        # Everything that the kernel is passed, in one piece of memory
        types = [
            (_BATCH, 1), (_QUEUE, pairs), (_COMMAND, pool.slots), (np.dtype(np.int32), pool.slots),
            (np.dtype(np.uint32), 1),
        ]  # fmt: skip
        ends = np.cumsum([dtype.itemsize * count for dtype, count in types]).tolist()
        self._memory = host_pages(ends[-1], target)
        self._batch, self._queues, self._commands, self._results, self._over = (
            self._memory.numpy()[end - dtype.itemsize * count : end].view(dtype)
            for end, (dtype, count) in zip(ends, types, strict=True)
        )
        # Used for every command: worth a copy on the device
        identifiers = np.zeros((pairs, 2, MOST_DEPTH), np.int32)
        self._tables = [
            torch.from_numpy(table).to(target)
            for table in (identifiers, *(memory.addresses.view(np.int64) for memory in (pool.data, pool.lists)))
        ]
        kept, pages, list_pages = (table.data_ptr() for table in self._tables)
        views = (self._commands, self._results, self._over)
        self._batch[0] = (
            self._queues.ctypes.data, kept, *(view.ctypes.data for view in views),
            pages, pool.lists.tensor.data_ptr(), list_pages,
            0, 0, pool.slot_pages, pool.list_entries, controller.block_size, controller.nsid, int(seconds * 1e9),
        )  # fmt: skip
        try:
            for number in range(pairs):
                self._create(number)
        except BaseException:
            self.close()
            raise

    def _create(self, number: int) -> None:
        """Has the controller make a queue pair."""
        pair = self._controller.create_queue(self._depth)
        self._pairs.insert(number, pair)
        self._queues[number] = (*pair, 0, 0, 1, 0, 0, 0)

    @property
    def outstanding(self) -> int:
        """Reads that wait or are in flight."""
        return len(self._waiting) + len(self._under_way)

    def read(self, tag: Any, block: int, count: int, address: int) -> bool:
        """Reads ``count`` blocks from ``block`` into the slot at ``address``, from the next launch on."""
        self._waiting.append((tag, block, count, self._pool.slot(address)))
        self._over[0] = 1  # ends the launch, if there is one
        return True

    def poll(self) -> list[Completion]:
        """Returns the commands that completed during the last launch, or launches the kernel for all that are left.

        Raises:
            RuntimeError: CUDA failed. Nobody knows any more what is in flight.
            StorageError: a queue failed, and the controller makes no other one. What is in flight stays so.
        """
        if not self._launched:
            self._launch()
        elif self._kernel.done():
            return self._collect()
        else:
            time.sleep(_POLL_SECONDS)
        return []

    def _launch(self) -> None:
        new, self._waiting = self._waiting, []
        batch, pairs = self._batch, len(self._pairs)
        batch["first"] = (batch["first"] + batch["count"]) % pairs  # where the last launch's commands ended
        batch["count"] = len(new)
        self._commands[: len(new)] = [read[1:] for read in new]
        for tag, *_, slot in new:
            self._results[slot] = _UNDER_WAY
            self._under_way[slot] = tag
        self._over[0] = 0
        self._kernel.launch(batch.ctypes.data, pairs)
        self._launched = True

    def _collect(self) -> list[Completion]:
        """What has completed by the end of a launch."""
        self._launched = False
        for number in np.flatnonzero(self._queues["failed"]).tolist():
            # A lost command may still write to its slot, until its queue is deleted. If no other queue can be made,
            # everything stays in flight, and the drive is given up.
            self._controller.delete_queue(self._pairs.pop(number))
            self._create(number)
        slots = list(self._under_way)
        results = zip(slots, self._results[slots].tolist(), strict=True)
        return [Completion(self._under_way.pop(slot), result, 0) for slot, result in results if result != _UNDER_WAY]

    def close(self) -> None:
        """Deletes the queues; nothing may be in flight."""
        while self._pairs:
            self._controller.delete_queue(self._pairs.pop())
