"""A canonical hash of Python values: equal from process to process and run to run, whatever the memory layout.

Used for the items of a dataset and for its transforms. What counts is what a value *is*: types, contents, the code of
functions. What does not count is where it happens to live or what it did last:

* identity, sharing, and the order of dicts and sets;
* a device: any ``torch.device``, an attribute named ``device``, and under such a key what names one (``"cuda:1"``);
* random state: NumPy's, Python's and torch's generators;
* what an object leaves in itself while it runs (:data:`TRANSIENT`).

Functions and lambdas count by bytecode, constants, defaults, closure and the globals they read; classes of the user's
by the code of their methods. What belongs to an installed library counts by name and the library's version, MONAI by
name (its version is an ingredient of the key by itself).
"""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import importlib.metadata
import logging
import math
import pathlib
import random
import re
import struct
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from monai_gds.errors import HashingError

__all__ = ["TRANSIENT", "canonical_hash"]

#: Attributes that are no part of a value, by the name of a class anywhere among its bases: random state, and what is
#: left behind by the last call.
TRANSIENT: dict[str, frozenset[str]] = {
    "monai.transforms.transform.Randomizable": frozenset({"R"}),
    "monai.transforms.transform.RandomizableTransform": frozenset({"R", "_do_transform"}),
    "monai.transforms.inverse.TraceableTransform": frozenset({"_tracing"}),
    "monai.data.image_reader.ImageReader": frozenset({"filenames", "has_series"}),
    "torch.nn.modules.module.Module": frozenset({"training"}),
}

#: Properties that count in place of what they are kept in, which is made on first use.
_PROPERTIES = {"monai.transforms.inverse.TraceableTransform": "tracing"}

_STANDARD_LIBRARY = tuple(sysconfig.get_path(kind) + "/" for kind in ("stdlib", "platstdlib"))

_DEVICE_NAMES = frozenset({"device", "devices"})
_RANDOM_STATES = (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)

_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE

#: Attributes of a class that say nothing of what its instances do.
_CLASS_NOISE = frozenset(
    {"__dict__", "__weakref__", "__module__", "__doc__", "__qualname__", "__annotations__", "__abstractmethods__"}
    | {"_abc_impl", "__slots__", "__firstlineno__", "__static_attributes__", "__annotate__", "__annotate_func__"}
    | {"__slotnames__"}  # left in a class when an instance of it is copied or pickled
    | {"__annotations_cache__", "__orig_bases__", "__parameters__", "__match_args__", "__hash__"}
)


def canonical_hash(value: Any) -> bytes:
    """Hashes a value canonically; see the module's docstring.

    A class of yours can say what of its data counts by a method ``__cache_key__(self)`` that returns plain data.

    Args:
        value: plain data, arrays, tensors, functions, and objects made of them.

    Returns:
        32 hex digits as ASCII bytes, the form that MONAI's ``hash_func`` has.

    Raises:
        HashingError: the value holds something without a stable content (a lock, an open file, a generator…).

    Example:
        >>> canonical_hash({"a": 1, "b": 2}) == canonical_hash({"b": 2, "a": 1})
        True
    """
    hasher = _Hasher()
    content = hasher.digest(value, "value")
    return hasher.join([content, *hasher.definitions()]).hex().encode()


