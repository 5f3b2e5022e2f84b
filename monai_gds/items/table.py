"""The types of the item tree, one row per type: its tag, and how its values are encoded, parsed, and planned."""

from __future__ import annotations

import ast
import base64
import datetime
import enum
import math
import pathlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base.dtypes import MOST_AXES, has_name
from monai_gds.errors import DamagedRecord, NewerRecord
from monai_gds.items.decoding import Build, Form, Parser, TreePlan, fields
from monai_gds.items.encoding import ARRAY_ALIGNMENT, SLACK, Encoder, Opaque, Path, tensor_bytes, unsupported
from monai_gds.items.passthrough import value_at
from monai_gds.items.types import (
    NUMERIC,
    STORED_AS_REAL,
    Type,
    codec_named,
    dtype_name,
    enum_member,
    gone,
    is_monai_enum,
    is_named_tuple,
    named_tuple,
    numpy_dtype,
    torch_dtype,
)  # fmt: skip

if TYPE_CHECKING:
    from monai.data import MetaTensor


def _value(decode: Callable[[Any], Any]) -> Callable[[Parser, Any], Form]:
    """Parses what follows a tag as an immutable value."""
    return lambda parser, payload: parser.value(decode(payload))


def _plain(tag: str, cls: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> Type:
    """An immutable type without subclasses, whose values are encoded as plain JSON."""

    def encoded(encoder: Encoder, value: Any, path: Path) -> Any:
        if type(value) is not cls:
            raise unsupported(value, path)
        try:
            return {tag: encode(value)}
        except ValueError as e:
            raise unsupported(value, path, str(e)) from e

    return Type(tag, (cls,), encoded, _value(decode))


# Numbers, enums, dates and times


def _complex(encoder: Encoder, value: complex, path: Path) -> Any:
    return {"$complex": [encoder.node(part, path) for part in (value.real, value.imag)]}


def _complex_of(parts: list[Any]) -> complex:
    return complex(*[float(*fields(p, "a number", "$float") if type(p) is dict else (p,)) for p in parts])


def _enum(encoder: Encoder, value: enum.Enum, path: Path) -> Any:
    if not is_monai_enum(type(value)):
        raise unsupported(value, path)
    return {"$enum": [type(value).__qualname__, value.name]}


def _timedelta(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _zone(value: datetime.tzinfo | None) -> list[Any] | None:
    if value is None:
        return None
    if type(value) is not datetime.timezone:
        raise ValueError(f"has the time zone {value!r}, which is not a fixed offset")
    offset, *name = cast(Any, value).__getinitargs__()
    return ["offset", _timedelta(offset), *name]


def _zone_of(payload: Any) -> Any:
    if payload is None:
        return None
    kind, what, *name = payload
    if kind == "zone":
        raise gone("a time zone with a key")
    if kind != "offset":
        raise NewerRecord(f"it holds a time zone of the kind {kind!r}, which this version does not support")
    return datetime.timezone(datetime.timedelta(*what), *name)


def _clock(value: datetime.datetime | datetime.time) -> list[Any]:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _zone(value.tzinfo)]


def _clock_of(cls: type[datetime.datetime] | type[datetime.time]) -> Callable[[list[Any]], Any]:
    def decode(payload: list[Any]) -> Any:
        text, fold, zone = payload
        return cls.fromisoformat(text).replace(tzinfo=_zone_of(zone), fold=fold)

    return decode


# NumPy's scalars and dtypes


def _scalar(encoder: Encoder, value: np.generic, path: Path) -> Any:
    if type(value) is np.str_:  # by its value as a str: NumPy's own conversions drop trailing NULs
        return {"$str": encoder.text(str.__str__(value))}
    if type(value) is not value.dtype.type or value.dtype.kind == "S":
        raise unsupported(value, path)
    return {"$scalar": [_describe(value.dtype, value, path), base64.b64encode(value.tobytes()).decode()]}


def _scalar_of(payload: list[Any]) -> Any:
    descr, data = payload
    return np.frombuffer(base64.b64decode(data), numpy_dtype(descr), 1)[0]


def _describe(dtype: np.dtype[Any], value: Any, path: Path) -> str:
    """A NumPy dtype as text, as in .npy files."""
    descr = None if dtype.kind in "OV" else np.lib.format.dtype_to_descr(dtype)
    if descr is None or np.dtype(descr) != dtype:
        raise unsupported(value, path, f"has the dtype {dtype}, which cannot be stored in a record")
    return descr  # type: ignore[return-value]


# Paths, and what lies outside of the record


def _path(encoder: Encoder, value: pathlib.PurePath, path: Path) -> Any:
    if type(value) is not type(pathlib.Path()):
        raise unsupported(value, path)
    return {"$path": encoder.text(str(value))}


def _opaque_of(payload: Any) -> Any:
    if not isinstance(payload, Opaque):
        raise DamagedRecord("it holds a value that cannot come from a file")
    return payload.value


# Containers


def _container(
    tag: str | type, cls: type, make: Callable[[Any], Any], encode: Any = None, *, immutable: bool = False
) -> Type:
    """A container made from the list of its members. If all of them are values, they become one value."""

    def parse(parser: Parser, nodes: list[Any]) -> Form:
        members = parser.members(nodes)
        if type(members) is tuple:
            return tag, members
        return parser.value(make(members)) if immutable else (tag, parser.value(tuple(members)))

    def plan(plan: TreePlan, content: Form) -> Build:
        if isinstance(content, int):
            return lambda t, v, a: make(v[content])
        builds = [plan.node(form) for form in content]
        return lambda t, v, a: make([build(t, v, a) for build in builds])

    return Type(tag, (cls,), encode or (lambda e, v, p: {tag: e.members(v, p)}), parse, plan)


def _dict(encoder: Encoder, value: dict[Any, Any], path: Path) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value) and not encoder.has_rooted(value):
        return encoder.inside(value, path, lambda: {k: encoder.node(v, (*path, k)) for k, v in value.items()})
    return {"$dict": encoder.inside(value, path, lambda: encoder.pairs(value, path))}


