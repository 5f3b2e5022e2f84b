"""A competitor in ``python -m tools.bench dataset``: crops out of Blosc2 arrays, as nnU-Net v2 stores and reads them.

Used by :mod:`tools.bench.competitors`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import Dataset, MetaTensor
from monai.transforms import Compose, Randomizable

__all__ = ["NNUNetDataset"]

#: The result of nnU-Net's comp_blosc2_params for patches of 96³ out of a cube of float32, without the channel axis.
_BLOCK, _CHUNK = (32, 32, 32), (128, 128, 96)

_LEVEL = 5


class NNUNetDataset(Dataset):  # type: ignore[misc]  # MONAI has no type hints to speak of
    """Dicts of tensors ``(channels, x, y, z)``, of which random crops are taken.

    Each tensor is one file of Blosc2, compressed by LZ4HC, with or without the shuffle filter, whichever gives fewer
    bytes in the middle of it. An item opens its files as mappings and slices them in one thread. The crops are the
    pipeline's own: its random transforms run on tensors without values, and their views become slices. Crops come as
    plain tensors, because nnU-Net keeps no metadata with them.

    Args:
        items: dicts. Only their positions count, so ``folder`` must not hold files of other items.
        transform: deterministic transforms and, after them, random ones that only crop.
        folder: for the files. Those of an item are written when it is first read.
    """

    def __init__(self, items: Sequence[Any], transform: Compose, folder: Path) -> None:
        super().__init__(items, transform)
        self.folder = folder
        self.first = transform.get_index_of_first(lambda step: isinstance(step, Randomizable))

    def _transform(self, index: int) -> Any:
        if not (self.folder / str(index)).exists():
            self._save(index)
        arrays = self._open(index)
        ghosts = {key: _ghost(array) for key, array in arrays.items()}
        crops = self.transform(ghosts, start=self.first)
        cut = [{key: _cut(arrays[key], view) for key, view in crop.items()} for crop in _listed(crops)]
        return cut if isinstance(crops, list) else cut[0]

    def _save(self, index: int) -> None:
        """Writes the tensors of an item, each as ``<index>/<key>.b2nd``."""
        part = self.folder / f"{index}.part"
        part.mkdir()
        for key, tensor in self.transform(self.data[index], end=self.first).items():
            _write(part / f"{key}.b2nd", tensor.numpy())
        part.rename(self.folder / str(index))

    def _open(self, index: int) -> dict[Hashable, Any]:
        import blosc2

        one_thread = {"nthreads": 1}
        return {
            key: blosc2.open(str(self.folder / str(index) / f"{key}.b2nd"), mode="r", dparams=one_thread, mmap_mode="r")
            for key in self.data[index]
        }


def _listed(crops: Any) -> list[Any]:
    return crops if isinstance(crops, list) else [crops]


def _write(path: Path, array: np.ndarray) -> None:
    import blosc2

    def settings(shape: Sequence[int], filters: blosc2.Filter) -> dict[str, Any]:
        blocks, chunks = ((1, *map(min, shape[1:], most)) for most in (_BLOCK, _CHUNK))
        coding = {"codec": blosc2.Codec.LZ4HC, "clevel": _LEVEL, "filters": [filters], "nthreads": 1}
        return {"blocks": blocks, "chunks": chunks, "cparams": coding}

    sides = zip(array.shape[1:], _CHUNK, strict=True)
    sample = np.ascontiguousarray(array[0:1, *(slice(max(0, n - most) // 2, (n + most) // 2) for n, most in sides)])
    tried = (blosc2.Filter.NOFILTER, blosc2.Filter.SHUFFLE)
    best = min(tried, key=lambda each: blosc2.asarray(sample, **settings(sample.shape, each)).schunk.cbytes)
    blosc2.asarray(np.ascontiguousarray(array), urlpath=str(path), **settings(array.shape, best))


def _ghost(array: Any) -> MetaTensor:
    """A tensor of an array's shape and dtype, without values."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return MetaTensor(torch.empty(array.shape, dtype=dtype, device="meta"))


def _cut(array: Any, view: torch.Tensor) -> torch.Tensor:
    """The part of an array that a crop of its ghost covers."""
    slices, rest = [], int(view.storage_offset())
    for size, stride in zip(view.shape, view.stride(), strict=True):
        start, rest = divmod(rest, stride)
        slices.append(slice(start, start + size))
    return torch.from_numpy(array[tuple(slices)])
