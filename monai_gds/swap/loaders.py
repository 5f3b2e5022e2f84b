"""``DataLoader`` and ``ThreadDataLoader`` over datasets of ours, which become a ``GDSDataLoader`` as they are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

from monai.data import ThreadDataLoader

from monai_gds.loader import GDSDataLoader
from monai_gds.loader.subsets import gds_datasets


def _around(kind: type, loader: Any, of_threads: bool) -> Literal["iter", "first batch", "thread"]:
    """Whose settings, such as ``no_grad``, MONAI's loader ``kind`` has for random transforms.

    Processes have those of the thread that forks them, which ``ThreadDataLoader`` does for the first batch.
    """
    if kind is ThreadDataLoader and (of_threads or not loader.num_workers):
        return "thread"
    return "iter" if kind is not ThreadDataLoader and loader.num_workers else "first batch"


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
        more = given.get("kwargs", {})
        ours(self, **named, **more)
        vars(self)["around"] = _around(kind, self, named.get("use_thread_workers", False))
        return None

    return made
