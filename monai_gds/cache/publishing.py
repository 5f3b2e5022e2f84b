"""Writes records and notes them in the index. Used by :class:`monai_gds.cache.directory.CacheDirectory`."""

from __future__ import annotations

import contextlib
import os

from monai_gds.cache.index import Index, IndexEntry
from monai_gds.cache.key import Key
from monai_gds.cache.record import pack_record
from monai_gds.cache.temporary import being_written
from monai_gds.cache.tree import EncodedItem
from monai_gds.storage import Storage

__all__ = ["note_record", "write_record"]


def write_record(path: str, key: Key, item: EncodedItem, storage: Storage, durable: bool) -> None:
    """Writes a record beside its place and renames it, so that readers see a whole record or none.

    Raises:
        OSError: disk full, read-only, no permission, input/output error; ``.tmp`` is a link. Nothing is left behind.
    """
    directory = os.path.dirname(path)
    buffers = pack_record(item, key.ingredients())
    with being_written(directory, key.digest, path) as temporary:
        storage.write(temporary, buffers, durable=durable)
    if durable:
        _sync_directory(directory)


def note_record(index: Index, path: str, key: Key, item: EncodedItem) -> None:
    """Notes a record that was just written in the index, if possible."""
    with contextlib.suppress(OSError):  # pruned already
        st = os.stat(path)
        tensors = tuple((name, str(t.dtype)[6:], tuple(t.shape)) for name, t in item.tensors.items())
        pipeline = key.pipeline.digest
        index.describe_pipeline(pipeline, key.pipeline.describe())
        index.note_record(
            IndexEntry(key.digest, key.item, pipeline, st.st_size, st.st_mtime_ns, tensors, dict(key.sources))
        )


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
