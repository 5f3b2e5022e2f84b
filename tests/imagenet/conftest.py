"""Image folders that several modules read; everything here needs DALI, whose CPU pipelines run without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monai_gds.bench.made_up import jpeg
from monai_gds.imagenet import open_images, pack_folder

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


def as_dali_reads(
    root: str | Path | None, batch_size: int = 1, *, decode: bool = False, device_id: int | None = None,
    shard_id: int = 0, num_shards: int = 1, **arguments: Any,
) -> list[list[tuple[bytes, tuple[int, ...], int]]]:  # fmt: skip
    """One padded epoch of ``fn.readers.file``, by batches: (bytes, shape, label) of every image."""
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=batch_size, num_threads=1, device_id=device_id)
    def pipeline() -> Any:
        images, labels = fn.readers.file(
            file_root=None if root is None else str(root), name="files", shard_id=shard_id, num_shards=num_shards,
            pad_last_batch=True, **arguments,
        )  # fmt: skip
        if decode:
            images = fn.decoders.image(images, device="cpu" if device_id is None else "mixed")
        return images, labels

    pipe = pipeline()
    pipe.build()
    rounds = -(-pipe.reader_meta("files")["epoch_size"] // (num_shards * batch_size))
    batches = []
    for _ in range(rounds):
        images, labels = (out.as_cpu() for out in pipe.run())
        arrays = [np.asarray(image) for image in images]
        batches.append([(a.tobytes(), a.shape, int(np.asarray(n)[0])) for a, n in zip(arrays, labels, strict=True)])
    return batches


def samples_of_dali(root: str | Path | None, **arguments: Any) -> list[Any]:
    """(bytes, shape, label) of every image, as ``fn.readers.file`` gives them."""
    return [sample for batch in as_dali_reads(root, **arguments) for sample in batch]


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
