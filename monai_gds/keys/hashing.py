"""A canonical hash of Python values: equal in every process and run, whatever the memory layout.

Used for the items of a dataset and for its transforms. A value counts by its contents: types, data, the code of
functions. Identity, sharing, and the order of dicts and sets do not count. Of dicts that transforms hold, the order
counts: a transform may make a channel of each member.

Functions and lambdas count by bytecode, constants, defaults, closure and the globals they read, and a user's own
classes by the code of their methods. Code of an installed library counts by name and the library's version.

Transforms are hashed for what they compute, so some of their state is left out:

* a device: any ``torch.device``, and anything that names one (``"cuda:1"``, None) as an attribute, as a variable, or
  under a key called ``device``;
* random state: generators of NumPy, Python and torch;
* what the layer above declares to be transient (:func:`register_library`).

Transforms pass the data of an item on, so everything in an item counts.

The walk that hashes transforms also describes them as ``{attribute path: short text}``, which is how two pipelines are
compared when an expected hit did not happen (:mod:`monai_gds.folder.explain`). It also collects the strings it meets,
which may name files.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import enum
import functools
import gc
import hashlib
import logging
import math
import os
import pathlib
import random
import re
import struct
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import xxhash

from monai_gds.base.data_root import below
from monai_gds.errors import HashingError
from monai_gds.keys.code import (
    UNVERSIONED,
    as_in_the_script,
    attributes_of,
    globals_read,
    handed_on,
    has_code_of_a_user,
    is_filled,
    is_pure_python,
    is_slot,
    library_of,
    library_of_class,
    library_of_function,
    member_of,
    module_name,
    modules_imported,
    names_read,
    own_attribute,
    texts_in,
)

__all__ = [
    "HashedTransforms",
    "LibraryClasses",
    "canonical_hash",
    "hash_item",
    "hash_transforms",
    "register_library",
]


@dataclass(frozen=True, slots=True)
class LibraryClasses:
    """What the hasher must know about the classes of a library. Their subclasses are covered."""

    # Attributes that do not count, by class: random state, and what the last call left behind.
    transient: Mapping[str, frozenset[str]]
    # Attributes that count by a function of the object, by class and name.
    computed: Mapping[str, Mapping[str, Callable[[Any], Any]]]
    # Whether a class writes the files its attributes name, so that they are not its inputs.
    writes_files: Callable[[type], bool]
    # The global dict in which functions look others up by constant keys; all else in it does not count.
    references: str


_libraries: dict[str, LibraryClasses] = {}


def register_library(name: str, classes: LibraryClasses) -> None:
    """Teaches the hasher the classes of a library, which from now on counts by name.

    The caller makes the library's version an ingredient of keys. Classes are named as ``"package.module.Class"``.
    """
    _libraries[name] = classes
    UNVERSIONED.add(name)
    library_of.cache_clear()


_DEVICE = "cpu|cuda|mps|xpu"
_DEVICE_NAMES = frozenset({"device", "devices"})
_RANDOM_STATES = (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)

#: The code of every function that ``functools.singledispatch`` made.
_SINGLE_DISPATCH = cast(Any, functools.singledispatch(len)).__code__

_WRAPPERS = (functools.partial, staticmethod, classmethod, functools.cached_property, property)

#: Attributes of wrappers that count otherwise, or are copied from what is wrapped.
_OF_WRAPPERS = frozenset({*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "func", "attrname", "lock"})

_BUILT_IN = (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType)

#: Functions of modules that Cython compiled. Their types are in no module of a name.
_OF_CYTHON = ("cython_function_or_method", "fused_cython_function")

#: Attributes that do not count, by class: what objects of libraries remember of calls and of the process.
_REMEMBERED = {
    "numpy.vectorize": frozenset({"_ufunc"}),
    "omegaconf.base.Node": frozenset({"_flags_cache"}),
    "pydantic._internal._decorators.Decorator": frozenset({"cls_ref"}),  # an address in memory
    "torch._dynamo.convert_frame.ConvertFrameBox": frozenset({"error_on_graph_break"}),
    "torch._dynamo.eval_frame.OptimizedModule": frozenset({"_torchdynamo_wrapper_id"}),  # another
    "torch.nn.modules.rnn.RNNBase": frozenset({"_flat_weight_refs"}),
    "torch.utils.hooks.RemovableHandle": frozenset({"hooks_dict_ref", "extra_dict_ref", "id"}),
}

#: The types of most values, which have no code of a user's: their classes are not looked at.
_NUMBERS_AND_TEXTS = frozenset({str, int, float, bool, type(None), bytes})

#: The base of DataFrame and Series.
_OF_PANDAS = ("pandas.core.generic", "NDFrame")

_METHODS = (types.FunctionType, property, functools.cached_property, classmethod, staticmethod)

#: What torch keeps in a module under keys that count all hooks of a process.
_HOOKS = frozenset(name for name in vars(torch.nn.Module()) if "_hooks" in name)

#: Attributes of a class that have no effect on what its instances do.
_CLASS_NOISE = frozenset(
    {"__dict__", "__weakref__", "__module__", "__doc__", "__qualname__", "__annotations__", "__abstractmethods__"}
    | {"_abc_impl", "__slots__", "__firstlineno__", "__static_attributes__", "__annotate__", "__annotate_func__"}
    | {"__slotnames__"}  # left behind by copying or pickling an instance
    | {"__annotations_cache__", "__orig_bases__", "__parameters__", "__match_args__", "__hash__"}
    # what pydantic makes of fields and decorators, with addresses in memory, and what it remembers of calls
    | {"__pydantic_core_schema__", "__pydantic_validator__", "__pydantic_serializer__", "__pydantic_complete__"}
    | {"__pydantic_setattr_handlers__", "__signature__"}
)


def canonical_hash(value: Any) -> bytes:
    """Hashes a value canonically; see the module's docstring.

    A class can declare which of its data count by a method ``__cache_key__(self)`` that returns plain data.

    Args:
        value: plain data, arrays, tensors, functions, and objects made of them.

    Returns:
        32 hex digits as ASCII bytes, as MONAI's ``hash_func`` returns.

    Raises:
        HashingError: the value holds something without a stable content (a lock, an open file, a generator…).

    Example:
        >>> canonical_hash({"a": 1, "b": 2}) == canonical_hash({"b": 2, "a": 1})
        True
    """
    return _Hasher().hash(value, "value").encode()


def hash_item(item: Any, root: str | None = None) -> str:
    """Hashes an item of a dataset, as 32 hex digits. Everything in it counts, since transforms pass it on.

    Args:
        item: as for :func:`canonical_hash`.
        root: paths below this folder count by the part that follows it.

    Raises:
        HashingError: as by :func:`canonical_hash`.
    """
    return _Hasher(root, exact=True).hash(item, "item")


@dataclass(frozen=True, slots=True)
class HashedTransforms:
    """The result of hashing transforms."""

    digest: str  # 32 hex digits
    description: dict[str, str]  # ``{attribute path: short text}`` of everything that counts
    strings: frozenset[str]  # every string met, except in transforms that write files
    devices: frozenset[str]  # types of the devices named, such as ``"cuda"``, whose settings may matter
    requires_grad: bool  # whether a tensor requires a gradient, so that the grad mode matters


def hash_transforms(transforms: Sequence[Callable[..., Any]], root: str | None = None) -> HashedTransforms:
    """Hashes and describes transforms, in the order in which they run. Otherwise as :func:`hash_item`."""
    hasher = _Hasher(root, describes=True, ordered=True)
    digests = []
    for i, transform in enumerate(transforms):
        name = own_attribute(transform, "__qualname__") or type(transform).__qualname__
        digests.append(hasher.digest(transform, f"transforms[{i}] {name}"))
    digest = hasher.join([*digests, *hasher.definitions()]).hex()
    return HashedTransforms(
        digest,
        hasher.description or {},
        frozenset(hasher.strings),
        frozenset(hasher.devices),
        hasher.requires_grad,
    )


class _Hasher:
    """One walk over a value.

    Args:
        root: see :func:`hash_item`.
        exact: whether devices, random states and the sign of a NaN count.
        describes: whether to fill ``description`` and ``strings``.
        ordered: whether the order of dicts counts.
    """

    #: Containers with more members are described by their digest.
    _MOST_DESCRIBED = 32

    def __init__(
        self, root: str | None = None, *, exact: bool = False, describes: bool = False, ordered: bool = False
    ) -> None:
        self._open: dict[int, int] = {}  # depths of the objects being hashed, by id
        self._defined: dict[int, tuple[Any, str]] = {}  # the user's own functions and classes met so far
        # Digests of the user's enums, each with whether it was met where strings are not collected.
        self._enums: dict[tuple[type, bool], bytes] = {}
        self._in_enum = False
        self._classes: dict[bytes, type] = {}  # the user's own, by name: a function may make several of one name
        # Ids of the variables of modules, by the digest of what is alike in the user's functions that read them.
        self._namespaces: dict[bytes, list[int]] = {}
        self._modules: dict[int, tuple[types.ModuleType, str]] = {}  # the user's own that are handed on
        self._names: set[str] = set()  # that the user's functions read
        self._read: set[tuple[int, str]] = set()  # members of modules and functions that count already, by their ids
        self._root = root
        self._exact = exact
        self._ordered = ordered
        self._writes_files = 0  # > 0 inside a transform that writes the files it names
        self.description: dict[str, str] | None = {} if describes else None
        self.strings: set[str] = set()
        self.devices: set[str] = set()
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
        """Digests of the functions and classes met, each once, with the globals and class bodies they consist of.

        Functions that call each other are hashed one by one. Following the calls would never end, or take time
        exponential in their number.
        """
        found: set[bytes] = set()
        done = 0
        let_pass: tuple[type[Exception], ...] = ()
        while True:
            while done < len(self._defined):
                for value, where in list(self._defined.values())[done:]:
                    done += 1
                    with contextlib.suppress(*let_pass):
                        found.add(self._definition(value, where))
            modules = len(self._modules)
            members = {*self._members_of_modules(), *self._attributes_of_functions()}
            if not members and done == len(self._defined) and modules == len(self._modules):
                return sorted(found)
            found |= members
            let_pass = (HashingError,)  # perhaps nobody reads what is defined there

    def _definition(self, value: Any, where: str) -> bytes:
        with self._silence():  # it was described where it was met
            head = self.digest(value, where)
        parts = self._class_body(value) if isinstance(value, type) else self._globals(value, where)
        code = self.join([head, *parts])
        self._describe(_class_place(value) if isinstance(value, type) else where, f"code {code.hex()[:8]}")
        return code

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
            return [b"set", self._name(kind), *self._own_code(kind, where), *self._attributes(value, where), *members]
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
        """The parts of a value that holds no others; None for any other value."""
        if isinstance(value, (str, pathlib.PurePath)) and not isinstance(value, enum.Enum):
            if self.description is not None and not self._writes_files:
                self.strings.add(str(value))
            rest = None if self._root is None else below(str(value), self._root)
            if rest is not None:
                self._describe(where, f"<root>{rest}")
                return [b"below the root", type(value).__name__.encode(), rest.encode("utf-8", "surrogatepass")]
        if isinstance(value, torch.device):
            self.devices.add(value.type)
            return [b"device", str(value).encode()] if self._exact else [b"device"]
        if isinstance(value, _RANDOM_STATES) and not self._exact:
            return [b"random state", *self._own_code(type(value), where)]
        if type(value) is float and math.isnan(value) and not self._exact:
            plain: list[bytes] | None = [b"float", b"nan"]
        else:
            plain = _plain(value)
        if plain is not None:
            if self.description is not None:
                self._describe(where, _short(value))
            if isinstance(value, enum.Enum) and library_of_class(type(value)) is None:
                plain.append(self._enum(type(value)))
            elif type(value) not in _NUMBERS_AND_TEXTS and not isinstance(value, enum.Enum):
                own = self._own_code(type(value), where)
                plain += [*own, *self._attributes(value, where)] if own else []
        return plain

    def _enum(self, cls: type) -> bytes:
        """The digest of a user's enum, made once: an item may have hundreds of its members.

        It is made as if nothing else were being hashed, so that it is the same wherever the enum is met first. Enums
        within it, which may refer back to it, are hashed where they are.
        """
        where = _class_place(cls)
        if self._in_enum:
            return self.digest(cls, where)
        known = cls, self._writes_files > 0
        if known not in self._enums:
            outer, self._open, self._in_enum = self._open, {}, True
            try:
                self._enums[known] = self.digest(cls, where)
            finally:
                self._open, self._in_enum = outer, False
        self._describe(where, f"code {self._enums[known].hex()[:8]}")
        return self._enums[known]

    def _describe(self, where: str, text: str) -> None:
        if self.description is not None:
            self.description[where] = text

    @contextlib.contextmanager
    def _silence(self) -> Iterator[None]:
        """Suspends the description. Strings are still collected."""
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
        """Whether this is a transform's device, which does not count: another device gives the same item."""
        if self._exact or not isinstance(name, str) or name not in _DEVICE_NAMES or not _names_device(value):
            return False
        self.devices.update(re.findall(_DEVICE, str(value)))
        return True

    # Arrays

    def _array(self, value: np.ndarray, where: str) -> list[bytes]:
        head = [b"array", str(np.lib.format.dtype_to_descr(value.dtype)).encode(), repr(value.shape).encode()]
        if value.dtype.hasobject:
            return [*head, *self._all(value.ravel().tolist(), where)]
        if value.dtype.kind == "U" and (self._root is not None or self.description is not None):
            head.extend(self._all(value.ravel().tolist(), where))  # its strings may be paths
            if self._root is not None:
                return [*head[:1], *head[2:]]  # the width of the dtype depends on the root's length
        data = _data_digest(value)
        self._describe(where, _short_array(value, data))
        if type(value) in (np.ndarray, np.memmap):
            return [*head, data]
        own = self._own_code(type(value), where)
        extra = [self._name(type(value)), *own]
        if isinstance(value, np.ma.MaskedArray):
            mask = [np.ma.getmaskarray(value), value.fill_value, value.mask is np.ma.nomask, value.hardmask]
            extra.append(self.digest(mask, f"{where}'s mask"))
        if own or not isinstance(value, np.ma.MaskedArray):
            extra.extend(self._attributes(value, where))
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
        elif type(value) is not torch.Tensor or vars(value):
            extra.extend([self._name(type(value)), *self._own_code(type(value), where)])
            extra.extend(self._mapping(vars(value), where))
        return [b"tensor", str(value.dtype).encode(), repr(tuple(value.shape)).encode(), data, *extra]

    # Code

    def _callable(self, value: Any, where: str) -> list[bytes] | None:
        if isinstance(value, types.FunctionType):
            return self._function(value, where)
        if isinstance(value, types.MethodType):
            return [b"method", self.digest(value.__func__, where), self.digest(value.__self__, where)]
        if isinstance(value, _BUILT_IN) or type(value).__name__ in _OF_CYTHON:
            owner = getattr(value, "__self__", None)
            bound = [] if owner is None or isinstance(owner, types.ModuleType) else [self.digest(owner, where)]
            module = getattr(value, "__module__", None) or getattr(
                own_attribute(value, "__objclass__"), "__module__", None
            )
            library = library_of(module) or b""
            return [b"builtin", library, str(module).encode(), value.__qualname__.encode(), *bound]
        if isinstance(value, types.CodeType):
            return self._code(value, where)
        if isinstance(value, types.CellType):
            return [b"cell", *([self.digest(value.cell_contents, where)] if is_filled(value) else [])]
        is_users = library_of_class(type(value)) is None
        own = self._further(value, where, is_users) if isinstance(value, _WRAPPERS) else []
        if isinstance(value, functools.partial):
            inner = (value.func, value.args, value.keywords)
            return [b"partial", *(self.digest(v, f"{where}.{n}") for v, n in zip(inner, "fak", strict=True)), *own]
        if isinstance(value, (staticmethod, classmethod)):
            return [type(value).__name__.encode(), self.digest(value.__func__, where), *own]
        if isinstance(value, functools.cached_property):
            return [b"property", self.digest(value.func, where), *own]
        if isinstance(value, (property, types.DynamicClassAttribute)):  # enum.property is one
            return [b"property", *self._all((value.fget, value.fset, value.fdel), where), *own]
        # a user's may do more than it wraps, and so may what does not have it from functools.update_wrapper
        wrapped = None if is_users else (own_attribute(value, "__dict__") or {}).get("__wrapped__")
        return None if wrapped is None else [b"wrapped", self.digest(wrapped, where)]

    def _further(self, value: Any, where: str, is_users: bool) -> list[bytes]:
        """Digests of what a wrapper has beside what it wraps: a class of the user's, and attributes."""
        attributes = {name: held for name, held in attributes_of(value).items() if name not in _OF_WRAPPERS}
        own = [self.digest(type(value), where)] if is_users else []
        return [*own, *(self._mapping(attributes, where) if attributes else ())]

    def _function(self, value: types.FunctionType, where: str) -> list[bytes]:
        if value.__code__ is _SINGLE_DISPATCH:  # it closes over a cache of what it was called with
            return [b"single dispatch", *self._mapping(vars(value)["registry"], where)]
        library = library_of_function(value)
        named = "<" not in value.__qualname__
        if library is not None and named:
            self.__describe_library(library)
            return [b"function", library, value.__module__.encode(), value.__qualname__.encode()]
        where = f"{where} ({value.__qualname__})"
        parts = [b"code", module_name(value.__module__), self.digest(value.__code__, where)]
        parts.append(self.digest(value.__defaults__, where + "'s defaults"))
        parts.append(self.digest(value.__kwdefaults__, where + "'s defaults"))
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            content = cell.cell_contents if is_filled(cell) else cell
            parts.append(
                b"device" if self._is_device(name, content) else self.digest(cell, f"{where}'s variable {name}")
            )
        if library is None:
            self._defined.setdefault(id(value), (value, where))
            # the same code in files that were loaded under one name reads the variables of its own file
            found, own = self._namespaces.setdefault(self.join(parts), []), id(value.__globals__)
            if own not in found:
                found.append(own)
            if place := found.index(own):
                parts += [b"namespace", str(place).encode()]
        return parts

    def _globals(self, function: types.FunctionType, where: str) -> Iterable[bytes]:
        """Digests of what a function reads from its module, the user's other modules, and the user's functions."""
        names, handed = sorted(names_read(function.__code__)), handed_on(function.__code__)
        # of what a library's decorator made, the library's variables may be anything, such as locks
        let_pass = () if library_of(function.__globals__.get("__name__", "")) is None else (HashingError,)
        self._names.update(names)
        for name in sorted(globals_read(function.__code__)):
            if name in function.__globals__ and not self._is_device(name, function.__globals__[name]):
                value = as_in_the_script(name, function.__globals__[name])
                if isinstance(value, dict) and any(name == known.references for known in _libraries.values()):
                    value = {key: value[key] for key in sorted(texts_in(function.__code__)) if key in value}
                is_new = id(value) not in self._modules
                with contextlib.suppress(*let_pass):
                    yield name.encode() + self.digest(value, f"{where}'s global {name}")
                if isinstance(value, types.ModuleType):
                    if is_new and name not in handed:  # then its names are all here
                        self._modules.pop(id(value), None)
                    yield from self._module(value, names, handed, f"{where}'s {name}")
                elif isinstance(value, types.FunctionType) and library_of_function(value) is None:
                    own = {n: v for n, v in vars(value).items() if n in names}
                    self._read.update((id(value), n) for n in own)
                    yield from (self._mapping(own, f"{where}'s {name}") if own else ())
        for module in modules_imported(function):
            yield from self._module(module, names, handed, f"{where}'s {module.__name__}")

    def _module(self, module: types.ModuleType, names: list[str], handed: set[str], where: str) -> Iterable[bytes]:
        """Digests of what code that reads some names, and hands some on, may read from a user's module and its own."""
        if library_of(module.__name__) is not None:
            return
        if module.__name__.rpartition(".")[2] in handed:
            self._modules.setdefault(id(module), (module, where))
        for name in names:
            member = member_of(module, name)
            if isinstance(member, types.ModuleType) and member.__name__.startswith(module.__name__ + "."):
                yield from self._module(member, names, handed, f"{where}.{name}")
            elif member is not None:
                self._read.add((id(module), name))
                yield name.encode() + self.digest(member, f"{where}.{name}")

    def _members_of_modules(self) -> Iterator[bytes]:
        """What any of the user's functions may read of modules that are handed on, each member once.

        No function need name both such a module (an attribute, an argument, a member of another module) and what is
        read from it. So a member of a name that any function reads counts, unless it cannot be hashed. A module of a
        package counts by its members alone: whether the package has it may depend on what else was imported.
        """
        for module, where in list(self._modules.values()):
            for name in sorted(self._names & vars(module).keys()):
                member = vars(module)[name]
                if (id(module), name) not in self._read and not self._is_device(name, member):
                    self._read.add((id(module), name))
                    with contextlib.suppress(HashingError):
                        content = self.digest(member, f"{where}.{name}")
                        if own_attribute(member, "__name__") != f"{module.__name__}.{name}":
                            yield self.join([b"member", module_name(module.__name__), name.encode(), content])

    def _attributes_of_functions(self) -> Iterator[bytes]:
        """What any of the user's functions may read of attributes of others, each once, as of modules."""
        for function, where in list(self._defined.values()):
            if isinstance(function, types.FunctionType):
                for name in sorted(self._names & vars(function).keys()):
                    if (id(function), name) not in self._read:
                        self._read.add((id(function), name))
                        with contextlib.suppress(HashingError):
                            own = self._mapping({name: vars(function)[name]}, where)
                            yield self.join([b"attribute", self.digest(function, where), *own])

    def _code(self, code: types.CodeType, where: str) -> list[bytes]:
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        consts = self._all(code.co_consts, where + "'s constants")
        return [b"bytecode", code.co_code, code.co_exceptiontable, repr(counts).encode(), repr(names).encode(), *consts]

    def _class(self, cls: type, where: str) -> list[bytes]:
        parts = [b"class", self._name(cls)]
        if library_of_class(cls) is not None:  # torch derives classes from a user's own as it parametrizes them
            return [*parts, *self._all([base for base in cls.__mro__ if library_of_class(base) is None], where)]
        if library_of_class(type(cls)) is None:
            parts.append(self.digest(type(cls), where))
        if issubclass(cls, enum.Enum):
            values = {name: member.value for name, member in cls.__members__.items()}
            others = {k: v for k, v in vars(cls).items() if k not in values and _is_of_an_enums_user(k, v)}
            members = [*self._mapping(values, where), *self._mapping(others, where)]
            attributes = {name: own for name, member in cls.__members__.items() if (own := _of_a_member(member))}
            members += self._mapping(attributes, where) if attributes else []
            members += self._all(list(values), where) if self._ordered and len(values) > 1 else []
            return [*parts, *members, *self._all(cls.__bases__, f"{where}'s bases")]
        if "<locals>" in cls.__qualname__ or self._classes.setdefault(parts[1], cls) is not cls:  # an ambiguous name
            return [*parts, *self._class_body(cls)]
        self._defined.setdefault(id(cls), (cls, where))
        return parts

    def _own_code(self, cls: type, where: str) -> list[bytes]:
        """The digest of a class of values that count by what they hold; empty if no code of a user's is in it."""
        return [self.digest(cls, where)] if has_code_of_a_user(cls) else []

    def _class_body(self, cls: type) -> list[bytes]:
        members = {k: v for k, v in vars(cls).items() if k not in _CLASS_NOISE and not is_slot(v)}
        if hasattr(cls, "__cache_key__"):  # it declares which data count; code counts all the same
            members = {k: v for k, v in members.items() if callable(v) or hasattr(v, "__get__")}
        where = _class_place(cls)
        return [*self._mapping(members, where), *self._all(cls.__bases__, where + "'s bases")]

    def __describe_library(self, library: bytes) -> None:
        name, _, version = library.decode().partition(" ")
        if version:
            self._describe(f"library {name}", version)

    def _name(self, cls: type) -> bytes:
        self.__describe_library(library_of(cls.__module__) or b"")
        return b"\0".join([library_of(cls.__module__) or b"", module_name(cls.__module__), cls.__qualname__.encode()])

    # Objects

    def _object(self, value: Any, where: str) -> list[bytes]:
        if value is os.environ:  # as where code has it of the module: what is read of it does not count
            return [b"environment"]
        head = [b"object", self.digest(type(value), where)]
        own = own_attribute(value, "__cache_key__")
        if own is not None:
            return [*head, self.digest(own(), f"{where}.__cache_key__()")]
        if any((cls.__module__, cls.__name__) == _OF_PANDAS for cls in type(value).__mro__):
            why = "it keeps references to itself: hold its values, as frame.to_dict('list') or frame.to_numpy()"
            raise HashingError(_refusal(value, where, why))
        writes = any(known.writes_files(cls) for known in _libraries.values() for cls in type(value).__mro__)
        self._writes_files += writes
        try:
            return [*head, *self._contents(value, where)]
        finally:
            self._writes_files -= writes

    def _contents(self, value: Any, where: str) -> list[bytes]:
        if isinstance(value, Mapping):
            own: list[Any] = []  # what the type adds to a dict
            if isinstance(value, collections.OrderedDict):
                own = list(value)
            elif isinstance(value, collections.defaultdict):
                own = [value.default_factory]
            ordered = list(value) if self._ordered and len(value) > 1 else []
            with self._silence():
                extra = self._all([*own, *ordered], f"{where}'s own")
            if ordered:
                self._describe(f"{where}'s order", self.join(extra).hex()[:8])
            return [*extra, *self._mapping(value, where), *self._attributes(value, where)]
        if isinstance(value, types.ModuleType):
            if library_of(value.__name__) is None:
                self._modules.setdefault(id(value), (value, where))
            return [b"module", library_of(value.__name__) or b"", module_name(value.__name__)]
        # A class written in C (str, deque, an open file…) holds data that only pickling shows.
        native = [] if is_pure_python(type(value)) else self._reduced(value, where)
        return [*native, *self._attributes(value, where)]

    def _attributes(self, value: Any, where: str) -> Iterable[bytes]:
        skip: set[str] = set()
        state = attributes_of(value)
        for cls in type(value).__mro__:
            name = f"{cls.__module__}.{cls.__qualname__}"
            skip |= _REMEMBERED.get(name, frozenset())
            for known in _libraries.values():
                skip |= known.transient.get(name, frozenset())
                for attribute, compute in known.computed.get(name, {}).items():
                    state[attribute] = compute(value)
            if name == "torch.nn.modules.module.Module":  # the order in which Sequential runs its modules
                state["order of _modules"] = list(value._modules.keys())  # TorchScript's are not a dict
                hooks = {k: v for k, v in state.items() if k in _HOOKS and isinstance(v, dict)}
                state.update({k: list(v.values()) for k, v in hooks.items()})
        for name in sorted(state.keys() - skip, key=str):
            if not self._is_device(name, state[name]):
                member = as_in_the_script(name, state[name])
                yield str(name).encode() + self.digest(member, f"{where}.{name}")

    def _reduced(self, value: Any, where: str) -> Iterable[bytes]:
        """An object of a C type, by the parts it would be pickled as."""
        own_attribute(value, "__dict__")  # many types create it on first access, and pickle it from then on
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            parts = reduce(value) if reduce else value.__reduce_ex__(4)  # older protocols drop a datetime's fold
        except Exception as e:
            raise HashingError(_refusal(value, where, str(e))) from e
        if isinstance(parts, str):  # the name of a global; numpy.frompyfunc gives its own objects one, too
            inside = [held for held in gc.get_referents(value) if isinstance(held, types.FunctionType)]
            return [parts.encode(), *self._all(inside, where)]
        shown = [p for i, p in enumerate(parts) if i != 2 or not _repeats_attributes(p, value)]
        return [self.digest(list(p) if isinstance(p, Iterator) else p, where) for p in shown]


