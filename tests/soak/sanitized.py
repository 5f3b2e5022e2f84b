"""Epochs to a CUDA device in a program of its own, for compute-sanitizer: every form of records, and crops of them.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
    python -m tests.soak.sanitized

Without torch's cache every tensor is an allocation of its own, so that a byte beyond its end is found. Errors of
single calls are left out: a thread whose first call is one of the driver's gets "invalid device context", and calls
again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import monai.transforms as mt
import torch
from monai.data import MetaTensor

from monai_gds import GDSDataLoader, GDSDataset
from tools.bench.kinds import KINDS, MakeKind
from tools.bench.workloads import KEYS

#: Four tiles along each edge, of which the last is cut.
SIDE = 104

FORMS: dict[str, dict[str, Any]] = {
    "whole": {"compression": None},
    "whole, registered": {"compression": None, "backend": "posix", "backend_options": {"pinned_bytes": 1 << 30}},
    "lz4": {"compression": "lz4"},
    "lz4, kept": {"compression": "lz4", "options": {"device_bytes": 1 << 30}},
    "zstd": {"compression": "zstd"},
    "bitcomp": {"compression": "bitcomp"},
}

CROPS = {
    "whole volumes": (),
    "crops": (mt.RandSpatialCropSamplesd(KEYS, (40,) * 3, num_samples=3, random_size=False),),
    "crops by label": (mt.RandCropByPosNegLabeld(KEYS, KEYS[1], (40,) * 3, num_samples=3),),
}


def main(device: str) -> None:
    """Two epochs of each form, kind and crop: the one that fills the cache, and one of hits. Every item is compared."""
    kinds = [kind for kind in KINDS if not KINDS[kind].missing()]
    items = [dict.fromkeys(KEYS, n) for n in range(3)]
    compared = 0
    for kind in kinds:
        for crop in CROPS.values():
            if kind == "noise" and any(isinstance(t, mt.RandCropByPosNegLabeld) for t in crop):
                continue  # its label has no foreground
            transform = mt.Compose([MakeKind(kind, SIDE), *crop])
            for options in FORMS.values():
                with tempfile.TemporaryDirectory(prefix="monai-gds-sanitized-") as folder:
                    dataset = GDSDataset(items, transform, Path(folder), device, **options)
                    for _ in range(2):
                        loader = GDSDataLoader(dataset, collate_fn=list)  # it seeds the transforms, as MONAI's does
                        transform.set_random_state(0)
                        found = [item for batch in loader for item in batch]
                        transform.set_random_state(0)
                        for got, item in zip(found, items, strict=True):
                            pairs = zip(_volumes(got), _volumes(transform(item)), strict=True)
                            assert all(torch.equal(a, b) for a, b in pairs), (kind, options, item)
                            compared += 1
                        dataset.flush()
    print(f"{compared} items, all right")


def _volumes(item: dict[str, MetaTensor] | list[dict[str, MetaTensor]]) -> list[torch.Tensor]:
    parts = item if isinstance(item, list) else [item]
    return [part[key].as_tensor().cpu() for part in parts for key in KEYS]


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda:0")
