"""Puts items together: splits a tree into its form and its values, and compiles each form into a plan once.

The form is everything in a tree but its values. All records of a pipeline have the same form, so only the values and
small arrays of each record are kept in memory, and a hit parses nothing.

Anyone may have written a record, so the worst that its content may cause is an error. A tree that no encoder produces
raises DamagedRecord. A tree that only a newer version can have written raises NewerRecord, and its record must not be
overwritten.
"""

from __future__ import annotations

import ast
import base64
import collections
import functools
import json
import math
import pathlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base import data_root
from monai_gds.base.dtypes import MOST_AXES
from monai_gds.errors import DamagedRecord, NewerRecord, RecordError
from monai_gds.items.encoding import ARRAY_ALIGNMENT, Opaque
from monai_gds.items.passthrough import value_at
from monai_gds.items.types import (
    MAX_DEPTH,
    NUMERIC,
    TAGS,
    builtin_type,
    codec_named,
    enum_member,
    named_tuple,
    numpy_type,
    torch_dtype,
)

if TYPE_CHECKING:
    from monai.data import MetaTensor

__all__ = ["Recipe", "TreePlan", "compile_tree", "tensor_of"]


def tensor_of(raw: torch.Tensor, dtype: torch.dtype, shape: list[int] | tuple[int, ...]) -> torch.Tensor:
    """A view of a 1-D uint8 tensor as ``dtype`` and ``shape``."""
    flat = raw.view(dtype)
    return flat if len(shape) == 1 else flat.view(shape)


#: Nested tuples that begin with a key of _PLANS or _CONTAINERS. An int is the index of a value.
_TreeForm: TypeAlias = "int | tuple[Any, ...]"

#: Builds one node from the tensors by name, the values, and a list: the packed block of small arrays viewed as each of
#: the plan's dtypes, then the dataset's item, then the block as bytes.
_Build: TypeAlias = "Callable[[Mapping[str, torch.Tensor], Sequence[Any], Sequence[Any]], Any]"


class Recipe:
    """Puts an item together from its tensors each time it is called. Two items share nothing mutable."""

    __slots__ = ("_arrays", "_values", "nbytes", "plan")

    def __init__(self, plan: TreePlan, values: Sequence[Any], arrays: bytes) -> None:
        if plan.end > len(arrays):
            raise DamagedRecord("some of its small arrays are missing")
        self.plan = plan  # shared by all recipes of one form
        self._values = plan.share(values)
        self._arrays = arrays + bytes(-len(arrays) % ARRAY_ALIGNMENT)  # so that it can be viewed as any dtype
        self.nbytes = plan.own_bytes(self._values) + sys.getsizeof(self._arrays)  # besides the plan, estimated

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


def compile_tree(
    tree: Any,
    arrays: bytes | bytearray,
    names: Container[str],
    *,
    track_meta: bool = True,
    numpy: bool = False,
    root: str | None = None,
) -> Recipe:
    """Compiles a tree.

    Args:
        tree: as :func:`encode_item` returned it.
        arrays: the packed block of small arrays.
        names: of the tensors in the record.
        track_meta: False drops the attributes of MetaTensors and returns plain tensors.
        numpy: True returns what was a NumPy array as a writable one over the memory of its tensor, which must be on the
            CPU. False returns that tensor.
        root: the data root for text that was stored relative to one; absolute, without a trailing slash.

    Raises:
        DamagedRecord: the tree is not well-formed, names a tensor that is not there, or needs a root.
        NewerRecord: it holds a kind of node or field that this version does not know.

    Example:
        >>> import numpy as np
        >>> from monai_gds.items.encoding import encode_item
        >>> encoded = encode_item({"label": np.arange(3)})
        >>> compile_tree(encoded.tree, encoded.arrays, encoded.tensors, numpy=True)(encoded.tensors)
        {'label': array([0, 1, 2])}
    """
    parser = _TreeParser(names, track_meta, numpy, root)
    try:
        return Recipe(_plan(parser.form(tree)), parser.values, bytes(arrays))
    except RecordError:
        raise
    except Exception as e:
        raise DamagedRecord(f"its item tree cannot be read: {e!r}") from e


_Parse: TypeAlias = "Callable[[_TreeParser, Any], _TreeForm]"


