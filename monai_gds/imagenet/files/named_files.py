"""Images that are named one by one, in a list or in a text file, as DALI's own file reader takes them.

Any file may be named, whatever the end of its name, and more than once. Two things differ from DALI: a file that is
missing or not regular is an error when it is listed, not when it is read; and a label beyond 32 bits is an error, where
DALI keeps the lower 32.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence

import numpy as np

from monai_gds.errors import ImageListError
from monai_gds.imagenet.files.listing import ImageList, StrPath

#: A line of a file list: the file, which may hold spaces, and the label, which may begin with zeros.
_LINE = re.compile(rb"(.*\S)\s+0*([0-9]{1,10})", re.DOTALL)


def list_files(
    files: StrPath | Sequence[StrPath], labels: Sequence[int] | None = None, root: StrPath = ""
) -> ImageList:
    """Lists files by their paths, as ``fn.readers.file(files=…, labels=…, file_root=…)`` does.

    Args:
        files: paths, relative to ``root``.
        labels: one for each file; by default 0, 1, 2…
        root: a folder; by default the current one.

    Raises:
        ImageListError: there is no file, or one is missing or not a regular file.
        ValueError: the numbers of labels and files differ, or a label is beyond 32 bits.
    """
    names = [os.fspath(file) for file in ([files] if isinstance(files, (str, os.PathLike)) else files)]
    return _listed(names, labels, root, lambda i: f"files[{i}]")


def read_file_list(file: StrPath, root: StrPath | None = None) -> ImageList:
    """Lists the files of a text file of lines ``file label``, as ``fn.readers.file(file_list=…, file_root=…)`` does.

    Args:
        file: the text file. Files may have spaces in their names, but not at the end; empty lines are skipped.
        root: what the files are relative to; by default the folder of the text file.

    Raises:
        ImageListError: a line is not a file and a label, or its file is missing or not a regular file.
        OSError: the text file cannot be read.
    """
    names, labels, lines = [], [], []
    with open(file, "rb") as opened:
        for number, line in enumerate(opened.read().split(b"\n"), start=1):
            text = line.partition(b"\0")[0].rstrip()
            if not text:
                continue
            found = _LINE.fullmatch(text)
            if found is None or int(found[2]) >= 2**31:
                raise ImageListError(
                    f"{os.fspath(file)}, line {number}: {os.fsdecode(text)[:200]!r} is not a file and a label, a "
                    "number from 0 to 2147483647, with a space between them"
                )
            names.append(os.fsdecode(found[1]))
            labels.append(int(found[2]))
            lines.append(number)
    top = os.path.dirname(os.path.abspath(file)) if root is None else root
    return _listed(names, labels, top, lambda i: f"{os.fspath(file)}, line {lines[i]}")


def labels_array(labels: Sequence[int] | None, count: int) -> np.ndarray:
    """Labels of ``count`` images, int32 (count,); by default 0, 1, 2…

    Raises:
        ValueError: their number is not ``count``, or they are not integers of 32 bits.
    """
    if isinstance(labels, (str, bytes, os.PathLike)):
        raise ValueError(
            f"labels={labels!r} are not labels: give the numbers, as numpy.loadtxt(…, dtype=int) reads them from a "
            "file; a text file with a line `file label` for each image is file_list="
        )
    given = np.arange(count) if labels is None else np.asarray(labels)
    if given.shape != (count,):
        raise ValueError(f"labels of shape {given.shape} for {count} images: give one for each")
    if given.dtype.kind not in "iu":
        raise ValueError(f"labels are int32, not {given.dtype}")
    array = given.astype(np.int32)
    if (array != given).any():
        raise ValueError(f"labels are int32, not {given.dtype} from {given.min()} to {given.max()}")
    return array


def _listed(names: list[str], labels: Sequence[int] | None, root: StrPath, where: Callable[[int], str]) -> ImageList:
    if not names:
        raise ImageListError("no file is named")
    top, sizes = os.path.abspath(root), np.zeros(len(names), dtype=np.int64)
    images = ImageList(top, (), names, labels_array(labels, len(names)), sizes)
    for i in range(len(names)):
        try:
            found = os.stat(images.path(i))
        except (OSError, ValueError) as e:  # ValueError: a null byte in the name
            why = e.strerror if isinstance(e, OSError) else e
            raise ImageListError(f"{where(i)}: {images.path(i)!r} cannot be read: {why}") from e
        if not stat.S_ISREG(found.st_mode):
            raise ImageListError(f"{where(i)}: {images.path(i)!r} is not a regular file")
        images.sizes[i] = found.st_size
    return images
