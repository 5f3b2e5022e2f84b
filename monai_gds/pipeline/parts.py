"""The walk over a transform: itself, the transforms and generators within it, and everything else that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import monai.transforms as mt

#: What the walk goes into, beside containers.
TRANSFORMS = (mt.Transform, mt.Randomizable)

#: Whether a type is derived from others. Asking MONAI's abstract classes about each part would take most of the time.
is_a: Callable[[Any, Any], bool] = cache(issubclass)


def parts(transform: Any) -> Iterator[Any]:
    """A transform and everything below it, each once: attributes of transforms, and members of containers.

    A part comes after one that holds it. An unseeded transform has its class's generator.
    """
    seen: set[int] = set()
    todo = [transform]
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        members = _members_of(type(part))  # type: ignore[arg-type]
        if members is not None:
            todo.extend(members(part))


@cache
def _members_of(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    """Returns a function that lists the members of values of a type; None if they have no members."""
    if issubclass(kind, mt.Randomizable):
        return lambda part: [*vars(part).values(), part.R]
    if issubclass(kind, mt.Transform):
        return lambda part: vars(part).values()
    if issubclass(kind, dict):
        return lambda part: [*part.keys(), *part.values()]
    return iter if issubclass(kind, (list, tuple, set, frozenset)) else None


def named_members(part: Any) -> Iterable[tuple[str, Any]]:
    """Those members of a part that have a place of their own, by name."""
    if isinstance(part, dict):
        return [(str(name), value) for name, value in part.items()]
    if isinstance(part, (list, tuple)):
        return [(str(i), value) for i, value in enumerate(part)]
    if not is_a(type(part), TRANSFORMS):
        return []
    return [*vars(part).items(), *([("R", part.R)] if is_a(type(part), mt.Randomizable) else [])]


def flat(transforms: Iterable[Callable[..., Any]]) -> Iterator[Callable[..., Any]]:
    """Transforms, those of each ``Compose`` in its place."""
    for transform in transforms:
        if isinstance(transform, mt.Compose):
            yield from flat(transform.transforms)
        else:
            yield transform


def name_of(transform: Callable[..., Any]) -> str:
    """The name of a function, or of an object's type."""
    return str(getattr(transform, "__qualname__", type(transform).__name__)).rpartition("<locals>.")[2]
