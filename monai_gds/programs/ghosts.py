"""Ghosts: tensors of torch's ``meta`` device, which have shape, strides and metadata but no values.

Used by :mod:`monai_gds.programs.draws`. A random crop that is run on a ghost gives a view of it, whose offset and
shape tell which voxels the crop holds. Only those are read then, and the views are laid over what was read. The
transforms are MONAI's own, unchanged, so what they draw, trace and name is what they would on the volumes themselves.

A ghost hides whatever a transform does to values: a write into it is lost, and a result computed from it has no values.
So only the types of :data:`SEES_GHOSTS` see ghosts, and only if their attributes hold nothing but plain values and
objects of MONAI, torch and NumPy. After each transform every tensor of its result must be real, or a view of a ghost
that a crop can make.
Otherwise :class:`NotOnGhosts` is raised, and the caller runs the transform on the values.
"""

from __future__ import annotations

import enum
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import monai.transforms as mt
import numpy as np
import torch
from monai.data import MetaTensor

from monai_gds.pipeline.parts import parts
from monai_gds.pipeline.split import Split

if TYPE_CHECKING:
    from monai_gds.records.volumes import Volume, Whole
    from monai_gds.tiles.boxes import Box

#: The transforms that may see ghosts, by name. tests/programs/test_ghosts.py generates and proves this list.
SEES_GHOSTS = (
    "Compose", "OneOf", "RandomOrder", "SomeOf", "CenterScaleCrop", "CenterScaleCropd", "CenterSpatialCrop",
    "CenterSpatialCropd", "Cropd", "DivisiblePad", "DivisiblePadd", "EnsureType", "EnsureTyped",
    "RandCropByLabelClasses", "RandCropByLabelClassesd", "RandCropByPosNegLabel", "RandCropByPosNegLabeld", "RandCropd",
    "RandScaleCrop", "RandScaleCropd", "RandSpatialCrop", "RandSpatialCropSamples", "RandSpatialCropSamplesd",
    "RandSpatialCropd", "RandWeightedCrop", "RandWeightedCropd", "ResizeWithPadOrCrop", "ResizeWithPadOrCropd",
    "SpatialCrop", "SpatialCropd", "SpatialPad", "SpatialPadd",
)  # fmt: skip

_TYPES = frozenset(getattr(mt, name) for name in SEES_GHOSTS if hasattr(mt, name))

#: Values without parts.
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, slice, range, np.generic, torch.Tensor, torch.dtype,
    torch.device, np.dtype, enum.Enum, threading.local,
)  # fmt: skip

_LIBRARIES = ("monai", "torch", "numpy")
_ORIGINS = (*_LIBRARIES, "builtins", "_thread")

#: Where the methods of MONAI's transforms are written.
_WRITERS = ("monai", "contextlib")


class NotOnGhosts(Exception):
    """A transform cannot be run on ghosts; the message says why, as the end of a sentence."""


# Which transforms see ghosts


#: The result of :func:`drawn_ahead`. The list of methods that were replaced takes 1 ms.
_drawn_ahead: weakref.WeakKeyDictionary[Split, list[Callable[..., Any]]] = weakref.WeakKeyDictionary()


def drawn_ahead(split: Split) -> list[Callable[..., Any]]:
    """The first steps of a pipeline's random half, if they can be drawn before anything is read."""
    found = _drawn_ahead.get(split)
    if found is None:
        found = _drawn_ahead[split] = drawable(split.steps()) if split.deterministic else []
    return found


