"""``DataLoader`` and ``ThreadDataLoader`` over datasets of ours, which become a ``GDSDataLoader`` as they are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from monai_gds.loader import GDSDataLoader
from monai_gds.loader.data_loader import gds_datasets


def constructor(kind: type) -> Callable[..., None]:
    """A constructor in the place of that of MONAI's loader ``kind``. Over other datasets it makes MONAI's.

    A subclass stays what it is: it may override what a GDSDataLoader does otherwise.
    """
    original: Callable[..., None] = vars(kind)["__init__"]
    ours: Callable[..., None] = GDSDataLoader.__init__
    signature = inspect.signature(original)

    @wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is not kind:
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        if not gds_datasets(given["dataset"]):
            return original(self, *args, **kwargs)
        self.__class__ = GDSDataLoader
        named = {name: value for name, value in given.items() if name not in ("self", "kwargs")}
        ours(self, **named, **given.get("kwargs", {}))
        return None

    return made
