"""Memory on loan: given back once, when nothing shares it any more."""

from __future__ import annotations

import gc

import pytest
import torch

from monai_gds.lease import lend


def test_it_comes_back_when_the_last_over_it_is_gone() -> None:
    memory = torch.arange(200, dtype=torch.uint8)
    back: list[str] = []
    lent = lend(memory, 100, lambda: back.append("back"))
    assert (lent.numel(), lent.untyped_storage().nbytes(), lent.data_ptr()) == (100, 100, memory.data_ptr())
    row, array = lent.view(10, 10)[3], lent.numpy()
    del lent
    assert row.tolist() == list(range(30, 40))
    del row
    gc.collect()
    assert back == []
    del array
    assert back == ["back"]


def test_the_memory_lives_as_long_as_what_was_lent() -> None:
    lent = lend(torch.full((5 << 20,), 7, dtype=torch.uint8), 5 << 20, lambda: None)
    others = [torch.zeros(5 << 20, dtype=torch.uint8) for _ in range(3)]
    assert bool((lent == 7).all())
    assert not any(other.any() for other in others)
    with pytest.raises(RuntimeError, match="resiz"):
        lent.resize_(6 << 20)
