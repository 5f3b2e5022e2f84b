"""Boxes of voxels: which tiles they touch, and where they lie in memory that is smaller than the whole tensor.

Used by :mod:`monai_gds.tiles.tiles` and :mod:`monai_gds.records.reader`. Arithmetic only, no voxels.

A crop of a whole volume is a view with the volume's strides, and a partial read gives the same strides, since sums over
a view may differ in their last bits from sums over a contiguous copy. Only the place of the first voxel differs: boxes
that lie far apart in the tensor are moved together. So their memory is a fraction of the tensor's, much the same at
every read, and used again. The page faults of fresh memory took ten times as long as filling it (four crops of 96³ out
of 512 x 512 x 300 float32: 27 ms of faults, 3 ms of copying).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

#: Voxels over the last three axes, of every leading index; within the shape, of step 1.
Box: TypeAlias = "tuple[slice, slice, slice]"

#: Voxels move by multiples of this many bytes, a cache line: libraries may calculate otherwise on other alignments.
_LINE = 64


def last_three(shape: Sequence[int]) -> tuple[int, int, int]:
    """The last three axes; a shape of fewer counts as if it began with 1."""
    x, y, z = (1, 1, 1, *shape)[-3:]
    return x, y, z


def whole_box(shape: Sequence[int]) -> Box:
    """The box of all voxels."""
    x, y, z = last_three(shape)
    return slice(0, x), slice(0, y), slice(0, z)


class _Corners(NamedTuple):
    """The first voxel of a box along three axes, and the one after its last."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def of(cls, box: Box) -> _Corners:
        return cls(tuple(axis.start for axis in box), tuple(axis.stop for axis in box))

    def meets(self, other: _Corners) -> bool:
        ranges = zip(self.begin, self.end, other.begin, other.end, strict=True)
        return all(a < d and c < b for a, b, c, d in ranges)

    def around(self, other: _Corners) -> _Corners:
        return _Corners(tuple(map(min, self.begin, other.begin)), tuple(map(max, self.end, other.end)))

    def holds(self, voxel: tuple[int, ...]) -> bool:
        return all(a <= v < b for a, v, b in zip(self.begin, voxel, self.end, strict=True))


class Arrangement(NamedTuple):
    """Where boxes lie in a flat memory.

    Attributes:
        shape: the tensor's shape.
        numel: how many elements the memory has.
        groups: boxes that share no voxel, each around boxes that do.
        moves: elements by which the voxels of each group move.
    """

    shape: tuple[int, ...]
    numel: int
    groups: tuple[_Corners, ...]
    moves: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the memory is the tensor's own, from the first element to the last."""
        return self.moves == (0,) and self.numel == math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Elements from a voxel to the next along each of the last three axes."""
        _, y, z = last_three(self.shape)
        return y * z, z, 1

    def place(self, offset: int) -> int:
        """The offset of an element in the memory, given its offset in the contiguous tensor.

        Raises:
            ValueError: it is in no box.
        """
        x, y, z = last_three(self.shape)
        plane, last = divmod(offset, z)
        voxel = (plane // y % x, plane % y, last)
        for group, move in zip(self.groups, self.moves, strict=True):
            if group.holds(voxel):
                return offset + move
        raise ValueError(f"element {offset} of a tensor of shape {self.shape} is in none of the boxes that were read")

    def place_of(self, box: Box) -> int:
        """Where the first voxel of one of the boxes lies."""
        return self.place(_dot(self.strides, [axis.start for axis in box]))


def arrange(shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box]) -> Arrangement:
    """Moves boxes together: side by side along the last axis, then along the one before, then along the first.

    Args:
        shape: the tensor's shape.
        itemsize: how many bytes an element has.
        boxes: the boxes, none of which is empty.
    """
    groups = _merged([_Corners.of(box) for box in boxes])
    whole = last_three(shape)
    leading = math.prod(shape) // math.prod(whole)
    places, depth = _shelves(whole, max(1, _LINE // itemsize), groups)
    steps = (whole[1] * whole[2], whole[2], 1)
    firsts = [_dot(steps, group.begin) for group in groups]
    spans = [_dot(steps, [b - a - 1 for a, b in zip(*group, strict=True)]) + 1 for group in groups]
    numel = max(place + span for place, span in zip(places, spans, strict=True))
    numel += (leading - 1) * math.prod(whole)
    if numel > math.prod(shape) or (leading > 1 and depth > whole[0]):
        return Arrangement(shape, math.prod(shape), tuple(groups), (0,) * len(groups))
    return Arrangement(shape, numel, tuple(groups), tuple(p - f for p, f in zip(places, firsts, strict=True)))


def _dot(steps: Sequence[int], voxel: Sequence[int]) -> int:
    return sum(step * v for step, v in zip(steps, voxel, strict=True))


def _merged(boxes: list[_Corners]) -> list[_Corners]:
    """Merges boxes that share voxels into boxes around them, until none share any."""
    groups: list[_Corners] = []
    for box in boxes:
        while shared := [group for group in groups if group.meets(box)]:
            groups = [group for group in groups if not group.meets(box)]
            for group in shared:
                box = box.around(group)
        groups.append(box)
    return groups


def _shelves(whole: tuple[int, int, int], align: int, groups: Sequence[_Corners]) -> tuple[list[int], int]:
    """Where the first voxel of each group goes, and how many planes all groups take.

    A group moves by a multiple of ``align`` elements, so its rows may run past the end of the last axis, by fewer than
    ``align`` elements. The row or rows, or the plane, that they run into are then left free.
    """
    _, rows, row = whole
    places = []
    plane = shelf = cursor = height = depth = 0  # the shelf begins at row `shelf` of plane `plane`
    for group in groups:
        deep, high, wide = (b - a for a, b in zip(*group, strict=True))
        first = _dot((rows * row, row, 1), group.begin)
        for _ in range(3):  # on this shelf, on the next, or on the first shelf after all planes so far
            begin = (plane * rows + shelf) * row
            at = cursor + (first - begin - cursor) % align
            extra_rows = (at + wide - 1) // row
            if cursor and extra_rows:
                shelf, cursor, height = shelf + height, 0, 0
            elif shelf and shelf + high + extra_rows > rows:
                plane, shelf, cursor, height, depth = plane + depth, 0, 0, 0, 0
            else:
                break
        places.append(begin + at)
        cursor = at + wide
        height = max(height, high + extra_rows)
        depth = max(depth, deep + (shelf + high + extra_rows - 1) // rows)
    return places, plane + depth
