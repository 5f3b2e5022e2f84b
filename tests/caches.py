"""What the tests of the cache share: a cache directory over the posix backend, and one item's round trip through it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monai_gds.base.names import digest_of
from monai_gds.folder.directory import CacheDirectory
from monai_gds.items.tree import encode_item
from monai_gds.keys.key import Key, Pipeline
from monai_gds.storage import open_storage


def key(name: str = "a") -> Key:
    """The key of an item whose hash is ``name``."""
    pipeline = Pipeline("transform")
    return Key(digest_of(pipeline.parts(name, [])), name, pipeline)


@pytest.fixture
def cache(tmp_path: Path) -> CacheDirectory:
    """An empty cache directory on the CPU."""
    return CacheDirectory(tmp_path, open_storage("posix", "cpu"))


@pytest.fixture
def round_trip(cache: CacheDirectory) -> Callable[[Any], Any]:
    """Writes an item as a record file and reads it back."""

    def through(item: Any) -> Any:
        assert cache.publish(key(), encode_item(item))
        found = cache.start([key().digest])[0].wait()  # type: ignore[union-attr]
        assert found is not None
        return found[0]

    return through
