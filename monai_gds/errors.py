"""The errors and warnings of the package. Importing this file imports no library.

They name files, and anyone may have named a file: control characters are escaped in the text of errors and warnings.

Each error also derives from the built-in exception that a caller would expect (``TypeError``, ``OSError``…), so that
code unaware of this package can handle it.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import FrameType, TracebackType

__all__ = [
    "BackendUnavailable",
    "BlockMapError",
    "BrokenImage",
    "BrokenItem",
    "CacheWarning",
    "CodecMissing",
    "DamagedRecord",
    "FailedItem",
    "FileChanged",
    "HashingError",
    "ImageListError",
    "MonaiGdsError",
    "NewerRecord",
    "NotMappable",
    "NotSaved",
    "PopulateError",
    "RecordError",
    "StorageError",
    "UnsupportedType",
    "WorkerDied",
]

#: Control characters other than tab and newline, line separators, bidirectional overrides, lone surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escapes control characters, which could drive the terminal, as ``\x1b``. Tabs and newlines stay.

    Lone surrogates, which names of files that are not UTF-8 contain, are escaped too: they cannot be encoded.

    Example:
        >>> print(printable("\x1b[2Jct.nii"))
        \x1b[2Jct.nii
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def meant(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """What to append to the error of a name that there is not: the one that was probably meant, or ``otherwise``.

    Example:
        >>> meant("batchsize", ["batch_size", "shuffle"])
        ": did you mean 'batch_size'?"
    """
    plain = {one.replace("_", "").lower(): one for one in known}  # so that batchsize is close to batch_size
    near = get_close_matches(name.replace("_", "").lower(), plain, n=1)
    return f": did you mean {plain[near[0]]!r}?" if near else otherwise and f": {otherwise}"


def causes(error: BaseException | None, contexts: bool = False) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on, each once: ``raise e from e`` leads to itself.

    With ``contexts``, also what was being handled where an error was raised from nothing.
    """
    met: set[int] = set()
    while error is not None and id(error) not in met:
        yield error
        met.add(id(error))
        error = error.__cause__ or (error.__context__ if contexts else None)


