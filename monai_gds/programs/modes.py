"""What code is told about ghosts: their device, and what it gets where torch would take or lose their values unseen.

Used by :mod:`monai_gds.programs.recording`. Ghosts are tensors of torch's ``meta`` device. They answer as the tensors
would that they stand for, which are on the target or on the CPU. torch's dispatch mode sees operations only; what is
here happens before: attributes, ``device=``, lists and arrays that become tensors, and conversions to NumPy.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from monai_gds import limits
from monai_gds.programs.ghostly import CPU, GHOSTLY, ON_TARGET, Ghostly, is_ghost, plainly

#: Operations on real tensors of at most this many elements are not looked at.
_SMALL = limits.CONSTANT_BYTES // 32

_Handler: TypeAlias = "Callable[[Ghostly, Any, Sequence[Any], dict[str, Any]], Any]"


class Functions(TorchFunctionMode):
    """Answers for the ghosts of a recording, and keeps small real tensors away from its dispatch mode."""

    def __init__(self, ghostly: Ghostly) -> None:
        super().__init__()
        self._ghostly = ghostly

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch as the target would see it."""
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self._ghostly, func, args, kwargs or {})
        if func.__class__ is _GETTER or func in _QUIET:
            return func(*args, **kwargs) if kwargs else func(*args)
        return _called(self._ghostly, func, args, kwargs)


def _called(ghostly: Ghostly, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """Calls a function whose operations are recorded if they are about ghosts."""
    if _is_small(args, kwargs):  # MONAI's arithmetic on affine matrices: nine of ten calls, and none of ours
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs) if kwargs else func(*args)
    if kwargs and (device := kwargs.get("device")) is not None:
        kwargs = {**kwargs, "device": ghostly.stand_in(device)}
    ghostly.called = [*args, *kwargs.values()] if kwargs else args
    return func(*args, **kwargs) if kwargs else func(*args)


def _is_small(args: Sequence[Any], kwargs: dict[str, Any] | None) -> bool:
    """Whether all tensors are real and small, and so is what the call makes."""
    count = 1
    if kwargs:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return False
        args = [*args, *kwargs.values()]
    with plainly():
        for value in args:
            kind = value.__class__
            if kind is int:
                count *= value if value > 0 else 1
            elif isinstance(value, Tensor):
                if value.is_meta or value.numel() > _SMALL:
                    return False
            elif kind is tuple or kind is list or kind is torch.Size:
                for inner in value:
                    if isinstance(inner, Tensor):
                        if inner.is_meta or inner.numel() > _SMALL // 8:
                            return False
                    elif inner.__class__ is int:
                        count *= inner if inner > 0 else 1
                    elif inner.__class__ not in _ATOMS:
                        return False
            elif kind not in _ATOMS:
                return False
    return count <= _SMALL


_ATOMS = frozenset(
    [float, str, bool, complex, type(None), slice, type(Ellipsis), torch.device, torch.dtype, torch.memory_format,
     torch.layout, np.float64, np.float32, np.int64]
)  # fmt: skip


# Where a tensor is


