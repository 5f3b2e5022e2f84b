"""Palettes: the few different values of a tensor, and an index into them per element. Lossless, bit for bit.

Used by :mod:`monai_gds.tiles.tiles`. Whatever pointwise transforms made of a CT or MRI volume on its native grid, it
holds only as many bit patterns as the scanner wrote: 426 to 2,897 in the volumes that were measured. Indices of one or
two bytes stand for elements of four or eight, and compress better.

Values are compared as bit patterns, so NaNs and -0.0 are kept. On one core of a 2-core machine ``numpy.unique`` did
140 to 180 MB/s of float32, and hashing, as here, 400 to 640.
"""

from __future__ import annotations

import torch

#: Indices are of two bytes at most.
MOST_VALUES = 65_536

#: Elements handled at a time: what a step reads and writes stays in the processor's cache.
_CHUNK = 1 << 16

#: Slots of the hash table, as a power of two.
_SLOT_BITS = 20

#: Odd constants near 2^n divided by the golden ratio (Knuth, The Art of Computer Programming 3, 6.4), as signed
#: numbers, and how far a product is shifted.
_MULTIPLIERS = {torch.int32: (-1640531527, 12), torch.int64: (-7046029254386353131, 44)}


def patterns(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of two, four or eight bytes of a contiguous CPU tensor, as 1-D int32 or int64: a view of four or
    eight bytes."""
    flat = tensor.reshape(-1)
    if tensor.element_size() == 2:
        return flat.view(torch.int16).to(torch.int32)
    return flat.view(torch.int32 if tensor.element_size() == 4 else torch.int64)


class Palette:
    """The different values of a tensor, and where each stands.

    Args:
        values: 1-D CPU tensor of at most 65,536 different values, in the order of their indices.

    Attributes:
        index_dtype: ``torch.uint8`` if indices fit one byte, otherwise ``torch.uint16``.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.index_dtype = torch.uint8 if len(values) <= 256 else torch.uint16
        known = patterns(values)
        self._slots = torch.zeros(1 << _SLOT_BITS, dtype=known.dtype, device="cpu")  # a pattern per slot
        self._ranks = torch.zeros(1 << _SLOT_BITS, dtype=torch.int32, device="cpu")
        slots = _slots(known)
        self._ranks[slots] = torch.arange(len(values), dtype=torch.int32, device="cpu")
        self._slots[slots] = known[self._ranks[slots].to(torch.int64)]  # of several for a slot, torch takes any
        # Values that lost their slot to another are looked up in order. 2,897 values of a million slots lose about 4.
        lost = (self._slots[slots] != known).nonzero().squeeze(1)
        self._lost, order = known[lost].sort()
        self._lost_ranks = lost[order].to(torch.int32)

    def indices(self, tensor: torch.Tensor) -> torch.Tensor:
        """The index of each element, which must be in the palette.

        Args:
            tensor: contiguous CPU tensor of the values' dtype.

        Returns:
            Tensor of the same shape and of :attr:`index_dtype`.
        """
        out = torch.empty(tensor.shape, dtype=self.index_dtype, device="cpu")
        flat = out.view(-1)
        for begin in range(0, len(flat), _CHUNK):
            known = patterns(tensor.view(-1)[begin : begin + _CHUNK])
            slots = _slots(known)
            ranks = self._ranks.index_select(0, slots)
            if len(self._lost):
                lost = (self._slots.index_select(0, slots) != known).nonzero().squeeze(1)
                ranks[lost] = self._lost_ranks[torch.searchsorted(self._lost, known[lost])]
            flat[begin : begin + _CHUNK] = ranks
        return out


def find(tensor: torch.Tensor) -> Palette | None:
    """The palette of a tensor, its values in rising order.

    Args:
        tensor: contiguous CPU tensor.

    Returns:
        The palette, or None if it would save nothing: more than 65,536 values, elements of one byte, or of two bytes
        with more than 256 values.
    """
    if tensor.element_size() not in (2, 4, 8) or tensor.is_complex():
        return None
    most = 256 if tensor.element_size() == 2 else MOST_VALUES
    known = _distinct(tensor.view(-1), most)
    if known is None:
        return None
    if tensor.element_size() == 2:
        known = known.to(torch.int16)
    values = known.view(tensor.dtype)
    # Neighbouring values get neighbouring indices. The smallest, often the background, gets 0.
    order = (values.to(torch.float64) if values.dtype.is_floating_point else values).argsort(stable=True)
    return Palette(values[order])


def _distinct(flat: torch.Tensor, most: int) -> torch.Tensor | None:
    """The different patterns of a 1-D tensor in any order, or None if there are more than ``most``."""
    dtype = patterns(flat[:0]).dtype
    held = torch.zeros(1 << _SLOT_BITS, dtype=dtype, device="cpu")  # the first pattern that came for each slot
    held[0] = 1  # an empty slot holds a pattern of another slot: 0 belongs to slot 0, and 1 does not
    filled = torch.zeros(1 << _SLOT_BITS, dtype=torch.bool, device="cpu")
    lost = torch.empty(0, dtype=dtype, device="cpu")  # patterns whose slot holds another
    for begin in range(0, len(flat), _CHUNK):
        known = patterns(flat[begin : begin + _CHUNK])
        slots = _slots(known)
        missed = held.index_select(0, slots) != known
        if not missed.any():
            continue
        new = missed & ~filled.index_select(0, slots)
        held[slots[new]] = known[new]
        filled[slots[new]] = True
        missed &= held.index_select(0, slots) != known
        lost = torch.unique(torch.cat([lost, known[missed]]))
        if int(filled.count_nonzero()) + len(lost) > most:
            return None
    return torch.cat([held[filled], lost])


def _slots(known: torch.Tensor) -> torch.Tensor:
    """The slot of each pattern. Multiplication wraps around; its upper bits depend on all bits of the pattern."""
    multiplier, shift = _MULTIPLIERS[known.dtype]
    return (known * multiplier).bitwise_right_shift_(shift).bitwise_and_((1 << _SLOT_BITS) - 1)
