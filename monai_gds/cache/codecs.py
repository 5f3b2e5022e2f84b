"""Types that the item tree knows, besides JSON's own and containers: one table for both ways, and the user's own types.

Used by the encoder and the decoder. Nothing here imports or calls what a record names: a name is looked up in a table,
among MONAI's enums, or among the named tuples of modules that this process has imported already.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import importlib
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from monai_gds.cache.dtypes import DTYPE_NAMES
from monai_gds.errors import DamagedRecord, NewerRecord

__all__ = [
    "CODECS",
    "MAX_DEPTH",
    "NUMERIC",
    "STORED_AS_REAL",
    "Codec",
    "Registered",
    "builtin_type",
    "dtype_name",
    "enum_member",
    "is_monai_enum",
    "is_named_tuple",
    "named_tuple",
    "numpy_type",
    "register_type",
    "registered_as",
    "registered_for",
    "torch_dtype",
    "type_name",
]

#: How deep containers may be nested: Python's own limit allows about half as much again.
MAX_DEPTH = 100

#: Dtypes of torch's that safetensors does not have: their parts are a last axis of (real, imaginary).
STORED_AS_REAL = (torch.complex128, torch.complex32)

#: NumPy dtypes, in the machine's byte order, that torch has too, by how a tree describes them.
NUMERIC = {
    np.lib.format.dtype_to_descr(dtype): dtype
    for dtype in map(np.dtype, ("?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"))
}

_T = TypeVar("_T")

# ---------------------------------------------------------------------------------------------------------------------
# Types of the user's


@dataclass(frozen=True, slots=True)
class Registered:
    """A type that :func:`register_type` was told of."""

    name: str
    cls: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_class: dict[type, Registered] = {}
_by_name: dict[str, Registered] = {}


def register_type(cls: type[_T], name: str, encode: Callable[[_T], Any], decode: Callable[[Any], _T]) -> None:
    """Teaches records a type of yours. Call it at import time, in every process that reads or writes such items.

    Args:
        cls: the class; instances of subclasses are not meant.
        name: what the record calls it. Change it when the meaning of the encoded value changes.
        encode: gives a value made of what records can already hold (dicts, lists, strings, arrays, tensors…).
        decode: makes the instance from that value.

    Raises:
        ValueError: the name is taken by another class.

    Example:
        >>> from ipaddress import IPv4Address
        >>> from monai_gds.cache.tree import encode_item, register_type
        >>> register_type(IPv4Address, "ipv4", str, IPv4Address)
        >>> encode_item({"scanner": IPv4Address("10.0.0.7")}).tree
        {'scanner': {'$registered': ['ipv4', '10.0.0.7']}}
    """
    if name in _by_name and _by_name[name].cls is not cls:
        raise ValueError(f"the name {name!r} is registered for {_by_name[name].cls.__qualname__} already")
    entry = Registered(name, cls, encode, decode)
    _by_class[cls], _by_name[name] = entry, entry


def registered_for(cls: type) -> Registered | None:
    """What is registered for instances of exactly this class."""
    return _by_class.get(cls)


def registered_as(name: Any) -> Registered:
    """What is registered under a name.

    Raises:
        DamagedRecord: nothing is.
    """
    if name not in _by_name:
        raise DamagedRecord(f"it holds a {name!r}, which nobody registered here with monai_gds.register_type")
    return _by_name[name]


# ---------------------------------------------------------------------------------------------------------------------
# Immutable values


class Codec(NamedTuple):
    """How the values of one immutable type become JSON. ``encode`` raises ValueError with the reason why one cannot."""

    tag: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _timedelta(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _zone(value: datetime.tzinfo | None) -> list[Any] | None:
    if value is None:
        return None
    if type(value) is datetime.timezone:
        offset, *name = cast(Any, value).__getinitargs__()
        return ["offset", _timedelta(offset), *name]
    if type(value) is zoneinfo.ZoneInfo and value.key is not None:
        try:
            if zoneinfo.ZoneInfo(value.key) is value:
                return ["zone", value.key]
        except (zoneinfo.ZoneInfoNotFoundError, ValueError):
            pass
    raise ValueError(f"has the time zone {value!r}, which is neither a fixed offset nor found by its key")


def _zone_of(payload: Any) -> datetime.tzinfo | None:
    if payload is None:
        return None
    kind, what, *name = payload
    if kind == "offset":
        return datetime.timezone(datetime.timedelta(*what), *name)
    if kind == "zone":
        return zoneinfo.ZoneInfo(what)
    raise NewerRecord(f"it holds a time zone of the kind {kind!r}, which this version does not know")


def _clock(value: datetime.datetime | datetime.time) -> list[Any]:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _zone(value.tzinfo)]


def _clock_of(cls: type[datetime.datetime] | type[datetime.time]) -> Callable[[list[Any]], Any]:
    def decode(payload: list[Any]) -> Any:
        text, fold, zone = payload
        return cls.fromisoformat(text).replace(tzinfo=_zone_of(zone), fold=fold)

    return decode


def _always(value: Any) -> tuple[Callable[[Any], None], Callable[[Any], Any]]:
    return lambda _: None, lambda _: value


#: Types whose values are told by plain JSON, by type.
CODECS: dict[type, Codec] = {
    range: Codec("$range", lambda v: [v.start, v.stop, v.step], lambda p: range(*p)),
    torch.dtype: Codec("$torch_dtype", lambda v: dtype_name(v), lambda p: torch_dtype(p)),
    torch.device: Codec("$device", str, torch.device),
    types.EllipsisType: Codec("$ellipsis", *_always(...)),
    datetime.date: Codec("$date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.datetime: Codec("$datetime", _clock, _clock_of(datetime.datetime)),
    datetime.time: Codec("$time", _clock, _clock_of(datetime.time)),
    datetime.timedelta: Codec("$timedelta", _timedelta, lambda p: datetime.timedelta(*p)),
    datetime.timezone: Codec("$timezone", _zone, _zone_of),
    zoneinfo.ZoneInfo: Codec("$timezone", _zone, _zone_of),
    decimal.Decimal: Codec("$decimal", str, decimal.Decimal),
    fractions.Fraction: Codec(
        "$fraction",
        lambda v: [hex(v.numerator), hex(v.denominator)],
        lambda p: fractions.Fraction(*[int(n, 16) for n in p]),
    ),
    uuid.UUID: Codec(
        "$uuid", lambda v: [v.hex, v.is_safe.value], lambda p: uuid.UUID(hex=p[0], is_safe=uuid.SafeUUID(p[1]))
    ),
    np.ma.core.MaskedConstant: Codec("$masked", *_always(np.ma.masked)),
}


# ---------------------------------------------------------------------------------------------------------------------
# Classes and dtypes by their names

_TYPES: dict[str, type] = {
    t.__name__: t
    for t in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
}  # fmt: skip


def type_name(cls: type) -> str | None:
    """The name of one of the builtin types that a record may name; None for any other class."""
    return cls.__name__ if _TYPES.get(cls.__name__) is cls else None


def builtin_type(name: Any) -> type:
    """The builtin type of a name that :func:`type_name` gave.

    Raises:
        NewerRecord: it gives no such name.
    """
    if name not in _TYPES:
        raise NewerRecord(f"it holds the type {name!r}, which this version does not know")
    return _TYPES[name]


def numpy_type(name: str) -> type:
    """NumPy's scalar type of that name."""
    found = getattr(np, name, None)
    if not (isinstance(found, type) and issubclass(found, np.generic)):
        raise DamagedRecord(f"it holds the NumPy type {name!r}, which this NumPy does not know")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The name of one of torch's dtypes."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str, of_data: bool = False) -> torch.dtype:
    """Torch's dtype of that name; ``of_data``: which small tensors may have, so that making one is harmless."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedRecord(f"it holds the dtype {name!r}, which this torch does not know")
    if of_data and dtype not in DTYPE_NAMES and dtype not in STORED_AS_REAL:
        raise DamagedRecord(f"it holds a small tensor of the dtype {name!r}")
    return dtype


def is_monai_enum(cls: type) -> bool:
    """Whether this is one of MONAI's own enums: the whole list of enums that a record may name."""
    return _monai_enum(cls.__qualname__) is cls