def _dict_form(parser: Parser, pairs: list[list[Any]]) -> Form:
    keys = [key for key, _ in pairs]
    forms = parser.forms([node for _, node in pairs])
    if {str}.issuperset(map(type, keys)):
        return "$dict", tuple(keys), None, forms
    # As text, because 1, 1.0 and True are the same key. (json.dumps takes ten times as long.)
    return "$dict", repr(keys), parser.root, forms


def _dict_plan(plan: TreePlan, keys: str | tuple[str, ...], root: str | None, forms: Sequence[Form]) -> Build:
    if isinstance(keys, str):
        return plan.dict([plan.constant(node, root) for node in ast.literal_eval(keys)], forms)
    return plan.dict(keys, forms)


def _made(make: Callable[[Any], Any], inner: Build) -> Build:
    return lambda t, v, a: make(inner(t, v, a))


def _named_tuple(encoder: Encoder, value: tuple[Any, ...], path: Path) -> Any:
    cls = type(value)
    if not is_named_tuple(cls):
        raise unsupported(value, path)
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__  # its name in spawned workers
    names: tuple[str, ...] = vars(cls)["_fields"]
    try:
        found = named_tuple(cls.__module__, cls.__qualname__, names)
    except DamagedRecord:
        found = None
    if found is not cls:
        raise unsupported(value, path, f"cannot be found as {module}.{cls.__qualname__}")
    return {"$namedtuple": [module, cls.__qualname__, list(names), encoder.members(value, path)]}


def _named_tuple_form(parser: Parser, payload: list[Any]) -> Form:
    module, qualname, names, nodes = payload
    if len(names) != len(nodes):
        raise DamagedRecord(f"it holds a {qualname} of {len(nodes)} members")
    named_tuple(module, qualname, tuple(names))
    return "$namedtuple", module, qualname, tuple(names), _LIST.parse(parser, nodes)


def _named_tuple_plan(plan: TreePlan, module: str, qualname: str, names: tuple[str, ...], form: Form) -> Build:
    """Looks the class up for every item: plans outlive its redefinition in a notebook."""
    return _made(lambda members: tuple.__new__(named_tuple(module, qualname, names), members), plan.node(form))


def _registered_form(parser: Parser, payload: list[Any]) -> Form:
    name, node = payload
    codec_named(name)
    return "$registered", name, *parser.forms([node])


# Arrays and tensors

_DESCRIPTIONS = {dtype: descr for descr, dtype in NUMERIC.items()}


