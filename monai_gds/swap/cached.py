"""Stand-ins for the datasets of MONAI's that cache: in memory, in files, in LMDB, or after so many transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from monai.apps import DecathlonDataset, MedNISTDataset, TciaDataset
from monai.data import CacheDataset, CacheNTransDataset, LMDBDataset
from monai.data import GDSDataset as MonaisGDSDataset
from monai.transforms import Compose, Randomizable, Transform, convert_to_contiguous
from monai.transforms.traits import LazyTrait, RandomizableTrait

from monai_gds.base import cores
from monai_gds.dataset.dataset import GDSDataset, changes_items
from monai_gds.dataset.populate import fill
from monai_gds.dataset.session import Session
from monai_gds.dataset.settings import CacheOptions
from monai_gds.errors import NotSaved, warn
from monai_gds.pipeline.parts import parts
from monai_gds.pipeline.split import before_cuda, in_order, with_only
from monai_gds.swap.stand_in import StandIn, divided

#: Methods of ``CacheDataset`` that make or hold items in memory, which nothing here calls.
_IN_MEMORY = ("_load_cache_item", "_fill_cache")

#: Methods of ``PersistentDataset``, which ``CacheDataset`` does not have, and which are called here.
_OF_PERSISTENT = ("_pre_transform", "_post_transform", "_cachecheck")


def _fill(dataset: GDSDataset, *args: Any, **kwargs: Any) -> None:
    """As :func:`fill`. A folder that cannot be written does not end a program that needs none with MONAI."""
    try:
        fill(dataset, *args, **kwargs)
    except NotSaved as e:
        if dataset.settings.strict:
            raise
        warn(f"{e}. Items without a record are computed {dataset.settings.again}")


def _refused(self: Any, *_: Any, **__: Any) -> Any:
    raise TypeError(
        "what is cached cannot be changed: items are records on disk. set_data() takes other data. To keep items in "
        "memory and change them, use monai.data's class before patch() is called"
    )


class _Item(dict[Any, Any]):
    """A cached item, which is made for each access: a change would be lost. Copies of it are dicts."""

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refused

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return dict, (dict(self),)


class CachedItems(MutableSequence[Any]):
    """The cached items of a dataset up to their random transforms, as ``CacheDataset`` has them in its ``_cache``.

    Raises:
        TypeError: on any change.
    """

    def __init__(self, dataset: Cached) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset._cached)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        session, place = self._dataset.session, self._dataset._cached[index]
        found = session.begin([None], [session.data[place]], whole=True)[0].finish()
        return _Item(found) if type(found) is dict else found

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    __setitem__ = __delitem__ = insert = _refused


class Cached(StandIn, CacheDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``CacheDataset``: what that computes in its constructor, this has records of when it returns.

    Attributes:
        _cached: where these items are in the data.
    """

    _theirs = CacheDataset

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in (*_IN_MEMORY, *_OF_PERSISTENT):
            owner = next(kind for kind in type(self).__mro__ if name in vars(kind))
            if not owner.__module__.startswith(("monai.", "monai_gds.")):
                what = "is not called here" if name in _IN_MEMORY else "MONAI's does not have, and is called here"
                raise TypeError(
                    f"{owner.__name__} has a {name} of its own, which {what}. Make it a transform, or override "
                    "_pre_transform in a class derived from monai_gds.GDSDataset, or derive from monai.data's class "
                    "before patch() is called"
                )
        given, self._given = divided(self._theirs, args, kwargs)
        self._theirs.__init__(self, *given.args, **given.kwargs)  # calls set_data

    def set_data(self, data: Sequence[Any]) -> None:
        """Takes new data, and fills the cache, unless ``runtime_cache`` leaves that to the first use of each item."""
        wanted = self._take(data)
        # With hash_as_key, equal items count once. They have one record in any case.
        unique = {self.hash_func(item): i for i, item in enumerate(data)} if self.hash_as_key else range(len(data))
        self.cache_num = max(0, min(int(self.set_num), int(len(unique) * self.set_rate), len(unique)))
        self._cached: Sequence[int] = range(self.cache_num)
        if isinstance(unique, dict):
            self._hash_keys, self._cached = list(unique)[: self.cache_num], list(unique.values())[: self.cache_num]
        whole = self.cache_num == len(unique)
        if whole and (count := _before_gpu(self)):
            self._hold(count)
        elif _at_once(self) or wanted:
            if not whole and not wanted:
                warn(
                    f"cache_num, cache_rate: {self.cache_num} of {len(unique)} items are cached now, and the others "
                    "when they are first read. Records are on disk and take no memory"
                )
            self._fill(wanted or self._cached)

    def _take(self, data: Sequence[Any]) -> Sequence[int]:
        """Takes new data. The first time, this makes the GDSDataset, and returns what ``populate`` asks to fill."""
        if "settings" in vars(self):
            GDSDataset.set_data(self, data)
            self._runtime.keys = None  # to look at sources again
            return ()
        given = {**self._defaults, **self.__dict__.pop("_given")}
        options, populate = CacheOptions.of(given.get("options", {})).once(), given.get("populate", False)
        own = {"data": data, "transform": self.transform, "options": options, "populate": False}  # filled by set_data
        self._make({**given, **own})
        return range(len(data)) if populate else ()

    def _check_room(self) -> None:
        """Makes no record where :meth:`_hold` is to make others."""
        if not _before_gpu(self):
            super()._check_room()

    def _fill(self, indices: Sequence[int]) -> None:
        """Makes the records of items that have none. One worker, MONAI's default, is one per core here, or one thread
        where no process can be forked.
        """
        workers = self.num_workers if self.num_workers is not None and self.num_workers > 1 else None
        _fill(self, indices, workers, self.progress, threads=self.num_workers or cores.usable())

    def _hold(self, count: int) -> None:
        """Keeps these items in memory; records end after ``count`` transforms."""
        records = copy(self)
        records.transform = with_only(self.transform, self.transform.transforms[:count])
        settings = self.settings.on_cpu()
        form = settings.form._replace(numpy=settings.options.arrays != "torch")  # the next transforms take them as such
        records.settings = replace(settings, form=form, again="whenever the dataset is made")
        records._fill(self._cached)
        held: Any = self
        held.__class__, held._records = _held(type(self)), records
        held._cache = held._fill_cache(self._cached)

    def __str__(self) -> str:  # of Held's items too: a method of Held would come before one of the user's class
        text = super().__str__()
        if "_records" not in vars(self):
            return text
        return f"{text}\n  in memory:  {len(self._cache or ())} items, on the GPU that their transforms move them to"

    @property
    def _cache(self) -> Any:
        return CachedItems(self)

    @_cache.setter
    def _cache(self, items: Any) -> None:
        if len(items):
            _refused(self)


