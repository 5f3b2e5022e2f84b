"""Code in keys: how functions, classes and modules are hashed.

Code of an installed library counts by name and version. A user's own counts by its syntax, defaults, closure, and by
what it reads of its module, of others and of objects (:class:`Definitions`). Used by :mod:`monai_gds.keys.hashing`,
which hashes values.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import glob
import hashlib
import importlib.util
import os
import re
import sys
import types
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from monai_gds.errors import HashingError
from monai_gds.keys.libraries import (
    HEAP_TYPE,
    OPTIONS,
    as_in_the_script,
    file_of,
    is_installed,
    is_lazy,
    library_of,
    library_of_class,
    library_of_function,
    module_name,
)
from monai_gds.keys.reads import (
    WHOLE,
    Mark,
    Path,
    Step,
    as_plain,
    attributes_of,
    contents_of,
    own_attribute,
    read_by,
    reads_of,
)
from monai_gds.keys.syntax import Tree, tree_of, tree_of_file

_DEVICE = "cpu|cuda|mps|xpu"


def join(parts: Iterable[bytes]) -> bytes:
    """The digest of several parts, 16 bytes."""
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.digest()


def _names_device(value: Any) -> bool:
    """Whether a value names torch devices. Anything else called ``device``, such as a scanner, counts."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_names_device, value))
    if value is None or (type(value).__module__, type(value).__name__) == ("torch", "device"):
        return True
    return isinstance(value, str) and re.fullmatch(rf"({_DEVICE})(:\d+)?", value) is not None


#: Attributes of functions and classes that count where one of these names is read.
_REFLECTING = {
    "__doc__": ("__doc__", "getdoc"),
    "__annotations__": ("__annotations__", "get_annotations", "get_type_hints", "signature"),
    "__dict__": ("__dict__", "vars"),
}


@dataclass(slots=True)
class HashedTransforms:
    """What hashing transforms gave and met."""

    digest: str = ""  # 32 hex digits
    description: dict[str, str] = field(default_factory=dict)  # ``{attribute path: short text}`` of all that counts
    strings: set[str] = field(default_factory=set)  # every string met, except in transforms that write files
    written: set[str] = field(default_factory=set)  # those in transforms that do
    devices: set[str] = field(default_factory=set)  # types of the devices named, such as ``"cuda"``
    requires_grad: bool = False  # whether a tensor requires a gradient, so that the grad mode matters
    generators: list[Any] = field(default_factory=list)  # random generators met
    functions: list[types.FunctionType] = field(default_factory=list)  # the user's own


