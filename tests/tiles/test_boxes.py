"""Where boxes lie in a smaller memory: each voxel has its own place, strides and alignments are the whole tensor's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from monai_gds.tiles.boxes import Box, arrange, last_three, whole_box


def boxes_within(shape: tuple[int, ...]) -> st.SearchStrategy[list[Box]]:
    def along(size: int) -> st.SearchStrategy[slice]:
        ends = st.tuples(st.integers(0, size - 1), st.integers(1, size))
        return ends.map(lambda ab: slice(min(ab[0], ab[1] - 1), max(ab[0] + 1, ab[1])))

    return st.lists(st.tuples(*map(along, last_three(shape))), min_size=1, max_size=6)


def shapes_and_boxes(most: int = 40) -> st.SearchStrategy[tuple[tuple[int, ...], list[Box]]]:
    shapes = st.lists(st.integers(1, most), min_size=1, max_size=3).map(tuple)
    leading = st.lists(st.integers(1, 3), max_size=2).map(tuple)
    both = st.tuples(leading, shapes).map(lambda parts: parts[0] + parts[1] if len(parts[1]) == 3 else parts[1])
    return both.flatmap(lambda shape: st.tuples(st.just(shape), boxes_within(shape)))


def box(*ends: tuple[int, int]) -> Box:
    x, y, z = (slice(*axis) for axis in ends)
    return x, y, z


# Where the last axis is shorter than a cache line, a row that moves runs over several others.
@example(drawn=((5, 16, 1), [box((1, 5), (0, 1), (0, 1)), box((0, 1), (0, 1), (0, 1))]), itemsize=1)
@example(drawn=((6, 40, 12), [box((0, 3), (9, 20), (1, 12)), box((3, 6), (21, 40), (0, 12))]), itemsize=4)
@given(drawn=shapes_and_boxes(), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_every_voxel_has_a_place_of_its_own(drawn: tuple[tuple[int, ...], list[Box]], itemsize: int) -> None:
    shape, boxes = drawn
    found = arrange(shape, itemsize, boxes)
    whole = last_three(shape)
    leading = math.prod(shape) // math.prod(whole)
    owner: dict[int, int] = {}
    numbers = torch.arange(math.prod(shape)).view(leading, *whole)
    for box in boxes:
        there = numbers[(slice(None), *box)]
        size, first = there.shape, found.place(int(there.flatten()[0]))
        assert (first - int(there.flatten()[0])) * itemsize % 64 == 0
        here = torch.as_strided(torch.arange(found.numel), size, numbers.stride(), first)
        for voxel, place in zip(there.flatten().tolist(), here.flatten().tolist(), strict=True):
            assert owner.setdefault(place, voxel) == voxel  # those that boxes share lie in one place
    assert found.numel <= math.prod(shape)
    assert len(set(owner.values())) == len(owner)


def test_crops_of_a_large_volume_take_a_fraction_of_its_memory() -> None:
    corners = [(0, 0, 0), (400, 300, 100), (10, 400, 200), (200, 200, 7)]
    boxes = [(slice(x, x + 96), slice(y, y + 96), slice(z, z + 96)) for x, y, z in corners]
    assert arrange((1, 512, 512, 300), 4, boxes).numel < 512 * 512 * 300 / 5


#: Of a volume in which several crops fit side by side.
WIDE = (16, 20, 320)


def crops_of_wide() -> st.SearchStrategy[list[Box]]:
    """Of two sizes: some share voxels, others do not."""
    corners = st.tuples(*(st.integers(0, n - size) for n, size in zip(WIDE, (8, 6, 40), strict=True)))
    sizes = st.sampled_from([(8, 6, 40), (8, 6, 40), (7, 6, 33)])
    crops = st.tuples(corners, sizes).map(lambda c: box(*((a, a + n) for a, n in zip(*c, strict=True))))
    return st.lists(crops, min_size=1, max_size=6, unique_by=str)


def test_boxes_are_merged_until_none_meet() -> None:
    """The last box meets only the first, and the box around these two meets the second."""
    boxes = [box((0, 20), (0, 20), (0, 20)), box((30, 40), (0, 10), (0, 10)), box((10, 50), (15, 25), (0, 20))]
    found = arrange((100, 100, 100), 4, boxes)
    assert found.groups == (((0, 0, 0), (50, 25, 20)),)
    assert arrange((100, 100, 100), 4, boxes[:2]).groups == (((0, 0, 0), (20, 20, 20)), ((30, 0, 0), (40, 10, 10)))


def test_a_box_of_all_is_the_tensor_itself() -> None:
    for shape in ((5,), (3, 4, 5), (2, 3, 4, 5, 6)):
        found = arrange(shape, 4, [whole_box(shape)])
        assert found.is_whole and found.place(3) == 3
    assert not arrange((3, 4, 5), 4, [(slice(0, 3), slice(0, 4), slice(0, 4))]).is_whole


def test_an_element_outside_of_all_boxes_is_refused() -> None:
    found = arrange((10, 10, 10), 4, [(slice(2, 5), slice(2, 5), slice(2, 5))])
    assert found.place(222) >= 0
    with pytest.raises(ValueError, match="in none of the boxes"):
        found.place(0)
