"""How the bytes of a batch of images come into memory: whole batches, several ahead of whoever uses them.

A reader is given the image indices of every batch of an epoch and yields :class:`Batch` after Batch. It knows how
images lie in files (one each, or many in a large file) and leaves the reading to a storage backend. The images are
slices of one buffer a batch, or one a large file: what costs time with small files is Python calls, not bytes.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from monai_gds.errors import BrokenImage, StorageError
from monai_gds.imagenet.buffers import Buffers
from monai_gds.imagenet.listing import ImageList
from monai_gds.storage import ALIGNMENT, FileId, Pending, Read, Storage
from monai_gds.storage.base import later

if TYPE_CHECKING:
    from monai_gds.imagenet.packed import PackedImages

__all__ = ["Batch", "FileReader", "PackedReader", "PlainReader", "Reader"]

#: Batches whose reads are under way while one is used.
AHEAD = 4


class Batch:
    """The encoded images of a batch.

    Attributes:
        indices: which images of the list these are, int64, (batch,).
        images: 1-D uint8 tensors on the reader's device: slices of a buffer that they share.
        labels: int32, (batch,).
    """

    __slots__ = ("_done", "images", "indices", "labels")

    def __init__(
        self, indices: np.ndarray, images: Sequence[torch.Tensor], labels: np.ndarray, done: Callable[[], None]
    ) -> None:
        self.indices = indices
        self.images = images
        self.labels = labels
        self._done = done

    def done(self) -> None:
        """Gives the memory back to the reader, which fills it again. Only for who surely has no more use for it."""
        self.images = []
        self._done()


def _nothing() -> None:
    pass


class Reader(ABC):
    """Reads batches of images.

    Args:
        images: the images that indices refer to.
        device: where they go.
    """

    def __init__(self, images: ImageList, device: torch.device) -> None:
        self.images = images
        self.device = device

    @abstractmethod
    def read(self, batches: Sequence[np.ndarray]) -> Iterator[Batch]:
        """Reads the batches of image indices, in order. Closing the iterator ends the reads that are under way.

        Raises:
            BrokenImage: an image has no bytes.
            OSError: a file could not be opened or read; the error names it. FileChanged: it has another size by now
                than in the list.
        """

    def close(self) -> None:  # noqa: B027 (optional: a reader may hold nothing)
        """Frees threads and memory."""

    def _batch(self, indices: np.ndarray, images: Sequence[torch.Tensor], done: Callable[[], None] = _nothing) -> Batch:
        return Batch(indices, images, self.images.labels[indices], done)

    def _sizes(self, indices: np.ndarray) -> np.ndarray:
        sizes: np.ndarray = self.images.sizes[indices]
        if not sizes.all():
            raise BrokenImage(self.images.path(int(indices[np.flatnonzero(sizes == 0)[0]])), "it is empty")
        return sizes


class PlainReader(Reader):
    """``python-file``: ``open`` and read, one file after the other, as one would write it; the peer of the others."""

    def read(self, batches: Sequence[np.ndarray]) -> Iterator[Batch]:
        for indices in batches:
            sizes = self._sizes(indices).tolist()
            yield self._batch(indices, [self._one(int(i), size) for i, size in zip(indices, sizes, strict=True)])

    def _one(self, index: int, size: int) -> torch.Tensor:
        path = self.images.path(index)
        data = np.empty(size, dtype=np.uint8)
        with open(path, "rb") as file:
            FileId.sized(size).check(FileId.of(file.fileno()), path)
            if file.readinto(data.data) != size:
                raise StorageError(errno.EIO, f"it has become shorter than {size} bytes", path)
        return torch.from_numpy(data).to(self.device)


class FileReader(Reader):
    """One file an image, through a storage backend.

    Args:
        images: a folder's.
        storage: who reads; its device is where the images go.
        pinned: host buffers are pinned, for a decoder on a GPU.
    """

    def __init__(self, images: ImageList, storage: Storage, *, pinned: bool = False) -> None:
        super().__init__(images, storage.device)
        self._storage = storage
        self._buffers = Buffers(storage, pinned=pinned)

    def read(self, batches: Sequence[np.ndarray]) -> Iterator[Batch]:
        under_way: deque[tuple[np.ndarray, torch.Tensor, Pending]] = deque()
        try:
            for indices in batches:
                under_way.append((indices, *self._start(indices)))
                if len(under_way) > AHEAD:
                    yield self._finish(*under_way[0])
                    under_way.popleft()
            while under_way:
                yield self._finish(*under_way[0])
                under_way.popleft()
        finally:  # nothing may be written to a buffer that others get
            for _, _, pending in under_way:
                _settle(pending)

    def _start(self, indices: np.ndarray) -> tuple[torch.Tensor, Pending]:
        try:
            sizes = self._sizes(indices)
            pitch = (sizes // ALIGNMENT + 1) * ALIGNMENT  # a byte more than the file at least, see submit_files
            ends = np.cumsum(pitch)
            buffer = self._buffers.take(int(ends[-1]))
            paths = [self.images.path(i) for i in indices.tolist()]
            return buffer, self._storage.submit_files(paths, sizes, ends - pitch, buffer, fresh=True, whole=True)
        except (BrokenImage, OSError) as e:  # comes out in its turn, after the batches before it
            return torch.empty(0, dtype=torch.uint8), Pending(partial(_raise, e))

    def _finish(self, indices: np.ndarray, buffer: torch.Tensor, pending: Pending) -> Batch:
        return self._batch(indices, pending.wait(), partial(self._buffers.give_back, buffer))

    def close(self) -> None:
        self._buffers.clear()
        self._storage.close()


def _raise(error: Exception) -> NoReturn:
    raise error


def _settle(pending: Pending) -> None:
    try:
        pending.wait()
    except Exception:  # nobody wants these bytes any more, nor what went wrong with them
        return


class _Held:
    """One large file's images in memory, for as long as batches need them.

    Args:
        begin: the first image of the list that was read.
        images: the images from there on.
        free: called when the reader and every batch have released it.
    """

    def __init__(self, begin: int, images: Sequence[torch.Tensor], free: Callable[[], None]) -> None:
        self.begin = begin
        self.images = images
        self.users = 1  # the reader
        self._free = free

    def release(self) -> None:
        self.users -= 1
        if not self.users:
            self._free()


class PackedReader(Reader):
    """Images of a packed folder: each large file is read once an epoch, in one go, and kept while batches need it.

    Args:
        images: a packed folder's.
        storage: who reads; its device is where the images go.
        ahead: files read before they are needed.
        pinned: see FileReader.
    """

    def __init__(self, images: PackedImages, storage: Storage, *, ahead: int = 8, pinned: bool = False) -> None:
        super().__init__(images.images, storage.device)
        self._packed = images
        self._storage = storage
        self._ahead = ahead
        self._buffers = Buffers(storage, pinned=pinned)

    def read(self, batches: Sequence[np.ndarray]) -> Iterator[Batch]:
        plan = _Plan(self._packed, batches)
        under_way: deque[tuple[torch.Tensor, Pending]] = deque()
        held: dict[int, _Held] = {}
        started = finished = 0
        try:
            for number, indices in enumerate(batches):
                while started < len(plan.files) and started < finished + self._ahead + plan.new_files(number):
                    under_way.append(self._start(*plan.span(started)))
                    started += 1
                for nth in range(finished, finished + plan.new_files(number)):
                    file, begin, end = plan.span(nth)
                    held[file] = self._finish(begin, end, *under_way[0])
                    under_way.popleft()
                    finished += 1
                files = self._packed.file_of(indices).tolist()
                images = [held[f].images[i - held[f].begin] for f, i in zip(files, indices.tolist(), strict=True)]
                used = [held[f] for f in set(files)]
                for one in used:
                    one.users += 1
                for ended in plan.ending[number]:
                    held.pop(ended).release()
                yield self._batch(indices, images, partial(_release, used))
        finally:
            for _, pending in under_way:
                _settle(pending)

    def _start(self, file: int, begin: int, end: int) -> tuple[torch.Tensor, Pending]:
        path, offset, nbytes = self._packed.extent(file, begin, end)
        buffer = self._buffers.take(nbytes)
        read = Read(path, offset, buffer[:nbytes], self._packed.identity(file))
        return buffer, later(self._storage.submit, [read], fresh=True)  # what is wrong comes out in its turn

    def _finish(self, begin: int, end: int, buffer: torch.Tensor, pending: Pending) -> _Held:
        images = torch.split(pending.wait()[0], self.images.sizes[begin:end].tolist())
        return _Held(begin, images, partial(self._buffers.give_back, buffer))

    def close(self) -> None:
        self._buffers.clear()
        self._storage.close()


def _release(files: Sequence[_Held]) -> None:
    for file in files:
        file.release()


class _Plan:
    """Which files of a packed folder an epoch needs, and when.

    Attributes:
        files: the files, in the order in which they are first needed.
        ending: by batch, the files needed by no later one.
    """

    def __init__(self, packed: PackedImages, batches: Sequence[np.ndarray]) -> None:
        order = np.concatenate(batches)
        batch = np.repeat(np.arange(len(batches)), [len(b) for b in batches])
        files, first, which = np.unique(packed.file_of(order), return_index=True, return_inverse=True)
        sequence = np.argsort(first)
        self.files = files[sequence]
        self._new = np.bincount(batch[first], minlength=len(batches)).tolist()
        begin = np.full(len(files), len(packed.images))
        np.minimum.at(begin, which, order)
        end = np.zeros(len(files), dtype=np.int64)
        np.maximum.at(end, which, order + 1)
        self._spans = np.stack([self.files, begin[sequence], end[sequence]], axis=1).tolist()
        last = np.zeros(len(files), dtype=np.int64)
        np.maximum.at(last, which, batch)
        self.ending: list[list[int]] = [[] for _ in batches]
        for file, number in zip(files.tolist(), last.tolist(), strict=True):
            self.ending[number].append(file)

    def new_files(self, batch: int) -> int:
        """How many files are needed for the first time by this batch."""
        return self._new[batch]  # type: ignore[no-any-return]

    def span(self, nth: int) -> tuple[int, int, int]:
        """The nth of ``files``, the first image wanted of it, and the one after the last."""
        file, begin, end = self._spans[nth]
        return file, begin, end
