"""Whether what is not marked random may be cached for a ``Dataset`` of MONAI's, which runs it at every access.

A transform of a user's own is watched while it runs. If a random generator moves meanwhile, or if the transform is
another one afterwards, as one that counts its calls, then the item is not kept: it is computed at every access, as by
MONAI. The deterministic transforms of MONAI's own draw nothing and keep nothing.

The generators of the whole process may be moved by the training at the same time, where a loader's thread computes.
That costs an item its record for now, and only a transform in which they move item after item is given up.
"""

from __future__ import annotations

import multiprocessing
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from monai.transforms import Transform

from monai_gds import limits
from monai_gds.base import stages
from monai_gds.errors import HashingError
from monai_gds.keys.hashing import hash_transforms
from monai_gds.pipeline.parts import name_of, parts
from monai_gds.pipeline.randomness import is_generator, shared, state_of

#: Packages whose objects in transforms of MONAI's are data, or transforms of MONAI's.
_KNOWN = frozenset(("builtins", "monai", "numpy", "pathlib", "torch"))


class _Now(NamedTuple):
    """A transform and the generators at some time."""

    own: tuple[Any, ...]  # the transform, without its generators, and the states of those
    shared: tuple[Any, ...]  # the states of the generators of the whole process


class Steady:
    """Watches the deterministic transforms of one pipeline, in one process.

    Attributes:
        watches: whether there is anything to watch.
        given_up: the transform because of which nothing is cached any more, in words; empty if there is none.
        changes: how often a call has changed a transform. What was begun before may be another item now.
    """

    def __init__(self, transforms: Sequence[Callable[..., Any]]) -> None:
        self._steps = {id(step): step for step in transforms if not all(map(_is_monais, parts(step)))}
        self._generators: dict[int, list[Any]] = {}
        self._known: list[Any] = []  # the transforms as they are in the keys
        self._looked: tuple[Any, int] = None, 0  # in which loop, and how many changes there had been
        self._here = threading.local()
        self._in_a_row = 0
        self.watches, self.given_up, self.changes = bool(self._steps), "", 0

    def mark(self) -> None:
        """Notes that keys are made of the transforms as they are now."""
        self._known = [self._digest(step) for step in self._steps.values()]

    def moved_on(self, loop: Any = None) -> bool:
        """Whether they are others now than in the keys: the user or a call has changed what they hold.

        Args:
            loop: in which this is asked. It is looked at once in each, and after a call has changed something.
        """
        seen = None if loop is None else weakref.ref(loop), self.changes
        if self.given_up or (loop is not None and seen == self._looked):
            return False
        self._looked = seen
        now = [self._digest(step) for step in self._steps.values()]
        if None in now:
            step = list(self._steps.values())[now.index(None)]
            self.given_up = f"{name_of(step)} holds what cannot be compared from call to call"
            return False
        return now != self._known

    def each(self, transforms: Sequence[Any]) -> Sequence[Any]:
        """The transforms. Iterating over them watches each that is to be watched."""
        return stages.Around(transforms, self.now, self.note) if self.watches else transforms

    def begin(self) -> None:
        """Forgets what this thread has seen of an item that failed."""
        self._here.seen = None

    def now(self, step: Any) -> _Now | None:
        """The present state of a transform; None if it is not watched."""
        if id(step) not in self._steps:
            return None
        digest = self._digest(step)
        own = tuple(state_of(generator) for generator in self._generators[id(step)])
        return _Now((object() if digest is None else digest, *own), tuple(map(state_of, shared())))

    def note(self, step: Any, before: _Now | None) -> None:
        """Notes that a transform has run."""
        now = None if before is None else self.now(step)
        if before is None or now is None or now == before:
            return
        draws = now.own[0] == before.own[0]
        self.changes += not draws
        if getattr(self._here, "seen", None) is None:
            by_others = now.own == before.own and not _is_alone()
            self._here.seen = f"{name_of(step)} {'draws' if draws else 'keeps what it met'}", by_others

    def seen(self) -> str:
        """Why the item that this thread has just computed may not be kept, in words; empty if it may."""
        seen, self._here.seen = getattr(self._here, "seen", None), None
        if seen is None:
            self._in_a_row = 0
            return self.given_up
        why: str = seen[0]
        self._in_a_row += 1
        if self._in_a_row >= limits.REFUSALS or (not seen[1] and why.endswith("draws")):
            self.given_up = why
        return why

    def _digest(self, step: Callable[..., Any]) -> str | None:
        try:
            hashed = hash_transforms([step], by_source=False)
        except HashingError:
            self._generators.setdefault(id(step), [])
            return None
        found = {id(part): part for part in (*hashed.generators, *parts(step)) if is_generator(part)}
        of_all = set(map(id, shared()))
        self._generators[id(step)] = [part for part in found.values() if id(part) not in of_all]
        digest: str = hashed.digest
        return digest


def _is_alone() -> bool:
    """Whether no training may be drawing at the same time."""
    return threading.current_thread() is threading.main_thread() or multiprocessing.current_process().daemon


def _is_monais(part: Any) -> bool:
    """Whether a part of a transform is data or MONAI's, so that it gives the same each time."""
    if isinstance(part, torch.nn.Module):
        return False  # it may drop out, or count
    is_function = callable(part) and not isinstance(part, (type, Transform))
    home = part if is_function or isinstance(part, type) else type(part)
    root = str(getattr(home, "__module__", "")).partition(".")[0]
    return root == "monai" or (root in _KNOWN and not is_function)
