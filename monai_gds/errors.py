"""Every error and warning the package raises on its own account. Importing this file imports no library.

Each error also derives from the built-in exception a caller would expect (``TypeError``, ``OSError``…), so code that
does not know this package can still handle it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "BackendUnavailable",
    "BlockMapError",
    "BrokenImage",
    "CacheWarning",
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


class MonaiGdsError(Exception):
    """Base of every error of this package: catch it to catch them all.

    Example:
        >>> from monai_gds import MonaiGdsError, open_storage
        >>> try:
        ...     storage = open_storage("kvikio", "cpu")
        ... except MonaiGdsError as e:
        ...     print(type(e).__name__)
        BackendUnavailable
    """


class BackendUnavailable(MonaiGdsError, RuntimeError):
    """A storage backend was named that does not work on this machine; the message says why and what to install.

    Example:
        >>> from monai_gds import open_storage
        >>> open_storage("kvikio", "cpu")
        Traceback (most recent call last):
        monai_gds.errors.BackendUnavailable: backend='kvikio' does not work here: it serves CUDA targets only; use...
    """


class StorageError(MonaiGdsError, OSError):
    """A read or a write did not do what was asked (short read, device error).

    As of every OSError, ``errno`` says what it was where the system did, and ``filename`` of which file.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds import open_storage
        >>> _ = Path("short.bin").write_bytes(b"abc")
        >>> open_storage("posix", "cpu").load("short.bin", [(0, 10)])
        Traceback (most recent call last):
        monai_gds.errors.StorageError: [Errno 5] file ends at byte 3, before byte 10: 'short.bin'
    """


class FileChanged(StorageError):
    """The file is not the one that was expected: it was replaced or changed since it was looked at.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds import open_storage
        >>> from monai_gds.storage import FileId
        >>> file = Path("file.bin")
        >>> _ = file.write_bytes(b"before")
        >>> looked_at = FileId.of(file)
        >>> _ = file.write_bytes(b"and after")
        >>> open_storage("posix", "cpu").load("file.bin", [(0, 6)], expect=looked_at)
        Traceback (most recent call last):
        monai_gds.errors.FileChanged: file.bin was replaced or changed while it was being read
    """


class NotMappable(StorageError):
    """The bytes of a file cannot be read from its device; the message says why (file system, layer, kind of extent).

    Example:
        >>> from monai_gds import BlockMap
        >>> BlockMap.build("/sys/kernel")
        Traceback (most recent call last):
        monai_gds.errors.NotMappable: [Errno 95] cannot be read from its device: it is on a sysfs file system: only ...
    """


class NotSaved(StorageError):
    """A record cannot be written (full or read-only disk, no permission); the message says what to do.

    An epoch warns of it and goes on; only who fills a cache and does nothing else is stopped by it.

    Example:
        >>> from monai_gds import NotSaved
        >>> raise NotSaved("nothing more can be cached in /nvme/cache: No space left on device (free some space)")
        Traceback (most recent call last):
        monai_gds.errors.NotSaved: nothing more can be cached in /nvme/cache: No space left on device...
    """


class BlockMapError(MonaiGdsError, ValueError):
    """A block map cannot be used: it is no map, of a newer format, or contradicts itself.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds import BlockMap
        >>> _ = Path("map.json").write_text("[]")
        >>> BlockMap.load("map.json")
        Traceback (most recent call last):
        monai_gds.errors.BlockMapError: map.json is no block map...
    """


class RecordError(MonaiGdsError, ValueError):
    """A cache record cannot be used.

    A dataset catches it, warns, and computes the item anew; it reaches only who reads records directly.

    Example:
        >>> from monai_gds import DamagedRecord, NewerRecord, RecordError
        >>> issubclass(DamagedRecord, RecordError) and issubclass(NewerRecord, RecordError)
        True
    """


class DamagedRecord(RecordError):
    """A cache record is truncated, altered, or is no record at all.

    Example:
        >>> from monai_gds.cache.record import parse_header
        >>> parse_header(b"something else" * 300, size=4200)
        Traceback (most recent call last):
        monai_gds.errors.DamagedRecord: it is not a record of monai_gds
    """


class NewerRecord(RecordError):
    """A cache record was written by a newer version of the format than this one reads.

    Example:
        >>> from monai_gds import NewerRecord
        >>> raise NewerRecord("it has format version 2, and this monai_gds reads up to 1")
        Traceback (most recent call last):
        monai_gds.errors.NewerRecord: it has format version 2, and this monai_gds reads up to 1
    """


class UnsupportedType(MonaiGdsError, TypeError):
    """An item holds a value that a record cannot store; the message names its key path and type.

    Teach records the type with :func:`monai_gds.register_type`, or drop the value with a transform.

    Example:
        >>> from monai_gds.cache.tree import encode_item
        >>> encode_item({"image": [object()]})
        Traceback (most recent call last):
        monai_gds.errors.UnsupportedType: item['image'][0]...
    """


class HashingError(MonaiGdsError, TypeError):
    """An item or a transform cannot be hashed stably; the message names the value and the way out.

    Example:
        >>> from monai_gds.cache.hashing import canonical_hash
        >>> canonical_hash({"slices": (i for i in range(3))})
        Traceback (most recent call last):
        monai_gds.errors.HashingError: value['slices'] is a builtins.generator, which cannot be hashed stably...
    """


class ImageListError(MonaiGdsError, ValueError):
    """A folder, packed folder or block map cannot serve as a dataset of images; the message says why.

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
        path: the file, or the packed image's name.
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
        path: the file that the item names first, or the item itself in short where it names none.
        error: type and message of what was raised, and of what caused it.

    Example:
        >>> from monai_gds import FailedItem
        >>> FailedItem(3, "/data/case_3.nii.gz", "RuntimeError: ...").index
        3
    """

    index: int
    path: str
    error: str


class PopulateError(MonaiGdsError, RuntimeError):
    """A cache was not filled: items failed, or a rank did not come to its end.

    Every item that did not fail is cached, but for those of such a rank.

    Attributes:
        failures: all the items that failed, in the order of their indices; the message names the first ten.

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

    def __reduce__(self) -> tuple[type[PopulateError], tuple[str, list[FailedItem]]]:
        return type(self), (str(self), self.failures)


class WorkerDied(MonaiGdsError, RuntimeError):
    """A worker process ended without an answer: killed by a signal or for want of memory, or crashed.

    Example:
        >>> import os, signal
        >>> from monai_gds.workers import Workers
        >>> with Workers(lambda number: os.kill(os.getpid(), number), 1, "fork") as workers:
        ...     print(type(workers.submit(signal.SIGKILL).exception()).__name__)
        WorkerDied
    """


class CacheWarning(UserWarning):
    """The cache could not do its work (full disk, damaged record…); the epoch goes on without it.

    Example:
        >>> import warnings
        >>> from monai.transforms import Compose, RandFlipd
        >>> from monai_gds import CacheWarning, GDSDataset
        >>> with warnings.catch_warnings(record=True) as told:
        ...     dataset = GDSDataset([], Compose([RandFlipd("image")]), "cache", device="cpu")
        >>> told[0].category is CacheWarning, str(told[0].message)[:18]
        (True, 'nothing is cached:')
    """
