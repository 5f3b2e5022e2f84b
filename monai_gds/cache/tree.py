"""The item tree: an item taken apart into JSON and tensors, and put together again. Used by the record only.

What JSON has is itself: None, bools, strings, finite floats, lists, and dicts whose keys are plain strings. Everything
else is an object with one key that begins with ``$``, for example ``{"$tuple": [1, 2]}``. Large data stay outside the
JSON in two places:

* a **tensor** of the item (a torch tensor, a MetaTensor's data, or a numeric array, which comes back as a tensor) is a
  named entry of the record and goes to the target device: ``{"$tensor": {"name": "image"}}``;
* a **small array** (what MetaTensor's meta and applied operations hold, and arrays that torch cannot) keeps its type,
  stays on the CPU and lies in one packed block of bytes: ``{"$array": ["<f4", [4], 128]}``, the last number its offset.

Reading a tree never imports or calls what a record names: types come from the fixed table here, from MONAI's enums, and
from :func:`register_type`.
"""

from __future__ import annotations

import ast
import base64
import bisect
import enum
import functools
import importlib
import math
import pathlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from monai.data import MetaTensor

from monai_gds.cache.dtypes import DTYPE_NAMES
from monai_gds.errors import DamagedRecord, UnsupportedType

__all__ = [
    "EncodedItem",
    "Plan",
    "Recipe",
    "compile_tree",
    "encode_item",
    "register_type",
    "tensor_bytes",
    "tensor_of",
]

#: Small arrays begin at a multiple of their element size in the packed block if it divides this, else at one of this.
ARRAY_ALIGNMENT = 16

_BUILTIN_TYPES: dict[str, type] = {t.__name__: t for t in (bool, int, float, complex, str, bytes)}

_STORED_AS_REAL = (torch.complex128, torch.complex32)

#: Bytes by which a storage may be larger than the tensor that it is kept for.
_SLACK = 4096

#: NumPy kinds that torch can hold: bool, integers, floats, complex.
_NUMERIC_KINDS = "biufc"


@dataclass(slots=True)
class EncodedItem:
    """An item taken apart.

    Attributes:
        tree: JSON-able.
        tensors: the item's tensors by name, contiguous, detached, each the only user of its storage; on the devices
            where they were.
        arrays: the packed block of small arrays.
    """

    tree: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    arrays: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class _Registered:
    name: str
    cls: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_class: dict[type, _Registered] = {}
_by_name: dict[str, _Registered] = {}


