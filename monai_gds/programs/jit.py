"""Pieces of programs as functions of TorchScript, whose interpreter runs them without Python's lock.

A piece is a run of steps that depend on one another: of one transform, such as the rotation of one crop, or of several
that do little to one crop. Pieces that differ only in their numbers have one form, and one function, which is built
when a form is met first: that takes more than ten times as long as running it. :mod:`.emission` cuts programs into
pieces, and :mod:`.replay` runs them.

Each operation that Python runs gives the lock back. The training then takes it, which wakes its thread, and waits for
it again at its own next operation.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch

from monai_gds import limits
from monai_gds.programs.log import about
from monai_gds.programs.program import TARGET, Piece, Step, op_of

_C = torch._C

#: Takes the tensors and numbers of a piece. Gives what it makes: nothing, a tensor, or a tuple of them.
Function: TypeAlias = Callable[..., Any]

#: Fewer steps of one transform are taken together with those of others.
_LEAST_STEPS = 4

#: In TorchScript these are numbers.
_MEMORY_FORMATS = {
    torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3,
}  # fmt: skip

#: What an argument is: ``"tensor"``, ``"tensors"`` (a list of them or None), ``"int"``, ``"float"``, ``"ints"`` or
#: ``"floats"`` (a number or some, given at each call), or a ``"constant"``; and which one.
_Argument: TypeAlias = tuple[str, Any]


class _Traced(NamedTuple):
    """Steps without their numbers, and with their tensors counted in the order in which they come up."""

    steps: list[tuple[str, list[tuple[int | str, _Argument]], list[int | None]]]
    places: dict[int, int]  # of the program's values
    given: list[int]  # those that come from elsewhere
    numbers: list[Any]


# ---------------------------------------------------------------------------------------------------------------------
# Cutting, where programs are made


def cut(steps: Sequence[Step], names: Sequence[str], owners: Sequence[int], kept: set[int]) -> list[Piece]:
    """Divides the steps of a program into pieces.

    Args:
        steps: all of them.
        names: the names of the operations.
        owners: which transform each step belongs to.
        kept: the values that are needed after the last step.
    """
    last = {number: i for i, step in enumerate(steps) for _, _, number in step.tensors}
    last.update(dict.fromkeys(kept, len(steps)))
    connected = _connected(steps, owners)
    pieces: list[Piece] = []
    short: list[int] = []

    def take(some: Sequence[int], end: int) -> Piece:
        return _piece([steps[i] for i in some], names, {number for number, i in last.items() if i >= end})

    def take_short() -> None:
        if any(about(op_of(names[steps[i].op])).written for i in short):  # then their order counts
            pieces.append(Piece(pickle.dumps([steps[i] for i in short], 5)))
        elif short:
            together = _connected([steps[i] for i in short])
            groups = [[short[i] for i in range(len(short)) if together[i] == n] for n in dict.fromkeys(together)]
            pieces.extend(take(group, short[-1] + 1) for group in groups)
        short.clear()

    for _, run in groupby(range(len(steps)), connected.__getitem__):
        some = list(run)
        if len(some) < _LEAST_STEPS:
            short += some
        else:
            take_short()
            pieces.append(take(some, some[-1] + 1))
    take_short()
    return pieces


def _connected(steps: Sequence[Step], owners: Sequence[int] | None = None) -> list[int]:
    """The number of the group of each step. Steps of a group are connected by values that they make, and are of one
    transform; without ``owners`` they are connected by all values that they use.
    """
    group = list(range(len(steps)))

    def first(i: int) -> int:
        while group[i] != i:
            group[i] = i = group[group[i]]
        return i

    met: dict[int, int] = {}
    for i, step in enumerate(steps):
        outs = [out for out in step.outs if out is not None]
        used = [number for _, _, number in step.tensors]
        for number in used if owners is not None else used + outs:
            if number in met and (owners is None or owners[met[number]] == owners[i]):
                group[first(i)] = first(met[number])
        met.update(dict.fromkeys(outs if owners is not None else used + outs, i))
    return [first(i) for i in range(len(steps))]


def _piece(steps: Sequence[Step], names: Sequence[str], later: set[int]) -> Piece:
    traced = _traced(steps, names)
    made = {out for step in steps for out in step.outs}
    results = tuple(number for number in traced.places if number in made and number in later)
    form = repr((traced.steps, [traced.places[number] for number in results])).encode()
    dead = {number for step in steps for number in step.dead}
    return Piece(
        pickle.dumps(steps, 5), hashlib.blake2b(form, digest_size=12).digest(), tuple(traced.given),
        tuple(traced.numbers), results, tuple(dead.intersection(traced.given)),
    )  # fmt: skip


def _traced(steps: Sequence[Step], names: Sequence[str]) -> _Traced:
    traced = _Traced([], {}, [], [])
    for step in steps:
        tensors: dict[int | str, dict[int, int]] = {}
        for where, inner, number in step.tensors:
            if number not in traced.places:
                traced.given.append(number)
            tensors.setdefault(where, {})[inner] = traced.places.setdefault(number, len(traced.places))
        arguments: list[tuple[int | str, _Argument]] = []
        named: list[tuple[int | str, Any]] = [*enumerate(step.args), *sorted((step.kwargs or {}).items())]
        for where, value in named:
            arguments.append((where, _argument(value, tensors.get(where, {}), traced.numbers)))
        outs = [None if out is None else traced.places.setdefault(out, len(traced.places)) for out in step.outs]
        traced.steps.append((names[step.op], arguments, outs))
    return traced


def _argument(value: Any, tensors: dict[int, int], numbers: list[Any]) -> _Argument:
    """What an argument is. Numbers are added to those given."""
    if -1 in tensors:
        return "tensor", tensors[-1]
    if tensors:
        others = [part for i, part in enumerate(value) if i not in tensors and part is not None]
        return ("constant", value) if others else ("tensors", [tensors.get(i) for i in range(len(value))])
    parts = value if isinstance(value, (list, tuple)) else [value]
    kinds = {float if isinstance(part, float) else type(part) for part in parts}
    if kinds not in ({int}, {float}):
        return "constant", value
    (kind,) = kinds
    numbers.append(kind(value) if parts[0] is value else [kind(part) for part in parts])
    return kind.__name__ + "s" * (parts[0] is not value), None


# ---------------------------------------------------------------------------------------------------------------------
# Building, where programs are replayed


class Functions:
    """The functions for programs that are replayed on a device. What cannot be built once is not tried again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of: dict[bytes, Function | None] = {}

    def ready(self, pieces: Sequence[Piece]) -> dict[bytes, Function]:
        """Those for some pieces, by form, as far as there are any."""
        found = ((piece.form, self._of.get(piece.form)) for piece in pieces)
        return {form: function for form, function in found if function is not None}

    def built(self, pieces: Sequence[Piece], names: Sequence[str]) -> dict[bytes, Function]:
        """Builds functions for the forms that were not met before, by form. They are not used until :meth:`keep`."""
        made: dict[bytes, Function] = {}
        for piece in pieces:
            if piece.form and piece.form not in self._of and len(self._of) < limits.SCRIPTED_FORMS:
                self._of[piece.form] = None
                try:
                    made[piece.form] = _built(piece, names, self._device)
                except (RuntimeError, ValueError, TypeError):  # something that TorchScript lacks
                    continue
        return made

    def keep(self, made: dict[bytes, Function]) -> None:
        """Uses functions from now on."""
        self._of.update(made)


