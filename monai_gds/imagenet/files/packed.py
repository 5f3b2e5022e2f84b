"""Packed images: the files of an image folder in a few large files, so that a batch takes a few large reads.

A packed folder holds ``index.safetensors`` and ``images-00000.safetensors``, ``images-00001.safetensors``… Each is a
record (:mod:`monai_gds.records.writing`) and thus a valid safetensors file:

* An images file holds ``images`` (U8, the image files back to back; data of 64 KiB and more begin at a multiple of
  4096), ``sizes`` (I64, bytes of each), ``checksums`` (I64), ``labels`` (I32), ``names`` (U8, ``<class>/<file>`` of
  each, ended by a zero byte), and the class names.
* The index holds ``sizes``, ``checksums``, ``labels`` and ``names`` of all images in order, ``files`` (I64, one row per
  file: images, bytes of image data, their offset, bytes of the file), all class names, including classes without
  images, and as text what was packed and how (``made``), which only the next `monai-gds pack` compares.

A reader compares the checksum of an image once per process, in the thread that read it.

Why not tar shards with a DALI index: a tar has a 512-byte header before every image, so images cannot be read in one
piece into a buffer whose slices they are, and labels need another file. A record aligns its data for O_DIRECT, cuFile
and NVMe blocks, carries checksums, and is read by the same backends as everything else here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from monai_gds.base.checksum import checksum
from monai_gds.errors import DamagedRecord, ImageListError, RecordError
from monai_gds.imagenet.files.image_storage import load_item
from monai_gds.imagenet.files.listing import ImageList, StrPath
from monai_gds.items.tree import tensor_bytes
from monai_gds.records import header
from monai_gds.records.entries import read
from monai_gds.records.header import Header
from monai_gds.storage import FileId

INDEX = "index.safetensors"

#: What the index and every file begin with.
FORMAT: dict[str, Any] = {"format": "monai_gds packed images", "version": 2}


@dataclass(frozen=True, kw_only=True)
class PackedImages(ImageList):
    """The images of a packed folder, and its files.

    Attributes:
        files: int64, (files, 4), as in the index.
        checksums: of each image, int64, (images,).
        ids: the identity of each file.
        index: the identity of the index file that this was read from.
        made: of which images it was packed, and how; see :mod:`monai_gds.imagenet.files.packing`.
    """

    files: np.ndarray
    checksums: np.ndarray
    ids: Sequence[FileId]
    index: FileId
    made: str

    @cached_property
    def bounds(self) -> np.ndarray:
        """Index of the first image of each file, then the number of images, (files + 1,)."""
        return np.concatenate([[0], np.cumsum(self.files[:, 0])])

    @cached_property
    def places(self) -> np.ndarray:
        """Where each image begins within its file, (images,)."""
        offsets = np.cumsum(self.sizes) - self.sizes
        places: np.ndarray = offsets + np.repeat(self.files[:, 2] - offsets[self.bounds[:-1]], self.files[:, 0])
        return places

    def file_of(self, indices: np.ndarray) -> np.ndarray:
        """The numbers of the files that hold these images."""
        return np.searchsorted(self.bounds, indices, side="right") - 1

    def file_path(self, file: int) -> str:
        """The path of a file, by its number."""
        return f"{self.root}/{file_name(file)}"

    def check_head(self, file: int, record: Header, nbytes: int) -> None:
        """Raises DamagedRecord unless the header and size of a file are as the index describes the one of this number.

        It may be of another folder, or two files were swapped.
        """
        begin, end = self.bounds[file : file + 2].tolist()
        described = describe(self, begin, end)
        described["checksums"] = torch.from_numpy(self.checksums[begin:end])
        expected = {name: checksum(tensor_bytes(tensor)) for name, tensor in described.items() if name != "classes"}
        found = {name: record.tensors[name].checksum for name in expected if name in record.tensors}
        data = record.tensors.get("images")
        if data is None or found != expected or [data.nbytes, data.offset, nbytes] != self.files[file, 1:].tolist():
            raise DamagedRecord("it does not hold the images that the index lists")


def is_packed(root: StrPath) -> bool:
    """Whether a folder is packed."""
    return os.path.isfile(os.path.join(root, INDEX))


def packed_files(root: StrPath) -> list[str]:
    """The paths of the index and of the files of packed images that are in a folder, in order."""
    files = sorted(name for name in os.listdir(root) if _FILE.fullmatch(name))
    return [os.path.join(root, name) for name in [INDEX, *files]]


def open_packed(root: StrPath) -> PackedImages:
    """Opens a packed folder.

    Raises:
        ImageListError: the index is damaged or of a newer version, or a file is missing or has another size.
    """
    top = os.path.abspath(root)
    index = os.path.join(top, INDEX)
    try:
        identity = FileId.of(index)
        item = load_item(index)
        if not isinstance(item, dict) or item["format"] != FORMAT["format"]:
            raise ImageListError(f"{index} is not a record of packed images")
        if type(item["version"]) is not int:
            raise DamagedRecord(f"its version is {item['version']!r:.40}")
        if item["version"] != FORMAT["version"]:
            remedy = "update monai_gds" if item["version"] > FORMAT["version"] else "pack the folder again"
            raise ImageListError(f"{index} has format version {item['version']}: {remedy}")
        images = _images_in(item, top)
        files = images["files"]
    except (RecordError, KeyError, OSError) as e:
        raise ImageListError(f"{index} is not an index of packed images: {e}; pack the folder again") from e
    ids = []
    for number, nbytes in enumerate(files[:, 3].tolist()):
        path = f"{top}/{file_name(number)}"
        try:
            ids.append(FileId.of(path))
        except FileNotFoundError as e:
            raise ImageListError(f"{path} is missing: copy it again, or pack the folder again") from e
        if ids[-1].size != nbytes:
            raise ImageListError(f"{path} has {ids[-1].size} bytes instead of {nbytes}: copy it again")
    return PackedImages(**images, ids=ids, index=identity, made=str(item.get("made", "")))


def _images_in(item: dict[str, Any], top: str) -> dict[str, Any]:
    """The fields of PackedImages in an index. Raises KeyError or DamagedRecord for what packing never writes."""
    dtypes = {
        "names": torch.uint8,
        "labels": torch.int32,
        **dict.fromkeys(("sizes", "files", "checksums"), torch.int64),
    }
    for key, dtype in dtypes.items():
        axes = 2 if key == "files" else 1
        if not isinstance(item[key], torch.Tensor) or item[key].dtype != dtype or item[key].dim() != axes:
            raise DamagedRecord(f"its {key} are not {dtype} with {axes} axes")
    text, labels, sizes, files, sums = (item[key].numpy() for key in dtypes)
    names = [os.fsdecode(name) for name in text.tobytes().split(b"\0")[:-1]]
    classes = item["classes"]
    if not isinstance(classes, list) or not {str}.issuperset(map(type, classes)):
        raise DamagedRecord("its classes are not a list of names")
    if not names or {len(names)} != {len(labels), len(sizes), len(sums)}:
        raise DamagedRecord(
            f"it has {len(names)} names, {len(labels)} labels, {len(sizes)} sizes, {len(sums)} checksums"
        )
    if classes and (labels.min() < 0 or labels.max() >= len(classes)):  # none if labels are not those of folders
        raise DamagedRecord("it has a label without a class")
    if files.shape[1] != 4 or files.min(initial=0) < 0 or files[:, 0].max(initial=0) > len(names):
        raise DamagedRecord("its table of files is malformed")
    bounds = np.concatenate([[0], np.cumsum(files[:, 0])])
    inside = len(files) > 0 and bool((files[:, 0] > 0).all()) and int(bounds[-1]) == len(sizes)
    # no image is larger than its file, so sums of sizes do not overflow
    if not inside or sizes.min() < 1 or (sizes > np.repeat(files[:, 3], files[:, 0])).any():
        raise DamagedRecord("its files do not hold its images")
    if (np.add.reduceat(sizes, bounds[:-1]) != files[:, 1]).any() or (files[:, 2] > files[:, 3] - files[:, 1]).any():
        raise DamagedRecord("its images are not where its files are")
    images = {"root": top, "classes": classes, "names": names, "labels": labels, "sizes": sizes}
    return {**images, "files": files, "checksums": sums}


def damaged(path: str, why: object) -> DamagedRecord:
    """The error for a file of packed images that is not as it was written."""
    return DamagedRecord(f"{path} is damaged: {why}; copy it again, or pack the folder again")


def verify_packed(root: StrPath, progress: Callable[[int], None] | None = None) -> dict[str, str]:
    """Reads every byte of a packed folder and compares it with the checksums.

    Args:
        root: a packed folder.
        progress: called with the number of files read so far, of :func:`packed_files`.

    Returns:
        What is wrong, by path; empty if nothing is.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds.imagenet import open_images, pack_folder
        >>> from monai_gds.bench.made_up import write_image_folder
        >>> packed = pack_folder(open_images(write_image_folder(Path("images"), 3)), "packed")
        >>> verify_packed("packed")
        {}
    """
    try:
        packed = open_packed(root)
    except ImageListError as e:
        return {os.path.join(root, INDEX): str(e)}
    wrong = {}
    for number in range(len(packed.files)):
        path = packed.file_path(number)
        try:
            with open(path, "rb") as file:
                record = header.read(file.fileno())
                packed.check_head(number, record, os.fstat(file.fileno()).st_size)
                for name, entry in {**record.front(), **record.tensors}.items():
                    read(file, name, entry)
        except (RecordError, OSError) as e:
            wrong[path] = str(damaged(path, e))
        if progress is not None:
            progress(number + 2)
    return wrong


_FILE = re.compile(r"images-[0-9]{5,}\.safetensors")


def file_name(number: int) -> str:
    """The name of a file of packed images, by its number."""
    return f"images-{number:05d}.safetensors"


def describe(images: ImageList, begin: int, end: int) -> dict[str, Any]:
    """What a file with images ``begin`` to ``end`` holds besides their bytes."""
    names = b"".join(os.fsencode(name) + b"\0" for name in images.names[begin:end])
    return {
        "classes": list(images.classes),
        "names": torch.frombuffer(bytearray(names), dtype=torch.uint8),
        "labels": torch.from_numpy(images.labels[begin:end].copy()),
        "sizes": torch.from_numpy(images.sizes[begin:end].copy()),
    }
