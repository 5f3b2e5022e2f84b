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

import base64
import bisect
import enum
import importlib
import math
import pathlib
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from monai.data import MetaTensor

from monai_gds.cache.dtypes import DTYPE_NAMES
from monai_gds.errors import DamagedRecord, UnsupportedType

__all__ = [
    "Builder",
    "EncodedItem",
    "compile_tree",
    "encode_item",
    "register_type",
    "tensor_bytes",
    "tensor_of",
]

#: Puts one node together from the record's tensors by name. Calling it twice shares nothing mutable.
Builder: TypeAlias = Callable[[Mapping[str, torch.Tensor]], Any]

#: Small arrays begin at multiples of this many bytes in the packed block.
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
        return [_describe(value.dtype, value, path), list(value.shape), self._pack(value.tobytes())]

    def tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> Any:
        if value.layout != torch.strided or value.is_nested or value.is_quantized or value.device.type == "meta":
            raise UnsupportedType(_unsupported(value, path, f"has layout {value.layout}, device {value.device}"))
        flags = {"requires_grad": True} if value.requires_grad else {}
        value = value.detach().resolve_conj().resolve_neg()
        if self._on_host:
            data = bytes(tensor_bytes(value.cpu().contiguous()).numpy().data)
            return {"$small_tensor": [_dtype_name(value.dtype), list(value.shape), self._pack(data), flags]}
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

    def _pack(self, data: bytes) -> int:
        block = self.out.arrays
        block.extend(bytes(-len(block) % ARRAY_ALIGNMENT))
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
    return raw.view(dtype).view(shape)


# ---------------------------------------------------------------------------------------------------------------------
# Putting together