class Definitions:
    """Hashes the user's functions, classes and modules that values name: after the values, each once.

    Args:
        root: see :func:`~monai_gds.keys.hashing.hash_item`.
        exact: whether devices, random states and the sign of a NaN count.
        describes: whether to collect descriptions and strings.
        ordered: whether the order of dicts counts.
        by_source: whether code counts by its syntax tree where its source is there.
    """

    #: Containers with more members are described by their digest.
    _MOST_DESCRIBED = 32

    def __init__(
        self,
        root: str | None = None,
        *,
        exact: bool = False,
        describes: bool = False,
        ordered: bool = False,
        by_source: bool = True,
    ) -> None:
        self._root, self._exact, self._ordered, self._by_source = root, exact, ordered, by_source
        self._describes, self._silent = describes, False
        self.met = HashedTransforms()
        self.writes_files = False  # whether this is inside a transform that writes the files it names
        self._open: dict[int, int] = {}  # depths of the objects being hashed, by id
        # The user's own functions and classes met so far, by id; enums also by whether it was in what writes files.
        self._defined: dict[tuple[int, bool], tuple[Any, str]] = {}
        self._classes: dict[bytes, type] = {}  # the user's own, by name: a function may make several of one name
        # Ids of the variables of modules, by the digest of what is alike in the user's functions that read them.
        self._namespaces: dict[bytes, list[int]] = {}
        self._modules: dict[int, tuple[types.ModuleType, str]] = {}  # the user's own that are handed on
        self._names: set[str] = set()  # that the user's functions read
        self._read: set[tuple[int, str]] = set()  # members of modules and functions that count already, by their ids
        self._files: set[str] = set()  # with the user's code

    @abstractmethod
    def digest(self, value: Any, where: str) -> bytes:
        """The digest of any value."""

    def each(self, values: Iterable[Any], where: str) -> list[bytes]:
        """The digests of several values."""
        members = list(values)
        if not self._describes or len(members) <= self._MOST_DESCRIBED:
            return [self.digest(v, f"{where}[{i}]") for i, v in enumerate(members)]
        with self.silence():
            found = [self.digest(v, where) for v in members]
        self.describe(where, f"{len(members)} values, {join(found).hex()[:8]}")
        return found

    def pairs(self, value: Mapping[Any, Any], where: str) -> list[bytes]:
        """The digests of the members of a dict."""
        pairs = []
        for key, v in value.items():
            name = f"{where}[{key!r}]"
            content = b"device" if self.is_device(key, v) else self.digest(v, name)
            pairs.append(self.digest(key, f"{where}'s key {key!r}") + content)
        return sorted(pairs)

    def describe(self, where: str, text: str) -> None:
        """Notes what is at an attribute path."""
        if self._describes and not self._silent:
            self.met.description[where] = text

    def describe_library(self, library: bytes) -> None:
        """Notes the version of a library that something is from."""
        name, _, version = library.decode().partition(" ")
        if version:
            self.describe(f"library {name}", version)

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Suspends the description. Strings are still collected."""
        outer, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = outer

    def is_device(self, name: Any, value: Any) -> bool:
        """Whether this is a transform's device, which does not count: another device gives the same item."""
        is_named = isinstance(name, str) and name.strip("_").lower() in ("device", "devices")
        if self._exact or not is_named or not _names_device(value):
            return False
        self.met.devices.update(re.findall(_DEVICE, str(value)))
        return True

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
                for (_, writes), (value, where) in list(self._defined.items())[done:]:
                    self.writes_files = writes
                    done += 1
                    with contextlib.suppress(*let_pass):
                        found.add(self._definition(value, where))
            self.writes_files = False
            modules = len(self._modules)
            members = {*self._members_of_modules(), *self._attributes()}
            if not members and done == len(self._defined) and modules == len(self._modules):
                self.met.functions = [v for v, _ in self._defined.values() if isinstance(v, types.FunctionType)]
                self.met.strings -= self._files
                return sorted(found)
            found |= members
            let_pass = (HashingError,)  # perhaps nobody reads what is defined there

    def _definition(self, value: Any, where: str) -> bytes:
        with self.silence():  # it was described where it was met
            head = self.digest(value, where)
        parts = self.class_body(value) if isinstance(value, type) else self._globals(value, where)
        code = join([head, *parts])
        self.describe(class_place(value) if isinstance(value, type) else where, f"code {code.hex()[:8]}")
        return code

    def class_body(self, cls: type) -> list[bytes]:
        """The digests of the members and bases of a class."""
        if issubclass(cls, enum.Enum):
            return self._enum_body(cls, class_place(cls))
        members = {k: v for k, v in vars(cls).items() if k not in _CLASS_NOISE and not isinstance(v, _SLOTS)}
        if hasattr(cls, "__cache_key__"):  # it declares which data count; code counts all the same
            members = {k: v for k, v in members.items() if callable(v) or hasattr(v, "__get__")}
        if "__dataclass_params__" in members:  # what Python makes of fields and these differs between its versions
            params = members["__dataclass_params__"]
            made = ("init", "repr", "eq", "order", "unsafe_hash", "frozen")
            code = {k: v.__code__ for k, v in members.items() if isinstance(v, types.FunctionType)}
            members = {k: v for k, v in members.items() if k not in code or code[k].co_filename != "<string>"}
            members["__dataclass_params__"] = [getattr(params, name) for name in made]
        where = class_place(cls)
        return [*self.pairs(members, where), *self.each(cls.__bases__, where + "'s bases")]

    def _enum_body(self, cls: type[enum.Enum], where: str) -> list[bytes]:
        values = {name: member.value for name, member in cls.__members__.items()}
        own = {k: v for k, v in vars(cls).items() if isinstance(v, _METHODS) or not _is_private(k)}
        others = {k: v for k, v in own.items() if k not in values}
        attributes = {name: held for name, member in cls.__members__.items() if (held := _of_member(member))}
        members = [part for held in (values, others, attributes) for part in self.pairs(held, where)]
        order = self.each(list(values), where) if self._ordered and len(values) > 1 else []
        return [*members, *order, *self.each(cls.__bases__, f"{where}'s bases")]

    def _globals(self, function: types.FunctionType, where: str) -> Iterable[bytes]:
        """Digests of what a function reads from its module, the user's other modules, and the user's functions."""
        reads, variables = reads_of(function.__code__), function.__globals__
        # of what a library's decorator made, the library's variables may be anything, such as locks
        let_pass = () if library_of(variables.get("__name__", "")) is None else (HashingError,)
        self._names |= reads.names
        self._files.add(str(variables.get("__file__")))
        for name in sorted(reads.variables.keys() & variables.keys()):
            if not self.is_device(name, variables[name]):
                value = as_in_the_script(name, variables[name])
                with contextlib.suppress(*let_pass):
                    yield name.encode() + self.part(value, reads.variables[name], f"{where}'s global {name}")
                if isinstance(value, types.FunctionType) and library_of_function(value) is None:
                    own = {n: v for n, v in vars(value).items() if n in reads.names}
                    self._read.update((id(value), n) for n in own)
                    yield from (self.pairs(own, f"{where}'s {name}") if own else ())
        yield from self._imported(function.__code__, variables.get("__package__") or "", where)

    def part(self, value: Any, paths: set[Path], where: str) -> bytes:
        """The digest of what is read of an object by some paths; of all of it where that cannot be told."""
        found = {} if WHOLE in paths else {step: read_by(value, step) for step in {path[0] for path in paths}}
        if not found or any(held is Mark.UNKNOWN for held in found.values()):
            return self.digest(as_plain(value), where)
        parts = [b"part of", module_name(value.__name__)] if isinstance(value, types.ModuleType) else [b"part of"]
        for step in sorted(found, key=str):
            further, place = {path[1:] for path in paths if path[0] == step}, f"{where}{step}"
            if found[step] is Mark.ABSENT:
                content = b"absent"
                self.describe(place, "absent")
            else:
                is_device = self.is_device(step.name, found[step])
                content = b"device" if is_device else self.part(found[step], further, place)
            parts.append(str(step).encode() + content)
        return join(parts)

    def _imported(self, code: types.CodeType, package: str, where: str) -> Iterator[bytes]:
        """Digests of the user's own modules that code imports when it runs. Nothing is imported to find out.

        A module that was not imported so far counts by its file, with those that it imports in turn.
        """
        for dotted, member, name in reads_of(code).imports:
            module = importlib.util.resolve_name(dotted, package)
            if is_installed(module.partition(".")[0]):
                continue
            for end, letter in enumerate(f"{module}.{member}."):
                each = f"{module}.{member}"[:end]
                if letter == "." and each not in sys.modules and (file := file_of(each)) is not None:
                    yield from self._file(file, each, where)
            paths = reads_of(code).inner.get(name) or reads_of(code).variables.get(name, {WHOLE})
            into = {(Step(".", member), *path) for path in paths} if member else paths
            of_package = module.partition(".")[0] == name and not member
            for each in {module, name} if of_package else {module}:
                if each in sys.modules:
                    yield each.encode() + self.part(sys.modules[each], into, f"{where}'s {each}")

    def _file(self, file: str, module: str, where: str) -> Iterator[bytes]:
        """The digest of a file of the user's with code that was not imported, and those that it would import."""
        if file in self._files:
            return
        self._files.add(file)
        tree, code = tree_of_file(file)
        yield join([b"file", module.encode(), *self.tree(tree, f"{where}'s {module}")])
        if code is not None:
            is_package = os.path.basename(file) == "__init__.py"
            yield from self._imported(code, module if is_package else module.rpartition(".")[0], where)

    def _members_of_modules(self) -> Iterator[bytes]:
        """What any of the user's functions may read of modules that are handed on, each member once.

        No function need name both such a module (an attribute, an argument, a member of another module) and what is
        read from it. So a member of a name that any function reads counts, unless it cannot be hashed. A module of a
        package counts by its members alone: whether the package has it may depend on what else was imported. A package
        that imports when it is asked for a member counts with all its files.
        """
        for module, where in list(self._modules.values()):
            if is_lazy(module) and (id(module), "") not in self._read:
                self._read.add((id(module), ""))
                ways = [vars(module).get("__getattr__"), type(module)]
                yield join([b"lazy", module_name(module.__name__), *self.each(ways, where)])
                for folder in getattr(module, "__path__", ()):
                    for file in sorted(glob.glob(f"{glob.escape(folder)}/**/*.py", recursive=True)):
                        yield from self._file(file, module.__name__ + file[len(folder) :], where)
            for name in sorted(self._names & vars(module).keys()):
                member = vars(module)[name]
                if (id(module), name) not in self._read and not self.is_device(name, member):
                    self._read.add((id(module), name))
                    with contextlib.suppress(HashingError):
                        content = self.digest(member, f"{where}.{name}")
                        if own_attribute(member, "__name__") != f"{module.__name__}.{name}":
                            yield join([b"member", module_name(module.__name__), name.encode(), content])

    def _attributes(self) -> Iterator[bytes]:
        """What any of the user's functions may look at of others, and of classes, beside what they do; each once."""
        for value, where in list(self._defined.values()):
            own = vars(value) if isinstance(value, types.FunctionType) else {}
            reflected = {name for name, told_by in _REFLECTING.items() if not self._names.isdisjoint(told_by)}
            for name in sorted(reflected | (self._names & own.keys())):
                if (id(value), name) not in self._read:
                    self._read.add((id(value), name))
                    if name == "__dict__":
                        held: Any = [name for name in vars(value) if not name.startswith("__")]
                    else:
                        held = vars(value).get(name) if isinstance(value, type) else getattr(value, name)
                    with contextlib.suppress(HashingError):
                        yield join([name.encode(), self.digest(value, where), self.digest(held, where)])

    def tree(self, tree: Tree, where: str) -> list[bytes]:
        return [tree.form, *self.each(tree.constants, where + "'s constants")]


