"""``patch``: code that uses MONAI's caching datasets gets :class:`~monai_gds.GDSDataset`, without being edited.

Called by users, in the first lines of a script or around one call. Bundles, MONAILabel and Auto3DSeg's templates look
their classes up by ``monai.data.NAME`` or through MONAI's ``ConfigParser``, which finds them in ``monai.data.dataset``.
"""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from types import TracebackType
from typing import Any, Self, SupportsIndex

import monai.data
import monai.data.dataset

from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.settings import refuse
from monai_gds.errors import CacheWarning

#: The classes that are replaced. ``SmartCacheDataset`` is not: it changes its items from epoch to epoch.
NAMES = ("PersistentDataset", "CacheDataset", "GDSDataset")

#: Where code looks for them.
_PLACES = (monai.data, monai.data.dataset)

#: MONAI's own classes. This module is imported before anything can be patched.
_MONAIS = {name: getattr(monai.data.dataset, name) for name in NAMES}

#: Modules of MONAI that derive classes from these. They must have done so before the names change.
_DERIVE = ("monai.apps.datasets", "monai.handlers.smartcache_handler")

#: Arguments of MONAI's ``CacheDataset`` that have no effect here: everything is cached, on disk.
_UNUSED = {
    "cache_num", "cache_rate", "num_workers", "progress", "copy_cache", "as_contiguous", "hash_as_key", "runtime_cache",
}  # fmt: skip


class Patch:
    """Replaces MONAI's names until :meth:`undo` is called, or its ``with`` block ends."""

    def __init__(self, stand_ins: dict[str, type]) -> None:
        self._stand_ins = stand_ins
        self._before = [(place, name, getattr(place, name)) for place in _PLACES for name in stand_ins]
        for place, name, original in self._before:
            setattr(place, name, stand_ins[name])
            if original is _MONAIS[name]:
                original.__reduce_ex__ = _reduce_ex_of_monais

    def undo(self) -> None:
        """Puts MONAI's classes back. Datasets that were already made stay as they are.

        Raises:
            RuntimeError: another patch has been made since, and must be undone first.
        """
        if any(getattr(place, name) is not self._stand_ins[name] for place, name, _ in self._before):
            raise RuntimeError("the names of monai.data have been replaced again since: undo that first")
        for place, name, original in self._before:
            setattr(place, name, original)
            if original is _MONAIS[name] and "__reduce_ex__" in vars(original):
                del original.__reduce_ex__
        self._before = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        names = ", ".join(sorted(self._stand_ins))
        return f"<monai.data: {names} are {'monai_gds.GDSDataset' if self._before else 'themselves again'}>"


def patch(cache_dir: str | os.PathLike[str], device: Any = "cpu", **options: Any) -> Patch:
    """Replaces MONAI's ``PersistentDataset``, ``CacheDataset`` and ``GDSDataset`` with :class:`~monai_gds.GDSDataset`.

    A name that a module has already imported (``from monai.data import CacheDataset``) stays MONAI's there: call this
    first.

    Args:
        cache_dir: the folder of datasets that do not name one, as ``CacheDataset`` never does.
        device: the device of datasets that do not name one. The default is the CPU, as in MONAI.
        options: further arguments of :class:`~monai_gds.GDSDataset`.

    Returns:
        An object whose ``undo()`` restores MONAI's names. It is also a context manager.

    Raises:
        TypeError: :class:`~monai_gds.GDSDataset` takes no such option.

    Example:
        >>> import monai.data, tempfile
        >>> from monai.transforms import Compose
        >>> with tempfile.TemporaryDirectory() as folder, patch(folder):
        ...     dataset = monai.data.CacheDataset([1, 2], Compose([]), cache_rate=1.0, progress=False)
        >>> type(dataset).__mro__[1].__name__, monai.data.CacheDataset.__module__
        ('GDSDataset', 'monai.data.dataset')
    """
    refuse({name: options[name] for name in options.keys() - inspect.signature(GDSDataset).parameters.keys()})
    for module in _DERIVE:
        importlib.import_module(module)
    defaults = {"cache_dir": cache_dir, "device": device, **options}
    return Patch({name: _stand_in(getattr(monai.data, name), defaults) for name in NAMES})


def _stand_in(original: type, defaults: dict[str, Any]) -> type:
    """A class that takes the arguments of ``original``. ``ConfigParser`` looks at its module's name."""
    signature = inspect.signature(original)

    def make(self: GDSDataset, *args: Any, **kwargs: Any) -> None:
        extra = {name: kwargs.pop(name) for name in set(kwargs) - set(signature.parameters)}
        given = {**signature.bind(*args, **kwargs).arguments, **extra}
        # MONAI's way to hash items is not stable from run to run, so that a cache would never be hit again.
        given = {name: value for name, value in given.items() if name not in ("hash_func", "hash_transform")}
        if unused := sorted(given.keys() & _UNUSED):
            message = (
                f"{', '.join(unused)}: of no effect in a GDSDataset, which caches every item, on disk; leave it out"
            )
            warnings.warn(message, CacheWarning, stacklevel=2)
        given = {name: value for name, value in given.items() if name not in _UNUSED}
        if given.get("cache_dir") is None:
            given.pop("cache_dir", None)
        GDSDataset.__init__(self, **{"transform": None, **defaults, **given})  # only CacheDataset may have none

    def reduce_ex(self: GDSDataset, protocol: SupportsIndex) -> Any:  # in another process, this name may be MONAI's
        if type(self) is not made:
            return GDSDataset.__reduce_ex__(self, protocol)
        return object.__new__, (GDSDataset,), self.__getstate__()

    methods = {"__init__": make, "__reduce_ex__": reduce_ex, "__doc__": GDSDataset.__doc__}
    made = type(original.__name__, (GDSDataset,), {**methods, "__module__": original.__module__})
    return made


def _reduce_ex_of_monais(self: Any, protocol: SupportsIndex) -> Any:
    """Pickles a dataset of MONAI's own, whose class pickle does not find by its name while that is replaced."""
    if type(self) not in _MONAIS.values():
        return object.__reduce_ex__(self, protocol)
    return _new_of_monais, (type(self).__name__,), *object.__reduce_ex__(self, 2)[2:]


def _new_of_monais(name: str) -> Any:
    return object.__new__(_MONAIS[name])
