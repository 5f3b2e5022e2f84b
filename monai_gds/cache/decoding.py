"""Puts items together: a tree is split into its form and its values, and a form is made into a plan once.

Used through :mod:`monai_gds.cache.tree`. A form is all of a tree but its values, and the same for every record of a
pipeline, so what has to be kept of a record is its values and small arrays, and a hit parses nothing.

A record that anyone can have written must not be able to do more than be refused: whatever is not as an encoder makes
it is a DamagedRecord, and what only a newer version can have written is a NewerRecord, which nobody may overwrite.
"""

from __future__ import annotations

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
from typing import Any, TypeAlias

import numpy as np
import torch
from monai.data import MetaTensor

from monai_gds.cache import rooted
from monai_gds.cache.codecs import (
    CODECS,
    MAX_DEPTH,
    NUMERIC,
    Codec,
    builtin_type,
    enum_member,
    named_tuple,
    numpy_type,
    registered_as,
    torch_dtype,
)
from monai_gds.cache.encoding import ARRAY_ALIGNMENT, Opaque
from monai_gds.cache.given import value_at
from monai_gds.errors import DamagedRecord, NewerRecord, RecordError

__all__ = ["Plan", "Recipe", "compile_tree", "tensor_of"]


def tensor_of(raw: torch.Tensor, dtype: torch.dtype, shape: list[int] | tuple[int, ...]) -> torch.Tensor:
    """A 1-D uint8 tensor seen as ``dtype`` and ``shape``, over the same memory."""
    flat = raw.view(dtype)
    return flat if len(shape) == 1 else flat.view(shape)


#: Nested tuples that begin with a word, see _PLANS and _CONTAINERS; a number stands for the value of that index.
_Form: TypeAlias = "int | tuple[Any, ...]"

#: Puts one node together from the tensors by name, the values, and a list of: the packed block of small arrays seen as
#: each of the plan's dtypes; the dataset's item; and the block as it is.
_Build: TypeAlias = "Callable[[Mapping[str, torch.Tensor], Sequence[Any], Sequence[Any]], Any]"


#: A container of an item may be two in its tree.
_MAX_DEPTH = 2 * MAX_DEPTH


