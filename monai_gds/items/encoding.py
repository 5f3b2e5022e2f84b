"""Takes an item apart into JSON, tensors, and one block of small arrays, as :mod:`monai_gds.items.tree` specifies."""

from __future__ import annotations

import base64
import bisect
import collections
import enum
import gc
import math
import pathlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base import data_root
from monai_gds.base.dtypes import MOST_AXES, has_name
from monai_gds.errors import DamagedRecord, UnsupportedType
from monai_gds.items.passthrough import ItemValues
from monai_gds.items.types import (
    MAX_DEPTH,
    NUMERIC,
    STORED_AS_REAL,
    TAGS,
    Codec,
    codec_for,
    dtype_name,
    is_monai_enum,
    is_named_tuple,
    named_tuple,
    type_name,
)

if TYPE_CHECKING:
    from monai.data import MetaTensor

__all__ = ["ARRAY_ALIGNMENT", "EncodedItem", "encode_item", "tensor_bytes"]

#: Alignment of small arrays in the packed block. Arrays whose element size divides it are aligned to that size instead.
ARRAY_ALIGNMENT = 16

#: A tensor is copied if its storage is larger than itself by more than this many bytes.
_SLACK = 4096

#: Keys and indices that lead to a value, for messages and the names of tensors.
_Path: TypeAlias = "tuple[Any, ...]"