class _Hasher:
    def __init__(self) -> None:
        self._open: dict[int, int] = {}  # objects being hashed, by identity, with their depth
        self._defined: dict[int, tuple[Any, str]] = {}  # functions and classes of the user's that were met

    def digest(self, value: Any, where: str) -> bytes:
        return self.join(self._parts(value, where))

    @staticmethod
    def join(parts: Iterable[bytes]) -> bytes:
        h = hashlib.blake2b(digest_size=16)
        for part in parts:
            h.update(len(part).to_bytes(8, "little"))
            h.update(part)
        return h.digest()

    def definitions(self) -> list[bytes]:
        """The globals of every function met, and the bodies of every class; as a set, each of them once.

        Functions that call each other are hashed one by one: following the calls would never end, or take a time
        exponential in their number.
        """
        found, done = set(), 0
        while done < len(self._defined):
            for value, where in list(self._defined.values())[done:]:
                parts = self._class_body(value) if isinstance(value, type) else self._globals(value, where)
                found.add(self.join([self.digest(value, where), *parts]))
                done += 1
        return sorted(found)

    def _parts(self, value: Any, where: str) -> Iterable[bytes]:
        plain = _plain(value)
        if plain is not None:
            return plain
        if id(value) in self._open:
            return [b"cycle", str(len(self._open) - self._open[id(value)]).encode()]
        self._open[id(value)] = len(self._open)
        try:
            return self._compound(value, where)
        finally:
            del self._open[id(value)]

    def _compound(self, value: Any, where: str) -> list[bytes]:
        kind = type(value)
        if kind in (list, tuple) or kind is torch.Size:
            return [b"list" if kind is list else b"tuple", *self._all(value, where)]
        if isinstance(value, (set, frozenset)):
            return [b"set", *sorted(self._all(value, where))]
        if isinstance(value, np.ndarray):
            return self._array(value, where)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if isinstance(value, type):
            return self._class(value, where)
        code = self._callable(value, where)
        if code is not None:
            return code
        return self._object(value, where)

    def _all(self, values: Iterable[Any], where: str) -> list[bytes]:
        return [self.digest(v, f"{where}[{i}]") for i, v in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], where: str) -> list[bytes]:
        pairs = []
        for key, v in value.items():
            name = f"{where}[{key!r}]"
            is_device = isinstance(key, str) and key in _DEVICE_NAMES and _names_device(v)
            content = b"device" if is_device else self.digest(v, name)
            pairs.append(self.digest(key, f"{where}'s key {key!r}") + content)
        return sorted(pairs)

    # Arrays

    def _array(self, value: np.ndarray, where: str) -> list[bytes]:
        head = [b"array", str(np.lib.format.dtype_to_descr(value.dtype)).encode(), repr(value.shape).encode()]
        if value.dtype.hasobject:
            return [*head, *self._all(value.ravel().tolist(), where)]
        return [*head, value.tobytes()]

    def _tensor(self, value: torch.Tensor, where: str) -> list[bytes]:
        if value.layout != torch.strided:
            raise HashingError(_refusal(value, where, f"layout {value.layout}"))
        plain = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        extra = []
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            extra = [self._name(type(value)), *self._mapping(vars(value), where)]
        return [b"tensor", str(value.dtype).encode(), repr(tuple(value.shape)).encode(), raw, *extra]

    # Code

    def _callable(self, value: Any, where: str) -> list[bytes] | None:
        if isinstance(value, types.FunctionType):
            return self._function(value, where)
        if isinstance(value, types.MethodType):
            return [b"method", self.digest(value.__func__, where), self.digest(value.__self__, where)]
        if isinstance(value, (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType)):
            owner = getattr(value, "__self__", None)
            bound = [] if owner is None or isinstance(owner, types.ModuleType) else [self.digest(owner, where)]
            return [b"builtin", str(getattr(value, "__module__", "")).encode(), value.__qualname__.encode(), *bound]
        if isinstance(value, functools.partial):
            inner = (value.func, value.args, value.keywords)
            return [b"partial", *(self.digest(v, f"{where}.{n}") for v, n in zip(inner, "fak", strict=True))]
        if isinstance(value, (staticmethod, classmethod)):
            return [type(value).__name__.encode(), self.digest(value.__func__, where)]
        if isinstance(value, functools.cached_property):
            return [b"property", self.digest(value.func, where)]
        if isinstance(value, property):
            return [b"property", *self._all((value.fget, value.fset, value.fdel), where)]
        if isinstance(value, types.CodeType):
            return self._code(value, where)
        if isinstance(value, types.CellType):
            return [b"cell", *([self.digest(value.cell_contents, where)] if _is_filled(value) else [])]
        wrapped = getattr(value, "__wrapped__", None)
        return None if wrapped is None else [b"wrapped", self.digest(wrapped, where)]

    def _function(self, value: types.FunctionType, where: str) -> list[bytes]:
        library = _library(value.__module__)
        named = "<" not in value.__qualname__
        if library is not None and named:
            return [b"function", library, value.__module__.encode(), value.__qualname__.encode()]
        where = f"{where} ({value.__qualname__})"
        parts = [b"code", _module_name(value.__module__), self.digest(value.__code__, where)]
        parts.append(self.digest(value.__defaults__, where + "'s defaults"))
        parts.append(self.digest(value.__kwdefaults__, where + "'s defaults"))
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            parts.append(b"device" if name in _DEVICE_NAMES else self.digest(cell, f"{where}'s variable {name}"))
        if library is None:
            self._defined.setdefault(id(value), (value, where))
        return parts

    def _globals(self, function: types.FunctionType, where: str) -> Iterable[bytes]:
        names = sorted(_names(function.__code__))
        for name in names:
            if name in function.__globals__ and name not in _DEVICE_NAMES:
                value = function.__globals__[name]
                yield name.encode() + self.digest(value, f"{where}'s global {name}")
                if isinstance(value, types.ModuleType):
                    yield from self._module(value, names, f"{where}'s {name}")

    def _module(self, module: types.ModuleType, names: list[str], where: str) -> Iterable[bytes]:
        """What code that reads these names may read of a module of the user's, and of the modules in it."""
        if _library(module.__name__) is not None:
            return
        for name in names:
            member = vars(module).get(name)
            if isinstance(member, types.ModuleType) and member.__name__.startswith(module.__name__ + "."):
                yield from self._module(member, names, f"{where}.{name}")
            elif member is not None:
                yield name.encode() + self.digest(member, f"{where}.{name}")

    def _code(self, code: types.CodeType, where: str) -> list[bytes]:
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        consts = self._all(code.co_consts, where + "'s constants")
        return [b"bytecode", code.co_code, repr(counts).encode(), repr(names).encode(), *consts]

    def _class(self, cls: type, where: str) -> list[bytes]:
        parts = [b"class", self._name(cls)]
        if _library(cls.__module__) is not None or issubclass(cls, enum.Enum):
            return parts
        if "<locals>" in cls.__qualname__:  # its name does not say which one it is
            return [*parts, *self._class_body(cls)]
        self._defined.setdefault(id(cls), (cls, where))
        return parts

    def _class_body(self, cls: type) -> list[bytes]:
        members = {k: v for k, v in vars(cls).items() if k not in _CLASS_NOISE and not _is_slot(v)}
        if hasattr(cls, "__cache_key__"):  # it says what of its data counts; code counts all the same
            members = {k: v for k, v in members.items() if callable(v) or hasattr(v, "__get__")}
        where = f"class {cls.__qualname__}"
        return [*self._mapping(members, where), *self._all(cls.__bases__, where + "'s bases")]

    def _name(self, cls: type) -> bytes:
        return b"\0".join([_library(cls.__module__) or b"", _module_name(cls.__module__), cls.__qualname__.encode()])

    # Objects

    def _object(self, value: Any, where: str) -> list[bytes]:
        head = [b"object", self.digest(type(value), where)]
        own = getattr(value, "__cache_key__", None)
        if own is not None:
            return [*head, self.digest(own(), f"{where}.__cache_key__()")]
        if isinstance(value, Mapping):
            return [*head, *self._mapping(value, where), *self._attributes(value, where)]
        if isinstance(value, types.ModuleType):
            return [b"module", _library(value.__name__) or b"", value.__name__.encode()]
        # A class written in C (str, deque, an open file…) holds what no attribute shows; pickling shows it.
        native = [] if _is_python(type(value)) else self._reduced(value, where)
        return [*head, *native, *self._attributes(value, where)]

    def _attributes(self, value: Any, where: str) -> Iterable[bytes]:
        skip: set[str] = set()
        state = dict(getattr(value, "__dict__", {}))
        for cls in type(value).__mro__:
            name = f"{cls.__module__}.{cls.__qualname__}"
            skip |= TRANSIENT.get(name, frozenset())
            if name in _PROPERTIES:
                state[_PROPERTIES[name]] = getattr(value, _PROPERTIES[name])
            slots = vars(cls).get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                    state[slot] = getattr(value, slot)
        for name in sorted(state.keys() - skip - _DEVICE_NAMES, key=str):
            yield str(name).encode() + self.digest(state[name], f"{where}.{name}")

    def _reduced(self, value: Any, where: str) -> Iterable[bytes]:
        """An object of a C type, by the parts that it would be pickled as."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            parts = reduce(value) if reduce else value.__reduce_ex__(2)
        except Exception as e:
            raise HashingError(_refusal(value, where, str(e))) from e
        if isinstance(parts, str):
            return [parts.encode()]
        has_attributes = hasattr(value, "__dict__")  # then parts[2] repeats them, transient ones too
        shown = [p for i, p in enumerate(parts) if i != 2 or not has_attributes]
        return [self.digest(list(p) if hasattr(p, "__next__") else p, where) for p in shown]


def _plain(value: Any) -> list[bytes] | None:
    """The parts of a value that holds no others."""
    if value is None or isinstance(value, (bool, type(...), type(NotImplemented))):
        return [b"singleton", repr(value).encode()]
    if isinstance(value, enum.Enum):
        return [b"enum", type(value).__qualname__.encode(), value.name.encode()]
    kind = type(value)
    if kind is str:
        return [b"str", value.encode("utf-8", "surrogatepass")]
    if kind is int:
        return [b"int", hex(value).encode()]
    if kind is float:
        return [b"float", b"nan" if math.isnan(value) else struct.pack("<d", value)]
    if kind is complex:
        return [b"complex", struct.pack("<dd", value.real, value.imag)]
    if kind in (bytes, bytearray):
        return [b"bytes", bytes(value)]
    if isinstance(value, pathlib.PurePath):
        return [b"path", str(value).encode("utf-8", "surrogatepass")]
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return [b"scalar", str(value.dtype).encode(), value.tobytes()]
    if isinstance(value, (np.dtype, torch.dtype)):
        return [b"dtype", str(value).encode()]
    if isinstance(value, torch.device):
        return [b"device"]
    if isinstance(value, _RANDOM_STATES):
        return [b"random state"]
    if isinstance(value, logging.Logger):
        return [b"logger", value.name.encode()]
    if isinstance(value, re.Pattern):
        return [b"pattern", repr((value.pattern, value.flags)).encode()]
    if isinstance(value, (slice, range)):
        return [kind.__name__.encode(), repr((value.start, value.stop, value.step)).encode()]
    return None


def _names_device(value: Any) -> bool:
    """Whether a string names a device of torch's; a scanner of that name in an item counts as what it is."""
    return isinstance(value, str) and re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", value) is not None


