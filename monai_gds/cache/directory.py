"""The cache directory: one record file per item, published by rename, read back through a storage backend.

    <directory>/<32 hex digits>.v2.safetensors  records
    <directory>/.tmp/<digest>.<owner>.<n>       records being written, see :mod:`monai_gds.cache.temporary`
    <directory>/.index/                         what is known of records and sources: advisory, made anew when missing

A reader sees a whole record or none, and a mapping of a record stays valid when the record is replaced. Any number of
processes may fill one directory. Nothing here ends an epoch: what cannot be read is reported once and counts as absent,
what cannot be written is reported once and left out.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from monai_gds.cache import temporary
from monai_gds.cache.checksum import checksum
from monai_gds.cache.header import named
from monai_gds.cache.index import Index, IndexEntry
from monai_gds.cache.key import Key
from monai_gds.cache.record import (
    ARRAYS,
    HEAD_BYTES,
    SUFFIX,
    Record,
    check_name,
    header_length,
    pack_record,
    parse_header,
)
from monai_gds.cache.single_flight import Leases
from monai_gds.cache.temporary import being_written
from monai_gds.cache.tree import EncodedItem, Plan, Recipe, compile_tree, tensor_of
from monai_gds.cache.writer import process_writer
from monai_gds.errors import CacheWarning, DamagedRecord, FileChanged, NewerRecord, RecordError
from monai_gds.storage import FileId, Pending, Storage

__all__ = [
    "CacheDirectory",
    "PendingItem",
    "Verify",
    "explain",
    "folder_named",
    "prepare",
    "read_record",
    "tidy",
]


#: When the checksums of a record's tensors are compared: once for each version of the file and process (but at every
#: read where the storage goes past the file system), at every read, or never. The header's is compared always.
Verify = Literal["first", "always", "never"]

#: Bytes of memory for what is kept of records that were read. An epoch comes by every record once, so when it is full,
#: the ones that it holds are worth as much as any that could take their place.
_HEADS_BYTES = 32 << 20

#: Bytes that a record with one tensor takes there besides its recipe and its path: ids, checksums, places in dicts.
_HEAD_BYTES = 800

#: Records of no more bytes are read together.
_SMALL = 1 << 20

#: How often a record that is replaced whenever it is read is tried again.
_TRIES = 5

#: Errors that are about the directory and not about one file in it.
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.ENOTDIR)

_ADVICE: dict[Any, str] = {
    errno.ENOSPC: "free some space, or move cache_dir",
    errno.EDQUOT: "free some of your quota, or move cache_dir",
    errno.EROFS: "mount it writable, or move cache_dir",
    errno.EACCES: "give yourself permission, or move cache_dir",
    errno.EPERM: "give yourself permission, or move cache_dir",
}


class Form(NamedTuple):
    """In which form items come out of records.

    Attributes:
        track_meta: False gives MetaTensors back as plain tensors.
        numpy: arrays come as NumPy arrays; False: as tensors.
        root: the data root that paths in records are relative to; None: there is none.
    """

    track_meta: bool = True
    numpy: bool = False
    root: str | None = None


class _Layout:
    """Where the tensors of a record lie: the same for many records.

    Attributes:
        tensors: name, dtype and shape of each.
        ranges: offset and bytes of each.
    """

    def __init__(self, entries: Sequence[tuple[str, torch.dtype, tuple[int, ...], int, int]]) -> None:
        self.tensors = [(name, dtype, shape) for name, dtype, shape, _, _ in entries]
        self.ranges = [(offset, nbytes) for *_, offset, nbytes in entries]


_shared_layout = functools.lru_cache(maxsize=256)(_Layout)


class _Head(NamedTuple):
    """What is kept of a record that was read once: enough to read it again in one request.

    Attributes:
        file: identity of the file that it was read from.
        recipe: puts the item together.
        layout: where its tensors lie.
        checksums: of each tensor.
    """

    file: FileId
    recipe: Recipe
    layout: _Layout
    checksums: tuple[int, ...]

    @classmethod
    def of(cls, record: Record, file: FileId, arrays: bytes, form: Form) -> _Head:
        recipe = compile_tree(record.tree, arrays, record.tensors, **form._asdict())
        entries = [(name, e.dtype, tuple(e.shape), e.offset, e.nbytes) for name, e in record.tensors.items()]
        return cls(file, recipe, _shared_layout(tuple(entries)), tuple(e.checksum for e in record.tensors.values()))


def read_record(path: str, storage: Storage) -> tuple[Record, FileId, bytes]:
    """Reads and checks the header of a record.

    Returns:
        The record, the identity of the file, and the bytes of its packed small arrays.

    Raises:
        RecordError: damaged, or of a newer format.
        OSError: the file cannot be read.
    """
    head, file = storage.read_head(path, HEAD_BYTES)
    needed = header_length(head, file.size)
    if needed > len(head):
        head, file = storage.read_head(path, needed)
    record = parse_header(head, file.size)
    arrays = record.arrays
    if arrays is None:
        return record, file, b""
    if arrays.offset + arrays.nbytes > len(head):
        head, again = storage.read_head(path, arrays.offset + arrays.nbytes)
        file.check(again, path)
    block = head[arrays.offset : arrays.offset + arrays.nbytes]
    _check(ARRAYS, arrays.checksum, torch.frombuffer(bytearray(block), dtype=torch.uint8))
    return record, file, block


def _check(name: str, expected: int, data: torch.Tensor) -> None:
    if checksum(data) != expected:
        raise DamagedRecord(f"the bytes of {name!r} do not match their checksum")


class PendingItem:
    """An item being read. ``wait()`` gives it, or None when its record turned out to be unusable (reported by then).

    Attributes:
        nbytes: size of the record.
    """

    __slots__ = ("_cache", "_head", "_path", "_pending", "_tries", "_verify", "nbytes")

    def __init__(
        self, cache: CacheDirectory, path: str, head: _Head, pending: Pending, verify: bool, tries: int
    ) -> None:
        self._cache, self._path, self._tries = cache, path, tries
        self._head, self._pending, self._verify = head, pending, verify
        self.nbytes = head.file.size

    def wait(self, item: Any = None) -> Any:
        """Waits for the reads. The item's tensors may be used at once on the CUDA stream that is current.

        Args:
            item: the dataset's own item, of which a record may leave parts out.

        Returns:
            ``(item,)``, since an item may be None itself; or None.
        """
        head = self._head
        try:
            raw = self._pending.wait()
            if self._verify:
                for (name, _, _), expected, data in zip(head.layout.tensors, head.checksums, raw, strict=True):
                    _check(name, expected, data)
                self._cache.mark_verified(self._path, head.file)
        except FileChanged as e:  # replaced by another process while it was read: read the new one
            return self._cache.reread(self._path, self._tries, e, item)
        except FileNotFoundError:  # deleted by another process
            return None
        except (RecordError, OSError) as e:
            self._cache.report_unusable(self._path, e)
            return None
        parts = zip(head.layout.tensors, raw, strict=True)
        tensors = {name: tensor_of(data, dtype, shape) for (name, dtype, shape), data in parts}
        try:
            return (head.recipe(tensors, item),)
        except RecordError as e:
            self._cache.report_unusable(self._path, e)
            return None


class CacheDirectory:
    """Reads and publishes the records of one directory, for one process and target device.

    Args:
        path: the directory; made when it is missing.
        storage: moves the bytes.
        durable: a published record survives a power cut (fsync of file and directory). If not, it is only whole: a
            record that a power cut tore is found by its checksums.
        verify: see :data:`Verify`.
        form: in which form items come out of records.
        index: what is noted of records, see :class:`monai_gds.cache.index.Index`; None: nothing is.
        unmade: :func:`prepare` has warned that the directory cannot be made: no further warning follows.
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
        unmade: bool = False,
    ) -> None:
        self.path = os.path.abspath(path)
        self.index = index
        self._storage = storage
        self._durable = durable
        self._verify: Verify = "always" if verify == "first" and storage.past_file_system else verify
        self._form = form
        self._unmade = unmade
        self._heads: dict[str, tuple[_Head, int]] = {}  # with the bytes that each takes
        self._heads_bytes = 0
        self._plans: weakref.WeakSet[Plan] = weakref.WeakSet()
        self._verified: dict[str, FileId] = {}
        self._reported: set[Any] = set()
        self._newer: set[str] = set()  # records that this version cannot read and must not replace
        self._lock = threading.Lock()

    # Reading

    def record_path(self, digest: str) -> str:
        """Where the record of a key lies, whether there is one or not."""
        return f"{self.path}/{digest}{SUFFIX}"

    def start(self, digest: str) -> PendingItem | None:
        """Starts reading a record; waits first if it is just being saved.

        Returns:
            The item being read; None when there is no usable record, in which case anything but a plain absence has
            been reported.
        """
        path = self.record_path(digest)
        process_writer().wait_for(path)
        return self._start(path)

    def holds(self, digest: str) -> bool:
        """Whether there is a record with a sound header; its data is not read. A damaged one is reported.

        One that a newer version wrote counts: it is not replaced.
        """
        path = self.record_path(digest)
        try:
            record, _, _ = read_record(path, self._storage)
            check_name(record, digest)
        except FileNotFoundError:
            return False
        except NewerRecord as e:
            self.report_unusable(path, e)
            return True
        except (RecordError, OSError) as e:
            self.report_unusable(path, e)
            return False
        return True

    def start_all(self, digests: Sequence[str]) -> list[PendingItem | None]:
        """As :meth:`start`, for several: small records are read together."""
        if len(digests) == 1 and self._storage.device.type == "cpu":  # what reading together takes is 5 us
            return [self.start(digests[0])]
        paths = [self.record_path(digest) for digest in digests]
        found: list[PendingItem | None] = [None] * len(paths)
        small: dict[bool, list[tuple[int, _Head]]] = {True: [], False: []}
        writer = process_writer()
        for i, path in enumerate(paths):
            writer.wait_for(path)
            head, _ = self._heads.get(path, (None, 0))
            if head is None or head.file.size > _SMALL:
                found[i] = self._start(path)
            else:
                small[self._must_verify(path, head.file)].append((i, head))
        for verify, members in small.items():
            files = [(paths[i], head.layout.ranges, head.file) for i, head in members]
            pendings = self._storage.load_all(files, mapped=not verify) if files else []
            for (i, head), pending in zip(members, pendings, strict=True):
                found[i] = PendingItem(self, paths[i], head, pending, verify, _TRIES)
        return found

    def reread(self, path: str, tries: int, error: FileChanged, item: Any) -> Any:
        """Reads a record anew that was replaced while it was read; results as of :meth:`PendingItem.wait`."""
        pending = self._restart(path, tries, error)
        return None if pending is None else pending.wait(item)

    def _restart(self, path: str, tries: int, error: FileChanged) -> PendingItem | None:
        self._forget(path)
        if tries > 1:
            return self._start(path, tries - 1)
        self.report_unusable(path, error)  # a file system on which a file never is the one it was
        return None

    def _start(self, path: str, tries: int = _TRIES) -> PendingItem | None:
        try:
            head = self._head(path)
            verify = self._must_verify(path, head.file)
            # What is verified is read, not mapped: on a failing disk a read is an error, touching a mapping is death.
            pending = self._storage.load(path, head.layout.ranges, head.file, mapped=not verify)
        except FileNotFoundError:
            return None
        except FileChanged as e:
            return self._restart(path, tries, e)
        except (RecordError, OSError) as e:
            self.report_unusable(path, e)
            return None
        return PendingItem(self, path, head, pending, verify, tries)

    def _head(self, path: str) -> _Head:
        known = self._heads.get(path)
        if known is not None:
            return known[0]  # whether the file is still the same is checked when it is opened to be read
        record, file, arrays = read_record(path, self._storage)
        check_name(record, os.path.basename(path).removesuffix(SUFFIX))
        head = _Head.of(record, file, arrays, self._form)
        self._remember(path, head)
        return head

    def _remember(self, path: str, head: _Head) -> None:
        plan = head.recipe.plan
        nbytes = head.recipe.nbytes + _HEAD_BYTES + len(path)
        with self._lock:
            self._drop(path)
            if plan not in self._plans:  # the first record of a form pays for what they share
                nbytes += plan.nbytes
            if self._heads_bytes + nbytes <= _HEADS_BYTES:
                self._plans.add(plan)
                self._heads[path] = head, nbytes
                self._heads_bytes += nbytes

    def _forget(self, path: str) -> None:
        with self._lock:
            self._drop(path)
            self._verified.pop(path, None)

    def _drop(self, path: str) -> None:
        _, nbytes = self._heads.pop(path, (None, 0))
        self._heads_bytes -= nbytes

    def _must_verify(self, path: str, file: FileId) -> bool:
        if self._verify == "first":
            return self._verified.get(path) != file
        return self._verify == "always"

    def mark_verified(self, path: str, file: FileId) -> None:
        """Notes that every byte of this version of the file matched its checksum."""
        self._verified[path] = file

    def report_unusable(self, path: str, error: Exception) -> None:
        """Warns, once per file, of a record that cannot be used; it will be computed anew and replaced.

        An error of the whole directory is reported once and not for every file. A record of a newer version is not
        replaced, and they are reported together.
        """
        self._forget(path)
        if isinstance(error, NewerRecord):
            self._newer.add(path)
            self._warn(
                NewerRecord,
                f"cache record {path} cannot be used and is computed without being replaced: {error}; the same goes "
                "for others of its kind. Update monai_gds, or give this version a cache_dir of its own",
            )
            return
        once_for: Any = path
        reason = str(error)
        if isinstance(error, OSError) and error.errno in _NO_ACCESS:
            once_for, reason = error.errno, explain(error)
        self._warn(once_for, f"cache record {path} cannot be used and is computed anew: {reason}")

    # Writing

    def publish(self, key: Key, item: EncodedItem) -> bool:
        """Saves a record where that is possible; a failure is reported once per kind.

        Arguments are those of :meth:`save`. A failure leaves nothing behind.

        Returns:
            Whether the record is there now.
        """
        if self.record_path(key.digest) in self._newer:
            return False
        try:
            self.save(key, item)
        except OSError as e:
            self._warn(e.errno, f"nothing more is cached in {self.path} while this lasts: {explain(e)}")
            return False
        return True

    def save(self, key: Key, item: EncodedItem) -> None:
        """Writes a record and makes it visible whole. A failure leaves nothing behind.

        Args:
            key: the item's key.
            item: the item taken apart; must not change until this returns.

        Raises:
            OSError: disk full, read-only, no permission, input/output error; ``.tmp`` is a link.
        """
        buffers = pack_record(item, key.ingredients())
        target = self.record_path(key.digest)
        with being_written(self.path, key.digest, target) as path:
            self._storage.write(path, buffers, durable=self._durable)
        self._forget(target)
        if self._durable:
            _sync_directory(self.path)
        self._note(key, item, target)

    def _note(self, key: Key, item: EncodedItem, path: str) -> None:
        if self.index is None:
            return
        with contextlib.suppress(OSError):  # pruned already
            st = os.stat(path)
            tensors = tuple((name, str(t.dtype)[6:], tuple(t.shape)) for name, t in item.tensors.items())
            pipeline = key.pipeline.digest
            self.index.describe_pipeline(pipeline, key.pipeline.describe())
            self.index.note_record(
                IndexEntry(key.digest, key.item, pipeline, st.st_size, st.st_mtime_ns, tensors, dict(key.sources))
            )

    def publish_behind(self, key: Key, item: EncodedItem, done: Callable[[], None] | None = None) -> None:
        """As :meth:`publish`, in the background; waits only while too much is waiting to be written.

        Args:
            key: the item's key.
            item: the item taken apart; may change as soon as this returns.
            done: called when the record is there, or could not be written.
        """
        process_writer().submit(self.record_path(key.digest), self.publish, key, item, done)

    def warn_of_older_format(self) -> None:
        """Warns when records of version 1 lie here, which no key finds any more."""
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            if any((told := named(entry.name)) is not None and told[1] == 1 for entry in entries):
                self._warn(
                    "older format",
                    f"the records in {self.path} that an earlier version of monai_gds made are not used: their keys "
                    "did not cover all that an item is computed from, so the cache is made once more. To delete them: "
                    f"monai-gds cache prune --old-format {self.path}",
                )

    def _warn(self, once_for: Any, message: str) -> None:
        if self._unmade and not os.path.isdir(self.path):
            return
        with self._lock:
            if once_for in self._reported:
                return
            self._reported.add(once_for)
        warnings.warn(message, CacheWarning, stacklevel=2)


