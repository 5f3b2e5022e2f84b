"""Indices of a label's voxels for MONAI's random croppers, out of the runs that lie in a record.

Used by :mod:`monai_gds.programs.recorder` around a transform that is recorded. ``RandCropByPosNegLabeld`` and
``RandCropByLabelClassesd`` list the index of every foreground and background voxel, or of every class, but use only the
length and single elements of each list. :func:`standing_in` gives their cropper, for one call, objects that have a
length and elements in place of these lists. So MONAI's own code draws, and neither its centres nor the random state it
leaves can differ.

MONAI decides which values count as foreground, background or a class: its function is given the different values of the
label in place of the label. (All voxels of uint8 tensors are background to it, for instance.) With an ``image_key`` it
is given the different pairs of a value and of whether the image is above the threshold, which joint runs have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

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

from monai_gds.tiles.runs import Form, Runs, threshold_text

_TENSORS = (torch.Tensor, MetaTensor)


#: Returns the runs of a record's volume, or None, given a label that lies in its memory, which holds nothing else;
#: joint runs, given also such an image and, as :func:`monai_gds.tiles.runs.threshold_text`, what it must be above.
RunsOf: TypeAlias = Callable[..., Runs | None]


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


def lookup_of(transform: Any) -> tuple[str, str, str] | None:
    """How a transform looks up the voxels of a label; None if it does not, or cannot take them from runs.

    Returns:
        The item's keys of the label and of the image, and the threshold that the image must be above. Both are empty if
        the transform uses the label only.
    """
    if _attributes(transform) is None or type(transform.label_key) is not str:
        return None
    if transform.image_key is None:
        return transform.label_key, "", ""
    threshold = threshold_text(transform.cropper.image_threshold)
    usual = type(transform.image_key) is str and threshold
    return (transform.label_key, transform.image_key, threshold) if usual else None


@contextmanager
def standing_in(transform: Any, item: Any, runs_of: RunsOf) -> Iterator[bool]:
    """Within the block, the cropper of a transform takes the indices of the item's label from the label's runs.

    Nothing is changed, so that MONAI lists the indices itself, unless all of this holds: the transform is exactly of
    one of the two types, and it has no argument that makes the indices depend on more than label and image; the item is
    a dict; its label is the whole volume of a record as it lies there, of one channel, with nothing pending; its image,
    if the transform uses one, is such a volume, too, of any number of channels.

    Args:
        transform: called once within the block, in this thread.
        item: what it is called with.
        runs_of: see :data:`RunsOf`. The caller checks that the volumes were not written to.

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
    names, lookup = _attributes(transform), lookup_of(transform)
    if names is None or lookup is None or type(item) is not dict or None in item:  # MONAI looks up None, too
        return {}
    runs = _runs(item, lookup, runs_of)
    if runs is None:
        return {}
    values = runs.values.view(torch.uint8).numpy().tobytes()
    above = None if runs.above is None else runs.above.numpy().tobytes()
    try:
        if type(transform) is RandCropByPosNegLabeld:
            chosen = _chosen(map_binary_to_indices, values, runs.dtype, above)
            return dict(zip(names, [Selection(runs, list(some)) for some in chosen], strict=True))
        chosen = _chosen(map_classes_to_indices, values, runs.dtype, above, transform.cropper.num_classes)
        return {names[0]: [Selection(runs, list(some)) for some in chosen]}
    except Exception:  # MONAI raises it for the label, too
        return {}


def _runs(item: dict[Any, Any], lookup: tuple[str, str, str], runs_of: RunsOf) -> Runs | None:
    """The runs of an item's label, joint ones if an image is used that the item has; None if there are none."""
    label_key, image_key, threshold = lookup
    label: Any = item.get(label_key)
    image: Any = item.get(image_key) if threshold else None
    if type(label) not in _TENSORS:
        return None
    if image is None:  # without it, MONAI goes by the label
        runs = runs_of(label)
        return runs if runs is not None and _is_whole(label, (runs.dtype, runs.shape)) else None
    runs = runs_of(label, image, threshold) if type(image) in _TENSORS else None
    if runs is None or runs.image is None or not _is_whole(image, runs.image):
        return None
    return runs if _is_whole(label, (runs.dtype, runs.shape)) else None


def _attributes(transform: Any) -> tuple[str, ...] | None:
    """The attributes of the cropper that hold indices; None if the indices depend on more than label and image."""
    cropper: Any = getattr(transform, "cropper", None)
    names: tuple[str, ...]
    if type(transform) is RandCropByPosNegLabeld and type(cropper) is RandCropByPosNegLabel:
        given, names = (transform.fg_indices_key, transform.bg_indices_key), ("fg_indices", "bg_indices")
    elif type(transform) is RandCropByLabelClassesd and type(cropper) is RandCropByLabelClasses:
        given, names = (transform.indices_key, cropper.max_samples_per_class), ("indices",)
    else:
        return None
    plain = all(value is None for value in given) and all(getattr(cropper, name) is None for name in names)
    return names if plain else None


def _is_whole(tensor: torch.Tensor, form: Form) -> bool:
    """Whether a tensor in the memory of a record's volume of this form shows all of it, as it lies there."""
    pending = isinstance(tensor, MetaTensor) and tensor.pending_operations
    return not pending and (tensor.dtype, tuple(tensor.shape)) == form and tensor.is_contiguous()


# Most items have the same few values.
@functools.lru_cache(maxsize=128)
def _chosen(
    listed: Callable[..., Any], values: bytes, dtype: torch.dtype, above: bytes | None, *num_classes: int | None
) -> tuple[tuple[int, ...], ...]:
    """Which of a label's values are foreground to MONAI, and which are background; or which are of each class."""
    image = None if above is None else _as_volume(above, torch.bool)
    return tuple(tuple(chosen.tolist()) for chosen in listed(_as_volume(values, dtype), *num_classes, image))


def _as_volume(values: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).view(dtype)[None]
