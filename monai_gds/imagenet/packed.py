"""Packed images: the files of an image folder in a few large ones, so that a batch costs a few large reads.

A packed folder holds ``index.safetensors`` and ``images-00000.safetensors``, ``images-00001.safetensors``…, each of
them a record (:mod:`monai_gds.cache.record`), that is, a valid safetensors file:

* an images file: ``images`` (U8, the image files back to back, from 64 KiB on beginning at a multiple of 4096),
  ``sizes`` (I64, bytes of each), ``labels`` (I32), ``names`` (U8, ``<class>/<file>`` of each, ended by a zero byte),
  and the class names;
* the index: ``sizes``, ``labels`` and ``names`` of all images in order, ``files`` (I64, one row a file: images, bytes
  of image data, where they begin, bytes of the file), and all class names, those without images too.

Why records and not tar shards with a DALI index: a tar holds a 512-byte header before every image, so a batch cannot be
read in one piece into the buffer whose slices are the images; its index is a text file that only DALI reads, and labels
need a file of their own. A record has offsets, labels and names in one place, begins its data where O_DIRECT, cuFile
and NVMe blocks want them, carries checksums, and is read by the same backends as everything else here. Any safetensors
tool opens it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from monai_gds.cache.checksum import checksum
from monai_gds.cache.directory import read_record
from monai_gds.cache.record import pack_record, parse_header
from monai_gds.cache.tree import compile_tree, encode_item, tensor_of
from monai_gds.errors import BrokenImage, DamagedRecord, ImageListError, RecordError
from monai_gds.imagenet.listing import ImageList, StrPath, check_classes
from monai_gds.storage import FileId, Read, Storage, open_storage

__all__ = ["FILE_BYTES", "INDEX", "PackedImages", "empty_folder", "is_packed", "open_packed", "pack_folder"]

INDEX = "index.safetensors"

#: Bytes of images a file: some 300 of ImageNet's. Large enough to be read in several pieces at once, small enough that
#: a window of eight and as much again read ahead fit in any memory.
FILE_BYTES = 32 << 20

_FORMAT = {"format": "monai_gds packed images", "version": 1}


@dataclass(frozen=True)
class PackedImages:
    """An opened packed folder.

    Attributes:
        images: its images.
        files: int64, (files, 4): images, bytes of image data, where these begin, bytes of the file.
    """

    images: ImageList
    files: np.ndarray

    @cached_property
    def bounds(self) -> np.ndarray:
        """Number of the first image of each file, and the number of images, (files + 1,)."""
        return np.concatenate([[0], np.cumsum(self.files[:, 0])])

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each image begins among the image data of all files, (images + 1,)."""
        return np.concatenate([[0], np.cumsum(self.images.sizes)])

    def file_of(self, indices: np.ndarray) -> np.ndarray:
        """The numbers of the files that hold these images."""
        return np.searchsorted(self.bounds, indices, side="right") - 1

    def extent(self, file: int, begin: int, end: int) -> tuple[str, int, int]:
        """Path, offset and bytes of the images ``begin`` to ``end`` of one file."""
        skip = self.offsets[begin] - self.offsets[self.bounds[file]]
        nbytes = self.offsets[end] - self.offsets[begin]
        return f"{self.images.root}/{_file_name(file)}", int(self.files[file, 2] + skip), int(nbytes)

    def identity(self, file: int) -> FileId:
        """What one file has to be."""
        return FileId.sized(int(self.files[file, 3]))


def is_packed(root: StrPath) -> bool:
    """Whether a folder is a packed one."""
    return os.path.isfile(os.path.join(root, INDEX))


def open_packed(root: StrPath) -> PackedImages:
    """Opens a packed folder.

    Raises:
        ImageListError: the index is damaged or of a newer version, or a file is missing or not as long as it should be.
    """
    top = os.path.abspath(root)
    index = os.path.join(top, INDEX)
    try:
        item = _load(index)
        if not isinstance(item, dict) or item["format"] != _FORMAT["format"]:
            raise ImageListError(f"{index} is a record of something else than packed images")
        if item["version"] > _FORMAT["version"]:
            raise ImageListError(f"{index} has format version {item['version']}: update monai_gds")
        names = _split_names(item["names"])
        labels, sizes, files = (item[key].numpy() for key in ("labels", "sizes", "files"))
        images = ImageList(top, item["classes"], names, labels, sizes)
    except (RecordError, KeyError, OSError) as e:
        raise ImageListError(f"{index} is no index of packed images: {e}; pack the folder again") from e
    for number, nbytes in enumerate(files[:, 3].tolist()):
        path = f"{top}/{_file_name(number)}"
        try:
            found = os.stat(path).st_size
        except FileNotFoundError as e:
            raise ImageListError(f"{path} is missing: copy it again, or pack the folder again") from e
        if found != nbytes:
            raise ImageListError(f"{path} has {found} bytes instead of {nbytes}: copy it again")
    return PackedImages(images, files)