class _TreeParser:
    """Splits a tree into its form, which :meth:`form` returns, and its immutable ``values``."""

    def __init__(self, names: Container[str], track_meta: bool, numpy: bool, root: str | None) -> None:
        self.values: list[Any] = []
        self._names = names
        self._track_meta = track_meta
        self._numpy = numpy
        self._root = root
        self._used: set[str] = set()  # names of tensors
        self._depth = 0

    def form(self, node: Any) -> _TreeForm:
        kind = type(node)
        if kind is dict:
            if len(node) == 1:
                tag = next(iter(node))
                read = _PARSERS.get(tag)
                if read is not None:
                    return read(self, node[tag])
            unknown = [key for key in node if key.startswith("$")]
            if unknown:
                raise NewerRecord(f"it holds a {unknown[0]!r}, which this version does not know")
            return "dict", tuple(node), self.forms(node.values())
        if kind is list:
            return self.container("$list", node)
        return self.value(node)

    def forms(self, nodes: Iterable[Any]) -> tuple[_TreeForm, ...]:
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:  # the innermost may be a slice
            raise DamagedRecord(f"its item tree is nested more than {MAX_DEPTH} deep")
        found = tuple([self.form(node) for node in nodes])
        self._depth -= 1
        return found

    def value(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def text(self, node: Any) -> str:
        """A string, possibly stored relative to the data root."""
        if type(node) is str:
            return node
        (rest,) = _fields(node, "a text", "$root")
        if type(rest) is not str:
            raise DamagedRecord(f"it holds {rest!r} in place of a path")
        if self._root is None:
            raise DamagedRecord(f"it holds a path below a data root ({rest!r}): give the root (root=)")
        return data_root.above(rest, self._root)

    def texts(self, payload: list[Any]) -> _TreeForm:
        order, width, shape, nodes = payload
        members = tuple([self.text(node) for node in nodes])
        if order not in ("<", ">") or math.prod(shape) != len(members):
            raise DamagedRecord(f"it holds an array of text with order {order!r} and shape {shape}")
        width = max(0 if width is None else width, 1, *map(len, members))
        if 4 * width * len(members) > limits.TEXTS_BYTES:
            raise DamagedRecord(f"it holds {len(members)} texts of {width} characters")
        return "texts", f"{order}U{width}", tuple(shape), self.value(members)

    def item(self, keys: list[Any]) -> _TreeForm:
        return "item", self.value(tuple([key if type(key) is int else self.text(key) for key in keys]))

    # Containers

    def container(self, tag: str, nodes: list[Any]) -> _TreeForm:
        """A container made from the list of its members. If all of them are values, they become one value."""
        start = len(self.values)
        forms = self.forms(nodes)
        if not {int}.issuperset(map(type, forms)):
            return tag, forms
        members = self.values[start:]
        del self.values[start:]
        if tag in _IMMUTABLE:
            return self.value(_CONTAINERS[tag](members))
        return "made of", tag, self.value(tuple(members))

    def pairs(self, pairs: list[list[Any]]) -> _TreeForm:
        keys = [key for key, _ in pairs]
        forms = self.forms([node for _, node in pairs])
        if {str}.issuperset(map(type, keys)):
            return "dict", tuple(keys), forms
        # As text, because 1, 1.0 and True are the same key. (json.dumps takes ten times as long.)
        return "pairs", repr(keys), self._root, forms

    def converted(self, tag: str, pairs: list[list[Any]]) -> _TreeForm:
        return "converted", tag, self.pairs(pairs)

    def default_dict(self, payload: list[Any]) -> _TreeForm:
        factory, pairs = payload
        if factory is not None:
            builtin_type(factory)
        return "defaultdict", factory, self.pairs(pairs)

    def deque(self, payload: list[Any]) -> _TreeForm:
        maxlen, nodes = payload
        return "deque", maxlen, self.container("$list", nodes)

    def named_tuple(self, payload: list[Any]) -> _TreeForm:
        module, qualname, fields, nodes = payload
        if len(fields) != len(nodes):
            raise DamagedRecord(f"it holds a {qualname} of {len(nodes)} members")
        named_tuple(module, qualname, tuple(fields))
        return "named tuple", module, qualname, tuple(fields), self.container("$list", nodes)

    def registered(self, payload: list[Any]) -> _TreeForm:
        name, node = payload
        codec_named(name)
        return "registered", name, *self.forms([node])

    def opaque(self, payload: Opaque) -> _TreeForm:
        if not isinstance(payload, Opaque):
            raise DamagedRecord("it holds a value that cannot come from a file")
        return self.value(payload.value)

    # Arrays and tensors

    def array(self, payload: list[Any]) -> _TreeForm:
        descr, shape, offset = payload
        return "array", descr if isinstance(descr, str) else json.dumps(descr), tuple(shape), offset

    def masked_array(self, payload: list[Any]) -> _TreeForm:
        *parts, hard = payload
        data, mask, fill = [None if part is None else self.array(part) for part in parts]
        return "masked array", data, mask, fill, bool(hard)

    def objects(self, payload: list[Any]) -> _TreeForm:
        shape, nodes = payload
        if math.prod(shape) != len(nodes) or min(shape, default=0) < 0:
            raise DamagedRecord(f"it holds {len(nodes)} objects in an array of shape {shape}")
        return "objects", tuple(shape), self.container("$list", nodes)

    def small_tensor(self, payload: list[Any]) -> _TreeForm:
        name, shape, offset, flags = payload
        (grad,) = _fields(flags, "$small_tensor", requires_grad=False) if flags else (False,)
        return "small tensor", name, tuple(shape), offset, bool(grad)

    def tensor(self, payload: dict[str, Any]) -> _TreeForm:
        name = payload["name"]
        is_complex = grad = False
        descr = None
        if len(payload) > 1:
            _, is_complex, grad, descr, _ = _fields(
                payload, "$tensor", "name", complex=False, requires_grad=False, numpy=None, tiles=None
            )
        if name not in self._names or name in self._used:
            raise DamagedRecord(f"its tensor {name!r} is missing, or used twice")
        self._used.add(name)
        if descr is not None and (descr not in NUMERIC or grad):
            raise DamagedRecord(f"its array {name!r} has the dtype {descr!r}, or a gradient")
        if descr is not None and self._numpy:
            return "numpy", name, bool(is_complex), descr
        return "tensor", name, bool(is_complex), bool(grad)

    def metatensor(self, payload: list[Any]) -> _TreeForm:
        data, attributes = payload
        if not self._track_meta:
            return self.form(data)
        return "metatensor", *self.forms([data]), self.pairs(attributes)


class TreePlan:
    """Puts items of one form together."""

    #: Estimated bytes of memory per node: a closure.
    _NODE_BYTES = 100

    def __init__(self, form: _TreeForm) -> None:
        self.end = 0  # how many bytes of small arrays an item of this form needs
        self.nbytes = 0  # estimated bytes of memory
        self._common: list[str | None] = []
        self._dtypes: dict[np.dtype[Any], int] = {}
        self._build = self._node(form)

    def build(self, tensors: Mapping[str, torch.Tensor], values: Sequence[Any], arrays: bytes, item: Any) -> Any:
        """Builds an item. Its small arrays are views of one fresh block of memory."""
        block = np.frombuffer(bytearray(arrays), np.uint8)
        return self._build(tensors, values, [*map(block.view, self._dtypes), item, block])

    def share(self, values: Sequence[Any]) -> Sequence[Any]:
        """The values of a record, with strings replaced by the equal ones of the first record."""
        if not self._common:
            self._common = [v if type(v) is str else None for v in values]
        pairs = zip(self._common, values, strict=True)
        return tuple([a if a is not None and type(b) is str and a == b else b for a, b in pairs])

    def own_bytes(self, values: Sequence[Any]) -> int:
        """Estimated bytes of memory that the values of one record take."""
        own = [b for a, b in zip(self._common, values, strict=True) if a is not b]
        return sys.getsizeof(values) + sum(map(_size, own))

    def _node(self, form: _TreeForm) -> _Build:
        self.nbytes += self._NODE_BYTES
        if isinstance(form, int):
            return lambda t, v, a: v[form]
        kind, *parts = form
        if kind in _CONTAINERS:
            return self._container(_CONTAINERS[kind], *parts)
        return _PLANS[kind](self, *parts)

    # Containers

    def _container(self, make: Callable[[Any], Any], forms: Sequence[_TreeForm]) -> _Build:
        builds = [self._node(form) for form in forms]
        return lambda t, v, a: make([build(t, v, a) for build in builds])

    def made_of(self, tag: str, index: int) -> _Build:
        make = _CONTAINERS[tag]
        return lambda t, v, a: make(v[index])

    def dict_(self, keys: Sequence[Any], forms: Sequence[_TreeForm]) -> _Build:
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
                others.append((key, self._node(form)))
        self.nbytes += self._NODE_BYTES * len(base)

        def build(t: Mapping[str, torch.Tensor], v: Sequence[Any], a: Sequence[Any]) -> dict[Any, Any]:
            out: dict[Any, Any] = base.copy()
            for key, index in values:
                out[key] = v[index]
            for key, view, where in arrays:
                out[key] = a[view][where]
            for key, other in others:
                out[key] = other(t, v, a)
            return out

        return build

    def pairs(self, keys: str, root: str | None, forms: Sequence[_TreeForm]) -> _Build:
        return self.dict_([_without_tensors(node, root) for node in ast.literal_eval(keys)], forms)

    def converted(self, tag: str, form: _TreeForm) -> _Build:
        make, inner = _CONVERTED[tag], self._node(form)
        return lambda t, v, a: make(inner(t, v, a))

    def default_dict(self, factory: str | None, form: _TreeForm) -> _Build:
        make, inner = None if factory is None else builtin_type(factory), self._node(form)
        return lambda t, v, a: collections.defaultdict(make, inner(t, v, a))

    def deque(self, maxlen: int | None, form: _TreeForm) -> _Build:
        inner = self._node(form)
        return lambda t, v, a: collections.deque(inner(t, v, a), maxlen)

    def named_tuple(self, module: str, qualname: str, fields: tuple[str, ...], form: _TreeForm) -> _Build:
        """Looks the class up for every item: plans outlive its redefinition in a notebook."""
        inner = self._node(form)
        return lambda t, v, a: tuple.__new__(named_tuple(module, qualname, fields), inner(t, v, a))

    def registered(self, name: str, form: _TreeForm) -> _Build:
        inner = self._node(form)
        return lambda t, v, a: codec_named(name).decode(inner(t, v, a))

    def item(self, path: int) -> _Build:
        return lambda t, v, a: value_at(a[-2], v[path])

    # Arrays and tensors

    def _take(self, dtype: np.dtype[Any] | torch.dtype, shape: Sequence[int], offset: int) -> int:
        """Checks shape and offset of a small array or tensor, notes where it ends, and returns its element count."""
        if len(shape) > MOST_AXES or not all(type(n) is int and n >= 0 for n in (*shape, offset)):
            raise DamagedRecord(f"it holds an array of shape {shape!r:.40} at {offset!r:.40}")
        count = math.prod(shape)
        self.end = max(self.end, offset + count * dtype.itemsize)
        return count

    def _place(self, form: _TreeForm) -> tuple[int, Any] | None:
        """The view and the index or slice that hold an array of at most one axis; None for any other form."""
        if isinstance(form, int) or form[0] != "array" or len(form[2]) > 1:
            return None
        _, descr, shape, offset = form
        dtype = _array_dtype(descr)
        if not self._take(dtype, shape, offset) or not dtype.itemsize or ARRAY_ALIGNMENT % dtype.itemsize:
            return None
        if offset % dtype.itemsize:
            return None
        first = offset // dtype.itemsize
        view = self._dtypes.setdefault(dtype, len(self._dtypes))
        return view, slice(first, first + shape[0]) if shape else (first, ...)

    def array(self, descr: str, shape: tuple[int, ...], offset: int) -> _Build:
        dtype = _array_dtype(descr)
        if not self._take(dtype, shape, offset) or not dtype.itemsize:
            return lambda t, v, a: np.ndarray(shape, dtype)
        return lambda t, v, a: np.ndarray(shape, dtype, a[-1], offset)

    def masked_array(self, data: _TreeForm, mask: _TreeForm | None, fill: _TreeForm | None, hard: bool) -> _Build:
        data_of = self._node(data)
        mask_of, fill_of = [None if form is None else self._node(form) for form in (mask, fill)]

        def build(t: Mapping[str, torch.Tensor], v: Sequence[Any], a: Sequence[Any]) -> Any:
            own, own_mask = data_of(t, v, a), np.ma.nomask if mask_of is None else mask_of(t, v, a)
            expected = own.shape, np.ma.make_mask_descr(own.dtype)
            if mask_of is not None and (own_mask.shape, own_mask.dtype) != expected:
                raise DamagedRecord("it holds a masked array whose mask does not match its data")
            out: Any = np.ma.MaskedArray(own, own_mask, hard_mask=hard, copy=False)
            out._fill_value = None if fill_of is None else fill_of(t, v, a)
            return out

        return build

    def texts(self, dtype: str, shape: tuple[int, ...], index: int) -> _Build:
        return lambda t, v, a: np.array(v[index], dtype).reshape(shape)

    def void(self, form: _TreeForm) -> _Build:
        array = self._node(form)
        return lambda t, v, a: array(t, v, a)[()]

    def objects(self, shape: tuple[int, ...], form: _TreeForm) -> _Build:
        inner = self._node(form)

        def build(t: Mapping[str, torch.Tensor], v: Sequence[Any], a: Sequence[Any]) -> Any:
            out = np.empty(math.prod(shape), dtype=object)
            for i, member in enumerate(inner(t, v, a)):  # out[:] = … would unpack lists
                out[i] = member
            return out.reshape(shape)

        return build

    def small_tensor(self, name: str, shape: tuple[int, ...], offset: int, grad: bool) -> _Build:
        dtype = torch_dtype(name, of_data=True)
        count = self._take(dtype, shape, offset)
        if offset % dtype.itemsize and ARRAY_ALIGNMENT % dtype.itemsize == 0:
            raise DamagedRecord(f"it holds a small tensor at {offset}, where {name} is not aligned")

        def build(t: Mapping[str, torch.Tensor], v: Sequence[Any], a: Sequence[Any]) -> torch.Tensor:
            if not count:
                return torch.empty(shape, dtype=dtype).requires_grad_(grad)
            out = torch.frombuffer(a[-1], dtype=dtype, count=count, offset=offset).view(shape)
            return out.requires_grad_() if grad else out

        return build

    def tensor(self, name: str, is_complex: bool, grad: bool) -> _Build:
        if not is_complex and not grad:
            return lambda t, v, a: t[name]

        def build(t: Mapping[str, torch.Tensor], v: Sequence[Any], a: Sequence[Any]) -> torch.Tensor:
            out = torch.view_as_complex(t[name]) if is_complex else t[name]
            return out.requires_grad_() if grad else out

        return build

    def numpy(self, name: str, is_complex: bool, descr: str) -> _Build:
        if not is_complex:
            return lambda t, v, a: t[name].numpy()
        return lambda t, v, a: torch.view_as_complex(t[name]).numpy()

    def metatensor(self, data: _TreeForm, attributes: _TreeForm) -> _Build:
        from monai.data import MetaTensor  # takes seconds, and packed images are records without any

        plain_of, attributes_of = self._node(data), self._node(attributes)

        def build(t: Mapping[str, torch.Tensor], v: Sequence[Any], a: Sequence[Any]) -> MetaTensor:
            # as_subclass and the stored attributes: the constructor costs twenty times as much, and would derive them.
            plain = plain_of(t, v, a)
            out = plain.detach().as_subclass(MetaTensor)
            if plain.requires_grad:
                out.requires_grad_()
            out.__dict__ = attributes_of(t, v, a)
            return out

        return build


@functools.lru_cache(maxsize=64)
def _plan(form: _TreeForm) -> TreePlan:
    return TreePlan(form)


def _without_tensors(node: Any, root: str | None = None) -> Any:
    """The value of a node that holds neither tensors nor arrays."""
    return compile_tree(node, b"", (), root=root)({})


def _fields(payload: dict[str, Any], of: str, *needed: str, **optional: Any) -> list[Any]:
    """The fields of a node in the order of the arguments; ``optional`` gives the defaults of missing ones.

    Raises NewerRecord if there is another field.
    """
    unknown = payload.keys() - {*needed, *optional}
    if unknown:
        raise NewerRecord(f"it holds {of} with {sorted(unknown)}, which this version does not know")
    return [*(payload[name] for name in needed), *(payload.get(name, default) for name, default in optional.items())]


def _size(value: Any) -> int:
    members = sum(map(_size, value)) if type(value) in (tuple, frozenset) else 0
    return sys.getsizeof(value) + members


def _as_descr(descr: Any) -> Any:
    """Restores the tuples in the description of a structured dtype: fields, each (name, type[, shape])."""
    if not isinstance(descr, list):
        return descr
    return [
        (tuple(name) if isinstance(name, list) else name, _as_descr(kind), *map(tuple, shape))
        for name, kind, *shape in descr
    ]


def _array_dtype(descr: str) -> np.dtype[Any]:
    """The dtype of an array in a form, where a structured dtype is described by JSON text."""
    dtype = np.lib.format.descr_to_dtype(_as_descr(json.loads(descr) if descr.startswith("[") else descr))
    if dtype.hasobject:
        raise DamagedRecord("it holds an array of pointers")
    return dtype


def _real(node: Any) -> float:
    return float(*_fields(node, "a number", "$float") if type(node) is dict else (node,))


def _np_scalar(descr: Any, data: str) -> Any:
    return np.frombuffer(base64.b64decode(data), np.lib.format.descr_to_dtype(_as_descr(descr)), 1)[0]


def _constant(decode: Callable[[_TreeParser, Any], Any]) -> _Parse:
    """Parses a tag that stands for an immutable value."""
    return lambda parser, payload: parser.value(decode(parser, payload))


def _coded(tag: str) -> _Parse:
    return lambda parser, payload: parser.value(codec_named(tag).decode(payload))


def _container(tag: str) -> _Parse:
    return lambda parser, payload: parser.container(tag, payload)


def _converted(tag: str) -> _Parse:
    return lambda parser, payload: parser.converted(tag, payload)


def _counter(pairs: dict[Any, Any]) -> collections.Counter[Any]:
    found: collections.Counter[Any] = collections.Counter()
    dict.update(found, pairs)  # Counter.update would add numbers
    return found


def _namespace(pairs: dict[Any, Any]) -> types.SimpleNamespace:
    return types.SimpleNamespace(**pairs)


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "$list": list,
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$size": torch.Size,
    "$slice": lambda members: slice(*members),
}
_IMMUTABLE = frozenset({"$tuple", "$frozenset", "$size", "$slice"})

