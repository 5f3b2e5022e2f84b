"""The cache directory: one record file per item, published by rename, read back through a storage backend.

    <directory>/<32 hex digits>.v2.safetensors  records
    <directory>/.tmp/<digest>.<owner>.<n>       records being written, see :mod:`monai_gds.shared.temporary`
    <directory>/.index/                         advisory notes about records and sources, rebuilt when missing

A reader sees a whole record or none, and a mapping of a record stays valid when the record is replaced. Any number of
processes may fill one directory. Nothing here ends an epoch: a record that cannot be read is reported once and counts
as absent, one that cannot be written is reported once and left out.

Records are read by :mod:`monai_gds.records.reader`; :mod:`monai_gds.records.problems` warns of those that cannot be.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

from monai_gds import limits
from monai_gds.base.file_systems import LOCAL, kind_of_folder, opened
from monai_gds.errors import FileChanged, NewerRecord, NotSaved, RecordError, warn
from monai_gds.folder.budget import LOOK_AGAIN, Budget, OverBudget
from monai_gds.folder.index import Index, IndexEntry
from monai_gds.folder.reads import ReadLists
from monai_gds.folder.uses import Uses
from monai_gds.folder.writer import process_writer
from monai_gds.items.tree import EncodedItem
from monai_gds.keys.key import Key
from monai_gds.keys.source_memo import SourceMemo
from monai_gds.records.compression import WHOLE, Compression
from monai_gds.records.entries import read_whole
from monai_gds.records.header import SUFFIX, parse
from monai_gds.records.heads import Form
from monai_gds.records.pending import First, PendingItem, start
from monai_gds.records.problems import Problems, with_advice
from monai_gds.records.reader import Mmap, RecordReader, Verify
from monai_gds.records.writing import pack_record
from monai_gds.shared import temporary
from monai_gds.shared.leases import Leases
from monai_gds.shared.owner import mark
from monai_gds.shared.temporary import ANY
from monai_gds.storage import Buffer, FileId, Storage
from monai_gds.storage.files import total_bytes


class CacheDirectory:
    """Reads and publishes the records of one directory, for one process and target device.

    Args:
        path: the directory; made when it is missing.
        storage: moves the bytes.
        durable: a published record survives a power cut (fsync of file and directory). If False, a record torn by a
            power cut is found by its checksums.
        verify: see :data:`~monai_gds.records.reader.Verify`.
        form: the form in which items come out of records.
        index: where published records are noted, or None.
        device_bytes: budget for packed records that stay in the memory of a CUDA device.
        compression: the form of new records; may be assigned at any time.
        mmap: see :data:`~monai_gds.records.reader.Mmap`.
        file_mode: permissions that records have at most. They have those of the directory otherwise.
        uses: where it is noted which records are read.
        budget: makes room for new records, or None: they take whatever room there is.
        copies: the records are copies of another directory's: one that cannot be read is taken from there.
        unmade: :func:`prepare` has warned that the directory cannot be made, so nothing is reported until it exists.
        run: when the run began. Its processes give each warning once.
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
        device_bytes: int = 0,
        compression: Compression = WHOLE,
        mmap: Mmap = "auto",
        file_mode: int = ANY,
        uses: Sequence[Uses] = (),
        budget: Budget | None = None,
        copies: bool = False,
        unmade: bool = False,
        run: float | None = None,
    ) -> None:
        self.path = os.path.abspath(path)
        self.index = index
        self.compression = compression
        self.storage = storage
        self._durable = durable
        self._file_mode = file_mode
        self._problems = Problems(self.path, unmade, copies, run)
        self._budget = budget
        self._failed = -math.inf  # when a record could not be copied
        note = partial(_note_use, uses)  # not a method: a circle would outlive the dataset, and with it what it uses
        self._reader = RecordReader(storage, verify, form, self._problems, device_bytes, mmap, note, copies)

    def record_path(self, digest: str) -> str:
        """The path of a key's record, which need not exist."""
        return f"{self.path}/{digest}{SUFFIX}"

    # Reading

    def start(self, digests: Sequence[str], first: First = "all") -> list[PendingItem | None]:
        """Starts reading records, after waiting for those that are just being saved. Small ones are read together.

        Args:
            digests: the digests of the records' keys.
            first: what to read of them now.

        Returns:
            For each record what is being read of it; None if there is no usable one. Anything but a plain absence has
            been reported.
        """
        paths = [self.record_path(digest) for digest in digests]
        writer = process_writer()
        for path in paths:
            writer.wait_for(path)
        return start(self._reader, paths, first)

    def warm(self) -> None:
        """Loads now what the first read of a record loads, if that is much."""
        if self.compression.codec:
            self._reader.warm()

    def holds(self, digest: str, converted: bool = False) -> bool:
        """Whether there is a record with a sound header. Its data are not read; a damaged header is reported.

        A record of a newer version counts, as does one that cannot be unpacked here: it is reported, and not replaced.

        Args:
            digest: the digest of the record's key.
            converted: whether a record counts only if :meth:`convert` would leave it as it is.
        """
        return self._reader.is_sound(self.record_path(digest), self.compression.suits if converted else None)

    def why_unusable(self, digest: str) -> str | None:
        """Why the record of a key cannot be used here; None if it can, as far as its header shows."""
        try:
            self._reader.examine(self.record_path(digest))
        except (RecordError, OSError) as e:
            return str(e)
        return None

    # Writing

    @property
    def full(self) -> bool:
        """Whether there was no room for a record recently, so that others need not be prepared for writing."""
        return time.monotonic() < self._failed + LOOK_AGAIN or (self._budget is not None and self._budget.full)

    def save(self, key: Key, item: EncodedItem, replaces: FileId | None = None) -> None:
        """Writes a record and makes it visible whole. A failure leaves nothing behind.

        Args:
            key: the item's key.
            item: the item.
            replaces: the only file that the record may replace; any by default.

        Raises:
            FileChanged: that file is not there any more.
            OverBudget: the budget leaves no room.
            OSError: disk full, read-only, no permission, input/output error; ``.tmp`` is a link.
        """
        path = self.record_path(key.digest)
        buffers = pack_record(item, key.ingredients(), self.compression)
        if self._budget is not None:
            self._budget.take(total_bytes(buffers) - _size(path))
        try:
            with temporary.being_written(self.path, key.digest, path, self._file_mode) as unfinished:
                self.storage.write(unfinished, buffers, durable=self._durable, mode=self._file_mode)
                if replaces is not None and not _is_there(path, replaces):
                    raise FileChanged(f"{path} was replaced or removed")
            if self._durable:
                with opened(self.path, os.O_RDONLY | os.O_DIRECTORY) as folder:
                    os.fsync(folder)
        finally:  # the record may be there even so, if only syncing its directory failed
            self._reader.forget(path)
        if self.index is not None:
            head = buffers[0] if self.compression.codec else b""
            _note(self.index, path, key, item, head)

    def convert(self, key: Key) -> Literal["converted", "cached"] | None:
        """Writes a record again in the form asked for, from its own bytes, and makes it visible whole.

        Readers are served by the old file or by the new one. A record that another process replaced meanwhile stays,
        whatever its form, so two processes never take turns at replacing one.

        Returns:
            ``"converted"``; ``"cached"`` if the record stays as it is; None if there is no usable record.

        Raises:
            OSError: as by :meth:`save`; the record stays as it is.
        """
        path = self.record_path(key.digest)
        try:
            file, item = read_whole(path, key.digest)
        except Exception as e:
            self._reader.give_up(path, e)
            return "cached" if isinstance(e, NewerRecord) else None
        try:
            self.save(key, item, replaces=file)
        except FileChanged:
            return "cached" if self.holds(key.digest) else None
        return "converted"

    def publish(self, key: Key, item: EncodedItem) -> bool:
        """As :meth:`save`, but a failure is only reported, once per kind. Returns whether the record is there now."""
        if self.full or self._problems.must_not_replace(self.record_path(key.digest)):
            return False
        try:
            self.save(key, item)
        except OSError as e:
            self._problems.unwritable(e)
            return False
        return True

    def report_full(self, why: str) -> None:
        """Reports, once in a run, that another process found no room for a record."""
        self._problems.unwritable(OverBudget(why))

    def adopt(self, digest: str, source: str) -> None:
        """Copies a record of another directory, if there is room. A failure is only reported, once per kind."""
        path = self.record_path(digest)
        if self.full or self._problems.must_not_replace(path):
            return
        try:
            with open(source, "rb") as record:
                if self._budget is not None:
                    self._budget.take(os.fstat(record.fileno()).st_size - _size(path))
                being_written = temporary.being_written(self.path, digest, path, self._file_mode)
                opener = partial(os.open, mode=self._file_mode)
                with being_written as unfinished, open(unfinished, "xb", opener=opener) as copy:
                    shutil.copyfileobj(record, copy, limits.COPIED_BYTES)
        except OSError as e:
            if os.path.exists(source):  # else it was deleted meanwhile
                if not isinstance(e, OverBudget):  # a drive that is full without a budget, or fails
                    self._failed = time.monotonic()
                self._problems.unwritable(e)
        finally:
            self._reader.forget(path)

    def settle(self, digest: str) -> None:
        """Waits until nothing is written any more that reading a record has begun."""

    def publish_behind(self, key: Key, item: EncodedItem, done: Callable[[], None] | None = None) -> None:
        """As :meth:`publish`, in the background, or at once where handing it over takes longer: a small one to a drive
        of this machine. Waits only while the queue is full.

        The item may change as soon as this returns. ``done`` is called once publishing has ended.
        """
        small = sum(tensor.nbytes for tensor in item.tensors.values()) <= limits.SAVED_AT_ONCE_BYTES
        if not self.full and not (small and self._is_near):
            process_writer().submit(self.record_path(key.digest), self.publish, key, item, done)
            return
        try:
            self.publish(key, item)
        finally:
            if done is not None:
                done()

    @cached_property
    def _is_near(self) -> bool:
        """Whether items come from this machine's memory and go to its own drive."""
        return self._reader.on_cpu and kind_of_folder(self.path) in LOCAL


