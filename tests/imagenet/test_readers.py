"""Readers of encoded images: what is under way while a batch is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds.imagenet import open_images
from monai_gds.imagenet.readers import AHEAD
from monai_gds.imagenet.source import open_reader
from monai_gds.imagenet.synthetic import write_image_folder
from monai_gds.storage.posix import PosixStorage


def test_the_next_batches_are_under_way_while_one_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    plain = PosixStorage.submit_files

    def counted(self: PosixStorage, paths: Any, *args: Any, **settings: Any) -> Any:
        begun.append(len(paths))
        return plain(self, paths, *args, **settings)

    monkeypatch.setattr(PosixStorage, "submit_files", counted)
    images = open_images(write_image_folder(tmp_path / "images", 20))
    reader = open_reader("posix", images, torch.device("cpu"))
    loop = reader.read(np.arange(20).reshape(10, 2))
    next(loop)
    assert begun == [2] * (1 + AHEAD)
    assert AHEAD >= 2, "or one thread reads while the others have nothing to do"
    next(loop)
    assert begun == [2] * (2 + AHEAD)
    assert len(list(loop)) == 8
    assert begun == [2] * 10
    reader.close()
