"""Programs as plain values: what of an item arrives in another process."""

from __future__ import annotations

import pytest
import torch
from monai.data import MetaTensor

from monai_gds.programs.program import pack, unpack


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(4, dtype=torch.float64), torch.tensor(2.0), torch.tensor([True, False]), torch.empty(0, 3),
        torch.arange(6).view(2, 3).T, torch.arange(6.0)[2:5], torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([1j, 2]).conj(), torch.tensor([1j, 2]).conj().imag, torch.nn.Parameter(torch.ones(2), False),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)  # fmt: skip
def test_metadata_arrive_as_they_are(value: torch.Tensor) -> None:
    found = unpack(
        pack({"first": value, "again": value, "part": value[:1] if value.ndim else value}, lambda _: None), ()
    )
    assert type(found["first"]) is type(value) and found["again"] is found["first"]
    assert torch.equal(found["first"], value) and found["first"].dtype == value.dtype
    if value.is_conj() or value.is_neg():
        return
    assert found["first"].stride() == value.stride()
    if value.numel():
        found["part"].add_(1) if value.dtype != torch.bool else found["part"].logical_not_()
        assert not torch.equal(found["first"], value), "they share memory as before"


def test_tensors_over_the_same_memory_stay_two() -> None:
    plain, voxels = torch.zeros(2), torch.ones(2)
    meta = MetaTensor(plain, meta={"n": 1})
    holes = iter(range(2))
    found = unpack(pack([meta, plain], lambda t: next(holes) if t.ndim == 1 else None), [voxels, voxels])
    assert type(found[0]) is MetaTensor and found[0].meta["n"] == 1
    assert type(found[1]) is torch.Tensor and found[1].data_ptr() == found[0].data_ptr()
