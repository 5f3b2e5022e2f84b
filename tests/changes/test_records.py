"""Changes of the cache folder and its records; see ``rows.py``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.changes.rows import HIT, MISS, Change, Table, with_array
from tests.changes.test_places import READ_AHEAD
from tests.studies import Study

TABLE = Table()
hits, misses, row = TABLE.hits, TABLE.misses, TABLE.row
test_change = TABLE.test

# Records that are not what their names say


def one_record_each(s: Study) -> Change:
    """Runs item 1, then item 0."""
    s.index = 1
    yield
    s.index = 0
    yield


def by_item(s: Study) -> tuple[Path, Path]:
    """The records of items 0 and 1, after :func:`one_record_each`."""
    second, first = sorted(s.records(), key=lambda path: path.stat().st_mtime_ns)
    return first, second


@misses(either=True, other_item=None)
def two_records_swapped(s: Study) -> Change:
    yield from one_record_each(s)
    a, b = by_item(s)
    a.rename(s.folder / "c")
    b.rename(a)
    (s.folder / "c").rename(b)
    yield


@misses(either=True, other_item=None)
def a_record_copied_under_another_name(s: Study) -> Change:
    yield from one_record_each(s)
    a, b = by_item(s)
    shutil.copyfile(b, a)
    yield


@misses(either=True, other_item=None)
def a_link_to_another_record(s: Study) -> Change:
    yield from one_record_each(s)
    a, b = by_item(s)
    a.unlink()
    a.symlink_to(b.name)
    yield


@misses(either=True, other_item=None)
def a_hard_link_of_another_record(s: Study) -> Change:
    yield from one_record_each(s)
    a, b = by_item(s)
    a.unlink()
    a.hardlink_to(b)
    yield


@misses(either=True, other_item=None)
def swapped_records_read_ahead(s: Study) -> Change:
    s.read = READ_AHEAD
    yield
    a, b = s.records()
    a.rename(s.folder / "c")
    b.rename(a)
    (s.folder / "c").rename(b)
    yield


@misses(other_item=None)
def a_record_of_another_pipeline(s: Study) -> Change:
    yield
    (first,) = s.records()
    s.edit("maxv=1.5", "maxv=2.5")
    yield
    (second,) = set(s.records()) - {first}
    shutil.copyfile(first, second)
    yield


# The cache folder


row(HIT, "metadata_wanted_after_all", settings=({"track_meta": False}, {}))
row(
    HIT,
    "tensors_as_arrays",
    settings=({"options": {"arrays": "torch"}}, {"options": {"arrays": "numpy"}}),
    item='"weights": np.array([1.0, 2.0])',
)


@hits()
def another_order_of_the_items(s: Study) -> Change:
    yield
    s.edit("for i in range(2)]", "for i in (1, 0)]")
    s.index = 1


@hits()
def a_cache_moved(s: Study) -> Change:
    yield
    s.cache = s.cache.rename(s.folder / "moved")


@hits()
def a_cache_copied(s: Study) -> Change:
    yield
    shutil.copytree(s.cache, s.folder / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(s.cache)
    s.cache = s.folder / "copy"


@hits()
def a_link_to_the_cache(s: Study) -> Change:
    yield
    (s.folder / "link").symlink_to(s.cache)
    s.cache = s.folder / "link"


# The form of records


#: 8 MB that compress well.
LARGE = "np.arange(1 << 20) % 1000 / 7"


def is_whole(path: Path) -> bool:
    return path.stat().st_size > 8 << 20


@hits()
def compression(s: Study) -> Change:
    pytest.importorskip("blosc2")
    with_array(s, LARGE)
    s.settings = {"compression": None}
    yield
    assert is_whole(s.records()[0])
    s.settings = {"compression": "zstd"}


@hits()
def compressed_records_where_none_are_asked_for(s: Study) -> Change:
    pytest.importorskip("blosc2")
    with_array(s, LARGE)
    s.settings = {"compression": "lz4"}
    yield
    assert not is_whole(s.records()[0])
    s.settings = {"compression": None}


@hits()
def the_size_of_tiles(s: Study) -> Change:
    pytest.importorskip("blosc2")
    with_array(s, LARGE)
    s.settings = {"compression": "lz4"}
    yield
    s.settings = {"compression": "lz4", "options": {"tiles": 16}}


row(MISS, "bits_of_mantissa", settings=({}, {"options": {"mantissa_bits": 13}}), array=LARGE)


row(
    MISS,
    "other_bits_of_mantissa",
    settings=({"options": {"mantissa_bits": 13}}, {"options": {"mantissa_bits": 12}}),
    array=LARGE,
)


row(
    MISS,
    "bits_of_mantissa_where_transforms_do_not_count",
    settings=({"hash_transform": None}, {"hash_transform": None, "options": {"mantissa_bits": 13}}),
    array=LARGE,
)


@hits()
def bits_of_mantissa_in_another_form(s: Study) -> Change:
    pytest.importorskip("blosc2")
    with_array(s, LARGE)
    s.settings = {"compression": "zstd", "options": {"mantissa_bits": 13}}
    yield
    s.settings = {"compression": None, "options": {"mantissa_bits": 13}}


row(MISS, "no_bits_of_mantissa", settings=({"options": {"mantissa_bits": 13}}, {}), array=LARGE)
