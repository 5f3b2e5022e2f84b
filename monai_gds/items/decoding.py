"""Puts items together: splits a tree into its form and its values, and compiles each form into a plan once.

The form is everything in a tree but its values. All records of a pipeline have the same form, so only the values and
small arrays of each record are kept in memory, and a hit parses nothing. How each type is parsed and planned is in
:mod:`.table`.

Anyone may have written a record, so the worst that its content may cause is an error. A tree that no encoder produces
raises DamagedRecord. A tree that only a newer version can have written raises NewerRecord, and its record must not be
overwritten.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from monai_gds.base.dtypes import MOST_AXES
from monai_gds.base.names import above
from monai_gds.errors import DamagedRecord, NewerRecord, RecordError
from monai_gds.items.encoding import ARRAY_ALIGNMENT
from monai_gds.items.types import GONE, MAX_DEPTH, Type, gone, numpy_dtype

#: A nested tuple that begins with a tag. An int is the index of a value.
Form: TypeAlias = "int | tuple[Any, ...]"

#: Builds one node from the tensors by name, the values, and a list: the packed block of small arrays viewed as each of
#: the plan's dtypes, then the dataset's item, then the block as bytes.
Build: TypeAlias = "Callable[[Mapping[str, torch.Tensor], Sequence[Any], Sequence[Any]], Any]"


#: The bytes that an array without an axis of 0 may have, and the elements of no size: NumPy refuses more, or hangs.
_MOST_BYTES, _MOST_OF_NO_SIZE = 1 << 48, 1 << 16


def tensor_of(raw: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A view of a 1-D uint8 tensor as ``dtype`` and ``shape``."""
    flat = raw.view(dtype)
    return flat if len(shape) == 1 else flat.view(shape)


class Recipe:
    """Puts an item together from its tensors each time it is called. Two items share nothing mutable."""

    __slots__ = ("_arrays", "_values", "plan")

    def __init__(self, plan: TreePlan, values: Sequence[Any], arrays: bytes) -> None:
        if plan.end > len(arrays):
            raise DamagedRecord("some of its small arrays are missing")
        self.plan = plan  # shared by all recipes of one form
        self._values = tuple([sys.intern(v) if type(v) is str else v for v in values])  # most records have the same
        self._arrays = arrays + bytes(-len(arrays) % ARRAY_ALIGNMENT)  # so that it can be viewed as any dtype

    def __call__(self, tensors: Mapping[str, torch.Tensor], item: Any = None) -> Any:
        """Puts an item together from the record's tensors, whose memory it uses.

        Values that are taken from the dataset's own item are copied. Raises DamagedRecord if the tree does not fit the
        tensors or the item.
        """
        try:
            return self.plan.build(tensors, self._values, self._arrays, item)
        except RecordError:
            raise
        except Exception as e:
            raise DamagedRecord(f"its item cannot be put together: {e!r}") from e


class Parser:
    """Splits a tree into its form, which :meth:`form` returns, and its immutable ``values``.

    Args:
        rows: the table of types, by tag. JSON's own dicts have ``$dict``.
        names, track_meta, numpy, root: see :func:`monai_gds.items.tree.compile_tree`.
    """

    def __init__(
        self, rows: Mapping[str | type, Type], names: Container[str], track_meta: bool, numpy: bool, root: str | None
    ) -> None:
        self.values: list[Any] = []
        self.track_meta, self.numpy, self.root = track_meta, numpy, root
        self._rows = rows
        self._names = names
        self._used: set[str] = set()  # names of tensors
        self._depth = 0

    def form(self, node: Any) -> Form:
        """The form of a node."""
        kind = type(node)
        if kind is dict:
            if len(node) == 1:
                tag = next(iter(node))
                row = self._rows.get(tag)
                if row is not None:
                    return row.parse(self, node[tag])  # type: ignore[no-any-return]
            unknown = [key for key in node if key.startswith("$")]
            if unknown:
                if unknown[0] in GONE:
                    raise gone(f"a {unknown[0]!r}")
                raise NewerRecord(f"it holds a {unknown[0]!r}, which this version does not support")
            return "$dict", tuple(node), None, self.forms(node.values())
        if kind is list:
            return self._rows[list].parse(self, node)  # type: ignore[no-any-return]
        self.values.append(node)  # as value() does: most nodes are values
        return len(self.values) - 1

    def forms(self, nodes: Iterable[Any]) -> tuple[Form, ...]:
        """The forms of the nodes inside another."""
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:  # the innermost may be a slice
            raise DamagedRecord(f"its item tree is nested more than {MAX_DEPTH} deep")
        found = tuple([self.form(node) for node in nodes])
        self._depth -= 1
        return found

    def members(self, nodes: list[Any]) -> tuple[Form, ...] | list[Any]:
        """The forms of nodes; if all of them are values, these in a list."""
        start = len(self.values)
        forms = self.forms(nodes)
        if not {int}.issuperset(map(type, forms)):
            return forms
        members = self.values[start:]
        del self.values[start:]
        return members

    def value(self, value: Any) -> int:
        """The form of an immutable value."""
        self.values.append(value)
        return len(self.values) - 1

    def text(self, node: Any) -> str:
        """A string, possibly stored relative to the data root."""
        if type(node) is str:
            return node
        (rest,) = fields(node, "a text", "$root")
        if type(rest) is not str:
            raise DamagedRecord(f"it holds {rest!r} in place of a path")
        if self.root is None:
            raise DamagedRecord(f"it holds a path below a data root ({rest!r}): give the root (root=)")
        return above(rest, self.root)

    def use(self, name: str) -> None:
        """Notes that the tree uses a tensor. Raises DamagedRecord unless it is there, and used for the first time."""
        if name not in self._names or name in self._used:
            raise DamagedRecord(f"its tensor {name!r} is missing, or used twice")
        self._used.add(name)


