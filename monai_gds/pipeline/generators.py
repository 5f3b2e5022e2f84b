"""Random generators: where a pipeline keeps its own, and their states as plain values.

A state is made of numbers, text, bytes and containers of these: it can be compared by ``==``, and saved by
``torch.save`` and loaded with ``weights_only=True``.

``RandomState.get_state`` takes 30 µs, because NumPy copies 624 numbers one by one, and pipelines have up to dozens of
generators. So the state is read from memory, in 1 µs: the generator's from the address that NumPy gives for this
purpose, and the number that ``normal`` keeps for its next call from the object itself. The place of that number is
searched for once and checked; if the check fails, ``get_state`` is called.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from ctypes import string_at
from functools import cache
from typing import Any, NamedTuple

import monai.transforms as mt
import numpy as np
import torch

__all__ = ["Slot", "is_generator", "put_back", "put_state", "slots", "state_of", "states_at"]

#: Bytes of an MT19937 generator in memory: 624 words, and these with the position among them.
_KEY, _ALL = 4 * 624, 4 * 624 + 4

#: Whether a number is kept for the next call of ``normal``, and that number.
_kept = struct.Struct("i4xd")


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator of Python, NumPy or torch that has a state."""
    return _is_a(type(value), _GENERATORS) and not _is_a(type(value), random.SystemRandom)


_GENERATORS = (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)


#: Asking classes of MONAI and torch anew for each value takes most of the time of a walk.
_is_a: Callable[[Any, Any], bool] = cache(issubclass)


def state_of(generator: Any) -> Any:
    """The state of a generator, as a plain value."""
    if isinstance(generator, np.random.RandomState):
        return _legacy_state(generator)
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return generator.getstate()


def put_state(generator: Any, state: Any) -> None:
    """Puts a generator into a state."""
    if isinstance(generator, np.random.RandomState):
        if isinstance(state, tuple):
            memory, kept, number = state
            key, position = np.frombuffer(memory[:_KEY], np.uint32), memory[_KEY:]
            state = ("MT19937", key, int.from_bytes(position, sys.byteorder), kept, number)
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    else:
        generator.setstate(state)


def _legacy_state(generator: np.random.RandomState) -> Any:
    source = generator._bit_generator
    if type(source) is not np.random.MT19937:
        return _plain(generator.get_state(legacy=False))
    at = _kept_at()
    if at is None:
        return _slow_state(generator)
    return string_at(source.ctypes.state_address, _ALL), *_kept.unpack(string_at(id(generator) + at, _kept.size))


def _slow_state(generator: np.random.RandomState) -> tuple[bytes, int, float]:
    _, key, position, kept, number = generator.get_state()
    return np.asarray(key).tobytes() + int(position).to_bytes(4, sys.byteorder), int(kept), float(number)


@cache
def _kept_at() -> int | None:
    """The offset of the number that a RandomState keeps, in its memory; None if states cannot be read from there."""
    if sys.implementation.name != "cpython":
        return None
    generator = np.random.RandomState(0)
    generator.normal()
    after_one = _slow_state(generator)
    memory = string_at(id(generator), np.random.RandomState.__basicsize__)
    at = memory.find(struct.pack("d", after_one[2])) - 8
    if at < 0:
        return None
    for _ in range(3):
        source = generator._bit_generator.ctypes.state_address
        read = string_at(source, _ALL), *_kept.unpack(string_at(id(generator) + at, _kept.size))
        if read != _slow_state(generator):
            return None
        generator.normal()
    return at


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


# ---------------------------------------------------------------------------------------------------------------------
# Where they are


class Slot(NamedTuple):
    """An attribute that holds a generator. Setting a seed puts another generator there."""

    owner: Any
    name: str

    def get(self) -> Any:
        """The generator that is there now, if any."""
        found = getattr(self.owner, self.name, None)
        return found if is_generator(found) else None


def slots(transform: Any) -> dict[str, Slot]:
    """The generators that are attributes of transforms, by their place in the pipeline: ``transforms.2.rand_flip.R``.

    An unseeded transform has its class's generator.
    """
    found: dict[str, Slot] = {}
    seen: set[int] = set()
    todo = [("", transform)]
    while todo:
        path, part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        for name, value in _members(part):
            if is_generator(value):
                if _is_a(type(part), _TRANSFORMS):
                    found[path + name] = Slot(part, name)
            elif _is_a(type(value), _WALKED):
                todo.append((f"{path}{name}.", value))
    return found


_TRANSFORMS = (mt.Transform, mt.Randomizable)
_WALKED = (*_TRANSFORMS, dict, list, tuple)


def _members(part: Any) -> Iterator[tuple[str, Any]]:
    """Attributes or members by name, in an order that does not depend on when they were set."""
    if _is_a(type(part), _TRANSFORMS):
        yield from sorted(vars(part).items(), key=lambda attribute: attribute[0])
        if _is_a(type(part), mt.Randomizable) and "R" not in vars(part):
            yield "R", part.R
    elif isinstance(part, dict):
        yield from ((str(name), value) for name, value in part.items())
    elif isinstance(part, (list, tuple)):
        yield from ((str(i), value) for i, value in enumerate(part))


def states_at(places: Mapping[str, Slot]) -> dict[str, Any]:
    """The states of the generators at these places."""
    return {path: state_of(found) for path, slot in places.items() if (found := slot.get()) is not None}


def put_back(places: Mapping[str, Slot], states: Mapping[str, Any]) -> None:
    """Puts generators into states, where there are both."""
    for path in places.keys() & states.keys():
        generator = places[path].get()
        if generator is not None and state_of(generator) != states[path]:
            put_state(generator, states[path])
