"""Every error and warning the package raises on its own account. Importing this file imports nothing else.

Each error also derives from the built-in exception a caller would expect (``TypeError``, ``OSError``…), so code that
does not know this package can still handle it.
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailable",
    "BlockMapError",
    "BrokenImage",
    "CacheWarning",
    "DamagedRecord",
    "FileChanged",
    "HashingError",
    "ImageListError",
    "MonaiGdsError",
    "NewerRecord",
    "NotMappable",
    "RecordError",
    "StorageError",
    "UnsupportedType",
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
