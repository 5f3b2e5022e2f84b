"""Parts of programs that torch runs without Python, and without the interpreter's lock: graphs of TorchScript.

Used by :mod:`monai_gds.programs.replay`. In Python a step takes 15 us, and four times that beside a training that
holds the lock. A transform's operations on one crop are mostly the same from item to item, except for numbers. So they
are one graph, with the numbers as inputs. It is built when a part is met again, and compared once with the steps that
it stands for. Whatever has no graph runs step by step.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from monai_gds import limits
from monai_gds.programs.program import TARGET, Part, Program, Step, operation

_unoptimized: Any = torch.jit.optimized_execution  # type: ignore[attr-defined]

#: Steps from which on a graph is faster than Python.
_LEAST = 8

#: The numbers of dtypes, and so on, among the arguments of torch's operations (c10/core/ScalarType.h, Layout.h).
_NUMBERS: dict[Any, int] = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.complex64: 9, torch.complex128: 10, torch.bool: 11, torch.bfloat16: 15, torch.strided: 0,
    torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# When a program is made


def parts(ops: Sequence[str], steps: Sequence[Step], ends: Sequence[int]) -> tuple[Part, ...]:
    """Where graphs may stand for steps: the longest runs of a transform that share no value with its other steps.

    Args:
        ops: the names of operations.
        steps: the steps.
        ends: how many steps there are after each transform.
    """
    found = []
    for begin, end in zip((0, *ends), ends, strict=False):
        for first, last in _runs(steps, begin, end):
            if last - first >= _LEAST and (part := _part(ops, steps, first, last)) is not None:
                found.append(part)
    return tuple(found)


def _runs(steps: Sequence[Step], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cuts the steps of a transform where no later one of them uses a value of an earlier one."""
    last_use = {number: i for i in range(begin, end) for _, _, number in steps[i].tensors}
    first, reach = begin, begin
    for i in range(begin, end):
        if i > reach:
            yield first, i
            first = i
        reach = max([reach, i, *(last_use.get(number, i) for number in steps[i].outs if number is not None)])
    yield first, end


def _part(ops: Sequence[str], steps: Sequence[Step], first: int, last: int) -> Part | None:
    """A run as a part; None if it has no graph."""
    made = {number for step in steps[first:last] for number in step.outs if number is not None}
    dead = {number for step in steps[first:last] for number in step.dead}
    used = dict.fromkeys(number for step in steps[first:last] for _, _, number in step.tensors)
    part = Part(
        first, last, tuple(number for number in used if number not in made), (), tuple(sorted(made - dead)),
        tuple(sorted(dead - made)), b"",
    )  # fmt: skip
    try:
        graph = _Graph(part, ops, steps, "target")
    except _NoGraph:
        return None
    digest = hashlib.blake2b(graph.text.encode(), digest_size=16).digest()
    return part._replace(floats=tuple(graph.floats), digest=digest)


# ---------------------------------------------------------------------------------------------------------------------
# When a program is replayed