def _is_of_an_enums_user(name: str, value: Any) -> bool:
    """Whether the enum's user wrote an attribute that is not a member, rather than Python's own machinery."""
    return isinstance(value, _METHODS) or not (name.startswith("_") and name.endswith("_"))


def _of_a_member(member: enum.Enum) -> dict[str, Any]:
    """The attributes that an enum's user gave a member, in ``__new__`` or afterwards, without what is computed once."""
    return {
        name: held
        for name, held in vars(member).items()
        if not (name.startswith("_") and name.endswith("_"))
        and not isinstance(getattr(type(member), name, None), functools.cached_property)
    }


def _class_place(cls: type) -> str:
    """Where a user's class is described."""
    return f"class {module_name(cls.__module__).decode()}.{cls.__qualname__}"


def _plain(value: Any) -> list[bytes] | None:
    """The parts of a value that holds no others."""
    if value is None or isinstance(value, (bool, type(...), type(NotImplemented))):
        return [b"singleton", repr(value).encode()]
    if isinstance(value, enum.Enum):
        name = value.name if value.name is not None else repr(value.value)  # a flag without any bits has none
        return [b"enum", type(value).__qualname__.encode(), name.encode()]
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
        return [b"logger", module_name(value.name)]
    if kind.__module__ == "loguru._logger":  # it holds locks and open files
        return [b"logger"]
    if isinstance(value, re.Pattern):
        return [b"pattern", repr((value.pattern, value.flags)).encode()]
    if isinstance(value, (slice, range)):
        return [kind.__name__.encode(), repr((value.start, value.stop, value.step)).encode()]
    return None


