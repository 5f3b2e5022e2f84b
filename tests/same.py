"""Strict equality of item trees, what two items share, and what a device makes of one: what most tests of items ask."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor

__all__ = ["assert_same", "moved", "mutable_parts", "same", "strides"]


def assert_same(a: Any, b: Any, where: str = "item") -> None:
    """Asserts that two trees agree in types, dtypes, shapes, devices, values (NaN equals NaN) and key types."""
    assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
    if isinstance(a, torch.Tensor):
        _tensors(a, b, where)
    elif isinstance(a, np.ndarray):
        _arrays(a, b, where)
    elif isinstance(a, np.generic):
        assert a.dtype == b.dtype, where
        if isinstance(a, np.void):
            _arrays(np.asarray(a), np.asarray(b), where)
            return
        assert a.tobytes() == b.tobytes() or (a != a and b != b), f"{where}: {a!r} and {b!r}"
    elif isinstance(a, dict):
        assert len(a) == len(b), f"{where}: keys {list(a)} and {list(b)}"
        for ka, kb in zip(a, b, strict=True):  # the order of keys is part of a dict
            assert_same(ka, kb, f"{where}'s key {ka!r}")
            assert_same(a[ka], b[kb], f"{where}[{ka!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{where}: lengths {len(a)} and {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, float):
        assert (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b)), where
    elif isinstance(a, complex):
        assert_same([a.real, a.imag], [b.real, b.imag], where)
    elif isinstance(a, slice):
        assert_same([a.start, a.stop, a.step], [b.start, b.stop, b.step], where)
    else:
        assert a == b, f"{where}: {a!r} and {b!r}"


def same(a: Any, b: Any) -> bool:
    """Whether :func:`assert_same` passes."""
    try:
        assert_same(a, b)
    except AssertionError:
        return False
    return True


def strides(value: Any, where: str = "item") -> dict[str, tuple[int, ...]]:
    """The strides of every tensor and array of a tree (metadata left out), 0 along axes where they mean nothing."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        found = value.stride() if isinstance(value, torch.Tensor) else value.strides
        empty = 0 in value.shape
        return {where: tuple(0 if empty or n == 1 else s for n, s in zip(value.shape, found, strict=True))}
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(value)
    return {k: s for name, v in inside for k, s in strides(v, f"{where}[{name!r}]").items()}


def moved(value: Any, device: str) -> Any:
    """What an item is on a CUDA target: its tensors there, and tensors in place of arrays; metadata stays as it is."""
    if isinstance(value, torch.Tensor):
        there = value.as_subclass(torch.Tensor).to(device)
        if isinstance(value, MetaTensor):
            there = there.as_subclass(MetaTensor)
            there.__dict__.update(vars(value))
        return there
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.itemsize <= 8:
        return torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape).to(device)
    if isinstance(value, dict):
        return {k: moved(v, device) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(moved(v, device) for v in value)
    return value


def _tensors(a: torch.Tensor, b: torch.Tensor, where: str) -> None:
    assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device), f"{where}: {a!r} and {b!r}"
    assert a.requires_grad == b.requires_grad, f"{where}: requires_grad"
    plain_a, plain_b = (t.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg() for t in (a, b))
    raw_a, raw_b = (t.contiguous().reshape(-1) for t in (plain_a, plain_b))
    if a.numel():
        assert torch.equal(raw_a.view(torch.uint8), raw_b.view(torch.uint8)), f"{where}: values differ"
    if isinstance(a, MetaTensor):
        # MONAI itself changes their order, when a MetaTensor is copied or sent from a worker
        assert_same(dict(sorted(vars(a).items())), dict(sorted(vars(b).items())), f"{where}.__dict__")


def _arrays(a: np.ndarray, b: np.ndarray, where: str) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{where}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
    if a.dtype.names:  # the bytes between fields are anything
        for name in a.dtype.names:
            _arrays(a[name], b[name], f"{where}[{name!r}]")
    elif a.dtype.hasobject:
        assert_same(a.ravel().tolist(), b.ravel().tolist(), where)
    elif a.dtype.kind in "fcg" and a.dtype.itemsize > 8:  # the padding of a long double is anything
        assert np.array_equal(a, b, equal_nan=True), f"{where}: values differ"
    else:
        assert a.tobytes() == b.tobytes(), f"{where}: values differ"


def mutable_parts(value: Any) -> Iterator[tuple[str, int]]:
    """Identities of everything in a tree that could be changed in place: containers, and memory of arrays."""
    if isinstance(value, torch.Tensor):
        if value.numel():
            yield "storage", value.untyped_storage().data_ptr()
        if isinstance(value, MetaTensor):
            yield from mutable_parts(vars(value))
    elif isinstance(value, (np.ndarray, np.void)):
        array = np.asarray(value)
        if array.dtype.hasobject:
            for v in array.ravel().tolist():
                yield from mutable_parts(v)
        if array.nbytes:
            yield "memory", array.__array_interface__["data"][0]
    elif isinstance(value, dict):
        yield "object", id(value)
        for v in value.values():
            yield from mutable_parts(v)
    elif isinstance(value, (list, tuple, set, frozenset)):
        if isinstance(value, (list, set)):
            yield "object", id(value)
        for v in value:
            yield from mutable_parts(v)
    elif isinstance(value, bytearray):
        yield "object", id(value)
