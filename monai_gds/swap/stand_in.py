"""``StandIn``: a GDSDataset that is made by the arguments of another dataset of MONAI's.

A stand-in usually also derives from the class that it stands in for: it keeps its methods, and code that asks with
``isinstance`` goes on as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from monai.data import Dataset, PersistentDataset

from monai_gds.dataset.dataset import GDSDataset

#: The arguments of a GDSDataset, which a stand-in takes by name besides those of MONAI's class.
OURS = frozenset(inspect.signature(GDSDataset).parameters) - {"others"}


class _LastConstructor(Dataset):  # type: ignore[misc]  # MONAI is untyped
    """Where the constructor of ``PersistentDataset`` leads: not to that of the class that a stand-in stands in for."""

    def __init__(self, data: Sequence[Any], transform: Any) -> None:
        Dataset.__init__(self, data, transform)


class StandIn(GDSDataset, _LastConstructor):
    """A GDSDataset that is made by the arguments of MONAI's class, and its own by name.

    Attributes:
        _theirs: MONAI's class.
        _defaults: arguments of GDSDataset that hold where a user gives none.
    """

    _theirs: ClassVar[type] = PersistentDataset
    _defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given, ours = divided(self._theirs, args, kwargs)
        self._make({**given.arguments, **ours})

    def _make(self, given: Mapping[str, Any]) -> None:
        """Makes the GDSDataset, given its arguments by name; None for ``cache_dir`` is no folder of the user's."""
        # MONAI's way to hash items is not stable from run to run, so that a cache would never be hit again.
        left_out = {"hash_func", "hash_transform"} | ({"cache_dir"} if given.get("cache_dir") is None else set())
        kept = {name: value for name, value in given.items() if name not in left_out}
        GDSDataset.__init__(self, **{"cache_dir": None, **self._defaults, **kept})


def divided(
    theirs: type, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[inspect.BoundArguments, dict[str, Any]]:
    """The arguments of MONAI's class among those given, and those of GDSDataset that it does not have.

    Raises:
        TypeError: an argument is missing, or neither class has it.
    """
    signature = inspect.signature(theirs)
    any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    extra = kwargs.keys() - signature.parameters.keys()
    ours = {name: kwargs[name] for name in extra if name in OURS or not any_name}
    return signature.bind(*args, **{name: value for name, value in kwargs.items() if name not in ours}), ours
