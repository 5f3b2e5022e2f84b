"""Which images there are and what their labels are: from a folder, exactly as DALI's own file reader sees it.

``<root>/<class>/<file>``: the class names in byte-wise order are labels 0, 1, 2…, and so are the files of a class. A
class without images takes a label too. What counts as an image goes by the end of its name, without regard to case
(:data:`EXTENSIONS`); hidden files and symbolic links are in, nested folders and files next to the classes are not.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from monai_gds.errors import ImageListError

__all__ = ["EXTENSIONS", "MAX_CLASSES", "ImageList", "check_classes", "list_folder"]

#: What ``fn.readers.file`` takes by default (its argument ``file_filters`` in DALI 2.4).
EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".pnm", ".ppm", ".pgm", ".pbm", ".jp2", ".webp", ".flac", ".ogg",
    ".wav",
)  # fmt: skip

_SUFFIXES = tuple(os.fsencode(e) for e in EXTENSIONS)

#: Labels are int32, as in DALI, which wraps silently beyond it.
MAX_CLASSES = 2**31

StrPath: TypeAlias = "str | os.PathLike[str]"


@dataclass(frozen=True)
class ImageList:
    """Images with their labels.

    Attributes:
        root: what they were listed from, for messages.
        classes: all class names; the label is the index. Names hold any bytes, as ``os.fsdecode`` gives them.
        names: ``<class>/<file>`` of each image, label by label.
        labels: int32, (images,).
        sizes: bytes of each, int64, (images,).
    """

    root: str
    classes: Sequence[str]
    names: Sequence[str]
    labels: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        """The path of an image, or what to call it in a message."""
        return f"{self.root}/{self.names[index]}"


def check_classes(count: int, root: str) -> None:
    """Refuses what labels cannot number.

    Raises:
        ImageListError: no class at all, or more than an int32 holds.
    """
    if count == 0:
        raise ImageListError(f"{root} holds no class: images are expected at {root}/<class>/<file>")
    if count > MAX_CLASSES:
        raise ImageListError(f"{root} holds {count} classes, more than an int32 label can number ({MAX_CLASSES})")


def list_folder(root: StrPath) -> ImageList:
    """Lists ``<root>/<class>/<file>`` with labels and sizes.

    Raises:
        ImageListError: no class, no image, or a symbolic link that leads nowhere.
        OSError: a folder cannot be read.
    """
    top = os.path.abspath(root)
    if not os.path.isdir(top):
        raise ImageListError(f"{top} is not a folder")
    with os.scandir(top) as entries:
        classes = sorted((entry.name for entry in entries if _is_folder(entry)), key=os.fsencode)
    check_classes(len(classes), top)
    names: list[str] = []
    sizes: list[int] = []
    counts: list[int] = []
    for name in classes:
        found = sorted(_images_in(f"{top}/{name}"), key=lambda image: os.fsencode(image[0]))
        names.extend(f"{name}/{file}" for file, _ in found)
        sizes.extend(size for _, size in found)
        counts.append(len(found))
    if not names:
        raise ImageListError(f"{top} holds no image at {top}/<class>/<file> ({', '.join(EXTENSIONS)})")
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)
    return ImageList(top, classes, names, labels, np.asarray(sizes, dtype=np.int64))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return stat.S_ISDIR(_stat(entry).st_mode)


def _stat(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat()
    except OSError as e:
        if not entry.is_symlink():
            raise
        raise ImageListError(f"{entry.path} is a link that leads nowhere ({os.readlink(entry.path)})") from e


def is_image(name: str) -> bool:
    """Whether a file of this name is taken for an image."""
    return os.fsencode(name).lower().endswith(_SUFFIXES)


def _images_in(folder: str) -> list[tuple[str, int]]:
    """(name, bytes) of every image directly in a folder, in no order."""
    found: list[tuple[str, int]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_image(entry.name):
                continue
            st = _stat(entry)
            if stat.S_ISREG(st.st_mode):
                found.append((entry.name, st.st_size))
            elif entry.is_symlink():
                raise ImageListError(f"{entry.path} is called like an image but leads to no regular file")
    return found
