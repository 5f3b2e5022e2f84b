"""Stand-ins for the datasets of MONAI's that cache nothing: ``Dataset``, ``CSVDataset`` and ``ImageDataset``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from monai.data import CSVDataset, ImageDataset
from monai.transforms import Compose, LazyTrait, Transform

from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.settings import check_data, check_transforms
from monai_gds.errors import warn
from monai_gds.pipeline.parts import parts
from monai_gds.pipeline.split import Split, loaded_keys
from monai_gds.swap.stand_in import StandIn, divided


class Plain(StandIn):
    """Stands in for ``Dataset`` where that loads files, see :func:`gains`.

    Attributes:
        recomputes: whether what a transform draws or keeps, though it is not marked random, must not be cached.
    """

    recomputes = True


def gains(data: Any, transform: Any) -> bool:
    """Whether a ``Dataset`` gains by a cache: its deterministic transforms load files, and write none.

    What is in memory already, such as a list of arrays or of predictions, is faster there, and is often used once.
    Transforms that save results, as ``SaveImage`` does, must run in every epoch. Where lazy resampling goes on in the
    random transforms, a cache would resample twice, as ``CacheDataset`` does: one warning.
    """
    try:
        check_data(data)
        compose = transform if isinstance(transform, Compose) else Compose(transform)
        check_transforms(compose.transforms)
        split = Split(compose)
        steps = [part for step in split.deterministic for part in parts(step)]
        if not loaded_keys(split.deterministic) or any(_writes(part) for part in steps):
            return False
    except (TypeError, ValueError):  # which MONAI's class may not mind
        return False
    if split.rest and any(_is_lazy(part, compose.lazy) for part in steps):
        warn(
            "a Dataset stays MONAI's, and computes its items in every epoch: its lazy transforms and the random ones "
            "resample once together, and with a cache they would twice, as with CacheDataset"
        )
        return False
    return True


def _is_lazy(part: Any, lazy: bool | None) -> bool:
    """Whether a transform leaves its resampling for later; ``lazy`` is what its ``Compose`` asks for."""
    return isinstance(part, LazyTrait) and bool(part.lazy if lazy is None else lazy)


def _writes(part: Any) -> bool:
    names = (kind.__name__ for kind in type(part).__mro__)
    return isinstance(part, Transform) and any(name.startswith(("Save", "Write")) for name in names)


class Table(StandIn, CSVDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``CSVDataset`` where that loads files. The rows are items."""

    recomputes = True


class Images(ImageDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``ImageDataset``: what its loader makes of a file is a record.

    Attributes:
        _defaults: arguments of GDSDataset that hold where a user gives none.
    """

    _defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given, ours = divided(ImageDataset, args, kwargs)
        super().__init__(*given.args, **given.kwargs)
        files = [*self.image_files, *(self.seg_files or ())]
        steps = Compose(vars(self)["loader"], map_items=False)
        self.cache = GDSDataset(files, steps, **{"cache_dir": None, **self._defaults, **ours})
        self.loader = self.cache._cachecheck
