"""Which programs are trusted. Nothing proves that a program is what transforms do on voxels, so it is tried.

The operations of a transform are its form. A program with a form that was not met before is also run eagerly, and the
two results are compared bit for bit, with their metadata and with the random states that they leave. If they differ,
recording ends before the first transform that makes them differ, from then on. Used by the loader's process; the items
are made by the dataset.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from monai.transforms.utils import reset_ops_id

from monai_gds import limits
from monai_gds.errors import warn
from monai_gds.programs.program import Program, same_tensors
from monai_gds.programs.recorder import Refusal

#: An item after some transforms, and a digest of the random states of these.
Made: TypeAlias = "tuple[Any, str]"


class Trust:
    """What is known of the programs of one pipeline.

    Args:
        checks_all: whether every program is compared, not only those of new forms.
        rounds: whether programs may hold numbers that the target computes, as the CPU computes them. Those compared are
            recorded once more, without.

    Attributes:
        most: how many transforms to record; None: all.
        guesses: what bools that transforms ask for were found to be.
    """

    def __init__(self, checks_all: bool = False, rounds: bool = False) -> None:
        self._checks_all, self.rounds = checks_all, rounds
        self._met: set[tuple[int, str]] = set()
        self._refusals: Counter[int] = Counter()  # by transform, since it was recorded last
        self.most: int | None = None
        self.guesses: dict[tuple[int, int], bool] = {}

    def note(self, program: Program | None, refused: Refusal | None) -> None:
        """Notes how far an item was recorded.

        A transform that is refused a few times running is not recorded any more, since an item is recorded twice for
        it. One that is refused now and then, such as with a probability, is.
        """
        done = 0 if program is None else program.done
        for step in [step for step in self._refusals if step < done]:
            del self._refusals[step]
        if refused is not None and refused.step != self.most:
            self._refusals[refused.step] += 1
            if self._refusals[refused.step] == limits.REFUSALS:
                self.most = refused.step

    def covers(self, done: int) -> bool:
        """Whether a program of this many transforms may be replayed."""
        return self.most is None or done <= self.most

    def is_due(self, program: Program) -> bool:
        """Whether a program is to be compared with an eager run."""
        new = not self._met.issuperset(enumerate(program.form))
        return self._checks_all or (new and len(self._met) < limits.CHECKED_FORMS)

    def learn(self, found: Mapping[tuple[int, int], bool]) -> None:
        """Notes what bools were found to be. A transform that asks for too many is not recorded any more."""
        self.guesses |= found
        if len(self.guesses) > limits.GUESSES:
            asks = Counter(step for step, _ in self.guesses)
            step = max(asks, key=asks.__getitem__)
            self.most = step if self.most is None else min(self.most, step)
            self.guesses = {place: guess for place, guess in self.guesses.items() if place[0] < self.most}

    def compared(
        self, made: Made, program: Program, steps: Sequence[Any], eagerly: Callable[[int], Made],
        again: Callable[[int], Made | None],
    ) -> Any:  # fmt: skip
        """The item if it is what the eager run gives; else the item of that run, with a warning.

        Args:
            made: what the program gave.
            program: the program.
            steps: the random transforms.
            eagerly: makes the item after a number of transforms, eagerly.
            again: makes the item after a number of transforms, by a program of only these; None if that is impossible.
        """
        expected = eagerly(program.done)
        if same(made, expected):
            if not self._checks_all:
                self._met.update(enumerate(program.form))
            return made[0]
        self.most = next((n for n in range(program.done) if not same(again(n + 1), eagerly(n + 1))), 0)
        name = type(steps[self.most]).__name__
        what = "draws other numbers" if same(made[0], expected[0]) else "gives other values"
        warn(
            f"{name} {what} by its program than by itself, so it and what comes after it are run on the voxels in the "
            "loader's thread from now on. Batches are right. Please report the transform",
        )
        return expected[0]


def same(a: Any, b: Any) -> bool:
    """Whether two items are equal bit for bit: types, dtypes, shapes, devices, values and metadata."""
    for item in (a, b):
        reset_ops_id(item)
    return _same(a, b)


def _same(a: Any, b: Any) -> bool:
    equal: bool
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        for tensor in (a, b):
            reset_ops_id(tensor)  # of those in a user's dataclass
        return same_tensors(a, b) and _same(vars(a), vars(b))
    if isinstance(a, (np.ndarray, np.generic)):
        equal = a.dtype == b.dtype and a.shape == b.shape and (a.dtype.hasobject or a.tobytes() == b.tobytes())
        return equal
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if is_dataclass(a) and not isinstance(a, type):
        return all(_same(getattr(a, field.name, None), getattr(b, field.name, None)) for field in fields(a))
    try:
        equal = bool(a == b or (a != a and b != b))  # NaN
    except Exception:  # such as a table, which compares cell by cell
        return True
    # What equals only itself tells nothing.
    return equal or type(a).__eq__ == object.__eq__  # type: ignore[comparison-overlap]