def _get_device(ghostly: Ghostly, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    device = ghostly.device_of(args[0])
    return -1 if device.type == "cpu" else device.index


def _data_ptr(ghostly: Ghostly, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Equal where memory is shared, which is all that may be learnt from it."""
    tensor = args[0]
    if not is_ghost(tensor):
        return func(*args, **kwargs)
    with plainly():
        front = tensor.storage_offset() * tensor.element_size()
        return (tensor.untyped_storage()._cdata << 12) + front if tensor.numel() else 0


def _to(ghostly: Ghostly, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x.to(…)``, ``x.cpu()``, ``x.cuda()``: ghosts change between the target and the host, too."""
    tensor, device, dtype, rest = args[0], None, None, dict(kwargs)
    if func in (Tensor.cpu, Tensor.cuda):
        where = args[1] if len(args) > 1 else rest.pop("device", None)
        device = CPU if func is Tensor.cpu else torch.device("cuda") if where is None else where
        rest.pop("non_blocking", None)
    else:
        device, dtype, other = rest.pop("device", None), rest.pop("dtype", None), rest.pop("other", None)
        flags = iter(("non_blocking", "copy"))
        for value in args[1:]:
            if isinstance(value, Tensor):
                other = value
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, bool):
                rest[next(flags)] = value
            elif value is not None:
                device = value
        if other is not None:
            device = ghostly.device_of(other)
            with plainly():
                dtype = other.dtype
    have = ghostly.kind_of(tensor)
    want = have if device is None else ghostly.kind_named(device)
    if want != have:
        rest.pop("copy", None)
        return Tensor.to(tensor, device=GHOSTLY[want], dtype=dtype, copy=True, **rest)
    with plainly():
        dtype = dtype or tensor.dtype
        real = not tensor.is_meta and tensor.numel() <= _SMALL
    if not real:
        return Tensor.to(tensor, dtype=dtype, **rest)
    with torch._C._DisableTorchDispatch():
        return Tensor.to(tensor, dtype=dtype, **rest)


def _type(ghostly: Ghostly, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
    if isinstance(dtype, torch.dtype) or not is_ghost(args[0]):
        return func(*args, **kwargs)
    if dtype is not None:
        ghostly.refuse(f"it converts to {dtype}")
    with plainly():
        return torch.empty(0, dtype=args[0].dtype).type().replace("torch.", _PREFIX[ghostly.device_of(args[0]).type])


_PREFIX = {"cpu": "torch.", "cuda": "torch.cuda."}


# Values


def _values(ghostly: Ghostly, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x.numpy()``, ``np.asarray(x)`` and ``x.tolist()``."""
    if not is_ghost(args[0]):
        return func(*args, **kwargs)
    if func is not Tensor.tolist and ghostly.kind_of(args[0]) == ON_TARGET != ghostly.kind_named(CPU):
        raise TypeError("can't convert a CUDA tensor to numpy: use Tensor.cpu() first")
    found = func(ghostly.value(args[0]), *args[1:], **kwargs)
    if isinstance(found, np.ndarray):
        found.flags.writeable = False  # it would share the memory of the tensor
    return found


def _bool(ghostly: Ghostly, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not is_ghost(args[0]) or args[0].numel() != 1:
        return func(*args, **kwargs)
    with plainly():
        tensor = args[0] if args[0].dtype == torch.bool else args[0] != 0
    return bool(ghostly.scalar(tensor))


def _tensor(ghostly: Ghostly, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``torch.as_tensor((x, 1.0))`` would read the numbers of ``x`` unseen."""
    rest = dict(kwargs)
    device = rest.pop("device", None)
    if args and args[0].__class__ in (list, tuple):
        args = (_with_values(ghostly, args[0]), *args[1:])
    if args and is_ghost(args[0]):
        made = func(*args, **rest)
    else:
        with torch._C._DisableTorchDispatch():
            made = func(*args, **rest)
    return made if device is None else _to(ghostly, Tensor.to, (made,), {"device": device})


def _new_tensor(ghostly: Ghostly, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not is_ghost(args[0]):
        return func(*args, **kwargs)
    with plainly():
        dtype = args[0].dtype
    rest = {"dtype": dtype, "device": ghostly.device_of(args[0]), **kwargs}
    return _tensor(ghostly, torch.tensor, args[1:], rest)


def _with_values(ghostly: Ghostly, value: Any) -> Any:
    if value.__class__ in (list, tuple):
        return [_with_values(ghostly, part) for part in value]
    return ghostly.value(value) if is_ghost(value) else value


def _index(ghostly: Ghostly, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x[[2, 1, 0]]``: torch would make the index on the device of ``x``, where its numbers are lost."""
    if not is_ghost(args[0]):
        return _called(ghostly, func, args, kwargs)
    index = args[1]
    index = tuple(map(_indices, index)) if index.__class__ is tuple else _indices(index)
    return _called(ghostly, func, (args[0], index, *args[2:]), kwargs)


def _indices(index: Any) -> Any:
    if isinstance(index, np.ndarray) or (index.__class__ is list and _is_numbers(index)):
        with torch._C._DisableTorchDispatch():
            return torch.as_tensor(index)
    return index


def _is_numbers(index: list[Any]) -> bool:
    return bool(index) and all(
        _is_numbers(i) if i.__class__ is list else isinstance(i, (int, np.integer, np.bool_)) for i in index
    )


# What is refused


def _refused(ghostly: Ghostly, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if any(map(is_ghost, args)):
        ghostly.refuse(f"it calls {getattr(func, '__name__', func)}")
    return func(*args, **kwargs)


def _on_cuda(ghostly: Ghostly, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Functions that are made of other operations on a GPU than elsewhere."""
    if ghostly.kind_named(CPU) != ON_TARGET and any(map(is_ghost, args)):
        ghostly.refuse(f"{func.__name__} is another operation on a GPU")
    return _called(ghostly, func, args, kwargs)


def _grid_sample(ghostly: Ghostly, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with plainly():
        flat = isinstance(args[0], Tensor) and args[0].dim() == 4
    return (_on_cuda if flat else _called)(ghostly, func, args, kwargs)


_plain: Any = Tensor

_HANDLERS: dict[Any, _Handler] = {
    _plain.device.__get__: lambda ghostly, func, args, kwargs: ghostly.device_of(args[0]),
    _plain.is_cuda.__get__: lambda ghostly, func, args, kwargs: ghostly.device_of(args[0]).type == "cuda",
    _plain.is_cpu.__get__: lambda ghostly, func, args, kwargs: ghostly.device_of(args[0]).type == "cpu",
    _plain.is_meta.__get__: lambda ghostly, func, args, kwargs: not is_ghost(args[0]) and func(*args),
    **dict.fromkeys((Tensor.get_device, torch.get_device), _get_device),
    Tensor.data_ptr: _data_ptr, Tensor.to: _to, Tensor.cpu: _to, Tensor.cuda: _to, Tensor.type: _type,
    Tensor.numpy: _values, Tensor.__array__: _values, Tensor.tolist: _values, Tensor.__bool__: _bool,
    torch.tensor: _tensor, torch.as_tensor: _tensor, torch.asarray: _tensor, Tensor.new_tensor: _new_tensor,
    Tensor.__getitem__: _index, Tensor.__setitem__: _index,
    F.grid_sample: _grid_sample, torch.grid_sampler: _grid_sample,
    **dict.fromkeys((F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm, F.ctc_loss, torch.lstm,
                     torch.gru, torch.rnn_tanh, torch.rnn_relu, F.scaled_dot_product_attention), _on_cuda),
    **dict.fromkeys((Tensor.__reduce_ex__, Tensor.__repr__, Tensor.__dlpack__, Tensor.untyped_storage, Tensor.storage,
                     Tensor.new, Tensor.set_, Tensor.resize_, Tensor.apply_, Tensor.map_, Tensor.map2_,
                     Tensor.share_memory_, Tensor.pin_memory, _plain.data.__set__), _refused),
}  # fmt: skip

_GETTER = type(_plain.shape.__get__)
_QUIET = frozenset(
    [Tensor.as_subclass, Tensor.dim, Tensor.numel, Tensor.size, Tensor.stride, Tensor.is_contiguous,
     Tensor.storage_offset, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.__len__,
     torch._C._nn._parse_to]
)  # fmt: skip


# What no mode sees


@contextmanager
def beyond_modes(ghostly: Ghostly) -> Iterator[None]:
    """Refuses compiled functions and autocast in this thread within the block, and answers as on the target.

    No mode of torch sees these. Under a dispatch mode torch runs compiled functions uncompiled, and ghosts are of a
    device that autocast leaves alone, so the last bits of both would be others.

    torch asks one function of its own what a call of a compiled function does. Before its module is imported, which
    takes seconds, there are none, and ``torch.compile`` itself is refused.
    """
    thread = threading.get_ident()
    old: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, instead: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        old.append((owner, name, original))

        def called(*args: Any, **kwargs: Any) -> Any:
            return (instead if threading.get_ident() == thread else lambda original, *a, **k: original(*a, **k))(
                original, *args, **kwargs
            )

        setattr(owner, name, called)

    def refused(why: str, only: Callable[[Any], bool] = lambda first: True) -> Callable[..., Any]:
        def instead(original: Any, first: Any = None, *args: Any, **kwargs: Any) -> Any:
            return ghostly.refuse(why) if only(first) else original(first, *args, **kwargs)

        return instead

    swaps = torch.__future__.get_swap_module_params_on_conversion()
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    try:
        if frames is None:
            replace(torch, "compile", refused("it uses a compiled function"))
        else:
            replace(frames, "_callback_from_stance", refused("it uses a compiled function", callable))
        replace(torch.autocast, "__enter__", refused("it uses autocast"))
        if ghostly.target.type == "cuda":
            replace(torch.cuda, "is_available", lambda original: True)
            replace(torch.cuda, "current_device", lambda original: ghostly.target.index)
            # There parameters are moved in place, so that whoever holds them has them on the GPU. A CPU tensor cannot
            # become a ghost in place, but the two objects can be swapped.
            torch.__future__.set_swap_module_params_on_conversion(True)
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        for owner, name, original in reversed(old):
            setattr(owner, name, original)
