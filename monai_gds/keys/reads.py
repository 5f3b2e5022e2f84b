"""What a function reads, according to its bytecode, and what objects hold. No code of theirs runs."""

from __future__ import annotations

import abc
import dis
import enum
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from monai_gds.keys.libraries import as_in_the_script, is_lazy, library_of, library_of_class


class Step(NamedTuple):
    """One step from an object to what is read of it."""

    kind: str  # "." for an attribute, "[]" for a member under a constant key, "get" for one that may be missing
    name: Any  # the name or the key

    def __str__(self) -> str:
        return f".{self.name}" if self.kind == "." else f"[{self.name!r}]"


#: The steps that code takes before it does anything else with what it has found.
Path = tuple[Step, ...]

#: The path of an object that code does something else with at once: all of it counts.
WHOLE: Path = ()

_OF_MODULE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_VARIABLES = ("_GLOBAL", "_GLOBALS", "_NAME", "_DEREF", "_CLASSDEREF", "_FAST", "_FAST_CHECK")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")

#: Names by which code may read any variable of a module.
_REACHES_MODULES = frozenset(
    ("__dict__", "__globals__", "__import__", "eval", "exec", "f_globals", "getmodule", "globals", "import_module",
     "locals", "modules", "vars")
)  # fmt: skip


class Import(NamedTuple):
    """One module that a function imports when it runs."""

    module: str  # relative to the function's package if it begins with dots
    member: str  # that is taken from it; empty if none is
    name: str  # of the variable that is then the member, the module, or, of ``import a.b``, the package a


class Reads(NamedTuple):
    """What a function and the functions inside it read.

    Attributes:
        names: the names they look up, those of attributes included.
        variables: the paths read from each variable of their module. An attribute is none of them (of ``self.args``, a
            script may have ``args`` only where it is not a spawned worker), except where the code may reach its module
            in another way than by a variable.
        inner: the paths read from variables of functions, by their names: those around them, and their own.
        imports: what they import when they run, sorted.
    """

    names: frozenset[str]
    variables: dict[str, set[Path]]
    inner: dict[str, set[Path]]
    imports: list[Import]


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> Reads:
    """What a function reads."""
    variables: dict[str, set[Path]] = {}
    inner: dict[str, set[Path]] = {}
    imports: set[Import] = set()
    names = frozenset(name for part in with_inner(code) for name in part.co_names)
    for part in with_inner(code):
        instructions = _instructions(part)
        for i, (opname, argument) in enumerate(instructions):
            makes_closure = opname == "LOAD_FAST" and argument in part.co_freevars + part.co_cellvars
            if opname.startswith("LOAD_") and opname.endswith(_VARIABLES) and not makes_closure:
                into = variables if opname in _OF_MODULE else inner
                into.setdefault(argument, set()).add(_path(instructions, i + 1))
            elif opname == "IMPORT_NAME":
                level, members = (constant for _, constant in instructions[i - 2 : i])
                stored = [name for op, name in instructions[i:] if op.startswith("STORE_")]
                module = "." * level + argument
                imports.update(Import(module, *pair) for pair in zip(members or [""], stored, strict=False))
    if names & _REACHES_MODULES:
        variables = {name: {WHOLE} for name in names | variables.keys()}
    return Reads(names, variables, inner, sorted(imports))


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of the functions inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from with_inner(const)


def _instructions(code: types.CodeType) -> list[tuple[str, Any]]:
    """Names and arguments. Those that Python 3.13 makes for two variables become two."""
    found = []
    for opname, _, _, argument, *_ in dis.get_instructions(code):
        first, joint, second = opname.partition("_FAST_")
        if joint and isinstance(argument, tuple):
            found += [(f"{first}_FAST", argument[0]), (second, argument[1])]
        elif opname not in ("EXTENDED_ARG", "PRECALL"):
            found.append((opname, argument))
    return found


def _path(instructions: list[tuple[str, Any]], i: int) -> Path:
    """The steps that instructions take from what was loaded before the ``i``-th."""
    steps: list[Step] = []
    while True:
        (opname, argument), *following = instructions[i : i + 4]
        then = [name for name, _ in following]
        calls = next((n for n in (1, 2) if then[: n + 1] == ["LOAD_CONST"] * n + ["CALL"]), 0)
        if opname in _ATTRIBUTES and argument == "get" and calls:
            steps.append(Step("get", following[0][1]))
            i += calls + 2
        elif opname in _ATTRIBUTES:
            steps.append(Step(".", argument))
            i += 1
        elif opname == "LOAD_CONST" and then[:1] == ["BINARY_SUBSCR"]:
            steps.append(Step("[]", argument))
            i += 2
        else:
            return tuple(steps)