def folder_named(path: str | os.PathLike[str], argument: str = "cache_dir") -> Path:
    """The folder that an argument of the user's names; ``~`` is the home directory.

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

    Returns:
        Whether it is there. If not, the user has been warned.

    Raises:
        ValueError: it exists and is no directory.
    """
    path = os.path.abspath(path)
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"cache_dir={path!r} is a file: name a directory (it is made when it is missing)")
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as e:
        warnings.warn(f"cache_dir={path!r} cannot be made, so nothing is cached: {explain(e)}", CacheWarning, 2)
        return False
    tidy(path)
    return True


def tidy(path: str | os.PathLike[str]) -> None:
    """Removes what killed processes left in a cache directory: half-written records and leases; merges the index."""
    temporary.tidy(path)
    Leases(path).sweep()
    Index(path).tidy()


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def explain(error: OSError) -> str:
    """An error of the disk in words, with what to do about it."""
    advice = _ADVICE.get(error.errno)
    if error.errno == errno.ENOTDIR and error.filename is not None:
        parents = Path(os.path.abspath(os.fsdecode(error.filename))).parents
        file = next((p for p in parents if p.exists() and not p.is_dir()), "a part of it")
        advice = f"{file} is a file: name another folder"
    return f"{error}" + (f" ({advice})" if advice else "")
