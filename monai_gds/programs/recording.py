"""A recording: the operations on ghosts, as a dispatch mode of torch sees them, and the values that are known of them.

Used by :mod:`monai_gds.programs.recorder`. Tensors are identified by their memory, place and form, since the same value
passes through many objects. Views of the record's tensors are no steps: a replay takes them with the strides of the
whole tensor. Small tensors on the CPU are computed at once and are constants of the program. What is made there of
nothing and is large, such as a sampling grid, becomes a ghost whose values are made at the replay, on the CPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from monai_gds import limits
from monai_gds.programs.emission import emit
from monai_gds.programs.ghostly import CPU, GHOSTLY, ON_HOST, ON_TARGET, is_ghost, plainly
from monai_gds.programs.log import About, Log, Operation, Ref, about, place_of
from monai_gds.programs.modes import Functions
from monai_gds.programs.program import TARGET, Asked, Guard, Program

_aten = torch.ops.aten


@cache
def without_dynamo() -> None:
    """Keeps what torch computes in Python for ghosts from importing torch._dynamo. For a process that only records.

    The import takes half a second of processor time. torch wraps some functions so that its compiler does not trace
    them: the first call of a wrapper imports the compiler, and keeps what that returns with the function. Here the
    function itself is kept.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("torch._refs")]
    todo = [value for module in modules for value in vars(module).values()]
    while todo and "torch._dynamo" not in sys.modules:
        function = todo.pop()
        if isinstance(function, FunctionType) and "__dynamo_disable" not in vars(function):
            vars(function)["__dynamo_disable"] = function
            todo += [cell.cell_contents for cell in function.__closure__ or ()]


#: Operations that give the same bits on every device, beside views: they move or repeat values.
_EXACT = frozenset(["clone", "fill_", "zero_", "zeros", "ones", "full", "scalar_tensor", "eye", "cat", "stack"])


