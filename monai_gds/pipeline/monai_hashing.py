"""What the hasher of the cache must know about MONAI's classes. Importing this file registers it.

Imported by :mod:`monai_gds.dataset.item_keys`. MONAI's version is an ingredient of the key by itself.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from monai_gds.keys.hashing import LibraryClasses, register_library

__all__: list[str] = []

_RANDOM_STATE = frozenset({"R"})


def _writes_files(cls: type) -> bool:
    return cls.__module__.startswith("monai.") and cls.__name__.startswith(("Save", "Write"))


def _requested_readers(loader: Any) -> list[Any]:
    """The readers of a ``LoadImage`` that decide what it reads.

    Without ``reader=``, the file's suffix selects among all that are installed, and all count. With ``reader=``, MONAI
    still registers its default readers in front of the requested ones, and which those are depends on the libraries
    that are installed.
    """
    readers = list(loader.readers)
    if loader.auto_select:
        return readers
    from monai.transforms.io.array import SUPPORTED_READERS, get_default_reader_registration_order

    default = iter([SUPPORTED_READERS[name] for name in get_default_reader_registration_order()])
    skipped = 0
    for reader in readers:
        if not any(type(reader) is cls for cls in default):  # `default` continues after the match
            break
        skipped += 1
    return readers[skipped:] or readers


register_library(
    "monai",
    LibraryClasses(
        transient={
            "monai.transforms.transform.Randomizable": _RANDOM_STATE,
            "monai.transforms.transform.RandomizableTransform": _RANDOM_STATE | {"_do_transform"},
            "monai.transforms.inverse.TraceableTransform": frozenset({"_tracing"}),
            "monai.data.image_reader.ImageReader": frozenset({"filenames", "has_series"}),
        },
        computed={
            # kept in _tracing, which is created on first use
            "monai.transforms.inverse.TraceableTransform": {"tracing": attrgetter("tracing")},
            "monai.transforms.io.array.LoadImage": {"readers": _requested_readers},
        },
        writes_files=_writes_files,
        references="__local_refs",  # what "@" in an expression of a bundle's configuration becomes
    ),
)