class _Constant:
    """A builder whose result is immutable, so that containers can hold it ready-made."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        return self.value


def compile_tree(tree: Any, arrays: bytes | bytearray, names: Container[str], *, track_meta: bool = True) -> Builder:
    """Turns a tree into a function that puts the item together, as often as it is called.

    Parsing is done here, once; a call only copies what is mutable. Nothing is shared between the items that two calls
    give: inverting a transform changes ``applied_operations`` in place.

    Args:
        tree: as :func:`encode_item` gave it.
        arrays: the packed block of small arrays.
        names: of the tensors that there are.
        track_meta: False leaves out MetaTensors' attributes and gives plain tensors.

    Raises:
        DamagedRecord: the tree names something unknown or is not well-formed.
    """
    try:
        return _Compiler(bytes(arrays), names, track_meta).node(tree)
    except DamagedRecord:
        raise
    except Exception as e:
        raise DamagedRecord(f"its item tree cannot be read: {e!r}") from e


class _Compiler:
    def __init__(self, arrays: bytes, names: Container[str], track_meta: bool) -> None:
        self._arrays = arrays
        self._names = names
        self._track_meta = track_meta

    def node(self, node: Any) -> Builder:
        if isinstance(node, dict):
            if len(node) == 1:
                (tag, payload), *_ = node.items()
                if tag.startswith("$"):
                    return self._tagged(tag, payload)
            return self._dict(list(node), [self.node(v) for v in node.values()])
        if isinstance(node, list):
            return self._list(node)
        return _Constant(node)

    def _tagged(self, tag: str, payload: Any) -> Builder:
        compile_ = _COMPILERS.get(tag)
        if compile_ is None:
            raise DamagedRecord(f"its item tree holds {tag}, which this version does not know")
        return compile_(self, payload)

    def value(self, node: Any) -> Any:
        """A node that holds no tensors, put together now."""
        return self.node(node)({})

    # Containers

    def _list(self, nodes: list[Any]) -> Builder:
        builders = [self.node(n) for n in nodes]
        if all(isinstance(b, _Constant) for b in builders):
            constants = [b(_NO_TENSORS) for b in builders]
            return lambda tensors: constants[:]
        return lambda tensors: [b(tensors) for b in builders]

    def _dict(self, keys: list[Any], builders: list[Builder]) -> Builder:
        base = {k: b(_NO_TENSORS) if isinstance(b, _Constant) else None for k, b in zip(keys, builders, strict=True)}
        made = [(k, b) for k, b in zip(keys, builders, strict=True) if not isinstance(b, _Constant)]

        def build(tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
            out = base.copy()
            for key, builder in made:
                out[key] = builder(tensors)
            return out

        return build

    def pairs(self, pairs: list[list[Any]]) -> Builder:
        return self._dict([self.value(k) for k, _ in pairs], [self.node(v) for _, v in pairs])

    def through(self, make: Callable[[Any], Any], nodes: list[Any]) -> Builder:
        """A container made from the list of its members; immutable members make an immutable whole."""
        builders = [self.node(n) for n in nodes]
        if make in _IMMUTABLE and all(isinstance(b, _Constant) for b in builders):
            return _Constant(make([b(_NO_TENSORS) for b in builders]))
        return lambda tensors: make([b(tensors) for b in builders])

    def opaque(self, payload: _Opaque) -> Builder:
        if not isinstance(payload, _Opaque):
            raise DamagedRecord("it holds a value that cannot come from a file")
        return _Constant(payload.value)

    def registered(self, payload: list[Any]) -> Builder:
        name, node = payload
        if name not in _by_name:
            raise DamagedRecord(f"it holds a {name!r}, which nobody registered here with monai_gds.register_type")
        decode, inner = _by_name[name].decode, self.node(node)
        return lambda tensors: decode(inner(tensors))

    # Arrays and tensors

    def array(self, payload: list[Any]) -> Builder:
        descr, shape, offset = payload
        dtype = np.lib.format.descr_to_dtype(_as_descr(descr))
        count = math.prod(shape)
        if not count * dtype.itemsize:
            return _copier(np.ndarray(shape, dtype))
        if min(shape, default=0) < 0:  # frombuffer takes it for "all there is"
            raise DamagedRecord(f"it holds an array of shape {shape}")
        return _copier(np.frombuffer(self._arrays, dtype, count, offset).reshape(shape).copy())

    def void(self, payload: list[Any]) -> Builder:
        array = self.array(payload)
        return lambda tensors: array(tensors)[()]

    def objects(self, payload: list[Any]) -> Builder:
        shape, nodes = payload
        inner = self._list(nodes)

        def build(tensors: Mapping[str, torch.Tensor]) -> Any:
            out = np.empty(math.prod(shape), dtype=object)
            for i, v in enumerate(inner(tensors)):  # out[:] = … would look into lists
                out[i] = v
            return out.reshape(shape)

        return build

    def small_tensor(self, payload: list[Any]) -> Builder:
        name, shape, offset, flags = payload
        dtype = _torch_dtype(name)
        nbytes = math.prod(shape) * dtype.itemsize
        raw = torch.frombuffer(bytearray(self._arrays[offset : offset + nbytes]), dtype=torch.uint8) if nbytes else None
        template = torch.empty(shape, dtype=dtype) if raw is None else tensor_of(raw, dtype, shape)
        if flags.get("requires_grad"):
            return lambda tensors: template.clone().requires_grad_()
        return lambda tensors: template.clone()

    def tensor(self, payload: dict[str, Any]) -> Builder:
        name, is_complex, grad = payload["name"], payload.get("complex"), payload.get("requires_grad")
        unknown = payload.keys() - {"name", "complex", "requires_grad"}
        if unknown or name not in self._names:
            raise DamagedRecord(f"its tensor {name!r} is not there, or stored in an unknown way: {sorted(unknown)}")
        if not is_complex and not grad:
            return lambda tensors: tensors[name]

        def build(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
            out = torch.view_as_complex(tensors[name]) if is_complex else tensors[name]
            return out.requires_grad_() if grad else out

        return build

    def metatensor(self, payload: list[Any]) -> Builder:
        data = self.node(payload[0])
        if not self._track_meta:
            return data
        attributes = self.pairs(payload[1])

        def build(tensors: Mapping[str, torch.Tensor]) -> MetaTensor:
            # as_subclass and the attributes as they were: constructing one costs twenty times as much, and would
            # derive anew what the record holds.
            plain = data(tensors)
            out = plain.detach().as_subclass(MetaTensor)
            if plain.requires_grad:
                out.requires_grad_()
            out.__dict__ = attributes(tensors)
            return out

        return build


def _copier(template: np.ndarray) -> Builder:
    copy = template.copy
    return lambda tensors: copy()


def _as_descr(descr: Any) -> Any:
    """JSON turns the tuples of a structured dtype's description into lists: fields, each (name, type[, shape])."""
    if not isinstance(descr, list):
        return descr
    return [
        (tuple(name) if isinstance(name, list) else name, _as_descr(kind), *map(tuple, shape))
        for name, kind, *shape in descr
    ]


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


