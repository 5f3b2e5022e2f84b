"""Transforms that draw from generators of the whole process: NumPy's, Python's, torch's or that of MONAI's class.

In a worker process these are seeded for every item. In the loader's process the training draws from them too, so there
such a transform's numbers are nobody's promise, and the user is told its name. Used by the dataset and the loader.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from monai_gds import limits
from monai_gds.pipeline.parts import name_of
from monai_gds.pipeline.randomness import shared, state_of
from monai_gds.pipeline.split import Split

#: Items in which it is looked for: what a transform does now and then is met in so many.
_ITEMS = 64


def process_states() -> list[Any]:
    """The states of the generators of the whole process, but for CUDA's. Takes 20 µs."""
    return [state_of(generator) for generator in shared()]


class GlobalDraws:
    """Which transforms of one pipeline were seen to draw from generators of the whole process.

    It has slots because MONAI's ``set_rnd`` walks every ``__dict__`` that it can reach from a dataset.

    Attributes:
        names: those of the transforms, in the order in which they were met.
    """

    __slots__ = ("_left", "_times", "names")

    def __init__(self) -> None:
        self.names: list[str] = []
        self._times: Counter[int] = Counter()
        self._left = _ITEMS

    def note(self, split: Split, step: int) -> None:
        """Notes that a step was seen to draw."""
        name = name_of(split.steps()[step])
        if name not in self.names:
            self.names.append(name)

    def after(self, split: Split, item: Any, done: int) -> Any:
        """As :meth:`Split.after`. In the first items it looks which steps draw.

        The training may draw at the same time, so a step must do so in several items.
        """
        if not self._left or split.compose.lazy is not False:
            return split.after(item, done)
        self._left -= 1
        before = process_states()
        for i, step in enumerate(split.steps()[done:], done):
            item = split.step(step, item)
            now = process_states()
            self._times[i] += now != before
            if self._times[i] == limits.REFUSALS:
                self.note(split, i)
            before = now
        return item

    def in_words(self) -> str:
        """The names, and what to do; empty if there are none."""
        if not self.names:
            return ""
        return (
            f"{', '.join(self.names)} drew from generators of the whole process, which the training shares where "
            "the loader's thread runs it: draw from self.R instead"
        )
