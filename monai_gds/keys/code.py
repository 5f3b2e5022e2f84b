"""Code in keys: where Python code comes from, what it reads, and how it is hashed.

Code of an installed library counts by name and version. A user's own counts by bytecode, constants, defaults, closure,
and by what it reads of its module and of others. Used by :mod:`monai_gds.keys.hashing`, which hashes values.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
import types
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from monai_gds.errors import HashingError
from monai_gds.keys.described import Described, join
from monai_gds.keys.of_libraries import REFERENCES, UNVERSIONED

_STANDARD_LIBRARY = tuple(sysconfig.get_path(kind) + "/" for kind in ("stdlib", "platstdlib"))

_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE


@functools.lru_cache(maxsize=1024)
def library_of(module: str | None) -> bytes | None:
    """Name and version of the installed library that a module belongs to; None for a user's own code."""
    root = (module or "builtins").partition(".")[0]
    if root in UNVERSIONED:
        return root.encode()
    file = getattr(sys.modules.get(root), "__file__", None) or ""  # none of what is built in, or a namespace package
    if "/site-packages/" in file or "/dist-packages/" in file:
        return f"{root} {_version(root, file)}".encode()
    if file.startswith(_STANDARD_LIBRARY) or (not file and root in sys.stdlib_module_names):
        return root.encode()
    binary = getattr(sys.modules.get(module or ""), "__file__", None)
    if binary is None or not binary.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
        return None
    with open(binary, "rb") as f:  # a user's own extension counts by its machine code
        return f"{module} {hashlib.file_digest(f, hashlib.blake2b).hexdigest()[:32]}".encode()


@functools.cache
def _version(root: str, file: str) -> str:
    """The version of an installed library, given its top-level module and that module's file.

    A library that was installed from a folder or a repository may change and keep its version, so it counts by the
    hashes of its files, too. Those that conda installs all look as if they were.
    """
    try:
        found: importlib.metadata.Distribution | None = importlib.metadata.distribution(root)
        named = ""
    except importlib.metadata.PackageNotFoundError:  # what is installed has another name than what is imported
        end = max(file.rfind("/site-packages/"), file.rfind("/dist-packages/")) + len("/site-packages")
        record = f"\n{file[end + 1 :]},"
        installed = importlib.metadata.distributions(path=[file[:end]])
        found = next((d for d in installed if record in "\n" + (d.read_text("RECORD") or "")), None)
        named = str(getattr(sys.modules[root], "__version__", ""))
    if found is None:
        return named
    told = named or found.version
    if found.read_text("direct_url.json") is None or "conda" in (found.read_text("INSTALLER") or ""):
        return told
    lines = (found.read_text("RECORD") or "").splitlines()
    files = sorted(line for line in lines if ",sha256=" in line and not re.match(r"\.\./|[^/]*\.dist-info/", line))
    return f"{told} {hashlib.blake2b(chr(10).join(files).encode(), digest_size=16).hexdigest()}"


def library_of_function(function: types.FunctionType) -> bytes | None:
    """As :func:`library_of`, for a function: None unless its code is a library's, too.

    ``functools.wraps`` gives a user's function the name of the library's that it calls. A function that
    ``eval`` makes, as in a bundle's configuration, has no module.
    """
    home = function.__globals__.get("__name__", function.__module__)
    if function.__module__ is None or library_of(home) is None:
        return None
    return library_of(function.__module__)


def library_of_class(cls: type) -> bytes | None:
    """As :func:`library_of`, for a class: None also for one of the user's that names a library as its module.

    What ``exec`` makes without a ``__name__`` names ``builtins``, and what ``types.new_class``, ``make_dataclass`` and
    metaclasses make on demand names the module that calls ``type``.
    """
    library = library_of(cls.__module__)
    if library is None or not is_made_in_python(cls) or _is_in_its_module(cls):
        return library
    functions = [member for member in vars(cls).values() if isinstance(member, types.FunctionType)]
    is_users = cls.__module__ in ("builtins", "types") or any(library_of_function(f) is None for f in functions)
    return None if is_users else library


def is_made_in_python(cls: type) -> bool:
    """Whether a class was made by a class statement, or by calling ``type``, rather than written in C."""
    return cls.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE


def _is_in_its_module(cls: type) -> bool:
    outer, *inner = cls.__qualname__.split(".")
    found = vars(sys.modules[cls.__module__]).get(outer) if cls.__module__ in sys.modules else None
    for name in inner:
        found = getattr(found, name, None)
    return found is cls