def _enum_member(cls: str, member: str) -> enum.Enum:
    found = _monai_enum(cls)
    if found is None or member not in found.__members__:
        raise DamagedRecord(f"it holds {cls}.{member}, which this MONAI does not know")
    return found[member]


def _np_scalar(descr: Any, data: str) -> Any:
    return np.frombuffer(base64.b64decode(data), np.lib.format.descr_to_dtype(_as_descr(descr)), 1)[0]


_NO_TENSORS: Mapping[str, torch.Tensor] = {}
_IMMUTABLE: tuple[Callable[[Any], Any], ...] = (tuple, frozenset, torch.Size)

_COMPILERS: dict[str, Callable[[_Compiler, Any], Builder]] = {
    "$int": lambda c, p: _Constant(int(p, 16)),
    "$float": lambda c, p: _Constant(float(p)),
    "$complex": lambda c, p: _Constant(complex(c.value(p[0]), c.value(p[1]))),
    "$bytes": lambda c, p: _Constant(base64.b64decode(p)),
    "$bytearray": lambda c, p: lambda tensors: bytearray(base64.b64decode(p)),
    "$enum": lambda c, p: _Constant(_enum_member(*p)),
    "$path": lambda c, p: _Constant(pathlib.Path(p)),
    "$type": lambda c, p: _Constant(_BUILTIN_TYPES[p]),
    "$numpy_type": lambda c, p: _Constant(_numpy_type(p)),
    "$scalar": lambda c, p: _Constant(_np_scalar(*p)),
    "$str": lambda c, p: _Constant(np.str_(p)),
    "$numpy_bytes": lambda c, p: _Constant(np.bytes_(base64.b64decode(p))),
    "$void": _Compiler.void,
    "$dtype": lambda c, p: _Constant(np.lib.format.descr_to_dtype(_as_descr(p))),
    "$torch_dtype": lambda c, p: _Constant(_torch_dtype(p)),
    "$device": lambda c, p: _Constant(torch.device(p)),
    "$slice": lambda c, p: _Constant(slice(*map(c.value, p))),
    "$range": lambda c, p: _Constant(range(*p)),
    "$tuple": lambda c, p: c.through(tuple, p),
    "$set": lambda c, p: c.through(set, p),
    "$frozenset": lambda c, p: c.through(frozenset, p),
    "$size": lambda c, p: c.through(torch.Size, p),
    "$dict": _Compiler.pairs,
    "$ordered_dict": lambda c, p: c.through(OrderedDict, [{"$tuple": pair} for pair in p]),
    "$opaque": _Compiler.opaque,
    "$registered": _Compiler.registered,
    "$array": _Compiler.array,
    "$objects": _Compiler.objects,
    "$small_tensor": _Compiler.small_tensor,
    "$tensor": _Compiler.tensor,
    "$metatensor": _Compiler.metatensor,
}
