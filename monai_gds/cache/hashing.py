"""A canonical hash of Python values: equal from process to process and run to run, whatever the memory layout.

Used for the items of a dataset and for its transforms. A value counts by its contents: types, data, the code of
functions. It does not count where it lives or what it did last: identity, sharing, and the order of dicts and sets.

Functions and lambdas count by bytecode, constants, defaults, closure and the globals they read; classes of the user's
by the code of their methods. Code of an installed library counts by name and the library's version, MONAI's by name
(its version is an ingredient of the key by itself).

Transforms are hashed for what they compute, so some of their state is left out:

* a device: any ``torch.device``, and whatever names one (``"cuda:1"``, None) as an attribute, a variable or under a key
  called ``device``;
* random state: NumPy's, Python's and torch's generators;
* what an object leaves in itself while it runs (:data:`TRANSIENT`), and readers of ``LoadImage`` that nobody asked for.

The data of an item is passed on by transforms, so everything in it counts.

The walk that hashes transforms also describes them: ``{attribute path: short text}``, from which two pipelines are
compared when a hit was expected (:mod:`monai_gds.cache.explain`), and it collects the strings it meets, which may name
files.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import dis
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import math
import pathlib
import random
import re
import struct
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from monai_gds.cache.rooted import below
from monai_gds.errors import HashingError

__all__ = ["TRANSIENT", "HashedTransforms", "canonical_hash", "hash_item", "hash_transforms"]

#: Attributes that are no part of a value, by the name of a class anywhere among its bases: random state, and what is
#: left behind by the last call.
TRANSIENT: dict[str, frozenset[str]] = {
    "monai.transforms.transform.Randomizable": frozenset({"R"}),
    "monai.transforms.transform.RandomizableTransform": frozenset({"R", "_do_transform"}),
    "monai.transforms.inverse.TraceableTransform": frozenset({"_tracing"}),
    "monai.data.image_reader.ImageReader": frozenset({"filenames", "has_series"}),
}

#: Properties that count in place of what they are kept in, which is made on first use.
_PROPERTIES = {"monai.transforms.inverse.TraceableTransform": "tracing"}

#: Attributes of MONAI's that count in part, by the name of their class.
_READERS = ("monai.transforms.io.array.LoadImage", "readers")

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
    return _Hasher().hash(value, "value").encode()


def hash_item(item: Any, root: str | None = None) -> str:
    """Hashes an item of a dataset: everything in it counts, for transforms pass it on.

    Args:
        item: as for :func:`canonical_hash`.
        root: paths below this folder count by what follows it.

    Returns:
        32 hex digits.

    Raises:
        HashingError: as by :func:`canonical_hash`.
    """
    return _Hasher(root, exact=True).hash(item, "item")


@dataclass(frozen=True, slots=True)
class HashedTransforms:
    """What one walk over transforms found.

    Attributes:
        digest: 32 hex digits.
        description: ``{attribute path: short text}`` of what counts.
        strings: every string met, without those of transforms that write files.
        names_cuda: whether a CUDA device is named, so that CUDA's settings matter.
        requires_grad: whether a tensor requires a gradient, so that the grad mode matters.
    """

    digest: str
    description: dict[str, str]
    strings: frozenset[str]
    names_cuda: bool
    requires_grad: bool


def hash_transforms(transforms: Sequence[Callable[..., Any]], root: str | None = None) -> HashedTransforms:
    """Hashes transforms and describes them.

    Args:
        transforms: what computes an item, in order.
        root: paths below this folder count by what follows it.

    Raises:
        HashingError: as by :func:`canonical_hash`.
    """
    hasher = _Hasher(root, describes=True)
    digests = []
    for i, transform in enumerate(transforms):
        name = getattr(transform, "__qualname__", type(transform).__qualname__)
        digests.append(hasher.digest(transform, f"transforms[{i}] {name}"))
    digest = hasher.join([*digests, *hasher.definitions()]).hex()
    return HashedTransforms(
        digest, hasher.description or {}, frozenset(hasher.strings), hasher.names_cuda, hasher.requires_grad
    )


class _Hasher:
    """One walk.

    Args:
        root: see :func:`hash_item`.
        exact: devices, random states and the sign of a NaN count.
        describes: fill ``description`` and ``strings``.
    """

    #: Containers with more members are described by their digest.
    _MOST_DESCRIBED = 32

    def __init__(self, root: str | None = None, *, exact: bool = False, describes: bool = False) -> None:
        self._open: dict[int, int] = {}  # objects being hashed, by identity, with their depth
        self._defined: dict[int, tuple[Any, str]] = {}  # functions and classes of the user's that were met
        self._root = root
        self._exact = exact
        self._writes_files = 0  # > 0 inside a transform that writes the files it names
        self.description: dict[str, str] | None = {} if describes else None
        self.strings: set[str] = set()
        self.names_cuda = False
        self.requires_grad = False

    def hash(self, value: Any, where: str) -> str:
        """The hash of a value, as 32 hex digits."""
        content = self.digest(value, where)
        return self.join([content, *self.definitions()]).hex()

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
                code = self.join([self.digest(value, where), *parts])
                self._describe(f"{value.__module__}.{value.__qualname__}", f"code {code.hex()[:8]}")
                found.add(code)
                done += 1
        return sorted(found)

    def _parts(self, value: Any, where: str) -> Iterable[bytes]:
        plain = self._plain(value, where)
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
            return [kind.__name__.encode(), *self._all(value, where)]
        if isinstance(value, (set, frozenset)):
            with self._silence():
                members = sorted(self._all(value, where))
            self._describe(where, f"a set of {len(members)}, {self.join(members).hex()[:8]}")
            if kind in (set, frozenset):
                return [kind.__name__.encode(), *members]
            return [b"set", self._name(kind), *self._attributes(value, where), *members]
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

    def _plain(self, value: Any, where: str) -> list[bytes] | None:
        """The parts of a value that holds no others."""
        if isinstance(value, (str, pathlib.PurePath)) and not isinstance(value, enum.Enum):
            if self.description is not None and not self._writes_files:
                self.strings.add(str(value))
            rest = None if self._root is None else below(str(value), self._root)
            if rest is not None:
                self._describe(where, f"<root>{rest}")
                return [b"below the root", type(value).__name__.encode(), rest.encode("utf-8", "surrogatepass")]
        if isinstance(value, torch.device):
            self.names_cuda |= value.type == "cuda"
            return [b"device", str(value).encode()] if self._exact else [b"device"]
        if isinstance(value, _RANDOM_STATES) and not self._exact:
            return [b"random state"]
        if type(value) is float and math.isnan(value) and not self._exact:
            plain: list[bytes] | None = [b"float", b"nan"]
        else:
            plain = _plain(value)
        if plain is not None:
            if self.description is not None:
                self._describe(where, _short(value))
            if isinstance(value, enum.Enum) and _library(type(value).__module__) is None:
                plain.append(self.digest(value.value, f"{where}.value"))
        return plain

    def _describe(self, where: str, text: str) -> None:
        if self.description is not None:
            self.description[where] = text

    @contextlib.contextmanager
    def _silence(self) -> Iterator[None]:
        """Nothing is described meanwhile, but strings are collected."""
        kept, self.description = self.description, {} if self.description is not None else None
        try:
            yield
        finally:
            self.description = kept

    def _all(self, values: Sequence[Any] | Iterable[Any], where: str) -> list[bytes]:
        members = list(values)
        if self.description is None or len(members) <= self._MOST_DESCRIBED:
            return [self.digest(v, f"{where}[{i}]") for i, v in enumerate(members)]
        with self._silence():
            found = [self.digest(v, where) for v in members]
        self._describe(where, f"{len(members)} values, {self.join(found).hex()[:8]}")
        return found

    def _mapping(self, value: Mapping[Any, Any], where: str) -> list[bytes]:
        pairs = []
        for key, v in value.items():
            name = f"{where}[{key!r}]"
            content = b"device" if self._is_device(key, v) else self.digest(v, name)
            pairs.append(self.digest(key, f"{where}'s key {key!r}") + content)
        return sorted(pairs)

    def _is_device(self, name: Any, value: Any) -> bool:
        """Whether this is a transform's device, which does not count: another one gives the same item elsewhere."""
        if self._exact or not isinstance(name, str) or name not in _DEVICE_NAMES or not _names_device(value):
            return False
        self.names_cuda |= "cuda" in str(value)
        return True

    # Arrays

    def _array(self, value: np.ndarray, where: str) -> list[bytes]:
        head = [b"array", str(np.lib.format.dtype_to_descr(value.dtype)).encode(), repr(value.shape).encode()]
        if value.dtype.hasobject:
            return [*head, *self._all(value.ravel().tolist(), where)]
        if value.dtype.kind == "U" and (self._root is not None or self.description is not None):
            head.extend(self._all(value.ravel().tolist(), where))  # its strings may be paths
            if self._root is not None:
                return [*head[:1], *head[2:]]  # the width of the dtype hangs on the root's length
        data = _data_digest(value)
        self._describe(where, _short_array(value, data))
        if type(value) in (np.ndarray, np.memmap):
            return [*head, data]
        extra = [self._name(type(value))]
        if isinstance(value, np.ma.MaskedArray):
            mask = [np.ma.getmaskarray(value), value.fill_value, value.mask is np.ma.nomask, value.hardmask]
            extra.append(self.digest(mask, f"{where}'s mask"))
        return [*head, data, *extra]

    def _tensor(self, value: torch.Tensor, where: str) -> list[bytes]:
        if value.layout != torch.strided or value.is_nested or value.is_meta:
            raise HashingError(_refusal(value, where, f"layout {value.layout}, device {value.device}"))
        plain = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
        data = _data_digest(raw)
        self._describe(where, f"tensor {str(value.dtype)[6:]} {tuple(value.shape)} {data.hex()[:8]}")
        extra = []
        if value.is_quantized:
            extra.append(self.digest(value.dequantize(), f"{where}'s values"))
        if value.requires_grad:
            self.requires_grad = True
            extra.append(b"requires grad")
        if type(value) is torch.nn.Parameter:
            extra.append(b"parameter")
        elif type(value) is not torch.Tensor:
            extra.extend([self._name(type(value)), *self._mapping(vars(value), where)])
        return [b"tensor", str(value.dtype).encode(), repr(tuple(value.shape)).encode(), data, *extra]

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
            self._describe_library(library)
            return [b"function", library, value.__module__.encode(), value.__qualname__.encode()]
        where = f"{where} ({value.__qualname__})"
        parts = [b"code", _module_name(value.__module__), self.digest(value.__code__, where)]
        parts.append(self.digest(value.__defaults__, where + "'s defaults"))
        parts.append(self.digest(value.__kwdefaults__, where + "'s defaults"))
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            content = cell.cell_contents if _is_filled(cell) else cell
            parts.append(
                b"device" if self._is_device(name, content) else self.digest(cell, f"{where}'s variable {name}")
            )
        if library is None:
            self._defined.setdefault(id(value), (value, where))
        return parts

    def _globals(self, function: types.FunctionType, where: str) -> Iterable[bytes]:
        """What a function reads of its module, of modules of the user's, and of attributes of the user's functions."""
        names = sorted(_names(function.__code__))
        for name in names:
            if name in function.__globals__ and not self._is_device(name, function.__globals__[name]):
                value = function.__globals__[name]
                yield name.encode() + self.digest(value, f"{where}'s global {name}")
                if isinstance(value, types.ModuleType):
                    yield from self._module(value, names, f"{where}'s {name}")
                elif isinstance(value, types.FunctionType) and _library(value.__module__) is None:
                    own = {n: v for n, v in vars(value).items() if n in names}
                    yield from (self._mapping(own, f"{where}'s {name}") if own else ())
        for module in _imported(function):
            yield from self._module(module, names, f"{where}'s {module.__name__}")

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
        return [b"bytecode", code.co_code, code.co_exceptiontable, repr(counts).encode(), repr(names).encode(), *consts]

    def _class(self, cls: type, where: str) -> list[bytes]:
        parts = [b"class", self._name(cls)]
        if _library(cls.__module__) is not None:
            return parts
        if issubclass(cls, enum.Enum):
            return [*parts, *self._mapping({name: m.value for name, m in cls.__members__.items()}, where)]
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

    def _describe_library(self, library: bytes) -> None:
        name, _, version = library.decode().partition(" ")
        if version:
            self._describe(f"library {name}", version)

    def _name(self, cls: type) -> bytes:
        self._describe_library(_library(cls.__module__) or b"")
        return b"\0".join([_library(cls.__module__) or b"", _module_name(cls.__module__), cls.__qualname__.encode()])

    # Objects

    def _object(self, value: Any, where: str) -> list[bytes]:
        head = [b"object", self.digest(type(value), where)]
        own = getattr(value, "__cache_key__", None)
        if own is not None:
            return [*head, self.digest(own(), f"{where}.__cache_key__()")]
        writes = _writes_files(value)
        self._writes_files += writes
        try:
            return [*head, *self._contents(value, where)]
        finally:
            self._writes_files -= writes

    def _contents(self, value: Any, where: str) -> list[bytes]:
        if isinstance(value, Mapping):
            own: list[Any] = []  # what a type adds to a dict
            if isinstance(value, collections.OrderedDict):
                own = list(value)
            elif isinstance(value, collections.defaultdict):
                own = [value.default_factory]
            with self._silence():
                extra = self._all(own, f"{where}'s own")
            return [*extra, *self._mapping(value, where), *self._attributes(value, where)]
        if isinstance(value, types.ModuleType):
            return [b"module", _library(value.__name__) or b"", value.__name__.encode()]
        # A class written in C (str, deque, an open file…) holds what no attribute shows; pickling shows it.
        native = [] if _is_python(type(value)) else self._reduced(value, where)
        return [*native, *self._attributes(value, where)]

    def _attributes(self, value: Any, where: str) -> Iterable[bytes]:
        skip: set[str] = set()
        state = dict(getattr(value, "__dict__", {}))
        for cls in type(value).__mro__:
            name = f"{cls.__module__}.{cls.__qualname__}"
            skip |= TRANSIENT.get(name, frozenset())
            if name in _PROPERTIES:
                state[_PROPERTIES[name]] = getattr(value, _PROPERTIES[name])
            if name == "torch.nn.modules.module.Module":  # Sequential runs its modules in this order
                state["order of _modules"] = list(value._modules)
            if name == _READERS[0]:
                state[_READERS[1]] = _asked_readers(value)
            slots = vars(cls).get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                    state[slot] = getattr(value, slot)
        for name in sorted(state.keys() - skip, key=str):
            if not self._is_device(name, state[name]):
                yield str(name).encode() + self.digest(state[name], f"{where}.{name}")

    def _reduced(self, value: Any, where: str) -> Iterable[bytes]:
        """An object of a C type, by the parts that it would be pickled as."""
        getattr(value, "__dict__", None)  # many types make it when it is first asked for, and show it from then on
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            parts = reduce(value) if reduce else value.__reduce_ex__(4)  # 4: a datetime's fold is left out before
        except Exception as e:
            raise HashingError(_refusal(value, where, str(e))) from e
        if isinstance(parts, str):
            return [parts.encode()]
        shown = [p for i, p in enumerate(parts) if i != 2 or not _repeats_attributes(p, value)]
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
        return [b"float", struct.pack("<d", value)]
    if kind is complex:
        return [b"complex", struct.pack("<dd", value.real, value.imag)]
    if kind in (bytes, bytearray):
        return [kind.__name__.encode(), bytes(value)]
    if isinstance(value, pathlib.PurePath):
        return [b"path", kind.__name__.encode(), str(value).encode("utf-8", "surrogatepass")]
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return [b"scalar", str(value.dtype).encode(), value.tobytes()]
    if isinstance(value, (np.dtype, torch.dtype)):
        return [b"dtype", str(value).encode()]
    if isinstance(value, logging.Logger):
        return [b"logger", value.name.encode()]
    if isinstance(value, re.Pattern):
        return [b"pattern", repr((value.pattern, value.flags)).encode()]
    if isinstance(value, (slice, range)):
        return [kind.__name__.encode(), repr((value.start, value.stop, value.step)).encode()]
    return None


