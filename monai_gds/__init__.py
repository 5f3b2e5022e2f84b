"""monai_gds: MONAI datasets whose cache moves at the speed of the drive and the link.

``GDSDataset`` is a drop-in for MONAI's ``PersistentDataset`` and ``GDSDataset``. See ARCHITECTURE.md for the layout.

Public names are imported on first use: importing MONAI and torch takes seconds, which neither ``monai-gds --help`` nor
a helper process needs.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from monai_gds import errors
from monai_gds.errors import *  # noqa: F403

if TYPE_CHECKING:
    from monai_gds.dataset.dataset import GDSDataset as GDSDataset
    from monai_gds.dataset.settings import CacheOptions as CacheOptions
    from monai_gds.imagenet import ImageNetDataset as ImageNetDataset
    from monai_gds.items.tree import register_type as register_type
    from monai_gds.loader import GDSDataLoader as GDSDataLoader
    from monai_gds.loader.resume import rank_states as rank_states
    from monai_gds.pipeline.readers import IgzipReader as IgzipReader
    from monai_gds.storage import available_backends as available_backends
    from monai_gds.storage import open_storage as open_storage
    from monai_gds.storage.blockmap.block_map import BlockMap as BlockMap
    from monai_gds.swap.patching import patch as patch
    from monai_gds.swap.smart import SmartCacheDataset as SmartCacheDataset

    __version__: str

#: Modules of the names that are imported on first use.
_HOMES = {
    "BlockMap": "storage.blockmap.block_map",
    "CacheOptions": "dataset.settings",
    "GDSDataLoader": "loader",
    "GDSDataset": "dataset.dataset",
    "IgzipReader": "pipeline.readers",
    "ImageNetDataset": "imagenet",
    "SmartCacheDataset": "swap.smart",
    "available_backends": "storage",
    "open_storage": "storage",
    "patch": "swap.patching",
    "rank_states": "loader.resume",
    "register_type": "items.tree",
}

__all__ = ["__version__", *_HOMES, *errors.__all__]


def __getattr__(name: str) -> _Any:
    """Imports a public name on first use (PEP 562)."""
    value: _Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("monai_gds")
    elif name in _HOMES:
        value = getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
