"""The replay of a program: its steps on the voxels, on the device, as MONAI would have run them there."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from textwrap import dedent
from typing import Any, Protocol

import torch
from torch import Tensor

from monai_gds.programs.jit import Function, functions_for
from monai_gds.programs.program import (
    TARGET,
    Asked,
    Constant,
    Piece,
    Program,
    Step,
    bytes_of,
    op_of,
    same_tensors,
    unpack,
)


class Source(Protocol):
    """Voxels of a tensor of the record, such as :class:`monai_gds.records.volumes.Volume`."""

    @property
    def data(self) -> Tensor:
        """The memory in which they lie."""

    def place(self, offset: int) -> int:
        """The offset in ``data`` of an element, given that in the whole tensor, contiguous."""


class GuardFailed(Exception):
    """A bool that a transform asked for is not what it was told: make the item eagerly, or record it again.

    Attributes:
        found: what the bools are, as far as they are certain, by :attr:`Guard.place`: guesses for this item and others.
    """

    def __init__(self, found: Mapping[Asked, bool]) -> None:
        super().__init__(f"the transform {max(found)[0]} of a program does something else on these values")
        self.found = found


def replay(program: Program, volumes: Mapping[str, Source], device: torch.device, *, shared: bool = True) -> Any:
    """Runs a program.

    Args:
        program: what to run. It may be run again.
        volumes: by name, voxels of the record's tensors on the device, at least those of :meth:`Program.boxes`.
        device: the device that the program was recorded for.
        shared: whether others use the volumes, too. Then neither the program nor what runs after it writes to them.

    Returns:
        The item after the first :attr:`Program.done` transforms. Its tensors may be views of the volumes; of those in
        :attr:`Program.copied` only if these are not shared.

    Raises:
        GuardFailed: the program is not what the transforms do on these voxels.
        Exception: whatever an operation raises. The transforms raise it too, or would on other hardware.
    """
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        pieces, functions = program.pieces, functions_for(device)
        new = functions.built(pieces, program.ops)
        tried = _by(new, program, pieces, volumes, device) if new else None
        values = None
        if shared and not new and (ready := functions.ready(pieces)):
            values = _by(ready, program, pieces, volumes, device)
        if values is None:
            values = _ran(program, pieces, volumes, device, shared, {})
        if tried is not None and all(map(same_tensors, _results(program, tried), _results(program, values))):
            functions.keep(new)
        _check(program, values)
        return unpack(program.item, [values[number] for number in program.holes])


def _by(
    functions: Mapping[bytes, Function], program: Program, pieces: Sequence[Piece], volumes: Mapping[str, Source],
    device: torch.device,
) -> list[Any] | None:  # fmt: skip
    """What a program makes by functions; None if one fails. Without them, the error has its own name and traceback."""
    with suppress(RuntimeError):
        return _ran(program, pieces, volumes, device, True, functions)
    return None


def _ran(
    program: Program, pieces: Sequence[Piece], volumes: Mapping[str, Source], device: torch.device, shared: bool,
    functions: Mapping[bytes, Function],
) -> list[Any]:  # fmt: skip
    """The values of a program after its last step."""
    values: list[Any] = [*_views(program, volumes, device, shared), *_constants(program, device)]
    values += [None] * (program.values - len(values))
    left = iter(pieces)
    try:
        _run(program, left, values, device, functions)
    except Exception:  # perhaps it is on the way of a wrong guess, which a piece after it may find
        for piece in left if program.guards else ():
            with suppress(Exception):
                _run(program, [piece], values, device, functions)
        _check(program, values)
        raise
    return values


def _results(program: Program, values: Sequence[Any]) -> list[Tensor]:
    return [values[number] for number in (*program.holes, *(guard.value for guard in program.guards))]


def answered(program: Program, device: torch.device) -> bytes:
    """The values of the tensor that a program gives which needs no voxels, in C order; see :class:`Recorder`."""
    if device.type == "cpu":
        return bytes_of(replay(program, {}, device))
    with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):  # type: ignore[no-untyped-call]  # no waiting for others
        return bytes_of(replay(program, {}, device))


def _run(
    program: Program, pieces: Iterable[Piece], values: list[Any], device: torch.device,
    functions: Mapping[bytes, Function],
) -> None:  # fmt: skip
    """Runs all steps: by functions where there are some, else one by one, which is what functions are compared with."""
    ops = [op_of(name)._op for name in program.ops]
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]  # as it is recorded, no operations fused
        for piece in pieces:
            function = functions.get(piece.form)
            if function is None:
                _run_steps(pickle.loads(piece.steps), ops, values, device)
                continue
            made = function(*[values[number] for number in piece.tensors], *piece.numbers)
            if len(piece.results) == 1:
                values[piece.results[0]] = made
            else:
                _put(values, piece.results, made or ())
            for number in piece.dead:
                values[number] = None


def _run_steps(
    steps: Sequence[Step], ops: Sequence[Callable[..., Any]], values: list[Any], device: torch.device
) -> None:
    for op, args, kwargs, tensors, outs, dead in steps:
        given = list(args)
        named = dict(kwargs) if kwargs else {}
        for where, inner, number in tensors:
            holder: Any = given if where.__class__ is int else named
            if inner < 0:
                holder[where] = values[number]
            else:
                if holder[where].__class__ is tuple:
                    holder[where] = list(holder[where])
                holder[where][inner] = values[number]
        if named.get("device") == TARGET:
            named["device"] = device
        made = ops[op](*given, **named)
        if len(outs) == 1 and isinstance(made, Tensor):
            values[outs[0]] = made  # type: ignore[index]
        else:
            _put(values, outs, made)
        for number in dead:
            values[number] = None


def _put(values: list[Any], outs: Sequence[int | None], made: Any) -> None:
    """Puts what an operation gave, which may be in lists, into its places."""
    if not isinstance(made, (list, tuple)):
        made = (made,)
    flat = [part for value in made for part in (value if isinstance(value, (list, tuple)) else (value,))]
    for number, value in zip(outs, flat, strict=True):
        if number is not None:
            values[number] = value


def _check(program: Program, values: Sequence[Any]) -> None:
    """Compares what was guessed, as far as it is known, all with one copy from the device."""
    guards = [guard for guard in program.guards if values[guard.value] is not None]
    if not guards:
        return
    flat = [values[guard.value].reshape(1) for guard in guards]
    found: dict[Asked, bool] = {}
    for guard, value in zip(guards, torch.cat([part.to(flat[0].device) for part in flat]).tolist(), strict=True):
        found[guard.place] = value
        if value != guard.guess:
            raise GuardFailed(found)


def _views(program: Program, volumes: Mapping[str, Source], device: torch.device, shared: bool) -> list[Tensor]:
    """The views that the program takes; of shared volumes that are written to, views of a copy."""
    found: list[Any] = [None] * len(program.views)
    numbers: dict[str, list[int]] = {}
    for number, (name, size, stride, _) in enumerate(program.views):
        if 0 in size:
            found[number] = torch.empty_strided(size, stride, dtype=program.forms[name][0], device=device)
        else:
            numbers.setdefault(name, []).append(number)
    for name, some in numbers.items():
        volume = volumes[name]
        views = [program.views[number] for number in some]
        made = _strided(volume.data, [(*view[1:3], volume.place(view.offset)) for view in views])
        for number, view in zip(some, _copied(made) if shared and name in program.copied else made, strict=True):
            found[number] = view
    return found


def _strided(memory: Tensor, places: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> list[Tensor]:
    """Views, each as :meth:`torch.Tensor.as_strided` takes it: all by one call, since each gives Python's lock back."""
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        views: list[Tensor] = _as_strided(os.getpid())(memory, *map(list, zip(*places, strict=True)))
    return views


