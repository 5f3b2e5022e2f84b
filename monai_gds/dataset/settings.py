"""The arguments of ``GDSDataset``: what each may be. Errors name the argument and the remedy."""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from monai.data import CacheDataset
from monai.transforms import Transform

from monai_gds.base.notices import Notice
from monai_gds.base.units import bytes_of
from monai_gds.errors import meant
from monai_gds.folder.directory import check_writable, folder_named, prepare, tidy
from monai_gds.items.rounding import check_bits
from monai_gds.keys.sources import Policy
from monai_gds.pipeline.settings import State, capture_all
from monai_gds.records.compression import Codec, Compression
from monai_gds.records.heads import Form
from monai_gds.records.reader import Mmap, Verify
from monai_gds.shared.temporary import ANY
from monai_gds.storage import choose_backend, resolve_device
from monai_gds.storage.registry import check_options

_log = logging.getLogger("monai_gds")

#: How much of MONAI's version is part of a key.
MonaiVersion = Literal["exact", "minor"] | None

#: Options that name one of a few choices. ``sources`` may be a function as well.
_CHOICES: Mapping[str, tuple[str | bool | None, ...]] = {
    "sources": ("content", "stat", "once", None),
    "monai_version": ("exact", "minor", None),
    "arrays": ("auto", "numpy", "torch"),
    "unsupported": ("warn", "error"),
    "verify": ("first", "always", "never"),
    "mmap": ("auto", True, False),
}


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """What one rarely changes of a cache: what counts in keys, what records hold, how they are read and written.

    A dict of these names serves as well: ``GDSDataset(..., options={"verify": "always"})``, as MONAI's ``ConfigParser``
    and Hydra make it. An option that is not part of the key can be changed at any time: records stay valid.

    Args:
        sources: how the identity of files is determined that an item or a transform names, and of others that are read
            while the item is computed. A string of an item names a file if a transform whose name begins with ``Load``
            reads its key, or if it looks like a path, and a folder with everything in it only if its path is absolute
            or has a separator. ``"content"``: by size and content, which is remembered in ``cache_dir`` while inode and
            times stay the same. ``"once"``: the same, but each file is looked at once per process. ``"stat"``: by size
            and mtime, which misses a file that was replaced with its mtime kept. A function path -> str, bytes or None
            (not a source). None: files do not count. The identity is part of the key, so ``"content"`` and ``"once"``
            have the same keys.
        monai_version: how much of MONAI's version is part of the key: ``"exact"``, ``"minor"`` or None.
        mantissa_bits: rounds the values of float32 and float64 tensors of 1 MiB and more to this many bits of mantissa,
            1 to 22, so that they compress better. This is lossy: the relative error is at most ``2 ** -(bits + 1)``, so
            13 bits keep about four decimal digits. It is part of the key, holds for hits, misses and items that are not
            cached, and does not depend on ``compression``. NaN, infinities, integers, smaller tensors and all metadata,
            such as affines, stay as they are.
        tiles: voxels along each edge of a tile: 16, 32 or 64. With smaller tiles a crop reads fewer bytes, and records
            compress less. ``"auto"`` is 32. None is for whole tensors, and goes with ``compression="auto"`` or None.
            Not part of the key.
        arrays: how numeric arrays of items are returned: ``"numpy"`` (CPU targets only), ``"torch"``, or ``"auto"``,
            which is ``"numpy"`` on a CPU target. Not part of the key.
        unsupported: what happens to an item with a value that a record cannot store: ``"warn"`` computes it in
            every epoch, with one warning; ``"error"`` raises UnsupportedType. Not part of the key.
        verify: when checksums are compared: ``"first"`` (once per file and process; at every read with a backend that
            bypasses the file system), ``"always"`` or ``"never"``. Not part of the key.
        mmap: whether tensors of 64 KiB and more are mappings of the record, on a CPU target and once their checksums
            are compared. A page that cannot be read, because the disk fails or another program cut the file, then ends
            the process with a bus error. False reads the tensors into memory instead, and an error costs one record.
            ``"auto"`` maps them if ``cache_dir`` is on a local file system, and reads them if it is on any other, such
            as NFS, SMB, Lustre or anything over FUSE. Not part of the key.
        device_bytes: how much memory of the CUDA device compressed records may occupy, such as ``20e9`` or ``"20GB"``.
            The first ones that are read stay there, still compressed, and a hit on one of them only unpacks it, once
            the file's identity is compared. 0 keeps none. Not part of the key.
        local_bytes: how much the records in ``local_dir`` may occupy, as ``max_bytes`` for ``cache_dir``. Records that
            do not fit are read from ``cache_dir``. Not part of the key.
        durable: whether a record survives a power cut from the moment its item is returned. It is then written before
            that, and fsync takes about 0.2 ms. Otherwise a record torn by a power cut is found by its checksum and
            computed again. Not part of the key.
        file_mode: the most permissions that records may have, such as ``0o600`` for yourself alone. By default they
            have the group and mode of ``cache_dir``, so that a folder shared by a group is a shared cache:
            ``mkdir /nvme/cache; chgrp lab /nvme/cache; chmod 2775 /nvme/cache``. Not part of the key.

    Raises:
        TypeError: ``file_mode`` or a number of bytes is not a number.
        ValueError: a value that is not one of the choices, or out of range.

    Example:
        >>> import tempfile
        >>> from monai.transforms import Compose, EnsureTyped
        >>> from monai_gds import CacheOptions, GDSDataset
        >>> careful = CacheOptions(verify="always", durable=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dataset = GDSDataset([{"image": 1.0}], Compose([EnsureTyped("image")]), folder, "cpu", options=careful)
        ...     dataset.settings.options.verify
        'always'
    """

    sources: Policy = "content"
    monai_version: MonaiVersion = "exact"
    mantissa_bits: int | None = None
    tiles: Literal["auto"] | int | None = "auto"
    arrays: Literal["auto", "numpy", "torch"] = "auto"
    unsupported: Literal["warn", "error"] = "warn"
    verify: Verify = "first"
    mmap: Mmap = "auto"
    device_bytes: float | str = 0
    local_bytes: float | str | None = None
    durable: bool = False
    file_mode: int | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "sources" and callable(value)):
                raise ValueError(f"{name}={value!r}: use {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}")
        check_bits(self.mantissa_bits)
        bytes_of(self.device_bytes, "device_bytes")
        bytes_or_none(self.local_bytes, "local_bytes")
        mode_given(self.file_mode)

    @classmethod
    def of(cls, given: CacheOptions | Mapping[str, Any]) -> CacheOptions:
        """The options that a user gave, as such or as a dict."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"options={given!r}: give CacheOptions(...), or a dict such as {{'verify': 'always'}}")
        if wrong := sorted(given.keys() - _NAMES):
            if wrong[0] in signature(Settings.of).parameters:
                raise TypeError(f"{wrong[0]}= is an argument of GDSDataset itself, beside options=")
            hint = meant(wrong[0], _NAMES, "help(CacheOptions) lists those it has")
            raise TypeError(f"CacheOptions has no option {wrong[0]!r}{hint}")
        return cls(**given)

    def once(self) -> CacheOptions:
        """These for a dataset that has read everything when it is made: its sources may be gone afterwards."""
        return replace(self, sources="once") if self.sources == "content" else self


_NAMES = frozenset(one.name for one in fields(CacheOptions))


def refuse(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises TypeError for arguments that ``GDSDataset`` does not have, with what to write instead.

    Args:
        given: the arguments, by name.
        known: the names of those it has.
    """
    theirs = signature(CacheDataset).parameters
    for name in sorted(given):
        if name in _NAMES:
            raise TypeError(f"{name}= is options=CacheOptions({name}=...)")
        if name in theirs:
            raise TypeError(
                f"GDSDataset has no argument {name!r}, which is CacheDataset's: leave it out. populate=True caches all "
                "items in the constructor, and dataset.populate(num_workers=N) does so in N processes"
            )
        hint = meant(name, [*known, *theirs], "help(GDSDataset) lists those it has")
        raise TypeError(f"GDSDataset has no argument {name!r}{hint}")