@dataclass(slots=True)
class EncodedItem:
    """An item taken apart."""

    tree: Any = None  # JSON-able
    # The item's tensors by name: contiguous, detached, each the only user of its storage, on their devices.
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    arrays: bytearray = field(default_factory=bytearray)  # the packed block of small arrays


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that stays in memory and is never written."""

    value: Any


def encode_item(
    item: Any, *, strict: bool = True, root: str | None = None, given: ItemValues | None = None
) -> EncodedItem:
    """Takes an item apart.

    Args:
        item: dicts, lists, tuples, sets, deques, named tuples, scalars, strings, bytes, None, dates and times, NumPy
            scalars, dtypes and (masked) arrays, torch tensors and dtypes, MetaTensors, paths, MONAI's enums,
            registered types, nested in any way.
        strict: False lets anything else pass as it is, for an item that is put together again in memory and never
            written.
        root: a data root; absolute, without a trailing slash. Text and paths at or below it are stored relative to it,
            also in arrays and as keys. Bytes are not.
        given: see :func:`monai_gds.items.passthrough.copy_item`. A value that cannot be stored otherwise is taken from
            the dataset's item again if it passed through unchanged.

    Raises:
        UnsupportedType: the item holds something else. The message names its key path and type, and the way out.

    Example:
        >>> encode_item({"label": "/data/ct.nii"}, root="/data").tree
        {'label': {'$root': '/ct.nii'}}
    """
    encoder = _Encoder(strict, root, given)
    encoder.out.tree = encoder.node(item, ())
    return encoder.out


class _Encoder:
    def __init__(self, strict: bool, root: str | None, given: ItemValues | None) -> None:
        self.out = EncodedItem()
        self._strict = strict
        self._root = root
        self._given = given
        self._taken = 0  # number of values taken from the item
        self._memory: list[tuple[int, int]] = []  # sorted address ranges of self.out.tensors
        self._open: set[int] = set()
        self._on_host = 0  # > 0 inside a MetaTensor's attributes, where arrays keep their type and place

    def node(self, value: Any, path: _Path) -> Any:
        try:
            return self._node(value, path)
        except UnsupportedType:
            where = None if self._given is None else self._given.path_of(value)
            if where is not None:
                self._taken += 1
                return {"$item": [self.text(key) if type(key) is str else key for key in where]}
            if self._strict:
                raise
            return {"$opaque": Opaque(value)}

    def _node(self, value: Any, path: _Path) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return value if self._root is None else self.text(value)
        encode = _ENCODERS.get(kind)
        if encode is not None:
            return encode(self, value, path)
        if _is_metatensor(kind):
            return self.metatensor(value, path)
        codec = codec_for(kind)
        if codec is not None:
            return self.registered(codec, value, path)
        encode = _LATE_ENCODERS.get(kind)
        if encode is not None:
            return encode(self, value, path)
        for base, encode in _ENCODERS_BY_BASE:
            if isinstance(value, base):
                return encode(self, value, path)
        raise UnsupportedType(_unsupported(value, path))

    # Text

    def text(self, value: str) -> Any:
        rest = None if self._root is None else data_root.below(value, self._root)
        return value if rest is None else {"$root": rest}

    def texts(self, value: np.ndarray) -> Any:
        """An array of text, some of it below the root. The reader's root determines its width."""
        members = value.ravel().tolist()
        width = value.dtype.itemsize // 4
        chosen = None if width == max(map(len, members)) else width
        return {"$texts": [value.dtype.str[0], chosen, list(value.shape), [self.text(text) for text in members]]}

    def _has_rooted(self, value: np.ndarray) -> bool:
        if self._root is None or value.dtype.hasobject:
            return False
        if value.dtype.names:
            return any(self._has_rooted(value[name]) for name in value.dtype.names)
        return value.dtype.kind == "U" and any(
            data_root.below(t, self._root) is not None for t in value.ravel().tolist()
        )

    def file_path(self, value: pathlib.PurePath, path: _Path) -> Any:
        if type(value) is not type(pathlib.Path()):
            raise UnsupportedType(_unsupported(value, path))
        return {"$path": self.text(str(value))}

    # Scalars

    def integer(self, value: int, path: _Path) -> Any:
        return value if -(2**63) <= value < 2**64 else {"$int": hex(value)}

    def real(self, value: float, path: _Path) -> Any:
        return value if math.isfinite(value) else {"$float": repr(value)}

    def complex_number(self, value: complex, path: _Path) -> Any:
        return {"$complex": [self.real(value.real, path), self.real(value.imag, path)]}

    def raw(self, value: bytes | bytearray, path: _Path) -> Any:
        return {"$bytes" if type(value) is bytes else "$bytearray": base64.b64encode(value).decode()}

    def registered(self, codec: Codec, value: Any, path: _Path) -> Any:
        try:
            encoded = codec.encode(value)
        except ValueError as e:
            raise UnsupportedType(_unsupported(value, path, str(e))) from e
        if codec.name in TAGS:  # plain JSON
            return {codec.name: encoded}
        return {"$registered": [codec.name, self._inside(value, path, lambda: self.node(encoded, path))]}

    def enum_member(self, value: enum.Enum, path: _Path) -> Any:
        cls = type(value)
        if not is_monai_enum(cls):
            raise UnsupportedType(_unsupported(value, path))
        return {"$enum": [cls.__qualname__, value.name]}

    def class_(self, value: type, path: _Path) -> Any:
        name = type_name(value)
        if name is not None:
            return {"$type": name}
        if getattr(np, value.__name__, None) is value and issubclass(value, np.generic):
            return {"$numpy_type": value.__name__}
        raise UnsupportedType(_unsupported(value, path))

    def scalar(self, value: np.generic, path: _Path) -> Any:
        if type(value) is np.str_:  # by its value as a str: NumPy's own conversions drop trailing NULs
            return {"$str": self.text(str.__str__(value))}
        if type(value) is np.bytes_:
            return {"$numpy_bytes": base64.b64encode(value).decode()}
        if type(value) is not value.dtype.type or type(value) is np.record:
            raise UnsupportedType(_unsupported(value, path))
        if type(value) is np.void:  # mutable if it has fields
            return {"$void": self._array(np.asarray(value), path)}
        return {"$scalar": [_describe(value.dtype, value, path), base64.b64encode(value.tobytes()).decode()]}

    # Containers

    def members(self, value: Any, path: _Path) -> list[Any]:
        return self._inside(value, path, lambda: [self.node(v, (*path, i)) for i, v in enumerate(value)])  # type: ignore[no-any-return]

    def mapping(self, value: dict[str, Any], path: _Path) -> Any:
        plain = all(type(k) is str and not k.startswith("$") for k in value)
        if plain and (self._root is None or not any(data_root.below(k, self._root) is not None for k in value)):
            return self._inside(value, path, lambda: {k: self.node(v, (*path, k)) for k, v in value.items()})
        return {"$dict": self.pairs(value, path)}

    def pairs(self, value: dict[Any, Any], path: _Path) -> list[Any]:
        return self._inside(value, path, lambda: self._pairs(value, path))  # type: ignore[no-any-return]

    def _pairs(self, value: dict[Any, Any], path: _Path) -> list[Any]:
        return [self._pair(k, v, path) for k, v in value.items()]

    def _pair(self, key: Any, value: Any, path: _Path) -> list[Any]:
        if type(key) is str:
            return [key if self._root is None else self.text(key), self.node(value, (*path, key))]
        before = len(self.out.tensors), len(self.out.arrays), self._taken
        node = self.node(key, (*path, key))
        if (len(self.out.tensors), len(self.out.arrays), self._taken) != before:
            raise UnsupportedType(_unsupported(key, path, "is used as a key and holds what no key can hold"))
        return [node, self.node(value, (*path, key))]

    def default_dict(self, value: collections.defaultdict[Any, Any], path: _Path) -> Any:
        factory = value.default_factory
        name = type_name(factory) if isinstance(factory, type) else None
        if factory is not None and name is None:
            raise UnsupportedType(
                _unsupported(value, path, f"makes its defaults with {factory!r}, which is not a builtin type")
            )
        return {"$defaultdict": [name, self.pairs(value, path)]}

    def namespace(self, value: types.SimpleNamespace, path: _Path) -> Any:
        return {"$namespace": self._inside(value, path, lambda: self._pairs(vars(value), path))}

    def proxy(self, value: types.MappingProxyType[Any, Any], path: _Path) -> Any:
        (viewed,) = gc.get_referents(value)  # the only way to see what it is a view of
        if type(viewed) is not dict:
            raise UnsupportedType(_unsupported(value, path, "is a view of something other than a plain dict"))
        return {"$proxy": self._inside(value, path, lambda: self._pairs(viewed, path))}

    def subclass_of_tuple(self, value: tuple[Any, ...], path: _Path) -> Any:
        cls = type(value)
        if not is_named_tuple(cls):
            raise UnsupportedType(_unsupported(value, path))
        module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__  # its name in spawned workers
        fields: tuple[str, ...] = vars(cls)["_fields"]
        try:
            found = named_tuple(cls.__module__, cls.__qualname__, fields)
        except DamagedRecord:
            found = None
        if found is not cls:
            raise UnsupportedType(_unsupported(value, path, f"cannot be found as {module}.{cls.__qualname__}"))
        return {"$namedtuple": [module, cls.__qualname__, list(fields), self.members(value, path)]}

    def metatensor(self, value: MetaTensor, path: _Path) -> Any:
        return self._inside(value, path, lambda: self._metatensor(value, path))

    def _metatensor(self, value: MetaTensor, path: _Path) -> Any:
        data = self.tensor(value.as_subclass(torch.Tensor), path)
        self._on_host += 1
        try:
            return {"$metatensor": [data, self._pairs(vars(value), path)]}
        finally:
            self._on_host -= 1

    def _inside(self, container: Any, path: _Path, work: Callable[[], Any]) -> Any:
        """Encodes the contents of a container. If that fails, no tensor of them is left in the output."""
        if id(container) in self._open:
            raise UnsupportedType(_unsupported(container, path, "contains itself"))
        if len(self._open) >= MAX_DEPTH:
            raise UnsupportedType(_unsupported(container, path, f"is nested more than {MAX_DEPTH} deep"))
        self._open.add(id(container))
        before = len(self.out.tensors)
        try:
            return work()
        except UnsupportedType:
            for name in list(self.out.tensors)[before:]:
                del self.out.tensors[name]
            raise
        finally:
            self._open.discard(id(container))

    # Arrays and tensors

    def array(self, value: np.ndarray, path: _Path) -> Any:
        if value.dtype == object:
            flat = self._inside(value, path, lambda: [self.node(v, (*path, i)) for i, v in enumerate(value.flat)])
            return {"$objects": [list(value.shape), flat]}
        native = value.dtype.newbyteorder("=")
        if self._on_host or native not in _DESCRIPTIONS:
            return self._small(value, path)
        node = self.tensor(_as_tensor(value, native), path)
        node["$tensor"]["numpy"] = _DESCRIPTIONS[native]
        return node

    def _small(self, value: np.ndarray, path: _Path) -> Any:
        if value.dtype.kind == "U" and self._has_rooted(value):
            if value.nbytes > limits.TEXTS_BYTES:
                raise UnsupportedType(_unsupported(value, path, f"takes {value.nbytes} bytes"))
            return self.texts(value)
        return {"$array": self._array(value, path)}

    def _array(self, value: np.ndarray, path: _Path) -> list[Any]:
        if self._has_rooted(value):
            raise UnsupportedType(_unsupported(value, path, "holds text below the data root among other fields"))
        offset = self._pack(value.tobytes(), value.dtype.itemsize)
        return [_describe(value.dtype, value, path), list(value.shape), offset]

    def masked(self, value: np.ma.MaskedArray[Any, Any], path: _Path) -> Any:
        """Encodes a masked array, which stays in CPU memory whatever the target."""
        state: Any = value
        if value.baseclass is not np.ndarray or state._optinfo or state._basedict:
            raise UnsupportedType(_unsupported(value, path, "is more than data and a mask"))
        parts = (state.data, None if state.mask is np.ma.nomask else state.mask, state._fill_value)
        nodes = [None if part is None else self._array(part, path) for part in parts]
        return {"$masked_array": [*nodes, bool(value.hardmask)]}

    def tensor(self, value: torch.Tensor, path: _Path) -> Any:
        if value.layout != torch.strided or value.is_nested or value.is_quantized or value.device.type == "meta":
            raise UnsupportedType(_unsupported(value, path, f"has layout {value.layout}, device {value.device}"))
        if not has_name(value.dtype) and value.dtype not in STORED_AS_REAL:
            raise UnsupportedType(
                _unsupported(value, path, f"has dtype {value.dtype}, which safetensors does not know")
            )
        if value.dim() + (value.dtype in STORED_AS_REAL) > MOST_AXES:
            raise UnsupportedType(_unsupported(value, path, f"has {value.dim()} axes, more than NumPy knows"))
        flags = {"requires_grad": True} if value.requires_grad else {}
        value = value.detach().resolve_conj().resolve_neg()
        if self._on_host:
            data = bytes(tensor_bytes(value.cpu().contiguous()).numpy().data)
            offset = self._pack(data, value.element_size())
            return {"$small_tensor": [dtype_name(value.dtype), list(value.shape), offset, flags]}
        if value.dtype in STORED_AS_REAL:
            value, flags = torch.view_as_real(value), {"complex": True, **flags}
        name = self._name(path)
        self.out.tensors[name] = self._own(value)
        return {"$tensor": {"name": name, **flags}}

    def _own(self, value: torch.Tensor) -> torch.Tensor:
        """Makes a tensor contiguous and the only user of a storage hardly larger than itself, by a copy if need be."""
        if not value.nbytes:
            return value.new_empty(value.shape)
        value = value.contiguous()
        if value.untyped_storage().nbytes() > value.nbytes + _SLACK or not self._claim(value.untyped_storage()):
            value = value.clone(memory_format=torch.contiguous_format)
            self._claim(value.untyped_storage())
        # Normalises the stride of axes of length 1, which may be anything.
        return value.view(-1).view(value.shape) if 1 in value.shape else value

    def _claim(self, storage: torch.UntypedStorage) -> bool:
        """Notes the memory of a storage; False if another tensor of the item uses some of it."""
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        i = bisect.bisect(self._memory, (start, end))
        if (i and self._memory[i - 1][1] > start) or (i < len(self._memory) and self._memory[i][0] < end):
            return False
        self._memory.insert(i, (start, end))
        return True

    def _name(self, path: _Path) -> str:
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


