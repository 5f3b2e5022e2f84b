"""The names that safetensors gives to torch's dtypes, https://huggingface.co/docs/safetensors (tensor dtypes)."""

from __future__ import annotations

import torch

__all__ = ["DTYPES", "DTYPE_NAMES"]

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}

#: safetensors' name -> torch dtype.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, attribute) for name, attribute in _NAMES.items()}

#: torch dtype -> safetensors' name.
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
