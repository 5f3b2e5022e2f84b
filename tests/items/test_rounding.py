"""Rounding to fewer bits of mantissa: what is lost, and what never is."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.items.rounding import ROUNDED_BYTES, check_bits, rounded
from monai_gds.tiles import palette

FORMATS = {torch.float32: (23, 8), torch.float64: (52, 11)}


def large(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that is large enough, which begins with these values."""
    tensor = torch.zeros(ROUNDED_BYTES // dtype.itemsize, dtype=dtype)
    tensor[: len(values)] = torch.tensor(values, dtype=dtype)
    return tensor


def by_definition(value: float, bits: int, dtype: torch.dtype) -> float:
    """The nearest number with so many bits of mantissa, ties to even, by exact arithmetic."""
    if math.isnan(value) or math.isinf(value) or value == 0:
        return value
    _, exponent_bits = FORMATS[dtype]
    lowest = 2 - 2 ** (exponent_bits - 1)  # exponent of the smallest normal number
    exponent = max(math.frexp(value)[1] - 1, lowest)
    step = Fraction(2) ** (exponent - bits)
    found = round(Fraction(value) / step) * step
    most = torch.finfo(dtype).max
    if abs(found) > Fraction(most):
        return math.copysign(float(int(abs(Fraction(value)) / step) * step), value)
    return math.copysign(float(found), value)


@pytest.mark.parametrize("dtype", FORMATS)
@given(patterns=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=50), bits=st.integers(1, 22))
def test_each_value_is_rounded_to_the_nearest(dtype: torch.dtype, patterns: list[int], bits: int) -> None:
    numpy = np.dtype(str(dtype).removeprefix("torch."))
    values = np.array(patterns, np.uint64).view(numpy)
    values = values[~np.isnan(values)].tolist()
    got = rounded(large(values, dtype), bits)[: len(values)].tolist()
    wanted = [by_definition(value, bits, dtype) for value in values]
    assert got == wanted
    assert [math.copysign(1, a) for a in got] == [math.copysign(1, b) for b in wanted]


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_error_is_what_the_documentation_says(dtype: torch.dtype) -> None:
    values = torch.randn(1 << 18, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for bits in (1, 7, 13, 22):
        error = ((rounded(values, bits) - values) / values).abs().max().item()
        assert 2 ** -(bits + 3) < error <= 2 ** -(bits + 1)


@pytest.mark.parametrize("dtype", FORMATS)
def test_nothing_becomes_infinite_or_a_number(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, info.max, info.min, info.tiny, info.tiny / 8]
    for bits in (1, 22):
        got = rounded(large(special, dtype), bits)[: len(special)]
        assert got[:3].tolist()[1:] == [math.inf, -math.inf] and bool(got[0].isnan())
        assert got[3:5].tolist() == [0, 0] and got[3:5].signbit().tolist() == [False, True]
        assert bool(got[5:].isfinite().all())


def test_nans_keep_their_bits() -> None:
    patterns = torch.tensor([0x7FC0_0001, 0x7F80_0001, 0x7FFF_FFFF, -1, -0x7F_FFFF], dtype=torch.int32)
    values = large([], torch.float32)
    values[:5] = patterns.view(torch.float32)
    assert torch.equal(rounded(values, 5)[:5].view(torch.int32), patterns)


def test_complex_numbers_are_rounded_by_parts() -> None:
    values = torch.randn(1 << 17, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.view_as_real(rounded(values, 9)), rounded(torch.view_as_real(values), 9))


@pytest.mark.parametrize(
    "values",
    [
        torch.full(((1 << 18) - 1,), 0.1),
        torch.arange(1 << 18, dtype=torch.int64),
        torch.full((1 << 20,), 0.1, dtype=torch.float16),
        torch.full((1 << 20,), 0.1, dtype=torch.bfloat16),
        torch.ones(1 << 20, dtype=torch.bool),
        torch.empty(0),
    ],
    ids=lambda values: f"{values.numel()} {values.dtype}",
)
def test_other_tensors_are_left_as_they_are(values: torch.Tensor) -> None:
    assert rounded(values, 3) is values


def test_the_callers_tensor_is_not_changed_and_the_shape_is_kept() -> None:
    values = torch.full((2, 300, 500), 0.1)
    got = rounded(values, 5)
    assert bool((values == 0.1).all()) and got.shape == values.shape and got.is_contiguous()
    assert got.unique().tolist() == [float(np.float32(by_definition(float(np.float32(0.1)), 5, torch.float32)))]


def test_fewer_bits_leave_few_values() -> None:
    values = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0)) + 1
    assert palette.find(values) is None
    found = palette.find(rounded(values, 7))
    assert found is not None and len(found.values) == 129


@pytest.mark.parametrize("bits", [0, 23, -1, 13.0, True, "13"])
def test_a_number_of_bits_that_makes_no_sense(bits: object) -> None:
    with pytest.raises(ValueError, match=r"mantissa_bits=.*1 to 22"):
        check_bits(bits)  # type: ignore[arg-type]