def _names_device(value: Any) -> bool:
    """Whether a value names devices of torch's; a scanner called that way counts as what it is."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_names_device, value))
    if value is None or isinstance(value, torch.device):
        return True
    return isinstance(value, str) and re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", value) is not None


def _data_digest(array: np.ndarray) -> bytes:
    """16 bytes of XXH3 over an array's data in C order: at the speed of memory, where a cryptographic hash is not."""
    if not array.dtype.itemsize or not array.size:
        return b""
    if not _is_frozen(array):
        return _digest_now(array)
    known = _frozen.get(id(array))
    if known is None or known[0]() is not array:
        forget = functools.partial(_frozen.pop, id(array), None)
        known = weakref.ref(array, lambda _: forget()), _digest_now(array)
        _frozen[id(array)] = known
    return known[1]


#: Digests of arrays that cannot change, by their ids.
_frozen: dict[int, tuple[weakref.ref[np.ndarray], bytes]] = {}


def _is_frozen(array: np.ndarray) -> bool:
    """Whether nobody can change an array's data: it lies in ``bytes``. Of any other there may be writable views."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, bytes) and array.flags.c_contiguous


def _digest_now(array: np.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _short(value: Any) -> str:
    text = hex(value) if type(value) is int and value.bit_length() > 64 else repr(value)  # Python limits decimal digits
    if len(text) <= 80:
        return text
    return f"{text[:60]}… ({len(text)} characters, {hashlib.blake2b(text.encode('utf-8', 'replace')).hexdigest()[:8]})"


def _short_array(value: np.ndarray, data: bytes) -> str:
    if value.size <= 16 and value.dtype.kind in "biufc":
        return f"{value.tolist()} {value.dtype}"
    return f"array {value.dtype} {value.shape} {data.hex()[:8]}"


def _writes_files(value: Any) -> bool:
    """Whether this is a transform of MONAI's that writes the files that it names: they are no input of it."""
    return any(
        c.__module__.startswith("monai.") and c.__name__.startswith(("Save", "Write")) for c in type(value).__mro__
    )