#: Types made from a dict, by tag.
_CONVERTED: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "$ordered_dict": OrderedDict,
    "$counter": _counter,
    "$namespace": _namespace,
    "$proxy": types.MappingProxyType,
}

_PARSERS: dict[str, _Parse] = {
    **{tag: _coded(tag) for tag in TAGS},
    **{tag: _converted(tag) for tag in _CONVERTED},
    **{tag: _container(tag) for tag in _CONTAINERS if tag != "$list"},  # JSON has lists itself
    "$root": lambda parser, p: parser.value(parser.text({"$root": p})),
    "$item": lambda parser, p: parser.item(p),
    "$int": _constant(lambda parser, p: int(p, 16)),
    "$float": _constant(lambda parser, p: float(p)),
    "$complex": _constant(lambda parser, p: complex(*map(_real, p))),
    "$bytes": _constant(lambda parser, p: base64.b64decode(p)),
    "$bytearray": lambda parser, p: ("bytearray", parser.value(base64.b64decode(p))),
    "$enum": _constant(lambda parser, p: enum_member(*p)),
    "$path": _constant(lambda parser, p: pathlib.Path(parser.text(p))),
    "$type": _constant(lambda parser, p: builtin_type(p)),
    "$numpy_type": _constant(lambda parser, p: numpy_type(p)),
    "$scalar": _constant(lambda parser, p: _np_scalar(*p)),
    "$str": _constant(lambda parser, p: np.str_(parser.text(p))),
    "$numpy_bytes": _constant(lambda parser, p: np.bytes_(base64.b64decode(p))),
    "$void": lambda parser, p: ("void", parser.array(p)),
    "$dtype": _constant(lambda parser, p: np.lib.format.descr_to_dtype(_as_descr(p))),
    "$dict": _TreeParser.pairs,
    "$defaultdict": _TreeParser.default_dict,
    "$deque": _TreeParser.deque,
    "$namedtuple": _TreeParser.named_tuple,
    "$opaque": _TreeParser.opaque,
    "$registered": _TreeParser.registered,
    "$array": _TreeParser.array,
    "$masked_array": _TreeParser.masked_array,
    "$texts": _TreeParser.texts,
    "$objects": _TreeParser.objects,
    "$small_tensor": _TreeParser.small_tensor,
    "$tensor": _TreeParser.tensor,
    "$metatensor": _TreeParser.metatensor,
}

_PLANS: dict[str, Callable[..., _Build]] = {
    "dict": TreePlan.dict_,
    "pairs": TreePlan.pairs,
    "converted": TreePlan.converted,
    "defaultdict": TreePlan.default_dict,
    "deque": TreePlan.deque,
    "named tuple": TreePlan.named_tuple,
    "item": TreePlan.item,
    "made of": TreePlan.made_of,
    "bytearray": lambda plan, index: lambda t, v, a: bytearray(v[index]),
    "registered": TreePlan.registered,
    "array": TreePlan.array,
    "masked array": TreePlan.masked_array,
    "texts": TreePlan.texts,
    "void": TreePlan.void,
    "objects": TreePlan.objects,
    "small tensor": TreePlan.small_tensor,
    "tensor": TreePlan.tensor,
    "numpy": TreePlan.numpy,
    "metatensor": TreePlan.metatensor,
}
