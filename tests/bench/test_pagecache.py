"""Files in the page cache."""

from __future__ import annotations

from pathlib import Path

from monai_gds.bench import pagecache
from monai_gds.bench.pagecache import cached, drop
from tests.interrupts import interrupted


def test_dropping_takes_just_these_files(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    for path in files:
        path.write_bytes(bytes(1 << 20))
    assert drop(files[:1]) == 0
    assert cached(files[0]) == 0
    assert cached(files[1]) == 1
    assert drop([]) == 0


def test_an_interrupt_anywhere_is_nothing_but_an_interrupt(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 16))
    places = 1
    while interrupted(places, lambda: cached(path), [pagecache.__file__]):
        places += 1
    assert places > 10