def class_place(cls: type) -> str:
    """Where a user's class is described."""
    return f"class {module_name(cls.__module__).decode()}.{cls.__qualname__}"


#: The code of every function that ``functools.singledispatch`` made.
_SINGLE_DISPATCH = cast(Any, functools.singledispatch(len)).__code__

#: What they wrap, by attribute.
_WRAPPERS: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func",),
    property: ("fget", "fset", "fdel"),
    types.DynamicClassAttribute: ("fget", "fset", "fdel"),  # enum.property is one
}

#: Attributes of wrappers that count otherwise, or are copied from what is wrapped.
_OF_WRAPPERS = frozenset({*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "func", "attrname", "lock"})

_BUILT_IN = (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType)
_OF_CYTHON = ("cython_function_or_method", "fused_cython_function")  # types that are in no module of a name

_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_METHODS = (types.FunctionType, property, functools.cached_property, classmethod, staticmethod)

#: Attributes of a class that have no effect on what its instances do.
_CLASS_NOISE = frozenset(
    {"__dict__", "__weakref__", "__module__", "__doc__", "__qualname__", "__annotations__", "__abstractmethods__"}
    | {"_abc_impl", "__slots__", "__firstlineno__", "__static_attributes__", "__annotate__", "__annotate_func__"}
    | {"__slotnames__"}  # left behind by copying or pickling an instance
    | {"__annotations_cache__", "__orig_bases__", "__parameters__", "__hash__", "__replace__"}
    # what pydantic makes of fields and decorators, with addresses in memory, and what it remembers of calls
    | {"__pydantic_core_schema__", "__pydantic_validator__", "__pydantic_serializer__", "__pydantic_complete__"}
    | {"__pydantic_setattr_handlers__", "__signature__"}
)


