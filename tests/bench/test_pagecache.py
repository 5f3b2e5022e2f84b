"""Files in the page cache."""

from __future__ import annotations

from pathlib import Path

from monai_gds.bench.pagecache import cached, drop


def test_dropping_takes_just_these_files(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    for path in files:
        path.write_bytes(bytes(1 << 20))
    assert drop(files[:1]) == 0
    assert cached(files[0]) == 0
    assert cached(files[1]) == 1
    assert drop([]) == 0
