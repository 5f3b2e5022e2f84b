"""A backend as another package would write it, from the docs of ``backend.py`` and ``blocking.py`` alone."""

from __future__ import annotations

import os
from io import FileIO

import torch

from monai_gds.storage import Availability
from monai_gds.storage.blocking import BlockingBackend
from monai_gds.storage.files import Expected, open_file


class SampleBackend(BlockingBackend):
    """Reads from Python's own file objects."""

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return Availability(True, "Python's own files")

    def _open(self, path: str, expected: Expected) -> FileIO:
        return FileIO(path, opener=lambda path, _: open_file(path, expected))

    def _close(self, handle: FileIO) -> None:
        handle.close()

    def _read_into(self, handle: FileIO, offset: int, dest: torch.Tensor) -> int:
        return os.preadv(handle.fileno(), [dest.numpy()], offset)