_Encode: TypeAlias = "Callable[[_Encoder, Any, _Path], Any]"


def _tagged(tag: str, encode: _Encode) -> _Encode:
    """Puts a tag around what ``encode`` returns."""
    return lambda encoder, value, path: {tag: encode(encoder, value, path)}


#: Encoders by exact type, for the most frequent types. Registering such a type has no effect.
_ENCODERS: dict[type, _Encode] = {
    int: _Encoder.integer,
    float: _Encoder.real,
    complex: _Encoder.complex_number,
    bytes: _Encoder.raw,
    bytearray: _Encoder.raw,
    list: _Encoder.members,
    tuple: _tagged("$tuple", _Encoder.members),
    set: _tagged("$set", _Encoder.members),
    frozenset: _tagged("$frozenset", _Encoder.members),
    torch.Size: _tagged("$size", _Encoder.members),
    dict: _Encoder.mapping,
    OrderedDict: _tagged("$ordered_dict", _Encoder.pairs),
    np.ndarray: _Encoder.array,
    np.memmap: _Encoder.array,
    torch.Tensor: _Encoder.tensor,
    type: _Encoder.class_,
    slice: lambda e, v, p: {"$slice": e.members((v.start, v.stop, v.step), p)},
}


def _is_metatensor(kind: type) -> bool:
    """Whether a type is MONAI's, without importing MONAI: packed images are records too, and need none of it."""
    return kind is getattr(sys.modules.get("monai.data.meta_tensor"), "MetaTensor", None)


