"""Lists the images of a folder, or of a block map of it, with their labels, exactly as DALI's own file reader does.

Images are at ``<root>/<class>/<file>``. Labels 0, 1, 2… are the classes in byte-wise order of their names, including
those without images; the files of a class are in byte-wise order too. A file counts as an image by the end of its name,
whatever its case (:data:`EXTENSIONS`). Hidden files and symbolic links are listed; nested folders, and files next to
the classes, are not.

A folder without any folder in it, in which DALI's reader finds nothing, is listed as DALI lists the same files by
``files=``: in byte-wise order, with their positions as labels.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from monai_gds.errors import BlockMapError, ImageListError

if TYPE_CHECKING:
    from monai_gds.storage.blockmap.block_map import BlockMap

#: The extensions of ``fn.readers.file`` (the default of its argument ``file_filters`` in DALI 2.4).
EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".pnm", ".ppm", ".pgm", ".pbm", ".jp2", ".webp", ".flac", ".ogg",
    ".wav",
)  # fmt: skip

#: The file that an unfinished packed folder holds; see :mod:`monai_gds.imagenet.files.packing`.
UNFINISHED = "packing.json"

_SUFFIXES = tuple(os.fsencode(e) for e in EXTENSIONS)

StrPath: TypeAlias = "str | os.PathLike[str]"


@dataclass(frozen=True)
class ImageList:
    """Images with their labels.

    Attributes:
        root: the folder they are in.
        classes: all class names, in the order of their labels; none where labels are not those of folders. Names hold
            any bytes, decoded by ``os.fsdecode``.
        names: the path of each image, relative to ``root`` or absolute.
        labels: int32, (images,).
        sizes: bytes of each, int64, (images,).
        blocks: the block map that was listed, if it was one.
    """

    root: str
    classes: Sequence[str]
    names: Sequence[str]
    labels: np.ndarray
    sizes: np.ndarray
    blocks: BlockMap | None = None

    @property
    def bounds(self) -> np.ndarray | None:
        """None; see :class:`~monai_gds.imagenet.files.packed.PackedImages`."""
        return None

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        """The path of an image; in a packed folder, a name for messages."""
        name = self.names[index]
        return name if name.startswith("/") else f"{self.root}/{name}"


def list_folder(root: StrPath) -> ImageList:
    """Lists ``<root>/<class>/<file>`` with labels and sizes, or ``<root>/<file>`` where there is no folder in ``root``.

    Raises:
        ImageListError: there is no image, a symbolic link is dead, or the folder to name is ``train`` or another in
            ``root``.
        OSError: a folder cannot be read.
    """
    top = os.path.abspath(root)
    if not os.path.isdir(top):
        raise ImageListError(f"{top} is not a folder")
    with os.scandir(top) as entries:
        classes = sorted((entry.name for entry in entries if stat.S_ISDIR(_stat(entry).st_mode)), key=os.fsencode)
    if not classes:
        return _list_flat(top)
    names: list[str] = []
    labels: list[int] = []
    sizes: list[int] = []
    for label, name in enumerate(classes):
        found = _sorted_images(f"{top}/{name}")
        if not found and name == "train" and _is_root(f"{top}/train"):
            raise ImageListError(_name_inner(top, name))
        names += [f"{name}/{file}" for file, _ in found]
        labels += [label] * len(found)
        sizes += [size for _, size in found]
    if not names:
        if os.path.exists(f"{top}/{UNFINISHED}"):
            return _list_flat(top)
        if (inner := next((name for name in classes if _is_root(f"{top}/{name}")), None)) is not None:
            raise ImageListError(_name_inner(top, inner))
        message = f"{top} holds no image at {top}/<class>/<file> ({', '.join(EXTENSIONS)})"
        if _sorted_images(top):
            message += f"; images directly in it are not listed, because it holds the folder {classes[0]!r}: move the "
            message += "folder, or name the images by files="
        raise ImageListError(message)
    return ImageList(top, classes, names, np.asarray(labels, dtype=np.int32), np.asarray(sizes, dtype=np.int64))


def _list_flat(top: str) -> ImageList:
    found = _sorted_images(top)
    if not found:
        if os.path.exists(f"{top}/{UNFINISHED}"):
            raise ImageListError(
                f"{top} is not packed yet: where packing it was interrupted, run the same `monai-gds pack` again"
            )
        raise ImageListError(
            f"{top} holds no image: images are expected at {top}/<class>/<file>, or at {top}/<file> "
            f"({', '.join(EXTENSIONS)})"
        )
    sizes = np.asarray([size for _, size in found], dtype=np.int64)
    return ImageList(top, (), [file for file, _ in found], np.arange(len(found), dtype=np.int32), sizes)


def _name_inner(top: str, name: str) -> str:
    return f"{top} is not a folder of classes, but {top}/{name} is: name {top}/{name}"


def _is_root(folder: str) -> bool:
    """Whether there are images at ``<folder>/<class>/<file>``."""
    try:
        with os.scandir(folder) as entries:
            return any(any(map(is_image, os.listdir(entry.path))) for entry in entries if entry.is_dir())
    except OSError:  # it was only a guess
        return False


def list_block_map(map_: StrPath | BlockMap) -> ImageList:
    """Lists the images of a block map as :func:`list_folder` lists those of the folder it was built from.

    A plain map does not record where that folder is: without a parent, it is looked for beside the map and in the
    current folder. It holds sizes in whole blocks, which are those of images whose files are not there.

    Raises:
        ImageListError: it is not a block map, or holds no image ``<root>/<class>/<file>``.
    """
    from monai_gds.storage.blockmap.block_map import BlockMap

    blocks, name, beside = (map_, "the map", ".") if isinstance(map_, BlockMap) else _loaded(map_)
    parts = [path.split("/") for path in (*blocks, *blocks.unmapped)]
    images = sorted((p for p in parts if len(p) == 3 and is_image(p[2])), key=lambda p: [os.fsencode(x) for x in p])
    if not images:
        raise ImageListError(f"{name} maps no image <root>/<class>/<file>")
    root, *others = {image[0] for image in images}
    if others:
        raise ImageListError(f"{name} maps more than one folder: build a map of one")
    folders = [folder.split("/") for folder in blocks.folders]
    classes = sorted({p[1] for p in images} | {p[1] for p in folders if len(p) == 2}, key=os.fsencode)
    label = {name: i for i, name in enumerate(classes)}
    paths = ["/".join(p) for p in images]
    sizes = [(blocks.unmapped[path] if path in blocks.unmapped else blocks[path]).size for path in paths]
    top = _place(root, [beside, "."] if blocks.parent is None else [blocks.parent])
    if blocks.origin is None and os.path.isdir(top):
        parent = os.path.dirname(top)
        sizes = [_exact(f"{parent}/{path}", nbytes) for path, nbytes in zip(paths, sizes, strict=True)]
    return ImageList(
        root=top,
        classes=classes,
        names=["/".join(p[1:]) for p in images],
        labels=np.asarray([label[p[1]] for p in images], dtype=np.int32),
        sizes=np.asarray(sizes, dtype=np.int64),
        blocks=blocks,
    )


def _loaded(file: StrPath) -> tuple[BlockMap, str, str]:
    """A saved map, its name for messages, and the folder it lies in."""
    from monai_gds.storage.blockmap.block_map import BlockMap

    try:
        return BlockMap.load(file), repr(os.fspath(file)), os.path.dirname(os.path.abspath(file))
    except BlockMapError as e:
        not_json = isinstance(e.__cause__, (json.JSONDecodeError, UnicodeDecodeError))
        raise ImageListError(f"{e}{'; for a list of files, use file_list=' * not_json}") from e


def _place(folder: str, parents: Sequence[str]) -> str:
    """The path of a folder below the first of ``parents`` that has it, or else below the first."""
    paths = [os.path.abspath(os.path.join(parent, folder)) for parent in parents]
    return next(filter(os.path.isdir, paths), paths[0])


def _exact(path: str, in_blocks: int) -> int:
    """The size of an image, of which only the size of its blocks is known if it is not there."""
    with suppress(OSError):
        return min(os.stat(path).st_size, in_blocks)
    return in_blocks


def _stat(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat()
    except OSError as e:
        if not entry.is_symlink():
            raise
        raise ImageListError(f"{entry.path} is a link that leads nowhere ({os.readlink(entry.path)})") from e


def is_image(name: str) -> bool:
    """Whether a file of this name counts as an image."""
    return os.fsencode(name).lower().endswith(_SUFFIXES)


def _sorted_images(folder: str) -> list[tuple[str, int]]:
    """(name, bytes) of every image directly in a folder, in byte-wise order."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_image(entry.name):
                st = _stat(entry)
                if stat.S_ISREG(st.st_mode):
                    found.append((entry.name, st.st_size))
                elif entry.is_symlink():
                    raise ImageListError(f"{entry.path} is named like an image, but does not lead to a regular file")
    return sorted(found, key=lambda image: os.fsencode(image[0]))
