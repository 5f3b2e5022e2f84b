"""``collate``: the results of MONAI's ``list_data_collate``, faster. The loader's default.

It follows torch's ``default_collate``, by the same table of functions, and replaces those that make a torch tensor of
every value: an item of two NIfTI MetaTensors has 88 values. Values that a faster form does not handle go to the
function that it replaces. After any exception the whole batch goes to ``list_data_collate``, so errors are MONAI's too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor, get_track_meta, list_data_collate
from monai.data.utils import collate_meta_tensor_fn
from monai.utils import TraceKeys
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from monai_gds import limits
from monai_gds.storage.memory import pooled_empty

#: Native NumPy dtypes, and what ``torch.as_tensor`` makes of them.
_TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(name): getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}

#: NumPy's names of the dtypes that torch gives to columns of numbers. (It cannot collate uint64.)
_NUMBERS: dict[type, np.dtype[Any]] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    **{dtype.type: dtype for dtype in _TORCH_DTYPES if dtype != np.uint64},
}

#: How much larger the storage of a tensor that is handed on may be: backends allocate whole pages.
_SLACK = 8192

#: Arrays of up to this many bytes are joined, for all keys of one kind.
_SMALL_ARRAY = 1024

#: References to a tensor that only its item holds: the item's, its column's, and the argument of ``getrefcount``.
_ONLY_THE_ITEM = 3

#: How many tensors and other objects of torch hold a storage. None: this torch does not tell.
_holders: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def collate(batch: Sequence[Any]) -> Any:
    """Makes a batch of items with the types, keys, values, dtypes, devices and metadata of ``list_data_collate``.

    A batch of one is not copied: its tensors are those of the item with one more axis. This holds for a contiguous
    tensor that fills its storage, needs no gradient and is referenced by its item alone, such as those of GDSDataset's
    items. One of which somebody has a view, or an array over its memory, is copied: a random transform may remember it.
    The item must not be used afterwards, so do not use this function with a dataset that keeps its items.

    CUDA tensors are stacked on their device, without waiting for it. Numbers and small arrays share blocks of NumPy's
    memory. Large batches on the CPU use a pool of up to 32 MiB. ``resize_`` refuses tensors of either kind, as it does
    those from a worker of a DataLoader.

    Args:
        batch: items. Lists of items, such as ``num_samples`` crops, are joined.

    Returns:
        The items' tree, with tensors of shape ``(len(batch), ...)`` in place of tensors, arrays and numbers, and
        sequences of ``len(batch)`` in place of strings.

    Raises:
        RuntimeError: tensors differ in shape, or whatever else ``list_data_collate`` raises.
        TypeError: a value cannot be collated, such as None.
    """
    try:
        if torch.get_default_device().type != "cpu":  # where torch would put numbers
            return list_data_collate(batch)
        return _Collation().batch(batch)
    except torch.OutOfMemoryError:  # MONAI's function would need as much memory
        raise
    except Exception:
        return list_data_collate(batch)


class _Collation:
    """One call of :func:`collate`. A column holds what all items have in one place of their trees."""

    def batch(self, batch: Sequence[Any]) -> Any:
        default_collate_fn_map[MetaTensor] = collate_meta_tensor_fn  # as list_data_collate does
        first = batch[0]
        if isinstance(first, Mapping):
            return {key: self.column([item[key] for item in batch]) for key in first}
        return self.column([part for item in batch for part in item] if isinstance(first, list) else batch)

    def column(self, values: Sequence[Any]) -> Any:
        function = _torch_function(values[0])
        if function is None:
            return self._container(values)
        faster = _FASTER.get(function)
        found = faster(self, values) if faster is not None else None
        return function(values, collate_fn_map=default_collate_fn_map) if found is None else found

    def _container(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if type(first) is dict:
            return self._mapping(first, values)
        if type(first) in (list, tuple):
            return [self.column(column) for column in zip(*values, strict=True)]
        return torch_collate.collate(values, collate_fn_map=default_collate_fn_map)

    def _mapping(self, keys: Iterable[Any], values: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
        """The columns of dicts. Small arrays of one kind are joined at once: NIfTI metadata has 39, of 8 kinds."""
        out = dict.fromkeys(keys)
        kinds: dict[tuple[Any, ...], list[Any]] = {}
        for key in out:
            first = values[0][key]
            if type(first) is np.ndarray and first.nbytes <= _SMALL_ARRAY:
                kinds.setdefault((first.dtype, first.shape), []).append(key)
            else:
                out[key] = self.column([value[key] for value in values])
        for (dtype, shape), of_one in kinds.items():
            columns = [[value[key] for value in values] for key in of_one]
            made = self._alike(columns, dtype, shape) or map(self.column, columns)
            out.update(zip(of_one, made, strict=True))
        return out

    def _alike(self, columns: Sequence[Sequence[Any]], dtype: Any, shape: Any) -> Sequence[torch.Tensor] | None:
        """Columns of arrays of one dtype and shape."""
        arrays = list(chain.from_iterable(columns))
        several = len(arrays) > len(columns)
        if several and any(type(a) is not np.ndarray or a.dtype != dtype or a.shape != shape for a in arrays):
            return None
        joined = _joined(arrays, dtype)
        return None if joined is None else list(map(torch.from_numpy, joined.reshape(len(columns), -1, *shape)))

    def tensors(self, values: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """A batch of one without a copy, or of large tensors on the CPU. None for other tensors."""
        if len(values) == 1 and type(values[0]) in (torch.Tensor, MetaTensor) and self._may_hand_on(values):
            alone = values[0].unsqueeze(0)
            if alone.is_inference() == torch.is_inference_mode_enabled():
                return alone
            # a view keeps the mode in which its tensor was made; a batch that torch stacks has that of now
            return alone.new_empty(0).set_(alone.untyped_storage(), alone.storage_offset(), alone.shape, alone.stride())
        first = values[0]
        nbytes = first.nbytes * len(values)
        if first.is_cuda or nbytes < limits.POOLED_BATCH_BYTES or get_worker_info() is not None:
            return None
        if first.dtype not in _TORCH_DTYPES.values() or not _plain_and_alike(values):
            return None
        # Volumes, stacked on huge pages: 8 ms for two of 51 MB instead of 25. Or crops, in memory that is warm.
        out = pooled_empty(nbytes).view(first.dtype).view(len(values), *first.shape)
        return torch.stack(list(values), out=out)

    def _may_hand_on(self, values: Sequence[torch.Tensor]) -> bool:
        references = sys.getrefcount(values[0])
        tensor = values[0]
        if references > _ONLY_THE_ITEM or tensor.requires_grad or not tensor.numel() or get_worker_info() is not None:
            return False  # a worker's results go through shared memory, which torch's function allocates
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or not tensor.is_contiguous():
            return False
        if tensor.is_conj() or tensor.is_neg() or _memory_held(tensor) not in _BY_ONE_TENSOR:
            return False
        # A crop must not keep the volume that it was cut from.
        return tensor.untyped_storage().nbytes() <= tensor.nbytes + _SLACK

    def metatensors(self, values: Sequence[MetaTensor]) -> MetaTensor | None:
        """As ``collate_meta_tensor_fn``, without ``torch.stack``'s detour through MONAI."""
        if set(map(type, values)) != {MetaTensor} or not get_track_meta():
            return None
        metas = [t.meta for t in values]
        if set(map(type, metas)) != {dict} or not all(metas):
            return None
        common = set.intersection(*[set(meta.keys()) for meta in metas])  # in MONAI's order
        if not common:
            return None
        meta = self._mapping(common, metas)
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.tensors(values)
            plain = torch_collate.collate_tensor_fn(values) if plain is None else plain
            out = plain.as_subclass(MetaTensor)
        out.copy_meta_from(values[0])
        out.meta = meta
        out.applied_operations = [t.applied_operations or TraceKeys.NONE for t in values]
        out.is_batch = True
        out.spatial_ndim = min(min(t.spatial_ndim for t in values), max(out.ndim - 1, 1))
        return out

    def arrays(self, values: Sequence[np.ndarray]) -> torch.Tensor | None:
        """Arrays of one dtype and shape, joined as bytes without a torch tensor for each."""
        if len(values) == 1:
            return self._array(values)
        made = self._alike([values], values[0].dtype, values[0].shape)
        return None if made is None else made[0]

    def _array(self, values: Sequence[np.ndarray]) -> torch.Tensor | None:
        """The array of a batch of one, without a copy if only the item holds it."""
        references = sys.getrefcount(values[0])
        array = values[0]
        flags = array.flags
        if type(array) is not np.ndarray or array.dtype not in _TORCH_DTYPES or not flags.c_contiguous:
            return None
        if references > _ONLY_THE_ITEM or not flags.owndata or not flags.writeable:
            array = array.copy()
        return torch.from_numpy(array.reshape(1, *array.shape))

    def numbers(self, values: Sequence[Any]) -> torch.Tensor | None:
        """Numbers of one type, Python's or NumPy's."""
        kinds = set(map(type, values))
        dtype = _NUMBERS.get(kinds.pop())
        if dtype is None or kinds:
            return None
        array = np.array(values)
        return torch.from_numpy(array) if array.dtype == dtype else None  # an int may be too large


