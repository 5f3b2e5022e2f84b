"""Image folders that several modules read; everything here needs DALI, whose CPU pipelines run without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from monai_gds.imagenet import open_images, pack_folder
from monai_gds.imagenet.synthetic import jpeg

#: Images by class; the one without takes a label all the same.
CLASSES = {"n01440764": 7, "n01443537": 11, "n01484850": 0, "n01491361": 5}
COUNT = sum(CLASSES.values())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 JPEGs of different sizes in four classes, one of them empty."""
    root = tmp_path_factory.mktemp("images") / "train"
    random = np.random.default_rng(0)
    for name, count in CLASSES.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            height, width = random.integers(8, 40, 2).tolist()
            (root / name / f"{name}_{i}.JPEG").write_bytes(jpeg(random, height, width))
    return root


@pytest.fixture(scope="session")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, packed into several files."""
    out = tmp_path_factory.mktemp("packed") / "train"
    pack_folder(open_images(folder), out, file_bytes=3000)
    assert len(list(out.glob("images-*"))) > 3
    return out


@pytest.fixture
def copy_of(folder: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes a copy of the folder that a test may spoil."""

    def copy() -> Path:
        root = tmp_path / "copy"
        for file in sorted(folder.glob("*/*")):
            (root / file.parent.name).mkdir(parents=True, exist_ok=True)
            (root / file.parent.name / file.name).write_bytes(file.read_bytes())
        return root

    return copy


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails when descriptors are left open."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
