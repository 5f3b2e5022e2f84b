"""Readers of encoded images: what is under way while a batch is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds import limits
from monai_gds.bench.made_up import write_image_folder
from monai_gds.imagenet import open_images
from monai_gds.imagenet.files.image_storage import ImageStorage
from monai_gds.imagenet.source import open_reader


def test_the_next_batches_are_under_way_while_one_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    plain = ImageStorage.start_files

    def counted(self: ImageStorage, paths: Any, sizes: np.ndarray) -> Any:
        begun.append(len(paths))
        return plain(self, paths, sizes)

    monkeypatch.setattr(ImageStorage, "start_files", counted)
    images = open_images(write_image_folder(tmp_path / "images", 20))
    reader = open_reader("posix", images, torch.device("cpu"))
    loop = reader.read(np.arange(20).reshape(10, 2))
    next(loop)
    assert begun == [2] * (1 + limits.READ_AHEAD_BATCHES)
    assert limits.READ_AHEAD_BATCHES >= 2, "or one thread reads while the others have nothing to do"
    next(loop)
    assert begun == [2] * (2 + limits.READ_AHEAD_BATCHES)
    assert len(list(loop)) == 8
    assert begun == [2] * 10
    reader.close()
