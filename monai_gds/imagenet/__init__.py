"""Feeds NVIDIA DALI from image folders through any storage backend, and from any iterable.

Start with :class:`~monai_gds.imagenet.dataset.ImageNetDataset`. Importing this package does not import DALI.
"""

from monai_gds.imagenet.dali.iterable import dali_iterator
from monai_gds.imagenet.dali.squirrel import squirrel_source
from monai_gds.imagenet.dataset import ImageNetDataset
from monai_gds.imagenet.files.packing import pack_folder
from monai_gds.imagenet.source import READERS, ImageSource, open_images

__all__ = [
    "READERS", "ImageNetDataset", "ImageSource", "dali_iterator", "open_images", "pack_folder", "squirrel_source",
]  # fmt: skip