class Held(CacheDataset):  # type: ignore[misc]  # MONAI is untyped
    """Mixed into a ``Cached`` whose items stay in GPU memory, where a transform moves them, as ``CacheDataset``'s do.

    Its epochs read nothing, and its loader stays MONAI's. What comes before the move is read from records.

    Attributes:
        _records: the items before the move.
    """

    _cache: Any = None
    _records: Cached

    def __init_subclass__(cls) -> None:
        """Hides the class that is made for an object from the ``__init_subclass__`` of the user's class."""

    @property
    def session(self) -> Session:
        """What there is to ask about the records."""
        return self._records.session

    def set_data(self, data: Sequence[Any]) -> None:
        """Takes new data, whose items are kept if they are moved by the transforms that there are now."""
        plain: Any = self
        plain.__class__ = type(self).__mro__[2]
        del plain._records
        vars(plain).pop("_cache", None)  # first, so that the new items have room
        plain.set_data(data)

    def _load_cache_item(self, index: int) -> Any:
        """The item with all its deterministic transforms; the last are run here, as MONAI's loader does."""
        count = len(self._records.transform.transforms)
        item = self.transform(self._records[index], start=count, end=_first_random(self), threading=True)
        return convert_to_contiguous(item, memory_format=torch.contiguous_format) if self.as_contiguous else item

    def _transform(self, index: int) -> Any:
        return CacheDataset._transform(self, index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        plain: Any = object.__new__(type(self).__mro__[2])  # pickle finds no class that is made for an object
        vars(plain).update(vars(self))
        make, args, *more = plain.__reduce_ex__(protocol)
        return _held_again, (make, args), *more


def _held(kind: type) -> type:
    """The class of objects of ``kind`` that keep their items."""
    return type(kind.__name__, (Held, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _held_again(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    made = make(*args)
    made.__class__ = _held(type(made))
    return made


def _first_random(dataset: CacheDataset) -> int | None:
    """Where ``CacheDataset`` ends what it keeps."""
    found: int | None = dataset.transform.get_index_of_first(
        lambda step: isinstance(step, RandomizableTrait) or not isinstance(step, Transform)
    )
    return found


def _before_gpu(dataset: CacheDataset) -> int:
    """How many transforms come before one that moves items to a GPU where they are to stay; 0 if none does."""
    steps = dataset.transform.transforms
    count = before_cuda(steps, names_too=True)
    moves = count < len(steps[: _first_random(dataset)]) and not isinstance(steps[count], LazyTrait)
    usual = in_order(dataset.transform) and not dataset.hash_as_key and not changes_items(type(dataset))
    return count if moves and usual and _at_once(dataset) else 0


def _at_once(dataset: CacheDataset) -> bool:
    """Whether items are computed when the dataset is made or takes new data, rather than when they are first read."""
    return dataset.runtime_cache is False or dataset.runtime_cache is None


class Decathlon(Cached, DecathlonDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``DecathlonDataset``, which downloads."""

    _theirs = DecathlonDataset


class MedNIST(Cached, MedNISTDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``MedNISTDataset``, which downloads."""

    _theirs = MedNISTDataset


class Tcia(Cached, TciaDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``TciaDataset``, which downloads."""

    _theirs = TciaDataset


class Persistent(StandIn):
    """Stands in for ``PersistentDataset``."""


class OfGDS(StandIn):
    """Stands in for MONAI's own ``GDSDataset``."""

    _theirs = MonaisGDSDataset

    def _make(self, given: Mapping[str, Any]) -> None:
        """Makes the GDSDataset. MONAI's takes further arguments of ``PersistentDataset``."""
        super()._make({**{name: value for name, value in given.items() if name != "kwargs"}, **given.get("kwargs", {})})


class AfterN(StandIn, CacheNTransDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``CacheNTransDataset``. More transforms than the first ``cache_n_trans`` may be cached.

    Raises:
        ValueError: a random transform is among those.
    """

    _theirs = CacheNTransDataset

    def _make(self, given: Mapping[str, Any]) -> None:
        """Makes the GDSDataset."""
        transform, count = given["transform"], given["cache_n_trans"]
        steps = (transform if isinstance(transform, Compose) else Compose(transform)).transforms[:count]
        drawn = [part for step in steps for part in parts(step) if isinstance(part, Randomizable)]
        drawn = [part for part in drawn if not isinstance(part, Compose)]
        if drawn:
            name = type(drawn[0]).__name__
            raise ValueError(
                f"cache_n_trans={count} keeps what {name} draws in the first epoch for all others, which a GDSDataset "
                f"does not: leave cache_n_trans out, or put {name} after it. To keep draws, write the augmented "
                "volumes to files (SaveImaged), and cache these"
            )
        super()._make({name: value for name, value in given.items() if name != "cache_n_trans"})
        self.cache_n_trans = count


class OfLMDB(StandIn, LMDBDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``LMDBDataset``, which computes all items in its constructor too. There is no database."""

    _theirs = LMDBDataset

    def _make(self, given: Mapping[str, Any]) -> None:
        """Makes the GDSDataset, and fills its cache. ``db_name`` and ``lmdb_kwargs`` have no effect, with a warning."""
        if idle := ", ".join(name for name in ("db_name", "lmdb_kwargs") if name in given):
            warn(f"{idle}: without effect, since there is no database. max_bytes= limits what the cache may occupy")
        database = {"db_name": "monai_cache", "progress": True, "lmdb_kwargs": None}
        options = CacheOptions.of(given.get("options", self._defaults.get("options", {}))).once()
        kept = {name: value for name, value in given.items() if name not in database}
        super()._make({**kept, "options": options, "populate": False})  # it is filled below
        self.progress = given.get("progress", True)
        self.lmdb_kwargs = given.get("lmdb_kwargs") or {}
        self.db_file = Path(self.cache_dir or "") / f"{given.get('db_name', 'monai_cache')}.lmdb"
        _fill(self, progress=self.progress)

    def set_data(self, data: Sequence[Any]) -> None:
        """Takes new data, and fills the cache. No record is deleted, since others may use it."""
        GDSDataset.set_data(self, data)
        self._runtime.keys = None  # to look at sources again
        _fill(self, progress=self.progress)

    def info(self) -> dict[str, Any]:
        """The number of items and the folder of the records, in the place of what LMDB reports of its database."""
        return {"size": len(self.data), "filename": str(self.cache_dir)}

    def close(self) -> None:
        """Waits until every record is written."""
        self.flush()
