"""Readers bring encoded images into memory, batch after batch, several batches ahead of their consumer.

A reader is given the image indices of every batch of an epoch and yields one :class:`Batch` for each. It decides which
files to read when; :mod:`~monai_gds.imagenet.files.image_storage` does the reading. The images of a batch are slices
of one buffer, or of one buffer per large file: with small files, Python calls cost more time than bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base.checksum import checksums
from monai_gds.base.process import PerProcess
from monai_gds.errors import BrokenImage
from monai_gds.imagenet.files.image_storage import Fetch, ImageStorage
from monai_gds.imagenet.files.listing import ImageList
from monai_gds.imagenet.files.packed import PackedImages, damaged
from monai_gds.storage import FileId, Pending, Reads


@dataclass(slots=True)
class Batch:
    """The encoded images of a batch."""

    indices: np.ndarray  # positions in the list of images, int64, (batch,)
    images: Sequence[torch.Tensor]  # 1-D uint8 tensors on the reader's device, slices of a shared buffer
    labels: np.ndarray  # int32, (batch,)
    release: Callable[[], None]  # gives the images' memory back

    def singles(self) -> Iterator[Batch]:
        """Each image as a batch of its own, in host memory. One that is there several times comes once."""
        for i in sorted(np.unique(self.indices, return_index=True)[1].tolist()):
            yield Batch(self.indices[i : i + 1], [self.images[i].cpu()], self.labels[i : i + 1], lambda: None)

    def copy_back(self) -> int:
        """Copies the images from the GPU to the host. Returns how many bytes."""
        sizes = [image.numel() for image in self.images]
        self.images = torch.split(torch.cat(list(self.images)).cpu(), sizes)
        return sum(sizes)

    def done(self) -> None:
        """Gives the memory back to be overwritten. Only for callers that know that nothing reads from it any more."""
        self.images = []
        self.release()


class FileReader:
    """Reads batches of images, given by their indices in a list, to a device. One file per image."""

    def __init__(self, images: ImageList, storage: ImageStorage) -> None:
        self.images = images
        self.device = storage.device
        self._storage = storage

    def read(self, batches: Sequence[np.ndarray]) -> Generator[Batch]:
        """Reads batches of image indices, in order. Closing the iterator ends the reads that are under way.

        Raises BrokenImage for an empty image, FileChanged for a file that is not as listed, DamagedRecord for a
        packed file whose bytes do not match their checksum, and other OSErrors.
        """
        under_way: deque[tuple[np.ndarray, Fetch]] = deque()
        coming = iter(batches)
        try:
            while True:
                while self._has_room(under_way) and (indices := next(coming, None)) is not None:
                    under_way.append((indices, self._start(indices)))
                if not under_way:
                    return
                yield self._finish(*under_way[0])  # no local variable, which would keep the buffer from its next use
                under_way.popleft()
        finally:
            _settle(under_way)

    def _has_room(self, under_way: Sequence[tuple[np.ndarray, Fetch]]) -> bool:
        few = self._storage.storage().is_slow and sum(len(indices) for indices, _ in under_way) < limits.SLOW_AHEAD
        return few or len(under_way) <= limits.READ_AHEAD_BATCHES

    def _start(self, indices: np.ndarray) -> Fetch:
        sizes: np.ndarray = self.images.sizes[indices]
        if not sizes.all():  # raised by wait(), after the batches before it
            empty = int(indices[np.flatnonzero(sizes == 0)[0]])
            error = BrokenImage(self.images.path(empty), "it is empty")
            return Fetch(Pending.completed([], self.device, error))
        return self._storage.start_files([self.images.path(i) for i in indices.tolist()], sizes)

    def _finish(self, indices: np.ndarray, fetch: Fetch) -> Batch:
        return Batch(indices, fetch.wait(), self.images.labels[indices], fetch.release)

    def close(self) -> None:
        """Frees threads and memory."""
        self._storage.close()


def _settle(under_way: Iterable[tuple[object, Fetch]]) -> None:
    """Waits for reads whose bytes are not needed any more, so that they cannot write to a reused buffer."""
    for _, fetch in under_way:
        _ = fetch.pending.errors


#: Which images of packed folders matched their checksum, by the identities of a folder's files.
_verified: PerProcess[dict[tuple[FileId, ...], np.ndarray]] = PerProcess(dict)


class RangeReader(FileReader):
    """Images of a packed folder, each a range of a file. Images that lie side by side are read in one go.

    The first time that this process reads an image, its checksum is compared, in the thread that read it. Where storage
    bypasses the file system, that is done every time.
    """

    def __init__(self, images: PackedImages, storage: ImageStorage) -> None:
        super().__init__(images, storage)
        self._packed = images
        self._known = _verified().setdefault((images.index, *images.ids), np.zeros(len(images), dtype=bool))

    def _start(self, indices: np.ndarray) -> Fetch:
        packed, coherent = self._packed, self._storage.storage().coherent
        order = np.argsort(indices, kind="stable")
        inside = indices[order]
        file = packed.file_of(inside)
        first = np.flatnonzero((np.diff(inside, prepend=-2) != 1) | (np.diff(file, prepend=-1) != 0))  # of neighbours
        lengths = np.add.reduceat(packed.sizes[inside], first)
        ends = np.cumsum(lengths)
        reads = Reads.of_files(  # a file for each range: many small ones are then read in one call
            [packed.file_path(number) for number in file[first].tolist()], lengths, ends - lengths, int(ends[-1]),
            offsets=packed.places[inside[first]],
            expected=[packed.ids[f] if coherent else packed.ids[f].size for f in file[first].tolist()],
        )  # fmt: skip
        sizes, places = packed.sizes[inside].tolist(), np.argsort(order).tolist()
        new = np.flatnonzero(~self._known[inside] | (not coherent)).tolist()

        def images_in(filled: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            return torch.split(filled[0][: ends[-1]], sizes)

        def verified(filled: list[torch.Tensor], errors: Mapping[int, Exception]) -> list[torch.Tensor]:
            if not errors:
                images = images_in(filled)
                self._verify(inside[new], [images[i] for i in new])
            return filled

        def split(filled: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            images = images_in(filled)
            return [images[place] for place in places]

        return self._storage.start(reads, split, verified if new else None)

    def _verify(self, indices: np.ndarray, images: Sequence[torch.Tensor]) -> None:
        """Raises DamagedRecord unless images match their checksums."""
        packed = self._packed
        differ = np.array(checksums(images), np.uint64).view(np.int64) != packed.checksums[indices]
        if differ.any():
            index = indices[differ][:1]
            name = packed.names[int(index[0])]
            path = packed.file_path(int(packed.file_of(index)[0]))
            raise damaged(path, f"the bytes of {name!r} do not match their checksum")
        self._known[indices] = True


class PackedReader(RangeReader):
    """Images of a packed folder. Each large file is read once per epoch, in one go, and kept while batches need it.

    ``ahead`` files are read before they are needed.
    """

    def __init__(self, images: PackedImages, storage: ImageStorage, *, ahead: int) -> None:
        super().__init__(images, storage)
        self._ahead = ahead

    def read(self, batches: Sequence[np.ndarray]) -> Generator[Batch]:
        coming = deque(_uses(self._packed, batches))
        new_files = np.bincount([use.first for use in coming], minlength=len(batches)).tolist()
        under_way: deque[tuple[_FileUse, Fetch]] = deque()
        held: dict[int, _HeldFile] = {}
        try:
            for number, indices in enumerate(batches):
                while coming and len(under_way) < self._ahead + new_files[number]:
                    use = coming.popleft()
                    under_way.append((use, self._start(np.arange(use.begin, use.end))))
                for _ in range(new_files[number]):
                    held[under_way[0][0].file] = _HeldFile(*under_way[0])
                    under_way.popleft()
                files = self._packed.file_of(indices).tolist()
                images = [held[f].image(i) for f, i in zip(files, indices.tolist(), strict=True)]
                used = [held[f] for f in set(files)]
                for file in used:
                    file.users += 1
                for last_used in [f for f, file in held.items() if file.use.last == number]:
                    held.pop(last_used).release()
                yield Batch(indices, images, self.images.labels[indices], partial(_release, used))
        finally:
            _settle(under_way)


class _FileUse(NamedTuple):
    """What an epoch needs of one large file: images ``begin`` to ``end``, in batches ``first`` to ``last``."""

    file: int
    begin: int
    end: int
    first: int
    last: int


def _uses(packed: PackedImages, batches: Sequence[np.ndarray]) -> list[_FileUse]:
    """The large files that these batches need, in the order in which they are first needed."""
    images = np.concatenate(batches)
    batch = np.repeat(np.arange(len(batches)), [len(b) for b in batches])
    files = packed.file_of(images)
    by_file = np.argsort(files, kind="stable")
    files, starts = np.unique(files[by_file], return_index=True)
    images, batch = images[by_file], batch[by_file]
    begin, end = np.minimum.reduceat(images, starts), np.maximum.reduceat(images, starts) + 1
    table = np.stack([files, begin, end, batch[starts], np.maximum.reduceat(batch, starts)], axis=1)
    return [_FileUse(*row) for row in table[np.argsort(by_file[starts])].tolist()]


class _HeldFile:
    """One large file's images in memory, for as long as the reader or a batch needs them."""

    def __init__(self, use: _FileUse, fetch: Fetch) -> None:
        self.use = use
        self.users = 1  # the reader
        self._images = fetch.wait()
        self._free = fetch.release

    def image(self, index: int) -> torch.Tensor:
        return self._images[index - self.use.begin]

    def release(self) -> None:
        self.users -= 1
        if not self.users:
            self._free()


def _release(files: Sequence[_HeldFile]) -> None:
    for file in files:
        file.release()
