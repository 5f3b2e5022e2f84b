"""The datasets that are compared."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from monai.transforms import Compose

from monai_gds import BackendUnavailable
from monai_gds.bench.competitors import COMPETITORS, OURS_DIRECT


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
        patch.setattr("monai_gds.bench.competitors.os.open", refuse)  # through which the file is made, too
        COMPETITORS[OURS_DIRECT].make([], Compose([]), tmp_path, torch.device("cpu"))
    assert list(tmp_path.iterdir()) == []