def _memory_held(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold the storage of a tensor; and the tensor that it is a view of, as every MetaTensor is one."""
    if _holders is None:
        return (-1, -1)
    with torch._C.DisableTorchFunctionSubclass():
        base = tensor._base
        return _holders(tensor.untyped_storage()._cdata), 0 if base is None else sys.getrefcount(base)


#: What :func:`_memory_held` finds where there is one tensor, or one and the base that nobody else has. Counted here,
#: since it depends on torch who holds what.
_BY_ONE_TENSOR = frozenset(
    map(_memory_held, (torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu").view(1)))
) - {(-1, -1)}  # fmt: skip


def _plain_and_alike(values: Sequence[torch.Tensor]) -> bool:
    """Whether tensors have one type, dtype, shape and device, and need no resolving. The first must be on the CPU."""
    first = values[0]
    return all(
        type(t) is type(first) and t.dtype == first.dtype and t.shape == first.shape
        and t.device == first.device and t.layout == torch.strided
        and not (t.requires_grad or t.is_conj() or t.is_neg())
        for t in values
    )  # fmt: skip


def _joined(arrays: Sequence[np.ndarray], dtype: np.dtype[Any]) -> np.ndarray | None:
    """The elements of arrays of one dtype and shape, one after the other. None for types that torch does not have."""
    if dtype not in _TORCH_DTYPES or not arrays[0].size:
        return None
    try:
        return np.frombuffer(bytearray().join(arrays), dtype)  # type: ignore[arg-type]
    except (BufferError, TypeError, ValueError):  # an array that is not C-contiguous
        return None


_FASTER: dict[Callable[..., Any], Callable[[_Collation, Any], Any]] = {
    torch_collate.collate_tensor_fn: _Collation.tensors,
    torch_collate.collate_numpy_array_fn: _Collation.arrays,
    torch_collate.collate_numpy_scalar_fn: _Collation.numbers,
    torch_collate.collate_float_fn: _Collation.numbers,
    torch_collate.collate_int_fn: _Collation.numbers,
    collate_meta_tensor_fn: _Collation.metatensors,
}


def _torch_function(value: Any) -> Callable[..., Any] | None:
    """The function that torch collates values of this type with. None for containers and unknown types."""
    found = default_collate_fn_map.get(type(value))
    if found is not None:
        return found
    for kind, function in default_collate_fn_map.items():
        if isinstance(value, kind):
            return function
    return None