def _names(code: types.CodeType) -> set[str]:
    """Names that a function and the functions inside it look up."""
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names(const)
    return names


def _is_python(cls: type) -> bool:
    """Whether a class and all its bases are written in Python, so that attributes are all that there is."""
    keeps_attributes = False
    for base in reversed(cls.__mro__[:-1]):
        keeps_attributes |= "__dict__" in vars(base) or "__slots__" in vars(base)
        if not keeps_attributes or base.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) != _HEAP_TYPE:
            return False
    return True


def _module_name(module: str | None) -> bytes:
    return (module or "").replace("__mp_main__", "__main__").encode()  # what a spawned worker calls the script


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _is_slot(member: Any) -> bool:
    return isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType))


@functools.lru_cache(maxsize=1024)
def _library(module: str | None) -> bytes | None:
    """Name and version of the installed library that a module belongs to, or None for code of the user's."""
    root = (module or "builtins").partition(".")[0]
    if root in ("monai", "monai_gds"):
        return root.encode()
    file = getattr(sys.modules.get(root), "__file__", None)
    if file is None:  # built in, or a namespace
        return root.encode() if root in sys.stdlib_module_names else None
    if "/site-packages/" not in file and "/dist-packages/" not in file:
        return root.encode() if file.startswith(_STANDARD_LIBRARY) else None
    try:
        version = importlib.metadata.version(root)
    except importlib.metadata.PackageNotFoundError:
        version = str(getattr(sys.modules[root], "__version__", ""))
    return f"{root} {version}".encode()


def _refusal(value: Any, where: str, why: str) -> str:
    cls = type(value)
    return (
        f"{where} is a {cls.__module__}.{cls.__qualname__}, which cannot be hashed stably ({why}). Give its class a "
        "method __cache_key__(self) that returns plain data, or pass your own hash_func (for items) or hash_transform "
        "(for transforms; hash_transform=None leaves them out of the key)"
    )
