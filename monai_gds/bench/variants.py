"""Backends and settings that are worth measuring, so that no benchmark needs a backend's name or its options."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from monai_gds.storage.registry import open_storage
from monai_gds.storage.storage import Storage

__all__ = ["MANY_FILES", "PAST_PAGE_CACHE", "TUNABLE", "TUNED", "TUNING_GRID", "Variant", "tuning_options"]


@dataclass(frozen=True)
class Variant:
    """A backend with options: keyword arguments of its class."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self, device: torch.device | str) -> Storage:
        """Opens it. Raises BackendUnavailable where it does not work."""
        return open_storage(self.backend, device, **self.options)


#: Reads past the page cache with a backend that needs no library.
PAST_PAGE_CACHE = Variant("posix", {"direct_io": True})

#: Ways to read many small files at once, for ``bench blocks``.
MANY_FILES = {
    "xnvme-block, io_uring": Variant("xnvme-block", {"be": "io_uring"}),
    "xnvme-block, libaio": Variant("xnvme-block", {"be": "libaio"}),
    "xnvme-block, thrpool": Variant("xnvme-block", {"be": "thrpool"}),
    "xnvme, page cache": Variant("xnvme"),
    "posix, page cache": Variant("posix"),
}

#: The backend that ``bench tensor tune`` tunes, and those that take the settings it finds.
TUNED = "deepnvme"
TUNABLE = ("deepnvme", "deepnvme-gds")

#: The settings that ``bench tensor tune`` tries, in every combination. DeepSpeed's ds_nvme_tune tries the same, but
#: transfers of 1 and 8 MiB only.
TUNING_GRID: dict[str, Sequence[Any]] = {
    "block_size": (256 << 10, 1 << 20, 8 << 20),
    "queue_depth": (8, 32, 128),
    "single_submit": (False, True),
    "intra_op_parallelism": (1, 2, 4, 8),
}


def tuning_options(tuned: str | os.PathLike[str] | None = None, **settings: Any) -> dict[str, Any]:
    """Options for the backends in :data:`TUNABLE`. Raises ValueError for a setting that does not work.

    Args:
        tuned: a file with the output of ds_nvme_tune or of ``bench tensor tune``.
        settings: single settings, which take precedence; None means not given.
    """
    from monai_gds.storage.deepnvme import Settings

    given = {name: value for name, value in settings.items() if value is not None}
    Settings.chosen(tuned, given)
    return {**given, **({"tuned": tuned} if tuned is not None else {})}
