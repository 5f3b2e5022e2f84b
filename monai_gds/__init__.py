"""monai_gds: MONAI datasets whose cache moves at the speed of the drive and the link.

``GDSDataset`` is a drop-in for MONAI's ``PersistentDataset`` and ``GDSDataset``. See ARCHITECTURE.md for the layout.

Public names are imported on first use: importing MONAI and torch takes seconds, which neither ``monai-gds --help`` nor
a helper process needs.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from monai_gds.cache.tree import register_type
    from monai_gds.dataset import GDSDataset
    from monai_gds.errors import (
        BackendUnavailable,
        BlockMapError,
        CacheWarning,
        CodecMissing,
        DamagedRecord,
        FailedItem,
        FileChanged,
        HashingError,
        MonaiGdsError,
        NewerRecord,
        NotMappable,
        NotSaved,
        PopulateError,
        RecordError,
        StorageError,
        UnsupportedType,
        WorkerDied,
    )
    from monai_gds.imagenet import ImageNetDataset
    from monai_gds.loader import GDSDataLoader
    from monai_gds.patching import patch
    from monai_gds.readers import IgzipReader
    from monai_gds.storage import available_backends, open_storage
    from monai_gds.storage.xnvme.block_map import BlockMap

    __version__: str

__all__ = [
    "BackendUnavailable",
    "BlockMap",
    "BlockMapError",
    "CacheWarning",
    "CodecMissing",
    "DamagedRecord",
    "FailedItem",
    "FileChanged",
    "GDSDataLoader",
    "GDSDataset",
    "HashingError",
    "IgzipReader",
    "ImageNetDataset",
    "MonaiGdsError",
    "NewerRecord",
    "NotMappable",
    "NotSaved",
    "PopulateError",
    "RecordError",
    "StorageError",
    "UnsupportedType",
    "WorkerDied",
    "__version__",
    "available_backends",
    "open_storage",
    "patch",
    "register_type",
]

#: Modules of the public names. The others are in ``errors``.
_HOMES = {
    "BlockMap": "storage.xnvme.block_map",
    "GDSDataLoader": "loader",
    "GDSDataset": "dataset",
    "IgzipReader": "readers",
    "ImageNetDataset": "imagenet",
    "available_backends": "storage",
    "open_storage": "storage",
    "patch": "patching",
    "register_type": "cache.tree",
}


def __getattr__(name: str) -> _Any:
    """Imports a public name on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: _Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("monai_gds")
    else:
        value = getattr(_import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
