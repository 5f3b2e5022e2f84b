"""Tests of monai_gds/storage/_statx.py."""

from __future__ import annotations

import os
from pathlib import Path

from monai_gds.storage import FileId
from monai_gds.storage._statx import identities


def test_gives_what_os_stat_gives(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "ü b", os.fsdecode(b"\xff"))]
    for i, path in enumerate(paths):
        path.write_bytes(bytes(i))
        os.utime(path, ns=(0, (-5, 10**18 + 7, 2**33 * 10**9)[i]))
    (tmp_path / "link").symlink_to(paths[1])
    everything = [*paths, tmp_path / "link", Path("/dev/null"), tmp_path]
    assert identities(map(os.fsencode, everything)) == [FileId.of(path) for path in everything]


def test_what_is_not_there_has_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    missing = (tmp_path / "missing", tmp_path / "file" / "below", tmp_path / ("x" * 300))
    assert identities(map(os.fsencode, missing)) == [None] * 3
