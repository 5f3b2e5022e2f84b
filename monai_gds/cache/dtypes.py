"""The names that safetensors gives to torch's dtypes."""

from __future__ import annotations

import torch

from monai_gds.cache.header import DTYPES

__all__ = ["DTYPE_NAMES"]

#: torch dtype -> safetensors' name.
DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, attribute): name for name, (attribute, _) in DTYPES.items()}
