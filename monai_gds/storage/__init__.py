"""Moving bytes between files and tensors. Knows nothing of records, items or MONAI.

Start with :mod:`monai_gds.storage.base`, which says what a backend promises. A new backend is one file here and one
line in :mod:`monai_gds.storage.registry`.
"""

from monai_gds.storage.base import ALIGNMENT, Availability, Buffer, FileId, Pending, Read, Storage
from monai_gds.storage.registry import available_backends, choose_backend, open_storage, resolve_device

__all__ = [
    "ALIGNMENT",
    "Availability",
    "Buffer",
    "FileId",
    "Pending",
    "Read",
    "Storage",
    "available_backends",
    "choose_backend",
    "open_storage",
    "resolve_device",
]
