"""The settings of the consumer's thread hold for random transforms and batches, and not for what is cached."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.data import DataLoader, Dataset
from monai.transforms import Compose, RandomizableTransform, RandScaleIntensityd, Transform

from monai_gds import GDSDataLoader, GDSDataset

Context = Callable[[], contextlib.AbstractContextManager[Any]]


def settings() -> list[str]:
    """What a transform finds."""
    autocast = torch.is_autocast_enabled("cpu") and str(torch.get_autocast_dtype("cpu"))
    return [str(one) for one in (torch.is_grad_enabled(), autocast, torch.get_default_device())]


class Cached(Transform):  # type: ignore[misc]
    def __call__(self, item: Any) -> Any:
        return {**item, "cached": [*settings(), torch.is_inference_mode_enabled()]}


class Drawn(RandomizableTransform):  # type: ignore[misc]
    def __call__(self, item: Any) -> Any:
        return {**item, "drawn": settings(), "inference": torch.is_inference_mode_enabled()}


ITEMS = [{"image": torch.ones(3)}] * 2


@pytest.fixture
def dataset(tmp_path: Path) -> GDSDataset:
    return GDSDataset(ITEMS, Compose([Cached(), Drawn()]), tmp_path / "cache", "cpu")


CONTEXTS: list[Context] = [
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
    contextlib.nullcontext,
]


def first(items: list[Any]) -> Any:
    return items[0]


@pytest.mark.parametrize("context", CONTEXTS, ids=["no_grad", "inference", "autocast", "none"])
def test_random_transforms_run_as_in_a_loader_without_workers(dataset: GDSDataset, context: Context) -> None:
    held = [*settings(), False]
    with context():
        expected = next(iter(DataLoader(Dataset(ITEMS, Compose([Cached(), Drawn()])), collate_fn=first)))
        for _ in range(2):  # a miss, then a hit
            found = next(iter(GDSDataLoader(dataset, collate_fn=first)))
            assert (found["drawn"], found["inference"]) == (expected["drawn"], expected["inference"])
            assert found["cached"] == held
            dataset.flush()


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(("num_workers", "programs"), [(0, "off"), (1, "off"), (1, "check")])
def test_batches_are_made_in_inference_mode(tmp_path: Path, batch_size: int, num_workers: int, programs: Any) -> None:
    dataset = GDSDataset(ITEMS, Compose([Cached(), RandScaleIntensityd("image", 0.1, prob=1)]), tmp_path, "cpu")
    loader = GDSDataLoader(dataset, num_workers, batch_size=batch_size, programs=programs)
    with torch.inference_mode():
        assert all(batch["image"].is_inference() for batch in loader)
    assert not any(batch["image"].is_inference() for batch in loader)


def test_workers_have_inference_mode_and_compute_what_is_cached_without(dataset: GDSDataset) -> None:
    held = [*settings(), False]
    for _ in range(2):
        with torch.inference_mode():
            found = next(iter(GDSDataLoader(dataset, 1, collate_fn=first)))
        assert found["inference"] and found["cached"] == held


@pytest.mark.parametrize("context", [CONTEXTS[0], CONTEXTS[2]], ids=["no_grad", "autocast"])
def test_workers_have_them_too(dataset: GDSDataset, context: Context) -> None:
    with context():
        expected = settings()
        found = next(iter(GDSDataLoader(dataset, 1, collate_fn=first)))
    assert found["drawn"] == expected


def test_they_are_those_of_iter(dataset: GDSDataset) -> None:
    loader = GDSDataLoader(dataset, collate_fn=first)
    with torch.no_grad():
        batches = iter(loader)
    assert next(batches)["drawn"][0] == "False"
    assert next(batches)["drawn"][0] == "False"


def test_the_default_device_is_that_of_iter_too(dataset: GDSDataset) -> None:
    loader = GDSDataLoader(dataset, collate_fn=first)
    with torch.device("meta"):
        batches = iter(loader)
    found = next(batches)
    assert found["drawn"][2] == "meta"
    assert found["cached"][2] == "cpu"
