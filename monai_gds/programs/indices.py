"""Indices of a label's voxels for MONAI's random croppers, out of the runs that lie in a record.

Used by :mod:`monai_gds.programs.draws` around a transform that is run on ghosts. ``RandCropByPosNegLabeld`` and
``RandCropByLabelClassesd`` list the index of every foreground and background voxel, or of every class, but use only the
length and single elements of each list. :func:`standing_in` gives their cropper, for one call, objects that have a
length and elements in place of these lists. So MONAI's own code draws, and neither its centres nor the random state it
leaves can differ.

MONAI decides which values count as foreground, background or a class: its function is given the different values of the
label in place of the label. (All voxels of uint8 tensors are background to it, for instance.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import (
    RandCropByLabelClasses,
    RandCropByLabelClassesd,
    RandCropByPosNegLabel,
    RandCropByPosNegLabeld,
)
from monai.transforms.utils import map_binary_to_indices, map_classes_to_indices

from monai_gds.tiles.runs import Runs

#: Returns the runs of the record's volume whose memory a tensor shares, or None.
RunsOf = Callable[[torch.Tensor], Runs | None]


class Selection:
    """The indices of some voxels of a label in C order, like a list of them, but found one by one.

    ``chosen``: which of ``runs.values`` these voxels have, by index.
    """

    def __init__(self, runs: Runs, chosen: list[int]) -> None:
        self._runs = runs
        self._chosen = np.zeros(len(runs.values), bool)
        self._chosen[chosen] = True
        self._count = runs.count(self._chosen)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, k: int) -> torch.Tensor:
        """The ``k``-th index, a 0-D int64 CPU tensor as an element of MONAI's lists. Raises as :meth:`Runs.find`."""
        return torch.tensor(self._runs.find(self._chosen, k), device="cpu")


def takes_runs(transform: Any) -> bool:
    """Whether a transform looks up the voxels of a label, and can take them from runs."""
    return _arguments(transform) is not None


@contextmanager
def standing_in(transform: Any, item: Any, runs_of: RunsOf) -> Iterator[bool]:
    """Within the block, the cropper of a transform takes the indices of the item's label from the label's runs.

    Nothing is changed, so that MONAI lists the indices itself, unless all of this holds: the transform is exactly of
    one of the two types, and it has no argument that makes the indices depend on more than the label; the item is a
    dict; its label is the whole volume of a record as it lies there, of one channel, with nothing pending.

    Args:
        transform: called once within the block, in this thread.
        item: what it is called with.
        runs_of: see :data:`RunsOf`. The caller checks that the volume was not written to.

    Yields:
        Whether anything was changed.
    """
    indices = _indices(transform, item, runs_of)
    before = {name: getattr(transform.cropper, name) for name in indices}
    try:
        for name, selections in indices.items():
            setattr(transform.cropper, name, selections)
        yield bool(indices)
    finally:
        for name, was in before.items():
            setattr(transform.cropper, name, was)


def _indices(transform: Any, item: Any, runs_of: RunsOf) -> dict[str, Any]:
    """The attributes to set on the cropper, by name; empty if it is left alone."""
    takes = _arguments(transform)
    if takes is None or type(item) is not dict or None in item:  # MONAI looks up keys that are None, too
        return {}
    label: Any = item.get(transform.label_key)
    runs = runs_of(label) if type(label) in (torch.Tensor, MetaTensor) else None
    if runs is None or not _is_whole(label, runs):
        return {}
    values = runs.values.view(torch.uint8).numpy().tobytes()
    try:
        if type(transform) is RandCropByPosNegLabeld:
            ground = [Selection(runs, list(chosen)) for chosen in _grounds(values, runs.dtype)]
            return dict(zip(takes, ground, strict=True))
        classes = _classes(values, runs.dtype, transform.cropper.num_classes)
        return {takes[0]: [Selection(runs, list(chosen)) for chosen in classes]}
    except Exception:  # MONAI raises it for the label, too
        return {}


def _arguments(transform: Any) -> tuple[str, ...] | None:
    """The attributes of the cropper that hold indices; None if the indices depend on more than the label."""
    cropper: Any = getattr(transform, "cropper", None)
    names: tuple[str, ...]
    if type(transform) is RandCropByPosNegLabeld and type(cropper) is RandCropByPosNegLabel:
        keys = (transform.image_key, transform.fg_indices_key, transform.bg_indices_key)
        names = ("fg_indices", "bg_indices")
    elif type(transform) is RandCropByLabelClassesd and type(cropper) is RandCropByLabelClasses:
        keys, names = (transform.image_key, transform.indices_key, cropper.max_samples_per_class), ("indices",)
    else:
        return None
    plain = all(key is None for key in keys) and all(getattr(cropper, name) is None for name in names)
    return names if plain else None


def _is_whole(label: torch.Tensor, runs: Runs) -> bool:
    """Whether a tensor over a record's volume shows all of it, as it lies there."""
    pending = isinstance(label, MetaTensor) and label.pending_operations
    return (
        not pending
        and tuple(label.shape) == runs.shape
        and label.dtype == runs.dtype
        and label.storage_offset() == 0
        and label.is_contiguous()
    )


# Most items have the same few values.
@functools.lru_cache(maxsize=64)
def _grounds(values: bytes, dtype: torch.dtype) -> tuple[tuple[int, ...], ...]:
    """Which of a label's values are foreground to MONAI, and which are background."""
    return tuple(tuple(chosen.tolist()) for chosen in map_binary_to_indices(_as_label(values, dtype)))


@functools.lru_cache(maxsize=64)
def _classes(values: bytes, dtype: torch.dtype, num_classes: int | None) -> tuple[tuple[int, ...], ...]:
    """Which of a label's values are of each class to MONAI."""
    return tuple(tuple(chosen.tolist()) for chosen in map_classes_to_indices(_as_label(values, dtype), num_classes))


def _as_label(values: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).view(dtype)[None]