def _note_use(folders: Sequence[Uses], digest: str) -> None:
    for uses in folders:
        uses.read(digest)


def _size(path: str) -> int:
    """The bytes of the record that is replaced; 0 if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _is_there(path: str, file: FileId) -> bool:
    try:
        return FileId.of(path) == file
    except FileNotFoundError:
        return False


def _note(index: Index, path: str, key: Key, item: EncodedItem, head: Buffer) -> None:
    """Notes a record that was just written in the index, if possible.

    ``head`` is its header if packing was tried, else empty. Only the header shows whether packing succeeded.
    """
    with contextlib.suppress(OSError, RecordError):  # pruned or replaced already
        st = os.stat(path)
        tensors = tuple((name, str(t.dtype)[6:], tuple(t.shape)) for name, t in item.tensors.items())
        pipeline = key.pipeline.digest
        index.describe_pipeline(pipeline, key.pipeline.describe())
        form = parse(bytes(head), st.st_size).form if head else ""
        entry = IndexEntry(key.digest, key.item, pipeline, st.st_size, st.st_mtime_ns, tensors, dict(key.sources), form)
        index.note_records([entry])


#: How the name of a folder begins that was meant for a shell.
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")

#: How a URL begins once it has been made a ``Path``, which leaves one slash of two.
_AS_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def folder_named(path: str | os.PathLike[str], argument: str = "cache_dir") -> Path:
    """The folder a user's argument names; ``~`` is the home directory.

    Raises:
        TypeError: it is not a path.
        ValueError: it is empty, a URL, or holds a variable in place of a folder, as only a shell puts in.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{argument}={path!r} is not a path: name a folder, or give None for none")
    if not os.fspath(path):
        raise ValueError(f"{argument}='' does not name a folder: name one, or give None for none")
    if "://" in os.fspath(path) or _AS_PATH.match(os.fspath(path)):
        raise ValueError(f"{argument}={os.fspath(path)!r} is a URL, and records are files: name a folder")
    found = Path(os.path.expanduser(path))
    for place in (found, *found.parents):
        if _VARIABLE.match(place.name) and not os.path.lexists(place):
            given = repr(os.fspath(path))
            raise ValueError(
                f"{argument}={given}: there is no folder {place.name!r}, and variables are not put in here: give "
                f"os.path.expandvars({given})"
            )
    return found


