"""Random states: those of generators as plain values; those of transforms, which are taken, put back and seeded.

A state is made of numbers, text, bytes and containers of these: it can be compared by ``==``, and saved by
``torch.save`` and loaded with ``weights_only=True``.

``RandomState.get_state`` takes 30 µs, because NumPy copies 624 numbers one by one, and pipelines have up to dozens of
generators. So the state is read from memory, in 1 µs: the generator's from the address that NumPy gives for this
purpose, and the number that ``normal`` keeps for its next call from the object itself. The place of that number is
searched for once and checked; if the check fails, ``get_state`` is called. A state is written to that address, too, if
only the generator's differs: ``set_state`` takes as long.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import memmove, string_at
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from monai.transforms import Randomizable

from monai_gds.pipeline.parts import TRANSFORMS, is_a, named_members, parts

_GENERATORS = (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)

#: What :func:`seed_transforms` seeds.
_SEEDED = (Randomizable, np.random.RandomState, np.random.Generator, torch.Generator, random.Random)

#: Bytes of an MT19937 generator in memory: 624 words, and these with the position among them.
_KEY, _ALL = 4 * 624, 4 * 624 + 4

#: Whether a number is kept for the next call of ``normal``, and that number.
_kept = struct.Struct("i4xd")


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator of Python, NumPy or torch that has a state."""
    return is_a(type(value), _GENERATORS) and not is_a(type(value), random.SystemRandom)


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
        _put_legacy_state(generator, state)
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


def _put_legacy_state(generator: np.random.RandomState, state: Any) -> None:
    if not isinstance(state, tuple):
        generator.set_state(state)
        return
    memory, *kept = state
    source = generator._bit_generator
    fast = type(source) is np.random.MT19937 and _kept_at() is not None and len(memory) == _ALL
    if fast and _legacy_state(generator)[1:] == tuple(kept):
        memmove(source.ctypes.state_address, memory, _ALL)
    else:
        key, position = np.frombuffer(memory[:_KEY], np.uint32), memory[_KEY:]
        generator.set_state(("MT19937", key, int.from_bytes(position, sys.byteorder), *kept))


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


# Those of a pipeline


class Slot(NamedTuple):
    """An attribute that holds a generator. Setting a seed puts another generator there."""

    owner: Any
    name: str

    def get(self) -> Any:
        """The generator that is there now, if any."""
        found = getattr(self.owner, self.name, None)
        return found if is_generator(found) else None


#: The generators of the whole process. Samplers without their own draw from these, and so may training.
GLOBAL = {
    "torch": Slot(torch, "default_generator"),
    "numpy": Slot(np.random.mtrand, "_rand"),
    "python": Slot(random, "_inst"),
}


def shared() -> list[Any]:
    """The generators of the whole process, but for CUDA's, and the one that unseeded transforms have."""
    return [*(slot.get() for slot in GLOBAL.values()), Randomizable.R]


def states_of(generators: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Generators, each once, with their states."""
    return [(one, state_of(one)) for one in {id(one): one for one in generators}.values()]


def put_states(states: Iterable[tuple[Any, Any]]) -> None:
    """Puts generators into states."""
    for generator, state in states:
        if state_of(generator) != state:  # which takes a thirtieth of the time
            put_state(generator, state)


@contextmanager
def states_kept(generators: Iterable[Any]) -> Iterator[None]:
    """Puts generators back into their states. Only where nobody else draws from them meanwhile."""
    states = states_of(generators)
    try:
        yield
    finally:
        put_states(states)


def slots(transform: Any) -> dict[str, Slot]:
    """The generators that are attributes of transforms, by their place in the pipeline: ``transforms.2.rand_flip.R``.

    An unseeded transform has its class's generator.
    """
    found: dict[str, Slot] = {}
    places = {id(transform): ""}
    for part in parts(transform):
        place = places.get(id(part))
        if place is None:  # a key of a dict, or a member of a set
            continue
        for name, value in named_members(part):
            if not is_generator(value):
                places.setdefault(id(value), f"{place}{name}.")
            elif is_a(type(part), TRANSFORMS):
                found[place + name] = Slot(part, name)
    return found


def states_at(places: Mapping[str, Slot]) -> dict[str, Any]:
    """The states of the generators at these places."""
    return {path: state_of(found) for path, slot in places.items() if (found := slot.get()) is not None}


def put_back(places: Mapping[str, Slot], states: Mapping[str, Any]) -> None:
    """Puts generators into states, where there are both."""
    found = ((places[path].get(), states[path]) for path in places.keys() & states.keys())
    put_states((generator, state) for generator, state in found if generator is not None)


def seed_everything(transforms: Iterable[Callable[..., Any]], *seed: int) -> None:
    """As :func:`seed_transforms`, and seeds those of Python, NumPy and torch's CPU, and that of unseeded transforms."""
    for_python, for_numpy, for_torch, for_monai = _words(4, *seed, 0)
    Randomizable.R.seed(for_monai)  # which transforms draw from that others make as they run
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.default_generator.manual_seed(for_torch)  # torch.manual_seed seeds CUDA too
    seed_transforms(transforms, *seed)


def seed_transforms(transforms: Iterable[Callable[..., Any]], *seed: int) -> None:
    """Gives each transform its own generator, seeded with a number derived from ``seed``.

    MONAI's transforms share one generator until they are seeded, and some seed their inner transforms as they run.
    Generators of other kinds stay, and are seeded.
    """
    found = {id(part): part for transform in transforms for part in parts(transform) if is_a(type(part), _SEEDED)}
    of_monai = {id(part.R) for part in found.values() if isinstance(part, Randomizable)}
    found = {key: part for key, part in found.items() if key not in of_monai}
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


def _words(count: int, *seed: int) -> list[int]:
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(count)]


class States:
    """What transforms would draw now: the states of their generators, and their attributes.

    Generators are distinguished by identity, since several transforms may share one. An unseeded transform has no ``R``
    of its own and draws from its class's. Attributes hold what a draw leaves, such as the centre of the last crop.
    """

    __slots__ = ("_held", "_owners")

    def __init__(self, transforms: Iterable[Callable[..., Any]]) -> None:
        found = {id(p): p for transform in transforms for p in parts(transform) if is_a(type(p), TRANSFORMS)}
        self._owners = [(owner, dict(vars(owner))) for owner in found.values()]
        named = (getattr(owner, "R", None) for owner in found.values())  # a user's may be a rotation, say
        self._held = states_of(filter(is_generator, named))

    @property
    def generators(self) -> list[Any]:
        """Those that the transforms had."""
        return [generator for generator, _ in self._held]

    def put_back(self, since: States | None = None) -> None:
        """Gives the transforms these attributes, with their generators in these states.

        If ``since`` is given, only the attributes that differ between the two: others may have been set meanwhile.
        """
        old = {} if since is None else {id(owner): attributes for owner, attributes in since._owners}
        for owner, attributes in self._owners:
            now = vars(owner)
            was = old.get(id(owner), now.copy())
            for name in was.keys() - attributes.keys():
                now.pop(name, None)
            now.update({name: value for name, value in attributes.items() if was.get(name, self) is not value})
        put_states(self._held)

    def are_those_of(self, other: States) -> bool:
        """Whether these are the same transforms, and nobody has drawn, seeded, or set an attribute in between."""
        mine, others = (
            [(id(owner), {name: id(value) for name, value in attributes.items()}) for owner, attributes in one._owners]
            for one in (self, other)
        )
        return mine == others and self._held == other._held
