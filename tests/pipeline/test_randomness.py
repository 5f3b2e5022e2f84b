"""Random generators: their states are all there is to them, plain values, and read without a trace."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch

from monai_gds.pipeline import randomness
from monai_gds.pipeline.randomness import put_back, put_state, slots, state_of, states_at

MAKE: dict[str, Any] = {
    "RandomState": lambda: np.random.RandomState(3),
    "RandomState over PCG64": lambda: np.random.RandomState(np.random.PCG64(3)),
    **{f"Generator over {kind.__name__}": lambda kind=kind: np.random.Generator(kind(3)) for kind in (
        np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64
    )},
    "Random": lambda: random.Random(3),
    "torch": lambda: torch.Generator().manual_seed(3),
}  # fmt: skip


def draw(generator: Any) -> list[float]:
    """One number in a normal distribution, of which some generators make two at once, and one that is not."""
    if isinstance(generator, torch.Generator):
        return [float(torch.randn((), generator=generator)), float(torch.rand((), generator=generator))]
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1), generator.random()]
    return [float(generator.normal()), float(generator.uniform())]


@pytest.mark.parametrize("kind", MAKE)
def test_a_generator_goes_on_from_a_saved_state(kind: str) -> None:
    generator = MAKE[kind]()
    for _ in range(700):
        state = state_of(generator)
        assert state == state_of(generator)
        expected = [draw(generator) for _ in range(2)]
        assert state != state_of(generator)
        other = MAKE[kind]()
        put_state(other, state)
        assert [draw(other) for _ in range(2)] == expected
        assert state_of(other) == state_of(generator)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


@pytest.mark.parametrize("before", [0, 1], ids=["keeps none", "keeps another"])
def test_the_number_that_normal_keeps_is_put_back(before: int) -> None:
    generator, other = np.random.RandomState(5), np.random.RandomState(7)
    generator.normal()
    other.normal(size=before)
    state = state_of(generator)
    put_state(other, state)
    assert state_of(other) == state
    assert other.normal(size=3).tolist() == generator.normal(size=3).tolist()


def test_what_is_read_from_memory_is_what_numpy_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert randomness._kept_at() is not None, "it is read from memory here"
    generator = np.random.RandomState(5)
    for i in range(2000):
        generator.normal(size=i % 3)
        generator.rand(i % 5)
        read = state_of(generator)
        with monkeypatch.context() as patch:
            patch.setattr(randomness, "_kept_at", lambda: None)
            assert state_of(generator) == read


def test_places_are_those_of_the_pipeline() -> None:
    shared = np.random.RandomState(1)
    inner = mt.Compose([mt.RandGaussianNoised("a"), lambda x: x])
    chosen = mt.OneOf([mt.RandFlipd("a"), inner])
    pipeline = mt.Compose([mt.EnsureTyped("a"), mt.RandAffined("a").set_random_state(1), chosen])
    found = slots(pipeline)
    assert found.keys() == slots(copy.deepcopy(pipeline)).keys()
    assert found.keys() == {
        "R",
        "transforms.1.R",
        "transforms.1.rand_affine.R",
        "transforms.1.rand_affine.rand_affine_grid.R",
        "transforms.2.R",
        "transforms.2.transforms.0.R",
        "transforms.2.transforms.1.R",
        "transforms.2.transforms.1.transforms.0.R",
        "transforms.2.transforms.1.transforms.0.rand_gaussian_noise.R",
    }
    pipeline.transforms[1].set_random_state(state=shared)
    assert found["transforms.1.R"].get() is shared
    assert slots(mt.RandFlipd("a"))["R"].get() is mt.Randomizable.R, "unseeded"
    assert slots(lambda x: x) == {}


def test_a_seed_that_is_set_meanwhile_is_what_is_there() -> None:
    pipeline = mt.Compose([mt.RandFlipd("a")]).set_random_state(1)
    found = slots(pipeline)
    before = states_at(found)
    pipeline.set_random_state(2)
    assert states_at(found) != before
    put_back(found, before)
    assert states_at(slots(pipeline)) == before
    put_back(found, {"nowhere": 1})
    assert states_at(found) == before