_DESCRIPTIONS = {dtype: descr for descr, dtype in NUMERIC.items()}

#: Encoders by exact type that yield to registered ones, since some instances cannot be stored otherwise.
_LATE_ENCODERS: dict[type, _Encode] = {
    collections.defaultdict: _Encoder.default_dict,
    collections.Counter: _tagged("$counter", _Encoder.pairs),
    collections.deque: lambda e, v, p: {"$deque": [v.maxlen, e.members(v, p)]},
    types.SimpleNamespace: _Encoder.namespace,
    types.MappingProxyType: _Encoder.proxy,
    np.ma.MaskedArray: _Encoder.masked,
}

#: Encoders by base class.
_ENCODERS_BY_BASE: list[tuple[type, _Encode]] = [
    (enum.Enum, _Encoder.enum_member),
    (np.generic, _Encoder.scalar),
    (np.dtype, lambda e, v, p: {"$dtype": _describe(v, v, p)}),
    (pathlib.PurePath, _Encoder.file_path),
    (tuple, _Encoder.subclass_of_tuple),
]


def _unsupported(value: Any, path: _Path, what: str = "cannot be stored in a record") -> str:
    where = "item" + "".join(f"[{key!r}]" for key in path)
    cls = type(value)
    drop = "delete it before the first random transform (DeleteItemsd)"
    if "_meta" in path:  # of a MetaTensor
        drop = "keep it out of the metadata (PydicomReader does so by prune_metadata=True)"
    return (
        f"{where} is a {cls.__module__}.{cls.__qualname__}, which {what}; {drop}, "
        f"convert it to plain data, or teach records the type with monai_gds.register_type"
    )


def _as_tensor(value: np.ndarray, dtype: np.dtype[Any]) -> torch.Tensor:
    """An array as a tensor in native byte order."""
    native = np.asarray(value, dtype)
    owner = native
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    # A view would keep a larger array alive, and memory of another owner (a mapping, a tensor) may change.
    if owner.base is not None or owner.nbytes > native.nbytes + _SLACK or not native.flags.writeable:
        native = native.copy()
    return torch.from_numpy(np.ascontiguousarray(native).reshape(value.shape))


def _describe(dtype: np.dtype[Any], value: Any, path: _Path) -> Any:
    """A NumPy dtype as JSON, as in .npy files."""
    try:
        descr = np.lib.format.dtype_to_descr(dtype)
        if not dtype.hasobject and dtype.type is not np.record and np.lib.format.descr_to_dtype(descr) == dtype:
            return descr
    except ValueError:  # fields that overlap
        pass
    raise UnsupportedType(_unsupported(value, path, f"has the dtype {dtype}, which cannot be stored in a record"))


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a 1-D uint8 tensor over the same memory."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.reshape(-1).view(torch.uint8)
