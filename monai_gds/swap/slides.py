"""Stand-ins for the datasets of whole slide images: the patches are records, and at a hit no slide is opened."""

from __future__ import annotations

import weakref
from copy import copy
from typing import Any

from monai.data import MaskedPatchWSIDataset, PatchWSIDataset, SlidingPatchWSIDataset
from monai.transforms import MapTransform
from monai.utils.enums import CommonKeys

from monai_gds.base.process import PerProcess
from monai_gds.swap.stand_in import StandIn, divided

#: What the datasets have that decides on a patch.
_SETTINGS = (
    "wsi_reader", "backend", "patch_size", "patch_level", "center_location", "include_label", "additional_meta_keys",
)  # fmt: skip

#: The methods that make a patch.
_METHODS = {name for name in vars(PatchWSIDataset) if not name.startswith("__")}

#: The slides that each transform has open in this process. A forked child would move the parent's place in a file.
_open = PerProcess[weakref.WeakKeyDictionary[Any, dict[str, Any]]](weakref.WeakKeyDictionary)


class LoadPatch(MapTransform):  # type: ignore[misc]  # MONAI is untyped
    """Reads a patch out of a slide, by the code of MONAI's ``PatchWSIDataset``, as a sample of its ``data`` asks.

    Args:
        kind: a user's class that overrides some of the methods; None: MONAI's.
        settings: attributes of the dataset that these methods use.
    """

    def __init__(self, kind: type | None, settings: dict[str, Any]) -> None:
        super().__init__(CommonKeys.IMAGE)  # which names a file
        self.kind, self.settings = kind, settings

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        """The patch of a sample.

        Returns:
            ``{"image": MetaTensor}``, with the sample's label where the dataset includes it.
        """
        reader: Any = object.__new__(self.kind or PatchWSIDataset)
        vars(reader).update(self.settings, data=[copy(data)], transform=None)
        vars(reader)["wsi_object_dict"] = _open().setdefault(self, {})
        made: dict[str, Any] = PatchWSIDataset._transform(reader, 0)
        return made


class Patches(StandIn, PatchWSIDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``PatchWSIDataset``."""

    _theirs = PatchWSIDataset

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given, ours = divided(self._theirs, args, kwargs)
        self._theirs.__init__(self, *given.args, **given.kwargs)  # finds the patches
        self.wsi_object_dict: dict[str, Any] = {}
        kinds = [kind for kind in type(self).__mro__ if not kind.__module__.startswith("monai")]
        overrides = any(vars(kind).keys() & _METHODS for kind in kinds)
        settings = {name: value for name, value in vars(self).items() if name in _SETTINGS}
        load = LoadPatch(type(self) if overrides else None, settings)
        steps = copy(self.transform)  # making a Compose would seed its transforms again
        steps.transforms = (load, *steps.transforms)
        self._make({**ours, "data": self.data, "transform": steps})


class Sliding(Patches, SlidingPatchWSIDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``SlidingPatchWSIDataset``."""

    _theirs = SlidingPatchWSIDataset


class Masked(Patches, MaskedPatchWSIDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``MaskedPatchWSIDataset``."""

    _theirs = MaskedPatchWSIDataset
