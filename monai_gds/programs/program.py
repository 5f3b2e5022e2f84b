"""Programs: what random transforms do to the tensors of an item, as plain values that another process can replay.

Made by :mod:`monai_gds.programs.recorder` in a process that need not have the item's voxels or a GPU, and run by
:mod:`monai_gds.programs.replay`. A program names operations by text, since torch's own objects for them cannot be
pickled, and holds no tensor: constants are bytes, and the item is pickled with holes in place of tensors.

Values are numbered: first the views of the record's tensors, then the constants, then what the steps give.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import string_at
from functools import cache
from itertools import accumulate
from operator import mul
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from monai_gds.tiles.boxes import Box, whole_box

#: Stands for the replay's device among the arguments of a step.
TARGET = torch.device("meta")

#: Where a bool was guessed: the transform, and how many guesses it had made before.
Asked: TypeAlias = "tuple[int, int]"


class View(NamedTuple):
    """A view of a tensor of the record, as torch's ``as_strided`` gives it of the whole, contiguous tensor."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def box(self, shape: Sequence[int]) -> Box:
        """The voxels around all that it touches, over the last three axes of a tensor of this shape."""
        steps = [*accumulate(reversed(shape[1:]), mul, initial=1)][::-1]  # of the contiguous tensor
        axes = [axis for axis, n in enumerate(shape) if n > 1]
        start, offset = [0] * len(shape), self.offset
        for axis in axes:
            start[axis], offset = divmod(offset, steps[axis])
        end = [first + 1 for first in start]
        for size, stride in zip(self.size, self.stride, strict=True):
            if size == 1 or stride == 0:
                continue
            axis = next((axis for axis in axes if stride % steps[axis] == 0), -1)
            if axis < 0:
                return whole_box(shape)
            end[axis] += (size - 1) * (stride // steps[axis])
        if any(stop > n for stop, n in zip(end, shape, strict=True)):
            return whole_box(shape)
        x, y, z = [slice(0, 1)] * max(0, 3 - len(shape)) + [slice(a, b) for a, b in zip(start, end, strict=True)][-3:]
        return x, y, z


class Constant(NamedTuple):
    """A small tensor that depends on nothing but the draw. It lies in :attr:`Program.packed`.

    Attributes:
        dtype: its dtype.
        size: its shape.
        stride: in elements; 0 along an axis that was expanded.
        offset: bytes from the front of the packed ones.
        on_target: whether it is wanted on the replay's device; else it stays on the CPU.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    on_target: bool


class Step(NamedTuple):
    """An operation.

    Attributes:
        op: which of :attr:`Program.ops`.
        args: its arguments, with None in place of tensors. A device is :data:`TARGET` or the CPU.
        kwargs: those by name; None if there are none.
        tensors: the tensors among them: position or name, place in the list that is there or -1, number of the value.
        outs: the numbers of what it gives; None for what nobody needs.
        dead: the values that nobody needs afterwards.
    """

    op: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    tensors: tuple[tuple[int | str, int, int], ...]
    outs: tuple[int | None, ...]
    dead: tuple[int, ...]


class Piece(NamedTuple):
    """Some steps that follow one another.

    Attributes:
        steps: the steps, pickled.
        form: what identifies them but for their numbers, see :mod:`.jit`; empty if they are run one by one.
        tensors: the values that they are given.
        numbers: their numbers.
        results: the values that they make and that are needed later.
        dead: the values that nobody needs afterwards, of those that they are given.
    """

    steps: bytes
    form: bytes = b""
    tensors: tuple[int, ...] = ()
    numbers: tuple[Any, ...] = ()
    results: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()


class Guard(NamedTuple):
    """A bool that a transform asked for and that depends on voxels, so that it was guessed.

    Attributes:
        value: its number.
        place: which transform asked, and how many guesses that had made before.
        guess: what it was told.
    """

    value: int
    place: Asked
    guess: bool


class Program(NamedTuple):
    """What the first random transforms of an item do.

    Attributes:
        forms: dtype and shape of the record's tensors, by name.
        views: the views of them that the steps and the item need.
        copied: the names of those that must not be written to: the program writes into them, or what runs after it may.
        constants: where small tensors lie in ``packed``.
        packed: their bytes. Those for the replay's device come first.
        uploaded: how many bytes these take.
        ops: the names of the operations, such as ``aten::add.Tensor``.
        pickled: the steps, in pieces. Python's collector looks through all objects that live for long, from time to
            time for half a second: the steps of the items that wait are not among them.
        values: how many values there are.
        guards: the values that were guessed.
        holes: the numbers of the tensors of the item that have holes.
        item: the item, by :func:`pack` or, in the process that recorded it, :func:`hold`.
        done: how many transforms are in the program.
        form: for each of them what identifies its operations.
        made: which of them make tensors on the CPU for another device at each replay, such as sampling grids, and how
            many bytes.
        counts: how many steps those transforms have of which there are any.
    """

    forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    views: tuple[View, ...]
    copied: frozenset[str]
    constants: tuple[Constant, ...]
    packed: bytes
    uploaded: int
    ops: tuple[str, ...]
    pickled: bytes
    values: int
    guards: tuple[Guard, ...]
    holes: tuple[int, ...]
    item: bytes | Held
    done: int
    form: tuple[str, ...]
    made: tuple[tuple[int, int], ...] = ()
    counts: tuple[tuple[int, int], ...] = ()

    @property
    def pieces(self) -> list[Piece]:
        """The steps in pieces, in their order, made at each call."""
        pieces: list[Piece] = pickle.loads(self.pickled)
        return pieces

    def boxes(self) -> dict[str, list[Box]]:
        """The voxels that the program touches, by the names of the tensors: those of each view, not all between."""
        found: dict[str, dict[tuple[tuple[int, int], ...], Box]] = {}
        for view in self.views:
            if 0 not in view.size:
                box = view.box(self.forms[view.name][1])
                found.setdefault(view.name, {})[tuple((axis.start, axis.stop) for axis in box)] = box
        return {name: list(boxes.values()) for name, boxes in found.items()}


# The item


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, number: Callable[[Tensor], int | None]) -> None:
        super().__init__(file, protocol=5)
        self._number = number
        self._memory: dict[int, tuple[torch.UntypedStorage, bytearray]] = {}

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray:  # by protocol 5 it would keep a memoryview, which the collector looks through
            return value.__reduce__()
        if not isinstance(value, Tensor):
            return NotImplemented
        number = self._number(value)
        attributes = None if type(value) is Tensor else value.__dict__
        if number is not None:
            return _hole, (number, type(value), attributes)
        if value.is_quantized:
            raise pickle.PicklingError("torch makes no quantized tensor of bytes")
        with torch._C.DisableTorchFunction():
            kind, value = type(value), value.resolve_conj().resolve_neg()
            storage = value.untyped_storage()
            if storage._cdata not in self._memory:  # pickled once, so that tensors share it afterwards
                read = bytearray(string_at(storage.data_ptr(), storage.nbytes()))
                self._memory[storage._cdata] = storage, read  # which must live on, or another may have its address
            memory = self._memory[storage._cdata][1]
            form = value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
            if kind is Tensor and len(memory) == value.nbytes > 0 and value.is_contiguous():
                with suppress(TypeError, RuntimeError):  # NumPy has no bfloat16, say
                    return _array, (memory, value.numpy().dtype.str, tuple(value.shape))
        return _real, (memory, form, kind, attributes)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self._filled if found is _hole else found

    def _filled(self, number: int, kind: type, attributes: dict[str, Any] | None) -> Tensor:
        return of_kind(self._tensors[number], kind, attributes)


def _hole(number: int, kind: type, attributes: dict[str, Any] | None) -> Tensor:
    raise pickle.UnpicklingError("the item of a program is read by unpack")


def _real(memory: bytearray, form: tuple[Any, ...], kind: type, attributes: dict[str, Any] | None) -> Tensor:
    dtype, size, stride, offset = form
    flat = torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)
    return of_kind(flat.as_strided(size, stride, offset), kind, attributes)


def _array(memory: bytearray, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """As :func:`_real`. NumPy makes views without giving Python's lock back, where torch does so several times."""
    return torch.from_numpy(np.frombuffer(memory, dtype).reshape(shape))


def of_kind(tensor: Tensor, kind: type, attributes: dict[str, Any] | None) -> Tensor:
    """A tensor as one of another class, which it becomes itself: to make and to free another takes Python's lock."""
    try:
        tensor.__class__ = kind
    except TypeError:  # a class with slots
        tensor = tensor.as_subclass(kind)
    if attributes is not None:
        tensor.__dict__ = attributes
    return tensor


def pack(item: Any, number: Callable[[Tensor], int | None]) -> bytes:
    """Pickles an item with holes for tensors, wherever they are in it.

    Args:
        item: the item.
        number: returns the number of a tensor, whose value :func:`unpack` is given; None for one that is pickled.

    Raises:
        Exception: whatever pickle raises for something that cannot be pickled.
    """
    file = io.BytesIO()
    _Packer(file, number).dump(item)
    return file.getvalue()


class Held(NamedTuple):
    """An item itself.

    Attributes:
        item: the item.
        ghosts: those of its tensors that have numbers, by these.
    """

    item: Any
    ghosts: Sequence[Tensor]


def hold(item: Any, number: Callable[[Tensor], int | None]) -> Held:
    """As :func:`pack`, for the same process: nothing is copied, and only once :func:`unpack` gives the item.

    Raises:
        ValueError: a tensor that has a number is elsewhere than in dicts, lists and tuples, such as in metadata.
    """
    ghosts = []
    for tensor, hidden in tensors_in(item):
        if not hidden and number(tensor) is not None:
            ghosts.append(tensor)
        elif hidden and tensor.is_meta:
            raise ValueError("it puts a volume elsewhere than into dicts and lists")
    return Held(item, ghosts)


def unpack(item: bytes | Held, tensors: Sequence[Tensor]) -> Any:
    """The item of :func:`pack` or :func:`hold`, with these tensors, which get the classes and attributes of theirs."""
    met: set[int] = set()
    for i, tensor in enumerate(tensors := list(tensors)):
        if id(tensor) in met:  # two tensors of the item are over the same memory
            tensors[i] = tensor.as_subclass(Tensor)
        met.add(id(tensor))
    if isinstance(item, bytes):
        unpacker = _Unpacker(io.BytesIO(item), tensors)
        try:
            return unpacker.load()
        finally:
            unpacker.memo = {}  # it refers to the unpacker: all would stay, the tensors too, until the collector runs
    made = {
        id(ghost): of_kind(tensor, type(ghost), None if type(ghost) is Tensor else ghost.__dict__)
        for ghost, tensor in zip(item.ghosts, tensors, strict=True)
    }
    return replaced(item.item, lambda tensor: made.get(id(tensor), tensor))


def replaced(value: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """An item with others in place of its tensors. Changes dicts and lists in place, which keeps their types."""
    if isinstance(value, Tensor):
        return new(value)
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(part, _ATOMS):
                value[key] = replaced(part, new)
    elif isinstance(value, list):
        value[:] = [replaced(part, new) for part in value]
    elif type(value) is tuple:
        return tuple([replaced(part, new) for part in value])
    return value


def outer_tensors(item: Any) -> Iterator[Tensor]:
    """The tensors of an item or a batch within dicts, lists and tuples."""
    todo = [item]
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, (list, tuple)):
            todo.extend(value)


def tensors_in(item: Any) -> Iterator[tuple[Tensor, bool]]:
    """Each tensor of an item, and whether :func:`replaced` does not see it: in metadata, or within other objects."""
    todo, met = [(item, False)], set[tuple[int, bool]]()
    while todo:
        value, hidden = todo.pop()
        if isinstance(value, _ATOMS) or (id(value), hidden) in met:
            continue
        met.add((id(value), hidden))
        inner: Iterable[Any] = ()
        if isinstance(value, Tensor):
            yield value, hidden
            inner, hidden = vars(value).values(), True
        elif isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            inner, hidden = value, hidden or not (isinstance(value, list) or type(value) is tuple)
        elif isinstance(value, np.ndarray):
            inner, hidden = value.flat if value.dtype.hasobject else (), True
        elif not isinstance(value, (type, ModuleType)):
            inner, hidden = getattr(value, "__dict__", {}).values(), True
        todo += [
            (part, hidden) for part in inner
            if (kind := part.__class__) not in _PLAIN and (kind is not np.ndarray or part.dtype.hasobject)
        ]  # fmt: skip


_ATOMS = (str, int, float, bytes, type(None))

#: Types of most values in metadata, which hold nothing. (The crops of an item have three hundred arrays there.)
_PLAIN = frozenset((*_ATOMS, bool))


@cache
def op_of(name: str) -> Any:
    """An operation of torch by its name."""
    qualified, _, overload = name.rpartition(".")
    space, _, short = qualified.partition("::")
    return getattr(getattr(getattr(torch.ops, space), short), overload)


def bytes_of(tensor: Tensor) -> bytes:
    """The values of a real tensor, in C order."""
    with torch._C.DisableTorchFunction():
        return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def same_tensors(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit: dtype, shape, device and values."""
    with torch._C.DisableTorchFunctionSubclass():
        if (a.dtype, a.shape, a.device, a.requires_grad) != (b.dtype, b.shape, b.device, b.requires_grad):
            return False
        one, other = (t.detach().resolve_conj().resolve_neg().contiguous().view(-1) for t in (a, b))
        equal: bool = torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        return equal
