"""The cache directory: one record file per item, published by rename, read back through a storage backend.

    <directory>/<32 hex digits>.v2.safetensors  records
    <directory>/.tmp/<digest>.<owner>.<n>       records being written, see :mod:`monai_gds.cache.temporary`
    <directory>/.index/                         advisory notes about records and sources, rebuilt when missing

A reader sees a whole record or none, and a mapping of a record stays valid when the record is replaced. Any number of
processes may fill one directory. Nothing here ends an epoch: a record that cannot be read is reported once and counts
as absent, one that cannot be written is reported once and left out.

The parts: :mod:`.reading`, :mod:`.heads` (what is kept in memory), :mod:`.problems` (warnings).
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from monai_gds.cache import temporary
from monai_gds.cache.header import SUFFIX
from monai_gds.cache.heads import Form
from monai_gds.cache.index import Index, IndexEntry
from monai_gds.cache.key import Key
from monai_gds.cache.problems import Problems, with_advice
from monai_gds.cache.reading import PendingItem, RecordReader, Verify
from monai_gds.cache.record import pack_record
from monai_gds.cache.single_flight import Leases
from monai_gds.cache.source_memo import SourceMemo
from monai_gds.cache.tree import EncodedItem
from monai_gds.cache.writer import process_writer
from monai_gds.errors import CacheWarning
from monai_gds.storage import Storage

__all__ = ["CacheDirectory", "folder_named", "prepare", "tidy"]


class CacheDirectory:
    """Reads and publishes the records of one directory, for one process and target device.

    Args:
        path: the directory; made when it is missing.
        storage: moves the bytes.
        durable: a published record survives a power cut (fsync of file and directory). If False, a record torn by a
            power cut is found by its checksums.
        verify: see :data:`~monai_gds.cache.reading.Verify`.
        form: the form in which items come out of records.
        index: where published records are noted, or None.
        codec: what new records are compressed with, see :data:`blosc.CODECS`, or None.
        unmade: :func:`prepare` has warned that the directory cannot be made, so nothing is reported until it exists.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        storage: Storage,
        *,
        durable: bool = False,
        verify: Verify = "first",
        form: Form = Form(),  # noqa: B008 (immutable)
        index: Index | None = None,
        codec: str | None = None,
        unmade: bool = False,
    ) -> None:
        self.path = os.path.abspath(path)
        self.index = index
        self._storage = storage
        self._durable = durable
        self._codec = codec
        self._problems = Problems(self.path, unmade)
        self._reader = RecordReader(storage, verify, form, self._problems)

    def record_path(self, digest: str) -> str:
        """Where the record of a key lies, whether there is one or not."""
        return f"{self.path}/{digest}{SUFFIX}"

    # Reading

    def start(self, digest: str) -> PendingItem | None:
        """Starts reading a record, after waiting for it if it is just being saved.

        Returns None if there is no usable record. Anything but a plain absence has been reported.
        """
        path = self.record_path(digest)
        process_writer().wait_for(path)
        return self._reader.start(path)

    def start_all(self, digests: Sequence[str]) -> list[PendingItem | None]:
        """As :meth:`start`, for several records; small ones are read together."""
        if len(digests) == 1:  # reading one record "together" costs 5 us
            return [self.start(digests[0])]
        paths = [self.record_path(digest) for digest in digests]
        writer = process_writer()
        for path in paths:
            writer.wait_for(path)
        return self._reader.start_all(paths)

    def holds(self, digest: str) -> bool:
        """Whether there is a record with a sound header. Its data are not read; a damaged header is reported.

        A record of a newer version counts: it is not replaced.
        """
        return self._reader.is_sound(self.record_path(digest), digest)

    # Writing

    def save(self, key: Key, item: EncodedItem) -> None:
        """Writes a record and makes it visible whole. A failure leaves nothing behind.

        Raises:
            OSError: disk full, read-only, no permission, input/output error; ``.tmp`` is a link.
        """
        path = self.record_path(key.digest)
        buffers = pack_record(item, key.ingredients(), self._codec)
        try:
            with temporary.being_written(self.path, key.digest, path) as unfinished:
                self._storage.write(unfinished, buffers, durable=self._durable)
            if self._durable:
                _sync_directory(self.path)
        finally:  # the record may be there even so, if only syncing its directory failed
            self._reader.forget(path)
        if self.index is not None:
            _note(self.index, path, key, item)

    def publish(self, key: Key, item: EncodedItem) -> bool:
        """As :meth:`save`, but a failure is only reported, once per kind. Returns whether the record is there now."""
        if self._problems.must_not_replace(self.record_path(key.digest)):
            return False
        try:
            self.save(key, item)
        except OSError as e:
            self._problems.unwritable(e)
            return False
        return True

    def publish_behind(self, key: Key, item: EncodedItem, done: Callable[[], None] | None = None) -> None:
        """As :meth:`publish`, in the background. Waits only while too much is queued.

        The item may change as soon as this returns. ``done`` is called once publishing has ended.
        """
        process_writer().submit(self.record_path(key.digest), self.publish, key, item, done)


def _note(index: Index, path: str, key: Key, item: EncodedItem) -> None:
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


def folder_named(path: str | os.PathLike[str], argument: str = "cache_dir") -> Path:
    """The folder a user's argument names; ``~`` is the home directory.

    Raises:
        TypeError: it is not a path.
        ValueError: it is empty.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{argument}={path!r} is not a path: name a folder, or give None for none")
    if not os.fspath(path):
        raise ValueError(f"{argument}='' does not name a folder: name one, or give None for none")
    return Path(os.path.expanduser(path))


def prepare(path: str | os.PathLike[str]) -> bool:
    """Makes a cache directory and removes what killed writers left in it.

    Returns whether it exists now. If not, the user has been warned.

    Raises:
        ValueError: it exists and is not a directory.
    """
    path = os.path.abspath(path)
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"cache_dir={path!r} is a file: name a directory (it is made when it is missing)")
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as e:
        warnings.warn(f"cache_dir={path!r} cannot be made, so nothing is cached: {with_advice(e)}", CacheWarning, 2)
        return False
    tidy(path)
    return True


def tidy(path: str | os.PathLike[str]) -> None:
    """Removes half-written records and leases that killed processes left in a cache directory; merges its notes."""
    temporary.tidy(path)
    Leases(path).sweep()
    Index(path).tidy()
    SourceMemo(os.fspath(path)).tidy()
