"""``fn.readers.webdataset`` over a tar file of the same images: a row of ``python -m tools.bench loaders``."""

from __future__ import annotations

import atexit
import functools
import io
import tarfile
import tempfile
from collections.abc import Generator
from pathlib import Path

from monai_gds.bench.loaders import LoaderSettings, run_dali
from monai_gds.imagenet.files.listing import ImageList, list_folder

__all__ = ["NAME", "dali_webdataset", "write_shard"]

NAME = "dali-webdataset"


def dali_webdataset(settings: LoaderSettings, threads: int) -> Generator[int]:
    """``fn.readers.webdataset``, without an index, over one shard."""
    where = {"paths": [str(_shard(settings.datadir))], "ext": ["jpg", "cls"]}
    return run_dali(settings, threads, lambda fn: fn.readers.webdataset(**where, missing_component_behavior="error"))


@functools.cache
def _shard(datadir: Path) -> Path:
    """The images of a folder in a tar file, which is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="monai-gds-bench-")
    atexit.register(folder.cleanup)
    shard = Path(folder.name) / "images.tar"
    write_shard(list_folder(datadir), shard)
    return shard


def write_shard(images: ImageList, shard: Path) -> None:
    """Writes images and their labels as WebDataset has them: ``00000000.jpg``, ``00000000.cls`` and so on."""
    with tarfile.open(shard, "w") as tar:
        for i, label in enumerate(images.labels):
            tar.add(images.path(i), f"{i:08}.jpg", recursive=False)
            text = str(label).encode()
            info = tarfile.TarInfo(f"{i:08}.cls")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
