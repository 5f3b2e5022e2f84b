"""The log of a recording: the operations on ghosts, what identifies these, and the constants.

Used by :mod:`monai_gds.programs.recording`, which fills it, and :mod:`monai_gds.programs.emission`, which reads it.
Tensors are identified by their memory, place and form, since the same value passes through many objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monai_gds import limits
from monai_gds.programs.ghostly import Ghostly, plainly
from monai_gds.programs.program import Guard


class Ref(NamedTuple):
    """Stands for a ghost among the arguments of an operation."""

    number: int


class Place(NamedTuple):
    """What identifies a tensor."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    conj: bool
    neg: bool


def place_of(tensor: Tensor) -> Place:
    """What identifies a tensor."""
    return Place(
        tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(),
        tensor.dtype, tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


class Operation(NamedTuple):
    """An operation as it was recorded.

    Attributes:
        func: torch's operation.
        args: its arguments, with a :class:`Ref` for each ghost. Constants are real tensors.
        kwargs: those by name. A device is :data:`TARGET` or the CPU.
        outs: the numbers of what it gives.
        reads: the memory of its arguments.
        writes: the memory that it writes to, or gives.
        about: what is known of ``func``.
        kind: where it runs.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int | None, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    about: About
    kind: int


class About(NamedTuple):
    """What the schema of an operation says."""

    name: str
    mutable: bool
    written: tuple[tuple[int, str], ...]  # positions and names of the arguments that it writes to
    view: bool
    random: bool
    gives_tensors: bool


@cache
def about(func: Any) -> About:
    """What the schema of an operation says."""
    schema = func._schema
    written = tuple(
        (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    view = not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
    return About(
        f"{schema.name}.{schema.overload_name or 'default'}", schema.is_mutable, written, view,
        torch.Tag.nondeterministic_seeded in func.tags, all("Tensor" in str(r.type) for r in schema.returns),
    )  # fmt: skip


class Log(Ghostly):
    """What was recorded.

    Args:
        forms: dtype and shape of the record's tensors that are ghosts, by name.
        target: where the program will run.

    Attributes:
        forms: as given.
        ghosts: the ghosts of the record's tensors, by name.
        names: the names of the record's tensors, by their memory.
        operations: those recorded so far.
        places: what identifies the ghosts, by their numbers.
        guards: the bools that were guessed.
        unknown: the memory whose values depend on the record's tensors.
        written: how often memory was written to.
    """

    def __init__(self, forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], target: torch.device) -> None:
        super().__init__(target)
        self.forms = forms
        self.ghosts = {n: torch.empty(shape, dtype=dtype, device="meta") for n, (dtype, shape) in forms.items()}
        self.names = {ghost.untyped_storage()._cdata: name for name, ghost in self.ghosts.items()}
        self.operations: list[Operation] = []
        self.places: list[Place] = []
        self.guards: list[Guard] = []
        self.unknown: set[int] = set(self.names)
        self.written: Counter[int] = Counter()
        self._numbers: dict[Place, int] = {}
        self._kept: list[Tensor] = []  # memory that is freed could be used again, for something else
        self._constant_bytes = 0

    def number_of(self, tensor: Tensor) -> int:
        """The number of a ghost.

        Raises:
            Refused: it does not come from the operations that were recorded.
        """
        with plainly():
            place = place_of(tensor)
            number = self._numbers.get(place)
            if number is None:
                if not self.is_leaf(place):
                    self.refuse("it uses a tensor whose origin was not seen")
                number = self.numbered(tensor, place)
            return number

    def is_leaf(self, place: Place) -> bool:
        """Whether this is a view of one of the record's tensors as it lies there."""
        name = self.names.get(place.storage)
        return name is not None and place.dtype == self.forms[name][0] and not (place.conj or place.neg)

    def numbered(self, tensor: Tensor, place: Place) -> int:
        """The number of a ghost, a new one if it has none."""
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = len(self.places)
            self.places.append(place)
            self._kept.append(tensor)
        return number

    def constant(self, tensor: Tensor, most: int = limits.CONSTANT_BYTES) -> Tensor:
        """A copy of a real tensor as it is now. Axes that were expanded stay so.

        Raises:
            Refused: it is too large, or all of them are.
        """
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            self.refuse("it uses a tensor of another kind")
        packed = unexpanded(tensor)
        self.count(packed.numel() * packed.element_size(), most)
        return packed.clone().expand(tensor.shape)

    def count(self, size: int, most: int = limits.CONSTANTS_BYTES) -> None:
        """Counts the bytes of a constant.

        Raises:
            Refused: these are too many, or those of all are.
        """
        self._constant_bytes += size
        if size > most or self._constant_bytes > limits.CONSTANTS_BYTES:
            self.refuse(f"it uses {max(size, self._constant_bytes)} bytes that are made on the CPU")

    def check_writes(self) -> None:
        """Refuses a transform that wrote into a ghost where the modes did not see it, such as in another thread."""
        with plainly():
            for tensor, place in zip(self._kept, self.places, strict=True):
                if not tensor.is_inference() and tensor._version > self.written[place.storage]:
                    self.refuse("it writes in another thread")


def unexpanded(tensor: Tensor) -> Tensor:
    """A tensor with one element in place of each axis along which it was expanded."""
    if 0 not in tensor.stride() or not tensor.numel():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
