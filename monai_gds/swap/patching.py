"""``patch``: code that uses MONAI's datasets and loaders gets ours, without being edited.

Called by users, in the first lines of a script or around one call, and by ``monai-gds run``. Bundles, MONAILabel and
Auto3DSeg's templates look their classes up by ``monai.data.NAME`` or through MONAI's ``ConfigParser``, which finds them
in the modules that define them. Names are replaced there. ``Dataset`` and the loaders have too many subclasses for
that: their constructors are replaced, and decide for each object.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from types import MappingProxyType, TracebackType
from typing import Any, Self, SupportsIndex

import monai.apps
import monai.data

from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.settings import refuse
from monai_gds.errors import HashingError, warn
from monai_gds.swap import cached, loaders, plain, slides
from monai_gds.swap.smart import SmartCacheDataset
from monai_gds.swap.stand_in import OURS

#: What stands in for each of MONAI's classes. This module is imported before anything can be patched.
_STAND_INS: Mapping[type, type] = {
    monai.data.CacheDataset: cached.Cached,
    monai.data.CacheNTransDataset: cached.AfterN,
    monai.data.GDSDataset: cached.OfGDS,
    monai.data.ImageDataset: plain.Images,
    monai.data.LMDBDataset: cached.OfLMDB,
    monai.data.MaskedPatchWSIDataset: slides.Masked,
    monai.data.PatchWSIDataset: slides.Patches,
    monai.data.PersistentDataset: cached.Persistent,
    monai.data.SlidingPatchWSIDataset: slides.Sliding,
    monai.data.SmartCacheDataset: SmartCacheDataset,
    monai.apps.DecathlonDataset: cached.Decathlon,
    monai.apps.MedNISTDataset: cached.MedNIST,
    monai.apps.TciaDataset: cached.Tcia,
}

#: MONAI's own classes by name.
_MONAIS = {kind.__name__: kind for kind in _STAND_INS}

#: The names of those that are replaced.
NAMES = tuple(_MONAIS)

#: Those that gain only if they load files. The constructor of ``Dataset``, which both have, decides.
_PLAIN: Mapping[type, type] = {monai.data.Dataset: plain.Plain, monai.data.CSVDataset: plain.Table}

#: Loaders whose constructors are replaced.
_LOADERS = (monai.data.DataLoader, monai.data.ThreadDataLoader)

_JOINS = "it is made of other datasets, which are ours where they are replaced"
_STREAMS = "it is a stream, and a cache needs items"

#: What stays MONAI's, and why.
LEFT_ALONE: Mapping[str, str] = {
    "ArrayDataset": _JOINS,
    "CSVIterableDataset": _STREAMS,
    "CrossValidation": _JOINS,
    "DatasetFunc": "it makes a list of items, which is the data of other datasets",
    "GridPatchDataset": "it cuts the items of another dataset into patches: give it one of ours as data",
    "IterableDataset": _STREAMS,
    "NPZDictItemDataset": "its arrays are in memory",
    "PatchDataset": "it cuts the items of another dataset into patches: give it one of ours as data",
    "ShuffleBuffer": _STREAMS,
    "VideoDataset": _STREAMS,
    "ZipDataset": _JOINS,
    "torch.utils.data.DataLoader": "it is torch's: use MONAI's, or GDSDataLoader",
}


class Patch:
    """MONAI's names and constructors, replaced until :meth:`undo` is called, or its ``with`` block ends.

    Attributes:
        replaced: what stands in for each class, in words, by the class's name.
        left_alone: the datasets and loaders that stay MONAI's or torch's, by name, and why.
    """

    def __init__(self, changes: list[tuple[Any, str, Any]], replaced: Mapping[str, str]) -> None:
        self.replaced: Mapping[str, str] = MappingProxyType(dict(replaced))
        self.left_alone: Mapping[str, str] = MappingProxyType(
            {**LEFT_ALONE, **{kind.__name__: "by loaders=False" for kind in _LOADERS if kind.__name__ not in replaced}}
        )
        self._changes = [(place, name, vars(place)[name], new) for place, name, new in changes]
        for place, name, original, new in self._changes:
            setattr(place, name, new)
            if original in _STAND_INS:
                original.__reduce_ex__ = _reduce_ex_of_monais

    def undo(self) -> None:
        """Puts MONAI's classes back. Datasets and loaders that were already made stay as they are.

        Raises:
            RuntimeError: another patch has been made since, and must be undone first.
        """
        if any(vars(place)[name] is not new for place, name, _, new in self._changes):
            raise RuntimeError("the names of monai.data have been replaced again since: undo that first")
        for place, name, original, _ in self._changes:
            setattr(place, name, original)
            if original in _STAND_INS and "__reduce_ex__" in vars(original):
                del original.__reduce_ex__
        self._changes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        if not self._changes:
            return f"<monai.data: {', '.join(sorted(self.replaced))} are themselves again>"
        lines = [f"  {name}: {what}" for name, what in sorted(self.replaced.items())]
        left = [f"  {name}: {why}" for name, why in sorted(self.left_alone.items())]
        return "\n".join(["<monai.data. Replaced:", *lines, "left alone:", *left]) + ">"


def patch(cache_dir: str | os.PathLike[str], device: Any = "cpu", *, loaders: bool = True, **options: Any) -> Patch:
    """Replaces MONAI's datasets with stand-ins that cache in a folder, and its loaders over them with GDSDataLoader.

    A stand-in takes the arguments of the class that it stands in for, and by name those of
    :class:`~monai_gds.GDSDataset`. ``CacheDataset`` and its kin are full when their constructors return. ``Dataset``
    and ``CSVDataset`` cache where their deterministic transforms load files and save none. ``DataLoader`` and
    ``ThreadDataLoader`` over one of ours become a :class:`~monai_gds.GDSDataLoader` with the same arguments.
    ``print(patch(…))`` lists what is replaced, and what is left alone and why.

    A caching dataset that a module has already imported (``from monai.data import CacheDataset``) or derived a class
    from stays MONAI's there, and a warning says so: call this first, or use ``monai-gds run``.

    Args:
        cache_dir: the folder of datasets that do not name one, as ``CacheDataset`` never does.
        device: the device of datasets that do not name one. The default is the CPU, as in MONAI.
        loaders: whether loaders are replaced too.
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
        ('Cached', 'monai.data.dataset')
    """
    refuse({name: options[name] for name in options.keys() - OURS}, OURS)
    defaults = {"cache_dir": os.path.abspath(os.path.expanduser(cache_dir)), "device": device, **options}
    changes: list[tuple[Any, str, Any]] = []
    replaced = {}
    for original, stand_in in _STAND_INS.items():
        made = _made(getattr(sys.modules[original.__module__], original.__name__), stand_in, defaults)
        replaced[original.__name__] = f"{stand_in.__module__}.{stand_in.__name__}"
        places = {sys.modules[original.__module__], sys.modules[original.__module__.rpartition(".")[0]]}
        changes += [(place, original.__name__, made) for place in places]
    changes.append((monai.data.Dataset, "__init__", _constructor(defaults)))
    replaced |= {kind.__name__: f"{_PLAIN[kind].__module__}, where it loads files and saves none" for kind in _PLAIN}
    if loaders:
        changes += [(kind, "__init__", _loader(kind)) for kind in _LOADERS]
        replaced |= {kind.__name__: "GDSDataLoader over datasets of ours" for kind in _LOADERS}
    if early := _imported_already():
        what_to_do = "Call patch() first, or use `monai-gds run`"
        warn(f"imported or derived before patch(), and still MONAI's: {early}. {what_to_do}")
    return Patch(changes, replaced)


def _imported_already() -> str:
    """The caching datasets that modules hold by their names or derive from, such as ``CacheDataset in __main__``."""
    found = [f"{kind.__name__} in {kind.__module__}" for kind in _derived(_STAND_INS)]
    for module in [*sys.modules]:
        if module.partition(".")[0] in ("monai", "monai_gds", "__mp_main__"):  # the last one is __main__ again
            continue
        try:
            held = object.__getattribute__(sys.modules[module], "__dict__")  # vars would load a lazy module
        except (AttributeError, KeyError):
            continue
        if names := [name for name, kind in _MONAIS.items() if held.get(name) is kind]:
            found.append(f"{', '.join(names)} in {module}")
    return "; ".join(found)


def _derived(kinds: Iterable[type[object]]) -> Iterator[type[object]]:
    """The classes of users that derive from these, and not from ours."""
    for kind in dict.fromkeys(derived for one in kinds for derived in one.__subclasses__()):
        if not issubclass(kind, (GDSDataset, plain.Images)) and kind not in _STAND_INS:
            if not kind.__module__.startswith(("monai.", "monai_gds.")):
                yield kind
            yield from _derived([kind])


_loader = loaders.constructor


def _made(original: type, stand_in: type, defaults: Mapping[str, Any]) -> type:
    """A class that stands in with these defaults. ``ConfigParser`` looks at its module's name."""

    def reduce_ex(self: Any, protocol: SupportsIndex) -> Any:  # in another process, this name may be MONAI's
        if type(self) is not made:
            return object.__reduce_ex__(self, protocol)
        return _new, (stand_in, original.__name__), *object.__reduce_ex__(self, 2)[2:]

    names = {"_defaults": defaults, "__reduce_ex__": reduce_ex, "__doc__": stand_in.__doc__}
    made: type = type(original.__name__, (stand_in,), {**names, "__module__": original.__module__})
    return made