class Recipe:
    """Puts an item together from its tensors by name, as often as it is called. Two items share nothing mutable.

    Attributes:
        plan: what all recipes of one form have in common.
        nbytes: bytes of memory that this recipe takes besides its plan, about.
    """

    __slots__ = ("_arrays", "_values", "nbytes", "plan")

    def __init__(self, plan: Plan, values: Sequence[Any], arrays: bytes) -> None:
        if plan.end > len(arrays):
            raise DamagedRecord("its small arrays are not all there")
        self.plan = plan
        self._values = plan.share(values)
        self._arrays = arrays + bytes(-len(arrays) % ARRAY_ALIGNMENT)  # so that it can be seen as any dtype
        self.nbytes = plan.own_bytes(self._values) + sys.getsizeof(self._arrays)

    def __call__(self, tensors: Mapping[str, torch.Tensor], item: Any = None) -> Any:
        """An item.

        Args:
            tensors: the record's, by name. What comes back uses their memory.
            item: the dataset's own, for values that are taken from it. They are copied deeply.

        Raises:
            DamagedRecord: what the record says cannot be done with these tensors or this item.
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
    """Turns a tree into something that puts the item together.

    Args:
        tree: as :func:`encode_item` gave it.
        arrays: the packed block of small arrays.
        names: of the tensors that there are.
        track_meta: False leaves out MetaTensors' attributes and gives plain tensors.
        numpy: what was a NumPy array is one again, writable, over the memory of its tensor, which must be the CPU's.
            False gives that tensor.
        root: what text that was stored relative to a data root is put below; absolute, without a slash at its end.

    Raises:
        DamagedRecord: the tree is not well-formed, names what is not there, or needs a root.
        NewerRecord: it holds a kind of node, or of field in one, that this version does not know.

    Example:
        >>> import numpy as np
        >>> encoded = encode_item({"label": np.arange(3)})
        >>> compile_tree(encoded.tree, encoded.arrays, encoded.tensors, numpy=True)(encoded.tensors)
        {'label': array([0, 1, 2])}
    """
    reader = _Reader(names, track_meta, numpy, root)
    try:
        return Recipe(_plan(reader.form(tree)), reader.values, bytes(arrays))
    except RecordError:
        raise
    except Exception as e:
        raise DamagedRecord(f"its item tree cannot be read: {e!r}") from e


_Read: TypeAlias = "Callable[[_Reader, Any], _Form]"


class _Reader:
    """Splits a tree into its form, which :meth:`form` gives, and its ``values``, which are immutable."""

    def __init__(self, names: Container[str], track_meta: bool, numpy: bool, root: str | None) -> None:
        self.values: list[Any] = []
        self._names = names
        self._track_meta = track_meta
        self._numpy = numpy
        self._root = root
        self._used: set[str] = set()  # names of tensors
        self._depth = 0

    def form(self, node: Any) -> _Form:
        kind = type(node)
        if kind is dict:
            if len(node) == 1:
                tag = next(iter(node))
                read = _READERS.get(tag)
                if read is not None:
                    return read(self, node[tag])
            return "object", tuple(node), self.forms(node.values())
        if kind is list:
            return self.container("$list", node)
        return self.value(node)

    def forms(self, nodes: Iterable[Any]) -> tuple[_Form, ...]:
        """Of what is in a container."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise DamagedRecord(f"its item tree is nested more than {_MAX_DEPTH} deep")
        found = tuple([self.form(node) for node in nodes])
        self._depth -= 1
        return found

    def value(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def text(self, node: Any) -> str:
        """A string, which may be stored relative to the data root."""
        if type(node) is str:
            return node
        (rest,) = _fields(node, "a text", "$root")
        if type(rest) is not str:
            raise DamagedRecord(f"it holds {rest!r} in place of a path")
        if self._root is None:
            raise DamagedRecord(f"it holds a path below a data root ({rest!r}): give the root (root=)")
        return rooted.above(rest, self._root)

    def texts(self, payload: list[Any]) -> _Form:
        order, width, shape, nodes = payload
        members = tuple([self.text(node) for node in nodes])
        if order not in ("<", ">") or math.prod(shape) != len(members):
            raise DamagedRecord(f"it holds an array of text with order {order!r} and shape {shape}")
        width = max(0 if width is None else width, 1, *map(len, members))
        return "texts", f"{order}U{width}", tuple(shape), self.value(members)

    def item(self, keys: list[Any]) -> _Form:
        return "item", self.value(tuple([key if type(key) is int else self.text(key) for key in keys]))

    # Containers

    def container(self, tag: str, nodes: list[Any]) -> _Form:
        """A container made from the list of its members. Where they are values only, they become one value."""
        start = len(self.values)
        forms = self.forms(nodes)
        if not {int}.issuperset(map(type, forms)):
            return tag, forms
        members = self.values[start:]
        del self.values[start:]
        if tag in _IMMUTABLE:
            return self.value(_CONTAINERS[tag](members))
        return "made of", tag, self.value(tuple(members))

    def pairs(self, pairs: list[list[Any]]) -> _Form:
        keys = [key for key, _ in pairs]
        forms = self.forms([node for _, node in pairs])
        if {str}.issuperset(map(type, keys)):
            return "dict", tuple(keys), forms
        # As text, because 1, 1.0 and True are the same key.
        return "pairs", json.dumps(keys), self._root, forms

    def converted(self, tag: str, pairs: list[list[Any]]) -> _Form:
        return "converted", tag, self.pairs(pairs)

    def default_dict(self, payload: list[Any]) -> _Form:
        factory, pairs = payload
        if factory is not None:
            builtin_type(factory)
        return "defaultdict", factory, self.pairs(pairs)

    def deque(self, payload: list[Any]) -> _Form:
        maxlen, nodes = payload
        return "deque", maxlen, self.container("$list", nodes)

    def named_tuple(self, payload: list[Any]) -> _Form:
        module, qualname, fields, nodes = payload
        if len(fields) != len(nodes):
            raise DamagedRecord(f"it holds a {qualname} of {len(nodes)} members")
        named_tuple(module, qualname, tuple(fields))
        return "named tuple", module, qualname, tuple(fields), self.container("$list", nodes)

    def registered(self, payload: list[Any]) -> _Form:
        name, node = payload
        registered_as(name)
        return "registered", name, *self.forms([node])

    def opaque(self, payload: Opaque) -> _Form:
        if not isinstance(payload, Opaque):
            raise DamagedRecord("it holds a value that cannot come from a file")
        return self.value(payload.value)

    # Arrays and tensors

    def array(self, payload: list[Any]) -> _Form:
        descr, shape, offset = payload
        return "array", descr if isinstance(descr, str) else json.dumps(descr), tuple(shape), offset

    def masked_array(self, payload: list[Any]) -> _Form:
        *parts, hard = payload
        data, mask, fill = [None if part is None else self.array(part) for part in parts]
        return "masked array", data, mask, fill, bool(hard)

    def objects(self, payload: list[Any]) -> _Form:
        shape, nodes = payload
        if math.prod(shape) != len(nodes) or min(shape, default=0) < 0:
            raise DamagedRecord(f"it holds {len(nodes)} objects in an array of shape {shape}")
        return "objects", tuple(shape), self.container("$list", nodes)

    def small_tensor(self, payload: list[Any]) -> _Form:
        name, shape, offset, flags = payload
        _fields(flags, "$small_tensor", requires_grad=False)
        return "small tensor", name, tuple(shape), offset, bool(flags.get("requires_grad"))

    def tensor(self, payload: dict[str, Any]) -> _Form:
        name, is_complex, grad, descr = _fields(
            payload, "$tensor", "name", complex=False, requires_grad=False, numpy=None
        )
        if name not in self._names or name in self._used:
            raise DamagedRecord(f"its tensor {name!r} is not there, or has two uses")
        self._used.add(name)
        if descr is not None and (descr not in NUMERIC or grad):
            raise DamagedRecord(f"its array {name!r} has the dtype {descr!r}, or a gradient")
        if descr is not None and self._numpy:
            return "numpy", name, bool(is_complex), descr
        return "tensor", name, bool(is_complex), bool(grad)

    def metatensor(self, payload: list[Any]) -> _Form:
        data, attributes = payload
        if not self._track_meta:
            return self.form(data)
        return "metatensor", *self.forms([data]), self.pairs(attributes)


class Plan:
    """Puts items of one form together.

    Attributes:
        end: bytes of the packed block of small arrays that such items have.
        nbytes: bytes of memory that the plan takes, about.
    """

    #: Bytes of memory that a node takes, about: a function with what it is about.
    _NODE_BYTES = 100

    def __init__(self, form: _Form) -> None:
        self.end = 0
        self.nbytes = 0
        self._common: list[str | None] = []
        self._dtypes: dict[np.dtype[Any], int] = {}
        self._build = self._node(form)

    def build(self, tensors: Mapping[str, torch.Tensor], values: Sequence[Any], arrays: bytes, item: Any) -> Any:
        """An item. Its small arrays lie in one block of memory, which is theirs alone."""
        block = np.frombuffer(bytearray(arrays), np.uint8)  # one memoryview, however many arrays there are
        return self._build(tensors, values, [*map(block.view, self._dtypes), item, block])

    def share(self, values: Sequence[Any]) -> Sequence[Any]:
        """The values of a record, with the strings of the first one in place of equal ones."""
        if not self._common:
            self._common = [v if type(v) is str else None for v in values]
        pairs = zip(self._common, values, strict=True)
        return tuple([a if a is not None and type(b) is str and a == b else b for a, b in pairs])

    def own_bytes(self, values: Sequence[Any]) -> int:
        """Bytes of memory that the values of one record take, about."""
        own = [b for a, b in zip(self._common, values, strict=True) if a is not b]
        return sys.getsizeof(values) + sum(map(_size, own))

    def _node(self, form: _Form) -> _Build:
        self.nbytes += self._NODE_BYTES
        if isinstance(form, int):
            return lambda t, v, a: v[form]
        kind, *parts = form
        if kind in _CONTAINERS:
            return self._container(_CONTAINERS[kind], *parts)
        return _PLANS[kind](self, *parts)

    # Containers

    def _container(self, make: Callable[[Any], Any], forms: Sequence[_Form]) -> _Build:
        builds = [self._node(form) for form in forms]
        return lambda t, v, a: make([build(t, v, a) for build in builds])

    def made_of(self, tag: str, index: int) -> _Build:
        make = _CONTAINERS[tag]
        return lambda t, v, a: make(v[index])

    def dict_(self, keys: Sequence[Any], forms: Sequence[_Form]) -> _Build:
        """Metadata are values and small arrays for the most part: these are put in without a call for each."""
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

    def object_(self, keys: Sequence[str], forms: Sequence[_Form]) -> _Build:
        unknown = [key for key in keys if key.startswith("$")]
        if unknown:
            raise NewerRecord(f"it holds a {unknown[0]!r}, which this version does not know")
        return self.dict_(keys, forms)

    def pairs(self, keys: str, root: str | None, forms: Sequence[_Form]) -> _Build:
        return self.dict_([_without_tensors(node, root) for node in json.loads(keys)], forms)

    def converted(self, tag: str, form: _Form) -> _Build:
        make, inner = _CONVERTED[tag], self._node(form)
        return lambda t, v, a: make(inner(t, v, a))

    def default_dict(self, factory: str | None, form: _Form) -> _Build:
        make, inner = None if factory is None else builtin_type(factory), self._node(form)
        return lambda t, v, a: collections.defaultdict(make, inner(t, v, a))

    def deque(self, maxlen: int | None, form: _Form) -> _Build:
        inner = self._node(form)
        return lambda t, v, a: collections.deque(inner(t, v, a), maxlen)

    def named_tuple(self, module: str, qualname: str, fields: tuple[str, ...], form: _Form) -> _Build:
        """The class is looked up for every item: a notebook may define it anew, which plans outlive."""
        inner = self._node(form)
        return lambda t, v, a: tuple.__new__(named_tuple(module, qualname, fields), inner(t, v, a))

    def registered(self, name: str, form: _Form) -> _Build:
        inner = self._node(form)
        return lambda t, v, a: registered_as(name).decode(inner(t, v, a))

    def item(self, path: int) -> _Build:
        return lambda t, v, a: value_at(a[-2], v[path])

    # Arrays and tensors

    def _take(self, dtype: np.dtype[Any] | torch.dtype, shape: Sequence[int], offset: int) -> int:
        """Checks what a small array or tensor says of itself, and notes where it ends; gives the number of elements."""
        if not all(type(n) is int and n >= 0 for n in (*shape, offset)):
            raise DamagedRecord(f"it holds an array of shape {shape} at {offset}")
        count = math.prod(shape)
        self.end = max(self.end, offset + count * dtype.itemsize)
        return count

    def _place(self, form: _Form) -> tuple[int, Any] | None:
        """Of an array with no more than one axis: which of the views it is in, and where."""
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

    def masked_array(self, data: _Form, mask: _Form | None, fill: _Form | None, hard: bool) -> _Build:
        data_of = self._node(data)
        mask_of, fill_of = [None if form is None else self._node(form) for form in (mask, fill)]

        def build(t: Mapping[str, torch.Tensor], v: Sequence[Any], a: Sequence[Any]) -> Any:
            own_mask = np.ma.nomask if mask_of is None else mask_of(t, v, a)
            out: Any = np.ma.MaskedArray(data_of(t, v, a), own_mask, hard_mask=hard, copy=False)
            out._fill_value = None if fill_of is None else fill_of(t, v, a)
            return out

        return build

    def texts(self, dtype: str, shape: tuple[int, ...], index: int) -> _Build:
        return lambda t, v, a: np.array(v[index], dtype).reshape(shape)

    def void(self, form: _Form) -> _Build:
        array = self._node(form)
        return lambda t, v, a: array(t, v, a)[()]

    def objects(self, shape: tuple[int, ...], form: _Form) -> _Build:
        inner = self._node(form)

        def build(t: Mapping[str, torch.Tensor], v: Sequence[Any], a: Sequence[Any]) -> Any:
            out = np.empty(math.prod(shape), dtype=object)
            for i, member in enumerate(inner(t, v, a)):  # out[:] = … would look into lists
                out[i] = member
            return out.reshape(shape)

        return build

    def small_tensor(self, name: str, shape: tuple[int, ...], offset: int, grad: bool) -> _Build:
        dtype = torch_dtype(name, of_data=True)
        count = self._take(dtype, shape, offset)
        if offset % dtype.itemsize and ARRAY_ALIGNMENT % dtype.itemsize == 0:
            raise DamagedRecord(f"it holds a small tensor at {offset}, which is no place for {name}")

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

    def metatensor(self, data: _Form, attributes: _Form) -> _Build:
        plain_of, attributes_of = self._node(data), self._node(attributes)

        def build(t: Mapping[str, torch.Tensor], v: Sequence[Any], a: Sequence[Any]) -> MetaTensor:
            # as_subclass and the attributes as they were: constructing one costs twenty times as much, and would
            # derive anew what the record holds.
            plain = plain_of(t, v, a)
            out = plain.detach().as_subclass(MetaTensor)
            if plain.requires_grad:
                out.requires_grad_()
            out.__dict__ = attributes_of(t, v, a)
            return out

        return build


@functools.lru_cache(maxsize=64)
def _plan(form: _Form) -> Plan:
    return Plan(form)


def _without_tensors(node: Any, root: str | None = None) -> Any:
    """What a node stands for that holds neither tensors nor arrays."""
    return compile_tree(node, b"", (), root=root)({})


def _fields(payload: dict[str, Any], of: str, *needed: str, **optional: Any) -> list[Any]:
    """The fields of a node, in the order of the arguments, those that may be missing with what then holds.

    Raises:
        NewerRecord: there is a field that none of the arguments names.
    """
    unknown = payload.keys() - {*needed, *optional}
    if unknown:
        raise NewerRecord(f"it holds {of} with {sorted(unknown)}, which this version does not know")
    return [*(payload[name] for name in needed), *(payload.get(name, default) for name, default in optional.items())]


def _size(value: Any) -> int:
    members = sum(map(_size, value)) if type(value) in (tuple, frozenset) else 0
    return sys.getsizeof(value) + members


def _as_descr(descr: Any) -> Any:
    """JSON turns the tuples of a structured dtype's description into lists: fields, each (name, type[, shape])."""
    if not isinstance(descr, list):
        return descr
    return [
        (tuple(name) if isinstance(name, list) else name, _as_descr(kind), *map(tuple, shape))
        for name, kind, *shape in descr
    ]


def _array_dtype(descr: str) -> np.dtype[Any]:
    """The dtype of an array in a form, where the description of a structured one is text."""
    dtype = np.lib.format.descr_to_dtype(_as_descr(json.loads(descr) if descr.startswith("[") else descr))
    if dtype.hasobject:
        raise DamagedRecord("it holds an array of pointers")
    return dtype


def _np_scalar(descr: Any, data: str) -> Any:
    return np.frombuffer(base64.b64decode(data), np.lib.format.descr_to_dtype(_as_descr(descr)), 1)[0]


def _constant(decode: Callable[[_Reader, Any], Any]) -> _Read:
    """Reader of a tag that stands for an immutable value."""
    return lambda reader, payload: reader.value(decode(reader, payload))


def _coded(codec: Codec) -> _Read:
    return lambda reader, payload: reader.value(codec.decode(payload))


def _converted(tag: str) -> _Read:
    return lambda reader, payload: reader.converted(tag, payload)


def _counter(pairs: dict[Any, Any]) -> collections.Counter[Any]:
    found: collections.Counter[Any] = collections.Counter()
    dict.update(found, pairs)  # its own way would add numbers
    return found


def _namespace(pairs: dict[Any, Any]) -> types.SimpleNamespace:
    return types.SimpleNamespace(**pairs)


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "$list": list,
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$size": torch.Size,
    "$ordered_dict": OrderedDict,
}
_IMMUTABLE = frozenset({"$tuple", "$frozenset", "$size"})

