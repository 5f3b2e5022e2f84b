"""Which random transforms may be drawn before their item's turn: the crops and pads that a pipeline begins with.

Used by :mod:`monai_gds.programs.draws` and by the dataset. Between a draw and the item's turn the training goes on. It
shares the generators of Python, NumPy and torch with whatever draws from these, and they cannot be put back. So a
transform is drawn ahead only if all that it runs is MONAI's own and as MONAI wrote it, and all that it draws from is
its own.

Crops tell which voxels are needed, and pads come with them. Any other transform ends the leading ones: with it no less
would be read, and some print or write.
"""

from __future__ import annotations

import enum
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import monai.transforms as mt
import numpy as np
import torch

from monai_gds.keys.libraries import is_in_its_module
from monai_gds.pipeline.parts import TRANSFORMS, is_a, parts
from monai_gds.pipeline.split import Split

#: Values without parts.
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, slice, range, np.generic, torch.Tensor, torch.dtype,
    torch.device, np.dtype, enum.Enum, threading.local,
)  # fmt: skip
_CONTAINERS = (list, tuple, dict, set, frozenset, torch.Size)

_LIBRARIES = ("monai", "torch", "numpy")
_ORIGINS = (*_LIBRARIES, "builtins", "_thread")

#: Where the methods of MONAI's transforms are written.
_WRITERS = ("monai", "contextlib")

#: The result of :func:`drawn_ahead`. The list of methods that were replaced takes 1 ms.
_drawn_ahead: weakref.WeakKeyDictionary[Split, list[Callable[..., Any]]] = weakref.WeakKeyDictionary()


def drawn_ahead(split: Split) -> list[Callable[..., Any]]:
    """The first steps of a pipeline's random half that may be drawn ahead, up to the last one that may crop."""
    found = _drawn_ahead.get(split)
    if found is None:
        found, leading = [], list[Callable[..., Any]]()
        for step in split.steps() if split.deterministic else ():
            if why_not(step):
                break
            leading.append(step)
            if may_crop(step):
                found = leading.copy()
        _drawn_ahead[split] = found
    return found


def may_crop(step: Callable[..., Any]) -> bool:
    """Whether a transform, or one within it, crops by its name."""
    return any("Crop" in type(part).__name__ for part in parts(step))


def why_not(step: Callable[..., Any]) -> str:
    """Why a transform is not drawn ahead; empty if it may be."""
    for part in parts(step):
        if is_a(type(part), TRANSFORMS) and (name := _not_monais(type(part))):
            return f"{name} was replaced"
    return why_not_now(step)


def why_not_now(step: Callable[..., Any]) -> str:
    """As :func:`why_not`, of what a transform has now. It takes a fifth of the time, and runs for each item."""
    for part in parts(step):
        kind = type(part)
        if is_a(kind, TRANSFORMS) and _is_a_librarys(kind):
            if not (is_a(kind, mt.Compose) or "Crop" in kind.__name__ or "Pad" in kind.__name__):
                return f"{kind.__name__} neither crops nor pads"
        elif is_a(kind, np.random.RandomState):
            if kind is not np.random.RandomState or type(part._bit_generator) is not np.random.MT19937:
                return "it draws from a generator of another kind"
        elif kind is np.ndarray:
            if part.dtype.hasobject:
                return "it has an array of objects"
        elif isinstance(part, (types.FunctionType, types.BuiltinFunctionType, type)):
            if not _is_a_librarys(part):
                return f"{getattr(part, '__qualname__', part)} may do anything"
        elif kind not in _CONTAINERS and not (is_a(kind, _PLAIN) and _origin(kind) in _ORIGINS):
            return f"{kind.__name__} may do anything"
    return ""


def _not_monais(kind: type) -> str:
    """The first method of a transform that is not MONAI's own, such as one that draws from a global generator."""
    for cls in kind.__mro__:
        for name, value in vars(cls).items():
            function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            if isinstance(function, types.FunctionType):
                module = str(function.__globals__.get("__name__"))
                if module.partition(".")[0] not in _WRITERS:
                    return f"{cls.__name__}.{name}"
    return ""


def _is_a_librarys(value: Any) -> bool:
    """Whether a function or class is found under its own name in MONAI, torch or NumPy, or is a builtin number type."""
    if _origin(value) not in _LIBRARIES:
        return value in (bool, int, float, complex)
    return is_in_its_module(value)


def _origin(value: Any) -> str:
    """The package that a function or class is from."""
    return str(getattr(value, "__module__", "")).partition(".")[0]
