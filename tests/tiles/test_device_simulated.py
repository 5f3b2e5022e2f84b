"""Unpacking after reads on a device, simulated: the CPU unpacks in place of nvCOMP, from CPU tensors.

Shows what is read, kept and handed out. ``test_device_tiles`` shows the unpacking itself, on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from monai_gds.base.stages import KEPT, Watch, measured
from monai_gds.errors import CacheWarning, MonaiGdsError
from monai_gds.folder.directory import CacheDirectory
from monai_gds.items.tree import encode_item
from monai_gds.records import reader
from monai_gds.records.compression import Compression
from monai_gds.storage import open_storage
from monai_gds.tiles import blosc, device
from monai_gds.tiles.boxes import Box
from tests.caches import key

pytestmark = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")


class _Outcome:
    def check(self) -> None:
        pass


def _unpack(parts: Sequence[device.Part]) -> Any:
    """Places each tile by itself, as the kernel does."""
    for part in parts:
        layout, tiles = part.tiles.layout, part.tiles
        ids = np.arange(layout.count) if part.ids is None else part.ids
        streams, tile = part.streams.numpy(), layout.tile
        out = part.out.view(-1, *(1, 1, 1, *layout.shape)[-3:])
        for which, start in zip(ids, part.starts, strict=True):
            size = int(tiles.sizes[which])
            room = np.zeros(blosc.head_bytes(1) + 16, np.uint8)
            buffer = np.concatenate([room, streams[start : start + max(size, 0)]])
            packed = torch.empty(1, int(np.prod(tile)), dtype=layout.packed_dtype)
            blosc.decompress(buffer, np.array([len(room)]), np.array([size]), layout.codec, packed)
            assert start % 16 == 0 or size <= 0
            values = packed[0] if tiles.values is None else tiles.values[packed[0].to(torch.int64) & 0xFFFF]
            lead, x, y, z = (int(n) for n in np.unravel_index(which, layout.grid))
            region = out[lead, x * tile[0] :, y * tile[1] :, z * tile[2] :][: tile[0], : tile[1], : tile[2]]
            a, b, c = region.shape
            region.copy_(values.view(layout.dtype).view(tile)[:a, :b, :c])
    return _Outcome()


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "unpack", _unpack)
    monkeypatch.setattr(reader.RecordReader, "unpacks_there", lambda _: True)


def _item() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    image = torch.randint(0, 400, (1, 80, 90, 100), generator=generator).float().div_(7)
    return {
        "image": MetaTensor(image),
        "label": (image > 40).to(torch.uint8).repeat(2, 1, 1, 1),
        "small": torch.arange(5),
    }


def _cache(folder: Path, **settings: Any) -> CacheDirectory:
    return CacheDirectory(folder, open_storage("posix", "cpu"), compression=Compression("lz4"), **settings)


def _saved(folder: Path) -> CacheDirectory:
    cache = _cache(folder)
    assert cache.publish(key(), encode_item(_item()))
    return cache


def _hit(cache: CacheDirectory) -> Any:
    pending = cache.start([key().digest])[0]
    found = None if pending is None else pending.wait()
    return None if found is None else found[0]


def _right(item: Any) -> bool:
    return all(torch.equal(item[name], value) for name, value in _item().items())


def test_whole_records(tmp_path: Path) -> None:
    cache = _saved(tmp_path)
    assert all(_right(_hit(cache)) for _ in range(3))


@pytest.mark.parametrize("device_bytes", [0, 10**9])
def test_boxes(tmp_path: Path, device_bytes: int) -> None:
    _saved(tmp_path)
    cache = _cache(tmp_path, device_bytes=device_bytes)
    boxes: list[Box] = [(slice(3, 20), slice(70, 90), slice(1, 9)), (slice(60, 80), slice(0, 33), slice(95, 100))]
    for _ in range(3):
        (lazy,) = cache.start([key().digest], "rest")
        assert lazy is not None and lazy.later
        found = lazy.read({"label": boxes, "image": boxes[:1]}).wait()
        assert found is not None
        for name, volume in found.items():
            whole = _item()[name]
            for box in boxes if name == "label" else boxes[:1]:
                view = whole[(..., *box)]
                assert torch.equal(
                    volume.data.as_strided(view.size(), view.stride(), volume.place(view.storage_offset())), view
                )


def test_records_that_stay_are_not_read_again_and_belong_to_nobody_else(tmp_path: Path) -> None:
    _saved(tmp_path)
    cache = _cache(tmp_path, device_bytes=10**9)
    first = _hit(cache)
    assert _right(first)
    for value in first.values():
        value.fill_(1)
    path = Path(cache.record_path(key().digest))
    with open(path, "r+b") as file:  # in place, with its times put back: only a read would notice
        times = path.stat()
        file.seek(times.st_size // 2)
        file.write(bytes(64))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for _ in range(2):
        with measured(watched := Watch()):
            again = _hit(cache)
        assert watched.counts[KEPT] > 0 and not watched.counts["bytes"]
        assert _right(again)
        for value in again.values():
            value.fill_(2)


def test_a_record_beyond_the_budget_does_not_stay(tmp_path: Path) -> None:
    _saved(tmp_path)
    cache = _cache(tmp_path, device_bytes=1000)
    assert _right(_hit(cache))
    assert cache._reader._kept is not None
    assert cache._reader._kept.nbytes == 0


def test_a_decoder_that_fails_costs_the_record_and_does_not_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = _saved(tmp_path)

    def refuses(parts: Any) -> Any:
        raise MonaiGdsError("nvCOMP refused: status 12")

    monkeypatch.setattr(device, "unpack", refuses)
    before = Path(cache.record_path(key().digest)).read_bytes()
    with pytest.warns(CacheWarning, match=r"without being replaced: .*status 12"):
        assert _hit(cache) is None
    assert not cache.publish(key(), encode_item(_item()))
    assert Path(cache.record_path(key().digest)).read_bytes() == before
