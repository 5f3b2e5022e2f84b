"""All storage calls of the image code: batches of images into reused buffers, and the records of packed folders.

The readers and the packing code call it, and need not know how reads are described or carried out.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base.process import PerProcess
from monai_gds.items.tree import compile_tree, encode_item
from monai_gds.records import header
from monai_gds.records.entries import read, read_whole
from monai_gds.records.writing import pack_record
from monai_gds.storage import ALIGNMENT, Pending, Reads, Storage, open_storage
from monai_gds.storage.memory import tensor_at
from monai_gds.storage.pending import Then


@dataclass(frozen=True, slots=True)
class Fetch:
    """Images that are being read into one buffer."""

    pending: Pending
    split: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = list  # cuts it into the images, 1-D uint8 slices
    release: Callable[[], None] = lambda: None  # gives it back, once nothing reads from the images any more

    def wait(self) -> Sequence[torch.Tensor]:
        """Waits for the reads, and returns the images. Raises OSError if a file could not be opened or read."""
        return self.split(self.pending.wait())


class ImageStorage:
    """A storage backend and the buffers it reads images into.

    Host buffers are reused: clearing new pages, at 4 GB/s, would take longer than reading into them. Unpinned buffers
    come back by themselves when the last tensor over them is gone. Pinned buffers do not, since a copy to a GPU may
    still read from them then: ``Fetch.release`` gives them back. Device buffers are always new, because torch's
    allocator already reuses them in the order of the streams.

    Args:
        backend, device, options: passed to :func:`monai_gds.open_storage`, which may raise.
        pinned: host buffers are pinned, for a decoder on a GPU.

    Attributes:
        storage: returns the storage of this process.
    """

    def __init__(
        self, backend: str, device: torch.device, *, pinned: bool = False, options: Mapping[str, Any] | None = None
    ) -> None:
        self.device = device
        self.storage = PerProcess(partial(open_storage, backend, device, **(options or {})))
        self.storage()  # an error now, if the backend does not work here
        self._pinned = pinned and device.type == "cpu"
        self._free: deque[torch.Tensor] = deque(maxlen=limits.IMAGE_BUFFERS)

    def start_files(self, paths: Sequence[str], sizes: np.ndarray) -> Fetch:
        """Starts reading whole files, one image each. A file without its given size fails with FileChanged."""
        pitch = (sizes // ALIGNMENT + 1) * ALIGNMENT  # a spare byte after each file shows whether it has grown
        ends = np.cumsum(pitch)
        reads = Reads.of_files(paths, sizes, ends - pitch, int(ends[-1]), expected=sizes.tolist())
        return self.start(reads, reads.parts)

    def start(
        self, reads: Reads, split: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], step: Then | None = None
    ) -> Fetch:
        """Starts reads into one buffer, which ``split`` cuts into images, after a step in the thread that reads."""
        buffer = None
        if self.device.type == "cuda":  # new memory has no earlier reader: filling one of ours waits for the training
            pending = self.storage().load(reads)
        else:
            buffer = self.take(int(reads.sizes[0]))
            pending = self.storage().fill(reads, [buffer])
        if step is not None:
            pending = pending.then(step)
        return Fetch(pending, split) if buffer is None else Fetch(pending, split, partial(self._give_back, buffer))

    def take(self, nbytes: int) -> torch.Tensor:
        """A 1-D uint8 host tensor of this many bytes or more."""
        memory = self._unused(nbytes)
        if self._pinned:
            return memory
        return tensor_at(memory.data_ptr(), memory.numel(), partial(self._free.append, memory))

    def _unused(self, nbytes: int) -> torch.Tensor:
        for _ in range(len(self._free)):
            try:
                memory = self._free.popleft()
            except IndexError:  # another thread was faster
                break
            if memory.numel() >= nbytes:
                return memory  # smaller ones are dropped
        nbytes += nbytes // 4  # so that it fits the next batches too
        if self._pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self.storage().memory(nbytes)

    def _give_back(self, memory: torch.Tensor) -> None:
        if self._pinned:
            self._free.append(memory)

    def close(self) -> None:
        """Frees unused buffers and the backend's threads. Images handed out stay valid."""
        self._free.clear()
        if storage := self.storage.made():
            storage.close()


def read_files(storage: Storage, paths: Sequence[str], sizes: list[int]) -> torch.Tensor:
    """Reads whole files of the given sizes back to back into a new 1-D uint8 tensor; raises OSError."""
    lengths = np.array(sizes, np.int64)
    reads = Reads.of_files(paths, lengths, np.cumsum(lengths) - lengths, sum(sizes), expected=sizes)
    (data,) = storage.fill(reads, [storage.memory(sum(sizes))]).wait()
    return data


def save_item(storage: Storage, path: Path, item: dict[str, Any]) -> None:
    """Writes an item as the new file ``path``, a record without a key."""
    storage.write(str(path), pack_record(encode_item(item), key={}))


class ImageRecord(NamedTuple):
    """A file of packed images: the bytes of each image, where the first one begins, and the bytes of the file."""

    sizes: np.ndarray
    checksums: np.ndarray
    offset: int
    nbytes: int


def read_layout(path: str) -> ImageRecord:
    """Reads where the images lie in a file that :func:`save_item` wrote. Raises RecordError, OSError."""
    with open(path, "rb") as file:
        record = header.read(file.fileno())
        sizes, checksums = (
            read(file, name, record.tensors[name]).view(torch.int64).numpy() for name in ("sizes", "checksums")
        )
        return ImageRecord(sizes, checksums, record.tensors["images"].offset, os.fstat(file.fileno()).st_size)


def load_item(path: str) -> Any:
    """Reads an item that :func:`save_item` wrote, with all checksums verified.

    Raises RecordError for a record that is damaged or of a newer format, and OSError.
    """
    _, item = read_whole(path)
    return compile_tree(item.tree, item.arrays, item.tensors)(item.tensors)