def _names_device(value: Any) -> bool:
    """Whether a value names torch devices. Anything else called ``device``, such as a scanner, counts."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_names_device, value))
    if value is None or isinstance(value, torch.device):
        return True
    return isinstance(value, str) and re.fullmatch(rf"({_DEVICE})(:\d+)?", value) is not None


def _data_digest(array: np.ndarray) -> bytes:
    """16 bytes of XXH3 over an array's data in C order. It runs at memory speed, unlike a cryptographic hash."""
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


#: Digests of arrays that cannot change, by id.
_frozen: dict[int, tuple[weakref.ref[np.ndarray], bytes]] = {}


def _is_frozen(array: np.ndarray) -> bool:
    """Whether an array's data can never change: they lie in ``bytes``, and it is not an unpickled array, which writes
    into them all the same."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return False
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


def _repeats_attributes(state: Any, value: Any) -> bool:
    """Whether an object's pickled state consists of its attributes alone, including transient ones."""
    pieces = state if isinstance(state, tuple) and len(state) == 2 else (state,)  # __dict__ and slots
    attributes = own_attribute(value, "__dict__") or {}
    return all(
        piece is None or (isinstance(piece, dict) and all(k in attributes or hasattr(value, k) for k in piece))
        for piece in pieces
    )


def _refusal(value: Any, where: str, why: str) -> str:
    cls = type(value)
    return (
        f"{where} is a {cls.__module__}.{cls.__qualname__}, which cannot be hashed stably ({why}). Give its class, or "
        "the one that holds it, a method __cache_key__(self) that returns plain data, or pass your own hash_func (for "
        "items) or hash_transform (for transforms; hash_transform=None leaves them out of the key)"
    )