class TreePlan:
    """Puts items of one form together.

    Attributes:
        end: how many bytes of small arrays an item of this form needs.
        arrays: the names of the tensors that become NumPy arrays.
    """

    def __init__(self, form: Form, rows: Mapping[str | type, Type]) -> None:
        self.end = 0
        self.arrays: set[str] = set()
        self._rows = rows
        self._dtypes: dict[np.dtype[Any], int] = {}
        self._build = self.node(form)

    def build(self, tensors: Mapping[str, torch.Tensor], values: Sequence[Any], arrays: bytes, item: Any) -> Any:
        """Builds an item. Its small arrays are views of one fresh block of memory."""
        block = np.frombuffer(bytearray(arrays), np.uint8)
        return self._build(tensors, values, [*map(block.view, self._dtypes), item, block])

    def node(self, form: Form) -> Build:
        """What builds a node of this form."""
        if isinstance(form, int):
            return lambda t, v, a: v[form]
        plan = self._rows[form[0]].plan
        assert plan is not None, form[0]
        return plan(self, *form[1:])  # type: ignore[no-any-return]

    def dict(self, keys: Sequence[Any], forms: Sequence[Form]) -> Build:
        """Builds a dict. Metadata are mostly values and small arrays, which are put in without a call for each."""
        base = dict.fromkeys(keys)
        values, arrays, others = [], [], []
        for key, form in zip(keys, forms, strict=True):
            place = self._place(form)
            if isinstance(form, int):
                values.append((key, form))
            elif place is not None:
                arrays.append((key, *place))
            else:
                others.append((key, self.node(form)))

        def build(t: Mapping[str, torch.Tensor], v: Sequence[Any], a: Sequence[Any]) -> Any:
            out: Any = base.copy()
            for key, index in values:
                out[key] = v[index]
            for key, view, where in arrays:
                out[key] = a[view][where]
            for key, other in others:
                out[key] = other(t, v, a)
            return out

        return build

    def constant(self, node: Any, root: str | None) -> Any:
        """The value of a node that holds neither tensors nor arrays."""
        parser = Parser(self._rows, (), True, False, root)
        form = parser.form(node)
        return Recipe(TreePlan(form, self._rows), parser.values, b"")({})

    def take(self, dtype: np.dtype[Any] | torch.dtype, shape: Sequence[int], offset: int) -> int:
        """Checks shape and offset of a small array or tensor, notes where it ends, and returns its element count."""
        if len(shape) > MOST_AXES or not all(type(n) is int and n >= 0 for n in (*shape, offset)):
            raise DamagedRecord(f"it holds an array of shape {shape!r:.40} at {offset!r:.40}")
        count = math.prod(shape)
        # With an axis of 0, or elements of no size, no bytes of the record limit the others.
        if math.prod(n or 1 for n in shape) * dtype.itemsize > _MOST_BYTES or (
            not dtype.itemsize and count > _MOST_OF_NO_SIZE
        ):
            raise DamagedRecord(f"it holds an array of shape {shape!r:.40}, which no memory holds")
        self.end = max(self.end, offset + count * dtype.itemsize)
        return count

    def _place(self, form: Form) -> tuple[int, Any] | None:
        """The view and the index or slice that hold an array of at most one axis; None for any other form."""
        if isinstance(form, int) or form[0] != "$array" or len(form[2]) > 1:
            return None
        _, descr, shape, offset = form
        dtype = numpy_dtype(descr)
        count = self.take(dtype, shape, offset)
        if not count or not dtype.itemsize or ARRAY_ALIGNMENT % dtype.itemsize or offset % dtype.itemsize:
            return None
        if dtype.kind == "U":  # examined first
            return None
        first = offset // dtype.itemsize
        view = self._dtypes.setdefault(dtype, len(self._dtypes))
        return view, slice(first, first + shape[0]) if shape else (first, ...)


def fields(payload: dict[str, Any], of: str, *needed: str, **optional: Any) -> list[Any]:
    """The fields of a node in the order of the arguments; ``optional`` gives the defaults of missing ones.

    Raises NewerRecord if there is another field.
    """
    unknown = payload.keys() - {*needed, *optional}
    if unknown:
        raise NewerRecord(f"it holds {of} with {sorted(unknown)}, which this version does not support")
    return [*(payload[name] for name in needed), *(payload.get(name, default) for name, default in optional.items())]