def drawable(steps: Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """The leading transforms that may see ghosts, up to the last one that may crop; empty if the first may not."""
    found = 0
    for i, step in enumerate(steps):
        if hazard(step):
            break
        if any("Crop" in type(part).__name__ for part in parts(step)):
            found = i + 1
    return list(steps[:found])


def hazard(transform: Callable[..., Any]) -> str:
    """Why a transform must not see ghosts; empty if it may."""
    for part in parts(transform):
        if type(part) in _TYPES and (name := _not_monais(type(part))):
            return f"{name} was replaced"
    return _hazard_within(transform)


def _hazard_within(transform: Callable[..., Any]) -> str:
    """As :func:`hazard`, of what a transform has now. It takes a fifth of the time, and runs for each item."""
    for part in parts(transform):
        if type(part) in _TYPES or (isinstance(part, _PLAIN) and _origin(type(part)) in _ORIGINS):
            continue
        if isinstance(part, np.random.RandomState):
            if type(part) is not np.random.RandomState or type(part._bit_generator) is not np.random.MT19937:
                return "it draws from a generator of another kind"
        elif isinstance(part, np.ndarray):
            if part.dtype.hasobject:
                return "it has an array of objects"
        elif isinstance(part, (types.FunctionType, types.BuiltinFunctionType, type)):
            if not _is_a_librarys(part):
                return f"{getattr(part, '__qualname__', part)} may do anything"
        elif type(part) not in (list, tuple, dict, set, frozenset, torch.Size):
            return f"{type(part).__name__} may use values"
    return ""


def _not_monais(kind: type) -> str:
    """The first method of a transform that is not MONAI's own, such as one that draws from a global generator."""
    for cls in kind.__mro__:
        for name, value in vars(cls).items():
            function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            if isinstance(function, types.FunctionType):
                module = str(function.__globals__.get("__name__"))
                if module.partition(".")[0] not in _WRITERS:
                    return f"{cls.__name__}.{name}"
    return ""


def _is_a_librarys(value: Any) -> bool:
    """Whether a function or class is found under its own name in MONAI, torch or NumPy, or is a builtin number type."""
    if _origin(value) not in _LIBRARIES:
        return value in (bool, int, float, complex)
    found: Any = sys.modules.get(value.__module__)
    for attribute in value.__qualname__.split("."):
        found = getattr(found, attribute, None)
    return found is value


def _origin(value: Any) -> str:
    """The package that a function or class is from."""
    return str(getattr(value, "__module__", "")).partition(".")[0]


# The ghosts of an item


class Ghosts:
    """The ghosts that stand for the tensors of one item.

    Args:
        forms: dtype and shape of each tensor, by its name in the record.

    Attributes:
        tensors: the ghosts by name.
    """

    __slots__ = ("_names", "_real", "tensors")

    def __init__(self, forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in forms.items()}
        self._names = {ghost.untyped_storage()._cdata: name for name, ghost in self.tensors.items()}
        self._real: list[tuple[torch.Tensor, int]] = []

    def enter(self, item: Any) -> None:
        """Takes the item that these ghosts, and real tensors, were put into.

        Raises:
            NotOnGhosts: a ghost is in a place where a tensor cannot replace it later.
        """
        with _plainly():
            found = self._check(item)
            if missing := self.tensors.keys() - found:
                raise NotOnGhosts(f"the tensor {min(missing)!r} of the record is not within dicts and lists")
            self._real = [(t, t._version) for t, _ in _tensors(item) if t.device.type != "meta"]

    def run(self, step: Callable[..., Any], apply: Callable[[Any, Any], Any], item: Any) -> Any:
        """Runs a transform by ``apply``.

        Raises:
            NotOnGhosts: the transform may not see ghosts, raised something, or used values. The item may have been
                changed, and so may random states.
        """
        if why := _hazard_within(step):
            raise NotOnGhosts(why)
        try:
            out = apply(step, item)
        except Exception as e:
            raise NotOnGhosts(_reason(e)) from e
        with _plainly():
            self._check(out)
        return out

    def spoilt(self) -> bool:
        """Whether a transform wrote into a real tensor."""
        with _plainly():
            return any(tensor._version != version for tensor, version in self._real)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name in the record of the tensor that this is a view of, if it is one."""
        with _plainly():
            return self._names.get(tensor.untyped_storage()._cdata) if tensor.device.type == "meta" else None

    def boxes(self, item: Any) -> dict[str, list[Box]]:
        """The voxels that the views in an item cover, by the names of the tensors."""
        found: dict[str, dict[Any, Box]] = {}
        with _plainly():
            for tensor, _ in _tensors(item):
                if tensor.device.type == "meta" and tensor.numel():
                    name, starts, sizes = self._place(tensor)
                    place = ((0, 1), (0, 1), *zip(starts, sizes, strict=True))[-3:]
                    a, b, c = (slice(start, start + size) for start, size in place)
                    found.setdefault(name, {})[place] = (a, b, c)
        return {name: list(boxes.values()) for name, boxes in found.items()}

    def realize(self, item: Any, volumes: Mapping[str, Volume | Whole], device: torch.device) -> Any:
        """The item with the same views of the volumes in place of views of ghosts. Changes dicts and lists in place."""
        made: dict[int, torch.Tensor] = {}

        def real(ghost: torch.Tensor) -> torch.Tensor:
            if id(ghost) not in made:
                made[id(ghost)] = self._realized(ghost, volumes, device)
            return made[id(ghost)]

        with _plainly():
            return _replaced(item, real)

    def _realized(
        self, ghost: torch.Tensor, volumes: Mapping[str, Volume | Whole], device: torch.device
    ) -> torch.Tensor:
        name = self._names[ghost.untyped_storage()._cdata]
        if ghost.numel():
            plain = volumes[name].view(ghost.shape, ghost.stride(), int(ghost.storage_offset()))
        else:
            plain = torch.empty_strided(ghost.shape, ghost.stride(), dtype=ghost.dtype, device=device)
        if type(ghost) is torch.Tensor:
            return plain
        out = plain.as_subclass(type(ghost))
        out.__dict__ = ghost.__dict__
        return out

    def _check(self, item: Any) -> set[str]:
        """Checks every tensor of a result. Returns the names of the tensors that it has ghosts of."""
        found = set()
        for tensor, hidden in _tensors(item):
            if tensor.device.type != "meta":
                continue
            if hidden:
                raise NotOnGhosts("it put a volume into metadata")
            name, _, _ = self._place(tensor)
            if tensor._version or self.tensors[name]._version:
                raise NotOnGhosts("it writes in place")
            found.add(name)
        if any(ghost._version for ghost in self.tensors.values()):
            raise NotOnGhosts("it writes in place")
        return found

    def _place(self, view: torch.Tensor) -> tuple[str, list[int], list[int]]:
        """The name of the tensor that a view is of, and the view's start and size along each axis of that tensor."""
        name = self._names.get(view.untyped_storage()._cdata)
        if name is None:
            raise NotOnGhosts("it makes a tensor of its own")
        ghost, odd = self.tensors[name], NotOnGhosts("it makes a view that no crop makes")
        if view.dtype != ghost.dtype or type(view) not in (torch.Tensor, MetaTensor) or view.requires_grad:
            raise odd
        axes = {stride: axis for axis, stride in enumerate(ghost.stride()) if ghost.shape[axis] > 1}
        starts, offset = [], int(view.storage_offset())
        for stride in ghost.stride():
            start, offset = divmod(offset, stride)
            starts.append(start)
        sizes = [1] * ghost.dim()
        for size, stride in zip(view.shape, view.stride(), strict=True):
            if size == 1 or not view.numel():
                continue
            axis = axes.pop(stride, None)
            if axis is None:
                raise odd
            sizes[axis] = size
        if view.numel() and any(start + size > n for start, size, n in zip(starts, sizes, ghost.shape, strict=True)):
            raise odd
        return name, starts, sizes


#: A ``with`` block in which MetaTensors are handled as plain tensors: their own way takes 10 us per operation.
_plainly = torch._C.DisableTorchFunctionSubclass


def _reason(error: BaseException) -> str:
    """An error of a transform in one line, without MONAI's wrapping."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).partition("\n")[0]
    return f"it raised {type(error).__name__}{f': {text[:100]}' if text else ''}"


def _tensors(item: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Every tensor of a tree, and whether it is hidden: in metadata, or not within dicts, plain lists and tuples only.

    Other objects are not searched: no transform that sees ghosts makes any.
    """
    todo: list[tuple[Any, bool]] = [(item, False)]
    while todo:
        value, hidden = todo.pop()
        if isinstance(value, torch.Tensor):
            yield value, hidden
            if isinstance(value, MetaTensor):
                todo.extend([(part, True) for part in vars(value).values() if isinstance(part, (dict, list))])
        elif isinstance(value, dict):
            todo.extend([(part, hidden) for part in value.values() if not isinstance(part, _ATOMS)])
        elif isinstance(value, (list, tuple)):
            within = hidden or type(value) not in (list, tuple)
            todo.extend([(part, within) for part in value if not isinstance(part, _ATOMS)])
        elif isinstance(value, (set, frozenset)) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
            todo.extend([(part, True) for part in (value.flat if isinstance(value, np.ndarray) else value)])


_ATOMS = (str, int, float, bytes, type(None))


def _replaced(value: Any, real: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tree with ``real(ghost)`` in place of each ghost. Changes dicts and lists in place, which keeps their types."""
    if isinstance(value, torch.Tensor):
        return real(value) if value.device.type == "meta" else value
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(part, _ATOMS):
                value[key] = _replaced(part, real)
    elif isinstance(value, list):
        value[:] = [_replaced(part, real) for part in value]
    elif type(value) is tuple:
        return tuple(_replaced(part, real) for part in value)
    return value
