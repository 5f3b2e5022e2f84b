"""Readers bring encoded images into memory, batch after batch, several batches ahead of their consumer.

A reader is given the image indices of every batch of an epoch and yields one :class:`Batch` for each. It decides which
files to read when; :mod:`~monai_gds.imagenet.files.image_storage` does the reading. The images of a batch are slices
of one buffer: with small files, Python calls cost more time than bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base.checksum import checksums
from monai_gds.base.process import PerProcess
from monai_gds.errors import BrokenImage
from monai_gds.imagenet.files.image_storage import Fetch, ImageStorage
from monai_gds.imagenet.files.jpeg import jpeg_nbytes
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
                while len(under_way) <= limits.READ_AHEAD_BATCHES and (indices := next(coming, None)) is not None:
                    under_way.append((indices, self._start(indices)))
                if not under_way:
                    return
                yield self._finish(*under_way[0])  # no local variable, which would keep the buffer from its next use
                under_way.popleft()
        finally:  # bytes that are not needed any more must not be written to a buffer that is used again
            for _, fetch in under_way:
                _ = fetch.pending.errors

    def _start(self, indices: np.ndarray) -> Fetch:
        sizes: np.ndarray = self.images.sizes[indices]
        if not sizes.all():  # raised by wait(), after the batches before it
            empty = int(indices[np.flatnonzero(sizes == 0)[0]])
            error = BrokenImage(self.images.path(empty), "it is empty")
            return Fetch(Pending.completed([], self.device, error))
        return self._storage.start_files([self.images.path(i) for i in indices.tolist()], sizes)

    def _finish(self, indices: np.ndarray, fetch: Fetch) -> Batch:
        images = self._cut(indices, fetch.wait())
        return Batch(indices, images, self.images.labels[indices], fetch.release)

    def _cut(self, indices: np.ndarray, images: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Cuts images that were read in whole blocks to the size that their bytes show, and notes the size."""
        rounded = self.images.rounded
        if rounded is None:
            return images
        for index, image in zip(indices.tolist(), images, strict=True):
            if rounded[index]:
                self.images.sizes[index] = jpeg_nbytes(image.cpu().numpy()) or image.numel()
                rounded[index] = False
        sizes = self.images.sizes[indices].tolist()
        return [image[:nbytes] for image, nbytes in zip(images, sizes, strict=True)]

    def close(self) -> None:
        """Frees threads and memory."""
        self._storage.close()


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
        packed, coherent = self._packed, self._storage.coherent
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
