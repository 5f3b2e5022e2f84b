"""monai_gds: MONAI datasets whose cache moves at the speed of the drive and the link.

``GDSDataset`` is a drop-in for MONAI's ``PersistentDataset`` and ``GDSDataset``. ARCHITECTURE.md says where things are.
"""

from importlib.metadata import version as _version

from monai_gds.blockmap import BlockMap
from monai_gds.cache.tree import register_type
from monai_gds.dataset import GDSDataset
from monai_gds.errors import (
    BackendUnavailable,
    BlockMapError,
    CacheWarning,
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
from monai_gds.loader import GDSDataLoader
from monai_gds.storage import available_backends, open_storage

__version__ = _version("monai_gds")

__all__ = [
    "BackendUnavailable",
    "BlockMap",
    "BlockMapError",
    "CacheWarning",
    "DamagedRecord",
    "FailedItem",
    "FileChanged",
    "GDSDataLoader",
    "GDSDataset",
    "HashingError",
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
    "register_type",
]