class Recording(Log, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operations on ghosts within a ``with`` block.

    Args:
        forms: dtype and shape of the record's tensors that are ghosts, by name.
        target: where the program will run.
        guesses: by :attr:`Guard.place`, what bools are that depend on voxels. Those that are not here count as False.
        ask: returns the values that a program gives on the target.

    Attributes:
        transform: the number of the transform that runs.
    """

    def __init__(
        self,
        forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        target: torch.device,
        guesses: Mapping[Asked, bool],
        ask: Callable[[Program], bytes],
    ) -> None:
        Log.__init__(self, forms, target)
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        self.transform = 0
        self._guesses, self._ask = guesses, ask
        self._told: dict[tuple[int, int], bytes] = {}  # by a ghost's number and how often its memory was written to
        self._functions: Functions | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first recording would import torch._dynamo, which takes seconds

    def __enter__(self) -> Recording:
        self._functions = Functions(self)
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        functions, self._functions = self._functions, None  # without a circle, memory is freed at once
        assert functions is not None, "the block was entered"
        functions.__exit__(*error)  # type: ignore[no-untyped-call]

    def lifted(self, tensor: Tensor) -> Tensor:
        """A ghost on the target whose values are those of a real tensor of the item."""
        with plainly():
            made: Tensor = self._record(
                _aten._to_copy.default, (tensor,), {"device": GHOSTLY[ON_TARGET]}, [tensor], [], limits.CONSTANTS_BYTES
            )
            return made

    # Values

    def value(self, tensor: Tensor) -> Tensor:
        """The values of a ghost. Where this CPU might give other last bits than the target, the target is asked.

        Raises:
            Refused: they depend on the record's tensors, or the target is asked for many.
        """
        with plainly():
            number, place = self.number_of(tensor), place_of(tensor)
            if place.storage in self.unknown:
                self.refuse("it uses the values of voxels")
            wanted, needed = {place.storage}, list[Operation]()
            for operation in reversed(self.operations):
                if not wanted.isdisjoint(operation.writes):
                    needed.append(operation)
                    wanted.update(operation.reads)
            if tensor.numel() and not all(map(self._is_exact, needed)):
                return self._asked(tensor, number)
            known: dict[int, Tensor] = {}
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                for operation in reversed(needed):
                    _run(operation, known)
                return known[number].clone()

    def scalar(self, tensor: Tensor) -> Any:
        """The number in a ghost; of a bool that depends on voxels, a guess that the replay compares.

        Raises:
            Refused: it depends on voxels, and is no bool.
        """
        with plainly():
            if place_of(tensor).storage not in self.unknown:
                return self.value(tensor).item()
            if tensor.dtype != torch.bool:
                self.refuse("it uses a number that is computed from voxels")
            return self._guess(tensor)

    def _asked(self, tensor: Tensor, number: int) -> Tensor:
        """The values of a ghost that the target computes of nothing but constants."""
        if tensor.numel() * tensor.element_size() > limits.ASKED_BYTES:
            self.refuse("it uses values that are computed later")
        question = number, self.written[place_of(tensor).storage]
        told = self._told.get(question)
        if told is None:
            with torch._C._DisableTorchDispatch():
                program = emit(self, tensor, (), whole=True, guards=())
                try:
                    told = self._told[question] = self._ask(program)
                except Exception as e:
                    self.refuse(f"it uses values that are computed later: {e}")
        return torch.frombuffer(bytearray(told), dtype=tensor.dtype).reshape(tensor.shape)

    def _guess(self, tensor: Tensor) -> bool:
        """What a ghost's bool is guessed to be, which the replay compares."""
        place = self.transform, sum(guard.place[0] == self.transform for guard in self.guards)
        guess = self._guesses.get(place, False)
        with torch._C._DisableTorchDispatch():  # or it would be recorded twice
            now = self._record(_aten.clone.default, (tensor,), {}, [tensor], [tensor])  # it may be written to later
        self.guards.append(Guard(self.number_of(now), place, guess))
        return guess

    def _is_exact(self, operation: Operation) -> bool:
        """Whether an operation gives the same bits everywhere."""
        name = operation.about.name.partition("::")[2].partition(".")[0]
        if operation.about.view or name not in ("_to_copy", "copy_"):
            return operation.about.view or name in _EXACT
        source, number = operation.args[name == "copy_"], operation.outs[0]
        dtype = self.places[source.number].dtype if source.__class__ is Ref else source.dtype
        made = self.places[number].dtype if number is not None else dtype
        # Devices differ in what they make of a NaN as an integer.
        return not dtype.is_floating_point or made.is_floating_point or made == torch.bool

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records an operation if it is about ghosts, and runs it otherwise."""
        with plainly():
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            self.refuse(f"it uses {func}")
        tensors = _tensors((*args, *kwargs.values()))
        ghosts = [tensor for tensor in tensors if tensor.is_meta]
        device, of = kwargs.get("device"), about(func)
        if not ghosts and (device is None or device.type == "cpu"):
            if self._makes_much(func, args, kwargs, tensors):
                return self._record(func, args, kwargs, tensors, ghosts)
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            return self.scalar(args[0])
        if of.random:
            self.refuse(f"{of.name} draws on the device")
        unknown = any(tensor.untyped_storage()._cdata in self.unknown for tensor in ghosts)
        if not of.gives_tensors or any(not tensor.is_meta for tensor in _written(of, args, kwargs)):
            return self._computed(func, args, kwargs, unknown)
        return self._record(func, args, kwargs, tensors, ghosts)

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], unknown: bool) -> Any:
        """Runs an operation that gives no tensors, or that writes into a real one, on values."""
        if unknown:
            self.refuse(f"{about(func).name} uses the values of voxels")
        real = [_mapped(lambda a: self.value(a) if is_ghost(a) else a, arg) for arg in (args, list(kwargs.values()))]
        with torch._C._DisableTorchDispatch():
            return func(*real[0], **dict(zip(kwargs, real[1], strict=True)))

    def _makes_much(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
        """Whether an operation makes large tensors of nothing, or of small ones."""
        of = about(func)
        if of.mutable or of.view or of.random or not of.gives_tensors or not len(func._schema.returns):
            return False
        sizes = [arg for arg in args if arg.__class__ is list and all(n.__class__ is int for n in arg)]
        most = max([tensor.numel() for tensor in tensors] + [math.prod(size) for size in sizes], default=0)
        if 32 * most <= limits.CONSTANT_BYTES:
            return False
        if any(tensor.untyped_storage().nbytes() > limits.CONSTANT_BYTES for tensor in tensors):
            return False
        made = _each(self._on_meta(func, args, kwargs, tensors, []))
        return sum(t.numel() * t.element_size() for t in made if isinstance(t, Tensor)) > limits.CONSTANT_BYTES

    def _kind(self, kwargs: dict[str, Any], ghosts: Sequence[Tensor]) -> int:
        """Where an operation runs, and what it gives is."""
        device = kwargs.get("device")
        if device is not None and device.type == "meta":
            if device.index is not None or ghosts or not self.on_host:
                return device.index or ON_TARGET
            # torch makes it where the first tensor among the arguments is, and meta has one device for all
            return self.kind_of(next(tensor for tensor in _tensors(self.called) if tensor.is_meta))
        if device is not None or not ghosts:
            return self.host
        return self.kind_of(max(ghosts, key=lambda tensor: tensor.dim() > 0))

    def _on_meta(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], ghosts: list[Tensor]
    ) -> Any:
        """What an operation gives, without values."""

        def stub(value: Any) -> Any:
            if isinstance(value, Tensor) and not value.is_meta and (value.dim() > 0 or not ghosts):
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return value

        named = {name: TARGET if name == "device" else stub(v) for name, v in kwargs.items() if name != "pin_memory"}
        if not tensors:
            named["device"] = TARGET
        given = args if len(ghosts) == len(tensors) else _mapped(stub, args)
        key = None if about(func).view or about(func).mutable else _question(func, given, named)
        if key is not None and (form := _answers.get(key)) is not None:
            return torch.empty_strided(form[0], form[1], dtype=form[2], device="meta")
        try:
            made = func(*given, **named)
            if key is not None and isinstance(made, Tensor):
                if len(_answers) == limits.FORMS_REMEMBERED:
                    del _answers[next(iter(_answers))]
                _answers[key] = tuple(made.shape), made.stride(), made.dtype
            return made
        except NotImplementedError:
            self.refuse(f"it uses {about(func).name}, whose result depends on values")
        except Exception as e:  # the eager run raises it too, if it has nothing to do with ghosts
            self.refuse(f"{about(func).name}: {e}")

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        ghosts: list[Tensor],
        most: int = limits.CONSTANT_BYTES,
    ) -> Any:
        if len(self.operations) == limits.PROGRAM_OPERATIONS:
            self.refuse(f"up to it there are more than {limits.PROGRAM_OPERATIONS:,} operations")
        of, kind = about(func), self._kind(kwargs, ghosts)
        made = self._on_meta(func, args, kwargs, tensors, ghosts)
        reads = tuple(tensor.untyped_storage()._cdata for tensor in ghosts)
        unknown = not self.unknown.isdisjoint(reads)
        outs = [tensor if isinstance(tensor, Tensor) else None for tensor in _each(made)]
        places = [None if tensor is None else place_of(tensor) for tensor in outs]
        if of.view and all(place is not None and self.is_leaf(place) for place in places):
            for tensor, place in zip(outs, places, strict=True):
                self.numbered(tensor, place)  # type: ignore[arg-type]
            return made

        def taken(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return Ref(self.number_of(value)) if value.is_meta else self.constant(value, most)

        named = {name: _mapped(taken, value) for name, value in kwargs.items() if name not in ("pin_memory", "device")}
        if "device" in kwargs or not tensors:
            named["device"] = TARGET if kind == ON_TARGET else CPU
        positional = tuple(_mapped(taken, arg) for arg in args)
        writes = {tensor.untyped_storage()._cdata for tensor in _written(of, args, kwargs)}
        self.written.update(writes)
        writes.update(place.storage for place in places if place is not None)
        if not (of.view or of.mutable) and kind == ON_HOST:
            self.on_host |= writes
        if unknown:
            self.unknown |= writes
        numbers = tuple(
            None if tensor is None or place is None else self.numbered(tensor, place)
            for tensor, place in zip(outs, places, strict=True)
        )
        self.operations.append(Operation(func, positional, named, numbers, reads, tuple(writes), of, kind))
        return made


def _run(operation: Operation, known: dict[int, Tensor]) -> None:
    """Runs an operation on the CPU. ``known`` has the values of its arguments, and gets those that it gives."""

    def real(value: Any) -> Any:
        if value.__class__ is Ref:
            return known[value.number]
        return CPU if value is TARGET else value

    args = [_mapped(real, arg) for arg in operation.args]
    out = operation.func(*args, **{name: _mapped(real, value) for name, value in operation.kwargs.items()})
    for number, tensor in zip(operation.outs, _each(out), strict=True):
        if number is not None:
            known[number] = tensor


#: What operations give, by :func:`_question`. torch computes it in Python, which takes most of a recording's time.
_answers: dict[Any, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}


def _question(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the form of a result depends on; None if that is not certain."""
    key = [func, torch.get_default_dtype()]
    for value in (*args, *kwargs.items()):
        kind = value.__class__
        if isinstance(value, Tensor):
            if not value.is_meta or value.is_conj() or value.is_neg():
                return None
            key.append((tuple(value.shape), value.stride(), value.dtype))
        elif kind is list:
            if any(isinstance(part, Tensor) for part in value):
                return None
            key.append(tuple(value))
        elif kind is tuple and isinstance(value[1], Tensor):
            return None
        else:
            key.append((kind, value))  # 1, 1.0 and True are equal
    try:
        hash(found := tuple(key))
    except TypeError:
        return None
    return found


def _each(out: Any) -> Sequence[Any]:
    """What an operation gives, as a sequence."""
    if out.__class__ in (list, tuple):
        return [part for value in out for part in (value if value.__class__ in (list, tuple) else (value,))]
    return (out,)


def _mapped(f: Any, value: Any) -> Any:
    """A value, or a list of them, with ``f`` of each."""
    if value.__class__ is list or value.__class__ is tuple:
        return value.__class__([_mapped(f, part) for part in value])
    return f(value)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [part for part in _each(values) if isinstance(part, Tensor)]


def _written(of: About, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    return _tensors([args[i] if i < len(args) else kwargs.get(name) for i, name in of.written])
