"""Stand-ins for the datasets of MONAI's that cache nothing: ``Dataset``, ``CSVDataset`` and ``ImageDataset``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from monai.data import CSVDataset, Dataset, ImageDataset
from monai.transforms import Compose

from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.settings import check_data, check_transforms
from monai_gds.pipeline.split import Split, loaded_keys
from monai_gds.swap.stand_in import StandIn, divided


class Plain(StandIn):
    """Stands in for ``Dataset`` where that loads files, see :func:`gains`."""

    _theirs = Dataset


def gains(data: Any, transform: Any) -> bool:
    """Whether a ``Dataset`` gains by a cache: its deterministic transforms load files.

    What is in memory already, such as a list of arrays or of predictions, is faster there, and is often used once.
    """
    try:
        check_data(data)
        compose = transform if isinstance(transform, Compose) else Compose(transform)
        check_transforms(compose.transforms)
        return bool(loaded_keys(Split(compose).deterministic))
    except (TypeError, ValueError):  # which MONAI's class may not mind
        return False


class Table(StandIn, CSVDataset):  # type: ignore[misc]  # MONAI is untyped
    """Stands in for ``CSVDataset``. The rows are items."""

    _theirs = CSVDataset

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given, ours = divided(self._theirs, args, kwargs)
        self._theirs.__init__(self, *given.args, **given.kwargs)  # reads the tables
        self._make({**ours, "data": self.data, "transform": self.transform})


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
