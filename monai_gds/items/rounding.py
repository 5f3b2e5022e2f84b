"""Rounding: fewer bits of mantissa in large tensors, which then compress better. Lossy, and part of the key.

Used by the dataset between the transforms and the item tree, so an item that was just computed has the values that its
record has. Which tensors are rounded depends on their type and size alone, never on how a record stores them.
"""

from __future__ import annotations

import torch

#: Smaller tensors keep all bits: points, spacings and weights are small, and not worth compressing. A change of this
#: number changes items, so it needs another name of the setting in the key.
ROUNDED_BYTES = 1 << 20

#: Elements handled at a time: what a step reads and writes stays in the processor's cache.
_CHUNK = 1 << 16

#: Real dtype -> the dtype of its bit patterns, the bits of its mantissa, and of its exponent, as a pattern.
_FORMATS = {
    torch.float32: (torch.int32, 23, 0x7F80_0000),
    torch.float64: (torch.int64, 52, 0x7FF0_0000_0000_0000),
}

#: Most bits that can be asked for: float32 has one more.
_MOST = 22


def check_bits(bits: int | None) -> None:
    """Raises ValueError for a number of bits that float32 cannot be rounded to."""
    if bits is not None and (type(bits) is not int or not 1 <= bits <= _MOST):
        raise ValueError(f"mantissa_bits={bits!r}: use 1 to {_MOST} of float32's 23 bits, or None to keep them all")


def rounded(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounds the elements of a tensor to ``bits`` bits of mantissa, ties to even.

    Args:
        tensor: contiguous, on any device; not changed.
        bits: 1 to 22.

    Returns:
        A new tensor of the same dtype, shape and device; or the same one, if it is smaller than
        :data:`ROUNDED_BYTES` or neither float32, float64, nor complex numbers of these. A normal number changes by at
        most 2^-(bits + 1) of itself (one that would become infinite, by 2^-bits). NaN, infinities and the sign of zero
        are kept.

    Example:
        >>> values = torch.full((1 << 18,), 1.2345)
        >>> rounded(values, 7)[0].item()
        1.234375
    """
    if tensor.nbytes < ROUNDED_BYTES:
        return tensor
    if tensor.is_complex() and tensor.dtype.to_real() in _FORMATS:
        return torch.view_as_complex(rounded(torch.view_as_real(tensor), bits))
    if tensor.dtype not in _FORMATS:
        return tensor
    integer, mantissa, exponent = _FORMATS[tensor.dtype]
    out = torch.empty_like(tensor)
    patterns, results = tensor.view(-1).view(integer), out.view(-1).view(integer)
    drop = mantissa - bits
    for begin in range(0, len(patterns), _CHUNK):
        given = patterns[begin : begin + _CHUNK]
        lower = given & -(1 << drop)
        nearest = given + ((given >> drop) & 1) + ((1 << (drop - 1)) - 1)
        nearest &= -(1 << drop)
        kept = torch.where((nearest & exponent) == exponent, lower, nearest)  # the largest numbers stay finite
        results[begin : begin + _CHUNK] = torch.where((given & exponent) == exponent, given, kept)
    return out