def _array(encoder: Encoder, value: np.ndarray, path: Path) -> Any:
    native = value.dtype.newbyteorder("=")
    if not encoder.on_host and native in _DESCRIPTIONS:
        node = _tensor(encoder, _as_tensor(value, native), path)
        node["$tensor"]["numpy"] = _DESCRIPTIONS[native]
        return node
    if value.dtype.kind == "U" and encoder.has_rooted(map(str, value.flat)):
        return _texts(encoder, value, path)
    descr = _describe(value.dtype, value, path)
    return {"$array": [descr, list(value.shape), encoder.pack(value.tobytes(), value.dtype.itemsize)]}


def _as_tensor(value: np.ndarray, dtype: np.dtype[Any]) -> torch.Tensor:
    """An array as a tensor in native byte order."""
    native = np.asarray(value, dtype)
    owner = native
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    # A view would keep a larger array alive, and memory of another owner (a mapping, a tensor) may change.
    if owner.base is not None or owner.nbytes > native.nbytes + SLACK or not native.flags.writeable:
        native = native.copy()
    return torch.from_numpy(np.ascontiguousarray(native).reshape(value.shape))


def _array_form(parser: Parser, payload: list[Any]) -> Form:
    descr, shape, offset = payload
    if type(descr) is list:
        numpy_dtype(descr)  # refuses it
    return "$array", descr, tuple(shape), offset


