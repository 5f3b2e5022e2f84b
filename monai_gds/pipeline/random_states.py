"""Random states of transforms, and the attributes that a draw changes: taken, compared, put back, and seeded.

Used by :mod:`monai_gds.programs.draws` and by the loader's workers.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from monai.transforms import Randomizable, Transform

from monai_gds.pipeline.generators import put_state, state_of
from monai_gds.programs.ghosts import parts

__all__ = ["States", "generators", "seed_everything", "seed_transforms"]

#: What :func:`seed_transforms` seeds.
_SEEDED = (Randomizable, np.random.Generator, torch.Generator, random.Random)


def generators(transforms: Iterable[Callable[..., Any]]) -> set[int]:
    """The identities of all generators of transforms, except the one that unseeded transforms share."""
    return {
        id(part)
        for transform in transforms
        for part in parts(transform)
        if isinstance(part, np.random.RandomState) and part is not Randomizable.R
    }


def seed_everything(transforms: Iterable[Callable[..., Any]], *seed: int) -> None:
    """As :func:`seed_transforms`, and seeds the generators of Python, of NumPy, and of torch on the CPU."""
    for_python, for_numpy, for_torch = _words(3, *seed, 0)
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.default_generator.manual_seed(for_torch)  # torch.manual_seed seeds CUDA too
    seed_transforms(transforms, *seed)


def seed_transforms(transforms: Iterable[Callable[..., Any]], *seed: int) -> None:
    """Gives each transform its own generator, seeded with a number derived from ``seed``.

    MONAI's transforms share one generator until they are seeded, and some seed their inner transforms as they run.
    Generators of other kinds stay, and are seeded.
    """
    found = {id(part): part for transform in transforms for part in parts(transform) if _is_seeded(type(part))}  # type: ignore[arg-type]
    seen: set[int] = set()
    for part, word in zip(found.values(), _words(len(found), *seed), strict=True):
        if isinstance(part, Randomizable):
            if "R" not in vars(part) or id(part.R) in seen:
                part.R = np.random.RandomState()  # 0.2 ms, and seeding one 4 us
            part.R.seed(word)
            seen.add(id(part.R))
        elif isinstance(part, torch.Generator):
            part.manual_seed(word)
        elif isinstance(part, np.random.Generator):
            part.bit_generator.state = type(part.bit_generator)(word).state
        else:
            part.seed(word)


@functools.cache  # called for all parts of all transforms, for each item
def _is_seeded(kind: type) -> bool:
    return issubclass(kind, _SEEDED)


def _words(count: int, *seed: int) -> list[int]:
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(count)]


class States:
    """What transforms would draw now: the states of their generators, and their attributes.

    Generators are distinguished by identity, since several transforms may share one. An unseeded transform has no ``R``
    of its own and draws from its class's. Attributes hold what a draw leaves, such as the centre of the last crop.
    """

    __slots__ = ("_held", "_owners")

    def __init__(self, transforms: Iterable[Callable[..., Any]]) -> None:
        found = (p for transform in transforms for p in parts(transform) if isinstance(p, (Transform, Randomizable)))
        unique = {id(part): part for part in found}
        self._owners = [(owner, dict(vars(owner)), getattr(owner, "R", None)) for owner in unique.values()]
        self._held = {id(generator): state_of(generator) for generator in self._generators()}

    def generators(self) -> list[Any]:
        """The states, in the order in which the transforms hold them."""
        return [self._held[id(generator)] for _, _, generator in self._owners if generator is not None]

    def put_back(self) -> None:
        """Gives the transforms these attributes, with their generators in these states."""
        for owner, attributes, _ in self._owners:
            now = vars(owner)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)
        for generator in self._generators():
            self._put(generator)

    def are_those_of(self, other: States) -> bool:
        """Whether these are the same transforms, in states from which they would draw the same."""
        pairs = list(zip(self._owners, other._owners, strict=False))
        return (
            len(self._owners) == len(other._owners)
            and all(a[0] is b[0] and _alike(a[1], b[1]) for a, b in pairs)
            and self._sharing() == other._sharing()
            and self.generators() == other.generators()
        )

    def follow(self, before: States) -> None:
        """Moves the transforms from states equal to ``before`` to these, changing only what differs between the two."""
        old = {id(owner): attributes for owner, attributes, _ in before._owners}
        for owner, attributes, generator in self._owners:
            now, was = vars(owner), old.get(id(owner), {})
            for name in was.keys() - attributes.keys():
                now.pop(name, None)
            now.update({name: value for name, value in attributes.items() if value is not was.get(name, self)})
            if generator is not None:
                self._put(owner.R, generator)

    def moved_unseeded(self, since: States) -> bool:
        """Whether the generator that unseeded transforms share was drawn from since."""
        state = since._held.get(id(Randomizable.R))
        return state is not None and state != state_of(Randomizable.R)

    def _put(self, generator: Any, like: Any = None) -> None:
        """Puts a generator into the state that it had, or that another one had."""
        state = self._held[id(generator if like is None else like)]
        if state_of(generator) != state:  # which takes a thirtieth of the time
            put_state(generator, state)

    def _generators(self) -> list[Any]:
        return list({id(g): g for _, _, g in self._owners if g is not None}.values())

    def _sharing(self) -> list[int]:
        """For each transform, the first one that has the same generator."""
        first: dict[int, int] = {}
        return [first.setdefault(id(generator), i) for i, (_, _, generator) in enumerate(self._owners)]


def _alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether attributes are the same, or equal. Generators are compared elsewhere."""
    return a.keys() == b.keys() and all(
        a[name] is b[name] or isinstance(a[name], np.random.RandomState) or _same(a[name], b[name]) for name in a
    )


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return isinstance(a, (bool, int, float, str, slice, type(None))) and a == b