class MonaiGdsError(Exception):
    """Base class of all errors of this package.

    Example:
        >>> from monai_gds import MonaiGdsError, open_storage
        >>> try:
        ...     storage = open_storage("kvikio", "cpu")
        ... except MonaiGdsError as e:
        ...     print(type(e).__name__)
        BackendUnavailable
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class BackendUnavailable(MonaiGdsError, RuntimeError):
    """A storage backend was requested that does not work on this machine. The message says why and what to install.

    Example:
        >>> from monai_gds import open_storage
        >>> open_storage("kvikio", "cpu")
        Traceback (most recent call last):
        monai_gds.errors.BackendUnavailable: backend='kvikio' does not work here: it serves CUDA targets only; use...
    """


class StorageError(MonaiGdsError, OSError):
    """A read or write failed (short read, device error).

    As with every OSError, ``errno`` is the system's error number, if there is one, and ``filename`` the file.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds import open_storage
        >>> from monai_gds.storage import Reads
        >>> _ = Path("short.bin").write_bytes(b"abc")
        >>> open_storage("posix", "cpu").load(Reads.of("short.bin", [(0, 10)])).wait()
        Traceback (most recent call last):
        monai_gds.errors.StorageError: [Errno 5] file ends at byte 3, 7 bytes were still to come: 'short.bin'
    """


class FileChanged(StorageError):
    """A file was replaced or changed since its identity was recorded.

    Example:
        >>> from monai_gds import FileChanged
        >>> raise FileChanged("file.bin was replaced or changed while it was being read")
        Traceback (most recent call last):
        monai_gds.errors.FileChanged: file.bin was replaced or changed while it was being read
    """


class NotMappable(StorageError):
    """A file cannot be read directly from its device. The message says why (file system, layer, kind of extent).

    Example:
        >>> from monai_gds import BlockMap
        >>> BlockMap.build("/sys/kernel")
        Traceback (most recent call last):
        monai_gds.errors.NotMappable: [Errno 95] cannot be read from its device: it is on a sysfs file system: only ...
    """


class NotSaved(StorageError):
    """A record cannot be written (full or read-only disk, no permission). The message says what to do.

    Training only warns and continues. ``populate`` raises this.

    Example:
        >>> from monai_gds import NotSaved
        >>> raise NotSaved("nothing more can be cached in /nvme/cache: No space left on device (free some space)")
        Traceback (most recent call last):
        monai_gds.errors.NotSaved: nothing more can be cached in /nvme/cache: No space left on device...
    """


class BlockMapError(MonaiGdsError, ValueError):
    """A block map cannot be used: it is not a map, has a newer format, or contradicts itself.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds import BlockMap
        >>> _ = Path("map.json").write_text("[]")
        >>> BlockMap.load("map.json")
        Traceback (most recent call last):
        monai_gds.errors.BlockMapError: map.json is not a block map...
    """


class RecordError(MonaiGdsError, ValueError):
    """A cache record cannot be used.

    A dataset catches this, warns, and computes the item again. Only code that reads records directly sees it.

    Example:
        >>> from monai_gds import DamagedRecord, NewerRecord, RecordError
        >>> issubclass(DamagedRecord, RecordError) and issubclass(NewerRecord, RecordError)
        True
    """


class DamagedRecord(RecordError):
    """A cache record is truncated, altered, or not a record at all.

    Example:
        >>> from monai_gds.records.header import parse
        >>> parse(b"something else" * 300, size=4200)
        Traceback (most recent call last):
        monai_gds.errors.DamagedRecord: it is not a record of monai_gds
    """


class NewerRecord(RecordError):
    """A cache record has a newer format than this version reads.

    Example:
        >>> from monai_gds import NewerRecord
        >>> raise NewerRecord("it has format version 2, and this monai_gds reads up to 1")
        Traceback (most recent call last):
        monai_gds.errors.NewerRecord: it has format version 2, and this monai_gds reads up to 1
    """


class CodecMissing(NewerRecord):
    """A cache record is compressed, and the library that decompresses it is not installed here.

    Example:
        >>> from monai_gds import CodecMissing
        >>> raise CodecMissing("tiles are compressed by Blosc2, which is not installed")
        Traceback (most recent call last):
        monai_gds.errors.CodecMissing: tiles are compressed by Blosc2, which is not installed
    """


class UnsupportedType(MonaiGdsError, TypeError):
    """An item holds a value that a record cannot store. The message names its key path and type.

    Teach records the type with :func:`monai_gds.register_type`, or remove the value with a transform.

    Example:
        >>> from monai_gds.items.tree import encode_item
        >>> encode_item({"image": [object()]})
        Traceback (most recent call last):
        monai_gds.errors.UnsupportedType: item['image'][0]...
    """


class HashingError(MonaiGdsError, TypeError):
    """An item or a transform has no stable hash. The message names the value and the way out.

    Example:
        >>> from monai_gds.keys.hashing import canonical_hash
        >>> canonical_hash({"slices": (i for i in range(3))})
        Traceback (most recent call last):
        monai_gds.errors.HashingError: value['slices'] is a builtins.generator, which cannot be hashed stably...
    """


class ImageListError(MonaiGdsError, ValueError):
    """A folder, packed folder or block map cannot serve as a dataset of images. The message says why.

    Example:
        >>> import os
        >>> from monai_gds.imagenet import open_images
        >>> os.mkdir("empty")
        >>> open_images("empty")
        Traceback (most recent call last):
        monai_gds.errors.ImageListError: ...
    """


class BrokenImage(MonaiGdsError, ValueError):
    """An image file is empty or cannot be decoded.

    Attributes:
        path: the file, or the name of the packed image.
        why: what is wrong with it.

    Example:
        >>> from monai_gds.errors import BrokenImage
        >>> error = BrokenImage("train/cat/1.jpg", "it is empty")
        >>> error.path, str(error)
        ('train/cat/1.jpg', 'train/cat/1.jpg: it is empty')
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why

    def __reduce__(self) -> tuple[type[BrokenImage], tuple[str, str]]:
        return type(self), (self.path, self.why)


