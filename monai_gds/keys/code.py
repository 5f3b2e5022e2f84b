"""Where Python code comes from and what it reads."""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

__all__ = [
    "UNVERSIONED",
    "as_in_the_script",
    "attributes_of",
    "globals_read",
    "handed_on",
    "has_code_of_a_user",
    "is_filled",
    "is_pure_python",
    "is_slot",
    "library_of",
    "library_of_class",
    "library_of_function",
    "member_of",
    "module_name",
    "modules_imported",
    "names_read",
    "own_attribute",
    "texts_in",
]

#: Libraries that count by name only. The layer that adds one makes its version an ingredient of keys.
UNVERSIONED = {"monai_gds"}

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

    ``functools.wraps`` gives a user's function the name of the library's that it calls. What ``eval`` makes, such as a
    function in a bundle's configuration, is of no module.
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
    if library is None or cls.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) != _HEAP_TYPE or _is_in_its_module(cls):
        return library
    functions = [member for member in vars(cls).values() if isinstance(member, types.FunctionType)]
    is_users = cls.__module__ in ("builtins", "types") or any(library_of_function(f) is None for f in functions)
    return None if is_users else library


def has_code_of_a_user(cls: type) -> bool:
    """Whether a class is the user's, or derived from one that is."""
    return bool(cls.__flags__ & _HEAP_TYPE) and any(library_of_class(base) is None for base in cls.__mro__)


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


def names_read(code: types.CodeType) -> set[str]:
    """The names that a function and the functions inside it look up, those of attributes included."""
    return set(code.co_names).union(*map(names_read, _inside(code)))


def globals_read(code: types.CodeType) -> set[str]:
    """The names that a function and the functions inside it may look up in their module.

    An attribute is none of them (of ``self.args``, a script may have ``args`` only where it is not a spawned worker),
    except where the code may reach its module in another way than by a variable.
    """
    names = names_read(code)
    return names if names & _REACHES_MODULES else _variables_read(code)


#: Names by which code may read any variable of a module.
_REACHES_MODULES = frozenset(
    ("__dict__", "__globals__", "__import__", "eval", "exec", "f_globals", "getmodule", "globals", "import_module",
     "locals", "modules", "vars")
)  # fmt: skip


def _variables_read(code: types.CodeType) -> set[str]:
    loads = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    names = {load.argval for load in dis.get_instructions(code) if load.opname in loads}
    return names.union(*map(_variables_read, _inside(code)))


def _inside(code: types.CodeType) -> list[types.CodeType]:
    """The functions inside a function."""
    return [const for const in code.co_consts if isinstance(const, types.CodeType)]


#: Instructions that load what a name stands for, or an attribute. From Python 3.13 on, some load two variables.
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD", "STORE_FAST_LOAD_FAST")


def handed_on(code: types.CodeType) -> set[str]:
    """The names of which a function, and those inside it, do more than read attributes: of ``f(a, b.c)``, a and c.

    What a function imports under another name has its own name here.
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
    found.update(*map(handed_on, _inside(code)))
    return found.union(own for name, own in imported if name in found)


def texts_in(code: types.CodeType) -> set[str]:
    """The texts among the constants of a function and the functions inside it."""
    return {const for const in code.co_consts if isinstance(const, str)}.union(*map(texts_in, _inside(code)))


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
    before: list[Any] = [0, None]
    for instruction in dis.get_instructions(code):
        if instruction.opname == "EXTENDED_ARG":  # in front of any whose argument is above 255
            continue
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


def is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def is_slot(member: Any) -> bool:
    return isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType))


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


def is_pure_python(cls: type) -> bool:
    """Whether a class and all its bases are written in Python, so that attributes make up the whole instance."""
    keeps_attributes = False
    for base in reversed(cls.__mro__[:-1]):
        keeps_attributes |= "__dict__" in vars(base) or "__slots__" in vars(base)
        if not keeps_attributes or base.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) != _HEAP_TYPE:
            return False
    return True
