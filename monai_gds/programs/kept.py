"""What transforms keep: their states, which are put back, and tensors, which must be no ghosts after a recording.

Used by :mod:`monai_gds.programs.recorder`. Some transforms keep what they computed, such as their last matrix, in an
attribute. After a recording they have what they had before, so that nobody meets a ghost. In the next recording they
have that ghost again, which is of no use there: a transform that reads it before it writes it is refused, since it
carries values from one item to the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from monai_gds.pipeline.parts import TRANSFORMS, is_a, parts
from monai_gds.pipeline.randomness import States, is_generator, put_states, shared, states_of
from monai_gds.programs.ghostly import is_ghost

_Steps: TypeAlias = "Sequence[Callable[..., Any]]"


class Before:
    """Random states, attributes, lists and dicts of transforms, and the random states of the process."""

    def __init__(self, steps: _Steps) -> None:
        held = [part for step in steps for part in parts(step)]
        self._states = States(steps)
        self._generators = states_of([*shared(), *filter(is_generator, held)])
        self._containers = [(part, part.copy()) for part in held if type(part) in (list, dict)]

    def put_back(self) -> None:
        """Puts them back."""
        self._states.put_back()
        for container, was in self._containers:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(was)
        put_states(self._generators)


#: The ghosts that transforms kept, by the transform's id and the attribute's name, with what was there before.
_kept: dict[int, dict[str, tuple[Tensor, Any]]] = {}


@contextmanager
def in_attributes(steps: _Steps) -> Iterator[None]:
    """Has transforms keep ghosts in attributes within the block only."""
    owners = list({id(part): part for step in steps for part in parts(step) if is_a(type(part), TRANSFORMS)}.values())
    for owner in owners:
        for name, (ghost, before) in _kept.get(id(owner), {}).items():
            if vars(owner).get(name) is before:
                vars(owner)[name] = ghost
    old = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in zip(owners, old, strict=True):
            for name in [name for name, value in vars(owner).items() if is_ghost(value)]:
                before = attributes.get(name)
                if is_ghost(before):
                    before = _kept[id(owner)][name][1]
                if id(owner) not in _kept:
                    weakref.finalize(owner, _kept.pop, id(owner), None)
                _kept.setdefault(id(owner), {})[name] = vars(owner)[name], before
                vars(owner)[name] = before


def in_containers(members: Iterable[Any]) -> bool:
    """Whether a transform keeps a ghost in a list, a tuple or a dict among its parts."""
    containers = [part for part in members if isinstance(part, (list, tuple, dict))]
    return any(is_ghost(p) for c in containers for p in (c.values() if isinstance(c, dict) else c))


def give_back(members: Iterable[Any], value: Callable[[Tensor], Tensor]) -> None:
    """Puts real tensors in place of the ghosts of a transform's modules, which it has moved to the target.

    Args:
        members: the transform's parts.
        value: returns the values of a ghost, or refuses.
    """
    modules = [module for part in members if isinstance(part, torch.nn.Module) for module in part.modules()]
    for module in modules:
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in held:
            for name, tensor in tensors.items():
                if tensor is None or not is_ghost(tensor):
                    continue
                real = value(tensor)
                if isinstance(tensor, torch.nn.Parameter):
                    torch.utils.swap_tensors(tensor, torch.nn.Parameter(real, tensor.requires_grad))  # type: ignore[no-untyped-call]
                else:
                    tensors[name] = real