@dataclass(frozen=True, order=True, slots=True)
class FailedItem:
    """An item of a dataset whose record could not be made.

    Attributes:
        index: of the item in ``dataset.data``.
        path: the first file that the item names, or an abbreviation of the item if it names none.
        error: type and message of the exception, and of its cause.

    Example:
        >>> from monai_gds import FailedItem
        >>> FailedItem(3, "/data/case_3.nii.gz", "RuntimeError: ...").index
        3
    """

    index: int
    path: str
    error: str


class BrokenItem(MonaiGdsError, RuntimeError):
    """A file of an item cannot be loaded, or more items cannot be made than ``on_error="skip"`` may replace.

    Example:
        >>> from monai_gds import BrokenItem
        >>> str(BrokenItem("/data/case_3.nii.gz: LoadImaged cannot load it: EOFError: it ends early"))
        '/data/case_3.nii.gz: LoadImaged cannot load it: EOFError: it ends early'
    """


class PopulateError(MonaiGdsError, RuntimeError):
    """A cache was not filled completely: items failed, or a rank ended early.

    Every item that did not fail is cached, except those of a rank that ended early.

    Attributes:
        failures: all items that failed, in the order of their indices. The message names the first ten.

    Example:
        >>> from monai.transforms import Compose, LoadImaged
        >>> from monai_gds import GDSDataset, PopulateError
        >>> items = [{"image": "/no/such/file.nii"}]
        >>> try:
        ...     GDSDataset(items, Compose([LoadImaged("image")]), "cache", device="cpu").populate()
        ... except PopulateError as e:
        ...     print([(failure.index, failure.path) for failure in e.failures])
        [(0, '/no/such/file.nii')]
    """

    def __init__(self, message: str, failures: Sequence[FailedItem] = ()) -> None:
        super().__init__(message)
        self.failures = list(failures)


class WorkerDied(MonaiGdsError, RuntimeError):
    """A worker process ended without a result: it crashed, or was killed by a signal or for lack of memory.

    Example:
        >>> from monai_gds import WorkerDied
        >>> raise WorkerDied("a worker process was killed: by a signal")
        Traceback (most recent call last):
        monai_gds.errors.WorkerDied: a worker process was killed: by a signal
    """


class CacheWarning(UserWarning):
    """The cache could not do its work (full disk, damaged record…). The epoch continues without it.

    Example:
        >>> import warnings
        >>> from monai.transforms import Compose, RandFlipd
        >>> from monai_gds import CacheWarning, GDSDataset
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     dataset = GDSDataset([], Compose([RandFlipd("image")]), "cache", device="cpu")
        >>> caught[0].category is CacheWarning, str(caught[0].message)[:18]
        (True, 'nothing is cached:')
    """

    def __str__(self) -> str:
        return printable(super().__str__())


#: Packages whose code lies between a user's line and a warning or an error of ours.
_BETWEEN = frozenset(
    (
        "click", "concurrent", "ignite", "lightning", "lightning_fabric", "monai", "monai_gds", "multiprocessing",
        "pytorch_lightning", "threading", "torch", "typer", "typing", "weakref",
    )
)  # fmt: skip


def warn(message: str, kind: type[Warning] = CacheWarning) -> None:
    """Gives a warning at the line of the user's that led here; in a thread of ours there is none."""
    frame, level = sys._getframe(1), 2
    while frame is not None and _is_between(frame):
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    warnings.warn(message, kind, stacklevel=level)


def shorten(error: BaseException) -> None:
    """Leaves an error only the frames of the user's code, if its message or cause says what the others would.

    The cause of MONAI's error of a transform has the frames of that transform. That of a BrokenItem is a user's loader.
    """
    of_transform = error.__cause__ is not None and str(error).startswith("applying transform ")
    if isinstance(error, (NotSaved, PopulateError)):
        error.__cause__ = None
    elif not (of_transform or isinstance(error, BrokenItem)):
        return
    error.__traceback__ = _of_the_user(error.__traceback__)


def _of_the_user(frames: TracebackType | None) -> TracebackType | None:
    if frames is None:
        return None
    rest = _of_the_user(frames.tb_next)
    if _is_between(frames.tb_frame):
        return rest
    return TracebackType(rest, frames.tb_frame, frames.tb_lasti, frames.tb_lineno)


def _is_between(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN
