"""The arguments of ``GDSDataLoader`` that are those of torch's and MONAI's loaders: which do nothing here, and why."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from numbers import Integral
from typing import Any

from torch.utils.data import DataLoader

from monai_gds.errors import meant, warn

#: What only ``ThreadDataLoader`` takes, by default; it has no effect here.
_OF_THREADS: Mapping[str, Any] = {"buffer_timeout": 0.01, "use_thread_workers": False}

#: What has no effect over GDSDatasets, and what is done instead.
_IDLE = {
    "buffer_timeout": "a consumer that waits is woken",
    "use_thread_workers": "the workers are processes",
    "worker_init_fn": "items are seeded by their place in the epoch",
    "timeout": "a worker that dies is noticed at once",
    "in_order": "batches come in order",
}


@cache
def _defaults() -> dict[str, Any]:
    of_torch = inspect.signature(DataLoader.__init__).parameters.values()
    found = {one.name: one.default for one in of_torch if one.name not in ("self", "dataset", "num_workers")}
    return {**found, **_OF_THREADS}


def drop_idle(given: dict[str, Any], ours: inspect.Signature, ours_only: bool) -> None:
    """Takes out the arguments that no ``DataLoader`` has, and warns of all that have no effect.

    Args:
        given: keyword arguments; what is left is for MONAI's ``DataLoader``.
        ours: the signature of ``GDSDataLoader``, for its names.
        ours_only: whether the loader is over GDSDatasets. Any other is loaded by MONAI's ``DataLoader``.

    Raises:
        TypeError: there is no such argument.
    """
    defaults = _defaults()
    for name in given:
        if name not in defaults:
            hint = meant(name, [*defaults, *ours.parameters], "help(GDSDataLoader) lists those it has")
            raise TypeError(f"GDSDataLoader has no argument {name!r}{hint}")
    names = _IDLE if ours_only else [name for name in _IDLE if name in _OF_THREADS]
    idle = [name for name in names if name in given and given[name] != defaults[name]]
    if idle:
        why = ", ".join(f"{name} ({_IDLE[name]})" for name in idle)
        warn(f"GDSDataLoader takes these arguments without effect: {why}", UserWarning)
    for name in _OF_THREADS:
        given.pop(name, None)


def at_least_one(name: str, number: Any) -> int:
    """A whole number that is 1 or more. Raises TypeError or ValueError otherwise."""
    if not isinstance(number, Integral):
        raise TypeError(f"{name}={number!r}: it must be a whole number")
    if number < 1:
        raise ValueError(f"{name}={number}: it must be at least 1")
    return int(number)


def one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError unless a value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(map(repr, choices))}")
