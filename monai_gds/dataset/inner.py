"""``data`` that is another dataset: an item is identified by what that one is made of, so that a hit does not read it.

That holds where the other dataset is MONAI's ``Dataset`` or ``CacheDataset``, or a GDSDataset, with deterministic
transforms only: the same item then always comes out the same. Any other one is read at every access.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from monai.data import CacheDataset, Dataset
from monai.transforms import Compose

from monai_gds.base.notices import Notice
from monai_gds.errors import HashingError, warn
from monai_gds.keys.hashing import hash_transforms
from monai_gds.pipeline.parts import name_of
from monai_gds.pipeline.split import Split

#: What makes items in MONAI's datasets, and in ours.
_OF_MONAI = ("__getitem__", "__len__", "_transform")
_OF_OURS = (*_OF_MONAI, "__getitems__", "_cachecheck", "_post_transform")


class OfDataset(Compose):  # type: ignore[misc]  # MONAI is untyped
    """The transforms of another dataset, as the first step of a pipeline.

    Attributes:
        inner: that dataset.
        compose: its transforms, when this was made.
    """

    @classmethod
    def of(cls, inner: Any) -> OfDataset:
        """The step for a dataset. A constructor would draw seeds."""
        made: OfDataset = copy(inner.transform)
        made.__class__ = cls
        made.inner, made.compose = inner, inner.transform
        made.__qualname__ = type(inner).__name__  # for messages
        return made

    def __call__(self, item: Any, *_: Any, **__: Any) -> Any:
        """The inner dataset's item, given what it is made of."""
        session = getattr(self.inner, "session", None)
        return self.compose(item) if session is None else session.begin([None], [item], whole=True)[0].finish()

    def __deepcopy__(self, memo: Any) -> OfDataset:
        return self

    def __cache_key__(self) -> Any:
        settings = getattr(self.inner, "settings", None)
        form = None if settings is None else [*settings.form[:2], settings.options.mantissa_bits, settings.version]
        return [list(self.transforms), Split(self.compose).settings(), form]


class Picked(Sequence[Any]):
    """Some of the items of a sequence, at these indices, none of which is read before it is asked for."""

    def __init__(self, data: Sequence[Any], indices: Sequence[int]) -> None:
        self._data, self._indices = data, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._data[one] for one in self._indices[index]]
        return self._data[self._indices[index]]


def steps_of(dataset: Any, steps: Sequence[Callable[..., Any]]) -> tuple[OfDataset, ...]:
    """What a dataset's data do to their own items, before its deterministic steps, if they need not be read for that.

    Warns once if the data are a dataset that must be read.
    """
    data, found = _unpicked(dataset.data), list[OfDataset]()
    if not is_dataset(data):
        return ()
    why = "" if is_plain(dataset) else f"{type(dataset).__name__} makes items in a way of its own"
    while not why and is_dataset(data):
        why = _why_read(data)
        if not why:
            found.insert(0, OfDataset.of(data))
            data = _unpicked(data.data)
    if not why and (steps or not hasattr(found[-1].inner, "session")):  # else there is nothing to add to its records
        return tuple(found)
    kind = type(_unpicked(dataset.data)).__name__  # fill() gives a copy of the dataset a part of its data
    if why and dataset.settings.cache_dir is not None and Notice("read", kind, why, dataset.settings.began).is_new():
        warn(
            f"data is a {kind}, whose items are read at a hit, too: {why}. Give a list of items, or a Dataset, "
            "CacheDataset or GDSDataset with deterministic transforms"
        )
    return ()


def items_of(data: Any, steps: Sequence[Any]) -> Sequence[Any]:
    """What the first of the steps takes: the items of the innermost dataset, in the order of ``data``."""
    if not steps:
        found: Sequence[Any] = data
        return found
    return _chosen(data, items_of(steps[-1].inner.data, steps[:-1]))


def are_of(data: Any, steps: Sequence[Any]) -> bool:
    """Whether the steps are those of the data still."""
    for step in reversed(steps):
        if _unpicked(data) is not step.inner or step.inner.transform is not step.compose:
            return False
        if step.compose.transforms is not step.transforms:
            return False
        data = step.inner.data
    return not is_dataset(data)


def is_dataset(data: Any) -> bool:
    """Whether data are a dataset, or a part of one."""
    return isinstance(_unpicked(data), torch.utils.data.Dataset)


def is_plain(dataset: Any) -> bool:
    """Whether a dataset of ours makes items as GDSDataset does."""
    home = ("monai_gds.dataset.", "monai.")  # not what keeps items in memory
    return all(getattr(type(dataset), name).__module__.startswith(home) for name in (*_OF_OURS, "_pre_transform"))


def _why_read(data: Any) -> str:
    """Why a dataset must be read to know an item; empty if it need not be."""
    name = type(data).__name__
    if (session := getattr(data, "session", None)) is not None:
        if not is_plain(data):
            return f"{name} makes items in a way of its own"
        rest = session.split().rest
    else:
        known = [kind for kind in (Dataset, CacheDataset) if isinstance(data, kind)]
        own = [one for one in _OF_MONAI if known and getattr(type(data), one) is not getattr(known[-1], one)]
        if not known or own:
            return f"{name} is not known to give the same items each time"
        rest = Split(data.transform).rest
    if rest:
        return f"its {name_of(rest[0])} is random, or counts as random"
    try:
        hash_transforms([OfDataset.of(data)])
    except HashingError as e:
        return f"its transforms have no stable hash ({e})"
    return ""


def _unpicked(data: Any) -> Any:
    """The dataset of which ``data`` are a part."""
    while type(data) is torch.utils.data.Subset:
        data = data.dataset
    return data


def _chosen(data: Any, items: Sequence[Any]) -> Sequence[Any]:
    """The items at the places that a subset picks from a dataset that is made of ``items``."""
    if type(data) is not torch.utils.data.Subset:
        return items
    return Picked(_chosen(data.dataset, items), data.indices)
