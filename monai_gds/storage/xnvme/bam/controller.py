"""What the kernel of ``xnvme-bam`` needs from an NVMe controller: queue pairs, memory that both reach, its addresses.

Whatever provides such queues implements :class:`Controller`. :mod:`.software_controller` is one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch

from monai_gds.storage.files import ALIGNMENT, whole_pages

#: Bytes per page of a controller (CC.MPS).
PAGE = 4096


class QueuePair(NamedTuple):
    """Where a submission and a completion queue and their doorbells are, as the GPU addresses them.

    Attributes:
        depth: entries of each queue, at most 1024. At most one command fewer is in flight.
    """

    submission: int
    completion: int
    submission_doorbell: int
    completion_doorbell: int
    depth: int


class DmaMemory(NamedTuple):
    """Memory that the GPU and the controller reach.

    Attributes:
        tensor: 1-D uint8, whole pages. The GPU reaches it at its ``data_ptr()``.
        addresses: the controller's address of each page, uint64.
    """

    tensor: torch.Tensor
    addresses: np.ndarray


class Controller(ABC):
    """An NVMe controller with one namespace. Its methods are called by one thread at a time.

    Attributes:
        block_size: bytes per logical block.
        nbytes: bytes of the namespace.
        max_transfer: most bytes per command that the controller (MDTS) and this class allow; at most 2 MiB, since a PRP
            list is one page.
        nsid: the namespace's identifier.
    """

    block_size: int
    nbytes: int
    max_transfer: int
    nsid: int = 1

    # As in libxnvme.Device: commands are not system calls, and completions do not count bytes.
    in_kernel: bool = False
    counts_bytes: bool = False

    @abstractmethod
    def memory(self, nbytes: int) -> DmaMemory:
        """Allocates memory for data or PRP lists. It is freed after the queues whose commands name it were deleted."""

    @abstractmethod
    def create_queue(self, depth: int) -> QueuePair:
        """A new, empty queue pair with both doorbells at 0. Raises StorageError if the controller has none left."""

    @abstractmethod
    def delete_queue(self, pair: QueuePair) -> None:
        """Deletes a queue pair. After that, the controller neither reads its memory nor writes to memory that its
        commands name.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases the controller, after its queues were deleted."""


def host_pages(nbytes: int, target: torch.device) -> torch.Tensor:
    """Whole zeroed pages of host memory, 1-D uint8. For a CUDA target they are pinned, so that the GPU reaches them at
    the same address.
    """
    nbytes = whole_pages(nbytes)
    memory = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=target.type == "cuda")
    return memory[-memory.data_ptr() % ALIGNMENT :][:nbytes]
