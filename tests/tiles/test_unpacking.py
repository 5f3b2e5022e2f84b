"""Boxes of tensors in tiles: equal bit by bit to those of the whole tensor, with few bytes read beyond them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from monai_gds import limits
from monai_gds.errors import DamagedRecord
from monai_gds.tiles import blosc
from monai_gds.tiles.boxes import Arrangement, Box, arrange, last_three
from monai_gds.tiles.codecs import ON_CPU
from monai_gds.tiles.tiles import PATTERNS, Layout, Packed, Selection, Tiles, pack
from monai_gds.tiles.unpacking import unpack, unpack_boxes
from tests.tiles.test_boxes import WIDE, crops_of_wide, shapes_and_boxes
from tests.tiles.test_tiles import DTYPES, ct, packed_of, read, same_bits

pytestmark = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")


@pytest.fixture(autouse=True, scope="module")
def small_tensors_are_packed_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "TILED_BYTES", 4096)
        yield


def fetched(packed: Packed, selection: Selection) -> np.ndarray:
    """The buffer as a storage fills it; all else in it is noise."""
    buffer = np.full(selection.nbytes, 0xA5, np.uint8)
    streams = packed.streams.numpy()
    for offset, length, dest in zip(selection.offset, selection.length, selection.dest, strict=True):
        buffer[dest : dest + length] = streams[offset : offset + length]
    return buffer


def boxes_of(packed: Packed, boxes: list[Box]) -> list[torch.Tensor]:
    """The voxels of each box, (leading, x, y, z)."""
    tiles = read(packed)
    selection = tiles.select(tiles.touched(boxes))
    buffer = fetched(packed, selection)
    tiles.check(buffer, selection.starts, selection.tiles)
    layout = packed.layout
    arrangement = arrange(layout.shape, layout.dtype.itemsize, boxes)
    memory = torch.zeros(arrangement.numel, dtype=layout.dtype)
    unpack_boxes(tiles, selection, buffer, boxes, arrangement, memory)
    patterns = memory.view(PATTERNS[layout.dtype.itemsize])  # see crop
    return [voxels(patterns, arrangement, box).contiguous().view(layout.dtype) for box in boxes]


def voxels(memory: torch.Tensor, arrangement: Arrangement, box: Box) -> torch.Tensor:
    """Those of a box, (leading, x, y, z)."""
    volume = math.prod(last_three(arrangement.shape))
    size = (math.prod(arrangement.shape) // volume, *(axis.stop - axis.start for axis in box))
    return memory.as_strided(size, (volume, *arrangement.strides), arrangement.place_of(box))


def crop(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """As bit patterns: a strided copy of bools makes every one that is not zero a 1."""
    patterns = tensor.view(PATTERNS[tensor.dtype.itemsize])
    return patterns.view(-1, *last_three(tensor.shape))[(slice(None), *box)].contiguous().view(tensor.dtype)


@given(
    drawn=shapes_and_boxes(70),
    dtype=st.sampled_from(DTYPES),
    codec=st.sampled_from(sorted(ON_CPU)),
    edge=st.sampled_from([8, 16, 32]),
    values=st.sampled_from([1, 5, 300]),
    slab=st.sampled_from([1, 50_000, 1 << 20]),
)
def test_boxes_have_every_bit_of_the_whole(
    drawn: tuple[tuple[int, ...], list[Box]], dtype: torch.dtype, codec: str, edge: int, values: int, slab: int
) -> None:
    shape, boxes = drawn
    generator = torch.Generator().manual_seed(math.prod(shape))
    some = torch.randint(0, 256, (values, dtype.itemsize), dtype=torch.uint8, generator=generator)
    tensor = some[torch.randint(0, values, shape, generator=generator)].view(dtype).squeeze(-1)
    packed = pack(tensor, codec, edge)
    if packed is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DECODED_BYTES", slab)
        for box, found in zip(boxes, boxes_of(packed, boxes), strict=True):
            assert same_bits(found, crop(tensor, box))
        assert same_bits(unpack(read(packed), packed.streams.numpy()), tensor)


@example(  # one in another
    crops=[
        *((slice(0, 8), slice(0, 6), slice(z, z + 40)) for z in (100, 0)),
        (slice(0, 7), slice(0, 6), slice(100, 133)),
    ],
    values=300,
    counts=False,
    slab=1 << 20,
)
@given(
    crops=crops_of_wide(),
    values=st.sampled_from([2, 5, 100, 300, 5000]),
    counts=st.booleans(),
    slab=st.sampled_from([5_000, 1 << 20]),
)
def test_crops_that_lie_side_by_side_have_every_bit_too(crops: list[Box], values: int, counts: bool, slab: int) -> None:
    numbers = torch.randint(0, values, (1, *WIDE), generator=torch.Generator().manual_seed(values)).float()
    tensor = numbers if counts else numbers.sub_(3).div_(7)
    packed = packed_of(tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DECODED_BYTES", slab)
        for box, found in zip(crops, boxes_of(packed, crops), strict=True):
            assert same_bits(found, crop(tensor, box))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.float64], ids=str)
@pytest.mark.parametrize("classes", [3, 200, 1000])
def test_labels_that_count_from_zero_come_as_they_were(dtype: torch.dtype, classes: int) -> None:
    label = torch.arange(classes).to(dtype).repeat_interleave(40)[torch.randint(0, 40 * classes, (60, 70, 80))]
    label = label.sort(-1).values.contiguous()
    packed = pack(label, "lz4")
    if packed is None:
        pytest.skip("as compressed, it is no smaller")
    boxes = [(slice(3, 50), slice(0, 70), slice(31, 65))]
    assert same_bits(boxes_of(packed, boxes)[0], crop(label, boxes[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("low", [-175, -57, 0])
@pytest.mark.parametrize("missing", [None, 17])
def test_scaled_integers_come_as_they_were(dtype: torch.dtype, low: int, missing: int | None) -> None:
    """Whether they fill their range or one of them is missing."""
    hounsfield = torch.arange(low, 251).repeat(400).sort().values[: 60 * 70 * 20].view(60, 70, 20).contiguous()
    if missing is not None:
        hounsfield[hounsfield == missing] = missing + 1
    image = ((hounsfield.to(dtype) - low) / (250 - low)).contiguous()
    packed = pack(image, "lz4", 16)
    if packed is None:
        pytest.skip("as compressed, it is no smaller")
    boxes = [(slice(3, 50), slice(0, 70), slice(5, 20))]
    assert same_bits(boxes_of(packed, boxes)[0], crop(image, boxes[0]))
    if dtype == torch.float32 and missing is None:
        assert read(packed).divisor == 250 - low
    assert same_bits(unpack(read(packed), packed.streams.numpy()), image)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("values", [2, 5, 255, 256, 257])
def test_values_of_any_palette_come_as_they_were(dtype: torch.dtype, values: int) -> None:
    """In boxes of an odd number of voxels too: indices of one byte are looked up in pairs."""
    some = torch.randint(-1000, 1000, (values,)).to(dtype)
    image = some[torch.randint(0, values, (60, 64, 70))].sort(-1).values.contiguous()
    packed = pack(image, "lz4", 16)
    if packed is None:
        pytest.skip("as compressed, it is no smaller")
    for box in ((slice(1, 60), slice(2, 63), slice(3, 70)), (slice(5, 8), slice(0, 1), slice(7, 10))):
        assert same_bits(boxes_of(packed, [box])[0], crop(image, box))
    assert same_bits(unpack(read(packed), packed.streams.numpy()), image)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_of_tiles_of_equal_bytes_one_is_decoded_for_each_value(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = torch.zeros(64, 64, 64, dtype=dtype)
    label[:, 32:] = 3
    label[40:50, 3:20, 5:60] = 1
    packed = packed_of(label)
    decoded = []
    plain = blosc.decompress

    def counted(buffer: np.ndarray, starts: np.ndarray, *args: object) -> None:
        decoded.append(len(starts))
        plain(buffer, starts, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(blosc, "decompress", counted)
    box = (slice(0, 64), slice(0, 64), slice(0, 64))
    assert same_bits(boxes_of(packed, [box])[0], crop(label, box))
    assert decoded == [2 + 2]  # of eight tiles two hold several values


def pages(starts: np.ndarray, sizes: np.ndarray) -> int:
    """How many pages hold these parts of a file."""
    found: set[int] = set()
    for start, size in zip(starts[sizes > 0].tolist(), sizes[sizes > 0].tolist(), strict=True):
        found.update(range(start // 4096, (start + size - 1) // 4096 + 1))
    return len(found)


@given(drawn=shapes_and_boxes(200).filter(lambda drawn: math.prod(drawn[0]) < 1 << 22), values=st.integers(2, 4000))
def test_no_more_is_read_than_a_page_beside_each_tile_that_is_touched(
    drawn: tuple[tuple[int, ...], list[Box]], values: int
) -> None:
    shape, boxes = drawn
    packed = pack(torch.randint(0, values, shape, generator=torch.Generator().manual_seed(1)).float(), "lz4", 16)
    if packed is None:
        return
    tiles = read(packed)
    selection = tiles.select(tiles.touched(boxes))
    touched = pages(tiles.starts[selection.tiles], selection.sizes)
    assert pages(selection.offset, selection.length) <= 2 * touched
    assert (np.diff(selection.offset) > 0).all()


def test_a_tile_that_several_boxes_touch_is_read_and_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = 0
    plain = blosc.decompress

    def counted(buffer: np.ndarray, starts: np.ndarray, *args: object) -> None:
        nonlocal decoded
        decoded += len(starts)
        plain(buffer, starts, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(blosc, "decompress", counted)
    packed = packed_of(ct())
    boxes = [(slice(0, 60), slice(0, 40), slice(0, 64)), (slice(10, 70), slice(5, 45), slice(20, 90))] * 2
    boxes_of(packed, boxes)
    assert decoded == len(read(packed).touched(boxes)) == 18


def test_an_index_beyond_the_palette_is_refused() -> None:
    for values in (torch.arange(10.0), torch.arange(10.0) / 7):
        packed = packed_of(ct())
        layout = Layout(**{**vars(packed.layout), "values": 10})
        table = np.concatenate([packed.table.numpy()[: 8 * layout.count], values.view(torch.uint8).numpy()])
        tiles = Tiles(layout, table, len(packed.streams))
        boxes = [(slice(0, 40), slice(0, 40), slice(0, 40))]
        selection = tiles.select(tiles.touched(boxes))
        with pytest.raises(DamagedRecord, match="not in its palette"):
            arrangement = arrange(layout.shape, 4, boxes)
            memory = torch.empty(arrangement.numel)
            unpack_boxes(tiles, selection, fetched(packed, selection), boxes, arrangement, memory)


@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=20))
def test_damaged_streams_that_nobody_compared_raise_or_give_other_voxels(flips: list[tuple[int, int]]) -> None:
    """And write nowhere else."""
    packed = packed_of(ct((1, 40, 40, 40)))
    tiles, boxes = read(packed), [(slice(5, 40), slice(0, 33), slice(8, 40))]
    selection = tiles.select(tiles.touched(boxes))
    buffer = fetched(packed, selection)
    for at, by in flips:
        buffer[int(selection.dest[0]) + at % int(selection.length[0])] ^= by
    arrangement = arrange(packed.layout.shape, 4, boxes)
    memory = torch.full((arrangement.numel,), 77.0)
    with contextlib.suppress(DamagedRecord):
        unpack_boxes(tiles, selection, buffer, boxes, arrangement, memory)
    voxels(memory, arrangement, boxes[0]).fill_(77)
    assert (memory == 77).all()
