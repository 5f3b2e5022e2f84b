"""A backend over a completion queue, written from the documentation of :mod:`monai_gds.storage.queue` alone.

Its "device" is a pool of threads that read with ``preadv``, at most DEPTH commands at a time.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from monai_gds.storage.backend import Availability
from monai_gds.storage.queue import Command, QueueBackend

DEPTH = 8


class SampleQueueBackend(QueueBackend):
    """Reads with commands to a fake device."""

    name = "sample-queue"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._device: ThreadPoolExecutor | None = None
        self._count = 0
        self._complete: queue.SimpleQueue[tuple[Command, int | Exception]] = queue.SimpleQueue()

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return Availability(True, "a queue in front of threads")

    def _submit(self, command: Command) -> bool:
        if self._count == DEPTH:
            return False
        if self._device is None:
            self._device = ThreadPoolExecutor(4)
        self._device.submit(self._read, command)
        self._count += 1
        return True

    def _read(self, command: Command) -> None:
        """What the device does with a command."""
        try:
            count = os.preadv(command.handle, [command.dest.numpy().data], command.offset)
        except OSError as e:
            self._complete.put((command, e))
        else:
            self._complete.put((command, count))

    def _poll(self) -> Iterable[tuple[Command, int | Exception]]:
        self._count -= 1
        return [self._complete.get()]

    def close(self) -> None:
        super().close()  # waits for what is in flight
        device, self._device = self._device, None
        if device is not None:
            device.shutdown()