def _asked_readers(loader: Any) -> list[Any]:
    """The readers of a ``LoadImage`` that decide what it reads.

    Without ``reader=`` the file's suffix chooses among all that are installed, and all count. With ``reader=`` MONAI
    registers the default ones all the same, in front of those that were asked for, and which those are hangs on the
    libraries that are installed.
    """
    readers = list(loader.readers)
    if loader.auto_select:
        return readers
    from monai.transforms.io.array import SUPPORTED_READERS, get_default_reader_registration_order

    default = iter([SUPPORTED_READERS[name] for name in get_default_reader_registration_order()])
    asked = 0
    for reader in readers:
        if not any(type(reader) is cls for cls in default):  # `default` goes on behind the one that was found
            break
        asked += 1
    return readers[asked:] or readers


def _names(code: types.CodeType) -> set[str]:
    """Names that a function and the functions inside it look up."""
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names(const)
    return names


def _imported(function: types.FunctionType) -> Iterator[types.ModuleType]:
    """Modules of the user's that a function imports when it is called; they are imported here already."""
    for name, members in sorted(_imports(function.__code__, function.__globals__.get("__package__") or "")):
        with contextlib.suppress(Exception):  # the function may expect that it fails
            if _is_installed(name.partition(".")[0]):
                continue
            module = importlib.import_module(name)
            for member in members:
                if not hasattr(module, member):
                    importlib.import_module(f"{name}.{member}")
            yield module
            if "." in name:
                yield sys.modules[name.partition(".")[0]]


