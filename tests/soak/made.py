"""Items that are a pure function of their index and version, datasets of them, and the comparison with a fresh one.

An item's source is a small file that holds its version. Datasets of one folder differ in the form of new records
(``FORMS``) and in whether a crop comes first among the random transforms, so that records in tiles are read in part.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import torch
from monai.data import MetaTensor

from monai_gds import GDSDataset, limits
from monai_gds.errors import CacheWarning
from monai_gds.items.tree import encode_item
from monai_gds.records.compression import Compression
from monai_gds.records.header import parse
from monai_gds.records.writing import pack_record
from monai_gds.storage.files import as_bytes_view
from tests.same import assert_same, moved, strides
from tests.soak.tally import Tally

__all__ = ["FORMS", "Reader", "Shape", "enter", "fresh", "made", "packed", "write_source", "write_sources"]

BOTH = ["image", "label"]

#: The forms in which records are written.
FORMS: dict[str, dict[str, Any]] = {
    "whole": {"compression": None},
    "lz4": {"compression": "lz4", "options": {"tiles": 32}},
    "zstd": {"compression": "zstd", "options": {"tiles": 16}},
}

Shape = tuple[int, int, int]

#: With tiles of 32³ and 16³ there are several along each axis, and the last ones are filled up.
USUAL: Shape = (40, 36, 33)
#: As few voxels as make 64 KiB, which records align.
TINY: Shape = (32, 32, 16)

_REST: dict[bool, Callable[[Shape], list[Any]]] = {
    False: lambda shape: [mt.ScaleIntensityRanged("image", 0, 100, 0, 1)],
    True: lambda shape: [
        mt.ScaleIntensityRanged("image", 0, 100, 0, 1),
        mt.RandSpatialCropd(BOTH, [n // 2 for n in shape], random_size=False),
        mt.RandFlipd(BOTH, prob=0.5),
    ],
}


def enter() -> None:
    """Has this process, which ends soon, put small volumes into tiles."""
    limits.TILED_BYTES = 1000


def write_source(folder: Path, index: int, version: int) -> str:
    """Writes the source of an item, whole or not at all."""
    path = folder / f"source_{index}.txt"
    half = folder / f".{index}.{os.getpid()}"
    half.write_text(f"{version}\n")
    half.replace(path)
    return str(path)


def write_sources(folder: Path, count: int, version: int = 0) -> list[dict[str, Any]]:
    """The dataset's items."""
    folder.mkdir(parents=True, exist_ok=True)
    return [{"source": write_source(folder, i, version), "index": i} for i in range(count)]


def made(index: int, version: int, source: str, shape: Shape) -> dict[str, Any]:
    """An item: tensors that compress and one that does not, arrays, small tensors, metadata, text."""
    generator = torch.Generator().manual_seed(1000 * version + index)
    image = torch.randint(0, 100, (1, *shape), generator=generator).float()
    label = torch.zeros(1, *shape)
    label[:, index % 5 : index % 5 + shape[0] // 2, 2 : 2 + shape[1] // 3] = 1 + version % 3
    meta = {"affine": torch.eye(4, dtype=torch.float64) * (1 + index), "filename_or_obj": source, "version": version}
    return {
        "source": source,
        "index": index,
        "version": version,
        "image": MetaTensor(image, meta={**meta, "spacing": np.array([1.0, 2.0, 1 + index])}),
        "label": MetaTensor(label, meta=dict(meta)),
        "noise": torch.rand(*((2, 5) if shape == TINY else (2, *shape)), generator=generator),
        "array": np.arange(3 * (1 + index % 4), dtype=np.float64).reshape(3, -1) + version,
        "half": torch.full((index % 3, 3), float(version), dtype=torch.float16),
        "names": np.array([f"item {index}", "é"]),
        "pair": (index, [version, None, float("nan")], f"{index}/{version}"),
    }


def packed() -> bytes:
    """A small record with all that packed tensors have: tiles with and without a palette, runs, and joint runs.

    The indices of one palette have a byte, those of another two. Its key has no parts. Made after :func:`enter`.
    """
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 100, (1, 32, 32, 32), generator=generator).float()
    image[:, 12:] = 0
    label = torch.zeros(1, 32, 32, 32, dtype=torch.int16)
    label[:, 4:20, 4:20] = 3
    noise = torch.rand(2, 32, 32, 32, generator=generator)
    noise[:, 1:] = noise[0, 0, 0, 0]
    plain = image[0, 0].repeat(8, 1).to(torch.uint8)
    volumes = {"image": MetaTensor(image), "label": label, "noise": noise, "plain": plain}
    item = encode_item({**volumes, "array": np.arange(3)})
    compression = Compression("lz4", 16, joint=(("label", "image", "0.0"),))
    key = {"parts": [], "sources": {}, "item": "", "pipeline": "00"}
    blob = b"".join(bytes(as_bytes_view(buffer)) for buffer in pack_record(item, key, compression))
    found = parse(blob, len(blob))
    assert sorted(found.tiles) == sorted(volumes)
    assert len(found.runs) == 2
    return blob


