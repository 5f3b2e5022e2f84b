"""Which strings of items and transforms name source files."""

from __future__ import annotations

import collections.abc
import contextlib
import os
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from monai_gds.keys.libraries import library_of_class
from monai_gds.keys.reads import attributes_of, own_attribute

#: Suffix of a file -> suffixes of files beside it that may hold another part of the same image: Analyze and NIfTI
#: pairs with SPM's affines, the data files of MetaImage and NRRD headers, which usually share the header's stem, and
#: the headers and data of Philips and AFNI. Any file of a pair names it.
_COMPANIONS = {
    ".hdr": (".img", ".img.gz", ".mat"),
    ".hdr.gz": (".img.gz", ".img", ".mat.gz"),
    ".hdr.bz2": (".img.bz2", ".mat.bz2"),
    ".img": (".hdr", ".hdr.gz", ".mat"),
    ".img.gz": (".hdr.gz", ".hdr", ".mat.gz"),
    ".img.bz2": (".hdr.bz2", ".mat.bz2"),
    ".mhd": (".raw", ".zraw", ".raw.gz"),
    ".nhdr": (".raw", ".raw.gz", ".nrrd"),
    ".par": (".rec",),
    ".rec": (".par",),
    ".head": (".brik", ".brik.gz", ".brik.bz2"),
    ".brik": (".head",),
    ".brik.gz": (".head",),
    ".brik.bz2": (".head",),
}

#: What is rare in paths of data, but not in other texts with a slash.
_UNUSUAL = re.compile(r"[\s*?%{}<>|\\]|://|/$")

_NO_STRINGS = frozenset({bool, int, float, complex, range, memoryview, bytearray, type(None)})

#: The longest path, in characters.
_MOST_CHARACTERS = 4096


def absolute(path: str) -> str:
    """The absolute path of a source; ``~`` is the home directory, as in MONAI's LoadImage.

    ``..`` is kept, unlike in ``os.path.abspath``: after a link, removing it would lead elsewhere.
    """
    path = os.path.expanduser(path) if path.startswith("~") else path
    if path.startswith("/"):
        return path
    with contextlib.suppress(OSError):  # the working directory is gone
        return os.path.join(os.getcwd(), path)
    return path


def companions(path: str) -> list[str]:
    """The files that may hold another part of an image, whether they exist or not.

    Example:
        >>> from monai_gds.keys.source_names import companions
        >>> companions("scans/ct.mhd")
        ['scans/ct.raw', 'scans/ct.zraw', 'scans/ct.raw.gz']
    """
    lower = path.lower()
    for suffix, others in _COMPANIONS.items():
        if lower.endswith(suffix):
            stem, written = path[: -len(suffix)], path[-len(suffix) :]
            if not written.split(".")[1].isupper():
                return [stem + other for other in others]
            found = [stem + other.upper() for other in others]
            # AFNI writes .BRIK.gz
            return found + [name[:-3] + name[-3:].lower() for name in found if name.endswith(".GZ")]
    return []


def looks_like_path(text: str) -> bool:
    """Whether a string may name a file: it has a separator, or a suffix such as ``.nii.gz``, ``.dcm``, ``.npy``.

    Example:
        >>> from monai_gds.keys.source_names import looks_like_path
        >>> [looks_like_path(text) for text in ("ct.nii.gz", "/data/series", "train", "a sentence.")]
        [True, True, False, False]
    """
    if not 0 < len(text) < _MOST_CHARACTERS or "\0" in text:
        return False
    stem, _, suffix = text.rpartition(".")
    return "/" in text or (bool(stem.strip()) and len(suffix) <= 12 and suffix.isalnum() and suffix.isascii())


def candidates(item: Any, loaded_keys: Collection[Any] | Literal["all"]) -> list[tuple[str, bool]]:
    """The strings of an item that may name sources, each with whether a folder of that name counts too.

    A string may name a source if a transform loads the value under its key (``loaded_keys``, or ``"all"`` if whole
    items are loaded), if it looks like a path, or if it is a ``Path``. A folder counts if it is loaded, is a ``Path``,
    or has a separator: ``{"split": "train"}`` never means ``./train``. Attributes of a user's own objects count as
    values, too, or what their ``__cache_key__`` returns in place of them.

    Each string comes once, sorted, because the order of sets differs between processes.

    Example:
        >>> from monai_gds.keys.source_names import candidates
        >>> candidates({"image": "ct", "split": "train", "notes": "see notes.txt"}, {"image"})
        [('ct', True), ('see notes.txt', False)]
    """
    found: dict[str, bool] = {}
    for text, is_path in _strings(item, loaded_keys, loaded_keys == "all", {}):
        if is_path or looks_like_path(text):
            found[text] = found.get(text, False) or is_path or "/" in text
            for other in companions(text):
                found.setdefault(other, False)
    return sorted(found.items())


def texts(item: Any) -> list[str]:
    """Every text and path among an item's values."""
    return [text for text, _ in _strings(item, (), True, {})]


def _strings(
    value: Any, keys: Collection[Any], loaded: bool, seen: dict[tuple[int, bool], Any]
) -> Iterator[tuple[str, bool]]:
    """Every string and path among an item's values, with whether it is known to be a path.

    ``keys`` apply to an item, or to the dicts in an item that is a list, but not to dicts below a key. ``seen``
    holds the objects met so far, which may refer to each other: each is visited once, and kept, so that its id stays
    its own.
    """
    if type(value) in _NO_STRINGS:  # 1,000 numbers take 0.2 ms, and took 2.3
        return
    if isinstance(value, str):
        if 0 < len(value) < _MOST_CHARACTERS and "\0" not in value:
            yield str.__str__(value), loaded  # the plain string of np.str_ and enums
    elif isinstance(value, os.PathLike):
        yield os.fsdecode(value), True
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _strings(below, (), loaded or key in keys, seen)
    elif isinstance(value, bytes):
        if len(value) < _MOST_CHARACTERS:
            yield from _strings(os.fsdecode(value), (), loaded, seen)
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque, collections.abc.Sequence)):
        for element in value:
            yield from _strings(element, keys, loaded, seen)
    elif isinstance(value, np.ndarray):
        for element in value.ravel().tolist() if value.dtype.kind in "USOT" else ():
            yield from _strings(element, keys, loaded, seen)
    elif (id(value), loaded) not in seen:
        seen[id(value), loaded] = value
        for element in _attributes(value):
            yield from _strings(element, (), loaded, seen)


def _attributes(value: Any) -> Iterable[Any]:
    """The values that count of a user's object or a namespace; none of other objects, such as tensors and readers."""
    if library_of_class(type(value)) is not None and not isinstance(value, types.SimpleNamespace):
        return ()
    if isinstance(value, type):  # its __cache_key__ is for its instances
        return ()
    declared = own_attribute(value, "__cache_key__")
    return attributes_of(value).values() if declared is None else (declared(),)


def files_named(strings: Iterable[str]) -> list[str]:
    """The strings of a pipeline that name a file (an atlas, weights, a table), each once, sorted.

    They are existing regular files, or paths without unusual characters, where a file may appear later. Folders do not
    count: one that is written to would differ in every run.
    """
    named = filter(looks_like_path, strings)
    found = {text for text in named if _may_appear(text) or os.path.isfile(os.path.expanduser(text))}
    return sorted(found.union(*map(companions, found)))


def _may_appear(path: str) -> bool:
    return "/" in path and not _UNUSUAL.search(path) and not os.path.isdir(path)