def prepare(path: str | os.PathLike[str], argument: str = "cache_dir") -> bool:
    """Makes a cache directory, which the user's argument names, and removes what killed writers left in it.

    Returns whether it exists now. If not, the user has been warned.

    Raises:
        ValueError: it exists and is not a directory.
    """
    path = os.path.abspath(path)
    try:
        try:
            is_folder = stat.S_ISDIR(os.stat(path).st_mode)
        except FileNotFoundError:
            os.makedirs(path, exist_ok=True)
            is_folder = True
        if not is_folder:
            raise ValueError(f"{argument}={path!r} is a file: name a directory (it is made when it is missing)")
    except OSError as e:
        lost, advised = "cached" if argument == "cache_dir" else "copied", with_advice(e, argument)
        warn(f"{argument}={path!r} cannot be made, so nothing is {lost}: {advised}")
        return False
    tidy(path)
    return True


def check_writable(path: str | os.PathLike[str] | None) -> None:
    """Writes a small file into a cache directory, which is made when it is missing, and removes it.

    Raises:
        ValueError: there is no directory.
        NotSaved: that cannot be done.
    """
    if path is None:
        raise ValueError("strict=True is for a cache_dir, and there is none: name one")
    folder, name = os.path.abspath(path), f"{'0' * 32}.{mark()}"
    try:
        with temporary.opened(folder, make=True) as inner:
            temporary.create(inner, name, b"x" * 4096)
            os.unlink(name, dir_fd=inner)
    except OSError as e:
        e.filename = None if e.filename == name else e.filename  # the small file's says nothing
        raise NotSaved(f"strict=True, and nothing can be saved in {folder}: {with_advice(e)}") from e


def tidy(path: str | os.PathLike[str]) -> None:
    """Removes half-written records and leases that killed processes left in a cache directory; merges its notes."""
    temporary.tidy(path)
    Leases(path).sweep()
    Index(path).tidy()
    SourceMemo(os.fspath(path)).tidy()
    ReadLists(path).tidy()
    Uses(path).tidy()