class Make(mt.Transform):  # type: ignore[misc]  # MONAI has no type hints to speak of
    """Makes the item whose source it reads."""

    def __init__(self, shape: Shape = USUAL) -> None:
        self.shape = shape

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return made(data["index"], version_of(data["source"]), data["source"], self.shape)


def version_of(source: str) -> int:
    """The version that a source has now."""
    return int(Path(source).read_text())


def fresh(index: int, version: int, source: str, crops: bool, seed: int, shape: Shape = USUAL) -> Any:
    """An item as MONAI alone computes it."""
    rest = mt.Compose(_REST[crops](shape)).set_random_state(seed)
    return without_ids(rest(made(index, version, source, shape)))


def without_ids(item: Any) -> Any:
    """The item without the identities of transforms."""
    mt.utils.reset_ops_id(item)
    return item


class Reader:
    """A dataset, each item of which is compared with a fresh computation.

    Args:
        items: of :func:`write_sources`.
        cache: the cache folder.
        form: of new records.
        crops: whether records in tiles are read in part.
        shape: of the volumes.
        last: transforms after all others, which change nothing.
        settings: further arguments of ``GDSDataset``.
    """

    def __init__(
        self, items: list[dict[str, Any]], cache: Path, form: str = "whole", crops: bool = False,
        shape: Shape = USUAL, last: Sequence[Callable[[Any], Any]] = (), **settings: Any,
    ) -> None:  # fmt: skip
        self.items, self.crops, self.shape, self.seed = items, crops, shape, 0
        transform = mt.Compose([Make(shape), *_REST[crops](shape), *last])
        options = {**FORMS[form].get("options", {}), **settings.get("options", {})}
        given = {"device": "cpu", **FORMS[form], **settings, "options": options}
        self.dataset = GDSDataset(items, transform, cache, **given)

    def read(self, index: int) -> str:
        """What is wrong with an item, which may change its version meanwhile; empty if nothing is."""
        source = self.items[index]["source"]
        self.seed += 1
        self.dataset.transform.set_random_state(self.seed)
        before = version_of(source)
        got = without_ids(self.dataset[index])
        return self.differs(got, index, range(before, version_of(source) + 1))

    def differs(self, got: Any, index: int, versions: range) -> str:
        """How an item that was just read differs from a fresh one of one of these versions."""
        if got["version"] not in versions:
            return f"item {index} has version {got['version']}, its source {versions}"
        try:
            source = self.items[index]["source"]
            expected = fresh(index, got["version"], source, self.crops, self.seed, self.shape)
            if self.dataset.device.type != "cpu":
                expected = moved(expected, str(self.dataset.device))
            assert_same(expected, got)
            assert_same(strides(expected), strides(got), "strides")
        except AssertionError as e:
            return f"item {index}: {str(e)[:300] or traceback.format_exc()}"
        return ""

    def check(self, index: int, tally: Tally) -> None:
        """Reads an item, and counts what is wrong."""
        tally.items += 1
        try:
            wrong = self.read(index)
        except Exception:
            tally.found("lost", traceback.format_exc()[-1500:])
            return
        if wrong:
            tally.found("wrong", wrong)

    def check_all(self, tally: Tally) -> None:
        """Checks every item, and waits for what is being saved."""
        for index in range(len(self.items)):
            self.check(index, tally)
        self.dataset.flush()


@contextmanager
def warned() -> Iterator[list[str]]:
    """The cache warnings that are given meanwhile, each once."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", CacheWarning)
        try:
            yield said
        finally:
            said += dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, CacheWarning))