def register_type(cls: type, name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Teaches records a type of yours. Call it at import time, in every process that reads or writes such items.

    Args:
        cls: the class; instances of subclasses are not meant.
        name: what the record calls it. Change it when the meaning of the encoded value changes.
        encode: gives a value made of what records can already hold (dicts, lists, strings, arrays, tensors…).
        decode: makes the instance from that value.

    Raises:
        ValueError: the name is taken by another class.

    Example:
        >>> from fractions import Fraction
        >>> register_type(Fraction, "fraction", lambda f: [f.numerator, f.denominator], lambda v: Fraction(*v))
        >>> encode_item({"spacing": Fraction(1, 3)}).tensors  # no error, and nothing that needs a tensor
        {}
    """
    if name in _by_name and _by_name[name].cls is not cls:
        raise ValueError(f"the name {name!r} is registered for {_by_name[name].cls.__qualname__} already")
    entry = _Registered(name, cls, encode, decode)
    _by_class[cls], _by_name[name] = entry, entry


@dataclass(frozen=True, slots=True)
class _Opaque:
    """A value that only passes through memory."""

    value: Any


# ---------------------------------------------------------------------------------------------------------------------
# Taking apart


def encode_item(item: Any, *, strict: bool = True) -> EncodedItem:
    """Takes an item apart.

    Args:
        item: dicts, lists, tuples, sets, scalars, strings, bytes, None, NumPy scalars, dtypes and arrays, torch
            tensors and dtypes, MetaTensors, paths, MONAI's enums, registered types, nested as you like.
        strict: False lets anything else pass as it is, for an item that is put together again in memory and never
            written.

    Raises:
        UnsupportedType: the item holds something else; the message names its key path and type, and the way out.
    """
    encoder = _Encoder(strict)
    encoder.out.tree = encoder.node(item, ())
    return encoder.out


class _Encoder:
    def __init__(self, strict: bool) -> None:
        self.out = EncodedItem()
        self._strict = strict
        self._memory: list[tuple[int, int]] = []  # sorted address ranges of self.out.tensors
        self._open: set[int] = set()
        self._on_host = 0  # > 0 inside a MetaTensor's attributes, where arrays keep their type and place

    def node(self, value: Any, path: tuple[Any, ...]) -> Any:
        try:
            return self._node(value, path)
        except UnsupportedType:
            if self._strict:
                raise
            return {"$opaque": _Opaque(value)}

    def _node(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        encode = _ENCODERS.get(kind)
        if encode is not None:
            return encode(self, value, path)
        if kind in _by_class:
            entry = _by_class[kind]
            return {
                "$registered": [entry.name, self._inside(value, path, lambda: self.node(entry.encode(value), path))]
            }
        for base, encode in _ENCODERS_BY_BASE:
            if isinstance(value, base):
                return encode(self, value, path)
        raise UnsupportedType(_unsupported(value, path))

    # Scalars

    def integer(self, value: int, path: tuple[Any, ...]) -> Any:
        return value if -(2**63) <= value < 2**64 else {"$int": hex(value)}

    def real(self, value: float, path: tuple[Any, ...]) -> Any:
        return value if math.isfinite(value) else {"$float": repr(value)}

    def complex_number(self, value: complex, path: tuple[Any, ...]) -> Any:
        return {"$complex": [self.real(value.real, path), self.real(value.imag, path)]}

    def raw(self, value: bytes | bytearray, path: tuple[Any, ...]) -> Any:
        return {"$bytes" if type(value) is bytes else "$bytearray": base64.b64encode(value).decode()}

    def enum_member(self, value: enum.Enum, path: tuple[Any, ...]) -> Any:
        cls = type(value)
        if _monai_enum(cls.__qualname__) is not cls:
            raise UnsupportedType(_unsupported(value, path))
        return {"$enum": [cls.__qualname__, value.name]}

    def file_path(self, value: pathlib.PurePath, path: tuple[Any, ...]) -> Any:
        if type(value) is not type(pathlib.Path()):
            raise UnsupportedType(_unsupported(value, path))
        return {"$path": str(value)}

    def class_(self, value: type, path: tuple[Any, ...]) -> Any:
        if _BUILTIN_TYPES.get(value.__name__) is value:
            return {"$type": value.__name__}
        if getattr(np, value.__name__, None) is value and issubclass(value, np.generic):
            return {"$numpy_type": value.__name__}
        raise UnsupportedType(_unsupported(value, path))

    def scalar(self, value: np.generic, path: tuple[Any, ...]) -> Any:
        if isinstance(value, np.str_):  # by value: NumPy drops trailing zeros of the fixed-size form
            return {"$str": str(value)}
        if isinstance(value, np.bytes_):
            return {"$numpy_bytes": base64.b64encode(value).decode()}
        if isinstance(value, np.void):  # mutable, when it has fields
            return {"$void": self._array(np.asarray(value), path)}
        return {"$scalar": [_describe(value.dtype, value, path), base64.b64encode(value.tobytes()).decode()]}

    # Containers

    def sequence(self, value: list[Any], path: tuple[Any, ...]) -> Any:
        return self._inside(value, path, lambda: [self.node(v, (*path, i)) for i, v in enumerate(value)])

    def mapping(self, value: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        plain = type(value) is dict and all(type(k) is str and not k.startswith("$") for k in value)
        if plain:
            return self._inside(value, path, lambda: {k: self.node(v, (*path, k)) for k, v in value.items()})
        tag = "$dict" if type(value) is dict else "$ordered_dict"
        return {tag: self._inside(value, path, lambda: [self._pair(k, v, path) for k, v in value.items()])}

    def _pair(self, key: Any, value: Any, path: tuple[Any, ...]) -> list[Any]:
        before = len(self.out.tensors), len(self.out.arrays)
        node = self.node(key, (*path, key))
        if (len(self.out.tensors), len(self.out.arrays)) != before:
            raise UnsupportedType(_unsupported(key, path, "is used as a key and holds a tensor"))
        return [node, self.node(value, (*path, key))]

    def metatensor(self, value: MetaTensor, path: tuple[Any, ...]) -> Any:
        data = self.tensor(value.as_subclass(torch.Tensor), path)
        self._on_host += 1
        try:
            attributes = self._inside(value, path, lambda: [self._pair(k, v, path) for k, v in vars(value).items()])
        finally:
            self._on_host -= 1
        return {"$metatensor": [data, attributes]}

    def _inside(self, container: Any, path: tuple[Any, ...], work: Callable[[], Any]) -> Any:
        if id(container) in self._open:
            raise UnsupportedType(_unsupported(container, path, "contains itself"))
        self._open.add(id(container))
        try:
            return work()
        finally:
            self._open.discard(id(container))

    # Arrays and tensors

    def array(self, value: np.ndarray, path: tuple[Any, ...]) -> Any:
        if value.dtype == object:
            flat = self._inside(value, path, lambda: [self.node(v, (*path, i)) for i, v in enumerate(value.flat)])
            return {"$objects": [list(value.shape), flat]}
        tensor = None if self._on_host else _as_tensor(value)
        return {"$array": self._array(value, path)} if tensor is None else self.tensor(tensor, path)

    def _array(self, value: np.ndarray, path: tuple[Any, ...]) -> list[Any]:
        offset = self._pack(value.tobytes(), value.dtype.itemsize)
        return [_describe(value.dtype, value, path), list(value.shape), offset]

    def tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> Any:
        if value.layout != torch.strided or value.is_nested or value.is_quantized or value.device.type == "meta":
            raise UnsupportedType(_unsupported(value, path, f"has layout {value.layout}, device {value.device}"))
        flags = {"requires_grad": True} if value.requires_grad else {}
        value = value.detach().resolve_conj().resolve_neg()
        if self._on_host:
            data = bytes(tensor_bytes(value.cpu().contiguous()).numpy().data)
            offset = self._pack(data, value.element_size())
            return {"$small_tensor": [_dtype_name(value.dtype), list(value.shape), offset, flags]}
        if value.dtype in _STORED_AS_REAL:  # safetensors has no such dtype: a last axis of (real, imaginary) instead
            value, flags = torch.view_as_real(value), {"complex": True, **flags}
        if value.dtype not in DTYPE_NAMES:
            raise UnsupportedType(
                _unsupported(value, path, f"has dtype {value.dtype}, which safetensors does not know")
            )
        name = self._name(path)
        self.out.tensors[name] = self._own(value)
        return {"$tensor": {"name": name, **flags}}

    def _own(self, value: torch.Tensor) -> torch.Tensor:
        """Contiguous, and the only user of a storage that is hardly larger than itself."""
        value = value.contiguous()
        if not value.nbytes:
            return value
        if value.untyped_storage().nbytes() > value.nbytes + _SLACK or not self._claim(value.untyped_storage()):
            value = value.clone()
            self._claim(value.untyped_storage())
        return value

    def _claim(self, storage: torch.UntypedStorage) -> bool:
        """Notes the memory of a storage; False when another tensor of the item uses some of it."""
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        i = bisect.bisect(self._memory, (start, end))
        if (i and self._memory[i - 1][1] > start) or (i < len(self._memory) and self._memory[i][0] < end):
            return False
        self._memory.insert(i, (start, end))
        return True

    def _name(self, path: tuple[Any, ...]) -> str:
        base = ".".join(str(key) for key in path) or "item"
        base = base.encode("utf-8", "backslashreplace").decode()  # safetensors refuses lone surrogates
        if base.startswith("__"):  # reserved for the record
            base = "." + base
        name, n = base, 1
        while name in self.out.tensors:
            n += 1
            name = f"{base}#{n}"
        return name

    def _pack(self, data: bytes, itemsize: int) -> int:
        block = self.out.arrays
        alignment = itemsize if itemsize and ARRAY_ALIGNMENT % itemsize == 0 else ARRAY_ALIGNMENT
        block.extend(bytes(-len(block) % alignment))
        offset = len(block)
        block.extend(data)
        return offset


def _tagged(tag: str) -> Callable[[_Encoder, Any, tuple[Any, ...]], Any]:
    """Encoder of a container that is a tag around a list."""

    def encode(encoder: _Encoder, value: Any, path: tuple[Any, ...]) -> Any:
        return {tag: encoder.sequence(list(value), path)}

    return encode


_ENCODERS: dict[type, Callable[[_Encoder, Any, tuple[Any, ...]], Any]] = {
    int: _Encoder.integer,
    float: _Encoder.real,
    complex: _Encoder.complex_number,
    bytes: _Encoder.raw,
    bytearray: _Encoder.raw,
    list: _Encoder.sequence,
    tuple: _tagged("$tuple"),
    set: _tagged("$set"),
    frozenset: _tagged("$frozenset"),
    torch.Size: _tagged("$size"),
    dict: _Encoder.mapping,
    OrderedDict: _Encoder.mapping,
    np.ndarray: _Encoder.array,
    np.memmap: _Encoder.array,
    torch.Tensor: _Encoder.tensor,
    MetaTensor: _Encoder.metatensor,
    type: _Encoder.class_,
    slice: lambda e, v, p: {"$slice": [e.node(x, p) for x in (v.start, v.stop, v.step)]},
    range: lambda e, v, p: {"$range": [v.start, v.stop, v.step]},
    torch.dtype: lambda e, v, p: {"$torch_dtype": _dtype_name(v)},
    torch.device: lambda e, v, p: {"$device": str(v)},
}

_ENCODERS_BY_BASE: list[tuple[type, Callable[[_Encoder, Any, tuple[Any, ...]], Any]]] = [
    (enum.Enum, _Encoder.enum_member),
    (np.generic, _Encoder.scalar),
    (np.dtype, lambda e, v, p: {"$dtype": _describe(v, v, p)}),
    (pathlib.PurePath, _Encoder.file_path),
]


def _unsupported(value: Any, path: tuple[Any, ...], what: str = "cannot be stored in a record") -> str:
    where = "item" + "".join(f"[{key!r}]" for key in path)
    cls = type(value)
    return (
        f"{where} is a {cls.__module__}.{cls.__qualname__}, which {what}; delete it before the first random "
        f"transform (DeleteItemsd), turn it into plain data, or teach records the type with monai_gds.register_type"
    )


def _as_tensor(value: np.ndarray) -> torch.Tensor | None:
    """The array as a tensor, or None where torch has no such dtype."""
    if value.dtype.kind not in _NUMERIC_KINDS or value.dtype.itemsize > (16 if value.dtype.kind == "c" else 8):
        return None
    native = np.asarray(value, value.dtype.newbyteorder("="))
    owner = native
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    # A view of a larger array would keep all of it; whose memory it is otherwise (a mapping, a tensor) is not known.
    if owner.base is not None or owner.nbytes > native.nbytes + _SLACK or not native.flags.writeable:
        native = native.copy()
    return torch.from_numpy(np.ascontiguousarray(native).reshape(value.shape))


def _describe(dtype: np.dtype[Any], value: Any, path: tuple[Any, ...]) -> Any:
    """A NumPy dtype as JSON, as in .npy files."""
    try:
        descr = np.lib.format.dtype_to_descr(dtype)
        if not dtype.hasobject and np.lib.format.descr_to_dtype(descr) == dtype:
            return descr
    except ValueError:  # fields that overlap
        pass
    raise UnsupportedType(_unsupported(value, path, f"has the dtype {dtype}, which cannot be stored in a record"))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _monai_enum(name: str) -> type[enum.Enum] | None:
    """MONAI's enum of that name, or None: the whole list of enums that a record may name."""
    found = getattr(importlib.import_module("monai.utils.enums"), name, None)
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a 1-D uint8 tensor over the same memory."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.reshape(-1).view(torch.uint8)


def tensor_of(raw: torch.Tensor, dtype: torch.dtype, shape: list[int] | tuple[int, ...]) -> torch.Tensor:
    """A 1-D uint8 tensor seen as ``dtype`` and ``shape``, over the same memory."""
    flat = raw.view(dtype)
    return flat if len(shape) == 1 else flat.view(shape)


# ---------------------------------------------------------------------------------------------------------------------
# Putting together
#
# A record's tree is split into its values, a flat list, and its form: all the rest, which is the same for every record
# of a pipeline. A form is made into a plan, once for all of these records. So what has to be kept of a record is its
# values and small arrays, and a hit parses nothing.

#: Nested tuples that begin with a word, see _PLANS and _CONTAINERS; a number stands for the value of that index.
_Form: TypeAlias = "int | tuple[Any, ...]"

#: Puts one node together from the tensors by name, the values, and the packed block of small arrays: seen as each of
#: the plan's dtypes, and at the end as it is.
_Build: TypeAlias = "Callable[[Mapping[str, torch.Tensor], Sequence[Any], Sequence[Any]], Any]"


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

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        return self.plan.build(tensors, self._values, self._arrays)


def compile_tree(tree: Any, arrays: bytes | bytearray, names: Container[str], *, track_meta: bool = True) -> Recipe:
    """Turns a tree into something that puts the item together.

    Args:
        tree: as :func:`encode_item` gave it.
        arrays: the packed block of small arrays.
        names: of the tensors that there are.
        track_meta: False leaves out MetaTensors' attributes and gives plain tensors.

    Raises:
        DamagedRecord: the tree names something unknown or is not well-formed.
    """
    reader = _Reader(names, track_meta)
    try:
        return Recipe(_plan(reader.form(tree)), reader.values, bytes(arrays))
    except DamagedRecord:
        raise
    except Exception as e:
        raise DamagedRecord(f"its item tree cannot be read: {e!r}") from e


class _Reader:
    """Splits a tree into its form, which :meth:`form` gives, and its ``values``, which are immutable."""

    def __init__(self, names: Container[str], track_meta: bool) -> None:
        self.values: list[Any] = []
        self._names = names
        self._track_meta = track_meta

    def form(self, node: Any) -> _Form:
        kind = type(node)
        if kind is dict:
            if len(node) == 1:
                tag = next(iter(node))
                read = _READERS.get(tag)
                if read is not None:
                    return read(self, node[tag])
                if tag.startswith("$"):
                    raise DamagedRecord(f"its item tree holds {tag}, which this version does not know")
            return "dict", tuple(node), tuple([self.form(v) for v in node.values()])
        if kind is list:
            return self.container("$list", node)
        return self.value(node)

    def value(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    # Containers

    def container(self, tag: str, nodes: list[Any]) -> _Form:
        """A container made from the list of its members. Where they are values only, they become one value."""
        start = len(self.values)
        forms = tuple([self.form(node) for node in nodes])
        if not {int}.issuperset(map(type, forms)):
            return tag, forms
        members = self.values[start:]
        del self.values[start:]
        if tag in _IMMUTABLE:
            return self.value(_CONTAINERS[tag](members))
        return "made of", tag, self.value(tuple(members))

    def pairs(self, pairs: list[list[Any]]) -> _Form:
        keys = [key for key, _ in pairs]
        forms = tuple([self.form(node) for _, node in pairs])
        if {str}.issuperset(map(type, keys)):
            return "dict", tuple(keys), forms
        return "pairs", repr(keys), forms  # as text, because 1, 1.0 and True are the same key

    def registered(self, payload: list[Any]) -> _Form:
        name, node = payload
        if name not in _by_name:
            raise DamagedRecord(f"it holds a {name!r}, which nobody registered here with monai_gds.register_type")
        return "registered", name, self.form(node)

    def opaque(self, payload: _Opaque) -> _Form:
        if not isinstance(payload, _Opaque):
            raise DamagedRecord("it holds a value that cannot come from a file")
        return self.value(payload.value)

    # Arrays and tensors

    def array(self, payload: list[Any]) -> _Form:
        descr, shape, offset = payload
        return "array", descr if isinstance(descr, str) else repr(descr), tuple(shape), offset

    def objects(self, payload: list[Any]) -> _Form:
        shape, nodes = payload
        return "objects", tuple(shape), self.container("$list", nodes)

    def small_tensor(self, payload: list[Any]) -> _Form:
        name, shape, offset, flags = payload
        return "small tensor", name, tuple(shape), offset, bool(flags.get("requires_grad"))

    def tensor(self, payload: dict[str, Any]) -> _Form:
        name = payload["name"]
        unknown = payload.keys() - {"name", "complex", "requires_grad"}
        if unknown or name not in self._names:
            raise DamagedRecord(f"its tensor {name!r} is not there, or stored in an unknown way: {sorted(unknown)}")
        return "tensor", name, bool(payload.get("complex")), bool(payload.get("requires_grad"))

    def metatensor(self, payload: list[Any]) -> _Form:
        data, attributes = payload
        if not self._track_meta:
            return self.form(data)
        return "metatensor", self.form(data), self.pairs(attributes)


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

    def build(self, tensors: Mapping[str, torch.Tensor], values: Sequence[Any], arrays: bytes) -> Any:
        """An item. Its small arrays lie in one block of memory, which is theirs alone."""
        block = np.frombuffer(bytearray(arrays), np.uint8)  # one memoryview, however many arrays there are
        return self._build(tensors, values, [*map(block.view, self._dtypes), block])

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

    def pairs(self, keys: str, forms: Sequence[_Form]) -> _Build:
        return self.dict_([_without_tensors(node) for node in ast.literal_eval(keys)], forms)

    def registered(self, name: str, form: _Form) -> _Build:
        inner = self._node(form)
        return lambda t, v, a: _by_name[name].decode(inner(t, v, a))

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
        dtype = _torch_dtype(name)
        count = self._take(dtype, shape, offset)

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


def _without_tensors(node: Any) -> Any:
    """What a node stands for that holds neither tensors nor arrays."""
    return compile_tree(node, b"", ())({})


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
    dtype = np.lib.format.descr_to_dtype(_as_descr(ast.literal_eval(descr) if descr.startswith("[") else descr))
    if dtype.hasobject:
        raise DamagedRecord("it holds an array of pointers")
    return dtype


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedRecord(f"it holds the dtype {name!r}, which this torch does not know")
    return dtype


def _numpy_type(name: str) -> type:
    found = getattr(np, name, None)
    if not (isinstance(found, type) and issubclass(found, np.generic)):
        raise DamagedRecord(f"it holds the NumPy type {name!r}, which this NumPy does not know")
    return found


@functools.lru_cache(maxsize=256)
def _enum_member(cls: str, member: str) -> enum.Enum:
    found = _monai_enum(cls)
    if found is None or member not in found.__members__:
        raise DamagedRecord(f"it holds {cls}.{member}, which this MONAI does not know")
    return found[member]


def _np_scalar(descr: Any, data: str) -> Any:
    return np.frombuffer(base64.b64decode(data), np.lib.format.descr_to_dtype(_as_descr(descr)), 1)[0]


def _constant(decode: Callable[[_Reader, Any], Any]) -> Callable[[_Reader, Any], _Form]:
    """Reader of a tag that stands for an immutable value."""
    return lambda reader, payload: reader.value(decode(reader, payload))


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "$list": list,
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$size": torch.Size,
    "$ordered_dict": OrderedDict,
}
_IMMUTABLE = frozenset({"$tuple", "$frozenset", "$size"})

_READERS: dict[str, Callable[[_Reader, Any], _Form]] = {
    "$int": _constant(lambda r, p: int(p, 16)),
    "$float": _constant(lambda r, p: float(p)),
    "$complex": _constant(lambda r, p: complex(*map(_without_tensors, p))),
    "$bytes": _constant(lambda r, p: base64.b64decode(p)),
    "$bytearray": lambda r, p: ("bytearray", r.value(base64.b64decode(p))),
    "$enum": _constant(lambda r, p: _enum_member(*p)),
    "$path": _constant(lambda r, p: pathlib.Path(p)),
    "$type": _constant(lambda r, p: _BUILTIN_TYPES[p]),
    "$numpy_type": _constant(lambda r, p: _numpy_type(p)),
    "$scalar": _constant(lambda r, p: _np_scalar(*p)),
    "$str": _constant(lambda r, p: np.str_(p)),
    "$numpy_bytes": _constant(lambda r, p: np.bytes_(base64.b64decode(p))),
    "$void": lambda r, p: ("void", r.array(p)),
    "$dtype": _constant(lambda r, p: np.lib.format.descr_to_dtype(_as_descr(p))),
    "$torch_dtype": _constant(lambda r, p: _torch_dtype(p)),
    "$device": _constant(lambda r, p: torch.device(p)),
    "$slice": _constant(lambda r, p: slice(*map(_without_tensors, p))),
    "$range": _constant(lambda r, p: range(*p)),
    "$tuple": lambda r, p: r.container("$tuple", p),
    "$set": lambda r, p: r.container("$set", p),
    "$frozenset": lambda r, p: r.container("$frozenset", p),
    "$size": lambda r, p: r.container("$size", p),
    "$ordered_dict": lambda r, p: r.container("$ordered_dict", [{"$tuple": pair} for pair in p]),
    "$dict": _Reader.pairs,
    "$opaque": _Reader.opaque,
    "$registered": _Reader.registered,
    "$array": _Reader.array,
    "$objects": _Reader.objects,
    "$small_tensor": _Reader.small_tensor,
    "$tensor": _Reader.tensor,
    "$metatensor": _Reader.metatensor,
}

_PLANS: dict[str, Callable[..., _Build]] = {
    "dict": Plan.dict_,
    "pairs": Plan.pairs,
    "made of": Plan.made_of,
    "bytearray": lambda plan, index: lambda t, v, a: bytearray(v[index]),
    "registered": Plan.registered,
    "array": Plan.array,
    "void": Plan.void,
    "objects": Plan.objects,
    "small tensor": Plan.small_tensor,
    "tensor": Plan.tensor,
    "metatensor": Plan.metatensor,
}