#: Returns the process's functions for a device.
functions_for = cache(Functions)


def _built(piece: Piece, names: Sequence[str], device: torch.device) -> Function:
    """The function of a piece's form. Raises RuntimeError, ValueError or TypeError if TorchScript cannot run it."""
    steps: list[Step] = pickle.loads(piece.steps)
    traced = _traced(steps, names)
    graph, tensor = _C.Graph(), _C.TensorType.get()
    values: dict[int | None, Any] = {}
    for number in piece.tensors:
        values[traced.places[number]] = graph.addInput()
        values[traced.places[number]].setType(tensor)
    for name, arguments, outs in traced.steps:
        schema = op_of(name)._schema
        wanted = {where: str(one.type) for i, one in enumerate(schema.arguments) for where in (i, one.name)}
        if strange := [where for where, _ in arguments if where not in wanted]:
            raise ValueError(f"{name} has no {strange}")
        # Numbers become inputs of the graph in the order in which they are given, which need not be the schema's.
        given = {where: _input(graph, argument, wanted[where], values, device) for where, argument in arguments}
        inputs = []
        for i, one in enumerate(schema.arguments):
            place = i if i in given else one.name
            default = "constant", one.default_value
            inputs.append(given[place] if place in given else _input(graph, default, wanted[i], values, device))
        node = graph.create(name.rpartition(".")[0], inputs, len(schema.returns))
        graph.insertNode(node)
        kinds = [str(one.type) for one in schema.returns]
        if kinds == ["List[Tensor]"]:
            node.output().setType(_C.ListType(tensor))
            node = graph.create("prim::ListUnpack", [node.output()], len(outs))
            graph.insertNode(node)
        elif set(kinds) - {"Tensor"}:
            raise ValueError(f"{name} gives {kinds}")
        for out, value in zip(outs, node.outputs(), strict=True):
            value.setType(tensor)
            values[out] = value
    results = [values[traced.places[number]] for number in piece.results]
    if len(results) > 1:
        node = graph.create("prim::TupleConstruct", results, 1)
        graph.insertNode(node)
        node.output().setType(_C.TupleType([tensor] * len(results)))
        results = [node.output()]
    for result in results:
        graph.registerOutput(result)
    made: Function = _C._create_function_from_graph("piece", graph)
    return made


def _input(graph: Any, argument: _Argument, wanted: str, values: dict[int | None, Any], device: torch.device) -> Any:
    """An argument in a graph, for a parameter of a type; a number is one of the graph's own inputs."""
    kind, value = argument
    if kind == "tensor":
        return values[value]
    if kind == "tensors":
        parts = [graph.insertConstant(None) if part is None else values[part] for part in value]
        node = graph.create("prim::ListConstruct", parts, 1)
        graph.insertNode(node)
        tensor = _C.TensorType.get()
        node.output().setType(_C.ListType(_C.OptionalType(tensor) if "Optional[Tensor]" in wanted else tensor))
        return node.output()
    if kind == "constant":
        if isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS.get(value, value)
        value = device if value == TARGET else value
        return graph.insertConstant(list(value) if isinstance(value, tuple) else value)
    if ("List" in wanted) != kind.endswith("s"):
        raise ValueError(f"{kind} for {wanted}")
    number = _C.FloatType.get() if "float" in wanted or kind.startswith("float") else _C.IntType.get()
    found = graph.addInput()
    found.setType(_C.ListType(number) if kind.endswith("s") else number)
    return found