class Graphs:
    """The graphs of this process. Threads may share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Any, Callable[..., Any] | None] = {}  # None: met once, or there is none
        self._hopeless: set[Any] = set()

    def run(
        self, part: Part, program: Program, values: list[Any], device: torch.device,
        plainly: Callable[[Sequence[Step], list[Any]], None],
    ) -> None:  # fmt: skip
        """Runs a part of a program.

        Args:
            part: which.
            program: the program.
            values: those so far; gets those of the part, and None for those that nobody needs afterwards.
            device: the device of the replay.
            plainly: runs steps one by one.

        Raises:
            RuntimeError: an operation failed. Its type is lost: a replay step by step raises it.
        """
        key, graph = (part.digest, device), None
        with self._lock:
            if key in self._found:
                graph = self._found[key]
                new = graph is None and key not in self._hopeless
            else:
                new = False
                if len(self._found) == limits.GRAPHS:
                    self._hopeless.discard(old := next(iter(self._found)))
                    del self._found[old]
                self._found[key] = None
        if new:
            graph = self._built(part, program, values, device, plainly)
            with self._lock:
                self._found[key] = graph
                if graph is None:
                    self._hopeless.add(key)
        if graph is None:
            plainly(program.steps[part.first : part.last], values)
            return
        with _unoptimized(False):
            made = graph(*[values[number] for number in part.inputs], *part.floats)
        for number, value in zip(part.outs, made, strict=True):
            values[number] = value
        for number in part.dead:
            values[number] = None

    def _built(
        self, part: Part, program: Program, values: list[Any], device: torch.device,
        plainly: Callable[[Sequence[Step], list[Any]], None],
    ) -> Callable[..., Any] | None:  # fmt: skip
        """The graph of a part; None if it has none that gives the same."""
        try:
            text = _Graph(part, program.ops, program.steps, str(device)).text
            graph: Callable[..., Any] = torch._C._create_function_from_graph("part", torch._C.parse_ir(text))
            with _unoptimized(False):
                made = graph(*_copies(part, values), *part.floats)
        except RuntimeError as e:
            if isinstance(e, torch.OutOfMemoryError):
                raise
            return None
        again: list[Any] = list(values)
        for number, value in zip(part.inputs, _copies(part, values), strict=True):
            again[number] = value
        plainly(program.steps[part.first : part.last], again)
        return graph if all(_equal(value, again[n]) for n, value in zip(part.outs, made, strict=True)) else None


def _copies(part: Part, values: Sequence[Any]) -> list[Tensor]:
    """The inputs of a part in memory of their own. Those that share memory do so afterwards."""
    copies: dict[int, Tensor] = {}
    found = []
    for tensor in (values[number] for number in part.inputs):
        storage = tensor.untyped_storage()
        if storage._cdata not in copies:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copies[storage._cdata] = flat.clone()
        memory = copies[storage._cdata].view(tensor.dtype)
        found.append(memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return found


def _equal(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape, a.stride(), a.device) != (b.dtype, b.shape, b.stride(), b.device):
        return False
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return bool(torch.equal(one, other))


# ---------------------------------------------------------------------------------------------------------------------
# The text of a graph


class _NoGraph(Exception):
    """An argument has no form in the text of a graph."""


class _Graph:
    """TorchScript's text of a part.

    Attributes:
        text: the text.
        floats: the numbers that are inputs of the graph.

    Raises:
        _NoGraph: it has none.
    """

    def __init__(self, part: Part, ops: Sequence[str], steps: Sequence[Step], device: str) -> None:
        self.floats: list[float] = []
        self._device = device
        self._names = {number: f"%i{i}" for i, number in enumerate(part.inputs)}
        self._lines: list[str] = []
        for step in steps[part.first : part.last]:
            self._add(step, ops[step.op])
        inputs = [f"%i{i} : Tensor" for i in range(len(part.inputs))]
        inputs += [f"%f{i} : float" for i in range(len(self.floats))]
        kinds, outs = ", ".join(["Tensor"] * len(part.outs)), ", ".join(self._names[number] for number in part.outs)
        lines = [*self._lines, f"%out : ({kinds}) = prim::TupleConstruct({outs})", "return (%out)"]
        self.text = f"graph({', '.join(inputs)}):\n  " + "\n  ".join(lines) + "\n"

    def _add(self, step: Step, name: str) -> None:
        schema = operation(name)._schema
        if len(schema.returns) != len(step.outs) or any(str(one.type) != "Tensor" for one in schema.returns):
            raise _NoGraph  # it gives a list
        within: dict[int | str, dict[int, str]] = {}
        for where, inner, number in step.tensors:
            within.setdefault(where, {})[inner] = self._names[number]
        given, named = [], step.kwargs or {}
        for i, argument in enumerate(schema.arguments):
            place = i if i < len(step.args) else argument.name
            value = step.args[i] if i < len(step.args) else named.get(argument.name, argument.default_value)
            tensors = within.get(place)
            if tensors is None:
                given.append(self._value(value))
            else:
                given.append(tensors[-1] if -1 in tensors else self._list(value, tensors))
        outs = [f"%v{len(self._lines)}_{i}" for i in range(len(step.outs))]
        self._names.update((number, out) for number, out in zip(step.outs, outs, strict=True) if number is not None)
        result = ", ".join(f"{out} : Tensor" for out in outs)
        self._lines.append(f"{result} = {name.partition('.')[0]}({', '.join(given)})")

    def _value(self, value: Any) -> str:
        kind = value.__class__
        if kind is float:
            self.floats.append(value)
            return f"%f{len(self.floats) - 1}"
        if value is None:
            return self._constant("NoneType", "prim::Constant()")
        if kind is bool or kind is int:
            return self._constant(kind.__name__, f"prim::Constant[value={int(value)}]()")
        if kind in (tuple, list) and all(n.__class__ is int for n in value):
            return self._constant("int[]", f"prim::Constant[value={list(value)}]()")
        if kind is torch.device:
            return self._constant("Device", f'prim::Constant[value="{self._device if value == TARGET else value}"]()')
        if kind is str and value.isidentifier():
            return self._constant("str", f'prim::Constant[value="{value}"]()')
        if kind in (torch.dtype, torch.layout, torch.memory_format) and value in _NUMBERS:
            return self._constant("int", f"prim::Constant[value={_NUMBERS[value]}]()")
        raise _NoGraph

    def _list(self, values: Sequence[Any], tensors: Mapping[int, str]) -> str:
        if any(value is not None for value in values):
            raise _NoGraph
        parts = [tensors[i] if i in tensors else self._value(None) for i in range(len(values))]
        kind = "Tensor[]" if len(tensors) == len(values) else "Tensor?[]"
        return self._constant(kind, f"prim::ListConstruct({', '.join(parts)})")

    def _constant(self, kind: str, value: str) -> str:
        self._lines.append(f"%c{len(self._lines)} : {kind} = {value}")
        return f"%c{len(self._lines) - 1}"