def _constructor(defaults: Mapping[str, Any]) -> Callable[..., None]:
    """A constructor for ``Dataset`` and ``CSVDataset``, which makes one of ours where that gains."""
    original: Callable[..., None] = monai.data.Dataset.__init__
    stand_ins = {kind: _made(kind, stand_in, defaults) for kind, stand_in in _PLAIN.items()}

    @wraps(original)
    def made(self: Any, data: Any, transform: Any = None) -> None:
        kind: type = type(self)
        if kind not in stand_ins or not plain.gains(data, transform):
            return original(self, data, transform)
        self.__class__ = stand_ins[kind]
        try:
            self._make({"data": data, "transform": transform})
        except HashingError as e:
            self.__class__ = kind
            vars(self).clear()
            warn(f"a {kind.__name__} stays MONAI's, and computes its items in every epoch: {e}")
            original(self, data, transform)
        return None

    return made


def _reduce_ex_of_monais(self: Any, protocol: SupportsIndex) -> Any:
    """Pickles an object of MONAI's own, whose class pickle does not find by its name while that is replaced."""
    if type(self) not in _STAND_INS:
        return object.__reduce_ex__(self, protocol)
    return _new_of_monais, (type(self).__name__,), *object.__reduce_ex__(self, 2)[2:]


def _new(kind: type, name: str) -> Any:
    """An object of the class that has one of MONAI's names now, if that is a ``kind``; else of ``kind`` itself."""
    now = getattr(sys.modules[_MONAIS[name].__module__], name) if name in _MONAIS else kind
    return object.__new__(now if issubclass(now, kind) else kind)


def _new_of_monais(name: str) -> Any:
    return object.__new__(_MONAIS[name])
