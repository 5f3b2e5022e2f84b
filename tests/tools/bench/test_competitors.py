"""The datasets that are compared."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from monai.transforms import Compose, RandSpatialCropd

from monai_gds import BackendUnavailable
from monai_gds.bench.comparison import NO_CACHE, Comparison, checksums, enter
from tools.bench.competitors import COMPETITORS, OURS_DIRECT, chosen, competitors_for
from tools.bench.workloads import MakeVolumes


def test_past_the_page_cache_only_where_that_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def refuse(path: str, flags: int, *mode: int, **at: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really(path, flags, *mode, **at)

    with (
        monkeypatch.context() as patch,
        pytest.raises(BackendUnavailable, match="O_DIRECT: Invalid arg"),
    ):
        patch.setattr("tools.bench.competitors.os.open", refuse)  # through which the file is made, too
        COMPETITORS[OURS_DIRECT].make([], Compose([]), tmp_path, torch.device("cpu"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", competitors_for(torch.device("cpu"), loader=True))
def test_random_crops_are_compared_too(tmp_path: Path, name: str) -> None:
    crop = Compose([MakeVolumes((1, 9, 9, 9)), RandSpatialCropd("image", (4, 4, 4), random_size=False)])
    items = [{"image": n} for n in range(4)]
    work = Comparison("t", items, crop, ["image"], torch.device("cpu"), tmp_path, chosen([name]), 1, 2)
    expected = checksums(enter(work, NO_CACHE), work)
    try:
        entrant = enter(work, name)
    except BackendUnavailable as e:
        pytest.skip(str(e))
    for _ in range(2):
        assert checksums(entrant, work) == expected