@cache
def _as_strided(process: int) -> Callable[..., Any]:
    """The function of a process: its lock may be taken at a fork. ``torch.jit.script``, shorter, is deprecated."""
    source = """
    def as_strided(memory: Tensor, sizes: List[List[int]], strides: List[List[int]], offsets: List[int]):
        return [memory.as_strided(sizes[i], strides[i], offsets[i]) for i in range(len(offsets))]
    """
    function: Callable[..., Any] = torch.jit.CompilationUnit(dedent(source)).as_strided
    return function


def _copied(views: Sequence[Tensor]) -> list[Tensor]:
    """Views of a copy of the memory that these lie in, which share what they shared."""
    line = max(1, 64 // views[0].element_size())  # the copies are aligned as the views were
    begin = min(view.storage_offset() for view in views) // line * line
    end = max(
        view.storage_offset() + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True)) + 1
        for view in views
    )
    flat = views[0].as_strided((end - begin,), (1,), begin).clone()
    return _strided(flat, [(view.shape, view.stride(), int(view.storage_offset()) - begin) for view in views])


def _constants(program: Program, device: torch.device) -> list[Tensor]:
    """The constants. Those for the device get there by one copy."""
    if not program.constants:
        return []
    here = torch.frombuffer(bytearray(program.packed) or bytearray(1), dtype=torch.uint8)
    there = here
    if program.uploaded and device.type == "cuda":
        # Not page-locked: the driver takes so few bytes at once, and page-locking them takes longer.
        there = here[: program.uploaded].to(device, non_blocking=True)
    return [_constant(constant, there if constant.on_target else here) for constant in program.constants]


def _constant(constant: Constant, memory: Tensor) -> Tensor:
    size = 1 + sum((n - 1) * s for n, s in zip(constant.size, constant.stride, strict=True))
    if 0 in constant.size:
        return torch.empty_strided(constant.size, constant.stride, dtype=constant.dtype, device=memory.device)
    part = memory[constant.offset : constant.offset + size * constant.dtype.itemsize].view(constant.dtype)
    return part.as_strided(constant.size, constant.stride)