def _array_plan(plan: TreePlan, descr: str, shape: tuple[int, ...], offset: int) -> Build:
    dtype = numpy_dtype(descr)
    if not plan.take(dtype, shape, offset) or not dtype.itemsize:
        return lambda t, v, a: np.ndarray(shape, dtype)
    if dtype.kind != "U":
        return lambda t, v, a: np.ndarray(shape, dtype, a[-1], offset)
    codes = (*shape, dtype.itemsize // 4), np.dtype("u4").newbyteorder(dtype.byteorder)

    def build(t: Any, v: Any, a: Any) -> np.ndarray:
        if (np.ndarray(*codes, a[-1], offset) > sys.maxunicode).any():
            raise DamagedRecord("it holds text that is none")
        return np.ndarray(shape, dtype, a[-1], offset)

    return build


def _texts(encoder: Encoder, value: np.ndarray, path: Path) -> Any:
    """An array of text, some of it below the root. The reader's root determines its width."""
    if value.nbytes > limits.TEXTS_BYTES:
        raise unsupported(value, path, f"takes {value.nbytes} bytes")
    members, width = value.ravel().tolist(), value.dtype.itemsize // 4
    chosen = None if width == max(map(len, members)) else width
    return {"$texts": [value.dtype.str[0], chosen, list(value.shape), [encoder.text(text) for text in members]]}


def _texts_form(parser: Parser, payload: list[Any]) -> Form:
    order, width, shape, nodes = payload
    members = tuple([parser.text(node) for node in nodes])
    if order not in ("<", ">") or math.prod(shape) != len(members):
        raise DamagedRecord(f"it holds an array of text with order {order!r} and shape {shape}")
    width = max(0 if width is None else width, 1, *map(len, members))
    if 4 * width * len(members) > limits.TEXTS_BYTES:
        raise DamagedRecord(f"it holds {len(members)} texts of {width} characters")
    return "$texts", f"{order}U{width}", tuple(shape), parser.value(members)


def _tensor(encoder: Encoder, value: torch.Tensor, path: Path) -> Any:
    if value.layout != torch.strided or value.is_nested or value.is_quantized or value.device.type == "meta":
        raise unsupported(value, path, f"has layout {value.layout}, device {value.device}")
    if not has_name(value.dtype) and value.dtype not in STORED_AS_REAL:
        raise unsupported(value, path, f"has dtype {value.dtype}, which safetensors does not support")
    if value.dim() + (value.dtype in STORED_AS_REAL) > MOST_AXES:
        raise unsupported(value, path, f"has {value.dim()} axes, more than NumPy allows")
    flags = {"requires_grad": True} if value.requires_grad else {}
    value = value.detach().resolve_conj().resolve_neg()
    if encoder.on_host:
        data = bytes(tensor_bytes(value.cpu().contiguous()).numpy().data)
        offset = encoder.pack(data, value.element_size())
        return {"$small_tensor": [dtype_name(value.dtype), list(value.shape), offset, flags]}
    if value.dtype in STORED_AS_REAL:
        value, flags = torch.view_as_real(value), {"complex": True, **flags}
    return {"$tensor": {"name": encoder.add(value, path), **flags}}


def _tensor_form(parser: Parser, payload: dict[str, Any]) -> Form:
    name = payload["name"]
    is_complex = grad = False
    descr = None
    if len(payload) > 1:
        _, is_complex, grad, descr, _ = fields(
            payload, "$tensor", "name", complex=False, requires_grad=False, numpy=None, tiles=None
        )
    parser.use(name)
    if descr is not None and (descr not in NUMERIC or grad):
        raise DamagedRecord(f"its array {name!r} has the dtype {descr!r}, or a gradient")
    return "$tensor", name, bool(is_complex), bool(grad), descr is not None and parser.numpy


def _tensor_plan(plan: TreePlan, name: str, is_complex: bool, grad: bool, numpy: bool) -> Build:
    if numpy:
        plan.arrays.add(name)
    if not is_complex and not grad:
        return (lambda t, v, a: t[name].numpy()) if numpy else (lambda t, v, a: t[name])

    def build(t: Mapping[str, torch.Tensor], v: Sequence[Any], a: Sequence[Any]) -> Any:
        out = torch.view_as_complex(t[name]) if is_complex else t[name]
        return out.numpy() if numpy else out.requires_grad_(grad)

    return build


def _small_tensor_form(parser: Parser, payload: list[Any]) -> Form:
    name, shape, offset, flags = payload
    (grad,) = fields(flags, "$small_tensor", requires_grad=False) if flags else (False,)
    return "$small_tensor", name, tuple(shape), offset, bool(grad)


def _small_tensor_plan(plan: TreePlan, name: str, shape: tuple[int, ...], offset: int, grad: bool) -> Build:
    dtype = torch_dtype(name, of_data=True)
    count = plan.take(dtype, shape, offset)
    if offset % dtype.itemsize and ARRAY_ALIGNMENT % dtype.itemsize == 0:
        raise DamagedRecord(f"it holds a small tensor at {offset}, where {name} is not aligned")
    numpys = next((native for native in NUMERIC.values() if native.name == name), None)

    def build(t: Mapping[str, torch.Tensor], v: Sequence[Any], a: Sequence[Any]) -> torch.Tensor:
        if not count:
            return torch.empty(shape, dtype=dtype).requires_grad_(grad)
        if numpys is not None:  # half the time
            out = torch.from_numpy(np.ndarray(shape, numpys, a[-1], offset))
        else:
            out = torch.frombuffer(a[-1], dtype=dtype, count=count, offset=offset).view(shape)
        return out.requires_grad_() if grad else out

    return build


def _metatensor(encoder: Encoder, value: torch.Tensor, path: Path) -> Any:
    # Without importing MONAI: packed images are records too, and need none of it.
    if type(value) is not getattr(sys.modules.get("monai.data.meta_tensor"), "MetaTensor", None):
        raise unsupported(value, path)

    def node() -> Any:
        data = _tensor(encoder, value.as_subclass(torch.Tensor), path)
        encoder.on_host += 1
        try:
            return {"$metatensor": [data, encoder.pairs(vars(value), path)]}
        finally:
            encoder.on_host -= 1

    return encoder.inside(value, path, node)


def _metatensor_form(parser: Parser, payload: list[Any]) -> Form:
    data, attributes = payload
    if not parser.track_meta:
        return parser.form(data)
    return "$metatensor", *parser.forms([data]), _dict_form(parser, attributes)


def _metatensor_plan(plan: TreePlan, data: Form, attributes: Form) -> Build:
    from monai.data import MetaTensor  # takes seconds, and packed images are records without any

    plain_of, attributes_of = plan.node(data), plan.node(attributes)

    def build(t: Mapping[str, torch.Tensor], v: Sequence[Any], a: Sequence[Any]) -> MetaTensor:
        # as_subclass and the stored attributes: the constructor costs twenty times as much, and would derive them.
        plain = plain_of(t, v, a)
        out = plain.detach().as_subclass(MetaTensor)
        if plain.requires_grad:
            out.requires_grad_()
        out.__dict__ = attributes_of(t, v, a)
        return out

    return build


# The table

_LIST = _container(list, list, list, Encoder.members)

#: Types that come first when an item is taken apart. Registering one of them has no effect.
_FREQUENT = (
    Type(
        "$int", (int,), lambda e, v, p: v if -(2**63) <= v < 2**64 else {"$int": hex(v)}, _value(partial(int, base=16))
    ),
    Type("$float", (float,), lambda e, v, p: v if math.isfinite(v) else {"$float": repr(v)}, _value(float)),
    Type("$complex", (complex,), _complex, _value(_complex_of)),
    _plain("$bytes", bytes, lambda v: base64.b64encode(v).decode(), base64.b64decode),
    _LIST,
    _container("$tuple", tuple, tuple, immutable=True),
    _container("$set", set, set),
    _container("$frozenset", frozenset, frozenset, immutable=True),
    _container("$size", torch.Size, torch.Size, immutable=True),
    _container(
        "$slice", slice, lambda members: slice(*members),
        lambda e, v, p: {"$slice": e.members((v.start, v.stop, v.step), p)}, immutable=True,
    ),
    Type("$dict", (dict,), _dict, _dict_form, _dict_plan),
    Type(
        "$ordered_dict", (OrderedDict,),
        lambda e, v, p: {"$ordered_dict": e.inside(v, p, lambda: e.pairs(v, p))},
        lambda parser, pairs: ("$ordered_dict", _dict_form(parser, pairs)),
        lambda plan, form: _made(OrderedDict, plan.node(form)),
    ),
    Type("$array", (np.ndarray, np.memmap), _array, _array_form, _array_plan),
    Type("$tensor", (torch.Tensor,), _tensor, _tensor_form, _tensor_plan),
)  # fmt: skip

#: Types that yield to registered ones. Their encoders get values of subclasses too.
_OTHERS = (
    Type("$metatensor", (torch.Tensor,), _metatensor, _metatensor_form, _metatensor_plan),
    Type("$scalar", (np.generic,), _scalar, _value(_scalar_of)),
    Type("$dtype", (np.dtype,), lambda e, v, p: {"$dtype": _describe(v, v, p)}, _value(numpy_dtype)),
    Type("$enum", (enum.Enum,), _enum, _value(lambda p: enum_member(*p))),
    Type("$path", (pathlib.PurePath,), _path, lambda parser, p: parser.value(pathlib.Path(parser.text(p)))),
    Type("$namedtuple", (tuple,), _named_tuple, _named_tuple_form, _named_tuple_plan),
    _plain("$range", range, lambda v: [v.start, v.stop, v.step], lambda p: range(*p)),
    _plain("$torch_dtype", torch.dtype, dtype_name, torch_dtype),
    _plain("$device", torch.device, str, torch.device),
    _plain("$date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    _plain("$datetime", datetime.datetime, _clock, _clock_of(datetime.datetime)),
    _plain("$time", datetime.time, _clock, _clock_of(datetime.time)),
    _plain("$timedelta", datetime.timedelta, _timedelta, lambda p: datetime.timedelta(*p)),
    _plain("$timezone", datetime.timezone, _zone, _zone_of),
)

#: Nodes that the encoder makes, or a row above.
_MADE = (
    Type("$root", (), None, lambda parser, p: parser.value(parser.text({"$root": p}))),
    Type("$str", (), None, lambda parser, p: parser.value(np.str_(parser.text(p)))),
    Type("$texts", (), None, _texts_form, lambda plan, d, s, i: lambda t, v, a: np.array(v[i], d).reshape(s)),
    Type("$small_tensor", (), None, _small_tensor_form, _small_tensor_plan),
    Type(
        "$item", (), None,
        lambda parser, keys: ("$item", parser.value(tuple([k if type(k) is int else parser.text(k) for k in keys]))),
        lambda plan, path: lambda t, v, a: value_at(a[-2], v[path]),
    ),
    Type(
        "$registered", (), None, _registered_form,
        lambda plan, name, form: _made(lambda value: codec_named(name).decode(value), plan.node(form)),
    ),
    Type("$opaque", (), None, _value(_opaque_of)),
)  # fmt: skip


FIXED = {cls: row.encode for row in _FREQUENT if row.encode for cls in row.types}
OTHERS = {cls: row.encode for row in _OTHERS if row.encode for cls in row.types}
ROWS = {row.tag: row for row in (*_FREQUENT, *_OTHERS, *_MADE)}
