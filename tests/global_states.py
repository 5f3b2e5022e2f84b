"""The states of the generators that a whole process shares: to show that nothing draws from them."""

from __future__ import annotations

import random

import numpy as np
import torch

from monai_gds.pipeline.randomness import state_of

__all__ = ["GlobalStates"]


class GlobalStates:
    """The states of the generators of Python, NumPy and torch."""

    __slots__ = ("_cpu", "_cuda", "_numpy", "_python")

    def __init__(self) -> None:
        self._python, self._numpy, self._cpu = (
            random.getstate(),
            state_of(np.random.mtrand._rand),
            torch.get_rng_state(),
        )
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def moved(self) -> bool:
        """Whether one of the generators was drawn from since."""
        now = GlobalStates()
        return not (
            self._python == now._python
            and self._numpy == now._numpy
            and torch.equal(self._cpu, now._cpu)
            and len(self._cuda) == len(now._cuda)
            and all(map(torch.equal, self._cuda, now._cuda))
        )
