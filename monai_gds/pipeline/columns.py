"""Columns of an item that no deterministic transform touches, such as a fold or a remark: they do not count.

Where all deterministic transforms are MONAI's own dictionary transforms, this is proved while an item is computed: a
:class:`Guard` lies in the place of each value that no transform names, and notes every touch. An item whose guards were
touched is computed once more, with these values.

The type of such a value counts, since MONAI looks at the types of all values. A guard cannot see ``value is None`` and
``type(value)``, which MONAI's transforms ask only of values under their keys, and those are never guarded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from monai.transforms import MapTransform

from monai_gds.pipeline.parts import flat, parts

T = TypeVar("T")

#: What is guarded: values that nobody can change in place.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


class Touched(BaseException):
    """A transform touched a guard. Not an Exception, which a transform may catch or MONAI would wrap and log."""


class Guard:
    """Lies in the place of a value of an item, and notes whether anything is done with it.

    A copy of it is itself, so that it may be passed on, and ``isinstance`` takes it for a value of type ``kind``.
    """

    __slots__ = ("kind", "touched", "watches")

    def __init__(self, kind: type) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "touched", False)
        object.__setattr__(self, "watches", False)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__" and _get(self, "watches"):
            return _get(self, "kind")
        if name in ("__deepcopy__", "__copy__") or not _get(self, "watches"):
            return _get(self, name)
        return _touch(self)

    def __deepcopy__(self, memo: Any) -> Guard:
        return self

    def __copy__(self) -> Guard:
        return self


_get = object.__getattribute__


def _touch(guard: Any, *_: Any, **__: Any) -> Any:
    object.__setattr__(guard, "touched", True)
    raise Touched("a value of the item that no transform names was used")


def _special(name: str) -> Callable[..., Any]:
    usual = getattr(object, name, None)

    def method(self: Guard, *arguments: Any, **more: Any) -> Any:
        if usual is None or _get(self, "watches"):
            return _touch(self)
        return usual(self, *arguments, **more)

    return method


_OPERATORS = "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "xor", "or"

#: What Python looks up in the class rather than in the object.
for _name in (
    *("bool", "len", "iter", "next", "reversed", "contains", "getitem", "setitem", "delitem", "call", "enter", "exit"),
    *("int", "float", "complex", "index", "round", "trunc", "floor", "ceil", "abs", "neg", "pos", "invert", "fspath"),
    *("bytes", "length_hint", "array", "array_interface", "torch_function", "cuda_array_interface", "dlpack"),
    *(f"{side}{name}" for name in _OPERATORS for side in ("", "r", "i")),
    *("eq", "ne", "lt", "le", "gt", "ge", "divmod", "rdivmod"),
    *("hash", "str", "repr", "format", "dir", "sizeof", "reduce", "reduce_ex", "getstate", "setattr", "delattr"),
):
    setattr(Guard, f"__{_name}__", _special(f"__{_name}__"))


class Columns:
    """Which columns of an item count for one pipeline.

    Args:
        transforms: the deterministic ones.
    """

    def __init__(self, transforms: Sequence[Callable[..., Any]]) -> None:
        steps = list(flat(transforms))
        self._provable = bool(steps) and all(map(_is_monais, steps))
        self._named = frozenset(part for step in steps for part in parts(step) if isinstance(part, str))

    def counting(self, item: Any, read: frozenset[str]) -> Any:
        """The item as it counts, given which columns are read though no transform names them."""
        if not self._provable or type(item) is not dict or item.keys() <= self._named:
            return item
        # in place of the others their types, as text that names no file
        return {k: v if self._counts(k, v, read) else f"\0{type(v).__name__}" for k, v in item.items()}

    def guarded(self, item: Any, read: frozenset[str]) -> tuple[Any, dict[str, Guard]]:
        """The item with guards in the place of what may not count, and these guards by column."""
        if not self._provable or type(item) is not dict:
            return item, {}
        guards = {k: Guard(type(v)) for k, v in item.items() if not self._counts(k, v, read)}
        return {**item, **guards}, guards

    def _counts(self, name: Any, value: Any, read: frozenset[str]) -> bool:
        return name in self._named or name in read or type(name) is not str or type(value) not in _PLAIN


def touched(guards: Mapping[str, Guard]) -> frozenset[str]:
    """The columns whose guards were touched."""
    return frozenset(k for k, guard in guards.items() if _get(guard, "touched"))


def watched(item: Any, run: Callable[[Any], T]) -> T:
    """Runs transforms on an item, while its guards watch."""
    guards = [value for value in item.values() if type(value) is Guard] if type(item) is dict else []
    for guard in guards:
        object.__setattr__(guard, "watches", True)
    try:
        return run(item)
    finally:
        for guard in guards:
            object.__setattr__(guard, "watches", False)


def _is_monais(transform: Callable[..., Any]) -> bool:
    """Whether this is a dictionary transform of MONAI's own."""
    return isinstance(transform, MapTransform) and type(transform).__module__.startswith("monai.")
