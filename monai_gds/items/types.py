"""What a type is to the item tree; the types of users (:func:`register_type`); types by their names in a record.

Nothing here imports or calls what a record names: a name is looked up in the registry, among MONAI's enums, or among
the named tuples of modules that this process has already imported. The types that every record may hold are the rows of
:mod:`.table`.
"""

from __future__ import annotations

import collections
import enum
import functools
import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from monai_gds.base.dtypes import has_name
from monai_gds.errors import DamagedRecord

#: How deep containers may be nested. Python's recursion limit allows about half as much again.
MAX_DEPTH = 100

#: Torch dtypes that safetensors lacks: they are stored with a last axis of (real, imaginary).
STORED_AS_REAL = (torch.complex128, torch.complex32)

#: NumPy dtypes that torch has too, in native byte order, by their description in a tree.
NUMERIC = {
    np.lib.format.dtype_to_descr(dtype): dtype
    for dtype in map(np.dtype, ("?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"))
}

_T = TypeVar("_T")


class Type(NamedTuple):
    """How the values of a type become nodes of a tree, and nodes become values.

    Attributes:
        tag: marks the nodes. JSON's own lists, which have none, have the type ``list`` instead.
        types: those whose values this row encodes.
        encode: makes the node of a value; called with the encoder, the value and its path. None if nodes with this tag
            are made elsewhere.
        parse: makes the form of what follows the tag, and hands its values to the parser; called with these two.
        plan: compiles what follows the tag in a form into what builds a value; called with the plan and that. None if
            ``parse`` always makes a value.
    """

    tag: str | type
    types: tuple[type, ...]
    encode: Callable[..., Any] | None
    parse: Callable[..., Any]
    plan: Callable[..., Any] | None = None


# The registry


@dataclass(frozen=True, slots=True)
class Codec:
    """How the instances of one type become plain values and back."""

    name: str
    cls: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_class: dict[type, Codec] = {}
_by_name: dict[str, Codec] = {}


def register_type(cls: type[_T], name: str, encode: Callable[[_T], Any], decode: Callable[[Any], _T]) -> None:
    """Teaches records a type. Call it at import time, in every process that reads or writes such items.

    Args:
        cls: the class. Instances of subclasses are not covered.
        name: what the record calls it. Change it when the meaning of the encoded value changes.
        encode: returns a value made of what records can already hold (dicts, lists, strings, arrays, tensors…). It
            raises ValueError, with the reason, for an instance that cannot be stored.
        decode: makes the instance from that value.

    Raises:
        ValueError: the name belongs to another class with another ``decode``, or begins with ``$`` as built-in ones do.
            A class of the same module and name is the same, defined again in a notebook, unless a function made it.

    Example:
        >>> from ipaddress import IPv4Address
        >>> from monai_gds.items.tree import encode_item, register_type
        >>> register_type(IPv4Address, "ipv4", str, IPv4Address)
        >>> encode_item({"scanner": IPv4Address("10.0.0.7")}).tree
        {'scanner': {'$registered': ['ipv4', '10.0.0.7']}}
    """
    if name.startswith("$"):
        raise ValueError(f"the name {name!r} begins with $, as only those of built-in types do: choose another")
    known = _by_name.get(name)
    if known is not None and known.cls is not cls and known.decode is not decode:
        # as a cell of a notebook does when it is run again; a function makes many classes of one name
        again = (cls.__module__, cls.__qualname__) == (known.cls.__module__, known.cls.__qualname__)
        if not again or "<locals>" in cls.__qualname__:
            raise ValueError(f"the name {name!r} is already registered for {known.cls.__qualname__}")
    _by_class[cls] = _by_name[name] = Codec(name, cls, encode, decode)


def codec_for(cls: type) -> Codec | None:
    """The codec for instances of exactly this class."""
    return _by_class.get(cls)


#: Tags of types in records of earlier versions. They are refused like types that nobody registered.
GONE = frozenset(
    f"${name}" for name in (
        "bytearray", "counter", "decimal", "defaultdict", "deque", "ellipsis", "fraction", "masked", "masked_array",
        "namespace", "numpy_bytes", "numpy_type", "objects", "proxy", "type", "uuid", "void",
    )
)  # fmt: skip


class UnknownHere(DamagedRecord):
    """A record holds a type that this process lacks. Another process may be able to read it."""


def gone(what: str) -> UnknownHere:
    """The error for a record of an earlier version that holds something of a type which records no longer hold."""
    return UnknownHere(f"it holds {what}, which this version stores only by monai_gds.register_type")


def codec_named(name: Any) -> Codec:
    """The codec registered under a name. Raises UnknownHere if there is none."""
    if type(name) is not str or name.startswith("$"):
        raise DamagedRecord(f"it names a type by {name!r:.40}, which is not a name that anybody can register")
    if name not in _by_name:
        raise UnknownHere(f"it holds a {name!r}, which nobody registered here with monai_gds.register_type")
    return _by_name[name]


# Classes and dtypes by their names


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str, of_data: bool = False) -> torch.dtype:
    """The torch dtype of this name. With ``of_data``, only dtypes of which a tensor can safely be made."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedRecord(f"it holds the dtype {name!r}, which this torch does not have")
    if of_data and not has_name(dtype) and dtype not in STORED_AS_REAL:
        raise DamagedRecord(f"it holds a small tensor of the dtype {name!r}")
    return dtype


def numpy_dtype(descr: Any) -> np.dtype[Any]:
    """The NumPy dtype of this name. Raises UnknownHere for fields and raw bytes, which records held once."""
    if type(descr) is list or descr.startswith("|V"):
        raise gone("an array of fields or raw bytes")
    dtype = np.dtype(descr)
    if dtype.kind in "OV":
        raise DamagedRecord("it holds an array of pointers, or of fields named by text")
    return dtype  # type: ignore[no-any-return]


def is_monai_enum(cls: type) -> bool:
    """Whether this is one of MONAI's own enums. A record may name no others."""
    return _monai_enum(cls.__qualname__) is cls


@functools.lru_cache(maxsize=256)
def enum_member(cls: str, member: str) -> enum.Enum:
    found = _monai_enum(cls)
    if found is None or member not in found.__members__:
        raise DamagedRecord(f"it holds {cls}.{member}, which this MONAI does not have")
    return found[member]


def _monai_enum(name: str) -> type[enum.Enum] | None:
    found = getattr(importlib.import_module("monai.utils.enums"), name, None)
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None


_FieldOfNamedTuple = type(vars(collections.namedtuple("_", "field"))["field"])


def is_named_tuple(cls: type) -> bool:
    """Whether ``collections.namedtuple`` or ``typing.NamedTuple`` made this class.

    Only then does ``tuple.__new__`` make its instances, and do the members make up the whole instance.
    """
    fields = vars(cls).get("_fields")
    return (
        type(cls) is type
        and cls.__bases__ == (tuple,)
        and not cls.__dictoffset__
        and type(fields) is tuple
        and all(type(vars(cls).get(field)) is _FieldOfNamedTuple for field in fields)
    )


def named_tuple(module: str, qualname: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """The named tuple of this name and fields in a module that is already imported.

    Raises UnknownHere if there is none.
    """
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
    if not (isinstance(found, type) and is_named_tuple(found)):
        why = "which no module imported here defines as a named tuple"
    elif vars(found)["_fields"] != fields:
        why = f"whose fields were {', '.join(fields)} when it was written"
    else:
        return found
    raise UnknownHere(f"it cannot be read in this process: it holds a {module}.{qualname}, {why}")
