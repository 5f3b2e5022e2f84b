"""Takes an item apart: what all types (:mod:`.table`) need for it, and the item's tensors and small arrays so far."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from monai_gds.base.names import below
from monai_gds.errors import UnsupportedType
from monai_gds.items.passthrough import ItemValues
from monai_gds.items.types import MAX_DEPTH, Codec, codec_for

#: Alignment of small arrays in the packed block. Arrays whose element size divides it are aligned to that size instead.
ARRAY_ALIGNMENT = 16

#: A tensor is copied if its storage is larger than itself by more than this many bytes.
SLACK = 4096

#: Keys and indices that lead to a value, for messages and the names of tensors.
Path: TypeAlias = "tuple[Any, ...]"

_Encoders: TypeAlias = "Mapping[type, Callable[[Encoder, Any, Path], Any]]"


@dataclass(slots=True)
class EncodedItem:
    """An item taken apart."""

    tree: Any = None  # JSON-able
    # The item's tensors by name: contiguous, detached, each the only user of its storage, on their devices.
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    arrays: bytearray = field(default_factory=bytearray)  # the packed block of small arrays


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that stays in memory and is never written."""

    value: Any


class Encoder:
    """Takes one item apart.

    Args:
        fixed: encoders by exact type, whatever users register.
        others: encoders by type, also for subclasses, which yield to registered types.
        strict, root, given: see :func:`monai_gds.items.tree.encode_item`.

    Attributes:
        out: the item, as far as it has been taken apart.
        on_host: greater than 0 inside a MetaTensor's attributes, where arrays keep their type and place.
    """

    def __init__(
        self, fixed: _Encoders, others: _Encoders, strict: bool, root: str | None, given: ItemValues | None
    ) -> None:
        self.out = EncodedItem()
        self.on_host = 0
        self._fixed, self._others = fixed, others
        self._strict, self._root, self._given = strict, root, given
        self._taken = 0  # number of values taken from the item
        self._memory: list[tuple[int, int]] = []  # sorted address ranges of self.out.tensors
        self._open: set[int] = set()

    def node(self, value: Any, path: Path) -> Any:
        """The node of a value. Raises UnsupportedType if there is none."""
        try:
            return self._node(value, path)
        except UnsupportedType:
            where = None if self._given is None else self._given.path_of(value)
            if where is not None:
                self._taken += 1
                return {"$item": [self.text(key) if type(key) is str else key for key in where]}
            if self._strict:
                raise
            return {"$opaque": Opaque(value)}

    def _node(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self.text(value)
        encode = self._fixed.get(kind)
        if encode is not None:
            return encode(self, value, path)
        codec = codec_for(kind)
        if codec is not None:
            return self._registered(codec, value, path)
        for cls in kind.__mro__:
            encode = self._others.get(cls)
            if encode is not None:
                return encode(self, value, path)
        raise unsupported(value, path)

    def text(self, value: str) -> Any:
        """The node of a string, relative to the data root if it is below it."""
        rest = None if self._root is None else below(value, self._root)
        return value if rest is None else {"$root": rest}

    def has_rooted(self, texts: Iterable[str]) -> bool:
        """Whether any of these strings is at or below the data root."""
        return self._root is not None and any(below(text, self._root) is not None for text in texts)

    def members(self, value: Any, path: Path) -> list[Any]:
        """The nodes of a container's members."""
        return self.inside(value, path, lambda: [self.node(v, (*path, i)) for i, v in enumerate(value)])  # type: ignore[no-any-return]

    def pairs(self, value: dict[Any, Any], path: Path) -> list[Any]:
        """The nodes of a dict's keys and values. To be called inside its container."""
        return [self._pair(k, v, path) for k, v in value.items()]

    def _pair(self, key: Any, value: Any, path: Path) -> list[Any]:
        if type(key) is str:
            return [self.text(key), self.node(value, (*path, key))]
        before = len(self.out.tensors), len(self.out.arrays), self._taken
        node = self.node(key, (*path, key))
        if (len(self.out.tensors), len(self.out.arrays), self._taken) != before:
            raise unsupported(key, path, "is used as a key and holds what no key can hold")
        return [node, self.node(value, (*path, key))]

    def inside(self, container: Any, path: Path, work: Callable[[], Any]) -> Any:
        """Encodes the contents of a container. If that fails, no tensor of them is left in the output."""
        if id(container) in self._open:
            raise unsupported(container, path, "contains itself")
        if len(self._open) >= MAX_DEPTH:
            raise unsupported(container, path, f"is nested more than {MAX_DEPTH} deep")
        self._open.add(id(container))
        before = len(self.out.tensors)
        try:
            return work()
        except UnsupportedType:
            for name in list(self.out.tensors)[before:]:
                del self.out.tensors[name]
            raise
        finally:
            self._open.discard(id(container))

    def _registered(self, codec: Codec, value: Any, path: Path) -> Any:
        try:
            encoded = codec.encode(value)
        except ValueError as e:
            raise unsupported(value, path, str(e)) from e
        return {"$registered": [codec.name, self.inside(value, path, lambda: self.node(encoded, path))]}

    def pack(self, data: bytes, itemsize: int) -> int:
        """Adds a small array's bytes to the packed block, and returns their offset."""
        block = self.out.arrays
        alignment = itemsize if itemsize and ARRAY_ALIGNMENT % itemsize == 0 else ARRAY_ALIGNMENT
        block.extend(bytes(-len(block) % alignment))
        offset = len(block)
        block.extend(data)
        return offset

    def add(self, tensor: torch.Tensor, path: Path) -> str:
        """Adds a detached tensor to the item's, and returns its name."""
        base = ".".join(str(key) for key in path) or "item"
        base = base.encode("utf-8", "backslashreplace").decode()  # safetensors refuses lone surrogates
        if base.startswith("__"):  # reserved for the record
            base = "." + base
        name, n = base, 1
        while name in self.out.tensors:
            n += 1
            name = f"{base}#{n}"
        self.out.tensors[name] = self._own(tensor)
        return name

    def _own(self, value: torch.Tensor) -> torch.Tensor:
        """Makes a tensor contiguous and the only user of a storage hardly larger than itself, by a copy if need be."""
        if not value.nbytes:
            return value.new_empty(value.shape)
        value = value.contiguous()
        if value.untyped_storage().nbytes() > value.nbytes + SLACK or not self._claim(value.untyped_storage()):
            value = value.clone(memory_format=torch.contiguous_format)
            self._claim(value.untyped_storage())
        # Normalises the stride of axes of length 1, which may be anything.
        return value.view(-1).view(value.shape) if 1 in value.shape else value

    def _claim(self, storage: torch.UntypedStorage) -> bool:
        """Notes the memory of a storage; False if another tensor of the item uses some of it."""
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        i = bisect.bisect(self._memory, (start, end))
        if (i and self._memory[i - 1][1] > start) or (i < len(self._memory) and self._memory[i][0] < end):
            return False
        self._memory.insert(i, (start, end))
        return True


def unsupported(value: Any, path: Path, what: str = "cannot be stored in a record") -> UnsupportedType:
    """The error for a value: its place, its type, ``what`` is wrong with it, and the way out."""
    where = "item" + "".join(f"[{key!r}]" for key in path)
    cls = type(value)
    drop = "delete it before the first random transform (DeleteItemsd)"
    if "_meta" in path:  # of a MetaTensor
        drop = "keep it out of the metadata (PydicomReader does so by prune_metadata=True)"
    return UnsupportedType(
        f"{where} is a {cls.__module__}.{cls.__qualname__}, which {what}; {drop}, "
        f"convert it to plain data, or teach records the type with monai_gds.register_type"
    )


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a 1-D uint8 tensor over the same memory."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.reshape(-1).view(torch.uint8)
