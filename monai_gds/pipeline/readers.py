"""Image readers that users pass to ``LoadImaged(reader=…)``."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from monai.data import NibabelReader
from monai.utils import ensure_tuple


class IgzipReader(NibabelReader):  # type: ignore[misc]  # MONAI is untyped
    """MONAI's ``NibabelReader``, with ISA-L's igzip in place of zlib for ``.nii.gz``.

    Arrays and metadata are the same, and other files are read as by ``NibabelReader``. The reader is part of a cache's
    keys, as all settings of ``LoadImaged`` are: items that were cached with another one are computed once more.

    Raises:
        ImportError: python-isal is not installed.

    Example:
        >>> from monai.transforms import LoadImaged
        >>> from monai_gds import IgzipReader
        >>> load = LoadImaged(["image", "label"], reader=IgzipReader)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            import isal.igzip  # noqa: F401
        except ImportError as e:
            raise ImportError("IgzipReader needs python-isal: pip install 'monai_gds[igzip]'") from e
        super().__init__(*args, **kwargs)

    def read(self, data: Sequence[PathLike[str] | str] | PathLike[str] | str, **kwargs: Any) -> Any:
        """The image of a file, or a list of those of several files."""
        from isal import igzip

        images = super().read(data, **kwargs)
        for image in ensure_tuple(images):
            file = getattr(image.dataobj, "file_like", None)  # that of the voxels: a pair has a header file too
            if isinstance(file, str) and file.lower().endswith(".gz"):
                image.dataobj.file_like = igzip.open(file)  # in place of the name, which nibabel would open
        return images
