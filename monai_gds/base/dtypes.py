"""The dtypes that files hold, by the names of safetensors, torch and NumPy. Imports no library.

Used by the rooms that describe tensors in files: tiles, items and records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: NumPy has no arrays of more axes.
MOST_AXES = 64

#: safetensors' name of a dtype -> torch's name and the element size in bytes.
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
}

_NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}


def has_name(dtype: torch.dtype) -> bool:
    """Whether safetensors has this torch dtype."""
    return str(dtype).removeprefix("torch.") in _NAMES


def name_of(dtype: torch.dtype) -> str:
    """safetensors' name of a torch dtype. Raises KeyError if it has none."""
    return _NAMES[str(dtype).removeprefix("torch.")]