def pack_folder(
    images: ImageList,
    out: StrPath,
    *,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int], None] | None = None,
) -> PackedImages:
    """Writes the images of a folder as a packed one. The index comes last: without it nothing is taken for packed.

    Args:
        images: what to pack.
        out: a folder, made when it is missing; must not hold packed images yet.
        file_bytes: image bytes a file; an image larger than that gets a file of its own.
        progress: called with the number of images packed so far.

    Raises:
        ImageListError: ``out`` holds something already, or is a file.
        BrokenImage: an image file is empty.
        OSError: an image cannot be read, or the disk is full.
        ValueError: ``file_bytes`` is not positive.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds.imagenet import open_images
        >>> from monai_gds.imagenet.synthetic import write_image_folder
        >>> folder = write_image_folder(Path("images"), 3)  # made up, in ImageNet's layout
        >>> packed = pack_folder(open_images(folder), "packed")
        >>> len(open_images("packed").images)
        3
    """
    if file_bytes < 1:
        raise ValueError(f"file_bytes={file_bytes}: must be positive")
    check_classes(len(images.classes), images.root)
    empty = np.flatnonzero(images.sizes == 0)
    if len(empty):
        raise BrokenImage(images.path(int(empty[0])), "it is empty and cannot be packed")
    top = empty_folder(out)
    storage = open_storage("posix", "cpu")
    rows: list[list[int]] = []
    done = 0
    try:
        for begin, end in _portions(images.sizes, file_bytes):
            rows.append(_write_file(storage, images, begin, end, top / _file_name(len(rows))))
            done += end - begin
            if progress is not None:
                progress(done)
        index = {**_FORMAT, **_describe(images, 0, len(images)), "files": torch.tensor(rows)}
        _write(storage, top / f"{INDEX}.tmp", index)
        os.replace(top / f"{INDEX}.tmp", top / INDEX)
    finally:
        storage.close()
    return open_packed(top)


def empty_folder(out: StrPath) -> Path:
    """The folder to pack into, made when it is missing.

    Raises:
        ImageListError: it is a file, or holds something already.
    """
    top = Path(out)
    try:
        top.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as e:
        file = next(path for path in (top, *top.parents) if path.exists())
        raise ImageListError(f"{file} is a file: name a folder to pack into, a new or an empty one") from e
    if any(top.iterdir()):
        raise ImageListError(f"{top} is not empty: choose another folder to pack into")
    return top


def _file_name(number: int) -> str:
    return f"images-{number:05d}.safetensors"


def _portions(sizes: np.ndarray, limit: int) -> Iterator[tuple[int, int]]:
    """Consecutive images of together no more than ``limit`` bytes, one at least: (first, one after the last)."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    begin = 0
    while begin < len(sizes):
        end = max(begin + 1, int(np.searchsorted(offsets, offsets[begin] + limit, side="right")) - 1)
        yield begin, end
        begin = end


def _describe(images: ImageList, begin: int, end: int) -> dict[str, Any]:
    names = b"".join(os.fsencode(name) + b"\0" for name in images.names[begin:end])
    return {
        "classes": list(images.classes),
        "names": torch.frombuffer(bytearray(names), dtype=torch.uint8),
        "labels": torch.from_numpy(images.labels[begin:end].copy()),
        "sizes": torch.from_numpy(images.sizes[begin:end].copy()),
    }


def _split_names(data: torch.Tensor) -> Sequence[str]:
    return [os.fsdecode(name) for name in data.numpy().tobytes().split(b"\0")[:-1]]


def _write_file(storage: Storage, images: ImageList, begin: int, end: int, path: Path) -> list[int]:
    """Writes one images file; gives its row of the index."""
    sizes = images.sizes[begin:end].tolist()
    data = storage.allocate(sum(sizes))
    parts = torch.split(data, sizes)
    storage.read(
        [
            Read(images.path(i), 0, part, FileId.sized(part.numel()))
            for i, part in zip(range(begin, end), parts, strict=True)
        ]
    )
    head = _write(storage, path, {**_FORMAT, **_describe(images, begin, end), "images": data})
    size = path.stat().st_size
    return [end - begin, sum(sizes), parse_header(head, size).tensors["images"].offset, size]


def _write(storage: Storage, path: Path, item: dict[str, Any]) -> bytes:
    """Writes a record; gives its header."""
    buffers = pack_record(encode_item(item), key={})
    storage.write(str(path), buffers)
    return bytes(buffers[0])  # the header comes first


def _load(path: str) -> Any:
    storage = open_storage("posix", "cpu")
    try:
        record, file, arrays = read_record(path, storage)
        ranges = [(entry.offset, entry.nbytes) for entry in record.tensors.values()]
        raw = storage.load(path, ranges, file, mapped=False).wait()
        tensors = {}
        for (name, entry), data in zip(record.tensors.items(), raw, strict=True):
            if checksum(data) != entry.checksum:
                raise DamagedRecord(f"the bytes of {name!r} do not match their checksum")
            tensors[name] = tensor_of(data, entry.dtype, entry.shape)
        return compile_tree(record.tree, arrays, record.tensors)(tensors)
    finally:
        storage.close()