@dataclass(frozen=True)
class Settings:
    """The arguments of a dataset, checked, as its session uses them.

    Attributes:
        began: when the dataset was made: records that were made or read since are not deleted for want of room.
        unmade, local_unmade: whether ``cache_dir`` and ``local_dir`` could not be made.
        saves_in: the form of new records, in a copy of the dataset that makes them for another process.
        converts: whether that copy also converts records in another form.
        asked_by: the process for which the copy computes items.
        held: the settings of the process that held when the dataset was made; items are computed under these.
        strict: whether a cache that cannot be written is an error.
        again: when an item without a record is computed, in words.
    """

    device: torch.device
    backend: str
    backend_reason: str
    backend_options: Mapping[str, Any]
    form: Form
    version: Any
    compression: Literal["auto"] | Codec | None
    cache_dir: Path | None
    max_bytes: int | None
    local_dir: Path | None
    options: CacheOptions
    began: float
    unmade: bool = False
    local_unmade: bool = False
    saves_in: Compression | None = None
    converts: bool = False
    asked_by: str | None = None
    held: State = ()
    strict: bool = False
    again: str = "in every epoch"

    @classmethod
    def of(
        cls, device: int | str | torch.device | None, backend: str, backend_options: Mapping[str, Any] | None,
        root: str | os.PathLike[str] | None, version: Any, compression: Literal["auto"] | Codec | None,
        cache_dir: Path | str | None, max_bytes: float | str | None, local_dir: Path | str | None,
        options: CacheOptions | Mapping[str, Any], track_meta: bool, strict: bool,
    ) -> Settings:  # fmt: skip
        """Checks the arguments, and makes the folders of the cache.

        Raises:
            TypeError, ValueError, NotSaved, BackendUnavailable, CodecMissing: as :class:`GDSDataset` lists them.
        """
        options, target = CacheOptions.of(options), resolve_device(device)
        backend, reason = choose_backend(backend, target)
        named = target, backend, reason
        Notice("backend", *named).log(_log, "a dataset on %s uses backend %s (%s)", *named)
        if not isinstance(backend_options, Mapping | None):
            raise TypeError(f"backend_options={backend_options!r}: give a dict of them by name, as {{'threads': 8}}")
        check_options(backend, backend_options or {}, target)
        Compression.of(compression, options.tiles, target.type == "cuda", crops=False)  # only to check
        if options.arrays == "numpy" and target.type != "cpu":
            raise ValueError(f"arrays='numpy' needs device='cpu': on {target} use 'auto' or 'torch'")
        if target.type != "cuda" and (kept := bytes_of(options.device_bytes, "device_bytes")):
            raise ValueError(f"device_bytes={kept} is memory of a CUDA device, and items come on {target}")
        numpy = options.arrays == "numpy" or (options.arrays == "auto" and target.type == "cpu")
        form = Form(track_meta, numpy, root_given(root))
        # Absolute, since the working directory may change.
        cache = None if cache_dir is None else Path(os.path.abspath(folder_named(cache_dir)))
        local = None if local_dir is None else Path(os.path.abspath(folder_named(local_dir, "local_dir")))
        if local is not None and (cache is None or os.path.realpath(local) == os.path.realpath(cache)):
            raise ValueError(
                f"local_dir={str(local_dir)!r} keeps copies of records in cache_dir={cache_dir!r}: name two folders"
            )
        if local is None and options.local_bytes is not None:
            what = f"local_bytes={options.local_bytes!r} limits the copies in a local_dir"
            raise ValueError(f"{what}, and there is none: name one")
        if cache is None and max_bytes is not None:
            raise ValueError(f"max_bytes={max_bytes!r} limits the records of a cache_dir, and there is none: name one")
        most = bytes_or_none(max_bytes, "max_bytes")
        if strict:
            check_writable(cache)
        unmade = cache is not None and not prepare(cache)
        local_unmade = local is not None and not prepare(local, "local_dir")
        return cls(
            target, backend, reason, dict(backend_options or {}), form, version, compression, cache, most, local,
            options, time.time(), unmade, local_unmade, held=capture_all(), strict=strict,
        )  # fmt: skip

    def on_cpu(self) -> Settings:
        """These settings for a process whose items come on the CPU; arrays are returned as they would be here."""
        if self.device.type == "cpu":
            return self
        return replace(self, device=torch.device("cpu"), backend="auto", backend_options={})

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where records are: ``cache_dir``, and ``local_dir`` after it."""
        return tuple(folder for folder in (self.cache_dir, self.local_dir) if folder is not None)

    def tidy(self) -> None:
        """Removes the half-written files of killed processes from the folders."""
        for folder in self.folders:
            tidy(folder)

    @property
    def local_bytes(self) -> int | None:
        """How much the records in ``local_dir`` may occupy."""
        return bytes_or_none(self.options.local_bytes, "local_bytes")

    @property
    def device_bytes(self) -> int:
        """How much memory of the device records may occupy."""
        return bytes_of(self.options.device_bytes, "device_bytes")

    @property
    def file_mode(self) -> int:
        """The permissions that records have at most."""
        return mode_given(self.options.file_mode)


def check_transforms(transforms: Sequence[Any]) -> None:
    """Raises TypeError for a transform that cannot be called, such as its name, and for a class of transforms."""
    for step in transforms:
        if isinstance(step, type) and issubclass(step, Transform):
            raise TypeError(f"transform holds the class {step.__name__}: give an object of it, {step.__name__}(…)")
        if not callable(step):
            raise TypeError(f"transform holds {step!r}, which cannot be called: give transforms, such as Flip()")


def check_data(data: Any, hash_func: Any = repr, hash_transform: Any = None) -> None:
    """Raises TypeError unless ``data`` is a sequence of items, and both hashes can be called, unlike their names.

    A string is refused too: its items are its letters. The hash of transforms may be None.
    """
    for name, function in (("hash_func", hash_func), ("hash_transform", hash_transform)):
        if not callable(function) and (function is not None or name == "hash_func"):
            raise TypeError(f"{name}={function!r} cannot be called: give a function that returns the hash as bytes")
    if type(data).__name__ == "DataFrame":  # of pandas or polars: [i] is a column there
        raise TypeError("data is a DataFrame: give its rows as dicts, such as data.to_dict('records') in pandas")
    by_number = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if not by_number or isinstance(data, (Mapping, str, bytes)):
        raise TypeError(f"data is of type {type(data).__name__}: give a sequence of items, such as a list of dicts")


def mode_given(file_mode: int | None) -> int:
    """The permissions that records have at most. Raises TypeError or ValueError if they are not usable permissions."""
    if file_mode is None:
        return ANY
    try:
        file_mode = operator.index(file_mode)  # NumPy's integers too
    except TypeError:
        what = f"file_mode={file_mode!r} is not a number: give permissions in octal, such as 0o640"
        raise TypeError(what) from None
    if not 0o600 <= file_mode <= 0o777 or file_mode & 0o600 != 0o600:
        given = f"file_mode={file_mode}, in octal {file_mode:#o}"
        raise ValueError(f"{given}: it must let you read and write, as 0o600 and 0o640 do")
    return file_mode & ANY


def root_given(root: str | os.PathLike[str] | None) -> str | None:
    """The folder that ``root`` names, absolute, without a trailing slash. Raises ValueError if it is not a folder."""
    if root is None:
        return None
    path = os.path.abspath(folder_named(root, "root"))
    if not os.path.isdir(path):
        raise ValueError(f"root={os.fspath(root)!r} is not a folder: name the folder that holds the data")
    return path


def bytes_or_none(size: float | str | None, argument: str) -> int | None:
    """As :func:`bytes_of`; None stays None."""
    return None if size is None else bytes_of(size, argument)


#: What a dataset has whose user gives no options.
DEFAULTS = CacheOptions()
