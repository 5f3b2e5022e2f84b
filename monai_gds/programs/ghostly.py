"""Ghosts: tensors of torch's ``meta`` device that stand for others, on the target or on the CPU; and what is refused.

Used by :mod:`monai_gds.programs.modes` and :mod:`monai_gds.programs.recording`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

#: Where the values of a ghost will be. The numbers are the indices of the device that asks for such a ghost.
ON_TARGET, ON_HOST = 0, 1
GHOSTLY = (torch.device("meta", ON_TARGET), torch.device("meta", ON_HOST))
CPU = torch.device("cpu")

#: A block in which neither function modes nor the methods of MetaTensors see what is done.
plainly = torch._C.DisableTorchFunction


class Refused(BaseException):
    """Something cannot be recorded. No Exception, since MONAI and others wrap these; and it is remembered."""


def is_ghost(value: Any) -> bool:
    """Whether a value is a tensor without values."""
    if not isinstance(value, Tensor):
        return False
    with plainly():
        return value.is_meta


class Ghostly:
    """What ghosts answer.

    Args:
        target: where the program will run.

    Attributes:
        target: as given.
        refused: why something could not be recorded; empty if nothing has been refused.
        on_host: the memory of ghosts on the CPU.
        called: the arguments of the last function that was called with ghosts.
    """

    def __init__(self, target: torch.device) -> None:
        self.target, self.refused = target, ""
        self.on_host: set[int] = set()
        self.called: Sequence[Any] = ()
        #: Where tensors on the CPU are: on the target, if that is the CPU.
        self.host = ON_TARGET if target.type == "cpu" else ON_HOST

    def value(self, tensor: Tensor) -> Tensor:
        """The values of a ghost."""
        raise NotImplementedError

    def scalar(self, tensor: Tensor) -> Any:
        """The number in a ghost."""
        raise NotImplementedError

    def remember(self, why: str) -> None:
        """Remembers why something could not be recorded, whatever becomes of the exception."""
        self.refused = self.refused or why.partition("\n")[0][:200] or "it raised an error"

    def refuse(self, why: str) -> NoReturn:
        """Refuses something.

        Raises:
            Refused: always.
        """
        self.remember(why)
        raise Refused(why)

    def kind_named(self, device: Any) -> int:
        """Whether a device, or what names one, is the target or the host."""
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if where.type == "cpu":
            return self.host
        if where.type != self.target.type or where.index not in (None, self.target.index):
            self.refuse(f"it uses the device {where}")
        return ON_TARGET

    def kind_of(self, tensor: Tensor) -> int:
        """Whether a tensor is on the target or on the host."""
        with plainly():
            if not tensor.is_meta or tensor.untyped_storage()._cdata in self.on_host:
                return self.host
            return ON_TARGET

    def device_of(self, tensor: Tensor) -> torch.device:
        """The device on which the target would have a tensor."""
        return self.target if self.kind_of(tensor) == ON_TARGET else CPU

    def stand_in(self, device: Any) -> torch.device:
        """The device to make a tensor on, in place of the one that was named."""
        kind = self.kind_named(device)
        return CPU if kind == self.host else GHOSTLY[kind]
