"""FedPipeline: what it shares with nobody, and that a failed pipeline is gone before its inputs are."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds.imagenet import pipeline as module
from monai_gds.imagenet.pipeline import FedPipeline, Input, PipelineFailed

fn = pytest.importorskip("nvidia.dali.fn", reason="NVIDIA DALI is not installed on this machine")


def decoding(batch_size: int = 2) -> FedPipeline[int]:
    return FedPipeline(
        {"image": Input(no_copy=True)},
        lambda nodes: {"image": fn.decoders.image(nodes["image"], device="cpu")},
        batch_size=batch_size,
        device=torch.device("cpu"),
        threads=1,
    )


def broken(_: int) -> dict[str, Any]:
    return {"image": [np.zeros(50, np.uint8)]}


def test_a_failed_pipeline_is_gone_when_its_error_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads read the memory that was fed; whoever gets the error may let go of that."""
    made: list[Any] = []
    build = FedPipeline._build

    def noting(self: FedPipeline[Any]) -> Any:
        pipe = build(self)
        made.append(weakref.ref(pipe))
        return pipe

    monkeypatch.setattr(FedPipeline, "_build", noting)
    ours = decoding()
    for _ in range(3):
        with pytest.raises(PipelineFailed) as e:
            list(ours.run(range(5), broken))
        assert e.value.feeds[0] == 0
        assert made[-1]() is None
    assert len(made) == 3


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
def test_no_more_is_taken_from_the_source_than_is_under_way(count: int) -> None:
    taken = []

    def feeds() -> Any:
        for i in range(count):
            taken.append(i)
            yield i

    ours: FedPipeline[int] = FedPipeline(
        {"x": Input()}, lambda nodes: nodes, batch_size=1, device=torch.device("cpu"), threads=1
    )
    for number, (feed, outputs) in enumerate(ours.run(feeds(), lambda i: {"x": np.full((1, 3), i)})):
        assert feed == number == int(outputs["x"][0, 0])  # type: ignore[call-overload]
        assert len(taken) <= number + 1 + module.PREFETCH
    assert len(taken) == count


def test_arrays_that_dali_refuses_leave_it_usable() -> None:
    ours: FedPipeline[int] = FedPipeline(
        {"x": Input()}, lambda nodes: nodes, batch_size=2, device=torch.device("cpu"), threads=1
    )
    with pytest.raises(PipelineFailed, match="object"):
        list(ours.run(range(5), lambda i: {"x": [object() if i == 3 else np.zeros(3)]}))
    assert len(list(ours.run(range(5), lambda _: {"x": [np.zeros(3)]}))) == 5
