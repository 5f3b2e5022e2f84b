"""Batches of GDSDatasets, read ahead of the consumer. :mod:`monai_gds.loader.data_loader` shows the stages."""

from monai_gds.loader.data_loader import GDSDataLoader

__all__ = ["GDSDataLoader"]