#: What is made of a dict, by the tag of its pairs.
_CONVERTED: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "$counter": _counter,
    "$namespace": _namespace,
    "$proxy": types.MappingProxyType,
}

_READERS: dict[str, _Read] = {
    **{codec.tag: _coded(codec) for codec in CODECS.values()},
    **{tag: _converted(tag) for tag in _CONVERTED},
    "$root": lambda r, p: r.value(r.text({"$root": p})),
    "$item": lambda r, p: r.item(p),
    "$int": _constant(lambda r, p: int(p, 16)),
    "$float": _constant(lambda r, p: float(p)),
    "$complex": _constant(lambda r, p: complex(*map(_without_tensors, p))),
    "$bytes": _constant(lambda r, p: base64.b64decode(p)),
    "$bytearray": lambda r, p: ("bytearray", r.value(base64.b64decode(p))),
    "$enum": _constant(lambda r, p: enum_member(*p)),
    "$path": _constant(lambda r, p: pathlib.Path(r.text(p))),
    "$type": _constant(lambda r, p: builtin_type(p)),
    "$numpy_type": _constant(lambda r, p: numpy_type(p)),
    "$scalar": _constant(lambda r, p: _np_scalar(*p)),
    "$str": _constant(lambda r, p: np.str_(r.text(p))),
    "$numpy_bytes": _constant(lambda r, p: np.bytes_(base64.b64decode(p))),
    "$void": lambda r, p: ("void", r.array(p)),
    "$dtype": _constant(lambda r, p: np.lib.format.descr_to_dtype(_as_descr(p))),
    "$slice": _constant(lambda r, p: slice(*map(_without_tensors, p))),
    "$tuple": lambda r, p: r.container("$tuple", p),
    "$set": lambda r, p: r.container("$set", p),
    "$frozenset": lambda r, p: r.container("$frozenset", p),
    "$size": lambda r, p: r.container("$size", p),
    "$ordered_dict": lambda r, p: r.container("$ordered_dict", [{"$tuple": pair} for pair in p]),
    "$dict": _Reader.pairs,
    "$defaultdict": _Reader.default_dict,
    "$deque": _Reader.deque,
    "$namedtuple": _Reader.named_tuple,
    "$opaque": _Reader.opaque,
    "$registered": _Reader.registered,
    "$array": _Reader.array,
    "$masked_array": _Reader.masked_array,
    "$texts": _Reader.texts,
    "$objects": _Reader.objects,
    "$small_tensor": _Reader.small_tensor,
    "$tensor": _Reader.tensor,
    "$metatensor": _Reader.metatensor,
}

_PLANS: dict[str, Callable[..., _Build]] = {
    "object": Plan.object_,
    "dict": Plan.dict_,
    "pairs": Plan.pairs,
    "converted": Plan.converted,
    "defaultdict": Plan.default_dict,
    "deque": Plan.deque,
    "named tuple": Plan.named_tuple,
    "item": Plan.item,
    "made of": Plan.made_of,
    "bytearray": lambda plan, index: lambda t, v, a: bytearray(v[index]),
    "registered": Plan.registered,
    "array": Plan.array,
    "masked array": Plan.masked_array,
    "texts": Plan.texts,
    "void": Plan.void,
    "objects": Plan.objects,
    "small tensor": Plan.small_tensor,
    "tensor": Plan.tensor,
    "numpy": Plan.numpy,
    "metatensor": Plan.metatensor,
}