def _is_installed(root: str) -> bool:
    """Whether a top-level module belongs to an installed library. It is not imported to find out."""
    if root in sys.modules:
        return library_of(root) is not None
    spec = None if root in sys.stdlib_module_names else importlib.util.find_spec(root)
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return spec is None or any("/site-packages/" in place or "/dist-packages/" in place for place in places)


def module_name(module: str | None) -> bytes:
    return (module or "").replace("__mp_main__", "__main__").encode()  # the name of the script in a spawned worker


def as_in_the_script(name: str, value: Any) -> Any:
    """The value of a variable, where the name of its module is that of a spawned worker's script: as in the script."""
    if name in ("__name__", "__module__") and isinstance(value, str):
        return module_name(value).decode()
    return value


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of the functions inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _with_inner(const)


def names_read(code: types.CodeType) -> set[str]:
    """The names that a function and the functions inside it look up, those of attributes included."""
    return {name for part in _with_inner(code) for name in part.co_names}


def globals_read(code: types.CodeType) -> set[str]:
    """The names that a function and the functions inside it may look up in their module.

    An attribute is none of them (of ``self.args``, a script may have ``args`` only where it is not a spawned worker),
    except where the code may reach its module in another way than by a variable.
    """
    names = names_read(code)
    if names & _REACHES_MODULES:
        return names
    loads = (load for part in _with_inner(code) for load in dis.get_instructions(part))
    return {load.argval for load in loads if load.opname in _LOADS_OF_VARIABLES}


_LOADS_OF_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")

#: Names by which code may read any variable of a module.
_REACHES_MODULES = frozenset(
    ("__dict__", "__globals__", "__import__", "eval", "exec", "f_globals", "getmodule", "globals", "import_module",
     "locals", "modules", "vars")
)  # fmt: skip


#: Instructions that load what a name stands for, or an attribute. From Python 3.13 on, some load two variables.
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD", "STORE_FAST_LOAD_FAST")


def handed_on(code: types.CodeType) -> set[str]:
    """The names of which a function, and those inside it, do more than read attributes: of ``f(a, b.c)``, a and c.

    Anything that a function imports under another name has its own name here.
    """
    found: set[str] = set()
    imported: list[tuple[str, str]] = []
    loaded = origin = ""
    for instruction in dis.get_instructions(code):
        opname, argument = instruction.opname, instruction.argval
        names = argument if isinstance(argument, tuple) else (argument,)
        if loaded and opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            found.add(loaded)
        if opname in ("IMPORT_NAME", "IMPORT_FROM"):
            origin = argument.partition(".")[0]
        elif origin and opname.startswith("STORE_"):
            imported.append((names[0], origin))
            origin = ""
        *others, loaded = names if opname.startswith(_LOADS) else ("",)
        found.update(others)
    found.update(*(handed_on(const) for const in code.co_consts if isinstance(const, types.CodeType)))
    return found.union(own for name, own in imported if name in found)


def modules_imported(function: types.FunctionType) -> Iterator[types.ModuleType]:
    """The user's own modules that a function imports when it is called. They are imported here."""
    for name, members in sorted(_imports(function.__code__, function.__globals__.get("__package__") or "")):
        with contextlib.suppress(Exception):  # the function may expect the import to fail
            if _is_installed(name.partition(".")[0]):
                continue
            module = importlib.import_module(name)
            for member in members:
                if not hasattr(module, member):
                    importlib.import_module(f"{name}.{member}")
            yield module
            if "." in name:
                yield sys.modules[name.partition(".")[0]]


def member_of(module: types.ModuleType, name: str) -> Any:
    """What a module has under a name, also what its ``__getattr__`` finds; None if nothing."""
    is_lazy = "__getattr__" in vars(module) or type(module) is not types.ModuleType
    if name not in vars(module) and is_lazy:
        with contextlib.suppress(Exception):
            return getattr(module, name)
    return vars(module).get(name)


def _imports(code: types.CodeType, package: str) -> set[tuple[str, tuple[str, ...]]]:
    """The modules that a function and the functions inside it import, each with the names taken from it."""
    found = set()
    for part in _with_inner(code):
        before: list[Any] = [0, None]
        for instruction in dis.get_instructions(part):
            if instruction.opname == "EXTENDED_ARG":  # before any whose argument is above 255
                continue
            if instruction.opname == "IMPORT_NAME":
                level, members = before
                name = instruction.argval
                found.add((importlib.util.resolve_name("." * level + name, package) if level else name, members or ()))
            before = [before[1], instruction.argval]
    return found


