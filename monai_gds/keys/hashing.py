"""A canonical hash of Python values: equal in every process and run, whatever the memory layout.

A value counts by its contents: types, data, and code (:mod:`monai_gds.keys.code`). Identity, sharing, and the order of
dicts and sets do not count. Everything in an item counts, since transforms pass it on. Of transforms, some state does
not:

* a device: anything that names one (a ``torch.device``, ``"cuda:1"``, None) and is called ``device``;
* random state: generators of NumPy, Python and torch;
* what objects of libraries remember of calls (:mod:`monai_gds.keys.libraries`).

The order of their dicts does count: a transform may make a channel of each member. The walk also describes transforms,
so that two pipelines can be compared (:mod:`monai_gds.folder.explain`), and collects strings, which may name files.
"""

from __future__ import annotations

import collections
import copyreg
import enum
import functools
import gc
import hashlib
import io
import logging
import math
import os
import pathlib
import random
import re
import struct
import types
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import xxhash

from monai_gds.base.names import below
from monai_gds.errors import HashingError
from monai_gds.keys.code import Code, HashedTransforms, join
from monai_gds.keys.libraries import (
    BY_TYPE,
    COMPUTED,
    TRANSIENT,
    as_in_the_script,
    is_made_in_python,
    library_of,
    module_name,
    writes_files,
)
from monai_gds.keys.reads import attributes_of, in_class, own_attribute

_RANDOM_STATES = (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)

#: The bytes of most values, by type. The class of such a value has no code of a user's.
_EXACT: dict[type, Callable[[Any], bytes]] = {
    str: lambda value: value.encode("utf-8", "surrogatepass"),
    int: lambda value: hex(value).encode(),
    float: lambda value: struct.pack("<d", value),
    complex: lambda value: struct.pack("<dd", value.real, value.imag),
    bytes: bytes,
    bytearray: bytes,
}

#: What torch keeps in a module under keys that count all hooks of a process.
_HOOKS = frozenset(name for name in vars(torch.nn.Module()) if "_hooks" in name)


def canonical_hash(value: Any) -> bytes:
    """Hashes plain data, arrays, tensors, functions, and objects made of them: 32 hex digits, as MONAI's ``hash_func``.

    A class can declare which of its data count by a method ``__cache_key__(self)`` that returns plain data.

    Raises:
        HashingError: the value holds something without a stable content (a generator, a data frame…).

    Example:
        >>> canonical_hash({"a": 1, "b": 2}) == canonical_hash({"b": 2, "a": 1})
        True
    """
    return Values().hash(value, "value").encode()


def hash_item(item: Any, root: str | None = None) -> str:
    """Hashes an item of a dataset as :func:`canonical_hash` does, but everything in it counts.

    Args:
        item: the item.
        root: paths below this folder count by the part that follows it.
    """
    return Values(root, exact=True).hash(item, "item")


def hash_transforms(
    transforms: Sequence[Callable[..., Any]], root: str | None = None, by_source: bool = True
) -> HashedTransforms:
    """Hashes and describes transforms, in the order in which they run. Otherwise as :func:`hash_item`.

    Code counts by its bytecode, without ``by_source``: what was pickled by value has no source elsewhere.
    """
    hasher = Values(root, describes=True, ordered=True, by_source=by_source)
    digests = []
    for i, transform in enumerate(transforms):
        name = own_attribute(transform, "__qualname__") or type(transform).__qualname__
        digests.append(hasher.digest(transform, f"transforms[{i}] {name}"))
    hasher.met.digest = join([*digests, *hasher.definitions()]).hex()
    return hasher.met