class Code(Definitions):
    """Hashes functions and classes, by what they are themselves."""

    # Functions

    def of_callable(self, value: Any, where: str) -> list[bytes] | None:
        if isinstance(value, types.FunctionType):
            return self._function(value, where)
        if isinstance(value, types.MethodType):
            return [b"method", self.digest(value.__func__, where), self.digest(value.__self__, where)]
        if isinstance(value, _BUILT_IN) or type(value).__name__ in _OF_CYTHON:
            owner = getattr(value, "__self__", None)
            in_module = isinstance(owner, types.ModuleType) or type(owner).__name__ == "PyCapsule"  # by pybind11 2
            bound = [] if owner is None or in_module else [self.digest(owner, where)]
            of_class = own_attribute(value, "__objclass__")
            module = getattr(value, "__module__", None) or getattr(of_class, "__module__", None)
            library = library_of(module) or b""
            return [b"builtin", library, str(module).encode(), value.__qualname__.encode(), *bound]
        if isinstance(value, types.CodeType):
            return self._code(value, where)
        is_users = library_of_class(type(value)) is None
        for kind, names in _WRAPPERS.items():
            if isinstance(value, kind):
                inner = [self.digest(getattr(value, name), f"{where}.{name}") for name in names]
                further = () if kind is types.DynamicClassAttribute else self._further(value, where, is_users)
                return [kind.__name__.encode(), *inner, *further]
        # a user's may do more than it wraps, and so may what does not have it from functools.update_wrapper
        wrapped = None if is_users else (own_attribute(value, "__dict__") or {}).get("__wrapped__")
        if wrapped is None:
            return None
        named = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(value).__mro__]
        options = [OPTIONS[name](value) for name in named if name in OPTIONS]
        return [b"wrapped", self.digest(wrapped, where), *self.each(options, f"{where}'s options")]

    def _further(self, value: Any, where: str, is_users: bool) -> list[bytes]:
        """Digests of what a wrapper has beside what it wraps: a class of the user's, and attributes."""
        attributes = {name: held for name, held in attributes_of(value).items() if name not in _OF_WRAPPERS}
        own = [self.digest(type(value), where)] if is_users else []
        return [*own, *self.pairs(attributes, where)]

    def _function(self, value: types.FunctionType, where: str) -> list[bytes]:
        if value.__code__ is _SINGLE_DISPATCH:  # it closes over a cache of what it was called with
            return [b"single dispatch", *self.pairs(vars(value)["registry"], where)]
        library = library_of_function(value)
        if library is not None and "<" not in value.__qualname__:
            self.describe_library(library)
            return [b"function", library, value.__module__.encode(), value.__qualname__.encode()]
        where = f"{where} ({value.__qualname__})"
        parts = [b"code", module_name(value.__module__), self.digest(value.__code__, where)]
        parts.append(self.digest(value.__defaults__, where + "'s defaults"))
        parts.append(self.digest(value.__kwdefaults__, where + "'s defaults"))
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            is_device = any(self.is_device(name, held) for held in contents_of(cell))
            paths = reads_of(value.__code__).inner.get(name, {WHOLE})
            held = [self.part(held, paths, f"{where}'s variable {name}") for held in contents_of(cell)]
            parts += [b"device"] if is_device else held or [b"not set"]
        if library is None:
            self._defined.setdefault((id(value), False), (value, where))
            # the same code in files that were loaded under one name reads the variables of its own file
            found, own = self._namespaces.setdefault(join(parts), []), id(value.__globals__)
            if own not in found:
                found.append(own)
            if place := found.index(own):
                parts += [b"namespace", str(place).encode()]
        return parts

    def _code(self, code: types.CodeType, where: str) -> list[bytes]:
        tree = tree_of(code) if self._by_source else None
        if tree is not None:
            return [b"syntax", repr(sorted(code.co_freevars)).encode(), *self.tree(tree, where)]
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        consts = self.each(code.co_consts, where + "'s constants")
        return [b"bytecode", code.co_code, code.co_exceptiontable, repr(counts).encode(), repr(names).encode(), *consts]

    # Classes

    def of_class(self, cls: type, where: str) -> list[bytes]:
        parts = [b"class", self.named(cls)]
        if library_of_class(cls) is not None:  # torch derives classes from a user's own as it parametrizes them
            return [*parts, *self.each([base for base in cls.__mro__ if library_of_class(base) is None], where)]
        if library_of_class(type(cls)) is None:
            parts.append(self.digest(type(cls), where))
        if "<locals>" in cls.__qualname__ or self._classes.setdefault(parts[1], cls) is not cls:  # an ambiguous name
            return [*parts, *self.class_body(cls)]
        self._defined.setdefault((id(cls), self.writes_files and issubclass(cls, enum.Enum)), (cls, where))
        return parts

    def own_code(self, cls: type, where: str) -> list[bytes]:
        """The digest of a class of values that count by what they hold; empty if no code of a user's is in it."""
        is_users = cls.__flags__ & HEAP_TYPE and any(library_of_class(base) is None for base in cls.__mro__)
        return [self.digest(cls, where)] if is_users else []

    def named(self, cls: type) -> bytes:
        self.describe_library(library_of(cls.__module__) or b"")
        return b"\0".join([library_of(cls.__module__) or b"", module_name(cls.__module__), cls.__qualname__.encode()])


def _is_private(name: str) -> bool:
    """Whether an attribute of an enum, or of its members, is Python's own machinery."""
    return name.startswith("_") and name.endswith("_")


def _of_member(member: enum.Enum) -> dict[str, Any]:
    """The attributes that an enum's user gave a member, in ``__new__`` or afterwards, without what is computed once."""
    own = {name: held for name, held in vars(member).items() if not _is_private(name)}
    once = functools.cached_property
    return {name: held for name, held in own.items() if not isinstance(getattr(type(member), name, None), once)}
