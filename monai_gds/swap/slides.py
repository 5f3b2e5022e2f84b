"""Stand-ins for the datasets of whole slide images: the patches are records, and at a hit no slide is opened."""

from __future__ import annotations

import weakref
from copy import copy
from typing import Any

import monai.data
from monai.transforms import MapTransform
from monai.utils.enums import CommonKeys

from monai_gds.swap.stand_in import StandIn, divided

#: What the datasets have that decides on a patch.
_SETTINGS = (
    "wsi_reader", "backend", "patch_size", "patch_level", "center_location", "include_label", "additional_meta_keys",
)  # fmt: skip

#: The slides that each transform has open in this process.
_open: weakref.WeakKeyDictionary[LoadPatch, dict[str, Any]] = weakref.WeakKeyDictionary()


class LoadPatch(MapTransform):  # type: ignore[misc]  # MONAI is untyped
    """Reads a patch out of a slide, by the code of MONAI's ``PatchWSIDataset``, as a sample of its ``data`` asks.

    Args:
        kind: the class that has the methods: MONAI's, or a user's that overrides some.
        settings: attributes of the dataset that these methods use.
    """

    def __init__(self, kind: type, settings: dict[str, Any]) -> None:
        super().__init__(CommonKeys.IMAGE)  # which names a file
        self.kind, self.settings = kind, settings

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        """The patch of a sample.

        Returns:
            ``{"image": MetaTensor}``, with the sample's label where the dataset includes it.
        """
        reader: Any = object.__new__(self.kind)
        vars(reader).update(self.settings, data=[copy(data)], transform=None)
        vars(reader)["wsi_object_dict"] = _open.setdefault(self, {})
        made: dict[str, Any] = monai.data.PatchWSIDataset._transform(reader, 0)
        return made


class Patches(StandIn, monai.data.PatchWSIDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``PatchWSIDataset``."""

    theirs = monai.data.PatchWSIDataset

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given, ours = divided(self.theirs, args, kwargs)
        self.theirs.__init__(self, *given.args, **given.kwargs)  # finds the patches
        self.wsi_object_dict: dict[str, Any] = {}
        users = [
            kind for kind in type(self).__mro__ if not kind.__module__.startswith(("monai", "torch", "typing", "abc"))
        ]
        overrides = any(vars(kind).keys() & vars(monai.data.PatchWSIDataset).keys() - {"__init__"} for kind in users)
        settings = {name: value for name, value in vars(self).items() if name in _SETTINGS}
        load = LoadPatch(type(self) if overrides else monai.data.PatchWSIDataset, settings)
        steps = copy(self.transform)  # making a Compose would seed its transforms anew
        steps.transforms = (load, *steps.transforms)
        self.make({**ours, "data": self.data, "transform": steps})


class Sliding(Patches, monai.data.SlidingPatchWSIDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``SlidingPatchWSIDataset``."""

    theirs = monai.data.SlidingPatchWSIDataset


class Masked(Patches, monai.data.MaskedPatchWSIDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``MaskedPatchWSIDataset``."""

    theirs = monai.data.MaskedPatchWSIDataset