class Values(Code):
    """Hashes values: one walk over a value. Code is hashed by :class:`~monai_gds.keys.code.Code`."""

    def hash(self, value: Any, where: str) -> str:
        """The hash of a value, as 32 hex digits."""
        content = self.digest(value, where)
        return join([content, *self.definitions()]).hex()

    def digest(self, value: Any, where: str) -> bytes:
        return join(self._parts(value, where))

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
            return [kind.__name__.encode(), *self.each(value, where)]
        if kind is dict:  # as most items are
            return [b"dict", *self._contents(value, where)]
        if isinstance(value, (set, frozenset)):
            with self.silence():
                members = sorted(self.each(value, where))
            self.describe(where, f"a set of {len(members)}, {join(members).hex()[:8]}")
            if kind in (set, frozenset):
                return [kind.__name__.encode(), *members]
            return [b"set", self.named(kind), *self.own_code(kind, where), *self.attributes(value, where), *members]
        if any("__class__" in vars(cls) for cls in kind.__mro__[:-1]):  # a proxy passes for what it stands for
            held = [] if _is_pure_python(kind) else [v for v in gc.get_referents(value) if v is not kind]
            return [b"proxy", self.digest(kind, where), *self.each(held, where), *self.attributes(value, where)]
        if kind in weakref.ProxyTypes:
            return [b"proxy", self.digest(value.__repr__.__self__, where)]
        if isinstance(value, np.ndarray):
            return self._array(value, where)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if isinstance(value, type):
            return self.of_class(value, where)
        code = self.of_callable(value, where)
        if code is not None:
            return code
        return self._object(value, where)

    def _plain(self, value: Any, where: str) -> list[bytes] | None:
        """The parts of a value that holds no others; None for any other value."""
        if isinstance(value, (str, pathlib.PurePath)) and not isinstance(value, enum.Enum):
            if self._describes:
                (self.met.written if self.writes_files else self.met.strings).add(str(value))
            rest = None if self._root is None else below(str(value), self._root)
            if rest is not None:
                self.describe(where, f"<root>{rest}")
                return [b"below the root", type(value).__name__.encode(), rest.encode("utf-8", "surrogatepass")]
        if isinstance(value, torch.device):
            self.met.devices.add(value.type)
            return [b"device", (str(value) if self._exact else value.type).encode()]
        if isinstance(value, _RANDOM_STATES) and not self._exact:
            self.met.generators.append(value)
            own = self.own_code(type(value), where)
            return [b"random state", *own, *(self.attributes(value, where) if own else ())]
        is_nan = type(value) is float and math.isnan(value) and not self._exact
        plain = [b"float", b"nan"] if is_nan else _plain(value)
        if plain is not None:
            if self._describes:
                self.describe(where, _short(value))
            if type(value) not in _EXACT and (own := self.own_code(type(value), where)):
                plain += own if isinstance(value, enum.Enum) else [*own, *self.attributes(value, where)]
        return plain

    # Arrays

    def _array(self, value: np.ndarray, where: str) -> list[bytes]:
        head = [b"array", str(np.lib.format.dtype_to_descr(value.dtype)).encode(), repr(value.shape).encode()]
        if value.dtype.hasobject:
            return [*head, *self.each(value.ravel().tolist(), where)]
        if value.dtype.kind == "U" and (self._root is not None or self._describes):
            head.extend(self.each(value.ravel().tolist(), where))  # its strings may be paths
            if self._root is not None:
                return [*head[:1], *head[2:]]  # the width of the dtype depends on the root's length
        data = _data_digest(value)
        self.describe(where, _short_array(value, data))
        if type(value) in (np.ndarray, np.memmap):
            return [*head, data]
        own = self.own_code(type(value), where)
        extra = [self.named(type(value)), *own]
        if isinstance(value, np.ma.MaskedArray):
            mask = [np.ma.getmaskarray(value), value.fill_value, value.mask is np.ma.nomask, value.hardmask]
            extra.append(self.digest(mask, f"{where}'s mask"))
        if own or not isinstance(value, np.ma.MaskedArray):
            extra.extend(self.attributes(value, where))
        return [*head, data, *extra]

    def _tensor(self, value: torch.Tensor, where: str) -> list[bytes]:
        if value.layout != torch.strided or value.is_nested or value.is_meta:
            raise HashingError(_refusal(value, where, f"layout {value.layout}, device {value.device}"))
        plain = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
        data = _data_digest(raw)
        self.describe(where, f"tensor {str(value.dtype)[6:]} {tuple(value.shape)} {data.hex()[:8]}")
        extra = []
        if value.is_quantized:
            extra.append(self.digest(value.dequantize(), f"{where}'s values"))
        if value.requires_grad:
            self.met.requires_grad = True
            extra.append(b"requires grad")
        if type(value) is torch.nn.Parameter:
            extra.append(b"parameter")
        elif type(value) is not torch.Tensor or vars(value):
            extra.extend([self.named(type(value)), *self.own_code(type(value), where)])
            extra.extend(self.pairs(vars(value), where))
        return [b"tensor", str(value.dtype).encode(), repr(tuple(value.shape)).encode(), data, *extra]

    # Objects

    def _object(self, value: Any, where: str) -> list[bytes]:
        if value is os.environ:  # as where code has it of the module: what is read of it does not count
            return [b"environment"]
        head = [b"object", self.digest(type(value), where)]
        own = own_attribute(value, "__cache_key__")
        if own is not None:
            return [*head, self.digest(own(), f"{where}.__cache_key__()")]
        if any((cls.__module__, cls.__name__) == ("pandas.core.generic", "NDFrame") for cls in type(value).__mro__):
            why = "it keeps references to itself: hold its values, as frame.to_dict('list') or frame.to_numpy()"
            raise HashingError(_refusal(value, where, why))
        outer = self.writes_files
        self.writes_files = outer or any(map(writes_files, type(value).__mro__))
        try:
            return [*head, *self._contents(value, where)]
        finally:
            self.writes_files = outer

    def _contents(self, value: Any, where: str) -> list[bytes]:
        if isinstance(value, Mapping):
            own: list[Any] = []  # what the type adds to a dict
            if isinstance(value, collections.OrderedDict):
                own = list(value)
            elif isinstance(value, collections.defaultdict):
                own = [value.default_factory]
            ordered = list(value) if self._ordered and len(value) > 1 else []
            with self.silence():
                extra = self.each([*own, *ordered], f"{where}'s own")
            if ordered:
                self.describe(f"{where}'s order", join(extra).hex()[:8])
            return [*extra, *self.pairs(value, where), *self.attributes(value, where)]
        if isinstance(value, types.ModuleType):
            if library_of(value.__name__) is None:
                self._modules.setdefault(id(value), (value, where))
            return [b"module", library_of(value.__name__) or b"", module_name(value.__name__)]
        if not BY_TYPE.isdisjoint(f"{cls.__module__}.{cls.__qualname__}" for cls in type(value).__mro__):
            return []
        if isinstance(value, ContextVar):
            return [value.name.encode(), self.digest(value.get(None), where)]
        if isinstance(value, struct.Struct):
            return [value.format.encode()]
        if isinstance(value, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            return _script(value)
        if isinstance(value, io.IOBase) and isinstance(name := getattr(value, "name", None), (str, bytes)):
            mode = str(getattr(value, "mode", ""))
            return [mode.encode(), self.digest(name, where) if "r" in mode else b"written"]
        # A class written in C (str, deque…) holds data that only pickling shows.
        native = [] if _is_pure_python(type(value)) else self._reduced(value, where)
        return [*native, *self.attributes(value, where)]

    def attributes(self, value: Any, where: str) -> Iterable[bytes]:
        skip: set[str] = set()
        state = attributes_of(value)
        for cls in type(value).__mro__:
            name = f"{cls.__module__}.{cls.__qualname__}"
            skip |= TRANSIENT.get(name, frozenset())
            state.update({attribute: compute(value) for attribute, compute in COMPUTED.get(name, {}).items()})
            if name == "torch.nn.modules.module.Module":  # the order in which Sequential runs its modules
                state["order of _modules"] = list(value._modules.keys())  # TorchScript's are not a dict
                hooks = {k: v for k, v in state.items() if k in _HOOKS and isinstance(v, dict)}
                state.update({k: list(v.values()) for k, v in hooks.items()})
        for name in sorted(state.keys() - skip, key=str):
            computed_once = isinstance(in_class(type(value), name), functools.cached_property)
            if not computed_once and not self.is_device(name, state[name]):
                member = as_in_the_script(name, state[name])
                yield str(name).encode() + self.digest(member, f"{where}.{name}")

    def _reduced(self, value: Any, where: str) -> Iterable[bytes]:
        """An object of a C type, by the parts it would be pickled as."""
        own = own_attribute(value, "__dict__")  # many types create it on first access, and pickle it from then on
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            parts = reduce(value) if reduce else value.__reduce_ex__(4)  # older protocols drop a datetime's fold
        except Exception as e:
            raise HashingError(_refusal(value, where, str(e))) from e
        if isinstance(parts, str):  # the name of a global; numpy.frompyfunc gives its own objects one, too
            inside = [held for held in gc.get_referents(value) if isinstance(held, types.FunctionType)]
            return [parts.encode(), *self.each(inside, where)]
        shown = [None if p is own else p for p in parts]  # attributes count by themselves, those that do
        return [self.digest(list(p) if isinstance(p, Iterator) else p, where) for p in shown]


def _script(value: Any) -> list[bytes]:
    """What TorchScript would save, without lines of source files and counts of what was compiled before."""
    with zipfile.ZipFile(io.BytesIO(value.save_to_buffer())) as saved:
        names = {name.partition("/")[2]: name for name in saved.namelist() if not name.endswith(".debug_pkl")}
        kept = [(name, saved.read(names[name])) for name in sorted(names) if name.startswith(("data", "const", "code"))]
    return [part for name, content in kept for part in (_bare(name.encode()), _bare(content))]


def _bare(text: bytes) -> bytes:
    return re.sub(rb"___torch_mangle_\d+\.?", b"", text).replace(b"__mp_main__", b"__main__")


def _plain(value: Any) -> list[bytes] | None:
    """The parts of a value that holds no others."""
    kind = type(value)
    if kind in _EXACT:
        return [kind.__name__.encode(), _EXACT[kind](value)]
    if value is None or isinstance(value, (bool, type(...), type(NotImplemented))):
        return [b"singleton", repr(value).encode()]
    if isinstance(value, enum.Enum):
        name = value.name if value.name is not None else repr(value.value)  # a flag without any bits has none
        return [b"enum", type(value).__qualname__.encode(), name.encode()]
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
    return None


def _is_pure_python(cls: type) -> bool:
    """Whether a class and all its bases are written in Python, so that attributes make up the whole instance."""
    keeps_attributes = False
    for base in reversed(cls.__mro__[:-1]):
        keeps_attributes |= "__dict__" in vars(base) or "__slots__" in vars(base)
        if not keeps_attributes or not is_made_in_python(base):
            return False
    return True


def _data_digest(array: np.ndarray) -> bytes:
    """16 bytes of XXH3 over an array's data in C order. It runs at memory speed, unlike a cryptographic hash."""
    if not array.dtype.itemsize or not array.size:
        return b""
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


def _refusal(value: Any, where: str, why: str) -> str:
    cls = type(value)
    return (
        f"{where} is a {cls.__module__}.{cls.__qualname__}, which cannot be hashed stably ({why}). Give its class, or "
        "the one that holds it, a method __cache_key__(self) that returns plain data, or pass your own hash_func (for "
        "items) or hash_transform (for transforms; hash_transform=None leaves them out of the key)"
    )