def _imports(code: types.CodeType, package: str) -> set[tuple[str, tuple[str, ...]]]:
    """Modules that a function and the functions inside it import, each with the names that are taken from it."""
    found = set()
    before: list[Any] = [0, None]
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            level, members = before
            name = (
                importlib.util.resolve_name("." * level + instruction.argval, package) if level else instruction.argval
            )
            found.add((name, members or ()))
        before = [before[1], instruction.argval]
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _imports(const, package)
    return found


def _is_installed(root: str) -> bool:
    """Whether a top-level module is of an installed library, which is not imported to find out."""
    if root in sys.modules:
        return _library(root) is not None
    spec = None if root in sys.stdlib_module_names else importlib.util.find_spec(root)
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return spec is None or any("/site-packages/" in place or "/dist-packages/" in place for place in places)


def _is_python(cls: type) -> bool:
    """Whether a class and all its bases are written in Python, so that attributes are all that there is."""
    keeps_attributes = False
    for base in reversed(cls.__mro__[:-1]):
        keeps_attributes |= "__dict__" in vars(base) or "__slots__" in vars(base)
        if not keeps_attributes or base.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) != _HEAP_TYPE:
            return False
    return True


def _repeats_attributes(state: Any, value: Any) -> bool:
    """Whether the state that an object would be pickled with is nothing but its attributes, transient ones too."""
    pieces = state if isinstance(state, tuple) and len(state) == 2 else (state,)  # of __dict__, and of slots
    attributes = getattr(value, "__dict__", {})
    return all(
        piece is None or (isinstance(piece, dict) and all(k in attributes or hasattr(value, k) for k in piece))
        for piece in pieces
    )


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
