"""Partial reads: boxes of tensors in tiles, equal to those of the whole tensor bit by bit."""

from __future__ import annotations

import errno
import warnings
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from monai_gds import limits
from monai_gds.errors import CacheWarning
from monai_gds.folder.directory import CacheDirectory
from monai_gds.items.tree import encode_item
from monai_gds.records.compression import Compression
from monai_gds.records.heads import Form, TensorForm
from monai_gds.records.pending import PendingItem
from monai_gds.records.volumes import Volume
from monai_gds.storage import memory as pools
from monai_gds.storage import open_storage
from monai_gds.storage.plain.posix import PosixBackend
from monai_gds.tiles import blosc
from monai_gds.tiles.boxes import Box, whole_box
from tests.caches import key
from tests.folder.test_directory import flip, path_of

pytestmark = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")


def opened(path: Path, codec: str | None = None, **settings: Any) -> CacheDirectory:
    compression = Compression(codec)
    return CacheDirectory(path, open_storage("posix", "cpu"), compression=compression, **settings)


def image(shape: Sequence[int] = (1, 80, 90, 100), seed: int = 0) -> torch.Tensor:
    """A volume of 400 values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 400, tuple(shape), generator=generator).float().div_(7)


def item() -> dict[str, Any]:
    label = torch.zeros(1, 80, 90, 100, dtype=torch.int64)
    label[:, 20:50, 30:60, 40:90] = 3
    return {
        "image": MetaTensor(image(), affine=torch.eye(4)), "label": MetaTensor(label), "array": np.ones((64, 64, 128)),
        "small": torch.arange(5), "name": "x",
    }  # fmt: skip


def box(x: int, y: int, z: int, *size: int) -> Box:
    dx, dy, dz = size * 3 if len(size) == 1 else size
    return slice(x, x + dx), slice(y, y + dy), slice(z, z + dz)


def crop(volume: Volume, whole: torch.Tensor, wanted: Box) -> torch.Tensor:
    """As the crop of a ghost becomes one of a volume."""
    view = whole[(..., *wanted)]
    return volume.data.as_strided(view.size(), view.stride(), volume.place(view.storage_offset()))


def lazily(cache: CacheDirectory) -> PendingItem:
    (found,) = cache.start([key().digest], first="rest")
    assert found is not None and found.later
    return found


def read(found: PendingItem, boxes: dict[str, Any]) -> dict[str, Volume]:
    volumes = found.read(boxes).wait()
    assert volumes is not None
    return volumes


def test_boxes_come_as_crops_of_the_whole(tmp_path: Path) -> None:
    cache = opened(tmp_path, codec="lz4")
    assert cache.publish(key(), encode_item(item()))
    boxes = [box(0, 0, 0, 40), box(33, 40, 50, 47, 50, 50), box(30, 0, 60, 1)]
    for _ in range(2):
        found = lazily(cache)
        assert set(found.later) == {"image", "label", "array"}
        assert found.later["image"] == TensorForm(torch.float32, (1, 80, 90, 100))
        volumes = read(found, {"image": boxes, "label": boxes[:1]})
        for wanted in boxes:
            view = crop(volumes["image"], image(), wanted)
            assert torch.equal(view, image()[(..., *wanted)])
            assert view.stride() == image()[(..., *wanted)].stride()
        assert torch.equal(
            crop(volumes["label"], item()["label"].as_tensor(), boxes[0]), item()["label"][(..., *boxes[0])]
        )


def test_the_item_is_put_together_with_any_tensors(tmp_path: Path) -> None:
    cache = opened(tmp_path, codec="zstd", form=Form(numpy=True))
    assert cache.publish(key(), encode_item(item()))
    found = lazily(cache)
    assert set(found.later) == {"image", "label"}
    given = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in found.later.items()}
    (ghosts,) = found.wait(tensors=given)
    assert ghosts["image"].is_meta and isinstance(ghosts["image"], MetaTensor)
    assert (ghosts["array"] == 1).all() and isinstance(ghosts["array"], np.ndarray) and ghosts["name"] == "x"
    ghosts["array"][:] = 5
    ghosts["image"].meta["more"] = 1
    whole = read(found, {name: [box(0, 0, 0, 80, 90, 100)] for name in given})
    (again,) = found.wait(tensors={name: volume.whole() for name, volume in whole.items()})
    assert (again["array"] == 1).all() and "more" not in again["image"].meta
    assert torch.equal(again["image"].as_tensor(), image()) and again["image"].is_contiguous()
    assert torch.equal(again["label"].as_tensor(), item()["label"].as_tensor())


@pytest.mark.parametrize("codec", [None, "lz4"])
def test_nothing_is_read_but_what_is_asked_for(tmp_path: Path, codec: str | None) -> None:
    cache = opened(tmp_path, codec=codec) if codec else opened(tmp_path)
    assert cache.publish(key(), encode_item(item()))
    everything = {"image", "label", "array", "small"}
    for wanted in (everything, {"array"}, {"label", "image"}):
        (found,) = cache.start([key().digest], first="head")
        assert found is not None and found.ready and not found.nbytes
        assert set(found.later) == everything and found.later["image"] == TensorForm(torch.float32, (1, 80, 90, 100))
        given = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in found.later.items()}
        (ghosts,) = found.wait(tensors=given)
        assert ghosts["image"].is_meta and ghosts["name"] == "x"
        volumes = read(found, {n: [CORNER if n == "image" else whole_box(found.later[n].shape)] for n in wanted})
        assert set(volumes) == wanted
        for name in wanted - {"image"}:
            assert torch.equal(volumes[name].whole(), torch.as_tensor(item()[name]))
        if "image" in wanted:
            assert torch.equal(crop(volumes["image"], image(), CORNER), image()[(..., *CORNER)])
            assert found.nbytes


def test_damage_of_what_is_read_whole_is_found(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    assert cache.publish(key(), encode_item({"image": image(), "label": image() + 1}))
    path = path_of(cache, "a")
    head = cache._reader.head(cache.record_path(key().digest))
    flip(path, int(head.table.reads.offset[0]) + 50)
    for name, usable in (("label", True), ("image", False)):
        (found,) = opened(tmp_path).start([key().digest], first="head")
        assert found is not None
        with nullcontext() if usable else pytest.warns(CacheWarning, match="checksum"):
            assert (found.read({name: [WHOLE]}).wait() is not None) == usable


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


WHOLE = box(0, 0, 0, 80, 90, 100)
CORNER = box(0, 0, 0, 20)


def published(path: Path, **settings: Any) -> Path:
    cache = opened(path, codec="lz4", **settings)
    assert cache.publish(key(), encode_item({"image": image()}))
    return path_of(cache, "a")


def tile_at(cache: CacheDirectory, wanted: Box) -> int:
    """Where in the file a stream is that a box needs."""
    head = cache._reader.head(cache.record_path(key().digest))
    selection = head.tiles["image"].select(head.tiles["image"].touched([wanted]))
    return int(head.table.reads.offset[0] + selection.offset[0]) + 50


def place_of(cache: CacheDirectory, name: str) -> int:
    """Where in the file a byte of a tensor is that is not in tiles."""
    head = cache._reader.head(cache.record_path(key().digest))
    names = [name for name, _, _ in head.table.tensors]
    return int(head.table.reads.offset[names.index(name)]) + 1000


def corner(cache: CacheDirectory, wanted: Box = CORNER) -> bool | None:
    """Whether a box comes as it should; None if there is no usable record."""
    (found,) = cache.start([key().digest], first="rest")
    volumes = found.read({"image": [wanted]}).wait() if found is not None else None
    return None if volumes is None else torch.equal(crop(volumes["image"], image(), wanted), image()[(..., *wanted)])


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_damaged_tile_is_reported_once_and_only_where_it_is_needed(tmp_path: Path, verify: Any) -> None:
    path = published(tmp_path)
    far = box(60, 70, 80, 15)
    flip(path, tile_at(opened(tmp_path), CORNER))
    cache = opened(tmp_path, verify=verify)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert corner(cache, far)
    with pytest.warns(CacheWarning, match="tile 0 of .* computed again|computed again: tile 0 of") as given:
        assert corner(cache) is None
        assert corner(cache) is None
    assert len(given) == 1


def test_each_tile_is_compared_once_or_always_or_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(tmp_path)
    compared: list[int] = []
    plain = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data: compared.append(len(data)) or plain(data))  # type: ignore[func-returns-value]

    def counts(cache: CacheDirectory) -> list[int]:
        found = []
        for wanted in (CORNER, CORNER, box(0, 0, 0, 40), box(0, 0, 0, 40)):
            compared.clear()
            assert corner(cache, wanted)
            found.append(len([n for n in compared if n > 100]))
        return found

    first = opened(tmp_path)
    assert corner(first, box(70, 80, 90, 5))  # reads the head
    assert counts(first) == [1, 0, 7, 0]
    never, always = opened(tmp_path, verify="never"), opened(tmp_path, verify="always")
    assert corner(never, box(70, 80, 90, 5)) and corner(always, box(70, 80, 90, 5))
    assert counts(never) == [0, 0, 0, 0]
    assert counts(always) == [1, 1, 8, 8]
    whole = opened(tmp_path)
    assert whole.start([key().digest])[0].wait() is not None  # type: ignore[union-attr]
    assert counts(whole) == [0, 0, 0, 0]


@pytest.mark.filterwarnings("error")
def test_a_record_that_is_replaced_is_read_anew_and_one_that_is_deleted_is_absent(tmp_path: Path) -> None:
    path, cache = published(tmp_path), opened(tmp_path)
    found = lazily(cache)
    other = opened(tmp_path, codec="zstd")
    assert other.publish(key(), encode_item({"image": image()}))
    assert found.read({"image": [CORNER]}).wait() is None
    found = lazily(cache)
    assert corner(cache)
    assert found.read({"image": [CORNER]}).wait() is not None
    found = lazily(cache)
    path.unlink()
    assert found.read({"image": [CORNER]}).wait() is None
    assert cache.start([key().digest], first="rest") == [None]


def test_what_was_interrupted_is_not_taken_for_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(tmp_path)
    found = lazily(opened(tmp_path))
    assert found.read({}).wait() == {}
    volumes = found.read({"image": [CORNER]})

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(volumes, "_unpacked", interrupted)
        volumes.wait()
    assert volumes.wait() is None


def test_an_input_output_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(tmp_path)
    cache = opened(tmp_path)
    found = lazily(cache)

    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(PosixBackend, "_read_into", failing)
    with pytest.warns(CacheWarning, match="Input/output error"):
        assert found.read({"image": [CORNER]}).wait() is None


def test_a_damaged_tensor_that_is_not_in_tiles_is_reported(tmp_path: Path) -> None:
    cache = opened(tmp_path, codec="lz4")
    assert cache.publish(key(), encode_item({"image": image(), "noise": torch.randn(200_000)}))
    flip(path_of(cache, "a"), place_of(opened(tmp_path), "noise"))
    cache = opened(tmp_path)
    found = lazily(cache)
    with pytest.warns(CacheWarning, match="'noise' do not match"):
        assert found.wait(tensors={"image": torch.empty(1, 80, 90, 100, device="meta")}) is None


def test_a_replaced_record_is_verified_although_no_head_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEADS_BYTES", 0)
    writer, cache = opened(tmp_path, codec="lz4"), opened(tmp_path)
    given = {"image": torch.empty(1, 80, 90, 100, device="meta")}
    for damaged in (False, True):
        assert writer.publish(key(), encode_item({"image": image(), "noise": torch.randn(200_000)}))
        if not damaged:
            assert lazily(cache).wait(tensors=given) is not None
    flip(path_of(cache, "a"), place_of(cache, "noise"))
    found = lazily(cache)
    with pytest.warns(CacheWarning, match="'noise' do not match"):
        assert found.wait(tensors=given) is None


def test_a_damaged_table_makes_no_item(tmp_path: Path) -> None:
    path = published(tmp_path)
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    flip(path, header + 20)
    with pytest.warns(CacheWarning, match="__tiles.image"):
        assert opened(tmp_path).start([key().digest], first="rest") == [None]


# ---------------------------------------------------------------------------------------------------------------------
# Bytes, memory, threads


@pytest.mark.parametrize("settings", [{}, {"direct_io": True}, {"threads": 1}], ids=str)
def test_every_way_of_reading_gives_the_same(tmp_path: Path, settings: dict[str, Any]) -> None:
    published(tmp_path)
    cache = CacheDirectory(tmp_path, open_storage("posix", "cpu", **settings))
    for wanted in (CORNER, WHOLE, box(60, 0, 3, 17)):
        assert corner(cache, wanted)


def test_only_what_the_boxes_touch_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = published(tmp_path)
    nbytes: list[int] = []
    plain = PosixBackend._read_into

    def counted(self: PosixBackend, handle: Any, offset: int, dest: torch.Tensor) -> int:
        nbytes.append(dest.numel())
        return plain(self, handle, offset, dest)

    cache = opened(tmp_path)
    lazily(cache)
    monkeypatch.setattr(PosixBackend, "_read_into", counted)
    assert corner(cache)
    assert 0 < sum(nbytes) < path.stat().st_size / 20
    found = lazily(cache)
    assert found.nbytes == 0
    assert found.read({"image": [CORNER]}).wait() is not None
    span = 4 * (19 * 90 * 100 + 19 * 100 + 20)  # from the first voxel to the last
    assert sum(nbytes) / 2 < found.nbytes - span < sum(nbytes) / 2 + 8192


def test_memory_is_used_again_once_nothing_shares_it(tmp_path: Path) -> None:
    published(tmp_path)
    cache = opened(tmp_path)
    pools._volumes.blocks.clear()
    view = crop(read(lazily(cache), {"image": [CORNER]})["image"], image(), CORNER)
    taken = view.untyped_storage().data_ptr()
    other = crop(read(lazily(cache), {"image": [CORNER]})["image"], image(), CORNER)
    assert other.untyped_storage().data_ptr() != taken
    other.fill_(-1)
    assert torch.equal(view, image()[(..., *CORNER)])
    del view
    again = [read(lazily(cache), {"image": [CORNER]})["image"].data.data_ptr() for _ in range(3)]
    assert taken in again
    pools._volumes.blocks.clear()


def test_volumes_larger_than_the_pool_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(tmp_path)
    monkeypatch.setattr(pools._volumes, "_max_bytes", 1 << 20)
    pools._volumes.blocks.clear()
    assert corner(opened(tmp_path), WHOLE)
    assert not [block for block in pools._volumes.blocks if block.nbytes > 1 << 21]
    pools._volumes.blocks.clear()


def test_many_threads_read_one_record(tmp_path: Path) -> None:
    published(tmp_path)
    cache = opened(tmp_path)
    wanted = [box(x, y, z, 20) for x in (0, 25, 60) for y in (0, 31, 70) for z in (5, 80)]
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda one: corner(cache, one), wanted * 3))
        volumes = lazily(cache).read({"image": wanted})
        found = list(threads.map(lambda _: volumes.wait(), range(8)))
    assert all(one is found[0] for one in found)


def test_a_record_without_tiles_is_read_whole(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    assert cache.publish(key(), encode_item({"image": image(), "n": 1}))
    for _ in range(2):
        (found,) = cache.start([key().digest], first="rest")
        assert found is not None and not found.later
        (read_whole,) = found.wait()
        assert torch.equal(read_whole["image"], image()) and read_whole["n"] == 1


def test_complex_tensors_and_those_with_gradients_are_read_whole(tmp_path: Path) -> None:
    cache = opened(tmp_path, codec="lz4")
    some = {"a": image().requires_grad_(), "b": torch.complex(image(), image())}
    assert cache.publish(key(), encode_item(some))
    (found,) = cache.start([key().digest], first="rest")
    assert found is not None and not found.later
    (one,) = found.wait()
    assert torch.equal(one["a"], image()) and one["a"].requires_grad and torch.equal(one["b"], some["b"])


def test_a_view_outside_of_what_was_read_is_refused(tmp_path: Path) -> None:
    published(tmp_path)
    volume = read(lazily(opened(tmp_path)), {"image": [CORNER]})["image"]
    with pytest.raises(ValueError, match="in none of the boxes"):
        crop(volume, image(), box(60, 60, 60, 3))
    with pytest.raises(ValueError, match="take views"):
        volume.whole()
