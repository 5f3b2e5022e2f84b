"""Values that pass through a pipeline unchanged: recognised in its output, copied from the dataset's item on a hit."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from monai_gds.errors import DamagedRecord

#: Keys and indices from the item to a value in it.
Path: TypeAlias = "tuple[str | int, ...]"

_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes})
_MISSING = object()

#: Stands for an item where there is none: every value taken from it is None.
ANYTHING: Any = object()


class _Known(NamedTuple):
    path: Path
    original: Any
    copy: Any


class ItemValues:
    """The values of an item that a record may be unable to store, with the copies that the transforms received."""

    __slots__ = ("_digest", "_known")

    def __init__(self, item: Any, copies: dict[int, Any], digest: Callable[[Any], Any]) -> None:
        """Takes the dataset's item, its copies by the id of the original, as in the memo of ``deepcopy``, and what
        values are compared by; see :func:`copy_item`."""
        self._digest = digest
        self._known: dict[int, _Known] = {}
        self._look(item, (), copies, set())

    def path_of(self, value: Any) -> Path | None:
        """The path in the item of a value that passed through unchanged; None for any other value."""
        known = self._known.get(id(value))
        if known is None or known.copy is not value:
            return None
        return known.path if value is known.original or self._unchanged(known.original, value) else None

    def _unchanged(self, original: Any, value: Any) -> bool:
        try:
            return bool(self._digest(original) == self._digest(value)) and not _holds_randomness(value)
        except Exception:  # HashingError, or anything a user's methods raise: nothing is proven
            return False

    def _look(self, value: Any, path: Path, copies: dict[int, Any], is_open: set[int]) -> None:
        """Notes a value that a record may be unable to store, or such values inside it that a path reaches."""
        if type(value) in _LEAVES or _is_plain(value) or id(value) in is_open:
            return
        odd = type(value) not in (dict, list, tuple)
        if isinstance(value, (dict, list, tuple)):
            is_open.add(id(value))
            for key, member in list(dict.items(value) if isinstance(value, dict) else enumerate(value)):
                if type(key) is str or (type(key) is int and -(2**63) <= key < 2**63):
                    self._look(member, (*path, key), copies, is_open)
                else:
                    odd = True  # can be taken only as a whole
            is_open.discard(id(value))
        if odd:
            copy = copies.get(id(value), value)
            self._known.setdefault(id(copy), _Known(path, value, copy))


def copy_item(item: Any, digest: Callable[[Any], Any]) -> tuple[Any, ItemValues]:
    """Deep-copies an item for transforms to modify.

    Args:
        item: as the data hold it.
        digest: returns equal digests for a value and its copy only while neither has changed. It may raise for what
            has no digest, which then counts as changed.

    Returns:
        The copy, and what recognises values of the item in the transforms' output.

    Example:
        >>> item = {"image": "ct.nii", "reader": print}
        >>> copied, given = copy_item(item, repr)
        >>> copied == item, given.path_of(copied["reader"])
        (True, ('reader',))
    """
    memo: dict[int, Any] = {}
    copied = deepcopy(item, memo)
    return copied, ItemValues(item, memo, digest)


def value_at(item: Any, path: Sequence[Any]) -> Any:
    """A deep copy of a value of an item. Raises DamagedRecord if the item has no such value, or is None."""
    value = item
    for key in path:
        if isinstance(value, dict):
            value = dict.get(value, key, _MISSING)
        elif isinstance(value, (list, tuple)) and type(key) is int and 0 <= key < len(value):
            value = value[key]
        else:
            value = _MISSING
    if item is ANYTHING:
        return None
    if item is None or value is _MISSING:
        where = "item" + "".join(f"[{key!r}]" for key in path)
        raise DamagedRecord(f"it takes {where} from the dataset's item, where there is no such value")
    return value if type(value) in _LEAVES else deepcopy(value)


def _is_plain(value: Any) -> bool:
    """Whether this is an array or tensor that any record can hold."""
    if type(value) is np.ndarray:
        return value.dtype.kind not in "OV"
    return type(value) is torch.Tensor and value.layout == torch.strided and not value.is_quantized


class _Finder(pickle.Pickler):
    found = False

    def persistent_id(self, obj: Any) -> None:
        self.found |= isinstance(obj, (np.random.RandomState, np.random.Generator, random.Random, torch.Generator))


def _holds_randomness(value: Any) -> bool:
    """Whether pickling finds random state in a value. It may have been drawn from, which the hash does not show."""
    with open(os.devnull, "wb") as nowhere:
        finder = _Finder(nowhere, protocol=5)
        with contextlib.suppress(Exception):  # cannot be pickled: the hash must do
            finder.dump(value)
    return finder.found