# What objects hold


class Mark(enum.Enum):
    """What :func:`read_by` finds in place of a value."""

    ABSENT = "there is no such attribute or member"
    UNKNOWN = "it may be more than reading: a method, a property, a class's own way of looking it up"


_LOOK_UP: tuple[Any, ...] = tuple(
    kind.__getattribute__ for kind in (object, type, types.SimpleNamespace, dict, OrderedDict, defaultdict)
)


def own_attribute(value: Any, name: str, default: Any = None) -> Any:
    """An attribute that is there; ``default`` for any that the class's ``__getattr__`` would make up, or fail to."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return default


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its ``__dict__`` and its slots, by name."""
    found = dict(own_attribute(value, "__dict__") or {})
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{slot}" if private else slot
            held = own_attribute(value, name, Mark.ABSENT)
            if slot not in ("__dict__", "__weakref__") and held is not Mark.ABSENT:
                found[name] = held
    return found


def in_class(cls: type, name: str) -> Any:
    """What a class or one of its bases has under a name, as it is there; ``Mark.ABSENT`` if nothing."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), Mark.ABSENT)


def contents_of(cell: types.CellType) -> list[Any]:
    """What a variable of a closure holds; nothing if it was not set yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def read_by(value: Any, step: Step) -> Any:
    """What code reads of an object by one step, or a :class:`Mark`."""
    cls = type(value)
    if cls.__module__.partition(".")[0] == "omegaconf":
        return _node(value, step)
    if cls is types.ModuleType:
        if library_of(value.__name__) is not None:
            return Mark.UNKNOWN
        missing = Mark.UNKNOWN if is_lazy(value) else Mark.ABSENT
        return as_in_the_script(step.name, vars(value).get(step.name, missing))
    if step.kind == ".":
        return _attribute(value, step.name)
    if cls in (list, tuple) and step.kind == "[]" and type(step.name) is int and -len(value) <= step.name < len(value):
        return value[step.name]
    if not issubclass(cls, dict) or cls.get is not dict.get or cls.__getitem__ is not dict.__getitem__:
        return Mark.UNKNOWN
    missing = Mark.ABSENT if step.kind == "get" or not hasattr(cls, "__missing__") else Mark.UNKNOWN
    return dict.get(value, step.name, missing)


def _attribute(value: Any, name: str) -> Any:
    cls = type(value)
    if isinstance(value, type):
        namespace: type = value
        state: Any = {}
        plain = cls in (type, abc.ABCMeta) and not hasattr(cls, name) and library_of_class(value) is None
    else:
        namespace, state = cls, own_attribute(value, "__dict__", {})
        plain = cls.__getattribute__ in _LOOK_UP and type(state) is dict and not hasattr(cls, "__cache_key__")
        plain = plain and cls is not types.FunctionType  # more of it counts than its attributes
    of_class = in_class(namespace, name)
    if not plain or (hasattr(type(of_class), "__set__") and not isinstance(of_class, types.MemberDescriptorType)):
        return Mark.UNKNOWN
    found = own_attribute(value, name, Mark.ABSENT) if isinstance(of_class, types.MemberDescriptorType) else of_class
    if name in state:
        return state[name]
    if found is Mark.ABSENT and hasattr(cls, "__getattr__"):
        return dict.get(value, name, Mark.UNKNOWN) if cls.__getattr__ is dict.__getitem__ else Mark.UNKNOWN
    return Mark.UNKNOWN if found is of_class and hasattr(type(found), "__get__") else found


def _node(value: Any, step: Step) -> Any:
    """A member of a configuration of omegaconf, without following what its text refers to."""
    if step.kind == "." and hasattr(type(value), step.name):
        return Mark.UNKNOWN
    try:
        node = value._get_node(step.name)
    except Exception:  # a list, and a key that is no index of it
        return Mark.UNKNOWN
    if node is None or type(node).__name__ in ("DictConfig", "ListConfig"):
        return Mark.ABSENT if node is None else node
    return Mark.UNKNOWN if node._is_interpolation() else node._value()


def as_plain(value: Any) -> Any:
    """A configuration of omegaconf as dicts and lists, unless some text in it refers to another part; else itself.

    Its objects know the whole that they are part of.
    """
    if type(value).__name__ not in ("DictConfig", "ListConfig") or not type(value).__module__.startswith("omegaconf"):
        return value
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(value, resolve=False)
    return value if "${" in repr(plain) else plain
