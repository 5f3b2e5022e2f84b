"""From a recording to a program: only what the result needs, with new numbers and its constants in one piece.

Used by :mod:`monai_gds.programs.recorder`.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from monai_gds.programs.ghostly import ON_HOST, ON_TARGET, plainly
from monai_gds.programs.jit import cut
from monai_gds.programs.log import Log, Operation, Ref, unexpanded
from monai_gds.programs.program import Constant, Guard, Program, Step, View, hold, pack

_aten = torch.ops.aten

#: What a value is called until all are numbered: a ghost's number in the recording, or a constant's, negative.
_Key: TypeAlias = int

#: Operations that copy indices from the CPU to the device, and wait for that.
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)

#: Constants begin at multiples of this many bytes, as torch's own memory does.
_LINE = 64


def emit(
    log: Log, item: Any, marks: Sequence[int], whole: bool, guards: Sequence[Guard], held: bool = False
) -> Program:
    """Makes the program of what was recorded.

    Args:
        log: what was recorded.
        item: the result, with ghosts.
        marks: how many operations there were after each transform.
        whole: whether no transform runs after the program.
        guards: the bools that the replay compares.
        held: whether the item is not copied, so that the program is for this process and one replay.

    Raises:
        Refused: the item holds a tensor that does not come from the recording.
        Exception: whatever :func:`pack` or :func:`hold` raises.
    """
    with plainly():
        return _Emission(log, hold if held else pack).program(item, marks, whole, guards)


class _Draft(NamedTuple):
    """A step whose values have no slots yet."""

    number: int  # of the operation in the log
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[tuple[int | str, int, _Key]]
    outs: tuple[int | None, ...]


class _Emission:
    """The making of one program."""

    def __init__(self, log: Log, put: Callable[[Any, Callable[[Tensor], int | None]], Any]) -> None:
        self._of, self._put = log, put
        self._views: dict[_Key, View] = {}
        self._constants: dict[Any, tuple[_Key, Tensor, bool]] = {}
        self._uploaded: dict[int, _Key] = {}  # ghosts that are constants

    def program(self, item: Any, marks: Sequence[int], whole: bool, guards: Sequence[Guard]) -> Program:
        """See :func:`emit`."""
        of = self._of
        results: list[int] = []

        def hole(tensor: Tensor) -> int | None:
            if tensor.requires_grad:
                of.refuse("its result requires a gradient")
            if not tensor.is_meta:
                of.count(tensor.untyped_storage().nbytes() if self._put is pack else 0)
                return None
            results.append(of.number_of(tensor))
            return len(results) - 1

        taken = self._put(item, hole)
        kept = self._needed({*results, *(guard.value for guard in guards)})
        drafts = list(self._drafts(kept, set(results)))
        holes = [self._key(Ref(number)) for number in results]
        guarded = [self._key(Ref(guard.value)) for guard in guards]
        constants, packed, uploaded, order = self._packed()
        keys = [*self._views, *order, *(out for draft in drafts for out in draft.outs if out is not None)]
        slots = {key: slot for slot, key in enumerate(dict.fromkeys(keys))}
        names = list(dict.fromkeys(draft.name for draft in drafts))
        steps = _steps(drafts, names, slots, {*holes, *guarded})
        owners = [bisect_right(marks, draft.number) for draft in drafts]
        pieces = cut(steps, names, owners, {slots[key] for key in (*holes, *guarded)})
        written = {s for operation in kept if operation.about.mutable for s in operation.writes}
        if not whole:
            written |= {of.places[number].storage for number in results}
        return Program(
            forms=dict(of.forms), views=tuple(self._views.values()),
            copied=frozenset(of.names[storage] for storage in written if storage in of.names),
            constants=constants, packed=packed, uploaded=uploaded, ops=tuple(names),
            pickled=pickle.dumps(pieces, 5), values=len(slots),
            guards=tuple(
                guard._replace(value=slots[key]) for guard, key in zip(guards, guarded, strict=True)
            ),
            holes=tuple(slots[key] for key in holes), item=taken, done=len(marks), form=_forms(of, marks),
            made=_made(of, [of.operations[draft.number] for draft in drafts], owners),
            counts=tuple(Counter(owners).items()),
        )  # fmt: skip

    def _needed(self, numbers: set[int]) -> list[Operation]:
        """The operations that values depend on."""
        places = self._of.places
        memory = {places[number].storage for number in numbers}
        kept = []
        for operation in reversed(self._of.operations):
            writes = operation.about.mutable and not memory.isdisjoint(operation.writes)
            if not writes and numbers.isdisjoint(operation.outs):
                continue
            kept.append(operation)
            numbers |= {ref.number for _, _, ref in _places(operation) if ref.__class__ is Ref}
            memory.update(operation.reads)
        return kept[::-1]

    def _drafts(self, kept: Sequence[Operation], results: set[int]) -> Iterator[_Draft]:
        written = {s for operation in kept if operation.about.mutable for s in operation.writes}
        written |= {self._of.places[number].storage for number in results}
        there: set[int | None] = set()
        numbers = {id(operation): i for i, operation in enumerate(self._of.operations)}
        for operation in kept:
            number = numbers[id(operation)]
            if operation.about.view and there.issuperset(operation.outs):
                continue  # the same view again
            if operation.func is _aten.copy_.default and _is_same(*operation.args[:2]):
                continue  # onto itself, as Python does after x[0] *= 2
            first = operation.args[0] if operation.args else None
            there.update(operation.outs)
            if (
                operation.func is _aten._to_copy.default
                and isinstance(first, Tensor)
                and operation.kind != self._of.host
            ):
                dtype = operation.kwargs.get("dtype") or first.dtype  # torch converts before it copies
                made = unexpanded(first).to(dtype).expand(first.shape)
                key = self._constant(made, True)
                if 0 in made.stride() or not written.isdisjoint(operation.writes):
                    yield _Draft(number, "aten::clone.default", (None,), {}, [(0, -1, key)], operation.outs)
                else:
                    self._uploaded[operation.outs[0] or 0] = key
                continue
            on_target = operation.func in _INDEXING and operation.kind == ON_TARGET
            tensors = [(where, inner, self._key(value, on_target)) for where, inner, value in _places(operation)]
            args = tuple(_without_tensors(arg) for arg in operation.args)
            kwargs = {name: _without_tensors(value) for name, value in operation.kwargs.items()}
            yield _Draft(number, operation.about.name, args, kwargs, tensors, operation.outs)

    def _key(self, value: Ref | Tensor, on_target: bool = False) -> _Key:
        if isinstance(value, Tensor):
            return self._constant(value, on_target and self._of.host != ON_TARGET)
        number = value.number
        if number in self._uploaded:
            return self._uploaded[number]
        place = self._of.places[number]
        if self._of.is_leaf(place):
            self._views[number] = View(self._of.names[place.storage], place.size, place.stride, place.offset)
        return number

    def _constant(self, tensor: Tensor, on_target: bool) -> _Key:
        form = on_target, tensor.dtype, tuple(tensor.shape), tensor.stride(), _bytes(tensor)
        return self._constants.setdefault(form, (-1 - len(self._constants), tensor, on_target))[0]

    def _packed(self) -> tuple[tuple[Constant, ...], bytes, int, list[_Key]]:
        """The constants, those for the target first; their bytes; how many of these are for it; and their keys."""
        packed, constants, keys, uploaded = bytearray(), [], [], 0
        for form, (key, tensor, on_target) in sorted(self._constants.items(), key=lambda c: not c[0][0]):
            packed += bytes(-len(packed) % _LINE)
            constants.append(Constant(tensor.dtype, tuple(tensor.shape), tensor.stride(), len(packed), on_target))
            packed += form[-1]
            keys.append(key)
            uploaded = len(packed) if on_target else uploaded
        return tuple(constants), bytes(packed), uploaded, keys


def _steps(drafts: Sequence[_Draft], names: Sequence[str], slots: dict[_Key, int], results: set[_Key]) -> list[Step]:
    last: dict[_Key, int] = {}
    for i, draft in enumerate(drafts):
        last.update((key, i) for _, _, key in draft.tensors)
        for out in draft.outs:
            if out is not None:
                last.setdefault(out, i)
    dead: dict[int, list[int]] = {}
    for key, i in last.items():
        if key not in results:
            dead.setdefault(i, []).append(slots[key])
    numbers = {name: number for number, name in enumerate(names)}
    return [
        Step(
            numbers[draft.name], draft.args, draft.kwargs or None,
            tuple((where, inner, slots[key]) for where, inner, key in draft.tensors),
            tuple(None if out is None else slots[out] for out in draft.outs), tuple(dead.get(i, ())),
        )
        for i, draft in enumerate(drafts)
    ]  # fmt: skip


def _places(operation: Operation) -> Iterator[tuple[int | str, int, Any]]:
    """The tensors among the arguments of an operation: position or name, place in the list there, and the tensor."""
    named: list[tuple[int | str, Any]] = [*enumerate(operation.args), *operation.kwargs.items()]
    for where, value in named:
        if _is_tensor(value):
            yield where, -1, value
        elif value.__class__ is list or value.__class__ is tuple:
            yield from ((where, i, part) for i, part in enumerate(value) if _is_tensor(part))


def _is_same(a: Any, b: Any) -> bool:
    return a.__class__ is Ref and b.__class__ is Ref and bool(a == b)


def _is_tensor(value: Any) -> bool:
    return value.__class__ is Ref or isinstance(value, Tensor)


def _without_tensors(value: Any) -> Any:
    if value.__class__ is list or value.__class__ is tuple:
        return tuple(None if _is_tensor(part) else part for part in value)
    return None if _is_tensor(value) else value


def _bytes(tensor: Tensor) -> bytes:
    """The memory of a constant, which has no gaps; an axis that was expanded counts once."""
    tensor = unexpanded(tensor)
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.contiguous().view(torch.uint8).numpy().tobytes()


def _made(log: Log, operations: Sequence[Operation], owners: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """For each transform that makes tensors on the CPU for another device, how many bytes these have."""
    found: Counter[int] = Counter()
    for operation, owner in zip(operations, owners, strict=True):
        if operation.kind == ON_HOST and not operation.about.view:
            places = [log.places[number] for number in operation.outs if number is not None]
            found[owner] += sum(math.prod(place.size) * place.dtype.itemsize for place in places)
    return tuple(found.items())


def _forms(log: Log, marks: Sequence[int]) -> tuple[str, ...]:
    """For each transform a digest of its operations, with the dtypes and the number of axes of what they gave.

    Each counts once: four crops, of which some are flipped, would have sixteen forms.
    """
    found = []
    for begin, end in zip((0, *marks), marks, strict=False):
        met = set()
        for operation in log.operations[begin:end]:
            made = [log.places[number] for number in operation.outs if number is not None]
            met.add(repr((operation.about.name, operation.kind, [(p.dtype, len(p.size)) for p in made])))
        found.append(hashlib.blake2b("".join(sorted(met)).encode(), digest_size=8).hexdigest())
    return tuple(found)
