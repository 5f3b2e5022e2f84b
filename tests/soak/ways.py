"""A record read in every way there is, below the dataset, and compared with the item that should be in it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from monai_gds.errors import RecordError
from monai_gds.folder.directory import CacheDirectory
from monai_gds.records.header import digest_in
from monai_gds.records.heads import Form
from monai_gds.storage import open_storage
from monai_gds.tiles.boxes import Box, last_three, whole_box
from monai_gds.tiles.runs import Runs
from tests.same import assert_same, strides

__all__ = ["Ways"]


class Ways:
    """The ways to read one record.

    Args:
        record: its path.
        expected: the item, as a hit returns it.

    Attributes:
        served: how often the record was served.
    """

    def __init__(self, record: Path, expected: Any) -> None:
        self.folder, self.expected, self.served = record.parent, expected, 0
        digest = digest_in(record.name)
        assert digest is not None
        self.digest = digest
        self._storage = open_storage("posix", "cpu")
        self._known = self.opened("first")

    def opened(self, verify: Any) -> CacheDirectory:
        """The directory, as a process sees it that has read nothing yet."""
        return CacheDirectory(self.folder, self._storage, verify=verify, form=Form(numpy=True))

    def read(self, rng: random.Random) -> list[str]:
        """Reads the record in all ways. Returns what is wrong: an unusable record is not, another item is.

        Raises:
            Exception: what a dataset would have raised.
        """
        wrong = []
        for name, cache in (("known", self._known), ("new", self.opened("first")), ("always", self.opened("always"))):
            ways = [self._whole, self._together, self._in_boxes]
            rng.shuffle(ways)
            for way in ways:
                said = way(cache, rng)
                if said:
                    wrong.append(f"{way.__name__[1:]} ({name}): {said}")
        return wrong

    def _whole(self, cache: CacheDirectory, rng: random.Random) -> str:
        pending = cache.start([self.digest])[0]
        return self._compare(None if pending is None else pending.wait())

    def _together(self, cache: CacheDirectory, rng: random.Random) -> str:
        found = cache.start([self.digest, "0" * 32, self.digest])
        return "".join(self._compare(None if pending is None else pending.wait()) for pending in found)

    def _in_boxes(self, cache: CacheDirectory, rng: random.Random) -> str:
        found = cache.start([self.digest], "rest")[0]
        if found is None or not found.later:
            return self._compare(None if found is None else found.wait())
        boxes = {name: [_box(form.shape, rng) for _ in range(2)] for name, form in found.later.items()}
        volumes = found.read(boxes).wait()
        said = ""
        for name, volume in {} if volumes is None else volumes.items():
            whole = torch.as_tensor(self.expected[name]).as_subclass(torch.Tensor)
            for box in boxes[name]:
                view = whole[(..., *box)]
                if not torch.equal(
                    volume.data.as_strided(view.size(), view.stride(), volume.place(view.storage_offset())), view
                ):
                    said += f"box {box} of {name} differs; "
        for (name, _, threshold), runs in found.runs.items():
            said += "" if threshold else self._find(name, runs, rng)
        whole = found.read({name: [whole_box(form.shape)] for name, form in found.later.items()}).wait()
        if whole is None:
            return said
        return said + self._compare(found.wait(tensors={name: volume.whole() for name, volume in whole.items()}))

    def _find(self, name: str, runs: Runs, rng: random.Random) -> str:
        """Finds an element by the runs of a label, as crops by label do. An unusable record is none of their errors."""
        whole = torch.as_tensor(self.expected[name]).as_subclass(torch.Tensor).flatten()
        value = rng.choice(whole.unique().tolist())
        chosen = (runs.values == value).numpy()
        places = (whole == value).nonzero().flatten()
        if runs.count(chosen) != len(places):
            return f"{runs.count(chosen)} elements of {name} are {value}, according to its runs; "
        k = rng.randrange(len(places))
        try:
            place = runs.find(chosen, k)
        except (RecordError, OSError):
            return ""
        return "" if place == places[k] else f"element {k} of {value} in {name} is not at {place}; "

    def _compare(self, found: Any) -> str:
        if found is None:
            return ""
        self.served += 1
        try:
            assert_same(self.expected, found[0])
            assert_same(strides(self.expected), strides(found[0]), "strides")
        except AssertionError as e:
            return str(e)[:300] or "it differs"
        return ""


def _box(shape: tuple[int, ...], rng: random.Random) -> Box:
    starts = [rng.randrange(n) for n in last_three(shape)]
    sides = [slice(start, rng.randint(start + 1, n)) for start, n in zip(starts, last_three(shape), strict=True)]
    return sides[0], sides[1], sides[2]
