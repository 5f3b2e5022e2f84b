"""FedPipeline: what it shares with nobody, and that a failed pipeline is gone before its inputs are."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds import limits
from monai_gds.imagenet.dali import pipeline as module
from monai_gds.imagenet.dali.pipeline import FedPipeline, PipelineFailed, execution

fn = pytest.importorskip("nvidia.dali.fn", reason="NVIDIA DALI is not installed on this machine")


def decoding(batch_size: int = 2) -> FedPipeline[int]:
    return FedPipeline(
        {"image": {"no_copy": True}},
        lambda nodes: {"image": fn.decoders.image(nodes["image"], device="cpu")},
        batch_size=batch_size,
        device=torch.device("cpu"),
        execution=execution(num_threads=1),
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
        {"x": {}},
        lambda nodes: nodes,
        batch_size=1,
        device=torch.device("cpu"),
        execution=execution(num_threads=1),
    )
    for number, (feed, outputs) in enumerate(ours.run(feeds(), lambda i: {"x": np.full((1, 3), i)})):
        assert feed == number == int(outputs["x"][0, 0])  # type: ignore[call-overload]
        assert len(taken) == min(count, number + 1 + limits.DALI_PREFETCH_BATCHES)


def test_the_next_batch_is_fed_before_anything_is_done_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a GPU would have one batch less to work on while Python turns outputs into tensors."""
    taken: list[int] = []
    taken_when_converted: list[int] = []
    convert = module.to_torch

    def noting(outputs: Any) -> Any:
        taken_when_converted.append(len(taken))
        return convert(outputs)

    monkeypatch.setattr(module, "to_torch", noting)
    ours: FedPipeline[int] = FedPipeline(
        {"x": {}},
        lambda nodes: nodes,
        batch_size=1,
        device=torch.device("cpu"),
        execution=execution(num_threads=1),
    )
    list(ours.run((taken.append(i) or i for i in range(5)), lambda i: {"x": np.full((1, 3), i)}))  # type: ignore[func-returns-value]
    assert taken_when_converted == [3, 4, 5, 5, 5]


def to_chw(nodes: dict[str, Any]) -> dict[str, Any]:
    return {"x": fn.crop_mirror_normalize(nodes["x"], output_layout="CHW")}


@pytest.mark.parametrize(
    ("graph", "layout", "cause", "message"),
    [
        (to_chw, "XYZ", ValueError, "XYZ"),
        (lambda nodes: {"x": fn.resize(nodes["x"], sizes=(2, 2))}, "HWC", KeyError, "sizes"),
        (lambda nodes: {"x": nodes["x"] + "one"}, "HWC", TypeError, "got <class 'str'>"),
        (lambda nodes: {"x": fn.reshape(nodes["x"], shape=[7, 7])}, "HWC", RuntimeError, "7"),
    ],
)
def test_whatever_dali_raises_is_a_failed_pipeline(graph: Any, layout: str, cause: type, message: str) -> None:
    """When it is built, and when it runs; with what DALI raised as the cause."""
    ours: FedPipeline[int] = FedPipeline(
        {"x": {"layout": layout}}, graph, batch_size=2, device=torch.device("cpu"), execution=execution(num_threads=1)
    )
    for _ in range(2):
        with pytest.raises(PipelineFailed, match=message) as e:
            list(ours.run(range(5), lambda _: {"x": [np.zeros((4, 4, 3), np.uint8)]}))
        assert type(e.value.__cause__) is cause


def test_errors_in_the_users_function_stay_as_they_are() -> None:
    ours: FedPipeline[int] = FedPipeline(
        {"x": {}},
        lambda nodes: {"x": nodes["y"]},
        batch_size=2,
        device=torch.device("cpu"),
        execution=execution(num_threads=1),
    )
    with pytest.raises(KeyError, match="y"):
        list(ours.run(range(5), lambda _: {"x": [np.zeros(3)]}))


def test_arrays_that_dali_refuses_leave_it_usable() -> None:
    ours: FedPipeline[int] = FedPipeline(
        {"x": {}},
        lambda nodes: nodes,
        batch_size=2,
        device=torch.device("cpu"),
        execution=execution(num_threads=1),
    )
    seen: list[int] = []  # what came before the error
    with pytest.raises(PipelineFailed, match="object") as e:
        seen.extend(feed for feed, _ in ours.run(range(5), lambda i: {"x": [object() if i == 3 else np.zeros(3)]}))
    assert seen == [0, 1, 2]
    assert e.value.feeds == [3]
    assert len(list(ours.run(range(5), lambda _: {"x": [np.zeros(3)]}))) == 5