@functools.lru_cache(maxsize=256)
def enum_member(cls: str, member: str) -> enum.Enum:
    """A member of one of MONAI's enums."""
    found = _monai_enum(cls)
    if found is None or member not in found.__members__:
        raise DamagedRecord(f"it holds {cls}.{member}, which this MONAI does not know")
    return found[member]


def _monai_enum(name: str) -> type[enum.Enum] | None:
    found = getattr(importlib.import_module("monai.utils.enums"), name, None)
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None


_FieldOfNamedTuple = type(vars(Codec)["tag"])


def is_named_tuple(cls: type) -> bool:
    """Whether this is exactly what ``collections.namedtuple`` or ``typing.NamedTuple`` makes, so that a tuple's own
    ``__new__`` makes its instances, and members are all that there is of one."""
    fields = vars(cls).get("_fields")
    return (
        type(cls) is type
        and cls.__bases__ == (tuple,)
        and not cls.__dictoffset__
        and type(fields) is tuple
        and all(type(vars(cls).get(field)) is _FieldOfNamedTuple for field in fields)
    )


def named_tuple(module: str, qualname: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """The named tuple of that name in a module that is imported already.

    Raises:
        DamagedRecord: there is none here with just these fields.
    """
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
    if not (isinstance(found, type) and is_named_tuple(found)):
        why = "which nothing imported here defines as a named tuple"
    elif vars(found)["_fields"] != fields:
        why = f"whose fields were {', '.join(fields)} when it was written"
    else:
        return found
    raise DamagedRecord(f"it cannot be read in this process: it holds a {module}.{qualname}, {why}")
