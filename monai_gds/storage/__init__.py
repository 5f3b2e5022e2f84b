"""Moving bytes between files and tensors. Knows nothing of records, items or MONAI.

Callers use :class:`Storage`, made by :func:`open_storage`. A backend is a subclass of :class:`Backend`: read
:mod:`monai_gds.storage.backend` first. This folder is the core; ``deepnvme/`` and ``xnvme/`` are wings, imported only
when one of their backends is asked for.

Names are imported on first use, because block maps and the doctor need parts of this package without torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from monai_gds.storage.backend import Availability, Backend
    from monai_gds.storage.files import ALIGNMENT, Buffer, FileId
    from monai_gds.storage.pending import Pending
    from monai_gds.storage.reads import Reads
    from monai_gds.storage.registry import (
        available_backends,
        backend_names,
        choose_backend,
        open_storage,
        probe_backend,
        resolve_device,
    )
    from monai_gds.storage.storage import Storage

__all__ = [
    "ALIGNMENT", "Availability", "Backend", "Buffer", "FileId", "Pending", "Reads", "Storage", "available_backends",
    "backend_names", "choose_backend", "open_storage", "probe_backend", "resolve_device",
]  # fmt: skip

_HOMES = {
    "ALIGNMENT": "files", "Availability": "backend", "Backend": "backend", "Buffer": "files", "FileId": "files",
    "Pending": "pending", "Reads": "reads", "Storage": "storage",
}  # fmt: skip


def __getattr__(name: str) -> _Any:
    """Imports a public name when it is first used (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _import_module(f"{__name__}.{_HOMES.get(name, 'registry')}")
    value = globals()[name] = getattr(home, name)
    return value
