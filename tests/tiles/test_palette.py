"""Palettes: exact for every bit pattern, and absent where they would not help."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.tiles import palette
from monai_gds.tiles.palette import Palette, find, patterns

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(patterns(one), patterns(other))


def through(found: Palette | None, tensor: torch.Tensor) -> torch.Tensor:
    assert found is not None
    return found.values[found.indices(tensor).to(torch.int64)]


@given(
    dtype=st.sampled_from(DTYPES),
    bits=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=200),
    times=st.integers(1, 700),
)
def test_gives_back_any_bit_pattern(dtype: torch.dtype, bits: list[int], times: int) -> None:
    tensor = torch.tensor(bits).repeat(times).view(torch.uint8).view(dtype)
    if tensor.element_size() == 2 and len(patterns(tensor).unique()) > 256:
        assert find(tensor) is None
    else:
        assert same_bits(through(find(tensor), tensor), tensor)


def test_nans_and_negative_zeros_are_kept() -> None:
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    tensor = torch.cat([torch.tensor([float("nan"), 0.0, -0.0, float("inf"), -1.0]), other_nan]).repeat(50)
    found = find(tensor)
    assert found is not None and len(found.values) == 6
    assert same_bits(through(found, tensor), tensor)


def test_values_rise_so_that_the_background_has_index_0() -> None:
    found = find(torch.tensor([3.0, -1.0, 2.0, -1.0]))
    assert found is not None and found.values.tolist() == [-1.0, 2.0, 3.0]


def test_indices_take_one_byte_up_to_256_values() -> None:
    for count, dtype in ((256, torch.uint8), (257, torch.uint16)):
        found = find(torch.arange(count, dtype=torch.float32))
        assert found is not None and found.index_dtype == dtype


def test_65536_values_make_a_palette_and_65537_do_not() -> None:
    tensor = torch.randperm(65_536).float()
    assert same_bits(through(find(tensor), tensor), tensor)
    assert find(torch.arange(65_537).float()) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(200, dtype=torch.uint8),
        torch.zeros(200, dtype=torch.bool),
        torch.arange(257, dtype=torch.int16),
        torch.zeros(200, dtype=torch.complex64),
        torch.randn(1 << 20),
    ],
    ids=["bytes", "bools", "two bytes, 257 values", "complex", "noise"],
)
def test_none_where_nothing_is_saved(tensor: torch.Tensor) -> None:
    assert find(tensor) is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_values_that_share_a_slot_are_distinguished(dtype: torch.dtype) -> None:
    several = torch.arange(1 << 22, dtype=dtype)
    slots = palette._slots(several)
    crowded = several[slots == slots.bincount().argmax()]
    assert len(crowded) >= 3
    tensor = crowded.repeat(100_000 // len(crowded))
    assert same_bits(through(find(tensor), tensor), tensor)


def test_a_value_that_comes_late_is_found() -> None:
    tensor = torch.zeros(1 << 20)
    tensor[-1] = 7.0
    assert same_bits(through(find(tensor), tensor), tensor)
