"""Checks the arguments of ``GDSDataset``, which calls this. Errors name the argument and the remedy."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from monai.transforms import Transform

from monai_gds.base.units import bytes_of
from monai_gds.errors import CacheWarning
from monai_gds.folder.directory import folder_named
from monai_gds.shared.temporary import ANY

__all__ = [
    "Folders",
    "OfCacheDataset",
    "check_choices",
    "check_data",
    "check_hash",
    "check_transforms",
    "check_unused",
    "mode_given",
    "root_given",
]

#: Arguments that name one of a few choices.
_CHOICES: Mapping[str, tuple[str | bool | None, ...]] = {
    "verify": ("first", "always", "never"),
    "mmap": ("auto", True, False),
    "monai_version": ("exact", "minor", None),
    "arrays": ("auto", "numpy", "torch"),
    "unsupported": ("warn", "error"),
    "sources": ("content", "stat", "once", None),
}


class OfCacheDataset(TypedDict, total=False):
    """Arguments of MONAI's ``CacheDataset`` that have no effect here: everything is cached, on disk."""

    cache_num: int
    cache_rate: float
    num_workers: int | None
    progress: bool
    copy_cache: bool
    as_contiguous: bool
    hash_as_key: bool
    runtime_cache: bool | str | Sequence[Any]


def check_unused(given: Mapping[str, Any]) -> None:
    """Warns of arguments that only ``CacheDataset`` has. Raises TypeError for all others."""
    wrong = sorted(given.keys() - OfCacheDataset.__annotations__.keys())
    if wrong:
        raise TypeError(f"GDSDataset has no argument {wrong[0]!r}: help(GDSDataset) lists those it has")
    if given:
        names = ", ".join(sorted(given))
        message = f"{names}: of no effect in a GDSDataset, which caches every item, on disk; leave it out"
        warnings.warn(message, CacheWarning, stacklevel=3)


def check_choices(**given: Any) -> None:
    """Raises ValueError for an argument whose value is not one of its choices."""
    for name, value in given.items():
        choices = _CHOICES[name]
        if value not in choices:
            raise ValueError(f"{name}={value!r}: use {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}")


def check_hash(name: str, function: Any) -> None:
    """Raises TypeError for a hash that cannot be called, such as its name."""
    if not callable(function):
        raise TypeError(f"{name}={function!r} cannot be called: give a function that returns the hash as bytes")


def check_transforms(transforms: Sequence[Any]) -> None:
    """Raises TypeError for a transform that cannot be called, such as its name, and for a class of transforms."""
    for step in transforms:
        if isinstance(step, type) and issubclass(step, Transform):
            raise TypeError(f"transform holds the class {step.__name__}: give an object of it, {step.__name__}(…)")
        if not callable(step):
            raise TypeError(f"transform holds {step!r}, which cannot be called: give transforms, such as Flip()")


def check_data(data: Any) -> None:
    """Raises TypeError unless ``data`` is a sequence of items. A string is refused too: its items are its letters."""
    if type(data).__name__ == "DataFrame":  # of pandas or polars: [i] is a column there
        raise TypeError("data is a DataFrame: give its rows as dicts, such as data.to_dict('records') in pandas")
    by_number = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if not by_number or isinstance(data, (Mapping, str, bytes)):
        raise TypeError(f"data is a {type(data).__name__}: give a sequence of items, such as a list of dicts")


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


class Folders(NamedTuple):
    """Where records are, and how many bytes they may occupy. None: no such folder, or no limit."""

    cache_dir: Path | None
    max_bytes: int | None
    local_dir: Path | None
    local_bytes: int | None

    @classmethod
    def given(
        cls, cache_dir: Path | str | None, max_bytes: float | str | None, local_dir: Path | str | None,
        local_bytes: float | str | None,
    ) -> Folders:  # fmt: skip
        """Raises TypeError and ValueError for what is not a path or a size, and for a limit without its folder."""
        # Absolute, since the working directory may change.
        cache = None if cache_dir is None else Path(os.path.abspath(folder_named(cache_dir)))
        local = None if local_dir is None else Path(os.path.abspath(folder_named(local_dir, "local_dir")))
        if local is not None and (cache is None or os.path.realpath(local) == os.path.realpath(cache)):
            raise ValueError(
                f"local_dir={str(local_dir)!r} keeps copies of records in cache_dir={cache_dir!r}: name two folders"
            )
        if local is None and local_bytes is not None:
            raise ValueError(
                f"local_bytes={local_bytes!r} limits the copies in a local_dir, and there is none: name one"
            )
        if cache is None and max_bytes is not None:
            raise ValueError(f"max_bytes={max_bytes!r} limits the records of a cache_dir, and there is none: name one")
        return cls(
            cache, None if max_bytes is None else bytes_of(max_bytes, "max_bytes"),
            local, None if local_bytes is None else bytes_of(local_bytes, "local_bytes"),
        )  # fmt: skip