def contents_of(cell: types.CellType) -> list[Any]:
    """What a variable of a closure holds; nothing if it was not set yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def own_attribute(value: Any, name: str) -> Any:
    """An attribute that is there; None for any that the class's ``__getattr__`` would make up, or fail to."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its ``__dict__`` and its slots, by name."""
    found = dict(own_attribute(value, "__dict__") or {})
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{slot}" if private else slot
            if slot not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


# Hashing


#: The code of every function that ``functools.singledispatch`` made.
_SINGLE_DISPATCH = cast(Any, functools.singledispatch(len)).__code__

_WRAPPERS = (functools.partial, staticmethod, classmethod, functools.cached_property, property)

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
    | {"__annotations_cache__", "__orig_bases__", "__parameters__", "__match_args__", "__hash__"}
    # what pydantic makes of fields and decorators, with addresses in memory, and what it remembers of calls
    | {"__pydantic_core_schema__", "__pydantic_validator__", "__pydantic_serializer__", "__pydantic_complete__"}
    | {"__pydantic_setattr_handlers__", "__signature__"}
)


class Code(Described):
    """Hashes functions, classes and modules. :class:`~monai_gds.keys.hashing.Values` derives from it.

    A function or class holds values. The user's functions, classes and modules that it names are hashed after the
    values, each once (:meth:`definitions`).
    """

    def __init__(self, *, exact: bool, describes: bool, ordered: bool) -> None:
        super().__init__(exact=exact, describes=describes)
        self._ordered = ordered
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

    @abstractmethod
    def digest(self, value: Any, where: str) -> bytes:
        """The digest of any value."""

    @abstractmethod
    def each(self, values: Iterable[Any], where: str) -> list[bytes]:
        """The digests of several values."""

    @abstractmethod
    def pairs(self, value: Mapping[Any, Any], where: str) -> list[bytes]:
        """The digests of the members of a dict."""

    # What was met

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
        with self.silence():  # it was described where it was met
            head = self.digest(value, where)
        parts = self._class_body(value) if isinstance(value, type) else self._globals(value, where)
        code = join([head, *parts])
        self.describe(class_place(value) if isinstance(value, type) else where, f"code {code.hex()[:8]}")
        return code

    def _globals(self, function: types.FunctionType, where: str) -> Iterable[bytes]:
        """Digests of what a function reads from its module, the user's other modules, and the user's functions."""
        names, handed = sorted(names_read(function.__code__)), handed_on(function.__code__)
        # of what a library's decorator made, the library's variables may be anything, such as locks
        let_pass = () if library_of(function.__globals__.get("__name__", "")) is None else (HashingError,)
        self._names.update(names)
        for name in sorted(globals_read(function.__code__)):
            if name in function.__globals__ and not self.is_device(name, function.__globals__[name]):
                value = as_in_the_script(name, function.__globals__[name])
                if isinstance(value, dict) and name == REFERENCES:
                    consts = [const for part in _with_inner(function.__code__) for const in part.co_consts]
                    texts = {const for const in consts if isinstance(const, str)}
                    value = {key: value[key] for key in sorted(value.keys() & texts)}
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
                    yield from (self.pairs(own, f"{where}'s {name}") if own else ())
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
                if (id(module), name) not in self._read and not self.is_device(name, member):
                    self._read.add((id(module), name))
                    with contextlib.suppress(HashingError):
                        content = self.digest(member, f"{where}.{name}")
                        if own_attribute(member, "__name__") != f"{module.__name__}.{name}":
                            yield join([b"member", module_name(module.__name__), name.encode(), content])

    def _attributes_of_functions(self) -> Iterator[bytes]:
        """What any of the user's functions may read of attributes of others, each once, as of modules."""
        for function, where in list(self._defined.values()):
            if isinstance(function, types.FunctionType):
                for name in sorted(self._names & vars(function).keys()):
                    if (id(function), name) not in self._read:
                        self._read.add((id(function), name))
                        with contextlib.suppress(HashingError):
                            own = self.pairs({name: vars(function)[name]}, where)
                            yield join([b"attribute", self.digest(function, where), *own])

    # Functions

    def of_callable(self, value: Any, where: str) -> list[bytes] | None:
        if isinstance(value, types.FunctionType):
            return self._function(value, where)
        if isinstance(value, types.MethodType):
            return [b"method", self.digest(value.__func__, where), self.digest(value.__self__, where)]
        if isinstance(value, _BUILT_IN) or type(value).__name__ in _OF_CYTHON:
            owner = getattr(value, "__self__", None)
            bound = [] if owner is None or isinstance(owner, types.ModuleType) else [self.digest(owner, where)]
            of_class = own_attribute(value, "__objclass__")
            module = getattr(value, "__module__", None) or getattr(of_class, "__module__", None)
            library = library_of(module) or b""
            return [b"builtin", library, str(module).encode(), value.__qualname__.encode(), *bound]
        if isinstance(value, types.CodeType):
            return self._code(value, where)
        if isinstance(value, types.CellType):
            return [b"cell", *(self.digest(held, where) for held in contents_of(value))]
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
            return [b"property", *self.each((value.fget, value.fset, value.fdel), where), *own]
        # a user's may do more than it wraps, and so may what does not have it from functools.update_wrapper
        wrapped = None if is_users else (own_attribute(value, "__dict__") or {}).get("__wrapped__")
        return None if wrapped is None else [b"wrapped", self.digest(wrapped, where)]

    def _further(self, value: Any, where: str, is_users: bool) -> list[bytes]:
        """Digests of what a wrapper has beside what it wraps: a class of the user's, and attributes."""
        attributes = {name: held for name, held in attributes_of(value).items() if name not in _OF_WRAPPERS}
        own = [self.digest(type(value), where)] if is_users else []
        return [*own, *(self.pairs(attributes, where) if attributes else ())]

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
            parts.append(b"device" if is_device else self.digest(cell, f"{where}'s variable {name}"))
        if library is None:
            self._defined.setdefault(id(value), (value, where))
            # the same code in files that were loaded under one name reads the variables of its own file
            found, own = self._namespaces.setdefault(join(parts), []), id(value.__globals__)
            if own not in found:
                found.append(own)
            if place := found.index(own):
                parts += [b"namespace", str(place).encode()]
        return parts

    def _code(self, code: types.CodeType, where: str) -> list[bytes]:
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
        if issubclass(cls, enum.Enum):
            values = {name: member.value for name, member in cls.__members__.items()}
            own = {k: v for k, v in vars(cls).items() if isinstance(v, _METHODS) or not _is_private(k)}
            others = {k: v for k, v in own.items() if k not in values}
            members = [*self.pairs(values, where), *self.pairs(others, where)]
            attributes = {name: held for name, member in cls.__members__.items() if (held := _of_member(member))}
            members += self.pairs(attributes, where) if attributes else []
            members += self.each(list(values), where) if self._ordered and len(values) > 1 else []
            return [*parts, *members, *self.each(cls.__bases__, f"{where}'s bases")]
        if "<locals>" in cls.__qualname__ or self._classes.setdefault(parts[1], cls) is not cls:  # an ambiguous name
            return [*parts, *self._class_body(cls)]
        self._defined.setdefault(id(cls), (cls, where))
        return parts

    def own_code(self, cls: type, where: str) -> list[bytes]:
        """The digest of a class of values that count by what they hold; empty if no code of a user's is in it."""
        is_users = cls.__flags__ & _HEAP_TYPE and any(library_of_class(base) is None for base in cls.__mro__)
        return [self.digest(cls, where)] if is_users else []

    def _class_body(self, cls: type) -> list[bytes]:
        members = {k: v for k, v in vars(cls).items() if k not in _CLASS_NOISE and not isinstance(v, _SLOTS)}
        if hasattr(cls, "__cache_key__"):  # it declares which data count; code counts all the same
            members = {k: v for k, v in members.items() if callable(v) or hasattr(v, "__get__")}
        where = class_place(cls)
        return [*self.pairs(members, where), *self.each(cls.__bases__, where + "'s bases")]

    def of_enum(self, cls: type) -> bytes:
        """The digest of a user's enum, made once: an item may have hundreds of its members.

        It is made as if nothing else were being hashed, so that it is the same wherever the enum is met first. Enums
        within it, which may refer back to it, are hashed where they are.
        """
        where = class_place(cls)
        if self._in_enum:
            return self.digest(cls, where)
        known = cls, self.writes_files > 0
        if known not in self._enums:
            outer, self._open, self._in_enum = self._open, {}, True
            try:
                self._enums[known] = self.digest(cls, where)
            finally:
                self._open, self._in_enum = outer, False
        self.describe(where, f"code {self._enums[known].hex()[:8]}")
        return self._enums[known]

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


def class_place(cls: type) -> str:
    """Where a user's class is described."""
    return f"class {module_name(cls.__module__).decode()}.{cls.__qualname__}"
