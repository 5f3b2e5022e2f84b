"""Tensors in tiles: exact, smaller, and refused when anything about them is wrong."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monai_gds import limits
from monai_gds.errors import DamagedRecord, NewerRecord
from monai_gds.tiles import blosc
from monai_gds.tiles.codecs import CODECS, ON_CPU, Blosc2, Codec
from monai_gds.tiles.tiles import Layout, Packed, Tiles, pack, tile_shape
from monai_gds.tiles.unpacking import unpack, why_not

pytestmark = pytest.mark.skipif(importlib.util.find_spec("blosc2") is None, reason="blosc2 is not installed")

DTYPES = [
    torch.uint8, torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64,
    torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def small_tensors_are_packed_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "TILED_BYTES", 4096)
        yield


def read(packed: Packed) -> Tiles:
    """As a reader makes it."""
    return Tiles(Layout.of_node(packed.layout.to_node()), packed.table.numpy(), len(packed.streams))


def check(tiles: Tiles, streams: np.ndarray) -> None:
    """Compares every stream with its checksum, given the bytes of all."""
    tiles.check(streams, tiles.starts, np.arange(len(tiles.sizes)))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def ct(shape: tuple[int, ...] = (1, 70, 45, 90)) -> torch.Tensor:
    """A volume as a window makes it: few different values, much background."""
    values = torch.randint(0, 400, shape, generator=torch.Generator().manual_seed(0)).float() - 100
    return (values.clamp(0, 250) / 250).contiguous()


def packed_of(tensor: torch.Tensor, codec: str = "lz4") -> Packed:
    packed = pack(tensor, codec)
    assert packed is not None
    return packed


@given(
    shape=st.lists(st.integers(1, 70), min_size=1, max_size=3).map(tuple),
    leading=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    dtype=st.sampled_from(DTYPES),
    codec=st.sampled_from(sorted(ON_CPU)),
    edge=st.sampled_from([16, 32, 64]),
    values=st.integers(1, 5),
)
def test_gives_back_every_bit(
    shape: tuple[int, ...], leading: tuple[int, ...], dtype: torch.dtype, codec: str, edge: int, values: int
) -> None:
    size = (*leading, *shape, dtype.itemsize)
    generator = torch.Generator().manual_seed(math.prod(size))
    some = torch.randint(0, 256, (values, dtype.itemsize), dtype=torch.uint8, generator=generator)
    tensor = some[torch.randint(0, values, size[:-1], generator=generator)].view(dtype).squeeze(-1)
    packed = pack(tensor, codec, edge)
    if packed is not None:
        tiles = read(packed)
        check(tiles, packed.streams.numpy())
        assert same_bits(unpack(tiles, packed.streams.numpy()), tensor)
        assert packed.streams.nbytes + packed.table.nbytes < tensor.nbytes
    else:
        assert tensor.nbytes < 4096 or values > 1  # tiles that are mostly filled up gain nothing


@pytest.mark.parametrize("codec", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes_are_packed(dtype: torch.dtype, codec: str) -> None:
    tensor = (ct((2, 33, 40, 10)) * 5).repeat_interleave(8, -1).to(dtype)
    packed = packed_of(tensor, codec)
    assert same_bits(unpack(read(packed), packed.streams.numpy()), tensor)


def test_a_codec_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    zlib = Codec("zlib", Blosc2(code=4, level=1, format=3), "Deflate", b"any")
    monkeypatch.setitem(CODECS, "zlib", zlib)
    monkeypatch.setitem(ON_CPU, "zlib", zlib.blosc2)
    packed = packed_of(ct(), "zlib")
    assert packed.layout.to_node()["codec"] == "zlib"
    assert len(packed.streams) != len(packed_of(ct(), "zstd").streams)
    assert why_not("zlib") is None
    assert same_bits(unpack(read(packed), packed.streams.numpy()), ct())


def test_tensors_that_do_not_get_smaller_are_left_alone() -> None:
    assert pack(torch.randn(64, 64, 64), "lz4") is None
    framed = torch.zeros(128, 64, 64)
    framed[32:96] = torch.randn(64, 64, 64)
    assert pack(framed, "lz4") is None


def test_a_volume_whose_middle_alone_gets_smaller_is_left_alone() -> None:
    tensor = torch.randn(544, 64, 64)
    tensor[256:288] = 0
    assert pack(tensor, "lz4") is None


def test_native_volumes_get_much_smaller() -> None:
    volume = ct((1, 96, 96, 96))
    assert volume.nbytes / packed_of(volume).streams.nbytes > 3
    labels = torch.zeros(1, 96, 96, 96, dtype=torch.int64)
    labels[:, 20:60, 30:70, 10:50] = 3
    assert labels.nbytes / packed_of(labels).streams.nbytes > 200


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((512, 512, 300), (32, 32, 32)),
        ((2, 3, 40, 50, 60), (32, 32, 32)),
        ((1, 512, 512), (1, 128, 256)),
        ((512, 512, 1), (128, 256, 1)),
        ((100_000,), (1, 1, 32_768)),
        ((5, 5, 5), (5, 5, 5)),
        ((20, 300, 300), (20, 32, 32)),
    ],
    ids=str,
)
def test_tiles_are_cubes_or_have_about_as_many_voxels(shape: tuple[int, ...], tile: tuple[int, ...]) -> None:
    assert tile_shape(shape) == tile


def test_unpacking_does_not_change_the_streams() -> None:
    packed = packed_of(ct())
    streams = packed.streams.numpy().copy()
    streams.flags.writeable = False
    assert same_bits(unpack(read(packed), streams), ct())


def test_streams_are_aligned_and_apart() -> None:
    tiles = read(packed_of(ct()))
    full = tiles.sizes > 0
    assert not (tiles.starts[full] % 16).any()
    assert (tiles.starts[full][1:] - (tiles.starts + tiles.sizes)[full][:-1] >= 4).all()


@pytest.mark.parametrize("codec", ON_CPU)
def test_every_flipped_byte_of_a_stream_is_found(codec: str) -> None:
    packed = packed_of(ct((1, 40, 40, 40)), codec)
    tiles, streams = read(packed), packed.streams.numpy()
    for tile in range(len(tiles.sizes)):
        for at in range(tiles.starts[tile], tiles.starts[tile] + tiles.sizes[tile], 997):
            streams[at] ^= 64
            with pytest.raises(DamagedRecord, match=f"tile {tile} of 8"):
                check(tiles, streams)
            streams[at] ^= 64
    check(tiles, streams)


@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=20))
def test_unpacking_damaged_streams_unchecked_raises_or_gives_a_tensor(flips: list[tuple[int, int]]) -> None:
    packed = packed_of(ct((1, 40, 40, 40)))
    streams = packed.streams.numpy()
    for at, by in flips:
        streams[at % len(streams)] ^= by
    with contextlib.suppress(DamagedRecord):
        assert unpack(read(packed), streams).shape == (1, 40, 40, 40)


@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_wrong_table_is_refused_or_harmless(flips: list[tuple[int, int]]) -> None:
    """A table has a checksum, which comes first. After it, sizes are still compared with the bytes that are there."""
    packed = packed_of(ct((1, 40, 40, 40)))
    table = packed.table.numpy()
    for at, by in flips:
        table[at % len(table)] ^= by
    with contextlib.suppress(DamagedRecord):
        unpack(read(packed), packed.streams.numpy())


def test_an_index_beyond_the_palette_is_refused() -> None:
    packed = packed_of(ct())
    layout = Layout(**{**vars(packed.layout), "values": 10})
    table = packed.table.numpy()[: layout.table_bytes]
    with pytest.raises(DamagedRecord, match="not in its palette"):
        unpack(Tiles(layout, table, len(packed.streams)), packed.streams.numpy())


NODE = Layout(torch.float32, (1, 40, 40, 40), (32, 32, 32), "lz4", 10).to_node()


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F31"}, {"dtype": 5}, {"dtype": None}, {"shape": [1, 40, 40, -40]}, {"shape": [1, 40, 40, 1.5]},
        {"shape": "40"}, {"shape": [0, 40]}, {"shape": [1 << 41]}, {"shape": [True, 40]}, {"tile": [32, 32]},
        {"tile": [0, 32, 32]}, {"tile": [1 << 12, 1 << 12, 1 << 12]}, {"palette": -1}, {"palette": 65_537},
        {"palette": None}, {"tile": None}, {"codec": []}, {"codec": {}}, {"filter": None},
        {"shape": [600 << 22], "tile": [1, 1, 4 << 20], "dtype": "U8", "palette": 0},
    ],
    ids=str,
)  # fmt: skip
def test_a_layout_that_no_version_writes_is_damaged(change: dict[str, Any]) -> None:
    with pytest.raises(DamagedRecord):
        Layout.of_node({**NODE, **change})
    missing = {key: value for key, value in NODE.items() if key not in change}
    with pytest.raises(DamagedRecord):
        Layout.of_node(missing)


@pytest.mark.parametrize("change", [{"codec": "bitcomp"}, {"filter": "bitshuffle"}, {"ghosts": 1}], ids=str)
def test_a_layout_of_a_later_version_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(NewerRecord, match=next(iter(change)) if "ghosts" in change else next(iter(change.values()))):
        Layout.of_node({**NODE, **change})


def test_small_tensors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pack(torch.zeros(1023), "lz4") is None


def test_a_tensor_that_does_not_fit_into_memory_is_damage() -> None:
    """Tiles of equal bytes take 8 bytes of table each, whatever their size."""
    layout = Layout.of_node({**NODE, "shape": [1 << 16, 1 << 14, 256], "tile": [128, 64, 128], "palette": 0})
    table = np.zeros(layout.table_bytes, np.uint8)
    with pytest.raises(DamagedRecord, match="does not fit into memory"):
        unpack(Tiles(layout, table, 16), np.zeros(16, np.uint8))


def test_rows_of_more_than_two_gigabytes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blosc, "MOST_BYTES", 1 << 18)
    assert pack(torch.zeros(1 << 19), "lz4") is None
    assert pack(torch.zeros(64, 64, 64), "lz4") is not None


def test_a_default_device_does_not_matter() -> None:
    tensor = ct()
    with torch.device("meta"):
        packed = packed_of(tensor)
        found = unpack(read(packed), packed.streams.numpy())
    assert same_bits(found, tensor)


def test_huge_declared_shapes_take_no_memory() -> None:
    """The table must be as long as the layout says before anything is allocated by it."""
    layout = Layout.of_node({**NODE, "shape": [1 << 12, 1 << 12, 1 << 12]})
    with pytest.raises(DamagedRecord, match="instead of"):
        Tiles(layout, np.zeros(100, np.uint8), 100)


def test_slabs_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = ct((2, 70, 100, 40))
    wanted = packed_of(tensor)
    for size in (1, 300 << 10, 1 << 30):
        monkeypatch.setattr(limits, "SLAB_BYTES", size)
        packed = packed_of(tensor)
        assert torch.equal(packed.table, wanted.table) and torch.equal(packed.streams, wanted.streams)
        assert same_bits(unpack(read(wanted), wanted.streams.numpy()), tensor)
