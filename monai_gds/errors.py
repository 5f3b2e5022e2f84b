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
    """Base of every error of this package."""


class BackendUnavailable(MonaiGdsError, RuntimeError):
    """A storage backend was named that does not work on this machine; the message says why and what to install."""


class StorageError(MonaiGdsError, OSError):
    """A read or a write did not do what was asked (short read, device error)."""


class FileChanged(StorageError):
    """The file is not the one that was expected: it was replaced or changed since it was looked at."""


class NotMappable(StorageError):
    """The bytes of a file cannot be read from its device; the message says why (file system, layer, kind of extent)."""


class BlockMapError(MonaiGdsError, ValueError):
    """A block map cannot be used: it is no map, of a newer format, or contradicts itself."""


class RecordError(MonaiGdsError, ValueError):
    """A cache record cannot be used."""


class DamagedRecord(RecordError):
    """A cache record is truncated, altered, or is no record at all."""


class NewerRecord(RecordError):
    """A cache record was written by a newer version of the format than this one reads."""


class UnsupportedType(MonaiGdsError, TypeError):
    """An item holds a value that a record cannot store; the message names its key path and type."""


class HashingError(MonaiGdsError, TypeError):
    """An item or a transform cannot be hashed stably; the message names the value and the way out."""


class ImageListError(MonaiGdsError, ValueError):
    """A folder, packed folder or block map cannot serve as a dataset of images; the message says why."""


class BrokenImage(MonaiGdsError, ValueError):
    """An image file is empty or cannot be decoded.

    Attributes:
        path: the file, or the packed image's name.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why

    def __reduce__(self) -> tuple[type[BrokenImage], tuple[str, str]]:
        return type(self), (self.path, self.why)


class CacheWarning(UserWarning):
    """The cache could not do its work (full disk, damaged record…); the epoch goes on without it."""
